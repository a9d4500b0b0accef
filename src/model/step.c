/* model/step.c: executes a recipe over a batch of tokens.
 *
 * Validated when the model was opened, it runs blind: no size is checked here, nothing is taken.
 * Every row of a result depends on its own input row alone, so the bits are the same for any chunk,
 * company and number of workers. Between ops it looks whether somebody cancelled. Appended keys and
 * values become visible at the very end; whatever ends a step early leaves the rings as they were.
 */
#include "model/model.h"

#include <string.h>
#ifdef RF_PLANT_MALLOC
#include <stdlib.h>
#endif

/* Below this much arithmetic a region runs on the caller alone: waking a sleeping team costs 28 us,
 * a spinning one 0.3 us (measured, two cores of an AVX-512 machine). */
#define INLINE_MACS 65536u

#define AHEAD_TOKENS 4u
#define AHEAD_BYTES  (128u * 1024u) /* a part of a small second-level cache */

/* ---- vectors ----------------------------------------------------------------------------- */

typedef struct row_job {
    rf_network *network;
    const rf_step_input *input;
    const rf_op *op;
    uint32_t layer;
    const rf_weight *weight;
    const float *in;
    float *out;
    uint64_t in_stride, out_stride;
} row_job;

static void rope_table_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    uint32_t pairs = job->network->config->rope.dims / 2;
    (void)worker;
    float *sink = job->network->buffers[RF_B_ROPE_SINK];
    for (uint32_t t = first; t < last; t++) {
        float *row = job->out + (uint64_t)t * pairs * 2;
        double position = (double)job->input->tokens[t].position;
        double nearer = RF_MIN(position, (double)(job->network->shape.capacity - 1));
        for (uint32_t i = 0; sink && i < pairs; i++) {
            float *at = sink + ((uint64_t)t * pairs + i) * 2;
            rf_sin_cos(nearer * job->network->rope_frequencies[i], &at[1], &at[0]);
        }
        for (uint32_t i = 0; i < pairs; i++) {
            rf_sin_cos(position * job->network->rope_frequencies[i], &row[i * 2 + 1], &row[i * 2]);
        }
    }
}

static void embed_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    (void)worker;
    for (uint32_t t = first; t < last; t++) {
        const uint8_t *row =
            job->weight->data + job->input->tokens[t].token * job->weight->row_bytes;
        rf_decode_row(job->weight->format, row, job->out + t * job->out_stride, job->weight->k);
    }
}

static void norm_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    const rf_config *config = job->network->config;
    const float *weight = (const float *)(const void *)job->weight->data;
    (void)worker;
    for (uint32_t t = first; t < last; t++) {
        uint32_t from = job->op->kind == RF_OP_HEAD_NORM ? job->input->logit_tokens[t] : t;
        job->network->kernels->rms_norm(job->in + from * job->in_stride, weight,
                                        job->out + t * job->out_stride, config->width,
                                        config->norm_eps);
    }
}

static void rope_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    const rf_layer_config *layer = &job->network->config->layers[job->layer];
    const rf_rope_config *rope = &job->network->config->rope;
    float *sides[2] = {job->network->buffers[RF_B_Q], job->network->buffers[RF_B_K]};
    uint32_t heads[2] = {layer->heads, layer->kv_heads};
    (void)worker;
    float *q_sink = job->network->buffers[RF_B_Q_SINK];
    const float *sink_table = job->network->buffers[RF_B_ROPE_SINK];
    uint64_t q_width = (uint64_t)layer->heads * layer->k_width;
    for (uint32_t t = first; t < last; t++) {
        const float *table = job->in + (uint64_t)t * rope->dims;
        if (q_sink) { /* the sinks see this query from no farther than the ring is long */
            float *row = q_sink + t * q_width;
            memcpy(row, sides[0] + t * q_width, q_width * sizeof(float));
            for (uint32_t h = 0; h < layer->heads; h++) {
                job->network->kernels->rope(row + (uint64_t)h * layer->k_width,
                                            sink_table + (uint64_t)t * rope->dims, rope->dims / 2,
                                            rope->interleaved);
            }
        }
        for (int side = 0; side < 2; side++) {
            float *row = sides[side] + (uint64_t)t * heads[side] * layer->k_width;
            for (uint32_t h = 0; h < heads[side]; h++) {
                job->network->kernels->rope(row + (uint64_t)h * layer->k_width, table,
                                            rope->dims / 2, rope->interleaved);
            }
        }
    }
}

