/* kernels/dot_neon.c: rows of quantised weights times one or two tokens, straight from the packed
 * bytes.
 *
 * A row is walked in chunks of eight folds, which meet the eight lanes of kernels.h in two fma:
 * each fold leaves a vector of four partial integers, and four such vectors become one of four fold
 * sums by pairwise additions. Codes are signed bytes; int16 activations are their two bytes, the
 * high one signed (sdot) and the low one unsigned (usdot). The last chunk of a row may be short:
 * its missing folds are zeros with a scale of zero.
 */
#include "kernels/codes_neon.h"

/* Packed bytes are asked for this far ahead; 4 to 8 KB are what other processors liked best. */
#define PREFETCH_BYTES 6144u

/* One token, and what every row needs of it; what the packed token lacks is in the scratch. */
typedef struct input {
    const int8_t *high;         /* the signed bytes: all of an int8, the high byte of an int16 */
    const uint8_t *low;         /* int16 */
    const int16_t *multipliers; /* int8, blocks of 256 */
    const int32_t *sums;        /* of each 16 */
    int32_t *sums_32;           /* of each 32, and zeros for a chunk's end */
    float *fold_scale;          /* of each fold, and zeros for a chunk's end */
} input;

/* One format; constants where it is used. */
typedef struct shape {
    rf_format format;
    uint32_t bytes, fold, per_block; /* of a block; folds of one */
    bool mins;
} shape;

/* The folds of a chunk for one token: partial sums, and those of the minimums. */
typedef struct chunk {
    int32x4_t sum[8], min[8];
} chunk;

/* Weight scales of the folds of a chunk. */
typedef struct scales8 {
    float32x4_t low, high;
} scales8;

RF_INLINE int32x4_t dot_16(int8x16_t code, const input *in, size_t k, rf_act act)
{
    int32x4_t sum = vdotq_s32(vdupq_n_s32(0), code, vld1q_s8(in->high + k));
    if (act == RF_ACT_INT16) {
        sum = vusdotq_s32(vshlq_n_s32(sum, 8), vld1q_u8(in->low + k), code);
    }
    return sum;
}

RF_INLINE int32x4_t dot_32(rf_codes32 code, const input *in, size_t k, rf_act act)
{
    int32x4_t sum = vdotq_s32(vdupq_n_s32(0), code.a, vld1q_s8(in->high + k));
    sum = vdotq_s32(sum, code.b, vld1q_s8(in->high + k + 16));
    if (act == RF_ACT_INT16) {
        sum = vusdotq_s32(vshlq_n_s32(sum, 8), vld1q_u8(in->low + k), code.a);
        sum = vusdotq_s32(sum, vld1q_u8(in->low + k + 16), code.b);
    }
    return sum;
}

/* ---- blocks of 32 ------------------------------------------------------------------------ */

/* What the codes of a chunk are too high by: they stay unsigned here. */
RF_INLINE int32_t offset_of(rf_format format)
{
    return format == RF_Q4_0 ? 8 : format == RF_Q5_0 ? 16 : 0;
}

RF_INLINE rf_codes32 unsigned_codes(rf_format format, const uint8_t *block)
{
    return format == RF_Q4_0   ? rf_nibbles_neon(block + 2, 0)
           : format == RF_Q5_0 ? rf_fives_neon(block + 2, block + 6, 0)
                               : rf_codes_block_32(format, block);
}

RF_INLINE void plain_fold(rf_format format, const uint8_t *block, const input *in, size_t k,
                          rf_act act, uint32_t tokens, uint32_t fold, chunk out[2])
{
    const rf_codes32 code = unsigned_codes(format, block);
    for (uint32_t t = 0; t < tokens; t++) {
        out[t].sum[fold] = dot_32(code, &in[t], k, act);
    }
}

/* ---- blocks of 256 ----------------------------------------------------------------------- */

RF_INLINE int32x4_t add_times_lane(int32x4_t acc, int32x4_t sum, int32x4_t scales, int lane)
{
    switch (lane) {
    case 0:
        return vmlaq_laneq_s32(acc, sum, scales, 0);
    case 1:
        return vmlaq_laneq_s32(acc, sum, scales, 1);
    case 2:
        return vmlaq_laneq_s32(acc, sum, scales, 2);
    default:
        return vmlaq_laneq_s32(acc, sum, scales, 3);
    }
}

