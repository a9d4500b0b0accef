/* kernels/panel_avx512.h: the panels of the AVX-512 matmuls: 32 rows unpacked for all tokens.
 *
 * A panel is a sequence of records, one a fold, in the order in which a tile walks them: lane by
 * lane (kernels.h: fold f belongs to lane f mod 8), the lanes 0 4 2 6 1 5 3 7, so that one lane's
 * sum lies in registers and two that are added follow each other.
 *
 *   record    codes | sub-scales | minimums | scale[32] | minimum's scale[32]
 *     codes        words: [fold / 2][32 rows][2 k] i16, scales folded in; no sub-scales then
 *                  bytes: [fold / 4][32 rows][4 k] u8, each more than the weight by the offset
 *     sub-scales   [fold / step][32] i32: sign-extended where p * scale is taken by vpmulld, else
 *                  16 bits under zeros (vpdpwssd with a p of 16 bits)
 *     minimums     [fold / step][32] i32: two words, code and 512 code: vpdpwssd takes a sum of
 *                  activations as two words, sum = low + 512 high
 *
 * Internal to kernels/, included by *_avx512.c only.
 */
#ifndef RF_KERNELS_PANEL_AVX512_H
#define RF_KERNELS_PANEL_AVX512_H

#include "kernels/avx512.h"

#define RF_PANEL_512    32u /* rows */
#define RF_PANEL_LINE   (RF_PANEL_512 * 4u)
#define RF_TILE_512     6u /* tokens of a tile: 12 sums, their operands and 12 more fit 32 */
#define RF_PANEL_SCALES 2u

/* What the code of a tile is compiled for: constants where it is used. */
typedef struct rf_panel_shape {
    uint32_t block, fold;
    uint32_t sub;      /* bytes: weights that share a sub-scale (16, 32); 0 without */
    uint32_t min_step; /* weights that share a minimum (16, 32); 0 without */
    uint32_t offset;   /* bytes: code = weight + offset */
    bool wide;         /* bytes: the sum of a sub-block does not fit 16 bits */
} rf_panel_shape;

RF_INLINE uint32_t rf_panel_code_bytes(const rf_panel_shape *s, bool words)
{
    return s->fold * RF_PANEL_512 * (words ? 2u : 1u);
}
RF_INLINE uint32_t rf_panel_record_bytes(const rf_panel_shape *s, bool words)
{
    const uint32_t subs = words || s->sub == 0 ? 0 : s->fold / s->sub;
    const uint32_t mins = s->min_step == 0 || s->fold == 32 ? 0 : s->fold / s->min_step;
    return rf_panel_code_bytes(s, words) + (subs + mins + RF_PANEL_SCALES) * RF_PANEL_LINE;
}

/* The order of the lanes, and where the record of fold f lies. */
static const uint8_t rf_lane_order[RF_FOLD_LANES] = {0, 4, 2, 6, 1, 5, 3, 7};
typedef struct rf_walk {
    uint32_t start[RF_FOLD_LANES]; /* of a lane's first record */
} rf_walk;
RF_INLINE rf_walk rf_walk_of(uint32_t folds)
{
    rf_walk walk;
    uint32_t at = 0;
    for (uint32_t i = 0; i < RF_FOLD_LANES; i++) {
        const uint32_t lane = rf_lane_order[i];
        walk.start[lane] = at;
        at += (folds + RF_FOLD_LANES - 1 - lane) / RF_FOLD_LANES;
    }
    return walk;
}
RF_INLINE uint32_t rf_walk_place(const rf_walk *walk, uint32_t fold)
{
    return walk->start[fold % RF_FOLD_LANES] + fold / RF_FOLD_LANES;
}

/* Rows [row, row + count) of a job, count <= RF_PANEL_512; rows beyond repeat the last. */
void rf_panel_words_avx512(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel);
void rf_panel_bytes_avx512(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel);

rf_panel_shape rf_panel_shape_of(rf_format format);

#endif
