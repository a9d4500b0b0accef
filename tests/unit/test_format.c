/* tests/unit/test_format.c: the format table, 16-bit floats, block decoders and the name map.
 *
 * The decoders are compared with the vectors of tests/vectors, which the `gguf` Python package
 * made. The header reader has a file of its own, test_gguf.c.
 */
#include "format/format.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#ifndef RF_TEST_SOURCE_DIR
#define RF_TEST_SOURCE_DIR "."
#endif

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- the table --------------------------------------------------------------------------- */

static void every_type_has_the_size_that_the_reference_gives_it(void **state)
{
    (void)state;
    FILE *file = fopen(RF_TEST_SOURCE_DIR "/tests/vectors/format_sizes.vec", "r");
    assert_non_null(file);
    unsigned id, elements, bytes, rows = 0;
    char name[32];
    while (fscanf(file, "%u %31s %u %u", &id, name, &elements, &bytes) == 4) {
        const rf_format_info *info = rf_format_info_of(id);
        assert_non_null(info);
        assert_int_equal((int)info->format, id);
        assert_string_equal(info->name, name);
        assert_int_equal(info->block_elements, elements);
        /* The package has the struct of before 2023 here: tests/vectors/README.md. */
        assert_int_equal(info->block_bytes, id == RF_Q8_1 ? 36 : bytes);
        rows++;
    }
    fclose(file);
    assert_int_equal(rows, 34);
}

static void a_removed_type_has_a_name_and_no_size(void **state)
{
    (void)state;
    static const struct {
        uint32_t id;
        const char *name;
    } removed[] = {{4, "q4_2"},      {5, "q4_3"},        {31, "q4_0_4_4"},   {32, "q4_0_4_8"},
                   {33, "q4_0_8_8"}, {36, "iq4_nl_4_4"}, {37, "iq4_nl_4_8"}, {38, "iq4_nl_8_8"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(removed); i++) {
        const rf_format_info *info = rf_format_info_of(removed[i].id);
        assert_non_null(info);
        assert_string_equal(info->name, removed[i].name);
        assert_int_equal(info->block_elements, 0);
        uint64_t bytes = 7;
        assert_false(rf_format_row_bytes(info->format, 0, &bytes));
        assert_int_equal(bytes, 7);
    }
}

static void an_id_that_nobody_gave_out_has_no_row(void **state)
{
    (void)state;
    static const uint32_t unknown[] = {43, 47, 48, 142, 255, 0x80000000u, UINT32_MAX};
    for (size_t i = 0; i < RF_ARRAY_COUNT(unknown); i++) {
        assert_null(rf_format_info_of(unknown[i]));
        assert_string_equal(rf_format_name((rf_format)unknown[i]), "?");
    }
}

static void a_format_is_found_by_its_name_in_any_case(void **state)
{
    (void)state;
    for (uint32_t id = 0; id < RF_FORMAT_FILE_COUNT; id++) {
        const rf_format_info *info = rf_format_info_of(id);
        if (!info)
            continue;
        assert_int_equal((int)info->format, id);
        assert_ptr_equal(rf_format_by_name(info->name), info);
    }
    assert_int_equal((int)rf_format_by_name("Q4_K")->format, RF_Q4_K);
    assert_int_equal((int)rf_format_by_name("iq2_XXS")->format, RF_IQ2_XXS);
    assert_null(rf_format_by_name("q4"));
    assert_null(rf_format_by_name("q4_k_m"));
    assert_null(rf_format_by_name(""));
}

static void a_row_is_a_whole_number_of_blocks_or_refused(void **state)
{
    (void)state;
    uint64_t bytes = 7;
    assert_true(rf_format_row_bytes(RF_Q4_K, 512, &bytes));
    assert_int_equal(bytes, 288);
    assert_true(rf_format_row_bytes(RF_F16, 0, &bytes));
    assert_int_equal(bytes, 0);
    bytes = 7;
    assert_false(rf_format_row_bytes(RF_Q4_K, 511, &bytes));
    assert_false(rf_format_row_bytes(RF_Q8_0, 33, &bytes));
    assert_false(rf_format_row_bytes(RF_FORMAT_NONE, 32, &bytes));
    assert_false(rf_format_row_bytes(RF_F64, UINT64_MAX / 8 + 1, &bytes));
    assert_false(rf_format_row_bytes(RF_Q8_0, UINT64_MAX - 31, &bytes));
    assert_int_equal(bytes, 7);
}

/* ---- 16-bit floats ----------------------------------------------------------------------- */

static void every_half_becomes_the_float_that_it_denotes(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        int exponent = (int)(half >> 10 & 31);
        int mantissa = (int)(half & 1023);
        float value = rf_f16_to_f32((uint16_t)half);
        assert_int_equal(signbit(value) != 0, half >> 15);
        if (exponent == 31 && mantissa != 0) {
            /* Quiet, as processors convert a signalling one; the payload stays. */
            uint32_t expected = (half & 0x8000) << 16 | 0x7fc00000 | (half & 1023) << 13;
            assert_int_equal(bits_of(value), expected);
        } else if (exponent == 31) {
            assert_true(isinf(value));
        } else {
            double magnitude =
                exponent == 0 ? ldexp(mantissa, -24) : ldexp(1024 + mantissa, exponent - 25);
            assert_true((double)fabsf(value) == magnitude);
        }
    }
}

