/* kernels/attend_avx2.h: what attention on floats and attention on int8 codes share: the shapes in
 * which queries are worked on together, and the sums of eight vectors at once.
 *
 * Internal to kernels/, included by *_avx2.c only.
 */
#ifndef RF_KERNELS_ATTEND_AVX2_H
#define RF_KERNELS_ATTEND_AVX2_H

#include "kernels/avx2.h"

#define RF_ATTEND_GROUP 8u /* queries whose scores are in hand together */
#define RF_ATTEND_TILE  4u /* of them, whose sums are in registers together */

/* Scores, then weights, of one query; 8 behind the block for whole vectors from any position. */
typedef float rf_attend_line[RF_ATTEND_BLOCK + 8];

/* Of two queries or positions x and y: lanes 4 apart added, x in the lower half. */
RF_INLINE __m256 rf_add_4_apart(__m256 x, __m256 y)
{
    return _mm256_add_ps(_mm256_blend_ps(x, y, 0xF0), _mm256_permute2f128_ps(x, y, 0x21));
}

/* Lanes of vector i added 2 and 1 apart, in lane i of the result; v[i] = rf_add_4_apart of the
 * vectors i and i + 4. */
RF_INLINE __m256 rf_add_2_1_apart(const __m256 v[4])
{
    __m256 two[2];
    for (int i = 0; i < 2; i++) {
        two[i] = _mm256_add_ps(_mm256_blend_ps(v[i], v[i + 2], 0xCC),
                               _mm256_shuffle_ps(v[i], v[i + 2], 0x4E));
    }
    const __m256 swapped = _mm256_permute_ps(_mm256_blend_ps(two[0], two[1], 0x55), 0xB1);
    return _mm256_add_ps(_mm256_blend_ps(two[0], two[1], 0xAA), swapped);
}

/* Element i of the result: lanes of v[i] added 4, 2, 1 apart. */
RF_INLINE __m256 rf_add_each_of_8(const __m256 v[8])
{
    const __m256 fours[4] = {rf_add_4_apart(v[0], v[4]), rf_add_4_apart(v[1], v[5]),
                             rf_add_4_apart(v[2], v[6]), rf_add_4_apart(v[3], v[7])};
    return rf_add_2_1_apart(fours);
}

/* The same of integers. */
RF_INLINE __m256i rf_add_i32_4_apart(__m256i x, __m256i y)
{
    return _mm256_add_epi32(_mm256_blend_epi32(x, y, 0xF0), _mm256_permute2x128_si256(x, y, 0x21));
}

RF_INLINE __m256i rf_add_i32_2_1_apart(const __m256i v[4])
{
    __m256i two[2];
    for (int i = 0; i < 2; i++) {
        two[i] = _mm256_add_epi32(_mm256_blend_epi32(v[i], v[i + 2], 0xCC),
                                  _mm256_alignr_epi8(v[i + 2], v[i], 8));
    }
    const __m256i swapped = _mm256_shuffle_epi32(_mm256_blend_epi32(two[0], two[1], 0x55), 0xB1);
    return _mm256_add_epi32(_mm256_blend_epi32(two[0], two[1], 0xAA), swapped);
}

RF_INLINE const uint8_t *rf_attend_row(const rf_attend_rows *rows, uint32_t j)
{
    return (const uint8_t *)rows->rows + j * rows->stride;
}

/* The eight rows from position j on; past the end the last one again. */
RF_INLINE void rf_attend_rows_of_8(const rf_attend_rows *k, uint32_t j, uint32_t last,
                                   const uint8_t *rows[8])
{
    const uint8_t *row = rf_attend_row(k, j);
    for (uint32_t p = 0; p < 8; p++) {
        rows[p] = row;
        row += j + p + 1 < last ? k->stride : 0;
    }
}

