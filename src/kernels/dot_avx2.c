/* kernels/dot_avx2.c: rows of quantised weights times few tokens, straight from the packed bytes:
 * all formats but the K formats. dot_k_avx2.c says how lanes and folds meet. Activations are int16
 * here, in blocks of 256 as two planes of bytes; int8 ones are widened, but for q4_0 and q4_1,
 * whose nibbles meet them as bytes.
 */
#include "kernels/unpack_avx2.h"

/* One token, and what every row needs of it; the last four are in the worker's scratch. */
typedef struct input {
    const int16_t *q;
    const int8_t *q8;       /* int8 activations as they came */
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
    bool bytes; /* takes int8 activations as they are */
} shape;

typedef struct eight { /* eight folds, one a lane */
    __m256i sum, min_sum;
    __m256 scale, min_scale;
} eight;

/* Eight folds of a row from fold at on: blocks are their packed bytes. */
typedef eight (*eight_fn)(const uint8_t *blocks, const input *in, uint32_t at);
/* Count folds, 2 or 4, of a row's end: in is of that end; the other lanes have anything. */
typedef eight (*few_fn)(const uint8_t *blocks, const input *in, uint32_t count);

RF_INLINE __m256i madd_load(__m256i w, const int16_t *q)
{
    return _mm256_madd_epi16(w, rf_load_256(q));
}

/* Eight pairs of halves, step bytes apart. */
RF_INLINE void load_half_pairs(const uint8_t *p, size_t step, __m256 *first, __m256 *second)
{
    const __m128i part = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    __m128i a = _mm_cvtsi32_si128((int)rf_load_u32(p));
    __m128i b = _mm_cvtsi32_si128((int)rf_load_u32(p + 4 * step));
    a = _mm_insert_epi32(a, (int)rf_load_u32(p + step), 1);
    b = _mm_insert_epi32(b, (int)rf_load_u32(p + 5 * step), 1);
    a = _mm_insert_epi32(a, (int)rf_load_u32(p + 2 * step), 2);
    b = _mm_insert_epi32(b, (int)rf_load_u32(p + 6 * step), 2);
    a = _mm_shuffle_epi8(_mm_insert_epi32(a, (int)rf_load_u32(p + 3 * step), 3), part);
    b = _mm_shuffle_epi8(_mm_insert_epi32(b, (int)rf_load_u32(p + 7 * step), 3), part);
    *first = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
    *second = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
}

/* Element i: the sum of the integers of v[i]. */
RF_INLINE __m256i sum_each_of_few(const __m256i v[4], uint32_t count)
{
    const __m256i a = rf_add_halves_32(v[0], v[1]);
    const __m256i b = count == 2 ? a : rf_add_halves_32(v[2], v[3]);
    const __m256i sums = rf_add_halves_64(a, b);
    return _mm256_zextsi128_si256(
        _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)));
}

RF_INLINE __m256 load_few_halves(const uint8_t *p, size_t step, uint32_t count)
{
    __m128i h = _mm_cvtsi32_si128(rf_load_u16(p));
    h = _mm_insert_epi16(h, rf_load_u16(p + step), 1);
    if (count == 4) {
        h = _mm_insert_epi16(h, rf_load_u16(p + 2 * step), 2);
        h = _mm_insert_epi16(h, rf_load_u16(p + 3 * step), 3);
    }
    return _mm256_cvtph_ps(h);
}

RF_INLINE __m256i part_q8_0(const uint8_t *qs, const int16_t *q)
{
    return _mm256_add_epi32(madd_load(rf_load_bytes_i16(qs), q),
                            madd_load(rf_load_bytes_i16(qs + 16), q + 16));
}

RF_INLINE eight eight_q8_0(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q8_0);
    const int16_t *q = in->q + (size_t)at * 32;
    __m256i part[8];
    for (size_t i = 0; i < 8; i++) {
        part[i] = part_q8_0(blocks + i * bytes + 2, q + 32 * i);
    }
    return (eight){.sum = rf_sum_each_of_8(part), .scale = rf_load_halves(blocks, bytes)};
}

