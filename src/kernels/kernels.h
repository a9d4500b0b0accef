/* kernels/kernels.h: the contract of the kernels: a function table, and what each slot computes.
 *
 * A kernel gets pointers and sizes, and works on them. It cannot name a scope, so it cannot
 * allocate; it checks nothing, because its caller did when the model was opened. Scalar entries
 * fill the whole table and are the definition; the entries of an instruction set overlay it.
 *
 * One order of summation for every entry of a format (design, rule 7):
 *   quantised weights x integer activations: exact integers inside a fold (quant.h has each
 *     format's fold and why it fits 32 bits). Fold f of a row belongs to lane f mod 8:
 *       lane = fma(weight_scale * activation_scale, (float)sum, lane), and then, for formats with
 *       a minimum, lane = fma(weight_min * activation_scale, (float)min_sum, lane), where min_sum
 *       is the exact sum over the fold's sub-blocks of minimum code * sum of activations, and
 *       weight_min is -dmin (q4_1, q5_1: +m, code 1); the product of two scales is rounded to
 *       float before the fma. Lanes start at +0 and are added 4, 2, 1 apart at the end
 *       (lane l += lane l + 4; ...). Eight lanes, because one chain of fma would bound decode;
 *   float weights x float activations: 16 lanes, lane l sums k = l, l + 16, ... with fma in
 *     ascending k from +0, then the lanes are added 8, 4, 2, 1 apart (lane l += lane l + 8; ...).
 * So a row's result does not depend on how many tokens, rows or workers go with it, nor on the
 * instruction set. (A NaN stays a NaN everywhere, but its payload is not promised.)
 */
#ifndef RF_KERNELS_H
#define RF_KERNELS_H

#include "format/format.h"

/* ---- instruction sets -------------------------------------------------------------------- */

typedef enum rf_cpu_set { /* a mask */
                          RF_CPU_SCALAR = 0,
                          RF_CPU_AVX2 = 1,   /* AVX2, FMA, F16C, BMI2 */
                          RF_CPU_AVX512 = 2, /* F, BW, VL, DQ, VNNI, BF16 */
                          RF_CPU_NEON = 4,   /* dotprod, i8mm */
                          RF_CPU_ALL = 0xFFFF
} rf_cpu_set;

uint32_t rf_cpu_detect(void);                        /* mask of what this machine has */
const char *rf_cpu_name(uint32_t single_set);        /* "scalar", "avx2", ... */
bool rf_cpu_parse(const char *text, uint32_t *mask); /* "avx2", "scalar", "all", "avx2,avx512" */

/* ---- activations ------------------------------------------------------------------------- */

/* How the input of a matmul is held: f32 for float weights; for quantised weights integers a with
 * one scale per block and the sums of each 16. int16 is near exact: at least 14 bits (blocks of
 * 256: |a| <= 8191; blocks of 32: |a| <= 32767). int8 is faster where arithmetic is the bound:
 * a = q in blocks of 32; in blocks of 256 a = m * q, with a multiplier m of 1 to 63 for each 32
 * (so |a| <= 63 * 127 = 8001): the precision of scales by 32, and still exact integers over a
 * block. What is an integer of int8 is one of int16 too, so one definition serves both. */
typedef enum rf_act { RF_ACT_F32, RF_ACT_INT16, RF_ACT_INT8, RF_ACT_COUNT } rf_act;

/* One packed token, each part 64-aligned:
 *   int16   a[k] i16 | scale[k / block] f32 | sums of a [k / 16] i32
 *   int8    q[k] i8  | scale[k / block] f32 | m[k / 32] i16 (block 256 only) | sums of a, the same
 *   f32     x[k padded with zeros to a multiple of 16] */
typedef struct rf_act_layout {
    rf_act act;
    uint32_t k;
    uint32_t block; /* that of the weights, 256 or 32; 0 for f32 */
    uint64_t scale_offset;
    uint64_t multiplier_offset; /* int8 in blocks of 256 */
    uint64_t sum_offset;
    uint64_t row_bytes; /* multiple of 64 */
} rf_act_layout;

/* Which activations a weight format takes when the option asks for `wanted`, INT16 or INT8: F32 for
 * float weights, `wanted` for quantised ones. */
rf_act rf_act_for(rf_format weight, rf_act wanted);
rf_act_layout rf_act_layout_of(rf_act act, rf_format weight, uint32_t k);
/* Two layouts that are equal can share one packed input. */
bool rf_act_layout_equal(const rf_act_layout *a, const rf_act_layout *b);

/* scale = amax / limit per block, a = round to nearest even (x / scale, computed as x * (limit /
 * amax)). int8 in blocks of 256: limit 63 * 127; for each 32, whose largest |x| is amax_j,
 * m = ceil(amax_j * (63 / amax)) within 1 .. 63 and q = round(x * ((limit / amax) / m)).
 * A block whose limit / amax overflows (amax below about 1e-34, zeros too) has scale 0 and codes 0
 * (m 1); one that holds a NaN or an infinity has scale NaN and codes 0, so that every row that
 * reads it gives NaN and the fault is seen at the logits. Same bits in every entry. */
