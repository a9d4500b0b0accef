/* kernels/dot_k_avx2.c: rows of the K formats times few tokens, straight from the packed bytes.
 *
 * A row is walked in chunks of eight folds, which meet the eight lanes of kernels.h in one fma:
 * each fold leaves a vector of eight partial integers, and eight such vectors become one vector of
 * eight fold sums by one transposing addition. Integers are exact, so they may be split and offset
 * as the instructions like: codes stay unsigned bytes; int16 activations are two planes of bytes,
 * int8 ones are one, and their multiplier goes to the scales. Up to four tokens share the decoding.
 */
#include "kernels/unpack_avx2.h"

#define TOKENS 4u

typedef struct input {          /* one token; the arrays are in the worker's scratch */
    const int32_t *sums;        /* of each 16 */
    float *fold_scale;          /* of each fold */
    int32_t *sums_32;           /* of each 32 */
    const int16_t *multipliers; /* int8: of each 32 */
    const int8_t *high;         /* q = 128 * high + low; int8: q = multiplier * high */
    const int8_t *low;
} input;

typedef struct shape { /* one format; constants where it is used */
    uint32_t block_bytes, fold, min_step, d_at, min_at;
} shape;

typedef struct eight { /* partial integers of eight folds */
    __m256i sum[TOKENS][8], min_sum[TOKENS][8];
} eight;

typedef struct work { /* a block: its packed bytes, its first element, its first fold of eight */
    const uint8_t *block;
    size_t k;
    uint32_t slot, tokens;
    bool bytes; /* int8 activations */
} work;

typedef void (*block_fn)(const work *w, const input in[], eight *e);

/* ---- codes times activations ------------------------------------------------------------- */

/* 32 unsigned codes below 64 from element at of the block on, and 16 bits of scale for each pair:
 * 16 bits hold 63 * 127 * 2. */
RF_INLINE void add_codes(const work *w, const input in[], size_t at, __m256i code,
                         const __m256i scales[TOKENS], __m256i sum[TOKENS][2])
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        const __m256i h = _mm256_maddubs_epi16(code, rf_load_256(in[t].high + w->k + at));
        rf_add_i32(&sum[t][0], _mm256_madd_epi16(h, scales[t]));
        if (!w->bytes) {
            const __m256i l = _mm256_maddubs_epi16(code, rf_load_256(in[t].low + w->k + at));
            rf_add_i32(&sum[t][1], _mm256_madd_epi16(l, scales[t]));
        }
    }
}

RF_INLINE __m256i join_sums(const work *w, const __m256i sum[2])
{
    return w->bytes ? sum[0] : _mm256_add_epi32(_mm256_slli_epi32(sum[0], 7), sum[1]);
}

RF_INLINE void clear_sums(const work *w, __m256i sum[TOKENS][2])
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    }
}

/* The scales of a block, times the multipliers for int8. Scales that all tokens share are picked
 * from registers by one shuffle each (by way of memory they come late: 11.5 instead of 13 GB/s);
 * those of several tokens are too many and go to memory. */
typedef struct scale_table {
    __m256i low, high; /* 16 bits each; eight scales in both halves of a register */
    int32_t pairs[TOKENS][8];
    bool in_memory;
} scale_table;

RF_INLINE __m256i multipliers_twice(const work *w, const input *in)
{
    const __m128i m = _mm_loadu_si128((const __m128i *)(in->multipliers + w->k / 32));
    const __m256i once = _mm256_cvtepu16_epi32(m);
    return _mm256_or_si256(once, _mm256_slli_epi32(once, 16));
}

RF_INLINE void scales_to_memory(const work *w, const input in[], __m256i scales, scale_table *table)
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        rf_store_256(table->pairs[t], _mm256_mullo_epi16(scales, multipliers_twice(w, &in[t])));
    }
    RF_KEEP_IN_MEMORY(table->pairs);
}

/* Sixteen scales, of each 16. */
RF_INLINE void make_scales_16(const work *w, const input in[], __m256i scales, scale_table *table)
{
    table->in_memory = w->bytes && w->tokens > 1;
    if (table->in_memory) {
        scales_to_memory(w, in, scales, table);
        return;
    }
    scales = w->bytes ? _mm256_mullo_epi16(scales, multipliers_twice(w, &in[0])) : scales;
    table->low = _mm256_permute4x64_epi64(scales, 0x44);
    table->high = _mm256_permute4x64_epi64(scales, 0xEE);
}

