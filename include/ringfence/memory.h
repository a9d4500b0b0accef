/* ringfence/memory.h: plan, scope, trace, check. Usable alone by any other engine.
 *
 *   rows ──► plan ──► layout ──► scope: take by id, exactly once ──► seal ──► … ──► close
 *                                   │ events                                        │
 *                                   └──────────► ledger ──► planned | taken | written | resident
 *
 * The plan is a list of regions and pure arithmetic: it exists without any memory but the rows,
 * which the caller owns. A scope is opened from a finished plan, never grows, and gives a region
 * out only under the id and the exact bytes that were planned. So "does the program use what it
 * announced?" has no other answer than yes, or the name of a region.
 */
#ifndef RINGFENCE_MEMORY_H
#define RINGFENCE_MEMORY_H

#include <ringfence/base.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- plan -------------------------------------------------------------------------------- */

typedef enum rf_scope_kind {
    RF_SCOPE_MODEL,   /* from open to close */
    RF_SCOPE_FORWARD, /* one step: a slab that is reset, never freed, between steps */
    RF_SCOPE_AMBIENT, /* plain memory of the caller; listed, not given out by a scope */
    RF_SCOPE_COUNT
} rf_scope_kind;

typedef enum rf_domain {
    RF_DOMAIN_ANON, /* our pages */
    RF_DOMAIN_FILE, /* mapped from the model file, borrowed from the page cache */
    RF_DOMAIN_COUNT
} rf_domain;

/* What a row is for: the lines of the totals. */
typedef enum rf_pool {
    RF_POOL_WEIGHTS,
    RF_POOL_KV,
    RF_POOL_FORWARD,
    RF_POOL_TABLES,
    RF_POOL_WORKERS,
    RF_POOL_OTHER,
    RF_POOL_COUNT
} rf_pool;

#define RF_ID_BYTES     80
#define RF_REGION_ALIGN 64u /* least alignment of a region */
#define RF_REGION_GUARD 64u /* least gap behind a MODEL region; check fills and reads it */

typedef struct rf_plan_row {
    char id[RF_ID_BYTES];     /* canonical tensor id: kv.layers[3].k */
    char source[RF_ID_BYTES]; /* weights: the tensor's name in the file; else empty */
    char format[16];          /* name of the format, "bytes" for plain tables */
    rf_scope_kind scope;
    rf_domain domain;
    rf_pool pool;
    uint64_t bytes;
    uint64_t align; /* power of two; 0 means RF_REGION_ALIGN */
    uint64_t
        offset; /* in the arena; FILE rows: in the file. Filled by layout (FILE: by the adder) */
    int32_t first_op; /* FORWARD: the ops between which it lives, both included; else -1 */
    int32_t last_op;
    uint64_t hash; /* of id; filled by rf_plan_add */
} rf_plan_row;

typedef struct rf_plan {
    rf_plan_row *rows; /* borrowed; NULL counts only */
    uint32_t row_capacity;
    uint32_t row_count;
    bool laid_out;
    uint64_t arena_bytes[RF_SCOPE_COUNT][RF_DOMAIN_COUNT]; /* whole pages for ANON arenas */
    uint64_t pool_bytes[RF_POOL_COUNT]; /* FORWARD: the slab, not the sum of its rows */
    uint64_t anon_bytes;
    uint64_t file_bytes;
    uint64_t total_bytes;
} rf_plan;

/* Starts a plan over rows[capacity] (borrowed until the plan is no longer used). With rows NULL
 * the plan only counts: run the same additions twice, first to size, then to fill. */
RF_API void rf_plan_init(rf_plan *plan, rf_plan_row *rows, uint32_t row_capacity);

/* Copies row into the plan. Errors: RF_ERR_USAGE (no id, alignment that is no power of two, plan
 * full or laid out, an id that the plan has), never partial. Zero bytes are allowed. */
RF_API rf_status rf_plan_add(rf_plan *plan, const rf_plan_row *row, rf_error *err);

