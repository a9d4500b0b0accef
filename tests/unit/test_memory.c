/* tests/unit/test_memory.c: plan, scope, trace and check.
 *
 * Each rule of the floor is tested from its breaking side: the id that was not planned, the region
 * that was taken twice, the byte that was written behind one.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "memory/memory.h"

#include <stdio.h>
#include <string.h>

#define ROWS_MAX 400u

static uint64_t next_random(uint64_t *state) {
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static rf_plan_row make_row(const char *id, rf_scope_kind scope, uint64_t bytes) {
    rf_plan_row row = {.format = "bytes",
                       .scope = scope,
                       .pool = scope == RF_SCOPE_FORWARD ? RF_POOL_FORWARD : RF_POOL_OTHER,
                       .bytes = bytes,
                       .first_op = -1,
                       .last_op = -1};
    snprintf(row.id, sizeof row.id, "%s", id);
    return row;
}

static void add(rf_plan *plan, const char *id, rf_scope_kind scope, uint64_t bytes) {
    rf_plan_row row = make_row(id, scope, bytes);
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

static void add_forward(rf_plan *plan, const char *id, uint64_t bytes, int first, int last) {
    rf_plan_row row = make_row(id, RF_SCOPE_FORWARD, bytes);
    row.first_op = first;
    row.last_op = last;
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

static void add_file(rf_plan *plan, const char *id, uint64_t bytes, uint64_t offset) {
    rf_plan_row row = make_row(id, RF_SCOPE_MODEL, bytes);
    row.domain = RF_DOMAIN_FILE;
    row.pool = RF_POOL_WEIGHTS;
    row.offset = offset;
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

static void lay_out(rf_plan *plan, uint64_t file_bytes) {
    rf_error err = {0};
    rf_status status = rf_plan_layout(plan, file_bytes, &err);
    if (status != RF_OK) print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    assert_int_equal(rf_plan_verify(plan, &err), RF_OK);
}

static uint32_t index_of(const rf_plan *plan, const char *id) {
    const rf_plan_row *row = rf_plan_find(plan, id);
    assert_non_null(row);
    return (uint32_t)(row - plan->rows);
}

/* ---- plan -------------------------------------------------------------------------------- */

static void counting_and_filling_give_the_same_number_of_rows(void **state) {
    (void)state;
    rf_plan_row rows[4];
    rf_plan counted;
    rf_plan filled;
    rf_plan_init(&counted, NULL, 0);
    rf_plan_init(&filled, rows, 4);
    rf_plan *both[] = {&counted, &filled};
    for (size_t i = 0; i < 2; i++) {
        add(both[i], "a", RF_SCOPE_MODEL, 10);
        add(both[i], "b", RF_SCOPE_FORWARD, 10);
        assert_int_equal(rf_trace_plan(both[i], 16, NULL), RF_OK);
    }
    assert_int_equal(counted.row_count, 4);
    assert_int_equal(filled.row_count, 4);
    assert_int_equal(rf_plan_layout(&counted, 0, NULL), RF_ERR_USAGE);
    assert_null(rf_plan_find(&counted, "a"));
    /* The plan is full now: the padding rows have no place, and nothing is half done. */
    assert_int_equal(rf_plan_layout(&filled, 0, NULL), RF_ERR_USAGE);
    assert_int_equal(filled.row_count, 4);
    assert_false(filled.laid_out);
}

