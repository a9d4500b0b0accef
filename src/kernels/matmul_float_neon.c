/* kernels/matmul_float_neon.c: f32, f16 and bf16 weights times f32 activations with NEON.
 *
 * Sixteen lanes are four registers. Few tokens: each row straight from where it lies. More: eight
 * rows widened once into scratch, then tiles of 2 rows x 3 tokens (24 accumulators).
 */
#include "kernels/neon.h"

#define FLOAT_ROWS 8u /* widened together: 32 bytes for each k of the worker's scratch */

typedef struct lanes16 {
    float32x4_t v[4];
} lanes16;

/* Weights [i, i + 16) of a row. */
RF_INLINE lanes16 load_weights(rf_format format, const uint8_t *row, size_t i)
{
    lanes16 w;
    if (format == RF_F32) {
        for (int j = 0; j < 4; j++) {
            w.v[j] = vreinterpretq_f32_u8(vld1q_u8(row + 4 * i + 16 * j));
        }
        return w;
    }
    const uint16x8_t a = vreinterpretq_u16_u8(vld1q_u8(row + 2 * i));
    const uint16x8_t b = vreinterpretq_u16_u8(vld1q_u8(row + 2 * i + 16));
    if (format == RF_F16) {
        const float16x8_t low = vreinterpretq_f16_u16(a), high = vreinterpretq_f16_u16(b);
        w.v[0] = vcvt_f32_f16(vget_low_f16(low));
        w.v[1] = vcvt_high_f32_f16(low);
        w.v[2] = vcvt_f32_f16(vget_low_f16(high));
        w.v[3] = vcvt_high_f32_f16(high);
    } else {
        const uint16x8_t zero = vdupq_n_u16(0);
        w.v[0] = vreinterpretq_f32_u16(vzip1q_u16(zero, a));
        w.v[1] = vreinterpretq_f32_u16(vzip2q_u16(zero, a));
        w.v[2] = vreinterpretq_f32_u16(vzip1q_u16(zero, b));
        w.v[3] = vreinterpretq_f32_u16(vzip2q_u16(zero, b));
    }
    return w;
}

/* The last k mod 16 weights of a row, then zeros. */
RF_INLINE lanes16 load_tail(rf_format format, const uint8_t *row, uint32_t k)
{
    const size_t size = format == RF_F32 ? 4 : 2, at = k & ~15u;
    uint8_t padded[64] = {0};
    memcpy(padded, row + at * size, (k - at) * size);
    return load_weights(format, padded, 0);
}

/* Lanes 8, 4, 2, 1 apart. */
RF_INLINE float sum_lanes(const float32x4_t v[4])
{
    return rf_sum_lanes_8_neon(vaddq_f32(v[0], v[2]), vaddq_f32(v[1], v[3]));
}

RF_INLINE void add_products(lanes16 *acc, lanes16 w, const float *x)
{
    for (int j = 0; j < 4; j++) {
        acc->v[j] = vfmaq_f32(acc->v[j], w.v[j], vld1q_f32(x + 4 * j));
    }
}

/* One row for all tokens of the job, tokens <= 4. */
RF_INLINE void dot_row(const rf_matmul *job, rf_format format, uint32_t row, uint32_t tokens)
{
    const uint8_t *weight = job->weight + row * job->weight_row_bytes;
    const float *x[4];
    lanes16 acc[4];
    const size_t whole = job->k & ~15u;
    for (uint32_t t = 0; t < tokens; t++) {
        x[t] = (const float *)(const void *)rf_matmul_act(job, t);
        for (int j = 0; j < 4; j++) {
            acc[t].v[j] = vdupq_n_f32(0);
        }
    }
    for (size_t i = 0; i < whole; i += 16) {
        const lanes16 w = load_weights(format, weight, i);
        const uintptr_t ahead = (uintptr_t)weight + (format == RF_F32 ? 4 : 2) * i + 6144;
        __builtin_prefetch((const void *)ahead, 0, 3);
        for (uint32_t t = 0; t < tokens; t++) {
            add_products(&acc[t], w, x[t] + i);
        }
    }
    if (whole != job->k) {
        const lanes16 w = load_tail(format, weight, job->k);
        for (uint32_t t = 0; t < tokens; t++) {
            add_products(&acc[t], w, x[t] + whole);
        }
    }
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store(job, t, row, sum_lanes(acc[t].v));
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, rf_format format, uint32_t first_row,
                        uint32_t last_row)
{
    for (uint32_t row = first_row; row < last_row; row++) {
        switch (job->token_count) {
        case 0:
            break;
        case 1:
            dot_row(job, format, row, 1);
            break;
        case 2:
            dot_row(job, format, row, 2);
            break;
        case 3:
            dot_row(job, format, row, 3);
            break;
        default:
            dot_row(job, format, row, 4);
            break;
        }
    }
}