typedef void (*rf_pack_fn)(const rf_act_layout *layout, const float *x, void *packed);

/* ---- matmul ------------------------------------------------------------------------------ */

/* out[t * out_stride + r] = sum over k of weight[r][k] * act[t][k], for rows [first, last) and
 * every token t; with accumulate it is added to what out holds. k is a multiple of the weight's
 * block (float formats: any k >= 1); weight needs no alignment and is never read past row
 * last - 1; act rows are 64-aligned. tokens (may be NULL) lists which rows of act and out take
 * part (experts); then t runs over that list. */
typedef struct rf_matmul {
    const uint8_t *weight;
    uint64_t weight_row_bytes;
    uint32_t k;
    rf_format format;
    rf_act_layout layout;
    const uint8_t *act; /* packed rows, layout.row_bytes apart */
    const uint32_t *tokens;
    uint32_t token_count;
    float *out;
    uint64_t out_stride; /* in floats */
    bool accumulate;
} rf_matmul;

/* scratch: rf_matmul_scratch_bytes(k) bytes of the worker, 64-aligned, contents free on return. */
typedef void (*rf_matmul_fn)(const rf_matmul *job, uint32_t first_row, uint32_t last_row,
                             void *scratch);
uint64_t rf_matmul_scratch_bytes(uint32_t k);
#define RF_MATMUL_TILE_ROWS 32u /* pieces of work are multiples of this, the last one apart */

/* ---- the rest of a step ------------------------------------------------------------------ */

/* out[i] = (x[i] * (1 / sqrt(sum(x^2) / n + eps))) * weight[i], each step rounded to float; the sum
 * in 16 lanes as above. out may be x. */
typedef void (*rf_rms_norm_fn)(const float *x, const float *weight, float *out, uint32_t n,
                               float eps);
/* Rotates pairs of one head in place by table[pairs][2] = {cos, sin}; pairs * 2 <= the head's
 * width. interleaved: pair i is x[2i], x[2i+1] (llama); else x[i], x[i + pairs] (neox). */
typedef void (*rf_rope_fn)(float *head, const float *table, uint32_t pairs, bool interleaved);
/* out[i] = (gate[i] / (1 + exp(-gate[i]))) * up[i]; out may be gate or up. */
typedef void (*rf_swiglu_fn)(const float *gate, const float *up, float *out, uint32_t n);
/* x[i] = exp(x[i]), relative error <= 2e-7 where the result is a normal number (stated and tested),
 * exp(-inf) = 0, above 88.73 +inf. Same bits in every entry. */
typedef void (*rf_exp_fn)(float *x, uint32_t n);
/* The index of the largest value; the first of equals; NaN never wins. */
typedef uint32_t (*rf_argmax_fn)(const float *x, uint32_t n);

/* Encodes or decodes one row of a KV format. encode: to nearest even. */
typedef void (*rf_kv_encode_fn)(const float *values, void *row, uint32_t n);
typedef void (*rf_kv_decode_fn)(const void *row, float *values, uint32_t n);

/* ---- attention --------------------------------------------------------------------------- */

/* Keys or values of one KV head where they lie. INT8: codes, an element is code * scale of its
 * span; an int8 row of a KV format (kv_codec.h) is read in place, narrower ones are expanded. */
typedef enum rf_attend_form {
    RF_ATTEND_F32,
    RF_ATTEND_F16,
    RF_ATTEND_BF16,
    RF_ATTEND_INT8
} rf_attend_form;
typedef struct rf_attend_rows {
    const void *rows;    /* row j at rows + j * stride bytes; f32: 4-aligned, else any */
    uint64_t stride;     /* bytes; f32: a multiple of 4 */
    const float *scale;  /* INT8: [count][spans]; else not looked at */
    uint32_t spans;      /* INT8: of width / spans elements, which are 8, 16, 32, 64 or 128 */
    uint32_t width;      /* a multiple of 8 */
    rf_attend_form form; /* keys and values need not have the same */
} rf_attend_rows;

