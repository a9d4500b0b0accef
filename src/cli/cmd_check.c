/* cli/cmd_check.c: `check`: the plan against what really happened.
 *
 *   before ──► file, plan, open ──► prompt ──► decode, both watched ──► rows ──► close
 *
 * Four witnesses: the plan's rows, the ledger of the library, the operating system (resident
 * pages, faults, anonymous bytes of the process) and our own malloc, which counts calls from
 * anywhere. Everything that this file needs for itself is taken and touched before the first
 * measurement, and nothing is printed until the last one is made.
 */
#include "cli.h"

#include <link.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_TOKENS 256
#define FINDINGS_MAX   64u
#define SLACK_BYTES    (UINT64_C(256) << 10) /* what libc and the kernel may add or keep */
#define SLACK_SHARE    100u                  /* 1 % */

static const char builtin_prompt[] = "Once upon a time, there was a little";

typedef struct check_scope {
    uint64_t planned, taken, peak, freed;
    uint64_t arena_resident; /* of our own pages */
    uint64_t resident;       /* with the pages of the file */
} check_scope;

typedef struct check_counts { /* what a part of the run asked for, or all until a moment */
    uint64_t allocations;
    uint64_t data_bytes; /* that the process's data grew by */
    uint64_t adapters;
} check_counts;

typedef struct check_job {
    const cli_args *args;
    cli_model model;
    cli_bytes text;
    uint32_t *tokens;
    uint64_t count, wanted;
    char *piece;
    uint64_t piece_capacity;
    rf_options options;
    rf_plan plan;           /* a copy that outlives the model's */
    rf_plan_row *plan_rows; /* [row_capacity] of that copy */
    rf_check_row *rows;     /* [row_capacity] */
    uint32_t row_capacity;
    uint32_t row_count; /* 0 until they are read */
    rf_plan_info info;  /* of that plan */
    bool sized;         /* the context was chosen to hold the run */
    rf_error findings[FINDINGS_MAX];
    uint32_t finding_count;
    check_scope scopes[RF_SCOPE_COUNT];
    uint64_t before, opened, decoded, closed; /* anonymous bytes of the process */
    check_counts prompt, decode;
    uint64_t tokens_done;               /* of decode */
    uint64_t minor, major, file_faults; /* decode */
    bool stopped_by_ring;
} check_job;

/* ---- findings ---------------------------------------------------------------------------- */

static void find(check_job *job, const char *where, const char *what, uint64_t expected,
                 uint64_t got)
{
    if (job->finding_count == FINDINGS_MAX)
        return;
    rf_error *finding = &job->findings[job->finding_count++];
    rf_fail(finding, RF_ERR_DRIFT, where, "%s", what);
    rf_fail_expected(finding, "%llu", (unsigned long long)expected);
    rf_fail_got(finding, "%llu", (unsigned long long)got);
}

static void find_error(check_job *job, const rf_error *err)
{
    if (job->finding_count < FINDINGS_MAX)
        job->findings[job->finding_count++] = *err;
}

static uint64_t distance(uint64_t a, uint64_t b)
{
    return a > b ? a - b : b - a;
}

static uint64_t slack(uint64_t planned)
{
    return RF_MAX(planned / SLACK_SHARE, SLACK_BYTES);
}

/* ---- warming up -------------------------------------------------------------------------- */

/* Reads one byte of every page of a loaded object, so that its code and tables are mapped before
 * page faults are counted; pages that are written in place get their private copy now. */
static int touch_object(struct dl_phdr_info *info, size_t size, void *context)
{
    (void)size;
    uint64_t page = rf_os_page_bytes();
    volatile uint64_t *sum = context;
    uintptr_t relro_first = 0, relro_end = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        if (info->dlpi_phdr[i].p_type != PT_GNU_RELRO)
            continue;
        relro_first = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
        relro_end = relro_first + info->dlpi_phdr[i].p_memsz;
    }
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *segment = &info->dlpi_phdr[i];
        if (segment->p_type != PT_LOAD || !(segment->p_flags & PF_R))
            continue;
        uintptr_t first = info->dlpi_addr + segment->p_vaddr;
        uintptr_t end = first + segment->p_memsz;
        for (uintptr_t at = first; at < end; at = (at | (page - 1)) + 1) {
            volatile uint8_t *byte = (volatile uint8_t *)at;
            uint8_t value = *byte;
            *sum += value;
            bool sealed = at < relro_end && (at | (page - 1)) >= relro_first;
            if ((segment->p_flags & PF_W) && !sealed)
                *byte = value;
        }
    }
    return 0;
}

