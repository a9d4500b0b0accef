/* tests/unit/test_open_faults.c: the n-th acquisition is refused, for every n until all goes well.
 *
 * The library asks the system for memory in one place and for threads in another; the functions of
 * libc that they use are replaced here by ones that count down to a refusal. Each refusal must come
 * back as a status, with nothing held: no mapping, no thread, no file.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MODEL_PATH RF_TEST_SOURCE_DIR "/models/stories260k.gguf"

/* ---- the system, with refusals ----------------------------------------------------------- */

enum { CALL_MMAP, CALL_MPROTECT, CALL_THREAD, CALL_MADVISE, CALL_COUNT };

typedef struct refusal { /* plain globals: only the test's own thread opens models */
    bool counting;
    int call;         /* what is refused, CALL_COUNT: the n-th of any kind */
    uint32_t left;    /* 0: never; 1: the next */
    uint32_t refused; /* how many were */
    uint32_t seen[CALL_COUNT];
    int64_t mappings; /* live ones that were made while counting */
    int64_t mapped_bytes;
    int64_t threads;
} refusal;

static refusal now;

/* The thread sanitizer starts by mapping memory, before any code of ours may run: there the system
 * stays as it is, and main skips. */
#ifndef __SANITIZE_THREAD__

static bool refuse(int call)
{
    if (!now.counting)
        return false;
    now.seen[call]++;
    if (now.left == 0 || (now.call != CALL_COUNT && now.call != call) || --now.left > 0)
        return false;
    now.refused++;
    return true;
}

void *mmap(void *address, size_t bytes, int protection, int flags, int file, off_t offset)
{
    if (refuse(CALL_MMAP)) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    long result = syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
    if (now.counting && result != -1) {
        now.mappings++;
        now.mapped_bytes += (int64_t)bytes;
    }
    return (void *)result;
}

int munmap(void *address, size_t bytes)
{
    if (now.counting) {
        now.mappings--;
        now.mapped_bytes -= (int64_t)bytes;
    }
    return (int)syscall(SYS_munmap, address, bytes);
}

int mprotect(void *address, size_t bytes, int protection)
{
    if (refuse(CALL_MPROTECT)) {
        errno = ENOMEM;
        return -1;
    }
    return (int)syscall(SYS_mprotect, address, bytes, protection);
}

int madvise(void *address, size_t bytes, int advice)
{
    if (refuse(CALL_MADVISE)) {
        errno = EFAULT; /* what a file that shrank gives */
        return -1;
    }
    return (int)syscall(SYS_madvise, address, bytes, advice);
}

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
typedef int join_fn(pthread_t, void **);

/* The next definition: libc's, or the sanitizer's, which must know its threads. */
static void find_next(const char *name, void *function, size_t size)
{
    void *address = dlsym(RTLD_NEXT, name);
    memcpy(function, &address, size);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *),
                   void *argument)
{
    create_fn *next = NULL;
    if (refuse(CALL_THREAD))
        return EAGAIN;
    find_next("pthread_create", &next, sizeof next);
    int code = next(thread, attributes, start, argument);
    now.threads += now.counting && code == 0;
    return code;
}

int pthread_join(pthread_t thread, void **result)
{
    join_fn *next = NULL;
    find_next("pthread_join", &next, sizeof next);
    now.threads -= now.counting;
    return next(thread, result);
}

#endif

/* ---- opening ----------------------------------------------------------------------------- */

static uint32_t open_files(void)
{
    uint32_t count = 0;
    for (int file = 0; file < 256; file++)
        count += syscall(SYS_fcntl, file, 1 /* F_GETFD */, 0) != -1;
    return count;
}

typedef rf_status open_fn(rf_error *err);

/* Opens everything, makes a step, closes; gives the first status that is not RF_OK. */
static rf_status open_model(rf_error *err)
{
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_model *model = NULL;
    rf_options options;
    rf_options_init(&options);
    options.ctx = 32;
    options.chunk = 8;
    options.threads = 4;
    options.text_bytes = 256;
    rf_status status = rf_file_open(MODEL_PATH, &file, err);
    if (status == RF_OK)
        status = rf_plan_make(file, &options, &plan, err);
    if (status == RF_OK)
        status = rf_model_open(plan, NULL, NULL, &model, err);
    if (status == RF_OK) {
        rf_step_item items[] = {{0, 1, 0, false, RF_STEP_PROMPT}, {0, 5, 1, true, RF_STEP_PROMPT}};
        status = rf_step(model, items, 2, err);
        assert_non_null(rf_logits(model, 0));
    } else {
        assert_null(model);
    }
    rf_model_close(model, NULL);
    rf_model_plan_close(plan);
    rf_file_close(file);
    return status;
}

static rf_status open_tokenizer(rf_error *err)
{
    rf_file *file = NULL;
    rf_tokenizer *tokenizer = NULL;
    rf_status status = rf_file_open(MODEL_PATH, &file, err);
    if (status == RF_OK)
        status = rf_tokenizer_open(file, 100, &tokenizer, err);
    assert_true((status == RF_OK) == (tokenizer != NULL));
    rf_tokenizer_close(tokenizer);
    rf_file_close(file);
    return status;
}

static rf_status solve(rf_error *err)
{
    rf_file *file = NULL;
    rf_options options;
    uint64_t ctx = 0;
    rf_options_init(&options);
    options.mem_limit = 8 << 20;
    rf_status status = rf_file_open(MODEL_PATH, &file, err);
    if (status == RF_OK)
        status = rf_plan_solve_ctx(file, &options, &ctx, err);
    rf_file_close(file);
    return status;
}

