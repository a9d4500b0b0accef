/* kernels/unpack_avx2.h: one block of each quantised format to int16 weights (rf_unpacked), as
 * unpack_scalar.c defines it, 16 weights at a time. Inlined into the panels and the dots.
 *
 * Internal to kernels/, included by *_avx2.c only.
 */
#ifndef RF_KERNELS_UNPACK_AVX2_H
#define RF_KERNELS_UNPACK_AVX2_H

#include "kernels/avx2.h"

RF_INLINE __m256i rf_i16(int value)
{
    return _mm256_set1_epi16((short)value);
}

/* Eight halves, step bytes apart. */
RF_INLINE __m256 rf_load_halves(const uint8_t *p, size_t step)
{
    __m128i h = _mm_cvtsi32_si128(rf_load_u16(p));
    h = _mm_insert_epi16(h, rf_load_u16(p + step), 1);
    h = _mm_insert_epi16(h, rf_load_u16(p + 2 * step), 2);
    h = _mm_insert_epi16(h, rf_load_u16(p + 3 * step), 3);
    h = _mm_insert_epi16(h, rf_load_u16(p + 4 * step), 4);
    h = _mm_insert_epi16(h, rf_load_u16(p + 5 * step), 5);
    h = _mm_insert_epi16(h, rf_load_u16(p + 6 * step), 6);
    h = _mm_insert_epi16(h, rf_load_u16(p + 7 * step), 7);
    return _mm256_cvtph_ps(h);
}

/* q = 128 * high + low, both in -64 .. 64; count is a multiple of 32. */
RF_INLINE void rf_split_codes(const int16_t *q, size_t count, int8_t *high, int8_t *low)
{
    for (size_t i = 0; i < count; i += 32) {
        const __m256i a = rf_load_256(q + i), b = rf_load_256(q + i + 16);
        const __m256i ha = _mm256_srai_epi16(_mm256_add_epi16(a, rf_i16(64)), 7);
        const __m256i hb = _mm256_srai_epi16(_mm256_add_epi16(b, rf_i16(64)), 7);
        const __m256i la = _mm256_sub_epi16(a, _mm256_slli_epi16(ha, 7));
        const __m256i lb = _mm256_sub_epi16(b, _mm256_slli_epi16(hb, 7));
        rf_store_256(high + i, _mm256_permute4x64_epi64(_mm256_packs_epi16(ha, hb), 0xD8));
        rf_store_256(low + i, _mm256_permute4x64_epi64(_mm256_packs_epi16(la, lb), 0xD8));
    }
}

/* 16 bytes of nibbles to 32 weights, each less offset. */
RF_INLINE void rf_unpack_nibbles(const uint8_t *qs, int offset, int16_t *w)
{
    const __m256i bytes = rf_load_bytes_u16(qs);
    rf_store_256(w, _mm256_sub_epi16(_mm256_and_si256(bytes, rf_i16(15)), rf_i16(offset)));
    rf_store_256(w + 16, _mm256_sub_epi16(_mm256_srli_epi16(bytes, 4), rf_i16(offset)));
}

/* 16 where the bit of the element is set in bits, else 0. */
RF_INLINE __m256i rf_fifth_bits(uint32_t bits)
{
    const __m256i select = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048,
                                             4096, 8192, 16384, (short)-32768);
    const __m256i hit =
        _mm256_cmpeq_epi16(_mm256_and_si256(rf_i16((short)(bits & 0xFFFF)), select), select);
    return _mm256_and_si256(hit, rf_i16(16));
}

RF_INLINE void rf_unpack_q4_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_load_f16(block);
    rf_unpack_nibbles(block + 2, 8, out->w);
}

RF_INLINE void rf_unpack_q4_1(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_load_f16(block);
    out->min_scale = rf_load_f16(block + 2);
    out->mins[0] = out->mins[1] = 1;
    rf_unpack_nibbles(block + 4, 0, out->w);
}

