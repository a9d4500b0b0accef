/* kernels/dot_k_avx512.c: rows of blocks of 256 times few tokens, straight from the packed bytes.
 *
 * A block is four registers of 64 unsigned codes; vpmaddubsw takes them times the activations'
 * bytes, vpdpwssd those pairs times the sub-blocks' scales (int8: scale times multiplier). Eight
 * folds then become eight lanes by one transposing addition. Instructions for a block of q4_K, one
 * token: about 45 int8, 55 int16, for 144 bytes.
 */
#include "kernels/dot_avx512.h"

typedef struct k_block {
    __m512i code[4];
    __m256i scales; /* 16 bits: of each 16 weights, or of each 32 (eight) */
    __m512i per_16; /* 32 bits: what a sum of 16 activations counts for: q3_K and q6_K the scale,
                       which is taken off offset times; q2_K the minimum */
    __m256i per_32; /* 32 bits: q4_K and q5_K the minimums, iq4_xs the scales */
} k_block;

RF_INLINE __m512i and_bytes(__m512i v, int mask)
{
    return _mm512_and_si512(v, _mm512_set1_epi8((char)mask));
}

/* Both halves hold p's 32 bytes, each word shifted right by low and high. */
RF_INLINE __m512i twice_shifted(const uint8_t *p, int low, int high)
{
    const __m512i counts =
        _mm512_inserti64x4(_mm512_set1_epi16((short)low), _mm256_set1_epi16((short)high), 1);
    return _mm512_srlv_epi16(_mm512_broadcast_i64x4(rf_load_256(p)), counts);
}

RF_INLINE k_block block_q2_k(const uint8_t *block)
{
    const __m512i q = rf_load_512(block + offsetof(rf_block_q2_k, qs));
    const __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)block);
    const __m128i four = _mm_set1_epi8(15);
    k_block b = {.code = {and_bytes(q, 3), and_bytes(_mm512_srli_epi16(q, 2), 3),
                          and_bytes(_mm512_srli_epi16(q, 4), 3),
                          and_bytes(_mm512_srli_epi16(q, 6), 3)}};
    b.scales = _mm256_cvtepu8_epi16(_mm_and_si128(packed, four));
    b.per_16 = _mm512_cvtepu8_epi32(_mm_and_si128(_mm_srli_epi16(packed, 4), four));
    return b;
}

RF_INLINE k_block block_q3_k(const uint8_t *block)
{
    const __m512i q = rf_load_512(block + offsetof(rf_block_q3_k, qs));
    const __m512i h = twice_shifted(block, 0, 4);
    const __m128i packed = rf_scales_q3_k(block);
    k_block b;
    b.code[0] = _mm512_or_si512(and_bytes(q, 3), and_bytes(_mm512_slli_epi16(h, 2), 4));
    b.code[1] = _mm512_or_si512(and_bytes(_mm512_srli_epi16(q, 2), 3),
                                and_bytes(_mm512_slli_epi16(h, 1), 4));
    b.code[2] = _mm512_or_si512(and_bytes(_mm512_srli_epi16(q, 4), 3), and_bytes(h, 4));
    b.code[3] = _mm512_or_si512(and_bytes(_mm512_srli_epi16(q, 6), 3),
                                and_bytes(_mm512_srli_epi16(h, 1), 4));
    b.scales = _mm256_cvtepi8_epi16(packed);
    b.per_16 = _mm512_cvtepi8_epi32(packed);
    return b;
}

RF_INLINE void scales_of(const uint8_t *block, k_block *b)
{
    const __m128i codes = rf_scales_k(block);
    b->scales = _mm256_cvtepu8_epi16(codes); /* the first eight */
    b->per_32 = _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8));
}

RF_INLINE void nibbles(const uint8_t *qs, k_block *b)
{
    const __m512i first = rf_load_512(qs), second = rf_load_512(qs + 64);
    b->code[0] = and_bytes(first, 15);
    b->code[1] = and_bytes(_mm512_srli_epi16(first, 4), 15);
    b->code[2] = and_bytes(second, 15);
    b->code[3] = and_bytes(_mm512_srli_epi16(second, 4), 15);
}

RF_INLINE k_block block_q4_k(const uint8_t *block)
{
    k_block b;
    scales_of(block, &b);
    nibbles(block + offsetof(rf_block_q4_k, qs), &b);
    return b;
}

