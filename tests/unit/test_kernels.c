/* tests/unit/test_kernels.c: the scalar kernels against references in double, and the kernels of
 * every instruction set that this machine has against the scalar ones, bit for bit.
 *
 * Buffers have exactly the size that the contract names, so that a sanitizer sees a read past them.
 */
#include "kernel_test.h"

#define TOKENS_MAX 70u
/* An emulated set is slow: from 14 on, counts 14 apart. */
#ifdef RF_TEST_AVX512_EMULATED
#define TOKENS_STEP(tokens) ((tokens) < 14 ? 1u : 14u)
#else
#define TOKENS_STEP(tokens) 1u
#endif

static const rf_format formats[] = {RF_F32,  RF_F16,    RF_BF16,   RF_Q4_0,  RF_Q4_1, RF_Q5_0,
                                    RF_Q5_1, RF_Q8_0,   RF_Q2_K,   RF_Q3_K,  RF_Q4_K, RF_Q5_K,
                                    RF_Q6_K, RF_IQ4_NL, RF_IQ4_XS, RF_TQ1_0, RF_TQ2_0};

/* ---- adversarial input ------------------------------------------------------------------- */

static void put_half(uint8_t *at, float value)
{
    const uint16_t half = rf_f32_to_f16(value);
    memcpy(at, &half, sizeof half);
}

/* Where a block has its scale and its minimum's scale; -1: none. */
static void scale_offsets(rf_format format, int *d, int *m)
{
    *d = 0, *m = -1;
    switch (format) {
    case RF_Q4_1:
    case RF_Q5_1:
    case RF_Q4_K:
    case RF_Q5_K:
        *m = 2;
        break;
    case RF_Q2_K:
        *d = 80, *m = 82;
        break;
    case RF_Q3_K:
        *d = 108;
        break;
    case RF_Q6_K:
        *d = 208;
        break;
    case RF_TQ1_0:
        *d = 52;
        break;
    case RF_TQ2_0:
        *d = 64;
        break;
    default:
        break;
    }
}

typedef enum pattern { RANDOM, ALL_ONES, ALL_ZEROS, LARGEST, PATTERN_COUNT } pattern;

static void fill_weights(rf_format format, uint8_t *w, uint64_t bytes, pattern kind, uint64_t seed)
{
    if (format == RF_F32 || format == RF_F16 || format == RF_BF16) {
        const size_t step = format == RF_F32 ? 4 : 2;
        for (uint64_t i = 0; i < bytes; i += step) {
            const float value =
                kind == RANDOM ? uniform(&seed, -2, 2) : (kind == LARGEST ? 6e4f : 0);
            const uint16_t half = format == RF_F16 ? rf_f32_to_f16(value) : rf_f32_to_bf16(value);
            memcpy(w + i, step == 4 ? (const void *)&value : (const void *)&half, step);
        }
        return;
    }
    const uint32_t block = rf_format_info_of(format)->block_bytes;
    int d, m;
    scale_offsets(format, &d, &m);
    for (uint64_t i = 0; i < bytes; i++) {
        w[i] = kind == RANDOM ? (uint8_t)next_random(&seed) : (kind == ALL_ONES ? 0xFF : 0);
    }
    for (uint64_t at = 0; at < bytes; at += block) {
        put_half(w + at + d, kind == RANDOM ? uniform(&seed, -1, 1) : 1.0f);
        if (m >= 0) {
            put_half(w + at + m, kind == RANDOM ? uniform(&seed, -1, 1) : 1.0f);
        }
        if (kind == LARGEST && format == RF_Q6_K) { /* (0 - 32) * -128 */
            memset(w + at + 192, 0x80, 16);
        } else if (kind == LARGEST && format == RF_Q8_0) {
            memset(w + at + 2, 0x80, 32);
        }
    }
}

/* ---- a job with its buffers -------------------------------------------------------------- */

typedef struct bench {
    rf_format format;
    uint32_t k, rows;
    uint64_t row_bytes;
    uint8_t *allocation, *weight;
    rf_act_layout layout;
    float *x;
    uint8_t *act;
    void *scratch;
    float *out;
} bench;