/* Eight scales, of each 32. */
RF_INLINE void make_scales_32(const work *w, const input in[], __m128i codes, scale_table *table)
{
    table->in_memory = w->bytes && w->tokens > 1;
    __m128i scales = _mm_cvtepu8_epi16(codes);
    if (table->in_memory) {
        const __m256i once = _mm256_cvtepu8_epi32(codes);
        scales_to_memory(w, in, _mm256_or_si256(once, _mm256_slli_epi32(once, 16)), table);
        return;
    }
    if (w->bytes) {
        const __m128i *m = (const __m128i *)(const void *)(in[0].multipliers + w->k / 32);
        scales = _mm_mullo_epi16(scales, _mm_loadu_si128(m));
    }
    table->low = _mm256_broadcastsi128_si256(scales);
}

/* Those of 32 codes, 32 * j on: of each 16, the low half of a register has the first's. */
RF_INLINE void take_scales(const work *w, const scale_table *table, int j, bool of_16,
                           __m256i scales[TOKENS])
{
    const __m256i halves = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2,
                                            3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    const __m256i pick = of_16 ? _mm256_add_epi8(halves, _mm256_set1_epi8((char)(j % 4 * 4)))
                               : _mm256_set1_epi16((short)(2 * j | (2 * j + 1) << 8));
    const __m256i from = of_16 && j >= 4 ? table->high : table->low;
    for (uint32_t t = 0; t < w->tokens; t++) {
        if (table->in_memory) {
            scales[t] = _mm256_set1_epi32(table->pairs[t][j]);
            scales[t] = of_16 ? _mm256_shuffle_epi8(scales[t], halves) : scales[t];
        } else {
            scales[t] = t != 0 ? scales[0] : _mm256_shuffle_epi8(from, pick);
        }
    }
}

/* Products of sixteen bytes of codes (signed) with the sums of their sub-blocks of 16. */
RF_INLINE void times_sums(const work *w, __m128i codes, const int32_t *sums, __m256i product[2])
{
    const __m256i first = _mm256_cvtepi8_epi32(codes);
    const __m256i second = _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8));
    product[0] = _mm256_mullo_epi32(first, rf_load_256(sums + w->k / 16));
    product[1] = _mm256_mullo_epi32(second, rf_load_256(sums + w->k / 16 + 8));
}

/* ---- blocks ------------------------------------------------------------------------------ */

RF_INLINE void block_q2_k(const work *w, const input in[], eight *e)
{
    const __m256i three = _mm256_set1_epi8(3);
    const __m128i packed = _mm_loadu_si128((const __m128i *)w->block), low4 = _mm_set1_epi8(15);
    __m256i sum[TOKENS][2], scales[TOKENS];
    scale_table table;
    make_scales_16(w, in, _mm256_cvtepu8_epi16(_mm_and_si128(packed, low4)), &table);
    clear_sums(w, sum);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i q = rf_load_256(w->block + offsetof(rf_block_q2_k, qs) + j / 4 * 32);
        const __m256i code = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), three);
        take_scales(w, &table, j, true, scales);
        add_codes(w, in, 32 * (size_t)j, code, scales, sum);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        __m256i mins[2];
        times_sums(w, _mm_and_si128(_mm_srli_epi16(packed, 4), low4), in[t].sums, mins);
        e->sum[t][w->slot] = join_sums(w, sum[t]);
        e->min_sum[t][w->slot] = _mm256_add_epi32(mins[0], mins[1]);
    }
}

RF_INLINE void block_q3_k(const work *w, const input in[], eight *e)
{
    const __m256i three = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    const __m128i packed = rf_scales_q3_k(w->block);
    const __m256i high = rf_load_256(w->block);
    __m256i sum[TOKENS][2], scales[TOKENS];
    scale_table table;
    make_scales_16(w, in, _mm256_cvtepi8_epi16(packed), &table);
    clear_sums(w, sum);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i q = rf_load_256(w->block + offsetof(rf_block_q3_k, qs) + j / 4 * 32);
        const __m256i low = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), three);
        const __m256i bit = j < 2 ? _mm256_slli_epi16(high, 2 - j) : _mm256_srli_epi16(high, j - 2);
        take_scales(w, &table, j, true, scales);
        add_codes(w, in, 32 * (size_t)j, _mm256_or_si256(low, _mm256_and_si256(bit, four)), scales,
                  sum);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        __m256i offset[2];
        times_sums(w, packed, in[t].sums, offset); /* codes are 4 too high */
        e->sum[t][w->slot] = _mm256_sub_epi32(
            join_sums(w, sum[t]), _mm256_slli_epi32(_mm256_add_epi32(offset[0], offset[1]), 2));
    }
}