static void swiglu_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    uint32_t ffn = job->network->config->layers[job->layer].ffn;
    (void)worker;
    for (uint32_t t = first; t < last; t++) {
        float *gate = job->out + (uint64_t)t * ffn;
        job->network->kernels->swiglu(gate, job->in + (uint64_t)t * ffn, gate, ffn);
    }
}

static void sums_heads(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    (void)worker;
    for (uint32_t head = first; head < last; head++)
        rf_sums_add(job->network, job->layer, job->input->token_count, head);
}

/* Runs fn over count rows of about row_cost multiply-adds each. */
static void run_rows(rf_network *network, uint32_t count, uint64_t row_cost, rf_work_fn fn,
                     void *context)
{
    uint64_t grain = row_cost < INLINE_MACS ? INLINE_MACS / (row_cost + 1) + 1 : 1;
    rf_team_run(network->team, count, (uint32_t)RF_MIN(grain, UINT32_MAX), fn, context);
}

/* ---- matmul ------------------------------------------------------------------------------ */

static void *scratch_of(const rf_network *network, uint32_t worker)
{
    return (uint8_t *)network->buffers[RF_B_SCRATCH] + worker * network->scratch_stride;
}

typedef struct matmul_job {
    rf_network *network;
    rf_matmul parts[RF_OP_OPERANDS];
    uint32_t rows[RF_OP_OPERANDS];
    uint32_t first_tile[RF_OP_OPERANDS + 1];
    uint32_t part_count;
} matmul_job;

static void matmul_tiles(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const matmul_job *job = context;
    void *scratch = scratch_of(job->network, worker);
    for (uint32_t i = 0; i < job->part_count; i++) {
        uint32_t from = RF_MAX(first, job->first_tile[i]);
        uint32_t to = RF_MIN(last, job->first_tile[i + 1]);
        if (from >= to)
            continue;
        const rf_matmul *part = &job->parts[i];
        uint32_t first_row = (from - job->first_tile[i]) * RF_MATMUL_TILE_ROWS;
        uint32_t last_row = RF_MIN((to - job->first_tile[i]) * RF_MATMUL_TILE_ROWS, job->rows[i]);
        job->network->kernels->matmul[part->format][part->layout.act](part, first_row, last_row,
                                                                      scratch);
    }
}

typedef struct token_set { /* rows of a batch that go through a matmul together */
    const uint32_t *rows;  /* NULL: 0 .. count - 1 */
    uint32_t count;
    rf_act act;
} token_set;

typedef struct pack_job {
    rf_pack_fn pack;
    rf_act_layout layout;
    const float *in;
    const uint32_t *rows;
    uint8_t *packed;
} pack_job;

static void pack_rows(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const pack_job *job = context;
    (void)worker;
    for (uint32_t i = first; i < last; i++) {
        uint64_t t = job->rows ? job->rows[i] : i;
        job->pack(&job->layout, job->in + t * job->layout.k,
                  job->packed + t * job->layout.row_bytes);
    }
}

/* The input in the form that the weights take: as it is when that is possible, else packed. */
static const uint8_t *packed_input(rf_network *network, const rf_act_layout *layout,
                                   const float *in, const token_set *set)
{
    if (layout->act == RF_ACT_F32 && layout->row_bytes == (uint64_t)layout->k * sizeof(float)) {
        return (const uint8_t *)in;
    }
    pack_job job = {network->kernels->pack[layout->act], *layout, in, set->rows,
                    network->buffers[RF_B_PACKED]};
    run_rows(network, set->count, layout->k * 4u, pack_rows, &job);
    if (layout->act != RF_ACT_F32) {
        rf_trace_emit(network->trace, RF_EVENT_ADAPTER, network->packed_row, (uint16_t)layout->act,
                      layout->row_bytes * set->count, 0);
    }
    return job.packed;
}

static void run_matmul(rf_network *network, matmul_job *job, uint32_t tokens)
{
    uint32_t tiles = job->first_tile[job->part_count];
    uint64_t macs = (uint64_t)tiles * RF_MATMUL_TILE_ROWS * job->parts[0].k * tokens;
    /* Pieces small enough to be shared out evenly and to be lost with a worker that loses its
     * processor, and not so small that what a kernel prepares for each of them shows. */
    uint64_t pieces = RF_MIN(macs / INLINE_MACS, rf_team_size(network->team) * UINT64_C(8));
    uint32_t grain = pieces ? (uint32_t)((tiles + pieces - 1) / pieces) : tiles;
    rf_team_run(network->team, tiles, grain, matmul_tiles, job);
}

