/* tests/unit/test_kv_formats.c: the store in every format: what is planned is what is kept, a ring
 * that wrapped gives the bits of one that never did, and so do any chunks and any order of units.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv_play.h"
#include "plan_rows.h"

/* ---- planned and kept -------------------------------------------------------------------- */

/* Bytes of a row, by the table of formats in kv.h and kv_codec.h. */
static uint64_t expected_row_bytes(const char *format, uint32_t width)
{
    uint32_t power = width & (0u - width); /* largest power of two that divides it */
    uint32_t span32 = RF_MIN(power, 32u), span64 = RF_MIN(power, 64u);
    if (strcmp(format, "f32") == 0)
        return width * 4;
    if (strcmp(format, "f16") == 0 || strcmp(format, "bf16") == 0)
        return width * 2;
    if (strcmp(format, "q8_0") == 0)
        return width / 32 * 34;
    if (strcmp(format, "q4_0") == 0)
        return width / 32 * 18;
    if (strcmp(format, "r8") == 0)
        return width + width / span64 * 2;
    return width * (uint32_t)(format[1] - '0') / 8 + width / span32;
}

static uint64_t row_of_plan(const rf_plan *plan, const char *id)
{
    const rf_plan_row *row = rf_plan_find(plan, id);
    return row ? row->bytes : 0;
}

/* The last row of the last head of the last slot ends where the region ends. */
static void assert_ring_fills_region(const rf_kv *kv, const shape *s, const rf_scope *scope,
                                     const rf_plan *plan)
{
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_plan_row *row = rf_plan_find(plan, side ? "kv.layers[0].v" : "kv.layers[0].k");
        rf_kv_run runs[RF_KV_RUNS_MAX];
        const uint8_t *region = (const uint8_t *)scope->base + row->offset;
        assert_int_equal(rf_kv_window(kv, 0, 0, 0, (rf_kv_side)side, 0, s->capacity, runs), 1);
        assert_ptr_equal(runs[0].rows, region);
        assert_int_equal(rf_kv_window(kv, s->slots - 1, 0, s->kv_heads - 1, (rf_kv_side)side, 0,
                                      s->capacity, runs),
                         1);
        assert_ptr_equal((const uint8_t *)runs[0].rows +
                             s->capacity * rf_kv_row_bytes(kv, 0, (rf_kv_side)side),
                         region + row->bytes);
    }
}

