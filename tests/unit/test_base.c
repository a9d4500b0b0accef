/* tests/unit/test_base.c: errors, cursor, text, JSON and the operating system of floor 0.
 *
 * The formatter is held against libc's on many random values: the library may not call snprintf,
 * a test may.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <signal.h>
#include <cmocka.h>

#include "base/base.h"
#include "emulated.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

/* ---- errors ------------------------------------------------------------------------------ */

static void a_failure_fills_where_what_expected_and_got(void **state)
{
    (void)state;
    rf_error err;
    memset(&err, 'x', sizeof err);
    assert_int_equal(rf_fail(&err, RF_ERR_NO_FIT, "kv.layers[3].k", "needs %d things", 7),
                     RF_ERR_NO_FIT);
    assert_int_equal(err.status, RF_ERR_NO_FIT);
    assert_string_equal(err.where, "kv.layers[3].k");
    assert_string_equal(err.what, "needs 7 things");
    assert_string_equal(err.expected, "");
    assert_string_equal(err.got, "");
    assert_int_equal(rf_fail_expected(&err, "%u", 5u), RF_ERR_NO_FIT);
    assert_int_equal(rf_fail_got(&err, "%s", "six"), RF_ERR_NO_FIT);
    assert_string_equal(err.expected, "5");
    assert_string_equal(err.got, "six");
}

static void a_failure_without_a_record_still_returns_its_status(void **state)
{
    (void)state;
    assert_int_equal(rf_fail(NULL, RF_ERR_IO, "x", "y"), RF_ERR_IO);
    assert_int_not_equal(rf_fail_expected(NULL, "z"), RF_OK);
    assert_int_not_equal(rf_fail_got(NULL, "z"), RF_OK);
}

static void a_long_message_is_cut_and_terminated(void **state)
{
    (void)state;
    char text[1000];
    rf_error err;
    memset(text, 'a', sizeof text);
    text[sizeof text - 1] = '\0';
    rf_fail(&err, RF_ERR_USAGE, text, "%s", text);
    assert_int_equal(strlen(err.where), sizeof err.where - 1);
    assert_int_equal(strlen(err.what), sizeof err.what - 1);
}

static void every_status_has_a_name_a_sentence_and_its_exit_code(void **state)
{
    (void)state;
    for (int status = 0; status < RF_STATUS_COUNT; status++) {
        assert_true(strlen(rf_status_name((rf_status)status)) > 1);
        assert_true(strlen(rf_status_sentence((rf_status)status)) > 1);
    }
    assert_int_equal(rf_status_exit_code(RF_OK), 0);
    assert_int_equal(rf_status_exit_code(RF_ERR_DRIFT), 5);
    assert_int_equal(rf_status_exit_code(RF_ERR_INTERRUPTED), 130);
    assert_string_equal(rf_status_name(RF_ERR_NO_FIT), "no_fit");
    assert_string_equal(rf_status_name((rf_status)999), "runtime");
    assert_true(strlen(rf_version()) >= 5);
}

/* ---- checked sizes and the cursor -------------------------------------------------------- */

static void checked_sizes_refuse_what_leaves_64_bits(void **state)
{
    (void)state;
    uint64_t out = 77;
    assert_false(rf_add(UINT64_MAX, 1, &out));
    assert_false(rf_mul(UINT64_C(1) << 32, UINT64_C(1) << 32, &out));
    assert_false(rf_align_up(UINT64_MAX - 5, 64, &out));
    assert_int_equal(out, 77);
    assert_true(rf_align_up(65, 64, &out));
    assert_int_equal(out, 128);
}

