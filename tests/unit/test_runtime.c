/* tests/unit/test_runtime.c: the story model from open to close: what was planned is what is taken,
 * a step is all or nothing, and the same tokens give the same bits in any company, in any chunks
 * and on any number of threads (workers).
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MODEL_PATH RF_TEST_SOURCE_DIR "/models/stories260k.gguf"
#define VOCAB      512u

/* ---- a session --------------------------------------------------------------------------- */

typedef struct session {
    rf_file *file;
    rf_model_plan *plan;
    rf_model *model;
} session;

static void must(rf_status status, const rf_error *err)
{
    if (status != RF_OK)
        fail_msg("%s: %s (expected %s, got %s)", err->where, err->what, err->expected, err->got);
}

static rf_options options_of(uint64_t ctx, uint32_t chunk, uint32_t slots, uint32_t threads)
{
    rf_options options;
    rf_options_init(&options);
    options.ctx = ctx;
    options.chunk = chunk;
    options.slots = slots;
    options.threads = threads;
    options.logit_rows = chunk;
    options.text_bytes = 1024;
    return options;
}

static session open_session(const rf_options *options)
{
    session s = {0};
    rf_error err = {0};
    must(rf_file_open(MODEL_PATH, &s.file, &err), &err);
    must(rf_plan_make(s.file, options, &s.plan, &err), &err);
    must(rf_model_open(s.plan, NULL, NULL, &s.model, &err), &err);
    return s;
}

static void close_session(session *s, rf_trace *totals)
{
    rf_model_close(s->model, totals);
    rf_model_plan_close(s->plan);
    rf_file_close(s->file);
}

/* The tokens of a text that nobody wrote; the same for the same seed. */
static uint32_t token_at(uint32_t seed, uint64_t position)
{
    if (position == 0)
        return 1;
    uint64_t z = (seed * 1000003u + position) * 0x9E3779B97F4A7C15u;
    return 3 + (uint32_t)((z ^ (z >> 29)) * 0xBF58476D1CE4E5B9u >> 33) % (VOCAB - 3);
}

static float *new_logits(uint64_t rows)
{
    float *logits = malloc(rows * VOCAB * sizeof *logits);
    assert_non_null(logits);
    return logits;
}

/* Feeds positions [from, to) of text seed to a slot in steps of at most chunk, all with logits,
 * which go to out[position]. */
static void feed(session *s, uint32_t slot, uint32_t seed, uint64_t from, uint64_t to,
                 uint32_t chunk, float *out)
{
    rf_step_item items[512];
    rf_error err = {0};
    assert_true(chunk <= RF_ARRAY_COUNT(items));
    for (uint64_t at = from; at < to;) {
        uint32_t count = (uint32_t)RF_MIN((uint64_t)chunk, to - at);
        for (uint32_t i = 0; i < count; i++)
            items[i] = (rf_step_item){slot, token_at(seed, at + i), at + i, true, RF_STEP_PROMPT};
        must(rf_step(s->model, items, count, &err), &err);
        for (uint32_t i = 0; i < count; i++)
            memcpy(out + (at + i) * VOCAB, rf_logits(s->model, i), VOCAB * sizeof *out);
        at += count;
    }
}

static void assert_same_logits(const float *got, const float *expected, uint64_t from, uint64_t to,
                               const char *what)
{
    for (uint64_t i = from; i < to; i++) {
        if (memcmp(got + i * VOCAB, expected + i * VOCAB, VOCAB * sizeof *got) != 0)
            fail_msg("%s: the logits of position %llu differ", what, (unsigned long long)i);
    }
}

/* ---- open and close ---------------------------------------------------------------------- */

