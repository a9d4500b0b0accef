/* tests/unit/test_kv_turbo.c: the polar KV formats against their mathematics: tables, golden
 * vector, Gaussian rows, the estimator of the rest. */
#include "kv_turbo_test.h"

/* ---- shapes and tables --------------------------------------------------------------------- */

static void rows_have_the_documented_bits(void **state)
{
    (void)state;
    static const double at_64[] = {4.25, 3.25, 2.25, 4.5, 3.5};
    static const double at_128[] = {4.125, 3.125, 2.125, 4.25, 3.25};
    static const char *const names[] = {"turbo4", "turbo3", "turbo2", "turbo4q", "turbo3q"};
    for (size_t c = 0; c < RF_ARRAY_COUNT(turbo); c++) {
        assert_true(shape_of(turbo[c], 64).row_bytes * 8 / 64.0 == at_64[c]);
        assert_true(shape_of(turbo[c], 128).row_bytes * 8 / 128.0 == at_128[c]);
        assert_string_equal(rf_kv_codes[turbo[c]].name, names[c]);
        assert_true(rf_kv_codes[turbo[c]].wide == (c >= POLAR_COUNT));
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            const rf_kv_shape s = shape_of(turbo[c], widths[w]);
            const uint32_t power = s.width & (0u - s.width);
            assert_int_equal(s.block, RF_MIN(power, 128u));
            assert_int_equal(s.span, s.block);
            assert_int_equal(s.span * s.span_count, s.width);
        }
        rf_kv_shape t;
        static const uint32_t wrong[] = {0, 4, 12, 63, 100, 0xFFFFFFF8u};
        for (size_t i = 0; i < RF_ARRAY_COUNT(wrong); i++) {
            assert_false(rf_kv_shape_of(turbo[c], wrong[i], &t));
        }
    }
}

/* Mean squared error of N(0, 1) under levels and bounds; the integral of each cell is exact. */
static double quadrature(int bits, bool in_bytes)
{
    const int half = 1 << (bits - 1);
    double total = 0;
    for (int i = 0; i < half; i++) {
        const double c = in_bytes ? bytes[bits][i] * unit[bits] : table[bits][i];
        const double a = bounds[bits][i], b = i + 1 < half ? bounds[bits][i + 1] : 40;
        const double pa = exp(-a * a / 2) / sqrt(4 * HALF_PI);
        const double pb = exp(-b * b / 2) / sqrt(4 * HALF_PI);
        const double mass = (erfc(a / sqrt(2)) - erfc(b / sqrt(2))) / 2;
        total += 2 * (mass + a * pa - b * pb - 2 * c * (pa - pb) + c * c * mass);
    }
    return total;
}

static void tables_have_the_documented_error(void **state)
{
    (void)state;
    static const double documented[] = {0.0095010080, 0.0345477608, 0.1174818478};
    static const double cost[] = {.0034, .0013, .000004}; /* of int8 levels */
    static const double last[] = {.00005, .00005, .0000005};
    for (size_t c = 0; c < POLAR_COUNT; c++) {
        const rf_kv_code_info *info = &rf_kv_codes[turbo[c]];
        const int bits = level_bits_of(turbo[c]), count = 1 << bits;
        const double plain = quadrature(bits, false), ours = quadrature(bits, true);
        print_message("%s: table %.10f, int8 %.7f (+%.5f %%)\n", info->name, plain, ours,
                      100 * (ours / plain - 1));
        assert_true(fabs(plain - documented[c]) < 1e-9);
        assert_true(fabs(ours / plain - 1 - cost[c]) < last[c]);
        assert_true(fabs((double)info->unit / unit[bits] - 1) < 1e-7);
        for (int i = 0; i < count; i++) { /* the kernels' table is this one */
            assert_int_equal(info->levels[i], byte_at(bits, i));
            assert_true(fabs(from_half(table[bits], bits, i) / unit[bits] - info->levels[i]) < .5);
            if (i + 1 < count) {
                const double middle =
                    (from_half(table[bits], bits, i) + from_half(table[bits], bits, i + 1)) / 2;
                assert_true(fabs((double)info->bounds[i] - middle) < 2e-7);
            }
        }
    }
}

