/* ringfence/kv.h: the KV store: a ring of keys and values for each slot, preallocated.
 *
 * Usable alone with memory.h. The rows of the plan come from rf_kv_plan; the store is opened on a
 * MODEL scope (regions kv.layers[i].k, kv.layers[i].v and what a format keeps beside them), and
 * from then on appending takes no memory. Rows lie as [slot][kv_head][row]; rows of one head are
 * contiguous.
 *
 *   position ─► row: position below `sinks`: the position itself
 *                    else sinks + (position - sinks) mod (rows - sinks)
 *
 * Formats: f32 f16 bf16 hold keys as they are. The others hold them rotated (a signed Hadamard
 * transform of each block) and in codes, and attention works on the codes:
 *
 *   name  bits at width 64   | beside the codes
 *   r8    8.25               | the first row in f16
 *   r6    6.25   r5 5.25     | the first row in f16, and the newest rows also as r8: a query reads
 *   r4    4.25   r3 3.25     |   its own block of 32 positions and `recent_blocks` before it there
 *   q8_0  8.5    q4_0 4.5    | nothing; the encodings of GGML, rotated
 */
#ifndef RINGFENCE_KV_H
#define RINGFENCE_KV_H

#include <ringfence/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct rf_kv_layer { /* geometry of one layer */
    uint32_t kv_heads;       /* 0: this layer keeps nothing */
    uint32_t k_width;        /* elements of one head's key; multiple of 8 */
    uint32_t v_width;
    uint32_t window;      /* 0: all positions */
    const char *k_format; /* NULL: f16 */
    const char *v_format;
    uint32_t shared; /* 0: own rows; else 1 + an earlier layer of the same geometry, whose rows this
                        one reads: it is planned no memory and never appended */
} rf_kv_layer;

/* How the keys were rotated by position before they are appended. With it and a calibration, the
 * mean of a block of 128 positions is known, and keys are held as differences from it. */
typedef struct rf_kv_rope {
    const double *frequencies; /* [dims / 2] radians per position; borrowed while the store lives */
    uint32_t dims;             /* 0: keys are not rotated, or it is not known */
    bool interleaved;          /* pairs are (2i, 2i + 1), else (i, i + dims / 2) */
} rf_kv_rope;

typedef struct rf_kv_config {
    const rf_kv_layer *layers; /* borrowed while a function runs; the store copies what it needs */
    uint32_t layer_count;
    uint32_t slots;
    uint64_t capacity;      /* positions of each slot */
    uint32_t chunk;         /* most tokens of one append */
    uint32_t sinks;         /* first positions that stay when the ring wraps */
    bool endless;           /* the ring may wrap; then capacity - (chunk - 1) positions are seen */
    uint32_t recent_blocks; /* blocks of 32 before its own that a query reads as r8 */
    uint64_t seed;          /* of the rotation's signs */
    rf_kv_rope rope;
    bool calibrated; /* rf_kv_set_calibration will be called for every layer and head */
    bool no_scratch; /* of an engine whose workers have theirs: rf_kv_append and rf_kv_attention
                        refuse, what they do is run in parts */
} rf_kv_config;
/* slots 1, recent_blocks 2, seed 1; everything else zero. */
RF_API void rf_kv_config_init(rf_kv_config *config);

typedef struct rf_kv rf_kv;

/* Appends the rows kv.layers[i].k / .v, and "kv.state" for the store's own bookkeeping, to the
 * plan. Errors: RF_ERR_USAGE naming what is wrong (unknown format: the known ones are listed). */
RF_API rf_status rf_kv_plan(rf_plan *plan, const rf_kv_config *config, rf_error *err);

/* Opens the store in the regions that rf_kv_plan planned; *out lies in the region kv.state and is
 * valid until the scope is closed. With scope NULL the store reserves its own memory (AMBIENT),
 * emits no event, and rf_kv_close gives it back. */
RF_API rf_status rf_kv_open(rf_scope *scope, const rf_kv_config *config, rf_kv **out,
                            rf_error *err);
RF_API void rf_kv_close(rf_kv *kv);

typedef struct rf_kv_statistics { /* of one KV head, from a text that the model has read */
    const float *mean;            /* [k_width] of keys, before RoPE */
    const float *moment; /* [k_width][k_width] mean of q qT over the head's queries, before RoPE */
    int8_t k_base;       /* of the 8-bit scales: the largest exponent that occurred, + 1 */
    int8_t v_base;
} rf_kv_statistics;
/* Copies the statistics of a head. Before the first append. */
RF_API rf_status rf_kv_set_calibration(rf_kv *kv, uint32_t layer, uint32_t head,
                                       const rf_kv_statistics *statistics, rf_error *err);

/* Bytes of all rings: the plan's KV line. */
RF_API uint64_t rf_kv_preallocated_bytes(const rf_kv *kv);
RF_API uint64_t rf_kv_capacity(const rf_kv *kv);

