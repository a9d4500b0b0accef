/* kv/plan.c: what the KV store will hold, as rows of the plan.
 *
 * What a layer keeps is a list of parts; the same list is planned here and taken by rf_kv_open, so
 * the two cannot disagree: one arithmetic.
 */
#include "kv/store.h"

#include <string.h>

static const rf_kv_format kv_formats[] = {
    /* 65520 is the first float that rounds to infinity in a half; the codes' scales saturate */
    {"f32", RF_F32, 0, false, false, false, __builtin_inff()},
    {"f16", RF_F16, 0, false, false, false, 65520.0f},
    {"bf16", RF_BF16, 0, false, false, false, 0x1.ffp127f}, /* the tie above the largest */
    {"q8_0", RF_FORMAT_NONE, RF_KV_CODE_Q8_0, false, false, false, 65520.0f},
    {"q4_0", RF_FORMAT_NONE, RF_KV_CODE_Q4_0, false, false, false, 65520.0f},
    {"r8", RF_FORMAT_NONE, RF_KV_CODE_R8, true, false, true, 65520.0f},
    {"r6", RF_FORMAT_NONE, RF_KV_CODE_R6, true, true, true, 65520.0f},
    {"r5", RF_FORMAT_NONE, RF_KV_CODE_R5, true, true, true, 65520.0f},
    {"r4", RF_FORMAT_NONE, RF_KV_CODE_R4, true, true, true, 65520.0f},
    {"r3", RF_FORMAT_NONE, RF_KV_CODE_R3, true, true, true, 65520.0f},
    {"turbo4", RF_FORMAT_NONE, RF_KV_CODE_TURBO4, false, false, false, 65520.0f},
    {"turbo3", RF_FORMAT_NONE, RF_KV_CODE_TURBO3, false, false, false, 65520.0f},
    {"turbo2", RF_FORMAT_NONE, RF_KV_CODE_TURBO2, false, false, false, 65520.0f},
    {"turbo4q", RF_FORMAT_NONE, RF_KV_CODE_TURBO4Q, false, false, false, 65520.0f},
    {"turbo3q", RF_FORMAT_NONE, RF_KV_CODE_TURBO3Q, false, false, false, 65520.0f},
};

const rf_kv_format *rf_kv_format_row(const char *name)
{
    const char *wanted = name ? name : "f16";
    for (size_t i = 0; i < RF_ARRAY_COUNT(kv_formats); i++) {
        if (strcmp(kv_formats[i].name, wanted) == 0)
            return &kv_formats[i];
    }
    return NULL;
}

const char *rf_kv_format_name(const char *name)
{
    const rf_kv_format *format = rf_kv_format_row(name);
    return format ? format->name : NULL;
}

bool rf_kv_format_calibrates(const char *name)
{
    const rf_kv_format *format = rf_kv_format_row(name);
    return format && format->has_mean;
}

const char *rf_kv_format_names(void)
{
    return "f32 f16 bf16 r8 r6 r5 r4 r3 q8_0 q4_0 turbo4 turbo3 turbo2 turbo4q turbo3q";
}

void rf_kv_config_init(rf_kv_config *config)
{
    *config = (rf_kv_config){.slots = 1, .recent_blocks = 2, .seed = 1};
}

/* ---- one layer ---------------------------------------------------------------------------- */

static rf_status resolve_side(const rf_kv_config *config, uint32_t layer_index, rf_kv_side side,
                              rf_kv_side_store *out, rf_error *err)
{
    const rf_kv_layer *layer = &config->layers[layer_index];
    const char *name = side == RF_KV_K ? layer->k_format : layer->v_format;
    char where[RF_ID_BYTES];
    rf_print(where, sizeof where, "kv.layers[%u].%s", layer_index, side == RF_KV_K ? "k" : "v");
    *out = (rf_kv_side_store){.format = rf_kv_format_row(name),
                              .width = side == RF_KV_K ? layer->k_width : layer->v_width};
    if (!out->format) {
        rf_fail(err, RF_ERR_USAGE, where, "unknown KV format");
        rf_fail_expected(err, "one of: %s", rf_kv_format_names());
        return rf_fail_got(err, "%s", name);
    }
    if (out->width == 0 || out->width % 8 != 0 || out->width > 4096) {
        rf_fail(err, RF_ERR_USAGE, where, "a head's width must be a multiple of 8, up to 4096");
        return rf_fail_got(err, "%u", out->width);
    }
    if (out->format->plain != RF_FORMAT_NONE) {
        if (rf_format_row_bytes(out->format->plain, out->width, &out->row_bytes))
            return RF_OK;
        return rf_fail(err, RF_ERR_USAGE, where, "the head's width is no whole number of blocks");
    }
    if (!rf_kv_shape_of(out->format->code, out->width, &out->shape)) {
        rf_fail(err, RF_ERR_USAGE, where, "the head's width must be a multiple of 32 for %s",
                out->format->name);
        return rf_fail_got(err, "%u", out->width);
    }
    rf_kv_shape_of(RF_KV_CODE_R8, out->width, &out->recent_shape);
    out->row_bytes = out->shape.row_bytes;
    return RF_OK;
}

