/* tests/unit/test_sample.c: picking the next token, against a naive reference: full sorts, sums in
 * long double, no heap. A draw can only be judged by what it must be (in the kept set, repeatable)
 * and by how often it comes.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COUNT_MAX 600u

static uint64_t random_u64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Logits of a few units; with ties when coarse. */
static void fill_logits(float *logits, uint32_t count, uint64_t seed, bool coarse)
{
    for (uint32_t i = 0; i < count; i++) {
        float value = (float)((double)(random_u64(&seed) >> 40) / (1 << 24) * 12.0 - 6.0);
        logits[i] = coarse ? roundf(value) : value;
    }
}

static rf_sampling neutral(void)
{
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    sampling.temperature = 1.0f;
    sampling.top_k = 0;
    sampling.top_p = 1.0f;
    sampling.min_p = 0.0f;
    return sampling;
}

static uint32_t pick(rf_sampler *sampler, const float *logits, uint32_t count)
{
    static rf_candidate candidates[COUNT_MAX];
    static float before[COUNT_MAX];
    rf_kernels kernels;
    rf_error err = {0};
    uint32_t token = UINT32_MAX;
    rf_kernels_pick(&kernels, count % 2 ? RF_CPU_ALL : RF_CPU_SCALAR);
    memcpy(before, logits, count * sizeof *before);
    rf_status status = rf_sampler_pick(sampler, &kernels, logits, candidates, count, &token, &err);
    if (status != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
    assert_memory_equal(before, logits, count * sizeof *before); /* the row is left as it is */
    assert_true(token < count);
    return token;
}

/* ---- the reference ----------------------------------------------------------------------- */

typedef struct reference {
    uint32_t tokens[COUNT_MAX]; /* what may be drawn, most likely first */
    long double probability[COUNT_MAX];
    uint32_t count;
} reference;

static void sort_tokens(uint32_t *tokens, const float *logits, uint32_t count)
{
    for (uint32_t i = 1; i < count; i++) { /* insertion: stable, so the first of equals leads */
        uint32_t moved = tokens[i], j = i;
        for (; j > 0 && logits[tokens[j - 1]] < logits[moved]; j--)
            tokens[j] = tokens[j - 1];
        tokens[j] = moved;
    }
}

static void refer(const rf_sampling *sampling, const float *logits, uint32_t count, reference *r)
{
    for (uint32_t i = 0; i < count; i++)
        r->tokens[i] = i;
    sort_tokens(r->tokens, logits, count);
    r->count = sampling->top_k && sampling->top_k < count ? sampling->top_k : count;
    float largest = logits[r->tokens[0]];
    long double total = 0, sum = 0;
    for (uint32_t i = 0; i < r->count; i++)
        total += expl((long double)logits[r->tokens[i]] - largest);
    for (uint32_t i = 0; sampling->top_p < 1.0f && i < r->count; i++) {
        sum += expl((long double)logits[r->tokens[i]] - largest);
        if (sum / total >= sampling->top_p)
            r->count = i + 1;
    }
    for (uint32_t i = 1; i < r->count; i++) {
        if (expl((long double)logits[r->tokens[i]] - largest) < sampling->min_p)
            r->count = i;
    }
    total = 0;
    for (uint32_t i = 0; i < r->count; i++) {
        r->probability[i] =
            expl(((long double)logits[r->tokens[i]] - largest) / sampling->temperature);
        total += r->probability[i];
    }
    for (uint32_t i = 0; i < r->count; i++)
        r->probability[i] /= total;
}

/* ---- greedy ------------------------------------------------------------------------------ */

static void greedy_takes_the_first_of_the_largest(void **state)
{
    (void)state;
    float logits[COUNT_MAX];
    for (uint64_t seed = 0; seed < 200; seed++) {
        uint32_t count = 1 + (uint32_t)(random_u64(&(uint64_t){seed}) % COUNT_MAX), best = 0;
        rf_sampling sampling = neutral();
        rf_sampler sampler;
        fill_logits(logits, count, seed, true);
        for (uint32_t i = 1; i < count; i++)
            best = logits[i] > logits[best] ? i : best;
        sampling.temperature = 0.0f;
        rf_sampler_init(&sampler, &sampling);
        assert_int_equal(pick(&sampler, logits, count), best);
        sampling.repeat_penalty = 1.5f; /* the other way through the code, without a window */
        rf_sampler_init(&sampler, &sampling);
        assert_int_equal(pick(&sampler, logits, count), best);
    }
}

static void a_row_without_a_finite_logit_is_an_error(void **state)
{
    (void)state;
    const float bad[][3] = {{NAN, NAN, NAN},
                            {-INFINITY, -INFINITY, -INFINITY},
                            {0.0f, INFINITY, 1.0f},
                            {NAN, -INFINITY, NAN}};
    rf_candidate candidates[3];
    rf_sampling sampling = neutral();
    rf_sampler sampler;
    rf_kernels kernels;
    rf_kernels_pick(&kernels, RF_CPU_ALL);
    rf_sampler_init(&sampler, &sampling);
    for (size_t i = 0; i < RF_ARRAY_COUNT(bad); i++) {
        uint32_t token = 7;
        assert_int_equal(rf_sampler_pick(&sampler, &kernels, bad[i], candidates, 3, &token, NULL),
                         RF_ERR_RUNTIME);
        assert_int_equal(token, 7);
    }
}

/* ---- sets and draws ---------------------------------------------------------------------- */

static rf_sampling random_sampling(uint64_t *state)
{
    static const float top_ps[] = {1.0f, 0.95f, 0.5f, 0.1f, 0.0f}, min_ps[] = {0, 0.05f, 0.4f, 1};
    static const float temperatures[] = {0.3f, 0.8f, 1.0f, 2.0f};
    static const uint32_t top_ks[] = {0, 1, 2, 40, 41, 1000};
    rf_sampling sampling = neutral();
    sampling.top_k = top_ks[random_u64(state) % 6];
    sampling.top_p = top_ps[random_u64(state) % 5];
    sampling.min_p = min_ps[random_u64(state) % 4];
    sampling.temperature = temperatures[random_u64(state) % 4];
    sampling.seed = random_u64(state);
    return sampling;
}

static uint32_t rank_of(const reference *r, uint32_t token)
{
    uint32_t rank = 0;
    while (rank < r->count && r->tokens[rank] != token)
        rank++;
    return rank;
}

static void what_is_drawn_is_in_the_set_that_a_full_sort_gives(void **state)
{
    (void)state;
    static reference r;
    float logits[COUNT_MAX];
    uint64_t seed = 99;
    for (int round = 0; round < 400; round++) {
        uint32_t count = 1 + (uint32_t)(random_u64(&seed) % COUNT_MAX);
        rf_sampling sampling = random_sampling(&seed);
        rf_sampler sampler;
        fill_logits(logits, count, seed, round % 3 == 0);
        refer(&sampling, logits, count, &r);
        rf_sampler_init(&sampler, &sampling);
        for (int draw = 0; draw < 20; draw++) {
            uint32_t token = pick(&sampler, logits, count);
            if (rank_of(&r, token) == r.count)
                fail_msg("round %d: token %u; top-k %u, top-p %g, min-p %g keep %u of %u", round,
                         token, sampling.top_k, (double)sampling.top_p, (double)sampling.min_p,
                         r.count, count);
        }
    }
}

/* Pearson's statistic against the reference's probabilities; its mean is the degrees of freedom,
 * its standard deviation about sqrt(2 df): six of these happen once in 10^8 at most. The seed is
 * fixed, so the test does not flicker. */
static void draws_come_as_often_as_their_probability_says(void **state)
{
    (void)state;
    enum { DRAWS = 20000 };
    static reference r;
    static uint32_t seen[COUNT_MAX];
    float logits[64];
    uint64_t seed = 4711;
    for (int round = 0; round < 12; round++) {
        rf_sampling sampling = random_sampling(&seed);
        rf_sampler sampler;
        sampling.top_k = (uint32_t[]){0, 12, 5}[round % 3];
        sampling.top_p = (float[]){1.0f, 0.9f}[round % 2];
        sampling.min_p = (float[]){0.0f, 0.0f, 0.1f}[round % 3];
        fill_logits(logits, 64, seed, false);
        refer(&sampling, logits, 64, &r);
        rf_sampler_init(&sampler, &sampling);
        memset(seen, 0, sizeof seen);
        for (int draw = 0; draw < DRAWS; draw++) {
            uint32_t rank = rank_of(&r, pick(&sampler, logits, 64));
            assert_true(rank < r.count);
            seen[rank]++;
        }
        double statistic = 0, rest_expected = 0, rest_seen = 0;
        uint32_t cells = 0;
        for (uint32_t i = 0; i < r.count; i++) {
            double expected = (double)r.probability[i] * DRAWS;
            if (expected < 10) { /* rare ones together */
                rest_expected += expected;
                rest_seen += seen[i];
                continue;
            }
            statistic += (seen[i] - expected) * (seen[i] - expected) / expected;
            cells++;
        }
        if (rest_expected >= 10) {
            statistic += (rest_seen - rest_expected) * (rest_seen - rest_expected) / rest_expected;
            cells++;
        }
        double freedom = cells > 1 ? cells - 1 : 1;
        if (!(statistic < freedom + 6 * sqrt(2 * freedom)))
            fail_msg("round %d: %g at %g degrees of freedom", round, statistic, freedom);
    }
}

static void a_seed_repeats_and_another_one_does_not(void **state)
{
    (void)state;
    float logits[100];
    uint32_t first[200], other = 0;
    fill_logits(logits, 100, 5, false);
    for (int run = 0; run < 3; run++) {
        rf_sampling sampling = neutral();
        rf_sampler sampler;
        sampling.temperature = 2.0f;
        sampling.seed = run == 2 ? 43 : 42;
        rf_sampler_init(&sampler, &sampling);
        for (int i = 0; i < 200; i++) {
            uint32_t token = pick(&sampler, logits, 100);
            if (run == 0)
                first[i] = token;
            else if (run == 1)
                assert_int_equal(token, first[i]);
            else
                other += token != first[i];
        }
    }
    assert_true(other > 100);
}

/* Seeding by splitmix64, whose first number for 42 is known (Vigna, prng.di.unimi.it): whoever
 * changes it changes every text that a seed stands for. */
static void the_generator_starts_from_the_seed_as_published(void **state)
{
    (void)state;
    rf_sampling sampling = neutral();
    rf_sampler sampler;
    uint64_t expected = 42;
    sampling.seed = 42;
    rf_sampler_init(&sampler, &sampling);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(sampler.generator[i], random_u64(&expected));
    }
    assert_int_equal(sampler.generator[0], 0xbdd732262feb6e95u);
}

