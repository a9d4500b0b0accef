/* bench/peak.h: what the core can do at most, measured in the run that it is compared with: loops
 * on registers alone, and a read of a buffer that no cache holds. Zero where there is no such loop.
 */
#ifndef RF_BENCH_PEAK_H
#define RF_BENCH_PEAK_H

#include "base/base.h"

#include <stddef.h>
#include <stdint.h>

static inline double peak_now(void) /* seconds */
{
    return 1e-9 * (double)rf_os_clock_ns();
}

typedef struct peak { /* GMAC/s */
    double bytes;     /* vpmaddubsw and vpaddw: int8 activations */
    double pairs;     /* vpmaddwd and vpaddd: int16 activations */
    double floats;    /* fma */
} peak;

#if defined(__x86_64__)
/* Eight accumulators; every product goes through one register, as in a kernel. */
#define PEAK_PAIR(multiply, add, i)                                                                \
    multiply " %%ymm9, %%ymm10, %%ymm8\n" add " %%ymm8, %%ymm" #i ", %%ymm" #i "\n"
#define PEAK_FMA(i) "vfmadd231ps %%ymm9, %%ymm10, %%ymm" #i "\n"
#define PEAK_PAIRS(m, a)                                                                           \
    PEAK_PAIR(m, a, 0)                                                                             \
    PEAK_PAIR(m, a, 1)                                                                             \
    PEAK_PAIR(m, a, 2)                                                                             \
    PEAK_PAIR(m, a, 3)                                                                             \
    PEAK_PAIR(m, a, 4)                                                                             \
    PEAK_PAIR(m, a, 5)                                                                             \
    PEAK_PAIR(m, a, 6)                                                                             \
    PEAK_PAIR(m, a, 7)
#define PEAK_FMAS                                                                                  \
    PEAK_FMA(0)                                                                                    \
    PEAK_FMA(1)                                                                                    \
    PEAK_FMA(2) PEAK_FMA(3) PEAK_FMA(4) PEAK_FMA(5) PEAK_FMA(6) PEAK_FMA(7)
#define PEAK_LOOP(body, macs, result)                                                              \
    do {                                                                                           \
        for (int round_ = 0; round_ < 200; round_++) {                                             \
            const double start_ = peak_now();                                                      \
            for (int i_ = 0; i_ < 1000; i_++) {                                                    \
                __asm__ volatile(body body body body ::                                            \
                                     : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6",     \
                                       "xmm7", "xmm8", "xmm9", "xmm10");                           \
            }                                                                                      \
            const double rate_ = (macs)*32e-6 / (peak_now() - start_);                             \
            (result) = rate_ > (result) ? rate_ : (result);                                        \
        }                                                                                          \
    } while (0)

static inline peak peak_avx2(void)
{
    peak p = {0, 0, 0};
    __asm__ volatile("vxorps %%ymm9, %%ymm9, %%ymm9\nvxorps %%ymm10, %%ymm10, %%ymm10\n" ::
                         : "xmm9", "xmm10");
    PEAK_LOOP(PEAK_PAIRS("vpmaddubsw", "vpaddw"), 32, p.bytes);
    PEAK_LOOP(PEAK_PAIRS("vpmaddwd", "vpaddd"), 16, p.pairs);
    PEAK_LOOP(PEAK_FMAS, 8, p.floats);
    return p;
}
#else
static inline peak peak_avx2(void)
{
    return (peak){0, 0, 0};
}
#endif

/* GB/s of one core that only reads, with prefetching as the kernels do it. */
static inline double peak_read(const uint8_t *buffer, size_t bytes)
{
    double best = 0;
    uint64_t total = 0;
    for (size_t round = 0; round < 24; round++) {
        const size_t slice = bytes / 8;
        const uint64_t *words = (const uint64_t *)(const void *)(buffer + slice * (round % 8u));
        uint64_t sums[16] = {0};
        const double start = peak_now();
        for (size_t i = 0; i < slice / 8; i += 16) {
            __builtin_prefetch(words + i + 1024);
            __builtin_prefetch(words + i + 1032);
            for (size_t j = 0; j < 16; j++) {
                sums[j] += words[i + j];
            }
        }
        const double rate = (double)slice / (peak_now() - start) / 1e9;
        best = rate > best ? rate : best;
        for (size_t j = 0; j < 16; j++) {
            total += sums[j];
        }
    }
    volatile uint64_t keep = total;
    (void)keep;
    return best;
}

#endif
