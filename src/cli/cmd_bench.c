/* cli/cmd_bench.c: `bench`: prompt and generation speed, as a share of measured bandwidth.
 *
 * The read bandwidth is measured in the same run with the same number of threads, by summing a
 * buffer that no cache holds. Decode reads each weight once per token, so bytes per token times
 * tokens per second over that bandwidth says how near the machine's limit a run is.
 */
#include "cli.h"

#include <stdlib.h>
#include <string.h>

#define BANDWIDTH_BYTES  (UINT64_C(256) << 20)
#define BANDWIDTH_PIECE  (UINT64_C(1) << 20)
#define BANDWIDTH_PASSES 5

typedef struct bench_case {
    bool generate; /* tg, else pp */
    uint32_t tokens;
    uint64_t depth;
} bench_case;

typedef struct bench_result {
    double median, least, most; /* tokens/s */
    uint64_t bytes_per_token;
    double share;
} bench_result;

typedef struct bench_job {
    const cli_args *args;
    cli_model model;
    kld_file base;
    ppl_job ppl; /* against base */
    uint64_t longest, deepest;
    uint32_t *tokens; /* [deepest + longest] */
    double *rates;    /* [repetitions] */
    double bandwidth; /* bytes/s */
    bool json, csv;
    bool cached; /* a run was faster than memory can be read */
} bench_job;

/* ---- bandwidth --------------------------------------------------------------------------- */

typedef uint64_t sum_vector __attribute__((vector_size(64)));

typedef struct bandwidth_job {
    const uint8_t *data;
    uint64_t bytes;
    _Atomic uint64_t sum; /* keeps the reads alive */
} bandwidth_job;

static void sum_pieces(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    (void)worker;
    bandwidth_job *job = context;
    sum_vector sums[4] = {{0}, {0}, {0}, {0}};
    const sum_vector *from = (const void *)(job->data + first * BANDWIDTH_PIECE);
    const sum_vector *end = (const void *)(job->data + last * BANDWIDTH_PIECE);
    for (; from < end; from += 4) {
        for (int i = 0; i < 4; i++)
            sums[i] += from[i];
    }
    sum_vector sum = sums[0] + sums[1] + sums[2] + sums[3];
    uint64_t total = 0;
    for (int i = 0; i < 8; i++)
        total += sum[i];
    atomic_fetch_add_explicit(&job->sum, total, memory_order_relaxed);
}

static rf_status measure_bandwidth(bench_job *job, rf_error *err)
{
    void *buffer = NULL;
    cli_team team;
    rf_status status = cli_team_open(&team, job->model.info.threads, err);
    if (status)
        return status;
    bandwidth_job work = {NULL, BANDWIDTH_BYTES, 0};
    const rf_file_info *file = &job->model.file_info;
    if (file->bytes >= BANDWIDTH_BYTES && (uintptr_t)file->data % sizeof(sum_vector) == 0) {
        work.data = file->data; /* resident already */
    } else {
        status = rf_os_reserve(BANDWIDTH_BYTES, &buffer, err);
        if (!status)
            memset(buffer, 1, BANDWIDTH_BYTES);
        work.data = buffer;
    }
    for (int pass = 0; pass < BANDWIDTH_PASSES && !status; pass++) {
        uint64_t start = rf_os_clock_ns();
        rf_team_run(team.team, (uint32_t)(BANDWIDTH_BYTES / BANDWIDTH_PIECE), 2, sum_pieces, &work);
        double rate = (double)BANDWIDTH_BYTES * 1e9 / (double)(rf_os_clock_ns() - start);
        if (pass && rate > job->bandwidth)
            job->bandwidth = rate; /* the first pass warms up */
        status = signals_status(err);
    }
    if (buffer)
        rf_os_release(buffer, BANDWIDTH_BYTES);
    cli_team_close(&team);
    return status;
}

/* ---- one test ---------------------------------------------------------------------------- */

