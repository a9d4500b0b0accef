/* text/spm.c: SentencePiece's BPE: characters merge into the token with the highest score until no
 * two neighbours are a token together; what is no token then falls back to its bytes.
 *
 * Blanks are written as U+2581 first. Most vocabularies have no token with U+2581 behind another
 * character, so no merge can cross from a word into the blank after it, and the text is done word
 * by word in a few cache lines; otherwise the whole fragment is one list. Either way it is a linked
 * list with a heap, O(n log n). Called by tokenize.c; knows no special token.
 *
 * Method: Kudo & Richardson 2018; ties go to the left, as in the reference.
 */
#include "text/tables.h"

#include <string.h>

#define BLANK_BYTES 3u
static const uint8_t blank[BLANK_BYTES] = {0xe2, 0x96, 0x81};

/* Length of a character by its first byte alone: the reference does not check the others. */
static uint32_t letter_length(uint8_t first)
{
    static const uint8_t lengths[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 4};
    return lengths[first >> 4];
}

/* A key that sorts high scores first, then low indices. */
static uint64_t key_of(float score, uint32_t left)
{
    float positive_zero = score + 0.0f;
    uint32_t bits;
    memcpy(&bits, &positive_zero, sizeof bits);
    bits = bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
    return (uint64_t)bits << 32 | left;
}

typedef struct word_list { /* the word that is being merged */
    const rf_vocab *vocab;
    const uint8_t *text;
    rf_symbols symbols; /* id[i]: where symbol i begins in text */
    uint32_t count;
    uint32_t end; /* where the last symbol ends */
} word_list;

static rf_text text_of(const word_list *word, uint32_t first, uint32_t after)
{
    uint32_t from = word->symbols.id[first];
    uint32_t to = after == RF_TOKEN_NONE ? word->end : word->symbols.id[after];
    return (rf_text){(const char *)word->text + from, to - from};
}

static void queue_pair(word_list *word, uint32_t left)
{
    rf_symbols *symbols = &word->symbols;
    uint32_t right = symbols->next[left];
    symbols->pair[left] = RF_TOKEN_NONE;
    if (right == RF_TOKEN_NONE)
        return;
    uint32_t id = rf_vocab_find(word->vocab, text_of(word, left, symbols->next[right]));
    symbols->pair[left] = id;
    if (id != RF_TOKEN_NONE)
        rf_heap_push(symbols, key_of(rf_vocab_tokens(word->vocab)[id].score, left));
}

static void put_symbol(const word_list *word, uint32_t symbol, rf_id_sink *sink)
{
    const rf_vocab *vocab = word->vocab;
    rf_text text = text_of(word, symbol, word->symbols.next[symbol]);
    uint32_t id = rf_vocab_find(vocab, text);
    if (id != RF_TOKEN_NONE) {
        rf_sink_put(sink, id);
        return;
    }
    for (uint64_t i = 0; i < text.length; i++) {
        id = rf_vocab_head(vocab)->byte_ids[(uint8_t)text.bytes[i]];
        if (id == RF_TOKEN_NONE)
            id = vocab->unk;
        if (id != RF_TOKEN_NONE)
            rf_sink_put(sink, id);
    }
}

static void merge_word(word_list *word, rf_id_sink *sink)
{
    rf_symbols *symbols = &word->symbols;
    symbols->heap_count = 0;
    if (word->count == 0)
        return;
    for (uint32_t i = 0; i < word->count; i++) {
        symbols->prev[i] = i ? i - 1 : RF_TOKEN_NONE;
        symbols->next[i] = i + 1 < word->count ? i + 1 : RF_TOKEN_NONE;
    }
    for (uint32_t i = 0; i < word->count; i++)
        queue_pair(word, i);
    while (symbols->heap_count) {
        uint64_t key = rf_heap_pop(symbols);
        uint32_t left = (uint32_t)key, id = symbols->pair[left];
        if (id == RF_TOKEN_NONE || key_of(rf_vocab_tokens(word->vocab)[id].score, left) != key)
            continue; /* the pair has changed since */
        uint32_t right = symbols->next[left];
        symbols->next[left] = symbols->next[right];
        symbols->pair[right] = RF_TOKEN_NONE;
        if (symbols->next[right] != RF_TOKEN_NONE)
            symbols->prev[symbols->next[right]] = left;
        if (symbols->prev[left] != RF_TOKEN_NONE)
            queue_pair(word, symbols->prev[left]);
        queue_pair(word, left);
    }
    for (uint32_t i = 0; i != RF_TOKEN_NONE; i = symbols->next[i])
        put_symbol(word, i, sink);
}

/* Writes the text with blanks as U+2581; out has three bytes for each byte, and three more. */
static uint32_t write_blanks(const uint8_t *text, uint64_t bytes, bool space_before, uint8_t *out)
{
    uint32_t length = 0;
    if (space_before) {
        memcpy(out, blank, BLANK_BYTES);
        length = BLANK_BYTES;
    }
    for (uint64_t i = 0; i < bytes; i++) {
        if (text[i] == ' ') {
            memcpy(out + length, blank, BLANK_BYTES);
            length += BLANK_BYTES;
        } else {
            out[length++] = text[i];
        }
    }
    return length;
}

void rf_spm_encode(const rf_vocab *vocab, const uint8_t *text, uint64_t bytes, bool space_before,
                   void *memory, uint64_t memory_bytes, rf_id_sink *sink)
{
    /* memory: the rewritten text, then the symbols: at most one a byte, and one for the space. */
    uint64_t text_space = 3 * bytes + BLANK_BYTES;
    text_space = (text_space + 63) & ~UINT64_C(63);
    uint8_t *rewritten = memory;
    word_list word = {.vocab = vocab,
                      .text = rewritten,
                      .symbols =
                          rf_symbols_make(rewritten + text_space, memory_bytes - text_space)};
    bool by_word = rf_vocab_head(vocab)->space_parts != 0;
    uint32_t length = write_blanks(text, bytes, space_before, rewritten), step;
    bool was_blank = true;
    for (uint32_t at = 0; at < length; at += step) {
        step = RF_MIN(letter_length(rewritten[at]), length - at);
        bool is_blank = step == BLANK_BYTES && memcmp(rewritten + at, blank, BLANK_BYTES) == 0;
        if (by_word && is_blank && !was_blank) {
            word.end = at;
            merge_word(&word, sink);
            word.count = 0;
        }
        word.symbols.id[word.count++] = at;
        was_blank = is_blank;
    }
    word.end = length;
    merge_word(&word, sink);
}
