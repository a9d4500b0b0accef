/* tests/unit/test_budget.c: the plan of a run judged against a budget: what fits, what would make
 * it fit, and the largest context that does. Also the options of a plan, each from its wrong side.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"

#include <stdlib.h>
#include <string.h>

#define MODEL_PATH RF_TEST_SOURCE_DIR "/models/stories260k.gguf"

static rf_file *open_file(void)
{
    rf_file *file = NULL;
    rf_error err = {0};
    if (rf_file_open(MODEL_PATH, &file, &err) != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
    return file;
}

static rf_options small_options(void)
{
    rf_options options;
    rf_options_init(&options);
    options.text_bytes = 256;
    options.threads = 1;
    return options;
}

/* Whether the plan of these options fits; fills total. */
static bool fits(const rf_file *file, const rf_options *options, uint64_t *total)
{
    rf_model_plan *plan = NULL;
    rf_plan_info info;
    rf_error err = {0};
    if (rf_plan_make(file, options, &plan, &err) != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
    rf_model_plan_describe(plan, &info);
    *total = rf_model_plan_regions(plan)->total_bytes;
    rf_model_plan_close(plan);
    return info.fits;
}

/* ---- fit --------------------------------------------------------------------------------- */

static void a_plan_fits_to_the_byte(void **state)
{
    (void)state;
    rf_file *file = open_file();
    rf_options options = small_options();
    uint64_t total = 0, other = 0;
    assert_true(fits(file, &options, &total));
    options.mem_limit = total;
    assert_true(fits(file, &options, &other));
    assert_int_equal(other, total);
    options.mem_limit = total - 1;
    assert_false(fits(file, &options, &other));
    rf_file_close(file);
}

static void a_limit_is_named_and_nothing_is_kept_back_from_it(void **state)
{
    (void)state;
    rf_file *file = open_file();
    rf_options options = small_options();
    rf_model_plan *plan = NULL;
    rf_plan_info info;
    options.mem_limit = 5000000;
    assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_OK);
    rf_model_plan_describe(plan, &info);
    assert_string_equal(info.budget_source, "mem_limit");
    assert_int_equal(info.available_bytes, 5000000);
    assert_int_equal(info.reserve_bytes, 0);
    rf_model_plan_close(plan);
    options.mem_limit = UINT64_MAX; /* more than the machine has: the machine decides */
    options.profile = "edge";
    assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_OK);
    rf_model_plan_describe(plan, &info);
    assert_string_not_equal(info.budget_source, "mem_limit");
    assert_true(info.available_bytes < UINT64_MAX);
    assert_int_equal(info.reserve_bytes, 64u << 20);
    rf_model_plan_close(plan);
    rf_file_close(file);
}

static void the_largest_context_fits_and_one_more_does_not(void **state)
{
    (void)state;
    static const struct {
        uint32_t slots, chunk;
        const char *format;
    } cases[] = {{1, 0, "f16"}, {3, 0, "f32"}, {1, 64, "f16"}, {2, 1, "f32"}};
    rf_file *file = open_file();
    for (uint64_t extra = 0; extra < 9000000; extra = extra * 3 + 100000) {
        for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
            rf_options options = small_options();
            uint64_t least = 0, total = 0, ctx = 0;
            rf_error err = {0};
            options.slots = cases[c].slots;
            options.kv_k = options.kv_v = cases[c].format;
            options.ctx = 1;
            options.chunk = 1;
            fits(file, &options, &least);
            options.chunk = cases[c].chunk;
            options.mem_limit = least + extra;
            assert_int_equal(rf_plan_solve_ctx(file, &options, &ctx, &err), RF_OK);
            assert_true(ctx >= 1);
            for (int more = 0; more < 2; more++) { /* a chunk is clamped to the context */
                options.ctx = ctx + (uint64_t)more;
                options.chunk = (uint32_t)RF_MIN(cases[c].chunk, options.ctx);
                bool does_fit = fits(file, &options, &total);
                if (does_fit != !more)
                    fail_msg("case %zu, %llu bytes above the least: ctx %llu %s", c,
                             (unsigned long long)extra, (unsigned long long)options.ctx,
                             does_fit ? "fits as well" : "does not fit");
            }
        }
    }
    rf_file_close(file);
}

