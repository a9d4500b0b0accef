/* model/model.h: the contract of the model floor: what a header asks for, the weights it names,
 * the recipe of a step as data, and the step that executes it.
 *
 *   header ─► config (every range check) ─► weights (every shape check) ─► recipe ─► plan
 *                                                                            └─► step
 *
 * A recipe is three short tables: what comes before the layers, what every layer does, what comes
 * after. The plan reads the lifetimes of the buffers from it, the step executes it, the trace
 * names it. A new family is a new table.
 */
#ifndef RF_MODEL_H
#define RF_MODEL_H

#include "kernels/kernels.h"
#include "kv/kv.h"
#include "memory/memory.h"

/* ---- configuration ----------------------------------------------------------------------- */

#define RF_LAYERS_MAX 1024u

typedef struct rf_layer_config {
    uint32_t heads, kv_heads;
    uint32_t k_width, v_width; /* of one head */
    uint32_t ffn;
    uint32_t window; /* 0: all positions */
} rf_layer_config;

typedef enum rf_rope_scaling { RF_ROPE_NONE, RF_ROPE_LINEAR, RF_ROPE_LLAMA3 } rf_rope_scaling;

typedef struct rf_rope_config {
    uint32_t dims; /* rotated elements of a head, even */
    bool interleaved;
    rf_rope_scaling scaling;
    double base;
    double factor;
    double low_freq_factor, high_freq_factor, original_ctx; /* llama3 */
    const rf_gguf_tensor *freqs; /* divisors of the frequencies, or NULL */
} rf_rope_config;

#define RF_CONFIG_NOTES_MAX 8u

typedef struct rf_config {
    char architecture[64];
    char name[128];
    uint32_t layer_count;
    uint32_t width;
    uint32_t vocab_count;
    uint64_t train_ctx;
    float norm_eps;
    float attention_scale; /* 0: 1 / sqrt(k_width) */
    bool tied_output;
    rf_rope_config rope;
    uint32_t note_count;
    const char *notes[RF_CONFIG_NOTES_MAX];
    rf_layer_config layers[RF_LAYERS_MAX];
} rf_config;

/* Reads and checks every key that a run needs. Errors: RF_ERR_BAD_MODEL and RF_ERR_UNSUPPORTED,
 * where = the key. */
rf_status rf_config_read(const rf_gguf *gguf, rf_config *config, rf_error *err);

/* ---- weights ----------------------------------------------------------------------------- */

typedef enum rf_weight_slot {
    /* of the model */
    RF_W_EMBED,
    RF_W_OUTPUT_NORM,
    RF_W_OUTPUT,
    RF_W_MODEL_COUNT,
    /* of each layer */
    RF_W_ATTN_NORM = RF_W_MODEL_COUNT,
    RF_W_Q,
    RF_W_K,
    RF_W_V,
    RF_W_O,
    RF_W_Q_BIAS,
    RF_W_K_BIAS,
    RF_W_V_BIAS,
    RF_W_O_BIAS,
    RF_W_MLP_NORM,
    RF_W_GATE,
    RF_W_UP,
    RF_W_DOWN,
    RF_W_GATE_BIAS,
    RF_W_UP_BIAS,
    RF_W_DOWN_BIAS,
    RF_W_COUNT,
    RF_W_NONE = RF_W_COUNT
} rf_weight_slot;
#define RF_W_LAYER_COUNT (RF_W_COUNT - RF_W_MODEL_COUNT)

typedef struct rf_weight {
    const uint8_t *data; /* in the mapping; NULL when the model has no such tensor */
    const rf_gguf_tensor *tensor;
    uint64_t row_bytes;
    rf_format format;
    uint32_t rows;
    uint32_t k;
} rf_weight;

/* Entries of the weight table of a model. */
uint32_t rf_weight_table_count(const rf_config *config);
static inline const rf_weight *rf_weight_at(const rf_weight *table, uint32_t layer,
                                            rf_weight_slot slot)
{
    return slot < RF_W_MODEL_COUNT ? &table[slot] : &table[slot + layer * RF_W_LAYER_COUNT];
}
/* Binds every tensor that the recipe uses: present, shape, format with a kernel, alignment. Fills
 * table[rf_weight_table_count]. Errors: where = the tensor's name. */
