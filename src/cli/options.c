/* cli/options.c: the one table of options, and what follows from it: parsing, environment, help.
 *
 * A row says everything about an option: its names, its argument, the commands that know it, how
 * its value is read, where it goes and what it is for. RINGFENCE_<LONG NAME> is read for each
 * row; the command line wins. Nothing here knows what a value does.
 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef enum option_kind {
    KIND_FLAG,  /* bool */
    KIND_INT,   /* int64_t in [low, high] */
    KIND_U64,   /* any 64-bit number */
    KIND_REAL,  /* double in [low, high] */
    KIND_TEXT,  /* const char * */
    KIND_SIZE,  /* bytes, with K, M, G (binary), MiB, ... */
    KIND_LIST,  /* cli_list of numbers in [low, high] */
    KIND_CPU,   /* mask of instruction sets */
    KIND_ACT,   /* bits by phase: 8, 16 or P/G */
    KIND_CHOICE /* one of the words in `words` */
} option_kind;

typedef struct option_row {
    const char *name;     /* without the two dashes */
    const char *alias;    /* the name that llama.cpp's users know, or NULL */
    const char *flag;     /* with its one dash, or NULL */
    const char *argument; /* NULL for flags */
    uint32_t commands;    /* bits of cli_command_index */
    cli_given given;
    option_kind kind;
    size_t offset; /* into cli_args */
    double low, high;
    const char *words; /* KIND_CHOICE: parted by blanks */
    const char *help;
} option_row;

#define BIT(name) (1u << CLI_##name)
#define EVERY     ((1u << CLI_COMMAND_COUNT) - 1u)
#define MODELS    (EVERY & ~BIT(KERNELS))
#define PLANNED   (MODELS & ~(BIT(TOKENIZE) | BIT(INSPECT)))
#define TEXTS     (BIT(RUN) | BIT(CHAT) | BIT(CHECK) | BIT(PPL) | BIT(SCORE) | BIT(TOKENIZE))
#define ENDLESS   (BIT(PLAN) | BIT(RUN) | BIT(CHECK) | BIT(PPL))
#define SAMPLED   (BIT(RUN) | BIT(CHAT))
#define AT(field) offsetof(cli_args, field)
#define COUNT_MAX 4294967295.0

