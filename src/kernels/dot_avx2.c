/* kernels/dot_avx2.c: rows of quantised weights times few tokens, straight from the packed bytes.
 *
 * A row is walked in chunks of eight folds, which meet the eight lanes of kernels.h in one fma:
 * each fold leaves a vector of eight partial integers, and eight such vectors become one vector of
 * eight fold sums by one transposing addition. Integers are exact, so they may be split and offset
 * as the instructions like: codes stay unsigned, and blocks of 256 take their activations as two
 * planes of bytes. What is left of a row after whole chunks goes through the plain unpacking.
 */
#include "kernels/unpack_avx2.h"

/* Packed bytes are asked for this far ahead; measured on Zen 5 and Zen 3: 7 to 9 KB are best. */
#define PREFETCH_BYTES 8192u

/* One token, and what every row needs of it; the last four are in the worker's scratch. */
typedef struct input {
    const int16_t *q;
    const float *act_scale; /* of each block */
    const int32_t *sums;    /* of each 16 */
    float *fold_scale;      /* of each fold */
    int32_t *sums_32;       /* of each 32 */
    int8_t *high, *low;     /* blocks of 256: q = 128 * high + low */
} input;

/* One format; constants where it is used. */
typedef struct shape {
    uint32_t block, block_bytes, fold, min_step;
    rf_unpack_fn unpack;
} shape;

typedef struct eight { /* eight folds, one a lane */
    __m256i sum, min_sum;
    __m256 scale, min_scale;
} eight;

/* Eight folds of a row from fold at on: blocks are their packed bytes. */
typedef eight (*eight_fn)(const uint8_t *blocks, const input *in, uint32_t at);

RF_INLINE __m256i madd_load(__m256i w, const int16_t *q)
{
    return _mm256_madd_epi16(w, rf_load_256(q));
}

/* Eight halves, step bytes apart. */
RF_INLINE __m256 load_halves(const uint8_t *p, size_t step)
{
    __m128i h = _mm_cvtsi32_si128(rf_load_u16(p));
    h = _mm_insert_epi16(h, rf_load_u16(p + step), 1);
    h = _mm_insert_epi16(h, rf_load_u16(p + 2 * step), 2);
    h = _mm_insert_epi16(h, rf_load_u16(p + 3 * step), 3);
    h = _mm_insert_epi16(h, rf_load_u16(p + 4 * step), 4);
    h = _mm_insert_epi16(h, rf_load_u16(p + 5 * step), 5);
    h = _mm_insert_epi16(h, rf_load_u16(p + 6 * step), 6);
    h = _mm_insert_epi16(h, rf_load_u16(p + 7 * step), 7);
    return _mm256_cvtph_ps(h);
}

RF_INLINE eight eight_q8_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q8_0);
    const int16_t *q = in->q + (size_t)at * 32;
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        const uint8_t *qs = blocks + i * bytes + 2;
        part[i] = _mm256_add_epi32(madd_load(rf_load_bytes_i16(qs), q + 32 * i),
                                   madd_load(rf_load_bytes_i16(qs + 16), q + 32 * i + 16));
    }
    return (eight){.sum = rf_sum_each_of_8(part), .scale = load_halves(blocks, bytes)};
}

/* Eight blocks of 32 nibbles, bytes apart. */
RF_INLINE __m256i sum_nibbles(const uint8_t *qs, size_t bytes, const int16_t *q)
{
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        const __m256i both = rf_load_bytes_u16(qs + i * bytes);
        const __m256i low = _mm256_and_si256(both, rf_i16(15)), high = _mm256_srli_epi16(both, 4);
        part[i] = _mm256_add_epi32(madd_load(low, q + 32 * i), madd_load(high, q + 32 * i + 16));
    }
    return rf_sum_each_of_8(part);
}

RF_INLINE eight eight_q4_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_0);
    const __m256i sum = sum_nibbles(blocks + 2, bytes, in->q + (size_t)at * 32);
    const __m256i offset = _mm256_slli_epi32(rf_load_256(in->sums_32 + at), 3);
    return (eight){.sum = _mm256_sub_epi32(sum, offset), .scale = load_halves(blocks, bytes)};
}

