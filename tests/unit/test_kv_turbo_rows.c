/* tests/unit/test_kv_turbo_rows.c: rows of the polar KV formats: expansion, awkward rows, every
 * instruction set, attention on long spans. */
#include "kv_turbo_test.h"

/* ---- expansion, widening, awkward rows ----------------------------------------------------- */

static void expansion_and_widening_equal_the_decoder_of_this_test(void **state)
{
    (void)state;
    rf_kv_kernels tables[1 + RF_ARRAY_COUNT(sets)];
    tables[0] = scalar_kernels();
    const int count = 1 + other_kernels(tables + 1);
    for (size_t c = 0; c < RF_ARRAY_COUNT(turbo); c++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            const rf_kv_shape s = shape_of(turbo[c], widths[w]);
            const uint32_t rows = 1 + (uint32_t)(c + w) % 3;
            uint8_t *stored = malloc(s.row_bytes * rows);
            int8_t *codes = malloc(s.width * rows);
            float *scales = malloc(sizeof(float) * s.span_count * rows);
            float *wide = malloc(sizeof(float) * s.width * rows);
            uint64_t seed = c * 100 + w;
            for (uint32_t i = 0; i < s.row_bytes * rows; i++) {
                stored[i] = (uint8_t)next_random(&seed);
            }
            for (uint32_t r = 0; r < rows; r++) { /* scales that are finite */
                for (uint32_t at = s.code_bytes + 1; at < s.row_bytes; at += 2) {
                    stored[r * s.row_bytes + at] &= 0xBF;
                }
            }
            rf_kv_widen(&s, stored, rows, 3, wide);
            for (uint32_t r = 0; r < rows; r++) {
                double y[WIDTH_MAX];
                decode(&s, stored + r * s.row_bytes, y);
                for (uint32_t i = 0; i < s.width; i++) {
                    const double got = (double)wide[r * s.width + i];
                    assert_true(fabs(got - y[i]) < 2e-5 * (1 + fabs(y[i])));
                }
            }
            for (int set = 0; set < count; set++) {
                memset(codes, 99, s.width * rows);
                tables[set].expand(&s, stored, rows, 3, codes, scales);
                for (uint32_t r = 0; r < rows; r++) {
                    double y[WIDTH_MAX];
                    decode_levels(&s, stored + r * s.row_bytes, y);
                    for (uint32_t i = 0; i < s.width; i++) {
                        const float scale = scales[r * s.span_count + i / s.span];
                        const double got = (double)scale * codes[r * s.width + i];
                        assert_true(fabs(got - y[i]) <= 2e-7 * fabs(y[i]));
                        assert_true(rf_kv_codes[s.code].wide ||
                                    wide[r * s.width + i] == scale * codes[r * s.width + i]);
                    }
                }
            }
            free(stored);
            free(codes);
            free(scales);
            free(wide);
        }
    }
}

/* Widening any other format is expansion times scale, to the bit. */
static void every_format_widens_to_what_it_expands_to(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    for (rf_kv_code c = 0; c < RF_KV_CODE_ALL; c++) {
        const rf_kv_shape s = shape_of(c, 96);
        uint8_t *row = malloc(s.row_bytes);
        float x[96], wide[96], scales[12], error = 0;
        int8_t codes[96];
        fill_gauss(x, 96, c, 1);
        k.encode(&s, x, NULL, 3, row);
        rf_kv_widen(&s, row, 1, 3, wide);
        k.expand(&s, row, 1, 3, codes, scales);
        for (uint32_t i = 0; i < 96; i++) {
            const float plain = scales[i / s.span] * codes[i];
            assert_true(rf_kv_codes[c].wide || rf_float_bits(wide[i]) == rf_float_bits(plain));
            error += (wide[i] - x[i]) * (wide[i] - x[i]);
        }
        assert_true((double)error < .2 * size_of(x, 96));
        free(row);
    }
}

static void awkward_rows_stay_finite(void **state)
{
    (void)state;
    const rf_kv_kernels k = scalar_kernels();
    uint8_t signs[16];
    rf_kv_signs(42, 128, signs);
    for (size_t c = 0; c < RF_ARRAY_COUNT(turbo); c++) {
        const rf_kv_shape s = shape_of(turbo[c], 128);
        for (awkward kind = 0; kind < AWKWARD_COUNT; kind++) {
            float x[128], wide[128];
            double y[128];
            uint8_t *row = malloc(s.row_bytes);
            const bool turned = kind == ONE_HOT || kind == CONSTANT || kind == ALTERNATE;
            fill_awkward(kind, x, 128);
            if (turned) {
                k.rotate(x, signs, 128, 128);
            }
            k.encode(&s, x, NULL, 3, row);
            rf_kv_widen(&s, row, 1, 3, wide);
            decode(&s, row, y);
            for (int i = 0; i < 128; i++) {
                assert_true(isfinite(y[i]) && isfinite(wide[i]));
            }
            if (kind == ZERO || kind == DENORMAL || kind == TINY || kind == NOT_A_NUMBER) {
                for (uint32_t i = 0; i < s.row_bytes; i++) {
                    assert_int_equal(row[i], 0);
                }
            }
            const double relative = error_of(x, y, 128) / size_of(x, 128);
            if (turned && kind != ONE_HOT) {
                static const double most[] = {.02, .06, .15, .04, .1};
                assert_true(relative < most[c]);
            }
            if (kind != ZERO && kind != NOT_A_NUMBER && kind != INFINITE) {
                assert_true(relative < (c < POLAR_COUNT ? 1.5 : 1.01));
            }
            free(row);
        }
    }
}

