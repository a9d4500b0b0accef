/* kv/ring.c: the store itself: open, commit, truncate, windows.
 *
 * Every size was fixed by the plan; from here on rows are only written and found. Appended rows lie
 * behind the committed ones and become part of the sequence at commit, so an abort has nothing to
 * undo. Knows no model and no thread.
 */
#include "kv/store.h"

#include <string.h>

/* ---- open --------------------------------------------------------------------------------- */

/* Memory for a store without a scope: one reservation, the state first, then every part. */
static rf_status ambient_bytes(const rf_kv_config *config, uint64_t *out, rf_error *err)
{
    uint64_t total = rf_kv_lay_state(config, NULL);
    for (uint32_t i = 0; i < config->layer_count; i++) {
        rf_kv_layer_store layer;
        rf_status status = rf_kv_layer_resolve(config, i, &layer, err);
        if (status)
            return status;
        for (int part = 0; part < RF_KV_PART_COUNT; part++) {
            rf_kv_extent extent = rf_kv_extent_of(config, &layer, (rf_kv_part)part);
            uint64_t bytes;
            if (!rf_mul(extent.count, extent.unit_bytes, &bytes) ||
                !rf_align_up(bytes, RF_REGION_ALIGN, &bytes) || !rf_add(total, bytes, &total)) {
                return rf_fail(err, RF_ERR_NO_FIT, "kv", "the sizes of the rings leave 64 bits");
            }
        }
    }
    *out = total;
    return RF_OK;
}

static void set_part(rf_kv_layer_store *layer, rf_kv_part part, void *address)
{
    rf_kv_side_store *store = &layer->side[part % 2];
    switch (part) {
    case RF_KV_PART_ROWS_K:
    case RF_KV_PART_ROWS_V:
        store->bytes = address;
        break;
    case RF_KV_PART_FIRST_K:
    case RF_KV_PART_FIRST_V:
        store->first = address;
        break;
    case RF_KV_PART_RECENT_K:
    case RF_KV_PART_RECENT_V:
        store->recent = address;
        break;
    case RF_KV_PART_CALIBRATION:
        layer->calibration = address;
        break;
    case RF_KV_PART_FEEDBACK:
        layer->feedback = address;
        break;
    case RF_KV_PART_COUNT:
        break;
    }
}

static rf_status open_layer(rf_kv *kv, rf_scope *scope, const rf_kv_config *config, uint32_t index,
                            uint8_t **ambient, rf_error *err)
{
    rf_kv_layer_store *layer = &kv->layers[index];
    for (int part = 0; part < RF_KV_PART_COUNT; part++) {
        rf_kv_extent extent = rf_kv_extent_of(config, layer, (rf_kv_part)part);
        uint64_t bytes = extent.count * extent.unit_bytes; /* checked by rf_kv_plan */
        void *address = *ambient;
        if (extent.count == 0)
            continue;
        if (extent.pool == RF_POOL_KV)
            kv->ring_bytes += bytes;
        if (scope) {
            char id[RF_ID_BYTES];
            rf_extent taken = {extent.format, extent.count, extent.unit_bytes};
            rf_print(id, sizeof id, "kv.layers[%u].%s", index, extent.suffix);
            rf_status status = rf_scope_take(scope, id, &taken, &address, err);
            if (status)
                return status;
        } else {
            *ambient += (bytes + RF_REGION_ALIGN - 1) & ~(uint64_t)(RF_REGION_ALIGN - 1);
        }
        set_part(layer, (rf_kv_part)part, address);
        if (part == RF_KV_PART_CALIBRATION || part == RF_KV_PART_FEEDBACK)
            memset(address, 0, bytes);
    }
    return RF_OK;
}