static const option_row option_table[] = {
    {"model", NULL, "-m", "FILE", MODELS, CLI_GIVEN_MODEL, KIND_TEXT, AT(model), 0, 0, NULL,
     "the model, a GGUF file (or the first bare argument; without: the embedded story model)"},
    {"prompt", NULL, "-p", "TEXT", TEXTS, CLI_GIVEN_PROMPT, KIND_TEXT, AT(prompt), 0, 0, NULL,
     "the text"},
    {"file", NULL, "-f", "FILE", TEXTS & ~BIT(CHAT), CLI_GIVEN_FILE, KIND_TEXT, AT(file), 0, 0,
     NULL, "the text is in a file, taken to its last byte (- is stdin)"},
    {"predict", "n-predict", "-n", "N", SAMPLED | BIT(CHECK), CLI_GIVEN_PREDICT, KIND_INT,
     AT(predict), -1, COUNT_MAX, NULL, "most tokens to generate (-1: until the text ends)"},
    {"sys", "system-prompt", "-sys", "TEXT", BIT(CHAT), CLI_GIVEN_NONE, KIND_TEXT, AT(system), 0, 0,
     NULL, "the system message"},
    {"ctx", "ctx-size", "-c", "N", PLANNED, CLI_GIVEN_CTX, KIND_INT, AT(ctx), 0, 9.2e18, NULL,
     "context of each slot in tokens (0: what the model was trained for)"},
    {"slots", "parallel", "-np", "N", BIT(PLAN) | BIT(CHECK), CLI_GIVEN_NONE, KIND_INT, AT(slots),
     1, 65536, NULL, "sequences to plan memory for"},
    {"chunk", "batch-size", "-b", "N", PLANNED, CLI_GIVEN_CHUNK, KIND_INT, AT(chunk), 1, COUNT_MAX,
     NULL, "most tokens of one step"},
    {"threads", NULL, "-t", "N", PLANNED, CLI_GIVEN_NONE, KIND_INT, AT(threads), 0, RF_WORKERS_MAX,
     NULL, "threads (0: as many as the process may use)"},
    {"kv", NULL, NULL, "PRESET", PLANNED, CLI_GIVEN_KV, KIND_CHOICE, AT(kv_preset), 0, 0,
     "safe-lowbit balanced experimental-max",
     "safe-lowbit (-ctk r8 -ctv r4), balanced (r4, r4), experimental-max (r3, r3); -ctk and -ctv "
     "win. Of the size of safe-lowbit, -ctk r6 -ctv r6 loses less"},
    {"kv-k", "cache-type-k", "-ctk", "FORMAT", PLANNED, CLI_GIVEN_KV_K, KIND_TEXT, AT(kv_k), 0, 0,
     NULL,
     "format of the keys: f32 f16 bf16 r8 r6 r5 r4 r3 q8_0 q4_0 (for the record: turbo4 turbo3 "
     "turbo2 turbo4q turbo3q)"},
    {"kv-v", "cache-type-v", "-ctv", "FORMAT", PLANNED, CLI_GIVEN_KV_V, KIND_TEXT, AT(kv_v), 0, 0,
     NULL, "format of the values, likewise"},
    {"kv-layers", NULL, NULL, "RANGE:K[/V],...", PLANNED & ~BIT(CALIBRATE), CLI_GIVEN_NONE,
     KIND_TEXT, AT(kv_layers), 0, 0, NULL,
     "formats of single layers: 0:r8,4-7:r5/r4 (later ones win)"},
    {"kv-recent", NULL, NULL, "N", PLANNED, CLI_GIVEN_NONE, KIND_INT, AT(kv_recent), 0, 4096, NULL,
     "blocks of 32 positions that r6 .. r3 also keep as r8, before the one that is written"},
    {"kv-calibration", NULL, NULL, "FILE", PLANNED, CLI_GIVEN_NONE, KIND_TEXT, AT(kv_calibration),
     0, 0, NULL, "auto (made once, kept in the cache folder), off, or a file"},
    {"sinks", NULL, NULL, "N", ENDLESS, CLI_GIVEN_NONE, KIND_INT, AT(sinks), 0, COUNT_MAX, NULL,
     "first positions that stay when the ring wraps"},
    {"endless", NULL, NULL, NULL, ENDLESS, CLI_GIVEN_NONE, KIND_FLAG, AT(endless), 0, 0, NULL,
     "the ring wraps: old positions make room, and end tokens end nothing"},
    {"quick", NULL, NULL, NULL, BIT(CALIBRATE), CLI_GIVEN_NONE, KIND_FLAG, AT(quick_text), 0, 0,
     NULL, "calibrate with 512 tokens only"},
    {"temp", "temperature", NULL, "X", SAMPLED, CLI_GIVEN_NONE, KIND_REAL, AT(temperature), 0, 1000,
     NULL, "temperature (0: always the likeliest token)"},
    {"top-k", NULL, NULL, "N", SAMPLED, CLI_GIVEN_NONE, KIND_INT, AT(top_k), 0, COUNT_MAX, NULL,
     "keep the N likeliest tokens (0: all)"},
    {"top-p", NULL, NULL, "X", SAMPLED, CLI_GIVEN_NONE, KIND_REAL, AT(top_p), 0, 1, NULL,
     "keep the likeliest tokens that together reach X (1: all)"},
    {"min-p", NULL, NULL, "X", SAMPLED, CLI_GIVEN_NONE, KIND_REAL, AT(min_p), 0, 1, NULL,
     "drop tokens below X times the likeliest (0: none)"},
    {"repeat-penalty", NULL, NULL, "X", SAMPLED, CLI_GIVEN_NONE, KIND_REAL, AT(repeat_penalty),
     0.01, 100, NULL, "make what was just said less likely (1: off)"},
    {"repeat-last", "repeat-last-n", NULL, "N", SAMPLED, CLI_GIVEN_NONE, KIND_INT, AT(repeat_last),
     0, RF_REPEAT_WINDOW_MAX, NULL, "tokens that the penalty looks back on"},
    {"seed", NULL, "-s", "N", SAMPLED, CLI_GIVEN_SEED, KIND_U64, AT(seed), 0, 0, NULL,
     "seed of the sampler (without: random, and printed)"},
    {"no-bos", NULL, NULL, NULL, TEXTS & ~BIT(CHAT), CLI_GIVEN_NONE, KIND_FLAG, AT(no_bos), 0, 0,
     NULL, "add no token before the text"},
    {"no-special", NULL, NULL, NULL, TEXTS & ~BIT(CHAT), CLI_GIVEN_NONE, KIND_FLAG, AT(no_special),
     0, 0, NULL, "special tokens written in the text stay text"},
    {"save", NULL, NULL, "FILE", BIT(RUN), CLI_GIVEN_NONE, KIND_TEXT, AT(save), 0, 0, NULL,
     "keep the sequence, the sampler and the text in this file at the end, at Ctrl-C too"},
    {"restore", NULL, NULL, "FILE", BIT(RUN), CLI_GIVEN_NONE, KIND_TEXT, AT(restore), 0, 0, NULL,
     "go on from a file of --save (under the same formats); -p adds to it"},
    {"draft", "draft-max", NULL, "N", BIT(PLAN) | SAMPLED, CLI_GIVEN_NONE, KIND_INT, AT(draft), 0,
     CLI_DRAFT_MAX, NULL,
     "propose up to N tokens from what followed before, verify them in one step: the same text, "
     "sooner where it repeats itself (0: none)"},
    {"list", NULL, NULL, "GLOB", BIT(PLAN) | BIT(CHECK), CLI_GIVEN_NONE, KIND_TEXT, AT(list), 0, 0,
     NULL, "list the regions whose id matches (* and ? are wild)"},
    {"solve", NULL, NULL, "ctx", BIT(PLAN), CLI_GIVEN_NONE, KIND_CHOICE, AT(solve), 0, 0, "ctx",
     "find the largest context that fits"},
    {"chunks", NULL, NULL, "N", BIT(PPL), CLI_GIVEN_CHUNKS, KIND_INT, AT(chunks), 1, COUNT_MAX,
     NULL, "evaluate only the first N chunks"},
    {"kl", NULL, NULL, NULL, BIT(PPL), CLI_GIVEN_NONE, KIND_FLAG, AT(kl_own), 0, 0, NULL,
     "compare with the same model under f32 keys and values"},
    {"kl-base", NULL, NULL, "FILE", BIT(PPL), CLI_GIVEN_NONE, KIND_TEXT, AT(kl_base), 0, 0, NULL,
     "compare with the logits of this file (llama-perplexity's format)"},
    {"kl-save", NULL, NULL, "FILE", BIT(PPL), CLI_GIVEN_NONE, KIND_TEXT, AT(kl_save), 0, 0, NULL,
     "write the logits to this file (llama-perplexity's format)"},
    {"top", NULL, NULL, "K", BIT(SCORE), CLI_GIVEN_NONE, KIND_INT, AT(top), 0, 1000, NULL,
     "also name the K likeliest tokens at each position"},
    {"pieces", NULL, NULL, NULL, BIT(TOKENIZE), CLI_GIVEN_NONE, KIND_FLAG, AT(pieces), 0, 0, NULL,
     "show each token with its text, one a line"},
    {"prompt-lengths", NULL, "-p", "N,...", BIT(BENCH), CLI_GIVEN_LENGTHS, KIND_LIST, AT(lengths),
     0, COUNT_MAX, NULL, "prompt lengths to measure (0: none)"},
    {"token-counts", NULL, "-n", "N,...", BIT(BENCH), CLI_GIVEN_COUNTS, KIND_LIST, AT(counts), 0,
     COUNT_MAX, NULL, "numbers of generated tokens to measure (0: none)"},
    {"depths", NULL, "-d", "N,...", BIT(BENCH), CLI_GIVEN_DEPTHS, KIND_LIST, AT(depths), 0,
     COUNT_MAX, NULL, "tokens that are in the context already"},
    {"repetitions", NULL, "-r", "N", BIT(BENCH), CLI_GIVEN_NONE, KIND_INT, AT(repetitions), 1,
     10000, NULL, "runs of each test; median, least and most are shown"},
    {"output", NULL, "-o", "FORM", BIT(BENCH), CLI_GIVEN_NONE, KIND_CHOICE, AT(output), 0, 0,
     "md csv json", "md, csv or json"},
    {"kl", NULL, NULL, "FILE", BIT(BENCH), CLI_GIVEN_NONE, KIND_TEXT, AT(kl), 0, 0, NULL,
     "also the divergence from this logits file, made by `ppl --kl-save` on the F32 copy"},
    {"act", NULL, NULL, "BITS[/BITS]", PLANNED & ~BIT(CALIBRATE), CLI_GIVEN_NONE, KIND_ACT, AT(act),
     0, 0, NULL,
     "bits of activations before quantised weights, for prompts / for generation: 8 or 16, "
     "the exact mode (8/16 with AVX-512, where 16 is free in decode, else 8; ppl and score: 16)"},
    {"cpu", NULL, NULL, "SET", PLANNED | BIT(KERNELS), CLI_GIVEN_NONE, KIND_CPU, AT(cpu_mask), 0, 0,
     NULL,
     "instruction sets that may be used: all, or names by commas: scalar, avx2, avx512, "
     "neon"},
    {"mem-limit", NULL, NULL, "SIZE", PLANNED, CLI_GIVEN_NONE, KIND_SIZE, AT(mem_limit), 0, 0, NULL,
     "the budget (2GiB, 512M, bytes) instead of what the machine has"},
    {"profile", NULL, NULL, "NAME", PLANNED, CLI_GIVEN_NONE, KIND_TEXT, AT(profile), 0, 0, NULL,
     "reserve and policy: mobile-2gb, edge, desktop, server"},
    {"quiet", NULL, "-q", NULL, EVERY, CLI_GIVEN_NONE, KIND_FLAG, AT(quiet), 0, 0, NULL,
     "nothing on stderr but errors"},
    {"json", NULL, NULL, NULL, EVERY, CLI_GIVEN_NONE, KIND_FLAG, AT(json), 0, 0, NULL,
     "JSON on stdout, sizes in bytes, times in seconds"},
    {"help", NULL, "-h", NULL, EVERY, CLI_GIVEN_NONE, KIND_FLAG, AT(help), 0, 0, NULL, "this text"},
};

