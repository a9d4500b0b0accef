/* kernels/matmul_avx2.c: quantised weights times integer activations with AVX2, and the overlay of
 * the table.
 *
 * Two shapes with the same bits. Few tokens: rows one by one from the packed bytes (dot_avx2.c),
 * bound by memory. More: sixteen rows unpacked once into a panel (panel_avx2.c), then tiles of
 * 16 rows x 4 tokens with rows in lanes, bound by vpmaddwd and vpaddd (about 32 products a clock).
 */
#include "kernels/avx2.h"

#define TILE_TOKENS 4u

typedef struct tile { /* tokens of a tile; pointers into their packed rows */
    const int16_t *q[TILE_TOKENS];
    const float *scale[TILE_TOKENS];
    const int32_t *sums[TILE_TOKENS];
} tile;

/* Lines of the next panel's packed bytes, asked for while this panel computes: a few a block. */
typedef struct ahead {
    uintptr_t at, end;
    uint32_t lines; /* a block */
} ahead;

RF_INLINE void prefetch_some(ahead *next)
{
    for (uint32_t i = 0; i < next->lines && next->at < next->end; i++, next->at += 64) {
        _mm_prefetch((const char *)next->at, _MM_HINT_T1);
    }
}

RF_INLINE __m256i broadcast_pair(const int16_t *q)
{
    int32_t pair;
    memcpy(&pair, q, sizeof pair);
    return _mm256_set1_epi32(pair);
}

RF_INLINE void add_products(__m256i *acc, __m256i w, __m256i pair)
{
    rf_add_i32(acc, _mm256_madd_epi16(w, pair));
}

/* The exact sums of one fold over pairs of k: acc[t][half]. */
RF_INLINE void fold_sums_4(const int16_t *w, const int16_t *const q[4], uint32_t pairs,
                           __m256i acc[4][2])
{
    const int16_t *q0 = q[0], *q1 = q[1], *q2 = q[2], *q3 = q[3];
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0;
    __m256i c0 = a0, c1 = a0, d0 = a0, d1 = a0;
    for (size_t i = 0; i < pairs; i++) {
        const __m256i w0 = rf_load_256(w + i * 32), w1 = rf_load_256(w + i * 32 + 16);
        __m256i pair = broadcast_pair(q0 + 2 * i);
        add_products(&a0, w0, pair);
        add_products(&a1, w1, pair);
        pair = broadcast_pair(q1 + 2 * i);
        add_products(&b0, w0, pair);
        add_products(&b1, w1, pair);
        pair = broadcast_pair(q2 + 2 * i);
        add_products(&c0, w0, pair);
        add_products(&c1, w1, pair);
        pair = broadcast_pair(q3 + 2 * i);
        add_products(&d0, w0, pair);
        add_products(&d1, w1, pair);
    }
    acc[0][0] = a0, acc[0][1] = a1;
    acc[1][0] = b0, acc[1][1] = b1;
    acc[2][0] = c0, acc[2][1] = c1;
    acc[3][0] = d0, acc[3][1] = d1;
}

RF_INLINE void fold_sums_2(const int16_t *w, const int16_t *const q[4], uint32_t pairs,
                           __m256i acc[4][2])
{
    const int16_t *q0 = q[0], *q1 = q[1];
    __m256i a0 = _mm256_setzero_si256(), a1 = a0, b0 = a0, b1 = a0;
    for (size_t i = 0; i < pairs; i++) {
        const __m256i w0 = rf_load_256(w + i * 32), w1 = rf_load_256(w + i * 32 + 16);
        __m256i pair = broadcast_pair(q0 + 2 * i);
        add_products(&a0, w0, pair);
        add_products(&a1, w1, pair);
        pair = broadcast_pair(q1 + 2 * i);
        add_products(&b0, w0, pair);
        add_products(&b1, w1, pair);
    }
    acc[0][0] = a0, acc[0][1] = a1;
    acc[1][0] = b0, acc[1][1] = b1;
}

/* acc[t][half] of a fold's minimums: codes of count sub-blocks times the sums of activations. */
RF_INLINE void fold_min_sums(const int32_t *mins, const int32_t sums[4][16], uint32_t first,
                             uint32_t count, uint32_t tokens, __m256i acc[4][2])
{
    for (uint32_t t = 0; t < tokens; t++) {
        acc[t][0] = acc[t][1] = _mm256_setzero_si256();
    }
    for (uint32_t j = 0; j < count; j++) {
        const __m256i m0 = rf_load_256(mins + j * RF_PANEL_ROWS);
        const __m256i m1 = rf_load_256(mins + j * RF_PANEL_ROWS + 8);
        for (uint32_t t = 0; t < tokens; t++) {
            const __m256i sum = _mm256_set1_epi32(sums[t][first + j]);
            acc[t][0] = _mm256_add_epi32(acc[t][0], _mm256_mullo_epi32(m0, sum));
            acc[t][1] = _mm256_add_epi32(acc[t][1], _mm256_mullo_epi32(m1, sum));
        }
    }
}