/* The rows of the block behind, which are asked for all along the arithmetic of this one, keys
 * first: a core waits for some two dozen lines at once, and who asks for a block's 130 in a row
 * stands still. The addresses may lie behind all rows. (bench/store on Zen 3, best of three
 * runs: r8 37.6 ns a position in a row, 34.0 all along; f16 41.3 and 37.6.) */
typedef struct rf_attend_ahead {
    uintptr_t at, next_at; /* of keys, then of values */
    uint64_t lines, next_lines;
    uint32_t rate;    /* bytes for each 1024 multiply-adds */
    uint32_t unasked; /* 1024ths of bytes that are due, less than a line */
} rf_attend_ahead;

/* So many multiply-adds are next. */
RF_INLINE void rf_ask_ahead(rf_attend_ahead *ahead, uint32_t macs)
{
    const uint64_t due = ahead->unasked + (uint64_t)macs * ahead->rate;
    uint64_t lines = RF_MIN(due >> 16, ahead->lines);
    ahead->unasked = (uint32_t)(due & 0xFFFF);
    ahead->lines -= lines;
    for (; lines > 0; lines--, ahead->at += RF_CACHE_LINE) {
        _mm_prefetch((const char *)ahead->at, _MM_HINT_T0);
    }
    if (ahead->lines == 0) {
        ahead->at = ahead->next_at;
        ahead->lines = ahead->next_lines;
        ahead->next_lines = 0;
    }
}

/* kv_attend_avx2.c. These make a side of int8 rows, as far as somebody sees them, what the two
 * below read: scales in a line for each span, and codes of keys in columns. */
void rf_attend_line_up_scales_avx2(rf_attend_rows *rows, rf_attend_range seen, void *scratch);
void rf_attend_turn_codes_avx2(rf_attend_rows *k, rf_attend_range seen, void *scratch);
void rf_attend_weights_avx2(const rf_attend *job, uint32_t span, uint32_t count,
                            rf_attend_range seen, rf_attend_line *p, rf_attend_line *weights);

/* How a form of rows is scored and added: count <= RF_ATTEND_GROUP queries from query on, positions
 * of seen. Scores of whole eights are stored; adding multiplies out by keep first. BF16 rows are
 * widened before. */
typedef void rf_attend_score(const rf_attend *job, uint32_t query, uint32_t count,
                             rf_attend_range seen, rf_attend_line *scores, rf_attend_ahead *ahead);
typedef void rf_attend_add(const rf_attend *job, uint32_t query, uint32_t count,
                           rf_attend_range seen, rf_attend_line *weights, const float *keep,
                           rf_attend_ahead *ahead);
typedef struct rf_attend_way {
    rf_attend_score *score;
    rf_attend_add *add;
} rf_attend_way;
rf_attend_score rf_attend_score_f32_avx2, rf_attend_score_f16_avx2, rf_attend_score_codes_avx2;
rf_attend_add rf_attend_add_f32_avx2, rf_attend_add_f16_avx2, rf_attend_add_codes_avx2;

/* Tiles of four, and what is left; i counts the queries that are done. */
#define RF_ATTEND_EACH_TILE(call, ...)                                                             \
    for (uint32_t i = 0; i < count; i += RF_ATTEND_TILE) {                                         \
        switch (count - i) {                                                                       \
        case 1:                                                                                    \
            call(job, query + i, 1, __VA_ARGS__);                                                  \
            break;                                                                                 \
        case 2:                                                                                    \
            call(job, query + i, 2, __VA_ARGS__);                                                  \
            break;                                                                                 \
        case 3:                                                                                    \
            call(job, query + i, 3, __VA_ARGS__);                                                  \
            break;                                                                                 \
        default:                                                                                   \
            call(job, query + i, 4, __VA_ARGS__);                                                  \
            break;                                                                                 \
        }                                                                                          \
    }

/* attend_avx2.c: rf_attend_fn with these ways of a form. */
void rf_attend_by(const rf_attend *asked, const rf_attend_way ways[RF_ATTEND_INT8 + 1]);

#endif
