/* runtime/budget.c: does a plan fit, what would make it fit, and how large a context fits.
 *
 * What counts is what the machine has available now, not what it has in all: MemAvailable, the
 * cgroup's limit less its anonymous use, the process's own limits; less a reserve. File pages count
 * as well: a run whose weights are reclaimed while it reads them is no run.
 */
#include "runtime/runtime.h"

#include <string.h>

void rf_budget_judge(rf_model_plan *plan)
{
    rf_budget_source machine;
    rf_os_budget(&machine);
    const struct {
        const char *name;
        uint64_t bytes;
    } sources[] = {{"mem_available", machine.mem_available},
                   {"cgroup", machine.cgroup_left},
                   {"rlimit", machine.rlimit_left}};
    rf_plan_info *info = &plan->info;
    info->budget_source = sources[0].name;
    info->available_bytes = sources[0].bytes;
    for (size_t i = 1; i < RF_ARRAY_COUNT(sources); i++) {
        if (sources[i].bytes >= info->available_bytes)
            continue;
        info->budget_source = sources[i].name;
        info->available_bytes = sources[i].bytes;
    }
    uint64_t usable = info->available_bytes - RF_MIN(info->reserve_bytes, info->available_bytes);
    if (plan->options.mem_limit && plan->options.mem_limit < usable) {
        /* A limit that the user sets is the limit: nothing is kept back from it. */
        info->budget_source = "mem_limit";
        info->available_bytes = usable = plan->options.mem_limit;
        info->reserve_bytes = 0;
    }
    info->fits = plan->regions.total_bytes <= usable;
}

/* ---- suggestions ------------------------------------------------------------------------- */

/* The total of the same file under other options; UINT64_MAX when they cannot be planned. */
static uint64_t total_with(const rf_model_plan *plan, const rf_options *options)
{
    rf_model_plan *other = NULL;
    uint64_t total = UINT64_MAX;
    if (rf_plan_compute(plan->file, options, &other, NULL) == RF_OK) {
        total = other->regions.total_bytes;
        rf_model_plan_close(other);
    }
    return total;
}

__attribute__((format(printf, 4, 5))) static void suggest(rf_model_plan *plan, uint64_t saves,
                                                          const char *cost, const char *format, ...)
{
    if (saves == 0 || plan->info.suggestion_count == RF_SUGGESTIONS_MAX)
        return;
    rf_suggestion *out = &plan->suggestions[plan->info.suggestion_count++];
    va_list args;
    va_start(args, format);
    rf_writer writer = rf_writer_make(out->option, sizeof out->option);
    rf_write_v(&writer, format, args);
    va_end(args);
    out->saves_bytes = saves;
    rf_print(out->cost, sizeof out->cost, "%s", cost);
}

static uint64_t saving(const rf_model_plan *plan, const rf_options *options)
{
    uint64_t total = total_with(plan, options);
    return total < plan->regions.total_bytes ? plan->regions.total_bytes - total : 0;
}

void rf_budget_suggest(rf_model_plan *plan)
{
    static const char f16[] = "f16";
    const rf_plan_info *info = &plan->info;
    uint64_t usable = info->available_bytes - RF_MIN(info->reserve_bytes, info->available_bytes);
    rf_options options = plan->options;
    options.ctx = info->ctx;
    options.chunk = info->chunk;

    if (info->chunk > 32) { /* ordered by what they cost in quality: these cost none */
        options.chunk = 32;
        suggest(plan, saving(plan, &options), "prompts are read more slowly; same text", "-b 32");
        options.chunk = info->chunk;
    }
    if (info->threads > 1) {
        options.threads = 1;
        suggest(plan, saving(plan, &options), "one processor works; same text", "-t 1");
        options.threads = plan->options.threads;
    }
    if (info->slots > 1) {
        options.slots = info->slots / 2;
        suggest(plan, saving(plan, &options), "fewer sequences at once; same text", "--slots %u",
                options.slots);
        options.slots = info->slots;
    }
    if (strcmp(plan->kv_k, "f32") == 0 || strcmp(plan->kv_v, "f32") == 0) {
        options.kv_k = options.kv_v = f16;
        suggest(plan, saving(plan, &options), "a KL of about 1e-6 against f32 keys and values",
                "-ctk f16 -ctv f16");
        options.kv_k = plan->options.kv_k;
        options.kv_v = plan->options.kv_v;
    }
    uint64_t largest = 0;
    if (rf_plan_solve_ctx(plan->file, &plan->options, &largest, NULL) == RF_OK &&
        largest < info->ctx) {
        options.ctx = largest;
        options.chunk = (uint32_t)RF_MIN((uint64_t)info->chunk, largest);
        suggest(plan, saving(plan, &options), "the model remembers less: the largest that fits",
                "-c %llu", (unsigned long long)largest);
    } else if (info->ctx > 1) {
        options.ctx = info->ctx / 2;
        options.chunk = (uint32_t)RF_MIN((uint64_t)info->chunk, options.ctx);
        suggest(plan, saving(plan, &options), "the model remembers less", "-c %llu",
                (unsigned long long)options.ctx);
    }
    uint64_t weights = plan->regions.pool_bytes[RF_POOL_WEIGHTS];
    suggest(plan, RF_MIN(plan->regions.total_bytes - usable, weights),
            "fewer or smaller weights: at least this much must go", "a smaller model file");
}

/* ---- largest context --------------------------------------------------------------------- */

/* Whether ctx fits; a size that leaves 64 bits does not. Other errors are passed on. */
static rf_status ctx_fits(const rf_file *file, const rf_options *options, uint64_t ctx, bool *fits,
                          rf_error *err)
{
    rf_options tried = *options;
    rf_model_plan *plan = NULL;
    tried.ctx = ctx;
    if (tried.chunk > ctx)
        tried.chunk = (uint32_t)ctx;
    rf_status status = rf_plan_compute(file, &tried, &plan, err);
    *fits = false;
    if (status == RF_ERR_NO_FIT)
        return RF_OK;
    if (status)
        return status;
    *fits = plan->info.fits;
    rf_model_plan_close(plan);
    return RF_OK;
}

rf_status rf_plan_solve_ctx(const rf_file *file, const rf_options *options, uint64_t *ctx,
                            rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    const uint64_t highest = 1ull << 40; /* positions; far above any budget */
    uint64_t low = 0, high = 1;          /* low fits (0: unknown), high does not */
    bool fits = true;
    rf_status status = RF_OK;
    while (fits && high < highest) {
        status = ctx_fits(file, options, high, &fits, err);
        if (status)
            return status;
        if (fits)
            low = high;
        high = fits ? high * 2 : high;
    }
    if (low == 0) {
        return rf_fail(err, RF_ERR_NO_FIT, "ctx", "not even one position fits");
    }
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        status = ctx_fits(file, options, middle, &fits, err);
        if (status)
            return status;
        if (fits)
            low = middle;
        else
            high = middle;
    }
    *ctx = low;
    return RF_OK;
}
