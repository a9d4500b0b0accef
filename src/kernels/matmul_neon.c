/* kernels/matmul_neon.c: quantised weights times integer activations with NEON, and the overlay of
 * the table.
 */
#include "kernels/neon.h"

void rf_kernels_neon(rf_kernels *kernels)
{
    kernels->pack[RF_ACT_INT16] = rf_pack_int16_neon;
    kernels->pack[RF_ACT_INT8] = rf_pack_int8_neon;
}
