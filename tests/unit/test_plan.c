/* tests/unit/test_plan.c: the plan: what is counted, refused, placed, and how tightly. */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "plan_rows.h"

#define ROWS_MAX 400u

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* ---- plan -------------------------------------------------------------------------------- */

static void counting_and_filling_give_the_same_number_of_rows(void **state)
{
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

static void a_wrong_row_is_refused_and_changes_nothing(void **state)
{
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

static void nothing_is_added_after_the_layout(void **state)
{
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

static void sizes_beyond_64_bits_do_not_fit_and_are_named(void **state)
{
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

static void a_layout_that_fails_leaves_the_plan_as_it_was(void **state)
{
    (void)state;
    rf_plan_row rows[8];
    rf_plan plan;
    rf_error err = {0};
    rf_plan_init(&plan, rows, 8);
    add(&plan, "small", RF_SCOPE_MODEL, 100); /* MODEL can be laid out, FORWARD cannot */
    add(&plan, "vast", RF_SCOPE_FORWARD, UINT64_MAX - 100);
    assert_int_equal(rf_plan_layout(&plan, 0, &err), RF_ERR_NO_FIT);
    assert_int_equal(plan.row_count, 2);
    assert_int_equal(plan.arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_ANON], 0);
    assert_false(plan.laid_out);
}

static void model_rows_and_their_padding_sum_to_the_arena(void **state)
{
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
    for (uint32_t i = 0; i < plan.row_count; i++)
        sum += rows[i].bytes;
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

static void totals_add_up_over_scopes_domains_and_pools(void **state)
{
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
    assert_int_equal(
        rf_plan_add_region(&plan, "kv", "f16", RF_SCOPE_MODEL, RF_POOL_KV, 128, 2, NULL), RF_OK);
    lay_out(&plan, 10000);
    assert_int_equal(plan.file_bytes, 10000);
    assert_int_equal(plan.pool_bytes[RF_POOL_WEIGHTS], 5000); /* header and gaps are padding */
    assert_int_equal(plan.pool_bytes[RF_POOL_KV], 256);
    /* The two buffers share the slab. */
    assert_int_equal(plan.pool_bytes[RF_POOL_FORWARD], 8192);
    assert_int_equal(plan.arena_bytes[RF_SCOPE_AMBIENT][RF_DOMAIN_ANON], 777);
    uint64_t pools = 0;
    for (int i = 0; i < RF_POOL_COUNT; i++)
        pools += plan.pool_bytes[i];
    assert_int_equal(pools, plan.total_bytes);
    assert_int_equal(plan.total_bytes, plan.anon_bytes + plan.file_bytes);
    assert_int_equal(rf_plan_find(&plan, "w2")->offset, 4096);
}

static void a_file_whose_data_is_missing_counts_its_rows(void **state)
{
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
static uint64_t lower_bound(const rf_plan *plan, int op_count)
{
    uint64_t bound = 0;
    for (int op = 0; op < op_count; op++) {
        uint64_t live = 0;
        for (uint32_t i = 0; i < plan->row_count; i++) {
            const rf_plan_row *row = &plan->rows[i];
            if (row->scope != RF_SCOPE_FORWARD || row->first_op < 0)
                continue;
            if (row->first_op <= op && op <= row->last_op)
                live += row->bytes;
        }
        bound = RF_MAX(bound, live);
    }
    return bound;
}

static void random_plans_never_overlap(void **state)
{
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

static void verify_names_two_rows_that_overlap_while_both_live(void **state)
{
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
                     uint64_t kv_width, uint64_t hidden, uint64_t vocabulary, uint64_t scratch)
{
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

static void a_slab_is_at_most_a_twentieth_above_its_lower_bound(void **state)
{
    (void)state;
    static const uint64_t models[][7] = {/* rows, width, q, kv, hidden, vocabulary, scratch */
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
        /* Measured: at most 1.1 % with the last page's rest; smallest first costs up to 27 %. */
        assert_true((double)slab <= 1.05 * (double)bound + (double)rf_os_page_bytes());
    }
}

static void a_row_without_a_lifetime_shares_its_place_with_nobody(void **state)
{
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counting_and_filling_give_the_same_number_of_rows),
        cmocka_unit_test(a_wrong_row_is_refused_and_changes_nothing),
        cmocka_unit_test(nothing_is_added_after_the_layout),
        cmocka_unit_test(sizes_beyond_64_bits_do_not_fit_and_are_named),
        cmocka_unit_test(a_layout_that_fails_leaves_the_plan_as_it_was),
        cmocka_unit_test(model_rows_and_their_padding_sum_to_the_arena),
        cmocka_unit_test(totals_add_up_over_scopes_domains_and_pools),
        cmocka_unit_test(a_file_whose_data_is_missing_counts_its_rows),
        cmocka_unit_test(random_plans_never_overlap),
        cmocka_unit_test(verify_names_two_rows_that_overlap_while_both_live),
        cmocka_unit_test(a_slab_is_at_most_a_twentieth_above_its_lower_bound),
        cmocka_unit_test(a_row_without_a_lifetime_shares_its_place_with_nobody),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
