/* tests/unit/test_model.c: every range check of the header, every shape check of the weights, and
 * the frequencies of RoPE against formulas in double. Recipes have a file of their own.
 *
 * Files are headers built in memory; no test here reads a tensor, so they have no data.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "model/model.h"
#include "tiny_gguf.h"

#include <math.h>

/* ---- a header in which one thing is different -------------------------------------------- */

typedef enum change_kind {
    NO_CHANGE,
    DROP,
    U32,
    I32,
    U64,
    F32,
    F64,
    TEXT,
    BOOL,
    U32_ARRAY,
    F32_ARRAY
} change_kind;

typedef struct change { /* a key that has another value, or none */
    const char *key;
    change_kind kind;
    double number; /* of arrays: every element */
    const char *text;
    uint32_t count;
} change;

static void put_number(tiny_gguf *file, const char *key, change_kind kind, double number)
{
    uint64_t bits = 0;
    if (kind == U32)
        tiny_key_u32(file, key, (uint32_t)number);
    if (kind == I32)
        tiny_key_bits(file, key, RF_GGUF_I32, (uint32_t)(int32_t)number, 4);
    if (kind == U64)
        tiny_key_bits(file, key, RF_GGUF_U64, (uint64_t)number, 8);
    if (kind == F32)
        tiny_key_f32(file, key, (float)number);
    if (kind == F64) {
        memcpy(&bits, &number, sizeof bits);
        tiny_key_bits(file, key, RF_GGUF_F64, bits, 8);
    }
    if (kind == BOOL)
        tiny_key_bool(file, key, number != 0);
}

static void put_change(tiny_gguf *file, const change *c)
{
    uint32_t whole[8];
    float floats[8];
    for (int i = 0; i < 8; i++) {
        whole[i] = (uint32_t)c->number;
        floats[i] = (float)c->number;
    }
    switch (c->kind) {
    case NO_CHANGE:
    case DROP:
        break;
    case TEXT:
        tiny_key_text(file, c->key, c->text);
        break;
    case U32_ARRAY:
        tiny_key_array(file, c->key, RF_GGUF_U32, c->count, whole, 4);
        break;
    case F32_ARRAY:
        tiny_key_array(file, c->key, RF_GGUF_F32, c->count, floats, 4);
        break;
    default:
        put_number(file, c->key, c->kind, c->number);
        break;
    }
}

static const change defaults[] = {
    {"general.architecture", TEXT, 0, "llama", 0},
    {"llama.block_count", U32, 2, NULL, 0},
    {"llama.context_length", U32, 64, NULL, 0},
    {"llama.embedding_length", U32, 32, NULL, 0},
    {"llama.feed_forward_length", U32, 48, NULL, 0},
    {"llama.attention.head_count", U32, 4, NULL, 0},
    {"llama.attention.head_count_kv", U32, 2, NULL, 0},
    {"llama.attention.layer_norm_rms_epsilon", F32, 1e-5, NULL, 0},
};

static void put_keys(tiny_gguf *file, const change *changes, size_t change_count)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(defaults); i++) {
        bool is_changed = false;
        for (size_t j = 0; j < change_count; j++)
            is_changed = is_changed || strcmp(changes[j].key, defaults[i].key) == 0;
        if (!is_changed)
            put_change(file, &defaults[i]);
    }
    for (size_t j = 0; j < change_count; j++)
        put_change(file, &changes[j]);
}

/* ---- its tensors ------------------------------------------------------------------------- */

typedef struct tensor { /* one that is different; type_id RF_FORMAT_NONE: left out */
    const char *name;
    uint32_t type_id, rank;
    uint64_t shape[2];
} tensor;

static void put_tensor(tiny_gguf *file, const tensor *t, const tensor *other, uint64_t *offset)
{
    if (other && strcmp(other->name, t->name) == 0)
        t = other;
    if (t->type_id == RF_FORMAT_NONE)
        return;
    uint64_t row_bytes = 0;
    assert_true(rf_format_row_bytes((rf_format)t->type_id, t->shape[0], &row_bytes));
    tiny_tensor(file, t->name, t->type_id, t->rank, t->shape, *offset);
    uint64_t bytes = row_bytes * (t->rank == 2 ? t->shape[1] : 1);
    *offset += (bytes + file->alignment - 1) & ~(file->alignment - 1);
}

