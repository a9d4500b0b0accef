/* base/workers.c: a fixed team that shares out the pieces of one job.
 *
 * The caller is worker 0 and works along. A job is one 64-bit ticket, how many pieces it has and
 * how many were handed out:
 *
 *      ticket = pieces << 32 | next          take: fetch_add(1); the piece is mine if next < pieces
 *
 * Because both halves come from one atomic read, a worker that wakes late can only find an
 * exhausted ticket or a piece of the present job, never a piece of a past one; and a job cannot
 * end before each piece that was taken is reported. So the fields of a job are plain memory,
 * nobody waits for a worker that took nothing, and a worker that loses its processor delays the
 * one piece that it holds. Idle workers spin briefly, then sleep on a futex.
 *
 * Knows no memory but what it is given, and nothing about the work.
 */
#include "base/base.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* A step has an op every few dozen microseconds; about that long a spin lasts (a pause takes 40 to
 * 140 cycles). With more workers than processors, spinning only keeps the work off them. */
#define SPIN_LIMIT                2000u
#define SPIN_LIMIT_OVERSUBSCRIBED 20u

#define ASK_BYTES 512u /* of what comes next, between two looks for a job */

/* Pieces of one job: the low half of a ticket must not run over, however many workers try. */
#define PIECES_MAX (UINT32_C(1) << 31)

typedef struct rf_worker {
    rf_team *team;
    pthread_t thread;
    uint32_t index;
} rf_worker;

struct rf_team {
    /* Written by the caller only while no piece is out. */
    rf_work_fn fn;
    void *context;
    uint32_t count;
    uint32_t grain;
    uint32_t worker_count;
    uint32_t started; /* threads that run */
    uint32_t spin_limit;

    _Alignas(RF_CACHE_LINE) _Atomic uint64_t ticket;
    _Alignas(RF_CACHE_LINE) _Atomic uint32_t done; /* pieces reported; the caller sleeps on it */
    _Atomic uint32_t caller_sleeps;
    _Alignas(RF_CACHE_LINE) _Atomic uint32_t generation; /* jobs so far; workers sleep on it */
    _Atomic uint32_t sleepers;
    _Atomic uint32_t stop;
    _Atomic uint32_t ready;

    _Alignas(RF_CACHE_LINE) _Atomic uintptr_t ahead; /* what idle workers ask for next */
    _Atomic uintptr_t ahead_end;

    _Alignas(RF_CACHE_LINE) rf_worker workers[]; /* [0] stands for the caller, without a thread */
};

/* Sleeps while *word holds value; may return early. */
static void futex_wait(_Atomic uint32_t *word, uint32_t value)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, uint32_t count)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, RF_MIN(count, (uint32_t)INT_MAX), NULL, NULL, 0);
}

static inline void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* Takes pieces until none is left; returns how many this worker did. */
static void take_pieces(rf_team *team, uint32_t worker)
{
    for (;;) {
        uint64_t ticket = atomic_fetch_add_explicit(&team->ticket, 1, memory_order_acq_rel);
        uint32_t pieces = (uint32_t)(ticket >> 32);
        uint32_t piece = (uint32_t)ticket;
        if (piece >= pieces)
            return;
        uint32_t first = piece * team->grain;
        uint32_t last = team->count - first > team->grain ? first + team->grain : team->count;
        team->fn(team->context, first, last, worker);
        /* Sequentially consistent, against caller_sleeps: either this report is seen before the
         * caller sleeps, or its wish to be woken is seen here. */
        if (atomic_fetch_add(&team->done, 1) + 1 == pieces && atomic_load(&team->caller_sleeps)) {
            futex_wake(&team->done, 1);
        }
    }
}

/* Asks for the next few lines of what rf_team_ahead named. A worker that reads one bound before and
 * the other after a change asks for the wrong lines, which is no harm. */
static void ask_ahead(rf_team *team)
{
    uintptr_t end = atomic_load_explicit(&team->ahead_end, memory_order_relaxed);
    if (atomic_load_explicit(&team->ahead, memory_order_relaxed) >= end)
        return;
    uintptr_t at = atomic_fetch_add_explicit(&team->ahead, ASK_BYTES, memory_order_relaxed);
    for (uint32_t i = 0; i < ASK_BYTES; i += RF_CACHE_LINE)
        __builtin_prefetch((const void *)(at + i), 0, 2);
}

/* Returns the generation that follows seen, as soon as there is one. */
static uint32_t await_generation(rf_team *team, uint32_t seen)
{
    for (uint32_t spin = 0; spin < team->spin_limit; spin++) {
        uint32_t now = atomic_load_explicit(&team->generation, memory_order_acquire);
        if (now != seen)
            return now;
        ask_ahead(team);
        spin_pause();
    }
    for (;;) {
        atomic_fetch_add(&team->sleepers, 1);
        uint32_t now = atomic_load(&team->generation);
        if (now == seen)
            futex_wait(&team->generation, seen);
        atomic_fetch_sub(&team->sleepers, 1);
        now = atomic_load(&team->generation);
        if (now != seen)
            return now;
    }
}

static void await_done(rf_team *team, uint32_t pieces)
{
    for (uint32_t spin = 0; spin < team->spin_limit; spin++) {
        if (atomic_load_explicit(&team->done, memory_order_acquire) == pieces)
            return;
        spin_pause();
    }
    atomic_store(&team->caller_sleeps, 1);
    for (;;) {
        uint32_t done = atomic_load(&team->done);
        if (done == pieces)
            break;
        futex_wait(&team->done, done);
    }
    atomic_store(&team->caller_sleeps, 0);
}

