/* text/vocab.c: the vocabulary of a file: its tokenizer.* keys read and checked, its tables sized
 * and filled.
 *
 * Measuring walks every token and merge once, so that building cannot find anything new: it only
 * fills. Tokens are addressed in the file; the tables hold places, ids and hashes. This file knows
 * neither how text is split nor how pairs are merged. Called by the runtime, once for a model.
 *
 * Keys as documented in github.com/ggml-org/ggml, docs/gguf.md; defaults that the document leaves
 * open are those of the reference (llama.cpp, llama-vocab.cpp).
 */
#include "text/tables.h"

#include <string.h>

#define KEY "tokenizer.ggml."

/* ---- keys -------------------------------------------------------------------------------- */

#define NO_FIELD SIZE_MAX
#define BLANK    "\xe2\x96\x81" /* U+2581 */
#define BAR      "\xef\xbd\x9c" /* U+FF5C */

typedef struct id_key {
    const char *name;
    size_t field;         /* in rf_vocab; NO_FIELD: only noted as an end */
    uint32_t spm_default; /* SentencePiece's own ids, used when the file does not say */
    bool ends;            /* ends a turn or a text */
} id_key;

static const id_key id_keys[] = {
    {KEY "bos_token_id", offsetof(rf_vocab, bos), 1, false},
    {KEY "eos_token_id", offsetof(rf_vocab, eos), 2, true},
    {KEY "eot_token_id", offsetof(rf_vocab, eot), RF_TOKEN_NONE, true},
    {KEY "eom_token_id", NO_FIELD, RF_TOKEN_NONE, true},
    {KEY "unknown_token_id", offsetof(rf_vocab, unk), 0, false},
    {KEY "padding_token_id", offsetof(rf_vocab, pad), RF_TOKEN_NONE, false},
    {KEY "fim_pad_token_id", NO_FIELD, RF_TOKEN_NONE, true},
    {KEY "fim_rep_token_id", NO_FIELD, RF_TOKEN_NONE, true},
    {KEY "fim_sep_token_id", NO_FIELD, RF_TOKEN_NONE, true},
};

typedef struct flag_key {
    const char *name;
    size_t field;
} flag_key;

static const flag_key flag_keys[] = {
    {KEY "add_bos_token", offsetof(rf_vocab, add_bos)},
    {KEY "add_eos_token", offsetof(rf_vocab, add_eos)},
    {KEY "add_space_prefix", offsetof(rf_vocab, add_space_prefix)},
    {KEY "remove_extra_whitespaces", offsetof(rf_vocab, remove_extra_spaces)},
};

/* Texts that are cut out of a prompt like control tokens whatever type the file gives them, as the
 * reference does. Those in bars are control tokens outright: converters mark them as normal now and
 * then, and a turn would never end. The others may be honest text ("</s>" closes a tag), so they
 * end something only when the file says that they are special. Ends of a turn come first, the
 * preferred one on top. */
enum { ENDS_TURN = 1, ENDS = 2, CONTROLS = 4 };

typedef struct known_text {
    const char *text;
    uint32_t role;
} known_text;

