/* cli/perplexity.c: scores a token sequence chunk by chunk, alone, against a logits file, or
 * against the same model under a wider KV.
 *
 *   chunk:  0 ....... early ......... first ............ ctx-2 | ctx-1
 *           evaluated        by depth        scored: each by the probability of what follows
 *
 * Each chunk starts in an empty slot; where the model has a BOS its first token is replaced by it.
 * An endless text is one chunk, and the ring wraps under it. Logits are asked for only where they
 * are scored. Each position's figures are computed apart and summed in order, so they do not depend
 * on threads or on the size of a step.
 */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ppl_state {
    cli_model *model;
    const ppl_job *job;
    cli_team team;
    rf_step_item *items;     /* [chunk] */
    uint32_t *targets;       /* [logit_rows] the token that follows, for each row of this step */
    uint16_t *base_rows;     /* [logit_rows * row_codes] */
    uint16_t *save_rows;     /* likewise */
    ppl_position *positions; /* [chunks * scored per chunk] */
    uint64_t scored;         /* positions that are done */
} ppl_state;

#define DEPTH_LEAST 256u /* the first range by depth begins here or behind */

/* Scored positions of one chunk. */
static uint32_t scored_of(const ppl_job *job)
{
    return job->ctx - 1 - job->early;
}

void ppl_job_chunks(ppl_job *job, uint32_t ctx, uint32_t chunks, bool depths)
{
    job->ctx = ctx;
    job->chunks = chunks;
    job->first = ctx / 2;
    job->early = job->first;
    while (depths && ctx > PPL_DEPTHS_BEYOND && job->early / 2 >= DEPTH_LEAST)
        job->early /= 2;
}

uint32_t ppl_logit_rows(const ppl_job *job, uint32_t chunk)
{
    return RF_MAX(1u, RF_MIN(chunk, scored_of(job)));
}

/* log(sum(exp(logits))), and the index of the first largest logit. */
static double log_sum_exp(const float *logits, uint32_t count, uint32_t *top)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < count; i++) {
        if (logits[i] > logits[best])
            best = i;
    }
    double sum = 0.0, largest = (double)logits[best];
    for (uint32_t i = 0; i < count; i++)
        sum += exp((double)logits[i] - largest);
    *top = best;
    return largest + log(sum);
}

/* KL(base || ours) over the tokens that the base did not clip. */
static void compare_row(const float *logits, uint32_t count, double norm, uint32_t target,
                        uint32_t top, const uint16_t *row, ppl_position *out)
{
    float scale, minimum;
    memcpy(&scale, row, sizeof scale);
    memcpy(&minimum, row + 2, sizeof minimum);
    row += 4;
    uint32_t base_top = 0;
    double sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        if (row[i] > row[base_top])
            base_top = i;
        if (!row[i] && scale > 0.0f)
            continue;
        double base = (double)minimum + (double)scale * (double)row[i];
        sum += exp(base) * (base - ((double)logits[i] - norm));
    }
    out->kl = sum;
    out->same_top = top == base_top || row[top] == row[base_top];
    out->base_nll = row[target] || !(scale > 0.0f)
                        ? -((double)minimum + (double)scale * (double)row[target])
                        : (double)NAN;
}

/* KL(reference || ours) over the whole vocabulary. */
static void compare_models(const float *reference, const float *logits, uint32_t count, double norm,
                           uint32_t target, uint32_t top, ppl_position *out)
{
    uint32_t base_top;
    double base_norm = log_sum_exp(reference, count, &base_top), sum = 0.0;
    for (uint32_t i = 0; i < count; i++) {
        double base = (double)reference[i] - base_norm;
        sum += exp(base) * (base - ((double)logits[i] - norm));
    }
    out->kl = sum;
    out->same_top = reference[top] == reference[base_top];
    out->base_nll = base_norm - (double)reference[target];
}

static void score_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    (void)worker;
    ppl_state *state = context;
    uint32_t vocab_count = state->model->info.vocab_count;
    for (uint32_t i = first; i < last; i++) {
        const float *logits = rf_logits(state->model->model, i);
        ppl_position *position = &state->positions[state->scored + i];
        uint32_t top;
        double norm = log_sum_exp(logits, vocab_count, &top);
        position->nll = norm - (double)logits[state->targets[i]];
        if (state->base_rows)
            compare_row(logits, vocab_count, norm, state->targets[i], top,
                        state->base_rows + i * state->job->base->row_codes, position);
        if (state->job->reference)
            compare_models(rf_logits(state->job->reference, i), logits, vocab_count, norm,
                           state->targets[i], top, position);
        if (state->save_rows)
            kld_encode(logits, vocab_count, state->save_rows + i * state->job->save->row_codes);
    }
}