/* ---- repeat penalty ---------------------------------------------------------------------- */

static void the_penalty_divides_what_was_said_and_multiplies_below_zero(void **state)
{
    (void)state;
    const float logits[] = {4.0f, 3.5f, -1.0f, 2.9f, 3.4f};
    rf_sampling sampling = neutral();
    rf_sampler sampler;
    sampling.temperature = 0.0f;
    sampling.repeat_penalty = 1.25f;
    sampling.repeat_last = 4;
    rf_sampler_init(&sampler, &sampling);
    assert_int_equal(pick(&sampler, logits, 5), 0);
    rf_sampler_note(&sampler, 0); /* 3.2 */
    assert_int_equal(pick(&sampler, logits, 5), 1);
    rf_sampler_note(&sampler, 0); /* twice counts once: 3.2, not 2.56 */
    rf_sampler_note(&sampler, 1); /* 2.8 */
    rf_sampler_note(&sampler, 4); /* 2.72 */
    assert_int_equal(pick(&sampler, logits, 5), 0);
    rf_sampler_note(&sampler, 9); /* beyond the row: nothing happens */
    rf_sampler_note(&sampler, 0);
    rf_sampler_note(&sampler, 4);
    rf_sampler_note(&sampler, 4);
    assert_int_equal(pick(&sampler, logits, 5), 1); /* out of the window of 4 again */
    const float below[] = {-1.0f, -1.1f};
    sampling.repeat_penalty = 1.2f;
    rf_sampler_init(&sampler, &sampling);
    rf_sampler_note(&sampler, 0); /* -1.2 */
    assert_int_equal(pick(&sampler, below, 2), 1);
}