/* Rows of the newest positions: those that the first token of a chunk still reads, while the whole
 * chunk has been appended, and a chunk more, so that a step can be taken back. Never more than
 * there are positions; a ring that turns over beside sinks is no bound, since these rows turn over
 * with no sinks, and the sinks are read here as long as they are near. */
static uint64_t recent_rows(const rf_kv_config *config, uint64_t row_count)
{
    uint64_t rows =
        ((uint64_t)config->recent_blocks + 1) * RF_KV_RECENT_BLOCK + 2 * (uint64_t)config->chunk;
    if (config->sinks == 0)
        return RF_MIN(rows, row_count);
    return config->endless ? rows : RF_MIN(rows, config->capacity);
}

/* A layer that reads the rows of an earlier one keeps nothing itself. */
static rf_status resolve_shared(const rf_kv_config *config, uint32_t layer_index,
                                rf_kv_layer_store *out, rf_error *err)
{
    const rf_kv_layer *layer = &config->layers[layer_index];
    char where[RF_ID_BYTES];
    rf_print(where, sizeof where, "kv.layers[%u].shared", layer_index);
    out->reads = layer->shared - 1;
    if (out->reads >= layer_index)
        return rf_fail(err, RF_ERR_USAGE, where, "only an earlier layer can be shared");
    const rf_kv_layer *owner = &config->layers[out->reads];
    if (owner->shared || owner->kv_heads == 0 || owner->kv_heads != layer->kv_heads ||
        owner->k_width != layer->k_width || owner->v_width != layer->v_width ||
        owner->window != layer->window)
        return rf_fail(err, RF_ERR_USAGE, where, "layer %u keeps no rows of this geometry",
                       out->reads);
    out->kv_heads = 0;
    return RF_OK;
}

rf_status rf_kv_layer_resolve(const rf_kv_config *config, uint32_t layer_index,
                              rf_kv_layer_store *out, rf_error *err)
{
    const rf_kv_layer *layer = &config->layers[layer_index];
    *out = (rf_kv_layer_store){.kv_heads = layer->kv_heads, .window = layer->window};
    out->reads = layer_index;
    if (layer->shared)
        return resolve_shared(config, layer_index, out, err);
    if (layer->kv_heads == 0)
        return RF_OK;
    out->row_count = config->capacity;
    if (layer->window) { /* what a chunk overwrites must not be what its first token still sees */
        uint64_t needed = (uint64_t)layer->window + config->chunk + config->sinks;
        out->row_count = RF_MIN(out->row_count, needed);
    }
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        rf_kv_side_store *store = &out->side[side];
        rf_status status = resolve_side(config, layer_index, (rf_kv_side)side, store, err);
        if (status)
            return status;
        if (store->format->has_recent)
            store->recent_count = recent_rows(config, out->row_count);
    }
    if (config->calibrated && out->side[RF_KV_K].format->has_mean &&
        config->rope.dims > layer->k_width) {
        rf_fail(err, RF_ERR_USAGE, "kv.rope", "more elements turn than layer %u's keys have",
                layer_index);
        rf_fail_expected(err, "at most %u", layer->k_width);
        return rf_fail_got(err, "%u", config->rope.dims);
    }
    return RF_OK;
}

/* UINT64_MAX when the product leaves 64 bits. */
static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return rf_mul(a, b, &product) ? product : UINT64_MAX;
}

static uint64_t heads_in_all(const rf_kv_config *config, const rf_kv_layer_store *layer)
{
    return (uint64_t)config->slots * layer->kv_heads; /* two 32-bit numbers */
}

