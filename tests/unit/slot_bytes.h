/* tests/unit/slot_bytes.h: a slot of the store in one piece, for the tests of saving. */
#ifndef SLOT_BYTES_H
#define SLOT_BYTES_H

#include "kv/kv.h"

#include <stdlib.h>
#include <string.h>

static inline void must(rf_status status, const rf_error *err)
{
    if (status != RF_OK)
        fail_msg("%s: %s (expected %s, got %s)", err->where, err->what, err->expected, err->got);
}

typedef struct blob {
    uint8_t *data; /* owned */
    size_t size;
} blob;

static inline blob new_blob(size_t size)
{
    blob b = {malloc(size ? size : 1), size};
    assert_non_null(b.data);
    return b;
}

/* What rf_kv_save_* says of a slot, in one piece. */
static inline blob kv_blob(const rf_kv *kv, uint32_t slot)
{
    uint32_t count = rf_kv_save_rows(kv, slot, NULL);
    rf_piece *pieces = calloc(count + 1u, sizeof *pieces);
    assert_non_null(pieces);
    assert_int_equal(rf_kv_save_rows(kv, slot, pieces), count);
    size_t size = rf_kv_save_head_bytes(kv), at = size;
    for (uint32_t i = 0; i < count; i++)
        size += pieces[i].bytes;
    blob b = new_blob(size);
    rf_kv_save_head(kv, slot, b.data);
    for (uint32_t i = 0; i < count; i++) {
        memcpy(b.data + at, pieces[i].data, pieces[i].bytes);
        at += pieces[i].bytes;
    }
    free(pieces);
    return b;
}

static inline uint64_t mix(uint64_t z)
{
    z += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

#endif