static void add_bias(const rf_weight *bias, float *out, uint64_t stride, uint32_t tokens)
{
    const float *values = (const float *)(const void *)bias->data;
    if (!values)
        return;
    for (uint32_t t = 0; t < tokens; t++) {
        for (uint32_t i = 0; i < bias->k; i++)
            out[t * stride + i] += values[i];
    }
}

static void matmul_set(rf_network *network, const rf_op *op, uint32_t layer, const token_set *set)
{
    const uint32_t tokens = set->count;
    const float *in = network->buffers[op->in];
    matmul_job job; /* of many parts: those that there are are filled below */
    rf_act_layout packed_as = {0};
    const uint8_t *act = NULL;
    job.network = network;
    job.part_count = job.first_tile[0] = 0;
    for (int i = 0; i < RF_OP_OPERANDS && op->weight[i] != RF_W_NONE; i++) {
        const rf_weight *weight = rf_weight_at(network->weights, layer, op->weight[i]);
        rf_act_layout layout =
            rf_act_layout_of(rf_act_for(weight->format, set->act), weight->format, weight->k);
        if (!act || !rf_act_layout_equal(&layout, &packed_as)) {
            if (job.part_count)
                run_matmul(network, &job, tokens); /* before its input is packed over */
            job.part_count = 0;
            act = packed_input(network, &layout, in, set);
            packed_as = layout;
        }
        uint32_t part = job.part_count++;
        job.parts[part] = (rf_matmul){.weight = weight->data,
                                      .weight_row_bytes = weight->row_bytes,
                                      .k = weight->k,
                                      .format = weight->format,
                                      .layout = layout,
                                      .act = act,
                                      .tokens = set->rows,
                                      .token_count = tokens,
                                      .out = network->buffers[op->out[i]],
                                      .out_stride = weight->rows,
                                      .accumulate = op->kind == RF_OP_MATMUL_ADD};
        job.rows[part] = weight->rows;
        job.first_tile[part + 1] =
            job.first_tile[part] + (weight->rows + RF_MATMUL_TILE_ROWS - 1) / RF_MATMUL_TILE_ROWS;
    }
    run_matmul(network, &job, tokens);
}

/* Tokens of both phases, when they differ in precision, go one phase after the other. The head
 * always takes 16 bits: its rounding errors are those of the logits themselves, and few rows of a
 * prompt ask for any (measured, SmolLM2 Q4_1 with 8 bits elsewhere: KL 0.0043, else 0.0046). */
static void matmul_op(rf_network *network, const rf_op *op, uint32_t layer, uint32_t tokens,
                      const rf_phase_rows phases[RF_PHASES])
{
    const rf_act head[RF_PHASES] = {RF_HEAD_ACT, RF_HEAD_ACT};
    const rf_act *acts = op->kind == RF_OP_HEAD ? head : network->shape.act;
    bool mixed = phases[0].count > 0 && phases[1].count > 0 && acts[0] != acts[1];
    for (int phase = 0; mixed && phase < RF_PHASES; phase++) {
        token_set set = {phases[phase].rows, phases[phase].count, acts[phase]};
        matmul_set(network, op, layer, &set);
    }
    if (!mixed) {
        token_set set = {NULL, tokens, acts[phases[0].count > 0 ? 0 : 1]};
        matmul_set(network, op, layer, &set);
    }
    for (int i = 0; i < RF_OP_OPERANDS && op->bias[i] != RF_W_NONE; i++) {
        const rf_weight *weight = rf_weight_at(network->weights, layer, op->weight[i]);
        add_bias(rf_weight_at(network->weights, layer, op->bias[i]), network->buffers[op->out[i]],
                 weight->rows, tokens);
    }
}

/* ---- attention --------------------------------------------------------------------------- */

typedef struct append_job {
    rf_network *network;
    rf_kv_append_job rows;
} append_job;

static void append_units(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const append_job *job = context;
    rf_kv_append_run(&job->rows, first, last, scratch_of(job->network, worker));
}

