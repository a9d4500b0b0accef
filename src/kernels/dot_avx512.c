/* kernels/dot_avx512.c: rows of blocks of 32 times few tokens, straight from the packed bytes, and
 * what the dots of all formats prepare of a token.
 *
 * A row is walked in chunks of eight blocks, the eight lanes of kernels.h. Nibbles of four blocks
 * fill a register, a block each 128 bits, and vpdpbusd takes them times the activations' bytes,
 * which lie in that order: two registers of partial sums become eight lanes. What codes exceed the
 * weights by is taken back with the sums of activations.
 */
#include "kernels/dot_avx512.h"

/* ---- tokens ------------------------------------------------------------------------------ */

RF_INLINE size_t padded_k(uint32_t k)
{
    return ((size_t)k + RF_BLOCK_MAX - 1) / RF_BLOCK_MAX * RF_BLOCK_MAX;
}

size_t rf_dot_input_bytes(uint32_t k)
{
    return 2 * padded_k(k) + padded_k(k) / 16 * 2 + 2 * ((size_t)k / 32 + 8) * 4;
}

/* q = 128 * high + low, both in -64 .. 64. */
RF_INLINE void split_128(const int16_t *q, int8_t *high, int8_t *low)
{
    const __m512i a = rf_load_512(q);
    const __m512i h = _mm512_srai_epi16(_mm512_add_epi16(a, _mm512_set1_epi16(64)), 7);
    rf_store_256(high, _mm512_cvtepi16_epi8(h));
    rf_store_256(low, _mm512_cvtepi16_epi8(_mm512_sub_epi16(a, _mm512_slli_epi16(h, 7))));
}

/* Where group g of a run of eight groups comes to lie; groups of 32, in RF_DOT_FOURS of 16. */
static const uint8_t group_places[4][8] = {
    [RF_DOT_NATURAL] = {0, 1, 2, 3, 4, 5, 6, 7},
    [RF_DOT_NIBBLES] = {0, 2, 1, 3, 4, 6, 5, 7},
    [RF_DOT_HALVES] = {0, 2, 4, 6, 1, 3, 5, 7},
    [RF_DOT_FOURS] = {0, 4, 1, 5, 2, 6, 3, 7},
};

static void prepare_256(const rf_dot_input *in, const rf_act_layout *layout, rf_dot_order order)
{
    const bool int8 = layout->act == RF_ACT_INT8;
    for (size_t i = 0; i < layout->k / 32; i++) {
        const size_t to = (i / 8 * 8 + group_places[order][i % 8]) * 32;
        if (!int8) {
            split_128(rf_act_q16(in->q) + 32 * i, in->high + to, in->low + to);
            continue;
        }
        const int16_t m = rf_act_multipliers(in->q, layout)[i];
        rf_store_256(in->high + to, rf_load_256(rf_act_q8(in->q) + 32 * i));
        if (order == RF_DOT_NIBBLES) { /* scales of each 32: eight of a block's sixteen places */
            in->multiplier[i / 8 * 16 + i % 8] = m;
            in->multiplier[i / 8 * 16 + 8 + i % 8] = m;
        } else {
            in->multiplier[2 * i] = in->multiplier[2 * i + 1] = m;
        }
    }
}

static void prepare_32(const rf_dot_input *in, const rf_act_layout *layout, rf_dot_order order)
{
    const bool int8 = layout->act == RF_ACT_INT8;
    if (!int8 && order == RF_DOT_NATURAL) {
        memcpy(in->high, in->q, layout->k * sizeof(int16_t));
        return;
    }
    for (size_t i = 0; i < layout->k / 16; i++) {
        const size_t to = (i / 8 * 8 + group_places[order][i % 8]) * 16;
        __m128i high;
        if (int8) {
            high = _mm_loadu_si128((const __m128i *)(const void *)(rf_act_q8(in->q) + 16 * i));
        } else { /* the low byte as it is, 0 .. 255 */
            const __m256i a = rf_load_256(rf_act_q16(in->q) + 16 * i);
            const __m128i low = _mm256_cvtepi16_epi8(a);
            high = _mm256_cvtepi16_epi8(_mm256_srai_epi16(a, 8));
            _mm_storeu_si128((__m128i *)(void *)(in->low + to), low);
        }
        _mm_storeu_si128((__m128i *)(void *)(in->high + to), high);
    }
}

