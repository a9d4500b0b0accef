/* kv/ring.c: the store itself: open, append, commit, truncate, windows.
 *
 * Every size was fixed by the plan; from here on rows are only written and found. A position's row
 * is position mod row_count; for layers that keep every position that is the position itself.
 * Appended rows lie behind the committed ones and become part of the sequence at commit, so an
 * abort has nothing to undo. Knows no model and no thread.
 */
#include "kv/store.h"

/* Memory for a store without a scope: one reservation, the state first, then each ring. */
static rf_status ambient_bytes(const rf_kv_config *config, uint64_t *out, rf_error *err)
{
    uint64_t total;
    if (!rf_align_up(rf_kv_state_bytes(config), RF_REGION_ALIGN, &total))
        total = UINT64_MAX;
    for (uint32_t i = 0; i < config->layer_count; i++) {
        rf_kv_layer_store layer;
        rf_status status = rf_kv_layer_resolve(config, i, &layer, err);
        if (status)
            return status;
        for (int side = RF_KV_K; layer.kv_heads && side <= RF_KV_V; side++) {
            uint64_t bytes;
            if (!rf_mul(rf_kv_side_rows(config, &layer), layer.side[side].row_bytes, &bytes) ||
                !rf_align_up(bytes, RF_REGION_ALIGN, &bytes) || !rf_add(total, bytes, &total)) {
                return rf_fail(err, RF_ERR_NO_FIT, "kv", "the sizes of the rings leave 64 bits");
            }
        }
    }
    *out = total;
    return RF_OK;
}

static rf_status take_side(rf_scope *scope, const rf_kv_config *config, uint32_t layer_index,
                           rf_kv_layer_store *layer, rf_kv_side side, uint8_t **ambient,
                           rf_error *err)
{
    rf_kv_side_store *store = &layer->side[side];
    uint64_t rows = rf_kv_side_rows(config, layer);
    if (!scope) {
        uint64_t bytes;
        store->bytes = *ambient;
        if (!rf_align_up(rows * store->row_bytes, RF_REGION_ALIGN, &bytes))
            return RF_ERR_NO_FIT;
        *ambient += bytes; /* ambient_bytes has checked these sums */
        return RF_OK;
    }
    char id[RF_ID_BYTES];
    rf_print(id, sizeof id, "kv.layers[%u].%s", layer_index, side == RF_KV_K ? "k" : "v");
    void *bytes = NULL;
    rf_extent extent = {rf_format_name(store->format), rows, store->row_bytes};
    rf_status status = rf_scope_take(scope, id, &extent, &bytes, err);
    if (status == RF_OK)
        store->bytes = bytes;
    return status;
}

static rf_status open_layers(rf_kv *kv, rf_scope *scope, const rf_kv_config *config,
                             uint8_t *ambient, rf_error *err)
{
    for (uint32_t i = 0; i < config->layer_count; i++) {
        rf_kv_layer_store *layer = &kv->layers[i];
        rf_status status = rf_kv_layer_resolve(config, i, layer, err);
        for (int side = RF_KV_K; status == RF_OK && layer->kv_heads && side <= RF_KV_V; side++) {
            status = take_side(scope, config, i, layer, (rf_kv_side)side, &ambient, err);
            kv->ring_bytes += rf_kv_side_rows(config, layer) * layer->side[side].row_bytes;
        }
        if (status)
            return status;
    }
    return RF_OK;
}

