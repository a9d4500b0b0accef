/* tests/unit/test_kv_codec.c: the rotated KV formats against mathematics (quadrature, the golden
 * vector of research/kv-quantization.md 1.8), against a decoder of their own, and every instruction
 * set that this machine has against the scalar entries, bit for bit.
 *
 * Buffers have exactly the size that the contract names, so that a sanitizer sees a read past them.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kernels/kv_codec.h"
#include "kernels/quant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t widths[] = {8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 192, 256, 320};
static const uint32_t sets[] = {RF_CPU_AVX2, RF_CPU_AVX512, RF_CPU_NEON};
#define WIDTH_MAX 320u

static uint64_t next_random(uint64_t *seed) {
    uint64_t z = (*seed += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double uniform(uint64_t *seed) { /* (0, 1) */
    return ((double)(next_random(seed) >> 12) + 0.5) * 0x1p-52;
}

static double gauss(uint64_t *seed) {
    const double r = sqrt(-2 * log(uniform(seed)));
    return r * cos(6.283185307179586 * uniform(seed));
}

static void fill_gauss(float *x, uint32_t n, uint64_t seed, double size) {
    for (uint32_t i = 0; i < n; i++) {
        x[i] = (float)(size * gauss(&seed));
    }
}

static rf_kv_kernels scalar_kernels(void) {
    rf_kv_kernels k;
    rf_kv_kernels_pick(&k, RF_CPU_SCALAR);
    return k;
}

/* Sets that overlay something here; count of tables filled. */
static int other_kernels(rf_kv_kernels out[RF_ARRAY_COUNT(sets)]) {
    int n = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(sets); i++) {
        rf_kv_kernels_pick(&out[n], sets[i]);
        n += out[n].entry.cpu != RF_CPU_SCALAR;
    }
    assert_true(n > 0 || !(rf_cpu_detect() & RF_CPU_AVX2));
    return n;
}

static rf_kv_shape shape_of(rf_kv_code code, uint32_t width) {
    rf_kv_shape s;
    assert_true(rf_kv_shape_of(code, width, &s));
    return s;
}

/* ---- a decoder of its own: bit by bit from the header's words ------------------------------ */

static double scale8_of(uint8_t byte, int base) {
    if ((byte & 127) == 0) {
        return 0;
    }
    const double v = ldexp(1 + (byte & 7) / 8.0, base - 15 + (byte >> 3 & 15));
    return byte & 128 ? -v : v;
}

static unsigned bit_of(const uint8_t *p, size_t bit) {
    return p[bit / 8] >> (bit % 8) & 1u;
}

static const double table_r5[] = {
    -0.9149332, -0.7825463, -0.6748876, -0.5841740, -0.5062944, -0.4386732, -0.3777833, -0.3230201,
    -0.2735298, -0.2286208, -0.1864562, -0.1469554, -0.1091183, -0.0725658, -0.0361454, -0.0002295,
    0.0352800,  0.0711236,  0.1076075,  0.1454330,  0.1851292,  0.2267824,  0.2707133,  0.3186049,
    0.3713491,  0.4295418,  0.4935353,  0.5656050,  0.6474387,  0.7429697,  0.8547630,  0.9944040};
static const double table_r4[] = {-.8758, -.6959, -.5509, -.4268, -.3156, -.2128, -.1150, -.0199,
                                  .0741,  .1696,  .2690,  .3760,  .4932,  .6258,  .7830,  .9863};
static const double table_r3[] = {-.7552, -.4688, -.2466, -.0492, .1437, .3492, .5944, .9420};