static rf_status run_once(bench_job *job, const bench_case *test, uint64_t *elapsed_ns,
                          rf_error *err)
{
    rf_model *model = job->model.model;
    rf_status status = rf_slot_truncate(model, 0, test->depth, err);
    uint64_t start = rf_os_clock_ns();
    if (!test->generate && !status)
        status =
            rf_prefill(model, 0, job->tokens + test->depth, test->tokens, true, NULL, NULL, err);
    for (uint32_t i = 0; test->generate && i < test->tokens && !status; i++) {
        rf_step_item item = {0, job->tokens[test->depth + i], test->depth + i, true,
                             RF_STEP_GENERATION};
        status = rf_step(model, &item, 1, err);
    }
    *elapsed_ns = rf_os_clock_ns() - start;
    return status ? status : signals_status(err);
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static rf_status run_case(bench_job *job, const bench_case *test, bench_result *out, rf_error *err)
{
    rf_model *model = job->model.model;
    uint32_t runs = (uint32_t)job->args->repetitions;
    uint64_t elapsed_ns;
    rf_status status = rf_slot_truncate(model, 0, 0, err);
    if (!status && test->depth)
        status = rf_prefill(model, 0, job->tokens, test->depth, false, NULL, NULL, err);
    bench_case warm = *test; /* the first steps after a pause are not what is measured */
    warm.tokens = RF_MIN(test->tokens, 8);
    if (!status)
        status = run_once(job, &warm, &elapsed_ns, err);
    for (uint32_t run = 0; run < runs && !status; run++) {
        status = run_once(job, test, &elapsed_ns, err);
        job->rates[run] = cli_rate(test->tokens, elapsed_ns);
    }
    if (status)
        return status;
    qsort(job->rates, runs, sizeof *job->rates, compare_doubles);
    out->median = 0.5 * (job->rates[(runs - 1) / 2] + job->rates[runs / 2]);
    out->least = job->rates[0];
    out->most = job->rates[runs - 1];
    out->bytes_per_token = rf_model_step_bytes(model, test->depth + test->tokens / 2);
    out->share = (double)out->bytes_per_token * out->median / job->bandwidth;
    return RF_OK;
}

/* ---- output ------------------------------------------------------------------------------ */

static const char *kv_name(const char *given)
{
    return given ? given : "f16";
}

/* The bits of activations that a test ran with. */
static uint32_t act_of(const bench_job *job, const bench_case *test)
{
    const rf_plan_info *info = &job->model.info;
    return test->generate ? info->act_generation : info->act_prompt;
}

static void print_head(const bench_job *job)
{
    const cli_model *model = &job->model;
    if (job->json)
        return;
    if (job->csv) {
        out_print("test,depth,threads,kv_k,kv_v,cpu,runs,tokens_per_s,tokens_per_s_min,"
                  "tokens_per_s_max,bytes_per_token,read_bytes_per_s,bandwidth_share,act\n");
        out_flush();
        return;
    }
    out_print("%s, %s, %s, %u thread%s, kv %s/%s, act %u/%u, reads %.2f "
              "GiB/s\n\n",
              model->file_info.name, model->info.architecture,
              rf_cpu_mask_name(job->args->cpu_mask), model->info.threads,
              model->info.threads == 1 ? "" : "s", kv_name(job->args->kv_k),
              kv_name(job->args->kv_v), model->info.act_prompt, model->info.act_generation,
              job->bandwidth / (1024.0 * 1024.0 * 1024.0));
    out_print("| test       |  depth | tokens/s |      min |      max | bytes/token | of bandwidth "
              "|\n"
              "| :--------- | -----: | -------: | -------: | -------: | ----------: | -----------: "
              "|\n");
    out_flush();
}

static void print_case_json(const bench_job *job, const bench_case *test, const char *name,
                            const bench_result *result)
{
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_text(writer, "test", name);
    rf_json_u64(writer, "depth", test->depth);
    rf_json_u64(writer, "threads", job->model.info.threads);
    rf_json_text(writer, "kv_k", kv_name(job->args->kv_k));
    rf_json_text(writer, "kv_v", kv_name(job->args->kv_v));
    rf_json_text(writer, "cpu", rf_cpu_mask_name(job->args->cpu_mask));
    rf_json_u64(writer, "act", act_of(job, test));
    rf_json_u64(writer, "runs", (uint64_t)job->args->repetitions);
    rf_json_f64(writer, "tokens_per_s", result->median);
    rf_json_f64(writer, "tokens_per_s_min", result->least);
    rf_json_f64(writer, "tokens_per_s_max", result->most);
    json_u64_or_null(writer, "bytes_per_token",
                     test->generate ? result->bytes_per_token : UINT64_MAX);
    rf_json_f64(writer, "read_bytes_per_s", job->bandwidth);
    if (test->generate) {
        rf_json_f64(writer, "bandwidth_share", result->share);
    } else {
        rf_json_null(writer, "bandwidth_share");
    }
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_case(const bench_job *job, const bench_case *test, const bench_result *result)
{
    char name[24];
    snprintf(name, sizeof name, "%s%u", test->generate ? "tg" : "pp", test->tokens);
    if (job->json) {
        print_case_json(job, test, name, result);
        return;
    }
    char bytes[24] = "", share[16] = "";
    if (test->generate && job->csv) {
        snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)result->bytes_per_token);
        snprintf(share, sizeof share, "%.4f", result->share);
    } else if (test->generate) {
        snprintf(bytes, sizeof bytes, "%s", cli_size(result->bytes_per_token).text);
        snprintf(share, sizeof share, "%.0f %%", 100.0 * result->share);
    }
    if (job->csv) {
        out_print("%s,%llu,%u,%s,%s,%s,%lld,%.2f,%.2f,%.2f,%s,%.0f,%s,%u\n", name,
                  (unsigned long long)test->depth, job->model.info.threads,
                  kv_name(job->args->kv_k), kv_name(job->args->kv_v),
                  rf_cpu_mask_name(job->args->cpu_mask), (long long)job->args->repetitions,
                  result->median, result->least, result->most, bytes, job->bandwidth, share,
                  act_of(job, test));
    } else {
        out_print("| %-10s | %6llu | %8.1f | %8.1f | %8.1f | %11s | %12s |\n", name,
                  (unsigned long long)test->depth, result->median, result->least, result->most,
                  bytes, share);
    }
    out_flush();
}

