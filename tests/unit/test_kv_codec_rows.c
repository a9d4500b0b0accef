/* tests/unit/test_kv_codec_rows.c: rows of the coded KV formats: awkward ones, feedback, every
 * instruction set. */
#include "kv_codec_test.h"

/* ---- awkward rows -------------------------------------------------------------------------- */

static void awkward_rows_stay_finite(void **state)
{
    (void)state;
    uint8_t signs[8];
    rf_kv_signs(42, 64, signs);
    const rf_kv_kernels k = scalar_kernels();
    for (rf_kv_code c = 0; c < RF_KV_CODE_COUNT; c++) {
        const rf_kv_shape s = shape_of(c, 64);
        form f = form_of(64, 64, 5);
        for (awkward kind = 0; kind < AWKWARD_COUNT; kind++) {
            for (int with = 0; with < 2; with++) {
                float x[64];
                double y[64];
                uint8_t *row = malloc(s.row_bytes);
                fill_awkward(kind, x, 64);
                if (kind == ONE_HOT || kind == CONSTANT || kind == ALTERNATE) {
                    k.rotate(x, signs, 64, 64);
                }
                k.encode(&s, x, with ? &f.feedback : NULL, 3, row);
                decode(&s, row, 3, y);
                for (int i = 0; i < 64; i++) {
                    assert_true(isfinite(y[i]));
                    assert_true(kind != ZERO || y[i] == 0);
                }
                const double relative = error_of(x, y, 64) / size_of(x, 64);
                if (!with && (kind == ONE_HOT || kind == CONSTANT || kind == ALTERNATE)) {
                    assert_true(relative < (c == RF_KV_CODE_R3 ? .06 : .02));
                }
                if (!with && kind != NOT_A_NUMBER && kind != INFINITE && kind != ZERO) {
                    assert_true(relative < 1.01);
                }
                free(row);
            }
        }
        form_free(&f);
    }
}

static void scales_saturate_at_both_ends(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    const rf_kv_shape s = shape_of(RF_KV_CODE_R4, 32);
    form f = form_of(32, 32, 3);
    for (int base = -RF_KV_BASE_LIMIT; base <= RF_KV_BASE_LIMIT; base += 16) {
        for (int power = base - 30; power < base + 10; power++) {
            for (int sign = -1; sign <= 1; sign += 2) {
                for (int with = 0; with < 2; with++) {
                    float x[32] = {0};
                    uint8_t row[17];
                    double y[32];
                    for (int i = 0; i < 32; i++) {
                        x[i] = (float)ldexp(sign * (1 - i / 40.0), power);
                    }
                    k.encode(&s, x, with ? &f.feedback : NULL, base, row);
                    const double scale = scale8_of(row[16], base);
                    decode(&s, row, base, y);
                    if (power >= base + 2) {
                        assert_true(scale == ldexp(1.875 * sign, base)); /* the upper end */
                    } else if (power < base - 25) {                      /* below the lower end */
                        assert_true(fabs(scale) == (with ? ldexp(1.125, base - 15) : 0));
                    } else if (power >= base - 14 && power < base) {
                        assert_true(error_of(x, y, 32) < .02 * size_of(x, 32) || with);
                        assert_true(fabs(scale / x[0] - 1) < .4);
                    }
                }
            }
        }
    }
    form_free(&f);
    /* f16: 65504 * 127 is the end; below half its smallest the row is zeros. */
    const rf_kv_shape e = shape_of(RF_KV_CODE_R8, 8);
    float x[8] = {1e9f, -1e9f, 3, 0, 0, 0, 0, 0};
    double y[8];
    uint8_t row[10];
    k.encode(&e, x, NULL, 0, row);
    decode(&e, row, 0, y);
    assert_true(y[0] == 65504.0 * 127 && y[1] == -y[0]);
    for (int i = 0; i < 8; i++) {
        x[i] = 1e-9f;
    }
    k.encode(&e, x, NULL, 0, row);
    for (int i = 0; i < 10; i++) {
        assert_int_equal(row[i], 0);
    }
}

/* ---- feedback ------------------------------------------------------------------------------ */

