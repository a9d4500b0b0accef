/* runtime/save.c: a slot in a file; a run that was interrupted goes on as if it had not been.
 *
 *   header │ token ids │ the KV store's own head and rows
 *
 * The header carries a digest of everything else and the fingerprint of the weights. A file is
 * verified whole, down to single tokens, before anything of the model is touched; it is written
 * beside its place, synced and renamed. What the rows are is the store's business.
 */
#include "runtime/runtime.h"

#include <string.h>

#define SLOT_MAGIC   "RFSLOT\r\n"
#define SLOT_VERSION 1u
#define NO_TOKEN     UINT32_MAX

typedef struct saved_sampler { /* an rf_sampler, independent of how that is laid out */
    float temperature, top_p, min_p, repeat_penalty;
    uint32_t top_k, repeat_last;
    uint64_t seed;
    uint64_t generator[4];
    uint64_t accepted;
    uint32_t window[RF_REPEAT_WINDOW_MAX];
} saved_sampler;

typedef struct saved_stream { /* an rf_text_stream */
    uint8_t present, special, at_start, pending_count;
    uint8_t pending[8];
} saved_stream;

typedef struct slot_header { /* little-endian, as it lies in the file */
    char magic[8];
    uint32_t version;
    uint32_t pending_token;
    uint64_t file_bytes;
    uint8_t digest[32]; /* of all other bytes */
    uint8_t fingerprint[32];
    uint64_t token_count;
    uint64_t kv_bytes;
    saved_sampler sampler;
    saved_stream stream;
    uint8_t zero[4];
} slot_header;

/* No padding: every byte of a file has a meaning. */
_Static_assert(sizeof(slot_header) == 104 + 72 + RF_REPEAT_WINDOW_MAX * 4 + 16,
               "layout of the file");
_Static_assert(sizeof(slot_header) % 8 == 0, "the tokens behind it are aligned");

static uint64_t padded_token_bytes(uint64_t token_count)
{
    return (token_count + token_count % 2) * sizeof(uint32_t);
}

static rf_status check_slot(const rf_model *model, uint32_t slot, rf_error *err)
{
    if (slot < model->plan->info.slots)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, "slot", "no such slot");
    rf_fail_expected(err, "below %u", model->plan->info.slots);
    return rf_fail_got(err, "%u", slot);
}

/* ---- small states -------------------------------------------------------------------------- */

static saved_sampler pack_sampler(const rf_sampler *sampler)
{
    const rf_sampling *options = &sampler->options;
    saved_sampler saved = {.temperature = options->temperature,
                           .top_p = options->top_p,
                           .min_p = options->min_p,
                           .repeat_penalty = options->repeat_penalty,
                           .top_k = options->top_k,
                           .repeat_last = options->repeat_last,
                           .seed = options->seed,
                           .accepted = sampler->accepted};
    memcpy(saved.generator, sampler->generator, sizeof saved.generator);
    memcpy(saved.window, sampler->window, sizeof saved.window);
    return saved;
}

static rf_sampler unpack_sampler(const saved_sampler *saved)
{
    rf_sampler sampler = {.options = {.temperature = saved->temperature,
                                      .top_k = saved->top_k,
                                      .top_p = saved->top_p,
                                      .min_p = saved->min_p,
                                      .repeat_penalty = saved->repeat_penalty,
                                      .repeat_last = saved->repeat_last,
                                      .seed = saved->seed},
                          .accepted = saved->accepted};
    memcpy(sampler.generator, saved->generator, sizeof saved->generator);
    memcpy(sampler.window, saved->window, sizeof saved->window);
    return sampler;
}

static saved_stream pack_stream(const rf_text_stream *stream)
{
    rf_detokenizer inner;
    saved_stream saved = {0};
    if (!stream)
        return saved;
    memcpy(&inner, stream->state, sizeof inner);
    saved = (saved_stream){.present = 1,
                           .special = inner.special,
                           .at_start = inner.at_start,
                           .pending_count = (uint8_t)inner.pending_count};
    memcpy(saved.pending, inner.pending, inner.pending_count);
    return saved;
}

static void unpack_stream(const saved_stream *saved, const rf_tokenizer *tokenizer,
                          rf_text_stream *stream)
{
    rf_detokenizer inner = {.vocab = &tokenizer->vocab,
                            .special = saved->special,
                            .at_start = saved->at_start,
                            .pending_count = saved->pending_count};
    memcpy(inner.pending, saved->pending, sizeof inner.pending);
    memcpy(stream->state, &inner, sizeof inner);
}

/* ---- save ---------------------------------------------------------------------------------- */

