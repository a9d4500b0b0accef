/* kernels/kv_scalar.h: what the entries of the rotated KV formats share: scales, the packing of
 * indices, and the scalar entries.
 *
 * Internal to kernels/.
 */
#ifndef RF_KERNELS_KV_SCALAR_H
#define RF_KERNELS_KV_SCALAR_H

#include "kernels/kv_codec.h"
#include "kernels/quant.h"

#define RF_KV_F16_MAX 65504.0f

static inline uint8_t rf_kv_scale8(float value, int32_t base)
{
    const uint32_t bits = rf_float_bits(value), size = bits & 0x7FFFFFFFu;
    if (size == 0) {
        return 0;
    }
    const int32_t code = (int32_t)((size + 0x80000u) >> 20) - (base + 112) * 8;
    const int32_t held = code < 1 ? 1 : (code > 127 ? 127 : code);
    return (uint8_t)((bits >> 24 & 0x80u) | (uint32_t)held);
}

static inline float rf_kv_scale8_value(uint8_t byte, int32_t base)
{
    const uint32_t size = byte & 0x7Fu;
    if (size == 0) {
        return 0.0f;
    }
    return rf_bits_float((byte & 0x80u) << 24 | (size + (uint32_t)(base + 112) * 8) << 20);
}

static inline float rf_kv_clamp(float x, float low, float high) /* a NaN becomes low */
{
    x = x > low ? x : low;
    return x < high ? x : high;
}

/* A scale as it is stored, and what expansion makes of it. */
typedef struct rf_kv_scale {
    float value; /* the unit included */
    uint16_t stored;
} rf_kv_scale;

static inline rf_kv_scale rf_kv_half_scale(const rf_kv_code_info *info, float scale)
{
    rf_kv_scale result;
    result.stored = rf_f32_to_f16(rf_kv_clamp(scale, -RF_KV_F16_MAX, RF_KV_F16_MAX));
    result.value = rf_f16_to_f32(result.stored) * info->unit;
    return result;
}

static inline rf_kv_scale rf_kv_scale_of(const rf_kv_code_info *info, float scale, int32_t base)
{
    rf_kv_scale result;
    if (info->f16_scale) {
        return rf_kv_half_scale(info, scale);
    }
    result.stored = rf_kv_scale8(scale, base);
    result.value = rf_kv_scale8_value((uint8_t)result.stored, base) * info->unit;
    return result;
}

/* What a span's sum of squares gives a polar code: what elements are multiplied with before they
 * meet the bounds. Squares of floats are exact in double, and no sum of them overflows. */
static inline float rf_kv_polar_inverse(double squares, uint32_t span)
{
    const double inverse = __builtin_sqrt((double)span) / __builtin_sqrt(squares);
    return inverse < 0x1p127 ? (float)inverse : 0x1p127f; /* a scale that rounds to 0 */
}

/* Its scale, from the sums of squares of the span and of its int8 codes; a NaN gives 0. */
static inline rf_kv_scale rf_kv_polar_scale(const rf_kv_shape *shape, double squares,
                                            uint32_t code_squares)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const double size = info->wide ? __builtin_sqrt((double)shape->span)
                                   : (double)info->unit * __builtin_sqrt((double)code_squares);
    const double wanted = __builtin_sqrt(squares) / size;
    const double held = wanted < (double)RF_KV_F16_MAX ? wanted : (double)RF_KV_F16_MAX;
    return rf_kv_half_scale(info, squares >= 0 ? (float)held : 0.0f);
}

static inline void rf_kv_put_scale(const rf_kv_shape *shape, void *row, uint32_t span,
                                   uint16_t stored)
{
    uint8_t *scales = (uint8_t *)row + shape->code_bytes;
    if (rf_kv_codes[shape->code].f16_scale) {
        memcpy(scales + 2 * (size_t)span, &stored, sizeof stored);
    } else {
        scales[span] = (uint8_t)stored;
    }
}

/* Where a span of a row begins. */
static inline uint32_t rf_kv_span_at(const rf_kv_shape *shape, uint32_t span)
{
    return span * shape->span * rf_kv_codes[shape->code].code_bits / 8;
}

/* Packs one span of indices into its planes. */
void rf_kv_pack_span(uint32_t code_bits, uint32_t span, const uint8_t *index, uint8_t *out);

/* Of one element of a row: its index, its int8 code; of a span: what its codes are multiplied
 * with. */
uint32_t rf_kv_index_at(const rf_kv_shape *shape, const uint8_t *row, uint32_t element);
int8_t rf_kv_code_at(const rf_kv_shape *shape, const uint8_t *row, uint32_t element);
float rf_kv_span_value(const rf_kv_shape *shape, const uint8_t *row, uint32_t span, int32_t base);

/* One span of a polar code. */
void rf_kv_encode_polar(const rf_kv_shape *shape, const float *x, uint32_t span, void *out);

/* One span without feedback and without search: r8, q8_0, q4_0. */
void rf_kv_encode_plain(const rf_kv_shape *shape, const float *x, uint32_t span, void *out);

void rf_kv_rotate_scalar(float *row, const uint8_t *signs, uint32_t width, uint32_t block);
void rf_kv_turn_back_scalar(float *row, const uint8_t *signs, uint32_t width, uint32_t block);
void rf_kv_encode_scalar(const rf_kv_shape *shape, const float *row, const rf_kv_feedback *feedback,
                         int32_t base, void *out);
void rf_kv_expand_scalar(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                         int8_t *codes, float *scales);
void rf_kv_query_scalar(const float *q, uint32_t width, int16_t *codes, float *scale);
#if defined(__x86_64__)
void rf_kv_kernels_avx2(rf_kv_kernels *kernels);
void rf_kv_expand_avx2(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                       int8_t *codes, float *scales);
#endif

#endif
