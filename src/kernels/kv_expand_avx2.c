/* kernels/kv_expand_avx2.c: expansion of the rotated KV formats to int8 codes: 32 (or 16) elements
 * of a span at a time, by shifts and one table of levels in a register.
 */
#include "kernels/attend_avx2.h"
#include "kernels/kv_scalar.h"

/* The levels of a code as bytes, once in each half of a register; 32 of them in two. Codes below
 * are those of a layout: turbo4 and turbo4q go as r4, turbo3 and turbo3q as r3. */
typedef struct level_bytes {
    __m256i half[2];
} level_bytes;

RF_INLINE __m256i both_halves(const void *sixteen)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)sixteen));
}

RF_INLINE void load_levels(level_bytes *t, rf_kv_code code)
{
    uint8_t levels[32] = {0};
    if (rf_kv_codes[code].levels) {
        memcpy(levels, rf_kv_codes[code].levels, (size_t)1 << rf_kv_codes[code].code_bits);
    }
    t->half[0] = both_halves(levels);
    t->half[1] = both_halves(levels + 16);
}

/* Indices of a span of 32, or of 16 in the lower half. */
RF_INLINE __m256i load_4(const uint8_t *plane, uint32_t span)
{
    const __m128i nibble = _mm_set1_epi8(15);
    if (span == 32) {
        const __m128i bytes = _mm_loadu_si128((const __m128i *)plane);
        const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), nibble);
        return _mm256_set_m128i(high, _mm_and_si128(bytes, nibble));
    }
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)plane);
    const __m128i all = _mm_unpacklo_epi64(bytes, _mm_srli_epi16(bytes, 4));
    return _mm256_castsi128_si256(_mm_and_si128(all, nibble));
}

RF_INLINE __m256i load_2(const uint8_t *plane, uint32_t span)
{
    __m256i all;
    if (span == 32) {
        const __m256i bytes = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)plane));
        all = _mm256_srlv_epi64(bytes, _mm256_setr_epi64x(0, 2, 4, 6));
    } else {
        const __m128i bytes = _mm_set1_epi32((int)rf_load_u32(plane));
        all = _mm256_castsi128_si256(_mm_srlv_epi32(bytes, _mm_setr_epi32(0, 2, 4, 6)));
    }
    return _mm256_and_si256(all, _mm256_set1_epi8(3));
}

/* All ones where the bit is set. */
RF_INLINE __m256i load_1(const uint8_t *plane, uint32_t span)
{
    const __m256i spread =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201u);
    const uint32_t bits = span == 32 ? rf_load_u32(plane) : rf_load_u16(plane);
    const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32((int)bits), spread);
    return _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
}

RF_INLINE __m256i expand_span(rf_kv_code code, const uint8_t *planes, uint32_t span,
                              const level_bytes *t)
{
    switch (code) {
    case RF_KV_CODE_R6: {
        const __m256i high = _mm256_slli_epi16(load_2(planes + span / 2, span), 4);
        return _mm256_sub_epi8(_mm256_or_si256(load_4(planes, span), high), _mm256_set1_epi8(31));
    }
    case RF_KV_CODE_R5: {
        const __m256i low = load_4(planes, span), high = load_1(planes + span / 2, span);
        return _mm256_blendv_epi8(_mm256_shuffle_epi8(t->half[0], low),
                                  _mm256_shuffle_epi8(t->half[1], low), high);
    }
    case RF_KV_CODE_TURBO2:
        return _mm256_shuffle_epi8(t->half[0], load_2(planes, span));
    case RF_KV_CODE_R4:
        return _mm256_shuffle_epi8(t->half[0], load_4(planes, span));
    case RF_KV_CODE_R3: {
        const __m256i high = _mm256_and_si256(load_1(planes + span / 4, span), _mm256_set1_epi8(4));
        return _mm256_shuffle_epi8(t->half[0], _mm256_or_si256(load_2(planes, span), high));
    }
    default: /* q4_0 */
        return _mm256_sub_epi8(load_4(planes, span), _mm256_set1_epi8(8));
    }
}

RF_INLINE void expand_rows(const rf_kv_shape *shape, rf_kv_code code, uint32_t span,
                           const uint8_t *rows, uint32_t count, int32_t base, int8_t *codes,
                           float *scales)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const uint32_t span_bytes = span * info->code_bits / 8;
    level_bytes t;
    load_levels(&t, shape->code);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = rows + (size_t)r * shape->row_bytes;
        const uint8_t *stored = row + shape->code_bytes;
        for (uint32_t s = 0; s < shape->span_count; s++) {
            const __m256i v = expand_span(code, row + s * span_bytes, span, &t);
            if (span == 32) {
                rf_store_256(codes, v);
            } else {
                _mm_storeu_si128((__m128i *)codes, _mm256_castsi256_si128(v));
            }
            codes += span;
            const float scale = info->f16_scale ? rf_load_f16(stored + 2 * (size_t)s)
                                                : rf_kv_scale8_value(stored[s], base);
            *scales++ = scale * info->unit;
        }
    }
}

/* Indices of elements [at, at + 32) of a span of 64 or 128. */
RF_INLINE __m256i load_4_long(const uint8_t *plane, uint32_t span, uint32_t at)
{
    const __m256i bytes = rf_load_256(plane + at % (span / 2));
    const __m256i all = at < span / 2 ? bytes : _mm256_srli_epi16(bytes, 4);
    return _mm256_and_si256(all, _mm256_set1_epi8(15));
}

