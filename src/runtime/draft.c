/* runtime/draft.c: drafts from the text itself: where the last three tokens have stood before, what
 * followed them then is proposed now. A step verifies a draft in one pass over the weights, so text
 * that repeats itself costs less; a draft that was wrong is rolled back and has cost a little.
 *
 * How much may be risked is kept as credit, in 1/64 of a token: every generated token earns one, so
 * that a text without repeats loses at most about 1.6 %; an accepted token earns 16; a wrong one
 * costs 64, what it costs at most in time. Nothing here reads a clock: which drafts are made
 * depends on the tokens alone, and the text does not depend on the drafts at all.
 */
#include "runtime/runtime.h"

#include <string.h>

#define MATCH        3u /* tokens that must have stood before */
#define MATCH_MOST   16u
#define TOKEN_CREDIT 64
#define FIRST_CREDIT (2 * TOKEN_CREDIT)
#define EARNED       1  /* by a generated token */
#define ACCEPTED     16 /* by an accepted one */

struct rf_draft {   /* of one slot */
    uint64_t count; /* tokens so far */
    uint64_t found; /* tokens up to the end of the earlier occurrence; 0: none */
    int64_t credit;
};

/* Tokens of a slot that are remembered, and entries of the table that finds them. */
static uint64_t history_count(const rf_model_plan *plan)
{
    return plan->info.ctx;
}
static uint64_t table_count(const rf_model_plan *plan)
{
    uint64_t count = 64;
    while (count < 2 * history_count(plan) && count < UINT64_C(1) << 31)
        count *= 2;
    return count;
}

/* The regions, for the plan and for who takes them. */
enum { STATE, TOKENS, TABLE, REGIONS };
static const char *const region_ids[REGIONS] = {"draft.state", "draft.tokens", "draft.table"};

static bool extent_of(const rf_model_plan *plan, int region, rf_extent *out)
{
    const rf_extent each[REGIONS] = {{"bytes", 1, sizeof(struct rf_draft)},
                                     {"u32", history_count(plan), sizeof(uint32_t)},
                                     {"u32", table_count(plan), sizeof(uint32_t)}};
    *out = each[region];
    return rf_mul(each[region].count, plan->info.slots, &out->count);
}

rf_status rf_draft_plan(rf_model_plan *plan, rf_error *err)
{
    for (int i = 0; plan->options.draft && i < REGIONS; i++) {
        rf_extent extent;
        if (!extent_of(plan, i, &extent))
            return rf_fail(err, RF_ERR_NO_FIT, region_ids[i], "the size leaves 64 bits");
        rf_status status =
            rf_plan_add_region(&plan->regions, region_ids[i], extent.format, RF_SCOPE_MODEL,
                               RF_POOL_TABLES, extent.count, extent.unit_bytes, err);
        if (status)
            return status;
    }
    return RF_OK;
}

rf_status rf_draft_open(rf_model *model, rf_error *err)
{
    void *regions[REGIONS] = {NULL};
    rf_extent extent = {0};
    if (!model->plan->options.draft)
        return RF_OK;
    for (int i = 0; i < REGIONS; i++) {
        (void)extent_of(model->plan, i, &extent); /* it was planned */
        rf_status status =
            rf_scope_take(&model->model_scope, region_ids[i], &extent, &regions[i], err);
        if (status)
            return status;
    }
    model->drafts = regions[STATE];
    model->draft_tokens = regions[TOKENS];
    model->draft_table = regions[TABLE];
    memset(regions[TABLE], 0, (size_t)(extent.count * extent.unit_bytes));
    for (uint32_t slot = 0; slot < model->plan->info.slots; slot++)
        rf_draft_start(model, slot);
    return RF_OK;
}

static bool has_drafts(const rf_model *model, uint32_t slot)
{
    return model->drafts && slot < model->plan->info.slots;
}

void rf_draft_start(rf_model *model, uint32_t slot)
{
    if (has_drafts(model, slot))
        model->drafts[slot] = (struct rf_draft){.credit = FIRST_CREDIT};
}

static uint32_t *token_at(const rf_model *model, uint32_t slot, uint64_t index)
{
    const uint64_t count = history_count(model->plan);
    return &model->draft_tokens[slot * count + index % count];
}

/* How many tokens before first and before second are the same; both are counts of tokens. */
static uint32_t match_length(const rf_model *model, uint32_t slot, uint64_t first, uint64_t second)
{
    uint32_t length = 0;
    while (length < MATCH_MOST && length < first &&
           *token_at(model, slot, first - 1 - length) ==
               *token_at(model, slot, second - 1 - length)) {
        length++;
    }
    return length;
}

static void note_one(rf_model *model, uint32_t slot, uint32_t token)
{
    struct rf_draft *draft = &model->drafts[slot];
    const uint64_t kept = history_count(model->plan);
    *token_at(model, slot, draft->count++) = token;
    draft->found = 0;
    if (draft->count < MATCH || kept < 2 * MATCH_MOST)
        return;
    uint64_t hash = 0;
    for (uint32_t i = 0; i < MATCH; i++)
        hash = (hash ^ *token_at(model, slot, draft->count - 1 - i)) * UINT64_C(0x9E3779B97F4A7C15);
    const uint64_t entries = table_count(model->plan);
    uint32_t *entry = &model->draft_table[slot * entries + (hash >> 33) % entries];
    /* 32 bits of a count tell it apart from all others that the history still has. */
    const uint64_t age = (uint32_t)((uint32_t)draft->count - *entry);
    *entry = (uint32_t)draft->count;
    if (age == 0 || age >= draft->count || age + MATCH_MOST > kept)
        return;
    if (match_length(model, slot, draft->count - age, draft->count) >= MATCH)
        draft->found = draft->count - age;
}

void rf_draft_note(rf_model *model, uint32_t slot, const uint32_t *tokens, uint64_t count)
{
    for (uint64_t i = 0; has_drafts(model, slot) && i < count; i++)
        note_one(model, slot, tokens[i]);
}

uint32_t rf_draft_propose(rf_model *model, uint32_t slot, uint32_t *tokens, uint32_t most)
{
    if (!has_drafts(model, slot))
        return 0;
    struct rf_draft *draft = &model->drafts[slot];
    draft->credit =
        RF_MIN(draft->credit + EARNED, (int64_t)model->plan->options.draft * (2 * TOKEN_CREDIT));
    if (!draft->found || draft->credit < TOKEN_CREDIT)
        return 0;
    uint64_t count = RF_MIN(most, model->plan->options.draft);
    count = RF_MIN(count, (uint64_t)(draft->credit / TOKEN_CREDIT));
    count = RF_MIN(count, match_length(model, slot, draft->found, draft->count));
    for (uint32_t i = 0; i < count; i++) {
        const uint64_t at = draft->found + i; /* runs on into the draft where a text goes round */
        tokens[i] = at < draft->count ? *token_at(model, slot, at) : tokens[at - draft->count];
    }
    return (uint32_t)count;
}

void rf_draft_judge(rf_model *model, uint32_t slot, uint32_t proposed, uint32_t accepted)
{
    if (!has_drafts(model, slot) || accepted > proposed)
        return;
    model->drafts[slot].credit +=
        (int64_t)accepted * (ACCEPTED + EARNED) - (int64_t)(proposed - accepted) * TOKEN_CREDIT;
}
