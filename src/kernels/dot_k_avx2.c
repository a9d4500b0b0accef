/* kernels/dot_k_avx2.c: rows of the K formats times few tokens, straight from the packed bytes.
 *
 * A row is walked in chunks of eight folds, which meet the eight lanes of kernels.h in one fma:
 * each fold leaves a vector of eight partial integers, and eight such vectors become one vector of
 * eight fold sums by one transposing addition. Integers are exact, so they may be split and offset
 * as the instructions like: codes stay unsigned bytes; int16 activations are two planes of bytes,
 * int8 ones are one, and their multiplier goes to the scales. The scales come after products have
 * been added across four vectors in 16 bits, so one multiplication serves 128 weights. Up to four
 * tokens share the decoding.
 */
#include "kernels/unpack_avx2.h"

#define TOKENS 4u

typedef struct input {       /* one token; the arrays are in the worker's scratch */
    float *fold_scale;       /* of each fold */
    int32_t *sums_32;        /* of each 32 */
    int16_t *offsets[2];     /* of high and low: what sum_128 gives for the format's offset */
    int16_t *multipliers_16; /* int8: those of each half block in the order of sum_128 */
    const int32_t *sums;     /* of each 16 */
    const int8_t *high;      /* q = 128 * high + low; int8: q = multiplier * high */
    const int8_t *low;
} input;

typedef struct shape { /* one format; constants where it is used */
    uint32_t block_bytes, fold, min_step, d_at, min_at;
    uint32_t offset; /* codes in sub-blocks of 16 are so much too high */
} shape;

typedef struct eight { /* partial integers of eight folds; of fold 64: two folds a vector */
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

/* 128 unsigned codes below 64 times bytes: each 16 bits are the sum of eight products, modulo 2^16.
 * Dword i of the low half is of sub-block 2 i, of the high half of 2 i + 1. */
RF_INLINE __m256i sum_128(const __m256i code[4], const int8_t *q)
{
    const __m256i h0 = _mm256_maddubs_epi16(code[0], rf_load_256(q));
    const __m256i h1 = _mm256_maddubs_epi16(code[1], rf_load_256(q + 32));
    const __m256i h2 = _mm256_maddubs_epi16(code[2], rf_load_256(q + 64));
    const __m256i h3 = _mm256_maddubs_epi16(code[3], rf_load_256(q + 96));
    const __m256i a =
        _mm256_add_epi16(_mm256_unpacklo_epi32(h0, h1), _mm256_unpackhi_epi32(h0, h1));
    const __m256i b =
        _mm256_add_epi16(_mm256_unpacklo_epi32(h2, h3), _mm256_unpackhi_epi32(h2, h3));
    return _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* The scales of half a block in that order, of each 16 or of each 32. */
RF_INLINE __m256i scales_of_16(__m128i scales, int half)
{
    const __m128i order = _mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 1, 1, 3, 3, 5, 5, 7, 7);
    const __m128i from = _mm_add_epi8(order, _mm_set1_epi8((char)(8 * half)));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, from));
}

RF_INLINE __m256i scales_of_32(__m128i scales, int half)
{
    const __m128i order = _mm_setr_epi8(0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1, 2, 2, 3, 3);
    const __m128i from = _mm_add_epi8(order, _mm_set1_epi8((char)(4 * half)));
    return _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, from));
}

/* Partial sums of half a block: a dword of each sub-block. Less their offset, eight products fit 16
 * bits whatever they were on the way: 32 * 127 * 8 = 32512. */
