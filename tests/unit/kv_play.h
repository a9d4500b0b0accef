/* tests/unit/kv_play.h: a sequence of keys, values and queries, played into a store as a step does
 * it: append, attend, commit; in any chunks and any order of units.
 *
 * Keys turn with their position, as RoPE makes them, so that a calibration has something to take
 * away. Inline, so that a test that needs only some of it compiles without a word.
 */
#ifndef RF_TEST_KV_PLAY_H
#define RF_TEST_KV_PLAY_H

#include "kv/store.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const formats[] = {"f32", "f16", "bf16", "q8_0", "q4_0",
                                      "r8",  "r6",  "r5",   "r4",   "r3"};
static const char *const mixes[][2] = {{"r8", "r4"},   {"f16", "r4"}, {"r4", "f16"},
                                       {"q8_0", "r3"}, {"r6", "r5"},  {"f32", "q4_0"},
                                       {"r3", "q8_0"}, {"r4", "r8"}};

static const char *const polar[] = {"turbo4", "turbo3", "turbo2", "turbo4q", "turbo3q"};

static inline bool is_blocked(const char *format) /* by 32 elements, as GGML's */
{
    return format[0] == 'q';
}

static inline bool is_narrow(const char *format) /* keeps the newest rows as r8 too */
{
    return format[0] == 'r' && format[1] < '8';
}

static const uint32_t widths[] = {8, 16, 24, 64, 80, 96, 112, 128, 192, 256};

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

static inline shape shape_with(const char *k, const char *v, bool calibrated)
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

static inline uint64_t random_u64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

static inline double random_unit(uint64_t *state) /* [-1, 1) */
{
    return (double)(random_u64(state) >> 40) / (1 << 23) - 1.0;
}

static inline float *new_floats(uint64_t count)
{
    float *values = calloc(count, sizeof *values);
    assert_non_null(values);
    return values;
}

static inline void fill_random(float *values, uint64_t count, double size, uint64_t seed)
{
    for (uint64_t i = 0; i < count; i++)
        values[i] = (float)(size * random_unit(&seed));
}

/* The elements of pair i of a key, written down again here: the store's own is under test. */
static inline void pair_elements(const shape *s, uint32_t i, uint32_t *a, uint32_t *b)
{
    bool is_split = i < s->dims / 2 && !s->interleaved;
    *a = is_split ? i : 2 * i;
    *b = is_split ? i + s->dims / 2 : 2 * i + 1;
}

static inline double frequency_of(const shape *s, uint32_t i)
{
    return i < s->dims / 2 ? frequencies[i] : 0.0;
}

/* Turns a row to its position. */
static inline void turn(const shape *s, double *row, double position)
{
    for (uint32_t i = 0; i < s->k_width / 2; i++) {
        uint32_t a, b;
        pair_elements(s, i, &a, &b);
        double angle = frequency_of(s, i) * position, x = row[a], y = row[b];
        row[a] = x * cos(angle) - y * sin(angle);
        row[b] = x * sin(angle) + y * cos(angle);
    }
}

static inline void fill_statistics(const shape *s)
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

static inline text make_text(const shape *s, uint32_t positions, uint64_t seed)
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

static inline void free_text(text *t)
{
    free(t->k);
    free(t->v);
    free(t->q);
    free(t->q_sink);
}

static inline uint64_t row_floats(const shape *s) /* of one position's output */
{
    return (uint64_t)s->kv_heads * s->group * s->v_width;
}

/* ---- a store ----------------------------------------------------------------------------- */

static inline rf_kv_config config_of(const shape *s, rf_kv_layer *layer)
{
    rf_kv_config config;
    *layer = (rf_kv_layer){.kv_heads = s->kv_heads,
                           .k_width = s->k_width,
                           .v_width = s->v_width,
                           .window = s->window,
                           .k_format = s->k,
                           .v_format = s->v};
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

static inline void calibrate(rf_kv *kv, const shape *s)
{
    rf_error err = {0};
    for (uint32_t head = 0; s->calibrated && head < s->kv_heads; head++) {
        rf_kv_statistics statistics = {means[head], moments[head], 3, 3};
        if (rf_kv_set_calibration(kv, 0, head, &statistics, &err) != RF_OK)
            fail_msg("%s: %s", err.where, err.what);
    }
}

static inline rf_kv *open_store(const shape *s)
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

static inline void *dirty_scratch(const shape *s, uint64_t *bytes)
{
    *bytes = rf_kv_scratch_bytes(s->k_width, s->v_width, s->group);
    assert_int_equal(*bytes % RF_CACHE_LINE, 0);
    void *scratch = aligned_alloc(RF_CACHE_LINE, *bytes);
    assert_non_null(scratch);
    memset(scratch, 0xFF, *bytes);
    return scratch;
}

static inline void append_rows(rf_kv *kv, const shape *s, const text *t, uint32_t slot, uint32_t at,
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
static inline void attend_rows(const rf_kv *kv, const shape *s, const text *t, uint32_t slot,
                               uint32_t at, uint32_t count, unit_order order, float *out)
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
    /* Backwards and in two parts also share out the context, where there is enough of it. */
    uint64_t parts_bytes = order == FORWARDS ? 0 : rf_kv_attend_parts_bytes(kv, &job);
    if (parts_bytes > 0) {
        job.parts = aligned_alloc(RF_CACHE_LINE, parts_bytes);
        assert_non_null(job.parts);
        memset(job.parts, 0xFF, parts_bytes);
    }
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
    memset(scratch, 0xFF, bytes);
    for (uint32_t join = job.heads * count; job.parts && join-- > 0;)
        rf_kv_attend_join(kv, &job, join, join + 1, scratch);
    free(job.parts);
    free(scratch);
}

typedef struct playing {
    const uint32_t *chunks; /* lengths, repeated; NULL: one by one */
    uint32_t chunk_count;
    unit_order order;
} playing;

/* Plays positions [from, to) of the text; out is that of position 0. */
static inline void play_part(rf_kv *kv, const shape *s, const text *t, uint32_t slot, uint32_t from,
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

static inline float *play(const shape *s, const text *t, const playing *p)
{
    float *out = new_floats(t->positions * row_floats(s));
    rf_kv *kv = open_store(s);
    play_part(kv, s, t, 0, 0, t->positions, p, out);
    rf_kv_close(kv);
    return out;
}

static inline void assert_same(const shape *s, const float *got, const float *expected,
                               uint32_t from, uint32_t to, const char *what)
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

#endif