/* Appends count tokens of one layer behind what the slot has, rows as f32: token t, head h at
 * keys + t * key_stride + h * k_width (strides in floats). The layer can attend to them at once;
 * the slot advances at commit. A layer is appended at most once between commits, all layers with
 * the same count. Errors: RF_ERR_USAGE (order, count, a full slot), RF_ERR_RUNTIME (a value that
 * is not finite): the ring is then as it was. */
RF_API rf_status rf_kv_append(rf_kv *kv, uint32_t slot, uint32_t layer, const float *keys,
                              uint64_t key_stride, const float *values, uint64_t value_stride,
                              uint32_t count, rf_error *err);
/* Makes what was appended part of the sequence. RF_ERR_USAGE when a layer is missing. */
RF_API rf_status rf_kv_commit(rf_kv *kv, uint32_t slot, rf_error *err);
/* Forgets what was appended since the last commit. */
RF_API void rf_kv_abort(rf_kv *kv, uint32_t slot);
/* Committed positions of the slot (absolute: the next position). */
RF_API uint64_t rf_kv_length(const rf_kv *kv, uint32_t slot);
/* Forgets positions >= length; O(1). RF_ERR_USAGE when length is beyond the slot's. */
RF_API rf_status rf_kv_truncate(rf_kv *kv, uint32_t slot, uint64_t length, rf_error *err);
/* rf_kv_truncate to 0. */
RF_API rf_status rf_kv_clear(rf_kv *kv, uint32_t slot, rf_error *err);

typedef enum rf_kv_side { RF_KV_K, RF_KV_V } rf_kv_side;

typedef struct rf_kv_run { /* rows of one head that lie behind each other */
    uint64_t first_position;
    uint64_t count;
    const void *rows; /* borrowed; valid until the positions are overwritten */
} rf_kv_run;
#define RF_KV_RUNS_MAX 8u

/* The positions [from, to) of a head as the runs that they physically are, ascending; appended
 * and not yet committed positions count. Returns the number of runs; 0 when empty or out of
 * range. Zero copy. */
RF_API uint32_t rf_kv_window(const rf_kv *kv, uint32_t slot, uint32_t layer, uint32_t head,
                             rf_kv_side side, uint64_t from, uint64_t to,
                             rf_kv_run runs[RF_KV_RUNS_MAX]);
/* The same positions as f32 rows [to - from][width] in the space of appended rows: fills out, and
 * emits an adapter event for plan row `row` (RF_NO_ROW: none) on trace (may be NULL). */
RF_API rf_status rf_kv_gather(rf_kv *kv, uint32_t slot, uint32_t layer, uint32_t head,
                              rf_kv_side side, uint64_t from, uint64_t to, float *out,
                              rf_trace *trace, uint32_t row, rf_error *err);

typedef struct rf_kv_queries {
    const float *q;      /* token t, head h at q + t * stride + h * k_width */
    const float *q_sink; /* turned to min(position, capacity - 1), for the sinks; NULL: q */
    uint64_t stride;
    uint32_t heads; /* a multiple of the layer's KV heads, at most 64 times */
    uint32_t count; /* consecutive positions that the layer has */
    uint64_t first_position;
    float scale; /* of the scores: 1 / sqrt(k_width) */
} rf_kv_queries;
/* Attention of the queries over all that the slot has, each up to its own position. Fills token t,
 * head h at out + t * out_stride + h * v_width. Takes no memory. */
RF_API rf_status rf_kv_attention(rf_kv *kv, uint32_t slot, uint32_t layer,
                                 const rf_kv_queries *queries, float *out, uint64_t out_stride,
                                 rf_error *err);

/* Gives the empty slot `to` a copy of all that `from` has. */
RF_API rf_status rf_kv_copy_slot(rf_kv *kv, uint32_t from, uint32_t to, rf_error *err);
/* Gives the empty slot `to` the first length positions of `from`, which are read where they lie and
 * written no more; `to` goes on in rows of its own. While others hold a prefix of it, `from` cannot
 * be cut below it. Cutting `to` to nothing gives the prefix back. */
RF_API rf_status rf_kv_share_prefix(rf_kv *kv, uint32_t from, uint32_t to, uint64_t length,
                                    rf_error *err);
/* How many slots hold a prefix of this one. */
RF_API uint32_t rf_kv_holders(const rf_kv *kv, uint32_t slot);

typedef struct rf_kv_report {
    uint64_t preallocated_bytes; /* row_bytes + beside_bytes */
    uint64_t row_bytes;          /* the rings of all slots */
    uint64_t beside_bytes;       /* first and recent rows */
    double bits_per_value;       /* of the rings, mean over layers and sides */
    uint64_t capacity;
    uint64_t length; /* of the slot */
    uint64_t prefix_length;
    uint32_t holders;
} rf_kv_report;
RF_API void rf_kv_describe(const rf_kv *kv, uint32_t slot, rf_kv_report *out);

RF_API uint64_t rf_kv_row_bytes(const rf_kv *kv, uint32_t layer, rf_kv_side side);

#ifdef __cplusplus
}
#endif
#endif