RF_INLINE void times_scales(const work *w, const input in[], int half, const __m256i code[4],
                            __m256i scales, bool has_offset, __m256i part[TOKENS])
{
    const size_t at = w->k + 128 * (size_t)half;
    for (uint32_t t = 0; t < w->tokens; t++) {
        __m256i sum[2];
        for (int plane = 0; plane < (w->bytes ? 1 : 2); plane++) {
            sum[plane] = sum_128(code, (plane == 0 ? in[t].high : in[t].low) + at);
            if (has_offset) {
                const __m256i wrong = rf_load_256(in[t].offsets[plane] + at / 8);
                sum[plane] = _mm256_sub_epi16(sum[plane], wrong);
            }
        }
        if (w->bytes) {
            const __m256i by = rf_load_256(in[t].multipliers_16 + at / 8);
            part[t] = _mm256_madd_epi16(sum[0], _mm256_mullo_epi16(scales, by));
        } else {
            part[t] = _mm256_add_epi32(_mm256_slli_epi32(_mm256_madd_epi16(sum[0], scales), 7),
                                       _mm256_madd_epi16(sum[1], scales));
        }
    }
}

/* Products of sixteen bytes of codes with the sums of their sub-blocks of 16. */
RF_INLINE __m256i times_sums(const work *w, __m128i codes, const int32_t *sums)
{
    const __m256i first = _mm256_cvtepi8_epi32(codes);
    const __m256i second = _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8));
    return _mm256_add_epi32(_mm256_mullo_epi32(first, rf_load_256(sums + w->k / 16)),
                            _mm256_mullo_epi32(second, rf_load_256(sums + w->k / 16 + 8)));
}

RF_INLINE __m256i times_sums_32(const work *w, __m128i mins, const input *in)
{
    return _mm256_mullo_epi32(_mm256_cvtepu8_epi32(mins), rf_load_256(in->sums_32 + w->k / 32));
}

/* ---- blocks ------------------------------------------------------------------------------ */

RF_INLINE void block_q2_k(const work *w, const input in[], eight *e)
{
    const __m256i three = _mm256_set1_epi8(3);
    const __m128i packed = _mm_loadu_si128((const __m128i *)w->block), low4 = _mm_set1_epi8(15);
    __m256i part[2][TOKENS], code[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i q = rf_load_256(w->block + offsetof(rf_block_q2_k, qs) + 32 * half);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            code[j] = _mm256_and_si256(_mm256_srli_epi16(q, 2 * j), three);
        }
        times_scales(w, in, half, code, scales_of_16(_mm_and_si128(packed, low4), half), false,
                     part[half]);
    }
    const __m128i mins = _mm_and_si128(_mm_srli_epi16(packed, 4), low4);
    for (uint32_t t = 0; t < w->tokens; t++) {
        e->sum[t][w->slot] = _mm256_add_epi32(part[0][t], part[1][t]);
        e->min_sum[t][w->slot] = times_sums(w, mins, in[t].sums);
    }
}

RF_INLINE void block_q3_k(const work *w, const input in[], eight *e)
{
    const __m256i three = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    const __m128i packed = rf_scales_q3_k(w->block);
    const __m256i high = rf_load_256(w->block);
    __m256i part[2][TOKENS], code[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i q = rf_load_256(w->block + offsetof(rf_block_q3_k, qs) + 32 * half);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int up = 2 - j - 4 * half; /* to bit 2 */
            const __m256i bit = up > 0 ? _mm256_slli_epi16(high, up) : _mm256_srli_epi16(high, -up);
            code[j] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(q, 2 * j), three),
                                      _mm256_and_si256(bit, four));
        }
        times_scales(w, in, half, code, scales_of_16(packed, half), true, part[half]);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        e->sum[t][w->slot] = _mm256_add_epi32(part[0][t], part[1][t]);
    }
}

/* Codes of sub-block j of q4_K; the low four bits of those of q5_K. */
RF_INLINE __m256i four_bits(const uint8_t *qs, int j)
{
    const __m256i q = rf_load_256(qs + j / 2 * 32);
    return _mm256_and_si256(_mm256_srli_epi16(q, j % 2 * 4), _mm256_set1_epi8(15));
}

