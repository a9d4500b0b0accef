/* tests/unit/kv_rows_test.h: what the tests of all coded KV formats share: rows, random and
 * awkward, what an error is, and the instruction sets of this machine. */
#ifndef KV_ROWS_TEST_H
#define KV_ROWS_TEST_H

#include "kernel_test.h"
#include "kernels/kv_codec.h"

#define WIDTH_MAX 384u
__attribute__((unused)) static const uint32_t widths[] = {
    8, 16, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128, 192, 256, 320, WIDTH_MAX};

/* ---- rows ----------------------------------------------------------------------------------- */

static inline double uniform_open(uint64_t *seed)
{ /* (0, 1) */
    return ((double)(next_random(seed) >> 12) + 0.5) * 0x1p-52;
}

static inline double gauss(uint64_t *seed)
{
    const double r = sqrt(-2 * log(uniform_open(seed)));
    return r * cos(6.283185307179586 * uniform_open(seed));
}

static inline void fill_gauss(float *x, uint32_t n, uint64_t seed, double size)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = (float)(size * gauss(&seed));
    }
}

typedef enum awkward {
    ZERO,
    ONE_HOT,
    CONSTANT,
    OUTLIER,
    DENORMAL,
    HUGE,
    TINY,
    LARGEST_FLOAT,
    ALTERNATE,
    HALF_ZERO,
    ONE_SPAN_ZERO,
    NOT_A_NUMBER,
    INFINITE,
    EDGE,
    AWKWARD_COUNT
} awkward;

static inline void fill_awkward(awkward kind, float *x, uint32_t n)
{
    fill_gauss(x, n, 99, 1);
    for (uint32_t i = 0; i < n; i++) {
        switch (kind) {
        case ZERO:
            x[i] = i % 3 ? 0.0f : -0.0f;
            break;
        case ONE_HOT:
            x[i] = i == n / 2 ? -3.0f : 0.0f;
            break;
        case CONSTANT:
            x[i] = 0.7f;
            break;
        case OUTLIER:
            x[i] *= i == 1 ? 1e4f : 1.0f;
            break;
        case DENORMAL:
            x[i] *= 1e-40f;
            break;
        case HUGE:
            x[i] *= 1e30f;
            break;
        case TINY:
            x[i] *= 1e-20f;
            break;
        case LARGEST_FLOAT:
            x[i] = i % 2 ? 3.4e38f : -3.4e38f;
            break;
        case ALTERNATE:
            x[i] = i % 2 ? 1.0f : -1.0f;
            break;
        case HALF_ZERO:
            x[i] = i % 2 ? x[i] : 0.0f;
            break;
        case ONE_SPAN_ZERO:
            x[i] = i < n / 2 ? x[i] : 0.0f;
            break;
        case NOT_A_NUMBER:
            x[i] = i % 5 == 2 ? NAN : x[i];
            break;
        case INFINITE:
            x[i] = i % 7 == 3 ? INFINITY : x[i];
            break;
        default:
            x[i] *= 3e-8f;
            break; /* around the smallest scale */
        }
    }
}

/* ---- errors --------------------------------------------------------------------------------- */

static inline double error_of(const float *x, const double *y, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    }
    return sum;
}

static inline double size_of(const float *x, uint32_t n)
{
    double sum = 0;
    for (uint32_t i = 0; i < n; i++) {
        sum += (double)x[i] * (double)x[i];
    }
    return sum;
}

static inline unsigned bit_of(const uint8_t *p, size_t bit)
{
    return p[bit / 8] >> (bit % 8) & 1u;
}

/* ---- kernels and shapes --------------------------------------------------------------------- */

static inline rf_kv_kernels scalar_kernels(void)
{
    rf_kv_kernels k;
    rf_kv_kernels_pick(&k, RF_CPU_SCALAR);
    return k;
}

/* Sets that overlay something here; count of tables filled. */
static inline int other_kernels(rf_kv_kernels out[RF_ARRAY_COUNT(sets)])
{
    int n = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(sets); i++) {
        rf_kv_kernels_pick(&out[n], sets[i]);
        n += out[n].entry.cpu != RF_CPU_SCALAR;
    }
    assert_true(n > 0 || !(rf_cpu_detect() & RF_CPU_AVX2));
    return n;
}

static inline rf_kv_shape shape_of(rf_kv_code code, uint32_t width)
{
    rf_kv_shape s;
    assert_true(rf_kv_shape_of(code, width, &s));
    return s;
}

#endif
