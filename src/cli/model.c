/* cli/model.c: what every command does before its own work: reading texts, opening a file, its
 * plan and its model, with the options that the arguments stand for, and a team of threads for
 * the command's own arithmetic.
 */
#include "cli.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

extern const unsigned char rf_embedded_model[];
extern const unsigned char rf_embedded_model_end[];

/* ---- texts ------------------------------------------------------------------------------- */

static rf_status read_all(int fd, const char *name, cli_bytes *out, rf_error *err)
{
    size_t capacity = 0;
    for (;;) {
        if (out->size == capacity) {
            size_t wanted = capacity ? capacity * 2 : 65536;
            char *grown = wanted > capacity ? realloc(out->data, wanted) : NULL;
            if (!grown)
                return rf_fail(err, RF_ERR_NO_FIT, name, "no memory for the text");
            out->data = grown;
            capacity = wanted;
        }
        ssize_t got = read(fd, out->data + out->size, capacity - out->size);
        if (got == 0)
            return RF_OK;
        if (got < 0 && errno == EINTR && !signals_interrupted())
            continue;
        if (signals_interrupted())
            return signals_status(err);
        if (got < 0)
            return rf_fail(err, RF_ERR_IO, name, "cannot read: %s", strerror(errno));
        out->size += (size_t)got;
    }
}

rf_status cli_read_file(const char *path, cli_bytes *out, rf_error *err)
{
    *out = (cli_bytes){NULL, 0};
    bool standard = strcmp(path, "-") == 0;
    const char *name = standard ? "stdin" : path;
    int fd = standard ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return rf_fail(err, RF_ERR_IO, name, "cannot open: %s", strerror(errno));
    rf_status status = read_all(fd, name, out, err);
    if (!standard)
        close(fd);
    if (status)
        cli_bytes_free(out);
    return status;
}

void cli_bytes_free(cli_bytes *bytes)
{
    free(bytes->data);
    *bytes = (cli_bytes){NULL, 0};
}

rf_status cli_read_text(const cli_args *args, cli_bytes *out, bool *given, rf_error *err)
{
    *out = (cli_bytes){NULL, 0};
    bool prompt = cli_has(args, CLI_GIVEN_PROMPT), file = cli_has(args, CLI_GIVEN_FILE);
    if (prompt && file) { /* the command line wins over the environment */
        bool prompt_argument = args->given_argument >> CLI_GIVEN_PROMPT & 1u;
        bool file_argument = args->given_argument >> CLI_GIVEN_FILE & 1u;
        if (prompt_argument == file_argument)
            return rf_fail(err, RF_ERR_USAGE, "-f", "give -p or -f, not both");
        prompt = prompt_argument;
        file = file_argument;
    }
    *given = prompt || file;
    if (file)
        return cli_read_file(args->file, out, err);
    if (!prompt)
        return RF_OK;
    size_t size = strlen(args->prompt);
    out->data = malloc(size + 1);
    if (!out->data)
        return rf_fail(err, RF_ERR_NO_FIT, "-p", "no memory for the text");
    memcpy(out->data, args->prompt, size + 1);
    out->size = size;
    return RF_OK;
}

rf_status cli_need_text(const cli_args *args, cli_bytes *out, rf_error *err)
{
    bool given = false;
    rf_status status = cli_read_text(args, out, &given, err);
    if (!status && !given)
        return rf_fail(err, RF_ERR_USAGE, "-f", "%s needs a text: -f FILE or -p TEXT",
                       args->command->name);
    return status;
}

uint32_t cli_tokenize_flags(const cli_args *args)
{
    return (args->no_bos ? 0 : RF_TOKENIZE_ADD_SPECIAL) |
           (args->no_special ? 0 : RF_TOKENIZE_PARSE_SPECIAL);
}

rf_status cli_tokenize(const cli_args *args, const rf_file *file, const cli_bytes *text,
                       uint32_t **ids, uint64_t *count, rf_error *err)
{
    rf_tokenizer *tokenizer = NULL;
    const uint32_t *found = NULL;
    uint64_t found_count = 0;
    *ids = NULL;
    *count = 0;
    rf_status status = rf_tokenizer_open(file, text->size, &tokenizer, err);
    if (!status)
        status = rf_tokenizer_encode(tokenizer, text->data ? text->data : "", text->size,
                                     cli_tokenize_flags(args), &found, &found_count, err);
    if (!status) {
        uint32_t *copy = malloc((size_t)(found_count + 1) * sizeof *copy);
        if (copy) {
            if (found_count)
                memcpy(copy, found, (size_t)found_count * sizeof *copy);
            *ids = copy;
            *count = found_count;
        } else {
            status = rf_fail(err, RF_ERR_NO_FIT, "tokens", "no memory for the token ids");
        }
    }
    rf_tokenizer_close(tokenizer);
    return status;
}

