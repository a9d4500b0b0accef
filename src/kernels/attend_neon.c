/* kernels/attend_neon.c: attention over a block of positions with NEON, with the scalar's bits.
 *
 * Queries one by one: four positions at a time for scores, sixteen elements of the sum at a time
 * for values, which stay in registers over the positions. Rows are converted as they are read.
 */
#include "kernels/neon.h"

typedef struct eight { /* elements of a row as floats */
    float32x4_t low, high;
} eight;

RF_INLINE eight load_eight(rf_attend_form form, const uint8_t *row, size_t d)
{
    eight e;
    if (form == RF_ATTEND_F32) {
        e.low = vreinterpretq_f32_u8(vld1q_u8(row + 4 * d));
        e.high = vreinterpretq_f32_u8(vld1q_u8(row + 4 * d + 16));
    } else if (form == RF_ATTEND_F16) {
        const float16x8_t h = vreinterpretq_f16_u8(vld1q_u8(row + 2 * d));
        e.low = vcvt_f32_f16(vget_low_f16(h));
        e.high = vcvt_high_f32_f16(h);
    } else if (form == RF_ATTEND_BF16) {
        const uint16x8_t h = vreinterpretq_u16_u8(vld1q_u8(row + 2 * d));
        e.low = vreinterpretq_f32_u16(vzip1q_u16(vdupq_n_u16(0), h));
        e.high = vreinterpretq_f32_u16(vzip2q_u16(vdupq_n_u16(0), h));
    } else {
        const int16x8_t c = vmovl_s8(vreinterpret_s8_u8(vld1_u8(row + d)));
        e.low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(c)));
        e.high = vcvtq_f32_s32(vmovl_high_s16(c));
    }
    return e;
}

/* Positions [j, j + count), count <= 4; those beyond it repeat the last one. */
RF_INLINE void score_four(const rf_attend *job, rf_attend_form form, const float *q, uint32_t j,
                          uint32_t count, float *p)
{
    const uint8_t *row[4];
    eight acc[4];
    for (uint32_t i = 0; i < 4; i++) {
        row[i] = (const uint8_t *)job->k.rows + (j + RF_MIN(i, count - 1)) * job->k.stride;
        acc[i].low = acc[i].high = vdupq_n_f32(0);
    }
    for (uint32_t d = 0; d < job->k.width; d += 8) {
        const float32x4_t a = vld1q_f32(q + d), b = vld1q_f32(q + d + 4);
        for (uint32_t i = 0; i < 4; i++) {
            const eight k = load_eight(form, row[i], d);
            acc[i].low = vfmaq_f32(acc[i].low, a, k.low);
            acc[i].high = vfmaq_f32(acc[i].high, b, k.high);
        }
    }
    float results[4];
    for (uint32_t i = 0; i < 4; i++) {
        results[i] = rf_sum_lanes_8_neon(acc[i].low, acc[i].high) * job->scale;
    }
    memcpy(p + j, results, count * sizeof *p);
}

RF_INLINE void score_floats(const rf_attend *job, rf_attend_form form, uint32_t query,
                            rf_attend_range seen, float *p)
{
    const float *q = job->q + query * job->q_stride;
    for (uint32_t j = seen.first; j < seen.last; j += 4) {
        score_four(job, form, q, j, RF_MIN(4u, seen.last - j), p);
    }
}

static float score_codes(const rf_attend *job, uint32_t query, uint32_t j)
{
    const uint32_t span = job->k.width / job->k.spans;
    const int16_t *q = job->q_codes + query * job->q_stride;
    const int8_t *k = (const int8_t *)job->k.rows + j * job->k.stride;
    const float *scale = job->k.scale + (size_t)j * job->k.spans;
    float dot = 0;
    for (uint32_t s = 0; s < job->k.spans; s++) {
        int32x4_t a = vdupq_n_s32(0), b = a;
        for (uint32_t d = s * span; d < (s + 1) * span; d += 8) {
            const int16x8_t x = vld1q_s16(q + d), y = vmovl_s8(vld1_s8(k + d));
            a = vmlal_s16(a, vget_low_s16(x), vget_low_s16(y));
            b = vmlal_high_s16(b, x, y);
        }
        dot = __builtin_fmaf((float)vaddvq_s32(vaddq_s32(a, b)), scale[s], dot);
    }
    return __builtin_fmaf(dot * job->q_scale[query], job->scale, job->bias ? job->bias[query] : 0);
}

static void score(const rf_attend *job, uint32_t query, rf_attend_range seen, float *p)
{
    switch (job->k.form) {
    case RF_ATTEND_F32:
        score_floats(job, RF_ATTEND_F32, query, seen, p);
        break;
    case RF_ATTEND_F16:
        score_floats(job, RF_ATTEND_F16, query, seen, p);
        break;
    case RF_ATTEND_BF16:
        score_floats(job, RF_ATTEND_BF16, query, seen, p);
        break;
    default:
        for (uint32_t j = seen.first; j < seen.last; j++) {
            p[j] = score_codes(job, query, j);
        }
        break;
    }
}

