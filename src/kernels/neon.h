/* kernels/neon.h: what the NEON files share: small vector helpers that repeat the definitions of
 * kernels.h one for one, and the entries that matmul_neon.c puts into the table.
 *
 * Internal to kernels/, included by *_neon.c only. The set asks for dotprod and i8mm, and for
 * nothing more: half floats are only converted, which every 64-bit ARM can.
 */
#ifndef RF_KERNELS_NEON_H
#define RF_KERNELS_NEON_H

#include "kernels/act.h"
#include "kernels/matmul_scalar.h"
#include "kernels/quant.h"
#include "kernels/vector_scalar.h"

#include <arm_neon.h>

#define RF_INLINE static inline __attribute__((always_inline))

/* Before a loop whose counter picks registers or immediates: unrolled to be fast, not to be right.
 */
#define RF_UNROLL _Pragma("GCC unroll 16")

/* Loads stay on their side of it: gcc would mix the parts of a tile and spill its accumulators. */
#define RF_KEEP_ORDER() __asm__ volatile("" ::: "memory")

/* Lanes 4, 2, 1 apart. */
RF_INLINE float rf_sum_lanes_8_neon(float32x4_t low, float32x4_t high)
{
    const float32x4_t a = vaddq_f32(low, high);
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

/* rf_exp_one of quant.h, operation for operation. */
RF_INLINE float32x4_t rf_exp_neon(float32x4_t x)
{
    const float32x4_t round = vdupq_n_f32(RF_EXP_ROUND), one = vdupq_n_f32(1.0f);
    x = vmaxq_f32(x, vdupq_n_f32(RF_EXP_LOW)); /* a NaN stays one in both */
    x = vminq_f32(x, vdupq_n_f32(RF_EXP_HIGH));
    const float32x4_t shifted = vfmaq_f32(round, x, vdupq_n_f32(RF_EXP_LOG2E));
    const float32x4_t n = vsubq_f32(shifted, round);
    float32x4_t r = vfmaq_f32(x, n, vdupq_n_f32(-RF_EXP_LN2_HIGH));
    r = vfmaq_f32(r, n, vdupq_n_f32(-RF_EXP_LN2_LOW));
    float32x4_t p = vfmaq_f32(vdupq_n_f32(RF_EXP_C6), vdupq_n_f32(RF_EXP_C7), r);
    p = vfmaq_f32(vdupq_n_f32(RF_EXP_C5), p, r);
    p = vfmaq_f32(vdupq_n_f32(RF_EXP_C4), p, r);
    p = vfmaq_f32(vdupq_n_f32(RF_EXP_C3), p, r);
    p = vfmaq_f32(vdupq_n_f32(RF_EXP_C2), p, r);
    p = vfmaq_f32(one, p, r);
    p = vfmaq_f32(one, p, r);
    const int32x4_t i = vsubq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(0x4B400000));
    const int32x4_t half = vshrq_n_s32(i, 1), bias = vdupq_n_s32(127);
    const int32x4_t low = vshlq_n_s32(vaddq_s32(half, bias), 23);
    const int32x4_t high = vshlq_n_s32(vaddq_s32(vsubq_s32(i, half), bias), 23);
    return vmulq_f32(vmulq_f32(p, vreinterpretq_f32_s32(low)), vreinterpretq_f32_s32(high));
}

/* ---- shapes ------------------------------------------------------------------------------ */

/* How a fold's integers come about; constants of the tiles. */
typedef enum rf_shape_kind {
    RF_SHAPE_PLAIN, /* blocks of 32: codes alone */
    RF_SHAPE_SUB32, /* blocks of 256: codes times the scale of each 32 */
    RF_SHAPE_SUB16  /* or of each 16 */
} rf_shape_kind;

typedef struct rf_shape {
    const rf_quant *quant;
    rf_shape_kind kind;
    uint32_t folds;     /* of a block */
    uint32_t min_steps; /* eights of minimums of a fold; 0 for blocks of 32 and without minimums */
} rf_shape;

/* panel_neon.c: the shape of a format; false when it has none, and the scalar matmul serves it. */
bool rf_shape_of(rf_format format, rf_shape *shape);

/* ---- panels and pairs -------------------------------------------------------------------- */

/* Eight rows, two by two as smmla reads them; of each pair of rows scales lie as s0 s1 s0 s1. */
#define RF_EIGHTS 4u /* panels in scratch */
typedef struct rf_eight_rows {
    int8_t *codes;  /* [k / 8][4 pairs][2 rows][8] */
    int32_t *scale; /* [sub-blocks][4 pairs][4] */
    float *d;       /* [blocks][4 pairs][4] */
    float *min_d;   /* the same */
    int8_t *mins;   /* [folds][min_steps][4 pairs][2 rows][8], zeros outside the fold */
} rf_eight_rows;

/* Two tokens; what they have one of each lies as t0 t0 t1 t1. */
#define RF_PAIRS 4u /* in scratch at a time: their codes and a panel's fit the first cache */
typedef struct rf_pair {
    uint8_t *codes;      /* int8: [k / 8][2 tokens][8]; int16: [k / 16][high, low][2][2 tokens][8],
                            the value being 256 * high (signed) + low (unsigned) */
    int32_t *multiplier; /* int8 [k / 32][4] */
    float *scale;        /* [blocks][4] */
    float *sums;         /* blocks of 32 with minimums: [blocks][4] */
    uint8_t *sum_bytes;  /* blocks of 256 with minimums: sums of the sub-blocks by their low, mid
                            and high byte: [blocks][min steps of a block][3][2 tokens][8] */
} rf_pair;

/* Places of both in the scratch of a worker; the first free byte. */
uint8_t *rf_place_rows(rf_eight_rows *rows, const rf_shape *shape, uint32_t k, uint8_t *at);
uint8_t *rf_place_pair(rf_pair *pair, const rf_shape *shape, const rf_act_layout *layout,
                       uint8_t *at);
/* Rows [row, row + 8); those from last on repeat the row before it, and are dropped later. */
void rf_fill_rows(const rf_eight_rows *rows, const rf_shape *shape, const rf_matmul *job,
                  uint32_t row, uint32_t last);
/* Tokens t and u. */
void rf_fill_pair(const rf_pair *pair, const rf_shape *shape, const rf_matmul *job, uint32_t t,
                  uint32_t u);

/* ---- rows of dots ------------------------------------------------------------------------ */

/* dot_neon.c: rows one by one, straight from the packed bytes, for 1 to RF_DOT_TOKENS tokens.
 * Instructions for 8 rows x 256 of q4_K, counted in what gcc 12 made: two tokens 1490 here and 1610
 * by a panel, its filling included (int16: 2010, 1810); three 2460 and 2010 (3220, 2410). */
#define RF_DOT_TOKENS 2u
void rf_dot_neon(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch);

/* ---- entries ----------------------------------------------------------------------------- */

void rf_matmul_float_neon(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                          void *scratch);
void rf_pack_int16_neon(const rf_act_layout *layout, const float *x, void *packed);
void rf_pack_int8_neon(const rf_act_layout *layout, const float *x, void *packed);
void rf_attend_neon(const rf_attend *job);
void rf_vector_neon(rf_kernels *kernels);

#endif
