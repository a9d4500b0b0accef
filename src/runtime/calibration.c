/* runtime/calibration.c: the statistics that the calibrated KV formats are made with: made once for
 * a model by reading a built-in text, kept in a file, and brought into the store at open.
 *
 * A file belongs to the weights whose fingerprint it carries. It is verified whole before anything
 * of it is used, and written beside its place and renamed.
 */
#include "runtime/runtime.h"

#include <string.h>

#define CALIBRATION_MAGIC   "RFCALIB1"
#define CALIBRATION_VERSION 2u
#define END_BYTES           256u /* of each end of a tensor that go into the fingerprint */
#define CHUNK_TOKENS        512u /* the text is read in pieces of this many, each from position 0 */
#define QUICK_TOKENS        512u

typedef struct calibration_header { /* little-endian, as it lies in the file */
    char magic[8];
    uint32_t version;
    uint32_t layer_count;
    uint8_t fingerprint[32];
    uint64_t table_bytes;
    uint64_t token_count;
    uint8_t digest[32]; /* of all before it, and of the table */
} calibration_header;

rf_status rf_file_fingerprint(const rf_file *file, uint8_t fingerprint[32], rf_error *err)
{
    const rf_gguf *gguf = &file->gguf;
    rf_sha256 hash;
    if (gguf->data_missing)
        return rf_fail(err, RF_ERR_BAD_MODEL, file->name,
                       "the file is cut off: tensors are missing");
    rf_sha256_init(&hash);
    rf_sha256_add(&hash, gguf->data, gguf->data_offset);
    for (uint32_t i = 0; i < gguf->tensor_count; i++) {
        const rf_gguf_tensor *tensor = &gguf->tensors[i];
        uint64_t end = RF_MIN(tensor->bytes, (uint64_t)END_BYTES);
        const uint8_t *data = gguf->data + tensor->offset;
        rf_sha256_add(&hash, data, end);
        rf_sha256_add(&hash, data + tensor->bytes - end, end);
    }
    rf_sha256_end(&hash, fingerprint);
    return RF_OK;
}

/* ---- the table ---------------------------------------------------------------------------- */

/* Floats of one head: mean, moment, the longest key and value. */
static uint64_t head_floats(const rf_layer_config *layer)
{
    uint64_t width = layer->k_width;
    return width + width * width + 2;
}

uint64_t rf_calibration_table_bytes(const rf_config *config)
{
    uint64_t floats = 0;
    for (uint32_t i = 0; i < config->layer_count; i++)
        floats += config->layers[i].kv_heads * head_floats(&config->layers[i]);
    return floats * sizeof(float);
}

static void fill_table(const rf_config *config, void *sums, float *table)
{
    for (uint32_t i = 0; i < config->layer_count; i++) {
        const rf_layer_config *layer = &config->layers[i];
        uint64_t width = layer->k_width;
        for (uint32_t head = 0; head < layer->kv_heads; head++) {
            const rf_head_sums *s = rf_sums_of(config, sums, i, head);
            double keys = (double)RF_MAX(s->keys, (uint64_t)1);
            double queries = (double)RF_MAX(s->queries, (uint64_t)1);
            for (uint64_t j = 0; j < width; j++)
                table[j] = (float)(s->values[j] / keys);
            for (uint64_t j = width; j < width + width * width; j++)
                table[j] = (float)(s->values[j] / queries);
            table[width + width * width] = s->k_norm;
            table[width + width * width + 1] = s->v_norm;
            table += head_floats(layer);
        }
    }
}

/* ---- make --------------------------------------------------------------------------------- */

rf_status rf_calibrate(rf_model *model, bool quick, rf_progress_fn progress, void *context,
                       rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    const rf_model_plan *plan = model->plan;
    if (!model->sums)
        return rf_fail(err, RF_ERR_USAGE, "calibrate", "the plan has no room for a calibration");
    if (!model->tokenizer)
        return rf_fail(err, RF_ERR_BAD_MODEL, plan->file->name, "the file has no vocabulary");
    const uint32_t *ids = NULL;
    uint64_t count = 0, done = 0;
    rf_status status = rf_tokenizer_encode(model->tokenizer, rf_calibration_text,
                                           rf_calibration_text_bytes, 0, &ids, &count, err);
    if (status)
        return status;
    if (quick)
        count = RF_MIN(count, (uint64_t)QUICK_TOKENS);
    uint64_t piece = RF_MIN((uint64_t)CHUNK_TOKENS, plan->info.ctx);
    memset(model->sums, 0, rf_sums_bytes(plan->config));
    model->network.sums = model->sums;
    while (status == RF_OK && done < count) {
        uint64_t n = RF_MIN(piece, count - done);
        status = rf_slot_truncate(model, 0, 0, err);
        if (status == RF_OK)
            status = rf_prefill(model, 0, ids + done, n, false, NULL, NULL, err);
        done += n;
        if (status == RF_OK && progress && !progress(context, done, count))
            status = rf_fail(err, RF_ERR_INTERRUPTED, "calibrate", "stopped");
    }
    model->network.sums = NULL;
    if (status)
        return status;
    fill_table(plan->config, model->sums, model->calibration);
    model->calibration_tokens = count;
    return rf_slot_truncate(model, 0, 0, err);
}

