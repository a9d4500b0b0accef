/* tests/unit/test_kv_formats.c: the store in every format: what is planned is what is kept, a ring
 * that wrapped gives the bits of one that never did, and attention is what the stored codes say.
 *
 * A case is a sequence of keys, values and queries, played into a store as a step does it: append,
 * attend, commit. Keys turn with their position, as RoPE makes them, so that the calibration has
 * something to take away. Looks inside the store (kv/store.h) where nothing outside would tell.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv/store.h"
#include "plan_rows.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char *const formats[] = {"f32", "f16", "bf16", "q8_0", "q4_0",
                                      "r8",  "r6",  "r5",   "r4",   "r3"};
static const char *const mixes[][2] = {{"r8", "r4"},   {"f16", "r4"}, {"r4", "f16"},
                                       {"q8_0", "r3"}, {"r6", "r5"},  {"f32", "q4_0"},
                                       {"r3", "q8_0"}, {"r4", "r8"}};

static const char *const polar[] = {"turbo4", "turbo3", "turbo2", "turbo4q", "turbo3q"};

static bool is_blocked(const char *format) /* by 32 elements, as GGML's */
{
    return format[0] == 'q';
}

static bool is_narrow(const char *format) /* keeps the newest rows as r8 too */
{
    return format[0] == 'r' && format[1] < '8';
}

/* ---- a case ------------------------------------------------------------------------------ */

typedef struct shape {
    const char *k, *v;
    uint32_t kv_heads, group, k_width, v_width, window;
    uint64_t capacity;
    uint32_t chunk, sinks, recent_blocks, slots;
    bool endless, calibrated, interleaved;
    uint32_t dims; /* that turn */
} shape;

static const shape plain_shape = {.k = "f16",
                                  .v = "f16",
                                  .kv_heads = 2,
                                  .group = 2,
                                  .k_width = 64,
                                  .v_width = 64,
                                  .capacity = 300,
                                  .chunk = 64,
                                  .recent_blocks = 2,
                                  .slots = 1,
                                  .dims = 64};

static shape shape_with(const char *k, const char *v, bool calibrated)
{
    shape s = plain_shape;
    s.k = k;
    s.v = v;
    s.calibrated = calibrated;
    return s;
}

typedef struct text { /* owned: [position][head][width] */
    uint32_t positions;
    float *k, *v, *q, *q_sink;
} text;

static double frequencies[128];
static float means[4][256], moments[4][256 * 256]; /* by head, before RoPE */

static uint64_t random_u64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static double random_unit(uint64_t *state) /* [-1, 1) */
{
    return (double)(random_u64(state) >> 40) / (1 << 23) - 1.0;
}

static float *new_floats(uint64_t count)
{
    float *values = calloc(count, sizeof *values);
    assert_non_null(values);
    return values;
}

static void fill_random(float *values, uint64_t count, double size, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++)
        values[i] = (float)(size * random_unit(&seed));
}

/* The elements of pair i of a key, written down again here: the store's own is under test. */
static void pair_elements(const shape *s, uint32_t i, uint32_t *a, uint32_t *b)
{
    bool is_split = i < s->dims / 2 && !s->interleaved;
    *a = is_split ? i : 2 * i;
    *b = is_split ? i + s->dims / 2 : 2 * i + 1;
}

static double frequency_of(const shape *s, uint32_t i)
{
    return i < s->dims / 2 ? frequencies[i] : 0.0;
}

/* Turns a row to its position. */
static void turn(const shape *s, double *row, double position)
{
    for (uint32_t i = 0; i < s->k_width / 2; i++) {
        uint32_t a, b;
        pair_elements(s, i, &a, &b);
        double angle = frequency_of(s, i) * position, x = row[a], y = row[b];
        row[a] = x * cos(angle) - y * sin(angle);
        row[b] = x * sin(angle) + y * cos(angle);
    }
}

static void fill_statistics(const shape *s)
{
    static float factor[256 * 256];
    for (uint32_t i = 0; i < s->dims / 2; i++)
        frequencies[i] = pow(10000.0, -2.0 * i / s->dims);
    for (uint32_t head = 0; head < s->kv_heads; head++) {
        uint32_t n = s->k_width;
        fill_random(means[head], n, 1.5, 77 + head);
        fill_random(factor, n * n, 1.0, 99 + head);
        for (uint32_t r = 0; r < n; r++) {
            for (uint32_t c = 0; c < n; c++) {
                double sum = r == c ? 0.5 : 0.0;
                for (uint32_t i = 0; i < 4; i++) /* few directions count */
                    sum += (double)factor[r * n + i] * (double)factor[c * n + i];
                moments[head][r * n + c] = (float)sum;
            }
        }
    }
}

static text make_text(const shape *s, uint32_t positions, uint64_t seed)
{
    uint64_t keys = (uint64_t)positions * s->kv_heads * s->k_width;
    text t = {positions, new_floats(keys),
              new_floats((uint64_t)positions * s->kv_heads * s->v_width),
              new_floats(keys * s->group), new_floats(keys * s->group)};
    fill_statistics(s);
    fill_random(t.k, keys, 1.0, seed);
    fill_random(t.v, (uint64_t)positions * s->kv_heads * s->v_width, 1.0, seed + 1);
    fill_random(t.q, keys * s->group, 3.0, seed + 2);
    fill_random(t.q_sink, keys * s->group, 3.0, seed + 3);
    for (uint32_t p = 0; p < positions; p++) {
        for (uint32_t head = 0; head < s->kv_heads; head++) {
            float *row = t.k + ((uint64_t)p * s->kv_heads + head) * s->k_width;
            double turned[256];
            for (uint32_t i = 0; i < s->k_width; i++)
                turned[i] = (double)row[i] + (double)means[head][i];
            turn(s, turned, p);
            for (uint32_t i = 0; i < s->k_width; i++)
                row[i] = (float)turned[i];
        }
    }
    return t;
}

static void free_text(text *t)
{
    free(t->k);
    free(t->v);
    free(t->q);
    free(t->q_sink);
}

static uint64_t row_floats(const shape *s) /* of one position's output */
{
    return (uint64_t)s->kv_heads * s->group * s->v_width;
}

/* ---- a store ----------------------------------------------------------------------------- */

static rf_kv_config config_of(const shape *s, rf_kv_layer *layer)
{
    rf_kv_config config;
    *layer = (rf_kv_layer){s->kv_heads, s->k_width, s->v_width, s->window, s->k, s->v};
    rf_kv_config_init(&config);
    config.layers = layer;
    config.layer_count = 1;
    config.slots = s->slots;
    config.capacity = s->capacity;
    config.chunk = s->chunk;
    config.sinks = s->sinks;
    config.endless = s->endless;
    config.recent_blocks = s->recent_blocks;
    config.calibrated = s->calibrated;
    config.rope = (rf_kv_rope){frequencies, s->dims, s->interleaved};
    return config;
}

static void calibrate(rf_kv *kv, const shape *s)
{
    rf_error err = {0};
    for (uint32_t head = 0; s->calibrated && head < s->kv_heads; head++) {
        rf_kv_statistics statistics = {means[head], moments[head], 3, 3};
        if (rf_kv_set_calibration(kv, 0, head, &statistics, &err) != RF_OK)
            fail_msg("%s: %s", err.where, err.what);
    }
}

static rf_kv *open_store(const shape *s)
{
    rf_kv_layer layer;
    rf_kv_config config = config_of(s, &layer);
    rf_error err = {0};
    rf_kv *kv = NULL;
    if (rf_kv_open(NULL, &config, &kv, &err) != RF_OK)
        fail_msg("%s/%s: %s: %s", s->k, s->v, err.where, err.what);
    calibrate(kv, s);
    return kv;
}

typedef enum unit_order { FORWARDS, BACKWARDS, IN_TWO_PARTS } unit_order;

static void *dirty_scratch(const shape *s, uint64_t *bytes)
{
    *bytes = rf_kv_scratch_bytes(s->k_width, s->v_width, s->group);
    assert_int_equal(*bytes % RF_CACHE_LINE, 0);
    void *scratch = aligned_alloc(RF_CACHE_LINE, *bytes);
    assert_non_null(scratch);
    memset(scratch, 0xFF, *bytes);
    return scratch;
}

static void append_rows(rf_kv *kv, const shape *s, const text *t, uint32_t slot, uint32_t at,
                        uint32_t count, unit_order order)
{
    uint64_t k_stride = s->kv_heads * s->k_width, v_stride = s->kv_heads * s->v_width, bytes;
    const float *k = t->k + at * k_stride, *v = t->v + at * v_stride;
    rf_kv_append_job job;
    rf_error err = {0};
    if (order == FORWARDS) {
        if (rf_kv_append(kv, slot, 0, k, k_stride, v, v_stride, count, &err) != RF_OK)
            fail_msg("position %u: %s: %s", at, err.where, err.what);
        return;
    }
    void *scratch = dirty_scratch(s, &bytes);
    if (rf_kv_append_begin(kv, slot, 0, k, k_stride, v, v_stride, count, &job, &err) != RF_OK)
        fail_msg("position %u: %s: %s", at, err.where, err.what);
    uint32_t units = rf_kv_append_units(&job);
    for (uint32_t unit = units; order == BACKWARDS && unit-- > 0;) {
        rf_kv_append_run(&job, unit, unit + 1, scratch);
        memset(scratch, 0xFF, bytes);
    }
    if (order == IN_TWO_PARTS) {
        rf_kv_append_run(&job, units / 3, units, scratch);
        rf_kv_append_run(&job, 0, units / 3, scratch);
    }
    rf_kv_append_end(&job);
    free(scratch);
}

