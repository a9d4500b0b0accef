/* kernels/panel8_avx2.c: packed rows to panels of bytes (tile_avx2.h). Eight rows at a time: dwords
 * of packed bytes are transposed so that a row becomes a lane, then taken apart into codes.
 */
#include "kernels/tile_avx2.h"
#include "kernels/unpack_avx2.h"

/* Eight rows' blocks, and where their lanes begin in the record. */
typedef struct octet {
    const uint8_t *block[8];
    uint8_t *record;
} octet;

typedef void (*octet_fn)(const octet *in);

#define STEP_BYTES (RF_PANEL_ROWS * 4u)

/* 32 bytes of each row, from at on, as columns of dwords. */
RF_INLINE void load_columns(const octet *in, size_t at, __m256i v[8])
{
    for (int i = 0; i < 8; i++) {
        v[i] = rf_load_256(in->block[i] + at);
    }
    rf_transpose_8(v);
}

/* The same of 16 bytes: four columns. */
RF_INLINE void load_columns_4(const octet *in, size_t at, __m256i v[4])
{
    __m256i a[4];
    for (int i = 0; i < 4; i++) {
        a[i] = _mm256_loadu2_m128i((const __m128i *)(in->block[i + 4] + at),
                                   (const __m128i *)(in->block[i] + at));
    }
    const __m256i b0 = _mm256_unpacklo_epi32(a[0], a[1]), b1 = _mm256_unpackhi_epi32(a[0], a[1]);
    const __m256i b2 = _mm256_unpacklo_epi32(a[2], a[3]), b3 = _mm256_unpackhi_epi32(a[2], a[3]);
    v[0] = _mm256_unpacklo_epi64(b0, b2);
    v[1] = _mm256_unpackhi_epi64(b0, b2);
    v[2] = _mm256_unpacklo_epi64(b1, b3);
    v[3] = _mm256_unpackhi_epi64(b1, b3);
}

RF_INLINE void store_step(const octet *in, size_t step, __m256i codes)
{
    rf_store_256(in->record + step * STEP_BYTES, codes);
}

/* Bits shift .. of every byte, as mask says. */
RF_INLINE __m256i bits_of(__m256i v, int shift, int mask)
{
    return _mm256_and_si256(_mm256_srli_epi16(v, shift), _mm256_set1_epi8((char)mask));
}

/* One half a row. */
RF_INLINE void store_halves(const octet *in, size_t at, size_t to, bool negate)
{
    __m128i h = _mm_setzero_si128();
    h = _mm_insert_epi16(h, rf_load_u16(in->block[0] + at), 0);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[1] + at), 1);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[2] + at), 2);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[3] + at), 3);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[4] + at), 4);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[5] + at), 5);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[6] + at), 6);
    h = _mm_insert_epi16(h, rf_load_u16(in->block[7] + at), 7);
    const __m256 values = _mm256_cvtph_ps(h);
    const __m256 sign = _mm256_set1_ps(negate ? -0.0f : 0.0f);
    _mm256_storeu_ps((float *)(void *)(in->record + to), _mm256_xor_ps(values, sign));
}

/* Eight scales of each row to rows in lanes, each twice. */
RF_INLINE void store_scales(const octet *in, size_t to, __m256i v[8])
{
    const __m256i low = _mm256_set1_epi32(0xFFFF);
    rf_transpose_8(v);
    for (size_t j = 0; j < 8; j++) {
        const __m256i twice =
            _mm256_or_si256(_mm256_slli_epi32(v[j], 16), _mm256_and_si256(v[j], low));
        rf_store_256(in->record + to + j * STEP_BYTES, twice);
    }
}

