/* runtime/sample.c: picks the next token from a row of logits.
 *
 *   repeat penalty ─► top-k ─► top-p ─► min-p ─► temperature ─► one draw
 *
 * Candidates lie in one planned array of the vocabulary's size; the row itself is left as it is.
 * The generator is the sampler's own and seeded, so the same seed gives the same text. With
 * temperature 0 the largest logit wins, the first of equals.
 */
#include "runtime/runtime.h"

#include <string.h>

#define STRETCH 64u /* logits that are looked at together */

void rf_sampling_init(rf_sampling *sampling)
{
    *sampling = (rf_sampling){.temperature = 0.8f,
                              .top_k = 40,
                              .top_p = 0.95f,
                              .min_p = 0.05f,
                              .repeat_penalty = 1.0f,
                              .repeat_last = 64,
                              .seed = 0};
}

rf_status rf_sampler_check(const rf_sampling *sampling, rf_error *err)
{
    const struct {
        const char *name;
        float value, low, high;
    } ranges[] = {{"temp", sampling->temperature, 0.0f, 1000.0f},
                  {"top-p", sampling->top_p, 0.0f, 1.0f},
                  {"min-p", sampling->min_p, 0.0f, 1.0f},
                  {"repeat-penalty", sampling->repeat_penalty, 0.01f, 100.0f}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(ranges); i++) {
        if (ranges[i].value >= ranges[i].low && ranges[i].value <= ranges[i].high)
            continue;
        rf_fail(err, RF_ERR_USAGE, ranges[i].name, "out of range");
        rf_fail_expected(err, "%g to %g", (double)ranges[i].low, (double)ranges[i].high);
        return rf_fail_got(err, "%g", (double)ranges[i].value);
    }
    if (sampling->repeat_last > RF_REPEAT_WINDOW_MAX) {
        rf_fail(err, RF_ERR_USAGE, "repeat-last", "out of range");
        rf_fail_expected(err, "at most %u", RF_REPEAT_WINDOW_MAX);
        return rf_fail_got(err, "%u", sampling->repeat_last);
    }
    return RF_OK;
}

/* ---- generator --------------------------------------------------------------------------- */