/* The precision that a test runs with: every test of a matmul goes over both. */
static rf_act wanted = RF_ACT_INT16;
static rf_act int16 = RF_ACT_INT16, int8 = RF_ACT_INT8;

static void take_act(void **state)
{
    wanted = *(rf_act *)*state;
}

static bench make_bench(rf_format format, uint32_t k, uint32_t rows, uint32_t tokens, pattern kind,
                        uint32_t shift)
{
    rf_kernels scalar;
    bench b = {.format = format, .k = k, .rows = rows};
    rf_kernels_scalar(&scalar);
    assert_true(rf_format_row_bytes(format, k, &b.row_bytes));
    b.allocation = malloc(b.row_bytes * rows + shift);
    b.weight = b.allocation + shift;
    fill_weights(format, b.weight, b.row_bytes * rows, kind, format * 1000u + k);
    const rf_act act = rf_act_for(format, wanted);
    b.layout = rf_act_layout_of(act, format, k);
    b.x = malloc(sizeof(float) * k * tokens);
    b.act = aligned_alloc(64, b.layout.row_bytes * tokens);
    fill_uniform(b.x, k * tokens, k + 7, -3, 3);
    if (kind != RANDOM) {
        for (uint32_t i = 0; i < k * tokens; i++) {
            b.x[i] = kind == ALL_ONES ? -1.5f : 1.5f;
        }
    }
    for (uint32_t t = 0; t < tokens; t++) {
        scalar.pack[act](&b.layout, b.x + (size_t)t * k, b.act + t * b.layout.row_bytes);
    }
    b.scratch = aligned_alloc(64, (rf_matmul_scratch_bytes(k) + 63) & ~63ull);
    b.out = malloc(sizeof(float) * rows * tokens);
    return b;
}

static void free_bench(bench *b)
{
    free(b->allocation);
    free(b->x);
    free(b->act);
    free(b->scratch);
    free(b->out);
}

static rf_matmul job_of(const bench *b, uint32_t tokens, float *out)
{
    return (rf_matmul){.weight = b->weight,
                       .weight_row_bytes = b->row_bytes,
                       .k = b->k,
                       .format = b->format,
                       .layout = b->layout,
                       .act = b->act,
                       .token_count = tokens,
                       .out = out,
                       .out_stride = b->rows};
}

static void run(const rf_kernels *kernels, const bench *b, const rf_matmul *job, uint32_t first,
                uint32_t last)
{
    kernels->matmul[b->format][b->layout.act](job, first, last, b->scratch);
}

/* ---- matmul ------------------------------------------------------------------------------ */

static uint32_t k_unit(rf_format format)
{
    return rf_format_info_of(format)->block_elements;
}

/* Steps from zero to the block's largest value; at least, for multipliers only refine it. */
static double limit_of(const rf_act_layout *layout)
{
    if (layout->act == RF_ACT_INT8)
        return 127.0;
    return layout->block == 32 ? 32767.0 : 8191.0;
}

/* |error| <= sum of |w| * half a step of the activation, and 2^-19 of the largest terms for the
 * sums in float (at most some 20 roundings a lane). */