static void warm_up(void)
{
    volatile uint64_t sum = 0;
    if (!cli_sanitized())
        dl_iterate_phdr(touch_object, (void *)(uintptr_t)&sum);
    rf_os_touch_stack();
    (void)rf_os_anonymous(); /* each of these for the first time */
    (void)alloc_data_bytes();
    (void)rf_os_faults();
    (void)rf_os_clock_ns();
    malloc_trim(0);
}

/* ---- the run ----------------------------------------------------------------------------- */

/* The options of the run; without -c the context holds all of it, beyond what the model was
 * trained for if need be: this is about memory, not about the text. */
static rf_status choose_options(check_job *job, rf_error *err)
{
    cli_options_for(job->args, &job->options);
    job->options.pattern = true;
    job->options.text_bytes = RF_MAX(job->options.text_bytes, job->text.size);
    rf_status status = cli_plan_open(&job->model, &job->options, err);
    uint64_t needed = RF_MAX(job->count, 1) + job->wanted; /* an empty prompt becomes BOS */
    if (!status)
        cli_plan_notes(&job->model);
    bool enough =
        cli_has(job->args, CLI_GIVEN_CTX) || job->wanted == UINT32_MAX || job->args->endless;
    if (status || enough || job->model.info.ctx >= needed)
        return status;
    job->options.ctx = needed;
    job->sized = true;
    rf_model_plan_close(job->model.plan);
    job->model.plan = NULL;
    return cli_plan_open(&job->model, &job->options, err);
}

static rf_status prepare(check_job *job, rf_error *err)
{
    const cli_args *args = job->args;
    bool given = false;
    rf_status status = cli_read_text(args, &job->text, &given, err);
    if (!status && !given) {
        job->text.data = malloc(sizeof builtin_prompt);
        if (!job->text.data)
            return rf_fail(err, RF_ERR_NO_FIT, "check", "no memory");
        memcpy(job->text.data, builtin_prompt, sizeof builtin_prompt);
        job->text.size = sizeof builtin_prompt - 1;
    }
    job->wanted = DEFAULT_TOKENS;
    if (cli_has(args, CLI_GIVEN_PREDICT))
        job->wanted = args->predict < 0 ? UINT32_MAX : (uint64_t)args->predict;
    if (args->endless && job->wanted == UINT32_MAX)
        return rf_fail(err, RF_ERR_USAGE, "-n", "an endless check needs a number of tokens");
    if (!status)
        status = cli_file_open(args, &job->model, err);
    if (!status)
        status = cli_tokenize(args, job->model.file, &job->text, &job->tokens, &job->count, err);
    if (!status)
        status = choose_options(job, err);
    if (status)
        return status;
    job->row_capacity = rf_model_plan_regions(job->model.plan)->row_count;
    job->rows = calloc((size_t)job->row_capacity + 1, sizeof *job->rows);
    job->plan_rows = calloc((size_t)job->row_capacity + 1, sizeof *job->plan_rows);
    job->piece_capacity = 64 * 1024;
    job->piece = calloc(1, (size_t)job->piece_capacity);
    if (!job->rows || !job->plan_rows || !job->piece)
        return rf_fail(err, RF_ERR_NO_FIT, "check", "no memory for the rows");
    memset(job->rows, 0xff, ((size_t)job->row_capacity + 1) * sizeof *job->rows);
    memset(job->plan_rows, 0xff, ((size_t)job->row_capacity + 1) * sizeof *job->plan_rows);
    memset(job->piece, 0xff, (size_t)job->piece_capacity);
    cli_model_close(&job->model); /* opened anew once measuring has begun */
    return RF_OK;
}

