/* tests/unit/avx512_emulated.h: the AVX-512 intrinsics that the kernels use, each as two of AVX2 or
 * as a loop over elements, so that their files run where no processor has them.
 *
 * Included before everything else (-include) in the emulated build of tools/tests.cmake; only for
 * tests. What the instructions compute: Intel's intrinsics guide.
 */
#ifndef RF_AVX512_EMULATED_H
#define RF_AVX512_EMULATED_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef struct emu_i {
    __m256i a, b; /* the low and the high half */
} emu_i;
typedef struct emu_f {
    __m256 a, b;
} emu_f;
typedef union emu_bits { /* element by element */
    emu_i i;
    emu_f f;
    int8_t i8[64];
    int16_t i16[32];
    int32_t i32[16];
    uint16_t u16[32];
    float f32[16];
} emu_bits;

#define __m512i   emu_i
#define __m512    emu_f
#define RF_PIN(v) (void)(v)

#define EMU static inline __attribute__((always_inline, unused))

/* Functions of halves: results and operands of one type. */
#define EMU_1(name, half)                                                                          \
    EMU emu_i emu_##name(emu_i x)                                                                  \
    {                                                                                              \
        return (emu_i){half(x.a), half(x.b)};                                                      \
    }
#define EMU_2(name, half)                                                                          \
    EMU emu_i emu_##name(emu_i x, emu_i y)                                                         \
    {                                                                                              \
        return (emu_i){half(x.a, y.a), half(x.b, y.b)};                                            \
    }
#define EMU_SHIFT(name, half)                                                                      \
    EMU emu_i emu_##name(emu_i x, unsigned count)                                                  \
    {                                                                                              \
        return (emu_i){half(x.a, (int)count), half(x.b, (int)count)};                              \
    }
#define EMU_F2(name, half)                                                                         \
    EMU emu_f emu_##name(emu_f x, emu_f y)                                                         \
    {                                                                                              \
        return (emu_f){half(x.a, y.a), half(x.b, y.b)};                                            \
    }

EMU_2(add_epi32, _mm256_add_epi32)
EMU_2(sub_epi32, _mm256_sub_epi32)
EMU_2(add_epi8, _mm256_add_epi8)
EMU_2(add_epi16, _mm256_add_epi16)
EMU_2(sub_epi16, _mm256_sub_epi16)
EMU_2(mullo_epi32, _mm256_mullo_epi32)
EMU_2(mullo_epi16, _mm256_mullo_epi16)
EMU_2(maddubs_epi16, _mm256_maddubs_epi16)
EMU_2(madd_epi16, _mm256_madd_epi16)
EMU_2(max_epi32, _mm256_max_epi32)
EMU_2(and_si512, _mm256_and_si256)
EMU_2(or_si512, _mm256_or_si256)
EMU_2(xor_si512, _mm256_xor_si256)
EMU_2(unpacklo_epi32, _mm256_unpacklo_epi32)
EMU_2(unpackhi_epi32, _mm256_unpackhi_epi32)
EMU_2(unpacklo_epi64, _mm256_unpacklo_epi64)
EMU_2(unpackhi_epi64, _mm256_unpackhi_epi64)
EMU_SHIFT(slli_epi16, _mm256_slli_epi16)
EMU_SHIFT(srli_epi16, _mm256_srli_epi16)
EMU_SHIFT(srai_epi16, _mm256_srai_epi16)
EMU_SHIFT(slli_epi32, _mm256_slli_epi32)
EMU_SHIFT(srai_epi32, _mm256_srai_epi32)
EMU_F2(add_ps, _mm256_add_ps)
EMU_F2(sub_ps, _mm256_sub_ps)
EMU_F2(mul_ps, _mm256_mul_ps)
EMU_F2(div_ps, _mm256_div_ps)
EMU_F2(max_ps, _mm256_max_ps)
EMU_F2(min_ps, _mm256_min_ps)

