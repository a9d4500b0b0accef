/* tests/unit/test_recipe.c: what a recipe makes of the plan.
 *
 * The property: played over the offsets that were planned, two or more layers never read a byte
 * that something else has written since. The test has its own table of what each kind of op reads
 * and writes, so a lifetime that the plan gets wrong is seen as the value that it would destroy.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "model/model.h"

#include <stdlib.h>
#include <string.h>

/* ---- a random model ---------------------------------------------------------------------- */

static uint64_t random_below(uint64_t *state, uint64_t limit)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % limit;
}

#define TABLE_MAX (RF_W_MODEL_COUNT + 4 * RF_W_LAYER_COUNT)

typedef struct sample { /* a geometry; weights only as far as sizes go */
    rf_config config;
    rf_weight table[TABLE_MAX];
    rf_step_shape shape;
    rf_gguf_tensor tensor;
    rf_plan_row rows[64];
    rf_plan plan;
} sample;

static void set_weight(sample *s, uint32_t layer, rf_weight_slot slot, rf_format format,
                       uint64_t rows, uint64_t k)
{
    uint32_t index = slot < RF_W_MODEL_COUNT ? slot : slot + layer * RF_W_LAYER_COUNT;
    uint64_t row_bytes = 0;
    if (!rf_format_row_bytes(format, k, &row_bytes)) {
        format = RF_F32;
        row_bytes = k * sizeof(float);
    }
    s->table[index] = (rf_weight){.tensor = &s->tensor,
                                  .format = format,
                                  .rows = (uint32_t)rows,
                                  .k = (uint32_t)k,
                                  .row_bytes = row_bytes};
}

static rf_format random_format(uint64_t *seed)
{
    static const rf_format formats[] = {RF_F32,  RF_F16,  RF_BF16,   RF_Q8_0,
                                        RF_Q4_K, RF_Q6_K, RF_IQ4_NL, RF_TQ1_0};
    return formats[random_below(seed, RF_ARRAY_COUNT(formats))];
}

static void fill_layer(sample *s, uint32_t index, uint64_t *seed)
{
    rf_layer_config *layer = &s->config.layers[index];
    layer->kv_heads = 1 + (uint32_t)random_below(seed, 4);
    layer->heads = layer->kv_heads * (1 + (uint32_t)random_below(seed, 4));
    layer->k_width = 8 * (1 + (uint32_t)random_below(seed, 16));
    layer->v_width = 8 * (1 + (uint32_t)random_below(seed, 16));
    layer->ffn = 1 + (uint32_t)random_below(seed, 600);
    uint64_t width = s->config.width, heads = layer->heads, kv_heads = layer->kv_heads;
    set_weight(s, index, RF_W_Q, random_format(seed), heads * layer->k_width, width);
    set_weight(s, index, RF_W_K, random_format(seed), kv_heads * layer->k_width, width);
    set_weight(s, index, RF_W_V, random_format(seed), kv_heads * layer->v_width, width);
    set_weight(s, index, RF_W_O, random_format(seed), width, heads * layer->v_width);
    set_weight(s, index, RF_W_GATE, random_format(seed), layer->ffn, width);
    set_weight(s, index, RF_W_UP, random_format(seed), layer->ffn, width);
    set_weight(s, index, RF_W_DOWN, random_format(seed), width, layer->ffn);
}

static void fill_sample(sample *s, uint64_t seed)
{
    memset(s, 0, sizeof *s);
    s->config.layer_count = 1 + (uint32_t)random_below(&seed, 4);
    s->config.width = 1 + (uint32_t)random_below(&seed, 500);
    if (random_below(&seed, 2))
        s->config.width = 256 * (1 + (uint32_t)random_below(&seed, 3));
    s->config.vocab_count = 1 + (uint32_t)random_below(&seed, 5000);
    s->config.rope.dims = 2 * (1 + (uint32_t)random_below(&seed, 64));
    uint32_t chunk = 1 + (uint32_t)random_below(&seed, 200);
    s->shape = (rf_step_shape){.chunk = chunk,
                               .logit_rows = 1 + (uint32_t)random_below(&seed, chunk),
                               .workers = 1 + (uint32_t)random_below(&seed, 8),
                               .slots = 1 + (uint32_t)random_below(&seed, 8),
                               .sinks = seed % 2 ? 4 : 0,
                               .capacity = 1000,
                               .act = {RF_ACT_INT16, RF_ACT_INT16}};
    set_weight(s, 0, RF_W_OUTPUT, random_format(&seed), s->config.vocab_count, s->config.width);
    for (uint32_t i = 0; i < s->config.layer_count; i++)
        fill_layer(s, i, &seed);
}