rf_status rf_weights_bind(const rf_gguf *gguf, const rf_config *config, rf_weight *table,
                          rf_error *err);
/* Appends one FILE row for each bound tensor. A tied output has the one row of the embedding. */
rf_status rf_weights_plan(rf_plan *plan, const rf_config *config, const rf_weight *table,
                          rf_error *err);
/* Records each of them in the scope. */
rf_status rf_weights_adopt(rf_scope *scope, const rf_config *config, const rf_weight *table,
                           rf_error *err);

/* ---- recipe ------------------------------------------------------------------------------ */

typedef enum rf_buffer { /* regions "forward.<name>" */
                         RF_B_NONE,
                         RF_B_ITEMS,     /* the step's items, grouped by slot */
                         RF_B_ROPE,      /* [token][pairs][2] cos, sin */
                         RF_B_ROPE_SINK, /* at min(position, capacity - 1); only with sinks */
                         RF_B_RESIDUAL,  /* [token][width] */
                         RF_B_ATTN_IN,
                         RF_B_Q,
                         RF_B_Q_SINK,
                         RF_B_K,
                         RF_B_V,
                         RF_B_ATTN_OUT,
                         RF_B_MLP_IN,
                         RF_B_GATE,
                         RF_B_UP,
                         RF_B_HEAD_IN, /* [logit row][width] */
                         RF_B_LOGITS,  /* [logit row][vocab] */
                         RF_B_PACKED,  /* the input of a matmul, packed */
                         RF_B_PARTS,   /* results of parts of the context, of tokens that share */
                         RF_B_SCRATCH, /* [worker] */
                         RF_B_COUNT
} rf_buffer;

typedef enum rf_op_kind {
    RF_OP_ROPE_TABLE,
    RF_OP_EMBED,
    RF_OP_NORM,
    RF_OP_MATMUL,
    RF_OP_MATMUL_ADD,
    RF_OP_ROPE,
    RF_OP_APPEND,
    RF_OP_ATTEND,
    RF_OP_SWIGLU,
    RF_OP_HEAD_NORM, /* norm of the rows that want logits */
    RF_OP_HEAD       /* their logits */
} rf_op_kind;

#define RF_OP_OPERANDS 3

typedef struct rf_op { /* one row of a recipe */
    rf_op_kind kind;
    const char *name;
    rf_buffer in;
    rf_buffer out[RF_OP_OPERANDS];
    uint8_t weight[RF_OP_OPERANDS]; /* rf_weight_slot, RF_W_NONE */
    uint8_t bias[RF_OP_OPERANDS];
} rf_op;

typedef struct rf_recipe {
    const rf_op *before, *layer, *after;
    uint32_t before_count, layer_count, after_count;
} rf_recipe;

/* The recipe of an architecture; NULL when there is none. Names of those there are: static. */
const rf_recipe *rf_recipe_of(const char *architecture);
const char *rf_recipe_names(void);

#define RF_HEAD_ACT RF_ACT_INT16 /* of the logits, whatever is wanted elsewhere */
#define RF_PHASES   2            /* rf_step_phase: prompt, generation */

typedef struct rf_step_shape { /* what the buffers' sizes depend on, beside the model */
    uint32_t chunk;
    uint32_t logit_rows;
    uint32_t workers;
    uint32_t slots;
    uint32_t sinks;        /* of a ring that may wrap: then their queries are turned apart */
    uint64_t capacity;     /* of a slot */
    rf_act act[RF_PHASES]; /* wanted precision of activations, by the phase of a token */
} rf_step_shape;

/* Elements and unit bytes of one buffer, by the very function that plan and step use. */
typedef struct rf_buffer_extent {
    const char *format;
    uint64_t count, unit_bytes;
} rf_buffer_extent;
rf_buffer_extent rf_buffer_extent_of(const rf_config *config, const rf_weight *table,
                                     const rf_step_shape *shape, rf_buffer buffer);