static void a_cursor_reads_little_endian_and_stops_at_the_end(void **state)
{
    (void)state;
    const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff};
    rf_cursor cursor = rf_cursor_make(bytes, sizeof bytes);
    assert_int_equal(rf_cursor_u8(&cursor), 1);
    assert_int_equal(rf_cursor_u16(&cursor), 0x0302);
    assert_int_equal(rf_cursor_u32(&cursor), 0x07060504);
    assert_int_equal(rf_cursor_left(&cursor), 9);
    assert_true(rf_cursor_u64(&cursor) == UINT64_C(0x0f0e0d0c0b0a0908));
    assert_false(cursor.failed);
    assert_int_equal(rf_cursor_u16(&cursor), 0);
    assert_true(cursor.failed);
    assert_int_equal(cursor.fail_at, 15);
    /* One byte is left, but after a failure nothing is given any more. */
    assert_int_equal(rf_cursor_u8(&cursor), 0);
    assert_int_equal(rf_cursor_left(&cursor), 0);
    assert_int_equal(cursor.fail_at, 15);
}

static void a_cursor_refuses_a_count_that_would_wrap(void **state)
{
    (void)state;
    const uint8_t bytes[4] = {0};
    rf_cursor cursor = rf_cursor_make(bytes, sizeof bytes);
    assert_non_null(rf_cursor_take(&cursor, 2));
    assert_null(rf_cursor_take(&cursor, UINT64_MAX));
    assert_true(cursor.failed);
    rf_cursor empty = rf_cursor_make(NULL, 0);
    assert_int_equal(rf_cursor_u8(&empty), 0);
    assert_true(empty.failed);
}

/* ---- formatter --------------------------------------------------------------------------- */

/* Formats once with libc and once with ours, and compares text and length. */
#define ASSERT_LIKE_LIBC(...)                                                                      \
    do {                                                                                           \
        char theirs[2600];                                                                         \
        char ours[2600];                                                                           \
        int length = snprintf(theirs, sizeof theirs, __VA_ARGS__);                                 \
        assert_int_equal(rf_print(ours, sizeof ours, __VA_ARGS__), length);                        \
        assert_string_equal(ours, theirs);                                                         \
    } while (0)

static void integers_and_strings_are_formatted_like_libc_does(void **state)
{
    (void)state;
    uint64_t seed = 1;
    ASSERT_LIKE_LIBC("%d %i %u %x%%", -5, INT32_MIN, UINT32_MAX, 0xabcu);
    ASSERT_LIKE_LIBC("[%5d][%-5d][%05d][%2d]", -42, -42, -42, -4200);
    ASSERT_LIKE_LIBC("[%8s][%-8s][%.3s][%.*s][%*s][%-*s]", "ab", "ab", "abcdef", 2, "xyz", 6, "q",
                     6, "q");
    ASSERT_LIKE_LIBC("%c%c|%3c|%-3c|", 'a', 'b', 'c', 'd');
    const char *volatile left_beats_zero = "[%-05d]"; /* the compiler would object to a literal */
    char text[16];
    rf_print(text, sizeof text, left_beats_zero, -42);
    assert_string_equal(text, "[-42  ]");
    ASSERT_LIKE_LIBC("plain text without any conversion");
    ASSERT_LIKE_LIBC("%lld %lld %llu %llx", (long long)INT64_MIN, (long long)INT64_MAX,
                     (unsigned long long)UINT64_MAX, (unsigned long long)UINT64_MAX);
    for (int i = 0; i < 2000; i++) {
        uint64_t value = next_random(&seed) >> (next_random(&seed) % 64);
        ASSERT_LIKE_LIBC("%ld %lu %zu %zx", (long)value, (unsigned long)value, (size_t)value,
                         (size_t)value);
        ASSERT_LIKE_LIBC("%lld|%12llu|%-24llx|%020lld", (long long)value, (unsigned long long)value,
                         (unsigned long long)value, -(long long)value);
    }
}