static void what_was_planned_is_taken_and_given_back(void **state)
{
    (void)state;
    static const struct {
        const char *format;
        uint64_t kv_bytes;
    } cases[] = {{"f16", 327680}, {"f32", 655360}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        /* A check reads the workers' stacks, so with a pattern there are none. */
        rf_options options = options_of(512, 64, 1, c == 1 ? 1 : 3);
        options.kv_k = options.kv_v = cases[c].format;
        options.pattern = c == 1;
        session s = open_session(&options);
        const rf_plan *plan = rf_model_plan_regions(s.plan);
        const rf_trace *trace = rf_model_trace(s.model);
        uint64_t planned[RF_SCOPE_COUNT] = {0}, kv_bytes = 0;
        uint32_t kv_rows = 0;
        for (uint32_t i = 0; i < plan->row_count; i++) {
            const rf_plan_row *row = &plan->rows[i];
            rf_check_row check;
            rf_error err = {0};
            must(rf_model_check_row(s.model, i, &check, &err), &err);
            if (strcmp(row->id, "padding") == 0 || row->scope == RF_SCOPE_AMBIENT)
                continue;
            if (check.taken_bytes != row->bytes || trace->rows[i].take_count != 1)
                fail_msg("%s: planned %llu, taken %llu, %u times", row->id,
                         (unsigned long long)row->bytes, (unsigned long long)check.taken_bytes,
                         trace->rows[i].take_count);
            planned[row->scope] += row->bytes;
            if (row->pool == RF_POOL_KV) {
                kv_bytes += row->bytes;
                kv_rows++;
            }
        }
        assert_int_equal(kv_bytes, cases[c].kv_bytes);
        assert_int_equal(plan->pool_bytes[RF_POOL_KV], cases[c].kv_bytes);
        assert_int_equal(kv_rows, 10);
        float *out = new_logits(64);
        feed(&s, 0, 1, 0, 64, 64, out);
        free(out);
        rf_error err = {0};
        if (options.pattern)
            must(rf_model_check_guards(s.model, &err), &err);
        rf_trace totals;
        close_session(&s, &totals);
        for (int scope = 0; scope < RF_SCOPE_AMBIENT; scope++) {
            assert_int_equal(totals.freed_bytes[scope], planned[scope]);
            assert_int_equal(totals.live_bytes[scope], 0);
            assert_int_equal(totals.peak_bytes[scope], planned[scope]);
        }
    }
}

static void steps_take_nothing(void **state)
{
    (void)state;
    rf_options options = options_of(128, 16, 2, 2);
    session s = open_session(&options);
    const rf_trace *trace = rf_model_trace(s.model);
    float *out = new_logits(128);
    uint64_t model = trace->alloc_count[RF_SCOPE_MODEL];
    uint64_t forward = trace->alloc_count[RF_SCOPE_FORWARD], resets = trace->reset_count;
    feed(&s, 0, 1, 0, 32, 16, out);
    feed(&s, 1, 1, 0, 4, 1, out);
    assert_int_equal(trace->alloc_count[RF_SCOPE_MODEL], model);
    assert_int_equal(trace->alloc_count[RF_SCOPE_FORWARD], forward);
    assert_int_equal(trace->reset_count, resets + 6);
    free(out);
    close_session(&s, NULL);
}

static void a_model_that_does_not_fit_or_has_no_data_is_not_opened(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_model *model = NULL;
    rf_options options = options_of(64, 8, 1, 1);
    options.mem_limit = 4096;
    must(rf_file_open(MODEL_PATH, &file, &err), &err);
    must(rf_plan_make(file, &options, &plan, &err), &err);
    assert_int_equal(rf_model_open(plan, NULL, NULL, &model, &err), RF_ERR_NO_FIT);
    assert_int_equal(rf_model_open(plan, NULL, NULL, &model, NULL), RF_ERR_NO_FIT);
    assert_null(model);
    rf_model_plan_close(plan);
    rf_file_info info;
    rf_file_describe(file, &info);
    rf_file *cut = NULL;
    must(rf_file_open_memory("cut", info.data, info.data_offset + 100, &cut, &err), &err);
    options.mem_limit = 0;
    must(rf_plan_make(cut, &options, &plan, &err), &err);
    rf_plan_info about;
    rf_model_plan_describe(plan, &about);
    assert_true(about.data_missing);
    assert_int_equal(rf_model_open(plan, NULL, NULL, &model, &err), RF_ERR_BAD_MODEL);
    assert_string_equal(err.where, "cut");
    rf_model_plan_close(plan);
    rf_file_close(cut);
    rf_file_close(file);
    rf_model_close(NULL, NULL);
    rf_model_plan_close(NULL);
    rf_file_close(NULL);
}

