/* format/decode.c: what the bits of a block mean, one scalar decoder a format.
 *
 * These functions are the definition that every kernel is tested against, and agree bit for bit
 * with the reference (`gguf` Python package, gguf/quants.py). No product rounds: the 11 bits of a
 * half, and 7 of a scale and 5 of a value (or 5 and 7), fit into the 24 of a float. So only the
 * addition of the minimum does, and neither the order of the factors nor a fused multiply-add
 * changes a bit.
 *
 * Rows lie at any address: a block is copied out before it is read. Nothing is checked here; the
 * header reader has seen to it that a row is a whole number of blocks.
 */
#include "format/format.h"

#include <string.h>

#define BLOCK       32
#define SUPER_BLOCK 256

typedef void (*decode_fn)(const uint8_t *row, float *values, uint64_t count);

/* ---- plain floats ------------------------------------------------------------------------ */

static void decode_f32(const uint8_t *row, float *values, uint64_t count)
{
    memcpy(values, row, count * sizeof *values);
}

static void decode_f16(const uint8_t *row, float *values, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, row + i * sizeof half, sizeof half);
        values[i] = rf_f16_to_f32(half);
    }
}

static void decode_bf16(const uint8_t *row, float *values, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        uint16_t half;
        memcpy(&half, row + i * sizeof half, sizeof half);
        values[i] = rf_bf16_to_f32(half);
    }
}

/* ---- blocks of 32: byte j holds elements j (low nibble) and j + 16 (high nibble) ----------- */

static void decode_q4_0(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q4_0 block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int j = 0; j < 16; j++) {
            values[j] = d * (float)((block.qs[j] & 15) - 8);
            values[j + 16] = d * (float)((block.qs[j] >> 4) - 8);
        }
    }
}

static void decode_q4_1(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q4_1 block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        float m = rf_f16_to_f32(block.m);
        for (int j = 0; j < 16; j++) {
            values[j] = d * (float)(block.qs[j] & 15) + m;
            values[j + 16] = d * (float)(block.qs[j] >> 4) + m;
        }
    }
}

/* Bit i of qh is bit 4 of element i. */
static int high_bit(const uint8_t qh[4], int i)
{
    return (qh[i / 8] >> (i % 8) & 1) << 4;
}

static void decode_q5_0(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q5_0 block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int j = 0; j < 16; j++) {
            int low = (block.qs[j] & 15) | high_bit(block.qh, j);
            int high = (block.qs[j] >> 4) | high_bit(block.qh, j + 16);
            values[j] = d * (float)(low - 16);
            values[j + 16] = d * (float)(high - 16);
        }
    }
}

static void decode_q5_1(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q5_1 block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        float m = rf_f16_to_f32(block.m);
        for (int j = 0; j < 16; j++) {
            int low = (block.qs[j] & 15) | high_bit(block.qh, j);
            int high = (block.qs[j] >> 4) | high_bit(block.qh, j + 16);
            values[j] = d * (float)low + m;
            values[j + 16] = d * (float)high + m;
        }
    }
}

static void decode_q8_0(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q8_0 block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int j = 0; j < BLOCK; j++)
            values[j] = d * (float)block.qs[j];
    }
}

/* ---- super-blocks of 256: two levels of scales --------------------------------------------- */

/* 16 groups of 16. Element i has bits 2 (i / 32 % 4) of byte i / 128 x 32 + i % 32. */
static void decode_q2_k(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q2_k block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        float dmin = rf_f16_to_f32(block.dmin);
        for (int group = 0; group < 16; group++, values += 16) {
            float scale = d * (float)(block.scales[group] & 15);
            float minimum = dmin * (float)(block.scales[group] >> 4);
            const uint8_t *qs = block.qs + group / 8 * 32 + group % 2 * 16;
            int shift = group / 2 % 4 * 2;
            for (int j = 0; j < 16; j++)
                values[j] = scale * (float)(qs[j] >> shift & 3) - minimum;
        }
    }
}

