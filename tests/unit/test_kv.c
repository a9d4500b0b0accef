/* tests/unit/test_kv.c: the KV store: what was planned is what is taken, what was appended is found
 * again, and what is refused leaves the rings as they were. Attention has a file of its own.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "emulated.h"
#include "kv/kv.h"
#include "plan_rows.h"

#include <stdlib.h>

/* ---- a store and its scope --------------------------------------------------------------- */

#define LAYERS_MAX 8u
#define EVENTS     256u

typedef struct fixture {
    rf_plan_row rows[64];
    rf_plan plan;
    rf_scope scope;
    rf_kv_layer layers[LAYERS_MAX];
    rf_kv_config config;
    rf_kv *kv;
    bool has_scope;
} fixture;

static void open_store(fixture *f, bool with_scope)
{
    rf_error err = {0};
    f->has_scope = with_scope;
    f->config.layers = f->layers;
    if (with_scope) {
        rf_plan_init(&f->plan, f->rows, RF_ARRAY_COUNT(f->rows));
        assert_int_equal(rf_kv_plan(&f->plan, &f->config, &err), RF_OK);
        assert_int_equal(rf_trace_plan(&f->plan, EVENTS, &err), RF_OK);
        lay_out(&f->plan, 0);
        assert_int_equal(rf_scope_open(&f->scope, &f->plan, RF_SCOPE_MODEL, NULL, false, &err),
                         RF_OK);
    }
    rf_status status = rf_kv_open(with_scope ? &f->scope : NULL, &f->config, &f->kv, &err);
    if (status != RF_OK)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    if (with_scope)
        assert_int_equal(rf_scope_seal(&f->scope, &err), RF_OK);
}

static void close_store(fixture *f)
{
    rf_kv_close(f->kv);
    if (f->has_scope)
        rf_scope_close(&f->scope, NULL);
}

/* layer_count layers of 2 heads x 8 elements, windows[i] positions of which are seen. */
static fixture make(uint32_t layer_count, const uint32_t *windows, uint64_t capacity,
                    uint32_t chunk, uint32_t slots, const char *format)
{
    fixture f = {0};
    rf_kv_config_init(&f.config);
    f.config.layer_count = layer_count;
    f.config.slots = slots;
    f.config.capacity = capacity;
    f.config.chunk = chunk;
    for (uint32_t i = 0; i < layer_count; i++) {
        f.layers[i] = (rf_kv_layer){.kv_heads = 2,
                                    .k_width = 8,
                                    .v_width = 8,
                                    .window = windows ? windows[i] : 0,
                                    .k_format = format,
                                    .v_format = format};
    }
    return f;
}

/* ---- values ------------------------------------------------------------------------------ */

#define STRIDE_MAX 128u
#define TOKENS_MAX 64u

typedef struct written { /* what tells one value from all others; salt: a second writing */
    uint32_t slot, layer, side, salt;
} written;

/* Multiples of 1/8 up to 128: exact in every format that stores halves. */
static float value_of(written w, uint32_t head, uint64_t position, uint32_t element)
{
    uint64_t hash = w.slot * 11u + w.layer * 101u + w.side * 1009u + w.salt * 7919u + head * 131u;
    hash = (hash + position * 104729u + element * 31u) * 0x9E3779B97F4A7C15u;
    return (float)((int)(hash >> 53) - 1024) / 8.0f;
}

/* Rows of one side with a gap between tokens that must never be looked at. */
static void fill(const fixture *f, written w, uint64_t position, uint32_t count, float *out)
{
    const rf_kv_layer *layer = &f->layers[w.layer];
    uint32_t width = w.side == RF_KV_K ? layer->k_width : layer->v_width;
    assert_true(layer->kv_heads * width < STRIDE_MAX);
    for (uint32_t i = 0; i < count * STRIDE_MAX; i++)
        out[i] = __builtin_nanf("");
    for (uint32_t t = 0; t < count; t++) {
        for (uint32_t i = 0; i < layer->kv_heads * width; i++)
            out[t * STRIDE_MAX + i] = value_of(w, i / width, position + t, i % width);
    }
}

static rf_status append(fixture *f, uint32_t slot, uint32_t layer, uint32_t count, uint32_t salt,
                        rf_error *err)
{
    static float keys[TOKENS_MAX * STRIDE_MAX], values[TOKENS_MAX * STRIDE_MAX];
    uint64_t position = rf_kv_length(f->kv, slot);
    assert_true(count <= TOKENS_MAX);
    if (layer < f->config.layer_count) {
        fill(f, (written){slot, layer, RF_KV_K, salt}, position, count, keys);
        fill(f, (written){slot, layer, RF_KV_V, salt}, position, count, values);
    }
    return rf_kv_append(f->kv, slot, layer, keys, STRIDE_MAX, values, STRIDE_MAX, count, err);
}

static void append_all(fixture *f, uint32_t slot, uint32_t count, uint32_t salt)
{
    for (uint32_t layer = 0; layer < f->config.layer_count; layer++) {
        if (f->layers[layer].kv_heads > 0)
            assert_int_equal(append(f, slot, layer, count, salt, NULL), RF_OK);
    }
    assert_int_equal(rf_kv_commit(f->kv, slot, NULL), RF_OK);
}