/* Eight codes of minimums of each row, as both parts of the record want them. */
RF_INLINE void store_mins(const octet *in, size_t pairs_to, size_t fours_to, __m256i v[8])
{
    rf_transpose_8(v);
    for (size_t j = 0; j < 8; j += 4) {
        const __m256i a = _mm256_or_si256(v[j], _mm256_slli_epi32(v[j + 1], 16));
        const __m256i b = _mm256_or_si256(v[j + 2], _mm256_slli_epi32(v[j + 3], 16));
        rf_store_256(in->record + pairs_to + j / 2 * STEP_BYTES, _mm256_slli_epi16(a, 4));
        rf_store_256(in->record + pairs_to + (j / 2 + 1) * STEP_BYTES, _mm256_slli_epi16(b, 4));
        /* a and b as bytes: 0 - 1 - and 2 - 3 - (a code has no high byte). */
        const __m256i order =
            _mm256_setr_epi8(0, 2, -1, -1, 4, 6, -1, -1, 8, 10, -1, -1, 12, 14, -1, -1, 0, 2, -1,
                             -1, 4, 6, -1, -1, 8, 10, -1, -1, 12, 14, -1, -1);
        const __m256i low = _mm256_shuffle_epi8(a, order), high = _mm256_shuffle_epi8(b, order);
        rf_store_256(in->record + fours_to + j / 4 * STEP_BYTES,
                     _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
    }
}

/* The low and the high eight of sixteen bytes of each row as integers. */
RF_INLINE void widen_codes(const __m128i codes[8], bool high, __m256i v[8])
{
    for (int i = 0; i < 8; i++) {
        v[i] = _mm256_cvtepi8_epi32(high ? _mm_srli_si128(codes[i], 8) : codes[i]);
    }
}

RF_INLINE void store_scales_16(const octet *in, size_t to, const __m128i codes[8])
{
    __m256i v[8];
    widen_codes(codes, false, v);
    store_scales(in, to, v);
    widen_codes(codes, true, v);
    store_scales(in, to + 8 * STEP_BYTES, v);
}

/* ---- blocks of 32 ------------------------------------------------------------------------ */

RF_INLINE void nibble_columns(const octet *in, size_t at)
{
    __m256i v[4];
    load_columns_4(in, at, v);
    for (size_t i = 0; i < 4; i++) {
        store_step(in, i, bits_of(v[i], 0, 15));
        store_step(in, i + 4, bits_of(v[i], 4, 15));
    }
}

RF_INLINE void octet_q4_0(const octet *in)
{
    nibble_columns(in, 2);
    store_halves(in, 0, rf_scale_at(RF_SHAPE_Q4_0), false);
}

RF_INLINE void octet_q4_1(const octet *in)
{
    nibble_columns(in, 4);
    store_halves(in, 0, rf_scale_at(RF_SHAPE_Q4_1), false);
    store_halves(in, 2, rf_min_at(RF_SHAPE_Q4_1), false);
}

/* high: where the 32 fifth bits of a row begin. */
RF_INLINE void five_columns(const octet *in, size_t high, size_t at)
{
    const __m256i even = _mm256_set1_epi32(0x08040201), odd = _mm256_slli_epi16(even, 4);
    __m256i v[4];
    uint32_t words[8];
    for (int i = 0; i < 8; i++) {
        words[i] = rf_load_u32(in->block[i] + high);
    }
    const __m256i bits = rf_load_256(words);
    load_columns_4(in, at, v);
    for (int i = 0; i < 8; i++) {
        /* Step i needs bits 4 i .. 4 i + 3: byte i / 2 four times, then a bit for each byte. */
        const __m256i byte =
            _mm256_add_epi8(_mm256_set1_epi8((char)(i / 2)),
                            _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12, 0,
                                             0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12));
        const __m256i one = i % 2 == 0 ? even : odd;
        const __m256i hit =
            _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(bits, byte), one), one);
        const __m256i code = bits_of(v[i % 4], i < 4 ? 0 : 4, 15);
        store_step(in, (size_t)i,
                   _mm256_or_si256(code, _mm256_and_si256(hit, _mm256_set1_epi8(16))));
    }
}

RF_INLINE void octet_q5_0(const octet *in)
{
    five_columns(in, 2, 6);
    store_halves(in, 0, rf_scale_at(RF_SHAPE_Q5_0), false);
}

RF_INLINE void octet_q5_1(const octet *in)
{
    five_columns(in, 4, 8);
    store_halves(in, 0, rf_scale_at(RF_SHAPE_Q5_1), false);
    store_halves(in, 2, rf_min_at(RF_SHAPE_Q5_1), false);
}

/* ---- blocks of 256 ----------------------------------------------------------------------- */

