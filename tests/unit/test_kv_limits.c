/* tests/unit/test_kv_limits.c: the store in every format, given what cannot be kept, and taken
 * back: what is refused or forgotten leaves nothing behind.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv_play.h"

/* ---- bad input --------------------------------------------------------------------------- */

static void what_cannot_be_kept_is_refused_and_nothing_is_touched(void **state)
{
    (void)state;
    const float bad[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff(), 1e30f, -65520.0f};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.capacity = 80;
        s.chunk = 8;
        s.endless = true;
        text t = make_text(&s, 150, 2);
        float *out = new_floats(150 * row_floats(&s));
        rf_kv *kv = open_store(&s);
        play_part(kv, &s, &t, 0, 0, 126, NULL, out);
        uint8_t *before = malloc(kv->own_bytes);
        assert_non_null(before);
        memcpy(before, kv, kv->own_bytes);
        bool is_wide = strcmp(s.k, "f32") == 0 || strcmp(s.k, "bf16") == 0;
        for (size_t b = 0; b < RF_ARRAY_COUNT(bad) - (is_wide ? 2 : 0); b++) {
            for (uint32_t n = 0; n < 4; n++) {
                uint64_t last = 5 * 2 * 64 - 1; /* of five tokens, of which the third begins 128 */
                float *rows = n < 2 ? t.k + 126 * 128 : t.v + 126 * 128;
                float *element = rows + (n % 2 ? last : 0), kept_value = *element;
                rf_error err = {0};
                *element = bad[b];
                assert_int_equal(
                    rf_kv_append(kv, 0, 0, t.k + 126 * 128, 128, t.v + 126 * 128, 128, 5, &err),
                    RF_ERR_RUNTIME);
                assert_string_equal(err.where, n < 2 ? "kv.layers[0].k" : "kv.layers[0].v");
                *element = kept_value;
                assert_memory_equal(before, kv, kv->own_bytes);
            }
        }
        free(before);
        free(out);
        rf_kv_close(kv);
        free_text(&t);
    }
}

static void the_largest_value_of_a_format_is_taken(void **state)
{
    (void)state;
    static const struct {
        const char *format;
        float largest, beyond;
    } cases[] = {{"f32", 0x1.fffffep127f, __builtin_inff()},
                 {"bf16", 0x1.fefffep127f, 0x1.ffp127f}, /* the tie goes to infinity */
                 {"f16", 65519.996f, 65520.0f},
                 {"r8", 65519.996f, 65520.0f},
                 {"r4", 65519.996f, 65520.0f},
                 {"q8_0", 65519.996f, 65520.0f},
                 {"q4_0", 65519.996f, 65520.0f}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        shape s = shape_with(cases[c].format, cases[c].format, false);
        s.kv_heads = s.group = 1;
        text t = make_text(&s, 40, 2);
        float *out = new_floats(40 * 64);
        rf_kv *kv = open_store(&s);
        for (uint32_t i = 0; i < 64; i++) /* all of one size: the rotated peak is 8 times it */
            t.v[i] = t.v[37 * 64 + i] = i % 2 ? -cases[c].largest : cases[c].largest;
        play_part(kv, &s, &t, 0, 0, 40, NULL, out);
        /* Sums of the largest floats overflow, of halves they do not. */
        for (uint32_t i = 0; c > 1 && i < 40 * 64; i++)
            assert_true(isfinite(out[i]));
        t.v[13] = cases[c].beyond;
        assert_int_equal(rf_kv_append(kv, 0, 0, t.k, 64, t.v, 64, 1, NULL), RF_ERR_RUNTIME);
        free(out);
        rf_kv_close(kv);
        free_text(&t);
    }
}