static float stored(const fixture *f, uint32_t layer, rf_kv_side side, const void *row,
                    uint32_t element)
{
    const char *format = side == RF_KV_K ? f->layers[layer].k_format : f->layers[layer].v_format;
    if (strcmp(format, "f16") == 0) {
        uint16_t half;
        memcpy(&half, (const uint8_t *)row + element * sizeof half, sizeof half);
        return rf_f16_to_f32(half);
    }
    float value;
    memcpy(&value, (const uint8_t *)row + element * sizeof value, sizeof value);
    return value;
}

/* Every element of positions [from, to), read through the runs of the window. */
static void assert_side_holds(const fixture *f, written w, uint32_t head, uint64_t from,
                              uint64_t to, uint32_t expected_runs)
{
    rf_kv_run runs[RF_KV_RUNS_MAX];
    rf_kv_side side = (rf_kv_side)w.side;
    uint32_t run_count = rf_kv_window(f->kv, w.slot, w.layer, head, side, from, to, runs);
    assert_int_equal(run_count, expected_runs);
    uint64_t row_bytes = rf_kv_row_bytes(f->kv, w.layer, side);
    uint32_t width = side == RF_KV_K ? f->layers[w.layer].k_width : f->layers[w.layer].v_width;
    uint64_t next = from;
    for (uint32_t r = 0; r < run_count; r++) {
        assert_int_equal(runs[r].first_position, next);
        assert_true(runs[r].count > 0);
        for (uint64_t i = 0; i < runs[r].count; i++, next++) {
            const uint8_t *row = (const uint8_t *)runs[r].rows + i * row_bytes;
            for (uint32_t e = 0; e < width; e++) {
                if (stored(f, w.layer, side, row, e) != value_of(w, head, next, e))
                    fail_msg("layer %u side %u head %u position %llu", w.layer, w.side, head,
                             (unsigned long long)next);
            }
        }
    }
    assert_int_equal(next, to);
}

static void assert_holds(const fixture *f, uint32_t slot, uint32_t layer, uint64_t from,
                         uint64_t to, uint32_t salt, uint32_t expected_runs)
{
    for (uint32_t side = RF_KV_K; side <= RF_KV_V; side++) {
        for (uint32_t head = 0; head < f->layers[layer].kv_heads; head++)
            assert_side_holds(f, (written){slot, layer, side, salt}, head, from, to, expected_runs);
    }
}

static uint32_t run_count_of(const fixture *f, uint32_t layer, uint64_t from, uint64_t to)
{
    rf_kv_run runs[RF_KV_RUNS_MAX];
    return rf_kv_window(f->kv, 0, layer, 0, RF_KV_K, from, to, runs);
}

/* ---- memory ------------------------------------------------------------------------------ */

/* The acceptance test of the design's ancestor: 4 layers x 2 heads x 8 x 16 positions of f32. */
static void a_ring_of_four_layers_is_eight_allocations_and_8192_bytes(void **state)
{
    (void)state;
    fixture f = make(4, NULL, 16, 16, 1, "f32");
    open_store(&f, true);
    const rf_trace *trace = f.scope.trace;
    assert_int_equal(rf_kv_preallocated_bytes(f.kv), 8192);
    assert_int_equal(f.plan.pool_bytes[RF_POOL_KV], 8192);
    assert_int_equal(rf_kv_capacity(f.kv), 16);
    uint64_t index = 0, ring_bytes = 0;
    uint32_t found = 0;
    for (rf_event event; rf_trace_event(trace, index, &event); index++) {
        assert_int_equal(event.kind, RF_EVENT_ALLOC);
        const rf_plan_row *row = &f.rows[event.row];
        if (row->pool != RF_POOL_KV)
            continue;
        char id[RF_ID_BYTES];
        snprintf(id, sizeof id, "kv.layers[%u].%c", found / 2, found % 2 ? 'v' : 'k');
        assert_string_equal(row->id, id);
        assert_int_equal(event.detail, RF_SCOPE_MODEL);
        assert_int_equal(event.bytes, 1024);
        ring_bytes += event.bytes;
        found++;
    }
    assert_int_equal(found, 8);
    assert_int_equal(ring_bytes, 8192);

    uint64_t emitted = trace->emitted, live = trace->live_bytes[RF_SCOPE_MODEL];
    for (uint32_t i = 0; i < 16; i++)
        append_all(&f, 0, 1, 0);
    assert_int_equal(trace->emitted, emitted);
    assert_int_equal(trace->live_bytes[RF_SCOPE_MODEL], live);
    assert_int_equal(trace->peak_bytes[RF_SCOPE_FORWARD], 0);
    assert_int_equal(f.plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON], 0);

    uint64_t others = 0;
    for (uint32_t i = 0; i < f.plan.row_count; i++) {
        if (f.rows[i].pool != RF_POOL_KV && trace->rows[i].take_count > 0)
            others += f.rows[i].bytes;
    }
    rf_trace total;
    rf_kv_close(f.kv);
    rf_scope_close(&f.scope, &total);
    assert_int_equal(total.freed_bytes[RF_SCOPE_MODEL] - others, 8192);
    assert_int_equal(total.live_bytes[RF_SCOPE_MODEL], 0);
}

