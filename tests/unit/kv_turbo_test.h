/* tests/unit/kv_turbo_test.h: what the tests of the polar formats share: a decoder of their own,
 * written from the layout that kernels/kv_codec.h documents.
 */
#ifndef KV_TURBO_TEST_H
#define KV_TURBO_TEST_H

#include "kv_rows_test.h"

#define HALF_EPS 0x1p-11
#define HALF_PI  1.5707963267948966
static const rf_kv_code turbo[] = {RF_KV_CODE_TURBO4, RF_KV_CODE_TURBO3, RF_KV_CODE_TURBO2,
                                   RF_KV_CODE_TURBO4Q, RF_KV_CODE_TURBO3Q};
#define POLAR_COUNT 3 /* of turbo: what follows is wide */

static inline double dot_of(const float *a, const double *b, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)a[i] * b[i];
    }
    return sum;
}

/* ---- a decoder of its own ------------------------------------------------------------------ */

/* Positive levels and their bounds, kv-quantization 1.5; by bits. */
static const double table[5][8] = {[2] = {0.4527800346, 1.5104176085},
                                   [3] = {0.2450941789, 0.7560052812, 1.3439092785, 2.1519457045},
                                   [4] = {0.1283950299, 0.3880482995, 0.6567591185, 0.9423404565,
                                          1.2562311973, 1.6180463860, 2.0690172265, 2.7325895710}};
static const double bounds[5][8] = {[2] = {0, .9815988216},
                                    [3] = {0, .5005497301, 1.0499572799, 1.7479274915},
                                    [4] = {0, .2582216647, .5224037090, .7995497875, 1.0992858269,
                                           1.4371387917, 1.8435318063, 2.4008033988}};
static const int bytes[5][8] = {
    [2] = {38, 127}, [3] = {14, 45, 79, 127}, [4] = {6, 18, 31, 44, 58, 75, 96, 127}};
static const double unit[5] = {0, 0, 0.0118930520, 0.0169444544, 0.0215164533};

static inline int level_bits_of(rf_kv_code code)
{
    switch (code) {
    case RF_KV_CODE_TURBO4:
        return 4;
    case RF_KV_CODE_TURBO3:
    case RF_KV_CODE_TURBO4Q:
        return 3;
    default:
        return 2;
    }
}

static inline double from_half(const double table_of[8], int bits, int index)
{
    const int half = 1 << (bits - 1);
    return index >= half ? table_of[index - half] : -table_of[half - 1 - index];
}

static inline int byte_at(int bits, int index)
{
    const int half = 1 << (bits - 1);
    return index >= half ? bytes[bits][index - half] : -bytes[bits][half - 1 - index];
}

static inline unsigned index_at(const rf_kv_shape *s, const uint8_t *row, uint32_t element)
{
    const uint32_t n = s->span, i = element % n, bits = rf_kv_codes[s->code].code_bits;
    const uint8_t *p = row + (size_t)(element / n) * (n * bits / 8);
    unsigned value = 0;
    for (unsigned b = 0; b < bits; b++) {
        if (bits == 4) {
            value |= bit_of(p, 8u * (i % (n / 2)) + 4u * (i / (n / 2)) + b) << b;
        } else if (b < 2) {
            value |= bit_of(p, 8u * (i % (n / 4)) + 2u * (i / (n / 4)) + b) << b;
        } else {
            value |= bit_of(p + n / 4, i) << b;
        }
    }
    return value;
}

/* Half `at` of those behind the codes: scales of spans, then norms of rests. */
static inline double half_at(const rf_kv_shape *s, const uint8_t *row, uint32_t at)
{
    const uint8_t *p = row + (size_t)s->width * rf_kv_codes[s->code].code_bits / 8 + 2 * at;
    return (double)rf_f16_to_f32((uint16_t)(p[0] | p[1] << 8));
}

/* Levels alone. */
static inline void decode_levels(const rf_kv_shape *s, const uint8_t *row, double *out)
{
    const int bits = level_bits_of(s->code);
    for (uint32_t i = 0; i < s->width; i++) {
        const int index = (int)(index_at(s, row, i) & ((1u << bits) - 1));
        out[i] = half_at(s, row, i / s->span) * unit[bits] * byte_at(bits, index);
    }
}

/* The matrix of the second turn of one span, its rows r: hadamard[r][i] * sign of i / sqrt(n). */
static inline double turn_at(const uint8_t *signs, uint32_t n, uint32_t r, uint32_t i)
{
    const int odd = __builtin_popcount(r & i) % 2 != (int)bit_of(signs, i);
    return (odd ? -1 : 1) / sqrt(n);
}

static inline void decode(const rf_kv_shape *s, const uint8_t *row, double *out)
{
    const int bits = level_bits_of(s->code);
    uint8_t signs[16];
    decode_levels(s, row, out);
    if (!rf_kv_codes[s->code].wide) {
        return;
    }
    rf_kv_signs(RF_KV_REST_SEED, 128, signs);
    for (uint32_t i = 0; i < s->width; i++) {
        const uint32_t span = i / s->span;
        double sum = 0;
        for (uint32_t r = 0; r < s->span; r++) {
            const int minus = index_at(s, row, span * s->span + r) >> bits & 1;
            sum += (minus ? -1 : 1) * turn_at(signs, s->span, r, i % s->span);
        }
        out[i] += sqrt(HALF_PI) / sqrt(s->span) * half_at(s, row, s->span_count + span) * sum;
    }
}

#endif
