/* kernels/codes_neon.h: the codes of every quantised format as signed bytes, without their
 * sub-block scales, and those scales. What the panels and the row dots of NEON share; included by
 * *_neon.c only.
 *
 *   block of 32    weight = d * code (+ m)
 *   block of 256   weight = d * scale[sub-block] * code (- dmin * min[sub-block])
 *
 * Sub-blocks have 32 codes or 16. The ternary formats have none: their scales are 1.
 */
#ifndef RF_KERNELS_CODES_NEON_H
#define RF_KERNELS_CODES_NEON_H

#include "kernels/neon.h"

typedef struct rf_codes32 { /* 32 codes in order of k */
    int8x16_t a, b;
} rf_codes32;

/* Sub-block scales and minimums of a block of 256; those of 32 codes: only the first 8. */
typedef struct rf_subs {
    int8x16_t scale, min;
} rf_subs;

RF_INLINE float rf_load_f16_neon(const uint8_t *p)
{
    const uint16x4_t half = vdup_n_u16(rf_load_u16(p));
    return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(half)), 0);
}

/* Immediate shifts by a counter of an unrolled loop. */
RF_INLINE uint8x16_t rf_shift_right(uint8x16_t v, int n)
{
    switch (n) {
    case 0:
        return v;
    case 1:
        return vshrq_n_u8(v, 1);
    case 2:
        return vshrq_n_u8(v, 2);
    case 3:
        return vshrq_n_u8(v, 3);
    case 4:
        return vshrq_n_u8(v, 4);
    case 5:
        return vshrq_n_u8(v, 5);
    case 6:
        return vshrq_n_u8(v, 6);
    default:
        return vshrq_n_u8(v, 7);
    }
}

RF_INLINE uint8x16_t rf_low_nibbles(uint8x16_t v)
{
    return vandq_u8(v, vdupq_n_u8(15));
}

RF_INLINE rf_codes32 rf_signed_codes(uint8x16_t a, uint8x16_t b, int8_t less)
{
    const int8x16_t offset = vdupq_n_s8(less);
    return (rf_codes32){vsubq_s8(vreinterpretq_s8_u8(a), offset),
                        vsubq_s8(vreinterpretq_s8_u8(b), offset)};
}

/* ---- blocks of 32 ------------------------------------------------------------------------ */

/* A 16 in each byte whose bit is set; bits: all of them, bytes 0 and 1 (2 and 3) for these. */
RF_INLINE uint8x16_t rf_fifth_bits_neon(uint8x16_t bits, uint64_t byte)
{
    const uint64_t places = byte * UINT64_C(0x0101010101010101);
    const uint8x16_t place =
        vcombine_u8(vcreate_u8(places), vcreate_u8(places + UINT64_C(0x0101010101010101)));
    const uint8x8_t one = vcreate_u8(UINT64_C(0x8040201008040201));
    const uint8x16_t set = vtstq_u8(vqtbl1q_u8(bits, place), vcombine_u8(one, one));
    return vandq_u8(set, vdupq_n_u8(16));
}

RF_INLINE rf_codes32 rf_nibbles_neon(const uint8_t *qs, int8_t less)
{
    const uint8x16_t both = vld1q_u8(qs);
    return rf_signed_codes(rf_low_nibbles(both), vshrq_n_u8(both, 4), less);
}

RF_INLINE rf_codes32 rf_fives_neon(const uint8_t *high, const uint8_t *qs, int8_t less)
{
    const uint8x16_t bits = vreinterpretq_u8_u32(vdupq_n_u32(rf_load_u32(high)));
    const uint8x16_t both = vld1q_u8(qs);
    return rf_signed_codes(vorrq_u8(rf_low_nibbles(both), rf_fifth_bits_neon(bits, 0)),
                           vorrq_u8(vshrq_n_u8(both, 4), rf_fifth_bits_neon(bits, 2)), less);
}

/* Nibbles that are places in a table. */
RF_INLINE rf_codes32 rf_iq4_codes(const uint8_t *qs)
{
    const int8x16_t values = vld1q_s8(rf_iq4_values);
    const uint8x16_t both = vld1q_u8(qs);
    return (rf_codes32){vqtbl1q_s8(values, rf_low_nibbles(both)),
                        vqtbl1q_s8(values, vshrq_n_u8(both, 4))};
}

