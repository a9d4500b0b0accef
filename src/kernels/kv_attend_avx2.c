/* kernels/kv_attend_avx2.c: attention of up to four queries at a time on one block of expanded
 * codes.
 *
 * Queries that follow each other and see the same positions share the widened codes: integer dots
 * of eight positions at a time, then the weighted sum of V for all of them, 16 to 64 dimensions at
 * a time. Every sum is that of kv_codec.h, so it does not matter who shares with whom.
 */
#include "kernels/attend_avx2.h"
#include "kernels/kv_scalar.h"

#define GROUP 4u /* queries */
#define PARTS 8u /* vectors of eight dimensions, at most */

/* Scales of span s of spans at eight positions; past `left` the last one is repeated. */
RF_INLINE __m256 scales_of_8(const float *scales, uint32_t spans, uint32_t left, uint32_t s)
{
    const float *scale = scales + s;
    if (left == 8 && spans == 1) {
        return _mm256_loadu_ps(scale);
    }
    if (left == 8 && spans == 2) {
        const __m256 a = _mm256_loadu_ps(scales), b = _mm256_loadu_ps(scales + 8);
        const __m256 some = s == 0 ? _mm256_shuffle_ps(a, b, 0x88) : _mm256_shuffle_ps(a, b, 0xDD);
        return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(some), 0xD8));
    }
    float eight[8];
    for (uint32_t p = 0; p < 8; p++) {
        eight[p] = scale[(size_t)RF_MIN(p, left - 1) * spans];
    }
    return _mm256_setr_ps(eight[0], eight[1], eight[2], eight[3], eight[4], eight[5], eight[6],
                          eight[7]);
}

/* Partial sums of one span of two positions, side by side: pairs added once. */
RF_INLINE void dots_of_2(const int8_t *k0, const int8_t *k1, const int16_t *q, uint32_t q_stride,
                         uint32_t count, uint32_t span, __m256i pairs[GROUP])
{
    __m256i sums[GROUP][2];
    if (span == 8) {
        const __m128i *at0 = (const __m128i *)k0, *at1 = (const __m128i *)k1;
        const __m128i a = _mm_cvtepi8_epi16(_mm_loadl_epi64(at0));
        const __m128i b = _mm_cvtepi8_epi16(_mm_loadl_epi64(at1));
        for (uint32_t i = 0; i < count; i++) {
            const __m128i row = _mm_loadu_si128((const __m128i *)(q + (size_t)i * q_stride));
            pairs[i] = rf_add_halves_32(_mm256_zextsi128_si256(_mm_madd_epi16(a, row)),
                                        _mm256_zextsi128_si256(_mm_madd_epi16(b, row)));
        }
        return;
    }
#pragma GCC unroll 4
    for (uint32_t at = 0; at < span; at += 16) {
        const __m256i a = rf_load_bytes_i16(k0 + at), b = rf_load_bytes_i16(k1 + at);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < count; i++) {
            const __m256i row = rf_load_256(q + (size_t)i * q_stride + at);
            const __m256i x = _mm256_madd_epi16(a, row), y = _mm256_madd_epi16(b, row);
            sums[i][0] = at == 0 ? x : _mm256_add_epi32(sums[i][0], x);
            sums[i][1] = at == 0 ? y : _mm256_add_epi32(sums[i][1], y);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < count; i++) {
        pairs[i] = rf_add_halves_32(sums[i][0], sums[i][1]);
    }
}

