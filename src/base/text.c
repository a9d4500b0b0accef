/* base/text.c: text and JSON into a fixed buffer.
 *
 * libc's stdio takes a buffer and a locale behind the caller's back, so the library formats on
 * its own: integers, strings, and doubles by exact decimal expansion. What does not fit is
 * dropped and remembered in `overflow`; nothing is written past the capacity. Knows no stream and
 * no file; errors, reports and traces are written with it.
 */
#include "base/base.h"

#include <string.h>

/* ---- writer ------------------------------------------------------------------------------ */

rf_writer rf_writer_make(char *text, size_t capacity)
{
    if (capacity > 0)
        text[0] = '\0';
    return (rf_writer){.text = text, .capacity = capacity};
}

void rf_write_bytes(rf_writer *writer, const char *bytes, size_t count)
{
    size_t room = writer->capacity > 0 ? writer->capacity - 1 - writer->length : 0;
    if (count > room) {
        count = room;
        writer->overflow = true;
    }
    if (count == 0)
        return;
    memmove(writer->text + writer->length, bytes, count); /* an error may quote itself */
    writer->length += count;
    writer->text[writer->length] = '\0';
}

static void write_repeated(rf_writer *writer, char byte, size_t count)
{
    for (; count > 0 && !writer->overflow; count--)
        rf_write_bytes(writer, &byte, 1);
}

/* ---- doubles ----------------------------------------------------------------------------- */

/* A finite double is m * 2^e with m < 2^53 and -1074 <= e <= 971. Its decimal expansion is
 * finite: at most 309 digits before the point and 1074 after it. It is computed exactly, in limbs
 * of nine digits, so that every rounding is the correct one:
 *
 *      limb    0 ............ 34 | 35 .............. 154
 *              integer digits    . fraction digits
 */
#define LIMB_DIGITS    9
#define LIMB_BASE      1000000000u
#define INTEGER_LIMBS  35  /* 315 digits: six spare ones in front take a carry */
#define FRACTION_LIMBS 120 /* 1080 digits */
#define LIMB_COUNT     (INTEGER_LIMBS + FRACTION_LIMBS)
#define DIGIT_COUNT    (LIMB_COUNT * LIMB_DIGITS)
#define POINT          (INTEGER_LIMBS * LIMB_DIGITS) /* index of the first digit after the point */

#define PRECISION_MAX   17  /* digits that tell any two doubles apart */
#define NUMBER_TEXT_MAX 352 /* sign, 309 digits, point, 17 digits, and slack */

static void limbs_shift_left(uint32_t *limbs, unsigned shift)
{
    uint64_t carry = 0;
    for (size_t i = INTEGER_LIMBS; i-- > 0;) {
        uint64_t value = ((uint64_t)limbs[i] << shift) + carry;
        limbs[i] = (uint32_t)(value % LIMB_BASE);
        carry = value / LIMB_BASE;
    }
}

/* shift <= 9, because 10^9 is a multiple of 2^9: the bits that leave a limb are a whole number of
 * units of the next one. */
static void limbs_shift_right(uint32_t *limbs, unsigned shift)
{
    uint32_t carry = 0;
    for (size_t i = 0; i < LIMB_COUNT; i++) {
        uint32_t value = limbs[i];
        limbs[i] = (value >> shift) + carry * (LIMB_BASE >> shift);
        carry = value & ((1u << shift) - 1);
    }
}

