/* tests/unit/test_memory.c: scope, trace and check.
 *
 * Each rule of the floor is tested from its breaking side: the id that was not planned, the region
 * that was taken twice, the byte that was written behind one.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "emulated.h"
#include "plan_rows.h"

static uint32_t index_of(const rf_plan *plan, const char *id)
{
    const rf_plan_row *row = rf_plan_find(plan, id);
    assert_non_null(row);
    return (uint32_t)(row - plan->rows);
}

/* ---- scope ------------------------------------------------------------------------------- */

typedef struct fixture { /* a plan of a few rows and its two scopes */
    rf_plan_row rows[64];
    rf_plan plan;
    rf_scope model;
    rf_scope forward;
} fixture;

static void open_model(fixture *f, uint32_t event_capacity, bool pattern)
{
    rf_error err = {0};
    assert_int_equal(rf_trace_plan(&f->plan, event_capacity, &err), RF_OK);
    lay_out(&f->plan, 4096);
    rf_status status = rf_scope_open(&f->model, &f->plan, RF_SCOPE_MODEL, NULL, pattern, &err);
    if (status != RF_OK)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
}

static void begin(fixture *f)
{
    *f = (fixture){0};
    rf_plan_init(&f->plan, f->rows, RF_ARRAY_COUNT(f->rows));
}

static void *take(rf_scope *scope, const char *id, const char *format, uint64_t count,
                  uint64_t unit_bytes)
{
    void *region = NULL;
    rf_error err = {0};
    rf_extent extent = {format, count, unit_bytes};
    rf_status status = rf_scope_take(scope, id, &extent, &region, &err);
    if (status != RF_OK)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    return region;
}

/* The acceptance test of the design's ancestor: 4 layers x K and V, 2 heads x 8 x 16 positions of
 * f32, are 8,192 bytes in exactly 8 regions. */
static void a_kv_ring_is_eight_allocations_and_frees_to_its_bytes(void **state)
{
    (void)state;
    fixture f;
    rf_trace total;
    char id[RF_ID_BYTES];
    begin(&f);
    for (int i = 0; i < 8; i++) {
        snprintf(id, sizeof id, "kv.layers[%d].%c", i / 2, i % 2 ? 'v' : 'k');
        assert_int_equal(
            rf_plan_add_region(&f.plan, id, "f32", RF_SCOPE_MODEL, RF_POOL_KV, 2 * 8 * 16, 4, NULL),
            RF_OK);
    }
    open_model(&f, 64, false);
    assert_int_equal(f.plan.pool_bytes[RF_POOL_KV], 8192);
    uint64_t own_events = f.model.trace->emitted;
    uint64_t own_bytes = f.model.trace->live_bytes[RF_SCOPE_MODEL];
    assert_int_equal(own_events, 2);
    for (int i = 0; i < 8; i++) {
        snprintf(id, sizeof id, "kv.layers[%d].%c", i / 2, i % 2 ? 'v' : 'k');
        float *region = take(&f.model, id, "f32", 2 * 8 * 16, 4);
        assert_int_equal((uintptr_t)region % RF_REGION_ALIGN, 0);
        for (int j = 0; j < 2 * 8 * 16; j++)
            region[j] = (float)j;
    }
    assert_int_equal(rf_scope_seal(&f.model, NULL), RF_OK);
    assert_int_equal(f.model.trace->emitted, 10);
    assert_int_equal(f.model.trace->alloc_count[RF_SCOPE_MODEL], 10);
    assert_int_equal(f.model.trace->live_bytes[RF_SCOPE_MODEL] - own_bytes, 8192);
    uint64_t index = 0;
    rf_event event;
    uint64_t alloc_bytes = 0;
    for (; rf_trace_event(f.model.trace, index, &event); index++) {
        assert_int_equal(event.kind, RF_EVENT_ALLOC);
        if (index >= 2)
            alloc_bytes += event.bytes;
    }
    assert_int_equal(index, 10);
    assert_int_equal(alloc_bytes, 8192);
    rf_scope_close(&f.model, &total);
    assert_int_equal(total.freed_bytes[RF_SCOPE_MODEL] - own_bytes, 8192);
    assert_int_equal(total.live_bytes[RF_SCOPE_MODEL], 0);
    assert_int_equal(total.peak_bytes[RF_SCOPE_MODEL], own_bytes + 8192);
    assert_int_equal(total.emitted, 20);
    assert_null(total.rows);
    assert_null(total.events);
    assert_false(f.model.open);
    rf_scope_close(&f.model, NULL); /* safe on a closed one */
}