RF_INLINE void rf_unpack_five(const uint8_t *high, const uint8_t *qs, int offset, int16_t *w)
{
    const uint32_t bits = rf_load_u32(high);
    const __m256i bytes = rf_load_bytes_u16(qs);
    const __m256i a = _mm256_or_si256(_mm256_and_si256(bytes, rf_i16(15)), rf_fifth_bits(bits));
    const __m256i b = _mm256_or_si256(_mm256_srli_epi16(bytes, 4), rf_fifth_bits(bits >> 16));
    rf_store_256(w, _mm256_sub_epi16(a, rf_i16(offset)));
    rf_store_256(w + 16, _mm256_sub_epi16(b, rf_i16(offset)));
}

RF_INLINE void rf_unpack_q5_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_load_f16(block);
    rf_unpack_five(block + 2, block + 6, 16, out->w);
}

RF_INLINE void rf_unpack_q5_1(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_load_f16(block);
    out->min_scale = rf_load_f16(block + 2);
    out->mins[0] = out->mins[1] = 1;
    rf_unpack_five(block + 4, block + 8, 0, out->w);
}

RF_INLINE void rf_unpack_q8_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_load_f16(block);
    rf_store_256(out->w, rf_load_bytes_i16(block + 2));
    rf_store_256(out->w + 16, rf_load_bytes_i16(block + 18));
}

RF_INLINE void rf_unpack_q2_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *scales = block + offsetof(rf_block_q2_k, scales);
    const uint8_t *qs = block + offsetof(rf_block_q2_k, qs);
    out->scale = rf_load_f16(block + offsetof(rf_block_q2_k, d));
    out->min_scale = -rf_load_f16(block + offsetof(rf_block_q2_k, dmin));
    rf_store_256(out->mins, _mm256_srli_epi16(rf_load_bytes_u16(scales), 4));
    for (int half = 0; half < 2; half++) {
        for (int side = 0; side < 2; side++) {
            __m256i q = rf_load_bytes_u16(qs + 32 * half + 16 * side);
            for (int part = 0; part < 4; part++, q = _mm256_srli_epi16(q, 2)) {
                const int j = 8 * half + 2 * part + side;
                const __m256i code = _mm256_and_si256(q, rf_i16(3));
                rf_store_256(out->w + 16 * j, _mm256_mullo_epi16(code, rf_i16(scales[j] & 15)));
            }
        }
    }
}

RF_INLINE void rf_unpack_q3_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *hmask = block + offsetof(rf_block_q3_k, hmask);
    const uint8_t *qs = block + offsetof(rf_block_q3_k, qs);
    const uint8_t *scales = block + offsetof(rf_block_q3_k, scales);
    out->scale = rf_load_f16(block + offsetof(rf_block_q3_k, d));
    for (int side = 0; side < 2; side++) {
        __m256i high = rf_load_bytes_u16(hmask + 16 * side);
        for (int half = 0; half < 2; half++) {
            __m256i q = rf_load_bytes_u16(qs + 32 * half + 16 * side);
            for (int part = 0; part < 4; part++, q = _mm256_srli_epi16(q, 2)) {
                const int j = 8 * half + 2 * part + side;
                const int low4 = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
                const int scale = (low4 | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
                const __m256i third = _mm256_slli_epi16(_mm256_and_si256(high, rf_i16(1)), 2);
                const __m256i code = _mm256_sub_epi16(
                    _mm256_or_si256(_mm256_and_si256(q, rf_i16(3)), third), rf_i16(4));
                rf_store_256(out->w + 16 * j, _mm256_mullo_epi16(code, rf_i16(scale)));
                high = _mm256_srli_epi16(high, 1);
            }
        }
    }
}

/* The sixteen 6-bit scales of q3_K, less 32, as bytes. */
RF_INLINE __m128i rf_scales_q3_k(const uint8_t *block)
{
    /* Words A, B, C: low halves in A and B, then their high nibbles; top bits in C. The load ends
     * with the block. */
    const __m128i all = _mm_srli_si128(
        _mm_loadu_si128((const __m128i *)(block + offsetof(rf_block_q3_k, scales) - 2)), 2);
    const __m128i low =
        _mm_srlv_epi32(_mm_shuffle_epi32(all, _MM_SHUFFLE(1, 0, 1, 0)), _mm_setr_epi32(0, 0, 4, 4));
    const __m128i top =
        _mm_srlv_epi32(_mm_shuffle_epi32(all, _MM_SHUFFLE(2, 2, 2, 2)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i code = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)),
                                      _mm_slli_epi16(_mm_and_si128(top, _mm_set1_epi8(3)), 4));
    return _mm_sub_epi8(code, _mm_set1_epi8(32));
}