/* Sixteen bytes as integers. */
RF_INLINE void widen(int8x16_t v, int32x4_t out[4])
{
    const int16x8_t a = vmovl_s8(vget_low_s8(v)), b = vmovl_high_s8(v);
    out[0] = vmovl_s16(vget_low_s16(a));
    out[1] = vmovl_high_s16(a);
    out[2] = vmovl_s16(vget_low_s16(b));
    out[3] = vmovl_high_s16(b);
}

/* The scales of a block's sub-blocks of 32 (16), times the multipliers of int8: 16 bits hold
 * 128 * 63. */
RF_INLINE void scales_of(int8x16_t scale, const input *in, size_t k, rf_act act, bool sub32,
                         int32x4_t out[4])
{
    if (act == RF_ACT_INT16) {
        widen(scale, out);
        return;
    }
    const int16x8_t m = vld1q_s16(in->multipliers + k / 32);
    const int16x8_t a = vmulq_s16(vmovl_s8(vget_low_s8(scale)), sub32 ? m : vzip1q_s16(m, m));
    out[0] = vmovl_s16(vget_low_s16(a));
    out[1] = vmovl_high_s16(a);
    if (!sub32) {
        const int16x8_t b = vmulq_s16(vmovl_high_s8(scale), vzip2q_s16(m, m));
        out[2] = vmovl_s16(vget_low_s16(b));
        out[3] = vmovl_high_s16(b);
    }
}

/* The minimums of a block times the sums of activations; in folds of 128 each half is one's own. */
RF_INLINE void min_folds(rf_format format, int8x16_t mins, const input *in, size_t k, uint32_t fold,
                         chunk *out)
{
    int32x4_t min[4];
    widen(mins, min);
    if (format == RF_Q2_K) {
        int32x4_t sum = vmulq_s32(min[0], vld1q_s32(in->sums + k / 16));
        for (int i = 1; i < 4; i++) {
            sum = vmlaq_s32(sum, min[i], vld1q_s32(in->sums + k / 16 + 4 * i));
        }
        out->min[fold] = sum;
        return;
    }
    const int32x4_t low = vmulq_s32(min[0], vld1q_s32(in->sums_32 + k / 32));
    const int32x4_t sums = vld1q_s32(in->sums_32 + k / 32 + 4);
    if (format == RF_Q4_K) {
        out->min[fold] = vmlaq_s32(low, min[1], sums);
    } else {
        out->min[fold] = low;
        out->min[fold + 1] = vmulq_s32(min[1], sums);
    }
}

RF_INLINE void sub_folds(rf_format format, const uint8_t *block, const input *in, size_t k,
                         rf_act act, uint32_t tokens, uint32_t fold, chunk out[2])
{
    const bool sub32 = rf_sub_blocks_of_32(format);
    const bool mins = format == RF_Q2_K || format == RF_Q4_K || format == RF_Q5_K;
    const int folds = format == RF_Q5_K ? 2 : format == RF_Q6_K || format == RF_IQ4_XS ? 4 : 1;
    const rf_subs subs = rf_subs_of(format, block);
    int32x4_t scale[2][4], acc[2];
    for (uint32_t t = 0; t < tokens; t++) {
        scales_of(subs.scale, &in[t], k, act, sub32, scale[t]);
        if (mins) {
            min_folds(format, subs.min, &in[t], k, fold, &out[t]);
        }
    }
    RF_UNROLL
    for (int j = 0; j < 8; j++) {
        const rf_codes32 code = rf_codes_block_256(format, block, j);
        for (uint32_t t = 0; t < tokens; t++) {
            const size_t at = k + 32 * (size_t)j;
            acc[t] = j % (8 / folds) == 0 ? vdupq_n_s32(0) : acc[t];
            if (sub32) {
                acc[t] =
                    add_times_lane(acc[t], dot_32(code, &in[t], at, act), scale[t][j / 4], j % 4);
            } else {
                acc[t] = add_times_lane(acc[t], dot_16(code.a, &in[t], at, act), scale[t][j / 2],
                                        j % 2 * 2);
                acc[t] = add_times_lane(acc[t], dot_16(code.b, &in[t], at + 16, act),
                                        scale[t][j / 2], j % 2 * 2 + 1);
            }
            out[t].sum[fold + (uint32_t)(j * folds / 8)] = acc[t];
        }
    }
}