static uint64_t rows_in_all(const rf_kv_config *config, const rf_kv_layer_store *layer,
                            uint64_t rows)
{
    return times(heads_in_all(config, layer), rows);
}

rf_kv_extent rf_kv_extent_of(const rf_kv_config *config, const rf_kv_layer_store *layer,
                             rf_kv_part part)
{
    static const char *const suffixes[RF_KV_PART_COUNT] = {
        "k", "v", "k.first", "v.first", "k.recent", "v.recent", "calibration", "feedback"};
    rf_kv_extent none = {suffixes[part], "bytes", RF_POOL_KV, 0, 1};
    if (layer->kv_heads == 0)
        return none;
    const rf_kv_side_store *store = &layer->side[part % 2];
    const rf_kv_side_store *keys = &layer->side[RF_KV_K];
    uint64_t heads = heads_in_all(config, layer);
    uint64_t width = keys->width, block = keys->shape.block;
    bool has_mean = keys->format->has_mean && config->calibrated;
    switch (part) {
    case RF_KV_PART_ROWS_K:
    case RF_KV_PART_ROWS_V:
        return (rf_kv_extent){suffixes[part], store->format->name, RF_POOL_KV,
                              rows_in_all(config, layer, layer->row_count), store->row_bytes};
    case RF_KV_PART_FIRST_K:
    case RF_KV_PART_FIRST_V:
        if (!store->format->has_first)
            return none;
        return (rf_kv_extent){suffixes[part], "f16", RF_POOL_KV, heads, store->width * 2u};
    case RF_KV_PART_RECENT_K:
    case RF_KV_PART_RECENT_V:
        if (!store->format->has_recent)
            return none;
        return (rf_kv_extent){suffixes[part], "r8", RF_POOL_KV,
                              rows_in_all(config, layer, store->recent_count),
                              store->recent_shape.row_bytes};
    case RF_KV_PART_CALIBRATION:
        if (!has_mean)
            return none;
        return (rf_kv_extent){suffixes[part], "f32", RF_POOL_TABLES, layer->kv_heads,
                              (width + width * width) * sizeof(float)};
    case RF_KV_PART_FEEDBACK:
        if (!has_mean)
            return none;
        return (rf_kv_extent){suffixes[part], "f32", RF_POOL_TABLES, heads,
                              width / block * (block * block + block) * sizeof(float)};
    case RF_KV_PART_COUNT:
        break;
    }
    return none;
}

/* ---- the store's own bookkeeping ---------------------------------------------------------- */

static uint32_t widest_key(const rf_kv_config *config)
{
    uint32_t width = 0;
    for (uint32_t i = 0; i < config->layer_count; i++)
        width = config->layers[i].kv_heads ? RF_MAX(width, config->layers[i].k_width) : width;
    return width;
}

static uint64_t scratch_of(const rf_kv_config *config)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < config->layer_count && !config->no_scratch; i++) {
        const rf_kv_layer *layer = &config->layers[i];
        /* The store alone does not know the queries' heads; 64 of a group fill a tile. */
        if (layer->kv_heads)
            bytes = RF_MAX(bytes, rf_kv_scratch_bytes(layer->k_width, layer->v_width, 64));
    }
    return bytes;
}

typedef struct laying {
    uint8_t *base;
    uint64_t at; /* UINT64_MAX: the sizes have left 64 bits */
} laying;

/* The next piece, aligned; its address when there is memory. */
static void *lay(laying *state, uint64_t count, uint64_t unit_bytes)
{
    void *address = state->base ? state->base + state->at : NULL;
    uint64_t bytes = times(count, unit_bytes);
    if (!rf_align_up(bytes, RF_CACHE_LINE, &bytes) || !rf_add(state->at, bytes, &state->at))
        state->at = UINT64_MAX;
    return address;
}

