/* kernels/panel_avx512.c: 32 rows of a quantised format as one panel (panel_avx512.h), sixteen at a
 * time: each row's block is unpacked in its own order, then the rows are interleaved by 32 bits.
 */
#include "kernels/panel_avx512.h"

#define ROWS 16u /* unpacked together: a row is a lane */

/* What the formats' bytes have beside block, fold and minimums, which are those of rf_quants. */
typedef struct byte_codes {
    rf_format format;
    uint32_t sub, offset;
    bool wide; /* offset codes * 127 * sub exceeds 16 bits */
} byte_codes;
static const byte_codes byte_formats[] = {
    {RF_Q4_0, 0, 8, false},   {RF_Q4_1, 0, 0, false},     {RF_Q5_0, 0, 16, false},
    {RF_Q5_1, 0, 0, false},   {RF_Q8_0, 0, 128, false},   {RF_Q2_K, 16, 0, false},
    {RF_Q3_K, 16, 4, false},  {RF_Q4_K, 32, 0, true},     {RF_Q5_K, 32, 0, true},
    {RF_Q6_K, 16, 32, true},  {RF_IQ4_NL, 0, 128, false}, {RF_IQ4_XS, 32, 128, true},
    {RF_TQ1_0, 32, 1, false}, {RF_TQ2_0, 32, 1, false},
};

rf_panel_shape rf_panel_shape_of(rf_format format)
{
    _Static_assert(RF_ARRAY_COUNT(byte_formats) == RF_QUANT_COUNT, "a shape for each format");
    const rf_quant *quant = rf_quant_of(format);
    const byte_codes *bytes = byte_formats;
    while (bytes->format != format) {
        bytes++;
    }
    return (rf_panel_shape){.block = quant->block,
                            .fold = quant->fold,
                            .min_step = quant->min_step,
                            .sub = bytes->sub,
                            .offset = bytes->offset,
                            .wide = bytes->wide};
}

/* Words of 32 bits of sixteen rows, stride bytes apart: word w of row r goes to line w, lane r.
 * Lines are RF_PANEL_LINE apart; count is a multiple of 4. */
RF_INLINE void interleave_16(const void *rows, size_t stride, uint32_t count, uint8_t *out)
{
    for (uint32_t at = 0; at < count; at += 4, out += 4 * RF_PANEL_LINE) {
        const uint8_t *from = (const uint8_t *)rows + (size_t)at * 4;
        __m512i a[4]; /* lanes of 128 bits: rows i, i + 4, i + 8, i + 12 */
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++, from += stride) {
            const __m128i *p = (const __m128i *)(const void *)from;
            a[i] = _mm512_castsi128_si512(_mm_loadu_si128(p));
            p = (const __m128i *)(const void *)(from + 4 * stride);
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128(p), 1);
            p = (const __m128i *)(const void *)(from + 8 * stride);
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128(p), 2);
            p = (const __m128i *)(const void *)(from + 12 * stride);
            a[i] = _mm512_inserti32x4(a[i], _mm_loadu_si128(p), 3);
        }
        const __m512i low01 = _mm512_unpacklo_epi32(a[0], a[1]); /* words 0 1 of rows 0 1 | ... */
        const __m512i high01 = _mm512_unpackhi_epi32(a[0], a[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(a[2], a[3]);
        const __m512i high23 = _mm512_unpackhi_epi32(a[2], a[3]);
        rf_store_512(out, _mm512_unpacklo_epi64(low01, low23));
        rf_store_512(out + RF_PANEL_LINE, _mm512_unpackhi_epi64(low01, low23));
        rf_store_512(out + 2 * RF_PANEL_LINE, _mm512_unpacklo_epi64(high01, high23));
        rf_store_512(out + 3 * RF_PANEL_LINE, _mm512_unpackhi_epi64(high01, high23));
    }
}

/* A minimum's code c as the words c and 512 c. */
RF_INLINE int32_t min_words(int32_t code)
{
    return code | (int32_t)((uint32_t)code << 25);
}
RF_INLINE void store_scale(uint8_t *record, uint32_t record_bytes, uint32_t lane, float scale,
                           float min_scale)
{
    float *scales = (float *)(void *)(record + record_bytes - RF_PANEL_SCALES * RF_PANEL_LINE);
    scales[lane] = scale;
    scales[RF_PANEL_512 + lane] = min_scale;
}