static rf_status append_op(rf_network *network, const rf_step_input *input, uint32_t layer_index,
                           rf_error *err)
{
    const rf_layer_config *layer = &network->config->layers[layer_index];
    uint64_t k_stride = (uint64_t)layer->kv_heads * layer->k_width;
    uint64_t v_stride = (uint64_t)layer->kv_heads * layer->v_width;
    for (uint32_t r = 0; r < input->run_count; r++) {
        const rf_step_run *run = &input->runs[r];
        const float *k = (const float *)network->buffers[RF_B_K] + run->first_row * k_stride;
        const float *v = (const float *)network->buffers[RF_B_V] + run->first_row * v_stride;
        append_job job = {.network = network};
        rf_status status = rf_kv_append_begin(network->kv, run->slot, layer_index, k, k_stride, v,
                                              v_stride, run->count, &job.rows, err);
        if (status)
            return status;
        uint32_t units = rf_kv_append_units(&job.rows);
        uint64_t cost = (k_stride + v_stride) * run->count * 8u; /* encoding, in multiply-adds */
        rf_team_run(network->team, units, cost < INLINE_MACS ? units : 1, append_units, &job);
        rf_kv_append_end(&job.rows);
    }
    return RF_OK;
}

static rf_kv_attend attend_job(const rf_network *network, const rf_step_run *run,
                               uint32_t layer_index)
{
    const rf_layer_config *layer = &network->config->layers[layer_index];
    uint64_t q_stride = (uint64_t)layer->heads * layer->k_width;
    uint64_t out_stride = (uint64_t)layer->heads * layer->v_width;
    float scale = network->config->attention_scale;
    const float *q_sink = network->buffers[RF_B_Q_SINK];
    if (scale == 0.0f)
        scale = 1.0f / __builtin_sqrtf((float)layer->k_width);
    return (rf_kv_attend){.slot = run->slot,
                          .layer = layer_index,
                          .heads = layer->heads,
                          .first_position = run->first_position,
                          .token_count = run->count,
                          .q = (const float *)network->buffers[RF_B_Q] + run->first_row * q_stride,
                          .q_sink = q_sink ? q_sink + run->first_row * q_stride : NULL,
                          .q_stride = q_stride,
                          .out = (float *)network->buffers[RF_B_ATTN_OUT] +
                                 run->first_row * out_stride,
                          .out_stride = out_stride,
                          .scale = scale,
                          .parts = run->parts};
}

static void attend_units(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const row_job *job = context;
    void *scratch = scratch_of(job->network, worker);
    for (uint32_t r = 0; r < job->input->run_count; r++) {
        const rf_step_run *run = &job->input->runs[r];
        rf_kv_attend attend = attend_job(job->network, run, job->layer);
        uint32_t end = run->first_unit + rf_kv_attend_units(job->network->kv, &attend);
        uint32_t from = RF_MAX(first, run->first_unit);
        uint32_t to = RF_MIN(last, end);
        if (from >= to)
            continue;
        rf_kv_attend_run(job->network->kv, &attend, from - run->first_unit, to - run->first_unit,
                         scratch);
    }
}

typedef struct join_job {
    rf_network *network;
    rf_kv_attend attend;
} join_job;

static void join_units(void *context, uint32_t first, uint32_t last, uint32_t worker)
{
    const join_job *job = context;
    rf_kv_attend_join(job->network->kv, &job->attend, first, last,
                      scratch_of(job->network, worker));
}

/* Gives each run whose context is shared out its place for the parts, as long as there is room. */
static void place_parts(rf_network *network, rf_step_input *input, uint32_t layer_index)
{
    uint8_t *place = network->buffers[RF_B_PARTS];
    uint64_t left = place ? network->parts_bytes : 0;
    for (uint32_t r = 0; r < input->run_count; r++) {
        rf_step_run *run = &input->runs[r];
        run->parts = NULL;
        rf_kv_attend attend = attend_job(network, run, layer_index);
        uint64_t bytes = rf_kv_attend_parts_bytes(network->kv, &attend);
        if (bytes == 0 || bytes > left)
            continue;
        run->parts = (float *)(void *)place;
        place += bytes;
        left -= bytes;
    }
}

