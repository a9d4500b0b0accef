/* kernels/matmul_float_avx512.c: f32, f16 and bf16 weights times f32 activations with AVX-512.
 *
 * Sixteen lanes are one register, so a row and a token are one chain of fma. Few tokens: rows
 * straight from where they lie, two at a time and half of the piece apart, for one chain is slower
 * than memory and two adjacent rows are slower still. More: sixteen rows widened once into scratch,
 * then tiles of 4 rows x 6 tokens: 24 fma for each 10 loads.
 */
#include "kernels/avx512.h"

#define FLOAT_ROWS  16u /* widened together; their scratch is counted in rf_matmul_scratch_bytes */
#define TILE_ROWS   4u
#define TILE_TOKENS 6u
#define DIRECT      4u /* tokens that take rows from where they lie */

/* Weights [i, i + 16) of a row. */
RF_INLINE __m512 load_weights(rf_format format, const uint8_t *row, size_t i)
{
    if (format == RF_F32) {
        return _mm512_castsi512_ps(rf_load_512(row + 4 * i));
    }
    const __m256i half = rf_load_256(row + 2 * i);
    if (format == RF_F16) {
        return _mm512_cvtph_ps(half);
    }
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The last k mod 16 weights of a row, then zeros. */
RF_INLINE __m512 load_tail(rf_format format, const uint8_t *row, uint32_t k)
{
    const size_t size = format == RF_F32 ? 4 : 2, at = k & ~15u;
    uint8_t padded[64] = {0};
    memcpy(padded, row + at * size, (k - at) * size);
    return load_weights(format, padded, 0);
}

RF_INLINE const float *token(const rf_matmul *job, uint32_t t)
{
    return (const float *)(const void *)rf_matmul_act(job, t);
}

/* rows <= 2 rows, apart rows from each other, for tokens <= DIRECT tokens. */
RF_INLINE void dot(const rf_matmul *job, rf_format format, uint32_t row, uint32_t apart,
                   uint32_t rows, uint32_t tokens)
{
    const uint8_t *weight = job->weight + row * job->weight_row_bytes;
    const uint64_t step = apart * job->weight_row_bytes;
    const size_t whole = job->k & ~15u;
    const float *x[DIRECT];
    __m512 acc[2][DIRECT];
    for (uint32_t t = 0; t < tokens; t++) {
        x[t] = token(job, t);
        acc[0][t] = acc[1][t] = _mm512_setzero_ps();
    }
    for (size_t i = 0; i < whole; i += 16) {
        const __m512 a = load_weights(format, weight, i);
        const __m512 b = rows == 2 ? load_weights(format, weight + step, i) : a;
        for (uint32_t t = 0; t < tokens; t++) {
            const __m512 v = _mm512_loadu_ps(x[t] + i);
            acc[0][t] = _mm512_fmadd_ps(a, v, acc[0][t]);
            acc[1][t] = rows == 2 ? _mm512_fmadd_ps(b, v, acc[1][t]) : acc[1][t];
        }
    }
    for (uint32_t r = 0; r < rows; r++) {
        const __m512 w = load_tail(format, weight + r * step, job->k);
        for (uint32_t t = 0; t < tokens; t++) {
            if (whole != job->k) {
                acc[r][t] = _mm512_fmadd_ps(w, _mm512_loadu_ps(x[t] + whole), acc[r][t]);
            }
            rf_matmul_store(job, t, row + r * apart, rf_sum_zmm(acc[r][t]));
        }
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, rf_format format, uint32_t first, uint32_t last,
                        uint32_t tokens)
{
    const uint32_t half = (last - first) / 2;
    for (uint32_t row = first; row < first + half; row++) {
        dot(job, format, row, half, 2, tokens);
    }
    if ((last - first) % 2 != 0) {
        dot(job, format, last - 1, 0, 1, tokens);
    }
}

/* A row as floats, zeros to a multiple of 16. */
RF_INLINE void widen_row(rf_format format, const uint8_t *row, uint32_t k, float *out)
{
    const size_t whole = k & ~15u;
    for (size_t i = 0; i < whole; i += 16) {
        _mm512_storeu_ps(out + i, load_weights(format, row, i));
    }
    if (whole != k) {
        _mm512_storeu_ps(out + whole, load_tail(format, row, k));
    }
}

/* Four rows times tokens; sums beyond what exists are dropped by the caller. */
RF_INLINE void float_tile(const float *const w[TILE_ROWS], const float *const x[TILE_TOKENS],
                          size_t padded, float sums[TILE_ROWS][TILE_TOKENS], uint32_t tokens)
{
    __m512 acc[TILE_ROWS][TILE_TOKENS];
#pragma GCC unroll 4
    for (uint32_t r = 0; r < TILE_ROWS; r++) {
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            acc[r][t] = _mm512_setzero_ps();
        }
    }
    for (size_t i = 0; i < padded; i += 16) {
        __m512 a[TILE_ROWS];
#pragma GCC unroll 4
        for (uint32_t r = 0; r < TILE_ROWS; r++) {
            a[r] = _mm512_loadu_ps(w[r] + i);
        }
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            __m512 b = _mm512_loadu_ps(x[t] + i);
            RF_PIN(b);
#pragma GCC unroll 4
            for (uint32_t r = 0; r < TILE_ROWS; r++) {
                acc[r][t] = _mm512_fmadd_ps(a[r], b, acc[r][t]);
            }
        }
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < TILE_ROWS; r++) {
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            sums[r][t] = rf_sum_zmm(acc[r][t]);
        }
    }
}

