/* cli/cmd_ppl.c: `ppl`: perplexity of a text, and its divergence from another engine's logits. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ppl_command {
    const cli_args *args;
    cli_model model;
    cli_bytes text;
    uint32_t *tokens; /* owned; the text's */
    uint64_t count;
    kld_file base, save;
    ppl_job job;
} ppl_command;

/* The text's tokens, or without a text those of the base. */
static rf_status find_tokens(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    bool given = false;
    rf_status status = cli_read_text(args, &command->text, &given, err);
    if (status)
        return status;
    if (given)
        return cli_tokenize(args, command->model.file, &command->text, &command->tokens,
                            &command->count, err);
    if (args->kl_base)
        return RF_OK;
    return cli_need_text(args, &command->text, err);
}

/* The tokens must be those that the base was made from. */
static rf_status match_base(const ppl_command *command, rf_error *err)
{
    const kld_file *base = &command->base;
    const rf_plan_info *info = &command->model.info;
    if (base->vocab_count != info->vocab_count) {
        rf_fail(err, RF_ERR_USAGE, base->path, "made with another vocabulary");
        rf_fail_expected(err, "%u tokens", info->vocab_count);
        return rf_fail_got(err, "%u", base->vocab_count);
    }
    uint64_t count = (uint64_t)command->job.chunks * command->job.ctx;
    for (uint64_t i = 0; i < count; i++) {
        if (base->tokens[i] >= info->vocab_count)
            return rf_fail(err, RF_ERR_IO, base->path, "token %llu is no id of the vocabulary",
                           (unsigned long long)i);
        if (!command->tokens || base->tokens[i] == command->tokens[i])
            continue;
        rf_fail(err, RF_ERR_USAGE, base->path, "another text: the tokens differ at position %llu",
                (unsigned long long)i);
        rf_fail_expected(err, "%u, as in our text", command->tokens[i]);
        return rf_fail_got(err, "%u", base->tokens[i]);
    }
    return RF_OK;
}

/* How many chunks there are, and how many of them are wanted. */
static rf_status count_chunks(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    uint32_t ctx = (uint32_t)command->model.info.ctx;
    uint64_t chunks = command->tokens ? command->count / ctx : command->base.chunks;
    if (!chunks) {
        rf_fail(err, RF_ERR_USAGE, "-f", "the text is shorter than one chunk");
        rf_fail_expected(err, "at least %u tokens (-c)", ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)command->count);
    }
    if (cli_has(args, CLI_GIVEN_CHUNKS)) {
        if ((uint64_t)args->chunks > chunks)
            cli_note("note: the text has only %llu chunks", (unsigned long long)chunks);
        chunks = RF_MIN(chunks, (uint64_t)args->chunks);
    }
    if (args->kl_base) {
        if (command->tokens && !cli_has(args, CLI_GIVEN_CHUNKS) && chunks < command->base.chunks) {
            rf_fail(err, RF_ERR_USAGE, command->base.path, "made from a longer text");
            rf_fail_expected(err, "at most %llu chunks", (unsigned long long)chunks);
            return rf_fail_got(err, "%u", command->base.chunks);
        }
        chunks = RF_MIN(chunks, command->base.chunks);
    }
    if (chunks > INT32_MAX)
        return rf_fail(err, RF_ERR_USAGE, "-f", "more chunks than can be counted");
    command->job.ctx = ctx;
    command->job.chunks = (uint32_t)chunks;
    return RF_OK;
}

static rf_status open_model(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    rf_options options;
    cli_options_for(args, &options);
    if (args->kl_base && !cli_has(args, CLI_GIVEN_CTX))
        options.ctx = command->base.ctx;
    rf_status status = cli_plan_open(&command->model, &options, err);
    if (status)
        return status;
    rf_plan_info info = command->model.info;
    if (info.ctx < 4 || info.ctx > INT32_MAX) {
        rf_fail(err, RF_ERR_USAGE, "-c", "too %s to be scored", info.ctx < 4 ? "short" : "long");
        rf_fail_expected(err, "4 to 2147483647");
        return rf_fail_got(err, "%llu", (unsigned long long)info.ctx);
    }
    if (args->kl_base && info.ctx != command->base.ctx) {
        rf_fail(err, RF_ERR_USAGE, "-c", "another context than the logits file was made with");
        rf_fail_expected(err, "%u", command->base.ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)info.ctx);
    }
    status = count_chunks(command, err);
    if (status)
        return status;
    uint32_t rows = ppl_logit_rows((uint32_t)info.ctx, info.chunk);
    if (rows != info.logit_rows) { /* the plan must hold the rows that a step will return */
        options.logit_rows = rows;
        rf_model_plan_close(command->model.plan);
        command->model.plan = NULL;
        status = cli_plan_open(&command->model, &options, err);
    }
    if (!status && args->kl_base)
        status = match_base(command, err);
    if (!status)
        status = cli_model_open(&command->model, err);
    return status;
}