/* ---- the golden vector --------------------------------------------------------------------- */

static void golden(float *y, float *q)
{
    const rf_kv_kernels k = scalar_kernels();
    uint8_t signs[16];
    rf_kv_signs(42, 128, signs);
    for (int i = 0; i < 128; i++) {
        y[i] = (float)(sin(0.1 * i) + 4 * (i == 5));
        q[i] = (float)cos(0.07 * i);
    }
    k.rotate(y, signs, 128, 128);
    k.rotate(q, signs, 128, 128);
}

static void golden_vector_has_the_golden_indices(void **state)
{
    (void)state;
    static const int first[] = {10, 7, 12, 8, 6, 11, 5, 8, 13, 9, 9, 5, 7, 9, 5, 9};
    /* scale, nMSE, dot: the document's, and what int8 levels and the same indices make of them
     * (computed in double by other means); the f16 scale may move those by 2^-11. */
    static const struct {
        int sum;
        double scale, error, dot, scale_8, error_8, dot_8;
    } rows[] = {{962, .805898, .008144, 39.94701, .806230, .008359, 39.929906},
                {448, .804277, .028703, 38.81312, .804830, .028849, 38.858453},
                {196, .853725, .109036, 34.52671, .853973, .109048, 34.530284}};
    float y[128], q[128];
    golden(y, q);
    for (size_t c = 0; c < POLAR_COUNT; c++) {
        const rf_kv_shape s = shape_of(turbo[c], 128);
        const int bits = level_bits_of(turbo[c]);
        uint8_t row[66];
        double back[128], exact[128], norm = 0;
        int sum = 0;
        scalar_kernels().encode(&s, y, NULL, 0, row);
        for (uint32_t i = 0; i < 128; i++) {
            const int index = (int)index_at(&s, row, i);
            assert_true(c > 0 || i >= 16 || index == first[i]);
            sum += index;
            exact[i] = from_half(table[bits], bits, index);
            norm += exact[i] * exact[i];
        }
        assert_int_equal(sum, rows[c].sum);
        /* The document's own figures, from these indices by its float table. */
        const double scale = sqrt(size_of(y, 128) / norm);
        for (uint32_t i = 0; i < 128; i++) {
            exact[i] *= scale;
        }
        assert_true(fabs(scale - rows[c].scale) < 1e-6);
        assert_true(fabs(error_of(y, exact, 128) / size_of(y, 128) - rows[c].error) < 1e-6);
        assert_true(fabs(dot_of(q, exact, 128) - rows[c].dot) < 1e-5);
        /* What is stored. */
        decode(&s, row, back);
        const double error = error_of(y, back, 128) / size_of(y, 128), dot = dot_of(q, back, 128);
        print_message("golden %s: sum %d scale %.6f nMSE %.6f dot %.5f\n",
                      rf_kv_codes[turbo[c]].name, sum, half_at(&s, row, 0), error, dot);
        assert_true(fabs(half_at(&s, row, 0) / rows[c].scale_8 - 1) < HALF_EPS);
        assert_true(fabs(error - rows[c].error_8) < HALF_EPS * rows[c].error_8 + 1e-6);
        assert_true(fabs(dot / rows[c].dot_8 - 1) < HALF_EPS);
    }
    /* turbo*q: the indices of turbo3, turbo2 and the plain norm. */
    for (size_t c = POLAR_COUNT; c < RF_ARRAY_COUNT(turbo); c++) {
        const rf_kv_shape s = shape_of(turbo[c], 128);
        const unsigned mask = (1u << level_bits_of(turbo[c])) - 1;
        uint8_t row[68];
        double back[128];
        int sum = 0;
        scalar_kernels().encode(&s, y, NULL, 0, row);
        for (uint32_t i = 0; i < 128; i++) {
            sum += (int)(index_at(&s, row, i) & mask);
        }
        assert_int_equal(sum, rows[c - 2].sum);
        assert_true(fabs(half_at(&s, row, 0) / .803733 - 1) < HALF_EPS);
        decode_levels(&s, row, back);
        assert_true(fabs(half_at(&s, row, 1) / sqrt(error_of(y, back, 128)) - 1) < HALF_EPS);
    }
}

