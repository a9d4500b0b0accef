/* kernels/act_avx2.c: the packing of activations with AVX2, bit for bit that of act.c, and the
 * widening of int8 tokens for kernels that take int16.
 */
#include "kernels/avx2.h"

RF_INLINE uint32_t largest_bits(const float *x, uint32_t count)
{
    const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
    __m256i max = _mm256_setzero_si256();
    for (uint32_t i = 0; i < count; i += 8) {
        max = _mm256_max_epi32(max, _mm256_and_si256(rf_load_256(x + i), magnitude));
    }
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(max), _mm256_extracti128_si256(max, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

RF_INLINE int32_t sum_i32(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
    return _mm_cvtsi128_si32(s);
}

void rf_pack_int16_avx2(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int16_t *q = packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_32 : RF_ACT_LIMIT_256;
    for (uint32_t at = 0; at < layout->k; at += block) {
        const rf_act_scale scale = rf_act_scale_of(largest_bits(x + at, block), limit);
        const __m256 inverse = _mm256_set1_ps(scale.inverse);
        scales[at / block] = scale.scale;
        if (scale.inverse == 0.0f) {
            memset(q + at, 0, block * sizeof *q);
            memset(sums + at / 16, 0, block / 16 * sizeof *sums);
            continue;
        }
        for (uint32_t i = at; i < at + block; i += 16) {
            const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), inverse));
            const __m256i b =
                _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i + 8), inverse));
            rf_store_256(q + i, _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8));
            sums[i / 16] = sum_i32(_mm256_add_epi32(a, b));
        }
    }
}

/* 32 values: their codes, and multiplier times the sums of both halves. */
RF_INLINE void pack_32(const float *x, float inverse, int32_t multiplier, int8_t *q, int32_t *sums)
{
    const __m256 by = _mm256_set1_ps(inverse);
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x), by));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8), by));
    const __m256i c = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 16), by));
    const __m256i d = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 24), by));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    rf_store_256(q, _mm256_permutevar8x32_epi32(bytes, order));
    sums[0] = multiplier * sum_i32(_mm256_add_epi32(a, b));
    sums[1] = multiplier * sum_i32(_mm256_add_epi32(c, d));
}

void rf_pack_int8_avx2(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int8_t *q = packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int16_t *multipliers = (int16_t *)(void *)(bytes + layout->multiplier_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_8 : RF_ACT_LIMIT_8K;
    for (uint32_t at = 0; at < layout->k; at += block) {
        const uint32_t amax_bits = largest_bits(x + at, block);
        const rf_act_scale scale = rf_act_scale_of(amax_bits, limit);
        const float per_amax = RF_ACT_MULTIPLES / rf_bits_float(amax_bits);
        scales[at / block] = scale.scale;
        for (uint32_t part = at; part < at + block; part += 32) {
            int32_t multiplier = 1;
            if (block == 256 && scale.inverse != 0.0f) {
                multiplier = rf_act_multiplier(largest_bits(x + part, 32), per_amax);
            }
            if (block == 256) {
                multipliers[part / 32] = (int16_t)multiplier;
            }
            const float inverse = scale.inverse / (float)multiplier;
            if (inverse == 0.0f) {
                memset(q + part, 0, 32);
                sums[part / 16] = sums[part / 16 + 1] = 0;
                continue;
            }
            pack_32(x + part, inverse, multiplier, q + part, sums + part / 16);
        }
    }
}

void rf_widen_avx2(const rf_act_layout *layout, const uint8_t *act, int16_t *q)
{
    const int8_t *from = rf_act_q8(act);
    const int16_t *multipliers = rf_act_multipliers(act, layout);
    for (size_t i = 0; i < layout->k; i += 32) {
        __m256i a = rf_load_bytes_i16(from + i), b = rf_load_bytes_i16(from + i + 16);
        if (layout->block == 256) {
            const __m256i m = _mm256_set1_epi16(multipliers[i / 32]);
            a = _mm256_mullo_epi16(a, m);
            b = _mm256_mullo_epi16(b, m);
        }
        rf_store_256(q + i, a);
        rf_store_256(q + i + 16, b);
    }
}
