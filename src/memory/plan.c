/* memory/plan.c: the list of every region that a run will hold, and where each one lies.
 *
 * Rows are added by each floor, then laid out once:
 *
 *      MODEL/ANON    | row | guard | row | guard | ...        | to the page |   one after the other
 *      FORWARD/ANON  | rows by lifetime, overlapping in space | to the page |   a slab
 *      MODEL/FILE    the offsets that the file has
 *
 * Pure arithmetic in rows that the caller owns: it exists before any of the memory that it
 * describes, and every sum is checked. Knows no tensor but by name, and no system but its page
 * size. Scope, check and the budget read it.
 */
#include "memory/memory.h"

#include <string.h>

static const char padding_id[] = "padding";

static const char *const scope_names[RF_SCOPE_COUNT] = {"MODEL", "FORWARD", "AMBIENT"};
static const char *const domain_names[RF_DOMAIN_COUNT] = {"ANON", "FILE"};
static const char *const pool_names[RF_POOL_COUNT] = {"weights", "kv",      "forward",
                                                      "tables",  "workers", "other"};

const char *rf_scope_kind_name(rf_scope_kind scope)
{
    return (unsigned)scope < RF_SCOPE_COUNT ? scope_names[scope] : "?";
}

const char *rf_domain_name(rf_domain domain)
{
    return (unsigned)domain < RF_DOMAIN_COUNT ? domain_names[domain] : "?";
}

const char *rf_pool_name(rf_pool pool)
{
    return (unsigned)pool < RF_POOL_COUNT ? pool_names[pool] : "?";
}

static uint64_t hash_id(const char *id)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a, 64 bits */
    for (; *id; id++)
        hash = (hash ^ (uint8_t)*id) * UINT64_C(0x100000001b3);
    return hash;
}

bool rf_plan_row_is_padding(const rf_plan_row *row)
{
    return strcmp(row->id, padding_id) == 0;
}

/* ---- adding ------------------------------------------------------------------------------ */

void rf_plan_init(rf_plan *plan, rf_plan_row *rows, uint32_t row_capacity)
{
    *plan = (rf_plan){.rows = rows, .row_capacity = rows ? row_capacity : UINT32_MAX};
}

static bool is_terminated(const char *text, size_t capacity)
{
    return memchr(text, '\0', capacity) != NULL;
}

static bool has_enums_in_range(const rf_plan_row *row)
{
    return (unsigned)row->scope < RF_SCOPE_COUNT && (unsigned)row->domain < RF_DOMAIN_COUNT &&
           (unsigned)row->pool < RF_POOL_COUNT;
}

/* A lifetime is two ops in order, or none at all: then the row lives through the whole step. */
static bool has_lifetime_in_order(const rf_plan_row *row)
{
    if (row->first_op < 0 || row->last_op < 0)
        return row->first_op < 0 && row->last_op < 0;
    return row->first_op <= row->last_op;
}

static rf_status validate_row(const rf_plan_row *row, rf_error *err)
{
    if (!is_terminated(row->id, sizeof row->id) || row->id[0] == '\0') {
        return rf_fail(err, RF_ERR_USAGE, "plan", "a row has no id, or one without an end");
    }
    if (!is_terminated(row->source, sizeof row->source) ||
        !is_terminated(row->format, sizeof row->format)) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "its source or format has no end");
    }
    if (rf_plan_row_is_padding(row)) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "this id is kept for the layout");
    }
    if (!has_enums_in_range(row)) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "its scope, domain or pool does not exist");
    }
    if (row->scope == RF_SCOPE_FORWARD && row->domain == RF_DOMAIN_FILE) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "a file cannot lie in a slab");
    }
    /* An arena starts at a page, so a page is the most that a region can be aligned to. */
    if (row->align != 0 && (!rf_is_power_of_two(row->align) || row->align > rf_os_page_bytes())) {
        rf_fail(err, RF_ERR_USAGE, row->id, "its alignment is not possible");
        rf_fail_expected(err, "a power of two up to %llu", (unsigned long long)rf_os_page_bytes());
        rf_fail_got(err, "%llu", (unsigned long long)row->align);
        return RF_ERR_USAGE;
    }
    if (row->scope == RF_SCOPE_FORWARD && !has_lifetime_in_order(row)) {
        rf_fail(err, RF_ERR_USAGE, row->id, "its lifetime ends before it begins");
        rf_fail_got(err, "ops %d to %d", row->first_op, row->last_op);
        return RF_ERR_USAGE;
    }
    return RF_OK;
}