static const known_text known_texts[] = {
    {"<|eot_id|>", ENDS_TURN | ENDS | CONTROLS},
    {"<|im_end|>", ENDS_TURN | ENDS | CONTROLS},
    {"<|end|>", ENDS_TURN | ENDS | CONTROLS},
    {"<end_of_turn>", ENDS_TURN | ENDS | CONTROLS},
    {"<|endoftext|>", ENDS_TURN | ENDS | CONTROLS},
    {"<|end_of_text|>", ENDS_TURN | ENDS | CONTROLS},
    {"<EOT>", ENDS_TURN | ENDS},
    {"_<EOT>", ENDS_TURN | ENDS},
    {"[EOT]", ENDS_TURN | ENDS},
    {"<" BAR "end" BLANK "of" BLANK "sentence" BAR ">", ENDS_TURN | ENDS | CONTROLS},
    {"<end_of_utterance>", ENDS_TURN | ENDS | CONTROLS},
    {"<|eom_id|>", ENDS | CONTROLS},
    {"<|return|>", ENDS | CONTROLS},
    {"<|call|>", ENDS | CONTROLS},
    {"<|calls|>", ENDS | CONTROLS},
    {"<|flush|>", ENDS | CONTROLS},
    {"</s>", ENDS},
    {"<eos>", ENDS},
    {"[EOS]", ENDS},
    {"<turn|>", ENDS | CONTROLS},
    {"<|fim_pad|>", ENDS | CONTROLS},
    {"<fim-pad>", ENDS},
    {"<fim_pad>", ENDS},
    {"<PAD>", ENDS},
    {"[PAD]", ENDS},
    {"<|fim_repo|>", ENDS | CONTROLS},
    {"<|repo_name|>", ENDS | CONTROLS},
    {"<fim-repo>", ENDS},
    {"<REPO>", ENDS},
    {"<reponame>", ENDS},
    {"<|file_sep|>", ENDS | CONTROLS},
    {"<|fim_prefix|>", CONTROLS},
    {"<fim-prefix>", 0},
    {"<fim_prefix>", 0},
    {"<PRE>", 0},
    {BLANK "<PRE>", 0},
    {"<|code_prefix|>", CONTROLS},
    {"<|prefix|>", CONTROLS},
    {"<|fim_suffix|>", CONTROLS},
    {"<fim-suffix>", 0},
    {"<fim_suffix>", 0},
    {"<SUF>", 0},
    {BLANK "<SUF>", 0},
    {"<|code_suffix|>", CONTROLS},
    {"<|suffix|>", CONTROLS},
    {"<|fim_middle|>", CONTROLS},
    {"<fim-middle>", 0},
    {"<fim_middle>", 0},
    {"<MID>", 0},
    {BLANK "<MID>", 0},
    {"<|code_middle|>", CONTROLS},
    {"<|middle|>", CONTROLS},
    {"<" BAR "fim" BLANK "begin" BAR ">", CONTROLS},
    {"<" BAR "fim" BLANK "hole" BAR ">", CONTROLS},
    {"<" BAR "fim" BLANK "end" BAR ">", CONTROLS},
};

#define KNOWN_NONE RF_ARRAY_COUNT(known_texts)

static size_t find_known(rf_text text)
{
    if (text.length < 4 || text.length > 32 ||
        (text.bytes[0] != '<' && text.bytes[0] != '[' && text.bytes[0] != '_'))
        return KNOWN_NONE;
    size_t i = 0;
    while (i < KNOWN_NONE && !rf_text_is(text, known_texts[i].text))
        i++;
    return i;
}

static rf_status missing(const char *name, rf_error *err)
{
    return rf_fail(err, RF_ERR_BAD_MODEL, name, "the key is missing");
}

static rf_status wrong_type(const rf_gguf_key *key, const char *name, const char *expected,
                            rf_error *err)
{
    rf_fail(err, RF_ERR_BAD_MODEL, name, "the key has a wrong type");
    rf_fail_expected(err, "%s", expected);
    bool array = key->type == RF_GGUF_ARRAY;
    return rf_fail_got(err, "%s%s", array ? "array of " : "",
                       rf_gguf_type_name(array ? key->element_type : key->type));
}

/* A string key; *out is empty when the key is missing and not needed. */
static rf_status read_text(const rf_gguf *gguf, const char *name, bool needed, rf_text *out,
                           rf_error *err)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, name);
    *out = (rf_text){"", 0};
    if (!key)
        return needed ? missing(name, err) : RF_OK;
    return rf_gguf_text(key, out) ? RF_OK : wrong_type(key, name, "string", err);
}

/* An array key of one of two element types with count elements (UINT64_MAX: any number). */
static rf_status read_array(const rf_gguf *gguf, const char *name, rf_gguf_type type,
                            rf_gguf_type other, uint64_t count, const rf_gguf_key **out,
                            rf_error *err)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, name);
    *out = key;
    if (!key)
        return RF_OK;
    if (key->type != RF_GGUF_ARRAY || (key->element_type != type && key->element_type != other)) {
        char expected[64];
        rf_print(expected, sizeof expected, "array of %s", rf_gguf_type_name(type));
        return wrong_type(key, name, expected, err);
    }
    if (count != UINT64_MAX && key->count != count) {
        rf_fail(err, RF_ERR_BAD_MODEL, name, "not one element for each token");
        rf_fail_expected(err, "%llu elements", (unsigned long long)count);
        return rf_fail_got(err, "%llu", (unsigned long long)key->count);
    }
    return RF_OK;
}

