/* kernels/quant.h: what the kernels of all instruction sets share: the table of quantised formats,
 * their unpacking to int16, and the small definitions (exp, lanes) that must not differ.
 *
 * Internal to kernels/. A block of every format unpacks to the same thing, so that one matmul
 * serves them all: int16 weights with the sub-block scales folded in, one float scale, and the
 * codes of the minimums.
 *
 *   weight[k] = scale * w[k] + min_scale * mins[k / 16]
 *
 * Folds: the number of k whose exact sum fits 31 bits in the worst case, |a| <= 32767 for blocks
 * of 32 and |a| <= 8191 for blocks of 256 (limits of int16 activations, kernels.h; those of int8
 * are lower):
 *
 *   format      largest |w|               fold   largest |sum|
 *   q4_0        8                         32     8 * 32767 * 32       =     8,388,352
 *   q4_1        15                        32     15 * 32767 * 32      =    15,728,160
 *   q5_0        16                        32     16 * 32767 * 32      =    16,776,704
 *   q5_1        31                        32     31 * 32767 * 32      =    32,504,864
 *   q8_0        128                       32     128 * 32767 * 32     =   134,213,632
 *   q2_K        3 * 15 = 45               256    45 * 8191 * 256      =    94,360,320
 *   q3_K        4 * 32 = 128              256    128 * 8191 * 256     =   268,402,688
 *   q4_K        15 * 63 = 945             256    945 * 8191 * 256     = 1,981,566,720
 *   q5_K        31 * 63 = 1953            128    1953 * 8191 * 128    = 2,047,618,944
 *   q6_K        32 * 128 = 4096           64     4096 * 8191 * 64     = 2,147,221,504 < 2^31
 *   iq4_nl      127                       32     127 * 32767 * 32     =   133,165,088
 *   iq4_xs      127 * 32 = 4064           64     4064 * 8191 * 64     = 2,130,446,336
 *   tq1_0       1                         256    1 * 8191 * 256       =     2,096,896
 *   tq2_0       2 (code 3)                256    2 * 8191 * 256       =     4,193,792
 *
 * Minimums: codes are <= 63, so |min_sum| <= 63 * 8191 * 256 = 132,104,448.
 */
#ifndef RF_KERNELS_QUANT_H
#define RF_KERNELS_QUANT_H

#include "kernels/kernels.h"

#include <string.h>

/* Functions that fill a table run on any machine, whatever their file is compiled for. */
#if defined(__x86_64__)
#define RF_FOR_ANY_CPU __attribute__((target("no-avx")))
#else
#define RF_FOR_ANY_CPU
#endif

#define RF_BLOCK_MAX     256u /* the longest block of weights and of activations */
#define RF_FOLDS_MAX     4u   /* folds of one block (q6_K, iq4_xs) */
#define RF_FOLD_LANES    8u   /* kernels.h: fold f belongs to lane f mod 8 */
#define RF_FLOAT_LANES   16u  /* kernels.h: lanes of a float sum */
#define RF_ACT_LIMIT_32  32767.0f
#define RF_ACT_LIMIT_256 8191.0f
#define RF_ACT_LIMIT_8   127.0f  /* int8, blocks of 32 */
#define RF_ACT_LIMIT_8K  8001.0f /* int8, blocks of 256: 63 * 127 */
#define RF_ACT_MULTIPLES 63.0f

typedef struct rf_unpacked { /* one block of one row */
    _Alignas(32) int16_t w[RF_BLOCK_MAX];
    int16_t mins[RF_BLOCK_MAX / 16]; /* unused without minimums */
    float scale;
    float min_scale;
} rf_unpacked;

/* block: the packed bytes, any alignment. */
typedef void (*rf_unpack_fn)(const uint8_t *block, rf_unpacked *out);

typedef struct rf_quant {
    rf_format format;
    uint16_t block; /* elements; activations have the same block */
    uint16_t block_bytes;
    uint16_t fold;
    uint16_t min_step; /* weights that share a minimum: 16 or 32; 0 without minimums */
    rf_unpack_fn unpack;
} rf_quant;

#define RF_QUANT_COUNT 14u
extern const rf_quant rf_quants[RF_QUANT_COUNT];
/* NULL for a format that is not quantised or not served. */
const rf_quant *rf_quant_of(rf_format format);

/* The parts of a packed token. */
static inline const int16_t *rf_act_q16(const uint8_t *row)
{
    return (const int16_t *)(const void *)row;
}
static inline const int8_t *rf_act_q8(const uint8_t *row)
{
    return (const int8_t *)(const void *)row;
}
static inline const int16_t *rf_act_multipliers(const uint8_t *row, const rf_act_layout *layout)
{
    return (const int16_t *)(const void *)(row + layout->multiplier_offset);
}
static inline const float *rf_act_scales(const uint8_t *row, const rf_act_layout *layout)
{
    return (const float *)(const void *)(row + layout->scale_offset);
}
static inline const int32_t *rf_act_sums(const uint8_t *row, const rf_act_layout *layout)
{
    return (const int32_t *)(const void *)(row + layout->sum_offset);
}
/* Row of a job's token t in act and out. */
static inline uint32_t rf_matmul_token(const rf_matmul *job, uint32_t t)
{
    return job->tokens ? job->tokens[t] : t;
}
static inline const uint8_t *rf_matmul_act(const rf_matmul *job, uint32_t t)
{
    return job->act + (uint64_t)rf_matmul_token(job, t) * job->layout.row_bytes;
}
static inline void rf_matmul_store(const rf_matmul *job, uint32_t t, uint32_t row, float value)
{
    float *out = job->out + (uint64_t)rf_matmul_token(job, t) * job->out_stride + row;
    *out = job->accumulate ? *out + value : value;
}