/* What the report needs of the plan, for after it is closed. */
static rf_status keep_plan(check_job *job, rf_error *err)
{
    const rf_plan *plan = rf_model_plan_regions(job->model.plan);
    if (plan->row_count > job->row_capacity)
        return rf_fail(err, RF_ERR_RUNTIME, "check", "planning twice gave two plans");
    job->plan = *plan;
    job->plan.rows = job->plan_rows;
    memcpy(job->plan_rows, plan->rows, plan->row_count * sizeof *plan->rows);
    job->info = job->model.info;
    return RF_OK;
}

/* The prompt's ids as the model's own tokenizer finds them, copied over those from before. */
static rf_status encode_prompt(check_job *job, rf_error *err)
{
    rf_status status = cli_need_tokenizer(&job->model, err);
    const uint32_t *ids;
    uint64_t count;
    if (!status)
        status = rf_tokenizer_encode(job->model.tokenizer, job->text.data, job->text.size,
                                     cli_tokenize_flags(job->args), &ids, &count, err);
    if (status)
        return status;
    if (count != job->count || (count && memcmp(ids, job->tokens, count * sizeof *ids) != 0))
        return rf_fail(err, RF_ERR_RUNTIME, "check",
                       "the model's tokenizer and the text floor's "
                       "give different ids");
    if (!count && job->model.vocabulary.bos != UINT32_MAX && !job->args->no_bos)
        job->tokens[job->count++] = job->model.vocabulary.bos;
    if (!job->count)
        return rf_fail(err, RF_ERR_USAGE, "-p", "the prompt is empty");
    if (job->count <= job->model.info.ctx || job->args->endless)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, "prompt", "longer than the context");
    rf_fail_expected(err, "at most %llu tokens (-c)", (unsigned long long)job->model.info.ctx);
    return rf_fail_got(err, "%llu", (unsigned long long)job->count);
}

/* One token: picked, turned into text, and run through the model. */
static rf_status decode_one(check_job *job, rf_text_stream *stream, rf_error *err)
{
    rf_model *model = job->model.model;
    uint32_t token = 0;
    rf_status status = rf_sample(model, 0, 0, &token, err);
    if (status)
        return status;
    rf_text_stream_push(stream, token, job->piece, job->piece_capacity);
    rf_step_item item = {0, token, rf_slot_length(model, 0), true, RF_STEP_GENERATION};
    status = rf_step(model, &item, 1, err);
    if (!status)
        job->tokens_done++;
    return status;
}

static check_counts counts_now(const check_job *job)
{
    return (check_counts){alloc_count(), alloc_data_bytes(),
                          rf_model_trace(job->model.model)->adapter_count};
}

static check_counts counts_between(const check_counts *first, const check_counts *last)
{
    return (check_counts){
        last->allocations - first->allocations,
        last->data_bytes > first->data_bytes ? last->data_bytes - first->data_bytes : 0,
        last->adapters - first->adapters};
}

static rf_status read_prompt(check_job *job, rf_error *err)
{
    check_counts first = counts_now(job);
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    sampling.temperature = 0.0f;
    rf_status status = rf_sampler_start(job->model.model, 0, &sampling, err);
    if (!status)
        status = rf_prefill(job->model.model, 0, job->tokens, job->count, true, cli_progress_step,
                            &(cli_progress){"prompt", UINT64_MAX / 2, UINT64_MAX / 2}, err);
    check_counts last = counts_now(job);
    job->prompt = counts_between(&first, &last);
    return status;
}

/* All that is counted here is counted over every token of the decode and nothing else. */
static rf_status decode_watched(check_job *job, rf_error *err)
{
    rf_model *model = job->model.model;
    rf_text_stream stream;
    rf_text_stream_start(&stream, job->model.tokenizer, false);
    rf_status status = RF_OK;
    uint64_t file_before = rf_model_file_resident(model);
    check_counts first = counts_now(job);
    rf_faults faults_before = rf_os_faults();
    for (uint64_t i = 0; i < job->wanted && !status; i++) {
        if (!job->args->endless && rf_slot_length(model, 0) >= job->model.info.ctx) {
            job->stopped_by_ring = true;
            break;
        }
        status = decode_one(job, &stream, err);
    }
    rf_faults faults = rf_os_faults();
    check_counts last = counts_now(job);
    uint64_t file_now = rf_model_file_resident(model);
    job->decode = counts_between(&first, &last);
    if (file_now != UINT64_MAX && file_now > file_before)
        job->file_faults = (file_now - file_before) / rf_os_page_bytes();
    job->minor = faults.minor - faults_before.minor;
    job->minor -= RF_MIN(job->minor, job->file_faults);
    job->major = faults.major - faults_before.major;
    return status;
}