static void the_window_holds_the_last_1024_tokens(void **state)
{
    (void)state;
    float logits[COUNT_MAX] = {0};
    rf_sampling sampling = neutral();
    rf_sampler sampler;
    sampling.temperature = 0.0f;
    sampling.repeat_penalty = 2.0f;
    sampling.repeat_last = RF_REPEAT_WINDOW_MAX;
    logits[7] = 10.0f;
    logits[8] = 9.0f;
    rf_sampler_init(&sampler, &sampling);
    rf_sampler_note(&sampler, 7);
    for (uint32_t i = 1; i < RF_REPEAT_WINDOW_MAX; i++)
        rf_sampler_note(&sampler, 1);
    assert_int_equal(pick(&sampler, logits, 100), 8);
    rf_sampler_note(&sampler, 1);
    assert_int_equal(pick(&sampler, logits, 100), 7);
}

/* ---- options and the public face --------------------------------------------------------- */

/* A penalty of nearly 1 with nothing said changes no logit, but goes by way of an array of all. */
static void a_row_and_an_array_of_it_give_the_same_picks(void **state)
{
    (void)state;
    static const uint32_t counts[] = {2, 41, 63, 64, 65, 105, 333, COUNT_MAX};
    static const uint32_t firsts[] = {1, 2, 40, 64, 100};
    float logits[COUNT_MAX];
    for (uint64_t seed = 0; seed < 400; seed++) {
        uint32_t count = counts[seed % RF_ARRAY_COUNT(counts)];
        rf_sampling sampling = neutral();
        rf_sampler row, array;
        fill_logits(logits, count, seed, seed % 3 == 0);
        sampling.top_k = firsts[seed % RF_ARRAY_COUNT(firsts)];
        sampling.temperature = 3.0f; /* no place in the order is left out */
        sampling.seed = seed;
        rf_sampler_init(&row, &sampling);
        sampling.repeat_penalty = nextafterf(1.0f, 2.0f);
        rf_sampler_init(&array, &sampling);
        for (int draws = 0; draws < 20; draws++) {
            uint32_t expected = pick(&array, logits, count);
            array.accepted = 0;
            assert_int_equal(pick(&row, logits, count), expected);
        }
    }
}

