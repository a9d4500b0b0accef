/* runtime/file.c: a model file that is open for reading: its mapping and its header.
 *
 * Reads no tensor. What it holds is sized from counts that were checked against the file's length;
 * it lies in one reservation of its own, which the plan lists as "plan.file".
 */
#include "runtime/runtime.h"

#include <string.h>

static rf_status read_header(const rf_mapping *mapping, bool owns_mapping, const char *name,
                             rf_file **out, rf_error *err)
{
    rf_gguf counted;
    rf_status status = rf_gguf_scan(mapping->data, mapping->size, &counted, err);
    if (status)
        return status;
    /* The counts were checked: a key has at least 13 bytes in the file, a tensor 24, so these
     * products are below 16 times the file's length. */
    uint64_t key_bytes = (uint64_t)counted.key_count * sizeof(rf_gguf_key);
    uint64_t tensor_bytes = (uint64_t)counted.tensor_count * sizeof(rf_gguf_tensor);
    uint64_t bytes = sizeof(rf_file) + key_bytes + tensor_bytes;
    uint64_t scratch_bytes = rf_gguf_scratch_bytes(&counted);
    void *memory = NULL, *scratch = NULL;
    status = rf_os_reserve(bytes, &memory, err);
    if (status)
        return status;
    if (scratch_bytes)
        status = rf_os_reserve(scratch_bytes, &scratch, err);
    if (status) {
        rf_os_release(memory, bytes);
        return status;
    }
    rf_os_touch(memory, bytes); /* a row of the plan: it is resident from now on */
    rf_file *file = memory;
    file->mapping = *mapping;
    file->owns_mapping = owns_mapping;
    file->reserved_bytes = bytes;
    file->gguf = counted;
    file->gguf.keys = (rf_gguf_key *)(file + 1);
    file->gguf.tensors = (rf_gguf_tensor *)(void *)((uint8_t *)(file + 1) + key_bytes);
    rf_print(file->name, sizeof file->name, "%s", name);
    status = rf_gguf_read(&file->gguf, scratch, err);
    if (scratch)
        rf_os_release(scratch, scratch_bytes);
    if (status) {
        rf_os_release(memory, bytes);
        return status;
    }
    *out = file;
    return RF_OK;
}

rf_status rf_file_open(const char *path, rf_file **out, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    rf_mapping mapping;
    rf_status status = rf_os_map(path, &mapping, err);
    if (status)
        return status;
    status = read_header(&mapping, true, path, out, err);
    if (status)
        rf_os_unmap(&mapping);
    return status;
}

rf_status rf_file_open_memory(const char *name, const void *data, uint64_t bytes, rf_file **out,
                              rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if ((uintptr_t)data % sizeof(double) != 0) { /* tensors of floats are read where they lie */
        rf_fail(err, RF_ERR_USAGE, name, "the bytes of a file must be aligned");
        return rf_fail_expected(err, "a multiple of %zu", sizeof(double));
    }
    rf_mapping mapping = {data, bytes};
    return read_header(&mapping, false, name, out, err);
}

void rf_file_close(rf_file *file)
{
    if (!file)
        return;
    rf_mapping mapping = file->mapping;
    bool owns_mapping = file->owns_mapping;
    rf_os_release(file, file->reserved_bytes);
    if (owns_mapping)
        rf_os_unmap(&mapping);
}

void rf_file_describe(const rf_file *file, rf_file_info *out)
{
    const rf_gguf *gguf = &file->gguf;
    *out = (rf_file_info){.name = file->name,
                          .bytes = gguf->size,
                          .data = gguf->data,
                          .version = gguf->version,
                          .alignment = gguf->alignment,
                          .data_offset = gguf->data_offset,
                          .key_count = gguf->key_count,
                          .tensor_count = gguf->tensor_count,
                          .data_missing = gguf->data_missing,
                          .data_end = gguf->data_end};
}

bool rf_file_key(const rf_file *file, uint32_t index, rf_key_info *out)
{
    if (index >= file->gguf.key_count)
        return false;
    const rf_gguf_key *key = &file->gguf.keys[index];
    bool is_array = key->type == RF_GGUF_ARRAY;
    *out = (rf_key_info){.name = key->name.bytes,
                         .name_bytes = key->name.length,
                         .type = rf_gguf_type_name(key->type),
                         .element_type = is_array ? rf_gguf_type_name(key->element_type) : NULL,
                         .count = key->count};
    return true;
}

bool rf_file_key_value(const rf_file *file, uint32_t key_index, uint64_t element, uint64_t *at,
                       rf_value *out)
{
    if (key_index >= file->gguf.key_count)
        return false;
    const rf_gguf_key *key = &file->gguf.keys[key_index];
    rf_gguf_type type = key->type == RF_GGUF_ARRAY ? key->element_type : key->type;
    rf_text text;
    *out = (rf_value){0};
    if (element >= key->count)
        return false;
    if (type == RF_GGUF_STRING) {
        bool found = key->type == RF_GGUF_ARRAY ? rf_gguf_next_text(key, at, &text)
                                                : rf_gguf_text(key, &text);
        if (!found)
            return false;
        out->kind = 's';
        out->text = text.bytes;
        out->text_bytes = text.length;
        return true;
    }
    if (type == RF_GGUF_F32 || type == RF_GGUF_F64) {
        out->kind = 'f';
        return rf_gguf_f64(key, element, &out->f);
    }
    if (type == RF_GGUF_BOOL)
        out->kind = 'b';
    else
        out->kind = 'u';
    if (rf_gguf_u64(key, element, &out->u))
        return true;
    out->kind = 'i';
    return rf_gguf_i64(key, element, &out->i);
}

bool rf_file_tensor(const rf_file *file, uint32_t index, rf_tensor_info *out)
{
    if (index >= file->gguf.tensor_count)
        return false;
    const rf_gguf_tensor *tensor = &file->gguf.tensors[index];
    *out = (rf_tensor_info){.name = tensor->name.bytes,
                            .name_bytes = tensor->name.length,
                            .format = rf_format_info_of(tensor->type_id)->name,
                            .rank = tensor->rank,
                            .offset = tensor->offset,
                            .bytes = tensor->bytes,
                            .in_file = tensor->in_file};
    memcpy(out->shape, tensor->shape, sizeof out->shape);
    if (!rf_name_to_id(tensor->name, out->id, sizeof out->id))
        out->id[0] = '\0';
    return true;
}
