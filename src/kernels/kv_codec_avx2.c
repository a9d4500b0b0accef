/* kernels/kv_codec_avx2.c: rotation and encoding of the rotated KV formats.
 *
 * Feedback is a chain of one element after the other, so the trial scales run side by side in four
 * lanes, and what is left of the row (t) is brought up to date eight elements at a time:
 *
 *            elements 8b .. 8b+7                    elements after them
 *   4 lanes: t ─► nearest ─► e, next t in registers   t of each trial -= 8 columns of M * e
 *
 * The search without feedback has elements in lanes and runs through the trial scales. Polar codes
 * have spans of up to 128; of turbo*q, which exists for the record, encoding is the scalar entry's.
 */
#include "kernels/attend_avx2.h"
#include "kernels/kv_scalar.h"

#define LANES 4u /* trial scales with feedback */

/* ---- rotation ---------------------------------------------------------------------------- */

RF_INLINE __m256 flip(__m256 x, uint8_t signs)
{
    const __m256i up = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i bits = _mm256_sllv_epi32(_mm256_set1_epi32(signs), up);
    const __m256i top = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(x, _mm256_castsi256_ps(top));
}

/* Strides 1, 2, 4: in the upper place of a pair the own value is subtracted from the other. */
RF_INLINE __m256 transform_8(__m256 x)
{
    const __m256 odd_1 = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const __m256 odd_2 = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const __m256 odd_4 = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    x = _mm256_add_ps(_mm256_permute_ps(x, 0xB1), _mm256_xor_ps(x, odd_1));
    x = _mm256_add_ps(_mm256_permute_ps(x, 0x4E), _mm256_xor_ps(x, odd_2));
    return _mm256_add_ps(_mm256_permute2f128_ps(x, x, 1), _mm256_xor_ps(x, odd_4));
}

/* 8 * parts elements: signs before (may be NULL), transform, scale, signs after (may be NULL). */
RF_INLINE void transform_part(float *row, uint32_t parts, const uint8_t *before, float scale,
                              const uint8_t *after)
{
    __m256 x[8];
    for (uint32_t p = 0; p < parts; p++) {
        x[p] = _mm256_loadu_ps(row + 8 * p);
        x[p] = transform_8(before ? flip(x[p], before[p]) : x[p]);
    }
    for (uint32_t stride = 1; stride < parts; stride *= 2) {
        for (uint32_t p = 0; p < parts; p++) {
            if ((p & stride) == 0) {
                const __m256 a = x[p], b = x[p + stride];
                x[p] = _mm256_add_ps(a, b);
                x[p + stride] = _mm256_sub_ps(a, b);
            }
        }
    }
    for (uint32_t p = 0; p < parts; p++) {
        x[p] = _mm256_mul_ps(x[p], _mm256_set1_ps(scale));
        _mm256_storeu_ps(row + 8 * p, after ? flip(x[p], after[p]) : x[p]);
    }
}

/* Blocks of 128 and 256: strides 64 and up, over memory. */
static void transform_far(float *row, uint32_t block, float scale, const uint8_t *after)
{
    for (uint32_t stride = 64; stride < block; stride *= 2) {
        for (uint32_t i = 0; i < block; i += 8) {
            if ((i & stride) == 0) {
                const __m256 a = _mm256_loadu_ps(row + i), b = _mm256_loadu_ps(row + i + stride);
                _mm256_storeu_ps(row + i, _mm256_add_ps(a, b));
                _mm256_storeu_ps(row + i + stride, _mm256_sub_ps(a, b));
            }
        }
    }
    for (uint32_t i = 0; i < block; i += 8) {
        const __m256 x = _mm256_mul_ps(_mm256_loadu_ps(row + i), _mm256_set1_ps(scale));
        _mm256_storeu_ps(row + i, after ? flip(x, after[i / 8]) : x);
    }
}

RF_INLINE void transform(float *row, const uint8_t *signs, uint32_t width, uint32_t block,
                         bool back)
{
    const float scale = 1.0f / __builtin_sqrtf((float)block);
    for (uint32_t at = 0; at < width; at += block) {
        const uint8_t *before = back ? NULL : signs + at / 8;
        const uint8_t *after = back ? signs + at / 8 : NULL;
        switch (block) {
        case 8:
            transform_part(row + at, 1, before, scale, after);
            break;
        case 16:
            transform_part(row + at, 2, before, scale, after);
            break;
        case 32:
            transform_part(row + at, 4, before, scale, after);
            break;
        case 64:
            transform_part(row + at, 8, before, scale, after);
            break;
        default:
            for (uint32_t part = 0; part < block; part += 64) {
                transform_part(row + at + part, 8, before ? before + part / 8 : NULL, 1.0f, NULL);
            }
            transform_far(row + at, block, scale, after);
            break;
        }
    }
}

