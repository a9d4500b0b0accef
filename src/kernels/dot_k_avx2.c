/* kernels/dot_k_avx2.c: rows of the K formats times few tokens, straight from the packed bytes.
 *
 * A row is walked in chunks of eight folds, which meet the eight lanes of kernels.h in one fma:
 * each fold leaves a vector of eight partial integers, and eight such vectors become one vector of
 * eight fold sums by one transposing addition. Integers are exact, so they may be split and offset
 * as the instructions like: codes stay unsigned bytes; int16 activations are two planes of bytes,
 * int8 ones are one, and their multiplier goes to the scales. Scales of each 32 are broadcast from
 * memory; those of each 16 come after products have been added across four vectors in 16 bits, so
 * that one multiplication serves 128 weights. Up to four tokens share the decoding.
 */
#include "kernels/unpack_avx2.h"

#define TOKENS 4u

typedef struct input {          /* one token; the arrays are in the worker's scratch */
    float *fold_scale;          /* of each fold */
    int32_t *sums_32;           /* of each 32: the first four of two blocks, their last four */
    int16_t *offsets[2];        /* of high and low: what sum_128 gives for the format's offset */
    int16_t *multipliers_16;    /* int8: those of each half block in the order of sum_128 */
    const int32_t *sums;        /* of each 16 */
    const int16_t *multipliers; /* int8: of each 32 */
    const int8_t *high;         /* q = 128 * high + low; int8: q = multiplier * high */
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
    bool bytes;                    /* int8 activations */
    const int32_t *scales[TOKENS]; /* of each 32, twice 16 bits: 0 .. 3, then 4 .. 7 eight on */
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

/* The scales of half a block in that order. */
RF_INLINE __m256i scales_of_16(__m128i scales, int half)
{
    const __m128i order = _mm_setr_epi8(0, 0, 2, 2, 4, 4, 6, 6, 1, 1, 3, 3, 5, 5, 7, 7);
    const __m128i from = _mm_add_epi8(order, _mm_set1_epi8((char)(8 * half)));
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

/* Adds 32 codes below 64, sub-block j of a block: 16 bits hold 63 * 127 * 2. */
RF_INLINE void add_codes(const work *w, const input in[], size_t j, __m256i code,
                         __m256i sum[TOKENS][2])
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        const __m256i scale = _mm256_set1_epi32(w->scales[t][j / 4 * 8 + j % 4]);
        const __m256i h = _mm256_maddubs_epi16(code, rf_load_256(in[t].high + w->k + 32 * j));
        rf_add_i32(&sum[t][0], _mm256_madd_epi16(h, scale));
        if (!w->bytes) {
            const __m256i l = _mm256_maddubs_epi16(code, rf_load_256(in[t].low + w->k + 32 * j));
            rf_add_i32(&sum[t][1], _mm256_madd_epi16(l, scale));
        }
    }
}

RF_INLINE void clear_sums(const work *w, __m256i sum[TOKENS][2])
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        sum[t][0] = sum[t][1] = _mm256_setzero_si256();
    }
}