/* The 6-bit codes of two blocks of q4_K or q5_K, from the first 16 bytes of each: bytes 0..7 of a
 * half are the scales, 8..15 the minimums. */
RF_INLINE __m256i rf_scales_k_2(__m256i heads)
{
    /* d and dmin, then three words A, B, C: the scales are A and (C low, A top), the minimums B and
     * (C high, B top). */
    const __m256i low_mask =
        _mm256_broadcastsi128_si256(_mm_setr_epi32(0x3F3F3F3F, 0x0F0F0F0F, 0x3F3F3F3F, 0x0F0F0F0F));
    const __m256i top_mask =
        _mm256_broadcastsi128_si256(_mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    const __m256i low = _mm256_srlv_epi32(_mm256_shuffle_epi32(heads, _MM_SHUFFLE(3, 2, 3, 1)),
                                          _mm256_setr_epi32(0, 0, 0, 4, 0, 0, 0, 4));
    const __m256i top = _mm256_srli_epi32(_mm256_shuffle_epi32(heads, _MM_SHUFFLE(2, 2, 1, 1)), 2);
    return _mm256_or_si256(_mm256_and_si256(low, low_mask), _mm256_and_si256(top, top_mask));
}

RF_INLINE __m128i rf_scales_k(const uint8_t *block)
{
    const __m128i head = _mm_loadu_si128((const __m128i *)block);
    return _mm256_castsi256_si128(rf_scales_k_2(_mm256_zextsi128_si256(head)));
}

RF_INLINE void rf_unpack_q4_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_q4_k, qs);
    const __m128i codes = rf_scales_k(block);
    int16_t scales[8];
    _mm_storeu_si128((__m128i *)scales, _mm_cvtepu8_epi16(codes));
    const __m128i mins = _mm_srli_si128(codes, 8);
    rf_store_256(out->mins, _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(mins, mins)));
    out->scale = rf_load_f16(block);
    out->min_scale = -rf_load_f16(block + 2);
    for (int j = 0; j < 4; j++) {
        const __m256i low = rf_i16(scales[2 * j]), high = rf_i16(scales[2 * j + 1]);
        for (int side = 0; side < 2; side++) {
            const __m256i q = rf_load_bytes_u16(qs + 32 * j + 16 * side);
            int16_t *w = out->w + 64 * j + 16 * side;
            rf_store_256(w, _mm256_mullo_epi16(_mm256_and_si256(q, rf_i16(15)), low));
            rf_store_256(w + 32, _mm256_mullo_epi16(_mm256_srli_epi16(q, 4), high));
        }
    }
}

RF_INLINE void rf_unpack_q5_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_q5_k, qs);
    const uint8_t *qh = block + offsetof(rf_block_q5_k, qh);
    const __m128i codes = rf_scales_k(block);
    int16_t scales[8];
    _mm_storeu_si128((__m128i *)scales, _mm_cvtepu8_epi16(codes));
    const __m128i mins = _mm_srli_si128(codes, 8);
    rf_store_256(out->mins, _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(mins, mins)));
    out->scale = rf_load_f16(block);
    out->min_scale = -rf_load_f16(block + 2);
    for (int side = 0; side < 2; side++) {
        __m256i bits = _mm256_slli_epi16(rf_load_bytes_u16(qh + 16 * side), 4);
        for (int j = 0; j < 4; j++) {
            const __m256i q = rf_load_bytes_u16(qs + 32 * j + 16 * side);
            int16_t *w = out->w + 64 * j + 16 * side;
            const __m256i low = _mm256_or_si256(_mm256_and_si256(q, rf_i16(15)),
                                                _mm256_and_si256(bits, rf_i16(16)));
            bits = _mm256_srli_epi16(bits, 1);
            const __m256i high =
                _mm256_or_si256(_mm256_srli_epi16(q, 4), _mm256_and_si256(bits, rf_i16(16)));
            bits = _mm256_srli_epi16(bits, 1);
            rf_store_256(w, _mm256_mullo_epi16(low, rf_i16(scales[2 * j])));
            rf_store_256(w + 32, _mm256_mullo_epi16(high, rf_i16(scales[2 * j + 1])));
        }
    }
}

