/* tests/unit/test_save.c: a run that was saved and restored goes on with the bits of one that was
 * never interrupted, also in a ring that wrapped; no file but a whole one of this very model
 * changes anything; and a save that fails leaves the file that was there.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <setjmp.h>
#include <cmocka.h>

#include "folder.h"

#include "kv/store.h"
#include "runtime/runtime.h"
#include "slot_bytes.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define MODEL_PATH RF_TEST_SOURCE_DIR "/models/stories260k.gguf"
#define FOLDER     RF_TEST_BINARY_DIR "/test_save"
#define SLOT_PATH  FOLDER "/slot"
#define VOCAB      512u
#define HEADER     4288u /* bytes before the tokens; digest at 24, version at 8 */
#define DIGEST_AT  24u

/* ---- a model ------------------------------------------------------------------------------- */

static void write_blob(const char *path, const blob *b)
{
    FILE *file = fopen(path, "wb");
    assert_non_null(file);
    assert_int_equal(fwrite(b->data, 1, b->size, file), b->size);
    assert_int_equal(fclose(file), 0);
}

static blob read_blob(const char *path)
{
    struct stat info;
    assert_int_equal(stat(path, &info), 0);
    blob b = new_blob((size_t)info.st_size);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    assert_int_equal(fread(b.data, 1, b.size, file), b.size);
    fclose(file);
    return b;
}

typedef struct session {
    rf_file *file;
    rf_model_plan *plan;
    rf_model *model;
} session;

static rf_options options_of(uint64_t ctx, uint32_t chunk, const char *k, const char *v)
{
    rf_options options;
    rf_options_init(&options);
    options.ctx = ctx;
    options.chunk = chunk;
    options.slots = 2;
    options.threads = 1;
    options.text_bytes = 1024;
    options.kv_k = k;
    options.kv_v = v;
    return options;
}

static session open_file(const char *path, const rf_options *options)
{
    session s = {0};
    rf_error err = {0};
    must(rf_file_open(path, &s.file, &err), &err);
    must(rf_plan_make(s.file, options, &s.plan, &err), &err);
    must(rf_model_open(s.plan, NULL, NULL, &s.model, &err), &err);
    return s;
}

static session open_session(const rf_options *options)
{
    return open_file(MODEL_PATH, options);
}

static void close_session(session *s)
{
    rf_model_close(s->model, NULL);
    rf_model_plan_close(s->plan);
    rf_file_close(s->file);
}

static void make_folder(void)
{
    if (mkdir(FOLDER, 0777) != 0)
        assert_int_equal(access(FOLDER, W_OK), 0);
    unlink(SLOT_PATH);
}

/* A run from prompt to text, that can be stopped between two tokens. */
typedef struct writing {
    uint32_t tokens[4096];
    uint64_t count; /* stepped */
    uint32_t pending;
    rf_text_stream stream;
    char text[65536];
    size_t length;
    uint64_t logits; /* sum over the bits of all logits that a token was picked from */
} writing;

static void pick_next(session *s, uint32_t slot, writing *w)
{
    rf_error err = {0};
    const float *logits = rf_logits(s->model, 0);
    assert_non_null(logits);
    for (uint32_t i = 0; i < VOCAB; i++) {
        uint32_t bits;
        memcpy(&bits, &logits[i], sizeof bits);
        w->logits += mix(mix(bits) + w->count * VOCAB + i);
    }
    must(rf_sample(s->model, slot, 0, &w->pending, &err), &err);
    w->length += rf_text_stream_push(&w->stream, w->pending, w->text + w->length,
                                     sizeof w->text - w->length);
}