/* Places every row. MODEL/ANON rows follow each other with their guard gaps; FORWARD rows are
 * placed by lifetime, largest first, into the lowest hole in which no row alive at the same op
 * lies; FILE rows keep the offset that they were added with. Adds one row "padding" per arena
 * that has rows (capacity must allow RF_SCOPE_COUNT * RF_DOMAIN_COUNT more rows), so that the rows
 * of MODEL sum to the arena; fills totals. file_bytes_whole: bytes of the whole mapped file, 0 if
 * none. Errors: RF_ERR_NO_FIT when a sum leaves 64 bits, naming the row. */
RF_API rf_status rf_plan_layout(rf_plan *plan, uint64_t file_bytes_whole, rf_error *err);

/* Borrows the row with this id (any scope); NULL when there is none. */
RF_API const rf_plan_row *rf_plan_find(const rf_plan *plan, const char *id);

/* For tests: RF_OK, or RF_ERR_DRIFT naming two rows that overlap while both live. */
RF_API rf_status rf_plan_verify(const rf_plan *plan, rf_error *err);

RF_API const char *rf_scope_kind_name(rf_scope_kind scope); /* "MODEL" ... ; static */
RF_API const char *rf_domain_name(rf_domain domain);        /* "ANON", "FILE"; static */
RF_API const char *rf_pool_name(rf_pool pool);              /* "weights" ... ; static */

/* ---- trace ------------------------------------------------------------------------------- */

#define RF_EVENT_LIST(X)                                                                           \
    X(RF_EVENT_PLAN, "plan")                                                                       \
    X(RF_EVENT_PHASE_BEGIN, "phase_begin")                                                         \
    X(RF_EVENT_PHASE_END, "phase_end")                                                             \
    X(RF_EVENT_ALLOC, "alloc")   /* a region was given out: row, bytes */                          \
    X(RF_EVENT_FREE, "free")     /* a region was given back: row, bytes */                         \
    X(RF_EVENT_RESET, "reset")   /* a FORWARD scope was reset: bytes live before */                \
    X(RF_EVENT_KERNEL, "kernel") /* an op ran: detail = op index, bytes read, duration in value */ \
    X(RF_EVENT_ADAPTER, "adapter") /* a conversion: row = its region, bytes */                     \
    X(RF_EVENT_COUNTER, "counter") /* detail = counter, value */

typedef enum rf_event_kind {
#define RF_EVENT_ENUM(kind, name) kind,
    RF_EVENT_LIST(RF_EVENT_ENUM)
#undef RF_EVENT_ENUM
        RF_EVENT_COUNT
} rf_event_kind;

typedef enum rf_phase {
    RF_PHASE_OPEN,
    RF_PHASE_PREFILL,
    RF_PHASE_DECODE,
    RF_PHASE_SAMPLE,
    RF_PHASE_CLOSE,
    RF_PHASE_COUNT
} rf_phase;

#define RF_NO_ROW UINT32_MAX

typedef struct rf_event { /* one fixed-size record */
    uint64_t time_ns;
    uint64_t bytes;
    uint64_t value;
    uint32_t row; /* index of a plan row, or RF_NO_ROW */
    uint16_t kind;
    uint16_t detail;
} rf_event;

typedef struct rf_ledger_row { /* running totals of one region; never dropped */
    void *address;
    uint64_t taken_bytes;
    uint64_t freed_bytes;
    uint32_t take_count;
    uint32_t adapter_count;
} rf_ledger_row;

typedef struct rf_trace {
    rf_event *events; /* ring of event_capacity; the oldest are dropped, the ledger is not */
    uint32_t event_capacity;
    uint32_t row_count;
    uint64_t emitted; /* events ever emitted */
    rf_ledger_row *rows;
    uint64_t live_bytes[RF_SCOPE_COUNT];
    uint64_t peak_bytes[RF_SCOPE_COUNT];
    uint64_t freed_bytes[RF_SCOPE_COUNT];
    uint64_t alloc_count[RF_SCOPE_COUNT];
    uint64_t reset_count;
    uint64_t adapter_count;
    uint64_t adapter_bytes;
} rf_trace;

/* Appends the rows "trace.ledger" and "trace.events" (MODEL). Call it last: the ledger has one
 * entry for each row of the plan, these, and the paddings. */
RF_API rf_status rf_trace_plan(rf_plan *plan, uint32_t event_capacity, rf_error *err);