static void assert_refused(rf_scope *scope, const char *id, rf_extent extent, const char *what,
                           const char *expected, const char *got)
{
    rf_error err = {0};
    void *region = &err;
    assert_int_equal(rf_scope_take(scope, id, &extent, &region, &err), RF_ERR_DRIFT);
    assert_ptr_equal(region, &err);
    assert_string_equal(err.where, id);
    assert_non_null(strstr(err.what, what));
    assert_string_equal(err.expected, expected);
    assert_string_equal(err.got, got);
}

static void a_take_that_is_not_as_planned_is_a_named_error(void **state)
{
    (void)state;
    fixture f;
    begin(&f);
    assert_int_equal(
        rf_plan_add_region(&f.plan, "kv", "f16", RF_SCOPE_MODEL, RF_POOL_KV, 100, 2, NULL), RF_OK);
    add(&f.plan, "slab", RF_SCOPE_FORWARD, 100);
    add_file(&f.plan, "weight", 128, 64);
    open_model(&f, 4, false);
    uint64_t emitted = f.model.trace->emitted;
    assert_refused(&f.model, "kv.layers[9].k", (rf_extent){"f16", 100, 2}, "not planned",
                   "a row of MODEL/ANON", "");
    assert_refused(&f.model, "slab", (rf_extent){"bytes", 100, 1}, "not planned",
                   "a row of MODEL/ANON", "");
    assert_refused(&f.model, "weight", (rf_extent){"bytes", 128, 1}, "not planned",
                   "a row of MODEL/ANON", "");
    assert_refused(&f.model, "padding", (rf_extent){"bytes", 0, 1}, "not planned",
                   "a row of MODEL/ANON", "");
    assert_refused(&f.model, "kv", (rf_extent){"f16", 101, 2}, "another size", "200 bytes",
                   "202 bytes");
    assert_refused(&f.model, "kv", (rf_extent){"f16", UINT64_MAX, 2}, "64 bits", "200 bytes",
                   "18446744073709551615 units of 2 bytes");
    assert_refused(&f.model, "kv", (rf_extent){"bf16", 100, 2}, "another format", "f16", "bf16");
    assert_refused(&f.model, "kv", (rf_extent){NULL, 100, 2}, "another format", "f16", "");
    assert_int_equal(f.model.trace->emitted, emitted);
    take(&f.model, "kv", "f16", 100, 2);
    assert_refused(&f.model, "kv", (rf_extent){"f16", 100, 2}, "taken before", "", "");
    assert_refused(&f.model, "trace.ledger", (rf_extent){"bytes", 1, 1}, "taken before", "", "");
    assert_int_equal(f.model.trace->emitted, emitted + 1);
    rf_scope_close(&f.model, NULL);
}

