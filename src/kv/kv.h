/* kv/kv.h: the contract of the KV floor: the public store, and attention over it.
 *
 * Knows rows, positions and slots; knows no model, no weight and no thread. Who calls attention
 * from several workers gives each its own scratch.
 */
#ifndef RF_KV_H
#define RF_KV_H

#include "kernels/kernels.h"
#include "memory/memory.h"

#include <ringfence/kv.h>

/* Tokens of one slot at consecutive positions attend to all that the slot has, each up to its own
 * position: causal, and within the layer's window. */
typedef struct rf_kv_attend {
    uint32_t slot;
    uint32_t layer;
    uint32_t heads; /* query heads, a multiple of the layer's KV heads */
    uint64_t first_position;
    uint32_t token_count;
    const float *q; /* token t, head h at q + t * q_stride + h * k_width */
    uint64_t q_stride;
    float *out; /* filled; token t, head h at out + t * out_stride + h * v_width */
    uint64_t out_stride;
    float scale; /* of the scores */
} rf_kv_attend;

/* A job is cut into units (a KV head and a tile of tokens); units may run in any order and on any
 * worker, with the same bits. scratch: rf_kv_attend_scratch_bytes of the widest layer. */
uint32_t rf_kv_attend_units(const rf_kv *kv, const rf_kv_attend *job);
uint64_t rf_kv_attend_scratch_bytes(uint32_t k_width, uint32_t v_width, uint32_t group);
void rf_kv_attend_run(const rf_kv *kv, const rf_kernels *kernels, const rf_kv_attend *job,
                      uint32_t first_unit, uint32_t last_unit, void *scratch);

/* Bytes of rows that the job widens to f32 for its kernels: what the adapter event of it says. */
uint64_t rf_kv_attend_widened_bytes(const rf_kv *kv, const rf_kv_attend *job);

/* The KV format with this name, or RF_FORMAT_NONE. The names, for messages: static. */
rf_format rf_kv_format_by_name(const char *name);
const char *rf_kv_format_names(void);

/* The kernels that encode appended rows; set once before the first append. */
void rf_kv_set_kernels(rf_kv *kv, const rf_kernels *kernels);

#endif
