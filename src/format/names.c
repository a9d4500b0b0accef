/* format/names.c: the map between the checkpoint's tensor names and tensor ids.
 *
 * One table serves both directions. It knows the llama family: embeddings, norms, a block of
 * attention and a gated MLP. A name that is not here is not guessed at; the caller lists it.
 *
 *   blk.3.attn_q.weight  <->  model.layers[3].attn.q_proj.weight
 *       | |     |                          |  |           |
 *   layer module ending                layer  module      ending
 */
#include "format/format.h"

#include <string.h>

/* The column of a table: how a file spells it, and how everything above this floor does. */
enum { CHECKPOINT, ID, SPELLINGS };

static const char *const before_layer[SPELLINGS] = {"blk.", "model.layers["};
static const char *const after_layer[SPELLINGS] = {".", "]."};
static const char *const endings[] = {".weight", ".bias"};

static const char *const whole_names[][SPELLINGS] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "model.lm_head.weight"},
    {"rope_freqs.weight", "model.rope_freqs.weight"},
};

static const char *const layer_modules[][SPELLINGS] = {
    {"attn_norm", "attn_norm"},
    {"attn_q", "attn.q_proj"},
    {"attn_k", "attn.k_proj"},
    {"attn_v", "attn.v_proj"},
    {"attn_qkv", "attn.qkv_proj"},
    {"attn_output", "attn.o_proj"},
    {"attn_q_norm", "attn.q_norm"},
    {"attn_k_norm", "attn.k_norm"},
    {"post_attention_norm", "post_attn_norm"},
    {"ffn_norm", "ffn_norm"},
    {"ffn_gate", "mlp.gate_proj"},
    {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"},
    {"post_ffw_norm", "post_ffn_norm"},
};

/* Steps over prefix; false, and text unchanged, when it is not there. */
static bool skip(rf_text *text, const char *prefix)
{
    size_t length = strlen(prefix);
    if (text->length < length || memcmp(text->bytes, prefix, length) != 0)
        return false;
    text->bytes += length;
    text->length -= length;
    return true;
}

/* Steps over a layer number in its one spelling: no sign, no leading zero, below 2^31. */
static bool skip_number(rf_text *text, uint32_t *number)
{
    uint64_t value = 0;
    uint64_t digits = 0;
    while (digits < text->length && text->bytes[digits] >= '0' && text->bytes[digits] <= '9') {
        value = value * 10 + (uint64_t)(text->bytes[digits] - '0');
        if (value > INT32_MAX)
            return false;
        digits++;
    }
    if (digits == 0 || (digits > 1 && text->bytes[0] == '0'))
        return false;
    text->bytes += digits;
    text->length -= digits;
    *number = (uint32_t)value;
    return true;
}

static bool is_ending(rf_text rest)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(endings); i++) {
        if (rf_text_is(rest, endings[i]))
            return true;
    }
    return false;
}

static void translate(rf_text text, int from, rf_writer *writer)
{
    int to = ID - from;
    for (size_t i = 0; i < RF_ARRAY_COUNT(whole_names); i++) {
        if (rf_text_is(text, whole_names[i][from]))
            rf_write(writer, "%s", whole_names[i][to]);
    }
    uint32_t layer;
    if (!skip(&text, before_layer[from]) || !skip_number(&text, &layer) ||
        !skip(&text, after_layer[from]))
        return;
    for (size_t i = 0; i < RF_ARRAY_COUNT(layer_modules); i++) {
        rf_text rest = text;
        if (!skip(&rest, layer_modules[i][from]) || !is_ending(rest))
            continue;
        rf_write(writer, "%s%u%s%s", before_layer[to], layer, after_layer[to],
                 layer_modules[i][to]);
        rf_write_bytes(writer, rest.bytes, (size_t)rest.length);
    }
}

static bool fill(rf_text text, int from, char *out, size_t capacity)
{
    rf_writer writer = rf_writer_make(out, capacity);
    translate(text, from, &writer);
    bool known = writer.length > 0 && !writer.overflow;
    if (!known && capacity > 0)
        out[0] = '\0';
    return known;
}

bool rf_name_to_id(rf_text name, char *out, size_t capacity)
{
    return fill(name, CHECKPOINT, out, capacity);
}

bool rf_id_to_name(const char *id, char *out, size_t capacity)
{
    return fill((rf_text){id, strlen(id)}, ID, out, capacity);
}