void rf_dot_prepare(rf_dot_input *in, const rf_matmul *job, uint32_t t, rf_dot_shape shape,
                    uint8_t *scratch)
{
    const uint8_t *act = rf_matmul_act(job, t);
    const float *scale = rf_act_scales(act, &job->layout);
    const size_t k = job->k, folds_per_block = shape.block / shape.fold;
    in->q = act;
    in->sums = rf_act_sums(act, &job->layout);
    in->fold_scale = (float *)(void *)(scratch + t * rf_dot_input_bytes(job->k));
    in->sums_32 = (int32_t *)(void *)(in->fold_scale + k / 32 + 8);
    in->multiplier = (int16_t *)(void *)(in->sums_32 + k / 32 + 8);
    in->high = (int8_t *)(in->multiplier + padded_k(job->k) / 16);
    in->low = in->high + padded_k(job->k);
    for (size_t f = 0; f < k / shape.fold; f++) {
        in->fold_scale[f] = scale[f / folds_per_block];
    }
    for (size_t i = 0; i < k / 32; i++) {
        in->sums_32[i] = in->sums[2 * i] + in->sums[2 * i + 1];
    }
    if (shape.block == 256) {
        prepare_256(in, &job->layout, shape.order);
    } else {
        prepare_32(in, &job->layout, shape.order);
    }
}

/* ---- blocks of 32 ------------------------------------------------------------------------ */

/* Where a block has its codes, and what these exceed the weights by. */
typedef struct codes_32 {
    uint32_t codes, fifths; /* bytes into the block; fifths 0: codes of four bits */
    int32_t offset;
} codes_32;

/* The codes of four blocks: a block each 128 bits, k 0 .. 15 and 16 .. 31. */
RF_INLINE void four_blocks(const uint8_t *blocks, uint32_t bytes, const codes_32 c, __m512i code[2])
{
    const __m512i mask = _mm512_set1_epi8(15);
    __m512i both = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(blocks + c.codes)));
    both =
        _mm512_inserti32x4(both, _mm_loadu_si128((const __m128i *)(blocks + bytes + c.codes)), 1);
    both = _mm512_inserti32x4(both,
                              _mm_loadu_si128((const __m128i *)(blocks + 2 * bytes + c.codes)), 2);
    both = _mm512_inserti32x4(both,
                              _mm_loadu_si128((const __m128i *)(blocks + 3 * bytes + c.codes)), 3);
    code[0] = _mm512_and_si512(both, mask);
    code[1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
    if (c.fifths != 0) {
        const __m512i sixteen = _mm512_set1_epi8(16);
        uint64_t low = 0, high = 0;
        for (uint32_t i = 0; i < 4; i++) {
            const uint64_t bits = rf_load_u32(blocks + i * bytes + c.fifths);
            low |= (bits & 0xFFFF) << (16 * i);
            high |= (bits >> 16) << (16 * i);
        }
        code[0] = _mm512_mask_add_epi8(code[0], low, code[0], sixteen);
        code[1] = _mm512_mask_add_epi8(code[1], high, code[1], sixteen);
    }
}

/* Two registers, a block each 128 bits, to eight sums. */
RF_INLINE __m256i sum_blocks(__m512i a, __m512i b)
{
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
    __m512i sums = rf_add_pairs_32(a, b);
    sums = _mm512_add_epi32(sums, _mm512_shuffle_epi32(sums, 0x4E));
    return _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sums));
}

