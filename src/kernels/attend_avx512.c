/* kernels/attend_avx512.c: attention over one block of positions with 512 bits: scores of int8 rows
 * by VNNI, and weighted sums of all forms, 16 elements a vector and eight queries together. The
 * loop around them, softmax and scores of floats, whose dots have eight lanes by definition, are
 * attend_avx2.c's.
 */
#include "kernels/attend_avx2.h"
#include "kernels/avx512.h"

/* ---- scores of codes ---------------------------------------------------------------------- */

/* n queries at 8 * eights positions from j on; keys lie in columns as rf_attend_turn_codes_avx2
 * leaves them. A lane adds pairs of dimensions of one position, like a lane of score_8 there. */
RF_INLINE void score_eights(const rf_attend *job, uint32_t query, uint32_t n, uint32_t j,
                            uint32_t eights, rf_attend_line *scores, rf_attend_ahead *ahead)
{
    const rf_attend_line *lines = (const rf_attend_line *)(const void *)job->k.scale;
    const uint32_t width = job->k.width, spans = job->k.spans, quads = width / spans / 4;
    const int16_t *q = job->q_codes + query * job->q_stride;
    const uint8_t *k = (const uint8_t *)job->k.rows + (size_t)j * width;
    __m256 dots[RF_ATTEND_GROUP][4];
    rf_ask_ahead(ahead, 8 * eights * n * width);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++) {
#pragma GCC unroll 4
        for (uint32_t e = 0; e < eights; e++) {
            dots[i][e] = _mm256_setzero_ps();
        }
    }
    for (uint32_t s = 0; s < spans; s++) {
        __m512i sums[RF_ATTEND_GROUP][4];
#pragma GCC unroll 8
        for (uint32_t i = 0; i < n; i++) {
#pragma GCC unroll 4
            for (uint32_t e = 0; e < eights; e++) {
                sums[i][e] = _mm512_setzero_si512();
            }
        }
        for (uint32_t at = 0; at < quads; at++, k += 32, q += 4) {
            __m512i row[4];
#pragma GCC unroll 4
            for (uint32_t e = 0; e < eights; e++) {
                row[e] = _mm512_cvtepi8_epi16(rf_load_256(k + (size_t)e * 8 * width));
                RF_PIN(row[e]);
            }
#pragma GCC unroll 8
            for (uint32_t i = 0; i < n; i++) {
                int64_t four;
                memcpy(&four, q + i * job->q_stride, sizeof four);
                __m512i x = _mm512_set1_epi64(four);
                RF_PIN(x);
#pragma GCC unroll 4
                for (uint32_t e = 0; e < eights; e++) {
                    rf_dot_words(&sums[i][e], x, row[e]);
                }
            }
        }
#pragma GCC unroll 4
        for (uint32_t e = 0; e < eights; e++) {
            const __m256 scale = _mm256_loadu_ps(lines[s] + j + 8 * e);
#pragma GCC unroll 8
            for (uint32_t i = 0; i < n; i++) {
                const __m256i low = _mm512_castsi512_si256(sums[i][e]);
                const __m256i high = _mm512_extracti64x4_epi64(sums[i][e], 1);
                const __m256 whole = _mm256_cvtepi32_ps(_mm256_hadd_epi32(low, high));
                dots[i][e] = _mm256_fmadd_ps(whole, scale, dots[i][e]);
            }
        }
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++) {
        const __m256 q_scale = _mm256_set1_ps(job->q_scale[query + i]);
        const __m256 bias = _mm256_set1_ps(job->bias ? job->bias[query + i] : 0.0f);
#pragma GCC unroll 4
        for (uint32_t e = 0; e < eights; e++) {
            const __m256 scaled = _mm256_mul_ps(dots[i][e], q_scale);
            _mm256_storeu_ps(scores[i] + j + 8 * e,
                             _mm256_fmadd_ps(scaled, _mm256_set1_ps(job->scale), bias));
        }
    }
}

/* Few queries take more positions at once: eight sums hide the latency of the instruction. */
RF_INLINE void score_tile(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_range seen,
                          rf_attend_line *scores, rf_attend_ahead *ahead)
{
    const uint32_t most = n <= 2 ? 4 : (n <= 4 ? 2 : 1);
    uint32_t j = seen.first & ~7u;
    for (; most > 1 && j + 8 * most <= seen.last; j += 8 * most) {
        score_eights(job, query, n, j, most, scores, ahead);
    }
    for (; j < seen.last; j += 8) {
        score_eights(job, query, n, j, 1, scores, ahead);
    }
}

/* Eight queries together, fewer as everywhere; i counts those that are done. */
#define EACH_TILE(call, ...)                                                                       \
    if (count == RF_ATTEND_GROUP) {                                                                \
        const uint32_t i = 0;                                                                      \
        call(job, query + i, RF_ATTEND_GROUP, __VA_ARGS__);                                        \
    } else {                                                                                       \
        RF_ATTEND_EACH_TILE(call, __VA_ARGS__)                                                     \
    }

static void score_codes(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                        rf_attend_line *scores,
                        rf_attend_ahead *ahead){EACH_TILE(score_tile, seen, scores + i, ahead)}