static void seal_names_the_region_that_was_never_taken(void **state)
{
    (void)state;
    fixture f;
    rf_error err = {0};
    uint8_t weight[128] = {0};
    rf_extent extent = {"bytes", 128, 1};
    begin(&f);
    add_file(&f.plan, "weight", 128, 64);
    add(&f.plan, "table", RF_SCOPE_MODEL, 128);
    add(&f.plan, "libc", RF_SCOPE_AMBIENT, 300);
    open_model(&f, 4, false);
    assert_int_equal(rf_scope_seal(&f.model, &err), RF_ERR_DRIFT);
    assert_string_equal(err.where, "weight");
    assert_int_equal(rf_scope_adopt(&f.model, "table", &extent, weight, &err), RF_ERR_DRIFT);
    assert_int_equal(rf_scope_adopt(&f.model, "weight", &extent, weight, &err), RF_OK);
    assert_int_equal(rf_scope_adopt(&f.model, "weight", &extent, weight, &err), RF_ERR_DRIFT);
    assert_int_equal(rf_scope_seal(&f.model, &err), RF_ERR_DRIFT);
    assert_string_equal(err.where, "table");
    take(&f.model, "table", "bytes", 128, 1);
    assert_int_equal(rf_scope_seal(&f.model, &err), RF_OK);
    assert_true(f.model.sealed);
    void *region = NULL;
    assert_int_equal(rf_scope_take(&f.model, "table", &extent, &region, &err), RF_ERR_DRIFT);
    assert_non_null(strstr(err.what, "sealed"));
    rf_scope_close(&f.model, NULL);
}

static void a_scope_that_cannot_be_opened_holds_nothing(void **state)
{
    (void)state;
    fixture f;
    rf_error err = {0};
    begin(&f);
    add(&f.plan, "vast", RF_SCOPE_MODEL, UINT64_C(1) << 60);
    assert_int_equal(rf_scope_open(&f.model, &f.plan, RF_SCOPE_MODEL, NULL, false, &err),
                     RF_ERR_USAGE); /* not laid out */
    assert_int_equal(rf_trace_plan(&f.plan, 4, NULL), RF_OK);
    lay_out(&f.plan, 0);
    uint64_t data = rf_os_data_bytes();
    assert_int_equal(rf_scope_open(&f.model, &f.plan, RF_SCOPE_MODEL, NULL, false, &err),
                     RF_ERR_NO_FIT);
    assert_false(f.model.open);
    assert_data(rf_os_data_bytes() == data);
    /* Without rows for the trace, or with rows behind them. */
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 1);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.model, &f.plan, RF_SCOPE_MODEL, NULL, false, &err),
                     RF_ERR_USAGE);
    assert_string_equal(err.where, "trace.ledger");
    begin(&f);
    assert_int_equal(rf_trace_plan(&f.plan, 4, NULL), RF_OK);
    for (int i = 0; i < 8; i++) {
        char id[8];
        snprintf(id, sizeof id, "r%d", i);
        add(&f.plan, id, RF_SCOPE_MODEL, 1);
    }
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.model, &f.plan, RF_SCOPE_MODEL, NULL, true, &err),
                     RF_ERR_USAGE);
    assert_int_equal(rf_scope_open(&f.model, &f.plan, RF_SCOPE_AMBIENT, NULL, true, &err),
                     RF_ERR_USAGE);
    assert_null(f.model.base);
    assert_data(rf_os_data_bytes() == data);
}

static void an_opened_arena_is_zero_and_resident(void **state)
{
    (void)state;
    fixture f;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 50000);
    open_model(&f, 8, false);
    uint8_t *a = take(&f.model, "a", "bytes", 50000, 1);
    for (int i = 0; i < 50000; i++)
        assert_int_equal(a[i], 0);
    uint64_t resident = rf_scope_resident(&f.model);
    if (resident != UINT64_MAX)
        assert_int_equal(resident, f.model.bytes);
    rf_scope_close(&f.model, NULL);
}

