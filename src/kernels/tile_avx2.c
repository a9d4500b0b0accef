/* kernels/tile_avx2.c: packed tokens to the sides of a tile (tile_avx2.h). Done for every tile of
 * every panel, so all of it is a few instructions a block.
 */
#include "kernels/tile_avx2.h"

/* Four tokens' eight dwords as eight times four. */
RF_INLINE void interleave_4(const __m256i v[4], __m256i out[4])
{
    const __m256i a = _mm256_unpacklo_epi32(v[0], v[1]), b = _mm256_unpackhi_epi32(v[0], v[1]);
    const __m256i c = _mm256_unpacklo_epi32(v[2], v[3]), d = _mm256_unpackhi_epi32(v[2], v[3]);
    const __m256i e = _mm256_unpacklo_epi64(a, c), f = _mm256_unpackhi_epi64(a, c); /* 0 | 4 ... */
    const __m256i g = _mm256_unpacklo_epi64(b, d), h = _mm256_unpackhi_epi64(b, d);
    out[0] = _mm256_permute2x128_si256(e, f, 0x20);
    out[1] = _mm256_permute2x128_si256(g, h, 0x20);
    out[2] = _mm256_permute2x128_si256(e, f, 0x31);
    out[3] = _mm256_permute2x128_si256(g, h, 0x31);
}

RF_INLINE void store_4(const __m256i v[4], uint8_t *to)
{
    __m256i out[4];
    interleave_4(v, out);
    for (size_t i = 0; i < 4; i++) {
        rf_store_256(to + 32 * i, out[i]);
    }
}

/* One dword for each of eight blocks, step bytes apart; count <= 8 of them. */
RF_INLINE void scatter_4(const __m256i v[4], uint8_t *to, size_t step, uint32_t count)
{
    __m256i out[4];
    interleave_4(v, out);
    for (uint32_t i = 0; i < count; i++) {
        const __m128i half = i % 2 == 0 ? _mm256_castsi256_si128(out[i / 2])
                                        : _mm256_extracti128_si256(out[i / 2], 1);
        _mm_storeu_si128((__m128i *)(to + step * i), half);
    }
}

/* The first count of eight dwords, then zeros. */
RF_INLINE __m256i load_some(const void *p, uint32_t count)
{
    return _mm256_maskload_epi32(p, _mm256_castps_si256(rf_first_lanes(count)));
}

/* Adds 16-bit sums over the four dwords of each half: of a in dwords 0 and 4, ... */
RF_INLINE __m256i add_quarters(__m256i a, __m256i b, __m256i c, __m256i d)
{
    const __m256i x = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    const __m256i y = _mm256_add_epi16(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
    return _mm256_add_epi16(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
}

/* The starts of eight sub-blocks of 16. */
RF_INLINE __m256i starts_of_128(const uint8_t *q, uint32_t offset)
{
    const __m256i by = _mm256_set1_epi8((char)offset);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i sums = add_quarters(_mm256_maddubs_epi16(by, rf_load_256(q)),
                                      _mm256_maddubs_epi16(by, rf_load_256(q + 32)),
                                      _mm256_maddubs_epi16(by, rf_load_256(q + 64)),
                                      _mm256_maddubs_epi16(by, rf_load_256(q + 96)));
    const __m256i negative = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
    return _mm256_permutevar8x32_epi32(negative, order);
}

/* Eight sums: sum / 16 as pairs of 16 bits in v[0] (four dwords), sum mod 16 as bytes in the next
 * two. */
RF_INLINE __m256i split_sums(__m256i sums)
{
    const __m256i a = _mm256_srai_epi32(sums, 4), b = _mm256_and_si256(sums, _mm256_set1_epi32(15));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
    return _mm256_blend_epi32(both, _mm256_packs_epi16(both, both), 0x30);
}

/* Sums of a block of 256, mins of them, 8 or 16; to: where the sums of its side begin. */
RF_INLINE void block_sums(const int32_t *const sums[4], size_t b, uint32_t mins, uint8_t *to)
{
    for (size_t half = 0; half < mins / 8; half++) {
        __m256i v[4], out[4];
        for (int t = 0; t < 4; t++) {
            const int32_t *from = sums[t] + b * 16 + half * 8;
            v[t] = split_sums(mins == 8 ? rf_sums_of_32(from) : rf_load_256(from));
        }
        interleave_4(v, out);
        rf_store_256(to + 64 * half, out[0]);
        rf_store_256(to + 64 * half + 32, out[1]);
        rf_store_256(to + (size_t)mins * 8 + 32 * half, out[2]);
    }
}

static void sides_256(const rf_matmul *job, const rf_shape *s, const uint8_t *const act[4],
                      const rf_tile *tile)
{
    const rf_act_layout *layout = &job->layout;
    const size_t step = rf_side_bytes(*s), starts = rf_starts_at(*s), sums_at = rf_sums_at(*s);
    const int32_t *sums[4];
    for (int t = 0; t < 4; t++) {
        sums[t] = rf_act_sums(act[t], layout);
    }
    uint8_t *side = tile->sides;
    for (size_t b = 0; b < job->k / 256; b++, side += step) {
        __m256i v[4];
        for (int t = 0; t < 4; t++) {
            memcpy(side + 4 * t, rf_act_scales(act[t], layout) + b, 4);
        }
        if (s->steps != 0) {
            for (int t = 0; t < 4; t++) {
                const int16_t *m = rf_act_multipliers(act[t], layout) + b * 8;
                v[t] = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)m));
            }
            store_4(v, side + rf_multipliers_at());
        }
        for (size_t half = 0; half < 2 && s->offset != 0; half++) {
            for (int t = 0; t < 4; t++) {
                v[t] = starts_of_128(act[t] + b * 256 + half * 128, s->offset);
            }
            store_4(v, side + starts + 128 * half);
        }
        if (s->min_step != 0) {
            block_sums(sums, b, 256 / s->min_step, side + sums_at);
        }
    }
}

