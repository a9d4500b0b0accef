/* kernels/kv_codec_scalar.c: the definition of the rotated KV formats: rotation, encoding,
 * expansion and the query.
 */
#include "kernels/act.h"
#include "kernels/kv_scalar.h"

/* ---- rotation ---------------------------------------------------------------------------- */

static void negate(float *row, const uint8_t *signs, uint32_t width)
{
    for (uint32_t i = 0; i < width; i++) {
        const uint32_t sign = (uint32_t)(signs[i / 8] >> i % 8 & 1) << 31;
        row[i] = rf_bits_float(rf_float_bits(row[i]) ^ sign);
    }
}

static void transform(float *row, uint32_t width, uint32_t block)
{
    const float scale = 1.0f / __builtin_sqrtf((float)block);
    for (uint32_t stride = 1; stride < block; stride *= 2) {
        for (uint32_t i = 0; i < width; i++) {
            if ((i & stride) == 0) {
                const float a = row[i], b = row[i + stride];
                row[i] = a + b;
                row[i + stride] = a - b;
            }
        }
    }
    for (uint32_t i = 0; i < width; i++) {
        row[i] *= scale;
    }
}

void rf_kv_rotate_scalar(float *row, const uint8_t *signs, uint32_t width, uint32_t block)
{
    negate(row, signs, width);
    transform(row, width, block);
}

void rf_kv_turn_back_scalar(float *row, const uint8_t *signs, uint32_t width, uint32_t block)
{
    transform(row, width, block);
    negate(row, signs, width);
}

/* ---- packing ----------------------------------------------------------------------------- */

static void pack_4(const uint8_t *index, uint32_t span, uint8_t *out)
{
    for (uint32_t i = 0; i < span / 2; i++) {
        out[i] = (uint8_t)((index[i] & 15) | index[i + span / 2] << 4);
    }
}

static void pack_2(const uint8_t *index, uint32_t span, uint32_t shift, uint8_t *out)
{
    const uint32_t part = span / 4;
    for (uint32_t i = 0; i < part; i++) {
        out[i] = (uint8_t)((index[i] >> shift & 3) | (index[i + part] >> shift & 3) << 2 |
                           (index[i + 2 * part] >> shift & 3) << 4 |
                           (index[i + 3 * part] >> shift & 3) << 6);
    }
}

static void pack_1(const uint8_t *index, uint32_t span, uint32_t shift, uint8_t *out)
{
    for (uint32_t i = 0; i < span; i += 8) {
        uint32_t bits = 0;
        for (uint32_t k = 0; k < 8; k++) {
            bits |= (uint32_t)(index[i + k] >> shift & 1) << k;
        }
        out[i / 8] = (uint8_t)bits;
    }
}

void rf_kv_pack_span(uint32_t code_bits, uint32_t span, const uint8_t *index, uint8_t *out)
{
    switch (code_bits) {
    case 2:
        pack_2(index, span, 0, out);
        break;
    case 3:
        pack_2(index, span, 0, out);
        pack_1(index, span, 2, out + span / 4);
        break;
    case 4:
        pack_4(index, span, out);
        break;
    case 5:
        pack_4(index, span, out);
        pack_1(index, span, 4, out + span / 2);
        break;
    case 6:
        pack_4(index, span, out);
        pack_2(index, span, 4, out + span / 2);
        break;
    default:
        memcpy(out, index, span);
        break;
    }
}

static uint32_t unpack_4(const uint8_t *plane, uint32_t span, uint32_t i)
{
    return i < span / 2 ? plane[i] & 15u : plane[i - span / 2] >> 4;
}

static uint32_t unpack_2(const uint8_t *plane, uint32_t span, uint32_t i)
{
    return (uint32_t)plane[i % (span / 4)] >> 2 * (i / (span / 4)) & 3;
}

static uint32_t unpack_1(const uint8_t *plane, uint32_t i)
{
    return (uint32_t)plane[i / 8] >> i % 8 & 1;
}

static uint32_t unpack(uint32_t code_bits, const uint8_t *planes, uint32_t span, uint32_t i)
{
    switch (code_bits) {
    case 2:
        return unpack_2(planes, span, i);
    case 3:
        return unpack_2(planes, span, i) | unpack_1(planes + span / 4, i) << 2;
    case 4:
        return unpack_4(planes, span, i);
    case 5:
        return unpack_4(planes, span, i) | unpack_1(planes + span / 2, i) << 4;
    case 6:
        return unpack_4(planes, span, i) | unpack_2(planes + span / 2, span, i) << 4;
    default:
        return planes[i];
    }
}

