/* kernels/matmul_neon.c: quantised weights times integer activations with NEON, and the overlay of
 * the table.
 *
 * Two shapes with the same bits. Few tokens: rows one by one from the packed bytes (dot_neon.c),
 * bound by memory. More: rows unpacked once into panels of bytes (panel_neon.c), then tiles of
 * 8 rows x 4 tokens: one smmla is 2 x 2 sums of eight products, so 32 products an instruction.
 * Sums are scaled in integers once for each sub-block, and become floats once for each fold:
 *
 *   q4_K, 32 k of 2 x 2 results    int8: 4 smmla, 2 for scale and multiplier
 *                                  int16: 4 smmla of high bytes, a shift, 4 usmmla of low, 1 scale
 *
 * (int16 weights with their scales folded in would be smlal: 32 instructions for the same.)
 */
#include "kernels/neon.h"

typedef struct sums { /* [pairs of tokens][pairs of rows]: t0r0 t0r1 t1r0 t1r1 */
    int32x4_t v[2][4];
} sums;

/* Lines of the next panels' packed bytes, asked for while these compute: a few a block. */
typedef struct ahead {
    uintptr_t at, end;
    uint32_t lines;
} ahead;

typedef struct tile { /* what a tile of two pairs at most reads */
    const rf_eight_rows *rows;
    const rf_pair *pair[2];
    uint32_t k;
    ahead *next;
} tile;

RF_INLINE void prefetch_some(ahead *next)
{
    for (uint32_t i = 0; i < next->lines && next->at < next->end; i++, next->at += 64) {
        __builtin_prefetch((const void *)next->at, 0, 2);
    }
}

RF_INLINE void zero_sums(sums *s)
{
    for (int t = 0; t < 2; t++) {
        for (int i = 0; i < 4; i++) {
            s->v[t][i] = vdupq_n_s32(0);
        }
    }
}

/* Eight k: signed activations. */
RF_INLINE void add_signed(sums *s, const int8_t *w, const uint8_t *const a[2], size_t at,
                          uint32_t pairs)
{
    const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
    const int8x16_t w2 = vld1q_s8(w + 32), w3 = vld1q_s8(w + 48);
    for (uint32_t t = 0; t < pairs; t++) {
        const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(a[t] + at));
        s->v[t][0] = vmmlaq_s32(s->v[t][0], x, w0);
        s->v[t][1] = vmmlaq_s32(s->v[t][1], x, w1);
        s->v[t][2] = vmmlaq_s32(s->v[t][2], x, w2);
        s->v[t][3] = vmmlaq_s32(s->v[t][3], x, w3);
    }
}

/* Eight k: unsigned activations. */
RF_INLINE void add_unsigned(sums *s, const int8_t *w, const uint8_t *const a[2], size_t at,
                            uint32_t pairs)
{
    const int8x16_t w0 = vld1q_s8(w), w1 = vld1q_s8(w + 16);
    const int8x16_t w2 = vld1q_s8(w + 32), w3 = vld1q_s8(w + 48);
    for (uint32_t t = 0; t < pairs; t++) {
        const uint8x16_t x = vld1q_u8(a[t] + at);
        s->v[t][0] = vusmmlaq_s32(s->v[t][0], x, w0);
        s->v[t][1] = vusmmlaq_s32(s->v[t][1], x, w1);
        s->v[t][2] = vusmmlaq_s32(s->v[t][2], x, w2);
        s->v[t][3] = vusmmlaq_s32(s->v[t][3], x, w3);
    }
}

