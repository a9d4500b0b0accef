/* ringfence/ringfence.h: the whole engine: a file, its plan, the model, steps, text, sampling.
 *
 *   rf_file_open ─► rf_plan_make ─► rf_model_open ─► rf_step … rf_sample … ─► rf_model_close
 *   (header only)   (pure arithmetic)  (takes exactly the plan)   (takes nothing)
 *
 * Ownership: every object is owned by the caller and ended by its close function, in reverse
 * order: a model borrows its plan, a plan borrows its file. Close functions accept NULL.
 * The library never prints, exits, aborts or reads the environment. Functions that can fail return
 * a status and fill *err (may be NULL); what they would have filled is then left alone.
 * Thread rule: one model, with its tokenizer and samplers, belongs to one thread at a time;
 * rf_model_cancel may be called from any thread and from a signal handler.
 */
#ifndef RINGFENCE_RINGFENCE_H
#define RINGFENCE_RINGFENCE_H

#include <ringfence/kv.h>
#include <ringfence/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- file -------------------------------------------------------------------------------- */

typedef struct rf_file rf_file;

/* Maps the file read-only and reads its header. Errors: RF_ERR_IO, RF_ERR_BAD_MODEL,
 * RF_ERR_UNSUPPORTED. A data part that is missing or cut off is no error here. */
RF_API rf_status rf_file_open(const char *path, rf_file **out, rf_error *err);
/* The same for bytes that the caller keeps until close (borrows), at a multiple of 8; name is
 * copied (cut at 255). */
RF_API rf_status rf_file_open_memory(const char *name, const void *data, uint64_t bytes,
                                     rf_file **out, rf_error *err);
RF_API void rf_file_close(rf_file *file);

typedef struct rf_file_info {
    const char *name; /* path or name; valid until close */
    uint64_t bytes;
    const void *data; /* the mapping; valid until close */
    uint32_t version;
    uint64_t alignment;
    uint64_t data_offset;
    uint32_t key_count;
    uint32_t tensor_count;
    bool data_missing; /* some tensor's bytes are not in the file */
    uint64_t data_end; /* where the file would end */
} rf_file_info;
RF_API void rf_file_describe(const rf_file *file, rf_file_info *out);

typedef struct rf_value { /* one element of a key */
    char kind;            /* 'u', 'i', 'f', 'b', 's' */
    uint64_t u;           /* 'u', 'b' */
    int64_t i;
    double f;
    const char *text; /* 's': not terminated; valid until the file is closed */
    uint64_t text_bytes;
} rf_value;

typedef struct rf_key_info {
    const char *name; /* not terminated; valid until the file is closed */
    uint64_t name_bytes;
    const char *type;         /* "u32", "string", "array", ... static */
    const char *element_type; /* of an array, else NULL */
    uint64_t count;
} rf_key_info;
RF_API bool rf_file_key(const rf_file *file, uint32_t index, rf_key_info *out);
/* Elements of a string array are found by walking: keep index ascending; *at starts at 0. */
RF_API bool rf_file_key_value(const rf_file *file, uint32_t key_index, uint64_t element,
                              uint64_t *at, rf_value *out);

typedef struct rf_tensor_info {
    const char *name; /* not terminated */
    uint64_t name_bytes;
    char id[RF_ID_BYTES]; /* canonical id; empty when the name is not known */
    const char *format;
    uint32_t rank;
    uint64_t shape[4];
    uint64_t offset; /* in the file */
    uint64_t bytes;
    bool in_file;
} rf_tensor_info;
RF_API bool rf_file_tensor(const rf_file *file, uint32_t index, rf_tensor_info *out);

/* ---- plan -------------------------------------------------------------------------------- */

#define RF_CTX_DEFAULT 0u /* min(trained, 4096) */
#define RF_CTX_TRAINED UINT64_MAX

