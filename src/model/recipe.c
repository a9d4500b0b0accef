/* model/recipe.c: the recipes, one table per family, and what they make of the plan.
 *
 * A recipe is data: the plan reads from it between which ops a buffer lives, the step executes it,
 * the trace takes its names. Ops are numbered before | layer | after; every layer runs the same
 * rows, so a buffer's lifetime is an interval of those numbers.
 */
#include "model/model.h"

#define NO_WEIGHTS                                                                                 \
    {                                                                                              \
        RF_W_NONE, RF_W_NONE, RF_W_NONE                                                            \
    }

static const rf_op llama_before[] = {
    {RF_OP_ROPE_TABLE,
     "rope_table",
     RF_B_NONE,
     {RF_B_ROPE, RF_B_ROPE_SINK},
     NO_WEIGHTS,
     NO_WEIGHTS},
    {RF_OP_EMBED,
     "embed",
     RF_B_NONE,
     {RF_B_RESIDUAL},
     {RF_W_EMBED, RF_W_NONE, RF_W_NONE},
     NO_WEIGHTS},
};

static const rf_op llama_layer[] = {
    {RF_OP_NORM,
     "attn.norm",
     RF_B_RESIDUAL,
     {RF_B_ATTN_IN},
     {RF_W_ATTN_NORM, RF_W_NONE, RF_W_NONE},
     NO_WEIGHTS},
    {RF_OP_MATMUL,
     "attn.qkv",
     RF_B_ATTN_IN,
     {RF_B_Q, RF_B_K, RF_B_V},
     {RF_W_Q, RF_W_K, RF_W_V},
     {RF_W_Q_BIAS, RF_W_K_BIAS, RF_W_V_BIAS}},
    {RF_OP_ROPE, "attn.rope", RF_B_ROPE, {RF_B_Q, RF_B_K, RF_B_Q_SINK}, NO_WEIGHTS, NO_WEIGHTS},
    {RF_OP_APPEND, "attn.append", RF_B_K, {RF_B_V}, NO_WEIGHTS, NO_WEIGHTS},
    {RF_OP_ATTEND, "attn.attend", RF_B_Q, {RF_B_ATTN_OUT}, NO_WEIGHTS, NO_WEIGHTS},
    {RF_OP_MATMUL_ADD,
     "attn.o_proj",
     RF_B_ATTN_OUT,
     {RF_B_RESIDUAL},
     {RF_W_O, RF_W_NONE, RF_W_NONE},
     {RF_W_O_BIAS, RF_W_NONE, RF_W_NONE}},
    {RF_OP_NORM,
     "mlp.norm",
     RF_B_RESIDUAL,
     {RF_B_MLP_IN},
     {RF_W_MLP_NORM, RF_W_NONE, RF_W_NONE},
     NO_WEIGHTS},
    {RF_OP_MATMUL,
     "mlp.gate_up",
     RF_B_MLP_IN,
     {RF_B_GATE, RF_B_UP},
     {RF_W_GATE, RF_W_UP, RF_W_NONE},
     {RF_W_GATE_BIAS, RF_W_UP_BIAS, RF_W_NONE}},
    {RF_OP_SWIGLU, "mlp.swiglu", RF_B_UP, {RF_B_GATE}, NO_WEIGHTS, NO_WEIGHTS},
    {RF_OP_MATMUL_ADD,
     "mlp.down_proj",
     RF_B_GATE,
     {RF_B_RESIDUAL},
     {RF_W_DOWN, RF_W_NONE, RF_W_NONE},
     {RF_W_DOWN_BIAS, RF_W_NONE, RF_W_NONE}},
};

static const rf_op llama_after[] = {
    {RF_OP_HEAD_NORM,
     "head.norm",
     RF_B_RESIDUAL,
     {RF_B_HEAD_IN},
     {RF_W_OUTPUT_NORM, RF_W_NONE, RF_W_NONE},
     NO_WEIGHTS},
    {RF_OP_HEAD,
     "head.logits",
     RF_B_HEAD_IN,
     {RF_B_LOGITS},
     {RF_W_OUTPUT, RF_W_NONE, RF_W_NONE},
     NO_WEIGHTS},
};

