/* runtime/plan.c: composes the plan of a run: every floor appends its own rows, this file only says
 * in which order and for what options. Nothing is held but the plan itself.
 */
#include "runtime/runtime.h"

#include <string.h>

#define SLOTS_MAX 4096u
#define TINY_LAYER_BYTES                                                                           \
    (512u * 1024u)        /* below it a second thread costs more than it brings
                                           (measured: a barrier is 0.3 us, such a layer some 10) */
#define LIBC_BYTES 16384u /* glibc: about 300 bytes a thread, and stdio's buffers (measured) */

static const struct {
    const char *name;
    uint64_t reserve_bytes;
    uint32_t chunk;
} profiles[] = {{"desktop", 512ull << 20, 256},
                {"mobile-2gb", 384ull << 20, 64},
                {"edge", 64ull << 20, 64},
                {"server", 1024ull << 20, 512}};

static const char *const profile_names = "desktop mobile-2gb edge server";

void rf_options_init(rf_options *options)
{
    *options = (rf_options){.struct_size = sizeof *options,
                            .slots = 1,
                            .logit_rows = 1,
                            .text_bytes = 64 * 1024,
                            .cpu_mask = RF_CPU_ALL,
                            .event_capacity = 1024,
                            .kv_recent = 2};
}

static bool same_text(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

__attribute__((format(printf, 2, 3))) static void add_note(rf_model_plan *plan, const char *format,
                                                           ...)
{
    if (plan->info.note_count == RF_NOTES_MAX)
        return;
    va_list args;
    va_start(args, format);
    rf_writer writer = rf_writer_make(plan->notes[plan->info.note_count++], sizeof plan->notes[0]);
    rf_write_v(&writer, format, args);
    va_end(args);
}

/* ---- options ----------------------------------------------------------------------------- */

static rf_status resolve_ctx(rf_model_plan *plan)
{
    uint64_t trained = plan->config->train_ctx;
    uint64_t ctx = plan->options.ctx;
    if (ctx == RF_CTX_DEFAULT)
        ctx = RF_MIN(trained, 4096u);
    if (ctx == RF_CTX_TRAINED)
        ctx = trained;
    plan->info.ctx = ctx;
    plan->info.train_ctx = trained;
    if (ctx > trained) {
        add_note(plan, "ctx %llu is above the %llu positions that the model was trained on",
                 (unsigned long long)ctx, (unsigned long long)trained);
    }
    return RF_OK;
}

static rf_status resolve_chunk(rf_model_plan *plan, uint32_t profile_chunk, rf_error *err)
{
    uint64_t ctx = plan->info.ctx;
    uint32_t chunk = plan->options.chunk;
    if (chunk == 0) {
        /* What a ring that wraps shows is a chunk less than what it holds. */
        uint64_t most = plan->options.endless ? RF_MAX(ctx / 4, (uint64_t)1) : ctx;
        chunk = (uint32_t)RF_MIN((uint64_t)profile_chunk, most);
    }
    if (chunk > ctx) {
        rf_fail(err, RF_ERR_USAGE, "chunk", "a prompt chunk must fit into the ring");
        rf_fail_expected(err, "at most %llu", (unsigned long long)ctx);
        return rf_fail_got(err, "%u", chunk);
    }
    const uint32_t draft = plan->options.draft;
    if (draft >= chunk) {
        rf_fail(err, RF_ERR_USAGE, "draft", "a draft and the token before it must fit in a chunk");
        rf_fail_expected(err, "below %u", chunk);
        return rf_fail_got(err, "%u", draft);
    }
    plan->info.chunk = chunk;
    plan->info.logit_rows = RF_MIN(RF_MAX(plan->options.logit_rows, draft + 1), chunk);
    return RF_OK;
}

static uint32_t resolve_threads(const rf_model_plan *plan)
{
    if (plan->options.threads)
        return plan->options.threads;
    uint64_t layer_bytes = 0;
    for (uint32_t slot = RF_W_MODEL_COUNT; slot < RF_W_COUNT; slot++) {
        const rf_weight *weight = rf_weight_at(plan->weights, 0, (rf_weight_slot)slot);
        if (weight->tensor)
            layer_bytes += weight->tensor->bytes;
    }
    if (layer_bytes < TINY_LAYER_BYTES)
        return 1;
    return RF_MIN(rf_os_processor_count(), RF_WORKERS_MAX);
}

static rf_status resolve_profile(rf_model_plan *plan, uint32_t *chunk, rf_error *err)
{
    const char *name = plan->options.profile ? plan->options.profile : profiles[0].name;
    for (size_t i = 0; i < RF_ARRAY_COUNT(profiles); i++) {
        if (!same_text(name, profiles[i].name))
            continue;
        plan->info.reserve_bytes = profiles[i].reserve_bytes;
        *chunk = profiles[i].chunk;
        return RF_OK;
    }
    rf_fail(err, RF_ERR_USAGE, "profile", "unknown profile");
    rf_fail_expected(err, "one of: %s", profile_names);
    return rf_fail_got(err, "%s", name);
}

/* Whether 16 bits cost no time in decode. The machine decides, not the sets that an option leaves
 * of it: a mask changes no text. */
static uint32_t free_act(void)
{
    return rf_cpu_detect() & RF_CPU_AVX512 ? 16 : 8;
}

static rf_act act_of(uint32_t bits)
{
    return bits == 8 ? RF_ACT_INT8 : RF_ACT_INT16;
}

static rf_status check_act(const char *option, uint32_t bits, rf_error *err)
{
    if (bits == 8 || bits == 16)
        return RF_OK;
    rf_fail(err, RF_ERR_USAGE, option, "activations have no such precision");
    rf_fail_expected(err, "8 or 16");
    return rf_fail_got(err, "%u", bits);
}

static rf_status resolve_options(rf_model_plan *plan, rf_error *err)
{
    const rf_options *options = &plan->options;
    uint32_t profile_chunk = 0;
    rf_status status = resolve_profile(plan, &profile_chunk, err);
    if (status)
        return status;
    if (options->slots == 0 || options->slots > SLOTS_MAX) {
        rf_fail(err, RF_ERR_USAGE, "slots", "out of range");
        rf_fail_expected(err, "1 to %u", SLOTS_MAX);
        return rf_fail_got(err, "%u", options->slots);
    }
    if (options->threads > RF_WORKERS_MAX) {
        rf_fail(err, RF_ERR_USAGE, "threads", "out of range");
        rf_fail_expected(err, "1 to %u", RF_WORKERS_MAX);
        return rf_fail_got(err, "%u", options->threads);
    }
    rf_plan_info *info = &plan->info;
    info->act_prompt = options->act_prompt ? options->act_prompt : 8;
    info->act_generation = options->act_generation ? options->act_generation : free_act();
    status = check_act("act_prompt", info->act_prompt, err);
    if (status == RF_OK)
        status = check_act("act_generation", info->act_generation, err);
    if (status)
        return status;
    plan->info.slots = options->slots;
    plan->info.threads = resolve_threads(plan);
    status = resolve_ctx(plan);
    if (status == RF_OK)
        status = resolve_chunk(plan, profile_chunk, err);
    if (status == RF_OK)
        status = rf_plan_kv(plan, err);
    plan->shape = (rf_step_shape){.chunk = plan->info.chunk,
                                  .logit_rows = plan->info.logit_rows,
                                  .workers = plan->info.threads,
                                  .slots = plan->info.slots,
                                  .sinks = plan->options.endless ? plan->options.sinks : 0,
                                  .capacity = plan->info.ctx,
                                  .act = {act_of(info->act_prompt), act_of(info->act_generation)}};
    rf_kernels_pick(&plan->kernels, options->cpu_mask);
    return status;
}

/* ---- rows -------------------------------------------------------------------------------- */

static rf_status add_file_row(rf_plan *plan, const char *id, const char *source, const char *format,
                              rf_pool pool, uint64_t offset, uint64_t bytes, rf_error *err)
{
    rf_plan_row row = {.scope = RF_SCOPE_MODEL,
                       .domain = RF_DOMAIN_FILE,
                       .pool = pool,
                       .bytes = bytes,
                       .align = 1,
                       .offset = offset,
                       .first_op = -1,
                       .last_op = -1};
    rf_print(row.id, sizeof row.id, "%s", id);
    rf_print(row.source, sizeof row.source, "%s", source);
    rf_print(row.format, sizeof row.format, "%s", format);
    return rf_plan_add(plan, &row, err);
}

static rf_status add_worker_rows(rf_model_plan *plan, rf_error *err)
{
    rf_plan *regions = &plan->regions;
    uint32_t workers = plan->info.threads;
    rf_status status = rf_plan_add_region(regions, "workers.team", "bytes", RF_SCOPE_MODEL,
                                          RF_POOL_WORKERS, rf_team_bytes(workers), 1, err);
    for (uint32_t i = 1; status == RF_OK && i < workers; i++) {
        rf_plan_row row = {.scope = RF_SCOPE_MODEL,
                           .domain = RF_DOMAIN_ANON,
                           .pool = RF_POOL_WORKERS,
                           .bytes = RF_WORKER_STACK_BYTES,
                           .align = rf_os_page_bytes(),
                           .first_op = -1,
                           .last_op = -1};
        rf_print(row.id, sizeof row.id, "workers.stack[%u]", i);
        rf_print(row.format, sizeof row.format, "bytes");
        status = rf_plan_add(regions, &row, err);
    }
    return status;
}

static rf_status add_calibration_rows(rf_model_plan *plan, rf_error *err)
{
    uint64_t sums = rf_sums_bytes(plan->config) / sizeof(double);
    uint64_t floats = rf_calibration_table_bytes(plan->config) / sizeof(float);
    rf_status status = rf_plan_add_region(&plan->regions, "calibration.sums", "f64", RF_SCOPE_MODEL,
                                          RF_POOL_TABLES, sums, sizeof(double), err);
    if (status)
        return status;
    return rf_plan_add_region(&plan->regions, "calibration.table", "f32", RF_SCOPE_MODEL,
                              RF_POOL_TABLES, floats, sizeof(float), err);
}

/* The model's own tables, beside those of the floors below. */
static rf_status add_table_rows(rf_model_plan *plan, rf_error *err)
{
    const struct {
        const char *id, *format;
        rf_scope_kind scope;
        rf_pool pool;
        uint64_t count, unit_bytes;
    } rows[] = {
        {"model.rope", "f64", RF_SCOPE_MODEL, RF_POOL_TABLES, plan->config->rope.dims / 2,
         sizeof(double)},
        {"sample.state", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES, plan->info.slots,
         sizeof(rf_sampler)},
        {"sample.candidates", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES, plan->config->vocab_count,
         sizeof(rf_candidate)},
        {"model.slots", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES, plan->info.slots, 1},
        {"model.items", "bytes", RF_SCOPE_MODEL, RF_POOL_TABLES, plan->info.chunk,
         sizeof(rf_step_item)},
        {"model.state", "bytes", RF_SCOPE_AMBIENT, RF_POOL_OTHER, 1, sizeof(struct rf_model)},
        {"plan.file", "bytes", RF_SCOPE_AMBIENT, RF_POOL_OTHER, plan->file->reserved_bytes, 1},
        {"plan.rows", "bytes", RF_SCOPE_AMBIENT, RF_POOL_OTHER, plan->reserved_bytes, 1},
        {"process.libc", "bytes", RF_SCOPE_AMBIENT, RF_POOL_OTHER, LIBC_BYTES, 1},
    };
    if (plan->options.calibrate) {
        rf_status status = add_calibration_rows(plan, err);
        if (status)
            return status;
    }
    for (size_t i = 0; i < RF_ARRAY_COUNT(rows); i++) {
        rf_status status =
            rf_plan_add_region(&plan->regions, rows[i].id, rows[i].format, rows[i].scope,
                               rows[i].pool, rows[i].count, rows[i].unit_bytes, err);
        if (status)
            return status;
    }
    return RF_OK;
}

static rf_status compose(rf_model_plan *plan, rf_error *err)
{
    const rf_gguf *gguf = &plan->file->gguf;
    rf_plan *regions = &plan->regions;
    const rf_gguf_tensor *freqs = plan->config->rope.freqs;
    rf_status status = add_file_row(regions, "model.header", "", "bytes", RF_POOL_OTHER, 0,
                                    gguf->data_offset, err);
    if (status == RF_OK)
        status = rf_weights_plan(regions, plan->config, plan->weights, err);
    if (status == RF_OK && freqs) {
        status = add_file_row(regions, "model.rope_freqs.weight", "rope_freqs.weight", "f32",
                              RF_POOL_WEIGHTS, freqs->offset, freqs->bytes, err);
    }
    if (status == RF_OK)
        status = rf_kv_plan(regions, &plan->kv, err);
    if (status == RF_OK)
        status = rf_text_plan(regions, &plan->vocab, &plan->text, err);
    if (status == RF_OK)
        status = add_table_rows(plan, err);
    if (status == RF_OK)
        status = rf_draft_plan(plan, err);
    if (status == RF_OK)
        status = add_worker_rows(plan, err);
    if (status == RF_OK) {
        status =
            rf_recipe_plan(regions, plan->recipe, plan->config, plan->weights, &plan->shape, err);
    }
    if (status == RF_OK)
        status = rf_trace_plan(regions, plan->options.event_capacity, err);
    if (status == RF_OK) {
        status = rf_plan_layout(regions, RF_MAX(gguf->size, gguf->data_end), err);
    }
    return status;
}

/* ---- make -------------------------------------------------------------------------------- */

/* Tensors that the recipe has no use for. */
static void list_unknown(rf_model_plan *plan)
{
    const rf_gguf *gguf = &plan->file->gguf;
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        bool used = &gguf->tensors[i] == plan->config->rope.freqs;
        for (uint32_t w = 0; !used && w < rf_weight_table_count(plan->config); w++) {
            used = plan->weights[w].tensor == &gguf->tensors[i];
        }
        if (!used)
            plan->unknown[plan->info.unknown_tensor_count++] = i;
    }
}

