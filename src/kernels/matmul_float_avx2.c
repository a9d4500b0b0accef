/* kernels/matmul_float_avx2.c: f32, f16 and bf16 weights times f32 activations with AVX2 and FMA.
 *
 * Sixteen lanes are two registers. Few tokens: each row straight from where it lies. More: eight
 * rows widened once into scratch, then tiles of 2 rows x 3 tokens (12 accumulators).
 */
#include "kernels/avx2.h"

#define FLOAT_ROWS 8u /* widened together; their scratch is counted in rf_matmul_scratch_bytes */

typedef struct lanes16 {
    __m256 low, high;
} lanes16;

/* Weights [i, i + 16) of a row. */
RF_INLINE lanes16 load_weights(rf_format format, const uint8_t *row, size_t i)
{
    lanes16 w;
    if (format == RF_F32) {
        w.low = _mm256_loadu_ps((const float *)(const void *)(row + 4 * i));
        w.high = _mm256_loadu_ps((const float *)(const void *)(row + 4 * i + 32));
    } else if (format == RF_F16) {
        w.low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * i)));
        w.high = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(row + 2 * i + 16)));
    } else {
        const __m128i a = _mm_loadu_si128((const __m128i *)(row + 2 * i));
        const __m128i b = _mm_loadu_si128((const __m128i *)(row + 2 * i + 16));
        w.low = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(a), 16));
        w.high = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16));
    }
    return w;
}

/* The last k mod 16 weights of a row, then zeros. */
RF_INLINE lanes16 load_tail(rf_format format, const uint8_t *row, uint32_t k)
{
    if (format == RF_F32) { /* by way of memory a load would wait for the stores before it */
        const float *at = (const float *)(const void *)row + (k & ~15u);
        const uint32_t count = k & 15u, in_low = RF_MIN(count, 8u);
        const __m256i low = _mm256_castps_si256(rf_first_lanes(in_low));
        const __m256i high = _mm256_castps_si256(rf_first_lanes(count - in_low));
        return (lanes16){_mm256_maskload_ps(at, low), _mm256_maskload_ps(at + 8, high)};
    }
    const size_t size = format == RF_F32 ? 4 : 2, at = k & ~15u;
    uint8_t padded[64] = {0};
    memcpy(padded, row + at * size, (k - at) * size);
    return load_weights(format, padded, 0);
}

RF_INLINE float sum_lanes(lanes16 lanes)
{
    return rf_sum_ymm(_mm256_add_ps(lanes.low, lanes.high));
}

RF_INLINE void add_products(lanes16 *acc, lanes16 w, const float *x)
{
    acc->low = _mm256_fmadd_ps(w.low, _mm256_loadu_ps(x), acc->low);
    acc->high = _mm256_fmadd_ps(w.high, _mm256_loadu_ps(x + 8), acc->high);
}

/* One row for tokens [first, first + tokens), tokens <= 4. */
RF_INLINE void dot_row(const rf_matmul *job, rf_format format, uint32_t row, uint32_t first,
                       uint32_t tokens)
{
    const uint8_t *weight = job->weight + row * job->weight_row_bytes;
    const float *x[4];
    lanes16 acc[4];
    const size_t whole = job->k & ~15u;
    for (uint32_t t = 0; t < tokens; t++) {
        x[t] = (const float *)(const void *)rf_matmul_act(job, first + t);
        acc[t].low = acc[t].high = _mm256_setzero_ps();
    }
    for (size_t i = 0; i < whole; i += 16) {
        const lanes16 w = load_weights(format, weight, i);
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
        rf_matmul_store(job, first + t, row, sum_lanes(acc[t]));
    }
}

/* The sums of four rows, lanes 8, 4, 2, 1 apart each. */
RF_INLINE __m128 sum_four(const lanes16 acc[4])
{
    __m256 a[4];
    for (int r = 0; r < 4; r++) {
        a[r] = _mm256_add_ps(acc[r].low, acc[r].high);
    }
    __m128 b[4];
    for (int r = 0; r < 4; r++) {
        b[r] = _mm_add_ps(_mm256_castps256_ps128(a[r]), _mm256_extractf128_ps(a[r], 1));
    }
    const __m128 c = _mm_add_ps(_mm_movelh_ps(b[0], b[1]), _mm_movehl_ps(b[1], b[0]));
    const __m128 d = _mm_add_ps(_mm_movelh_ps(b[2], b[3]), _mm_movehl_ps(b[3], b[2]));
    return _mm_add_ps(_mm_shuffle_ps(c, d, _MM_SHUFFLE(2, 0, 2, 0)),
                      _mm_shuffle_ps(c, d, _MM_SHUFFLE(3, 1, 3, 1)));
}

#define SHORT_ROW_BYTES      1024u /* four rows within a page */
#define SHORT_PREFETCH_BYTES 4096u /* 1 to 4 KiB are alike for rows from a last-level cache */

/* Short rows for one token, four at a time: they lie together in a few lines, so going through them
 * in step is no harm to reading, and one addition of lanes serves four. Returns the first row that
 * is left. */
