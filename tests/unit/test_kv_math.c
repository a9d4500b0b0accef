/* tests/unit/test_kv_math.c: attention is what the stored codes say, in double; means and feedback
 * of a block are averages, one by one; and statistics of another depth do harm.
 *
 * Looks inside the store (kv/store.h) where nothing outside would tell.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "kv_play.h"

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
static void decode_row(const rf_kv *kv, const rf_kv_side_store *store, const rf_kv_shape *form,
                       const void *row, int32_t base, double *out)
{
    int8_t codes[256];
    float scales[32];
    kv->codec.expand(form, row, 1, base, codes, scales);
    for (uint32_t i = 0; i < form->width; i++)
        out[i] = (double)scales[i / form->span] * (double)codes[i];
    hadamard(out, form->width, store->shape.block);
    flip(out, store->signs, form->width);
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
    const rf_kv_side_store *keys = &kv->layers[0].side[RF_KV_K];
    bool coded = keys->format->plain == RF_FORMAT_NONE;
    double largest = -INFINITY, total = 0, codes[2][256];
    const float *exact[2] = {t->q + at, (s->sinks ? t->q_sink : t->q) + at};
    for (int sink = 0; coded && sink < 2; sink++)
        kept_query(kv, exact[sink], codes[sink]);
    for (uint32_t j = 0; j <= p; j++) {
        bool is_sink = j < s->sinks, near = p / 32 <= j / 32 + s->recent_blocks;
        scores[j] = -INFINITY;
        if (!is_sink && s->window && p - j >= s->window)
            continue;
        const float *q = exact[is_sink];
        bool is_wide = !coded || (j == 0 && keys->format->has_first);
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

/* The average of R(p) H R(p)t over the 128 positions of a block and the 512 behind it, turned
 * into the space of the codes. */
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_is_what_the_stored_codes_say),
        cmocka_unit_test(finer_formats_are_nearer_to_the_truth),
        cmocka_unit_test(the_mean_of_a_block_is_the_average_of_turned_means),
        cmocka_unit_test(the_feedback_form_is_the_average_of_turned_moments),
        cmocka_unit_test(statistics_of_another_depth_are_worse_than_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