/* out: of position `at` on. */
static void attend_rows(const rf_kv *kv, const shape *s, const text *t, uint32_t slot, uint32_t at,
                        uint32_t count, unit_order order, float *out)
{
    uint64_t q_stride = (uint64_t)s->kv_heads * s->group * s->k_width, bytes;
    void *scratch = dirty_scratch(s, &bytes);
    rf_kv_attend job = {.slot = slot,
                        .heads = s->kv_heads * s->group,
                        .first_position = at,
                        .token_count = count,
                        .q = t->q + at * q_stride,
                        .q_sink = s->sinks ? t->q_sink + at * q_stride : NULL,
                        .q_stride = q_stride,
                        .out = out,
                        .out_stride = row_floats(s),
                        .scale = 1.0f / sqrtf((float)s->k_width)};
    uint32_t units = rf_kv_attend_units(kv, &job);
    if (order == FORWARDS)
        rf_kv_attend_run(kv, &job, 0, units, scratch);
    for (uint32_t unit = units; order == BACKWARDS && unit-- > 0;) {
        rf_kv_attend_run(kv, &job, unit, unit + 1, scratch);
        memset(scratch, 0xFF, bytes);
    }
    if (order == IN_TWO_PARTS) {
        rf_kv_attend_run(kv, &job, units / 3, units, scratch);
        rf_kv_attend_run(kv, &job, 0, units / 3, scratch);
    }
    free(scratch);
}

typedef struct playing {
    const uint32_t *chunks; /* lengths, repeated; NULL: one by one */
    uint32_t chunk_count;
    unit_order order;
} playing;

/* Plays positions [from, to) of the text; out is that of position 0. */
static void play_part(rf_kv *kv, const shape *s, const text *t, uint32_t slot, uint32_t from,
                      uint32_t to, const playing *p, float *out)
{
    for (uint32_t at = from, n = 0; at < to; n++) {
        uint32_t count = p && p->chunks ? p->chunks[n % p->chunk_count] : 1;
        unit_order order = p ? p->order : FORWARDS;
        count = RF_MIN(count, to - at);
        append_rows(kv, s, t, slot, at, count, order);
        attend_rows(kv, s, t, slot, at, count, order, out + at * row_floats(s));
        assert_int_equal(rf_kv_commit(kv, slot, NULL), RF_OK);
        at += count;
    }
}

static float *play(const shape *s, const text *t, const playing *p)
{
    float *out = new_floats(t->positions * row_floats(s));
    rf_kv *kv = open_store(s);
    play_part(kv, s, t, 0, 0, t->positions, p, out);
    rf_kv_close(kv);
    return out;
}

static void assert_same(const shape *s, const float *got, const float *expected, uint32_t from,
                        uint32_t to, const char *what)
{
    for (uint32_t p = from; p < to; p++) {
        uint64_t row = row_floats(s);
        if (memcmp(got + p * row, expected + p * row, row * sizeof *got) == 0)
            continue;
        for (uint64_t i = p * row; i < (p + 1) * row; i++) {
            if (memcmp(&got[i], &expected[i], sizeof *got) != 0)
                fail_msg("%s: %s/%s, widths %u and %u, %s, %u sinks, window %u, capacity %llu: "
                         "position %u, element %llu: %.9g is not %.9g",
                         what, s->k, s->v, s->k_width, s->v_width,
                         s->calibrated ? "calibrated" : "not calibrated", s->sinks, s->window,
                         (unsigned long long)s->capacity, p, (unsigned long long)(i - p * row),
                         (double)got[i], (double)expected[i]);
        }
    }
}

/* ---- planned and kept -------------------------------------------------------------------- */

/* Bytes of a row, by the table of formats in kv.h and kv_codec.h. */
static uint64_t expected_row_bytes(const char *format, uint32_t width)
{
    uint32_t power = width & (0u - width); /* largest power of two that divides it */
    uint32_t span32 = RF_MIN(power, 32u), span64 = RF_MIN(power, 64u);
    if (strcmp(format, "f32") == 0)
        return width * 4;
    if (strcmp(format, "f16") == 0 || strcmp(format, "bf16") == 0)
        return width * 2;
    if (strcmp(format, "q8_0") == 0)
        return width / 32 * 34;
    if (strcmp(format, "q4_0") == 0)
        return width / 32 * 18;
    if (strcmp(format, "r8") == 0)
        return width + width / span64 * 2;
    return width * (uint32_t)(format[1] - '0') / 8 + width / span32;
}

static uint64_t row_of_plan(const rf_plan *plan, const char *id)
{
    const rf_plan_row *row = rf_plan_find(plan, id);
    return row ? row->bytes : 0;
}

/* The last row of the last head of the last slot ends where the region ends. */
static void assert_ring_fills_region(const rf_kv *kv, const shape *s, const rf_scope *scope,
                                     const rf_plan *plan)
{
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_plan_row *row = rf_plan_find(plan, side ? "kv.layers[0].v" : "kv.layers[0].k");
        rf_kv_run runs[RF_KV_RUNS_MAX];
        const uint8_t *region = (const uint8_t *)scope->base + row->offset;
        assert_int_equal(rf_kv_window(kv, 0, 0, 0, (rf_kv_side)side, 0, s->capacity, runs), 1);
        assert_ptr_equal(runs[0].rows, region);
        assert_int_equal(rf_kv_window(kv, s->slots - 1, 0, s->kv_heads - 1, (rf_kv_side)side, 0,
                                      s->capacity, runs),
                         1);
        assert_ptr_equal((const uint8_t *)runs[0].rows +
                             s->capacity * rf_kv_row_bytes(kv, 0, (rf_kv_side)side),
                         region + row->bytes);
    }
}

static void assert_planned_is_kept(const shape *s)
{
    static rf_plan_row rows[64];
    rf_plan plan;
    rf_scope scope;
    rf_error err = {0};
    rf_kv *kv = NULL;
    rf_kv_layer layer;
    rf_kv_config config = config_of(s, &layer);
    text t = make_text(s, (uint32_t)s->capacity, 1);
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_kv_plan(&plan, &config, &err), RF_OK);
    assert_int_equal(rf_trace_plan(&plan, 256, &err), RF_OK);
    lay_out(&plan, 0);

    uint64_t heads = s->slots * s->kv_heads, in_all = 0;
    const char *names[2] = {s->k, s->v};
    uint32_t widths[2] = {s->k_width, s->v_width};
    for (int side = 0; side < 2; side++) {
        uint64_t recent = RF_MIN((s->recent_blocks + 1ull) * 32 + 2 * s->chunk, s->capacity);
        uint64_t row = expected_row_bytes(names[side], widths[side]);
        uint64_t ring = heads * s->capacity * row;
        uint64_t first = names[side][0] == 'r' ? heads * widths[side] * 2 : 0;
        recent =
            is_narrow(names[side]) ? heads * recent * expected_row_bytes("r8", widths[side]) : 0;
        char ids[3][RF_ID_BYTES];
        snprintf(ids[0], sizeof ids[0], "kv.layers[0].%c", "kv"[side]);
        snprintf(ids[1], sizeof ids[1], "kv.layers[0].%c.first", "kv"[side]);
        snprintf(ids[2], sizeof ids[2], "kv.layers[0].%c.recent", "kv"[side]);
        assert_int_equal(row_of_plan(&plan, ids[0]), ring);
        assert_int_equal(row_of_plan(&plan, ids[1]), first);
        assert_int_equal(row_of_plan(&plan, ids[2]), recent);
        in_all += ring + first + recent;
    }
    bool has_mean = s->calibrated && s->k[0] == 'r';
    assert_int_equal(row_of_plan(&plan, "kv.layers[0].calibration"),
                     has_mean ? s->kv_heads * (s->k_width + s->k_width * s->k_width) * 4 : 0);
    assert_true((row_of_plan(&plan, "kv.layers[0].feedback") > 0) == has_mean);
    assert_int_equal(plan.pool_bytes[RF_POOL_KV], in_all);

    assert_int_equal(rf_scope_open(&scope, &plan, RF_SCOPE_MODEL, NULL, false, &err), RF_OK);
    if (rf_kv_open(&scope, &config, &kv, &err) != RF_OK)
        fail_msg("%s/%s: %s: %s", s->k, s->v, err.where, err.what);
    assert_int_equal(rf_scope_seal(&scope, &err), RF_OK);
    calibrate(kv, s);
    assert_int_equal(rf_kv_preallocated_bytes(kv), in_all);
    assert_int_equal(rf_kv_row_bytes(kv, 0, RF_KV_K), expected_row_bytes(s->k, s->k_width));
    assert_int_equal(rf_kv_row_bytes(kv, 0, RF_KV_V), expected_row_bytes(s->v, s->v_width));

    const rf_trace *trace = scope.trace;
    uint64_t emitted = trace->emitted, live = trace->live_bytes[RF_SCOPE_MODEL];
    for (uint32_t slot = 0; slot < s->slots; slot++) {
        for (uint32_t at = 0; at < s->capacity; at += s->chunk) {
            append_rows(kv, s, &t, slot, at, RF_MIN(s->chunk, (uint32_t)s->capacity - at),
                        FORWARDS);
            assert_int_equal(rf_kv_commit(kv, slot, NULL), RF_OK);
        }
    }
    assert_int_equal(trace->emitted, emitted);
    assert_int_equal(trace->live_bytes[RF_SCOPE_MODEL], live);
    assert_ring_fills_region(kv, s, &scope, &plan);
    uint64_t taken = 0, others = 0;
    for (uint32_t i = 0; i < plan.row_count; i++) {
        uint64_t bytes = trace->rows[i].take_count * rows[i].bytes;
        taken += rows[i].pool == RF_POOL_KV ? bytes : 0;
        others += rows[i].pool == RF_POOL_KV ? 0 : bytes;
    }
    assert_int_equal(taken, in_all);
    rf_trace totals;
    rf_kv_close(kv);
    rf_scope_close(&scope, &totals);
    assert_int_equal(totals.freed_bytes[RF_SCOPE_MODEL] - others, in_all);
    assert_int_equal(totals.live_bytes[RF_SCOPE_MODEL], 0);
    free_text(&t);
}