RF_INLINE eight eight_q4_1(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_1);
    return (eight){.sum = sum_nibbles(blocks + 4, bytes, in->q + (size_t)at * 32),
                   .min_sum = rf_load_256(in->sums_32 + at),
                   .scale = load_halves(blocks, bytes),
                   .min_scale = load_halves(blocks + 2, bytes)};
}

/* Eight blocks of 32 codes of five bits; high: the fifth bits of the first block. */
RF_INLINE __m256i sum_fives(const uint8_t *high, const uint8_t *qs, size_t bytes, const int16_t *q)
{
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        const __m256i both = rf_load_bytes_u16(qs + i * bytes);
        const uint32_t bits = rf_load_u32(high + i * bytes);
        const __m256i a = _mm256_or_si256(_mm256_and_si256(both, rf_i16(15)), rf_fifth_bits(bits));
        const __m256i b = _mm256_or_si256(_mm256_srli_epi16(both, 4), rf_fifth_bits(bits >> 16));
        part[i] = _mm256_add_epi32(madd_load(a, q + 32 * i), madd_load(b, q + 32 * i + 16));
    }
    return rf_sum_each_of_8(part);
}

RF_INLINE eight eight_q5_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q5_0);
    const __m256i sum = sum_fives(blocks + 2, blocks + 6, bytes, in->q + (size_t)at * 32);
    const __m256i offset = _mm256_slli_epi32(rf_load_256(in->sums_32 + at), 4);
    return (eight){.sum = _mm256_sub_epi32(sum, offset), .scale = load_halves(blocks, bytes)};
}

RF_INLINE eight eight_q5_1(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q5_1);
    return (eight){.sum = sum_fives(blocks + 4, blocks + 8, bytes, in->q + (size_t)at * 32),
                   .min_sum = rf_load_256(in->sums_32 + at),
                   .scale = load_halves(blocks, bytes),
                   .min_scale = load_halves(blocks + 2, bytes)};
}

/* 32 unsigned codes times the high and low parts of their activations, and 16 bits of scale for
 * each pair: 16 bits hold 255 * 64 * 2. */
RF_INLINE void add_codes(__m256i code, const int8_t *high, const int8_t *low, __m256i scales,
                         __m256i sum[2])
{
    const __m256i h = _mm256_maddubs_epi16(code, rf_load_256(high));
    const __m256i l = _mm256_maddubs_epi16(code, rf_load_256(low));
    rf_add_i32(&sum[0], _mm256_madd_epi16(h, scales));
    rf_add_i32(&sum[1], _mm256_madd_epi16(l, scales));
}

RF_INLINE __m256i join_sums(const __m256i sum[2])
{
    return _mm256_add_epi32(_mm256_slli_epi32(sum[0], 7), sum[1]);
}

/* The scales of sub-blocks of 16, 2 i and 2 i + 1, each eight times. */
RF_INLINE __m256i pair_of_scales(const int16_t scales[16], int i)
{
    const __m256i pick = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2,
                                          3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3);
    int32_t both;
    memcpy(&both, scales + 2 * i, sizeof both);
    return _mm256_shuffle_epi8(_mm256_set1_epi32(both), pick);
}

/* Products of sixteen bytes of codes (signed) with the sums of their sub-blocks of 16. */
RF_INLINE void times_sums(__m128i codes, const int32_t *sums, __m256i product[2])
{
    const __m256i first = _mm256_cvtepi8_epi32(codes);
    const __m256i second = _mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8));
    product[0] = _mm256_mullo_epi32(first, rf_load_256(sums));
    product[1] = _mm256_mullo_epi32(second, rf_load_256(sums + 8));
}

RF_INLINE eight eight_q2_k(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q2_k);
    const __m256i three = _mm256_set1_epi8(3);
    __m256i part[8], min_part[8];
    for (size_t i = 0; i < 8; i++) {
        const uint8_t *block = blocks + i * bytes;
        const size_t k = (at + i) * 256;
        const __m128i packed = _mm_loadu_si128((const __m128i *)block);
        const __m128i low4 = _mm_set1_epi8(15);
        __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, mins[2];
        int16_t scales[16];
        rf_store_256(scales, _mm256_cvtepu8_epi16(_mm_and_si128(packed, low4)));
        RF_KEEP_IN_MEMORY(scales);
        for (int j = 0; j < 8; j++) {
            const __m256i q = rf_load_256(block + offsetof(rf_block_q2_k, qs) + j / 4 * 32);
            const __m256i code = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), three);
            add_codes(code, in->high + k + 32 * j, in->low + k + 32 * j, pair_of_scales(scales, j),
                      sum);
        }
        part[i] = join_sums(sum);
        times_sums(_mm_and_si128(_mm_srli_epi16(packed, 4), low4), in->sums + k / 16, mins);
        min_part[i] = _mm256_add_epi32(mins[0], mins[1]);
    }
    const __m256 minus = _mm256_set1_ps(-0.0f);
    const uint8_t *d = blocks + offsetof(rf_block_q2_k, d);
    return (eight){.sum = rf_sum_each_of_8(part),
                   .min_sum = rf_sum_each_of_8(min_part),
                   .scale = load_halves(d, bytes),
                   .min_scale = _mm256_xor_ps(load_halves(d + 2, bytes), minus)};
}

