/* kv/save.c: a slot as bytes, and back.
 *
 *   head:  what these rows are (geometry, formats, what they were made with), and of each layer
 *          from which position on it has them
 *   rows:  of each layer, side and head: the sinks ─► the rest, ascending ─► position 0 in f16
 *          ─► the newest rows as r8
 *
 * Rows lie in the order of their positions, not of the ring, so another capacity can take them up.
 * What follows from them is not kept: phases and feedback are computed again. Nothing of a slot is
 * touched before all that is said about it has been verified. A restored slot goes on with the
 * bits of one that was filled where it now lies; where that cannot be, it is refused. Knows no
 * file, no token and no model.
 */
#include "kv/store.h"

#include <string.h>

typedef struct saved_head { /* little-endian, as it lies in a file */
    uint32_t layer_count;
    uint32_t sinks;
    uint32_t chunk;
    uint32_t recent_blocks;
    uint32_t endless;
    uint32_t rope_dims;
    uint64_t capacity;
    uint64_t length;
    uint8_t rope[32];       /* how the keys were turned by position */
    uint8_t signs[32];      /* how rows were rotated */
    uint8_t statistics[32]; /* what the codes are differences from, and their scales' bases */
} saved_head;

typedef struct saved_layer {
    uint32_t kv_heads;
    uint32_t window;
    uint32_t width[2];
    char format[2][8];
    uint64_t from;           /* the first position behind the sinks that there are rows of */
    uint64_t recent_from[2]; /* likewise as r8 */
} saved_layer;

/* No padding: every byte of a file has a meaning. */
_Static_assert(sizeof(saved_head) == 136, "layout of a file");
_Static_assert(sizeof(saved_layer) == 56, "layout of a file");

/* ---- what rows were made with --------------------------------------------------------------- */

static void digest_rope(const rf_kv *kv, uint8_t digest[32])
{
    rf_sha256 hash;
    uint32_t shape[2] = {kv->rope.dims, kv->rope.interleaved};
    rf_sha256_init(&hash);
    rf_sha256_add(&hash, shape, sizeof shape);
    if (kv->rope.frequencies)
        rf_sha256_add(&hash, kv->rope.frequencies, kv->rope.dims / 2 * sizeof(double));
    rf_sha256_end(&hash, digest);
}

static void digest_codes(const rf_kv *kv, uint8_t signs[32], uint8_t statistics[32])
{
    rf_sha256 by_signs, by_statistics;
    rf_sha256_init(&by_signs);
    rf_sha256_init(&by_statistics);
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        const rf_kv_layer_store *layer = &kv->layers[i];
        uint64_t width = layer->side[RF_KV_K].width;
        for (int side = RF_KV_K; layer->kv_heads && side <= RF_KV_V; side++) {
            const rf_kv_side_store *store = &layer->side[side];
            if (store->format->plain != RF_FORMAT_NONE)
                continue;
            rf_sha256_add(&by_signs, store->signs, (store->width + 7) / 8);
            rf_sha256_add(&by_statistics, store->bases, layer->kv_heads);
        }
        if (layer->calibration)
            rf_sha256_add(&by_statistics, layer->calibration,
                          layer->kv_heads * (width + width * width) * sizeof(float));
    }
    rf_sha256_end(&by_signs, signs);
    rf_sha256_end(&by_statistics, statistics);
}

/* ---- which rows there are ------------------------------------------------------------------- */

/* The oldest position that a ring of so many rows still has, when positions below written have
 * been written to it; those below pinned do not turn over. */
static uint64_t oldest_of(uint64_t written, uint64_t rows, uint64_t pinned)
{
    return RF_MAX(pinned, written > rows ? written - rows : 0);
}

static uint64_t count_of(uint64_t from, uint64_t to)
{
    return from < to ? to - from : 0;
}

