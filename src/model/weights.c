/* model/weights.c: which tensor is which weight: one table of names and shapes.
 *
 * A weight is used where it is, in the mapping; this file binds it, or says which tensor is wrong.
 * It reads no value. Called when a plan is made, and again to record the tensors in the scope.
 */
#include "model/model.h"

typedef enum shape_term { ONE, WIDTH, Q_ALL, K_ALL, V_ALL, V_OUT, FFN, VOCAB } shape_term;

/* A matrix has rows x k; a vector has rows 1. */
static const struct {
    const char *id; /* of the layer for layer slots, behind "model.layers[i]." */
    shape_term rows, k;
    bool required;
} weight_table[RF_W_COUNT] = {
    [RF_W_EMBED] = {"model.embed_tokens.weight", VOCAB, WIDTH, true},
    [RF_W_OUTPUT_NORM] = {"model.norm.weight", ONE, WIDTH, true},
    [RF_W_OUTPUT] = {"model.lm_head.weight", VOCAB, WIDTH, false},
    [RF_W_ATTN_NORM] = {"attn_norm.weight", ONE, WIDTH, true},
    [RF_W_Q] = {"attn.q_proj.weight", Q_ALL, WIDTH, true},
    [RF_W_K] = {"attn.k_proj.weight", K_ALL, WIDTH, true},
    [RF_W_V] = {"attn.v_proj.weight", V_ALL, WIDTH, true},
    [RF_W_O] = {"attn.o_proj.weight", WIDTH, V_OUT, true},
    [RF_W_Q_BIAS] = {"attn.q_proj.bias", ONE, Q_ALL, false},
    [RF_W_K_BIAS] = {"attn.k_proj.bias", ONE, K_ALL, false},
    [RF_W_V_BIAS] = {"attn.v_proj.bias", ONE, V_ALL, false},
    [RF_W_O_BIAS] = {"attn.o_proj.bias", ONE, WIDTH, false},
    [RF_W_MLP_NORM] = {"ffn_norm.weight", ONE, WIDTH, true},
    [RF_W_GATE] = {"mlp.gate_proj.weight", FFN, WIDTH, true},
    [RF_W_UP] = {"mlp.up_proj.weight", FFN, WIDTH, true},
    [RF_W_DOWN] = {"mlp.down_proj.weight", WIDTH, FFN, true},
    [RF_W_GATE_BIAS] = {"mlp.gate_proj.bias", ONE, FFN, false},
    [RF_W_UP_BIAS] = {"mlp.up_proj.bias", ONE, FFN, false},
    [RF_W_DOWN_BIAS] = {"mlp.down_proj.bias", ONE, WIDTH, false},
};

static uint64_t term_value(const rf_config *config, uint32_t layer_index, shape_term term)
{
    const rf_layer_config *layer = &config->layers[layer_index];
    switch (term) {
    case ONE:
        return 1;
    case WIDTH:
        return config->width;
    case Q_ALL:
        return (uint64_t)layer->heads * layer->k_width;
    case K_ALL:
        return (uint64_t)layer->kv_heads * layer->k_width;
    case V_ALL:
        return (uint64_t)layer->kv_heads * layer->v_width;
    case V_OUT:
        return (uint64_t)layer->heads * layer->v_width;
    case FFN:
        return layer->ffn;
    case VOCAB:
        return config->vocab_count;
    }
    return 0;
}

uint32_t rf_weight_table_count(const rf_config *config)
{
    return RF_W_MODEL_COUNT + config->layer_count * RF_W_LAYER_COUNT;
}

/* The entry's slot and layer from its index in the table. */
static rf_weight_slot slot_of(uint32_t index, uint32_t *layer)
{
    *layer = 0;
    if (index < RF_W_MODEL_COUNT)
        return (rf_weight_slot)index;
    *layer = (index - RF_W_MODEL_COUNT) / RF_W_LAYER_COUNT;
    return (rf_weight_slot)(RF_W_MODEL_COUNT + (index - RF_W_MODEL_COUNT) % RF_W_LAYER_COUNT);
}

static void weight_id(rf_weight_slot slot, uint32_t layer, char id[RF_ID_BYTES])
{
    if (slot < RF_W_MODEL_COUNT) {
        rf_print(id, RF_ID_BYTES, "%s", weight_table[slot].id);
    } else {
        rf_print(id, RF_ID_BYTES, "model.layers[%u].%s", layer, weight_table[slot].id);
    }
}