static void zeros_and_denormals_are_kept_without_a_nan(void **state)
{
    (void)state;
    static const float sizes[] = {0.0f, -0.0f, 1e-45f, 1e-40f, 0x1p-126f, 1e-30f, 0x1p-24f};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t n = 0; n < RF_ARRAY_COUNT(sizes) * 2; n++) {
            shape s = shape_with(formats[f], formats[f], n % 2);
            s.kv_heads = 1;
            text t = make_text(&s, 120, 2);
            memset(means, 0, sizeof means);
            for (uint32_t i = 0; i < 120 * 64; i++) {
                t.k[i] = sizes[n / 2] * (t.k[i] < 0 ? -1.0f : 1.0f);
                t.v[i] = sizes[n / 2] * (t.v[i] < 0 ? -1.0f : 1.0f);
            }
            float *out = play(&s, &t, NULL);
            for (uint64_t i = 0; i < 120 * row_floats(&s); i++) {
                if (!(fabsf(out[i]) <= 9 * fabsf(sizes[n / 2])))
                    fail_msg("%s, values of %g: element %llu is %g", s.k, (double)sizes[n / 2],
                             (unsigned long long)i, (double)out[i]);
            }
            free(out);
            free_text(&t);
        }
    }
}

static void statistics_that_cannot_be_are_refused(void **state)
{
    (void)state;
    shape s = shape_with("r4", "r4", true);
    text t = make_text(&s, 8, 1);
    rf_kv *kv = open_store(&s);
    rf_error err = {0};
    rf_kv_statistics good = {means[0], moments[0], RF_KV_BASE_LIMIT, -RF_KV_BASE_LIMIT};
    rf_kv_statistics statistics = good;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_OK);
    assert_int_equal(rf_kv_set_calibration(kv, 1, 0, &good, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_set_calibration(kv, 0, 2, &good, &err), RF_ERR_USAGE);
    statistics.k_base = RF_KV_BASE_LIMIT + 1;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &statistics, &err), RF_ERR_USAGE);
    statistics = good;
    statistics.v_base = -128;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &statistics, &err), RF_ERR_USAGE);
    float kept_value = means[0][63];
    means[0][63] = __builtin_nanf("");
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    means[0][63] = kept_value;
    kept_value = moments[0][64 * 64 - 1];
    moments[0][64 * 64 - 1] = __builtin_inff();
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    moments[0][64 * 64 - 1] = kept_value;
    append_rows(kv, &s, &t, 0, 0, 8, FORWARDS);
    assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_OK);
    /* Rows that are there were made with other means. */
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_clear(kv, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_OK);
    rf_kv_close(kv);
    free_text(&t);
}

static void a_rope_that_does_not_fit_the_keys_is_refused(void **state)
{
    (void)state;
    static const struct {
        uint32_t dims;
        bool calibrated, has_frequencies;
        rf_status plan, open;
    } cases[] = {{66, true, true, RF_ERR_USAGE, RF_ERR_USAGE},
                 {63, true, true, RF_ERR_USAGE, RF_ERR_USAGE},
                 {64, true, false, RF_OK, RF_ERR_USAGE}, /* a plan turns nothing */
                 {64, true, true, RF_OK, RF_OK},
                 {0, true, false, RF_OK, RF_OK},
                 {66, false, false, RF_OK, RF_OK}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        shape s = shape_with("r4", "r4", cases[c].calibrated);
        rf_plan plan;
        rf_kv_layer layer;
        rf_error err = {0};
        rf_kv *kv = NULL;
        s.dims = cases[c].dims;
        rf_kv_config config = config_of(&s, &layer);
        if (!cases[c].has_frequencies)
            config.rope.frequencies = NULL;
        rf_plan_init(&plan, NULL, 0);
        assert_int_equal(rf_kv_plan(&plan, &config, &err), cases[c].plan);
        assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), cases[c].open);
        if (cases[c].open != RF_OK)
            assert_string_equal(err.where, "kv.rope");
        rf_kv_close(kv);
    }
}

/* A window keeps the rings small, however many positions there are; what is kept of their blocks
 * is not. */