static rf_status check_extra(const rf_model *model, uint32_t slot, const rf_slot_extra *extra,
                             rf_error *err)
{
    uint32_t vocab_count = model->plan->info.vocab_count;
    uint64_t count = extra->tokens ? extra->token_count : 0;
    if (count > rf_slot_length(model, slot)) {
        rf_fail(err, RF_ERR_USAGE, "save", "more tokens than the slot has positions");
        rf_fail_expected(err, "at most %llu", (unsigned long long)rf_slot_length(model, slot));
        return rf_fail_got(err, "%llu", (unsigned long long)count);
    }
    uint32_t wrong = extra->pending_token == NO_TOKEN ? 0 : extra->pending_token;
    for (uint64_t i = 0; wrong < vocab_count && i < count; i++)
        wrong = extra->tokens[i];
    if (wrong < vocab_count)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, "save", "no such token");
    rf_fail_expected(err, "below %u", vocab_count);
    return rf_fail_got(err, "%u", wrong);
}

/* The digest of a file in parts: all but the digest itself. */
static void digest_start(rf_sha256 *hash, const slot_header *header)
{
    const uint8_t *bytes = (const uint8_t *)header;
    uint64_t at = offsetof(slot_header, digest), behind = at + sizeof header->digest;
    rf_sha256_init(hash);
    rf_sha256_add(hash, bytes, at);
    rf_sha256_add(hash, bytes + behind, sizeof *header - behind);
}

rf_status rf_slot_save(rf_model *model, uint32_t slot, const char *path, const rf_slot_extra *extra,
                       rf_error *err)
{
    static const uint32_t padding = 0;
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_slot(model, slot, err);
    if (status == RF_OK && extra)
        status = check_extra(model, slot, extra, err);
    if (status)
        return status;
    uint64_t tokens = extra && extra->tokens ? extra->token_count : 0;
    uint64_t head_bytes = rf_kv_save_head_bytes(model->kv); /* a multiple of 8 */
    uint32_t count = 0, row_pieces = rf_kv_save_rows(model->kv, slot, NULL);
    uint64_t reserved =
        sizeof(slot_header) + head_bytes + ((uint64_t)row_pieces + 4) * sizeof(rf_piece);
    void *memory = NULL;
    if ((status = rf_os_reserve(reserved, &memory, err)))
        return status;
    slot_header *header = memory;
    uint8_t *kv_head = (uint8_t *)memory + sizeof *header;
    rf_piece *pieces = (rf_piece *)(void *)(kv_head + head_bytes);

    *header = (slot_header){.version = SLOT_VERSION,
                            .pending_token = extra ? extra->pending_token : NO_TOKEN,
                            .token_count = tokens,
                            .kv_bytes = head_bytes,
                            .sampler = pack_sampler(&model->samplers[slot]),
                            .stream = pack_stream(extra ? extra->stream : NULL)};
    memcpy(header->magic, SLOT_MAGIC, sizeof header->magic);
    if ((status = rf_file_fingerprint(model->plan->file, header->fingerprint, err)))
        goto done;
    rf_kv_save_head(model->kv, slot, kv_head);
    pieces[count++] = (rf_piece){header, sizeof *header};
    pieces[count++] = (rf_piece){tokens ? extra->tokens : NULL, tokens * sizeof(uint32_t)};
    pieces[count++] = (rf_piece){&padding, padded_token_bytes(tokens) - tokens * sizeof(uint32_t)};
    pieces[count++] = (rf_piece){kv_head, head_bytes};
    count += rf_kv_save_rows(model->kv, slot, pieces + count);
    for (uint32_t i = count - row_pieces; i < count; i++)
        header->kv_bytes += pieces[i].bytes;
    header->file_bytes = sizeof *header + padded_token_bytes(tokens) + header->kv_bytes;

    rf_sha256 hash;
    digest_start(&hash, header);
    for (uint32_t i = 1; i < count; i++)
        rf_sha256_add(&hash, pieces[i].data, pieces[i].bytes);
    rf_sha256_end(&hash, header->digest);
    status = rf_os_write_file(path, pieces, count, err);
done:
    rf_os_release(memory, reserved);
    return status;
}

/* ---- restore ------------------------------------------------------------------------------- */

static rf_status check_size(const char *path, const char *what, uint64_t expected, uint64_t got,
                            rf_error *err)
{
    rf_fail(err, RF_ERR_BAD_MODEL, path, "%s", what);
    rf_fail_expected(err, "%llu bytes", (unsigned long long)expected);
    return rf_fail_got(err, "%llu bytes", (unsigned long long)got);
}

