/* ringfence/base.h: what every public header needs: visibility, statuses, the error record.
 *
 * Thread rule of the whole library: functions on different objects may run at the same time;
 * one object belongs to one thread at a time, unless its comment says otherwise.
 */
#ifndef RINGFENCE_BASE_H
#define RINGFENCE_BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define RF_API __attribute__((visibility("default")))
#define RF_PRINTF(format_index, first_index)                                                       \
    __attribute__((format(printf, format_index, first_index)))
#else
#define RF_API
#define RF_PRINTF(format_index, first_index)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* status, name in JSON, exit code of the command, sentence. */
#define RF_STATUS_LIST(X)                                                                          \
    X(RF_OK, "ok", 0, "success")                                                                   \
    X(RF_ERR_RUNTIME, "runtime", 1, "run-time error")                                              \
    X(RF_ERR_USAGE, "usage", 2, "an argument or an option is wrong")                               \
    X(RF_ERR_BAD_MODEL, "bad_model", 3, "the model file is wrong")                                 \
    X(RF_ERR_UNSUPPORTED, "unsupported", 3, "the model file asks for what is not supported")       \
    X(RF_ERR_NO_FIT, "no_fit", 4, "it does not fit into memory")                                   \
    X(RF_ERR_DRIFT, "drift", 5, "what was taken is not what was planned")                          \
    X(RF_ERR_IO, "io", 6, "cannot open, read or write")                                            \
    X(RF_ERR_INTERRUPTED, "interrupted", 130, "interrupted")

typedef enum rf_status {
#define RF_STATUS_ENUM(status, name, exit_code, sentence) status,
    RF_STATUS_LIST(RF_STATUS_ENUM)
#undef RF_STATUS_ENUM
        RF_STATUS_COUNT
} rf_status;

/* What went wrong: filled by the function that failed, in the caller's memory. Every string is
 * terminated; expected and got may be empty. */
typedef struct rf_error {
    rf_status status;
    char where[192]; /* file offset, key, tensor id, option */
    char what[256];  /* a clause, no capital, no full stop */
    char expected[128];
    char got[128];
} rf_error;

/* The name of a status as JSON has it, its sentence, and the exit code of the command. The
 * strings are static. */
RF_API const char *rf_status_name(rf_status status);
RF_API const char *rf_status_sentence(rf_status status);
RF_API int rf_status_exit_code(rf_status status);

/* "0.1.0"; static. */
RF_API const char *rf_version(void);

#ifdef __cplusplus
}
#endif
#endif