static void bookkeeping_that_leaves_64_bits_is_refused(void **state)
{
    (void)state;
    shape s = shape_with("r8", "r8", true);
    s.k_width = s.v_width = s.dims = 8;
    s.slots = 1u << 31;
    s.capacity = 1ull << 48;
    s.window = s.chunk = 1;
    for (int absurd = 1; absurd >= 0; absurd--) {
        rf_plan plan;
        rf_kv_layer layer;
        rf_error err = {0};
        rf_kv *kv = NULL;
        rf_kv_config config = config_of(&s, &layer);
        rf_plan_init(&plan, NULL, 0);
        assert_int_equal(rf_kv_plan(&plan, &config, &err), absurd ? RF_ERR_NO_FIT : RF_OK);
        assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), RF_ERR_NO_FIT);
        assert_string_equal(err.where, absurd ? "kv.state" : "reserve");
        s.slots = 1u << 16; /* large, and a number */
    }
}

/* ---- scratch of workers ------------------------------------------------------------------- */

static uint64_t state_bytes(const rf_kv_config *config)
{
    rf_plan_row rows[16];
    rf_plan plan;
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_kv_plan(&plan, config, NULL), RF_OK);
    return rf_plan_find(&plan, "kv.state")->bytes;
}

static void a_store_without_scratch_works_in_parts_alone(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        const playing in_parts = {.order = IN_TWO_PARTS};
        text t = make_text(&s, 140, 6);
        float *expected = play(&s, &t, NULL), *got = new_floats(140 * row_floats(&s));
        rf_kv_layer layer;
        rf_kv_config config = config_of(&s, &layer);
        rf_error err = {0};
        rf_kv *kv = NULL;
        uint64_t with = state_bytes(&config);
        config.no_scratch = true;
        assert_int_equal(with - state_bytes(&config), rf_kv_scratch_bytes(64, 64, 64));
        assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), RF_OK);
        calibrate(kv, &s);
        play_part(kv, &s, &t, 0, 0, 140, &in_parts, got);
        assert_same(&s, got, expected, 0, 140, "in parts");

        rf_kv_queries queries = {
            .q = t.q, .heads = 4, .count = 1, .first_position = 139, .scale = 1.0f};
        memset(got, 7, row_floats(&s) * sizeof *got);
        memcpy(expected, got, row_floats(&s) * sizeof *got);
        assert_int_equal(rf_kv_append(kv, 0, 0, t.k, 128, t.v, 128, 1, &err), RF_ERR_USAGE);
        assert_string_equal(err.where, "kv.append");
        assert_int_equal(rf_kv_attention(kv, 0, 0, &queries, got, 256, &err), RF_ERR_USAGE);
        assert_string_equal(err.where, "kv.attention");
        assert_int_equal(rf_kv_append(kv, 0, 0, t.k, 128, t.v, 128, 1, NULL), RF_ERR_USAGE);
        assert_memory_equal(got, expected, row_floats(&s) * sizeof *got);
        assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_ERR_USAGE); /* nothing was appended */
        assert_int_equal(rf_kv_length(kv, 0), 140);
        rf_kv_close(kv);
        free(got);
        free(expected);
        free_text(&t);
    }
}

/* ---- going back -------------------------------------------------------------------------- */

/* At every step a chunk of other rows first, which is forgotten again. */
static void an_aborted_append_changes_nothing_that_is_read(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t sinks = 0; sinks <= 4; sinks += 4) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.endless = true;
            s.capacity = 70;
            s.chunk = 9;
            s.sinks = sinks;
            text t = make_text(&s, 400, 6), other = make_text(&s, 400, 60);
            float *expected = play(&s, &t, NULL), *got = new_floats(400 * row_floats(&s));
            rf_kv *kv = open_store(&s);
            for (uint32_t at = 0; at < 390; at++) {
                append_rows(kv, &s, &other, 0, at, 9, FORWARDS);
                rf_kv_abort(kv, 0);
                play_part(kv, &s, &t, 0, at, at + 1, NULL, got);
            }
            assert_same(&s, got, expected, 0, 390, "after aborts");
            rf_kv_close(kv);
            free(got);
            free(expected);
            free_text(&t);
            free_text(&other);
        }
    }
}

