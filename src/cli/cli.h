/* cli/cli.h: what the files of the command share: arguments, output, signals, an open model.
 *
 *   main ──► options (argv, RINGFENCE_*) ──► cmd_*.c ──► the library
 *                                               │
 *                   output (stdout, stderr, errors), model, generate, perplexity, signals
 *
 * A command returns a status; what went wrong stands in the rf_error that it was given. A status
 * without a filled error (err->status still RF_OK) means that the command has said all there is
 * to say itself, and only the exit code is left: `plan` that does not fit, `check` with findings.
 */
#ifndef RF_CLI_H
#define RF_CLI_H

#include <ringfence/ringfence.h>

#include "base/base.h"

#include <stdio.h>

/* ---- arguments --------------------------------------------------------------------------- */

#define CLI_COMMAND_LIST(X)                                                                        \
    X(PLAN, plan)                                                                                  \
    X(RUN, run)                                                                                    \
    X(CHAT, chat)                                                                                  \
    X(CHECK, check)                                                                                \
    X(BENCH, bench)                                                                                \
    X(PPL, ppl)                                                                                    \
    X(SCORE, score)                                                                                \
    X(TOKENIZE, tokenize)                                                                          \
    X(INSPECT, inspect)                                                                            \
    X(CALIBRATE, calibrate)                                                                        \
    X(KERNELS, kernels)

typedef enum cli_command_index {
#define CLI_COMMAND_ENUM(upper, lower) CLI_##upper,
    CLI_COMMAND_LIST(CLI_COMMAND_ENUM)
#undef CLI_COMMAND_ENUM
        CLI_COMMAND_COUNT
} cli_command_index;

#define CLI_LIST_MAX  32u
#define CLI_DRAFT_MAX 64u /* drafted tokens of one step */

typedef struct cli_list { /* "512,1024": numbers of one option */
    uint32_t count;
    uint64_t values[CLI_LIST_MAX];
} cli_list;

/* One bit for each option that somebody may need to know was given. */
typedef enum cli_given {
    CLI_GIVEN_NONE,
    CLI_GIVEN_MODEL,
    CLI_GIVEN_CTX,
    CLI_GIVEN_CHUNK,
    CLI_GIVEN_PROMPT,
    CLI_GIVEN_FILE,
    CLI_GIVEN_PREDICT,
    CLI_GIVEN_SEED,
    CLI_GIVEN_CHUNKS,
    CLI_GIVEN_LENGTHS,
    CLI_GIVEN_COUNTS,
    CLI_GIVEN_DEPTHS,
    CLI_GIVEN_KV,
    CLI_GIVEN_KV_K,
    CLI_GIVEN_KV_V
} cli_given;

typedef struct cli_args { /* every string is borrowed from argv or the environment */
    const struct cli_command *command;
    uint32_t given;          /* bits of cli_given */
    uint32_t given_argument; /* those that came from the command line */
    const char *model;
    int64_t ctx, slots, chunk, threads;
    const char *kv_preset, *kv_k, *kv_v; /* kv_k and kv_v: with the preset's */
    const char *kv_layers, *kv_calibration;
    int64_t kv_recent, sinks;
    bool endless;
    const char *save, *restore;
    bool quick_text;
    const char *prompt, *file, *system;
    int64_t predict;
    double temperature, top_p, min_p, repeat_penalty;
    int64_t top_k, repeat_last;
    uint64_t seed;
    bool no_bos, no_special, quiet, json, help, pieces, kl_own;
    uint32_t cpu_mask;
    int64_t draft;
    uint32_t act[2]; /* bits by phase: prompt, generation; 0: the command's own */
    uint64_t mem_limit;
    const char *profile;
    const char *list, *solve, *kl, *kl_base, *kl_save, *output;
    int64_t chunks, top, repetitions;
    cli_list lengths, counts, depths;
} cli_args;

typedef struct cli_command {
    const char *name;
    const char *usage;   /* what stands behind the name */
    const char *summary; /* one line */
    const char *detail;  /* a paragraph or two for `help NAME` */
    rf_status (*run)(const cli_args *args, rf_error *err);
} cli_command;

extern const cli_command cli_commands[CLI_COMMAND_COUNT];

/* The command of this name, or NULL. */
const cli_command *cli_command_find(const char *name);
/* Defaults, then the environment, then argv[0 .. argc - 1] (what follows the command's name).
 * Errors: RF_ERR_USAGE naming the option or the variable. */
rf_status cli_options_parse(cli_args *args, const cli_command *command, int argc, char **argv,
                            rf_error *err);