/* Fills digits[DIGIT_COUNT] (values 0..9) with the expansion of a finite value, sign apart. */
static void decimal_expand(double value, uint8_t *digits)
{
    uint32_t limbs[LIMB_COUNT] = {0};
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint64_t mantissa = bits & ((UINT64_C(1) << 52) - 1);
    int biased = (int)(bits >> 52 & 0x7ff);
    int exponent = -1074;
    if (biased > 0) {
        mantissa |= UINT64_C(1) << 52;
        exponent = biased - 1075;
    }
    limbs[INTEGER_LIMBS - 1] = (uint32_t)(mantissa % LIMB_BASE);
    limbs[INTEGER_LIMBS - 2] = (uint32_t)(mantissa / LIMB_BASE);
    for (int left = exponent; left > 0; left -= 29) {
        limbs_shift_left(limbs, (unsigned)RF_MIN(left, 29));
    }
    for (int left = -exponent; left > 0; left -= 9) {
        limbs_shift_right(limbs, (unsigned)RF_MIN(left, 9));
    }
    for (size_t i = 0; i < LIMB_COUNT; i++) {
        uint32_t limb = limbs[i];
        for (size_t d = LIMB_DIGITS; d-- > 0; limb /= 10) {
            digits[i * LIMB_DIGITS + d] = (uint8_t)(limb % 10);
        }
    }
}

/* Rounds to the digits before index keep (0 < keep), half to even. */
static void decimal_round(uint8_t *digits, size_t keep)
{
    if (keep >= DIGIT_COUNT)
        return;
    bool up = digits[keep] > 5;
    if (digits[keep] == 5) {
        size_t i = keep + 1;
        while (i < DIGIT_COUNT && digits[i] == 0)
            i++;
        up = i < DIGIT_COUNT || (digits[keep - 1] & 1) != 0;
    }
    memset(digits + keep, 0, DIGIT_COUNT - keep);
    if (!up)
        return;
    size_t i = keep - 1;
    while (digits[i] == 9)
        digits[i--] = 0;
    digits[i]++;
}

/* Index of the first digit that is not zero; the last one before the point for a zero. */
static size_t decimal_first(const uint8_t *digits)
{
    for (size_t i = 0; i < DIGIT_COUNT; i++) {
        if (digits[i] != 0)
            return i;
    }
    return POINT - 1;
}

static size_t put_digits(char *text, const uint8_t *digits, size_t first, size_t end)
{
    size_t length = 0;
    for (size_t i = first; i < end; i++)
        text[length++] = (char)('0' + digits[i]);
    return length;
}

/* Digits up to index end, with a point where the fraction begins. */
static size_t put_fixed(char *text, const uint8_t *digits, size_t end)
{
    size_t first = RF_MIN(decimal_first(digits), (size_t)POINT - 1);
    size_t length = put_digits(text, digits, first, POINT);
    if (end > POINT) {
        text[length++] = '.';
        length += put_digits(text + length, digits, POINT, end);
    }
    return length;
}

static size_t put_exponential(char *text, const uint8_t *digits, size_t first, size_t end,
                              int exponent)
{
    size_t length = put_digits(text, digits, first, first + 1);
    if (end > first + 1) {
        text[length++] = '.';
        length += put_digits(text + length, digits, first + 1, end);
    }
    unsigned magnitude = (unsigned)(exponent < 0 ? -exponent : exponent);
    text[length++] = 'e';
    text[length++] = exponent < 0 ? '-' : '+';
    if (magnitude >= 100)
        text[length++] = (char)('0' + magnitude / 100);
    text[length++] = (char)('0' + magnitude / 10 % 10);
    text[length++] = (char)('0' + magnitude % 10);
    return length;
}

static size_t put_general(char *text, uint8_t *digits, size_t precision)
{
    decimal_round(digits, decimal_first(digits) + precision);
    size_t first = decimal_first(digits); /* once more: a carry may have moved it */
    size_t end = first + precision;
    int exponent = (int)POINT - 1 - (int)first;
    bool fixed = exponent >= -4 && exponent < (int)precision;
    size_t least = fixed ? RF_MAX(first + 1, (size_t)POINT) : first + 1;
    while (end > least && digits[end - 1] == 0)
        end--;
    return fixed ? put_fixed(text, digits, end)
                 : put_exponential(text, digits, first, end, exponent);
}