static void a_wrong_row_is_refused_and_changes_nothing(void **state) {
    (void)state;
    rf_plan_row rows[3];
    rf_plan plan;
    rf_error err = {0};
    rf_plan_init(&plan, rows, 3);
    add(&plan, "a", RF_SCOPE_MODEL, 1);
    rf_plan_row row = make_row("", RF_SCOPE_MODEL, 1);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    row = make_row("x", RF_SCOPE_MODEL, 1);
    memset(row.id, 'x', sizeof row.id);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    row = make_row("x", RF_SCOPE_MODEL, 1);
    row.align = 48;
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    assert_string_equal(err.got, "48");
    row.align = rf_os_page_bytes() * 2;
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    row = make_row("a", RF_SCOPE_MODEL, 2);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "a");
    row = make_row("padding", RF_SCOPE_MODEL, 2);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    row = make_row("x", RF_SCOPE_FORWARD, 2);
    row.first_op = 3;
    row.last_op = 2;
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    row = make_row("x", RF_SCOPE_COUNT, 2);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    assert_int_equal(plan.row_count, 1);
    add(&plan, "b", RF_SCOPE_MODEL, 0);
    add(&plan, "a", RF_SCOPE_AMBIENT, 5); /* the same id in another scope is another region */
    row = make_row("c", RF_SCOPE_MODEL, 1);
    assert_int_equal(rf_plan_add(&plan, &row, &err), RF_ERR_USAGE);
    assert_string_equal(err.what, "the plan is full");
    assert_int_equal(plan.row_count, 3);
}

static void nothing_is_added_after_the_layout(void **state) {
    (void)state;
    rf_plan_row rows[8];
    rf_plan plan;
    rf_plan_init(&plan, rows, 8);
    add(&plan, "a", RF_SCOPE_MODEL, 1);
    lay_out(&plan, 0);
    rf_plan_row row = make_row("b", RF_SCOPE_MODEL, 1);
    assert_int_equal(rf_plan_add(&plan, &row, NULL), RF_ERR_USAGE);
    assert_int_equal(rf_plan_layout(&plan, 0, NULL), RF_ERR_USAGE);
}

static void sizes_beyond_64_bits_do_not_fit_and_are_named(void **state) {
    (void)state;
    rf_plan_row rows[8];
    rf_plan plan;
    rf_error err = {0};
    rf_plan_init(&plan, rows, 8);
    assert_int_equal(rf_plan_add_region(&plan, "kv.layers[0].v", "f32", RF_SCOPE_MODEL, RF_POOL_KV,
                                        UINT64_C(1) << 62, 4, &err),
                     RF_ERR_NO_FIT);
    assert_string_equal(err.where, "kv.layers[0].v");
    static const rf_scope_kind scopes[] = {RF_SCOPE_MODEL, RF_SCOPE_FORWARD, RF_SCOPE_AMBIENT};
    for (size_t i = 0; i < RF_ARRAY_COUNT(scopes); i++) {
        rf_plan_init(&plan, rows, 8);
        add(&plan, "small", scopes[i], 4096);
        add(&plan, "vast", scopes[i], UINT64_MAX - 100);
        assert_int_equal(rf_plan_layout(&plan, 0, &err), RF_ERR_NO_FIT);
        assert_true(strlen(err.where) > 0);
        assert_int_equal(plan.row_count, 2);
        assert_int_equal(plan.total_bytes, 0);
    }
}

static void model_rows_and_their_padding_sum_to_the_arena(void **state) {
    (void)state;
    rf_plan_row rows[16];
    rf_plan plan;
    rf_plan_init(&plan, rows, 16);
    add(&plan, "a", RF_SCOPE_MODEL, 1);
    add(&plan, "b", RF_SCOPE_MODEL, 5000);
    add(&plan, "c", RF_SCOPE_MODEL, 0);
    rf_plan_row aligned = make_row("d", RF_SCOPE_MODEL, 64);
    aligned.align = rf_os_page_bytes();
    assert_int_equal(rf_plan_add(&plan, &aligned, NULL), RF_OK);
    lay_out(&plan, 0);
    uint64_t sum = 0;
    uint64_t behind = 0;
    for (uint32_t i = 0; i < plan.row_count; i++) sum += rows[i].bytes;
    for (uint32_t i = 0; i < 4; i++) {
        assert_int_equal(rows[i].offset % RF_REGION_ALIGN, 0);
        assert_true(rows[i].offset >= behind);
        behind = rows[i].offset + rows[i].bytes + RF_REGION_GUARD;
    }
    assert_int_equal(rows[3].offset % rf_os_page_bytes(), 0);
    assert_int_equal(sum, plan.arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_ANON]);
    assert_int_equal(sum % rf_os_page_bytes(), 0);
    assert_int_equal(plan.anon_bytes, sum);
    assert_int_equal(plan.total_bytes, sum);
}