static void attend_op(rf_network *network, rf_step_input *input, uint32_t layer_index)
{
    uint32_t units = 0, workers = rf_team_size(network->team);
    uint64_t macs = 0;
    place_parts(network, input, layer_index);
    for (uint32_t r = 0; r < input->run_count; r++) {
        rf_step_run *run = &input->runs[r];
        rf_kv_attend attend = attend_job(network, run, layer_index);
        run->first_unit = units;
        units += rf_kv_attend_units(network->kv, &attend);
        macs += (run->first_position + run->count) * run->count * attend.q_stride * 2;
    }
    row_job job = {.network = network, .input = input, .layer = layer_index};
    uint32_t grain = macs < INLINE_MACS ? units : RF_MAX(1u, units / (workers * 8u));
    rf_team_run(network->team, units, grain, attend_units, &job);
    for (uint32_t r = 0; r < input->run_count; r++) {
        const rf_step_run *run = &input->runs[r];
        rf_kv_attend attend = attend_job(network, run, layer_index);
        if (run->parts) {
            join_job join = {network, attend};
            /* a head of a token: an exponential for each part, and so many sums */
            uint64_t cost = (run->first_position / RF_KV_PART + 2) * (attend.out_stride * 2);
            uint32_t joins = run->count * attend.heads;
            grain = cost * run->count < INLINE_MACS ? joins : RF_MAX(1u, joins / (workers * 4u));
            rf_team_run(network->team, joins, grain, join_units, &join);
        }
        uint64_t widened = rf_kv_attend_widened_bytes(network->kv, &attend);
        if (widened)
            rf_trace_emit(network->trace, RF_EVENT_ADAPTER, network->scratch_row, 0, widened, 0);
    }
}

/* ---- the recipe -------------------------------------------------------------------------- */

static rf_status check_logits(const rf_network *network, uint32_t count, rf_error *err)
{
    uint32_t vocab_count = network->config->vocab_count;
    for (uint32_t i = 0; i < count; i++) {
        const float *row = (const float *)network->buffers[RF_B_LOGITS] + (uint64_t)i * vocab_count;
        uint32_t wrong = 0; /* what is not finite has all bits of the exponent */
        for (uint32_t j = 0; j < vocab_count; j++) {
            uint32_t bits;
            memcpy(&bits, &row[j], sizeof bits);
            wrong |= (bits & 0x7F800000u) == 0x7F800000u;
        }
        if (wrong) {
            return rf_fail(err, RF_ERR_RUNTIME, "forward.logits", "a value is not finite");
        }
    }
    return RF_OK;
}

static rf_status run_op(rf_network *network, rf_step_input *input, const rf_op *op, uint32_t layer,
                        rf_error *err)
{
    const rf_config *config = network->config;
    row_job job = {.network = network,
                   .input = input,
                   .op = op,
                   .layer = layer,
                   .in = op->in == RF_B_NONE ? NULL : network->buffers[op->in],
                   .out = network->buffers[op->out[0]],
                   .in_stride = config->width,
                   .out_stride = config->width};
    if (op->weight[0] != RF_W_NONE) {
        job.weight = rf_weight_at(network->weights, layer, op->weight[0]);
    }
    uint32_t tokens = input->token_count;
    switch (op->kind) {
    case RF_OP_ROPE_TABLE:
        run_rows(network, tokens, config->rope.dims * 32u, rope_table_rows, &job);
        break;
    case RF_OP_EMBED:
        run_rows(network, tokens, config->width * 4u, embed_rows, &job);
        break;
    case RF_OP_NORM:
        run_rows(network, tokens, config->width * 2u, norm_rows, &job);
        break;
    case RF_OP_HEAD_NORM:
        run_rows(network, input->logit_count, config->width * 2u, norm_rows, &job);
        break;
    case RF_OP_MATMUL:
    case RF_OP_MATMUL_ADD:
        matmul_op(network, op, layer, tokens, input->phases);
        break;
    case RF_OP_HEAD:
        if (input->logit_count)
            matmul_op(network, op, layer, input->logit_count, input->logit_phases);
        return check_logits(network, input->logit_count, err);
    case RF_OP_ROPE:
        if (network->sums)
            rf_team_run(network->team, config->layers[layer].kv_heads, 1, sums_heads, &job);
        run_rows(network, tokens, config->layers[layer].heads * config->layers[layer].k_width * 4u,
                 rope_rows, &job);
        break;
    case RF_OP_APPEND:
        return append_op(network, input, layer, err);
    case RF_OP_ATTEND:
        attend_op(network, input, layer);
        break;
    case RF_OP_SWIGLU:
        run_rows(network, tokens, config->layers[layer].ffn * 16u, swiglu_rows, &job);
        break;
    }
    return RF_OK;
}

