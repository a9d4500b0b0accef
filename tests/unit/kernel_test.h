/* tests/unit/kernel_test.h: what the tests of the kernels share: reproducible random numbers, the
 * comparison bit for bit, and the walk over the instruction sets of this machine. */
#ifndef RF_KERNEL_TEST_H
#define RF_KERNEL_TEST_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kernels/kernels.h"
#include "kernels/quant.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const uint32_t sets[] = {RF_CPU_AVX2, RF_CPU_AVX512, RF_CPU_NEON};

static inline uint64_t next_random(uint64_t *seed)
{
    uint64_t z = (*seed += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static inline float uniform(uint64_t *seed, float low, float high)
{
    return low + (high - low) * (float)(next_random(seed) >> 40) * 0x1p-24f;
}

static inline void fill_uniform(float *x, uint32_t n, uint64_t seed, float low, float high)
{
    for (uint32_t i = 0; i < n; i++) {
        x[i] = uniform(&seed, low, high);
    }
}

static inline void assert_same_bits(const float *got, const float *expected, size_t n,
                                    const char *what)
{
    for (size_t i = 0; i < n; i++) {
        if (memcmp(&got[i], &expected[i], sizeof(float)) != 0 &&
            !(isnan(got[i]) && isnan(expected[i]))) {
            fail_msg("%s: element %zu is %a, expected %a", what, i, (double)got[i],
                     (double)expected[i]);
        }
    }
}

#ifdef RF_TEST_AVX512_EMULATED
/* The AVX-512 set from files that were compiled with avx512_emulated.h. */
static inline void for_each_set(void (*check)(const rf_kernels *kernels))
{
    rf_kernels kernels;
    if (!(rf_cpu_detect() & RF_CPU_AVX2)) {
        print_message("         skipped: the emulation of avx512 needs avx2\n");
        return;
    }
    rf_kernels_scalar(&kernels);
    rf_kernels_avx512(&kernels);
    check(&kernels);
    print_message("         ran: avx512 (emulated)\n");
}
#else
/* Calls check for each instruction set of this machine; says which were skipped. */
static inline void for_each_set(void (*check)(const rf_kernels *kernels))
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(sets); i++) {
        rf_kernels kernels;
        if (!(rf_cpu_detect() & sets[i])) {
            print_message("         skipped: this machine has no %s\n", rf_cpu_name(sets[i]));
            continue;
        }
        rf_kernels_pick(&kernels, sets[i]);
        check(&kernels);
        print_message("         ran: %s\n", rf_cpu_name(sets[i]));
    }
}
#endif

#endif
