/* kv/kv.h: the contract of the KV floor: the public store, and what an engine with a team uses.
 *
 * Knows rows, positions and slots; knows no model, no weight and no thread. Appends and attention
 * are cut into units; who runs them on several workers gives each its own scratch.
 */
#ifndef RF_KV_H
#define RF_KV_H

#include "kernels/kernels.h"
#include "memory/memory.h"

#include <ringfence/kv.h>

/* Scratch of one worker for appends and attention over a layer of this shape. */
uint64_t rf_kv_scratch_bytes(uint32_t k_width, uint32_t v_width, uint32_t group);

/* ---- append ------------------------------------------------------------------------------- */

typedef struct rf_kv_append_job { /* filled by begin */
    rf_kv *kv;
    uint32_t slot, layer, count;
    uint64_t first_position;
    const float *source[2];
    uint64_t stride[2];
} rf_kv_append_job;

/* rf_kv_append in parts: begin checks everything; then every unit is run once, in any order and on
 * any worker; end makes the rows visible to the layer. A job that is not ended changed nothing
 * that anybody sees. */
rf_status rf_kv_append_begin(rf_kv *kv, uint32_t slot, uint32_t layer, const float *keys,
                             uint64_t key_stride, const float *values, uint64_t value_stride,
                             uint32_t count, rf_kv_append_job *job, rf_error *err);
uint32_t rf_kv_append_units(const rf_kv_append_job *job);
void rf_kv_append_run(const rf_kv_append_job *job, uint32_t first_unit, uint32_t last_unit,
                      void *scratch);
void rf_kv_append_end(const rf_kv_append_job *job);

/* ---- attention ---------------------------------------------------------------------------- */

/* Tokens of one slot at consecutive positions attend to all that the slot has, each up to its own
 * position: causal, within the layer's window, and to the sinks. */
typedef struct rf_kv_attend {
    uint32_t slot;
    uint32_t layer;
    uint32_t heads; /* query heads, a multiple of the layer's KV heads */
    uint64_t first_position;
    uint32_t token_count;
    const float *q; /* token t, head h at q + t * q_stride + h * k_width */
    const float
        *q_sink; /* the same for the sinks, turned to min(position, capacity - 1); NULL: q */
    uint64_t q_stride;
    float *out; /* filled; token t, head h at out + t * out_stride + h * v_width */
    uint64_t out_stride;
    float scale;  /* of the scores */
    float *parts; /* rf_kv_attend_parts_bytes, 64-aligned: the context is shared out; or NULL */
} rf_kv_attend;

/* A context is attended to in parts of this many positions, each from nothing, whose results are
 * joined in ascending order. Those of a job with few tokens can be units: 512 keep joining below
 * 2 % of the work (derived: joining is 3 operations for each sum, a position 4). */
#define RF_KV_PART         512u
#define RF_KV_SPLIT_TOKENS 8u /* of a job; with more of them, tiles are units enough */

/* Bytes that the parts of this job need to be units, with `parts` not looked at; 0: it is not to be
 * shared out. And the most that each token of any job needs that sees up to so many positions. */
uint64_t rf_kv_attend_parts_bytes(const rf_kv *kv, const rf_kv_attend *job);
uint64_t rf_kv_parts_bytes(uint64_t positions, uint32_t v_width, uint32_t group, uint32_t kv_heads);

/* Units may run in any order and on any worker. With parts they leave their results there, and when
 * all have run, units [0, token_count * heads) of join must run, likewise. The bits are the same
 * with parts and without. */
uint32_t rf_kv_attend_units(const rf_kv *kv, const rf_kv_attend *job);
void rf_kv_attend_run(const rf_kv *kv, const rf_kv_attend *job, uint32_t first_unit,
                      uint32_t last_unit, void *scratch);
void rf_kv_attend_join(const rf_kv *kv, const rf_kv_attend *job, uint32_t first_unit,
                       uint32_t last_unit, void *scratch);

/* Bytes of rows that the job expands for its kernels: what its adapter event says. */
uint64_t rf_kv_attend_widened_bytes(const rf_kv *kv, const rf_kv_attend *job);

/* ---- save and restore --------------------------------------------------------------------- */

/* A slot's committed positions as bytes: a head that says what rows these are and what they were
 * made with, and behind it the rows. Filled into head[rf_kv_save_head_bytes]. */
uint64_t rf_kv_save_head_bytes(const rf_kv *kv);
void rf_kv_save_head(const rf_kv *kv, uint32_t slot, void *head);
/* The rows as pieces of the store itself, in the order of their positions: zero copy, valid until
 * the slot is next changed. Returns their number; with pieces NULL only that. */
uint32_t rf_kv_save_rows(const rf_kv *kv, uint32_t slot, rf_piece *pieces);
/* Makes the slot what was saved; data is borrowed while this runs. The capacity, and with it the
 * chunk and endless, may be another one as long as the slot goes on with the bits that it would
 * have, had it been filled here (a larger chunk asks for more rows of a window than there may be:
 * then it is refused). where names the bytes in errors: RF_ERR_USAGE when this store is
 * another one, RF_ERR_BAD_MODEL when the bytes contradict themselves; the slot is then as it was.
 * Only bytes that a digest vouches for should come here: rows are not judged. */
rf_status rf_kv_restore(rf_kv *kv, uint32_t slot, const char *where, const void *data,
                        uint64_t bytes, rf_error *err);

/* The name of a KV format, static (NULL: f16), or NULL when there is none of this name. */
const char *rf_kv_format_name(const char *name);
/* Their names, for messages: static. */
const char *rf_kv_format_names(void);
/* Whether a format of this name makes use of a calibration. */
bool rf_kv_format_calibrates(const char *name);

/* The instruction sets whose kernels the store uses; scalar and all that the machine has before. */
void rf_kv_set_cpu(rf_kv *kv, uint32_t cpu_mask);

#endif
