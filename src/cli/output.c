/* cli/output.c: stdout and stderr of the command: a buffer with a latched failure, the error line
 * and its JSON form, notes, progress.
 *
 * stdout is written by write(2) from buffers of our own, so that nothing here allocates and every
 * failure (a closed pipe, a full disk) is seen. No colour is ever written.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define OUT_BYTES       (64u * 1024u)
#define JSON_BYTES      (1024u * 1024u)
#define JSON_PUMP_BYTES (256u * 1024u)

static struct {
    bool quiet, json;
    bool in_line; /* what went to stdout did not end with a newline */
    int failed;   /* errno of the first write that failed */
    size_t used;
    char out[OUT_BYTES];
    char json_text[JSON_BYTES];
} output;

void cli_output_init(bool quiet, bool json)
{
    output.quiet = quiet;
    output.json = json;
}

bool cli_quiet(void)
{
    return output.quiet;
}

bool cli_json(void)
{
    return output.json;
}

static int write_all(int fd, const char *bytes, size_t count)
{
    while (count) {
        ssize_t done = write(fd, bytes, count);
        if (done < 0) {
            if (errno == EINTR && !signals_interrupted())
                continue;
            return errno;
        }
        bytes += done;
        count -= (size_t)done;
        if (count && signals_interrupted())
            return EINTR; /* a part went out, and nobody may ever read the rest */
    }
    return 0;
}

static void write_out(const char *bytes, size_t count)
{
    if (output.failed || !count)
        return;
    output.failed = write_all(STDOUT_FILENO, bytes, count);
    output.in_line = bytes[count - 1] != '\n';
}

void out_flush(void)
{
    write_out(output.out, output.used);
    output.used = 0;
}

void out_bytes(const char *bytes, size_t count)
{
    if (count > OUT_BYTES - output.used)
        out_flush();
    if (count > OUT_BYTES) {
        write_out(bytes, count);
        return;
    }
    if (count)
        memcpy(output.out + output.used, bytes, count);
    output.used += count;
}

void out_print(const char *format, ...)
{
    char line[4096];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (length > 0)
        out_bytes(line, RF_MIN((size_t)length, sizeof line - 1));
}

void out_row(const char *format, ...)
{
    char line[4096];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    size_t end = length > 0 ? RF_MIN((size_t)length, sizeof line - 1) : 0;
    while (end && line[end - 1] == ' ')
        end--;
    line[end++] = '\n';
    out_bytes(line, end);
}

bool out_failed(void)
{
    return output.failed != 0;
}

rf_status out_status(rf_error *err)
{
    if (!output.failed)
        return RF_OK;
    if (output.failed == EINTR)
        return signals_status(err);
    return rf_fail(err, RF_ERR_IO, "stdout", "cannot write: %s", strerror(output.failed));
}

bool out_is_terminal(void)
{
    return isatty(STDOUT_FILENO) == 1;
}

/* ---- JSON -------------------------------------------------------------------------------- */

static rf_writer json_writer;

rf_writer *json_begin(void)
{
    json_writer = rf_writer_make(output.json_text, sizeof output.json_text);
    return &json_writer;
}

static void json_pump(rf_writer *writer)
{
    if (writer->overflow && !output.failed)
        output.failed = ENOBUFS;
    out_bytes(writer->text, writer->length);
    writer->length = 0;
}

void json_step(rf_writer *writer)
{
    if (writer->length >= JSON_PUMP_BYTES)
        json_pump(writer);
}

void json_end(rf_writer *writer)
{
    json_pump(writer);
    out_bytes("\n", 1);
    out_flush();
}

void json_u64_or_null(rf_writer *writer, const char *key, uint64_t value)
{
    if (value == UINT64_MAX) {
        rf_json_null(writer, key);
    } else {
        rf_json_u64(writer, key, value);
    }
}

/* ---- stderr ------------------------------------------------------------------------------ */

/* What comes from a file or an argument must not steer the terminal or break the line. */
static void make_plain(char *text)
{
    for (; *text; text++) {
        if ((unsigned char)*text < 0x20 || *text == 0x7f)
            *text = '?';
    }
}

/* Ends a line of text on stdout that a line on stderr would otherwise stick to. */
static void begin_line(void)
{
    struct stat out, err;
    if (!output.in_line || fstat(STDOUT_FILENO, &out) || fstat(STDERR_FILENO, &err))
        return;
    if (out.st_dev != err.st_dev || out.st_ino != err.st_ino)
        return;
    output.in_line = false;
    (void)write_all(STDERR_FILENO, "\n", 1);
}