static void every_half_survives_the_way_to_float_and_back(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        bool nan = (half & 0x7fff) > 0x7c00;
        uint32_t quiet = nan ? 0x0200 : 0;
        assert_int_equal(rf_f32_to_f16(rf_f16_to_f32((uint16_t)half)), half | quiet);
    }
}

/* Between each half and the next: the middle goes to the even one, all else to the nearer. */
static void a_float_becomes_the_nearest_half_and_a_tie_the_even_one(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x7bff; half++) {
        float low = rf_f16_to_f32((uint16_t)half);
        float high = rf_f16_to_f32((uint16_t)(half + 1));
        float middle = low + (high - low) / 2; /* exact: a float has 13 more bits */
        uint32_t even = half + (half & 1);
        assert_int_equal(rf_f32_to_f16(middle), even);
        assert_int_equal(rf_f32_to_f16(-middle), even | 0x8000);
        assert_int_equal(rf_f32_to_f16(nextafterf(middle, 0)), half);
        assert_int_equal(rf_f32_to_f16(nextafterf(middle, INFINITY)), half + 1);
    }
    assert_int_equal(rf_f32_to_f16(nextafterf(65520.0f, 0)), 0x7bff);
    assert_int_equal(rf_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(rf_f32_to_f16(3e38f), 0x7c00);
    assert_int_equal(rf_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(rf_f32_to_f16(float_of(0x00000001)), 0x0000);
    assert_int_equal(rf_f32_to_f16(float_of(0x7f800001)), 0x7e00);
    assert_int_equal(rf_f32_to_f16(float_of(0xffffffff)), 0xffff);
}

static void a_bfloat_is_the_upper_half_of_a_float_rounded_to_even(void **state)
{
    (void)state;
    for (uint32_t half = 0; half < 0x10000; half++) {
        assert_int_equal(bits_of(rf_bf16_to_f32((uint16_t)half)), half << 16);
        if ((half & 0x7fff) >= 0x7f80)
            continue;
        assert_int_equal(rf_f32_to_bf16(float_of(half << 16)), half);
        assert_int_equal(rf_f32_to_bf16(float_of(half << 16 | 0x7fff)), half);
        assert_int_equal(rf_f32_to_bf16(float_of(half << 16 | 0x8000)), half + (half & 1));
        assert_int_equal(rf_f32_to_bf16(float_of(half << 16 | 0x8001)), half + 1);
    }
    assert_int_equal(rf_f32_to_bf16(INFINITY), 0x7f80);
    assert_int_equal(rf_f32_to_bf16(float_of(0x7f800001)), 0x7fc0);
    assert_int_equal(rf_f32_to_bf16(float_of(0xffffffff)), 0xffff);
}

/* ---- decoders ---------------------------------------------------------------------------- */

typedef struct vector {
    uint8_t *bytes; /* the file */
    uint32_t type_id;
    uint32_t count;
    uint32_t row_bytes;
    const uint8_t *row;
    const uint8_t *values; /* count floats */
} vector;

static vector load_vector(const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tests/vectors/decode_%s.vec", RF_TEST_SOURCE_DIR, name);
    FILE *file = fopen(path, "rb");
    assert_non_null(file);
    enum { LIMIT = 1 << 20, HEADER = 24 };
    vector v = {.bytes = malloc(LIMIT)};
    size_t size = fread(v.bytes, 1, LIMIT, file);
    fclose(file);
    assert_true(size > HEADER && memcmp(v.bytes, "rfvec 1\n", 8) == 0);
    memcpy(&v.type_id, v.bytes + 8, 4);
    memcpy(&v.count, v.bytes + 12, 4);
    memcpy(&v.row_bytes, v.bytes + 16, 4);
    v.row = v.bytes + HEADER;
    v.values = v.row + v.row_bytes;
    assert_int_equal(size, HEADER + v.row_bytes + 4 * (size_t)v.count);
    return v;
}

/* Decodes from an odd address, as a file with an alignment of 1 may ask for. */
static void check_decoder(const rf_format_info *info)
{
    vector v = load_vector(info->name);
    assert_int_equal(v.type_id, (int)info->format);
    uint64_t row_bytes = 0;
    assert_true(rf_format_row_bytes(info->format, v.count, &row_bytes));
    assert_int_equal(row_bytes, v.row_bytes);
    uint8_t *row = malloc(row_bytes + 1);
    float *values = malloc(v.count * sizeof *values);
    memcpy(row + 1, v.row, row_bytes);
    assert_true(rf_decode_row(info->format, row + 1, values, v.count));
    for (uint32_t i = 0; i < v.count; i++) {
        float expected;
        memcpy(&expected, v.values + 4 * (size_t)i, 4);
        bool same = bits_of(values[i]) == bits_of(expected);
        if (!same && !(isnan(values[i]) && isnan(expected)))
            fail_msg("%s: value %u is %a, expected %a", info->name, i, (double)values[i],
                     (double)expected);
    }
    free(values);
    free(row);
    free(v.bytes);
}

static void every_decoder_gives_the_bits_of_the_reference(void **state)
{
    (void)state;
    int decoders = 0;
    for (uint32_t id = 0; id < RF_FORMAT_FILE_COUNT; id++) {
        const rf_format_info *info = rf_format_info_of(id);
        if (!info || !info->decodes)
            continue;
        check_decoder(info);
        decoders++;
    }
    assert_int_equal(decoders, 17);
}

static void a_format_decodes_when_the_table_says_so(void **state)
{
    (void)state;
    for (uint32_t id = 0; id < 300; id++) {
        const rf_format_info *info = rf_format_info_of(id);
        float untouched = 7;
        bool decodes = rf_decode_row((rf_format)id, &untouched, &untouched, 0);
        assert_int_equal(decodes, info && info->decodes);
        assert_true(untouched == 7);
    }
}

/* ---- names ------------------------------------------------------------------------------- */

static const char *const name_pairs[][2] = {
    {"token_embd.weight", "model.embed_tokens.weight"},
    {"output_norm.weight", "model.norm.weight"},
    {"output.weight", "model.lm_head.weight"},
    {"rope_freqs.weight", "model.rope_freqs.weight"},
    {"blk.0.attn_norm.weight", "model.layers[0].attn_norm.weight"},
    {"blk.3.attn_q.weight", "model.layers[3].attn.q_proj.weight"},
    {"blk.3.attn_k.bias", "model.layers[3].attn.k_proj.bias"},
    {"blk.10.attn_v.weight", "model.layers[10].attn.v_proj.weight"},
    {"blk.3.attn_output.weight", "model.layers[3].attn.o_proj.weight"},
    {"blk.3.attn_qkv.weight", "model.layers[3].attn.qkv_proj.weight"},
    {"blk.3.attn_q_norm.weight", "model.layers[3].attn.q_norm.weight"},
    {"blk.3.attn_k_norm.weight", "model.layers[3].attn.k_norm.weight"},
    {"blk.3.post_attention_norm.weight", "model.layers[3].post_attn_norm.weight"},
    {"blk.3.ffn_norm.weight", "model.layers[3].ffn_norm.weight"},
    {"blk.3.ffn_gate.weight", "model.layers[3].mlp.gate_proj.weight"},
    {"blk.3.ffn_up.weight", "model.layers[3].mlp.up_proj.weight"},
    {"blk.3.ffn_down.bias", "model.layers[3].mlp.down_proj.bias"},
    {"blk.3.post_ffw_norm.weight", "model.layers[3].post_ffn_norm.weight"},
    {"blk.2147483647.attn_q.weight", "model.layers[2147483647].attn.q_proj.weight"},
};

static rf_text text_of(const char *text)
{
    return (rf_text){text, strlen(text)};
}

static void names_and_ids_translate_both_ways(void **state)
{
    (void)state;
    char out[96];
    for (size_t i = 0; i < RF_ARRAY_COUNT(name_pairs); i++) {
        assert_true(rf_name_to_id(text_of(name_pairs[i][0]), out, sizeof out));
        assert_string_equal(out, name_pairs[i][1]);
        assert_true(rf_id_to_name(name_pairs[i][1], out, sizeof out));
        assert_string_equal(out, name_pairs[i][0]);
    }
}

static void an_unknown_name_is_refused_and_leaves_nothing(void **state)
{
    (void)state;
    static const char *const names[] = {"",
                                        "blk.",
                                        "blk.3",
                                        "blk.3.",
                                        "blk..attn_q.weight",
                                        "blk.03.attn_q.weight",
                                        "blk.00.attn_q.weight",
                                        "blk.+3.attn_q.weight",
                                        "blk.-1.attn_q.weight",
                                        "blk.2147483648.attn_q.weight",
                                        "blk.18446744073709551616.attn_q.weight",
                                        "blk.3.attn_q",
                                        "blk.3.attn_q.weights",
                                        "blk.3.attn_q.weight.weight",
                                        "blk.3.attn_x.weight",
                                        "blk.3attn_q.weight",
                                        "BLK.3.attn_q.weight",
                                        "output.bias",
                                        "token_embd.weight ",
                                        "model.norm.weight",
                                        "blk.3.ffn_gate_exps.weight"};
    static const char *const ids[] = {"",
                                      "model.layers[3]",
                                      "model.layers[03].attn.q_proj.weight",
                                      "model.layers[].attn.q_proj.weight",
                                      "model.layers[3.attn.q_proj.weight",
                                      "model.layers[2147483648].attn.q_proj.weight",
                                      "model.layers[3].attn.q_proj",
                                      "model.layers[3].attn_q.weight",
                                      "blk.3.attn_q.weight",
                                      "model.norm.bias"};
    char out[96];
    for (size_t i = 0; i < RF_ARRAY_COUNT(names); i++) {
        memset(out, 'x', sizeof out);
        if (rf_name_to_id(text_of(names[i]), out, sizeof out) || out[0])
            fail_msg("%s became %s", names[i], out);
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(ids); i++) {
        memset(out, 'x', sizeof out);
        if (rf_id_to_name(ids[i], out, sizeof out) || out[0])
            fail_msg("%s became %s", ids[i], out);
    }
    /* A view is not terminated: what follows it does not belong to it. */
    assert_false(rf_name_to_id((rf_text){"output.weight", 12}, out, sizeof out));
    assert_true(rf_name_to_id((rf_text){"output.weights", 13}, out, sizeof out));
}

static void a_name_that_does_not_fit_is_refused_whole(void **state)
{
    (void)state;
    const char *name = "blk.3.attn_q.weight";
    size_t needed = strlen("model.layers[3].attn.q_proj.weight") + 1;
    for (size_t capacity = 0; capacity < needed; capacity++) {
        char *out = malloc(capacity + 1); /* the sanitizer sees a write past it */
        out[0] = 'x';
        assert_false(rf_name_to_id(text_of(name), out, capacity));
        assert_int_equal(out[0], capacity > 0 ? '\0' : 'x');
        free(out);
    }
    char out[64];
    assert_true(rf_name_to_id(text_of(name), out, needed));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_type_has_the_size_that_the_reference_gives_it),
        cmocka_unit_test(a_removed_type_has_a_name_and_no_size),
        cmocka_unit_test(an_id_that_nobody_gave_out_has_no_row),
        cmocka_unit_test(a_format_is_found_by_its_name_in_any_case),
        cmocka_unit_test(a_row_is_a_whole_number_of_blocks_or_refused),
        cmocka_unit_test(every_half_becomes_the_float_that_it_denotes),
        cmocka_unit_test(every_half_survives_the_way_to_float_and_back),
        cmocka_unit_test(a_float_becomes_the_nearest_half_and_a_tie_the_even_one),
        cmocka_unit_test(a_bfloat_is_the_upper_half_of_a_float_rounded_to_even),
        cmocka_unit_test(every_decoder_gives_the_bits_of_the_reference),
        cmocka_unit_test(a_format_decodes_when_the_table_says_so),
        cmocka_unit_test(names_and_ids_translate_both_ways),
        cmocka_unit_test(an_unknown_name_is_refused_and_leaves_nothing),
        cmocka_unit_test(a_name_that_does_not_fit_is_refused_whole),
    };
    return cmocka_run_group_tests_name("format", tests, NULL, NULL);
}