/* ---- chunks ------------------------------------------------------------------------------ */

RF_INLINE int32x4_t sum_each_of_4(const int32x4_t v[4])
{
    return vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
}

RF_INLINE scales8 scales_of_halves(uint16x8_t halves)
{
    const float16x8_t f = vreinterpretq_f16_u16(halves);
    return (scales8){vcvt_f32_f16(vget_low_f16(f)), vcvt_high_f32_f16(f)};
}

/* Those of a chunk with count < 8 folds: once a row, and not worth its code in every format. */
static __attribute__((noinline)) scales8 few_scales(const uint8_t *p, uint32_t bytes,
                                                    uint32_t per_block, uint32_t count)
{
    uint16_t halves[8] = {0};
    for (uint32_t i = 0; i < count; i++) {
        halves[i] = rf_load_u16(p + (size_t)(i / per_block) * bytes);
    }
    return scales_of_halves(vld1q_u16(halves));
}

/* Halves of a chunk's folds, per_block of which share one; bytes from block to block. */
RF_INLINE scales8 load_scales(const uint8_t *p, uint32_t bytes, uint32_t per_block, uint32_t count)
{
    if (count < 8) {
        return few_scales(p, bytes, per_block, count);
    }
    uint16x8_t h = vdupq_n_u16(0);
    h = vsetq_lane_u16(rf_load_u16(p), h, 0);
    h = vsetq_lane_u16(rf_load_u16(p + 1 / per_block * bytes), h, 1);
    h = vsetq_lane_u16(rf_load_u16(p + 2 / per_block * bytes), h, 2);
    h = vsetq_lane_u16(rf_load_u16(p + 3 / per_block * bytes), h, 3);
    h = vsetq_lane_u16(rf_load_u16(p + 4 / per_block * bytes), h, 4);
    h = vsetq_lane_u16(rf_load_u16(p + 5 / per_block * bytes), h, 5);
    h = vsetq_lane_u16(rf_load_u16(p + 6 / per_block * bytes), h, 6);
    h = vsetq_lane_u16(rf_load_u16(p + 7 / per_block * bytes), h, 7);
    return scales_of_halves(h);
}

typedef struct lanes8 {
    float32x4_t low, high;
} lanes8;

/* lanes += (scale * act) * sums */
RF_INLINE void add_eight(lanes8 *lanes, scales8 scale, const float *act, int32x4_t low,
                         int32x4_t high)
{
    const float32x4_t by = vmulq_f32(scale.low, vld1q_f32(act));
    const float32x4_t by_high = vmulq_f32(scale.high, vld1q_f32(act + 4));
    lanes->low = vfmaq_f32(lanes->low, by, vcvtq_f32_s32(low));
    lanes->high = vfmaq_f32(lanes->high, by_high, vcvtq_f32_s32(high));
}

/* The chunk from fold at on, for one token. Folds beyond the row's end add zero times zero. */
RF_INLINE void add_chunk(rf_format format, lanes8 *lanes, const input *in, const chunk *c,
                         uint32_t at, scales8 scale, scales8 min_scale)
{
    int32x4_t low = sum_each_of_4(c->sum), high = sum_each_of_4(c->sum + 4);
    const int32_t offset = offset_of(format);
    if (offset != 0) {
        low = vmlsq_n_s32(low, vld1q_s32(in->sums_32 + at), offset);
        high = vmlsq_n_s32(high, vld1q_s32(in->sums_32 + at + 4), offset);
    }
    add_eight(lanes, scale, in->fold_scale + at, low, high);
    if (format == RF_Q4_1 || format == RF_Q5_1) {
        add_eight(lanes, min_scale, in->fold_scale + at, vld1q_s32(in->sums_32 + at),
                  vld1q_s32(in->sums_32 + at + 4));
    } else if (format == RF_Q2_K || format == RF_Q4_K || format == RF_Q5_K) {
        min_scale.low = vnegq_f32(min_scale.low);
        min_scale.high = vnegq_f32(min_scale.high);
        add_eight(lanes, min_scale, in->fold_scale + at, sum_each_of_4(c->min),
                  sum_each_of_4(c->min + 4));
    }
}

