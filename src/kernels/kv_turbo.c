/* kernels/kv_turbo.c: the polar KV formats, scalar: encoding, and rows of any format as f32.
 *
 *   span ─► norm, nearest levels ─► scale            turbo4, turbo3, turbo2
 *                └► rest ─► its norm, turned once more ─► signs    turbo4q, turbo3q
 *
 * TurboQuant (Zandieh et al., arXiv 2504.19874), algorithms 1 and 2, with tables in int8.
 */
#include "kernels/kv_scalar.h"

#define ROOT_HALF_PI 1.2533141373155003f /* sqrt(pi / 2) */

static double square_sum(const float *x, uint32_t n)
{
    double lanes[4] = {0};
    for (uint32_t i = 0; i < n; i++) {
        lanes[i % 4] += (double)x[i] * (double)x[i];
    }
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

/* Levels of an index: the sign of the rest is the bit above. */
static uint32_t level_bits(const rf_kv_code_info *info)
{
    return info->code_bits - (info->wide ? 1 : 0);
}

/* Puts the signs of the rest into index; its norm. */
static uint16_t encode_rest(const rf_kv_shape *shape, const float *x, float value, uint8_t *index)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    uint8_t signs[RF_KV_SPAN_MAX / 8];
    float rest[RF_KV_SPAN_MAX];
    for (uint32_t i = 0; i < shape->span; i++) {
        rest[i] = __builtin_fmaf(-value, info->levels[index[i]], x[i]);
    }
    const double norm = __builtin_sqrt(square_sum(rest, shape->span));
    rf_kv_signs(RF_KV_REST_SEED, shape->span, signs);
    rf_kv_rotate_scalar(rest, signs, shape->span, shape->span);
    for (uint32_t i = 0; i < shape->span; i++) {
        index[i] |= (uint8_t)((rest[i] < 0) << level_bits(info));
    }
    return rf_f32_to_f16(norm < (double)RF_KV_F16_MAX ? (float)norm : RF_KV_F16_MAX);
}

void rf_kv_encode_polar(const rf_kv_shape *shape, const float *x, uint32_t span, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const double squares = square_sum(x, shape->span);
    const float inverse = rf_kv_polar_inverse(squares, shape->span);
    uint8_t index[RF_KV_SPAN_MAX] = {0};
    uint32_t code_squares = 0;
    for (uint32_t i = 0; i < shape->span; i++) {
        const float v = x[i] * inverse;
        uint32_t reached = 0;
        for (uint32_t k = 0; k + 1 < 1u << level_bits(info); k++) {
            reached += v >= info->bounds[k];
        }
        index[i] = (uint8_t)reached;
        const int32_t code = info->levels[reached];
        code_squares += (uint32_t)(code * code);
    }
    const rf_kv_scale scale = rf_kv_polar_scale(shape, squares, code_squares);
    uint16_t rest_norm = 0;
    if (scale.value == 0) {
        memset(index, 0, sizeof index);
    } else if (info->wide) {
        rest_norm = encode_rest(shape, x, scale.value, index);
    }
    rf_kv_pack_span(info->code_bits, shape->span, index,
                    (uint8_t *)out + rf_kv_span_at(shape, span));
    rf_kv_put_scale(shape, out, span, scale.stored);
    if (info->wide) {
        rf_kv_put_scale(shape, out, shape->span_count + span, rest_norm);
    }
}

/* The estimate of the rest of one span. */
static void widen_rest(const rf_kv_shape *shape, const uint8_t *row, uint32_t span,
                       const uint8_t *signs, float *rest)
{
    const uint32_t size = shape->span, shift = level_bits(&rf_kv_codes[shape->code]);
    const uint8_t *norms = row + shape->code_bytes + 2 * (size_t)shape->span_count;
    const float norm = rf_f16_to_f32(rf_load_u16(norms + 2 * (size_t)span));
    const float factor = ROOT_HALF_PI / __builtin_sqrtf((float)size) * norm;
    for (uint32_t i = 0; i < size; i++) {
        rest[i] = rf_kv_index_at(shape, row, span * size + i) >> shift ? -1.0f : 1.0f;
    }
    rf_kv_turn_back_scalar(rest, signs, size, size);
    for (uint32_t i = 0; i < size; i++) {
        rest[i] *= factor;
    }
}

/* Spans one at a time, so that a row of any width needs no more than this frame. */
void rf_kv_widen(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                 float *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    uint8_t signs[RF_KV_SPAN_MAX / 8];
    float rest[RF_KV_SPAN_MAX];
    rf_kv_signs(RF_KV_REST_SEED, RF_KV_SPAN_MAX, signs);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)rows + (size_t)r * shape->row_bytes;
        for (uint32_t s = 0; s < shape->span_count; s++) {
            const float value = rf_kv_span_value(shape, row, s, base);
            if (info->wide) {
                widen_rest(shape, row, s, signs, rest);
            }
            for (uint32_t i = 0; i < shape->span; i++) {
                const float code = rf_kv_code_at(shape, row, s * shape->span + i);
                *out++ = info->wide ? __builtin_fmaf(value, code, rest[i]) : value * code;
            }
        }
    }
}
