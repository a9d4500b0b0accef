/* text/text.h: the contract of the text floor: vocabulary, tokenising, detokenising, chat format.
 *
 * Works on the header alone, also of files without tensors and of architectures that we do not
 * run. Token texts stay in the mapping; the tables beside them are sized first and then filled
 * into memory that the caller owns. Nothing here knows a model or allocates.
 */
#ifndef RF_TEXT_H
#define RF_TEXT_H

#include "format/format.h"

#define RF_TOKEN_NONE UINT32_MAX

typedef enum rf_vocab_table {                    /* regions of the plan: "text.<name>" */
                              RF_VOCAB_TOKENS,   /* per token: place of its text, type, score */
                              RF_VOCAB_INDEX,    /* text -> id */
                              RF_VOCAB_MERGES,   /* pair -> rank (byte-level BPE) */
                              RF_VOCAB_SPECIALS, /* ids of the special tokens, longest first */
                              RF_VOCAB_TABLE_COUNT
} rf_vocab_table;

const char *rf_vocab_table_name(rf_vocab_table table); /* "tokens", ... */

typedef enum rf_vocab_kind { RF_VOCAB_SPM, RF_VOCAB_BPE } rf_vocab_kind;

typedef struct rf_vocab {
    const rf_gguf *gguf; /* borrowed */
    rf_vocab_kind kind;
    uint32_t pre; /* index into the table of pre-tokenizers */
    uint32_t token_count;
    uint32_t bos, eos, eot, unk, pad; /* RF_TOKEN_NONE when absent */
    uint32_t end_ids[16];             /* every token that ends a turn or a text */
    uint32_t end_count;
    bool add_bos, add_eos, add_space_prefix, remove_extra_spaces, escape_spaces;
    uint32_t special_count;
    uint64_t merge_count;
    uint64_t longest_token; /* bytes; no piece of a token is longer */
    uint64_t table_bytes[RF_VOCAB_TABLE_COUNT];
    void *tables[RF_VOCAB_TABLE_COUNT]; /* borrowed; NULL before rf_vocab_build */
} rf_vocab;

/* Reads and checks the tokenizer.* keys (types, counts, ids in range; merges that are no pair;
 * array element types) and fills everything but tables. Errors: RF_ERR_BAD_MODEL,
 * RF_ERR_UNSUPPORTED (tokenizer model or pre-tokenizer not known, named). */
rf_status rf_vocab_measure(const rf_gguf *gguf, rf_vocab *vocab, rf_error *err);
/* Fills tables[i], each table_bytes[i] bytes and 64-aligned, which the caller set in *vocab. */
rf_status rf_vocab_build(rf_vocab *vocab, rf_error *err);

/* Scratch that rf_tokenize needs for a text of text_bytes bytes; UINT64_MAX when it overflows. */
uint64_t rf_tokenize_scratch_bytes(const rf_vocab *vocab, uint64_t text_bytes);
/* An upper bound of tokens for a text (BOS and EOS included). */
uint64_t rf_tokenize_bound(const rf_vocab *vocab, uint64_t text_bytes);

typedef struct rf_tokenize_options {
    bool add_special;   /* BOS and EOS where the vocabulary asks for them */
    bool parse_special; /* special tokens written in the text become their ids */
} rf_tokenize_options;

/* Fills ids[capacity] and *count. Bytes that are not UTF-8 are taken as bytes (byte fallback or
 * U+FFFD as the reference does), never an error. Errors: RF_ERR_USAGE (scratch or ids too small).
 * Scratch is free again on return. O(n log n). */
rf_status rf_tokenize(const rf_vocab *vocab, const char *text, uint64_t text_bytes,
                      rf_tokenize_options options, void *scratch, uint64_t scratch_bytes,
                      uint32_t *ids, uint64_t capacity, uint64_t *count, rf_error *err);

/* The raw text of a token in the file (borrowed); empty for ids out of range. */
rf_text rf_vocab_text(const rf_vocab *vocab, uint32_t id);
/* The bytes that a token stands for (decoded: byte tokens, spaces, byte-level letters) into
 * out[capacity]; returns their count, which may exceed capacity (then nothing is written).
 * Control tokens give no bytes unless special is true (then their text). */
uint64_t rf_vocab_piece(const rf_vocab *vocab, uint32_t id, bool special, char *out,
                        uint64_t capacity);
/* The id of exactly this raw text, RF_TOKEN_NONE when there is none. */
uint32_t rf_vocab_find(const rf_vocab *vocab, rf_text text);
bool rf_vocab_is_end(const rf_vocab *vocab, uint32_t id);
bool rf_vocab_is_control(const rf_vocab *vocab, uint32_t id);

/* ---- streaming detokeniser --------------------------------------------------------------- */

/* Gives out whole UTF-8 characters only; what is incomplete waits in pending. Bytes that can
 * never become a character come out as U+FFFD. */
typedef struct rf_detokenizer {
    const rf_vocab *vocab; /* borrowed */
    bool special;          /* also give out control tokens' texts */
    bool at_start;         /* SPM: the space before the first word is not text */
    uint8_t pending[8];
    uint32_t pending_count;
} rf_detokenizer;

void rf_detokenizer_init(rf_detokenizer *detokenizer, const rf_vocab *vocab, bool special);
/* Capacity that always suffices for one push or flush. */
uint64_t rf_detokenizer_bound(const rf_vocab *vocab);
/* Fills out, returns the bytes written. */
uint64_t rf_detokenizer_push(rf_detokenizer *detokenizer, uint32_t id, char *out,
                             uint64_t capacity);
uint64_t rf_detokenizer_flush(rf_detokenizer *detokenizer, char *out, uint64_t capacity);

/* ---- chat format ------------------------------------------------------------------------- */

/* Which built-in chat format a file's tokenizer.chat_template stands for. */
typedef enum rf_chat_format { RF_CHAT_NONE, RF_CHAT_CHATML } rf_chat_format;
rf_chat_format rf_chat_format_of(const rf_gguf *gguf);

typedef struct rf_chat_message {
    const char *role; /* "system", "user", "assistant" */
    const char *text;
} rf_chat_message;

/* Renders messages (and the opening of the assistant's turn when generate) into out; *length gets
 * the bytes needed; nothing is written when they exceed capacity. Text of a message that spells a
 * special token stays text: the ranges that may be parsed are separate: the caller tokenises with
 * parse_special only the frame. frame(context, text, bytes, is_frame) is called for each piece. */
typedef void (*rf_chat_piece_fn)(void *context, const char *text, uint64_t bytes, bool is_frame);
rf_status rf_chat_render(rf_chat_format format, const rf_chat_message *messages,
                         uint32_t message_count, bool generate, rf_chat_piece_fn piece,
                         void *context, rf_error *err);

#endif