/* ---- every instruction set ----------------------------------------------------------------- */

static void encoding_has_the_same_bits_in_every_set(void **state)
{
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int count = other_kernels(tables);
    for (size_t c = 0; c < RF_ARRAY_COUNT(turbo); c++) {
        for (size_t w = 0; w < RF_ARRAY_COUNT(widths); w++) {
            const rf_kv_shape s = shape_of(turbo[c], widths[w]);
            uint8_t *a = malloc(s.row_bytes), *b = malloc(s.row_bytes);
            float *x = malloc(sizeof(float) * s.width);
            for (uint32_t trial = 0; trial < 100; trial++) {
                if (trial < AWKWARD_COUNT) {
                    fill_awkward((awkward)trial, x, s.width);
                } else {
                    fill_gauss(x, s.width, trial * 77 + w, pow(2, (double)(trial % 9) - 4));
                }
                for (uint32_t i = 0; trial % 8 == 7 && i < s.width; i++) {
                    x[i] = roundf(x[i] * 4) / 4;
                }
                scalar.encode(&s, x, NULL, 0, a);
                for (int set = 0; set < count; set++) {
                    memset(b, 0xA5, s.row_bytes);
                    tables[set].encode(&s, x, NULL, 0, b);
                    assert_memory_equal(a, b, s.row_bytes);
                }
            }
            free(a);
            free(b);
            free(x);
        }
    }
}

/* On and beside every bound; the scalar entry counts them, the others search. */
static void every_bound_has_the_same_side_in_every_set(void **state)
{
    (void)state;
    const rf_kv_kernels scalar = scalar_kernels();
    rf_kv_kernels tables[RF_ARRAY_COUNT(sets)];
    const int count = other_kernels(tables);
    for (size_t c = 0; c < POLAR_COUNT; c++) {
        const rf_kv_code_info *info = &rf_kv_codes[turbo[c]];
        const rf_kv_shape s = shape_of(turbo[c], 32);
        for (int k = 0; k + 1 < 1 << info->code_bits; k++) {
            for (int step = -12; step <= 12; step++) {
                float x[32];
                uint8_t a[18], b[18];
                double rest = 32;
                for (int i = 0; i < 16; i++) { /* the norm is made sqrt(32): inverse is about 1 */
                    x[i] = info->bounds[k] + (float)(step * i) * 1.5e-8f;
                    rest -= (double)x[i] * (double)x[i];
                }
                for (int i = 16; i < 32; i++) {
                    x[i] = (float)sqrt(fmax(rest, 0) / 16);
                }
                scalar.encode(&s, x, NULL, 0, a);
                for (int set = 0; set < count; set++) {
                    tables[set].encode(&s, x, NULL, 0, b);
                    assert_memory_equal(a, b, s.row_bytes);
                }
            }
        }
    }
}

/* ---- attention on spans of 128 ------------------------------------------------------------- */

/* The results of one call against a sum in double. */
static void assert_attention(const rf_attend *job)
{
    const uint32_t kw = job->k.width, vw = job->v.width;
    const uint32_t k_span = kw / job->k.spans, v_span = vw / job->v.spans;
    const int8_t *k = job->k.rows, *v = job->v.rows;
    for (uint32_t i = 0; i < job->query_count; i++) {
        double wanted[WIDTH_MAX] = {0}, sum = 0;
        for (uint32_t j = job->visible[i].first; j < job->visible[i].last; j++) {
            double dot = 0;
            for (uint32_t d = 0; d < kw; d++) {
                dot += (double)job->q_codes[i * kw + d] * k[j * kw + d] *
                       (double)job->k.scale[j * job->k.spans + d / k_span];
            }
            const double weight = exp(dot * (double)job->q_scale[i] * (double)job->scale);
            sum += weight;
            for (uint32_t d = 0; d < vw; d++) {
                wanted[d] +=
                    weight * v[j * vw + d] * (double)job->v.scale[j * job->v.spans + d / v_span];
            }
        }
        for (uint32_t d = 0; d < vw; d++) {
            const double got = (double)(job->out[i * vw + d] / job->state[2 * i + 1]);
            assert_true(fabs(got - wanted[d] / sum) < 1e-5);
        }
    }
}

