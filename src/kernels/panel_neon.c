/* kernels/panel_neon.c: eight rows of a quantised format, and two tokens of packed activations, as
 * smmla reads them: eight k of one row (token), then eight k of the next.
 *
 *   rows in the file    r0: k0 k1 k2 ...      r1: k0 k1 ...
 *   a pair of rows      [k0 .. k7 of r0][k0 .. k7 of r1]   [k8 .. k15 of r0][k8 .. k15 of r1] ...
 *
 * One smmla is then 2 tokens x 2 rows x 8 k. Sub-block scales stay apart, as integers: with them
 * folded in, codes would not be bytes.
 */
#include "kernels/codes_neon.h"

bool rf_shape_of(rf_format format, rf_shape *shape)
{
    const rf_quant *quant = rf_quant_of(format);
    if (!quant) {
        return false;
    }
    *shape = (rf_shape){.quant = quant, .folds = quant->block / quant->fold};
    switch (format) {
    case RF_Q4_0:
    case RF_Q4_1:
    case RF_Q5_0:
    case RF_Q5_1:
    case RF_Q8_0:
    case RF_IQ4_NL:
        shape->kind = RF_SHAPE_PLAIN;
        return true;
    case RF_Q4_K:
    case RF_Q5_K:
    case RF_IQ4_XS:
    case RF_TQ1_0:
    case RF_TQ2_0:
        shape->kind = RF_SHAPE_SUB32;
        shape->min_steps = quant->min_step != 0 ? 1 : 0;
        return true;
    case RF_Q2_K:
    case RF_Q3_K:
    case RF_Q6_K:
        shape->kind = RF_SHAPE_SUB16;
        shape->min_steps = format == RF_Q2_K ? 2 : 0;
        return true;
    default:
        return false;
    }
}

static uint32_t sub_blocks(const rf_shape *shape, uint32_t k)
{
    return shape->kind == RF_SHAPE_PLAIN ? 0 : shape->kind == RF_SHAPE_SUB32 ? k / 32 : k / 16;
}

/* Bytes for each k of eight rows: codes 8, scales 64 / 16, and in blocks of 32 (256) two floats of
 * 64 / 32 (64 / 256), minimums 64 / 128: at most 13, so 52 with RF_EIGHTS. Of a pair: codes 4,
 * multipliers 16 / 32, floats twice 16 / 32: at most 5, so 20 with RF_PAIRS. Together below the 80
 * of rf_matmul_scratch_bytes. */
uint8_t *rf_place_rows(rf_eight_rows *rows, const rf_shape *shape, uint32_t k, uint8_t *at)
{
    const size_t blocks = k / shape->quant->block;
    rows->codes = (int8_t *)at;
    at += (size_t)k * 8;
    rows->scale = (int32_t *)(void *)at;
    at += (size_t)sub_blocks(shape, k) * 64;
    rows->d = (float *)(void *)at;
    at += blocks * 64;
    rows->min_d = (float *)(void *)at;
    at += shape->quant->min_step != 0 ? blocks * 64 : 0;
    rows->mins = (int8_t *)at;
    return at + blocks * shape->folds * shape->min_steps * 64;
}

uint8_t *rf_place_pair(rf_pair *pair, const rf_shape *shape, const rf_act_layout *layout,
                       uint8_t *at)
{
    const size_t blocks = layout->k / layout->block;
    pair->codes = at;
    at += (size_t)layout->k * (layout->act == RF_ACT_INT8 ? 2 : 4);
    pair->multiplier = (int32_t *)(void *)at;
    at += layout->act == RF_ACT_INT8 && shape->kind != RF_SHAPE_PLAIN ? layout->k / 2 : 0;
    pair->scale = (float *)(void *)at;
    at += blocks * 16;
    pair->sums = (float *)(void *)at;
    at += shape->kind == RF_SHAPE_PLAIN && shape->quant->min_step != 0 ? blocks * 16 : 0;
    pair->sum_bytes = at;
    return at + blocks * shape->min_steps * 48;
}