static void factor_gives_the_form_back(void **state)
{
    (void)state;
    for (uint32_t n = 8; n <= 64; n *= 2) {
        double h[64 * 64], scratch[64 * 64], trace = 0, worst = 0;
        float m[64 * 64], d[64];
        random_form(h, n, n);
        for (uint32_t i = 0; i < n; i++) {
            trace += h[i * n + i];
        }
        assert_true(rf_kv_factor(h, n, 0.1, scratch, m, d));
        for (uint32_t a = 0; a < n; a++) {
            for (uint32_t b = 0; b < n; b++) {
                double sum = 0; /* sum over k of M_ka D_k M_kb, M_kj at m[j * n + k] */
                for (uint32_t k = 0; k < n; k++) {
                    const double ka = k == a ? 1 : (double)m[a * n + k];
                    const double kb = k == b ? 1 : (double)m[b * n + k];
                    sum += ka * (double)d[k] * kb;
                }
                const double wanted = h[a * n + b] / (trace / n) + (a == b ? 0.1 : 0);
                worst = fmax(worst, fabs(sum - wanted));
            }
            for (uint32_t k = 0; k <= a; k++) {
                assert_true(m[a * n + k] == 0);
            }
        }
        assert_true(worst < 1e-5);
        memset(h, 0, sizeof h);
        assert_false(rf_kv_factor(h, n, 0.1, scratch, m, d));
        h[3] = NAN;
        h[0] = 1;
        assert_false(rf_kv_factor(h, n, 0.1, scratch, m, d));
        h[3] = 0;
        h[0] = -1;
        assert_false(rf_kv_factor(h, n, 0.1, scratch, m, d));
        assert_true(d[0] == 0 && m[1] == 0);
    }
}

static void feedback_halves_the_error_of_scores(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    static const rf_kv_code codes[] = {RF_KV_CODE_R8, RF_KV_CODE_R6, RF_KV_CODE_R5, RF_KV_CODE_R4,
                                       RF_KV_CODE_R3};
    for (size_t c = 0; c < RF_ARRAY_COUNT(codes); c++) {
        const rf_kv_shape s = shape_of(codes[c], 64);
        uint8_t *row = malloc(s.row_bytes);
        double with = 0, without = 0, zeros = 0;
        for (uint64_t seed = 0; seed < 4; seed++) {
            form f = form_of(64, 64, 100 + seed);
            for (uint64_t r = 0; r < 200; r++) {
                float x[64];
                double y[64], e[64];
                fill_gauss(x, 64, 5000 + 999 * (seed * 200 + r), 2);
                for (int pass = 0; pass < 3; pass++) {
                    memset(y, 0, sizeof y);
                    if (pass < 2) {
                        k.encode(&s, x, pass ? NULL : &f.feedback, 3, row);
                        decode(&s, row, 3, y);
                    }
                    for (int i = 0; i < 64; i++) {
                        e[i] = y[i] - (double)x[i];
                    }
                    double *sum = pass == 0 ? &with : (pass == 1 ? &without : &zeros);
                    *sum += form_value(f.h, e, 64);
                }
            }
            form_free(&f);
        }
        print_message("%s: feedback %.3g, none %.3g, zeros %.3g: factor %.2f\n",
                      rf_kv_codes[codes[c]].name, with, without, zeros, without / with);
        assert_true(without / with > 1.8);
        assert_false(without / zeros > 1.8);
        free(row);
    }
}

/* Straight from the words of the contract, in double, with the scale that the row got: the codes
 * must be the nearest of t. */
static void feedback_codes_are_the_nearest_of_what_is_left(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    for (rf_kv_code c = 0; c <= RF_KV_CODE_R3; c++) {
        const rf_kv_code_info *info = &rf_kv_codes[c];
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            const rf_kv_shape s = shape_of(c, widths[w]);
            form f = form_of(s.width, s.block, w);
            float x[WIDTH_MAX];
            uint8_t *row = malloc(s.row_bytes);
            fill_gauss(x, s.width, 31 + w, 1);
            k.encode(&s, x, &f.feedback, 3, row);
            for (uint32_t b = 0; b < s.width / s.block; b++) {
                double e[RF_KV_BLOCK_MAX];
                for (uint32_t i = 0; i < s.block; i++) {
                    const uint32_t at = b * s.block + i;
                    const double scale = scale_at(&s, row, at / s.span, 3);
                    double t = x[at];
                    for (uint32_t j = 0; j < i; j++) {
                        t -= (double)f.m[(size_t)(b * s.block + j) * s.block + i] * e[j];
                    }
                    const int code = code_at(&s, row, at);
                    const double miss = fabs(t - scale * code);
                    for (int l = 0; l < 1 << info->code_bits; l++) {
                        const int other = info->levels ? info->levels[l] : l - info->offset;
                        if (info->levels || (other >= info->low && other <= info->high)) {
                            assert_true(miss <= fabs(t - scale * other) + 1e-5 * fabs(scale * 127));
                        }
                    }
                    e[i] = scale * code - (double)x[at];
                }
            }
            free(row);
            form_free(&f);
        }
    }
}