/* ---- Gaussian vectors ---------------------------------------------------------------------- */

static double gaussian_error(rf_kv_code code, uint32_t width, bool zeros, double *inner)
{
    const rf_kv_kernels k = scalar_kernels();
    const rf_kv_shape s = shape_of(code, width);
    double error = 0, size = 0;
    uint8_t *row = malloc(s.row_bytes);
    *inner = 0;
    for (uint32_t i = 0; i < 10000; i++) {
        float x[128];
        double y[128] = {0};
        fill_gauss(x, width, 2024 + i * 1000, 1.7);
        k.encode(&s, x, NULL, 0, row);
        if (!zeros) {
            decode(&s, row, y);
        }
        error += error_of(x, y, width);
        size += size_of(x, width);
        *inner += dot_of(x, y, width);
    }
    free(row);
    *inner /= size;
    return error / size;
}

static void gaussian_rows_have_the_documented_error(void **state)
{
    (void)state;
    static const struct {
        rf_kv_code code;
        uint32_t width;
        double documented; /* kv-quantization 1.5, matched norm, float levels */
        double tolerance;
    } rows[] = {{RF_KV_CODE_TURBO4, 128, .00918, .01},
                {RF_KV_CODE_TURBO4, 64, .00889, .01},
                {RF_KV_CODE_TURBO3, 128, .03382, .01},
                {RF_KV_CODE_TURBO2, 128, .1188, .01},
                /* (pi / 2 - 1) times the plain error of the levels below: see the estimator. That
                 * is for long spans: at 128 the bias makes it 1.5 % less. */
                {RF_KV_CODE_TURBO4Q, 128, (HALF_PI - 1) * .03398, .02},
                {RF_KV_CODE_TURBO3Q, 128, (HALF_PI - 1) * .1160, .02}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(rows); i++) {
        double inner, none;
        const double got = gaussian_error(rows[i].code, rows[i].width, false, &inner);
        print_message("nMSE %s width %u: %.6f (%.6f), <x, x_hat> / <x, x> %.5f\n",
                      rf_kv_codes[rows[i].code].name, rows[i].width, got, rows[i].documented,
                      inner);
        assert_true(fabs(got / rows[i].documented - 1) < rows[i].tolerance);
        const double zeros = gaussian_error(rows[i].code, rows[i].width, true, &none);
        assert_false(fabs(zeros / rows[i].documented - 1) < rows[i].tolerance);
        if (rf_kv_codes[rows[i].code].wide) { /* plain levels: .966, .884 */
            assert_true(fabs(inner - 1) < 2e-3);
        } else { /* |x_hat| = |x|: <x, x_hat> = 1 - nMSE / 2 */
            assert_true(fabs(inner - (1 - got / 2)) < 2e-5);
        }
        assert_false(fabs(none - 1) < .1);
    }
}

static void norms_are_those_of_the_rows(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    for (size_t c = 0; c < POLAR_COUNT; c++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            const rf_kv_shape s = shape_of(turbo[c], widths[w]);
            uint8_t *row = malloc(s.row_bytes);
            for (uint32_t trial = 0; trial < 50; trial++) {
                float x[WIDTH_MAX];
                double y[WIDTH_MAX];
                fill_gauss(x, s.width, trial * 31 + w, pow(2, (double)trial / 2 - 13));
                k.encode(&s, x, NULL, 0, row);
                decode(&s, row, y);
                for (uint32_t at = 0; at < s.width; at += s.span) {
                    double norm = 0;
                    for (uint32_t i = at; i < at + s.span; i++) {
                        norm += y[i] * y[i];
                    }
                    const double ratio = sqrt(norm / size_of(x + at, s.span));
                    assert_true(fabs(ratio - 1) < 1.001 * HALF_EPS);
                }
            }
            free(row);
        }
    }
}

/* ---- the estimator of the rest ------------------------------------------------------------- */

typedef struct moments {
    double mean, square, count;
} moments;

static void note(moments *m, double x)
{
    m->mean += x;
    m->square += x * x;
    m->count += 1;
}

static double mean_of(const moments *m)
{
    return m->mean / m->count;
}

static double variance_of(const moments *m)
{
    return m->square / m->count - mean_of(m) * mean_of(m);
}