static const uint32_t widths[] = {8, 16, 24, 64, 80, 96, 112, 128, 192, 256};

static void what_is_planned_is_what_is_kept_in_every_format_and_width(void **state)
{
    (void)state;
    static const uint64_t capacities[] = {1, 33, 67, 131};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            shape s = shape_with(formats[f], formats[f], (f + w) % 2 == 0);
            s.k_width = s.v_width = s.dims = widths[w];
            s.capacity = capacities[(f + w) % RF_ARRAY_COUNT(capacities)];
            s.chunk = (uint32_t)RF_MIN(s.capacity, 5u + w);
            s.slots = 1 + w % 3;
            s.recent_blocks = (uint32_t)(w % 4);
            if (!is_blocked(formats[f]) || widths[w] % 32 == 0)
                assert_planned_is_kept(&s);
        }
    }
    for (size_t m = 0; m < RF_ARRAY_COUNT(mixes); m++) {
        shape s = shape_with(mixes[m][0], mixes[m][1], true);
        s.v_width = 96;
        s.capacity = 131;
        s.slots = 2;
        assert_planned_is_kept(&s);
    }
}

static void a_width_without_whole_blocks_is_refused(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t width = 0; width <= 264; width++) {
            for (int side = 0; side < 2; side++) {
                shape s = shape_with(formats[f], formats[f], false);
                rf_plan plan;
                rf_kv_layer layer;
                rf_kv_config config = config_of(&s, &layer);
                rf_error err = {0};
                *(side ? &layer.v_width : &layer.k_width) = width;
                bool is_whole = width && width % (is_blocked(formats[f]) ? 32 : 8) == 0;
                rf_plan_init(&plan, NULL, 0);
                assert_int_equal(rf_kv_plan(&plan, &config, &err), is_whole ? RF_OK : RF_ERR_USAGE);
                if (!is_whole)
                    assert_string_equal(err.where, side ? "kv.layers[0].v" : "kv.layers[0].k");
            }
        }
    }
}

/* ---- events ------------------------------------------------------------------------------ */

static void assert_events(const char *format, bool calibrated, const char *const *suffixes)
{
    static rf_plan_row rows[64];
    rf_plan plan;
    rf_scope scope;
    rf_error err = {0};
    rf_kv *kv = NULL;
    shape s = shape_with(format, format, calibrated);
    rf_kv_layer one, layers[3];
    rf_kv_config config = config_of(&s, &one);
    layers[0] = layers[1] = layers[2] = one;
    layers[1].kv_heads = 0;
    config.layers = layers;
    config.layer_count = 3;
    fill_statistics(&s);
    rf_plan_init(&plan, rows, RF_ARRAY_COUNT(rows));
    assert_int_equal(rf_kv_plan(&plan, &config, &err), RF_OK);
    assert_int_equal(rf_trace_plan(&plan, 256, &err), RF_OK);
    lay_out(&plan, 0);
    assert_int_equal(rf_scope_open(&scope, &plan, RF_SCOPE_MODEL, NULL, false, &err), RF_OK);
    assert_int_equal(rf_kv_open(&scope, &config, &kv, &err), RF_OK);
    uint32_t found[2] = {0};
    rf_event event;
    for (uint64_t i = 0; rf_trace_event(scope.trace, i, &event); i++) {
        const char *id = rows[event.row].id;
        char expected[RF_ID_BYTES];
        if (strncmp(id, "kv.layers", 9) != 0)
            continue;
        uint32_t layer = (uint32_t)(id[10] - '0');
        assert_true(layer == 0 || layer == 2);
        const char *suffix = suffixes[found[layer / 2]++];
        assert_non_null(suffix);
        snprintf(expected, sizeof expected, "kv.layers[%u].%s", layer, suffix);
        assert_string_equal(id, expected);
        assert_int_equal(event.kind, RF_EVENT_ALLOC);
        assert_int_equal(event.detail, RF_SCOPE_MODEL);
        assert_int_equal(event.bytes, rows[event.row].bytes);
        bool is_table = strchr(suffix, 'f') == NULL && strlen(suffix) > 8;
        is_table |= strcmp(suffix, "feedback") == 0;
        assert_int_equal(rows[event.row].pool, is_table ? RF_POOL_TABLES : RF_POOL_KV);
    }
    assert_null(suffixes[found[0]]);
    assert_null(suffixes[found[1]]);
    rf_kv_close(kv);
    rf_scope_close(&scope, NULL);
}

static void a_layer_is_allocated_by_its_parts_and_no_other(void **state)
{
    (void)state;
    static const char *const bare[] = {"k", "v", NULL};
    static const char *const with_first[] = {"k", "v", "k.first", "v.first", NULL};
    static const char *const calibrated_r8[] = {"k",           "v",        "k.first", "v.first",
                                                "calibration", "feedback", NULL};
    static const char *const narrow[] = {"k",        "v",        "k.first", "v.first",
                                         "k.recent", "v.recent", NULL};
    static const char *const all[] = {"k",        "v",           "k.first",  "v.first", "k.recent",
                                      "v.recent", "calibration", "feedback", NULL};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        bool is_r8 = strcmp(formats[f], "r8") == 0;
        if (is_narrow(formats[f])) {
            assert_events(formats[f], false, narrow);
            assert_events(formats[f], true, all);
        } else {
            assert_events(formats[f], false, is_r8 ? with_first : bare);
            assert_events(formats[f], true, is_r8 ? calibrated_r8 : bare);
        }
    }
}

/* ---- the same bits ----------------------------------------------------------------------- */

/* A store that never wraps over the positions that the ring shows: as many rows as positions, and
 * a window of what the ring lets a step see. */
static shape linear_of(const shape *ring, uint32_t positions)
{
    shape s = *ring;
    uint32_t seen = (uint32_t)ring->capacity - (ring->chunk - 1) - ring->sinks;
    s.window = ring->window ? RF_MIN(ring->window, seen) : seen;
    s.endless = false;
    s.capacity = s.chunk = positions;
    return s;
}

static void assert_wrapped_is_linear(const shape *ring, uint32_t positions)
{
    static const uint32_t chunks[] = {7, 1, 16, 3};
    static const uint32_t long_chunks[] = {64};
    playing p = {chunks, RF_ARRAY_COUNT(chunks), FORWARDS}, fast = {long_chunks, 1, FORWARDS};
    text t = make_text(ring, positions, 5);
    shape linear = linear_of(ring, positions);
    float *expected = play(&linear, &t, &fast), *got = play(ring, &t, &p);
    assert_same(ring, got, expected, 0, positions, "wrapped");
    free(expected);
    free(got);
    free_text(&t);
}

static void a_ring_that_wrapped_three_times_is_one_that_never_did(void **state)
{
    (void)state;
    static const struct {
        uint64_t capacity;
        uint32_t chunk, sinks, window, positions;
    } rings[] = {{150, 16, 0, 0, 700},  {150, 16, 4, 0, 700}, {61, 16, 0, 0, 300},
                 {61, 16, 4, 0, 300},   {53, 16, 9, 0, 260},  {150, 16, 4, 20, 700},
                 {300, 16, 130, 0, 900}};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats) + RF_ARRAY_COUNT(mixes); f++) {
        for (size_t r = 0; r < RF_ARRAY_COUNT(rings); r++) {
            bool is_mix = f >= RF_ARRAY_COUNT(formats);
            const char *const *mix = mixes[is_mix ? f - RF_ARRAY_COUNT(formats) : 0];
            for (int calibrated = 0; calibrated < 2; calibrated++) {
                shape s = shape_with(is_mix ? mix[0] : formats[f], is_mix ? mix[1] : formats[f],
                                     calibrated);
                s.kv_heads = s.group = 1;
                s.k_width = s.dims = 32;
                s.v_width = 32;
                s.endless = true;
                s.capacity = rings[r].capacity;
                s.chunk = rings[r].chunk;
                s.sinks = rings[r].sinks;
                s.window = rings[r].window;
                if (calibrated && s.k[0] != 'r')
                    continue;
                assert_wrapped_is_linear(&s, rings[r].positions);
            }
        }
    }
}

