/* kernels/tile_avx512.h: a tile of the AVX-512 matmuls: 32 rows of a panel times at most six
 * tokens, walked fold by fold; what both widths of codes share.
 *
 * Internal to kernels/, included by *_avx512.c only.
 */
#ifndef RF_KERNELS_TILE_AVX512_H
#define RF_KERNELS_TILE_AVX512_H

#include "kernels/panel_avx512.h"

/* Tokens of a tile: pointers into their packed rows, and what rf_tile_prepare puts into scratch. */
typedef struct rf_tile {
    const uint8_t *q[RF_TILE_512];
    const float *scale[RF_TILE_512];        /* of each block */
    const int32_t *mins[RF_TILE_512];       /* sums as two words; folds of 32: sums as floats */
    const int32_t *start[RF_TILE_512];      /* bytes: -offset * sum of q of a sub-block (or fold) */
    const int32_t *multiplier[RF_TILE_512]; /* bytes, blocks of 256: {m, 1} as two words, per 32 */
    uint32_t blocks_shift;                  /* fold >> this: its block */
} rf_tile;

/* Lines of the next panel's packed bytes, asked for while this one computes: a few a fold. */
typedef struct rf_ahead {
    uintptr_t at, end;
    uint32_t lines;
} rf_ahead;

RF_INLINE void rf_prefetch_some(rf_ahead *next)
{
    for (uint32_t i = 0; i < next->lines && next->at < next->end; i++, next->at += 64) {
        _mm_prefetch((const char *)next->at, _MM_HINT_T1);
    }
}

/* Everything that one matmul in tiles works with. */
typedef struct rf_tiling {
    rf_panel_shape shape;
    uint32_t folds, record_bytes, code_bytes;
    const uint8_t *panel;
    rf_ahead next;
} rf_tiling;

typedef float rf_tile_sums[RF_TILE_512][RF_PANEL_512];

/* The lanes of kernels.h arrive in the order of rf_lane_order; they are added 4, 2, 1 apart as soon
 * as both are there, like the carries of a counter. */
typedef struct rf_lanes_512 {
    __m512 lane[RF_TILE_512][2], kept[3][RF_TILE_512][2];
} rf_lanes_512;

RF_INLINE void rf_join_lane(rf_lanes_512 *s, uint32_t i, uint32_t tokens)
{
    uint32_t level = 0;
    for (; i >> level & 1; level++) {
        for (uint32_t t = 0; t < tokens; t++) {
            s->lane[t][0] = _mm512_add_ps(s->kept[level][t][0], s->lane[t][0]);
            s->lane[t][1] = _mm512_add_ps(s->kept[level][t][1], s->lane[t][1]);
        }
    }
    for (uint32_t t = 0; t < tokens && level < 3; t++) {
        s->kept[level][t][0] = s->lane[t][0];
        s->kept[level][t][1] = s->lane[t][1];
    }
}

/* lane += scale * activation's scale * the exact sums of a fold. */
RF_INLINE void rf_add_fold(__m512 lane[RF_TILE_512][2], const uint8_t *scales, const rf_tile *in,
                           uint32_t block, __m512i acc[RF_TILE_512][2], uint32_t tokens)
{
    const __m512 s0 = _mm512_loadu_ps((const float *)(const void *)scales);
    const __m512 s1 = _mm512_loadu_ps((const float *)(const void *)(scales + 64));
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        const __m512 a = _mm512_set1_ps(in->scale[t][block]);
        lane[t][0] =
            _mm512_fmadd_ps(_mm512_mul_ps(s0, a), _mm512_cvtepi32_ps(acc[t][0]), lane[t][0]);
        lane[t][1] =
            _mm512_fmadd_ps(_mm512_mul_ps(s1, a), _mm512_cvtepi32_ps(acc[t][1]), lane[t][1]);
    }
}

/* The exact sums of a fold's minimums: codes of the panel times sums of activations. */
RF_INLINE void rf_min_sums(const uint8_t *mins, const rf_tile *in, size_t first, uint32_t count,
                           __m512i acc[RF_TILE_512][2], uint32_t tokens)
{
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        acc[t][0] = acc[t][1] = _mm512_setzero_si512();
    }
    for (uint32_t j = 0; j < count; j++) {
        const __m512i m0 = rf_load_512(mins + (size_t)j * RF_PANEL_LINE);
        const __m512i m1 = rf_load_512(mins + (size_t)j * RF_PANEL_LINE + 64);
#pragma GCC unroll 6
        for (uint32_t t = 0; t < tokens; t++) {
            const __m512i sum = rf_broadcast_4(in->mins[t] + first + j);
            rf_dot_words(&acc[t][0], m0, sum);
            rf_dot_words(&acc[t][1], m1, sum);
        }
    }
}

/* Folds of 32 with a minimum (q4_1, q5_1): its code is 1. */
RF_INLINE void rf_add_fold_sum(__m512 lane[RF_TILE_512][2], const uint8_t *scales,
                               const rf_tile *in, uint32_t block, uint32_t tokens)
{
    const __m512 s0 = _mm512_loadu_ps((const float *)(const void *)scales);
    const __m512 s1 = _mm512_loadu_ps((const float *)(const void *)(scales + 64));
#pragma GCC unroll 6
    for (uint32_t t = 0; t < tokens; t++) {
        const __m512 a = _mm512_set1_ps(in->scale[t][block]);
        const __m512 sum = _mm512_castsi512_ps(rf_broadcast_4(in->mins[t] + block));
        lane[t][0] = _mm512_fmadd_ps(_mm512_mul_ps(s0, a), sum, lane[t][0]);
        lane[t][1] = _mm512_fmadd_ps(_mm512_mul_ps(s1, a), sum, lane[t][1]);
    }
}

/* 4-byte elements of scratch that one token of a tile takes at most. */
RF_INLINE size_t rf_tile_spare(uint32_t k)
{
    return (size_t)k / 16 + k / 32 + k / 16;
}

/* Tokens are at most RF_TILE_512; sums of pointers that are repeated are dropped. */
void rf_tile_words_avx512(rf_tiling *tiling, const rf_tile *in, uint32_t tokens, rf_tile_sums sums);
void rf_tile_bytes_avx512(rf_tiling *tiling, const rf_tile *in, uint32_t tokens, rf_tile_sums sums);

#endif