/* Scale i of 16, 6 bits: the low four in a nibble of byte i % 8, the high two in byte 8 + i % 4. */
static int scale_q3_k(const uint8_t scales[12], int i)
{
    int low = scales[i % 8] >> (i / 8 * 4) & 15;
    int high = scales[8 + i % 4] >> (i / 4 * 2) & 3;
    return (low | high << 4) - 32;
}

/* Two bits as in q2_k; the third is bit i / 32 of hmask byte i % 32, and a clear one means -4. */
static void decode_q3_k(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q3_k block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int group = 0; group < 16; group++, values += 16) {
            float scale = d * (float)scale_q3_k(block.scales, group);
            const uint8_t *qs = block.qs + group / 8 * 32 + group % 2 * 16;
            const uint8_t *hmask = block.hmask + group % 2 * 16;
            int shift = group / 2 % 4 * 2;
            for (int j = 0; j < 16; j++) {
                int q = (qs[j] >> shift & 3) - (hmask[j] >> (group / 2) & 1 ? 0 : 4);
                values[j] = scale * (float)q;
            }
        }
    }
}

/* Scale and minimum i of 8, 6 bits each. The first four are the low 6 bits of bytes i and i + 4;
 * of the others, the low four bits are the nibbles of byte i + 4 and the high two are the top bits
 * of bytes i - 4 and i. */
static void scales_q4_k(const uint8_t scales[12], int i, int *scale, int *minimum)
{
    if (i < 4) {
        *scale = scales[i] & 63;
        *minimum = scales[i + 4] & 63;
    } else {
        *scale = (scales[i + 4] & 15) | scales[i - 4] >> 6 << 4;
        *minimum = scales[i + 4] >> 4 | scales[i] >> 6 << 4;
    }
}

/* 8 groups of 32; two groups share 32 bytes, low nibbles first. */
static void decode_q4_k(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q4_k block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        float dmin = rf_f16_to_f32(block.dmin);
        for (int group = 0; group < 8; group++, values += 32) {
            int sc, m;
            scales_q4_k(block.scales, group, &sc, &m);
            float scale = d * (float)sc;
            float minimum = dmin * (float)m;
            const uint8_t *qs = block.qs + group / 2 * 32;
            int shift = group % 2 * 4;
            for (int j = 0; j < 32; j++)
                values[j] = scale * (float)(qs[j] >> shift & 15) - minimum;
        }
    }
}

/* As q4_k; bit 4 of group g is bit g of qh byte i % 32. */
static void decode_q5_k(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q5_k block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        float dmin = rf_f16_to_f32(block.dmin);
        for (int group = 0; group < 8; group++, values += 32) {
            int sc, m;
            scales_q4_k(block.scales, group, &sc, &m);
            float scale = d * (float)sc;
            float minimum = dmin * (float)m;
            const uint8_t *qs = block.qs + group / 2 * 32;
            int shift = group % 2 * 4;
            for (int j = 0; j < 32; j++) {
                int q = (qs[j] >> shift & 15) | (block.qh[j] >> group & 1) << 4;
                values[j] = scale * (float)q - minimum;
            }
        }
    }
}

/* Two halves of 128. In a half, group g of 32 has nibble g / 2 of ql bytes g % 2 x 32 + i and bits
 * 2 g of qh byte i; every 16 elements have a scale of their own. */
static void decode_q6_k(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_q6_k block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int group = 0; group < 16; group++, values += 16) {
            float scale = d * (float)block.scales[group];
            const uint8_t *ql = block.ql + group / 8 * 64 + group % 4 * 16;
            const uint8_t *qh = block.qh + group / 8 * 32 + group % 2 * 16;
            int low_shift = group / 4 % 2 * 4;
            int high_shift = group / 2 % 4 * 2;
            for (int j = 0; j < 16; j++) {
                int q = (ql[j] >> low_shift & 15) | (qh[j] >> high_shift & 3) << 4;
                values[j] = scale * (float)(q - 32);
            }
        }
    }
}

/* ---- tables and digits --------------------------------------------------------------------- */

/* Specified: ggml-common.h, kvalues_iq4nl. */
const int8_t rf_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

