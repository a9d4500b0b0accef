/* kv/share.c: what slots can have of each other: a copy, or a prefix that is read where it lies.
 *
 *   slot a: [ prefix ............ | its own rows ... ]    holders 2, held to the longest prefix
 *   slot b:   ^ reads these rows  [ its own rows ... ]
 *   slot c:   ^ and these         [ its own rows ... ]
 *
 * A prefix is computed once. Its rows are shared on layers that keep every position; on layers that
 * turn over, and of the few rows that stand beside the codes, the new slot gets copies, because the
 * owner's go on changing. The owner keeps what others hold: it cannot be cut below it.
 */
#include "kv/store.h"

#include <string.h>

/* Whether a layer keeps a position where it was written, for good. */
static bool stays(const rf_kv *kv, const rf_kv_layer_store *layer)
{
    return !kv->endless && layer->row_count == kv->capacity;
}

static void copy_bytes(uint8_t *bytes, uint64_t unit, uint32_t from, uint32_t to)
{
    if (bytes)
        memcpy(bytes + to * unit, bytes + from * unit, unit);
}

/* The rows that stand beside the codes, and with_rows also the ring itself. */
static void copy_layer(rf_kv_layer_store *layer, uint32_t from, uint32_t to, bool with_rows)
{
    for (int side = RF_KV_K; layer->kv_heads && side <= RF_KV_V; side++) {
        rf_kv_side_store *store = &layer->side[side];
        uint64_t heads = layer->kv_heads;
        copy_bytes((uint8_t *)store->first, heads * store->width * sizeof(uint16_t), from, to);
        copy_bytes(store->recent, heads * store->recent_count * store->recent_shape.row_bytes, from,
                   to);
        if (with_rows)
            copy_bytes(store->bytes, heads * layer->row_count * store->row_bytes, from, to);
    }
    for (uint32_t head = 0; head < layer->kv_heads; head++)
        layer->feedback_block[(uint64_t)to * layer->kv_heads + head] = 0;
}

static rf_status check_slots(const rf_kv *kv, uint32_t from, uint32_t to, const char *where,
                             rf_error *err)
{
    if (from >= kv->slot_count || to >= kv->slot_count || from == to)
        return rf_fail(err, RF_ERR_USAGE, where, "two slots are needed (got %u and %u of %u)", from,
                       to, kv->slot_count);
    if (kv->slots[to].length > 0 || kv->slots[to].pending > 0)
        return rf_fail(err, RF_ERR_USAGE, where, "slot %u is not empty", to);
    if (kv->slots[from].pending > 0 || kv->slots[from].next_layer > 0)
        return rf_fail(err, RF_ERR_USAGE, where, "slot %u is in the middle of a step", from);
    return RF_OK;
}

rf_status rf_kv_copy_slot(rf_kv *kv, uint32_t from, uint32_t to, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_slots(kv, from, to, "kv.copy", err);
    if (status)
        return status;
    for (uint32_t i = 0; i < kv->layer_count; i++)
        copy_layer(&kv->layers[i], from, to, true);
    const rf_kv_slot *source = &kv->slots[from];
    kv->slots[to] = (rf_kv_slot){.length = source->length, .written = source->written};
    if (source->prefix_length) /* the part that the source itself only reads */
        rf_kv_hold(kv, to, source->prefix_slot, source->prefix_length);
    uint64_t first = source->length > kv->capacity ? source->length - kv->capacity : 0;
    rf_kv_fill_phases(kv, to, 0, RF_MIN(source->length, (uint64_t)1));
    rf_kv_fill_phases(kv, to, first / RF_KV_MEAN_BLOCK * RF_KV_MEAN_BLOCK, source->length);
    return RF_OK;
}

#define PREFIX_DEPTH_MAX 4u /* with a ring's end and the sinks, a window has at most 8 runs */

static uint32_t prefix_depth(const rf_kv *kv, uint32_t slot)
{
    uint32_t depth = 0;
    for (; kv->slots[slot].prefix_length; slot = kv->slots[slot].prefix_slot)
        depth++;
    return depth;
}

rf_status rf_kv_share_prefix(rf_kv *kv, uint32_t from, uint32_t to, uint64_t length, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_slots(kv, from, to, "kv.share", err);
    if (status)
        return status;
    const uint32_t beside = from; /* whose first and recent rows are those of the prefix */
    const rf_kv_slot *source = &kv->slots[from];
    if (length == 0 || length > source->length) {
        rf_fail(err, RF_ERR_USAGE, "kv.share", "the prefix must be part of the slot");
        rf_fail_expected(err, "1 to %llu", (unsigned long long)source->length);
        return rf_fail_got(err, "%llu", (unsigned long long)length);
    }
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        const rf_kv_layer_store *layer = &kv->layers[i];
        if (layer->kv_heads && length < source->length &&
            !rf_kv_can_go_on(kv, layer, source, length))
            return rf_fail(err, RF_ERR_USAGE, "kv.share",
                           "rows of layer %u that position %llu would read were overwritten", i,
                           (unsigned long long)length);
    }
    if (length <= source->prefix_length) { /* all of it is somebody else's already */
        from = source->prefix_slot;
    } else if (prefix_depth(kv, from) >= PREFIX_DEPTH_MAX) {
        return rf_fail(err, RF_ERR_USAGE, "kv.share", "the prefix has too many owners (at most %u)",
                       PREFIX_DEPTH_MAX);
    }
    uint64_t written = source->written;
    for (uint32_t i = 0; i < kv->layer_count; i++)
        copy_layer(&kv->layers[i], beside, to, !stays(kv, &kv->layers[i]));
    kv->slots[to] = (rf_kv_slot){.length = length, .written = written};
    rf_kv_hold(kv, to, from, length);
    rf_kv_fill_phases(kv, to, 0, length);
    return RF_OK;
}

uint32_t rf_kv_holders(const rf_kv *kv, uint32_t slot)
{
    return slot < kv->slot_count ? kv->slots[slot].holders : 0;
}

void rf_kv_hold(rf_kv *kv, uint32_t slot, uint32_t owner, uint64_t length)
{
    kv->slots[slot].prefix_slot = owner;
    kv->slots[slot].prefix_length = length;
    kv->slots[owner].holders++;
    kv->slots[owner].held_length = RF_MAX(kv->slots[owner].held_length, length);
}

void rf_kv_release(rf_kv *kv, uint32_t slot)
{
    rf_kv_slot *state = &kv->slots[slot];
    if (state->prefix_length == 0)
        return;
    rf_kv_slot *owner = &kv->slots[state->prefix_slot];
    if (--owner->holders == 0)
        owner->held_length = 0;
    state->prefix_length = 0;
}

uint32_t rf_kv_slot_of(const rf_kv *kv, uint32_t layer_index, uint32_t slot, uint64_t position,
                       uint64_t *end)
{
    *end = UINT64_MAX;
    while (stays(kv, &kv->layers[layer_index]) && position < kv->slots[slot].prefix_length) {
        *end = RF_MIN(*end, kv->slots[slot].prefix_length);
        slot = kv->slots[slot].prefix_slot;
    }
    return slot;
}
