/* format/format.h: the contract of floor 1b: what bytes of a model file mean.
 *
 * One table of every GGML type, the header of a GGUF file as views into its bytes, the map between
 * the checkpoint's names and tensor ids, and the scalar decoders that are the definition of every
 * format here. Sees base, never memory: the header is read into the caller's arrays.
 */
#ifndef RF_FORMAT_H
#define RF_FORMAT_H

#include "base/base.h"

/* ---- formats ----------------------------------------------------------------------------- */

/* The numbers are those of GGML's type ids in a GGUF file; KV formats that no file has start at
 * RF_FORMAT_KV_FIRST (a later part of this table). */
typedef enum rf_format {
    RF_F32 = 0,
    RF_F16 = 1,
    RF_Q4_0 = 2,
    RF_Q4_1 = 3,
    RF_Q5_0 = 6,
    RF_Q5_1 = 7,
    RF_Q8_0 = 8,
    RF_Q8_1 = 9,
    RF_Q2_K = 10,
    RF_Q3_K = 11,
    RF_Q4_K = 12,
    RF_Q5_K = 13,
    RF_Q6_K = 14,
    RF_Q8_K = 15,
    RF_IQ2_XXS = 16,
    RF_IQ2_XS = 17,
    RF_IQ3_XXS = 18,
    RF_IQ1_S = 19,
    RF_IQ4_NL = 20,
    RF_IQ3_S = 21,
    RF_IQ2_S = 22,
    RF_IQ4_XS = 23,
    RF_I8 = 24,
    RF_I16 = 25,
    RF_I32 = 26,
    RF_I64 = 27,
    RF_F64 = 28,
    RF_IQ1_M = 29,
    RF_BF16 = 30,
    RF_TQ1_0 = 34,
    RF_TQ2_0 = 35,
    RF_MXFP4 = 39,
    RF_NVFP4 = 40,
    RF_Q1_0 = 41,
    RF_Q2_0 = 42,
    RF_FORMAT_FILE_COUNT = 48, /* ids in a file are below this */
    RF_FORMAT_NONE = 255
} rf_format;

typedef struct rf_format_info {
    rf_format format;
    const char *name;        /* "q4_K" as users write it: lower case "q4_k" */
    uint32_t block_elements; /* 0: the id is reserved or removed */
    uint32_t block_bytes;
    bool decodes; /* rf_decode_row serves it */
} rf_format_info;

/* The row of a type id from a file; NULL when the id is not in the table at all. Every type that
 * GGML defines has a row (so that a plan can size it), also those that we cannot run. */
const rf_format_info *rf_format_info_of(uint32_t type_id);
/* By name, any case; NULL when unknown. A removed format has a row and no size. */
const rf_format_info *rf_format_by_name(const char *name);
/* The name of a format; "?" when unknown. Static. */
const char *rf_format_name(rf_format format);
/* Bytes of a row of count elements; false when count is no whole number of blocks or the product
 * overflows. */
bool rf_format_row_bytes(rf_format format, uint64_t count, uint64_t *bytes);

/* Blocks as they lie in a file; packed, little-endian; sizes asserted in dtype.c. */
typedef struct {
    uint16_t d;
    uint8_t qs[16];
} rf_block_q4_0;
typedef struct {
    uint16_t d, m;
    uint8_t qs[16];
} rf_block_q4_1;
typedef struct {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
} rf_block_q5_0;
typedef struct {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
} rf_block_q5_1;
typedef struct {
    uint16_t d;
    int8_t qs[32];
} rf_block_q8_0;
typedef struct {
    uint8_t scales[16];
    uint8_t qs[64];
    uint16_t d, dmin;
} rf_block_q2_k;
typedef struct {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;
} rf_block_q3_k;
typedef struct {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
} rf_block_q4_k;
typedef struct {
    uint16_t d, dmin;
    uint8_t scales[12], qh[32], qs[128];
} rf_block_q5_k;
typedef struct {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
} rf_block_q6_k;
typedef struct {
    uint16_t d;
    uint8_t qs[16];
} rf_block_iq4_nl;
typedef struct {
    uint16_t d, scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
} rf_block_iq4_xs;
typedef struct {
    uint8_t qs[48]; /* five digits of base 3 a byte */
    uint8_t qh[4];  /* four */
    uint16_t d;
} rf_block_tq1_0;
typedef struct {
    uint8_t qs[64];
    uint16_t d;
} rf_block_tq2_0;

/* What the 16 codes of iq4_nl and iq4_xs mean. */
extern const int8_t rf_iq4_values[16];

/* IEEE half to float (exact, subnormals, infinities and NaN) and back (to nearest even). */
float rf_f16_to_f32(uint16_t half);
uint16_t rf_f32_to_f16(float value);
float rf_bf16_to_f32(uint16_t half);
uint16_t rf_f32_to_bf16(float value);

/* Decodes count elements (whole blocks) of a row into values, bit for bit as the reference
 * (`gguf` Python package) does. false when the format has no decoder here. */
bool rf_decode_row(rf_format format, const void *row, float *values, uint64_t count);

/* ---- text views -------------------------------------------------------------------------- */

