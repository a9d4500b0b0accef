/* tests/unit/test_workers.c: the fixed team: every item once, nothing lost, nobody waited for in
 * vain. Run under the thread sanitizer too.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <signal.h>
#include <cmocka.h>

#include "base/base.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define ITEMS_MAX        5000u
#define WORKERS_TEST_MAX 16u

typedef struct test_team { /* a team and the memory that it lives in */
    void *memory;
    void *stacks[WORKERS_TEST_MAX];
    rf_team *team;
} test_team;

static void start(test_team *test, uint32_t worker_count)
{
    *test = (test_team){0};
    test->memory = aligned_alloc(64, rf_team_bytes(worker_count));
    for (uint32_t i = 1; i < worker_count; i++) {
        assert_int_equal(rf_os_reserve(RF_WORKER_STACK_BYTES, &test->stacks[i], NULL), RF_OK);
    }
    assert_int_equal(rf_team_start(test->memory, worker_count, test->stacks, &test->team, NULL),
                     RF_OK);
    assert_int_equal(rf_team_size(test->team), worker_count);
}

static void finish(test_team *test)
{
    rf_team_stop(test->team);
    for (uint32_t i = 1; i < WORKERS_TEST_MAX; i++) {
        rf_os_release(test->stacks[i], RF_WORKER_STACK_BYTES);
    }
    free(test->memory);
}

typedef struct tally {
    uint32_t visits[ITEMS_MAX]; /* plain on purpose: the sanitizer sees two writers of an item */
    _Atomic uint32_t pieces;
    _Atomic uint32_t too_long;
    _Atomic uint32_t bad_worker;
    uint32_t grain;
    uint32_t worker_count;
} tally;

static void count_items(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    tally *t = context;
    for (uint32_t i = first; i < last; i++)
        t->visits[i]++;
    atomic_fetch_add(&t->pieces, 1);
    if (last - first > t->grain)
        atomic_fetch_add(&t->too_long, 1);
    if (worker >= t->worker_count)
        atomic_fetch_add(&t->bad_worker, 1);
}

static void every_item_is_done_once_for_any_team_count_and_grain(void **state)
{
    (void)state;
    static const uint32_t teams[] = {1, 2, 3, 8};
    static const uint32_t counts[] = {0, 1, 2, 7, 64, 1000, 4999};
    static const uint32_t grains[] = {0, 1, 3, 64, 10000};
    static tally t;
    for (size_t a = 0; a < RF_ARRAY_COUNT(teams); a++) {
        test_team test;
        start(&test, teams[a]);
        for (size_t b = 0; b < RF_ARRAY_COUNT(counts); b++) {
            for (size_t c = 0; c < RF_ARRAY_COUNT(grains); c++) {
                memset(&t, 0, sizeof t);
                t.grain = RF_MAX(grains[c], 1u);
                t.worker_count = teams[a];
                rf_team_run(test.team, counts[b], grains[c], count_items, &t);
                for (uint32_t i = 0; i < ITEMS_MAX; i++) {
                    assert_int_equal(t.visits[i], i < counts[b]);
                }
                if (teams[a] > 1) {
                    assert_int_equal(t.pieces, (counts[b] + t.grain - 1) / t.grain);
                    assert_int_equal(t.too_long, 0);
                }
                assert_int_equal(t.bad_worker, 0);
            }
        }
        finish(&test);
    }
}

static void add_items(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    uint64_t *sums = context;
    (void)worker;
    for (uint32_t i = first; i < last; i++)
        sums[i] += i;
}

/* Short jobs one after the other, with pauses in which the workers fall asleep: a lost wake-up
 * hangs (and the test's time limit sees it), a piece that is taken twice shows in the sums. */