typedef struct rf_options {
    uint32_t struct_size; /* sizeof(rf_options): set by rf_options_init */
    uint64_t ctx;         /* positions per slot; RF_CTX_DEFAULT, RF_CTX_TRAINED or a number */
    uint32_t slots;       /* sequences; >= 1 */
    uint32_t chunk;       /* most items of one step; 0: the profile's, clamped to ctx; an
                              explicit one above ctx is refused */
    uint32_t threads;     /* 0: what the process may use */
    uint32_t logit_rows;  /* most items of a step that may ask for logits; >= 1 */
    uint32_t draft;       /* most tokens that rf_draft_propose gives; 0: no drafts. Raises
                              logit_rows to draft + 1; chunk must have as many */
    uint64_t text_bytes;  /* longest text that will be tokenised */
    const char *kv_k;     /* format names; NULL: f16 */
    const char *kv_v;
    const char *kv_layers; /* "RANGE:K[/V],...": formats of single layers; later ones win; NULL */
    uint32_t sinks;        /* first positions that stay when the ring wraps */
    bool endless;          /* the ring may wrap: a slot is never full */
    uint32_t kv_recent;    /* blocks of 32 that narrow formats also keep as r8 */
    const char *kv_calibration; /* file of rf_calibration_save; NULL: none */
    bool calibrate;             /* plan the memory of rf_calibrate */
    uint32_t cpu_mask;          /* instruction sets: 0xFFFF all */
    uint32_t act_prompt;        /* bits of activations before quantised weights, 8 or 16 (which */
    uint32_t act_generation;    /* means at least 14), by the phase of a step's item; 0: 8 for */
                                /* prompts; for generation 16 where it is free (AVX-512), else 8 */
    uint32_t event_capacity;    /* of the trace ring */
    uint64_t mem_limit;         /* bytes; 0: what the machine has */
    const char *profile;        /* "mobile-2gb", "edge", "desktop", "server"; NULL: desktop */
    bool pattern;               /* for check: fill regions with a pattern at open */
} rf_options;
RF_API void rf_options_init(rf_options *options);

typedef struct rf_model_plan rf_model_plan;

/* Computes the plan from the header. Errors: RF_ERR_BAD_MODEL / RF_ERR_UNSUPPORTED naming the key
 * or tensor, RF_ERR_USAGE naming the option. A plan that does not fit is no error: info.fits. */
RF_API rf_status rf_plan_make(const rf_file *file, const rf_options *options, rf_model_plan **out,
                              rf_error *err);
RF_API void rf_model_plan_close(rf_model_plan *plan);
/* The regions; valid until close. */
RF_API const rf_plan *rf_model_plan_regions(const rf_model_plan *plan);

typedef struct rf_plan_info {
    char architecture[64];
    char name[128];
    uint32_t layers;
    uint64_t train_ctx;
    uint32_t vocab_count;
    uint64_t ctx; /* the options as they were resolved */
    uint32_t slots, chunk, threads, logit_rows;
    uint32_t act_prompt, act_generation;
    bool data_missing;
    const char *budget_source; /* "mem_available", "cgroup", "rlimit", "mem_limit"; static */
    uint64_t available_bytes;
    uint64_t reserve_bytes;
    bool fits;
    uint32_t note_count;
    uint32_t suggestion_count; /* 0 when it fits */
    uint32_t unknown_tensor_count;
} rf_plan_info;
RF_API void rf_model_plan_describe(const rf_model_plan *plan, rf_plan_info *out);
/* The name of a numbered op (first_op, last_op of the FORWARD rows); false past the end. */
RF_API bool rf_model_plan_op_name(const rf_model_plan *plan, uint32_t op, char *text,
                                  size_t capacity);
/* A note: text that is valid until close; NULL past the end. */
RF_API const char *rf_model_plan_note(const rf_model_plan *plan, uint32_t index);
/* The name of a tensor that the recipe has no use for; false past the end. */
RF_API bool rf_model_plan_unknown_tensor(const rf_model_plan *plan, uint32_t index, char *name,
                                         size_t capacity);

typedef struct rf_suggestion {
    char option[48]; /* "-c 2048", "-ctk q8_0" */
    uint64_t saves_bytes;
    char cost[96]; /* what it costs, in words */
} rf_suggestion;
RF_API bool rf_model_plan_suggestion(const rf_model_plan *plan, uint32_t index, rf_suggestion *out);

/* The largest ctx that fits the budget of these options. RF_ERR_NO_FIT when not even 1 fits. */
RF_API rf_status rf_plan_solve_ctx(const rf_file *file, const rf_options *options, uint64_t *ctx,
                                   rf_error *err);

/* ---- model ------------------------------------------------------------------------------- */

typedef struct rf_model rf_model;

/* done and total in bytes; returning false stops with RF_ERR_INTERRUPTED. */
typedef bool (*rf_progress_fn)(void *context, uint64_t done, uint64_t total);

/* Takes exactly the plan, or fails with nothing held. Borrows plan (and its file) until close.
 * Errors: RF_ERR_NO_FIT (also when plan says so), RF_ERR_BAD_MODEL (data missing), RF_ERR_DRIFT. */
