/* format/gguf.c: the header of a GGUF file, as views into its bytes.
 *
 * Everything in a file is hostile until it is checked, and it is checked here, once: what
 * rf_gguf_read accepts, nobody above has to doubt. A count is compared with the bytes left before
 * it is used, a product or sum is formed only by the checked helpers, and no loop is longer than
 * the file. It owns no memory, knows no meaning of a key but general.alignment, and reads no byte
 * of the tensors' data.
 *
 *   0        4         8              16          24
 *   | "GGUF" | version | tensor count | key count | keys | tensors | pad | data ...
 *
 *   key:    name, type, value            string: length (8 bytes), bytes
 *   tensor: name, rank, shape[rank], type, offset in data
 *   array:  element type, count, elements
 *
 * Specified: github.com/ggml-org/ggml, docs/gguf.md. All numbers are little-endian.
 */
#include "format/format.h"

#include <string.h>

#define HEADER_BYTES          24u
#define KEY_BYTES_MIN         13u /* an empty name, a type, one byte of value */
#define TENSOR_BYTES_MIN      24u /* an empty name, rank, type, offset */
#define STRING_BYTES_MIN      8u
#define KEY_NAME_BYTES_MAX    65535u /* specified */
#define TENSOR_NAME_BYTES_MAX 64u    /* specified */
#define RANK_MAX              4u
#define ALIGNMENT_DEFAULT     32u        /* specified */
#define ALIGNMENT_MAX         (1u << 20) /* more than any page or sector: a sign of nonsense */
#define COUNT_MAX             ((uint64_t)INT64_MAX) /* GGML holds dimensions and elements signed */
#define PLACE_BYTES           sizeof(((rf_error *)0)->where)

typedef enum value_kind { UNSIGNED, SIGNED, FLOAT, BOOL, STRING, ARRAY } value_kind;

typedef struct type_info {
    const char *name;
    value_kind kind;
    uint32_t bytes; /* 0: the value itself says how many */
} type_info;

static const type_info types[RF_GGUF_TYPE_COUNT] = {
    [RF_GGUF_U8] = {"uint8", UNSIGNED, 1},    [RF_GGUF_I8] = {"int8", SIGNED, 1},
    [RF_GGUF_U16] = {"uint16", UNSIGNED, 2},  [RF_GGUF_I16] = {"int16", SIGNED, 2},
    [RF_GGUF_U32] = {"uint32", UNSIGNED, 4},  [RF_GGUF_I32] = {"int32", SIGNED, 4},
    [RF_GGUF_F32] = {"float32", FLOAT, 4},    [RF_GGUF_BOOL] = {"bool", BOOL, 1},
    [RF_GGUF_STRING] = {"string", STRING, 0}, [RF_GGUF_ARRAY] = {"array", ARRAY, 0},
    [RF_GGUF_U64] = {"uint64", UNSIGNED, 8},  [RF_GGUF_I64] = {"int64", SIGNED, 8},
    [RF_GGUF_F64] = {"float64", FLOAT, 8},
};

const char *rf_gguf_type_name(rf_gguf_type type)
{
    return (uint32_t)type < RF_GGUF_TYPE_COUNT ? types[type].name : "?";
}

/* ---- errors ------------------------------------------------------------------------------ */

/* What a read shares: the bytes, and where its errors go. */
typedef struct reader {
    rf_cursor cursor;
    rf_gguf *gguf;
    rf_error *err;
    char place[PLACE_BYTES];
} reader;

/* "key general.name at byte 24". A name from a file may hold anything: what a terminal could act
 * on is shown as '?', and the rest of a long one as dots. */
static const char *place_of(reader *in, const char *kind, rf_text name, uint64_t offset)
{
    char shown[100];
    size_t length = 0;
    while (length < name.length && length < sizeof shown - 4) {
        char c = name.bytes[length];
        shown[length++] = c >= ' ' && c <= '~' ? c : '?';
    }
    const char *dots = length < name.length ? "..." : "";
    shown[length] = '\0';
    rf_print(in->place, sizeof in->place, "%s %s%s at byte %llu", kind, shown, dots,
             (unsigned long long)offset);
    return in->place;
}

