/* kv/face.c: the store for an engine without a team: attention in one call, rows as floats, a
 * report.
 */
#include "kv/store.h"

#include <string.h>

rf_status rf_kv_attention(rf_kv *kv, uint32_t slot, uint32_t layer, const rf_kv_queries *queries,
                          float *out, uint64_t out_stride, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (!kv->own_scratch)
        return rf_fail(err, RF_ERR_USAGE, "kv.attention", "the store has no scratch of its own");
    layer = layer < kv->layer_count ? kv->layers[layer].reads : layer;
    if (slot >= kv->slot_count || layer >= kv->layer_count || kv->layers[layer].kv_heads == 0)
        return rf_fail(err, RF_ERR_USAGE, "kv.attention", "no such slot or layer");
    uint32_t kv_heads = kv->layers[layer].kv_heads;
    const rf_kv_slot *state = &kv->slots[slot];
    uint64_t end = state->length + (layer < state->next_layer ? state->pending : 0);
    if (queries->heads == 0 || queries->heads % kv_heads != 0 || queries->heads / kv_heads > 64) {
        rf_fail(err, RF_ERR_USAGE, "kv.attention", "wrong number of heads");
        rf_fail_expected(err, "a multiple of %u, at most 64 of them", kv_heads);
        return rf_fail_got(err, "%u", queries->heads);
    }
    if (queries->count == 0 || queries->first_position >= end ||
        queries->count > end - queries->first_position) {
        rf_fail(err, RF_ERR_USAGE, "kv.attention", "positions that the layer does not have");
        rf_fail_expected(err, "below %llu", (unsigned long long)end);
        return rf_fail_got(err, "%u from %llu", queries->count,
                           (unsigned long long)queries->first_position);
    }
    rf_kv_attend job = {.slot = slot,
                        .layer = layer,
                        .heads = queries->heads,
                        .first_position = queries->first_position,
                        .token_count = queries->count,
                        .q = queries->q,
                        .q_sink = queries->q_sink,
                        .q_stride = queries->stride,
                        .out = out,
                        .out_stride = out_stride,
                        .scale = queries->scale};
    rf_kv_attend_run(kv, &job, 0, rf_kv_attend_units(kv, &job), kv->own_scratch);
    return RF_OK;
}

/* One row as it came, as far as its format still knows it. */
static void widen_row(rf_kv *kv, uint32_t slot, uint32_t layer_index, uint32_t head,
                      rf_kv_side side, uint64_t position, float *out)
{
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    const rf_kv_side_store *store = &layer->side[side];
    uint64_t end;
    uint32_t owner = rf_kv_slot_of(kv, layer_index, slot, position, &end);
    const uint8_t *row =
        rf_kv_row(kv, owner, layer_index, head, side, rf_kv_row_of(kv, layer, position));
    if (store->format->plain != RF_FORMAT_NONE) {
        kv->kernels.kv_decode[store->format->plain](row, out, store->width);
        return;
    }
    if (store->first && position == 0) {
        uint64_t index = (uint64_t)slot * layer->kv_heads + head;
        for (uint32_t i = 0; i < store->width; i++)
            out[i] = rf_f16_to_f32(store->first[index * store->width + i]);
        return;
    }
    rf_kv_widen(&store->shape, row, 1, store->bases[head], out);
    kv->codec.turn_back(out, store->signs, store->width, store->shape.block);
    if (side == RF_KV_K && layer->calibration) {
        float mean[4096];
        rf_kv_block_mean(kv, slot, layer, head, position, mean);
        for (uint32_t i = 0; i < store->width; i++)
            out[i] += mean[i];
    }
}

rf_status rf_kv_gather(rf_kv *kv, uint32_t slot, uint32_t layer, uint32_t head, rf_kv_side side,
                       uint64_t from, uint64_t to, float *out, rf_trace *trace, uint32_t row,
                       rf_error *err)
{
    rf_error own;
    rf_kv_run runs[RF_KV_RUNS_MAX];
    if (!err)
        err = &own;
    uint32_t run_count = rf_kv_window(kv, slot, layer, head, side, from, to, runs);
    if (run_count == 0)
        return rf_fail(err, RF_ERR_USAGE, "kv.gather",
                       "no such slot, layer or head, or positions that are not there");
    layer = kv->layers[layer].reads;
    uint32_t width = kv->layers[layer].side[side].width;
    for (uint64_t position = from; position < to; position++)
        widen_row(kv, slot, layer, head, side, position, out + (position - from) * width);
    rf_trace_emit(trace, RF_EVENT_ADAPTER, row, 0, (to - from) * width * sizeof(float), 0);
    return RF_OK;
}

void rf_kv_describe(const rf_kv *kv, uint32_t slot, rf_kv_report *out)
{
    *out = (rf_kv_report){.preallocated_bytes = kv->ring_bytes, .capacity = kv->capacity};
    uint64_t elements = 0, row_bits = 0;
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        const rf_kv_layer_store *layer = &kv->layers[i];
        for (int side = RF_KV_K; layer->kv_heads && side <= RF_KV_V; side++) {
            const rf_kv_side_store *store = &layer->side[side];
            uint64_t heads = (uint64_t)kv->slot_count * layer->kv_heads;
            uint64_t beside = store->first ? store->width * sizeof(uint16_t) : 0;
            beside += store->recent ? store->recent_count * store->recent_shape.row_bytes : 0;
            out->row_bytes += heads * layer->row_count * store->row_bytes;
            out->beside_bytes += heads * beside;
            elements += (uint64_t)layer->kv_heads * store->width;
            row_bits += layer->kv_heads * store->row_bytes * 8;
        }
    }
    out->bits_per_value = elements ? (double)row_bits / (double)elements : 0.0;
    if (slot < kv->slot_count) {
        out->length = kv->slots[slot].length;
        out->prefix_length = kv->slots[slot].prefix_length;
        out->holders = kv->slots[slot].holders;
    }
}
