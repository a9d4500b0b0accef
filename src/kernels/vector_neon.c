/* kernels/vector_neon.c: norm, rotation, activation function, exp, argmax and plain KV rows with
 * NEON, operation for operation those of the scalar definitions. Tails go through these.
 */
#include "kernels/neon.h"

static void rms_norm_neon(const float *x, const float *weight, float *out, uint32_t n, float eps)
{
    float32x4_t acc[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    const uint32_t whole = n & ~15u;
    for (uint32_t i = 0; i < whole; i += 16) {
        for (uint32_t j = 0; j < 4; j++) {
            const float32x4_t v = vld1q_f32(x + i + 4 * j);
            acc[j] = vfmaq_f32(acc[j], v, v);
        }
    }
    float lanes[16];
    for (uint32_t j = 0; j < 4; j++) {
        vst1q_f32(lanes + 4 * j, acc[j]);
    }
    for (uint32_t i = whole; i < n; i++) {
        lanes[i - whole] = __builtin_fmaf(x[i], x[i], lanes[i - whole]);
    }
    const float scale = 1.0f / __builtin_sqrtf(rf_sum_lanes_16(lanes) / (float)n + eps);
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t scaled = vmulq_n_f32(vld1q_f32(x + i), scale);
        vst1q_f32(out + i, vmulq_f32(scaled, vld1q_f32(weight + i)));
    }
    for (; i < n; i++) {
        out[i] = (x[i] * scale) * weight[i];
    }
}

/* Products are rounded before they are added: no fused operation here. */
RF_INLINE void rotate(float32x4_t a, float32x4_t b, float32x4x2_t turn, float32x4_t *first,
                      float32x4_t *second)
{
    *first = vsubq_f32(vmulq_f32(a, turn.val[0]), vmulq_f32(b, turn.val[1]));
    *second = vaddq_f32(vmulq_f32(a, turn.val[1]), vmulq_f32(b, turn.val[0]));
}

static void rope_neon(float *head, const float *table, uint32_t pairs, bool interleaved)
{
    uint32_t i = 0;
    if (interleaved) {
        for (; i + 4 <= pairs; i += 4) {
            float32x4x2_t x = vld2q_f32(head + 2 * i);
            rotate(x.val[0], x.val[1], vld2q_f32(table + 2 * i), &x.val[0], &x.val[1]);
            vst2q_f32(head + 2 * i, x);
        }
        rf_rope_scalar(head + 2 * i, table + 2 * i, pairs - i, true);
        return;
    }
    for (; i + 4 <= pairs; i += 4) {
        float32x4_t a, b;
        rotate(vld1q_f32(head + i), vld1q_f32(head + pairs + i), vld2q_f32(table + 2 * i), &a, &b);
        vst1q_f32(head + i, a);
        vst1q_f32(head + pairs + i, b);
    }
    for (; i < pairs; i++) {
        const float a = head[i], b = head[pairs + i];
        const float cosine = table[2 * i], sine = table[2 * i + 1];
        head[i] = a * cosine - b * sine;
        head[pairs + i] = a * sine + b * cosine;
    }
}

static void swiglu_neon(const float *gate, const float *up, float *out, uint32_t n)
{
    const float32x4_t one = vdupq_n_f32(1.0f);
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        const float32x4_t x = vld1q_f32(gate + i);
        const float32x4_t silu = vdivq_f32(x, vaddq_f32(one, rf_exp_neon(vnegq_f32(x))));
        vst1q_f32(out + i, vmulq_f32(silu, vld1q_f32(up + i)));
    }
    for (; i < n; i++) {
        out[i] = rf_silu_one(gate[i]) * up[i];
    }
}

static void exp_neon(float *x, uint32_t n)
{
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(x + i, rf_exp_neon(vld1q_f32(x + i)));
    }
    for (; i < n; i++) {
        x[i] = rf_exp_one(x[i]);
    }
}

/* Each lane keeps its first largest; the winner is the largest value, then the lowest index. */
static uint32_t argmax_neon(const float *x, uint32_t n)
{
    static const uint32_t first[4] = {0, 1, 2, 3};
    const uint32_t whole = n & ~3u;
    float32x4_t best = vdupq_n_f32(-__builtin_inff());
    uint32x4_t where = vdupq_n_u32(0), index = vld1q_u32(first);
    for (uint32_t i = 0; i < whole; i += 4) {
        const float32x4_t v = vld1q_f32(x + i);
        const uint32x4_t greater = vcgtq_f32(v, best);
        best = vbslq_f32(greater, v, best);
        where = vbslq_u32(greater, index, where);
        index = vaddq_u32(index, vdupq_n_u32(4));
    }
    float values[4];
    uint32_t indices[4];
    vst1q_f32(values, best);
    vst1q_u32(indices, where);
    float max = -__builtin_inff();
    uint32_t winner = 0;
    for (uint32_t lane = 0; lane < 4; lane++) {
        if (values[lane] > max || (values[lane] == max && indices[lane] < winner)) {
            max = values[lane];
            winner = indices[lane];
        }
    }
    for (uint32_t i = whole; i < n; i++) {
        if (x[i] > max) {
            max = x[i];
            winner = i;
        }
    }
    /* Nothing above -inf: the first that is a number, which the definition finds. */
    return max > -__builtin_inff() ? winner : rf_argmax_scalar(x, n);
}

static void kv_encode_f16_neon(const float *values, void *row, uint32_t n)
{
    uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1_u16(halves + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(values + i))));
    }
    rf_kv_encode_f16_scalar(values + i, halves + i, n - i);
}

static void kv_decode_f16_neon(const void *row, float *values, uint32_t n)
{
    const uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(values + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(halves + i))));
    }
    rf_kv_decode_f16_scalar(halves + i, values + i, n - i);
}

static void kv_decode_bf16_neon(const void *row, float *values, uint32_t n)
{
    const uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vst1q_f32(values + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(halves + i), 16)));
    }
    rf_kv_decode_bf16_scalar(halves + i, values + i, n - i);
}

void rf_vector_neon(rf_kernels *kernels)
{
    static const rf_kernel_entry entry = {RF_CPU_NEON, "vector_neon.c"};
    kernels->rms_norm = rms_norm_neon;
    kernels->rope = rope_neon;
    kernels->swiglu = swiglu_neon;
    kernels->exp = exp_neon;
    kernels->argmax = argmax_neon;
    kernels->kv_encode[RF_F16] = kv_encode_f16_neon;
    kernels->kv_decode[RF_F16] = kv_decode_f16_neon;
    kernels->kv_decode[RF_BF16] = kv_decode_bf16_neon;
    kernels->vector_entry = entry;
}