static void rotate_avx2(float *row, const uint8_t *signs, uint32_t width, uint32_t block)
{
    transform(row, signs, width, block, false);
}

static void turn_back_avx2(float *row, const uint8_t *signs, uint32_t width, uint32_t block)
{
    transform(row, signs, width, block, true);
}

/* ---- encoding: parts --------------------------------------------------------------------- */

typedef enum search { UNIFORM, LEVELS_16, LEVELS_32 } search; /* at most so many levels */

/* What finds the nearest of 16 (32) levels: the quarter by three compares; for 32 the half of the
 * quarter; then one of four by three thresholds that are chosen by the quarter. Tables of four
 * stand in each half of a register, in the order of quarters 0, 3, 2, 1. */
typedef struct choices {
    __m256 quarter[3];
    __m256 half;
    __m256 inner[2][4]; /* [half][threshold above element i of the four] */
    __m256 level[2][4];
} choices;

RF_INLINE __m128 four_floats(const int8_t *bytes)
{
    return _mm_cvtepi32_ps(
        _mm_cvtepi8_epi32(_mm_cvtsi32_si128((int)rf_load_u32((const uint8_t *)bytes))));
}

/* Four quarters' rows of four to tables, one for each place in a row. */
RF_INLINE void to_tables(__m128 rows[4], __m256 tables[4])
{
    _MM_TRANSPOSE4_PS(rows[0], rows[3], rows[2], rows[1]);
    tables[0] = _mm256_set_m128(rows[0], rows[0]);
    tables[1] = _mm256_set_m128(rows[3], rows[3]);
    tables[2] = _mm256_set_m128(rows[2], rows[2]);
    tables[3] = _mm256_set_m128(rows[1], rows[1]);
}

RF_INLINE void load_choices(choices *c, const rf_kv_code_info *info, search kind)
{
    const uint32_t step = kind == LEVELS_32 ? 8 : 4; /* levels of a quarter */
    const uint32_t count = 1u << info->code_bits;
    int8_t levels[33] = {0};
    if (kind == UNIFORM) {
        return;
    }
    memcpy(levels, info->levels, count);
    for (uint32_t i = 0; i < 3; i++) { /* r3 has two quarters: NaN is never reached */
        const uint32_t at = (i + 1) * step;
        const float bound =
            info->bounds ? info->bounds[at - 1] : (float)(levels[at - 1] + levels[at]);
        c->quarter[i] = _mm256_set1_ps(at < count ? bound : __builtin_nanf(""));
    }
    for (uint32_t h = 0; h < step / 4; h++) {
        __m128 rows[4], sums[4];
        for (uint32_t q = 0; q < 4; q++) {
            const int8_t *at = levels + q * step + 4 * h;
            rows[q] = four_floats(at);
            sums[q] = info->bounds ? _mm_loadu_ps(info->bounds + 4 * q)
                                   : _mm_add_ps(rows[q], four_floats(at + 1));
        }
        to_tables(rows, c->level[h]);
        to_tables(sums, c->inner[h]);
    }
    c->half = c->inner[0][3];
}

/* Entry of a table for the quarter, and for 32 levels its lower or upper half. */
RF_INLINE __m256 choose(const __m256 tables[2][4], uint32_t i, search kind, __m256i quarter,
                        __m256 upper)
{
    const __m256 low = _mm256_permutevar_ps(tables[0][i], quarter);
    if (kind != LEVELS_32) {
        return low;
    }
    return _mm256_blendv_ps(low, _mm256_permutevar_ps(tables[1][i], quarter), upper);
}

RF_INLINE __m256i at_least(__m256 x, __m256 threshold)
{
    return _mm256_castps_si256(_mm256_cmp_ps(x, threshold, _CMP_GE_OQ));
}