static void set_defaults(cli_args *args, const cli_command *command)
{
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    memset(args, 0, sizeof *args);
    args->command = command;
    args->slots = 1;
    args->kv_recent = 2;
    args->predict = -1;
    args->temperature = (double)sampling.temperature;
    args->top_k = sampling.top_k;
    args->top_p = (double)sampling.top_p;
    args->min_p = (double)sampling.min_p;
    args->repeat_penalty = (double)sampling.repeat_penalty;
    args->repeat_last = sampling.repeat_last;
    args->cpu_mask = 0xFFFF;
    args->repetitions = 5;
}

/* ---- values ------------------------------------------------------------------------------ */

static bool parse_u64(const char *text, char end, uint64_t *out, const char **rest)
{
    if (*text < '0' || *text > '9')
        return false;
    char *stop;
    errno = 0;
    unsigned long long value = strtoull(text, &stop, 10);
    if (errno || (*stop != '\0' && *stop != end))
        return false;
    *out = value;
    *rest = stop;
    return true;
}

static rf_status out_of_range(const option_row *row, const char *where, const char *text,
                              rf_error *err)
{
    rf_fail(err, RF_ERR_USAGE, where, "number out of range");
    rf_fail_expected(err, "%.15g to %.15g", row->low, row->high);
    return rf_fail_got(err, "%s", text);
}