typedef struct rf_text { /* bytes of the file, borrowed, not terminated */
    const char *bytes;
    uint64_t length;
} rf_text;

bool rf_text_is(rf_text text, const char *other);

/* ---- GGUF header ------------------------------------------------------------------------- */

typedef enum rf_gguf_type {
    RF_GGUF_U8,
    RF_GGUF_I8,
    RF_GGUF_U16,
    RF_GGUF_I16,
    RF_GGUF_U32,
    RF_GGUF_I32,
    RF_GGUF_F32,
    RF_GGUF_BOOL,
    RF_GGUF_STRING,
    RF_GGUF_ARRAY,
    RF_GGUF_U64,
    RF_GGUF_I64,
    RF_GGUF_F64,
    RF_GGUF_TYPE_COUNT
} rf_gguf_type;

typedef struct rf_gguf_key {
    rf_text name;
    rf_gguf_type type; /* ARRAY: then element_type and count */
    rf_gguf_type element_type;
    uint64_t count;      /* elements; 1 for a scalar */
    const uint8_t *data; /* first byte of the value (of the first element), in the file;
                                  a string begins with its length (8 bytes) */
    uint64_t data_bytes; /* of all elements, lengths of strings included */
    uint64_t offset;     /* of the key in the file, for messages */
} rf_gguf_key;

typedef struct rf_gguf_tensor {
    rf_text name;
    uint32_t type_id;  /* has a row in the format table, with block_elements > 0 */
    uint32_t rank;     /* 1..4 */
    uint64_t shape[4]; /* GGUF order: shape[0] is the row length; 1 beyond rank */
    uint64_t offset;   /* in the file (data offset included), aligned */
    uint64_t bytes;
    uint64_t at;  /* of its entry in the file, for messages */
    bool in_file; /* offset + bytes <= file size */
} rf_gguf_tensor;

typedef struct rf_gguf {
    const uint8_t *data; /* borrowed: the whole file */
    uint64_t size;
    uint32_t version;
    uint64_t alignment;
    uint64_t data_offset; /* where the tensors' part begins */
    uint64_t data_end;    /* largest offset + bytes of a tensor, or data_offset */
    bool data_missing;    /* some tensor is not wholly in the file */
    rf_gguf_key *keys;    /* the caller's array */
    uint32_t key_count;
    rf_gguf_tensor *tensors; /* the caller's array */
    uint32_t tensor_count;
} rf_gguf;

/* Reads magic, version (2 and 3) and counts, each checked against the bytes left (a key has at
 * least 13 bytes, a tensor at least 24), so that the caller can size two arrays. Fills only
 * version, key_count and tensor_count of *gguf, and data, size. Errors: RF_ERR_BAD_MODEL,
 * RF_ERR_UNSUPPORTED (version; big-endian files are named as such). */
rf_status rf_gguf_scan(const void *data, uint64_t size, rf_gguf *gguf, rf_error *err);
/* Reads the header into keys[gguf->key_count] and tensors[gguf->tensor_count], which the caller
 * set in *gguf. Every name, string, array, shape, offset and product is checked; duplicates of
 * keys and tensors are refused, tensors may not overlap each other or the header. Data that the
 * file does not have is no error here (data_missing). Errors: RF_ERR_BAD_MODEL with the file
 * offset and the key's or tensor's name in where; after one, data and size are all that is valid.
 * Time: O(bytes + n log n). scratch: rf_gguf_scratch_bytes(gguf) bytes, 4-aligned, for the sorted
 * index. */
uint64_t rf_gguf_scratch_bytes(const rf_gguf *gguf);
rf_status rf_gguf_read(rf_gguf *gguf, void *scratch, rf_error *err);

const rf_gguf_key *rf_gguf_find(const rf_gguf *gguf, const char *name);
const rf_gguf_tensor *rf_gguf_find_tensor(const rf_gguf *gguf, const char *name);
/* Element index of a key as a number: any integer type or bool into *out (false: another type, or
 * negative, or index out of range); floats (F32, F64) likewise. */
bool rf_gguf_u64(const rf_gguf_key *key, uint64_t index, uint64_t *out);
bool rf_gguf_i64(const rf_gguf_key *key, uint64_t index, int64_t *out);
bool rf_gguf_f64(const rf_gguf_key *key, uint64_t index, double *out);
bool rf_gguf_text(const rf_gguf_key *key, rf_text *out); /* a STRING scalar */
/* Walks an ARRAY of STRING: start with *at = 0; false at the end. The array was checked when it
 * was read, so a walk cannot fail. */
bool rf_gguf_next_text(const rf_gguf_key *key, uint64_t *at, rf_text *out);
const char *rf_gguf_type_name(rf_gguf_type type);

/* ---- name map ---------------------------------------------------------------------------- */

/* Checkpoint name ("blk.3.attn_q.weight") to canonical id ("model.layers[3].attn.q_proj.weight")
 * and back, by one table for the llama family. false, and *out empty, when it is not known. */
bool rf_name_to_id(rf_text name, char *out, size_t capacity);
bool rf_id_to_name(const char *id, char *out, size_t capacity);

#endif
