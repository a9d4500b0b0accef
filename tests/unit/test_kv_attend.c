/* tests/unit/test_kv_attend.c: attention over the rings: right against a reference in double, and
 * the same bits for any chunks, any order of units, any wrapping and any instruction set.
 *
 * A case is a sequence of random keys, values and queries. It is played into a store in chunks, as
 * a step does it: append, attend, commit. What comes out may depend on the case alone.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv/kv.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- a case ------------------------------------------------------------------------------ */

typedef struct attention {
    uint32_t kv_heads, group, k_width, v_width, window, positions;
    const char *format;
    float *k, *v, *q; /* owned: [position][head][width] */
} attention;

static uint64_t random_u64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    return z ^ (z >> 31);
}

static float *random_rows(uint64_t count, uint64_t *state)
{
    float *rows = malloc(count * sizeof *rows);
    assert_non_null(rows);
    for (uint64_t i = 0; i < count; i++)
        rows[i] = (float)((double)(random_u64(state) >> 40) / (1 << 23) - 1.0);
    return rows;
}

static void fill_case(attention *c, uint64_t seed)
{
    c->k = random_rows((uint64_t)c->positions * c->kv_heads * c->k_width, &seed);
    c->v = random_rows((uint64_t)c->positions * c->kv_heads * c->v_width, &seed);
    c->q = random_rows((uint64_t)c->positions * c->kv_heads * c->group * c->k_width, &seed);
    /* Large queries: scores of several units, so that the maximum matters. */
    for (uint64_t i = 0; i < (uint64_t)c->positions * c->kv_heads * c->group * c->k_width; i++)
        c->q[i] *= 4.0f;
}

static void free_case(attention *c)
{
    free(c->k);
    free(c->v);
    free(c->q);
}

static uint64_t out_count(const attention *c)
{
    return (uint64_t)c->positions * c->kv_heads * c->group * c->v_width;
}

/* ---- playing it -------------------------------------------------------------------------- */

typedef enum unit_order { ALL_AT_ONCE, BACKWARDS, IN_TWO_PARTS } unit_order;

typedef struct playing {
    uint64_t capacity;
    uint32_t chunk;         /* of the store: decides where a sliding ring wraps */
    const uint32_t *chunks; /* lengths, repeated; NULL: one by one */
    uint32_t chunk_count;
    unit_order order;
    uint32_t cpu_mask;
} playing;

static void attend(const rf_kv *kv, rf_kv_attend *job, unit_order order, void *scratch,
                   uint64_t scratch_bytes)
{
    /* All at once walks through the context, the others share it out where there is enough. */
    uint64_t parts_bytes = order == ALL_AT_ONCE ? 0 : rf_kv_attend_parts_bytes(kv, job);
    if (parts_bytes > 0) {
        job->parts = aligned_alloc(RF_CACHE_LINE, parts_bytes);
        assert_non_null(job->parts);
        memset(job->parts, 0xFF, parts_bytes);
    }
    uint32_t units = rf_kv_attend_units(kv, job);
    /* Scratch may hold anything; NaN would spread from every element that is used unwritten. */
    memset(scratch, 0xFF, scratch_bytes);
    if (order == ALL_AT_ONCE)
        rf_kv_attend_run(kv, job, 0, units, scratch);
    for (uint32_t unit = units; order == BACKWARDS && unit-- > 0;) {
        rf_kv_attend_run(kv, job, unit, unit + 1, scratch);
        memset(scratch, 0xFF, scratch_bytes);
    }
    if (order == IN_TWO_PARTS) {
        rf_kv_attend_run(kv, job, units / 3, units, scratch);
        rf_kv_attend_run(kv, job, 0, units / 3, scratch);
    }
    memset(scratch, 0xFF, scratch_bytes);
    for (uint32_t join = job->heads * job->token_count; job->parts && join-- > 0;)
        rf_kv_attend_join(kv, job, join, join + 1, scratch);
    free(job->parts);
}

