/* tests/unit/plan_rows.h: rows of a plan in a line, for the tests of the memory floor.
 *
 * Inline, so that a test that needs only some of them compiles without a word.
 */
#ifndef RF_TEST_PLAN_ROWS_H
#define RF_TEST_PLAN_ROWS_H

#include "memory/memory.h"

#include <stdio.h>
#include <string.h>

static inline rf_plan_row make_row(const char *id, rf_scope_kind scope, uint64_t bytes)
{
    rf_plan_row row = {.format = "bytes",
                       .scope = scope,
                       .pool = scope == RF_SCOPE_FORWARD ? RF_POOL_FORWARD : RF_POOL_OTHER,
                       .bytes = bytes,
                       .first_op = -1,
                       .last_op = -1};
    snprintf(row.id, sizeof row.id, "%s", id);
    return row;
}

static inline void add(rf_plan *plan, const char *id, rf_scope_kind scope, uint64_t bytes)
{
    rf_plan_row row = make_row(id, scope, bytes);
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

static inline void add_file(rf_plan *plan, const char *id, uint64_t bytes, uint64_t offset)
{
    rf_plan_row row = make_row(id, RF_SCOPE_MODEL, bytes);
    row.domain = RF_DOMAIN_FILE;
    row.pool = RF_POOL_WEIGHTS;
    row.offset = offset;
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

static inline void lay_out(rf_plan *plan, uint64_t file_bytes)
{
    rf_error err = {0};
    rf_status status = rf_plan_layout(plan, file_bytes, &err);
    if (status != RF_OK)
        print_error("%s: %s\n", err.where, err.what);
    assert_int_equal(status, RF_OK);
    assert_int_equal(rf_plan_verify(plan, &err), RF_OK);
}

static inline void add_forward(rf_plan *plan, const char *id, uint64_t bytes, int first, int last)
{
    rf_plan_row row = make_row(id, RF_SCOPE_FORWARD, bytes);
    row.first_op = first;
    row.last_op = last;
    assert_int_equal(rf_plan_add(plan, &row, NULL), RF_OK);
}

#endif