/* ---- expansion ----------------------------------------------------------------------------- */

static void expansion_equals_the_decoder_of_this_test(void **state)
{
    (void)state;
    rf_kv_kernels tables[1 + RF_ARRAY_COUNT(sets)];
    tables[0] = scalar_kernels();
    const int count = 1 + other_kernels(tables + 1);
    for (int set = 0; set < count; set++) {
        for (rf_kv_code c = 0; c < RF_KV_CODE_COUNT; c++) {
            for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
                rf_kv_shape s;
                if (!rf_kv_shape_of(c, widths[w], &s)) {
                    continue;
                }
                for (uint32_t rows = 1; rows < 6; rows += 2) {
                    uint8_t *bytes = malloc(s.row_bytes * rows);
                    int8_t *codes = malloc(s.width * rows);
                    float *scales = malloc(sizeof(float) * s.span_count * rows);
                    uint64_t seed = c * 100 + w;
                    for (uint32_t i = 0; i < s.row_bytes * rows; i++) {
                        bytes[i] = (uint8_t)next_random(&seed);
                    }
                    tables[set].expand(&s, bytes, rows, -5, codes, scales);
                    for (uint32_t r = 0; r < rows; r++) {
                        const uint8_t *row = bytes + r * s.row_bytes;
                        for (uint32_t i = 0; i < s.width; i++) {
                            assert_int_equal(codes[r * s.width + i], code_at(&s, row, i));
                        }
                        for (uint32_t i = 0; i < s.span_count; i++) {
                            const double wanted = scale_at(&s, row, i, -5);
                            const double got = (double)scales[r * s.span_count + i];
                            assert_true((isnan(wanted) && isnan(got)) || wanted == got ||
                                        fabs(got - wanted) <= 6e-8 * fabs(wanted));
                        }
                    }
                    free(bytes);
                    free(codes);
                    free(scales);
                }
            }
        }
    }
}

/* ---- every instruction set ------------------------------------------------------------------ */

static void encoding_has_the_same_bits_in_every_set(void **state)
{
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int count = other_kernels(tables);
    for (rf_kv_code c = 0; c < RF_KV_CODE_COUNT; c++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            rf_kv_shape s;
            if (!rf_kv_shape_of(c, widths[w], &s)) {
                continue;
            }
            form f = form_of(s.width, s.block, w);
            uint8_t *a = malloc(s.row_bytes), *b = malloc(s.row_bytes);
            float *x = malloc(sizeof(float) * s.width);
            for (uint32_t trial = 0; trial < 60; trial++) {
                int base = 3;
                if (trial < AWKWARD_COUNT) {
                    fill_awkward((awkward)trial, x, s.width);
                } else {
                    fill_gauss(x, s.width, trial * 77 + w, pow(2, (double)(trial % 9) - 4));
                    base = (int)(trial % 7) - 2;
                }
                for (uint32_t i = 0; trial % 8 == 7 && i < s.width; i++) {
                    x[i] = roundf(x[i] * 4) / 4; /* equal magnitudes, halfway cases */
                }
                for (int with = 0; with < 2; with++) {
                    for (int set = 0; set < count; set++) {
                        memset(a, 0xA5, s.row_bytes);
                        memset(b, 0x5A, s.row_bytes);
                        scalar.encode(&s, x, with ? &f.feedback : NULL, base, a);
                        tables[set].encode(&s, x, with ? &f.feedback : NULL, base, b);
                        if (memcmp(a, b, s.row_bytes) != 0) {
                            print_message("%s width %u trial %u feedback %d\n", rf_kv_codes[c].name,
                                          s.width, trial, with);
                        }
                        assert_memory_equal(a, b, s.row_bytes);
                    }
                }
            }
            free(a);
            free(b);
            free(x);
            form_free(&f);
        }
    }
}

