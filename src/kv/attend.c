/* kv/attend.c: attention of a chunk's tokens over a layer's ring.
 *
 *   unit  = one KV head x one tile of tokens; all heads of the group and all tokens share each row
 *   order = position 0 where it is kept apart ─► the sinks ─► blocks of positions, ascending
 *
 * Blocks are anchored at multiples of their size. Rows that are f32 and lie together are read
 * where they are; other plain rows are widened once for the tile; coded rows are expanded to int8
 * once for the tile and scored by integer dots against the turned query. Each query's arithmetic is
 * its own and what it reads depends on positions alone, so the bits are the same in prefill and
 * decode, in a wrapped ring and a linear one, and on any worker.
 */
#include "kv/store.h"

#include <string.h>

#define TILE_QUERIES 64u /* derived: 64 queries of width 64 are 16 KiB, half of a small L1 cache */

static uint32_t tile_tokens(uint32_t group)
{
    return group >= TILE_QUERIES ? 1 : TILE_QUERIES / group;
}

/* ---- scratch ------------------------------------------------------------------------------ */

typedef struct tile_parts {
    float *q;        /* [query][k_width] as they came, for the means */
    float *q_turned; /* the same, rotated where keys are coded */
    int16_t *q_codes;
    float *q_scale, *bias;
    float *along; /* [query][k_width]: q against the mean, as it turns */
    float *out, *state, *scores;
    float *k, *v; /* [RF_ATTEND_BLOCK][width] widened rows */
    float *k_scale, *v_scale;
    int8_t *k_codes, *v_codes;
    float *mean;
    rf_attend_range *visible, *far;
} tile_parts;

static void *cut(uint8_t *base, uint64_t *at, uint64_t count, uint64_t unit_bytes)
{
    void *address = base ? base + *at : NULL;
    *at += (count * unit_bytes + RF_CACHE_LINE - 1) & ~(uint64_t)(RF_CACHE_LINE - 1);
    return address;
}

/* Lays the parts into scratch (NULL: only measures); returns the bytes. */
static uint64_t lay_parts(uint8_t *scratch, uint32_t k_width, uint32_t v_width, uint32_t group,
                          tile_parts *parts)
{
    uint64_t queries = (uint64_t)tile_tokens(group) * group, block = RF_ATTEND_BLOCK, at = 0;
    *parts = (tile_parts){.q = cut(scratch, &at, queries * k_width, sizeof(float)),
                          .q_turned = cut(scratch, &at, queries * k_width, sizeof(float)),
                          .q_codes = cut(scratch, &at, queries * k_width, sizeof(int16_t)),
                          .q_scale = cut(scratch, &at, queries, sizeof(float)),
                          .bias = cut(scratch, &at, queries, sizeof(float)),
                          .along = cut(scratch, &at, queries * k_width, sizeof(float)),
                          .out = cut(scratch, &at, queries * v_width, sizeof(float)),
                          .state = cut(scratch, &at, queries * 2, sizeof(float)),
                          .scores = cut(scratch, &at, block, sizeof(float)),
                          .k = cut(scratch, &at, block * k_width, sizeof(float)),
                          .v = cut(scratch, &at, block * v_width, sizeof(float)),
                          .k_scale = cut(scratch, &at, block * (k_width / 8), sizeof(float)),
                          .v_scale = cut(scratch, &at, block * (v_width / 8), sizeof(float)),
                          .k_codes = cut(scratch, &at, block * k_width, 1),
                          .v_codes = cut(scratch, &at, block * v_width, 1),
                          .mean = cut(scratch, &at, k_width, sizeof(float)),
                          .visible = cut(scratch, &at, queries, sizeof(rf_attend_range)),
                          .far = cut(scratch, &at, queries, sizeof(rf_attend_range))};
    return at;
}

uint64_t rf_kv_scratch_bytes(uint32_t k_width, uint32_t v_width, uint32_t group)
{
    tile_parts parts;
    uint64_t attend = lay_parts(NULL, k_width, v_width, group, &parts);
    uint64_t row = (RF_MAX(k_width, v_width) + 15u) & ~15u;
    /* an append: row and mean, two forms of 64 x 64 and the turns of the pairs */
    uint64_t append = row * 2 * sizeof(float) + (2 * 64 * 64 + (uint64_t)k_width) * sizeof(double);
    return RF_MAX(attend, append);
}

/* ---- a tile ------------------------------------------------------------------------------- */

typedef struct tile {
    const rf_kv *kv;
    const rf_kv_attend *job;
    const rf_kv_layer_store *layer;
    uint32_t head, group, first_token, tokens, queries;
    bool k_coded, v_coded;
    bool in_codes; /* both sides are scored and summed as int8 codes */
    tile_parts parts;
} tile;