RF_INLINE rf_codes32 rf_codes_block_32(rf_format format, const uint8_t *block)
{
    switch (format) {
    case RF_Q4_0:
        return rf_nibbles_neon(block + 2, 8);
    case RF_Q4_1:
        return rf_nibbles_neon(block + 4, 0);
    case RF_Q5_0:
        return rf_fives_neon(block + 2, block + 6, 16);
    case RF_Q5_1:
        return rf_fives_neon(block + 4, block + 8, 0);
    case RF_IQ4_NL:
        return rf_iq4_codes(block + offsetof(rf_block_iq4_nl, qs));
    default: /* q8_0 */
        return (rf_codes32){vld1q_s8((const int8_t *)block + 2),
                            vld1q_s8((const int8_t *)block + 18)};
    }
}

/* ---- blocks of 256: part j of 32 codes, 0 .. 7 -------------------------------------------- */

RF_INLINE rf_codes32 rf_codes_q2_k(const uint8_t *block, int j)
{
    const uint8_t *qs = block + offsetof(rf_block_q2_k, qs) + j / 4 * 32;
    const uint8x16_t three = vdupq_n_u8(3);
    return rf_signed_codes(vandq_u8(rf_shift_right(vld1q_u8(qs), j % 4 * 2), three),
                           vandq_u8(rf_shift_right(vld1q_u8(qs + 16), j % 4 * 2), three), 0);
}

/* The high bit is missing where 4 is to be taken away. */
RF_INLINE uint8x16_t rf_third_bits(const uint8_t *hmask, int j)
{
    const uint8x16_t bits = vld1q_u8(hmask), four = vdupq_n_u8(4);
    return vandq_u8(j == 0   ? vshlq_n_u8(bits, 2)
                    : j == 1 ? vshlq_n_u8(bits, 1)
                             : rf_shift_right(bits, j - 2),
                    four);
}

RF_INLINE rf_codes32 rf_codes_q3_k(const uint8_t *block, int j)
{
    const uint8_t *qs = block + offsetof(rf_block_q3_k, qs) + j / 4 * 32;
    const uint8x16_t three = vdupq_n_u8(3);
    const uint8x16_t a = vandq_u8(rf_shift_right(vld1q_u8(qs), j % 4 * 2), three);
    const uint8x16_t b = vandq_u8(rf_shift_right(vld1q_u8(qs + 16), j % 4 * 2), three);
    return rf_signed_codes(vorrq_u8(a, rf_third_bits(block, j)),
                           vorrq_u8(b, rf_third_bits(block + 16, j)), 4);
}

RF_INLINE uint8x16_t rf_nibbles_of_part(uint8x16_t q, int j)
{
    return j % 2 == 0 ? rf_low_nibbles(q) : vshrq_n_u8(q, 4);
}

RF_INLINE rf_codes32 rf_codes_q4_k(const uint8_t *block, int j)
{
    const uint8_t *qs = block + offsetof(rf_block_q4_k, qs) + j / 2 * 32;
    return rf_signed_codes(rf_nibbles_of_part(vld1q_u8(qs), j),
                           rf_nibbles_of_part(vld1q_u8(qs + 16), j), 0);
}

RF_INLINE uint8x16_t rf_fifth_bits_of_part(const uint8_t *qh, int j)
{
    const uint8x16_t bits = vld1q_u8(qh), sixteen = vdupq_n_u8(16);
    switch (j) {
    case 0:
        return vandq_u8(vshlq_n_u8(bits, 4), sixteen);
    case 1:
        return vandq_u8(vshlq_n_u8(bits, 3), sixteen);
    case 2:
        return vandq_u8(vshlq_n_u8(bits, 2), sixteen);
    case 3:
        return vandq_u8(vshlq_n_u8(bits, 1), sixteen);
    default:
        return vandq_u8(rf_shift_right(bits, j - 4), sixteen);
    }
}

RF_INLINE rf_codes32 rf_codes_q5_k(const uint8_t *block, int j)
{
    const uint8_t *qs = block + offsetof(rf_block_q5_k, qs) + j / 2 * 32;
    const uint8_t *qh = block + offsetof(rf_block_q5_k, qh);
    return rf_signed_codes(
        vorrq_u8(rf_nibbles_of_part(vld1q_u8(qs), j), rf_fifth_bits_of_part(qh, j)),
        vorrq_u8(rf_nibbles_of_part(vld1q_u8(qs + 16), j), rf_fifth_bits_of_part(qh + 16, j)), 0);
}

/* Bits 4 and 5 of part j from two bits of qh. */
RF_INLINE uint8x16_t rf_top_bits(const uint8_t *qh, int j)
{
    const uint8x16_t bits = vld1q_u8(qh), mask = vdupq_n_u8(0x30);
    switch (j % 4) {
    case 0:
        return vandq_u8(vshlq_n_u8(bits, 4), mask);
    case 1:
        return vandq_u8(vshlq_n_u8(bits, 2), mask);
    case 2:
        return vandq_u8(bits, mask);
    default:
        return vandq_u8(vshrq_n_u8(bits, 2), mask);
    }
}