/* The sixteen 6-bit scales of q3_K, less 32, as bytes. */
RF_INLINE __m128i scales_q3_k(const uint8_t *block)
{
    /* Words A, B, C: low halves in A and B, then their high nibbles; top bits in C. The load ends
     * with the block. */
    const __m128i all = _mm_srli_si128(
        _mm_loadu_si128((const __m128i *)(block + offsetof(rf_block_q3_k, scales) - 2)), 2);
    const __m128i low =
        _mm_srlv_epi32(_mm_shuffle_epi32(all, _MM_SHUFFLE(1, 0, 1, 0)), _mm_setr_epi32(0, 0, 4, 4));
    const __m128i top =
        _mm_srlv_epi32(_mm_shuffle_epi32(all, _MM_SHUFFLE(2, 2, 2, 2)), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i code = _mm_or_si128(_mm_and_si128(low, _mm_set1_epi8(15)),
                                      _mm_slli_epi16(_mm_and_si128(top, _mm_set1_epi8(3)), 4));
    return _mm_sub_epi8(code, _mm_set1_epi8(32));
}

RF_INLINE eight eight_q3_k(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q3_k);
    const __m256i three = _mm256_set1_epi8(3), four = _mm256_set1_epi8(4);
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        const uint8_t *block = blocks + i * bytes;
        const size_t k = (at + i) * 256;
        const __m128i packed = scales_q3_k(block);
        __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()}, offset[2];
        int16_t scales[16];
        rf_store_256(scales, _mm256_cvtepi8_epi16(packed));
        RF_KEEP_IN_MEMORY(scales);
        const __m256i high = rf_load_256(block);
        for (int j = 0; j < 8; j++) {
            const __m256i q = rf_load_256(block + offsetof(rf_block_q3_k, qs) + j / 4 * 32);
            const __m256i low = _mm256_and_si256(_mm256_srli_epi16(q, j % 4 * 2), three);
            const __m256i bit =
                j < 2 ? _mm256_slli_epi16(high, 2 - j) : _mm256_srli_epi16(high, j - 2);
            add_codes(_mm256_or_si256(low, _mm256_and_si256(bit, four)), in->high + k + 32 * j,
                      in->low + k + 32 * j, pair_of_scales(scales, j), sum);
        }
        times_sums(packed, in->sums + k / 16, offset); /* codes are 4 too high */
        part[i] = _mm256_sub_epi32(join_sums(sum),
                                   _mm256_slli_epi32(_mm256_add_epi32(offset[0], offset[1]), 2));
    }
    return (eight){.sum = rf_sum_each_of_8(part),
                   .scale = load_halves(blocks + offsetof(rf_block_q3_k, d), bytes)};
}

/* Sub-block j of q4_K: its codes. */
RF_INLINE __m256i codes_q4_k(const uint8_t *qs, int j)
{
    const __m256i q = rf_load_256(qs + j / 2 * 32);
    return _mm256_and_si256(_mm256_srli_epi16(q, j % 2 * 4), _mm256_set1_epi8(15));
}

