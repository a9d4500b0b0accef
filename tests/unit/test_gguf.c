/* tests/unit/test_gguf.c: the GGUF header reader, on files as they should be and as they are sent.
 *
 * One small file has a key of every type and tensors of several shapes. It is read back, then cut
 * at every byte, then given every hostile number in every field, then flipped at random: a read
 * ends with a named error, or with views that lie in the file. Each file lies in a block of exactly
 * its size, so that the address sanitizer sees a read past the end.
 */
#include "tiny_gguf.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

static const float numbers[3] = {0.5f, -1.25f, 3e38f};
static const int8_t signs[2] = {-128, 127};
static const uint8_t flags[4] = {1, 0, 0, 1};
static const char *const texts[3] = {"one", "", "\xe2\x96\x81three"};

static tiny_gguf base_file(uint32_t version)
{
    tiny_gguf file = tiny_begin(version);
    tiny_key_text(&file, "general.architecture", "llama");
    tiny_key_u32(&file, "general.alignment", 64);
    tiny_key_bits(&file, "test.u8", RF_GGUF_U8, 0xfe, 1);
    tiny_key_bits(&file, "test.i8", RF_GGUF_I8, 0xfe, 1);
    tiny_key_bits(&file, "test.u16", RF_GGUF_U16, 0xfffe, 2);
    tiny_key_bits(&file, "test.i16", RF_GGUF_I16, 0xfffe, 2);
    tiny_key_bits(&file, "test.i32", RF_GGUF_I32, 0xfffffffe, 4);
    tiny_key_f32(&file, "test.f32", 0.1f);
    tiny_key_bool(&file, "test.bool", true);
    tiny_key_bits(&file, "test.u64", RF_GGUF_U64, UINT64_MAX - 1, 8);
    tiny_key_bits(&file, "test.i64", RF_GGUF_I64, (uint64_t)-2, 8);
    tiny_key_bits(&file, "test.f64", RF_GGUF_F64, 0x4000000000000000, 8);
    tiny_key_array(&file, "test.numbers", RF_GGUF_F32, 3, numbers, 4);
    tiny_key_array(&file, "test.signs", RF_GGUF_I8, 2, signs, 1);
    tiny_key_array(&file, "test.flags", RF_GGUF_BOOL, 4, flags, 1);
    tiny_key_array(&file, "test.nothing", RF_GGUF_U64, 0, NULL, 8);
    tiny_key_texts(&file, "test.texts", 3, texts);
    tiny_tensor(&file, "token_embd.weight", RF_F32, 2, (uint64_t[]){8, 5}, 0);
    tiny_tensor(&file, "blk.0.attn_q.weight", RF_Q4_0, 2, (uint64_t[]){64, 2}, 192);
    tiny_tensor(&file, "blk.0.attn_norm.weight", RF_F16, 1, (uint64_t[]){8}, 320);
    tiny_tensor(&file, "experts", RF_I8, 4, (uint64_t[]){3, 2, 1, 2}, 384);
    tiny_tensor(&file, "empty", RF_F32, 3, (uint64_t[]){8, 0, 3}, 384);
    tiny_finish(&file, 384 + 12);
    return file;
}

/* ---- reading, the way a caller does it ---------------------------------------------------- */

typedef struct opened {
    rf_gguf gguf;
    uint8_t *bytes;
    void *scratch;
} opened;

static rf_status open_bytes(const uint8_t *bytes, size_t size, opened *file, rf_error *err)
{
    *file = (opened){.bytes = malloc(size)};
    if (size > 0)
        memcpy(file->bytes, bytes, size);
    rf_status status = rf_gguf_scan(file->bytes, size, &file->gguf, err);
    if (status != RF_OK)
        return status;
    file->gguf.keys = malloc(file->gguf.key_count * sizeof *file->gguf.keys);
    file->gguf.tensors = malloc(file->gguf.tensor_count * sizeof *file->gguf.tensors);
    file->scratch = malloc(rf_gguf_scratch_bytes(&file->gguf));
    return rf_gguf_read(&file->gguf, file->scratch, err);
}

static rf_status open_tiny(const tiny_gguf *tiny, opened *file, rf_error *err)
{
    return open_bytes(tiny->bytes, tiny->size, file, err);
}

static void close_file(opened *file)
{
    free(file->gguf.keys);
    free(file->gguf.tensors);
    free(file->scratch);
    free(file->bytes);
}