/* The codes of the four sub-blocks (half, 0..3, side) of q6_K, each less 32. */
RF_INLINE void rf_codes_q6_k(const uint8_t *block, int half, int side, __m256i code[4])
{
    const __m256i low0 = rf_load_bytes_u16(block + 64 * half + 16 * side);
    const __m256i low1 = rf_load_bytes_u16(block + 64 * half + 32 + 16 * side);
    const __m256i high =
        rf_load_bytes_u16(block + offsetof(rf_block_q6_k, qh) + 32 * half + 16 * side);
    const __m256i four = rf_i16(15), two = rf_i16(0x30), middle = rf_i16(32);
    code[0] = _mm256_or_si256(_mm256_and_si256(low0, four),
                              _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
    code[1] = _mm256_or_si256(_mm256_and_si256(low1, four),
                              _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
    code[2] = _mm256_or_si256(_mm256_srli_epi16(low0, 4), _mm256_and_si256(high, two));
    code[3] = _mm256_or_si256(_mm256_srli_epi16(low1, 4),
                              _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
    for (int part = 0; part < 4; part++) {
        code[part] = _mm256_sub_epi16(code[part], middle);
    }
}

RF_INLINE void rf_unpack_q6_k(const uint8_t *block, rf_unpacked *out)
{
    const int8_t *scales = (const int8_t *)block + offsetof(rf_block_q6_k, scales);
    out->scale = rf_load_f16(block + offsetof(rf_block_q6_k, d));
    for (int half = 0; half < 2; half++) {
        for (int side = 0; side < 2; side++) {
            __m256i code[4];
            rf_codes_q6_k(block, half, side, code);
            for (int part = 0; part < 4; part++) {
                const int j = 8 * half + 2 * part + side;
                rf_store_256(out->w + 16 * j, _mm256_mullo_epi16(code[part], rf_i16(scales[j])));
            }
        }
    }
}

/* ---- iq4_nl, iq4_xs: a table of sixteen values ------------------------------------------- */

/* 16 bytes of nibbles to 32 values from a table of bytes, in the order of the elements. */
RF_INLINE __m256i rf_look_up_nibbles(__m256i table, const uint8_t *qs)
{
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)qs));
    const __m256i nibbles = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
    return _mm256_shuffle_epi8(table, _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
}

RF_INLINE __m256i rf_iq4_table(void)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)rf_iq4_values));
}

/* The scales of the eight sub-blocks of iq4_xs. */
RF_INLINE __m256i rf_scales_iq4_xs(const uint8_t *block)
{
    const __m256i step = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    const __m256i l =
        _mm256_set1_epi32((int)rf_load_u32(block + offsetof(rf_block_iq4_xs, scales_l)));
    const __m256i h = _mm256_set1_epi32(rf_load_u16(block + offsetof(rf_block_iq4_xs, scales_h)));
    const __m256i low =
        _mm256_and_si256(_mm256_srlv_epi32(l, _mm256_add_epi32(step, step)), _mm256_set1_epi32(15));
    const __m256i high = _mm256_and_si256(_mm256_srlv_epi32(h, step), _mm256_set1_epi32(3));
    return _mm256_sub_epi32(_mm256_or_si256(low, _mm256_slli_epi32(high, 4)),
                            _mm256_set1_epi32(32));
}

RF_INLINE __m256i rf_low_i16(__m256i bytes)
{
    return _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes));
}
RF_INLINE __m256i rf_high_i16(__m256i bytes)
{
    return _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1));
}

RF_INLINE void rf_unpack_iq4_nl(const uint8_t *block, rf_unpacked *out)
{
    const __m256i values = rf_look_up_nibbles(rf_iq4_table(), block + 2);
    out->scale = rf_load_f16(block);
    rf_store_256(out->w, rf_low_i16(values));
    rf_store_256(out->w + 16, rf_high_i16(values));
}