RF_INLINE void block_q4_k(const work *w, const input in[], eight *e)
{
    const __m128i codes = rf_scales_k(w->block), mins = _mm_srli_si128(codes, 8);
    __m256i part[2][TOKENS], code[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            code[j] = four_bits(w->block + offsetof(rf_block_q4_k, qs), 4 * half + j);
        }
        times_scales(w, in, half, code, scales_of_32(codes, half), false, part[half]);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        e->sum[t][w->slot] = _mm256_add_epi32(part[0][t], part[1][t]);
        e->min_sum[t][w->slot] = times_sums_32(w, mins, &in[t]);
    }
}

RF_INLINE void block_q5_k(const work *w, const input in[], eight *e)
{
    const __m256i zero = _mm256_setzero_si256(), sixteen = _mm256_set1_epi8(16);
    const __m128i codes = rf_scales_k(w->block), mins = _mm_srli_si128(codes, 8);
    const __m256i high = rf_load_256(w->block + offsetof(rf_block_q5_k, qh));
    __m256i part[2][TOKENS], code[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const int up = 4 - j - 4 * half; /* to bit 4 */
            const __m256i bit = up > 0 ? _mm256_slli_epi16(high, up) : _mm256_srli_epi16(high, -up);
            code[j] =
                _mm256_or_si256(four_bits(w->block + offsetof(rf_block_q5_k, qs), 4 * half + j),
                                _mm256_and_si256(bit, sixteen));
        }
        times_scales(w, in, half, code, scales_of_32(codes, half), false, part[half]);
    }
    for (uint32_t t = 0; t < w->tokens; t++) {
        const __m256i product = times_sums_32(w, mins, &in[t]);
        e->sum[t][w->slot] = part[0][t];
        e->sum[t][w->slot + 1] = part[1][t];
        e->min_sum[t][w->slot] = _mm256_blend_epi32(zero, product, 0x0F);
        e->min_sum[t][w->slot + 1] = _mm256_blend_epi32(zero, product, 0xF0);
    }
}

/* Two folds a vector: dwords 0 and 1 of both halves, and 2 and 3. */
RF_INLINE void block_q6_k(const work *w, const input in[], eight *e)
{
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    const __m128i packed =
        _mm_loadu_si128((const __m128i *)(w->block + offsetof(rf_block_q6_k, scales)));
    __m256i part[TOKENS], code[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        const __m256i l0 = rf_load_256(w->block + 64 * half);
        const __m256i l1 = rf_load_256(w->block + 64 * half + 32);
        const __m256i high = rf_load_256(w->block + offsetof(rf_block_q6_k, qh) + 32 * half);
        code[0] = _mm256_or_si256(_mm256_and_si256(l0, four),
                                  _mm256_and_si256(_mm256_slli_epi16(high, 4), two));
        code[1] = _mm256_or_si256(_mm256_and_si256(l1, four),
                                  _mm256_and_si256(_mm256_slli_epi16(high, 2), two));
        code[2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), four),
                                  _mm256_and_si256(high, two));
        code[3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), four),
                                  _mm256_and_si256(_mm256_srli_epi16(high, 2), two));
        times_scales(w, in, half, code, scales_of_16(packed, half), true, part);
        for (uint32_t t = 0; t < w->tokens; t++) {
            e->sum[t][w->slot / 2 + (uint32_t)half] = part[t];
        }
    }
}

/* The sums of eight folds of 64 from four such vectors. */
RF_INLINE __m256i sum_each_of_2(const __m256i v[4])
{
    __m256i two[2];
    for (int i = 0; i < 2; i++) {
        const __m256 a = _mm256_castsi256_ps(v[2 * i]), b = _mm256_castsi256_ps(v[2 * i + 1]);
        two[i] = _mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                  _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD)));
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(two[0], two[1], 0x20),
                            _mm256_permute2x128_si256(two[0], two[1], 0x31));
}

/* ---- tokens ------------------------------------------------------------------------------ */

/* Scratch of one token: arrays of k / 64 with a spare vector and of k / 32; three of k / 8 int16;
 * two of k bytes. */
static size_t input_bytes(uint32_t k)
{
    return ((size_t)k / 64 + 8) * 4 + (size_t)k / 32 * 4 + (size_t)k / 8 * 6 + 2 * (size_t)k;
}

