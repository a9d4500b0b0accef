/* kernels/math.c: sine, cosine, exponential and logarithm in double, so that rotary tables and
 * sampling give the same bits on every machine and C library. Called at open and by the sampler,
 * never inside a loop over weights.
 *
 * Method: reduction by Cody and Waite (Software Manual for the Elementary Functions, 1980) with
 * fma, then Taylor polynomials, whose remainders on the reduced ranges lie below 2^-53.
 */
#include "kernels/kernels.h"

#include <string.h>

#define ROUND_TO_INTEGER 6755399441055744.0 /* 1.5 * 2^52 */

static double from_bits(uint64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint64_t to_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* coefficients[count] from the highest power down. */
static double polynomial(const double *coefficients, int count, double x)
{
    double sum = coefficients[0];
    for (int i = 1; i < count; i++) {
        sum = __builtin_fma(sum, x, coefficients[i]);
    }
    return sum;
}

void rf_sin_cos(double angle, float *sine, float *cosine)
{
    /* (-1)^i / (2i+1)! and (-1)^i / (2i)!; the remainder at pi/4 is below 5e-17. */
    static const double sines[] = {
        -1.0 / 1307674368000.0, 1.0 / 6227020800.0, -1.0 / 39916800.0, 1.0 / 362880.0,
        -1.0 / 5040.0,          1.0 / 120.0,        -1.0 / 6.0,        1.0};
    static const double cosines[] = {1.0 / 20922789888000.0,
                                     -1.0 / 87178291200.0,
                                     1.0 / 479001600.0,
                                     -1.0 / 3628800.0,
                                     1.0 / 40320.0,
                                     -1.0 / 720.0,
                                     1.0 / 24.0,
                                     -1.0 / 2.0,
                                     1.0};
    const double half_pi_high = 1.5707963267948966, half_pi_low = 6.123233995736766e-17;
    if (!(__builtin_fabs(angle) < 1099511627776.0)) { /* 2^40, and NaN */
        *sine = *cosine = __builtin_nanf("");
        return;
    }
    const double n = (angle * 0.6366197723675814 + ROUND_TO_INTEGER) - ROUND_TO_INTEGER;
    double r = __builtin_fma(-n, half_pi_high, angle);
    r = __builtin_fma(-n, half_pi_low, r);
    const double s = r * polynomial(sines, RF_ARRAY_COUNT(sines), r * r);
    const double c = polynomial(cosines, RF_ARRAY_COUNT(cosines), r * r);
    switch ((int64_t)n & 3) {
    case 0:
        *sine = (float)s;
        *cosine = (float)c;
        break;
    case 1:
        *sine = (float)c;
        *cosine = (float)-s;
        break;
    case 2:
        *sine = (float)-s;
        *cosine = (float)-c;
        break;
    default:
        *sine = (float)-c;
        *cosine = (float)s;
        break;
    }
}

#define LN2_HIGH 6.93147180369123816490e-01 /* 32 bits: n times it is exact */
#define LN2_LOW  1.90821492927058770002e-10

double rf_exp_f64(double x)
{
    /* 1 / i!, from 13 down; the remainder at ln 2 / 2 is 4e-18. */
    static const double inverse_factorials[] = {1.0 / 6227020800.0,
                                                1.0 / 479001600.0,
                                                1.0 / 39916800.0,
                                                1.0 / 3628800.0,
                                                1.0 / 362880.0,
                                                1.0 / 40320.0,
                                                1.0 / 5040.0,
                                                1.0 / 720.0,
                                                1.0 / 120.0,
                                                1.0 / 24.0,
                                                1.0 / 6.0,
                                                0.5,
                                                1.0,
                                                1.0};
    if (x != x) {
        return x;
    }
    x = x < -746.0 ? -746.0 : x; /* below: 0; above 709.78: infinity, by the products at the end */
    x = x > 710.0 ? 710.0 : x;
    const double n = (x * 1.4426950408889634 + ROUND_TO_INTEGER) - ROUND_TO_INTEGER;
    double r = __builtin_fma(-n, LN2_HIGH, x);
    r = __builtin_fma(-n, LN2_LOW, r);
    const double p = polynomial(inverse_factorials, RF_ARRAY_COUNT(inverse_factorials), r);
    const int64_t power = (int64_t)n, half = power / 2;
    return p * from_bits((uint64_t)(half + 1023) << 52) *
           from_bits((uint64_t)(power - half + 1023) << 52);
}

double rf_log_f64(double x)
{
    /* 1 / (2i+1), from 11 down: log m = 2 s (1 + s^2/3 + ...), s = (m-1)/(m+1), |s| <= 0.1716. */
    static const double odd_inverses[] = {1.0 / 23.0, 1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0,
                                          1.0 / 15.0, 1.0 / 13.0, 1.0 / 11.0, 1.0 / 9.0,
                                          1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0,  1.0};
    const double infinity = __builtin_inf();
    if (x == 0.0) {
        return -infinity;
    }
    if (!(x > 0.0) || x == infinity) { /* negative and NaN: NaN */
        return x == infinity ? x : __builtin_nan("");
    }
    int64_t exponent = 0;
    if (x < 2.2250738585072014e-308) { /* subnormal */
        x *= 18014398509481984.0;      /* 2^54 */
        exponent = -54;
    }
    uint64_t bits = to_bits(x);
    exponent += (int64_t)(bits >> 52) - 1023;
    bits = (bits & 0xFFFFFFFFFFFFFull) | 1023ull << 52;
    double m = from_bits(bits);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double log_m = 2.0 * s * polynomial(odd_inverses, RF_ARRAY_COUNT(odd_inverses), s * s);
    const double n = (double)exponent;
    return __builtin_fma(n, LN2_HIGH, __builtin_fma(n, LN2_LOW, log_m));
}