/* Fills out[out_count]. */
static void play(const attention *c, const playing *p, float *out)
{
    rf_kv_layer layer = {c->kv_heads, c->k_width, c->v_width, c->window, c->format, c->format, 0};
    rf_kv_config config;
    rf_error err = {0};
    rf_kv *kv = NULL;
    rf_kv_config_init(&config);
    config.layers = &layer;
    config.layer_count = 1;
    config.capacity = p->capacity;
    config.chunk = p->chunk;
    if (rf_kv_open(NULL, &config, &kv, &err) != RF_OK)
        fail_msg("%s: %s", err.where, err.what);
    rf_kv_set_cpu(kv, p->cpu_mask);
    uint64_t scratch_bytes = rf_kv_scratch_bytes(c->k_width, c->v_width, c->group);
    assert_int_equal(scratch_bytes % RF_CACHE_LINE, 0);
    void *scratch = aligned_alloc(RF_CACHE_LINE, scratch_bytes);
    assert_non_null(scratch);
    uint64_t k_stride = c->kv_heads * c->k_width, v_stride = c->kv_heads * c->v_width;
    uint32_t at = 0;
    for (uint32_t n = 0; at < c->positions; n++) {
        uint32_t count = p->chunks ? p->chunks[n % p->chunk_count] : 1;
        count = RF_MIN(count, c->positions - at);
        assert_int_equal(rf_kv_append(kv, 0, 0, c->k + at * k_stride, k_stride,
                                      c->v + at * v_stride, v_stride, count, &err),
                         RF_OK);
        rf_kv_attend job = {.heads = c->kv_heads * c->group,
                            .first_position = at,
                            .token_count = count,
                            .q = c->q + at * k_stride * c->group,
                            .q_stride = k_stride * c->group,
                            .out = out + at * v_stride * c->group,
                            .out_stride = v_stride * c->group,
                            .scale = 1.0f / sqrtf((float)c->k_width)};
        attend(kv, &job, p->order, scratch, scratch_bytes);
        assert_int_equal(rf_kv_commit(kv, 0, &err), RF_OK);
        at += count;
    }
    free(scratch);
    rf_kv_close(kv);
}

static void assert_same_bits(const attention *c, const playing *p, const float *expected,
                             const char *what)
{
    float *out = malloc(out_count(c) * sizeof *out);
    assert_non_null(out);
    play(c, p, out);
    for (uint64_t i = 0; i < out_count(c); i++) {
        if (memcmp(&out[i], &expected[i], sizeof out[i]) != 0) {
            uint64_t row = c->kv_heads * c->group * c->v_width;
            fail_msg("%s: group %u, widths %u and %u, window %u, %s: position %llu, element %llu: "
                     "%.9g is not %.9g",
                     what, c->group, c->k_width, c->v_width, c->window, c->format,
                     (unsigned long long)(i / row), (unsigned long long)(i % row), (double)out[i],
                     (double)expected[i]);
        }
    }
    free(out);
}

/* ---- the reference ----------------------------------------------------------------------- */

/* What the store gives back of a value. */
static double kept(const attention *c, float value)
{
    bool is_half = strcmp(c->format, "f16") == 0;
    return is_half ? (double)rf_f16_to_f32(rf_f32_to_f16(value)) : (double)value;
}

static void reference_row(const attention *c, uint32_t position, uint32_t head, double *out)
{
    static double scores[2048];
    uint32_t kv_head = head / c->group;
    uint32_t first = c->window && position + 1 > c->window ? position + 1 - c->window : 0;
    const float *q = c->q + ((uint64_t)position * c->kv_heads * c->group + head) * c->k_width;
    double largest = -INFINITY, total = 0;
    for (uint32_t j = first; j <= position; j++) {
        const float *k = c->k + ((uint64_t)j * c->kv_heads + kv_head) * c->k_width;
        double sum = 0;
        for (uint32_t d = 0; d < c->k_width; d++)
            sum += (double)q[d] * kept(c, k[d]);
        scores[j] = sum / sqrt(c->k_width);
        largest = fmax(largest, scores[j]);
    }
    memset(out, 0, c->v_width * sizeof *out);
    for (uint32_t j = first; j <= position; j++) {
        double weight = exp(scores[j] - largest);
        const float *v = c->v + ((uint64_t)j * c->kv_heads + kv_head) * c->v_width;
        total += weight;
        for (uint32_t d = 0; d < c->v_width; d++)
            out[d] += weight * kept(c, v[d]);
    }
    for (uint32_t d = 0; d < c->v_width; d++)
        out[d] /= total;
}

/* Values are below 1; the largest error that was seen is below 8e-7. */
#define TOLERANCE 2e-6

static void assert_near_reference(const attention *c, const float *out)
{
    double expected[256];
    for (uint32_t position = 0; position < c->positions; position++) {
        for (uint32_t head = 0; head < c->kv_heads * c->group; head++) {
            reference_row(c, position, head, expected);
            for (uint32_t d = 0; d < c->v_width; d++) {
                double got = (double)*out++;
                if (!(fabs(got - expected[d]) <= TOLERANCE))
                    fail_msg("group %u, widths %u and %u, window %u, %s: position %u, head %u: "
                             "%.9g is not %.9g",
                             c->group, c->k_width, c->v_width, c->window, c->format, position, head,
                             got, expected[d]);
            }
        }
    }
}