/* nearest() of the scalar file for eight elements: the index, and the code in *code. */
RF_INLINE __m256i nearest_8(const rf_kv_code_info *info, const choices *c, search kind, __m256 x,
                            __m256 inverse, __m256 *code)
{
    __m256 v = _mm256_mul_ps(x, inverse);
    if (kind == UNIFORM) {
        v = _mm256_max_ps(v, _mm256_set1_ps((float)info->low)); /* low for a NaN */
        v = _mm256_min_ps(v, _mm256_set1_ps((float)info->high));
        const __m256i rounded = _mm256_cvtps_epi32(v);
        *code = _mm256_cvtepi32_ps(rounded);
        return _mm256_and_si256(_mm256_add_epi32(rounded, _mm256_set1_epi32(info->offset)),
                                _mm256_set1_epi32(255));
    }
    const __m256i quarter =
        _mm256_add_epi32(_mm256_add_epi32(at_least(v, c->quarter[0]), at_least(v, c->quarter[1])),
                         at_least(v, c->quarter[2]));
    __m256i index = _mm256_slli_epi32(quarter, 2);
    __m256 upper = _mm256_setzero_ps();
    if (kind == LEVELS_32) {
        const __m256i half = at_least(v, _mm256_permutevar_ps(c->half, quarter));
        index = _mm256_slli_epi32(_mm256_add_epi32(_mm256_add_epi32(quarter, quarter), half), 2);
        upper = _mm256_castsi256_ps(half);
    }
    __m256i over[3];
    for (uint32_t i = 0; i < 3; i++) {
        over[i] = at_least(v, choose(c->inner, i, kind, quarter, upper));
        index = _mm256_add_epi32(index, over[i]);
    }
    const __m256 first =
        _mm256_blendv_ps(choose(c->level, 0, kind, quarter, upper),
                         choose(c->level, 1, kind, quarter, upper), _mm256_castsi256_ps(over[0]));
    const __m256 second =
        _mm256_blendv_ps(choose(c->level, 2, kind, quarter, upper),
                         choose(c->level, 3, kind, quarter, upper), _mm256_castsi256_ps(over[2]));
    *code = _mm256_blendv_ps(first, second, _mm256_castsi256_ps(over[1]));
    return _mm256_sub_epi32(_mm256_setzero_si256(), index);
}

RF_INLINE __m128i nearest_4(const rf_kv_code_info *info, const choices *c, search kind, __m128 x,
                            __m128 inverse, __m128 *code)
{
    __m256 eight;
    const __m256i index = nearest_8(info, c, kind, _mm256_castps128_ps256(x),
                                    _mm256_castps128_ps256(inverse), &eight);
    *code = _mm256_castps256_ps128(eight);
    return _mm256_castsi256_si128(index);
}

/* rf_kv_scale_of for eight scales of 8 bits. */
RF_INLINE __m256 scale8_of(const rf_kv_code_info *info, __m256 wanted, int32_t base,
                           __m256i *stored)
{
    const __m256i zero = _mm256_setzero_si256(), offset = _mm256_set1_epi32((base + 112) * 8);
    const __m256i bits = _mm256_castps_si256(wanted);
    const __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(INT32_MAX));
    __m256i code = _mm256_srli_epi32(_mm256_add_epi32(size, _mm256_set1_epi32(0x80000)), 20);
    code = _mm256_max_epi32(_mm256_sub_epi32(code, offset), _mm256_set1_epi32(1));
    code = _mm256_min_epi32(code, _mm256_set1_epi32(127));
    const __m256i sign = _mm256_andnot_si256(_mm256_set1_epi32(INT32_MAX), bits);
    const __m256i none = _mm256_cmpeq_epi32(size, zero);
    *stored = _mm256_andnot_si256(none, _mm256_or_si256(code, _mm256_srli_epi32(sign, 24)));
    const __m256i value =
        _mm256_or_si256(sign, _mm256_slli_epi32(_mm256_add_epi32(code, offset), 20));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_andnot_si256(none, value)),
                         _mm256_set1_ps(info->unit));
}

/* rf_kv_scale_of of any format for four. */
RF_INLINE __m128 scales_of(const rf_kv_code_info *info, __m128 wanted, int32_t base,
                           __m128i *stored)
{
    if (info->f16_scale) {
        wanted = _mm_max_ps(wanted, _mm_set1_ps(-RF_KV_F16_MAX));
        wanted = _mm_min_ps(wanted, _mm_set1_ps(RF_KV_F16_MAX));
        const __m128i half = _mm_cvtps_ph(wanted, _MM_FROUND_TO_NEAREST_INT);
        *stored = _mm_cvtepu16_epi32(half);
        return _mm_cvtph_ps(half);
    }
    __m256i eight;
    const __m256 value = scale8_of(info, _mm256_castps128_ps256(wanted), base, &eight);
    *stored = _mm256_castsi256_si128(eight);
    return _mm256_castps256_ps128(value);
}