static void plan_sample(sample *s, const rf_recipe *recipe)
{
    rf_error err = {0};
    rf_plan_init(&s->plan, s->rows, RF_ARRAY_COUNT(s->rows));
    rf_status status = rf_recipe_plan(&s->plan, recipe, &s->config, s->table, &s->shape, &err);
    if (status == RF_OK)
        status = rf_plan_layout(&s->plan, 0, &err);
    if (status == RF_OK)
        status = rf_plan_verify(&s->plan, &err);
    if (status != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
}

/* ---- playing a recipe -------------------------------------------------------------------- */

typedef struct slab { /* who wrote each unit of 64 bytes last */
    uint8_t owner[1 << 20];
    const rf_plan_row *rows[RF_B_COUNT];
    uint64_t units[RF_B_COUNT]; /* of the buffer */
} slab;

static void find_buffers(const sample *s, slab *m)
{
    uint64_t arena = s->plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON];
    memset(m, 0, sizeof *m);
    assert_true(arena / RF_REGION_ALIGN <= sizeof m->owner);
    for (int b = RF_B_ITEMS; b < RF_B_COUNT; b++) {
        char id[RF_ID_BYTES];
        rf_buffer_id((rf_buffer)b, id);
        m->rows[b] = rf_plan_find(&s->plan, id);
        bool is_of_sinks = b == RF_B_ROPE_SINK || b == RF_B_Q_SINK;
        bool is_there = !is_of_sinks || s->shape.sinks > 0;
        if (b == RF_B_PARTS)
            is_there = s->shape.workers > 1;
        assert_true((m->rows[b] != NULL) == is_there);
        if (m->rows[b])
            m->units[b] = (m->rows[b]->bytes + RF_REGION_ALIGN - 1) / RF_REGION_ALIGN;
    }
}

static void write_buffer(slab *m, rf_buffer buffer)
{
    memset(m->owner + m->rows[buffer]->offset / RF_REGION_ALIGN, buffer, m->units[buffer]);
}

/* The buffer that wrote over this one; RF_B_COUNT when nobody did. */
static rf_buffer overwritten_by(const slab *m, rf_buffer buffer)
{
    const uint8_t *owner = m->owner + m->rows[buffer]->offset / RF_REGION_ALIGN;
    for (uint64_t i = 0; i < m->units[buffer]; i++) {
        if (owner[i] != buffer)
            return (rf_buffer)owner[i];
    }
    return RF_B_COUNT;
}

#define READS_OUT0 1u /* beside in, which every op reads */
#define READS_OUT1 2u
#define WRITES     4u /* its outs */
#define PACKS      8u
#define SCRATCHES  16u

static const unsigned effects[] = {
    [RF_OP_ROPE_TABLE] = WRITES,
    [RF_OP_EMBED] = WRITES,
    [RF_OP_NORM] = WRITES,
    [RF_OP_MATMUL] = WRITES | PACKS | SCRATCHES,
    [RF_OP_MATMUL_ADD] = READS_OUT0 | WRITES | PACKS | SCRATCHES,
    [RF_OP_ROPE] = READS_OUT0 | READS_OUT1 | WRITES,
    [RF_OP_APPEND] = READS_OUT0,
    [RF_OP_ATTEND] = WRITES | SCRATCHES,
    [RF_OP_SWIGLU] = READS_OUT0 | WRITES,
    [RF_OP_HEAD_NORM] = WRITES,
    [RF_OP_HEAD] = WRITES | PACKS | SCRATCHES,
};

static bool is_whole(const slab *m, rf_buffer buffer, const rf_op *op, char *complaint,
                     size_t capacity)
{
    rf_buffer by = overwritten_by(m, buffer);
    if (by == RF_B_COUNT)
        return true;
    snprintf(complaint, capacity, "%s needs %s, which %s has overwritten", op->name,
             m->rows[buffer]->id, by ? m->rows[by]->id : "nothing yet");
    return false;
}