/* All lines of count bytes from PREFETCH_BYTES ahead on. */
RF_INLINE void prefetch_ahead(const uint8_t *weight, uint32_t count)
{
    const uintptr_t at = (uintptr_t)weight + PREFETCH_BYTES;
    for (uint32_t i = 0; i < count; i += 64) {
        __builtin_prefetch((const void *)(at + i), 0, 3);
    }
}

/* The partial sums of count folds, from fold at on. */
RF_INLINE void fill_chunk(const shape s, const uint8_t *weight, const input *in, uint32_t at,
                          uint32_t count, rf_act act, uint32_t tokens, chunk out[2])
{
    for (uint32_t i = 0; i < count; i += s.per_block, weight += s.bytes) {
        if (s.fold == 32) {
            plain_fold(s.format, weight, in, (size_t)(at + i) * 32, act, tokens, i, out);
        } else {
            sub_folds(s.format, weight, in, (size_t)(at + i) * s.fold, act, tokens, i, out);
        }
    }
}

/* ---- rows -------------------------------------------------------------------------------- */

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                        const input *in, const shape s, rf_act act, uint32_t tokens)
{
    const uint32_t folds = job->k / s.fold, chunk_bytes = 8 / s.per_block * s.bytes;
    const size_t d = rf_scale_at(s.format);
    for (uint32_t row = first_row; row < last_row; row++) {
        const uint8_t *weight = job->weight + row * job->weight_row_bytes;
        lanes8 lanes[2] = {{vdupq_n_f32(0), vdupq_n_f32(0)}, {vdupq_n_f32(0), vdupq_n_f32(0)}};
        for (uint32_t at = 0; at < folds; at += 8, weight += chunk_bytes) {
            const uint32_t count = RF_MIN(8u, folds - at);
            chunk c[2];
            prefetch_ahead(weight, chunk_bytes);
            if (s.fold == 32 && count == 8) { /* unrolled; larger blocks need it not */
                fill_chunk(s, weight, in, at, 8, act, tokens, c);
            } else {
                uint32_t some = count;
                __asm__("" : "+r"(some)); /* its bound unknown: else gcc unrolls this too */
                memset(c, 0, sizeof c);
                fill_chunk(s, weight, in, at, some, act, tokens, c);
            }
            const scales8 scale = load_scales(weight + d, s.bytes, s.per_block, count);
            scales8 min_scale = scale;
            if (s.mins) {
                min_scale = load_scales(weight + d + 2, s.bytes, s.per_block, count);
            }
            for (uint32_t t = 0; t < tokens; t++) {
                add_chunk(s.format, &lanes[t], &in[t], &c[t], at, scale, min_scale);
            }
        }
        for (uint32_t t = 0; t < tokens; t++) {
            rf_matmul_store(job, t, row, rf_sum_lanes_8_neon(lanes[t].low, lanes[t].high));
        }
    }
}

/* ---- tokens ------------------------------------------------------------------------------ */

/* Scratch of one token: two arrays of k / 32 with a chunk to spare, and two bytes for each k. */
static size_t input_bytes(uint32_t k)
{
    return 2 * ((size_t)k / 32 + 8) * 4 + 2 * (size_t)k;
}

static void split_codes(const int16_t *q, size_t count, int8_t *high, uint8_t *low)
{
    for (size_t i = 0; i < count; i += 16) {
        const int8x16x2_t v = vld2q_s8((const int8_t *)(q + i));
        vst1q_s8(high + i, v.val[1]);
        vst1q_u8(low + i, vreinterpretq_u8_s8(v.val[0]));
    }
}