/* As q4_0, with a value from the table for each code. */
static void decode_iq4_nl(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_iq4_nl block;
    for (uint64_t at = 0; at < count; at += BLOCK, row += sizeof block, values += BLOCK) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int j = 0; j < 16; j++) {
            values[j] = d * (float)rf_iq4_values[block.qs[j] & 15];
            values[j + 16] = d * (float)rf_iq4_values[block.qs[j] >> 4];
        }
    }
}

/* 8 groups of 32, each with nibbles as q4_0 has them. A group's scale has 6 bits: the low four are
 * nibbles of scales_l, the high two are those of scales_h from bit 2 g on. */
static void decode_iq4_xs(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_iq4_xs block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int group = 0; group < 8; group++, values += 32) {
            int low = block.scales_l[group / 2] >> (group % 2 * 4) & 15;
            int high = block.scales_h >> (group * 2) & 3;
            float scale = d * (float)((low | high << 4) - 32);
            const uint8_t *qs = block.qs + group * 16;
            for (int j = 0; j < 16; j++) {
                values[j] = scale * (float)rf_iq4_values[qs[j] & 15];
                values[j + 16] = scale * (float)rf_iq4_values[qs[j] >> 4];
            }
        }
    }
}

/* A byte is a fraction of 256 whose digits of base 3 are the codes: three times it, what exceeds a
 * byte is the first digit, and the byte that is left holds the rest. Digit n of width bytes lies
 * together: width elements each. */
static float *decode_digits(const uint8_t *bytes, int width, int digits, float d, float *values)
{
    uint8_t left[32];
    memcpy(left, bytes, (size_t)width);
    for (int n = 0; n < digits; n++) {
        for (int j = 0; j < width; j++) {
            int tripled = left[j] * 3;
            left[j] = (uint8_t)tripled;
            *values++ = d * (float)((tripled >> 8) - 1);
        }
    }
    return values;
}

static void decode_tq1_0(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_tq1_0 block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        values = decode_digits(block.qs, 32, 5, d, values);
        values = decode_digits(block.qs + 32, 16, 5, d, values);
        values = decode_digits(block.qh, 4, 4, d, values);
    }
}

/* Bits as in q2_k. A writer leaves out the fourth code; it means 2. */
static void decode_tq2_0(const uint8_t *row, float *values, uint64_t count)
{
    rf_block_tq2_0 block;
    for (uint64_t at = 0; at < count; at += SUPER_BLOCK, row += sizeof block) {
        memcpy(&block, row, sizeof block);
        float d = rf_f16_to_f32(block.d);
        for (int group = 0; group < 8; group++, values += 32) {
            const uint8_t *qs = block.qs + group / 4 * 32;
            int shift = group % 4 * 2;
            for (int j = 0; j < 32; j++)
                values[j] = d * (float)((qs[j] >> shift & 3) - 1);
        }
    }
}

static const decode_fn decoders[RF_FORMAT_FILE_COUNT] = {
    [RF_F32] = decode_f32,     [RF_F16] = decode_f16,       [RF_BF16] = decode_bf16,
    [RF_Q4_0] = decode_q4_0,   [RF_Q4_1] = decode_q4_1,     [RF_Q5_0] = decode_q5_0,
    [RF_Q5_1] = decode_q5_1,   [RF_Q8_0] = decode_q8_0,     [RF_Q2_K] = decode_q2_k,
    [RF_Q3_K] = decode_q3_k,   [RF_Q4_K] = decode_q4_k,     [RF_Q5_K] = decode_q5_k,
    [RF_Q6_K] = decode_q6_k,   [RF_IQ4_NL] = decode_iq4_nl, [RF_IQ4_XS] = decode_iq4_xs,
    [RF_TQ1_0] = decode_tq1_0, [RF_TQ2_0] = decode_tq2_0,
};

bool rf_decode_row(rf_format format, const void *row, float *values, uint64_t count)
{
    if ((uint32_t)format >= RF_FORMAT_FILE_COUNT || !decoders[format])
        return false;
    decoders[format](row, values, count);
    return true;
}
