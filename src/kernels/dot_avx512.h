/* kernels/dot_avx512.h: how the AVX-512 dots take a token: its activations as bytes, in the order
 * in which the codes of a format come out of its packed bytes.
 *
 * Internal to kernels/, included by *_avx512.c only.
 */
#ifndef RF_KERNELS_DOT_AVX512_H
#define RF_KERNELS_DOT_AVX512_H

#include "kernels/avx512.h"

/* From then on the panel is faster (measured on Zen 5, from memory: they cross at 12). */
#define RF_DOT_TOKENS_512 10u

/* Blocks of 256: 64 codes at a time, as groups of 32. q4_K, q5_K: the two halves of a byte lie 32
 * apart; q2_K, q3_K: bytes of 32 hold the codes of one half of the block. Blocks of 32: four
 * blocks at a time, first their low nibbles. */
typedef enum rf_dot_order {
    RF_DOT_NATURAL,
    RF_DOT_NIBBLES,
    RF_DOT_HALVES,
    RF_DOT_FOURS
} rf_dot_order;

/* One token; all but act_scale, sums and q are in the worker's scratch.
 *   int8                    a = q or m q           high: q
 *   int16, blocks of 256    a = 128 high + low     both signed, within 64
 *   int16, blocks of 32     a = 256 high + low     high signed, low unsigned
 *     in natural order      high: a, as words, through low
 * What lies after k, up to a whole chunk of eight folds, may be read and counts for nothing. */
typedef struct rf_dot_input {
    const uint8_t *q; /* the packed token */
    const int32_t *sums;
    int8_t *high, *low;
    int16_t *multiplier; /* int8, blocks of 256: of each 16 */
    float *fold_scale;
    int32_t *sums_32;
} rf_dot_input;

typedef struct rf_dot_shape {
    rf_format format;
    uint32_t block, block_bytes, fold;
    bool has_min;
    rf_dot_order order;
} rf_dot_shape;

/* Scratch of one token. */
size_t rf_dot_input_bytes(uint32_t k);
void rf_dot_prepare(rf_dot_input *in, const rf_matmul *job, uint32_t t, rf_dot_shape shape,
                    uint8_t *scratch);

/* All lines of count bytes far enough ahead; measured on Zen 5 and Zen 3: 7 to 9 KB are best. */
RF_INLINE void rf_dot_prefetch(const uint8_t *weight, uint32_t count)
{
    const uintptr_t at = (uintptr_t)weight + 8192;
    for (uint32_t i = 0; i < count; i += 64) {
        _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
    }
}

/* Halves of count <= 8 blocks, step bytes apart; zeros after them. */
RF_INLINE __m256 rf_dot_scales(const uint8_t *p, size_t step, uint32_t count)
{
    uint16_t halves[8] = {0};
    if (count == 8) {
        return rf_load_halves(p, step);
    }
    for (uint32_t i = 0; i < count; i++) {
        halves[i] = rf_load_u16(p + i * step);
    }
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)halves));
}

RF_INLINE __m512i rf_add_pairs_32(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
RF_INLINE __m512i rf_add_pairs_64(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

/* In each 128 bits: the sums of v[0], v[1], v[2], v[3] over these 128 bits. */
RF_INLINE __m512i rf_sum_quarters_of_4(const __m512i v[4])
{
    return rf_add_pairs_64(rf_add_pairs_32(v[0], v[1]), rf_add_pairs_32(v[2], v[3]));
}

/* Element i of the result is the sum of the sixteen integers of v[i]. */
RF_INLINE __m256i rf_sum_each_of_8_wide(const __m512i v[8])
{
    const __m512i a = rf_sum_quarters_of_4(v), b = rf_sum_quarters_of_4(v + 4);
    const __m256i x = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m256i y = _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
    return _mm256_add_epi32(_mm256_permute2x128_si256(x, y, 0x20),
                            _mm256_permute2x128_si256(x, y, 0x31));
}

/* Eight folds of one token, one a lane. */
typedef struct rf_dot_eight {
    __m256i sum, min_sum;
} rf_dot_eight;

/* The lanes of up to eight folds from fold at on. */
RF_INLINE __m256 rf_dot_add(__m256 lanes, const rf_dot_eight *e, __m256 scale, __m256 min_scale,
                            const float *act_scale, bool has_min, uint32_t count)
{
    const __m256 act = _mm256_loadu_ps(act_scale); /* has a spare vector */
    __m256 next = _mm256_fmadd_ps(_mm256_mul_ps(scale, act), _mm256_cvtepi32_ps(e->sum), lanes);
    if (has_min) {
        next = _mm256_fmadd_ps(_mm256_mul_ps(min_scale, act), _mm256_cvtepi32_ps(e->min_sum), next);
    }
    return count == 8 ? next : _mm256_blendv_ps(lanes, next, rf_first_lanes(count));
}

/* dot_k_avx512.c: rows of blocks of 256; false: not a format of it. */
bool rf_dot_k_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch);

#endif