static void a_store_without_a_scope_behaves_the_same_and_tells_nobody(void **state)
{
    (void)state;
    fixture f = make(4, NULL, 16, 16, 1, "f32"), other = make(1, NULL, 4, 4, 1, "f32");
    open_store(&other, true);
    uint64_t emitted = other.scope.trace->emitted;
    uint64_t before = rf_os_data_bytes();
    open_store(&f, false);
    uint64_t opened = rf_os_data_bytes();
    assert_int_equal(rf_kv_preallocated_bytes(f.kv), 8192);
    assert_data(opened >= before + 8192);
    for (uint32_t i = 0; i < 4; i++)
        append_all(&f, 0, 4, 0);
    assert_data(rf_os_data_bytes() == opened);
    for (uint32_t layer = 0; layer < 4; layer++)
        assert_holds(&f, 0, layer, 0, 16, 0, 1);
    close_store(&f);
    assert_data(rf_os_data_bytes() <= before);
    assert_int_equal(other.scope.trace->emitted, emitted);
    close_store(&other);
}

static void the_rings_are_as_large_as_their_geometry_says(void **state)
{
    (void)state;
    static const uint32_t windows[] = {0, 5, 100};
    fixture f = make(3, windows, 64, 8, 3, "f16");
    f.layers[0].kv_heads = 1;
    f.layers[1].v_width = 24;
    f.layers[2].k_format = "f32";
    open_store(&f, true);
    /* slots x heads x rows x bytes; a window keeps itself and a chunk, never more than capacity */
    assert_int_equal(rf_plan_find(&f.plan, "kv.layers[0].k")->bytes, 3 * 1 * 64 * 16);
    assert_int_equal(rf_plan_find(&f.plan, "kv.layers[1].k")->bytes, 3 * 2 * 13 * 16);
    assert_int_equal(rf_plan_find(&f.plan, "kv.layers[1].v")->bytes, 3 * 2 * 13 * 48);
    assert_int_equal(rf_plan_find(&f.plan, "kv.layers[2].k")->bytes, 3 * 2 * 64 * 32);
    assert_int_equal(rf_plan_find(&f.plan, "kv.layers[2].v")->bytes, 3 * 2 * 64 * 16);
    assert_int_equal(rf_kv_preallocated_bytes(f.kv), f.plan.pool_bytes[RF_POOL_KV]);
    assert_int_equal(rf_kv_row_bytes(f.kv, 1, RF_KV_V), 48);
    assert_int_equal(rf_kv_row_bytes(f.kv, 3, RF_KV_V), 0);
    close_store(&f);
}

static void what_cannot_be_a_store_is_refused_with_its_name(void **state)
{
    (void)state;
    static const struct {
        const char *where;
        uint64_t capacity;
        uint32_t slots, chunk, k_width, v_width, kv_heads;
        const char *format;
        rf_status status;
    } cases[] = {
        {"slots", 16, 0, 4, 8, 8, 2, "f32", RF_ERR_USAGE},
        {"ctx", 0, 1, 4, 8, 8, 2, "f32", RF_ERR_USAGE},
        {"chunk", 16, 1, 0, 8, 8, 2, "f32", RF_ERR_USAGE},
        {"chunk", 16, 1, 17, 8, 8, 2, "f32", RF_ERR_USAGE},
        {"kv.layers[0].k", 16, 1, 4, 0, 8, 2, "f32", RF_ERR_USAGE},
        {"kv.layers[0].k", 16, 1, 4, 12, 8, 2, "f32", RF_ERR_USAGE},
        {"kv.layers[0].v", 16, 1, 4, 8, 4, 2, "f32", RF_ERR_USAGE},
        {"kv.layers[0].k", 16, 1, 4, 8, 8, 2, "q4_k", RF_ERR_USAGE},
        {"kv.layers[0].k", 16, 1, 4, 8, 8, 2, "f3", RF_ERR_USAGE},
        {"kv.layers[0].k", 16, 1, 4, 8, 8, 2, "f32x", RF_ERR_USAGE},
        {"ctx", (1ull << 48) + 1, 1, 4, 8, 8, 2, "f32", RF_ERR_NO_FIT},
        {"ctx", UINT64_MAX / 2, 1, 4, 8, 8, 2, "f32", RF_ERR_NO_FIT},
        {"ctx", UINT64_MAX, 4, 4, 8, 8, 2, "f32", RF_ERR_NO_FIT},
        {"kv.layers[0].k", 1ull << 48, 1 << 20, 4, 8, 8, 2, "f32", RF_ERR_NO_FIT},
        {"kv.layers[0].k", 1ull << 48, 1 << 20, 4, 8, 8, 2, "r3", RF_ERR_NO_FIT},
        {"kv.layers[0].k", 1ull << 33, UINT32_MAX, 4, 8, 8, UINT32_MAX, "f32", RF_ERR_NO_FIT},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        fixture f =
            make(1, NULL, cases[i].capacity, cases[i].chunk, cases[i].slots, cases[i].format);
        f.config.layers = f.layers;
        f.layers[0].kv_heads = cases[i].kv_heads;
        f.layers[0].k_width = cases[i].k_width;
        f.layers[0].v_width = cases[i].v_width;
        rf_error err = {0};
        rf_kv *kv = NULL;
        rf_plan_init(&f.plan, f.rows, RF_ARRAY_COUNT(f.rows));
        assert_int_equal(rf_kv_plan(&f.plan, &f.config, &err), cases[i].status);
        assert_string_equal(err.where, cases[i].where);
        assert_int_equal(rf_kv_open(NULL, &f.config, &kv, &err), cases[i].status);
        assert_int_equal(rf_kv_open(NULL, &f.config, &kv, NULL), cases[i].status);
        assert_null(kv);
        if (!rf_kv_format_name(cases[i].format))
            assert_non_null(strstr(err.expected, rf_kv_format_names()));
    }
}

