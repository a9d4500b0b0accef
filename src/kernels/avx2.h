/* kernels/avx2.h: what the AVX2 files share: small vector helpers that repeat the definitions of
 * kernels.h one for one, and the entries that matmul_avx2.c puts into the table.
 *
 * Internal to kernels/, included by *_avx2.c only.
 */
#ifndef RF_KERNELS_AVX2_H
#define RF_KERNELS_AVX2_H

#include "kernels/act.h"
#include "kernels/matmul_scalar.h"
#include "kernels/quant.h"
#include "kernels/vector_scalar.h"

#include <immintrin.h>

#define RF_INLINE static inline __attribute__((always_inline))

/* Small tables that are read back by broadcasting loads stay in memory: gcc would keep them in
 * registers and permute, or unroll whole unpackings and spill. */
#define RF_KEEP_IN_MEMORY(array) __asm__("" : "+m"(array))

/* Loaded once for all that use it: gcc would repeat the load in every instruction. */
RF_INLINE __m256 rf_load_once(const float *p)
{
    __m256 v = _mm256_loadu_ps(p);
    __asm__("" : "+x"(v));
    return v;
}

/* acc += product, written out: gcc sees integer intrinsics as plain vector arithmetic, reorders and
 * reassociates it, and then copies and spills accumulators (measured: panels 50 -> 75 GMAC/s). */
RF_INLINE void rf_add_i32(__m256i *acc, __m256i product)
{
    __asm__("vpaddd %1, %0, %0" : "+x"(*acc) : "x"(product));
}

RF_INLINE void rf_add_i16(__m256i *acc, __m256i product)
{
    __asm__("vpaddw %1, %0, %0" : "+x"(*acc) : "x"(product));
}

RF_INLINE __m256i rf_load_256_once(const void *p)
{
    __m256i v = _mm256_loadu_si256((const __m256i *)p);
    __asm__("" : "+x"(v));
    return v;
}

RF_INLINE __m256i rf_load_bytes_i16(const void *p) /* 16 signed bytes */
{
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p));
}
RF_INLINE __m256i rf_load_bytes_u16(const void *p) /* 16 unsigned bytes */
{
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
}
RF_INLINE __m256i rf_load_256(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}
RF_INLINE void rf_store_256(void *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)p, v);
}

RF_INLINE float rf_load_f16(const void *p)
{
    uint16_t half;
    memcpy(&half, p, sizeof half);
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
}

RF_INLINE __m256i rf_add_halves_32(__m256i a, __m256i b)
{
    return _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
}
RF_INLINE __m256i rf_add_halves_64(__m256i a, __m256i b)
{
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Eight rows of eight dwords to eight columns. */
RF_INLINE void rf_transpose_8(__m256i a[8])
{
    __m256i b[8];
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);     /* columns 0 1 | 4 5 of rows i, i + 1 */
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]); /* 2 3 | 6 7 */
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);         /* 0 | 4 of rows i .. i + 3 */
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);     /* 1 | 5 */
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]); /* 2 | 6 */
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]); /* 3 | 7 */
    }
    for (int i = 0; i < 4; i++) {
        const __m256i low = a[i], high = a[i + 4];
        a[i] = _mm256_permute2x128_si256(low, high, 0x20);
        a[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
}

/* Element i of the result is the sum of the eight integers of v[i]. */
RF_INLINE __m256i rf_sum_each_of_8(const __m256i v[8])
{
    const __m256i a = rf_add_halves_64(rf_add_halves_32(v[0], v[1]), rf_add_halves_32(v[2], v[3]));
    const __m256i b = rf_add_halves_64(rf_add_halves_32(v[4], v[5]), rf_add_halves_32(v[6], v[7]));
    return _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
}

/* Sums of 16 to sums of 32: sixteen integers to eight. */
RF_INLINE __m256i rf_sums_of_32(const int32_t *sums)
{
    const __m256i pairs = _mm256_hadd_epi32(rf_load_256(sums), rf_load_256(sums + 8));
    return _mm256_permute4x64_epi64(pairs, 0xD8);
}

/* Lanes 0 .. count - 1 all ones. */
RF_INLINE __m256 rf_first_lanes(uint32_t count)
{
    const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), index));
}

/* Lanes 4, 2, 1 apart. */
RF_INLINE float rf_sum_ymm(__m256 lanes)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(lanes), _mm256_extractf128_ps(lanes, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    a = _mm_add_ss(a, _mm_movehdup_ps(a));
    return _mm_cvtss_f32(a);
}

/* rf_exp_one of quant.h, operation for operation, of count vectors side by side: one alone is a
 * chain of 20 operations, which would fill the scheduler with waiting (measured on Zen 3: four
 * side by side take a third of the time). */