/* ---- the whole --------------------------------------------------------------------------- */

static uint64_t largest_of(const cli_list *list)
{
    uint64_t largest = 0;
    for (uint32_t i = 0; i < list->count; i++)
        largest = RF_MAX(largest, list->values[i]);
    return largest;
}

static void set_default(cli_list *list, uint64_t value)
{
    list->count = 1;
    list->values[0] = value;
}

/* The plan with a context that holds every test; defaults shrink to it, what was asked for by
 * number does not. */
static rf_status plan_tests(bench_job *job, cli_args *args, rf_error *err)
{
    rf_options options;
    cli_options_for(args, &options);
    rf_status status = cli_plan_open(&job->model, &options, err);
    if (status)
        return status;
    uint64_t ctx = job->model.info.ctx;
    uint64_t deepest = largest_of(&args->depths);
    uint64_t room = ctx > deepest ? ctx - deepest : 0;
    if (!cli_has(args, CLI_GIVEN_LENGTHS))
        set_default(&args->lengths, RF_MIN(512, room));
    if (!cli_has(args, CLI_GIVEN_COUNTS))
        set_default(&args->counts, RF_MIN(128, room));
    if (!cli_has(args, CLI_GIVEN_DEPTHS))
        set_default(&args->depths, 0);
    uint64_t longest = RF_MAX(largest_of(&args->lengths), largest_of(&args->counts));
    uint64_t needed = deepest + longest;
    if (args->kl)
        needed = RF_MAX(needed, job->base.ctx);
    job->deepest = deepest;
    job->longest = longest;
    if (needed > ctx && cli_has(args, CLI_GIVEN_CTX)) {
        rf_fail(err, RF_ERR_USAGE, "-c", "the tests do not fit into the context");
        rf_fail_expected(err, "at least %llu", (unsigned long long)needed);
        return rf_fail_got(err, "%llu", (unsigned long long)ctx);
    }
    if (!cli_has(args, CLI_GIVEN_CTX))
        options.ctx = RF_MAX(needed, 1);
    rf_plan_info info = job->model.info;
    if (args->kl)
        options.logit_rows = ppl_logit_rows(&job->ppl, info.chunk);
    rf_model_plan_close(job->model.plan);
    job->model.plan = NULL;
    return cli_plan_open(&job->model, &options, err);
}

static rf_status prepare(bench_job *job, rf_error *err)
{
    uint64_t count = job->deepest + job->longest + 1;
    job->tokens = calloc((size_t)count, sizeof *job->tokens);
    job->rates = calloc((size_t)job->args->repetitions, sizeof *job->rates);
    if (!job->tokens || !job->rates)
        return rf_fail(err, RF_ERR_NO_FIT, "bench", "no memory for the tokens");
    for (uint64_t i = 0; i < count; i++) /* any tokens do: the work is the same */
        job->tokens[i] = (uint32_t)((i * 7919 + 1) % job->model.info.vocab_count);
    return measure_bandwidth(job, err);
}