/* ---- rows -------------------------------------------------------------------------------- */

/* 32 k of two rows; steps of eight k are 64 bytes apart. */
RF_INLINE void store_rows(int8_t *out, rf_codes32 first, rf_codes32 second)
{
    const int64x2_t a = vreinterpretq_s64_s8(first.a), b = vreinterpretq_s64_s8(first.b);
    const int64x2_t c = vreinterpretq_s64_s8(second.a), d = vreinterpretq_s64_s8(second.b);
    vst1q_s8(out, vreinterpretq_s8_s64(vtrn1q_s64(a, c)));
    vst1q_s8(out + 64, vreinterpretq_s8_s64(vtrn2q_s64(a, c)));
    vst1q_s8(out + 128, vreinterpretq_s8_s64(vtrn1q_s64(b, d)));
    vst1q_s8(out + 192, vreinterpretq_s8_s64(vtrn2q_s64(b, d)));
}

/* One float of each of two rows. */
RF_INLINE void store_floats(float *out, float first, float second)
{
    const float32x2_t both = vset_lane_f32(second, vdup_n_f32(first), 1);
    vst1q_f32(out, vcombine_f32(both, both));
}

/* Four integers of each of two rows, to where their sub-blocks begin. */
RF_INLINE void store_four_scales(int32_t *out, int32x4_t first, int32x4_t second)
{
    const int64x2_t low = vreinterpretq_s64_s32(vzip1q_s32(first, second));
    const int64x2_t high = vreinterpretq_s64_s32(vzip2q_s32(first, second));
    vst1q_s32(out, vreinterpretq_s32_s64(vtrn1q_s64(low, low)));
    vst1q_s32(out + 16, vreinterpretq_s32_s64(vtrn2q_s64(low, low)));
    vst1q_s32(out + 32, vreinterpretq_s32_s64(vtrn1q_s64(high, high)));
    vst1q_s32(out + 48, vreinterpretq_s32_s64(vtrn2q_s64(high, high)));
}

RF_INLINE void store_eight_scales(int32_t *out, int8x8_t first, int8x8_t second)
{
    const int16x8_t a = vmovl_s8(first), b = vmovl_s8(second);
    store_four_scales(out, vmovl_s16(vget_low_s16(a)), vmovl_s16(vget_low_s16(b)));
    store_four_scales(out + 64, vmovl_high_s16(a), vmovl_high_s16(b));
}

/* The minimums of a block: an eight of each row for each fold and step. Folds of 128 see the half
 * that is theirs. */
RF_INLINE void store_mins(int8_t *out, const rf_shape *shape, int8x16_t first, int8x16_t second)
{
    const int8x16_t low = vcombine_s8(vget_low_s8(first), vget_low_s8(second));
    if (shape->folds == 2) {
        const uint64x2_t half = vdupq_n_u64(0xFFFFFFFF);
        const int8x16_t mask = vreinterpretq_s8_u64(half);
        vst1q_s8(out, vandq_s8(low, mask));
        vst1q_s8(out + 64, vbicq_s8(low, mask));
        return;
    }
    vst1q_s8(out, low);
    if (shape->min_steps == 2) {
        vst1q_s8(out + 64, vcombine_s8(vget_high_s8(first), vget_high_s8(second)));
    }
}

/* Two rows in blocks of 32; out and the others begin at the pair. */
RF_INLINE void fill_plain(const rf_eight_rows *out, rf_format format, uint32_t pair,
                          const uint8_t *first, const uint8_t *second, uint32_t k)
{
    const uint32_t bytes = rf_quant_of(format)->block_bytes;
    const bool mins = format == RF_Q4_1 || format == RF_Q5_1;
    for (size_t b = 0; b < k / 32; b++, first += bytes, second += bytes) {
        store_rows(out->codes + b * 256 + pair * 16, rf_codes_block_32(format, first),
                   rf_codes_block_32(format, second));
        store_floats(out->d + b * 16 + pair * 4, rf_load_f16_neon(first), rf_load_f16_neon(second));
        if (mins) {
            store_floats(out->min_d + b * 16 + pair * 4, rf_load_f16_neon(first + 2),
                         rf_load_f16_neon(second + 2));
        }
    }
}

