/* bench/kernels.c: each matmul kernel alone, on one core: decode (1 token, weights from memory) in
 * GB/s and as a share of a plain read of the same buffer, and batches in GMAC/s with the share of
 * what registers alone reach (peak.h), for both precisions of activations.
 *
 *   kernels [format|all] [instruction sets]      e.g. kernels q4_k avx2
 *   kernels --gate      exit code 1 where a kernel falls below its floor: a share of the peak of
 *                       the same run, so that a compiler that spills accumulators is noticed
 *
 * Weights come from a buffer that no cache holds. Each figure is the best of many slices of
 * a few milliseconds, so that a busy neighbour costs less of it.
 */
#include "peak.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BUFFER_BYTES (256u << 20)
#define TOKENS_MAX   512u
#define K            2048u

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
    const double begin = peak_now();
    job->token_count = tokens;
    while (peak_now() - begin < 0.4) {
        if (row + slice > rows) {
            row = 0;
        }
        const double start = peak_now();
        for (uint32_t at = row; at < row + slice; at += RF_MATMUL_TILE_ROWS) {
            fn(job, at, at + RF_MATMUL_TILE_ROWS, scratch);
        }
        const double seconds = peak_now() - start;
        const figures f = {(double)slice * (double)job->weight_row_bytes / seconds / 1e9,
                           (double)slice * job->k * tokens / seconds / 1e9};
        best = f.gmacs > best.gmacs ? f : best;
        row += slice;
    }
    return best;
}

/* A matmul of one format with all that it needs. */
typedef struct setting {
    rf_matmul job;
    uint32_t rows;
    float *x, *out;
    uint8_t *packed;
    void *scratch;
} setting;

static bool set_up(setting *s, const rf_kernels *kernels, rf_format format, rf_act wanted,
                   const uint8_t *buffer)
{
    const rf_act act = rf_act_for(format, wanted);
    const rf_act_layout layout = rf_act_layout_of(act, format, K);
    uint64_t row_bytes;
    if (!kernels->matmul[format][act] || !rf_format_row_bytes(format, K, &row_bytes)) {
        return false;
    }
    s->rows = (uint32_t)(BUFFER_BYTES / row_bytes) / RF_MATMUL_TILE_ROWS * RF_MATMUL_TILE_ROWS;
    s->x = malloc(sizeof(float) * K);
    s->out = malloc(sizeof(float) * s->rows * 4);
    s->packed = aligned_alloc(64, layout.row_bytes * TOKENS_MAX);
    s->scratch = aligned_alloc(64, (rf_matmul_scratch_bytes(K) + 63) & ~63ull);
    if (!s->x || !s->out || !s->packed || !s->scratch) {
        exit(1);
    }
    for (uint32_t t = 0; t < TOKENS_MAX; t++) {
        for (uint32_t i = 0; i < K; i++) {
            s->x[i] = (float)((i * 37u + t * 11u) % 101u) - 50.0f;
        }
        kernels->pack[act](&layout, s->x, s->packed + t * layout.row_bytes);
    }
    s->job = (rf_matmul){.weight = buffer,
                         .weight_row_bytes = row_bytes,
                         .k = K,
                         .format = format,
                         .layout = layout,
                         .act = s->packed,
                         .out = s->out,
                         .out_stride = 0};
    return true;
}

static void tear_down(setting *s)
{
    free(s->x);
    free(s->out);
    free(s->packed);
    free(s->scratch);
}

static double peak_of(const peak *p, rf_act act)
{
    return act == RF_ACT_INT8 ? p->bytes : act == RF_ACT_INT16 ? p->pairs : p->floats;
}

static void bench_format(const rf_kernels *kernels, rf_format format, rf_act wanted,
                         const uint8_t *buffer, double read, const peak *p)
{
    static const uint32_t counts[] = {1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 512};
    static const char *const names[] = {"f32", "int16", "int8"};
    setting s;
    if (!set_up(&s, kernels, format, wanted, buffer)) {
        return;
    }
    const rf_act act = s.job.layout.act;
    figures f = {0, 0};
    printf("%-6s %-5s %-20s", rf_format_name(format), names[act],
           kernels->matmul_entry[format][act].file);
    for (size_t i = 0; i < RF_ARRAY_COUNT(counts); i++) {
        f = measure(kernels, &s.job, counts[i], s.rows, s.scratch);
        if (counts[i] == 1) {
            printf(" %5.1f GB/s %3.0f%% |", f.gbs, 100 * f.gbs / read);
        }
        printf(" %6.1f", f.gmacs);
        fflush(stdout);
    }
    if (peak_of(p, act) > 0) {
        printf(" %3.0f%%", 100 * f.gmacs / peak_of(p, act));
    }
    printf("\n");
    tear_down(&s);
}