static void many_short_jobs_lose_no_wake_up(void **state)
{
    (void)state;
    test_team test;
    uint64_t sums[64] = {0};
    const uint64_t rounds = 20000;
    start(&test, 5);
    for (uint64_t round = 0; round < rounds; round++) {
        rf_team_run(test.team, 2 + (uint32_t)(round % 63), 1, add_items, sums);
        if (round % 500 == 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    for (uint64_t i = 0; i < 64; i++) {
        uint64_t jobs = 0;
        for (uint64_t round = 0; round < rounds; round++)
            jobs += 2 + round % 63 > i;
        assert_true(sums[i] == jobs * i);
    }
    finish(&test);
}

typedef struct hold { /* one worker is kept in its piece until the others have done the rest */
    _Atomic uint32_t finished;
    _Atomic uint32_t timed_out;
    uint32_t pieces;
} hold;

static void any_range_may_be_named_as_what_comes_next(void **state)
{
    (void)state;
    static tally t;
    static const uint8_t some[3000];
    const struct {
        const void *data;
        uint64_t bytes;
    } ranges[] = {{some, sizeof some},
                  {some + 1, 1},
                  {some, 0},
                  {NULL, 0},
                  {NULL, 1 << 20}, /* nobody has mapped it */
                  {(const void *)UINTPTR_MAX, UINT64_MAX},
                  {(const void *)(UINTPTR_MAX - 100), 5000}};
    for (uint32_t workers = 1; workers <= 3; workers++) {
        test_team test;
        start(&test, workers);
        for (uint32_t i = 0; i < 300; i++) {
            uint32_t r = i % (uint32_t)RF_ARRAY_COUNT(ranges);
            rf_team_ahead(test.team, ranges[r].data, ranges[r].bytes);
            memset(&t, 0, sizeof t);
            t.grain = 7;
            t.worker_count = workers;
            rf_team_run(test.team, 1000, 7, count_items, &t);
            for (uint32_t j = 0; j < ITEMS_MAX; j++)
                assert_int_equal(t.visits[j], j < 1000);
        }
        finish(&test);
    }
    rf_team_ahead(NULL, some, sizeof some);
}

static void hold_the_first_piece(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    hold *h = context;
    (void)last;
    (void)worker;
    if (first == 0) {
        uint64_t limit = rf_os_clock_ns() + UINT64_C(20000000000);
        while (atomic_load(&h->finished) + 1 < h->pieces) {
            if (rf_os_clock_ns() > limit) {
                atomic_store(&h->timed_out, 1);
                break;
            }
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
    }
    atomic_fetch_add(&h->finished, 1);
}

static void a_worker_that_hangs_costs_its_piece_only(void **state)
{
    (void)state;
    test_team test;
    hold h = {.pieces = 100};
    start(&test, 3);
    rf_team_run(test.team, h.pieces, 1, hold_the_first_piece, &h);
    assert_int_equal(atomic_load(&h.timed_out), 0);
    assert_int_equal(atomic_load(&h.finished), h.pieces);
    finish(&test);
}

/* Time of this process on all its threads. */
static uint64_t process_time_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void idle_workers_sleep(void **state)
{
    (void)state;
    test_team test;
    uint64_t sums[64] = {0};
    start(&test, 4);
    rf_team_run(test.team, 64, 1, add_items, sums);
    nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    uint64_t before = process_time_ns();
    nanosleep(&(struct timespec){.tv_nsec = 200000000}, NULL);
    assert_true(process_time_ns() - before < 50000000); /* three spinning ones: 400 ms on 2 cores */
    finish(&test);
}

static void note_signal_mask(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    uint8_t *blocked = context;
    sigset_t mask;
    (void)first;
    (void)last;
    pthread_sigmask(SIG_SETMASK, NULL, &mask);
    blocked[worker] = (uint8_t)(1 + sigismember(&mask, SIGINT));
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL); /* leaves pieces for the others */
}

static void workers_block_signals_and_the_caller_does_not(void **state)
{
    (void)state;
    test_team test;
    uint8_t blocked[3] = {0};
    start(&test, 3);
    for (int i = 0; i < 1000 && (!blocked[0] || !blocked[1] || !blocked[2]); i++) {
        rf_team_run(test.team, 16, 1, note_signal_mask, blocked);
    }
    assert_int_equal(blocked[0], 1);
    assert_int_equal(blocked[1], 2);
    assert_int_equal(blocked[2], 2);
    finish(&test);
}

static void use_much_stack(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    volatile uint8_t below[100 * 1024];
    (void)context;
    (void)first;
    (void)last;
    (void)worker;
    for (size_t i = 0; i < sizeof below; i += 512)
        below[i] = (uint8_t)i;
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

static void a_run_faults_no_stack_page_in(void **state)
{
    (void)state;
    test_team test;
    start(&test, 4);
    rf_os_touch_stack();
    /* The pages are there before any piece has run. */
    for (uint32_t i = 1; i < 4; i++) {
        uint64_t resident = rf_os_resident(test.stacks[i], RF_WORKER_STACK_BYTES);
        if (resident != UINT64_MAX)
            assert_int_equal(resident, RF_WORKER_STACK_BYTES);
    }
    rf_faults before = rf_os_faults();
    rf_team_run(test.team, 64, 1, use_much_stack, NULL);
    uint64_t faults = rf_os_faults().minor - before.minor;
#ifdef __SANITIZE_THREAD__ /* its shadow memory is faulted in while the test runs */
    faults = 0;
#endif
    assert_true(faults < 16); /* 75 pages if they were not */
    finish(&test);
}

static void starting_keeps_what_stands_in_a_stack(void **state)
{
    (void)state;
    test_team test = {0};
    const uint32_t count = 2;
    test.memory = aligned_alloc(64, rf_team_bytes(count));
    assert_int_equal(rf_os_reserve(RF_WORKER_STACK_BYTES, &test.stacks[1], NULL), RF_OK);
    memset(test.stacks[1], 0x5a, RF_WORKER_STACK_BYTES);
    assert_int_equal(rf_team_start(test.memory, count, test.stacks, &test.team, NULL), RF_OK);
    const uint8_t *bottom = test.stacks[1];
    for (uint32_t i = 0; i < RF_WORKER_STACK_BYTES / 4; i++)
        assert_int_equal(bottom[i], 0x5a);
    finish(&test);
}

static void a_team_of_one_runs_in_the_caller_without_a_stack(void **state)
{
    (void)state;
    uint64_t sums[8] = {0};
    void *memory = aligned_alloc(64, rf_team_bytes(1));
    rf_team *team = NULL;
    assert_int_equal(rf_team_start(memory, 1, NULL, &team, NULL), RF_OK);
    rf_team_run(team, 8, 2, add_items, sums);
    for (uint64_t i = 0; i < 8; i++)
        assert_true(sums[i] == i);
    rf_team_stop(team);
    free(memory);
    rf_team_stop(NULL);
    rf_team_run(NULL, 8, 2, add_items, sums); /* no team: the caller alone */
    for (uint64_t i = 0; i < 8; i++)
        assert_true(sums[i] == 2 * i);
}

static void a_team_of_an_impossible_size_is_refused(void **state)
{
    (void)state;
    rf_team *team = NULL;
    rf_error err = {0};
    assert_int_equal(rf_team_start(NULL, 0, NULL, &team, &err), RF_ERR_USAGE);
    assert_int_equal(rf_team_start(NULL, RF_WORKERS_MAX + 1, NULL, &team, &err), RF_ERR_USAGE);
    assert_string_equal(err.got, "257");
    assert_null(team);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item_is_done_once_for_any_team_count_and_grain),
        cmocka_unit_test(many_short_jobs_lose_no_wake_up),
        cmocka_unit_test(any_range_may_be_named_as_what_comes_next),
        cmocka_unit_test(a_worker_that_hangs_costs_its_piece_only),
        cmocka_unit_test(idle_workers_sleep),
        cmocka_unit_test(workers_block_signals_and_the_caller_does_not),
        cmocka_unit_test(a_run_faults_no_stack_page_in),
        cmocka_unit_test(starting_keeps_what_stands_in_a_stack),
        cmocka_unit_test(a_team_of_one_runs_in_the_caller_without_a_stack),
        cmocka_unit_test(a_team_of_an_impossible_size_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