static rf_status no_number(const char *where, const char *kind, const char *text, rf_error *err)
{
    rf_fail(err, RF_ERR_USAGE, where, "the value cannot be read");
    rf_fail_expected(err, "%s", kind);
    return rf_fail_got(err, "\"%s\"", text);
}

static rf_status parse_int(const option_row *row, const char *where, const char *text, int64_t *out,
                           rf_error *err)
{
    const char *digits = *text == '-' ? text + 1 : text;
    uint64_t value;
    const char *rest;
    if (*digits < '0' || *digits > '9' || strspn(digits, "0123456789") != strlen(digits))
        return no_number(where, "a whole number", text, err);
    if (!parse_u64(digits, '\0', &value, &rest) || value > INT64_MAX)
        return out_of_range(row, where, text, err);
    int64_t number = *text == '-' ? -(int64_t)value : (int64_t)value;
    if ((double)number < row->low || (double)number > row->high)
        return out_of_range(row, where, text, err);
    *out = number;
    return RF_OK;
}

static rf_status parse_real(const option_row *row, const char *where, const char *text, double *out,
                            rf_error *err)
{
    if (!*text || strspn(text, "0123456789+-.eE") != strlen(text))
        return no_number(where, "a number", text, err);
    char *end;
    double value = strtod(text, &end);
    if (end == text || *end)
        return no_number(where, "a number", text, err);
    if (!isfinite(value) || value < row->low || value > row->high)
        return out_of_range(row, where, text, err);
    *out = value;
    return RF_OK;
}