static void fill_head(const rf_kv *kv, uint32_t slot, saved_head *head)
{
    *head = (saved_head){.layer_count = kv->layer_count,
                         .sinks = kv->sinks,
                         .chunk = kv->chunk,
                         .recent_blocks = kv->recent_blocks,
                         .endless = kv->endless,
                         .rope_dims = kv->rope.dims,
                         .capacity = kv->capacity,
                         .length = kv->slots[slot].length};
    digest_rope(kv, head->rope);
    digest_codes(kv, head->signs, head->statistics);
}

static void fill_layer(const rf_kv *kv, uint32_t slot, uint32_t index, saved_layer *saved)
{
    const rf_kv_layer_store *layer = &kv->layers[index];
    uint64_t written = kv->slots[slot].written;
    *saved = (saved_layer){.kv_heads = layer->kv_heads};
    if (layer->kv_heads == 0)
        return;
    saved->window = layer->window;
    saved->from = oldest_of(written, layer->row_count - kv->sinks, kv->sinks);
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        saved->width[side] = store->width;
        rf_print(saved->format[side], sizeof saved->format[side], "%s", store->format->name);
        if (store->recent)
            saved->recent_from[side] = oldest_of(written, store->recent_count, 0);
    }
}

uint64_t rf_kv_save_head_bytes(const rf_kv *kv)
{
    return sizeof(saved_head) + kv->layer_count * sizeof(saved_layer);
}

void rf_kv_save_head(const rf_kv *kv, uint32_t slot, void *head)
{
    saved_head first;
    fill_head(kv, slot, &first);
    memcpy(head, &first, sizeof first);
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        saved_layer layer;
        fill_layer(kv, slot, i, &layer);
        memcpy((uint8_t *)head + sizeof first + i * sizeof layer, &layer, sizeof layer);
    }
}

/* ---- out ------------------------------------------------------------------------------------ */

typedef struct piece_list {
    rf_piece *pieces; /* NULL: only counted */
    uint32_t count;
} piece_list;

static void add_piece(piece_list *list, const void *data, uint64_t bytes)
{
    if (list->pieces)
        list->pieces[list->count] = (rf_piece){data, bytes};
    list->count++;
}

/* Rows of [from, to) of the small ring as they physically are. */
static void add_recent(const rf_kv_side_store *store, uint64_t head_index, uint64_t from,
                       uint64_t to, piece_list *list)
{
    while (from < to) {
        uint64_t row = from % store->recent_count;
        uint64_t n = RF_MIN(to - from, store->recent_count - row);
        uint64_t row_bytes = store->recent_shape.row_bytes;
        add_piece(list, store->recent + (head_index * store->recent_count + row) * row_bytes,
                  n * row_bytes);
        from += n;
    }
}

static void add_head(const rf_kv *kv, uint32_t slot, uint32_t index, rf_kv_side side, uint32_t head,
                     const saved_layer *saved, piece_list *list)
{
    const rf_kv_layer_store *layer = &kv->layers[index];
    const rf_kv_side_store *store = &layer->side[side];
    uint64_t length = kv->slots[slot].length;
    uint64_t head_index = (uint64_t)slot * layer->kv_heads + head;
    const uint64_t ranges[2][2] = {{0, RF_MIN((uint64_t)kv->sinks, length)}, {saved->from, length}};
    for (int range = 0; range < 2; range++) {
        rf_kv_run runs[RF_KV_RUNS_MAX];
        uint32_t count =
            rf_kv_window(kv, slot, index, head, side, ranges[range][0], ranges[range][1], runs);
        for (uint32_t r = 0; r < count; r++)
            add_piece(list, runs[r].rows, runs[r].count * store->row_bytes);
    }
    if (store->first && length)
        add_piece(list, store->first + head_index * store->width, store->width * sizeof(uint16_t));
    if (store->recent)
        add_recent(store, head_index, saved->recent_from[side], length, list);
}