/* ---- words ------------------------------------------------------------------------------- */

RF_INLINE void unpack_words(rf_format format, rf_unpack_fn other, const uint8_t *block,
                            rf_unpacked *out)
{
    switch (format) {
    case RF_Q4_0:
        rf_unpack_q4_0(block, out);
        break;
    case RF_Q5_0:
        rf_unpack_q5_0(block, out);
        break;
    case RF_Q8_0:
        rf_unpack_q8_0(block, out);
        break;
    case RF_Q2_K:
        rf_unpack_q2_k(block, out);
        break;
    case RF_Q3_K:
        rf_unpack_q3_k(block, out);
        break;
    case RF_Q4_K:
        rf_unpack_q4_k(block, out);
        break;
    case RF_Q5_K:
        rf_unpack_q5_k(block, out);
        break;
    case RF_Q6_K:
        rf_unpack_q6_k(block, out);
        break;
    case RF_IQ4_NL:
        rf_unpack_iq4_nl(block, out);
        break;
    case RF_IQ4_XS:
        rf_unpack_iq4_xs(block, out);
        break;
    default:
        other(block, out);
        break;
    }
}

void rf_panel_words_avx512(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel)
{
    const rf_quant *quant = rf_quant_of(job->format);
    const rf_panel_shape s = {
        .block = quant->block, .fold = quant->fold, .min_step = quant->min_step};
    const uint32_t blocks = job->k / s.block, folds = job->k / s.fold;
    const uint32_t record_bytes = rf_panel_record_bytes(&s, true);
    const uint32_t mins = s.min_step == 0 || s.fold == 32 ? 0 : s.fold / s.min_step;
    const rf_walk walk = rf_walk_of(folds);
    for (uint32_t b = 0; b < blocks; b++) {
        for (uint32_t lane = 0; lane < RF_PANEL_512; lane += ROWS) {
            rf_unpacked rows[ROWS];
            for (uint32_t i = 0; i < ROWS; i++) {
                const uint64_t r = row + RF_MIN(lane + i, count - 1);
                unpack_words(job->format, quant->unpack,
                             job->weight + r * job->weight_row_bytes +
                                 (uint64_t)b * quant->block_bytes,
                             &rows[i]);
            }
            for (uint32_t at = 0; at < s.block; at += s.fold) {
                const uint32_t place = rf_walk_place(&walk, (b * s.block + at) / s.fold);
                uint8_t *record = panel + (size_t)place * record_bytes;
                uint8_t *out = record + (size_t)lane * 4;
                interleave_16(rows[0].w + at, sizeof rows[0], s.fold / 2, out);
                out += rf_panel_code_bytes(&s, true);
                for (uint32_t i = 0; i < ROWS; i++) {
                    store_scale(record, record_bytes, lane + i, rows[i].scale,
                                s.min_step != 0 ? rows[i].min_scale : 0.0f);
                    for (uint32_t j = 0; j < mins; j++) {
                        const int32_t code = rows[i].mins[(at + j * s.min_step) / 16];
                        ((int32_t *)(void *)(out + (size_t)j * RF_PANEL_LINE))[i] = min_words(code);
                    }
                }
            }
        }
    }
}

/* ---- bytes ------------------------------------------------------------------------------- */

typedef struct code_row { /* one block of one row */
    _Alignas(64) uint8_t code[RF_BLOCK_MAX];
    int32_t sub[RF_BLOCK_MAX / 16]; /* as the panel holds them */
    int32_t mins[RF_BLOCK_MAX / 16];
    float scale, min_scale;
} code_row;

RF_INLINE __m256i byte_mask(int value)
{
    return _mm256_set1_epi8((char)value);
}
RF_INLINE __m256i and_bytes(__m256i v, int value)
{
    return _mm256_and_si256(v, byte_mask(value));
}

