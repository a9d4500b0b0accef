/* kernels/attend_avx2.c: attention over one block of positions: the loop over queries for all
 * forms of rows, and scores and weighted sums of rows of floats.
 *
 * Up to eight queries that follow each other go together: scores of 4 queries x 2 positions in
 * registers, softmax over positions, then the weighted sum of V for 4 queries x 16 dimensions. f16
 * rows are widened on their way into a register. With more queries than one group the block's rows
 * are widened once, into scratch. Every sum is that of kernels.h, so it does not matter who goes
 * with whom: a position that a query does not see has the score -inf, so the weight 0.
 */
#include "kernels/attend_avx2.h"

/* ---- scores ------------------------------------------------------------------------------- */

RF_INLINE __m256 load_8(const uint8_t *row, uint32_t d, rf_attend_form form)
{
    if (form == RF_ATTEND_F16) {
        return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(row + 2 * d)));
    }
    return rf_load_once((const float *)(const void *)row + d);
}

/* sums[i][p] = eight lanes of q_i . row p, for n queries and the positions of `rows`. */
RF_INLINE void dots(const float *q, uint64_t q_stride, uint32_t n, const uint8_t *const rows[],
                    uint32_t positions, uint32_t width, rf_attend_form form,
                    __m256 sums[RF_ATTEND_TILE][8])
{
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
#pragma GCC unroll 8
        for (uint32_t p = 0; p < positions; p++) {
            sums[i][p] = _mm256_setzero_ps();
        }
    }
    for (uint32_t d = 0; d < width; d += 8) {
        __m256 row[8];
#pragma GCC unroll 8
        for (uint32_t p = 0; p < positions; p++) {
            row[p] = load_8(rows[p], d, form);
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            const __m256 x = rf_load_once(q + i * q_stride + d);
#pragma GCC unroll 8
            for (uint32_t p = 0; p < positions; p++) {
                sums[i][p] = _mm256_fmadd_ps(x, row[p], sums[i][p]);
            }
        }
    }
}

/* n queries, and as many positions at a time as make eight sums (twelve of three queries). */
RF_INLINE void score_tile(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_form form,
                          rf_attend_range seen, rf_attend_line *scores, rf_attend_ahead *ahead)
{
    const uint32_t pairs = n == 1 ? 4 : (n == 4 ? 1 : 2), width = job->k.width;
    const float *q = job->q + query * job->q_stride;
    const __m256 scale = _mm256_set1_ps(job->scale);
    for (uint32_t j = seen.first; j < seen.last; j += 8) {
        const uint8_t *rows[8];
        __m256 fours[RF_ATTEND_TILE][4];
        rf_attend_rows_of_8(&job->k, j, seen.last, rows);
        rf_ask_ahead(ahead, 8 * n * width);
#pragma GCC unroll 4
        for (uint32_t h = 0; h < 4; h += pairs) {
            __m256 sums[RF_ATTEND_TILE][8];
            const uint8_t *some[8];
            for (uint32_t p = 0; p < pairs; p++) {
                some[p] = rows[h + p];
                some[pairs + p] = rows[h + p + 4];
            }
            dots(q, job->q_stride, n, some, 2 * pairs, width, form, sums);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < n; i++) {
                for (uint32_t p = 0; p < pairs; p++) {
                    fours[i][h + p] = rf_add_4_apart(sums[i][p], sums[i][pairs + p]);
                }
            }
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            _mm256_storeu_ps(scores[i] + j, _mm256_mul_ps(rf_add_2_1_apart(fours[i]), scale));
        }
    }
}

void rf_attend_score_f32_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                              rf_attend_range seen, rf_attend_line *scores, rf_attend_ahead *ahead)
{
    RF_ATTEND_EACH_TILE(score_tile, RF_ATTEND_F32, seen, scores + i, ahead)
}

void rf_attend_score_f16_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                              rf_attend_range seen, rf_attend_line *scores, rf_attend_ahead *ahead){
    RF_ATTEND_EACH_TILE(score_tile, RF_ATTEND_F16, seen, scores + i, ahead)}

/* ---- values ------------------------------------------------------------------------------- */