RF_INLINE k_block block_q5_k(const uint8_t *block)
{
    const __m512i h = twice_shifted(block + offsetof(rf_block_q5_k, qh), 0, 2);
    k_block b;
    scales_of(block, &b);
    nibbles(block + offsetof(rf_block_q5_k, qs), &b);
    b.code[0] = _mm512_or_si512(b.code[0], and_bytes(_mm512_slli_epi16(h, 4), 16));
    b.code[1] = _mm512_or_si512(b.code[1], and_bytes(_mm512_slli_epi16(h, 3), 16));
    b.code[2] = _mm512_or_si512(b.code[2], and_bytes(h, 16));
    b.code[3] = _mm512_or_si512(b.code[3], and_bytes(_mm512_srli_epi16(h, 1), 16));
    return b;
}

RF_INLINE k_block block_q6_k(const uint8_t *block)
{
    const __m512i left = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1);
    const uint8_t *scales = block + offsetof(rf_block_q6_k, scales);
    const __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)scales);
    k_block b;
    for (int half = 0; half < 2; half++) {
        const __m512i l = rf_load_512(block + 64 * half);
        const uint8_t *high = block + offsetof(rf_block_q6_k, qh) + 32 * half;
        const __m512i h = _mm512_broadcast_i64x4(rf_load_256(high));
        b.code[2 * half] =
            _mm512_or_si512(and_bytes(l, 15), and_bytes(_mm512_sllv_epi16(h, left), 0x30));
        b.code[2 * half + 1] = _mm512_or_si512(and_bytes(_mm512_srli_epi16(l, 4), 15),
                                               and_bytes(twice_shifted(high, 0, 2), 0x30));
    }
    b.scales = _mm256_cvtepi8_epi16(packed);
    b.per_16 = _mm512_cvtepi8_epi32(packed);
    return b;
}

RF_INLINE k_block block_iq4_xs(const uint8_t *block)
{
    const __m256i table = _mm256_xor_si256(rf_iq4_table(), _mm256_set1_epi8(-128));
    k_block b;
    for (int i = 0; i < 4; i++) {
        const uint8_t *qs = block + offsetof(rf_block_iq4_xs, qs) + 32 * i;
        b.code[i] = _mm512_inserti64x4(_mm512_castsi256_si512(rf_look_up_nibbles(table, qs)),
                                       rf_look_up_nibbles(table, qs + 16), 1);
    }
    b.per_32 = rf_scales_iq4_xs(block);
    return b;
}

RF_INLINE k_block block_tq1_0(const uint8_t *block)
{
    __m256i code[8];
    k_block b;
    rf_codes_tq1_0(block, code);
    for (int i = 0; i < 4; i++) {
        b.code[i] = _mm512_inserti64x4(_mm512_castsi256_si512(code[2 * i]), code[2 * i + 1], 1);
    }
    b.scales = _mm256_set1_epi16(1);
    return b;
}

RF_INLINE k_block block_tq2_0(const uint8_t *block)
{
    const __m512i q = rf_load_512(block);
    return (k_block){.code = {and_bytes(q, 3), and_bytes(_mm512_srli_epi16(q, 2), 3),
                              and_bytes(_mm512_srli_epi16(q, 4), 3),
                              and_bytes(_mm512_srli_epi16(q, 6), 3)},
                     .scales = _mm256_set1_epi16(1)};
}

RF_INLINE k_block block_of(rf_format format, const uint8_t *block)
{
    switch (format) {
    case RF_Q2_K:
        return block_q2_k(block);
    case RF_Q3_K:
        return block_q3_k(block);
    case RF_Q4_K:
        return block_q4_k(block);
    case RF_Q5_K:
        return block_q5_k(block);
    case RF_Q6_K:
        return block_q6_k(block);
    case RF_IQ4_XS:
        return block_iq4_xs(block);
    case RF_TQ1_0:
        return block_tq1_0(block);
    default:
        return block_tq2_0(block);
    }
}

/* Which of a block's scales belongs to each pair of codes; by order, then register. */
#define EIGHT(i) i, i, i, i, i, i, i, i
#define EIGHTS(...)                                                                                \
    {                                                                                              \
        __VA_ARGS__                                                                                \
    }
