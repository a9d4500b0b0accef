/* runtime/engine.c: opens exactly what was planned, and steps.
 *
 * Open takes every row of the plan once, seals, reads the weights' pages, starts the team; from
 * then on nothing is taken until close. A failure on the way gives back what was taken so far: the
 * close function is safe on a half-built model.
 */
#include "runtime/runtime.h"

#include <string.h>

/* ---- open -------------------------------------------------------------------------------- */

static rf_status take(rf_scope *scope, const char *id, const char *format, uint64_t count,
                      uint64_t unit_bytes, void *out, rf_error *err)
{
    rf_extent extent = {format, count, unit_bytes};
    void *region = NULL;
    rf_status status = rf_scope_take(scope, id, &extent, &region, err);
    if (status == RF_OK)
        memcpy(out, &region, sizeof region);
    return status;
}

static rf_status adopt_file(rf_model *model, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    const rf_gguf *gguf = &plan->file->gguf;
    rf_extent header = {"bytes", gguf->data_offset, 1};
    rf_status status =
        rf_scope_adopt(&model->model_scope, "model.header", &header, gguf->data, err);
    if (status)
        return status;
    const rf_gguf_tensor *freqs = plan->config->rope.freqs;
    if (freqs) {
        rf_extent extent = {"f32", freqs->shape[0], sizeof(float)};
        status = rf_scope_adopt(&model->model_scope, "model.rope_freqs.weight", &extent,
                                gguf->data + freqs->offset, err);
        if (status)
            return status;
    }
    return rf_weights_adopt(&model->model_scope, plan->config, plan->weights, err);
}

static rf_status start_team(rf_model *model, rf_error *err)
{
    rf_scope *scope = &model->model_scope;
    uint32_t workers = model->plan->info.threads;
    void *memory = NULL, *stacks[RF_WORKERS_MAX] = {0};
    rf_status status =
        take(scope, "workers.team", "bytes", rf_team_bytes(workers), 1, &memory, err);
    for (uint32_t i = 1; status == RF_OK && i < workers; i++) {
        char id[RF_ID_BYTES];
        rf_print(id, sizeof id, "workers.stack[%u]", i);
        status = take(scope, id, "bytes", 1, RF_WORKER_STACK_BYTES, &stacks[i], err);
    }
    if (status)
        return status;
    return rf_team_start(memory, workers, stacks, &model->team, err);
}

static rf_status check_frequencies(const rf_config *config, const double *frequencies,
                                   rf_error *err)
{
    for (uint32_t i = 0; i < config->rope.dims / 2; i++) {
        if (frequencies[i] > 0 && frequencies[i] < 1e6)
            continue;
        const char *where = config->rope.freqs ? "rope_freqs.weight" : "rope.freq_base";
        rf_fail(err, RF_ERR_BAD_MODEL, where, "frequency %u of RoPE is out of range", i);
        return rf_fail_got(err, "%g", frequencies[i]);
    }
    return RF_OK;
}

static rf_status take_rope(rf_model *model, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    rf_scope *scope = &model->model_scope;
    uint32_t pairs = plan->config->rope.dims / 2;
    double *frequencies = NULL;
    rf_status status = take(scope, "model.rope", "f64", pairs, sizeof(double), &frequencies, err);
    if (status)
        return status;
    rf_rope_frequencies(&plan->config->rope, &plan->file->gguf, frequencies);
    if ((status = check_frequencies(plan->config, frequencies, err)))
        return status;
    model->network.rope_frequencies = frequencies;
    return RF_OK;
}

static rf_status open_kv(rf_model *model, rf_error *err)
{
    rf_kv_config config = model->plan->kv;
    config.rope.frequencies = model->network.rope_frequencies;
    rf_status status = rf_kv_open(&model->model_scope, &config, &model->kv, err);
    if (status)
        return status;
    rf_kv_set_cpu(model->kv, model->plan->options.cpu_mask);
    /* Values take the bases of their scales from it, also when no keys need it. */
    const char *path = model->plan->calibration;
    return config.calibrated || path[0] ? rf_calibration_load(model, path, err) : RF_OK;
}

