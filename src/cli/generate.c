/* cli/generate.c: from the logits of a prompt to text, one token at a time.
 *
 * Owns the loop that `run` and `chat` share. Text leaves through a streaming detokeniser, whole
 * characters only, and is flushed after each token.
 */
#include "cli.h"

#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

rf_sampling cli_sampling(const cli_args *args)
{
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    sampling.temperature = (float)args->temperature;
    sampling.top_k = (uint32_t)args->top_k;
    sampling.top_p = (float)args->top_p;
    sampling.min_p = (float)args->min_p;
    sampling.repeat_penalty = (float)args->repeat_penalty;
    sampling.repeat_last = (uint32_t)args->repeat_last;
    sampling.seed = args->seed;
    return sampling;
}

static uint64_t random_seed(void)
{
    uint32_t seed; /* short enough to be typed again */
    if (getrandom(&seed, sizeof seed, 0) != (ssize_t)sizeof seed)
        seed = (uint32_t)(rf_os_clock_ns() * UINT64_C(0x9E3779B97F4A7C15) >> 32);
    return seed;
}

rf_status cli_start_sampler(const cli_args *args, cli_model *model, uint64_t *seed, rf_error *err)
{
    rf_sampling sampling = cli_sampling(args);
    if (!cli_has(args, CLI_GIVEN_SEED))
        sampling.seed = random_seed();
    *seed = sampling.seed;
    if (sampling.temperature > 0.0f && !cli_has(args, CLI_GIVEN_SEED))
        cli_note("seed %llu", (unsigned long long)sampling.seed);
    return rf_sampler_start(model->model, 0, &sampling, err);
}

const char *cli_stop_name(cli_stop stop)
{
    static const char *const names[] = {"end", "limit", "ring"};
    return names[stop];
}

double cli_rate(uint64_t count, uint64_t elapsed_ns)
{
    return elapsed_ns ? (double)count * 1e9 / (double)elapsed_ns : 0.0;
}

#define RATE_TOKENS 32u /* fewer tokens, or a shorter time, make no rate */
#define RATE_NS     UINT64_C(50000000)

static const char *speed(char *text, size_t capacity, uint64_t count, uint64_t elapsed_ns)
{
    if (count < RATE_TOKENS || elapsed_ns < RATE_NS) {
        rf_print(text, capacity, "%.1f ms", (double)elapsed_ns / 1e6);
    } else {
        rf_print(text, capacity, "%.1f t/s", cli_rate(count, elapsed_ns));
    }
    return text;
}

void cli_speed_summary(uint64_t prompt_count, uint64_t prompt_ns, const cli_generation *generation)
{
    char prompt[32], generated[32];
    char drafts[64] = "";
    if (generation->drafted)
        rf_print(drafts, sizeof drafts, "; drafts: %llu of %llu right",
                 (unsigned long long)generation->accepted, (unsigned long long)generation->drafted);
    cli_note("prompt: %llu token%s, %s; generation: %llu token%s, %s%s",
             (unsigned long long)prompt_count, prompt_count == 1 ? "" : "s",
             speed(prompt, sizeof prompt, prompt_count, prompt_ns),
             (unsigned long long)generation->tokens, generation->tokens == 1 ? "" : "s",
             speed(generated, sizeof generated, generation->tokens, generation->elapsed_ns),
             drafts);
}

static rf_status give_text(cli_generation *generation, const char *text, uint64_t bytes,
                           rf_error *err)
{
    if (!generation->collect) {
        out_bytes(text, (size_t)bytes);
        out_flush();
        return out_status(err);
    }
    if (!bytes)
        return RF_OK;
    char *grown = realloc(generation->text.data, generation->text.size + (size_t)bytes);
    if (!grown)
        return rf_fail(err, RF_ERR_NO_FIT, "text", "no memory for the text");
    memcpy(grown + generation->text.size, text, (size_t)bytes);
    generation->text.data = grown;
    generation->text.size += (size_t)bytes;
    return RF_OK;
}