/* A plan that does not fit, with suggestions, each of which is a plan of its own. */
static rf_status suggest(rf_error *err)
{
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_options options;
    rf_options_init(&options);
    options.mem_limit = 5 << 20;
    options.slots = 2;
    options.kv_k = "f32";
    rf_status status = rf_file_open(MODEL_PATH, &file, err);
    if (status == RF_OK)
        status = rf_plan_make(file, &options, &plan, err);
    rf_model_plan_close(plan);
    rf_file_close(file);
    return status;
}

static rf_status open_store(rf_error *err)
{
    rf_kv_layer layer = {2, 8, 8, 0, "f16", "f16", 0};
    rf_kv_config config;
    rf_kv *kv = NULL;
    rf_kv_config_init(&config);
    config.layers = &layer;
    config.layer_count = 1;
    config.capacity = 16;
    config.chunk = 4;
    rf_status status = rf_kv_open(NULL, &config, &kv, err);
    rf_kv_close(kv);
    return status;
}

static const char *const call_names[] = {"mmap", "mprotect", "thread", "madvise", "any"};

/* Refuses the first, the second, ... call until nothing was refused. Returns how many were. */
static uint32_t refuse_each(open_fn *open, int call, bool must_fail)
{
    uint32_t files = open_files();
    for (uint32_t n = 1;; n++) {
        rf_error err = {0};
        now = (refusal){.counting = true, .call = call, .left = n};
        rf_status status = open(&err);
        now.counting = false;
        if (now.mappings != 0 || now.mapped_bytes != 0 || now.threads != 0)
            fail_msg("%s %u refused: %d mappings, %lld bytes, %d threads are left",
                     call_names[call], n, (int)now.mappings, (long long)now.mapped_bytes,
                     (int)now.threads);
        assert_int_equal(open_files(), files);
        if (now.refused == 0) {
            assert_int_equal(status, RF_OK);
            return n - 1;
        }
        if (must_fail && (status == RF_OK || err.status != status || err.what[0] == '\0'))
            fail_msg("%s %u refused: %s, \"%s\"", call_names[call], n, rf_status_name(status),
                     err.what);
        assert_true(n < 5000);
    }
}

static void every_mapping_of_a_model_may_be_refused(void **state)
{
    (void)state;
    /* File, header, its index, plan, model, two scopes: mapping each. */
    assert_true(refuse_each(open_model, CALL_MMAP, true) >= 6);
    assert_true(refuse_each(open_model, CALL_MPROTECT, true) >= 5);
}

static void every_thread_of_a_model_may_be_refused(void **state)
{
    (void)state;
    assert_int_equal(refuse_each(open_model, CALL_THREAD, true), 3);
}

static void a_file_that_shrinks_while_it_is_read_in_is_an_error(void **state)
{
    (void)state;
    rf_error err = {0};
    assert_true(refuse_each(open_model, CALL_MADVISE, true) >= 1);
    now = (refusal){.counting = true, .call = CALL_MADVISE, .left = 1};
    assert_int_equal(open_model(&err), RF_ERR_IO);
    now.counting = false;
    assert_non_null(strstr(err.what, "shrank"));
}

static void a_plan_that_is_refused_for_its_options_holds_nothing(void **state)
{
    (void)state;
    rf_file *file = NULL;
    rf_model_plan *plan = NULL;
    rf_options options;
    rf_options_init(&options);
    options.kv_v = "f64";
    now = (refusal){.counting = true, .call = CALL_COUNT};
    assert_int_equal(rf_file_open(MODEL_PATH, &file, NULL), RF_OK);
    assert_int_equal(rf_plan_make(file, &options, &plan, NULL), RF_ERR_USAGE);
    rf_file_close(file);
    now.counting = false;
    assert_int_equal(now.mappings, 0);
}

static void every_acquisition_of_the_smaller_nouns_may_be_refused(void **state)
{
    (void)state;
    assert_true(refuse_each(open_tokenizer, CALL_COUNT, true) >= 4);
    assert_true(refuse_each(open_store, CALL_COUNT, true) >= 2);
    assert_true(refuse_each(solve, CALL_MMAP, false) > 5);
    assert_true(refuse_each(suggest, CALL_MPROTECT, false) > 5);
}

/* The counter must be able to see a leak. */
static rf_status leak(rf_error *err)
{
    void *base = NULL;
    return rf_os_reserve(1, &base, err);
}

static void a_leak_would_be_counted(void **state)
{
    (void)state;
    rf_error err = {0};
    now = (refusal){.counting = true, .call = CALL_COUNT};
    assert_int_equal(leak(&err), RF_OK);
    now.counting = false;
    assert_int_equal(now.mappings, 1);
    assert_true(now.mapped_bytes >= 3 * 4096);
    assert_int_equal(now.seen[CALL_MPROTECT], 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_mapping_of_a_model_may_be_refused),
        cmocka_unit_test(every_thread_of_a_model_may_be_refused),
        cmocka_unit_test(a_file_that_shrinks_while_it_is_read_in_is_an_error),
        cmocka_unit_test(a_plan_that_is_refused_for_its_options_holds_nothing),
        cmocka_unit_test(every_acquisition_of_the_smaller_nouns_may_be_refused),
        cmocka_unit_test(a_leak_would_be_counted),
    };
#ifdef __SANITIZE_THREAD__
    (void)tests;
    return 77;
#else
    return cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