static const char *key_place(reader *in, const rf_gguf_key *key)
{
    return place_of(in, "key", key->name, key->offset);
}

static const char *tensor_place(reader *in, const rf_gguf_tensor *tensor)
{
    return place_of(in, "tensor", tensor->name, tensor->at);
}

static rf_status fail_cut_off(reader *in, const char *place, const char *part, uint64_t expected)
{
    rf_fail(in->err, RF_ERR_BAD_MODEL, place, "%s is longer than the rest of the file", part);
    rf_fail_expected(in->err, "%llu bytes", (unsigned long long)expected);
    return rf_fail_got(in->err, "%llu bytes left",
                       (unsigned long long)(in->cursor.size - in->cursor.at));
}

/* ---- scan -------------------------------------------------------------------------------- */

static rf_status check_version(uint32_t version, rf_error *err)
{
    if (version == 2 || version == 3)
        return RF_OK;
    rf_status status = RF_ERR_UNSUPPORTED;
    if (version == 0)
        status = rf_fail(err, RF_ERR_BAD_MODEL, "byte 4", "there is no GGUF version 0");
    else if (version == 1)
        rf_fail(err, status, "byte 4", "GGUF version 1 is not read: convert the model again");
    else if ((version & 0xffffu) == 0)
        rf_fail(err, status, "byte 4", "a big-endian file: convert it with gguf-convert-endian");
    else
        rf_fail(err, status, "byte 4", "this GGUF version is not known");
    rf_fail_expected(err, "2 or 3");
    rf_fail_got(err, "%u", version);
    return status;
}

/* Checks that count entries of at least bytes_min fit into *left, and takes them off it. */
static rf_status check_count(const char *place, const char *what, uint64_t count,
                             uint64_t bytes_min, uint64_t *left, rf_error *err)
{
    uint64_t bytes;
    if (count <= UINT32_MAX && rf_mul(count, bytes_min, &bytes) && bytes <= *left) {
        *left -= bytes;
        return RF_OK;
    }
    rf_fail(err, RF_ERR_BAD_MODEL, place, "the file is too short for its number of %s", what);
    rf_fail_expected(err, "at most %llu",
                     (unsigned long long)RF_MIN(*left / bytes_min, UINT32_MAX));
    return rf_fail_got(err, "%llu", (unsigned long long)count);
}

rf_status rf_gguf_scan(const void *data, uint64_t size, rf_gguf *gguf, rf_error *err)
{
    *gguf = (rf_gguf){.data = data, .size = size};
    if (size == 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, "byte 0", "the file is empty");
    rf_cursor cursor = rf_cursor_make(data, size);
    uint32_t magic = rf_cursor_u32(&cursor);
    if (cursor.failed || memcmp(data, "GGUF", 4) != 0) {
        rf_fail(err, RF_ERR_BAD_MODEL, "byte 0", "not a GGUF file");
        rf_fail_expected(err, "0x46554747 (\"GGUF\")");
        return cursor.failed ? rf_fail_got(err, "%llu bytes", (unsigned long long)size)
                             : rf_fail_got(err, "0x%08x", magic);
    }
    uint32_t version = rf_cursor_u32(&cursor);
    rf_status status = cursor.failed ? RF_OK : check_version(version, err);
    if (status != RF_OK)
        return status;
    uint64_t tensor_count = rf_cursor_u64(&cursor);
    uint64_t key_count = rf_cursor_u64(&cursor);
    if (cursor.failed) {
        rf_fail(err, RF_ERR_BAD_MODEL, "byte 0", "the file ends inside its fixed header");
        rf_fail_expected(err, "%u bytes", HEADER_BYTES);
        return rf_fail_got(err, "%llu bytes", (unsigned long long)size);
    }
    uint64_t left = rf_cursor_left(&cursor);
    status = check_count("byte 8", "tensors", tensor_count, TENSOR_BYTES_MIN, &left, err);
    if (status == RF_OK)
        status = check_count("byte 16", "keys", key_count, KEY_BYTES_MIN, &left, err);
    if (status != RF_OK)
        return status;
    gguf->version = version;
    gguf->tensor_count = (uint32_t)tensor_count;
    gguf->key_count = (uint32_t)key_count;
    return RF_OK;
}

