/* text/bpe.c: byte-level BPE: bytes become tokens, then the pair with the lowest rank merges until
 * none is left.
 *
 * Pairs are looked up by the ids of their halves, so no text is compared on the way. A short word
 * lies in a small array and is searched for its lowest rank each time; a long one is a linked list
 * with a heap, which keeps a megabyte of one letter at O(n log n). Both give the leftmost pair of
 * the lowest rank the first turn, so they agree. Called by tokenize.c; knows no special token.
 *
 * Method: Sennrich et al. 2016 (BPE); Radford et al. 2019 (bytes as letters).
 */
#include "text/tables.h"

#include <string.h>

#define SHORT_WORD 32u /* up to here searching the array beats the heap */

/* ---- memory that both encoders use ------------------------------------------------------- */

rf_symbols rf_symbols_make(void *memory, uint64_t bytes)
{
    rf_symbols symbols = {.capacity = (uint32_t)RF_MIN(bytes / RF_SYMBOL_BYTES, UINT32_MAX - 1)};
    symbols.heap = memory; /* first: it has the strictest alignment */
    symbols.id = (uint32_t *)(symbols.heap + 2 * (uint64_t)symbols.capacity);
    symbols.pair = symbols.id + symbols.capacity;
    symbols.prev = symbols.pair + symbols.capacity;
    symbols.next = symbols.prev + symbols.capacity;
    return symbols;
}

void rf_heap_push(rf_symbols *symbols, uint64_t key)
{
    uint64_t *heap = symbols->heap;
    uint64_t at = symbols->heap_count++;
    while (at > 0 && heap[(at - 1) / 2] > key) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = key;
}

uint64_t rf_heap_pop(rf_symbols *symbols)
{
    uint64_t *heap = symbols->heap;
    uint64_t top = heap[0], count = --symbols->heap_count, key = heap[count], at = 0;
    for (uint64_t child = 1; child < count; child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= key)
            break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = key;
    return top;
}

/* ---- words ------------------------------------------------------------------------------- */

static uint32_t rank_of(const rf_vocab *vocab, uint32_t left, uint32_t right)
{
    const rf_merge *merge = rf_merge_find(vocab, left, right);
    return merge ? merge->rank : RF_TOKEN_NONE;
}

static void put_all(const uint32_t *ids, uint32_t count, rf_id_sink *sink)
{
    for (uint32_t i = 0; i < count; i++) {
        if (ids[i] != RF_TOKEN_NONE) /* a byte without a token is left out, as the reference does */
            rf_sink_put(sink, ids[i]);
    }
}

/* Merges ids[count], count <= SHORT_WORD, in place. */
static void merge_short(const rf_vocab *vocab, uint32_t *ids, uint32_t count, rf_id_sink *sink)
{
    const rf_merge *merges[SHORT_WORD];
    uint32_t ranks[SHORT_WORD];
    for (uint32_t i = 0; i + 1 < count; i++) {
        merges[i] = rf_merge_find(vocab, ids[i], ids[i + 1]);
        ranks[i] = merges[i] ? merges[i]->rank : RF_TOKEN_NONE;
    }
    while (count > 1) {
        uint32_t best = 0;
        for (uint32_t i = 1; i + 1 < count; i++) {
            if (ranks[i] < ranks[best])
                best = i;
        }
        if (ranks[best] == RF_TOKEN_NONE)
            break;
        ids[best] = merges[best]->merged;
        count--;
        for (uint32_t i = best + 1; i < count; i++) {
            ids[i] = ids[i + 1];
            merges[i - 1] = merges[i];
            ranks[i - 1] = ranks[i];
        }
        for (uint32_t i = best ? best - 1 : 0; i <= best && i + 1 < count; i++) {
            merges[i] = rf_merge_find(vocab, ids[i], ids[i + 1]);
            ranks[i] = merges[i] ? merges[i]->rank : RF_TOKEN_NONE;
        }
    }
    put_all(ids, count, sink);
}

/* Notes the rank of the pair that begins at symbol `left` and queues it. */
static void queue_pair(const rf_vocab *vocab, rf_symbols *symbols, uint32_t left)
{
    uint32_t right = symbols->next[left];
    uint32_t rank = right == RF_TOKEN_NONE ? RF_TOKEN_NONE
                                           : rank_of(vocab, symbols->id[left], symbols->id[right]);
    symbols->pair[left] = rank;
    if (rank != RF_TOKEN_NONE)
        rf_heap_push(symbols, (uint64_t)rank << 32 | left);
}