static int code_at(const rf_kv_shape *s, const uint8_t *row, uint32_t element) {
    const uint32_t n = s->span, i = element % n;
    const uint32_t bits = rf_kv_codes[s->code].code_bits;
    const uint8_t *p = row + (size_t)(element / n) * (n * bits / 8);
    unsigned value = 0, at = 0;
    if (bits == 8) {
        return s->code == RF_KV_CODE_Q4_0 ? -1 : (int8_t)p[i];
    }
    if (bits >= 4) {
        for (unsigned b = 0; b < 4; b++) {
            value |= bit_of(p, 8u * (i % (n / 2)) + 4u * (i / (n / 2)) + b) << at++;
        }
        p += n / 2;
    }
    if (bits == 6 || bits == 3) {
        for (unsigned b = 0; b < 2; b++) {
            value |= bit_of(p, 8u * (i % (n / 4)) + 2u * (i / (n / 4)) + b) << at++;
        }
        p += n / 4;
    }
    if (bits == 5 || bits == 3) {
        value |= bit_of(p, i) << at;
    }
    switch (s->code) {
    case RF_KV_CODE_R6: return (int)value - 31;
    case RF_KV_CODE_R5: return (int)lround(table_r5[value] * 127);
    case RF_KV_CODE_R4: return (int)lround(table_r4[value] * 127);
    case RF_KV_CODE_R3: return (int)lround(table_r3[value] * 127);
    default: return (int)value - 8;
    }
}

static double unit_of(rf_kv_code code) {
    switch (code) {
    case RF_KV_CODE_R6: return 1.0 / 32;
    case RF_KV_CODE_R5: case RF_KV_CODE_R4: case RF_KV_CODE_R3: return 1.0 / 127;
    default: return 1;
    }
}

static double scale_at(const rf_kv_shape *s, const uint8_t *row, uint32_t span, int base) {
    const uint8_t *p = row + (size_t)s->width * rf_kv_codes[s->code].code_bits / 8;
    if (s->code == RF_KV_CODE_R8 || s->code == RF_KV_CODE_Q8_0 || s->code == RF_KV_CODE_Q4_0) {
        return (double)rf_f16_to_f32((uint16_t)(p[2 * span] | p[2 * span + 1] << 8));
    }
    return scale8_of(p[span], base) * unit_of(s->code);
}

static void decode(const rf_kv_shape *s, const uint8_t *row, int base, double *out) {
    for (uint32_t i = 0; i < s->width; i++) {
        out[i] = scale_at(s, row, i / s->span, base) * code_at(s, row, i);
    }
}

/* ---- helpers ------------------------------------------------------------------------------- */

static double error_of(const float *x, const double *y, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    }
    return sum;
}

static double size_of(const float *x, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    return sum;
}

/* A random correlated form like E[q q^T]: a few strong directions over a floor. */
static void random_form(double *h, uint32_t n, uint64_t seed) {
    memset(h, 0, sizeof(double) * n * n);
    for (uint32_t r = 0; r < n; r++) {
        double v[RF_KV_BLOCK_MAX];
        const double weight = exp(-0.08 * r);
        for (uint32_t i = 0; i < n; i++) {
            v[i] = gauss(&seed) * weight;
        }
        for (uint32_t i = 0; i < n; i++) {
            for (uint32_t j = 0; j < n; j++) {
                h[i * n + j] += v[i] * v[j];
            }
        }
    }
}

typedef struct form { /* feedback for all rotation blocks of a row */
    double *h;
    float *m, *d;
    rf_kv_feedback feedback;
} form;

static form form_of(uint32_t width, uint32_t block, uint64_t seed) {
    const size_t blocks = width / block, square = (size_t)block * block;
    double scratch[RF_KV_BLOCK_MAX * RF_KV_BLOCK_MAX];
    form f = {.h = malloc(blocks * square * sizeof(double)),
              .m = malloc(blocks * square * sizeof(float)),
              .d = malloc(blocks * block * sizeof(float))};
    for (size_t b = 0; b < blocks; b++) {
        random_form(f.h + b * square, block, seed + b);
        assert_true(rf_kv_factor(f.h + b * square, block, 0.1, scratch, f.m + b * square,
                                 f.d + b * block));
    }
    f.feedback = (rf_kv_feedback){f.m, f.d};
    return f;
}

static void form_free(form *f) {
    free(f->h);
    free(f->m);
    free(f->d);
}

