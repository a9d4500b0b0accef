/* text/detokenize.c: ids into text: what a token stands for, and a stream that never gives out half
 * a character.
 *
 * Models spell characters over several tokens, and may spell bytes that are no character at all.
 * The stream checks UTF-8 strictly (Unicode 15, table 3-7): bytes wait until they are a character,
 * and the longest prefix that can never become one is replaced by a single U+FFFD, so that the
 * output is what a decoder with replacement makes of all bytes at once. No memory is taken.
 */
#include "text/tables.h"

#include <string.h>

/* ---- pieces ------------------------------------------------------------------------------ */

typedef struct piece_sink { /* counts on when it is full */
    char *out;
    uint64_t capacity, count;
} piece_sink;

static void put_bytes(piece_sink *sink, const void *bytes, uint64_t count)
{
    if (count > 0 && count <= sink->capacity && sink->count <= sink->capacity - count)
        memcpy(sink->out + sink->count, bytes, (size_t)count);
    sink->count += count;
}

static int hex_digit(char c)
{
    return c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10;
}

static void put_normal(const rf_vocab *vocab, rf_text text, piece_sink *sink)
{
    const uint8_t *bytes = (const uint8_t *)text.bytes;
    for (uint64_t at = 0; at < text.length;) {
        uint32_t letter;
        uint32_t length = rf_utf8_read(bytes + at, text.length - at, &letter);
        int byte = vocab->kind == RF_VOCAB_BPE ? rf_letter_to_byte(letter) : -1;
        if (vocab->escape_spaces && letter == 0x2581)
            byte = ' ';
        if (byte >= 0)
            put_bytes(sink, &(uint8_t){(uint8_t)byte}, 1);
        else
            put_bytes(sink, bytes + at, length);
        at += length;
    }
}

/* Gives the bytes of a token; how many are written is all or none. */
uint64_t rf_vocab_piece(const rf_vocab *vocab, uint32_t id, bool special, char *out,
                        uint64_t capacity)
{
    if (id >= vocab->token_count)
        return 0;
    rf_text text = rf_vocab_text(vocab, id);
    piece_sink sink = {.out = out, .capacity = capacity};
    piece_sink counter = {0};
    switch (rf_token_type(vocab, id)) {
    case RF_TOKEN_NORMAL:
        put_normal(vocab, text, &counter);
        if (counter.count <= capacity)
            put_normal(vocab, text, &sink);
        return counter.count;
    case RF_TOKEN_BYTE: /* the text was checked when the table was filled */
        put_bytes(&sink,
                  &(uint8_t){(uint8_t)(hex_digit(text.bytes[3]) * 16 + hex_digit(text.bytes[4]))},
                  1);
        return 1;
    case RF_TOKEN_USER:
        put_bytes(&sink, text.bytes, text.length);
        return text.length;
    case RF_TOKEN_CONTROL:
    case RF_TOKEN_UNKNOWN:
        if (!special)
            return 0;
        put_bytes(&sink, text.bytes, text.length);
        return text.length;
    default: /* unused and undefined tokens stand for nothing, as in the reference */
        return 0;
    }
}

bool rf_vocab_is_end(const rf_vocab *vocab, uint32_t id)
{
    for (uint32_t i = 0; i < vocab->end_count; i++) {
        if (vocab->end_ids[i] == id)
            return true;
    }
    return false;
}

bool rf_vocab_is_control(const rf_vocab *vocab, uint32_t id)
{
    if (id >= vocab->token_count)
        return false;
    uint32_t type = rf_token_type(vocab, id);
    return type == RF_TOKEN_CONTROL || type == RF_TOKEN_UNKNOWN;
}

/* ---- stream ------------------------------------------------------------------------------ */

/* Length of the character that begins with this byte; 0 when none does. */
static uint32_t strict_length(uint8_t first)
{
    if (first < 0x80)
        return 1;
    if (first >= 0xc2 && first <= 0xdf)
        return 2;
    if (first >= 0xe0 && first <= 0xef)
        return 3;
    return first >= 0xf0 && first <= 0xf4 ? 4 : 0;
}

/* May byte follow the count bytes of pending, which can still become a character? */
static bool may_follow(const uint8_t *pending, uint32_t count, uint8_t byte)
{
    uint8_t low = 0x80, high = 0xbf;
    if (count == 1) {
        switch (pending[0]) {
        case 0xe0:
            low = 0xa0;
            break; /* no overlong forms */
        case 0xed:
            high = 0x9f;
            break; /* no surrogates */
        case 0xf0:
            low = 0x90;
            break;
        case 0xf4:
            high = 0x8f;
            break; /* nothing beyond U+10FFFF */
        default:
            break;
        }
    }
    return byte >= low && byte <= high;
}

static const char replacement[3] = {(char)0xef, (char)0xbf, (char)0xbd};

static void stream_byte(rf_detokenizer *detokenizer, uint8_t byte, piece_sink *sink)
{
    if (detokenizer->pending_count > 0) {
        if (may_follow(detokenizer->pending, detokenizer->pending_count, byte)) {
            detokenizer->pending[detokenizer->pending_count++] = byte;
            if (detokenizer->pending_count == strict_length(detokenizer->pending[0])) {
                put_bytes(sink, detokenizer->pending, detokenizer->pending_count);
                detokenizer->pending_count = 0;
            }
            return;
        }
        put_bytes(sink, replacement, sizeof replacement);
        detokenizer->pending_count = 0;
    }
    uint32_t length = strict_length(byte);
    if (length == 1) {
        put_bytes(sink, &byte, 1);
    } else if (length == 0) {
        put_bytes(sink, replacement, sizeof replacement);
    } else {
        detokenizer->pending[0] = byte;
        detokenizer->pending_count = 1;
    }
}

void rf_detokenizer_init(rf_detokenizer *detokenizer, const rf_vocab *vocab, bool special)
{
    *detokenizer = (rf_detokenizer){
        .vocab = vocab,
        .special = special,
        .at_start = vocab->kind == RF_VOCAB_SPM && vocab->add_space_prefix,
    };
}

uint64_t rf_detokenizer_bound(const rf_vocab *vocab)
{
    return 3 * (vocab->longest_token + 1); /* each byte, and what was pending, replaced */
}

uint64_t rf_detokenizer_push(rf_detokenizer *detokenizer, uint32_t id, char *out, uint64_t capacity)
{
    const rf_vocab *vocab = detokenizer->vocab;
    uint64_t length = rf_vocab_piece(vocab, id, detokenizer->special, NULL, 0);
    if (length == 0 || capacity < 3 * (length + 1))
        return 0;
    /* The piece goes to the end of out and is rewritten to its beginning: what is written never
     * overtakes what is still to be read, since a byte gives at most three. */
    uint8_t *piece = (uint8_t *)out + capacity - length;
    rf_vocab_piece(vocab, id, detokenizer->special, (char *)piece, length);
    uint64_t from = detokenizer->at_start && piece[0] == ' ' ? 1 : 0;
    detokenizer->at_start = false;
    piece_sink sink = {.out = out, .capacity = capacity};
    for (uint64_t i = from; i < length; i++)
        stream_byte(detokenizer, piece[i], &sink);
    return sink.count;
}

uint64_t rf_detokenizer_flush(rf_detokenizer *detokenizer, char *out, uint64_t capacity)
{
    piece_sink sink = {.out = out, .capacity = capacity};
    if (detokenizer->pending_count > 0)
        put_bytes(&sink, replacement, sizeof replacement);
    detokenizer->pending_count = 0;
    return RF_MIN(sink.count, capacity);
}
