/* kernels/matmul_bytes_avx512.c: tiles of 32 rows x 6 tokens over panels of bytes: int8 activations
 * by vpdpbusd. Codes are unsigned; what they exceed the weights by is taken back in the value that
 * a sum starts from, which a token knows.
 *
 * Instructions for each 64 products of 16 rows, of which 1 is the vpdpbusd that the peak counts
 * (vpmulld is two on Intel):
 *   blocks of 32            1 + 3/8            convert, scale * scale, fma
 *   q4_K (q5_K)             1 + (3 + 1)/8      p * (scale * m), add; minimum; 6 (12) for each 256
 *   q2_K                    1 + (4 + 2)/8
 *   q3_K                    1 + 4/8
 *   q6_K                    1 + 6/8 + 3/16
 */
#include "kernels/tile_avx512.h"

typedef enum kind { BLOCKS_OF_32, NARROW, WIDE } kind;

/* 16 k of 32 rows. */
RF_INLINE void dot_16(const uint8_t *codes, const rf_tile *in, size_t at, __m512i p[RF_TILE_512][2],
                      uint32_t tokens)
{
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        const __m512i w0 = rf_load_512(codes + (size_t)i * RF_PANEL_LINE);
        const __m512i w1 = rf_load_512(codes + (size_t)i * RF_PANEL_LINE + 64);
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            __m512i q = rf_broadcast_4(in->q[t] + at + 4 * i);
            RF_PIN(q);
            rf_dot_bytes(&p[t][0], w0, q);
            rf_dot_bytes(&p[t][1], w1, q);
        }
    }
}

RF_INLINE void start_sums(const rf_tile *in, size_t index, __m512i p[RF_TILE_512][2],
                          uint32_t tokens)
{
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        p[t][0] = p[t][1] = rf_broadcast_4(in->start[t] + index);
    }
}

/* acc += p * scale * m for one sub-block. */
RF_INLINE void add_scaled(__m512i p[RF_TILE_512][2], const uint8_t *scales, const rf_tile *in,
                          size_t index_32, __m512i acc[RF_TILE_512][2], kind how, uint32_t tokens)
{
    const __m512i s0 = rf_load_512(scales), s1 = rf_load_512(scales + 64);
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        __m512i m = rf_broadcast_4(in->multiplier[t] + index_32);
        RF_PIN(m);
        const __m512i f0 = _mm512_mullo_epi16(s0, m), f1 = _mm512_mullo_epi16(s1, m);
        if (how == WIDE) {
            acc[t][0] = _mm512_add_epi32(acc[t][0], _mm512_mullo_epi32(p[t][0], f0));
            acc[t][1] = _mm512_add_epi32(acc[t][1], _mm512_mullo_epi32(p[t][1], f1));
        } else {
            rf_dot_words(&acc[t][0], p[t][0], f0);
            rf_dot_words(&acc[t][1], p[t][1], f1);
        }
    }
}

/* One fold of a format with sub-blocks. */
RF_INLINE void fold_of_subs(__m512 lane[RF_TILE_512][2], const rf_tiling *tiling,
                            const uint8_t *record, const rf_tile *in, uint32_t fold, kind how,
                            uint32_t tokens)
{
    const rf_panel_shape *s = &tiling->shape;
    const uint32_t sub = s->sub, subs = s->fold / sub;
    const uint8_t *codes = record, *scales = record + tiling->code_bytes;
    size_t at = (size_t)fold * s->fold;
    __m512i acc[RF_TILE_512][2], p[RF_TILE_512][2];
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        acc[t][0] = acc[t][1] = _mm512_setzero_si512();
    }
    for (uint32_t j = 0; j < subs; j++, scales += RF_PANEL_LINE) {
        const size_t index_32 = at / 32;
        start_sums(in, (size_t)fold * subs + j, p, tokens);
        for (uint32_t i = 0; i < sub; i += 16, at += 16, codes += 4 * RF_PANEL_LINE) {
            dot_16(codes, in, at, p, tokens);
        }
        add_scaled(p, scales, in, index_32, acc, how, tokens);
    }
    const uint32_t block = fold >> in->blocks_shift;
    const uint8_t *row_scales = record + tiling->record_bytes - RF_PANEL_SCALES * RF_PANEL_LINE;
    rf_add_fold(lane, row_scales, in, block, acc, tokens);
    if (s->min_step != 0) {
        const uint32_t mins = s->fold / s->min_step;
        rf_min_sums(scales, in, (size_t)fold * mins, mins, acc, tokens);
        rf_add_fold(lane, row_scales + RF_PANEL_LINE, in, block, acc, tokens);
    }
}

/* One fold of a format with blocks of 32. */
RF_INLINE void fold_of_32(__m512 lane[RF_TILE_512][2], const rf_tiling *tiling,
                          const uint8_t *record, const rf_tile *in, uint32_t fold, uint32_t tokens)
{
    __m512i p[RF_TILE_512][2];
    start_sums(in, fold, p, tokens);
    dot_16(record, in, (size_t)fold * 32, p, tokens);
    dot_16(record + 4 * RF_PANEL_LINE, in, (size_t)fold * 32 + 16, p, tokens);
    rf_add_fold(lane, record + 8 * RF_PANEL_LINE, in, fold, p, tokens);
    if (tiling->shape.min_step != 0) {
        rf_add_fold_sum(lane, record + 9 * RF_PANEL_LINE, in, fold, tokens);
    }
}

RF_INLINE void run_tile(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums, kind how,
                        uint32_t tokens)
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
            if (how == BLOCKS_OF_32) {
                fold_of_32(lane, tiling, record, in, f, tokens);
            } else {
                RF_KEEP_IN_MEMORY(lane); /* the registers are for the sums */
                fold_of_subs(lane, tiling, record, in, f, how, tokens);
            }
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

RF_INLINE void run_tile_of(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums, uint32_t tokens)
{
    if (tiling->shape.sub == 0) {
        run_tile(tiling, in, sums, BLOCKS_OF_32, tokens);
    } else if (tiling->shape.wide) {
        run_tile(tiling, in, sums, WIDE, tokens);
    } else {
        run_tile(tiling, in, sums, NARROW, tokens);
    }
}

static __attribute__((noinline)) void run_6(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums)
{
    run_tile_of(tiling, in, sums, 6);
}

static __attribute__((noinline)) void run_4(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums)
{
    run_tile_of(tiling, in, sums, 4);
}

static __attribute__((noinline)) void run_2(rf_tiling *tiling, const rf_tile *in, rf_tile_sums sums)
{
    run_tile_of(tiling, in, sums, 2);
}

void rf_tile_bytes_avx512(rf_tiling *tiling, const rf_tile *in, uint32_t tokens, rf_tile_sums sums)
{
    if (tokens > 4) {
        run_6(tiling, in, sums);
    } else if (tokens > 2) {
        run_4(tiling, in, sums);
    } else {
        run_2(tiling, in, sums);
    }
}
