/* kernels/matmul_scalar.c: the definition of every matmul. One function serves all quantised
 * formats, because their blocks unpack to one shape (quant.h); one serves the float formats.
 */
#include "kernels/matmul_scalar.h"
#include "kernels/quant.h"

#define TOKEN_TILE 8u /* tokens that share one unpacking of a row */

/* The integers of block b of a packed token; in spare where they are not stored as such. */
static const int16_t *block_codes(const uint8_t *act, const rf_act_layout *layout, uint32_t b,
                                  int16_t spare[RF_BLOCK_MAX])
{
    const uint64_t at = (uint64_t)b * layout->block;
    if (layout->act == RF_ACT_INT16) {
        return rf_act_q16(act) + at;
    }
    for (uint32_t i = 0; i < layout->block; i++) {
        const int multiplier =
            layout->block == 256 ? rf_act_multipliers(act, layout)[(at + i) / 32] : 1;
        spare[i] = (int16_t)(multiplier * rf_act_q8(act)[at + i]);
    }
    return spare;
}

/* Adds the folds of one unpacked block to the lanes of one token. */
static void add_block(const rf_quant *quant, const rf_unpacked *block, const int16_t *q,
                      const int32_t *sums, float act_scale, uint32_t first_fold, float lanes[8])
{
    const float scale = block->scale * act_scale;
    const float min_scale = quant->min_step != 0 ? block->min_scale * act_scale : 0.0f;
    for (uint32_t at = 0, fold = first_fold; at < quant->block; at += quant->fold, fold++) {
        float *lane = &lanes[fold % RF_FOLD_LANES];
        int32_t sum = 0;
        for (uint32_t i = at; i < at + quant->fold; i++) {
            sum += block->w[i] * q[i];
        }
        *lane = __builtin_fmaf(scale, (float)sum, *lane);
        if (quant->min_step != 0) {
            int32_t min_sum = 0;
            for (uint32_t i = at / 16; i < (at + quant->fold) / 16; i++) {
                min_sum += block->mins[i] * sums[i];
            }
            *lane = __builtin_fmaf(min_scale, (float)min_sum, *lane);
        }
    }
}

void rf_matmul_quant_scalar(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch)
{
    const rf_quant *quant = rf_quant_of(job->format);
    const uint32_t block_count = job->k / quant->block;
    const uint32_t folds = quant->block / quant->fold;
    (void)scratch;
    for (uint32_t row = first_row; row < last_row; row++) {
        for (uint32_t first = 0; first < job->token_count; first += TOKEN_TILE) {
            const uint32_t count = RF_MIN(TOKEN_TILE, job->token_count - first);
            const uint8_t *weight = job->weight + row * job->weight_row_bytes;
            float lanes[TOKEN_TILE][RF_FOLD_LANES] = {{0}};
            for (uint32_t b = 0; b < block_count; b++, weight += quant->block_bytes) {
                rf_unpacked block;
                quant->unpack(weight, &block);
                for (uint32_t t = 0; t < count; t++) {
                    const uint8_t *act = rf_matmul_act(job, first + t);
                    int16_t spare[RF_BLOCK_MAX];
                    add_block(quant, &block, block_codes(act, &job->layout, b, spare),
                              rf_act_sums(act, &job->layout) + b * (quant->block / 16u),
                              rf_act_scales(act, &job->layout)[b], b * folds, lanes[t]);
                }
            }
            for (uint32_t t = 0; t < count; t++) {
                rf_matmul_store(job, first + t, row, rf_sum_lanes_8(lanes[t]));
            }
        }
    }
}

float rf_load_weight(rf_format format, const uint8_t *row, uint32_t index)
{
    if (format == RF_F32) {
        return rf_bits_float(rf_load_u32(row + (uint64_t)index * 4));
    }
    const uint16_t half = rf_load_u16(row + (uint64_t)index * 2);
    return format == RF_F16 ? rf_f16_to_f32(half) : rf_bits_float((uint32_t)half << 16);
}

void rf_matmul_float_scalar(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                            void *scratch)
{
    (void)scratch;
    for (uint32_t row = first_row; row < last_row; row++) {
        const uint8_t *weight = job->weight + row * job->weight_row_bytes;
        for (uint32_t first = 0; first < job->token_count; first += TOKEN_TILE) {
            const uint32_t count = RF_MIN(TOKEN_TILE, job->token_count - first);
            float lanes[TOKEN_TILE][RF_FLOAT_LANES] = {{0}};
            for (uint32_t at = 0; at < job->k; at += RF_FLOAT_LANES) {
                float w[RF_FLOAT_LANES] = {0}; /* the tail's missing weights are zeros */
                for (uint32_t i = 0; i < RF_MIN(RF_FLOAT_LANES, job->k - at); i++) {
                    w[i] = rf_load_weight(job->format, weight, at + i);
                }
                for (uint32_t t = 0; t < count; t++) {
                    const float *x =
                        (const float *)(const void *)rf_matmul_act(job, first + t) + at;
                    for (uint32_t i = 0; i < RF_FLOAT_LANES; i++) {
                        lanes[t][i] = __builtin_fmaf(w[i], x[i], lanes[t][i]);
                    }
                }
            }
            for (uint32_t t = 0; t < count; t++) {
                rf_matmul_store(job, first + t, row, rf_sum_lanes_16(lanes[t]));
            }
        }
    }
}