RF_INLINE eight few_q8_0(const uint8_t *blocks, const input *in, uint32_t count)
{
    const size_t bytes = sizeof(rf_block_q8_0);
    __m256i part[4];
    for (size_t i = 0; i < count; i++) {
        part[i] = part_q8_0(blocks + i * bytes + 2, in->q + 32 * i);
    }
    return (eight){.sum = sum_each_of_few(part, count),
                   .scale = load_few_halves(blocks, bytes, count)};
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
    return (eight){.sum = _mm256_sub_epi32(sum, offset), .scale = rf_load_halves(blocks, bytes)};
}

RF_INLINE eight eight_q4_1(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_1);
    eight out = {.sum = sum_nibbles(blocks + 4, bytes, in->q + (size_t)at * 32),
                 .min_sum = rf_load_256(in->sums_32 + at)};
    load_half_pairs(blocks, bytes, &out.scale, &out.min_scale);
    return out;
}

/* Sums of pairs of 32 nibbles times bytes: 16 bits hold 15 * 127 * 2. */
RF_INLINE __m256i pair_sums(const uint8_t *qs, const int8_t *q)
{
    const __m256i shift = _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4);
    const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)qs));
    const __m256i codes = _mm256_and_si256(_mm256_srlv_epi32(both, shift), _mm256_set1_epi8(15));
    return _mm256_maddubs_epi16(codes, rf_load_256(q));
}

/* Eight blocks of 32 nibbles. 16 bits hold the first two additions as well (4 * 3810 = 15240). */
RF_INLINE __m256i sum_nibble_bytes(const uint8_t *qs, size_t bytes, const int8_t *q)
{
    const __m256i ones = rf_i16(1);
    __m256i two[4], four[2];
    for (size_t i = 0; i < 4; i++) {
        const __m256i a = pair_sums(qs + 2 * i * bytes, q + 64 * i);
        const __m256i b = pair_sums(qs + (2 * i + 1) * bytes, q + 64 * i + 32);
        two[i] = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    for (size_t i = 0; i < 2; i++) {
        const __m256i a = two[2 * i], b = two[2 * i + 1];
        four[i] = _mm256_madd_epi16(
            _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)), ones);
    }
    return _mm256_add_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                            _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

RF_INLINE eight eight_q4_0_bytes(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_0);
    const __m256i sum = sum_nibble_bytes(blocks + 2, bytes, in->q8 + (size_t)at * 32);
    const __m256i offset = _mm256_slli_epi32(rf_load_256(in->sums_32 + at), 3);
    return (eight){.sum = _mm256_sub_epi32(sum, offset), .scale = rf_load_halves(blocks, bytes)};
}

RF_INLINE eight eight_q4_1_bytes(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q4_1);
    eight out = {.sum = sum_nibble_bytes(blocks + 4, bytes, in->q8 + (size_t)at * 32),
                 .min_sum = rf_load_256(in->sums_32 + at)};
    load_half_pairs(blocks, bytes, &out.scale, &out.min_scale);
    return out;
}

RF_INLINE __m256i sum_few_nibble_bytes(const uint8_t *qs, size_t bytes, const int8_t *q,
                                       uint32_t count)
{
    __m256i part[4];
    for (size_t i = 0; i < count; i++) {
        part[i] = _mm256_madd_epi16(pair_sums(qs + i * bytes, q + 32 * i), rf_i16(1));
    }
    return sum_each_of_few(part, count);
}

RF_INLINE eight few_q4_0_bytes(const uint8_t *blocks, const input *in, uint32_t count)
{
    const size_t bytes = sizeof(rf_block_q4_0);
    const __m256i sum = sum_few_nibble_bytes(blocks + 2, bytes, in->q8, count);
    const __m256i offset = _mm256_slli_epi32(rf_load_256(in->sums_32), 3);
    return (eight){.sum = _mm256_sub_epi32(sum, offset),
                   .scale = load_few_halves(blocks, bytes, count)};
}