RF_INLINE void rf_unpack_iq4_xs(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_iq4_xs, qs);
    const __m256i table = rf_iq4_table();
    int32_t scales[8];
    rf_store_256(scales, rf_scales_iq4_xs(block));
    out->scale = rf_load_f16(block);
    for (int j = 0; j < 8; j++) {
        const __m256i values = rf_look_up_nibbles(table, qs + 16 * j), scale = rf_i16(scales[j]);
        rf_store_256(out->w + 32 * j, _mm256_mullo_epi16(rf_low_i16(values), scale));
        rf_store_256(out->w + 32 * j + 16, _mm256_mullo_epi16(rf_high_i16(values), scale));
    }
}

/* ---- tq1_0, tq2_0: codes 0, 1, 2 (and 3) for -1, 0, 1 (and 2) ------------------------------- */

/* 3 x, modulo 256. */
RF_INLINE __m256i rf_triple(__m256i x)
{
    return _mm256_add_epi8(_mm256_add_epi8(x, x), x);
}

/* The next digit of each byte: floor(3 b / 256) is how many of 256/3 and 512/3 the byte exceeds.
 * Bytes are held less 128, for a signed comparison; 3 (b - 128) = 3 b - 128 modulo 256, so they
 * stay so when tripled. */
RF_INLINE __m256i rf_digit(__m256i x)
{
    const __m256i one = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(85 - 128));
    const __m256i two = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(170 - 128));
    return _mm256_sub_epi8(_mm256_sub_epi8(_mm256_setzero_si256(), one), two);
}

/* The codes of a block, 32 a vector, in the order of the elements. */
RF_INLINE void rf_codes_tq1_0(const uint8_t *block, __m256i code[8])
{
    const __m256i middle = _mm256_set1_epi8(-128);
    __m256i x = _mm256_xor_si256(rf_load_256(block), middle);
    for (int n = 0; n < 5; n++, x = rf_triple(x)) {
        code[n] = rf_digit(x);
    }
    /* 16 bytes of five digits and 4 of four: vectors of digits 0 and 1, 2 and 3, then 4 and what
     * the last bytes have. */
    x = _mm256_xor_si256(
        _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(block + 32))), middle);
    x = _mm256_blend_epi32(x, rf_triple(x), 0xF0);
    code[5] = rf_digit(x);
    x = rf_triple(rf_triple(x));
    code[6] = rf_digit(x);
    x = rf_triple(rf_triple(x));
    __m256i last = _mm256_xor_si256(
        _mm256_set1_epi32((int)rf_load_u32(block + offsetof(rf_block_tq1_0, qh))), middle);
    last = _mm256_blend_epi32(last, rf_triple(last), 0xE0);
    last = _mm256_blend_epi32(last, rf_triple(last), 0xC0);
    last = _mm256_blend_epi32(last, rf_triple(last), 0x80);
    code[7] = rf_digit(_mm256_blend_epi32(x, last, 0xF0));
}

RF_INLINE void rf_codes_tq2_0(const uint8_t *block, __m256i code[8])
{
    for (int j = 0; j < 8; j++) {
        const __m256i q = rf_load_256(block + j / 4 * 32);
        code[j] = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), _mm256_set1_epi8(3));
    }
}

RF_INLINE void rf_unpack_ternary(const __m256i code[8], int16_t *w)
{
    for (int j = 0; j < 8; j++) {
        const __m256i value = _mm256_sub_epi8(code[j], _mm256_set1_epi8(1));
        rf_store_256(w + 32 * j, rf_low_i16(value));
        rf_store_256(w + 32 * j + 16, rf_high_i16(value));
    }
}

RF_INLINE void rf_unpack_tq1_0(const uint8_t *block, rf_unpacked *out)
{
    __m256i code[8];
    rf_codes_tq1_0(block, code);
    out->scale = rf_load_f16(block + offsetof(rf_block_tq1_0, d));
    rf_unpack_ternary(code, out->w);
}

RF_INLINE void rf_unpack_tq2_0(const uint8_t *block, rf_unpacked *out)
{
    __m256i code[8];
    rf_codes_tq2_0(block, code);
    out->scale = rf_load_f16(block + offsetof(rf_block_tq2_0, d));
    rf_unpack_ternary(code, out->w);
}

#endif
