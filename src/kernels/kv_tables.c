/* kernels/kv_tables.c: the rotated KV formats as a table: widths, levels, trial scales; shapes and
 * signs. It knows no row.
 *
 * Levels: r4 kv-study 2.3; r5, r3 kv-study 4, times 127, rounded. The rounding costs 1.0 % (r5),
 * 0.3 % (r4), 0.1 % (r3) of the mean squared error (quadrature, tests/unit/test_kv_codec.c).
 * turbo: Lloyd-Max for N(0, 1), kv-quantization 1.5: levels times 127 / the largest, rounded, at a
 * cost of 0.34 %, 0.13 %, 0.0004 % (tests/unit/test_kv_turbo.c); bounds are those of the document.
 */
#include "kernels/kv_scalar.h"

static const int8_t levels_r5[32] = {-116, -99, -86, -74, -64, -56, -48, -41, -35, -29, -24,
                                     -19,  -14, -9,  -5,  0,   4,   9,   14,  18,  24,  29,
                                     34,   40,  47,  55,  63,  72,  82,  94,  109, 126};
static const int8_t levels_r4[16] = {-111, -88, -70, -54, -40, -27, -15, -3,
                                     9,    22,  34,  48,  63,  79,  99,  125};
static const int8_t levels_r3[8] = {-96, -60, -31, -6, 18, 44, 75, 120};

/* turbo*q: once for each sign of the rest. */
static const int8_t levels_turbo4[16] = {-127, -96, -75, -58, -44, -31, -18, -6,
                                         6,    18,  31,  44,  58,  75,  96,  127};
static const int8_t levels_turbo3[16] = {-127, -79, -45, -14, 14, 45, 79, 127,
                                         -127, -79, -45, -14, 14, 45, 79, 127};
static const int8_t levels_turbo2[8] = {-127, -38, 38, 127, -127, -38, 38, 127};
/* The rest of the sixteen is reached by nothing. */
#define NONE __builtin_inff()
static const float bounds_turbo4[16] = {
    -2.4008033988f, -1.8435318063f, -1.4371387917f, -1.0992858269f,
    -0.7995497875f, -0.5224037090f, -0.2582216647f, 0,
    0.2582216647f,  0.5224037090f,  0.7995497875f,  1.0992858269f,
    1.4371387917f,  1.8435318063f,  2.4008033988f,  NONE};
static const float bounds_turbo3[16] = {-1.7479274915f, -1.0499572799f, -0.5005497301f, 0,
                                        0.5005497301f,  1.0499572799f,  1.7479274915f,  NONE,
                                        NONE,           NONE,           NONE,           NONE,
                                        NONE,           NONE,           NONE,           NONE};
static const float bounds_turbo2[16] = {-0.9815988216f, 0,    0.9815988216f, NONE, NONE, NONE,
                                        NONE,           NONE, NONE,          NONE, NONE, NONE,
                                        NONE,           NONE, NONE,          NONE};

/* Trial factors: kv-study 2.3 and 2.5. */
#define COARSE                                                                                     \
    .key_count = 4, .key_factors = {0.9f, 1.0f, 1.1f, 1.25f}, .search_count = 8,                   \
    .search_factors = {0.8f, 0.88f, 0.94f, 1.0f, 1.06f, 1.12f, 1.2f, 1.3f}
#define FINE                                                                                       \
    .key_count = 4, .key_factors = {0.94f, 1.0f, 1.06f, 1.12f}, .search_count = 4,                 \
    .search_factors = {0.94f, 1.0f, 1.06f, 1.12f}
#define LEVELS .block = 64, .span = 32, .unit = 1.0f / 127, .units = 127
#define BYTES                                                                                      \
    .code_bits = 8, .block = 64, .f16_scale = true, .unit = 1, .units = 1, .low = -127, .high = 127
/* A polar code of a table's size: its levels, its unit in standard deviations. */
#define POLAR                                                                                      \
    .block = RF_KV_SPAN_MAX, .span = RF_KV_SPAN_MAX, .f16_scale = true, .low = -127, .high = 127