/* The window's own ring, in a store that does not wrap as a whole, with sinks beside it. */
static void a_window_with_sinks_is_one_that_never_wrapped(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t sinks = 0; sinks <= 40; sinks += 20) {
            shape s = shape_with(formats[f], formats[f], formats[f][0] == 'r');
            s.kv_heads = 1;
            s.window = 16;
            s.sinks = sinks;
            s.chunk = 16;
            s.capacity = 200;
            assert_wrapped_is_linear(&s, 200);
        }
    }
}

static void the_polar_formats_wrap_and_chunk_like_the_others(void **state)
{
    (void)state;
    for (size_t f = 0; f <= RF_ARRAY_COUNT(polar); f++) {
        bool is_mix = f == RF_ARRAY_COUNT(polar);
        shape s = shape_with(is_mix ? "r4" : polar[f], is_mix ? "turbo3q" : polar[f], is_mix);
        s.kv_heads = s.group = 1;
        s.k_width = s.v_width = s.dims = 128;
        s.endless = true;
        s.capacity = 61;
        s.chunk = 16;
        s.sinks = f % 2 ? 4 : 0;
        assert_wrapped_is_linear(&s, 300);
        s.k = polar[0];
        s.v = "f16";
        s.calibrated = false;
        assert_wrapped_is_linear(&s, 300);
    }
}

static void any_chunks_and_any_order_of_units_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t lengths[] = {1, 7, 32, 33, 64};
    static const uint32_t mixed[] = {1, 64, 5, 33, 32, 7};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats) + RF_ARRAY_COUNT(mixes); f++) {
        bool is_mix = f >= RF_ARRAY_COUNT(formats);
        const char *const *mix = mixes[is_mix ? f - RF_ARRAY_COUNT(formats) : 0];
        for (int calibrated = 0; calibrated < 2; calibrated++) {
            shape s =
                shape_with(is_mix ? mix[0] : formats[f], is_mix ? mix[1] : formats[f], calibrated);
            s.capacity = 230;
            s.k_width = s.dims = is_mix ? 96 : 64;
            s.v_width = is_mix ? 64 : 96;
            s.interleaved = f % 2;
            s.recent_blocks = (uint32_t)(f % 3);
            s.group = f % 2 ? 3 : 1;
            text t = make_text(&s, 230, 9 + f);
            float *expected = play(&s, &t, NULL);
            for (size_t n = 0; n <= RF_ARRAY_COUNT(lengths); n++) {
                playing p = {&lengths[n], 1, (unit_order)(n % 3)};
                if (n == RF_ARRAY_COUNT(lengths))
                    p = (playing){mixed, RF_ARRAY_COUNT(mixed), IN_TWO_PARTS};
                float *got = play(&s, &t, &p);
                assert_same(&s, got, expected, 0, t.positions, "chunks");
                free(got);
            }
            free(expected);
            free_text(&t);
        }
    }
}

static void scalar_code_gives_the_same_bits(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.k_width = s.dims = widths[w];
            s.v_width = widths[RF_ARRAY_COUNT(widths) - 1 - w];
            if (is_blocked(formats[f]) && (s.k_width % 32 || s.v_width % 32))
                continue;
            s.recent_blocks = 0;
            text t = make_text(&s, 70, 3 + w);
            float *expected = play(&s, &t, NULL), *got = new_floats(70 * row_floats(&s));
            rf_kv *kv = open_store(&s);
            rf_kv_set_cpu(kv, RF_CPU_SCALAR);
            play_part(kv, &s, &t, 0, 0, 70, NULL, got);
            rf_kv_close(kv);
            assert_same(&s, got, expected, 0, 70, "scalar");
            free(got);
            free(expected);
            free_text(&t);
        }
    }
}

/* ---- against double ---------------------------------------------------------------------- */

static void hadamard(double *row, uint32_t width, uint32_t block)
{
    for (uint32_t b = 0; b < width; b += block) {
        double out[256];
        for (uint32_t i = 0; i < block; i++) {
            out[i] = 0;
            for (uint32_t j = 0; j < block; j++)
                out[i] += (__builtin_popcount(i & j) & 1 ? -1.0 : 1.0) * row[b + j];
        }
        for (uint32_t i = 0; i < block; i++)
            row[b + i] = out[i] / sqrt(block);
    }
}

static void flip(double *row, const uint8_t *signs, uint32_t width)
{
    for (uint32_t i = 0; i < width; i++)
        row[i] = signs[i / 8] >> (i % 8) & 1 ? -row[i] : row[i];
}

/* The mean of 128 turned means, one by one. */
static void brute_mean(const shape *s, uint32_t head, uint64_t position, double *mean)
{
    double row[256];
    memset(mean, 0, s->k_width * sizeof *mean);
    for (uint64_t p = position / 128 * 128; p < position / 128 * 128 + 128; p++) {
        for (uint32_t i = 0; i < s->k_width; i++)
            row[i] = (double)means[head][i];
        turn(s, row, (double)p);
        for (uint32_t i = 0; i < s->k_width; i++)
            mean[i] += row[i] / 128;
    }
}

typedef struct kept { /* one position of one head as the ring has it, both forms, turned back */
    double k[2][256], v[2][256]; /* [near] */
    double mean[256];            /* of its block, where keys are held as differences from it */
} kept;

/* What codes of a row say, in the space of the values that were appended. */
static void decode_row(const rf_kv *kv, const rf_kv_side_store *store, const rf_kv_shape *shape,
                       const void *row, int32_t base, double *out)
{
    int8_t codes[256];
    float scales[32];
    kv->codec.expand(shape, row, 1, base, codes, scales);
    for (uint32_t i = 0; i < shape->width; i++)
        out[i] = (double)scales[i / shape->span] * (double)codes[i];
    hadamard(out, shape->width, store->shape.block);
    flip(out, store->signs, shape->width);
}

static void read_side(const rf_kv *kv, const shape *s, const text *t, uint32_t head, uint32_t p,
                      rf_kv_side side, const double *mean, double out[2][256])
{
    const rf_kv_layer_store *layer = &kv->layers[0];
    const rf_kv_side_store *store = &layer->side[side];
    uint32_t width = store->width;
    const float *source = (side ? t->v : t->k) + ((uint64_t)p * s->kv_heads + head) * width;
    bool has_mean = side == RF_KV_K && s->calibrated && store->format->has_mean;
    rf_kv_run runs[RF_KV_RUNS_MAX];
    assert_int_equal(rf_kv_window(kv, 0, 0, head, side, p, p + 1, runs), 1);
    if (p == 0 && store->format->has_first) {
        for (uint32_t i = 0; i < width; i++)
            out[0][i] = out[1][i] = (double)rf_f16_to_f32(rf_f32_to_f16(source[i]));
        return;
    }
    if (store->format->plain != RF_FORMAT_NONE) {
        float row[256];
        kv->kernels.kv_decode[store->format->plain](runs[0].rows, row, width);
        for (uint32_t i = 0; i < width; i++)
            out[0][i] = out[1][i] = (double)row[i];
        return;
    }
    decode_row(kv, store, &store->shape, runs[0].rows, store->bases[head], out[0]);
    memcpy(out[1], out[0], sizeof out[0]);
    if (store->format->has_recent) { /* encoded again here: it depends on the row alone */
        float row[256], block_mean[256] = {0};
        uint8_t bytes[512];
        if (has_mean)
            rf_kv_block_mean(kv, 0, layer, head, p, block_mean);
        for (uint32_t i = 0; i < width; i++)
            row[i] = source[i] - block_mean[i];
        kv->codec.rotate(row, store->signs, width, store->shape.block);
        kv->codec.encode(&store->recent_shape, row, NULL, 0, bytes);
        decode_row(kv, store, &store->recent_shape, bytes, 0, out[1]);
    }
    for (uint32_t i = 0; has_mean && i < width; i++) {
        out[0][i] += mean[i];
        out[1][i] += mean[i];
    }
}

/* q as the integer scores see it: sixteen bits of the rotated row. */
static void kept_query(const rf_kv *kv, const float *q, double *out)
{
    const rf_kv_side_store *keys = &kv->layers[0].side[RF_KV_K];
    float row[256], scale;
    int16_t codes[256];
    memcpy(row, q, keys->width * sizeof *q);
    kv->codec.rotate(row, keys->signs, keys->width, keys->shape.block);
    kv->codec.query(row, keys->width, codes, &scale);
    for (uint32_t i = 0; i < keys->width; i++)
        out[i] = (double)scale * (double)codes[i];
    hadamard(out, keys->width, keys->shape.block);
    flip(out, keys->signs, keys->width);
}

