/* format/dtype.c: one table of every number format that GGML gives an id.
 *
 * It owns how many bytes a block takes and how many elements it holds, which is all that a plan
 * asks, and the two 16-bit float types. What the bits of a block mean is decode.c's; where blocks
 * lie in a file is gguf.c's. Called by everybody who sizes something.
 */
#include "format/format.h"

#include <string.h>

/* ---- the table --------------------------------------------------------------------------- */

#define BLOCK       32u
#define SUPER_BLOCK 256u

/* Specified: ggml.h (ids), ggml-common.h (block structs). An id that GGML once gave out and took
 * back keeps its row, without elements, so that a message can name it. */
static const rf_format_info formats[RF_FORMAT_FILE_COUNT] = {
    [RF_F32] = {RF_F32, "f32", 1, 4, true},
    [RF_F16] = {RF_F16, "f16", 1, 2, true},
    [RF_Q4_0] = {RF_Q4_0, "q4_0", BLOCK, 18, true},
    [RF_Q4_1] = {RF_Q4_1, "q4_1", BLOCK, 20, true},
    [4] = {(rf_format)4, "q4_2", 0, 0, false},
    [5] = {(rf_format)5, "q4_3", 0, 0, false},
    [RF_Q5_0] = {RF_Q5_0, "q5_0", BLOCK, 22, true},
    [RF_Q5_1] = {RF_Q5_1, "q5_1", BLOCK, 24, true},
    [RF_Q8_0] = {RF_Q8_0, "q8_0", BLOCK, 34, true},
    [RF_Q8_1] = {RF_Q8_1, "q8_1", BLOCK, 36, false},
    [RF_Q2_K] = {RF_Q2_K, "q2_k", SUPER_BLOCK, 84, true},
    [RF_Q3_K] = {RF_Q3_K, "q3_k", SUPER_BLOCK, 110, true},
    [RF_Q4_K] = {RF_Q4_K, "q4_k", SUPER_BLOCK, 144, true},
    [RF_Q5_K] = {RF_Q5_K, "q5_k", SUPER_BLOCK, 176, true},
    [RF_Q6_K] = {RF_Q6_K, "q6_k", SUPER_BLOCK, 210, true},
    [RF_Q8_K] = {RF_Q8_K, "q8_k", SUPER_BLOCK, 292, false},
    [RF_IQ2_XXS] = {RF_IQ2_XXS, "iq2_xxs", SUPER_BLOCK, 66, false},
    [RF_IQ2_XS] = {RF_IQ2_XS, "iq2_xs", SUPER_BLOCK, 74, false},
    [RF_IQ3_XXS] = {RF_IQ3_XXS, "iq3_xxs", SUPER_BLOCK, 98, false},
    [RF_IQ1_S] = {RF_IQ1_S, "iq1_s", SUPER_BLOCK, 50, false},
    [RF_IQ4_NL] = {RF_IQ4_NL, "iq4_nl", BLOCK, 18, true},
    [RF_IQ3_S] = {RF_IQ3_S, "iq3_s", SUPER_BLOCK, 110, false},
    [RF_IQ2_S] = {RF_IQ2_S, "iq2_s", SUPER_BLOCK, 82, false},
    [RF_IQ4_XS] = {RF_IQ4_XS, "iq4_xs", SUPER_BLOCK, 136, true},
    [RF_I8] = {RF_I8, "i8", 1, 1, false},
    [RF_I16] = {RF_I16, "i16", 1, 2, false},
    [RF_I32] = {RF_I32, "i32", 1, 4, false},
    [RF_I64] = {RF_I64, "i64", 1, 8, false},
    [RF_F64] = {RF_F64, "f64", 1, 8, false},
    [RF_IQ1_M] = {RF_IQ1_M, "iq1_m", SUPER_BLOCK, 56, false},
    [RF_BF16] = {RF_BF16, "bf16", 1, 2, true},
    [31] = {(rf_format)31, "q4_0_4_4", 0, 0, false},
    [32] = {(rf_format)32, "q4_0_4_8", 0, 0, false},
    [33] = {(rf_format)33, "q4_0_8_8", 0, 0, false},
    [RF_TQ1_0] = {RF_TQ1_0, "tq1_0", SUPER_BLOCK, 54, true},
    [RF_TQ2_0] = {RF_TQ2_0, "tq2_0", SUPER_BLOCK, 66, true},
    [36] = {(rf_format)36, "iq4_nl_4_4", 0, 0, false},
    [37] = {(rf_format)37, "iq4_nl_4_8", 0, 0, false},
    [38] = {(rf_format)38, "iq4_nl_8_8", 0, 0, false},
    [RF_MXFP4] = {RF_MXFP4, "mxfp4", BLOCK, 17, false},
    [RF_NVFP4] = {RF_NVFP4, "nvfp4", 64, 36, false},
    [RF_Q1_0] = {RF_Q1_0, "q1_0", 128, 18, false},
    [RF_Q2_0] = {RF_Q2_0, "q2_0", 64, 18, false},
};