/* p becomes exp(p - max) where it was seen and 0 elsewhere; its sum in 16 lanes. */
static float weigh(float *p, rf_attend_range seen, float max)
{
    float32x4_t lanes[4] = {vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0), vdupq_n_f32(0)};
    memset(p, 0, seen.first * sizeof *p);
    memset(p + seen.last, 0, (RF_ATTEND_BLOCK - seen.last) * sizeof *p);
    uint32_t j = seen.first;
    for (; j + 4 <= seen.last; j += 4) {
        vst1q_f32(p + j, rf_exp_neon(vsubq_f32(vld1q_f32(p + j), vdupq_n_f32(max))));
    }
    for (; j < seen.last; j++) {
        p[j] = rf_exp_one(p[j] - max);
    }
    for (j = 0; j < RF_ATTEND_BLOCK; j += 16) {
        for (uint32_t i = 0; i < 4; i++) {
            lanes[i] = vaddq_f32(lanes[i], vld1q_f32(p + j + 4 * i));
        }
    }
    return rf_sum_lanes_8_neon(vaddq_f32(lanes[0], lanes[2]), vaddq_f32(lanes[1], lanes[3]));
}

/* Elements [d, d + 8 * eights) of the sum, eights <= 2. */
RF_INLINE void add_eights(const rf_attend *job, rf_attend_form form, rf_attend_range seen,
                          const float *p, float keep, float *out, uint32_t d, uint32_t eights)
{
    const rf_attend_rows *v = &job->v;
    const uint32_t span = form == RF_ATTEND_INT8 ? v->width / v->spans : v->width;
    eight acc[2];
    for (uint32_t i = 0; i < eights; i++) {
        acc[i].low = vmulq_n_f32(vld1q_f32(out + d + 8 * i), keep);
        acc[i].high = vmulq_n_f32(vld1q_f32(out + d + 8 * i + 4), keep);
    }
    for (uint32_t j = seen.first; j < seen.last; j++) {
        const uint8_t *row = (const uint8_t *)v->rows + j * v->stride;
        for (uint32_t i = 0; i < eights; i++) {
            float weight = p[j];
            if (form == RF_ATTEND_INT8) {
                weight *= v->scale[(size_t)j * v->spans + (d + 8 * i) / span];
            }
            const eight e = load_eight(form, row, d + 8 * i);
            acc[i].low = vfmaq_n_f32(acc[i].low, e.low, weight);
            acc[i].high = vfmaq_n_f32(acc[i].high, e.high, weight);
        }
    }
    for (uint32_t i = 0; i < eights; i++) {
        vst1q_f32(out + d + 8 * i, vaddq_f32(acc[i].low, vdupq_n_f32(0)));
        vst1q_f32(out + d + 8 * i + 4, vaddq_f32(acc[i].high, vdupq_n_f32(0)));
    }
}

RF_INLINE void add_values(const rf_attend *job, rf_attend_form form, rf_attend_range seen,
                          const float *p, float keep, float *out)
{
    uint32_t d = 0;
    for (; d + 16 <= job->v.width; d += 16) {
        add_eights(job, form, seen, p, keep, out, d, 2);
    }
    if (d < job->v.width) {
        add_eights(job, form, seen, p, keep, out, d, 1);
    }
}

static void add_rows(const rf_attend *job, rf_attend_range seen, const float *p, float keep,
                     float *out)
{
    switch (job->v.form) {
    case RF_ATTEND_F32:
        add_values(job, RF_ATTEND_F32, seen, p, keep, out);
        break;
    case RF_ATTEND_F16:
        add_values(job, RF_ATTEND_F16, seen, p, keep, out);
        break;
    case RF_ATTEND_BF16:
        add_values(job, RF_ATTEND_BF16, seen, p, keep, out);
        break;
    default:
        add_values(job, RF_ATTEND_INT8, seen, p, keep, out);
        break;
    }
}

void rf_attend_neon(const rf_attend *job)
{
    float *p = job->scratch;
    for (uint32_t i = 0; i < job->query_count; i++) {
        const rf_attend_range seen = job->visible[i];
        if (seen.first >= seen.last) {
            continue;
        }
        float *state = job->state + 2 * (size_t)i;
        float max = state[0];
        score(job, i, seen, p);
        for (uint32_t j = seen.first; j < seen.last; j++) {
            max = p[j] > max ? p[j] : max;
        }
        max += 0.0f; /* -0 becomes +0: which zero was met first must not matter */
        const float sum = weigh(p, seen, max), keep = rf_exp_one(state[0] - max);
        state[1] = state[1] * keep + sum;
        state[0] = max;
        add_rows(job, seen, p, keep, job->out + i * job->out_stride);
    }
}