static void options_out_of_range_are_refused_by_their_name(void **state)
{
    (void)state;
    static const struct {
        const char *where;
        size_t offset;
        float value;
    } cases[] = {
        {"temp", offsetof(rf_sampling, temperature), -0.1f},
        {"temp", offsetof(rf_sampling, temperature), NAN},
        {"temp", offsetof(rf_sampling, temperature), INFINITY},
        {"top-p", offsetof(rf_sampling, top_p), 1.01f},
        {"top-p", offsetof(rf_sampling, top_p), -1.0f},
        {"min-p", offsetof(rf_sampling, min_p), 1.5f},
        {"min-p", offsetof(rf_sampling, min_p), NAN},
        {"repeat-penalty", offsetof(rf_sampling, repeat_penalty), 0.0f},
        {"repeat-penalty", offsetof(rf_sampling, repeat_penalty), INFINITY},
    };
    rf_error err = {0};
    rf_sampling sampling = neutral();
    assert_int_equal(rf_sampler_check(&sampling, &err), RF_OK);
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        sampling = neutral();
        memcpy((uint8_t *)&sampling + cases[i].offset, &cases[i].value, sizeof(float));
        assert_int_equal(rf_sampler_check(&sampling, &err), RF_ERR_USAGE);
        assert_string_equal(err.where, cases[i].where);
    }
    sampling = neutral();
    sampling.repeat_last = RF_REPEAT_WINDOW_MAX + 1;
    assert_int_equal(rf_sampler_check(&sampling, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "repeat-last");
}

