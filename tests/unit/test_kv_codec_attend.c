/* tests/unit/test_kv_codec_attend.c: attention on the codes, against doubles and between sets. */
#include "kv_codec_test.h"

/* ---- attention ----------------------------------------------------------------------------- */

/* In scratch that may hold anything. */
static void attend_by(const rf_kernels *kernels, const rf_attend *job)
{
    const uint64_t bytes = rf_attend_scratch_bytes(job->k.width, job->v.width);
    rf_attend held = *job;
    held.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
    assert_non_null(held.scratch);
    memset(held.scratch, 0xFF, bytes);
    kernels->attend(&held);
    free(held.scratch);
}

typedef struct attention {
    rf_attend job;
    rf_kv_shape k, v;
    float *out_start;
} attention;

static attention attention_of(rf_kv_code kc, rf_kv_code vc, uint32_t kw, uint32_t vw,
                              uint32_t count, uint32_t queries, uint64_t seed)
{
    const rf_kv_kernels scalar = scalar_kernels();
    attention t = {.k = shape_of(kc, kw), .v = shape_of(vc, vw)};
    int16_t *q = malloc(2 * (size_t)kw * queries);
    float *q_scale = malloc(4 * queries), *bias = malloc(4 * queries);
    rf_attend_range *visible = malloc(sizeof *visible * queries);
    /* Rows side by side, or with something between them, as r8 rows have their scales. */
    const size_t k_stride = kw + seed % 3, v_stride = vw + seed % 2;
    int8_t *k = malloc(k_stride * count), *v = malloc(v_stride * count);
    float *ks = malloc(4 * (size_t)t.k.span_count * count);
    float *vs = malloc(4 * (size_t)t.v.span_count * count);
    uint8_t *row = malloc(RF_MAX(t.k.row_bytes, t.v.row_bytes));
    float x[WIDTH_MAX];
    for (uint32_t i = 0; i < queries; i++) {
        fill_gauss(x, kw, seed + i * 7919, 2);
        scalar.query(x, kw, q + (size_t)i * kw, &q_scale[i]);
        bias[i] = (float)gauss(&seed);
        const uint32_t part = (uint32_t)(next_random(&seed) % 4);
        visible[i].first = part == 1 ? count / 3 : 0;
        visible[i].last = part == 2 ? count / 2 : (part == 3 && i % 2 ? 0 : count);
        if (i % 3 && part) {
            visible[i] = visible[i - 1];
        }
    }
    for (uint32_t j = 0; j < count; j++) {
        fill_gauss(x, kw, seed + j * 104729, 1);
        scalar.encode(&t.k, x, NULL, 3, row);
        scalar.expand(&t.k, row, 1, 3, k + j * k_stride, ks + (size_t)j * t.k.span_count);
        fill_gauss(x, vw, seed + j * 1299709, 1);
        scalar.encode(&t.v, x, NULL, 3, row);
        scalar.expand(&t.v, row, 1, 3, v + j * v_stride, vs + (size_t)j * t.v.span_count);
    }
    free(row);
    t.job = (rf_attend){.q_codes = q,
                        .q_scale = q_scale,
                        .bias = bias,
                        .q_stride = kw,
                        .query_count = queries,
                        .visible = visible,
                        .k = {k, k_stride, ks, t.k.span_count, kw, RF_ATTEND_INT8},
                        .v = {v, v_stride, vs, t.v.span_count, vw, RF_ATTEND_INT8},
                        .scale = 1 / sqrtf((float)kw),
                        .state = malloc(8 * queries),
                        .out = malloc(4 * ((size_t)(queries - 1) * (vw + 3) + vw)),
                        .out_stride = vw + 3};
    return t;
}

static void attention_start(attention *t)
{
    for (uint32_t i = 0; i < t->job.query_count; i++) {
        t->job.state[2 * i] = -INFINITY;
        t->job.state[2 * i + 1] = 0;
        memset(t->job.out + i * t->job.out_stride, 0, 4 * (size_t)t->job.v.width);
    }
}

static void attention_free(attention *t)
{
    free((void *)(uintptr_t)t->job.q_codes);
    free((void *)(uintptr_t)t->job.q_scale);
    free((void *)(uintptr_t)t->job.bias);
    free((void *)(uintptr_t)t->job.visible);
    free((void *)(uintptr_t)t->job.k.rows);
    free((void *)(uintptr_t)t->job.k.scale);
    free((void *)(uintptr_t)t->job.v.rows);
    free((void *)(uintptr_t)t->job.v.scale);
    free(t->job.state);
    free(t->job.out);
}

static const struct pair {
    rf_kv_code k, v;
    uint32_t kw, vw;
} pairs[] = {
    {RF_KV_CODE_R8, RF_KV_CODE_R8, 64, 64},       {RF_KV_CODE_R4, RF_KV_CODE_R4, 64, 64},
    {RF_KV_CODE_R6, RF_KV_CODE_R3, 128, 64},      {RF_KV_CODE_R5, RF_KV_CODE_R4, 80, 80},
    {RF_KV_CODE_R4, RF_KV_CODE_R8, 72, 40},       {RF_KV_CODE_R8, RF_KV_CODE_R6, 96, 112},
    {RF_KV_CODE_Q8_0, RF_KV_CODE_Q4_0, 192, 128}, {RF_KV_CODE_R3, RF_KV_CODE_R5, 256, 256},
    {RF_KV_CODE_R8, RF_KV_CODE_R4, 8, 16},        {RF_KV_CODE_R6, RF_KV_CODE_R8, 112, 320},
};