RF_INLINE eight eight_q4_k(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_k);
    __m256i part[8], min_part[8];
    for (size_t i = 0; i < 8; i++) {
        const uint8_t *block = blocks + i * bytes;
        const size_t k = (at + i) * 256;
        const __m128i codes = rf_scales_k(block);
        __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
        int16_t scales[8];
        _mm_storeu_si128((__m128i *)scales, _mm_cvtepu8_epi16(codes));
        RF_KEEP_IN_MEMORY(scales);
        for (int j = 0; j < 8; j++) {
            add_codes(codes_q4_k(block + offsetof(rf_block_q4_k, qs), j), in->high + k + 32 * j,
                      in->low + k + 32 * j, rf_i16(scales[j]), sum);
        }
        part[i] = join_sums(sum);
        min_part[i] = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)),
                                         rf_load_256(in->sums_32 + k / 32));
    }
    const __m256 minus = _mm256_set1_ps(-0.0f);
    return (eight){.sum = rf_sum_each_of_8(part),
                   .min_sum = rf_sum_each_of_8(min_part),
                   .scale = load_halves(blocks, bytes),
                   .min_scale = _mm256_xor_ps(load_halves(blocks + 2, bytes), minus)};
}

/* Four halves, step bytes apart, each twice. */
RF_INLINE __m256 load_halves_twice(const uint8_t *p, size_t step)
{
    __m128i h = _mm_cvtsi32_si128(rf_load_u16(p));
    h = _mm_insert_epi16(h, rf_load_u16(p + step), 1);
    h = _mm_insert_epi16(h, rf_load_u16(p + 2 * step), 2);
    h = _mm_insert_epi16(h, rf_load_u16(p + 3 * step), 3);
    return _mm256_cvtph_ps(_mm_unpacklo_epi16(h, h));
}

RF_INLINE eight eight_q5_k(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q5_k);
    const __m256i zero = _mm256_setzero_si256(), sixteen = _mm256_set1_epi8(16);
    __m256i part[8], min_part[8];
    for (size_t i = 0; i < 4; i++) {
        const uint8_t *block = blocks + i * bytes;
        const size_t k = (at + 2 * i) * 128;
        const __m128i codes = rf_scales_k(block);
        const __m256i high = rf_load_256(block + offsetof(rf_block_q5_k, qh));
        __m256i sum[2][2] = {{zero, zero}, {zero, zero}};
        int16_t scales[8];
        _mm_storeu_si128((__m128i *)scales, _mm_cvtepu8_epi16(codes));
        RF_KEEP_IN_MEMORY(scales);
        for (int j = 0; j < 8; j++) {
            const __m256i bit =
                j < 4 ? _mm256_slli_epi16(high, 4 - j) : _mm256_srli_epi16(high, j - 4);
            const __m256i code = _mm256_or_si256(codes_q4_k(block + offsetof(rf_block_q5_k, qs), j),
                                                 _mm256_and_si256(bit, sixteen));
            add_codes(code, in->high + k + 32 * j, in->low + k + 32 * j, rf_i16(scales[j]),
                      sum[j / 4]);
        }
        const __m256i mins = _mm256_mullo_epi32(_mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8)),
                                                rf_load_256(in->sums_32 + k / 32));
        part[2 * i] = join_sums(sum[0]);
        part[2 * i + 1] = join_sums(sum[1]);
        min_part[2 * i] = _mm256_blend_epi32(zero, mins, 0x0F);
        min_part[2 * i + 1] = _mm256_blend_epi32(zero, mins, 0xF0);
    }
    const __m256 minus = _mm256_set1_ps(-0.0f);
    return (eight){.sum = rf_sum_each_of_8(part),
                   .min_sum = rf_sum_each_of_8(min_part),
                   .scale = load_halves_twice(blocks, bytes),
                   .min_scale = _mm256_xor_ps(load_halves_twice(blocks + 2, bytes), minus)};
}