static void the_scalar_matmul_is_as_exact_as_its_activations(void **state)
{
    take_act(state);
    rf_kernels kernels;
    rf_kernels_scalar(&kernels);
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        const uint32_t k = k_unit(formats[f]) == 1 ? 251 : 3 * k_unit(formats[f]) + 256;
        bench b =
            make_bench(formats[f], k / k_unit(formats[f]) * k_unit(formats[f]), 6, 3, RANDOM, 1);
        float *w = malloc(sizeof(float) * b.k);
        rf_matmul job = job_of(&b, 3, b.out);
        run(&kernels, &b, &job, 0, b.rows);
        for (uint32_t r = 0; r < b.rows; r++) {
            assert_true(rf_decode_row(b.format, b.weight + r * b.row_bytes, w, b.k));
            for (uint32_t t = 0; t < 3; t++) {
                const float *x = b.x + (size_t)t * b.k;
                const uint32_t block = b.layout.block ? b.layout.block : b.k;
                double exact = 0, bound = 0, largest = 0, sum = 0;
                for (uint32_t i = 0; i < b.k; i++) {
                    double amax = 0;
                    for (uint32_t j = i / block * block;
                         b.layout.block && j < i / block * block + block; j++) {
                        amax = fmax(amax, fabs((double)x[j]));
                    }
                    exact += (double)w[i] * x[i];
                    bound += fabs(w[i]) * amax / limit_of(&b.layout) * 0.506;
                    largest = fmax(largest, fabs((double)w[i]));
                    sum += fabs((double)x[i]);
                }
                bound += 0x1p-19 * largest * sum;
                const double error = fabs(exact - b.out[t * b.rows + r]);
                if (!(error <= bound)) {
                    fail_msg("%s: error %g, bound %g", rf_format_name(b.format), error, bound);
                }
            }
        }
        free(w);
        free_bench(&b);
    }
}

static void check_token_counts(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        const uint32_t unit = k_unit(formats[f]);
        const uint32_t ks[] = {unit, unit == 1 ? 15 : 3 * unit, unit == 1 ? 100 : 9 * unit,
                               unit == 1 ? 33 : 12 * unit};
        for (size_t i = 0; i < RF_ARRAY_COUNT(ks); i++) {
            bench b = make_bench(formats[f], ks[i], 37, TOKENS_MAX, RANDOM, i == 1);
            float *expected = malloc(sizeof(float) * b.rows * TOKENS_MAX);
            rf_matmul job = job_of(&b, TOKENS_MAX, expected);
            run(&scalar, &b, &job, 0, b.rows);
            for (uint32_t tokens = 1; tokens <= TOKENS_MAX; tokens += TOKENS_STEP(tokens)) {
                job = job_of(&b, tokens, b.out);
                run(kernels, &b, &job, 0, b.rows);
                assert_same_bits(b.out, expected, (size_t)b.rows * tokens,
                                 rf_format_name(b.format));
            }
            free(expected);
            free_bench(&b);
        }
    }
}

static void every_set_gives_the_scalar_bits_for_1_to_70_tokens(void **state)
{
    take_act(state);
    for_each_set(check_token_counts);
}

static void check_row_ranges(const rf_kernels *kernels)
{
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        const uint32_t unit = k_unit(formats[f]);
        bench b = make_bench(formats[f], unit == 1 ? 77 : 5 * unit, 83, 9, RANDOM, 0);
        float *expected = malloc(sizeof(float) * b.rows * 9);
        for (uint32_t tokens = 1; tokens <= 9; tokens += 4) {
            rf_matmul job = job_of(&b, tokens, expected);
            run(kernels, &b, &job, 0, b.rows);
            job.out = b.out;
            for (uint32_t step = 1; step <= 40; step += 13) {
                memset(b.out, 0xFF, sizeof(float) * b.rows * 9);
                for (uint32_t row = 0; row < b.rows; row += step) {
                    run(kernels, &b, &job, row, RF_MIN(row + step, b.rows));
                }
                assert_same_bits(b.out, expected, (size_t)b.rows * tokens, "pieces of rows");
            }
        }
        free(expected);
        free_bench(&b);
    }
}

static void pieces_of_any_number_of_rows_give_the_same_bits(void **state)
{
    take_act(state);
    for_each_set(check_row_ranges);
}