static void run_tile(const float *const w[TILE_ROWS], const float *const x[TILE_TOKENS],
                     size_t padded, float sums[TILE_ROWS][TILE_TOKENS], uint32_t tokens)
{
    if (tokens > 4) {
        float_tile(w, x, padded, sums, 6);
    } else if (tokens > 2) {
        float_tile(w, x, padded, sums, 4);
    } else {
        float_tile(w, x, padded, sums, 2);
    }
}

/* count rows of a piece, widened or as they lie, for all tokens. */
static void run_rows(const rf_matmul *job, const float *const w[FLOAT_ROWS], uint32_t row,
                     uint32_t count)
{
    const size_t padded = ((size_t)job->k + 15) & ~15ull;
    for (uint32_t first = 0; first < job->token_count; first += TILE_TOKENS) {
        const uint32_t tokens = RF_MIN(TILE_TOKENS, job->token_count - first);
        const float *x[TILE_TOKENS];
        for (uint32_t t = 0; t < TILE_TOKENS; t++) {
            x[t] = token(job, first + RF_MIN(t, tokens - 1));
        }
        for (uint32_t r = 0; r < count; r += TILE_ROWS) {
            float sums[TILE_ROWS][TILE_TOKENS];
            run_tile(w + r, x, padded, sums, tokens);
            for (uint32_t i = 0; i < RF_MIN(TILE_ROWS, count - r); i++) {
                for (uint32_t t = 0; t < tokens; t++) {
                    rf_matmul_store(job, first + t, row + r + i, sums[i][t]);
                }
            }
        }
    }
}

RF_INLINE void matmul_float(const rf_matmul *job, rf_format format, uint32_t first_row,
                            uint32_t last_row, void *scratch)
{
    switch (job->token_count) {
    case 1:
        dot_rows(job, format, first_row, last_row, 1);
        return;
    case 2:
        dot_rows(job, format, first_row, last_row, 2);
        return;
    case 3:
        dot_rows(job, format, first_row, last_row, 3);
        return;
    case DIRECT:
        dot_rows(job, format, first_row, last_row, DIRECT);
        return;
    default:
        break;
    }
    const size_t padded = ((size_t)job->k + 15) & ~15ull;
    const bool as_they_lie = format == RF_F32 && padded == job->k;
    for (uint32_t row = first_row; row < last_row; row += FLOAT_ROWS) {
        const uint32_t count = RF_MIN(FLOAT_ROWS, last_row - row);
        const float *w[FLOAT_ROWS];
        for (uint32_t r = 0; r < FLOAT_ROWS; r++) {
            const uint64_t from = row + RF_MIN(r, count - 1);
            const uint8_t *weight = job->weight + from * job->weight_row_bytes;
            float *wide = (float *)scratch + r * padded;
            if (as_they_lie) {
                w[r] = (const float *)(const void *)weight;
            } else if (r < count) {
                widen_row(format, weight, job->k, wide);
                w[r] = wide;
            } else {
                w[r] = w[r - 1];
            }
        }
        run_rows(job, w, row, count);
    }
}

void rf_matmul_float_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
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