RF_API rf_status rf_model_open(const rf_model_plan *plan, rf_progress_fn progress, void *context,
                               rf_model **out, rf_error *err);
/* Ends the model. copy (may be NULL) is filled with the trace's totals after the last free. */
RF_API void rf_model_close(rf_model *model, rf_trace *copy);

/* Where a token comes from decides with how many bits its step computes (options.act_*), however
 * many items go with it: text that was given, or text that the model makes, drafts included. */
typedef enum rf_step_phase { RF_STEP_PROMPT, RF_STEP_GENERATION } rf_step_phase;

typedef struct rf_step_item {
    uint32_t slot;
    uint32_t token;
    uint64_t position; /* must be the slot's next one */
    bool wants_logits;
    rf_step_phase phase;
} rf_step_item;

/* One forward pass over count <= chunk items (any mixture of slots; the items of one slot in
 * ascending position). All or nothing: on an error, the slots are as they were. Errors:
 * RF_ERR_USAGE (token, slot, position, full slot, too many logits), RF_ERR_RUNTIME (non-finite
 * values, naming the op), RF_ERR_INTERRUPTED. */
RF_API rf_status rf_step(rf_model *model, const rf_step_item *items, uint32_t count, rf_error *err);
/* Runs tokens[count] of a slot, a prompt, through steps of at most chunk items, the last one with
 * logits when last_logits. All tokens that were committed before an error stay (see
 * rf_slot_length). progress gets tokens. */
RF_API rf_status rf_prefill(rf_model *model, uint32_t slot, const uint32_t *tokens, uint64_t count,
                            bool last_logits, rf_progress_fn progress, void *context,
                            rf_error *err);
/* The index-th row of logits of the last step, [vocab_count] f32; valid until the next step. */
RF_API const float *rf_logits(const rf_model *model, uint32_t index);
RF_API uint64_t rf_slot_length(const rf_model *model, uint32_t slot);
/* Forgets positions >= length. O(1). */
RF_API rf_status rf_slot_truncate(rf_model *model, uint32_t slot, uint64_t length, rf_error *err);
/* Gives the empty slot `to` a copy of what `from` has, or its first length positions to read where
 * they lie (see rf_kv_copy_slot and rf_kv_share_prefix). */
RF_API rf_status rf_slot_copy(rf_model *model, uint32_t from, uint32_t to, rf_error *err);
RF_API rf_status rf_slot_share(rf_model *model, uint32_t from, uint32_t to, uint64_t length,
                               rf_error *err);
/* Makes the step that is running, or the next one, end with RF_ERR_INTERRUPTED. Any thread. */
RF_API void rf_model_cancel(rf_model *model);

RF_API const rf_trace *rf_model_trace(const rf_model *model); /* valid until close */
/* Bytes of weights and KV that one decode step at this depth reads. */
RF_API uint64_t rf_model_step_bytes(const rf_model *model, uint64_t depth);
/* Turns an event of kind KERNEL into the name of its op ("layers[3].attn.qkv"). */
RF_API void rf_model_op_name(const rf_model *model, uint32_t op, char *text, size_t capacity);

/* ---- calibration ------------------------------------------------------------------------- */

/* SHA-256 over the header and both ends of each tensor: which weights these are. RF_ERR_BAD_MODEL
 * when tensors are missing. */
RF_API rf_status rf_file_fingerprint(const rf_file *file, uint8_t fingerprint[32], rf_error *err);
/* Reads the built-in text (25 KB; 512 tokens of it when quick) with slot 0, which it clears, and
 * keeps the statistics of keys and queries that the formats r8 .. r3 are made with. The plan must
 * have been made with options.calibrate. progress gets tokens. Deterministic. */
RF_API rf_status rf_calibrate(rf_model *model, bool quick, rf_progress_fn progress, void *context,
                              rf_error *err);
/* Writes them beside path and renames: a file that was there stays whole on failure. */
RF_API rf_status rf_calibration_save(const rf_model *model, const char *path, rf_error *err);
/* Whether the key formats of these options (kv_k, kv_layers) make use of a calibration. */
RF_API bool rf_options_calibrate(const rf_options *options);

/* ---- save and restore -------------------------------------------------------------------- */

/* What a caller keeps about a slot beside the model. */
typedef struct rf_slot_extra {
    uint32_t *tokens;              /* save: ids of the slot's positions, borrowed and only read;
                                restore: the caller's, filled; NULL: none, or not wanted */
    uint64_t token_capacity;       /* restore: ids that fit there */
    uint64_t token_count;          /* save: given; restore: filled, also without tokens */
    uint32_t pending_token;        /* sampled and not yet stepped; UINT32_MAX: none */
    struct rf_text_stream *stream; /* save: read; restore: filled when the file has one, else left
                                      alone; NULL: none, or not wanted */
} rf_slot_extra;