static void check_token_lists(const rf_kernels *kernels)
{
    static const uint32_t list[] = {5, 0, 17, 3, 11, 2, 16};
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        const uint32_t unit = k_unit(formats[f]), tokens = 18;
        bench b = make_bench(formats[f], unit == 1 ? 40 : 2 * unit, 21, tokens, RANDOM, 0);
        float *expected = malloc(sizeof(float) * b.rows * tokens);
        for (uint32_t count = 1; count <= RF_ARRAY_COUNT(list); count += 2) {
            fill_uniform(expected, b.rows * tokens, 5, -1, 1);
            fill_uniform(b.out, b.rows * tokens, 5, -1, 1);
            rf_matmul job = job_of(&b, count, expected);
            job.tokens = list;
            job.accumulate = true;
            run(&scalar, &b, &job, 0, b.rows);
            job.out = b.out;
            run(kernels, &b, &job, 0, b.rows);
            assert_same_bits(b.out, expected, (size_t)b.rows * tokens, rf_format_name(b.format));
        }
        free(expected);
        free_bench(&b);
    }
}

static void listed_tokens_are_added_to_and_others_left_alone(void **state)
{
    take_act(state);
    for_each_set(check_token_lists);
}

/* The exact fold sums at the largest codes, scales and activations: an overflow would show as a
 * wrong value against double. */
static void check_extremes(const rf_kernels *kernels)
{
    for (size_t f = 3; f < RF_ARRAY_COUNT(formats); f++) {
        for (int kind = ALL_ONES; kind < PATTERN_COUNT; kind++) {
            for (uint32_t tokens = 1; tokens <= 8; tokens += 7) {
                bench b = make_bench(formats[f], 512, 17, tokens, (pattern)kind, 0);
                float *w = malloc(sizeof(float) * b.k);
                rf_matmul job = job_of(&b, tokens, b.out);
                run(kernels, &b, &job, 0, b.rows);
                double exact = 0;
                assert_true(rf_decode_row(b.format, b.weight, w, b.k));
                for (uint32_t i = 0; i < b.k; i++) {
                    exact += (double)w[i] * b.x[i];
                }
                for (uint32_t i = 0; i < b.rows * tokens; i++) {
                    if (!(fabs(b.out[i] - exact) <= 1e-6 * fabs(exact))) {
                        fail_msg("%s, pattern %d: %.9g, expected %.9g", rf_format_name(b.format),
                                 kind, (double)b.out[i], exact);
                    }
                }
                free(w);
                free_bench(&b);
            }
        }
    }
}

static void sums_at_the_largest_codes_and_activations_do_not_overflow(void **state)
{
    take_act(state);
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    check_extremes(&scalar);
    for_each_set(check_extremes);
}

/* ---- activations ------------------------------------------------------------------------- */

static void check_packing(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    const rf_format weights[] = {RF_Q8_0, RF_Q4_K};
    for (size_t f = 0; f < 2; f++) {
        const uint32_t k = 1024;
        const rf_act_layout layout = rf_act_layout_of(wanted, weights[f], k);
        float *x = malloc(sizeof(float) * k);
        uint8_t *a = aligned_alloc(64, layout.row_bytes), *b = aligned_alloc(64, layout.row_bytes);
        uint64_t seed = 11;
        for (int round = 0; round < 400; round++) {
            const float size = ldexpf(1.0f, (int)(next_random(&seed) % 250) - 140);
            fill_uniform(x, k, next_random(&seed), -size, size);
            if (round % 4 == 1) { /* ties: halves of a step */
                for (uint32_t i = 0; i < k; i++) {
                    x[i] = (float)((int)(next_random(&seed) % 16382) - 8191) * 0.5f;
                }
            } else if (round % 4 == 2) {
                memset(x + 256, 0, 512 * sizeof(float));
            } else if (round % 4 == 3) {
                x[next_random(&seed) % k] = round % 8 == 3 ? NAN : -INFINITY;
            }
            memset(a, 0, layout.row_bytes);
            memset(b, 0, layout.row_bytes);
            scalar.pack[wanted](&layout, x, a);
            kernels->pack[wanted](&layout, x, b);
            assert_memory_equal(a, b, layout.row_bytes);
        }
        free(x);
        free(a);
        free(b);
    }
    for (uint32_t k = 1; k < 40; k++) {
        const rf_act_layout layout = rf_act_layout_of(RF_ACT_F32, RF_F32, k);
        float *x = malloc(sizeof(float) * k);
        float *packed = aligned_alloc(64, layout.row_bytes);
        fill_uniform(x, k, k, -1, 1);
        memset(packed, 0xFF, layout.row_bytes);
        kernels->pack[RF_ACT_F32](&layout, x, packed);
        assert_memory_equal(packed, x, sizeof(float) * k);
        for (uint32_t i = k; i < (k + 15) / 16 * 16; i++) {
            assert_true(packed[i] == 0.0f);
        }
        free(x);
        free(packed);
    }
}

