/* runtime/tokenizer.c: the public tokenizer: the text floor with its tables in planned regions, or
 * alone in a reservation of its own.
 */
#include "runtime/runtime.h"

#include <string.h>

rf_status rf_text_shape_of(const rf_vocab *vocab, uint64_t text_bytes, rf_text_shape *shape,
                           rf_error *err)
{
    shape->present = true;
    shape->scratch_bytes = rf_tokenize_scratch_bytes(vocab, text_bytes);
    shape->id_count = rf_tokenize_bound(vocab, text_bytes);
    if (shape->scratch_bytes == UINT64_MAX || shape->id_count > UINT64_MAX / sizeof(uint32_t)) {
        return rf_fail(err, RF_ERR_USAGE, "text_bytes", "no text can be that long");
    }
    return RF_OK;
}

rf_status rf_text_plan(rf_plan *plan, const rf_vocab *vocab, const rf_text_shape *shape,
                       rf_error *err)
{
    if (!shape->present)
        return RF_OK;
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++) {
        char id[RF_ID_BYTES];
        rf_print(id, sizeof id, "text.%s", rf_vocab_table_name((rf_vocab_table)i));
        rf_status status = rf_plan_add_region(plan, id, "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES,
                                              vocab->table_bytes[i], 1, err);
        if (status)
            return status;
    }
    rf_status status = rf_plan_add_region(plan, "text.state", "bytes", RF_SCOPE_MODEL,
                                          RF_POOL_TABLES, 1, sizeof(rf_tokenizer), err);
    if (status)
        return status;
    status = rf_plan_add_region(plan, "text.scratch", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES,
                                shape->scratch_bytes, 1, err);
    if (status)
        return status;
    return rf_plan_add_region(plan, "text.ids", "u32", RF_SCOPE_MODEL, RF_POOL_TABLES,
                              shape->id_count, sizeof(uint32_t), err);
}

static rf_status take(rf_scope *scope, const char *id, const char *format, uint64_t count,
                      uint64_t unit_bytes, void **out, rf_error *err)
{
    rf_extent extent = {format, count, unit_bytes};
    return rf_scope_take(scope, id, &extent, out, err);
}

rf_status rf_text_open(rf_scope *scope, const rf_vocab *vocab, const rf_text_shape *shape,
                       uint64_t text_bytes, rf_tokenizer **out, rf_error *err)
{
    void *memory = NULL, *ids = NULL;
    rf_status status = take(scope, "text.state", "bytes", 1, sizeof(rf_tokenizer), &memory, err);
    if (status)
        return status;
    rf_tokenizer *tokenizer = memory;
    *tokenizer = (rf_tokenizer){.vocab = *vocab,
                                .text_bytes = text_bytes,
                                .scratch_bytes = shape->scratch_bytes,
                                .id_count = shape->id_count};
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++) {
        char id[RF_ID_BYTES];
        rf_print(id, sizeof id, "text.%s", rf_vocab_table_name((rf_vocab_table)i));
        status =
            take(scope, id, "bytes", vocab->table_bytes[i], 1, &tokenizer->vocab.tables[i], err);
        if (status)
            return status;
    }
    status =
        take(scope, "text.scratch", "bytes", shape->scratch_bytes, 1, &tokenizer->scratch, err);
    if (status)
        return status;
    status = take(scope, "text.ids", "u32", shape->id_count, sizeof(uint32_t), &ids, err);
    if (status)
        return status;
    tokenizer->ids = ids;
    status = rf_vocab_build(&tokenizer->vocab, err);
    if (status == RF_OK)
        *out = tokenizer;
    return status;
}

/* Adds bytes to *total at the next aligned place; gives that place. */
static bool place(uint64_t *total, uint64_t bytes, uint64_t *at)
{
    return rf_align_up(*total, RF_REGION_ALIGN, at) && rf_add(*at, bytes, total);
}

rf_status rf_tokenizer_open(const rf_file *file, uint64_t text_bytes, rf_tokenizer **out,
                            rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_vocab vocab;
    rf_text_shape shape;
    rf_status status = rf_vocab_measure(&file->gguf, &vocab, err);
    if (status == RF_OK)
        status = rf_text_shape_of(&vocab, text_bytes, &shape, err);
    if (status)
        return status;

    uint64_t total = sizeof(rf_tokenizer), table_at[RF_VOCAB_TABLE_COUNT], scratch_at, ids_at;
    bool fits = true;
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++) {
        fits = fits && place(&total, vocab.table_bytes[i], &table_at[i]);
    }
    fits = fits && place(&total, shape.scratch_bytes, &scratch_at) &&
           place(&total, shape.id_count * sizeof(uint32_t), &ids_at);
    if (!fits)
        return rf_fail(err, RF_ERR_NO_FIT, "text", "the sizes leave 64 bits");
    void *memory = NULL;
    status = rf_os_reserve(total, &memory, err);
    if (status)
        return status;

    uint8_t *bytes = memory;
    rf_tokenizer *tokenizer = memory;
    *tokenizer = (rf_tokenizer){.vocab = vocab,
                                .reserved_bytes = total,
                                .text_bytes = text_bytes,
                                .scratch = bytes + scratch_at,
                                .scratch_bytes = shape.scratch_bytes,
                                .ids = (uint32_t *)(void *)(bytes + ids_at),
                                .id_count = shape.id_count};
    for (int i = 0; i < RF_VOCAB_TABLE_COUNT; i++)
        tokenizer->vocab.tables[i] = bytes + table_at[i];
    status = rf_vocab_build(&tokenizer->vocab, err);
    if (status) {
        rf_os_release(memory, total);
        return status;
    }
    *out = tokenizer;
    return RF_OK;
}