static bool is_matmul(const rf_op *op)
{
    return op->kind == RF_OP_MATMUL || op->kind == RF_OP_MATMUL_ADD || op->kind == RF_OP_HEAD;
}

/* Memory is idle while the small ops of a token run on one worker: the others ask for the first
 * weights of the matmul behind them. With many tokens weights are no matter. */
static void look_ahead(const rf_network *network, const rf_step_input *input, const rf_op *ops,
                       uint32_t count, uint32_t layer)
{
    uint32_t i = 0;
    while (i < count && !is_matmul(&ops[i]))
        i++;
    if (i == count || input->token_count > AHEAD_TOKENS)
        return;
    const rf_weight *weight = rf_weight_at(network->weights, layer, ops[i].weight[0]);
    uint64_t bytes = (uint64_t)weight->rows * weight->row_bytes;
    rf_team_ahead(network->team, weight->data, RF_MIN(bytes, AHEAD_BYTES));
}

static rf_status run_ops(rf_network *network, rf_step_input *input, const rf_op *ops,
                         uint32_t count, uint32_t layer, uint32_t first_number, rf_error *err)
{
    for (uint32_t i = 0; i < count; i++) {
        if (atomic_load_explicit(network->cancel, memory_order_relaxed)) {
            return rf_fail(err, RF_ERR_INTERRUPTED, ops[i].name, "the step was cancelled");
        }
        if (i == 0 || is_matmul(&ops[i - 1]))
            look_ahead(network, input, ops + i, count - i, layer);
        uint64_t begin = network->trace_ops ? rf_os_clock_ns() : 0;
        rf_status status = run_op(network, input, &ops[i], layer, err);
        if (network->trace_ops) {
            rf_trace_emit(network->trace, RF_EVENT_KERNEL, RF_NO_ROW, (uint16_t)(first_number + i),
                          0, rf_os_clock_ns() - begin);
        }
        if (status)
            return status;
    }
    return RF_OK;
}

static rf_status run_recipe(rf_network *network, rf_step_input *input, rf_error *err)
{
    const rf_recipe *recipe = network->recipe;
    uint32_t number = 0;
    rf_status status =
        run_ops(network, input, recipe->before, recipe->before_count, 0, number, err);
    number += recipe->before_count;
    for (uint32_t layer = 0; status == RF_OK && layer < network->config->layer_count; layer++) {
        status = run_ops(network, input, recipe->layer, recipe->layer_count, layer, number, err);
        number += recipe->layer_count;
    }
    if (status)
        return status;
    return run_ops(network, input, recipe->after, recipe->after_count, 0, number, err);
}

rf_status rf_network_step(rf_network *network, rf_step_input *input, rf_error *err)
{
#ifdef RF_PLANT_MALLOC
    /* A planted fault: a test builds this to see `check` catch an allocation in decode. */
    void *volatile planted = malloc(24);
    free(planted);
#endif
    rf_status status = run_recipe(network, input, err);
    for (uint32_t r = 0; r < input->run_count; r++) {
        uint32_t slot = input->runs[r].slot;
        if (status == RF_OK)
            status = rf_kv_commit(network->kv, slot, err);
        else
            rf_kv_abort(network->kv, slot);
    }
    return status;
}

void rf_step_input_init(rf_step_input *input, void *memory, const rf_step_shape *shape)
{
    *input = (rf_step_input){0};
    input->tokens = memory;
    input->runs = (rf_step_run *)(input->tokens + shape->chunk);
    input->logit_tokens = (uint32_t *)(input->runs + shape->chunk);
    uint32_t *lists = input->logit_tokens + shape->logit_rows;
    for (int phase = 0; phase < RF_PHASES; phase++) {
        input->phases[phase].rows = lists;
        input->logit_phases[phase].rows = lists + shape->chunk;
        lists += shape->chunk + shape->logit_rows;
    }
}

void rf_step_input_sort(rf_step_input *input)
{
    for (int phase = 0; phase < RF_PHASES; phase++)
        input->phases[phase].count = input->logit_phases[phase].count = 0;
    for (uint32_t t = 0; t < input->token_count; t++) {
        rf_phase_rows *rows = &input->phases[input->tokens[t].phase];
        rows->rows[rows->count++] = t;
    }
    for (uint32_t i = 0; i < input->logit_count; i++) {
        rf_phase_rows *rows = &input->logit_phases[input->tokens[input->logit_tokens[i]].phase];
        rows->rows[rows->count++] = i;
    }
}