/* Every w of the search, by a row whose scale is known: element 0 is the largest. */
static void every_threshold_has_the_same_side_in_every_set(void **state)
{
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int count = other_kernels(tables);
    static const rf_kv_code codes[] = {RF_KV_CODE_R6, RF_KV_CODE_R5, RF_KV_CODE_R4, RF_KV_CODE_R3};
    float *zero = calloc(32 * 32, sizeof(float)), one[32];
    for (int i = 0; i < 32; i++) {
        one[i] = 1;
    }
    const rf_kv_feedback none = {zero, one};
    for (size_t c = 0; c < RF_ARRAY_COUNT(codes); c++) {
        const rf_kv_shape s = shape_of(codes[c], 32);
        for (int set = 0; set < count; set++) {
            for (int w = -260; w <= 260; w++) {
                for (int step = -1; step <= 1; step++) {
                    float x[32];
                    uint8_t a[32], b[32];
                    x[0] = 1;
                    for (int i = 1; i < 32; i++) {
                        x[i] = (float)w / 254.0f + (float)step * (float)i * 1e-6f;
                        x[i] = RF_MAX(-0.999f, RF_MIN(x[i], 0.999f));
                    }
                    for (int with = 0; with < 2; with++) {
                        scalar.encode(&s, x, with ? &none : NULL, 2, a);
                        tables[set].encode(&s, x, with ? &none : NULL, 2, b);
                        assert_memory_equal(a, b, s.row_bytes);
                    }
                }
            }
        }
    }
    free(zero);
}

static void rotation_and_query_have_the_same_bits_in_every_set(void **state)
{
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int count = other_kernels(tables);
    for (int set = 0; set < count; set++) {
        for (uint32_t block = 8; block <= 256; block *= 2) {
            for (uint32_t blocks = 1; blocks < 4; blocks++) {
                const uint32_t n = block * blocks;
                float *a = malloc(n * sizeof(float)), *b = malloc(n * sizeof(float));
                uint8_t *signs = malloc((n / 8 + 7) / 8 * 8);
                rf_kv_signs(n, n, signs);
                for (int back = 0; back < 2; back++) {
                    fill_gauss(a, n, n, 3);
                    a[3] = -0.0f;
                    memcpy(b, a, n * sizeof(float));
                    (back ? scalar.turn_back : scalar.rotate)(a, signs, n, block);
                    (back ? tables[set].turn_back : tables[set].rotate)(b, signs, n, block);
                    assert_memory_equal(a, b, n * sizeof(float));
                }
                free(a);
                free(b);
                free(signs);
            }
        }
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            for (awkward kind = 0; kind < AWKWARD_COUNT; kind++) {
                const uint32_t n = widths[w];
                float *q = malloc(n * sizeof(float)), sa, sb;
                int16_t *a = malloc(n * 2), *b = malloc(n * 2);
                fill_awkward(kind, q, n);
                scalar.query(q, n, a, &sa);
                tables[set].query(q, n, b, &sb);
                assert_memory_equal(a, b, n * 2);
                assert_true(rf_float_bits(sa) == rf_float_bits(sb));
                if (kind == OUTLIER || kind == HALF_ZERO) {
                    double top = 0;
                    for (uint32_t i = 0; i < n; i++) {
                        top = fmax(top, fabs((double)q[i]));
                    }
                    for (uint32_t i = 0; i < n; i++) {
                        const double miss = (double)q[i] - (double)sa * a[i];
                        assert_true(fabs(miss) <= .502 * top / 32767);
                    }
                }
                free(q);
                free(a);
                free(b);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(awkward_rows_stay_finite),
        cmocka_unit_test(scales_saturate_at_both_ends),
        cmocka_unit_test(factor_gives_the_form_back),
        cmocka_unit_test(feedback_halves_the_error_of_scores),
        cmocka_unit_test(feedback_codes_are_the_nearest_of_what_is_left),
        cmocka_unit_test(expansion_equals_the_decoder_of_this_test),
        cmocka_unit_test(encoding_has_the_same_bits_in_every_set),
        cmocka_unit_test(every_threshold_has_the_same_side_in_every_set),
        cmocka_unit_test(rotation_and_query_have_the_same_bits_in_every_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
