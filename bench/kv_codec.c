/* bench/kv_codec.c: the kernels of the rotated KV formats, on one core: ns per row to rotate, to
 * encode (keys with feedback, values with a search), to expand; ns per position to attend, and the
 * GB/s of stored KV that expansion and attention together read.
 *
 *   kv_codec [format|all] [instruction sets] [width]      e.g. kv_codec r4 avx2 64
 *
 * Attention is a decode step's: RF_ATTEND_BLOCK positions at a time are expanded, K and V, and met
 * by 3 queries (one group of heads); the store is larger than a core's cache. Each figure is the
 * best of several slices.
 */
#include "base/base.h"
#include "kernels/kv_codec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROWS      8192u
#define QUERIES   3u
#define WIDTH_MAX 256u

static float gauss(uint64_t *seed)
{
    double sum = -6;
    for (int i = 0; i < 12; i++) {
        *seed = *seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
        sum += (double)(*seed >> 11) * 0x1p-53;
    }
    return (float)sum;
}

typedef struct setup {
    rf_kv_kernels kernels;
    rf_kernels attention;
    rf_kv_shape shape;
    void *scratch; /* of attention */
    rf_kv_feedback feedback;
    float *rows; /* [ROWS][width] */
    uint8_t *signs, *stored;
    int8_t *codes[2];
    float *scales[2];
    int16_t q[QUERIES * WIDTH_MAX];
    float q_scale[QUERIES];
} setup;

typedef enum work {
    ROTATE,
    QUERY,
    ENCODE_KEY,
    ENCODE_VALUE,
    EXPAND,
    ATTEND,
    BOTH,
    WORK_COUNT
} work;

static void attend(const setup *s, uint32_t first, bool expanded)
{
    static float state[2 * QUERIES], out[QUERIES * WIDTH_MAX];
    rf_attend_range visible[QUERIES];
    const bool is_int8 = rf_kv_is_int8(&s->shape);
    const uint32_t width = s->shape.width, spans = s->shape.span_count;
    const uint8_t *rows = s->stored + (size_t)first * s->shape.row_bytes;
    for (uint32_t i = 0; i < QUERIES; i++) {
        visible[i] = (rf_attend_range){0, RF_ATTEND_BLOCK};
    }
    for (int side = 0; !expanded && side < 2; side++) {
        s->kernels.expand(&s->shape, rows, RF_ATTEND_BLOCK, 3, is_int8 ? NULL : s->codes[side],
                          s->scales[side]);
    }
    rf_attend_rows sides[2];
    for (int side = 0; side < 2; side++) {
        sides[side] =
            (rf_attend_rows){s->codes[side], width, s->scales[side], spans, width, RF_ATTEND_INT8};
        if (is_int8) { /* where they lie */
            sides[side].rows = rows;
            sides[side].stride = s->shape.row_bytes;
        }
    }
    const rf_attend job = {.q_codes = s->q,
                           .q_scale = s->q_scale,
                           .q_stride = width,
                           .query_count = QUERIES,
                           .visible = visible,
                           .k = sides[0],
                           .v = sides[1],
                           .scale = 0.125f,
                           .state = state,
                           .out = out,
                           .out_stride = width,
                           .scratch = s->scratch};
    s->attention.attend(&job);
}

/* ns per row (per position of K and V for attention). */
static double measure(setup *s, work what)
{
    const uint32_t width = s->shape.width;
    double best = 1e30;
    float turned[WIDTH_MAX];
    for (uint32_t slice = 0; slice < 200; slice++) {
        const uint32_t count = 128, first = slice * count % ROWS;
        const double start = (double)rf_os_clock_ns();
        for (uint32_t r = first; r < first + count; r++) {
            const float *row = s->rows + (size_t)r * width;
            uint8_t *to = s->stored + (size_t)r * s->shape.row_bytes;
            switch (what) {
            case ROTATE:
                memcpy(turned, row, width * sizeof(float));
                s->kernels.rotate(turned, s->signs, width, s->shape.block);
                break;
            case QUERY:
                s->kernels.query(row, width, s->q, s->q_scale);
                break;
            case ENCODE_KEY:
                s->kernels.encode(&s->shape, row, &s->feedback, 3, to);
                break;
            case ENCODE_VALUE:
                s->kernels.encode(&s->shape, row, NULL, 3, to);
                break;
            case EXPAND:
                if (r % RF_ATTEND_BLOCK == 0) {
                    s->kernels.expand(&s->shape, to, RF_ATTEND_BLOCK, 3, s->codes[0], s->scales[0]);
                }
                break;
            default:
                if (r % RF_ATTEND_BLOCK == 0) {
                    attend(s, r, what == ATTEND);
                }
                break;
            }
        }
        best = fmin(best, ((double)rf_os_clock_ns() - start) / count);
    }
    return best;
}