/* The embedded model lies where the linker puts it; a caller's bytes may lie anywhere. */
static void a_file_in_memory_that_is_not_aligned_is_refused_or_served(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_file *file = NULL, *moved = NULL;
    rf_file_info info;
    must(rf_file_open(MODEL_PATH, &file, &err), &err);
    rf_file_describe(file, &info);
    uint8_t *copy = aligned_alloc(64, (info.bytes + 128) & ~63ull);
    assert_non_null(copy);
    memcpy(copy + 1, info.data, info.bytes);
    rf_status status = rf_file_open_memory("moved", copy + 1, info.bytes, &moved, &err);
    if (status == RF_OK) {
        session s = {.file = moved};
        rf_options options = options_of(16, 4, 1, 1);
        must(rf_plan_make(moved, &options, &s.plan, &err), &err);
        must(rf_model_open(s.plan, NULL, NULL, &s.model, &err), &err);
        float *out = new_logits(4);
        feed(&s, 0, 1, 0, 4, 4, out);
        free(out);
        close_session(&s, NULL);
    } else {
        assert_int_equal(status, RF_ERR_USAGE);
    }
    free(copy);
    rf_file_close(file);
}

static bool stop_at_once(void *context, uint64_t done, uint64_t total)
{
    assert_true(done <= total);
    ++*(int *)context;
    return false;
}

static void a_progress_that_says_no_ends_the_opening(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_model *model = NULL;
    int calls = 0;
    rf_options options = options_of(64, 8, 1, 3);
    must(rf_file_open(MODEL_PATH, &file, &err), &err);
    must(rf_plan_make(file, &options, &plan, &err), &err);
    assert_int_equal(rf_model_open(plan, stop_at_once, &calls, &model, &err), RF_ERR_INTERRUPTED);
    assert_int_equal(calls, 1);
    assert_null(model);
    must(rf_model_open(plan, NULL, NULL, &model, &err), &err); /* the plan can be used again */
    rf_model_close(model, NULL);
    rf_model_plan_close(plan);
    rf_file_close(file);
}

/* ---- steps that are refused -------------------------------------------------------------- */

static void a_wrong_step_is_refused_and_the_slots_are_as_they_were(void **state)
{
    (void)state;
    rf_options options = options_of(16, 6, 2, 1);
    options.logit_rows = 2;
    session s = open_session(&options);
    rf_step_item first[] = {{0, 1, 0, false, RF_STEP_PROMPT},
                            {1, 1, 0, false, RF_STEP_PROMPT},
                            {0, 5, 1, true, RF_STEP_PROMPT}};
    rf_error err = {0};
    must(rf_step(s.model, first, 3, &err), &err);
    assert_non_null(rf_logits(s.model, 0));
    assert_null(rf_logits(s.model, 1));
    static const struct {
        const char *where;
        uint32_t count;
        rf_step_item items[7];
    } cases[] = {
        {"step.items[0]", 0, {{0}}},
        {"step.items[0]", 7, {{0, 1, 2, 0, 0}, {0, 1, 3, 0, 0}, {0, 1, 4, 0, 0}, {0, 1, 5, 0, 0}}},
        {"step.items[0]", 1, {{2, 1, 0, 0, 0}}}, /* slot */
        {"step.items[1]", 2, {{0, 1, 2, 0, 0}, {UINT32_MAX, 1, 0, 0, 0}}},
        {"step.items[0]", 1, {{0, VOCAB, 2, 0, 0}}}, /* token */
        {"step.items[1]", 2, {{0, 1, 2, 0, 0}, {0, UINT32_MAX, 3, 0, 0}}},
        {"step.items[0]", 1, {{0, 1, 1, 0, 0}}}, /* position */
        {"step.items[0]", 1, {{0, 1, 3, 0, 0}}},
        {"step.items[2]", 3, {{0, 1, 2, 0, 0}, {1, 1, 1, 0, 0}, {0, 1, 2, 0, 0}}},
        {"step.items[1]", 2, {{0, 1, 3, 0, 0}, {0, 1, 2, 0, 0}}},
        {"step.items[0]", 1, {{1, 1, UINT64_MAX, 0, 0}}},
        {"step.items[2]",
         3,
         {{0, 1, 2, 1, 0}, {1, 1, 1, 1, 0}, {0, 1, 3, 1, 0}}}, /* too many logits */
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        memset(&err, 0, sizeof err);
        rf_status status = rf_step(s.model, cases[i].items, cases[i].count, &err);
        assert_int_equal(rf_step(s.model, cases[i].items, cases[i].count, NULL), RF_ERR_USAGE);
        bool is_descending = i == 9;
        if (status != RF_ERR_USAGE || (!is_descending && strcmp(err.where, cases[i].where) != 0))
            fail_msg("case %zu: %s at \"%s\"", i, rf_status_name(status), err.where);
        assert_null(rf_logits(s.model, 0)); /* there is no last step */
        assert_int_equal(rf_slot_length(s.model, 0), 2);
        assert_int_equal(rf_slot_length(s.model, 1), 1);
    }
    close_session(&s, NULL);
}