RF_INLINE void rf_exp_each(__m256 *x, uint32_t count)
{
    static const float powers[] = {RF_EXP_C6, RF_EXP_C5, RF_EXP_C4, RF_EXP_C3, RF_EXP_C2, 1, 1};
    const __m256 round = _mm256_set1_ps(RF_EXP_ROUND);
    __m256 shifted[4], r[4], p[4];
#define RF_EACH _Pragma("GCC unroll 4") for (uint32_t e = 0; e < count; e++)
    RF_EACH x[e] = _mm256_max_ps(_mm256_set1_ps(RF_EXP_LOW), x[e]); /* the second wins for a NaN */
    RF_EACH x[e] = _mm256_min_ps(_mm256_set1_ps(RF_EXP_HIGH), x[e]);
    RF_EACH shifted[e] = _mm256_fmadd_ps(x[e], _mm256_set1_ps(RF_EXP_LOG2E), round);
    RF_EACH p[e] = _mm256_sub_ps(shifted[e], round);
    RF_EACH r[e] = _mm256_fmadd_ps(p[e], _mm256_set1_ps(-RF_EXP_LN2_HIGH), x[e]);
    RF_EACH r[e] = _mm256_fmadd_ps(p[e], _mm256_set1_ps(-RF_EXP_LN2_LOW), r[e]);
    RF_EACH p[e] = _mm256_set1_ps(RF_EXP_C7);
#pragma GCC unroll 7
    for (uint32_t i = 0; i < 7; i++) {
        RF_EACH p[e] = _mm256_fmadd_ps(p[e], r[e], _mm256_set1_ps(powers[i]));
    }
    RF_EACH
    {
        const __m256i i =
            _mm256_sub_epi32(_mm256_castps_si256(shifted[e]), _mm256_set1_epi32(0x4B400000));
        const __m256i half = _mm256_srai_epi32(i, 1), bias = _mm256_set1_epi32(127);
        const __m256i low = _mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
        const __m256i rest = _mm256_sub_epi32(i, half);
        const __m256i high = _mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23);
        x[e] =
            _mm256_mul_ps(_mm256_mul_ps(p[e], _mm256_castsi256_ps(low)), _mm256_castsi256_ps(high));
    }
#undef RF_EACH
}

RF_INLINE __m256 rf_exp_ymm(__m256 x)
{
    rf_exp_each(&x, 1);
    return x;
}

/* Packed bytes are asked for this far ahead; measured on Zen 5 and Zen 3: 7 to 9 KB are best. */
#define RF_PREFETCH_BYTES 8192u

/* All lines of count bytes from RF_PREFETCH_BYTES ahead on, but none behind end: those are another
 * worker's. */
RF_INLINE void rf_prefetch_lines(const uint8_t *weight, uint32_t count, uintptr_t end)
{
    const uintptr_t at = RF_MIN((uintptr_t)weight + RF_PREFETCH_BYTES, end - count);
    for (uint32_t i = 0; i < count; i += 64) {
        _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
    }
}

/* The first RF_PREFETCH_BYTES of rows, which no loop asks for: called before tokens are prepared.
 * Returns the end of the rows. (Measured on Zen 3, every other piece of 160 rows, with the end in
 * rf_prefetch_lines: q8_0 17.7 -> 18.6 GB/s, q4_K 16.3 -> 16.5.) */
RF_INLINE uintptr_t rf_prefetch_first(const rf_matmul *job, uint32_t first, uint32_t last)
{
    const uintptr_t begin = (uintptr_t)job->weight + first * job->weight_row_bytes;
    const uintptr_t end = (uintptr_t)job->weight + last * job->weight_row_bytes;
    for (uintptr_t at = begin; at < RF_MIN(begin + RF_PREFETCH_BYTES, end); at += 64) {
        _mm_prefetch((const char *)at, _MM_HINT_T0);
    }
    return end;
}

/* dot_avx2.c, dot_k_avx2.c (K formats; false: not served): rows one by one, straight from the
 * packed bytes, for at most so many tokens. */
#define RF_DOT_TOKENS_MAX 4u
void rf_dot_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch);
bool rf_dot_k_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch);

void rf_matmul_float_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                          void *scratch);
void rf_pack_int16_avx2(const rf_act_layout *layout, const float *x, void *packed);
void rf_pack_int8_avx2(const rf_act_layout *layout, const float *x, void *packed);
/* act_avx2.c: the integers of a packed int8 token as int16, which is what they stand for. */
void rf_widen_avx2(const rf_act_layout *layout, const uint8_t *act, int16_t *q);
void rf_attend_avx2(const rf_attend *job);
void rf_attend_join_avx2(float *state, float *out, const float *part_state, const float *part_out,
                         uint32_t width);
void rf_vector_avx2(rf_kernels *kernels);

#endif