/* Signs from the seed, other ones for each layer and side; bases that hold for most models. */
static void seed_layer(rf_kv_layer_store *layer, uint64_t seed, uint32_t index, uint32_t slots)
{
    for (uint32_t side = 0; layer->kv_heads && side < 2; side++) {
        rf_kv_side_store *store = &layer->side[side];
        rf_kv_signs(seed + index * 2ull + side, store->width, store->signs);
        memset(store->bases, RF_KV_BASE_DEFAULT, layer->kv_heads);
    }
    memset(layer->feedback_block, 0, (size_t)slots * layer->kv_heads * sizeof(uint64_t));
}

/* The geometry of a layer, around the addresses that rf_kv_lay_state has set. */
static rf_status resolve_in_place(const rf_kv_config *config, uint32_t index,
                                  rf_kv_layer_store *layer, rf_error *err)
{
    rf_kv_layer_store fresh;
    rf_status status = rf_kv_layer_resolve(config, index, &fresh, err);
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        fresh.side[side].signs = layer->side[side].signs;
        fresh.side[side].bases = layer->side[side].bases;
    }
    fresh.feedback_block = layer->feedback_block;
    *layer = fresh;
    return status;
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
    if (config->calibrated && config->rope.dims && !config->rope.frequencies)
        return rf_fail(err, RF_ERR_USAGE, "kv.rope", "there are no frequencies");
    uint64_t state_bytes = rf_kv_lay_state(config, NULL);
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
    *kv = (rf_kv){.rope = config->rope,
                  .capacity = config->capacity,
                  .own_bytes = own_bytes,
                  .layer_count = config->layer_count,
                  .slot_count = config->slots,
                  .chunk = config->chunk,
                  .sinks = config->sinks,
                  .recent_blocks = config->recent_blocks,
                  .endless = config->endless};
    rf_kv_set_cpu(kv, RF_CPU_ALL);
    rf_kv_lay_state(config, kv);
    uint8_t *ambient = (uint8_t *)memory + state_bytes;
    for (uint32_t i = 0; status == RF_OK && i < config->layer_count; i++) {
        status = resolve_in_place(config, i, &kv->layers[i], err);
        if (status)
            break;
        seed_layer(&kv->layers[i], config->seed, i, config->slots);
        status = open_layer(kv, scope, config, i, &ambient, err);
    }
    if (status) {
        rf_kv_close(kv);
        return status;
    }
    for (uint32_t i = 0; i < config->slots; i++)
        kv->slots[i] = (rf_kv_slot){0};
    rf_kv_fill_tables(kv);
    *out = kv;
    return RF_OK;
}

void rf_kv_close(rf_kv *kv)
{
    if (kv && kv->own_bytes)
        rf_os_release(kv, kv->own_bytes);
}

void rf_kv_set_cpu(rf_kv *kv, uint32_t cpu_mask)
{
    rf_kernels_pick(&kv->kernels, cpu_mask);
    rf_kv_kernels_pick(&kv->codec, cpu_mask);
}

uint64_t rf_kv_preallocated_bytes(const rf_kv *kv)
{
    return kv->ring_bytes;
}

uint64_t rf_kv_capacity(const rf_kv *kv)
{
    return kv->capacity;
}

/* ---- the sequence ------------------------------------------------------------------------- */