static rf_status parse_size(const char *where, const char *text, uint64_t *out, rf_error *err)
{
    static const char *const units[] = {"", "K", "M", "G", "T"};
    char *end;
    double value = *text >= '0' && *text <= '9' ? strtod(text, &end) : -1.0;
    if (value < 0.0 || strpbrk(text, "xXpPnN"))
        return no_number(where, "a size such as 512M or 2GiB", text, err);
    char unit = *end >= 'a' ? (char)(*end - 'a' + 'A') : *end;
    for (uint32_t i = 0; i < RF_ARRAY_COUNT(units); i++) {
        if (unit != units[i][0])
            continue;
        const char *rest = unit ? end + 1 : end;
        if (*rest && strcmp(rest, "iB") != 0 && strcmp(rest, "B") != 0)
            break;
        value *= (double)(UINT64_C(1) << 10 * i);
        if (!(value >= 1.0 && value < 9.0e18)) {
            rf_fail(err, RF_ERR_USAGE, where, "size out of range");
            rf_fail_expected(err, "1 byte to 8 EiB");
            return rf_fail_got(err, "%s", text);
        }
        *out = (uint64_t)value;
        return RF_OK;
    }
    return no_number(where, "a size such as 512M or 2GiB", text, err);
}

static rf_status parse_list(const option_row *row, const char *where, const char *text,
                            cli_list *out, rf_error *err)
{
    cli_list list = {0, {0}};
    for (;;) {
        uint64_t value;
        if (!parse_u64(text, ',', &value, &text))
            return no_number(where, "numbers parted by commas", text, err);
        if ((double)value > row->high)
            return out_of_range(row, where, text, err);
        if (list.count == CLI_LIST_MAX)
            return rf_fail(err, RF_ERR_USAGE, where, "more than %u numbers", CLI_LIST_MAX);
        list.values[list.count++] = value;
        if (!*text)
            break;
        text++;
    }
    *out = list;
    return RF_OK;
}

static bool is_word_of(const char *words, const char *text)
{
    size_t length = strlen(text);
    while (length && *words) {
        size_t word = strcspn(words, " ");
        if (word == length && memcmp(words, text, length) == 0)
            return true;
        words += word + (words[word] == ' ');
    }
    return false;
}

