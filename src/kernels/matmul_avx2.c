/* kernels/matmul_avx2.c: quantised weights times integer activations with AVX2, and the overlay of
 * the table.
 *
 * Few tokens: rows one by one from the packed bytes (dot_avx2.c), bound by memory. More: sixteen
 * rows unpacked once into a panel (panel_avx2.c, panel8_avx2.c), then tiles of 16 rows x 4 tokens
 * with rows in lanes and eight sums in registers, bound by multiplication and addition:
 *
 *   int16   vpmaddwd and vpaddd over a fold
 *   int8    vpmaddubsw and vpaddw over the steps that 16 bits can hold, then one vpmaddwd by the
 *           scales, and one multiplication by the multiplier of 32 k, into the sum of the fold
 */
#include "kernels/tile_avx2.h"

#define PANELS 2u /* made before their tiles run: one preparation serves both */

/* Bytes to ask for while tiles compute: a few lines a block. */
typedef struct ahead {
    uintptr_t at, end;
    uint32_t lines;
} ahead;

RF_INLINE void prefetch_some(ahead *next)
{
    for (uint32_t i = 0; i < next->lines && next->at < next->end; i++, next->at += 64) {
        _mm_prefetch((const char *)next->at, _MM_HINT_T1);
    }
}

RF_INLINE __m256i broadcast_4(const void *p)
{
    int32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_set1_epi32(four);
}

/* 16-bit sums over steps of four k: acc[t][half]. They begin at zero where start is NULL, else both
 * halves at start[t]. */
RF_INLINE void add_steps(const uint8_t *w, const uint8_t *const q[4], uint32_t steps,
                         uint32_t tokens, const uint8_t *start, __m256i acc[4][2])
{
#pragma GCC unroll 8
    for (size_t i = 0; i < steps; i++) {
        const __m256i w0 = rf_load_256(w + i * 64), w1 = rf_load_256(w + i * 64 + 32);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i four = broadcast_4(q[t] + 4 * i);
            const __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
            if (i != 0) {
                rf_add_i16(&acc[t][0], p0);
                rf_add_i16(&acc[t][1], p1);
            } else if (start) {
                const __m256i first = broadcast_4(start + 4 * t);
                acc[t][0] = _mm256_add_epi16(first, p0);
                acc[t][1] = _mm256_add_epi16(first, p1);
            } else {
                acc[t][0] = p0;
                acc[t][1] = p1;
            }
        }
    }
}

/* Exact sums over steps of two k; mixed: the tokens' codes lie together; begins: sum is nothing
 * yet. */
RF_INLINE void add_pairs(const uint8_t *w, const uint8_t *const q[4], uint32_t steps,
                         uint32_t tokens, bool mixed, bool begins, __m256i sum[4][2])
{
#pragma GCC unroll 8
    for (size_t i = 0; i < steps; i++) {
        const __m256i w0 = rf_load_256(w + i * 64), w1 = rf_load_256(w + i * 64 + 32);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i two = broadcast_4(mixed ? q[0] + 16 * i + 4 * t : q[t] + 4 * i);
            const __m256i p0 = _mm256_madd_epi16(w0, two), p1 = _mm256_madd_epi16(w1, two);
            if (begins && i == 0) {
                sum[t][0] = p0;
                sum[t][1] = p1;
            } else {
                rf_add_i32(&sum[t][0], p0);
                rf_add_i32(&sum[t][1], p1);
            }
        }
    }
}

/* What 32 k of a panel of bytes need; the parts of the records move on with it. */
typedef struct cursor {
    const uint8_t *w, *scales, *multipliers, *starts;
    const uint8_t *q[4];
} cursor;

