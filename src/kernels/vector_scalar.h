/* kernels/vector_scalar.h: the scalar entries, for the table and for tails of the overlays.
 * Internal to kernels/. */
#ifndef RF_KERNELS_VECTOR_SCALAR_H
#define RF_KERNELS_VECTOR_SCALAR_H

#include "kernels/kernels.h"

void rf_rms_norm_scalar(const float *x, const float *weight, float *out, uint32_t n, float eps);
void rf_rope_scalar(float *head, const float *table, uint32_t pairs, bool interleaved);
void rf_swiglu_scalar(const float *gate, const float *up, float *out, uint32_t n);
void rf_exp_scalar(float *x, uint32_t n);
uint32_t rf_argmax_scalar(const float *x, uint32_t n);
void rf_kv_encode_f32_scalar(const float *values, void *row, uint32_t n);
void rf_kv_decode_f32_scalar(const void *row, float *values, uint32_t n);
void rf_kv_encode_f16_scalar(const float *values, void *row, uint32_t n);
void rf_kv_decode_f16_scalar(const void *row, float *values, uint32_t n);
void rf_kv_encode_bf16_scalar(const float *values, void *row, uint32_t n);
void rf_kv_decode_bf16_scalar(const void *row, float *values, uint32_t n);
void rf_attend_scalar(const rf_attend *job);
void rf_attend_join_scalar(float *state, float *out, const float *part_state, const float *part_out,
                           uint32_t width);

#endif