/* The hash is compared first: a model has thousands of rows, and each addition reads them all. */
static const rf_plan_row *find_in(const rf_plan *plan, const char *id, uint64_t hash,
                                  rf_scope_kind scope, rf_domain domain)
{
    if (!plan->rows)
        return NULL;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (row->hash == hash && row->scope == scope && row->domain == domain &&
            strcmp(row->id, id) == 0) {
            return row;
        }
    }
    return NULL;
}

const rf_plan_row *rf_plan_find_in(const rf_plan *plan, const char *id, rf_scope_kind scope,
                                   rf_domain domain)
{
    return find_in(plan, id, hash_id(id), scope, domain);
}

/* Puts a valid row behind the others. */
static rf_status append_row(rf_plan *plan, const rf_plan_row *row, rf_error *err)
{
    if (plan->row_count >= plan->row_capacity) {
        rf_fail(err, RF_ERR_USAGE, row->id, "the plan is full");
        rf_fail_expected(err, "at most %u rows", plan->row_capacity);
        return RF_ERR_USAGE;
    }
    if (plan->rows) {
        rf_plan_row *slot = &plan->rows[plan->row_count];
        *slot = *row;
        slot->hash = hash_id(row->id);
    }
    plan->row_count++;
    return RF_OK;
}

rf_status rf_plan_add(rf_plan *plan, const rf_plan_row *row, rf_error *err)
{
    rf_status status = validate_row(row, err);
    if (status != RF_OK)
        return status;
    if (plan->laid_out) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "the plan is laid out and takes no more rows");
    }
    if (rf_plan_find_in(plan, row->id, row->scope, row->domain)) {
        return rf_fail(err, RF_ERR_USAGE, row->id, "the plan has this id already");
    }
    rf_plan_row copy = *row;
    if (copy.domain == RF_DOMAIN_FILE) /* the file decides where its rows lie */
        copy.align = copy.align ? copy.align : 1;
    else if (copy.align < RF_REGION_ALIGN)
        copy.align = RF_REGION_ALIGN;
    if (copy.domain == RF_DOMAIN_ANON)
        copy.offset = 0;
    if (copy.scope != RF_SCOPE_FORWARD)
        copy.first_op = copy.last_op = -1;
#ifdef RF_PLANT_BYTE
    /* A planted fault: a test builds with this to see that the gate catches one byte of drift. */
    if (strcmp(copy.id, "kv.layers[0].k") == 0)
        copy.bytes++;
#endif
    return append_row(plan, &copy, err);
}

static rf_status copy_name(char *to, size_t capacity, const char *name, rf_error *err)
{
    size_t length = strlen(name);
    if (length >= capacity) {
        rf_fail(err, RF_ERR_USAGE, name, "the name is too long for a row of the plan");
        rf_fail_expected(err, "at most %zu bytes", capacity - 1);
        rf_fail_got(err, "%zu", length);
        return RF_ERR_USAGE;
    }
    memcpy(to, name, length + 1);
    return RF_OK;
}

rf_status rf_plan_add_region(rf_plan *plan, const char *id, const char *format, rf_scope_kind scope,
                             rf_pool pool, uint64_t count, uint64_t unit_bytes, rf_error *err)
{
    rf_plan_row row = {
        .scope = scope, .domain = RF_DOMAIN_ANON, .pool = pool, .first_op = -1, .last_op = -1};
    rf_status status = copy_name(row.id, sizeof row.id, id, err);
    if (status == RF_OK)
        status = copy_name(row.format, sizeof row.format, format, err);
    if (status != RF_OK)
        return status;
    if (!rf_mul(count, unit_bytes, &row.bytes)) {
        rf_fail(err, RF_ERR_NO_FIT, id, "its size leaves 64 bits");
        rf_fail_got(err, "%llu units of %llu bytes", (unsigned long long)count,
                    (unsigned long long)unit_bytes);
        return RF_ERR_NO_FIT;
    }
    return rf_plan_add(plan, &row, err);
}