/* Sums of span s of 8 positions for count queries; dots go on by them. */
RF_INLINE void dots_of_8(const rf_attend_codes *job, uint32_t query, uint32_t count,
                         const int8_t *const rows[8], __m256 scale, uint32_t s, uint32_t span,
                         __m256 dots[GROUP])
{
    const int16_t *q = job->q + (size_t)query * job->k_width + s * span;
    __m256i fours[GROUP][2];
    for (uint32_t h = 0; h < 2; h++) {
        __m256i pairs[2][GROUP];
#pragma GCC unroll 2
        for (uint32_t p = 0; p < 2; p++) {
            dots_of_2(rows[4 * h + 2 * p] + s * span, rows[4 * h + 2 * p + 1] + s * span, q,
                      job->k_width, count, span, pairs[p]);
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < count; i++) {
            fours[i][h] = rf_add_halves_64(pairs[0][i], pairs[1][i]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < count; i++) {
        const __m256i whole =
            _mm256_add_epi32(_mm256_permute2x128_si256(fours[i][0], fours[i][1], 0x20),
                             _mm256_permute2x128_si256(fours[i][0], fours[i][1], 0x31));
        dots[i] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), scale, dots[i]);
    }
}

RF_INLINE void score_group(const rf_attend_codes *job, uint32_t query, uint32_t count,
                           uint32_t span, rf_attend_range seen,
                           float scores[GROUP][RF_ATTEND_BLOCK + 8])
{
    for (uint32_t j = seen.first; j < seen.last; j += 8) {
        const uint32_t left = RF_MIN(8u, seen.last - j);
        const int8_t *rows[8];
        __m256 dots[GROUP];
        for (uint32_t p = 0; p < 8; p++) { /* past the end the last one again; it is not stored */
            rows[p] = job->k + (size_t)(j + RF_MIN(p, left - 1)) * job->k_width;
        }
        for (uint32_t i = 0; i < count; i++) {
            dots[i] = _mm256_setzero_ps();
        }
        for (uint32_t s = 0; s < job->k_spans; s++) {
            const __m256 scale =
                scales_of_8(job->k_scale + (size_t)j * job->k_spans, job->k_spans, left, s);
            dots_of_8(job, query, count, rows, scale, s, span, dots);
        }
        for (uint32_t i = 0; i < count; i++) {
            const __m256 scaled = _mm256_mul_ps(dots[i], _mm256_set1_ps(job->q_scale[query + i]));
            const __m256 bias = _mm256_set1_ps(job->bias ? job->bias[query + i] : 0.0f);
            const __m256 score = _mm256_fmadd_ps(scaled, _mm256_set1_ps(job->scale), bias);
            if (left == 8) {
                _mm256_storeu_ps(scores[i] + j, score);
            } else {
                float eight[8];
                _mm256_storeu_ps(eight, score);
                memcpy(scores[i] + j, eight, left * sizeof(float));
            }
        }
    }
}

/* Spans of 8 and 16: rare widths, one query after the other. */
static void score_small(const rf_attend_codes *job, uint32_t query, uint32_t count,
                        rf_attend_range seen, float scores[GROUP][RF_ATTEND_BLOCK + 8])
{
    for (uint32_t i = 0; i < count; i++) {
        if (job->k_width / job->k_spans == 8) {
            score_group(job, query + i, 1, 8, seen, scores + i);
        } else {
            score_group(job, query + i, 1, 16, seen, scores + i);
        }
    }
}

/* out = out * keep + sum of weight_j * v_j for count queries, 8 * parts dimensions from d on, all
 * of one span; weights: p_j * scale of that span. */
RF_INLINE void mix(const rf_attend_codes *job, uint32_t query, uint32_t count, rf_attend_range seen,
                   float weights[GROUP][RF_ATTEND_BLOCK + 8], const float keep[GROUP], uint32_t d,
                   uint32_t parts)
{
    __m256 acc[GROUP][PARTS];
    for (uint32_t i = 0; i < count; i++) {
        const float *out = job->out + (query + i) * job->out_stride + d;
        for (uint32_t h = 0; h < parts; h++) {
            acc[i][h] = _mm256_mul_ps(_mm256_loadu_ps(out + 8 * h), _mm256_set1_ps(keep[i]));
        }
    }
    const int8_t *v = job->v + (size_t)seen.first * job->v_width + d;
    for (uint32_t j = seen.first; j < seen.last; j++) {
        __m256 p[GROUP];
#pragma GCC unroll 4
        for (uint32_t i = 0; i < count; i++) {
            p[i] = _mm256_broadcast_ss(&weights[i][j]);
        }
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            const __m128i eight = _mm_loadl_epi64((const __m128i *)(v + 8 * h));
            const __m256 row = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
#pragma GCC unroll 4
            for (uint32_t i = 0; i < count; i++) {
                acc[i][h] = _mm256_fmadd_ps(p[i], row, acc[i][h]);
            }
        }
        v += job->v_width;
    }
    for (uint32_t i = 0; i < count; i++) {
        float *out = job->out + (query + i) * job->out_stride + d;
        for (uint32_t h = 0; h < parts; h++) {
            _mm256_storeu_ps(out + 8 * h, acc[i][h]);
        }
    }
}