static const uint16_t pair_scales[3][4][32] = {
    {EIGHTS(EIGHT(0), EIGHT(1), EIGHT(2), EIGHT(3)), EIGHTS(EIGHT(4), EIGHT(5), EIGHT(6), EIGHT(7)),
     EIGHTS(EIGHT(8), EIGHT(9), EIGHT(10), EIGHT(11)),
     EIGHTS(EIGHT(12), EIGHT(13), EIGHT(14), EIGHT(15))},
    {EIGHTS(EIGHT(0), EIGHT(0), EIGHT(2), EIGHT(2)), EIGHTS(EIGHT(1), EIGHT(1), EIGHT(3), EIGHT(3)),
     EIGHTS(EIGHT(4), EIGHT(4), EIGHT(6), EIGHT(6)),
     EIGHTS(EIGHT(5), EIGHT(5), EIGHT(7), EIGHT(7))},
    {EIGHTS(EIGHT(0), EIGHT(1), EIGHT(8), EIGHT(9)),
     EIGHTS(EIGHT(2), EIGHT(3), EIGHT(10), EIGHT(11)),
     EIGHTS(EIGHT(4), EIGHT(5), EIGHT(12), EIGHT(13)),
     EIGHTS(EIGHT(6), EIGHT(7), EIGHT(14), EIGHT(15))},
};

RF_INLINE void spread_scales(__m256i scales, rf_dot_order order, __m512i out[4])
{
    const __m512i wide = _mm512_castsi256_si512(scales);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        out[i] = _mm512_permutexvar_epi16(rf_load_512(pair_scales[order][i]), wide);
    }
}

/* Products of a block with one plane, summed by fold. */
RF_INLINE void plane_sums(const k_block *b, const int8_t *plane, const __m512i scales[4],
                          uint32_t folds, __m512i part[4])
{
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t f = i * folds / 4;
        const __m512i pairs = _mm512_maddubs_epi16(b->code[i], rf_load_512(plane + 64 * i));
        const bool starts = i == 0 || f != (i - 1) * folds / 4;
        part[f] = starts ? _mm512_madd_epi16(pairs, scales[i])
                         : _mm512_dpwssd_epi32(part[f], pairs, scales[i]);
    }
}

/* iq4_xs, whose codes are too large for vpmaddubsw: a fold is a register, its scales 32 bits. */
RF_INLINE void block_sums_iq4_xs(const k_block *b, const rf_dot_input *in, size_t k, bool int8,
                                 __m512i part[4])
{
    const __m512i zero = _mm512_setzero_si512();
    __m512i which = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m256i scales = b->per_32;
    if (int8) { /* both of a 32's places hold its multiplier */
        const __m256i m = rf_load_256(in->multiplier + k / 16);
        scales = _mm256_mullo_epi32(scales, _mm256_and_si256(m, _mm256_set1_epi32(0xFFFF)));
    }
    const __m256i over = _mm256_mullo_epi32(b->per_32, rf_load_256(in->sums_32 + k / 32));
    const __m512i wrong = _mm512_castsi256_si512(_mm256_slli_epi32(over, 7)); /* 128 too high */
#pragma GCC unroll 4
    for (uint32_t f = 0; f < 4; f++) {
        const int8_t *high = in->high + k + 64 * f, *low = in->low + k + 64 * f;
        __m512i sum = _mm512_dpbusd_epi32(zero, b->code[f], rf_load_512(high));
        if (!int8) {
            sum = _mm512_dpbusd_epi32(_mm512_slli_epi32(sum, 7), b->code[f], rf_load_512(low));
        }
        sum = _mm512_mullo_epi32(sum,
                                 _mm512_permutexvar_epi32(which, _mm512_castsi256_si512(scales)));
        part[f] = _mm512_mask_sub_epi32(sum, (__mmask16)(3u << (2 * f)), sum, wrong);
        which = _mm512_add_epi32(which, _mm512_set1_epi32(2));
    }
}

/* The sums of a block's folds for one token; k is the block's first element. */
RF_INLINE void block_sums(const rf_dot_shape s, const k_block *b, const __m512i spread[4],
                          const rf_dot_input *in, size_t k, bool int8, __m512i part[4])
{
    const uint32_t folds = s.block / s.fold;
    if (s.format == RF_IQ4_XS) {
        block_sums_iq4_xs(b, in, k, int8, part);
        return;
    }
    if (int8) {
        __m512i scales[4];
        const __m256i m = rf_load_256(in->multiplier + k / 16);
        spread_scales(_mm256_mullo_epi16(b->scales, m), s.order, scales);
        plane_sums(b, in->high + k, scales, folds, part);
    } else {
        __m512i low[4];
        plane_sums(b, in->high + k, spread, folds, part);
        plane_sums(b, in->low + k, spread, folds, low);
        for (uint32_t f = 0; f < folds; f++) {
            part[f] = _mm512_add_epi32(_mm512_slli_epi32(part[f], 7), low[f]);
        }
    }
    if (s.format == RF_Q6_K) { /* codes are 32 too high */
        const __m512i over =
            _mm512_slli_epi32(_mm512_mullo_epi32(b->per_16, rf_load_512(in->sums + k / 16)), 5);
        part[0] = _mm512_mask_sub_epi32(part[0], 0x000F, part[0], over);
        part[1] = _mm512_mask_sub_epi32(part[1], 0x00F0, part[1], over);
        part[2] = _mm512_mask_sub_epi32(part[2], 0x0F00, part[2], over);
        part[3] = _mm512_mask_sub_epi32(part[3], 0xF000, part[3], over);
    } else if (s.format == RF_TQ1_0 || s.format == RF_TQ2_0) { /* 1 too high */
        part[0] = _mm512_sub_epi32(part[0], rf_load_512(in->sums + k / 16));
    } else if (s.format == RF_Q3_K) { /* 4 too high */
        const __m512i over = _mm512_mullo_epi32(b->per_16, rf_load_512(in->sums + k / 16));
        part[0] = _mm512_sub_epi32(part[0], _mm512_slli_epi32(over, 2));
    }
}