/* Outputs of one head at p; rows[j] is what the store has of position j. */
static void reference_row(const rf_kv *kv, const shape *s, const text *t, const kept *rows,
                          uint32_t p, uint32_t head, double *out)
{
    static double scores[1024];
    uint64_t at = ((uint64_t)p * s->kv_heads * s->group + head) * s->k_width;
    const rf_kv_side_store *keys = &kv->layers[0].side[RF_KV_K], *values = keys + 1;
    bool both_coded =
        keys->format->plain == RF_FORMAT_NONE && values->format->plain == RF_FORMAT_NONE;
    bool has_first = keys->format->has_first || values->format->has_first;
    double largest = -INFINITY, total = 0, codes[2][256];
    const float *exact[2] = {t->q + at, (s->sinks ? t->q_sink : t->q) + at};
    for (int sink = 0; both_coded && sink < 2; sink++)
        kept_query(kv, exact[sink], codes[sink]);
    for (uint32_t j = 0; j <= p; j++) {
        bool is_sink = j < s->sinks, near = p / 32 <= j / 32 + s->recent_blocks;
        scores[j] = -INFINITY;
        if (!is_sink && s->window && p - j >= s->window)
            continue;
        const float *q = exact[is_sink];
        bool is_wide = !both_coded || (j == 0 && has_first);
        double sum = 0;
        for (uint32_t i = 0; i < s->k_width; i++) {
            double seen = is_wide ? (double)q[i] : codes[is_sink][i];
            double mean = is_wide ? 0.0 : rows[j].mean[i]; /* scored by q as it is */
            sum += seen * (rows[j].k[near][i] - mean) + (double)q[i] * mean;
        }
        scores[j] = sum / sqrt(s->k_width);
        largest = fmax(largest, scores[j]);
    }
    memset(out, 0, s->v_width * sizeof *out);
    for (uint32_t j = 0; j <= p; j++) {
        bool near = p / 32 <= j / 32 + s->recent_blocks;
        double weight = exp(scores[j] - largest);
        total += weight;
        for (uint32_t i = 0; weight > 0 && i < s->v_width; i++)
            out[i] += weight * rows[j].v[near][i];
    }
    for (uint32_t i = 0; i < s->v_width; i++)
        out[i] /= total;
}

/* Values are below 2 and scores below 20; the largest error that was seen is 4e-7. */
#define TOLERANCE 1.5e-6

static void assert_near_reference(const shape *s, const text *t)
{
    float *out = new_floats(t->positions * row_floats(s));
    kept *rows = calloc(t->positions, sizeof *rows);
    rf_kv *kv = open_store(s);
    double worst = 0;
    assert_non_null(rows);
    play_part(kv, s, t, 0, 0, t->positions, NULL, out);
    for (uint32_t head = 0; head < s->kv_heads * s->group; head++) {
        for (uint32_t p = 0; head % s->group == 0 && p < t->positions; p++) {
            uint32_t kv_head = head / s->group;
            memset(rows[p].mean, 0, sizeof rows[p].mean);
            if (s->calibrated && kv->layers[0].side[RF_KV_K].format->has_mean) {
                if (p % 128 == 0)
                    brute_mean(s, kv_head, p, rows[p].mean);
                else
                    memcpy(rows[p].mean, rows[p - 1].mean, sizeof rows[p].mean);
            }
            read_side(kv, s, t, kv_head, p, RF_KV_K, rows[p].mean, rows[p].k);
            read_side(kv, s, t, kv_head, p, RF_KV_V, NULL, rows[p].v);
        }
        for (uint32_t p = 0; p < t->positions; p += p < 36 ? 1 : 5) {
            double expected[256];
            reference_row(kv, s, t, rows, p, head, expected);
            for (uint32_t i = 0; i < s->v_width; i++) {
                double got = (double)out[p * row_floats(s) + head * s->v_width + i];
                worst = fmax(worst, fabs(got - expected[i]));
                if (!(fabs(got - expected[i]) <= TOLERANCE))
                    fail_msg("%s/%s, widths %u and %u, %s, %u sinks, window %u, %u recent blocks: "
                             "position %u, head %u, element %u: %.9g is not %.9g",
                             s->k, s->v, s->k_width, s->v_width,
                             s->calibrated ? "calibrated" : "not calibrated", s->sinks, s->window,
                             s->recent_blocks, p, head, i, got, expected[i]);
            }
        }
    }
    if (getenv("RF_TEST_VERBOSE"))
        print_message("%s/%s: %.2g\n", s->k, s->v, worst);
    rf_kv_close(kv);
    free(rows);
    free(out);
}

static void attention_is_what_the_stored_codes_say(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats) + RF_ARRAY_COUNT(mixes); f++) {
        bool is_mix = f >= RF_ARRAY_COUNT(formats);
        const char *const *mix = mixes[is_mix ? f - RF_ARRAY_COUNT(formats) : 0];
        for (uint32_t n = 0; n < 4; n++) {
            shape s = shape_with(is_mix ? mix[0] : formats[f], is_mix ? mix[1] : formats[f], n % 2);
            s.kv_heads = 1 + n % 2;
            s.k_width = n < 2 ? 64 : 96;
            s.v_width = n < 2 ? 96 : 32;
            s.dims = n == 3 ? 64 : s.k_width; /* some elements do not turn */
            s.interleaved = n >= 2;
            s.recent_blocks = n < 2 ? 1 : n - 2;
            s.sinks = n == 1 ? 4 : 0;
            s.window = n == 1 ? 50 : 0;
            s.chunk = n == 1 ? 180 : 64; /* 180: the window's ring never wraps */
            s.capacity = 180;
            text t = make_text(&s, 180, 21 + n);
            assert_near_reference(&s, &t);
            free_text(&t);
        }
    }
}

/* Whoever reads zeros, or another row, is as far from the truth as the values are large. */
static void finer_formats_are_nearer_to_the_truth(void **state)
{
    (void)state;
    static const struct {
        const char *format;
        double most; /* mean squared error against that of answering zero */
    } steps[] = {{"f16", 1e-6}, {"bf16", 6e-5}, {"r8", 3e-4},  {"q8_0", 4e-4}, {"r6", 2e-3},
                 {"r5", 8e-3},  {"r4", 3e-2},   {"q4_0", 0.1}, {"r3", 0.12}};
    for (int calibrated = 0; calibrated < 2; calibrated++) {
        shape s = shape_with("f32", "f32", calibrated);
        s.recent_blocks = 0;
        text t = make_text(&s, 300, 4);
        float *truth = play(&s, &t, NULL);
        for (size_t f = 0; f < RF_ARRAY_COUNT(steps); f++) {
            double error = 0, size = 0;
            s.k = s.v = steps[f].format;
            float *out = play(&s, &t, NULL);
            for (uint64_t i = 200 * row_floats(&s); i < 300 * row_floats(&s); i++) {
                error += pow((double)(out[i] - truth[i]), 2);
                size += pow((double)truth[i], 2);
            }
            if (getenv("RF_TEST_VERBOSE"))
                print_message("%s: %.3g\n", s.k, error / size);
            if (!(error / size <= steps[f].most))
                fail_msg("%s: %.3g is more than %.3g", s.k, error / size, steps[f].most);
            free(out);
        }
        free(truth);
        free_text(&t);
    }
}

/* ---- means and feedback ------------------------------------------------------------------ */

static const uint64_t deep_blocks[] = {0, 1, 2, 7, 63, 1000, 8191};

static void the_mean_of_a_block_is_the_average_of_turned_means(void **state)
{
    (void)state;
    static const uint32_t cases[][2] = {{64, 64}, {80, 80}, {96, 64}, {128, 32}, {64, 0}, {8, 8}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases) * 2; c++) {
        shape s = shape_with("r4", "r4", true);
        s.k_width = cases[c / 2][0];
        s.dims = cases[c / 2][1];
        s.interleaved = c % 2;
        fill_statistics(&s);
        rf_kv *kv = open_store(&s);
        for (size_t b = 0; b < RF_ARRAY_COUNT(deep_blocks); b++) {
            uint64_t from = deep_blocks[b] * 128;
            rf_kv_fill_phases(kv, 0, from, from + 1);
            for (uint32_t head = 0; head < s.kv_heads; head++) {
                float got[256];
                double expected[256];
                rf_kv_block_mean(kv, 0, &kv->layers[0], head, from + 77, got);
                brute_mean(&s, head, from + 5, expected);
                for (uint32_t i = 0; i < s.k_width; i++) {
                    if (!(fabs((double)got[i] - expected[i]) <= 1e-6))
                        fail_msg("width %u, %u turn: block %llu, element %u: %.9g is not %.9g",
                                 s.k_width, s.dims, (unsigned long long)deep_blocks[b], i,
                                 (double)got[i], expected[i]);
                }
            }
        }
        rf_kv_close(kv);
    }
}

/* The average of R(p) H R(p)t over the 128 positions of a block and the 512 behind it, turned into
 * the space of the codes: H is four outer products and a diagonal that does not turn pairs apart. */