static void add_end(rf_vocab *vocab, uint32_t id)
{
    if (id == RF_TOKEN_NONE || rf_vocab_is_end(vocab, id) ||
        vocab->end_count == RF_ARRAY_COUNT(vocab->end_ids))
        return;
    vocab->end_ids[vocab->end_count++] = id;
}

static rf_status read_ids(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(id_keys); i++) {
        const id_key *row = &id_keys[i];
        const rf_gguf_key *key = rf_gguf_find(gguf, row->name);
        uint64_t value = RF_TOKEN_NONE;
        int64_t negative;
        if (key && key->type == RF_GGUF_ARRAY)
            return wrong_type(key, row->name, "uint32", err);
        if (key && !rf_gguf_u64(key, 0, &value)) {
            if (!rf_gguf_i64(key, 0, &negative))
                return wrong_type(key, row->name, "uint32", err);
            value = negative == -1 ? RF_TOKEN_NONE : UINT64_MAX;
        }
        if (!key && vocab->kind == RF_VOCAB_SPM && row->spm_default < vocab->token_count)
            value = row->spm_default;
        if (value != RF_TOKEN_NONE && value >= vocab->token_count) {
            rf_fail(err, RF_ERR_BAD_MODEL, row->name, "there is no token with this id");
            rf_fail_expected(err, "below %u, or 4294967295 for none", vocab->token_count);
            return rf_fail_got(err, "%lld", (long long)value);
        }
        if (row->field != NO_FIELD)
            memcpy((uint8_t *)vocab + row->field, &(uint32_t){(uint32_t)value}, sizeof(uint32_t));
        if (row->ends)
            add_end(vocab, (uint32_t)value);
    }
    return RF_OK;
}

static rf_status read_flags(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(flag_keys); i++) {
        const flag_key *row = &flag_keys[i];
        const rf_gguf_key *key = rf_gguf_find(gguf, row->name);
        uint64_t value;
        if (!key)
            continue;
        if (key->type == RF_GGUF_ARRAY || !rf_gguf_u64(key, 0, &value))
            return wrong_type(key, row->name, "bool", err);
        *(bool *)((uint8_t *)vocab + row->field) = value != 0;
    }
    vocab->add_bos = vocab->add_bos && vocab->bos != RF_TOKEN_NONE;
    vocab->add_eos = vocab->add_eos && vocab->eos != RF_TOKEN_NONE;
    return RF_OK;
}

static rf_status read_model(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err)
{
    rf_text model, pre;
    rf_status status = read_text(gguf, KEY "model", true, &model, err);
    if (status == RF_OK)
        status = read_text(gguf, KEY "pre", false, &pre, err);
    if (status)
        return status;
    if (rf_text_is(model, "llama")) {
        vocab->kind = RF_VOCAB_SPM;
        vocab->add_bos = vocab->add_space_prefix = vocab->escape_spaces = true;
        return RF_OK;
    }
    if (!rf_text_is(model, "gpt2")) {
        rf_fail(err, RF_ERR_UNSUPPORTED, KEY "model", "this kind of tokenizer is not known");
        rf_fail_expected(err, "llama or gpt2");
        return rf_fail_got(err, "%.*s", (int)RF_MIN(model.length, 100u), model.bytes);
    }
    vocab->kind = RF_VOCAB_BPE;
    if (pre.length == 0) {
        vocab->pre = 0;
    } else if (!rf_split_find(pre, &vocab->pre)) {
        char names[200];
        rf_writer writer = rf_writer_make(names, sizeof names);
        rf_split_names(&writer);
        rf_fail(err, RF_ERR_UNSUPPORTED, KEY "pre", "this pre-tokenizer is not known; known: %s",
                names);
        rf_fail_expected(err, "one of the known ones");
        return rf_fail_got(err, "%.*s", (int)RF_MIN(pre.length, 100u), pre.bytes);
    }
    vocab->add_bos = rf_split_adds_bos(vocab->pre);
    return RF_OK;
}

