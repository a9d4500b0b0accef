/* tests/unit/test_kernels.c: the scalar kernels against references in double, and the kernels of
 * every instruction set that this machine has against the scalar ones, bit for bit.
 *
 * Buffers have exactly the size that the contract names, so that a sanitizer sees a read past them.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kernels/kernels.h"
#include "kernels/quant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOKENS_MAX 70u

static const rf_format formats[] = {RF_F32,  RF_F16,  RF_BF16, RF_Q4_0, RF_Q4_1, RF_Q5_0, RF_Q5_1,
                                    RF_Q8_0, RF_Q2_K, RF_Q3_K, RF_Q4_K, RF_Q5_K, RF_Q6_K};
static const uint32_t sets[] = {RF_CPU_AVX2, RF_CPU_AVX512, RF_CPU_NEON};

/* ---- random and adversarial input -------------------------------------------------------- */

static uint64_t next_random(uint64_t *seed)
{
    uint64_t z = (*seed += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static float uniform(uint64_t *seed, float low, float high)
{
    return low + (high - low) * (float)(next_random(seed) >> 40) * 0x1p-24f;
}

static void fill_uniform(float *x, uint32_t n, uint64_t seed, float low, float high)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = uniform(&seed, low, high);
    }
}

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
    const rf_act act = rf_act_for(format, RF_ACT_INT16);
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

static void assert_same_bits(const float *got, const float *expected, size_t n, const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &expected[i], sizeof(float)) != 0 &&
            !(isnan(got[i]) && isnan(expected[i]))) {
            fail_msg("%s: element %zu is %a, expected %a", what, i, (double)got[i],
                     (double)expected[i]);
        }
    }
}

/* Calls check for each instruction set of this machine; says which were skipped. */
static void for_each_set(void (*check)(const rf_kernels *kernels))
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(sets); i++) {
        rf_kernels kernels;
        if (!(rf_cpu_detect() & sets[i])) {
            print_message("         skipped: this machine has no %s\n", rf_cpu_name(sets[i]));
            continue;
        }
        rf_kernels_pick(&kernels, sets[i]);
        check(&kernels);
        print_message("         ran: %s\n", rf_cpu_name(sets[i]));
    }
}

/* ---- matmul ------------------------------------------------------------------------------ */

static uint32_t k_unit(rf_format format)
{
    return rf_format_info_of(format)->block_elements;
}

/* |error| <= sum of |w| * half a step of the activation, and 2^-19 of the largest terms for the
 * sums in float (at most some 20 roundings a lane). */
