/* text/tables.h: how the tables of a vocabulary lie in memory; private to text/.
 *
 *   TOKENS    rf_token_head | rf_token[token_count] | uint8_t kind[token_count]
 *   INDEX     uint64_t slot[power of two >= 2 * token_count]    hash << 32 | id + 1, 0 is empty
 *   MERGES    rf_merge[merge_count * 3 / 2 + 1]                 open addressing by the pair
 *   SPECIALS  uint32_t first[257] | by_length[special_count] | by_text[special_count]
 *
 * Token texts are never copied: a token is a place in the file. All hashes are our own and fixed,
 * so that a table has the same bytes on every machine.
 */
#ifndef RF_TEXT_TABLES_H
#define RF_TEXT_TABLES_H

#include "text/text.h"

/* ---- tokens ------------------------------------------------------------------------------ */

enum { /* the values of tokenizer.ggml.token_type */
       RF_TOKEN_UNDEFINED = 0,
       RF_TOKEN_NORMAL = 1,
       RF_TOKEN_UNKNOWN = 2,
       RF_TOKEN_CONTROL = 3,
       RF_TOKEN_USER = 4,
       RF_TOKEN_UNUSED = 5,
       RF_TOKEN_BYTE = 6,
       RF_TOKEN_TYPE_MASK = 7,
       RF_TOKEN_CUT = 8,          /* written in a text, it is cut out like a control token */
       RF_TOKEN_STRIPS_RIGHT = 16 /* and swallows the white space after it */
};

typedef struct rf_token {
    uint64_t at; /* of its text in the file */
    uint32_t length;
    float score;
} rf_token;

typedef struct rf_token_head {
    uint32_t byte_ids[256]; /* the token of a single byte; RF_TOKEN_NONE when there is none */
    uint32_t longest_text;  /* bytes of the longest raw token text */
    uint32_t space_parts;   /* SPM: no token has U+2581 behind another character */
    uint32_t reserved[14];
} rf_token_head;

static inline const rf_token_head *rf_vocab_head(const rf_vocab *vocab)
{
    return vocab->tables[RF_VOCAB_TOKENS];
}

static inline const rf_token *rf_vocab_tokens(const rf_vocab *vocab)
{
    return (const rf_token *)(const void *)(rf_vocab_head(vocab) + 1);
}

static inline const uint8_t *rf_vocab_kinds(const rf_vocab *vocab)
{
    return (const uint8_t *)(rf_vocab_tokens(vocab) + vocab->token_count);
}

static inline uint32_t rf_token_type(const rf_vocab *vocab, uint32_t id)
{
    return rf_vocab_kinds(vocab)[id] & RF_TOKEN_TYPE_MASK;
}

/* ---- byte-level letters ------------------------------------------------------------------ */

/* GPT-2 writes a byte as a printable character: 0x21..0x7e, 0xa1..0xac and 0xae..0xff stand for
 * themselves, the other 68 bytes in ascending order are U+0100..U+0143. */
uint32_t rf_byte_to_letter(uint8_t byte);
/* The byte of a letter, or -1. */
int rf_letter_to_byte(uint32_t letter);

/* ---- UTF-8 ------------------------------------------------------------------------------- */

/* Reads one character of [text, text + left), left > 0, as the reference reads prompts: lenient
 * towards overlong forms and surrogates; a byte that starts nothing is U+FFFD of length 1. Returns
 * the length in bytes. */
uint32_t rf_utf8_read(const uint8_t *text, uint64_t left, uint32_t *letter);
/* Writes a character into out[4], returns its length. */
uint32_t rf_utf8_write(uint32_t letter, uint8_t *out);

/* ---- merges ------------------------------------------------------------------------------ */

typedef struct rf_merge {
    uint32_t left, right; /* ids of the two halves */
    uint32_t rank;        /* position in the file; RF_TOKEN_NONE: an empty slot */
    uint32_t merged;      /* id of the whole */
} rf_merge;

static inline uint64_t rf_merge_slots(uint64_t merge_count)
{
    return merge_count + merge_count / 2 + 1;
}

static inline uint64_t rf_merge_slot(uint32_t left, uint32_t right, uint64_t slots)
{
    uint64_t key = ((uint64_t)left << 32 | right) * UINT64_C(0x9e3779b97f4a7c15);
    key ^= key >> 29;
    key *= UINT64_C(0xbf58476d1ce4e5b9);
    return (key >> 32) * slots >> 32;
}

