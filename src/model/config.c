/* model/config.c: hyper-parameters out of the header, every one of them range-checked here.
 *
 * What a key may be is one row of a call; what is missing, of another type or out of range is an
 * error that names the key. Keys that would change the result and that we do not know are refused;
 * GGUF's documented defaults are not guesses. Called once, when a plan is made.
 */
#include "model/model.h"

#include <string.h>

typedef struct reader {
    const rf_gguf *gguf;
    const char *architecture;
    rf_error *err;
    char key[160];
} reader;

static const rf_gguf_key *find(reader *r, const char *suffix)
{
    rf_print(r->key, sizeof r->key, "%s.%s", r->architecture, suffix);
    return rf_gguf_find(r->gguf, r->key);
}

/* The type of a key's value, or of each value of an array. */
static rf_gguf_type scalar_type(const rf_gguf_key *key)
{
    return key->type == RF_GGUF_ARRAY ? key->element_type : key->type;
}

static rf_status bad_range(reader *r, uint64_t low, uint64_t high, uint64_t got)
{
    rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "out of range");
    rf_fail_expected(r->err, "%llu to %llu", (unsigned long long)low, (unsigned long long)high);
    return rf_fail_got(r->err, "%llu", (unsigned long long)got);
}

/* Element index of an integer key within [low, high]; missing: RF_ERR_BAD_MODEL unless fallback. */
static rf_status read_element(reader *r, const char *suffix, uint64_t index, uint64_t low,
                              uint64_t high, const uint64_t *fallback, uint64_t *out)
{
    const rf_gguf_key *key = find(r, suffix);
    if (!key) {
        if (!fallback)
            return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "the key is missing");
        *out = *fallback;
    } else if (scalar_type(key) == RF_GGUF_BOOL ||
               !rf_gguf_u64(key, key->type == RF_GGUF_ARRAY ? index : 0, out)) {
        rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "not a whole number that is not negative");
        return rf_fail_got(r->err, "%s", rf_gguf_type_name(key->type));
    }
    return *out < low || *out > high ? bad_range(r, low, high, *out) : RF_OK;
}

/* The same for a key that is one number. */
static rf_status read_u64(reader *r, const char *suffix, uint64_t low, uint64_t high,
                          const uint64_t *fallback, uint64_t *out)
{
    const rf_gguf_key *key = find(r, suffix);
    if (key && key->type == RF_GGUF_ARRAY)
        return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "a number was expected, not an array");
    return read_element(r, suffix, 0, low, high, fallback, out);
}

static rf_status read_u32(reader *r, const char *suffix, uint32_t low, uint32_t high,
                          const uint64_t *fallback, uint32_t *out)
{
    uint64_t value = 0;
    rf_status status = read_u64(r, suffix, low, high, fallback, &value);
    *out = (uint32_t)value;
    return status;
}

/* A key that is one number for all layers, or an array with one for each. */
static rf_status check_per_layer(reader *r, const char *suffix, uint32_t layer_count)
{
    const rf_gguf_key *key = find(r, suffix);
    if (!key || key->type != RF_GGUF_ARRAY || key->count == layer_count)
        return RF_OK;
    rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "the array has the wrong length");
    rf_fail_expected(r->err, "%u", layer_count);
    return rf_fail_got(r->err, "%llu", (unsigned long long)key->count);
}

static bool is_positive_finite(double value)
{
    return value > 0 && value < (double)__builtin_inff();
}

/* A positive float; *found tells whether the key is there. */
static rf_status read_positive(reader *r, const char *suffix, double *out, bool *found)
{
    const rf_gguf_key *key = find(r, suffix);
    double value = 0;
    *found = key != NULL;
    if (!key)
        return RF_OK;
    if (key->type == RF_GGUF_ARRAY || !rf_gguf_f64(key, 0, &value)) {
        rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "not a number with a fraction");
        rf_fail_expected(r->err, "f32");
        return rf_fail_got(r->err, "%s", rf_gguf_type_name(key->type));
    }
    if (!is_positive_finite((double)(float)value)) { /* some of them are used as floats */
        rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "out of range");
        rf_fail_expected(r->err, "a finite number above 0");
        return rf_fail_got(r->err, "%g", value);
    }
    *out = value;
    return RF_OK;
}

