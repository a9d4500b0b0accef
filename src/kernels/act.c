/* kernels/act.c: how the input of a matmul is laid out, and the scalar packing (the definition).
 * Knows nothing of weights but which block their activations take.
 */
#include "kernels/act.h"
#include "kernels/quant.h"

rf_act rf_act_for(rf_format weight, rf_act wanted)
{
    (void)wanted; /* int8 activations have no kernels yet: 16 bits answer for both */
    return rf_quant_of(weight) ? RF_ACT_INT16 : RF_ACT_F32;
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
    layout.row_bytes = (layout.sum_offset + (uint64_t)(k / 16) * sizeof(int32_t) + 63) & ~63ull;
    return layout;
}

bool rf_act_layout_equal(const rf_act_layout *a, const rf_act_layout *b)
{
    return a->act == b->act && a->k == b->k && a->block == b->block;
}

uint64_t rf_matmul_scratch_bytes(uint32_t k)
{
    /* The panel of RF_PANEL_ROWS rows: int16 weights; per block of 32 a scale and a minimum's
     * scale; per 16 a minimum's code. 16 * (2k + 4k/32 + 4k/32 + 4k/16) = 40k bytes. Eight rows of
     * floats padded to 16 need 32k + 512. One line of slack for each of the four parts. */
    const uint64_t padded = ((uint64_t)k + 15) & ~15ull;
    return 40 * padded + 512;
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

void rf_pack_int16_scalar(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int16_t *q = (int16_t *)packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_32 : RF_ACT_LIMIT_256;
    for (uint32_t at = 0; at < layout->k; at += block) {
        uint32_t amax_bits = 0; /* as integers, |x| is ordered and a NaN is above infinity */
        for (uint32_t i = 0; i < block; i++) {
            const uint32_t bits = rf_float_bits(x[at + i]) & 0x7FFFFFFFu;
            amax_bits = bits > amax_bits ? bits : amax_bits;
        }
        const rf_act_scale scale = rf_act_scale_of(amax_bits, limit);
        scales[at / block] = scale.scale;
        for (uint32_t part = at; part < at + block; part += 16) {
            int32_t sum = 0;
            for (uint32_t i = part; i < part + 16; i++) {
                /* |x * inverse| <= limit * (1 + 2^-23) rounds to at most limit. */
                const float product = scale.inverse == 0.0f ? 0.0f : x[i] * scale.inverse;
                const float shifted = product + RF_EXP_ROUND;
                const int32_t code = (int32_t)(rf_float_bits(shifted) - 0x4B400000u);
                q[i] = (int16_t)code;
                sum += code;
            }
            sums[part / 16] = sum;
        }
    }
}