static rf_status measure_text(rf_model_plan *plan, rf_error *err)
{
    const rf_gguf *gguf = &plan->file->gguf;
    uint64_t text_bytes = plan->options.text_bytes;
    if (plan->options.calibrate)
        text_bytes = RF_MAX(text_bytes, rf_calibration_text_bytes);
    plan->options.text_bytes = text_bytes;
    if (!rf_gguf_find(gguf, "tokenizer.ggml.model") &&
        !rf_gguf_find(gguf, "tokenizer.ggml.tokens")) {
        add_note(plan, "the file has no vocabulary: no text can be given or written");
        return RF_OK;
    }
    rf_status status = rf_vocab_measure(gguf, &plan->vocab, err);
    if (status)
        return status;
    return rf_text_shape_of(&plan->vocab, plan->options.text_bytes, &plan->text, err);
}

/* The plan's own parts behind its struct, in one reservation. Sizes are below 2^40: the counts were
 * checked against the file and RF_LAYERS_MAX. */
static uint64_t lay_parts(rf_model_plan *plan, uint32_t layer_count, uint32_t tensor_count,
                          uint32_t row_capacity)
{
    uint32_t weight_count = RF_W_MODEL_COUNT + layer_count * RF_W_LAYER_COUNT;
    uint64_t bytes[] = {sizeof *plan,
                        sizeof(rf_config),
                        weight_count * sizeof(rf_weight),
                        layer_count * sizeof(rf_kv_layer),
                        row_capacity * sizeof(rf_plan_row),
                        tensor_count * sizeof(uint32_t)};
    uint64_t at[RF_ARRAY_COUNT(bytes)], total = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(bytes); i++) {
        at[i] = total;
        total += (bytes[i] + RF_CACHE_LINE - 1) & ~(uint64_t)(RF_CACHE_LINE - 1);
    }
    if (plan) {
        uint8_t *base = (uint8_t *)plan;
        plan->config = (rf_config *)(void *)(base + at[1]);
        plan->weights = (rf_weight *)(void *)(base + at[2]);
        plan->kv_layers = (rf_kv_layer *)(void *)(base + at[3]);
        plan->unknown = (uint32_t *)(void *)(base + at[5]);
        rf_plan_init(&plan->regions, (rf_plan_row *)(void *)(base + at[4]), row_capacity);
    }
    return total;
}