void rf_tokenizer_close(rf_tokenizer *tokenizer)
{
    if (tokenizer && tokenizer->reserved_bytes) {
        rf_os_release(tokenizer, tokenizer->reserved_bytes);
    }
}

static rf_status check_length(const rf_tokenizer *tokenizer, uint64_t text_bytes, rf_error *err)
{
    if (text_bytes <= tokenizer->text_bytes)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, "text", "longer than was planned");
    rf_fail_expected(err, "at most %llu bytes", (unsigned long long)tokenizer->text_bytes);
    return rf_fail_got(err, "%llu", (unsigned long long)text_bytes);
}

rf_status rf_tokenizer_encode(rf_tokenizer *tokenizer, const char *text, uint64_t text_bytes,
                              uint32_t flags, const uint32_t **ids, uint64_t *count, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_length(tokenizer, text_bytes, err);
    if (status)
        return status;
    rf_tokenize_options options = {.add_special = flags & RF_TOKENIZE_ADD_SPECIAL,
                                   .parse_special = flags & RF_TOKENIZE_PARSE_SPECIAL};
    status = rf_tokenize(&tokenizer->vocab, text, text_bytes, options, tokenizer->scratch,
                         tokenizer->scratch_bytes, tokenizer->ids, tokenizer->id_count, count, err);
    if (status == RF_OK)
        *ids = tokenizer->ids;
    return status;
}

typedef struct chat_job {
    rf_tokenizer *tokenizer;
    uint64_t count;
    bool is_first;
    rf_status status;
    rf_error *err;
} chat_job;

static void chat_piece(void *context, const char *text, uint64_t bytes, bool is_frame)
{
    chat_job *job = context;
    rf_tokenizer *tokenizer = job->tokenizer;
    uint64_t count = 0;
    if (job->status)
        return;
    rf_tokenize_options options = {.add_special = job->is_first, .parse_special = is_frame};
    job->status = check_length(tokenizer, bytes, job->err);
    if (job->status)
        return;
    job->status = rf_tokenize(&tokenizer->vocab, text, bytes, options, tokenizer->scratch,
                              tokenizer->scratch_bytes, tokenizer->ids + job->count,
                              tokenizer->id_count - job->count, &count, job->err);
    job->count += count;
    job->is_first = false;
}

rf_status rf_tokenizer_chat(rf_tokenizer *tokenizer, const rf_chat_turn *turns, uint32_t turn_count,
                            bool first, bool generate, const uint32_t **ids, uint64_t *count,
                            rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    chat_job job = {.tokenizer = tokenizer, .is_first = first, .err = err};
    rf_chat_format format = rf_chat_format_of(tokenizer->vocab.gguf);
    if (!first) /* the end token closed the answer; its turn's line end comes with the next turn */
        chat_piece(&job, "\n", 1, true);
    for (uint32_t i = 0; i < turn_count; i++) {
        rf_chat_message message = {turns[i].role, turns[i].text};
        rf_status status = rf_chat_render(format, &message, 1, generate && i + 1 == turn_count,
                                          chat_piece, &job, err);
        if (status)
            return status;
        if (job.status)
            return job.status;
    }
    if (job.status)
        return job.status;
    *ids = tokenizer->ids;
    *count = job.count;
    return RF_OK;
}

void rf_tokenizer_describe(const rf_tokenizer *tokenizer, rf_tokenizer_info *out)
{
    const rf_vocab *vocab = &tokenizer->vocab;
    *out = (rf_tokenizer_info){.token_count = vocab->token_count,
                               .bos = vocab->bos,
                               .eos = vocab->eos,
                               .add_bos = vocab->add_bos,
                               .has_chat_format = rf_chat_format_of(vocab->gguf) != RF_CHAT_NONE};
}

uint64_t rf_tokenizer_piece(const rf_tokenizer *tokenizer, uint32_t id, bool special, char *out,
                            uint64_t capacity)
{
    return rf_vocab_piece(&tokenizer->vocab, id, special, out, capacity);
}

bool rf_tokenizer_is_end(const rf_tokenizer *tokenizer, uint32_t id)
{
    return rf_vocab_is_end(&tokenizer->vocab, id);
}

/* ---- streams ----------------------------------------------------------------------------- */

_Static_assert(sizeof(rf_detokenizer) <= sizeof(rf_text_stream), "the public struct is too small");

/* The public struct is bytes for the inner one; copies keep the types apart. */
static rf_detokenizer load(const rf_text_stream *stream)
{
    rf_detokenizer inner;
    memcpy(&inner, stream->state, sizeof inner);
    return inner;
}

static void store(rf_text_stream *stream, const rf_detokenizer *inner)
{
    memcpy(stream->state, inner, sizeof *inner);
}

void rf_text_stream_start(rf_text_stream *stream, const rf_tokenizer *tokenizer, bool special)
{
    rf_detokenizer inner;
    rf_detokenizer_init(&inner, &tokenizer->vocab, special);
    store(stream, &inner);
}

uint64_t rf_text_stream_bound(const rf_tokenizer *tokenizer)
{
    return rf_detokenizer_bound(&tokenizer->vocab);
}

uint64_t rf_text_stream_push(rf_text_stream *stream, uint32_t id, char *out, uint64_t capacity)
{
    rf_detokenizer inner = load(stream);
    uint64_t written = rf_detokenizer_push(&inner, id, out, capacity);
    store(stream, &inner);
    return written;
}

uint64_t rf_text_stream_flush(rf_text_stream *stream, char *out, uint64_t capacity)
{
    rf_detokenizer inner = load(stream);
    uint64_t written = rf_detokenizer_flush(&inner, out, capacity);
    store(stream, &inner);
    return written;
}