static void assert_planned_is_kept(const shape *s)
{
    static rf_plan_row rows[64];
    rf_plan plan;
    rf_scope scope;
    rf_error err = {0};
    rf_kv *kv = NULL;
    rf_kv_layer layer;
    rf_kv_config config = config_of(s, &layer);
    text t = make_text(s, (uint32_t)s->capacity, 1);
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_kv_plan(&plan, &config, &err), RF_OK);
    assert_int_equal(rf_trace_plan(&plan, 256, &err), RF_OK);
    lay_out(&plan, 0);

    uint64_t heads = s->slots * s->kv_heads, in_all = 0;
    const char *names[2] = {s->k, s->v};
    uint32_t sizes[2] = {s->k_width, s->v_width};
    for (int side = 0; side < 2; side++) {
        uint64_t recent = RF_MIN((s->recent_blocks + 1ull) * 32 + 2 * s->chunk, s->capacity);
        uint64_t row = expected_row_bytes(names[side], sizes[side]);
        uint64_t ring = heads * s->capacity * row;
        uint64_t first = names[side][0] == 'r' ? heads * sizes[side] * 2 : 0;
        recent =
            is_narrow(names[side]) ? heads * recent * expected_row_bytes("r8", sizes[side]) : 0;
        char ids[3][RF_ID_BYTES];
        snprintf(ids[0], sizeof ids[0], "kv.layers[0].%c", "kv"[side]);
        snprintf(ids[1], sizeof ids[1], "kv.layers[0].%c.first", "kv"[side]);
        snprintf(ids[2], sizeof ids[2], "kv.layers[0].%c.recent", "kv"[side]);
        assert_int_equal(row_of_plan(&plan, ids[0]), ring);
        assert_int_equal(row_of_plan(&plan, ids[1]), first);
        assert_int_equal(row_of_plan(&plan, ids[2]), recent);
        in_all += ring + first + recent;
    }
    bool has_mean = s->calibrated && s->k[0] == 'r';
    assert_int_equal(row_of_plan(&plan, "kv.layers[0].calibration"),
                     has_mean ? s->kv_heads * (s->k_width + s->k_width * s->k_width) * 4 : 0);
    assert_true((row_of_plan(&plan, "kv.layers[0].feedback") > 0) == has_mean);
    assert_int_equal(plan.pool_bytes[RF_POOL_KV], in_all);

    assert_int_equal(rf_scope_open(&scope, &plan, RF_SCOPE_MODEL, NULL, false, &err), RF_OK);
    if (rf_kv_open(&scope, &config, &kv, &err) != RF_OK)
        fail_msg("%s/%s: %s: %s", s->k, s->v, err.where, err.what);
    assert_int_equal(rf_scope_seal(&scope, &err), RF_OK);
    calibrate(kv, s);
    assert_int_equal(rf_kv_preallocated_bytes(kv), in_all);
    assert_int_equal(rf_kv_row_bytes(kv, 0, RF_KV_K), expected_row_bytes(s->k, s->k_width));
    assert_int_equal(rf_kv_row_bytes(kv, 0, RF_KV_V), expected_row_bytes(s->v, s->v_width));

    const rf_trace *trace = scope.trace;
    uint64_t emitted = trace->emitted, live = trace->live_bytes[RF_SCOPE_MODEL];
    for (uint32_t slot = 0; slot < s->slots; slot++) {
        for (uint32_t at = 0; at < s->capacity; at += s->chunk) {
            append_rows(kv, s, &t, slot, at, RF_MIN(s->chunk, (uint32_t)s->capacity - at),
                        FORWARDS);
            assert_int_equal(rf_kv_commit(kv, slot, NULL), RF_OK);
        }
    }
    assert_int_equal(trace->emitted, emitted);
    assert_int_equal(trace->live_bytes[RF_SCOPE_MODEL], live);
    assert_ring_fills_region(kv, s, &scope, &plan);
    uint64_t taken = 0, others = 0;
    for (uint32_t i = 0; i < plan.row_count; i++) {
        uint64_t bytes = trace->rows[i].take_count * rows[i].bytes;
        taken += rows[i].pool == RF_POOL_KV ? bytes : 0;
        others += rows[i].pool == RF_POOL_KV ? 0 : bytes;
    }
    assert_int_equal(taken, in_all);
    rf_trace totals;
    rf_kv_close(kv);
    rf_scope_close(&scope, &totals);
    assert_int_equal(totals.freed_bytes[RF_SCOPE_MODEL] - others, in_all);
    assert_int_equal(totals.live_bytes[RF_SCOPE_MODEL], 0);
    free_text(&t);
}

static void what_is_planned_is_what_is_kept_in_every_format_and_width(void **state)
{
    (void)state;
    static const uint64_t capacities[] = {1, 33, 67, 131};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            shape s = shape_with(formats[f], formats[f], (f + w) % 2 == 0);
            s.k_width = s.v_width = s.dims = widths[w];
            s.capacity = capacities[(f + w) % RF_ARRAY_COUNT(capacities)];
            s.chunk = (uint32_t)RF_MIN(s.capacity, 5u + w);
            s.slots = (uint32_t)(1 + w % 3);
            s.recent_blocks = (uint32_t)(w % 4);
            if (!is_blocked(formats[f]) || widths[w] % 32 == 0)
                assert_planned_is_kept(&s);
        }
    }
    for (size_t m = 0; m < RF_ARRAY_COUNT(mixes); m++) {
        shape s = shape_with(mixes[m][0], mixes[m][1], true);
        s.v_width = 96;
        s.capacity = 131;
        s.slots = 2;
        assert_planned_is_kept(&s);
    }
}