EMU emu_f emu_fmadd_ps(emu_f x, emu_f y, emu_f z)
{
    return (emu_f){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}

/* ---- memory, constants, casts ------------------------------------------------------------ */

EMU emu_i emu_load(const void *p)
{
    const __m256i *at = (const __m256i *)p;
    return (emu_i){_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
EMU void emu_store(void *p, emu_i x)
{
    _mm256_storeu_si256((__m256i *)p, x.a);
    _mm256_storeu_si256((__m256i *)p + 1, x.b);
}
EMU emu_f emu_load_ps(const float *p)
{
    return (emu_f){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
EMU void emu_store_ps(float *p, emu_f x)
{
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
EMU emu_i emu_twice(__m256i x)
{
    return (emu_i){x, x};
}
EMU emu_f emu_twice_ps(__m256 x)
{
    return (emu_f){x, x};
}
EMU emu_i emu_as_i(emu_f x)
{
    return (emu_i){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
EMU emu_f emu_as_f(emu_i x)
{
    return (emu_f){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
EMU __m256i emu_half(emu_i x, int high)
{
    return high ? x.b : x.a;
}
EMU emu_i emu_with_half(emu_i x, __m256i y, int high)
{
    return high ? (emu_i){x.a, y} : (emu_i){y, x.b};
}
EMU emu_i emu_with_quarter(emu_i x, __m128i y, int at)
{
    emu_bits v = {.i = x};
    memcpy(&v.i8[16 * at], &y, sizeof y);
    return v.i;
}

/* ---- conversions ------------------------------------------------------------------------- */

EMU emu_f emu_to_f(emu_i x)
{
    return (emu_f){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
EMU emu_i emu_to_i(emu_f x)
{
    return (emu_i){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)};
}
EMU emu_f emu_even_twice(emu_f x)
{
    return (emu_f){_mm256_moveldup_ps(x.a), _mm256_moveldup_ps(x.b)};
}
EMU emu_f emu_odd_twice(emu_f x)
{
    return (emu_f){_mm256_movehdup_ps(x.a), _mm256_movehdup_ps(x.b)};
}
EMU emu_f emu_from_half(__m256i x)
{
    return (emu_f){_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
                   _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))};
}
#define EMU_WIDEN(name, half)                                                                      \
    EMU emu_i emu_##name(__m256i x)                                                                \
    {                                                                                              \
        return (emu_i){half(_mm256_castsi256_si128(x)), half(_mm256_extracti128_si256(x, 1))};     \
    }
EMU_WIDEN(widen_i8_i16, _mm256_cvtepi8_epi16)
EMU_WIDEN(widen_u16_i32, _mm256_cvtepu16_epi32)
EMU emu_i emu_widen_i8_i32(__m128i x)
{
    return (emu_i){_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
EMU emu_i emu_widen_u8_i32(__m128i x)
{
    return (emu_i){_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
EMU __m128i emu_narrow_i32_i8(emu_i x)
{
    const emu_bits v = {.i = x};
    int8_t out[16];
    __m128i result;
    for (int i = 0; i < 16; i++) {
        out[i] = (int8_t)v.i32[i];
    }
    memcpy(&result, out, sizeof out);
    return result;
}
EMU __m256i emu_narrow_i32_i16(emu_i x)
{
    const emu_bits v = {.i = x};
    int16_t out[16];
    __m256i result;
    for (int i = 0; i < 16; i++) {
        out[i] = (int16_t)v.i32[i];
    }
    memcpy(&result, out, sizeof out);
    return result;
}
EMU __m256i emu_narrow_i16_i8(emu_i x)
{
    const emu_bits v = {.i = x};
    int8_t out[32];
    __m256i result;
    for (int i = 0; i < 32; i++) {
        out[i] = (int8_t)v.i16[i];
    }
    memcpy(&result, out, sizeof out);
    return result;
}

/* ---- sums, dots, permutations, masks ----------------------------------------------------- */

EMU int32_t emu_sum(emu_i x)
{
    const emu_bits v = {.i = x};
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) {
        sum += (uint32_t)v.i32[i];
    }
    return (int32_t)sum;
}
EMU int32_t emu_max(emu_i x)
{
    const emu_bits v = {.i = x};
    int32_t max = v.i32[0];
    for (int i = 1; i < 16; i++) {
        max = v.i32[i] > max ? v.i32[i] : max;
    }
    return max;
}

/* Four products of unsigned and signed bytes in each 32 bits, without saturation: even and odd
 * bytes as 16-bit pairs. */
EMU __m256i emu_dot_bytes_half(__m256i sum, __m256i u, __m256i s)
{
    const __m256i u_even = _mm256_and_si256(u, _mm256_set1_epi16(255));
    const __m256i s_even = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8);
    const __m256i even = _mm256_madd_epi16(u_even, s_even);
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
EMU emu_i emu_dot_bytes(emu_i sum, emu_i u, emu_i s)
{
    return (emu_i){emu_dot_bytes_half(sum.a, u.a, s.a), emu_dot_bytes_half(sum.b, u.b, s.b)};
}
EMU emu_i emu_dot_words(emu_i sum, emu_i x, emu_i y)
{
    return emu_add_epi32(sum, emu_madd_epi16(x, y));
}

EMU void rf_dot_bytes(emu_i *acc, emu_i u, emu_i s)
{
    *acc = emu_dot_bytes(*acc, u, s);
}
EMU void rf_dot_words(emu_i *acc, emu_i x, emu_i y)
{
    *acc = emu_dot_words(*acc, x, y);
}

EMU emu_i emu_permute_i32(emu_i index, emu_i x)
{
    const emu_bits at = {.i = index}, v = {.i = x};
    emu_bits out;
    for (int i = 0; i < 16; i++) {
        out.i32[i] = v.i32[at.i32[i] & 15];
    }
    return out.i;
}
EMU emu_i emu_permute_i16(emu_i index, emu_i x)
{
    const emu_bits at = {.i = index}, v = {.i = x};
    emu_bits out;
    for (int i = 0; i < 32; i++) {
        out.i16[i] = v.i16[at.i16[i] & 31];
    }
    return out.i;
}
EMU emu_f emu_permute2_ps(emu_f x, emu_i index, emu_f y)
{
    const emu_bits at = {.i = index}, v = {.f = x}, w = {.f = y};
    emu_bits out;
    for (int i = 0; i < 16; i++) {
        const int from = at.i32[i] & 31;
        out.f32[i] = from < 16 ? v.f32[from] : w.f32[from - 16];
    }
    return out.f;
}
EMU emu_i emu_shuffle_quarters(emu_i x, emu_i y, int control)
{
    const emu_bits v = {.i = x}, w = {.i = y};
    emu_bits out;
    for (int i = 0; i < 4; i++) {
        const int from = control >> (2 * i) & 3;
        memcpy(&out.i8[16 * i], i < 2 ? &v.i8[16 * from] : &w.i8[16 * from], 16);
    }
    return out.i;
}
EMU emu_i emu_shift_words(emu_i x, emu_i count, int left)
{
    const emu_bits v = {.i = x}, by = {.i = count};
    emu_bits out;
    for (int i = 0; i < 32; i++) {
        const unsigned n = by.u16[i];
        const unsigned shifted =
            left ? (unsigned)v.u16[i] << (n & 15) : (unsigned)v.u16[i] >> (n & 15);
        out.u16[i] = (uint16_t)(n > 15 ? 0 : shifted);
    }
    return out.i;
}
EMU emu_i emu_choose_i32(emu_i no, unsigned mask, emu_i yes)
{
    emu_bits v = {.i = no};
    const emu_bits w = {.i = yes};
    for (int i = 0; i < 16; i++) {
        v.i32[i] = mask >> i & 1 ? w.i32[i] : v.i32[i];
    }
    return v.i;
}
EMU emu_i emu_choose_i8(emu_i no, uint64_t mask, emu_i yes)
{
    emu_bits v = {.i = no};
    const emu_bits w = {.i = yes};
    for (int i = 0; i < 64; i++) {
        v.i8[i] = mask >> i & 1 ? w.i8[i] : v.i8[i];
    }
    return v.i;
}
EMU __m256i emu_maskz_bytes(uint32_t mask, __m256i x)
{
    return emu_choose_i8(emu_twice(_mm256_setzero_si256()), mask, emu_twice(x)).a;
}
/* As wrong as it may be. */
EMU __m256 emu_reciprocal(__m256 x)
{
    return _mm256_div_ps(_mm256_set1_ps(1.0f - 0x1p-14f), x);
}
EMU __mmask16 emu_greater_ps(emu_f x, emu_f y)
{
    const int a = _mm256_movemask_ps(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ));
    const int b = _mm256_movemask_ps(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ));
    return (__mmask16)(a | b << 8);
}

/* ---- the names --------------------------------------------------------------------------- */

#define _mm512_add_epi32       emu_add_epi32
#define _mm512_sub_epi32       emu_sub_epi32
#define _mm512_add_epi8        emu_add_epi8
#define _mm512_add_epi16       emu_add_epi16
#define _mm512_sub_epi16       emu_sub_epi16
#define _mm512_mullo_epi32     emu_mullo_epi32
#define _mm512_mullo_epi16     emu_mullo_epi16
#define _mm512_maddubs_epi16   emu_maddubs_epi16
#define _mm512_madd_epi16      emu_madd_epi16
#define _mm512_max_epi32       emu_max_epi32
#define _mm512_and_si512       emu_and_si512
#define _mm512_or_si512        emu_or_si512
#define _mm512_xor_si512       emu_xor_si512
#define _mm512_unpacklo_epi32  emu_unpacklo_epi32
#define _mm512_unpackhi_epi32  emu_unpackhi_epi32
#define _mm512_unpacklo_epi64  emu_unpacklo_epi64
#define _mm512_unpackhi_epi64  emu_unpackhi_epi64
#define _mm512_slli_epi16      emu_slli_epi16
#define _mm512_srli_epi16      emu_srli_epi16
#define _mm512_srai_epi16      emu_srai_epi16
#define _mm512_slli_epi32      emu_slli_epi32
#define _mm512_srai_epi32      emu_srai_epi32
#define _mm512_add_ps          emu_add_ps
#define _mm512_sub_ps          emu_sub_ps
#define _mm512_mul_ps          emu_mul_ps
#define _mm512_div_ps          emu_div_ps
#define _mm512_max_ps          emu_max_ps
#define _mm512_min_ps          emu_min_ps
#define _mm512_fmadd_ps        emu_fmadd_ps
#define _mm512_loadu_si512     emu_load
#define _mm512_storeu_si512    emu_store
#define _mm512_loadu_ps        emu_load_ps
#define _mm512_storeu_ps       emu_store_ps
#define _mm512_set1_epi8(x)    emu_twice(_mm256_set1_epi8((char)(x)))
#define _mm512_set1_epi16(x)   emu_twice(_mm256_set1_epi16((short)(x)))
#define _mm512_set1_epi32(x)   emu_twice(_mm256_set1_epi32(x))
#define _mm512_set1_epi64(x)   emu_twice(_mm256_set1_epi64x(x))
#define _mm512_set1_ps(x)      emu_twice_ps(_mm256_set1_ps(x))
#define _mm512_setzero_si512() emu_twice(_mm256_setzero_si256())
#define _mm512_setzero_ps()    emu_twice_ps(_mm256_setzero_ps())
#undef _mm512_setr_epi32
#define _mm512_setr_epi32(a, b, c, d, e, f, g, h, ...)                                             \
    ((emu_i){_mm256_setr_epi32(a, b, c, d, e, f, g, h), _mm256_setr_epi32(__VA_ARGS__)})
#define _mm512_broadcast_i64x4(x) emu_twice(x)
#define _mm512_castps_si512       emu_as_i
#define _mm512_castsi512_ps       emu_as_f
#define _mm512_castps512_ps256(x) ((x).a)
#define _mm512_castsi512_si256(x) ((x).a)
#define _mm512_castsi256_si512(x) emu_twice(x) /* the high half is undefined */
#define _mm512_castsi128_si512(x) emu_twice(_mm256_broadcastsi128_si256(x))
#define _mm512_extracti64x4_epi64 emu_half
#define _mm512_inserti64x4        emu_with_half
#define _mm512_inserti32x4        emu_with_quarter
#define _mm512_cvtepi32_ps        emu_to_f
#define _mm512_cvtps_epi32        emu_to_i
#define _mm512_cvtph_ps           emu_from_half
#define _mm512_cvtepi8_epi16      emu_widen_i8_i16
#define _mm512_cvtepu16_epi32     emu_widen_u16_i32
#define _mm512_cvtepi8_epi32      emu_widen_i8_i32
#define _mm512_cvtepu8_epi32      emu_widen_u8_i32
#define _mm512_cvtepi32_epi8      emu_narrow_i32_i8
#define _mm512_cvtepi32_epi16     emu_narrow_i32_i16
#define _mm512_cvtepi16_epi8      emu_narrow_i16_i8
#define _mm256_cvtepi16_epi8(x)   _mm256_castsi256_si128(emu_narrow_i16_i8(emu_twice(x)))
#define _mm512_reduce_add_epi32   emu_sum
#define _mm512_reduce_max_epi32   emu_max
#define _mm512_dpbusd_epi32       emu_dot_bytes
#define _mm512_dpwssd_epi32       emu_dot_words
#define _mm512_permutexvar_epi32  emu_permute_i32
#define _mm512_permutexvar_epi16  emu_permute_i16
#define _mm512_permutex2var_ps    emu_permute2_ps
#define _mm512_shuffle_i32x4      emu_shuffle_quarters
#define _mm512_shuffle_epi32(x, control)                                                           \
    ((emu_i){_mm256_shuffle_epi32((x).a, control), _mm256_shuffle_epi32((x).b, control)})
#define _mm512_permute_ps(x, control)                                                              \
    ((emu_f){_mm256_permute_ps((x).a, control), _mm256_permute_ps((x).b, control)})
#define _mm512_moveldup_ps                  emu_even_twice
#define _mm512_movehdup_ps                  emu_odd_twice
#define _mm512_sllv_epi16(x, count)         emu_shift_words(x, count, 1)
#define _mm512_srlv_epi16(x, count)         emu_shift_words(x, count, 0)
#define _mm256_maskz_mov_epi8               emu_maskz_bytes
#define _mm256_rcp14_ps                     emu_reciprocal
#define _mm512_mask_mov_epi32               emu_choose_i32
#define _mm512_mask_sub_epi32(no, m, x, y)  emu_choose_i32(no, m, emu_sub_epi32(x, y))
#define _mm512_mask_add_epi8(no, m, x, y)   emu_choose_i8(no, m, emu_add_epi8(x, y))
#define _mm512_mask_mov_ps(no, m, yes)      emu_as_f(emu_choose_i32(emu_as_i(no), m, emu_as_i(yes)))
#define _mm512_cmp_ps_mask(x, y, predicate) emu_greater_ps(x, y) /* only _CMP_GT_OQ is used */

#endif