/* Puts value without its sign as %.<precision>f or %.<precision>g; returns the length. */
static size_t put_double(char *text, double value, char conversion, int precision)
{
    if (value != value) {
        memcpy(text, "nan", 3);
        return 3;
    }
    if (value - value != 0) { /* only an infinity differs from itself by something */
        memcpy(text, "inf", 3);
        return 3;
    }
    uint8_t digits[DIGIT_COUNT];
    decimal_expand(value, digits);
    if (precision < 0)
        precision = 6;
    if (precision > PRECISION_MAX)
        precision = PRECISION_MAX;
    if (conversion == 'g')
        return put_general(text, digits, (size_t)RF_MAX(precision, 1));
    decimal_round(digits, POINT + (size_t)precision);
    return put_fixed(text, digits, POINT + (size_t)precision);
}

/* ---- formatter --------------------------------------------------------------------------- */

typedef struct rf_spec { /* one conversion: %-08.3lu */
    bool left;
    bool zero;
    int width;
    int precision; /* -1: none given */
    char length;   /* 0, 'l' (long), 'L' (long long), 'z' (size_t) */
    char conversion;
} rf_spec;

static void write_field(rf_writer *writer, const rf_spec *spec, const char *sign, const char *text,
                        size_t length)
{
    size_t sign_length = strlen(sign);
    size_t width = spec->width > 0 ? (size_t)spec->width : 0;
    size_t used = sign_length + length;
    size_t padding = width > used ? width - used : 0;
    bool zero = spec->zero && !spec->left;
    if (!spec->left && !zero)
        write_repeated(writer, ' ', padding);
    rf_write_bytes(writer, sign, sign_length);
    if (zero)
        write_repeated(writer, '0', padding);
    rf_write_bytes(writer, text, length);
    if (spec->left)
        write_repeated(writer, ' ', padding);
}

static void write_unsigned(rf_writer *writer, const rf_spec *spec, const char *sign, uint64_t value,
                           unsigned base)
{
    char text[24];
    size_t at = sizeof text;
    do {
        text[--at] = "0123456789abcdef"[value % base];
        value /= base;
    } while (value > 0);
    write_field(writer, spec, sign, text + at, sizeof text - at);
}

static void write_signed(rf_writer *writer, const rf_spec *spec, int64_t value)
{
    uint64_t magnitude = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    write_unsigned(writer, spec, value < 0 ? "-" : "", magnitude, 10);
}

static void write_double(rf_writer *writer, const rf_spec *spec, double value)
{
    char text[NUMBER_TEXT_MAX];
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    rf_spec field = *spec;
    size_t length = put_double(text, value, spec->conversion, spec->precision);
    if (text[0] == 'n' || text[0] == 'i')
        field.zero = false;
    write_field(writer, &field, bits >> 63 ? "-" : "", text, length);
}

static void write_string(rf_writer *writer, const rf_spec *spec, const char *text)
{
    if (!text)
        text = "(null)";
    size_t length = spec->precision >= 0 ? strnlen(text, (size_t)spec->precision) : strlen(text);
    rf_spec field = *spec;
    field.zero = false;
    write_field(writer, &field, "", text, length);
}

static int64_t next_signed(const rf_spec *spec, va_list *args)
{
    switch (spec->length) {
    case 'l':
        return va_arg(*args, long);
    case 'L':
        return va_arg(*args, long long);
    case 'z':
        return va_arg(*args, ptrdiff_t);
    default:
        return va_arg(*args, int);
    }
}

static uint64_t next_unsigned(const rf_spec *spec, va_list *args)
{
    switch (spec->length) {
    case 'l':
        return va_arg(*args, unsigned long);
    case 'L':
        return va_arg(*args, unsigned long long);
    case 'z':
        return va_arg(*args, size_t);
    default:
        return va_arg(*args, unsigned);
    }
}

static const char *parse_number(const char *format, int *value, va_list *args)
{
    if (*format == '*') {
        *value = va_arg(*args, int);
        return format + 1;
    }
    for (*value = 0; *format >= '0' && *format <= '9'; format++) {
        if (*value < 100000)
            *value = *value * 10 + (*format - '0');
    }
    return format;
}

