/* memory/scope.c: one block of memory per lifetime.
 *
 * A scope is opened from a finished plan and never grows. Callers take regions by the id under
 * which they were planned, each exactly once; seal fails if any is missing. So "does the program
 * use what it announced?" has no other answer than yes, or the name of the region that was
 * forgotten.
 *
 * Pages are written once here, on purpose: a lazy zero page would become a fault inside a token.
 * This file knows no tensor, no file and no thread. The trace of a MODEL scope lies in the
 * rf_scope itself, so the struct stays where it was opened.
 */
#include "memory/memory.h"

#include <string.h>

/* ---- open -------------------------------------------------------------------------------- */

static bool is_row_of(const rf_scope *scope, const rf_plan_row *row)
{
    if (row->scope != scope->kind || rf_plan_row_is_padding(row))
        return false;
    return true;
}

/* Sets the trace up in the two regions that the plan has for it, and records them as taken: the
 * ledger that counts everything counts itself. */
static rf_status open_own_trace(rf_scope *scope, rf_error *err)
{
    const rf_plan *plan = scope->plan;
    const rf_plan_row *ledger =
        rf_plan_find_in(plan, RF_TRACE_LEDGER_ID, RF_SCOPE_MODEL, RF_DOMAIN_ANON);
    const rf_plan_row *events =
        rf_plan_find_in(plan, RF_TRACE_EVENTS_ID, RF_SCOPE_MODEL, RF_DOMAIN_ANON);
    if (!ledger || !events) {
        return rf_fail(err, RF_ERR_USAGE, ledger ? RF_TRACE_EVENTS_ID : RF_TRACE_LEDGER_ID,
                       "the plan has no row for the trace");
    }
    uint64_t ledger_rows = ledger->bytes / sizeof(rf_ledger_row);
    uint64_t event_count = events->bytes / sizeof(rf_event);
    if (ledger_rows < plan->row_count || event_count > UINT32_MAX) {
        rf_fail(err, RF_ERR_USAGE, RF_TRACE_LEDGER_ID, "rows were added behind those of the trace");
        rf_fail_expected(err, "%u entries", plan->row_count);
        rf_fail_got(err, "%llu", (unsigned long long)ledger_rows);
        return RF_ERR_USAGE;
    }
    memset(scope->base + ledger->offset, 0, (size_t)ledger->bytes);
    scope->own_trace = (rf_trace){
        .events = (rf_event *)(void *)(scope->base + events->offset),
        .event_capacity = (uint32_t)event_count,
        .row_count = plan->row_count,
        .rows = (rf_ledger_row *)(void *)(scope->base + ledger->offset),
    };
    scope->trace = &scope->own_trace;
    void *region = NULL;
    rf_extent extent = {"bytes", ledger_rows, sizeof(rf_ledger_row)};
    rf_status status = rf_scope_take(scope, RF_TRACE_LEDGER_ID, &extent, &region, err);
    if (status != RF_OK)
        return status;
    extent = (rf_extent){"bytes", event_count, sizeof(rf_event)};
    return rf_scope_take(scope, RF_TRACE_EVENTS_ID, &extent, &region, err);
}

rf_status rf_scope_open(rf_scope *scope, const rf_plan *plan, rf_scope_kind kind, rf_trace *trace,
                        bool pattern, rf_error *err)
{
    if (!plan->laid_out) {
        return rf_fail(err, RF_ERR_USAGE, "scope", "the plan is not laid out");
    }
    if (kind != RF_SCOPE_MODEL && kind != RF_SCOPE_FORWARD) {
        return rf_fail(err, RF_ERR_USAGE, "scope", "only MODEL and FORWARD can be opened");
    }
    if (kind == RF_SCOPE_FORWARD && trace && trace->row_count != plan->row_count) {
        return rf_fail(err, RF_ERR_USAGE, "scope", "the trace belongs to another plan");
    }
    uint64_t bytes = plan->arena_bytes[kind][RF_DOMAIN_ANON];
    void *base = NULL;
    if (bytes > 0) {
        rf_status status = rf_os_reserve(bytes, &base, err);
        if (status != RF_OK)
            return status;
        if (pattern)
            rf_pattern_fill(base, bytes);
        else
            rf_os_touch(base, bytes);
    }
    *scope = (rf_scope){.kind = kind,
                        .open = true,
                        .pattern = pattern,
                        .plan = plan,
                        .trace = trace,
                        .base = base,
                        .bytes = bytes};
    if (kind == RF_SCOPE_FORWARD)
        return RF_OK;
    rf_status status = open_own_trace(scope, err);
    if (status != RF_OK) {
        rf_os_release(base, bytes);
        *scope = (rf_scope){0};
    }
    return status;
}

/* ---- take -------------------------------------------------------------------------------- */