static void doubles_are_formatted_like_libc_does(void **state)
{
    (void)state;
    uint64_t seed = 2;
    for (int i = 0; i < 40000; i++) {
        uint64_t bits = next_random(&seed);
        double value;
        switch (i % 4) {
        case 0:
            memcpy(&value, &bits, sizeof value);
            break; /* any exponent */
        case 1:
            value = (double)(int64_t)bits / 1048576.0;
            break;
        case 2:
            value = (double)(bits % 2000001) / 1000.0 - 1000.0;
            break; /* near ties */
        default:
            value = (double)(bits % 20001) / 64.0 - 150.0;
            break; /* exact ties */
        }
        if (!isfinite(value))
            continue;
        int precision = (int)(next_random(&seed) % 18);
        ASSERT_LIKE_LIBC("%.*g", precision, value);
        ASSERT_LIKE_LIBC("%.*f", precision, value);
        if (i % 16 == 0)
            ASSERT_LIKE_LIBC("[%g][%f][%12.3f][%-12.3f][%012.2f]", value, value, value, value,
                             value);
    }
}

static void the_edges_of_doubles_are_formatted_like_libc_does(void **state)
{
    (void)state;
    const double values[] = {0.0,
                             -0.0,
                             0.5,
                             1.5,
                             2.5,
                             0.125,
                             9.5,
                             99.5,
                             999999.5,
                             9999995.0,
                             1e-5,
                             0.0001,
                             0.00009999995,
                             1e15,
                             1e16,
                             1e17,
                             123456789012345678.0,
                             5e-324,
                             2.2250738585072014e-308,
                             1.7976931348623157e308,
                             1.0 / 3};
    for (size_t i = 0; i < RF_ARRAY_COUNT(values); i++) {
        for (int precision = 0; precision <= 17; precision++) {
            ASSERT_LIKE_LIBC("%.*f %.*g", precision, values[i], precision, values[i]);
            ASSERT_LIKE_LIBC("%.*f %.*g", precision, -values[i], precision, -values[i]);
        }
    }
    ASSERT_LIKE_LIBC("%f %g %8.2f %-8g| %08f", (double)INFINITY, -(double)INFINITY,
                     (double)INFINITY, (double)NAN, (double)INFINITY);
}

static void a_writer_never_writes_past_its_capacity(void **state)
{
    (void)state;
    for (size_t capacity = 0; capacity < 40; capacity++) {
        char text[48];
        memset(text, '#', sizeof text);
        rf_writer writer = rf_writer_make(text, capacity);
        rf_write(&writer, "%s %5d %.3f %-9s!", "abc", 12, 3.14159, "xy"); /* 26 characters */
        for (size_t i = capacity; i < sizeof text; i++)
            assert_int_equal(text[i], '#');
        if (capacity > 0)
            assert_int_equal(text[writer.length], '\0');
        assert_int_equal(writer.overflow, capacity < 27);
        rf_write(&writer, "z");
        if (capacity < 27)
            assert_int_equal(writer.overflow, true);
    }
}

static void an_unknown_conversion_ends_the_formatting_without_reading_arguments(void **state)
{
    (void)state;
    char text[64];
    const char *volatile format = "a%d%q%s";
    rf_print(text, sizeof text, format, 1);
    assert_string_equal(text, "a1%q%s");
    format = "50%";
    rf_print(text, sizeof text, format);
    assert_string_equal(text, "50%");
}

static void bytes_are_shown_in_binary_units_with_at_most_two_decimals(void **state)
{
    (void)state;
    static const struct {
        uint64_t bytes;
        const char *text;
    } cases[] = {{0, "0 B"},
                 {1023, "1023 B"},
                 {1024, "1 KiB"},
                 {327680, "320 KiB"},
                 {1536, "1.5 KiB"},
                 {1024 * 1024 - 1, "1 MiB"},
                 {UINT64_C(1277752770), "1.19 GiB"},
                 {UINT64_C(4) << 40, "4096 GiB"},
                 {UINT64_MAX, "17179869184 GiB"},
                 {1034, "1.01 KiB"}};
    char text[32];
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        assert_string_equal(rf_print_bytes(text, sizeof text, cases[i].bytes), cases[i].text);
    }
}

