/* kernels/kv_attend_avx2.c: scores and weighted sums of int8 rows of the KV formats, for up to
 * four queries at a time; attend_avx2.c has the loop around them.
 *
 * Keys of eight positions are turned into columns of four dimensions, once for all queries: a
 * vector of sums then holds positions, and needs no adding across (measured on Zen 3, 8 queries of
 * width 64: 8.5 ns a position with the turning, 13.3 with rows). Values go to floats on their way
 * into a register, 16 to 64 dimensions at a time.
 */
#include "kernels/attend_avx2.h"

/* ---- scores ------------------------------------------------------------------------------- */

/* Positions of seen, in whole eights: the ends are filled with zeros. */
void rf_attend_line_up_scales_avx2(rf_attend_rows *rows, rf_attend_range seen, void *scratch)
{
    const uint32_t spans = rows->spans;
    rf_attend_line *lines = scratch;
    for (uint32_t s = 0; s < spans; s++) {
        _mm256_storeu_ps(lines[s] + (seen.first & ~7u), _mm256_setzero_ps());
        _mm256_storeu_ps(lines[s] + seen.last, _mm256_setzero_ps());
        if (spans == 1) {
            memcpy(lines[0] + seen.first, rows->scale + seen.first,
                   (seen.last - seen.first) * sizeof(float));
        }
        for (uint32_t j = seen.first; spans > 1 && j < seen.last; j++) {
            lines[s][j] = rows->scale[(size_t)j * spans + s];
        }
    }
    rows->scale = scratch;
}

/* Dwords of eight rows to columns: v[i] becomes the i-th dword of each. Positions of a column lie
 * in the order 0 1 4 5 2 3 6 7, in which rf_attend_score_codes_avx2 finds them. */
RF_INLINE void turn_8x8(__m256i v[8])
{
    static const uint8_t order[8] = {0, 1, 4, 5, 2, 3, 6, 7};
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(v[order[i]], v[order[i + 1]]);
        a[i + 1] = _mm256_unpackhi_epi32(v[order[i]], v[order[i + 1]]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x20);
        v[i + 4] = _mm256_permute2x128_si256(b[i], b[i + 4], 0x31);
    }
}

/* To [eight positions][width / 4][8][4]. */
void rf_attend_turn_codes_avx2(rf_attend_rows *k, rf_attend_range seen, void *scratch)
{
    const uint32_t width = k->width;
    for (uint32_t j = seen.first & ~7u; j < seen.last; j += 8) {
        const uint8_t *row[8];
        uint8_t *to = (uint8_t *)scratch + (size_t)j * width;
        for (uint32_t p = 0; p < 8; p++) { /* any other one for rows that nobody sees */
            row[p] = rf_attend_row(k, RF_MAX(seen.first, RF_MIN(j + p, seen.last - 1)));
        }
        uint32_t d = 0;
        for (; d + 32 <= width; d += 32) {
            __m256i v[8];
#pragma GCC unroll 8
            for (uint32_t p = 0; p < 8; p++) {
                v[p] = rf_load_256(row[p] + d);
            }
            turn_8x8(v);
#pragma GCC unroll 8
            for (uint32_t p = 0; p < 8; p++) {
                rf_store_256(to + 8 * d + 32 * p, v[p]);
            }
        }
        for (; d < width; d += 8) {
            __m256i v[8];
            for (uint32_t p = 0; p < 8; p++) {
                v[p] = _mm256_zextsi128_si256(
                    _mm_loadl_epi64((const __m128i *)(const void *)(row[p] + d)));
            }
            turn_8x8(v);
            rf_store_256(to + 8 * d, v[0]);
            rf_store_256(to + 8 * d + 32, v[1]);
        }
    }
    k->rows = scratch;
}

/* n queries at eight positions from j on; q is that of the first. */
RF_INLINE void score_8(const rf_attend *job, uint32_t query, uint32_t n, uint32_t j,
                       rf_attend_line *scores, rf_attend_ahead *ahead)
{
    const rf_attend_line *lines = (const rf_attend_line *)(const void *)job->k.scale;
    const uint32_t spans = job->k.spans, quads = job->k.width / spans / 4;
    const int16_t *q = job->q_codes + query * job->q_stride;
    const uint8_t *k = (const uint8_t *)job->k.rows + (size_t)j * job->k.width;
    __m256 dots[RF_ATTEND_TILE];
    rf_ask_ahead(ahead, 8 * n * job->k.width);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        dots[i] = _mm256_setzero_ps();
    }
    for (uint32_t s = 0; s < spans; s++) {
        __m256i sums[RF_ATTEND_TILE][2];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            sums[i][0] = sums[i][1] = _mm256_setzero_si256();
        }
        for (uint32_t at = 0; at < quads; at++, k += 32, q += 4) {
            __m256i low = rf_load_bytes_i16(k), high = rf_load_bytes_i16(k + 16);
            __asm__("" : "+x"(low), "+x"(high));
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++) {
                int64_t four;
                memcpy(&four, q + i * job->q_stride, sizeof four);
                __m256i x = _mm256_set1_epi64x(four);
                __asm__("" : "+x"(x));
                rf_add_i32(&sums[i][0], _mm256_madd_epi16(x, low));
                rf_add_i32(&sums[i][1], _mm256_madd_epi16(x, high));
            }
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            const __m256 whole = _mm256_cvtepi32_ps(_mm256_hadd_epi32(sums[i][0], sums[i][1]));
            dots[i] = _mm256_fmadd_ps(whole, _mm256_loadu_ps(lines[s] + j), dots[i]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        const __m256 scaled = _mm256_mul_ps(dots[i], _mm256_set1_ps(job->q_scale[query + i]));
        const __m256 bias = _mm256_set1_ps(job->bias ? job->bias[query + i] : 0.0f);
        _mm256_storeu_ps(scores[i] + j, _mm256_fmadd_ps(scaled, _mm256_set1_ps(job->scale), bias));
    }
}

