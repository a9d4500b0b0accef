/* tests/unit/tiny_vocab.h: vocabularies built in memory, for tests of the text floor.
 *
 * A list of words becomes a GGUF file and is opened as the runtime does it. Scratch, ids and tables
 * are blocks of exactly the announced size, so that the address sanitizer sees a byte too many.
 *
 *   word_list *w = spm_words();
 *   uint32_t ab = add(w, "ab", RF_TOKEN_NORMAL, -1);
 *   open_vocab *o = open_words(w);
 *   assert_ids(&o->vocab, "ab", false, true, IDS(ab));
 *   close_words(o);
 */
#ifndef TINY_VOCAB_H
#define TINY_VOCAB_H

#include "tiny_gguf.h"

#include "text/tables.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#define BLANK "\xe2\x96\x81"
#define LOST  "\xef\xbf\xbd" /* U+FFFD */
#define NONE  RF_TOKEN_NONE

/* ---- vocabularies ------------------------------------------------------------------------- */

#define TOKENS_MAX 600

typedef struct word_list { /* a vocabulary before it is a file */
    const char *model, *pre;
    const char *texts[TOKENS_MAX];
    int32_t types[TOKENS_MAX];
    float scores[TOKENS_MAX];
    uint32_t count;
    const char *merges[32];
    uint32_t merge_count;
    char storage[256][8];
} word_list;

typedef struct open_vocab {
    tiny_gguf file;
    rf_gguf gguf;
    rf_vocab vocab;
} open_vocab;

static inline uint32_t add(word_list *words, const char *text, int32_t type, float score)
{
    assert_true(words->count < TOKENS_MAX);
    words->texts[words->count] = text;
    words->types[words->count] = type;
    words->scores[words->count] = score;
    return words->count++;
}

/* Ids: 0 <unk>, 1 <s>, 2 </s>, 3 + byte, then what the test adds. */
static inline word_list *spm_words(void)
{
    word_list *made = calloc(1, sizeof *made);
    assert_non_null(made);
    made->model = "llama";
    add(made, "<unk>", RF_TOKEN_UNKNOWN, 0);
    add(made, "<s>", RF_TOKEN_CONTROL, 0);
    add(made, "</s>", RF_TOKEN_CONTROL, 0);
    for (int byte = 0; byte < 256; byte++) {
        snprintf(made->storage[byte], sizeof made->storage[byte], "<0x%02X>", byte);
        add(made, made->storage[byte], RF_TOKEN_BYTE, 0);
    }
    return made;
}

/* Ids: the byte, then what the test adds. */
static inline word_list *bpe_words(const char *pre)
{
    word_list *made = calloc(1, sizeof *made);
    assert_non_null(made);
    made->model = "gpt2";
    made->pre = pre;
    for (int byte = 0; byte < 256; byte++) {
        uint8_t *text = (uint8_t *)made->storage[byte];
        text[rf_utf8_write(rf_byte_to_letter((uint8_t)byte), text)] = 0;
        add(made, made->storage[byte], RF_TOKEN_NORMAL, 0);
    }
    return made;
}

static inline void merge(word_list *words, const char *pair)
{
    words->merges[words->merge_count++] = pair;
}

/* The keys of a vocabulary; the caller may add more before tiny_finish. */
static inline tiny_gguf file_of(const word_list *words)
{
    tiny_gguf file = tiny_begin(3);
    tiny_key_text(&file, "tokenizer.ggml.model", words->model);
    if (words->pre)
        tiny_key_text(&file, "tokenizer.ggml.pre", words->pre);
    tiny_key_texts(&file, "tokenizer.ggml.tokens", words->count, words->texts);
    tiny_key_array(&file, "tokenizer.ggml.token_type", RF_GGUF_I32, words->count, words->types, 4);
    if (strcmp(words->model, "llama") == 0)
        tiny_key_array(&file, "tokenizer.ggml.scores", RF_GGUF_F32, words->count, words->scores, 4);
    else
        tiny_key_texts(&file, "tokenizer.ggml.merges", words->merge_count, words->merges);
    return file;
}

