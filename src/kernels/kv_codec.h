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
 *
 * Rows are finite (append refuses others); finite rows of any size give finite scales and errors
 * at worst as large as the row (turbo: half as large again on a row that is a spike). A NaN or an
 * infinity gives some codes, never a fault.
 */
#ifndef RF_KV_CODEC_H
#define RF_KV_CODEC_H

#include "kernels/kernels.h"

/* One row of a rotated format, for a head of `width` elements:
 *   rotation block  = the largest power of two that divides width, >= 8 and <= block of the format
 *   span (a scale)  = the same, <= span of the format
 *   bytes           = codes of all spans, then the scales, one for each span; no alignment
 *
 * | format | code                          | span | scale     | bits at width 64 (128) |
 * | r8     | int8, value = s * c           | 64   | f16       | 8.25 |
 * | r6     | c = -31..32, value = s*c/32   | 32   | 8 bit     | 6.25 |
 * | r5     | 32 levels (int8 table / 127)  | 32   | 8 bit     | 5.25 |
 * | r4     | 16 levels (int8 table / 127)  | 32   | 8 bit     | 4.25 |
 * | r3     | 8 levels (int8 table / 127)   | 32   | 8 bit     | 3.25 |
 * | q8_0   | int8, value = s * c           | 32   | f16       | 8.5  |
 * | q4_0   | c = -8..7, value = s * c      | 32   | f16       | 4.5  |
 * | turbo4 | 16 levels (int8 table * unit) | 128  | f16       | 4.25 (4.125) |
 * | turbo3 | 8 levels                      | 128  | f16       | 3.25 (3.125) |
 * | turbo2 | 4 levels                      | 128  | f16       | 2.25 (2.125) |
 * | turbo4q | turbo3 and a bit of the rest | 128  | two f16   | 4.5  (4.25) |
 * | turbo3q | turbo2 and a bit of the rest | 128  | two f16   | 3.5  (3.25) |
 *
 * turbo*q is wide: its bit of the rest is no int8 code of an element. expand gives only the levels'
 * part; attention must read rows that rf_kv_widen has made. Its row ends in the scales of all
 * spans, then the norms of their rests.
 *
 * The codes of a span of S elements are indices (of the level, or c + 31, c + 8; 8 bits: c itself)
 * in planes, one after the other, so that one load and one mask give many of them:
 *   8 bits      r8 q8_0      byte i: element i
 *   low 4 bits  r6 r5 r4 q4_0  byte i < S/2: element i, and i + S/2 in the high half
 *   2 bits      r6 (bits 4-5), r3 (bits 0-1)   byte i < S/4: elements i + k * S/4 at bits 2k
 *   1 bit       r5 (bit 4), r3 (bit 2)         bit i mod 8 of byte i / 8: element i
 * turbo4 is laid out as r4, turbo3 as r3, turbo2 is 2 bits; turbo*q has the sign of the rest as the
 * highest bit of an index (set: negative), so turbo4q is laid out as r4 and turbo3q as r3.
 *
 * The 8-bit scale: sign, 4 bits of exponent, 3 of mantissa over a base: byte = sign << 7 |
 * exponent << 3 | mantissa; value = +-(1 + mantissa / 8) * 2^(base - 15 + exponent); rounded half
 * up in magnitude, saturating at both ends. The magnitude bits 0 are the value 0, so the smallest
 * magnitude is 1 + 1/8 at exponent 0. */
typedef enum rf_kv_code {
    RF_KV_CODE_R8,
    RF_KV_CODE_R6,
    RF_KV_CODE_R5,
    RF_KV_CODE_R4,
    RF_KV_CODE_R3,
    RF_KV_CODE_Q8_0,
    RF_KV_CODE_Q4_0,
    RF_KV_CODE_COUNT, /* the codes before it; the polar ones follow */
    RF_KV_CODE_TURBO4 = RF_KV_CODE_COUNT,
    RF_KV_CODE_TURBO3,
    RF_KV_CODE_TURBO2,
    RF_KV_CODE_TURBO4Q,
    RF_KV_CODE_TURBO3Q,
    RF_KV_CODE_ALL
} rf_kv_code;

#define RF_KV_BLOCK_MAX  64u  /* rotation block of a format with feedback or search */
#define RF_KV_SPAN_MAX   128u /* rotation block and span of any format */
#define RF_KV_TRIALS_MAX 8u
#define RF_KV_BASE_LIMIT 40 /* |base|: scales and their squares, with units, are normal floats */

