/* kernels/attend_scalar.c: the definition of attention over a block of positions, and of how the
 * parts of a context are joined.
 */
#include "kernels/quant.h"
#include "kernels/vector_scalar.h"

uint64_t rf_attend_scratch_bytes(uint32_t k_width, uint32_t v_width)
{
    /* A line of scores; for each side its rows, and a line of scales with room for one vector
     * behind it for each span of at least 8. */
    const uint64_t line = RF_ATTEND_BLOCK + 8, width = (uint64_t)k_width + v_width;
    return (RF_ATTEND_BLOCK + width * RF_ATTEND_BLOCK + width / 8 * line) * sizeof(float);
}

static const uint8_t *row_at(const rf_attend_rows *rows, uint32_t j)
{
    return (const uint8_t *)rows->rows + j * rows->stride;
}

/* Row j as floats, INT8: its codes. */
static const float *row_as_floats(const rf_attend_rows *rows, uint32_t j, float *scratch)
{
    const uint8_t *row = row_at(rows, j);
    switch (rows->form) {
    case RF_ATTEND_F16:
        rf_kv_decode_f16_scalar(row, scratch, rows->width);
        return scratch;
    case RF_ATTEND_BF16:
        rf_kv_decode_bf16_scalar(row, scratch, rows->width);
        return scratch;
    case RF_ATTEND_INT8:
        for (uint32_t d = 0; d < rows->width; d++) {
            scratch[d] = (float)(int8_t)row[d];
        }
        return scratch;
    default:
        return (const float *)(const void *)row;
    }
}

static float score_floats(const rf_attend *job, uint32_t query, const float *k)
{
    const float *q = job->q + query * job->q_stride;
    float lanes[8] = {0};
    for (uint32_t d = 0; d < job->k.width; d++) {
        lanes[d % 8] = __builtin_fmaf(q[d], k[d], lanes[d % 8]);
    }
    return rf_sum_lanes_8(lanes) * job->scale;
}

static float score_codes(const rf_attend *job, uint32_t query, uint32_t j)
{
    const uint32_t span = job->k.width / job->k.spans;
    const int16_t *q = job->q_codes + query * job->q_stride;
    const uint8_t *k = row_at(&job->k, j);
    const float *scale = job->k.scale + (size_t)j * job->k.spans;
    float dot = 0;
    for (uint32_t s = 0; s < job->k.spans; s++) {
        int32_t sum = 0; /* 128 * 32767 * 127 < 2^30 */
        for (uint32_t d = s * span; d < (s + 1) * span; d++) {
            sum += q[d] * (int8_t)k[d];
        }
        dot = __builtin_fmaf((float)sum, scale[s], dot);
    }
    return __builtin_fmaf(dot * job->q_scale[query], job->scale, job->bias ? job->bias[query] : 0);
}

/* out = (out * keep, then the weighted rows) + 0 */
static void add_values(const rf_attend *job, rf_attend_range seen, const float *p, float keep,
                       float *row, float *out)
{
    const rf_attend_rows *v = &job->v;
    const uint32_t span = v->form == RF_ATTEND_INT8 ? v->width / v->spans : v->width;
    for (uint32_t d = 0; d < v->width; d++) {
        out[d] *= keep;
    }
    for (uint32_t j = seen.first; j < seen.last; j++) {
        const float *values = row_as_floats(v, j, row);
        for (uint32_t d = 0; d < v->width; d++) {
            float weight = p[j];
            if (v->form == RF_ATTEND_INT8) {
                weight *= v->scale[(size_t)j * v->spans + d / span];
            }
            out[d] = __builtin_fmaf(weight, values[d], out[d]);
        }
    }
    for (uint32_t d = 0; d < v->width; d++) {
        out[d] += 0.0f;
    }
}

void rf_attend_scalar(const rf_attend *job)
{
    float *p = job->scratch, *row = p + RF_ATTEND_BLOCK;
    for (uint32_t i = 0; i < job->query_count; i++) {
        const rf_attend_range seen = job->visible[i];
        if (seen.first >= seen.last) {
            continue;
        }
        float *state = job->state + 2 * (size_t)i;
        float max = state[0];
        for (uint32_t j = seen.first; j < seen.last; j++) {
            p[j] = job->k.form == RF_ATTEND_INT8
                       ? score_codes(job, i, j)
                       : score_floats(job, i, row_as_floats(&job->k, j, row));
            max = p[j] > max ? p[j] : max;
        }
        max += 0.0f; /* -0 becomes +0: which zero was met first must not matter */
        float lanes[RF_FLOAT_LANES] = {0};
        for (uint32_t j = seen.first; j < seen.last; j++) {
            p[j] = rf_exp_one(p[j] - max);
            lanes[j % RF_FLOAT_LANES] += p[j];
        }
        const float keep = rf_exp_one(state[0] - max);
        state[1] = state[1] * keep + rf_sum_lanes_16(lanes);
        state[0] = max;
        add_values(job, seen, p, keep, row, job->out + i * job->out_stride);
    }
}

void rf_attend_join_scalar(float *state, float *out, const float *part_state, const float *part_out,
                           uint32_t width)
{
    if (part_state[1] == 0.0f) {
        return;
    }
    const float max = part_state[0] > state[0] ? part_state[0] : state[0];
    const float a = rf_exp_one(state[0] - max), b = rf_exp_one(part_state[0] - max);
    state[1] = state[1] * a + part_state[1] * b;
    state[0] = max;
    for (uint32_t d = 0; d < width; d++) {
        out[d] = out[d] * a + part_out[d] * b;
    }
}