RF_INLINE __m256i load_2_long(const uint8_t *plane, uint32_t span, uint32_t at)
{
    const long long first = 2 * (long long)(at / (span / 4));
    __m256i all;
    if (span == 64) {
        const __m256i up = _mm256_setr_epi64x(first, first, first + 2, first + 2);
        all = _mm256_srlv_epi64(both_halves(plane), up);
    } else {
        all = _mm256_srlv_epi64(rf_load_256(plane), _mm256_set1_epi64x(first));
    }
    return _mm256_and_si256(all, _mm256_set1_epi8(3));
}

RF_INLINE void expand_long(const rf_kv_shape *shape, rf_kv_code code, uint32_t span,
                           const uint8_t *rows, uint32_t count, int8_t *codes, float *scales)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    level_bytes t;
    load_levels(&t, shape->code);
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *row = rows + (size_t)r * shape->row_bytes, *planes = row;
        for (uint32_t s = 0; s < shape->span_count; s++) {
            for (uint32_t at = 0; at < span; at += 32) {
                __m256i index;
                if (code == RF_KV_CODE_R4) {
                    index = load_4_long(planes, span, at);
                } else {
                    index = load_2_long(planes, span, at);
                }
                if (code == RF_KV_CODE_R3) {
                    const __m256i top = load_1(planes + span / 4 + at / 8, 32);
                    index = _mm256_or_si256(index, _mm256_and_si256(top, _mm256_set1_epi8(4)));
                }
                rf_store_256(codes, _mm256_shuffle_epi8(t.half[0], index));
                codes += 32;
            }
            planes += span / 8 * info->code_bits;
            *scales++ = rf_load_f16(row + shape->code_bytes + 2 * (size_t)s) * info->unit;
        }
    }
}

/* The f16 scales of 8-bit rows that have one each; the last ones of a count by themselves. */
static void expand_single_scales(const rf_kv_shape *shape, const uint8_t *rows, uint32_t count,
                                 float *scales)
{
    const uint8_t *at = rows + shape->code_bytes;
    const size_t stride = shape->row_bytes;
    uint32_t r = 0;
    for (; r + 8 <= count; r += 8, at += 8 * stride) {
        uint64_t low = 0, high = 0;
        for (uint32_t i = 0; i < 4; i++) {
            low |= (uint64_t)rf_load_u16(at + i * stride) << 16 * i;
            high |= (uint64_t)rf_load_u16(at + (4 + i) * stride) << 16 * i;
        }
        const __m128i halves = _mm_set_epi64x((int64_t)high, (int64_t)low);
        _mm256_storeu_ps(scales + r, _mm256_cvtph_ps(halves));
    }
    for (; r < count; r++, at += stride) {
        scales[r] = rf_load_f16(at);
    }
}

static void expand_bytes(const rf_kv_shape *shape, const uint8_t *rows, uint32_t count,
                         int8_t *codes, float *scales)
{
    for (uint32_t r = 0; codes && r < count; r++) {
        memcpy(codes + (size_t)r * shape->width, rows + (size_t)r * shape->row_bytes, shape->width);
    }
    if (shape->span_count == 1) {
        expand_single_scales(shape, rows, count, scales);
        return;
    }
    for (uint32_t r = 0; r < count; r++) {
        const uint8_t *stored = rows + (size_t)r * shape->row_bytes + shape->code_bytes;
        for (uint32_t s = 0; s < shape->span_count; s++) {
            *scales++ = rf_load_f16(stored + 2 * (size_t)s);
        }
    }
}

#define EXPAND(code)                                                                               \
    case code:                                                                                     \
        if (shape->span == 128) {                                                                  \
            expand_long(shape, code, 128, rows, count, codes, scales);                             \
        } else if (shape->span == 64) {                                                            \
            expand_long(shape, code, 64, rows, count, codes, scales);                              \
        } else if (shape->span == 32) {                                                            \
            expand_rows(shape, code, 32, rows, count, base, codes, scales);                        \
        } else {                                                                                   \
            expand_rows(shape, code, 16, rows, count, base, codes, scales);                        \
        }                                                                                          \
        break

static rf_kv_code layout_of(rf_kv_code code)
{
    switch (code) {
    case RF_KV_CODE_TURBO4:
    case RF_KV_CODE_TURBO4Q:
        return RF_KV_CODE_R4;
    case RF_KV_CODE_TURBO3:
    case RF_KV_CODE_TURBO3Q:
        return RF_KV_CODE_R3;
    default:
        return code;
    }
}

void rf_kv_expand_avx2(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                       int8_t *codes, float *scales)
{
    if (rf_kv_codes[shape->code].code_bits == 8) {
        expand_bytes(shape, rows, count, codes, scales);
        return;
    }
    if (shape->span == 8) {
        rf_kv_expand_scalar(shape, rows, count, base, codes, scales);
        return;
    }
    switch (layout_of(shape->code)) {
        EXPAND(RF_KV_CODE_TURBO2);
        EXPAND(RF_KV_CODE_R6);
        EXPAND(RF_KV_CODE_R5);
        EXPAND(RF_KV_CODE_R4);
        EXPAND(RF_KV_CODE_R3);
        EXPAND(RF_KV_CODE_Q4_0);
    default:
        break;
    }
}