/* 16 bytes of nibbles to 32 codes. */
RF_INLINE __m256i nibbles_32(const uint8_t *qs)
{
    const __m128i both = _mm_loadu_si128((const __m128i *)(const void *)qs);
    return and_bytes(_mm256_set_m128i(_mm_srli_epi16(both, 4), both), 15);
}
RF_INLINE __m256i fives_32(const uint8_t *high, const uint8_t *qs)
{
    return _mm256_or_si256(nibbles_32(qs), _mm256_maskz_mov_epi8(rf_load_u32(high), byte_mask(16)));
}

RF_INLINE void codes_q4_0(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    rf_store_256(out->code, nibbles_32(block + 2));
}
RF_INLINE void codes_q4_1(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    out->min_scale = rf_load_f16(block + 2);
    rf_store_256(out->code, nibbles_32(block + 4));
}
RF_INLINE void codes_q5_0(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    rf_store_256(out->code, fives_32(block + 2, block + 6));
}
RF_INLINE void codes_q5_1(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    out->min_scale = rf_load_f16(block + 2);
    rf_store_256(out->code, fives_32(block + 4, block + 8));
}
RF_INLINE void codes_q8_0(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    rf_store_256(out->code, _mm256_xor_si256(rf_load_256(block + 2), byte_mask(128)));
}

RF_INLINE __m512i min_words_16(__m512i codes)
{
    return _mm512_or_si512(codes, _mm512_slli_epi32(codes, 25));
}

RF_INLINE void codes_q2_k(const uint8_t *block, code_row *out)
{
    const __m128i packed = _mm_loadu_si128((const __m128i *)(const void *)block);
    const __m128i four = _mm_set1_epi8(15);
    rf_store_512(out->sub, _mm512_cvtepu8_epi32(_mm_and_si128(packed, four)));
    rf_store_512(out->mins, min_words_16(_mm512_cvtepu8_epi32(
                                _mm_and_si128(_mm_srli_epi16(packed, 4), four))));
    out->scale = rf_load_f16(block + offsetof(rf_block_q2_k, d));
    out->min_scale = -rf_load_f16(block + offsetof(rf_block_q2_k, dmin));
    for (int half = 0; half < 2; half++) {
        __m256i q = rf_load_256(block + offsetof(rf_block_q2_k, qs) + 32 * half);
        for (int part = 0; part < 4; part++, q = _mm256_srli_epi16(q, 2)) {
            rf_store_256(out->code + 128 * half + 32 * part, and_bytes(q, 3));
        }
    }
}

RF_INLINE void codes_q3_k(const uint8_t *block, code_row *out)
{
    const __m512i scales = _mm512_cvtepi8_epi32(rf_scales_q3_k(block));
    __m256i high = rf_load_256(block);
    rf_store_512(out->sub, _mm512_and_si512(scales, _mm512_set1_epi32(0xFFFF)));
    out->scale = rf_load_f16(block + offsetof(rf_block_q3_k, d));
    for (int half = 0; half < 2; half++) {
        __m256i q = rf_load_256(block + offsetof(rf_block_q3_k, qs) + 32 * half);
        for (int part = 0; part < 4; part++, q = _mm256_srli_epi16(q, 2)) {
            const __m256i third = _mm256_slli_epi16(and_bytes(high, 1), 2);
            rf_store_256(out->code + 128 * half + 32 * part,
                         _mm256_or_si256(and_bytes(q, 3), third));
            high = _mm256_srli_epi16(high, 1);
        }
    }
}

RF_INLINE void scales_k(const uint8_t *block, code_row *out)
{
    const __m128i codes = rf_scales_k(block);
    const __m256i mins = _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8));
    rf_store_256(out->sub, _mm256_cvtepu8_epi32(codes));
    rf_store_256(out->mins, _mm256_or_si256(mins, _mm256_slli_epi32(mins, 25)));
    out->scale = rf_load_f16(block);
    out->min_scale = -rf_load_f16(block + 2);
}

RF_INLINE void codes_q4_k(const uint8_t *block, code_row *out)
{
    scales_k(block, out);
    for (int j = 0; j < 4; j++) {
        const __m256i q = rf_load_256(block + offsetof(rf_block_q4_k, qs) + 32 * j);
        rf_store_256(out->code + 64 * j, and_bytes(q, 15));
        rf_store_256(out->code + 64 * j + 32, and_bytes(_mm256_srli_epi16(q, 4), 15));
    }
}