static void copy_text(rf_text text, char *out, size_t capacity)
{
    size_t length = (size_t)RF_MIN(text.length, capacity - 1);
    for (size_t i = 0; i < length; i++)
        out[i] = text.bytes[i];
    out[length] = '\0';
}

static rf_status read_names(const rf_gguf *gguf, rf_config *config, rf_error *err)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, "general.architecture");
    rf_text text;
    if (!key) {
        return rf_fail(err, RF_ERR_BAD_MODEL, "general.architecture", "the key is missing");
    }
    if (!rf_gguf_text(key, &text) || text.length == 0 ||
        text.length >= sizeof config->architecture || memchr(text.bytes, 0, text.length)) {
        return rf_fail(err, RF_ERR_BAD_MODEL, "general.architecture", "not a short text");
    }
    copy_text(text, config->architecture, sizeof config->architecture);
    key = rf_gguf_find(gguf, "general.name");
    if (key && rf_gguf_text(key, &text))
        copy_text(text, config->name, sizeof config->name);
    if (!rf_recipe_of(config->architecture)) {
        rf_fail(err, RF_ERR_UNSUPPORTED, "general.architecture", "no recipe for this architecture");
        rf_fail_expected(err, "one of: %s", rf_recipe_names());
        return rf_fail_got(err, "%s", config->architecture);
    }
    return RF_OK;
}

/* Keys that would change the result, with the one value that changes nothing. */
static rf_status refuse_unknown(reader *r)
{
    static const struct {
        const char *suffix;
        double harmless;
    } keys[] = {{"expert_count", 0},
                {"attention.clamp_kqv", 0},
                {"attention.max_alibi_bias", 0},
                {"attn_logit_softcapping", 0},
                {"final_logit_softcapping", 0},
                {"logit_scale", 1},
                {"residual_scale", 1},
                {"embedding_scale", 1},
                {"use_parallel_residual", 0},
                {"rope.scaling.attn_factor", 1},
                {"attention.causal", 1}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(keys); i++) {
        const rf_gguf_key *key = find(r, keys[i].suffix);
        uint64_t whole = 0;
        double value = 0;
        if (!key)
            continue;
        if (!rf_gguf_f64(key, 0, &value))
            value = rf_gguf_u64(key, 0, &whole) ? (double)whole : keys[i].harmless - 1;
        if (key->type == RF_GGUF_ARRAY || value != keys[i].harmless) {
            rf_fail(r->err, RF_ERR_UNSUPPORTED, r->key, "this key would change the result");
            rf_fail_expected(r->err, "%g", keys[i].harmless);
            return rf_fail_got(r->err, "%g", value);
        }
    }
    return RF_OK;
}

static rf_status read_layer(reader *r, rf_config *config, uint32_t index)
{
    rf_layer_config *layer = &config->layers[index];
    uint64_t heads = 0, kv_heads = 0, ffn = 0, k_width = 0, v_width = 0;
    rf_status status = read_element(r, "attention.head_count", index, 1, 1024, NULL, &heads);
    if (status)
        return status;
    status = read_element(r, "attention.head_count_kv", index, 1, heads, &heads, &kv_heads);
    if (status)
        return status;
    if (heads % kv_heads != 0) {
        rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "must divide the number of heads");
        rf_fail_expected(r->err, "a divisor of %llu", (unsigned long long)heads);
        return rf_fail_got(r->err, "%llu", (unsigned long long)kv_heads);
    }
    status = read_element(r, "feed_forward_length", index, 1, 1u << 24, NULL, &ffn);
    if (status)
        return status;

    uint64_t derived = config->width / heads;
    if (!find(r, "attention.key_length") && config->width % heads != 0) {
        rf_print(r->key, sizeof r->key, "%s.attention.head_count", r->architecture);
        rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "must divide the width");
        rf_fail_expected(r->err, "a divisor of %u", config->width);
        return rf_fail_got(r->err, "%llu", (unsigned long long)heads);
    }
    status = read_element(r, "attention.key_length", index, 1, 4096, &derived, &k_width);
    if (status)
        return status;
    if (k_width % 8 != 0)
        return rf_fail(r->err, RF_ERR_UNSUPPORTED, r->key,
                       "a head's width must be a multiple of 8, not %llu",
                       (unsigned long long)k_width);
    status = read_element(r, "attention.value_length", index, 1, 4096, &derived, &v_width);
    if (status)
        return status;
    if (v_width % 8 != 0)
        return rf_fail(r->err, RF_ERR_UNSUPPORTED, r->key,
                       "a head's width must be a multiple of 8, not %llu",
                       (unsigned long long)v_width);
    *layer = (rf_layer_config){.heads = (uint32_t)heads,
                               .kv_heads = (uint32_t)kv_heads,
                               .k_width = (uint32_t)k_width,
                               .v_width = (uint32_t)v_width,
                               .ffn = (uint32_t)ffn};
    return RF_OK;
}

