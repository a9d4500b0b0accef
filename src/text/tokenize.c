/* text/tokenize.c: a text into ids: special tokens are cut out first, what lies between them goes
 * to the vocabulary's encoder.
 *
 * The longest special token is cut out everywhere before the next shorter one is looked for, as the
 * reference does; which tokens occur at all is found in one walk over the text, so the usual text
 * costs one look at each byte. All memory is the caller's scratch:
 *
 *     | seen: a byte for each special token | matches, growing | the encoder's |
 *
 * A match takes 16 bytes and at least one byte of text out of the fragments; the encoder needs more
 * than 16 for each byte that is left. So what suffices for a text without matches always suffices.
 */
#include "text/tables.h"

#include <string.h>

typedef struct match {
    uint32_t start, end; /* of what it takes out of the text */
    uint32_t id;
    uint32_t next;
} match;

typedef struct partition {
    const rf_vocab *vocab;
    const uint8_t *text;
    uint32_t bytes;
    uint8_t *seen;
    match *matches;
    uint32_t count;
    uint32_t head;
} partition;

_Static_assert(sizeof(match) < RF_SYMBOL_BYTES, "a match must not cost more than text");

static uint64_t encoder_bytes(const rf_vocab *vocab, uint64_t text_bytes)
{
    if (vocab->kind == RF_VOCAB_BPE)
        return (text_bytes + RF_SYMBOLS_SPARE) * RF_SYMBOL_BYTES;
    return 3 * text_bytes + 128 + (text_bytes + 2) * RF_SYMBOL_BYTES;
}

static uint64_t round_up(uint64_t bytes)
{
    return (bytes + 63) & ~UINT64_C(63);
}

uint64_t rf_tokenize_scratch_bytes(const rf_vocab *vocab, uint64_t text_bytes)
{
    if (text_bytes > RF_TEXT_BYTES_MAX)
        return UINT64_MAX;
    return round_up(vocab->special_count) + 64 + encoder_bytes(vocab, text_bytes);
}

uint64_t rf_tokenize_bound(const rf_vocab *vocab, uint64_t text_bytes)
{
    /* BPE: a byte that is not UTF-8 becomes the three of U+FFFD. SPM: a blank may fall back to the
     * three bytes of U+2581, and each fragment behind a special token gets one more blank. */
    uint64_t each = vocab->kind == RF_VOCAB_BPE ? 3 : 4, bound;
    if (!rf_mul(text_bytes, each, &bound) || !rf_add(bound, 8, &bound))
        return UINT64_MAX;
    return bound;
}

/* ---- special tokens ---------------------------------------------------------------------- */

/* Notes every special token that begins at text[at]: narrows the sorted texts byte by byte; those
 * that end where we are come first in what is left. */
static void see_at(partition *part, uint32_t at, uint32_t low, uint32_t high)
{
    const uint32_t *by_length = rf_specials_by_length(part->vocab);
    const uint32_t *by_text = rf_specials_by_text(part->vocab);
    for (uint32_t depth = 1; low < high; depth++) {
        while (low < high && rf_vocab_text(part->vocab, by_length[by_text[low]]).length == depth)
            part->seen[by_text[low++]] = 1;
        if (at + depth == part->bytes)
            return;
        uint8_t byte = part->text[at + depth];
        uint32_t bounds[2];
        for (uint32_t side = 0; side < 2; side++) { /* first >= byte, first > byte */
            uint32_t from = low, to = high;
            while (from < to) {
                uint32_t middle = from + (to - from) / 2;
                rf_text text = rf_vocab_text(part->vocab, by_length[by_text[middle]]);
                if ((uint8_t)text.bytes[depth] < byte + side)
                    from = middle + 1;
                else
                    to = middle;
            }
            bounds[side] = from;
        }
        low = bounds[0];
        high = bounds[1];
    }
}

static bool is_c_space(uint8_t byte)
{
    return byte == ' ' || (byte >= '\t' && byte <= '\r');
}

/* Cuts one special token out of every stretch of text that is left. */
static void cut_out(partition *part, uint32_t id)
{
    rf_text special = rf_vocab_text(part->vocab, id);
    bool strips = rf_vocab_kinds(part->vocab)[id] & RF_TOKEN_STRIPS_RIGHT;
    uint32_t *link = &part->head, from = 0;
    for (;;) {
        uint32_t to = *link == RF_TOKEN_NONE ? part->bytes : part->matches[*link].start;
        const uint8_t *found =
            memmem(part->text + from, to - from, special.bytes, (size_t)special.length);
        if (found) {
            match *made = &part->matches[part->count];
            made->start = (uint32_t)(found - part->text);
            made->end = made->start + (uint32_t)special.length;
            while (strips && made->end < to && is_c_space(part->text[made->end]))
                made->end++;
            made->id = id;
            made->next = *link;
            *link = part->count++;
            link = &made->next;
            from = made->end;
            continue;
        }
        if (*link == RF_TOKEN_NONE)
            return;
        from = part->matches[*link].end;
        link = &part->matches[*link].next;
    }
}