/* What a caller may rely on after RF_OK, whatever the file was. */
static void check_key(const opened *file, const rf_gguf_key *key)
{
    assert_true(key->name.length > 0);
    assert_null(memchr(key->name.bytes, 0, key->name.length));
    assert_true(key->data >= file->bytes);
    uint64_t at = (uint64_t)(key->data - file->bytes);
    assert_true(at <= file->gguf.size && key->data_bytes <= file->gguf.size - at);
    rf_text text;
    uint64_t walk = 0, walked = 0;
    if (rf_gguf_text(key, &text))
        assert_true((const uint8_t *)text.bytes + text.length == key->data + key->data_bytes);
    while (rf_gguf_next_text(key, &walk, &text)) {
        assert_true((const uint8_t *)text.bytes + text.length <= key->data + key->data_bytes);
        walked++;
    }
    bool is_texts = key->type == RF_GGUF_ARRAY && key->element_type == RF_GGUF_STRING;
    assert_int_equal(walked, is_texts ? key->count : 0);
    uint64_t u64;
    int64_t i64;
    double f64;
    for (uint64_t index = key->count - (key->count > 0); index <= key->count; index++) {
        bool read = rf_gguf_u64(key, index, &u64) || rf_gguf_i64(key, index, &i64) ||
                    rf_gguf_f64(key, index, &f64);
        assert_int_equal(read, index < key->count && key->element_type != RF_GGUF_STRING);
    }
}

static void check_opened(const opened *file)
{
    const rf_gguf *gguf = &file->gguf;
    for (uint32_t i = 0; i < gguf->key_count; i++)
        check_key(file, &gguf->keys[i]);
    uint64_t data_end = gguf->data_offset;
    bool missing = false;
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        const rf_gguf_tensor *tensor = &gguf->tensors[i];
        const rf_format_info *info = rf_format_info_of(tensor->type_id);
        uint64_t end = tensor->offset + tensor->bytes;
        assert_true(info && info->block_elements > 0);
        assert_true(tensor->rank >= 1 && tensor->rank <= 4);
        assert_true(tensor->offset >= gguf->data_offset && end >= tensor->offset);
        assert_true(tensor->offset % gguf->alignment == 0);
        assert_int_equal(tensor->in_file, end <= gguf->size);
        missing |= !tensor->in_file;
        data_end = RF_MAX(data_end, end);
        for (uint32_t j = 0; j < i; j++) {
            const rf_gguf_tensor *other = &gguf->tensors[j];
            assert_true(tensor->bytes == 0 || other->bytes == 0 || end <= other->offset ||
                        other->offset + other->bytes <= tensor->offset);
        }
    }
    assert_int_equal(gguf->data_end, data_end);
    assert_int_equal(gguf->data_missing, missing);
}

static void check_error(rf_status status, const rf_error *err)
{
    assert_true(status == RF_ERR_BAD_MODEL || status == RF_ERR_UNSUPPORTED);
    assert_int_equal(err->status, status);
    assert_true(err->where[0] != '\0' && err->what[0] != '\0');
}

static void expect_error(const tiny_gguf *tiny, rf_status status, const char *where,
                         const char *what)
{
    opened file;
    rf_error err = {.what = "accepted"};
    rf_status got = open_tiny(tiny, &file, &err);
    close_file(&file);
    if (got != status || !strstr(err.where, where) || !strstr(err.what, what))
        fail_msg("expected %s at %s: %s\ngot %s at %s: %s (expected %s, got %s)",
                 rf_status_name(status), where, what, rf_status_name(got), err.where, err.what,
                 err.expected, err.got);
}

/* ---- files as they should be -------------------------------------------------------------- */

static uint64_t number_of(const rf_gguf *gguf, const char *name, uint64_t index)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, name);
    assert_non_null(key);
    uint64_t value = 0;
    assert_true(rf_gguf_u64(key, index, &value));
    return value;
}

static int64_t signed_of(const rf_gguf *gguf, const char *name, uint64_t index)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, name);
    assert_non_null(key);
    int64_t value = 0;
    assert_true(rf_gguf_i64(key, index, &value));
    return value;
}

static double float_of(const rf_gguf *gguf, const char *name, uint64_t index)
{
    const rf_gguf_key *key = rf_gguf_find(gguf, name);
    assert_non_null(key);
    double value = 0;
    assert_true(rf_gguf_f64(key, index, &value));
    return value;
}