static void start(session *s, uint32_t slot, uint64_t prompt, writing *w)
{
    rf_error err = {0};
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    sampling.seed = 7;
    sampling.repeat_penalty = 1.2f;
    memset(w, 0, sizeof *w);
    must(rf_sampler_start(s->model, slot, &sampling, &err), &err);
    rf_text_stream_start(&w->stream, rf_model_tokenizer(s->model), false);
    for (uint64_t i = 0; i < prompt; i++) { /* tokens of bytes, too: characters stay open */
        w->tokens[i] = i ? 3 + (uint32_t)(mix(i) % (VOCAB - 3)) : 1;
        rf_sampler_accept(s->model, slot, w->tokens[i]);
        w->length += rf_text_stream_push(&w->stream, w->tokens[i], w->text + w->length,
                                         sizeof w->text - w->length);
    }
    must(rf_prefill(s->model, slot, w->tokens, prompt, true, NULL, NULL, &err), &err);
    w->count = prompt;
    pick_next(s, slot, w);
}

static void proceed(session *s, uint32_t slot, uint64_t to, writing *w)
{
    rf_error err = {0};
    while (w->count < to) {
        rf_step_item item = {slot, w->pending, w->count, true, RF_STEP_PROMPT};
        must(rf_step(s->model, &item, 1, &err), &err);
        w->tokens[w->count++] = w->pending;
        pick_next(s, slot, w);
    }
}

static rf_status save(session *s, uint32_t slot, const char *path, writing *w, rf_error *err)
{
    rf_slot_extra extra = {w->tokens, 0, w->count, w->pending, &w->stream};
    return rf_slot_save(s->model, slot, path, &extra, err);
}

static rf_status restore(session *s, uint32_t slot, const char *path, writing *w, rf_error *err)
{
    rf_slot_extra extra = {w->tokens, RF_ARRAY_COUNT(w->tokens), 99, 99, &w->stream};
    rf_status status = rf_slot_restore(s->model, slot, path, &extra, err);
    if (status == RF_OK) {
        w->count = extra.token_count;
        w->pending = extra.pending_token;
    } else {
        assert_int_equal(extra.token_count, 99);
        assert_int_equal(extra.pending_token, 99);
    }
    return status;
}

/* Runs from prompt to `to` once without a break, and once with a break, after which the slot, its
 * neighbour, the model and the options are others. */
static void interrupt(rf_options options, rf_options then, uint64_t prompt, uint64_t at,
                      uint64_t to)
{
    static writing whole, first, second, neighbour, alone;
    rf_error err = {0};
    make_folder();
    session s = open_session(&options);
    start(&s, 0, prompt, &whole);
    proceed(&s, 0, to, &whole);
    close_session(&s);

    s = open_session(&options);
    start(&s, 0, prompt, &first);
    proceed(&s, 0, at, &first);
    must(save(&s, 0, SLOT_PATH, &first, &err), &err);
    close_session(&s);

    s = open_session(&then);
    start(&s, 0, 20, &neighbour);
    start(&s, 1, 50, &second); /* gone when the other comes */
    second = (writing){.logits = first.logits, .length = first.length};
    memcpy(second.text, first.text, first.length);
    must(restore(&s, 1, SLOT_PATH, &second, &err), &err);
    assert_int_equal(second.count, at);
    assert_int_equal(rf_slot_length(s.model, 1), at);
    proceed(&s, 1, to, &second);
    proceed(&s, 0, 60, &neighbour);
    close_session(&s);
    assert_int_equal(second.logits, whole.logits);
    assert_memory_equal(second.tokens, whole.tokens, to * sizeof(uint32_t));
    assert_int_equal(second.pending, whole.pending);
    assert_int_equal(second.length, whole.length);
    assert_memory_equal(second.text, whole.text, whole.length);

    s = open_session(&then);
    start(&s, 0, 20, &alone);
    proceed(&s, 0, 60, &alone);
    close_session(&s);
    assert_int_equal(alone.logits, neighbour.logits);
    unlink(SLOT_PATH);
}

