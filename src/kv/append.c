/* kv/append.c: rows into the ring.
 *
 *   unit = one side of one KV head; its tokens in ascending order
 *   plain formats: encode
 *   coded formats: subtract the block's mean (keys) ─► rotate ─► encode with feedback (keys) or a
 *                  searched scale (values), and beside it, where the format says so, plain r8 for
 *                  the newest rows and f16 for position 0
 *
 * A row's bytes depend on its own position and values alone. Everything that can fail is checked
 * before the first byte is written.
 */
#include "kv/store.h"

#include <string.h>

/* Whether every value is finite, also when it is stored. */
static bool all_below(const float *values, uint32_t count, float limit)
{
    bool below = true; /* a comparison with NaN is false */
    for (uint32_t i = 0; i < count; i++)
        below &= __builtin_fabsf(values[i]) < limit;
    return below;
}

static rf_status check_append(const rf_kv *kv, uint32_t slot, uint32_t layer, uint32_t count,
                              rf_error *err)
{
    if (slot >= kv->slot_count || layer >= kv->layer_count || kv->layers[layer].kv_heads == 0) {
        return rf_fail(err, RF_ERR_USAGE, "kv.append", "no such slot or layer (slot %u, layer %u)",
                       slot, layer);
    }
    const rf_kv_slot *state = &kv->slots[slot];
    uint32_t expected = rf_kv_keeping_layer(kv, state->next_layer);
    if (layer != expected) {
        rf_fail(err, RF_ERR_USAGE, "kv.append", "layers are appended in order, each once");
        rf_fail_expected(err, "layer %u", expected);
        return rf_fail_got(err, "layer %u", layer);
    }
    if (count == 0 || count > kv->chunk || (state->pending && count != state->pending)) {
        rf_fail(err, RF_ERR_USAGE, "kv.append", "wrong number of tokens");
        rf_fail_expected(err, "%u", state->pending ? state->pending : kv->chunk);
        return rf_fail_got(err, "%u", count);
    }
    if (!kv->endless && count > kv->capacity - state->length) {
        rf_fail(err, RF_ERR_USAGE, "kv.append", "the slot is full");
        rf_fail_expected(err, "at most %llu more",
                         (unsigned long long)(kv->capacity - state->length));
        return rf_fail_got(err, "%u", count);
    }
    return RF_OK;
}

rf_status rf_kv_append_begin(rf_kv *kv, uint32_t slot, uint32_t layer_index, const float *keys,
                             uint64_t key_stride, const float *values, uint64_t value_stride,
                             uint32_t count, rf_kv_append_job *job, rf_error *err)
{
    rf_status status = check_append(kv, slot, layer_index, count, err);
    if (status)
        return status;
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    rf_kv_slot *state = &kv->slots[slot];
    *job = (rf_kv_append_job){.kv = kv,
                              .slot = slot,
                              .layer = layer_index,
                              .count = count,
                              .first_position = state->length,
                              .source = {keys, values},
                              .stride = {key_stride, value_stride}};
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        uint32_t elements = layer->kv_heads * store->width;
        for (uint32_t t = 0; t < count; t++) {
            if (all_below(job->source[side] + t * job->stride[side], elements,
                          store->format->limit))
                continue;
            char where[RF_ID_BYTES];
            rf_print(where, sizeof where, "kv.layers[%u].%s", layer_index,
                     side == RF_KV_K ? "k" : "v");
            return rf_fail(err, RF_ERR_RUNTIME, where,
                           "a value is not finite in this format (position %llu)",
                           (unsigned long long)(state->length + t));
        }
    }
    state->written = RF_MAX(state->written, state->length + count);
    if (rf_kv_keeping_layer(kv, 0) == layer_index)
        rf_kv_fill_phases(kv, slot, state->length, state->length + count);
    return RF_OK;
}

void rf_kv_append_end(const rf_kv_append_job *job)
{
    rf_kv_slot *state = &job->kv->slots[job->slot];
    state->pending = job->count;
    state->next_layer = job->layer + 1;
}

uint32_t rf_kv_append_units(const rf_kv_append_job *job)
{
    return job->kv->layers[job->layer].kv_heads * 2;
}

typedef struct append_scratch {
    float *row, *mean;
    double *factor;
} append_scratch;