static bool is_coded(const rf_kv_side_store *store)
{
    return store->format->plain == RF_FORMAT_NONE;
}

/* Codes that are no int8 for each element: attention reads their rows as f32. */
static bool is_wide(const rf_kv_side_store *store)
{
    return is_coded(store) && rf_kv_codes[store->format->code].wide;
}

static bool works_in_codes(const rf_kv_layer_store *layer)
{
    const rf_kv_side_store *keys = &layer->side[RF_KV_K], *values = &layer->side[RF_KV_V];
    return is_coded(keys) && is_coded(values) && !is_wide(keys) && !is_wide(values);
}

static uint64_t head_index(const tile *t)
{
    return (uint64_t)t->job->slot * t->layer->kv_heads + t->head;
}

/* q against the two quadratures of the mean, pair by pair: what a block's mean adds to a score is
 * then one dot with the block's phases. */
static void lay_along(const tile *t)
{
    uint32_t width = t->layer->side[RF_KV_K].width;
    const float *mean =
        t->layer->calibration + t->head * ((uint64_t)width + (uint64_t)width * width);
    for (uint32_t i = 0; i < width / 2; i++) {
        rf_kv_pair pair = rf_kv_pair_of(&t->kv->rope, i);
        float x = mean[pair.a], y = mean[pair.b];
        for (uint32_t q = 0; q < t->queries; q++) {
            const float *row = t->parts.q + (uint64_t)q * width;
            float *along = t->parts.along + (uint64_t)q * width;
            along[2 * i] = row[pair.a] * x + row[pair.b] * y;
            along[2 * i + 1] = row[pair.b] * x - row[pair.a] * y;
        }
    }
}

static void set_queries(const tile *t, const float *source)
{
    const rf_kv_side_store *keys = &t->layer->side[RF_KV_K];
    uint64_t width = keys->width;
    for (uint32_t i = 0; i < t->tokens; i++) {
        const float *q =
            source + (t->first_token + i) * t->job->q_stride + (uint64_t)t->head * t->group * width;
        memcpy(t->parts.q + i * t->group * width, q, t->group * width * sizeof *q);
    }
    if (!t->k_coded)
        return;
    memcpy(t->parts.q_turned, t->parts.q, t->queries * width * sizeof(float));
    for (uint32_t i = 0; i < t->queries; i++) {
        float *row = t->parts.q_turned + i * width;
        t->kv->codec.rotate(row, keys->signs, keys->width, keys->shape.block);
        t->kv->codec.query(row, keys->width, t->parts.q_codes + i * width, &t->parts.q_scale[i]);
    }
    if (t->layer->calibration)
        lay_along(t);
}

static void set_bias(const tile *t, uint64_t position)
{
    uint32_t width = t->layer->side[RF_KV_K].width;
    if (!t->layer->calibration) {
        memset(t->parts.bias, 0, t->queries * sizeof(float));
        return;
    }
    const float *phases = rf_kv_phases_of(t->kv, t->job->slot, position);
    for (uint32_t q = 0; q < t->queries; q++) {
        const float *along = t->parts.along + (uint64_t)q * width;
        float lanes[8] = {0};
        for (uint32_t i = 0; i < width; i += 8) {
            for (uint32_t l = 0; l < 8; l++)
                lanes[l] += along[i + l] * phases[i + l];
        }
        float sum = ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) +
                    ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
        t->parts.bias[q] = sum * t->job->scale;
    }
}

static uint64_t position_of(const tile *t, uint32_t query)
{
    return t->job->first_position + t->first_token + query / t->group;
}

/* Which of [from, to), counted from anchor, every query sees; from is at or behind the sinks, or
 * the range is part of them. */
static bool set_visible(const tile *t, uint64_t anchor, uint64_t from, uint64_t to)
{
    bool any = false;
    for (uint32_t q = 0; q < t->queries; q++) {
        uint64_t position = position_of(t, q), first = from;
        if (from >= t->kv->sinks)
            first = RF_MAX(from, rf_kv_seen_from(t->kv, t->layer->window, position));
        uint64_t last = RF_MIN(position + 1, to);
        rf_attend_range range = {0, 0};
        if (first < last)
            range = (rf_attend_range){(uint32_t)(first - anchor), (uint32_t)(last - anchor)};
        any |= first < last;
        t->parts.visible[q] = range;
    }
    return any;
}

/* ---- rows --------------------------------------------------------------------------------- */