/* An emulator of user programs answers for the kernel, and not always as the kernel does. */
static void skip_under_emulation(void)
{
#ifdef RF_TEST_EMULATED
    print_message("skipped: limits, signals and memory are the emulator's here\n");
    skip();
#endif
}

static void an_interrupted_run_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const char *const names[][2] = {{"f32", "f32"}, {"f16", "f16"}, {"bf16", "r8"},
                                           {"r8", "r8"},   {"r4", "r4"},   {"r6", "r3"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(names); i++) {
        rf_options options = options_of(300, 32, names[i][0], names[i][1]);
        rf_options larger = options_of(420, 48, names[i][0], names[i][1]);
        interrupt(options, options, 120, 151 + (uint64_t)i, 200);
        interrupt(options, larger, 120, 120, 170);
    }
}

static void a_ring_that_wrapped_goes_on_with_the_same_bits(void **state)
{
    (void)state;
    static const char *const names[] = {"f32", "f16", "r8", "r4"};
    for (size_t i = 0; i < RF_ARRAY_COUNT(names); i++) {
        rf_options options = options_of(128, 16, names[i], names[i]);
        options.endless = true;
        options.sinks = 4;
        interrupt(options, options, 40, 400, 500);
        interrupt(options, options, 120, 125, 200); /* it wraps after the break */
    }
}

static void a_calibrated_run_goes_on_and_wants_the_same_statistics(void **state)
{
    (void)state;
    static writing w;
    rf_error err = {0};
    make_folder();
    for (int quick = 0; quick < 2; quick++) {
        rf_options options = options_of(512, 64, "f16", "f16");
        options.calibrate = true;
        options.text_bytes = 65536;
        session s = open_session(&options);
        must(rf_calibrate(s.model, quick, NULL, NULL, &err), &err);
        must(rf_calibration_save(s.model, quick ? FOLDER "/quick" : FOLDER "/full", &err), &err);
        close_session(&s);
    }
    rf_options full = options_of(300, 32, "r4", "r4"), quick = full;
    full.kv_calibration = FOLDER "/full";
    quick.kv_calibration = FOLDER "/quick";
    interrupt(full, full, 150, 201, 260);
    rf_options endless = full;
    endless.endless = true;
    endless.sinks = 4;
    interrupt(endless, endless, 150, 700, 800);

    session s = open_session(&full);
    start(&s, 0, 100, &w);
    must(save(&s, 0, SLOT_PATH, &w, &err), &err);
    close_session(&s);
    s = open_session(&quick);
    assert_int_equal(restore(&s, 0, SLOT_PATH, &w, &err), RF_ERR_USAGE);
    assert_non_null(strstr(err.what, "calibration"));
    close_session(&s);
}

/* Where there is a calibration values take the bases of their scales from it. */
static void values_take_their_bases_from_a_calibration_under_any_keys(void **state)
{
    (void)state;
    rf_error err = {0};
    make_folder();
    rf_options making = options_of(512, 64, "f16", "f16");
    making.calibrate = true;
    making.text_bytes = 65536;
    session s = open_session(&making);
    must(rf_calibrate(s.model, true, NULL, NULL, &err), &err);
    must(rf_calibration_save(s.model, FOLDER "/quick", &err), &err);
    close_session(&s);
    rf_options options[] = {options_of(64, 8, "r4", "r4"), options_of(64, 8, "f16", "r4"),
                            options_of(64, 8, "f16", "r4")};
    session open[3];
    for (int i = 0; i < 3; i++) {
        options[i].kv_calibration = i < 2 ? FOLDER "/quick" : NULL;
        open[i] = open_session(&options[i]);
    }
    for (uint32_t layer = 0; layer < 5; layer++) {
        const int8_t *bases[3];
        for (int i = 0; i < 3; i++)
            bases[i] = open[i].model->kv->layers[layer].side[RF_KV_V].bases;
        assert_memory_equal(bases[0], bases[1], 4);
        assert_memory_not_equal(bases[0], bases[2], 4);
        assert_null(open[1].model->kv->layers[layer].calibration); /* means are the keys' */
    }
    const rf_plan *with = rf_model_plan_regions(open[1].plan);
    const rf_plan *without = rf_model_plan_regions(open[2].plan);
    assert_int_equal(rf_plan_find(with, "kv.state")->bytes,
                     rf_plan_find(without, "kv.state")->bytes);
    for (int i = 0; i < 3; i++)
        close_session(&open[i]);
}