static void a_plan_of_another_geometry_is_drift(void **state)
{
    (void)state;
    fixture f = make(2, NULL, 16, 4, 1, "f32");
    rf_error err = {0};
    rf_kv *kv = NULL;
    f.config.layers = f.layers;
    rf_plan_init(&f.plan, f.rows, RF_ARRAY_COUNT(f.rows));
    assert_int_equal(rf_kv_plan(&f.plan, &f.config, &err), RF_OK);
    assert_int_equal(rf_trace_plan(&f.plan, EVENTS, &err), RF_OK);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.scope, &f.plan, RF_SCOPE_MODEL, NULL, false, &err), RF_OK);
    f.config.capacity = 17;
    assert_int_equal(rf_kv_open(&f.scope, &f.config, &kv, &err), RF_ERR_DRIFT);
    assert_string_equal(err.where, "kv.layers[0].k");
    assert_null(kv);
    rf_scope_close(&f.scope, NULL);
}

/* ---- append, commit, abort --------------------------------------------------------------- */

static void an_append_out_of_order_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    rf_error err = {0};
    fixture f = make(3, NULL, 16, 4, 2, "f32");
    open_store(&f, false);
    append_all(&f, 0, 3, 0);
    assert_int_equal(append(&f, 0, 1, 2, 9, &err), RF_ERR_USAGE); /* layer 0 is first */
    assert_string_equal(err.expected, "layer 0");
    assert_int_equal(append(&f, 0, 0, 2, 1, &err), RF_OK);
    assert_int_equal(append(&f, 0, 0, 2, 9, &err), RF_ERR_USAGE); /* twice */
    assert_string_equal(err.expected, "layer 1");
    assert_int_equal(append(&f, 0, 2, 2, 9, &err), RF_ERR_USAGE); /* one left out */
    assert_int_equal(append(&f, 0, 1, 3, 9, &err), RF_ERR_USAGE); /* another count */
    assert_string_equal(err.expected, "2");
    assert_int_equal(append(&f, 0, 3, 2, 9, &err), RF_ERR_USAGE); /* no such layer */
    assert_int_equal(append(&f, 2, 0, 2, 9, &err), RF_ERR_USAGE); /* no such slot */
    assert_int_equal(append(&f, 1, 0, 0, 9, &err), RF_ERR_USAGE);
    assert_int_equal(append(&f, 1, 0, 5, 9, &err), RF_ERR_USAGE); /* above a chunk */
    assert_int_equal(append(&f, 0, 1, 2, 1, &err), RF_OK);
    assert_int_equal(append(&f, 0, 2, 2, 1, &err), RF_OK);
    assert_int_equal(append(&f, 0, 0, 2, 9, &err), RF_ERR_USAGE); /* before commit */
    assert_int_equal(rf_kv_commit(f.kv, 0, &err), RF_OK);
    assert_int_equal(rf_kv_length(f.kv, 0), 5);
    assert_int_equal(rf_kv_length(f.kv, 1), 0);
    for (uint32_t layer = 0; layer < 3; layer++) {
        assert_holds(&f, 0, layer, 0, 3, 0, 1);
        assert_holds(&f, 0, layer, 3, 5, 1, 1);
    }
    close_store(&f);
}