void rf_buffer_id(rf_buffer buffer, char id[RF_ID_BYTES]);
/* Appends the FORWARD rows with the ops between which each buffer lives. */
rf_status rf_recipe_plan(rf_plan *plan, const rf_recipe *recipe, const rf_config *config,
                         const rf_weight *table, const rf_step_shape *shape, rf_error *err);

/* ---- statistics -------------------------------------------------------------------------- */

/* Sums over a text, of one KV head, before RoPE: what a calibration is made of. Lies in the region
 * "calibration.sums", a head's sums at rf_sums_of. */
typedef struct rf_head_sums {
    uint64_t keys; /* how many */
    uint64_t queries;
    float k_norm; /* the longest key and value */
    float v_norm;
    double values[]; /* [k_width] sum of k, [k_width][k_width] sum of q qT */
} rf_head_sums;
uint64_t rf_sums_bytes(const rf_config *config);
rf_head_sums *rf_sums_of(const rf_config *config, void *sums, uint32_t layer, uint32_t head);

/* ---- step -------------------------------------------------------------------------------- */

typedef struct rf_step_token {
    uint64_t position;
    uint32_t token;
    uint32_t slot;
    uint32_t phase;
} rf_step_token;

typedef struct rf_phase_rows { /* which rows of a batch are of one phase */
    uint32_t *rows;
    uint32_t count;
} rf_phase_rows;

typedef struct rf_step_run { /* consecutive positions of one slot */
    uint64_t first_position;
    uint32_t slot;
    uint32_t first_row;
    uint32_t count;
    uint32_t first_unit; /* of attention, within the step */
    float *parts;        /* of a context that is shared out, or NULL */
} rf_step_run;

typedef struct rf_step_input { /* lies in RF_B_ITEMS */
    uint32_t token_count;
    uint32_t run_count;
    uint32_t logit_count;
    rf_step_token *tokens; /* grouped by slot */
    rf_step_run *runs;
    uint32_t *logit_tokens;                /* index into tokens, in the caller's order */
    rf_phase_rows phases[RF_PHASES];       /* of tokens */
    rf_phase_rows logit_phases[RF_PHASES]; /* of logit_tokens */
} rf_step_input;

/* Fills phases and logit_phases from the tokens. */
void rf_step_input_sort(rf_step_input *input);
/* Lays the arrays of input into RF_B_ITEMS. */
void rf_step_input_init(rf_step_input *input, void *memory, const rf_step_shape *shape);

typedef struct rf_network { /* everything that a step needs; borrowed, fixed at open */
    const rf_config *config;
    const rf_weight *weights;
    const rf_recipe *recipe;
    const rf_kernels *kernels;
    rf_team *team;
    rf_kv *kv;
    rf_trace *trace;
    const double *rope_frequencies; /* [rope.dims / 2], per position */
    atomic_bool *cancel;
    rf_step_shape shape;
    uint64_t scratch_stride;
    uint64_t parts_bytes; /* of RF_B_PARTS, which is NULL where there is nobody to share with */
    void *buffers[RF_B_COUNT];
    uint32_t packed_row; /* plan rows of RF_B_PACKED and RF_B_SCRATCH, for adapter events */
    uint32_t scratch_row;
    bool trace_ops; /* an event for each op */
    void *sums;     /* of a calibration that is being made, or NULL */
} rf_network;

/* Adds a step's keys and queries of one KV head to network->sums; before RoPE. */
void rf_sums_add(const rf_network *network, uint32_t layer, uint32_t tokens, uint32_t head);

/* Fills frequencies[rope.dims / 2]: radians per position. */
void rf_rope_frequencies(const rf_rope_config *rope, const rf_gguf *gguf, double *frequencies);
/* Executes the recipe over input; appended rows are committed when all is well, else forgotten.
 * Errors: RF_ERR_RUNTIME (non-finite), RF_ERR_INTERRUPTED. */
rf_status rf_network_step(rf_network *network, rf_step_input *input, rf_error *err);
/* "layers[3].attn.qkv" for an op of an event. */
void rf_recipe_op_name(const rf_recipe *recipe, uint32_t layer_count, uint32_t op, char *text,
                       size_t capacity);

#endif
