/* cli/cmd_plan.c: `plan`: what a run will hold, as a table, as a list of regions, or as JSON. */
#include "cli.h"

#include <string.h>

static void print_model(const cli_model *model)
{
    const rf_plan_info *info = &model->info;
    out_print("model    %s\n", model->file_info.name);
    out_print("         %s%s%s%s, %u layers, trained for %llu tokens, file %s\n",
              info->architecture, info->name[0] ? ", " : "", info->name, "", info->layers,
              (unsigned long long)info->train_ctx, cli_size(model->file_info.bytes).text);
    out_print("options  %s\n\n", cli_plan_options(info).text);
}

static void print_line(const char *name, const char *regions, uint64_t bytes, const char *where)
{
    out_row("%-10s %8s %16llu %12s  %s", name, regions, (unsigned long long)bytes,
            cli_size(bytes).text, where);
}

static void print_pools(const rf_plan *plan)
{
    static const char *const where[RF_POOL_COUNT] = {
        [RF_POOL_WEIGHTS] = "used where they lie in the file",
        [RF_POOL_KV] = "the ring of keys and values",
        [RF_POOL_FORWARD] = "one slab, reset at each step",
        [RF_POOL_TABLES] = "vocabulary and model tables",
        [RF_POOL_WORKERS] = "stacks of the threads",
        [RF_POOL_OTHER] = "trace, text, padding, libc",
    };
    out_row("%-10s %8s %16s", "pool", "regions", "bytes");
    for (uint32_t pool = 0; pool < RF_POOL_COUNT; pool++) {
        uint32_t count = 0;
        for (uint32_t i = 0; i < plan->row_count; i++)
            count += plan->rows[i].pool == (rf_pool)pool;
        char regions[16];
        snprintf(regions, sizeof regions, "%u", count);
        print_line(rf_pool_name((rf_pool)pool), regions, plan->pool_bytes[pool], where[pool]);
    }
    print_line("total", "", plan->total_bytes, "");
    print_line("  anon", "", plan->anon_bytes, "pages of our own");
    print_line("  file", "", plan->file_bytes, "pages of the model file, shared and reclaimable");
    out_print("\n");
}

static void print_verdict(const cli_model *model)
{
    const rf_plan_info *info = &model->info;
    out_print("budget   %s available (%s), %s kept back\n", cli_size(info->available_bytes).text,
              info->budget_source, cli_size(info->reserve_bytes).text);
    out_print("verdict  %s\n", info->fits ? "fits" : "does not fit");
    rf_suggestion suggestion;
    for (uint32_t i = 0; rf_model_plan_suggestion(model->plan, i, &suggestion); i++)
        out_print("try      %-20s saves %s, costs: %s\n", suggestion.option,
                  cli_size(suggestion.saves_bytes).text, suggestion.cost);
    for (uint32_t i = 0; i < info->note_count; i++)
        out_print("note     %s\n", rf_model_plan_note(model->plan, i));
    char name[256];
    for (uint32_t i = 0; rf_model_plan_unknown_tensor(model->plan, i, name, sizeof name); i++)
        out_print("unknown  tensor %s\n", name);
}

static void print_rows(const rf_plan *plan, const char *glob)
{
    out_row("%-44s %-7s %-4s %-6s %14s %12s %s", "region", "scope", "in", "format", "bytes",
            "offset", "ops");
    for (uint32_t i = 0; i < plan->row_count; i++) {
        const rf_plan_row *row = &plan->rows[i];
        if (!cli_glob(glob, row->id))
            continue;
        char ops[32] = "";
        if (row->first_op >= 0)
            snprintf(ops, sizeof ops, "%d-%d", row->first_op, row->last_op);
        out_row("%-44s %-7s %-4s %-6s %14llu %12llu %s", row->id, rf_scope_kind_name(row->scope),
                rf_domain_name(row->domain), row->format, (unsigned long long)row->bytes,
                (unsigned long long)row->offset, ops);
    }
}

static void json_row(rf_writer *writer, const rf_plan_row *row)
{
    rf_json_open(writer, NULL, '{');
    rf_json_text(writer, "id", row->id);
    rf_json_text(writer, "scope", rf_scope_kind_name(row->scope));
    rf_json_text(writer, "domain", rf_domain_name(row->domain));
    rf_json_text(writer, "pool", rf_pool_name(row->pool));
    rf_json_text(writer, "format", row->format);
    rf_json_u64(writer, "bytes", row->bytes);
    rf_json_u64(writer, "align", row->align ? row->align : RF_REGION_ALIGN);
    rf_json_u64(writer, "offset", row->offset);
    rf_json_i64(writer, "first_op", row->first_op);
    rf_json_i64(writer, "last_op", row->last_op);
    rf_json_text(writer, "source", row->source);
    rf_json_close(writer, '}');
    json_step(writer);
}

