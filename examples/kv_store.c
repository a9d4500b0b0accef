/* examples/kv_store.c: the KV store in another engine: two headers, no model.
 *
 * Plans a store of four layers, takes exactly that, appends keys and values, attends, shares the
 * prefix with a second slot, and shows that what was planned is what was freed.
 */
#include <ringfence/kv.h>
#include <ringfence/memory.h>

#include <math.h>
#include <stdio.h>

enum { LAYERS = 4, HEADS = 8, KV_HEADS = 2, WIDTH = 64, CHUNK = 16, CAPACITY = 512 };

static int failed(const rf_error *err)
{
    fprintf(stderr, "kv_store: %s: %s (expected %s, got %s)\n", err->where, err->what,
            err->expected, err->got);
    return 1;
}

static void fill(float *rows, int count, int seed)
{
    for (int i = 0; i < count; i++)
        rows[i] = sinf((float)(i * 7 + seed) * 0.37f);
}

/* Appends a chunk to every layer, as an engine does in the middle of each layer, and commits. */
static rf_status append_chunk(rf_kv *kv, uint32_t slot, int seed, rf_error *err)
{
    static float keys[CHUNK * KV_HEADS * WIDTH], values[CHUNK * KV_HEADS * WIDTH];
    const uint64_t stride = KV_HEADS * WIDTH;
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        fill(keys, CHUNK * KV_HEADS * WIDTH, seed + (int)layer);
        fill(values, CHUNK * KV_HEADS * WIDTH, seed - (int)layer);
        rf_status status = rf_kv_append(kv, slot, layer, keys, stride, values, stride, CHUNK, err);
        if (status)
            return status;
    }
    return rf_kv_commit(kv, slot, err);
}

int main(void)
{
    static rf_plan_row rows[64];
    static float q[HEADS * WIDTH], out[HEADS * WIDTH];
    rf_error err = {0};
    rf_plan plan;
    rf_scope model = {0};
    rf_kv *kv = NULL;
    rf_kv_layer layers[LAYERS];
    rf_kv_config config;
    rf_trace totals;

    for (int i = 0; i < LAYERS; i++)
        layers[i] = (rf_kv_layer){.kv_heads = KV_HEADS,
                                  .k_width = WIDTH,
                                  .v_width = WIDTH,
                                  .k_format = "r6",
                                  .v_format = "r4"};
    rf_kv_config_init(&config);
    config.layers = layers;
    config.layer_count = LAYERS;
    config.slots = 2;
    config.capacity = CAPACITY;
    config.chunk = CHUNK;

    rf_plan_init(&plan, rows, 64);
    if (rf_kv_plan(&plan, &config, &err) || rf_trace_plan(&plan, 256, &err) ||
        rf_plan_layout(&plan, 0, &err) ||
        rf_scope_open(&model, &plan, RF_SCOPE_MODEL, NULL, false, &err))
        return failed(&err);
    int result = 1;
    if (rf_kv_open(&model, &config, &kv, &err) || rf_scope_seal(&model, &err))
        goto done;
    for (int chunk = 0; chunk < 8; chunk++) {
        if (append_chunk(kv, 0, chunk, &err))
            goto done;
    }
    if (rf_kv_share_prefix(kv, 0, 1, 128, &err) || append_chunk(kv, 1, 99, &err))
        goto done;
    fill(q, HEADS * WIDTH, 5);
    rf_kv_queries queries = {.q = q,
                             .stride = HEADS * WIDTH,
                             .heads = HEADS,
                             .count = 1,
                             .first_position = 143,
                             .scale = 1.0f / sqrtf((float)WIDTH)};
    if (rf_kv_attention(kv, 1, 0, &queries, out, HEADS * WIDTH, &err))
        goto done;
    rf_kv_report report;
    rf_kv_describe(kv, 0, &report);
    printf("planned %llu bytes of keys and values, %.3f bits a value in the ring\n",
           (unsigned long long)plan.pool_bytes[RF_POOL_KV], report.bits_per_value);
    printf("slot 0 has %llu positions, held by %u; slot 1 has %llu\n",
           (unsigned long long)report.length, report.holders,
           (unsigned long long)rf_kv_length(kv, 1));
    printf("the first elements of the attention: %.4f %.4f %.4f\n", (double)out[0], (double)out[1],
           (double)out[2]);
    result = 0;
done:
    rf_scope_close(&model, &totals);
    if (result)
        return failed(&err);
    printf("taken %llu bytes at most, freed %llu\n",
           (unsigned long long)totals.peak_bytes[RF_SCOPE_MODEL],
           (unsigned long long)totals.freed_bytes[RF_SCOPE_MODEL]);
    return 0;
}
