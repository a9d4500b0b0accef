/* kv/attend.c: attention of a chunk's tokens over a layer's ring.
 *
 *   tile  = one KV head x some tokens; all heads of the group and all tokens share each row
 *   part  = RF_KV_PART positions, anchored at multiples of that; before them position 0 where it
 *           is kept apart and the sinks, a part of their own
 *   block = RF_ATTEND_BLOCK positions of a part, anchored alike: one call of the kernel
 *
 * Each part is attended to from nothing and joined to those before it in ascending order, always:
 * a tile of a prompt walks through its parts; those of a few tokens are units of their own, whose
 * results wait in the job's memory until rf_kv_attend_join. What a query reads depends on positions
 * alone and its arithmetic is its own, so the bits are the same in prefill and decode, in a wrapped
 * ring and a linear one, and on any worker.
 *
 * Plain rows and codes of 8 bits are read where they lie, narrower codes are expanded to int8 once
 * for the tile; a block that a ring's end cuts in two is put together first.
 */
#include "kv/store.h"

#include <string.h>

#define TILE_QUERIES 64u /* derived: 64 queries of width 64 are 16 KiB, half of a small L1 cache */

/* So many tokens as fill a tile of a head, but not so few tiles that a team finds no work. */
static uint32_t tile_tokens(uint32_t group, uint32_t token_count)
{
    uint32_t most = group >= TILE_QUERIES ? 1 : TILE_QUERIES / group;
    return RF_MIN(most, RF_MAX(RF_KV_SPLIT_TOKENS, (token_count + 3) / 4));
}

/* ---- scratch ------------------------------------------------------------------------------ */