/* ---- JSON -------------------------------------------------------------------------------- */

static void json_places_its_own_commas(void **state)
{
    (void)state;
    char text[256];
    rf_writer writer = rf_writer_make(text, sizeof text);
    rf_json_open(&writer, NULL, '{');
    rf_json_u64(&writer, "a", UINT64_MAX);
    rf_json_open(&writer, "b", '[');
    rf_json_i64(&writer, NULL, -1);
    rf_json_open(&writer, NULL, '{');
    rf_json_close(&writer, '}');
    rf_json_bool(&writer, NULL, true);
    rf_json_close(&writer, ']');
    rf_json_f64(&writer, "c", 0.1);
    rf_json_f64(&writer, "d", (double)NAN);
    rf_json_f64(&writer, "e", -(double)INFINITY);
    rf_json_null(&writer, "f");
    rf_json_text(&writer, "g", NULL);
    rf_json_close(&writer, '}');
    assert_string_equal(text, "{\"a\":18446744073709551615,\"b\":[-1,{},true],\"c\":0.1,"
                              "\"d\":null,\"e\":null,\"f\":null,\"g\":null}");
}

static void json_text_is_escaped_and_always_utf8(void **state)
{
    (void)state;
    char text[256];
    rf_writer writer = rf_writer_make(text, sizeof text);
    rf_json_text(&writer, NULL, "q\"b\\n\nt\tz\x01\x0b\x1f");
    assert_string_equal(text, "\"q\\\"b\\\\n\\nt\\tz\\u0001\\u000b\\u001f\"");
    writer = rf_writer_make(text, sizeof text);
    rf_json_text(&writer, NULL, "\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80");
    assert_string_equal(text, "\"\xc3\xa9\xe2\x82\xac\xf0\x9f\x98\x80\"");
    /* A lone continuation, an overlong slash, a surrogate, a sequence that is cut. */
    static const char *const bad[] = {"\x80", "\xc0\xaf", "\xed\xa0\x80", "\xf5\x80\x80\x80",
                                      "\xe2\x82"};
    static const size_t replaced[] = {1, 2, 3, 4, 2};
    for (size_t i = 0; i < RF_ARRAY_COUNT(bad); i++) {
        writer = rf_writer_make(text, sizeof text);
        rf_json_text(&writer, NULL, bad[i]);
        assert_int_equal(writer.length, 2 + 3 * replaced[i]);
        assert_memory_equal(text + 1, "\xef\xbf\xbd", 3);
    }
    writer = rf_writer_make(text, sizeof text);
    rf_json_text_n(&writer, "k", "a\0b", 3);
    assert_string_equal(text, "\"k\":\"a\\u0000b\"");
}

/* ---- operating system -------------------------------------------------------------------- */

static void reserved_memory_is_zero_aligned_and_writable(void **state)
{
    (void)state;
    void *base = NULL;
    uint64_t bytes = 3 * rf_os_page_bytes() + 17;
    assert_int_equal(rf_os_reserve(bytes, &base, NULL), RF_OK);
    assert_int_equal((uintptr_t)base % rf_os_page_bytes(), 0);
    for (uint64_t i = 0; i < bytes; i++)
        assert_int_equal(((uint8_t *)base)[i], 0);
    memset(base, 1, bytes);
    rf_os_release(base, bytes);
}

/* Runs in a child of its own: writes one byte at base + offset. */
static int signal_of_write(uint8_t *address)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        signal(SIGSEGV, SIG_DFL);
        *(volatile uint8_t *)address = 1;
        _exit(0);
    }
    int result = 0;
    waitpid(child, &result, 0);
    return WIFSIGNALED(result) ? WTERMSIG(result) : 0;
}