static rf_status fill_plan(rf_model_plan *plan, rf_error *err)
{
    const rf_gguf *gguf = &plan->file->gguf;
    rf_status status = rf_weights_bind(gguf, plan->config, plan->weights, err);
    if (status)
        return status;
    plan->recipe = rf_recipe_of(plan->config->architecture);
    rf_print(plan->info.architecture, sizeof plan->info.architecture, "%s",
             plan->config->architecture);
    rf_print(plan->info.name, sizeof plan->info.name, "%s", plan->config->name);
    plan->info.layers = plan->config->layer_count;
    plan->info.vocab_count = plan->config->vocab_count;
    plan->info.data_missing = gguf->data_missing;
    if (gguf->data_missing) {
        add_note(plan, "the file ends at %llu of %llu bytes: it can be planned, but not opened",
                 (unsigned long long)gguf->size, (unsigned long long)gguf->data_end);
    }
    for (uint32_t i = 0; i < plan->config->note_count; i++) {
        add_note(plan, "%s", plan->config->notes[i]);
    }
    status = resolve_options(plan, err);
    if (status == RF_OK)
        status = measure_text(plan, err);
    if (status == RF_OK)
        status = compose(plan, err);
    if (status)
        return status;
    list_unknown(plan);
    rf_budget_judge(plan);
    return RF_OK;
}