static void keys_of_every_type_read_back(void **state)
{
    (void)state;
    for (uint32_t version = 2; version <= 3; version++) {
        tiny_gguf tiny = base_file(version);
        opened file;
        assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
        check_opened(&file);
        const rf_gguf *gguf = &file.gguf;
        rf_text text;
        assert_int_equal(gguf->version, version);
        assert_int_equal(gguf->alignment, 64);
        assert_int_equal(gguf->key_count, 17);
        assert_true(rf_gguf_text(rf_gguf_find(gguf, "general.architecture"), &text));
        assert_true(rf_text_is(text, "llama"));
        assert_int_equal(number_of(gguf, "test.u8", 0), 0xfe);
        assert_int_equal(number_of(gguf, "test.u16", 0), 0xfffe);
        assert_int_equal(number_of(gguf, "test.u64", 0), UINT64_MAX - 1);
        assert_int_equal(number_of(gguf, "test.bool", 0), 1);
        assert_int_equal(number_of(gguf, "test.flags", 3), 1);
        assert_int_equal(signed_of(gguf, "test.i8", 0), -2);
        assert_int_equal(signed_of(gguf, "test.i16", 0), -2);
        assert_int_equal(signed_of(gguf, "test.i32", 0), -2);
        assert_int_equal(signed_of(gguf, "test.i64", 0), -2);
        assert_int_equal(signed_of(gguf, "test.u8", 0), 0xfe);
        assert_int_equal(signed_of(gguf, "test.signs", 0), -128);
        assert_int_equal(signed_of(gguf, "test.signs", 1), 127);
        assert_true(float_of(gguf, "test.f32", 0) == (double)0.1f);
        assert_true(float_of(gguf, "test.f64", 0) == 2.0);
        assert_true(float_of(gguf, "test.numbers", 1) == -1.25);
        assert_int_equal(rf_gguf_find(gguf, "test.nothing")->count, 0);
        uint64_t at = 0;
        for (int i = 0; i < 3; i++) {
            assert_true(rf_gguf_next_text(rf_gguf_find(gguf, "test.texts"), &at, &text));
            assert_true(rf_text_is(text, texts[i]));
        }
        assert_null(rf_gguf_find(gguf, "test.u"));
        assert_null(rf_gguf_find(gguf, "test.u88"));
        close_file(&file);
        tiny_free(&tiny);
    }
}

static void a_number_of_the_wrong_kind_is_not_converted(void **state)
{
    (void)state;
    tiny_gguf tiny = base_file(3);
    opened file;
    assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
    static const struct {
        const char *name;
        uint64_t index;
        bool u64, i64, f64;
    } cases[] = {
        {"test.u64", 0, true, false, false},          {"test.i64", 0, false, true, false},
        {"test.i8", 0, false, true, false},           {"test.f32", 0, false, false, true},
        {"test.f64", 0, false, false, true},          {"test.bool", 0, true, true, false},
        {"test.bool", 1, false, false, false},        {"test.numbers", 3, false, false, false},
        {"test.texts", 0, false, false, false},       {"test.nothing", 0, false, false, false},
        {"test.u8", UINT64_MAX, false, false, false},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        const rf_gguf_key *key = rf_gguf_find(&file.gguf, cases[i].name);
        uint64_t u64, at = 0;
        int64_t i64;
        double f64;
        rf_text text;
        assert_int_equal(rf_gguf_u64(key, cases[i].index, &u64), cases[i].u64);
        assert_int_equal(rf_gguf_i64(key, cases[i].index, &i64), cases[i].i64);
        assert_int_equal(rf_gguf_f64(key, cases[i].index, &f64), cases[i].f64);
        assert_false(rf_gguf_text(key, &text));
        bool is_texts = strcmp(cases[i].name, "test.texts") == 0;
        assert_int_equal(rf_gguf_next_text(key, &at, &text), is_texts);
    }
    uint64_t at = 0;
    rf_text text;
    const rf_gguf_key *scalar = rf_gguf_find(&file.gguf, "general.architecture");
    assert_false(rf_gguf_next_text(scalar, &at, &text));
    close_file(&file);
    tiny_free(&tiny);
}