/* Fills what the rows read of token t, once for all rows of a call. */
static void prepare(input *in, const rf_matmul *job, uint32_t t, uint8_t *scratch)
{
    const uint8_t *act = rf_matmul_act(job, t);
    const rf_act_layout *layout = &job->layout;
    const rf_quant *quant = rf_quant_of(job->format);
    const uint32_t folds = job->k / quant->fold, per_block = quant->block / quant->fold;
    const float *scale = rf_act_scales(act, layout);
    int8_t *spare = (int8_t *)scratch;
    *in = (input){.high = rf_act_q8(act), .sums = rf_act_sums(act, layout)};
    in->fold_scale = (float *)(void *)(spare + 2 * (size_t)job->k);
    in->sums_32 = (int32_t *)(void *)(in->fold_scale + job->k / 32 + 8);
    if (layout->act == RF_ACT_INT8 && layout->block == 256) {
        in->multipliers = rf_act_multipliers(act, layout);
    }
    if (layout->act == RF_ACT_INT16) {
        split_codes(rf_act_q16(act), job->k, spare, (uint8_t *)spare + job->k);
        in->high = spare;
        in->low = (const uint8_t *)spare + job->k;
    }
    for (uint32_t f = 0; f < folds + 8; f++) {
        in->fold_scale[f] = f < folds ? scale[f / per_block] : 0.0f;
    }
    for (uint32_t i = 0; i < job->k / 32 + 8; i++) {
        in->sums_32[i] = i < job->k / 32 ? in->sums[2 * i] + in->sums[2 * i + 1] : 0;
    }
}

RF_INLINE void dot_format(const rf_matmul *job, uint32_t first, uint32_t last, const input *in,
                          const shape s)
{
    if (job->layout.act == RF_ACT_INT8) {
        if (job->token_count == 1) {
            dot_rows(job, first, last, in, s, RF_ACT_INT8, 1);
        } else {
            dot_rows(job, first, last, in, s, RF_ACT_INT8, 2);
        }
    } else if (job->token_count == 1) {
        dot_rows(job, first, last, in, s, RF_ACT_INT16, 1);
    } else {
        dot_rows(job, first, last, in, s, RF_ACT_INT16, 2);
    }
}

void rf_dot_neon(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    input in[RF_DOT_TOKENS];
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, (uint8_t *)scratch + t * input_bytes(job->k));
    }
    switch (job->format) {
    case RF_Q4_0: /* each case is the loop above with its format inlined */
        dot_format(job, first, last, in, (shape){RF_Q4_0, sizeof(rf_block_q4_0), 32, 1, false});
        break;
    case RF_Q4_1:
        dot_format(job, first, last, in, (shape){RF_Q4_1, sizeof(rf_block_q4_1), 32, 1, true});
        break;
    case RF_Q5_0:
        dot_format(job, first, last, in, (shape){RF_Q5_0, sizeof(rf_block_q5_0), 32, 1, false});
        break;
    case RF_Q5_1:
        dot_format(job, first, last, in, (shape){RF_Q5_1, sizeof(rf_block_q5_1), 32, 1, true});
        break;
    case RF_Q8_0:
        dot_format(job, first, last, in, (shape){RF_Q8_0, sizeof(rf_block_q8_0), 32, 1, false});
        break;
    case RF_Q2_K:
        dot_format(job, first, last, in, (shape){RF_Q2_K, sizeof(rf_block_q2_k), 256, 1, true});
        break;
    case RF_Q3_K:
        dot_format(job, first, last, in, (shape){RF_Q3_K, sizeof(rf_block_q3_k), 256, 1, false});
        break;
    case RF_Q4_K:
        dot_format(job, first, last, in, (shape){RF_Q4_K, sizeof(rf_block_q4_k), 256, 1, true});
        break;
    case RF_Q5_K:
        dot_format(job, first, last, in, (shape){RF_Q5_K, sizeof(rf_block_q5_k), 128, 2, true});
        break;
    case RF_Q6_K:
        dot_format(job, first, last, in, (shape){RF_Q6_K, sizeof(rf_block_q6_k), 64, 4, false});
        break;
    case RF_IQ4_NL:
        dot_format(job, first, last, in, (shape){RF_IQ4_NL, sizeof(rf_block_iq4_nl), 32, 1, false});
        break;
    case RF_IQ4_XS:
        dot_format(job, first, last, in, (shape){RF_IQ4_XS, sizeof(rf_block_iq4_xs), 64, 4, false});
        break;
    case RF_TQ1_0:
        dot_format(job, first, last, in, (shape){RF_TQ1_0, sizeof(rf_block_tq1_0), 256, 1, false});
        break;
    case RF_TQ2_0:
        dot_format(job, first, last, in, (shape){RF_TQ2_0, sizeof(rf_block_tq2_0), 256, 1, false});
        break;
    default:
        break;
    }
}