static void a_full_slot_takes_no_more(void **state)
{
    (void)state;
    rf_error err = {0};
    fixture f = make(2, NULL, 10, 4, 1, "f32");
    open_store(&f, false);
    append_all(&f, 0, 4, 0);
    append_all(&f, 0, 4, 0);
    assert_int_equal(append(&f, 0, 0, 3, 9, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "full"));
    append_all(&f, 0, 2, 0);
    assert_int_equal(append(&f, 0, 0, 1, 9, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_length(f.kv, 0), 10);
    assert_holds(&f, 0, 0, 0, 10, 0, 1);
    assert_holds(&f, 0, 1, 0, 10, 0, 1);
    close_store(&f);
}

static void appended_rows_are_seen_at_once_and_are_gone_after_an_abort(void **state)
{
    (void)state;
    fixture f = make(2, NULL, 16, 4, 1, "f32");
    open_store(&f, false);
    append_all(&f, 0, 4, 0);
    assert_int_equal(append(&f, 0, 0, 3, 9, NULL), RF_OK);
    assert_holds(&f, 0, 0, 4, 7, 9, 1);
    assert_int_equal(run_count_of(&f, 1, 4, 7), 0); /* this layer has them not yet */
    assert_int_equal(rf_kv_length(f.kv, 0), 4);
    rf_kv_abort(f.kv, 0);
    assert_int_equal(rf_kv_length(f.kv, 0), 4);
    assert_int_equal(run_count_of(&f, 0, 0, 5), 0);
    assert_holds(&f, 0, 0, 0, 4, 0, 1);
    append_all(&f, 0, 2, 5); /* goes on, with another count, at layer 0 */
    assert_int_equal(rf_kv_length(f.kv, 0), 6);
    assert_holds(&f, 0, 1, 4, 6, 5, 1);
    close_store(&f);
}

static void an_abort_leaves_a_sliding_layer_what_the_next_token_sees(void **state)
{
    (void)state;
    static const uint32_t windows[] = {6, 0};
    for (uint32_t length = 1; length < 40; length++) {
        fixture f = make(2, windows, 48, 5, 1, "f32");
        open_store(&f, false);
        for (uint32_t i = 0; i < length; i++)
            append_all(&f, 0, 1, 0);
        assert_int_equal(append(&f, 0, 0, 5, 9, NULL), RF_OK);
        /* While the chunk is there: its first token's window, and that of its last. */
        uint64_t first = length + 1 > 6 ? length + 1 - 6 : 0;
        rf_kv_run runs[RF_KV_RUNS_MAX];
        assert_true(rf_kv_window(f.kv, 0, 0, 0, RF_KV_K, first, length, runs) > 0);
        rf_kv_abort(f.kv, 0);
        for (uint64_t at = first; at < length; at++)
            assert_holds(&f, 0, 0, at, at + 1, 0, 1);
        close_store(&f);
    }
}

static void a_commit_needs_every_layer(void **state)
{
    (void)state;
    rf_error err = {0};
    fixture f = make(3, NULL, 16, 4, 1, "f32");
    f.layers[2].kv_heads = 0; /* keeps nothing, is never appended */
    open_store(&f, false);
    assert_int_equal(rf_kv_commit(f.kv, 0, &err), RF_ERR_USAGE);
    assert_int_equal(append(&f, 0, 0, 2, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_commit(f.kv, 0, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "layer 1"));
    assert_int_equal(rf_kv_length(f.kv, 0), 0);
    assert_int_equal(append(&f, 0, 1, 2, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_commit(f.kv, 0, &err), RF_OK);
    assert_int_equal(rf_kv_length(f.kv, 0), 2);
    assert_int_equal(rf_kv_commit(f.kv, 1, &err), RF_ERR_USAGE); /* no such slot */
    close_store(&f);
}

static void layers_without_heads_are_stepped_over(void **state)
{
    (void)state;
    fixture f = make(4, NULL, 8, 4, 1, "f32");
    f.layers[0].kv_heads = f.layers[2].kv_heads = 0;
    open_store(&f, true);
    assert_null(rf_plan_find(&f.plan, "kv.layers[0].k"));
    append_all(&f, 0, 4, 0);
    assert_int_equal(append(&f, 0, 0, 1, 0, NULL), RF_ERR_USAGE);
    assert_holds(&f, 0, 1, 0, 4, 0, 1);
    assert_holds(&f, 0, 3, 0, 4, 0, 1);
    assert_int_equal(run_count_of(&f, 2, 0, 4), 0);
    close_store(&f);
}

static void a_value_that_is_not_finite_is_refused_with_the_ring_untouched(void **state)
{
    (void)state;
    const float bad[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff()};
    static float rows[2][4 * STRIDE_MAX];
    for (uint32_t n = 0; n < RF_ARRAY_COUNT(bad) * 2 * 2; n++) {
        uint32_t side = n % 2, head_token = n / 2 % 2;
        fixture f = make(1, NULL, 8, 4, 1, n % 4 < 2 ? "f16" : "f32");
        rf_error err = {0};
        open_store(&f, false);
        append_all(&f, 0, 2, 0);
        fill(&f, (written){0, 0, RF_KV_K, 9}, 2, 4, rows[0]);
        fill(&f, (written){0, 0, RF_KV_V, 9}, 2, 4, rows[1]);
        /* The first element of all, or the very last. */
        rows[side][head_token ? 3 * STRIDE_MAX + 15 : 0] = bad[n / 4];
        rf_status status =
            rf_kv_append(f.kv, 0, 0, rows[0], STRIDE_MAX, rows[1], STRIDE_MAX, 4, &err);
        assert_int_equal(status, RF_ERR_RUNTIME);
        assert_string_equal(err.where, side == RF_KV_K ? "kv.layers[0].k" : "kv.layers[0].v");
        assert_int_equal(rf_kv_length(f.kv, 0), 2);
        assert_int_equal(run_count_of(&f, 0, 0, 3), 0);
        assert_holds(&f, 0, 0, 0, 2, 0, 1);
        append_all(&f, 0, 4, 1);
        assert_holds(&f, 0, 0, 2, 6, 1, 1);
        close_store(&f);
    }
}

static void slots_do_not_know_each_other(void **state)
{
    (void)state;
    static const uint32_t windows[] = {0, 4};
    fixture f = make(2, windows, 16, 3, 3, "f16");
    open_store(&f, true);
    append_all(&f, 1, 3, 0);
    append_all(&f, 2, 2, 0);
    append_all(&f, 1, 3, 0);
    assert_int_equal(append(&f, 0, 0, 2, 0, NULL), RF_OK);
    append_all(&f, 2, 3, 0); /* while slot 0 stands in the middle of its layers */
    assert_int_equal(append(&f, 0, 1, 2, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_commit(f.kv, 0, NULL), RF_OK);
    static const uint64_t lengths[] = {2, 6, 5};
    for (uint32_t slot = 0; slot < 3; slot++) {
        assert_int_equal(rf_kv_length(f.kv, slot), lengths[slot]);
        assert_holds(&f, slot, 0, 0, lengths[slot], 0, 1);
        assert_holds(&f, slot, 1, 0, lengths[slot], 0, 1);
    }
    assert_int_equal(rf_kv_truncate(f.kv, 1, 1, NULL), RF_OK);
    assert_int_equal(rf_kv_clear(f.kv, 2, NULL), RF_OK);
    assert_int_equal(rf_kv_length(f.kv, 0), 2);
    assert_int_equal(rf_kv_length(f.kv, 1), 1);
    assert_int_equal(rf_kv_length(f.kv, 2), 0);
    assert_int_equal(rf_kv_length(f.kv, 3), 0);
    assert_holds(&f, 0, 0, 0, 2, 0, 1);
    close_store(&f);
}

/* ---- truncate and windows ---------------------------------------------------------------- */

static void truncate_forgets_the_end_and_nothing_else(void **state)
{
    (void)state;
    rf_error err = {0};
    fixture f = make(2, NULL, 16, 8, 1, "f32");
    open_store(&f, false);
    append_all(&f, 0, 8, 0);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 9, &err), RF_ERR_USAGE);
    assert_string_equal(err.expected, "at most 8");
    assert_int_equal(rf_kv_truncate(f.kv, 1, 0, &err), RF_ERR_USAGE); /* no such slot */
    assert_int_equal(rf_kv_length(f.kv, 0), 8);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 8, &err), RF_OK);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 3, &err), RF_OK);
    assert_int_equal(rf_kv_length(f.kv, 0), 3);
    assert_int_equal(run_count_of(&f, 0, 0, 4), 0);
    append_all(&f, 0, 4, 7);
    assert_holds(&f, 0, 1, 0, 3, 0, 1);
    assert_holds(&f, 0, 1, 3, 7, 7, 1);
    assert_int_equal(append(&f, 0, 0, 2, 9, NULL), RF_OK);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 5, &err), RF_OK); /* also what is not committed */
    assert_int_equal(append(&f, 0, 0, 1, 9, NULL), RF_OK);
    assert_int_equal(rf_kv_clear(f.kv, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_length(f.kv, 0), 0);
    append_all(&f, 0, 8, 2);
    assert_holds(&f, 0, 0, 0, 8, 2, 1);
    close_store(&f);
}

