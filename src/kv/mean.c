/* kv/mean.c: what the statistics of keys and queries before RoPE mean at a position.
 *
 * A key's mean turns with its position, and so does the form in which its error counts, the second
 * moment of the queries. Both are kept as they are before RoPE, and averaged over a block of
 * absolute positions in closed form: pair i turns by f_i a position, so over n positions around m
 * a term that turns by w shrinks by sin(n w / 2) / (n sin(w / 2)) and stands where w m points.
 * Statistics that hold only where they were taken are worse than none at depth.
 */
#include "kv/store.h"

#include <string.h>

rf_kv_pair rf_kv_pair_of(const rf_kv_rope *rope, uint32_t index)
{
    uint32_t half = rope->dims / 2;
    if (index < half && !rope->interleaved)
        return (rf_kv_pair){index, index + half, rope->frequencies[index]};
    double frequency = index < half ? rope->frequencies[index] : 0.0;
    return (rf_kv_pair){2 * index, 2 * index + 1, frequency};
}

/* sin(n w / 2) / (n sin(w / 2)), 1 where w is 0. */
static float shrink(double w, uint32_t n)
{
    float upper, lower, unused;
    if (w < 1e-9 && w > -1e-9)
        return 1.0f;
    rf_sin_cos(w * 0.5 * n, &upper, &unused);
    rf_sin_cos(w * 0.5, &lower, &unused);
    return lower == 0.0f ? 1.0f : (float)((double)upper / ((double)n * (double)lower));
}

static void fill_spread(rf_kv *kv)
{
    uint32_t n = RF_KV_MEAN_BLOCK + RF_KV_AHEAD;
    for (uint32_t i = 0; i < kv->pairs; i++) {
        double fi = rf_kv_pair_of(&kv->rope, i).frequency;
        for (uint32_t j = 0; j < kv->pairs; j++) {
            double fj = rf_kv_pair_of(&kv->rope, j).frequency;
            kv->spread[(uint64_t)i * kv->pairs + j] = shrink(fi - fj, n);
            kv->spread[((uint64_t)kv->pairs + i) * kv->pairs + j] = shrink(fi + fj, n);
        }
    }
}

static float *phases_at(const rf_kv *kv, uint32_t slot, uint64_t block)
{
    if (block < rf_kv_pinned_blocks(kv->sinks))
        return kv->pinned_phases + block * kv->pairs * 2;
    uint64_t row = slot * kv->phase_count + block % kv->phase_count;
    return kv->phases + row * kv->pairs * 2;
}

static void fill_block(const rf_kv *kv, uint64_t block, float *phases)
{
    double middle = (double)block * RF_KV_MEAN_BLOCK + (RF_KV_MEAN_BLOCK - 1) * 0.5;
    for (uint32_t i = 0; i < kv->pairs; i++) {
        double frequency = rf_kv_pair_of(&kv->rope, i).frequency;
        float amplitude = shrink(frequency, RF_KV_MEAN_BLOCK), sine, cosine;
        rf_sin_cos(frequency * middle, &sine, &cosine);
        phases[2 * i] = amplitude * cosine;
        phases[2 * i + 1] = amplitude * sine;
    }
}

void rf_kv_fill_tables(rf_kv *kv)
{
    if (!kv->phase_count)
        return;
    fill_spread(kv);
    for (uint64_t block = 0; block < rf_kv_pinned_blocks(kv->sinks); block++)
        fill_block(kv, block, phases_at(kv, 0, block));
}

void rf_kv_fill_phases(rf_kv *kv, uint32_t slot, uint64_t from, uint64_t to)
{
    uint64_t first = (from + RF_KV_MEAN_BLOCK - 1) / RF_KV_MEAN_BLOCK;
    if (!kv->phase_count)
        return;
    first = RF_MAX(first, rf_kv_pinned_blocks(kv->sinks));
    for (uint64_t block = first; block * RF_KV_MEAN_BLOCK < to; block++)
        fill_block(kv, block, phases_at(kv, slot, block));
}

const float *rf_kv_phases_of(const rf_kv *kv, uint32_t slot, uint64_t position)
{
    return phases_at(kv, slot, position / RF_KV_MEAN_BLOCK);
}

static const float *statistics_of(const rf_kv_layer_store *layer, uint32_t head)
{
    uint64_t width = layer->side[RF_KV_K].width;
    return layer->calibration + head * (width + width * width);
}

void rf_kv_block_mean(const rf_kv *kv, uint32_t slot, const rf_kv_layer_store *layer, uint32_t head,
                      uint64_t position, float *mean)
{
    const float *statistics = statistics_of(layer, head);
    const float *phases = rf_kv_phases_of(kv, slot, position);
    uint32_t width = layer->side[RF_KV_K].width;
    for (uint32_t i = 0; i < width / 2; i++) {
        rf_kv_pair pair = rf_kv_pair_of(&kv->rope, i);
        float x = statistics[pair.a], y = statistics[pair.b];
        mean[pair.a] = x * phases[2 * i] - y * phases[2 * i + 1];
        mean[pair.b] = x * phases[2 * i + 1] + y * phases[2 * i];
    }
}

