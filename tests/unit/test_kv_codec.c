/* tests/unit/test_kv_codec.c: the coded KV formats: shapes, rotation, tables, golden vector. */
#include "kv_codec_test.h"

/* ---- shapes -------------------------------------------------------------------------------- */

static void rows_have_the_documented_bits(void **state)
{
    (void)state;
    static const double bits[] = {8.25, 6.25, 5.25, 4.25, 3.25, 8.5, 4.5};
    for (rf_kv_code c = 0; c < RF_KV_CODE_COUNT; c++) {
        const rf_kv_shape s = shape_of(c, 64);
        assert_true(s.row_bytes * 8 / 64.0 == bits[c]);
        assert_int_equal(s.block, 64);
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            rf_kv_shape t;
            const bool by_32 = c == RF_KV_CODE_Q8_0 || c == RF_KV_CODE_Q4_0;
            if (by_32 && widths[w] % 32) {
                assert_false(rf_kv_shape_of(c, widths[w], &t));
                continue;
            }
            t = shape_of(c, widths[w]);
            assert_int_equal(t.width % t.block, 0);
            assert_int_equal(t.block % t.span, 0);
            assert_true(t.block >= 8 && t.span >= 8 && t.block <= 64);
            assert_int_equal(t.code_bytes * 8, t.width * rf_kv_codes[c].code_bits);
        }
        rf_kv_shape t;
        static const uint32_t wrong[] = {0, 4, 12, 63, 100, 0xFFFFFFF8u};
        for (size_t i = 0; i < RF_ARRAY_COUNT(wrong); i++) {
            assert_false(rf_kv_shape_of(c, wrong[i], &t));
        }
    }
    assert_int_equal(shape_of(RF_KV_CODE_R4, 80).block, 16);
    assert_int_equal(shape_of(RF_KV_CODE_R4, 96).block, 32);
    assert_int_equal(shape_of(RF_KV_CODE_R8, 192).span, 64);
    assert_int_equal(rf_kv_base(1.0f), 1);
    assert_int_equal(rf_kv_base(-7.9f), 3);
    assert_int_equal(rf_kv_base(0.0f), -RF_KV_BASE_LIMIT);
    assert_int_equal(rf_kv_base(INFINITY), RF_KV_BASE_LIMIT);
}

/* ---- rotation ------------------------------------------------------------------------------ */

static void rotation_is_the_golden_one(void **state)
{
    (void)state;
    static const int signs_16[] = {-1, 1, -1, 1, -1, 1, 1, -1, 1, -1, -1, -1, 1, -1, -1, 1};
    static const double y_6[] = {.46352, -.05587, 1.03837, .02292, -.35793, .70779};
    const rf_kv_kernels k = scalar_kernels();
    uint8_t signs[16];
    float x[128];
    rf_kv_signs(42, 128, signs);
    for (int i = 0; i < 16; i++) {
        assert_int_equal(bit_of(signs, (size_t)i) ? -1 : 1, signs_16[i]);
    }
    for (int i = 0; i < 128; i++) {
        x[i] = (float)(sin(0.1 * i) + 4 * (i == 5));
    }
    assert_true(fabs(sqrt(size_of(x, 128)) - 9.093199) < 2e-6);
    k.rotate(x, signs, 128, 128);
    for (int i = 0; i < 6; i++) {
        assert_true(fabs((double)x[i] - y_6[i]) < 6e-6);
    }
}

static void rotation_is_orthonormal_and_turns_back(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    for (uint32_t block = 8; block <= 256; block *= 2) {
        const uint32_t n = 2 * block;
        float a[512], b[512], c[512];
        uint8_t signs[64];
        rf_kv_signs(7 + block, n, signs);
        fill_gauss(a, n, block, 1);
        fill_gauss(b, n, block + 1, 1);
        memcpy(c, a, sizeof c);
        double before = 0, after = 0;
        for (uint32_t i = 0; i < n; i++) {
            before += (double)a[i] * (double)b[i];
        }
        const double size = size_of(a, n), other = size_of(b, n);
        k.rotate(a, signs, n, block);
        k.rotate(b, signs, n, block);
        for (uint32_t i = 0; i < n; i++) {
            after += (double)a[i] * (double)b[i];
        }
        assert_true(fabs(size_of(a, n) - size) < 1e-6 * size);
        assert_true(fabs(before - after) < 1e-6 * sqrt(size * other));
        k.turn_back(a, signs, n, block);
        for (uint32_t i = 0; i < n; i++) {
            assert_true(fabs((double)a[i] - (double)c[i]) < 1e-5);
        }
        /* A constant row must not become a spike. */
        for (uint32_t i = 0; i < n; i++) {
            a[i] = 1;
        }
        k.rotate(a, signs, n, block);
        double top = 0;
        for (uint32_t i = 0; i < n; i++) {
            top = fmax(top, fabs((double)a[i]));
        }
        assert_true(block < 64 || top < 4);
    }
}