/* The merge of a pair, NULL when there is none. */
static inline const rf_merge *rf_merge_find(const rf_vocab *vocab, uint32_t left, uint32_t right)
{
    const rf_merge *merges = vocab->tables[RF_VOCAB_MERGES];
    uint64_t slots = rf_merge_slots(vocab->merge_count);
    for (uint64_t i = rf_merge_slot(left, right, slots);;) {
        if (merges[i].rank == RF_TOKEN_NONE)
            return NULL;
        if (merges[i].left == left && merges[i].right == right)
            return &merges[i];
        if (++i == slots)
            i = 0;
    }
}

/* ---- specials ---------------------------------------------------------------------------- */

typedef struct rf_special_table {
    uint32_t first[257]; /* by_text[first[b] .. first[b + 1]) begin with byte b */
} rf_special_table;

static inline const uint32_t *rf_specials_by_length(const rf_vocab *vocab)
{
    const rf_special_table *table = vocab->tables[RF_VOCAB_SPECIALS];
    return table->first + 257;
}

/* Indices into by_length, ordered by the bytes of the text. */
static inline const uint32_t *rf_specials_by_text(const rf_vocab *vocab)
{
    return rf_specials_by_length(vocab) + vocab->special_count;
}

/* ---- the pre-tokenizers ------------------------------------------------------------------ */

#define RF_SPLIT_LEVELS 6

typedef struct rf_splitter { /* a text cut into words, one after the other, without memory */
    const uint8_t *text;
    uint32_t pre;
    uint32_t levels;
    uint64_t at[RF_SPLIT_LEVELS], end[RF_SPLIT_LEVELS]; /* what each level still has to cut */
} rf_splitter;

/* The row of a pre-tokenizer; false when the name is not known. */
bool rf_split_find(rf_text name, uint32_t *pre);
/* The known names, parted by blanks; as many as fit, the best known first. */
void rf_split_names(rf_writer *writer);
bool rf_split_takes_whole_words(uint32_t pre); /* a word that is a token is not merged */
bool rf_split_adds_bos(uint32_t pre);          /* when the file does not say */

rf_splitter rf_splitter_make(uint32_t pre, const uint8_t *text, uint64_t bytes);
/* The next word is [*first, *last); false at the end. Words cover the text without gaps. */
bool rf_splitter_next(rf_splitter *splitter, uint64_t *first, uint64_t *last);

/* ---- encoding ---------------------------------------------------------------------------- */

typedef struct rf_id_sink { /* counts on when it is full, so that the caller can tell */
    uint32_t *ids;
    uint64_t capacity, count;
} rf_id_sink;

static inline void rf_sink_put(rf_id_sink *sink, uint32_t id)
{
    if (sink->count < sink->capacity)
        sink->ids[sink->count] = id;
    sink->count++;
}

/* Symbols of the piece of text that is being merged. All arrays have capacity entries, the heap
 * twice as many: each merge takes one entry off and adds two at most. */
typedef struct rf_symbols {
    uint32_t capacity;
    uint32_t *id;   /* BPE: the token; SPM: where the symbol's text begins */
    uint32_t *pair; /* BPE: rank, SPM: token of the pair that begins here; RF_TOKEN_NONE */
    uint32_t *prev, *next;
    uint64_t *heap;
    uint64_t heap_count;
} rf_symbols;

#define RF_SYMBOL_BYTES   32u   /* of all arrays, for each symbol */
#define RF_SYMBOLS_SPARE  1024u /* BPE: bytes that are not UTF-8 become three symbols each */
#define RF_TEXT_BYTES_MAX (1u << 30)

rf_symbols rf_symbols_make(void *memory, uint64_t bytes);
/* A heap of numbers, the smallest on top. */
void rf_heap_push(rf_symbols *symbols, uint64_t key);
uint64_t rf_heap_pop(rf_symbols *symbols);

/* Both encode one fragment of text without special tokens. */
void rf_bpe_encode(const rf_vocab *vocab, const uint8_t *text, uint64_t bytes, void *memory,
                   uint64_t memory_bytes, rf_id_sink *sink);
void rf_spm_encode(const rf_vocab *vocab, const uint8_t *text, uint64_t bytes, bool space_before,
                   void *memory, uint64_t memory_bytes, rf_id_sink *sink);

#endif