/* ---- feedback ----------------------------------------------------------------------------- */

typedef struct turned {
    double re, im;
} turned;

/* The turn of pair i in the middle of the positions that a block's queries have. */
static turned turn_of(const rf_kv_pair *pair, uint64_t block)
{
    double middle = (double)block * RF_KV_MEAN_BLOCK + (RF_KV_MEAN_BLOCK + RF_KV_AHEAD - 1) * 0.5;
    float sine, cosine;
    rf_sin_cos(pair->frequency * middle, &sine, &cosine);
    return (turned){(double)cosine, (double)sine};
}

/* Element (row, column) of the averaged form, from the 2 x 2 part of the moment that pairs i and j
 * span: a part that turns by f_i - f_j, and one that turns by f_i + f_j. */
static void average_pairs(const rf_kv *kv, const float *moment, uint32_t width, uint32_t i,
                          uint32_t j, const rf_kv_pair *pi, const rf_kv_pair *pj, turned ti,
                          turned tj, double out[2][2])
{
    double h00 = (double)moment[(uint64_t)pi->a * width + pj->a];
    double h01 = (double)moment[(uint64_t)pi->a * width + pj->b];
    double h10 = (double)moment[(uint64_t)pi->b * width + pj->a];
    double h11 = (double)moment[(uint64_t)pi->b * width + pj->b];
    double minus = (double)kv->spread[(uint64_t)i * kv->pairs + j];
    double plus = (double)kv->spread[((uint64_t)kv->pairs + i) * kv->pairs + j];
    double p = (h00 + h11) * 0.5, q = (h10 - h01) * 0.5;
    double s = (h00 - h11) * 0.5, t = (h10 + h01) * 0.5;
    turned d = {(ti.re * tj.re + ti.im * tj.im) * minus, (ti.im * tj.re - ti.re * tj.im) * minus};
    turned e = {(ti.re * tj.re - ti.im * tj.im) * plus, (ti.im * tj.re + ti.re * tj.im) * plus};
    double pp = p * d.re - q * d.im, qq = p * d.im + q * d.re;
    double ss = s * e.re - t * e.im, tt = s * e.im + t * e.re;
    out[0][0] = pp + ss;
    out[0][1] = tt - qq;
    out[1][0] = qq + tt;
    out[1][1] = pp - ss;
}

/* The form of one rotation block, elements [first, first + B) of the key, not yet rotated. */
static void average_block(const rf_kv *kv, const float *moment, uint32_t width, uint32_t first,
                          uint32_t size, const turned *turns, double *h)
{
    for (uint32_t i = 0; i < width / 2; i++) {
        rf_kv_pair pi = rf_kv_pair_of(&kv->rope, i);
        uint32_t rows[2] = {pi.a - first, pi.b - first}; /* wraps: then it is not below size */
        if (rows[0] >= size && rows[1] >= size)
            continue;
        for (uint32_t j = 0; j < width / 2; j++) {
            rf_kv_pair pj = rf_kv_pair_of(&kv->rope, j);
            uint32_t columns[2] = {pj.a - first, pj.b - first};
            if (columns[0] >= size && columns[1] >= size)
                continue;
            double part[2][2];
            average_pairs(kv, moment, width, i, j, &pi, &pj, turns[i], turns[j], part);
            for (int r = 0; r < 2; r++) {
                for (int c = 0; c < 2; c++) {
                    if (rows[r] < size && columns[c] < size)
                        h[(uint64_t)rows[r] * size + columns[c]] = part[r][c];
                }
            }
        }
    }
}

/* R h Rt: signs and Hadamard from both sides. */
static void rotate_form(double *h, uint32_t size, const uint8_t *signs, uint32_t first)
{
    double scale = 1.0 / size; /* 1 / sqrt(B) twice */
    for (uint32_t r = 0; r < size; r++) {
        for (uint32_t c = 0; c < size; c++) {
            uint32_t i = first + r, j = first + c;
            uint32_t flip = (uint32_t)(signs[i / 8] >> (i % 8) ^ signs[j / 8] >> (j % 8)) & 1u;
            h[(uint64_t)r * size + c] *= flip ? -scale : scale;
        }
    }
    for (uint32_t stride = 1; stride < size; stride *= 2) {
        for (uint32_t i = 0; i < size; i++) {
            if (i & stride)
                continue;
            for (uint32_t k = 0; k < size; k++) { /* rows, then columns */
                double *a = &h[(uint64_t)i * size + k], *b = &h[(uint64_t)(i + stride) * size + k];
                double x = *a, y = *b;
                *a = x + y;
                *b = x - y;
            }
            for (uint32_t k = 0; k < size; k++) {
                double *a = &h[(uint64_t)k * size + i], *b = &h[(uint64_t)k * size + i + stride];
                double x = *a, y = *b;
                *a = x + y;
                *b = x - y;
            }
        }
    }
}