/* The exact sums over count k, 16 or 32, of codes at w and activations a. */
RF_INLINE void sub_sums(sums *s, const int8_t *w, const uint8_t *const a[2], uint32_t pairs,
                        rf_act act, int count)
{
    zero_sums(s);
    if (act == RF_ACT_INT8) {
        for (int i = 0; i < count / 8; i++) {
            add_signed(s, w + i * 64, a, (size_t)i * 16, pairs);
            RF_KEEP_ORDER();
        }
        return;
    }
    for (int i = 0; i < count / 8; i++) {
        add_signed(s, w + i * 64, a, (size_t)(i / 2 * 64 + i % 2 * 16), pairs);
    }
    for (uint32_t t = 0; t < pairs; t++) {
        for (int i = 0; i < 4; i++) {
            s->v[t][i] = vshlq_n_s32(s->v[t][i], 8);
        }
    }
    RF_KEEP_ORDER();
    for (int i = 0; i < count / 8; i++) {
        add_unsigned(s, w + i * 64, a, (size_t)(i / 2 * 64 + i % 2 * 16 + 32), pairs);
    }
}

/* acc += s * scale, or acc = s * scale for the first ones. */
RF_INLINE void add_scaled(sums *acc, const sums *s, const int32_t *scale, uint32_t pairs,
                          bool first)
{
    for (uint32_t t = 0; t < pairs; t++) {
        for (int i = 0; i < 4; i++) {
            const int32x4_t by = vld1q_s32(scale + 4 * i);
            acc->v[t][i] =
                first ? vmulq_s32(s->v[t][i], by) : vmlaq_s32(acc->v[t][i], s->v[t][i], by);
        }
    }
}

/* acc += s * multiplier, which each pair of tokens has for 32 k. */
RF_INLINE void add_multiplied(sums *acc, const sums *s, const tile *in, size_t part, uint32_t pairs)
{
    for (uint32_t t = 0; t < pairs; t++) {
        const int32x4_t by = vld1q_s32(in->pair[t]->multiplier + part * 4);
        for (int i = 0; i < 4; i++) {
            acc->v[t][i] = vmlaq_s32(acc->v[t][i], s->v[t][i], by);
        }
    }
}

/* The exact sums of 32 k, one sub-block or two, with scales and multipliers, added to acc. */
RF_INLINE void add_part(sums *acc, const tile *in, size_t part, rf_shape_kind kind, rf_act act,
                        uint32_t pairs)
{
    const size_t part_bytes = act == RF_ACT_INT8 ? 64 : 128; /* of a pair's activations */
    const uint32_t subs = kind == RF_SHAPE_SUB32 ? 1 : 2;
    const int8_t *w = in->rows->codes + part * 256;
    const int32_t *scale = in->rows->scale + part * subs * 16;
    const uint8_t *a[2];
    sums s, scaled;
    for (uint32_t t = 0; t < pairs; t++) {
        a[t] = in->pair[t]->codes + part * part_bytes;
    }
    for (uint32_t i = 0; i < subs; i++, scale += 16) {
        sub_sums(&s, w, a, pairs, act, kind == RF_SHAPE_SUB16 ? 16 : 32);
        if (act == RF_ACT_INT8) {
            add_scaled(&scaled, &s, scale, pairs, i == 0);
        } else {
            add_scaled(acc, &s, scale, pairs, false);
        }
        RF_KEEP_ORDER();
        w += 128;
        for (uint32_t t = 0; t < pairs; t++) {
            a[t] += part_bytes / 2;
        }
    }
    if (act == RF_ACT_INT8) {
        add_multiplied(acc, &scaled, in, part, pairs);
    }
}

/* lanes += (d * scale) * acc */
RF_INLINE void add_fold(float32x4_t lanes[2][4], const float *d, const float *const scale[2],
                        const sums *acc, uint32_t pairs)
{
    for (uint32_t t = 0; t < pairs; t++) {
        for (int i = 0; i < 4; i++) {
            const float32x4_t by = vmulq_f32(vld1q_f32(d + 4 * i), vld1q_f32(scale[t]));
            lanes[t][i] = vfmaq_f32(lanes[t][i], by, vcvtq_f32_s32(acc->v[t][i]));
        }
    }
}