static void totals_add_up_over_scopes_domains_and_pools(void **state) {
    (void)state;
    rf_plan_row rows[24];
    rf_plan plan;
    rf_plan_init(&plan, rows, 24);
    add(&plan, "m", RF_SCOPE_MODEL, 1000);
    add(&plan, "libc", RF_SCOPE_AMBIENT, 777);
    add_forward(&plan, "f1", 5000, 0, 1);
    add_forward(&plan, "f2", 5000, 2, 3);
    add_file(&plan, "w1", 3000, 1024);
    add_file(&plan, "w2", 2000, 4096);
    assert_int_equal(rf_plan_add_region(&plan, "kv", "f16", RF_SCOPE_MODEL, RF_POOL_KV, 128, 2,
                                        NULL),
                     RF_OK);
    lay_out(&plan, 10000);
    assert_int_equal(plan.file_bytes, 10000);
    assert_int_equal(plan.pool_bytes[RF_POOL_WEIGHTS], 10000);
    assert_int_equal(plan.pool_bytes[RF_POOL_KV], 256);
    /* The two buffers share the slab. */
    assert_int_equal(plan.pool_bytes[RF_POOL_FORWARD], 8192);
    assert_int_equal(plan.arena_bytes[RF_SCOPE_AMBIENT][RF_DOMAIN_ANON], 777);
    uint64_t pools = 0;
    for (int i = 0; i < RF_POOL_COUNT; i++) pools += plan.pool_bytes[i];
    assert_int_equal(pools, plan.total_bytes);
    assert_int_equal(plan.total_bytes, plan.anon_bytes + plan.file_bytes);
    assert_int_equal(rf_plan_find(&plan, "w2")->offset, 4096);
}

static void a_file_whose_data_is_missing_counts_its_rows(void **state) {
    (void)state;
    rf_plan_row rows[4];
    rf_plan plan;
    rf_plan_init(&plan, rows, 4);
    add_file(&plan, "w", 3000, 1024);
    lay_out(&plan, 500);
    assert_int_equal(plan.file_bytes, 3000);
    assert_int_equal(plan.rows[1].bytes, 0);
}

/* ---- lifetimes --------------------------------------------------------------------------- */

/* No slab can be smaller than what lives at its busiest op. */
static uint64_t lower_bound(const rf_plan *plan, int op_count) {
    uint64_t bound = 0;
    for (int op = 0; op < op_count; op++) {
        uint64_t live = 0;
        for (uint32_t i = 0; i < plan->row_count; i++) {
            const rf_plan_row *row = &plan->rows[i];
            if (row->scope != RF_SCOPE_FORWARD || row->first_op < 0) continue;
            if (row->first_op <= op && op <= row->last_op) live += row->bytes;
        }
        bound = RF_MAX(bound, live);
    }
    return bound;
}

static void random_plans_never_overlap(void **state) {
    (void)state;
    uint64_t seed = 5;
    static rf_plan_row rows[ROWS_MAX + 6];
    for (int round = 0; round < 200; round++) {
        rf_plan plan;
        rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
        uint32_t count = 1 + (uint32_t)(next_random(&seed) % 60);
        for (uint32_t i = 0; i < count; i++) {
            rf_plan_row row = make_row("x", (rf_scope_kind)(next_random(&seed) % 2), 0);
            snprintf(row.id, sizeof row.id, "r[%u]", i);
            row.bytes = next_random(&seed) % (1 + (UINT64_C(1) << next_random(&seed) % 20));
            row.align = next_random(&seed) % 3 ? 0 : UINT64_C(1) << next_random(&seed) % 13;
            if (next_random(&seed) % 8 != 0) {
                row.first_op = (int32_t)(next_random(&seed) % 30);
                row.last_op = row.first_op + (int32_t)(next_random(&seed) % 10);
            }
            assert_int_equal(rf_plan_add(&plan, &row, NULL), RF_OK);
        }
        lay_out(&plan, 0); /* verifies */
    }
}