uint32_t rf_kv_save_rows(const rf_kv *kv, uint32_t slot, rf_piece *pieces)
{
    piece_list list = {pieces, 0};
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        saved_layer saved;
        fill_layer(kv, slot, i, &saved);
        for (int side = RF_KV_K; side <= RF_KV_V; side++) {
            for (uint32_t head = 0; head < saved.kv_heads; head++)
                add_head(kv, slot, i, (rf_kv_side)side, head, &saved, &list);
        }
    }
    return list.count;
}

/* ---- verify --------------------------------------------------------------------------------- */

typedef struct restoring {
    rf_kv *kv;
    const char *where;
    rf_error *err;
    const uint8_t *data;
    uint64_t bytes;
    saved_head head;
    uint64_t written; /* of the slot, so that no ring claims a row that was not saved */
} restoring;

static saved_layer layer_of(const restoring *r, uint32_t index)
{
    saved_layer saved;
    memcpy(&saved, r->data + sizeof(saved_head) + index * sizeof saved, sizeof saved);
    return saved;
}

static rf_status damaged(const restoring *r, const char *what)
{
    return rf_fail(r->err, RF_ERR_BAD_MODEL, r->where, "the saved slot contradicts itself: %s",
                   what);
}

/* An option or a shape that must be as it was; layer UINT32_MAX: of the whole store. */
static rf_status differs(const restoring *r, const char *what, uint32_t layer, uint64_t here,
                         uint64_t saved)
{
    if (layer == UINT32_MAX)
        rf_fail(r->err, RF_ERR_USAGE, r->where, "the slot was saved with another %s", what);
    else
        rf_fail(r->err, RF_ERR_USAGE, r->where, "the slot was saved with another %s of layer %u",
                what, layer);
    rf_fail_expected(r->err, "%llu", (unsigned long long)here);
    return rf_fail_got(r->err, "%llu", (unsigned long long)saved);
}

static rf_status check_made_with(const restoring *r, const saved_head *here)
{
    const saved_head *saved = &r->head;
    const struct {
        const char *what;
        uint64_t here, saved;
    } numbers[] = {
        {"number of layers", here->layer_count, saved->layer_count},
        {"number of sinks", here->sinks, saved->sinks},
        {"number of recent blocks", here->recent_blocks, saved->recent_blocks},
        {"number of dimensions of RoPE", here->rope_dims, saved->rope_dims},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(numbers); i++) {
        if (numbers[i].here != numbers[i].saved)
            return differs(r, numbers[i].what, UINT32_MAX, numbers[i].here, numbers[i].saved);
    }
    if (memcmp(here->rope, saved->rope, sizeof here->rope) != 0)
        return rf_fail(r->err, RF_ERR_USAGE, r->where,
                       "the slot's keys were turned by another RoPE");
    return RF_OK;
}

/* After the formats: stores of other formats have other signs and bases. */
static rf_status check_codes(const restoring *r, const saved_head *here)
{
    if (memcmp(here->signs, r->head.signs, sizeof here->signs) != 0)
        return rf_fail(r->err, RF_ERR_USAGE, r->where,
                       "the slot's rows were rotated with other signs (another seed)");
    if (memcmp(here->statistics, r->head.statistics, sizeof here->statistics) != 0)
        return rf_fail(r->err, RF_ERR_USAGE, r->where,
                       "the slot's rows were made with other statistics (another calibration)");
    return RF_OK;
}

