/* kernels/kv_codec.h: the rotated KV formats: rotation, codes, and attention on the codes.
 *
 *   K row: (RoPE) - mean of its block ─► signs ─► Hadamard ─► encode with error feedback
 *   V row:                               signs ─► Hadamard ─► encode with a searched scale
 *   q:     (RoPE)                        signs ─► Hadamard ─► int16, one scale
 *   score = sum over spans (integer dot of codes) * scale of the span * scale of q + bias of q
 *   out   = sum of p * scale * codes of V, turned back once: Hadamard ─► signs
 *
 * Source of the method and the tables: Lloyd-Max tables for blocks that are normalised by their
 * signed largest element; error feedback as in sequential rounding under a quadratic form. Every
 * entry gives the same bits: integers inside a span, floats in the order that is stated.
 */
#ifndef RF_KV_CODEC_H
#define RF_KV_CODEC_H

#include "kernels/kernels.h"

/* One row of a rotated format, for a head of `width` elements:
 *   rotation block  = the largest power of two that divides width, >= 8 and <= block of the format
 *   span (a scale)  = the same, <= span of the format
 *   bytes           = codes of all spans, then the scales, one for each span
 *
 * | format | code                          | span | scale     | bits at width 64 |
 * | r8     | int8, value = s * c           | 64   | f16       | 8.25 |
 * | r6     | c = -31..32, value = s*c/32   | 32   | 8 bit     | 6.25 |
 * | r5     | 32 levels (int8 table / 127)  | 32   | 8 bit     | 5.25 |
 * | r4     | 16 levels (int8 table / 127)  | 32   | 8 bit     | 4.25 |
 * | r3     | 8 levels (int8 table / 127)   | 32   | 8 bit     | 3.25 |
 * | q8_0   | int8, value = s * c           | 32   | f16       | 8.5  |
 * | q4_0   | c = -8..7, value = s * c      | 32   | f16       | 4.5  |
 *
 * The 8-bit scale: sign, 4 bits of exponent, 3 of mantissa over a base: byte = sign << 7 |
 * exponent << 3 | mantissa; value = +-(1 + mantissa / 8) * 2^(base - 15 + exponent); saturating at
 * both ends, and byte 0 is the value 0 (so the smallest positive one is 1 + 1/8). */
typedef enum rf_kv_code {
    RF_KV_CODE_R8,
    RF_KV_CODE_R6,
    RF_KV_CODE_R5,
    RF_KV_CODE_R4,
    RF_KV_CODE_R3,
    RF_KV_CODE_Q8_0,
    RF_KV_CODE_Q4_0,
    RF_KV_CODE_COUNT
} rf_kv_code;

typedef struct rf_kv_code_info { /* a row of the table; units are those of one element's code */
    const char *name;
    uint32_t code_bits;
    uint32_t block; /* rotation: most elements */
    uint32_t span;  /* scale: most elements */
    bool f16_scale; /* else 8 bit over a base */
    float unit;     /* value = scale * unit * int8 code */
} rf_kv_code_info;
extern const rf_kv_code_info rf_kv_codes[RF_KV_CODE_COUNT];

typedef struct rf_kv_shape { /* of one row, from format and width */
    rf_kv_code code;
    uint32_t width;
    uint32_t block;
    uint32_t span;
    uint32_t span_count;
    uint32_t code_bytes; /* of the row */
    uint32_t row_bytes;
} rf_kv_shape;
/* false when no power of two of at least 8 divides width (q8_0, q4_0: width % 32 != 0). */
bool rf_kv_shape_of(rf_kv_code code, uint32_t width, rf_kv_shape *shape);

/* signs[width / 8 rounded up to 8] bytes, bit i of byte i / 8 set: element i is negated. From
 * splitmix64(seed), 64 signs a draw, lowest bit first. */
void rf_kv_signs(uint64_t seed, uint32_t width, uint8_t *signs);

/* In place; block is a power of two from 8 to 256, width a multiple of it: negate by signs, then
 * the natural-order Walsh-Hadamard transform of each block, times 1 / sqrt(block). Butterflies in
 * ascending stride, x' = a + b, y' = a - b. turn_back: transform, scale, then negate. */