static void a_full_slot_is_refused_and_the_others_go_on(void **state)
{
    (void)state;
    rf_options options = options_of(8, 8, 2, 1);
    session s = open_session(&options);
    rf_error err = {0};
    float *out = new_logits(8);
    feed(&s, 0, 1, 0, 8, 8, out);
    rf_step_item both[] = {{1, 1, 0, false, RF_STEP_PROMPT}, {0, 1, 8, true, RF_STEP_PROMPT}};
    assert_int_equal(rf_step(s.model, both, 2, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "step.items[1]");
    assert_non_null(strstr(err.what, "full"));
    assert_int_equal(rf_slot_length(s.model, 1), 0);
    must(rf_step(s.model, both, 1, &err), &err);
    assert_int_equal(rf_slot_length(s.model, 1), 1);
    assert_int_equal(rf_slot_truncate(s.model, 0, 9, &err), RF_ERR_USAGE);
    assert_int_equal(rf_slot_truncate(s.model, 2, 0, &err), RF_ERR_USAGE);
    free(out);
    close_session(&s, NULL);
}

/* ---- the same bits ----------------------------------------------------------------------- */

#define LENGTH 96u

static float *feed_alone(uint32_t seed, const char *format)
{
    rf_options options = options_of(LENGTH, 1, 1, 1);
    options.kv_k = options.kv_v = format;
    session s = open_session(&options);
    float *out = new_logits(LENGTH);
    feed(&s, 0, seed, 0, LENGTH, 1, out);
    close_session(&s, NULL);
    return out;
}

static void any_chunk_and_any_number_of_threads_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {1, 2, 7, 32, 33, 64, 65, LENGTH};
    float *got = new_logits(LENGTH);
    for (int format = 0; format < 2; format++) {
        const char *name = format ? "f32" : "f16";
        float *expected = feed_alone(1, name);
        for (uint32_t threads = 1; threads <= 4; threads++) {
            for (size_t c = 0; c < RF_ARRAY_COUNT(chunks); c++) {
                rf_options options = options_of(LENGTH, chunks[c], 1, threads);
                options.kv_k = options.kv_v = name;
                session s = open_session(&options);
                char what[64];
                snprintf(what, sizeof what, "%s, chunk %u, %u threads", name, chunks[c], threads);
                feed(&s, 0, 1, 0, LENGTH, chunks[c], got);
                assert_same_logits(got, expected, 0, LENGTH, what);
                close_session(&s, NULL);
            }
        }
        free(expected);
    }
    free(got);
}