RF_INLINE void mix_all(const rf_attend_codes *job, uint32_t query, uint32_t count,
                       rf_attend_range seen, float scores[GROUP][RF_ATTEND_BLOCK + 8],
                       const float keep[GROUP])
{
    /* As many sums as registers hold: 8 of one query, 8 of two, 12 of three, 8 of four. */
    const uint32_t most = count == 1 ? 8 : (count < 4 ? 4 : 2);
    const uint32_t span = job->v_width / job->v_spans;
    float weights[GROUP][RF_ATTEND_BLOCK + 8];
    for (uint32_t s = 0; s < job->v_spans; s++) {
        for (uint32_t j = seen.first; j < seen.last; j += 8) {
            const uint32_t left = RF_MIN(8u, seen.last - j);
            const __m256 scale =
                scales_of_8(job->v_scale + (size_t)j * job->v_spans, job->v_spans, left, s);
            for (uint32_t i = 0; i < count; i++) {
                _mm256_storeu_ps(weights[i] + j,
                                 _mm256_mul_ps(_mm256_loadu_ps(scores[i] + j), scale));
            }
        }
        uint32_t d = s * span;
        const uint32_t end = d + span;
        for (; d + 8 * most <= end; d += 8 * most) {
            mix(job, query, count, seen, weights, keep, d, most);
        }
        for (; most > 4 && d + 32 <= end; d += 32) {
            mix(job, query, count, seen, weights, keep, d, 4);
        }
        for (; most > 2 && d + 16 <= end; d += 16) {
            mix(job, query, count, seen, weights, keep, d, 2);
        }
        for (; d < end; d += 8) {
            mix(job, query, count, seen, weights, keep, d, 1);
        }
    }
}

RF_INLINE void attend_count(const rf_attend_codes *job, uint32_t query, uint32_t count,
                            rf_attend_range seen)
{
    float scores[GROUP][RF_ATTEND_BLOCK + 8], keep[GROUP]; /* 8: loads past the last position */
    switch (job->k_width / job->k_spans) {
    case 8:
    case 16:
        score_small(job, query, count, seen, scores);
        break;
    case 32:
        score_group(job, query, count, 32, seen, scores);
        break;
    case 64:
        score_group(job, query, count, 64, seen, scores);
        break;
    default:
        score_group(job, query, count, 128, seen, scores);
        break;
    }
    for (uint32_t i = 0; i < count; i++) {
        keep[i] = rf_soften(scores[i], seen, job->state + 2 * (size_t)(query + i));
    }
    mix_all(job, query, count, seen, scores, keep);
}

void rf_attend_codes_avx2(const rf_attend_codes *job)
{
    for (uint32_t i = 0; i < job->query_count;) {
        const rf_attend_range seen = job->visible[i];
        uint32_t count = 1;
        while (count < GROUP && i + count < job->query_count &&
               job->visible[i + count].first == seen.first &&
               job->visible[i + count].last == seen.last) {
            count++;
        }
        if (seen.first < seen.last) {
            switch (count) {
            case 1:
                attend_count(job, i, 1, seen);
                break;
            case 2:
                attend_count(job, i, 2, seen);
                break;
            case 3:
                attend_count(job, i, 3, seen);
                break;
            default:
                attend_count(job, i, 4, seen);
                break;
            }
        }
        i += count;
    }
}