/* ---- file, plan, model ------------------------------------------------------------------- */

rf_status cli_file_open(const cli_args *args, cli_model *model, rf_error *err)
{
    rf_status status;
    model->args = args;
    if (args->model) {
        signals_watch_file(args->model, NULL, 0);
        status = rf_file_open(args->model, &model->file, err);
    } else {
        status = rf_file_open_memory("embedded:stories260k", rf_embedded_model,
                                     (uint64_t)(rf_embedded_model_end - rf_embedded_model),
                                     &model->file, err);
    }
    if (status) {
        signals_watch_file(NULL, NULL, 0);
        return status;
    }
    rf_file_describe(model->file, &model->file_info);
    signals_watch_file(model->file_info.name, model->file_info.data, model->file_info.bytes);
    return RF_OK;
}

void cli_options_for(const cli_args *args, rf_options *options)
{
    rf_options_init(options);
    if (cli_has(args, CLI_GIVEN_CTX))
        options->ctx = args->ctx ? (uint64_t)args->ctx : RF_CTX_TRAINED;
    options->slots = (uint32_t)args->slots;
    if (cli_has(args, CLI_GIVEN_CHUNK))
        options->chunk = (uint32_t)args->chunk;
    options->threads = (uint32_t)args->threads;
    options->kv_k = args->kv_k;
    options->kv_v = args->kv_v;
    options->kv_layers = args->kv_layers;
    options->kv_recent = (uint32_t)args->kv_recent;
    options->sinks = (uint32_t)args->sinks;
    options->endless = args->endless;
    options->cpu_mask = args->cpu_mask;
    options->draft = (uint32_t)args->draft;
    const cli_command *command = args->command;
    if (command == &cli_commands[CLI_PPL] || command == &cli_commands[CLI_SCORE])
        options->act_prompt = options->act_generation = 16; /* they measure */
    if (args->act[0]) {
        options->act_prompt = args->act[0];
        options->act_generation = args->act[1];
    }
    options->mem_limit = args->mem_limit;
    options->profile = args->profile;
    options->text_bytes = CLI_TEXT_BYTES;
}

rf_status cli_plan_open(cli_model *model, const rf_options *options, rf_error *err)
{
    rf_options ready = *options;
    rf_status status = cli_calibration_ready(model->args, model, &ready, model->only_plan, err);
    if (!status)
        status = rf_plan_make(model->file, &ready, &model->plan, err);
    if (!status)
        rf_model_plan_describe(model->plan, &model->info);
    const char *label = status == RF_ERR_USAGE ? cli_option_label(err->where) : NULL;
    if (label)
        rf_print(err->where, sizeof err->where, "%s", label);
    return status;
}

cli_options_text cli_plan_options(const rf_plan_info *info)
{
    cli_options_text out;
    rf_print(out.text, sizeof out.text, "ctx %llu, %u slot%s, chunk %u, %u thread%s",
             (unsigned long long)info->ctx, info->slots, info->slots == 1 ? "" : "s", info->chunk,
             info->threads, info->threads == 1 ? "" : "s");
    return out;
}

void json_plan_options(rf_writer *writer, const rf_plan_info *info)
{
    rf_json_open(writer, "options", '{');
    rf_json_u64(writer, "ctx", info->ctx);
    rf_json_u64(writer, "slots", info->slots);
    rf_json_u64(writer, "chunk", info->chunk);
    rf_json_u64(writer, "act_prompt", info->act_prompt);
    rf_json_u64(writer, "act_generation", info->act_generation);
    rf_json_u64(writer, "threads", info->threads);
    rf_json_close(writer, '}');
}

void cli_plan_notes(const cli_model *model)
{
    if (model->info.data_missing)
        return; /* opening says it, as an error */
    for (uint32_t i = 0; i < model->info.note_count; i++)
        cli_note("note: %s", rf_model_plan_note(model->plan, i));
    char name[256];
    if (rf_model_plan_unknown_tensor(model->plan, 0, name, sizeof name))
        cli_note("note: %u tensors have no use in this architecture, the first is %s",
                 model->info.unknown_tensor_count, name);
}