static void brute_form(const shape *s, uint32_t head, uint64_t block, const uint8_t *signs,
                       uint32_t size, double *form)
{
    static double h[256][256];
    uint32_t n = s->k_width;
    memset(form, 0, (uint64_t)n * n * sizeof *form);
    for (uint64_t p = block * 128; p < block * 128 + 640; p++) {
        for (uint32_t r = 0; r < n; r++) {
            for (uint32_t c = 0; c < n; c++)
                h[r][c] = (double)moments[head][r * n + c];
            turn(s, h[r], (double)p);
        }
        for (uint32_t i = 0; i < n / 2; i++) { /* rows, as turn does a row's elements */
            uint32_t a, b;
            pair_elements(s, i, &a, &b);
            double re = cos(frequency_of(s, i) * (double)p);
            double im = sin(frequency_of(s, i) * (double)p);
            for (uint32_t c = 0; c < n; c++) {
                double x = h[a][c], y = h[b][c];
                form[a * n + c] += (x * re - y * im) / 640;
                form[b * n + c] += (x * im + y * re) / 640;
            }
        }
    }
    for (uint32_t r = 0; r < n; r++) { /* columns */
        flip(form + r * n, signs, n);
        hadamard(form + r * n, n, size);
    }
    for (uint32_t c = 0; c < n; c++) {
        double column[256];
        for (uint32_t r = 0; r < n; r++)
            column[r] = form[r * n + c];
        flip(column, signs, n);
        hadamard(column, n, size);
        for (uint32_t r = 0; r < n; r++)
            form[r * n + c] = column[r];
    }
}

/* Mt D M, with the damping taken off again, against the form itself. */
static void assert_is_form(const shape *s, uint64_t block, uint32_t b, uint32_t size,
                           const rf_kv_feedback *feedback, const double *form)
{
    const float *m = feedback->m + (uint64_t)b * size * size, *d = feedback->d + b * size;
    uint32_t first = b * size;
    double unit = 0;
    for (uint32_t i = 0; i < size; i++)
        unit += form[(first + i) * s->k_width + first + i] / size;
    for (uint32_t r = 0; r < size; r++) {
        for (uint32_t c = 0; c < size; c++) {
            double sum = 0;
            for (uint32_t i = 0; i < size; i++) {
                double left = i == r ? 1.0 : i > r ? (double)m[r * size + i] : 0.0;
                double right = i == c ? 1.0 : i > c ? (double)m[c * size + i] : 0.0;
                sum += left * (double)d[i] * right;
            }
            double expected = form[(first + r) * s->k_width + first + c] / unit;
            double got = sum - (r == c ? RF_KV_DAMPING : 0.0);
            if (!(fabs(got - expected) <= 2e-5))
                fail_msg("width %u, %u turn, block %llu, part %u: (%u, %u): %.9g is not %.9g",
                         s->k_width, s->dims, (unsigned long long)block, b, r, c, got, expected);
        }
    }
}

static void the_feedback_form_is_the_average_of_turned_moments(void **state)
{
    (void)state;
    static const uint32_t cases[][2] = {{64, 64}, {80, 80}, {96, 64}, {64, 16}, {128, 128}};
    static double form[256 * 256], scratch[2 * 64 * 64 + 256];
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        shape s = shape_with("r4", "r4", true);
        s.kv_heads = 1 + c % 2;
        s.k_width = cases[c][0];
        s.dims = cases[c][1];
        s.interleaved = c % 2;
        fill_statistics(&s);
        rf_kv *kv = open_store(&s);
        rf_kv_layer_store *layer = &kv->layers[0];
        uint32_t size = layer->side[RF_KV_K].shape.block, head = s.kv_heads - 1;
        for (size_t b = 0; b < RF_ARRAY_COUNT(deep_blocks); b += 2) {
            rf_kv_feedback feedback =
                rf_kv_feedback_of(kv, 0, layer, head, deep_blocks[b] * 128 + 3, scratch);
            assert_non_null(feedback.m);
            brute_form(&s, head, deep_blocks[b], layer->side[RF_KV_K].signs, size, form);
            for (uint32_t part = 0; part < s.k_width / size; part++)
                assert_is_form(&s, deep_blocks[b], part, size, &feedback, form);
        }
        rf_kv_close(kv);
    }
}

/* Squared error of the scores of keys at [from, from + 256), by queries that stand behind them. */
static double score_error(const shape *s, const text *t, const rf_kv *kv, uint32_t from,
                          const float *query)
{
    double error = 0, mean[256];
    for (uint32_t p = from; p < from + 256; p++) {
        double row[2][256], q[256], sum = 0;
        const float *k = t->k + (uint64_t)p * s->k_width;
        if (p == from || p % 128 == 0)
            brute_mean(s, 0, p, mean);
        read_side(kv, s, t, 0, p, RF_KV_K, mean, row);
        for (uint32_t i = 0; i < s->k_width; i++)
            q[i] = (double)query[i];
        shape turning = *s;
        turning.dims = 64;
        turn(&turning, q, p + 300.0);
        for (uint32_t i = 0; i < s->k_width; i++)
            sum += q[i] * (row[0][i] - (double)k[i]);
        error += sum * sum;
    }
    return error;
}

/* Statistics as a calibration without turning would take them: averages of turned keys over the
 * first 512 positions. */
static void fix_statistics(const shape *s)
{
    static double mean[256], form[256 * 256];
    double row[256];
    memset(mean, 0, sizeof mean);
    memset(form, 0, sizeof form);
    for (uint32_t p = 0; p < 512; p++) {
        for (uint32_t i = 0; i < s->k_width; i++)
            row[i] = (double)means[0][i];
        turn(s, row, p);
        for (uint32_t i = 0; i < s->k_width; i++)
            mean[i] += row[i] / 512;
    }
    for (uint32_t i = 0; i < s->k_width; i++) {
        means[0][i] = (float)mean[i];
        for (uint32_t j = 0; j < s->k_width; j++)
            moments[0][i * s->k_width + j] = i == j ? 1.0f : 0.0f;
    }
}

static void statistics_of_another_depth_are_worse_than_none(void **state)
{
    (void)state;
    enum { POSITIONS = 3500, SHALLOW = 200, DEEP = 3100 };
    shape s = shape_with("r4", "r4", true);
    s.kv_heads = s.group = 1;
    s.capacity = POSITIONS;
    s.recent_blocks = 0;
    text t = make_text(&s, POSITIONS, 8);
    /* The mean lies in pairs that have turned far at 3,100, and little within 512. */
    for (uint32_t i = 0; i < 64; i++)
        means[0][i] = i % 32 >= 22 && i % 32 <= 26 ? (i < 32 ? 3.0f : 1.0f) : 0.0f;
    fill_random(t.k, (uint64_t)POSITIONS * 64, 0.5, 8);
    for (uint32_t p = 0; p < POSITIONS; p++) {
        double row[64];
        for (uint32_t i = 0; i < 64; i++)
            row[i] = (double)means[0][i];
        turn(&s, row, p);
        for (uint32_t i = 0; i < 64; i++)
            t.k[p * 64 + i] += (float)row[i];
    }
    double shallow[3], deep[3]; /* turned, none, fixed */
    for (int n = 0; n < 3; n++) {
        if (n == 2) {
            fix_statistics(&s);
            s.dims = 0; /* what the store is told; the keys turn all the same */
        }
        s.calibrated = n != 1;
        rf_kv *kv = open_store(&s);
        for (uint32_t at = 0; at < POSITIONS; at += 50) {
            append_rows(kv, &s, &t, 0, at, 50, FORWARDS);
            assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_OK);
        }
        shallow[n] = deep[n] = 0;
        for (uint32_t q = 0; q < 16; q++) {
            shallow[n] += score_error(&s, &t, kv, SHALLOW, t.q + q * 64);
            deep[n] += score_error(&s, &t, kv, DEEP, t.q + q * 64);
        }
        rf_kv_close(kv);
    }
    if (getenv("RF_TEST_VERBOSE"))
        print_message("turned, none, fixed: %.3g %.3g %.3g at 200, %.3g %.3g %.3g at 3,100\n",
                      shallow[0], shallow[1], shallow[2], deep[0], deep[1], deep[2]);
    assert_true(shallow[2] < 0.7 * shallow[1]); /* where they were taken they help */
    assert_true(deep[2] > 1.1 * deep[1]);       /* and here they harm */
    assert_true(deep[0] < 0.5 * deep[1]);       /* turned ones go on helping */
    assert_true(deep[0] < 1.5 * shallow[0]);
    free_text(&t);
}

/* ---- bad input --------------------------------------------------------------------------- */