/* Eight blocks at a time: a dword of each. */
static void sides_32(const rf_matmul *job, const rf_shape *s, const uint8_t *const act[4],
                     const rf_tile *tile)
{
    const rf_act_layout *layout = &job->layout;
    const uint32_t block_count = job->k / 32;
    const size_t step = rf_side_bytes(*s);
    uint8_t *side = tile->sides;
    for (uint32_t b = 0; b < block_count; b += 8, side += 8 * step) {
        const uint32_t count = RF_MIN(8u, block_count - b);
        __m256i v[4];
        for (int t = 0; t < 4; t++) {
            v[t] = load_some(rf_act_scales(act[t], layout) + b, count);
        }
        scatter_4(v, side, step, count);
        if (s->offset == 0 && s->min_step == 0) {
            continue;
        }
        for (int t = 0; t < 4; t++) {
            const int32_t *sums = rf_act_sums(act[t], layout) + (size_t)b * 2;
            int32_t some[16] = {0};
            if (count < 8) {
                memcpy(some, sums, (size_t)count * 8);
                sums = some;
            }
            v[t] = rf_sums_of_32(sums);
            if (s->offset != 0) {
                v[t] = _mm256_mullo_epi32(v[t], _mm256_set1_epi32(-(int32_t)s->offset));
            } else {
                v[t] = _mm256_castps_si256(_mm256_cvtepi32_ps(v[t]));
            }
        }
        scatter_4(v, side + (s->offset != 0 ? rf_starts_at(*s) : rf_sums_at(*s)), step, count);
    }
}

/* int8 codes of four tokens as int16, two k of all, then the next two. Tiles would else read four
 * streams that are often a multiple of 4096 bytes apart, which the first cache of Zen 3 does not
 * like (loads and registers alone: 78 GMAC/s; streams 4864 bytes apart 72, 4096 apart 44). */
static void mix_codes(const rf_act_layout *layout, const uint8_t *const act[4], int16_t *mixed)
{
    __m256i by = _mm256_setzero_si256();
    for (size_t i = 0; i < layout->k; i += 16) {
        __m128i v[4], out[4];
        for (int t = 0; t < 4; t++) {
            v[t] = _mm_load_si128((const __m128i *)(const void *)(act[t] + i));
        }
        const __m128i a = _mm_unpacklo_epi16(v[0], v[1]), b = _mm_unpackhi_epi16(v[0], v[1]);
        const __m128i c = _mm_unpacklo_epi16(v[2], v[3]), d = _mm_unpackhi_epi16(v[2], v[3]);
        out[0] = _mm_unpacklo_epi32(a, c);
        out[1] = _mm_unpackhi_epi32(a, c);
        out[2] = _mm_unpacklo_epi32(b, d);
        out[3] = _mm_unpackhi_epi32(b, d);
        if (layout->block == 256 && i % 32 == 0) {
            int32_t twice[4];
            for (int t = 0; t < 4; t++) {
                twice[t] = rf_act_multipliers(act[t], layout)[i / 32] * 0x10001;
            }
            by = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)twice));
        }
        for (size_t j = 0; j < 4; j++) {
            const __m256i codes = _mm256_cvtepi8_epi16(out[j]);
            rf_store_256(mixed + 4 * i + 16 * j,
                         layout->block == 256 ? _mm256_mullo_epi16(codes, by) : codes);
        }
    }
}

void rf_tile_avx2(const rf_matmul *job, const rf_shape *s, uint32_t first, uint32_t count,
                  rf_tile *tile)
{
    const uint8_t *act[4];
    for (uint32_t t = 0; t < 4; t++) {
        act[t] = rf_matmul_act(job, first + RF_MIN(t, count - 1));
        tile->q[t] = act[t];
    }
    if (s->mixed) {
        mix_codes(&job->layout, act, tile->mixed);
        tile->q[0] = (const uint8_t *)tile->mixed;
    }
    if (s->block == 32) {
        sides_32(job, s, act, tile);
    } else {
        sides_256(job, s, act, tile);
    }
}