static void tensors_read_back_with_their_place_in_the_file(void **state)
{
    (void)state;
    tiny_gguf tiny = base_file(3);
    opened file;
    assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
    const rf_gguf *gguf = &file.gguf;
    assert_int_equal(gguf->data_offset, tiny.data_offset);
    assert_int_equal(gguf->data_end, tiny.size);
    assert_false(gguf->data_missing);
    const rf_gguf_tensor *tensor = rf_gguf_find_tensor(gguf, "blk.0.attn_q.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->type_id, RF_Q4_0);
    assert_int_equal(tensor->rank, 2);
    assert_int_equal(tensor->shape[0], 64);
    assert_int_equal(tensor->shape[1], 2);
    assert_int_equal(tensor->shape[2], 1);
    assert_int_equal(tensor->offset, tiny.data_offset + 192);
    assert_int_equal(tensor->bytes, 2 * 2 * 18);
    assert_true(tensor->in_file);
    assert_int_equal(rf_gguf_find_tensor(gguf, "experts")->bytes, 12);
    assert_null(rf_gguf_find_tensor(gguf, "blk.0.attn_q.weigh"));
    close_file(&file);
    tiny_free(&tiny);
}

/* llama.cpp loads such files (ggml#1517): a dimension of zero is odd, not wrong. */
static void a_tensor_with_a_dimension_of_zero_has_no_bytes(void **state)
{
    (void)state;
    tiny_gguf tiny = tiny_begin(3);
    tiny_tensor(&tiny, "a", RF_Q4_K, 2, (uint64_t[]){0, 7}, 0);
    tiny_tensor(&tiny, "b", RF_F32, 4, (uint64_t[]){1, 1, 1, 0}, 0);
    tiny_tensor(&tiny, "c", RF_F32, 1, (uint64_t[]){4}, 0);
    tiny_finish(&tiny, 16);
    opened file;
    assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
    check_opened(&file);
    assert_int_equal(file.gguf.tensors[0].bytes, 0);
    assert_int_equal(file.gguf.tensors[1].bytes, 0);
    close_file(&file);
    tiny_free(&tiny);
}

static void a_file_without_keys_and_tensors_is_a_file(void **state)
{
    (void)state;
    tiny_gguf tiny = tiny_begin(3);
    tiny_patch(&tiny, 8, 0, 8);
    opened file;
    assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
    check_opened(&file);
    assert_int_equal(file.gguf.data_offset, 32);
    close_file(&file);
    tiny_free(&tiny);
}

static void every_power_of_two_up_to_a_mebibyte_aligns(void **state)
{
    (void)state;
    for (uint32_t alignment = 1; alignment <= 1u << 20; alignment *= 2) {
        tiny_gguf tiny = tiny_begin(3);
        tiny_key_u32(&tiny, "general.alignment", alignment);
        tiny_tensor(&tiny, "a", RF_I8, 1, (uint64_t[]){1}, alignment);
        tiny_finish(&tiny, 0);
        opened file;
        assert_int_equal(open_tiny(&tiny, &file, NULL), RF_OK);
        assert_int_equal(file.gguf.tensors[0].offset, tiny.data_offset + alignment);
        assert_true(file.gguf.data_missing);
        close_file(&file);
        tiny_free(&tiny);
    }
}

/* ---- files as they are sent --------------------------------------------------------------- */

typedef struct fault {
    tiny_field field;
    const char *owner;
    size_t nth;
    uint64_t value;
    rf_status status;
    const char *where;
    const char *what;
} fault;

#define BAD RF_ERR_BAD_MODEL
#define ODD RF_ERR_UNSUPPORTED

static const fault faults[] = {
    {TINY_VERSION, "", 0, 0, BAD, "byte 4", "version 0"},
    {TINY_VERSION, "", 0, 1, ODD, "byte 4", "version 1"},
    {TINY_VERSION, "", 0, 4, ODD, "byte 4", "not known"},
    {TINY_VERSION, "", 0, 0x03000000, ODD, "byte 4", "big-endian"},
    {TINY_VERSION, "", 0, 0x02000000, ODD, "byte 4", "big-endian"},
    {TINY_TENSOR_COUNT, "", 0, UINT64_MAX, BAD, "byte 8", "number of tensors"},
    {TINY_TENSOR_COUNT, "", 0, UINT64_MAX / 24 + 1, BAD, "byte 8", "number of tensors"},
    {TINY_TENSOR_COUNT, "", 0, 1000, BAD, "byte 8", "number of tensors"},
    {TINY_KEY_COUNT, "", 0, UINT64_MAX, BAD, "byte 16", "number of keys"},
    {TINY_KEY_COUNT, "", 0, UINT64_MAX / 13 + 1, BAD, "byte 16", "number of keys"},
    {TINY_KEY_COUNT, "", 0, 1000, BAD, "byte 16", "number of keys"},
    {TINY_NAME_LENGTH, "general.architecture", 0, 0, BAD, "key 0 at byte 24", "empty"},
    {TINY_NAME_LENGTH, "general.architecture", 0, UINT64_MAX, BAD, "key 0 at byte 24",
     "longer than the rest of the file"},
    {TINY_TYPE, "test.u8", 0, 13, BAD, "key test.u8", "no such type"},
    {TINY_TYPE, "test.u8", 0, UINT32_MAX, BAD, "key test.u8", "no such type"},
    {TINY_TYPE, "general.alignment", 0, RF_GGUF_I32, BAD, "key general.alignment", "wrong type"},
    {TINY_TYPE, "general.alignment", 0, RF_GGUF_F32, BAD, "key general.alignment", "wrong type"},
    {TINY_VALUE, "general.alignment", 0, 0, BAD, "key general.alignment", "makes no sense"},
    {TINY_VALUE, "general.alignment", 0, 13, BAD, "key general.alignment", "makes no sense"},
    {TINY_VALUE, "general.alignment", 0, 1u << 21, BAD, "key general.alignment", "makes no sense"},
    {TINY_VALUE, "general.alignment", 0, 0x80000000, BAD, "key general.alignment",
     "makes no sense"},
    {TINY_VALUE, "test.bool", 0, 2, BAD, "key test.bool", "neither 0 nor 1"},
    {TINY_VALUE, "test.flags", 0, 255, BAD, "key test.flags", "neither 0 nor 1"},
    {TINY_ELEMENT_TYPE, "test.numbers", 0, 13, BAD, "key test.numbers", "no such type"},
    {TINY_ELEMENT_TYPE, "test.numbers", 0, RF_GGUF_ARRAY, ODD, "key test.numbers",
     "arrays inside arrays"},
    {TINY_COUNT, "test.numbers", 0, UINT64_MAX, BAD, "key test.numbers", "the value is longer"},
    {TINY_COUNT, "test.numbers", 0, 1ull << 62, BAD, "key test.numbers", "the value is longer"},
    {TINY_COUNT, "test.texts", 0, UINT64_MAX, BAD, "key test.texts", "more strings than"},
    {TINY_COUNT, "test.texts", 0, 1ull << 61, BAD, "key test.texts", "more strings than"},
    {TINY_COUNT, "test.texts", 0, 300, BAD, "key test.texts", "more strings than"},
    {TINY_COUNT, "test.texts", 0, 20, BAD, "key test.texts", "is longer than the rest"},
    {TINY_LENGTH, "test.texts", 1, UINT64_MAX, BAD, "key test.texts", "string 1 is longer"},
    {TINY_LENGTH, "test.texts", 2, UINT64_MAX - 7, BAD, "key test.texts", "string 2 is longer"},
    {TINY_LENGTH, "general.architecture", 0, 1ull << 63, BAD, "key general.architecture",
     "longer than the rest"},
    {TINY_NAME_LENGTH, "token_embd.weight", 0, 0, BAD, "tensor 0 at byte", "empty"},
    {TINY_NAME_LENGTH, "token_embd.weight", 0, 65, BAD, "tensor 0 at byte", "too long"},
    {TINY_NAME_LENGTH, "experts", 0, 1ull << 32, BAD, "tensor 3 at byte", "longer than"},
    {TINY_RANK, "token_embd.weight", 0, 0, BAD, "tensor token_embd.weight", "the rank"},
    {TINY_RANK, "token_embd.weight", 0, 5, BAD, "tensor token_embd.weight", "the rank"},
    {TINY_RANK, "token_embd.weight", 0, UINT32_MAX, BAD, "tensor token_embd.weight", "the rank"},
    {TINY_DIMENSION, "token_embd.weight", 0, 1ull << 63, BAD, "tensor token_embd.weight",
     "2^63 or more"},
    {TINY_DIMENSION, "token_embd.weight", 1, UINT64_MAX, BAD, "tensor token_embd.weight",
     "2^63 or more"},
    {TINY_DIMENSION, "token_embd.weight", 1, 1ull << 60, BAD, "tensor token_embd.weight",
     "2^63 or more"},
    {TINY_DIMENSION, "token_embd.weight", 1, 1ull << 59, BAD, "tensor token_embd.weight",
     "its size does not fit"},
    {TINY_DIMENSION, "empty", 2, 1ull << 63, BAD, "tensor empty", "2^63 or more"},
    {TINY_DIMENSION, "token_embd.weight", 1, 7, BAD, "tensor blk.0.attn_q.weight", "overlaps"},
    {TINY_DIMENSION, "blk.0.attn_q.weight", 0, 48, BAD, "tensor blk.0.attn_q.weight",
     "no whole number of q4_0 blocks"},
    {TINY_FORMAT, "token_embd.weight", 0, RF_Q8_0, BAD, "tensor token_embd.weight",
     "no whole number of q8_0 blocks"},
    {TINY_FORMAT, "token_embd.weight", 0, 4, ODD, "tensor token_embd.weight", "q4_2 was removed"},
    {TINY_FORMAT, "token_embd.weight", 0, 43, ODD, "tensor token_embd.weight", "not known"},
    {TINY_FORMAT, "token_embd.weight", 0, UINT32_MAX, ODD, "tensor token_embd.weight", "not known"},
    {TINY_OFFSET, "experts", 0, 1, BAD, "tensor experts", "not aligned"},
    {TINY_OFFSET, "experts", 0, 416, BAD, "tensor experts", "not aligned"},
    {TINY_OFFSET, "experts", 0, 0, BAD, "tensor experts", "overlaps"},
    {TINY_OFFSET, "experts", 0, 128, BAD, "tensor experts", "overlaps"},
    {TINY_OFFSET, "experts", 0, UINT64_MAX - 63, BAD, "tensor experts", "64 bits"},
};

static void each_fault_is_named_with_its_place(void **state)
{
    (void)state;
    tiny_gguf base = base_file(3);
    for (size_t i = 0; i < RF_ARRAY_COUNT(faults); i++) {
        const fault *f = &faults[i];
        const tiny_mark *mark = tiny_find(&base, f->field, f->owner, f->nth);
        tiny_gguf tiny = tiny_copy(&base);
        tiny_patch(&tiny, mark->at, f->value, mark->width);
        expect_error(&tiny, f->status, f->where, f->what);
        tiny_free(&tiny);
    }
    tiny_free(&base);
}

/* Each count alone could be true; both together need more bytes than the file has. */
static void counts_that_fit_only_one_by_one_are_refused(void **state)
{
    (void)state;
    tiny_gguf tiny = base_file(3);
    tiny_patch(&tiny, tiny_find(&tiny, TINY_TENSOR_COUNT, "", 0)->at, (tiny.size - 24) / 24, 8);
    expect_error(&tiny, RF_ERR_BAD_MODEL, "byte 16", "number of keys");
    tiny_free(&tiny);
}

static void what_is_no_gguf_file_is_called_so(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        size_t size;
        const char *what;
    } cases[] = {
        {"", 0, "the file is empty"},
        {"G", 1, "not a GGUF file"},
        {"GGU", 3, "not a GGUF file"},
        {"tjgg\3\0\0\0", 8, "not a GGUF file"},
        {"gguf\3\0\0\0", 8, "not a GGUF file"},
        {"GGUF", 4, "ends inside its fixed header"},
        {"GGUF\3\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", 23, "ends inside its fixed header"},
        {"GGUF\1\0\0\0", 8, "version 1"},
    };
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        opened file;
        rf_error err;
        rf_status status = open_bytes((const uint8_t *)cases[i].bytes, cases[i].size, &file, &err);
        check_error(status, &err);
        assert_non_null(strstr(err.what, cases[i].what));
        close_file(&file);
    }
}

