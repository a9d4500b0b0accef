/* kernels/act.h: the packing of activations as the overlays see it. Internal to kernels/. */
#ifndef RF_KERNELS_ACT_H
#define RF_KERNELS_ACT_H

#include "kernels/kernels.h"

typedef struct rf_act_scale { /* of one block; inverse 0: every code is 0 */
    float scale, inverse;
} rf_act_scale;

/* From the bits of the block's largest |x|; the rules are those of rf_pack_fn. */
rf_act_scale rf_act_scale_of(uint32_t amax_bits, float limit);

void rf_pack_f32_scalar(const rf_act_layout *layout, const float *x, void *packed);
void rf_pack_int16_scalar(const rf_act_layout *layout, const float *x, void *packed);
void rf_pack_int8_scalar(const rf_act_layout *layout, const float *x, void *packed);

#endif
