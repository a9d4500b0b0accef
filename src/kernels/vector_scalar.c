/* kernels/vector_scalar.c: the definition of everything in a step that is no matmul: norm,
 * rotation, activation function, exp, argmax, KV rows and attention.
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

static float dot(const float *a, const float *b, uint32_t n)
{
    float lanes[RF_FLOAT_LANES] = {0};
    for (uint32_t i = 0; i < n; i++) {
        float *lane = &lanes[i % RF_FLOAT_LANES];
        *lane = __builtin_fmaf(a[i], b[i], *lane);
    }
    return rf_sum_lanes_16(lanes);
}

void rf_attend_scalar(const rf_attend *job)
{
    for (uint32_t i = 0; i < job->query_count; i++) {
        const rf_attend_range seen = job->visible[i];
        if (seen.first >= seen.last) {
            continue;
        }
        const float *q = job->q + i * job->q_stride;
        float *state = job->state + 2 * (size_t)i;
        float *out = job->out + i * job->out_stride;
        float max = state[0];
        for (uint32_t j = seen.first; j < seen.last; j++) {
            job->scores[j] = dot(q, job->k + (size_t)j * job->k_width, job->k_width) * job->scale;
            max = job->scores[j] > max ? job->scores[j] : max;
        }
        max += 0.0f; /* -0 becomes +0: which zero was met first must not matter */
        float lanes[RF_FLOAT_LANES] = {0};
        for (uint32_t j = seen.first; j < seen.last; j++) {
            job->scores[j] = rf_exp_one(job->scores[j] - max);
            lanes[j % RF_FLOAT_LANES] += job->scores[j];
        }
        const float keep = rf_exp_one(state[0] - max);
        state[1] = state[1] * keep + rf_sum_lanes_16(lanes);
        state[0] = max;
        for (uint32_t d = 0; d < job->v_width; d++) {
            float sum = out[d] * keep;
            for (uint32_t j = seen.first; j < seen.last; j++) {
                sum = __builtin_fmaf(job->scores[j], job->v[(size_t)j * job->v_width + d], sum);
            }
            out[d] = sum;
        }
    }
}