/* ---- names ------------------------------------------------------------------------------- */

/* Reads the name of entry index; kind is "key" or "tensor". */
static rf_status read_name(reader *in, const char *kind, uint32_t index, uint64_t bytes_max,
                           rf_text *name)
{
    uint64_t offset = in->cursor.at;
    uint64_t length = rf_cursor_u64(&in->cursor);
    char place[64];
    rf_print(place, sizeof place, "%s %u at byte %llu", kind, index, (unsigned long long)offset);
    if (in->cursor.failed)
        return fail_cut_off(in, place, "the length of a name", 8);
    if (length == 0)
        return rf_fail(in->err, RF_ERR_BAD_MODEL, place, "the name is empty");
    if (length > rf_cursor_left(&in->cursor))
        return fail_cut_off(in, place, "the name", length);
    if (length > bytes_max) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, place, "the name is too long");
        rf_fail_expected(in->err, "at most %llu bytes", (unsigned long long)bytes_max);
        return rf_fail_got(in->err, "%llu bytes", (unsigned long long)length);
    }
    const uint8_t *bytes = rf_cursor_take(&in->cursor, length);
    if (memchr(bytes, '\0', (size_t)length))
        return rf_fail(in->err, RF_ERR_BAD_MODEL, place, "the name has a zero byte inside");
    *name = (rf_text){(const char *)bytes, length};
    return RF_OK;
}

/* ---- keys -------------------------------------------------------------------------------- */

static rf_status read_type(reader *in, const rf_gguf_key *key, rf_gguf_type *type)
{
    uint32_t id = rf_cursor_u32(&in->cursor);
    if (in->cursor.failed)
        return fail_cut_off(in, key_place(in, key), "the type", 4);
    if (id >= RF_GGUF_TYPE_COUNT) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, key), "there is no such type of value");
        rf_fail_expected(in->err, "below %u", (unsigned)RF_GGUF_TYPE_COUNT);
        return rf_fail_got(in->err, "%u", id);
    }
    *type = (rf_gguf_type)id;
    return RF_OK;
}

/* Steps over count strings. This loop sees a whole vocabulary, so it is kept tight. */
static rf_status skip_strings(reader *in, const rf_gguf_key *key)
{
    rf_cursor *cursor = &in->cursor;
    uint64_t bytes_min;
    if (!rf_mul(key->count, STRING_BYTES_MIN, &bytes_min) || bytes_min > rf_cursor_left(cursor)) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, key),
                "there are more strings than the rest of the file can hold");
        rf_fail_expected(in->err, "at most %llu",
                         (unsigned long long)(rf_cursor_left(cursor) / STRING_BYTES_MIN));
        return rf_fail_got(in->err, "%llu", (unsigned long long)key->count);
    }
    for (uint64_t i = 0; i < key->count; i++) {
        uint64_t length = STRING_BYTES_MIN;
        uint64_t left = cursor->size - cursor->at;
        if (left >= STRING_BYTES_MIN)
            memcpy(&length, cursor->data + cursor->at, sizeof length);
        if (left < STRING_BYTES_MIN || length > left - STRING_BYTES_MIN) {
            char part[48];
            rf_print(part, sizeof part, "string %llu", (unsigned long long)i);
            return fail_cut_off(in, key_place(in, key), part, length);
        }
        cursor->at += STRING_BYTES_MIN + length;
    }
    return RF_OK;
}

static rf_status skip_numbers(reader *in, const rf_gguf_key *key)
{
    uint64_t bytes;
    const uint8_t *data = NULL;
    if (rf_mul(key->count, types[key->element_type].bytes, &bytes)) {
        if (bytes <= rf_cursor_left(&in->cursor))
            data = rf_cursor_take(&in->cursor, bytes);
    } else {
        bytes = UINT64_MAX;
    }
    if (!data)
        return fail_cut_off(in, key_place(in, key), "the value", bytes);
    if (types[key->element_type].kind != BOOL)
        return RF_OK;
    for (uint64_t i = 0; i < bytes; i++) {
        if (data[i] > 1) {
            rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, key), "a bool is neither 0 nor 1");
            rf_fail_expected(in->err, "0 or 1");
            return rf_fail_got(in->err, "%u", data[i]);
        }
    }
    return RF_OK;
}

