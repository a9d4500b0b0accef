/* runtime/list.c: which kernel serves what, for whoever asks: the function table as a list. */
#include "runtime/runtime.h"

static const char *const act_names[RF_ACT_COUNT] = {"f32", "int16", "int8"};

bool rf_cpu_mask_parse(const char *text, uint32_t *mask)
{
    return rf_cpu_parse(text, mask);
}

const char *rf_cpu_mask_name(uint32_t cpu_mask)
{
    rf_kernels kernels;
    rf_kernels_pick(&kernels, cpu_mask);
    if (kernels.cpu & RF_CPU_AVX512)
        return "avx512+avx2+scalar";
    if (kernels.cpu & RF_CPU_AVX2)
        return "avx2+scalar";
    if (kernels.cpu & RF_CPU_NEON)
        return "neon+scalar";
    return "scalar";
}

/* Every slot of a table, in one order: matmuls by format and activation, then the two groups. */
static bool slot_entry(const rf_kernels *kernels, uint32_t slot, rf_kernel_entry *entry,
                       rf_kernel_info *out)
{
    const uint32_t matmuls = RF_FORMAT_FILE_COUNT * RF_ACT_COUNT;
    *out = (rf_kernel_info){.format = "", .act = ""};
    if (slot < matmuls) {
        uint32_t format = slot / RF_ACT_COUNT, act = slot % RF_ACT_COUNT;
        if (!kernels->matmul[format][act])
            return false;
        *entry = kernels->matmul_entry[format][act];
        out->job = "matmul";
        out->format = rf_format_name((rf_format)format);
        out->act = act_names[act];
        return true;
    }
    *entry = slot == matmuls ? kernels->vector_entry : kernels->attend_entry;
    out->job = slot == matmuls ? "vector" : "attend";
    return true;
}

bool rf_kernel_list(uint32_t cpu_mask, uint32_t index, rf_kernel_info *out)
{
    static const uint32_t sets[] = {RF_CPU_SCALAR, RF_CPU_AVX2, RF_CPU_AVX512, RF_CPU_NEON};
    const uint32_t slots = RF_FORMAT_FILE_COUNT * RF_ACT_COUNT + 2;
    rf_kernels chosen, table;
    rf_kernels_pick(&chosen, cpu_mask);
    for (size_t s = 0; s < RF_ARRAY_COUNT(sets); s++) {
        if (!rf_kernels_of(&table, sets[s]))
            continue;
        for (uint32_t slot = 0; slot < slots; slot++) {
            rf_kernel_entry entry, best;
            rf_kernel_info info, unused;
            if (!slot_entry(&table, slot, &entry, &info) || entry.cpu != sets[s])
                continue;
            if (index-- > 0)
                continue;
            info.cpu = rf_cpu_name(sets[s]);
            info.file = entry.file;
            info.chosen = slot_entry(&chosen, slot, &best, &unused) && best.cpu == entry.cpu;
            *out = info;
            return true;
        }
    }
    return false;
}