static rf_status take_calibration(rf_model *model, rf_error *err)
{
    const rf_config *config = model->plan->config;
    if (!model->plan->options.calibrate)
        return RF_OK;
    rf_status status =
        take(&model->model_scope, "calibration.sums", "f64", rf_sums_bytes(config) / sizeof(double),
             sizeof(double), &model->sums, err);
    if (status)
        return status;
    return take(&model->model_scope, "calibration.table", "f32",
                rf_calibration_table_bytes(config) / sizeof(float), sizeof(float),
                &model->calibration, err);
}

static rf_status take_tables(rf_model *model, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    rf_scope *scope = &model->model_scope;
    uint32_t slots = plan->info.slots;
    rf_status status =
        take(scope, "sample.state", "bytes", slots, sizeof(rf_sampler), &model->samplers, err);
    if (status)
        return status;
    rf_sampling sampling;
    rf_sampling_init(&sampling);
    for (uint32_t i = 0; i < slots; i++)
        rf_sampler_init(&model->samplers[i], &sampling);
    status = take(scope, "sample.candidates", "bytes", plan->config->vocab_count,
                  sizeof(rf_candidate), &model->candidates, err);
    if (status)
        return status;
    if ((status = take(scope, "model.slots", "bytes", slots, 1, &model->slot_seen, err)))
        return status;
    status = take(scope, "model.items", "bytes", plan->info.chunk, sizeof(rf_step_item),
                  &model->items, err);
    if (status || !plan->text.present)
        return status;
    return rf_text_open(scope, &plan->vocab, &plan->text, plan->options.text_bytes,
                        &model->tokenizer, err);
}

static rf_status take_buffers(rf_model *model, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    rf_network *network = &model->network;
    for (int b = RF_B_ITEMS; b < RF_B_COUNT; b++) {
        char id[RF_ID_BYTES];
        rf_buffer_extent extent =
            rf_buffer_extent_of(plan->config, plan->weights, &plan->shape, (rf_buffer)b);
        if (extent.count == 0)
            continue;
        rf_buffer_id((rf_buffer)b, id);
        rf_status status = take(&model->forward_scope, id, extent.format, extent.count,
                                extent.unit_bytes, &network->buffers[b], err);
        if (status)
            return status;
        uint32_t row = (uint32_t)(rf_plan_find(&plan->regions, id) - plan->regions.rows);
        if (b == RF_B_PACKED)
            network->packed_row = row;
        if (b == RF_B_SCRATCH) {
            network->scratch_row = row;
            network->scratch_stride = extent.unit_bytes;
        }
        if (b == RF_B_PARTS)
            network->parts_bytes = extent.count * extent.unit_bytes;
    }
    rf_step_input_init(&model->input, network->buffers[RF_B_ITEMS], &plan->shape);
    return rf_scope_seal(&model->forward_scope, err);
}

typedef struct populate_job {
    rf_progress_fn progress;
    void *context;
    uint64_t total;
} populate_job;

static bool populate_progress(void *context, uint64_t done)
{
    const populate_job *job = context;
    return !job->progress || job->progress(job->context, done, job->total);
}

/* The weights' pages into the page tables, in one sweep over the tensors' part of the file. */
static rf_status populate(const rf_model_plan *plan, rf_progress_fn progress, void *context,
                          rf_error *err)
{
    const rf_gguf *gguf = &plan->file->gguf;
    populate_job job = {progress, context, gguf->data_end};
    return rf_os_populate(gguf->data, gguf->data_end, populate_progress, &job, err);
}

