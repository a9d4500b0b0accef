/* tests/unit/tiny_gguf.h: GGUF files built in memory, for tests.
 *
 * A file is built front to back: begin, keys, tensors, finish. Every field that a mutation may want
 * to change leaves a mark with its place, so that a test says "the rank of blk.0.attn_q.weight"
 * and not "byte 467". The builder checks nothing: what it is told, it writes.
 *
 *   tiny_gguf file = tiny_begin(3);
 *   tiny_key_text(&file, "general.architecture", "llama");
 *   tiny_key_u32(&file, "llama.block_count", 2);
 *   tiny_tensor(&file, "token_embd.weight", RF_F32, 2, (uint64_t[]){8, 4}, 0);
 *   tiny_finish(&file, 128);                      pads, and appends 128 bytes of zeros
 *   ... file.bytes, file.size ...
 *   tiny_free(&file);
 */
#ifndef TINY_GGUF_H
#define TINY_GGUF_H

#include "format/format.h"

#include <stdlib.h>
#include <string.h>

typedef enum tiny_field {
    TINY_VERSION,
    TINY_TENSOR_COUNT,
    TINY_KEY_COUNT,
    TINY_NAME_LENGTH, /* of a key or tensor; the name follows it */
    TINY_TYPE,
    TINY_ELEMENT_TYPE,
    TINY_COUNT,  /* of an array */
    TINY_LENGTH, /* of a string; nth of the array */
    TINY_VALUE,  /* of a number; of an array of numbers, the first */
    TINY_RANK,
    TINY_DIMENSION, /* nth */
    TINY_FORMAT,
    TINY_OFFSET
} tiny_field;

typedef struct tiny_mark {
    tiny_field field;
    const char *owner; /* the key's or tensor's name, borrowed; "" for the fixed header */
    size_t at;
    size_t width; /* bytes */
} tiny_mark;

#define TINY_MARKS_MAX 512

typedef struct tiny_gguf {
    uint8_t *bytes; /* owned; released by tiny_free */
    size_t size;
    size_t capacity;
    uint64_t tensor_count;
    uint64_t key_count;
    uint64_t alignment;              /* what tiny_finish pads to; a key general.alignment sets it */
    size_t data_offset;              /* after tiny_finish */
    tiny_mark marks[TINY_MARKS_MAX]; /* fields beyond the last mark are not marked */
    size_t mark_count;
    const char *owner;
} tiny_gguf;

static inline void tiny_put(tiny_gguf *file, const void *bytes, size_t count)
{
    if (file->size + count > file->capacity) {
        file->capacity = 2 * (file->size + count);
        file->bytes = realloc(file->bytes, file->capacity);
        if (!file->bytes)
            abort();
    }
    if (count > 0)
        memcpy(file->bytes + file->size, bytes, count);
    file->size += count;
}

/* The low width bytes of value, marked. */
static inline void tiny_number(tiny_gguf *file, tiny_field field, uint64_t value, size_t width)
{
    if (file->mark_count < TINY_MARKS_MAX)
        file->marks[file->mark_count++] = (tiny_mark){field, file->owner, file->size, width};
    tiny_put(file, &value, width);
}

static inline void tiny_patch(tiny_gguf *file, size_t at, uint64_t value, size_t width)
{
    memcpy(file->bytes + at, &value, width);
}

/* The nth mark of a field; aborts when there is none, since then the test is wrong. */
static inline const tiny_mark *tiny_find(const tiny_gguf *file, tiny_field field, const char *owner,
                                         size_t nth)
{
    for (size_t i = 0; i < file->mark_count; i++) {
        const tiny_mark *mark = &file->marks[i];
        if (mark->field == field && strcmp(mark->owner, owner) == 0 && nth-- == 0)
            return mark;
    }
    abort();
}

static inline void tiny_text(tiny_gguf *file, tiny_field field, const char *text)
{
    tiny_number(file, field, strlen(text), 8);
    tiny_put(file, text, strlen(text));
}

static inline tiny_gguf tiny_begin(uint32_t version)
{
    tiny_gguf file = {.alignment = 32, .owner = ""};
    tiny_put(&file, "GGUF", 4);
    tiny_number(&file, TINY_VERSION, version, 4);
    tiny_number(&file, TINY_TENSOR_COUNT, 0, 8);
    tiny_number(&file, TINY_KEY_COUNT, 0, 8);
    return file;
}

