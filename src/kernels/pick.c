/* kernels/pick.c: which instruction sets the machine has, and the table of kernels for them.
 * Reads the processor, never the environment; a mask from the caller can only take sets away.
 */
#include "kernels/act.h"
#include "kernels/matmul_scalar.h"
#include "kernels/quant.h"
#include "kernels/vector_scalar.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

typedef struct cpu_name {
    uint32_t set;
    const char *name;
} cpu_name;

static const cpu_name cpu_names[] = {
    {RF_CPU_SCALAR, "scalar"}, {RF_CPU_AVX2, "avx2"}, {RF_CPU_AVX512, "avx512"},
    {RF_CPU_NEON, "neon"},     {RF_CPU_ALL, "all"},
};

#if defined(__x86_64__)
/* The register state that the operating system saves (XCR0). */
static uint32_t saved_state(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

/* Bits: Intel SDM vol. 2, CPUID leaves 1 and 7.0. */
uint32_t rf_cpu_detect(void)
{
    enum { FMA = 1u << 12, OSXSAVE = 1u << 27, F16C = 1u << 29 };
    enum { AVX2 = 1u << 5, BMI2 = 1u << 8, F = 1u << 16, DQ = 1u << 17, BW = 1u << 30 };
    const uint32_t base = FMA | OSXSAVE | F16C;
    const uint32_t wide = F | DQ | BW | 1u << 31; /* and VL */
    const uint32_t vnni = 1u << 11;
    uint32_t a, b, c, d, b7, c7, mask = RF_CPU_SCALAR;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & base) != base) {
        return mask;
    }
    const uint32_t state = saved_state();
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d) || (state & 0x06) != 0x06 ||
        (b7 & (AVX2 | BMI2)) != (AVX2 | BMI2)) {
        return mask;
    }
    mask |= RF_CPU_AVX2;
    if ((state & 0xE6) == 0xE6 && (b7 & wide) == wide && (c7 & vnni)) {
        mask |= RF_CPU_AVX512;
    }
    return mask;
}
#elif defined(__aarch64__)
uint32_t rf_cpu_detect(void)
{
    const unsigned long dot_product = 1ul << 20, int8_matmul = 1ul << 13; /* HWCAP, HWCAP2 */
    const bool has = (getauxval(AT_HWCAP) & dot_product) && (getauxval(AT_HWCAP2) & int8_matmul);
    return has ? RF_CPU_NEON : RF_CPU_SCALAR;
}
#else
uint32_t rf_cpu_detect(void)
{
    return RF_CPU_SCALAR;
}
#endif

const char *rf_cpu_name(uint32_t single_set)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(cpu_names); i++) {
        if (cpu_names[i].set == single_set) {
            return cpu_names[i].name;
        }
    }
    return "?";
}

bool rf_cpu_parse(const char *text, uint32_t *mask)
{
    uint32_t found = 0;
    for (;;) {
        const size_t length = strcspn(text, ",");
        size_t i = 0;
        while (i < RF_ARRAY_COUNT(cpu_names) && (strlen(cpu_names[i].name) != length ||
                                                 strncmp(cpu_names[i].name, text, length) != 0)) {
            i++;
        }
        if (i == RF_ARRAY_COUNT(cpu_names)) {
            return false;
        }
        found |= cpu_names[i].set;
        if (text[length] == '\0') {
            *mask = found;
            return true;
        }
        text += length + 1;
    }
}

void rf_kernels_scalar(rf_kernels *kernels)
{
    static const rf_kernel_entry matmul = {RF_CPU_SCALAR, "matmul_scalar.c"};
    static const rf_kernel_entry vector = {RF_CPU_SCALAR, "vector_scalar.c"};
    static const rf_kernel_entry attend = {RF_CPU_SCALAR, "attend_scalar.c"};
    static const rf_format floats[] = {RF_F32, RF_F16, RF_BF16};
    memset(kernels, 0, sizeof *kernels);
    kernels->cpu = RF_CPU_SCALAR;
    kernels->pack[RF_ACT_F32] = rf_pack_f32_scalar;
    kernels->pack[RF_ACT_INT16] = rf_pack_int16_scalar;
    kernels->pack[RF_ACT_INT8] = rf_pack_int8_scalar;
    for (size_t i = 0; i < RF_ARRAY_COUNT(floats); i++) {
        kernels->matmul[floats[i]][RF_ACT_F32] = rf_matmul_float_scalar;
        kernels->matmul_entry[floats[i]][RF_ACT_F32] = matmul;
    }
    for (uint32_t i = 0; i < RF_QUANT_COUNT; i++) {
        for (int act = RF_ACT_INT16; act <= RF_ACT_INT8; act++) {
            kernels->matmul[rf_quants[i].format][act] = rf_matmul_quant_scalar;
            kernels->matmul_entry[rf_quants[i].format][act] = matmul;
        }
    }
    kernels->rms_norm = rf_rms_norm_scalar;
    kernels->rope = rf_rope_scalar;
    kernels->swiglu = rf_swiglu_scalar;
    kernels->exp = rf_exp_scalar;
    kernels->argmax = rf_argmax_scalar;
    kernels->kv_encode[RF_F32] = rf_kv_encode_f32_scalar;
    kernels->kv_decode[RF_F32] = rf_kv_decode_f32_scalar;
    kernels->kv_encode[RF_F16] = rf_kv_encode_f16_scalar;
    kernels->kv_decode[RF_F16] = rf_kv_decode_f16_scalar;
    kernels->kv_encode[RF_BF16] = rf_kv_encode_bf16_scalar;
    kernels->kv_decode[RF_BF16] = rf_kv_decode_bf16_scalar;
    kernels->attend = rf_attend_scalar;
    kernels->attend_join = rf_attend_join_scalar;
    kernels->vector_entry = vector;
    kernels->attend_entry = attend;
}

/* Puts a set's kernels over those of the table; false when this build has no such set. */
static bool overlay(rf_kernels *kernels, uint32_t single_set)
{
    switch (single_set) {
#if defined(__x86_64__)
    case RF_CPU_AVX2:
        rf_kernels_avx2(kernels);
        return true;
    case RF_CPU_AVX512:
        rf_kernels_avx512(kernels);
        return true;
#elif defined(__aarch64__)
    case RF_CPU_NEON:
        rf_kernels_neon(kernels);
        return true;
#endif
    default:
        return single_set == RF_CPU_SCALAR;
    }
}

bool rf_kernels_of(rf_kernels *kernels, uint32_t single_set)
{
    rf_kernels_scalar(kernels);
    return overlay(kernels, single_set);
}

void rf_kernels_pick(rf_kernels *kernels, uint32_t cpu_mask)
{
    const uint32_t usable = rf_cpu_detect() & cpu_mask;
    rf_kernels_scalar(kernels);
    for (uint32_t set = RF_CPU_AVX2; set <= RF_CPU_NEON; set *= 2) { /* narrow ones first */
        if (usable & set && overlay(kernels, set)) {
            kernels->cpu |= set;
        }
    }
}