static rf_status read_rows(check_job *job, rf_error *err)
{
    const rf_plan *plan = rf_model_plan_regions(job->model.plan);
    const rf_trace *trace = rf_model_trace(job->model.model);
    for (uint32_t i = 0; i < plan->row_count; i++) {
        rf_status status = rf_model_check_row(job->model.model, i, &job->rows[i], err);
        if (status)
            return status;
        check_scope *scope = &job->scopes[plan->rows[i].scope];
        if (strcmp(plan->rows[i].id, "padding") == 0)
            continue;
        scope->planned += job->rows[i].planned_bytes;
        scope->taken += job->rows[i].taken_bytes;
    }
    job->row_count = plan->row_count;
    for (uint32_t kind = 0; kind < RF_SCOPE_AMBIENT; kind++) {
        job->scopes[kind].peak = trace->peak_bytes[kind];
        job->scopes[kind].arena_resident = rf_model_resident(job->model.model, (rf_scope_kind)kind);
        job->scopes[kind].resident = job->scopes[kind].arena_resident;
    }
    uint64_t file = rf_model_file_resident(job->model.model);
    check_scope *scope = &job->scopes[RF_SCOPE_MODEL];
    if (scope->resident != UINT64_MAX)
        scope->resident = file == UINT64_MAX ? file : scope->resident + file;
    return RF_OK;
}

/* Closes all that was opened since the first measurement. */
static void close_model(check_job *job)
{
    rf_trace trace;
    signals_watch_model(NULL);
    rf_model_close(job->model.model, &trace);
    job->model.model = NULL;
    cli_model_close(&job->model);
    malloc_trim(0);
    job->closed = rf_os_anonymous();
    for (uint32_t kind = 0; kind < RF_SCOPE_AMBIENT; kind++)
        job->scopes[kind].freed = trace.freed_bytes[kind];
}

/* ---- judgement --------------------------------------------------------------------------- */

static void judge_rows(check_job *job)
{
    const rf_plan *plan = &job->plan;
    for (uint32_t i = 0; i < job->row_count; i++) {
        if (job->rows[i].planned_bytes != job->rows[i].taken_bytes)
            find(job, plan->rows[i].id, "taken bytes are not the planned ones",
                 job->rows[i].planned_bytes, job->rows[i].taken_bytes);
    }
    for (uint32_t kind = 0; kind < RF_SCOPE_AMBIENT; kind++) {
        const char *name = rf_scope_kind_name((rf_scope_kind)kind);
        const check_scope *scope = &job->scopes[kind];
        if (scope->freed != scope->taken)
            find(job, name, "freed bytes are not the taken ones", scope->taken, scope->freed);
        if (scope->peak != scope->taken)
            find(job, name, "the peak is not what was taken", scope->taken, scope->peak);
        uint64_t arena = plan->arena_bytes[kind][RF_DOMAIN_ANON];
        if (cli_sanitized() || scope->arena_resident == UINT64_MAX)
            continue;
        if (distance(scope->arena_resident, arena) > slack(arena))
            find(job, name, "resident bytes are not the planned ones", arena,
                 scope->arena_resident);
    }
}

static void judge_counts(check_job *job, const char *where, const check_counts *counts)
{
    if (counts->allocations)
        find(job, where, "allocations after open", 0, counts->allocations);
    if (counts->data_bytes && !cli_sanitized())
        find(job, where, "the process's data grew by mmap or brk", 0, counts->data_bytes);
}