static rf_status bind_one(const rf_gguf *gguf, const rf_config *config, rf_weight_slot slot,
                          uint32_t layer, rf_weight *out, rf_error *err)
{
    char id[RF_ID_BYTES], name[RF_ID_BYTES];
    weight_id(slot, layer, id);
    *out = (rf_weight){.format = RF_FORMAT_NONE};
    if (!rf_id_to_name(id, name, sizeof name)) {
        return rf_fail(err, RF_ERR_BAD_MODEL, id, "the name map has no name for this id");
    }
    const rf_gguf_tensor *tensor = rf_gguf_find_tensor(gguf, name);
    if (!tensor) {
        if (!weight_table[slot].required)
            return RF_OK;
        return rf_fail(err, RF_ERR_BAD_MODEL, name, "the tensor is missing");
    }
    bool is_vector = weight_table[slot].rows == ONE;
    uint64_t rows = term_value(config, layer, weight_table[slot].rows);
    uint64_t k = term_value(config, layer, weight_table[slot].k);
    bool has_shape = is_vector
                         ? tensor->rank == 1 && tensor->shape[0] == k
                         : tensor->rank == 2 && tensor->shape[0] == k && tensor->shape[1] == rows;
    if (!has_shape) {
        rf_fail(err, RF_ERR_BAD_MODEL, name, "unexpected shape");
        if (is_vector)
            rf_fail_expected(err, "[%llu]", (unsigned long long)k);
        else
            rf_fail_expected(err, "[%llu, %llu]", (unsigned long long)k, (unsigned long long)rows);
        return rf_fail_got(err, "rank %u: [%llu, %llu]", tensor->rank,
                           (unsigned long long)tensor->shape[0],
                           (unsigned long long)tensor->shape[1]);
    }
    const rf_format_info *info = rf_format_info_of(tensor->type_id);
    if (!info->decodes || (is_vector && tensor->type_id != RF_F32)) {
        rf_fail(err, RF_ERR_UNSUPPORTED, name, "no kernel for this format");
        if (is_vector)
            rf_fail_expected(err, "f32");
        return rf_fail_got(err, "%s", info->name);
    }
    if (is_vector && tensor->offset % sizeof(float) != 0) {
        rf_fail(err, RF_ERR_BAD_MODEL, name, "the tensor is not aligned to its values");
        return rf_fail_got(err, "offset %llu", (unsigned long long)tensor->offset);
    }
    *out = (rf_weight){.data = gguf->data + tensor->offset,
                       .tensor = tensor,
                       .row_bytes = tensor->bytes / rows,
                       .format = (rf_format)tensor->type_id,
                       .rows = (uint32_t)rows,
                       .k = (uint32_t)k};
    return RF_OK;
}

rf_status rf_weights_bind(const rf_gguf *gguf, const rf_config *config, rf_weight *table,
                          rf_error *err)
{
    for (uint32_t i = 0; i < rf_weight_table_count(config); i++) {
        uint32_t layer;
        rf_weight_slot slot = slot_of(i, &layer);
        rf_status status = bind_one(gguf, config, slot, layer, &table[i], err);
        if (status)
            return status;
    }
    if (!table[RF_W_OUTPUT].tensor)
        table[RF_W_OUTPUT] = table[RF_W_EMBED]; /* tied */
    return RF_OK;
}

/* A tied output aliases the embedding: one tensor, one row. */
static bool is_owner(const rf_weight *table, uint32_t index)
{
    const rf_weight *weight = &table[index];
    return weight->tensor && (index != RF_W_OUTPUT || weight->tensor != table[RF_W_EMBED].tensor);
}

rf_status rf_weights_plan(rf_plan *plan, const rf_config *config, const rf_weight *table,
                          rf_error *err)
{
    for (uint32_t i = 0; i < rf_weight_table_count(config); i++) {
        if (!is_owner(table, i))
            continue;
        uint32_t layer;
        rf_weight_slot slot = slot_of(i, &layer);
        const rf_weight *weight = &table[i];
        rf_plan_row row = {.scope = RF_SCOPE_MODEL,
                           .domain = RF_DOMAIN_FILE,
                           .pool = RF_POOL_WEIGHTS,
                           .bytes = weight->tensor->bytes,
                           .align = 1,
                           .offset = weight->tensor->offset,
                           .first_op = -1,
                           .last_op = -1};
        weight_id(slot, layer, row.id);
        rf_print(row.source, sizeof row.source, "%.*s", (int)weight->tensor->name.length,
                 weight->tensor->name.bytes);
        rf_print(row.format, sizeof row.format, "%s", rf_format_name(weight->format));
        rf_status status = rf_plan_add(plan, &row, err);
        if (status)
            return status;
    }
    return RF_OK;
}

rf_status rf_weights_adopt(rf_scope *scope, const rf_config *config, const rf_weight *table,
                           rf_error *err)
{
    for (uint32_t i = 0; i < rf_weight_table_count(config); i++) {
        if (!is_owner(table, i))
            continue;
        uint32_t layer;
        char id[RF_ID_BYTES];
        rf_weight_slot slot = slot_of(i, &layer);
        weight_id(slot, layer, id);
        const rf_weight *weight = &table[i];
        rf_extent extent = {rf_format_name(weight->format), weight->rows, weight->row_bytes};
        rf_status status = rf_scope_adopt(scope, id, &extent, weight->data, err);
        if (status)
            return status;
    }
    return RF_OK;
}