static void a_write_beside_reserved_memory_hits_a_guard_page(void **state)
{
    (void)state;
    void *base = NULL;
    uint64_t page = rf_os_page_bytes();
    assert_int_equal(rf_os_reserve(2 * page, &base, NULL), RF_OK);
    assert_int_equal(signal_of_write((uint8_t *)base), 0);
    assert_int_equal(signal_of_write((uint8_t *)base + 2 * page - 1), 0);
    assert_int_equal(signal_of_write((uint8_t *)base - 1), SIGSEGV);
    assert_int_equal(signal_of_write((uint8_t *)base + 2 * page), SIGSEGV);
    rf_os_release(base, 2 * page);
}

static void absurd_sizes_are_refused_with_no_fit(void **state)
{
    (void)state;
    static const uint64_t sizes[] = {UINT64_MAX, UINT64_MAX - 4096, UINT64_C(1) << 63,
                                     UINT64_C(1) << 60, UINT64_C(1) << 50};
    for (size_t i = 0; i < RF_ARRAY_COUNT(sizes); i++) {
        rf_error err = {0};
        void *base = NULL;
        assert_int_equal(rf_os_reserve(sizes[i], &base, &err), RF_ERR_NO_FIT);
        assert_null(base);
        assert_true(strlen(err.expected) > 0);
        assert_true(strlen(err.got) > 0);
    }
    void *base = NULL;
    assert_int_equal(rf_os_reserve(0, &base, NULL), RF_ERR_USAGE);
}

static void resident_counts_touched_pages_and_clips_shared_ones(void **state)
{
    (void)state;
    void *base = NULL;
    uint64_t page = rf_os_page_bytes();
    uint64_t bytes = 1000 * page; /* more than one batch of the reader */
    assert_int_equal(rf_os_reserve(bytes, &base, NULL), RF_OK);
    uint8_t *first = base;
    if (rf_os_resident(base, bytes) == UINT64_MAX)
        skip();
    madvise(base, bytes, MADV_NOHUGEPAGE);
    assert_int_equal(rf_os_resident(base, bytes), 0);
    first[0] = 1;
    first[999 * page] = 1;
    assert_int_equal(rf_os_resident(base, bytes), 2 * page);
    assert_int_equal(rf_os_resident(first + 100, page), page - 100);
    assert_int_equal(rf_os_resident(first + 100, 7), 7);
    rf_os_touch(base, bytes);
    assert_int_equal(rf_os_resident(base, bytes), bytes);
    rf_os_release(base, bytes);
}

static void touched_memory_costs_no_further_fault(void **state)
{
    (void)state;
    void *base = NULL;
    uint64_t bytes = 512 * rf_os_page_bytes();
    assert_int_equal(rf_os_reserve(bytes, &base, NULL), RF_OK);
    rf_os_touch(base, bytes);
    rf_os_touch_stack();
    rf_faults before = rf_os_faults();
    for (uint64_t i = 0; i < bytes; i += 64)
        ((volatile uint8_t *)base)[i] = 1;
    uint64_t faults = rf_os_faults().minor - before.minor;
#ifdef __SANITIZE_THREAD__ /* its shadow memory is faulted in while the test runs */
    faults = 0;
#endif
    assert_true(faults < 16); /* not one a page */
    rf_os_release(base, bytes);
}

static void anonymous_and_data_bytes_grow_with_what_is_taken(void **state)
{
    (void)state;
    void *base = NULL;
    uint64_t bytes = UINT64_C(16) << 20;
    uint64_t data = rf_os_data_bytes();
    uint64_t anonymous = rf_os_anonymous();
    if (data == 0 || anonymous == 0)
        skip();
    assert_int_equal(rf_os_reserve(bytes, &base, NULL), RF_OK);
    assert_data(rf_os_data_bytes() - data == bytes);
    assert_data(rf_os_anonymous() - anonymous < bytes / 2);
    rf_os_touch(base, bytes);
    assert_data(rf_os_anonymous() - anonymous >= bytes);
    rf_os_release(base, bytes);
}