static void without_extra_the_slot_and_its_sampler_are_kept(void **state)
{
    (void)state;
    static writing w;
    rf_error err = {0};
    make_folder();
    rf_options options = options_of(300, 32, "f16", "f16");
    session s = open_session(&options);
    must(rf_slot_save(s.model, 1, SLOT_PATH, NULL, &err), &err); /* an empty one */
    must(rf_slot_restore(s.model, 0, SLOT_PATH, NULL, &err), &err);
    start(&s, 0, 30, &w);
    must(rf_slot_save(s.model, 0, SLOT_PATH, NULL, &err), &err);
    must(rf_slot_restore(s.model, 1, SLOT_PATH, NULL, &err), &err);
    assert_int_equal(rf_slot_length(s.model, 1), 30);
    assert_memory_equal(&s.model->samplers[0], &s.model->samplers[1], sizeof(rf_sampler));
    rf_text_stream stream, before;
    memset(&stream, 7, sizeof stream);
    before = stream;
    rf_slot_extra extra = {NULL, 0, 5, 5, &stream};
    must(rf_slot_restore(s.model, 1, SLOT_PATH, &extra, &err), &err);
    assert_int_equal(extra.token_count, 0);
    assert_int_equal(extra.pending_token, UINT32_MAX);
    assert_memory_equal(&stream, &before, sizeof stream);

    must(save(&s, 0, SLOT_PATH, &w, &err), &err);
    extra = (rf_slot_extra){NULL, 0, 5, 5, NULL}; /* to ask how many tokens there are */
    must(rf_slot_restore(s.model, 1, SLOT_PATH, &extra, &err), &err);
    assert_int_equal(extra.token_count, 30);
    extra = (rf_slot_extra){w.tokens, 29, 0, 0, NULL};
    assert_int_equal(rf_slot_restore(s.model, 1, SLOT_PATH, &extra, &err), RF_ERR_USAGE);
    assert_string_equal(err.expected, "at most 29");
    assert_string_equal(err.got, "30");
    close_session(&s);
}

static void a_character_that_was_half_written_is_completed(void **state)
{
    (void)state;
    rf_error err = {0};
    char text[64];
    make_folder();
    rf_options options = options_of(64, 8, "f16", "f16");
    session s = open_session(&options);
    rf_text_stream stream, restored;
    rf_text_stream_start(&stream, rf_model_tokenizer(s.model), true);
    assert_int_equal(rf_text_stream_push(&stream, 3 + 0xE2, text, sizeof text), 0);
    rf_slot_extra extra = {.pending_token = UINT32_MAX, .stream = &stream};
    must(rf_slot_save(s.model, 0, SLOT_PATH, &extra, &err), &err);
    close_session(&s);
    s = open_session(&options);
    extra.stream = &restored;
    must(rf_slot_restore(s.model, 1, SLOT_PATH, &extra, &err), &err);
    uint64_t length = rf_text_stream_push(&restored, 3 + 0x82, text, sizeof text);
    length += rf_text_stream_push(&restored, 3 + 0xAC, text + length, sizeof text - length);
    length += rf_text_stream_push(&restored, 1, text + length, sizeof text - length); /* special */
    text[length] = '\0';
    assert_string_equal(text, "\xE2\x82\xAC<s>");
    close_session(&s);
}