/* inverse_of of the scalar file. */
RF_INLINE __m256 inverses_of(search kind, __m256 value)
{
    const __m256 one = _mm256_set1_ps(kind == UNIFORM ? 1.0f : 2.0f);
    const __m256 some = _mm256_cmp_ps(value, _mm256_setzero_ps(), _CMP_NEQ_UQ);
    return _mm256_and_ps(some, _mm256_div_ps(one, value));
}

/* The signed element of largest magnitude, the first of equals; NaNs do not count. */
RF_INLINE float largest(const float *x, uint32_t n)
{
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(INT32_MAX));
    __m256 top = _mm256_setzero_ps();
    for (uint32_t i = 0; i < n; i += 8) {
        top = _mm256_max_ps(_mm256_and_ps(_mm256_loadu_ps(x + i), magnitude), top);
    }
    top = _mm256_max_ps(top, _mm256_permute2f128_ps(top, top, 1));
    top = _mm256_max_ps(top, _mm256_permute_ps(top, 0x4E));
    top = _mm256_max_ps(top, _mm256_permute_ps(top, 0xB1));
    uint64_t equal = 0;
    for (uint32_t i = 0; i < n; i += 8) {
        const __m256 size = _mm256_and_ps(_mm256_loadu_ps(x + i), magnitude);
        const int mask = _mm256_movemask_ps(_mm256_cmp_ps(size, top, _CMP_EQ_OQ));
        equal |= (uint64_t)(uint32_t)mask << i;
    }
    const float first = equal ? x[__builtin_ctzll(equal)] : 0.0f;
    return first == 0 ? 0.0f : first;
}

/* 2, 3 or 4 bits of a span of 64 or 128. */
RF_INLINE void pack_long(uint32_t bits, uint32_t span, const uint8_t *index, uint8_t *out)
{
    if (bits == 4) {
        for (uint32_t i = 0; i < span / 2; i += 32) {
            const __m256i high = _mm256_slli_epi16(rf_load_256(index + span / 2 + i), 4);
            rf_store_256(out + i, _mm256_or_si256(rf_load_256(index + i), high));
        }
        return;
    }
    const __m128i three = _mm_set1_epi8(3);
    for (uint32_t i = 0; i < span / 4; i += 16) {
        __m128i all = _mm_setzero_si128();
        for (uint32_t k = 4; k-- > 0;) {
            const __m128i one = _mm_loadu_si128((const __m128i *)(index + i + k * (span / 4)));
            all = _mm_or_si128(_mm_slli_epi16(all, 2), _mm_and_si128(one, three));
        }
        _mm_storeu_si128((__m128i *)(out + i), all);
    }
    for (uint32_t i = 0; bits == 3 && i < span; i += 32) {
        const int32_t mask = _mm256_movemask_epi8(_mm256_slli_epi16(rf_load_256(index + i), 5));
        memcpy(out + span / 4 + i / 8, &mask, sizeof mask);
    }
}

RF_INLINE void pack_span(uint32_t bits, uint32_t span, const uint8_t *index, uint8_t *out)
{
    if (span != 32 || bits == 8 || bits == 2) {
        rf_kv_pack_span(bits, span, index, out);
        return;
    }
    const __m256i v = rf_load_256(index);
    if (bits >= 4) {
        const __m256i nibbles = _mm256_and_si256(v, _mm256_set1_epi8(15));
        const __m128i high = _mm_slli_epi16(_mm256_extracti128_si256(nibbles, 1), 4);
        _mm_storeu_si128((__m128i *)out, _mm_or_si128(_mm256_castsi256_si128(nibbles), high));
        out += 16;
    }
    if (bits == 6 || bits == 3) {
        const __m256i shifted = bits == 6 ? _mm256_srli_epi16(v, 4) : v;
        __m256i pair = _mm256_and_si256(shifted, _mm256_set1_epi8(3));
        pair = _mm256_sllv_epi64(pair, _mm256_setr_epi64x(0, 2, 4, 6));
        __m128i all = _mm_or_si128(_mm256_castsi256_si128(pair), _mm256_extracti128_si256(pair, 1));
        all = _mm_or_si128(all, _mm_unpackhi_epi64(all, all));
        _mm_storel_epi64((__m128i *)out, all);
        out += 8;
    }
    if (bits == 5 || bits == 3) {
        const __m256i top = bits == 5 ? _mm256_slli_epi16(v, 3) : _mm256_slli_epi16(v, 5);
        const int32_t mask = _mm256_movemask_epi8(top);
        memcpy(out, &mask, sizeof mask);
    }
}

