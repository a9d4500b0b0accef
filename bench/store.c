/* bench/store.c: a decode step's attention through the KV store, on one core and from memory.
 *
 *   store [format] [steps]      e.g. store r8 40
 *
 * The geometry of a 1.1B model (22 layers, 4 KV heads of width 64 that 8 heads share) with 4,096
 * random positions: every step reads the whole ring, which no cache holds. Shown are ns for each
 * position of a KV head, best and mean of the steps, and of one layer again and again, whose rows
 * stay in a cache.
 */
#include "base/base.h"

#include <ringfence/kv.h>
#include <ringfence/memory.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { LAYERS = 22, HEADS = 32, KV_HEADS = 4, WIDTH = 64, CHUNK = 512, POSITIONS = 4096 };

static int failed(const rf_error *err)
{
    fprintf(stderr, "store: %s: %s (expected %s, got %s)\n", err->where, err->what, err->expected,
            err->got);
    return 1;
}

static void fill(float *rows, int count)
{
    static uint64_t seed = 1;
    for (int i = 0; i < count; i++) {
        float sum = -2;
        for (int n = 0; n < 4; n++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            sum += (float)(seed >> 40) * 0x1p-24f;
        }
        rows[i] = sum * 1.7f;
    }
}

static rf_status fill_store(rf_kv *kv, rf_error *err)
{
    static float keys[CHUNK * KV_HEADS * WIDTH], values[CHUNK * KV_HEADS * WIDTH];
    const uint64_t stride = KV_HEADS * WIDTH;
    for (int at = 0; at < POSITIONS; at += CHUNK) {
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            fill(keys, CHUNK * KV_HEADS * WIDTH);
            fill(values, CHUNK * KV_HEADS * WIDTH);
            rf_status status = rf_kv_append(kv, 0, layer, keys, stride, values, stride, CHUNK, err);
            if (status)
                return status;
        }
        rf_status status = rf_kv_commit(kv, 0, err);
        if (status)
            return status;
    }
    return RF_OK;
}

/* ns per position of a KV head: best and mean of `steps`; layer 0 alone where `one` is true. */
static rf_status measure(rf_kv *kv, int steps, bool one, double result[2], rf_error *err)
{
    static float q[HEADS * WIDTH], out[HEADS * WIDTH];
    const rf_kv_queries queries = {.q = q,
                                   .stride = HEADS * WIDTH,
                                   .heads = HEADS,
                                   .count = 1,
                                   .first_position = POSITIONS - 1,
                                   .scale = 1.0f / sqrtf((float)WIDTH)};
    const double positions = (double)POSITIONS * KV_HEADS * LAYERS;
    double best = INFINITY, sum = 0;
    fill(q, HEADS * WIDTH);
    for (int i = 0; i < steps; i++) {
        const double start = (double)rf_os_clock_ns();
        for (uint32_t layer = 0; layer < LAYERS; layer++) {
            rf_status status =
                rf_kv_attention(kv, 0, one ? 0 : layer, &queries, out, HEADS * WIDTH, err);
            if (status)
                return status;
        }
        const double ns = ((double)rf_os_clock_ns() - start) / positions;
        best = fmin(best, ns);
        sum += ns;
    }
    result[0] = best;
    result[1] = sum / steps;
    return RF_OK;
}

int main(int argc, char **argv)
{
    static rf_plan_row rows[256];
    const char *format = argc > 1 ? argv[1] : "r8";
    const int steps = argc > 2 ? (int)strtol(argv[2], NULL, 10) : 40;
    rf_error err = {0};
    rf_plan plan;
    rf_scope model = {0};
    rf_kv *kv = NULL;
    rf_kv_layer layers[LAYERS];
    rf_kv_config config;
    rf_trace totals;
    double memory[2], cache[2];

    if (steps < 1) {
        fprintf(stderr, "store: steps are at least 1\n");
        return 2;
    }
    for (int i = 0; i < LAYERS; i++)
        layers[i] = (rf_kv_layer){.kv_heads = KV_HEADS,
                                  .k_width = WIDTH,
                                  .v_width = WIDTH,
                                  .k_format = format,
                                  .v_format = format};
    rf_kv_config_init(&config);
    config.layers = layers;
    config.layer_count = LAYERS;
    config.slots = 1;
    config.capacity = POSITIONS + CHUNK;
    config.chunk = CHUNK;
    rf_plan_init(&plan, rows, 256);
    if (rf_kv_plan(&plan, &config, &err) || rf_trace_plan(&plan, 256, &err) ||
        rf_plan_layout(&plan, 0, &err) ||
        rf_scope_open(&model, &plan, RF_SCOPE_MODEL, NULL, false, &err))
        return failed(&err);
    const bool ok = !rf_kv_open(&model, &config, &kv, &err) && !rf_scope_seal(&model, &err) &&
                    !fill_store(kv, &err) && !measure(kv, steps, false, memory, &err) &&
                    !measure(kv, steps, true, cache, &err);
    rf_scope_close(&model, &totals);
    if (!ok)
        return failed(&err);
    printf("%s: from memory %.1f ns a position (mean %.1f), from a cache %.1f (mean %.1f)\n",
           format, memory[0], memory[1], cache[0], cache[1]);
    return 0;
}