/* Floors of AVX2: 0.8 of the shares measured with gcc 12 on Zen 3. A kernel whose accumulators do
 * not stay in registers falls to half of its share. */
typedef struct gate_row {
    rf_format format;
    rf_act act;
    uint32_t tokens;
    double floor;
} gate_row;

static const gate_row gate_rows[] = {
    {RF_Q4_0, RF_ACT_INT8, 512, 0.52},  {RF_Q4_K, RF_ACT_INT8, 512, 0.51},
    {RF_Q5_K, RF_ACT_INT8, 512, 0.42},  {RF_Q6_K, RF_ACT_INT8, 512, 0.42},
    {RF_Q2_K, RF_ACT_INT8, 512, 0.42},  {RF_Q4_0, RF_ACT_INT16, 512, 0.62},
    {RF_Q8_0, RF_ACT_INT16, 512, 0.62}, {RF_Q4_K, RF_ACT_INT16, 512, 0.62},
    {RF_Q6_K, RF_ACT_INT16, 512, 0.64}, {RF_Q4_K, RF_ACT_INT16, 1, 0.21},
    {RF_Q4_K, RF_ACT_INT8, 1, 0.12},    {RF_F32, RF_ACT_F32, 512, 0.45},
    {RF_Q8_0, RF_ACT_INT8, 512, 0.33},  {RF_Q6_K, RF_ACT_INT8, 1, 0.10},
};

/* The number of kernels below their floor, each tried three times with the peak of its time. */
static int run_gate(const uint8_t *buffer)
{
    rf_kernels kernels;
    int below = 0;
    rf_kernels_pick(&kernels, RF_CPU_AVX2);
    if (!(kernels.cpu & RF_CPU_AVX2)) {
        printf("no floors for this machine\n");
        return 0;
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(gate_rows); i++) {
        const gate_row *row = &gate_rows[i];
        setting s;
        double share = 0;
        if (!set_up(&s, &kernels, row->format, row->act, buffer)) {
            continue;
        }
        for (int round = 0; round < 3 && share < row->floor; round++) {
            const peak p = peak_avx2();
            const figures f = measure(&kernels, &s.job, row->tokens, s.rows, s.scratch);
            share = f.gmacs / peak_of(&p, row->act);
        }
        printf("%-4s %-5s %-5s %3u tokens: %.2f of the peak, floor %.2f\n",
               share < row->floor ? "FAIL" : "ok", rf_format_name(row->format),
               row->act == RF_ACT_INT8    ? "int8"
               : row->act == RF_ACT_INT16 ? "int16"
                                          : "f32",
               row->tokens, share, row->floor);
        below += share < row->floor;
        tear_down(&s);
    }
    return below;
}

int main(int argc, char **argv)
{
    const bool gate = argc > 1 && strcmp(argv[1], "--gate") == 0;
    const char *only = argc > 1 && !gate && strcmp(argv[1], "all") != 0 ? argv[1] : NULL;
    uint32_t mask = RF_CPU_ALL;
    rf_kernels kernels;
    if (argc > 2 && !rf_cpu_parse(argv[2], &mask)) {
        fprintf(stderr, "kernels: unknown instruction set: %s\n", argv[2]);
        return 2;
    }
    bool known = !only;
    for (uint32_t f = 0; f < RF_FORMAT_FILE_COUNT && !known; f++) {
        known = strcmp(only, rf_format_name((rf_format)f)) == 0;
    }
    if (!known) {
        fprintf(stderr, "kernels: unknown format: %s\n", only);
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
    if (gate) {
        return run_gate(buffer) == 0 ? 0 : 1;
    }
    const peak p = rf_cpu_detect() & RF_CPU_AVX2 ? peak_avx2() : (peak){0, 0, 0};
    const double read = peak_read(buffer, BUFFER_BYTES);
    printf("read %.1f GB/s; AVX2 registers: bytes %.1f, pairs %.1f, floats %.1f GMAC/s\n", read,
           p.bytes, p.pairs, p.floats);
    printf("k %u; GMAC/s for 1 2 3 4 6 8 12 16 32 64 128 512 tokens; share of the registers\n", K);
    for (uint32_t f = 0; f < RF_FORMAT_FILE_COUNT; f++) {
        if (only && strcmp(only, rf_format_name((rf_format)f)) != 0) {
            continue;
        }
        bench_format(&kernels, (rf_format)f, RF_ACT_INT16, buffer, read, &p);
        if (rf_act_for((rf_format)f, RF_ACT_INT8) == RF_ACT_INT8) {
            bench_format(&kernels, (rf_format)f, RF_ACT_INT8, buffer, read, &p);
        }
    }
    free(buffer);
    return 0;
}
