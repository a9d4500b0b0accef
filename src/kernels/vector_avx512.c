/* kernels/vector_avx512.c: packing of activations, norm, rotation, activation function, exp and
 * argmax with AVX-512. Tails go through the scalar definitions, whose bits are the same.
 */
#include "kernels/avx512.h"

RF_INLINE __m512i magnitude(const float *x)
{
    return _mm512_and_si512(rf_load_512(x), _mm512_set1_epi32(0x7FFFFFFF));
}

/* The bits of the largest |x| of 32. */
RF_INLINE uint32_t largest_of_32(const float *x)
{
    return (uint32_t)_mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(x), magnitude(x + 16)));
}

RF_INLINE __m512i codes_of(const float *x, __m512 inverse)
{
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x), inverse));
}

static void pack_int16(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int16_t *q = packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_32 : RF_ACT_LIMIT_256;
    for (uint32_t at = 0; at < layout->k; at += block) {
        __m512i max = _mm512_setzero_si512();
        for (uint32_t i = at; i < at + block; i += 16) {
            max = _mm512_max_epi32(max, magnitude(x + i));
        }
        const uint32_t amax_bits = (uint32_t)_mm512_reduce_max_epi32(max);
        const rf_act_scale scale = rf_act_scale_of(amax_bits, limit);
        const __m512 inverse = _mm512_set1_ps(scale.inverse);
        scales[at / block] = scale.scale;
        if (scale.inverse == 0.0f) {
            memset(q + at, 0, block * sizeof *q);
            memset(sums + at / 16, 0, block / 16 * sizeof *sums);
            continue;
        }
        for (uint32_t i = at; i < at + block; i += 16) {
            const __m512i code = codes_of(x + i, inverse);
            rf_store_256(q + i, _mm512_cvtepi32_epi16(code));
            sums[i / 16] = _mm512_reduce_add_epi32(code);
        }
    }
}

/* 32 values of one multiplier. */
RF_INLINE void pack_32(const float *x, float inverse, int32_t multiplier, int8_t *q, int32_t *sums)
{
    const __m512 inverses = _mm512_set1_ps(inverse);
    for (uint32_t half = 0; half < 2; half++) {
        const __m512i code = codes_of(x + 16 * half, inverses);
        _mm_storeu_si128((__m128i *)(q + 16 * half), _mm512_cvtepi32_epi8(code));
        sums[half] = multiplier * _mm512_reduce_add_epi32(code);
    }
}

static void pack_int8(const rf_act_layout *layout, const float *x, void *packed)
{
    uint8_t *bytes = packed;
    int8_t *q = packed;
    float *scales = (float *)(void *)(bytes + layout->scale_offset);
    int16_t *multipliers = (int16_t *)(void *)(bytes + layout->multiplier_offset);
    int32_t *sums = (int32_t *)(void *)(bytes + layout->sum_offset);
    const uint32_t block = layout->block;
    const float limit = block == 32 ? RF_ACT_LIMIT_8 : RF_ACT_LIMIT_8K;
    for (uint32_t at = 0; at < layout->k; at += block) {
        uint32_t amax_of[RF_BLOCK_MAX / 32], amax_bits = 0;
        for (uint32_t j = 0; j < block / 32; j++) {
            amax_of[j] = largest_of_32(x + at + 32 * j);
            amax_bits = amax_of[j] > amax_bits ? amax_of[j] : amax_bits;
        }
        const rf_act_scale scale = rf_act_scale_of(amax_bits, limit);
        scales[at / block] = scale.scale;
        if (scale.inverse == 0.0f) {
            memset(q + at, 0, block);
            memset(sums + at / 16, 0, block / 16 * sizeof *sums);
            for (uint32_t j = 0; j < block / 32 && block == 256; j++) {
                multipliers[at / 32 + j] = 1;
            }
            continue;
        }
        const float per_amax = RF_ACT_MULTIPLES / rf_bits_float(amax_bits);
        for (uint32_t j = 0; j < block / 32; j++) {
            int32_t multiplier = 1;
            if (block == 256) {
                multiplier = rf_act_multiplier(amax_of[j], per_amax);
                multipliers[at / 32 + j] = (int16_t)multiplier;
            }
            pack_32(x + at + 32 * j, scale.inverse / (float)multiplier, multiplier, q + at + 32 * j,
                    sums + at / 16 + 2 * j);
        }
    }
}

/* The sum is one chain of fma, 16 lanes wide: that is the definition. */
static void rms_norm(const float *x, const float *weight, float *out, uint32_t n, float eps)
{
    __m512 sum = _mm512_setzero_ps();
    const uint32_t whole = n & ~15u;
    for (uint32_t i = 0; i < whole; i += 16) {
        const __m512 a = _mm512_loadu_ps(x + i);
        sum = _mm512_fmadd_ps(a, a, sum);
    }
    float lanes[RF_FLOAT_LANES];
    _mm512_storeu_ps(lanes, sum);
    for (uint32_t i = whole; i < n; i++) {
        lanes[i - whole] = __builtin_fmaf(x[i], x[i], lanes[i - whole]);
    }
    const float scale = 1.0f / __builtin_sqrtf(rf_sum_lanes_16(lanes) / (float)n + eps);
    const __m512 scales = _mm512_set1_ps(scale);
    for (uint32_t i = 0; i < whole; i += 16) {
        const __m512 scaled = _mm512_mul_ps(_mm512_loadu_ps(x + i), scales);
        _mm512_storeu_ps(out + i, _mm512_mul_ps(scaled, _mm512_loadu_ps(weight + i)));
    }
    for (uint32_t i = whole; i < n; i++) {
        out[i] = (x[i] * scale) * weight[i];
    }
}

