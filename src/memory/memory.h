/* memory/memory.h: the contract of floor 1 is the public header; this adds to it what the files
 * of this floor, and the floors above that append rows, need.
 */
#ifndef RF_MEMORY_H
#define RF_MEMORY_H

#include "base/base.h"

#include <ringfence/memory.h>

#define RF_TRACE_LEDGER_ID "trace.ledger"
#define RF_TRACE_EVENTS_ID "trace.events"

/* Fills row for a region of count * unit_bytes; checked. Errors: RF_ERR_NO_FIT naming id. */
rf_status rf_plan_add_region(rf_plan *plan, const char *id, const char *format, rf_scope_kind scope,
                             rf_pool pool, uint64_t count, uint64_t unit_bytes, rf_error *err);

/* ---- between the files of this floor ----------------------------------------------------- */

/* Borrows the row with this id in one scope and domain; NULL when there is none. */
const rf_plan_row *rf_plan_find_in(const rf_plan *plan, const char *id, rf_scope_kind scope,
                                   rf_domain domain);
/* Rows that layout adds: nobody takes them. */
bool rf_plan_row_is_padding(const rf_plan_row *row);
/* Writes the pattern of an arena that starts at base; bytes is a multiple of 8. */
void rf_pattern_fill(void *base, uint64_t bytes);

#endif