rf_status cli_ids_add(cli_ids *list, const uint32_t *ids, uint64_t count, rf_error *err)
{
    if (count > list->capacity - list->count) {
        uint64_t wanted = RF_MAX(list->count + count, 2 * list->capacity + 256);
        uint32_t *grown = realloc(list->ids, (size_t)wanted * sizeof *grown);
        if (!grown)
            return rf_fail(err, RF_ERR_NO_FIT, "tokens", "no memory for the token ids");
        list->ids = grown;
        list->capacity = wanted;
    }
    if (count)
        memcpy(list->ids + list->count, ids, (size_t)count * sizeof *ids);
    list->count += count;
    return RF_OK;
}

/* The last step: the token that was picked at position base, and count drafted ones behind it. Row
 * r of its logits follows the r-th of them; those before row have been found right. */
typedef struct last_step {
    uint64_t base;
    uint32_t tokens[CLI_DRAFT_MAX];
    uint32_t count, row;
} last_step;

static rf_status belongs_now(cli_generation *generation, rf_error *err)
{
    generation->pending = false;
    return generation->stepped ? cli_ids_add(generation->stepped, &generation->last, 1, err)
                               : RF_OK;
}

/* Rolls back what was drafted and is not what was picked. */
static rf_status drop_draft(cli_model *model, cli_generation *generation, last_step *step,
                            rf_error *err)
{
    uint32_t wrong = step->count - step->row;
    if (step->count) {
        rf_draft_judge(model->model, 0, step->count, step->row);
        generation->drafted += step->count;
        generation->accepted += step->row;
    }
    uint64_t length = step->base + 1 + step->row;
    step->count = step->row = 0;
    return wrong ? rf_slot_truncate(model->model, 0, length, err) : RF_OK;
}

/* A draft for the positions behind the token that was picked: no longer than what may still be
 * generated, without end tokens, so that what is stepped is never more than what stays. */
static uint32_t propose(cli_model *model, const cli_generation *generation, uint64_t base,
                        uint32_t tokens[CLI_DRAFT_MAX])
{
    uint64_t most = CLI_DRAFT_MAX;
    if (generation->limit >= 0)
        most = RF_MIN(most, (uint64_t)generation->limit - generation->tokens);
    if (!generation->endless)
        most = RF_MIN(most, model->info.ctx - base);
    if (most < 2)
        return 0;
    uint32_t count = rf_draft_propose(model->model, 0, tokens, (uint32_t)most - 1);
    for (uint32_t i = 0; i < count && !generation->endless; i++) {
        if (rf_tokenizer_is_end(model->tokenizer, tokens[i]))
            count = i;
    }
    return count;
}

/* Makes the token that was picked part of the sequence, and tries a draft along with it. */
static rf_status step_last(cli_model *model, cli_generation *generation, last_step *step, bool more,
                           rf_error *err)
{
    rf_step_item items[1 + CLI_DRAFT_MAX];
    step->base = rf_slot_length(model->model, 0);
    step->count = more ? propose(model, generation, step->base, step->tokens) : 0;
    for (uint32_t i = 0; i <= step->count; i++) {
        items[i] = (rf_step_item){.token = i ? step->tokens[i - 1] : generation->last,
                                  .position = step->base + i,
                                  .wants_logits = true,
                                  .phase = RF_STEP_GENERATION};
    }
    rf_status status = rf_step(model->model, items, 1 + step->count, err);
    if (status == RF_ERR_RUNTIME && step->count) { /* a draft may be what has no finite values */
        step->count = 0;
        status = rf_step(model->model, items, 1, err);
    }
    if (status) {
        step->count = 0; /* nothing was stepped */
        return status;
    }
    return belongs_now(generation, err);
}

/* The loop itself; piece[capacity] holds the text of one token. An interrupt is looked for where
 * the token that was picked has been written: then all there is to keep is the slot and that token,
 * and no row of logits. */