static rf_status check_layer(const restoring *r, uint32_t index, const saved_layer *here)
{
    saved_layer saved = layer_of(r, index);
    uint64_t length = r->head.length;
    if (here->kv_heads != saved.kv_heads)
        return differs(r, "number of KV heads", index, here->kv_heads, saved.kv_heads);
    if (here->kv_heads == 0 && memcmp(here, &saved, sizeof saved) != 0)
        return damaged(r, "rows of a layer that keeps nothing");
    if (here->window != saved.window)
        return differs(r, "window", index, here->window, saved.window);
    for (int side = RF_KV_K; saved.kv_heads && side <= RF_KV_V; side++) {
        const char *name = side == RF_KV_K ? "key" : "value";
        if (here->width[side] != saved.width[side])
            return differs(r, side == RF_KV_K ? "width of keys" : "width of values", index,
                           here->width[side], saved.width[side]);
        if (memcmp(here->format[side], saved.format[side], sizeof saved.format[side]) != 0) {
            rf_fail(r->err, RF_ERR_USAGE, r->where,
                    "the slot was saved with another %s format of layer %u", name, index);
            rf_fail_expected(r->err, "%s", here->format[side]);
            return rf_fail_got(r->err, "%.8s", saved.format[side]);
        }
        if (saved.recent_from[side] > length ||
            (!r->kv->layers[index].side[side].recent && saved.recent_from[side]))
            return damaged(r, "newest rows from behind its end");
    }
    if (saved.kv_heads &&
        (saved.from < r->head.sinks || saved.from > RF_MAX(length, (uint64_t)r->head.sinks)))
        return damaged(r, "rows from behind its end");
    return RF_OK;
}

/* Adds the bytes of one layer's rows. */
static bool add_row_bytes(const restoring *r, uint32_t index, uint64_t *total)
{
    const rf_kv_layer_store *layer = &r->kv->layers[index];
    saved_layer saved = layer_of(r, index);
    uint64_t length = r->head.length;
    uint64_t rows = RF_MIN((uint64_t)r->head.sinks, length) + count_of(saved.from, length);
    for (int side = RF_KV_K; layer->kv_heads && side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        uint64_t recent = store->recent ? count_of(saved.recent_from[side], length) : 0;
        uint64_t bytes, recent_bytes;
        if (!rf_mul(rows, store->row_bytes, &bytes) ||
            !rf_mul(recent, store->recent_shape.row_bytes, &recent_bytes) ||
            !rf_add(bytes, recent_bytes, &bytes) ||
            !rf_add(bytes, store->first && length ? store->width * sizeof(uint16_t) : 0, &bytes) ||
            !rf_mul(bytes, layer->kv_heads, &bytes) || !rf_add(*total, bytes, total))
            return false;
    }
    return true;
}

static rf_status check_bytes(const restoring *r)
{
    uint64_t total = rf_kv_save_head_bytes(r->kv);
    for (uint32_t i = 0; i < r->kv->layer_count; i++) {
        if (!add_row_bytes(r, i, &total))
            return damaged(r, "its sizes leave 64 bits");
    }
    if (total == r->bytes)
        return RF_OK;
    damaged(r, "its rows are not as many as it says");
    rf_fail_expected(r->err, "%llu bytes", (unsigned long long)total);
    return rf_fail_got(r->err, "%llu bytes", (unsigned long long)r->bytes);
}

/* A slot that has seen all that came before it may move to any ring where that is still so. One
 * whose oldest positions fell out of sight depends on where that happened. */
static rf_status check_capacity(const restoring *r)
{
    const rf_kv *kv = r->kv;
    const saved_head *saved = &r->head;
    uint64_t seen = saved->capacity - (saved->chunk - 1);
    if (saved->endless && saved->length > seen) {
        if (!kv->endless)
            return rf_fail(r->err, RF_ERR_USAGE, r->where,
                           "the slot was saved from a ring that had wrapped: it must be endless");
        if (kv->capacity != saved->capacity)
            return differs(r, "capacity, and had wrapped", UINT32_MAX, kv->capacity,
                           saved->capacity);
        if (kv->chunk != saved->chunk)
            return differs(r, "chunk, and had wrapped", UINT32_MAX, kv->chunk, saved->chunk);
        return RF_OK;
    }
    uint64_t room = kv->endless ? kv->capacity - (kv->chunk - 1) : kv->capacity;
    if (saved->length <= room)
        return RF_OK;
    rf_fail(r->err, RF_ERR_USAGE, r->where, "the slot does not fit: positions");
    rf_fail_expected(r->err, "at most %llu", (unsigned long long)room);
    return rf_fail_got(r->err, "%llu", (unsigned long long)saved->length);
}