RF_INLINE rf_codes32 rf_codes_q6_k(const uint8_t *block, int j)
{
    const uint8_t *ql = block + j / 4 * 64 + j % 2 * 32;
    const uint8_t *qh = block + offsetof(rf_block_q6_k, qh) + j / 4 * 32;
    const int nibble = j % 4 / 2;
    return rf_signed_codes(
        vorrq_u8(rf_nibbles_of_part(vld1q_u8(ql), nibble), rf_top_bits(qh, j)),
        vorrq_u8(rf_nibbles_of_part(vld1q_u8(ql + 16), nibble), rf_top_bits(qh + 16, j)), 32);
}

RF_INLINE rf_codes32 rf_codes_tq2_0(const uint8_t *block, int j)
{
    const uint8_t *qs = block + j / 4 * 32;
    const uint8x16_t three = vdupq_n_u8(3);
    return rf_signed_codes(vandq_u8(rf_shift_right(vld1q_u8(qs), j % 4 * 2), three),
                           vandq_u8(rf_shift_right(vld1q_u8(qs + 16), j % 4 * 2), three), 1);
}

/* Digit n of base 3, the first one being the highest: the byte times 3^n, of which the low eight
 * bits times 3 carry the digit out. 3 q >> 8 is (q + (q >> 1)) >> 7 for all bytes q: the digit
 * turns at 86 and 171 in both. */
RF_INLINE uint8x16_t rf_digit(uint8x16_t bytes, uint8x16_t power)
{
    const uint8x16_t q = vmulq_u8(bytes, power);
    return vshrq_n_u8(vhaddq_u8(q, vshrq_n_u8(q, 1)), 6);
}

RF_INLINE uint8x16_t rf_power_of_3(int n)
{
    return vdupq_n_u8(n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81);
}

/* Five digits of 32 bytes, then five of 16 bytes, then four of 4. */
RF_INLINE rf_codes32 rf_codes_tq1_0(const uint8_t *block, int j)
{
    if (j < 5) {
        const uint8x16_t power = rf_power_of_3(j);
        return rf_signed_codes(rf_digit(vld1q_u8(block), power),
                               rf_digit(vld1q_u8(block + 16), power), 1);
    }
    const uint8x16_t bytes = vld1q_u8(block + 32);
    const uint8x16_t a = rf_digit(bytes, rf_power_of_3(2 * (j - 5)));
    if (j < 7) {
        return rf_signed_codes(a, rf_digit(bytes, rf_power_of_3(2 * (j - 5) + 1)), 1);
    }
    const uint32x4_t last = vdupq_n_u32(rf_load_u32(block + offsetof(rf_block_tq1_0, qh)));
    const uint8x16_t powers = vcombine_u8(vcreate_u8(UINT64_C(0x0303030301010101)),
                                          vcreate_u8(UINT64_C(0x1B1B1B1B09090909)));
    return rf_signed_codes(a, rf_digit(vreinterpretq_u8_u32(last), powers), 1);
}

RF_INLINE rf_codes32 rf_codes_block_256(rf_format format, const uint8_t *block, int j)
{
    switch (format) {
    case RF_Q2_K:
        return rf_codes_q2_k(block, j);
    case RF_Q3_K:
        return rf_codes_q3_k(block, j);
    case RF_Q4_K:
        return rf_codes_q4_k(block, j);
    case RF_Q5_K:
        return rf_codes_q5_k(block, j);
    case RF_IQ4_XS:
        return rf_iq4_codes(block + offsetof(rf_block_iq4_xs, qs) + j * 16);
    case RF_TQ1_0:
        return rf_codes_tq1_0(block, j);
    case RF_TQ2_0:
        return rf_codes_tq2_0(block, j);
    default:
        return rf_codes_q6_k(block, j);
    }
}

/* ---- scales ------------------------------------------------------------------------------ */

/* Sub-blocks of 32, where a block of 256 has not sixteen. */
RF_INLINE bool rf_sub_blocks_of_32(rf_format format)
{
    return format == RF_Q4_K || format == RF_Q5_K || format == RF_IQ4_XS || format == RF_TQ1_0 ||
           format == RF_TQ2_0;
}

/* The 6-bit scales and minimums of q4_K and q5_K: 12 bytes for eight of each. Words A, B, C:
 * scales 0 .. 3 in A, minimums 0 .. 3 in B; C has the low nibbles of scales and the high ones of
 * minimums 4 .. 7, whose top two bits are those of A and B. */