/* That the file is what rf_slot_save has once written, for these weights. */
static rf_status check_whole(const rf_model *model, const char *path, const rf_mapping *file,
                             rf_error *err)
{
    const slot_header *header = (const slot_header *)(const void *)file->data;
    uint8_t digest[32], fingerprint[32];
    rf_sha256 hash;
    if (file->size < sizeof *header)
        return check_size(path, "too short for a saved slot", sizeof *header, file->size, err);
    if (memcmp(header->magic, SLOT_MAGIC, sizeof header->magic) != 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "this is no saved slot");
    if (header->version != SLOT_VERSION) {
        rf_fail(err, RF_ERR_BAD_MODEL, path, "a slot saved by %s version of ringfence",
                header->version > SLOT_VERSION ? "a newer" : "another");
        rf_fail_expected(err, "version %u", SLOT_VERSION);
        return rf_fail_got(err, "version %u", header->version);
    }
    if (header->file_bytes != file->size)
        return check_size(path, "the saved slot is cut off or longer than it says",
                          header->file_bytes, file->size, err);
    digest_start(&hash, header);
    rf_sha256_add(&hash, file->data + sizeof *header, file->size - sizeof *header);
    rf_sha256_end(&hash, digest);
    if (memcmp(header->digest, digest, sizeof digest) != 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "the saved slot was altered");
    rf_status status = rf_file_fingerprint(model->plan->file, fingerprint, err);
    if (status)
        return status;
    if (memcmp(header->fingerprint, fingerprint, sizeof fingerprint) != 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "a slot of another model");
    return RF_OK;
}

/* That nothing in it would lead a step astray, whoever wrote it. */
static rf_status check_content(const rf_model *model, const char *path, const slot_header *header,
                               rf_error *err)
{
    const rf_sampler sampler = unpack_sampler(&header->sampler);
    const uint32_t *tokens = (const uint32_t *)(const void *)(header + 1);
    uint32_t vocab_count = model->plan->info.vocab_count;
    uint64_t behind = header->file_bytes - sizeof *header; /* checked: the file is that long */
    if (header->token_count > behind / sizeof(uint32_t) || header->kv_bytes > behind ||
        padded_token_bytes(header->token_count) != behind - header->kv_bytes)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "the saved slot's parts do not fill it");
    bool known = header->pending_token == NO_TOKEN || header->pending_token < vocab_count;
    for (uint64_t i = 0; known && i < header->token_count; i++)
        known = tokens[i] < vocab_count;
    if (!known)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "a saved token is not in the vocabulary");
    if (header->stream.pending_count > sizeof header->stream.pending)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "the saved text has too many open bytes");
    rf_error unused;
    if (rf_sampler_check(&sampler.options, &unused))
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "the saved sampler is out of range: %s",
                       unused.where);
    return RF_OK;
}

static rf_status check_room(const char *path, const slot_header *header, const rf_slot_extra *extra,
                            rf_error *err)
{
    if (!extra || !extra->tokens || header->token_count <= extra->token_capacity)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, path, "the saved slot has more tokens than there is room for");
    rf_fail_expected(err, "at most %llu", (unsigned long long)extra->token_capacity);
    return rf_fail_got(err, "%llu", (unsigned long long)header->token_count);
}

rf_status rf_slot_restore(rf_model *model, uint32_t slot, const char *path, rf_slot_extra *extra,
                          rf_error *err)
{
    rf_error own;
    rf_mapping file;
    if (!err)
        err = &own;
    rf_status status = check_slot(model, slot, err);
    if (status)
        return status;
    if ((status = rf_os_map(path, &file, err)))
        return status;
    const slot_header *header = (const slot_header *)(const void *)file.data;
    status = check_whole(model, path, &file, err);
    if (status == RF_OK)
        status = check_content(model, path, header, err);
    if (status == RF_OK)
        status = check_room(path, header, extra, err);
    if (status == RF_OK) /* the last that can fail, and the first that changes anything */
        status = rf_kv_restore(model->kv, slot, path, file.data + file.size - header->kv_bytes,
                               header->kv_bytes, err);
    if (status)
        goto done;
    model->samplers[slot] = unpack_sampler(&header->sampler);
    if (extra) {
        if (extra->tokens && header->token_count)
            memcpy(extra->tokens, header + 1, header->token_count * sizeof(uint32_t));
        extra->token_count = header->token_count;
        extra->pending_token = header->pending_token;
        if (extra->stream && header->stream.present && model->tokenizer)
            unpack_stream(&header->stream, model->tokenizer, extra->stream);
    }
done:
    rf_os_unmap(&file);
    return status;
}
