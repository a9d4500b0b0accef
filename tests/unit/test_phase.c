/* tests/unit/test_phase.c: the precision of activations belongs to where a token comes from: prompt
 * or generation, alone, in company of the other phase, and in any chunk. On a small model with
 * random 4-bit weights, because float weights know no such precision.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <setjmp.h>
#include <cmocka.h>

#include "runtime/runtime.h"
#include "tiny_gguf.h"

#include <math.h>

#define WIDTH  64u
#define FFN    96u
#define VOCAB  40u
#define LENGTH 24u

typedef struct tensor_row {
    const char *name;
    uint64_t shape[2]; /* rows 0: a vector of f32 */
} tensor_row;

static const tensor_row tensors[] = {
    {"token_embd.weight", {WIDTH, VOCAB}},   {"output_norm.weight", {WIDTH, 0}},
    {"output.weight", {WIDTH, VOCAB}},       {"blk.0.attn_norm.weight", {WIDTH, 0}},
    {"blk.0.attn_q.weight", {WIDTH, WIDTH}}, {"blk.0.attn_k.weight", {WIDTH, WIDTH}},
    {"blk.0.attn_v.weight", {WIDTH, WIDTH}}, {"blk.0.attn_output.weight", {WIDTH, WIDTH}},
    {"blk.0.ffn_norm.weight", {WIDTH, 0}},   {"blk.0.ffn_gate.weight", {WIDTH, FFN}},
    {"blk.0.ffn_up.weight", {WIDTH, FFN}},   {"blk.0.ffn_down.weight", {FFN, WIDTH}},
};

static uint64_t tensor_bytes(const tensor_row *t)
{
    return t->shape[1] ? t->shape[0] / 32 * t->shape[1] * sizeof(rf_block_q4_0)
                       : t->shape[0] * sizeof(float);
}

static tiny_gguf make_model(void)
{
    tiny_gguf file = tiny_begin(3);
    tiny_key_text(&file, "general.architecture", "llama");
    tiny_key_u32(&file, "llama.block_count", 1);
    tiny_key_u32(&file, "llama.context_length", 64);
    tiny_key_u32(&file, "llama.embedding_length", WIDTH);
    tiny_key_u32(&file, "llama.feed_forward_length", FFN);
    tiny_key_u32(&file, "llama.attention.head_count", 4);
    tiny_key_u32(&file, "llama.rope.dimension_count", WIDTH / 4);
    tiny_key_f32(&file, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    uint64_t at = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(tensors); i++) {
        const tensor_row *t = &tensors[i];
        tiny_tensor(&file, t->name, t->shape[1] ? RF_Q4_0 : RF_F32, t->shape[1] ? 2 : 1, t->shape,
                    at);
        at += (tensor_bytes(t) + 31) & ~31ull;
    }
    tiny_finish(&file, at);
    uint64_t seed = 7;
    uint8_t *data = file.bytes + file.data_offset;
    for (size_t i = 0; i < RF_ARRAY_COUNT(tensors); i++) {
        const uint64_t bytes = tensor_bytes(&tensors[i]);
        for (uint64_t j = 0; j < bytes; j++) {
            seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
            data[j] = (uint8_t)(seed >> 56);
        }
        for (uint64_t j = 0; j < bytes; j += tensors[i].shape[1] ? sizeof(rf_block_q4_0) : 4) {
            const uint16_t scale = 0x2A00; /* f16: 0.047 */
            const float one = 1.0f;
            memcpy(data + j, tensors[i].shape[1] ? (const void *)&scale : (const void *)&one,
                   tensors[i].shape[1] ? 2 : 4);
        }
        data += (bytes + 31) & ~31ull;
    }
    return file;
}

typedef struct session {
    tiny_gguf bytes;
    rf_file *file;
    rf_model_plan *plan;
    rf_model *model;
} session;

static session open_session(uint32_t act_prompt, uint32_t act_generation)
{
    session s = {.bytes = make_model()};
    rf_options options;
    rf_error err = {0};
    rf_options_init(&options);
    options.ctx = 64;
    options.slots = 2;
    options.chunk = 2 * LENGTH;
    options.logit_rows = 2 * LENGTH;
    options.threads = 2;
    options.act_prompt = act_prompt;
    options.act_generation = act_generation;
    if (rf_file_open_memory("tiny", s.bytes.bytes, s.bytes.size, &s.file, &err) ||
        rf_plan_make(s.file, &options, &s.plan, &err) ||
        rf_model_open(s.plan, NULL, NULL, &s.model, &err))
        fail_msg("%s: %s (expected %s, got %s)", err.where, err.what, err.expected, err.got);
    return s;
}

