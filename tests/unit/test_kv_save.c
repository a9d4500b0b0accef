/* tests/unit/test_kv_save.c: a slot of the store as bytes: it goes on with the bits of one that was
 * never taken out, in every format, in a ring that wrapped, and in another ring where that can be;
 * a store of another make refuses it, and bytes that lie do no harm.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv/kv.h"
#include "slot_bytes.h"

/* ---- the store alone ----------------------------------------------------------------------- */

#define WIDTH 32u
#define HEADS 4u /* query heads; 2 and 1 KV heads */
#define ROPE  (WIDTH / 2)

static double frequencies[ROPE];
static double other_frequencies[ROPE];

typedef struct store {
    rf_kv_layer layers[4];
    rf_kv_config config;
    rf_kv *kv;
} store;

static store open_store(const char *k, const char *v, uint64_t capacity, uint32_t chunk,
                        uint32_t sinks, bool endless, bool calibrated)
{
    store s = {.layers = {{2, WIDTH, WIDTH, 0, k, v},
                          {0, 0, 0, 0, NULL, NULL},
                          {1, WIDTH, WIDTH, 40, k, v},
                          {2, WIDTH, WIDTH, 0, v, k}}};
    rf_error err = {0};
    for (uint32_t i = 0; i < ROPE; i++) {
        frequencies[i] = 1.0 / (1.0 + 3.0 * i * i);
        other_frequencies[i] = frequencies[i] * 1.01;
    }
    rf_kv_config_init(&s.config);
    s.config.layer_count = RF_ARRAY_COUNT(s.layers);
    s.config.slots = 2;
    s.config.capacity = capacity;
    s.config.chunk = chunk;
    s.config.sinks = sinks;
    s.config.endless = endless;
    s.config.rope = (rf_kv_rope){frequencies, WIDTH, false};
    s.config.calibrated = calibrated;
    s.config.layers = s.layers;
    must(rf_kv_open(NULL, &s.config, &s.kv, &err), &err);
    return s;
}

static void calibrate(store *s, uint64_t seed)
{
    static float mean[WIDTH], moment[WIDTH * WIDTH];
    rf_error err = {0};
    for (uint32_t i = 0; i < WIDTH; i++) {
        mean[i] = (float)(mix(seed + i) % 1000) / 500.0f;
        for (uint32_t j = 0; j < WIDTH; j++)
            moment[i * WIDTH + j] = i == j ? 1.0f + (float)(i % 5) : 0.1f;
    }
    for (uint32_t layer = 0; layer < s->config.layer_count; layer++) {
        for (uint32_t head = 0; head < s->layers[layer].kv_heads; head++) {
            rf_kv_statistics statistics = {mean, moment, 3, 2};
            must(rf_kv_set_calibration(s->kv, layer, head, &statistics, &err), &err);
        }
    }
}

/* Rows of positions [at, at + count) of a sequence that nobody wrote. */
static void fill_rows(float *rows, uint64_t kind, uint64_t at, uint32_t count, uint32_t heads)
{
    for (uint32_t i = 0; i < count * heads * WIDTH; i++) {
        uint64_t z = mix(kind * 1000003u + at * heads * WIDTH + i);
        rows[i] = (float)((int64_t)(z >> 40) - (1 << 23)) / (1 << 21);
    }
}

/* Appends positions up to `to` in pieces, and lets each attend. Returns a sum over what they got
 * that does not depend on the pieces. */