static rf_status run_tests(bench_job *job, rf_error *err)
{
    const cli_args *args = job->args;
    print_head(job);
    for (uint32_t d = 0; d < args->depths.count; d++) {
        for (uint32_t i = 0; i < args->lengths.count + args->counts.count; i++) {
            bool generate = i >= args->lengths.count;
            bench_case test = {generate,
                               (uint32_t)(generate ? args->counts.values[i - args->lengths.count]
                                                   : args->lengths.values[i]),
                               args->depths.values[d]};
            if (!test.tokens)
                continue;
            bench_result result;
            rf_status status = run_case(job, &test, &result, err);
            if (status)
                return status;
            job->cached = job->cached || (generate && result.share > 1.0);
            print_case(job, &test, &result);
            if (out_failed())
                return out_status(err);
        }
    }
    return RF_OK;
}

static rf_status run_kl(bench_job *job, rf_error *err)
{
    const kld_file *base = &job->base;
    if (base->vocab_count != job->model.info.vocab_count) {
        rf_fail(err, RF_ERR_USAGE, base->path, "made with another vocabulary");
        rf_fail_expected(err, "%u tokens", job->model.info.vocab_count);
        return rf_fail_got(err, "%u", base->vocab_count);
    }
    ppl_job *ppl = &job->ppl;
    ppl->tokens = base->tokens;
    ppl->base = &job->base;
    for (uint64_t i = 0; i < (uint64_t)ppl->chunks * ppl->ctx; i++) {
        if (ppl->tokens[i] >= base->vocab_count)
            return rf_fail(err, RF_ERR_IO, base->path, "token %llu is no id of the vocabulary",
                           (unsigned long long)i);
    }
    ppl_result result;
    rf_status status = ppl_run(&job->model, ppl, &result, err);
    if (status)
        return status;
    if (job->json) {
        rf_writer *writer = json_begin();
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "test", "kl");
        rf_json_u64(writer, "ctx", ppl->ctx);
        rf_json_u64(writer, "chunks", ppl->chunks);
        rf_json_u64(writer, "act", job->model.info.act_prompt);
        rf_json_f64(writer, "kl_mean", result.figures.kl_mean);
        rf_json_f64(writer, "kl_stderr", result.figures.kl_stderror);
        rf_json_f64(writer, "top1", result.figures.top1);
        rf_json_f64(writer, "perplexity", result.figures.perplexity);
        rf_json_f64(writer, "ppl_ratio", result.figures.ppl_ratio);
        rf_json_close(writer, '}');
        json_end(writer);
    } else if (job->csv) {
        cli_note("KL against %s: %.6f, top-1 %.3f %%, perplexity %.4f", base->path,
                 result.figures.kl_mean, 100.0 * result.figures.top1, result.figures.perplexity);
    } else {
        out_print("\nKL against %s (%u x %u): %.6f +- %.6f, top-1 %.3f %%, perplexity %.4f\n",
                  base->path, ppl->ctx, ppl->chunks, result.figures.kl_mean,
                  result.figures.kl_stderror, 100.0 * result.figures.top1,
                  result.figures.perplexity);
    }
    out_flush();
    return out_status(err);
}

rf_status cmd_bench(const cli_args *given, rf_error *err)
{
    cli_args args = *given; /* lists that were not given get their defaults */
    bench_job job = {.args = &args};
    job.json = args.json || (args.output && strcmp(args.output, "json") == 0);
    job.csv = !job.json && args.output && strcmp(args.output, "csv") == 0;
    rf_status status = cli_file_open(&args, &job.model, err);
    if (!status && args.kl)
        status = kld_open(&job.base, args.kl, err);
    if (!status && args.kl)
        ppl_job_chunks(&job.ppl, job.base.ctx, job.base.chunks, false);
    if (!status)
        status = plan_tests(&job, &args, err);
    if (!status)
        status = cli_model_open(&job.model, err);
    if (!status)
        status = prepare(&job, err);
    if (!status)
        status = run_tests(&job, err);
    if (!status && job.cached)
        cli_note("note: more than 100 %% of the bandwidth of memory: the weights lie in a cache");
    if (!status && args.kl)
        status = run_kl(&job, err);
    kld_close(&job.base, NULL);
    cli_model_close(&job.model);
    free(job.tokens);
    free(job.rates);
    return status;
}