/* ---- tables -------------------------------------------------------------------------------- */

static int nearest_level(const double *levels, int count, double u)
{
    int best = 0;
    for (int i = 1; i < count; i++) {
        if (fabs(u - levels[i]) < fabs(u - levels[best])) {
            best = i;
        }
    }
    return best;
}

/* nMSE of iid Gaussian blocks of 32 under their signed largest element M: the element itself is 1,
 * the others are Gaussian cut at +-M. */
static double quadrature(const double *levels, int count)
{
    const int steps = 800, inner = 2000;
    const double step = 7.0 / steps;
    double total = 0, mass = 0;
    for (int a = 0; a < steps; a++) {
        const double top = (a + 0.5) * step;
        const double inside = erf(top / sqrt(2));
        const double density =
            32 * 2 * exp(-top * top / 2) / sqrt(6.283185307179586) * pow(inside, 31);
        if (density < 1e-13) {
            continue;
        }
        double error = 0, area = 0;
        for (int b = 0; b < inner; b++) {
            const double u = -1 + 2 * (b + 0.5) / inner;
            const double weight = exp(-top * top * u * u / 2);
            const double miss = u - levels[nearest_level(levels, count, u)];
            error += weight * miss * miss;
            area += weight;
        }
        const double pinned = 1 - levels[count - 1];
        total += density * step * top * top * (31 * error / area + pinned * pinned);
        mass += density * step;
    }
    assert_true(fabs(mass - 1) < 1e-6);
    return total / 32;
}

/* The levels of a format in units of its scale, as the kernels have them. */
static void levels_of(rf_kv_code code, double *levels)
{
    for (int i = 0; i < 1 << rf_kv_codes[code].code_bits; i++) {
        levels[i] = rf_kv_codes[code].levels[i] / 127.0;
    }
}

static void tables_have_the_documented_error_by_quadrature(void **state)
{
    (void)state;
    static const struct {
        rf_kv_code code;
        const double *table;
        int count;
        double documented, rounding; /* of the last digit of the document */
    } rows[] = {{RF_KV_CODE_R5, table_r5, 32, .0017231, 1e-7}, /* measured here */
                {RF_KV_CODE_R4, table_r4, 16, .00628, 5e-6},
                {RF_KV_CODE_R3, table_r3, 8, .0261, 5e-5}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(rows); i++) {
        double levels[32];
        levels_of(rows[i].code, levels);
        const double table = quadrature(rows[i].table, rows[i].count);
        const double ours = quadrature(levels, rows[i].count);
        print_message("quadrature %s: table %.7f, int8 %.7f\n", rf_kv_codes[rows[i].code].name,
                      table, ours);
        assert_true(fabs(table - rows[i].documented) < rows[i].rounding);
        assert_true(fabs(ours / table - 1) < .011); /* what int8 levels cost */
    }
}

typedef struct figures {
    double error, size;
} figures;

static const uint64_t gauss_seed = 2024;

/* The mean over 10^4 Gaussian vectors of one format, decoded here. */
static double gaussian_error(rf_kv_code code, uint32_t width, bool zeros)
{
    const rf_kv_kernels k = scalar_kernels();
    const rf_kv_shape s = shape_of(code, width);
    figures f = {0, 0};
    uint8_t *row = malloc(s.row_bytes);
    for (uint32_t i = 0; i < 10000; i++) {
        float x[WIDTH_MAX];
        double y[WIDTH_MAX] = {0};
        fill_gauss(x, width, gauss_seed + i * 1000, 1);
        k.encode(&s, x, NULL, 3, row);
        if (!zeros) {
            decode(&s, row, 3, y);
        }
        f.error += error_of(x, y, width);
        f.size += size_of(x, width);
    }
    free(row);
    return f.error / f.size;
}