rf_status rf_kv_commit(rf_kv *kv, uint32_t slot, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (slot >= kv->slot_count)
        return rf_fail(err, RF_ERR_USAGE, "kv.commit", "no such slot");
    rf_kv_slot *state = &kv->slots[slot];
    uint32_t next = rf_kv_keeping_layer(kv, state->next_layer);
    if (next != kv->layer_count)
        return rf_fail(err, RF_ERR_USAGE, "kv.commit", "layer %u was not appended", next);
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

/* Whether the rows of the positions from on are all still there (of those that are no sinks); what
 * was appended and then forgotten has written over rows as well. */
static bool has_from(const rf_kv_slot *state, uint64_t row_count, uint64_t from)
{
    return state->written <= row_count || from >= state->written - row_count;
}

/* Whether a next position `length` would find all that it sees. */
bool rf_kv_can_go_on(const rf_kv *kv, const rf_kv_layer_store *layer, const rf_kv_slot *state,
                     uint64_t length)
{
    uint64_t rows = layer->row_count - kv->sinks; /* that turn over */
    uint64_t seen = RF_MAX(rf_kv_seen_from(kv, layer->window, length), (uint64_t)kv->sinks);
    if (!has_from(state, rows, seen))
        return false;
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        uint64_t block = length / RF_KV_RECENT_BLOCK;
        uint64_t from = (block - RF_MIN(block, (uint64_t)kv->recent_blocks)) * RF_KV_RECENT_BLOCK;
        if (from >= kv->sinks) /* else sinks are among them */
            from = RF_MAX(from, seen);
        if (store->recent && !has_from(state, store->recent_count, from))
            return false;
    }
    return true;
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
    if (length < state->held_length) {
        rf_fail(err, RF_ERR_USAGE, "kv.truncate", "%u other slots read a prefix of this one",
                state->holders);
        rf_fail_expected(err, "at least %llu", (unsigned long long)state->held_length);
        return rf_fail_got(err, "%llu", (unsigned long long)length);
    }
    for (uint32_t i = 0; length && length < state->length && i < kv->layer_count; i++) {
        if (kv->layers[i].kv_heads == 0 || rf_kv_can_go_on(kv, &kv->layers[i], state, length))
            continue;
        return rf_fail(err, RF_ERR_USAGE, "kv.truncate",
                       "rows of layer %u that position %llu would read were overwritten", i,
                       (unsigned long long)length);
    }
    state->length = length;
    if (length > 0) /* what comes next is its own, also where others' rows stood */
        state->prefix_length = RF_MIN(state->prefix_length, length);
    if (length == 0) {
        state->written = 0;
        rf_kv_release(kv, slot);
    }
    rf_kv_abort(kv, slot);
    return RF_OK;
}

rf_status rf_kv_clear(rf_kv *kv, uint32_t slot, rf_error *err)
{
    return rf_kv_truncate(kv, slot, 0, err);
}

/* ---- windows ------------------------------------------------------------------------------ */

uint64_t rf_kv_row_bytes(const rf_kv *kv, uint32_t layer, rf_kv_side side)
{
    return layer < kv->layer_count ? kv->layers[kv->layers[layer].reads].side[side].row_bytes : 0;
}

uint32_t rf_kv_window(const rf_kv *kv, uint32_t slot, uint32_t layer_index, uint32_t head,
                      rf_kv_side side, uint64_t from, uint64_t to, rf_kv_run runs[RF_KV_RUNS_MAX])
{
    if (slot >= kv->slot_count || layer_index >= kv->layer_count)
        return 0;
    layer_index = kv->layers[layer_index].reads;
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    const rf_kv_slot *state = &kv->slots[slot];
    uint64_t end = state->length + (layer_index < state->next_layer ? state->pending : 0);
    if (head >= layer->kv_heads || from >= to || to > end)
        return 0;
    uint64_t behind_sinks = RF_MAX(from, (uint64_t)kv->sinks);
    if (behind_sinks < to && !has_from(state, layer->row_count - kv->sinks, behind_sinks))
        return 0;
    uint32_t run_count = 0;
    while (from < to) {
        uint64_t prefix_end;
        uint32_t owner = rf_kv_slot_of(kv, layer_index, slot, from, &prefix_end);
        uint64_t row = rf_kv_row_of(kv, layer, from);
        uint64_t row_end = from < kv->sinks ? kv->sinks : layer->row_count;
        uint64_t count = RF_MIN(RF_MIN(to, prefix_end) - from, row_end - row);
        const void *rows = rf_kv_row(kv, owner, layer_index, head, side, row);
        runs[run_count++] = (rf_kv_run){from, count, rows};
        from += count;
    }
    return run_count;
}