/* 32 k share a multiplier: their sum is at most 32 * 32 * 127 * 128 (q6_K), 63 times that fits. */
RF_INLINE void add_32(const cursor *c, const rf_shape s, uint32_t tokens, __m256i sum[4][2])
{
    __m256i acc[4][2], scaled[4][2];
#pragma GCC unroll 2
    for (size_t part = 0; part < 32; part += 4 * s.steps) {
        const uint8_t *scales = c->scales + part / s.sub * 64;
        const bool starts = s.offset != 0 && s.block == 256;
        const uint8_t *q[4] = {c->q[0] + part, c->q[1] + part, c->q[2] + part, c->q[3] + part};
        add_steps(c->w + part * RF_PANEL_ROWS, q, s.steps, tokens,
                  starts ? c->starts + part / s.sub * 16 : NULL, acc);
#pragma GCC unroll 4
        for (uint32_t t = 0; t < tokens; t++) {
#pragma GCC unroll 2
            for (uint32_t h = 0; h < 2; h++) {
                const __m256i by =
                    s.block == 256 ? rf_load_256(scales + 32 * h) : _mm256_set1_epi16(1);
                const __m256i product = _mm256_madd_epi16(acc[t][h], by);
                scaled[t][h] = part == 0 ? product : _mm256_add_epi32(scaled[t][h], product);
            }
        }
    }
#pragma GCC unroll 4
    for (uint32_t t = 0; t < tokens; t++) {
        if (s.block == 256) {
            const __m256i multiplier = broadcast_4(c->multipliers + 4 * t);
            scaled[t][0] = _mm256_mullo_epi32(scaled[t][0], multiplier);
            scaled[t][1] = _mm256_mullo_epi32(scaled[t][1], multiplier);
        }
        rf_add_i32(&sum[t][0], scaled[t][0]);
        rf_add_i32(&sum[t][1], scaled[t][1]);
    }
}

RF_INLINE void advance_32(cursor *c, const rf_shape s)
{
    c->w += 32 * RF_PANEL_ROWS;
    c->scales += 32 / s.sub * 64;
    c->multipliers += 16;
    c->starts += 32 / s.sub * 16;
    for (int t = 0; t < 4; t++) {
        c->q[t] += 32;
    }
}

/* Minimums of a fold of a K format: code * sum = (16 * code) * (sum / 16) + code * (sum mod 16).
 * Sums are at most 8191 * 32, so a sixteenth has 15 bits; four products 63 * 15 fit 16 bits. */
RF_INLINE void min_sums(const uint8_t *record, const uint8_t *side, uint32_t at, const rf_shape s,
                        uint32_t tokens, __m256i sum[4][2])
{
    const uint32_t mins = s.block / s.min_step, first = at / s.min_step;
    const uint32_t count = s.fold / s.min_step;
    const uint8_t *pairs = record + rf_mins_at(s) + first * 32;
    const uint8_t *fours = record + rf_mins_at(s) + mins * 32 + first * 16;
    const uint8_t *high = side + rf_sums_at(s) + first * 8;
    const uint8_t *low = side + rf_sums_at(s) + mins * 8 + first * 4;
    for (uint32_t t = 0; t < tokens; t++) {
        sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    }
    for (uint32_t j = 0; j < count; j += 4) {
        const __m256i w0 = rf_load_256(fours + j * 16), w1 = rf_load_256(fours + j * 16 + 32);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i four = broadcast_4(low + j * 4 + 4 * t);
            const __m256i p0 = _mm256_maddubs_epi16(w0, four), p1 = _mm256_maddubs_epi16(w1, four);
            sum[t][0] = _mm256_add_epi16(sum[t][0], p0);
            sum[t][1] = _mm256_add_epi16(sum[t][1], p1);
        }
    }
    for (uint32_t t = 0; t < tokens; t++) {
        sum[t][0] = _mm256_madd_epi16(sum[t][0], _mm256_set1_epi16(1));
        sum[t][1] = _mm256_madd_epi16(sum[t][1], _mm256_set1_epi16(1));
    }
    for (uint32_t j = 0; j < count; j += 2) {
        const __m256i w0 = rf_load_256(pairs + j * 32), w1 = rf_load_256(pairs + j * 32 + 32);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i two = broadcast_4(high + j * 8 + 4 * t);
            rf_add_i32(&sum[t][0], _mm256_madd_epi16(w0, two));
            rf_add_i32(&sum[t][1], _mm256_madd_epi16(w1, two));
        }
    }
}

/* lanes += scale * act_scale * value, of one part of a record. */
RF_INLINE void add_scaled(const uint8_t *scales, const uint8_t *side, uint32_t tokens,
                          __m256 value[4][2], __m256 lanes[4][2])
{
    const __m256 s0 = _mm256_loadu_ps((const float *)(const void *)scales);
    const __m256 s1 = _mm256_loadu_ps((const float *)(const void *)(scales + 32));
    for (uint32_t t = 0; t < tokens; t++) {
        const __m256 a = _mm256_castsi256_ps(broadcast_4(side + 4 * t));
        lanes[t][0] = _mm256_fmadd_ps(_mm256_mul_ps(s0, a), value[t][0], lanes[t][0]);
        lanes[t][1] = _mm256_fmadd_ps(_mm256_mul_ps(s1, a), value[t][1], lanes[t][1]);
    }
}