/* Three texts of different lengths in one batch, their items mixed. */
static void slots_in_one_batch_give_the_bits_that_they_give_alone(void **state)
{
    (void)state;
    rf_options options = options_of(LENGTH, 40, 3, 2);
    session s = open_session(&options);
    float *expected[3], *got = new_logits(LENGTH);
    uint64_t lengths[3] = {0};
    rf_error err = {0};
    for (uint32_t i = 0; i < 3; i++)
        expected[i] = feed_alone(i + 1, "f16");
    for (uint32_t step = 0; lengths[2] < LENGTH; step++) {
        rf_step_item items[40];
        uint32_t count = 0;
        for (uint32_t round = 0; round < 13; round++) { /* slot 2 runs ahead of the others */
            for (uint32_t slot = 0; slot < 3; slot++) {
                if (lengths[slot] == LENGTH || (slot < 2 && (round + step) % (slot + 2) == 0))
                    continue;
                items[count++] = (rf_step_item){slot, token_at(slot + 1, lengths[slot]),
                                                lengths[slot], true, RF_STEP_PROMPT};
                lengths[slot]++;
            }
        }
        must(rf_step(s.model, items, count, &err), &err);
        for (uint32_t i = 0; i < count; i++) { /* logits come in the caller's order */
            const float *row = expected[items[i].slot] + items[i].position * VOCAB;
            memcpy(got, rf_logits(s.model, i), VOCAB * sizeof *got);
            assert_same_logits(got, row, 0, 1, "a batch of slots");
        }
    }
    for (uint32_t slot = 0; slot < 3; slot++) {
        assert_int_equal(rf_slot_length(s.model, slot), lengths[slot]);
        free(expected[slot]);
    }
    free(got);
    close_session(&s, NULL);
}

static void logits_are_given_for_those_that_want_them_in_their_order(void **state)
{
    (void)state;
    rf_options options = options_of(LENGTH, 32, 1, 1);
    session s = open_session(&options);
    float *expected = feed_alone(1, "f16"), *got = new_logits(1);
    rf_step_item items[32];
    rf_error err = {0};
    for (uint32_t i = 0; i < 32; i++)
        items[i] = (rf_step_item){0, token_at(1, i), i, i % 5 == 3, RF_STEP_PROMPT};
    must(rf_step(s.model, items, 32, &err), &err);
    for (uint32_t i = 0; i < 6; i++) {
        memcpy(got, rf_logits(s.model, i), VOCAB * sizeof *got);
        assert_same_logits(got, expected + (i * 5 + 3) * VOCAB, 0, 1, "a chosen row");
    }
    assert_null(rf_logits(s.model, 6));
    free(expected);
    free(got);
    close_session(&s, NULL);
}

static void truncate_and_redo_gives_the_same_bits(void **state)
{
    (void)state;
    rf_options options = options_of(LENGTH, 32, 1, 2);
    session s = open_session(&options);
    rf_error err = {0};
    float *expected = feed_alone(1, "f16"), *got = new_logits(LENGTH), *other = new_logits(LENGTH);
    feed(&s, 0, 1, 0, 60, 32, got);
    must(rf_slot_truncate(s.model, 0, 41, &err), &err);
    feed(&s, 0, 2, 41, 80, 32, other); /* another text over the same rows */
    must(rf_slot_truncate(s.model, 0, 41, &err), &err);
    feed(&s, 0, 1, 41, LENGTH, 13, got);
    assert_same_logits(got, expected, 0, LENGTH, "redone");
    must(rf_slot_truncate(s.model, 0, 0, &err), &err);
    feed(&s, 0, 1, 0, LENGTH, 32, got);
    assert_same_logits(got, expected, 0, LENGTH, "from the start");
    free(expected);
    free(got);
    free(other);
    close_session(&s, NULL);
}

/* ---- cancel ------------------------------------------------------------------------------ */

typedef struct cancel_job {
    rf_model *model;
    uint64_t at;
    bool by_return;
    uint64_t last;
} cancel_job;