static void a_forward_scope_uses_the_trace_of_its_model(void **state)
{
    (void)state;
    fixture f;
    rf_trace total;
    begin(&f);
    add_forward(&f.plan, "forward.x", 4000, 0, 5);
    add_forward(&f.plan, "forward.y", 1000, 1, 2);
    open_model(&f, 64, false);
    rf_trace *trace = f.model.trace;
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, trace, false, NULL),
                     RF_OK);
    take(&f.forward, "forward.x", "bytes", 4000, 1);
    assert_int_equal(rf_scope_seal(&f.forward, NULL), RF_ERR_DRIFT);
    take(&f.forward, "forward.y", "bytes", 1000, 1);
    assert_int_equal(rf_scope_seal(&f.forward, NULL), RF_OK);
    uint64_t emitted = trace->emitted;
    rf_scope_reset(&f.forward);
    rf_scope_reset(&f.forward);
    assert_int_equal(trace->emitted, emitted + 2);
    assert_int_equal(trace->reset_count, 2);
    rf_event event;
    assert_true(rf_trace_event(trace, emitted, &event));
    assert_int_equal(event.kind, RF_EVENT_RESET);
    assert_int_equal(event.bytes, 5000);
    assert_int_equal(event.row, RF_NO_ROW);
    rf_scope_close(&f.forward, &total);
    assert_int_equal(total.freed_bytes[RF_SCOPE_FORWARD], 5000);
    assert_int_equal(total.live_bytes[RF_SCOPE_FORWARD], 0);
    assert_int_equal(total.peak_bytes[RF_SCOPE_FORWARD], 5000);
    /* Frees come in the reverse order of the plan. */
    assert_true(rf_trace_event(trace, emitted + 2, &event));
    assert_int_equal(event.kind, RF_EVENT_FREE);
    assert_int_equal(event.row, index_of(&f.plan, "forward.y"));
    rf_scope_close(&f.model, NULL);
}

static void a_forward_scope_without_a_trace_emits_nothing(void **state)
{
    (void)state;
    fixture f;
    rf_trace total;
    begin(&f);
    add_forward(&f.plan, "forward.x", 4000, 0, 5);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, NULL, true, NULL), RF_OK);
    take(&f.forward, "forward.x", "bytes", 4000, 1);
    rf_scope_reset(&f.forward);
    assert_int_equal(rf_scope_seal(&f.forward, NULL), RF_OK);
    rf_scope_close(&f.forward, &total);
    assert_int_equal(total.emitted, 0);
}

/* ---- trace ------------------------------------------------------------------------------- */

static void without_a_trace_nothing_happens(void **state)
{
    (void)state;
    rf_event event;
    rf_trace_emit(NULL, RF_EVENT_ALLOC, 0, RF_SCOPE_MODEL, 100, 0);
    assert_false(rf_trace_event(NULL, 0, &event));
}

static void the_ledger_survives_an_overflow_of_the_event_ring(void **state)
{
    (void)state;
    fixture f;
    rf_trace total;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 100);
    add(&f.plan, "b", RF_SCOPE_MODEL, 50);
    open_model(&f, 4, false);
    rf_trace *trace = f.model.trace;
    uint64_t own = trace->live_bytes[RF_SCOPE_MODEL];
    take(&f.model, "a", "bytes", 100, 1);
    take(&f.model, "b", "bytes", 50, 1);
    uint32_t a = index_of(&f.plan, "a");
    for (uint64_t i = 0; i < 1000; i++) {
        rf_trace_emit(trace, RF_EVENT_ADAPTER, a, 0, 10, 0);
        rf_trace_emit(trace, RF_EVENT_COUNTER, RF_NO_ROW, 7, 0, i);
    }
    assert_int_equal(trace->emitted, 2004);
    rf_event event;
    assert_false(rf_trace_event(trace, 4, &event));
    assert_true(rf_trace_event(trace, 3, &event));
    assert_int_equal(event.value, 999);
    assert_int_equal(event.detail, 7);
    assert_true(rf_trace_event(trace, 1, &event));
    assert_int_equal(event.value, 998);
    assert_int_equal(trace->live_bytes[RF_SCOPE_MODEL] - own, 150);
    assert_int_equal(trace->rows[a].taken_bytes, 100);
    assert_int_equal(trace->rows[a].take_count, 1);
    assert_int_equal(trace->rows[a].adapter_count, 1000);
    assert_int_equal(trace->adapter_bytes, 10000);
    rf_scope_close(&f.model, &total);
    assert_int_equal(total.freed_bytes[RF_SCOPE_MODEL], own + 150);
}