RF_INLINE void add_sums(const uint8_t *scales, const uint8_t *side, uint32_t tokens,
                        __m256i sum[4][2], __m256 lanes[4][2])
{
    __m256 value[4][2];
    for (uint32_t t = 0; t < tokens; t++) {
        value[t][0] = _mm256_cvtepi32_ps(sum[t][0]);
        value[t][1] = _mm256_cvtepi32_ps(sum[t][1]);
    }
    add_scaled(scales, side, tokens, value, lanes);
}

RF_INLINE void add_16(cursor *c, const rf_shape s, uint32_t tokens, bool begins, __m256i sum[4][2])
{
    add_pairs(c->w, c->q, 8, tokens, s.mixed, begins, sum);
    c->w += 16 * 2 * RF_PANEL_ROWS;
    for (uint32_t t = 0; t < (s.mixed ? 1 : tokens); t++) {
        c->q[t] += s.mixed ? 32 * RF_TILE_TOKENS : 32;
    }
}

/* The exact sums of one fold of a block; c begins there and is moved on. */
RF_INLINE void fold_sums(cursor *c, const uint8_t *side, const rf_shape s, uint32_t tokens,
                         __m256i sum[4][2])
{
    if (s.steps == 0) {
        add_16(c, s, tokens, true, sum);
#pragma GCC unroll 1
        for (uint32_t i = 16; i < s.fold; i += 16) {
            add_16(c, s, tokens, false, sum);
        }
    } else {
        for (uint32_t t = 0; t < tokens; t++) {
            sum[t][0] = sum[t][1] = s.offset != 0 && s.block == 32
                                        ? broadcast_4(side + rf_starts_at(s) + 4 * t)
                                        : _mm256_setzero_si256();
        }
#pragma GCC unroll 1
        for (uint32_t i = 0; i < s.fold; i += 32) {
            add_32(c, s, tokens, sum);
            advance_32(c, s);
        }
    }
}

/* results[t] = lanes 4, 2, 1 apart. */
RF_INLINE void add_lanes(__m256 lanes[8][4][2], uint32_t tokens, float results[4][16])
{
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t h = 0; h < 2; h++) {
            __m256 a[4];
            for (uint32_t i = 0; i < 4; i++) {
                a[i] = _mm256_add_ps(lanes[i][t][h], lanes[i + 4][t][h]);
            }
            a[0] = _mm256_add_ps(a[0], a[2]);
            a[1] = _mm256_add_ps(a[1], a[3]);
            _mm256_storeu_ps(results[t] + 8 * h, _mm256_add_ps(a[0], a[1]));
        }
    }
}

/* results[t] = 16 rows of token t. tokens and s are constants where it is called. */
RF_INLINE void run_tile(const uint8_t *panel, const rf_tile *tile, uint32_t block_count,
                        ahead *next, float results[4][16], uint32_t tokens, const rf_shape s)
{
    __m256 lanes[RF_FOLD_LANES][4][2];
    const uint8_t *side = tile->sides;
    cursor c = {.q = {tile->q[0], tile->q[1], tile->q[2], tile->q[3]}};
    for (uint32_t i = 0; i < RF_FOLD_LANES; i++) {
        for (uint32_t t = 0; t < tokens; t++) {
            lanes[i][t][0] = lanes[i][t][1] = _mm256_setzero_ps();
        }
    }
    for (uint32_t b = 0, f = 0; b < block_count; b++) {
        prefetch_some(next);
        c.w = panel;
        c.scales = panel + rf_scales_at(s);
        c.multipliers = side + rf_multipliers_at();
        c.starts = side + rf_starts_at(s);
#pragma GCC unroll 1
        for (uint32_t at = 0; at < s.block; at += s.fold, f++) {
            __m256(*lane)[2] = lanes[f % RF_FOLD_LANES];
            __m256i sum[4][2];
            fold_sums(&c, side, s, tokens, sum);
            add_sums(panel + rf_scale_at(s), side, tokens, sum, lane);
            if (s.min_step != 0 && s.block == 256) {
                min_sums(panel, side, at, s, tokens, sum);
                add_sums(panel + rf_min_at(s), side, tokens, sum, lane);
            } else if (s.min_step != 0) {
                __m256 value[4][2];
                for (uint32_t t = 0; t < tokens; t++) {
                    value[t][0] = value[t][1] =
                        _mm256_castsi256_ps(broadcast_4(side + rf_sums_at(s) + 4 * t));
                }
                add_scaled(panel + rf_min_at(s), side, tokens, value, lane);
            }
        }
        panel += rf_record_bytes(s);
        side += rf_side_bytes(s);
    }
    add_lanes(lanes, tokens, results);
}

