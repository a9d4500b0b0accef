/* bench/attend.c: attention over blocks of positions, on one core.
 *
 *   attend [instruction sets] [width]      e.g. attend avx2 64
 *
 * Decode: ns for each position of one KV head (its key and its value) that a group of query heads
 * shares, and the GB/s of stored rows that this reads; rows from memory (a store of 32 MiB, each
 * block read once a round) and from a core's cache (256 positions). r8 rows are read as the store
 * reads them: their scales are expanded, their codes stay. Prefill: GMAC/s of 64 queries that see
 * the same blocks. Each figure is the best of many slices.
 */
#include "base/base.h"
#include "kernels/kv_codec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define STORE_BYTES (32u << 20)
#define QUERIES_MAX 64u
#define WIDTH_MAX   256u

typedef struct setup {
    rf_kernels kernels;
    rf_kv_kernels codec;
    rf_kv_shape shape;
    rf_attend job;
    uint8_t *side[2]; /* rows of keys and of values */
    uint64_t stride;
    uint32_t positions;
    rf_attend_range visible[QUERIES_MAX];
    float *scales[2];
} setup;

static void block(setup *s, uint32_t first)
{
    rf_attend_rows *rows[2] = {&s->job.k, &s->job.v};
    for (int side = 0; side < 2; side++) {
        const uint8_t *at = s->side[side] + first * s->stride;
        rows[side]->rows = at;
        if (rows[side]->form == RF_ATTEND_INT8) {
            s->codec.expand(&s->shape, at, RF_ATTEND_BLOCK, 3, NULL, s->scales[side]);
        }
    }
    s->kernels.attend(&s->job);
}

/* ns per position. */
static double measure(setup *s, uint32_t queries, uint32_t positions)
{
    const uint32_t slice = 1024;
    double best = 1e30;
    s->job.query_count = queries;
    for (uint32_t i = 0, at = 0; i < 400; i++) {
        const double start = (double)rf_os_clock_ns();
        for (uint32_t j = 0; j < slice; j += RF_ATTEND_BLOCK) {
            block(s, at);
            at = (at + RF_ATTEND_BLOCK) % positions;
        }
        best = fmin(best, ((double)rf_os_clock_ns() - start) / slice);
    }
    return best;
}

static void *zeroed(uint64_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!memory) {
        exit(1);
    }
    return memset(memory, 0, bytes);
}

static void run(const char *name, rf_attend_form form, uint32_t mask, uint32_t width)
{
    static const uint32_t groups[] = {1, 2, 3, 4, 8};
    setup s = {0};
    rf_kernels_pick(&s.kernels, mask);
    rf_kv_kernels_pick(&s.codec, mask);
    if (!rf_kv_shape_of(RF_KV_CODE_R8, width, &s.shape)) {
        return;
    }
    const uint64_t bytes[] = {4 * (uint64_t)width, 2 * (uint64_t)width, 2 * (uint64_t)width,
                              s.shape.row_bytes};
    s.stride = bytes[form];
    s.positions = (uint32_t)(STORE_BYTES / 2 / s.stride / RF_ATTEND_BLOCK * RF_ATTEND_BLOCK);
    for (int side = 0; side < 2; side++) {
        s.side[side] = zeroed(s.positions * s.stride);
        s.scales[side] = zeroed(sizeof(float) * RF_ATTEND_BLOCK * s.shape.span_count);
        for (uint64_t i = 0; i < s.positions * s.stride; i++) { /* small and normal in any form */
            s.side[side][i] = (uint8_t)((i * 2654435761u >> 13) & 0x37);
        }
    }
    float *q = zeroed(sizeof(float) * QUERIES_MAX * width), q_scale[QUERIES_MAX];
    int16_t *codes = zeroed(sizeof(int16_t) * QUERIES_MAX * width);
    float *state = zeroed(sizeof(float) * QUERIES_MAX * 2);
    float *out = zeroed(sizeof(float) * QUERIES_MAX * width);
    for (uint32_t i = 0; i < QUERIES_MAX; i++) {
        s.visible[i] = (rf_attend_range){0, RF_ATTEND_BLOCK};
        for (uint32_t d = 0; d < width; d++) {
            q[i * width + d] = (float)((i * 31 + d * 7) % 13) * 0.1f - 0.6f;
        }
        s.codec.query(q + i * width, width, codes + i * width, &q_scale[i]);
    }
    const rf_attend_rows rows[2] = {{NULL, s.stride, s.scales[0], s.shape.span_count, width, form},
                                    {NULL, s.stride, s.scales[1], s.shape.span_count, width, form}};
    s.job = (rf_attend){.q = q,
                        .q_codes = codes,
                        .q_scale = q_scale,
                        .q_stride = width,
                        .visible = s.visible,
                        .k = rows[0],
                        .v = rows[1],
                        .scale = 0.125f,
                        .state = state,
                        .out = out,
                        .out_stride = width,
                        .scratch = zeroed(rf_attend_scratch_bytes(width, width))};
    printf("%-6s %-4s %5u", rf_cpu_name(s.kernels.attend_entry.cpu), name, width);
    for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
        const double ns = measure(&s, groups[g], s.positions);
        printf("  %6.1f %5.1f", ns, measure(&s, groups[g], 256));
        if (groups[g] == 8) {
            printf("  %5.1f", 2.0 * (double)s.stride / ns);
        }
        fflush(stdout);
    }
    const double ns = measure(&s, QUERIES_MAX, 256);
    printf("  %6.1f\n", 2.0 * width * QUERIES_MAX / ns);
    for (int side = 0; side < 2; side++) {
        free(s.side[side]);
        free(s.scales[side]);
    }
    free(q);
    free(codes);
    free(state);
    free(out);
    free(s.job.scratch);
}

int main(int argc, char **argv)
{
    uint32_t mask = RF_CPU_ALL;
    if (argc > 1 && !rf_cpu_parse(argv[1], &mask)) {
        fprintf(stderr, "attend: unknown instruction set \"%s\"\n", argv[1]);
        return 2;
    }
    const uint32_t width = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 64;
    if (width == 0 || width % 8 != 0 || width > WIDTH_MAX) {
        fprintf(stderr, "attend: width is a multiple of 8, at most %u\n", WIDTH_MAX);
        return 2;
    }
    printf("ns per position and KV head, from memory and from cache, by queries that share it\n"
           "set    rows width  1:mem cache   2:mem cache   3:mem cache   4:mem cache   8:mem cache"
           "  GB/s   64: GMAC/s\n");
    run("f32", RF_ATTEND_F32, mask, width);
    run("f16", RF_ATTEND_F16, mask, width);
    run("bf16", RF_ATTEND_BF16, mask, width);
    run("r8", RF_ATTEND_INT8, mask, width);
    return 0;
}
