/* kernels/matmul_words_avx512.c: tiles of 32 rows x 6 tokens over panels of words: int16
 * activations by vpdpwssd, 32 products each. Serves every format, for all unpack to words.
 */
#include "kernels/tile_avx512.h"

/* The exact sums of 32 k of 32 rows are added to acc. */
RF_INLINE void dot_32(const uint8_t *codes, const rf_tile *in, size_t at,
                      __m512i acc[RF_TILE_512][2], uint32_t tokens)
{
    for (uint32_t i = 0; i < 16; i += 4) {
#pragma GCC unroll 4
        for (uint32_t j = i; j < i + 4; j++) {
            const __m512i w0 = rf_load_512(codes + (size_t)j * RF_PANEL_LINE);
            const __m512i w1 = rf_load_512(codes + (size_t)j * RF_PANEL_LINE + 64);
#pragma GCC unroll 6
            for (uint32_t t = 0; t < tokens; t++) {
                __m512i q = rf_broadcast_4(in->q[t] + 2 * at + 4 * j);
                RF_PIN(q);
                rf_dot_words(&acc[t][0], w0, q);
                rf_dot_words(&acc[t][1], w1, q);
            }
        }
    }
}

RF_INLINE void run_fold(__m512 lane[RF_TILE_512][2], const rf_tiling *tiling, const uint8_t *record,
                        const rf_tile *in, uint32_t f, uint32_t tokens)
{
    const rf_panel_shape *s = &tiling->shape;
    const uint32_t block = f >> in->blocks_shift;
    const uint8_t *scales = record + tiling->record_bytes - RF_PANEL_SCALES * RF_PANEL_LINE;
    __m512i acc[RF_TILE_512][2];
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        acc[t][0] = acc[t][1] = _mm512_setzero_si512();
    }
    for (uint32_t i = 0; i < s->fold; i += 32) {
        dot_32(record + (size_t)i * 2 * RF_PANEL_512, in, (size_t)f * s->fold + i, acc, tokens);
    }
    rf_add_fold(lane, scales, in, block, acc, tokens);
    if (s->min_step != 0 && s->fold == 32) {
        rf_add_fold_sum(lane, scales + RF_PANEL_LINE, in, block, tokens);
    } else if (s->min_step != 0) {
        const uint32_t mins = s->fold / s->min_step;
        rf_min_sums(record + tiling->code_bytes, in, (size_t)f * mins, mins, acc, tokens);
        rf_add_fold(lane, scales + RF_PANEL_LINE, in, block, acc, tokens);
    }
}

RF_INLINE void run_tile(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums, uint32_t tokens)
{
    const uint8_t *record = tiling->panel;
    rf_lanes_512 lanes;
    for (uint32_t i = 0; i < RF_FOLD_LANES; i++) {
        __m512 lane[RF_TILE_512][2];
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            lane[t][0] = lane[t][1] = _mm512_setzero_ps();
        }
        for (uint32_t f = rf_lane_order[i]; f < tiling->folds; f += RF_FOLD_LANES) {
            rf_prefetch_some(&tiling->next);
            run_fold(lane, tiling, record, in, f, tokens);
            record += tiling->record_bytes;
        }
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            lanes.lane[t][0] = lane[t][0];
            lanes.lane[t][1] = lane[t][1];
        }
        rf_join_lane(&lanes, i, tokens);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        _mm512_storeu_ps(sums[t], lanes.lane[t][0]);
        _mm512_storeu_ps(sums[t] + 16, lanes.lane[t][1]);
    }
}

void rf_tile_words_avx512(rf_tiling *tiling, const rf_tile *in, uint32_t tokens, rf_tile_sums sums)
{
    if (tokens > 4) {
        run_tile(tiling, in, sums, 6);
    } else if (tokens > 2) {
        run_tile(tiling, in, sums, 4);
    } else {
        run_tile(tiling, in, sums, 2);
    }
}