static rf_status read_rope_scaling(reader *r, rf_rope_config *rope)
{
    const rf_gguf_key *key = find(r, "rope.scaling.type");
    rf_text type = {"none", 4};
    bool found = false;
    if (key && !rf_gguf_text(key, &type)) {
        return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "not a text");
    }
    if (!key) { /* a factor without a type, and the older key, stand for linear scaling */
        rf_status status = read_positive(r, "rope.scaling.factor", &rope->factor, &found);
        if (status == RF_OK && !found)
            status = read_positive(r, "rope.scale_linear", &rope->factor, &found);
        if (status)
            return status;
        rope->scaling = found ? RF_ROPE_LINEAR : RF_ROPE_NONE;
        return RF_OK;
    }
    if (rf_text_is(type, "none"))
        return RF_OK;
    if (!rf_text_is(type, "linear") && !rf_text_is(type, "llama3")) {
        rf_fail(r->err, RF_ERR_UNSUPPORTED, r->key, "unknown RoPE scaling");
        rf_fail_expected(r->err, "none, linear or llama3");
        return rf_fail_got(r->err, "%.*s", (int)RF_MIN(type.length, 60u), type.bytes);
    }
    bool is_llama3 = rf_text_is(type, "llama3");
    if (is_llama3 && rope->freqs)
        return RF_OK; /* the tensor has all of it */
    rf_status status = read_positive(r, "rope.scaling.factor", &rope->factor, &found);
    if (status)
        return status;
    if (!found)
        return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "the key is missing");
    rope->scaling = is_llama3 ? RF_ROPE_LLAMA3 : RF_ROPE_LINEAR;
    if (!is_llama3)
        return RF_OK;
    const struct {
        const char *suffix;
        double *out;
    } keys[] = {{"rope.scaling.low_freq_factor", &rope->low_freq_factor},
                {"rope.scaling.high_freq_factor", &rope->high_freq_factor}};
    uint64_t original = 0;
    status = read_u64(r, "rope.scaling.original_context_length", 1, 1u << 30, NULL, &original);
    if (status)
        return status;
    rope->original_ctx = (double)original;
    for (size_t i = 0; i < RF_ARRAY_COUNT(keys); i++) {
        status = read_positive(r, keys[i].suffix, keys[i].out, &found);
        if (status)
            return status;
        if (!found)
            return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "the key is missing");
    }
    if (rope->high_freq_factor <= rope->low_freq_factor) {
        return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key,
                       "high_freq_factor must be above low_freq_factor");
    }
    return RF_OK;
}

static rf_status read_rope(reader *r, rf_config *config)
{
    rf_rope_config *rope = &config->rope;
    const uint64_t k_width = config->layers[0].k_width;
    bool found = false;
    rope->interleaved = true;
    rope->base = 10000.0; /* documented default of the format */
    rope->freqs = rf_gguf_find_tensor(r->gguf, "rope_freqs.weight");
    rf_status status =
        read_u32(r, "rope.dimension_count", 2, (uint32_t)k_width, &k_width, &rope->dims);
    if (status)
        return status;
    if (rope->dims % 2 != 0) {
        return rf_fail(r->err, RF_ERR_BAD_MODEL, r->key, "must be even, not %u", rope->dims);
    }
    for (uint32_t i = 1; i < config->layer_count; i++) {
        if (config->layers[i].k_width < rope->dims) {
            return bad_range(r, 2, config->layers[i].k_width, rope->dims);
        }
    }
    status = read_positive(r, "rope.freq_base", &rope->base, &found);
    if (status)
        return status;
    status = read_rope_scaling(r, rope);
    if (status)
        return status;
    if (rope->freqs) {
        const rf_gguf_tensor *t = rope->freqs;
        if (t->type_id != RF_F32 || t->rank != 1 || t->shape[0] != rope->dims / 2 ||
            t->offset % 4) {
            rf_fail(r->err, RF_ERR_BAD_MODEL, "rope_freqs.weight", "unexpected shape or format");
            return rf_fail_expected(r->err, "f32 [%u]", rope->dims / 2);
        }
    }
    return RF_OK;
}