static void a_sliding_layer_goes_back_a_chunk_and_no_further(void **state)
{
    (void)state;
    static const uint32_t windows[] = {0, 4};
    for (uint64_t target = 1; target <= 20; target++) {
        rf_error err = {0};
        fixture f = make(2, windows, 32, 4, 1, "f32");
        open_store(&f, false);
        for (int i = 0; i < 20; i++)
            append_all(&f, 0, 1, 0);
        /* 8 rows hold 12 .. 19; the next position at target sees from target - 3 on. */
        rf_status expected = target - 3 >= 12 && target > 3 ? RF_OK : RF_ERR_USAGE;
        assert_int_equal(rf_kv_truncate(f.kv, 0, target, &err), expected);
        assert_int_equal(rf_kv_length(f.kv, 0), expected == RF_OK ? target : 20);
        for (uint64_t at = target - 3; expected == RF_OK && at < target; at++)
            assert_holds(&f, 0, 1, at, at + 1, 0, 1);
        assert_int_equal(rf_kv_truncate(f.kv, 0, 0, &err), RF_OK); /* nothing is seen from 0 */
        append_all(&f, 0, 4, 3);
        assert_holds(&f, 0, 1, 0, 4, 3, 1);
        close_store(&f);
    }
}

static void a_narrow_layer_does_not_hold_a_wide_one_back(void **state)
{
    (void)state;
    static const uint32_t windows[] = {4, 20}; /* 8 and 24 rows */
    fixture f = make(2, windows, 64, 4, 1, "f32");
    open_store(&f, false);
    for (int i = 0; i < 60; i++)
        append_all(&f, 0, 1, 0);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 55, NULL), RF_OK);
    assert_holds(&f, 0, 0, 52, 55, 0, 1);
    assert_holds(&f, 0, 1, 36, 55, 0, 2);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 54, NULL), RF_ERR_USAGE); /* would see 51 */
    close_store(&f);
}

static void going_back_twice_goes_no_further_than_going_back_once(void **state)
{
    (void)state;
    static const uint32_t windows[] = {4};
    for (uint64_t between = 15; between <= 20; between++) {
        fixture f = make(1, windows, 32, 4, 1, "f32");
        open_store(&f, false);
        for (int i = 0; i < 20; i++)
            append_all(&f, 0, 1, 0);
        assert_int_equal(rf_kv_truncate(f.kv, 0, between, NULL), RF_OK);
        /* Position 14 would see 11, and 11 was written over by 19. */
        assert_int_equal(rf_kv_truncate(f.kv, 0, 14, NULL), RF_ERR_USAGE);
        assert_int_equal(rf_kv_length(f.kv, 0), between);
        assert_int_equal(run_count_of(&f, 0, 11, 15), 0);
        assert_holds(&f, 0, 0, 12, 15, 0, 1); /* rows 4 to 6 */
        append_all(&f, 0, 1, 5);              /* does not bring 11 back */
        assert_int_equal(run_count_of(&f, 0, 11, 15), 0);
        close_store(&f);
    }
}