static void a_name_that_comes_twice_is_refused(void **state)
{
    (void)state;
    tiny_gguf tiny = base_file(3);
    size_t at = tiny_find(&tiny, TINY_NAME_LENGTH, "test.i64", 0)->at;
    tiny_patch(&tiny, at + 8 + strlen("test."), 'u', 1);
    expect_error(&tiny, RF_ERR_BAD_MODEL, "key test.u64", "there twice");
    tiny_free(&tiny);

    tiny_gguf twice = tiny_begin(3);
    tiny_tensor(&twice, "a", RF_F32, 1, (uint64_t[]){8}, 0);
    tiny_tensor(&twice, "b", RF_F32, 1, (uint64_t[]){8}, 32);
    tiny_tensor(&twice, "a", RF_F32, 1, (uint64_t[]){8}, 64);
    tiny_finish(&twice, 96);
    expect_error(&twice, RF_ERR_BAD_MODEL, "tensor a", "there twice; the first is at byte 24");
    tiny_free(&twice);
}

static void a_name_with_a_zero_byte_inside_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *owner;
        const char *where;
    } cases[] = {{"test.u8", "key 2 at"}, {"experts", "tensor 3 at"}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        tiny_gguf tiny = base_file(3);
        size_t at = tiny_find(&tiny, TINY_NAME_LENGTH, cases[i].owner, 0)->at;
        tiny_patch(&tiny, at + 8 + 3, 0, 1);
        expect_error(&tiny, RF_ERR_BAD_MODEL, cases[i].where, "a zero byte");
        tiny_free(&tiny);
    }
}

