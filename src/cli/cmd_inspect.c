/* cli/cmd_inspect.c: `inspect`: a file's header keys and tensors, and `kernels`: what serves
 * what on this machine. Both are lists that the library gives out one by one.
 */
#include "cli.h"

#include <string.h>

#define ARRAY_SHOWN     8u
#define TEXT_SHOWN_JSON 65536u
#define TEXT_SHOWN      60u

/* ---- values ------------------------------------------------------------------------------ */

static void json_value(rf_writer *writer, const char *key, const rf_value *value)
{
    switch (value->kind) {
    case 'u':
        rf_json_u64(writer, key, value->u);
        break;
    case 'i':
        rf_json_i64(writer, key, value->i);
        break;
    case 'f':
        rf_json_f64(writer, key, value->f);
        break;
    case 'b':
        rf_json_bool(writer, key, value->u != 0);
        break;
    default:
        rf_json_text_n(writer, key, value->text,
                       (size_t)RF_MIN(value->text_bytes, TEXT_SHOWN_JSON));
        break;
    }
}

static void print_quoted(const char *text, uint64_t bytes)
{
    out_bytes("\"", 1);
    for (uint64_t i = 0; i < RF_MIN(bytes, TEXT_SHOWN); i++) {
        unsigned char byte = (unsigned char)text[i];
        if (byte == '\n') {
            out_bytes("\\n", 2);
        } else if (byte < 0x20 || byte == 0x7f) {
            out_print("\\x%02x", byte);
        } else {
            out_bytes(text + i, 1);
        }
    }
    out_print(bytes > TEXT_SHOWN ? "...\"" : "\"");
}

static void print_value(const rf_value *value)
{
    switch (value->kind) {
    case 'u':
        out_print("%llu", (unsigned long long)value->u);
        break;
    case 'i':
        out_print("%lld", (long long)value->i);
        break;
    case 'f':
        out_print("%.9g", value->f);
        break;
    case 'b':
        out_print("%s", value->u ? "true" : "false");
        break;
    default:
        print_quoted(value->text, value->text_bytes);
        break;
    }
}

/* ---- keys -------------------------------------------------------------------------------- */

static void json_key(rf_writer *writer, const rf_file *file, uint32_t index, const rf_key_info *key)
{
    rf_json_open(writer, NULL, '{');
    rf_json_text_n(writer, "name", key->name, (size_t)key->name_bytes);
    rf_json_text(writer, "type", key->type);
    rf_value value;
    uint64_t at = 0;
    if (key->element_type) {
        rf_json_text(writer, "element_type", key->element_type);
        rf_json_u64(writer, "count", key->count);
        rf_json_open(writer, "first", '[');
        for (uint64_t i = 0; i < RF_MIN(key->count, ARRAY_SHOWN); i++) {
            if (!rf_file_key_value(file, index, i, &at, &value))
                break;
            json_value(writer, NULL, &value);
            json_step(writer);
        }
        rf_json_close(writer, ']');
    } else if (rf_file_key_value(file, index, 0, &at, &value)) {
        json_value(writer, "value", &value);
    }
    rf_json_close(writer, '}');
    json_step(writer);
}

static void print_key(const rf_file *file, uint32_t index, const rf_key_info *key)
{
    char type[48];
    snprintf(type, sizeof type, "%s%s%s%s", key->type, key->element_type ? " of " : "",
             key->element_type ? key->element_type : "", "");
    out_print("%-44.*s %-16s ", (int)RF_MIN(key->name_bytes, 512), key->name, type);
    rf_value value;
    uint64_t at = 0;
    uint64_t shown = key->element_type ? RF_MIN(key->count, ARRAY_SHOWN) : 1;
    if (key->element_type)
        out_print("%llu: ", (unsigned long long)key->count);
    for (uint64_t i = 0; i < shown; i++) {
        if (!rf_file_key_value(file, index, i, &at, &value))
            break;
        if (i)
            out_print(", ");
        print_value(&value);
    }
    out_print(key->element_type && key->count > shown ? ", ...\n" : "\n");
}

/* ---- tensors ----------------------------------------------------------------------------- */

static void json_tensor(rf_writer *writer, const rf_tensor_info *tensor)
{
    rf_json_open(writer, NULL, '{');
    rf_json_text_n(writer, "name", tensor->name, (size_t)tensor->name_bytes);
    rf_json_text(writer, "id", tensor->id);
    rf_json_text(writer, "format", tensor->format);
    rf_json_open(writer, "shape", '[');
    for (uint32_t i = 0; i < tensor->rank; i++)
        rf_json_u64(writer, NULL, tensor->shape[i]);
    rf_json_close(writer, ']');
    rf_json_u64(writer, "offset", tensor->offset);
    rf_json_u64(writer, "bytes", tensor->bytes);
    rf_json_bool(writer, "in_file", tensor->in_file);
    rf_json_close(writer, '}');
    json_step(writer);
}

