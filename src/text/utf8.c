/* text/utf8.c: characters and bytes: UTF-8 as prompts are read, and GPT-2's letters for bytes.
 *
 * Reading is lenient where the reference is (overlong forms, surrogates), because what a model saw
 * in training depends on it. What goes out to users is checked strictly, in detokenize.c.
 */
#include "text/tables.h"

#define REPLACEMENT 0xfffdu

static bool follows(const uint8_t *text, uint64_t left, uint64_t count)
{
    if (left <= count)
        return false;
    for (uint64_t i = 1; i <= count; i++) {
        if ((text[i] & 0xc0) != 0x80)
            return false;
    }
    return true;
}

uint32_t rf_utf8_read(const uint8_t *text, uint64_t left, uint32_t *letter)
{
    uint8_t first = text[0];
    if (first < 0x80) {
        *letter = first;
        return 1;
    }
    if (first >= 0xc0 && first < 0xe0 && follows(text, left, 1)) {
        *letter = (first & 0x1fu) << 6 | (text[1] & 0x3fu);
        return 2;
    }
    if (first >= 0xe0 && first < 0xf0 && follows(text, left, 2)) {
        *letter = (first & 0x0fu) << 12 | (text[1] & 0x3fu) << 6 | (text[2] & 0x3fu);
        return 3;
    }
    if (first >= 0xf0 && first < 0xf8 && follows(text, left, 3)) {
        *letter = (first & 0x07u) << 18 | (text[1] & 0x3fu) << 12 | (text[2] & 0x3fu) << 6 |
                  (text[3] & 0x3fu);
        if (*letter <= 0x10ffff)
            return 4;
    }
    *letter = REPLACEMENT;
    return 1;
}

uint32_t rf_utf8_write(uint32_t letter, uint8_t *out)
{
    if (letter < 0x80) {
        out[0] = (uint8_t)letter;
        return 1;
    }
    if (letter < 0x800) {
        out[0] = (uint8_t)(0xc0 | letter >> 6);
        out[1] = (uint8_t)(0x80 | (letter & 0x3f));
        return 2;
    }
    if (letter < 0x10000) {
        out[0] = (uint8_t)(0xe0 | letter >> 12);
        out[1] = (uint8_t)(0x80 | (letter >> 6 & 0x3f));
        out[2] = (uint8_t)(0x80 | (letter & 0x3f));
        return 3;
    }
    out[0] = (uint8_t)(0xf0 | letter >> 18);
    out[1] = (uint8_t)(0x80 | (letter >> 12 & 0x3f));
    out[2] = (uint8_t)(0x80 | (letter >> 6 & 0x3f));
    out[3] = (uint8_t)(0x80 | (letter & 0x3f));
    return 4;
}

/* Bytes without a printable letter of their own, counted from 0: 0x00..0x20, 0x7f..0xa0, 0xad. */
uint32_t rf_byte_to_letter(uint8_t byte)
{
    if (byte <= 0x20)
        return 0x100u + byte;
    if (byte >= 0x7f && byte <= 0xa0)
        return 0x100u + 0x21u + (byte - 0x7fu);
    if (byte == 0xad)
        return 0x143u;
    return byte;
}

int rf_letter_to_byte(uint32_t letter)
{
    if (letter >= 0x100 && letter <= 0x120)
        return (int)(letter - 0x100);
    if (letter >= 0x121 && letter <= 0x142)
        return (int)(letter - 0x121 + 0x7f);
    if (letter == 0x143)
        return 0xad;
    return letter < 0x100 && rf_byte_to_letter((uint8_t)letter) == letter ? (int)letter : -1;
}