RF_INLINE void score_tile(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_range seen,
                          rf_attend_line *scores, rf_attend_ahead *ahead)
{
    for (uint32_t j = seen.first & ~7u; j < seen.last; j += 8) {
        score_8(job, query, n, j, scores, ahead);
    }
}

void rf_attend_score_codes_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                                rf_attend_range seen, rf_attend_line *scores,
                                rf_attend_ahead *ahead){
    RF_ATTEND_EACH_TILE(score_tile, seen, scores + i, ahead)}

/* ---- values ------------------------------------------------------------------------------- */

/* n queries, 8 * parts dimensions of one span from d on; weights are those of the span. */
RF_INLINE void add_part(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_range seen,
                        rf_attend_line *weights, const float *keep, uint32_t d, uint32_t parts,
                        rf_attend_ahead *ahead)
{
    __m256 acc[RF_ATTEND_TILE][8];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        const float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            acc[i][h] = _mm256_mul_ps(_mm256_loadu_ps(out + 8 * h), _mm256_set1_ps(keep[i]));
        }
    }
    const uint8_t *v = rf_attend_row(&job->v, seen.first) + d;
    rf_ask_ahead(ahead, n * 8 * parts * (seen.last - seen.first));
    for (uint32_t j = seen.first; j < seen.last; j++) {
        __m256 row[8];
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            const __m128i eight = _mm_loadl_epi64((const __m128i *)(const void *)(v + 8 * h));
            row[h] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            const __m256 p = _mm256_broadcast_ss(&weights[i][j]);
#pragma GCC unroll 8
            for (uint32_t h = 0; h < parts; h++) {
                acc[i][h] = _mm256_fmadd_ps(p, row[h], acc[i][h]);
            }
        }
        v += job->v.stride;
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            _mm256_storeu_ps(out + 8 * h, _mm256_add_ps(acc[i][h], _mm256_setzero_ps()));
        }
    }
}

/* As many sums as registers hold beside a row: 8 of one query, 8 of two, 12 of three, 8 of four. */
RF_INLINE void add_span(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_range seen,
                        rf_attend_line *weights, const float *keep, uint32_t d, uint32_t end,
                        rf_attend_ahead *ahead)
{
    const uint32_t most = n == 1 ? 8 : (n == 4 ? 2 : 4);
    for (; d + 8 * most <= end; d += 8 * most) {
        add_part(job, query, n, seen, weights, keep, d, most, ahead);
    }
    for (; most > 2 && d + 16 <= end; d += 16) {
        add_part(job, query, n, seen, weights, keep, d, 2, ahead);
    }
    for (; d < end; d += 8) {
        add_part(job, query, n, seen, weights, keep, d, 1, ahead);
    }
}

/* Weights of one span of values: p times their scales, for whole eights of seen. */
void rf_attend_weights_avx2(const rf_attend *job, uint32_t span, uint32_t count,
                            rf_attend_range seen, rf_attend_line *p, rf_attend_line *weights)
{
    const rf_attend_line *lines = (const rf_attend_line *)(const void *)job->v.scale;
    for (uint32_t j = seen.first & ~7u; j < seen.last; j += 8) {
        const __m256 scale = _mm256_loadu_ps(lines[span] + j);
        for (uint32_t i = 0; i < count; i++) {
            _mm256_storeu_ps(weights[i] + j, _mm256_mul_ps(_mm256_loadu_ps(p[i] + j), scale));
        }
    }
}

void rf_attend_add_codes_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                              rf_attend_range seen, rf_attend_line *p, const float *keep,
                              rf_attend_ahead *ahead)
{
    const uint32_t spans = job->v.spans, span = job->v.width / spans;
    rf_attend_line weights[RF_ATTEND_GROUP];
    for (uint32_t s = 0; s < spans; s++) {
        const uint32_t d = s * span, end = d + span;
        rf_attend_weights_avx2(job, s, count, seen, p, weights);
        RF_ATTEND_EACH_TILE(add_span, seen, weights + i, keep + i, d, end, ahead)
    }
}