/* ---- tokens ------------------------------------------------------------------------------ */

typedef struct token_reader { /* walks the tokens with their types and scores */
    const rf_vocab *vocab;
    const rf_gguf_key *tokens, *types, *scores;
    uint64_t at;
    uint32_t next;
    bool strips_right; /* Phi-3: special tokens swallow the white space behind them */
} token_reader;

typedef struct token_entry {
    rf_text text;
    uint32_t id;
    uint32_t type; /* with RF_TOKEN_CUT and RF_TOKEN_STRIPS_RIGHT */
    float score;
    size_t known; /* index into known_texts or KNOWN_NONE */
} token_entry;

static rf_status open_tokens(const rf_gguf *gguf, const rf_vocab *vocab, token_reader *reader,
                             rf_error *err)
{
    *reader = (token_reader){.vocab = vocab};
    rf_status status = read_array(gguf, KEY "tokens", RF_GGUF_STRING, RF_GGUF_STRING, UINT64_MAX,
                                  &reader->tokens, err);
    if (status)
        return status;
    if (!reader->tokens)
        return missing(KEY "tokens", err);
    uint64_t count = reader->tokens->count;
    if (count == 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, KEY "tokens", "the vocabulary is empty");
    if (count >= (uint64_t)1 << 31)
        return rf_fail(err, RF_ERR_UNSUPPORTED, KEY "tokens", "more than 2^31 tokens");
    status =
        read_array(gguf, KEY "token_type", RF_GGUF_I32, RF_GGUF_U32, count, &reader->types, err);
    if (status == RF_OK)
        status =
            read_array(gguf, KEY "scores", RF_GGUF_F32, RF_GGUF_I32, count, &reader->scores, err);
    if (status)
        return status;
    if (vocab->kind == RF_VOCAB_SPM && !reader->scores)
        return missing(KEY "scores", err);
    rf_text name;
    const rf_gguf_key *key = rf_gguf_find(gguf, "general.name");
    if (key && rf_gguf_text(key, &name)) {
        for (uint64_t i = 0; i + 4 <= name.length; i++) {
            const char *at = name.bytes + i;
            uint64_t digit = at[3] == '-' ? 4 : 3;
            bool phi = (at[0] | 0x20) == 'p' && (at[1] | 0x20) == 'h' && (at[2] | 0x20) == 'i';
            if (phi && i + digit < name.length && at[digit] == '3')
                reader->strips_right = true;
        }
    }
    return RF_OK;
}