static inline bool cli_has(const cli_args *args, cli_given what)
{
    return (args->given >> what & 1u) != 0;
}
/* The option that sets a field which the library calls by this name: "kv_k" is "-ctk"; NULL: none.
 * Valid until the next call. */
const char *cli_option_label(const char *field);
/* Writes the overview, or one command's help, to stdout. */
void cli_help(const cli_command *command);
/* Whether RINGFENCE_JSON asks for JSON, before the arguments are known to be good. */
bool cli_json_wanted(int argc, char **argv);

/* ---- output ------------------------------------------------------------------------------ */

void cli_output_init(bool quiet, bool json);
bool cli_quiet(void);
bool cli_json(void);

/* stdout, through a buffer of our own. The first failed write is remembered, later ones do
 * nothing; main reports it and exits with 6. */
void out_bytes(const char *bytes, size_t count);
void out_print(const char *format, ...) RF_PRINTF(1, 2);
/* A line of a table: without the blanks at its end, with a newline. */
void out_row(const char *format, ...) RF_PRINTF(1, 2);
void out_flush(void);
bool out_failed(void);
rf_status out_status(rf_error *err); /* RF_OK, or RF_ERR_IO that names stdout */
bool out_is_terminal(void);

/* JSON to stdout: one writer over one large buffer. json_step is called between items, so that
 * documents of any length pass through it; json_end adds the newline and flushes. */
rf_writer *json_begin(void);
void json_step(rf_writer *writer);
void json_end(rf_writer *writer);
/* UINT64_MAX stands for "unknown" and becomes null. */
void json_u64_or_null(rf_writer *writer, const char *key, uint64_t value);

/* One line on stderr, silenced by -q: "ringfence: ...". Where stdout and stderr end up in one place
 * and the text on stdout stopped in the middle of a line, this and cli_report begin a new one. */
void cli_note(const char *format, ...) RF_PRINTF(1, 2);
/* The error line, and with --json the error object. */
void cli_report(const rf_error *err);

/* "1.13 MiB" in a small buffer that lives in the caller's expression. */
typedef struct cli_size_text {
    char text[24];
} cli_size_text;
cli_size_text cli_size(uint64_t bytes);

/* Progress on stderr: only on a terminal, only after a second. */
typedef struct cli_progress {
    const char *label;
    uint64_t start_ns;
    uint64_t shown_ns; /* 0: never */
} cli_progress;
cli_progress cli_progress_start(const char *label);
/* An rf_progress_fn: context is a cli_progress. False after an interrupt. */
bool cli_progress_step(void *context, uint64_t done, uint64_t total);
void cli_progress_end(cli_progress *progress);

/* ---- signals ----------------------------------------------------------------------------- */

void signals_install(void);
bool signals_interrupted(void);
rf_status signals_status(rf_error *err);   /* RF_OK or RF_ERR_INTERRUPTED */
void signals_watch_model(rf_model *model); /* NULL: none */
/* From here on a bus error inside [data, data + bytes) is the fault of this file; with data NULL
 * any bus error is (the header is being read). name NULL: no file. */
void signals_watch_file(const char *name, const void *data, uint64_t bytes);

/* ---- allocations ------------------------------------------------------------------------- */

void alloc_count_start(void); /* installs hooks where they are needed */
uint64_t alloc_count(void);   /* calls of the malloc family so far, in any thread */
bool alloc_count_works(void); /* false where the build does not let us count */
/* Grows when the process takes memory by mmap or brk; where calls cannot be counted (and the
 * process may be an emulator's) the bytes that malloc has given out instead. */
uint64_t alloc_data_bytes(void);
bool cli_sanitized(void); /* a build with a sanitizer's own memory */

/* ---- files and models -------------------------------------------------------------------- */

typedef struct cli_bytes { /* owned: cli_bytes_free */
    char *data;
    size_t size;
} cli_bytes;
/* The whole file, "-" is stdin. Errors: RF_ERR_IO, RF_ERR_NO_FIT, RF_ERR_INTERRUPTED. */
rf_status cli_read_file(const char *path, cli_bytes *out, rf_error *err);
void cli_bytes_free(cli_bytes *bytes);
/* The text of -p or -f; *given false when there is neither. Both: RF_ERR_USAGE. */
rf_status cli_read_text(const cli_args *args, cli_bytes *out, bool *given, rf_error *err);
/* The same, and RF_ERR_USAGE when neither is given. */
rf_status cli_need_text(const cli_args *args, cli_bytes *out, rf_error *err);
/* Tokenises a text by the text floor alone; *ids (owned: free) gets *count ids. */
rf_status cli_tokenize(const cli_args *args, const rf_file *file, const cli_bytes *text,
                       uint32_t **ids, uint64_t *count, rf_error *err);