typedef struct rf_kv_code_info { /* a row of the table; units are those of one element's code */
    const char *name;
    uint32_t code_bits;
    uint32_t block;       /* rotation: most elements */
    uint32_t span;        /* scale: most elements */
    bool f16_scale;       /* else 8 bit over a base */
    bool wide;            /* attention: rows of rf_kv_widen, not int8 codes */
    float unit, units;    /* value = scale * unit * int8 code; units = 1 / unit, exact (search) */
    const int8_t *levels; /* int8 code of an index, ascending; NULL: code = index - offset */
    const float *bounds;  /* polar: between the levels, in standard deviations; 16 stand there */
    int32_t low, high;    /* least and largest int8 code */
    int32_t offset;
    uint32_t key_count;    /* trial factors with feedback; 0: feedback is ignored */
    uint32_t search_count; /* without; 0: no search, one scale from the largest element */
    float key_factors[4];
    float search_factors[RF_KV_TRIALS_MAX];
} rf_kv_code_info;
extern const rf_kv_code_info rf_kv_codes[RF_KV_CODE_ALL];

typedef struct rf_kv_shape { /* of one row, from format and width */
    rf_kv_code code;
    uint32_t width;
    uint32_t block;
    uint32_t span;
    uint32_t span_count;
    uint32_t code_bytes; /* of the row */
    uint32_t row_bytes;
} rf_kv_shape;
/* false when no power of two of at least 8 divides width (q8_0, q4_0: width % 32 != 0), for width
 * 0, and for widths above 2^24. */
bool rf_kv_shape_of(rf_kv_code code, uint32_t width, rf_kv_shape *shape);

/* The base for rows whose largest element in calibration is `largest`: its octave + 1, within
 * +-RF_KV_BASE_LIMIT (measured: 16 octaves under it lose nothing; kv-study-2, section 6).
 * Without calibration use RF_KV_BASE_DEFAULT: 2^-7 .. 2^8 held every head of both study models. */
#define RF_KV_BASE_DEFAULT 8
int32_t rf_kv_base(float largest);

/* signs[width / 8, rounded up to a multiple of 8] bytes; bit i % 8 of byte i / 8 set: element i is
 * negated. From splitmix64(seed), 64 signs a draw, lowest bit first. */
void rf_kv_signs(uint64_t seed, uint32_t width, uint8_t *signs);

/* In place; block is a power of two from 8 to 256, width a multiple of it: negate by signs, then
 * the natural-order Walsh-Hadamard transform of each block, times 1 / sqrt(block). Butterflies in
 * ascending stride, x' = a + b, y' = a - b. turn_back: transform, scale, then negate. */
typedef void (*rf_kv_rotate_fn)(float *row, const uint8_t *signs, uint32_t width, uint32_t block);

/* Error feedback of the rotation blocks of a row (keys only), B elements each: the quadratic form
 * is Mt D M, M unit lower triangular. Column j of M below the diagonal at m + j * B; entries 0..j
 * of it are 0. */
typedef struct rf_kv_feedback {
    const float *m; /* [block count][B][B], columns contiguous */
    const float *d; /* [block count][B] */
} rf_kv_feedback;

/* Encodes one rotated row; out has row_bytes. base: of the 8-bit scales.
 *
 * Nearest code, with value = sc * code, sc = scale as it will be stored, * unit, rounded:
 *   levels:   index = how many k have t * (2 / sc) >= level[k] + level[k+1] (halfway: the upper)
 *   uniform:  t * (1 / sc) in [low, high], to nearest even
 *
 * With feedback: one trial factor f for all spans of a rotation block, scale = round(f * m) where m
 * is the signed element of largest magnitude of the span (the first of equals), r8: max|x| / 127.
 * For i ascending t_i = x_i, minus M_ij e_j for ascending j < i (fma); nearest code c;
 * e_i = fma(sc, c, -x_i), r = fma(-sc, c, t_i), J = fma(D_i * r, r, J); the smallest J wins, the
 * first of equals.
 *
 * feedback NULL (values, keys without statistics, r8 rows beside a narrower format): for each span
 * and f the nearest codes with round(f * m), A = sum c x (fma in 8 lanes, element i in lane i mod
 * 8, added 4, 2, 1 apart), B = sum c^2 (exact), then the scale is refitted, round(A / B * units);
 * with its sc the gain is sc * fma(-sc, B, A + A), which is the square sum less the squared error.
 * The largest gain wins, the first of equals; a gain above 0 or the span becomes zeros.
 * r8, q8_0, q4_0 have no search: s = max|x| / 127, codes with the stored s; q8_0 and q4_0 as ggml,
 * codes with s before it is stored (q4_0: s = m / -8, index = min(15, (int)(x / s + 8.5))).
 *
 * turbo: n = norm of the span (squares summed in double, element i in lane i mod 4, added 2, 1
 * apart), index = how many bounds x * (float)(sqrt(S) / n) reaches. Scale = n / (unit * norm of the
 * int8 codes), so that the decoded span has the norm of x; turbo*q, whose rest is coded:
 * n / sqrt(S), then rest r_i = fma(-scale * unit, code, x_i), its norm (summed as n) as f16,
 * and the signs of
 * the rest turned once more: rotate(r, signs of RF_KV_REST_SEED, S, S), below 0 a set bit.
 * feedback is ignored. n is Algorithm 1's of TurboQuant, the ratio its matched norm, the rest
 * Algorithm 2 with an orthogonal S.
 *
 * A span of zeros has scale 0 and codes of an all-zero index (uniform: of c = 0), and so has one
 * whose f16 scale rounds to 0 (turbo*q: its rest is 0 as well). f16 scales saturate at 65504. */