static void a_trace_without_room_for_events_still_counts(void **state)
{
    (void)state;
    fixture f;
    rf_event event;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 100);
    open_model(&f, 0, false);
    take(&f.model, "a", "bytes", 100, 1);
    assert_int_equal(f.model.trace->alloc_count[RF_SCOPE_MODEL], 3);
    assert_false(rf_trace_event(f.model.trace, 0, &event));
    rf_scope_close(&f.model, NULL);
}

/* ---- check ------------------------------------------------------------------------------- */

static rf_check_row check(const rf_scope *scope, const char *id)
{
    rf_check_row row = {0};
    assert_int_equal(rf_scope_check_row(scope, index_of(scope->plan, id), &row, NULL), RF_OK);
    return row;
}

static void check_tells_planned_taken_written_and_resident(void **state)
{
    (void)state;
    fixture f;
    rf_error err = {0};
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 1001);
    add(&f.plan, "b", RF_SCOPE_MODEL, 4096);
    add(&f.plan, "libc", RF_SCOPE_AMBIENT, 300);
    add(&f.plan, "slab", RF_SCOPE_FORWARD, 300);
    open_model(&f, 8, true);
    assert_int_equal(check(&f.model, "a").taken_bytes, 0);
    uint8_t *a = take(&f.model, "a", "bytes", 1001, 1);
    assert_int_equal(check(&f.model, "a").written_bytes, 0);
    memset(a, 0, 16);
    a[999] ^= 1;
    rf_check_row row = check(&f.model, "a");
    assert_int_equal(row.planned_bytes, 1001);
    assert_int_equal(row.taken_bytes, 1001);
    assert_int_equal(row.written_bytes, 24);
    if (row.resident_bytes != UINT64_MAX)
        assert_int_equal(row.resident_bytes, 1001);
    memset(a, 0, 1001);
    assert_int_equal(check(&f.model, "a").written_bytes, 1001); /* clipped to the region */
    assert_int_equal(check(&f.model, "b").written_bytes, 0);
    assert_int_equal(check(&f.model, "libc").taken_bytes, 300);
    assert_int_equal(rf_scope_check_row(&f.model, index_of(&f.plan, "slab"), &row, &err),
                     RF_ERR_USAGE);
    assert_int_equal(rf_scope_check_row(&f.model, f.plan.row_count, &row, &err), RF_ERR_USAGE);
    rf_scope_close(&f.model, NULL);
}

static void the_rows_of_a_scope_are_resident_as_a_whole(void **state)
{
    (void)state;
    fixture f;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 1001);
    add(&f.plan, "b", RF_SCOPE_MODEL, 40960);
    open_model(&f, 8, true);
    uint64_t sum = 0;
    for (uint32_t i = 0; i < f.plan.row_count; i++) {
        rf_check_row row;
        assert_int_equal(rf_scope_check_row(&f.model, i, &row, NULL), RF_OK);
        if (row.resident_bytes == UINT64_MAX)
            skip();
        sum += row.resident_bytes;
    }
    assert_int_equal(sum, f.model.bytes);
    assert_int_equal(sum, f.plan.arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_ANON]);
    rf_scope_close(&f.model, NULL);
}