rf_kv_feedback rf_kv_feedback_of(rf_kv *kv, uint32_t slot, rf_kv_layer_store *layer, uint32_t head,
                                 uint64_t position, double *scratch)
{
    const rf_kv_side_store *keys = &layer->side[RF_KV_K];
    if (!layer->feedback)
        return (rf_kv_feedback){NULL, NULL};
    uint32_t width = keys->width, size = keys->shape.block, blocks = width / size;
    uint64_t matrix = (uint64_t)size * size, head_index = (uint64_t)slot * layer->kv_heads + head;
    float *m = layer->feedback + head_index * blocks * (matrix + size);
    float *d = m + blocks * matrix;
    uint64_t block = position / RF_KV_MEAN_BLOCK;
    uint64_t *has_block = &layer->feedback_block[head_index];
    if ((*has_block & ~RF_KV_NO_FEEDBACK) != block + 1) {
        const float *moment = statistics_of(layer, head) + width;
        turned *turns = (turned *)(void *)(scratch + 2 * matrix);
        *has_block = block + 1;
        for (uint32_t i = 0; i < width / 2; i++) {
            rf_kv_pair pair = rf_kv_pair_of(&kv->rope, i);
            turns[i] = turn_of(&pair, block);
        }
        for (uint32_t b = 0; b < blocks; b++) {
            average_block(kv, moment, width, b * size, size, turns, scratch);
            rotate_form(scratch, size, keys->signs, b * size);
            if (!rf_kv_factor(scratch, size, RF_KV_DAMPING, scratch + matrix, m + b * matrix,
                              d + b * size))
                *has_block |= RF_KV_NO_FEEDBACK;
        }
    }
    if (*has_block & RF_KV_NO_FEEDBACK)
        return (rf_kv_feedback){NULL, NULL};
    return (rf_kv_feedback){m, d};
}

/* ---- statistics from outside -------------------------------------------------------------- */

static rf_status check_statistics(const rf_kv *kv, const rf_kv_layer_store *layer,
                                  const rf_kv_statistics *statistics, rf_error *err)
{
    for (uint32_t slot = 0; slot < kv->slot_count; slot++) {
        if (kv->slots[slot].length > 0 || kv->slots[slot].pending > 0)
            return rf_fail(err, RF_ERR_USAGE, "kv.calibration",
                           "slot %u has rows that were made without it", slot);
    }
    int32_t k_base = statistics->k_base, v_base = statistics->v_base;
    if (k_base < -RF_KV_BASE_LIMIT || k_base > RF_KV_BASE_LIMIT || v_base < -RF_KV_BASE_LIMIT ||
        v_base > RF_KV_BASE_LIMIT) {
        rf_fail(err, RF_ERR_USAGE, "kv.calibration", "a base out of range");
        rf_fail_expected(err, "%d to %d", -RF_KV_BASE_LIMIT, RF_KV_BASE_LIMIT);
        return rf_fail_got(err, "%d and %d", k_base, v_base);
    }
    if (!layer->calibration)
        return RF_OK;
    uint32_t width = layer->side[RF_KV_K].width;
    bool finite = true; /* x - x is NaN where x is not finite */
    for (uint32_t i = 0; i < width; i++)
        finite &= statistics->mean[i] - statistics->mean[i] == 0.0f;
    for (uint64_t i = 0; i < (uint64_t)width * width; i++)
        finite &= statistics->moment[i] - statistics->moment[i] == 0.0f;
    return finite ? RF_OK
                  : rf_fail(err, RF_ERR_USAGE, "kv.calibration", "a value that is not finite");
}

rf_status rf_kv_set_calibration(rf_kv *kv, uint32_t layer_index, uint32_t head,
                                const rf_kv_statistics *statistics, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (layer_index >= kv->layer_count || head >= kv->layers[layer_index].kv_heads)
        return rf_fail(err, RF_ERR_USAGE, "kv.calibration", "no such layer or head");
    rf_kv_layer_store *layer = &kv->layers[layer_index];
    rf_status status = check_statistics(kv, layer, statistics, err);
    if (status)
        return status;
    layer->side[RF_KV_K].bases[head] = statistics->k_base;
    layer->side[RF_KV_V].bases[head] = statistics->v_base;
    if (!layer->calibration)
        return RF_OK;
    uint64_t width = layer->side[RF_KV_K].width;
    float *own_copy = layer->calibration + head * (width + width * width);
    memcpy(own_copy, statistics->mean, width * sizeof(float));
    memcpy(own_copy + width, statistics->moment, width * width * sizeof(float));
    for (uint32_t slot = 0; slot < kv->slot_count; slot++)
        layer->feedback_block[(uint64_t)slot * layer->kv_heads + head] = 0;
    return RF_OK;
}