/* One step: items [at, at + count) of the chunk that begins at tokens. */
static rf_status run_step(ppl_state *state, const uint32_t *tokens, uint32_t at, uint32_t count,
                          rf_error *err)
{
    const ppl_job *job = state->job;
    const rf_tokenizer_info *vocabulary = &state->model->vocabulary;
    uint32_t rows = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t position = at + i;
        bool replace = position == 0 && vocabulary->add_bos && vocabulary->bos != UINT32_MAX;
        bool scored = position >= job->early && position + 1 < job->ctx;
        state->items[i] = (rf_step_item){0, replace ? vocabulary->bos : tokens[position], position,
                                         scored, RF_STEP_PROMPT};
        if (scored)
            state->targets[rows++] = tokens[position + 1];
    }
    rf_status status = RF_OK;
    if (job->reference) /* an interrupt ends the other model's step: here it ends before that */
        status = rf_step(job->reference, state->items, count, err);
    if (!status)
        status = signals_status(err);
    if (!status)
        status = rf_step(state->model->model, state->items, count, err);
    if (!status && state->base_rows)
        status = kld_read(job->base, state->base_rows, rows, err);
    if (status)
        return status;
    rf_team_run(state->team.team, rows, 1, score_rows, state);
    state->scored += rows;
    if (state->save_rows)
        status = kld_write(job->save, state->save_rows, rows, err);
    return status;
}

static rf_status run_chunks(ppl_state *state, rf_error *err)
{
    const ppl_job *job = state->job;
    uint64_t total = (uint64_t)job->chunks * job->ctx;
    cli_progress progress = cli_progress_start("scoring");
    rf_status status = RF_OK;
    for (uint32_t chunk = 0; chunk < job->chunks && !status; chunk++) {
        const uint32_t *tokens = job->tokens + (uint64_t)chunk * job->ctx;
        status = rf_slot_truncate(state->model->model, 0, 0, err);
        if (!status && job->reference)
            status = rf_slot_truncate(job->reference, 0, 0, err);
        for (uint32_t at = 0; at < job->ctx && !status;) {
            uint32_t count = RF_MIN(state->model->info.chunk, job->ctx - at);
            status = run_step(state, tokens, at, count, err);
            at += count;
            if (!status && !cli_progress_step(&progress, (uint64_t)chunk * job->ctx + at, total))
                status = signals_status(err);
        }
    }
    cli_progress_end(&progress);
    return status;
}

/* ---- figures ----------------------------------------------------------------------------- */

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Linear between the two nearest ranks; values ascend. */
static double percentile(const double *values, uint64_t count, double share)
{
    double at = share * (double)(count - 1);
    uint64_t below = (uint64_t)at;
    if (below + 1 >= count)
        return values[count - 1];
    return values[below] + (at - (double)below) * (values[below + 1] - values[below]);
}

typedef struct moments {
    double mean, stderror;
} moments;

static moments moments_of(double sum, double squares, uint64_t count)
{
    double mean = sum / (double)count;
    double variance = squares / (double)count - mean * mean;
    moments found = {mean, 0.0};
    if (count > 1 && variance > 0.0)
        found.stderror = sqrt(variance / (double)(count - 1));
    return found;
}

/* The figures of positions [from, to) of every chunk, summed in order. */
static ppl_figures figures_of(const ppl_state *state, uint32_t from, uint32_t to)
{
    const ppl_job *job = state->job;
    double nll = 0.0, nll_squares = 0.0, kl = 0.0, kl_squares = 0.0, rise = 0.0, rise_squares = 0.0;
    uint64_t count = 0, same = 0, kept = 0;
    for (uint32_t chunk = 0; chunk < job->chunks; chunk++) {
        const ppl_position *row = state->positions + (uint64_t)chunk * scored_of(job);
        for (uint32_t at = from; at < to; at++) {
            const ppl_position *position = &row[at - job->early];
            nll += position->nll;
            nll_squares += position->nll * position->nll;
            kl += position->kl;
            kl_squares += position->kl * position->kl;
            same += position->same_top;
            count++;
            if (isnan(position->base_nll))
                continue;
            double difference = position->nll - position->base_nll;
            rise += difference;
            rise_squares += difference * difference;
            kept++;
        }
    }
    ppl_figures out = {
        .scored = count, .ppl_ratio = (double)NAN, .ppl_ratio_stderror = (double)NAN};
    if (!count)
        return out;
    moments of_nll = moments_of(nll, nll_squares, count);
    moments of_kl = moments_of(kl, kl_squares, count);
    out.perplexity = exp(of_nll.mean);
    out.stderror = of_nll.stderror * out.perplexity;
    out.kl_mean = of_kl.mean;
    out.kl_stderror = of_kl.stderror;
    out.top1 = (double)same / (double)count;
    if (kept) {
        moments of_rise = moments_of(rise, rise_squares, kept);
        out.ppl_ratio = exp(of_rise.mean);
        out.ppl_ratio_stderror = of_rise.stderror * out.ppl_ratio;
    }
    return out;
}