static void a_byte_behind_any_region_is_found_and_its_owner_named(void **state)
{
    (void)state;
    static const char *const ids[] = {"a", "b", "c", "trace.ledger", "trace.events"};
    fixture f;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 1);
    add(&f.plan, "b", RF_SCOPE_MODEL, 1000);
    add(&f.plan, "c", RF_SCOPE_MODEL, 64);
    open_model(&f, 3, true);
    memset(take(&f.model, "a", "bytes", 1, 1), 0, 1);
    memset(take(&f.model, "b", "bytes", 1000, 1), 0, 1000);
    memset(take(&f.model, "c", "bytes", 64, 1), 0xff, 64);
    assert_int_equal(rf_scope_check_guards(&f.model, NULL), RF_OK);
    for (size_t i = 0; i < RF_ARRAY_COUNT(ids); i++) {
        const rf_plan_row *row = rf_plan_find(&f.plan, ids[i]);
        for (uint64_t at = 0; at < RF_REGION_GUARD; at++) {
            rf_error err = {0};
            uint8_t *byte = f.model.base + row->offset + row->bytes + at;
            *byte ^= 0x40;
            assert_int_equal(rf_scope_check_guards(&f.model, &err), RF_ERR_DRIFT);
            assert_string_equal(err.where, ids[i]);
            *byte ^= 0x40;
        }
    }
    f.model.base[f.model.bytes - 1] ^= 1; /* the arena's last byte */
    assert_int_equal(rf_scope_check_guards(&f.model, NULL), RF_ERR_DRIFT);
    rf_scope_close(&f.model, NULL);
}

static void the_tail_of_a_slab_is_guarded(void **state)
{
    (void)state;
    fixture f;
    rf_error err = {0};
    begin(&f);
    add_forward(&f.plan, "x", 4000, 0, 1);
    add_forward(&f.plan, "y", 1000, 1, 2);
    add_forward(&f.plan, "z", 1000, 2, 3);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, NULL, true, NULL), RF_OK);
    memset(f.forward.base, 0, 5032); /* x is 4032 long when aligned; y follows */
    assert_int_equal(rf_scope_check_guards(&f.forward, &err), RF_OK);
    f.forward.base[5032] ^= 1;
    assert_int_equal(rf_scope_check_guards(&f.forward, &err), RF_ERR_DRIFT);
    assert_string_equal(err.where, "y");
    rf_scope_close(&f.forward, NULL);
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, NULL, false, NULL),
                     RF_OK);
    assert_int_equal(rf_scope_check_guards(&f.forward, &err), RF_ERR_USAGE);
    rf_scope_close(&f.forward, NULL);
}

static void every_name_is_told(void **state)
{
    (void)state;
    assert_string_equal(rf_scope_kind_name(RF_SCOPE_FORWARD), "FORWARD");
    assert_string_equal(rf_domain_name(RF_DOMAIN_FILE), "FILE");
    assert_string_equal(rf_pool_name(RF_POOL_KV), "kv");
    assert_string_equal(rf_phase_name(RF_PHASE_DECODE), "decode");
    for (int i = 0; i < RF_EVENT_COUNT; i++) {
        assert_true(strlen(rf_event_kind_name((rf_event_kind)i)) > 3);
    }
    assert_string_equal(rf_event_kind_name((rf_event_kind)99), "?");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_kv_ring_is_eight_allocations_and_frees_to_its_bytes),
        cmocka_unit_test(a_take_that_is_not_as_planned_is_a_named_error),
        cmocka_unit_test(seal_names_the_region_that_was_never_taken),
        cmocka_unit_test(a_scope_that_cannot_be_opened_holds_nothing),
        cmocka_unit_test(an_opened_arena_is_zero_and_resident),
        cmocka_unit_test(a_forward_scope_uses_the_trace_of_its_model),
        cmocka_unit_test(a_forward_scope_without_a_trace_emits_nothing),
        cmocka_unit_test(without_a_trace_nothing_happens),
        cmocka_unit_test(the_ledger_survives_an_overflow_of_the_event_ring),
        cmocka_unit_test(a_trace_without_room_for_events_still_counts),
        cmocka_unit_test(check_tells_planned_taken_written_and_resident),
        cmocka_unit_test(the_rows_of_a_scope_are_resident_as_a_whole),
        cmocka_unit_test(a_byte_behind_any_region_is_found_and_its_owner_named),
        cmocka_unit_test(the_tail_of_a_slab_is_guarded),
        cmocka_unit_test(every_name_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