static bool play_op(slab *m, const rf_op *op, char *complaint, size_t capacity)
{
    unsigned effect = effects[op->kind];
    rf_buffer used[12];
    int count = 0, reads;
    used[count++] = RF_B_ITEMS; /* every op may look at them */
    if (op->in != RF_B_NONE)
        used[count++] = op->in;
    if (effect & READS_OUT0)
        used[count++] = op->out[0];
    if (effect & READS_OUT1)
        used[count++] = op->out[1];
    if (op->kind == RF_OP_ROPE && m->rows[RF_B_ROPE_SINK])
        used[count++] = RF_B_ROPE_SINK;
    if (op->kind == RF_OP_ATTEND && m->rows[RF_B_Q_SINK])
        used[count++] = RF_B_Q_SINK;
    reads = count;
    for (int i = 0; i < reads; i++) {
        if (!is_whole(m, used[i], op, complaint, capacity))
            return false;
    }
    for (int i = 0; (effect & WRITES) && i < RF_OP_OPERANDS; i++) {
        if (op->out[i] != RF_B_NONE && m->rows[op->out[i]])
            used[count++] = op->out[i];
    }
    if (effect & PACKS)
        used[count++] = RF_B_PACKED;
    if (effect & SCRATCHES)
        used[count++] = RF_B_SCRATCH;
    if (op->kind == RF_OP_ATTEND && m->rows[RF_B_PARTS])
        used[count++] = RF_B_PARTS;
    for (int i = reads; i < count; i++)
        write_buffer(m, used[i]);
    for (int i = 0; i < count; i++) { /* none of them lies upon another */
        if (!is_whole(m, used[i], op, complaint, capacity))
            return false;
    }
    return true;
}

/* False, and a sentence, when an op reads what was written over. */
static bool play_recipe(const sample *s, const rf_recipe *recipe, uint32_t layer_count,
                        rf_buffer result, char *complaint, size_t capacity)
{
    static slab m;
    find_buffers(s, &m);
    write_buffer(&m, RF_B_ITEMS);
    for (uint32_t i = 0; i < recipe->before_count; i++) {
        if (!play_op(&m, &recipe->before[i], complaint, capacity))
            return false;
    }
    for (uint32_t i = 0; i < layer_count * recipe->layer_count; i++) {
        if (!play_op(&m, &recipe->layer[i % recipe->layer_count], complaint, capacity))
            return false;
    }
    for (uint32_t i = 0; i < recipe->after_count; i++) {
        if (!play_op(&m, &recipe->after[i], complaint, capacity))
            return false;
    }
    static const rf_op caller = {.name = "the caller"};
    return is_whole(&m, result, &caller, complaint, capacity);
}

static void no_buffer_is_overwritten_before_it_was_read(void **state)
{
    (void)state;
    static sample s;
    const rf_recipe *recipe = rf_recipe_of("llama");
    assert_non_null(recipe);
    for (uint64_t seed = 0; seed < 400; seed++) {
        char complaint[256];
        fill_sample(&s, seed);
        plan_sample(&s, recipe);
        for (uint32_t layers = 1; layers <= 3; layers++) {
            if (!play_recipe(&s, recipe, layers, RF_B_LOGITS, complaint, sizeof complaint))
                fail_msg("seed %llu, %u layers: %s", (unsigned long long)seed, layers, complaint);
        }
    }
}

/* Families to come: a buffer that every layer writes and only the end reads, one that comes from
 * before and is last read early in a layer. */