/* Codes of sub-block j of q4_K; the low four bits of those of q5_K. */
RF_INLINE __m256i four_bits(const uint8_t *qs, int j)
{
    const __m256i q = rf_load_256(qs + j / 2 * 32);
    return _mm256_and_si256(_mm256_srli_epi16(q, j % 2 * 4), _mm256_set1_epi8(15));
}

RF_INLINE __m256i times_sums_32(const work *w, __m128i mins, const input *in)
{
    return _mm256_mullo_epi32(_mm256_cvtepu8_epi32(mins), rf_load_256(in->sums_32 + w->k / 32));
}

RF_INLINE void block_q4_k(const work *w, const input in[], eight *e)
{
    const __m128i codes = rf_scales_k(w->block), mins = _mm_srli_si128(codes, 8);
    __m256i sum[TOKENS][2], scales[TOKENS];
    scale_table table;
    make_scales_32(w, in, codes, &table);
    clear_sums(w, sum);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        take_scales(w, &table, j, false, scales);
        add_codes(w, in, 32 * (size_t)j, four_bits(w->block + offsetof(rf_block_q4_k, qs), j),
                  scales, sum);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        e->sum[t][w->slot] = join_sums(w, sum[t]);
        e->min_sum[t][w->slot] = times_sums_32(w, mins, &in[t]);
    }
}

RF_INLINE void block_q5_k(const work *w, const input in[], eight *e)
{
    const __m256i zero = _mm256_setzero_si256(), sixteen = _mm256_set1_epi8(16);
    const __m128i codes = rf_scales_k(w->block), mins = _mm_srli_si128(codes, 8);
    const __m256i high = rf_load_256(w->block + offsetof(rf_block_q5_k, qh));
    __m256i sum[TOKENS][2], scales[TOKENS];
    scale_table table;
    make_scales_32(w, in, codes, &table);
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        clear_sums(w, sum);
#pragma GCC unroll 4
        for (int j = 4 * half; j < 4 * half + 4; j++) {
            const __m256i bit =
                j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
            const __m256i low = four_bits(w->block + offsetof(rf_block_q5_k, qs), j);
            take_scales(w, &table, j, false, scales);
            add_codes(w, in, 32 * (size_t)j, _mm256_or_si256(low, _mm256_and_si256(bit, sixteen)),
                      scales, sum);
        }
        for (uint32_t t = 0; t < w->tokens; t++) {
            e->sum[t][w->slot + (uint32_t)half] = join_sums(w, sum[t]);
        }
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        const __m256i product = times_sums_32(w, mins, &in[t]);
        e->min_sum[t][w->slot] = _mm256_blend_epi32(zero, product, 0x0F);
        e->min_sum[t][w->slot + 1] = _mm256_blend_epi32(zero, product, 0xF0);
    }
}

/* Part 0 .. 3 of a half block of q6_K: 32 codes. */
RF_INLINE __m256i six_bits(const uint8_t *low, __m256i high, int part)
{
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    const __m256i l = rf_load_256(low + part % 2 * 32);
    const __m256i h = part == 0   ? _mm256_slli_epi16(high, 4)
                      : part == 1 ? _mm256_slli_epi16(high, 2)
                      : part == 2 ? high
                                  : _mm256_srli_epi16(high, 2);
    return _mm256_or_si256(_mm256_and_si256(part < 2 ? l : _mm256_srli_epi16(l, 4), four),
                           _mm256_and_si256(h, two));
}