/* The tensors of two layers of width 32, 4 heads, 2 KV heads, ffn 48, vocabulary 50. */
static void put_tensors(tiny_gguf *file, const tensor *other)
{
    static const tensor of_model[] = {{"token_embd.weight", RF_F32, 2, {32, 50}},
                                      {"output_norm.weight", RF_F32, 1, {32, 0}},
                                      {"output.weight", RF_F32, 2, {32, 50}}};
    static const tensor of_layer[] = {
        {"attn_norm.weight", RF_F32, 1, {32, 0}},    {"attn_q.weight", RF_F32, 2, {32, 32}},
        {"attn_k.weight", RF_F32, 2, {32, 16}},      {"attn_v.weight", RF_F32, 2, {32, 16}},
        {"attn_output.weight", RF_F32, 2, {32, 32}}, {"ffn_norm.weight", RF_F32, 1, {32, 0}},
        {"ffn_gate.weight", RF_F32, 2, {32, 48}},    {"ffn_up.weight", RF_F32, 2, {32, 48}},
        {"ffn_down.weight", RF_F32, 2, {48, 32}},    {"attn_q.bias", RF_F32, 1, {32, 0}},
        {"ffn_down.bias", RF_F32, 1, {32, 0}},
    };
    static char names[2][RF_ARRAY_COUNT(of_layer)][RF_ID_BYTES]; /* the builder borrows them */
    uint64_t offset = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(of_model); i++)
        put_tensor(file, &of_model[i], other, &offset);
    for (uint32_t layer = 0; layer < 2; layer++) {
        for (size_t i = 0; i < RF_ARRAY_COUNT(of_layer); i++) {
            tensor t = of_layer[i];
            snprintf(names[layer][i], RF_ID_BYTES, "blk.%u.%s", layer, t.name);
            t.name = names[layer][i];
            put_tensor(file, &t, other, &offset);
        }
    }
}

/* ---- a parsed header --------------------------------------------------------------------- */

typedef struct header {
    tiny_gguf file;
    rf_gguf gguf;
    void *scratch;
} header;