static rf_status read_key(reader *in, uint32_t index, rf_gguf_key *key)
{
    *key = (rf_gguf_key){.offset = in->cursor.at, .count = 1};
    rf_status status = read_name(in, "key", index, KEY_NAME_BYTES_MAX, &key->name);
    if (status == RF_OK)
        status = read_type(in, key, &key->type);
    if (status != RF_OK)
        return status;
    key->element_type = key->type;
    if (key->type == RF_GGUF_ARRAY) {
        status = read_type(in, key, &key->element_type);
        if (status != RF_OK)
            return status;
        if (key->element_type == RF_GGUF_ARRAY)
            return rf_fail(in->err, RF_ERR_UNSUPPORTED, key_place(in, key),
                           "arrays inside arrays are not read");
        key->count = rf_cursor_u64(&in->cursor);
        if (in->cursor.failed)
            return fail_cut_off(in, key_place(in, key), "the count of the array", 8);
    }
    key->data = in->cursor.data + in->cursor.at;
    uint64_t begin = in->cursor.at;
    bool strings = key->element_type == RF_GGUF_STRING;
    status = strings ? skip_strings(in, key) : skip_numbers(in, key);
    key->data_bytes = in->cursor.at - begin;
    return status;
}

static rf_status read_alignment(reader *in)
{
    in->gguf->alignment = ALIGNMENT_DEFAULT;
    const rf_gguf_key *key = rf_gguf_find(in->gguf, "general.alignment");
    if (!key)
        return RF_OK;
    if (key->type != RF_GGUF_U32) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, key), "the alignment has the wrong type");
        rf_fail_expected(in->err, "uint32");
        return rf_fail_got(in->err, "%s", rf_gguf_type_name(key->type));
    }
    uint64_t alignment = 0;
    rf_gguf_u64(key, 0, &alignment);
    if (!rf_is_power_of_two(alignment) || alignment > ALIGNMENT_MAX) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, key), "the alignment makes no sense");
        rf_fail_expected(in->err, "a power of two, at most %u", ALIGNMENT_MAX);
        return rf_fail_got(in->err, "%llu", (unsigned long long)alignment);
    }
    in->gguf->alignment = alignment;
    return RF_OK;
}

/* ---- tensors ----------------------------------------------------------------------------- */

static rf_status read_shape(reader *in, rf_gguf_tensor *tensor)
{
    tensor->rank = rf_cursor_u32(&in->cursor);
    if (in->cursor.failed)
        return fail_cut_off(in, tensor_place(in, tensor), "the rank", 4);
    if (tensor->rank == 0 || tensor->rank > RANK_MAX) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor), "the rank is out of range");
        rf_fail_expected(in->err, "1 to %u", RANK_MAX);
        return rf_fail_got(in->err, "%u", tensor->rank);
    }
    if (rf_cursor_left(&in->cursor) < 8u * tensor->rank)
        return fail_cut_off(in, tensor_place(in, tensor), "the shape", 8u * tensor->rank);
    for (uint32_t i = 0; i < RANK_MAX; i++)
        tensor->shape[i] = i < tensor->rank ? rf_cursor_u64(&in->cursor) : 1;
    uint64_t elements = 1;
    for (uint32_t i = 0; i < RANK_MAX; i++) {
        uint64_t length = tensor->shape[i];
        if (length > COUNT_MAX || !rf_mul(elements, length, &elements) || elements > COUNT_MAX) {
            rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor),
                    "its number of elements is 2^63 or more");
            return rf_fail_got(in->err, "dimension %u is %llu", i, (unsigned long long)length);
        }
    }
    return RF_OK;
}