RF_INLINE void put_span(const rf_kv_shape *shape, uint32_t bits, uint32_t span, uint8_t *index,
                        uint16_t stored, bool zero, void *out)
{
    if (zero) {
        memset(index, rf_kv_codes[shape->code].offset, shape->span);
        stored = 0;
    }
    pack_span(bits, shape->span, index, (uint8_t *)out + rf_kv_span_at(shape, span));
    rf_kv_put_scale(shape, out, span, stored);
}

/* Thirty-two bits each to bytes. */
RF_INLINE void narrow_8(__m256i index, uint8_t *out)
{
    const __m256i words = _mm256_packus_epi32(index, index);
    const __m256i bytes = _mm256_packus_epi16(words, words);
    const uint32_t low = (uint32_t)_mm256_extract_epi32(bytes, 0);
    const uint32_t high = (uint32_t)_mm256_extract_epi32(bytes, 4);
    memcpy(out, &low, 4);
    memcpy(out + 4, &high, 4);
}

/* ---- encoding with feedback -------------------------------------------------------------- */

/* Eight elements of four rows to four lanes of eight elements. */
RF_INLINE void to_lanes(const float *t, __m128 lanes[8])
{
    for (uint32_t i = 0; i < 8; i += 4) {
        __m128 a = _mm_load_ps(t + i), b = _mm_load_ps(t + RF_KV_BLOCK_MAX + i);
        __m128 c = _mm_load_ps(t + 2 * RF_KV_BLOCK_MAX + i);
        __m128 d = _mm_load_ps(t + 3 * RF_KV_BLOCK_MAX + i);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        lanes[i] = a;
        lanes[i + 1] = b;
        lanes[i + 2] = c;
        lanes[i + 3] = d;
    }
}

/* Elements [at, at + 8) of t, minus eight columns of M times e. */
RF_INLINE void catch_up(float *t, const float *columns, const float *e, uint32_t size, uint32_t at)
{
    __m256 left[LANES];
    for (uint32_t l = 0; l < LANES; l++) {
        left[l] = _mm256_load_ps(t + l * RF_KV_BLOCK_MAX + at);
    }
    for (uint32_t j = 0; j < 8; j++) {
        const __m256 column = _mm256_loadu_ps(columns + (size_t)j * size + at);
        for (uint32_t l = 0; l < LANES; l++) {
            left[l] = _mm256_fnmadd_ps(column, _mm256_broadcast_ss(e + j * LANES + l), left[l]);
        }
    }
    for (uint32_t l = 0; l < LANES; l++) {
        _mm256_store_ps(t + l * RF_KV_BLOCK_MAX + at, left[l]);
    }
}