rf_status rf_plan_compute(const rf_file *file, const rf_options *options, rf_model_plan **out,
                          rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (options->struct_size != sizeof *options) {
        return rf_fail(err, RF_ERR_USAGE, "options", "struct_size is not that of this library");
    }
    rf_config config;
    rf_status status = rf_config_read(&file->gguf, &config, err);
    if (status)
        return status;
    uint32_t layers = config.layer_count;
    /* Tensors, two sides of KV a layer, stacks, buffers, tables: 64 covers what is not counted. */
    uint32_t row_capacity =
        RF_W_MODEL_COUNT + layers * (RF_W_LAYER_COUNT + 2) + RF_WORKERS_MAX + 64;
    uint64_t bytes = lay_parts(NULL, layers, file->gguf.tensor_count, row_capacity);
    void *memory = NULL;
    status = rf_os_reserve(bytes, &memory, err);
    if (status)
        return status;
    rf_os_touch(memory, bytes); /* a row of the plan as well: it is resident from now on */
    rf_model_plan *plan = memory;
    plan->file = file;
    plan->reserved_bytes = bytes;
    plan->options = *options;
    lay_parts(plan, layers, file->gguf.tensor_count, row_capacity);
    *plan->config = config;
    status = fill_plan(plan, err);
    if (status) {
        rf_model_plan_close(plan);
        return status;
    }
    *out = plan;
    return RF_OK;
}