static void a_name_may_be_as_long_as_specified_and_no_longer(void **state)
{
    (void)state;
    char *name = malloc(65537);
    static const struct {
        size_t length;
        bool key, good;
    } cases[] = {{64, false, true}, {65, false, false}, {65535, true, true}, {65536, true, false}};
    for (size_t i = 0; i < RF_ARRAY_COUNT(cases); i++) {
        memset(name, 'n', cases[i].length);
        name[cases[i].length] = '\0';
        tiny_gguf tiny = tiny_begin(3);
        if (cases[i].key)
            tiny_key_u32(&tiny, name, 1);
        else
            tiny_tensor(&tiny, name, RF_F32, 1, (uint64_t[]){0}, 0);
        tiny_finish(&tiny, 0);
        opened file;
        rf_error err;
        rf_status status = open_tiny(&tiny, &file, &err);
        assert_int_equal(status == RF_OK, cases[i].good);
        close_file(&file);
        tiny_free(&tiny);
    }
    free(name);
}

/* A terminal must not obey a file. */
static void a_name_in_a_message_is_plain_text(void **state)
{
    (void)state;
    tiny_gguf tiny = tiny_begin(3);
    tiny_key_bits(&tiny, "\x1b[2J\xc2\x9b\nx", RF_GGUF_BOOL, 2, 1);
    tiny_finish(&tiny, 0);
    expect_error(&tiny, RF_ERR_BAD_MODEL, "key ?[2J???x at byte 24", "neither 0 nor 1");
    tiny_free(&tiny);
}