/* The structs of format.h are the bytes of a file: no padding anywhere. */
_Static_assert(sizeof(rf_block_q4_0) == 18, "block of q4_0");
_Static_assert(sizeof(rf_block_q4_1) == 20, "block of q4_1");
_Static_assert(sizeof(rf_block_q5_0) == 22, "block of q5_0");
_Static_assert(sizeof(rf_block_q5_1) == 24, "block of q5_1");
_Static_assert(sizeof(rf_block_q8_0) == 34, "block of q8_0");
_Static_assert(sizeof(rf_block_q2_k) == 84, "block of q2_k");
_Static_assert(sizeof(rf_block_q3_k) == 110, "block of q3_k");
_Static_assert(sizeof(rf_block_q4_k) == 144, "block of q4_k");
_Static_assert(sizeof(rf_block_q5_k) == 176, "block of q5_k");
_Static_assert(sizeof(rf_block_q6_k) == 210, "block of q6_k");
_Static_assert(sizeof(rf_block_iq4_nl) == 18, "block of iq4_nl");
_Static_assert(sizeof(rf_block_iq4_xs) == 136, "block of iq4_xs");
_Static_assert(sizeof(rf_block_tq1_0) == 54, "block of tq1_0");
_Static_assert(sizeof(rf_block_tq2_0) == 66, "block of tq2_0");

const rf_format_info *rf_format_info_of(uint32_t type_id)
{
    if (type_id >= RF_FORMAT_FILE_COUNT || !formats[type_id].name)
        return NULL;
    return &formats[type_id];
}

static char lower(char c)
{
    return c >= 'A' && c <= 'Z' ? (char)(c - 'A' + 'a') : c;
}

const rf_format_info *rf_format_by_name(const char *name)
{
    for (uint32_t id = 0; id < RF_FORMAT_FILE_COUNT; id++) {
        const char *own = formats[id].name;
        if (!own)
            continue;
        size_t at = 0;
        while (own[at] && own[at] == lower(name[at]))
            at++;
        if (!own[at] && !name[at])
            return &formats[id];
    }
    return NULL;
}

const char *rf_format_name(rf_format format)
{
    const rf_format_info *info = rf_format_info_of((uint32_t)format);
    return info ? info->name : "?";
}

bool rf_format_row_bytes(rf_format format, uint64_t count, uint64_t *bytes)
{
    const rf_format_info *info = rf_format_info_of((uint32_t)format);
    if (!info || info->block_elements == 0 || count % info->block_elements != 0)
        return false;
    return rf_mul(count / info->block_elements, info->block_bytes, bytes);
}

/* ---- 16-bit floats ----------------------------------------------------------------------- */

static float float_of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

#define F32_INFINITY 0x7f800000u
#define F32_SIGN     0x80000000u

/* A signalling NaN becomes a quiet one with the same payload, as processors convert it. */
float rf_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t rest = half & 0x7fffu; /* exponent (5 bits), mantissa (10 bits) */
    if (rest < 0x0400u) {           /* zero or subnormal: mantissa x 2^-24, exact in a float */
        float magnitude = (float)rest * 0x1p-24f;
        return float_of_bits(sign | bits_of_float(magnitude));
    }
    if (rest >= 0x7c00u) {
        uint32_t quiet = rest > 0x7c00u ? 0x00400000u : 0;
        return float_of_bits(sign | F32_INFINITY | quiet | (rest & 0x03ffu) << 13);
    }
    return float_of_bits(sign | ((rest << 13) + ((127u - 15u) << 23)));
}

uint16_t rf_f32_to_f16(float value)
{
    uint32_t bits = bits_of_float(value);
    uint32_t sign = (bits & F32_SIGN) >> 16;
    uint32_t rest = bits & ~F32_SIGN;
    if (rest > F32_INFINITY) /* NaN: quiet, with what fits of the payload */
        return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x01ffu));
    if (rest >= 0x477ff000u) /* 65520, half way between the largest half and 2^16 */
        return (uint16_t)(sign | 0x7c00u);
    if (rest < 0x38800000u) { /* below 2^-14: units of 2^-24, which is the last bit of 0.5f */
        uint32_t shifted = bits_of_float(float_of_bits(rest) + 0.5f);
        return (uint16_t)(sign | (shifted - 0x3f000000u));
    }
    uint32_t odd = rest >> 13 & 1u;
    rest += 0x0fffu + odd; /* to nearest, ties to even */
    return (uint16_t)(sign | ((rest - ((127u - 15u) << 23)) >> 13));
}

float rf_bf16_to_f32(uint16_t half)
{
    return float_of_bits((uint32_t)half << 16);
}

uint16_t rf_f32_to_bf16(float value)
{
    uint32_t bits = bits_of_float(value);
    if ((bits & ~F32_SIGN) > F32_INFINITY)
        return (uint16_t)(bits >> 16 | 0x0040u);
    uint32_t odd = bits >> 16 & 1u;
    return (uint16_t)((bits + 0x7fffu + odd) >> 16);
}