static header parse(tiny_gguf file, size_t data_bytes)
{
    header h = {.file = file};
    rf_error err = {0};
    tiny_finish(&h.file, data_bytes);
    assert_int_equal(rf_gguf_scan(h.file.bytes, h.file.size, &h.gguf, &err), RF_OK);
    h.gguf.keys = calloc(h.gguf.key_count, sizeof *h.gguf.keys);
    h.gguf.tensors = calloc(h.gguf.tensor_count + 1, sizeof *h.gguf.tensors);
    h.scratch = malloc(rf_gguf_scratch_bytes(&h.gguf) + 1);
    rf_status status = rf_gguf_read(&h.gguf, h.scratch, &err);
    if (status != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
    return h;
}

static void release(header *h)
{
    free(h->gguf.keys);
    free(h->gguf.tensors);
    free(h->scratch);
    tiny_free(&h->file);
}

static header make_header(const change *changes, size_t change_count, const tensor *other)
{
    tiny_gguf file = tiny_begin(3);
    put_keys(&file, changes, change_count);
    put_tensors(&file, other);
    return parse(file, 0);
}

static rf_status read_changed(const change *changes, size_t change_count, rf_config *config,
                              rf_error *err)
{
    header h = make_header(changes, change_count, NULL);
    rf_status status = rf_config_read(&h.gguf, config, err);
    config->rope.freqs = NULL; /* lies in the header that is released */
    release(&h);
    return status;
}

/* ---- configuration ----------------------------------------------------------------------- */

static void a_plain_header_is_read_as_it_is_written(void **state)
{
    (void)state;
    static rf_config config;
    rf_error err = {0};
    assert_int_equal(read_changed(NULL, 0, &config, &err), RF_OK);
    assert_string_equal(config.architecture, "llama");
    assert_int_equal(config.layer_count, 2);
    assert_int_equal(config.width, 32);
    assert_int_equal(config.vocab_count, 50);
    assert_int_equal(config.train_ctx, 64);
    assert_true(config.norm_eps == 1e-5f);
    for (uint32_t i = 0; i < 2; i++) {
        const rf_layer_config *layer = &config.layers[i];
        assert_int_equal(layer->heads, 4);
        assert_int_equal(layer->kv_heads, 2);
        assert_int_equal(layer->k_width, 8);
        assert_int_equal(layer->v_width, 8);
        assert_int_equal(layer->ffn, 48);
        assert_int_equal(layer->window, 0);
    }
    assert_int_equal(config.rope.dims, 8); /* documented defaults of the format */
    assert_true(config.rope.base == 10000.0);
    assert_int_equal(config.rope.scaling, RF_ROPE_NONE);
}

static void what_may_differ_between_layers_or_be_left_out_is_read(void **state)
{
    (void)state;
    static rf_config config;
    static const change changes[] = {
        {"llama.attention.head_count", U32_ARRAY, 8, NULL, 2},
        {"llama.attention.head_count_kv", DROP, 0, NULL, 0},
        {"llama.attention.key_length", U32, 16, NULL, 0},
        {"llama.attention.value_length", U32_ARRAY, 24, NULL, 2},
        {"llama.feed_forward_length", U64, 96, NULL, 0},
        {"llama.rope.freq_base", F64, 500000.0, NULL, 0},
        {"llama.rope.dimension_count", U32, 12, NULL, 0},
        {"llama.attention.scale", F32, 0.25, NULL, 0},
        {"llama.expert_count", U32, 0, NULL, 0},
        {"llama.logit_scale", F32, 1.0, NULL, 0},
        {"general.name", TEXT, 0, "tiny", 0},
    };
    rf_error err = {0};
    assert_int_equal(read_changed(changes, RF_ARRAY_COUNT(changes), &config, &err), RF_OK);
    assert_string_equal(config.name, "tiny");
    assert_int_equal(config.layers[1].heads, 8);
    assert_int_equal(config.layers[1].kv_heads, 8); /* as many as heads */
    assert_int_equal(config.layers[1].k_width, 16);
    assert_int_equal(config.layers[1].v_width, 24);
    assert_int_equal(config.layers[0].ffn, 96);
    assert_int_equal(config.rope.dims, 12);
    assert_true(config.rope.base == 500000.0);
    assert_true(config.attention_scale == 0.25f);
}

#define BAD         RF_ERR_BAD_MODEL
#define UNSUPPORTED RF_ERR_UNSUPPORTED

static const struct {
    change change;
    rf_status status;
    const char *where; /* NULL: the key itself */
} wrong_keys[] = {
    {{"general.architecture", DROP, 0, NULL, 0}, BAD, NULL},
    {{"general.architecture", U32, 1, NULL, 0}, BAD, NULL},
    {{"general.architecture", TEXT, 0, "", 0}, BAD, NULL},
    {{"general.architecture", TEXT, 0, "gpt2", 0}, UNSUPPORTED, NULL},
    {{"general.architecture", TEXT, 0, "llama4", 0}, UNSUPPORTED, NULL},
    {{"llama.block_count", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.block_count", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.block_count", U32, 1025, NULL, 0}, BAD, NULL},
    {{"llama.block_count", U32, 4294967295.0, NULL, 0}, BAD, NULL},
    {{"llama.block_count", U64, 4294967298.0, NULL, 0}, BAD, NULL},
    {{"llama.block_count", I32, -1, NULL, 0}, BAD, NULL},
    {{"llama.block_count", F32, 2, NULL, 0}, BAD, NULL},
    {{"llama.block_count", TEXT, 0, "2", 0}, BAD, NULL},
    {{"llama.block_count", U32_ARRAY, 2, NULL, 1}, BAD, NULL},
    {{"llama.context_length", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.context_length", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.context_length", U64, 1e15, NULL, 0}, BAD, NULL},
    {{"llama.context_length", U32_ARRAY, 64, NULL, 2}, BAD, NULL},
    {{"llama.embedding_length", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.embedding_length", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.embedding_length", U32, 1048577, NULL, 0}, BAD, NULL},
    {{"llama.embedding_length", U32, 36, NULL, 0}, UNSUPPORTED, "llama.attention.key_length"},
    {{"llama.embedding_length", U32, 33, NULL, 0}, BAD, "llama.attention.head_count"},
    {{"llama.feed_forward_length", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.feed_forward_length", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.feed_forward_length", U32_ARRAY, 48, NULL, 3}, BAD, NULL},
    {{"llama.feed_forward_length", U32_ARRAY, 48, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count", U32, 1025, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count", U32_ARRAY, 4, NULL, 1}, BAD, NULL},
    {{"llama.attention.head_count_kv", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count_kv", U32, 3, NULL, 0}, BAD, NULL},
    {{"llama.attention.head_count_kv", U32, 8, NULL, 0}, BAD, NULL},
    {{"llama.attention.key_length", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.key_length", U32, 12, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attention.key_length", U32, 8192, NULL, 0}, BAD, NULL},
    {{"llama.attention.value_length", U32, 4, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", DROP, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F32, 0, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F32, -1e-5, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F32, NAN, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F32, INFINITY, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", TEXT, 0, "1e-5", 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F32_ARRAY, 1e-5, NULL, 2}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F64, 1e300, NULL, 0}, BAD, NULL},
    {{"llama.attention.layer_norm_rms_epsilon", F64, 1e-300, NULL, 0}, BAD, NULL},
    {{"llama.attention.scale", F32, -1, NULL, 0}, BAD, NULL},
    {{"llama.attention.scale", F32, NAN, NULL, 0}, BAD, NULL},
    {{"llama.attention.scale", F64, 1e-300, NULL, 0}, BAD, NULL},
    {{"llama.rope.dimension_count", U32, 0, NULL, 0}, BAD, NULL},
    {{"llama.rope.dimension_count", U32, 7, NULL, 0}, BAD, NULL},
    {{"llama.rope.dimension_count", U32, 10, NULL, 0}, BAD, NULL},
    {{"llama.rope.freq_base", F32, 0, NULL, 0}, BAD, NULL},
    {{"llama.rope.freq_base", F32, -10000, NULL, 0}, BAD, NULL},
    {{"llama.rope.freq_base", F32, NAN, NULL, 0}, BAD, NULL},
    {{"llama.rope.freq_base", F32, INFINITY, NULL, 0}, BAD, NULL},
    {{"llama.rope.freq_base", F32_ARRAY, 10000, NULL, 2}, BAD, NULL},
    {{"llama.rope.scale_linear", F32, 0, NULL, 0}, BAD, NULL},
    {{"llama.rope.scaling.type", U32, 1, NULL, 0}, BAD, NULL},
    {{"llama.rope.scaling.type", TEXT, 0, "yarn", 0}, UNSUPPORTED, NULL},
    {{"llama.rope.scaling.type", TEXT, 0, "linear", 0}, BAD, "llama.rope.scaling.factor"},
    {{"llama.rope.scaling.type", TEXT, 0, "llama3", 0}, BAD, "llama.rope.scaling.factor"},
    {{"llama.vocab_size", U32, 51, NULL, 0}, BAD, NULL},
    {{"llama.vocab_size", U32_ARRAY, 50, NULL, 2}, BAD, NULL},
    {{"tokenizer.ggml.tokens", U32_ARRAY, 1, NULL, 7}, BAD, NULL},
    {{"llama.expert_count", U32, 8, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attention.clamp_kqv", F32, 8, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attention.max_alibi_bias", F32, 8, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attn_logit_softcapping", F32, 50, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.final_logit_softcapping", F32, 30, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.logit_scale", F32, 0.5, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.logit_scale", F32, NAN, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.residual_scale", F32, 0.5, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.embedding_scale", F32, 12, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.use_parallel_residual", BOOL, 1, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.rope.scaling.attn_factor", F32, 2, NULL, 0}, UNSUPPORTED, NULL},
    {{"llama.attention.causal", BOOL, 0, NULL, 0}, UNSUPPORTED, NULL},
};

static void a_key_that_is_missing_or_out_of_range_is_refused_by_its_name(void **state)
{
    (void)state;
    static rf_config config;
    uint32_t failures = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(wrong_keys); i++) {
        rf_error err = {0};
        const change *c = &wrong_keys[i].change;
        rf_status status = read_changed(c, 1, &config, &err);
        const char *where = wrong_keys[i].where ? wrong_keys[i].where : c->key;
        if (status == wrong_keys[i].status && strcmp(err.where, where) == 0)
            continue;
        failures++;
        print_error("%s, kind %d, %g \"%s\": %s at \"%s\"\n", c->key, c->kind, c->number,
                    c->text ? c->text : "", rf_status_name(status), err.where);
    }
    assert_int_equal(failures, 0);
    /* Without a record to fill there is a status all the same. */
    assert_int_equal(read_changed(&wrong_keys[0].change, 1, &config, NULL), BAD);
}

/* A factor that nobody says how to use must not be dropped: others take it as linear. */
static void a_rope_factor_without_a_type_is_not_ignored(void **state)
{
    (void)state;
    static rf_config config;
    rf_error err = {0};
    const change c = {"llama.rope.scaling.factor", F32, 4, NULL, 0};
    rf_status status = read_changed(&c, 1, &config, &err);
    if (status == RF_OK) {
        assert_int_equal(config.rope.scaling, RF_ROPE_LINEAR);
        assert_true(config.rope.factor == 4.0);
    } else {
        assert_string_equal(err.where, c.key);
    }
}

static void llama3_scaling_needs_each_of_its_keys(void **state)
{
    (void)state;
    static rf_config config;
    static const change all[] = {
        {"llama.rope.scaling.type", TEXT, 0, "llama3", 0},
        {"llama.rope.scaling.factor", F32, 8, NULL, 0},
        {"llama.rope.scaling.low_freq_factor", F32, 1, NULL, 0},
        {"llama.rope.scaling.high_freq_factor", F32, 4, NULL, 0},
        {"llama.rope.scaling.original_context_length", U32, 8192, NULL, 0},
    };
    rf_error err = {0};
    assert_int_equal(read_changed(all, RF_ARRAY_COUNT(all), &config, &err), RF_OK);
    assert_int_equal(config.rope.scaling, RF_ROPE_LLAMA3);
    assert_true(config.rope.original_ctx == 8192.0);
    for (size_t i = 1; i < RF_ARRAY_COUNT(all); i++) {
        change some[RF_ARRAY_COUNT(all)];
        memcpy(some, all, sizeof all);
        some[i].kind = DROP;
        assert_int_equal(read_changed(some, RF_ARRAY_COUNT(all), &config, &err), BAD);
        assert_string_equal(err.where, all[i].key);
        some[i].kind = F32;
        some[i].number = -1;
        assert_int_equal(read_changed(some, RF_ARRAY_COUNT(all), &config, &err), BAD);
        assert_string_equal(err.where, all[i].key);
    }
    change some[RF_ARRAY_COUNT(all)];
    memcpy(some, all, sizeof all);
    some[2].number = 4; /* low must be below high */
    assert_int_equal(read_changed(some, RF_ARRAY_COUNT(all), &config, &err), BAD);
}

/* ---- weights ----------------------------------------------------------------------------- */

static rf_status bind(const tensor *other, rf_weight *table, rf_error *err)
{
    static rf_config config;
    header h = make_header(NULL, 0, other);
    rf_status status = rf_config_read(&h.gguf, &config, err);
    if (status == RF_OK) {
        assert_true(rf_weight_table_count(&config) <= 64);
        status = rf_weights_bind(&h.gguf, &config, table, err);
    }
    release(&h);
    return status;
}

static void weights_are_bound_with_their_shapes(void **state)
{
    (void)state;
    rf_weight table[64];
    rf_error err = {0};
    assert_int_equal(bind(NULL, table, &err), RF_OK);
    const rf_weight *k = rf_weight_at(table, 1, RF_W_K), *down = rf_weight_at(table, 0, RF_W_DOWN);
    assert_int_equal(k->rows, 16);
    assert_int_equal(k->k, 32);
    assert_int_equal(k->row_bytes, 128);
    assert_int_equal(down->rows, 32);
    assert_int_equal(down->k, 48);
    assert_null(rf_weight_at(table, 0, RF_W_K_BIAS)->data);
    assert_int_equal(rf_weight_at(table, 0, RF_W_Q_BIAS)->k, 32);
    assert_int_equal(rf_weight_at(table, 0, RF_W_OUTPUT)->rows, 50);
}

static void a_tensor_of_another_shape_or_format_is_refused_by_its_name(void **state)
{
    (void)state;
    static const struct {
        tensor other;
        rf_status status;
    } cases[] = {
        {{"token_embd.weight", RF_FORMAT_NONE, 0, {0}}, BAD},
        {{"token_embd.weight", RF_F32, 1, {32, 0}}, BAD},
        {{"token_embd.weight", RF_F32, 2, {64, 50}}, BAD},
        {{"output_norm.weight", RF_FORMAT_NONE, 0, {0}}, BAD},
        {{"output_norm.weight", RF_F32, 2, {32, 1}}, BAD},
        {{"output_norm.weight", RF_F16, 1, {32, 0}}, UNSUPPORTED},
        {{"output.weight", RF_F32, 2, {32, 49}}, BAD},
        {{"output.weight", RF_F32, 2, {50, 32}}, BAD},
        {{"blk.0.attn_norm.weight", RF_F32, 1, {31, 0}}, BAD},
        {{"blk.1.attn_q.weight", RF_F32, 2, {32, 16}}, BAD},
        {{"blk.1.attn_k.weight", RF_F32, 2, {32, 32}}, BAD},
        {{"blk.1.attn_k.weight", RF_FORMAT_NONE, 0, {0}}, BAD},
        {{"blk.0.attn_v.weight", RF_I8, 2, {32, 16}}, UNSUPPORTED},
        {{"blk.0.attn_v.weight", RF_F64, 2, {32, 16}}, UNSUPPORTED},
        {{"blk.0.attn_v.weight", RF_MXFP4, 2, {32, 16}}, UNSUPPORTED},
        {{"blk.0.attn_output.weight", RF_F32, 2, {16, 32}}, BAD},
        {{"blk.1.ffn_gate.weight", RF_F32, 2, {48, 32}}, BAD},
        {{"blk.1.ffn_up.weight", RF_FORMAT_NONE, 0, {0}}, BAD},
        {{"blk.1.ffn_down.weight", RF_F32, 2, {32, 48}}, BAD},
        {{"blk.0.attn_q.bias", RF_F32, 1, {16, 0}}, BAD},
        {{"blk.1.ffn_down.bias", RF_F16, 1, {32, 0}}, UNSUPPORTED},
    };
    rf_weight table[64];
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        rf_error err = {0};
        rf_status status = bind(&cases[i].other, table, &err);
        if (status != cases[i].status || strcmp(err.where, cases[i].other.name) != 0)
            fail_msg("%s, case %zu: %s at \"%s\"", cases[i].other.name, i, rf_status_name(status),
                     err.where);
    }
}