static void verify_names_two_rows_that_overlap_while_both_live(void **state) {
    (void)state;
    rf_plan_row rows[8];
    rf_plan plan;
    rf_error err = {0};
    rf_plan_init(&plan, rows, 8);
    add_forward(&plan, "early", 1000, 0, 2);
    add_forward(&plan, "late", 1000, 2, 3);
    lay_out(&plan, 0);
    rows[1].offset = rows[0].offset + 960;
    rows[0].offset = 0;
    assert_int_equal(rf_plan_verify(&plan, &err), RF_ERR_DRIFT);
    assert_string_equal(err.where, "late");
    assert_non_null(strstr(err.what, "early"));
    rows[1].first_op = 3; /* now they never live together */
    rows[1].offset = 960;
    assert_int_equal(rf_plan_verify(&plan, &err), RF_OK);
    rows[1].offset = plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON] - 64;
    assert_int_equal(rf_plan_verify(&plan, &err), RF_ERR_DRIFT);
}

/* The buffers of one layer of a transformer, as a recipe has them. */
static void add_step(rf_plan *plan, uint64_t rows, uint64_t width, uint64_t q_width,
                     uint64_t kv_width, uint64_t hidden, uint64_t vocabulary, uint64_t scratch) {
    add_forward(plan, "forward.x", rows * width * 4, 0, 20);
    add_forward(plan, "forward.norm", rows * width * 4, 1, 4);
    add_forward(plan, "forward.norm.q8", rows * width * 9 / 8, 1, 4);
    add_forward(plan, "forward.q", rows * q_width * 4, 2, 7);
    add_forward(plan, "forward.k", rows * kv_width * 4, 3, 6);
    add_forward(plan, "forward.v", rows * kv_width * 4, 4, 6);
    add_forward(plan, "forward.scores", scratch, 7, 7);
    add_forward(plan, "forward.attn", rows * q_width * 4, 7, 9);
    add_forward(plan, "forward.attn.q8", rows * q_width * 9 / 8, 8, 9);
    add_forward(plan, "forward.attn_out", rows * width * 4, 9, 10);
    add_forward(plan, "forward.ffn_norm", rows * width * 4, 11, 13);
    add_forward(plan, "forward.ffn_norm.q8", rows * width * 9 / 8, 11, 13);
    add_forward(plan, "forward.gate", rows * hidden * 4, 12, 15);
    add_forward(plan, "forward.up", rows * hidden * 4, 13, 15);
    add_forward(plan, "forward.act.q8", rows * hidden * 9 / 8, 15, 16);
    add_forward(plan, "forward.ffn_out", rows * width * 4, 16, 17);
    add_forward(plan, "forward.tile", scratch, 2, 19);
    add_forward(plan, "forward.last", width * 4, 18, 19);
    add_forward(plan, "forward.logits", vocabulary * 4, 19, 20);
}

static void a_slab_is_at_most_1_3_times_its_lower_bound(void **state) {
    (void)state;
    static const uint64_t models[][7] = {
        /* rows, width, q, kv, hidden, vocabulary, scratch */
        {1, 576, 576, 192, 1536, 49152, 65536},
        {128, 576, 576, 192, 1536, 49152, 262144},
        {512, 2048, 2048, 512, 5632, 32000, 1048576},
        {512, 4096, 4096, 1024, 14336, 128256, 2097152},
        {64, 64, 64, 32, 172, 512, 16384},
        {256, 1024, 2048, 1024, 3072, 151936, 524288},
        {256, 2304, 2048, 1024, 9216, 256000, 524288}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(models); i++) {
        rf_plan_row rows[40];
        rf_plan plan;
        const uint64_t *m = models[i];
        rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
        add_step(&plan, m[0], m[1], m[2], m[3], m[4], m[5], m[6]);
        lay_out(&plan, 0);
        uint64_t slab = plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON];
        uint64_t bound = lower_bound(&plan, 21);
        assert_true(slab >= bound);
        assert_true((double)slab <= 1.3 * (double)bound + (double)rf_os_page_bytes());
    }
}