/* Seeding: splitmix64; drawing: xoshiro256** (Blackman and Vigna, 2018). */
static uint64_t split_mix(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static uint64_t rotate(uint64_t value, int bits)
{
    return (value << bits) | (value >> (64 - bits));
}

static uint64_t draw(uint64_t s[4])
{
    uint64_t result = rotate(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate(s[3], 45);
    return result;
}

static double draw_unit(uint64_t s[4])
{ /* in [0, 1) */
    return (double)(draw(s) >> 11) * 0x1p-53;
}

void rf_sampler_init(rf_sampler *sampler, const rf_sampling *sampling)
{
    uint64_t state = sampling->seed;
    *sampler = (rf_sampler){.options = *sampling};
    for (int i = 0; i < 4; i++)
        sampler->generator[i] = split_mix(&state);
}

void rf_sampler_note(rf_sampler *sampler, uint32_t token)
{
    sampler->window[sampler->accepted++ % RF_REPEAT_WINDOW_MAX] = token;
}

/* ---- candidates -------------------------------------------------------------------------- */

/* Larger logit first; among equals the smaller token, so that the order is one. */
static bool is_before(const rf_candidate *a, const rf_candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->token < b->token);
}

static void sift_down(rf_candidate *heap, uint32_t at, uint32_t count)
{
    for (;;) { /* the root is the last in order */
        uint32_t child = at * 2 + 1;
        if (child >= count)
            return;
        if (child + 1 < count && is_before(&heap[child], &heap[child + 1]))
            child++;
        if (!is_before(&heap[at], &heap[child]))
            return;
        rf_candidate moved = heap[at];
        heap[at] = heap[child];
        heap[child] = moved;
        at = child;
    }
}

static void make_heap(rf_candidate *heap, uint32_t count)
{
    for (uint32_t i = count / 2; i-- > 0;)
        sift_down(heap, i, count);
}

/* A heap becomes a list in order. */
static void sort_heap(rf_candidate *heap, uint32_t count)
{
    for (uint32_t end = count; end > 1; end--) {
        rf_candidate worst = heap[0];
        heap[0] = heap[end - 1];
        heap[end - 1] = worst;
        sift_down(heap, 0, end - 1);
    }
}

/* Brings the first k in order to the front: a heap of k whose root is the worst of them. */
static void select_first(rf_candidate *candidates, uint32_t count, uint32_t k)
{
    make_heap(candidates, k);
    for (uint32_t i = k; i < count; i++) {
        if (!is_before(&candidates[i], &candidates[0]))
            continue;
        rf_candidate worst = candidates[0];
        candidates[0] = candidates[i];
        candidates[i] = worst;
        sift_down(candidates, 0, k);
    }
    sort_heap(candidates, k);
}

/* The same from a row of logits, for a k that is small beside it: nearly all of a row is looked at
 * in stretches that have nothing larger than the worst of the heap. Of equals the smaller token has
 * come first. (Vocabulary of 49,152: 83 us by way of an array of all, 17 us so.) */
static void select_first_of_row(const float *logits, uint32_t count, rf_candidate *heap, uint32_t k)
{
    for (uint32_t i = 0; i < k; i++)
        heap[i] = (rf_candidate){logits[i], i};
    make_heap(heap, k);
    for (uint32_t i = k; i < count;) {
        uint32_t end = RF_MIN(count, i + STRETCH);
        uint32_t larger = 0;
        for (uint32_t j = i; j < end; j++)
            larger |= logits[j] > heap[0].logit;
        for (; larger && i < end; i++) {
            if (logits[i] > heap[0].logit) {
                heap[0] = (rf_candidate){logits[i], i};
                sift_down(heap, 0, k);
            }
        }
        i = end;
    }
    sort_heap(heap, k);
}

/* The sum of exp(logit - largest) over candidates that are in order. */
static double total_weight(const rf_candidate *candidates, uint32_t count)
{
    double total = 0;
    for (uint32_t i = 0; i < count; i++) {
        total += rf_exp_f64((double)(candidates[i].logit - candidates[0].logit));
    }
    return total;
}

/* The smallest front whose probability reaches top_p; at least one. */
static uint32_t cut_top_p(const rf_candidate *candidates, uint32_t count, float top_p)
{
    if (top_p >= 1.0f)
        return count;
    double wanted = (double)top_p * total_weight(candidates, count), sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += rf_exp_f64((double)(candidates[i].logit - candidates[0].logit));
        if (sum >= wanted)
            return i + 1;
    }
    return count;
}

/* Those at least min_p times as likely as the first. */
static uint32_t cut_min_p(const rf_candidate *candidates, uint32_t count, float min_p)
{
    if (min_p <= 0.0f)
        return count;
    double least = (double)candidates[0].logit + rf_log_f64((double)min_p);
    uint32_t kept = 1;
    while (kept < count && (double)candidates[kept].logit >= least)
        kept++;
    return kept;
}

/* Divides positive and multiplies negative logits of the tokens in the window, each once. */
static void penalise(const rf_sampler *sampler, rf_candidate *candidates, uint32_t count)
{
    float penalty = sampler->options.repeat_penalty;
    uint64_t look_back = RF_MIN(sampler->accepted, (uint64_t)sampler->options.repeat_last);
    if (penalty == 1.0f)
        return;
    for (uint64_t i = 0; i < look_back; i++) {
        uint32_t token = sampler->window[(sampler->accepted - 1 - i) % RF_REPEAT_WINDOW_MAX];
        bool was_seen = token >= count;
        for (uint64_t j = 0; j < i && !was_seen; j++) {
            was_seen = sampler->window[(sampler->accepted - 1 - j) % RF_REPEAT_WINDOW_MAX] == token;
        }
        if (was_seen)
            continue;
        float *logit = &candidates[token].logit;
        *logit = *logit > 0 ? *logit / penalty : *logit * penalty;
    }
}

