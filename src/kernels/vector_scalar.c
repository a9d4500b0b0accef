/* kernels/vector_scalar.c: the definition of everything in a step that is no matmul: norm,
 * rotation, activation function, exp, argmax and KV rows.
 */
#include "kernels/vector_scalar.h"
#include "kernels/quant.h"

void rf_rms_norm_scalar(const float *x, const float *weight, float *out, uint32_t n, float eps)
{
    float lanes[RF_FLOAT_LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        float *lane = &lanes[i % RF_FLOAT_LANES];
        *lane = __builtin_fmaf(x[i], x[i], *lane);
    }
    const float scale = 1.0f / __builtin_sqrtf(rf_sum_lanes_16(lanes) / (float)n + eps);
    for (uint32_t i = 0; i < n; i++) {
        out[i] = (x[i] * scale) * weight[i];
    }
}

void rf_rope_scalar(float *head, const float *table, uint32_t pairs, bool interleaved)
{
    const uint32_t step = interleaved ? 2 : 1;
    float *second = head + (interleaved ? 1 : pairs);
    for (uint32_t i = 0; i < pairs; i++) {
        const float a = head[i * step], b = second[i * step];
        const float cosine = table[2 * i], sine = table[2 * i + 1];
        head[i * step] = a * cosine - b * sine;
        second[i * step] = a * sine + b * cosine;
    }
}

void rf_swiglu_scalar(const float *gate, const float *up, float *out, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        out[i] = rf_silu_one(gate[i]) * up[i];
    }
}

void rf_exp_scalar(float *x, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = rf_exp_one(x[i]);
    }
}

uint32_t rf_argmax_scalar(const float *x, uint32_t n)
{
    uint32_t best = 0;
    bool found = false;
    for (uint32_t i = 0; i < n; i++) {
        if (found ? x[i] > x[best] : x[i] == x[i]) {
            best = i;
            found = true;
        }
    }
    return best;
}

void rf_kv_encode_f32_scalar(const float *values, void *row, uint32_t n)
{
    memcpy(row, values, n * sizeof(float));
}

void rf_kv_decode_f32_scalar(const void *row, float *values, uint32_t n)
{
    memcpy(values, row, n * sizeof(float));
}

void rf_kv_encode_f16_scalar(const float *values, void *row, uint32_t n)
{
    uint8_t *bytes = row;
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t half = rf_f32_to_f16(values[i]);
        memcpy(bytes + 2 * (size_t)i, &half, sizeof half);
    }
}

void rf_kv_decode_f16_scalar(const void *row, float *values, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        values[i] = rf_f16_to_f32(rf_load_u16((const uint8_t *)row + 2 * (size_t)i));
    }
}

void rf_kv_encode_bf16_scalar(const float *values, void *row, uint32_t n)
{
    uint8_t *bytes = row;
    for (uint32_t i = 0; i < n; i++) {
        const uint16_t half = rf_f32_to_bf16(values[i]);
        memcpy(bytes + 2 * (size_t)i, &half, sizeof half);
    }
}

void rf_kv_decode_bf16_scalar(const void *row, float *values, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        values[i] = rf_bf16_to_f32(rf_load_u16((const uint8_t *)row + 2 * (size_t)i));
    }
}