/* Where the rows of [from, to) lie as r8 beside their narrow form. */
static uint32_t recent_runs(const tile *t, const rf_kv_side_store *store, uint64_t from,
                            uint64_t to, rf_kv_run runs[RF_KV_RUNS_MAX])
{
    uint32_t count = 0;
    while (from < to) {
        uint64_t row = from % store->recent_count;
        uint64_t n = RF_MIN(to - from, store->recent_count - row);
        uint64_t at = head_index(t) * store->recent_count + row;
        runs[count++] = (rf_kv_run){from, n, store->recent + at * store->recent_shape.row_bytes};
        from += n;
    }
    return count;
}

static void expand(const tile *t, rf_kv_side side, bool is_near, uint64_t anchor, uint64_t from,
                   uint64_t to, int8_t *codes, float *scales)
{
    const rf_kv_side_store *store = &t->layer->side[side];
    bool recent = is_near && store->recent;
    const rf_kv_shape *shape = recent ? &store->recent_shape : &store->shape;
    rf_kv_run runs[RF_KV_RUNS_MAX];
    uint32_t count =
        recent ? recent_runs(t, store, from, to, runs)
               : rf_kv_window(t->kv, t->job->slot, t->job->layer, t->head, side, from, to, runs);
    for (uint32_t r = 0; r < count; r++) {
        uint64_t row = runs[r].first_position - anchor;
        t->kv->codec.expand(shape, runs[r].rows, (uint32_t)runs[r].count, store->bases[t->head],
                            codes + row * store->width, scales + row * shape->span_count);
    }
}

static void code_block(const tile *t, const rf_attend_range *visible, bool is_near, uint64_t anchor,
                       uint64_t from, uint64_t to)
{
    const tile_parts *p = &t->parts;
    const rf_kv_side_store *keys = &t->layer->side[RF_KV_K], *values = &t->layer->side[RF_KV_V];
    expand(t, RF_KV_K, is_near, anchor, from, to, p->k_codes, p->k_scale);
    expand(t, RF_KV_V, is_near, anchor, from, to, p->v_codes, p->v_scale);
    rf_attend_codes attend = {.q = p->q_codes,
                              .q_scale = p->q_scale,
                              .bias = p->bias,
                              .query_count = t->queries,
                              .visible = visible,
                              .k = p->k_codes,
                              .k_scale = p->k_scale,
                              .k_width = keys->width,
                              .k_spans = is_near && keys->recent ? keys->recent_shape.span_count
                                                                 : keys->shape.span_count,
                              .v = p->v_codes,
                              .v_scale = p->v_scale,
                              .v_width = values->width,
                              .v_spans = is_near && values->recent ? values->recent_shape.span_count
                                                                   : values->shape.span_count,
                              .count = (uint32_t)(to - anchor),
                              .scale = t->job->scale,
                              .state = p->state,
                              .out = p->out,
                              .out_stride = values->width,
                              .scores = p->scores};
    t->kv->codec.attend(&attend);
}

/* Rows of one side as f32, in the space of the tile's queries; row j is position anchor + j. */
static const float *wide_rows(const tile *t, rf_kv_side side, bool is_near, uint64_t anchor,
                              uint64_t from, uint64_t to, float *scratch)
{
    const rf_kv_side_store *store = &t->layer->side[side];
    rf_kv_run runs[RF_KV_RUNS_MAX];
    float *to_row = scratch + (from - anchor) * store->width;
    if (!is_coded(store)) {
        uint32_t count =
            rf_kv_window(t->kv, t->job->slot, t->job->layer, t->head, side, from, to, runs);
        if (count == 1 && from == anchor && store->format->plain == RF_F32)
            return runs[0].rows;
        for (uint32_t r = 0; r < count; r++) {
            /* Rows of a run lie behind each other: one long row of a format without blocks. */
            uint32_t elements = (uint32_t)runs[r].count * store->width;
            t->kv->kernels.kv_decode[store->format->plain](runs[r].rows, to_row, elements);
            to_row += elements;
        }
        return scratch;
    }
    int8_t *codes = side == RF_KV_K ? t->parts.k_codes : t->parts.v_codes;
    float *scales = side == RF_KV_K ? t->parts.k_scale : t->parts.v_scale;
    const rf_kv_shape *shape = is_near && store->recent ? &store->recent_shape : &store->shape;
    bool has_mean = side == RF_KV_K && t->layer->calibration;
    if (is_wide(store)) {
        uint32_t count =
            rf_kv_window(t->kv, t->job->slot, t->job->layer, t->head, side, from, to, runs);
        for (uint32_t r = 0; r < count; r++) {
            rf_kv_widen(shape, runs[r].rows, (uint32_t)runs[r].count, store->bases[t->head],
                        to_row);
            to_row += runs[r].count * store->width;
        }
        return scratch;
    }
    expand(t, side, is_near, anchor, from, to, codes, scales);
    if (has_mean) {
        rf_kv_block_mean(t->kv, t->job->slot, t->layer, t->head, anchor, t->parts.mean);
        t->kv->codec.rotate(t->parts.mean, store->signs, store->width, store->shape.block);
    }
    for (uint64_t j = from - anchor; j < to - anchor; j++) {
        for (uint32_t i = 0; i < store->width; i++) {
            float scale = scales[j * shape->span_count + i / shape->span];
            scratch[j * store->width + i] =
                scale * (float)codes[j * store->width + i] + (has_mean ? t->parts.mean[i] : 0.0f);
        }
    }
    return scratch;
}