/* One block of at most RF_ATTEND_BLOCK positions of one KV head, for query_count queries that
 * share it (heads of its group, tokens of a chunk): online softmax. Query i sees the positions
 * [visible[i].first, visible[i].last) of the block (may be none). Its state is {max, sum} in
 * state[i * 2] and the weighted sum of V in out[i * out_stride].
 *   s_j, keys as floats: (q . k_j) * scale, the dot in 8 lanes: lane l sums d = l, l + 8, ... with
 *     fma in ascending d from +0; then the lanes are added 4, 2, 1 apart (l += l + 4; ...);
 *   s_j, keys as INT8: fma(dot_j * q_scale, scale, bias), where dot_j goes over the spans in
 *     ascending order: dot = fma((float)integer dot of q_codes and codes, k scale, dot) from +0;
 *   m' = max(max, s_j...) + 0; keep = exp(max - m'); p_j = exp(s_j - m');
 *   sum = sum * keep + (p added in 16 lanes, position j in lane j mod 16, then 8, 4, 2, 1 apart);
 *   out = (out * keep, then fma(w_j, v_j, out) in ascending j) + 0; w_j = p_j, and with INT8 values
 *     w_j = p_j * v scale, rounded, and v_j the code as a float.
 * The + 0 make a zero positive. So queries of a block may be worked on together, a w of +0 standing
 * for a position that one of them does not see: finite rows times 0 change nothing then.
 * A query that has seen nothing has max = -inf, sum = 0, out = 0. Every entry gives the same bits;
 * what a query gets does not depend on who goes with it. Rows that nobody sees are not read (but
 * may be prefetched, as may those behind the block). */
#define RF_ATTEND_BLOCK 64u
typedef struct rf_attend_range {
    uint32_t first, last;
} rf_attend_range;
typedef struct rf_attend {
    const float *q;         /* keys as floats: query i at q + i * q_stride */
    const int16_t *q_codes; /* INT8 keys: query i at q_codes + i * q_stride */
    const float *q_scale;   /* INT8 keys: [query] */
    const float *bias;      /* INT8 keys: [query], of this block, in units of a score; NULL: 0 */
    uint64_t q_stride;      /* elements */
    uint32_t query_count;
    const rf_attend_range *visible;
    rf_attend_rows k, v;
    float scale;
    float *state;
    float *out;
    uint64_t out_stride;
    void *scratch; /* rf_attend_scratch_bytes(k.width, v.width), 64-aligned; free on return */
} rf_attend;
typedef void (*rf_attend_fn)(const rf_attend *job);

/* Scratch of one block: room for its scores and for its rows as floats, for entries that unpack
 * them once for many queries. */
uint64_t rf_attend_scratch_bytes(uint32_t k_width, uint32_t v_width);

/* Joins what one query found in a further part of the context to what it found before: state and
 * out of both as of rf_attend. A part whose sum is 0 has seen nothing and changes nothing; else
 *   m' = max(max, part's max); a = exp(max - m'); b = exp(part's max - m');
 *   sum = sum * a + part's sum * b; out = out * a + part's out * b, each product rounded.
 * Parts are joined in ascending order of their positions, to {-inf, 0}, 0 at first. */
typedef void (*rf_attend_join_fn)(float *state, float *out, const float *part_state,
                                  const float *part_out, uint32_t width);

/* ---- the table --------------------------------------------------------------------------- */

typedef struct rf_kernel_entry { /* which file serves a slot, for `ringfence kernels` */
    uint32_t cpu;
    const char *file;
} rf_kernel_entry;

typedef struct rf_kernels {
    rf_pack_fn pack[RF_ACT_COUNT];
    rf_matmul_fn matmul[RF_FORMAT_FILE_COUNT][RF_ACT_COUNT]; /* NULL: the format is not served */
    rf_rms_norm_fn rms_norm;
    rf_rope_fn rope;
    rf_swiglu_fn swiglu;
    rf_exp_fn exp;
    rf_argmax_fn argmax;
    rf_kv_encode_fn kv_encode[RF_FORMAT_FILE_COUNT]; /* f32, f16, bf16 */
    rf_kv_decode_fn kv_decode[RF_FORMAT_FILE_COUNT];
    rf_attend_fn attend;
    rf_attend_join_fn attend_join;
    rf_kernel_entry matmul_entry[RF_FORMAT_FILE_COUNT][RF_ACT_COUNT];
    rf_kernel_entry vector_entry;
    rf_kernel_entry attend_entry;
    uint32_t cpu; /* the mask that filled it */
} rf_kernels;

/* Fills the table for the sets in mask that the machine has. Scalar first, then overlays. */
void rf_kernels_pick(rf_kernels *kernels, uint32_t cpu_mask);
/* The table of one set over scalar, whether or not the machine has it: to look at, not to call.
 * False when this build has no such set. */
bool rf_kernels_of(rf_kernels *kernels, uint32_t single_set);
void rf_kernels_scalar(rf_kernels *kernels);
#if defined(__x86_64__)
void rf_kernels_avx2(rf_kernels *kernels);
void rf_kernels_avx512(rf_kernels *kernels);
#elif defined(__aarch64__)
void rf_kernels_neon(rf_kernels *kernels);
#endif

/* cos and sin of angle (double, any size below 2^40), rounded to float; own code. */
void rf_sin_cos(double angle, float *sine, float *cosine);
/* Natural logarithm and exponential in double, own code, relative error <= 1e-14. */
double rf_exp_f64(double x);
double rf_log_f64(double x);

#endif