const rf_plan_row *rf_plan_find(const rf_plan *plan, const char *id)
{
    if (!plan->rows)
        return NULL;
    uint64_t hash = hash_id(id);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (row->hash == hash && strcmp(row->id, id) == 0)
            return row;
    }
    return NULL;
}

/* ---- layout ------------------------------------------------------------------------------ */

static rf_status fail_sum(rf_error *err, const char *id)
{
    return rf_fail(err, RF_ERR_NO_FIT, id, "the sizes up to this row leave 64 bits");
}

static bool is_in(const rf_plan_row *row, rf_scope_kind scope, rf_domain domain)
{
    return row->scope == scope && row->domain == domain;
}

static uint32_t count_rows(const rf_plan *plan, rf_scope_kind scope, rf_domain domain)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        count += is_in(&plan->rows[i], scope, domain);
    }
    return count;
}

static rf_status sum_rows(const rf_plan *plan, rf_scope_kind scope, rf_domain domain, uint64_t *out,
                          rf_error *err)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (is_in(row, scope, domain) && !rf_add(sum, row->bytes, &sum)) {
            return fail_sum(err, row->id);
        }
    }
    *out = sum;
    return RF_OK;
}

/* Row after row, each with a gap behind it that check fills and reads. */
static rf_status place_model(rf_plan *plan, uint64_t *arena, rf_error *err)
{
    uint64_t at = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        rf_plan_row *row = &plan->rows[i];
        if (!is_in(row, RF_SCOPE_MODEL, RF_DOMAIN_ANON))
            continue;
        if (!rf_align_up(at, row->align, &row->offset) || !rf_add(row->offset, row->bytes, &at) ||
            !rf_add(at, RF_REGION_GUARD, &at)) {
            return fail_sum(err, row->id);
        }
    }
    if (!rf_align_up(at, rf_os_page_bytes(), arena))
        return fail_sum(err, padding_id);
    return RF_OK;
}

static bool live_together(const rf_plan_row *a, const rf_plan_row *b)
{
    if (a->first_op < 0 || b->first_op < 0)
        return true;
    return a->first_op <= b->last_op && b->first_op <= a->last_op;
}

#define NOT_PLACED UINT64_MAX

/* The placed row that lives together with row and lies in [at, at + row->bytes), or NULL. */
static const rf_plan_row *find_collision(const rf_plan *plan, const rf_plan_row *row, uint64_t at)
{
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *other = &plan->rows[i];
        if (!is_in(other, RF_SCOPE_FORWARD, RF_DOMAIN_ANON) || other->offset == NOT_PLACED) {
            continue;
        }
        if (at < other->offset + other->bytes && other->offset < at + row->bytes &&
            live_together(row, other)) {
            return other;
        }
    }
    return NULL;
}

/* Lowest hole: behind a row in the way is the next place that can be free, because every place
 * between here and there would meet the same row. */
static rf_status place_lowest(const rf_plan *plan, rf_plan_row *row, uint64_t *end, rf_error *err)
{
    uint64_t at = 0;
    *end = row->bytes;
    const rf_plan_row *in_the_way;
    while ((in_the_way = find_collision(plan, row, at)) != NULL) {
        uint64_t behind = in_the_way->offset + in_the_way->bytes; /* checked when it was placed */
        if (!rf_align_up(behind, row->align, &at) || !rf_add(at, row->bytes, end)) {
            return fail_sum(err, row->id);
        }
    }
    row->offset = at;
    return RF_OK;
}

static rf_plan_row *largest_not_placed(const rf_plan *plan)
{
    rf_plan_row *largest = NULL;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        rf_plan_row *row = &plan->rows[i];
        if (!is_in(row, RF_SCOPE_FORWARD, RF_DOMAIN_ANON) || row->offset != NOT_PLACED)
            continue;
        if (!largest || row->bytes > largest->bytes)
            largest = row;
    }
    return largest;
}

/* Largest first into the lowest hole ("greedy by size", Pisarchyk and Lee 2020, arXiv 2001.03288).
 * Quadratic and without a sorted copy: a step has a few dozen buffers. */
