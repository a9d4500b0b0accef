/* kernels/matmul_avx512.c */
#include "kernels/avx512.h"

void rf_kernels_avx512(rf_kernels *kernels)
{
    rf_vector_avx512(kernels);
}