static rf_status check_openable(const rf_model_plan *plan, rf_error *err)
{
    if (plan->info.data_missing) {
        const rf_gguf *gguf = &plan->file->gguf;
        uint32_t first = 0;
        while (first + 1 < gguf->tensor_count && gguf->tensors[first].in_file)
            first++;
        rf_fail(err, RF_ERR_BAD_MODEL, plan->file->name,
                "the file is cut off before the end of %.*s", (int)gguf->tensors[first].name.length,
                gguf->tensors[first].name.bytes);
        rf_fail_expected(err, "%llu bytes", (unsigned long long)plan->file->gguf.data_end);
        return rf_fail_got(err, "%llu bytes", (unsigned long long)plan->file->gguf.size);
    }
    if (!plan->info.fits) {
        uint64_t reserve = RF_MIN(plan->info.reserve_bytes, plan->info.available_bytes);
        rf_fail(err, RF_ERR_NO_FIT, plan->file->name, "the plan does not fit (%s)",
                plan->info.budget_source);
        rf_fail_expected(err, "at most %llu bytes",
                         (unsigned long long)(plan->info.available_bytes - reserve));
        return rf_fail_got(err, "%llu bytes", (unsigned long long)plan->regions.total_bytes);
    }
    return RF_OK;
}

static rf_status open_parts(rf_model *model, rf_progress_fn progress, void *context, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    bool pattern = plan->options.pattern;
    rf_status status =
        rf_scope_open(&model->model_scope, &plan->regions, RF_SCOPE_MODEL, NULL, pattern, err);
    if (status)
        return status;
    rf_trace *trace = model->model_scope.trace;
    rf_trace_emit(trace, RF_EVENT_PLAN, RF_NO_ROW, 0, plan->regions.total_bytes, 0);
    rf_trace_emit(trace, RF_EVENT_PHASE_BEGIN, RF_NO_ROW, RF_PHASE_OPEN, 0, 0);
    status =
        rf_scope_open(&model->forward_scope, &plan->regions, RF_SCOPE_FORWARD, trace, pattern, err);
    if (status)
        return status;
    if ((status = populate(plan, progress, context, err)))
        return status;
    if ((status = adopt_file(model, err)))
        return status;
    if ((status = take_rope(model, err)))
        return status;
    if ((status = open_kv(model, err)))
        return status;
    if ((status = take_calibration(model, err)))
        return status;
    if ((status = take_tables(model, err)))
        return status;
    if ((status = start_team(model, err)))
        return status;
    if ((status = rf_draft_open(model, err)))
        return status;
    if ((status = rf_scope_seal(&model->model_scope, err)))
        return status;
    if ((status = take_buffers(model, err)))
        return status;
    rf_os_touch_stack();
    rf_trace_emit(trace, RF_EVENT_PHASE_END, RF_NO_ROW, RF_PHASE_OPEN, 0, 0);
    return RF_OK;
}

rf_status rf_model_open(const rf_model_plan *plan, rf_progress_fn progress, void *context,
                        rf_model **out, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = check_openable(plan, err);
    if (status)
        return status;
    void *memory = NULL;
    status = rf_os_reserve(sizeof(rf_model), &memory, err);
    if (status)
        return status;
    rf_model *model = memory;
    model->plan = plan;
    atomic_init(&model->cancel, false);
    model->network = (rf_network){.config = plan->config,
                                  .weights = plan->weights,
                                  .recipe = plan->recipe,
                                  .kernels = &plan->kernels,
                                  .cancel = &model->cancel,
                                  .shape = plan->shape};
    status = open_parts(model, progress, context, err);
    if (status) {
        rf_model_close(model, NULL);
        return status;
    }
    model->network.team = model->team;
    model->network.kv = model->kv;
    model->network.trace = model->model_scope.trace;
    *out = model;
    return RF_OK;
}

void rf_model_close(rf_model *model, rf_trace *copy)
{
    if (copy)
        *copy = (rf_trace){0};
    if (!model)
        return;
    rf_team_stop(model->team);
    rf_scope_close(&model->forward_scope, NULL);
    rf_scope_close(&model->model_scope, copy);
    rf_os_release(model, sizeof *model);
}

/* ---- step -------------------------------------------------------------------------------- */

static rf_status bad_item(rf_error *err, const char *what, uint32_t index, uint64_t expected,
                          uint64_t got)
{
    char where[RF_ID_BYTES];
    rf_print(where, sizeof where, "step.items[%u]", index);
    rf_fail(err, RF_ERR_USAGE, where, "%s", what);
    rf_fail_expected(err, "%llu", (unsigned long long)expected);
    return rf_fail_got(err, "%llu", (unsigned long long)got);
}