static rf_status check_extent(const rf_plan_row *row, const rf_extent *extent, rf_error *err)
{
    uint64_t bytes = 0;
    if (!rf_mul(extent->count, extent->unit_bytes, &bytes)) {
        rf_fail(err, RF_ERR_DRIFT, row->id, "it is taken with a size that leaves 64 bits");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)row->bytes);
        rf_fail_got(err, "%llu units of %llu bytes", (unsigned long long)extent->count,
                    (unsigned long long)extent->unit_bytes);
        return RF_ERR_DRIFT;
    }
    if (bytes != row->bytes) {
        rf_fail(err, RF_ERR_DRIFT, row->id, "it is taken with another size than was planned");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)row->bytes);
        rf_fail_got(err, "%llu bytes", (unsigned long long)bytes);
        return RF_ERR_DRIFT;
    }
    const char *format = extent->format ? extent->format : "";
    if (strcmp(format, row->format) != 0) {
        rf_fail(err, RF_ERR_DRIFT, row->id, "it is taken as another format than was planned");
        rf_fail_expected(err, "%s", row->format);
        rf_fail_got(err, "%s", format);
        return RF_ERR_DRIFT;
    }
    return RF_OK;
}

/* Finds the row that may be given out under id now. */
static rf_status find_takeable(const rf_scope *scope, const char *id, rf_domain domain,
                               const rf_extent *extent, const rf_plan_row **out, rf_error *err)
{
    if (!scope->open)
        return rf_fail(err, RF_ERR_DRIFT, id, "the scope is not open");
    if (scope->sealed)
        return rf_fail(err, RF_ERR_DRIFT, id, "the scope is sealed");
    const rf_plan_row *row = rf_plan_find_in(scope->plan, id, scope->kind, domain);
    if (!row || rf_plan_row_is_padding(row)) {
        rf_fail(err, RF_ERR_DRIFT, id, "it is not planned here");
        rf_fail_expected(err, "a row of %s/%s", rf_scope_kind_name(scope->kind),
                         rf_domain_name(domain));
        return RF_ERR_DRIFT;
    }
    uint32_t index = (uint32_t)(row - scope->plan->rows);
    if (scope->trace && scope->trace->rows[index].take_count > 0) {
        return rf_fail(err, RF_ERR_DRIFT, id, "it was taken before");
    }
    *out = row;
    return check_extent(row, extent, err);
}

static void record_take(rf_scope *scope, const rf_plan_row *row, const void *address)
{
    if (!scope->trace)
        return;
    uint32_t index = (uint32_t)(row - scope->plan->rows);
    scope->trace->rows[index].address = (void *)(uintptr_t)address;
    rf_trace_emit(scope->trace, RF_EVENT_ALLOC, index, (uint16_t)row->scope, row->bytes,
                  (uint64_t)row->domain);
}

rf_status rf_scope_take(rf_scope *scope, const char *id, const rf_extent *extent, void **out,
                        rf_error *err)
{
    const rf_plan_row *row = NULL;
    rf_status status = find_takeable(scope, id, RF_DOMAIN_ANON, extent, &row, err);
    if (status != RF_OK)
        return status;
    void *address = scope->base + row->offset;
    record_take(scope, row, address);
    *out = address;
    return RF_OK;
}

rf_status rf_scope_adopt(rf_scope *scope, const char *id, const rf_extent *extent,
                         const void *address, rf_error *err)
{
    const rf_plan_row *row = NULL;
    rf_status status = find_takeable(scope, id, RF_DOMAIN_FILE, extent, &row, err);
    if (status != RF_OK)
        return status;
    record_take(scope, row, address);
    return RF_OK;
}

rf_status rf_scope_seal(rf_scope *scope, rf_error *err)
{
    if (!scope->open)
        return rf_fail(err, RF_ERR_DRIFT, "scope", "the scope is not open");
    for (uint32_t i = 0; scope->trace && i < scope->plan->row_count; i++) {
        const rf_plan_row *row = &scope->plan->rows[i];
        if (is_row_of(scope, row) && scope->trace->rows[i].take_count == 0) {
            rf_fail(err, RF_ERR_DRIFT, row->id, "it was planned but never taken");
            rf_fail_expected(err, "%llu bytes", (unsigned long long)row->bytes);
            rf_fail_got(err, "0 bytes");
            return RF_ERR_DRIFT;
        }
    }
    scope->sealed = true;
    return RF_OK;
}

/* ---- reset and close --------------------------------------------------------------------- */

void rf_scope_reset(rf_scope *scope)
{
    if (!scope->open || !scope->trace)
        return;
    rf_trace_emit(scope->trace, RF_EVENT_RESET, RF_NO_ROW, (uint16_t)scope->kind,
                  scope->trace->live_bytes[scope->kind], 0);
}

void rf_scope_close(rf_scope *scope, rf_trace *copy)
{
    if (copy)
        *copy = (rf_trace){0};
    if (!scope->open)
        return;
    rf_trace *trace = scope->trace;
    for (uint32_t i = scope->plan->row_count; trace && i-- > 0;) {
        const rf_plan_row *row = &scope->plan->rows[i];
        const rf_ledger_row *entry = &trace->rows[i];
        if (!is_row_of(scope, row) || entry->take_count == 0)
            continue;
        rf_trace_emit(trace, RF_EVENT_FREE, i, (uint16_t)row->scope,
                      entry->taken_bytes - entry->freed_bytes, (uint64_t)row->domain);
    }
    if (copy && trace) {
        *copy = *trace;
        copy->events = NULL;
        copy->rows = NULL;
    }
    rf_os_release(scope->base, scope->bytes);
    *scope = (rf_scope){0};
}