static void a_row_without_a_lifetime_shares_its_place_with_nobody(void **state) {
    (void)state;
    rf_plan_row rows[8];
    rf_plan plan;
    rf_plan_init(&plan, rows, 8);
    add_forward(&plan, "a", 4096, 0, 0);
    add_forward(&plan, "b", 4096, 5, 5);
    add_forward(&plan, "always", 4096, -1, -1);
    lay_out(&plan, 0);
    assert_int_equal(rows[0].offset, rows[1].offset);
    assert_int_not_equal(rows[2].offset, rows[0].offset);
    assert_int_equal(plan.arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON], 8192);
}

/* ---- scope ------------------------------------------------------------------------------- */

typedef struct fixture { /* a plan of a few rows and its two scopes */
    rf_plan_row rows[64];
    rf_plan plan;
    rf_scope model;
    rf_scope forward;
} fixture;

static void open_model(fixture *f, uint32_t event_capacity, bool pattern) {
    rf_error err = {0};
    assert_int_equal(rf_trace_plan(&f->plan, event_capacity, &err), RF_OK);
    lay_out(&f->plan, 4096);
    rf_status status = rf_scope_open(&f->model, &f->plan, RF_SCOPE_MODEL, NULL, pattern, &err);
    if (status != RF_OK) print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
}

static void begin(fixture *f) {
    *f = (fixture){0};
    rf_plan_init(&f->plan, f->rows, RF_ARRAY_COUNT(f->rows));
}

static void *take(rf_scope *scope, const char *id, const char *format, uint64_t count,
                  uint64_t unit_bytes) {
    void *region = NULL;
    rf_error err = {0};
    rf_extent extent = {format, count, unit_bytes};
    rf_status status = rf_scope_take(scope, id, &extent, &region, &err);
    if (status != RF_OK) print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    return region;
}

/* The acceptance test of the design's ancestor: 4 layers x K and V, 2 heads x 8 x 16 positions of
 * f32, are 8,192 bytes in exactly 8 regions. */
