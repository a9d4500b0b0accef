/* kernels/dot_avx2.c: rows of quantised weights times few tokens, straight from the packed bytes.
 *
 * A row is walked in chunks of eight folds. Each fold leaves a vector of eight partial integers for
 * each token; eight such vectors become one vector of eight fold sums by one transposing addition,
 * and that vector meets the eight lanes of kernels.h in a single fma.
 */
#include "kernels/unpack_avx2.h"

/* Packed bytes are asked for this far ahead; measured on Zen 5 and Zen 3: 7 to 9 KB are best. */
#define PREFETCH_BYTES 8192u

typedef struct chunk { /* what eight folds leave; missing folds are zero */
    __m256i sum[4][RF_FOLD_LANES];
    __m256i min_sum[4][RF_FOLD_LANES];
    float scale[RF_FOLD_LANES];
    float min_scale[RF_FOLD_LANES];
    float act_scale[4][RF_FOLD_LANES];
} chunk;

/* Partial sums over count weights for each token. */
RF_INLINE void fold_dot(const int16_t *w, const int16_t *const q[4], size_t k, uint32_t count,
                        uint32_t tokens, chunk *out, uint32_t f)
{
    __m256i acc[4];
    for (uint32_t t = 0; t < tokens; t++) {
        acc[t] = _mm256_setzero_si256();
    }
    for (uint32_t i = 0; i < count; i += 16) {
        const __m256i weight = rf_load_256(w + i);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i product = _mm256_madd_epi16(weight, rf_load_256(q[t] + k + i));
            acc[t] = _mm256_add_epi32(acc[t], product);
        }
    }
    for (uint32_t t = 0; t < tokens; t++) {
        out->sum[t][f] = acc[t];
    }
}

/* Partial sums of the minimums of a fold; sums begins at the fold. */
RF_INLINE __m256i fold_min_dot(const int16_t *mins, const int32_t *sums, uint32_t fold)
{
    if (fold == 32) { /* q4_1, q5_1: the code is 1 */
        return _mm256_zextsi128_si256(_mm_cvtsi32_si128(sums[0] + sums[1]));
    }
    __m256i acc = _mm256_setzero_si256();
    for (uint32_t j = 0; j < fold / 16; j += 8) {
        const __m256i code = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(mins + j)));
        acc = _mm256_add_epi32(acc, _mm256_mullo_epi32(code, rf_load_256(sums + j)));
    }
    return acc;
}

RF_INLINE __m256 add_chunk(__m256 lanes, const chunk *in, uint32_t t, uint32_t folds,
                           uint32_t min_step)
{
    const __m256 act = _mm256_loadu_ps(in->act_scale[t]);
    const __m256 sum = _mm256_cvtepi32_ps(rf_sum_each_of_8(in->sum[t]));
    __m256 next = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_loadu_ps(in->scale), act), sum, lanes);
    if (min_step != 0) {
        const __m256 min_sum = _mm256_cvtepi32_ps(rf_sum_each_of_8(in->min_sum[t]));
        next = _mm256_fmadd_ps(_mm256_mul_ps(_mm256_loadu_ps(in->min_scale), act), min_sum, next);
    }
    return folds == RF_FOLD_LANES ? next : _mm256_blendv_ps(lanes, next, rf_first_lanes(folds));
}

