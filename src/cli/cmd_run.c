/* cli/cmd_run.c: `run`: a prompt, verbatim, and its continuation. */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define DEFAULT_TOKENS 128

typedef struct run_job {
    cli_model model;
    cli_bytes text;
    uint32_t *tokens; /* owned */
    uint64_t count;
    rf_text_stream stream;
    cli_generation generation;
    uint64_t seed;
    uint64_t prompt_ns;
} run_job;

/* The ids of the prompt, copied; with BOS alone for an empty one. */
static rf_status tokenize_prompt(const cli_args *args, run_job *job, rf_error *err)
{
    const uint32_t *ids = NULL;
    rf_status status =
        rf_tokenizer_encode(job->model.tokenizer, job->text.data ? job->text.data : "",
                            job->text.size, cli_tokenize_flags(args), &ids, &job->count, err);
    if (status)
        return status;
    job->tokens = malloc((size_t)(job->count + 1) * sizeof *job->tokens);
    if (!job->tokens)
        return rf_fail(err, RF_ERR_NO_FIT, "prompt", "no memory for the tokens");
    if (job->count)
        memcpy(job->tokens, ids, (size_t)job->count * sizeof *ids);
    const rf_tokenizer_info *vocabulary = &job->model.vocabulary;
    if (!job->count && !args->no_bos && vocabulary->bos != UINT32_MAX)
        job->tokens[job->count++] = vocabulary->bos;
    if (!job->count)
        return rf_fail(err, RF_ERR_USAGE, "-p",
                       "the prompt is empty, and there is no BOS token to start from");
    if (job->count > job->model.info.ctx && !args->endless) {
        rf_fail(err, RF_ERR_USAGE, "prompt", "longer than the context");
        rf_fail_expected(err, "at most %llu tokens (-c)", (unsigned long long)job->model.info.ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)job->count);
    }
    return RF_OK;
}

/* Takes the stream past the prompt, so that what follows joins it as it should: the space before
 * the first generated word is text, the one before the prompt's first word is not. */
static rf_status start_stream(run_job *job, rf_error *err)
{
    uint64_t capacity = rf_text_stream_bound(job->model.tokenizer);
    char *ignored = malloc((size_t)capacity + 1);
    if (!ignored)
        return rf_fail(err, RF_ERR_NO_FIT, "text", "no memory for a token's text");
    rf_text_stream_start(&job->stream, job->model.tokenizer, false);
    for (uint64_t i = 0; i < job->count; i++)
        rf_text_stream_push(&job->stream, job->tokens[i], ignored, capacity);
    if (job->text.size)
        rf_text_stream_flush(&job->stream, ignored, capacity);
    free(ignored);
    return RF_OK;
}

static void print_json(const run_job *job)
{
    const cli_generation *generation = &job->generation;
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_text_n(writer, "prompt", job->text.data ? job->text.data : "",
                   RF_MIN(job->text.size, 65536));
    rf_json_text_n(writer, "text", generation->text.data ? generation->text.data : "",
                   RF_MIN(generation->text.size, 65536));
    rf_json_u64(writer, "prompt_tokens", job->count);
    rf_json_u64(writer, "tokens", generation->tokens);
    rf_json_text(writer, "stop", cli_stop_name(generation->stop));
    rf_json_u64(writer, "seed", job->seed);
    rf_json_f64(writer, "prompt_s", (double)job->prompt_ns / 1e9);
    rf_json_f64(writer, "generation_s", (double)generation->elapsed_ns / 1e9);
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_summary(const run_job *job)
{
    const cli_generation *generation = &job->generation;
    if (generation->stop == CLI_STOP_RING)
        cli_note("the context of %llu tokens is full: stopped after %llu generated tokens (a "
                 "larger -c makes room)",
                 (unsigned long long)job->model.info.ctx, (unsigned long long)generation->tokens);
    cli_speed_summary(job->count, job->prompt_ns, generation);
    cli_memory_summary(&job->model);
}

static rf_status run_steps(const cli_args *args, run_job *job, rf_error *err)
{
    rf_status status = cli_open_all(args, job->text.size, &job->model, err);
    if (!status)
        status = cli_need_tokenizer(&job->model, err);
    if (!status)
        status = tokenize_prompt(args, job, err);
    if (!status)
        status = start_stream(job, err);
    if (!status)
        status = cli_start_sampler(args, &job->model, &job->seed, err);
    if (status)
        return status;
    for (uint64_t i = job->count - RF_MIN(job->count, RF_REPEAT_WINDOW_MAX); i < job->count; i++)
        rf_sampler_accept(job->model.model, 0, job->tokens[i]);
    job->generation.collect = args->json;
    if (!args->json) {
        out_bytes(job->text.data ? job->text.data : "", job->text.size);
        out_flush();
        status = out_status(err);
    }
    uint64_t start = rf_os_clock_ns();
    if (!status)
        status = cli_prefill(&job->model, job->tokens, job->count, err);
    job->prompt_ns = rf_os_clock_ns() - start;
    job->generation.endless = args->endless;
    job->generation.limit = args->endless ? -1 : DEFAULT_TOKENS;
    if (cli_has(args, CLI_GIVEN_PREDICT))
        job->generation.limit = args->predict;
    if (!status)
        status = cli_generate(&job->model, &job->stream, &job->generation, err);
    if (!args->json && out_is_terminal()) {
        out_bytes("\n", 1);
        out_flush();
    }
    if (status)
        return status;
    if (args->json)
        print_json(job);
    print_summary(job);
    return out_status(err);
}

rf_status cmd_run(const cli_args *args, rf_error *err)
{
    run_job job = {0};
    bool given = false;
    rf_status status = cli_read_text(args, &job.text, &given, err);
    if (!status)
        status = run_steps(args, &job, err);
    cli_model_close(&job.model);
    free(job.tokens);
    cli_bytes_free(&job.text);
    cli_bytes_free(&job.generation.text);
    return status;
}