RF_INLINE void store_sums(const work *w, uint32_t slot, __m256i sum[TOKENS][2], eight *e)
{
    for (uint32_t t = 0; t < w->tokens; t++) {
        e->sum[t][slot] =
            w->bytes ? sum[t][0] : _mm256_add_epi32(_mm256_slli_epi32(sum[t][0], 7), sum[t][1]);
    }
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

RF_INLINE void block_q4_k(const work *w, const input in[], eight *e)
{
    const __m256i low4 = _mm256_set1_epi8(15);
    __m256i sum[TOKENS][2];
    clear_sums(w, sum);
#pragma GCC unroll 4
    for (size_t j = 0; j < 8; j += 2) {
        const __m256i q = rf_load_256_once(w->block + offsetof(rf_block_q4_k, qs) + 16 * j);
        add_codes(w, in, j, _mm256_and_si256(q, low4), sum);
        add_codes(w, in, j + 1, _mm256_and_si256(_mm256_srli_epi16(q, 4), low4), sum);
    }
    store_sums(w, w->slot, sum, e);
}

RF_INLINE void block_q5_k(const work *w, const input in[], eight *e)
{
    const __m256i low4 = _mm256_set1_epi8(15), sixteen = _mm256_set1_epi8(16);
    const __m256i high = rf_load_256(w->block + offsetof(rf_block_q5_k, qh));
    __m256i sum[TOKENS][2];
#pragma GCC unroll 4
    for (int j = 0; j < 8; j += 2) {
        const __m256i q = rf_load_256_once(w->block + offsetof(rf_block_q5_k, qs) + 16 * j);
        const __m256i a = j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
        const __m256i b = j < 4 ? _mm256_slli_epi16(high, 3 - j) : _mm256_srli_epi16(high, j - 3);
        if (j % 4 == 0) {
            clear_sums(w, sum);
        }
        add_codes(w, in, (size_t)j,
                  _mm256_or_si256(_mm256_and_si256(q, low4), _mm256_and_si256(a, sixteen)), sum);
        add_codes(w, in, (size_t)j + 1,
                  _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(q, 4), low4),
                                  _mm256_and_si256(b, sixteen)),
                  sum);
        if (j % 4 == 2) {
            store_sums(w, w->slot + (uint32_t)j / 4, sum, e);
        }
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

/* Scratch of one token: arrays of k / 64 and of k / 32 with a spare vector each; three of k / 8
 * int16; two of k bytes. */
static size_t input_bytes(uint32_t k)
{
    return ((size_t)k / 64 + 8) * 4 + ((size_t)k / 32 + 8) * 4 + (size_t)k / 8 * 6 + 2 * (size_t)k;
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
    in->multipliers_16 = (int16_t *)(void *)(in->sums_32 + k / 32 + 8);
    in->offsets[0] = in->multipliers_16 + k / 8;
    in->offsets[1] = in->offsets[0] + k / 8;
    int8_t *planes = (int8_t *)(in->offsets[1] + k / 8);
    for (size_t f = 0; f < k / s->fold; f++) {
        in->fold_scale[f] = rf_act_scales(act, layout)[f / (256 / s->fold)];
    }
    for (size_t b = 0; b < k / 256; b += 2) {
        const __m256i first = rf_sums_of_32(in->sums + 16 * b);
        const __m256i second = b + 1 < k / 256 ? rf_sums_of_32(in->sums + 16 * b + 16) : first;
        rf_store_256(in->sums_32 + 8 * b, _mm256_permute2x128_si256(first, second, 0x20));
        rf_store_256(in->sums_32 + 8 * b + 8, _mm256_permute2x128_si256(first, second, 0x31));
    }
    in->multipliers = rf_act_multipliers(act, layout);
    if (layout->act == RF_ACT_INT8) {
        const __m256i order = _mm256_setr_epi8(0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7, 0, 1,
                                               0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7);
        in->high = in->low = rf_act_q8(act);
        for (size_t i = 0; i < k; i += 128) {
            int64_t four;
            memcpy(&four, in->multipliers + i / 32, sizeof four);
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

/* What q4_K and q5_K want before the blocks of a chunk: their scales, times the multipliers for
 * int8, go by way of memory, where a broadcasting load costs no shuffle, and come late from there
 * if they are made where they are used. Two blocks at a time. */
typedef struct chunk_32 {
    int32_t scales[TOKENS][4][2][8]; /* two blocks: sub-blocks 0 .. 3 of both, 4 .. 7 */
    __m256i min_sum[TOKENS];
    __m256 scale, min_scale;
} chunk_32;

RF_INLINE void begin_chunk_32(const work *w, const input in[], uint32_t count, const shape s,
                              chunk_32 *c)
{
    const bool bytes = w->bytes;
    const uint32_t tokens = w->tokens;
    const uint32_t pairs = s.fold / 64;
    const __m256i zero = _mm256_setzero_si256();
    const __m256i mins =
        _mm256_setr_epi8(8, -1, -1, -1, 9, -1, -1, -1, 10, -1, -1, -1, 11, -1, -1, -1, 8, -1, -1,
                         -1, 9, -1, -1, -1, 10, -1, -1, -1, 11, -1, -1, -1);
    __m256i heads[4], product[TOKENS][4];
#pragma GCC unroll 4
    for (uint32_t p = 0; p < pairs; p++) { /* the last block stands for those beyond the end */
        const uint8_t *first = w->block + RF_MIN(2 * p, count - 1) * s.block_bytes;
        const uint8_t *second = w->block + RF_MIN(2 * p + 1, count - 1) * s.block_bytes;
        const size_t b = w->k / 256 + RF_MIN(2 * p, (count - 1) / 2 * 2);
        heads[p] = _mm256_loadu2_m128i((const __m128i *)second, (const __m128i *)first);
        const __m256i codes = rf_scales_k_2(heads[p]);
        const __m256i low = _mm256_unpacklo_epi8(codes, zero);
        const __m256i m0 = _mm256_shuffle_epi8(codes, mins);
        const __m256i m1 = _mm256_shuffle_epi8(codes, _mm256_add_epi8(mins, _mm256_set1_epi32(4)));
        for (uint32_t t = 0; t < tokens; t++) {
            if (bytes || t == 0) {
                const __m256i by = rf_load_256(in[t].multipliers + 8 * b);
                const __m256i scales = bytes ? _mm256_mullo_epi16(low, by) : low;
                rf_store_256(c->scales[t][p][0], _mm256_unpacklo_epi16(scales, scales));
                rf_store_256(c->scales[t][p][1], _mm256_unpackhi_epi16(scales, scales));
            }
            const __m256i a = _mm256_mullo_epi32(m0, rf_load_256(in[t].sums_32 + 8 * b));
            const __m256i z = _mm256_mullo_epi32(m1, rf_load_256(in[t].sums_32 + 8 * b + 8));
            if (s.fold == 256) {
                product[t][p] = _mm256_add_epi32(a, z);
            } else {
                product[t][2 * p] = a;
                product[t][2 * p + 1] = z;
            }
        }
    }
    RF_KEEP_IN_MEMORY(c->scales);
    /* Dwords 0 2 4 6 and 1 3 5 7 of eight blocks, or twice 0 2, 1 3 of four. */
    const __m256i order = s.fold == 256 ? _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)
                                        : _mm256_setr_epi32(0, 0, 4, 4, 1, 1, 5, 5);
    const __m256i sums_order = s.fold == 256 ? order : _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    for (uint32_t t = 0; t < tokens; t++) {
        const __m256i a = rf_add_halves_32(product[t][0], product[t][1]);
        const __m256i b = rf_add_halves_32(product[t][2], product[t][3]);
        c->min_sum[t] = _mm256_permutevar8x32_epi32(rf_add_halves_64(a, b), sums_order);
    }
    __m256i halves = _mm256_unpacklo_epi32(heads[0], heads[1]); /* d and dmin in a dword */
    if (s.fold == 256) {
        halves = _mm256_unpacklo_epi64(halves, _mm256_unpacklo_epi32(heads[2], heads[3]));
    }
    halves = _mm256_permutevar8x32_epi32(halves, order);
    halves = _mm256_packus_epi32(_mm256_and_si256(halves, _mm256_set1_epi32(0xFFFF)),
                                 _mm256_srli_epi32(halves, 16));
    halves = _mm256_permute4x64_epi64(halves, 0xD8);
    c->scale = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    c->min_scale =
        _mm256_xor_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)), _mm256_set1_ps(-0.0f));
}