RF_INLINE void codes_q5_k(const uint8_t *block, code_row *out)
{
    __m256i high = rf_load_256(block + offsetof(rf_block_q5_k, qh));
    scales_k(block, out);
    for (int j = 0; j < 4; j++, high = _mm256_srli_epi16(high, 2)) {
        const __m256i q = rf_load_256(block + offsetof(rf_block_q5_k, qs) + 32 * j);
        const __m256i a = _mm256_slli_epi16(and_bytes(high, 1), 4);
        const __m256i b = _mm256_slli_epi16(and_bytes(high, 2), 3);
        rf_store_256(out->code + 64 * j, _mm256_or_si256(and_bytes(q, 15), a));
        rf_store_256(out->code + 64 * j + 32,
                     _mm256_or_si256(and_bytes(_mm256_srli_epi16(q, 4), 15), b));
    }
}

RF_INLINE void codes_q6_k(const uint8_t *block, code_row *out)
{
    const uint8_t *scales = block + offsetof(rf_block_q6_k, scales);
    rf_store_512(out->sub,
                 _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)scales)));
    out->scale = rf_load_f16(block + offsetof(rf_block_q6_k, d));
    for (int half = 0; half < 2; half++) {
        const __m256i a = rf_load_256(block + 64 * half), b = rf_load_256(block + 64 * half + 32);
        const __m256i h = rf_load_256(block + offsetof(rf_block_q6_k, qh) + 32 * half);
        uint8_t *code = out->code + 128 * half;
        rf_store_256(code,
                     _mm256_or_si256(and_bytes(a, 15), and_bytes(_mm256_slli_epi16(h, 4), 0x30)));
        rf_store_256(code + 32,
                     _mm256_or_si256(and_bytes(b, 15), and_bytes(_mm256_slli_epi16(h, 2), 0x30)));
        rf_store_256(code + 64,
                     _mm256_or_si256(and_bytes(_mm256_srli_epi16(a, 4), 15), and_bytes(h, 0x30)));
        rf_store_256(code + 96, _mm256_or_si256(and_bytes(_mm256_srli_epi16(b, 4), 15),
                                                and_bytes(_mm256_srli_epi16(h, 2), 0x30)));
    }
}

RF_INLINE void codes_iq4_nl(const uint8_t *block, code_row *out)
{
    out->scale = rf_load_f16(block);
    rf_store_256(out->code,
                 _mm256_xor_si256(rf_look_up_nibbles(rf_iq4_table(), block + 2), byte_mask(128)));
}

RF_INLINE void codes_iq4_xs(const uint8_t *block, code_row *out)
{
    const __m256i table = _mm256_xor_si256(rf_iq4_table(), byte_mask(128));
    rf_store_256(out->sub, rf_scales_iq4_xs(block));
    out->scale = rf_load_f16(block);
    for (int j = 0; j < 8; j++) {
        const uint8_t *qs = block + offsetof(rf_block_iq4_xs, qs) + 16 * j;
        rf_store_256(out->code + 32 * j, rf_look_up_nibbles(table, qs));
    }
}

/* Without sub-scales: they are 1, for activations have multipliers. */
RF_INLINE void ternary(const __m256i code[8], float scale, code_row *out)
{
    out->scale = scale;
    rf_store_256(out->sub, _mm256_set1_epi32(1));
    for (int j = 0; j < 8; j++) {
        rf_store_256(out->code + 32 * j, code[j]);
    }
}
RF_INLINE void codes_tq1_0(const uint8_t *block, code_row *out)
{
    __m256i code[8];
    rf_codes_tq1_0(block, code);
    ternary(code, rf_load_f16(block + offsetof(rf_block_tq1_0, d)), out);
}
RF_INLINE void codes_tq2_0(const uint8_t *block, code_row *out)
{
    __m256i code[8];
    rf_codes_tq2_0(block, code);
    ternary(code, rf_load_f16(block + offsetof(rf_block_tq2_0, d)), out);
}

typedef void (*codes_fn)(const uint8_t *block, code_row *out);