/* n queries, 8 * parts dimensions from d on. */
RF_INLINE void add_part(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_form form,
                        rf_attend_range seen, rf_attend_line *weights, const float *keep,
                        uint32_t d, uint32_t parts, rf_attend_ahead *ahead)
{
    __m256 acc[RF_ATTEND_TILE][8];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        const float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            acc[i][h] = _mm256_mul_ps(_mm256_loadu_ps(out + 8 * h), _mm256_set1_ps(keep[i]));
        }
    }
    const uint8_t *v = rf_attend_row(&job->v, seen.first);
    rf_ask_ahead(ahead, n * 8 * parts * (seen.last - seen.first));
    for (uint32_t j = seen.first; j < seen.last; j++) {
        __m256 row[8];
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            row[h] = load_8(v, d + 8 * h, form);
        }
#pragma GCC unroll 4
        for (uint32_t i = 0; i < n; i++) {
            const __m256 p = _mm256_broadcast_ss(&weights[i][j]);
#pragma GCC unroll 8
            for (uint32_t h = 0; h < parts; h++) {
                acc[i][h] = _mm256_fmadd_ps(p, row[h], acc[i][h]);
            }
        }
        v += job->v.stride;
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < n; i++) {
        float *out = job->out + (query + i) * job->out_stride + d;
#pragma GCC unroll 8
        for (uint32_t h = 0; h < parts; h++) {
            _mm256_storeu_ps(out + 8 * h, _mm256_add_ps(acc[i][h], _mm256_setzero_ps()));
        }
    }
}

/* As many sums as registers hold beside a row: 8 of one query, 8 of two, 12 of three, 8 of four. */
RF_INLINE void add_tile(const rf_attend *job, uint32_t query, uint32_t n, rf_attend_form form,
                        rf_attend_range seen, rf_attend_line *weights, const float *keep,
                        rf_attend_ahead *ahead)
{
    const uint32_t most = n == 1 ? 8 : (n == 4 ? 2 : 4), width = job->v.width;
    uint32_t d = 0;
    for (; d + 8 * most <= width; d += 8 * most) {
        add_part(job, query, n, form, seen, weights, keep, d, most, ahead);
    }
    for (; most > 2 && d + 16 <= width; d += 16) {
        add_part(job, query, n, form, seen, weights, keep, d, 2, ahead);
    }
    for (; d < width; d += 8) {
        add_part(job, query, n, form, seen, weights, keep, d, 1, ahead);
    }
}

void rf_attend_add_f32_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                            rf_attend_range seen, rf_attend_line *weights, const float *keep,
                            rf_attend_ahead *ahead)
{
    RF_ATTEND_EACH_TILE(add_tile, RF_ATTEND_F32, seen, weights + i, keep + i, ahead)
}

void rf_attend_add_f16_avx2(const rf_attend *job, uint32_t query, uint32_t count,
                            rf_attend_range seen, rf_attend_line *weights, const float *keep,
                            rf_attend_ahead *ahead)
{
    RF_ATTEND_EACH_TILE(add_tile, RF_ATTEND_F16, seen, weights + i, keep + i, ahead)
}

/* ---- softmax ------------------------------------------------------------------------------ */

/* The largest scores of a query in eight lanes; scores beside what it sees become -inf, to the ends
 * of `all` in whole thirty-twos. Behind the last one whole eights have scores of some kind. */
static __m256 tops_of(float *scores, rf_attend_range seen, rf_attend_range all)
{
    const __m256 none = _mm256_set1_ps(-__builtin_inff());
    const uint32_t end = (all.last + 31) & ~31u;
    for (uint32_t j = all.first & ~31u; j < seen.first; j++) {
        scores[j] = -__builtin_inff();
    }
    uint32_t j = seen.last & ~7u;
    if (j != seen.last) {
        const __m256 taken = rf_first_lanes(seen.last - j);
        _mm256_storeu_ps(scores + j, _mm256_blendv_ps(none, _mm256_loadu_ps(scores + j), taken));
        j += 8;
    }
    for (; j < end; j += 8) {
        _mm256_storeu_ps(scores + j, none);
    }
    __m256 top[2] = {none, none};
    for (j = all.first & ~31u; j < all.last; j += 16) {
        top[0] = _mm256_max_ps(_mm256_loadu_ps(scores + j), top[0]); /* it wins over a NaN */
        top[1] = _mm256_max_ps(_mm256_loadu_ps(scores + j + 8), top[1]);
    }
    return _mm256_max_ps(top[0], top[1]);
}

