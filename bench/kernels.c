/* bench/kernels.c: each matmul kernel alone, on one core: decode (1 token, weights from memory) in
 * GB/s and as a share of a plain read of the same buffer, and batches in GMAC/s.
 *
 *   kernels [format|all] [instruction sets]      e.g. kernels q4_k avx2
 *
 * Weights come from a buffer that no cache holds. Each figure is the best of many slices of
 * a few milliseconds, so that a busy neighbour costs less of it.
 */
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define BUFFER_BYTES (256u << 20)
#define TOKENS_MAX   512u
#define K            2048u

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double read_bandwidth(const uint8_t *buffer)
{
    double best = 0;
    uint64_t total = 0;
    for (int round = 0; round < 24; round++) {
        const size_t slice = BUFFER_BYTES / 8;
        const uint64_t *words = (const uint64_t *)(const void *)(buffer + slice * (round % 8u));
        uint64_t sums[16] = {0};
        const double start = now();
        for (size_t i = 0; i < slice / 8; i += 16) {
            for (size_t j = 0; j < 16; j++) {
                sums[j] += words[i + j];
            }
        }
        const double rate = (double)slice / (now() - start) / 1e9;
        best = rate > best ? rate : best;
        for (size_t j = 0; j < 16; j++) {
            total += sums[j];
        }
    }
    volatile uint64_t keep = total;
    (void)keep;
    return best;
}

typedef struct figures {
    double gbs, gmacs;
} figures;

/* Slices of rows of some milliseconds each, walking through the whole buffer. */
static figures measure(const rf_kernels *kernels, rf_matmul *job, uint32_t tokens, uint32_t rows,
                       void *scratch)
{
    const rf_matmul_fn fn = kernels->matmul[job->format][job->layout.act];
    const uint32_t most = tokens < 16 ? 2048 : 2048 / (tokens / 16);
    const uint32_t slice = RF_MIN(rows, RF_MAX(most, 2 * RF_MATMUL_TILE_ROWS));
    figures best = {0, 0};
    uint32_t row = 0;
    const double begin = now();
    job->token_count = tokens;
    while (now() - begin < 0.4) {
        if (row + slice > rows) {
            row = 0;
        }
        const double start = now();
        for (uint32_t at = row; at < row + slice; at += RF_MATMUL_TILE_ROWS) {
            fn(job, at, at + RF_MATMUL_TILE_ROWS, scratch);
        }
        const double seconds = now() - start;
        const figures f = {(double)slice * (double)job->weight_row_bytes / seconds / 1e9,
                           (double)slice * job->k * tokens / seconds / 1e9};
        best = f.gmacs > best.gmacs ? f : best;
        row += slice;
    }
    return best;
}

static void bench_format(const rf_kernels *kernels, rf_format format, uint8_t *buffer, double read)
{
    static const uint32_t counts[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512};
    const rf_act act = rf_act_for(format, RF_ACT_INT16);
    const rf_act_layout layout = rf_act_layout_of(act, format, K);
    uint64_t row_bytes;
    if (!kernels->matmul[format][act] || !rf_format_row_bytes(format, K, &row_bytes)) {
        return;
    }
    const uint32_t rows =
        (uint32_t)(BUFFER_BYTES / row_bytes) / RF_MATMUL_TILE_ROWS * RF_MATMUL_TILE_ROWS;
    float *x = malloc(sizeof(float) * K);
    float *out = malloc(sizeof(float) * rows * 4);
    uint8_t *packed = aligned_alloc(64, layout.row_bytes * TOKENS_MAX);
    void *scratch = aligned_alloc(64, (rf_matmul_scratch_bytes(K) + 63) & ~63ull);
    if (!x || !out || !packed || !scratch) {
        exit(1);
    }
    for (uint32_t t = 0; t < TOKENS_MAX; t++) {
        for (uint32_t i = 0; i < K; i++) {
            x[i] = (float)((i * 37u + t * 11u) % 101u) - 50.0f;
        }
        kernels->pack[act](&layout, x, packed + t * layout.row_bytes);
    }
    rf_matmul job = {.weight = buffer,
                     .weight_row_bytes = row_bytes,
                     .k = K,
                     .format = format,
                     .layout = layout,
                     .act = packed,
                     .out = out,
                     .out_stride = 0};
    printf("%-5s %-16s", rf_format_name(format), kernels->matmul_entry[format][act].file);
    for (size_t i = 0; i < RF_ARRAY_COUNT(counts); i++) {
        const figures f = measure(kernels, &job, counts[i], rows, scratch);
        if (counts[i] == 1) {
            printf(" %5.1f GB/s %3.0f%% |", f.gbs, 100 * f.gbs / read);
        }
        printf(" %6.1f", f.gmacs);
        fflush(stdout);
    }
    printf("\n");
    free(x);
    free(out);
    free(packed);
    free(scratch);
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 && strcmp(argv[1], "all") != 0 ? argv[1] : NULL;
    uint32_t mask = RF_CPU_ALL;
    rf_kernels kernels;
    if (argc > 2 && !rf_cpu_parse(argv[2], &mask)) {
        fprintf(stderr, "kernels: unknown instruction set: %s\n", argv[2]);
        return 2;
    }
    rf_kernels_pick(&kernels, mask);
    uint8_t *buffer = aligned_alloc(4096, BUFFER_BYTES);
    if (!buffer) {
        return 1;
    }
    for (size_t i = 0; i < BUFFER_BYTES; i++) {
        buffer[i] = (uint8_t)(i * 2654435761u >> 13) & 0x3F; /* halves stay small and normal */
    }
    const double read = read_bandwidth(buffer);
    printf("read %.1f GB/s; k %u; GMAC/s for 1 2 3 4 6 8 12 16 32 64 128 512 tokens\n", read, K);
    for (uint32_t f = 0; f < RF_FORMAT_FILE_COUNT; f++) {
        if (!only || strcmp(only, rf_format_name((rf_format)f)) == 0) {
            bench_format(&kernels, (rf_format)f, buffer, read);
        }
    }
    free(buffer);
    return 0;
}