static void run(rf_kv_code code, uint32_t mask, uint32_t width)
{
    setup s = {0};
    if (!rf_kv_shape_of(code, width, &s.shape)) {
        return;
    }
    const size_t block = s.shape.block, blocks = width / block;
    uint64_t seed = 1;
    rf_kv_kernels_pick(&s.kernels, mask);
    rf_kernels_pick(&s.attention, mask);
    s.scratch = aligned_alloc(64, (rf_attend_scratch_bytes(width, width) + 63) / 64 * 64);
    s.rows = malloc(sizeof(float) * ROWS * width);
    s.signs = malloc((width / 8 + 7) / 8 * 8);
    s.stored = malloc((size_t)ROWS * s.shape.row_bytes);
    for (int side = 0; side < 2; side++) {
        s.codes[side] = malloc(RF_ATTEND_BLOCK * width);
        s.scales[side] = malloc(sizeof(float) * RF_ATTEND_BLOCK * s.shape.span_count);
    }
    for (size_t i = 0; i < (size_t)ROWS * width; i++) {
        s.rows[i] = gauss(&seed);
    }
    rf_kv_signs(1, width, s.signs);
    double *h = malloc(2 * sizeof(double) * block * block);
    float *m = malloc(sizeof(float) * blocks * block * block);
    float *d = malloc(sizeof(float) * blocks * block);
    for (size_t b = 0; b < blocks; b++) {
        memset(h, 0, sizeof(double) * block * block);
        for (size_t k = 0; k < 2 * block; k++) {
            const float *row = s.rows + (b + k * blocks) * block;
            for (size_t i = 0; i < block * block; i++) {
                h[i] += (double)row[i / block] * (double)row[i % block];
            }
        }
        rf_kv_factor(h, (uint32_t)block, 0.1, h + block * block, m + b * block * block,
                     d + b * block);
    }
    s.feedback = (rf_kv_feedback){m, d};
    double ns[WORK_COUNT];
    for (uint32_t i = 0; i < QUERIES; i++) {
        s.kernels.query(s.rows + (size_t)i * width, width, s.q + (size_t)i * width, &s.q_scale[i]);
    }
    for (work what = 0; what < WORK_COUNT; what++) {
        ns[what] = measure(&s, what);
    }
    printf("%-7s %-6s %5u %6.2f %8.1f %8.1f %9.1f %9.1f %8.2f %8.2f %8.2f %8.2f\n",
           rf_cpu_name(s.kernels.entry.cpu), rf_kv_codes[code].name, width,
           8.0 * s.shape.row_bytes / width, ns[ROTATE], ns[QUERY], ns[ENCODE_KEY], ns[ENCODE_VALUE],
           ns[EXPAND], ns[ATTEND], ns[BOTH], 2.0 * s.shape.row_bytes / ns[BOTH]);
    free(h);
    free(m);
    free(d);
    free(s.rows);
    free(s.signs);
    free(s.stored);
    free(s.scratch);
    for (int side = 0; side < 2; side++) {
        free(s.codes[side]);
        free(s.scales[side]);
    }
}

int main(int argc, char **argv)
{
    const char *format = argc > 1 ? argv[1] : "all";
    uint32_t mask = RF_CPU_ALL;
    if (argc > 2 && !rf_cpu_parse(argv[2], &mask)) {
        fprintf(stderr, "kv_codec: unknown instruction set \"%s\"\n", argv[2]);
        return 2;
    }
    const uint32_t width = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 64;
    if (width > WIDTH_MAX) {
        fprintf(stderr, "kv_codec: width at most %u\n", WIDTH_MAX);
        return 2;
    }
    printf("ns per row; attention with %u queries per position of K and V\n", QUERIES);
    printf("set     format width   bits   rotate    query    enc. K    enc. V   expand   attend "
           "exp.+att.     GB/s\n");
    for (rf_kv_code code = 0; code < RF_KV_CODE_COUNT; code++) {
        if (strcmp(format, "all") == 0 || strcmp(format, rf_kv_codes[code].name) == 0) {
            run(code, mask, width);
        }
    }
    return 0;
}