/* ---- the tests --------------------------------------------------------------------------- */

static const uint32_t groups[] = {1, 2, 3, 8};
static const uint32_t widths[][2] = {{8, 8},     {16, 16}, {64, 64},  {80, 80},
                                     {128, 128}, {8, 128}, {128, 80}, {64, 16}};
static const char *const formats[] = {"f32", "f16"};

/* The n-th case: every group with every width; windows and formats take turns. */
static bool make_case(uint32_t n, uint32_t positions, attention *c)
{
    static const uint32_t windows[] = {0, 70, 1, 64, 0, 23};
    if (n >= RF_ARRAY_COUNT(groups) * RF_ARRAY_COUNT(widths))
        return false;
    const uint32_t *width = widths[n / RF_ARRAY_COUNT(groups)];
    *c = (attention){.kv_heads = 1 + n % 2,
                     .group = groups[n % RF_ARRAY_COUNT(groups)],
                     .k_width = width[0],
                     .v_width = width[1],
                     .window = windows[n % RF_ARRAY_COUNT(windows)],
                     .positions = positions,
                     .format = formats[(n / 3) % 2]};
    fill_case(c, n);
    return true;
}

static float *play_one_by_one(const attention *c)
{
    float *out = malloc(out_count(c) * sizeof *out);
    assert_non_null(out);
    playing p = {.capacity = c->positions, .chunk = 1, .cpu_mask = RF_CPU_ALL};
    play(c, &p, out);
    return out;
}

static void attention_is_what_softmax_says(void **state)
{
    (void)state;
    attention c;
    for (uint32_t n = 0; make_case(n, 150, &c); n++) {
        float *out = play_one_by_one(&c);
        assert_near_reference(&c, out);
        free(out);
        free_case(&c);
    }
}

static void any_chunks_and_any_order_of_units_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t mixed[] = {1, 70, 3, 64, 2, 9}, whole[] = {150};
    attention c;
    for (uint32_t n = 0; make_case(n, 150, &c); n++) {
        float *expected = play_one_by_one(&c);
        playing p = {.capacity = 150, .chunk = 150, .cpu_mask = RF_CPU_ALL};
        for (int order = ALL_AT_ONCE; order <= IN_TWO_PARTS; order++) {
            p.order = (unit_order)order;
            p.chunks = mixed;
            p.chunk_count = RF_ARRAY_COUNT(mixed);
            assert_same_bits(&c, &p, expected, "mixed chunks");
            p.chunks = whole;
            p.chunk_count = 1;
            assert_same_bits(&c, &p, expected, "one chunk");
        }
        free(expected);
        free_case(&c);
    }
}

static void every_chunk_length_from_1_to_70_gives_the_same_bits(void **state)
{
    (void)state;
    attention c = {
        .kv_heads = 2, .group = 3, .k_width = 16, .v_width = 8, .positions = 141, .format = "f16"};
    fill_case(&c, 7);
    float *expected = play_one_by_one(&c);
    for (uint32_t length = 1; length <= 70; length++) {
        playing p = {141, length, &length, 1, (unit_order)(length % 3), RF_CPU_ALL};
        assert_same_bits(&c, &p, expected, "a length");
    }
    free(expected);
    free_case(&c);
}

/* A window's ring wraps when a chunk of the store is small, and never when it is the whole. */
static void a_wrapped_ring_and_a_linear_one_give_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t windows[] = {1, 5, 40, 64, 65, 100};
    for (uint32_t n = 0; n < RF_ARRAY_COUNT(windows) * 4; n++) {
        attention c = {.kv_heads = 2,
                       .group = groups[n % 4],
                       .k_width = 16,
                       .v_width = 24,
                       .window = windows[n / 4],
                       .positions = 260,
                       .format = formats[n % 2]};
        fill_case(&c, n);
        float *expected = malloc(out_count(&c) * sizeof *expected);
        assert_non_null(expected);
        static const uint32_t chunks[] = {7, 1, 16, 3};
        playing linear = {.capacity = 260, .chunk = 260, .cpu_mask = RF_CPU_ALL};
        playing wrapped = {260, 16, chunks, 4, ALL_AT_ONCE, RF_CPU_ALL};
        play(&c, &linear, expected);
        assert_near_reference(&c, expected);
        assert_same_bits(&c, &wrapped, expected, "wrapped");
        wrapped.chunk = 17;
        assert_same_bits(&c, &wrapped, expected, "wrapped elsewhere");
        free(expected);
        free_case(&c);
    }
}