static rf_status parse_flag(const char *where, const char *text, bool *out, rf_error *err)
{
    if (is_word_of("1 true yes on", text)) {
        *out = true;
    } else if (!*text || is_word_of("0 false no off", text)) {
        *out = false;
    } else {
        return no_number(where, "1 or 0", text, err);
    }
    return RF_OK;
}

static bool parse_act(const char *text, uint32_t act[2])
{
    static const char *const words[] = {"8", "16"};
    uint32_t found[2];
    for (int phase = 0; phase < 2; phase++) {
        size_t length = strcspn(text, "/");
        uint32_t i = 0;
        while (i < 2 && (strlen(words[i]) != length || strncmp(words[i], text, length) != 0))
            i++;
        if (i == 2)
            return false;
        found[phase] = i ? 16 : 8;
        if (phase == 0 && text[length] == '/')
            text += length + 1; /* else one word is for both */
        else if (phase == 1 && text[length] != '\0')
            return false;
    }
    memcpy(act, found, sizeof found);
    return true;
}

/* Reads one value into its field; where names the option or the variable. */
static rf_status set_value(cli_args *args, const option_row *row, const char *where,
                           const char *text, rf_error *err)
{
    void *field = (char *)args + row->offset;
    const char *rest;
    rf_status status = RF_OK;
    switch (row->kind) {
    case KIND_FLAG:
        status = parse_flag(where, text, field, err);
        break;
    case KIND_INT:
        status = parse_int(row, where, text, field, err);
        break;
    case KIND_U64:
        if (!parse_u64(text, '\0', field, &rest))
            status = no_number(where, "a number from 0 to 2^64 - 1", text, err);
        break;
    case KIND_REAL:
        status = parse_real(row, where, text, field, err);
        break;
    case KIND_TEXT:
        memcpy(field, &text, sizeof text);
        break;
    case KIND_SIZE:
        status = parse_size(where, text, field, err);
        break;
    case KIND_LIST:
        status = parse_list(row, where, text, field, err);
        break;
    case KIND_CPU:
        if (!rf_cpu_mask_parse(text, field))
            status = no_number(where, "all, scalar, or instruction sets of this build", text, err);
        break;
    case KIND_ACT:
        if (!parse_act(text, field))
            status = no_number(where, "8, 16, or one for prompts and one for generation: 8/16",
                               text, err);
        break;
    case KIND_CHOICE:
        if (!is_word_of(row->words, text)) {
            status = no_number(where, row->words, text, err);
        } else {
            memcpy(field, &text, sizeof text);
        }
        break;
    }
    if (!status && row->given)
        args->given |= 1u << row->given;
    return status;
}

/* ---- environment and command line -------------------------------------------------------- */

static void environment_name(const option_row *row, char *out, size_t capacity)
{
    size_t at = (size_t)snprintf(out, capacity, "RINGFENCE_%s", row->name);
    for (size_t i = 0; i < at && i < capacity; i++) {
        if (out[i] >= 'a' && out[i] <= 'z')
            out[i] = (char)(out[i] - 'a' + 'A');
        if (out[i] == '-')
            out[i] = '_';
    }
}

/* Help is asked for, not set: a variable would turn every command into it. */
static bool has_variable(const option_row *row)
{
    return row->offset != AT(help);
}

static rf_status read_environment(cli_args *args, uint32_t command_bit, rf_error *err)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(option_table); i++) {
        const option_row *row = &option_table[i];
        char name[64];
        environment_name(row, name, sizeof name);
        bool known = (row->commands & command_bit) != 0 && has_variable(row);
        const char *text = known ? getenv(name) : NULL;
        if (!text || (!*text && row->kind != KIND_TEXT))
            continue;
        rf_status status = set_value(args, row, name, text, err);
        if (status)
            return status;
    }
    return RF_OK;
}

/* The row that `text` names (its first `length` characters), for this command; *elsewhere gets a
 * row of another command that has the name. */