/* ---- values ------------------------------------------------------------------------------- */

RF_INLINE __m512 load_16(const uint8_t *row, uint32_t d, rf_attend_form form)
{
    __m512 v;
    if (form == RF_ATTEND_F16) {
        v = _mm512_cvtph_ps(rf_load_256(row + 2 * d));
    } else if (form == RF_ATTEND_INT8) {
        const __m128i codes = _mm_loadu_si128((const __m128i *)(const void *)(row + d));
        v = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
    } else {
        v = _mm512_loadu_ps((const float *)(const void *)row + d);
    }
    RF_PIN(v);
    return v;
}

/* n queries, 16 * parts elements from d on. */
RF_INLINE void add_part(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_form form,
                        rf_attend_range seen, rf_attend_line *weights, const float *keep,
                        uint32_t d, uint32_t parts, rf_attend_ahead *ahead)
{
    __m512 acc[RF_ATTEND_GROUP][8];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++) {
        const float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            acc[i][h] = _mm512_mul_ps(_mm512_loadu_ps(out + 16 * h), _mm512_set1_ps(keep[i]));
        }
    }
    const uint8_t *v = rf_attend_row(&job->v, seen.first);
    rf_ask_ahead(ahead, n * 16 * parts * (seen.last - seen.first));
    for (uint32_t j = seen.first; j < seen.last; j++) {
        __m512 row[8];
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            row[h] = load_16(v, d + 16 * h, form);
        }
#pragma GCC unroll 8
        for (uint32_t i = 0; i < n; i++) {
            const __m512 p = _mm512_set1_ps(weights[i][j]);
#pragma GCC unroll 8
            for (uint32_t h = 0; h < parts; h++) {
                acc[i][h] = _mm512_fmadd_ps(p, row[h], acc[i][h]);
            }
        }
        v += job->v.stride;
    }
#pragma GCC unroll 8
    for (uint32_t i = 0; i < n; i++) {
        float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            _mm512_storeu_ps(out + 16 * h, _mm512_add_ps(acc[i][h], _mm512_setzero_ps()));
        }
    }
}

/* [d, end) is whole sixteens. 8 sums of one or two queries, 12 of three, 16 of more. */
RF_INLINE void add_tile(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_form form,
                        rf_attend_range seen, rf_attend_line *weights, const float *keep,
                        uint32_t d, uint32_t end, rf_attend_ahead *ahead)
{
    const uint32_t most = n == 1 ? 8 : (n == 8 ? 2 : 4);
    for (; d + 16 * most <= end; d += 16 * most) {
        add_part(job, query, n, form, seen, weights, keep, d, most, ahead);
    }
    for (; most > 2 && d + 32 <= end; d += 32) {
        add_part(job, query, n, form, seen, weights, keep, d, 2, ahead);
    }
    for (; d < end; d += 16) {
        add_part(job, query, n, form, seen, weights, keep, d, 1, ahead);
    }
}

RF_INLINE void add_floats(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_form form,
                          rf_attend_range seen, rf_attend_line *weights, const float *keep,
                          rf_attend_ahead *ahead, rf_attend_add *narrow)
{
    const uint32_t width = job->v.width;
    if (width % 16 != 0) {
        narrow(job, query, count, seen, weights, keep, ahead);
        return;
    }
    EACH_TILE(add_tile, form, seen, weights + i, keep + i, 0, width, ahead)
}

static void add_f32(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                    rf_attend_line *weights, const float *keep, rf_attend_ahead *ahead)
{
    add_floats(job, query, count, RF_ATTEND_F32, seen, weights, keep, ahead,
               rf_attend_add_f32_avx2);
}

static void add_f16(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                    rf_attend_line *weights, const float *keep, rf_attend_ahead *ahead)
{
    add_floats(job, query, count, RF_ATTEND_F16, seen, weights, keep, ahead,
               rf_attend_add_f16_avx2);
}

static void add_codes(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                      rf_attend_line *p, const float *keep, rf_attend_ahead *ahead)
{
    const uint32_t spans = job->v.spans, span = job->v.width / spans;
    rf_attend_line weights[RF_ATTEND_GROUP];
    if (span % 16 != 0) {
        rf_attend_add_codes_avx2(job, query, count, seen, p, keep, ahead);
        return;
    }
    for (uint32_t s = 0; s < spans; s++) {
        const uint32_t d = s * span, end = d + span;
        rf_attend_weights_avx2(job, s, count, seen, p, weights);
        EACH_TILE(add_tile, RF_ATTEND_INT8, seen, weights + i, keep + i, d, end, ahead)
    }
}

void rf_attend_avx512(const rf_attend *job)
{
    static const rf_attend_way ways[RF_ATTEND_INT8 + 1] = {
        [RF_ATTEND_F32] = {rf_attend_score_f32_avx2, add_f32},
        [RF_ATTEND_F16] = {rf_attend_score_f16_avx2, add_f16},
        [RF_ATTEND_INT8] = {score_codes, add_codes},
    };
    rf_attend_by(job, ways);
}