static uint64_t go_on(store *s, uint32_t slot, uint64_t to, uint32_t piece)
{
    static float k[64 * 2 * WIDTH], v[64 * 2 * WIDTH], q[64 * HEADS * WIDTH];
    static float q_sink[64 * HEADS * WIDTH], out[64 * HEADS * WIDTH];
    void *scratch = aligned_alloc(64, (rf_kv_scratch_bytes(WIDTH, WIDTH, 4) + 63) / 64 * 64);
    rf_error err = {0};
    uint64_t sum = 0;
    assert_true(piece <= 64);
    while (rf_kv_length(s->kv, slot) < to) {
        uint64_t at = rf_kv_length(s->kv, slot);
        uint32_t count = (uint32_t)RF_MIN(to - at, (uint64_t)piece);
        for (uint32_t layer = 0; layer < s->config.layer_count; layer++) {
            uint32_t heads = s->layers[layer].kv_heads;
            if (heads == 0)
                continue;
            fill_rows(k, layer * 4 + 1, at, count, heads);
            fill_rows(v, layer * 4 + 2, at, count, heads);
            fill_rows(q, layer * 4 + 3, at, count, HEADS);
            fill_rows(q_sink, layer * 4 + 4, at, count, HEADS);
            must(rf_kv_append(s->kv, slot, layer, k, heads * WIDTH, v, heads * WIDTH, count, &err),
                 &err);
            rf_kv_attend job = {.slot = slot,
                                .layer = layer,
                                .heads = HEADS,
                                .first_position = at,
                                .token_count = count,
                                .q = q,
                                .q_sink = s->config.sinks ? q_sink : NULL,
                                .q_stride = HEADS * WIDTH,
                                .out = out,
                                .out_stride = HEADS * WIDTH,
                                .scale = 0.2f};
            rf_kv_attend_run(s->kv, &job, 0, rf_kv_attend_units(s->kv, &job), scratch);
            for (uint32_t i = 0; i < count * HEADS * WIDTH; i++) {
                uint32_t bits;
                memcpy(&bits, &out[i], sizeof bits);
                sum += mix(mix(bits) + (at * HEADS * WIDTH + i) * 8 + layer);
            }
        }
        must(rf_kv_commit(s->kv, slot, &err), &err);
    }
    free(scratch);
    return sum;
}

static char format_names[256];
static const char *formats[32]; /* all that the store knows */
static size_t format_count;

static int list_formats(void **state)
{
    (void)state;
    rf_print(format_names, sizeof format_names, "%s", rf_kv_format_names());
    for (char *at = format_names; at; format_count++) {
        assert_true(format_count < RF_ARRAY_COUNT(formats));
        formats[format_count] = at;
        if ((at = strchr(at, ' ')))
            *at++ = '\0';
    }
    return format_count >= 10 ? 0 : -1;
}

static void a_store_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const uint64_t depths[] = {0, 128, 1, 3, 31, 32, 100, 127, 129, 200, 255};
    rf_error err = {0};
    for (size_t f = 0; f < format_count; f++) {
        for (int mode = 0; mode < 8; mode++) {
            bool endless = mode & 1, calibrated = (mode & 2) && rf_kv_format_calibrates(formats[f]);
            uint32_t sinks = mode & 4 ? 5 : 0;
            const char *v = formats[(f + 3) % format_count];
            store a = open_store(formats[f], v, 263, 13, sinks, endless, calibrated);
            store b = open_store(formats[f], v, 263, 13, sinks, endless, calibrated);
            for (size_t d = (f + (size_t)mode) % 6; d < RF_ARRAY_COUNT(depths); d += 6) {
                uint64_t depth = depths[d] + (endless && d > 4 ? 3 * 263 : 0);
                uint64_t to = endless ? depth + 150 : 263;
                must(rf_kv_clear(a.kv, 0, &err), &err);
                must(rf_kv_clear(b.kv, 0, &err), &err);
                go_on(&a, 0, depth, 13);
                go_on(&b, 0, 77, 13);
                go_on(&b, 1, 240, 13); /* what was there is gone */
                blob saved = kv_blob(a.kv, 0);
                must(rf_kv_restore(b.kv, 1, "b", saved.data, saved.size, &err), &err);
                assert_int_equal(rf_kv_length(b.kv, 1), depth);
                blob again = kv_blob(b.kv, 1);
                assert_int_equal(again.size, saved.size);
                assert_memory_equal(again.data, saved.data, saved.size);
                if (go_on(&a, 0, to, 13) != go_on(&b, 1, to, 13))
                    fail_msg("%s/%s mode %d depth %u", formats[f], v, mode, (unsigned)depth);
                must(rf_kv_clear(a.kv, 0, &err), &err);
                go_on(&a, 0, 77, 13);
                assert_int_equal(go_on(&b, 0, 110, 13), go_on(&a, 0, 110, 13)); /* the other slot */
                must(rf_kv_clear(b.kv, 1, &err), &err);
                free(saved.data);
                free(again.data);
            }
            rf_kv_close(a.kv);
            rf_kv_close(b.kv);
        }
    }
}

