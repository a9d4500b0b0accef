/* tests/unit/test_kernels_vector.c: norm, rotation, activation function, exp, argmax, KV rows and
 * attention: the scalar kernels against references in double, and those of every instruction set
 * that this machine has against the scalar ones, bit for bit; then the double functions of math.c.
 */
#include "kernel_test.h"

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
    rf_attend_form k_form, v_form; /* floats; halves are made of the rows as they are */
    uint8_t *halves[2];
    rf_attend_range *visible; /* of the whole context */
} attention;

/* Rows in 16 bits, and the floats become what these say. */
static void make_halves(attention *a, int side, rf_attend_form form, float *rows, uint32_t width)
{
    rf_kernels scalar;
    const uint32_t n = a->count * width;
    const rf_format format = form == RF_ATTEND_F16 ? RF_F16 : RF_BF16;
    a->halves[side] = malloc(2 * (size_t)n);
    if (form == RF_ATTEND_F32) {
        return;
    }
    rf_kernels_scalar(&scalar);
    scalar.kv_encode[format](rows, a->halves[side], n);
    scalar.kv_decode[format](a->halves[side], rows, n);
}

static rf_attend_rows rows_from(const attention *a, int side, uint32_t at)
{
    const rf_attend_form form = side ? a->v_form : a->k_form;
    const uint32_t width = side ? a->v_width : a->k_width;
    const uint64_t unit = form == RF_ATTEND_F32 ? 4 : 2;
    const uint8_t *whole =
        form == RF_ATTEND_F32 ? (const void *)(side ? a->v : a->k) : (const void *)a->halves[side];
    return (rf_attend_rows){
        .rows = whole + at * width * unit, .stride = width * unit, .width = width, .form = form};
}

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
    a.k_form = (rf_attend_form)(seed % 3);
    a.v_form = (rf_attend_form)(seed / 3 % 3);
    make_halves(&a, 0, a.k_form, a.k, k_width);
    make_halves(&a, 1, a.v_form, a.v, v_width);
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
    free(a->halves[0]), free(a->halves[1]);
}

/* All blocks for the queries [first, last), in one call a block. */
static void attend(const rf_kernels *kernels, attention *a, uint32_t first, uint32_t last)
{
    const uint64_t bytes = rf_attend_scratch_bytes(a->k_width, a->v_width);
    void *scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    rf_attend_range *visible = malloc(sizeof *visible * a->queries);
    memset(scratch, 0xFF, bytes);
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
                               .k = rows_from(a, 0, at),
                               .v = rows_from(a, 1, at),
                               .scale = 0.125f,
                               .state = a->state + 2 * first,
                               .out = a->out + (size_t)first * a->v_width,
                               .out_stride = a->v_width,
                               .scratch = scratch};
        kernels->attend(&job);
    }
    free(visible);
    free(scratch);
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

static void check_joining(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    for (uint32_t width = 8; width <= 128; width += 24) {
        for (uint64_t seed = 0; seed < 40; seed++) {
            float state[2][2] = {{0}}, out[2][128], part_state[2], part[128];
            fill_uniform(out[0], width, seed, -3, 3);
            fill_uniform(part, width, seed + 1, -3, 3);
            fill_uniform(part_state, 2, seed + 2, -20, 20);
            fill_uniform(state[0], 2, seed + 3, -20, 20);
            if (seed % 4 == 0) { /* nothing before */
                state[0][0] = -INFINITY;
                state[0][1] = 0;
                memset(out[0], 0, sizeof out[0]);
            }
            if (seed % 5 == 0) { /* nothing to join */
                part_state[0] = -INFINITY;
                part_state[1] = 0;
            }
            memcpy(state[1], state[0], sizeof state[0]);
            memcpy(out[1], out[0], sizeof out[0]);
            scalar.attend_join(state[0], out[0], part_state, part, width);
            kernels->attend_join(state[1], out[1], part_state, part, width);
            assert_same_bits(state[1], state[0], 2, "joined state");
            assert_same_bits(out[1], out[0], width, "joined sums");
            if (seed % 4 == 0 && seed % 5 != 0) { /* a first part is taken over as it is */
                assert_same_bits(state[1], part_state, 2, "the first part's state");
                assert_same_bits(out[1], part, width, "the first part's sums");
            }
        }
    }
}

static void every_set_joins_parts_with_the_scalar_bits(void **state)
{
    (void)state;
    for_each_set(check_joining);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_set_gives_the_scalar_bits_for_vectors_of_any_length),
        cmocka_unit_test(exp_is_within_2e_7_and_the_same_in_every_set),
        cmocka_unit_test(argmax_takes_the_first_of_equals_and_never_nan),
        cmocka_unit_test(every_set_encodes_and_decodes_kv_rows_alike),
        cmocka_unit_test(every_set_attends_with_the_scalar_bits_in_any_company),
        cmocka_unit_test(every_set_joins_parts_with_the_scalar_bits),
        cmocka_unit_test(attention_is_a_softmax_over_what_is_visible),
        cmocka_unit_test(sine_and_cosine_are_within_a_unit_of_float),
        cmocka_unit_test(exp_and_log_in_double_are_within_1e_14),
    };
    return cmocka_run_group_tests_name("kernels_vector", tests, NULL, NULL);
}
