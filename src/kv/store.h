/* kv/store.h: the insides of the store, shared by the files of this folder alone. */
#ifndef RF_KV_STORE_H
#define RF_KV_STORE_H

#include "kv/kv.h"

typedef struct rf_kv_side_store { /* keys or values of one layer */
    uint8_t *bytes;               /* [slot][kv_head][row_count][row_bytes] */
    uint64_t row_bytes;
    uint32_t width;
    rf_format format;
    float limit; /* finite values of at least this size would be stored as infinity */
} rf_kv_side_store;

typedef struct rf_kv_layer_store {
    rf_kv_side_store side[2]; /* by rf_kv_side */
    uint64_t row_count;       /* rows of one head of one slot */
    uint32_t kv_heads;
    uint32_t window;
} rf_kv_layer_store;

typedef struct rf_kv_slot {
    uint64_t length;  /* committed positions */
    uint64_t written; /* positions below it were written at some time: a row may be a newer one */
    uint32_t pending; /* positions appended by every layer before next_layer */
    uint32_t next_layer;
} rf_kv_slot;

struct rf_kv {
    rf_kernels kernels; /* a copy: the store encodes by itself, also without an engine */
    rf_kv_layer_store *layers;
    rf_kv_slot *slots;
    uint64_t capacity;
    uint64_t ring_bytes;
    uint64_t own_bytes; /* AMBIENT: what rf_kv_close gives back, from the store's own address */
    uint32_t layer_count;
    uint32_t slot_count;
    uint32_t chunk;
};

static inline uint8_t *rf_kv_row(const rf_kv *kv, uint32_t slot, uint32_t layer_index,
                                 uint32_t head, rf_kv_side side, uint64_t row)
{
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    uint64_t head_index = (uint64_t)slot * layer->kv_heads + head;
    return layer->side[side].bytes +
           (head_index * layer->row_count + row) * layer->side[side].row_bytes;
}

/* How many bytes a store of this geometry needs, beside its rings. */
uint64_t rf_kv_state_bytes(const rf_kv_config *config);
/* Checks the configuration; fills one layer's geometry. */
rf_status rf_kv_layer_resolve(const rf_kv_config *config, uint32_t layer_index,
                              rf_kv_layer_store *out, rf_error *err);
/* Elements of unit: rows of one side of one layer over all slots. */
uint64_t rf_kv_side_rows(const rf_kv_config *config, const rf_kv_layer_store *layer);

#endif