static void store_tile(const rf_matmul *job, uint32_t row, uint32_t rows, uint32_t first,
                       uint32_t tokens, float results[4][16])
{
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store_rows(job, first + t, row, rows, results[t]);
    }
}

/* All tokens of rows [row, row + rows), rows <= 16 * panels. */
RF_INLINE void run_rows(const rf_matmul *job, uint32_t row, uint32_t rows, uint8_t *scratch,
                        const rf_shape s, uint32_t panels)
{
    const uint32_t block_count = job->k / s.block;
    const uint32_t tile_count = (job->token_count + RF_TILE_TOKENS - 1) / RF_TILE_TOKENS;
    const size_t panel_bytes = block_count * rf_record_bytes(s);
    const uint64_t bytes = panels * RF_PANEL_ROWS * job->weight_row_bytes;
    const uintptr_t after = (uintptr_t)job->weight + (row + rows) * job->weight_row_bytes;
    const uint64_t lines = bytes / 64 / panels / tile_count / block_count + 1;
    ahead next = {after, after + bytes, (uint32_t)lines};
    const rf_shape shape = s; /* a copy: s stays a set of constants, for its address is not taken */
    rf_tile tile;
    tile.sides = scratch + panels * panel_bytes;
    tile.mixed = (int16_t *)(void *)(tile.sides + block_count * rf_side_bytes(s));
    for (uint32_t at = 0; at < rows; at += RF_PANEL_ROWS) {
        const uint32_t count = RF_MIN(RF_PANEL_ROWS, rows - at);
        uint8_t *panel = scratch + at / RF_PANEL_ROWS * panel_bytes;
        if (s.steps != 0) {
            rf_panel8_avx2(job, row + at, count, panel);
        } else {
            rf_panel_avx2(job, row + at, count, panel);
        }
    }
    for (uint32_t first = 0; first < job->token_count; first += RF_TILE_TOKENS) {
        const uint32_t count = RF_MIN(RF_TILE_TOKENS, job->token_count - first);
        rf_tile_avx2(job, &shape, first, count, &tile);
        for (uint32_t at = 0; at < rows; at += RF_PANEL_ROWS) {
            const uint8_t *panel = scratch + at / RF_PANEL_ROWS * panel_bytes;
            float results[4][16];
            if (count > 2) {
                run_tile(panel, &tile, block_count, &next, results, 4, s);
            } else {
                run_tile(panel, &tile, block_count, &next, results, 2, s);
            }
            store_tile(job, row + at, RF_MIN(RF_PANEL_ROWS, rows - at), first, count, results);
        }
    }
}

/* As many as fit the scratch of a worker (rf_matmul_scratch_bytes): 80 bytes for each k, eight of
 * them for mixed codes. */
RF_INLINE uint32_t panels_of(const rf_shape s)
{
    const size_t beside = rf_side_bytes(s) + (s.mixed ? 8 * s.block : 0);
    return PANELS * rf_record_bytes(s) + beside <= 80 * s.block ? PANELS : 1;
}

RF_INLINE void run_job(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch,
                       const rf_shape s)
{
    const uint32_t panels = panels_of(s);
    for (uint32_t row = first_row; row < last_row; row += panels * RF_PANEL_ROWS) {
        const uint32_t rows = RF_MIN(panels * RF_PANEL_ROWS, last_row - row);
        run_rows(job, row, rows, scratch, s, panels);
    }
}

/* Each case is the code above with its format inlined; false: not served as bytes. */
static bool run_bytes(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    switch (job->format) {
    case RF_Q4_0:
        run_job(job, first, last, scratch, RF_SHAPE_Q4_0);
        return true;
    case RF_Q4_1:
        run_job(job, first, last, scratch, RF_SHAPE_Q4_1);
        return true;
    case RF_Q5_0:
        run_job(job, first, last, scratch, RF_SHAPE_Q5_0);
        return true;
    case RF_Q5_1:
        run_job(job, first, last, scratch, RF_SHAPE_Q5_1);
        return true;
    case RF_Q2_K:
        run_job(job, first, last, scratch, RF_SHAPE_Q2_K);
        return true;
    case RF_Q3_K:
        run_job(job, first, last, scratch, RF_SHAPE_Q3_K);
        return true;
    case RF_Q4_K:
        run_job(job, first, last, scratch, RF_SHAPE_Q4_K);
        return true;
    case RF_Q5_K:
        run_job(job, first, last, scratch, RF_SHAPE_Q5_K);
        return true;
    case RF_Q6_K:
        run_job(job, first, last, scratch, RF_SHAPE_Q6_K);
        return true;
    default:
        return false;
    }
}