/* Partial sums of the four folds of a block of q6_K; k is the block's first element. */
RF_INLINE void part_q6_k(const uint8_t *block, const input *in, size_t k, __m256i part[4])
{
    const __m256i four = _mm256_set1_epi8(15), two = _mm256_set1_epi8(0x30);
    const __m256i zero = _mm256_setzero_si256();
    const __m128i packed =
        _mm_loadu_si128((const __m128i *)(block + offsetof(rf_block_q6_k, scales)));
    __m256i offset[2];
    int16_t scales[16];
    rf_store_256(scales, _mm256_cvtepi8_epi16(packed));
    RF_KEEP_IN_MEMORY(scales);
    times_sums(packed, in->sums + k / 16, offset); /* codes are 32 too high */
    for (int half = 0; half < 2; half++) {
        const __m256i l0 = rf_load_256(block + 64 * half), l1 = rf_load_256(block + 64 * half + 32);
        const __m256i h = rf_load_256(block + offsetof(rf_block_q6_k, qh) + 32 * half);
        const int8_t *high = in->high + k + 128 * half, *low = in->low + k + 128 * half;
        __m256i a[2] = {zero, zero}, b[2] = {zero, zero};
        add_codes(_mm256_or_si256(_mm256_and_si256(l0, four),
                                  _mm256_and_si256(_mm256_slli_epi16(h, 4), two)),
                  high, low, pair_of_scales(scales, 4 * half), a);
        add_codes(_mm256_or_si256(_mm256_and_si256(l1, four),
                                  _mm256_and_si256(_mm256_slli_epi16(h, 2), two)),
                  high + 32, low + 32, pair_of_scales(scales, 4 * half + 1), a);
        add_codes(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l0, 4), four),
                                  _mm256_and_si256(h, two)),
                  high + 64, low + 64, pair_of_scales(scales, 4 * half + 2), b);
        add_codes(_mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(l1, 4), four),
                                  _mm256_and_si256(_mm256_srli_epi16(h, 2), two)),
                  high + 96, low + 96, pair_of_scales(scales, 4 * half + 3), b);
        const __m256i wrong = _mm256_slli_epi32(offset[half], 5);
        part[2 * half] = _mm256_sub_epi32(join_sums(a), _mm256_blend_epi32(zero, wrong, 0x0F));
        part[2 * half + 1] = _mm256_sub_epi32(join_sums(b), _mm256_blend_epi32(zero, wrong, 0xF0));
    }
}

RF_INLINE eight eight_q6_k(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q6_k);
    __m256i part[8];
    part_q6_k(blocks, in, (size_t)at * 64, part);
    part_q6_k(blocks + bytes, in, (size_t)at * 64 + 256, part + 4);
    const __m128 d0 = _mm_set1_ps(rf_load_f16(blocks + offsetof(rf_block_q6_k, d)));
    const __m128 d1 = _mm_set1_ps(rf_load_f16(blocks + bytes + offsetof(rf_block_q6_k, d)));
    return (eight){.sum = rf_sum_each_of_8(part), .scale = _mm256_set_m128(d1, d0)};
}

RF_INLINE eight eight_iq4_nl(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_iq4_nl);
    const int16_t *q = in->q + (size_t)at * 32;
    const __m256i table = _mm256_xor_si256(rf_iq4_table(), _mm256_set1_epi8(-128));
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        /* An index with its top bit set gives 0, so values plus 128 come out as 16 bits. */
        const __m256i both =
            _mm256_or_si256(rf_load_bytes_u16(blocks + i * bytes + 2), rf_i16(-0x8000));
        const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(both, rf_i16(-0x7FF1)));
        const __m256i high = _mm256_shuffle_epi8(table, _mm256_srai_epi16(both, 4));
        part[i] = _mm256_add_epi32(madd_load(low, q + 32 * i), madd_load(high, q + 32 * i + 16));
    }
    const __m256i offset = _mm256_slli_epi32(rf_load_256(in->sums_32 + at), 7);
    return (eight){.sum = _mm256_sub_epi32(rf_sum_each_of_8(part), offset),
                   .scale = load_halves(blocks, bytes)};
}

/* Partial sums of the four folds of a block of iq4_xs, with 128 added to the values of the table:
 * then they are unsigned. k is the block's first element. */
RF_INLINE void part_iq4_xs(const uint8_t *block, const input *in, size_t k, __m256i table,
                           __m256i part[4])
{
    const uint8_t *qs = block + offsetof(rf_block_iq4_xs, qs);
    const __m256i zero = _mm256_setzero_si256();
    const __m256i scale = rf_scales_iq4_xs(block);
    const __m256i wrong =
        _mm256_slli_epi32(_mm256_mullo_epi32(scale, rf_load_256(in->sums_32 + k / 32)), 7);
    int32_t twice[8]; /* each scale in both halves */
    rf_store_256(twice, _mm256_blend_epi16(scale, _mm256_slli_epi32(scale, 16), 0xAA));
    RF_KEEP_IN_MEMORY(twice);
    for (int f = 0; f < 4; f++) {
        __m256i sum[2] = {zero, zero};
        for (int j = 2 * f; j < 2 * f + 2; j++) {
            add_codes(rf_look_up_nibbles(table, qs + 16 * j), in->high + k + 32 * j,
                      in->low + k + 32 * j, _mm256_set1_epi32(twice[j]), sum);
        }
        part[f] = join_sums(sum);
    }
    part[0] = _mm256_sub_epi32(part[0], _mm256_blend_epi32(zero, wrong, 0x03));
    part[1] = _mm256_sub_epi32(part[1], _mm256_blend_epi32(zero, wrong, 0x0C));
    part[2] = _mm256_sub_epi32(part[2], _mm256_blend_epi32(zero, wrong, 0x30));
    part[3] = _mm256_sub_epi32(part[3], _mm256_blend_epi32(zero, wrong, 0xC0));
}