RF_INLINE __m512i dot_codes(const __m512i code[2], const rf_dot_input *in, size_t at, bool int8)
{
    const __m512i zero = _mm512_setzero_si512();
    __m512i high = _mm512_dpbusd_epi32(zero, code[0], rf_load_512(in->high + at));
    high = _mm512_dpbusd_epi32(high, code[1], rf_load_512(in->high + at + 64));
    if (int8) {
        return high;
    }
    __m512i low = _mm512_dpbusd_epi32(zero, rf_load_512(in->low + at), code[0]);
    low = _mm512_dpbusd_epi32(low, rf_load_512(in->low + at + 64), code[1]);
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

RF_INLINE void sums_of_codes(const uint8_t *blocks, const rf_dot_shape s, const codes_32 c,
                             const rf_dot_input *in, uint32_t at, bool int8, uint32_t tokens,
                             __m256i *sums)
{
    __m512i first[2], second[2];
    four_blocks(blocks, s.block_bytes, c, first);
    four_blocks(blocks + 4 * s.block_bytes, s.block_bytes, c, second);
    for (uint32_t t = 0; t < tokens; t++) {
        sums[t] = sum_blocks(dot_codes(first, &in[t], (size_t)at * 32, int8),
                             dot_codes(second, &in[t], (size_t)at * 32 + 128, int8));
        if (c.offset != 0) {
            const __m256i over =
                _mm256_mullo_epi32(rf_load_256(in[t].sums_32 + at), _mm256_set1_epi32(c.offset));
            sums[t] = _mm256_sub_epi32(sums[t], over);
        }
    }
}

/* The weights of a block of q8_0 or iq4_nl. */
RF_INLINE __m256i weights_of(rf_format format, const uint8_t *block)
{
    return format == RF_Q8_0 ? rf_load_256(block + 2)
                             : rf_look_up_nibbles(rf_iq4_table(), block + 2);
}

/* int8: two blocks a register, weights as unsigned bytes 128 too high. */
RF_INLINE void sums_of_bytes(const uint8_t *blocks, const rf_dot_shape s, const rf_dot_input *in,
                             uint32_t at, uint32_t tokens, __m256i *sums)
{
    const size_t bytes = s.block_bytes;
    const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11);
    __m512i code[4];
#pragma GCC unroll 4
    for (size_t i = 0; i < 4; i++) {
        const uint8_t *pair = blocks + 2 * i * bytes;
        code[i] = _mm512_inserti64x4(_mm512_castsi256_si512(weights_of(s.format, pair)),
                                     weights_of(s.format, pair + bytes), 1);
        code[i] = _mm512_xor_si512(code[i], _mm512_set1_epi8((char)-128));
    }
    for (uint32_t t = 0; t < tokens; t++) {
        const int8_t *q = in[t].high + (size_t)at * 32;
        __m512i part[4];
#pragma GCC unroll 4
        for (size_t i = 0; i < 4; i++) {
            part[i] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), code[i], rf_load_512(q + 64 * i));
        }
        __m512i all = rf_sum_quarters_of_4(part);
        all = _mm512_add_epi32(all, _mm512_shuffle_i32x4(all, all, 0xB1));
        all = _mm512_permutexvar_epi32(order, all);
        sums[t] = _mm256_sub_epi32(_mm512_castsi512_si256(all),
                                   _mm256_slli_epi32(rf_load_256(in[t].sums_32 + at), 7));
    }
}

/* int16: a block is one register of words. */
RF_INLINE void sums_of_words(const uint8_t *blocks, const rf_dot_shape s, const rf_dot_input *in,
                             uint32_t at, uint32_t tokens, __m256i *sums)
{
    __m512i w[8];
#pragma GCC unroll 8
    for (size_t i = 0; i < 8; i++) {
        w[i] = _mm512_cvtepi8_epi16(weights_of(s.format, blocks + i * s.block_bytes));
    }
#pragma GCC unroll 1
    for (uint32_t t = 0; t < tokens; t++) {
        const int16_t *q = (const int16_t *)(const void *)in[t].high + (size_t)at * 32;
        __m512i part[8];
#pragma GCC unroll 8
        for (size_t i = 0; i < 8; i++) {
            part[i] = _mm512_madd_epi16(w[i], rf_load_512(q + 32 * i));
        }
        sums[t] = rf_sum_each_of_8_wide(part);
    }
}