/* Appends the items of one slot, which are consecutive positions, as one run. */
static rf_status gather_slot(rf_model *model, const rf_step_item *items, uint32_t count,
                             uint32_t slot, rf_error *err)
{
    rf_step_input *input = &model->input;
    uint64_t next = rf_kv_length(model->kv, slot);
    rf_step_run *run = &input->runs[input->run_count];
    *run = (rf_step_run){.first_position = next, .slot = slot, .first_row = input->token_count};
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].slot != slot)
            continue;
        if (items[i].position != next) {
            return bad_item(err, "not the slot's next position", i, next, items[i].position);
        }
        if (next >= model->plan->info.ctx && !model->plan->options.endless) {
            return bad_item(err, "the slot is full: positions", i, model->plan->info.ctx, next + 1);
        }
        input->tokens[input->token_count++] =
            (rf_step_token){.position = next++,
                            .token = items[i].token,
                            .slot = slot,
                            .phase = items[i].phase == RF_STEP_GENERATION};
        run->count++;
    }
    input->run_count++;
    return RF_OK;
}

/* The row of item index: items of its own slot before it, behind the slot's first row. */
static uint32_t row_of(const rf_step_input *input, const rf_step_item *item)
{
    for (uint32_t r = 0; r < input->run_count; r++) {
        const rf_step_run *run = &input->runs[r];
        if (run->slot == item->slot) {
            return run->first_row + (uint32_t)(item->position - run->first_position);
        }
    }
    return 0;
}

static rf_status gather(rf_model *model, const rf_step_item *items, uint32_t count, rf_error *err)
{
    const rf_plan_info *info = &model->plan->info;
    rf_step_input *input = &model->input;
    if (count == 0 || count > info->chunk) {
        return bad_item(err, "wrong number of items", 0, info->chunk, count);
    }
    input->token_count = input->run_count = input->logit_count = 0;
    memset(model->slot_seen, 0, info->slots);
    for (uint32_t i = 0; i < count; i++) {
        if (items[i].slot >= info->slots) {
            return bad_item(err, "no such slot", i, info->slots - 1, items[i].slot);
        }
        if (items[i].token >= info->vocab_count) {
            return bad_item(err, "no such token", i, info->vocab_count - 1, items[i].token);
        }
        if (model->slot_seen[items[i].slot])
            continue;
        model->slot_seen[items[i].slot] = 1;
        rf_status status = gather_slot(model, items, count, items[i].slot, err);
        if (status)
            return status;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (!items[i].wants_logits)
            continue;
        if (input->logit_count == info->logit_rows) {
            return bad_item(err, "more logits than planned", i, info->logit_rows,
                            input->logit_count + 1);
        }
        input->logit_tokens[input->logit_count++] = row_of(input, &items[i]);
    }
    rf_step_input_sort(input);
    return RF_OK;
}

rf_status rf_step(rf_model *model, const rf_step_item *items, uint32_t count, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = gather(model, items, count, err);
    if (status) {
        model->input.logit_count = 0;
        return status;
    }
    bool decodes = count == model->input.run_count || !model->input.phases[RF_STEP_PROMPT].count;
    uint16_t phase = decodes ? RF_PHASE_DECODE : RF_PHASE_PREFILL;
    rf_trace *trace = model->network.trace;
    rf_trace_emit(trace, RF_EVENT_PHASE_BEGIN, RF_NO_ROW, phase, 0, count);
    status = rf_network_step(&model->network, &model->input, err);
    rf_trace_emit(trace, RF_EVENT_PHASE_END, RF_NO_ROW, phase, 0, count);
    rf_scope_reset(&model->forward_scope);
    if (status) {
        model->input.logit_count = 0;
        atomic_store(&model->cancel, false);
    }
    return status;
}