RF_INLINE uint32_t dot_short_rows(const rf_matmul *job, rf_format format, uint32_t row,
                                  uint32_t last_row)
{
    const size_t stride = job->weight_row_bytes, size = format == RF_F32 ? 4 : 2;
    const size_t k = job->k, whole = k & ~(size_t)15;
    const float *x = (const float *)(const void *)rf_matmul_act(job, 0);
    const bool accumulate = job->accumulate;
    const uint8_t *weight = job->weight + row * stride;
    float *out = job->out + (uint64_t)rf_matmul_token(job, 0) * job->out_stride + row;
    for (; row + 4 <= last_row; row += 4, weight += 4 * stride, out += 4) {
        lanes16 acc[4];
        for (int r = 0; r < 4; r++) {
            acc[r].low = acc[r].high = _mm256_setzero_ps();
        }
        for (size_t i = 0; i < whole; i += 16) {
            const __m256 low = rf_load_once(x + i), high = rf_load_once(x + i + 8);
            for (size_t r = 0; r < 4; r++) {
                const uint8_t *at = weight + r * stride;
                const lanes16 w = load_weights(format, at, i);
                acc[r].low = _mm256_fmadd_ps(w.low, low, acc[r].low);
                acc[r].high = _mm256_fmadd_ps(w.high, high, acc[r].high);
                _mm_prefetch((const char *)((uintptr_t)at + i * size + SHORT_PREFETCH_BYTES),
                             _MM_HINT_T0);
            }
        }
        if (whole != k) {
            for (size_t r = 0; r < 4; r++) {
                const lanes16 w = load_tail(format, weight + r * stride, job->k);
                add_products(&acc[r], w, x + whole);
            }
        }
        const __m128 sums = sum_four(acc);
        _mm_storeu_ps(out, accumulate ? _mm_add_ps(_mm_loadu_ps(out), sums) : sums);
    }
    return row;
}

RF_INLINE void dot_rows(const rf_matmul *job, rf_format format, uint32_t first_row,
                        uint32_t last_row)
{
    if (job->token_count == 1 && job->weight_row_bytes <= SHORT_ROW_BYTES) {
        first_row = dot_short_rows(job, format, first_row, last_row);
    }
    for (uint32_t row = first_row; row < last_row; row++) {
        switch (job->token_count) {
        case 1:
            dot_row(job, format, row, 0, 1);
            break;
        case 2:
            dot_row(job, format, row, 0, 2);
            break;
        case 3:
            dot_row(job, format, row, 0, 3);
            break;
        default:
            dot_row(job, format, row, 0, 4);
            break;
        }
    }
}

/* A row as floats, zeros to a multiple of 16. */
RF_INLINE void widen_row(rf_format format, const uint8_t *row, uint32_t k, float *out)
{
    const size_t whole = k & ~15u;
    for (size_t i = 0; i < whole; i += 16) {
        const lanes16 w = load_weights(format, row, i);
        _mm256_storeu_ps(out + i, w.low);
        _mm256_storeu_ps(out + i + 8, w.high);
    }
    if (whole != k) {
        const lanes16 w = load_tail(format, row, k);
        _mm256_storeu_ps(out + whole, w.low);
        _mm256_storeu_ps(out + whole + 8, w.high);
    }
}

/* rows <= 2 rows, tokens <= 3 tokens; padded is a multiple of 16. */
RF_INLINE void float_tile(const rf_matmul *job, const float *const w[2], uint32_t padded,
                          uint32_t row, uint32_t rows, uint32_t first, uint32_t tokens)
{
    const float *x[3];
    lanes16 acc[2][3];
    for (uint32_t t = 0; t < tokens; t++) {
        x[t] = (const float *)(const void *)rf_matmul_act(job, first + t);
        for (uint32_t r = 0; r < rows; r++) {
            acc[r][t].low = acc[r][t].high = _mm256_setzero_ps();
        }
    }
    for (size_t i = 0; i < padded; i += 16) {
        for (uint32_t half = 0; half < 16; half += 8) {
            __m256 a[2];
            for (uint32_t r = 0; r < rows; r++) {
                a[r] = _mm256_loadu_ps(w[r] + i + half);
            }
            for (uint32_t t = 0; t < tokens; t++) {
                const __m256 b = rf_load_once(x[t] + i + half);
                for (uint32_t r = 0; r < rows; r++) {
                    __m256 *lanes = half == 0 ? &acc[r][t].low : &acc[r][t].high;
                    *lanes = _mm256_fmadd_ps(a[r], b, *lanes);
                }
            }
        }
    }
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t r = 0; r < rows; r++) {
            rf_matmul_store(job, first + t, row + r, sum_lanes(acc[r][t]));
        }
    }
}

RF_INLINE void float_tokens(const rf_matmul *job, const float *const w[2], uint32_t padded,
                            uint32_t row, uint32_t rows, uint32_t first, uint32_t tokens)
{
    switch (tokens) {
    case 1:
        float_tile(job, w, padded, row, rows, first, 1);
        break;
    case 2:
        float_tile(job, w, padded, row, rows, first, 2);
        break;
    default:
        float_tile(job, w, padded, row, rows, first, 3);
        break;
    }
}

static void run_rows(const rf_matmul *job, const float *const w[FLOAT_ROWS], uint32_t row,
                     uint32_t rows)
{
    const uint32_t padded = (job->k + 15) & ~15u;
    for (uint32_t first = 0; first < job->token_count; first += 3) {
        const uint32_t tokens = RF_MIN(3u, job->token_count - first);
        uint32_t r = 0;
        for (; r + 2 <= rows; r += 2) {
            float_tokens(job, w + r, padded, row + r, 2, first, tokens);
        }
        if (r < rows) {
            float_tokens(job, w + r, padded, row + r, 1, first, tokens);
        }
    }
}

RF_INLINE void matmul_float(const rf_matmul *job, rf_format format, uint32_t first_row,
                            uint32_t last_row, void *scratch)
{
    if (job->token_count == 0) {
        return; /* an expert that nobody chose */
    }
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

void rf_matmul_float_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
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