/* The exact sums of a fold's minimums: codes below 64 times sums of activations, whose bytes are
 * multiplied one after another from the highest on. */
RF_INLINE void fold_min_sums(sums *acc, const int8_t *mins, const uint8_t *const bytes[2],
                             uint32_t steps, uint32_t pairs)
{
    for (uint32_t t = 0; t < pairs; t++) {
        for (int i = 0; i < 4; i++) {
            int32x4_t high = vdupq_n_s32(0);
            for (uint32_t j = 0; j < steps; j++) {
                high = vmmlaq_s32(high, vreinterpretq_s8_u8(vld1q_u8(bytes[t] + j * 48 + 32)),
                                  vld1q_s8(mins + j * 64 + i * 16));
            }
            uint32x4_t all = vreinterpretq_u32_s32(high);
            for (int byte = 1; byte >= 0; byte--) {
                all = vshlq_n_u32(all, 8);
                for (uint32_t j = 0; j < steps; j++) {
                    all = vmmlaq_u32(all, vld1q_u8(bytes[t] + j * 48 + 16 * byte),
                                     vreinterpretq_u8_s8(vld1q_s8(mins + j * 64 + i * 16)));
                }
            }
            acc->v[t][i] = vreinterpretq_s32_u32(all);
        }
    }
}

/* Lanes 4, 2, 1 apart; results[token][row]. */
RF_INLINE void sum_lanes(const float32x4_t lanes[8][2][4], float results[4][8], uint32_t pairs)
{
    for (uint32_t t = 0; t < pairs; t++) {
        for (int i = 0; i < 4; i++) {
            float32x4_t a[4];
            for (int l = 0; l < 4; l++) {
                a[l] = vaddq_f32(lanes[l][t][i], lanes[l + 4][t][i]);
            }
            const float32x4_t sum = vaddq_f32(vaddq_f32(a[0], a[2]), vaddq_f32(a[1], a[3]));
            vst1_f32(&results[2 * t][2 * i], vget_low_f32(sum));
            vst1_f32(&results[2 * t + 1][2 * i], vget_high_f32(sum));
        }
    }
}

/* Blocks of 32: a fold each. */
RF_INLINE void run_plain(const tile *in, bool mins, rf_act act, uint32_t pairs, float results[4][8])
{
    const size_t part_bytes = act == RF_ACT_INT8 ? 64 : 128;
    float32x4_t lanes[8][2][4];
    memset(lanes, 0, sizeof lanes);
    for (uint32_t b = 0; b < in->k / 32; b++) {
        const uint8_t *a[2];
        const float *scale[2];
        sums acc;
        for (uint32_t t = 0; t < pairs; t++) {
            a[t] = in->pair[t]->codes + b * part_bytes;
            scale[t] = in->pair[t]->scale + (size_t)b * 4;
        }
        prefetch_some(in->next);
        sub_sums(&acc, in->rows->codes + (size_t)b * 256, a, pairs, act, 32);
        add_fold(lanes[b % RF_FOLD_LANES], in->rows->d + (size_t)b * 16, scale, &acc, pairs);
        for (uint32_t t = 0; mins && t < pairs; t++) {
            const float32x4_t min_sum = vld1q_f32(in->pair[t]->sums + (size_t)b * 4);
            const float32x4_t by = vld1q_f32(scale[t]);
            for (int i = 0; i < 4; i++) {
                float32x4_t *lane = &lanes[b % RF_FOLD_LANES][t][i];
                const float *d = in->rows->min_d + (size_t)b * 16 + 4 * i;
                *lane = vfmaq_f32(*lane, vmulq_f32(vld1q_f32(d), by), min_sum);
            }
        }
    }
    sum_lanes(lanes, results, pairs);
}