RF_INLINE void block_q6_k(const work *w, const input in[], eight *e)
{
    const __m256i zero = _mm256_setzero_si256();
    const __m128i packed =
        _mm_loadu_si128((const __m128i *)(w->block + offsetof(rf_block_q6_k, scales)));
    __m256i sum[TOKENS][2], scales[TOKENS];
    scale_table table;
    make_scales_16(w, in, _mm256_cvtepi8_epi16(packed), &table);
#pragma GCC unroll 4
    for (int fold = 0; fold < 4; fold++) {
        const int half = fold / 2;
        const __m256i high = rf_load_256(w->block + offsetof(rf_block_q6_k, qh) + 32 * half);
        clear_sums(w, sum);
#pragma GCC unroll 2
        for (int j = 2 * fold; j < 2 * fold + 2; j++) {
            take_scales(w, &table, j, true, scales);
            add_codes(w, in, 32 * (size_t)j, six_bits(w->block + 64 * half, high, j % 4), scales,
                      sum);
        }
        for (uint32_t t = 0; t < w->tokens; t++) {
            e->sum[t][w->slot + (uint32_t)fold] = join_sums(w, sum[t]);
        }
    }
    for (uint32_t t = 0; t < w->tokens; t++) { /* codes are 32 too high */
        __m256i offset[2], *of = &e->sum[t][w->slot];
        times_sums(w, packed, in[t].sums, offset);
        for (int half = 0; half < 2; half++) {
            const __m256i wrong = _mm256_slli_epi32(offset[half], 5);
            of[2 * half] = _mm256_sub_epi32(of[2 * half], _mm256_blend_epi32(zero, wrong, 0x0F));
            of[2 * half + 1] =
                _mm256_sub_epi32(of[2 * half + 1], _mm256_blend_epi32(zero, wrong, 0xF0));
        }
    }
}

/* ---- tokens ------------------------------------------------------------------------------ */

/* Scratch of one token: arrays of k / 32, and of k / 64 with a spare vector; two of k. */
static size_t input_bytes(uint32_t k)
{
    return (size_t)k / 32 * 4 + ((size_t)k / 64 + 8) * 4 + 2 * (size_t)k;
}

/* Fills what the rows read of token t, once for all rows of a call. */
static void prepare(input *in, const rf_matmul *job, uint32_t t, uint32_t fold, uint8_t *scratch)
{
    const rf_act_layout *layout = &job->layout;
    const uint8_t *act = rf_matmul_act(job, t);
    const size_t k = job->k;
    in->sums = rf_act_sums(act, layout);
    in->sums_32 = (int32_t *)(void *)(scratch + t * input_bytes(job->k));
    in->multipliers = rf_act_multipliers(act, layout);
    in->fold_scale = (float *)(void *)(in->sums_32 + k / 32);
    int8_t *planes = (int8_t *)(in->fold_scale + k / 64 + 8);
    for (size_t f = 0; f < k / fold; f++) {
        in->fold_scale[f] = rf_act_scales(act, layout)[f / (256 / fold)];
    }
    for (size_t i = 0; i < k / 32; i++) {
        in->sums_32[i] = in->sums[2 * i] + in->sums[2 * i + 1];
    }
    if (layout->act == RF_ACT_INT8) {
        in->high = in->low = rf_act_q8(act);
    } else {
        rf_split_codes(rf_act_q16(act), k, planes, planes + k);
        in->high = planes;
        in->low = planes + k;
    }
}

/* ---- rows -------------------------------------------------------------------------------- */

/* The halves of count blocks, each repeated for its folds. */
RF_INLINE __m256 load_halves(const uint8_t *p, const shape s, uint32_t count, bool negate)
{
    const uint32_t folds = 256 / s.fold;
    uint16_t h[8] = {0};
    for (uint32_t i = 0; i < count; i++) {
        const uint16_t half = rf_load_u16(p + i * s.block_bytes);
        for (uint32_t f = 0; f < folds; f++) {
            h[i * folds + f] = half;
        }
    }
    const __m256 value = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)h));
    return negate ? _mm256_xor_ps(value, _mm256_set1_ps(-0.0f)) : value;
}

