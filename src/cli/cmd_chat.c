/* cli/cmd_chat.c: `chat`: turns in the model's chat format, one question a line.
 *
 * The sequence stays in slot 0: each turn appends its own tokens, and the answer with its end
 * token stays part of it. A turn that no longer fits is refused, /clear starts anew.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TURN_BYTES (32u * 1024u) /* longest question, system message included */

typedef struct chat_state {
    cli_model model;
    const cli_args *args;
    bool fresh;     /* nothing of the conversation is in the slot */
    bool open_turn; /* the last answer was cut off before its end token */
    char line[TURN_BYTES + 2];
} chat_state;

static void chat_clear(chat_state *chat)
{
    (void)rf_slot_truncate(chat->model.model, 0, 0, NULL);
    rf_draft_start(chat->model.model, 0);
    chat->fresh = true;
    chat->open_turn = false;
}

/* Ends an answer that was cut off, so that the next turn stands where the format wants it. */
static rf_status close_turn(chat_state *chat, rf_error *err)
{
    if (!chat->open_turn)
        return RF_OK;
    chat->open_turn = false;
    rf_model *model = chat->model.model;
    if (chat->model.vocabulary.eos == UINT32_MAX ||
        rf_slot_length(model, 0) >= chat->model.info.ctx)
        return RF_OK;
    rf_step_item item = {0, chat->model.vocabulary.eos, rf_slot_length(model, 0), false,
                         RF_STEP_GENERATION};
    return rf_step(model, &item, 1, err);
}

static void print_json(const cli_generation *generation)
{
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_text_n(writer, "text", generation->text.data ? generation->text.data : "",
                   RF_MIN(generation->text.size, 65536));
    rf_json_u64(writer, "tokens", generation->tokens);
    rf_json_text(writer, "stop", cli_stop_name(generation->stop));
    rf_json_close(writer, '}');
    json_end(writer);
}

static rf_status answer_tokens(chat_state *chat, const uint32_t *ids, uint64_t count, rf_error *err)
{
    cli_model *model = &chat->model;
    uint64_t start = rf_os_clock_ns();
    rf_status status = cli_prefill(model, ids, count, err);
    if (status)
        return status;
    uint64_t prompt_ns = rf_os_clock_ns() - start;
    rf_draft_note(model->model, 0, ids, count);
    chat->fresh = false;
    chat->open_turn = true;
    rf_text_stream stream;
    rf_text_stream_start(&stream, model->tokenizer, false);
    cli_generation generation = {
        .limit = chat->args->predict, .commit_last = true, .collect = chat->args->json};
    status = cli_generate(model, &stream, &generation, err);
    if (!status && chat->args->json)
        print_json(&generation);
    cli_bytes_free(&generation.text);
    if (!chat->args->json && (out_is_terminal() || !cli_has(chat->args, CLI_GIVEN_PROMPT))) {
        out_bytes("\n", 1);
        out_flush();
    }
    if (status)
        return status;
    chat->open_turn = generation.stop != CLI_STOP_END;
    if (generation.stop == CLI_STOP_RING)
        cli_note("the context of %llu tokens is full: the answer was cut off (a larger -c makes "
                 "room, /clear starts anew)",
                 (unsigned long long)model->info.ctx);
    cli_speed_summary(count, prompt_ns, &generation);
    return out_status(err);
}

static rf_status answer(chat_state *chat, const char *text, rf_error *err)
{
    rf_chat_turn turns[2];
    uint32_t turn_count = 0;
    if (chat->fresh && chat->args->system)
        turns[turn_count++] = (rf_chat_turn){"system", chat->args->system};
    turns[turn_count++] = (rf_chat_turn){"user", text};
    rf_status status = close_turn(chat, err);
    if (status)
        return status;
    const uint32_t *ids;
    uint64_t count;
    status = rf_tokenizer_chat(chat->model.tokenizer, turns, turn_count, chat->fresh, true, &ids,
                               &count, err);
    if (status)
        return status;
    uint64_t room = chat->model.info.ctx - rf_slot_length(chat->model.model, 0);
    if (count > room) {
        rf_fail(err, RF_ERR_USAGE, chat->fresh ? "prompt" : "turn",
                "longer than what is left of the context");
        rf_fail_expected(err, "at most %llu tokens (-c)", (unsigned long long)room);
        return rf_fail_got(err, "%llu", (unsigned long long)count);
    }
    return answer_tokens(chat, ids, count, err);
}

/* One line of stdin without its end; *got false at the end of the input. */
static rf_status read_line(chat_state *chat, bool *got, rf_error *err)
{
    size_t used = 0;
    *got = false;
    for (;;) {
        char byte;
        ssize_t count = read(STDIN_FILENO, &byte, 1);
        if (signals_interrupted())
            return signals_status(err);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return rf_fail(err, RF_ERR_IO, "stdin", "cannot read: %s", strerror(errno));
        if (count == 0 && used == 0)
            return RF_OK;
        if (count == 0 || byte == '\n')
            break;
        if (used < TURN_BYTES)
            chat->line[used] = byte;
        used++;
    }
    *got = true;
    if (used >= TURN_BYTES) {
        rf_fail(err, RF_ERR_USAGE, "stdin", "the line is too long");
        rf_fail_expected(err, "fewer than %u bytes", TURN_BYTES);
        return rf_fail_got(err, "%zu", used);
    }
    if (used && chat->line[used - 1] == '\r')
        used--;
    chat->line[used] = '\0';
    return RF_OK;
}

static rf_status converse(chat_state *chat, rf_error *err)
{
    bool terminal = isatty(STDIN_FILENO) == 1 && !cli_quiet();
    for (;;) {
        if (terminal && write(STDERR_FILENO, "> ", 2) < 0)
            terminal = false;
        bool got;
        rf_status status = read_line(chat, &got, err);
        if (!status && !got)
            return RF_OK;
        if (!status && strcmp(chat->line, "/quit") == 0)
            return RF_OK;
        if (!status && strcmp(chat->line, "/clear") == 0) {
            chat_clear(chat);
            continue;
        }
        if (!status && chat->line[0])
            status = answer(chat, chat->line, err);
        if (status == RF_ERR_USAGE && isatty(STDIN_FILENO) == 1) {
            cli_report(err); /* a person can put it in another way */
            err->status = RF_OK;
            status = RF_OK;
        }
        if (status)
            return status;
    }
}

rf_status cmd_chat(const cli_args *args, rf_error *err)
{
    static chat_state chat;
    chat.args = args;
    chat.fresh = true;
    size_t longest =
        RF_MAX(cli_has(args, CLI_GIVEN_PROMPT) ? strlen(args->prompt) : 0, (size_t)TURN_BYTES);
    longest += args->system ? strlen(args->system) : 0;
    rf_status status = cli_open_all(args, longest + 1024, &chat.model, err);
    if (!status)
        status = cli_need_tokenizer(&chat.model, err);
    if (!status && !chat.model.vocabulary.has_chat_format)
        status = rf_fail(err, RF_ERR_UNSUPPORTED, "tokenizer.chat_template",
                         "the model has no chat format that is known here");
    uint64_t seed;
    if (!status)
        status = cli_start_sampler(args, &chat.model, &seed, err);
    if (!status)
        status = cli_has(args, CLI_GIVEN_PROMPT) ? answer(&chat, args->prompt, err)
                                                 : converse(&chat, err);
    if (!status)
        cli_memory_summary(&chat.model);
    cli_model_close(&chat.model);
    return status;
}