uint64_t rf_kv_lay_state(const rf_kv_config *config, rf_kv *kv)
{
    laying state = {(uint8_t *)kv, 0};
    uint64_t slots = config->slots, pairs = (widest_key(config) + 1) / 2;
    uint64_t phase_count = config->calibrated ? config->capacity / RF_KV_MEAN_BLOCK + 3 : 0;
    uint64_t block_phases = pairs * 2 * sizeof(float);
    lay(&state, 1, sizeof(rf_kv));
    void *layers = lay(&state, config->layer_count, sizeof(rf_kv_layer_store));
    void *slot_states = lay(&state, slots, sizeof(rf_kv_slot));
    void *phases = lay(&state, times(slots, phase_count), block_phases);
    uint64_t pinned = config->calibrated ? rf_kv_pinned_blocks(config->sinks) : 0;
    void *pinned_phases = lay(&state, pinned, block_phases);
    void *spread = lay(&state, config->calibrated ? pairs : 0, block_phases);
    void *scratch = lay(&state, scratch_of(config), 1);
    if (kv) {
        kv->layers = layers;
        kv->slots = slot_states;
        kv->phases = phases;
        kv->pinned_phases = pinned_phases;
        kv->spread = spread;
        kv->own_scratch = config->no_scratch ? NULL : scratch;
        kv->phase_count = phase_count;
        kv->pairs = (uint32_t)pairs;
    }
    for (uint32_t i = 0; i < config->layer_count; i++) {
        const rf_kv_layer *layer = &config->layers[i];
        uint8_t *signs[2] = {lay(&state, ((uint64_t)layer->k_width + 63) / 64, 8),
                             lay(&state, ((uint64_t)layer->v_width + 63) / 64, 8)};
        int8_t *bases[2] = {lay(&state, layer->kv_heads, 1), lay(&state, layer->kv_heads, 1)};
        uint64_t *block = lay(&state, times(slots, layer->kv_heads), sizeof(uint64_t));
        for (int side = 0; kv && side < 2; side++) {
            kv->layers[i].side[side].signs = signs[side];
            kv->layers[i].side[side].bases = bases[side];
        }
        if (kv)
            kv->layers[i].feedback_block = block;
    }
    return state.at;
}

/* ---- rows --------------------------------------------------------------------------------- */

static rf_status check_config(const rf_kv_config *config, rf_error *err)
{
    if (config->slots == 0)
        return rf_fail(err, RF_ERR_USAGE, "slots", "there must be at least 1");
    if (config->capacity == 0)
        return rf_fail(err, RF_ERR_USAGE, "ctx", "there must be at least 1 position");
    if (config->capacity > (1ull << 48))
        return rf_fail(err, RF_ERR_NO_FIT, "ctx", "no machine holds that many positions");
    uint64_t room = config->capacity;
    if (config->endless) /* what a step sees must not shrink to nothing */
        room = room > config->sinks ? (room - config->sinks + 1) / 2 : 0;
    if (config->chunk == 0 || config->chunk > room) {
        rf_fail(err, RF_ERR_USAGE, "chunk",
                config->endless ? "sinks and two chunks must fit into a ring that wraps"
                                : "a chunk must fit into the ring");
        rf_fail_expected(err, "1 to %llu", (unsigned long long)room);
        return rf_fail_got(err, "%u", config->chunk);
    }
    if (config->sinks >= config->capacity) {
        rf_fail(err, RF_ERR_USAGE, "sinks", "the sinks must leave room in the ring");
        return rf_fail_got(err, "%u", config->sinks);
    }
    const rf_kv_rope *rope = &config->rope;
    if (config->calibrated && rope->dims % 2 != 0) {
        rf_fail(err, RF_ERR_USAGE, "kv.rope", "pairs of elements turn");
        return rf_fail_got(err, "%u elements", rope->dims);
    }
    return RF_OK;
}

rf_status rf_kv_plan(rf_plan *plan, const rf_kv_config *config, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_config(config, err);
    if (status)
        return status;
    for (uint32_t i = 0; i < config->layer_count; i++) {
        rf_kv_layer_store layer;
        status = rf_kv_layer_resolve(config, i, &layer, err);
        for (int part = 0; status == RF_OK && part < RF_KV_PART_COUNT; part++) {
            rf_kv_extent extent = rf_kv_extent_of(config, &layer, (rf_kv_part)part);
            char id[RF_ID_BYTES];
            if (extent.count == 0)
                continue;
            rf_print(id, sizeof id, "kv.layers[%u].%s", i, extent.suffix);
            status = rf_plan_add_region(plan, id, extent.format, RF_SCOPE_MODEL, extent.pool,
                                        extent.count, extent.unit_bytes, err);
        }
        if (status)
            return status;
    }
    uint64_t state_bytes = rf_kv_lay_state(config, NULL);
    if (state_bytes == UINT64_MAX)
        return rf_fail(err, RF_ERR_NO_FIT, "kv.state", "its size leaves 64 bits");
    return rf_plan_add_region(plan, "kv.state", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES,
                              state_bytes, 1, err);
}
