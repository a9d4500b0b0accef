/* tests/unit/test_kv_share.c: what slots and layers can have of each other: copies, prefixes, rows
 * of an earlier layer. Everything through the public header, against a slot that was fed by itself.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>

#include <ringfence/kv.h>

enum { LAYERS = 3, HEADS = 4, KV_HEADS = 2, WIDTH = 64, CHUNK = 8, CAPACITY = 256, SLOTS = 4 };

static const char *const formats[] = {"f32", "f16", "r8", "r6", "r4", "q8_0", "turbo4q"};

static rf_kv *open_store(const char *format, bool shares, rf_error *err)
{
    rf_kv_layer layers[LAYERS];
    rf_kv_config config;
    rf_kv *kv = NULL;
    for (uint32_t i = 0; i < LAYERS; i++)
        layers[i] = (rf_kv_layer){.kv_heads = KV_HEADS,
                                  .k_width = WIDTH,
                                  .v_width = WIDTH,
                                  .k_format = format,
                                  .v_format = format};
    layers[2].shared = shares ? 1 : 0;
    rf_kv_config_init(&config);
    config.layers = layers;
    config.layer_count = LAYERS;
    config.slots = SLOTS;
    config.capacity = CAPACITY;
    config.chunk = CHUNK;
    return rf_kv_open(NULL, &config, &kv, err) ? NULL : kv;
}

/* Rows that depend on layer and position alone (and on a variant, behind a prefix). */
static float value_at(uint32_t layer, uint64_t position, uint32_t i, uint32_t variant)
{
    double x = (double)position * 1.7 + i * 0.37 + layer * 11.0 + variant * 5.0;
    return (float)(sin(x) + 0.3 * cos(x * 3.1));
}

static void append(rf_kv *kv, uint32_t slot, uint32_t count, uint32_t variant, bool shares)
{
    static float keys[CHUNK * KV_HEADS * WIDTH], values[CHUNK * KV_HEADS * WIDTH];
    const uint32_t row = KV_HEADS * WIDTH;
    uint64_t from = rf_kv_length(kv, slot);
    for (uint32_t layer = 0; layer < (shares ? 2u : LAYERS); layer++) {
        for (uint32_t t = 0; t < count; t++) {
            for (uint32_t i = 0; i < row; i++) {
                keys[t * row + i] = value_at(layer, from + t, i, variant);
                values[t * row + i] = value_at(layer + 50, from + t, i, variant);
            }
        }
        assert_int_equal(rf_kv_append(kv, slot, layer, keys, row, values, row, count, NULL), RF_OK);
    }
    assert_int_equal(rf_kv_commit(kv, slot, NULL), RF_OK);
}

static void fill(rf_kv *kv, uint32_t slot, uint64_t length, uint32_t variant, bool shares)
{
    while (rf_kv_length(kv, slot) < length) {
        uint64_t left = length - rf_kv_length(kv, slot);
        append(kv, slot, left < CHUNK ? (uint32_t)left : CHUNK, variant, shares);
    }
}

static void attend(rf_kv *kv, uint32_t slot, uint32_t layer, float out[HEADS * WIDTH])
{
    static float q[HEADS * WIDTH];
    for (uint32_t i = 0; i < HEADS * WIDTH; i++)
        q[i] = value_at(layer + 90, 3, i, 0);
    rf_kv_queries queries = {.q = q,
                             .stride = HEADS * WIDTH,
                             .heads = HEADS,
                             .count = 1,
                             .first_position = rf_kv_length(kv, slot) - 1,
                             .scale = 0.125f};
    assert_int_equal(rf_kv_attention(kv, slot, layer, &queries, out, HEADS * WIDTH, NULL), RF_OK);
}

static void assert_same(rf_kv *kv, uint32_t a, uint32_t b)
{
    float x[HEADS * WIDTH], y[HEADS * WIDTH];
    assert_true(rf_kv_length(kv, a) == rf_kv_length(kv, b));
    for (uint32_t layer = 0; layer < 2; layer++) {
        attend(kv, a, layer, x);
        attend(kv, b, layer, y);
        assert_memory_equal(x, y, sizeof x);
    }
}

static void a_copy_and_a_prefix_go_on_as_a_slot_that_was_fed_by_itself(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        rf_kv *kv = open_store(formats[f], false, NULL);
        assert_non_null(kv);
        fill(kv, 0, 100, 0, false);
        assert_int_equal(rf_kv_copy_slot(kv, 0, 1, NULL), RF_OK);
        assert_int_equal(rf_kv_share_prefix(kv, 0, 2, 100, NULL), RF_OK);
        assert_same(kv, 0, 1);
        assert_same(kv, 0, 2);
        fill(kv, 0, 150, 1, false); /* the owner goes another way */
        fill(kv, 1, 170, 2, false);
        fill(kv, 2, 170, 2, false);
        assert_same(kv, 1, 2);
        fill(kv, 3, 100, 0, false);
        fill(kv, 3, 170, 2, false);
        assert_same(kv, 2, 3);
        rf_kv_close(kv);
    }
}