static void wide_call(const tile *t, const rf_attend_range *visible, const float *k, const float *v,
                      uint32_t count)
{
    const tile_parts *p = &t->parts;
    uint32_t k_width = t->layer->side[RF_KV_K].width, v_width = t->layer->side[RF_KV_V].width;
    rf_attend attend = {.q = t->k_coded ? p->q_turned : p->q,
                        .q_stride = k_width,
                        .query_count = t->queries,
                        .visible = visible,
                        .k = k,
                        .v = v,
                        .count = count,
                        .k_width = k_width,
                        .v_width = v_width,
                        .scale = t->job->scale,
                        .state = p->state,
                        .out = p->out,
                        .out_stride = v_width,
                        .scores = p->scores};
    t->kv->kernels.attend(&attend);
}

/* Queries that read the block in one form. */
static void run_block(const tile *t, const rf_attend_range *visible, bool is_near, uint64_t anchor,
                      uint64_t from, uint64_t to)
{
    if (t->in_codes) {
        code_block(t, visible, is_near, anchor, from, to);
        return;
    }
    const float *k = wide_rows(t, RF_KV_K, is_near, anchor, from, to, t->parts.k);
    const float *v = wide_rows(t, RF_KV_V, is_near, anchor, from, to, t->parts.v);
    wide_call(t, visible, k, v, (uint32_t)(to - anchor));
}

/* Some queries read a block as it is kept, some, where the format says so, as r8. */
static void run_range(const tile *t, uint64_t from, uint64_t to)
{
    bool has_recent = t->layer->side[RF_KV_K].recent || t->layer->side[RF_KV_V].recent;
    uint64_t size = has_recent ? RF_KV_RECENT_BLOCK : RF_ATTEND_BLOCK;
    for (uint64_t block = from / size; from < to && block * size < to; block++) {
        uint64_t anchor = block * size;
        uint64_t first = RF_MAX(anchor, from), last = RF_MIN(anchor + size, to);
        bool any_near = false, any_far = false;
        if (!set_visible(t, anchor, first, last))
            continue;
        if (t->in_codes)
            set_bias(t, anchor);
        for (uint32_t q = 0; q < t->queries; q++) {
            rf_attend_range none = {0, 0}, seen = t->parts.visible[q];
            uint64_t own = position_of(t, q) / RF_KV_RECENT_BLOCK;
            bool is_far = has_recent && block + t->kv->recent_blocks < own;
            t->parts.far[q] = is_far ? seen : none;
            t->parts.visible[q] = is_far ? none : seen;
            any_far |= is_far && seen.first < seen.last;
            any_near |= !is_far && seen.first < seen.last;
        }
        if (any_near)
            run_block(t, t->parts.visible, true, anchor, first, last);
        if (any_far)
            run_block(t, t->parts.far, false, anchor, first, last);
    }
}

/* Position 0 as it was kept apart, in f16, or as the ring has it on a side that keeps nothing. */
static void first_row(const tile *t)
{
    float *rows[2] = {t->parts.k, t->parts.v};
    if (!set_visible(t, 0, 0, 1))
        return;
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &t->layer->side[side];
        if (!store->first) {
            const float *row = wide_rows(t, (rf_kv_side)side, false, 0, 0, 1, rows[side]);
            if (row != rows[side])
                memcpy(rows[side], row, store->width * sizeof(float));
            continue;
        }
        const uint16_t *first = store->first + head_index(t) * store->width;
        for (uint32_t i = 0; i < store->width; i++)
            rows[side][i] = rf_f16_to_f32(first[i]);
        t->kv->codec.rotate(rows[side], store->signs, store->width, store->shape.block);
    }
    wide_call(t, t->parts.visible, rows[RF_KV_K], rows[RF_KV_V], 1);
}

/* ---- units -------------------------------------------------------------------------------- */

