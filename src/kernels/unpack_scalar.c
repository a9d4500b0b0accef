/* kernels/unpack_scalar.c: the table of quantised formats, and how a block of each becomes int16
 * weights with folded sub-block scales (quant.h). Called by the scalar matmul, and by the panel
 * matmuls for formats that have no vector unpacking. Layouts: GGML's block_q*; format.h.
 */
#include "kernels/quant.h"

static void unpack_q4_0(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + 2;
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    for (int i = 0; i < 16; i++) {
        out->w[i] = (int16_t)((qs[i] & 15) - 8);
        out->w[i + 16] = (int16_t)((qs[i] >> 4) - 8);
    }
}

static void unpack_q4_1(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + 4;
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    out->min_scale = rf_f16_to_f32(rf_load_u16(block + 2));
    out->mins[0] = out->mins[1] = 1;
    for (int i = 0; i < 16; i++) {
        out->w[i] = (int16_t)(qs[i] & 15);
        out->w[i + 16] = (int16_t)(qs[i] >> 4);
    }
}

static void unpack_q5_0(const uint8_t *block, rf_unpacked *out)
{
    const uint32_t high = rf_load_u32(block + 2);
    const uint8_t *qs = block + 6;
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    for (int i = 0; i < 16; i++) {
        out->w[i] = (int16_t)((int)((qs[i] & 15u) | ((high >> i & 1u) << 4)) - 16);
        out->w[i + 16] = (int16_t)((int)((qs[i] >> 4) | ((high >> (i + 16) & 1u) << 4)) - 16);
    }
}

static void unpack_q5_1(const uint8_t *block, rf_unpacked *out)
{
    const uint32_t high = rf_load_u32(block + 4);
    const uint8_t *qs = block + 8;
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    out->min_scale = rf_f16_to_f32(rf_load_u16(block + 2));
    out->mins[0] = out->mins[1] = 1;
    for (int i = 0; i < 16; i++) {
        out->w[i] = (int16_t)((qs[i] & 15u) | ((high >> i & 1u) << 4));
        out->w[i + 16] = (int16_t)((qs[i] >> 4) | ((high >> (i + 16) & 1u) << 4));
    }
}

static void unpack_q8_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    for (int i = 0; i < 32; i++) {
        out->w[i] = (int8_t)block[2 + i];
    }
}

static void unpack_q2_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *scales = block + offsetof(rf_block_q2_k, scales);
    const uint8_t *qs = block + offsetof(rf_block_q2_k, qs);
    out->scale = rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_q2_k, d)));
    out->min_scale = -rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_q2_k, dmin)));
    for (int j = 0; j < 16; j++) { /* sub-blocks of 16; 8 of them share 32 bytes */
        const uint8_t *q = qs + (j / 8) * 32 + (j % 2) * 16;
        const int shift = (j % 8) / 2 * 2;
        out->mins[j] = scales[j] >> 4;
        for (int i = 0; i < 16; i++) {
            out->w[16 * j + i] = (int16_t)((q[i] >> shift & 3) * (scales[j] & 15));
        }
    }
}

static void unpack_q3_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *hmask = block + offsetof(rf_block_q3_k, hmask);
    const uint8_t *qs = block + offsetof(rf_block_q3_k, qs);
    const uint8_t *scales = block + offsetof(rf_block_q3_k, scales);
    out->scale = rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_q3_k, d)));
    for (int j = 0; j < 16; j++) {
        const uint8_t *q = qs + (j / 8) * 32 + (j % 2) * 16;
        const uint8_t *high = hmask + (j % 2) * 16;
        const int shift = (j % 8) / 2 * 2;
        const int low4 = j < 8 ? scales[j] & 15 : scales[j - 8] >> 4;
        const int scale = (low4 | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4) - 32;
        for (int i = 0; i < 16; i++) {
            const int code = (q[i] >> shift & 3) - ((high[i] >> (j / 2) & 1) ? 0 : 4);
            out->w[16 * j + i] = (int16_t)(code * scale);
        }
    }
}

/* The 6-bit scales and minimums of q4_K and q5_K: 12 bytes for eight of each. */
static void unpack_scales_k(const uint8_t *packed, int scales[8], int mins[8])
{
    for (int j = 0; j < 4; j++) {
        scales[j] = packed[j] & 63;
        mins[j] = packed[j + 4] & 63;
        scales[j + 4] = (packed[j + 8] & 15) | (packed[j] >> 6) << 4;
        mins[j + 4] = (packed[j + 8] >> 4) | (packed[j + 4] >> 6) << 4;
    }
}

static void unpack_q4_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_q4_k, qs);
    int scales[8], mins[8];
    unpack_scales_k(block + offsetof(rf_block_q4_k, scales), scales, mins);
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    out->min_scale = -rf_f16_to_f32(rf_load_u16(block + 2));
    for (int j = 0; j < 8; j++) {
        const uint8_t *q = qs + j / 2 * 32;
        const int shift = j % 2 * 4;
        out->mins[2 * j] = out->mins[2 * j + 1] = (int16_t)mins[j];
        for (int i = 0; i < 32; i++) {
            out->w[32 * j + i] = (int16_t)((q[i] >> shift & 15) * scales[j]);
        }
    }
}

static void unpack_q5_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_q5_k, qs);
    const uint8_t *high = block + offsetof(rf_block_q5_k, qh);
    int scales[8], mins[8];
    unpack_scales_k(block + offsetof(rf_block_q5_k, scales), scales, mins);
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    out->min_scale = -rf_f16_to_f32(rf_load_u16(block + 2));
    for (int j = 0; j < 8; j++) {
        const uint8_t *q = qs + j / 2 * 32;
        const int shift = j % 2 * 4;
        out->mins[2 * j] = out->mins[2 * j + 1] = (int16_t)mins[j];
        for (int i = 0; i < 32; i++) {
            const int code = (q[i] >> shift & 15) | (high[i] >> j & 1) << 4;
            out->w[32 * j + i] = (int16_t)(code * scales[j]);
        }
    }
}