static const option_row *find_row(const char *text, size_t length, uint32_t command_bit,
                                  const option_row **elsewhere)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(option_table); i++) {
        const option_row *row = &option_table[i];
        const char *names[3] = {row->name, row->alias, row->flag};
        for (int n = 0; n < 3; n++) {
            if (!names[n])
                continue;
            size_t dashes = n < 2 ? 2 : 0;
            if (dashes && (length < 2 || memcmp(text, "--", 2) != 0))
                continue;
            if (strlen(names[n]) + dashes != length ||
                memcmp(text + dashes, names[n], length - dashes) != 0)
                continue;
            if (row->commands & command_bit)
                return row;
            if (elsewhere && !*elsewhere)
                *elsewhere = row;
        }
    }
    return NULL;
}

static rf_status unknown_option(const char *text, const option_row *elsewhere,
                                const cli_command *command, rf_error *err)
{
    if (!elsewhere)
        return rf_fail(err, RF_ERR_USAGE, text, "unknown option; try: ringfence help %s",
                       command->name);
    char names[160] = "";
    for (uint32_t i = 0; i < CLI_COMMAND_COUNT; i++) {
        size_t at = strlen(names);
        if (elsewhere->commands & (1u << i))
            snprintf(names + at, sizeof names - at, "%s%s", at ? ", " : "", cli_commands[i].name);
    }
    return rf_fail(err, RF_ERR_USAGE, text, "not an option of %s, only of %s", command->name,
                   names);
}

/* Takes the option at argv[*at]; *at ends on the last argument that was used. */
static rf_status take_option(cli_args *args, uint32_t command_bit, int argc, char **argv, int *at,
                             rf_error *err)
{
    const char *text = argv[*at];
    const char *equals = text[1] == '-' ? strchr(text, '=') : NULL;
    size_t length = equals ? (size_t)(equals - text) : strlen(text);
    const option_row *elsewhere = NULL;
    const option_row *row = find_row(text, length, command_bit, &elsewhere);
    char where[64];
    snprintf(where, sizeof where, "%.*s", (int)RF_MIN(length, sizeof where - 1), text);
    if (!row)
        return unknown_option(where, elsewhere, args->command, err);
    if (row->given)
        args->given_argument |= 1u << row->given;
    if (row->kind == KIND_FLAG) {
        if (equals)
            return rf_fail(err, RF_ERR_USAGE, where, "takes no value");
        *(bool *)((char *)args + row->offset) = true;
        return RF_OK;
    }
    if (equals)
        return set_value(args, row, where, equals + 1, err);
    if (*at + 1 >= argc) {
        rf_fail(err, RF_ERR_USAGE, where, "the value is missing");
        return rf_fail_expected(err, "%s", row->argument);
    }
    const char *value = argv[*at + 1];
    if (*value == '-' && find_row(value, strlen(value), command_bit, NULL)) {
        rf_fail(err, RF_ERR_USAGE, where, "the value is missing");
        rf_fail_expected(err, "%s (one that looks like an option: --%s=%s)", row->argument,
                         row->name, value);
        return rf_fail_got(err, "%s", value);
    }
    ++*at;
    return set_value(args, row, where, value, err);
}

static rf_status take_model(cli_args *args, const char *text, rf_error *err)
{
    if (args->command == &cli_commands[CLI_KERNELS])
        return rf_fail(err, RF_ERR_USAGE, text, "kernels takes no model");
    if (args->given_argument >> CLI_GIVEN_MODEL & 1u) {
        rf_fail(err, RF_ERR_USAGE, text, "more than one model");
        return rf_fail_got(err, "%s and %s", args->model, text);
    }
    args->model = text;
    args->given |= 1u << CLI_GIVEN_MODEL;
    args->given_argument |= 1u << CLI_GIVEN_MODEL;
    return RF_OK;
}

/* The formats of --kv where -ctk and -ctv do not say otherwise; a preset of the command line wins
 * over their variables. */