rf_status rf_kv_open(rf_scope *scope, const rf_kv_config *config, rf_kv **out, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_plan counted; /* validates the configuration by the very rows of the plan */
    rf_plan_init(&counted, NULL, 0);
    rf_status status = rf_kv_plan(&counted, config, err);
    if (status)
        return status;

    uint64_t state_bytes = rf_kv_state_bytes(config);
    uint64_t own_bytes = 0;
    void *memory = NULL;
    if (scope) {
        rf_extent extent = {"bytes", state_bytes, 1};
        status = rf_scope_take(scope, "kv.state", &extent, &memory, err);
    } else {
        status = ambient_bytes(config, &own_bytes, err);
        if (status == RF_OK)
            status = rf_os_reserve(own_bytes, &memory, err);
        if (status == RF_OK)
            rf_os_touch(memory, own_bytes);
    }
    if (status)
        return status;

    rf_kv *kv = memory;
    *kv = (rf_kv){.capacity = config->capacity,
                  .own_bytes = own_bytes,
                  .layer_count = config->layer_count,
                  .slot_count = config->slots,
                  .chunk = config->chunk};
    kv->layers = (rf_kv_layer_store *)(kv + 1);
    kv->slots = (rf_kv_slot *)(kv->layers + config->layer_count);
    for (uint32_t i = 0; i < config->slots; i++)
        kv->slots[i] = (rf_kv_slot){0};
    rf_kernels_pick(&kv->kernels, RF_CPU_ALL);
    uint64_t rings_at = 0;
    if (!rf_align_up(state_bytes, RF_REGION_ALIGN, &rings_at))
        return RF_ERR_NO_FIT;
    status = open_layers(kv, scope, config, (uint8_t *)memory + rings_at, err);
    if (status) {
        rf_kv_close(kv);
        return status;
    }
    *out = kv;
    return RF_OK;
}

void rf_kv_close(rf_kv *kv)
{
    if (kv && kv->own_bytes)
        rf_os_release(kv, kv->own_bytes);
}

void rf_kv_set_kernels(rf_kv *kv, const rf_kernels *kernels)
{
    kv->kernels = *kernels;
}

uint64_t rf_kv_preallocated_bytes(const rf_kv *kv)
{
    return kv->ring_bytes;
}

uint64_t rf_kv_capacity(const rf_kv *kv)
{
    return kv->capacity;
}

/* Whether every value is finite, also when it is stored. */
static bool all_below(const float *values, uint32_t count, float limit)
{
    bool below = true; /* a comparison with NaN is false */
    for (uint32_t i = 0; i < count; i++)
        below &= __builtin_fabsf(values[i]) < limit;
    return below;
}

/* The first layer at or after index that keeps anything. */
static uint32_t keeping_layer(const rf_kv *kv, uint32_t index)
{
    while (index < kv->layer_count && kv->layers[index].kv_heads == 0)
        index++;
    return index;
}

static rf_status check_append(const rf_kv *kv, uint32_t slot, uint32_t layer, uint32_t count,
                              rf_error *err)
{
    if (slot >= kv->slot_count || layer >= kv->layer_count || kv->layers[layer].kv_heads == 0) {
        return rf_fail(err, RF_ERR_USAGE, "kv.append", "no such slot or layer (slot %u, layer %u)",
                       slot, layer);
    }
    const rf_kv_slot *state = &kv->slots[slot];
    uint32_t expected = keeping_layer(kv, state->next_layer);
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
    if (count > kv->capacity - state->length) {
        rf_fail(err, RF_ERR_USAGE, "kv.append", "the slot is full");
        rf_fail_expected(err, "at most %llu more",
                         (unsigned long long)(kv->capacity - state->length));
        return rf_fail_got(err, "%u", count);
    }
    return RF_OK;
}

rf_status rf_kv_append(rf_kv *kv, uint32_t slot, uint32_t layer_index, const float *keys,
                       uint64_t key_stride, const float *values, uint64_t value_stride,
                       uint32_t count, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_append(kv, slot, layer_index, count, err);
    if (status)
        return status;
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    const float *source[2] = {keys, values};
    uint64_t stride[2] = {key_stride, value_stride};
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        uint32_t row_elements = layer->kv_heads * layer->side[side].width;
        for (uint32_t t = 0; t < count; t++) {
            if (all_below(source[side] + t * stride[side], row_elements, layer->side[side].limit))
                continue;
            char where[RF_ID_BYTES];
            rf_print(where, sizeof where, "kv.layers[%u].%s", layer_index,
                     side == RF_KV_K ? "k" : "v");
            return rf_fail(err, RF_ERR_RUNTIME, where,
                           "a value is not finite in this format (position %llu)",
                           (unsigned long long)(kv->slots[slot].length + t));
        }
    }
    rf_kv_slot *state = &kv->slots[slot];
    state->written = RF_MAX(state->written, state->length + count);
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        rf_kv_encode_fn encode = kv->kernels.kv_encode[store->format];
        for (uint32_t head = 0; head < layer->kv_heads; head++) {
            for (uint32_t t = 0; t < count; t++) {
                uint64_t row = (state->length + t) % layer->row_count;
                encode(source[side] + t * stride[side] + (uint64_t)head * store->width,
                       rf_kv_row(kv, slot, layer_index, head, (rf_kv_side)side, row), store->width);
            }
        }
    }
    state->pending = count;
    state->next_layer = layer_index + 1;
    return RF_OK;
}

