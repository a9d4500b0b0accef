/* kernels/neon.h: what the NEON files share: small vector helpers that repeat the definitions of
 * kernels.h one for one, and the entries that matmul_neon.c puts into the table.
 *
 * Internal to kernels/, included by *_neon.c only. The set asks for dotprod and i8mm, and for
 * nothing more: half floats are only converted, which every 64-bit ARM can.
 */
#ifndef RF_KERNELS_NEON_H
#define RF_KERNELS_NEON_H

#include "kernels/act.h"
#include "kernels/matmul_scalar.h"
#include "kernels/quant.h"
#include "kernels/vector_scalar.h"

#include <arm_neon.h>

#define RF_INLINE static inline __attribute__((always_inline))

/* Loops whose counter picks registers or immediates: they must be unrolled to be fast, not to be
 * right. */
#define RF_UNROLL _Pragma("GCC unroll 16")

/* Lanes 4, 2, 1 apart. */
RF_INLINE float rf_sum_lanes_8_neon(float32x4_t low, float32x4_t high)
{
    const float32x4_t a = vaddq_f32(low, high);
    const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
    return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}

void rf_pack_int16_neon(const rf_act_layout *layout, const float *x, void *packed);
void rf_pack_int8_neon(const rf_act_layout *layout, const float *x, void *packed);

#endif