/* Makes a file of count bytes; path has 64 bytes. */
static void make_file(char *path, size_t count)
{
    rf_print(path, 64, "/tmp/ringfence-test-XXXXXX");
    int file = mkstemp(path);
    assert_true(file >= 0);
    assert_int_equal(ftruncate(file, (off_t)count), 0);
    if (count > 0)
        assert_int_equal(pwrite(file, "GGUF", 4, 0), 4);
    close(file);
}

static void a_file_is_mapped_with_its_size(void **state)
{
    (void)state;
    char path[64];
    rf_mapping mapping;
    make_file(path, 10000);
    assert_int_equal(rf_os_map(path, &mapping, NULL), RF_OK);
    assert_int_equal(mapping.size, 10000);
    assert_memory_equal(mapping.data, "GGUF", 4);
    rf_os_unmap(&mapping);
    assert_null(mapping.data);
    unlink(path);
}

static void an_empty_file_maps_to_nothing_without_an_error(void **state)
{
    (void)state;
    char path[64];
    rf_mapping mapping;
    make_file(path, 0);
    assert_int_equal(rf_os_map(path, &mapping, NULL), RF_OK);
    assert_null(mapping.data);
    assert_int_equal(mapping.size, 0);
    rf_os_unmap(&mapping);
    unlink(path);
}

static void what_is_no_readable_file_is_an_io_error_with_its_path(void **state)
{
    (void)state;
    char fifo[] = "/tmp/ringfence-fifo-XXXXXX";
    assert_true(mkdtemp(fifo) != NULL);
    char pipe_path[64];
    snprintf(pipe_path, sizeof pipe_path, "%s/p", fifo);
    assert_int_equal(mkfifo(pipe_path, 0600), 0);
    const char *const paths[] = {"/nonexistent/model.gguf", "/tmp", pipe_path, "/dev/null", ""};
    for (size_t i = 0; i < RF_ARRAY_COUNT(paths); i++) {
        rf_error err = {0};
        rf_mapping mapping;
        assert_int_equal(rf_os_map(paths[i], &mapping, &err), RF_ERR_IO);
        assert_string_equal(err.where, paths[i]);
        assert_null(mapping.data);
        if (i == 1)
            assert_non_null(strstr(err.what, "is a directory"));
    }
    unlink(pipe_path);
    rmdir(fifo);
}

typedef struct progress_log {
    uint64_t last;
    int calls;
    int stop_after;
} progress_log;

static bool log_progress(void *context, uint64_t done)
{
    progress_log *log = context;
    assert_true(done >= log->last);
    log->last = done;
    return ++log->calls != log->stop_after;
}

/* An emulator of user programs answers for the kernel, and not always as the kernel does. */
static void skip_under_emulation(void)
{
#ifdef RF_TEST_EMULATED
    print_message("skipped: madvise, pagemap and limits are the emulator's here\n");
    skip();
#endif
}

static void populate_reports_progress_up_to_the_last_byte(void **state)
{
    (void)state;
    skip_under_emulation();
    char path[64];
    rf_mapping mapping;
    size_t bytes = 40u << 20;
    make_file(path, bytes);
    assert_int_equal(rf_os_map(path, &mapping, NULL), RF_OK);
    progress_log log = {0};
    assert_int_equal(rf_os_populate(mapping.data + 100, bytes - 100, log_progress, &log, NULL),
                     RF_OK);
    assert_int_equal(log.last, bytes - 100);
    assert_true(log.calls >= 3);
    uint64_t resident = rf_os_resident(mapping.data, mapping.size);
    if (resident != UINT64_MAX)
        assert_int_equal(resident, bytes);
    log = (progress_log){.stop_after = 1};
    assert_int_equal(rf_os_populate(mapping.data, bytes, log_progress, &log, NULL),
                     RF_ERR_INTERRUPTED);
    rf_os_unmap(&mapping);
    unlink(path);
}

