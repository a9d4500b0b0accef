/* memory/memory.h: the contract of floor 1 is the public header; this adds nothing to it but the
 * way in for the floors above. */
#ifndef RF_MEMORY_H
#define RF_MEMORY_H

#include "base/base.h"

#include <ringfence/memory.h>

/* Fills row for a region of count * unit_bytes; checked. Errors: RF_ERR_NO_FIT naming id. */
rf_status rf_plan_add_region(rf_plan *plan, const char *id, const char *format, rf_scope_kind scope,
                             rf_pool pool, uint64_t count, uint64_t unit_bytes, rf_error *err);

#endif