/* Adds count blocks, at most eight folds, from fold at on to the lanes of each token. */
RF_INLINE void add_chunk(const uint8_t *weight, const input in[], uint32_t at, uint32_t count,
                         const shape s, uint32_t tokens, bool bytes, block_fn fn,
                         __m256 lanes[TOKENS])
{
    const uint32_t folds = 256 / s.fold;
    eight e;
    if (count * folds < 8) {
        memset(&e, 0, sizeof e);
    }
    work w = {weight, (size_t)at * s.fold, 0, tokens, bytes};
#pragma GCC unroll 1
    for (uint32_t i = 0; i < count; i++) {
        rf_prefetch_lines(w.block, s.block_bytes);
        fn(&w, in, &e);
        w.block += s.block_bytes;
        w.k += 256;
        w.slot += folds;
    }
    const __m256 scale = load_halves(weight + s.d_at, s, count, false);
    const __m256 min_scale =
        s.min_step != 0 ? load_halves(weight + s.min_at, s, count, true) : scale;
    const __m256 taken = rf_first_lanes(count * folds);
    for (uint32_t t = 0; t < tokens; t++) {
        const __m256 act = _mm256_loadu_ps(in[t].fold_scale + at); /* has a spare vector */
        __m256 next = _mm256_fmadd_ps(_mm256_mul_ps(scale, act),
                                      _mm256_cvtepi32_ps(rf_sum_each_of_8(e.sum[t])), lanes[t]);
        if (s.min_step != 0) {
            const __m256 sum = _mm256_cvtepi32_ps(rf_sum_each_of_8(e.min_sum[t]));
            next = _mm256_fmadd_ps(_mm256_mul_ps(min_scale, act), sum, next);
        }
        lanes[t] = count * folds < 8 ? _mm256_blendv_ps(lanes[t], next, taken) : next;
    }
}

/* One row for tokens [first, first + tokens). */
RF_INLINE void dot_row(const rf_matmul *job, uint32_t row, uint32_t first, const input in[],
                       const shape s, uint32_t tokens, bool bytes, block_fn fn)
{
    const uint32_t chunk = 8 * s.fold / 256, blocks = job->k / 256;
    const uint8_t *weight = job->weight + row * job->weight_row_bytes;
    __m256 lanes[TOKENS];
    for (uint32_t t = 0; t < tokens; t++) {
        lanes[t] = _mm256_setzero_ps();
    }
    uint32_t b = 0;
    for (; b + chunk <= blocks; b += chunk, weight += chunk * s.block_bytes) {
        add_chunk(weight, in, b * (256 / s.fold), chunk, s, tokens, bytes, fn, lanes);
    }
    if (b < blocks) {
        add_chunk(weight, in, b * (256 / s.fold), blocks - b, s, tokens, bytes, fn, lanes);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store(job, first + t, row, rf_sum_ymm(lanes[t]));
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                        const input *in, const shape s, bool bytes, block_fn fn)
{
    for (uint32_t row = first_row; row < last_row; row++) { /* stays in the first cache */
        uint32_t t = 0;
        for (; t + 4 <= job->token_count; t += 4) {
            dot_row(job, row, t, in + t, s, 4, bytes, fn);
        }
        for (; t + 2 <= job->token_count; t += 2) {
            dot_row(job, row, t, in + t, s, 2, bytes, fn);
        }
        if (t < job->token_count) {
            dot_row(job, row, t, in + t, s, 1, bytes, fn);
        }
    }
}

RF_INLINE void dot(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch,
                   const shape s, block_fn fn)
{
    input in[RF_DOT_TOKENS_MAX];
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, s.fold, scratch);
    }
    if (job->layout.act == RF_ACT_INT8) {
        dot_rows(job, first, last, in, s, true, fn);
    } else {
        dot_rows(job, first, last, in, s, false, fn);
    }
}

bool rf_dot_k_avx2(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    switch (job->format) { /* each case is the loop above with its format inlined */
    case RF_Q2_K:
        dot(job, first, last, scratch,
            (shape){sizeof(rf_block_q2_k), 256, 16, offsetof(rf_block_q2_k, d),
                    offsetof(rf_block_q2_k, dmin)},
            block_q2_k);
        return true;
    case RF_Q3_K:
        dot(job, first, last, scratch,
            (shape){sizeof(rf_block_q3_k), 256, 0, offsetof(rf_block_q3_k, d), 0}, block_q3_k);
        return true;
    case RF_Q4_K:
        dot(job, first, last, scratch, (shape){sizeof(rf_block_q4_k), 256, 32, 0, 2}, block_q4_k);
        return true;
    case RF_Q5_K:
        dot(job, first, last, scratch, (shape){sizeof(rf_block_q5_k), 128, 32, 0, 2}, block_q5_k);
        return true;
    case RF_Q6_K:
        dot(job, first, last, scratch,
            (shape){sizeof(rf_block_q6_k), 64, 0, offsetof(rf_block_q6_k, d), 0}, block_q6_k);
        return true;
    default:
        return false;
    }
}
