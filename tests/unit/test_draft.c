/* tests/unit/test_draft.c: drafts are what followed before, they are planned, and what may be
 * risked for them is bounded.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"

#include <string.h>

#define MODEL_PATH RF_TEST_SOURCE_DIR "/models/stories260k.gguf"

typedef struct session {
    rf_file *file;
    rf_model_plan *plan;
    rf_model *model;
} session;

static session open_session(uint64_t ctx, uint32_t draft, uint32_t slots)
{
    session s = {0};
    rf_options options;
    rf_options_init(&options);
    options.ctx = ctx;
    options.draft = draft;
    options.slots = slots;
    assert_int_equal(rf_file_open(MODEL_PATH, &s.file, NULL), RF_OK);
    assert_int_equal(rf_plan_make(s.file, &options, &s.plan, NULL), RF_OK);
    assert_int_equal(rf_model_open(s.plan, NULL, NULL, &s.model, NULL), RF_OK);
    return s;
}

static void close_session(session *s)
{
    rf_model_close(s->model, NULL);
    rf_model_plan_close(s->plan);
    rf_file_close(s->file);
}

static uint32_t propose(session *s, uint32_t *tokens)
{
    memset(tokens, 0xFF, 64 * sizeof *tokens);
    return rf_draft_propose(s->model, 0, tokens, 64);
}

static void what_followed_before_is_proposed(void **state)
{
    (void)state;
    session s = open_session(128, 8, 2);
    const uint32_t text[] = {5, 6, 7, 8, 9, 10, 11, 5, 6, 7};
    uint32_t tokens[64];
    rf_draft_note(s.model, 0, text, 9);
    assert_int_equal(propose(&s, tokens), 0); /* two tokens are no match */
    rf_draft_note(s.model, 0, text + 9, 1);
    assert_int_equal(propose(&s, tokens), 2); /* all that the first credit allows */
    assert_int_equal(tokens[0], 8);
    assert_int_equal(tokens[1], 9);
    assert_int_equal(tokens[2], UINT32_MAX);
    assert_int_equal(rf_draft_propose(s.model, 0, tokens, 1), 1);
    assert_int_equal(rf_draft_propose(s.model, 1, tokens, 8), 0); /* the other slot has no text */
    rf_draft_start(s.model, 0);
    assert_int_equal(propose(&s, tokens), 0);
    close_session(&s);
}

static void a_text_that_goes_round_is_drafted_on_and_on(void **state)
{
    (void)state;
    session s = open_session(128, 8, 1);
    uint32_t tokens[64];
    uint64_t at = 0, longest = 0;
    for (int step = 0; step < 300; step++) { /* far beyond what the history holds */
        const uint32_t next = 20 + (uint32_t)(at++ % 5);
        rf_draft_note(s.model, 0, &next, 1);
        const uint32_t count = propose(&s, tokens);
        assert_true(count <= 8);
        for (uint32_t i = 0; i < count; i++)
            assert_int_equal(tokens[i], 20 + (at + i) % 5);
        rf_draft_note(s.model, 0, tokens, count);
        at += count;
        rf_draft_judge(s.model, 0, count, count);
        longest = RF_MAX(longest, count);
    }
    assert_int_equal(longest, 8);
    close_session(&s);
}

/* Tokens of a small alphabet meet again all the time, and what followed means nothing. */
static void wrong_drafts_are_a_small_share_of_a_text(void **state)
{
    (void)state;
    session s = open_session(512, 8, 1);
    uint32_t tokens[64];
    uint64_t wrong = 0;
    uint64_t seed = 99;
    const uint64_t length = 20000;
    for (uint64_t i = 0; i < length; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
        const uint32_t token = 3 + (uint32_t)(seed >> 62);
        rf_draft_note(s.model, 0, &token, 1);
        const uint32_t count = propose(&s, tokens);
        wrong += count;
        rf_draft_judge(s.model, 0, count, 0);
    }
    assert_in_range(wrong, length / 128, 2 + length / 64 + 1);
    close_session(&s);
}

static void drafts_have_rows_in_the_plan_and_only_when_asked_for(void **state)
{
    (void)state;
    session s = open_session(300, 8, 2);
    const rf_plan *plan = rf_model_plan_regions(s.plan);
    const rf_plan_row *history = rf_plan_find(plan, "draft.tokens");
    assert_non_null(history);
    assert_int_equal(history->bytes, 2 * 300 * sizeof(uint32_t));
    assert_int_equal(rf_plan_find(plan, "draft.table")->bytes, 2 * 1024 * sizeof(uint32_t));
    rf_plan_info info;
    rf_model_plan_describe(s.plan, &info);
    assert_int_equal(info.logit_rows, 9);
    close_session(&s);
    s = open_session(300, 0, 2);
    uint32_t tokens[64] = {1, 2, 3, 1, 2, 3};
    assert_null(rf_plan_find(rf_model_plan_regions(s.plan), "draft.tokens"));
    rf_draft_note(s.model, 0, tokens, 6);
    assert_int_equal(propose(&s, tokens), 0);
    close_session(&s);
}

static void a_draft_that_no_chunk_holds_is_refused(void **state)
{
    (void)state;
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_options options;
    rf_options_init(&options);
    options.chunk = 8;
    options.draft = 8;
    assert_int_equal(rf_file_open(MODEL_PATH, &file, NULL), RF_OK);
    rf_error err = {0};
    assert_int_equal(rf_plan_make(file, &options, &plan, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "draft");
    options.draft = 7;
    assert_int_equal(rf_plan_make(file, &options, &plan, &err), RF_OK);
    rf_model_plan_close(plan);
    rf_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_followed_before_is_proposed),
        cmocka_unit_test(a_text_that_goes_round_is_drafted_on_and_on),
        cmocka_unit_test(wrong_drafts_are_a_small_share_of_a_text),
        cmocka_unit_test(drafts_have_rows_in_the_plan_and_only_when_asked_for),
        cmocka_unit_test(a_draft_that_no_chunk_holds_is_refused),
    };
    return cmocka_run_group_tests_name("draft", tests, NULL, NULL);
}