static void a_kv_ring_is_eight_allocations_and_frees_to_its_bytes(void **state) {
    (void)state;
    fixture f;
    rf_trace total;
    char id[RF_ID_BYTES];
    begin(&f);
    for (int i = 0; i < 8; i++) {
        snprintf(id, sizeof id, "kv.layers[%d].%c", i / 2, i % 2 ? 'v' : 'k');
        assert_int_equal(rf_plan_add_region(&f.plan, id, "f32", RF_SCOPE_MODEL, RF_POOL_KV,
                                            2 * 8 * 16, 4, NULL),
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
        for (int j = 0; j < 2 * 8 * 16; j++) region[j] = (float)j;
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
        if (index >= 2) alloc_bytes += event.bytes;
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
                           const char *expected, const char *got) {
    rf_error err = {0};
    void *region = &err;
    assert_int_equal(rf_scope_take(scope, id, &extent, &region, &err), RF_ERR_DRIFT);
    assert_ptr_equal(region, &err);
    assert_string_equal(err.where, id);
    assert_non_null(strstr(err.what, what));
    assert_string_equal(err.expected, expected);
    assert_string_equal(err.got, got);
}

static void a_take_that_is_not_as_planned_is_a_named_error(void **state) {
    (void)state;
    fixture f;
    begin(&f);
    assert_int_equal(rf_plan_add_region(&f.plan, "kv", "f16", RF_SCOPE_MODEL, RF_POOL_KV, 100, 2,
                                        NULL),
                     RF_OK);
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

static void seal_names_the_region_that_was_never_taken(void **state) {
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

static void a_scope_that_cannot_be_opened_holds_nothing(void **state) {
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
    assert_int_equal(rf_os_data_bytes(), data);
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
    assert_int_equal(rf_os_data_bytes(), data);
}

static void an_opened_arena_is_zero_and_resident(void **state) {
    (void)state;
    fixture f;
    begin(&f);
    add(&f.plan, "a", RF_SCOPE_MODEL, 50000);
    open_model(&f, 8, false);
    uint8_t *a = take(&f.model, "a", "bytes", 50000, 1);
    for (int i = 0; i < 50000; i++) assert_int_equal(a[i], 0);
    uint64_t resident = rf_scope_resident(&f.model);
    if (resident != UINT64_MAX) assert_int_equal(resident, f.model.bytes);
    rf_scope_close(&f.model, NULL);
}

static void a_forward_scope_uses_the_trace_of_its_model(void **state) {
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

static void a_forward_scope_without_a_trace_emits_nothing(void **state) {
    (void)state;
    fixture f;
    rf_trace total;
    begin(&f);
    add_forward(&f.plan, "forward.x", 4000, 0, 5);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, NULL, true, NULL),
                     RF_OK);
    take(&f.forward, "forward.x", "bytes", 4000, 1);
    rf_scope_reset(&f.forward);
    assert_int_equal(rf_scope_seal(&f.forward, NULL), RF_OK);
    rf_scope_close(&f.forward, &total);
    assert_int_equal(total.emitted, 0);
}

/* ---- trace ------------------------------------------------------------------------------- */

static void without_a_trace_nothing_happens(void **state) {
    (void)state;
    rf_event event;
    rf_trace_emit(NULL, RF_EVENT_ALLOC, 0, RF_SCOPE_MODEL, 100, 0);
    assert_false(rf_trace_event(NULL, 0, &event));
}

static void the_ledger_survives_an_overflow_of_the_event_ring(void **state) {
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

static void a_trace_without_room_for_events_still_counts(void **state) {
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

static rf_check_row check(const rf_scope *scope, const char *id) {
    rf_check_row row = {0};
    assert_int_equal(rf_scope_check_row(scope, index_of(scope->plan, id), &row, NULL), RF_OK);
    return row;
}

static void check_tells_planned_taken_written_and_resident(void **state) {
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
    if (row.resident_bytes != UINT64_MAX) assert_int_equal(row.resident_bytes, 1001);
    memset(a, 0, 1001);
    assert_int_equal(check(&f.model, "a").written_bytes, 1001); /* clipped to the region */
    assert_int_equal(check(&f.model, "b").written_bytes, 0);
    assert_int_equal(check(&f.model, "libc").taken_bytes, 300);
    assert_int_equal(rf_scope_check_row(&f.model, index_of(&f.plan, "slab"), &row, &err),
                     RF_ERR_USAGE);
    assert_int_equal(rf_scope_check_row(&f.model, f.plan.row_count, &row, &err), RF_ERR_USAGE);
    rf_scope_close(&f.model, NULL);
}

static void the_rows_of_a_scope_are_resident_as_a_whole(void **state) {
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
        if (row.resident_bytes == UINT64_MAX) skip();
        sum += row.resident_bytes;
    }
    assert_int_equal(sum, f.model.bytes);
    assert_int_equal(sum, f.plan.arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_ANON]);
    rf_scope_close(&f.model, NULL);
}

static void a_byte_behind_any_region_is_found_and_its_owner_named(void **state) {
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

static void the_tail_of_a_slab_is_guarded(void **state) {
    (void)state;
    fixture f;
    rf_error err = {0};
    begin(&f);
    add_forward(&f.plan, "x", 4000, 0, 1);
    add_forward(&f.plan, "y", 1000, 1, 2);
    add_forward(&f.plan, "z", 1000, 2, 3);
    lay_out(&f.plan, 0);
    assert_int_equal(rf_scope_open(&f.forward, &f.plan, RF_SCOPE_FORWARD, NULL, true, NULL),
                     RF_OK);
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

static void every_name_is_told(void **state) {
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counting_and_filling_give_the_same_number_of_rows),
        cmocka_unit_test(a_wrong_row_is_refused_and_changes_nothing),
        cmocka_unit_test(nothing_is_added_after_the_layout),
        cmocka_unit_test(sizes_beyond_64_bits_do_not_fit_and_are_named),
        cmocka_unit_test(model_rows_and_their_padding_sum_to_the_arena),
        cmocka_unit_test(totals_add_up_over_scopes_domains_and_pools),
        cmocka_unit_test(a_file_whose_data_is_missing_counts_its_rows),
        cmocka_unit_test(random_plans_never_overlap),
        cmocka_unit_test(verify_names_two_rows_that_overlap_while_both_live),
        cmocka_unit_test(a_slab_is_at_most_1_3_times_its_lower_bound),
        cmocka_unit_test(a_row_without_a_lifetime_shares_its_place_with_nobody),
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