static void close_session(session *s)
{
    rf_model_close(s->model, NULL);
    rf_model_plan_close(s->plan);
    rf_file_close(s->file);
    tiny_free(&s->bytes);
}

static uint32_t token_at(uint32_t slot, uint32_t position)
{
    return (slot * 11 + position * 7 + 3) % VOCAB;
}

/* The logits of LENGTH positions of a slot's text, all of one phase, chunk items a step. */
static void feed(session *s, uint32_t slot, rf_step_phase phase, uint32_t chunk, float *out)
{
    for (uint32_t at = 0; at < LENGTH; at += chunk) {
        rf_step_item items[LENGTH];
        const uint32_t count = RF_MIN(chunk, LENGTH - at);
        for (uint32_t i = 0; i < count; i++)
            items[i] = (rf_step_item){slot, token_at(slot, at + i), at + i, true, phase};
        assert_int_equal(rf_step(s->model, items, count, NULL), RF_OK);
        for (uint32_t i = 0; i < count; i++)
            memcpy(out + (at + i) * VOCAB, rf_logits(s->model, i), VOCAB * sizeof *out);
    }
}

typedef float texts[LENGTH * VOCAB];

static void each_phase_has_its_own_precision(void **state)
{
    (void)state;
    static texts prompt, generation, exact, coarse;
    session both = open_session(8, 16), fine = open_session(16, 16), rough = open_session(8, 8);
    feed(&both, 0, RF_STEP_PROMPT, LENGTH, prompt);
    feed(&both, 1, RF_STEP_GENERATION, 1, generation);
    feed(&fine, 1, RF_STEP_PROMPT, LENGTH, exact);
    feed(&rough, 0, RF_STEP_GENERATION, 1, coarse);
    assert_memory_equal(prompt, coarse, sizeof prompt);
    assert_memory_equal(generation, exact, sizeof exact);
    feed(&fine, 0, RF_STEP_PROMPT, 5, exact);
    assert_true(memcmp(prompt, exact, sizeof exact) != 0);
    for (size_t i = 0; i < LENGTH * VOCAB; i++) /* 8 bits are rough, not wrong */
        assert_true(fabsf(prompt[i] - exact[i]) < 0.2f + 0.05f * fabsf(exact[i]));
    close_session(&both);
    close_session(&fine);
    close_session(&rough);
}

/* Slot 0 reads a prompt while slot 1 generates, in the same batches, their items mixed. */
static void phases_in_one_batch_give_the_bits_that_they_give_alone(void **state)
{
    (void)state;
    static texts alone[2];
    session s = open_session(8, 16), other = open_session(8, 16);
    feed(&s, 0, RF_STEP_PROMPT, 7, alone[0]);
    feed(&s, 1, RF_STEP_GENERATION, 1, alone[1]);
    for (uint32_t at = 0; at < LENGTH; at += 3) {
        rf_step_item items[6];
        for (uint32_t i = 0; i < 6; i++) {
            const uint32_t slot = i % 2, position = at + i / 2;
            items[i] = (rf_step_item){slot, token_at(slot, position), position, i != 2,
                                      slot ? RF_STEP_GENERATION : RF_STEP_PROMPT};
        }
        assert_int_equal(rf_step(other.model, items, 6, NULL), RF_OK);
        for (uint32_t i = 0, row = 0; i < 6; i++) {
            if (i == 2)
                continue;
            assert_memory_equal(rf_logits(other.model, row++), alone[i % 2] + (at + i / 2) * VOCAB,
                                VOCAB * sizeof(float));
        }
    }
    close_session(&s);
    close_session(&other);
}

static void a_precision_that_there_is_not_is_refused(void **state)
{
    (void)state;
    session s = open_session(8, 16);
    rf_model_plan *plan = NULL;
    rf_options options;
    rf_error err = {0};
    rf_options_init(&options);
    options.act_generation = 12;
    assert_int_equal(rf_plan_make(s.file, &options, &plan, &err), RF_ERR_USAGE);
    assert_string_equal(err.where, "act_generation");
    close_session(&s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_phase_has_its_own_precision),
        cmocka_unit_test(phases_in_one_batch_give_the_bits_that_they_give_alone),
        cmocka_unit_test(a_precision_that_there_is_not_is_refused),
    };
    return cmocka_run_group_tests_name("phase", tests, NULL, NULL);
}