/* A row as floats, zeros to a multiple of 16. */
RF_INLINE void widen_row(rf_format format, const uint8_t *row, uint32_t k, float *out)
{
    const size_t whole = k & ~15u;
    for (size_t i = 0; i < k; i += 16) {
        const lanes16 w = i < whole ? load_weights(format, row, i) : load_tail(format, row, k);
        for (int j = 0; j < 4; j++) {
            vst1q_f32(out + i + 4 * j, w.v[j]);
        }
    }
}

/* Four lanes of a tile. */
typedef struct quarter {
    float32x4_t v[2][3];
} quarter;

RF_INLINE void zero_quarter(quarter *acc, uint32_t tokens)
{
    for (uint32_t t = 0; t < tokens; t++) {
        acc->v[0][t] = acc->v[1][t] = vdupq_n_f32(0);
    }
}

RF_INLINE void add_quarter(quarter *acc, const float *const w[2], const float *const x[3], size_t i,
                           uint32_t tokens)
{
    const float32x4_t a = vld1q_f32(w[0] + i), b = vld1q_f32(w[1] + i);
    for (uint32_t t = 0; t < tokens; t++) {
        const float32x4_t c = vld1q_f32(x[t] + i);
        acc->v[0][t] = vfmaq_f32(acc->v[0][t], a, c);
        acc->v[1][t] = vfmaq_f32(acc->v[1][t], b, c);
    }
    RF_KEEP_ORDER();
}

/* Rows w[0] and w[1], of which the first `rows` are stored; tokens <= 3; padded is a multiple of
 * 16. */
RF_INLINE void float_tile(const rf_matmul *job, const float *const w[2], uint32_t padded,
                          uint32_t row, uint32_t rows, uint32_t first, uint32_t tokens)
{
    const float *x[3];
    quarter a, b, c, d;
    for (uint32_t t = 0; t < tokens; t++) {
        x[t] = (const float *)(const void *)rf_matmul_act(job, first + t);
    }
    zero_quarter(&a, tokens);
    zero_quarter(&b, tokens);
    zero_quarter(&c, tokens);
    zero_quarter(&d, tokens);
    for (size_t i = 0; i < padded; i += 16) {
        add_quarter(&a, w, x, i, tokens);
        add_quarter(&b, w, x, i + 4, tokens);
        add_quarter(&c, w, x, i + 8, tokens);
        add_quarter(&d, w, x, i + 12, tokens);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        const float32x4_t one[4] = {a.v[0][t], b.v[0][t], c.v[0][t], d.v[0][t]};
        const float32x4_t two[4] = {a.v[1][t], b.v[1][t], c.v[1][t], d.v[1][t]};
        rf_matmul_store(job, first + t, row, sum_lanes(one));
        if (rows > 1) {
            rf_matmul_store(job, first + t, row + 1, sum_lanes(two));
        }
    }
}

static void run_rows(const rf_matmul *job, const float *const w[FLOAT_ROWS], uint32_t row,
                     uint32_t rows)
{
    const uint32_t padded = (job->k + 15) & ~15u;
    for (uint32_t first = 0; first < job->token_count; first += 3) {
        for (uint32_t r = 0; r < rows; r += 2) {
            const uint32_t some = RF_MIN(2u, rows - r);
            const float *const pair[2] = {w[r], w[r + some - 1]};
            switch (job->token_count - first) {
            case 1:
                float_tile(job, pair, padded, row + r, some, first, 1);
                break;
            case 2:
                float_tile(job, pair, padded, row + r, some, first, 2);
                break;
            default:
                float_tile(job, pair, padded, row + r, some, first, 3);
                break;
            }
        }
    }
}

RF_INLINE void matmul_float(const rf_matmul *job, rf_format format, uint32_t first_row,
                            uint32_t last_row, void *scratch)
{
    if (job->token_count <= 4) {
        dot_rows(job, format, first_row, last_row);
        return;
    }
    const size_t padded = (job->k + 15) & ~15u;
    for (uint32_t row = first_row; row < last_row; row += FLOAT_ROWS) {
        const uint32_t rows = RF_MIN(FLOAT_ROWS, last_row - row);
        const float *w[FLOAT_ROWS];
        for (uint32_t r = 0; r < rows; r++) {
            float *wide = (float *)scratch + r * padded;
            const uint8_t *weight = job->weight + (row + r) * job->weight_row_bytes;
            widen_row(format, weight, job->k, wide);
            w[r] = wide;
        }
        run_rows(job, w, row, rows);
    }
}

void rf_matmul_float_neon(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                          void *scratch)
{
    switch (job->format) {
    case RF_F32:
        matmul_float(job, RF_F32, first_row, last_row, scratch);
        break;
    case RF_F16:
        matmul_float(job, RF_F16, first_row, last_row, scratch);
        break;
    default:
        matmul_float(job, RF_BF16, first_row, last_row, scratch);
        break;
    }
}
