/* cli/cmd_ppl.c: `ppl`: perplexity of a text, and its divergence from another engine's logits, or
 * from the same model's own under f32 keys and values.
 *
 * With --kl two models are open on one file: the mapping is shared, all else is planned twice, and
 * both together must fit.
 */
#include "cli.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct ppl_command {
    const cli_args *args;
    cli_model model;
    cli_bytes text;
    uint32_t *tokens; /* owned; the text's */
    uint64_t count;
    kld_file base, save;
    ppl_job job;
    rf_model_plan *reference_plan; /* --kl: of the same file, with f32 keys and values */
    rf_model *reference;
} ppl_command;

/* The text's tokens, or without a text those of the base. */
static rf_status find_tokens(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    bool given = false;
    rf_status status = cli_read_text(args, &command->text, &given, err);
    if (status)
        return status;
    if (given)
        return cli_tokenize(args, command->model.file, &command->text, &command->tokens,
                            &command->count, err);
    if (args->kl_base)
        return RF_OK;
    return cli_need_text(args, &command->text, err);
}

/* The tokens must be those that the base was made from. */
static rf_status match_base(const ppl_command *command, rf_error *err)
{
    const kld_file *base = &command->base;
    const rf_plan_info *info = &command->model.info;
    if (base->vocab_count != info->vocab_count) {
        rf_fail(err, RF_ERR_USAGE, base->path, "made with another vocabulary");
        rf_fail_expected(err, "%u tokens", info->vocab_count);
        return rf_fail_got(err, "%u", base->vocab_count);
    }
    uint64_t count = (uint64_t)command->job.chunks * command->job.ctx;
    for (uint64_t i = 0; i < count; i++) {
        if (base->tokens[i] >= info->vocab_count)
            return rf_fail(err, RF_ERR_IO, base->path, "token %llu is no id of the vocabulary",
                           (unsigned long long)i);
        if (!command->tokens || base->tokens[i] == command->tokens[i])
            continue;
        rf_fail(err, RF_ERR_USAGE, base->path, "another text: the tokens differ at position %llu",
                (unsigned long long)i);
        rf_fail_expected(err, "%u, as in our text", command->tokens[i]);
        return rf_fail_got(err, "%u", base->tokens[i]);
    }
    return RF_OK;
}

/* How many chunks there are, and how many of them are wanted. */
static rf_status count_chunks(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    uint32_t ctx = (uint32_t)command->model.info.ctx;
    uint64_t chunks = command->tokens ? command->count / ctx : command->base.chunks;
    if (!chunks) {
        rf_fail(err, RF_ERR_USAGE, "-f", "the text is shorter than one chunk");
        rf_fail_expected(err, "at least %u tokens (-c)", ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)command->count);
    }
    if (cli_has(args, CLI_GIVEN_CHUNKS)) {
        if ((uint64_t)args->chunks > chunks)
            cli_note("note: the text has only %llu chunks", (unsigned long long)chunks);
        chunks = RF_MIN(chunks, (uint64_t)args->chunks);
    }
    if (args->kl_base) {
        if (command->tokens && !cli_has(args, CLI_GIVEN_CHUNKS) && chunks < command->base.chunks) {
            rf_fail(err, RF_ERR_USAGE, command->base.path, "made from a longer text");
            rf_fail_expected(err, "at most %llu chunks", (unsigned long long)chunks);
            return rf_fail_got(err, "%u", command->base.chunks);
        }
        chunks = RF_MIN(chunks, command->base.chunks);
    }
    if (chunks > INT32_MAX)
        return rf_fail(err, RF_ERR_USAGE, "-f", "more chunks than can be counted");
    ppl_job_chunks(&command->job, ctx, (uint32_t)chunks, args->kl_own && !args->kl_save);
    return RF_OK;
}