uint32_t rf_kv_index_at(const rf_kv_shape *shape, const uint8_t *row, uint32_t element)
{
    const uint8_t *planes = row + rf_kv_span_at(shape, element / shape->span);
    return unpack(rf_kv_codes[shape->code].code_bits, planes, shape->span, element % shape->span);
}

static int8_t code_of(const rf_kv_code_info *info, uint32_t index)
{
    return info->levels ? info->levels[index] : (int8_t)((int32_t)index - info->offset);
}

int8_t rf_kv_code_at(const rf_kv_shape *shape, const uint8_t *row, uint32_t element)
{
    return code_of(&rf_kv_codes[shape->code], rf_kv_index_at(shape, row, element));
}

float rf_kv_span_value(const rf_kv_shape *shape, const uint8_t *row, uint32_t span, int32_t base)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const uint8_t *stored = row + shape->code_bytes;
    const float scale = info->f16_scale ? rf_f16_to_f32(rf_load_u16(stored + 2 * (size_t)span))
                                        : rf_kv_scale8_value(stored[span], base);
    return scale * info->unit;
}

void rf_kv_expand_scalar(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                         int8_t *codes, float *scales)
{
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = (const uint8_t *)rows + (size_t)r * shape->row_bytes;
        for (uint32_t i = 0; codes && i < shape->width; i++) {
            *codes++ = rf_kv_code_at(shape, row, i);
        }
        for (uint32_t s = 0; s < shape->span_count; s++) {
            *scales++ = rf_kv_span_value(shape, row, s, base);
        }
    }
}

/* ---- encoding ---------------------------------------------------------------------------- */

/* The signed element of largest magnitude, the first of equals. */
static float largest(const float *x, uint32_t n)
{
    float best = 0;
    for (uint32_t i = 0; i < n; i++) {
        best = __builtin_fabsf(x[i]) > __builtin_fabsf(best) ? x[i] : best;
    }
    return best;
}

/* What the trial factors are applied to. */
static float first_scale(const rf_kv_code_info *info, const float *x, uint32_t n)
{
    const float m = largest(x, n);
    return info->f16_scale ? __builtin_fabsf(m) / 127.0f : m;
}

/* What t is multiplied with before nearest(); the scale 0 gives 0. */
static float inverse_of(const rf_kv_code_info *info, float value)
{
    return value == 0 ? 0 : (info->levels ? 2.0f : 1.0f) / value;
}

static uint32_t nearest(const rf_kv_code_info *info, float t, float inverse)
{
    const float v = t * inverse;
    if (!info->levels) {
        const float held = rf_kv_clamp(v, (float)info->low, (float)info->high);
        const uint32_t bits = rf_float_bits(held + RF_EXP_ROUND);
        return (bits - rf_float_bits(RF_EXP_ROUND) + (uint32_t)info->offset) & 0xFF;
    }
    uint32_t index = 0;
    for (uint32_t k = 0; k + 1 < 1u << info->code_bits; k++) {
        index += v >= (float)(info->levels[k] + info->levels[k + 1]);
    }
    return index;
}

static void put_span(const rf_kv_shape *shape, uint32_t span, uint8_t *index, rf_kv_scale scale,
                     void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    if (scale.value == 0) {
        memset(index, info->offset, shape->span);
        scale.stored = 0;
    }
    rf_kv_pack_span(info->code_bits, shape->span, index,
                    (uint8_t *)out + rf_kv_span_at(shape, span));
    rf_kv_put_scale(shape, out, span, scale.stored);
}

static void encode_feedback(const rf_kv_shape *shape, const float *x, uint32_t block,
                            const rf_kv_feedback *feedback, int32_t base, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const uint32_t size = shape->block, first_span = block * size / shape->span;
    const float *m = feedback->m + (size_t)block * size * size;
    const float *d = feedback->d + (size_t)block * size;
    uint8_t index[RF_KV_BLOCK_MAX], best[RF_KV_BLOCK_MAX];
    rf_kv_scale scales[RF_KV_BLOCK_MAX / 8], best_scales[RF_KV_BLOCK_MAX / 8];
    float lowest = 0;
    for (uint32_t trial = 0; trial < info->key_count; trial++) {
        float e[RF_KV_BLOCK_MAX], cost = 0;
        for (uint32_t i = 0; i < size; i++) {
            rf_kv_scale *scale = &scales[i / shape->span];
            if (i % shape->span == 0) {
                *scale = rf_kv_scale_of(
                    info, first_scale(info, x + i, shape->span) * info->key_factors[trial], base);
            }
            float t = x[i];
            for (uint32_t j = 0; j < i; j++) {
                t = __builtin_fmaf(-m[(size_t)j * size + i], e[j], t);
            }
            index[i] = (uint8_t)nearest(info, t, inverse_of(info, scale->value));
            const float code = code_of(info, index[i]);
            const float rest = __builtin_fmaf(-scale->value, code, t);
            e[i] = __builtin_fmaf(scale->value, code, -x[i]);
            cost = __builtin_fmaf(d[i] * rest, rest, cost);
        }
        if (trial == 0 || cost < lowest) {
            lowest = cost;
            memcpy(best, index, sizeof best);
            memcpy(best_scales, scales, sizeof best_scales);
        }
    }
    for (uint32_t s = 0; s < size / shape->span; s++) {
        put_span(shape, first_span + s, best + s * shape->span, best_scales[s], out);
    }
}

