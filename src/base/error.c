/* base/error.c: statuses and the error record.
 *
 * An error is filled once, by the function that failed, in memory of the caller; it is only
 * passed on above it. This file owns the words for a status and nothing else: it knows no floor
 * that fails. Everybody calls it.
 */
#include "base/base.h"

typedef struct rf_status_row {
    const char *name;
    const char *sentence;
    int exit_code;
} rf_status_row;

static const rf_status_row status_rows[RF_STATUS_COUNT] = {
#define RF_STATUS_ROW(status, name, exit_code, sentence) [status] = {name, sentence, exit_code},
    RF_STATUS_LIST(RF_STATUS_ROW)
#undef RF_STATUS_ROW
};

/* A number that is no status reads as a run-time error: it is a fault of ours, not of the input. */
static const rf_status_row *status_row(rf_status status)
{
    if ((unsigned)status >= RF_STATUS_COUNT)
        status = RF_ERR_RUNTIME;
    return &status_rows[status];
}

const char *rf_status_name(rf_status status)
{
    return status_row(status)->name;
}

const char *rf_status_sentence(rf_status status)
{
    return status_row(status)->sentence;
}

int rf_status_exit_code(rf_status status)
{
    return status_row(status)->exit_code;
}

#ifndef RF_VERSION /* the build says it; this is for a compiler that is called by hand */
#define RF_VERSION "0.1.0"
#endif

const char *rf_version(void)
{
    return RF_VERSION;
}

rf_status rf_fail(rf_error *err, rf_status status, const char *where, const char *what, ...)
{
    if (!err)
        return status;
    va_list args;
    va_start(args, what);
    err->status = status;
    /* where comes first, so that a caller may narrow an error down by passing its own where. */
    rf_writer place = rf_writer_make(err->where, sizeof err->where);
    if (where)
        rf_write(&place, "%s", where);
    rf_writer clause = rf_writer_make(err->what, sizeof err->what);
    rf_write_v(&clause, what, args);
    va_end(args);
    err->expected[0] = '\0';
    err->got[0] = '\0';
    return status;
}

rf_status rf_fail_expected(rf_error *err, const char *expected, ...)
{
    if (!err)
        return RF_ERR_RUNTIME;
    va_list args;
    va_start(args, expected);
    rf_writer writer = rf_writer_make(err->expected, sizeof err->expected);
    rf_write_v(&writer, expected, args);
    va_end(args);
    return err->status;
}

rf_status rf_fail_got(rf_error *err, const char *got, ...)
{
    if (!err)
        return RF_ERR_RUNTIME;
    va_list args;
    va_start(args, got);
    rf_writer writer = rf_writer_make(err->got, sizeof err->got);
    rf_write_v(&writer, got, args);
    va_end(args);
    return err->status;
}