RF_INLINE void octet_q2_k(const octet *in)
{
    const __m128i four = _mm_set1_epi8(15);
    __m128i scales[8], mins[8];
    for (size_t c = 0; c < 2; c++) {
        __m256i v[8];
        load_columns(in, offsetof(rf_block_q2_k, qs) + 32 * c, v);
        for (int part = 0; part < 4; part++) {
            for (size_t i = 0; i < 8; i++) {
                store_step(in, 32 * c + 8 * (size_t)part + i, bits_of(v[i], 2 * part, 3));
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        const __m128i packed = _mm_loadu_si128((const __m128i *)in->block[i]);
        scales[i] = _mm_and_si128(packed, four);
        mins[i] = _mm_and_si128(_mm_srli_epi16(packed, 4), four);
    }
    store_scales_16(in, rf_scales_at(RF_SHAPE_Q2_K), scales);
    const size_t to = rf_mins_at(RF_SHAPE_Q2_K);
    __m256i v[8];
    widen_codes(mins, false, v);
    store_mins(in, to, to + 8 * STEP_BYTES, v);
    widen_codes(mins, true, v);
    store_mins(in, to + 4 * STEP_BYTES, to + 10 * STEP_BYTES, v);
    store_halves(in, offsetof(rf_block_q2_k, d), rf_scale_at(RF_SHAPE_Q2_K), false);
    store_halves(in, offsetof(rf_block_q2_k, dmin), rf_min_at(RF_SHAPE_Q2_K), true);
}

RF_INLINE void octet_q3_k(const octet *in)
{
    __m128i scales[8];
    __m256i high[8];
    load_columns(in, offsetof(rf_block_q3_k, hmask), high);
    for (size_t c = 0; c < 2; c++) {
        __m256i v[8];
        load_columns(in, offsetof(rf_block_q3_k, qs) + 32 * c, v);
        for (int part = 0; part < 4; part++) {
            for (size_t i = 0; i < 8; i++) {
                const __m256i third = _mm256_slli_epi16(bits_of(high[i], part, 1), 2);
                store_step(in, 32 * c + 8 * (size_t)part + i,
                           _mm256_or_si256(bits_of(v[i], 2 * part, 3), third));
            }
        }
        for (size_t i = 0; i < 8; i++) {
            high[i] = _mm256_srli_epi16(high[i], 4);
        }
    }
    for (int i = 0; i < 8; i++) {
        scales[i] = rf_scales_q3_k(in->block[i]);
    }
    store_scales_16(in, rf_scales_at(RF_SHAPE_Q3_K), scales);
    store_halves(in, offsetof(rf_block_q3_k, d), rf_scale_at(RF_SHAPE_Q3_K), false);
}

/* What q4_K and q5_K have before their codes. */
RF_INLINE void head_k(const octet *in)
{
    __m256i scales[8], mins[8];
    for (int i = 0; i < 8; i++) {
        const __m128i codes = rf_scales_k(in->block[i]);
        scales[i] = _mm256_cvtepu8_epi32(codes);
        mins[i] = _mm256_cvtepu8_epi32(_mm_srli_si128(codes, 8));
    }
    store_scales(in, rf_scales_at(RF_SHAPE_Q4_K), scales);
    const size_t to = rf_mins_at(RF_SHAPE_Q4_K);
    store_mins(in, to, to + 4 * STEP_BYTES, mins);
    store_halves(in, 0, rf_scale_at(RF_SHAPE_Q4_K), false);
    store_halves(in, 2, rf_min_at(RF_SHAPE_Q4_K), true);
}

RF_INLINE void octet_q4_k(const octet *in)
{
    for (size_t c = 0; c < 4; c++) {
        __m256i v[8];
        load_columns(in, offsetof(rf_block_q4_k, qs) + 32 * c, v);
        for (size_t i = 0; i < 8; i++) {
            store_step(in, 16 * c + i, bits_of(v[i], 0, 15));
            store_step(in, 16 * c + 8 + i, bits_of(v[i], 4, 15));
        }
    }
    head_k(in);
}

RF_INLINE void octet_q5_k(const octet *in)
{
    __m256i high[8];
    load_columns(in, offsetof(rf_block_q5_k, qh), high);
    for (size_t c = 0; c < 4; c++) {
        __m256i v[8];
        load_columns(in, offsetof(rf_block_q5_k, qs) + 32 * c, v);
        for (size_t i = 0; i < 8; i++) {
            const __m256i low5 = _mm256_slli_epi16(bits_of(high[i], 0, 1), 4);
            const __m256i high5 = _mm256_slli_epi16(bits_of(high[i], 1, 1), 4);
            store_step(in, 16 * c + i, _mm256_or_si256(bits_of(v[i], 0, 15), low5));
            store_step(in, 16 * c + 8 + i, _mm256_or_si256(bits_of(v[i], 4, 15), high5));
            high[i] = _mm256_srli_epi16(high[i], 2);
        }
    }
    head_k(in);
}

RF_INLINE void octet_q6_k(const octet *in)
{
    __m128i scales[8];
    for (size_t h = 0; h < 2; h++) {
        __m256i high[8];
        load_columns(in, offsetof(rf_block_q6_k, qh) + 32 * h, high);
        for (size_t side = 0; side < 2; side++) {
            __m256i v[8];
            load_columns(in, 64 * h + 32 * side, v);
            for (size_t i = 0; i < 8; i++) {
                const size_t step = 32 * h + 8 * side + i;
                const __m256i two = _mm256_slli_epi16(bits_of(high[i], 0, 3), 4);
                const __m256i next = _mm256_slli_epi16(bits_of(high[i], 4, 3), 4);
                store_step(in, step, _mm256_or_si256(bits_of(v[i], 0, 15), two));
                store_step(in, step + 16, _mm256_or_si256(bits_of(v[i], 4, 15), next));
                high[i] = _mm256_srli_epi16(high[i], 2);
            }
        }
    }
    for (int i = 0; i < 8; i++) {
        const uint8_t *at = in->block[i] + offsetof(rf_block_q6_k, scales);
        scales[i] = _mm_loadu_si128((const __m128i *)at);
    }
    store_scales_16(in, rf_scales_at(RF_SHAPE_Q6_K), scales);
    store_halves(in, offsetof(rf_block_q6_k, d), rf_scale_at(RF_SHAPE_Q6_K), false);
}

/* ---- panels ------------------------------------------------------------------------------ */

RF_INLINE void make_panel(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel,
                          const rf_shape s, size_t block_bytes, octet_fn fill)
{
    const uint32_t block_count = job->k / s.block;
    for (uint32_t first = 0; first < RF_PANEL_ROWS; first += 8) {
        octet in = {.record = panel + first * 4};
        for (uint32_t i = 0; i < 8; i++) {
            /* Rows beyond the end repeat the last one; their results are dropped. */
            const uint32_t r = row + RF_MIN(first + i, count - 1);
            in.block[i] = job->weight + r * job->weight_row_bytes;
        }
        for (uint32_t b = 0; b < block_count; b++) {
            fill(&in);
            for (int i = 0; i < 8; i++) {
                in.block[i] += block_bytes;
            }
            in.record += rf_record_bytes(s);
        }
    }
}

void rf_panel8_avx2(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel)
{
    switch (job->format) { /* each case is the loop above with its format inlined */
    case RF_Q4_0:
        make_panel(job, row, count, panel, RF_SHAPE_Q4_0, sizeof(rf_block_q4_0), octet_q4_0);
        break;
    case RF_Q4_1:
        make_panel(job, row, count, panel, RF_SHAPE_Q4_1, sizeof(rf_block_q4_1), octet_q4_1);
        break;
    case RF_Q5_0:
        make_panel(job, row, count, panel, RF_SHAPE_Q5_0, sizeof(rf_block_q5_0), octet_q5_0);
        break;
    case RF_Q5_1:
        make_panel(job, row, count, panel, RF_SHAPE_Q5_1, sizeof(rf_block_q5_1), octet_q5_1);
        break;
    case RF_Q2_K:
        make_panel(job, row, count, panel, RF_SHAPE_Q2_K, sizeof(rf_block_q2_k), octet_q2_k);
        break;
    case RF_Q3_K:
        make_panel(job, row, count, panel, RF_SHAPE_Q3_K, sizeof(rf_block_q3_k), octet_q3_k);
        break;
    case RF_Q4_K:
        make_panel(job, row, count, panel, RF_SHAPE_Q4_K, sizeof(rf_block_q4_k), octet_q4_k);
        break;
    case RF_Q5_K:
        make_panel(job, row, count, panel, RF_SHAPE_Q5_K, sizeof(rf_block_q5_k), octet_q5_k);
        break;
    case RF_Q6_K:
        make_panel(job, row, count, panel, RF_SHAPE_Q6_K, sizeof(rf_block_q6_k), octet_q6_k);
        break;
    default:
        break;
    }
}