static void populating_a_file_that_shrank_is_an_error_and_no_crash(void **state)
{
    (void)state;
    skip_under_emulation();
    char path[64];
    rf_mapping mapping;
    rf_error err = {0};
    make_file(path, 1 << 20);
    assert_int_equal(rf_os_map(path, &mapping, NULL), RF_OK);
    assert_int_equal(truncate(path, 4096), 0);
    assert_int_equal(rf_os_populate(mapping.data, mapping.size, NULL, NULL, &err), RF_ERR_IO);
    assert_non_null(strstr(err.what, "the file shrank"));
    rf_os_unmap(&mapping);
    unlink(path);
}

static void the_budget_and_the_processors_are_plausible(void **state)
{
    (void)state;
    skip_under_emulation();
    rf_budget_source source;
    rf_os_budget(&source);
    assert_true(source.mem_available > UINT64_C(1) << 20);
    assert_true(rf_os_processor_count() >= 1);
    assert_true(rf_os_processor_count() <= sysconf(_SC_NPROCESSORS_CONF));
    struct rlimit before;
    struct rlimit limit;
    getrlimit(RLIMIT_AS, &before);
    limit = before;
    limit.rlim_cur = (rlim_t)1 << 46; /* above what a sanitizer reserves */
    if (setrlimit(RLIMIT_AS, &limit) == 0) {
        rf_os_budget(&source);
        assert_true(source.rlimit_left < (uint64_t)1 << 46);
        setrlimit(RLIMIT_AS, &before);
    }
    uint64_t first = rf_os_clock_ns();
    assert_true(rf_os_clock_ns() >= first);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_failure_fills_where_what_expected_and_got),
        cmocka_unit_test(a_failure_without_a_record_still_returns_its_status),
        cmocka_unit_test(a_long_message_is_cut_and_terminated),
        cmocka_unit_test(every_status_has_a_name_a_sentence_and_its_exit_code),
        cmocka_unit_test(checked_sizes_refuse_what_leaves_64_bits),
        cmocka_unit_test(a_cursor_reads_little_endian_and_stops_at_the_end),
        cmocka_unit_test(a_cursor_refuses_a_count_that_would_wrap),
        cmocka_unit_test(integers_and_strings_are_formatted_like_libc_does),
        cmocka_unit_test(doubles_are_formatted_like_libc_does),
        cmocka_unit_test(the_edges_of_doubles_are_formatted_like_libc_does),
        cmocka_unit_test(a_writer_never_writes_past_its_capacity),
        cmocka_unit_test(an_unknown_conversion_ends_the_formatting_without_reading_arguments),
        cmocka_unit_test(bytes_are_shown_in_binary_units_with_at_most_two_decimals),
        cmocka_unit_test(json_places_its_own_commas),
        cmocka_unit_test(json_text_is_escaped_and_always_utf8),
        cmocka_unit_test(reserved_memory_is_zero_aligned_and_writable),
        cmocka_unit_test(a_write_beside_reserved_memory_hits_a_guard_page),
        cmocka_unit_test(absurd_sizes_are_refused_with_no_fit),
        cmocka_unit_test(resident_counts_touched_pages_and_clips_shared_ones),
        cmocka_unit_test(touched_memory_costs_no_further_fault),
        cmocka_unit_test(anonymous_and_data_bytes_grow_with_what_is_taken),
        cmocka_unit_test(a_file_is_mapped_with_its_size),
        cmocka_unit_test(an_empty_file_maps_to_nothing_without_an_error),
        cmocka_unit_test(what_is_no_readable_file_is_an_io_error_with_its_path),
        cmocka_unit_test(populate_reports_progress_up_to_the_last_byte),
        cmocka_unit_test(populating_a_file_that_shrank_is_an_error_and_no_crash),
        cmocka_unit_test(the_budget_and_the_processors_are_plausible),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