/* Writes the slot as it stands between two steps: its rows, its sampler, and extra (may be NULL),
 * with a digest over everything, into a file beside path that is synced and renamed: a file that
 * was there stays whole on failure. A run that is restored goes on with the bits that it would
 * have had. Logits are not kept: sample first, and give the token as pending. Reserves memory for
 * the list of what is written (AMBIENT) and gives it back. Errors: RF_ERR_USAGE (slot, a token that
 * does not exist, more tokens than positions), RF_ERR_IO. */
RF_API rf_status rf_slot_save(rf_model *model, uint32_t slot, const char *path,
                              const rf_slot_extra *extra, rf_error *err);
/* Makes the slot, its sampler and extra (may be NULL) what was saved; what the slot had is gone.
 * The whole file is verified first: on an error everything is as it was, extra too. Another ctx,
 * chunk, slot or number of threads is no error where the text goes on as it would have. Errors:
 * RF_ERR_IO (unreadable), RF_ERR_BAD_MODEL (cut off, altered, another version, another model),
 * RF_ERR_USAGE (options that differ from the ones it was saved with: formats, sinks, recent
 * blocks, calibration; a ctx or token_capacity that is too small). */
RF_API rf_status rf_slot_restore(rf_model *model, uint32_t slot, const char *path,
                                 rf_slot_extra *extra, rf_error *err);

/* ---- check ------------------------------------------------------------------------------- */

RF_API rf_status rf_model_check_row(const rf_model *model, uint32_t row_index, rf_check_row *out,
                                    rf_error *err);
RF_API rf_status rf_model_check_guards(const rf_model *model, rf_error *err);
/* Bytes resident of a scope's ANON arena. */
RF_API uint64_t rf_model_resident(const rf_model *model, rf_scope_kind scope);
/* Pages of the file that are in the page tables, in bytes: grows only by FILE faults. */
RF_API uint64_t rf_model_file_resident(const rf_model *model);

/* ---- text -------------------------------------------------------------------------------- */

typedef struct rf_tokenizer rf_tokenizer;

/* The text floor alone: works on files without tensors and architectures that are not run.
 * text_bytes: the longest text that will be given. Owns its tables (AMBIENT). */
RF_API rf_status rf_tokenizer_open(const rf_file *file, uint64_t text_bytes, rf_tokenizer **out,
                                   rf_error *err);
RF_API void rf_tokenizer_close(rf_tokenizer *tokenizer);
/* The tokenizer of a model, in the model's regions; borrowed, valid until the model is closed. */
RF_API rf_tokenizer *rf_model_tokenizer(rf_model *model);

#define RF_TOKENIZE_ADD_SPECIAL   1u /* BOS and EOS where the vocabulary asks for them */
#define RF_TOKENIZE_PARSE_SPECIAL 2u /* special tokens written in the text become their ids */

/* *ids is valid until the next call on this tokenizer. Errors: RF_ERR_USAGE (text longer than
 * planned). */
RF_API rf_status rf_tokenizer_encode(rf_tokenizer *tokenizer, const char *text, uint64_t text_bytes,
                                     uint32_t flags, const uint32_t **ids, uint64_t *count,
                                     rf_error *err);

typedef struct rf_chat_turn {
    const char *role; /* "system", "user", "assistant" */
    const char *text;
} rf_chat_turn;
/* The tokens of a conversation in the file's chat format, with the opening of the assistant's turn
 * when generate. first: the very first turns of a sequence (BOS where the format has one).
 * RF_ERR_UNSUPPORTED when the file has no format that we know. */
RF_API rf_status rf_tokenizer_chat(rf_tokenizer *tokenizer, const rf_chat_turn *turns,
                                   uint32_t turn_count, bool first, bool generate,
                                   const uint32_t **ids, uint64_t *count, rf_error *err);

typedef struct rf_tokenizer_info {
    uint32_t token_count;
    uint32_t bos, eos; /* UINT32_MAX: none */
    bool add_bos;
    bool has_chat_format;
} rf_tokenizer_info;
RF_API void rf_tokenizer_describe(const rf_tokenizer *tokenizer, rf_tokenizer_info *out);
/* The bytes of one token as text; returns their count, nothing is written when > capacity. */
RF_API uint64_t rf_tokenizer_piece(const rf_tokenizer *tokenizer, uint32_t id, bool special,
                                   char *out, uint64_t capacity);