static uint32_t count_weight_rows(const tensor *other, const char *absent)
{
    static rf_config config;
    static rf_plan_row rows[64];
    rf_weight table[64];
    rf_plan plan;
    rf_error err = {0};
    header h = make_header(NULL, 0, other);
    assert_int_equal(rf_config_read(&h.gguf, &config, &err), RF_OK);
    assert_int_equal(rf_weights_bind(&h.gguf, &config, table, &err), RF_OK);
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_weights_plan(&plan, &config, table, &err), RF_OK);
    const rf_plan_row *row = rf_plan_find(&plan, "model.layers[1].attn.k_proj.weight");
    assert_non_null(row);
    assert_string_equal(row->source, "blk.1.attn_k.weight");
    assert_int_equal(row->bytes, 32 * 16 * 4);
    assert_int_equal(row->domain, RF_DOMAIN_FILE);
    assert_null(rf_plan_find(&plan, absent));
    if (other)
        assert_ptr_equal(table[RF_W_OUTPUT].tensor, table[RF_W_EMBED].tensor);
    release(&h);
    return plan.row_count;
}

static void a_tied_output_is_planned_once(void **state)
{
    (void)state;
    static const tensor none = {"output.weight", RF_FORMAT_NONE, 0, {0}};
    assert_int_equal(count_weight_rows(NULL, "model.lm_head.bias"), 3 + 2 * 11);
    assert_int_equal(count_weight_rows(&none, "model.lm_head.weight"), 2 + 2 * 11);
}