static bool cancel_at(void *context, uint64_t done, uint64_t total)
{
    cancel_job *job = context;
    assert_int_equal(total, LENGTH);
    assert_true(done > job->last);
    job->last = done;
    if (done != job->at)
        return true;
    if (!job->by_return)
        rf_model_cancel(job->model);
    return !job->by_return;
}

static void a_prefill_that_is_cancelled_can_go_on_to_the_same_bits(void **state)
{
    (void)state;
    uint32_t tokens[LENGTH];
    float *expected = feed_alone(1, "f16"), *got = new_logits(1);
    for (uint32_t i = 0; i < LENGTH; i++)
        tokens[i] = token_at(1, i);
    for (int by_return = 0; by_return < 2; by_return++) {
        rf_options options = options_of(LENGTH, 16, 1, 2);
        session s = open_session(&options);
        rf_error err = {0};
        cancel_job job = {s.model, 48, by_return, 0};
        assert_int_equal(rf_prefill(s.model, 0, tokens, LENGTH, true, cancel_at, &job, &err),
                         RF_ERR_INTERRUPTED);
        assert_int_equal(rf_slot_length(s.model, 0), 48);
        assert_null(by_return ? NULL : rf_logits(s.model, 0));
        must(rf_prefill(s.model, 0, tokens + 48, LENGTH - 48, true, NULL, NULL, &err), &err);
        memcpy(got, rf_logits(s.model, 0), VOCAB * sizeof *got);
        assert_same_logits(got, expected + (LENGTH - 1) * VOCAB, 0, 1, "after a cancel");
        assert_null(rf_logits(s.model, 1));
        close_session(&s, NULL);
    }
    free(expected);
    free(got);
}

static void a_cancel_before_a_step_ends_that_step_and_no_other(void **state)
{
    (void)state;
    rf_options options = options_of(LENGTH, 16, 2, 1);
    session s = open_session(&options);
    rf_error err = {0};
    float *expected = feed_alone(1, "f16"), *got = new_logits(LENGTH);
    feed(&s, 0, 1, 0, 20, 16, got);
    rf_step_item items[] = {{0, token_at(1, 20), 20, true, RF_STEP_PROMPT},
                            {1, 1, 0, true, RF_STEP_PROMPT}};
    rf_model_cancel(s.model);
    assert_int_equal(rf_step(s.model, items, 2, &err), RF_ERR_INTERRUPTED);
    assert_int_equal(rf_slot_length(s.model, 0), 20);
    assert_int_equal(rf_slot_length(s.model, 1), 0);
    assert_null(rf_logits(s.model, 0));
    feed(&s, 0, 1, 20, LENGTH, 16, got);
    assert_same_logits(got, expected, 0, LENGTH, "after a cancel");
    free(expected);
    free(got);
    close_session(&s, NULL);
}

static void a_prefill_that_does_not_fit_keeps_what_it_committed(void **state)
{
    (void)state;
    rf_options options = options_of(40, 16, 1, 1);
    session s = open_session(&options);
    rf_error err = {0};
    uint32_t tokens[50];
    for (uint32_t i = 0; i < 50; i++)
        tokens[i] = token_at(1, i);
    assert_int_equal(rf_prefill(s.model, 0, tokens, 50, true, NULL, NULL, &err), RF_ERR_USAGE);
    assert_int_equal(rf_slot_length(s.model, 0), 32);
    must(rf_prefill(s.model, 0, tokens + 32, 8, true, NULL, NULL, &err), &err);
    assert_non_null(rf_logits(s.model, 0));
    assert_int_equal(rf_prefill(s.model, 1, tokens, 1, true, NULL, NULL, &err), RF_ERR_USAGE);
    close_session(&s, NULL);
}

/* ---- faults in the middle ---------------------------------------------------------------- */