/* The value of a byte token's text "<0xNN>", or -1. */
static int byte_of(rf_text text)
{
    if (text.length != 6 || memcmp(text.bytes, "<0x", 3) != 0 || text.bytes[5] != '>')
        return -1;
    int value = 0;
    for (int i = 3; i < 5; i++) {
        char c = text.bytes[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                           : -1;
        if (digit < 0)
            return -1;
        value = value * 16 + digit;
    }
    return value;
}

static bool is_special(uint32_t type)
{
    if (type & RF_TOKEN_CUT)
        return true;
    type &= RF_TOKEN_TYPE_MASK;
    return type == RF_TOKEN_CONTROL || type == RF_TOKEN_USER || type == RF_TOKEN_UNKNOWN;
}

static bool next_token(token_reader *reader, token_entry *entry)
{
    if (!rf_gguf_next_text(reader->tokens, &reader->at, &entry->text))
        return false;
    entry->id = reader->next++;
    entry->known = find_known(entry->text);
    entry->type = RF_TOKEN_NORMAL;
    int64_t type = RF_TOKEN_NORMAL;
    if (reader->types && rf_gguf_i64(reader->types, entry->id, &type))
        entry->type = type >= 0 && type <= RF_TOKEN_BYTE ? (uint32_t)type : RF_TOKEN_UNDEFINED;
    bool spells_byte = byte_of(entry->text) >= 0;
    if (!reader->types && reader->vocab->kind == RF_VOCAB_SPM && spells_byte)
        entry->type = RF_TOKEN_BYTE;
    if (entry->type == RF_TOKEN_BYTE && !spells_byte)
        entry->type = RF_TOKEN_NORMAL;
    if (entry->known != KNOWN_NONE)
        entry->type = is_special(entry->type) || known_texts[entry->known].role & CONTROLS
                          ? RF_TOKEN_CONTROL
                          : entry->type | RF_TOKEN_CUT;
    if (reader->strips_right && is_special(entry->type) && !rf_text_is(entry->text, "<unk>") &&
        !rf_text_is(entry->text, "<s>") && !rf_text_is(entry->text, "<|endoftext|>"))
        entry->type |= RF_TOKEN_STRIPS_RIGHT;
    double score = 0;
    if (reader->scores && !rf_gguf_f64(reader->scores, entry->id, &score)) {
        int64_t whole = 0;
        rf_gguf_i64(reader->scores, entry->id, &whole);
        score = (double)whole;
    }
    entry->score = (float)score;
    return true;
}

static uint64_t index_slots(uint32_t token_count)
{
    uint64_t slots = 16;
    while (slots < 2 * (uint64_t)token_count)
        slots *= 2;
    return slots;
}

static rf_status fail_merge(uint64_t index, const char *what, rf_text text, rf_error *err)
{
    char where[64];
    rf_print(where, sizeof where, KEY "merges[%llu]", (unsigned long long)index);
    rf_fail(err, RF_ERR_BAD_MODEL, where, "%s", what);
    rf_fail_expected(err, "two texts parted by a blank");
    return rf_fail_got(err, "\"%.*s\"", (int)RF_MIN(text.length, 60u), text.bytes);
}

/* Splits a merge at its first blank behind the first character. */
static bool split_merge(rf_text text, rf_text *left, rf_text *right)
{
    const char *blank =
        text.length > 2 ? memchr(text.bytes + 1, ' ', (size_t)text.length - 1) : NULL;
    if (!blank)
        return false;
    uint64_t length = (uint64_t)(blank - text.bytes);
    *left = (rf_text){text.bytes, length};
    *right = (rf_text){blank + 1, text.length - length - 1};
    return right->length > 0;
}

static rf_status measure_merges(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err)
{
    const rf_gguf_key *merges;
    rf_status status =
        read_array(gguf, KEY "merges", RF_GGUF_STRING, RF_GGUF_STRING, UINT64_MAX, &merges, err);
    if (status)
        return status;
    if (!merges)
        return missing(KEY "merges", err);
    if (merges->count >= (uint64_t)1 << 31)
        return rf_fail(err, RF_ERR_UNSUPPORTED, KEY "merges", "more than 2^31 merges");
    rf_text text, left = {0}, right = {0};
    uint64_t at = 0;
    for (uint64_t i = 0; rf_gguf_next_text(merges, &at, &text); i++) {
        if (!split_merge(text, &left, &right))
            return fail_merge(i, "the merge is no pair", text, err);
    }
    vocab->merge_count = merges->count;
    return RF_OK;
}

/* Counts what the tables need, and notes the tokens that are known by their text. */
static rf_status measure_tokens(token_reader *reader, rf_vocab *vocab, rf_error *err)
{
    size_t turn_end = KNOWN_NONE;
    uint32_t turn_end_id = RF_TOKEN_NONE;
    bool may_set_eot = vocab->eot == RF_TOKEN_NONE;
    token_entry entry;
    while (next_token(reader, &entry)) {
        if (entry.text.length > UINT32_MAX) {
            char where[64];
            rf_print(where, sizeof where, KEY "tokens[%u]", entry.id);
            return rf_fail(err, RF_ERR_UNSUPPORTED, where, "a token text of 4 GiB or more");
        }
        /* No decoding makes a text longer. */
        vocab->longest_token = RF_MAX(vocab->longest_token, entry.text.length);
        if (is_special(entry.type) && entry.text.length > 0)
            vocab->special_count++;
        if (entry.known == KNOWN_NONE || entry.type & RF_TOKEN_CUT)
            continue;
        uint32_t role = known_texts[entry.known].role;
        if (role & ENDS)
            add_end(vocab, entry.id);
        if (role & ENDS_TURN && may_set_eot && entry.known < turn_end) {
            turn_end = entry.known;
            turn_end_id = entry.id;
        }
    }
    if (may_set_eot)
        vocab->eot = turn_end_id;
    return RF_OK;
}

const char *rf_vocab_table_name(rf_vocab_table table)
{
    static const char *const names[RF_VOCAB_TABLE_COUNT] = {"tokens", "index", "merges",
                                                            "specials"};
    return (uint32_t)table < RF_VOCAB_TABLE_COUNT ? names[table] : "?";
}

rf_status rf_vocab_measure(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    *vocab = (rf_vocab){.gguf = gguf};
    token_reader reader;
    rf_status status = read_model(gguf, vocab, err);
    if (status == RF_OK)
        status = open_tokens(gguf, vocab, &reader, err);
    if (status)
        return status;
    vocab->token_count = (uint32_t)reader.tokens->count;
    status = read_ids(gguf, vocab, err);
    if (status == RF_OK)
        status = read_flags(gguf, vocab, err);
    if (status == RF_OK)
        status = measure_tokens(&reader, vocab, err);
    if (status == RF_OK && vocab->kind == RF_VOCAB_BPE)
        status = measure_merges(gguf, vocab, err);
    if (status)
        return status;
    /* Counts are below 2^31 and the units below 32 bytes: no product can overflow. */
    vocab->table_bytes[RF_VOCAB_TOKENS] =
        sizeof(rf_token_head) + vocab->token_count * (sizeof(rf_token) + 1);
    vocab->table_bytes[RF_VOCAB_INDEX] = index_slots(vocab->token_count) * sizeof(uint64_t);
    vocab->table_bytes[RF_VOCAB_MERGES] = rf_merge_slots(vocab->merge_count) * sizeof(rf_merge);
    vocab->table_bytes[RF_VOCAB_SPECIALS] =
        sizeof(rf_special_table) + 2 * sizeof(uint32_t) * (uint64_t)vocab->special_count;
    return RF_OK;
}

/* ---- index ------------------------------------------------------------------------------- */

/* FNV-1a, mixed at the end. By the byte, so that a text in two parts has the hash of the whole. */
static uint64_t hash_bytes(uint64_t hash, rf_text text)
{
    for (uint64_t i = 0; i < text.length; i++)
        hash = (hash ^ (uint8_t)text.bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

#define HASH_START UINT64_C(0xcbf29ce484222325)

static uint64_t hash_end(uint64_t hash)
{
    hash ^= hash >> 31;
    hash *= UINT64_C(0xbf58476d1ce4e5b9);
    return hash ^ hash >> 27;
}

/* The slot of the text left + right: its own, or the empty one where it belongs. */
static uint64_t find_slot(const rf_vocab *vocab, rf_text left, rf_text right, uint64_t hash)
{
    const uint64_t *slots = vocab->tables[RF_VOCAB_INDEX];
    const rf_token *tokens = rf_vocab_tokens(vocab);
    uint64_t mask = vocab->table_bytes[RF_VOCAB_INDEX] / sizeof(uint64_t) - 1;
    uint64_t length = left.length + right.length;
    for (uint64_t i = hash & mask;; i = (i + 1) & mask) {
        if (slots[i] == 0)
            return i;
        if (slots[i] >> 32 != hash >> 32)
            continue;
        const rf_token *token = &tokens[(uint32_t)slots[i] - 1];
        const char *text = (const char *)vocab->gguf->data + token->at;
        if (token->length == length && memcmp(text, left.bytes, (size_t)left.length) == 0 &&
            memcmp(text + left.length, right.bytes, (size_t)right.length) == 0)
            return i;
    }
}

static uint32_t find_parts(const rf_vocab *vocab, rf_text left, rf_text right)
{
    const uint64_t *slots = vocab->tables[RF_VOCAB_INDEX];
    uint64_t length = left.length + right.length;
    if (length == 0 || length > rf_vocab_head(vocab)->longest_text)
        return RF_TOKEN_NONE;
    uint64_t hash = hash_end(hash_bytes(hash_bytes(HASH_START, left), right));
    uint64_t slot = slots[find_slot(vocab, left, right, hash)];
    return slot ? (uint32_t)slot - 1 : RF_TOKEN_NONE;
}

uint32_t rf_vocab_find(const rf_vocab *vocab, rf_text text)
{
    return find_parts(vocab, text, (rf_text){"", 0});
}

rf_text rf_vocab_text(const rf_vocab *vocab, uint32_t id)
{
    if (id >= vocab->token_count)
        return (rf_text){"", 0};
    const rf_token *token = &rf_vocab_tokens(vocab)[id];
    return (rf_text){(const char *)vocab->gguf->data + token->at, token->length};
}

/* ---- filling ----------------------------------------------------------------------------- */

static bool has_inner_blank(rf_text text)
{
    for (uint64_t i = 1; i + 3 <= text.length; i++) {
        if (memcmp(text.bytes + i, BLANK, 3) == 0 &&
            (i < 3 || memcmp(text.bytes + i - 3, BLANK, 3) != 0))
            return true;
    }
    return false;
}

static void fill_tokens(token_reader *reader, rf_vocab *vocab)
{
    rf_token_head *head = vocab->tables[RF_VOCAB_TOKENS];
    rf_token *tokens = (rf_token *)(void *)(head + 1);
    uint8_t *kinds = (uint8_t *)(tokens + vocab->token_count);
    uint64_t *slots = vocab->tables[RF_VOCAB_INDEX];
    memset(head, 0, sizeof *head);
    memset(slots, 0, (size_t)vocab->table_bytes[RF_VOCAB_INDEX]);
    head->space_parts = 1;
    token_entry entry;
    while (next_token(reader, &entry)) {
        uint64_t at = (uint64_t)((const uint8_t *)entry.text.bytes - vocab->gguf->data);
        uint32_t length = (uint32_t)entry.text.length;
        tokens[entry.id] = (rf_token){at, length, entry.score};
        kinds[entry.id] = (uint8_t)entry.type;
        head->longest_text = RF_MAX(head->longest_text, length);
        if (vocab->kind == RF_VOCAB_SPM && has_inner_blank(entry.text))
            head->space_parts = 0;
        if (length == 0) /* no text can be it */
            continue;
        /* Of tokens with one text the last is found, as in a map that is filled in order. */
        uint64_t hash = hash_end(hash_bytes(HASH_START, entry.text));
        slots[find_slot(vocab, entry.text, (rf_text){"", 0}, hash)] =
            (hash >> 32) << 32 | (entry.id + 1);
    }
}

static void fill_byte_ids(rf_vocab *vocab)
{
    rf_token_head *head = vocab->tables[RF_VOCAB_TOKENS];
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint8_t bytes[8];
        uint64_t length;
        if (vocab->kind == RF_VOCAB_BPE)
            length = rf_utf8_write(rf_byte_to_letter((uint8_t)byte), bytes);
        else
            length = rf_print((char *)bytes, sizeof bytes, "<0x%c%c>",
                              "0123456789ABCDEF"[byte >> 4], "0123456789ABCDEF"[byte & 15]);
        uint32_t id = rf_vocab_find(vocab, (rf_text){(const char *)bytes, length});
        if (id == RF_TOKEN_NONE && vocab->kind == RF_VOCAB_SPM) {
            bytes[0] = (uint8_t)byte;
            id = rf_vocab_find(vocab, (rf_text){(const char *)bytes, 1});
        }
        head->byte_ids[byte] = id;
    }
}

/* A merge of texts that are no tokens can never give a token, so it gets no slot. */
static void fill_merges(rf_vocab *vocab)
{
    rf_merge *merges = vocab->tables[RF_VOCAB_MERGES];
    uint64_t slots = rf_merge_slots(vocab->merge_count);
    for (uint64_t i = 0; i < slots; i++)
        merges[i] = (rf_merge){0, 0, RF_TOKEN_NONE, 0};
    if (vocab->merge_count == 0)
        return;
    const rf_gguf_key *key = rf_gguf_find(vocab->gguf, KEY "merges");
    rf_text text, left = {0}, right = {0};
    uint64_t at = 0;
    for (uint32_t rank = 0; rf_gguf_next_text(key, &at, &text); rank++) {
        split_merge(text, &left, &right);
        rf_merge merge = {rf_vocab_find(vocab, left), rf_vocab_find(vocab, right), rank,
                          find_parts(vocab, left, right)};
        if (merge.left == RF_TOKEN_NONE || merge.right == RF_TOKEN_NONE ||
            merge.merged == RF_TOKEN_NONE || rf_merge_find(vocab, merge.left, merge.right))
            continue;
        uint64_t slot = rf_merge_slot(merge.left, merge.right, slots);
        while (merges[slot].rank != RF_TOKEN_NONE)
            slot = slot + 1 == slots ? 0 : slot + 1;
        merges[slot] = merge;
    }
}

/* Orders values by before(vocab, a, b) in place: heap sort, for it takes no memory. */
typedef bool (*before_fn)(const rf_vocab *vocab, uint32_t a, uint32_t b);

static void sift(const rf_vocab *vocab, uint32_t *values, uint64_t at, uint64_t count,
                 before_fn before)
{
    uint32_t value = values[at];
    for (uint64_t child; (child = 2 * at + 1) < count; at = child) {
        if (child + 1 < count && before(vocab, values[child], values[child + 1]))
            child++;
        if (!before(vocab, value, values[child]))
            break;
        values[at] = values[child];
    }
    values[at] = value;
}

static void sort(const rf_vocab *vocab, uint32_t *values, uint64_t count, before_fn before)
{
    for (uint64_t i = count / 2; i-- > 0;)
        sift(vocab, values, i, count, before);
    for (uint64_t last = count; last-- > 1;) {
        uint32_t top = values[0];
        values[0] = values[last];
        values[last] = top;
        sift(vocab, values, 0, last, before);
    }
}

static bool is_longer(const rf_vocab *vocab, uint32_t a, uint32_t b)
{
    const rf_token *tokens = rf_vocab_tokens(vocab);
    return tokens[a].length != tokens[b].length ? tokens[a].length > tokens[b].length : a < b;
}

static bool is_before_by_text(const rf_vocab *vocab, uint32_t a, uint32_t b)
{
    rf_text left = rf_vocab_text(vocab, rf_specials_by_length(vocab)[a]);
    rf_text right = rf_vocab_text(vocab, rf_specials_by_length(vocab)[b]);
    int order = memcmp(left.bytes, right.bytes, (size_t)RF_MIN(left.length, right.length));
    if (order != 0)
        return order < 0;
    return left.length != right.length ? left.length < right.length : a < b;
}

static void fill_specials(rf_vocab *vocab)
{
    rf_special_table *table = vocab->tables[RF_VOCAB_SPECIALS];
    uint32_t *by_length = table->first + 257, *by_text = by_length + vocab->special_count;
    uint32_t count = 0;
    for (uint32_t id = 0; id < vocab->token_count; id++) {
        if (is_special(rf_vocab_kinds(vocab)[id]) && rf_vocab_text(vocab, id).length > 0)
            by_length[count++] = id;
    }
    sort(vocab, by_length, count, is_longer);
    for (uint32_t i = 0; i < count; i++)
        by_text[i] = i;
    sort(vocab, by_text, count, is_before_by_text);
    for (uint32_t byte = 0, i = 0; byte <= 256; byte++) {
        while (i < count && (uint8_t)rf_vocab_text(vocab, by_length[by_text[i]]).bytes[0] < byte)
            i++;
        table->first[byte] = i;
    }
}

rf_status rf_vocab_build(rf_vocab *vocab, rf_error *err)
{
    token_reader reader;
    rf_status status = open_tokens(vocab->gguf, vocab, &reader, err);
    if (status)
        return status;
    fill_tokens(&reader, vocab);
    fill_byte_ids(vocab);
    fill_merges(vocab);
    fill_specials(vocab);
    return RF_OK;
}