/* How far a turn of +-1 entries leads <q, rest> astray, for the sign of a sum is seen best where an
 * element r_j stands out: E[sign(sum of +-r) of element j] is sqrt(2 / pi) r_j / |r| *
 * (1 + r_j^2 / (3 |r|^2) - sum of r^4 / (4 |r|^4)), the next term of Edgeworth's series. An S of
 * Gaussians, or Haar's, has no such term. */
static double bias_of(const float *q, const float *x, const double *levels, uint32_t n)
{
    double plain = 0, cubes = 0, squares = 0, fourths = 0;
    for (uint32_t i = 0; i < n; i++) {
        const double r = (double)x[i] - levels[i];
        plain += (double)q[i] * r;
        cubes += (double)q[i] * r * r * r;
        squares += r * r;
        fourths += r * r * r * r;
    }
    return cubes / (3 * squares) - plain * fourths / (4 * squares * squares);
}

/* One pair q, x: errors of <q, x_hat> over random signs of the first turn, in units of |q||x|; in
 * *freed without what bias_of foresees. lean: of q towards x. */
static void estimate(rf_kv_code code, uint64_t seed, float lean, uint32_t trials, moments *out,
                     moments *freed)
{
    const rf_kv_kernels k = scalar_kernels();
    const rf_kv_shape s = shape_of(code, 128);
    float q[128], x[128];
    uint8_t *row = malloc(s.row_bytes);
    fill_gauss(q, 128, seed, 1);
    fill_gauss(x, 128, seed + 1, 1);
    for (int i = 0; i < 128; i++) {
        q[i] += lean * x[i];
    }
    const double size = sqrt(size_of(q, 128) * size_of(x, 128));
    for (uint32_t t = 0; t < trials; t++) {
        float y[128], p[128], widened[128];
        uint8_t signs[16];
        double back[128], wanted[128];
        rf_kv_signs(seed * 1000003 + t, 128, signs);
        memcpy(y, x, sizeof y);
        memcpy(p, q, sizeof p);
        k.rotate(y, signs, 128, 128);
        k.rotate(p, signs, 128, 128);
        k.encode(&s, y, NULL, 0, row);
        rf_kv_widen(&s, row, 1, 0, widened);
        for (int i = 0; i < 128; i++) {
            back[i] = (double)widened[i];
            wanted[i] = (double)y[i];
        }
        const double error = dot_of(p, back, 128) - dot_of(p, wanted, 128);
        note(out, error / size);
        decode_levels(&s, row, back);
        note(freed, (error - bias_of(p, y, back, 128)) / size);
    }
    free(row);
}

/* Algorithm 2 to the letter: levels of one bit less with the plain norm, and a rest that is coded
 * by a dense S of independent Gaussians: <q, x_hat> = <q, x_mse> + sqrt(pi/2) / d * |r| <Sq, s>. */
static void estimate_dense(uint64_t seed, uint32_t trials, int bits, moments *out)
{
    float q[128], x[128];
    double r[128], norm = 0;
    fill_gauss(q, 128, seed, 1);
    fill_gauss(x, 128, seed + 1, 1);
    const double sigma = sqrt(size_of(x, 128) / 128);
    const double size = sqrt(128 * size_of(q, 128)) * sigma;
    for (int i = 0; i < 128; i++) {
        double best = 1e9;
        for (int l = 0; l < 1 << bits; l++) {
            const double miss = (double)x[i] - sigma * from_half(table[bits], bits, l);
            best = fabs(miss) < fabs(best) ? miss : best;
        }
        r[i] = best;
        norm += best * best;
    }
    for (uint32_t t = 0; t < trials; t++) {
        double sum = 0;
        for (int row = 0; row < 128; row++) {
            double sr = 0, sq = 0;
            for (int i = 0; i < 128; i++) {
                const double g = gauss(&seed);
                sr += g * r[i];
                sq += g * (double)q[i];
            }
            sum += sr < 0 ? -sq : sq;
        }
        note(out, (sqrt(HALF_PI * norm) / 128 * sum - dot_of(q, r, 128)) / size);
    }
}