/* Checks the type and fills bytes. A dimension of zero makes a tensor of no bytes. */
static rf_status read_format(reader *in, rf_gguf_tensor *tensor)
{
    tensor->type_id = rf_cursor_u32(&in->cursor);
    if (in->cursor.failed)
        return fail_cut_off(in, tensor_place(in, tensor), "the type", 4);
    const rf_format_info *info = rf_format_info_of(tensor->type_id);
    if (!info) {
        rf_fail(in->err, RF_ERR_UNSUPPORTED, tensor_place(in, tensor), "the type is not known");
        return rf_fail_got(in->err, "type id %u", tensor->type_id);
    }
    if (info->block_elements == 0)
        return rf_fail(in->err, RF_ERR_UNSUPPORTED, tensor_place(in, tensor),
                       "the type %s was removed from GGUF: convert the model again", info->name);
    if (tensor->shape[0] % info->block_elements != 0) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor),
                "a row is no whole number of %s blocks", info->name);
        rf_fail_expected(in->err, "a multiple of %u", info->block_elements);
        return rf_fail_got(in->err, "%llu", (unsigned long long)tensor->shape[0]);
    }
    bool fits = rf_format_row_bytes(info->format, tensor->shape[0], &tensor->bytes);
    for (uint32_t i = 1; i < RANK_MAX && fits; i++)
        fits = rf_mul(tensor->bytes, tensor->shape[i], &tensor->bytes);
    if (!fits)
        return rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor),
                       "its size does not fit into 64 bits");
    return RF_OK;
}

static rf_status read_tensor(reader *in, uint32_t index, rf_gguf_tensor *tensor)
{
    *tensor = (rf_gguf_tensor){.at = in->cursor.at};
    rf_status status = read_name(in, "tensor", index, TENSOR_NAME_BYTES_MAX, &tensor->name);
    if (status == RF_OK)
        status = read_shape(in, tensor);
    if (status == RF_OK)
        status = read_format(in, tensor);
    if (status != RF_OK)
        return status;
    tensor->offset = rf_cursor_u64(&in->cursor);
    if (in->cursor.failed)
        return fail_cut_off(in, tensor_place(in, tensor), "the offset", 8);
    if (tensor->offset % in->gguf->alignment != 0) {
        rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor), "the offset is not aligned");
        rf_fail_expected(in->err, "a multiple of %llu", (unsigned long long)in->gguf->alignment);
        return rf_fail_got(in->err, "%llu", (unsigned long long)tensor->offset);
    }
    return RF_OK;
}

/* Turns offsets in the data into offsets in the file. */
static rf_status place_tensors(reader *in)
{
    rf_gguf *gguf = in->gguf;
    bool fits = rf_align_up(in->cursor.at, gguf->alignment, &gguf->data_offset);
    gguf->data_end = gguf->data_offset;
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        rf_gguf_tensor *tensor = &gguf->tensors[i];
        uint64_t end;
        fits = fits && rf_add(tensor->offset, gguf->data_offset, &tensor->offset);
        if (!fits || !rf_add(tensor->offset, tensor->bytes, &end) || end > INT64_MAX)
            return rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor),
                           "its end does not fit into 64 bits");
        gguf->data_end = RF_MAX(gguf->data_end, end);
        tensor->in_file = end <= gguf->size;
        gguf->data_missing |= !tensor->in_file;
    }
    return RF_OK;
}

/* ---- order: duplicates and overlaps ------------------------------------------------------ */

typedef bool (*before_fn)(const rf_gguf *gguf, uint32_t a, uint32_t b);

/* Shorter names first: most pairs are told apart without a look at their bytes. */
static int compare_names(rf_text a, rf_text b)
{
    if (a.length != b.length)
        return a.length < b.length ? -1 : 1;
    return memcmp(a.bytes, b.bytes, (size_t)a.length);
}

static bool key_before(const rf_gguf *gguf, uint32_t a, uint32_t b)
{
    return compare_names(gguf->keys[a].name, gguf->keys[b].name) < 0;
}

static bool tensor_before(const rf_gguf *gguf, uint32_t a, uint32_t b)
{
    return compare_names(gguf->tensors[a].name, gguf->tensors[b].name) < 0;
}

static bool offset_before(const rf_gguf *gguf, uint32_t a, uint32_t b)
{
    return gguf->tensors[a].offset < gguf->tensors[b].offset;
}