/* A block's products of minimums and sums: of each fold's eight lanes, or four (q5_K). */
RF_INLINE __m256i block_mins(const rf_dot_shape s, const k_block *b, const rf_dot_input *in,
                             size_t k)
{
    if (s.format == RF_Q2_K) {
        const __m512i all = _mm512_mullo_epi32(b->per_16, rf_load_512(in->sums + k / 16));
        return _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    }
    return _mm256_mullo_epi32(b->per_32, rf_load_256(in->sums_32 + k / 32));
}

RF_INLINE __m256i sum_mins(const rf_dot_shape s, const __m256i mins[8])
{
    if (s.format != RF_Q5_K) {
        return rf_sum_each_of_8(mins);
    }
    const __m256i each =
        rf_add_halves_64(rf_add_halves_32(mins[0], mins[1]), rf_add_halves_32(mins[2], mins[3]));
    return _mm256_permutevar8x32_epi32(each, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

/* d (or dmin) of each of count folds. */
RF_INLINE __m256 fold_scales(const rf_dot_shape s, const uint8_t *p, uint32_t count)
{
    const uint32_t folds = s.block / s.fold;
    const __m256 each = rf_dot_scales(p, s.block_bytes, count / folds);
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    const __m256i four = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
    return folds == 1   ? each
           : folds == 2 ? _mm256_permutevar8x32_ps(each, twice)
                        : _mm256_permutevar8x32_ps(each, four);
}

typedef struct k_scales {
    __m256 scale, min_scale;
} k_scales;

RF_INLINE k_scales chunk_scales(const rf_dot_shape s, const uint8_t *blocks, uint32_t count)
{
    const size_t d = s.format == RF_Q2_K    ? offsetof(rf_block_q2_k, d)
                     : s.format == RF_Q3_K  ? offsetof(rf_block_q3_k, d)
                     : s.format == RF_Q6_K  ? offsetof(rf_block_q6_k, d)
                     : s.format == RF_TQ1_0 ? offsetof(rf_block_tq1_0, d)
                     : s.format == RF_TQ2_0 ? offsetof(rf_block_tq2_0, d)
                                            : 0;
    k_scales out = {.scale = fold_scales(s, blocks + d, count), .min_scale = _mm256_setzero_ps()};
    if (s.has_min) {
        out.min_scale = _mm256_xor_ps(fold_scales(s, blocks + d + 2, count), _mm256_set1_ps(-0.0f));
    }
    return out;
}

/* One row; count folds of it from fold at on, at most eight. */
RF_INLINE void add_chunk(const rf_dot_shape s, const uint8_t *weight, const rf_dot_input *in,
                         uint32_t at, uint32_t count, bool int8, uint32_t tokens, __m256 *lanes)
{
    const uint32_t folds = s.block / s.fold, blocks = count / folds;
    __m512i part[RF_DOT_TOKENS_512][8];
    __m256i mins[RF_DOT_TOKENS_512][8];
    for (uint32_t i = 0; i < blocks; i++) {
        const k_block b = block_of(s.format, weight + (size_t)i * s.block_bytes);
        const size_t k = (size_t)(at + i * folds) * s.fold;
        __m512i spread[4];
        if (!int8 && s.format != RF_IQ4_XS) {
            spread_scales(b.scales, s.order, spread);
        }
        rf_dot_prefetch(weight + (size_t)i * s.block_bytes, s.block_bytes);
        for (uint32_t t = 0; t < tokens; t++) {
            block_sums(s, &b, spread, &in[t], k, int8, &part[t][i * folds]);
            if (s.has_min) {
                mins[t][i] = block_mins(s, &b, &in[t], k);
            }
        }
    }
    const k_scales scales = chunk_scales(s, weight, count);
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t i = blocks; i < 8 / folds && count < 8; i++) {
            for (uint32_t f = 0; f < folds; f++) {
                part[t][i * folds + f] = _mm512_setzero_si512();
            }
            mins[t][i] = _mm256_setzero_si256();
        }
        rf_dot_eight e = {.sum = rf_sum_each_of_8_wide(part[t])};
        if (s.has_min) {
            e.min_sum = sum_mins(s, mins[t]);
        }
        lanes[t] = rf_dot_add(lanes[t], &e, scales.scale, scales.min_scale, in[t].fold_scale + at,
                              s.has_min, count);
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                        const rf_dot_shape s, const rf_dot_input *in, bool int8, uint32_t tokens)
{
    const uint32_t folds = job->k / s.fold;
    for (uint32_t row = first_row; row < last_row; row++) {
        const uint8_t *weight = job->weight + row * job->weight_row_bytes;
        __m256 lanes[RF_DOT_TOKENS_512];
        for (uint32_t t = 0; t < tokens; t++) {
            lanes[t] = _mm256_setzero_ps();
        }
        for (uint32_t at = 0; at < folds; at += 8) {
            add_chunk(s, weight, in, at, RF_MIN(8u, folds - at), int8, tokens, lanes);
            weight += 8 / (s.block / s.fold) * (size_t)s.block_bytes;
        }
        for (uint32_t t = 0; t < tokens; t++) {
            rf_matmul_store(job, t, row, rf_sum_ymm(lanes[t]));
        }
    }
}

/* One token has code of its own: its sums need no arrays. */
RF_INLINE void dot_format(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch,
                          const rf_dot_shape s)
{
    rf_dot_input in[RF_DOT_TOKENS_512];
    const bool int8 = job->layout.act == RF_ACT_INT8;
    for (uint32_t t = 0; t < job->token_count; t++) {
        rf_dot_prepare(&in[t], job, t, s, scratch);
    }
    if (int8 && job->token_count == 1) {
        dot_rows(job, first, last, s, in, true, 1);
    } else if (int8) {
        dot_rows(job, first, last, s, in, true, job->token_count);
    } else if (job->token_count == 1) {
        dot_rows(job, first, last, s, in, false, 1);
    } else {
        dot_rows(job, first, last, s, in, false, job->token_count);
    }
}

static void dot_q2_k(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q2_K, 256, sizeof(rf_block_q2_k), 256, true, RF_DOT_HALVES});
}
static void dot_q3_k(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q3_K, 256, sizeof(rf_block_q3_k), 256, false, RF_DOT_HALVES});
}
static void dot_q4_k(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q4_K, 256, sizeof(rf_block_q4_k), 256, true, RF_DOT_NIBBLES});
}
static void dot_q5_k(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q5_K, 256, sizeof(rf_block_q5_k), 128, true, RF_DOT_NIBBLES});
}
static void dot_q6_k(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_Q6_K, 256, sizeof(rf_block_q6_k), 64, false, RF_DOT_NATURAL});
}

