/* runtime/plan_kv.c: what the options say of the KV store: formats, single layers, the ring. */
#include "runtime/runtime.h"

#include <string.h>

typedef struct layer_rule { /* one row of "RANGE:K[/V],..." */
    uint64_t first, last;
    char k[16], v[16];
} layer_rule;

/* A number at *at; false when there is none or it is absurd. */
static bool read_number(const char **at, uint64_t *out)
{
    uint64_t value = 0;
    const char *start = *at;
    for (; **at >= '0' && **at <= '9' && value < RF_LAYERS_MAX * 10u; (*at)++)
        value = value * 10 + (uint64_t)(**at - '0');
    *out = value;
    return *at != start;
}

static bool read_name(const char **at, char name[16])
{
    size_t length = 0;
    while (**at && !strchr("/,", **at) && length + 1 < 16)
        name[length++] = *(*at)++;
    name[length] = '\0';
    return length > 0;
}

/* The next rule of the text; false when it cannot be read. */
static bool read_rule(const char **at, layer_rule *rule)
{
    if (!read_number(at, &rule->first))
        return false;
    rule->last = rule->first;
    if (**at == '-') {
        (*at)++;
        if (!read_number(at, &rule->last))
            return false;
    }
    if (*(*at)++ != ':' || !read_name(at, rule->k))
        return false;
    memcpy(rule->v, rule->k, sizeof rule->v);
    if (**at == '/') {
        (*at)++;
        if (!read_name(at, rule->v))
            return false;
    }
    return **at == '\0' || *(*at)++ == ',';
}

bool rf_options_calibrate(const rf_options *options)
{
    if (rf_kv_format_calibrates(options->kv_k))
        return true;
    const char *at = options->kv_layers ? options->kv_layers : "";
    layer_rule rule;
    while (*at && read_rule(&at, &rule)) {
        if (rf_kv_format_calibrates(rule.k))
            return true;
    }
    return false;
}

static rf_status unknown_format(const char *where, const char *name, rf_error *err)
{
    rf_fail(err, RF_ERR_USAGE, where, "unknown KV format");
    rf_fail_expected(err, "one of: %s", rf_kv_format_names());
    return rf_fail_got(err, "%s", name);
}

static rf_status apply_rules(rf_model_plan *plan, rf_error *err)
{
    const char *at = plan->options.kv_layers ? plan->options.kv_layers : "";
    while (*at) {
        layer_rule rule;
        const char *start = at;
        if (!read_rule(&at, &rule)) {
            rf_fail(err, RF_ERR_USAGE, "kv_layers", "cannot be read");
            rf_fail_expected(err, "RANGE:K[/V],... as in 0-3:r8/r6,29:f16");
            return rf_fail_got(err, "%.60s", start);
        }
        if (rule.last < rule.first || rule.last >= plan->config->layer_count) {
            rf_fail(err, RF_ERR_USAGE, "kv_layers", "no such layers");
            rf_fail_expected(err, "0 to %u", plan->config->layer_count - 1);
            return rf_fail_got(err, "%llu-%llu", (unsigned long long)rule.first,
                               (unsigned long long)rule.last);
        }
        if (!rf_kv_format_name(rule.k))
            return unknown_format("kv_layers", rule.k, err);
        if (!rf_kv_format_name(rule.v))
            return unknown_format("kv_layers", rule.v, err);
        for (uint64_t i = rule.first; i <= rule.last; i++) {
            plan->kv_layers[i].k_format = rf_kv_format_name(rule.k);
            plan->kv_layers[i].v_format = rf_kv_format_name(rule.v);
        }
    }
    return RF_OK;
}

rf_status rf_plan_kv(rf_model_plan *plan, rf_error *err)
{
    const rf_options *options = &plan->options;
    plan->kv_k = rf_kv_format_name(options->kv_k);
    plan->kv_v = rf_kv_format_name(options->kv_v);
    if (!plan->kv_k)
        return unknown_format("kv_k", options->kv_k, err);
    if (!plan->kv_v)
        return unknown_format("kv_v", options->kv_v, err);
    for (uint32_t i = 0; i < plan->config->layer_count; i++) {
        const rf_layer_config *layer = &plan->config->layers[i];
        plan->kv_layers[i] = (rf_kv_layer){.kv_heads = layer->kv_heads,
                                           .k_width = layer->k_width,
                                           .v_width = layer->v_width,
                                           .window = layer->window,
                                           .k_format = plan->kv_k,
                                           .v_format = plan->kv_v};
    }
    rf_status status = apply_rules(plan, err);
    if (status)
        return status;
    rf_kv_config_init(&plan->kv);
    plan->kv.layers = plan->kv_layers;
    plan->kv.layer_count = plan->config->layer_count;
    plan->kv.slots = plan->info.slots;
    plan->kv.capacity = plan->info.ctx;
    plan->kv.chunk = plan->info.chunk;
    plan->kv.sinks = options->sinks;
    plan->kv.endless = options->endless;
    plan->kv.recent_blocks = options->kv_recent;
    plan->kv.no_scratch = true; /* a step gives each worker its own */
    plan->kv.rope = (rf_kv_rope){.dims = plan->config->rope.dims,
                                 .interleaved = plan->config->rope.interleaved};
    plan->kv.calibrated = options->kv_calibration && rf_options_calibrate(options);
    if (options->kv_calibration)
        rf_print(plan->calibration, sizeof plan->calibration, "%s", options->kv_calibration);
    return RF_OK;
}