/* Two rows in blocks of 256. */
RF_INLINE void fill_subs(const rf_eight_rows *out, const rf_shape *shape, rf_format format,
                         uint32_t pair, const uint8_t *first, const uint8_t *second, uint32_t k)
{
    const uint32_t bytes = shape->quant->block_bytes;
    const uint32_t subs = rf_sub_blocks_of_32(format) ? 8 : 16;
    const size_t d = rf_scale_at(format);
    for (size_t b = 0; b < k / 256; b++, first += bytes, second += bytes) {
        const rf_subs s = rf_subs_of(format, first), t = rf_subs_of(format, second);
        int8_t *codes = out->codes + b * 2048 + pair * 16;
        RF_UNROLL for (int j = 0; j < 8; j++)
        {
            store_rows(codes + j * 256, rf_codes_block_256(format, first, j),
                       rf_codes_block_256(format, second, j));
        }
        int32_t *scale = out->scale + b * subs * 16 + pair * 4;
        store_eight_scales(scale, vget_low_s8(s.scale), vget_low_s8(t.scale));
        if (subs == 16) {
            store_eight_scales(scale + 128, vget_high_s8(s.scale), vget_high_s8(t.scale));
        }
        store_floats(out->d + b * 16 + pair * 4, rf_load_f16_neon(first + d),
                     rf_load_f16_neon(second + d));
        if (shape->min_steps != 0) {
            store_floats(out->min_d + b * 16 + pair * 4, -rf_load_f16_neon(first + d + 2),
                         -rf_load_f16_neon(second + d + 2));
            store_mins(out->mins + b * shape->folds * shape->min_steps * 64 + pair * 16, shape,
                       s.min, t.min);
        }
    }
}

void rf_fill_rows(const rf_eight_rows *rows, const rf_shape *shape, const rf_matmul *job,
                  uint32_t row, uint32_t last)
{
    for (uint32_t pair = 0; pair < 4; pair++) {
        const uint32_t r = RF_MIN(row + 2 * pair, last - 1), s = RF_MIN(r + 1, last - 1);
        const uint8_t *first = job->weight + r * job->weight_row_bytes;
        const uint8_t *second = job->weight + s * job->weight_row_bytes;
        switch (job->format) { /* each case is the loop above with its format's codes inlined */
        case RF_Q4_0:
            fill_plain(rows, RF_Q4_0, pair, first, second, job->k);
            break;
        case RF_Q4_1:
            fill_plain(rows, RF_Q4_1, pair, first, second, job->k);
            break;
        case RF_Q5_0:
            fill_plain(rows, RF_Q5_0, pair, first, second, job->k);
            break;
        case RF_Q5_1:
            fill_plain(rows, RF_Q5_1, pair, first, second, job->k);
            break;
        case RF_Q8_0:
            fill_plain(rows, RF_Q8_0, pair, first, second, job->k);
            break;
        case RF_IQ4_NL:
            fill_plain(rows, RF_IQ4_NL, pair, first, second, job->k);
            break;
        case RF_Q2_K:
            fill_subs(rows, shape, RF_Q2_K, pair, first, second, job->k);
            break;
        case RF_Q3_K:
            fill_subs(rows, shape, RF_Q3_K, pair, first, second, job->k);
            break;
        case RF_Q4_K:
            fill_subs(rows, shape, RF_Q4_K, pair, first, second, job->k);
            break;
        case RF_Q5_K:
            fill_subs(rows, shape, RF_Q5_K, pair, first, second, job->k);
            break;
        case RF_Q6_K:
            fill_subs(rows, shape, RF_Q6_K, pair, first, second, job->k);
            break;
        case RF_IQ4_XS:
            fill_subs(rows, shape, RF_IQ4_XS, pair, first, second, job->k);
            break;
        case RF_TQ1_0:
            fill_subs(rows, shape, RF_TQ1_0, pair, first, second, job->k);
            break;
        case RF_TQ2_0:
            fill_subs(rows, shape, RF_TQ2_0, pair, first, second, job->k);
            break;
        default:
            break;
        }
    }
}