/* Block i of a chunk whose first is w. */
RF_INLINE void run_block(const work *chunk, const input in[], const shape s, uint32_t i,
                         const chunk_32 *c, block_fn fn, eight *e)
{
    work w = *chunk;
    w.block += (size_t)i * s.block_bytes;
    w.k += (size_t)i * 256;
    w.slot = i * (256 / s.fold);
    for (uint32_t t = 0; t < w.tokens && s.min_step == 32; t++) {
        w.scales[t] = c->scales[w.bytes ? t : 0][i / 2][0] + i % 2 * 4;
    }
    fn(&w, in, e);
}

/* Adds count blocks, at most eight folds, from fold at on to the lanes of each token. */
RF_INLINE void add_chunk(const uint8_t *weight, uintptr_t end, const input in[], uint32_t at,
                         uint32_t count, const shape s, uint32_t tokens, bool bytes, block_fn fn,
                         __m256 lanes[TOKENS])
{
    const uint32_t folds = 256 / s.fold;
    const work w = {weight, (size_t)at * s.fold, 0, tokens, bytes, {0}};
    eight e;
    chunk_32 c;
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t i = count * folds; i < 8; i++) {
            e.sum[t][i] = e.min_sum[t][i] = _mm256_setzero_si256();
        }
    }
    if (s.min_step == 32) {
        begin_chunk_32(&w, in, count, s, &c);
    }