/* What would make it fit stands on stderr beside the error. */
static void print_suggestions(const cli_model *model)
{
    rf_suggestion suggestion;
    for (uint32_t i = 0; rf_model_plan_suggestion(model->plan, i, &suggestion); i++)
        cli_note("it would fit better with %s (saves %s; %s)", suggestion.option,
                 cli_size(suggestion.saves_bytes).text, suggestion.cost);
}

rf_status cli_model_open(cli_model *model, rf_error *err)
{
    if (!model->notes_said)
        cli_plan_notes(model);
    rf_status status = signals_status(err);
    if (status)
        return status;
    cli_progress progress = cli_progress_start("opening");
    status = rf_model_open(model->plan, cli_progress_step, &progress, &model->model, err);
    if (status == RF_ERR_BAD_MODEL && model->calibration[0] &&
        strcmp(err->where, model->calibration) == 0) {
        /* What the cache folder has is of another version, or damaged: it is ours to make anew. */
        *err = (rf_error){0};
        status = cli_calibration_make(model->args, model, model->calibration, err);
        if (!status)
            status = rf_model_open(model->plan, cli_progress_step, &progress, &model->model, err);
    }
    cli_progress_end(&progress);
    if (status) {
        if (status == RF_ERR_NO_FIT)
            print_suggestions(model);
        return status;
    }
    signals_watch_model(model->model);
    model->tokenizer = rf_model_tokenizer(model->model);
    model->vocabulary = (rf_tokenizer_info){.bos = UINT32_MAX, .eos = UINT32_MAX};
    if (model->tokenizer)
        rf_tokenizer_describe(model->tokenizer, &model->vocabulary);
    return RF_OK;
}

rf_status cli_need_tokenizer(const cli_model *model, rf_error *err)
{
    if (model->tokenizer)
        return RF_OK;
    return rf_fail(err, RF_ERR_BAD_MODEL, "tokenizer.ggml.model",
                   "the file has no vocabulary to read or write text with");
}

void cli_model_close(cli_model *model)
{
    signals_watch_model(NULL);
    rf_model_close(model->model, NULL);
    rf_model_plan_close(model->plan);
    signals_watch_file(NULL, NULL, 0);
    rf_file_close(model->file);
    memset(model, 0, sizeof *model);
}

rf_status cli_open_all(const cli_args *args, uint64_t text_bytes, cli_model *model, rf_error *err)
{
    rf_options options;
    cli_options_for(args, &options);
    options.text_bytes = RF_MAX(options.text_bytes, text_bytes);
    rf_status status = cli_file_open(args, model, err);
    if (!status)
        status = cli_plan_open(model, &options, err);
    if (!status)
        status = cli_model_open(model, err);
    return status;
}

rf_status cli_prefill(cli_model *model, const uint32_t *tokens, uint64_t count, rf_error *err)
{
    cli_progress progress = cli_progress_start("reading the prompt");
    rf_status status =
        rf_prefill(model->model, 0, tokens, count, true, cli_progress_step, &progress, err);
    cli_progress_end(&progress);
    return status;
}

/* ---- a team of our own ------------------------------------------------------------------- */

rf_status cli_team_open(cli_team *team, uint32_t threads, rf_error *err)
{
    memset(team, 0, sizeof *team);
    team->count = RF_MAX(1u, RF_MIN(threads, RF_WORKERS_MAX));
    size_t bytes = (size_t)((rf_team_bytes(team->count) + 63) / 64 * 64);
    team->memory = aligned_alloc(64, bytes);
    if (!team->memory)
        return rf_fail(err, RF_ERR_NO_FIT, "threads", "no memory for the team");
    memset(team->memory, 0, bytes);
    for (uint32_t i = 1; i < team->count; i++) {
        rf_status status = rf_os_reserve(RF_WORKER_STACK_BYTES, &team->stacks[i], err);
        if (status) {
            cli_team_close(team);
            return status;
        }
    }
    rf_status status = rf_team_start(team->memory, team->count, team->stacks, &team->team, err);
    if (status)
        cli_team_close(team);
    return status;
}

void cli_team_close(cli_team *team)
{
    rf_team_stop(team->team);
    for (uint32_t i = 1; i < team->count; i++) {
        if (team->stacks[i])
            rf_os_release(team->stacks[i], RF_WORKER_STACK_BYTES);
    }
    free(team->memory);
    memset(team, 0, sizeof *team);
}