static void what_cannot_be_saved_is_refused(void **state)
{
    (void)state;
    static writing w;
    rf_error err = {0};
    make_folder();
    rf_options options = options_of(300, 32, "f16", "f16");
    session s = open_session(&options);
    start(&s, 0, 30, &w);
    assert_int_equal(save(&s, 2, SLOT_PATH, &w, &err), RF_ERR_USAGE);
    assert_int_equal(restore(&s, 2, SLOT_PATH, &w, &err), RF_ERR_USAGE);
    assert_int_equal(rf_slot_restore(s.model, 2, SLOT_PATH, NULL, NULL), RF_ERR_USAGE);
    w.count++;
    assert_int_equal(save(&s, 0, SLOT_PATH, &w, &err), RF_ERR_USAGE);
    assert_string_equal(err.expected, "at most 30");
    w.count--;
    uint32_t pending = w.pending;
    w.pending = VOCAB;
    assert_int_equal(save(&s, 0, SLOT_PATH, &w, &err), RF_ERR_USAGE);
    assert_string_equal(err.got, "512");
    w.pending = pending;
    w.tokens[29] = UINT32_MAX;
    assert_int_equal(save(&s, 0, SLOT_PATH, &w, NULL), RF_ERR_USAGE);
    assert_int_not_equal(access(SLOT_PATH, F_OK), 0);
    close_session(&s);
}

/* ---- bad files ----------------------------------------------------------------------------- */

/* A live slot that a bad file must not touch. */
typedef struct witness {
    session s;
    writing w;
    blob kv;
    rf_sampler sampler;
} witness;

static void set_witness(witness *at)
{
    rf_options options = options_of(64, 8, "r4", "f16");
    at->s = open_session(&options);
    start(&at->s, 0, 9, &at->w);
    at->kv = kv_blob(at->s.model->kv, 0);
    at->sampler = at->s.model->samplers[0];
}

static void is_untouched(witness *at)
{
    blob now = kv_blob(at->s.model->kv, 0);
    assert_int_equal(now.size, at->kv.size);
    assert_memory_equal(now.data, at->kv.data, now.size);
    assert_memory_equal(&at->s.model->samplers[0], &at->sampler, sizeof at->sampler);
    free(now.data);
}

static void refuse_file(witness *at, const blob *b, rf_status status, const char *what)
{
    static writing copy;
    rf_error err = {0};
    write_blob(SLOT_PATH, b);
    copy = at->w;
    rf_status got = restore(&at->s, 0, SLOT_PATH, &at->w, &err);
    if (got != status || !strstr(err.what, what))
        fail_msg("wanted %d, %s: got %d, %s", status, what, got, err.what);
    assert_string_equal(err.where, SLOT_PATH);
    assert_memory_equal(&copy, &at->w, sizeof copy);
    is_untouched(at);
}

/* Makes the digest true again after a change. */
static void vouch(blob *b)
{
    rf_sha256 hash;
    rf_sha256_init(&hash);
    rf_sha256_add(&hash, b->data, DIGEST_AT);
    rf_sha256_add(&hash, b->data + DIGEST_AT + 32, b->size - DIGEST_AT - 32);
    rf_sha256_end(&hash, b->data + DIGEST_AT);
}

static blob a_file(witness *at)
{
    static writing w;
    rf_error err = {0};
    make_folder();
    start(&at->s, 1, 5, &w);
    must(save(&at->s, 1, SLOT_PATH, &w, &err), &err);
    return read_blob(SLOT_PATH);
}