static double form_value(const double *h, const double *e, uint32_t n) {
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            sum += e[i] * h[i * n + j] * e[j];
        }
    }
    return sum;
}

/* ---- shapes -------------------------------------------------------------------------------- */

static void rows_have_the_documented_bits(void **state) {
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

static void rotation_is_the_golden_one(void **state) {
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

static void rotation_is_orthonormal_and_turns_back(void **state) {
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

static int nearest_level(const double *levels, int count, double u) {
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
static double quadrature(const double *levels, int count) {
    const int steps = 800, inner = 2000;
    const double step = 7.0 / steps;
    double total = 0, mass = 0;
    for (int a = 0; a < steps; a++) {
        const double top = (a + 0.5) * step;
        const double inside = erf(top / sqrt(2));
        const double density = 32 * 2 * exp(-top * top / 2) / sqrt(6.283185307179586) *
                               pow(inside, 31);
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
static void levels_of(rf_kv_code code, double *levels) {
    for (int i = 0; i < 1 << rf_kv_codes[code].code_bits; i++) {
        levels[i] = rf_kv_codes[code].levels[i] / 127.0;
    }
}

static void tables_have_the_documented_error_by_quadrature(void **state) {
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
static double gaussian_error(rf_kv_code code, uint32_t width, bool zeros) {
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

static void gaussian_rows_have_the_documented_error(void **state) {
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
        {RF_KV_CODE_R8, 3.5e-5, .01},    {RF_KV_CODE_Q8_0, 2.9e-5, .02},
        {RF_KV_CODE_Q4_0, .00738, .01},  {RF_KV_CODE_R4, .00592, .01},
        {RF_KV_CODE_R6, .0004756, .01},  {RF_KV_CODE_R5, .0016967, .01},
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
static void golden_errors(const float *y, const double *levels, double *plain, double *refit) {
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

static void golden_vector_has_the_golden_indices(void **state) {
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

/* ---- awkward rows -------------------------------------------------------------------------- */

typedef enum awkward {
    ZERO, ONE_HOT, CONSTANT, OUTLIER, DENORMAL, HUGE, TINY, LARGEST_FLOAT, ALTERNATE, HALF_ZERO,
    ONE_SPAN_ZERO, NOT_A_NUMBER, INFINITE, AWKWARD_COUNT
} awkward;

static void fill_awkward(awkward kind, float *x, uint32_t n) {
    fill_gauss(x, n, 99, 1);
    for (uint32_t i = 0; i < n; i++) {
        switch (kind) {
        case ZERO: x[i] = i % 3 ? 0.0f : -0.0f; break;
        case ONE_HOT: x[i] = i == n / 2 ? -3.0f : 0.0f; break;
        case CONSTANT: x[i] = 0.7f; break;
        case OUTLIER: x[i] *= i == 1 ? 1e4f : 1.0f; break;
        case DENORMAL: x[i] *= 1e-40f; break;
        case HUGE: x[i] *= 1e30f; break;
        case TINY: x[i] *= 1e-20f; break;
        case LARGEST_FLOAT: x[i] = i % 2 ? 3.4e38f : -3.4e38f; break;
        case ALTERNATE: x[i] = i % 2 ? 1.0f : -1.0f; break;
        case HALF_ZERO: x[i] = i % 2 ? x[i] : 0.0f; break;
        case ONE_SPAN_ZERO: x[i] = i < n / 2 ? x[i] : 0.0f; break;
        case NOT_A_NUMBER: x[i] = i % 5 == 2 ? NAN : x[i]; break;
        default: x[i] = i % 7 == 3 ? INFINITY : x[i]; break;
        }
    }
}

static void awkward_rows_stay_finite(void **state) {
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

static void scales_saturate_at_both_ends(void **state) {
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
                    } else if (power < base - 25) { /* below the lower end */
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

static void factor_gives_the_form_back(void **state) {
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

static void feedback_halves_the_error_of_scores(void **state) {
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
static void feedback_codes_are_the_nearest_of_what_is_left(void **state) {
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

static void expansion_equals_the_decoder_of_this_test(void **state) {
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

static void encoding_has_the_same_bits_in_every_set(void **state) {
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
                            print_message("%s width %u trial %u feedback %d\n",
                                          rf_kv_codes[c].name, s.width, trial, with);
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
static void every_threshold_has_the_same_side_in_every_set(void **state) {
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

static void rotation_and_query_have_the_same_bits_in_every_set(void **state) {
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

/* ---- attention ----------------------------------------------------------------------------- */

typedef struct attention {
    rf_attend_codes job;
    rf_kv_shape k, v;
    float *out_start;
} attention;

static attention attention_of(rf_kv_code kc, rf_kv_code vc, uint32_t kw, uint32_t vw,
                              uint32_t count, uint32_t queries, uint64_t seed) {
    const rf_kv_kernels scalar = scalar_kernels();
    attention t = {.k = shape_of(kc, kw), .v = shape_of(vc, vw)};
    int16_t *q = malloc(2 * (size_t)kw * queries);
    float *q_scale = malloc(4 * queries), *bias = malloc(4 * queries);
    rf_attend_range *visible = malloc(sizeof *visible * queries);
    int8_t *k = malloc((size_t)kw * count), *v = malloc((size_t)vw * count);
    float *ks = malloc(4 * (size_t)t.k.span_count * count);
    float *vs = malloc(4 * (size_t)t.v.span_count * count);
    uint8_t *row = malloc(RF_MAX(t.k.row_bytes, t.v.row_bytes));
    float x[WIDTH_MAX];
    for (uint32_t i = 0; i < queries; i++) {
        fill_gauss(x, kw, seed + i * 7919, 2);
        scalar.query(x, kw, q + (size_t)i * kw, &q_scale[i]);
        bias[i] = (float)gauss(&seed);
        const uint32_t part = (uint32_t)(next_random(&seed) % 4);
        visible[i].first = part == 1 ? count / 3 : 0;
        visible[i].last = part == 2 ? count / 2 : (part == 3 && i % 2 ? 0 : count);
        if (i % 3 && part) {
            visible[i] = visible[i - 1];
        }
    }
    for (uint32_t j = 0; j < count; j++) {
        fill_gauss(x, kw, seed + j * 104729, 1);
        scalar.encode(&t.k, x, NULL, 3, row);
        scalar.expand(&t.k, row, 1, 3, k + (size_t)j * kw, ks + (size_t)j * t.k.span_count);
        fill_gauss(x, vw, seed + j * 1299709, 1);
        scalar.encode(&t.v, x, NULL, 3, row);
        scalar.expand(&t.v, row, 1, 3, v + (size_t)j * vw, vs + (size_t)j * t.v.span_count);
    }
    free(row);
    t.job = (rf_attend_codes){.q = q, .q_scale = q_scale, .bias = bias, .query_count = queries,
                              .visible = visible, .k = k, .k_scale = ks, .k_width = kw,
                              .k_spans = t.k.span_count, .v = v, .v_scale = vs, .v_width = vw,
                              .v_spans = t.v.span_count, .count = count,
                              .scale = 1 / sqrtf((float)kw), .state = malloc(8 * queries),
                              .out = malloc(4 * ((size_t)(queries - 1) * (vw + 3) + vw)),
                              .out_stride = vw + 3, .scores = malloc(4 * RF_ATTEND_BLOCK)};
    return t;
}

static void attention_start(attention *t) {
    for (uint32_t i = 0; i < t->job.query_count; i++) {
        t->job.state[2 * i] = -INFINITY;
        t->job.state[2 * i + 1] = 0;
        memset(t->job.out + i * t->job.out_stride, 0, 4 * (size_t)t->job.v_width);
    }
}

static void attention_free(attention *t) {
    free((void *)(uintptr_t)t->job.q);
    free((void *)(uintptr_t)t->job.q_scale);
    free((void *)(uintptr_t)t->job.bias);
    free((void *)(uintptr_t)t->job.visible);
    free((void *)(uintptr_t)t->job.k);
    free((void *)(uintptr_t)t->job.k_scale);
    free((void *)(uintptr_t)t->job.v);
    free((void *)(uintptr_t)t->job.v_scale);
    free(t->job.state);
    free(t->job.out);
    free(t->job.scores);
}

static const struct pair {
    rf_kv_code k, v;
    uint32_t kw, vw;
} pairs[] = {
    {RF_KV_CODE_R8, RF_KV_CODE_R8, 64, 64},   {RF_KV_CODE_R4, RF_KV_CODE_R4, 64, 64},
    {RF_KV_CODE_R6, RF_KV_CODE_R3, 128, 64},  {RF_KV_CODE_R5, RF_KV_CODE_R4, 80, 80},
    {RF_KV_CODE_R4, RF_KV_CODE_R8, 72, 40},   {RF_KV_CODE_R8, RF_KV_CODE_R6, 96, 112},
    {RF_KV_CODE_Q8_0, RF_KV_CODE_Q4_0, 192, 128}, {RF_KV_CODE_R3, RF_KV_CODE_R5, 256, 256},
    {RF_KV_CODE_R8, RF_KV_CODE_R4, 8, 16},    {RF_KV_CODE_R6, RF_KV_CODE_R8, 112, 320},
};

static void attention_is_that_of_a_double_reference(void **state) {
    (void)state;
    rf_kv_kernels tables[1 + RF_ARRAY_COUNT(sets)];
    tables[0] = scalar_kernels();
    const int sets_here = 1 + other_kernels(tables + 1);
    for (size_t p = 0; p < RF_ARRAY_COUNT(pairs); p++) {
        for (int set = 0; set < sets_here; set++) {
            attention t = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw, 37, 5, p);
            const rf_attend_codes *j = &t.job;
            attention_start(&t);
            tables[set].attend(j);
            tables[set].attend(j); /* a second block: the running maximum and sums go on */
            for (uint32_t i = 0; i < j->query_count; i++) {
                double out[WIDTH_MAX] = {0}, sum = 0;
                for (uint32_t at = j->visible[i].first; at < j->visible[i].last; at++) {
                    double dot = 0;
                    for (uint32_t d = 0; d < j->k_width; d++) {
                        dot += (double)j->q[i * j->k_width + d] * j->k[at * j->k_width + d] *
                               (double)j->k_scale[at * j->k_spans + d / t.k.span];
                    }
                    const double w = exp(dot * (double)j->q_scale[i] * (double)j->scale +
                                         (double)j->bias[i]);
                    sum += w;
                    for (uint32_t d = 0; d < j->v_width; d++) {
                        out[d] += w * j->v[at * j->v_width + d] *
                                  (double)j->v_scale[at * j->v_spans + d / t.v.span];
                    }
                }
                for (uint32_t d = 0; d < j->v_width; d++) {
                    const double got = (double)j->out[i * j->out_stride + d];
                    if (sum == 0) {
                        assert_true(got == 0 && j->state[2 * i + 1] == 0);
                    } else {
                        assert_true(fabs(got / (double)j->state[2 * i + 1] - out[d] / sum) < 5e-6);
                    }
                }
            }
            attention_free(&t);
        }
    }
}

static void attention_has_the_same_bits_in_every_set(void **state) {
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int sets_here = other_kernels(tables);
    static const uint32_t counts[] = {1, 2, 7, 8, 15, 16, 17, 33, 63, 64};
    for (size_t p = 0; p < RF_ARRAY_COUNT(pairs); p++) {
        for (size_t c = 0; c < RF_ARRAY_COUNT(counts); c++) {
            const uint32_t queries = 1 + (uint32_t)(p + c) % 11;
            attention a = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw,
                                       counts[c], queries, 7 * p + c);
            attention b = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw,
                                       counts[c], queries, 7 * p + c);
            for (int set = 0; set < sets_here; set++) {
                attention_start(&a);
                attention_start(&b);
                for (int twice = 0; twice < 2; twice++) {
                    scalar.attend(&a.job);
                    tables[set].attend(&b.job);
                }
                assert_memory_equal(a.job.state, b.job.state, 8 * queries);
                for (uint32_t i = 0; i < queries; i++) {
                    assert_memory_equal(a.job.out + i * a.job.out_stride,
                                        b.job.out + i * b.job.out_stride, 4 * pairs[p].vw);
                }
            }
            attention_free(&a);
            attention_free(&b);
        }
    }
}

/* A query's bits do not depend on who goes with it, nor on positions that it does not see. */
static void attention_of_a_query_is_its_own(void **state) {
    (void)state;
    rf_kv_kernels tables[1 + RF_ARRAY_COUNT(sets)];
    tables[0] = scalar_kernels();
    const int sets_here = 1 + other_kernels(tables + 1);
    for (int set = 0; set < sets_here; set++) {
        attention t = attention_of(RF_KV_CODE_R4, RF_KV_CODE_R5, 64, 80, 50, 9, 12);
        rf_attend_range *visible = malloc(sizeof *visible * 9);
        float together[9][82];
        for (uint32_t i = 0; i < 9; i++) {
            visible[i] = (rf_attend_range){3, 41 + (i > 4)};
        }
        rf_attend_codes job = t.job;
        job.visible = visible;
        attention_start(&t);
        tables[set].attend(&job);
        for (uint32_t i = 0; i < 9; i++) {
            memcpy(together[i], job.out + i * job.out_stride, 80 * 4);
            memcpy(together[i] + 80, job.state + 2 * i, 8);
        }
        attention_start(&t);
        for (uint32_t i = 0; i < 9; i++) { /* alone, and only with the rows it sees */
            rf_attend_codes one = job;
            const rf_attend_range range = {3, visible[i].last};
            one.q += i * one.k_width;
            one.q_scale += i;
            one.bias += i;
            one.query_count = 1;
            one.visible = &range;
            one.count = range.last;
            one.state += 2 * i;
            one.out += i * one.out_stride;
            tables[set].attend(&one);
            assert_memory_equal(together[i], one.out, 80 * 4);
            assert_memory_equal(together[i] + 80, one.state, 8);
        }
        /* bias NULL is bias 0 */
        float none[9] = {0}, first[80];
        attention_start(&t);
        job.bias = NULL;
        tables[set].attend(&job);
        memcpy(first, job.out, sizeof first);
        attention_start(&t);
        job.bias = none;
        tables[set].attend(&job);
        assert_memory_equal(first, job.out, sizeof first);
        free(visible);
        attention_free(&t);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_the_documented_bits),
        cmocka_unit_test(rotation_is_the_golden_one),
        cmocka_unit_test(rotation_is_orthonormal_and_turns_back),
        cmocka_unit_test(tables_have_the_documented_error_by_quadrature),
        cmocka_unit_test(gaussian_rows_have_the_documented_error),
        cmocka_unit_test(golden_vector_has_the_golden_indices),
        cmocka_unit_test(awkward_rows_stay_finite),
        cmocka_unit_test(scales_saturate_at_both_ends),
        cmocka_unit_test(factor_gives_the_form_back),
        cmocka_unit_test(feedback_halves_the_error_of_scores),
        cmocka_unit_test(feedback_codes_are_the_nearest_of_what_is_left),
        cmocka_unit_test(expansion_equals_the_decoder_of_this_test),
        cmocka_unit_test(encoding_has_the_same_bits_in_every_set),
        cmocka_unit_test(every_threshold_has_the_same_side_in_every_set),
        cmocka_unit_test(rotation_and_query_have_the_same_bits_in_every_set),
        cmocka_unit_test(attention_is_that_of_a_double_reference),
        cmocka_unit_test(attention_has_the_same_bits_in_every_set),
        cmocka_unit_test(attention_of_a_query_is_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