static inline uint32_t rf_float_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
static inline float rf_bits_float(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The multiplier of 32 values within a block of 256, both of finite values. */
static inline int32_t rf_act_multiplier(uint32_t amax_bits, float per_amax)
{
    const float wanted = __builtin_ceilf(rf_bits_float(amax_bits) * per_amax);
    return wanted < 1.0f               ? 1
           : wanted > RF_ACT_MULTIPLES ? (int32_t)RF_ACT_MULTIPLES
                                       : (int32_t)wanted;
}
/* Rows [row, row + count) of a job's token t. */
static inline void rf_matmul_store_rows(const rf_matmul *job, uint32_t t, uint32_t row,
                                        uint32_t count, const float *values)
{
    float *out = job->out + (uint64_t)rf_matmul_token(job, t) * job->out_stride + row;
    if (!job->accumulate) {
        memcpy(out, values, count * sizeof *out);
        return;
    }
    for (uint32_t r = 0; r < count; r++) {
        out[r] += values[r];
    }
}

static inline uint16_t rf_load_u16(const uint8_t *bytes)
{
    uint16_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}
static inline uint32_t rf_load_u32(const uint8_t *bytes)
{
    uint32_t value;
    memcpy(&value, bytes, sizeof value);
    return value;
}

/* Adds lanes 4, 2, 1 apart. */
static inline float rf_sum_lanes_8(const float lanes[8])
{
    float a[4], b[2];
    for (int i = 0; i < 4; i++) {
        a[i] = lanes[i] + lanes[i + 4];
    }
    b[0] = a[0] + a[2];
    b[1] = a[1] + a[3];
    return b[0] + b[1];
}

/* Adds lanes 8, 4, 2, 1 apart. */
static inline float rf_sum_lanes_16(const float lanes[16])
{
    float a[8];
    for (int i = 0; i < 8; i++) {
        a[i] = lanes[i] + lanes[i + 8];
    }
    return rf_sum_lanes_8(a);
}

/* exp in float: x = n ln 2 + r, |r| <= ln 2 / 2, by Cody and Waite's two-part ln 2 (the first part
 * has 15 bits, so n times it is exact), then a polynomial for exp(r) and 2^n in two factors, so
 * that subnormal results and infinity come out by multiplication. The vector versions repeat these
 * operations one for one. Coefficients: Taylor to r^7; its remainder 0.3466^8 / 8! = 5e-9 lies
 * below float's half unit (6e-8). */
#define RF_EXP_LOW      (-104.0f)
#define RF_EXP_HIGH     89.0f
#define RF_EXP_LOG2E    1.44269504088896341f
#define RF_EXP_ROUND    12582912.0f /* 1.5 * 2^23: adding it rounds to the nearest even integer */
#define RF_EXP_LN2_HIGH 0.693145751953125f
#define RF_EXP_LN2_LOW  1.42860682030941723e-6f
#define RF_EXP_C7       1.98412698e-4f
#define RF_EXP_C6       1.38888889e-3f
#define RF_EXP_C5       8.33333333e-3f
#define RF_EXP_C4       4.16666667e-2f
#define RF_EXP_C3       1.66666667e-1f
#define RF_EXP_C2       0.5f

static inline float rf_exp_one(float x)
{
    x = RF_EXP_LOW > x ? RF_EXP_LOW : x; /* a NaN falls through both */
    x = RF_EXP_HIGH < x ? RF_EXP_HIGH : x;
    const float shifted = __builtin_fmaf(x, RF_EXP_LOG2E, RF_EXP_ROUND);
    const float n = shifted - RF_EXP_ROUND;
    float r = __builtin_fmaf(n, -RF_EXP_LN2_HIGH, x);
    r = __builtin_fmaf(n, -RF_EXP_LN2_LOW, r);
    float p = __builtin_fmaf(RF_EXP_C7, r, RF_EXP_C6);
    p = __builtin_fmaf(p, r, RF_EXP_C5);
    p = __builtin_fmaf(p, r, RF_EXP_C4);
    p = __builtin_fmaf(p, r, RF_EXP_C3);
    p = __builtin_fmaf(p, r, RF_EXP_C2);
    p = __builtin_fmaf(p, r, 1.0f);
    p = __builtin_fmaf(p, r, 1.0f);
    /* n lies in -150 .. 128 (anything for a NaN: the arithmetic is unsigned). */
    const uint32_t i = rf_float_bits(shifted) - 0x4B400000u;
    const uint32_t half = (i >> 1) | (i & 0x80000000u);
    return p * rf_bits_float((half + 127u) << 23) * rf_bits_float((i - half + 127u) << 23);
}

static inline float rf_silu_one(float x)
{
    return x / (1.0f + rf_exp_one(-x));
}

#endif