static void finish(const tile *t)
{
    const rf_kv_side_store *values = &t->layer->side[RF_KV_V];
    for (uint32_t i = 0; i < t->queries; i++) {
        float *sum = t->parts.out + (uint64_t)i * values->width;
        float *out = t->job->out + (t->first_token + i / t->group) * t->job->out_stride +
                     ((uint64_t)t->head * t->group + i % t->group) * values->width;
        float inverse = 1.0f / t->parts.state[i * 2 + 1];
        if (t->v_coded)
            t->kv->codec.turn_back(sum, values->signs, values->width, values->shape.block);
        for (uint32_t d = 0; d < values->width; d++)
            out[d] = sum[d] * inverse;
    }
}

static void attend_tile(const tile *t)
{
    for (uint32_t i = 0; i < t->queries; i++) {
        t->parts.state[i * 2] = -__builtin_inff();
        t->parts.state[i * 2 + 1] = 0.0f;
    }
    memset(t->parts.out, 0, (uint64_t)t->queries * t->layer->side[RF_KV_V].width * sizeof(float));
    uint64_t end = t->job->first_position + t->first_token + t->tokens;
    uint64_t begin =
        rf_kv_seen_from(t->kv, t->layer->window, t->job->first_position + t->first_token);
    uint64_t sinks = t->kv->sinks;
    bool has_first = t->layer->side[RF_KV_K].first || t->layer->side[RF_KV_V].first;
    uint64_t from = has_first ? 1 : 0;

    set_queries(t, t->job->q_sink ? t->job->q_sink : t->job->q);
    if (has_first && (sinks > 0 || begin == 0))
        first_row(t);
    run_range(t, from, RF_MIN(sinks, end));
    if (t->job->q_sink)
        set_queries(t, t->job->q);
    from = RF_MAX(from, sinks);
    run_range(t, RF_MAX(from, begin), end);
    finish(t);
}

/* The job on the layer that has the rows. */
static rf_kv_attend on_owner(const rf_kv *kv, const rf_kv_attend *job)
{
    rf_kv_attend owned = *job;
    owned.layer = kv->layers[job->layer].reads;
    return owned;
}

uint32_t rf_kv_attend_units(const rf_kv *kv, const rf_kv_attend *job)
{
    uint32_t kv_heads = kv->layers[on_owner(kv, job).layer].kv_heads;
    uint32_t tokens = tile_tokens(job->heads / kv_heads);
    return kv_heads * ((job->token_count + tokens - 1) / tokens);
}

void rf_kv_attend_run(const rf_kv *kv, const rf_kv_attend *job, uint32_t first_unit,
                      uint32_t last_unit, void *scratch)
{
    const rf_kv_attend owned = on_owner(kv, job);
    const rf_kv_layer_store *layer = &kv->layers[owned.layer];
    tile t = {.kv = kv, .job = &owned, .layer = layer, .group = job->heads / layer->kv_heads};
    uint32_t tokens = tile_tokens(t.group);
    t.k_coded = is_coded(&layer->side[RF_KV_K]);
    t.v_coded = is_coded(&layer->side[RF_KV_V]);
    t.in_codes = works_in_codes(layer);
    lay_parts(scratch, layer->side[RF_KV_K].width, layer->side[RF_KV_V].width, t.group, &t.parts);
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        t.head = unit % layer->kv_heads;
        t.first_token = unit / layer->kv_heads * tokens;
        t.tokens = RF_MIN(tokens, job->token_count - t.first_token);
        t.queries = t.tokens * t.group;
        attend_tile(&t);
    }
}

/* Plain rows become f32, coded ones an int8 code an element; f32 rows are read where they lie. */
uint64_t rf_kv_attend_widened_bytes(const rf_kv *kv, const rf_kv_attend *job)
{
    const rf_kv_layer_store *layer = &kv->layers[on_owner(kv, job).layer];
    uint32_t tokens = tile_tokens(job->heads / layer->kv_heads);
    bool in_codes = works_in_codes(layer);
    uint64_t row = 0, bytes = 0; /* of one position of one head, both sides */
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        if (store->format->plain != RF_F32)
            row += store->width * (in_codes ? 1u : sizeof(float));
    }
    for (uint32_t first = 0; row && first < job->token_count; first += tokens) {
        uint64_t begin = rf_kv_seen_from(kv, layer->window, job->first_position + first);
        uint64_t end = job->first_position + RF_MIN(first + tokens, job->token_count);
        uint64_t sinks = RF_MIN(begin, (uint64_t)kv->sinks);
        bytes += (end - begin + sinks) * row * layer->kv_heads;
    }
    return bytes;
}