static void every_set_packs_the_scalar_bits(void **state)
{
    take_act(state);
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    check_packing(&scalar);
    for_each_set(check_packing);
}

static void a_packed_value_is_within_half_a_step_and_its_sums_are_exact(void **state)
{
    (void)state;
    rf_kernels kernels;
    rf_kernels_scalar(&kernels);
    for (int f = 0; f < 2; f++) {
        const rf_act_layout layout = rf_act_layout_of(RF_ACT_INT16, f ? RF_Q6_K : RF_Q4_0, 512);
        float x[512];
        uint8_t *packed = aligned_alloc(64, layout.row_bytes);
        fill_uniform(x, 512, 3, -40, 40);
        kernels.pack[RF_ACT_INT16](&layout, x, packed);
        const int limit = f ? 8191 : 32767;
        int largest = 0;
        for (uint32_t i = 0; i < 512; i++) {
            const int q = rf_act_q16(packed)[i];
            const double scale = rf_act_scales(packed, &layout)[i / layout.block];
            assert_true(fabs(q * scale - x[i]) <= 0.506 * scale);
            largest = abs(q) > largest ? abs(q) : largest;
        }
        assert_int_equal(largest, limit);
        for (uint32_t i = 0; i < 512; i += 16) {
            int sum = 0;
            for (uint32_t j = i; j < i + 16; j++) {
                sum += rf_act_q16(packed)[j];
            }
            assert_int_equal(sum, rf_act_sums(packed, &layout)[i / 16]);
        }
        free(packed);
    }
}

/* The step of 32 values: never coarser than a scale of their own by more than one part in m. */
static void int8_in_blocks_of_256_has_a_step_for_each_32(void **state)
{
    (void)state;
    rf_kernels kernels;
    rf_kernels_scalar(&kernels);
    const rf_act_layout layout = rf_act_layout_of(RF_ACT_INT8, RF_Q4_K, 512);
    float x[512];
    uint8_t *packed = aligned_alloc(64, layout.row_bytes);
    fill_uniform(x, 512, 5, -1, 1);
    for (uint32_t i = 0; i < 512; i++)
        x[i] *= ldexpf(1.0f, (int)(i / 32 % 8)); /* each 32 twice as large as the one before */
    kernels.pack[RF_ACT_INT8](&layout, x, packed);
    for (uint32_t part = 0; part < 16; part++) {
        const double scale = rf_act_scales(packed, &layout)[part / 8];
        const int m = rf_act_multipliers(packed, &layout)[part];
        double amax = 0;
        for (uint32_t i = 0; i < 32; i++)
            amax = fmax(amax, fabs((double)x[32 * part + i]));
        assert_in_range(m, 1, 63);
        assert_true(m * scale * 127 >= amax * 0.99999);
        assert_true(m == 1 || (m - 1) * scale * 127 < amax * 1.00001);
        assert_true(part % 8 != 7 || m == 63);
        for (uint32_t half = 0; half < 2; half++) {
            int sum = 0;
            for (uint32_t i = 32 * part + 16 * half; i < 32 * part + 16 * half + 16; i++) {
                const int q = rf_act_q8(packed)[i];
                assert_true(abs(q) <= 127 && fabs(q * m * scale - x[i]) <= 0.5001 * m * scale);
                sum += m * q;
            }
            assert_int_equal(sum, rf_act_sums(packed, &layout)[2 * part + half]);
        }
    }
    free(packed);
}

