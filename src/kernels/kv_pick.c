/* kernels/kv_pick.c: the table of kernels of the rotated KV formats for the instruction sets that
 * a mask and the machine have.
 */
#include "kernels/kv_scalar.h"

void rf_kv_kernels_pick(rf_kv_kernels *kernels, uint32_t cpu_mask)
{
    static const rf_kv_kernels scalar = {
        .rotate = rf_kv_rotate_scalar,
        .turn_back = rf_kv_turn_back_scalar,
        .encode = rf_kv_encode_scalar,
        .expand = rf_kv_expand_scalar,
        .query = rf_kv_query_scalar,
        .entry = {RF_CPU_SCALAR, "kv_codec_scalar.c"},
    };
    *kernels = scalar;
#if defined(__x86_64__)
    if (rf_cpu_detect() & cpu_mask & RF_CPU_AVX2) {
        rf_kv_kernels_avx2(kernels);
    }
#else
    (void)cpu_mask;
#endif
}