RF_INLINE eight eight_iq4_xs(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_iq4_xs);
    const __m256i table = _mm256_xor_si256(rf_iq4_table(), _mm256_set1_epi8(-128));
    __m256i part[8];
    part_iq4_xs(blocks, in, (size_t)at * 64, table, part);
    part_iq4_xs(blocks + bytes, in, (size_t)at * 64 + 256, table, part + 4);
    const __m128 d0 = _mm_set1_ps(rf_load_f16(blocks));
    const __m128 d1 = _mm_set1_ps(rf_load_f16(blocks + bytes));
    return (eight){.sum = rf_sum_each_of_8(part), .scale = _mm256_set_m128(d1, d0)};
}

/* Partial sums of a block of codes 0 .. 3, which are 1 too high; 16 bits hold 3 * 64 * 2 * 8. */
RF_INLINE __m256i part_ternary(const __m256i code[8], const input *in, size_t k)
{
    __m256i high = _mm256_setzero_si256(), low = high;
    for (size_t j = 0; j < 8; j++) {
        const size_t at = k + 32 * j;
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(code[j], rf_load_256(in->high + at)));
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(code[j], rf_load_256(in->low + at)));
    }
    const __m256i sum =
        _mm256_add_epi32(_mm256_madd_epi16(high, rf_i16(128)), _mm256_madd_epi16(low, rf_i16(1)));
    return _mm256_sub_epi32(sum, rf_load_256(in->sums_32 + k / 32));
}

RF_INLINE eight eight_tq1_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_tq1_0);
    __m256i part[8], code[8];
    for (size_t i = 0; i < 8; i++) {
        rf_codes_tq1_0(blocks + i * bytes, code);
        part[i] = part_ternary(code, in, (at + i) * 256);
    }
    return (eight){.sum = rf_sum_each_of_8(part),
                   .scale = load_halves(blocks + offsetof(rf_block_tq1_0, d), bytes)};
}

RF_INLINE eight eight_tq2_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_tq2_0);
    __m256i part[8], code[8];
    for (size_t i = 0; i < 8; i++) {
        rf_codes_tq2_0(blocks + i * bytes, code);
        part[i] = part_ternary(code, in, (at + i) * 256);
    }
    return (eight){.sum = rf_sum_each_of_8(part),
                   .scale = load_halves(blocks + offsetof(rf_block_tq2_0, d), bytes)};
}

/* ---- the rest of a row ------------------------------------------------------------------- */

/* Partial sums over count weights. */
RF_INLINE __m256i fold_dot(const int16_t *w, const int16_t *q, uint32_t count)
{
    __m256i acc = _mm256_setzero_si256();
    for (uint32_t i = 0; i < count; i += 16) {
        rf_add_i32(&acc, madd_load(rf_load_256(w + i), q + i));
    }
    return acc;
}

/* Partial sums of the minimums of a fold; sums begins at the fold. */
RF_INLINE __m256i fold_min_dot(const int16_t *mins, const int32_t *sums, uint32_t fold)
{
    if (fold < 128) {
        int32_t sum = 0;
        for (uint32_t j = 0; j < fold / 16; j++) {
            sum += mins[j] * sums[j];
        }
        return _mm256_zextsi128_si256(_mm_cvtsi32_si128(sum));
    }
    __m256i acc = _mm256_setzero_si256();
    for (uint32_t j = 0; j < fold / 16; j += 8) {
        const __m256i code = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(mins + j)));
        acc = _mm256_add_epi32(acc, _mm256_mullo_epi32(code, rf_load_256(sums + j)));
    }
    return acc;
}

