/* kernels/matmul_avx512.c: quantised weights times integer activations with AVX-512, and the
 * overlay of the table.
 *
 * 32 rows are unpacked once into a panel (panel_avx512.c), then all tokens pass it six at a time
 * (matmul_bytes_avx512.c, matmul_words_avx512.c). Here: what a tile needs of its tokens, and where
 * its results go.
 */
#include "kernels/tile_avx512.h"

/* A sum as two words: sum = low + 512 high, low in 0 .. 511; |sum| <= 32 * 8191. */
RF_INLINE __m512i two_words(__m512i sums)
{
    const __m512i high = _mm512_set1_epi32((int)0xFFFF0000u), low = _mm512_set1_epi32(511);
    return _mm512_or_si512(_mm512_and_si512(_mm512_slli_epi32(sums, 7), high),
                           _mm512_and_si512(sums, low));
}

static void prepare_mins(const int32_t *sums, const rf_panel_shape *s, uint32_t k, int32_t *out)
{
    if (s->fold == 32) {
        for (size_t i = 0; i < k / 32; i++) {
            const float sum = (float)(sums[2 * i] + sums[2 * i + 1]);
            memcpy(out + i, &sum, sizeof sum);
        }
        return;
    }
    for (size_t i = 0; i < k / 16; i += 16) {
        if (s->min_step == 16) {
            rf_store_512(out + i, two_words(rf_load_512(sums + i)));
        } else {
            const __m512i sums_32 = _mm512_castsi256_si512(rf_sums_of_32(sums + i));
            rf_store_256(out + i / 2, _mm512_castsi512_si256(two_words(sums_32)));
        }
    }
}

/* Blocks of 256: the multipliers, and the sums of q itself, which are those of a = m q divided by
 * m: |quotient| <= 2032 and 1 / m is good to 2^-14, so that rounding gives the integer. */
static void prepare_bytes_256(const uint8_t *act, const rf_act_layout *layout,
                              const rf_panel_shape *s, int32_t *multiplier, int32_t *start)
{
    const int16_t *m = rf_act_multipliers(act, layout);
    const int32_t *sums = rf_act_sums(act, layout);
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i minus = _mm512_set1_epi32(-(int)s->offset);
    if (s->offset == 0) {
        memset(start, 0, layout->k / s->sub * sizeof *start);
    }
    for (size_t i = 0; i < layout->k / 16; i += 16) {
        const __m256i m8 =
            _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(m + i / 2)));
        rf_store_256(multiplier + i / 2, _mm256_or_si256(m8, _mm256_set1_epi32(1 << 16)));
        if (s->offset == 0) {
            continue;
        }
        const __m256i inverse = _mm256_castps_si256(_mm256_rcp14_ps(_mm256_cvtepi32_ps(m8)));
        const __m512i inverses = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(inverse));
        const __m512 quotient =
            _mm512_mul_ps(_mm512_cvtepi32_ps(rf_load_512(sums + i)), _mm512_castsi512_ps(inverses));
        const __m512i starts = _mm512_mullo_epi32(_mm512_cvtps_epi32(quotient), minus);
        if (s->sub == 16) {
            rf_store_512(start + i, starts);
        } else {
            int32_t each[16];
            rf_store_512(each, starts);
            rf_store_256(start + i / 2, rf_sums_of_32(each));
        }
    }
}

static void prepare_bytes_32(const int32_t *sums, int32_t offset, uint32_t k, int32_t *start)
{
    for (size_t i = 0; i < k / 32; i++) {
        start[i] = -offset * (sums[2 * i] + sums[2 * i + 1]);
    }
}

typedef struct matmul_state {
    rf_tiling tiling;
    bool bytes;     /* panels of bytes */
    int32_t *spare; /* rf_tile_spare words of each token */
} matmul_state;

/* Tokens [first, first + count) of a job; a tile that is not full repeats its last. */
static void prepare_tile(rf_tile *in, const rf_matmul *job, const matmul_state *s, uint32_t first,
                         uint32_t count)
{
    const rf_panel_shape *shape = &s->tiling.shape;
    const uint32_t k = job->k;
    for (uint32_t t = 0; t < RF_TILE_512; t++) {
        if (t >= count) {
            in->q[t] = in->q[t - 1];
            in->scale[t] = in->scale[t - 1];
            in->mins[t] = in->mins[t - 1];
            in->start[t] = in->start[t - 1];
            in->multiplier[t] = in->multiplier[t - 1];
            continue;
        }
        const uint8_t *act = rf_matmul_act(job, first + t);
        const int32_t *sums = rf_act_sums(act, &job->layout);
        int32_t *start = s->spare + t * rf_tile_spare(k);
        int32_t *multiplier = start + k / 16, *mins = multiplier + k / 32;
        in->q[t] = act;
        in->scale[t] = rf_act_scales(act, &job->layout);
        in->start[t] = start;
        in->multiplier[t] = multiplier;
        in->mins[t] = mins;
        if (shape->min_step != 0) {
            prepare_mins(sums, shape, k, mins);
        }
        if (s->bytes && shape->block == 32) {
            prepare_bytes_32(sums, (int32_t)shape->offset, k, start);
        } else if (s->bytes) {
            prepare_bytes_256(act, &job->layout, shape, multiplier, start);
        }
    }
    in->blocks_shift = 0;
    for (uint32_t fold = shape->fold; fold < shape->block; fold *= 2) {
        in->blocks_shift++;
    }
}