/* ---- rope -------------------------------------------------------------------------------- */

static void assert_close(double got, double expected)
{
    if (!(fabs(got - expected) <= 1e-13 * fabs(expected)))
        fail_msg("%.17g is not %.17g", got, expected);
}

static void rope_frequencies_are_those_of_the_formula(void **state)
{
    (void)state;
    static const double bases[] = {10000.0, 500000.0, 1e6, 2.0};
    double got[64];
    for (size_t b = 0; b < RF_ARRAY_COUNT(bases); b++) {
        rf_rope_config rope = {.dims = 128, .base = bases[b], .factor = 4.0};
        for (int scaling = RF_ROPE_NONE; scaling <= RF_ROPE_LINEAR; scaling++) {
            rope.scaling = (rf_rope_scaling)scaling;
            rf_rope_frequencies(&rope, NULL, got);
            for (uint32_t i = 0; i < 64; i++) {
                double expected = pow(bases[b], -2.0 * i / 128.0);
                assert_close(got[i], scaling == RF_ROPE_LINEAR ? expected / 4.0 : expected);
            }
        }
    }
}

static void llama3_frequencies_keep_short_waves_and_stretch_long_ones(void **state)
{
    (void)state;
    rf_rope_config rope = {.dims = 128,
                           .base = 500000.0,
                           .scaling = RF_ROPE_LLAMA3,
                           .factor = 8.0,
                           .low_freq_factor = 1.0,
                           .high_freq_factor = 4.0,
                           .original_ctx = 8192};
    double got[64];
    uint32_t kept = 0, stretched = 0, blended = 0;
    rf_rope_frequencies(&rope, NULL, got);
    for (uint32_t i = 0; i < 64; i++) {
        double frequency = pow(500000.0, -2.0 * i / 128.0), wave = 2.0 * M_PI / frequency;
        double smooth = (8192.0 / wave - 1.0) / (4.0 - 1.0);
        double expected = (1.0 - smooth) * frequency / 8.0 + smooth * frequency;
        if (wave < 8192.0 / 4.0) {
            expected = frequency;
            kept++;
        } else if (wave > 8192.0 / 1.0) {
            expected = frequency / 8.0;
            stretched++;
        } else {
            blended++;
        }
        assert_close(got[i], expected);
    }
    assert_true(kept > 20 && stretched > 20 && blended > 3);
}