static void append_part(rf_kv *kv, const shape *s, const text *t, uint32_t from, uint32_t to)
{
    for (uint32_t at = from; at < to; at += RF_MIN(to - at, s->chunk)) {
        append_rows(kv, s, t, 0, at, RF_MIN(to - at, s->chunk), FORWARDS);
        assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_OK);
    }
}

/* Goes back from 200 to every length; where that is allowed the rest is played again. */
static void going_back_is_refused_where_recent_rows_are_gone_and_else_exact(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t window = 0; window <= 40; window += 20) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.capacity = 256;
            s.chunk = 8;
            s.recent_blocks = 1;
            s.window = window;
            s.group = 1;
            s.sinks = window == 20 ? 3 : 0;
            text t = make_text(&s, 232, 6), other = make_text(&s, 232, 61);
            float *expected = play(&s, &t, NULL), *got = new_floats(232 * row_floats(&s));
            for (uint32_t length = 1; length<200; length += length> 120 ? 1 : 9) {
                rf_kv *kv = open_store(&s);
                rf_error err = {0};
                append_part(kv, &s, &t, 0, length);
                append_part(kv, &s, &other, length, 200);
                memcpy(got, expected, length * row_floats(&s) * sizeof *got);
                rf_status status = rf_kv_truncate(kv, 0, length, &err);
                uint32_t seen = window && length + 1 > window ? length + 1 - window : 0;
                uint32_t rows = window ? window + 8 : 256; /* that turn over */
                uint32_t recent_rows = 64 + 16 < rows || s.sinks ? 64 + 16 : rows;
                seen = RF_MAX(seen, s.sinks);
                uint32_t recent = length / 32 < 1 ? 0 : (length / 32 - 1) * 32;
                bool is_there = rows >= 200 || seen >= 200 - rows;
                if (is_narrow(s.k) && recent >= s.sinks)
                    recent = RF_MAX(recent, seen);
                if (is_narrow(s.k)) /* while the sinks are near they are among the recent rows */
                    is_there &= recent + recent_rows >= 200;
                assert_int_equal(status, is_there ? RF_OK : RF_ERR_USAGE);
                assert_true(length < 192 || status == RF_OK); /* a chunk back is always there */
                assert_int_equal(rf_kv_length(kv, 0), is_there ? length : 200);
                if (is_there) {
                    play_part(kv, &s, &t, 0, length, 232, NULL, got);
                    assert_same(&s, got, expected, 0, 232, "went back");
                }
                rf_kv_close(kv);
            }
            free(got);
            free(expected);
            free_text(&t);
            free_text(&other);
        }
    }
}

/* A ring with sinks that has not turned over goes back to anywhere. */
static void sinks_do_not_keep_a_full_store_from_going_back(void **state)
{
    (void)state;
    shape s = shape_with("f16", "f16", false);
    s.sinks = 4;
    s.capacity = 64;
    text t = make_text(&s, 64, 6);
    for (uint32_t length = 1; length < 64; length++) {
        rf_kv *kv = open_store(&s);
        append_part(kv, &s, &t, 0, 64);
        assert_int_equal(rf_kv_truncate(kv, 0, length, NULL), RF_OK);
        rf_kv_close(kv);
    }
    free_text(&t);
}

