/* cli/cmd_score.c: `score`: the log-probability of each token of a text, given all before it. */
#include "cli.h"

#include <math.h>
#include <stdlib.h>

typedef struct score_job {
    const cli_args *args;
    cli_model model;
    cli_bytes text;
    uint32_t *tokens; /* owned */
    uint64_t count;
    rf_step_item *items; /* [chunk] */
    uint32_t *top;       /* [args->top] */
    double sum;
} score_job;

static double log_sum_exp(const float *logits, uint32_t count)
{
    float largest = logits[0];
    for (uint32_t i = 1; i < count; i++)
        largest = logits[i] > largest ? logits[i] : largest;
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - (double)largest);
    return (double)largest + log(sum);
}

/* The ids of the `wanted` largest logits, in order; of equals the smaller id first. */
static uint32_t find_top(const float *logits, uint32_t count, uint32_t wanted, uint32_t *top)
{
    uint32_t found = 0;
    for (uint32_t id = 0; id < count && wanted; id++) {
        if (found == wanted && !(logits[id] > logits[top[found - 1]]))
            continue;
        uint32_t at = found < wanted ? found++ : found - 1;
        for (; at > 0 && logits[id] > logits[top[at - 1]]; at--)
            top[at] = top[at - 1];
        top[at] = id;
    }
    return found;
}

static void print_json(const score_job *job, uint64_t position, uint32_t id, double logprob,
                       const float *logits, double norm, uint32_t top_count)
{
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_u64(writer, "pos", position);
    rf_json_u64(writer, "id", id);
    rf_json_f64(writer, "logprob", logprob);
    rf_json_open(writer, "top", '[');
    for (uint32_t i = 0; i < top_count; i++) {
        rf_json_open(writer, NULL, '{');
        rf_json_u64(writer, "id", job->top[i]);
        rf_json_f64(writer, "logprob", (double)logits[job->top[i]] - norm);
        rf_json_close(writer, '}');
    }
    rf_json_close(writer, ']');
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_text(const score_job *job, uint64_t position, uint32_t id, double logprob,
                       const float *logits, double norm, uint32_t top_count)
{
    out_print("%8llu %8u %12.6f", (unsigned long long)position, id, logprob);
    for (uint32_t i = 0; i < top_count; i++)
        out_print("%s %u:%.4f", i ? "" : " ", job->top[i], (double)logits[job->top[i]] - norm);
    out_print("\n");
}

/* What the position before says about the token here. */
static rf_status print_position(score_job *job, uint64_t position, const float *logits,
                                rf_error *err)
{
    uint32_t id = job->tokens[position];
    uint32_t vocab_count = job->model.info.vocab_count;
    double norm = log_sum_exp(logits, vocab_count);
    double logprob = (double)logits[id] - norm;
    uint32_t top_count = find_top(logits, vocab_count, (uint32_t)job->args->top, job->top);
    job->sum += logprob;
    if (job->args->json) {
        print_json(job, position, id, logprob, logits, norm, top_count);
    } else {
        print_text(job, position, id, logprob, logits, norm, top_count);
    }
    return out_status(err);
}

static rf_status score_tokens(score_job *job, rf_error *err)
{
    rf_status status = RF_OK;
    for (uint64_t at = 0; at < job->count && !status;) {
        uint32_t count = (uint32_t)RF_MIN((uint64_t)job->model.info.chunk, job->count - at);
        for (uint32_t i = 0; i < count; i++)
            job->items[i] = (rf_step_item){0, job->tokens[at + i], at + i, true, RF_STEP_PROMPT};
        status = rf_step(job->model.model, job->items, count, err);
        for (uint32_t i = 0; i < count && !status; i++) {
            if (at + i + 1 < job->count)
                status = print_position(job, at + i + 1, rf_logits(job->model.model, i), err);
        }
        if (!status)
            status = signals_status(err);
        at += count;
    }
    return status;
}

static rf_status open_model(score_job *job, rf_error *err)
{
    rf_options options;
    cli_options_for(job->args, &options);
    rf_status status = cli_plan_open(&job->model, &options, err);
    if (status)
        return status;
    rf_plan_info info = job->model.info;
    if (job->count > info.ctx) {
        rf_fail(err, RF_ERR_USAGE, "-f", "the text is longer than the context");
        rf_fail_expected(err, "at most %llu tokens (-c)", (unsigned long long)info.ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)job->count);
    }
    if (info.logit_rows != info.chunk) {
        options.logit_rows = info.chunk;
        rf_model_plan_close(job->model.plan);
        job->model.plan = NULL;
        status = cli_plan_open(&job->model, &options, err);
    }
    return status ? status : cli_model_open(&job->model, err);
}

static rf_status score_steps(score_job *job, rf_error *err)
{
    const cli_args *args = job->args;
    rf_status status = cli_need_text(args, &job->text, err);
    if (!status)
        status = cli_file_open(args, &job->model, err);
    if (!status)
        status = cli_tokenize(args, job->model.file, &job->text, &job->tokens, &job->count, err);
    if (!status)
        status = open_model(job, err);
    if (status)
        return status;
    job->items = calloc(job->model.info.chunk, sizeof *job->items);
    job->top = calloc((size_t)args->top + 1, sizeof *job->top);
    if (!job->items || !job->top)
        return rf_fail(err, RF_ERR_NO_FIT, "score", "no memory for a step's items");
    status = score_tokens(job, err);
    if (status)
        return status;
    out_flush();
    if (job->count > 1)
        cli_note("%llu token%s, log-probability %.4f, mean %.4f",
                 (unsigned long long)job->count - 1, job->count == 2 ? "" : "s", job->sum,
                 job->sum / (double)(job->count - 1));
    cli_memory_summary(&job->model);
    return out_status(err);
}

rf_status cmd_score(const cli_args *args, rf_error *err)
{
    score_job job = {.args = args};
    rf_status status = score_steps(&job, err);
    cli_model_close(&job.model);
    free(job.tokens);
    free(job.items);
    free(job.top);
    cli_bytes_free(&job.text);
    return status;
}