static void what_can_be_taken_back_after_a_restore_is_what_could_be_before(void **state)
{
    (void)state;
    rf_error err = {0};
    for (size_t f = 0; f < format_count; f++) {
        store a = open_store(formats[f], "r4", 263, 13, 5, true, false);
        store b = open_store(formats[f], "r4", 263, 13, 5, true, false);
        go_on(&a, 0, 800, 13);
        must(rf_kv_truncate(a.kv, 0, 795, &err), &err);
        blob saved = kv_blob(a.kv, 0);
        must(rf_kv_restore(b.kv, 0, "b", saved.data, saved.size, &err), &err);
        uint64_t least = 795;
        while (least > 700) {
            rf_status here = rf_kv_truncate(a.kv, 0, least - 1, NULL);
            assert_int_equal(rf_kv_truncate(b.kv, 0, least - 1, NULL), here);
            if (here)
                break;
            least--;
        }
        assert_true(least < 795 && least > 700);
        assert_int_equal(go_on(&a, 0, 900, 13), go_on(&b, 0, 900, 13));
        free(saved.data);
        rf_kv_close(a.kv);
        rf_kv_close(b.kv);
    }
}

static void another_ring_takes_up_a_slot_that_has_seen_all(void **state)
{
    (void)state;
    static const struct {
        uint64_t capacity;
        uint32_t chunk;
        bool endless;
    } rings[] = {{263, 13, false}, {200, 13, false}, {1000, 13, false}, {263, 1, false},
                 {500, 13, false}, {263, 13, true},  {230, 17, true}};
    rf_error err = {0};
    for (size_t f = 0; f < format_count; f++) {
        for (size_t r = 0; r < RF_ARRAY_COUNT(rings); r++) {
            uint64_t depth = 150 + 25 * (f % 3);
            uint32_t piece = RF_MIN(rings[r].chunk, 7u);
            store a = open_store(formats[f], "r3", 263, 13, 5, r % 2, false);
            store b = open_store(formats[f], "r3", rings[r].capacity, rings[r].chunk, 5,
                                 rings[r].endless, false);
            go_on(&a, 0, depth, 13);
            blob saved = kv_blob(a.kv, 0);
            must(rf_kv_restore(b.kv, 1, "b", saved.data, saved.size, &err), &err);
            if (go_on(&a, 0, 200, 13) != go_on(&b, 1, 200, piece))
                fail_msg("%s into ring %u", formats[f], (unsigned)r);
            free(saved.data);
            rf_kv_close(a.kv);
            rf_kv_close(b.kv);
        }
    }
}

/* A slot of a, which has 700 positions or 200, is refused by b with a message that has this. */
static void refuse(store *a, store *b, const char *what, const char *expected, const char *got)
{
    rf_error err = {0};
    blob saved = kv_blob(a->kv, 0);
    go_on(b, 0, 60, 1);
    blob before = kv_blob(b->kv, 0);
    rf_status status = rf_kv_restore(b->kv, 0, "file", saved.data, saved.size, &err);
    if (status != RF_ERR_USAGE || !strstr(err.what, what) || !strstr(err.expected, expected) ||
        !strstr(err.got, got))
        fail_msg("wanted %s: got %d, %s (expected %s, got %s)", what, status, err.what,
                 err.expected, err.got);
    blob after = kv_blob(b->kv, 0);
    assert_int_equal(before.size, after.size);
    assert_memory_equal(before.data, after.data, after.size);
    free(saved.data);
    free(before.data);
    free(after.data);
    rf_kv_close(b->kv);
}

static store reopen(const store *like, rf_kv_config config, const char *k, const char *v)
{
    store s = *like;
    rf_error err = {0};
    for (uint32_t i = 0; i < config.layer_count; i++) {
        s.layers[i].k_format = i == 3 ? v : k;
        s.layers[i].v_format = i == 3 ? k : v;
    }
    s.config = config;
    s.config.layers = s.layers;
    must(rf_kv_open(NULL, &s.config, &s.kv, &err), &err);
    return s;
}

