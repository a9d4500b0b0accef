/* base/base.h: the contract of floor 0: errors, checked sizes, bounded bytes, text into a fixed
 * buffer, the operating system, and the fixed team of workers.
 *
 * Nothing here knows a tensor, a plan or a file format. Only os.c and workers.c speak to the
 * operating system.
 */
#ifndef RF_BASE_H
#define RF_BASE_H

#include <ringfence/base.h>

#include <stdarg.h>
#include <stdatomic.h>

#define RF_ARRAY_COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define RF_MIN(a, b)          ((a) < (b) ? (a) : (b))
#define RF_MAX(a, b)          ((a) > (b) ? (a) : (b))
#define RF_CACHE_LINE         64u

/* ---- errors ------------------------------------------------------------------------------ */

/* Fills err (may be NULL) with status, where, and the formatted clause; expected and got become
 * empty. Returns status, so that a caller can return it. */
rf_status rf_fail(rf_error *err, rf_status status, const char *where, const char *what, ...)
    RF_PRINTF(4, 5);

/* Adds what was expected (a format) to an error that rf_fail has just filled. Returns its status;
 * without a record the status is not known here, and it is RF_ERR_RUNTIME: what has to return the
 * right one to a caller that passed NULL returns it itself. */
rf_status rf_fail_expected(rf_error *err, const char *expected, ...) RF_PRINTF(2, 3);
/* Likewise what was got. */
rf_status rf_fail_got(rf_error *err, const char *got, ...) RF_PRINTF(2, 3);

/* ---- checked sizes ----------------------------------------------------------------------- */

/* Each fills *out and returns true, or returns false and leaves *out alone when the result does
 * not fit into 64 bits. */
static inline bool rf_add(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t sum;
    if (__builtin_add_overflow(a, b, &sum))
        return false;
    *out = sum;
    return true;
}

static inline bool rf_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;
    if (__builtin_mul_overflow(a, b, &product))
        return false;
    *out = product;
    return true;
}

/* Rounds bytes up to a multiple of align (a power of two). */
static inline bool rf_align_up(uint64_t bytes, uint64_t align, uint64_t *out)
{
    uint64_t sum;
    if (__builtin_add_overflow(bytes, align - 1, &sum))
        return false;
    *out = sum & ~(align - 1);
    return true;
}

static inline bool rf_is_power_of_two(uint64_t value)
{
    return value != 0 && (value & (value - 1)) == 0;
}

/* ---- bounded little-endian cursor -------------------------------------------------------- */

/* Reads forward through bytes that it borrows; the first read past the end sets failed and every
 * read after that gives zero. fail_at is the offset of that first failure. */
typedef struct rf_cursor {
    const uint8_t *data;
    uint64_t size;
    uint64_t at;
    uint64_t fail_at;
    bool failed;
} rf_cursor;

rf_cursor rf_cursor_make(const void *data, uint64_t size);
uint64_t rf_cursor_left(const rf_cursor *cursor);
/* Borrows count bytes and steps over them; NULL when they are not there. */
const uint8_t *rf_cursor_take(rf_cursor *cursor, uint64_t count);
uint8_t rf_cursor_u8(rf_cursor *cursor);
uint16_t rf_cursor_u16(rf_cursor *cursor);
uint32_t rf_cursor_u32(rf_cursor *cursor);
uint64_t rf_cursor_u64(rf_cursor *cursor);

/* ---- text and JSON into a fixed buffer --------------------------------------------------- */

/* A writer never writes past capacity; what does not fit is dropped and overflow is set. length
 * counts what was written; the text is always terminated when capacity > 0. */
typedef struct rf_writer {
    char *text;
    size_t capacity;
    size_t length;
    bool overflow;
    bool comma; /* JSON: the next value in this object or array needs a comma before it */
} rf_writer;

rf_writer rf_writer_make(char *text, size_t capacity);
void rf_write_bytes(rf_writer *writer, const char *bytes, size_t count);
/* Own small formatter, no libc stdio behind it: %s %.*s %c %d %i %u %x %ld %lu %lld %llu %zu %zx
 * %llx %% and %f %.Nf %g %.Ng (for doubles; N up to 17), widths and 0/- flags for integers and
 * strings. */
void rf_write(rf_writer *writer, const char *format, ...) RF_PRINTF(2, 3);
void rf_write_v(rf_writer *writer, const char *format, va_list args);
/* rf_write into a buffer; always terminates; returns the length that was written. */
size_t rf_print(char *text, size_t capacity, const char *format, ...) RF_PRINTF(3, 4);

/* JSON: commas are placed by the writer. A key of NULL writes a bare value (array element). Text
 * is escaped; bytes that are not UTF-8 become U+FFFD. Non-finite numbers become null. */
void rf_json_open(rf_writer *writer, const char *key, char bracket); /* '{' or '[' */
void rf_json_close(rf_writer *writer, char bracket);                 /* '}' or ']' */
void rf_json_text(rf_writer *writer, const char *key, const char *text);
void rf_json_text_n(rf_writer *writer, const char *key, const char *text, size_t length);
void rf_json_u64(rf_writer *writer, const char *key, uint64_t value);
void rf_json_i64(rf_writer *writer, const char *key, int64_t value);
void rf_json_f64(rf_writer *writer, const char *key, double value); /* 9 significant digits */
void rf_json_bool(rf_writer *writer, const char *key, bool value);
void rf_json_null(rf_writer *writer, const char *key);

/* Bytes as KiB, MiB, GiB with at most two decimals ("320 KiB", "1.19 GiB"); returns text. */
const char *rf_print_bytes(char *text, size_t capacity, uint64_t bytes);

/* ---- fingerprints ------------------------------------------------------------------------ */