static void store_tile(const rf_matmul *job, uint32_t row, uint32_t rows, uint32_t first,
                       uint32_t tokens, rf_tile_sums sums)
{
    for (uint32_t t = 0; t < tokens; t++) {
        rf_matmul_store_rows(job, first + t, row, rows, sums[t]);
    }
}

static void run_panel(const rf_matmul *job, matmul_state *s, uint32_t row, uint32_t rows)
{
    const uint32_t tiles = (job->token_count + RF_TILE_512 - 1) / RF_TILE_512;
    const uint64_t bytes = RF_PANEL_512 * job->weight_row_bytes;
    const uintptr_t after = (uintptr_t)job->weight + (row + rows) * job->weight_row_bytes;
    s->tiling.next.at = after;
    s->tiling.next.end = after + bytes;
    s->tiling.next.lines = (uint32_t)(bytes / 64 / tiles / s->tiling.folds) + 1;
    for (uint32_t first = 0; first < job->token_count; first += RF_TILE_512) {
        const uint32_t count = RF_MIN(RF_TILE_512, job->token_count - first);
        rf_tile_sums sums;
        rf_tile in;
        prepare_tile(&in, job, s, first, count);
        if (s->bytes) {
            rf_tile_bytes_avx512(&s->tiling, &in, count, sums);
        } else {
            rf_tile_words_avx512(&s->tiling, &in, count, sums);
        }
        store_tile(job, row, rows, first, count, sums);
    }
}

void rf_matmul_quant_avx512(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch)
{
    if (rf_dot_avx512(job, first_row, last_row, scratch)) {
        return;
    }
    matmul_state s = {.bytes = job->layout.act == RF_ACT_INT8};
    rf_tiling *tiling = &s.tiling;
    tiling->shape = rf_panel_shape_of(job->format);
    tiling->folds = job->k / tiling->shape.fold;
    tiling->record_bytes = rf_panel_record_bytes(&tiling->shape, !s.bytes);
    tiling->code_bytes = rf_panel_code_bytes(&tiling->shape, !s.bytes);
    tiling->panel = scratch;
    const uint64_t panel_bytes = (uint64_t)tiling->folds * tiling->record_bytes;
    s.spare = (int32_t *)(void *)((uint8_t *)scratch + panel_bytes);
    for (uint32_t row = first_row; row < last_row; row += RF_PANEL_512) {
        const uint32_t rows = RF_MIN(RF_PANEL_512, last_row - row);
        if (s.bytes) {
            rf_panel_bytes_avx512(job, row, rows, scratch);
        } else {
            rf_panel_words_avx512(job, row, rows, scratch);
        }
        run_panel(job, &s, row, rows);
    }
}

RF_FOR_ANY_CPU void rf_kernels_avx512(rf_kernels *kernels)
{
    static const rf_kernel_entry quant = {RF_CPU_AVX512, "matmul_avx512.c"};
    static const rf_kernel_entry wide = {RF_CPU_AVX512, "matmul_float_avx512.c"};
    static const rf_kernel_entry attend = {RF_CPU_AVX512, "attend_avx512.c"};
    static const rf_format floats[] = {RF_F32, RF_F16, RF_BF16};
    for (uint32_t i = 0; i < RF_QUANT_COUNT; i++) {
        for (int act = RF_ACT_INT16; act <= RF_ACT_INT8; act++) {
            kernels->matmul[rf_quants[i].format][act] = rf_matmul_quant_avx512;
            kernels->matmul_entry[rf_quants[i].format][act] = quant;
        }
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(floats); i++) {
        kernels->matmul[floats[i]][RF_ACT_F32] = rf_matmul_float_avx512;
        kernels->matmul_entry[floats[i]][RF_ACT_F32] = wide;
    }
    kernels->attend = rf_attend_avx512;
    kernels->attend_join = rf_attend_join_avx2; /* a set alone over scalar has both as well */
    kernels->attend_entry = attend;
    rf_vector_avx512(kernels);
}