RF_INLINE void encode_block(const rf_kv_shape *shape, search kind, const float *x, uint32_t block,
                            const rf_kv_feedback *feedback, int32_t base, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const uint32_t size = shape->block, spans = size / shape->span;
    const float *m = feedback->m + (size_t)block * size * size;
    const float *d = feedback->d + (size_t)block * size;
    _Alignas(32) float t[LANES * RF_KV_BLOCK_MAX], e[2][8 * LANES], cost[LANES];
    _Alignas(16) float values[RF_KV_BLOCK_MAX / 8][LANES], inverses[RF_KV_BLOCK_MAX / 8][LANES];
    _Alignas(16) uint32_t stored[RF_KV_BLOCK_MAX / 8][LANES];
    _Alignas(16) uint32_t index[RF_KV_BLOCK_MAX / 4][LANES]; /* four elements in a word */
    choices look;
    load_choices(&look, info, kind);
    for (uint32_t s = 0; s < spans; s++) {
        const float top = largest(x + s * shape->span, shape->span);
        const float first = info->f16_scale ? __builtin_fabsf(top) / 127.0f : top;
        const __m128 wanted = _mm_mul_ps(_mm_set1_ps(first), _mm_loadu_ps(info->key_factors));
        __m128i bits;
        const __m128 value = scales_of(info, wanted, base, &bits);
        _mm_store_ps(values[s], value);
        _mm_store_ps(inverses[s],
                     _mm256_castps256_ps128(inverses_of(kind, _mm256_castps128_ps256(value))));
        _mm_store_si128((__m128i *)stored[s], bits);
    }
    for (uint32_t i = 0; i < size; i += 8) {
        const __m256 eight = _mm256_loadu_ps(x + i);
        for (uint32_t l = 0; l < LANES; l++) {
            _mm256_store_ps(t + l * RF_KV_BLOCK_MAX + i, eight);
        }
    }
    __m128 sum = _mm_setzero_ps();
    for (uint32_t at = 0; at < size; at += 8) {
        const uint32_t s = at / shape->span;
        const __m128 value = _mm_load_ps(values[s]), inverse = _mm_load_ps(inverses[s]);
        const float *columns = m + (size_t)at * size,
                    *before = at > 0 ? columns - (size_t)8 * size : NULL;
        float *now = e[at / 8 % 2];
        const float *last = e[1 - at / 8 % 2]; /* errors of the eight elements before */
        __m128 left[8];
        __m128i word = _mm_setzero_si128();
        if (at > 0) {
            catch_up(t, before, last, size, at);
        }
        to_lanes(t + at, left);
#pragma GCC unroll 8 /* left[] belongs in registers */
        for (uint32_t i = 0; i < 8; i++) {
            __m128 level;
            const __m128i found = nearest_4(info, &look, kind, left[i], inverse, &level);
            const __m128 error = _mm_fmsub_ps(value, level, _mm_broadcast_ss(x + at + i));
#pragma GCC unroll 8
            for (uint32_t k = i + 1; k < 8; k++) {
                left[k] = _mm_fnmadd_ps(_mm_broadcast_ss(columns + (size_t)i * size + at + k),
                                        error, left[k]);
            }
            const __m128 rest = _mm_fnmadd_ps(value, level, left[i]);
            sum = _mm_fmadd_ps(_mm_mul_ps(_mm_broadcast_ss(d + at + i), rest), rest, sum);
            _mm_store_ps(now + i * LANES, error);
            word = i % 4 == 0 ? found : _mm_or_si128(word, _mm_slli_epi32(found, 8 * (i % 4)));
            if (i % 4 == 3) {
                _mm_store_si128((__m128i *)index[(at + i) / 4], word);
            }
            /* While this chain waits: the elements further on, for the eight before. */
            if (at > 0 && at + 8 * i + 8 < size) {
                catch_up(t, before, last, size, at + 8 * i + 8);
            }
        }
    }
    _mm_store_ps(cost, sum);
    uint32_t best = 0;
    for (uint32_t l = 1; l < info->key_count; l++) {
        best = cost[l] < cost[best] ? l : best;
    }
    uint8_t bytes[RF_KV_BLOCK_MAX];
    for (uint32_t i = 0; i < size / 4; i++) {
        memcpy(bytes + 4 * i, &index[i][best], 4);
    }
    for (uint32_t s = 0; s < spans; s++) {
        put_span(shape, info->code_bits, block * spans + s, bytes + s * shape->span,
                 (uint16_t)stored[s][best], values[s][best] == 0, out);
    }
}

/* ---- encoding with a search, and plain --------------------------------------------------- */

RF_INLINE void encode_search(const rf_kv_shape *shape, search kind, uint32_t parts, const float *x,
                             uint32_t span, int32_t base, const choices *look, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const uint32_t trials = kind == LEVELS_16 ? 8 : 4; /* search_count; a fixed loop is faster */
    float inverses[8], gains[8];
    uint32_t stored[8];
    uint8_t index[32];
    __m256 row[4], products[8], squares[8];
    __m256i bits;
    for (uint32_t p = 0; p < parts; p++) {
        row[p] = _mm256_loadu_ps(x + 8 * p);
    }
    const __m256 wanted =
        _mm256_mul_ps(_mm256_set1_ps(largest(x, 8 * parts)), _mm256_loadu_ps(info->search_factors));
    _mm256_storeu_ps(inverses, inverses_of(kind, scale8_of(info, wanted, base, &bits)));
    for (uint32_t f = 0; f < 8; f++) {
        products[f] = squares[f] = _mm256_setzero_ps();
    }
    for (uint32_t f = 0; f < trials; f++) {
        const __m256 inverse = _mm256_broadcast_ss(&inverses[f]);
        for (uint32_t p = 0; p < parts; p++) {
            __m256 level;
            nearest_8(info, look, kind, row[p], inverse, &level);
            products[f] = _mm256_fmadd_ps(level, row[p], products[f]);
            squares[f] = _mm256_fmadd_ps(level, level, squares[f]);
        }
    }
    const __m256 a = rf_add_each_of_8(products), b = rf_add_each_of_8(squares);
    const __m256 refit = _mm256_mul_ps(_mm256_div_ps(a, b), _mm256_set1_ps(info->units));
    const __m256 value = scale8_of(info, refit, base, &bits);
    _mm256_storeu_ps(gains, _mm256_mul_ps(value, _mm256_fnmadd_ps(value, b, _mm256_add_ps(a, a))));
    rf_store_256(stored, bits);
    float top = 0;
    uint32_t best = 0;
    for (uint32_t f = 0; f < trials; f++) {
        const bool better = gains[f] > top;
        top = better ? gains[f] : top;
        best = better ? f : best;
    }
    const __m256 inverse = _mm256_broadcast_ss(&inverses[best]);
    for (uint32_t p = 0; p < parts; p++) {
        __m256 level;
        narrow_8(nearest_8(info, look, kind, row[p], inverse, &level), index + 8 * p);
    }
    put_span(shape, info->code_bits, span, index, (uint16_t)stored[best], !(top > 0), out);
}