/* Eight pairs {cos, sin}: a c - b s and b c + a s, the sign put into the second product. */
RF_INLINE void rope_interleaved_8(float *head, const float *table)
{
    const __m512i minus = _mm512_set1_epi64(0x80000000);
    const __m512 t = _mm512_loadu_ps(table), x = _mm512_loadu_ps(head);
    const __m512 c = _mm512_moveldup_ps(t), s = _mm512_movehdup_ps(t);
    const __m512 second = _mm512_mul_ps(_mm512_permute_ps(x, 0xB1), s);
    const __m512i flipped = _mm512_xor_si512(_mm512_castps_si512(second), minus);
    _mm512_storeu_ps(head, _mm512_add_ps(_mm512_mul_ps(x, c), _mm512_castsi512_ps(flipped)));
}

RF_INLINE void rope_halves_16(float *first, float *second, const float *table)
{
    const __m512i even =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    const __m512 t0 = _mm512_loadu_ps(table), t1 = _mm512_loadu_ps(table + 16);
    const __m512 c = _mm512_permutex2var_ps(t0, even, t1);
    const __m512 s = _mm512_permutex2var_ps(t0, odd, t1);
    const __m512 a = _mm512_loadu_ps(first), b = _mm512_loadu_ps(second);
    _mm512_storeu_ps(first, _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s)));
    _mm512_storeu_ps(second, _mm512_add_ps(_mm512_mul_ps(a, s), _mm512_mul_ps(b, c)));
}

static void rope(float *head, const float *table, uint32_t pairs, bool interleaved)
{
    uint32_t i = 0;
    if (interleaved) {
        for (; i + 8 <= pairs; i += 8) {
            rope_interleaved_8(head + 2 * i, table + 2 * i);
        }
        rf_rope_scalar(head + 2 * i, table + 2 * i, pairs - i, true);
        return;
    }
    for (; i + 16 <= pairs; i += 16) {
        rope_halves_16(head + i, head + pairs + i, table + 2 * i);
    }
    for (; i < pairs; i++) {
        const float a = head[i], b = head[pairs + i];
        const float cosine = table[2 * i], sine = table[2 * i + 1];
        head[i] = a * cosine - b * sine;
        head[pairs + i] = a * sine + b * cosine;
    }
}

static void swiglu(const float *gate, const float *up, float *out, uint32_t n)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512i sign = _mm512_set1_epi32((int)0x80000000u);
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const __m512 x = _mm512_loadu_ps(gate + i);
        const __m512i minus = _mm512_xor_si512(_mm512_castps_si512(x), sign);
        const __m512 e = rf_exp_zmm(_mm512_castsi512_ps(minus));
        const __m512 silu = _mm512_div_ps(x, _mm512_add_ps(one, e));
        _mm512_storeu_ps(out + i, _mm512_mul_ps(silu, _mm512_loadu_ps(up + i)));
    }
    for (; i < n; i++) {
        out[i] = rf_silu_one(gate[i]) * up[i];
    }
}

static void exp_each(float *x, uint32_t n)
{
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) {
        _mm512_storeu_ps(x + i, rf_exp_zmm(_mm512_loadu_ps(x + i)));
    }
    for (; i < n; i++) {
        x[i] = rf_exp_one(x[i]);
    }
}

/* Each lane keeps its first largest; the winner is the largest value, then the lowest index. */
static uint32_t argmax(const float *x, uint32_t n)
{
    const uint32_t whole = n & ~15u;
    __m512 best = _mm512_set1_ps(-__builtin_inff());
    __m512i where = _mm512_setzero_si512();
    __m512i index = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (uint32_t i = 0; i < whole; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const __mmask16 greater = _mm512_cmp_ps_mask(v, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, greater, v);
        where = _mm512_mask_mov_epi32(where, greater, index);
        index = _mm512_add_epi32(index, _mm512_set1_epi32(16));
    }
    float values[16], max = -__builtin_inff();
    uint32_t indices[16], winner = 0;
    _mm512_storeu_ps(values, best);
    rf_store_512(indices, where);
    for (uint32_t lane = 0; lane < 16; lane++) {
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

RF_FOR_ANY_CPU void rf_vector_avx512(rf_kernels *kernels)
{
    static const rf_kernel_entry entry = {RF_CPU_AVX512, "vector_avx512.c"};
    kernels->pack[RF_ACT_INT16] = pack_int16;
    kernels->pack[RF_ACT_INT8] = pack_int8;
    kernels->rms_norm = rms_norm;
    kernels->rope = rope;
    kernels->swiglu = swiglu;
    kernels->exp = exp_each;
    kernels->argmax = argmax;
    kernels->vector_entry = entry;
}
