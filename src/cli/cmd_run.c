/* cli/cmd_run.c: `run`: a prompt, verbatim, and its continuation; or the continuation of a sequence
 * that was saved.
 *
 *   --save     slot, sampler, stream of text, token ids, and the token that was picked and written
 *              but is no part of the slot yet ("pending")
 *   --restore  pending, then the ids of -p, go through the model; without a pending token the last
 *              of the slot goes through it again, because logits are not kept
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define DEFAULT_TOKENS 128

typedef struct run_job {
    cli_model model;
    cli_bytes text;
    cli_ids ids;           /* of the slot's positions, and those that it is about to get */
    uint64_t length;       /* ids that the slot has before the prompt */
    uint64_t prompt_count; /* of the text */
    bool restored;
    rf_text_stream stream;
    cli_generation generation;
    uint64_t seed; /* UINT64_MAX: the one that was saved */
    uint64_t prompt_ns;
} run_job;

/* The ids of the prompt; BOS alone for an empty one, unless it is added to something. */
static rf_status tokenize_prompt(const cli_args *args, run_job *job, rf_error *err)
{
    const uint32_t *ids = NULL;
    uint32_t flags = cli_tokenize_flags(args);
    if (job->restored)
        flags &= ~RF_TOKENIZE_ADD_SPECIAL;
    uint64_t before = job->ids.count, count = 0;
    rf_status status = RF_OK;
    if (job->text.size || !job->restored)
        status = rf_tokenizer_encode(job->model.tokenizer, job->text.data ? job->text.data : "",
                                     job->text.size, flags, &ids, &count, err);
    if (!status)
        status = cli_ids_add(&job->ids, ids, count, err);
    if (status)
        return status;
    uint32_t bos = job->model.vocabulary.bos;
    if (!job->ids.count && !args->no_bos && bos != UINT32_MAX)
        status = cli_ids_add(&job->ids, &bos, 1, err);
    if (status)
        return status;
    if (!job->ids.count)
        return rf_fail(err, RF_ERR_USAGE, "-p",
                       "the prompt is empty, and there is no BOS token to start from");
    job->prompt_count = job->ids.count - before;
    if (job->ids.count > job->model.info.ctx && !args->endless && job->prompt_count) {
        rf_fail(err, RF_ERR_USAGE, "prompt",
                job->restored ? "longer than what is left of the context"
                              : "longer than the context");
        rf_fail_expected(
            err, "at most %llu tokens (-c)",
            (unsigned long long)(job->model.info.ctx - RF_MIN(before, job->model.info.ctx)));
        return rf_fail_got(err, "%llu", (unsigned long long)job->prompt_count);
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
    for (uint64_t i = job->ids.count - job->prompt_count; i < job->ids.count; i++)
        rf_text_stream_push(&job->stream, job->ids.ids[i], ignored, capacity);
    if (job->text.size)
        rf_text_stream_flush(&job->stream, ignored, capacity);
    free(ignored);
    return RF_OK;
}

/* ---- save and restore -------------------------------------------------------------------- */

/* Brings back what was saved, and leaves in ids[length ...] what the model must read first. */
static rf_status restore(const cli_args *args, run_job *job, rf_error *err)
{
    struct stat file;
    if (stat(args->restore, &file) != 0)
        return rf_fail(err, RF_ERR_IO, args->restore, "cannot open: %s", strerror(errno));
    rf_slot_extra extra = {.stream = &job->stream, .pending_token = UINT32_MAX};
    extra.token_capacity = (uint64_t)file.st_size / sizeof *extra.tokens; /* it cannot have more */
    extra.tokens = malloc((size_t)(extra.token_capacity + 1) * sizeof *extra.tokens);
    if (!extra.tokens)
        return rf_fail(err, RF_ERR_NO_FIT, args->restore, "no memory for its tokens");
    rf_model *model = job->model.model;
    rf_status status = rf_slot_restore(model, 0, args->restore, &extra, err);
    if (!status)
        status = cli_ids_add(&job->ids, extra.tokens, extra.token_count, err);
    free(extra.tokens);
    job->length = rf_slot_length(model, 0);
    job->restored = true;
    job->seed = UINT64_MAX;
    if (status)
        return status;
    if (extra.token_count != job->length || !job->length)
        return rf_fail(err, RF_ERR_BAD_MODEL, args->restore,
                       "it does not say which tokens it is made of: saved by another program");
    if (extra.pending_token != UINT32_MAX) {
        job->generation.last = extra.pending_token;
        job->generation.pending = true;
        return cli_ids_add(&job->ids, &extra.pending_token, 1, err);
    }
    job->length--;
    return rf_slot_truncate(model, 0, job->length, err);
}

/* At the end of a run, and when it was interrupted: then the error stands, and the exit code. */
static rf_status save(const cli_args *args, run_job *job, rf_status status, rf_error *err)
{
    uint64_t length = rf_slot_length(job->model.model, 0);
    bool untouched = !job->prompt_count && job->generation.pending && length == job->length;
    bool whole = length == job->ids.count || (untouched && length + 1 == job->ids.count);
    if (!args->save || (status && status != RF_ERR_INTERRUPTED))
        return status;
    if (!whole) { /* in the middle of the prompt */
        cli_note("not saved: the prompt was not read to its end");
        return status;
    }
    rf_slot_extra extra = {.tokens = job->ids.ids,
                           .token_count = length,
                           .pending_token =
                               job->generation.pending ? job->generation.last : UINT32_MAX,
                           .stream = &job->stream};
    rf_error own = {0};
    rf_status saved = rf_slot_save(job->model.model, 0, args->save, &extra, &own);
    if (saved) {
        *err = own;
        return saved;
    }
    cli_note("saved %llu tokens in %s", (unsigned long long)length, args->save);
    return status;
}

/* ---- output ------------------------------------------------------------------------------ */

static void print_json(const run_job *job)
{
    const cli_generation *generation = &job->generation;
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_text_n(writer, "prompt", job->text.data ? job->text.data : "",
                   RF_MIN(job->text.size, 65536));
    rf_json_text_n(writer, "text", generation->text.data ? generation->text.data : "",
                   RF_MIN(generation->text.size, 65536));
    rf_json_u64(writer, "prompt_tokens", job->prompt_count);
    rf_json_u64(writer, "tokens", generation->tokens);
    rf_json_u64(writer, "drafted_tokens", generation->drafted);
    rf_json_u64(writer, "accepted_tokens", generation->accepted);
    rf_json_text(writer, "stop", cli_stop_name(generation->stop));
    json_u64_or_null(writer, "seed", job->seed);
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
    cli_speed_summary(job->prompt_count, job->prompt_ns, generation);
    cli_memory_summary(&job->model);
}

/* Everything up to the first step. */
static rf_status prepare(const cli_args *args, run_job *job, rf_error *err)
{
    rf_status status = cli_open_all(args, job->text.size, &job->model, err);
    if (!status)
        status = cli_need_tokenizer(&job->model, err);
    if (status)
        return status;
    rf_text_stream_start(&job->stream, job->model.tokenizer, false);
    status = args->restore ? restore(args, job, err)
                           : cli_start_sampler(args, &job->model, &job->seed, err);
    if (!status)
        status = tokenize_prompt(args, job, err);
    if (!status && job->prompt_count)
        status = start_stream(job, err);
    if (status)
        return status;
    rf_draft_note(job->model.model, 0, job->ids.ids, job->ids.count);
    uint64_t told = RF_MIN(job->prompt_count, RF_REPEAT_WINDOW_MAX);
    for (uint64_t i = job->ids.count - told; i < job->ids.count; i++)
        rf_sampler_accept(job->model.model, 0, job->ids.ids[i]);
    return RF_OK;
}

/* Whether a sequence that was restored had come to its end already. */
static bool has_ended(const cli_args *args, run_job *job)
{
    cli_generation *generation = &job->generation;
    if (!job->restored || job->prompt_count || args->endless || !generation->limit)
        return false;
    if (generation->pending && rf_tokenizer_is_end(job->model.tokenizer, generation->last))
        generation->stop = CLI_STOP_END;
    else if (job->ids.count > job->model.info.ctx)
        generation->stop = CLI_STOP_RING;
    else
        return false;
    return true;
}

static rf_status read_and_go_on(const cli_args *args, run_job *job, rf_error *err)
{
    cli_generation *generation = &job->generation;
    if (!args->json) {
        out_bytes(job->text.data ? job->text.data : "", job->text.size);
        out_flush();
    }
    rf_status status = out_status(err);
    if (status || has_ended(args, job))
        return status;
    uint64_t start = rf_os_clock_ns();
    uint64_t at = job->length;
    if (generation->pending) { /* it was generated, and steps as what is generated does */
        rf_step_item item = {.token = job->ids.ids[at],
                             .position = at,
                             .wants_logits = at + 1 == job->ids.count,
                             .phase = RF_STEP_GENERATION};
        status = rf_step(job->model.model, &item, 1, err);
        at++;
    }
    if (!status && at < job->ids.count)
        status = cli_prefill(&job->model, job->ids.ids + at, job->ids.count - at, err);
    job->prompt_ns = rf_os_clock_ns() - start;
    if (status)
        return status;
    generation->pending = false;
    return cli_generate(&job->model, &job->stream, generation, err);
}

static rf_status run_steps(const cli_args *args, run_job *job, rf_error *err)
{
    job->generation = (cli_generation){.limit = args->endless ? -1 : DEFAULT_TOKENS,
                                       .endless = args->endless,
                                       .collect = args->json,
                                       .goes_on = args->save != NULL,
                                       .stepped = &job->ids};
    if (cli_has(args, CLI_GIVEN_PREDICT))
        job->generation.limit = args->predict;
    rf_status status = prepare(args, job, err);
    if (status)
        return status;
    status = read_and_go_on(args, job, err);
    if (!args->json && out_is_terminal()) {
        out_bytes("\n", 1);
        out_flush();
    }
    status = save(args, job, status, err);
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
    free(job.ids.ids);
    cli_bytes_free(&job.text);
    cli_bytes_free(&job.generation.text);
    return status;
}