/* r8, q8_0, q4_0. */
static void encode_plain(const rf_kv_shape *shape, const float *x, uint32_t span, void *out)
{
    const rf_kv_code code = shape->code;
    const rf_kv_code_info *info = &rf_kv_codes[code];
    const float top = largest(x, shape->span);
    const float first = code == RF_KV_CODE_Q4_0 ? top / -8.0f : __builtin_fabsf(top) / 127.0f;
    const float wanted = rf_kv_clamp(first, -RF_KV_F16_MAX, RF_KV_F16_MAX);
    __m128i stored;
    const float value = _mm_cvtss_f32(scales_of(info, _mm_set1_ps(wanted), 0, &stored));
    const __m256 inverse = _mm256_set1_ps(1.0f / (code == RF_KV_CODE_R8 ? value : wanted));
    uint8_t index[RF_KV_BLOCK_MAX];
    for (uint32_t i = 0; i < shape->span; i += 8) {
        const __m256 eight = _mm256_loadu_ps(x + i);
        __m256 level;
        if (code == RF_KV_CODE_Q4_0) {
            level = _mm256_add_ps(_mm256_mul_ps(eight, inverse), _mm256_set1_ps(8.5f));
            level = _mm256_max_ps(level, _mm256_setzero_ps());
            level = _mm256_min_ps(level, _mm256_set1_ps(15.0f));
            narrow_8(_mm256_cvttps_epi32(level), index + i);
        } else {
            narrow_8(nearest_8(info, NULL, UNIFORM, eight, inverse, &level), index + i);
        }
    }
    put_span(shape, info->code_bits, span, index, (uint16_t)_mm_cvtsi128_si32(stored), value == 0,
             out);
}

/* turbo4, turbo3, turbo2. */
RF_INLINE void encode_polar(const rf_kv_shape *shape, const float *x, uint32_t span,
                            const choices *look, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    uint8_t index[RF_KV_SPAN_MAX];
    __m256d sums = _mm256_setzero_pd();
    __m256 squares = _mm256_setzero_ps(); /* exact: below 2^24 */
    for (uint32_t i = 0; i < shape->span; i += 4) {
        const __m256d four = _mm256_cvtps_pd(_mm_loadu_ps(x + i));
        sums = _mm256_add_pd(sums, _mm256_mul_pd(four, four));
    }
    const __m128d two = _mm_add_pd(_mm256_castpd256_pd128(sums), _mm256_extractf128_pd(sums, 1));
    const double sum = _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
    const __m256 inverse = _mm256_set1_ps(rf_kv_polar_inverse(sum, shape->span));
    for (uint32_t i = 0; i < shape->span; i += 8) {
        __m256 level;
        narrow_8(nearest_8(info, look, LEVELS_16, _mm256_loadu_ps(x + i), inverse, &level),
                 index + i);
        squares = _mm256_fmadd_ps(level, level, squares);
    }
    float eight[8];
    _mm256_storeu_ps(eight, squares);
    const rf_kv_scale scale = rf_kv_polar_scale(shape, sum, (uint32_t)rf_sum_lanes_8(eight));
    if (shape->span < 64) {
        put_span(shape, info->code_bits, span, index, scale.stored, scale.value == 0, out);
        return;
    }
    if (scale.value == 0) {
        memset(index, 0, sizeof index);
    }
    pack_long(info->code_bits, shape->span, index, (uint8_t *)out + rf_kv_span_at(shape, span));
    rf_kv_put_scale(shape, out, span, scale.stored);
}