static void what_cannot_be_kept_is_refused_and_nothing_is_touched(void **state)
{
    (void)state;
    const float bad[] = {__builtin_nanf(""), __builtin_inff(), -__builtin_inff(), 1e30f, -65520.0f};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.capacity = 80;
        s.chunk = 8;
        s.endless = true;
        text t = make_text(&s, 150, 2);
        float *out = new_floats(150 * row_floats(&s));
        rf_kv *kv = open_store(&s);
        play_part(kv, &s, &t, 0, 0, 126, NULL, out);
        uint8_t *before = malloc(kv->own_bytes);
        assert_non_null(before);
        memcpy(before, kv, kv->own_bytes);
        bool is_wide = strcmp(s.k, "f32") == 0 || strcmp(s.k, "bf16") == 0;
        for (size_t b = 0; b < RF_ARRAY_COUNT(bad) - (is_wide ? 2 : 0); b++) {
            for (uint32_t n = 0; n < 4; n++) {
                uint64_t last = 5 * 2 * 64 - 1; /* of five tokens, of which the third begins 128 */
                float *rows = n < 2 ? t.k + 126 * 128 : t.v + 126 * 128;
                float *element = rows + (n % 2 ? last : 0), kept_value = *element;
                rf_error err = {0};
                *element = bad[b];
                assert_int_equal(
                    rf_kv_append(kv, 0, 0, t.k + 126 * 128, 128, t.v + 126 * 128, 128, 5, &err),
                    RF_ERR_RUNTIME);
                assert_string_equal(err.where, n < 2 ? "kv.layers[0].k" : "kv.layers[0].v");
                *element = kept_value;
                assert_memory_equal(before, kv, kv->own_bytes);
            }
        }
        free(before);
        free(out);
        rf_kv_close(kv);
        free_text(&t);
    }
}

static void the_largest_value_of_a_format_is_taken(void **state)
{
    (void)state;
    static const struct {
        const char *format;
        float largest, beyond;
    } cases[] = {{"f32", 0x1.fffffep127f, __builtin_inff()},
                 {"bf16", 0x1.fefffep127f, 0x1.ffp127f}, /* the tie goes to infinity */
                 {"f16", 65519.996f, 65520.0f},
                 {"r8", 65519.996f, 65520.0f},
                 {"r4", 65519.996f, 65520.0f},
                 {"q8_0", 65519.996f, 65520.0f},
                 {"q4_0", 65519.996f, 65520.0f}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        shape s = shape_with(cases[c].format, cases[c].format, false);
        s.kv_heads = s.group = 1;
        text t = make_text(&s, 40, 2);
        float *out = new_floats(40 * 64);
        rf_kv *kv = open_store(&s);
        for (uint32_t i = 0; i < 64; i++) /* all of one size: the rotated peak is 8 times it */
            t.v[i] = t.v[37 * 64 + i] = i % 2 ? -cases[c].largest : cases[c].largest;
        play_part(kv, &s, &t, 0, 0, 40, NULL, out);
        /* Sums of the largest floats overflow, of halves they do not. */
        for (uint32_t i = 0; c > 1 && i < 40 * 64; i++)
            assert_true(isfinite(out[i]));
        t.v[13] = cases[c].beyond;
        assert_int_equal(rf_kv_append(kv, 0, 0, t.k, 64, t.v, 64, 1, NULL), RF_ERR_RUNTIME);
        free(out);
        rf_kv_close(kv);
        free_text(&t);
    }
}

static void zeros_and_denormals_are_kept_without_a_nan(void **state)
{
    (void)state;
    static const float sizes[] = {0.0f, -0.0f, 1e-45f, 1e-40f, 0x1p-126f, 1e-30f, 0x1p-24f};
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (size_t n = 0; n < RF_ARRAY_COUNT(sizes) * 2; n++) {
            shape s = shape_with(formats[f], formats[f], n % 2);
            s.kv_heads = 1;
            text t = make_text(&s, 120, 2);
            memset(means, 0, sizeof means);
            for (uint32_t i = 0; i < 120 * 64; i++) {
                t.k[i] = sizes[n / 2] * (t.k[i] < 0 ? -1.0f : 1.0f);
                t.v[i] = sizes[n / 2] * (t.v[i] < 0 ? -1.0f : 1.0f);
            }
            float *out = play(&s, &t, NULL);
            for (uint64_t i = 0; i < 120 * row_floats(&s); i++) {
                if (!(fabsf(out[i]) <= 9 * fabsf(sizes[n / 2])))
                    fail_msg("%s, values of %g: element %llu is %g", s.k, (double)sizes[n / 2],
                             (unsigned long long)i, (double)out[i]);
            }
            free(out);
            free_text(&t);
        }
    }
}

static void statistics_that_cannot_be_are_refused(void **state)
{
    (void)state;
    shape s = shape_with("r4", "r4", true);
    text t = make_text(&s, 8, 1);
    rf_kv *kv = open_store(&s);
    rf_error err = {0};
    rf_kv_statistics good = {means[0], moments[0], RF_KV_BASE_LIMIT, -RF_KV_BASE_LIMIT};
    rf_kv_statistics statistics = good;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_OK);
    assert_int_equal(rf_kv_set_calibration(kv, 1, 0, &good, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_set_calibration(kv, 0, 2, &good, &err), RF_ERR_USAGE);
    statistics.k_base = RF_KV_BASE_LIMIT + 1;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &statistics, &err), RF_ERR_USAGE);
    statistics = good;
    statistics.v_base = -128;
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &statistics, &err), RF_ERR_USAGE);
    float kept_value = means[0][63];
    means[0][63] = __builtin_nanf("");
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    means[0][63] = kept_value;
    kept_value = moments[0][64 * 64 - 1];
    moments[0][64 * 64 - 1] = __builtin_inff();
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    moments[0][64 * 64 - 1] = kept_value;
    append_rows(kv, &s, &t, 0, 0, 8, FORWARDS);
    assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_OK);
    /* Rows that are there were made with other means. */
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_ERR_USAGE);
    assert_int_equal(rf_kv_clear(kv, 0, NULL), RF_OK);
    assert_int_equal(rf_kv_set_calibration(kv, 0, 0, &good, &err), RF_OK);
    rf_kv_close(kv);
    free_text(&t);
}

static void a_rope_that_does_not_fit_the_keys_is_refused(void **state)
{
    (void)state;
    static const struct {
        uint32_t dims;
        bool calibrated, has_frequencies;
        rf_status plan, open;
    } cases[] = {{66, true, true, RF_ERR_USAGE, RF_ERR_USAGE},
                 {63, true, true, RF_ERR_USAGE, RF_ERR_USAGE},
                 {64, true, false, RF_OK, RF_ERR_USAGE}, /* a plan turns nothing */
                 {64, true, true, RF_OK, RF_OK},
                 {0, true, false, RF_OK, RF_OK},
                 {66, false, false, RF_OK, RF_OK}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        shape s = shape_with("r4", "r4", cases[c].calibrated);
        rf_plan plan;
        rf_kv_layer layer;
        rf_error err = {0};
        rf_kv *kv = NULL;
        s.dims = cases[c].dims;
        rf_kv_config config = config_of(&s, &layer);
        if (!cases[c].has_frequencies)
            config.rope.frequencies = NULL;
        rf_plan_init(&plan, NULL, 0);
        assert_int_equal(rf_kv_plan(&plan, &config, &err), cases[c].plan);
        assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), cases[c].open);
        if (cases[c].open != RF_OK)
            assert_string_equal(err.where, "kv.rope");
        rf_kv_close(kv);
    }
}

/* ---- going back -------------------------------------------------------------------------- */

/* At every step a chunk of other rows first, which is forgotten again. */
static void an_aborted_append_changes_nothing_that_is_read(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t sinks = 0; sinks <= 4; sinks += 4) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.endless = true;
            s.capacity = 70;
            s.chunk = 9;
            s.sinks = sinks;
            text t = make_text(&s, 400, 6), other = make_text(&s, 400, 60);
            float *expected = play(&s, &t, NULL), *got = new_floats(400 * row_floats(&s));
            rf_kv *kv = open_store(&s);
            for (uint32_t at = 0; at < 390; at++) {
                append_rows(kv, &s, &other, 0, at, 9, FORWARDS);
                rf_kv_abort(kv, 0);
                play_part(kv, &s, &t, 0, at, at + 1, NULL, got);
            }
            assert_same(&s, got, expected, 0, 390, "after aborts");
            rf_kv_close(kv);
            free(got);
            free(expected);
            free_text(&t);
            free_text(&other);
        }
    }
}

static void append_part(rf_kv *kv, const shape *s, const text *t, uint32_t from, uint32_t to)
{
    for (uint32_t at = from; at < to; at += RF_MIN(to - at, s->chunk)) {
        append_rows(kv, s, t, 0, at, RF_MIN(to - at, s->chunk), FORWARDS);
        assert_int_equal(rf_kv_commit(kv, 0, NULL), RF_OK);
    }
}