static rf_status place_forward(rf_plan *plan, uint64_t *arena, uint64_t *high_water, rf_error *err)
{
    for (uint32_t i = 0; i < plan->row_count; i++) {
        rf_plan_row *row = &plan->rows[i];
        if (is_in(row, RF_SCOPE_FORWARD, RF_DOMAIN_ANON))
            row->offset = NOT_PLACED;
    }
    rf_plan_row *row;
    *high_water = 0;
    while ((row = largest_not_placed(plan)) != NULL) {
        uint64_t end = 0;
        rf_status status = place_lowest(plan, row, &end, err);
        if (status != RF_OK)
            return status;
        *high_water = RF_MAX(*high_water, end);
    }
    if (!rf_align_up(*high_water, rf_os_page_bytes(), arena))
        return fail_sum(err, padding_id);
    return RF_OK;
}

static rf_status add_padding(rf_plan *plan, rf_scope_kind scope, rf_domain domain, rf_pool pool,
                             uint64_t bytes, uint64_t offset, rf_error *err)
{
    rf_plan_row row = {.format = "bytes",
                       .scope = scope,
                       .domain = domain,
                       .pool = pool,
                       .bytes = bytes,
                       .align = 1,
                       .offset = offset,
                       .first_op = -1,
                       .last_op = -1};
    memcpy(row.id, padding_id, sizeof padding_id);
    return append_row(plan, &row, err);
}

/* The padding of MODEL is the gaps and the last page's rest; it has no one place. */
static rf_status lay_out_model(rf_plan *plan, rf_error *err)
{
    uint64_t arena = 0;
    uint64_t used = 0;
    if (count_rows(plan, RF_SCOPE_MODEL, RF_DOMAIN_ANON) == 0)
        return RF_OK;
    rf_status status = place_model(plan, &arena, err);
    if (status == RF_OK) {
        status = sum_rows(plan, RF_SCOPE_MODEL, RF_DOMAIN_ANON, &used, err);
    }
    if (status != RF_OK)
        return status;
    plan->arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_ANON] = arena;
    return add_padding(plan, RF_SCOPE_MODEL, RF_DOMAIN_ANON, RF_POOL_OTHER, arena - used, 0, err);
}

static rf_status lay_out_forward(rf_plan *plan, rf_error *err)
{
    uint64_t arena = 0;
    uint64_t high_water = 0;
    if (count_rows(plan, RF_SCOPE_FORWARD, RF_DOMAIN_ANON) == 0)
        return RF_OK;
    rf_status status = place_forward(plan, &arena, &high_water, err);
    if (status != RF_OK)
        return status;
    plan->arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON] = arena;
    return add_padding(plan, RF_SCOPE_FORWARD, RF_DOMAIN_ANON, RF_POOL_FORWARD, arena - high_water,
                       high_water, err);
}

/* A file is mapped whole: its header and what lies between tensors is padding. */
static rf_status lay_out_file(rf_plan *plan, uint64_t file_bytes_whole, rf_error *err)
{
    uint64_t used = 0;
    if (count_rows(plan, RF_SCOPE_MODEL, RF_DOMAIN_FILE) == 0)
        return RF_OK;
    rf_status status = sum_rows(plan, RF_SCOPE_MODEL, RF_DOMAIN_FILE, &used, err);
    if (status != RF_OK)
        return status;
    uint64_t whole = RF_MAX(file_bytes_whole, used);
    plan->arena_bytes[RF_SCOPE_MODEL][RF_DOMAIN_FILE] = whole;
    return add_padding(plan, RF_SCOPE_MODEL, RF_DOMAIN_FILE, RF_POOL_OTHER, whole - used, 0, err);
}

/* Nobody lays AMBIENT memory out; it is only counted. */
static rf_status lay_out_ambient(rf_plan *plan, rf_error *err)
{
    uint64_t *arena = plan->arena_bytes[RF_SCOPE_AMBIENT];
    rf_status status =
        sum_rows(plan, RF_SCOPE_AMBIENT, RF_DOMAIN_ANON, &arena[RF_DOMAIN_ANON], err);
    if (status != RF_OK)
        return status;
    return sum_rows(plan, RF_SCOPE_AMBIENT, RF_DOMAIN_FILE, &arena[RF_DOMAIN_FILE], err);
}

