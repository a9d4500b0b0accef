/* kernels/attend_avx2.h: what attention on floats and attention on codes share: the sums of eight
 * vectors at once, and the online softmax of one query.
 *
 * Internal to kernels/, included by *_avx2.c only.
 */
#ifndef RF_KERNELS_ATTEND_AVX2_H
#define RF_KERNELS_ATTEND_AVX2_H

#include "kernels/avx2.h"

/* Element i of the result: lanes of v[i] added 4, 2, 1 apart. */
RF_INLINE __m256 rf_add_each_of_8(const __m256 v[8])
{
    __m256 a[4], b[4], c[2];
    for (int i = 0; i < 4; i++) { /* rows i and i + 4, lanes 4 apart */
        a[i] = _mm256_add_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                             _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    }
    for (int i = 0; i < 4; i += 2) { /* lanes 2 apart: {i, i + 1 | i + 4, i + 5} */
        const __m256d x = _mm256_castps_pd(a[i]), y = _mm256_castps_pd(a[i + 1]);
        b[i / 2] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)),
                                 _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    c[0] = _mm256_shuffle_ps(b[0], b[1], 0x88);
    c[1] = _mm256_shuffle_ps(b[0], b[1], 0xDD);
    return _mm256_add_ps(c[0], c[1]);
}

/* Scores to weights, in place; adds to the query's {max, sum} and returns what its old sums are to
 * be multiplied with. */
static inline float rf_soften(float scores[RF_ATTEND_BLOCK], rf_attend_range seen, float *state)
{
    const uint32_t first = seen.first & ~15u, last = (seen.last + 15) & ~15u;
    const float none = -__builtin_inff();
    for (uint32_t j = first; j < seen.first; j++) {
        scores[j] = none;
    }
    for (uint32_t j = seen.last; j < last; j++) {
        scores[j] = none;
    }
    __m256 top = _mm256_set1_ps(state[0]);
    for (uint32_t j = first; j < last; j += 8) {
        top = _mm256_max_ps(_mm256_loadu_ps(scores + j), top); /* top wins over a NaN */
    }
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(top), _mm256_extractf128_ps(top, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    const float max = _mm_cvtss_f32(m) + 0.0f;
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    for (uint32_t j = first; j < last; j += 16) {
        const __m256 shift = _mm256_set1_ps(max);
        const __m256 a = rf_exp_ymm(_mm256_sub_ps(_mm256_loadu_ps(scores + j), shift));
        const __m256 b = rf_exp_ymm(_mm256_sub_ps(_mm256_loadu_ps(scores + j + 8), shift));
        _mm256_storeu_ps(scores + j, a);
        _mm256_storeu_ps(scores + j + 8, b);
        low = _mm256_add_ps(low, a);
        high = _mm256_add_ps(high, b);
    }
    const float keep = rf_exp_one(state[0] - max);
    state[1] = state[1] * keep + rf_sum_ymm(_mm256_add_ps(low, high));
    state[0] = max;
    return keep;
}

#endif