RF_INLINE bool run_if(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch,
                      const rf_shape s)
{
    const rf_quant *quant = rf_quant_of(job->format);
    if (quant->block != s.block || quant->fold != s.fold || quant->min_step != s.min_step) {
        return false;
    }
    run_job(job, first, last, scratch, s);
    return true;
}

/* int16 weights and activations: each shape that formats have, with the code above inlined. */
static void run_wide(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    (void)(run_if(job, first, last, scratch, rf_shape_wide(32, 32, 0)) ||
           run_if(job, first, last, scratch, rf_shape_wide(32, 32, 32)) ||
           run_if(job, first, last, scratch, rf_shape_wide(256, 256, 0)) ||
           run_if(job, first, last, scratch, rf_shape_wide(256, 256, 16)) ||
           run_if(job, first, last, scratch, rf_shape_wide(256, 256, 32)) ||
           run_if(job, first, last, scratch, rf_shape_wide(256, 128, 32)) ||
           run_if(job, first, last, scratch, rf_shape_wide(256, 64, 0)));
}

/* int16 weights, int8 activations: the formats that do not go as bytes. */
static void run_wide_int8(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    (void)(run_if(job, first, last, scratch, rf_shape_mixed(32, 32, 0)) ||
           run_if(job, first, last, scratch, rf_shape_mixed(256, 256, 0)) ||
           run_if(job, first, last, scratch, rf_shape_mixed(256, 64, 0)));
}

/* From how many tokens on the panel is faster, less one: measured on Zen 3, weights from memory. */
static uint32_t dot_tokens(const rf_matmul *job)
{
    const bool k_format = job->format >= RF_Q2_K && job->format <= RF_Q6_K;
    if (job->layout.act == RF_ACT_INT8 && (k_format || job->format < RF_Q8_0)) {
        return k_format ? 2 : 1;
    }
    return k_format ? RF_DOT_TOKENS_MAX : 3;
}

static void matmul_quant_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                              void *scratch)
{
    if (job->token_count <= dot_tokens(job)) {
        if (!rf_dot_k_avx2(job, first_row, last_row, scratch)) {
            rf_dot_avx2(job, first_row, last_row, scratch);
        }
    } else if (job->layout.act != RF_ACT_INT8) {
        run_wide(job, first_row, last_row, scratch);
    } else if (!run_bytes(job, first_row, last_row, scratch)) {
        run_wide_int8(job, first_row, last_row, scratch);
    }
}

RF_FOR_ANY_CPU void rf_kernels_avx2(rf_kernels *kernels)
{
    static const rf_kernel_entry quant = {RF_CPU_AVX2, "matmul_avx2.c"};
    static const rf_kernel_entry wide = {RF_CPU_AVX2, "matmul_float_avx2.c"};
    static const rf_kernel_entry attend = {RF_CPU_AVX2, "attend_avx2.c"};
    static const rf_format floats[] = {RF_F32, RF_F16, RF_BF16};
    for (uint32_t i = 0; i < RF_QUANT_COUNT; i++) {
        for (int act = RF_ACT_INT16; act <= RF_ACT_INT8; act++) {
            kernels->matmul[rf_quants[i].format][act] = matmul_quant_avx2;
            kernels->matmul_entry[rf_quants[i].format][act] = quant;
        }
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(floats); i++) {
        kernels->matmul[floats[i]][RF_ACT_F32] = rf_matmul_float_avx2;
        kernels->matmul_entry[floats[i]][RF_ACT_F32] = wide;
    }
    kernels->pack[RF_ACT_INT16] = rf_pack_int16_avx2;
    kernels->pack[RF_ACT_INT8] = rf_pack_int8_avx2;
    rf_vector_avx2(kernels);
    kernels->attend = rf_attend_avx2;
    kernels->attend_join = rf_attend_join_avx2;
    kernels->attend_entry = attend;
}
