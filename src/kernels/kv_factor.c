/* kernels/kv_factor.c: the quadratic form of error feedback, factored once in set-up.
 *
 * H = Mt D M with M unit lower triangular: Cholesky from the last index down, so that the error of
 * element i is seen by the elements after it.
 */
#include "kernels/kv_codec.h"

#include <string.h>

bool rf_kv_factor(const double *h, uint32_t block, double damping, double *scratch, float *m,
                  float *d)
{
    const size_t n = block;
    double trace = 0;
    bool finite = true;
    memset(m, 0, n * n * sizeof *m);
    memset(d, 0, n * sizeof *d);
    for (size_t i = 0; i < n * n; i++) {
        finite = finite && h[i] - h[i] == 0;
    }
    for (size_t i = 0; finite && i < n; i++) {
        trace += h[i * n + i];
    }
    const double unit = trace / (double)n;
    if (!finite || !(unit > 0) || !(1 / unit - 1 / unit == 0)) {
        return false;
    }
    for (size_t i = 0; i < n * n; i++) {
        scratch[i] = h[i] / unit;
    }
    for (size_t i = 0; i < n; i++) {
        scratch[i * n + i] += damping;
    }
    for (size_t k = n; k-- > 0;) {
        const double *row = scratch + k * n;
        if (!(row[k] > 1e-30)) { /* a float must hold it */
            memset(m, 0, n * n * sizeof *m);
            memset(d, 0, n * sizeof *d);
            return false;
        }
        d[k] = (float)row[k];
        for (size_t a = 0; a < k; a++) {
            const double column = row[a] / row[k];
            m[a * n + k] = (float)column;
            for (size_t b = 0; b <= a; b++) { /* the lower triangle is enough */
                scratch[a * n + b] -= column * row[b];
            }
        }
    }
    return true;
}