uint32_t cli_tokenize_flags(const cli_args *args);

typedef struct cli_model { /* what is open so far; closed in reverse order by cli_model_close */
    rf_file *file;
    rf_file_info file_info;
    rf_model_plan *plan;
    rf_plan_info info;
    rf_model *model;
    rf_tokenizer *tokenizer;
    rf_tokenizer_info vocabulary;
    bool notes_said;
    bool only_plan; /* nothing is opened: a calibration need not exist */
    const cli_args *args;
    char calibration[4096]; /* path */
} cli_model;

/* Where the model's calibration is kept, by the weights' fingerprint. */
rf_status cli_calibration_path(const cli_model *model, char *path, size_t capacity, rf_error *err);
/* Makes one and keeps it at path. */
rf_status cli_calibration_make(const cli_args *args, const cli_model *model, const char *path,
                               rf_error *err);
/* Sets options->kv_calibration as --kv-calibration says: a named file is used by any format;
 * without one, when a format of keys needs it, and it is made where there is none, unless the
 * model is only planned, once the options are known to give a plan. */
rf_status cli_calibration_ready(const cli_args *args, cli_model *model, rf_options *options,
                                bool only_plan, rf_error *err);
rf_status cli_file_open(const cli_args *args, cli_model *model, rf_error *err);
/* The longest text is CLI_TEXT_BYTES; a command with a longer one says so, so that `plan` without
 * a text has the figures of a run with an ordinary one. */
#define CLI_TEXT_BYTES 4096u
void cli_options_for(const cli_args *args, rf_options *options);
rf_status cli_plan_open(cli_model *model, const rf_options *options, rf_error *err);
void cli_plan_notes(const cli_model *model); /* on stderr */
/* "ctx 128, 1 slot, chunk 128, 1 thread" */
typedef struct cli_options_text {
    char text[128];
} cli_options_text;
cli_options_text cli_plan_options(const rf_plan_info *info);
/* The same as the object "options". */
void json_plan_options(rf_writer *writer, const rf_plan_info *info);
/* Opens the model of a plan that is there, with progress; prints the plan's notes unless
 * notes_said. */
rf_status cli_model_open(cli_model *model, rf_error *err);
/* RF_ERR_BAD_MODEL for a file without a vocabulary. */
rf_status cli_need_tokenizer(const cli_model *model, rf_error *err);
void cli_model_close(cli_model *model);
/* File, plan and model in one. */
rf_status cli_open_all(const cli_args *args, uint64_t text_bytes, cli_model *model, rf_error *err);
rf_status cli_prefill(cli_model *model, const uint32_t *tokens, uint64_t count, rf_error *err);

/* A team of our own, for arithmetic of the command itself (measured bandwidth, log-softmax). */
typedef struct cli_team {
    rf_team *team;
    void *memory;
    void *stacks[RF_WORKERS_MAX];
    uint32_t count;
} cli_team;
rf_status cli_team_open(cli_team *team, uint32_t threads, rf_error *err);
void cli_team_close(cli_team *team);

/* ---- generating -------------------------------------------------------------------------- */

typedef enum cli_stop { CLI_STOP_END, CLI_STOP_LIMIT, CLI_STOP_RING } cli_stop;

typedef struct cli_ids { /* token ids, growing; owned: free(ids) */
    uint32_t *ids;
    uint64_t count, capacity;
} cli_ids;
rf_status cli_ids_add(cli_ids *list, const uint32_t *ids, uint64_t count, rf_error *err);

typedef struct cli_generation {
    int64_t limit;    /* most tokens; -1: until the end or the ring is full */
    bool endless;     /* neither an end token nor a full ring ends it */
    bool commit_last; /* chat: the last token belongs to the sequence as well */
    bool collect;     /* keep the text in `text` instead of writing it */
    bool goes_on;     /* bytes of half a character stay in the stream, for later */
    cli_ids *stepped; /* gets each token that became part of the sequence; or NULL */
    cli_bytes text;   /* owned */
    cli_stop stop;
    uint64_t tokens;
    uint64_t elapsed_ns;
    uint32_t last;              /* the last token that was picked, end tokens included */
    bool pending;               /* it has not become part of the sequence */
    uint64_t drafted, accepted; /* tokens that were proposed, and those that were right */
} cli_generation;