static void no_context_fits_into_nothing(void **state)
{
    (void)state;
    rf_file *file = open_file();
    rf_options options = small_options();
    rf_error err = {0};
    uint64_t ctx = 77;
    options.mem_limit = 1000;
    assert_int_equal(rf_plan_solve_ctx(file, &options, &ctx, &err), RF_ERR_NO_FIT);
    assert_int_equal(ctx, 77);
    options.kv_k = "q9";
    assert_int_equal(rf_plan_solve_ctx(file, &options, &ctx, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "kv_k");
    rf_file_close(file);
}

/* ---- suggestions ------------------------------------------------------------------------- */

/* What a plan's total becomes under an option as a suggestion spells it; false when it is none that
 * a run can be given. */
static bool apply(const char *text, rf_options *options)
{
    char *end;
    if (strncmp(text, "-b ", 3) == 0) {
        options->chunk = (uint32_t)strtoul(text + 3, &end, 10);
        return true;
    }
    if (strncmp(text, "-c ", 3) == 0) {
        options->ctx = strtoull(text + 3, &end, 10);
        options->chunk = (uint32_t)RF_MIN((uint64_t)options->chunk, options->ctx);
        return true;
    }
    if (strncmp(text, "--slots ", 8) == 0) {
        options->slots = (uint32_t)strtoul(text + 8, &end, 10);
        return true;
    }
    if (strcmp(text, "-ctk f16 -ctv f16") == 0) {
        options->kv_k = options->kv_v = "f16";
        return true;
    }
    return false;
}

static void what_does_not_fit_gets_two_suggestions_that_save_what_they_say(void **state)
{
    (void)state;
    static const struct {
        uint32_t slots, chunk;
        uint64_t ctx, limit;
        const char *format;
    } cases[] = {{1, 0, 512, 1, NULL},         {1, 0, 512, 2000000, NULL},
                 {4, 0, 4096, 5000000, "f32"}, {2, 16, 64, 1000, NULL},
                 {1, 1, 64, 1000, NULL},       {1, 0, 100000, 8000000, "f16"}};
    rf_file *file = open_file();
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        rf_options options = small_options();
        rf_model_plan *plan = NULL;
        rf_plan_info info;
        rf_suggestion suggestion;
        options.slots = cases[c].slots;
        options.ctx = cases[c].ctx;
        options.chunk = cases[c].chunk;
        options.mem_limit = cases[c].limit;
        options.kv_k = options.kv_v = cases[c].format;
        assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_OK);
        rf_model_plan_describe(plan, &info);
        uint64_t total = rf_model_plan_regions(plan)->total_bytes;
        assert_false(info.fits);
        if (info.suggestion_count < 2)
            fail_msg("case %zu: %u suggestions", c, info.suggestion_count);
        for (uint32_t i = 0; i < info.suggestion_count; i++) {
            rf_options other = options;
            uint64_t with = 0;
            assert_true(rf_model_plan_suggestion(plan, i, &suggestion));
            assert_true(suggestion.saves_bytes > 0 && suggestion.cost[0] != '\0');
            other.ctx = info.ctx;
            other.chunk = info.chunk;
            if (!apply(suggestion.option, &other))
                continue;
            fits(file, &other, &with);
            if (total - with != suggestion.saves_bytes)
                fail_msg("case %zu: \"%s\" saves %llu, not %llu", c, suggestion.option,
                         (unsigned long long)(total - with),
                         (unsigned long long)suggestion.saves_bytes);
        }
        assert_false(rf_model_plan_suggestion(plan, info.suggestion_count, &suggestion));
        rf_model_plan_close(plan);
    }
    rf_file_close(file);
}

static void what_fits_gets_no_suggestion(void **state)
{
    (void)state;
    rf_file *file = open_file();
    rf_options options = small_options();
    rf_model_plan *plan = NULL;
    rf_suggestion suggestion;
    assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_OK);
    assert_false(rf_model_plan_suggestion(plan, 0, &suggestion));
    rf_model_plan_close(plan);
    rf_file_close(file);
}

/* ---- options ----------------------------------------------------------------------------- */