static void *worker_main(void *argument)
{
    rf_worker *worker = argument;
    rf_team *team = worker->team;
    uint32_t seen = 0; /* the first job is generation 1 */
    atomic_fetch_add(&team->ready, 1);
    futex_wake(&team->ready, 1);
    for (;;) {
        seen = await_generation(team, seen);
        if (atomic_load(&team->stop))
            return NULL;
        take_pieces(team, worker->index);
    }
}

uint64_t rf_team_bytes(uint32_t worker_count)
{
    uint64_t bytes = sizeof(rf_team) + (uint64_t)worker_count * sizeof(rf_worker);
    return (bytes + RF_CACHE_LINE - 1) & ~(uint64_t)(RF_CACHE_LINE - 1);
}

/* Faults in every page of a stack while nobody runs on it. What stands there is kept, so that a
 * pattern that a check has filled in still tells how deep the stack was used. */
static void touch_stack_memory(void *stack)
{
    volatile uint8_t *bytes = stack;
    uint64_t page = rf_os_page_bytes();
    for (uint64_t at = 0; at < RF_WORKER_STACK_BYTES; at += page)
        bytes[at] = bytes[at];
}

static int start_thread(rf_team *team, uint32_t index, void *stack)
{
    pthread_attr_t attributes;
    rf_worker *worker = &team->workers[index];
    *worker = (rf_worker){.team = team, .index = index};
    touch_stack_memory(stack);
    int code = pthread_attr_init(&attributes);
    if (code != 0)
        return code;
    code = pthread_attr_setstack(&attributes, stack, RF_WORKER_STACK_BYTES);
    if (code == 0)
        code = pthread_create(&worker->thread, &attributes, worker_main, worker);
    pthread_attr_destroy(&attributes);
    return code;
}

rf_status rf_team_start(void *memory, uint32_t worker_count, void *const *stacks, rf_team **out,
                        rf_error *err)
{
    if (worker_count == 0 || worker_count > RF_WORKERS_MAX) {
        rf_fail(err, RF_ERR_USAGE, "threads", "the number of workers is out of range");
        rf_fail_expected(err, "1 to %u", RF_WORKERS_MAX);
        rf_fail_got(err, "%u", worker_count);
        return RF_ERR_USAGE;
    }
    rf_team *team = memory;
    memset(team, 0, (size_t)rf_team_bytes(worker_count));
    team->worker_count = worker_count;
    team->spin_limit =
        worker_count > rf_os_processor_count() ? SPIN_LIMIT_OVERSUBSCRIBED : SPIN_LIMIT;

    /* A thread inherits the mask that its maker has at that moment. */
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    /* What a thread brings upon itself must reach its handler: a mapped file that shrinks. */
    sigdelset(&all, SIGBUS);
    sigdelset(&all, SIGSEGV);
    sigdelset(&all, SIGFPE);
    sigdelset(&all, SIGILL);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int code = 0;
    for (uint32_t i = 1; i < worker_count && code == 0; i++) {
        code = start_thread(team, i, stacks[i]);
        if (code == 0)
            team->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (code != 0) {
        rf_team_stop(team);
        return rf_fail(err, RF_ERR_RUNTIME, "threads",
                       "cannot start a worker: error %d of the "
                       "system",
                       code);
    }
    for (;;) {
        uint32_t ready = atomic_load(&team->ready);
        if (ready == team->started)
            break;
        futex_wait(&team->ready, ready);
    }
    *out = team;
    return RF_OK;
}

void rf_team_stop(rf_team *team)
{
    if (!team)
        return;
    atomic_store(&team->stop, 1);
    atomic_fetch_add(&team->generation, 1);
    futex_wake(&team->generation, UINT32_MAX);
    for (uint32_t i = 1; i <= team->started; i++)
        pthread_join(team->workers[i].thread, NULL);
    team->started = 0;
}

uint32_t rf_team_size(const rf_team *team)
{
    return team ? team->worker_count : 1;
}

void rf_team_ahead(rf_team *team, const void *data, uint64_t bytes)
{
    if (!team || team->worker_count == 1)
        return;
    uintptr_t at = (uintptr_t)data & ~(uintptr_t)(RF_CACHE_LINE - 1);
    uintptr_t end = (uintptr_t)data + (uintptr_t)RF_MIN(bytes, UINTPTR_MAX - (uintptr_t)data);
    atomic_store_explicit(&team->ahead_end, 0, memory_order_relaxed);
    atomic_store_explicit(&team->ahead, at, memory_order_relaxed);
    atomic_store_explicit(&team->ahead_end, end, memory_order_relaxed);
}

void rf_team_run(rf_team *team, uint32_t count, uint32_t grain, rf_work_fn fn, void *context)
{
    if (count == 0)
        return;
    if (grain == 0)
        grain = 1;
    if (!team || team->worker_count == 1 || count <= grain) {
        fn(context, 0, count, 0);
        return;
    }
    if (count / grain >= PIECES_MAX)
        grain = 2; /* only count >= 2^31 with grain 1 comes here */
    uint32_t pieces = count / grain + (count % grain != 0);
    team->fn = fn;
    team->context = context;
    team->count = count;
    team->grain = grain;
    atomic_store_explicit(&team->done, 0, memory_order_relaxed);
    atomic_store_explicit(&team->ticket, (uint64_t)pieces << 32, memory_order_release);
    atomic_fetch_add(&team->generation, 1);
    uint32_t sleepers = atomic_load(&team->sleepers);
    if (sleepers > 0)
        futex_wake(&team->generation, RF_MIN(sleepers, pieces - 1));
    take_pieces(team, 0);
    await_done(team, pieces);
}