rf_status rf_kv_commit(rf_kv *kv, uint32_t slot, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (slot >= kv->slot_count)
        return rf_fail(err, RF_ERR_USAGE, "kv.commit", "no such slot");
    rf_kv_slot *state = &kv->slots[slot];
    if (keeping_layer(kv, state->next_layer) != kv->layer_count) {
        return rf_fail(err, RF_ERR_USAGE, "kv.commit", "layer %u was not appended",
                       keeping_layer(kv, state->next_layer));
    }
    state->length += state->pending;
    rf_kv_abort(kv, slot);
    return RF_OK;
}

void rf_kv_abort(rf_kv *kv, uint32_t slot)
{
    if (slot >= kv->slot_count)
        return;
    kv->slots[slot].pending = 0;
    kv->slots[slot].next_layer = 0;
}

uint64_t rf_kv_length(const rf_kv *kv, uint32_t slot)
{
    return slot < kv->slot_count ? kv->slots[slot].length : 0;
}

/* Whether the rows of the positions from on are all still there; what was appended and then
 * forgotten has written over rows as well. */
static bool has_rows_from(const rf_kv_layer_store *layer, const rf_kv_slot *state, uint64_t from)
{
    return state->written <= layer->row_count || from >= state->written - layer->row_count;
}

rf_status rf_kv_truncate(rf_kv *kv, uint32_t slot, uint64_t length, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (slot >= kv->slot_count)
        return rf_fail(err, RF_ERR_USAGE, "kv.truncate", "no such slot");
    rf_kv_slot *state = &kv->slots[slot];
    if (length > state->length) {
        rf_fail(err, RF_ERR_USAGE, "kv.truncate", "the slot is shorter than that");
        rf_fail_expected(err, "at most %llu", (unsigned long long)state->length);
        return rf_fail_got(err, "%llu", (unsigned long long)length);
    }
    /* A sliding layer must still have what the next position will see. */
    for (uint32_t i = 0; i < kv->layer_count && length; i++) {
        uint32_t window = kv->layers[i].window;
        if (!window || !kv->layers[i].kv_heads)
            continue;
        uint64_t seen_from = length + 1 > window ? length + 1 - window : 0;
        if (length < state->length && !has_rows_from(&kv->layers[i], state, seen_from)) {
            return rf_fail(err, RF_ERR_USAGE, "kv.truncate",
                           "positions that layer %u would see were overwritten", i);
        }
    }
    state->length = length;
    if (length == 0)
        state->written = 0;
    rf_kv_abort(kv, slot);
    return RF_OK;
}

void rf_kv_clear(rf_kv *kv, uint32_t slot)
{
    if (slot < kv->slot_count)
        kv->slots[slot] = (rf_kv_slot){0};
}

uint64_t rf_kv_row_bytes(const rf_kv *kv, uint32_t layer, rf_kv_side side)
{
    return layer < kv->layer_count ? kv->layers[layer].side[side].row_bytes : 0;
}

uint32_t rf_kv_window(const rf_kv *kv, uint32_t slot, uint32_t layer_index, uint32_t head,
                      rf_kv_side side, uint64_t from, uint64_t to, rf_kv_run runs[RF_KV_RUNS_MAX])
{
    if (slot >= kv->slot_count || layer_index >= kv->layer_count)
        return 0;
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    const rf_kv_slot *state = &kv->slots[slot];
    uint64_t end = state->length + (layer_index < state->next_layer ? state->pending : 0);
    if (head >= layer->kv_heads || from >= to || to > end)
        return 0;
    if (!has_rows_from(layer, state, from))
        return 0;
    uint32_t run_count = 0;
    while (from < to) {
        uint64_t row = from % layer->row_count;
        uint64_t count = RF_MIN(to - from, layer->row_count - row);
        runs[run_count++] =
            (rf_kv_run){from, count, rf_kv_row(kv, slot, layer_index, head, side, row)};
        from += count;
    }
    return run_count;
}