static void encode_polars(const rf_kv_shape *shape, const float *row, void *out)
{
    choices look;
    load_choices(&look, &rf_kv_codes[shape->code], LEVELS_16);
    for (uint32_t s = 0; s < shape->span_count; s++) {
        encode_polar(shape, row + (size_t)s * shape->span, s, &look, out);
    }
}

RF_INLINE void encode_blocks(const rf_kv_shape *shape, search kind, const float *row,
                             const rf_kv_feedback *feedback, int32_t base, void *out)
{
    for (uint32_t b = 0; b < shape->width / shape->block; b++) {
        encode_block(shape, kind, row + (size_t)b * shape->block, b, feedback, base, out);
    }
}

RF_INLINE void encode_spans(const rf_kv_shape *shape, search kind, const float *row, int32_t base,
                            void *out)
{
    choices look;
    load_choices(&look, &rf_kv_codes[shape->code], kind);
    for (uint32_t s = 0; s < shape->span_count; s++) {
        const float *x = row + (size_t)s * shape->span;
        if (shape->span == 32) {
            encode_search(shape, kind, 4, x, s, base, &look, out);
        } else {
            encode_search(shape, kind, shape->span / 8, x, s, base, &look, out);
        }
    }
}

static void encode_avx2(const rf_kv_shape *shape, const float *row, const rf_kv_feedback *feedback,
                        int32_t base, void *out)
{
    const rf_kv_code_info *info = &rf_kv_codes[shape->code];
    const search kind = !info->levels                  ? UNIFORM
                        : shape->code == RF_KV_CODE_R5 ? LEVELS_32
                                                       : LEVELS_16;
    if (info->wide) {
        rf_kv_encode_scalar(shape, row, feedback, base, out);
    } else if (info->bounds) {
        encode_polars(shape, row, out);
    } else if (feedback && info->key_count > 0) {
        switch (kind) {
        case UNIFORM:
            encode_blocks(shape, UNIFORM, row, feedback, base, out);
            break;
        case LEVELS_16:
            encode_blocks(shape, LEVELS_16, row, feedback, base, out);
            break;
        case LEVELS_32:
            encode_blocks(shape, LEVELS_32, row, feedback, base, out);
            break;
        }
    } else if (info->search_count > 0) {
        switch (kind) {
        case UNIFORM:
            encode_spans(shape, UNIFORM, row, base, out);
            break;
        case LEVELS_16:
            encode_spans(shape, LEVELS_16, row, base, out);
            break;
        case LEVELS_32:
            encode_spans(shape, LEVELS_32, row, base, out);
            break;
        }
    } else {
        for (uint32_t s = 0; s < shape->span_count; s++) {
            encode_plain(shape, row + (size_t)s * shape->span, s, out);
        }
    }
}

/* ---- query and table --------------------------------------------------------------------- */

static void query_avx2(const float *q, uint32_t width, int16_t *codes, float *scale)
{
    const __m256i magnitude = _mm256_set1_epi32(INT32_MAX);
    __m256i top = _mm256_setzero_si256(); /* as integers, as the scalar entry */
    for (uint32_t i = 0; i < width; i += 8) {
        top = _mm256_max_epu32(top, _mm256_and_si256(rf_load_256(q + i), magnitude));
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(top), _mm256_extracti128_si256(top, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4E));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0xB1));
    const rf_act_scale found = rf_act_scale_of((uint32_t)_mm_cvtsi128_si32(four), RF_ACT_LIMIT_32);
    *scale = found.scale;
    if (found.inverse == 0.0f) {
        memset(codes, 0, width * sizeof *codes);
        return;
    }
    for (uint32_t i = 0; i < width; i += 8) {
        const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(q + i), _mm256_set1_ps(found.inverse));
        const __m256i rounded = _mm256_cvtps_epi32(product);
        const __m128i eight =
            _mm_packs_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
        _mm_storeu_si128((__m128i *)(codes + i), eight);
    }
}

void rf_kv_kernels_avx2(rf_kv_kernels *kernels)
{
    static const rf_kernel_entry entry = {RF_CPU_AVX2, "kv_codec_avx2.c"};
    kernels->rotate = rotate_avx2;
    kernels->turn_back = turn_back_avx2;
    kernels->encode = encode_avx2;
    kernels->expand = rf_kv_expand_avx2;
    kernels->query = query_avx2;
    kernels->entry = entry;
}