rf_status rf_calibration_save(const rf_model *model, const char *path, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    const rf_model_plan *plan = model->plan;
    if (model->calibration_tokens == 0)
        return rf_fail(err, RF_ERR_USAGE, path, "no calibration has been made");
    uint64_t table_bytes = rf_calibration_table_bytes(plan->config);
    calibration_header header = {.version = CALIBRATION_VERSION,
                                 .layer_count = plan->config->layer_count,
                                 .table_bytes = table_bytes,
                                 .token_count = model->calibration_tokens};
    rf_sha256 hash;
    memcpy(header.magic, CALIBRATION_MAGIC, sizeof header.magic);
    rf_status status = rf_file_fingerprint(plan->file, header.fingerprint, err);
    if (status)
        return status;
    rf_sha256_init(&hash);
    rf_sha256_add(&hash, &header, offsetof(calibration_header, digest));
    rf_sha256_add(&hash, model->calibration, table_bytes);
    rf_sha256_end(&hash, header.digest);
    rf_piece pieces[] = {{&header, sizeof header}, {model->calibration, table_bytes}};
    return rf_os_write_file(path, pieces, RF_ARRAY_COUNT(pieces), err);
}

/* ---- use ---------------------------------------------------------------------------------- */

static rf_status verify(const rf_model_plan *plan, const char *path, const rf_mapping *file,
                        rf_error *err)
{
    calibration_header header;
    uint8_t fingerprint[32], digest[32];
    rf_sha256 hash;
    if (file->size < sizeof header)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "too short for a calibration");
    memcpy(&header, file->data, sizeof header);
    if (memcmp(header.magic, CALIBRATION_MAGIC, sizeof header.magic) != 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "this is no calibration");
    if (header.version != CALIBRATION_VERSION) {
        rf_fail(err, RF_ERR_BAD_MODEL, path, "a calibration of another version");
        rf_fail_expected(err, "%u", CALIBRATION_VERSION);
        return rf_fail_got(err, "%u", header.version);
    }
    rf_status status = rf_file_fingerprint(plan->file, fingerprint, err);
    if (status)
        return status;
    uint64_t table_bytes = rf_calibration_table_bytes(plan->config);
    if (memcmp(header.fingerprint, fingerprint, sizeof fingerprint) != 0 ||
        header.layer_count != plan->config->layer_count || header.table_bytes != table_bytes)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "a calibration of another model");
    if (file->size - sizeof header != table_bytes) {
        rf_fail(err, RF_ERR_BAD_MODEL, path, "the calibration is cut off or longer than it says");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)(table_bytes + sizeof header));
        return rf_fail_got(err, "%llu bytes", (unsigned long long)file->size);
    }
    rf_sha256_init(&hash);
    rf_sha256_add(&hash, &header, offsetof(calibration_header, digest));
    rf_sha256_add(&hash, file->data + sizeof header, table_bytes);
    rf_sha256_end(&hash, digest);
    if (memcmp(header.digest, digest, sizeof digest) != 0)
        return rf_fail(err, RF_ERR_BAD_MODEL, path, "the calibration was altered");
    return RF_OK;
}

/* The largest element of a rotated row is rarely above half of the row's length (measured on
 * Gaussian rows of width 64: 0.35), and 16 octaves lie below the base. */
static int8_t base_of(float longest)
{
    return (int8_t)rf_kv_base(longest * 0.5f);
}

rf_status rf_calibration_load(rf_model *model, const char *path, rf_error *err)
{
    const rf_model_plan *plan = model->plan;
    rf_mapping file;
    rf_status status = rf_os_map(path, &file, err);
    if (status)
        return status;
    status = verify(plan, path, &file, err);
    /* The header's size is a multiple of 8 and mappings begin at a page: floats are aligned. */
    const float *table = (const float *)(const void *)(file.data + sizeof(calibration_header));
    for (uint32_t i = 0; status == RF_OK && i < plan->config->layer_count; i++) {
        const rf_layer_config *layer = &plan->config->layers[i];
        uint64_t width = layer->k_width;
        for (uint32_t head = 0; status == RF_OK && head < layer->kv_heads; head++) {
            const float *norms = table + width + width * width;
            rf_kv_statistics statistics = {.mean = table,
                                           .moment = table + width,
                                           .k_base = base_of(norms[0]),
                                           .v_base = base_of(norms[1])};
            status = rf_kv_set_calibration(model->kv, i, head, &statistics, err);
            table += head_floats(layer);
        }
    }
    rf_os_unmap(&file);
    return status;
}