static void a_prefix_keeps_its_owner_from_forgetting_it(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_kv_run runs[RF_KV_RUNS_MAX];
    rf_kv *kv = open_store("f32", false, NULL);
    fill(kv, 0, 60, 0, false);
    assert_int_equal(rf_kv_share_prefix(kv, 0, 1, 50, NULL), RF_OK);
    assert_int_equal(rf_kv_share_prefix(kv, 1, 2, 40, NULL), RF_OK); /* all of it is slot 0's */
    assert_int_equal(rf_kv_holders(kv, 0), 2);
    assert_int_equal(rf_kv_holders(kv, 1), 0);
    fill(kv, 1, 58, 1, false);
    uint32_t count = rf_kv_window(kv, 1, 0, 1, RF_KV_K, 10, 58, runs);
    assert_int_equal(count, 2);
    assert_true(runs[0].first_position == 10 && runs[0].count == 40);
    assert_true(runs[1].first_position == 50 && runs[1].count == 8);
    assert_int_equal(rf_kv_truncate(kv, 0, 49, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "2 other slots"));
    assert_int_equal(rf_kv_truncate(kv, 0, 50, NULL), RF_OK);
    assert_int_equal(rf_kv_clear(kv, 1, NULL), RF_OK);
    assert_int_equal(rf_kv_clear(kv, 2, NULL), RF_OK);
    assert_int_equal(rf_kv_holders(kv, 0), 0);
    assert_int_equal(rf_kv_clear(kv, 0, NULL), RF_OK);
    rf_kv_close(kv);
}

static void what_cannot_be_shared_is_refused(void **state)
{
    (void)state;
    rf_error err = {0};
    rf_kv *kv = open_store("r4", false, NULL);
    fill(kv, 0, 200, 0, false);
    fill(kv, 1, 8, 0, false);
    assert_int_equal(rf_kv_share_prefix(kv, 0, 1, 100, &err), RF_ERR_USAGE); /* not empty */
    assert_int_equal(rf_kv_share_prefix(kv, 0, 0, 100, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_share_prefix(kv, 0, 9, 100, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_share_prefix(kv, 0, 2, 201, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_share_prefix(kv, 0, 2, 0, &err), RF_ERR_USAGE);
    /* What position 50 would read as r8 was overwritten long ago. */
    assert_int_equal(rf_kv_share_prefix(kv, 0, 2, 50, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "overwritten"));
    assert_int_equal(rf_kv_length(kv, 2), 0);
    rf_kv_close(kv);
}

static void a_shared_layer_reads_an_earlier_one_and_keeps_nothing(void **state)
{
    (void)state;
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        rf_error err = {0};
        rf_kv *own = open_store(formats[f], false, NULL), *kv = open_store(formats[f], true, &err);
        float x[HEADS * WIDTH], y[HEADS * WIDTH], z[HEADS * WIDTH];
        assert_non_null(kv);
        assert_true(rf_kv_preallocated_bytes(kv) * 3 == rf_kv_preallocated_bytes(own) * 2);
        fill(kv, 0, 90, 0, true);
        attend(kv, 0, 0, x); /* the same query: value_at takes the layer that is named */
        rf_kv_queries queries = {.q = x,
                                 .stride = HEADS * WIDTH,
                                 .heads = HEADS,
                                 .count = 1,
                                 .first_position = 89,
                                 .scale = 0.125f};
        assert_int_equal(rf_kv_attention(kv, 0, 0, &queries, y, HEADS * WIDTH, NULL), RF_OK);
        assert_int_equal(rf_kv_attention(kv, 0, 2, &queries, z, HEADS * WIDTH, NULL), RF_OK);
        assert_memory_equal(y, z, sizeof y);
        assert_int_equal(rf_kv_attention(kv, 0, 1, &queries, z, HEADS * WIDTH, NULL), RF_OK);
        assert_memory_not_equal(y, z, sizeof y); /* that one has rows of its own */
        assert_int_equal(rf_kv_append(kv, 0, 2, x, 1, x, 1, 1, &err), RF_ERR_USAGE);
        rf_kv_close(kv);
        rf_kv_close(own);
    }
}

static void a_layer_cannot_share_what_is_not_there(void **state)
{
    (void)state;
    rf_kv_layer layers[2] = {{KV_HEADS, WIDTH, WIDTH, 0, "f16", "f16", 0},
                             {KV_HEADS, WIDTH, WIDTH, 0, "f16", "f16", 2}};
    rf_kv_config config;
    rf_kv *kv = NULL;
    rf_error err = {0};
    rf_kv_config_init(&config);
    config.layers = layers;
    config.layer_count = 2;
    config.capacity = 16;
    config.chunk = 4;
    assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), RF_ERR_USAGE); /* itself */
    assert_string_equal(err.where, "kv.layers[1].shared");
    layers[1].shared = 1;
    layers[1].k_width = 32;
    assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), RF_ERR_USAGE); /* another geometry */
    assert_string_equal(err.where, "kv.layers[1].shared");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_copy_and_a_prefix_go_on_as_a_slot_that_was_fed_by_itself),
        cmocka_unit_test(a_prefix_keeps_its_owner_from_forgetting_it),
        cmocka_unit_test(what_cannot_be_shared_is_refused),
        cmocka_unit_test(a_shared_layer_reads_an_earlier_one_and_keeps_nothing),
        cmocka_unit_test(a_layer_cannot_share_what_is_not_there),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
