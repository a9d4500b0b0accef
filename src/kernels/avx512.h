/* kernels/avx512.h: what the AVX-512 files share: helpers of 512 bits beside those of avx2.h, and
 * the entries that matmul_avx512.c puts into the table. The instructions are F, BW, VL, DQ and
 * VNNI; tests run these very files through an emulation of the intrinsics (docs/building.md).
 *
 * Internal to kernels/, included by *_avx512.c only.
 */
#ifndef RF_KERNELS_AVX512_H
#define RF_KERNELS_AVX512_H

#include "kernels/unpack_avx2.h"

/* A pinned value is made once, here: gcc would repeat a load or a broadcast in every instruction.
 * acc += dot product, written out: of a loop's intrinsics gcc copies every accumulator twice a
 * round. The emulation has its own of these three. */
#ifndef RF_PIN
#define RF_PIN(v) __asm__("" : "+v"(v))
RF_INLINE void rf_dot_bytes(__m512i *acc, __m512i u, __m512i s)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*acc) : "v"(u), "v"(s));
}
RF_INLINE void rf_dot_words(__m512i *acc, __m512i a, __m512i b)
{
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*acc) : "v"(a), "v"(b));
}
#endif

RF_INLINE __m512i rf_load_512(const void *p)
{
    return _mm512_loadu_si512(p);
}
RF_INLINE void rf_store_512(void *p, __m512i v)
{
    _mm512_storeu_si512(p, v);
}

/* Four bytes at p in every lane. */
RF_INLINE __m512i rf_broadcast_4(const void *p)
{
    int32_t word;
    memcpy(&word, p, sizeof word);
    return _mm512_set1_epi32(word);
}

/* Lanes 8, 4, 2, 1 apart. */
RF_INLINE float rf_sum_zmm(__m512 lanes)
{
    const __m256 high =
        _mm256_castsi256_ps(_mm512_extracti64x4_epi64(_mm512_castps_si512(lanes), 1));
    return rf_sum_ymm(_mm256_add_ps(_mm512_castps512_ps256(lanes), high));
}

/* rf_exp_one of quant.h, operation for operation. */
RF_INLINE __m512 rf_exp_zmm(__m512 x)
{
    const __m512 round = _mm512_set1_ps(RF_EXP_ROUND);
    x = _mm512_max_ps(_mm512_set1_ps(RF_EXP_LOW), x); /* the second operand wins for a NaN */
    x = _mm512_min_ps(_mm512_set1_ps(RF_EXP_HIGH), x);
    const __m512 shifted = _mm512_fmadd_ps(x, _mm512_set1_ps(RF_EXP_LOG2E), round);
    const __m512 n = _mm512_sub_ps(shifted, round);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-RF_EXP_LN2_HIGH), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-RF_EXP_LN2_LOW), r);
    __m512 p = _mm512_fmadd_ps(_mm512_set1_ps(RF_EXP_C7), r, _mm512_set1_ps(RF_EXP_C6));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(RF_EXP_C5));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(RF_EXP_C4));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(RF_EXP_C3));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(RF_EXP_C2));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    const __m512i i = _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4B400000));
    const __m512i half = _mm512_srai_epi32(i, 1), bias = _mm512_set1_epi32(127);
    const __m512i low = _mm512_slli_epi32(_mm512_add_epi32(half, bias), 23);
    const __m512i high = _mm512_slli_epi32(_mm512_add_epi32(_mm512_sub_epi32(i, half), bias), 23);
    return _mm512_mul_ps(_mm512_mul_ps(p, _mm512_castsi512_ps(low)), _mm512_castsi512_ps(high));
}

/* dot_avx512.c: rows one by one for few tokens; false: not so many, or not this format. */
bool rf_dot_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch);
/* matmul_avx512.c: many tokens; the entry of the table decides by their number. */
void rf_matmul_quant_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch);
void rf_matmul_float_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch);
void rf_attend_avx512(const rf_attend *job);
void rf_vector_avx512(rf_kernels *kernels);

#endif