/* Finds r->written: the least that keeps every ring from claiming rows that were not saved. */
static rf_status check_reach(restoring *r)
{
    const rf_kv *kv = r->kv;
    uint64_t length = r->head.length;
    r->written = length;
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        const rf_kv_layer_store *layer = &kv->layers[i];
        saved_layer saved = layer_of(r, i);
        if (layer->kv_heads && saved.from > kv->sinks)
            r->written = RF_MAX(r->written, saved.from + layer->row_count - kv->sinks);
        for (int side = RF_KV_K; layer->kv_heads && side <= RF_KV_V; side++) {
            if (saved.recent_from[side])
                r->written =
                    RF_MAX(r->written, saved.recent_from[side] + layer->side[side].recent_count);
        }
    }
    const rf_kv_slot state = {.length = length, .written = r->written};
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        if (kv->layers[i].kv_heads == 0 || rf_kv_can_go_on(kv, &kv->layers[i], &state, length))
            continue;
        rf_fail(r->err, RF_ERR_USAGE, r->where,
                "layer %u would need rows that a slot with a chunk of %u had not kept", i,
                r->head.chunk);
        rf_fail_expected(r->err, "a chunk of at most %u", r->head.chunk);
        return rf_fail_got(r->err, "a chunk of %u", kv->chunk);
    }
    return RF_OK;
}

static rf_status verify(restoring *r)
{
    saved_head here;
    saved_layer layer_here;
    if (r->bytes < sizeof(saved_head))
        return damaged(r, "it has no head");
    memcpy(&r->head, r->data, sizeof r->head);
    if (r->head.chunk == 0 || r->head.chunk > r->head.capacity || r->head.capacity >> 48 ||
        r->head.length >> 62 || r->head.endless > 1)
        return damaged(r, "its capacity, chunk or length");
    fill_head(r->kv, 0, &here);
    rf_status status = check_made_with(r, &here);
    if (status == RF_OK && r->bytes < rf_kv_save_head_bytes(r->kv))
        status = damaged(r, "it has no layers");
    for (uint32_t i = 0; status == RF_OK && i < r->kv->layer_count; i++) {
        fill_layer(r->kv, 0, i, &layer_here);
        status = check_layer(r, i, &layer_here);
    }
    if (status == RF_OK)
        status = check_codes(r, &here);
    if (status == RF_OK)
        status = check_bytes(r);
    if (status == RF_OK)
        status = check_capacity(r);
    return status ? status : check_reach(r);
}

/* ---- in ------------------------------------------------------------------------------------- */

/* Copies the rows of [from, to), which lie at data, from keep on; returns what lies behind. */
static const uint8_t *copy_rows(const rf_kv *kv, uint32_t slot, uint32_t index, rf_kv_side side,
                                uint32_t head, uint64_t from, uint64_t keep, uint64_t to,
                                const uint8_t *data)
{
    const rf_kv_layer_store *layer = &kv->layers[index];
    uint64_t row_bytes = layer->side[side].row_bytes;
    const uint8_t *behind = data + count_of(from, to) * row_bytes;
    for (uint64_t at = RF_MAX(from, keep); at < to;) {
        uint64_t row = rf_kv_row_of(kv, layer, at);
        uint64_t row_end = at < kv->sinks ? kv->sinks : layer->row_count;
        uint64_t n = RF_MIN(to - at, row_end - row);
        memcpy(rf_kv_row(kv, slot, index, head, side, row), data + (at - from) * row_bytes,
               n * row_bytes);
        at += n;
    }
    return behind;
}