/* The whole text as one chunk, which the ring need not hold. */
static rf_status one_chunk(ppl_command *command, rf_error *err)
{
    uint64_t count = command->count;
    if (count < 4 || count > INT32_MAX) {
        rf_fail(err, RF_ERR_USAGE, "-f", "too %s to be scored", count < 4 ? "short" : "long");
        rf_fail_expected(err, "4 to 2147483647 tokens");
        return rf_fail_got(err, "%llu", (unsigned long long)count);
    }
    ppl_job_chunks(&command->job, (uint32_t)count, 1, false);
    command->job.ring = (uint32_t)command->model.info.ctx;
    command->job.first = (uint32_t)RF_MIN(command->model.info.ctx, count) / 2;
    command->job.early = command->job.first;
    return RF_OK;
}

/* The plan of the reference, and whether the two fit beside each other. */
static rf_status plan_reference(ppl_command *command, rf_options options, rf_error *err)
{
    options.kv_k = options.kv_v = "f32";
    options.kv_layers = options.kv_calibration = NULL;
    rf_status status = rf_plan_make(command->model.file, &options, &command->reference_plan, err);
    if (status)
        return status;
    const rf_plan *ours = rf_model_plan_regions(command->model.plan);
    const rf_plan *theirs = rf_model_plan_regions(command->reference_plan);
    const rf_plan_info *info = &command->model.info;
    uint64_t usable = info->available_bytes - RF_MIN(info->reserve_bytes, info->available_bytes);
    uint64_t both = UINT64_MAX;
    if (rf_add(ours->total_bytes, theirs->anon_bytes, &both) && both <= usable)
        return RF_OK;
    rf_fail(err, RF_ERR_NO_FIT, "--kl",
            "the model and its reference, with f32 keys and values, do not fit together (%s); a "
            "smaller -c or -b takes less",
            info->budget_source);
    rf_fail_expected(err, "at most %llu bytes", (unsigned long long)usable);
    return rf_fail_got(err, "%llu bytes", (unsigned long long)both);
}

static rf_status open_model(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    rf_options options;
    cli_options_for(args, &options);
    if (args->kl_base && !cli_has(args, CLI_GIVEN_CTX))
        options.ctx = command->base.ctx;
    rf_status status = cli_plan_open(&command->model, &options, err);
    if (status)
        return status;
    rf_plan_info info = command->model.info;
    if (info.ctx < 4 || info.ctx > INT32_MAX) {
        rf_fail(err, RF_ERR_USAGE, "-c", "too %s to be scored", info.ctx < 4 ? "short" : "long");
        rf_fail_expected(err, "4 to 2147483647");
        return rf_fail_got(err, "%llu", (unsigned long long)info.ctx);
    }
    if (args->kl_base && info.ctx != command->base.ctx) {
        rf_fail(err, RF_ERR_USAGE, "-c", "another context than the logits file was made with");
        rf_fail_expected(err, "%u", command->base.ctx);
        return rf_fail_got(err, "%llu", (unsigned long long)info.ctx);
    }
    status = args->endless ? one_chunk(command, err) : count_chunks(command, err);
    if (status)
        return status;
    uint32_t rows = ppl_logit_rows(&command->job, info.chunk);
    if (rows != info.logit_rows) { /* the plan must hold the rows that a step will return */
        options.logit_rows = rows;
        rf_model_plan_close(command->model.plan);
        command->model.plan = NULL;
        status = cli_plan_open(&command->model, &options, err);
    }
    if (!status && args->kl_base)
        status = match_base(command, err);
    if (!status && args->kl_own && command->model.info.fits)
        status = plan_reference(command, options, err);
    if (!status)
        status = cli_model_open(&command->model, err);
    if (!status && args->kl_own)
        status = rf_model_open(command->reference_plan, NULL, NULL, &command->reference, err);
    return status;
}

/* Bytes that one position of one slot takes in the ring. */
static double kv_bytes_per_token(const rf_plan *plan, const rf_plan_info *info)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (cli_glob("kv.layers[*].?", plan->rows[i].id))
            bytes += plan->rows[i].bytes;
    }
    return (double)bytes / ((double)info->ctx * info->slots);
}