/* CVE-2026-27940: sizes that are possible one by one, and wrap when they are added. */
static void sizes_that_wrap_when_added_are_refused(void **state)
{
    (void)state;
    tiny_gguf tiny = tiny_begin(3);
    uint64_t half = 0x7ffffffffffff000; /* no file is longer than 2^63 - 1: b cannot end in one */
    tiny_tensor(&tiny, "a", RF_I8, 1, (uint64_t[]){half}, 0);
    tiny_tensor(&tiny, "b", RF_I8, 1, (uint64_t[]){half}, half);
    tiny_finish(&tiny, 0);
    expect_error(&tiny, RF_ERR_BAD_MODEL, "tensor b", "64 bits");
    tiny_free(&tiny);
}

static void a_file_cut_anywhere_fails_in_the_header_and_says_so_in_the_data(void **state)
{
    (void)state;
    tiny_gguf tiny = base_file(3);
    size_t header_end = tiny_find(&tiny, TINY_OFFSET, "empty", 0)->at + 8;
    for (size_t size = 0; size <= tiny.size; size++) {
        opened file;
        rf_error err;
        rf_status status = open_bytes(tiny.bytes, size, &file, &err);
        if (size < header_end) {
            check_error(status, &err);
        } else {
            assert_int_equal(status, RF_OK);
            check_opened(&file);
            assert_int_equal(file.gguf.data_missing, size < tiny.size);
        }
        close_file(&file);
    }
    tiny_free(&tiny);
}