static void a_store_of_another_make_refuses_the_slot(void **state)
{
    (void)state;
    store a = open_store("r4", "r4", 263, 13, 5, true, false), b;
    go_on(&a, 0, 700, 13);
    refuse(&a, (b = open_store("r4", "r4", 263, 13, 5, false, false), &b), "wrapped", "", "");
    refuse(&a, (b = open_store("r4", "r4", 264, 13, 5, true, false), &b), "capacity", "264", "263");
    refuse(&a, (b = open_store("r4", "r4", 263, 12, 5, true, false), &b), "chunk", "12", "13");
    rf_kv_close(a.kv);

    a = open_store("r4", "r6", 263, 13, 5, false, false);
    go_on(&a, 0, 200, 13);
    refuse(&a, (b = open_store("r4", "r6", 199, 13, 5, false, false), &b), "positions", "199",
           "200");
    refuse(&a, (b = open_store("r4", "r6", 211, 13, 5, true, false), &b), "positions", "199",
           "200");
    refuse(&a, (b = open_store("r4", "r6", 263, 13, 4, false, false), &b), "sinks", "4", "5");
    refuse(&a, (b = open_store("r5", "r6", 263, 13, 5, false, false), &b), "key format of layer 0",
           "r5", "r4");
    refuse(&a, (b = open_store("r4", "f16", 263, 13, 5, false, false), &b),
           "value format of layer 0", "f16", "r6");
    refuse(&a, (b = open_store("r4", "r6", 263, 13, 5, false, true), calibrate(&b, 1), &b),
           "statistics", "", "");
    rf_kv_config config = a.config;
    config.seed = 2;
    refuse(&a, (b = reopen(&a, config, "r4", "r6"), &b), "signs", "", "");
    config = a.config;
    config.recent_blocks = 1;
    refuse(&a, (b = reopen(&a, config, "r4", "r6"), &b), "recent blocks", "1", "2");
    config = a.config;
    config.rope.frequencies = other_frequencies;
    refuse(&a, (b = reopen(&a, config, "r4", "r6"), &b), "RoPE", "", "");
    config.rope.dims = WIDTH / 2;
    refuse(&a, (b = reopen(&a, config, "r4", "r6"), &b), "dimensions of RoPE", "16", "32");
    config = a.config;
    config.layer_count = 3;
    refuse(&a, (b = reopen(&a, config, "r4", "r6"), &b), "number of layers", "3", "4");
    store other = a;
    other.layers[2].window = 41;
    refuse(&a, (b = reopen(&other, a.config, "r4", "r6"), &b), "window of layer 2", "41", "40");
    other.layers[2] = a.layers[2];
    other.layers[1].kv_heads = 0;
    other.layers[2].kv_heads = 2;
    refuse(&a, (b = reopen(&other, a.config, "r4", "r6"), &b), "KV heads of layer 2", "2", "1");
    rf_kv_close(a.kv);

    a = open_store("r4", "r4", 263, 13, 5, false, true);
    calibrate(&a, 1);
    go_on(&a, 0, 200, 13);
    refuse(&a, (b = open_store("r4", "r4", 263, 13, 5, false, true), calibrate(&b, 2), &b),
           "calibration", "", "");
    rf_kv_close(a.kv);
}

/* With a larger chunk a window's ring has more rows than were saved: no rows are made up. */
static void a_larger_chunk_is_taken_only_where_the_rows_suffice(void **state)
{
    (void)state;
    rf_error err = {0};
    store a = open_store("f16", "f32", 263, 13, 5, false, false);
    store b = open_store("f16", "f32", 500, 40, 5, false, false), c;
    go_on(&a, 0, 200, 13);
    blob saved = kv_blob(a.kv, 0);
    must(rf_kv_restore(b.kv, 0, "b", saved.data, saved.size, &err), &err);
    rf_kv_run runs[RF_KV_RUNS_MAX];
    assert_int_equal(rf_kv_window(b.kv, 0, 2, 0, RF_KV_K, 146, 200, runs), 0);
    assert_true(rf_kv_window(b.kv, 0, 2, 0, RF_KV_K, 147, 200, runs) > 0);
    assert_int_equal(go_on(&a, 0, 263, 13), go_on(&b, 0, 263, 13));
    free(saved.data);
    rf_kv_close(a.kv);
    rf_kv_close(b.kv);
    a = open_store("r4", "r4", 263, 13, 5, false, false);
    go_on(&a, 0, 200, 13);
    refuse(&a, (c = open_store("r4", "r4", 263, 40, 5, false, false), &c), "layer 2 would need",
           "at most 13", "40");
    rf_kv_close(a.kv);
}