static void judge_decode(check_job *job)
{
    judge_counts(job, "prompt", &job->prompt);
    judge_counts(job, "decode", &job->decode);
    if (cli_sanitized())
        return;
    if (job->minor)
        find(job, "decode", "page faults while decoding", 0, job->minor);
    if (job->major)
        find(job, "decode", "page faults from disk while decoding", 0, job->major);
}

static void judge_process(check_job *job)
{
    if (cli_sanitized() || !job->before)
        return;
    uint64_t planned = job->plan.anon_bytes;
    uint64_t grown = job->opened > job->before ? job->opened - job->before : 0;
    if (distance(grown, planned) > slack(planned))
        find(job, "process", "anonymous bytes grew by more or less than was planned", planned,
             grown);
    grown = job->decoded > job->before ? job->decoded - job->before : 0;
    if (distance(grown, planned) > slack(planned))
        find(job, "process", "anonymous bytes after decoding are not what was planned", planned,
             grown);
    if (distance(job->closed, job->before) > SLACK_BYTES)
        find(job, "process", "anonymous bytes did not come back after close", job->before,
             job->closed);
}

/* ---- output ------------------------------------------------------------------------------ */

static void json_rows(rf_writer *writer, const check_job *job)
{
    const rf_plan *plan = &job->plan;
    rf_json_open(writer, "rows", '[');
    for (uint32_t i = 0; i < job->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        const rf_check_row *check = &job->rows[i];
        if (job->args->list && !cli_glob(job->args->list, row->id))
            continue;
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "id", row->id);
        rf_json_text(writer, "scope", rf_scope_kind_name(row->scope));
        rf_json_text(writer, "domain", rf_domain_name(row->domain));
        rf_json_u64(writer, "planned_bytes", check->planned_bytes);
        rf_json_u64(writer, "taken_bytes", check->taken_bytes);
        rf_json_u64(writer, "written_bytes", check->written_bytes);
        json_u64_or_null(writer, "resident_bytes", check->resident_bytes);
        rf_json_close(writer, '}');
        json_step(writer);
    }
    rf_json_close(writer, ']');
}

static void json_scopes(rf_writer *writer, const check_job *job)
{
    rf_json_open(writer, "scopes", '{');
    for (uint32_t kind = 0; kind < RF_SCOPE_AMBIENT; kind++) {
        const check_scope *scope = &job->scopes[kind];
        rf_json_open(writer, rf_scope_kind_name((rf_scope_kind)kind), '{');
        rf_json_u64(writer, "planned_bytes", scope->planned);
        rf_json_u64(writer, "taken_bytes", scope->taken);
        rf_json_u64(writer, "peak_bytes", scope->peak);
        json_u64_or_null(writer, "resident_bytes", scope->resident);
        rf_json_u64(writer, "freed_bytes", scope->freed);
        rf_json_close(writer, '}');
    }
    rf_json_close(writer, '}');
}

static void json_counts(rf_writer *writer, const check_counts *counts)
{
    rf_json_u64(writer, "allocations", counts->allocations);
    rf_json_u64(writer, "data_growth_bytes", counts->data_bytes);
    rf_json_u64(writer, "adapters", counts->adapters);
}