static void every_field_survives_every_hostile_number(void **state)
{
    (void)state;
    static const uint64_t hostile[] = {
        0,          1,          2,          5,          7,
        63,         64,         255,        256,        65536,
        1u << 20,   0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32,
        1ull << 60, 1ull << 61, 1ull << 62, 1ull << 63, INT64_MAX,
        UINT64_MAX, -8ull,      -32ull,     -64ull,     (1ull << 42) + 1};
    tiny_gguf base = base_file(3);
    unsigned good = 0, bad = 0;
    for (size_t m = 0; m < base.mark_count; m++) {
        for (size_t h = 0; h < RF_ARRAY_COUNT(hostile); h++) {
            tiny_gguf tiny = tiny_copy(&base);
            tiny_patch(&tiny, base.marks[m].at, hostile[h], base.marks[m].width);
            opened file;
            rf_error err;
            rf_status status = open_tiny(&tiny, &file, &err);
            if (status == RF_OK) {
                check_opened(&file);
                good++;
            } else {
                check_error(status, &err);
                bad++;
            }
            close_file(&file);
            tiny_free(&tiny);
        }
    }
    assert_true(good > 100 && bad > 1000);
    tiny_free(&base);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void any_bytes_end_in_an_error_or_in_views_of_the_file(void **state)
{
    (void)state;
    tiny_gguf base = base_file(3);
    size_t header_end = tiny_find(&base, TINY_OFFSET, "empty", 0)->at + 8;
    uint64_t seed = 0x2545f4914f6cdd1d;
    unsigned good = 0, bad = 0;
    uint8_t *bytes = malloc(base.size);
    for (int i = 0; i < 200000; i++) {
        memcpy(bytes, base.bytes, base.size);
        size_t size = base.size;
        for (uint64_t flips = 1 + next_random(&seed) % 3; flips > 0; flips--) {
            uint64_t dice = next_random(&seed);
            bytes[4 + dice % (header_end - 4)] ^= (uint8_t)(1u << (dice >> 40 & 7));
        }
        if (i % 8 == 0)
            size = next_random(&seed) % (base.size + 1);
        opened file;
        rf_error err;
        rf_status status = open_bytes(bytes, size, &file, i % 5 ? &err : NULL);
        if (status == RF_OK) {
            check_opened(&file);
            good++;
        } else {
            if (i % 5)
                check_error(status, &err);
            bad++;
        }
        close_file(&file);
    }
    assert_true(good > 10000 && bad > 10000);
    free(bytes);
    tiny_free(&base);
}

/* ---- time --------------------------------------------------------------------------------- */

static double seconds_of_reading(const tiny_gguf *tiny, rf_status expected)
{
    opened file;
    clock_t begin = clock();
    assert_int_equal(open_tiny(tiny, &file, NULL), expected);
    double seconds = (double)(clock() - begin) / CLOCKS_PER_SEC;
    close_file(&file);
    return seconds;
}

/* Comparing all pairs of 100,000 takes more than 10 s; sorting them, 0.1 s under a sanitizer. */
static void a_hundred_thousand_names_are_checked_without_comparing_all_pairs(void **state)
{
    (void)state;
    enum { COUNT = 100000 };
    for (int twice = 0; twice < 2; twice++) {
        tiny_gguf keys = tiny_begin(3);
        tiny_gguf tensors = tiny_begin(3);
        char name[64];
        for (uint32_t i = 0; i < COUNT; i++) {
            uint32_t number = twice && i == COUNT - 1 ? 0 : (i * 7919u) % COUNT;
            snprintf(name, sizeof name, "a.long.common.begin.%06u", number);
            tiny_key_u32(&keys, name, i);
            tiny_tensor(&tensors, name, RF_F32, 1, (uint64_t[]){8}, (uint64_t)number * 32);
        }
        tiny_finish(&keys, 0);
        tiny_finish(&tensors, 0);
        rf_status expected = twice ? RF_ERR_BAD_MODEL : RF_OK;
        assert_true(seconds_of_reading(&keys, expected) < 2.0);
        assert_true(seconds_of_reading(&tensors, expected) < 2.0);
        tiny_free(&keys);
        tiny_free(&tensors);
    }
}

/* 8 MB take 2 ms; the bound is far above that for slow machines, and far below a parser that
 * allocates or compares for each string (llama.cpp#19856). */
static void a_vocabulary_of_eight_megabytes_is_read_in_passing(void **state)
{
    (void)state;
    enum { TOKENS = 256000 };
    tiny_gguf tiny = tiny_begin(3);
    tiny_key_array_head(&tiny, "tokenizer.ggml.tokens", RF_GGUF_STRING, TOKENS);
    char token[32];
    for (int i = 0; i < TOKENS; i++) {
        snprintf(token, sizeof token, "token-%d", i);
        tiny_text(&tiny, TINY_LENGTH, token);
    }
    float *scores = calloc(TOKENS, sizeof *scores);
    tiny_key_array(&tiny, "tokenizer.ggml.scores", RF_GGUF_F32, TOKENS, scores, sizeof *scores);
    tiny_key_array(&tiny, "tokenizer.ggml.token_type", RF_GGUF_I32, TOKENS, scores, 4);
    tiny_finish(&tiny, 0);
    assert_true(tiny.size > 6000000);
    assert_true(seconds_of_reading(&tiny, RF_OK) < 0.25);
    free(scores);
    tiny_free(&tiny);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_of_every_type_read_back),
        cmocka_unit_test(a_number_of_the_wrong_kind_is_not_converted),
        cmocka_unit_test(tensors_read_back_with_their_place_in_the_file),
        cmocka_unit_test(a_tensor_with_a_dimension_of_zero_has_no_bytes),
        cmocka_unit_test(a_file_without_keys_and_tensors_is_a_file),
        cmocka_unit_test(every_power_of_two_up_to_a_mebibyte_aligns),
        cmocka_unit_test(each_fault_is_named_with_its_place),
        cmocka_unit_test(counts_that_fit_only_one_by_one_are_refused),
        cmocka_unit_test(what_is_no_gguf_file_is_called_so),
        cmocka_unit_test(a_name_that_comes_twice_is_refused),
        cmocka_unit_test(a_name_with_a_zero_byte_inside_is_refused),
        cmocka_unit_test(a_name_may_be_as_long_as_specified_and_no_longer),
        cmocka_unit_test(a_name_in_a_message_is_plain_text),
        cmocka_unit_test(sizes_that_wrap_when_added_are_refused),
        cmocka_unit_test(a_file_cut_anywhere_fails_in_the_header_and_says_so_in_the_data),
        cmocka_unit_test(every_field_survives_every_hostile_number),
        cmocka_unit_test(any_bytes_end_in_an_error_or_in_views_of_the_file),
        cmocka_unit_test(a_hundred_thousand_names_are_checked_without_comparing_all_pairs),
        cmocka_unit_test(a_vocabulary_of_eight_megabytes_is_read_in_passing),
    };
    return cmocka_run_group_tests_name("gguf", tests, NULL, NULL);
}