RF_INLINE eight few_q4_1_bytes(const uint8_t *blocks, const input *in, uint32_t count)
{
    const size_t bytes = sizeof(rf_block_q4_1);
    return (eight){.sum = sum_few_nibble_bytes(blocks + 4, bytes, in->q8, count),
                   .min_sum = rf_load_256(in->sums_32),
                   .scale = load_few_halves(blocks, bytes, count),
                   .min_scale = load_few_halves(blocks + 2, bytes, count)};
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
    return (eight){.sum = _mm256_sub_epi32(sum, offset), .scale = rf_load_halves(blocks, bytes)};
}

RF_INLINE eight eight_q5_1(const uint8_t *blocks, const input *in, uint32_t at)
{
    const size_t bytes = sizeof(rf_block_q5_1);
    eight out = {.sum = sum_fives(blocks + 4, blocks + 8, bytes, in->q + (size_t)at * 32),
                 .min_sum = rf_load_256(in->sums_32 + at)};
    load_half_pairs(blocks, bytes, &out.scale, &out.min_scale);
    return out;
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
                   .scale = rf_load_halves(blocks, bytes)};
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
                   .scale = rf_load_halves(blocks + offsetof(rf_block_tq1_0, d), bytes)};
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
                   .scale = rf_load_halves(blocks + offsetof(rf_block_tq2_0, d), bytes)};
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
    in->q8 = rf_act_q8(act);
    if (job->layout.act == RF_ACT_INT8 && !s->bytes) {
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
        rf_split_codes(in->q, k, in->high, in->low);
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

/* What is left of a row of 32-blocks after whole chunks, as a chunk of its own: zeros behind. */
typedef struct rest {
    _Alignas(32) int16_t q[8 * 32]; /* or int8 */
    _Alignas(32) int32_t sums_32[8];
} rest;

static input rest_of(const input *in, uint32_t at, uint32_t count, bool bytes, rest *copy)
{
    memset(copy, 0, sizeof *copy);
    if (bytes) {
        memcpy(copy->q, in->q8 + (size_t)at * 32, (size_t)count * 32);
    } else {
        memcpy(copy->q, in->q + (size_t)at * 32, (size_t)count * 32 * sizeof *copy->q);
    }
    memcpy(copy->sums_32, in->sums_32 + at, count * sizeof *copy->sums_32);
    input out = *in;
    out.q = copy->q;
    out.q8 = (const int8_t *)(const void *)copy->q;
    out.sums_32 = copy->sums_32;
    return out;
}

RF_INLINE void dot_rows(const rf_matmul *job, uint32_t first_row, uint32_t last_row, void *scratch,
                        const shape s, eight_fn direct, few_fn few)
{
    const uint32_t folds = job->k / s.fold, chunk_bytes = 8 * s.fold / s.block * s.block_bytes;
    const bool padded = s.block == 32;
    const uintptr_t prefetch_end = rf_prefetch_first(job, first_row, last_row);
    const uint32_t left = folds % 8;
    input in[RF_DOT_TOKENS_MAX], end[RF_DOT_TOKENS_MAX];
    rest ends[RF_DOT_TOKENS_MAX];
    uint8_t blocks[8 * sizeof(rf_block_q8_0)] = {0};
    for (uint32_t t = 0; t < job->token_count; t++) {
        prepare(&in[t], job, t, &s, scratch);
        if (padded && left != 0) {
            end[t] = rest_of(&in[t], folds - left, left, s.bytes, &ends[t]);
        }
    }
    for (uint32_t row = first_row; row < last_row; row++) {
        for (uint32_t t = 0; t < job->token_count; t++) { /* the row stays in the first cache */
            const uint8_t *weight = job->weight + row * job->weight_row_bytes;
            __m256 lanes = _mm256_setzero_ps();
            uint32_t at = 0;
            for (; at + 8 <= folds; at += 8, weight += chunk_bytes) {
                if (t == 0) {
                    rf_prefetch_lines(weight, chunk_bytes, prefetch_end);
                }
                const eight e = direct(weight, &in[t], at);
                lanes = add_eight(lanes, &e, _mm256_loadu_ps(in[t].fold_scale + at), s.min_step);
            }
            if (at < folds) {
                eight e;
                const uint8_t *last = weight; /* may run on into the next row, for nothing */
                if (padded && (row + 1 == last_row || job->weight_row_bytes < chunk_bytes)) {
                    memcpy(blocks, weight, left * s.block_bytes);
                    last = blocks;
                }
                if (few && left <= 2) {
                    e = few(last, &end[t], 2);
                } else if (few && left <= 4) {
                    e = few(last, &end[t], 4);
                } else if (padded) {
                    e = direct(last, &end[t], 0);
                } else {
                    e = few_folds(weight, &in[t], at, left, s);
                }
                const __m256 act = _mm256_loadu_ps(in[t].fold_scale + at); /* has a spare vector */
                const __m256 next = add_eight(lanes, &e, act, s.min_step);
                lanes = _mm256_blendv_ps(lanes, next, rf_first_lanes(left));
            }
            rf_matmul_store(job, t, row, rf_sum_ymm(lanes));
        }
    }
}

void rf_dot_avx2(const rf_matmul *job, uint32_t first, uint32_t last, void *scratch)
{
    switch (job->format) { /* each case is the loop above with its format inlined */
    case RF_Q4_0:
        if (job->layout.act == RF_ACT_INT8) {
            dot_rows(job, first, last, scratch,
                     (shape){32, sizeof(rf_block_q4_0), 32, 0, rf_unpack_q4_0, true},
                     eight_q4_0_bytes, few_q4_0_bytes);
        } else {
            dot_rows(job, first, last, scratch,
                     (shape){32, sizeof(rf_block_q4_0), 32, 0, rf_unpack_q4_0, false}, eight_q4_0,
                     NULL);
        }
        break;
    case RF_Q4_1:
        if (job->layout.act == RF_ACT_INT8) {
            dot_rows(job, first, last, scratch,
                     (shape){32, sizeof(rf_block_q4_1), 32, 32, rf_unpack_q4_1, true},
                     eight_q4_1_bytes, few_q4_1_bytes);
        } else {
            dot_rows(job, first, last, scratch,
                     (shape){32, sizeof(rf_block_q4_1), 32, 32, rf_unpack_q4_1, false}, eight_q4_1,
                     NULL);
        }
        break;
    case RF_Q5_0:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q5_0), 32, 0, rf_unpack_q5_0, false}, eight_q5_0,
                 NULL);
        break;
    case RF_Q5_1:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q5_1), 32, 32, rf_unpack_q5_1, false}, eight_q5_1,
                 NULL);
        break;
    case RF_Q8_0:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_q8_0), 32, 0, rf_unpack_q8_0, false}, eight_q8_0,
                 few_q8_0);
        break;
    case RF_IQ4_NL:
        dot_rows(job, first, last, scratch,
                 (shape){32, sizeof(rf_block_iq4_nl), 32, 0, rf_unpack_iq4_nl, false}, eight_iq4_nl,
                 NULL);
        break;
    case RF_IQ4_XS:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_iq4_xs), 64, 0, rf_unpack_iq4_xs, false},
                 eight_iq4_xs, NULL);
        break;
    case RF_TQ1_0:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_tq1_0), 256, 0, rf_unpack_tq1_0, false}, eight_tq1_0,
                 NULL);
        break;
    case RF_TQ2_0:
        dot_rows(job, first, last, scratch,
                 (shape){256, sizeof(rf_block_tq2_0), 256, 0, rf_unpack_tq2_0, false}, eight_tq2_0,
                 NULL);
        break;
    default:
        break;
    }
}