static inline void read_header(open_vocab *open)
{
    tiny_finish(&open->file, 0);
    assert_int_equal(rf_gguf_scan(open->file.bytes, open->file.size, &open->gguf, NULL), RF_OK);
    open->gguf.keys = calloc(open->gguf.key_count + 1, sizeof *open->gguf.keys);
    open->gguf.tensors = calloc(1, sizeof *open->gguf.tensors);
    void *scratch = malloc((size_t)rf_gguf_scratch_bytes(&open->gguf) + 1);
    assert_int_equal(rf_gguf_read(&open->gguf, scratch, NULL), RF_OK);
    free(scratch);
}

static inline void close_header(open_vocab *open)
{
    free(open->gguf.keys);
    free(open->gguf.tensors);
    tiny_free(&open->file);
}

/* Finishes the file and opens it as the runtime does. Releases words. */
static inline open_vocab *open_file(word_list *words, tiny_gguf file)
{
    open_vocab *made = calloc(1, sizeof *made);
    rf_error err = {0};
    assert_non_null(made);
    made->file = file;
    read_header(made);
    rf_status status = rf_vocab_measure(&made->gguf, &made->vocab, &err);
    if (status)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++) {
        made->vocab.tables[i] = malloc((size_t)made->vocab.table_bytes[i]);
        assert_non_null(made->vocab.tables[i]);
        memset(made->vocab.tables[i], 0xa5, (size_t)made->vocab.table_bytes[i]);
    }
    assert_int_equal(rf_vocab_build(&made->vocab, &err), RF_OK);
    free(words);
    return made;
}

static inline open_vocab *open_words(word_list *words)
{
    return open_file(words, file_of(words));
}

static inline void close_words(open_vocab *open)
{
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++)
        free(open->vocab.tables[i]);
    close_header(open);
    free(open);
}

/* ---- tokenising --------------------------------------------------------------------------- */

typedef struct ids {
    uint32_t *at;
    uint64_t count;
} ids;

static inline ids encode(const rf_vocab *vocab, const void *text, size_t bytes, bool add_special,
                         bool parse_special)
{
    uint64_t scratch_bytes = rf_tokenize_scratch_bytes(vocab, bytes);
    uint64_t bound = rf_tokenize_bound(vocab, bytes);
    void *scratch = malloc((size_t)scratch_bytes), *copy = malloc(bytes + 1);
    ids out = {malloc((size_t)bound * sizeof(uint32_t)), 0};
    assert_true(scratch && out.at && copy);
    memcpy(copy, text, bytes);
    copy = realloc(copy, bytes ? bytes : 1); /* no terminator to lean on */
    rf_error err = {0};
    rf_status status =
        rf_tokenize(vocab, copy, bytes, (rf_tokenize_options){add_special, parse_special}, scratch,
                    scratch_bytes, out.at, bound, &out.count, &err);
    if (status)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    free(scratch);
    free(copy);
    return out;
}

/* Compares with expected[], which ends with NONE. */
static inline void assert_ids(const rf_vocab *vocab, const char *text, bool add_special,
                              bool parse_special, const uint32_t *expected)
{
    ids got = encode(vocab, text, strlen(text), add_special, parse_special);
    uint64_t i = 0;
    while (expected[i] != NONE && i < got.count && got.at[i] == expected[i])
        i++;
    if (expected[i] != NONE || i < got.count) {
        print_error("\"%s\": token %u of", text, (unsigned)i);
        for (uint64_t k = 0; k < got.count; k++)
            print_error(" %u", got.at[k]);
        print_error(", expected");
        for (uint64_t k = 0; expected[k] != NONE; k++)
            print_error(" %u", expected[k]);
        print_error("\n");
        fail();
    }
    free(got.at);
}

#define IDS(...) ((const uint32_t[]){__VA_ARGS__, NONE})
#define NOTHING  ((const uint32_t[]){NONE})

/* ---- chance -------------------------------------------------------------------------------- */

static uint64_t random_state = 1;

static inline uint32_t random_below(uint32_t limit)
{
    random_state = random_state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return (uint32_t)(random_state >> 33) % limit;
}

#endif