static void scalar_code_gives_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {33, 1, 4};
    attention c;
    for (uint32_t n = 0; make_case(n, 100, &c); n++) {
        float *expected = play_one_by_one(&c);
        playing p = {100, 33, chunks, RF_ARRAY_COUNT(chunks), ALL_AT_ONCE, RF_CPU_SCALAR};
        assert_same_bits(&c, &p, expected, "scalar");
        free(expected);
        free_case(&c);
    }
}

/* More query heads of a group than a tile has queries. */
static void a_group_wider_than_a_tile_is_served(void **state)
{
    (void)state;
    static const uint32_t chunks[] = {5, 2};
    attention c = {
        .kv_heads = 1, .group = 100, .k_width = 8, .v_width = 8, .positions = 70, .format = "f32"};
    fill_case(&c, 3);
    float *expected = play_one_by_one(&c);
    playing p = {70, 5, chunks, 2, BACKWARDS, RF_CPU_ALL};
    assert_near_reference(&c, expected);
    assert_same_bits(&c, &p, expected, "wide group");
    free(expected);
    free_case(&c);
}

/* A context of several parts: one tile that walks through them, or units of their own. */
static void a_context_that_is_shared_out_gives_the_same_bits(void **state)
{
    (void)state;
    static const uint32_t ones[] = {1510, 1, 1, 3, 8, 4, 2, 10, 1}, whole[] = {1540};
    static const uint32_t windows[] = {0, 600, 1100, 513};
    for (uint32_t n = 0; n < 8; n++) {
        attention c = {.kv_heads = 1 + n % 3,
                       .group = groups[n % 4],
                       .k_width = 16,
                       .v_width = 24,
                       .window = windows[n % 4],
                       .positions = 1540,
                       .format = formats[n / 4]};
        fill_case(&c, n);
        float *expected = malloc(out_count(&c) * sizeof *expected);
        assert_non_null(expected);
        playing p = {1540, 1540, whole, 1, ALL_AT_ONCE, RF_CPU_ALL};
        play(&c, &p, expected);
        if (n == 1)
            assert_near_reference(&c, expected);
        p.chunks = ones;
        p.chunk_count = RF_ARRAY_COUNT(ones);
        for (int order = ALL_AT_ONCE; order <= IN_TWO_PARTS; order++) {
            p.order = (unit_order)order;
            assert_same_bits(&c, &p, expected, "shared out");
        }
        free(expected);
        free_case(&c);
    }
}

/* What the plan holds for a token is what the store may ask for. */
static void parts_are_as_large_as_planned(void **state)
{
    (void)state;
    static const uint32_t windows[] = {0, 1, 511, 512, 513, 700, 5000};
    for (uint32_t w = 0; w < RF_ARRAY_COUNT(windows); w++) {
        rf_kv_layer layer = {3, 16, 40, windows[w], "f16", "r4", 0};
        rf_kv_config config;
        rf_error err = {0};
        rf_kv *kv = NULL;
        rf_kv_config_init(&config);
        config.layers = &layer;
        config.layer_count = 1;
        config.capacity = 5000;
        config.chunk = 8;
        assert_int_equal(rf_kv_open(NULL, &config, &kv, &err), RF_OK);
        uint64_t seen = windows[w] ? windows[w] : 5000, largest = 0;
        uint64_t planned = rf_kv_parts_bytes(seen, 40, 7, 3);
        for (uint32_t at = 0; at < 4990; at++) {
            for (uint32_t count = 1; count <= RF_KV_SPLIT_TOKENS + 1; count++) {
                rf_kv_attend job = {.heads = 21, .first_position = at, .token_count = count};
                uint64_t bytes = rf_kv_attend_parts_bytes(kv, &job);
                assert_true(bytes <= count * planned);
                assert_true(bytes == 0 || count <= RF_KV_SPLIT_TOKENS);
                largest = RF_MAX(largest, bytes);
            }
        }
        assert_true(largest > 0);
        rf_kv_close(kv);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_context_that_is_shared_out_gives_the_same_bits),
        cmocka_unit_test(parts_are_as_large_as_planned),
        cmocka_unit_test(attention_is_what_softmax_says),
        cmocka_unit_test(any_chunks_and_any_order_of_units_give_the_same_bits),
        cmocka_unit_test(every_chunk_length_from_1_to_70_gives_the_same_bits),
        cmocka_unit_test(a_wrapped_ring_and_a_linear_one_give_the_same_bits),
        cmocka_unit_test(scalar_code_gives_the_same_bits),
        cmocka_unit_test(a_group_wider_than_a_tile_is_served),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
