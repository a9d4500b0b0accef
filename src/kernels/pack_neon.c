/* kernels/pack_neon.c: the packing of activations with NEON, operation for operation that of act.c.
 * Blocks whose codes are all zero (zeros, NaN, infinities) are written apart, so that the loops
 * need not ask.
 */
#include "kernels/neon.h"

/* The bits of the largest |x| of count values, a multiple of 16. */
RF_INLINE uint32_t largest_bits(const float *x, uint32_t count)
{
    const uint32x4_t magnitude = vdupq_n_u32(0x7FFFFFFF);
    uint32x4_t a = vdupq_n_u32(0), b = a;
    for (uint32_t i = 0; i < count; i += 8) {
        a = vmaxq_u32(a, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i)), magnitude));
        b = vmaxq_u32(b, vandq_u32(vreinterpretq_u32_f32(vld1q_f32(x + i + 4)), magnitude));
    }
    return vmaxvq_u32(vmaxq_u32(a, b));
}

/* Four codes, to the nearest even. */
RF_INLINE int32x4_t codes_of_4(const float *x, float inverse)
{
    return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x), inverse));
}

void rf_pack_int16_neon(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int16_t *q = packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_32 : RF_ACT_LIMIT_256;
    for (uint32_t at = 0; at < layout->k; at += block) {
        const rf_act_scale scale = rf_act_scale_of(largest_bits(x + at, block), limit);
        scales[at / block] = scale.scale;
        if (scale.inverse == 0.0f) {
            memset(q + at, 0, block * sizeof *q);
            memset(sums + at / 16, 0, block / 16 * sizeof *sums);
            continue;
        }
        for (uint32_t i = at; i < at + block; i += 16) {
            const int32x4_t a = codes_of_4(x + i, scale.inverse);
            const int32x4_t b = codes_of_4(x + i + 4, scale.inverse);
            const int32x4_t c = codes_of_4(x + i + 8, scale.inverse);
            const int32x4_t d = codes_of_4(x + i + 12, scale.inverse);
            vst1q_s16(q + i, vcombine_s16(vmovn_s32(a), vmovn_s32(b)));
            vst1q_s16(q + i + 8, vcombine_s16(vmovn_s32(c), vmovn_s32(d)));
            sums[i / 16] = vaddvq_s32(vaddq_s32(vaddq_s32(a, b), vaddq_s32(c, d)));
        }
    }
}

/* 16 codes; their sum. */
RF_INLINE int32_t pack_16(const float *x, float inverse, int8_t *q)
{
    const int16x8_t a =
        vcombine_s16(vmovn_s32(codes_of_4(x, inverse)), vmovn_s32(codes_of_4(x + 4, inverse)));
    const int16x8_t b =
        vcombine_s16(vmovn_s32(codes_of_4(x + 8, inverse)), vmovn_s32(codes_of_4(x + 12, inverse)));
    vst1q_s8(q, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
    return vaddvq_s16(vaddq_s16(a, b));
}

/* A block whose codes are zeros. */
RF_INLINE void zero_block(const rf_act_layout *layout, uint32_t at, int8_t *q, int16_t *multipliers,
                          int32_t *sums)
{
    memset(q + at, 0, layout->block);
    memset(sums + at / 16, 0, layout->block / 16 * sizeof *sums);
    for (uint32_t i = 0; layout->block == 256 && i < 8; i++) {
        multipliers[at / 32 + i] = 1;
    }
}

void rf_pack_int8_neon(const rf_act_layout *layout, const float *x, void *packed)
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
        scales[at / block] = scale.scale;
        if (scale.inverse == 0.0f) {
            zero_block(layout, at, q, multipliers, sums);
            continue;
        }
        const float per_amax = RF_ACT_MULTIPLES / rf_bits_float(amax_bits);
        for (uint32_t part = at; part < at + block; part += 32) {
            int32_t multiplier = 1;
            if (block == 256) {
                multiplier = rf_act_multiplier(largest_bits(x + part, 32), per_amax);
                multipliers[part / 32] = (int16_t)multiplier;
            }
            const float inverse = scale.inverse / (float)multiplier;
            sums[part / 16] = multiplier * pack_16(x + part, inverse, q + part);
            sums[part / 16 + 1] = multiplier * pack_16(x + part + 16, inverse, q + part + 16);
        }
    }
}
