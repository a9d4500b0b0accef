/* memory/trace.c: one stream of events, and the ledger that it feeds.
 *
 * Events go into a ring of fixed size whose oldest are overwritten. The ledger is updated by each
 * event as it happens and drops nothing, so a report is right however long a run was. A trace is
 * plain memory of its caller: a MODEL scope sets it up in two of its own regions. Knows no clock
 * but the system's and no meaning of a row but its index.
 */
#include "memory/memory.h"

static const char *const event_names[RF_EVENT_COUNT] = {
#define RF_EVENT_NAME(kind, name) [kind] = name,
    RF_EVENT_LIST(RF_EVENT_NAME)
#undef RF_EVENT_NAME
};

static const char *const phase_names[RF_PHASE_COUNT] = {"open", "prefill", "decode", "sample",
                                                        "close"};

const char *rf_event_kind_name(rf_event_kind kind)
{
    return (unsigned)kind < RF_EVENT_COUNT ? event_names[kind] : "?";
}

const char *rf_phase_name(rf_phase phase)
{
    return (unsigned)phase < RF_PHASE_COUNT ? phase_names[phase] : "?";
}

rf_status rf_trace_plan(rf_plan *plan, uint32_t event_capacity, rf_error *err)
{
    uint64_t row_count = (uint64_t)plan->row_count + 2 + RF_SCOPE_COUNT * RF_DOMAIN_COUNT;
    rf_status status = rf_plan_add_region(plan, RF_TRACE_LEDGER_ID, "bytes", RF_SCOPE_MODEL,
                                          RF_POOL_OTHER, row_count, sizeof(rf_ledger_row), err);
    if (status != RF_OK)
        return status;
    return rf_plan_add_region(plan, RF_TRACE_EVENTS_ID, "bytes", RF_SCOPE_MODEL, RF_POOL_OTHER,
                              event_capacity, sizeof(rf_event), err);
}

/* ---- ledger ------------------------------------------------------------------------------ */

static void count_alloc(rf_trace *trace, rf_ledger_row *row, unsigned scope, uint64_t bytes)
{
    if (row) {
        row->taken_bytes += bytes;
        row->take_count++;
    }
    if (scope >= RF_SCOPE_COUNT)
        return;
    trace->alloc_count[scope]++;
    trace->live_bytes[scope] += bytes;
    trace->peak_bytes[scope] = RF_MAX(trace->peak_bytes[scope], trace->live_bytes[scope]);
}

static void count_free(rf_trace *trace, rf_ledger_row *row, unsigned scope, uint64_t bytes)
{
    if (row)
        row->freed_bytes += bytes;
    if (scope >= RF_SCOPE_COUNT)
        return;
    trace->freed_bytes[scope] += bytes;
    trace->live_bytes[scope] -= bytes;
}

static void count_adapter(rf_trace *trace, rf_ledger_row *row, uint64_t bytes)
{
    if (row)
        row->adapter_count++;
    trace->adapter_count++;
    trace->adapter_bytes += bytes;
}

/* ---- events ------------------------------------------------------------------------------ */

void rf_trace_emit(rf_trace *trace, rf_event_kind kind, uint32_t row, uint16_t detail,
                   uint64_t bytes, uint64_t value)
{
    if (!trace)
        return;
    rf_ledger_row *entry = row < trace->row_count ? &trace->rows[row] : NULL;
    switch (kind) {
    case RF_EVENT_ALLOC:
        count_alloc(trace, entry, detail, bytes);
        break;
    case RF_EVENT_FREE:
        count_free(trace, entry, detail, bytes);
        break;
    case RF_EVENT_RESET:
        trace->reset_count++;
        break;
    case RF_EVENT_ADAPTER:
        count_adapter(trace, entry, bytes);
        break;
    default:
        break; /* the rest only tells a story */
    }
    uint64_t index = trace->emitted++;
    if (trace->event_capacity == 0)
        return;
    trace->events[index % trace->event_capacity] = (rf_event){.time_ns = rf_os_clock_ns(),
                                                              .bytes = bytes,
                                                              .value = value,
                                                              .row = row,
                                                              .kind = (uint16_t)kind,
                                                              .detail = detail};
}

bool rf_trace_event(const rf_trace *trace, uint64_t index, rf_event *out)
{
    if (!trace || trace->event_capacity == 0 || !trace->events)
        return false;
    uint64_t held = RF_MIN(trace->emitted, trace->event_capacity);
    if (index >= held)
        return false;
    *out = trace->events[(trace->emitted - held + index) % trace->event_capacity];
    return true;
}