static void what_an_aborted_append_wrote_over_is_in_no_window(void **state)
{
    (void)state;
    static const uint32_t windows[] = {4, 0};
    fixture f = make(2, windows, 32, 4, 1, "f32");
    open_store(&f, false);
    for (int i = 0; i < 20; i++)
        append_all(&f, 0, 1, 0);
    assert_holds(&f, 0, 0, 12, 20, 0, 2);
    assert_int_equal(append(&f, 0, 0, 3, 9, NULL), RF_OK); /* over 12, 13 and 14 */
    rf_kv_abort(f.kv, 0);
    assert_int_equal(run_count_of(&f, 0, 12, 20), 0);
    assert_int_equal(run_count_of(&f, 0, 14, 20), 0);
    assert_holds(&f, 0, 0, 15, 20, 0, 2);
    assert_int_equal(rf_kv_truncate(f.kv, 0, 17, NULL), RF_ERR_USAGE); /* would see 14 */
    assert_int_equal(rf_kv_truncate(f.kv, 0, 18, NULL), RF_OK);
    close_store(&f);
}

static void a_value_beyond_the_format_is_refused_with_the_ring_untouched(void **state)
{
    (void)state;
    static float row[STRIDE_MAX];
    rf_error err = {0};
    fixture f = make(1, NULL, 8, 1, 1, "f16");
    open_store(&f, false);
    row[7] = 65520.0f; /* rounds to infinity */
    assert_int_equal(rf_kv_append(f.kv, 0, 0, row, STRIDE_MAX, row, STRIDE_MAX, 1, &err),
                     RF_ERR_RUNTIME);
    assert_string_equal(err.where, "kv.layers[0].k");
    row[7] = -65519.0f;
    assert_int_equal(rf_kv_append(f.kv, 0, 0, row, STRIDE_MAX, row, STRIDE_MAX, 1, &err), RF_OK);
    close_store(&f);
}

static void a_wrapped_window_is_two_runs_in_order_without_a_copy(void **state)
{
    (void)state;
    static const uint32_t windows[] = {6, 0};
    fixture f = make(2, windows, 64, 4, 1, "f16"); /* the first layer has 10 rows */
    open_store(&f, true);
    for (int i = 0; i < 23; i++)
        append_all(&f, 0, 1, 0);
    const uint8_t *base = (const uint8_t *)f.scope.base;
    const rf_plan_row *row = rf_plan_find(&f.plan, "kv.layers[0].v");
    rf_kv_run runs[RF_KV_RUNS_MAX];
    assert_int_equal(rf_kv_window(f.kv, 0, 0, 1, RF_KV_V, 17, 23, runs), 2);
    assert_int_equal(runs[0].first_position, 17);
    assert_int_equal(runs[0].count, 3);
    assert_int_equal(runs[1].first_position, 20);
    assert_int_equal(runs[1].count, 3);
    assert_ptr_equal(runs[0].rows, base + row->offset + (10 + 7) * 16);
    assert_ptr_equal(runs[1].rows, base + row->offset + 10 * 16);
    assert_holds(&f, 0, 0, 17, 23, 0, 2);
    assert_holds(&f, 0, 0, 17, 20, 0, 1);
    assert_holds(&f, 0, 0, 20, 23, 0, 1);
    assert_holds(&f, 0, 1, 0, 23, 0, 1); /* the layer that keeps everything never wraps */
    close_store(&f);
}

static void a_window_of_what_is_not_there_is_empty(void **state)
{
    (void)state;
    static const uint32_t windows[] = {6, 0};
    fixture f = make(2, windows, 64, 4, 1, "f32");
    rf_kv_run runs[RF_KV_RUNS_MAX];
    open_store(&f, false);
    assert_int_equal(run_count_of(&f, 0, 0, 1), 0);
    for (int i = 0; i < 23; i++)
        append_all(&f, 0, 1, 0);
    assert_int_equal(run_count_of(&f, 0, 12, 23), 0); /* overwritten: 10 rows */
    assert_int_equal(run_count_of(&f, 0, 0, 3), 0);
    assert_int_equal(run_count_of(&f, 1, 0, 24), 0);
    assert_int_equal(run_count_of(&f, 1, 5, 5), 0);
    assert_int_equal(run_count_of(&f, 1, 6, 5), 0);
    assert_int_equal(run_count_of(&f, 1, UINT64_MAX - 1, UINT64_MAX), 0);
    assert_int_equal(run_count_of(&f, 2, 0, 1), 0);
    assert_int_equal(rf_kv_window(f.kv, 1, 0, 0, RF_KV_K, 20, 21, runs), 0);
    assert_int_equal(rf_kv_window(f.kv, 0, 0, 2, RF_KV_K, 20, 21, runs), 0);
    close_store(&f);
}

/* ---- formats ----------------------------------------------------------------------------- */