static void print_json(const check_job *job)
{
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_u64(writer, "schema", 1);
    rf_json_text(writer, "verdict", job->finding_count ? "drift" : "ok");
    json_plan_options(writer, &job->info);
    json_rows(writer, job);
    json_scopes(writer, job);
    rf_json_open(writer, "process", '{');
    rf_json_u64(writer, "before_bytes", job->before);
    rf_json_u64(writer, "open_bytes", job->opened);
    rf_json_u64(writer, "after_decode_bytes", job->decoded);
    rf_json_u64(writer, "closed_bytes", job->closed);
    rf_json_close(writer, '}');
    rf_json_open(writer, "prompt", '{');
    rf_json_u64(writer, "tokens", job->count);
    json_counts(writer, &job->prompt);
    rf_json_close(writer, '}');
    rf_json_open(writer, "decode", '{');
    rf_json_u64(writer, "tokens", job->tokens_done);
    json_counts(writer, &job->decode);
    rf_json_u64(writer, "minor_faults", job->minor);
    rf_json_u64(writer, "major_faults", job->major);
    rf_json_u64(writer, "file_faults", job->file_faults);
    rf_json_close(writer, '}');
    rf_json_open(writer, "findings", '[');
    for (uint32_t i = 0; i < job->finding_count; i++) {
        const rf_error *finding = &job->findings[i];
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "where", finding->where);
        rf_json_text(writer, "what", finding->what);
        rf_json_text(writer, "expected", finding->expected);
        rf_json_text(writer, "got", finding->got);
        rf_json_close(writer, '}');
        json_step(writer);
    }
    rf_json_close(writer, ']');
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_line(const char *name, const char *scope, const rf_check_row *sum)
{
    char resident[24] = "-";
    if (sum->resident_bytes != UINT64_MAX)
        snprintf(resident, sizeof resident, "%llu", (unsigned long long)sum->resident_bytes);
    out_print("%-36s %-7s %14llu %14llu %14llu %14s%s\n", name, scope,
              (unsigned long long)sum->planned_bytes, (unsigned long long)sum->taken_bytes,
              (unsigned long long)sum->written_bytes, resident,
              sum->planned_bytes == sum->taken_bytes ? "" : "  DIFFERS");
}

/* Rows of one pool and scope as one line; those that were asked for by --list one by one. */
static void print_rows(const check_job *job)
{
    const rf_plan *plan = &job->plan;
    out_print("%-36s %-7s %14s %14s %14s %14s\n", "region", "scope", "planned", "taken", "written",
              "resident");
    if (job->args->list) {
        for (uint32_t i = 0; i < job->row_count; i++) {
            if (cli_glob(job->args->list, plan->rows[i].id))
                print_line(plan->rows[i].id, rf_scope_kind_name(plan->rows[i].scope),
                           &job->rows[i]);
        }
        return;
    }
    for (uint32_t group = 0; group < RF_POOL_COUNT * RF_SCOPE_COUNT; group++) {
        uint32_t pool = group / RF_SCOPE_COUNT, kind = group % RF_SCOPE_COUNT, count = 0;
        rf_check_row sum = {0, 0, 0, 0};
        for (uint32_t i = 0; i < job->row_count; i++) {
            const rf_plan_row *row = &plan->rows[i];
            if (row->pool != (rf_pool)pool || row->scope != (rf_scope_kind)kind)
                continue;
            const rf_check_row *check = &job->rows[i];
            count++;
            sum.planned_bytes += check->planned_bytes;
            sum.taken_bytes += check->taken_bytes;
            sum.written_bytes += check->written_bytes;
            if (check->resident_bytes != UINT64_MAX)
                sum.resident_bytes += check->resident_bytes;
        }
        char name[48];
        snprintf(name, sizeof name, "%s, %u region%s", rf_pool_name((rf_pool)pool), count,
                 count == 1 ? "" : "s");
        if (count)
            print_line(name, rf_scope_kind_name((rf_scope_kind)kind), &sum);
    }
}

static void print_text(const check_job *job)
{
    out_print("options  %s", cli_plan_options(&job->info).text);
    if (job->sized)
        out_print(" (ctx is the prompt and -n: %llu + %llu)", (unsigned long long)job->count,
                  (unsigned long long)job->wanted);
    out_print("\n\n");
    print_rows(job);
    out_print("\n");
    for (uint32_t kind = 0; kind < RF_SCOPE_AMBIENT; kind++) {
        const check_scope *scope = &job->scopes[kind];
        out_print("scope %-8s planned %llu, taken %llu, peak %llu, freed %llu bytes\n",
                  rf_scope_kind_name((rf_scope_kind)kind), (unsigned long long)scope->planned,
                  (unsigned long long)scope->taken, (unsigned long long)scope->peak,
                  (unsigned long long)scope->freed);
    }
    uint64_t planned = job->plan.anon_bytes;
    long long grown = (long long)job->opened - (long long)job->before;
    long long left = (long long)job->closed - (long long)job->before;
    out_print("process        anonymous bytes: planned +%llu, open %+lld, after decode %+lld, "
              "closed %+lld\n",
              (unsigned long long)planned, grown, (long long)job->decoded - (long long)job->before,
              left);
    out_print("prompt         %llu tokens: %llu allocations, %llu adapters\n",
              (unsigned long long)job->count, (unsigned long long)job->prompt.allocations,
              (unsigned long long)job->prompt.adapters);
    out_print(
        "decode         %llu tokens: %llu allocations, %llu adapters, %llu + %llu page faults "
        "(minor, major), %llu of the file\n",
        (unsigned long long)job->tokens_done, (unsigned long long)job->decode.allocations,
        (unsigned long long)job->decode.adapters, (unsigned long long)job->minor,
        (unsigned long long)job->major, (unsigned long long)job->file_faults);
    for (uint32_t i = 0; i < job->finding_count; i++) {
        const rf_error *finding = &job->findings[i];
        out_print("finding        %s: %s (expected %s, got %s)\n", finding->where, finding->what,
                  finding->expected, finding->got);
    }
    out_print("verdict        %s\n", job->finding_count ? "DRIFT" : "ok");
}