typedef struct rf_sha256 {
    uint32_t state[8];
    uint64_t total;
    uint8_t block[64];
} rf_sha256;
void rf_sha256_init(rf_sha256 *hash);
void rf_sha256_add(rf_sha256 *hash, const void *bytes, uint64_t count);
void rf_sha256_end(rf_sha256 *hash, uint8_t digest[32]);

/* ---- the operating system ---------------------------------------------------------------- */

typedef struct rf_mapping { /* a file mapped read-only; owned by whoever opened it */
    const uint8_t *data;    /* NULL for an empty file */
    uint64_t size;          /* bytes of the file when it was opened */
} rf_mapping;

typedef struct rf_faults {
    uint64_t minor;
    uint64_t major;
} rf_faults;

typedef struct rf_budget_source { /* what the machine says is available, in bytes */
    uint64_t mem_available;       /* MemAvailable, UINT64_MAX when unknown */
    uint64_t cgroup_left;         /* limit less anonymous use (page cache does not count) */
    uint64_t rlimit_left;         /* the smaller of RLIMIT_AS and RLIMIT_DATA, less what is used */
} rf_budget_source;

uint64_t rf_os_page_bytes(void);
/* Owns: anonymous readable and writable pages, zero, with a PROT_NONE guard page before and
 * after. bytes > 0; *out is page aligned. Nothing is touched. Release with the same bytes. */
rf_status rf_os_reserve(uint64_t bytes, void **out, rf_error *err);
void rf_os_release(void *base, uint64_t bytes);
/* Writes one zero into every page: after this no first-touch fault is left in the range. */
void rf_os_touch(void *base, uint64_t bytes);
/* Touches the next bytes of the calling thread's stack. */
void rf_os_touch_stack(void);
/* Maps path read-only. Errors: RF_ERR_IO (missing, directory, unreadable). */
rf_status rf_os_map(const char *path, rf_mapping *out, rf_error *err);
void rf_os_unmap(rf_mapping *mapping);
typedef struct rf_piece { /* bytes to be written, borrowed */
    const void *data;
    uint64_t bytes;
} rf_piece;
/* Writes pieces[count] behind each other into a temporary file beside path, syncs it and renames
 * it to path: after a failure the file that was there is as it was. A process that is killed in
 * here leaves nothing where the file system knows files without a name (O_TMPFILE); else, and
 * between the last two steps, path + ".ringfence.tmp", which the next write to path takes over.
 * Errors: RF_ERR_IO, also when another process is writing path under that name. */
rf_status rf_os_write_file(const char *path, const rf_piece *pieces, uint32_t count, rf_error *err);
/* Populates the page tables of a file range by reading; progress (may be NULL) is called now and
 * then with the bytes done and stops the work when it returns false. */
rf_status rf_os_populate(const void *base, uint64_t bytes,
                         bool (*progress)(void *context, uint64_t done), void *context,
                         rf_error *err);
/* Bytes of [base, base + bytes) that are in this process's page tables (pagemap), pages shared
 * with a neighbour clipped to the range. UINT64_MAX when the system does not tell. */
uint64_t rf_os_resident(const void *base, uint64_t bytes);
/* Anonymous + Swap of /proc/self/smaps_rollup in bytes; 0 when unknown. */
uint64_t rf_os_anonymous(void);
/* VmData of /proc/self/status in bytes; grows with every mmap and brk. */
uint64_t rf_os_data_bytes(void);
rf_faults rf_os_faults(void);
uint64_t rf_os_clock_ns(void);
/* Processors that this process may use: affinity, and the cgroup's quota rounded up. >= 1. */
uint32_t rf_os_processor_count(void);
void rf_os_budget(rf_budget_source *out);

/* ---- workers ----------------------------------------------------------------------------- */

/* A team of a fixed size; the caller of rf_team_run is worker 0, so a team of one has no thread.
 * Made in memory that the caller owns: the struct and one stack for each further worker. */
typedef struct rf_team rf_team;
/* The thread sanitizer keeps about 900 KiB of its own on each stack, the address sanitizer's frames
 * of kernels are up to 310 KiB. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define RF_WORKER_STACK_BYTES (2u * 1024u * 1024u)
#else
#define RF_WORKER_STACK_BYTES (256u * 1024u)
#endif
#define RF_WORKERS_MAX 256u

/* fn is called with items [first, last) by whichever worker is free; worker is its index. */
typedef void (*rf_work_fn)(void *context, uint32_t first, uint32_t last, uint32_t worker);

uint64_t rf_team_bytes(uint32_t worker_count);
/* Starts worker_count - 1 threads on stacks[1 .. worker_count - 1] (each RF_WORKER_STACK_BYTES,
 * page aligned, borrowed until rf_team_stop). memory has rf_team_bytes(worker_count) bytes,
 * 64-aligned. On failure nothing runs. Signals are blocked in the threads, but
 * for those that a fault of their own raises. */
rf_status rf_team_start(void *memory, uint32_t worker_count, void *const *stacks, rf_team **out,
                        rf_error *err);
void rf_team_stop(rf_team *team); /* joins; safe on NULL */
uint32_t rf_team_size(const rf_team *team);
/* Runs fn over [0, count) in pieces of grain items from a shared counter, and returns when all
 * are done. Which worker takes which piece is not fixed; results must not depend on it. With
 * one worker, or count <= grain, it calls fn inline. Idle workers spin briefly, then sleep. */
void rf_team_run(rf_team *team, uint32_t count, uint32_t grain, rf_work_fn fn, void *context);
/* Names what a later job reads first: workers that spin meanwhile bring it into their caches. Any
 * range will do, it is never read here. Called by the caller of rf_team_run, between jobs. */
void rf_team_ahead(rf_team *team, const void *data, uint64_t bytes);

#endif
