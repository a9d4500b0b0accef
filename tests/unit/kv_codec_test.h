/* tests/unit/kv_codec_test.h: what the parts of test_kv_codec share: a decoder of their own, and
 * forms for the feedback. */
#ifndef KV_CODEC_TEST_H
#define KV_CODEC_TEST_H

#include "kv_rows_test.h"

/* ---- a decoder of its own: bit by bit from the header's words ------------------------------ */

static inline double scale8_of(uint8_t byte, int base)
{
    if ((byte & 127) == 0) {
        return 0;
    }
    const double v = ldexp(1 + (byte & 7) / 8.0, base - 15 + (byte >> 3 & 15));
    return byte & 128 ? -v : v;
}

__attribute__((unused)) static const double table_r5[] = {
    -0.9149332, -0.7825463, -0.6748876, -0.5841740, -0.5062944, -0.4386732, -0.3777833, -0.3230201,
    -0.2735298, -0.2286208, -0.1864562, -0.1469554, -0.1091183, -0.0725658, -0.0361454, -0.0002295,
    0.0352800,  0.0711236,  0.1076075,  0.1454330,  0.1851292,  0.2267824,  0.2707133,  0.3186049,
    0.3713491,  0.4295418,  0.4935353,  0.5656050,  0.6474387,  0.7429697,  0.8547630,  0.9944040};
__attribute__((unused)) static const double table_r4[] = {
    -.8758, -.6959, -.5509, -.4268, -.3156, -.2128, -.1150, -.0199,
    .0741,  .1696,  .2690,  .3760,  .4932,  .6258,  .7830,  .9863};
__attribute__((unused)) static const double table_r3[] = {-.7552, -.4688, -.2466, -.0492,
                                                          .1437,  .3492,  .5944,  .9420};

static inline int code_at(const rf_kv_shape *s, const uint8_t *row, uint32_t element)
{
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
    case RF_KV_CODE_R6:
        return (int)value - 31;
    case RF_KV_CODE_R5:
        return (int)lround(table_r5[value] * 127);
    case RF_KV_CODE_R4:
        return (int)lround(table_r4[value] * 127);
    case RF_KV_CODE_R3:
        return (int)lround(table_r3[value] * 127);
    default:
        return (int)value - 8;
    }
}

static inline double unit_of(rf_kv_code code)
{
    switch (code) {
    case RF_KV_CODE_R6:
        return 1.0 / 32;
    case RF_KV_CODE_R5:
    case RF_KV_CODE_R4:
    case RF_KV_CODE_R3:
        return 1.0 / 127;
    default:
        return 1;
    }
}

static inline double scale_at(const rf_kv_shape *s, const uint8_t *row, uint32_t span, int base)
{
    const uint8_t *p = row + (size_t)s->width * rf_kv_codes[s->code].code_bits / 8;
    if (s->code == RF_KV_CODE_R8 || s->code == RF_KV_CODE_Q8_0 || s->code == RF_KV_CODE_Q4_0) {
        return (double)rf_f16_to_f32((uint16_t)(p[2 * span] | p[2 * span + 1] << 8));
    }
    return scale8_of(p[span], base) * unit_of(s->code);
}

static inline void decode(const rf_kv_shape *s, const uint8_t *row, int base, double *out)
{
    for (uint32_t i = 0; i < s->width; i++) {
        out[i] = scale_at(s, row, i / s->span, base) * code_at(s, row, i);
    }
}

/* ---- helpers ------------------------------------------------------------------------------- */

/* A random correlated form like E[q q^T]: a few strong directions over a floor. */
static inline void random_form(double *h, uint32_t n, uint64_t seed)
{
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

static inline form form_of(uint32_t width, uint32_t block, uint64_t seed)
{
    const size_t blocks = width / block, square = (size_t)block * block;
    double scratch[RF_KV_BLOCK_MAX * RF_KV_BLOCK_MAX];
    form f = {.h = malloc(blocks * square * sizeof(double)),
              .m = malloc(blocks * square * sizeof(float)),
              .d = malloc(blocks * block * sizeof(float))};
    for (size_t b = 0; b < blocks; b++) {
        random_form(f.h + b * square, block, seed + b);
        assert_true(
            rf_kv_factor(f.h + b * square, block, 0.1, scratch, f.m + b * square, f.d + b * block));
    }
    f.feedback = (rf_kv_feedback){f.m, f.d};
    return f;
}

static inline void form_free(form *f)
{
    free(f->h);
    free(f->m);
    free(f->d);
}

static inline double form_value(const double *h, const double *e, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            sum += e[i] * h[i * n + j] * e[j];
        }
    }
    return sum;
}

#endif