/* ---- the whole --------------------------------------------------------------------------- */

static void say_limits(const check_job *job)
{
    if (cli_sanitized())
        cli_note("built with a sanitizer: resident bytes, page faults and bytes of the process "
                 "are its own as well, and are not judged");
    if (!alloc_count_works())
        cli_note("this build cannot count allocations: only growth of the process's data is");
    if (job->stopped_by_ring)
        cli_note("the context of %llu tokens is full: stopped after %llu of %llu tokens",
                 (unsigned long long)job->info.ctx, (unsigned long long)job->tokens_done,
                 (unsigned long long)job->wanted);
}

/* File, plan and model; *drift when the plan and its takers disagree: a finding, no error. */
static rf_status open_measured(check_job *job, bool *drift, rf_error *err)
{
    rf_status status = cli_file_open(job->args, &job->model, err);
    if (!status)
        status = cli_plan_open(&job->model, &job->options, err);
    if (!status)
        status = keep_plan(job, err);
    job->model.notes_said = true;
    if (!status)
        status = cli_model_open(&job->model, err);
    *drift = status == RF_ERR_DRIFT;
    if (!*drift)
        return status;
    find_error(job, err);
    err->status = RF_OK;
    return RF_OK;
}

/* Everything from before open to after close; a status is an error that leaves nothing to judge. */
static rf_status measure(check_job *job, rf_error *err)
{
    bool drift;
    warm_up();
    job->before = rf_os_anonymous();
    rf_status status = open_measured(job, &drift, err);
    if (status)
        return status;
    job->opened = job->decoded = rf_os_anonymous();
    if (drift) {
        cli_model_close(&job->model);
        job->closed = rf_os_anonymous();
        return RF_OK;
    }
    status = encode_prompt(job, err);
    if (!status)
        status = read_prompt(job, err);
    if (!status)
        status = decode_watched(job, err);
    if (status)
        return status;
    job->decoded = rf_os_anonymous();
    status = read_rows(job, err);
    if (status)
        return status;
    rf_error guard = {0};
    if (rf_model_check_guards(job->model.model, &guard))
        find_error(job, &guard);
    close_model(job);
    judge_rows(job);
    judge_decode(job);
    judge_process(job);
    return RF_OK;
}

static rf_status check_steps(check_job *job, rf_error *err)
{
    rf_status status = prepare(job, err);
    if (!status)
        status = measure(job, err);
    if (status)
        return status;
    say_limits(job);
    if (job->args->json) {
        print_json(job);
    } else {
        print_text(job);
    }
    out_flush();
    status = out_status(err);
    if (!status && job->finding_count) {
        cli_note("plan and actual differ: %u finding%s", job->finding_count,
                 job->finding_count == 1 ? "" : "s");
        status = RF_ERR_DRIFT; /* all is said: only the exit code is left */
    }
    return status;
}

rf_status cmd_check(const cli_args *args, rf_error *err)
{
    static check_job job;
    alloc_count_start();
    job.args = args;
    rf_status status = check_steps(&job, err);
    cli_model_close(&job.model);
    free(job.tokens);
    free(job.rows);
    free(job.plan_rows);
    free(job.piece);
    cli_bytes_free(&job.text);
    return status;
}