rf_sampling cli_sampling(const cli_args *args);
/* Starts slot 0's sampler; *seed gets its seed, which is printed when it was drawn here. */
rf_status cli_start_sampler(const cli_args *args, cli_model *model, uint64_t *seed, rf_error *err);
/* Goes on from the logits of the last step. */
rf_status cli_generate(cli_model *model, rf_text_stream *stream, cli_generation *generation,
                       rf_error *err);
const char *cli_stop_name(cli_stop stop);
/* "planned 1.9 MiB = taken 1.9 MiB (...)" on stderr. */
void cli_memory_summary(const cli_model *model);
double cli_rate(uint64_t count, uint64_t elapsed_ns);
/* "prompt: 5 tokens, 0.1 ms; generation: 512 tokens, 84.1 t/s" on stderr: a rate only where there
 * is enough of it to mean something. */
void cli_speed_summary(uint64_t prompt_count, uint64_t prompt_ns, const cli_generation *generation);

/* ---- perplexity -------------------------------------------------------------------------- */

/* A logits file as llama-perplexity --kl-divergence-base writes it. */
typedef struct kld_file {
    FILE *stream;
    const char *path;
    uint32_t ctx;
    uint32_t vocab_count;
    uint32_t chunks;
    uint32_t *tokens;   /* owned; [chunks * ctx] */
    uint64_t row_codes; /* uint16 values of one position */
} kld_file;

rf_status kld_open(kld_file *kld, const char *path, rf_error *err);
rf_status kld_create(kld_file *kld, const char *path, const uint32_t *tokens, rf_error *err);
rf_status kld_read(kld_file *kld, uint16_t *rows, uint64_t count, rf_error *err);
rf_status kld_write(kld_file *kld, const uint16_t *rows, uint64_t count, rf_error *err);
/* Closes; for a file being written this is where the last error shows. */
rf_status kld_close(kld_file *kld, rf_error *err);
/* Encodes logits[vocab_count] into one row. */
void kld_encode(const float *logits, uint32_t vocab_count, uint16_t *row);

typedef struct ppl_position { /* what one scored position gave */
    double nll;
    double base_nll; /* NaN: the base clipped this token, or there is no base */
    double kl;
    bool same_top;
} ppl_position;

typedef struct ppl_job {
    const uint32_t *tokens; /* [chunks * ctx] */
    uint32_t ctx, chunks;   /* length of a chunk: the context, or all of an endless text */
    uint32_t first;         /* the first position of a chunk that the figures are of */
    uint32_t early;         /* the first that is scored at all: <= first, for the depths */
    uint32_t ring;          /* of an endless text: positions that the ring holds; else 0 */
    kld_file *base;         /* or NULL */
    kld_file *save;         /* or NULL */
    rf_model *reference;    /* the same file under a wider KV, or NULL */
} ppl_job;

typedef struct ppl_figures {
    uint64_t scored;
    double perplexity, stderror;
    double kl_mean, kl_stderror, top1, ppl_ratio, ppl_ratio_stderror;
} ppl_figures;

typedef struct ppl_depth { /* positions [from, to) of every chunk */
    uint32_t from, to;
    ppl_figures figures;
} ppl_depth;

#define PPL_DEPTHS_MAX    40u
#define PPL_DEPTHS_BEYOND 512u /* shorter chunks are not looked at by depth */

typedef struct ppl_result {
    uint32_t chunks;
    bool has_kl;
    ppl_figures figures;
    double kl_p99, kl_p999, kl_max;
    uint32_t depth_count;
    ppl_depth depths[PPL_DEPTHS_MAX];
} ppl_result;

/* What is scored of chunks of the context's length: the second half, and with depths more of it. */
void ppl_job_chunks(ppl_job *job, uint32_t ctx, uint32_t chunks, bool depths);
/* Rows of logits that one step may need, for options.logit_rows. */
uint32_t ppl_logit_rows(const ppl_job *job, uint32_t chunk);
rf_status ppl_run(cli_model *model, const ppl_job *job, ppl_result *out, rf_error *err);

/* ---- text -------------------------------------------------------------------------------- */

/* `*` and `?` are wild, everything else (brackets too) is itself. */
bool cli_glob(const char *pattern, const char *text);

#define CLI_COMMAND_RUN(upper, lower) rf_status cmd_##lower(const cli_args *args, rf_error *err);
CLI_COMMAND_LIST(CLI_COMMAND_RUN)
#undef CLI_COMMAND_RUN

#endif