static void a_slot_that_others_read_is_not_replaced(void **state)
{
    (void)state;
    rf_error err = {0};
    store a = open_store("f16", "r4", 263, 13, 0, false, false);
    go_on(&a, 0, 100, 13);
    must(rf_kv_share_prefix(a.kv, 0, 1, 95, &err), &err);
    go_on(&a, 1, 110, 13);
    blob saved = kv_blob(a.kv, 1), owner = kv_blob(a.kv, 0);
    assert_int_equal(rf_kv_restore(a.kv, 0, "a", saved.data, saved.size, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "other slots"));
    blob after = kv_blob(a.kv, 0);
    assert_memory_equal(owner.data, after.data, after.size);
    must(rf_kv_restore(a.kv, 1, "a", saved.data, saved.size, &err), &err);
    assert_int_equal(rf_kv_holders(a.kv, 0), 0); /* the rows are its own now */
    blob own = kv_blob(a.kv, 1);
    assert_memory_equal(saved.data, own.data, own.size);
    store b = open_store("f16", "r4", 263, 13, 0, false, false);
    go_on(&b, 0, 110, 13);
    assert_int_equal(go_on(&a, 1, 263, 13), go_on(&b, 0, 263, 13));
    rf_kv_close(a.kv);
    rf_kv_close(b.kv);
    free(saved.data);
    free(owner.data);
    free(after.data);
    free(own.data);
}

/* Bytes of a head that nobody vouches for: refused, or taken without a step out of bounds. */
static void a_head_that_lies_does_no_harm(void **state)
{
    (void)state;
    store a = open_store("r4", "r8", 100, 5, 3, true, false);
    store b = open_store("r4", "r8", 100, 5, 3, true, false);
    go_on(&a, 0, 222, 5);
    go_on(&b, 0, 50, 5);
    blob saved = kv_blob(a.kv, 0), before = kv_blob(b.kv, 0);
    size_t head_bytes = rf_kv_save_head_bytes(a.kv);
    uint32_t refused = 0;
    for (size_t at = 0; at < head_bytes * 8; at++) {
        saved.data[at / 8] ^= (uint8_t)(1u << at % 8);
        if (rf_kv_restore(b.kv, 0, "b", saved.data, saved.size, NULL) != RF_OK) {
            blob after = kv_blob(b.kv, 0);
            assert_int_equal(before.size, after.size);
            assert_memory_equal(before.data, after.data, after.size);
            free(after.data);
            refused++;
        } else {
            go_on(&b, 0, rf_kv_length(b.kv, 0) + 20, 5);
            free(before.data);
            before = kv_blob(b.kv, 0);
        }
        saved.data[at / 8] ^= (uint8_t)(1u << at % 8);
    }
    assert_true(refused > head_bytes * 8 * 9 / 10);
    for (size_t size = 0; size < saved.size; size++)
        assert_int_not_equal(rf_kv_restore(b.kv, 0, "b", saved.data, size, NULL), RF_OK);
    rf_kv_close(a.kv);
    rf_kv_close(b.kv);
    free(saved.data);
    free(before.data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_store_goes_on_with_the_same_bits),
        cmocka_unit_test(what_can_be_taken_back_after_a_restore_is_what_could_be_before),
        cmocka_unit_test(another_ring_takes_up_a_slot_that_has_seen_all),
        cmocka_unit_test(a_store_of_another_make_refuses_the_slot),
        cmocka_unit_test(a_larger_chunk_is_taken_only_where_the_rows_suffice),
        cmocka_unit_test(a_slot_that_others_read_is_not_replaced),
        cmocka_unit_test(a_head_that_lies_does_no_harm),
    };
    return cmocka_run_group_tests(tests, list_formats, NULL);
}
