/* cli/signals.c: Ctrl-C and the file that shrank.
 *
 * The first SIGINT or SIGTERM asks the running step to end, a second one kills. A bus error inside
 * the mapped file means that somebody cut the file off under us: the line that says so is made
 * ready when the file is opened, so that the handler, in whatever thread it runs, only writes it.
 */
#include "cli.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

static struct {
    volatile sig_atomic_t interrupted;
    _Atomic(rf_model *) model;
    const uint8_t *file_data;
    uint64_t file_bytes;
    bool file_watched;
    char line[512];
    size_t line_bytes;
    char object[1024];
    size_t object_bytes;
} watched;

static void on_interrupt(int number)
{
    int saved = errno;
    if (watched.interrupted) {
        signal(number, SIG_DFL);
        raise(number); /* pending until the handler returns, then it kills */
    }
    watched.interrupted = 1;
    rf_model *model = atomic_load(&watched.model);
    if (model)
        rf_model_cancel(model);
    errno = saved;
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    (void)context;
    uintptr_t address = (uintptr_t)info->si_addr;
    uintptr_t first = (uintptr_t)watched.file_data;
    uint64_t page = 65536; /* the last page of the mapping, whatever its size */
    bool inside = !first || (address >= first && address - first < watched.file_bytes + page);
    if (watched.file_watched && inside) {
        ssize_t ignored = write(STDERR_FILENO, watched.line, watched.line_bytes);
        if (watched.object_bytes)
            ignored = write(STDOUT_FILENO, watched.object, watched.object_bytes);
        (void)ignored;
        _exit(rf_status_exit_code(RF_ERR_IO));
    }
    signal(number, SIG_DFL); /* the instruction faults again, and this time it kills */
}

void signals_install(void)
{
    static char stack[64 * 1024];
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, NULL);
    struct sigaction action = {0};
    sigemptyset(&action.sa_mask);
    action.sa_handler = on_interrupt; /* no SA_RESTART: a blocked read ends as well */
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    struct sigaction bus = {0};
    sigemptyset(&bus.sa_mask);
    bus.sa_sigaction = on_bus_error;
    bus.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGBUS, &bus, NULL);
    signal(SIGPIPE, SIG_IGN);
}

bool signals_interrupted(void)
{
    return watched.interrupted != 0;
}

rf_status signals_status(rf_error *err)
{
    if (!watched.interrupted)
        return RF_OK;
    return rf_fail(err, RF_ERR_INTERRUPTED, "signal", "interrupted");
}

void signals_watch_model(rf_model *model)
{
    atomic_store(&watched.model, model);
    if (model && watched.interrupted)
        rf_model_cancel(model);
}

void signals_watch_file(const char *name, const void *data, uint64_t bytes)
{
    watched.file_watched = false;
    watched.file_data = data;
    watched.file_bytes = bytes;
    if (!name)
        return;
    static const char what[] = "the file became shorter, or cannot be read, while it was in use";
    rf_writer line = rf_writer_make(watched.line, sizeof watched.line);
    rf_write(&line, "ringfence: error: %.*s: %s\n", (int)RF_MIN(strlen(name), 300), name, what);
    for (size_t i = 0; i + 1 < line.length; i++) {
        if ((unsigned char)watched.line[i] < 0x20)
            watched.line[i] = '?';
    }
    watched.line_bytes = line.length;
    rf_writer object = rf_writer_make(watched.object, sizeof watched.object);
    rf_json_open(&object, NULL, '{');
    rf_json_open(&object, "error", '{');
    rf_json_text(&object, "status", rf_status_name(RF_ERR_IO));
    rf_json_text_n(&object, "where", name, RF_MIN(strlen(name), 120));
    rf_json_text(&object, "what", what);
    rf_json_text(&object, "expected", "");
    rf_json_text(&object, "got", "");
    rf_json_close(&object, '}');
    rf_json_close(&object, '}');
    rf_write(&object, "\n");
    watched.object_bytes = cli_json() ? object.length : 0;
    watched.file_watched = true;
}