rf_status rf_plan_make(const rf_file *file, const rf_options *options, rf_model_plan **out,
                       rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_model_plan *plan = NULL;
    rf_status status = rf_plan_compute(file, options, &plan, err);
    if (status)
        return status;
    if (!plan->info.fits)
        rf_budget_suggest(plan);
    *out = plan;
    return RF_OK;
}

void rf_model_plan_close(rf_model_plan *plan)
{
    if (plan)
        rf_os_release(plan, plan->reserved_bytes);
}

const rf_plan *rf_model_plan_regions(const rf_model_plan *plan)
{
    return &plan->regions;
}

void rf_model_plan_describe(const rf_model_plan *plan, rf_plan_info *out)
{
    *out = plan->info;
}

bool rf_model_plan_op_name(const rf_model_plan *plan, uint32_t op, char *text, size_t capacity)
{
    const rf_recipe *recipe = plan->recipe;
    if (op >= recipe->before_count + recipe->layer_count + recipe->after_count)
        return false;
    rf_recipe_op_name(recipe, 1, op, text, capacity);
    return true;
}

const char *rf_model_plan_note(const rf_model_plan *plan, uint32_t index)
{
    return index < plan->info.note_count ? plan->notes[index] : NULL;
}

bool rf_model_plan_unknown_tensor(const rf_model_plan *plan, uint32_t index, char *name,
                                  size_t capacity)
{
    if (index >= plan->info.unknown_tensor_count)
        return false;
    rf_text text = plan->file->gguf.tensors[plan->unknown[index]].name;
    rf_print(name, capacity, "%.*s", (int)text.length, text.bytes);
    return true;
}

bool rf_model_plan_suggestion(const rf_model_plan *plan, uint32_t index, rf_suggestion *out)
{
    if (index >= plan->info.suggestion_count)
        return false;
    *out = plan->suggestions[index];
    return true;
}