/* format points behind the percent sign; returns what follows the conversion. */
static const char *parse_spec(const char *format, rf_spec *spec, va_list *args)
{
    *spec = (rf_spec){.precision = -1};
    for (; *format == '-' || *format == '0'; format++) {
        if (*format == '-')
            spec->left = true;
        else
            spec->zero = true;
    }
    format = parse_number(format, &spec->width, args);
    if (spec->width < 0) { /* as in C: a negative width from the arguments means left */
        spec->left = true;
        spec->width = spec->width == INT32_MIN ? 0 : -spec->width;
    }
    if (*format == '.')
        format = parse_number(format + 1, &spec->precision, args);
    if (*format == 'z' || *format == 'l')
        spec->length = *format++;
    if (spec->length == 'l' && *format == 'l') {
        spec->length = 'L';
        format++;
    }
    spec->conversion = *format;
    return *format ? format + 1 : format;
}

/* Returns false for a conversion that this formatter does not know. */
static bool write_conversion(rf_writer *writer, const rf_spec *spec, va_list *args)
{
    char byte;
    switch (spec->conversion) {
    case '%':
        rf_write_bytes(writer, "%", 1);
        return true;
    case 'c':
        byte = (char)va_arg(*args, int);
        write_field(writer, spec, "", &byte, 1);
        return true;
    case 's':
        write_string(writer, spec, va_arg(*args, const char *));
        return true;
    case 'd':
    case 'i':
        write_signed(writer, spec, next_signed(spec, args));
        return true;
    case 'u':
        write_unsigned(writer, spec, "", next_unsigned(spec, args), 10);
        return true;
    case 'x':
        write_unsigned(writer, spec, "", next_unsigned(spec, args), 16);
        return true;
    case 'f':
    case 'g':
        write_double(writer, spec, va_arg(*args, double));
        return true;
    default:
        return false;
    }
}

void rf_write_v(rf_writer *writer, const char *format, va_list args_in)
{
    va_list args;
    va_copy(args, args_in);
    while (*format) {
        const char *percent = strchr(format, '%');
        size_t plain = percent ? (size_t)(percent - format) : strlen(format);
        if (plain > 0)
            rf_write_bytes(writer, format, plain);
        if (!percent)
            break;
        rf_spec spec;
        format = parse_spec(percent + 1, &spec, &args);
        if (!write_conversion(writer, &spec, &args)) {
            /* The type of its argument is unknown, so nothing behind it can be read either. */
            rf_write_bytes(writer, percent, strlen(percent));
            break;
        }
    }
    va_end(args);
}

void rf_write(rf_writer *writer, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    rf_write_v(writer, format, args);
    va_end(args);
}

size_t rf_print(char *text, size_t capacity, const char *format, ...)
{
    rf_writer writer = rf_writer_make(text, capacity);
    va_list args;
    va_start(args, format);
    rf_write_v(&writer, format, args);
    va_end(args);
    return writer.length;
}

const char *rf_print_bytes(char *text, size_t capacity, uint64_t bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB"};
    if (bytes < 1024) {
        rf_print(text, capacity, "%u B", (unsigned)bytes);
        return text;
    }
    uint64_t whole = 0;
    uint64_t hundredths = 0;
    size_t unit = 0;
    for (;; unit++) {
        uint64_t unit_bytes = UINT64_C(1024) << (10 * unit);
        whole = bytes / unit_bytes;
        hundredths = (bytes % unit_bytes * 100 + unit_bytes / 2) / unit_bytes;
        if (hundredths == 100) {
            whole++;
            hundredths = 0;
        }
        if (whole < 1024 || unit + 1 == RF_ARRAY_COUNT(units))
            break;
    }
    rf_writer writer = rf_writer_make(text, capacity);
    rf_write(&writer, "%llu", (unsigned long long)whole);
    if (hundredths % 10 != 0)
        rf_write(&writer, ".%02u", (unsigned)hundredths);
    else if (hundredths != 0)
        rf_write(&writer, ".%u", (unsigned)hundredths / 10);
    rf_write(&writer, " %s", units[unit]);
    return text;
}