/* Element i: the largest lane of v[i]. */
static __m256 max_each_of_8(const __m256 v[8])
{
    __m256 four[4], two[2];
    for (int i = 0; i < 4; i++) {
        four[i] = _mm256_max_ps(_mm256_permute2f128_ps(v[i], v[i + 4], 0x20),
                                _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    }
    for (int i = 0; i < 2; i++) {
        two[i] = _mm256_max_ps(_mm256_unpacklo_ps(four[i], four[i + 2]),
                               _mm256_unpackhi_ps(four[i], four[i + 2]));
    }
    return _mm256_max_ps(_mm256_unpacklo_ps(two[0], two[1]), _mm256_unpackhi_ps(two[0], two[1]));
}

/* Scores to weights, in place; the lanes of their sum. */
static __m256 weigh(float *scores, rf_attend_range all, __m256 top)
{
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps(), p[4];
    for (uint32_t j = all.first & ~31u; j < all.last; j += 32) {
        float *at = scores + j;
        for (uint32_t e = 0; e < 4; e++) {
            p[e] = _mm256_sub_ps(_mm256_loadu_ps(at + 8 * e), top);
        }
        rf_exp_each(p, 4);
        for (uint32_t e = 0; e < 4; e++) {
            _mm256_storeu_ps(at + 8 * e, p[e]);
        }
        low = _mm256_add_ps(_mm256_add_ps(low, p[0]), p[2]);
        high = _mm256_add_ps(_mm256_add_ps(high, p[1]), p[3]);
    }
    return _mm256_add_ps(low, high);
}

/* Goes on with the states of count <= RF_ATTEND_GROUP queries. */
static void soften(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range all,
                   rf_attend_line *scores, float keep[RF_ATTEND_GROUP])
{
    float *state = job->state + 2 * (size_t)query;
    float max[RF_ATTEND_GROUP] = {0}, sum[RF_ATTEND_GROUP] = {0};
    __m256 lanes[RF_ATTEND_GROUP];
#pragma GCC unroll 8
    for (uint32_t i = 0; i < RF_ATTEND_GROUP; i++) {
        lanes[i] = _mm256_setzero_ps();
    }
    for (uint32_t i = 0; i < count; i++) {
        max[i] = state[2 * i];
        sum[i] = state[2 * i + 1];
        lanes[i] = tops_of(scores[i], job->visible[query + i], all);
    }
    const __m256 old = _mm256_loadu_ps(max);
    const __m256 top = _mm256_add_ps(_mm256_max_ps(max_each_of_8(lanes), old), _mm256_setzero_ps());
    const __m256 kept = rf_exp_ymm(_mm256_sub_ps(old, top));
    _mm256_storeu_ps(max, top);
    for (uint32_t i = 0; i < count; i++) {
        lanes[i] = weigh(scores[i], all, _mm256_broadcast_ss(&max[i]));
    }
    _mm256_storeu_ps(keep, kept);
    _mm256_storeu_ps(
        sum, _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(sum), kept), rf_add_each_of_8(lanes)));
    for (uint32_t i = 0; i < count; i++) {
        state[2 * i] = max[i];
        state[2 * i + 1] = sum[i];
    }
}

/* ---- the block ---------------------------------------------------------------------------- */

/* Queries that see something, and together the positions of `all`. */
static void attend_group(const rf_attend *job, uint32_t query, uint32_t count, rf_attend_range all,
                         const rf_attend_way *ways, rf_attend_ahead *ahead)
{
    rf_attend_line scores[RF_ATTEND_GROUP];
    float keep[RF_ATTEND_GROUP];
    ways[job->k.form].score(job, query, count, all, scores, ahead);
    soften(job, query, count, all, scores, keep);
    ways[job->v.form].add(job, query, count, all, scores, keep, ahead);
}

/* Rows that somebody sees as floats in scratch. */
static void widen(rf_attend_rows *rows, rf_attend_range seen, float *scratch)
{
    const uint32_t width = rows->width;
    for (uint32_t j = seen.first; j < seen.last; j++) {
        const uint8_t *from = rf_attend_row(rows, j);
        float *to = scratch + (size_t)j * width;
        for (uint32_t d = 0; d < width; d += 8) {
            const __m128i half = _mm_loadu_si128((const __m128i *)(const void *)(from + 2 * d));
            const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
            const bool is_f16 = rows->form == RF_ATTEND_F16;
            _mm256_storeu_ps(to + d, is_f16 ? _mm256_cvtph_ps(half) : _mm256_castsi256_ps(bits));
        }
    }
    rows->rows = scratch;
    rows->stride = width * sizeof(float);
    rows->form = RF_ATTEND_F32;
}

static rf_attend_range seen_by_any(const rf_attend *job)
{
    rf_attend_range all = {RF_ATTEND_BLOCK, 0};
    for (uint32_t i = 0; i < job->query_count; i++) {
        const rf_attend_range seen = job->visible[i];
        if (seen.first < seen.last) {
            all.first = RF_MIN(all.first, seen.first);
            all.last = RF_MAX(all.last, seen.last);
        }
    }
    return all;
}