static void encode_search(const rf_kv_shape *shape, const float *x, uint32_t span, int32_t base,
                          void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const float m = first_scale(info, x, shape->span);
    uint8_t index[RF_KV_BLOCK_MAX] = {0}, best[RF_KV_BLOCK_MAX] = {0};
    rf_kv_scale best_scale = {0, 0};
    float best_gain = 0;
    for (uint32_t trial = 0; trial < info->search_count; trial++) {
        const rf_kv_scale scale = rf_kv_scale_of(info, m * info->search_factors[trial], base);
        const float inverse = inverse_of(info, scale.value);
        float lanes[8] = {0}, squares = 0;
        for (uint32_t i = 0; i < shape->span; i++) {
            index[i] = (uint8_t)nearest(info, x[i], inverse);
            const float code = code_of(info, index[i]);
            lanes[i % 8] = __builtin_fmaf(code, x[i], lanes[i % 8]);
            squares += code * code; /* below 2^24 */
        }
        const float products = rf_sum_lanes_8(lanes);
        const rf_kv_scale refit = rf_kv_scale_of(info, products / squares * info->units, base);
        const float gain = refit.value * __builtin_fmaf(-refit.value, squares, products + products);
        if (gain > best_gain) {
            best_gain = gain;
            best_scale = refit;
            memcpy(best, index, sizeof best);
        }
    }
    put_span(shape, span, best, best_scale, out);
}

void rf_kv_encode_plain(const rf_kv_shape *shape, const float *x, uint32_t span, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const float m = largest(x, shape->span);
    const float wanted =
        rf_kv_clamp(shape->code == RF_KV_CODE_Q4_0 ? m / -8.0f : __builtin_fabsf(m) / 127.0f,
                    -RF_KV_F16_MAX, RF_KV_F16_MAX);
    const rf_kv_scale scale = rf_kv_scale_of(info, wanted, 0);
    const float inverse = 1.0f / (shape->code == RF_KV_CODE_R8 ? scale.value : wanted);
    uint8_t index[RF_KV_BLOCK_MAX];
    for (uint32_t i = 0; i < shape->span; i++) {
        if (shape->code == RF_KV_CODE_Q4_0) {
            index[i] = (uint8_t)rf_kv_clamp(x[i] * inverse + 8.5f, 0.0f, 15.0f);
        } else {
            index[i] = (uint8_t)nearest(info, x[i], inverse);
        }
    }
    put_span(shape, span, index, scale, out);
}

void rf_kv_encode_scalar(const rf_kv_shape *shape, const float *row, const rf_kv_feedback *feedback,
                         int32_t base, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    if (feedback && info->key_count > 0) {
        for (uint32_t b = 0; b < shape->width / shape->block; b++) {
            encode_feedback(shape, row + (size_t)b * shape->block, b, feedback, base, out);
        }
        return;
    }
    for (uint32_t s = 0; s < shape->span_count; s++) {
        const float *x = row + (size_t)s * shape->span;
        if (info->bounds) {
            rf_kv_encode_polar(shape, x, s, out);
        } else if (info->search_count > 0) {
            encode_search(shape, x, s, base, out);
        } else {
            rf_kv_encode_plain(shape, x, s, out);
        }
    }
}

/* ---- query ------------------------------------------------------------------------------- */

void rf_kv_query_scalar(const float *q, uint32_t width, int16_t *codes, float *scale)
{
    uint32_t amax_bits = 0; /* as integers, |x| is ordered and a NaN is above infinity */
    for (uint32_t i = 0; i < width; i++) {
        const uint32_t bits = rf_float_bits(q[i]) & 0x7FFFFFFFu;
        amax_bits = RF_MAX(bits, amax_bits);
    }
    const rf_act_scale found = rf_act_scale_of(amax_bits, RF_ACT_LIMIT_32);
    *scale = found.scale;
    for (uint32_t i = 0; i < width; i++) {
        const float product = found.inverse == 0.0f ? 0.0f : q[i] * found.inverse;
        const uint32_t bits = rf_float_bits(product + RF_EXP_ROUND);
        codes[i] = (int16_t)(bits - rf_float_bits(RF_EXP_ROUND));
    }
}