rf_status rf_prefill(rf_model *model, uint32_t slot, const uint32_t *tokens, uint64_t count,
                     bool last_logits, rf_progress_fn progress, void *context, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_step_item *items = model->items;
    uint64_t done = 0;
    while (done < count) {
        uint32_t n = (uint32_t)RF_MIN(count - done, (uint64_t)model->plan->info.chunk);
        uint64_t position = rf_slot_length(model, slot);
        for (uint32_t i = 0; i < n; i++) {
            items[i] = (rf_step_item){.slot = slot,
                                      .token = tokens[done + i],
                                      .position = position + i,
                                      .wants_logits = last_logits && done + i + 1 == count};
        }
        rf_status status = rf_step(model, items, n, err);
        if (status)
            return status;
        done += n;
        if (progress && !progress(context, done, count)) {
            return rf_fail(err, RF_ERR_INTERRUPTED, "prefill", "stopped after %llu tokens",
                           (unsigned long long)done);
        }
    }
    return RF_OK;
}

const float *rf_logits(const rf_model *model, uint32_t index)
{
    if (index >= model->input.logit_count)
        return NULL;
    return (const float *)model->network.buffers[RF_B_LOGITS] +
           (uint64_t)index * model->plan->info.vocab_count;
}

uint64_t rf_slot_length(const rf_model *model, uint32_t slot)
{
    return rf_kv_length(model->kv, slot);
}

rf_status rf_slot_truncate(rf_model *model, uint32_t slot, uint64_t length, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    return rf_kv_truncate(model->kv, slot, length, err);
}

rf_status rf_slot_copy(rf_model *model, uint32_t from, uint32_t to, rf_error *err)
{
    return rf_kv_copy_slot(model->kv, from, to, err);
}

rf_status rf_slot_share(rf_model *model, uint32_t from, uint32_t to, uint64_t length, rf_error *err)
{
    return rf_kv_share_prefix(model->kv, from, to, length, err);
}

void rf_model_cancel(rf_model *model)
{
    atomic_store(&model->cancel, true);
}

/* ---- what it is -------------------------------------------------------------------------- */

const rf_trace *rf_model_trace(const rf_model *model)
{
    return model->model_scope.trace;
}

rf_tokenizer *rf_model_tokenizer(rf_model *model)
{
    return model->tokenizer;
}

uint64_t rf_model_step_bytes(const rf_model *model, uint64_t depth)
{
    const rf_config *config = model->plan->config;
    uint64_t total = 0;
    for (uint32_t i = RF_W_OUTPUT_NORM; i < rf_weight_table_count(config); i++) {
        const rf_weight *weight = &model->plan->weights[i];
        if (weight->tensor)
            total += weight->tensor->bytes;
    }
    for (uint32_t i = 0; i < config->layer_count; i++) {
        total += depth * config->layers[i].kv_heads *
                 (rf_kv_row_bytes(model->kv, i, RF_KV_K) + rf_kv_row_bytes(model->kv, i, RF_KV_V));
    }
    return total;
}

void rf_model_op_name(const rf_model *model, uint32_t op, char *text, size_t capacity)
{
    rf_recipe_op_name(model->plan->recipe, model->plan->config->layer_count, op, text, capacity);
}

rf_status rf_model_check_row(const rf_model *model, uint32_t row_index, rf_check_row *out,
                             rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    const rf_plan *regions = &model->plan->regions;
    bool is_forward =
        row_index < regions->row_count && regions->rows[row_index].scope == RF_SCOPE_FORWARD;
    return rf_scope_check_row(is_forward ? &model->forward_scope : &model->model_scope, row_index,
                              out, err);
}

rf_status rf_model_check_guards(const rf_model *model, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_status status = rf_scope_check_guards(&model->model_scope, err);
    return status ? status : rf_scope_check_guards(&model->forward_scope, err);
}

uint64_t rf_model_resident(const rf_model *model, rf_scope_kind scope)
{
    if (scope == RF_SCOPE_MODEL)
        return rf_scope_resident(&model->model_scope);
    return scope == RF_SCOPE_FORWARD ? rf_scope_resident(&model->forward_scope) : 0;
}

uint64_t rf_model_file_resident(const rf_model *model)
{
    const rf_gguf *gguf = &model->plan->file->gguf;
    return rf_os_resident(gguf->data, gguf->size);
}