static void find_specials(partition *part, bool parse_special)
{
    const rf_vocab *vocab = part->vocab;
    const rf_special_table *table = vocab->tables[RF_VOCAB_SPECIALS];
    memset(part->seen, 0, vocab->special_count);
    for (uint32_t at = 0; at < part->bytes; at++) {
        uint32_t low = table->first[part->text[at]], high = table->first[part->text[at] + 1];
        if (low < high)
            see_at(part, at, low, high);
    }
    for (uint32_t i = 0; i < vocab->special_count; i++) {
        uint32_t id = rf_specials_by_length(vocab)[i];
        if (part->seen[i] && (parse_special || rf_token_type(vocab, id) == RF_TOKEN_USER))
            cut_out(part, id);
    }
}

/* ---- encoding ---------------------------------------------------------------------------- */

static rf_status check_arguments(const rf_vocab *vocab, uint64_t text_bytes, uint64_t scratch_bytes,
                                 rf_error *err)
{
    uint64_t needed = rf_tokenize_scratch_bytes(vocab, text_bytes);
    if (needed == UINT64_MAX) {
        rf_fail(err, RF_ERR_USAGE, "text", "too long to tokenize at once");
        rf_fail_expected(err, "at most %u bytes", RF_TEXT_BYTES_MAX);
        return rf_fail_got(err, "%llu", (unsigned long long)text_bytes);
    }
    if (needed > scratch_bytes) {
        rf_fail(err, RF_ERR_USAGE, "scratch", "too small for this text");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)needed);
        return rf_fail_got(err, "%llu", (unsigned long long)scratch_bytes);
    }
    return RF_OK;
}

static void encode_all(const partition *part, uint8_t *memory, uint64_t memory_bytes,
                       rf_id_sink *sink)
{
    const rf_vocab *vocab = part->vocab;
    uint32_t from = 0, at = part->head;
    for (;;) {
        uint32_t to = at == RF_TOKEN_NONE ? part->bytes : part->matches[at].start;
        if (to > from) {
            const uint8_t *text = part->text + from;
            if (vocab->kind == RF_VOCAB_BPE)
                rf_bpe_encode(vocab, text, to - from, memory, memory_bytes, sink);
            else
                rf_spm_encode(vocab, text, to - from, vocab->add_space_prefix, memory, memory_bytes,
                              sink);
        }
        if (at == RF_TOKEN_NONE)
            return;
        rf_sink_put(sink, part->matches[at].id);
        from = part->matches[at].end;
        at = part->matches[at].next;
    }
}

rf_status rf_tokenize(const rf_vocab *vocab, const char *text, uint64_t text_bytes,
                      rf_tokenize_options options, void *scratch, uint64_t scratch_bytes,
                      uint32_t *ids, uint64_t capacity, uint64_t *count, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    *count = 0;
    rf_status status = check_arguments(vocab, text_bytes, scratch_bytes, err);
    if (status)
        return status;
    uint64_t seen_bytes = round_up(vocab->special_count);
    partition part = {.vocab = vocab,
                      .text = (const uint8_t *)text,
                      .bytes = (uint32_t)text_bytes,
                      .seen = scratch,
                      .matches = (match *)(void *)((uint8_t *)scratch + seen_bytes),
                      .head = RF_TOKEN_NONE};
    if (text_bytes > 0)
        find_specials(&part, options.parse_special);
    uint64_t used = seen_bytes + round_up(part.count * sizeof(match));

    rf_id_sink sink = {.ids = ids, .capacity = capacity};
    if (options.add_special && vocab->add_bos)
        rf_sink_put(&sink, vocab->bos);
    encode_all(&part, (uint8_t *)scratch + used, scratch_bytes - used, &sink);
    if (options.add_special && vocab->add_eos)
        rf_sink_put(&sink, vocab->eos);
    if (sink.count > capacity) {
        rf_fail(err, RF_ERR_USAGE, "ids", "too small for the tokens of this text");
        rf_fail_expected(err, "room for %llu", (unsigned long long)sink.count);
        return rf_fail_got(err, "%llu", (unsigned long long)capacity);
    }
    *count = sink.count;
    return RF_OK;
}