typedef void (*rf_kv_encode_row_fn)(const rf_kv_shape *shape, const float *row,
                                    const rf_kv_feedback *feedback, int32_t base, void *out);

/* Expands count rows, row_bytes apart, into int8 codes[count][width] and f32 scales
 * [count][span_count], the unit and the base included: value = scale * code. codes NULL: only the
 * scales, for rows whose codes are int8 as they lie (rf_kv_is_int8) and are read in place. */
typedef void (*rf_kv_expand_fn)(const rf_kv_shape *shape, const void *rows, uint32_t count,
                                int32_t base, int8_t *codes, float *scales);

static inline bool rf_kv_is_int8(const rf_kv_shape *shape)
{
    return rf_kv_codes[shape->code].code_bits == 8;
}

/* Widens count rows of any format, row_bytes apart, into f32 out[count][width], still rotated:
 * what an engine reads that attends by rf_attend with the rotated f32 q, and the only way to read a
 * format that is wide. out = scale * code (as expand has them), and of a wide format
 *   fma(scale, code, sqrt(pi / 2) / sqrt(S) * norm of the rest * turn_back(+-1 of its signs))
 * an estimate of x that is unbiased over turns, but for terms of 1 / S where an element of the rest
 * stands out (S = 128: 6e-4 |q||x|, a twentieth of one estimate's deviation). The second turn
 * is each span's own: rf_kv_signs(RF_KV_REST_SEED, S); a row must not have been rotated with
 * that seed.
 *
 * In a store: rows of a side whose format is wide are given to attention as f32, never as INT8, one
 * run of a window at a time: rf_kv_widen(&shape, run.rows, run.count, base, out + row * width).
 * Scalar; for codes that are not wide expand and a multiplication give the same bits faster. */
#define RF_KV_REST_SEED UINT64_C(0x7175616e74207265)
void rf_kv_widen(const rf_kv_shape *shape, const void *rows, uint32_t count, int32_t base,
                 float *out);

/* q rotated, into int16 with one scale, by the rules of rf_pack_fn: |q| <= 32767; zeros have scale
 * 0; a NaN or an infinity makes the scale NaN. width is a multiple of 8. */
typedef void (*rf_kv_query_fn)(const float *q, uint32_t width, int16_t *codes, float *scale);

typedef struct rf_kv_kernels {
    rf_kv_rotate_fn rotate;
    rf_kv_rotate_fn turn_back;
    rf_kv_encode_row_fn encode;
    rf_kv_expand_fn expand;
    rf_kv_query_fn query;
    rf_kernel_entry entry;
} rf_kv_kernels;
/* Scalar first, then what mask and machine have. */
void rf_kv_kernels_pick(rf_kv_kernels *kernels, uint32_t cpu_mask);

/* Fills m and d of one block for the quadratic form h[B][B] (symmetric, in the rotated space):
 * adds damping * trace / B to the diagonal and factors; d is in units of trace / B, since only
 * ratios of J count. Scalar, set-up work. false (m, d: 0) when h has a value that is not finite or
 * no positive trace, or is not positive definite with that damping: then use no feedback. scratch:
 * B * B doubles. B <= RF_KV_BLOCK_MAX. */
bool rf_kv_factor(const double *h, uint32_t block, double damping, double *scratch, float *m,
                  float *d);

#endif