static void a_model_samples_each_slot_with_its_own_state(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_model *model = NULL;
    rf_options options;
    rf_options_init(&options);
    options.ctx = 32;
    options.chunk = options.logit_rows = 4;
    options.slots = 2;
    options.threads = 1;
    assert_int_equal(rf_file_open(RF_TEST_SOURCE_DIR "/models/stories260k.gguf", &file, &err),
                     RF_OK);
    assert_int_equal(rf_plan_make(file, &options, &plan, &err), RF_OK);
    assert_int_equal(rf_model_open(plan, NULL, NULL, &model, &err), RF_OK);
    uint32_t token = 0, drawn[2][20];
    rf_sampling sampling = neutral();
    assert_int_equal(rf_sample(model, 0, 0, &token, &err), RF_ERR_USAGE); /* no step yet */
    assert_int_equal(rf_sampler_start(model, 2, &sampling, &err), RF_ERR_USAGE);
    assert_int_equal(rf_sampler_start(model, 0, &sampling, &err), RF_OK);
    assert_int_equal(rf_sampler_start(model, 1, &sampling, &err), RF_OK);
    rf_step_item items[] = {{0, 1, 0, true, RF_STEP_PROMPT}, {1, 1, 0, true, RF_STEP_PROMPT}};
    assert_int_equal(rf_step(model, items, 2, &err), RF_OK);
    for (int i = 0; i < 20; i++) { /* in turns, and yet each as if alone */
        for (uint32_t slot = 0; slot < 2; slot++)
            assert_int_equal(rf_sample(model, slot, slot, &drawn[slot][i], &err), RF_OK);
    }
    assert_memory_equal(drawn[0], drawn[1], sizeof drawn[0]);
    assert_int_equal(rf_sample(model, 0, 2, &token, &err), RF_ERR_USAGE);
    assert_int_equal(rf_sample(model, 2, 0, &token, &err), RF_ERR_USAGE);
    sampling.temperature = -1.0f;
    assert_int_equal(rf_sampler_start(model, 0, &sampling, &err), RF_ERR_USAGE);
    sampling.temperature = 0.0f;
    sampling.repeat_penalty = 50.0f;
    assert_int_equal(rf_sampler_start(model, 0, &sampling, &err), RF_OK);
    assert_int_equal(rf_sample(model, 0, 0, &token, &err), RF_OK);
    uint32_t again = token;
    assert_int_equal(rf_sample(model, 0, 0, &again, &err), RF_OK);
    assert_int_not_equal(again, token); /* a pick is accepted into the window */
    rf_model_close(model, NULL);
    rf_model_plan_close(plan);
    rf_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_first_of_the_largest),
        cmocka_unit_test(a_row_without_a_finite_logit_is_an_error),
        cmocka_unit_test(what_is_drawn_is_in_the_set_that_a_full_sort_gives),
        cmocka_unit_test(draws_come_as_often_as_their_probability_says),
        cmocka_unit_test(a_seed_repeats_and_another_one_does_not),
        cmocka_unit_test(the_generator_starts_from_the_seed_as_published),
        cmocka_unit_test(the_penalty_divides_what_was_said_and_multiplies_below_zero),
        cmocka_unit_test(the_window_holds_the_last_1024_tokens),
        cmocka_unit_test(a_row_and_an_array_of_it_give_the_same_picks),
        cmocka_unit_test(options_out_of_range_are_refused_by_their_name),
        cmocka_unit_test(a_model_samples_each_slot_with_its_own_state),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