/* What codes that are all the offset give. */
static void prepare_offsets(uint32_t offset, const int8_t *q, size_t k, int16_t *out)
{
    const __m256i one = _mm256_set1_epi8((char)offset), code[4] = {one, one, one, one};
    for (size_t i = 0; i < k; i += 128) {
        rf_store_256(out + i / 8, sum_128(code, q + i));
    }
}

/* Fills what the rows read of token t, once for all rows of a call. */
static void prepare(input *in, const rf_matmul *job, uint32_t t, const shape *s, uint8_t *scratch)
{
    const rf_act_layout *layout = &job->layout;
    const uint8_t *act = rf_matmul_act(job, t);
    const size_t k = job->k;
    in->sums = rf_act_sums(act, layout);
    in->fold_scale = (float *)(void *)(scratch + t * input_bytes(job->k));
    in->sums_32 = (int32_t *)(void *)(in->fold_scale + k / 64 + 8);
    in->multipliers_16 = (int16_t *)(void *)(in->sums_32 + k / 32);
    in->offsets[0] = in->multipliers_16 + k / 8;
    in->offsets[1] = in->offsets[0] + k / 8;
    int8_t *planes = (int8_t *)(in->offsets[1] + k / 8);
    for (size_t f = 0; f < k / s->fold; f++) {
        in->fold_scale[f] = rf_act_scales(act, layout)[f / (256 / s->fold)];
    }
    for (size_t i = 0; i < k / 32; i += 8) {
        rf_store_256(in->sums_32 + i, rf_sums_of_32(in->sums + 2 * i));
    }
    if (layout->act == RF_ACT_INT8) {
        const __m256i order = _mm256_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1,
                                               0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
        const int16_t *multipliers = rf_act_multipliers(act, layout);
        in->high = in->low = rf_act_q8(act);
        for (size_t i = 0; i < k; i += 128) {
            int64_t four;
            memcpy(&four, multipliers + i / 32, sizeof four);
            rf_store_256(in->multipliers_16 + i / 8,
                         _mm256_shuffle_epi8(_mm256_set1_epi64x(four), order));
        }
    } else {
        rf_split_codes(rf_act_q16(act), k, planes, planes + k);
        in->high = planes;
        in->low = planes + k;
        if (s->offset != 0) {
            prepare_offsets(s->offset, in->low, k, in->offsets[1]);
        }
    }
    if (s->offset != 0) {
        prepare_offsets(s->offset, in->high, k, in->offsets[0]);
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
        const __m256i sums = s.fold == 64 ? sum_each_of_2(e.sum[t]) : rf_sum_each_of_8(e.sum[t]);
        __m256 next =
            _mm256_fmadd_ps(_mm256_mul_ps(scale, act), _mm256_cvtepi32_ps(sums), lanes[t]);
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
    const shape kept = s; /* a copy: s stays a set of constants */
    input in[RF_DOT_TOKENS_MAX];
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, &kept, scratch);
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
                    offsetof(rf_block_q2_k, dmin), 0},
            block_q2_k);
        return true;
    case RF_Q3_K:
        dot(job, first, last, scratch,
            (shape){sizeof(rf_block_q3_k), 256, 0, offsetof(rf_block_q3_k, d), 0, 4}, block_q3_k);
        return true;
    case RF_Q4_K:
        dot(job, first, last, scratch, (shape){sizeof(rf_block_q4_k), 256, 32, 0, 2, 0},
            block_q4_k);
        return true;
    case RF_Q5_K:
        dot(job, first, last, scratch, (shape){sizeof(rf_block_q5_k), 128, 32, 0, 2, 0},
            block_q5_k);
        return true;
    case RF_Q6_K:
        dot(job, first, last, scratch,
            (shape){sizeof(rf_block_q6_k), 64, 0, offsetof(rf_block_q6_k, d), 0, 32}, block_q6_k);
        return true;
    default:
        return false;
    }
}
