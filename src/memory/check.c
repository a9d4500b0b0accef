/* memory/check.c: what was planned, against what was taken, written, and is resident.
 *
 * Planned is the plan's row, taken the ledger's, resident the system's word for it. Written comes
 * from a pattern that open has put into every word of the arena, a different one at each place:
 *
 *      | region: words that differ were written | guard: must not differ | region ...
 *
 * Reads only; a scope can be checked at any time between two steps.
 */
#include "memory/memory.h"

#include <string.h>

#define WORD_BYTES 8u

/* ---- pattern ----------------------------------------------------------------------------- */

/* The finishing step of SplitMix64 (Steele, Lea, Flood 2014) over the word's index: no two places
 * hold the same, and no place holds what a program would store. */
static uint64_t pattern_word(uint64_t index)
{
    uint64_t z = (index + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

void rf_pattern_fill(void *base, uint64_t bytes)
{
    uint64_t *words = base;
    for (uint64_t i = 0; i < bytes / WORD_BYTES; i++)
        words[i] = pattern_word(i);
}

/* Bytes of [begin, end) of the arena that lie in words which lost their pattern. A word that is
 * only partly in the range is judged by that part. Stacks of idle workers are read while they live:
 * a count that is a word off there harms nobody, so the thread sanitizer need not look. */
__attribute__((no_sanitize("thread"))) static uint64_t changed_bytes(const uint8_t *base,
                                                                     uint64_t begin, uint64_t end)
{
    uint64_t changed = 0;
    for (uint64_t at = begin; at < end;) {
        uint64_t skip = at % WORD_BYTES;
        uint64_t count = RF_MIN(WORD_BYTES - skip, end - at);
        uint64_t expected = pattern_word(at / WORD_BYTES);
        if (memcmp(base + at, (const uint8_t *)&expected + skip, (size_t)count) != 0) {
            changed += count;
        }
        at += count;
    }
    return changed;
}

/* ---- gaps -------------------------------------------------------------------------------- */

static bool is_placed_in(const rf_scope *scope, const rf_plan_row *row)
{
    return row->scope == scope->kind && row->domain == RF_DOMAIN_ANON &&
           !rf_plan_row_is_padding(row);
}

/* One stretch of the arena that belongs to no region, and the row before it (NULL: none). */
typedef struct rf_gap {
    const rf_plan_row *owner;
    uint64_t begin;
    uint64_t end;
} rf_gap;

/* Steps to the gap behind the next row at or after *index; false when there are no more. MODEL
 * rows lie in the order of the plan, each with a gap. In a FORWARD slab only the rest behind the
 * highest row belongs to nobody. */
static bool next_gap(const rf_scope *scope, uint32_t *index, rf_gap *gap)
{
    const rf_plan *plan = scope->plan;
    *gap = (rf_gap){.end = scope->bytes};
    for (; *index < plan->row_count; (*index)++) {
        const rf_plan_row *row = &plan->rows[*index];
        if (!is_placed_in(scope, row))
            continue;
        if (scope->kind == RF_SCOPE_MODEL && gap->owner) {
            gap->end = row->offset;
            return true;
        }
        if (gap->owner && row->offset + row->bytes < gap->begin)
            continue;
        gap->owner = row;
        gap->begin = row->offset + row->bytes;
    }
    return gap->owner != NULL;
}

static uint64_t gaps_resident(const rf_scope *scope)
{
    rf_gap gap;
    uint64_t resident = 0;
    for (uint32_t index = 0; next_gap(scope, &index, &gap);) {
        uint64_t bytes = rf_os_resident(scope->base + gap.begin, gap.end - gap.begin);
        if (bytes == UINT64_MAX)
            return UINT64_MAX;
        resident += bytes;
    }
    return resident;
}

/* ---- check ------------------------------------------------------------------------------- */

static void check_padding(const rf_scope *scope, const rf_plan_row *row, rf_check_row *out)
{
    out->taken_bytes = row->bytes; /* the arena has it without anybody's asking */
    if (row->domain == RF_DOMAIN_ANON)
        out->resident_bytes = gaps_resident(scope);
}

static void check_region(const rf_scope *scope, const rf_plan_row *row, uint32_t row_index,
                         rf_check_row *out)
{
    const rf_ledger_row *entry = scope->trace ? &scope->trace->rows[row_index] : NULL;
    const void *address = NULL;
    if (entry) {
        out->taken_bytes = entry->taken_bytes;
        address = entry->address;
    }
    if (row->domain == RF_DOMAIN_ANON) {
        address = scope->base + row->offset;
        if (scope->pattern) {
            out->written_bytes = changed_bytes(scope->base, row->offset, row->offset + row->bytes);
        }
    }
    if (address)
        out->resident_bytes = rf_os_resident(address, row->bytes);
}

rf_status rf_scope_check_row(const rf_scope *scope, uint32_t row_index, rf_check_row *out,
                             rf_error *err)
{
    if (!scope->open)
        return rf_fail(err, RF_ERR_USAGE, "check", "the scope is not open");
    if (row_index >= scope->plan->row_count) {
        rf_fail(err, RF_ERR_USAGE, "check", "the plan has no such row");
        rf_fail_expected(err, "less than %u", scope->plan->row_count);
        rf_fail_got(err, "%u", row_index);
        return RF_ERR_USAGE;
    }
    const rf_plan_row *row = &scope->plan->rows[row_index];
    if (row->scope != scope->kind && row->scope != RF_SCOPE_AMBIENT) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "the row belongs to another scope");
    }
    *out = (rf_check_row){.planned_bytes = row->bytes, .resident_bytes = UINT64_MAX};
    if (row->scope == RF_SCOPE_AMBIENT)
        out->taken_bytes = row->bytes;
    else if (rf_plan_row_is_padding(row))
        check_padding(scope, row, out);
    else
        check_region(scope, row, row_index, out);
    return RF_OK;
}

rf_status rf_scope_check_guards(const rf_scope *scope, rf_error *err)
{
    if (!scope->open || !scope->pattern) {
        return rf_fail(err, RF_ERR_USAGE, "check", "the scope was opened without a pattern");
    }
    rf_gap gap;
    for (uint32_t index = 0; next_gap(scope, &index, &gap);) {
        if (changed_bytes(scope->base, gap.begin, gap.end) == 0)
            continue;
        uint64_t at = gap.begin;
        while (changed_bytes(scope->base, at, at + 1) == 0)
            at++;
        rf_fail(err, RF_ERR_DRIFT, gap.owner->id, "it was written past its end");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)gap.owner->bytes);
        rf_fail_got(err, "byte %llu is changed", (unsigned long long)(at - gap.owner->offset));
        return RF_ERR_DRIFT;
    }
    return RF_OK;
}

uint64_t rf_scope_resident(const rf_scope *scope)
{
    return scope->open && scope->base ? rf_os_resident(scope->base, scope->bytes) : 0;
}
