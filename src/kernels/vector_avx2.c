/* kernels/vector_avx2.c: norm, rotation, activation function, exp, argmax and KV rows with AVX2.
 * Tails go through the scalar definitions, whose bits are the same.
 */
#include "kernels/avx2.h"

static void rms_norm_avx2(const float *x, const float *weight, float *out, uint32_t n, float eps)
{
    __m256 low = _mm256_setzero_ps(), high = _mm256_setzero_ps();
    const uint32_t whole = n & ~15u;
    for (uint32_t i = 0; i < whole; i += 16) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        low = _mm256_fmadd_ps(a, a, low);
        high = _mm256_fmadd_ps(b, b, high);
    }
    float lanes[16];
    _mm256_storeu_ps(lanes, low);
    _mm256_storeu_ps(lanes + 8, high);
    for (uint32_t i = whole; i < n; i++) {
        lanes[i - whole] = __builtin_fmaf(x[i], x[i], lanes[i - whole]);
    }
    const float scale = 1.0f / __builtin_sqrtf(rf_sum_lanes_16(lanes) / (float)n + eps);
    const __m256 scales = _mm256_set1_ps(scale);
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), scales);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(weight + i)));
    }
    for (; i < n; i++) {
        out[i] = (x[i] * scale) * weight[i];
    }
}

/* Four pairs {cos, sin} as c0 c0 c1 c1 ... and s0 s0 s1 s1 ... */
RF_INLINE void rope_interleaved_4(float *head, const float *table)
{
    const __m256 t = _mm256_loadu_ps(table), x = _mm256_loadu_ps(head);
    const __m256 c = _mm256_moveldup_ps(t), s = _mm256_movehdup_ps(t);
    const __m256 swapped = _mm256_permute_ps(x, 0xB1);
    _mm256_storeu_ps(head, _mm256_addsub_ps(_mm256_mul_ps(x, c), _mm256_mul_ps(swapped, s)));
}

RF_INLINE void rope_halves_8(float *first, float *second, const float *table)
{
    const __m256 t0 = _mm256_loadu_ps(table), t1 = _mm256_loadu_ps(table + 8);
    const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
    const __m256 c = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(t0, t1, 0x88), order);
    const __m256 s = _mm256_permutevar8x32_ps(_mm256_shuffle_ps(t0, t1, 0xDD), order);
    const __m256 a = _mm256_loadu_ps(first), b = _mm256_loadu_ps(second);
    _mm256_storeu_ps(first, _mm256_sub_ps(_mm256_mul_ps(a, c), _mm256_mul_ps(b, s)));
    _mm256_storeu_ps(second, _mm256_add_ps(_mm256_mul_ps(a, s), _mm256_mul_ps(b, c)));
}

static void rope_avx2(float *head, const float *table, uint32_t pairs, bool interleaved)
{
    uint32_t i = 0;
    if (interleaved) {
        for (; i + 4 <= pairs; i += 4) {
            rope_interleaved_4(head + 2 * i, table + 2 * i);
        }
        rf_rope_scalar(head + 2 * i, table + 2 * i, pairs - i, true);
        return;
    }
    for (; i + 8 <= pairs; i += 8) {
        rope_halves_8(head + i, head + pairs + i, table + 2 * i);
    }
    for (; i < pairs; i++) {
        const float a = head[i], b = head[pairs + i];
        const float cosine = table[2 * i], sine = table[2 * i + 1];
        head[i] = a * cosine - b * sine;
        head[pairs + i] = a * sine + b * cosine;
    }
}

RF_INLINE __m256 silu_ymm(__m256 x)
{
    const __m256 e = rf_exp_ymm(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

static void swiglu_avx2(const float *gate, const float *up, float *out, uint32_t n)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m256 gates = _mm256_loadu_ps(gate + i);
        _mm256_storeu_ps(out + i, _mm256_mul_ps(silu_ymm(gates), _mm256_loadu_ps(up + i)));
    }
    if (i < n) {
        const __m256i rest = _mm256_castps_si256(rf_first_lanes(n - i));
        const __m256 gates = _mm256_maskload_ps(gate + i, rest);
        const __m256 ups = _mm256_maskload_ps(up + i, rest);
        _mm256_maskstore_ps(out + i, rest, _mm256_mul_ps(silu_ymm(gates), ups));
    }
}

static void exp_avx2(float *x, uint32_t n)
{
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(x + i, rf_exp_ymm(_mm256_loadu_ps(x + i)));
    }
    for (; i < n; i++) {
        x[i] = rf_exp_one(x[i]);
    }
}

/* Each lane keeps its first largest; the winner is the largest value, then the lowest index. */
static uint32_t argmax_avx2(const float *x, uint32_t n)
{
    const uint32_t whole = n & ~7u;
    __m256 best = _mm256_set1_ps(-__builtin_inff());
    __m256i where = _mm256_setzero_si256();
    __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (uint32_t i = 0; i < whole; i += 8) {
        const __m256 v = _mm256_loadu_ps(x + i);
        const __m256 greater = _mm256_cmp_ps(v, best, _CMP_GT_OQ);
        best = _mm256_blendv_ps(best, v, greater);
        where = _mm256_blendv_epi8(where, index, _mm256_castps_si256(greater));
        index = _mm256_add_epi32(index, _mm256_set1_epi32(8));
    }
    float values[8];
    uint32_t indices[8];
    _mm256_storeu_ps(values, best);
    rf_store_256(indices, where);
    float max = -__builtin_inff();
    uint32_t winner = 0;
    for (uint32_t lane = 0; lane < 8; lane++) {
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

static void kv_encode_f16_avx2(const float *values, void *row, uint32_t n)
{
    uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((__m128i *)(halves + i), h);
    }
    rf_kv_encode_f16_scalar(values + i, halves + i, n - i);
}

static void kv_decode_f16_avx2(const void *row, float *values, uint32_t n)
{
    const uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm_loadu_si128((const __m128i *)(halves + i));
        _mm256_storeu_ps(values + i, _mm256_cvtph_ps(h));
    }
    rf_kv_decode_f16_scalar(halves + i, values + i, n - i);
}

static void kv_decode_bf16_avx2(const void *row, float *values, uint32_t n)
{
    const uint16_t *halves = row;
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm_loadu_si128((const __m128i *)(halves + i));
        rf_store_256(values + i, _mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    }
    rf_kv_decode_bf16_scalar(halves + i, values + i, n - i);
}

RF_FOR_ANY_CPU void rf_vector_avx2(rf_kernels *kernels)
{
    static const rf_kernel_entry entry = {RF_CPU_AVX2, "vector_avx2.c"};
    kernels->rms_norm = rms_norm_avx2;
    kernels->rope = rope_avx2;
    kernels->swiglu = swiglu_avx2;
    kernels->exp = exp_avx2;
    kernels->argmax = argmax_avx2;
    kernels->kv_encode[RF_F16] = kv_encode_f16_avx2;
    kernels->kv_decode[RF_F16] = kv_decode_f16_avx2;
    kernels->kv_decode[RF_BF16] = kv_decode_bf16_avx2;
    kernels->vector_entry = entry;
}
