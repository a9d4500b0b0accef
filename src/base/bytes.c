/* base/bytes.c: a bounded cursor over little-endian bytes.
 *
 * Readers of files pull integers through it and look at `failed` once, at the end of a stretch:
 * after the first read past the end every read gives zero, so no reader runs away. It owns
 * nothing, and knows no file format.
 */
#include "base/base.h"

rf_cursor rf_cursor_make(const void *data, uint64_t size)
{
    return (rf_cursor){.data = data, .size = data ? size : 0};
}

uint64_t rf_cursor_left(const rf_cursor *cursor)
{
    return cursor->failed ? 0 : cursor->size - cursor->at;
}

const uint8_t *rf_cursor_take(rf_cursor *cursor, uint64_t count)
{
    if (cursor->failed)
        return NULL;
    if (count > cursor->size - cursor->at) {
        cursor->failed = true;
        cursor->fail_at = cursor->at;
        return NULL;
    }
    const uint8_t *bytes = cursor->data + cursor->at;
    cursor->at += count;
    return bytes;
}

static uint64_t cursor_little_endian(rf_cursor *cursor, unsigned byte_count)
{
    const uint8_t *bytes = rf_cursor_take(cursor, byte_count);
    uint64_t value = 0;
    if (!bytes)
        return 0;
    for (unsigned i = byte_count; i-- > 0;)
        value = value << 8 | bytes[i];
    return value;
}

uint8_t rf_cursor_u8(rf_cursor *cursor)
{
    return (uint8_t)cursor_little_endian(cursor, 1);
}

uint16_t rf_cursor_u16(rf_cursor *cursor)
{
    return (uint16_t)cursor_little_endian(cursor, 2);
}

uint32_t rf_cursor_u32(rf_cursor *cursor)
{
    return (uint32_t)cursor_little_endian(cursor, 4);
}

uint64_t rf_cursor_u64(rf_cursor *cursor)
{
    return cursor_little_endian(cursor, 8);
}