static void merge_long(const rf_vocab *vocab, rf_symbols *symbols, uint32_t count, rf_id_sink *sink)
{
    symbols->heap_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        symbols->prev[i] = i ? i - 1 : RF_TOKEN_NONE;
        symbols->next[i] = i + 1 < count ? i + 1 : RF_TOKEN_NONE;
    }
    for (uint32_t i = 0; i < count; i++)
        queue_pair(vocab, symbols, i);
    while (symbols->heap_count) {
        uint64_t key = rf_heap_pop(symbols);
        uint32_t left = (uint32_t)key;
        if (symbols->pair[left] != (uint32_t)(key >> 32)) /* the pair has changed since */
            continue;
        uint32_t right = symbols->next[left];
        symbols->id[left] = rf_merge_find(vocab, symbols->id[left], symbols->id[right])->merged;
        symbols->next[left] = symbols->next[right];
        symbols->pair[right] = RF_TOKEN_NONE;
        if (symbols->next[right] != RF_TOKEN_NONE)
            symbols->prev[symbols->next[right]] = left;
        queue_pair(vocab, symbols, left);
        if (symbols->prev[left] != RF_TOKEN_NONE)
            queue_pair(vocab, symbols, symbols->prev[left]);
    }
    for (uint32_t i = 0; i != RF_TOKEN_NONE; i = symbols->next[i])
        put_all(&symbols->id[i], 1, sink);
}

/* ---- text -------------------------------------------------------------------------------- */

/* Writes the bytes of text[*at, end) as tokens into ids[capacity], whole characters only, and
 * moves *at. What is not UTF-8 is taken as the character that it was read as. */
static uint32_t load_symbols(const rf_vocab *vocab, const uint8_t *text, uint64_t *at, uint64_t end,
                             uint32_t *ids, uint32_t capacity)
{
    const uint32_t *byte_ids = rf_vocab_head(vocab)->byte_ids;
    uint32_t count = 0;
    while (*at < end && capacity - count >= 4) {
        if (text[*at] < 128) {
            ids[count++] = byte_ids[text[(*at)++]];
            continue;
        }
        uint32_t letter;
        uint8_t bytes[4];
        *at += rf_utf8_read(text + *at, end - *at, &letter);
        uint32_t length = rf_utf8_write(letter, bytes);
        for (uint32_t i = 0; i < length; i++)
            ids[count++] = byte_ids[bytes[i]];
    }
    return count;
}

/* The token of exactly this word, RF_TOKEN_NONE when there is none. */
static uint32_t whole_word(const rf_vocab *vocab, const uint8_t *word, uint64_t bytes)
{
    uint8_t letters[512]; /* a token with a longer text goes through the merges */
    uint64_t at = 0, length = 0;
    if (bytes > rf_vocab_head(vocab)->longest_text)
        return RF_TOKEN_NONE;
    while (at < bytes) {
        uint32_t letter;
        uint8_t plain[4];
        at += rf_utf8_read(word + at, bytes - at, &letter);
        uint32_t count = rf_utf8_write(letter, plain);
        if (length + 2 * (uint64_t)count > sizeof letters)
            return RF_TOKEN_NONE;
        for (uint32_t i = 0; i < count; i++)
            length += rf_utf8_write(rf_byte_to_letter(plain[i]), letters + length);
    }
    return rf_vocab_find(vocab, (rf_text){(const char *)letters, length});
}

void rf_bpe_encode(const rf_vocab *vocab, const uint8_t *text, uint64_t bytes, void *memory,
                   uint64_t memory_bytes, rf_id_sink *sink)
{
    rf_symbols symbols = rf_symbols_make(memory, memory_bytes);
    bool takes_whole_words = rf_split_takes_whole_words(vocab->pre);
    rf_splitter splitter = rf_splitter_make(vocab->pre, text, bytes);
    uint64_t first, last;
    while (rf_splitter_next(&splitter, &first, &last)) {
        uint32_t whole = RF_TOKEN_NONE;
        if (takes_whole_words)
            whole = whole_word(vocab, text + first, last - first);
        if (whole != RF_TOKEN_NONE) {
            rf_sink_put(sink, whole);
            continue;
        }
        while (first < last) {
            uint32_t count = load_symbols(vocab, text, &first, last, symbols.id, symbols.capacity);
            if (count <= SHORT_WORD)
                merge_short(vocab, symbols.id, count, sink);
            else
                merge_long(vocab, &symbols, count, sink);
        }
    }
}