/* Rows for tokens [first, first + tokens), tokens <= 4. All but job and the rows are constants. */
RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row, uint32_t first,
                        uint32_t tokens, uint32_t block, uint32_t block_bytes, uint32_t fold,
                        uint32_t min_step, rf_unpack_fn unpack)
{
    const int16_t *q[4];
    const float *act_scale[4];
    const int32_t *sums[4];
    const uint32_t folds = job->k / fold;
    for (uint32_t t = 0; t < tokens; t++) {
        const uint8_t *act = rf_matmul_act(job, first + t);
        q[t] = rf_act_q16(act);
        act_scale[t] = rf_act_scales(act, &job->layout);
        sums[t] = rf_act_sums(act, &job->layout);
    }
    for (uint32_t row = first_row; row < last_row; row++) {
        const uint8_t *weight = job->weight + row * job->weight_row_bytes;
        __m256 lanes[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                           _mm256_setzero_ps()};
        for (uint32_t at = 0; at < folds; at += RF_FOLD_LANES) {
            const uint32_t count = RF_MIN(RF_FOLD_LANES, folds - at);
            chunk part;
            if (count < RF_FOLD_LANES) {
                memset(&part, 0, sizeof part);
            }
            for (uint32_t f = 0; f < count; weight += block_bytes) {
                rf_unpacked w;
                const uint32_t b = (at + f) * fold / block;
                unpack(weight, &w);
                for (uint32_t i = 0; i < block; i += fold, f++) {
                    const size_t k = (size_t)b * block + i;
                    fold_dot(w.w + i, q, k, fold, tokens, &part, f);
                    part.scale[f] = w.scale;
                    part.min_scale[f] = min_step != 0 ? w.min_scale : 0.0f;
                    for (uint32_t t = 0; t < tokens; t++) {
                        part.act_scale[t][f] = act_scale[t][b];
                        if (min_step != 0) {
                            part.min_sum[t][f] =
                                fold_min_dot(w.mins + i / 16, sums[t] + k / 16, fold);
                        }
                    }
                }
            }
            for (uint32_t t = 0; t < tokens; t++) {
                lanes[t] = add_chunk(lanes[t], &part, t, count, min_step);
            }
        }
        for (uint32_t t = 0; t < tokens; t++) {
            rf_matmul_store(job, first + t, row, rf_sum_ymm(lanes[t]));
        }
    }
}

RF_INLINE void dot_tokens(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                          uint32_t block, uint32_t block_bytes, uint32_t fold, uint32_t min_step,
                          rf_unpack_fn unpack)
{
    uint32_t t = 0;
    for (; t + 4 <= job->token_count; t += 4) {
        dot_rows(job, first_row, last_row, t, 4, block, block_bytes, fold, min_step, unpack);
    }
    for (; t + 2 <= job->token_count; t += 2) {
        dot_rows(job, first_row, last_row, t, 2, block, block_bytes, fold, min_step, unpack);
    }
    for (; t < job->token_count; t++) {
        dot_rows(job, first_row, last_row, t, 1, block, block_bytes, fold, min_step, unpack);
    }
}

void rf_dot_avx2(const rf_matmul *job, uint32_t first, uint32_t last)
{
    switch (job->format) { /* each case is the loop above with its format's unpacking inlined */
    case RF_Q4_0:
        dot_tokens(job, first, last, 32, sizeof(rf_block_q4_0), 32, 0, rf_unpack_q4_0);
        break;
    case RF_Q4_1:
        dot_tokens(job, first, last, 32, sizeof(rf_block_q4_1), 32, 32, rf_unpack_q4_1);
        break;
    case RF_Q5_0:
        dot_tokens(job, first, last, 32, sizeof(rf_block_q5_0), 32, 0, rf_unpack_q5_0);
        break;
    case RF_Q5_1:
        dot_tokens(job, first, last, 32, sizeof(rf_block_q5_1), 32, 32, rf_unpack_q5_1);
        break;
    case RF_Q8_0:
        dot_tokens(job, first, last, 32, sizeof(rf_block_q8_0), 32, 0, rf_unpack_q8_0);
        break;
    case RF_Q2_K:
        dot_tokens(job, first, last, 256, sizeof(rf_block_q2_k), 256, 16, rf_unpack_q2_k);
        break;
    case RF_Q3_K:
        dot_tokens(job, first, last, 256, sizeof(rf_block_q3_k), 256, 0, rf_unpack_q3_k);
        break;
    case RF_Q4_K:
        dot_tokens(job, first, last, 256, sizeof(rf_block_q4_k), 256, 32, rf_unpack_q4_k);
        break;
    case RF_Q5_K:
        dot_tokens(job, first, last, 256, sizeof(rf_block_q5_k), 128, 32, rf_unpack_q5_k);
        break;
    case RF_Q6_K:
        dot_tokens(job, first, last, 256, sizeof(rf_block_q6_k), 64, 0, rf_unpack_q6_k);
        break;
    default:
        break;
    }
}