static void a_width_without_whole_blocks_is_refused(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t width = 0; width <= 264; width++) {
            for (int side = 0; side < 2; side++) {
                shape s = shape_with(formats[f], formats[f], false);
                rf_plan plan;
                rf_kv_layer layer;
                rf_kv_config config = config_of(&s, &layer);
                rf_error err = {0};
                *(side ? &layer.v_width : &layer.k_width) = width;
                bool is_whole = width && width % (is_blocked(formats[f]) ? 32 : 8) == 0;
                rf_plan_init(&plan, NULL, 0);
                assert_int_equal(rf_kv_plan(&plan, &config, &err), is_whole ? RF_OK : RF_ERR_USAGE);
                if (!is_whole)
                    assert_string_equal(err.where, side ? "kv.layers[0].v" : "kv.layers[0].k");
            }
        }
    }
}

/* ---- events ------------------------------------------------------------------------------ */

static void assert_events(const char *format, bool calibrated, const char *const *suffixes)
{
    static rf_plan_row rows[64];
    rf_plan plan;
    rf_scope scope;
    rf_error err = {0};
    rf_kv *kv = NULL;
    shape s = shape_with(format, format, calibrated);
    rf_kv_layer one, layers[3];
    rf_kv_config config = config_of(&s, &one);
    layers[0] = layers[1] = layers[2] = one;
    layers[1].kv_heads = 0;
    config.layers = layers;
    config.layer_count = 3;
    fill_statistics(&s);
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_kv_plan(&plan, &config, &err), RF_OK);
    assert_int_equal(rf_trace_plan(&plan, 256, &err), RF_OK);
    lay_out(&plan, 0);
    assert_int_equal(rf_scope_open(&scope, &plan, RF_SCOPE_MODEL, NULL, false, &err), RF_OK);
    assert_int_equal(rf_kv_open(&scope, &config, &kv, &err), RF_OK);
    uint32_t found[2] = {0};
    rf_event event;
    for (uint64_t i = 0; rf_trace_event(scope.trace, i, &event); i++) {
        const char *id = rows[event.row].id;
        char expected[RF_ID_BYTES];
        if (strncmp(id, "kv.layers", 9) != 0)
            continue;
        uint32_t layer = (uint32_t)(id[10] - '0');
        assert_true(layer == 0 || layer == 2);
        const char *suffix = suffixes[found[layer / 2]++];
        assert_non_null(suffix);
        snprintf(expected, sizeof expected, "kv.layers[%u].%s", layer, suffix);
        assert_string_equal(id, expected);
        assert_int_equal(event.kind, RF_EVENT_ALLOC);
        assert_int_equal(event.detail, RF_SCOPE_MODEL);
        assert_int_equal(event.bytes, rows[event.row].bytes);
        bool is_table = strchr(suffix, 'f') == NULL && strlen(suffix) > 8;
        is_table |= strcmp(suffix, "feedback") == 0;
        assert_int_equal(rows[event.row].pool, is_table ? RF_POOL_TABLES : RF_POOL_KV);
    }
    assert_null(suffixes[found[0]]);
    assert_null(suffixes[found[1]]);
    rf_kv_close(kv);
    rf_scope_close(&scope, NULL);
}

static void a_layer_is_allocated_by_its_parts_and_no_other(void **state)
{
    (void)state;
    static const char *const bare[] = {"k", "v", NULL};
    static const char *const with_first[] = {"k", "v", "k.first", "v.first", NULL};
    static const char *const calibrated_r8[] = {"k",           "v",        "k.first", "v.first",
                                                "calibration", "feedback", NULL};
    static const char *const narrow[] = {"k",        "v",        "k.first", "v.first",
                                         "k.recent", "v.recent", NULL};
    static const char *const all[] = {"k",        "v",           "k.first",  "v.first", "k.recent",
                                      "v.recent", "calibration", "feedback", NULL};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        bool is_r8 = strcmp(formats[f], "r8") == 0;
        if (is_narrow(formats[f])) {
            assert_events(formats[f], false, narrow);
            assert_events(formats[f], true, all);
        } else {
            assert_events(formats[f], false, is_r8 ? with_first : bare);
            assert_events(formats[f], true, is_r8 ? calibrated_r8 : bare);
        }
    }
}

/* ---- the same bits ----------------------------------------------------------------------- */

/* A store that never wraps over the positions that the ring shows: as many rows as positions, and
 * a window of what the ring lets a step see. */