static void buffers_that_cross_the_layers_are_kept_in_any_recipe(void **state)
{
    (void)state;
    static sample s;
    static const rf_op before[] = {{RF_OP_EMBED, "in", RF_B_NONE, {RF_B_RESIDUAL}, {0}, {0}},
                                   {RF_OP_NORM, "up", RF_B_RESIDUAL, {RF_B_UP}, {0}, {0}}};
    static const rf_op layer[] = {{RF_OP_NORM, "a", RF_B_UP, {RF_B_Q}, {0}, {0}},
                                  {RF_OP_NORM, "b", RF_B_Q, {RF_B_GATE}, {0}, {0}},
                                  {RF_OP_NORM, "c", RF_B_GATE, {RF_B_HEAD_IN}, {0}, {0}},
                                  {RF_OP_NORM, "d", RF_B_GATE, {RF_B_ATTN_IN}, {0}, {0}},
                                  {RF_OP_NORM, "e", RF_B_ATTN_IN, {RF_B_ATTN_OUT}, {0}, {0}}};
    static const rf_op after[] = {{RF_OP_NORM, "f", RF_B_HEAD_IN, {RF_B_MLP_IN}, {0}, {0}},
                                  {RF_OP_NORM, "g", RF_B_MLP_IN, {RF_B_LOGITS}, {0}, {0}}};
    static const rf_recipe recipe = {
        before, layer, after, RF_ARRAY_COUNT(before), RF_ARRAY_COUNT(layer), RF_ARRAY_COUNT(after)};
    for (uint64_t seed = 0; seed < 200; seed++) {
        char complaint[256];
        fill_sample(&s, seed);
        plan_sample(&s, &recipe);
        /* Written by every layer, perhaps in parts: its place is its own from the first on. */
        assert_int_equal(rf_plan_find(&s.plan, "forward.head_in")->first_op, 2);
        assert_int_equal(rf_plan_find(&s.plan, "forward.up")->last_op, 6);
        if (!play_recipe(&s, &recipe, 3, RF_B_LOGITS, complaint, sizeof complaint))
            fail_msg("seed %llu: %s", (unsigned long long)seed, complaint);
    }
}

/* The test must be able to fail: the bug that was, planted in the plan itself. */
static void a_rope_table_that_dies_in_the_first_layer_is_seen(void **state)
{
    (void)state;
    static sample s;
    const rf_recipe *recipe = rf_recipe_of("llama");
    uint32_t seen = 0;
    for (uint64_t seed = 0; seed < 50; seed++) {
        char complaint[256] = "";
        rf_error err = {0};
        fill_sample(&s, seed);
        rf_plan_init(&s.plan, s.rows, RF_ARRAY_COUNT(s.rows));
        assert_int_equal(rf_recipe_plan(&s.plan, recipe, &s.config, s.table, &s.shape, &err),
                         RF_OK);
        rf_plan_row *rope = (rf_plan_row *)(uintptr_t)rf_plan_find(&s.plan, "forward.rope");
        rope->last_op = (int32_t)recipe->before_count + 2;
        assert_int_equal(rf_plan_layout(&s.plan, 0, &err), RF_OK);
        if (play_recipe(&s, recipe, 2, RF_B_LOGITS, complaint, sizeof complaint))
            continue;
        assert_non_null(strstr(complaint, "attn.rope needs forward.rope"));
        assert_true(play_recipe(&s, recipe, 1, RF_B_LOGITS, complaint, sizeof complaint));
        seen++;
    }
    assert_true(seen > 10);
}

static void the_slab_is_smaller_than_its_buffers_together(void **state)
{
    (void)state;
    static sample s;
    for (uint64_t seed = 0; seed < 20; seed++) {
        uint64_t sum = 0;
        fill_sample(&s, seed);
        plan_sample(&s, rf_recipe_of("llama"));
        for (uint32_t i = 0; i < s.plan.row_count; i++)
            sum += s.rows[i].bytes;
        uint64_t slab_bytes = s.plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON];
        assert_true(slab_bytes > 0);
        assert_true(slab_bytes < sum);
    }
}