static void unpack_q6_k(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *scales = block + offsetof(rf_block_q6_k, scales);
    out->scale = rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_q6_k, d)));
    for (int j = 0; j < 16; j++) { /* sub-blocks of 16; 8 of them share 64 + 32 bytes */
        const int part = j % 8 / 2;
        const uint8_t *low = block + j / 8 * 64 + (part & 1) * 32 + (j % 2) * 16;
        const uint8_t *high = block + offsetof(rf_block_q6_k, qh) + j / 8 * 32 + (j % 2) * 16;
        const int scale = (int8_t)scales[j];
        for (int i = 0; i < 16; i++) {
            const int code = (low[i] >> (part & 2) * 2 & 15) | (high[i] >> part * 2 & 3) << 4;
            out->w[16 * j + i] = (int16_t)((code - 32) * scale);
        }
    }
}

static void unpack_iq4_nl(const uint8_t *block, rf_unpacked *out)
{
    const uint8_t *qs = block + offsetof(rf_block_iq4_nl, qs);
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    for (int i = 0; i < 16; i++) {
        out->w[i] = rf_iq4_values[qs[i] & 15];
        out->w[i + 16] = rf_iq4_values[qs[i] >> 4];
    }
}

static void unpack_iq4_xs(const uint8_t *block, rf_unpacked *out)
{
    const uint32_t high = rf_load_u16(block + offsetof(rf_block_iq4_xs, scales_h));
    const uint32_t low = rf_load_u32(block + offsetof(rf_block_iq4_xs, scales_l));
    const uint8_t *qs = block + offsetof(rf_block_iq4_xs, qs);
    out->scale = rf_f16_to_f32(rf_load_u16(block));
    for (int j = 0; j < 8; j++, qs += 16) {
        const int scale = (int)((low >> 4 * j & 15) | (high >> 2 * j & 3) << 4) - 32;
        for (int i = 0; i < 16; i++) {
            out->w[32 * j + i] = (int16_t)(rf_iq4_values[qs[i] & 15] * scale);
            out->w[32 * j + i + 16] = (int16_t)(rf_iq4_values[qs[i] >> 4] * scale);
        }
    }
}

/* Digits of base 3, the first one first: each times 3 carries one out of the byte. */
static void unpack_digits(const uint8_t *bytes, int width, int digits, int16_t *w)
{
    for (int i = 0; i < width; i++) {
        unsigned left = bytes[i];
        for (int n = 0; n < digits; n++) {
            left = (left & 255) * 3;
            w[n * width + i] = (int16_t)((int)(left >> 8) - 1);
        }
    }
}

static void unpack_tq1_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_tq1_0, d)));
    unpack_digits(block, 32, 5, out->w);
    unpack_digits(block + 32, 16, 5, out->w + 160);
    unpack_digits(block + offsetof(rf_block_tq1_0, qh), 4, 4, out->w + 240);
}

static void unpack_tq2_0(const uint8_t *block, rf_unpacked *out)
{
    out->scale = rf_f16_to_f32(rf_load_u16(block + offsetof(rf_block_tq2_0, d)));
    for (int j = 0; j < 8; j++) {
        for (int i = 0; i < 32; i++) {
            out->w[32 * j + i] = (int16_t)((block[j / 4 * 32 + i] >> j % 4 * 2 & 3) - 1);
        }
    }
}

/* format, block, block bytes, fold, weights to a minimum */
const rf_quant rf_quants[RF_QUANT_COUNT] = {
    {RF_Q4_0, 32, sizeof(rf_block_q4_0), 32, 0, unpack_q4_0},
    {RF_Q4_1, 32, sizeof(rf_block_q4_1), 32, 32, unpack_q4_1},
    {RF_Q5_0, 32, sizeof(rf_block_q5_0), 32, 0, unpack_q5_0},
    {RF_Q5_1, 32, sizeof(rf_block_q5_1), 32, 32, unpack_q5_1},
    {RF_Q8_0, 32, sizeof(rf_block_q8_0), 32, 0, unpack_q8_0},
    {RF_Q2_K, 256, sizeof(rf_block_q2_k), 256, 16, unpack_q2_k},
    {RF_Q3_K, 256, sizeof(rf_block_q3_k), 256, 0, unpack_q3_k},
    {RF_Q4_K, 256, sizeof(rf_block_q4_k), 256, 32, unpack_q4_k},
    {RF_Q5_K, 256, sizeof(rf_block_q5_k), 128, 32, unpack_q5_k},
    {RF_Q6_K, 256, sizeof(rf_block_q6_k), 64, 0, unpack_q6_k},
    {RF_IQ4_NL, 32, sizeof(rf_block_iq4_nl), 32, 0, unpack_iq4_nl},
    {RF_IQ4_XS, 256, sizeof(rf_block_iq4_xs), 64, 0, unpack_iq4_xs},
    {RF_TQ1_0, 256, sizeof(rf_block_tq1_0), 256, 0, unpack_tq1_0},
    {RF_TQ2_0, 256, sizeof(rf_block_tq2_0), 256, 0, unpack_tq2_0},
};

const rf_quant *rf_quant_of(rf_format format)
{
    for (uint32_t i = 0; i < RF_QUANT_COUNT; i++) {
        if (rf_quants[i].format == format) {
            return &rf_quants[i];
        }
    }
    return NULL;
}
