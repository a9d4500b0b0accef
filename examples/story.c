/* examples/story.c: a model file continues a story; planned bytes against freed bytes at the end.
 *
 *   story FILE.gguf
 *
 * Uses the public headers alone. An error ends it with the exit code of the status.
 */
#include <ringfence/ringfence.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static rf_error err;

static void must(rf_status status)
{
    if (status == RF_OK)
        return;
    fprintf(stderr, "story: %s: %s (expected %s, got %s)\n", err.where, err.what, err.expected,
            err.got);
    exit(rf_status_exit_code(status));
}

static uint64_t planned_bytes(const rf_plan *plan)
{
    uint64_t sum = 0; /* what a scope gives out; nobody takes the padding */
    for (uint32_t i = 0; i < plan->row_count; i++) {
        if (plan->rows[i].scope != RF_SCOPE_AMBIENT && strcmp(plan->rows[i].id, "padding") != 0)
            sum += plan->rows[i].bytes;
    }
    return sum;
}

int main(int argc, char **argv)
{
    static const char prompt[] = "Once upon a time";
    rf_options options;
    rf_options_init(&options);
    rf_file *file;
    rf_model_plan *plan;
    rf_model *model;
    must(rf_file_open(argc > 1 ? argv[1] : "", &file, &err));
    must(rf_plan_make(file, &options, &plan, &err)); /* from here all sizes are known */
    must(rf_model_open(plan, NULL, NULL, &model, &err));

    rf_tokenizer *tokenizer = rf_model_tokenizer(model);
    const uint32_t *ids;
    uint64_t count;
    must(rf_tokenizer_encode(tokenizer, prompt, sizeof prompt - 1, RF_TOKENIZE_ADD_SPECIAL, &ids,
                             &count, &err));
    must(rf_prefill(model, 0, ids, count, true, NULL, NULL, &err));

    rf_sampling greedy;
    rf_sampling_init(&greedy);
    greedy.temperature = 0.0f;
    must(rf_sampler_start(model, 0, &greedy, &err));
    rf_text_stream stream;
    rf_text_stream_start(&stream, tokenizer, false);
    uint64_t capacity = rf_text_stream_bound(tokenizer); /* most bytes of one push */
    char *text = malloc((size_t)capacity);
    if (!text)
        return rf_status_exit_code(RF_ERR_NO_FIT);
    printf("%s", prompt);
    for (int i = 0; i < 64; i++) {
        uint32_t token;
        must(rf_sample(model, 0, 0, &token, &err));
        if (rf_tokenizer_is_end(tokenizer, token))
            break;
        fwrite(text, 1, (size_t)rf_text_stream_push(&stream, token, text, capacity), stdout);
        rf_step_item item = {0, token, rf_slot_length(model, 0), true, RF_STEP_GENERATION};
        must(rf_step(model, &item, 1, &err));
    }
    fwrite(text, 1, (size_t)rf_text_stream_flush(&stream, text, capacity), stdout);
    free(text);

    uint64_t planned = planned_bytes(rf_model_plan_regions(plan));
    rf_trace totals;
    rf_model_close(model, &totals);
    rf_model_plan_close(plan);
    rf_file_close(file);
    uint64_t freed = totals.freed_bytes[RF_SCOPE_MODEL] + totals.freed_bytes[RF_SCOPE_FORWARD];
    printf("\nplanned %llu bytes, freed %llu\n", (unsigned long long)planned,
           (unsigned long long)freed);
    return planned == freed ? 0 : rf_status_exit_code(RF_ERR_DRIFT);
}