/* Goes back from 200 to every length; where that is allowed the rest is played again. */
static void going_back_is_refused_where_recent_rows_are_gone_and_else_exact(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        for (uint32_t window = 0; window <= 40; window += 20) {
            shape s = shape_with(formats[f], formats[f], true);
            s.kv_heads = 1;
            s.capacity = 256;
            s.chunk = 8;
            s.recent_blocks = 1;
            s.window = window;
            s.group = 1;
            s.sinks = window == 20 ? 3 : 0;
            text t = make_text(&s, 232, 6), other = make_text(&s, 232, 61);
            float *expected = play(&s, &t, NULL), *got = new_floats(232 * row_floats(&s));
            for (uint32_t length = 1; length<200; length += length> 120 ? 1 : 9) {
                rf_kv *kv = open_store(&s);
                rf_error err = {0};
                append_part(kv, &s, &t, 0, length);
                append_part(kv, &s, &other, length, 200);
                memcpy(got, expected, length * row_floats(&s) * sizeof *got);
                rf_status status = rf_kv_truncate(kv, 0, length, &err);
                uint32_t seen = window && length + 1 > window ? length + 1 - window : 0;
                uint32_t rows = window ? window + 8 : 256; /* that turn over */
                uint32_t recent_rows = 64 + 16 < rows || s.sinks ? 64 + 16 : rows;
                seen = RF_MAX(seen, s.sinks);
                uint32_t recent = length / 32 < 1 ? 0 : (length / 32 - 1) * 32;
                bool is_there = rows >= 200 || seen >= 200 - rows;
                if (is_narrow(s.k) && recent >= s.sinks)
                    recent = RF_MAX(recent, seen);
                if (is_narrow(s.k)) /* while the sinks are near they are among the recent rows */
                    is_there &= recent + recent_rows >= 200;
                assert_int_equal(status, is_there ? RF_OK : RF_ERR_USAGE);
                assert_true(length < 192 || status == RF_OK); /* a chunk back is always there */
                assert_int_equal(rf_kv_length(kv, 0), is_there ? length : 200);
                if (is_there) {
                    play_part(kv, &s, &t, 0, length, 232, NULL, got);
                    assert_same(&s, got, expected, 0, 232, "went back");
                }
                rf_kv_close(kv);
            }
            free(got);
            free(expected);
            free_text(&t);
            free_text(&other);
        }
    }
}

/* A ring with sinks that has not turned over goes back to anywhere. */
static void sinks_do_not_keep_a_full_store_from_going_back(void **state)
{
    (void)state;
    shape s = shape_with("f16", "f16", false);
    s.sinks = 4;
    s.capacity = 64;
    text t = make_text(&s, 64, 6);
    for (uint32_t length = 1; length < 64; length++) {
        rf_kv *kv = open_store(&s);
        append_part(kv, &s, &t, 0, 64);
        assert_int_equal(rf_kv_truncate(kv, 0, length, NULL), RF_OK);
        rf_kv_close(kv);
    }
    free_text(&t);
}

/* A slot that gave up a part of the prefix that it shares goes on with rows of its own. */
static void a_holder_that_goes_back_into_its_prefix_has_its_own_rows(void **state)
{
    (void)state;
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.slots = 2;
        s.capacity = 130;
        text t = make_text(&s, 130, 6), other = make_text(&s, 130, 8);
        memcpy(other.k, t.k, 90 * 2 * 64 * sizeof(float)); /* they part at 90 */
        memcpy(other.v, t.v, 90 * 2 * 64 * sizeof(float));
        float *expected = play(&s, &other, NULL), *got = play(&s, &t, NULL),
              *owner = play(&s, &t, NULL);
        rf_kv *kv = open_store(&s);
        play_part(kv, &s, &t, 0, 0, 120, NULL, owner);
        assert_int_equal(rf_kv_share_prefix(kv, 0, 1, 100, NULL), RF_OK);
        assert_int_equal(rf_kv_truncate(kv, 1, 90, NULL), RF_OK);
        play_part(kv, &s, &other, 1, 90, 130, NULL, got);
        assert_same(&s, got, expected, 90, 130, "a holder that went back");
        memcpy(got, owner, 120 * row_floats(&s) * sizeof *got);
        play_part(kv, &s, &t, 0, 120, 130, NULL, got);
        assert_same(&s, got, owner, 120, 130, "the owner");
        rf_kv_close(kv);
        free(owner);
        free(got);
        free(expected);
        free_text(&t);
        free_text(&other);
    }
}

static void slots_do_not_know_each_other(void **state)
{
    (void)state;
    /* Far apart, so that what one keeps of its blocks would lie upon what another keeps. */
    for (size_t f = 0; f < RF_ARRAY_COUNT(formats); f++) {
        shape s = shape_with(formats[f], formats[f], true);
        s.endless = true;
        s.capacity = 90;
        s.chunk = 8;
        s.slots = 3;
        text t[3];
        float *expected[3], *got[3];
        for (uint32_t slot = 0; slot < 3; slot++) {
            t[slot] = make_text(&s, 600, 70 + slot);
            expected[slot] = play(&s, &t[slot], NULL);
            got[slot] = new_floats(600 * row_floats(&s));
        }
        rf_kv *kv = open_store(&s);
        uint32_t at[3] = {0};
        for (uint32_t step = 0; at[0] < 600 || at[1] < 600 || at[2] < 600; step++) {
            uint32_t slot = step * 7 % 3,
                     to = RF_MIN(at[slot] + 1 + step % 5 * (slot * 3 + 1), 600u);
            play_part(kv, &s, &t[slot], slot, at[slot], to, NULL, got[slot]);
            at[slot] = to;
        }
        assert_int_equal(
            rf_kv_clear(kv, 1, NULL),
            RF_OK); /* and once more, from the beginning, in the middle of the others */
        play_part(kv, &s, &t[2], 1, 0, 600, NULL, got[1]);
        assert_same(&s, got[1], expected[2], 0, 600, "a slot used again");
        assert_same(&s, got[0], expected[0], 0, 600, "slot 0");
        assert_same(&s, got[2], expected[2], 0, 600, "slot 2");
        assert_int_equal(rf_kv_length(kv, 0), 600);
        rf_kv_close(kv);
        for (uint32_t slot = 0; slot < 3; slot++) {
            free(expected[slot]);
            free(got[slot]);
            free_text(&t[slot]);
        }
    }
}

/* What an adapter event says: rows that are widened or expanded, the sinks among them. */
static void widened_bytes_are_those_of_the_positions_that_are_read(void **state)
{
    (void)state;
    static const struct {
        const char *k, *v;
        uint32_t bytes; /* of a position of a head: widths 64 and 32 */
    } cases[] = {{"f32", "f32", 0},  {"f16", "f16", 384}, {"f32", "f16", 128},  {"r4", "r4", 96},
                 {"r4", "f16", 384}, {"q8_0", "r3", 96},  {"bf16", "q4_0", 384}};
    for (size_t c = 0; c < RF_ARRAY_COUNT(cases); c++) {
        for (uint32_t sinks = 0; sinks <= 4; sinks += 4) {
            shape s = shape_with(cases[c].k, cases[c].v, false);
            s.v_width = 32;
            s.sinks = sinks;
            s.window = 30;
            rf_kv *kv = open_store(&s);
            rf_kv_attend job = {.heads = 4, .first_position = 100, .token_count = 7};
            uint32_t read = 100 + 7 - (100 + 1 - 30) + sinks;
            assert_int_equal(rf_kv_attend_widened_bytes(kv, &job), read * cases[c].bytes * 2);
            job.first_position = 2;
            assert_int_equal(rf_kv_attend_widened_bytes(kv, &job), 9 * cases[c].bytes * 2);
            rf_kv_close(kv);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_planned_is_what_is_kept_in_every_format_and_width),
        cmocka_unit_test(a_width_without_whole_blocks_is_refused),
        cmocka_unit_test(a_layer_is_allocated_by_its_parts_and_no_other),
        cmocka_unit_test(a_ring_that_wrapped_three_times_is_one_that_never_did),
        cmocka_unit_test(a_window_with_sinks_is_one_that_never_wrapped),
        cmocka_unit_test(the_polar_formats_wrap_and_chunk_like_the_others),
        cmocka_unit_test(any_chunks_and_any_order_of_units_give_the_same_bits),
        cmocka_unit_test(scalar_code_gives_the_same_bits),
        cmocka_unit_test(attention_is_what_the_stored_codes_say),
        cmocka_unit_test(finer_formats_are_nearer_to_the_truth),
        cmocka_unit_test(the_mean_of_a_block_is_the_average_of_turned_means),
        cmocka_unit_test(the_feedback_form_is_the_average_of_turned_moments),
        cmocka_unit_test(statistics_of_another_depth_are_worse_than_none),
        cmocka_unit_test(what_cannot_be_kept_is_refused_and_nothing_is_touched),
        cmocka_unit_test(the_largest_value_of_a_format_is_taken),
        cmocka_unit_test(zeros_and_denormals_are_kept_without_a_nan),
        cmocka_unit_test(statistics_that_cannot_be_are_refused),
        cmocka_unit_test(a_rope_that_does_not_fit_the_keys_is_refused),
        cmocka_unit_test(an_aborted_append_changes_nothing_that_is_read),
        cmocka_unit_test(going_back_is_refused_where_recent_rows_are_gone_and_else_exact),
        cmocka_unit_test(sinks_do_not_keep_a_full_store_from_going_back),
        cmocka_unit_test(a_holder_that_goes_back_into_its_prefix_has_its_own_rows),
        cmocka_unit_test(slots_do_not_know_each_other),
        cmocka_unit_test(widened_bytes_are_those_of_the_positions_that_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