/* Emits an event; trace may be NULL (then nothing happens). One thread at a time. */
RF_API void rf_trace_emit(rf_trace *trace, rf_event_kind kind, uint32_t row, uint16_t detail,
                          uint64_t bytes, uint64_t value);
/* The index-th oldest event that is still in the ring; false past the end. Fills *out. */
RF_API bool rf_trace_event(const rf_trace *trace, uint64_t index, rf_event *out);
RF_API const char *rf_event_kind_name(rf_event_kind kind);
RF_API const char *rf_phase_name(rf_phase phase);

/* ---- scope ------------------------------------------------------------------------------- */

typedef struct rf_scope {
    rf_scope_kind kind;
    bool open;
    bool sealed;
    bool pattern;        /* filled with a pattern at open, for check */
    const rf_plan *plan; /* borrowed until close */
    rf_trace *trace;     /* MODEL: in its own region; FORWARD: borrowed from MODEL */
    uint8_t *base;       /* the ANON arena */
    uint64_t bytes;
    rf_trace own_trace;
} rf_scope;

/* What the taker will use a region as; its bytes are count * unit_bytes. */
typedef struct rf_extent {
    const char *format; /* the name that the row has */
    uint64_t count;
    uint64_t unit_bytes;
} rf_extent;

/* Opens the ANON arena of a laid out plan (MODEL or FORWARD): reserved with guard pages, every
 * page written now, with zeros, or with a position-dependent pattern. A MODEL scope sets up the
 * trace in its own regions "trace.ledger" and "trace.events", which the plan must have; a FORWARD
 * scope is given the trace of its MODEL scope (NULL: no events). *scope must be zero.
 * Errors: RF_ERR_NO_FIT (the system refuses), RF_ERR_USAGE; then nothing is held. */
RF_API rf_status rf_scope_open(rf_scope *scope, const rf_plan *plan, rf_scope_kind kind,
                               rf_trace *trace, bool pattern, rf_error *err);

/* Gives out the region `id`; *out borrows it from the scope until close. Errors: RF_ERR_DRIFT when
 * the id is not planned here, was taken before, or extent has other bytes or another format than
 * the row; *out is left alone. */
RF_API rf_status rf_scope_take(rf_scope *scope, const char *id, const rf_extent *extent, void **out,
                               rf_error *err);

/* The same for a FILE row: address (borrowed, somebody else unmaps it) is recorded under id. */
RF_API rf_status rf_scope_adopt(rf_scope *scope, const char *id, const rf_extent *extent,
                                const void *address, rf_error *err);

/* Ends the set-up: RF_ERR_DRIFT naming the first row of this scope (ANON, and for MODEL also FILE,
 * padding apart) that was never taken. After this, nothing more can be taken. */
RF_API rf_status rf_scope_seal(rf_scope *scope, rf_error *err);

/* FORWARD: the end of a step. Costs one event; the memory stays as it is. */
RF_API void rf_scope_reset(rf_scope *scope);

/* Emits one free event per taken region, then releases the arena. Safe on a zero or closed scope.
 * A FORWARD scope must be closed before the MODEL scope that owns its trace. copy (may be NULL) is
 * filled with the totals of the trace after the frees (its events and rows pointers are NULL). */
RF_API void rf_scope_close(rf_scope *scope, rf_trace *copy);

/* ---- check ------------------------------------------------------------------------------- */

typedef struct rf_check_row {
    uint64_t planned_bytes;
    uint64_t taken_bytes;
    uint64_t written_bytes;  /* words that no longer hold the pattern; only with pattern */
    uint64_t resident_bytes; /* UINT64_MAX when the system does not tell */
} rf_check_row;

/* Fills *out for row row_index of the scope's plan. AMBIENT rows: taken = planned. */
RF_API rf_status rf_scope_check_row(const rf_scope *scope, uint32_t row_index, rf_check_row *out,
                                    rf_error *err);
/* With pattern: RF_ERR_DRIFT naming the region behind which a guard byte was written. */
RF_API rf_status rf_scope_check_guards(const rf_scope *scope, rf_error *err);
/* Bytes of the arena that are resident. */
RF_API uint64_t rf_scope_resident(const rf_scope *scope);

#ifdef __cplusplus
}
#endif
#endif