/* ---- tokens ------------------------------------------------------------------------------ */

/* Sixteen k of two tokens. */
RF_INLINE void store_pair(uint8_t *out, uint8x16_t t, uint8x16_t u)
{
    const uint64x2_t a = vreinterpretq_u64_u8(t), b = vreinterpretq_u64_u8(u);
    vst1q_u8(out, vreinterpretq_u8_u64(vtrn1q_u64(a, b)));
    vst1q_u8(out + 16, vreinterpretq_u8_u64(vtrn2q_u64(a, b)));
}

static void pair_codes_8(uint8_t *out, const uint8_t *t, const uint8_t *u, uint32_t k)
{
    for (size_t i = 0; i < k; i += 16) {
        store_pair(out + 2 * i, vld1q_u8(t + i), vld1q_u8(u + i));
    }
}

static void pair_codes_16(uint8_t *out, const uint8_t *t, const uint8_t *u, uint32_t k)
{
    for (size_t i = 0; i < k; i += 16) {
        const uint8x16x2_t a = vld2q_u8(t + 2 * i), b = vld2q_u8(u + 2 * i);
        store_pair(out + 4 * i, a.val[1], b.val[1]);
        store_pair(out + 4 * i + 32, a.val[0], b.val[0]);
    }
}

/* Four values of each of two tokens, floats or integers alike. */
RF_INLINE void store_four(void *out, uint32x4_t t, uint32x4_t u)
{
    uint8_t *bytes = out;
    const uint64x2_t a = vreinterpretq_u64_u32(vzip1q_u32(t, t));
    const uint64x2_t b = vreinterpretq_u64_u32(vzip2q_u32(t, t));
    const uint64x2_t c = vreinterpretq_u64_u32(vzip1q_u32(u, u));
    const uint64x2_t d = vreinterpretq_u64_u32(vzip2q_u32(u, u));
    vst1q_u8(bytes, vreinterpretq_u8_u64(vtrn1q_u64(a, c)));
    vst1q_u8(bytes + 16, vreinterpretq_u8_u64(vtrn2q_u64(a, c)));
    vst1q_u8(bytes + 32, vreinterpretq_u8_u64(vtrn1q_u64(b, d)));
    vst1q_u8(bytes + 48, vreinterpretq_u8_u64(vtrn2q_u64(b, d)));
}

RF_INLINE void store_four_floats(float *out, float32x4_t t, float32x4_t u)
{
    store_four(out, vreinterpretq_u32_f32(t), vreinterpretq_u32_f32(u));
}

RF_INLINE void store_four_i16(int32_t *out, int16x4_t t, int16x4_t u)
{
    store_four(out, vreinterpretq_u32_s32(vmovl_s16(t)), vreinterpretq_u32_s32(vmovl_s16(u)));
}

RF_INLINE void store_one(float *out, float t, float u)
{
    vst1q_f32(out, vcombine_f32(vdup_n_f32(t), vdup_n_f32(u)));
}

static void pair_scales(float *out, const float *t, const float *u, uint32_t blocks)
{
    uint32_t b = 0;
    for (; b + 4 <= blocks; b += 4) {
        store_four_floats(out + 4 * b, vld1q_f32(t + b), vld1q_f32(u + b));
    }
    for (; b < blocks; b++) {
        store_one(out + 4 * b, t[b], u[b]);
    }
}

/* Multipliers of blocks of 256: eight at a time. */
static void pair_multipliers(int32_t *out, const int16_t *m, const int16_t *n, uint32_t count)
{
    for (uint32_t i = 0; i < count; i += 8, out += 32) {
        const int16x8_t t = vld1q_s16(m + i), u = vld1q_s16(n + i);
        store_four_i16(out, vget_low_s16(t), vget_low_s16(u));
        store_four_i16(out + 16, vget_high_s16(t), vget_high_s16(u));
    }
}

