/* cli/cmd_tokenize.c: `tokenize`: the ids of a text, by the text floor alone. */
#include "cli.h"

#include <stdlib.h>

/* The text of one token, in a buffer that grows; *bytes gets its length. */
static const char *piece_text(rf_tokenizer *tokenizer, uint32_t id, cli_bytes *buffer,
                              size_t *bytes)
{
    uint64_t needed = rf_tokenizer_piece(tokenizer, id, true, buffer->data, buffer->size);
    if (needed > buffer->size) {
        char *grown = realloc(buffer->data, (size_t)needed);
        if (!grown) {
            *bytes = 0;
            return "";
        }
        *buffer = (cli_bytes){grown, (size_t)needed};
        needed = rf_tokenizer_piece(tokenizer, id, true, buffer->data, buffer->size);
    }
    *bytes = (size_t)needed;
    return buffer->data ? buffer->data : "";
}

static void print_json(rf_tokenizer *tokenizer, const uint32_t *ids, uint64_t count)
{
    cli_bytes buffer = {NULL, 0};
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_open(writer, "tokens", '[');
    for (uint64_t i = 0; i < count && !out_failed(); i++) {
        size_t bytes;
        const char *text = piece_text(tokenizer, ids[i], &buffer, &bytes);
        rf_json_open(writer, NULL, '{');
        rf_json_u64(writer, "id", ids[i]);
        rf_json_text_n(writer, "text", text, RF_MIN(bytes, 65536));
        rf_json_close(writer, '}');
        json_step(writer);
    }
    rf_json_close(writer, ']');
    rf_json_close(writer, '}');
    json_end(writer);
    cli_bytes_free(&buffer);
}

/* Each token on a line of its own; what would break the line is written as \xNN. */
static void print_pieces(rf_tokenizer *tokenizer, const uint32_t *ids, uint64_t count)
{
    cli_bytes buffer = {NULL, 0};
    for (uint64_t i = 0; i < count && !out_failed(); i++) {
        size_t bytes;
        const char *text = piece_text(tokenizer, ids[i], &buffer, &bytes);
        out_print("%8u  \"", ids[i]);
        for (size_t b = 0; b < bytes; b++) {
            unsigned char byte = (unsigned char)text[b];
            if (byte == '\n') {
                out_bytes("\\n", 2);
            } else if (byte < 0x20 || byte == 0x7f) {
                out_print("\\x%02x", byte);
            } else {
                out_bytes(text + b, 1);
            }
        }
        out_print("\"\n");
    }
    cli_bytes_free(&buffer);
}

static void print_ids(const uint32_t *ids, uint64_t count)
{
    for (uint64_t i = 0; i < count && !out_failed(); i++)
        out_print(i ? " %u" : "%u", ids[i]);
    out_print("\n");
}

rf_status cmd_tokenize(const cli_args *args, rf_error *err)
{
    cli_model model = {0};
    cli_bytes text;
    rf_tokenizer *tokenizer = NULL;
    const uint32_t *ids = NULL;
    uint64_t count = 0;
    rf_status status = cli_need_text(args, &text, err);
    if (!status)
        status = cli_file_open(args, &model, err);
    if (!status)
        status = rf_tokenizer_open(model.file, text.size, &tokenizer, err);
    if (!status)
        status = rf_tokenizer_encode(tokenizer, text.data ? text.data : "", text.size,
                                     cli_tokenize_flags(args), &ids, &count, err);
    if (!status) {
        if (args->json) {
            print_json(tokenizer, ids, count);
        } else if (args->pieces) {
            print_pieces(tokenizer, ids, count);
        } else {
            print_ids(ids, count);
        }
        out_flush();
        status = out_status(err);
    }
    rf_tokenizer_close(tokenizer);
    cli_model_close(&model);
    cli_bytes_free(&text);
    return status;
}