static shape linear_of(const shape *ring, uint32_t positions)
{
    shape s = *ring;
    uint32_t seen = (uint32_t)ring->capacity - (ring->chunk - 1) - ring->sinks;
    s.window = ring->window ? RF_MIN(ring->window, seen) : seen;
    s.endless = false;
    s.capacity = s.chunk = positions;
    return s;
}

static void assert_wrapped_is_linear(const shape *ring, uint32_t positions)
{
    static const uint32_t chunks[] = {7, 1, 16, 3};
    static const uint32_t long_chunks[] = {64};
    playing p = {chunks, RF_ARRAY_COUNT(chunks), FORWARDS}, fast = {long_chunks, 1, FORWARDS};
    text t = make_text(ring, positions, 5);
    shape linear = linear_of(ring, positions);
    float *expected = play(&linear, &t, &fast), *got = play(ring, &t, &p);
    assert_same(ring, got, expected, 0, positions, "wrapped");
    free(expected);
    free(got);
    free_text(&t);
}

static void a_ring_that_wrapped_three_times_is_one_that_never_did(void **state)
{
    (void)state;
    static const struct {
        uint64_t capacity;
        uint32_t chunk, sinks, window, positions;
    } rings[] = {{150, 16, 0, 0, 700},  {150, 16, 4, 0, 700}, {61, 16, 0, 0, 300},
                 {61, 16, 4, 0, 300},   {53, 16, 9, 0, 260},  {150, 16, 4, 20, 700},
                 {300, 16, 130, 0, 900}};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats) + RF_ARRAY_COUNT(mixes); f++) {
        for (size_t r = 0; r < RF_ARRAY_COUNT(rings); r++) {
            bool is_mix = f >= RF_ARRAY_COUNT(formats);
            const char *const *mix = mixes[is_mix ? f - RF_ARRAY_COUNT(formats) : 0];
            for (int calibrated = 0; calibrated < 2; calibrated++) {
                shape s = shape_with(is_mix ? mix[0] : formats[f], is_mix ? mix[1] : formats[f],
                                     calibrated);
                s.kv_heads = s.group = 1;
                s.k_width = s.dims = 32;
                s.v_width = 32;
                s.endless = true;
                s.capacity = rings[r].capacity;
                s.chunk = rings[r].chunk;
                s.sinks = rings[r].sinks;
                s.window = rings[r].window;
                if (calibrated && s.k[0] != 'r')
                    continue;
                assert_wrapped_is_linear(&s, rings[r].positions);
            }
        }
    }
}

/* The window's own ring, in a store that does not wrap as a whole, with sinks beside it. */
static void a_window_with_sinks_is_one_that_never_wrapped(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t sinks = 0; sinks <= 40; sinks += 20) {
            shape s = shape_with(formats[f], formats[f], formats[f][0] == 'r');
            s.kv_heads = 1;
            s.window = 16;
            s.sinks = sinks;
            s.chunk = 16;
            s.capacity = 200;
            assert_wrapped_is_linear(&s, 200);
        }
    }
}

static void the_polar_formats_wrap_and_chunk_like_the_others(void **state)
{
    (void)state;
    for (size_t f = 0; f <= RF_ARRAY_COUNT(polar); f++) {
        bool is_mix = f == RF_ARRAY_COUNT(polar);
        shape s = shape_with(is_mix ? "r4" : polar[f], is_mix ? "turbo3q" : polar[f], is_mix);
        s.kv_heads = s.group = 1;
        s.k_width = s.v_width = s.dims = 128;
        s.endless = true;
        s.capacity = 61;
        s.chunk = 16;
        s.sinks = f % 2 ? 4 : 0;
        assert_wrapped_is_linear(&s, 300);
        s.k = polar[0];
        s.v = "f16";
        s.calibrated = false;
        assert_wrapped_is_linear(&s, 300);
    }
}

