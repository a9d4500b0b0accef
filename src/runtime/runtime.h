/* runtime/runtime.h: the structs behind the opaque nouns of ringfence.h, and how the files of this
 * floor hand them to each other. Sees everything below; nobody below sees it. */
#ifndef RF_RUNTIME_H
#define RF_RUNTIME_H

#include "model/model.h"
#include "text/text.h"

#include "kernels/kv_codec.h"

#include <ringfence/ringfence.h>

/* ---- file -------------------------------------------------------------------------------- */

struct rf_file { /* lies at the start of its own reservation, behind it keys and tensors */
    rf_mapping mapping;
    bool owns_mapping;
    uint64_t reserved_bytes;
    rf_gguf gguf;
    char name[256];
};

/* ---- plan -------------------------------------------------------------------------------- */

#define RF_NOTES_MAX       16u
#define RF_SUGGESTIONS_MAX 8u

typedef struct rf_text_shape { /* of the tokenizer, beside its tables */
    bool present;              /* the file has a vocabulary that we can read */
    uint64_t scratch_bytes;
    uint64_t id_count;
} rf_text_shape;

struct rf_model_plan { /* lies at the start of its own reservation: config, weights, rows behind */
    const rf_file *file;
    uint64_t reserved_bytes;
    rf_plan regions;
    rf_options options; /* as given */
    rf_plan_info info;  /* as resolved */
    rf_config *config;
    rf_weight *weights;
    const rf_recipe *recipe;
    rf_vocab vocab; /* measured, without tables */
    rf_text_shape text;
    rf_step_shape shape;
    rf_kernels kernels;
    rf_kv_layer *kv_layers;
    rf_kv_config kv;
    const char *kv_k, *kv_v; /* static */
    char calibration[4096];  /* path of the file; empty: none */
    char notes[RF_NOTES_MAX][192];
    rf_suggestion suggestions[RF_SUGGESTIONS_MAX];
    uint32_t *unknown; /* indices of tensors that have no id or no use */
};

/* Fills a shape for texts of at most text_bytes; absent when the file has no vocabulary. */
rf_status rf_text_shape_of(const rf_vocab *vocab, uint64_t text_bytes, rf_text_shape *shape,
                           rf_error *err);
/* Appends the rows text.* and the tokenizer's own. */
rf_status rf_text_plan(rf_plan *plan, const rf_vocab *vocab, const rf_text_shape *shape,
                       rf_error *err);
/* rf_plan_make without suggestions: what suggestions and solving are made of. */
rf_status rf_plan_compute(const rf_file *file, const rf_options *options, rf_model_plan **out,
                          rf_error *err);
/* Resolves the options of the KV store. */
rf_status rf_plan_kv(rf_model_plan *plan, rf_error *err);
/* Judges the fit: fills the budget fields of info from the machine and the options. */
void rf_budget_judge(rf_model_plan *plan);
/* Fills the suggestions of a plan that does not fit. */
void rf_budget_suggest(rf_model_plan *plan);

/* ---- tokenizer --------------------------------------------------------------------------- */

struct rf_tokenizer {
    rf_vocab vocab;
    uint64_t reserved_bytes; /* 0: lies in a model's region */
    uint64_t text_bytes;     /* longest text */
    void *scratch;
    uint64_t scratch_bytes;
    uint32_t *ids;
    uint64_t id_count;
};

/* Takes the rows of rf_text_plan from the scope and builds the tables. */
rf_status rf_text_open(rf_scope *scope, const rf_vocab *vocab, const rf_text_shape *shape,
                       uint64_t text_bytes, rf_tokenizer **out, rf_error *err);

/* ---- calibration --------------------------------------------------------------------------- */

extern const char rf_calibration_text[];
extern const uint64_t rf_calibration_text_bytes;
uint64_t rf_calibration_table_bytes(const rf_config *config);
/* Brings the statistics of a file into the store. Errors: RF_ERR_IO, RF_ERR_BAD_MODEL. */
rf_status rf_calibration_load(rf_model *model, const char *path, rf_error *err);

/* ---- sampling ---------------------------------------------------------------------------- */

typedef struct rf_candidate {
    float logit;
    uint32_t token;
} rf_candidate;

typedef struct rf_sampler { /* of one slot */
    rf_sampling options;
    uint64_t generator[4];
    uint32_t window[RF_REPEAT_WINDOW_MAX]; /* ring of the last accepted tokens */
    uint64_t accepted;
} rf_sampler;

rf_status rf_sampler_check(const rf_sampling *sampling, rf_error *err);
void rf_sampler_init(rf_sampler *sampler, const rf_sampling *sampling);
void rf_sampler_note(rf_sampler *sampler, uint32_t token);
/* Picks a token from logits[count] by way of candidates[count]. */
rf_status rf_sampler_pick(rf_sampler *sampler, const rf_kernels *kernels, const float *logits,
                          rf_candidate *candidates, uint32_t count, uint32_t *token, rf_error *err);

/* ---- drafts ------------------------------------------------------------------------------ */

rf_status rf_draft_plan(rf_model_plan *plan, rf_error *err);
rf_status rf_draft_open(rf_model *model, rf_error *err);

/* ---- model ------------------------------------------------------------------------------- */

struct rf_model { /* lies in the region "model.state" */
    const rf_model_plan *plan;
    rf_scope model_scope;
    rf_scope forward_scope;
    rf_network network;
    rf_step_input input;
    rf_kv *kv;
    rf_team *team;
    rf_tokenizer *tokenizer;  /* NULL: the file has no vocabulary */
    rf_sampler *samplers;     /* [slots] */
    rf_candidate *candidates; /* [vocab_count] */
    struct rf_draft *drafts;  /* [slots]; NULL: none are made */
    uint32_t *draft_tokens;   /* of all slots, as draft.c lays them out */
    uint32_t *draft_table;
    uint8_t *slot_seen;  /* [slots]: scratch of rf_step */
    rf_step_item *items; /* [chunk]: scratch of rf_prefill */
    void *sums;          /* of a calibration that is made here; NULL: none */
    float *calibration;  /* its table */
    uint64_t calibration_tokens;
    atomic_bool cancel;
};

#endif