/* Bits of one stored value: those of the reference are 32. NaN without one. */
static double kv_bits(const ppl_command *command)
{
    if (!command->reference)
        return (double)NAN;
    const rf_plan_info *info = &command->model.info;
    return 32.0 * kv_bytes_per_token(rf_model_plan_regions(command->model.plan), info) /
           kv_bytes_per_token(rf_model_plan_regions(command->reference_plan), info);
}

static void json_kl(rf_writer *writer, const ppl_command *command, const ppl_result *result)
{
    const ppl_figures *figures = &result->figures;
    rf_json_open(writer, "kl", '{');
    rf_json_text(writer, "against", command->reference ? "f32 kv" : "file");
    rf_json_f64(writer, "mean", figures->kl_mean);
    rf_json_f64(writer, "stderr", figures->kl_stderror);
    rf_json_f64(writer, "p99", result->kl_p99);
    rf_json_f64(writer, "p999", result->kl_p999);
    rf_json_f64(writer, "max", result->kl_max);
    rf_json_f64(writer, "top1", figures->top1);
    rf_json_f64(writer, "ppl_ratio", figures->ppl_ratio);
    rf_json_f64(writer, "ppl_ratio_stderr", figures->ppl_ratio_stderror);
    rf_json_close(writer, '}');
}

static void json_depths(rf_writer *writer, const ppl_result *result)
{
    rf_json_open(writer, "by_depth", '[');
    for (uint32_t i = 0; i < result->depth_count; i++) {
        const ppl_depth *depth = &result->depths[i];
        const ppl_figures *figures = &depth->figures;
        rf_json_open(writer, NULL, '{');
        rf_json_u64(writer, "from", depth->from);
        rf_json_u64(writer, "to", depth->to);
        rf_json_u64(writer, "tokens", figures->scored);
        rf_json_f64(writer, "perplexity", figures->perplexity);
        if (result->has_kl) {
            rf_json_f64(writer, "kl_mean", figures->kl_mean);
            rf_json_f64(writer, "kl_stderr", figures->kl_stderror);
            rf_json_f64(writer, "top1", figures->top1);
            rf_json_f64(writer, "ppl_ratio", figures->ppl_ratio);
        }
        rf_json_close(writer, '}');
        json_step(writer);
    }
    rf_json_close(writer, ']');
}

static void print_json(const ppl_command *command, const ppl_result *result)
{
    const rf_plan *plan = rf_model_plan_regions(command->model.plan);
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_f64(writer, "perplexity", result->figures.perplexity);
    rf_json_f64(writer, "stderr", result->figures.stderror);
    rf_json_u64(writer, "chunks", result->chunks);
    rf_json_u64(writer, "ctx", command->model.info.ctx);
    rf_json_u64(writer, "tokens", result->figures.scored);
    rf_json_f64(writer, "bytes_per_token", kv_bytes_per_token(plan, &command->model.info));
    rf_json_f64(writer, "kv_bits", kv_bits(command));
    rf_json_u64(writer, "kv_bytes", plan->pool_bytes[RF_POOL_KV]);
    if (result->has_kl) {
        json_kl(writer, command, result);
    } else {
        rf_json_null(writer, "kl");
    }
    json_depths(writer, result);
    rf_json_close(writer, '}');
    json_end(writer);
}

static void print_depths(const ppl_command *command, const ppl_result *result)
{
    for (uint32_t i = 0; i < result->depth_count; i++) {
        const ppl_depth *depth = &result->depths[i];
        out_print("%-10s  %7u - %-7u  perplexity %.4f", i ? "" : "by depth", depth->from,
                  depth->to - 1, depth->figures.perplexity);
        if (result->has_kl)
            out_print("  kl %.3g +- %.2g, top-1 %.2f %%", depth->figures.kl_mean,
                      depth->figures.kl_stderror, 100.0 * depth->figures.top1);
        out_print("\n");
    }
    if (command->job.ring)
        out_print("%-10s  %7u positions\n", "ring", command->job.ring);
}