static inline void tiny_key(tiny_gguf *file, const char *name, rf_gguf_type type)
{
    file->owner = name;
    tiny_text(file, TINY_NAME_LENGTH, name);
    tiny_number(file, TINY_TYPE, type, 4);
    file->key_count++;
}

/* A number of any type, given by its bits. */
static inline void tiny_key_bits(tiny_gguf *file, const char *name, rf_gguf_type type,
                                 uint64_t bits, size_t width)
{
    tiny_key(file, name, type);
    tiny_number(file, TINY_VALUE, bits, width);
    if (strcmp(name, "general.alignment") == 0)
        file->alignment = bits;
}

static inline void tiny_key_u32(tiny_gguf *file, const char *name, uint32_t value)
{
    tiny_key_bits(file, name, RF_GGUF_U32, value, 4);
}

static inline void tiny_key_bool(tiny_gguf *file, const char *name, bool value)
{
    tiny_key_bits(file, name, RF_GGUF_BOOL, value, 1);
}

static inline void tiny_key_f32(tiny_gguf *file, const char *name, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    tiny_key_bits(file, name, RF_GGUF_F32, bits, 4);
}

static inline void tiny_key_text(tiny_gguf *file, const char *name, const char *value)
{
    tiny_key(file, name, RF_GGUF_STRING);
    tiny_text(file, TINY_LENGTH, value);
}

static inline void tiny_key_array_head(tiny_gguf *file, const char *name, rf_gguf_type element,
                                       uint64_t count)
{
    tiny_key(file, name, RF_GGUF_ARRAY);
    tiny_number(file, TINY_ELEMENT_TYPE, element, 4);
    tiny_number(file, TINY_COUNT, count, 8);
}

/* count numbers of width bytes each, as they lie in memory. */
static inline void tiny_key_array(tiny_gguf *file, const char *name, rf_gguf_type element,
                                  uint64_t count, const void *values, size_t width)
{
    tiny_key_array_head(file, name, element, count);
    if (count == 0)
        return;
    uint64_t first = 0;
    memcpy(&first, values, width);
    tiny_number(file, TINY_VALUE, first, width);
    tiny_put(file, (const uint8_t *)values + width, (size_t)(count - 1) * width);
}

static inline void tiny_key_texts(tiny_gguf *file, const char *name, uint64_t count,
                                  const char *const *values)
{
    tiny_key_array_head(file, name, RF_GGUF_STRING, count);
    for (uint64_t i = 0; i < count; i++)
        tiny_text(file, TINY_LENGTH, values[i]);
}

/* offset counts from the begin of the data. */
static inline void tiny_tensor(tiny_gguf *file, const char *name, uint32_t type_id, uint32_t rank,
                               const uint64_t *shape, uint64_t offset)
{
    file->owner = name;
    tiny_text(file, TINY_NAME_LENGTH, name);
    tiny_number(file, TINY_RANK, rank, 4);
    for (uint32_t i = 0; i < rank; i++)
        tiny_number(file, TINY_DIMENSION, shape[i], 8);
    tiny_number(file, TINY_FORMAT, type_id, 4);
    tiny_number(file, TINY_OFFSET, offset, 8);
    file->tensor_count++;
}

/* Writes the counts, pads the header to the alignment and appends data_bytes zeros. */
static inline void tiny_finish(tiny_gguf *file, size_t data_bytes)
{
    tiny_patch(file, 8, file->tensor_count, 8);
    tiny_patch(file, 16, file->key_count, 8);
    while (file->size % file->alignment != 0)
        tiny_put(file, "", 1);
    file->data_offset = file->size;
    for (size_t i = 0; i < data_bytes; i++)
        tiny_put(file, "", 1);
}

static inline tiny_gguf tiny_copy(const tiny_gguf *file)
{
    tiny_gguf copy = *file;
    copy.bytes = malloc(file->capacity);
    if (!copy.bytes)
        abort();
    memcpy(copy.bytes, file->bytes, file->size);
    return copy;
}

static inline void tiny_free(tiny_gguf *file)
{
    free(file->bytes);
    file->bytes = NULL;
}

#endif