/* Blocks of several parts. */
RF_INLINE void run_subs(const tile *in, const rf_shape *shape, rf_shape_kind kind, rf_act act,
                        uint32_t pairs, float results[4][8])
{
    const uint32_t parts = shape->quant->fold / 32;
    const uint32_t steps = kind == RF_SHAPE_SUB32 ? 1 : 2;
    const uint32_t blocks = in->k / shape->quant->block;
    float32x4_t lanes[8][2][4];
    memset(lanes, 0, sizeof lanes);
    for (uint32_t b = 0, f = 0; b < blocks; b++) {
        const float *scale[2];
        const uint8_t *bytes[2];
        for (uint32_t t = 0; t < pairs; t++) {
            scale[t] = in->pair[t]->scale + (size_t)b * 4;
            bytes[t] = in->pair[t]->sum_bytes + (size_t)b * steps * 48;
        }
        prefetch_some(in->next);
        for (uint32_t i = 0; i < shape->folds; i++, f++) {
            sums acc;
            zero_sums(&acc);
            for (uint32_t part = f * parts; part < (f + 1) * parts; part++) {
                add_part(&acc, in, part, kind, act, pairs);
            }
            add_fold(lanes[f % RF_FOLD_LANES], in->rows->d + (size_t)b * 16, scale, &acc, pairs);
            if (shape->min_steps != 0) {
                fold_min_sums(&acc, in->rows->mins + (size_t)f * steps * 64, bytes, steps, pairs);
                add_fold(lanes[f % RF_FOLD_LANES], in->rows->min_d + (size_t)b * 16, scale, &acc,
                         pairs);
            }
        }
    }
    sum_lanes(lanes, results, pairs);
}

/* Each case is one of the loops above with its shape as constants. */
RF_INLINE void run_tile(const tile *in, const rf_shape *shape, rf_act act, uint32_t pairs,
                        float results[4][8])
{
    switch (shape->kind) {
    case RF_SHAPE_PLAIN:
        if (shape->quant->min_step != 0) {
            run_plain(in, true, act, pairs, results);
        } else {
            run_plain(in, false, act, pairs, results);
        }
        break;
    case RF_SHAPE_SUB32:
        run_subs(in, shape, RF_SHAPE_SUB32, act, pairs, results);
        break;
    default:
        run_subs(in, shape, RF_SHAPE_SUB16, act, pairs, results);
        break;
    }
}

static void tile_int8_2(const tile *in, const rf_shape *shape, float results[4][8])
{
    run_tile(in, shape, RF_ACT_INT8, 1, results);
}
static void tile_int8_4(const tile *in, const rf_shape *shape, float results[4][8])
{
    run_tile(in, shape, RF_ACT_INT8, 2, results);
}
static void tile_int16_2(const tile *in, const rf_shape *shape, float results[4][8])
{
    run_tile(in, shape, RF_ACT_INT16, 1, results);
}
static void tile_int16_4(const tile *in, const rf_shape *shape, float results[4][8])
{
    run_tile(in, shape, RF_ACT_INT16, 2, results);
}

static void store_tile(const rf_matmul *job, uint32_t row, uint32_t rows, uint32_t first,
                       uint32_t tokens, float results[4][8])
{
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store_rows(job, first + t, row, rows, results[t]);
    }
}

/* Tokens [first, first + count), pairs of which are ready, times the panels of rows [row, last). */
static void run_panels(const rf_matmul *job, const rf_shape *shape, const rf_eight_rows *panels,
                       const rf_pair *pairs, ahead *next, uint32_t row, uint32_t last,
                       uint32_t first, uint32_t count)
{
    for (; row < last; row += 8, panels++) {
        for (uint32_t t = 0; t < count; t += 4) {
            const uint32_t tokens = RF_MIN(4u, count - t);
            const tile in = {panels, {&pairs[t / 2], &pairs[t / 2 + 1]}, job->k, next};
            float results[4][8];
            if (job->layout.act == RF_ACT_INT8) {
                (tokens > 2 ? tile_int8_4 : tile_int8_2)(&in, shape, results);
            } else {
                (tokens > 2 ? tile_int16_4 : tile_int16_2)(&in, shape, results);
            }
            store_tile(job, row, RF_MIN(8u, last - row), first + t, tokens, results);
        }
    }
}