RF_INLINE void add_fold(__m256 lanes[4][2], const float *scale, const float act_scale[4],
                        uint32_t tokens, __m256i acc[4][2])
{
    for (uint32_t t = 0; t < tokens; t++) {
        const __m256 a = _mm256_set1_ps(act_scale[t]);
        for (uint32_t h = 0; h < 2; h++) {
            const __m256 product = _mm256_mul_ps(_mm256_loadu_ps(scale + 8 * h), a);
            lanes[t][h] = _mm256_fmadd_ps(product, _mm256_cvtepi32_ps(acc[t][h]), lanes[t][h]);
        }
    }
}

/* The sums of a block's sub-blocks, one for each minimum. */
RF_INLINE void load_sums(const tile *in, uint32_t b, uint32_t block, uint32_t step, uint32_t tokens,
                         int32_t sums[4][16])
{
    for (uint32_t t = 0; t < tokens; t++) {
        const int32_t *from = in->sums[t] + (size_t)b * (block / 16);
        if (block == 32) {
            sums[t][0] = from[0] + from[1];
        } else if (step == 32) {
            rf_store_256(sums[t], rf_sums_of_32(from));
        } else {
            memcpy(sums[t], from, sizeof sums[t]);
        }
    }
}

/* results[t] = 16 rows of token t. Everything after tokens is a constant where it is called. */
RF_INLINE void run_tile(const rf_panel *panel, const tile *in, uint32_t block_count, ahead *next,
                        float results[4][16], uint32_t tokens, uint32_t block, uint32_t fold,
                        uint32_t step)
{
    __m256 lanes[RF_FOLD_LANES][4][2];
    memset(lanes, 0, sizeof lanes);
    for (uint32_t b = 0, f = 0; b < block_count; b++) {
        float act_scale[4];
        int32_t sums[4][16];
        for (uint32_t t = 0; t < tokens; t++) {
            act_scale[t] = in->scale[t][b];
        }
        if (step != 0) {
            load_sums(in, b, block, step, tokens, sums);
        }
        prefetch_some(next);
        for (uint32_t at = 0; at < block; at += fold, f++) {
            const size_t k = (size_t)b * block + at;
            __m256(*lane)[2] = lanes[f % RF_FOLD_LANES];
            const int16_t *q[4];
            __m256i acc[4][2];
            for (uint32_t t = 0; t < tokens; t++) {
                q[t] = in->q[t] + k;
            }
            if (tokens == 4) {
                fold_sums_4(panel->w + k * RF_PANEL_ROWS, q, fold / 2, acc);
            } else {
                fold_sums_2(panel->w + k * RF_PANEL_ROWS, q, fold / 2, acc);
            }
            add_fold(lane, panel->scale + (size_t)b * RF_PANEL_ROWS, act_scale, tokens, acc);
            if (step != 0) {
                fold_min_sums(panel->mins + k / step * RF_PANEL_ROWS, sums, at / step, fold / step,
                              tokens, acc);
                add_fold(lane, panel->min_scale + (size_t)b * RF_PANEL_ROWS, act_scale, tokens,
                         acc);
            }
        }
    }
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

/* Each case is run_tile with its format's fold and minimums as constants. */
RF_INLINE void run_tile_of(const rf_quant *quant, const rf_panel *panel, const tile *in,
                           uint32_t block_count, ahead *next, float results[4][16], uint32_t tokens)
{
    switch (quant->format) {
    case RF_Q2_K:
        run_tile(panel, in, block_count, next, results, tokens, 256, 256, 16);
        break;
    case RF_Q3_K:
    case RF_TQ1_0:
    case RF_TQ2_0:
        run_tile(panel, in, block_count, next, results, tokens, 256, 256, 0);
        break;
    case RF_Q4_K:
        run_tile(panel, in, block_count, next, results, tokens, 256, 256, 32);
        break;
    case RF_Q5_K:
        run_tile(panel, in, block_count, next, results, tokens, 256, 128, 32);
        break;
    case RF_Q6_K:
    case RF_IQ4_XS:
        run_tile(panel, in, block_count, next, results, tokens, 256, 64, 0);
        break;
    case RF_Q4_1:
    case RF_Q5_1:
        run_tile(panel, in, block_count, next, results, tokens, 32, 32, 32);
        break;
    case RF_Q4_0:
    case RF_Q5_0:
    case RF_Q8_0:
    case RF_IQ4_NL:
        run_tile(panel, in, block_count, next, results, tokens, 32, 32, 0);
        break;
    default: /* formats without code of their own */
        run_tile(panel, in, block_count, next, results, tokens, quant->block, quant->fold,
                 quant->min_step);
        break;
    }
}

static void run_tile_4(const rf_quant *quant, const rf_panel *panel, const tile *in,
                       uint32_t block_count, ahead *next, float results[4][16])
{
    run_tile_of(quant, panel, in, block_count, next, results, 4);
}

static void run_tile_2(const rf_quant *quant, const rf_panel *panel, const tile *in,
                       uint32_t block_count, ahead *next, float results[4][16])
{
    run_tile_of(quant, panel, in, block_count, next, results, 2);
}

static void store_tile(const rf_matmul *job, uint32_t row, uint32_t rows, uint32_t first,
                       uint32_t tokens, float results[4][16])
{
    for (uint32_t t = 0; t < tokens; t++) {
        float *out = job->out + (uint64_t)rf_matmul_token(job, first + t) * job->out_stride + row;
        for (uint32_t r = 0; r < rows; r++) {
            out[r] = job->accumulate ? out[r] + results[t][r] : results[t][r];
        }
    }
}

/* All tokens of rows [row, row + rows) from their panel. wide: TILE_TOKENS * k for int8 tokens. */
static void run_panel(const rf_matmul *job, const rf_quant *quant, const rf_panel *panel,
                      uint32_t row, uint32_t rows, int16_t *wide)
{
    const uint32_t block_count = job->k / quant->block;
    const uint32_t tile_count = (job->token_count + TILE_TOKENS - 1) / TILE_TOKENS;
    const uint64_t bytes = RF_PANEL_ROWS * job->weight_row_bytes;
    const uintptr_t after = (uintptr_t)job->weight + (row + rows) * job->weight_row_bytes;
    ahead next = {after, after + bytes, (uint32_t)(bytes / 64 / tile_count / block_count) + 1};
    for (uint32_t first = 0; first < job->token_count; first += TILE_TOKENS) {
        const uint32_t count = RF_MIN(TILE_TOKENS, job->token_count - first);
        float results[4][16];
        tile in;
        for (uint32_t t = 0; t < TILE_TOKENS; t++) {
            /* A tile that is not full repeats its last token; the results are dropped. */
            const uint8_t *act = rf_matmul_act(job, first + RF_MIN(t, count - 1));
            in.q[t] = rf_act_q16(act);
            if (job->layout.act == RF_ACT_INT8) {
                rf_widen_avx2(&job->layout, act, wide + (size_t)t * job->k);
                in.q[t] = wide + (size_t)t * job->k;
            }
            in.scale[t] = rf_act_scales(act, &job->layout);
            in.sums[t] = rf_act_sums(act, &job->layout);
        }
        if (count > 2) {
            run_tile_4(quant, panel, &in, block_count, &next, results);
        } else {
            run_tile_2(quant, panel, &in, block_count, &next, results);
        }
        store_tile(job, row, rows, first, count, results);
    }
}

static void matmul_quant_avx2(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                              void *scratch)
{
    if (job->token_count <= RF_DOT_TOKENS) {
        rf_dot_avx2(job, first_row, last_row, scratch);
        return;
    }
    const rf_quant *quant = rf_quant_of(job->format);
    const size_t blocks = job->k / quant->block;
    rf_panel panel;
    int16_t *wide = scratch;
    panel.w = wide + (size_t)job->k * TILE_TOKENS;
    panel.scale = (float *)(void *)(panel.w + (size_t)job->k * RF_PANEL_ROWS);
    panel.min_scale = panel.scale + blocks * RF_PANEL_ROWS;
    panel.mins = (int32_t *)(void *)(panel.min_scale + blocks * RF_PANEL_ROWS);
    for (uint32_t row = first_row; row < last_row; row += RF_PANEL_ROWS) {
        const uint32_t rows = RF_MIN(RF_PANEL_ROWS, last_row - row);
        rf_panel_avx2(job, row, rows, &panel);
        run_panel(job, quant, &panel, row, rows, wide);
    }
}

void rf_kernels_avx2(rf_kernels *kernels)
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