/* Eight sums of each of two tokens, by bytes. */
RF_INLINE void store_sum_bytes(uint8_t *out, int32x4_t t0, int32x4_t t1, int32x4_t u0, int32x4_t u1)
{
    const uint16x8_t a = vreinterpretq_u16_s32(t0), b = vreinterpretq_u16_s32(t1);
    const uint16x8_t c = vreinterpretq_u16_s32(u0), d = vreinterpretq_u16_s32(u1);
    const uint16x8_t t = vuzp1q_u16(a, b), u = vuzp1q_u16(c, d);
    vst1q_u8(out, vcombine_u8(vmovn_u16(t), vmovn_u16(u)));
    vst1q_u8(out + 16, vcombine_u8(vshrn_n_u16(t, 8), vshrn_n_u16(u, 8)));
    vst1q_u8(out + 32, vcombine_u8(vmovn_u16(vuzp2q_u16(a, b)), vmovn_u16(vuzp2q_u16(c, d))));
}

/* Four sums of 32 from eight of 16. */
RF_INLINE int32x4_t sums_of_32(const int32_t *sums)
{
    return vpaddq_s32(vld1q_s32(sums), vld1q_s32(sums + 4));
}

/* Of blocks of 32, as the floats they become. */
static void pair_sums_32(float *out, const int32_t *t, const int32_t *u, uint32_t blocks)
{
    uint32_t b = 0;
    for (; b + 4 <= blocks; b += 4) {
        store_four_floats(out + 4 * b, vcvtq_f32_s32(sums_of_32(t + 2 * b)),
                          vcvtq_f32_s32(sums_of_32(u + 2 * b)));
    }
    for (; b < blocks; b++) {
        store_one(out + 4 * b, (float)(t[2 * b] + t[2 * b + 1]), (float)(u[2 * b] + u[2 * b + 1]));
    }
}

static void pair_sums_256(uint8_t *out, const int32_t *t, const int32_t *u, uint32_t blocks,
                          uint32_t steps)
{
    for (uint32_t b = 0; b < blocks; b++, t += 16, u += 16, out += (size_t)steps * 48) {
        if (steps == 1) {
            store_sum_bytes(out, sums_of_32(t), sums_of_32(t + 8), sums_of_32(u),
                            sums_of_32(u + 8));
        } else {
            store_sum_bytes(out, vld1q_s32(t), vld1q_s32(t + 4), vld1q_s32(u), vld1q_s32(u + 4));
            store_sum_bytes(out + 48, vld1q_s32(t + 8), vld1q_s32(t + 12), vld1q_s32(u + 8),
                            vld1q_s32(u + 12));
        }
    }
}

void rf_fill_pair(const rf_pair *pair, const rf_shape *shape, const rf_matmul *job, uint32_t t,
                  uint32_t u)
{
    const uint8_t *first = rf_matmul_act(job, t), *second = rf_matmul_act(job, u);
    const rf_act_layout *layout = &job->layout;
    const uint32_t k = job->k, blocks = k / layout->block;
    const float *scale = rf_act_scales(first, layout), *scale_u = rf_act_scales(second, layout);
    const int32_t *sums = rf_act_sums(first, layout), *sums_u = rf_act_sums(second, layout);
    if (layout->act == RF_ACT_INT16) {
        pair_codes_16(pair->codes, first, second, k);
    } else {
        pair_codes_8(pair->codes, first, second, k);
    }
    pair_scales(pair->scale, scale, scale_u, blocks);
    if (layout->act == RF_ACT_INT8 && shape->kind != RF_SHAPE_PLAIN) {
        pair_multipliers(pair->multiplier, rf_act_multipliers(first, layout),
                         rf_act_multipliers(second, layout), k / 32);
    }
    if (shape->min_steps != 0) {
        pair_sums_256(pair->sum_bytes, sums, sums_u, blocks, shape->min_steps);
    } else if (shape->quant->min_step != 0) {
        pair_sums_32(pair->sums, sums, sums_u, blocks);
    }
}