/* Pools add up to the total: the rows of FORWARD share their slab, so it counts once, whole. */
static rf_status fill_totals(rf_plan *plan, rf_error *err)
{
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (row->scope == RF_SCOPE_FORWARD)
            continue;
        if (!rf_add(plan->pool_bytes[row->pool], row->bytes, &plan->pool_bytes[row->pool])) {
            return fail_sum(err, row->id);
        }
    }
    uint64_t slab = plan->arena_bytes[RF_SCOPE_FORWARD][RF_DOMAIN_ANON];
    uint64_t *forward = &plan->pool_bytes[RF_POOL_FORWARD];
    if (!rf_add(*forward, slab, forward))
        return fail_sum(err, "forward");
    for (int scope = 0; scope < RF_SCOPE_COUNT; scope++) {
        const uint64_t *arena = plan->arena_bytes[scope];
        if (!rf_add(plan->anon_bytes, arena[RF_DOMAIN_ANON], &plan->anon_bytes) ||
            !rf_add(plan->file_bytes, arena[RF_DOMAIN_FILE], &plan->file_bytes)) {
            return fail_sum(err, rf_scope_kind_name((rf_scope_kind)scope));
        }
    }
    if (!rf_add(plan->anon_bytes, plan->file_bytes, &plan->total_bytes)) {
        return fail_sum(err, "total");
    }
    return RF_OK;
}

rf_status rf_plan_layout(rf_plan *plan, uint64_t file_bytes_whole, rf_error *err)
{
    if (!plan->rows) {
        return rf_fail(err, RF_ERR_USAGE, "plan", "a plan that only counts cannot be laid out");
    }
    if (plan->laid_out)
        return rf_fail(err, RF_ERR_USAGE, "plan", "it is laid out already");
    rf_plan before = *plan;
    rf_status status = lay_out_model(plan, err);
    if (status == RF_OK)
        status = lay_out_forward(plan, err);
    if (status == RF_OK)
        status = lay_out_file(plan, file_bytes_whole, err);
    if (status == RF_OK)
        status = lay_out_ambient(plan, err);
    if (status == RF_OK)
        status = fill_totals(plan, err);
    if (status != RF_OK) {
        *plan = before; /* without the paddings and half totals */
        return status;
    }
    plan->laid_out = true;
    return RF_OK;
}

/* ---- proof ------------------------------------------------------------------------------- */

static bool overlap(const rf_plan_row *a, const rf_plan_row *b)
{
    if (a->bytes == 0 || b->bytes == 0)
        return false;
    /* MODEL rows own the gap behind them too. */
    uint64_t gap = is_in(a, RF_SCOPE_MODEL, RF_DOMAIN_ANON) ? RF_REGION_GUARD : 0;
    return a->offset < b->offset + b->bytes + gap && b->offset < a->offset + a->bytes + gap;
}

static rf_status verify_row(const rf_plan *plan, const rf_plan_row *row, rf_error *err)
{
    uint64_t end = 0;
    if (!rf_add(row->offset, row->bytes, &end))
        return fail_sum(err, row->id);
    if (row->domain == RF_DOMAIN_FILE)
        return RF_OK; /* the file decides where its rows lie */
    if (end > plan->arena_bytes[row->scope][row->domain] || row->offset % row->align != 0) {
        rf_fail(err, RF_ERR_DRIFT, row->id, "it lies outside of its arena, or not aligned");
        rf_fail_got(err, "offset %llu, %llu bytes", (unsigned long long)row->offset,
                    (unsigned long long)row->bytes);
        return RF_ERR_DRIFT;
    }
    return RF_OK;
}

rf_status rf_plan_verify(const rf_plan *plan, rf_error *err)
{
    if (!plan->laid_out)
        return rf_fail(err, RF_ERR_USAGE, "plan", "it is not laid out");
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (row->scope == RF_SCOPE_AMBIENT || rf_plan_row_is_padding(row))
            continue;
        rf_status status = verify_row(plan, row, err);
        if (status != RF_OK)
            return status;
        for (uint32_t j = 0; j < i; j++) {
            const rf_plan_row *other = &plan->rows[j];
            if (rf_plan_row_is_padding(other) || !is_in(other, row->scope, row->domain))
                continue;
            if (!live_together(row, other) || !overlap(row, other))
                continue;
            rf_fail(err, RF_ERR_DRIFT, row->id, "it overlaps %s while both live", other->id);
            rf_fail_got(err, "offsets %llu and %llu", (unsigned long long)row->offset,
                        (unsigned long long)other->offset);
            return RF_ERR_DRIFT;
        }
    }
    return RF_OK;
}