RF_INLINE rf_subs rf_subs_k(const uint8_t *packed)
{
    const uint32_t a = rf_load_u32(packed), b = rf_load_u32(packed + 4),
                   c = rf_load_u32(packed + 8);
    const uint32_t six = 0x3F3F3F3F, four = 0x0F0F0F0F, top = 0x30303030;
    const uint64_t scale = (a & six) | (uint64_t)((c & four) | (a >> 2 & top)) << 32;
    const uint64_t min = (b & six) | (uint64_t)((c >> 4 & four) | (b >> 2 & top)) << 32;
    const int8x8_t zero = vdup_n_s8(0);
    return (rf_subs){vcombine_s8(vcreate_s8(scale), zero), vcombine_s8(vcreate_s8(min), zero)};
}

/* The sixteen 6-bit scales of q3_K, less 32: low halves in words A and B, then their high nibbles;
 * two top bits of each in word C. */
RF_INLINE int8x16_t rf_scales_q3_k(const uint8_t *packed)
{
    const uint32_t a = rf_load_u32(packed), b = rf_load_u32(packed + 4),
                   c = rf_load_u32(packed + 8);
    const uint32_t four = 0x0F0F0F0F, top = 0x30303030;
    const uint64_t low = ((a & four) | (c << 4 & top)) | (uint64_t)((b & four) | (c << 2 & top))
                                                             << 32;
    const uint64_t high =
        ((a >> 4 & four) | (c & top)) | (uint64_t)((b >> 4 & four) | (c >> 2 & top)) << 32;
    return vsubq_s8(vcombine_s8(vcreate_s8(low), vcreate_s8(high)), vdupq_n_s8(32));
}

/* The eight 6-bit scales of iq4_xs, less 32: nibbles, and two bits of each. */
RF_INLINE int8x8_t rf_scales_iq4_xs(const uint8_t *block)
{
    static const int16_t shifts[8] = {0, -2, -4, -6, -8, -10, -12, -14};
    const uint8x8_t both = vcreate_u8(rf_load_u32(block + offsetof(rf_block_iq4_xs, scales_l)));
    const uint16x8_t high = vdupq_n_u16(rf_load_u16(block + offsetof(rf_block_iq4_xs, scales_h)));
    const uint8x8_t low = vzip1_u8(vand_u8(both, vdup_n_u8(15)), vshr_n_u8(both, 4));
    const uint8x8_t top = vmovn_u16(vandq_u16(vshlq_u16(high, vld1q_s16(shifts)), vdupq_n_u16(3)));
    return vreinterpret_s8_u8(vsub_u8(vorr_u8(low, vshl_n_u8(top, 4)), vdup_n_u8(32)));
}

RF_INLINE rf_subs rf_subs_of(rf_format format, const uint8_t *block)
{
    const int8x16_t zero = vdupq_n_s8(0);
    switch (format) {
    case RF_Q2_K: {
        const uint8x16_t both = vld1q_u8(block + offsetof(rf_block_q2_k, scales));
        return (rf_subs){vreinterpretq_s8_u8(rf_low_nibbles(both)),
                         vreinterpretq_s8_u8(vshrq_n_u8(both, 4))};
    }
    case RF_Q3_K:
        return (rf_subs){rf_scales_q3_k(block + offsetof(rf_block_q3_k, scales)), zero};
    case RF_Q4_K:
    case RF_Q5_K:
        return rf_subs_k(block + 4);
    case RF_IQ4_XS:
        return (rf_subs){vcombine_s8(rf_scales_iq4_xs(block), vdup_n_s8(0)), zero};
    case RF_TQ1_0:
    case RF_TQ2_0:
        return (rf_subs){vdupq_n_s8(1), zero};
    default: /* q6_K */
        return (rf_subs){vld1q_s8((const int8_t *)block + offsetof(rf_block_q6_k, scales)), zero};
    }
}

/* Where a block has its scale. The minimum's scale is the half after it. */
RF_INLINE size_t rf_scale_at(rf_format format)
{
    return format == RF_Q2_K    ? offsetof(rf_block_q2_k, d)
           : format == RF_Q3_K  ? offsetof(rf_block_q3_k, d)
           : format == RF_Q6_K  ? offsetof(rf_block_q6_k, d)
           : format == RF_TQ1_0 ? offsetof(rf_block_tq1_0, d)
           : format == RF_TQ2_0 ? offsetof(rf_block_tq2_0, d)
                                : 0;
}

#endif