/* The rows in the forms that the loop below reads, in scratch where they are not there yet. */
static void prepare(rf_attend *job)
{
    const bool is_many = job->query_count > RF_ATTEND_GROUP;
    const rf_attend_range seen = seen_by_any(job);
    if (seen.first >= seen.last) {
        return; /* nobody sees anything */
    }
    float *scratch = (float *)job->scratch + RF_ATTEND_BLOCK;
    rf_attend_rows *sides[2] = {&job->k, &job->v};
    for (int side = 0; side < 2; side++) {
        rf_attend_rows *rows = sides[side];
        if (rows->form == RF_ATTEND_BF16 || (is_many && rows->form == RF_ATTEND_F16)) {
            widen(rows, seen, scratch);
        } else if (rows->form == RF_ATTEND_INT8) {
            rf_attend_line_up_scales_avx2(rows, seen, scratch + RF_ATTEND_BLOCK * rows->width);
            if (side == 0) {
                rf_attend_turn_codes_avx2(rows, seen, scratch);
            }
        }
        scratch += (RF_ATTEND_BLOCK + sizeof(rf_attend_line) / 32) * (size_t)rows->width;
    }
}

static rf_attend_ahead ahead_of(const rf_attend *job)
{
    const uint64_t keys = job->k.stride * RF_ATTEND_BLOCK, values = job->v.stride * RF_ATTEND_BLOCK;
    const uint64_t macs = (uint64_t)job->query_count * (job->k.width + job->v.width);
    const uint64_t bytes = job->k.stride + job->v.stride;
    return (rf_attend_ahead){.at = (uintptr_t)job->k.rows + keys,
                             .lines = keys / RF_CACHE_LINE,
                             .next_at = (uintptr_t)job->v.rows + values,
                             .next_lines = values / RF_CACHE_LINE,
                             .rate = (uint32_t)(bytes * 1024 / RF_MAX(macs, 1u)) + 1};
}

void rf_attend_by(const rf_attend *asked, const rf_attend_way ways[RF_ATTEND_INT8 + 1])
{
    rf_attend held = *asked;
    const rf_attend *job = &held;
    rf_attend_ahead ahead = ahead_of(job);
    prepare(&held);
    for (uint32_t i = 0; i < held.query_count;) {
        rf_attend_range all = held.visible[i];
        uint32_t count = 1;
        for (; count < RF_ATTEND_GROUP && i + count < held.query_count; count++) {
            const rf_attend_range seen = held.visible[i + count];
            if (all.first >= all.last || seen.first >= seen.last) {
                break;
            }
            all.first = RF_MIN(all.first, seen.first);
            all.last = RF_MAX(all.last, seen.last);
        }
        if (all.first < all.last) {
            attend_group(job, i, count, all, ways, &ahead);
        }
        i += count;
    }
}

void rf_attend_avx2(const rf_attend *job)
{
    static const rf_attend_way ways[RF_ATTEND_INT8 + 1] = {
        [RF_ATTEND_F32] = {rf_attend_score_f32_avx2, rf_attend_add_f32_avx2},
        [RF_ATTEND_F16] = {rf_attend_score_f16_avx2, rf_attend_add_f16_avx2},
        [RF_ATTEND_INT8] = {rf_attend_score_codes_avx2, rf_attend_add_codes_avx2},
    };
    rf_attend_by(job, ways);
}

void rf_attend_join_avx2(float *state, float *out, const float *part_state, const float *part_out,
                         uint32_t width)
{
    if (part_state[1] == 0.0f) {
        return;
    }
    const float max = part_state[0] > state[0] ? part_state[0] : state[0];
    const __m256 falls = _mm256_setr_ps(state[0], part_state[0], max, max, max, max, max, max);
    float both[8];
    _mm256_storeu_ps(both, rf_exp_ymm(_mm256_sub_ps(falls, _mm256_set1_ps(max))));
    state[1] = state[1] * both[0] + part_state[1] * both[1];
    state[0] = max;
    const __m256 a = _mm256_set1_ps(both[0]), b = _mm256_set1_ps(both[1]);
    for (uint32_t d = 0; d < width; d += 8) {
        const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(out + d), a);
        const __m256 part = _mm256_mul_ps(_mm256_loadu_ps(part_out + d), b);
        _mm256_storeu_ps(out + d, _mm256_add_ps(old, part));
    }
}
