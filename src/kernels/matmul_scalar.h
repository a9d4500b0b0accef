/* kernels/matmul_scalar.h: the scalar matmuls, for the table and for tails of the overlays.
 * Internal to kernels/. */
#ifndef RF_KERNELS_MATMUL_SCALAR_H
#define RF_KERNELS_MATMUL_SCALAR_H

#include "kernels/kernels.h"

void rf_matmul_quant_scalar(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch);
void rf_matmul_float_scalar(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch);
/* Element index of a row of a float format. */
float rf_load_weight(rf_format format, const uint8_t *row, uint32_t index);

#endif