/* Folds [at, at + count), count <= 8, of a row; the others are zero. */
RF_INLINE eight few_folds(const uint8_t *weight, const input *in, uint32_t at, uint32_t count,
                          const shape s)
{
    __m256i part[8], min_part[8];
    float scale[8] = {0}, min_scale[8] = {0};
    memset(part, 0, sizeof part);
    memset(min_part, 0, sizeof min_part);
    for (uint32_t f = 0; f < count; weight += s.block_bytes) {
        rf_unpacked w;
        s.unpack(weight, &w);
        RF_KEEP_IN_MEMORY(w);
        for (uint32_t i = 0; i < s.block; i += s.fold, f++) {
            const size_t k = (size_t)(at + f) * s.fold;
            part[f] = fold_dot(w.w + i, in->q + k, s.fold);
            scale[f] = w.scale;
            if (s.min_step != 0) {
                min_part[f] = fold_min_dot(w.mins + i / 16, in->sums + k / 16, s.fold);
                min_scale[f] = w.min_scale;
            }
        }
    }
    return (eight){.sum = rf_sum_each_of_8(part),
                   .min_sum = rf_sum_each_of_8(min_part),
                   .scale = _mm256_loadu_ps(scale),
                   .min_scale = _mm256_loadu_ps(min_scale)};
}

/* ---- rows -------------------------------------------------------------------------------- */

/* q = 128 * high + low, both in -64 .. 64; count is a multiple of 32. */
static void split_codes(const int16_t *q, size_t count, int8_t *high, int8_t *low)
{
    for (size_t i = 0; i < count; i += 32) {
        const __m256i a = rf_load_256(q + i), b = rf_load_256(q + i + 16);
        const __m256i ha = _mm256_srai_epi16(_mm256_add_epi16(a, rf_i16(64)), 7);
        const __m256i hb = _mm256_srai_epi16(_mm256_add_epi16(b, rf_i16(64)), 7);
        const __m256i la = _mm256_sub_epi16(a, _mm256_slli_epi16(ha, 7));
        const __m256i lb = _mm256_sub_epi16(b, _mm256_slli_epi16(hb, 7));
        rf_store_256(high + i, _mm256_permute4x64_epi64(_mm256_packs_epi16(ha, hb), 0xD8));
        rf_store_256(low + i, _mm256_permute4x64_epi64(_mm256_packs_epi16(la, lb), 0xD8));
    }
}

/* Scratch of one token: two arrays of k / 32 with a spare vector each, two of k, and one of k
 * int16. */
static size_t input_bytes(uint32_t k)
{
    return 2 * ((size_t)k / 32 + 8) * 4 + 4 * (size_t)k;
}

/* Fills what the rows read of token t, once for all rows of a call. */
static void prepare(input *in, const rf_matmul *job, uint32_t t, const shape *s, uint8_t *scratch)
{
    const uint8_t *act = rf_matmul_act(job, t);
    const uint32_t folds_per_block = s->block / s->fold;
    const size_t k = job->k;
    in->q = rf_act_q16(act);
    in->act_scale = rf_act_scales(act, &job->layout);
    in->sums = rf_act_sums(act, &job->layout);
    in->fold_scale = (float *)(void *)(scratch + t * input_bytes(job->k));
    in->sums_32 = (int32_t *)(void *)(in->fold_scale + k / 32 + 8);
    in->high = (int8_t *)(in->sums_32 + k / 32 + 8);
    in->low = in->high + k;
    if (job->layout.act == RF_ACT_INT8) {
        int16_t *wide = (int16_t *)(void *)(in->low + k);
        rf_widen_avx2(&job->layout, act, wide);
        in->q = wide;
    }
    for (size_t f = 0; f < k / s->fold; f++) {
        in->fold_scale[f] = in->act_scale[f / folds_per_block];
    }
    for (size_t i = 0; i < k / 32; i++) {
        in->sums_32[i] = in->sums[2 * i] + in->sums[2 * i + 1];
    }
    if (s->block == 256) {
        split_codes(in->q, k, in->high, in->low);
    }
}

RF_INLINE __m256 add_eight(__m256 lanes, const eight *e, __m256 act, uint32_t min_step)
{
    lanes = _mm256_fmadd_ps(_mm256_mul_ps(e->scale, act), _mm256_cvtepi32_ps(e->sum), lanes);
    if (min_step != 0) {
        lanes = _mm256_fmadd_ps(_mm256_mul_ps(e->min_scale, act), _mm256_cvtepi32_ps(e->min_sum),
                                lanes);
    }
    return lanes;
}