static void json_head(rf_writer *writer, const cli_model *model)
{
    const rf_plan_info *info = &model->info;
    rf_json_u64(writer, "schema", 1);
    rf_json_open(writer, "model", '{');
    rf_json_text(writer, "file", model->file_info.name);
    rf_json_u64(writer, "file_bytes", model->file_info.bytes);
    rf_json_text(writer, "architecture", info->architecture);
    rf_json_text(writer, "name", info->name);
    rf_json_u64(writer, "layers", info->layers);
    rf_json_u64(writer, "train_ctx", info->train_ctx);
    rf_json_bool(writer, "data_missing", info->data_missing);
    rf_json_close(writer, '}');
    json_plan_options(writer, info);
}

/* Names of the ops that first_op and last_op number. */
static void json_ops(rf_writer *writer, const cli_model *model)
{
    char name[128];
    rf_json_open(writer, "ops", '[');
    for (uint32_t op = 0; rf_model_plan_op_name(model->plan, op, name, sizeof name); op++) {
        rf_json_text(writer, NULL, name);
        json_step(writer);
    }
    rf_json_close(writer, ']');
}

static void json_totals(rf_writer *writer, const rf_plan *plan)
{
    rf_json_open(writer, "totals", '{');
    for (uint32_t pool = 0; pool < RF_POOL_COUNT; pool++) {
        char key[32];
        snprintf(key, sizeof key, "%s_bytes", rf_pool_name((rf_pool)pool));
        rf_json_u64(writer, key, plan->pool_bytes[pool]);
    }
    rf_json_u64(writer, "anon_bytes", plan->anon_bytes);
    rf_json_u64(writer, "file_bytes", plan->file_bytes);
    rf_json_u64(writer, "total_bytes", plan->total_bytes);
    rf_json_close(writer, '}');
}

static void json_tail(rf_writer *writer, const cli_model *model)
{
    const rf_plan_info *info = &model->info;
    rf_json_open(writer, "budget", '{');
    rf_json_text(writer, "source", info->budget_source);
    rf_json_u64(writer, "available_bytes", info->available_bytes);
    rf_json_u64(writer, "reserve_bytes", info->reserve_bytes);
    rf_json_bool(writer, "fits", info->fits);
    rf_json_close(writer, '}');
    rf_suggestion suggestion;
    rf_json_open(writer, "suggestions", '[');
    for (uint32_t i = 0; rf_model_plan_suggestion(model->plan, i, &suggestion); i++) {
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "option", suggestion.option);
        rf_json_u64(writer, "saves_bytes", suggestion.saves_bytes);
        rf_json_text(writer, "cost", suggestion.cost);
        rf_json_close(writer, '}');
    }
    rf_json_close(writer, ']');
    rf_json_open(writer, "unknown_tensors", '[');
    char name[256];
    for (uint32_t i = 0; rf_model_plan_unknown_tensor(model->plan, i, name, sizeof name); i++) {
        rf_json_text(writer, NULL, name);
        json_step(writer);
    }
    rf_json_close(writer, ']');
    rf_json_open(writer, "notes", '[');
    for (uint32_t i = 0; i < info->note_count; i++)
        rf_json_text(writer, NULL, rf_model_plan_note(model->plan, i));
    rf_json_close(writer, ']');
}

static void print_json(const cli_args *args, const cli_model *model)
{
    const rf_plan *plan = rf_model_plan_regions(model->plan);
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    json_head(writer, model);
    rf_json_open(writer, "rows", '[');
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (!args->list || cli_glob(args->list, plan->rows[i].id))
            json_row(writer, &plan->rows[i]);
    }
    rf_json_close(writer, ']');
    json_ops(writer, model);
    json_totals(writer, plan);
    json_tail(writer, model);
    rf_json_close(writer, '}');
    json_end(writer);
}

static rf_status plan_steps(const cli_args *args, cli_model *model, rf_error *err)
{
    rf_options options;
    cli_options_for(args, &options);
    model->only_plan = true;
    rf_status status = cli_file_open(args, model, err);
    if (!status && args->solve)
        status = rf_plan_solve_ctx(model->file, &options, &options.ctx, err);
    if (!status)
        status = cli_plan_open(model, &options, err);
    if (status)
        return status;
    if (args->json) {
        print_json(args, model);
    } else if (args->list) {
        print_rows(rf_model_plan_regions(model->plan), args->list);
    } else {
        if (args->solve)
            out_print("solved   ctx %llu is the largest that fits\n",
                      (unsigned long long)options.ctx);
        print_model(model);
        print_pools(rf_model_plan_regions(model->plan));
        print_verdict(model);
    }
    out_flush();
    status = out_status(err);
    if (!status && !model->info.fits) {
        cli_note("the plan does not fit: %s planned, %s available, %s kept back",
                 cli_size(rf_model_plan_regions(model->plan)->total_bytes).text,
                 cli_size(model->info.available_bytes).text,
                 cli_size(model->info.reserve_bytes).text);
        status = RF_ERR_NO_FIT; /* all is said: only the exit code is left */
    }
    return status;
}

rf_status cmd_plan(const cli_args *args, rf_error *err)
{
    cli_model model = {0};
    rf_status status = plan_steps(args, &model, err);
    cli_model_close(&model);
    return status;
}