static void every_cut_and_every_other_byte_is_refused(void **state)
{
    (void)state;
    static witness at;
    set_witness(&at);
    blob b = a_file(&at);
    assert_true(b.size > HEADER + 5 * 4);
    for (size_t size = 0; size < b.size; size++) {
        blob cut = {b.data, size};
        refuse_file(&at, &cut, RF_ERR_BAD_MODEL, size < HEADER - 24 ? "too short" : "");
    }
    blob longer = new_blob(b.size + 1);
    memcpy(longer.data, b.data, b.size);
    longer.data[b.size] = 0;
    refuse_file(&at, &longer, RF_ERR_BAD_MODEL, "longer than it says");
    for (size_t i = 0; i < b.size; i++) {
        b.data[i] ^= (uint8_t)(1u << i % 8);
        refuse_file(&at, &b, RF_ERR_BAD_MODEL,
                    i < 8               ? "no saved slot"
                    : i < 12            ? "version"
                    : i >= 16 && i < 24 ? "cut off"
                                        : "altered");
        b.data[i] ^= (uint8_t)(1u << i % 8);
    }
    write_blob(SLOT_PATH, &b);
    rf_error err = {0};
    must(restore(&at.s, 0, SLOT_PATH, &at.w, &err), &err); /* the right one still is one */
    assert_int_equal(at.w.count, 5);
    close_session(&at.s);
    free(at.kv.data);
    free(longer.data);
    free(b.data);
}

static void set_u32(blob *b, size_t at, uint32_t value)
{
    memcpy(b->data + at, &value, sizeof value);
}