static void gaussian_rows_have_the_documented_error(void **state)
{
    (void)state;
    /* plain and refitted in double, by our levels: .00628, .00602, r3 .0261 */
    double plain = 0, refit = 0, plain_3 = 0, size = 0, l4[16], l3[8];
    levels_of(RF_KV_CODE_R4, l4);
    levels_of(RF_KV_CODE_R3, l3);
    for (uint32_t i = 0; i < 20000; i++) {
        float x[32];
        fill_gauss(x, 32, gauss_seed + i * 1000, 1);
        double m = 0, a = 0, b = 0;
        for (int e = 0; e < 32; e++) {
            m = fabs((double)x[e]) > fabs(m) ? (double)x[e] : m;
        }
        for (int e = 0; e < 32; e++) {
            const double u = (double)x[e] / m, c = l4[nearest_level(l4, 16, u)];
            plain += pow(m * (u - c), 2);
            plain_3 += pow(m * (u - l3[nearest_level(l3, 8, u)]), 2);
            a += c * (double)x[e];
            b += c * c;
        }
        size += size_of(x, 32);
        refit += size_of(x, 32) - a * a / b;
    }
    print_message("nMSE plain r4 %.6f refit %.6f r3 %.6f\n", plain / size, refit / size,
                  plain_3 / size);
    assert_true(fabs(plain / size / .00628 - 1) < .01);
    assert_true(fabs(refit / size / .00602 - 1) < .01);
    assert_true(fabs(plain_3 / size / .0261 - 1) < .01);
    static const struct {
        rf_kv_code code;
        double documented, tolerance;
    } rows[] = {
        /* kv-quantization 1.7 (r8, q8_0, q4_0), kv-study 2.6 (r4); r6 r5 r3 stand as measured. */
        {RF_KV_CODE_R8, 3.5e-5, .01},   {RF_KV_CODE_Q8_0, 2.9e-5, .02},
        {RF_KV_CODE_Q4_0, .00738, .01}, {RF_KV_CODE_R4, .00592, .01},
        {RF_KV_CODE_R6, .0004756, .01}, {RF_KV_CODE_R5, .0016967, .01},
        {RF_KV_CODE_R3, .0238813, .01},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(rows); i++) {
        const double got = gaussian_error(rows[i].code, 64, false);
        print_message("nMSE %s %.7f (%.7f)\n", rf_kv_codes[rows[i].code].name, got,
                      rows[i].documented);
        assert_true(fabs(got / rows[i].documented - 1) < rows[i].tolerance);
        /* The bound would see a decoder that gives zeros. */
        const double zeros = gaussian_error(rows[i].code, 64, true);
        assert_false(fabs(zeros / rows[i].documented - 1) < rows[i].tolerance);
    }
}

/* Indices, and squared errors with the scale m and the refitted one, of y under 16 levels. */
static void golden_errors(const float *y, const double *levels, double *plain, double *refit)
{
    static const int first[] = {10, 7, 13, 7, 5, 11, 4, 7};
    int sum = 0;
    *plain = *refit = 0;
    for (int at = 0; at < 128; at += 32) {
        double m = 0, a = 0, b = 0;
        for (int i = at; i < at + 32; i++) {
            m = fabs((double)y[i]) > fabs(m) ? (double)y[i] : m;
        }
        for (int i = at; i < at + 32; i++) {
            const int index = nearest_level(levels, 16, (double)y[i] / m);
            sum += index;
            assert_true(i >= 8 || index == first[i]);
            *plain += pow((double)y[i] - m * levels[index], 2);
            a += levels[index] * (double)y[i];
            b += levels[index] * levels[index];
        }
        *refit += size_of(y + at, 32) - a * a / b;
    }
    assert_int_equal(sum, 911);
    *plain /= size_of(y, 128);
    *refit /= size_of(y, 128);
}

static void golden_vector_has_the_golden_indices(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    uint8_t signs[16];
    float y[128];
    double plain, refit, levels[16];
    rf_kv_signs(42, 128, signs);
    for (int i = 0; i < 128; i++) {
        y[i] = (float)(sin(0.1 * i) + 4 * (i == 5));
    }
    k.rotate(y, signs, 128, 128);
    golden_errors(y, table_r4, &plain, &refit);
    assert_true(fabs(plain - .005778) < 1e-6 && fabs(refit - .005493) < 1e-6);
    levels_of(RF_KV_CODE_R4, levels);
    golden_errors(y, levels, &plain, &refit); /* the same indices with int8 levels */
    assert_true(fabs(plain - .005713) < 1e-6 && fabs(refit - .005457) < 1e-6);
    /* The encoder, with its 8-bit scales and trials, does as well; q4_0 is ggml's. */
    const rf_kv_shape s = shape_of(RF_KV_CODE_R4, 128), g = shape_of(RF_KV_CODE_Q4_0, 128);
    uint8_t row[128];
    double back[128];
    k.encode(&s, y, NULL, 2, row);
    decode(&s, row, 2, back);
    print_message("golden r4 nMSE %.6f\n", error_of(y, back, 128) / size_of(y, 128));
    assert_true(error_of(y, back, 128) / size_of(y, 128) < .005493 * 1.03);
    k.encode(&g, y, NULL, 0, row);
    decode(&g, row, 0, back);
    assert_true(fabs(error_of(y, back, 128) / size_of(y, 128) - .006543) < 4e-6);
    double dot = 0;
    float q[128];
    for (int i = 0; i < 128; i++) {
        q[i] = (float)cos(0.07 * i);
    }
    k.rotate(q, signs, 128, 128);
    for (int i = 0; i < 128; i++) {
        dot += (double)q[i] * back[i];
    }
    assert_true(fabs(dot - 38.09132) < 2e-2); /* there the scale is a float, here it is stored */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_documented_bits),
        cmocka_unit_test(rotation_is_the_golden_one),
        cmocka_unit_test(rotation_is_orthonormal_and_turns_back),
        cmocka_unit_test(tables_have_the_documented_error_by_quadrature),
        cmocka_unit_test(gaussian_rows_have_the_documented_error),
        cmocka_unit_test(golden_vector_has_the_golden_indices),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