static void dot_iq4_xs(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_IQ4_XS, 256, sizeof(rf_block_iq4_xs), 64, false, RF_DOT_NATURAL});
}
static void dot_tq1_0(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_TQ1_0, 256, sizeof(rf_block_tq1_0), 256, false, RF_DOT_NATURAL});
}
static void dot_tq2_0(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    dot_format(job, first, last, scratch,
               (rf_dot_shape){RF_TQ2_0, 256, sizeof(rf_block_tq2_0), 256, false, RF_DOT_HALVES});
}

bool rf_dot_k_avx512(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    switch (job->format) {
    case RF_Q2_K:
        dot_q2_k(job, first, last, scratch);
        return true;
    case RF_Q3_K:
        dot_q3_k(job, first, last, scratch);
        return true;
    case RF_Q4_K:
        dot_q4_k(job, first, last, scratch);
        return true;
    case RF_Q5_K:
        dot_q5_k(job, first, last, scratch);
        return true;
    case RF_Q6_K:
        dot_q6_k(job, first, last, scratch);
        return true;
    case RF_IQ4_XS:
        dot_iq4_xs(job, first, last, scratch);
        return true;
    case RF_TQ1_0:
        dot_tq1_0(job, first, last, scratch);
        return true;
    case RF_TQ2_0:
        dot_tq2_0(job, first, last, scratch);
        return true;
    default:
        return false;
    }
}