static rf_status summarise_tails(const ppl_state *state, ppl_result *out, rf_error *err)
{
    const ppl_job *job = state->job;
    uint64_t count = out->figures.scored, at = 0;
    double *values = malloc((size_t)count * sizeof *values);
    if (!values)
        return rf_fail(err, RF_ERR_NO_FIT, "ppl", "no memory for the divergences");
    for (uint32_t chunk = 0; chunk < job->chunks; chunk++) {
        const ppl_position *row = state->positions + (uint64_t)chunk * scored_of(job);
        for (uint32_t i = job->first - job->early; i < scored_of(job); i++)
            values[at++] = row[i].kl;
    }
    qsort(values, (size_t)count, sizeof *values, compare_doubles);
    out->kl_p99 = percentile(values, count, 0.99);
    out->kl_p999 = percentile(values, count, 0.999);
    out->kl_max = values[count - 1];
    free(values);
    return RF_OK;
}

/* Positions from one range by depth to the next: each twice as deep, and the last half of a chunk,
 * which the figures are of, in two; of an endless text each twice as many turns of the ring. */
static uint32_t next_depth(const ppl_job *job, uint32_t from)
{
    if (job->ring)
        return RF_MIN(from < job->ring      ? job->ring
                      : from > job->ctx / 2 ? job->ctx
                                            : 2 * from,
                      job->ctx - 1);
    if (from < job->first) { /* as many halvings as it takes to get to from, but one */
        uint32_t next = job->first;
        while (next / 2 > from)
            next /= 2;
        return next;
    }
    uint32_t middle = job->first + job->first / 2;
    return from < middle && middle < job->ctx - 1 ? middle : job->ctx - 1;
}

static void summarise_depths(const ppl_state *state, ppl_result *out)
{
    const ppl_job *job = state->job;
    if (!job->ring && (!out->has_kl || job->ctx <= PPL_DEPTHS_BEYOND))
        return;
    for (uint32_t from = job->early; from < job->ctx - 1 && out->depth_count < PPL_DEPTHS_MAX;) {
        ppl_depth *depth = &out->depths[out->depth_count++];
        *depth = (ppl_depth){.from = from, .to = next_depth(job, from)};
        depth->figures = figures_of(state, depth->from, depth->to);
        from = depth->to;
    }
}

static rf_status summarise(const ppl_state *state, ppl_result *out, rf_error *err)
{
    const ppl_job *job = state->job;
    memset(out, 0, sizeof *out);
    out->chunks = job->chunks;
    out->has_kl = job->base || job->reference;
    out->figures = figures_of(state, job->first, job->ctx - 1);
    if (!isfinite(out->figures.perplexity))
        return rf_fail(err, RF_ERR_RUNTIME, "ppl", "the perplexity is not finite");
    summarise_depths(state, out);
    return out->has_kl ? summarise_tails(state, out, err) : RF_OK;
}

static rf_status allocate(ppl_state *state, rf_error *err)
{
    const ppl_job *job = state->job;
    size_t rows = ppl_logit_rows(job, state->model->info.chunk);
    size_t scored = (size_t)job->chunks * scored_of(job);
    state->items = calloc(state->model->info.chunk, sizeof *state->items);
    state->targets = calloc(rows, sizeof *state->targets);
    state->positions = calloc(scored, sizeof *state->positions);
    bool have = state->items && state->targets && state->positions;
    if (job->base) {
        state->base_rows = calloc(rows * (size_t)job->base->row_codes, sizeof(uint16_t));
        have = have && state->base_rows;
    }
    if (job->save) {
        state->save_rows = calloc(rows * (size_t)job->save->row_codes, sizeof(uint16_t));
        have = have && state->save_rows;
    }
    if (!have)
        return rf_fail(err, RF_ERR_NO_FIT, "ppl", "no memory for the scores");
    return cli_team_open(&state->team, state->model->info.threads, err);
}

rf_status ppl_run(cli_model *model, const ppl_job *job, ppl_result *out, rf_error *err)
{
    ppl_state state = {.model = model, .job = job};
    rf_status status = allocate(&state, err);
    if (!status)
        status = run_chunks(&state, err);
    if (!status)
        status = summarise(&state, out, err);
    cli_team_close(&state.team);
    free(state.items);
    free(state.targets);
    free(state.base_rows);
    free(state.save_rows);
    free(state.positions);
    return status;
}
