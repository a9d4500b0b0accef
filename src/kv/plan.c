/* kv/plan.c: what the KV store will hold, as rows of the plan.
 *
 * The same functions resolve a layer for the plan and for the store that opens on it, so the two
 * cannot disagree: one arithmetic. Called by rf_kv_open and by whoever composes a plan.
 */
#include "kv/store.h"

static const struct {
    rf_format format;
    float limit; /* 65520 is the first float that rounds to infinity in a half */
} kv_formats[] = {{RF_F32, __builtin_inff()}, {RF_F16, 65520.0f}};

rf_format rf_kv_format_by_name(const char *name)
{
    if (!name)
        return RF_F16;
    for (size_t i = 0; i < RF_ARRAY_COUNT(kv_formats); i++) {
        const char *known = rf_format_name(kv_formats[i].format);
        size_t at = 0;
        while (known[at] && known[at] == name[at])
            at++;
        if (!known[at] && !name[at])
            return kv_formats[i].format;
    }
    return RF_FORMAT_NONE;
}

const char *rf_kv_format_names(void)
{
    return "f32 f16";
}

static rf_status resolve_side(const rf_kv_config *config, uint32_t layer_index, rf_kv_side side,
                              rf_kv_side_store *out, rf_error *err)
{
    const rf_kv_layer *layer = &config->layers[layer_index];
    const char *name = side == RF_KV_K ? layer->k_format : layer->v_format;
    char where[RF_ID_BYTES];
    rf_print(where, sizeof where, "kv.layers[%u].%s", layer_index, side == RF_KV_K ? "k" : "v");
    out->bytes = NULL;
    out->width = side == RF_KV_K ? layer->k_width : layer->v_width;
    out->format = rf_kv_format_by_name(name);
    if (out->format == RF_FORMAT_NONE) {
        rf_fail(err, RF_ERR_USAGE, where, "unknown KV format");
        rf_fail_expected(err, "one of: %s", rf_kv_format_names());
        return rf_fail_got(err, "%s", name);
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(kv_formats); i++) {
        if (kv_formats[i].format == out->format)
            out->limit = kv_formats[i].limit;
    }
    if (out->width == 0 || out->width % 8 != 0) {
        rf_fail(err, RF_ERR_USAGE, where, "a head's width must be a multiple of 8");
        return rf_fail_got(err, "%u", out->width);
    }
    if (!rf_format_row_bytes(out->format, out->width, &out->row_bytes)) {
        return rf_fail(err, RF_ERR_USAGE, where, "the head's width is no whole number of blocks");
    }
    return RF_OK;
}

rf_status rf_kv_layer_resolve(const rf_kv_config *config, uint32_t layer_index,
                              rf_kv_layer_store *out, rf_error *err)
{
    const rf_kv_layer *layer = &config->layers[layer_index];
    *out = (rf_kv_layer_store){.kv_heads = layer->kv_heads, .window = layer->window};
    if (layer->kv_heads == 0)
        return RF_OK;
    out->row_count = config->capacity;
    if (layer->window) { /* what a chunk overwrites must not be what its first token still sees */
        uint64_t needed = (uint64_t)layer->window + config->chunk;
        out->row_count = RF_MIN(out->row_count, needed);
    }
    rf_status status = resolve_side(config, layer_index, RF_KV_K, &out->side[RF_KV_K], err);
    if (status)
        return status;
    return resolve_side(config, layer_index, RF_KV_V, &out->side[RF_KV_V], err);
}

uint64_t rf_kv_side_rows(const rf_kv_config *config, const rf_kv_layer_store *layer)
{
    uint64_t rows;
    if (!rf_mul((uint64_t)config->slots * layer->kv_heads, layer->row_count, &rows)) {
        return UINT64_MAX;
    }
    return rows;
}

uint64_t rf_kv_state_bytes(const rf_kv_config *config)
{
    return sizeof(rf_kv) + (uint64_t)config->layer_count * sizeof(rf_kv_layer_store) +
           (uint64_t)config->slots * sizeof(rf_kv_slot);
}

static rf_status check_config(const rf_kv_config *config, rf_error *err)
{
    if (config->slots == 0)
        return rf_fail(err, RF_ERR_USAGE, "slots", "there must be at least 1");
    if (config->capacity == 0) {
        return rf_fail(err, RF_ERR_USAGE, "ctx", "there must be at least 1 position");
    }
    if (config->chunk == 0 || config->chunk > config->capacity) {
        rf_fail(err, RF_ERR_USAGE, "chunk", "a chunk must fit into the ring");
        rf_fail_expected(err, "1 to %llu", (unsigned long long)config->capacity);
        return rf_fail_got(err, "%u", config->chunk);
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
        if (status)
            return status;
        for (int side = RF_KV_K; layer.kv_heads && side <= RF_KV_V; side++) {
            const rf_kv_side_store *store = &layer.side[side];
            char id[RF_ID_BYTES];
            rf_print(id, sizeof id, "kv.layers[%u].%s", i, side == RF_KV_K ? "k" : "v");
            status = rf_plan_add_region(plan, id, rf_format_name(store->format), RF_SCOPE_MODEL,
                                        RF_POOL_KV, rf_kv_side_rows(config, &layer),
                                        store->row_bytes, err);
            if (status)
                return status;
        }
    }
    return rf_plan_add_region(plan, "kv.state", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES,
                              rf_kv_state_bytes(config), 1, err);
}
