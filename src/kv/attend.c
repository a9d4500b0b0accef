/* kv/attend.c: attention of a chunk's tokens over a layer's ring.
 *
 *   unit = one KV head x one tile of tokens
 *   for each block of 64 positions, anchored at multiples of 64, in ascending order:
 *       its K and V rows as f32 (straight from the ring when they are f32 and lie together),
 *       one call of the attend kernel for all queries of the tile
 *
 * All query heads of a group and all tokens of a tile share the decoded rows. Blocks are anchored
 * at absolute positions and each query's arithmetic is its own, so the result has the same bits in
 * prefill and decode, in a wrapped ring and a linear one, and on any worker.
 */
#include "kv/store.h"

#include <string.h>

#define TILE_QUERIES 64u /* derived: 64 queries of width 64 are 16 KiB, half of a small L1 cache */

static uint32_t tile_tokens(uint32_t group)
{
    return group >= TILE_QUERIES ? 1 : TILE_QUERIES / group;
}

typedef struct scratch_parts {
    float *k, *v, *q, *out, *state, *scores;
    rf_attend_range *visible;
} scratch_parts;

/* Lays the parts into scratch (NULL: only measures); returns the bytes. */
static uint64_t lay_scratch(uint8_t *scratch, uint32_t k_width, uint32_t v_width, uint32_t group,
                            scratch_parts *parts)
{
    uint64_t queries = (uint64_t)tile_tokens(group) * group;
    uint64_t floats[] = {(uint64_t)RF_ATTEND_BLOCK * k_width,
                         (uint64_t)RF_ATTEND_BLOCK * v_width,
                         queries * k_width,
                         queries * v_width,
                         queries * 2,
                         RF_ATTEND_BLOCK,
                         queries * 2};
    uint64_t offsets[RF_ARRAY_COUNT(floats)];
    uint64_t at = 0;
    for (size_t i = 0; i < RF_ARRAY_COUNT(floats); i++) {
        offsets[i] = at;
        at += (floats[i] * sizeof(float) + RF_CACHE_LINE - 1) & ~(uint64_t)(RF_CACHE_LINE - 1);
    }
    if (scratch) {
        parts->k = (float *)(scratch + offsets[0]);
        parts->v = (float *)(scratch + offsets[1]);
        parts->q = (float *)(scratch + offsets[2]);
        parts->out = (float *)(scratch + offsets[3]);
        parts->state = (float *)(scratch + offsets[4]);
        parts->scores = (float *)(scratch + offsets[5]);
        parts->visible = (rf_attend_range *)(scratch + offsets[6]);
    }
    return at;
}

uint64_t rf_kv_attend_scratch_bytes(uint32_t k_width, uint32_t v_width, uint32_t group)
{
    return lay_scratch(NULL, k_width, v_width, group, NULL);
}

uint32_t rf_kv_attend_units(const rf_kv *kv, const rf_kv_attend *job)
{
    uint32_t kv_heads = kv->layers[job->layer].kv_heads;
    uint32_t tokens = tile_tokens(job->heads / kv_heads);
    return kv_heads * ((job->token_count + tokens - 1) / tokens);
}

/* The rows of positions [from, to) of one side as f32 rows counted from the block's anchor: row j
 * is position anchor + j, and rows before from are not touched. scratch holds what must be decoded
 * or moved. */
static const float *block_rows(const rf_kv *kv, const rf_kernels *kernels, const rf_kv_attend *job,
                               uint32_t head, rf_kv_side side, uint64_t anchor, uint64_t from,
                               uint64_t to, float *scratch)
{
    const rf_kv_side_store *store = &kv->layers[job->layer].side[side];
    rf_kv_run runs[RF_KV_RUNS_MAX];
    uint32_t run_count = rf_kv_window(kv, job->slot, job->layer, head, side, from, to, runs);
    if (run_count == 1 && from == anchor && store->format == RF_F32)
        return runs[0].rows;
    float *to_row = scratch + (from - anchor) * store->width;
    for (uint32_t r = 0; r < run_count; r++) {
        const uint8_t *row = runs[r].rows;
        /* Rows of a run lie behind each other, so the run is one long row of a blockless format. */
        uint32_t elements = (uint32_t)runs[r].count * store->width;
        kernels->kv_decode[store->format](row, to_row, elements);
        to_row += elements;
    }
    return scratch;
}

static uint64_t seen_from(uint64_t position, uint32_t window)
{
    return window && position + 1 > window ? position + 1 - window : 0;
}