static void check_against_doubles(const rf_kernels *kernels)
{
    for (size_t p = 0; p < RF_ARRAY_COUNT(pairs); p++) {
        attention t = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw, 37, 5, p);
        const rf_attend *j = &t.job;
        const int8_t *k = j->k.rows, *v = j->v.rows;
        attention_start(&t);
        attend_by(kernels, j);
        attend_by(kernels, j); /* a second block: the running maximum and sums go on */
        for (uint32_t i = 0; i < j->query_count; i++) {
            double out[WIDTH_MAX] = {0}, sum = 0;
            for (uint32_t at = j->visible[i].first; at < j->visible[i].last; at++) {
                double dot = 0;
                for (uint32_t d = 0; d < j->k.width; d++) {
                    dot += (double)j->q_codes[i * j->q_stride + d] * k[at * j->k.stride + d] *
                           (double)j->k.scale[at * j->k.spans + d / t.k.span];
                }
                const double w =
                    exp(dot * (double)j->q_scale[i] * (double)j->scale + (double)j->bias[i]);
                sum += w;
                for (uint32_t d = 0; d < j->v.width; d++) {
                    out[d] += w * v[at * j->v.stride + d] *
                              (double)j->v.scale[at * j->v.spans + d / t.v.span];
                }
            }
            for (uint32_t d = 0; d < j->v.width; d++) {
                const double got = (double)j->out[i * j->out_stride + d];
                if (sum == 0) {
                    assert_true(got == 0 && j->state[2 * i + 1] == 0);
                } else {
                    assert_true(fabs(got / (double)j->state[2 * i + 1] - out[d] / sum) < 5e-6);
                }
            }
        }
        attention_free(&t);
    }
}

static void attention_is_that_of_a_double_reference(void **state)
{
    (void)state;
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    check_against_doubles(&scalar);
    for_each_set(check_against_doubles);
}

static void check_against_scalar(const rf_kernels *kernels)
{
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    static const uint32_t counts[] = {1, 2, 7, 8, 15, 16, 17, 33, 63, 64};
    for (size_t p = 0; p < RF_ARRAY_COUNT(pairs); p++) {
        for (size_t c = 0; c < RF_ARRAY_COUNT(counts); c++) {
            const uint32_t queries = 1 + (uint32_t)(p + c) % 11;
            attention a = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw, counts[c],
                                       queries, 7 * p + c);
            attention b = attention_of(pairs[p].k, pairs[p].v, pairs[p].kw, pairs[p].vw, counts[c],
                                       queries, 7 * p + c);
            attention_start(&a);
            attention_start(&b);
            for (int twice = 0; twice < 2; twice++) {
                attend_by(&scalar, &a.job);
                attend_by(kernels, &b.job);
            }
            assert_memory_equal(a.job.state, b.job.state, 8 * queries);
            for (uint32_t i = 0; i < queries; i++) {
                assert_memory_equal(a.job.out + i * a.job.out_stride,
                                    b.job.out + i * b.job.out_stride, 4 * pairs[p].vw);
            }
            attention_free(&a);
            attention_free(&b);
        }
    }
}

static void attention_has_the_same_bits_in_every_set(void **state)
{
    (void)state;
    for_each_set(check_against_scalar);
}

/* A query's bits do not depend on who goes with it, nor on positions that it does not see. */
static void check_company(const rf_kernels *kernels)
{
    attention t = attention_of(RF_KV_CODE_R4, RF_KV_CODE_R5, 64, 80, 50, 9, 12);
    rf_attend_range *visible = malloc(sizeof *visible * 9);
    float together[9][82];
    for (uint32_t i = 0; i < 9; i++) {
        visible[i] = (rf_attend_range){3, 41 + (i > 4)};
    }
    rf_attend job = t.job;
    job.visible = visible;
    attention_start(&t);
    attend_by(kernels, &job);
    for (uint32_t i = 0; i < 9; i++) {
        memcpy(together[i], job.out + i * job.out_stride, 80 * 4);
        memcpy(together[i] + 80, job.state + 2 * i, 8);
    }
    attention_start(&t);
    for (uint32_t i = 0; i < 9; i++) { /* alone, and only with the rows it sees */
        rf_attend one = job;
        const rf_attend_range range = {3, visible[i].last};
        one.q_codes += i * one.q_stride;
        one.q_scale += i;
        one.bias += i;
        one.query_count = 1;
        one.visible = &range;
        one.state += 2 * i;
        one.out += i * one.out_stride;
        attend_by(kernels, &one);
        assert_memory_equal(together[i], one.out, 80 * 4);
        assert_memory_equal(together[i] + 80, one.state, 8);
    }
    /* bias NULL is bias 0 */
    float none[9] = {0}, first[80];
    attention_start(&t);
    job.bias = NULL;
    attend_by(kernels, &job);
    memcpy(first, job.out, sizeof first);
    attention_start(&t);
    job.bias = none;
    attend_by(kernels, &job);
    assert_memory_equal(first, job.out, sizeof first);
    free(visible);
    attention_free(&t);
}

static void attention_of_a_query_is_its_own(void **state)
{
    (void)state;
    rf_kernels scalar;
    rf_kernels_scalar(&scalar);
    check_company(&scalar);
    for_each_set(check_company);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_that_of_a_double_reference),
        cmocka_unit_test(attention_has_the_same_bits_in_every_set),
        cmocka_unit_test(attention_of_a_query_is_its_own),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