static rf_status generate_tokens(cli_model *model, rf_text_stream *stream,
                                 cli_generation *generation, last_step *step, char *piece,
                                 uint64_t capacity, rf_error *err)
{
    generation->stop = CLI_STOP_LIMIT;
    while (generation->limit < 0 || generation->tokens < (uint64_t)generation->limit) {
        rf_status status = rf_sample(model->model, 0, step->row, &generation->last, err);
        if (status)
            return status;
        generation->pending = true;
        rf_draft_note(model->model, 0, &generation->last, 1);
        bool end = !generation->endless && rf_tokenizer_is_end(model->tokenizer, generation->last);
        if (!end) {
            generation->tokens++;
            uint64_t bytes = rf_text_stream_push(stream, generation->last, piece, capacity);
            status = give_text(generation, piece, bytes, err);
            if (status)
                return status;
        }
        if ((status = signals_status(err)))
            return status;
        bool more =
            !end && (generation->limit < 0 || generation->tokens < (uint64_t)generation->limit);
        if (more && step->row < step->count && generation->last == step->tokens[step->row]) {
            step->row++; /* the draft was right: it has been stepped already */
            if ((status = belongs_now(generation, err)))
                return status;
            continue;
        }
        if ((status = drop_draft(model, generation, step, err)))
            return status;
        bool room = generation->endless || rf_slot_length(model->model, 0) < model->info.ctx;
        if (room && (more || generation->commit_last)) {
            status = step_last(model, generation, step, more, err);
            if (status)
                return status;
        }
        if (end) {
            generation->stop = CLI_STOP_END;
            return RF_OK;
        }
        if (more && !room) {
            generation->stop = CLI_STOP_RING;
            return RF_OK;
        }
    }
    return RF_OK;
}

rf_status cli_generate(cli_model *model, rf_text_stream *stream, cli_generation *generation,
                       rf_error *err)
{
    uint64_t capacity = rf_text_stream_bound(model->tokenizer);
    char *piece = malloc((size_t)capacity + 1);
    if (!piece)
        return rf_fail(err, RF_ERR_NO_FIT, "text", "no memory for a token's text");
    uint64_t start = rf_os_clock_ns();
    last_step step = {0};
    rf_status status = generate_tokens(model, stream, generation, &step, piece, capacity, err);
    rf_status dropped = drop_draft(model, generation, &step, status ? NULL : err);
    status = status ? status : dropped;
    uint64_t bytes = generation->goes_on ? 0 : rf_text_stream_flush(stream, piece, capacity);
    rf_status flushed = give_text(generation, piece, bytes, status ? NULL : err);
    generation->elapsed_ns = rf_os_clock_ns() - start;
    free(piece);
    return status ? status : flushed;
}

void cli_memory_summary(const cli_model *model)
{
    const rf_plan *plan = rf_model_plan_regions(model->plan);
    const rf_trace *trace = rf_model_trace(model->model);
    uint64_t planned = 0, taken = 0;
    for (uint32_t i = 0; i < plan->row_count && i < trace->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (row->scope == RF_SCOPE_AMBIENT || strncmp(row->id, "padding", 7) == 0)
            continue;
        planned += row->bytes;
        taken += trace->rows[i].taken_bytes;
    }
    cli_note("memory: planned %s (weights %s, kv %s, forward %s, other %s), %s",
             cli_size(plan->total_bytes).text, cli_size(plan->pool_bytes[RF_POOL_WEIGHTS]).text,
             cli_size(plan->pool_bytes[RF_POOL_KV]).text,
             cli_size(plan->pool_bytes[RF_POOL_FORWARD]).text,
             cli_size(plan->pool_bytes[RF_POOL_TABLES] + plan->pool_bytes[RF_POOL_WORKERS] +
                      plan->pool_bytes[RF_POOL_OTHER])
                 .text,
             planned == taken ? "all of it taken and nothing else"
                              : "but what was taken DIFFERS: see ringfence check");
}