RF_API bool rf_tokenizer_is_end(const rf_tokenizer *tokenizer, uint32_t id);

/* Streaming: gives out whole characters only. The caller owns the struct. */
typedef struct rf_text_stream {
    uint64_t state[8];
} rf_text_stream;
RF_API void rf_text_stream_start(rf_text_stream *stream, const rf_tokenizer *tokenizer,
                                 bool special);
RF_API uint64_t rf_text_stream_bound(const rf_tokenizer *tokenizer);
RF_API uint64_t rf_text_stream_push(rf_text_stream *stream, uint32_t id, char *out,
                                    uint64_t capacity);
RF_API uint64_t rf_text_stream_flush(rf_text_stream *stream, char *out, uint64_t capacity);

/* ---- sampling ---------------------------------------------------------------------------- */

#define RF_REPEAT_WINDOW_MAX 1024u

typedef struct rf_sampling {
    float temperature;    /* 0: greedy (the first of equals) */
    uint32_t top_k;       /* 0: all */
    float top_p;          /* 1: all */
    float min_p;          /* 0: all */
    float repeat_penalty; /* 1: none */
    uint32_t repeat_last; /* tokens that the penalty looks back on, <= RF_REPEAT_WINDOW_MAX */
    uint64_t seed;
} rf_sampling;
RF_API void rf_sampling_init(rf_sampling *sampling); /* 0.8, 40, 0.95, 0.05, 1, 64, seed 0 */
/* Starts the slot's sampler: generator from the seed, empty penalty window. RF_ERR_USAGE naming
 * the option that is out of range. */
RF_API rf_status rf_sampler_start(rf_model *model, uint32_t slot, const rf_sampling *sampling,
                                  rf_error *err);
/* Tells the penalty window about a token of the prompt. */
RF_API void rf_sampler_accept(rf_model *model, uint32_t slot, uint32_t token);
/* Picks from row logit_index of the last step, and accepts what it picked. Takes no memory; the
 * row is left as it is. RF_ERR_RUNTIME when no logit is finite. */
RF_API rf_status rf_sample(rf_model *model, uint32_t slot, uint32_t logit_index, uint32_t *token,
                           rf_error *err);

/* ---- drafts ------------------------------------------------------------------------------ */

/* Speculation without a second model: a draft is what followed when the last tokens stood in the
 * text before. The caller steps {last token, draft...} as one batch of phase GENERATION with logits
 * for each, samples the rows in order for as long as what it samples is what was drafted, and
 * truncates the slot behind that: the text is the same to the bit. Without options.draft these do
 * nothing. rf_draft_start forgets a slot's text. */
RF_API void rf_draft_start(rf_model *model, uint32_t slot);
/* Tokens that the slot's text has got, of a prompt or sampled, in their order. */
RF_API void rf_draft_note(rf_model *model, uint32_t slot, const uint32_t *tokens, uint64_t count);
/* Fills at most `most` tokens that may follow; returns how many (often 0). Once for each step. */
RF_API uint32_t rf_draft_propose(rf_model *model, uint32_t slot, uint32_t *tokens, uint32_t most);
/* How a draft did: the longer drafts are right, the longer they get, and the other way round. */
RF_API void rf_draft_judge(rf_model *model, uint32_t slot, uint32_t proposed, uint32_t accepted);

/* ---- kernels ----------------------------------------------------------------------------- */

typedef struct rf_kernel_info {
    const char *job;    /* "matmul", "vector", "attend" */
    const char *format; /* "" where the job has none */
    const char *act;    /* activation precision: "f32", "int16", "int8"; "" where it has none */
    const char *cpu;    /* instruction set */
    const char *file;
    bool chosen;
} rf_kernel_info;
/* The index-th kernel of this build, of sets that this machine lacks too; false past the end.
 * chosen: it serves here under cpu_mask. */
RF_API bool rf_kernel_list(uint32_t cpu_mask, uint32_t index, rf_kernel_info *out);
/* "avx2", "scalar", "all", ... into a mask; false when unknown. */
RF_API bool rf_cpu_mask_parse(const char *text, uint32_t *mask);
/* The sets that serve under cpu_mask on this machine, as text ("avx2+scalar"); static. */
RF_API const char *rf_cpu_mask_name(uint32_t cpu_mask);

#ifdef __cplusplus
}
#endif
#endif