/* A slot that gave up a part of the prefix that it shares goes on with rows of its own. */
static void a_holder_that_goes_back_into_its_prefix_has_its_own_rows(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.slots = 2;
        s.capacity = 130;
        text t = make_text(&s, 130, 6), other = make_text(&s, 130, 8);
        memcpy(other.k, t.k, 90 * 2 * 64 * sizeof(float)); /* they part at 90 */
        memcpy(other.v, t.v, 90 * 2 * 64 * sizeof(float));
        float *expected = play(&s, &other, NULL), *got = play(&s, &t, NULL),
              *owner = play(&s, &t, NULL);
        rf_kv *kv = open_store(&s);
        play_part(kv, &s, &t, 0, 0, 120, NULL, owner);
        assert_int_equal(rf_kv_share_prefix(kv, 0, 1, 100, NULL), RF_OK);
        assert_int_equal(rf_kv_truncate(kv, 1, 90, NULL), RF_OK);
        play_part(kv, &s, &other, 1, 90, 130, NULL, got);
        assert_same(&s, got, expected, 90, 130, "a holder that went back");
        memcpy(got, owner, 120 * row_floats(&s) * sizeof *got);
        play_part(kv, &s, &t, 0, 120, 130, NULL, got);
        assert_same(&s, got, owner, 120, 130, "the owner");
        rf_kv_close(kv);
        free(owner);
        free(got);
        free(expected);
        free_text(&t);
        free_text(&other);
    }
}

static void slots_do_not_know_each_other(void **state)
{
    (void)state;
    /* Far apart, so that what one keeps of its blocks would lie upon what another keeps. */
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.endless = true;
        s.capacity = 90;
        s.chunk = 8;
        s.slots = 3;
        text t[3];
        float *expected[3], *got[3];
        for (uint32_t slot = 0; slot < 3; slot++) {
            t[slot] = make_text(&s, 600, 70 + slot);
            expected[slot] = play(&s, &t[slot], NULL);
            got[slot] = new_floats(600 * row_floats(&s));
        }
        rf_kv *kv = open_store(&s);
        uint32_t at[3] = {0};
        for (uint32_t step = 0; at[0] < 600 || at[1] < 600 || at[2] < 600; step++) {
            uint32_t slot = step * 7 % 3,
                     to = RF_MIN(at[slot] + 1 + step % 5 * (slot * 3 + 1), 600u);
            play_part(kv, &s, &t[slot], slot, at[slot], to, NULL, got[slot]);
            at[slot] = to;
        }
        assert_int_equal(
            rf_kv_clear(kv, 1, NULL),
            RF_OK); /* and once more, from the beginning, in the middle of the others */
        play_part(kv, &s, &t[2], 1, 0, 600, NULL, got[1]);
        assert_same(&s, got[1], expected[2], 0, 600, "a slot used again");
        assert_same(&s, got[0], expected[0], 0, 600, "slot 0");
        assert_same(&s, got[2], expected[2], 0, 600, "slot 2");
        assert_int_equal(rf_kv_length(kv, 0), 600);
        rf_kv_close(kv);
        for (uint32_t slot = 0; slot < 3; slot++) {
            free(expected[slot]);
            free(got[slot]);
            free_text(&t[slot]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_cannot_be_kept_is_refused_and_nothing_is_touched),
        cmocka_unit_test(the_largest_value_of_a_format_is_taken),
        cmocka_unit_test(zeros_and_denormals_are_kept_without_a_nan),
        cmocka_unit_test(statistics_that_cannot_be_are_refused),
        cmocka_unit_test(a_rope_that_does_not_fit_the_keys_is_refused),
        cmocka_unit_test(bookkeeping_that_leaves_64_bits_is_refused),
        cmocka_unit_test(a_store_without_scratch_works_in_parts_alone),
        cmocka_unit_test(an_aborted_append_changes_nothing_that_is_read),
        cmocka_unit_test(going_back_is_refused_where_recent_rows_are_gone_and_else_exact),
        cmocka_unit_test(sinks_do_not_keep_a_full_store_from_going_back),
        cmocka_unit_test(a_holder_that_goes_back_into_its_prefix_has_its_own_rows),
        cmocka_unit_test(slots_do_not_know_each_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