/* One row; count blocks of it from at on, and eight can be read. */
RF_INLINE void add_chunk(const rf_dot_shape s, const codes_32 c, const uint8_t *blocks,
                         const rf_dot_input *in, uint32_t at, uint32_t count, bool int8,
                         uint32_t tokens, __m256 *lanes)
{
    __m256i sums[RF_DOT_TOKENS_512];
    if (s.order == RF_DOT_FOURS) {
        sums_of_codes(blocks, s, c, in, at, int8, tokens, sums);
    } else if (int8) {
        sums_of_bytes(blocks, s, in, at, tokens, sums);
    } else {
        sums_of_words(blocks, s, in, at, tokens, sums);
    }
    const __m256 scale = rf_dot_scales(blocks, s.block_bytes, 8);
    const __m256 min_scale =
        s.has_min ? rf_dot_scales(blocks + 2, s.block_bytes, 8) : _mm256_setzero_ps();
    for (uint32_t t = 0; t < tokens; t++) {
        const rf_dot_eight e = {.sum = sums[t], .min_sum = rf_load_256(in[t].sums_32 + at)};
        lanes[t] =
            rf_dot_add(lanes[t], &e, scale, min_scale, in[t].fold_scale + at, s.has_min, count);
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                        const rf_dot_shape s, const codes_32 c, const rf_dot_input *in, bool int8,
                        uint32_t tokens)
{
    const uint32_t blocks = job->k / 32;
    for (uint32_t row = first_row; row < last_row; row++) {
        const uint8_t *weight = job->weight + row * job->weight_row_bytes;
        uint8_t rest[8 * sizeof(rf_block_q8_0)];
        __m256 lanes[RF_DOT_TOKENS_512];
        for (uint32_t t = 0; t < tokens; t++) {
            lanes[t] = _mm256_setzero_ps();
        }
        for (uint32_t at = 0; at < blocks; at += 8, weight += 8 * (size_t)s.block_bytes) {
            const uint32_t count = RF_MIN(8u, blocks - at);
            const uint8_t *chunk = weight;
            if (count < 8) { /* zeros after the last: their lanes are dropped */
                memset(rest, 0, sizeof rest);
                memcpy(rest, weight, count * (size_t)s.block_bytes);
                chunk = rest;
            }
            rf_dot_prefetch(weight, 8 * s.block_bytes);
            add_chunk(s, c, chunk, in, at, count, int8, tokens, lanes);
        }
        for (uint32_t t = 0; t < tokens; t++) {
            rf_matmul_store(job, t, row, rf_sum_ymm(lanes[t]));
        }
    }
}

RF_INLINE void dot_format(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch,
                          const rf_dot_shape s, const codes_32 c)
{
    rf_dot_input in[RF_DOT_TOKENS_512];
    const bool int8 = job->layout.act == RF_ACT_INT8;
    for (uint32_t t = 0; t < job->token_count; t++) {
        rf_dot_prepare(&in[t], job, t, s, scratch);
    }
    if (int8 && job->token_count == 1) {
        dot_rows(job, first, last, s, c, in, true, 1);
    } else if (int8) {
        dot_rows(job, first, last, s, c, in, true, job->token_count);
    } else if (job->token_count == 1) {
        dot_rows(job, first, last, s, c, in, false, 1);
    } else {
        dot_rows(job, first, last, s, c, in, false, job->token_count);
    }
}

static void dot_q4_0(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q4_0, 32, sizeof(rf_block_q4_0), 32, false, RF_DOT_FOURS},
               (codes_32){2, 0, 8});
}
static void dot_q4_1(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q4_1, 32, sizeof(rf_block_q4_1), 32, true, RF_DOT_FOURS},
               (codes_32){4, 0, 0});
}
static void dot_q5_0(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q5_0, 32, sizeof(rf_block_q5_0), 32, false, RF_DOT_FOURS},
               (codes_32){6, 2, 16});
}
static void dot_q5_1(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q5_1, 32, sizeof(rf_block_q5_1), 32, true, RF_DOT_FOURS},
               (codes_32){8, 4, 0});
}
static void dot_q8_0(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q8_0, 32, sizeof(rf_block_q8_0), 32, false, RF_DOT_NATURAL},
               (codes_32){2, 0, 128});
}
static void dot_iq4_nl(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_IQ4_NL, 32, sizeof(rf_block_iq4_nl), 32, false, RF_DOT_NATURAL},
               (codes_32){2, 0, 128});
}

bool rf_dot_avx512(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    if (job->token_count > RF_DOT_TOKENS_512 ||
        job->token_count * rf_dot_input_bytes(job->k) > rf_matmul_scratch_bytes(job->k)) {
        return false;
    }
    switch (job->format) {
    case RF_Q4_0:
        dot_q4_0(job, first, last, scratch);
        return true;
    case RF_Q4_1:
        dot_q4_1(job, first, last, scratch);
        return true;
    case RF_Q5_0:
        dot_q5_0(job, first, last, scratch);
        return true;
    case RF_Q5_1:
        dot_q5_1(job, first, last, scratch);
        return true;
    case RF_Q8_0:
        dot_q8_0(job, first, last, scratch);
        return true;
    case RF_IQ4_NL:
        dot_iq4_nl(job, first, last, scratch);
        return true;
    default:
        return rf_dot_k_avx512(job, first, last, scratch);
    }
}