RF_INLINE void make_panel(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel,
                          uint32_t block_bytes, codes_fn codes)
{
    const rf_panel_shape s = rf_panel_shape_of(job->format);
    const uint32_t blocks = job->k / s.block, folds = job->k / s.fold;
    const uint32_t record_bytes = rf_panel_record_bytes(&s, false);
    const uint32_t code_bytes = rf_panel_code_bytes(&s, false);
    const uint32_t subs = s.sub == 0 ? 0 : s.fold / s.sub;
    const uint32_t mins = s.min_step == 0 || s.fold == 32 ? 0 : s.fold / s.min_step;
    const rf_walk walk = rf_walk_of(folds);
    for (uint32_t b = 0; b < blocks; b++) {
        for (uint32_t lane = 0; lane < RF_PANEL_512; lane += ROWS) {
            code_row rows[ROWS];
            for (uint32_t i = 0; i < ROWS; i++) {
                const uint64_t r = row + RF_MIN(lane + i, count - 1);
                rows[i].min_scale = 0.0f;
                codes(job->weight + r * job->weight_row_bytes + (uint64_t)b * block_bytes,
                      &rows[i]);
            }
            for (uint32_t at = 0; at < s.block; at += s.fold) {
                const uint32_t place = rf_walk_place(&walk, (b * s.block + at) / s.fold);
                uint8_t *record = panel + (size_t)place * record_bytes;
                uint8_t *out = record + (size_t)lane * 4;
                interleave_16(rows[0].code + at, sizeof rows[0], s.fold / 4, out);
                out += code_bytes;
                if (subs != 0) {
                    interleave_16(rows[0].sub + at / s.sub, sizeof rows[0], subs, out);
                    out += (size_t)subs * RF_PANEL_LINE;
                }
                if (mins != 0) {
                    interleave_16(rows[0].mins + at / s.min_step, sizeof rows[0], mins, out);
                }
                for (uint32_t i = 0; i < ROWS; i++) {
                    store_scale(record, record_bytes, lane + i, rows[i].scale, rows[i].min_scale);
                }
            }
        }
    }
}

void rf_panel_bytes_avx512(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel)
{
    switch (job->format) { /* each case is the loop above with its format's unpacking inlined */
    case RF_Q4_0:
        make_panel(job, row, count, panel, sizeof(rf_block_q4_0), codes_q4_0);
        break;
    case RF_Q4_1:
        make_panel(job, row, count, panel, sizeof(rf_block_q4_1), codes_q4_1);
        break;
    case RF_Q5_0:
        make_panel(job, row, count, panel, sizeof(rf_block_q5_0), codes_q5_0);
        break;
    case RF_Q5_1:
        make_panel(job, row, count, panel, sizeof(rf_block_q5_1), codes_q5_1);
        break;
    case RF_Q8_0:
        make_panel(job, row, count, panel, sizeof(rf_block_q8_0), codes_q8_0);
        break;
    case RF_Q2_K:
        make_panel(job, row, count, panel, sizeof(rf_block_q2_k), codes_q2_k);
        break;
    case RF_Q3_K:
        make_panel(job, row, count, panel, sizeof(rf_block_q3_k), codes_q3_k);
        break;
    case RF_Q4_K:
        make_panel(job, row, count, panel, sizeof(rf_block_q4_k), codes_q4_k);
        break;
    case RF_Q5_K:
        make_panel(job, row, count, panel, sizeof(rf_block_q5_k), codes_q5_k);
        break;
    case RF_Q6_K:
        make_panel(job, row, count, panel, sizeof(rf_block_q6_k), codes_q6_k);
        break;
    case RF_IQ4_NL:
        make_panel(job, row, count, panel, sizeof(rf_block_iq4_nl), codes_iq4_nl);
        break;
    case RF_IQ4_XS:
        make_panel(job, row, count, panel, sizeof(rf_block_iq4_xs), codes_iq4_xs);
        break;
    case RF_TQ1_0:
        make_panel(job, row, count, panel, sizeof(rf_block_tq1_0), codes_tq1_0);
        break;
    default: /* tq2_0: the last that rf_panel_shape_of names */
        make_panel(job, row, count, panel, sizeof(rf_block_tq2_0), codes_tq2_0);
        break;
    }
}
