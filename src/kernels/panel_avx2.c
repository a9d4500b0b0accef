/* kernels/panel_avx2.c: sixteen rows of a quantised format as one panel: pairs of k interleaved by
 * row, so that a row is a lane of the matmul and no sum is ever taken across a register.
 *
 *   rows in the file          r0: k0 k1 k2 k3 ...     r1: k0 k1 ...
 *   panel                     [k0 k1 of r0][k0 k1 of r1] ... [of r15]   [k2 k3 of r0] ...
 */
#include "kernels/unpack_avx2.h"

/* 16 weights of eight rows to eight pairs of k; rows are stride apart. */
RF_INLINE void interleave_8(const int16_t *w, size_t stride, int16_t *panel)
{
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i++) {
        a[i] = rf_load_256(w + (size_t)i * stride);
    }
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);     /* pairs 0 1 | 4 5 of rows i, i + 1 */
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]); /* pairs 2 3 | 6 7 */
    }
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);         /* pair 0 | 4 of rows i .. i + 3 */
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);     /* 1 | 5 */
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]); /* 2 | 6 */
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]); /* 3 | 7 */
    }
    for (int i = 0; i < 4; i++) {
        rf_store_256(panel + i * 32, _mm256_permute2x128_si256(a[i], a[i + 4], 0x20));
        rf_store_256(panel + (i + 4) * 32, _mm256_permute2x128_si256(a[i], a[i + 4], 0x31));
    }
}

RF_INLINE void make_panel(const rf_matmul *job, uint32_t row, uint32_t count, const rf_panel *panel,
                          uint32_t block, uint32_t block_bytes, uint32_t min_step,
                          rf_unpack_fn unpack)
{
    const uint32_t block_count = job->k / block;
    for (uint32_t b = 0; b < block_count; b++) {
        for (uint32_t eight = 0; eight < RF_PANEL_ROWS; eight += 8) {
            rf_unpacked rows[8];
            for (uint32_t i = 0; i < 8; i++) {
                /* Rows beyond the end repeat the last one; their results are dropped. */
                const uint32_t r = row + RF_MIN(eight + i, count - 1);
                unpack(job->weight + r * job->weight_row_bytes + (uint64_t)b * block_bytes,
                       &rows[i]);
                panel->scale[b * RF_PANEL_ROWS + eight + i] = rows[i].scale;
                if (min_step != 0) {
                    panel->min_scale[b * RF_PANEL_ROWS + eight + i] = rows[i].min_scale;
                    for (uint32_t j = 0; j < block / min_step; j++) {
                        panel->mins[(b * (block / min_step) + j) * RF_PANEL_ROWS + eight + i] =
                            rows[i].mins[j * (min_step / 16)];
                    }
                }
            }
            int16_t *out = panel->w + (uint64_t)b * block * RF_PANEL_ROWS + eight * 2;
            for (uint32_t at = 0; at < block; at += 16) {
                interleave_8(rows[0].w + at, sizeof(rf_unpacked) / sizeof(int16_t),
                             out + (size_t)at * RF_PANEL_ROWS);
            }
        }
    }
}

void rf_panel_avx2(const rf_matmul *job, uint32_t row, uint32_t count, const rf_panel *panel)
{
    const rf_quant *quant = rf_quant_of(job->format);
    switch (job->format) { /* each case is the loop above with its format's unpacking inlined */
    case RF_Q4_0:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_q4_0), 0, rf_unpack_q4_0);
        break;
    case RF_Q4_1:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_q4_1), 32, rf_unpack_q4_1);
        break;
    case RF_Q5_0:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_q5_0), 0, rf_unpack_q5_0);
        break;
    case RF_Q5_1:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_q5_1), 32, rf_unpack_q5_1);
        break;
    case RF_Q8_0:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_q8_0), 0, rf_unpack_q8_0);
        break;
    case RF_Q2_K:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_q2_k), 16, rf_unpack_q2_k);
        break;
    case RF_Q3_K:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_q3_k), 0, rf_unpack_q3_k);
        break;
    case RF_Q4_K:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_q4_k), 32, rf_unpack_q4_k);
        break;
    case RF_Q5_K:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_q5_k), 32, rf_unpack_q5_k);
        break;
    case RF_Q6_K:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_q6_k), 0, rf_unpack_q6_k);
        break;
    case RF_IQ4_NL:
        make_panel(job, row, count, panel, 32, sizeof(rf_block_iq4_nl), 0, rf_unpack_iq4_nl);
        break;
    case RF_IQ4_XS:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_iq4_xs), 0, rf_unpack_iq4_xs);
        break;
    case RF_TQ1_0:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_tq1_0), 0, rf_unpack_tq1_0);
        break;
    case RF_TQ2_0:
        make_panel(job, row, count, panel, 256, sizeof(rf_block_tq2_0), 0, rf_unpack_tq2_0);
        break;
    default: /* formats without code of their own */
        make_panel(job, row, count, panel, quant->block, quant->block_bytes, quant->min_step,
                   quant->unpack);
        break;
    }
}
