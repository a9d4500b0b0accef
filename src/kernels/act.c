/* kernels/act.c: how the input of a matmul is laid out, and the scalar packing (the definition).
 * Knows nothing of weights but which block their activations take.
 */
#include "kernels/act.h"
#include "kernels/quant.h"

rf_act rf_act_for(rf_format weight, rf_act wanted)
{
    return rf_quant_of(weight) ? wanted : RF_ACT_F32;
}

rf_act_layout rf_act_layout_of(rf_act act, rf_format weight, uint32_t k)
{
    rf_act_layout layout = {.act = act, .k = k};
    if (act == RF_ACT_F32) {
        layout.row_bytes = ((uint64_t)k * sizeof(float) + 63) & ~63ull;
        return layout;
    }
    const rf_quant *quant = rf_quant_of(weight);
    const uint64_t code_bytes = act == RF_ACT_INT16 ? sizeof(int16_t) : sizeof(int8_t);
    layout.block = quant ? quant->block : 32;
    layout.scale_offset = (k * code_bytes + 63) & ~63ull;
    layout.sum_offset =
        (layout.scale_offset + (uint64_t)(k / layout.block) * sizeof(float) + 63) & ~63ull;
    if (act == RF_ACT_INT8 && layout.block == 256) {
        layout.multiplier_offset = layout.sum_offset;
        layout.sum_offset += ((uint64_t)(k / 32) * sizeof(int16_t) + 63) & ~63ull;
    }
    layout.row_bytes = (layout.sum_offset + (uint64_t)(k / 16) * sizeof(int32_t) + 63) & ~63ull;
    return layout;
}

bool rf_act_layout_equal(const rf_act_layout *a, const rf_act_layout *b)
{
    return a->act == b->act && a->k == b->k && a->block == b->block;
}

uint64_t rf_matmul_scratch_bytes(uint32_t k)
{
    /* The largest taker is the panel of 32 rows of AVX-512: int16 weights (2k); per block of 32 a
     * scale and a minimum's scale (4k/32 each), or per 16 a minimum's code (4k/16):
     * 32 * (2k + 8k/32) = 72k, and 32 * (2k + 4k/16 + 8k/256) = 73k bytes. Beside it, what a tile
     * of six tokens prepares: 6 * 4 * (k/16 + k/32 + k/16) bytes, less than 4k. Sixteen rows of
     * floats padded to 16 need 64k. AVX2 has 32 rows as well where those and its tokens fit (q8_0
     * with int8 activations: 68k and 9k), else 16. A line of slack for each part. */
    const uint64_t padded = ((uint64_t)k + 15) & ~15ull;
    return 80 * padded + 1024;
}

void rf_pack_f32_scalar(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    const size_t used = (size_t)layout->k * sizeof(float);
    memcpy(bytes, x, used);
    memset(bytes + used, 0, layout->row_bytes - used);
}

rf_act_scale rf_act_scale_of(uint32_t amax_bits, float limit)
{
    rf_act_scale result = {0.0f, 0.0f};
    if (amax_bits >= 0x7F800000u) { /* an infinity or a NaN in the block */
        result.scale = rf_bits_float(0x7FC00000u);
        return result;
    }
    const float amax = rf_bits_float(amax_bits);
    if (amax == 0.0f) {
        return result;
    }
    const float inverse = limit / amax;
    if (rf_float_bits(inverse) < 0x7F800000u) {
        result.scale = amax / limit;
        result.inverse = inverse;
    }
    return result;
}

/* The bits of the largest |x|: as integers, |x| is ordered and a NaN is above infinity. */
static uint32_t largest_bits(const float *x, uint32_t count)
{
    uint32_t largest = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t bits = rf_float_bits(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* |x * inverse| <= limit * (1 + 2^-22) rounds to at most limit. */
static int32_t code_of(float x, float inverse)
{
    const float product = inverse == 0.0f ? 0.0f : x * inverse;
    return (int32_t)(rf_float_bits(product + RF_EXP_ROUND) - 0x4B400000u);
}

void rf_pack_int16_scalar(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int16_t *q = (int16_t *)packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_32 : RF_ACT_LIMIT_256;
    for (uint32_t at = 0; at < layout->k; at += block) {
        const rf_act_scale scale = rf_act_scale_of(largest_bits(x + at, block), limit);
        scales[at / block] = scale.scale;
        for (uint32_t part = at; part < at + block; part += 16) {
            int32_t sum = 0;
            for (uint32_t i = part; i < part + 16; i++) {
                const int32_t code = code_of(x[i], scale.inverse);
                q[i] = (int16_t)code;
                sum += code;
            }
            sums[part / 16] = sum;
        }
    }
}

void rf_pack_int8_scalar(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int8_t *q = (int8_t *)packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int16_t *multipliers = (int16_t *)(void *)(bytes + layout->multiplier_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_8 : RF_ACT_LIMIT_8K;
    for (uint32_t at = 0; at < layout->k; at += block) {
        const uint32_t amax_bits = largest_bits(x + at, block);
        const rf_act_scale scale = rf_act_scale_of(amax_bits, limit);
        scales[at / block] = scale.scale;
        for (uint32_t part = at; part < at + block; part += 32) {
            int32_t multiplier = 1;
            if (block == 256) {
                if (scale.inverse != 0.0f) {
                    multiplier = rf_act_multiplier(largest_bits(x + part, 32),
                                                   RF_ACT_MULTIPLES / rf_bits_float(amax_bits));
                }
                multipliers[part / 32] = (int16_t)multiplier;
            }
            const float inverse = scale.inverse / (float)multiplier;
            for (uint32_t i = part; i < part + 32; i++) {
                const int32_t code = code_of(x[i], inverse);
                q[i] = (int8_t)code;
                sums[i / 16] = (i % 16 ? sums[i / 16] : 0) + multiplier * code;
            }
        }
    }
}