/* Bytes that one position of one slot takes in the ring. */
static double kv_bytes_per_token(const cli_model *model)
{
    const rf_plan *plan = rf_model_plan_regions(model->plan);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (cli_glob("kv.layers[*].?", plan->rows[i].id))
            bytes += plan->rows[i].bytes;
    }
    return (double)bytes / ((double)model->info.ctx * model->info.slots);
}

static void print_json(const ppl_command *command, const ppl_result *result)
{
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_f64(writer, "perplexity", result->perplexity);
    rf_json_f64(writer, "stderr", result->stderror);
    rf_json_u64(writer, "chunks", result->chunks);
    rf_json_u64(writer, "ctx", command->job.ctx);
    rf_json_u64(writer, "tokens", result->scored);
    rf_json_f64(writer, "bytes_per_token", kv_bytes_per_token(&command->model));
    if (result->has_kl) {
        rf_json_open(writer, "kl", '{');
        rf_json_f64(writer, "mean", result->kl_mean);
        rf_json_f64(writer, "stderr", result->kl_stderror);
        rf_json_f64(writer, "p99", result->kl_p99);
        rf_json_f64(writer, "p999", result->kl_p999);
        rf_json_f64(writer, "max", result->kl_max);
        rf_json_f64(writer, "top1", result->top1);
        rf_json_f64(writer, "ppl_ratio", result->ppl_ratio);
        rf_json_close(writer, '}');
    } else {
        rf_json_null(writer, "kl");
    }
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_text(const ppl_command *command, const ppl_result *result)
{
    out_print("perplexity  %.4f +- %.4f  (%llu scored tokens, %u chunks of %u)\n",
              result->perplexity, result->stderror, (unsigned long long)result->scored,
              result->chunks, command->job.ctx);
    if (!result->has_kl)
        return;
    out_print("kl          mean %.3g +- %.2g, 99 %% %.3g, 99.9 %% %.3g, max %.3g\n",
              result->kl_mean, result->kl_stderror, result->kl_p99, result->kl_p999,
              result->kl_max);
    out_print("top-1       %.3f %% the same\n", 100.0 * result->top1);
    out_print("ppl ratio   %.6f\n", result->ppl_ratio);
}

static rf_status ppl_steps(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    if (args->kl_base && args->kl_save && strcmp(args->kl_base, args->kl_save) == 0)
        return rf_fail(err, RF_ERR_USAGE, "--kl-save", "the same file as --kl-base");
    rf_status status = cli_file_open(args, &command->model, err);
    if (!status && args->kl_base)
        status = kld_open(&command->base, args->kl_base, err);
    if (!status)
        status = find_tokens(command, err);
    if (!status)
        status = open_model(command, err);
    if (status)
        return status;
    ppl_job *job = &command->job;
    job->tokens = command->tokens ? command->tokens : command->base.tokens;
    job->base = args->kl_base ? &command->base : NULL;
    if (args->kl_save) {
        command->save.ctx = job->ctx;
        command->save.chunks = job->chunks;
        command->save.vocab_count = command->model.info.vocab_count;
        status = kld_create(&command->save, args->kl_save, job->tokens, err);
        if (status)
            return status;
        job->save = &command->save;
    }
    ppl_result result;
    status = ppl_run(&command->model, job, &result, err);
    if (!status)
        status = kld_close(&command->save, err);
    if (status)
        return status;
    if (args->json) {
        print_json(command, &result);
    } else {
        print_text(command, &result);
    }
    out_flush();
    cli_memory_summary(&command->model);
    return out_status(err);
}

rf_status cmd_ppl(const cli_args *args, rf_error *err)
{
    ppl_command command = {.args = args};
    rf_status status = ppl_steps(&command, err);
    kld_close(&command.save, NULL);
    kld_close(&command.base, NULL);
    cli_model_close(&command.model);
    free(command.tokens);
    cli_bytes_free(&command.text);
    return status;
}