static void attention_on_long_spans_is_right_and_the_same_in_every_set(void **state)
{
    (void)state;
    static const struct {
        rf_kv_code k, v;
        uint32_t kw, vw;
        bool extreme;
    } pairs[] = {{RF_KV_CODE_TURBO4, RF_KV_CODE_TURBO4, 128, 128, false},
                 {RF_KV_CODE_TURBO3, RF_KV_CODE_TURBO2, 256, 128, false},
                 {RF_KV_CODE_TURBO2, RF_KV_CODE_R4, 128, 64, false},
                 {RF_KV_CODE_R8, RF_KV_CODE_TURBO3, 96, 384, false},
                 {RF_KV_CODE_TURBO4, RF_KV_CODE_TURBO3, 128, 128, true}};
    enum { POSITIONS = 37, QUERIES = 5 };
    rf_kv_kernels tables[1 + RF_ARRAY_COUNT(sets)];
    tables[0] = scalar_kernels();
    const int count = 1 + other_kernels(tables + 1);
    for (size_t p = 0; p < RF_ARRAY_COUNT(pairs); p++) {
        const uint32_t kw = pairs[p].kw, vw = pairs[p].vw;
        const rf_kv_shape ks = shape_of(pairs[p].k, kw), vs = shape_of(pairs[p].v, vw);
        int16_t *q = malloc(sizeof *q * QUERIES * kw);
        int8_t *k = malloc(POSITIONS * kw), *v = malloc(POSITIONS * vw);
        float *k_scale = malloc(sizeof(float) * POSITIONS * ks.span_count);
        float *v_scale = malloc(sizeof(float) * POSITIONS * vs.span_count);
        float *first = malloc(sizeof(float) * QUERIES * vw);
        float *out = malloc(sizeof(float) * QUERIES * vw);
        float q_scale[QUERIES], first_state[2 * QUERIES], state_of[2 * QUERIES];
        float x[WIDTH_MAX];
        void *scratch = aligned_alloc(64, rf_attend_scratch_bytes(kw, vw));
        rf_attend_range visible[QUERIES];
        uint8_t row[WIDTH_MAX + 16];
        for (uint32_t i = 0; i < QUERIES; i++) {
            fill_gauss(x, kw, 500 + i, 2);
            tables[0].query(x, kw, q + i * kw, &q_scale[i]);
            visible[i] = (rf_attend_range){i == 4 ? 3 : 0, i == 4 ? 30 : POSITIONS};
        }
        for (uint32_t j = 0; j < POSITIONS; j++) {
            fill_gauss(x, kw, 900 + j, 1);
            tables[0].encode(&ks, x, NULL, 3, row);
            tables[0].expand(&ks, row, 1, 3, k + j * kw, k_scale + j * ks.span_count);
            fill_gauss(x, vw, 1900 + j, 1);
            tables[0].encode(&vs, x, NULL, 3, row);
            tables[0].expand(&vs, row, 1, 3, v + j * vw, v_scale + j * vs.span_count);
        }
        if (pairs[p].extreme) { /* the integer sums are the largest there are */
            for (uint32_t i = 0; i < QUERIES * kw; i++) {
                q[i] = 32767;
            }
            for (uint32_t i = 0; i < POSITIONS * kw; i++) {
                k[i] = (int8_t)(i / kw % 2 ? -127 : 127);
            }
            for (uint32_t i = 0; i < QUERIES; i++) {
                q_scale[i] = 1e-7f;
            }
        }
        rf_attend job = {.q_codes = q,
                         .q_scale = q_scale,
                         .q_stride = kw,
                         .query_count = QUERIES,
                         .visible = visible,
                         .k = {k, kw, k_scale, ks.span_count, kw, RF_ATTEND_INT8},
                         .v = {v, vw, v_scale, vs.span_count, vw, RF_ATTEND_INT8},
                         .scale = 1 / sqrtf((float)kw),
                         .state = state_of,
                         .out = out,
                         .out_stride = vw,
                         .scratch = scratch};
        for (int set = 0; set < count; set++) {
            for (uint32_t i = 0; i < QUERIES; i++) {
                state_of[2 * i] = -INFINITY;
                state_of[2 * i + 1] = 0;
            }
            memset(out, 0, sizeof(float) * QUERIES * vw);
            rf_kernels kernels;
            rf_kernels_pick(&kernels, tables[set].entry.cpu);
            kernels.attend(&job);
            if (set > 0) {
                assert_memory_equal(first, out, sizeof(float) * QUERIES * vw);
                assert_memory_equal(first_state, state_of, sizeof state_of);
                continue;
            }
            memcpy(first, out, sizeof(float) * QUERIES * vw);
            memcpy(first_state, state_of, sizeof state_of);
            assert_attention(&job);
        }
        free(scratch);
        free(q);
        free(k);
        free(v);
        free(k_scale);
        free(v_scale);
        free(first);
        free(out);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(expansion_and_widening_equal_the_decoder_of_this_test),
        cmocka_unit_test(every_format_widens_to_what_it_expands_to),
        cmocka_unit_test(awkward_rows_stay_finite),
        cmocka_unit_test(encoding_has_the_same_bits_in_every_set),
        cmocka_unit_test(every_bound_has_the_same_side_in_every_set),
        cmocka_unit_test(attention_on_long_spans_is_right_and_the_same_in_every_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