/* All lines of count bytes from PREFETCH_BYTES ahead on. */
RF_INLINE void prefetch_ahead(const uint8_t *weight, uint32_t count)
{
    const uintptr_t at = (uintptr_t)weight + PREFETCH_BYTES;
    for (uint32_t i = 0; i < count; i += 64) {
        _mm_prefetch((const char *)(at + i), _MM_HINT_T0);
    }
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch,
                        const shape s, eight_fn direct)
{
    const uint32_t folds = job->k / s.fold, chunk_bytes = 8 * s.fold / s.block * s.block_bytes;
    input in[RF_DOT_TOKENS];
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, &s, scratch);
    }
    for (uint32_t row = first_row; row < last_row; row++) {
        for (uint32_t t = 0; t < job->token_count; t++) { /* the row stays in the first cache */
            const uint8_t *weight = job->weight + row * job->weight_row_bytes;
            __m256 lanes = _mm256_setzero_ps();
            uint32_t at = 0;
            for (; at + 8 <= folds; at += 8, weight += chunk_bytes) {
                if (t == 0) {
                    prefetch_ahead(weight, chunk_bytes);
                }
                const eight e =
                    direct ? direct(weight, &in[t], at) : few_folds(weight, &in[t], at, 8, s);
                lanes = add_eight(lanes, &e, _mm256_loadu_ps(in[t].fold_scale + at), s.min_step);
            }
            if (at < folds) {
                const eight e = few_folds(weight, &in[t], at, folds - at, s);
                const __m256 act = _mm256_loadu_ps(in[t].fold_scale + at); /* has a spare vector */
                const __m256 next = add_eight(lanes, &e, act, s.min_step);
                lanes = _mm256_blendv_ps(lanes, next, rf_first_lanes(folds - at));
            }
            rf_matmul_store(job, t, row, rf_sum_ymm(lanes));
        }
    }
}

void rf_dot_avx2(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    const rf_quant *quant = rf_quant_of(job->format);
    switch (job->format) { /* each case is the loop above with its format inlined */
    case RF_Q4_0:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q4_0), 32, 0, rf_unpack_q4_0}, eight_q4_0);
        break;
    case RF_Q4_1:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q4_1), 32, 32, rf_unpack_q4_1}, eight_q4_1);
        break;
    case RF_Q5_0:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q5_0), 32, 0, rf_unpack_q5_0}, eight_q5_0);
        break;
    case RF_Q5_1:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q5_1), 32, 32, rf_unpack_q5_1}, eight_q5_1);
        break;
    case RF_Q8_0:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q8_0), 32, 0, rf_unpack_q8_0}, eight_q8_0);
        break;
    case RF_Q2_K:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_q2_k), 256, 16, rf_unpack_q2_k}, eight_q2_k);
        break;
    case RF_Q3_K:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_q3_k), 256, 0, rf_unpack_q3_k}, eight_q3_k);
        break;
    case RF_Q4_K:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_q4_k), 256, 32, rf_unpack_q4_k}, eight_q4_k);
        break;
    case RF_Q5_K:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_q5_k), 128, 32, rf_unpack_q5_k}, eight_q5_k);
        break;
    case RF_Q6_K:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_q6_k), 64, 0, rf_unpack_q6_k}, eight_q6_k);
        break;
    case RF_IQ4_NL:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_iq4_nl), 32, 0, rf_unpack_iq4_nl}, eight_iq4_nl);
        break;
    case RF_IQ4_XS:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_iq4_xs), 64, 0, rf_unpack_iq4_xs}, eight_iq4_xs);
        break;
    case RF_TQ1_0:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_tq1_0), 256, 0, rf_unpack_tq1_0}, eight_tq1_0);
        break;
    case RF_TQ2_0:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_tq2_0), 256, 0, rf_unpack_tq2_0}, eight_tq2_0);
        break;
    default: /* formats without code of their own */
        dot_rows(
            job, first, last, scratch,
            (shape){quant->block, quant->block_bytes, quant->fold, quant->min_step, quant->unpack},
            NULL);
        break;
    }
}