static void apply_preset(cli_args *args)
{
    static const char *const presets[][3] = {
        {"safe-lowbit", "r8", "r4"}, {"balanced", "r4", "r4"}, {"experimental-max", "r3", "r3"}};
    bool argument = args->given_argument >> CLI_GIVEN_KV & 1u;
    uint32_t kept = argument ? args->given_argument : args->given;
    for (size_t i = 0; args->kv_preset && i < RF_ARRAY_COUNT(presets); i++) {
        if (strcmp(args->kv_preset, presets[i][0]) != 0)
            continue;
        if (!(kept >> CLI_GIVEN_KV_K & 1u))
            args->kv_k = presets[i][1];
        if (!(kept >> CLI_GIVEN_KV_V & 1u))
            args->kv_v = presets[i][2];
    }
}

rf_status cli_options_parse(cli_args *args, const cli_command *command, int argc, char **argv,
                            rf_error *err)
{
    uint32_t command_bit = 1u << (command - cli_commands);
    set_defaults(args, command);
    rf_status status = read_environment(args, command_bit, err);
    bool options_end = false;
    for (int i = 0; i < argc && !status; i++) {
        const char *text = argv[i];
        if (!options_end && strcmp(text, "--") == 0) {
            options_end = true;
        } else if (!options_end && text[0] == '-' && text[1]) {
            bool had_model = args->given_argument >> CLI_GIVEN_MODEL & 1u;
            const char *before = args->model;
            status = take_option(args, command_bit, argc, argv, &i, err);
            if (!status && had_model && args->model != before)
                status = rf_fail(err, RF_ERR_USAGE, "-m", "more than one model");
        } else {
            status = take_model(args, text, err);
        }
    }
    apply_preset(args);
    if (!status && args->model && !*args->model)
        status = rf_fail(err, RF_ERR_USAGE, "MODEL", "the name is empty");
    return status;
}

bool cli_json_wanted(int argc, char **argv)
{
    const char *text = getenv("RINGFENCE_JSON");
    if (text && is_word_of("1 true yes on", text))
        return true;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0)
            return true;
    }
    return false;
}

const char *cli_option_label(const char *field)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(option_table); i++) {
        const option_row *row = &option_table[i];
        size_t n = 0;
        while (field[n] && (field[n] == '_' ? '-' : field[n]) == row->name[n])
            n++;
        if (field[n] || row->name[n])
            continue;
        if (row->flag)
            return row->flag;
        static char label[64];
        snprintf(label, sizeof label, "--%s", row->name);
        return label;
    }
    return NULL;
}

/* ---- help -------------------------------------------------------------------------------- */

static void help_option(const option_row *row)
{
    char name[64], environment[64];
    snprintf(name, sizeof name, "%s%s--%s%s%s", row->flag ? row->flag : "", row->flag ? ", " : "",
             row->name, row->argument ? " " : "", row->argument ? row->argument : "");
    out_print("  %-28s  %s\n", name, row->help);
    if (!has_variable(row))
        return;
    environment_name(row, environment, sizeof environment);
    out_print("  %-28s  [%s%s%s]\n", "", environment, row->alias ? ", also --" : "",
              row->alias ? row->alias : "");
}

void cli_help(const cli_command *command)
{
    if (command) {
        out_print("usage: ringfence %s %s\n\n%s\n\noptions [and the variable that sets each]:\n",
                  command->name, command->usage, command->detail);
        for (size_t i = 0; i < RF_ARRAY_COUNT(option_table); i++) {
            if (option_table[i].commands & (1u << (command - cli_commands)))
                help_option(&option_table[i]);
        }
        return;
    }
    out_print("ringfence %s: language models in planned memory\n\n"
              "usage: ringfence COMMAND [MODEL] [options]\n\n",
              rf_version());
    for (uint32_t i = 0; i < CLI_COMMAND_COUNT; i++)
        out_print("  %-10s %s\n", cli_commands[i].name, cli_commands[i].summary);
    out_print("\nMODEL is a GGUF file; without one the embedded story model is used.\n"
              "  ringfence help COMMAND   the options of a command\n"
              "  ringfence --version      the version\n\n"
              "exit: 0 ok, 1 run-time error, 2 usage, 3 bad model file, 4 does not fit,\n"
              "      5 plan and actual differ, 6 input or output, 130 interrupted\n");
}