static void print_text(const ppl_command *command, const ppl_result *result)
{
    const ppl_figures *figures = &result->figures;
    out_print("perplexity  %.4f +- %.4f  (%llu scored tokens, %u chunk%s of %u)\n",
              figures->perplexity, figures->stderror, (unsigned long long)figures->scored,
              result->chunks, result->chunks == 1 ? "" : "s", command->job.ctx);
    if (result->has_kl) {
        out_print("kl          mean %.3g +- %.2g, 99 %% %.3g, 99.9 %% %.3g, max %.3g\n",
                  figures->kl_mean, figures->kl_stderror, result->kl_p99, result->kl_p999,
                  result->kl_max);
        out_print("top-1       %.3f %% the same\n", 100.0 * figures->top1);
        out_print("ppl ratio   %.6f +- %.6f\n", figures->ppl_ratio, figures->ppl_ratio_stderror);
    }
    if (command->reference)
        out_print(
            "kv          %.2f bits a value, %s in all; the reference has 32 bits\n",
            kv_bits(command),
            cli_size(rf_model_plan_regions(command->model.plan)->pool_bytes[RF_POOL_KV]).text);
    print_depths(command, result);
}

/* What cannot be asked for together. */
static rf_status refuse_pairs(const cli_args *args, rf_error *err)
{
    if (args->kl_base && args->kl_save && strcmp(args->kl_base, args->kl_save) == 0)
        return rf_fail(err, RF_ERR_USAGE, "--kl-save", "the same file as --kl-base");
    if (args->kl_own && args->kl_base)
        return rf_fail(err, RF_ERR_USAGE, "--kl",
                       "compares with f32 keys and values, --kl-base with a file: give one");
    if (args->endless && (args->kl_base || args->kl_save))
        return rf_fail(err, RF_ERR_USAGE, "--endless",
                       "a logits file has chunks, an endless text is one sequence");
    if (args->endless && cli_has(args, CLI_GIVEN_CHUNKS))
        return rf_fail(err, RF_ERR_USAGE, "--chunks", "an endless text is one sequence");
    return RF_OK;
}

static rf_status ppl_steps(ppl_command *command, rf_error *err)
{
    const cli_args *args = command->args;
    rf_status status = refuse_pairs(args, err);
    if (!status)
        status = cli_file_open(args, &command->model, err);
    if (!status && args->kl_base)
        status = kld_open(&command->base, args->kl_base, err);
    if (!status)
        status = find_tokens(command, err);
    if (!status)
        status = open_model(command, err);
    if (status)
        return status;
    ppl_job *job = &command->job;
    job->tokens = command->tokens ? command->tokens : command->base.tokens;
    job->base = args->kl_base ? &command->base : NULL;
    job->reference = command->reference;
    if (args->kl_save) {
        command->save.ctx = job->ctx;
        command->save.chunks = job->chunks;
        command->save.vocab_count = command->model.info.vocab_count;
        status = kld_create(&command->save, args->kl_save, job->tokens, err);
        if (status)
            return status;
        job->save = &command->save;
    }
    ppl_result result;
    status = ppl_run(&command->model, job, &result, err);
    if (!status)
        status = kld_close(&command->save, err);
    if (status)
        return status;
    if (args->json) {
        print_json(command, &result);
    } else {
        print_text(command, &result);
    }
    out_flush();
    cli_memory_summary(&command->model);
    if (command->reference)
        cli_note("memory: the reference under f32 keys and values, planned %s beside it",
                 cli_size(rf_model_plan_regions(command->reference_plan)->anon_bytes).text);
    return out_status(err);
}

rf_status cmd_ppl(const cli_args *args, rf_error *err)
{
    ppl_command command = {.args = args};
    rf_status status = ppl_steps(&command, err);
    kld_close(&command.save, NULL);
    kld_close(&command.base, NULL);
    rf_model_close(command.reference, NULL);
    rf_model_plan_close(command.reference_plan);
    cli_model_close(&command.model);
    free(command.tokens);
    cli_bytes_free(&command.text);
    return status;
}