/* The vocabulary's size has three places in a file; they must agree. */
static rf_status read_vocab_count(reader *r, rf_config *config)
{
    const rf_gguf_tensor *embed = rf_gguf_find_tensor(r->gguf, "token_embd.weight");
    const rf_gguf_key *tokens = rf_gguf_find(r->gguf, "tokenizer.ggml.tokens");
    if (!embed) {
        return rf_fail(r->err, RF_ERR_BAD_MODEL, "token_embd.weight", "the tensor is missing");
    }
    uint64_t rows = embed->shape[1];
    if (embed->rank != 2 || rows == 0 || rows > (1u << 24)) {
        rf_fail(r->err, RF_ERR_BAD_MODEL, "token_embd.weight", "unexpected shape");
        rf_fail_expected(r->err, "[%u, vocabulary]", config->width);
        return rf_fail_got(r->err, "rank %u, %llu rows", embed->rank, (unsigned long long)rows);
    }
    if (tokens && tokens->count != rows) {
        rf_fail(r->err, RF_ERR_BAD_MODEL, "tokenizer.ggml.tokens",
                "the vocabulary does not match token_embd.weight");
        rf_fail_expected(r->err, "%llu", (unsigned long long)rows);
        return rf_fail_got(r->err, "%llu", (unsigned long long)tokens->count);
    }
    uint64_t declared = 0;
    rf_status status = read_u64(r, "vocab_size", rows, rows, &rows, &declared);
    config->vocab_count = (uint32_t)rows;
    return status;
}

rf_status rf_config_read(const rf_gguf *gguf, rf_config *config, rf_error *err)
{
    *config = (rf_config){0};
    rf_status status = read_names(gguf, config, err);
    if (status)
        return status;
    reader r = {.gguf = gguf, .architecture = config->architecture, .err = err};
    if ((status = refuse_unknown(&r)))
        return status;
    if ((status = read_u32(&r, "block_count", 1, RF_LAYERS_MAX, NULL, &config->layer_count))) {
        return status;
    }
    status = read_u32(&r, "embedding_length", 1, 1u << 20, NULL, &config->width);
    if (status)
        return status;
    status = read_u64(&r, "context_length", 1, 1u << 30, NULL, &config->train_ctx);
    if (status)
        return status;

    double eps = 0;
    bool found = false;
    status = read_positive(&r, "attention.layer_norm_rms_epsilon", &eps, &found);
    if (status)
        return status;
    if (!found)
        return rf_fail(err, RF_ERR_BAD_MODEL, r.key, "the key is missing");
    config->norm_eps = (float)eps;
    double scale = 0;
    if ((status = read_positive(&r, "attention.scale", &scale, &found)))
        return status;
    config->attention_scale = (float)scale;

    static const char *const per_layer[] = {"attention.head_count", "attention.head_count_kv",
                                            "feed_forward_length", "attention.key_length",
                                            "attention.value_length"};
    for (size_t i = 0; i < RF_ARRAY_COUNT(per_layer); i++) {
        if ((status = check_per_layer(&r, per_layer[i], config->layer_count)))
            return status;
    }
    for (uint32_t i = 0; i < config->layer_count; i++) {
        if ((status = read_layer(&r, config, i)))
            return status;
    }
    if (find(&r, "attention.sliding_window")) {
        config->notes[config->note_count++] =
            "attention.sliding_window is not used by this architecture";
    }
    if ((status = read_vocab_count(&r, config)))
        return status;
    return read_rope(&r, config);
}
