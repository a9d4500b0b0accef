/* kernels/panel_avx2.c: packed rows to panels of int16 weights (tile_avx2.h), by way of the
 * unpacking that every format has.
 */
#include "kernels/tile_avx2.h"
#include "kernels/unpack_avx2.h"

/* 16 weights of eight rows to eight pairs of k; rows are stride apart. */
RF_INLINE void interleave_8(const int16_t *w, size_t stride, int16_t *panel)
{
    __m256i a[8];
    for (size_t i = 0; i < 8; i++) {
        a[i] = rf_load_256(w + i * stride);
    }
    rf_transpose_8(a);
    for (size_t i = 0; i < 8; i++) {
        rf_store_256(panel + i * 32, a[i]);
    }
}

/* Row r's minimums of one block, at mins: 16 * code in pairs, then the codes in fours. */
RF_INLINE void store_mins(const int16_t *codes, uint32_t step, uint32_t count, uint32_t r,
                          uint8_t *mins)
{
    for (uint32_t j = 0; j < count; j++) {
        const int16_t code = codes[j * (step / 16)], large = (int16_t)(16 * code);
        memcpy(mins + j / 2 * 64 + r * 4 + j % 2 * 2, &large, sizeof large);
        mins[count * 32 + j / 4 * 64 + r * 4 + j % 4] = (uint8_t)code;
    }
}

RF_INLINE void make_panel(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel,
                          const rf_shape s, uint32_t block_bytes, rf_unpack_fn unpack)
{
    const uint32_t block_count = job->k / s.block;
    for (uint32_t b = 0; b < block_count; b++, panel += rf_record_bytes(s)) {
        float *scales = (float *)(void *)(panel + rf_scale_at(s));
        float *mins = (float *)(void *)(panel + rf_min_at(s));
        for (uint32_t eight = 0; eight < RF_PANEL_ROWS; eight += 8) {
            rf_unpacked rows[8];
            for (uint32_t i = 0; i < 8; i++) {
                /* Rows beyond the end repeat the last one; their results are dropped. */
                const uint32_t r = row + RF_MIN(eight + i, count - 1);
                unpack(job->weight + r * job->weight_row_bytes + (uint64_t)b * block_bytes,
                       &rows[i]);
                scales[eight + i] = rows[i].scale;
                if (s.min_step != 0) {
                    mins[eight + i] = rows[i].min_scale;
                }
                if (s.min_step != 0 && s.block == 256) {
                    store_mins(rows[i].mins, s.min_step, s.block / s.min_step, eight + i,
                               panel + rf_mins_at(s));
                }
            }
            int16_t *out = (int16_t *)(void *)panel + eight * 2;
            for (uint32_t at = 0; at < s.block; at += 16) {
                interleave_8(rows[0].w + at, sizeof(rf_unpacked) / sizeof(int16_t),
                             out + (size_t)at * RF_PANEL_ROWS);
            }
        }
    }
}

void rf_panel_avx2(const rf_matmul *job, uint32_t row, uint32_t count, uint8_t *panel)
{
    const rf_quant *quant = rf_quant_of(job->format);
    const uint32_t bytes = quant->block_bytes;
    const rf_shape flat = rf_shape_wide(32, 32, 0), with_min = rf_shape_wide(32, 32, 32);
    switch (job->format) { /* each case is the loop above with its format's unpacking inlined */
    case RF_Q4_0:
        make_panel(job, row, count, panel, flat, bytes, rf_unpack_q4_0);
        break;
    case RF_Q4_1:
        make_panel(job, row, count, panel, with_min, bytes, rf_unpack_q4_1);
        break;
    case RF_Q5_0:
        make_panel(job, row, count, panel, flat, bytes, rf_unpack_q5_0);
        break;
    case RF_Q5_1:
        make_panel(job, row, count, panel, with_min, bytes, rf_unpack_q5_1);
        break;
    case RF_Q8_0:
        make_panel(job, row, count, panel, flat, bytes, rf_unpack_q8_0);
        break;
    case RF_Q2_K:
        make_panel(job, row, count, panel, rf_shape_wide(256, 256, 16), bytes, rf_unpack_q2_k);
        break;
    case RF_Q3_K:
        make_panel(job, row, count, panel, rf_shape_wide(256, 256, 0), bytes, rf_unpack_q3_k);
        break;
    case RF_Q4_K:
        make_panel(job, row, count, panel, rf_shape_wide(256, 256, 32), bytes, rf_unpack_q4_k);
        break;
    case RF_Q5_K:
        make_panel(job, row, count, panel, rf_shape_wide(256, 128, 32), bytes, rf_unpack_q5_k);
        break;
    case RF_Q6_K:
        make_panel(job, row, count, panel, rf_shape_wide(256, 64, 0), bytes, rf_unpack_q6_k);
        break;
    case RF_IQ4_NL:
        make_panel(job, row, count, panel, flat, bytes, rf_unpack_iq4_nl);
        break;
    case RF_IQ4_XS:
        make_panel(job, row, count, panel, rf_shape_wide(256, 64, 0), bytes, rf_unpack_iq4_xs);
        break;
    case RF_TQ1_0:
        make_panel(job, row, count, panel, rf_shape_wide(256, 256, 0), bytes, rf_unpack_tq1_0);
        break;
    case RF_TQ2_0:
        make_panel(job, row, count, panel, rf_shape_wide(256, 256, 0), bytes, rf_unpack_tq2_0);
        break;
    default: /* formats without code of their own */
        make_panel(job, row, count, panel,
                   rf_shape_wide(quant->block, quant->fold, quant->min_step), bytes, quant->unpack);
        break;
    }
}