#pragma GCC unroll 1
    for (uint32_t i = 0; i + 2 <= count; i += 2) { /* two share their counting */
        rf_prefetch_lines(weight + (size_t)i * s.block_bytes, 2 * s.block_bytes, end);
        run_block(&w, in, s, i, &c, fn, &e);
        run_block(&w, in, s, i + 1, &c, fn, &e);
    }
    if (count % 2 != 0) {
        rf_prefetch_lines(weight + (size_t)(count - 1) * s.block_bytes, s.block_bytes, end);
        run_block(&w, in, s, count - 1, &c, fn, &e);
    }
    if (s.min_step != 32) {
        c.scale = load_halves(weight + s.d_at, s, count, false);
        c.min_scale = s.min_step != 0 ? load_halves(weight + s.min_at, s, count, true) : c.scale;
    }
    const __m256 taken = rf_first_lanes(count * folds);
    for (uint32_t t = 0; t < tokens; t++) {
        const __m256 act = _mm256_loadu_ps(in[t].fold_scale + at); /* has a spare vector */
        const __m256i sums = s.fold == 64 ? sum_each_of_2(e.sum[t]) : rf_sum_each_of_8(e.sum[t]);
        __m256 next =
            _mm256_fmadd_ps(_mm256_mul_ps(c.scale, act), _mm256_cvtepi32_ps(sums), lanes[t]);
        if (s.min_step != 0) {
            const __m256i min_sums =
                s.min_step == 32 ? c.min_sum[t] : rf_sum_each_of_8(e.min_sum[t]);
            next = _mm256_fmadd_ps(_mm256_mul_ps(c.min_scale, act), _mm256_cvtepi32_ps(min_sums),
                                   next);
        }
        lanes[t] = count * folds < 8 ? _mm256_blendv_ps(lanes[t], next, taken) : next;
    }
}

/* One row for tokens [first, first + tokens). */
RF_INLINE void dot_row(const rf_matmul *job, uint32_t row, uintptr_t end, uint32_t first,
                       const input in[], const shape s, uint32_t tokens, bool bytes, block_fn fn)
{
    const uint32_t chunk = 8 * s.fold / 256, blocks = job->k / 256;
    const uint8_t *weight = job->weight + row * job->weight_row_bytes;
    __m256 lanes[TOKENS];
    for (uint32_t t = 0; t < tokens; t++) {
        lanes[t] = _mm256_setzero_ps();
    }
    uint32_t b = 0;
    for (; b + chunk <= blocks; b += chunk, weight += chunk * s.block_bytes) {
        add_chunk(weight, end, in, b * (256 / s.fold), chunk, s, tokens, bytes, fn, lanes);
    }
    if (b < blocks) {
        add_chunk(weight, end, in, b * (256 / s.fold), blocks - b, s, tokens, bytes, fn, lanes);
    }
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store(job, first + t, row, rf_sum_ymm(lanes[t]));
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row, uintptr_t end,
                        const input *in, const shape s, bool bytes, block_fn fn)
{
    for (uint32_t row = first_row; row < last_row; row++) { /* stays in the first cache */
        uint32_t t = 0;
        for (; !bytes && t + 4 <= job->token_count; t += 4) { /* bytes: panels are faster */
            dot_row(job, row, end, t, in + t, s, 4, bytes, fn);
        }
        for (; t + 2 <= job->token_count; t += 2) {
            dot_row(job, row, end, t, in + t, s, 2, bytes, fn);
        }
        if (t < job->token_count) {
            dot_row(job, row, end, t, in + t, s, 1, bytes, fn);
        }
    }
}

RF_INLINE void dot(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch,
                   const shape s, block_fn fn)
{
    const shape kept = s; /* a copy: s stays a set of constants */
    const uintptr_t end = rf_prefetch_first(job, first, last);
    input in[RF_DOT_TOKENS_MAX];
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, &kept, scratch);
    }
    if (job->layout.act == RF_ACT_INT8) {
        dot_rows(job, first, last, end, in, s, true, fn);
    } else {
        dot_rows(job, first, last, end, in, s, false, fn);
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