#define RECIPE(family)                                                                             \
    {                                                                                              \
        family##_before, family##_layer, family##_after, RF_ARRAY_COUNT(family##_before),          \
            RF_ARRAY_COUNT(family##_layer), RF_ARRAY_COUNT(family##_after)                         \
    }

static const struct {
    const char *architecture;
    rf_recipe recipe;
} recipes[] = {{"llama", RECIPE(llama)}};

const rf_recipe *rf_recipe_of(const char *architecture)
{
    rf_text name = {architecture, 0};
    while (architecture[name.length])
        name.length++;
    for (size_t i = 0; i < RF_ARRAY_COUNT(recipes); i++) {
        if (rf_text_is(name, recipes[i].architecture))
            return &recipes[i].recipe;
    }
    return NULL;
}

const char *rf_recipe_names(void)
{
    return "llama";
}

/* ---- buffers ----------------------------------------------------------------------------- */

static const char *const buffer_names[RF_B_COUNT] = {
    [RF_B_ITEMS] = "items",
    [RF_B_ROPE] = "rope",
    [RF_B_ROPE_SINK] = "rope_sink",
    [RF_B_RESIDUAL] = "residual",
    [RF_B_ATTN_IN] = "attn_in",
    [RF_B_Q] = "q",
    [RF_B_Q_SINK] = "q_sink",
    [RF_B_K] = "k",
    [RF_B_V] = "v",
    [RF_B_ATTN_OUT] = "attn_out",
    [RF_B_MLP_IN] = "mlp_in",
    [RF_B_GATE] = "gate",
    [RF_B_UP] = "up",
    [RF_B_HEAD_IN] = "head_in",
    [RF_B_LOGITS] = "logits",
    [RF_B_PACKED] = "packed",
    [RF_B_PARTS] = "parts",
    [RF_B_SCRATCH] = "scratch",
};

void rf_buffer_id(rf_buffer buffer, char id[RF_ID_BYTES])
{
    rf_print(id, RF_ID_BYTES, "forward.%s", buffer_names[buffer]);
}

typedef struct widest { /* over all layers */
    uint64_t q, k, v, attn_out, ffn;
    uint64_t scratch_bytes, packed_bytes, parts_bytes;
} widest;

static widest widest_of(const rf_config *config, const rf_weight *table, const rf_step_shape *shape)
{
    const rf_act *acts = shape->act;
    widest w = {0};
    for (uint32_t i = 0; i < config->layer_count; i++) {
        const rf_layer_config *layer = &config->layers[i];
        w.q = RF_MAX(w.q, (uint64_t)layer->heads * layer->k_width);
        w.k = RF_MAX(w.k, (uint64_t)layer->kv_heads * layer->k_width);
        w.v = RF_MAX(w.v, (uint64_t)layer->kv_heads * layer->v_width);
        w.attn_out = RF_MAX(w.attn_out, (uint64_t)layer->heads * layer->v_width);
        w.ffn = RF_MAX(w.ffn, (uint64_t)layer->ffn);
        uint64_t rows =
            rf_kv_scratch_bytes(layer->k_width, layer->v_width, layer->heads / layer->kv_heads);
        w.scratch_bytes = RF_MAX(w.scratch_bytes, rows);
        uint64_t seen = layer->window ? RF_MIN(layer->window, shape->capacity) : shape->capacity;
        uint64_t parts = rf_kv_parts_bytes(seen, layer->v_width, layer->heads / layer->kv_heads,
                                           layer->kv_heads);
        w.parts_bytes = RF_MAX(w.parts_bytes, parts);
    }
    for (uint32_t i = RF_W_OUTPUT; i < rf_weight_table_count(config); i++) {
        const rf_weight *weight = &table[i];
        if (!weight->tensor || weight->rows == 1)
            continue;
        for (int phase = 0; phase < RF_PHASES; phase++) {
            rf_act act = i == RF_W_OUTPUT ? RF_HEAD_ACT : acts[phase];
            rf_act_layout layout =
                rf_act_layout_of(rf_act_for(weight->format, act), weight->format, weight->k);
            w.packed_bytes = RF_MAX(w.packed_bytes, layout.row_bytes);
        }
        w.scratch_bytes = RF_MAX(w.scratch_bytes, rf_matmul_scratch_bytes(weight->k));
    }
    return w;
}

static uint64_t items_bytes(const rf_step_shape *shape)
{
    uint64_t lists = (1 + RF_PHASES) * sizeof(uint32_t);
    return (uint64_t)shape->chunk *
               (sizeof(rf_step_token) + sizeof(rf_step_run) + RF_PHASES * sizeof(uint32_t)) +
           (uint64_t)shape->logit_rows * lists;
}

rf_buffer_extent rf_buffer_extent_of(const rf_config *config, const rf_weight *table,
                                     const rf_step_shape *shape, rf_buffer buffer)
{
    widest w = widest_of(config, table, shape);
    uint64_t tokens = shape->chunk;
    switch (buffer) {
    case RF_B_ITEMS:
        return (rf_buffer_extent){"bytes", items_bytes(shape), 1};
    case RF_B_ROPE:
        return (rf_buffer_extent){"f32", tokens, config->rope.dims * sizeof(float)};
    case RF_B_RESIDUAL:
    case RF_B_ATTN_IN:
    case RF_B_MLP_IN:
        return (rf_buffer_extent){"f32", tokens, config->width * sizeof(float)};
    case RF_B_ROPE_SINK:
        return (rf_buffer_extent){"f32", shape->sinks ? tokens : 0,
                                  config->rope.dims * sizeof(float)};
    case RF_B_Q_SINK:
        return (rf_buffer_extent){"f32", shape->sinks ? tokens : 0, w.q * sizeof(float)};
    case RF_B_Q:
        return (rf_buffer_extent){"f32", tokens, w.q * sizeof(float)};
    case RF_B_K:
        return (rf_buffer_extent){"f32", tokens, w.k * sizeof(float)};
    case RF_B_V:
        return (rf_buffer_extent){"f32", tokens, w.v * sizeof(float)};
    case RF_B_ATTN_OUT:
        return (rf_buffer_extent){"f32", tokens, w.attn_out * sizeof(float)};
    case RF_B_GATE:
    case RF_B_UP:
        return (rf_buffer_extent){"f32", tokens, w.ffn * sizeof(float)};
    case RF_B_HEAD_IN:
        return (rf_buffer_extent){"f32", shape->logit_rows, config->width * sizeof(float)};
    case RF_B_LOGITS:
        return (rf_buffer_extent){"f32", shape->logit_rows, config->vocab_count * sizeof(float)};
    case RF_B_PACKED:
        return (rf_buffer_extent){"bytes", RF_MAX(tokens, shape->logit_rows), w.packed_bytes};
    case RF_B_PARTS: /* one worker has nobody to share with */
        return (rf_buffer_extent){
            "f32", shape->workers > 1 ? RF_MIN(tokens, RF_KV_SPLIT_TOKENS) : 0, w.parts_bytes};
    case RF_B_SCRATCH:
        return (rf_buffer_extent){"bytes", shape->workers, w.scratch_bytes};
    case RF_B_NONE:
    case RF_B_COUNT:
        break;
    }
    return (rf_buffer_extent){"bytes", 0, 1};
}

/* ---- lifetimes --------------------------------------------------------------------------- */

typedef struct lifetime {
    int32_t first, last;
} lifetime;

static void extend(lifetime *life, int32_t op)
{
    if (life->first < 0)
        life->first = op;
    life->last = op;
}

static void note_op(const rf_op *op, int32_t number, lifetime lives[RF_B_COUNT])
{
    if (op->in != RF_B_NONE)
        extend(&lives[op->in], number);
    for (int i = 0; i < RF_OP_OPERANDS; i++) {
        if (op->out[i] != RF_B_NONE)
            extend(&lives[op->out[i]], number);
    }
    bool is_matmul =
        op->kind == RF_OP_MATMUL || op->kind == RF_OP_MATMUL_ADD || op->kind == RF_OP_HEAD;
    if (is_matmul)
        extend(&lives[RF_B_PACKED], number);
    if (op->kind == RF_OP_ATTEND)
        extend(&lives[RF_B_PARTS], number);
    if (is_matmul || op->kind == RF_OP_ATTEND || op->kind == RF_OP_APPEND)
        extend(&lives[RF_B_SCRATCH], number);
}

/* The layers' ops run again for every layer: what comes into them from before, or goes out of them
 * behind, must not give its place to anything in between. */
static void span_layers(lifetime *life, int32_t first_in_layer, int32_t last_in_layer)
{
    bool is_in_layer = life->last >= first_in_layer && life->first <= last_in_layer;
    if (is_in_layer && life->first < first_in_layer)
        life->last = RF_MAX(life->last, last_in_layer);
    if (is_in_layer && life->last > last_in_layer)
        life->first = RF_MIN(life->first, first_in_layer);
}

rf_status rf_recipe_plan(rf_plan *plan, const rf_recipe *recipe, const rf_config *config,
                         const rf_weight *table, const rf_step_shape *shape, rf_error *err)
{
    lifetime lives[RF_B_COUNT];
    for (int i = 0; i < RF_B_COUNT; i++)
        lives[i] = (lifetime){-1, -1};
    int32_t number = 0;
    for (uint32_t i = 0; i < recipe->before_count; i++)
        note_op(&recipe->before[i], number++, lives);
    for (uint32_t i = 0; i < recipe->layer_count; i++)
        note_op(&recipe->layer[i], number++, lives);
    for (uint32_t i = 0; i < recipe->after_count; i++)
        note_op(&recipe->after[i], number++, lives);
    int32_t first_in_layer = (int32_t)recipe->before_count;
    int32_t last_in_layer = first_in_layer + (int32_t)recipe->layer_count - 1;
    for (int b = 0; b < RF_B_COUNT; b++)
        span_layers(&lives[b], first_in_layer, last_in_layer);
    lives[RF_B_ITEMS] = (lifetime){0, number - 1}; /* every op may look at them */
    if (lives[RF_B_Q_SINK].first >= 0)             /* attention reads them beside q */
        lives[RF_B_Q_SINK].last = lives[RF_B_Q].last;
    if (lives[RF_B_ROPE_SINK].first >= 0)
        lives[RF_B_ROPE_SINK].last = lives[RF_B_ROPE].last;
    for (int b = RF_B_ITEMS; b < RF_B_COUNT; b++) {
        rf_buffer_extent extent = rf_buffer_extent_of(config, table, shape, (rf_buffer)b);
        rf_plan_row row = {.scope = RF_SCOPE_FORWARD,
                           .domain = RF_DOMAIN_ANON,
                           .pool = RF_POOL_FORWARD,
                           .align = RF_REGION_ALIGN,
                           .first_op = lives[b].first,
                           .last_op = lives[b].last};
        rf_buffer_id((rf_buffer)b, row.id);
        rf_print(row.format, sizeof row.format, "%s", extent.format);
        if (extent.count == 0)
            continue; /* this run has no such buffer */
        if (!rf_mul(extent.count, extent.unit_bytes, &row.bytes)) {
            return rf_fail(err, RF_ERR_NO_FIT, row.id, "the size leaves 64 bits");
        }
        rf_status status = rf_plan_add(plan, &row, err);
        if (status)
            return status;
    }
    return RF_OK;
}

void rf_recipe_op_name(const rf_recipe *recipe, uint32_t layer_count, uint32_t op, char *text,
                       size_t capacity)
{
    uint32_t in_layers = layer_count * recipe->layer_count;
    if (op < recipe->before_count) {
        rf_print(text, capacity, "%s", recipe->before[op].name);
    } else if (op - recipe->before_count < in_layers) {
        uint32_t at = op - recipe->before_count;
        rf_print(text, capacity, "layers[%u].%s", at / recipe->layer_count,
                 recipe->layer[at % recipe->layer_count].name);
    } else if (op - recipe->before_count - in_layers < recipe->after_count) {
        rf_print(text, capacity, "%s", recipe->after[op - recipe->before_count - in_layers].name);
    } else {
        rf_print(text, capacity, "?");
    }
}