/* The story model in memory, with NaN for the embedding of one token. */
static uint8_t *poisoned_model(uint32_t token, uint64_t *bytes)
{
    rf_file *file = NULL;
    rf_file_info info;
    rf_tensor_info tensor;
    rf_error err = {0};
    must(rf_file_open(MODEL_PATH, &file, &err), &err);
    rf_file_describe(file, &info);
    uint8_t *copy = aligned_alloc(64, (info.bytes + 63) & ~63ull);
    assert_non_null(copy);
    memcpy(copy, info.data, info.bytes);
    uint32_t index = 0;
    do
        assert_true(rf_file_tensor(file, index++, &tensor));
    while (strcmp(tensor.id, "model.embed_tokens.weight") != 0);
    assert_string_equal(tensor.format, "f32");
    const float nan = __builtin_nanf("");
    memcpy(copy + tensor.offset + (token * tensor.shape[0] + 3) * sizeof nan, &nan, sizeof nan);
    *bytes = info.bytes;
    rf_file_close(file);
    return copy;
}

static void a_value_that_is_not_finite_leaves_every_slot_as_it_was(void **state)
{
    (void)state;
    uint64_t bytes = 0;
    uint8_t *copy = poisoned_model(2, &bytes); /* token_at never gives 2 */
    session s = {0};
    rf_error err = {0};
    rf_options options = options_of(LENGTH, 16, 2, 2);
    must(rf_file_open_memory("poisoned", copy, bytes, &s.file, &err), &err);
    must(rf_plan_make(s.file, &options, &s.plan, &err), &err);
    must(rf_model_open(s.plan, NULL, NULL, &s.model, &err), &err);
    float *expected = feed_alone(1, "f16"), *got = new_logits(LENGTH);
    feed(&s, 0, 1, 0, 20, 16, got);
    /* Slot 0 is appended to before slot 1 is found out. */
    rf_step_item items[] = {{0, 5, 20, true, RF_STEP_PROMPT},
                            {1, 1, 0, false, RF_STEP_PROMPT},
                            {1, 2, 1, true, RF_STEP_PROMPT}};
    assert_int_equal(rf_step(s.model, items, 3, &err), RF_ERR_RUNTIME);
    assert_string_equal(err.where, "kv.layers[0].k");
    assert_int_equal(rf_slot_length(s.model, 0), 20);
    assert_int_equal(rf_slot_length(s.model, 1), 0);
    assert_null(rf_logits(s.model, 0));
    feed(&s, 0, 1, 20, LENGTH, 16, got);
    assert_same_logits(got, expected, 0, LENGTH, "after a fault");
    feed(&s, 1, 1, 0, LENGTH, 16, got);
    assert_same_logits(got, expected, 0, LENGTH, "the other slot");
    free(expected);
    free(got);
    close_session(&s, NULL);
    free(copy);
}

typedef struct canceller {
    rf_model *model;
    atomic_bool stop;
} canceller;

static void *cancel_now_and_then(void *context)
{
    canceller *c = context;
    while (!atomic_load(&c->stop)) {
        struct timespec pause = {0, 300000};
        nanosleep(&pause, NULL);
        rf_model_cancel(c->model);
    }
    return NULL;
}

static void a_cancel_from_another_thread_leaves_the_slot_fit_to_go_on(void **state)
{
    (void)state;
    rf_options options = options_of(LENGTH, 32, 1, 2);
    session s = open_session(&options);
    float *expected = feed_alone(1, "f16"), *got = new_logits(1);
    uint32_t tokens[LENGTH], interrupted = 0;
    rf_error err = {0};
    for (uint32_t i = 0; i < LENGTH; i++)
        tokens[i] = token_at(1, i);
    canceller c = {.model = s.model};
    pthread_t thread;
    assert_int_equal(pthread_create(&thread, NULL, cancel_now_and_then, &c), 0);
    for (int round = 0; round < 2000 && interrupted < 100; round++) {
        uint64_t at = rf_slot_length(s.model, 0);
        if (at == LENGTH) {
            memcpy(got, rf_logits(s.model, 0), VOCAB * sizeof *got);
            assert_same_logits(got, expected + (LENGTH - 1) * VOCAB, 0, 1, "between cancels");
            must(rf_slot_truncate(s.model, 0, 0, &err), &err);
            at = 0;
        }
        rf_status status = rf_prefill(s.model, 0, tokens + at, LENGTH - at, true, NULL, NULL, &err);
        assert_true(status == RF_OK || status == RF_ERR_INTERRUPTED);
        assert_true(rf_slot_length(s.model, 0) % 32 == 0 && rf_slot_length(s.model, 0) >= at);
        interrupted += status == RF_ERR_INTERRUPTED;
    }
    atomic_store(&c.stop, true);
    pthread_join(thread, NULL);
    assert_true(interrupted > 0);
    free(expected);
    free(got);
    close_session(&s, NULL);
}