static void
the_scalar_matmul_is_within_the_activations_resolution_of_the_exact_product(void **state)
{
    (void)state;
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
                    bound += fabs(w[i]) * amax / (block == 32 ? 32767.0 : 8191.0) * 0.506;
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
            for (uint32_t tokens = 1; tokens <= TOKENS_MAX; tokens++) {
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
    (void)state;
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
    (void)state;
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
    (void)state;
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
    (void)state;
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
        const rf_act_layout layout = rf_act_layout_of(RF_ACT_INT16, weights[f], k);
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
            scalar.pack[RF_ACT_INT16](&layout, x, a);
            kernels->pack[RF_ACT_INT16](&layout, x, b);
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
    (void)state;
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

static void a_non_finite_input_reaches_the_output_as_nan(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (int set = 0; set < 2; set++) {
            rf_kernels kernels;
            rf_kernels_pick(&kernels, set ? RF_CPU_ALL : RF_CPU_SCALAR);
            bench b = make_bench(formats[f], 256, 3, 7, RANDOM, 0);
            b.x[256 * 3 + 20] = NAN;
            kernels.pack[b.layout.act](&b.layout, b.x + 256 * 3, b.act + 3 * b.layout.row_bytes);
            rf_matmul job = job_of(&b, 7, b.out);
            run(&kernels, &b, &job, 0, 3);
            for (uint32_t i = 0; i < 21; i++) {
                assert_true(isnan(b.out[i]) == (i / 3 == 3));
            }
            free_bench(&b);
        }
    }
}

/* ---- the rest of a step ------------------------------------------------------------------ */

static void check_vectors(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    for (uint32_t n = 1; n < 150; n++) {
        float *x = malloc(sizeof(float) * n), *y = malloc(sizeof(float) * n);
        float *a = malloc(sizeof(float) * n), *b = malloc(sizeof(float) * n);
        fill_uniform(x, n, n, -9, 9);
        fill_uniform(y, n, n + 1, -3, 3);
        scalar.rms_norm(x, y, a, n, 1e-5f);
        kernels->rms_norm(x, y, b, n, 1e-5f);
        assert_same_bits(b, a, n, "rms_norm");
        memcpy(b, x, sizeof(float) * n);
        kernels->rms_norm(b, y, b, n, 1e-5f);
        assert_same_bits(b, a, n, "rms_norm in place");
        scalar.swiglu(x, y, a, n);
        kernels->swiglu(x, y, b, n);
        assert_same_bits(b, a, n, "swiglu");
        for (int interleaved = 0; interleaved < 2; interleaved++) {
            const uint32_t pairs = n / 2;
            memcpy(a, x, sizeof(float) * n);
            memcpy(b, x, sizeof(float) * n);
            scalar.rope(a, y, pairs, interleaved);
            kernels->rope(b, y, pairs, interleaved);
            assert_same_bits(b, a, n, "rope");
        }
        if (n % 3 == 0) {
            x[n / 3] = x[n / 2] = 9.5f;
            x[n - 1] = NAN;
        } else if (n % 3 == 1) {
            x[0] = NAN;
        }
        assert_int_equal(kernels->argmax(x, n), scalar.argmax(x, n));
        for (uint32_t i = 0; i < n; i++) {
            x[i] = n % 5 == 0 ? NAN : -INFINITY;
        }
        assert_int_equal(kernels->argmax(x, n), scalar.argmax(x, n));
        free(x);
        free(y);
        free(a);
        free(b);
    }
}

static void every_set_gives_the_scalar_bits_for_vectors_of_any_length(void **state)
{
    (void)state;
    for_each_set(check_vectors);
}

static void check_exp(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    static const float special[] = {0.0f,   -0.0f,  INFINITY, -INFINITY, NAN,
                                    88.72f, 88.73f, -87.33f,  -103.9f,   -104.1f,
                                    1e30f,  -1e30f, -103.97f, 1e-30f,    1e-45f};
    float a[64], b[64];
    uint64_t seed = 4;
    for (int round = 0; round < 20000; round++) {
        fill_uniform(a, 64, next_random(&seed), -106, 90);
        if (round == 0) {
            memcpy(a, special, sizeof special);
        }
        memcpy(b, a, sizeof a);
        scalar.exp(a, 61);
        kernels->exp(b, 61);
        assert_same_bits(b, a, 61, "exp");
    }
}

static void exp_is_within_2e_7_and_the_same_in_every_set(void **state)
{
    (void)state;
    rf_kernels kernels;
    rf_kernels_scalar(&kernels);
    double worst = 0;
    for (int i = 0; i <= 1000000; i++) {
        const float x = -87.33f + 176.0f * (float)i / 1e6f;
        float y = x;
        kernels.exp(&y, 1);
        worst = fmax(worst, (double)fabsl((long double)y / expl((long double)x) - 1));
    }
    print_message("         exp: relative error %.3g\n", worst);
    assert_true(worst <= 2e-7);
    float edge[] = {-INFINITY, INFINITY, 0.0f, NAN, -104.0f, 88.73f, -100.0f};
    kernels.exp(edge, 7);
    assert_true(edge[0] == 0.0f && edge[1] == INFINITY && edge[2] == 1.0f && isnan(edge[3]));
    assert_true(edge[4] == 0.0f && edge[5] == INFINITY && fabsf(edge[6] - expf(-100)) <= 1.5e-45f);
    for_each_set(check_exp);
}

static void argmax_takes_the_first_of_equals_and_never_nan(void **state)
{
    (void)state;
    for (int set = 0; set < 2; set++) {
        rf_kernels kernels;
        rf_kernels_pick(&kernels, set ? RF_CPU_ALL : RF_CPU_SCALAR);
        float x[40];
        for (int i = 0; i < 40; i++) {
            x[i] = -5.0f;
        }
        assert_int_equal(kernels.argmax(x, 40), 0);
        x[37] = x[21] = 1.0f;
        assert_int_equal(kernels.argmax(x, 40), 21);
        x[3] = NAN;
        assert_int_equal(kernels.argmax(x, 40), 21);
        x[39] = INFINITY;
        assert_int_equal(kernels.argmax(x, 40), 39);
        x[0] = NAN;
        x[1] = -INFINITY;
        assert_int_equal(kernels.argmax(x, 1), 0);
        assert_int_equal(kernels.argmax(x, 2), 1);
    }
}

static void check_kv_rows(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    const rf_format kinds[] = {RF_F32, RF_F16, RF_BF16};
    for (size_t f = 0; f < 3; f++) {
        for (uint32_t n = 1; n < 70; n++) {
            const size_t bytes = n * (f == 0 ? 4u : 2u);
            float *x = malloc(sizeof(float) * n), *y = malloc(sizeof(float) * n);
            float *z = malloc(sizeof(float) * n);
            uint8_t *a = malloc(bytes), *b = malloc(bytes);
            fill_uniform(x, n, n, -1, 1);
            for (uint32_t i = 0; i < n; i++) {
                x[i] = ldexpf(x[i], (int)(i % 45) - 26);
            }
            if (n > 4) {
                x[0] = INFINITY, x[1] = -0.0f, x[2] = 65520.0f, x[3] = 1.0f + 0x1p-11f,
                x[4] = 1e38f;
            }
            scalar.kv_encode[kinds[f]](x, a, n);
            kernels->kv_encode[kinds[f]](x, b, n);
            assert_memory_equal(a, b, bytes);
            scalar.kv_decode[kinds[f]](a, y, n);
            kernels->kv_decode[kinds[f]](a, z, n);
            assert_same_bits(z, y, n, "kv decode");
            free(x), free(y), free(z), free(a), free(b);
        }
    }
}

static void every_set_encodes_and_decodes_kv_rows_alike(void **state)
{
    (void)state;
    for_each_set(check_kv_rows);
}

/* ---- attention --------------------------------------------------------------------------- */

typedef struct attention { /* queries over several blocks */
    uint32_t queries, count, k_width, v_width;
    float *q, *k, *v, *state, *out;
    rf_attend_range *visible; /* of the whole context */
} attention;

static attention make_attention(uint32_t queries, uint32_t count, uint32_t k_width,
                                uint32_t v_width, uint64_t seed)
{
    attention a = {.queries = queries, .count = count, .k_width = k_width, .v_width = v_width};
    a.q = malloc(sizeof(float) * queries * k_width);
    a.k = malloc(sizeof(float) * count * k_width);
    a.v = malloc(sizeof(float) * count * v_width);
    a.state = malloc(sizeof(float) * queries * 2);
    a.out = malloc(sizeof(float) * queries * v_width);
    a.visible = malloc(sizeof(rf_attend_range) * queries);
    fill_uniform(a.q, queries * k_width, seed, -2, 2);
    fill_uniform(a.k, count * k_width, seed + 1, -2, 2);
    fill_uniform(a.v, count * v_width, seed + 2, -2, 2);
    for (uint32_t i = 0; i < queries; i++) {
        const uint32_t last = seed % 3 ? count : (uint32_t)(next_random(&seed) % (count + 1));
        a.visible[i].last = last;
        a.visible[i].first = seed % 2 ? 0 : (uint32_t)(next_random(&seed) % (last + 1));
    }
    return a;
}

static void free_attention(attention *a)
{
    free(a->q), free(a->k), free(a->v), free(a->state), free(a->out), free(a->visible);
}

/* All blocks for the queries [first, last), in one call a block. */
static void attend(const rf_kernels *kernels, attention *a, uint32_t first, uint32_t last)
{
    float scores[RF_ATTEND_BLOCK];
    rf_attend_range *visible = malloc(sizeof *visible * a->queries);
    for (uint32_t i = first; i < last; i++) {
        a->state[2 * i] = -INFINITY;
        a->state[2 * i + 1] = 0;
        memset(a->out + (size_t)i * a->v_width, 0, sizeof(float) * a->v_width);
    }
    for (uint32_t at = 0; at < a->count; at += RF_ATTEND_BLOCK) {
        const uint32_t count = RF_MIN(RF_ATTEND_BLOCK, a->count - at);
        for (uint32_t i = first; i < last; i++) {
            const rf_attend_range r = a->visible[i];
            visible[i].first = r.first > at ? RF_MIN(r.first - at, count) : 0;
            visible[i].last = r.last > at ? RF_MIN(r.last - at, count) : 0;
        }
        const rf_attend job = {.q = a->q + (size_t)first * a->k_width,
                               .q_stride = a->k_width,
                               .query_count = last - first,
                               .visible = visible + first,
                               .k = a->k + (size_t)at * a->k_width,
                               .v = a->v + (size_t)at * a->v_width,
                               .count = count,
                               .k_width = a->k_width,
                               .v_width = a->v_width,
                               .scale = 0.125f,
                               .state = a->state + 2 * first,
                               .out = a->out + (size_t)first * a->v_width,
                               .out_stride = a->v_width,
                               .scores = scores};
        kernels->attend(&job);
    }
    free(visible);
}

static const uint32_t attention_shapes[][4] = {/* queries, positions, k width, v width */
                                               {1, 64, 64, 64},    {8, 64, 64, 64},
                                               {3, 200, 128, 128}, {5, 1, 8, 8},
                                               {9, 63, 24, 40},    {7, 130, 80, 72},
                                               {12, 77, 64, 96},   {2, 17, 256, 256},
                                               {32, 100, 16, 8},   {6, 128, 192, 128}};

static void check_attention(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    for (size_t s = 0; s < RF_ARRAY_COUNT(attention_shapes); s++) {
        const uint32_t *shape = attention_shapes[s];
        for (uint64_t seed = 20; seed < 38; seed++) {
            attention a = make_attention(shape[0], shape[1], shape[2], shape[3], seed);
            const size_t outs = (size_t)a.queries * a.v_width;
            float *out = malloc(sizeof(float) * outs),
                  *sums = malloc(sizeof(float) * a.queries * 2);
            attend(&scalar, &a, 0, a.queries);
            memcpy(out, a.out, sizeof(float) * outs);
            memcpy(sums, a.state, sizeof(float) * a.queries * 2);
            attend(kernels, &a, 0, a.queries);
            assert_same_bits(a.out, out, outs, "attend");
            assert_same_bits(a.state, sums, a.queries * 2, "attend's state");
            for (uint32_t i = 0; i < a.queries; i++) { /* alone: the same bits */
                attend(kernels, &a, i, i + 1);
            }
            assert_same_bits(a.out, out, outs, "attend, one query at a time");
            free(out);
            free(sums);
            free_attention(&a);
        }
    }
}

static void every_set_attends_with_the_scalar_bits_in_any_company(void **state)
{
    (void)state;
    for_each_set(check_attention);
}

static void attention_is_a_softmax_over_what_is_visible(void **state)
{
    (void)state;
    rf_kernels kernels;
    rf_kernels_scalar(&kernels);
    for (size_t s = 0; s < RF_ARRAY_COUNT(attention_shapes); s++) {
        const uint32_t *shape = attention_shapes[s];
        attention a = make_attention(shape[0], shape[1], shape[2], shape[3], 24 + s);
        attend(&kernels, &a, 0, a.queries);
        double *p = malloc(sizeof(double) * a.count);
        for (uint32_t i = 0; i < a.queries; i++) {
            const rf_attend_range r = a.visible[i];
            double max = -INFINITY, sum = 0;
            for (uint32_t j = r.first; j < r.last; j++) {
                p[j] = 0;
                for (uint32_t d = 0; d < a.k_width; d++) {
                    p[j] += (double)a.q[i * a.k_width + d] * a.k[j * a.k_width + d] * 0.125;
                }
                max = fmax(max, p[j]);
            }
            for (uint32_t j = r.first; j < r.last; j++) {
                p[j] = exp(p[j] - max);
                sum += p[j];
            }
            for (uint32_t d = 0; d < a.v_width; d++) {
                double expected = 0;
                for (uint32_t j = r.first; j < r.last; j++) {
                    expected += p[j] * a.v[j * a.v_width + d];
                }
                const float got = a.out[i * a.v_width + d];
                if (r.first >= r.last) {
                    assert_true(got == 0.0f && a.state[2 * i + 1] == 0.0f);
                } else {
                    assert_true(fabs(got / (double)a.state[2 * i + 1] - expected / sum) < 2e-5);
                }
            }
        }
        free(p);
        free_attention(&a);
    }
}

/* ---- math -------------------------------------------------------------------------------- */

static void sine_and_cosine_are_within_a_unit_of_float(void **state)
{
    (void)state;
    uint64_t seed = 9;
    double worst = 0;
    for (int i = 0; i < 2000000; i++) {
        const double size = ldexp(1.0, (int)(next_random(&seed) % 60) - 20);
        const double angle = size * (2 * (double)(next_random(&seed) >> 11) * 0x1p-53 - 1);
        float s, c;
        rf_sin_cos(angle, &s, &c);
        worst = fmax(worst, (double)fabsl(s - sinl((long double)angle)));
        worst = fmax(worst, (double)fabsl(c - cosl((long double)angle)));
    }
    print_message("         sine, cosine: absolute error %.3g\n", worst);
    assert_true(worst <= 3.0e-8); /* half a unit of a float below 1 is 2^-25 = 2.98e-8 */
    float s, c;
    rf_sin_cos(0.0, &s, &c);
    assert_true(s == 0.0f && c == 1.0f);
    rf_sin_cos(NAN, &s, &c);
    assert_true(isnan(s) && isnan(c));
    rf_sin_cos(INFINITY, &s, &c);
    assert_true(isnan(s) && isnan(c));
}

static void exp_and_log_in_double_are_within_1e_14(void **state)
{
    (void)state;
    uint64_t seed = 10;
    double worst_exp = 0, worst_log = 0;
    for (int i = 0; i < 1000000; i++) {
        const double u = (double)(next_random(&seed) >> 11) * 0x1p-53;
        const double x = -708 + 1417 * u;
        worst_exp = fmax(worst_exp, (double)fabsl(rf_exp_f64(x) / expl((long double)x) - 1));
        const double y =
            i % 2 ? exp(x) : 1 + (u - 0.5) * ldexp(1.0, -(int)(next_random(&seed) % 40));
        if (y != 1.0) {
            worst_log = fmax(worst_log, (double)fabsl(rf_log_f64(y) / logl((long double)y) - 1));
        }
    }
    print_message("         exp %.3g, log %.3g: relative error\n", worst_exp, worst_log);
    assert_true(worst_exp <= 1e-14 && worst_log <= 1e-14);
    assert_true(rf_exp_f64(-INFINITY) == 0 && rf_exp_f64(INFINITY) == INFINITY);
    assert_true(isnan(rf_exp_f64(NAN)) && rf_exp_f64(0) == 1 && rf_exp_f64(-745) > 0);
    assert_true(rf_log_f64(0) == -INFINITY && rf_log_f64(INFINITY) == INFINITY);
    assert_true(isnan(rf_log_f64(-1)) && isnan(rf_log_f64(NAN)) && rf_log_f64(1) == 0);
    assert_true(fabs(rf_log_f64(5e-324) - log(5e-324)) < 1e-11);
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
        cmocka_unit_test(
            the_scalar_matmul_is_within_the_activations_resolution_of_the_exact_product),
        cmocka_unit_test(every_set_gives_the_scalar_bits_for_1_to_70_tokens),
        cmocka_unit_test(pieces_of_any_number_of_rows_give_the_same_bits),
        cmocka_unit_test(listed_tokens_are_added_to_and_others_left_alone),
        cmocka_unit_test(sums_at_the_largest_codes_and_activations_do_not_overflow),
        cmocka_unit_test(every_set_packs_the_scalar_bits),
        cmocka_unit_test(a_packed_value_is_within_half_a_step_and_its_sums_are_exact),
        cmocka_unit_test(a_non_finite_input_reaches_the_output_as_nan),
        cmocka_unit_test(every_set_gives_the_scalar_bits_for_vectors_of_any_length),
        cmocka_unit_test(exp_is_within_2e_7_and_the_same_in_every_set),
        cmocka_unit_test(argmax_takes_the_first_of_equals_and_never_nan),
        cmocka_unit_test(every_set_encodes_and_decodes_kv_rows_alike),
        cmocka_unit_test(every_set_attends_with_the_scalar_bits_in_any_company),
        cmocka_unit_test(attention_is_a_softmax_over_what_is_visible),
        cmocka_unit_test(sine_and_cosine_are_within_a_unit_of_float),
        cmocka_unit_test(exp_and_log_in_double_are_within_1e_14),
        cmocka_unit_test(a_mask_is_parsed_and_only_takes_sets_away),
    };
    return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