static void matmul_quant_neon(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                              void *scratch)
{
    if (job->token_count <= RF_DOT_TOKENS) {
        if (job->token_count != 0) { /* an expert that nobody chose */
            rf_dot_neon(job, first_row, last_row, scratch);
        }
        return;
    }
    rf_shape shape;
    rf_eight_rows panels[RF_EIGHTS];
    rf_pair pairs[RF_PAIRS];
    uint8_t *at = scratch;
    (void)rf_shape_of(job->format, &shape);
    for (uint32_t i = 0; i < RF_PAIRS; i++) {
        at = rf_place_pair(&pairs[i], &shape, &job->layout, at);
    }
    for (uint32_t i = 0; i < RF_EIGHTS; i++) {
        at = rf_place_rows(&panels[i], &shape, job->k, at);
    }
    for (uint32_t row = first_row; row < last_row; row += 8 * RF_EIGHTS) {
        const uint32_t last = RF_MIN(row + 8 * RF_EIGHTS, last_row);
        const uint32_t tiles = (last - row + 7) / 8 * ((job->token_count + 3) / 4);
        /* Whoever computes the next rows: where it is another core, they wait in a shared cache. */
        const uint64_t bytes = 8 * RF_EIGHTS * job->weight_row_bytes;
        const uintptr_t after = (uintptr_t)job->weight + last * job->weight_row_bytes;
        const uint64_t blocks = (uint64_t)tiles * (job->k / shape.quant->block);
        ahead next = {after, after + bytes, (uint32_t)(bytes / 64 / blocks) + 1};
        for (uint32_t i = 0; row + 8 * i < last; i++) {
            rf_fill_rows(&panels[i], &shape, job, row + 8 * i, last);
        }
        for (uint32_t t = 0; t < job->token_count; t += 2 * RF_PAIRS) {
            const uint32_t count = RF_MIN(2 * RF_PAIRS, job->token_count - t);
            for (uint32_t i = 0; 2 * i < count; i++) {
                /* A token alone is its own partner. */
                rf_fill_pair(&pairs[i], &shape, job, t + 2 * i, t + RF_MIN(2 * i + 1, count - 1));
            }
            run_panels(job, &shape, panels, pairs, &next, row, last, t, count);
        }
    }
}

void rf_kernels_neon(rf_kernels *kernels)
{
    static const rf_kernel_entry quant = {RF_CPU_NEON, "matmul_neon.c"};
    static const rf_kernel_entry wide = {RF_CPU_NEON, "matmul_float_neon.c"};
    static const rf_kernel_entry attend = {RF_CPU_NEON, "attend_neon.c"};
    static const rf_format floats[] = {RF_F32, RF_F16, RF_BF16};
    for (uint32_t i = 0; i < RF_QUANT_COUNT; i++) {
        rf_shape shape;
        for (int act = RF_ACT_INT16; act <= RF_ACT_INT8; act++) {
            if (rf_shape_of(rf_quants[i].format, &shape)) {
                kernels->matmul[rf_quants[i].format][act] = matmul_quant_neon;
                kernels->matmul_entry[rf_quants[i].format][act] = quant;
            }
        }
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(floats); i++) {
        kernels->matmul[floats[i]][RF_ACT_F32] = rf_matmul_float_neon;
        kernels->matmul_entry[floats[i]][RF_ACT_F32] = wide;
    }
    rf_vector_neon(kernels);
    kernels->attend = rf_attend_neon;
    kernels->attend_entry = attend;
    kernels->pack[RF_ACT_INT16] = rf_pack_int16_neon;
    kernels->pack[RF_ACT_INT8] = rf_pack_int8_neon;
}