typedef void (*rf_kv_rotate_fn)(float *row, const uint8_t *signs, uint32_t width, uint32_t block);

/* Error feedback of one rotation block of B elements (keys only): the quadratic form is Mt D M,
 * M unit lower triangular. column j of M below the diagonal at m + j * B (entries 0..j are 0). */
typedef struct rf_kv_feedback {
    const float *m; /* [block count][B][B], columns contiguous; NULL: none */
    const float *d; /* [block count][B] */
} rf_kv_feedback;

/* Encodes one rotated row. Keys (feedback->m not NULL): trial scales, one factor for all spans of
 * a rotation block; for i ascending t_i = x_i - sum over j < i of M_ij e_j, nearest level, e_i =
 * level * s - x_i; the smallest J = sum D_i (t_i - level * s)^2 wins, the first of equals. Without
 * feedback (values, and keys without statistics): trial scales of each span, nearest level, refit
 * s = round(sum c x / sum c^2), smallest squared error wins. Always with the scale as it will be
 * stored. A span of zeros has scale 0 and codes 0. plain: nearest with s = max|x| / 127 (r8 rows
 * beside a narrower format; q8_0, q4_0 as ggml does). base: of the 8-bit scales. */
typedef void (*rf_kv_encode_row_fn)(const rf_kv_shape *shape, const float *row,
                                    const rf_kv_feedback *feedback, bool plain, int32_t base,
                                    void *out);

/* Expands count rows, row_bytes apart, into int8 codes[count][width] and f32 scales
 * [count][span_count], the unit and the base included: value = scale * code. */
typedef void (*rf_kv_expand_fn)(const rf_kv_shape *shape, const void *rows, uint32_t count,
                                int32_t base, int8_t *codes, float *scales);

/* q rotated, into int16 with one scale: |q| <= 32767; zeros have scale 0. */
typedef void (*rf_kv_query_fn)(const float *q, uint32_t width, int16_t *codes, float *scale);

/* One block of at most RF_ATTEND_BLOCK positions on expanded codes, as rf_attend but
 *   dot_j = sum over spans, ascending, fma((float)integer dot, k_scale[j][span], dot)
 *   s_j = fma(dot_j * q_scale, scale, bias[query])
 * and out += p_j * v_scale[j][span] * v_code, the product p * scale rounded, fma in ascending j. */
typedef struct rf_attend_codes {
    const int16_t *q; /* query i at q + i * k_width */
    const float *q_scale;
    const float *bias; /* [query]: of this block, score units */
    uint32_t query_count;
    const rf_attend_range *visible;
    const int8_t *k;
    const float *k_scale;
    uint32_t k_width, k_spans;
    const int8_t *v;
    const float *v_scale;
    uint32_t v_width, v_spans;
    uint32_t count;
    float scale;
    float *state;
    float *out;
    uint64_t out_stride;
    float *scores; /* [RF_ATTEND_BLOCK] */
} rf_attend_codes;
typedef void (*rf_attend_codes_fn)(const rf_attend_codes *job);

typedef struct rf_kv_kernels {
    rf_kv_rotate_fn rotate;
    rf_kv_rotate_fn turn_back;
    rf_kv_encode_row_fn encode;
    rf_kv_expand_fn expand;
    rf_kv_query_fn query;
    rf_attend_codes_fn attend;
    rf_kernel_entry entry;
} rf_kv_kernels;
/* Scalar first, then what mask and machine have. */
void rf_kv_kernels_pick(rf_kv_kernels *kernels, uint32_t cpu_mask);

/* Fills m and d of one block for the quadratic form h[B][B] (symmetric, in the rotated space):
 * adds damping * trace / B to the diagonal and factors. Scalar, set-up work. false when h has a
 * value that is not finite or no positive trace: then use no feedback. scratch: B * B doubles. */
bool rf_kv_factor(const double *h, uint32_t block, double damping, double *scratch, float *m,
                  float *d);

#endif