static void a_non_finite_input_reaches_the_output(void **state)
{
    take_act(state);
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (int kind = 0; kind < 4; kind++) {
            rf_kernels kernels;
            rf_kernels_pick(&kernels, kind & 1 ? RF_CPU_ALL : RF_CPU_SCALAR);
            bench b = make_bench(formats[f], 256, 3, 7, RANDOM, 0);
            b.x[256 * 3 + 20] = kind & 2 ? INFINITY : NAN;
            kernels.pack[b.layout.act](&b.layout, b.x + 256 * 3, b.act + 3 * b.layout.row_bytes);
            rf_matmul job = job_of(&b, 7, b.out);
            run(&kernels, &b, &job, 0, 3);
            for (uint32_t i = 0; i < 21; i++) {
                assert_true(i / 3 == 3 ? !isfinite(b.out[i]) : isfinite(b.out[i]));
            }
            free_bench(&b);
        }
    }
}

/* ---- the table --------------------------------------------------------------------------- */

static void a_mask_is_parsed_and_only_takes_sets_away(void **state)
{
    (void)state;
    uint32_t mask = 99;
    assert_true(rf_cpu_parse("scalar", &mask) && mask == RF_CPU_SCALAR);
    assert_true(rf_cpu_parse("avx2,avx512", &mask) && mask == (RF_CPU_AVX2 | RF_CPU_AVX512));
    assert_true(rf_cpu_parse("all", &mask) && mask == RF_CPU_ALL);
    assert_false(rf_cpu_parse("avx3", &mask) || rf_cpu_parse("", &mask) ||
                 rf_cpu_parse("avx2,", &mask) || rf_cpu_parse("avx", &mask));
    assert_true(mask == RF_CPU_ALL);
    rf_kernels kernels;
    rf_kernels_pick(&kernels, RF_CPU_ALL);
    assert_true((kernels.cpu & ~rf_cpu_detect()) == 0);
    rf_kernels_pick(&kernels, RF_CPU_SCALAR);
    assert_true(kernels.cpu == RF_CPU_SCALAR);
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        const rf_act act = rf_act_for(formats[f], RF_ACT_INT8);
        assert_non_null(kernels.matmul[formats[f]][act]);
        assert_non_null(kernels.pack[act]);
        assert_non_null(kernels.matmul_entry[formats[f]][act].file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(the_scalar_matmul_is_as_exact_as_its_activations, &int16),
        cmocka_unit_test_prestate(the_scalar_matmul_is_as_exact_as_its_activations, &int8),
        cmocka_unit_test_prestate(every_set_gives_the_scalar_bits_for_1_to_70_tokens, &int16),
        cmocka_unit_test_prestate(every_set_gives_the_scalar_bits_for_1_to_70_tokens, &int8),
        cmocka_unit_test_prestate(pieces_of_any_number_of_rows_give_the_same_bits, &int16),
        cmocka_unit_test_prestate(pieces_of_any_number_of_rows_give_the_same_bits, &int8),
        cmocka_unit_test_prestate(listed_tokens_are_added_to_and_others_left_alone, &int16),
        cmocka_unit_test_prestate(listed_tokens_are_added_to_and_others_left_alone, &int8),
        cmocka_unit_test_prestate(sums_at_the_largest_codes_and_activations_do_not_overflow,
                                  &int16),
        cmocka_unit_test_prestate(sums_at_the_largest_codes_and_activations_do_not_overflow, &int8),
        cmocka_unit_test_prestate(every_set_packs_the_scalar_bits, &int16),
        cmocka_unit_test_prestate(every_set_packs_the_scalar_bits, &int8),
        cmocka_unit_test(a_packed_value_is_within_half_a_step_and_its_sums_are_exact),
        cmocka_unit_test(int8_in_blocks_of_256_has_a_step_for_each_32),
        cmocka_unit_test_prestate(a_non_finite_input_reaches_the_output, &int16),
        cmocka_unit_test_prestate(a_non_finite_input_reaches_the_output, &int8),
        cmocka_unit_test(a_mask_is_parsed_and_only_takes_sets_away),
    };
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