static void a_tensor_of_frequencies_divides_each(void **state)
{
    (void)state;
    static const float divisors[] = {1.0f, 1.5f, 8.0f, 32.0f};
    static rf_config config;
    rf_error err = {0};
    double got[4];
    tiny_gguf file = tiny_begin(3);
    const change linear[] = {{"llama.rope.scaling.type", TEXT, 0, "linear", 0},
                             {"llama.rope.scaling.factor", F32, 2, NULL, 0}};
    put_keys(&file, linear, RF_ARRAY_COUNT(linear));
    tiny_tensor(&file, "rope_freqs.weight", RF_F32, 1, (uint64_t[]){4}, 0);
    tiny_tensor(&file, "token_embd.weight", RF_F32, 2, (uint64_t[]){32, 50}, 32);
    header h = parse(file, 32);
    memcpy(h.file.bytes + h.file.data_offset, divisors, sizeof divisors);
    assert_int_equal(rf_config_read(&h.gguf, &config, &err), RF_OK);
    assert_non_null(config.rope.freqs);
    rf_rope_frequencies(&config.rope, &h.gguf, got);
    for (uint32_t i = 0; i < 4; i++)
        assert_close(got[i], pow(10000.0, -2.0 * i / 8.0) / 2.0 / (double)divisors[i]);
    release(&h);
}

