/* cli/kld.c: the logits file of llama-perplexity --kl-divergence-base: read, written, encoded.
 *
 *   "_logits_" | int32 ctx, vocabulary, chunks | int32 tokens[chunks * ctx] | rows
 *
 * One row per scored position: float scale, float minimum (in the first four uint16), then one
 * code per token of the vocabulary, rounded up to an even count; log-probability = minimum +
 * scale * code. Source of the format: the tool itself, and the reference beside its file.
 */
#include "cli.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define KLD_MAGIC      "_logits_"
#define KLD_HEAD_BYTES (8u + 3u * 4u)
#define KLD_CLIP       16.0f /* log-probabilities this far below the largest become code 0 */

static uint64_t row_codes(uint32_t vocab_count)
{
    return 2 * (((uint64_t)vocab_count + 1) / 2) + 4;
}

static rf_status read_exact(kld_file *kld, void *out, size_t bytes, rf_error *err)
{
    if (fread(out, 1, bytes, kld->stream) == bytes)
        return RF_OK;
    if (ferror(kld->stream))
        return rf_fail(err, RF_ERR_IO, kld->path, "cannot read: %s", strerror(errno));
    return rf_fail(err, RF_ERR_IO, kld->path, "the logits file ends too early");
}

/* The tokens, once the file is known to be as long as its header says. */
static rf_status read_tokens(kld_file *kld, rf_error *err)
{
    struct stat status;
    uint64_t tokens = (uint64_t)kld->chunks * kld->ctx; /* both below 2^31 */
    uint64_t scored = (uint64_t)kld->chunks * (kld->ctx - 1 - kld->ctx / 2);
    uint64_t token_bytes = 0, rows_bytes = 0, expected = 0;
    bool sane = rf_mul(tokens, 4, &token_bytes) && rf_mul(scored, kld->row_codes, &rows_bytes) &&
                rf_mul(rows_bytes, 2, &rows_bytes) && rf_add(token_bytes, rows_bytes, &expected) &&
                rf_add(expected, KLD_HEAD_BYTES, &expected);
    if (!sane)
        return rf_fail(err, RF_ERR_IO, kld->path, "the header's sizes make no sense");
    if (fstat(fileno(kld->stream), &status) == 0 && S_ISREG(status.st_mode) &&
        (uint64_t)status.st_size != expected) {
        rf_fail(err, RF_ERR_IO, kld->path, "the logits file has the wrong length");
        rf_fail_expected(err, "%llu bytes", (unsigned long long)expected);
        return rf_fail_got(err, "%llu", (unsigned long long)status.st_size);
    }
    if (token_bytes > (UINT64_C(1) << 32))
        return rf_fail(err, RF_ERR_IO, kld->path, "the header's sizes make no sense");
    kld->tokens = malloc((size_t)token_bytes);
    if (!kld->tokens)
        return rf_fail(err, RF_ERR_NO_FIT, kld->path, "no memory for its tokens");
    return read_exact(kld, kld->tokens, (size_t)token_bytes, err);
}

rf_status kld_open(kld_file *kld, const char *path, rf_error *err)
{
    memset(kld, 0, sizeof *kld);
    kld->path = path;
    kld->stream = fopen(path, "rbe");
    if (!kld->stream)
        return rf_fail(err, RF_ERR_IO, path, "cannot open: %s", strerror(errno));
    char magic[8];
    int32_t head[3];
    rf_status status = read_exact(kld, magic, sizeof magic, err);
    if (!status && memcmp(magic, KLD_MAGIC, sizeof magic) != 0)
        status = rf_fail(err, RF_ERR_IO, path, "not a logits file: it does not begin with %s",
                         KLD_MAGIC);
    if (!status)
        status = read_exact(kld, head, sizeof head, err);
    if (!status && (head[0] < 3 || head[1] < 1 || head[2] < 1))
        status = rf_fail(err, RF_ERR_IO, path, "the header's sizes make no sense");
    if (!status) {
        kld->ctx = (uint32_t)head[0];
        kld->vocab_count = (uint32_t)head[1];
        kld->chunks = (uint32_t)head[2];
        kld->row_codes = row_codes(kld->vocab_count);
        status = read_tokens(kld, err);
    }
    if (status)
        kld_close(kld, NULL);
    return status;
}

static rf_status write_exact(kld_file *kld, const void *bytes, size_t count, rf_error *err)
{
    if (fwrite(bytes, 1, count, kld->stream) == count)
        return RF_OK;
    return rf_fail(err, RF_ERR_IO, kld->path, "cannot write: %s", strerror(errno));
}

rf_status kld_create(kld_file *kld, const char *path, const uint32_t *tokens, rf_error *err)
{
    kld->path = path;
    kld->row_codes = row_codes(kld->vocab_count);
    kld->stream = fopen(path, "wbe");
    if (!kld->stream)
        return rf_fail(err, RF_ERR_IO, path, "cannot create: %s", strerror(errno));
    int32_t head[3] = {(int32_t)kld->ctx, (int32_t)kld->vocab_count, (int32_t)kld->chunks};
    rf_status status = write_exact(kld, KLD_MAGIC, 8, err);
    if (!status)
        status = write_exact(kld, head, sizeof head, err);
    if (!status)
        status = write_exact(kld, tokens, (size_t)kld->chunks * kld->ctx * sizeof *tokens, err);
    if (status)
        kld_close(kld, NULL);
    return status;
}

rf_status kld_read(kld_file *kld, uint16_t *rows, uint64_t count, rf_error *err)
{
    return read_exact(kld, rows, (size_t)(count * kld->row_codes) * sizeof *rows, err);
}

rf_status kld_write(kld_file *kld, const uint16_t *rows, uint64_t count, rf_error *err)
{
    return write_exact(kld, rows, (size_t)(count * kld->row_codes) * sizeof *rows, err);
}

rf_status kld_close(kld_file *kld, rf_error *err)
{
    rf_status status = RF_OK;
    if (kld->stream && fclose(kld->stream) != 0)
        status = rf_fail(err, RF_ERR_IO, kld->path, "cannot write: %s", strerror(errno));
    kld->stream = NULL;
    free(kld->tokens);
    kld->tokens = NULL;
    return status;
}

void kld_encode(const float *logits, uint32_t vocab_count, uint16_t *row)
{
    float largest = logits[0], least = logits[0];
    for (uint32_t i = 1; i < vocab_count; i++) {
        largest = logits[i] > largest ? logits[i] : largest;
        least = logits[i] < least ? logits[i] : least;
    }
    least = least > largest - KLD_CLIP ? least : largest - KLD_CLIP;
    double sum = 0.0;
    for (uint32_t i = 0; i < vocab_count; i++)
        sum += (double)expf(logits[i] - largest);
    float minimum = least - largest - (float)log(sum);
    float scale = (largest - least) / 65535.0f;
    memcpy(row, &scale, sizeof scale);
    memcpy(row + 2, &minimum, sizeof minimum);
    row += 4;
    float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (uint32_t i = 0; i < vocab_count; i++) {
        float code = logits[i] > least ? rintf(inverse * (logits[i] - least)) : 0.0f;
        row[i] = (uint16_t)(code < 65535.0f ? code : 65535.0f);
    }
    if (vocab_count % 2)
        row[vocab_count] = 0;
}