static void the_estimate_is_unbiased_and_varies_as_the_theory_says(void **state)
{
    (void)state;
    static const double plain[] = {.03398, .1160}; /* of the levels below, kv-quantization 1.5 */
    double variance[2];
    for (size_t c = 0; c < 2; c++) {
        moments all = {0, 0, 0}, freed = {0, 0, 0}, upright = {0, 0, 0}, none = {0, 0, 0};
        double worst = 0;
        for (uint64_t pair = 0; pair < 40; pair++) {
            moments m = {0, 0, 0}, f = {0, 0, 0};
            /* leaning: shrinking would show */
            estimate(turbo[POLAR_COUNT + c], 77 + 13 * pair, 0.5f, 400, &m, &f);
            estimate(turbo[POLAR_COUNT + c], 77 + 13 * pair, 0, 100, &upright, &none);
            worst = fmax(worst, fabs(mean_of(&f) / sqrt(variance_of(&f) / f.count)));
            freed.mean += f.mean;
            freed.square += f.square;
            freed.count += f.count;
            all.mean += m.mean;
            all.square += m.square;
            all.count += m.count;
        }
        variance[c] = variance_of(&upright);
        const double sigmas = mean_of(&freed) / sqrt(variance_of(&freed) / freed.count);
        print_message("%s: mean %.2e, less the foreseen %.2e (%.2f sigma; of a pair at most %.2f), "
                      "variance * d %.5f\n",
                      rf_kv_codes[turbo[POLAR_COUNT + c]].name, mean_of(&all), mean_of(&freed),
                      sigmas, worst, 128 * variance[c]);
        assert_true(fabs(sigmas) < 3.5 && worst < 4);
        assert_true(fabs(mean_of(&all)) < .1 * sqrt(variance[c])); /* the bias beside the noise */
    }
    moments polar = {0, 0, 0}, lean = {0, 0, 0}, none = {0, 0, 0}, dense = {0, 0, 0};
    for (uint64_t pair = 0; pair < 40; pair++) {
        estimate(RF_KV_CODE_TURBO4, 77 + 13 * pair, 0, 100, &polar, &none);
        estimate(RF_KV_CODE_TURBO4, 77 + 13 * pair, 0.5f, 400, &lean, &none);
    }
    /* Matched norms do not remove all of the shrinking, but nearly: 1 - D / 2. The test sees it. */
    const double biased = mean_of(&lean) / sqrt(variance_of(&lean) / lean.count);
    print_message("turbo4: mean %.2e (%.1f sigma)\n", mean_of(&lean), biased);
    assert_true(biased < -10);
    for (uint64_t pair = 0; pair < 60; pair++) {
        estimate_dense(177 + 13 * pair, 40, 3, &dense);
    }
    /* With independent Gaussians the variance is pi / 2 * D(b - 1) / d, 5.7 times that of plain
     * codes at 4 bits. S^T s of an orthogonal S has a fixed length: what it says of the direction
     * of r is certain, and pi / 2 - 1 is left: 2.1 times. */
    const double of_dense = variance_of(&dense) / variance_of(&polar);
    const double of_turned = variance[0] / variance_of(&polar);
    print_message("variance over turbo4's: dense S %.2f (5.7), orthogonal S %.2f (2.1)\n", of_dense,
                  of_turned);
    assert_true(fabs(mean_of(&dense)) < 3.5 * sqrt(variance_of(&dense) / dense.count));
    assert_true(fabs(of_dense / (HALF_PI * plain[0] / .00932) - 1) < .10);
    assert_true(fabs(of_turned / ((HALF_PI - 1) * plain[0] / .00932) - 1) < .10);
    assert_true(fabs(128 * variance[0] / ((HALF_PI - 1) * plain[0]) - 1) < .10);
    assert_true(fabs(128 * variance[1] / ((HALF_PI - 1) * plain[1]) - 1) < .10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_documented_bits),
        cmocka_unit_test(tables_have_the_documented_error),
        cmocka_unit_test(golden_vector_has_the_golden_indices),
        cmocka_unit_test(gaussian_rows_have_the_documented_error),
        cmocka_unit_test(norms_are_those_of_the_rows),
        cmocka_unit_test(the_estimate_is_unbiased_and_varies_as_the_theory_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