/* Merges [first, middle) and [middle, last) of from into to; equals keep their order. */
static void merge(const rf_gguf *gguf, before_fn before, const uint32_t *from, uint32_t *to,
                  uint64_t first, uint64_t middle, uint64_t last)
{
    uint64_t left = first;
    uint64_t right = middle;
    for (uint64_t at = first; at < last; at++) {
        bool take_right = left == middle || (right < last && before(gguf, from[right], from[left]));
        to[at] = take_right ? from[right++] : from[left++];
    }
}

/* Fills index with 0 .. count - 1 in order; a merge sort, so that no file makes it quadratic.
 * memory holds 2 x count numbers; the result is one half of it. */
static const uint32_t *sort(const rf_gguf *gguf, uint32_t count, before_fn before, uint32_t *memory)
{
    uint32_t *index = memory;
    uint32_t *other = memory + count;
    for (uint32_t i = 0; i < count; i++)
        index[i] = i;
    for (uint64_t width = 1; width < count; width *= 2) {
        for (uint64_t first = 0; first < count; first += 2 * width) {
            uint64_t middle = RF_MIN(first + width, count);
            uint64_t last = RF_MIN(middle + width, count);
            merge(gguf, before, index, other, first, middle, last);
        }
        uint32_t *swap = index;
        index = other;
        other = swap;
    }
    return index;
}

static rf_status check_keys(reader *in, uint32_t *scratch)
{
    const rf_gguf *gguf = in->gguf;
    const uint32_t *index = sort(gguf, gguf->key_count, key_before, scratch);
    for (uint32_t i = 1; i < gguf->key_count; i++) {
        const rf_gguf_key *first = &gguf->keys[index[i - 1]];
        const rf_gguf_key *second = &gguf->keys[index[i]];
        if (compare_names(first->name, second->name) == 0)
            return rf_fail(in->err, RF_ERR_BAD_MODEL, key_place(in, second),
                           "the key is there twice; the first is at byte %llu",
                           (unsigned long long)first->offset);
    }
    return RF_OK;
}

static rf_status check_tensors(reader *in, uint32_t *scratch)
{
    const rf_gguf *gguf = in->gguf;
    const uint32_t *index = sort(gguf, gguf->tensor_count, tensor_before, scratch);
    for (uint32_t i = 1; i < gguf->tensor_count; i++) {
        const rf_gguf_tensor *first = &gguf->tensors[index[i - 1]];
        const rf_gguf_tensor *second = &gguf->tensors[index[i]];
        if (compare_names(first->name, second->name) == 0)
            return rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, second),
                           "the tensor is there twice; the first is at byte %llu",
                           (unsigned long long)first->at);
    }
    index = sort(gguf, gguf->tensor_count, offset_before, scratch);
    const rf_gguf_tensor *last = NULL;
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        const rf_gguf_tensor *tensor = &gguf->tensors[index[i]];
        if (tensor->bytes == 0)
            continue;
        if (last && tensor->offset < last->offset + last->bytes) {
            rf_fail(in->err, RF_ERR_BAD_MODEL, tensor_place(in, tensor),
                    "its data overlaps that of the tensor at byte %llu",
                    (unsigned long long)last->at);
            rf_fail_expected(in->err, "an offset of %llu or more",
                             (unsigned long long)(last->offset + last->bytes));
            return rf_fail_got(in->err, "%llu", (unsigned long long)tensor->offset);
        }
        last = tensor;
    }
    return RF_OK;
}

/* ---- read -------------------------------------------------------------------------------- */

uint64_t rf_gguf_scratch_bytes(const rf_gguf *gguf)
{
    uint64_t count = RF_MAX(gguf->key_count, gguf->tensor_count);
    return 2 * count * sizeof(uint32_t);
}