static void buffers_are_as_large_as_the_widest_layer_needs(void **state)
{
    (void)state;
    static sample s;
    fill_sample(&s, 5);
    s.config.layer_count = 2;
    s.config.layers[0] = (rf_layer_config){8, 2, 16, 24, 100, 0};
    s.config.layers[1] = (rf_layer_config){2, 2, 32, 8, 70, 0};
    const struct {
        rf_buffer buffer;
        uint64_t count, unit_bytes;
    } cases[] = {
        {RF_B_Q, s.shape.chunk, 8 * 16 * 4},
        {RF_B_K, s.shape.chunk, 2 * 32 * 4},
        {RF_B_V, s.shape.chunk, 2 * 24 * 4},
        {RF_B_ATTN_OUT, s.shape.chunk, 8 * 24 * 4},
        {RF_B_GATE, s.shape.chunk, 100 * 4},
        {RF_B_UP, s.shape.chunk, 100 * 4},
        {RF_B_RESIDUAL, s.shape.chunk, s.config.width * 4},
        {RF_B_ROPE, s.shape.chunk, s.config.rope.dims * 4},
        {RF_B_HEAD_IN, s.shape.logit_rows, s.config.width * 4},
        {RF_B_LOGITS, s.shape.logit_rows, s.config.vocab_count * 4},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        rf_buffer_extent extent =
            rf_buffer_extent_of(&s.config, s.table, &s.shape, cases[i].buffer);
        assert_string_equal(extent.format, "f32");
        assert_int_equal(extent.count, cases[i].count);
        assert_int_equal(extent.unit_bytes, cases[i].unit_bytes);
    }
    rf_buffer_extent scratch = rf_buffer_extent_of(&s.config, s.table, &s.shape, RF_B_SCRATCH);
    assert_int_equal(scratch.count, s.shape.workers);
    assert_int_equal(scratch.unit_bytes % RF_CACHE_LINE, 0); /* each worker's part is aligned */
    assert_true(scratch.unit_bytes >= rf_kv_scratch_bytes(16, 24, 4));
    assert_true(scratch.unit_bytes >= rf_kv_scratch_bytes(32, 8, 1));
}

/* The arrays of a step's input lie inside their buffer, aligned, and not upon each other. */
static void the_items_of_a_full_step_fit_into_their_buffer(void **state)
{
    (void)state;
    static sample s;
    for (uint64_t seed = 0; seed < 50; seed++) {
        fill_sample(&s, seed);
        rf_buffer_extent extent = rf_buffer_extent_of(&s.config, s.table, &s.shape, RF_B_ITEMS);
        uint64_t bytes = extent.count * extent.unit_bytes;
        uint8_t *memory = aligned_alloc(64, (bytes + 63) & ~63ull);
        assert_non_null(memory);
        rf_step_input input;
        rf_step_input_init(&input, memory, &s.shape);
        assert_ptr_equal(input.tokens, memory);
        assert_true((uintptr_t)(input.tokens + s.shape.chunk) <= (uintptr_t)input.runs);
        assert_true((uintptr_t)(input.runs + s.shape.chunk) <= (uintptr_t)input.logit_tokens);
        assert_true((uint8_t *)(input.logit_tokens + s.shape.logit_rows) <= memory + bytes);
        assert_int_equal((uintptr_t)input.runs % _Alignof(rf_step_run), 0);
        free(memory);
    }
}

static void ops_have_the_names_of_their_place(void **state)
{
    (void)state;
    const rf_recipe *recipe = rf_recipe_of("llama");
    static const struct {
        uint32_t op;
        const char *name;
    } cases[] = {{0, "rope_table"},
                 {1, "embed"},
                 {2, "layers[0].attn.norm"},
                 {3, "layers[0].attn.qkv"},
                 {6, "layers[0].attn.attend"},
                 {11, "layers[0].mlp.down_proj"},
                 {12, "layers[1].attn.norm"},
                 {31, "layers[2].mlp.down_proj"},
                 {32, "head.norm"},
                 {33, "head.logits"},
                 {34, "?"},
                 {UINT32_MAX, "?"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        char text[64];
        rf_recipe_op_name(recipe, 3, cases[i].op, text, sizeof text);
        assert_string_equal(text, cases[i].name);
    }
}

static void only_known_architectures_have_a_recipe(void **state)
{
    (void)state;
    assert_non_null(rf_recipe_of("llama"));
    assert_null(rf_recipe_of("llam"));
    assert_null(rf_recipe_of("llama2"));
    assert_null(rf_recipe_of(""));
    assert_non_null(strstr(rf_recipe_names(), "llama"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_buffer_is_overwritten_before_it_was_read),
        cmocka_unit_test(buffers_that_cross_the_layers_are_kept_in_any_recipe),
        cmocka_unit_test(a_rope_table_that_dies_in_the_first_layer_is_seen),
        cmocka_unit_test(the_slab_is_smaller_than_its_buffers_together),
        cmocka_unit_test(buffers_are_as_large_as_the_widest_layer_needs),
        cmocka_unit_test(the_items_of_a_full_step_fit_into_their_buffer),
        cmocka_unit_test(ops_have_the_names_of_their_place),
        cmocka_unit_test(only_known_architectures_have_a_recipe),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