/* Which positions of the block [anchor, to) each token of the tile sees. */
static void set_visible(const rf_kv_attend *job, uint32_t first_token, uint32_t tokens,
                        uint32_t group, uint32_t window, uint64_t anchor, uint64_t to,
                        rf_attend_range *visible)
{
    for (uint32_t t = 0; t < tokens; t++) {
        uint64_t position = job->first_position + first_token + t;
        uint64_t first = RF_MAX(seen_from(position, window), anchor);
        uint64_t last = RF_MIN(position + 1, to);
        rf_attend_range range = {0, 0};
        if (first < last) {
            range = (rf_attend_range){(uint32_t)(first - anchor), (uint32_t)(last - anchor)};
        }
        for (uint32_t g = 0; g < group; g++)
            visible[t * group + g] = range;
    }
}

static void attend_tile(const rf_kv *kv, const rf_kernels *kernels, const rf_kv_attend *job,
                        uint32_t head, uint32_t first_token, uint32_t tokens,
                        const scratch_parts *parts)
{
    const rf_kv_layer_store *layer = &kv->layers[job->layer];
    uint32_t group = job->heads / layer->kv_heads;
    uint32_t k_width = layer->side[RF_KV_K].width;
    uint32_t v_width = layer->side[RF_KV_V].width;
    uint32_t queries = tokens * group;
    for (uint32_t t = 0; t < tokens; t++) {
        const float *q =
            job->q + (first_token + t) * job->q_stride + (uint64_t)head * group * k_width;
        memcpy(parts->q + (uint64_t)t * group * k_width, q, (uint64_t)group * k_width * sizeof *q);
    }
    for (uint32_t i = 0; i < queries; i++) {
        parts->state[i * 2] = -__builtin_inff();
        parts->state[i * 2 + 1] = 0.0f;
    }
    memset(parts->out, 0, (uint64_t)queries * v_width * sizeof(float));

    uint64_t end = job->first_position + first_token + tokens;
    uint64_t begin = seen_from(job->first_position + first_token, layer->window);
    for (uint64_t block = begin / RF_ATTEND_BLOCK; block * RF_ATTEND_BLOCK < end; block++) {
        uint64_t anchor = block * RF_ATTEND_BLOCK;
        uint64_t from = RF_MAX(anchor, begin);
        uint64_t to = RF_MIN(anchor + RF_ATTEND_BLOCK, end);
        set_visible(job, first_token, tokens, group, layer->window, anchor, to, parts->visible);
        rf_attend attend = {
            .q = parts->q,
            .q_stride = k_width,
            .query_count = queries,
            .visible = parts->visible,
            .k = block_rows(kv, kernels, job, head, RF_KV_K, anchor, from, to, parts->k),
            .v = block_rows(kv, kernels, job, head, RF_KV_V, anchor, from, to, parts->v),
            .count = (uint32_t)(to - anchor),
            .k_width = k_width,
            .v_width = v_width,
            .scale = job->scale,
            .state = parts->state,
            .out = parts->out,
            .out_stride = v_width,
            .scores = parts->scores};
        kernels->attend(&attend);
    }
    for (uint32_t i = 0; i < queries; i++) {
        const float *sum = parts->out + (uint64_t)i * v_width;
        float *out = job->out + (first_token + i / group) * job->out_stride +
                     ((uint64_t)head * group + i % group) * v_width;
        float inverse = 1.0f / parts->state[i * 2 + 1];
        for (uint32_t d = 0; d < v_width; d++)
            out[d] = sum[d] * inverse;
    }
}

void rf_kv_attend_run(const rf_kv *kv, const rf_kernels *kernels, const rf_kv_attend *job,
                      uint32_t first_unit, uint32_t last_unit, void *scratch)
{
    const rf_kv_layer_store *layer = &kv->layers[job->layer];
    uint32_t group = job->heads / layer->kv_heads;
    uint32_t tokens = tile_tokens(group);
    scratch_parts parts = {0};
    lay_scratch(scratch, layer->side[RF_KV_K].width, layer->side[RF_KV_V].width, group, &parts);
    for (uint32_t unit = first_unit; unit < last_unit; unit++) {
        uint32_t head = unit % layer->kv_heads;
        uint32_t first_token = unit / layer->kv_heads * tokens;
        uint32_t count = RF_MIN(tokens, job->token_count - first_token);
        attend_tile(kv, kernels, job, head, first_token, count, &parts);
    }
}

uint64_t rf_kv_attend_widened_bytes(const rf_kv *kv, const rf_kv_attend *job)
{
    const rf_kv_layer_store *layer = &kv->layers[job->layer];
    uint32_t tokens = tile_tokens(job->heads / layer->kv_heads);
    uint64_t row = 0, bytes = 0; /* of one position of one head, both sides */
    for (int side = RF_KV_K; side <= RF_KV_V; side++) {
        if (layer->side[side].format != RF_F32)
            row += layer->side[side].width * sizeof(float);
    }
    for (uint32_t first = 0; row && first < job->token_count; first += tokens) {
        uint64_t begin = seen_from(job->first_position + first, layer->window);
        uint64_t end = job->first_position + RF_MIN(first + tokens, job->token_count);
        bytes += (end - begin) * row * layer->kv_heads;
    }
    return bytes;
}
