/* cli/calibration.c: where a model's calibration is kept, and making one when it is needed.
 *
 * The calibrated KV formats are made with statistics of the model's own keys and queries. They are
 * made once, by reading a built-in text, and kept in the cache folder under the fingerprint of the
 * weights. --kv-calibration off does without, FILE names another place.
 */
#include "cli.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* $XDG_CACHE_HOME/ringfence/calibration, else ~/.cache/...; false when neither is known. */
static bool cache_folder(char *path, size_t capacity)
{
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    if (cache && cache[0] == '/')
        rf_print(path, capacity, "%s/ringfence/calibration", cache);
    else if (home && home[0])
        rf_print(path, capacity, "%s/.cache/ringfence/calibration", home);
    else
        return false;
    return strlen(path) + 80 < capacity;
}

static rf_status make_folders(char *path, rf_error *err)
{
    for (char *at = path + 1;; at++) {
        if (*at != '/' && *at != '\0')
            continue;
        char kept = *at;
        *at = '\0';
        int failed = mkdir(path, 0777) != 0 && errno != EEXIST;
        if (failed)
            return rf_fail(err, RF_ERR_IO, path, "cannot make the folder: %s", strerror(errno));
        *at = kept;
        if (kept == '\0')
            return RF_OK;
    }
}

rf_status cli_calibration_path(const cli_model *model, char *path, size_t capacity, rf_error *err)
{
    uint8_t fingerprint[32];
    rf_status status = rf_file_fingerprint(model->file, fingerprint, err);
    if (status)
        return status;
    if (!cache_folder(path, capacity))
        return rf_fail(err, RF_ERR_IO, "--kv-calibration",
                       "no cache folder: neither XDG_CACHE_HOME nor HOME is set");
    size_t length = strlen(path);
    path[length++] = '/';
    for (int i = 0; i < 32; i++)
        rf_print(path + length + 2 * i, 3, "%02x", fingerprint[i]);
    rf_print(path + length + 64, capacity - length - 64, ".rfcal");
    return RF_OK;
}

rf_status cli_calibration_make(const cli_args *args, const cli_model *model, const char *path,
                               rf_error *err)
{
    rf_options options;
    rf_model_plan *plan = NULL;
    rf_model *reader = NULL;
    char folder[4096];
    cli_options_for(args, &options);
    options.ctx = 512;
    options.chunk = 0;
    options.draft = 0;
    options.kv_k = options.kv_v = "f16";
    options.kv_layers = NULL;
    options.sinks = 0;
    options.endless = false;
    options.slots = 1;
    options.calibrate = true;
    options.act_prompt = 16; /* statistics that no option of a run changes */
    cli_progress progress = cli_progress_start("calibrating");
    rf_status status = rf_plan_make(model->file, &options, &plan, err);
    if (!status)
        status = rf_model_open(plan, NULL, NULL, &reader, err);
    signals_watch_model(reader);
    uint64_t start = rf_os_clock_ns();
    if (!status)
        status = rf_calibrate(reader, args->quick_text, cli_progress_step, &progress, err);
    cli_progress_end(&progress);
    const char *slash = strrchr(path, '/');
    if (!status && slash && slash != path) {
        rf_print(folder, sizeof folder, "%.*s", (int)(slash - path), path);
        status = make_folders(folder, err);
    }
    if (!status)
        status = rf_calibration_save(reader, path, err);
    if (!status)
        cli_note("calibrated in %.1f s, kept in %s", (double)(rf_os_clock_ns() - start) * 1e-9,
                 path);
    signals_watch_model(NULL);
    rf_model_close(reader, NULL);
    rf_model_plan_close(plan);
    return status;
}

/* Making a calibration takes minutes: what is wrong with the options is said before. */
static rf_status try_plan(const cli_model *model, rf_options options, rf_error *err)
{
    rf_model_plan *plan = NULL;
    options.kv_calibration = NULL;
    rf_status status = rf_plan_make(model->file, &options, &plan, err);
    rf_model_plan_close(plan);
    return status;
}

rf_status cli_calibration_ready(const cli_args *args, cli_model *model, rf_options *options,
                                bool only_plan, rf_error *err)
{
    const char *wish = args->kv_calibration ? args->kv_calibration : "auto";
    if (strcmp(wish, "off") == 0)
        return RF_OK;
    if (strcmp(wish, "auto") != 0) {
        options->kv_calibration = wish;
        return RF_OK;
    }
    if (!rf_options_calibrate(options))
        return RF_OK;
    options->kv_calibration = model->calibration;
    if (only_plan && model->file_info.data_missing) {
        rf_print(model->calibration, sizeof model->calibration, "(to be made)");
        return RF_OK;
    }
    rf_status status =
        cli_calibration_path(model, model->calibration, sizeof model->calibration, err);
    if (status || only_plan || access(model->calibration, R_OK) == 0)
        return status;
    status = try_plan(model, *options, err);
    return status ? status : cli_calibration_make(args, model, model->calibration, err);
}

rf_status cmd_calibrate(const cli_args *args, rf_error *err)
{
    cli_model model = {0};
    rf_status status = cli_file_open(args, &model, err);
    const char *path = args->kv_calibration;
    if (!status && !path) {
        path = model.calibration;
        status = cli_calibration_path(&model, model.calibration, sizeof model.calibration, err);
    }
    if (!status)
        status = cli_calibration_make(args, &model, path, err);
    if (!status && args->json) {
        rf_writer *writer = json_begin();
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "path", path);
        rf_json_close(writer, '}');
        json_end(writer);
    } else if (!status) {
        out_print("%s\n", path);
    }
    cli_model_close(&model);
    return status;
}
