/* cli/alloc_count.c: counts every call of the malloc family, by whoever makes it.
 *
 * The command defines the family itself and hands each call to glibc's own entry points, so calls
 * from the library, from libc and from any thread are counted, not only those that our code knows
 * of. The definitions are weak: where libc is linked statically its own ones win, nothing is
 * counted, and alloc_count_works says so. Under a sanitizer the allocator belongs to it, and its
 * hooks count instead.
 */
#include "cli.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CLI_SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) ||                         \
    __has_feature(memory_sanitizer)
#define CLI_SANITIZED 1
#endif
#endif
#ifndef CLI_SANITIZED
#define CLI_SANITIZED 0
#endif

static _Atomic uint64_t calls;

#if CLI_SANITIZED

int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *block, size_t bytes)
{
    (void)block;
    (void)bytes;
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
}

static void on_free(const volatile void *block)
{
    (void)block;
}

void alloc_count_start(void)
{
    static bool installed;
    if (!installed)
        installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free) != 0;
}

#elif defined(__GLIBC__)

#define WEAK __attribute__((weak, visibility("default")))

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *block, size_t bytes);
void __libc_free(void *block);
void *__libc_memalign(size_t align, size_t bytes);
void *__libc_valloc(size_t bytes);
void *__libc_pvalloc(size_t bytes);

static void count_call(void)
{
    atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed);
}

WEAK void *malloc(size_t bytes)
{
    count_call();
    return __libc_malloc(bytes);
}

WEAK void *calloc(size_t count, size_t bytes)
{
    count_call();
    return __libc_calloc(count, bytes);
}

WEAK void *realloc(void *block, size_t bytes)
{
    count_call();
    return __libc_realloc(block, bytes);
}

WEAK void *reallocarray(void *block, size_t count, size_t bytes)
{
    uint64_t product;
    count_call();
    if (!rf_mul(count, bytes, &product) || product > SIZE_MAX) {
        errno = ENOMEM;
        return NULL;
    }
    return __libc_realloc(block, (size_t)product);
}

WEAK void free(void *block)
{
    __libc_free(block);
}

WEAK void *memalign(size_t align, size_t bytes)
{
    count_call();
    return __libc_memalign(align, bytes);
}

WEAK void *aligned_alloc(size_t align, size_t bytes)
{
    count_call();
    return __libc_memalign(align, bytes);
}

WEAK int posix_memalign(void **out, size_t align, size_t bytes)
{
    count_call();
    if (!rf_is_power_of_two(align) || align % sizeof(void *) != 0)
        return EINVAL;
    void *block = __libc_memalign(align, bytes);
    if (!block)
        return ENOMEM;
    *out = block;
    return 0;
}

WEAK void *valloc(size_t bytes)
{
    count_call();
    return __libc_valloc(bytes);
}

WEAK void *pvalloc(size_t bytes)
{
    count_call();
    return __libc_pvalloc(bytes);
}

void alloc_count_start(void)
{
}

#else

void alloc_count_start(void)
{
}

#endif

uint64_t alloc_count(void)
{
    return atomic_load_explicit(&calls, memory_order_relaxed);
}

bool alloc_count_works(void)
{
    static int known; /* 0: not tried yet; the trial is itself counted */
    if (!known) {
        void *(*volatile take)(size_t) = malloc; /* volatile: the pair must not be optimised away */
        void (*volatile give)(void *) = free;
        uint64_t before = alloc_count();
        give(take(16));
        known = alloc_count() != before ? 1 : -1;
    }
    return known > 0;
}

uint64_t alloc_data_bytes(void)
{
#if defined(__GLIBC__) && !CLI_SANITIZED
    if (!alloc_count_works()) {
        struct mallinfo2 info = mallinfo2();
        return (uint64_t)info.uordblks + (uint64_t)info.hblkhd;
    }
#endif
    return rf_os_data_bytes();
}

bool cli_sanitized(void)
{
    return CLI_SANITIZED != 0;
}