#define POLAR_4 POLAR, .levels = levels_turbo4, .bounds = bounds_turbo4, .unit = 0.0215164533f
#define POLAR_3 POLAR, .levels = levels_turbo3, .bounds = bounds_turbo3, .unit = 0.0169444544f
#define POLAR_2 POLAR, .levels = levels_turbo2, .bounds = bounds_turbo2, .unit = 0.0118930520f
const rf_kv_code_info rf_kv_codes[RF_KV_CODE_ALL] = {
    [RF_KV_CODE_R8] = {.name = "r8", BYTES, .span = 64, .key_count = 1, .key_factors = {1}},
    [RF_KV_CODE_R6] = {.name = "r6",
                       .code_bits = 6,
                       .block = 64,
                       .span = 32,
                       .unit = 1.0f / 32,
                       .units = 32,
                       .low = -31,
                       .high = 32,
                       .offset = 31,
                       FINE},
    [RF_KV_CODE_R5] =
        {.name = "r5", .code_bits = 5, LEVELS, .levels = levels_r5, .low = -116, .high = 126, FINE},
    [RF_KV_CODE_R4] = {.name = "r4",
                       .code_bits = 4,
                       LEVELS,
                       .levels = levels_r4,
                       .low = -111,
                       .high = 125,
                       COARSE},
    [RF_KV_CODE_R3] = {.name = "r3",
                       .code_bits = 3,
                       LEVELS,
                       .levels = levels_r3,
                       .low = -96,
                       .high = 120,
                       COARSE},
    [RF_KV_CODE_Q8_0] = {.name = "q8_0", BYTES, .span = 32},
    [RF_KV_CODE_Q4_0] = {.name = "q4_0",
                         .code_bits = 4,
                         .block = 64,
                         .span = 32,
                         .f16_scale = true,
                         .unit = 1,
                         .units = 1,
                         .low = -8,
                         .high = 7,
                         .offset = 8},
    [RF_KV_CODE_TURBO4] = {.name = "turbo4", .code_bits = 4, POLAR_4},
    [RF_KV_CODE_TURBO3] = {.name = "turbo3", .code_bits = 3, POLAR_3},
    [RF_KV_CODE_TURBO2] = {.name = "turbo2", .code_bits = 2, POLAR_2},
    [RF_KV_CODE_TURBO4Q] = {.name = "turbo4q", .code_bits = 4, .wide = true, POLAR_3},
    [RF_KV_CODE_TURBO3Q] = {.name = "turbo3q", .code_bits = 3, .wide = true, POLAR_2},
};

bool rf_kv_shape_of(rf_kv_code code, uint32_t width, rf_kv_shape *shape)
{
    const rf_kv_code_info *info = &rf_kv_codes[code];
    const bool by_32 = code == RF_KV_CODE_Q8_0 || code == RF_KV_CODE_Q4_0;
    if (width == 0 || width > 1u << 24 || width % (by_32 ? 32 : 8) != 0) {
        return false;
    }
    const uint32_t power = width & (0u - width); /* the largest power of two that divides it */
    shape->code = code;
    shape->width = width;
    shape->block = RF_MIN(power, info->block);
    shape->span = RF_MIN(power, info->span);
    shape->span_count = width / shape->span;
    shape->code_bytes = width / 8 * info->code_bits;
    const uint32_t scale_bytes = info->wide ? 4 : (info->f16_scale ? 2 : 1);
    shape->row_bytes = shape->code_bytes + shape->span_count * scale_bytes;
    return true;
}

int32_t rf_kv_base(float largest)
{
    const uint32_t size = rf_float_bits(largest) & 0x7FFFFFFFu;
    const int32_t base = (int32_t)(size >> 23) - 127 + 1;
    return RF_MAX(-RF_KV_BASE_LIMIT, RF_MIN(base, RF_KV_BASE_LIMIT));
}

void rf_kv_signs(uint64_t seed, uint32_t width, uint8_t *signs)
{
    for (uint32_t at = 0; at < width; at += 64) { /* splitmix64, Steele et al. 2014 */
        uint64_t z = (seed += UINT64_C(0x9e3779b97f4a7c15));
        z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
        z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
        z ^= z >> 31;
        for (uint32_t byte = 0; byte < 8; byte++) {
            signs[at / 8 + byte] = (uint8_t)(z >> 8 * byte);
        }
    }
}