static void a_whole_file_of_something_else_is_refused_by_name(void **state)
{
    (void)state;
    static witness at;
    set_witness(&at);
    blob b = a_file(&at), copy = new_blob(b.size);
    const struct {
        size_t at;
        uint32_t value;
        const char *what;
    } lies[] = {{8, 2, "newer version"},
                {8, 0, "another version"},
                {12, VOCAB, "not in the vocabulary"},
                {56, 1, "another model"}, /* fingerprint */
                {88, 1000, "do not fill it"},
                {92, 0x40000000u, "do not fill it"},
                {88, 3, "do not fill it"},
                {96, 8, "do not fill it"},
                {104, 0x7FC00000u, "sampler is out of range: temp"},
                {124, 1025, "sampler is out of range: repeat-last"},
                {HEADER + 16, VOCAB, "not in the vocabulary"},
                {HEADER - 16, 0x09000001u, "too many open bytes"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(lies); i++) {
        memcpy(copy.data, b.data, b.size);
        set_u32(&copy, lies[i].at, lies[i].value);
        vouch(&copy);
        refuse_file(&at, &copy, RF_ERR_BAD_MODEL, lies[i].what);
    }
    blob calibration = {(uint8_t *)(uintptr_t) "RFCALIB1 and so on", 18};
    refuse_file(&at, &calibration, RF_ERR_BAD_MODEL, "too short");
    close_session(&at.s);
    free(at.kv.data);
    free(copy.data);
    free(b.data);
}

/* Whoever can make a digest can say anything: it is refused, or it is steps without a fault. */
static void a_file_that_lies_does_no_harm(void **state)
{
    (void)state;
    static witness at;
    static writing w;
    set_witness(&at);
    blob b = a_file(&at), copy = new_blob(b.size);
    uint32_t taken = 0;
    for (uint32_t i = 0; i < 1000; i++) {
        memcpy(copy.data, b.data, b.size);
        uint64_t z = mix(i);
        size_t place = i % 3 ? HEADER + z % (b.size - HEADER) : 12 + z % (HEADER - 12);
        copy.data[place] ^= (uint8_t)(1u << (z >> 40) % 8);
        vouch(&copy);
        write_blob(SLOT_PATH, &copy);
        if (restore(&at.s, 0, SLOT_PATH, &w, NULL) == RF_OK) {
            uint32_t token = w.pending == UINT32_MAX ? 5 : w.pending;
            rf_step_item item = {0, token, rf_slot_length(at.s.model, 0), true, RF_STEP_PROMPT};
            if (rf_step(at.s.model, &item, 1, NULL) == RF_OK)
                assert_int_equal(rf_sample(at.s.model, 0, 0, &token, NULL), RF_OK);
            rf_text_stream_push(&w.stream, token, w.text, sizeof w.text);
            taken++;
        }
    }
    assert_true(taken > 200 && taken < 990);
    close_session(&at.s);
    free(at.kv.data);
    free(copy.data);
    free(b.data);
}

static void other_models_and_other_options_are_refused(void **state)
{
    (void)state;
    static writing w, gone;
    rf_error err = {0};
    make_folder();
    blob model = read_blob(MODEL_PATH);
    model.data[model.size - 3] ^= 1; /* one weight */
    write_blob(FOLDER "/other.gguf", &model);
    free(model.data);
    rf_options options = options_of(128, 32, "r6", "r6");
    session s = open_session(&options);
    start(&s, 0, 70, &w);
    must(save(&s, 0, SLOT_PATH, &w, &err), &err);
    close_session(&s);

    s = open_file(FOLDER "/other.gguf", &options);
    assert_int_equal(restore(&s, 0, SLOT_PATH, &gone, &err), RF_ERR_BAD_MODEL);
    assert_string_equal(err.what, "a slot of another model");
    assert_int_equal(rf_slot_length(s.model, 0), 0);
    close_session(&s);

    rf_options format = options, layer = options, recent = options, sinks = options;
    rf_options small = options;
    format.kv_k = "f16";
    layer.kv_layers = "3:r6/r5";
    recent.kv_recent = 3;
    sinks.sinks = 2;
    small.ctx = 69;
    const struct {
        const rf_options *options;
        const char *what, *expected, *got;
    } others[] = {{&format, "key format of layer 0", "f16", "r6"},
                  {&layer, "value format of layer 3", "r5", "r6"},
                  {&recent, "recent blocks", "3", "2"},
                  {&sinks, "sinks", "2", "0"},
                  {&small, "does not fit", "at most 69", "70"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(others); i++) {
        s = open_session(others[i].options);
        assert_int_equal(restore(&s, 0, SLOT_PATH, &gone, &err), RF_ERR_USAGE);
        if (!strstr(err.what, others[i].what))
            fail_msg("wanted %s: got %s", others[i].what, err.what);
        assert_string_equal(err.expected, others[i].expected);
        assert_string_equal(err.got, others[i].got);
        close_session(&s);
    }
    unlink(FOLDER "/other.gguf");
}

/* ---- the disk ------------------------------------------------------------------------------ */

static void holds(const blob *b)
{
    blob now = read_blob(SLOT_PATH);
    assert_int_equal(now.size, b->size);
    assert_memory_equal(now.data, b->data, now.size);
    free(now.data);
}

static void die(int number)
{
    (void)number;
    kill(getpid(), SIGKILL);
}

/* In a child with room for so many bytes of a file: its exit code, or minus the signal. */
static int save_with_limit(session *s, writing *w, rlim_t bytes, void (*at_limit)(int))
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        struct rlimit limit = {bytes, bytes};
        rf_error err = {0};
        signal(SIGXFSZ, at_limit);
        setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
        if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
            _exit(99);
        _exit((int)save(s, 0, SLOT_PATH, w, &err));
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void a_save_that_fails_or_dies_leaves_the_old_file_whole(void **state)
{
    skip_under_emulation();
    (void)state;
    static writing w, again;
    rf_error err = {0};
    make_folder();
    rf_options options = options_of(128, 32, "f16", "r4");
    session s = open_session(&options);
    start(&s, 0, 20, &w);
    must(save(&s, 0, SLOT_PATH, &w, &err), &err);
    blob old = read_blob(SLOT_PATH);
    proceed(&s, 0, 50, &w);
    uint32_t files = files_in(FOLDER);
    for (rlim_t bytes = 0; bytes < old.size; bytes += 997) { /* the disk is full */
        assert_int_equal(save_with_limit(&s, &w, bytes, SIG_IGN), RF_ERR_IO);
        holds(&old);
        assert_int_equal(files_in(FOLDER), files);
    }
    assert_int_equal(save_with_limit(&s, &w, 5000, SIG_DFL), -SIGXFSZ);
    holds(&old);
    assert_int_equal(files_in(FOLDER), files);
    for (rlim_t bytes = 0; bytes < old.size; bytes += 3989) {
        assert_int_equal(save_with_limit(&s, &w, bytes, die), -SIGKILL);
        holds(&old);
        assert_int_equal(files_in(FOLDER), files);
    }
    assert_int_equal(save_with_limit(&s, &w, RLIM_INFINITY, SIG_DFL), RF_OK);
    assert_int_equal(files_in(FOLDER), files);
    proceed(&s, 0, 100, &w);
    must(restore(&s, 1, SLOT_PATH, &again, &err), &err);
    again.logits = 0;
    proceed(&s, 1, 100, &again);
    assert_memory_equal(again.tokens, w.tokens, 100 * sizeof(uint32_t));
    close_session(&s);
    free(old.data);
}

static void paths_that_cannot_be_written_or_read_are_io_errors(void **state)
{
    (void)state;
    static witness at;
    rf_error err = {0};
    make_folder();
    set_witness(&at);
    static const char *const paths[] = {FOLDER "/no/such", FOLDER, ""};
    for (size_t i = 0; i < RF_ARRAY_COUNT(paths); i++) {
        assert_int_equal(save(&at.s, 0, paths[i], &at.w, &err), RF_ERR_IO);
        assert_string_equal(err.where, paths[i]);
        assert_int_equal(restore(&at.s, 0, paths[i], &at.w, &err), RF_ERR_IO);
        assert_string_equal(err.where, paths[i]);
        assert_int_equal(restore(&at.s, 0, paths[i], &at.w, NULL), RF_ERR_IO);
    }
    is_untouched(&at);
    close_session(&at.s);
    free(at.kv.data);
}

static void a_save_takes_nothing_that_it_does_not_give_back(void **state)
{
    skip_under_emulation();
    (void)state;
    static writing w;
    rf_error err = {0};
    make_folder();
    rf_options options = options_of(300, 32, "r4", "r4");
    session s = open_session(&options);
    start(&s, 0, 200, &w);
    must(save(&s, 0, SLOT_PATH, &w, &err), &err);
    uint64_t before = rf_os_data_bytes();
    for (int i = 0; i < 4; i++) {
        must(save(&s, 0, SLOT_PATH, &w, &err), &err);
        must(restore(&s, 1, SLOT_PATH, &w, &err), &err);
        assert_int_not_equal(save(&s, 0, FOLDER "/no/such", &w, &err), RF_OK);
    }
    assert_int_equal(rf_os_data_bytes(), before);
    close_session(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_interrupted_run_goes_on_with_the_same_bits),
        cmocka_unit_test(a_ring_that_wrapped_goes_on_with_the_same_bits),
        cmocka_unit_test(a_calibrated_run_goes_on_and_wants_the_same_statistics),
        cmocka_unit_test(values_take_their_bases_from_a_calibration_under_any_keys),
        cmocka_unit_test(without_extra_the_slot_and_its_sampler_are_kept),
        cmocka_unit_test(a_character_that_was_half_written_is_completed),
        cmocka_unit_test(what_cannot_be_saved_is_refused),
        cmocka_unit_test(every_cut_and_every_other_byte_is_refused),
        cmocka_unit_test(a_whole_file_of_something_else_is_refused_by_name),
        cmocka_unit_test(a_file_that_lies_does_no_harm),
        cmocka_unit_test(other_models_and_other_options_are_refused),
        cmocka_unit_test(a_save_that_fails_or_dies_leaves_the_old_file_whole),
        cmocka_unit_test(paths_that_cannot_be_written_or_read_are_io_errors),
        cmocka_unit_test(a_save_takes_nothing_that_it_does_not_give_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
