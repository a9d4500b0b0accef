/* kernels/attend_avx2.c: attention of up to four queries at a time over one block of positions.
 *
 * Queries that follow each other and see the same positions share the rows of K and V: scores of 2
 * queries x 2 positions in registers, then the weighted sum of V for all of them, 16 dimensions at
 * a time. Every sum is that of kernels.h, so it does not matter who shares with whom.
 */
#include "kernels/attend_avx2.h"

#define GROUP 4u

/* sums[q][j] = the eight lanes left of q . k_j after adding 8 apart; 2 queries, 2 rows of K. */
RF_INLINE void dot_2x2(const float *const q[2], const float *k0, const float *k1, uint32_t width,
                       __m256 *const sums[2])
{
    __m256 low[2][2], high[2][2];
    for (int i = 0; i < 2; i++) {
        low[i][0] = low[i][1] = high[i][0] = high[i][1] = _mm256_setzero_ps();
    }
    uint32_t d = 0;
    for (; d + 16 <= width; d += 16) {
        const __m256 a0 = rf_load_once(k0 + d), a1 = rf_load_once(k0 + d + 8);
        const __m256 b0 = rf_load_once(k1 + d), b1 = rf_load_once(k1 + d + 8);
        for (int i = 0; i < 2; i++) {
            const __m256 x = rf_load_once(q[i] + d), y = rf_load_once(q[i] + d + 8);
            low[i][0] = _mm256_fmadd_ps(x, a0, low[i][0]);
            high[i][0] = _mm256_fmadd_ps(y, a1, high[i][0]);
            low[i][1] = _mm256_fmadd_ps(x, b0, low[i][1]);
            high[i][1] = _mm256_fmadd_ps(y, b1, high[i][1]);
        }
    }
    if (d < width) { /* widths are multiples of 8 */
        for (int i = 0; i < 2; i++) {
            const __m256 x = _mm256_loadu_ps(q[i] + d);
            low[i][0] = _mm256_fmadd_ps(x, _mm256_loadu_ps(k0 + d), low[i][0]);
            low[i][1] = _mm256_fmadd_ps(x, _mm256_loadu_ps(k1 + d), low[i][1]);
        }
    }
    for (int i = 0; i < 2; i++) {
        sums[i][0] = _mm256_add_ps(low[i][0], high[i][0]);
        sums[i][1] = _mm256_add_ps(low[i][1], high[i][1]);
    }
}

/* Scores of two queries (they may be one) at the positions of seen. */
static void score_pair(const rf_attend *job, const float *const q[2], rf_attend_range seen,
                       float *const scores[2])
{
    const uint32_t width = job->k_width;
    const __m256 scale = _mm256_set1_ps(job->scale);
    for (uint32_t j = seen.first; j < seen.last; j += 8) {
        __m256 sums[2][8];
        const uint32_t count = RF_MIN(8u, seen.last - j);
        for (uint32_t i = 0; i < 8; i += 2) {
            /* Positions past the end repeat the last one; they are not stored. */
            const float *k0 = job->k + (size_t)(j + RF_MIN(i, count - 1)) * width;
            const float *k1 = job->k + (size_t)(j + RF_MIN(i + 1, count - 1)) * width;
            __m256 *const at[2] = {&sums[0][i], &sums[1][i]};
            dot_2x2(q, k0, k1, width, at);
        }
        for (int i = 0; i < 2; i++) {
            const __m256 scaled = _mm256_mul_ps(rf_add_each_of_8(sums[i]), scale);
            if (count == 8) {
                _mm256_storeu_ps(scores[i] + j, scaled);
            } else {
                float some[8];
                _mm256_storeu_ps(some, scaled);
                memcpy(scores[i] + j, some, count * sizeof(float));
            }
        }
    }
}

/* out = out * keep + sum of p_j v_j for count queries, 8 * parts dimensions from d on. */
RF_INLINE void mix(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                   float scores[GROUP][RF_ATTEND_BLOCK], const float keep[GROUP], uint32_t d,
                   uint32_t parts)
{
    __m256 acc[GROUP][2];
    for (uint32_t i = 0; i < count; i++) {
        const float *out = job->out + (query + i) * job->out_stride + d;
        for (uint32_t h = 0; h < parts; h++) {
            acc[i][h] = _mm256_mul_ps(_mm256_loadu_ps(out + 8 * h), _mm256_set1_ps(keep[i]));
        }
    }
    for (uint32_t j = seen.first; j < seen.last; j++) {
        const float *v = job->v + (size_t)j * job->v_width + d;
        __m256 row[2];
        for (uint32_t h = 0; h < parts; h++) {
            row[h] = rf_load_once(v + 8 * h);
        }
        for (uint32_t i = 0; i < count; i++) {
            const __m256 p = _mm256_set1_ps(scores[i][j]);
            for (uint32_t h = 0; h < parts; h++) {
                acc[i][h] = _mm256_fmadd_ps(p, row[h], acc[i][h]);
            }
        }
    }
    for (uint32_t i = 0; i < count; i++) {
        float *out = job->out + (query + i) * job->out_stride + d;
        for (uint32_t h = 0; h < parts; h++) {
            _mm256_storeu_ps(out + 8 * h, acc[i][h]);
        }
    }
}

RF_INLINE void mix_all(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen,
                       float scores[GROUP][RF_ATTEND_BLOCK], const float keep[GROUP])
{
    uint32_t d = 0;
    for (; d + 16 <= job->v_width; d += 16) {
        mix(job, query, count, seen, scores, keep, d, 2);
    }
    if (d < job->v_width) {
        mix(job, query, count, seen, scores, keep, d, 1);
    }
}

/* count <= GROUP queries from query on, which all see the same positions. */
static void attend_group(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range seen)
{
    float scores[GROUP][RF_ATTEND_BLOCK], keep[GROUP];
    for (uint32_t i = 0; i < count; i += 2) {
        const uint32_t second = RF_MIN(i + 1, count - 1);
        const float *const q[2] = {job->q + (query + i) * job->q_stride,
                                   job->q + (query + second) * job->q_stride};
        float *const to[2] = {scores[i], scores[second]};
        score_pair(job, q, seen, to);
    }
    for (uint32_t i = 0; i < count; i++) {
        keep[i] = rf_soften(scores[i], seen, job->state + 2 * (size_t)(query + i));
    }
    switch (count) {
    case 1:
        mix_all(job, query, 1, seen, scores, keep);
        break;
    case 2:
        mix_all(job, query, 2, seen, scores, keep);
        break;
    case 3:
        mix_all(job, query, 3, seen, scores, keep);
        break;
    default:
        mix_all(job, query, 4, seen, scores, keep);
        break;
    }
}

void rf_attend_avx2(const rf_attend *job)
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
            attend_group(job, i, count, seen);
        }
        i += count;
    }
}