/* ---- JSON -------------------------------------------------------------------------------- */

/* The length of the well-formed UTF-8 sequence at text, 0 when there is none (Unicode 15, table
 * 3-7: no overlong forms, no surrogates, nothing above U+10FFFF). */
static size_t utf8_length(const uint8_t *text, size_t left)
{
    uint8_t lead = text[0];
    if (lead < 0x80)
        return 1;
    size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || left < length)
        return 0;
    uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    if (text[1] < low || text[1] > high)
        return 0;
    for (size_t i = 2; i < length; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    }
    return length;
}

static void write_json_control(rf_writer *writer, uint8_t byte)
{
    static const char short_names[] = "btn.fr"; /* for 0x08 .. 0x0d; 0x0b has none */
    if (byte >= 0x08 && byte <= 0x0d && byte != 0x0b) {
        rf_write(writer, "\\%c", short_names[byte - 0x08]);
    } else {
        rf_write(writer, "\\u%04x", (unsigned)byte);
    }
}

static void write_json_string(rf_writer *writer, const char *text, size_t length)
{
    const uint8_t *bytes = (const uint8_t *)text;
    rf_write_bytes(writer, "\"", 1);
    size_t at = 0;
    while (at < length && !writer->overflow) {
        size_t step = utf8_length(bytes + at, length - at);
        if (step == 0) {
            rf_write_bytes(writer, "\xef\xbf\xbd", 3);
            step = 1;
        } else if (bytes[at] < 0x20) {
            write_json_control(writer, bytes[at]);
        } else {
            if (bytes[at] == '"' || bytes[at] == '\\')
                rf_write_bytes(writer, "\\", 1);
            rf_write_bytes(writer, text + at, step);
        }
        at += step;
    }
    rf_write_bytes(writer, "\"", 1);
}

/* What stands before every value: the comma, and the key of a member. */
static void begin_value(rf_writer *writer, const char *key)
{
    if (writer->comma)
        rf_write_bytes(writer, ",", 1);
    writer->comma = true;
    if (!key)
        return;
    write_json_string(writer, key, strlen(key));
    rf_write_bytes(writer, ":", 1);
}

void rf_json_open(rf_writer *writer, const char *key, char bracket)
{
    begin_value(writer, key);
    rf_write_bytes(writer, &bracket, 1);
    writer->comma = false;
}

void rf_json_close(rf_writer *writer, char bracket)
{
    rf_write_bytes(writer, &bracket, 1);
    writer->comma = true;
}

void rf_json_text(rf_writer *writer, const char *key, const char *text)
{
    if (!text)
        rf_json_null(writer, key);
    else
        rf_json_text_n(writer, key, text, strlen(text));
}

void rf_json_text_n(rf_writer *writer, const char *key, const char *text, size_t length)
{
    begin_value(writer, key);
    write_json_string(writer, text, length);
}

void rf_json_u64(rf_writer *writer, const char *key, uint64_t value)
{
    begin_value(writer, key);
    rf_write(writer, "%llu", (unsigned long long)value);
}

void rf_json_i64(rf_writer *writer, const char *key, int64_t value)
{
    begin_value(writer, key);
    rf_write(writer, "%lld", (long long)value);
}

void rf_json_f64(rf_writer *writer, const char *key, double value)
{
    begin_value(writer, key);
    if (value - value != 0)
        rf_write_bytes(writer, "null", 4); /* infinities, and NaN */
    else
        rf_write(writer, "%.9g", value);
}

void rf_json_bool(rf_writer *writer, const char *key, bool value)
{
    begin_value(writer, key);
    rf_write(writer, "%s", value ? "true" : "false");
}

void rf_json_null(rf_writer *writer, const char *key)
{
    begin_value(writer, key);
    rf_write_bytes(writer, "null", 4);
}