rf_status rf_gguf_read(rf_gguf *gguf, void *scratch, rf_error *err)
{
    reader in = {.cursor = rf_cursor_make(gguf->data, gguf->size), .gguf = gguf, .err = err};
    rf_cursor_take(&in.cursor, HEADER_BYTES);
    gguf->data_missing = false;
    rf_status status = RF_OK;
    for (uint32_t i = 0; i < gguf->key_count && status == RF_OK; i++)
        status = read_key(&in, i, &gguf->keys[i]);
    if (status == RF_OK)
        status = check_keys(&in, scratch);
    if (status == RF_OK)
        status = read_alignment(&in);
    for (uint32_t i = 0; i < gguf->tensor_count && status == RF_OK; i++)
        status = read_tensor(&in, i, &gguf->tensors[i]);
    if (status == RF_OK)
        status = place_tensors(&in);
    if (status == RF_OK)
        status = check_tensors(&in, scratch);
    return status;
}

/* ---- look-up ----------------------------------------------------------------------------- */

bool rf_text_is(rf_text text, const char *other)
{
    size_t length = strlen(other);
    return text.length == length && memcmp(text.bytes, other, length) == 0;
}

const rf_gguf_key *rf_gguf_find(const rf_gguf *gguf, const char *name)
{
    for (uint32_t i = 0; i < gguf->key_count; i++) {
        if (rf_text_is(gguf->keys[i].name, name))
            return &gguf->keys[i];
    }
    return NULL;
}

const rf_gguf_tensor *rf_gguf_find_tensor(const rf_gguf *gguf, const char *name)
{
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        if (rf_text_is(gguf->tensors[i].name, name))
            return &gguf->tensors[i];
    }
    return NULL;
}

/* Loads element index as 64 bits, sign-extended when its type has a sign. false when the index is
 * out of range or the elements have no fixed size. */
static bool load_element(const rf_gguf_key *key, uint64_t index, uint64_t *bits)
{
    const type_info *type = &types[key->element_type];
    if (index >= key->count || type->bytes == 0)
        return false;
    uint64_t raw = 0;
    memcpy(&raw, key->data + index * type->bytes, type->bytes);
    uint64_t sign = (uint64_t)1 << (8 * type->bytes - 1);
    *bits = type->kind == SIGNED ? (raw ^ sign) - sign : raw;
    return true;
}

bool rf_gguf_u64(const rf_gguf_key *key, uint64_t index, uint64_t *out)
{
    value_kind kind = types[key->element_type].kind;
    uint64_t bits;
    if (kind == FLOAT || !load_element(key, index, &bits))
        return false;
    if (kind == SIGNED && bits > INT64_MAX)
        return false;
    *out = bits;
    return true;
}

bool rf_gguf_i64(const rf_gguf_key *key, uint64_t index, int64_t *out)
{
    value_kind kind = types[key->element_type].kind;
    uint64_t bits;
    if (kind == FLOAT || !load_element(key, index, &bits))
        return false;
    if (kind != SIGNED && bits > INT64_MAX)
        return false;
    memcpy(out, &bits, sizeof *out);
    return true;
}

bool rf_gguf_f64(const rf_gguf_key *key, uint64_t index, double *out)
{
    uint64_t bits;
    if (types[key->element_type].kind != FLOAT || !load_element(key, index, &bits))
        return false;
    if (key->element_type == RF_GGUF_F32) {
        float value;
        memcpy(&value, &bits, sizeof value);
        *out = (double)value;
    } else {
        memcpy(out, &bits, sizeof *out);
    }
    return true;
}

/* The string that begins at data. It lies in the file: rf_gguf_read has seen to that. */
static rf_text text_at(const uint8_t *data)
{
    rf_text text = {(const char *)data + STRING_BYTES_MIN, 0};
    memcpy(&text.length, data, sizeof text.length);
    return text;
}

bool rf_gguf_text(const rf_gguf_key *key, rf_text *out)
{
    if (key->type != RF_GGUF_STRING)
        return false;
    *out = text_at(key->data);
    return true;
}

bool rf_gguf_next_text(const rf_gguf_key *key, uint64_t *at, rf_text *out)
{
    bool strings = key->type == RF_GGUF_ARRAY && key->element_type == RF_GGUF_STRING;
    if (!strings || *at >= key->data_bytes)
        return false;
    *out = text_at(key->data + *at);
    *at += STRING_BYTES_MIN + out->length;
    return true;
}