static void any_chunks_and_any_order_of_units_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 7, 32, 33, 64};
    static const uint32_t mixed[] = {1, 64, 5, 33, 32, 7};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats) + RF_ARRAY_COUNT(mixes); f++) {
        bool is_mix = f >= RF_ARRAY_COUNT(formats);
        const char *const *mix = mixes[is_mix ? f - RF_ARRAY_COUNT(formats) : 0];
        for (int calibrated = 0; calibrated < 2; calibrated++) {
            shape s =
                shape_with(is_mix ? mix[0] : formats[f], is_mix ? mix[1] : formats[f], calibrated);
            s.capacity = 230;
            s.k_width = s.dims = is_mix ? 96 : 64;
            s.v_width = is_mix ? 64 : 96;
            s.interleaved = f % 2;
            s.recent_blocks = (uint32_t)(f % 3);
            s.group = f % 2 ? 3 : 1;
            text t = make_text(&s, 230, 9 + f);
            float *expected = play(&s, &t, NULL);
            for (size_t n = 0; n <= RF_ARRAY_COUNT(lengths); n++) {
                playing p = {&lengths[n], 1, (unit_order)(n % 3)};
                if (n == RF_ARRAY_COUNT(lengths))
                    p = (playing){mixed, RF_ARRAY_COUNT(mixed), IN_TWO_PARTS};
                float *got = play(&s, &t, &p);
                assert_same(&s, got, expected, 0, t.positions, "chunks");
                free(got);
            }
            free(expected);
            free_text(&t);
        }
    }
}

static void scalar_code_gives_the_same_bits(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.k_width = s.dims = widths[w];
            s.v_width = widths[RF_ARRAY_COUNT(widths) - 1 - w];
            if (is_blocked(formats[f]) && (s.k_width % 32 || s.v_width % 32))
                continue;
            s.recent_blocks = 0;
            text t = make_text(&s, 70, 3 + w);
            float *expected = play(&s, &t, NULL), *got = new_floats(70 * row_floats(&s));
            rf_kv *kv = open_store(&s);
            rf_kv_set_cpu(kv, RF_CPU_SCALAR);
            play_part(kv, &s, &t, 0, 0, 70, NULL, got);
            rf_kv_close(kv);
            assert_same(&s, got, expected, 0, 70, "scalar");
            free(got);
            free(expected);
            free_text(&t);
        }
    }
}

/* What an adapter event says: rows that are expanded, the sinks among them. */
static void widened_bytes_are_those_of_the_positions_that_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *k, *v;
        uint32_t bytes; /* of a position of a head: widths 64 and 32 */
    } cases[] = {{"f32", "f32", 0},    {"f16", "f16", 0},      {"r8", "r8", 0},
                 {"r4", "r4", 96},     {"r4", "f16", 64},      {"q8_0", "r3", 32},
                 {"bf16", "q4_0", 32}, {"f16", "turbo4q", 128}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        for (uint32_t sinks = 0; sinks <= 4; sinks += 4) {
            shape s = shape_with(cases[c].k, cases[c].v, false);
            s.v_width = 32;
            s.sinks = sinks;
            s.window = 30;
            rf_kv *kv = open_store(&s);
            rf_kv_attend job = {.heads = 4, .first_position = 100, .token_count = 7};
            uint32_t read = 100 + 7 - (100 + 1 - 30) + sinks;
            assert_int_equal(rf_kv_attend_widened_bytes(kv, &job), read * cases[c].bytes * 2);
            job.first_position = 2;
            assert_int_equal(rf_kv_attend_widened_bytes(kv, &job), 9 * cases[c].bytes * 2);
            rf_kv_close(kv);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_planned_is_what_is_kept_in_every_format_and_width),
        cmocka_unit_test(a_width_without_whole_blocks_is_refused),
        cmocka_unit_test(a_layer_is_allocated_by_its_parts_and_no_other),
        cmocka_unit_test(a_ring_that_wrapped_three_times_is_one_that_never_did),
        cmocka_unit_test(a_window_with_sinks_is_one_that_never_wrapped),
        cmocka_unit_test(the_polar_formats_wrap_and_chunk_like_the_others),
        cmocka_unit_test(any_chunks_and_any_order_of_units_give_the_same_bits),
        cmocka_unit_test(scalar_code_gives_the_same_bits),
        cmocka_unit_test(widened_bytes_are_those_of_the_positions_that_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