/* ---- small things ------------------------------------------------------------------------ */

static void the_bytes_of_a_step_are_its_weights_and_its_depth(void **state)
{
    (void)state;
    rf_options options = options_of(64, 8, 1, 1);
    session s = open_session(&options);
    /* 5 layers x 4 KV heads x (8 + 8) x 2 bytes a position. */
    uint64_t none = rf_model_step_bytes(s.model, 0);
    assert_int_equal(rf_model_step_bytes(s.model, 10) - none, 10 * 5 * 4 * 16 * 2);
    uint64_t weights = 0;
    const rf_plan *plan = rf_model_plan_regions(s.plan);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (plan->rows[i].pool == RF_POOL_WEIGHTS &&
            strcmp(plan->rows[i].id, "model.embed_tokens.weight") != 0)
            weights += plan->rows[i].bytes;
    }
    /* A step reads one row of the embedding; this file has an output of its own. */
    assert_non_null(rf_plan_find(plan, "model.lm_head.weight"));
    assert_int_equal(none, weights);
    char name[64];
    rf_model_op_name(s.model, 2 + 3 * 10 + 1, name, sizeof name);
    assert_string_equal(name, "layers[3].attn.qkv");
    close_session(&s, NULL);
}

/* Appends and attention run in the workers' scratch; the store is planned none beside it. */
static void scratch_is_planned_for_workers_alone(void **state)
{
    (void)state;
    rf_options options = options_of(64, 8, 1, 1);
    session s = open_session(&options);
    const rf_plan_row *row = rf_plan_find(rf_model_plan_regions(s.plan), "kv.state");
    assert_true(row->bytes < rf_kv_scratch_bytes(8, 8, 64));
    close_session(&s, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_was_planned_is_taken_and_given_back),
        cmocka_unit_test(steps_take_nothing),
        cmocka_unit_test(a_model_that_does_not_fit_or_has_no_data_is_not_opened),
        cmocka_unit_test(a_file_in_memory_that_is_not_aligned_is_refused_or_served),
        cmocka_unit_test(a_progress_that_says_no_ends_the_opening),
        cmocka_unit_test(a_wrong_step_is_refused_and_the_slots_are_as_they_were),
        cmocka_unit_test(a_full_slot_is_refused_and_the_others_go_on),
        cmocka_unit_test(any_chunk_and_any_number_of_threads_give_the_same_bits),
        cmocka_unit_test(slots_in_one_batch_give_the_bits_that_they_give_alone),
        cmocka_unit_test(logits_are_given_for_those_that_want_them_in_their_order),
        cmocka_unit_test(truncate_and_redo_gives_the_same_bits),
        cmocka_unit_test(a_prefill_that_is_cancelled_can_go_on_to_the_same_bits),
        cmocka_unit_test(a_cancel_before_a_step_ends_that_step_and_no_other),
        cmocka_unit_test(a_prefill_that_does_not_fit_keeps_what_it_committed),
        cmocka_unit_test(a_value_that_is_not_finite_leaves_every_slot_as_it_was),
        cmocka_unit_test(a_cancel_from_another_thread_leaves_the_slot_fit_to_go_on),
        cmocka_unit_test(the_bytes_of_a_step_are_its_weights_and_its_depth),
        cmocka_unit_test(scratch_is_planned_for_workers_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