void cli_note(const char *format, ...)
{
    if (output.quiet)
        return;
    char line[1024];
    va_list args;
    va_start(args, format);
    int length = vsnprintf(line, sizeof line - 1, format, args);
    va_end(args);
    if (length < 0)
        return;
    make_plain(line);
    size_t end = strlen(line);
    line[end++] = '\n';
    begin_line();
    (void)write_all(STDERR_FILENO, "ringfence: ", 11);
    (void)write_all(STDERR_FILENO, line, end);
}

static void report_json(const rf_error *err)
{
    char text[4096];
    rf_writer writer = rf_writer_make(text, sizeof text);
    rf_json_open(&writer, NULL, '{');
    rf_json_open(&writer, "error", '{');
    rf_json_text(&writer, "status", rf_status_name(err->status));
    rf_json_text(&writer, "where", err->where);
    rf_json_text(&writer, "what", err->what);
    rf_json_text(&writer, "expected", err->expected);
    rf_json_text(&writer, "got", err->got);
    rf_json_close(&writer, '}');
    rf_json_close(&writer, '}');
    rf_write(&writer, "\n");
    out_flush();
    if (!output.failed)
        output.failed = write_all(STDOUT_FILENO, text, writer.length);
}

void cli_report(const rf_error *err)
{
    char line[1024];
    rf_writer writer = rf_writer_make(line, sizeof line - 1);
    rf_write(&writer, "ringfence: error: %s: %s", err->where, err->what);
    if (err->expected[0] && err->got[0]) {
        rf_write(&writer, " (expected %s, got %s)", err->expected, err->got);
    } else if (err->expected[0]) {
        rf_write(&writer, " (expected %s)", err->expected);
    } else if (err->got[0]) {
        rf_write(&writer, " (got %s)", err->got);
    }
    make_plain(line);
    line[writer.length] = '\n';
    begin_line();
    (void)write_all(STDERR_FILENO, line, writer.length + 1);
    if (output.json)
        report_json(err);
}

cli_size_text cli_size(uint64_t bytes)
{
    cli_size_text size;
    rf_print_bytes(size.text, sizeof size.text, bytes);
    return size;
}

/* ---- progress ---------------------------------------------------------------------------- */

#define PROGRESS_FIRST_NS UINT64_C(1000000000)
#define PROGRESS_EVERY_NS UINT64_C(200000000)

cli_progress cli_progress_start(const char *label)
{
    cli_progress progress = {label, rf_os_clock_ns(), 0};
    return progress;
}

bool cli_progress_step(void *context, uint64_t done, uint64_t total)
{
    cli_progress *progress = context;
    if (signals_interrupted())
        return false;
    if (output.quiet || isatty(STDERR_FILENO) != 1)
        return true;
    uint64_t now = rf_os_clock_ns();
    uint64_t since = progress->shown_ns ? progress->shown_ns : progress->start_ns;
    if (now - since < (progress->shown_ns ? PROGRESS_EVERY_NS : PROGRESS_FIRST_NS))
        return true;
    progress->shown_ns = now;
    char line[128];
    double share = total ? 100.0 * (double)done / (double)total : 0.0;
    int length = snprintf(line, sizeof line, "\rringfence: %s %3.0f %% ", progress->label, share);
    if (length > 0)
        (void)write_all(STDERR_FILENO, line, (size_t)length);
    return true;
}

void cli_progress_end(cli_progress *progress)
{
    if (!progress->shown_ns)
        return;
    char line[128];
    int length = snprintf(line, sizeof line, "\r%*s\r", (int)strlen(progress->label) + 20, "");
    if (length > 0)
        (void)write_all(STDERR_FILENO, line, (size_t)length);
    progress->shown_ns = 0;
}

/* ---- text -------------------------------------------------------------------------------- */

bool cli_glob(const char *pattern, const char *text)
{
    const char *star = NULL, *retry = NULL;
    while (*text) {
        if (*pattern == '*') {
            star = ++pattern;
            retry = text;
        } else if (*pattern == '?' || *pattern == *text) {
            pattern++;
            text++;
        } else if (star) {
            pattern = star;
            text = ++retry;
        } else {
            return false;
        }
    }
    while (*pattern == '*')
        pattern++;
    return !*pattern;
}