static void halves_are_rounded_to_the_nearest_and_ties_to_even(void **state)
{
    (void)state;
    static const struct {
        float value;
        uint16_t half;
    } cases[] = {
        {0x1p0f + 0x1p-11f, 0x3C00},            /* tie down to even */
        {0x1p0f + 0x1p-10f + 0x1p-11f, 0x3C02}, /* tie up to even */
        {0x1.002002p0f, 0x3C01},                /* just above the tie */
        {0x1.001ffep0f, 0x3C00},                /* just below */
        {-0x1.006p0f, 0xBC02},
        {65504.0f, 0x7BFF},
        {65519.996f, 0x7BFF},
        {0x1p-14f, 0x0400},
        {0x1p-24f, 0x0001},
        {0x1p-25f, 0x0000}, /* tie to zero */
        {0x1.000002p-25f, 0x0001},
        {0x1.8p-24f, 0x0002},
        {-0.0f, 0x8000},
        {0x1.ff8p-15f, 0x03FF},
        {0x1.ffcp-15f, 0x0400},
        {0x1.ffep-15f, 0x0400},
    };
    for (int set = 0; set < 2; set++) {
        fixture f = make(1, NULL, 16, 1, 1, "f16");
        f.layers[0].kv_heads = 1;
        f.layers[0].k_width = f.layers[0].v_width = 24; /* a vector step and a rest */
        open_store(&f, false);
        rf_kv_set_cpu(f.kv, set == 0 ? RF_CPU_ALL : RF_CPU_SCALAR);
        float row[24];
        for (uint32_t i = 0; i < 24; i++)
            row[i] = cases[i % RF_ARRAY_COUNT(cases)].value;
        assert_int_equal(rf_kv_append(f.kv, 0, 0, row, 24, row, 24, 1, NULL), RF_OK);
        assert_int_equal(rf_kv_commit(f.kv, 0, NULL), RF_OK);
        rf_kv_run runs[RF_KV_RUNS_MAX];
        for (uint32_t side = RF_KV_K; side <= RF_KV_V; side++) {
            assert_int_equal(rf_kv_window(f.kv, 0, 0, 0, (rf_kv_side)side, 0, 1, runs), 1);
            const uint16_t *halves = runs[0].rows;
            for (uint32_t i = 0; i < 24; i++)
                assert_int_equal(halves[i], cases[i % RF_ARRAY_COUNT(cases)].half);
        }
        close_store(&f);
    }
}

static void formats_are_found_by_their_whole_name(void **state)
{
    (void)state;
    static const char *const names[] = {"f32",    "f16",    "bf16",   "q8_0",    "q4_0",
                                        "r8",     "r6",     "r5",     "r4",      "r3",
                                        "turbo4", "turbo3", "turbo2", "turbo4q", "turbo3q"};
    static const char *const others[] = {"", "f1", "f16 ", "f32 f16", "R8", "r", "r88", "q8", "r7"};
    size_t listed = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(names); i++) {
        assert_string_equal(rf_kv_format_name(names[i]), names[i]);
        assert_non_null(strstr(rf_kv_format_names(), names[i]));
        assert_int_equal(rf_kv_format_calibrates(names[i]), names[i][0] == 'r');
        listed += strlen(names[i]) + 1;
    }
    assert_int_equal(strlen(rf_kv_format_names()) + 1, listed); /* these and no other */
    for (size_t i = 0; i < RF_ARRAY_COUNT(others); i++) {
        assert_null(rf_kv_format_name(others[i]));
        assert_false(rf_kv_format_calibrates(others[i]));
    }
    assert_string_equal(rf_kv_format_name(NULL), "f16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_ring_of_four_layers_is_eight_allocations_and_8192_bytes),
        cmocka_unit_test(a_store_without_a_scope_behaves_the_same_and_tells_nobody),
        cmocka_unit_test(the_rings_are_as_large_as_their_geometry_says),
        cmocka_unit_test(what_cannot_be_a_store_is_refused_with_its_name),
        cmocka_unit_test(a_plan_of_another_geometry_is_drift),
        cmocka_unit_test(an_append_out_of_order_is_refused_and_changes_nothing),
        cmocka_unit_test(a_full_slot_takes_no_more),
        cmocka_unit_test(appended_rows_are_seen_at_once_and_are_gone_after_an_abort),
        cmocka_unit_test(an_abort_leaves_a_sliding_layer_what_the_next_token_sees),
        cmocka_unit_test(a_commit_needs_every_layer),
        cmocka_unit_test(layers_without_heads_are_stepped_over),
        cmocka_unit_test(a_value_that_is_not_finite_is_refused_with_the_ring_untouched),
        cmocka_unit_test(slots_do_not_know_each_other),
        cmocka_unit_test(truncate_forgets_the_end_and_nothing_else),
        cmocka_unit_test(a_sliding_layer_goes_back_a_chunk_and_no_further),
        cmocka_unit_test(a_narrow_layer_does_not_hold_a_wide_one_back),
        cmocka_unit_test(going_back_twice_goes_no_further_than_going_back_once),
        cmocka_unit_test(what_an_aborted_append_wrote_over_is_in_no_window),
        cmocka_unit_test(a_value_beyond_the_format_is_refused_with_the_ring_untouched),
        cmocka_unit_test(a_wrapped_window_is_two_runs_in_order_without_a_copy),
        cmocka_unit_test(a_window_of_what_is_not_there_is_empty),
        cmocka_unit_test(halves_are_rounded_to_the_nearest_and_ties_to_even),
        cmocka_unit_test(formats_are_found_by_their_whole_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