typedef struct tile_parts {
    float *q;        /* [query][k_width] as they came, for the means */
    float *q_turned; /* the same, rotated where keys are coded */
    int16_t *q_codes;
    float *q_scale, *bias;
    float *along;       /* [query][k_width]: q against the mean, as it turns */
    float *state, *out; /* of all parts so far */
    float *part_state, *part_out;
    uint8_t *rows[2]; /* [RF_ATTEND_BLOCK] rows of a side: as f32, as int8, or put together */
    float *scales[2];
    float *mean;
    rf_attend_range *visible, *far;
    void *kernel;
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
    uint64_t queries = (uint64_t)tile_tokens(group, UINT32_MAX - 3) * group;
    uint64_t block = RF_ATTEND_BLOCK, at = 0;
    *parts =
        (tile_parts){.q = cut(scratch, &at, queries * k_width, sizeof(float)),
                     .q_turned = cut(scratch, &at, queries * k_width, sizeof(float)),
                     .q_codes = cut(scratch, &at, queries * k_width, sizeof(int16_t)),
                     .q_scale = cut(scratch, &at, queries, sizeof(float)),
                     .bias = cut(scratch, &at, queries, sizeof(float)),
                     .along = cut(scratch, &at, queries * k_width, sizeof(float)),
                     .state = cut(scratch, &at, queries * 2, sizeof(float)),
                     .out = cut(scratch, &at, queries * v_width, sizeof(float)),
                     .part_state = cut(scratch, &at, queries * 2, sizeof(float)),
                     .part_out = cut(scratch, &at, queries * v_width, sizeof(float)),
                     .rows = {cut(scratch, &at, block * k_width, sizeof(float)),
                              cut(scratch, &at, block * v_width, sizeof(float))},
                     .scales = {cut(scratch, &at, block * (k_width / 8), sizeof(float)),
                                cut(scratch, &at, block * (v_width / 8), sizeof(float))},
                     .mean = cut(scratch, &at, k_width, sizeof(float)),
                     .visible = cut(scratch, &at, queries, sizeof(rf_attend_range)),
                     .far = cut(scratch, &at, queries, sizeof(rf_attend_range)),
                     .kernel = cut(scratch, &at, rf_attend_scratch_bytes(k_width, v_width), 1)};
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
    bool k_coded;
    float *state, *out; /* of the part in hand: [query][2], [query][v_width] */
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

/* Whether rows in this form are read as int8 codes where they lie. */
static bool lies_as_int8(const rf_kv_side_store *store, bool is_near)
{
    const rf_kv_shape *shape = is_near && store->recent ? &store->recent_shape : &store->shape;
    return is_coded(store) && rf_kv_is_int8(shape);
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

/* What the mean of the keys around position adds to scores. */
static void set_bias(const tile *t, uint64_t position)
{
    uint32_t width = t->layer->side[RF_KV_K].width;
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

/* What a kernel gets of one side of a block: row 0 is that of position anchor, which may lie before
 * the first row that there is; nobody sees it then. */
static rf_attend_rows side_rows(const tile *t, rf_kv_side side, bool is_near, uint64_t anchor,
                                uint64_t from, uint64_t to)
{
    const rf_kv_side_store *store = &t->layer->side[side];
    bool recent = is_near && store->recent;
    const rf_kv_shape *shape = recent ? &store->recent_shape : &store->shape;
    bool coded = is_coded(store), int8 = coded && lies_as_int8(store, is_near);
    uint64_t before = from - anchor, width = store->width;
    uint64_t row_bytes = coded ? shape->row_bytes : store->row_bytes;
    rf_kv_run runs[RF_KV_RUNS_MAX];
    uint32_t count =
        recent ? recent_runs(t, store, from, to, runs)
               : rf_kv_window(t->kv, t->job->slot, t->job->layer, t->head, side, from, to, runs);
    rf_attend_rows rows = {.width = store->width,
                           .stride = row_bytes,
                           .scale = t->parts.scales[side],
                           .spans = coded ? shape->span_count : 1};
    uint8_t *to_row = t->parts.rows[side];
    if (coded && !is_wide(store)) {
        rows.form = RF_ATTEND_INT8;
    } else if (!coded && store->format->plain != RF_F32) {
        rows.form = store->format->plain == RF_F16 ? RF_ATTEND_F16 : RF_ATTEND_BF16;
    }
    bool in_place = count == 1 && (!coded || int8);
    if (coded && !int8)
        rows.stride = width * (is_wide(store) ? sizeof(float) : 1);
    rows.rows = to_row;
    if (in_place) /* row 0 may lie outside the ring; its address is all there is of it */
        rows.rows = (const void *)((uintptr_t)runs[0].rows - before * row_bytes);
    float *scales = t->parts.scales[side] + before * rows.spans;
    to_row += before * rows.stride;
    for (uint32_t r = 0; r < count; r++) {
        uint32_t n = (uint32_t)runs[r].count;
        if (is_wide(store)) {
            rf_kv_widen(shape, runs[r].rows, n, store->bases[t->head], (float *)(void *)to_row);
        } else if (coded) {
            t->kv->codec.expand(shape, runs[r].rows, n, store->bases[t->head],
                                int8 ? NULL : (int8_t *)to_row, scales);
        }
        if (!in_place && (!coded || int8))
            memcpy(to_row, runs[r].rows, n * row_bytes);
        to_row += n * rows.stride;
        scales += n * rows.spans;
    }
    return rows;
}

/* The block's mean, which wide keys need in their rows: codes have it in the bias. */
static void add_mean(const tile *t, uint64_t anchor, uint64_t from, uint64_t to)
{
    const rf_kv_side_store *keys = &t->layer->side[RF_KV_K];
    float *rows = (float *)(void *)t->parts.rows[RF_KV_K];
    rf_kv_block_mean(t->kv, t->job->slot, t->layer, t->head, anchor, t->parts.mean);
    t->kv->codec.rotate(t->parts.mean, keys->signs, keys->width, keys->shape.block);
    for (uint64_t j = from - anchor; j < to - anchor; j++) {
        for (uint32_t i = 0; i < keys->width; i++)
            rows[j * keys->width + i] += t->parts.mean[i];
    }
}

static void call_kernel(const tile *t, const rf_attend_range *visible, const rf_attend_rows *k,
                        const rf_attend_rows *v)
{
    const tile_parts *p = &t->parts;
    bool has_bias = k->form == RF_ATTEND_INT8 && t->layer->calibration;
    rf_attend attend = {.q = t->k_coded ? p->q_turned : p->q,
                        .q_codes = p->q_codes,
                        .q_scale = p->q_scale,
                        .bias = has_bias ? p->bias : NULL,
                        .q_stride = k->width,
                        .query_count = t->queries,
                        .visible = visible,
                        .k = *k,
                        .v = *v,
                        .scale = t->job->scale,
                        .state = t->state,
                        .out = t->out,
                        .out_stride = v->width,
                        .scratch = p->kernel};
    t->kv->kernels.attend(&attend);
}

/* Queries that read the block in one form. */
static void run_block(const tile *t, const rf_attend_range *visible, bool is_near, uint64_t anchor,
                      uint64_t from, uint64_t to)
{
    rf_attend_rows k = side_rows(t, RF_KV_K, is_near, anchor, from, to);
    rf_attend_rows v = side_rows(t, RF_KV_V, is_near, anchor, from, to);
    if (t->layer->calibration && k.form == RF_ATTEND_F32 && t->k_coded)
        add_mean(t, anchor, from, to);
    call_kernel(t, visible, &k, &v);
}

/* Some queries read a block as it is kept, some, where the format says so, as r8. */
static void run_range(const tile *t, uint64_t from, uint64_t to)
{
    bool has_recent = t->layer->side[RF_KV_K].recent || t->layer->side[RF_KV_V].recent;
    bool has_bias = t->k_coded && t->layer->calibration && !is_wide(&t->layer->side[RF_KV_K]);
    uint64_t size = has_recent ? RF_KV_RECENT_BLOCK : RF_ATTEND_BLOCK, biased = UINT64_MAX;
    for (uint64_t block = from / size; from < to && block * size < to; block++) {
        uint64_t anchor = block * size;
        uint64_t first = RF_MAX(anchor, from), last = RF_MIN(anchor + size, to);
        bool any_near = false, any_far = false;
        if (!set_visible(t, anchor, first, last))
            continue;
        if (has_bias && anchor / RF_KV_MEAN_BLOCK != biased)
            set_bias(t, anchor);
        biased = anchor / RF_KV_MEAN_BLOCK;
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
    rf_attend_rows rows[2];
    if (!set_visible(t, 0, 0, 1))
        return;
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &t->layer->side[side];
        if (!store->first) {
            rows[side] = side_rows(t, (rf_kv_side)side, false, 0, 0, 1);
            continue;
        }
        const uint16_t *first = store->first + head_index(t) * store->width;
        float *row = (float *)(void *)t->parts.rows[side];
        for (uint32_t i = 0; i < store->width; i++)
            row[i] = rf_f16_to_f32(first[i]);
        t->kv->codec.rotate(row, store->signs, store->width, store->shape.block);
        rows[side] = (rf_attend_rows){.rows = row,
                                      .stride = store->width * sizeof(float),
                                      .width = store->width,
                                      .form = RF_ATTEND_F32};
    }
    call_kernel(t, t->parts.visible, &rows[RF_KV_K], &rows[RF_KV_V]);
}

/* ---- parts -------------------------------------------------------------------------------- */

static bool has_first(const rf_kv_layer_store *layer)
{
    return layer->side[RF_KV_K].first || layer->side[RF_KV_V].first;
}

/* What tokens [first, first + count) of a job see: pinned positions (the first one where it is kept
 * apart, and the sinks), and [from, end) behind them, in parts [first_part, last_part). */
typedef struct view {
    bool has_pinned;
    uint64_t from, end;
    uint64_t first_part, last_part;
} view;

static view view_of(const rf_kv *kv, const rf_kv_layer_store *layer, const rf_kv_attend *job,
                    uint32_t first, uint32_t count)
{
    uint64_t begin = rf_kv_seen_from(kv, layer->window, job->first_position + first);
    uint64_t pinned = RF_MAX((uint64_t)kv->sinks, has_first(layer) ? 1u : 0u);
    view v = {.has_pinned = kv->sinks > 0 || (has_first(layer) && begin == 0),
              .from = RF_MAX(begin, pinned),
              .end = job->first_position + first + count};
    v.first_part = v.from / RF_KV_PART;
    v.last_part = v.from < v.end ? (v.end - 1) / RF_KV_PART + 1 : v.first_part;
    return v;
}

static void start(float *state, float *out, uint64_t queries, uint64_t width)
{
    for (uint64_t i = 0; i < queries; i++) {
        state[i * 2] = -__builtin_inff();
        state[i * 2 + 1] = 0.0f;
    }
    memset(out, 0, queries * width * sizeof(float));
}

static void pinned_part(tile *t, const view *v)
{
    start(t->state, t->out, t->queries, t->layer->side[RF_KV_V].width);
    if (!v->has_pinned)
        return;
    set_queries(t, t->job->q_sink ? t->job->q_sink : t->job->q);
    if (has_first(t->layer))
        first_row(t);
    run_range(t, has_first(t->layer) ? 1 : 0, RF_MIN((uint64_t)t->kv->sinks, v->end));
}

static void part(tile *t, const view *v, uint64_t index)
{
    start(t->state, t->out, t->queries, t->layer->side[RF_KV_V].width);
    run_range(t, RF_MAX(v->from, index * RF_KV_PART), RF_MIN(v->end, (index + 1) * RF_KV_PART));
}

/* Sums of one query to its output; sum is turned back in place. */
static void finish(const rf_kv *kv, const rf_kv_side_store *values, const float *state, float *sum,
                   float *out)
{
    float inverse = 1.0f / state[1];
    if (is_coded(values))
        kv->codec.turn_back(sum, values->signs, values->width, values->shape.block);
    for (uint32_t d = 0; d < values->width; d++)
        out[d] = sum[d] * inverse;
}

static float *out_of(const rf_kv_attend *job, uint32_t token, uint32_t head, uint32_t width)
{
    return job->out + token * job->out_stride + (uint64_t)head * width;
}

static void join_part(const tile *t)
{
    uint32_t width = t->layer->side[RF_KV_V].width;
    for (uint32_t i = 0; i < t->queries; i++) {
        t->kv->kernels.attend_join(t->parts.state + i * 2, t->parts.out + (uint64_t)i * width,
                                   t->state + i * 2, t->out + (uint64_t)i * width, width);
    }
}

/* A tile by itself. Its first part is attended to where the sums of all belong: joined to nothing
 * it would stay as it is. */
static void walk(tile *t)
{
    const rf_kv_side_store *values = &t->layer->side[RF_KV_V];
    const view v = view_of(t->kv, t->layer, t->job, t->first_token, t->tokens);
    bool is_first = !v.has_pinned;
    t->state = t->parts.state;
    t->out = t->parts.out;
    if (v.has_pinned)
        pinned_part(t, &v);
    if (!v.has_pinned || t->job->q_sink)
        set_queries(t, t->job->q);
    for (uint64_t index = v.first_part; index < v.last_part; index++) {
        if (!is_first) {
            t->state = t->parts.part_state;
            t->out = t->parts.part_out;
        }
        part(t, &v, index);
        if (!is_first)
            join_part(t);
        is_first = false;
    }
    for (uint32_t i = 0; i < t->queries; i++) {
        finish(t->kv, values, t->parts.state + i * 2, t->parts.out + (uint64_t)i * values->width,
               out_of(t->job, t->first_token + i / t->group, t->head * t->group + i % t->group,
                      values->width));
    }
}

/* ---- units -------------------------------------------------------------------------------- */

/* The job on the layer that has the rows. */
static rf_kv_attend on_owner(const rf_kv *kv, const rf_kv_attend *job)
{
    rf_kv_attend owned = *job;
    owned.layer = kv->layers[job->layer].reads;
    return owned;
}

/* Floats of one head's queries in one part, whole cache lines: states, then sums. */
static uint64_t part_floats(uint64_t queries, uint64_t v_width)
{
    uint64_t line = RF_CACHE_LINE / sizeof(float);
    return (queries * (2 + v_width) + line - 1) / line * line;
}

uint64_t rf_kv_parts_bytes(uint64_t positions, uint32_t v_width, uint32_t group, uint32_t kv_heads)
{
    /* The pinned part, and those of positions that begin and end within one; tokens of a job see
     * theirs one further on each. */
    uint64_t parts = 1 + (positions + RF_KV_SPLIT_TOKENS - 1) / RF_KV_PART + 2;
    return parts * kv_heads * part_floats(group, v_width) * sizeof(float);
}

uint64_t rf_kv_attend_parts_bytes(const rf_kv *kv, const rf_kv_attend *job)
{
    const rf_kv_layer_store *layer = &kv->layers[on_owner(kv, job).layer];
    const view v = view_of(kv, layer, job, 0, job->token_count);
    uint32_t group = job->heads / layer->kv_heads;
    /* One tile of a head, and a context that is worth to be shared out. */
    if (job->token_count > RF_MIN(RF_KV_SPLIT_TOKENS, tile_tokens(group, UINT32_MAX - 3)) ||
        v.last_part - v.first_part < 2)
        return 0;
    return (1 + v.last_part - v.first_part) * layer->kv_heads *
           part_floats((uint64_t)job->token_count * group, layer->side[RF_KV_V].width) *
           sizeof(float);
}

uint32_t rf_kv_attend_units(const rf_kv *kv, const rf_kv_attend *job)
{
    const rf_kv_layer_store *layer = &kv->layers[on_owner(kv, job).layer];
    if (job->parts) {
        const view v = view_of(kv, layer, job, 0, job->token_count);
        return layer->kv_heads * (uint32_t)(v.last_part - v.first_part);
    }
    uint32_t tokens = tile_tokens(job->heads / layer->kv_heads, job->token_count);
    return layer->kv_heads * ((job->token_count + tokens - 1) / tokens);
}

/* Where part `index` of a head waits: 0 is the pinned one. */
static float *part_at(const tile *t, uint32_t head, uint64_t index)
{
    uint64_t floats = part_floats(t->queries, t->layer->side[RF_KV_V].width);
    return t->job->parts + (index * t->layer->kv_heads + head) * floats;
}

static void use_part(tile *t, uint64_t index)
{
    t->state = part_at(t, t->head, index);
    t->out = t->state + t->queries * 2;
}

/* Units of a head follow each other, so a worker that gets several sets their queries once. */
static void run_parts(tile *t, uint32_t first_unit, uint32_t last_unit)
{
    const view v = view_of(t->kv, t->layer, t->job, 0, t->job->token_count);
    uint32_t parts = (uint32_t)(v.last_part - v.first_part);
    t->tokens = t->job->token_count;
    t->queries = t->tokens * t->group;
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        uint32_t index = unit % parts;
        t->head = unit / parts;
        if (index == 0) {
            use_part(t, 0);
            pinned_part(t, &v);
        }
        bool is_set = index == 0 && v.has_pinned && !t->job->q_sink;
        if (!is_set && (unit == first_unit || index == 0))
            set_queries(t, t->job->q);
        use_part(t, 1 + index);
        part(t, &v, v.first_part + index);
    }
}

static tile tile_of(const rf_kv *kv, const rf_kv_attend *owned, void *scratch)
{
    const rf_kv_layer_store *layer = &kv->layers[owned->layer];
    tile t = {.kv = kv, .job = owned, .layer = layer, .group = owned->heads / layer->kv_heads};
    t.k_coded = is_coded(&layer->side[RF_KV_K]);
    lay_parts(scratch, layer->side[RF_KV_K].width, layer->side[RF_KV_V].width, t.group, &t.parts);
    return t;
}

void rf_kv_attend_run(const rf_kv *kv, const rf_kv_attend *job, uint32_t first_unit,
                      uint32_t last_unit, void *scratch)
{
    const rf_kv_attend owned = on_owner(kv, job);
    tile t = tile_of(kv, &owned, scratch);
    uint32_t tokens = tile_tokens(t.group, job->token_count);
    if (job->parts) {
        run_parts(&t, first_unit, last_unit);
        return;
    }
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        t.head = unit % t.layer->kv_heads;
        t.first_token = unit / t.layer->kv_heads * tokens;
        t.tokens = RF_MIN(tokens, job->token_count - t.first_token);
        t.queries = t.tokens * t.group;
        walk(&t);
    }
}

void rf_kv_attend_join(const rf_kv *kv, const rf_kv_attend *job, uint32_t first_unit,
                       uint32_t last_unit, void *scratch)
{
    const rf_kv_attend owned = on_owner(kv, job);
    tile t = tile_of(kv, &owned, scratch);
    const rf_kv_side_store *values = &t.layer->side[RF_KV_V];
    const view v = view_of(kv, t.layer, &owned, 0, job->token_count);
    uint64_t parts = 1 + v.last_part - v.first_part;
    t.queries = job->token_count * t.group;
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        uint32_t token = unit / job->heads, head = unit % job->heads;
        uint64_t query = (uint64_t)token * t.group + head % t.group;
        start(t.parts.state, t.parts.out, 1, values->width);
        for (uint64_t index = 0; index < parts; index++) {
            const float *state = part_at(&t, head / t.group, index);
            const float *sum = state + t.queries * 2 + query * values->width;
            kv->kernels.attend_join(t.parts.state, t.parts.out, state + query * 2, sum,
                                    values->width);
        }
        finish(kv, values, t.parts.state, t.parts.out, out_of(&owned, token, head, values->width));
    }
}

/* Narrow codes become an int8 for each element, wide ones f32; others are read where they lie. */
uint64_t rf_kv_attend_widened_bytes(const rf_kv *kv, const rf_kv_attend *job)
{
    const rf_kv_layer_store *layer = &kv->layers[on_owner(kv, job).layer];
    uint32_t tokens = tile_tokens(job->heads / layer->kv_heads, job->token_count);
    uint64_t row = 0, bytes = 0; /* of one position of one head, both sides */
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        const rf_kv_side_store *store = &layer->side[side];
        if (is_coded(store) && !lies_as_int8(store, false))
            row += store->width * (is_wide(store) ? sizeof(float) : 1u);
    }
    for (uint32_t first = 0; row && first < job->token_count; first += tokens) {
        uint64_t begin = rf_kv_seen_from(kv, layer->window, job->first_position + first);
        uint64_t end = job->first_position + RF_MIN(first + tokens, job->token_count);
        uint64_t sinks = RF_MIN(begin, (uint64_t)kv->sinks);
        bytes += (end - begin + sinks) * row * layer->kv_heads;
    }
    return bytes;
}