static const uint8_t *copy_recent(const rf_kv_side_store *store, uint64_t head_index, uint64_t from,
                                  uint64_t keep, uint64_t to, const uint8_t *data)
{
    uint64_t row_bytes = store->recent_shape.row_bytes;
    const uint8_t *behind = data + count_of(from, to) * row_bytes;
    for (uint64_t at = RF_MAX(from, keep); at < to;) {
        uint64_t row = at % store->recent_count;
        uint64_t n = RF_MIN(to - at, store->recent_count - row);
        memcpy(store->recent + (head_index * store->recent_count + row) * row_bytes,
               data + (at - from) * row_bytes, n * row_bytes);
        at += n;
    }
    return behind;
}

static const uint8_t *copy_head(const restoring *r, uint32_t slot, uint32_t index, rf_kv_side side,
                                uint32_t head, const saved_layer *saved, const uint8_t *data)
{
    const rf_kv *kv = r->kv;
    const rf_kv_layer_store *layer = &kv->layers[index];
    const rf_kv_side_store *store = &layer->side[side];
    uint64_t length = r->head.length, sinks = RF_MIN((uint64_t)kv->sinks, length);
    uint64_t head_index = (uint64_t)slot * layer->kv_heads + head;
    uint64_t keep = oldest_of(r->written, layer->row_count - kv->sinks, kv->sinks);
    data = copy_rows(kv, slot, index, side, head, 0, 0, sinks, data);
    data = copy_rows(kv, slot, index, side, head, saved->from, keep, length, data);
    if (store->first && length) {
        uint64_t bytes = store->width * sizeof(uint16_t);
        memcpy(store->first + head_index * store->width, data, bytes);
        data += bytes;
    }
    if (!store->recent)
        return data;
    keep = oldest_of(r->written, store->recent_count, 0);
    return copy_recent(store, head_index, saved->recent_from[side], keep, length, data);
}

/* The phases that an uninterrupted run would have: of as many of the newest blocks as there is room
 * for. Those of the sinks are there from the start. */
static void rebuild_phases(rf_kv *kv, uint32_t slot, uint64_t length)
{
    uint64_t blocks = (length + RF_KV_MEAN_BLOCK - 1) / RF_KV_MEAN_BLOCK;
    uint64_t first = blocks > kv->phase_count ? blocks - kv->phase_count : 0;
    rf_kv_fill_phases(kv, slot, first * RF_KV_MEAN_BLOCK, length);
}

rf_status rf_kv_restore(rf_kv *kv, uint32_t slot, const char *where, const void *data,
                        uint64_t bytes, rf_error *err)
{
    rf_error own;
    restoring r = {.kv = kv, .where = where, .err = err ? err : &own, .data = data, .bytes = bytes};
    if (slot >= kv->slot_count)
        return rf_fail(err, RF_ERR_USAGE, where, "no such slot");
    rf_status status = verify(&r);
    if (status == RF_OK) /* what others read of the slot stays as it is */
        status = rf_kv_clear(kv, slot, r.err);
    if (status)
        return status;
    const uint8_t *rows = r.data + rf_kv_save_head_bytes(kv);
    for (uint32_t i = 0; i < kv->layer_count; i++) {
        const rf_kv_layer_store *layer = &kv->layers[i];
        saved_layer saved = layer_of(&r, i);
        for (int side = RF_KV_K; side <= RF_KV_V; side++) {
            for (uint32_t head = 0; head < layer->kv_heads; head++)
                rows = copy_head(&r, slot, i, (rf_kv_side)side, head, &saved, rows);
        }
        for (uint32_t head = 0; head < layer->kv_heads; head++)
            layer->feedback_block[(uint64_t)slot * layer->kv_heads + head] = 0;
    }
    rebuild_phases(kv, slot, r.head.length);
    kv->slots[slot].length = r.head.length;
    kv->slots[slot].written = r.written;
    return RF_OK;
}