static void append_coded(const rf_kv_append_job *job, rf_kv_side side, uint32_t head,
                         const append_scratch *scratch)
{
    rf_kv *kv = job->kv;
    rf_kv_layer_store *layer = &kv->layers[job->layer];
    rf_kv_side_store *store = &layer->side[side];
    uint64_t head_index = (uint64_t)job->slot * layer->kv_heads + head;
    bool has_mean = side == RF_KV_K && layer->calibration;
    uint64_t mean_block = UINT64_MAX;
    for (uint32_t t = 0; t < job->count; t++) {
        uint64_t position = job->first_position + t;
        const float *source =
            job->source[side] + t * job->stride[side] + (uint64_t)head * store->width;
        rf_kv_feedback feedback = {NULL, NULL};
        if (store->first && position == 0) {
            uint16_t *first = store->first + head_index * store->width;
            for (uint32_t i = 0; i < store->width; i++)
                first[i] = rf_f32_to_f16(source[i]);
        }
        memcpy(scratch->row, source, store->width * sizeof(float));
        if (has_mean) {
            if (mean_block != position / RF_KV_MEAN_BLOCK) {
                mean_block = position / RF_KV_MEAN_BLOCK;
                rf_kv_block_mean(kv, job->slot, layer, head, position, scratch->mean);
            }
            for (uint32_t i = 0; i < store->width; i++)
                scratch->row[i] -= scratch->mean[i];
            feedback = rf_kv_feedback_of(kv, job->slot, layer, head, position, scratch->factor);
        }
        kv->codec.rotate(scratch->row, store->signs, store->width, store->shape.block);
        uint64_t row = rf_kv_row_of(kv, layer, position);
        kv->codec.encode(&store->shape, scratch->row, feedback.m ? &feedback : NULL,
                         store->bases[head], rf_kv_row(kv, job->slot, job->layer, head, side, row));
        if (store->recent) {
            uint64_t recent = head_index * store->recent_count + position % store->recent_count;
            kv->codec.encode(&store->recent_shape, scratch->row, NULL, 0,
                             store->recent + recent * store->recent_shape.row_bytes);
        }
    }
}

static void append_plain(const rf_kv_append_job *job, rf_kv_side side, uint32_t head)
{
    const rf_kv *kv = job->kv;
    const rf_kv_layer_store *layer = &kv->layers[job->layer];
    const rf_kv_side_store *store = &layer->side[side];
    rf_kv_encode_fn encode = kv->kernels.kv_encode[store->format->plain];
    for (uint32_t t = 0; t < job->count; t++) {
        uint64_t row = rf_kv_row_of(kv, layer, job->first_position + t);
        encode(job->source[side] + t * job->stride[side] + (uint64_t)head * store->width,
               rf_kv_row(kv, job->slot, job->layer, head, side, row), store->width);
    }
}

void rf_kv_append_run(const rf_kv_append_job *job, uint32_t first_unit, uint32_t last_unit,
                      void *scratch)
{
    const rf_kv_layer_store *layer = &job->kv->layers[job->layer];
    uint32_t width = RF_MAX(layer->side[RF_KV_K].width, layer->side[RF_KV_V].width);
    uint32_t padded = (width + 15u) & ~15u;
    append_scratch parts = {.row = scratch,
                            .mean = (float *)scratch + padded,
                            .factor = (double *)(void *)((float *)scratch + 2 * padded)};
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        rf_kv_side side = (rf_kv_side)(unit % 2);
        if (layer->side[side].format->plain == RF_FORMAT_NONE)
            append_coded(job, side, unit / 2, &parts);
        else
            append_plain(job, side, unit / 2);
    }
}

rf_status rf_kv_append(rf_kv *kv, uint32_t slot, uint32_t layer, const float *keys,
                       uint64_t key_stride, const float *values, uint64_t value_stride,
                       uint32_t count, rf_error *err)
{
    rf_error own;
    rf_kv_append_job job;
    if (!kv->own_scratch)
        return rf_fail(err, RF_ERR_USAGE, "kv.append", "the store has no scratch of its own");
    rf_status status = rf_kv_append_begin(kv, slot, layer, keys, key_stride, values, value_stride,
                                          count, &job, err ? err : &own);
    if (status)
        return status;
    rf_kv_append_run(&job, 0, rf_kv_append_units(&job), kv->own_scratch);
    rf_kv_append_end(&job);
    return RF_OK;
}