static uint32_t pick_from(rf_sampler *sampler, rf_candidate *candidates, uint32_t count)
{
    double temperature = (double)sampler->options.temperature;
    double total = 0;
    for (uint32_t i = 0; i < count; i++) {
        total += rf_exp_f64((double)(candidates[i].logit - candidates[0].logit) / temperature);
    }
    double wanted = draw_unit(sampler->generator) * total, sum = 0;
    for (uint32_t i = 0; i < count; i++) {
        sum += rf_exp_f64((double)(candidates[i].logit - candidates[0].logit) / temperature);
        if (sum > wanted)
            return candidates[i].token;
    }
    return candidates[count - 1].token;
}

rf_status rf_sampler_pick(rf_sampler *sampler, const rf_kernels *kernels, const float *logits,
                          rf_candidate *candidates, uint32_t count, uint32_t *token, rf_error *err)
{
    const rf_sampling *options = &sampler->options;
    uint32_t best = kernels->argmax(logits, count);
    if (!(logits[best] < __builtin_inff() && logits[best] > -__builtin_inff())) {
        return rf_fail(err, RF_ERR_RUNTIME, "forward.logits", "no logit is finite");
    }
    if (options->temperature == 0.0f && options->repeat_penalty == 1.0f) {
        *token = best;
        return RF_OK;
    }
    uint32_t kept = options->top_k ? RF_MIN(options->top_k, count) : count;
    if (options->temperature == 0.0f)
        kept = 1;
    if (options->repeat_penalty == 1.0f && kept < count) {
        select_first_of_row(logits, count, candidates, kept);
    } else {
        for (uint32_t i = 0; i < count; i++)
            candidates[i] = (rf_candidate){logits[i], i};
        penalise(sampler, candidates, count);
        select_first(candidates, count, kept);
    }
    if (options->temperature > 0.0f) {
        kept = cut_top_p(candidates, kept, options->top_p);
        kept = cut_min_p(candidates, kept, options->min_p);
    }
    *token = kept == 1 ? candidates[0].token : pick_from(sampler, candidates, kept);
    return RF_OK;
}

/* ---- public ------------------------------------------------------------------------------ */

static rf_status check_slot(const rf_model *model, uint32_t slot, rf_error *err)
{
    if (slot < model->plan->info.slots)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, "slot", "no such slot");
    rf_fail_expected(err, "below %u", model->plan->info.slots);
    return rf_fail_got(err, "%u", slot);
}

rf_status rf_sampler_start(rf_model *model, uint32_t slot, const rf_sampling *sampling,
                           rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_slot(model, slot, err);
    if (status == RF_OK)
        status = rf_sampler_check(sampling, err);
    if (status == RF_OK)
        rf_sampler_init(&model->samplers[slot], sampling);
    return status;
}

void rf_sampler_accept(rf_model *model, uint32_t slot, uint32_t token)
{
    if (slot < model->plan->info.slots)
        rf_sampler_note(&model->samplers[slot], token);
}

rf_status rf_sample(rf_model *model, uint32_t slot, uint32_t logit_index, uint32_t *token,
                    rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_slot(model, slot, err);
    if (status)
        return status;
    const float *logits = rf_logits(model, logit_index);
    if (!logits)
        return rf_fail(err, RF_ERR_USAGE, "forward.logits", "the last step has no such row");
    uint32_t picked = 0;
    rf_trace_emit(model->network.trace, RF_EVENT_PHASE_BEGIN, RF_NO_ROW, RF_PHASE_SAMPLE, 0, 0);
    status = rf_sampler_pick(&model->samplers[slot], &model->plan->kernels, logits,
                             model->candidates, model->plan->info.vocab_count, &picked, err);
    rf_trace_emit(model->network.trace, RF_EVENT_PHASE_END, RF_NO_ROW, RF_PHASE_SAMPLE, 0, 0);
    if (status)
        return status;
    rf_sampler_note(&model->samplers[slot], picked);
    *token = picked;
    return RF_OK;
}
