/* kv/store.h: the insides of the store, shared by the files of this folder alone. */
#ifndef RF_KV_STORE_H
#define RF_KV_STORE_H

#include "kernels/kv_codec.h"
#include "kv/kv.h"

#define RF_KV_MEAN_BLOCK   128u /* positions that share a mean and a feedback form (study) */
#define RF_KV_RECENT_BLOCK 32u  /* positions that are seen in the same form (study) */
#define RF_KV_AHEAD        512u /* positions behind a block whose queries its feedback is for */
#define RF_KV_DAMPING      0.1  /* of the feedback form (study) */
#define RF_KV_NO_FEEDBACK  (1ull << 63) /* of feedback_block: this block has no usable form */

typedef struct rf_kv_format { /* one row of the table of KV formats */
    const char *name;
    rf_format plain; /* of a format that holds values as they are; RF_FORMAT_NONE: coded */
    rf_kv_code code; /* of a coded one */
    bool has_first;  /* position 0 is kept in f16 */
    bool has_recent; /* the newest rows are kept as r8 too */
    bool has_mean;   /* keys are held as differences from their block's mean, with feedback */
    float limit;     /* finite values of at least this size would be stored as infinity */
} rf_kv_format;

typedef struct rf_kv_side_store { /* keys or values of one layer */
    const rf_kv_format *format;
    uint8_t *bytes; /* [slot][kv_head][row_count][row_bytes] */
    uint64_t row_bytes;
    uint32_t width;
    rf_kv_shape shape;        /* coded: of a row */
    rf_kv_shape recent_shape; /* r8 */
    uint16_t *first;          /* [slot][kv_head][width] f16, as they came; NULL: none */
    uint8_t *recent;          /* [slot][kv_head][recent_count][r8 row]; NULL: none */
    uint64_t recent_count;
    uint8_t *signs; /* [(width + 7) / 8] in kv.state */
    int8_t *bases;  /* [kv_head] of the 8-bit scales, in kv.state */
} rf_kv_side_store;

typedef struct rf_kv_layer_store {
    rf_kv_side_store side[2]; /* by rf_kv_side */
    uint64_t row_count;       /* rows of one head of one slot */
    uint32_t kv_heads;
    uint32_t window;
    uint32_t reads;     /* the layer whose rows attention finds: itself, or an earlier one */
    float *calibration; /* [kv_head][k_width + k_width * k_width]: mean, moment; NULL: none */
    float *feedback;    /* [slot][kv_head][rotation block][B * B + B]; NULL: none */
    uint64_t
        *feedback_block; /* [slot][kv_head]: the block that feedback is for, + 1; in kv.state */
} rf_kv_layer_store;

typedef struct rf_kv_slot {
    uint64_t length;  /* committed positions */
    uint64_t written; /* positions below it were written at some time: a row may be a newer one */
    uint32_t pending; /* positions appended by every layer before next_layer */
    uint32_t next_layer;
    uint32_t prefix_slot;   /* whose rows stand for positions below prefix_length */
    uint64_t prefix_length; /* 0: all rows are its own */
    uint32_t holders;       /* slots that read a prefix of this one */
    uint64_t held_length;   /* the longest of those prefixes */
} rf_kv_slot;

struct rf_kv {
    rf_kernels kernels; /* copies: the store works by itself, also without an engine */
    rf_kv_kernels codec;
    rf_kv_rope rope;
    rf_kv_layer_store *layers;
    rf_kv_slot *slots;
    float *phases;        /* [slot][phase_count][pairs][2]: mean turn of a pair over a block */
    float *pinned_phases; /* [rf_kv_pinned_blocks][pairs][2]: the same of the sinks' blocks */
    float *spread; /* [2][pairs][pairs]: how far averages over a block shrink, i - j, i + j */
    uint64_t phase_count;
    uint32_t pairs;    /* of the widest key; pairs behind rope.dims do not turn */
    void *own_scratch; /* for appends and attention of a caller without a team; NULL: none */
    uint64_t capacity;
    uint64_t ring_bytes;
    uint64_t own_bytes; /* AMBIENT: what rf_kv_close gives back, from the store's own address */
    uint32_t layer_count;
    uint32_t slot_count;
    uint32_t chunk;
    uint32_t sinks;
    uint32_t recent_blocks;
    bool endless;
};

static inline uint64_t rf_kv_row_of(const rf_kv *kv, const rf_kv_layer_store *layer,
                                    uint64_t position)
{
    if (position < kv->sinks)
        return position;
    return kv->sinks + (position - kv->sinks) % (layer->row_count - kv->sinks);
}

static inline uint8_t *rf_kv_row(const rf_kv *kv, uint32_t slot, uint32_t layer_index,
                                 uint32_t head, rf_kv_side side, uint64_t row)
{
    const rf_kv_layer_store *layer = &kv->layers[layer_index];
    uint64_t head_index = (uint64_t)slot * layer->kv_heads + head;
    return layer->side[side].bytes +
           (head_index * layer->row_count + row) * layer->side[side].row_bytes;
}