static void a_tensor_of_frequencies_of_another_length_is_refused(void **state)
{
    (void)state;
    static rf_config config;
    static const struct {
        uint32_t type_id, rank;
        uint64_t shape[2];
    } cases[] = {{RF_F32, 1, {5, 0}}, {RF_F32, 2, {4, 1}}, {RF_F16, 1, {4, 0}}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        rf_error err = {0};
        tiny_gguf file = tiny_begin(3);
        put_keys(&file, NULL, 0);
        tiny_tensor(&file, "rope_freqs.weight", cases[i].type_id, cases[i].rank, cases[i].shape, 0);
        tiny_tensor(&file, "token_embd.weight", RF_F32, 2, (uint64_t[]){32, 50}, 32);
        header h = parse(file, 0);
        assert_int_equal(rf_config_read(&h.gguf, &config, &err), BAD);
        assert_string_equal(err.where, "rope_freqs.weight");
        release(&h);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plain_header_is_read_as_it_is_written),
        cmocka_unit_test(what_may_differ_between_layers_or_be_left_out_is_read),
        cmocka_unit_test(a_key_that_is_missing_or_out_of_range_is_refused_by_its_name),
        cmocka_unit_test(a_rope_factor_without_a_type_is_not_ignored),
        cmocka_unit_test(llama3_scaling_needs_each_of_its_keys),
        cmocka_unit_test(weights_are_bound_with_their_shapes),
        cmocka_unit_test(a_tensor_of_another_shape_or_format_is_refused_by_its_name),
        cmocka_unit_test(a_tied_output_is_planned_once),
        cmocka_unit_test(rope_frequencies_are_those_of_the_formula),
        cmocka_unit_test(llama3_frequencies_keep_short_waves_and_stretch_long_ones),
        cmocka_unit_test(a_tensor_of_frequencies_divides_each),
        cmocka_unit_test(a_tensor_of_frequencies_of_another_length_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
