/* kernels/tile_avx2.h: how sixteen rows of weights and four tokens lie for the tiles of
 * matmul_avx2.c.
 *
 * A panel is sixteen rows with a record for each block of the format. Rows are lanes of 32 bits: a
 * lane has four consecutive codes (bytes, for int8 activations) or two weights (int16 with scales
 * folded in, for int16 activations):
 *
 *   codes    [block / 4][16 rows][4] u8, or [block / 2][16 rows][2] i16
 *   scales   [block / sub][16 rows][2] i16, the same value twice    bytes of K formats
 *   mins     [block / min_step / 2][16 rows][2] i16, 16 * code, then
 *            [block / min_step / 4][16 rows][4] u8, the code         K formats with minimums
 *   scale    [16 rows] f32
 *   min      [16 rows] f32                                           formats with minimums
 *
 * The sides of a tile are what its four tokens have beside their codes, a record for each block:
 *
 *   scale    [4] f32
 *   multipliers  [block / 32][4] i32                                 bytes of K formats
 *   starts   [block / sub][4][2] i16, -offset * (sums of k 0, 1 of every four; of k 2, 3)
 *                                                                    bytes of K formats, offset
 *   fixes    [4] i32, -offset * sum                                  bytes of blocks of 32, offset
 *   sums     [block / min_step / 2][4][2] i16, sum / 16, then
 *            [block / min_step / 4][4][4] u8, sum mod 16             K formats with minimums
 *            or [4] f32                                              blocks of 32 with minimums
 *
 * Internal to kernels/, included by *_avx2.c only.
 */
#ifndef RF_KERNELS_TILE_AVX2_H
#define RF_KERNELS_TILE_AVX2_H

#include "kernels/avx2.h"

#define RF_PANEL_ROWS  16u
#define RF_TILE_TOKENS 4u

typedef struct rf_shape {
    uint32_t block, fold, min_step; /* as in rf_quant */
    uint32_t sub;                   /* bytes: weights that share an integer scale */
    uint32_t steps;                 /* of four k whose products 16 bits add up; 0: int16 weights */
    uint32_t offset;                /* bytes: code - offset is the weight */
    bool mixed;                     /* int16 weights: the codes of a tile's tokens lie together */
} rf_shape;

/* Why steps fit. A lane of 16 bits gets two products a step, each at most 127 * |code|; where the
 * sum begins at a start, only its end has to fit:
 *   q4_0, q4_1, q4_K   8 steps of codes <= 15     127 * 16 * 15 = 30,480
 *   q5_0, q5_1, q5_K   4                    31    127 *  8 * 31 = 31,496
 *   q2_K               4                     3    127 *  8 *  3
 *   q3_K               4 of |code - 4| <= 4       127 *  8 *  4
 *   q6_K               4 of |code - 32| <= 32     127 *  8 * 32 = 32,512 */
#define RF_SHAPE_Q4_0 ((rf_shape){32, 32, 0, 32, 8, 8, false})
#define RF_SHAPE_Q4_1 ((rf_shape){32, 32, 32, 32, 8, 0, false})
#define RF_SHAPE_Q5_0 ((rf_shape){32, 32, 0, 32, 4, 16, false})
#define RF_SHAPE_Q5_1 ((rf_shape){32, 32, 32, 32, 4, 0, false})
#define RF_SHAPE_Q2_K ((rf_shape){256, 256, 16, 16, 4, 0, false})
#define RF_SHAPE_Q3_K ((rf_shape){256, 256, 0, 16, 4, 4, false})
#define RF_SHAPE_Q4_K ((rf_shape){256, 256, 32, 32, 8, 0, false})
#define RF_SHAPE_Q5_K ((rf_shape){256, 128, 32, 32, 4, 0, false})
#define RF_SHAPE_Q6_K ((rf_shape){256, 64, 0, 16, 4, 32, false})
/* q8_0 and every other format: int16 weights. */
RF_INLINE rf_shape rf_shape_wide(uint32_t block, uint32_t fold, uint32_t min_step)
{
    return (rf_shape){block, fold, min_step, block, 0, 0, false};
}
/* And with int8 activations, which have to be widened for them. */
RF_INLINE rf_shape rf_shape_mixed(uint32_t block, uint32_t fold, uint32_t min_step)
{
    return (rf_shape){block, fold, min_step, block, 0, 0, true};
}

/* Where the parts of a panel's record begin. */
RF_INLINE size_t rf_scales_at(rf_shape s)
{
    return (size_t)s.block * RF_PANEL_ROWS * (s.steps != 0 ? 1 : 2);
}
RF_INLINE size_t rf_mins_at(rf_shape s)
{
    return rf_scales_at(s) + (s.steps != 0 && s.block == 256 ? s.block / s.sub * 64 : 0);
}
RF_INLINE size_t rf_scale_at(rf_shape s)
{
    return rf_mins_at(s) + (s.block == 256 && s.min_step != 0 ? s.block / s.min_step * 48 : 0);
}
RF_INLINE size_t rf_min_at(rf_shape s)
{
    return rf_scale_at(s) + 64;
}
RF_INLINE size_t rf_record_bytes(rf_shape s)
{
    return rf_min_at(s) + (s.min_step != 0 ? 64 : 0);
}

/* And those of a side's. */
RF_INLINE size_t rf_multipliers_at(void)
{
    return 16;
}
RF_INLINE size_t rf_starts_at(rf_shape s)
{
    return rf_multipliers_at() + (s.steps != 0 && s.block == 256 ? 128 : 0);
}
RF_INLINE size_t rf_sums_at(rf_shape s)
{
    return rf_starts_at(s) + (s.offset != 0 ? s.block / s.sub * 16 : 0);
}
RF_INLINE size_t rf_side_bytes(rf_shape s)
{
    if (s.min_step == 0) {
        return rf_sums_at(s);
    }
    return rf_sums_at(s) + (s.block == 256 ? s.block / s.min_step * 12 : 16);
}

/* Rows [row, row + count) of a job, count <= 16, as bytes and as int16. */
void rf_panel8_avx2(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel);
void rf_panel_avx2(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel);

typedef struct rf_tile {
    const uint8_t *q[RF_TILE_TOKENS]; /* codes of four tokens, int8 or int16; mixed: one pointer */
    uint8_t *sides;
    int16_t *mixed; /* [k / 2][4][2]: int8 codes widened for int16 weights */
} rf_tile;
/* Tokens [first, first + count), count <= 4; the last is repeated where there are fewer. */
void rf_tile_avx2(const rf_matmul *job, const rf_shape *s, uint32_t first, uint32_t count,
                  rf_tile *tile);

#endif