static void options_are_resolved_as_they_are_documented(void **state)
{
    (void)state;
    static const struct {
        uint64_t ctx;
        uint32_t chunk;
        const char *profile;
        uint64_t want_ctx;
        uint32_t want_chunk;
        const char *note;
    } cases[] = {
        {RF_CTX_DEFAULT, 0, NULL, 128, 128, NULL}, /* trained on 128 positions */
        {RF_CTX_TRAINED, 0, "server", 128, 128, NULL},
        {100, 0, NULL, 100, 100, NULL},
        {600, 7, "edge", 600, 7, "600"},
        {600, 0, NULL, 600, 256, "128"},
        {512, 0, "mobile-2gb", 512, 64, "512"},
        {1, 0, NULL, 1, 1, NULL},
    };
    rf_file *file = open_file();
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        rf_options options = small_options();
        rf_model_plan *plan = NULL;
        rf_plan_info info;
        options.ctx = cases[c].ctx;
        options.chunk = cases[c].chunk;
        options.profile = cases[c].profile;
        options.logit_rows = 1000;
        assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_OK);
        rf_model_plan_describe(plan, &info);
        assert_int_equal(info.ctx, cases[c].want_ctx);
        assert_int_equal(info.chunk, cases[c].want_chunk);
        assert_int_equal(info.logit_rows, cases[c].want_chunk);
        assert_int_equal(info.note_count, cases[c].note ? 1 : 0);
        assert_int_equal(rf_plan_verify(rf_model_plan_regions(plan), NULL), RF_OK);
        if (cases[c].note)
            assert_non_null(strstr(rf_model_plan_note(plan, 0), cases[c].note));
        assert_null(rf_model_plan_note(plan, info.note_count));
        rf_model_plan_close(plan);
    }
    rf_file_close(file);
}

static void a_wrong_option_is_refused_by_its_name(void **state)
{
    (void)state;
    rf_file *file = open_file();
    rf_options wrong[9];
    static const char *const names[] = {"options", "slots", "slots",   "threads",   "chunk",
                                        "kv_k",    "kv_v",  "profile", "text_bytes"};
    for (size_t i = 0; i < RF_ARRAY_COUNT(wrong); i++)
        wrong[i] = small_options();
    wrong[0].struct_size--;
    wrong[1].slots = 0;
    wrong[2].slots = UINT32_MAX;
    wrong[3].threads = 257;
    wrong[4].ctx = 8;
    wrong[4].chunk = 9;
    wrong[5].kv_k = "f64";
    wrong[6].kv_v = "";
    wrong[7].profile = "toaster";
    wrong[8].text_bytes = UINT64_MAX / 2;
    for (size_t i = 0; i < RF_ARRAY_COUNT(wrong); i++) {
        rf_model_plan *plan = NULL;
        rf_error err = {0};
        rf_status status = rf_plan_make(file, &wrong[i], &plan, &err);
        if (status != RF_ERR_USAGE || strcmp(err.where, names[i]) != 0)
            fail_msg("option %zu: %s at \"%s\"", i, rf_status_name(status), err.where);
        assert_int_equal(rf_plan_make(file, &wrong[i], &plan, NULL), RF_ERR_USAGE);
        assert_null(plan);
    }
    rf_file_close(file);
}

/* Contexts whose bytes leave 64 bits, or whose bytes no machine has. */
static void an_absurd_context_is_no_fit_and_no_crash(void **state)
{
    (void)state;
    static const uint64_t contexts[] = {1ull << 40, 1ull << 50, 1ull << 60, UINT64_MAX - 1};
    rf_file *file = open_file();
    for (size_t i = 0; i < RF_ARRAY_COUNT(contexts); i++) {
        rf_options options = small_options();
        rf_model_plan *plan = NULL;
        rf_plan_info info;
        rf_error err = {0};
        options.ctx = contexts[i];
        rf_status status = rf_plan_make(file, &options, &plan, &err);
        if (status == RF_OK) {
            rf_model_plan_describe(plan, &info);
            assert_false(info.fits);
            rf_model_plan_close(plan);
        } else {
            assert_int_equal(status, RF_ERR_NO_FIT);
            assert_true(err.where[0] != '\0');
        }
    }
    rf_file_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_fits_to_the_byte),
        cmocka_unit_test(a_limit_is_named_and_nothing_is_kept_back_from_it),
        cmocka_unit_test(the_largest_context_fits_and_one_more_does_not),
        cmocka_unit_test(no_context_fits_into_nothing),
        cmocka_unit_test(what_does_not_fit_gets_two_suggestions_that_save_what_they_say),
        cmocka_unit_test(what_fits_gets_no_suggestion),
        cmocka_unit_test(options_are_resolved_as_they_are_documented),
        cmocka_unit_test(a_wrong_option_is_refused_by_its_name),
        cmocka_unit_test(an_absurd_context_is_no_fit_and_no_crash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