static void print_tensor(const rf_tensor_info *tensor)
{
    char shape[96] = "";
    for (uint32_t i = 0; i < tensor->rank; i++) {
        size_t at = strlen(shape);
        snprintf(shape + at, sizeof shape - at, "%s%llu", i ? " x " : "",
                 (unsigned long long)tensor->shape[i]);
    }
    out_print("%-28.*s %-42s %-6s %-18s %12llu %12llu%s\n", (int)RF_MIN(tensor->name_bytes, 512),
              tensor->name, tensor->id[0] ? tensor->id : "(unknown)", tensor->format, shape,
              (unsigned long long)tensor->offset, (unsigned long long)tensor->bytes,
              tensor->in_file ? "" : "  not in the file");
}

static void inspect_json(const cli_model *model)
{
    const rf_file_info *info = &model->file_info;
    rf_writer *writer = json_begin();
    rf_json_open(writer, NULL, '{');
    rf_json_u64(writer, "schema", 1);
    rf_json_text(writer, "file", info->name);
    rf_json_u64(writer, "file_bytes", info->bytes);
    rf_json_u64(writer, "version", info->version);
    rf_json_u64(writer, "alignment", info->alignment);
    rf_json_u64(writer, "data_offset", info->data_offset);
    rf_json_bool(writer, "data_missing", info->data_missing);
    rf_json_open(writer, "keys", '[');
    rf_key_info key;
    for (uint32_t i = 0; rf_file_key(model->file, i, &key) && !out_failed(); i++)
        json_key(writer, model->file, i, &key);
    rf_json_close(writer, ']');
    rf_json_open(writer, "tensors", '[');
    rf_tensor_info tensor;
    for (uint32_t i = 0; rf_file_tensor(model->file, i, &tensor) && !out_failed(); i++)
        json_tensor(writer, &tensor);
    rf_json_close(writer, ']');
    rf_json_close(writer, '}');
    json_end(writer);
}

static void inspect_text(const cli_model *model)
{
    const rf_file_info *info = &model->file_info;
    out_print("file     %s, %llu bytes\n", info->name, (unsigned long long)info->bytes);
    out_print("header   GGUF version %u, alignment %llu, data from %llu, %u keys, %u tensors\n",
              info->version, (unsigned long long)info->alignment,
              (unsigned long long)info->data_offset, info->key_count, info->tensor_count);
    if (info->data_missing)
        out_print("note     the data part is missing or cut off: the file would end at %llu\n",
                  (unsigned long long)info->data_end);
    out_print("\n");
    rf_key_info key;
    for (uint32_t i = 0; rf_file_key(model->file, i, &key) && !out_failed(); i++)
        print_key(model->file, i, &key);
    out_print("\n%-28s %-42s %-6s %-18s %12s %12s\n", "tensor", "id", "format", "shape", "offset",
              "bytes");
    rf_tensor_info tensor;
    for (uint32_t i = 0; rf_file_tensor(model->file, i, &tensor) && !out_failed(); i++)
        print_tensor(&tensor);
}

rf_status cmd_inspect(const cli_args *args, rf_error *err)
{
    cli_model model = {0};
    rf_status status = cli_file_open(args, &model, err);
    if (!status) {
        if (args->json) {
            inspect_json(&model);
        } else {
            inspect_text(&model);
        }
        out_flush();
        status = out_status(err);
    }
    cli_model_close(&model);
    return status;
}

/* ---- kernels ----------------------------------------------------------------------------- */

rf_status cmd_kernels(const cli_args *args, rf_error *err)
{
    rf_kernel_info kernel;
    rf_writer *writer = json_begin();
    if (args->json) {
        rf_json_open(writer, NULL, '{');
        rf_json_u64(writer, "schema", 1);
        rf_json_text(writer, "cpu", rf_cpu_mask_name(args->cpu_mask));
        rf_json_open(writer, "kernels", '[');
    } else {
        out_print("cpu      %s\n\n", rf_cpu_mask_name(args->cpu_mask));
        out_row("%-10s %-8s %-8s %-8s %s", "job", "format", "act", "cpu", "file");
    }
    for (uint32_t i = 0; rf_kernel_list(args->cpu_mask, i, &kernel); i++) {
        if (!args->json) {
            out_row("%-10s %-8s %-8s %-8s %-24s%s", kernel.job, kernel.format, kernel.act,
                    kernel.cpu, kernel.file, kernel.chosen ? "  chosen" : "");
            continue;
        }
        rf_json_open(writer, NULL, '{');
        rf_json_text(writer, "job", kernel.job);
        rf_json_text(writer, "format", kernel.format);
        rf_json_text(writer, "act", kernel.act);
        rf_json_text(writer, "cpu", kernel.cpu);
        rf_json_text(writer, "file", kernel.file);
        rf_json_bool(writer, "chosen", kernel.chosen);
        rf_json_close(writer, '}');
        json_step(writer);
    }
    if (args->json) {
        rf_json_close(writer, ']');
        rf_json_close(writer, '}');
        json_end(writer);
    }
    out_flush();
    return out_status(err);
}