/* The first position, sinks apart, that a query at position sees. */
static inline uint64_t rf_kv_seen_from(const rf_kv *kv, uint32_t window, uint64_t position)
{
    uint64_t seen = UINT64_MAX; /* positions up to and with its own */
    if (kv->endless)
        seen = kv->capacity - (kv->chunk - 1) - kv->sinks;
    if (window)
        seen = RF_MIN(seen, (uint64_t)window);
    return position + 1 > seen ? position + 1 - seen : 0;
}

/* Blocks of positions that share a mean and hold a sink: these stay, however far the ring turns. */
static inline uint64_t rf_kv_pinned_blocks(uint32_t sinks)
{
    return ((uint64_t)sinks + RF_KV_MEAN_BLOCK - 1) / RF_KV_MEAN_BLOCK;
}

/* The first layer at or after index that keeps anything. */
static inline uint32_t rf_kv_keeping_layer(const rf_kv *kv, uint32_t index)
{
    while (index < kv->layer_count && kv->layers[index].kv_heads == 0)
        index++;
    return index;
}

/* Whether a next position `length` would find all that it sees in the layer. */
bool rf_kv_can_go_on(const rf_kv *kv, const rf_kv_layer_store *layer, const rf_kv_slot *state,
                     uint64_t length);
/* Slot reads the first length positions of owner; and no longer. */
void rf_kv_hold(rf_kv *kv, uint32_t slot, uint32_t owner, uint64_t length);
void rf_kv_release(rf_kv *kv, uint32_t slot);
/* The slot whose ring has the layer's row of this position of a slot; *end: up to where. */
uint32_t rf_kv_slot_of(const rf_kv *kv, uint32_t layer_index, uint32_t slot, uint64_t position,
                       uint64_t *end);

/* ---- parts: what a layer keeps, one arithmetic for plan and store ------------------------- */

typedef enum rf_kv_part {
    RF_KV_PART_ROWS_K,
    RF_KV_PART_ROWS_V,
    RF_KV_PART_FIRST_K,
    RF_KV_PART_FIRST_V,
    RF_KV_PART_RECENT_K,
    RF_KV_PART_RECENT_V,
    RF_KV_PART_CALIBRATION,
    RF_KV_PART_FEEDBACK,
    RF_KV_PART_COUNT
} rf_kv_part;

typedef struct rf_kv_extent {
    const char *suffix; /* of kv.layers[i]. */
    const char *format;
    rf_pool pool;
    uint64_t count, unit_bytes; /* count 0: the layer has no such part */
} rf_kv_extent;

/* Checks the configuration; fills one layer's geometry, without addresses. */
rf_status rf_kv_layer_resolve(const rf_kv_config *config, uint32_t layer_index,
                              rf_kv_layer_store *out, rf_error *err);
rf_kv_extent rf_kv_extent_of(const rf_kv_config *config, const rf_kv_layer_store *layer,
                             rf_kv_part part);
/* The store's own bookkeeping: struct, layers, slots, signs, bases, phases, scratch. With memory,
 * sets the pointers of *kv, which lies at its start. Returns the bytes; UINT64_MAX when they leave
 * 64 bits. */
uint64_t rf_kv_lay_state(const rf_kv_config *config, rf_kv *kv);
const rf_kv_format *rf_kv_format_row(const char *name);

/* ---- means and feedback ------------------------------------------------------------------- */

/* The two elements of a pair of a key of this width, and its turn per position. */
typedef struct rf_kv_pair {
    uint32_t a, b;
    double frequency;
} rf_kv_pair;
rf_kv_pair rf_kv_pair_of(const rf_kv_rope *rope, uint32_t index);

/* What does not depend on a slot: the spread, and the phases of the sinks' blocks. */
void rf_kv_fill_tables(rf_kv *kv);
/* Makes sure that the phases of the blocks of [from, to) are there. */
void rf_kv_fill_phases(rf_kv *kv, uint32_t slot, uint64_t from, uint64_t to);
const float *rf_kv_phases_of(const rf_kv *kv, uint32_t slot, uint64_t position);
/* The mean of the block, in the space of appended keys. */
void rf_kv_block_mean(const rf_kv *kv, uint32_t slot, const rf_kv_layer_store *layer, uint32_t head,
                      uint64_t position, float *mean);
/* The feedback for keys at position; NULL m when there is none. scratch: 2 * 64 * 64 +
 * k_width doubles. */
rf_kv_feedback rf_kv_feedback_of(rf_kv *kv, uint32_t slot, rf_kv_layer_store *layer, uint32_t head,
                                 uint64_t position, double *scratch);

#endif
