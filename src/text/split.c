/* text/split.c: cuts a text into the words inside which byte-level BPE may merge.
 *
 * Each family of models published a regular expression (or a row of them) for this. They are
 * written out here by hand as rules over Unicode categories: a rule looks at a text and says where
 * its first piece ends, in time linear in that piece. A pre-tokenizer is a row of rules; each one
 * cuts what the rule before it left whole, so a splitter is a small stack of ranges and needs no
 * memory for words.
 *
 *     default:   "Hi,  it's 1234"
 *     marks      [Hi][,][  it][']...          runs of punctuation stand alone
 *     words          [  it] -> [ ][ it]       GPT-2's expression inside each piece
 *     ...
 *
 * Where the reference (llama.cpp) and a model's own expression differ, the reference is followed:
 * it is what the files are used with. Categories come from utf8proc; nothing else does. Called by
 * bpe.c and by vocab.c for the names.
 */
#include "text/tables.h"

#include <string.h>
#include <utf8proc.h>

/* ---- characters -------------------------------------------------------------------------- */

enum { /* classes exclude each other; 0 is the end of the range */
       LETTER = 1,
       NUMBER = 2,
       SPACE = 4,
       MARK = 8,
       PUNCT = 16,
       SYMBOL = 32,
       OTHER = 64
};

typedef struct letter {
    uint32_t code;
    uint32_t length; /* bytes; 0 at the end of the range */
    uint32_t class;
} letter;

#define END_CODE UINT32_MAX

/* clang-format off */
enum { L = LETTER, N = NUMBER, S = SPACE, P = PUNCT, Y = SYMBOL, O = OTHER };

static const uint8_t ascii_classes[128] = {
    O, O, O, O, O, O, O, O, O, S, S, S, S, S, O, O, /* 00 */
    O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, O, /* 10 */
    S, P, P, P, Y, P, P, P, P, P, P, Y, P, P, P, P, /* 20 */
    N, N, N, N, N, N, N, N, N, N, P, P, Y, Y, Y, P, /* 30 */
    P, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* 40 */
    L, L, L, L, L, L, L, L, L, L, L, P, P, P, Y, P, /* 50 */
    Y, L, L, L, L, L, L, L, L, L, L, L, L, L, L, L, /* 60 */
    L, L, L, L, L, L, L, L, L, L, L, P, Y, P, Y, O, /* 70 */
};
/* clang-format on */

static const uint8_t category_classes[] = {
    [UTF8PROC_CATEGORY_CN] = OTHER,  [UTF8PROC_CATEGORY_LU] = LETTER,
    [UTF8PROC_CATEGORY_LL] = LETTER, [UTF8PROC_CATEGORY_LT] = LETTER,
    [UTF8PROC_CATEGORY_LM] = LETTER, [UTF8PROC_CATEGORY_LO] = LETTER,
    [UTF8PROC_CATEGORY_MN] = MARK,   [UTF8PROC_CATEGORY_MC] = MARK,
    [UTF8PROC_CATEGORY_ME] = MARK,   [UTF8PROC_CATEGORY_ND] = NUMBER,
    [UTF8PROC_CATEGORY_NL] = NUMBER, [UTF8PROC_CATEGORY_NO] = NUMBER,
    [UTF8PROC_CATEGORY_PC] = PUNCT,  [UTF8PROC_CATEGORY_PD] = PUNCT,
    [UTF8PROC_CATEGORY_PS] = PUNCT,  [UTF8PROC_CATEGORY_PE] = PUNCT,
    [UTF8PROC_CATEGORY_PI] = PUNCT,  [UTF8PROC_CATEGORY_PF] = PUNCT,
    [UTF8PROC_CATEGORY_PO] = PUNCT,  [UTF8PROC_CATEGORY_SM] = SYMBOL,
    [UTF8PROC_CATEGORY_SC] = SYMBOL, [UTF8PROC_CATEGORY_SK] = SYMBOL,
    [UTF8PROC_CATEGORY_SO] = SYMBOL, [UTF8PROC_CATEGORY_ZS] = SPACE,
    [UTF8PROC_CATEGORY_ZL] = SPACE,  [UTF8PROC_CATEGORY_ZP] = SPACE,
    [UTF8PROC_CATEGORY_CC] = OTHER,  [UTF8PROC_CATEGORY_CF] = OTHER,
    [UTF8PROC_CATEGORY_CS] = OTHER,  [UTF8PROC_CATEGORY_CO] = OTHER,
};

static uint32_t class_of(uint32_t code)
{
    if (code < 128)
        return ascii_classes[code];
    if (code == 0x85) /* next line: a control character that counts as white space */
        return SPACE;
    if (code >= 0x2ebf0 &&
        code <= 0x2ee5d) /* ideographs of Unicode 15.1: newer than utf8proc 2.8 */
        return LETTER;
    return category_classes[utf8proc_category((utf8proc_int32_t)code)];
}

static inline letter letter_at(const uint8_t *text, uint64_t at, uint64_t end)
{
    if (at >= end)
        return (letter){END_CODE, 0, 0};
    if (text[at] < 128)
        return (letter){text[at], 1, ascii_classes[text[at]]};
    letter found;
    found.length = rf_utf8_read(text + at, end - at, &found.code);
    found.class = class_of(found.code);
    return found;
}

static bool is_newline(letter c)
{
    return c.code == '\r' || c.code == '\n';
}

/* Where the run of characters of the classes that begins at `at` ends. */
static uint64_t skip_class(const uint8_t *text, uint64_t at, uint64_t end, uint32_t classes)
{
    for (;;) {
        letter c = letter_at(text, at, end);
        if (!(c.class & classes))
            return at;
        at += c.length;
    }
}

/* ---- pieces that several expressions share ----------------------------------------------- */

/* 's 't 'm 'd 're 've 'll in lower case or, when any_case, in both. Returns its end, or at. */
static uint64_t skip_contraction(const uint8_t *text, uint64_t at, uint64_t end, bool any_case)
{
    letter mark = letter_at(text, at, end);
    if (mark.code != '\'')
        return at;
    uint64_t stop = at + mark.length;
    letter first = letter_at(text, stop, end);
    stop += first.length;
    letter second = letter_at(text, stop, end);
    if (any_case) {
        first.code |= 0x20;
        second.code |= 0x20;
    }
    switch (first.code) {
    case 's':
    case 't':
    case 'm':
    case 'd':
        return stop;
    case 'r':
    case 'v':
        return second.code == 'e' ? stop + second.length : at;
    case 'l':
        return second.code == 'l' ? stop + second.length : at;
    default:
        return at;
    }
}

/* Line ends that follow; a slash too, when it may. */
static uint64_t skip_line_ends(const uint8_t *text, uint64_t at, uint64_t end, bool slash)
{
    for (;;) {
        letter c = letter_at(text, at, end);
        if (!is_newline(c) && !(slash && c.code == '/'))
            return at;
        at += c.length;
    }
}

/* White space before other text leaves its last character to the word that follows; at the end of
 * the range it stays whole. at is a white space. */
static uint64_t skip_spaces(const uint8_t *text, uint64_t at, uint64_t end)
{
    uint64_t last = at, next = at;
    for (letter c = letter_at(text, at, end); c.class == SPACE; c = letter_at(text, next, end)) {
        last = next;
        next += c.length;
    }
    return next < end && last > at ? last : next;
}

/* The same, but white space that holds line ends stops behind the last of them. */
static uint64_t skip_spaces_to_line(const uint8_t *text, uint64_t at, uint64_t end)
{
    uint64_t last = at, next = at, line = 0;
    for (letter c = letter_at(text, at, end); c.class == SPACE; c = letter_at(text, next, end)) {
        last = next;
        next += c.length;
        if (is_newline(c))
            line = next;
    }
    if (line)
        return line;
    return next < end && last > at ? last : next;
}

/* ---- rules ------------------------------------------------------------------------------- */

enum {                  /* how a rule is tuned; the digits' group is the low part */
       GROUP = 3,       /* 1: digits stand alone; 3: in threes from the left; 0: in runs */
       WITH_MARKS = 4,  /* marks count as letters */
       TAIL_SLASH = 8,  /* a slash may end a run of symbols as a line end does */
       CONTRACT = 16,   /* English contractions stand alone (words) or end a word (cased words) */
       SPACE_FIRST = 32 /* a run may begin with one white space */
};

/* The first piece of text[at, end), at < end, ends at the returned offset, which is > at. */
typedef uint64_t (*rule_fn)(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags);

/* GPT-2: 's|'t|'re|'ve|'m|'ll|'d| ?L+| ?N+| ?[^ L N space]+|space+(?!not space)|space+ */
static uint64_t rule_gpt2(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    (void)flags;
    uint64_t stop = skip_contraction(text, at, end, false);
    if (stop > at)
        return stop;
    letter c = letter_at(text, at, end);
    uint64_t body = at;
    if (c.code == ' ') {
        body += c.length;
        c = letter_at(text, body, end);
    }
    if (c.class == LETTER || c.class == NUMBER)
        return skip_class(text, body, end, c.class);
    if (c.class & (MARK | PUNCT | SYMBOL | OTHER))
        return skip_class(text, body, end, MARK | PUNCT | SYMBOL | OTHER);
    return skip_spaces(text, at, end);
}

static uint64_t skip_group(const uint8_t *text, uint64_t at, uint64_t end, uint32_t group)
{
    if (group == 0)
        return skip_class(text, at, end, NUMBER);
    for (uint32_t i = 0; i < group; i++) {
        letter c = letter_at(text, at, end);
        if (c.class != NUMBER)
            break;
        at += c.length;
    }
    return at;
}

/* What follows the words in the expressions after GPT-2:
 * N{1,group}| ?[^ space L N]+[\r\n]*|space*[\r\n]+|space+(?!not space)|space+ */
static uint64_t skip_rest(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    letter c = letter_at(text, at, end);
    if (c.class == NUMBER)
        return skip_group(text, at, end, flags & GROUP);
    uint32_t signs = PUNCT | SYMBOL | OTHER | (flags & WITH_MARKS ? 0 : MARK);
    uint64_t body = c.code == ' ' ? at + c.length : at;
    uint64_t stop = skip_class(text, body, end, signs);
    if (stop == body)
        return c.class == SPACE ? skip_spaces_to_line(text, at, end) : at + c.length;
    return skip_line_ends(text, stop, end, flags & TAIL_SLASH);
}

/* Llama 3, Qwen 2 and their kin: contractions in any case, then a word with at most one character
 * before it that is no letter, number or line end, then the rest. */
static uint64_t rule_words(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    uint64_t stop = flags & CONTRACT ? skip_contraction(text, at, end, true) : at;
    if (stop > at)
        return stop;
    uint32_t letters = LETTER | (flags & WITH_MARKS ? MARK : 0);
    letter c = letter_at(text, at, end);
    if (c.class != NUMBER && !is_newline(c)) {
        uint64_t body = c.class & letters ? at : at + c.length;
        stop = skip_class(text, body, end, letters);
        if (stop > body)
            return stop;
    }
    return skip_rest(text, at, end, flags);
}

static bool is_ascii_upper(letter c)
{
    return c.code >= 'A' && c.code <= 'Z';
}

static bool is_ascii_lower(letter c)
{
    return c.code >= 'a' && c.code <= 'z';
}

/* A word of GPT-4o and Tekken: capitals, then small letters. The reference takes letters outside
 * ASCII for both, so U = letters but a-z, L = letters but A-Z, and the word is the first that
 * matches of U*L+ and U+L*. Returns at when no word begins there. */
static uint64_t skip_cased(const uint8_t *text, uint64_t at, uint64_t end)
{
    uint64_t stop = at, last_both = 0;
    letter c = letter_at(text, stop, end);
    for (; c.class == LETTER && !is_ascii_lower(c); c = letter_at(text, stop, end)) {
        stop += c.length;
        if (!is_ascii_upper(c))
            last_both = stop;
    }
    if (c.class != LETTER) /* no small letter follows: U* gives back until L+ has one letter */
        return last_both ? last_both : stop;
    for (; c.class == LETTER && !is_ascii_upper(c); c = letter_at(text, stop, end))
        stop += c.length;
    return stop;
}

static uint64_t rule_cased_words(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    letter c = letter_at(text, at, end);
    if (c.class != NUMBER && !is_newline(c)) {
        uint64_t body = c.class == LETTER ? at : at + c.length;
        uint64_t stop = skip_cased(text, body, end);
        if (stop > body)
            return flags & CONTRACT ? skip_contraction(text, stop, end, true) : stop;
    }
    return skip_rest(text, at, end, flags);
}

/* DeepSeek 3: [ascii sign][A-Za-z]+|[^\r\n L P S]?[L M]+| ?[P S]+[\r\n]*|space... */
static uint64_t rule_deepseek3(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    (void)flags;
    letter c = letter_at(text, at, end);
    if (c.code < 128 && c.class & (PUNCT | SYMBOL)) {
        uint64_t body = at + c.length, stop = body;
        for (letter next = letter_at(text, stop, end); next.code < 128 && next.class == LETTER;
             next = letter_at(text, stop, end))
            stop += next.length;
        if (stop > body)
            return stop;
    }
    if (!(c.class & (PUNCT | SYMBOL)) && !is_newline(c)) {
        uint64_t body = c.class & (LETTER | MARK) ? at : at + c.length;
        uint64_t stop = skip_class(text, body, end, LETTER | MARK);
        if (stop > body)
            return stop;
    }
    uint64_t body = c.code == ' ' ? at + c.length : at;
    uint64_t stop = skip_class(text, body, end, PUNCT | SYMBOL);
    if (stop > body)
        return skip_line_ends(text, stop, end, false);
    if (c.class == SPACE)
        return skip_spaces_to_line(text, at, end);
    /* Nothing matches here: what lies between two matches is a piece of its own. */
    for (stop = at + c.length; stop < end; stop += c.length) {
        c = letter_at(text, stop, end);
        letter after = letter_at(text, stop + c.length, end);
        if (c.class & (LETTER | MARK | PUNCT | SYMBOL | SPACE) || after.class & (LETTER | MARK))
            break;
    }
    return stop;
}

/* The rules below isolate characters of a set; what lies between them is a piece as well. */
typedef bool (*set_fn)(letter c);

static uint64_t isolate(const uint8_t *text, uint64_t at, uint64_t end, set_fn in_set,
                        uint32_t longest, bool space_first)
{
    uint64_t stop = at;
    letter c = letter_at(text, at, end);
    letter after = letter_at(text, at + c.length, end);
    bool led = space_first && c.class == SPACE && after.length && in_set(after);
    if (led || in_set(c)) {
        if (led) {
            stop += c.length;
            c = after;
        }
        for (uint32_t i = 0; c.length && in_set(c) && (longest == 0 || i < longest); i++) {
            stop += c.length;
            c = letter_at(text, stop, end);
        }
        return stop;
    }
    while (c.length) {
        after = letter_at(text, stop + c.length, end);
        if (in_set(c) || (space_first && c.class == SPACE && after.length && in_set(after)))
            break;
        stop += c.length;
        c = after;
    }
    return stop;
}

static bool in_numbers(letter c)
{
    return c.class == NUMBER;
}

static bool in_letters(letter c)
{
    return c.class == LETTER;
}

static bool in_punctuation(letter c)
{
    return c.class == PUNCT;
}

static bool in_lines(letter c)
{
    return is_newline(c);
}

static bool in_signs(letter c) /* the punctuation of `default` */
{
    return c.class == PUNCT || (c.code < 128 && c.class == SYMBOL && c.code != '`');
}

static bool in_signs_falcon(letter c)
{
    return c.class == PUNCT || (c.code < 128 && c.class == SYMBOL);
}

typedef struct range {
    uint32_t first, last;
} range;

static bool in_ranges(const range *ranges, size_t count, uint32_t code)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (code > ranges[middle].last)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && code >= ranges[low].first;
}

static bool in_ideographs(letter c) /* DeepSeek: ideographs, U+0800 up, and Hangul */
{
    static const range ranges[] = {{0x0800, 0x9fa5}, {0xac00, 0xd7ff}};
    return c.class != SPACE && in_ranges(ranges, RF_ARRAY_COUNT(ranges), c.code);
}

static bool in_ideographs_kana(letter c)
{
    static const range ranges[] = {{0x3040, 0x30ff}, {0x4e00, 0x9fa5}};
    return in_ranges(ranges, RF_ARRAY_COUNT(ranges), c.code);
}

static bool in_signs_deepseek(letter c)
{
    /* U+3000 belongs to the published set, but it is white space and taken as that. */
    static const range ranges[] = {{'!', '/'},       {':', '~'},       {0x2018, 0x201f},
                                   {0x3001, 0x3002}, {0xff01, 0xff0f}, {0xff1a, 0xff5e}};
    return in_ranges(ranges, RF_ARRAY_COUNT(ranges), c.code);
}

/* Alphabets with two cases, as DeepSeek LLM lists them (Latin, Greek, Cyrillic, Armenian,
 * Georgian, Cherokee, Glagolitic, Coptic, Deseret, Osage, Old Hungarian, Warang Citi, Adlam). */
static const range cased_letters[] = {
    {'A', 'Z'},         {'a', 'z'},         {0xb5, 0xb5},       {0xc0, 0xd6},
    {0xd8, 0xf6},       {0xf8, 0x1ba},      {0x1bc, 0x1bf},     {0x1c4, 0x293},
    {0x295, 0x2af},     {0x370, 0x373},     {0x376, 0x377},     {0x37b, 0x37d},
    {0x37f, 0x37f},     {0x386, 0x386},     {0x388, 0x38a},     {0x38c, 0x38c},
    {0x38e, 0x3a1},     {0x3a3, 0x3f5},     {0x3f7, 0x481},     {0x48a, 0x52f},
    {0x531, 0x556},     {0x10a0, 0x10c5},   {0x13a0, 0x13f5},   {0x13f8, 0x13fd},
    {0x1c90, 0x1cba},   {0x1cbd, 0x1cbf},   {0x1d00, 0x1d2b},   {0x1d6b, 0x1d77},
    {0x1d79, 0x1d9a},   {0x1e00, 0x1f15},   {0x1f18, 0x1f1d},   {0x1f20, 0x1f45},
    {0x1f48, 0x1f4d},   {0x1f50, 0x1f57},   {0x1f59, 0x1f59},   {0x1f5b, 0x1f5b},
    {0x1f5d, 0x1f5d},   {0x1f5f, 0x1f7d},   {0x1f80, 0x1fb4},   {0x1fb6, 0x1fbc},
    {0x1fbe, 0x1fbe},   {0x1fc2, 0x1fc4},   {0x1fc6, 0x1fcc},   {0x1fd0, 0x1fd3},
    {0x1fd6, 0x1fdb},   {0x1fe0, 0x1fec},   {0x1ff2, 0x1ff4},   {0x1ff6, 0x1ffc},
    {0x2102, 0x2102},   {0x2107, 0x2107},   {0x210a, 0x2113},   {0x2115, 0x2115},
    {0x2119, 0x211d},   {0x2124, 0x2124},   {0x2126, 0x2126},   {0x2128, 0x2128},
    {0x212a, 0x212d},   {0x212f, 0x2134},   {0x2139, 0x2139},   {0x213c, 0x213f},
    {0x2145, 0x2149},   {0x214e, 0x214e},   {0x2183, 0x2184},   {0x2c00, 0x2c7b},
    {0x2c7e, 0x2ce4},   {0x2ceb, 0x2cee},   {0x2cf2, 0x2cf3},   {0xa640, 0xa66d},
    {0xa680, 0xa69b},   {0xa722, 0xa76f},   {0xa771, 0xa787},   {0xa78b, 0xa78e},
    {0xab70, 0xabbf},   {0xfb00, 0xfb06},   {0xfb13, 0xfb17},   {0xff21, 0xff3a},
    {0xff41, 0xff5a},   {0x10400, 0x1044f}, {0x104b0, 0x104d3}, {0x104d8, 0x104fb},
    {0x10c80, 0x10cb2}, {0x10cc0, 0x10cf2}, {0x118a0, 0x118df}, {0x1e900, 0x1e943},
};

static bool in_cased_letters(letter c)
{
    return in_ranges(cased_letters, RF_ARRAY_COUNT(cased_letters), c.code);
}

#define ISOLATING_RULE(name, set, longest)                                                         \
    static uint64_t rule_##name(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)    \
    {                                                                                              \
        return isolate(text, at, end, set, longest, (flags & SPACE_FIRST) != 0);                   \
    }

ISOLATING_RULE(numbers, in_numbers, flags &GROUP)
ISOLATING_RULE(letters, in_letters, 0)
ISOLATING_RULE(punctuation, in_punctuation, 0)
ISOLATING_RULE(lines, in_lines, 1)
ISOLATING_RULE(signs, in_signs, 0)
ISOLATING_RULE(signs_falcon, in_signs_falcon, 0)
ISOLATING_RULE(signs_deepseek, in_signs_deepseek, 0)
ISOLATING_RULE(ideographs, in_ideographs, 0)
ISOLATING_RULE(ideographs_kana, in_ideographs_kana, 0)
ISOLATING_RULE(cased_letters, in_cased_letters, 0)

/* Exactly three ASCII digits. */
static uint64_t rule_triplets(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    (void)flags;
    uint64_t starts[3] = {at, at, at}; /* of the last three characters that were digits */
    uint32_t digits = 0;
    for (uint64_t next = at; next < end;) {
        letter c = letter_at(text, next, end);
        digits = c.code >= '0' && c.code <= '9' ? digits + 1 : 0;
        starts[0] = starts[1];
        starts[1] = starts[2];
        starts[2] = next;
        next += c.length;
        if (digits == 3)
            return starts[0] > at ? starts[0] : next;
    }
    return end;
}

/* White space at the end of the range. */
static uint64_t rule_trailing_spaces(const uint8_t *text, uint64_t at, uint64_t end, uint32_t flags)
{
    (void)flags;
    uint64_t solid = at; /* end of the last character that is no white space */
    for (uint64_t i = at; i < end;) {
        letter c = letter_at(text, i, end);
        i += c.length;
        if (c.class != SPACE)
            solid = i;
    }
    return solid > at ? solid : end;
}

/* ---- pre-tokenizers ---------------------------------------------------------------------- */

typedef struct step {
    rule_fn rule;
    uint32_t flags;
} step;

enum { WHOLE_WORDS = 1, ADDS_BOS = 2 };

typedef struct style {
    step steps[RF_SPLIT_LEVELS];
} style;

static const style style_default = {
    {{rule_signs, 0}, {rule_gpt2, 0}, {rule_numbers, 0}, {rule_triplets, 0}}};
static const style style_gpt2 = {{{rule_gpt2, 0}}};
static const style style_digits = {{{rule_numbers, 1}, {rule_gpt2, 0}}};
static const style style_falcon = {{{rule_signs_falcon, 0}, {rule_gpt2, 0}, {rule_triplets, 0}}};
static const style style_llama3 = {{{rule_words, CONTRACT | 3}}};
static const style style_qwen2 = {{{rule_words, CONTRACT | 1}}};
static const style style_qwen35 = {{{rule_words, CONTRACT | WITH_MARKS | 1}}};
static const style style_gpt4o = {{{rule_cased_words, CONTRACT | TAIL_SLASH | 3}}};
static const style style_tekken = {{{rule_cased_words, TAIL_SLASH | 1}}};
static const style style_deepseek_llm = {{{rule_lines, 0},
                                          {rule_cased_letters, SPACE_FIRST},
                                          {rule_signs_deepseek, SPACE_FIRST},
                                          {rule_trailing_spaces, 0},
                                          {rule_ideographs, 0},
                                          {rule_numbers, 0}}};
static const style style_deepseek_coder = {{{rule_lines, 0},
                                            {rule_letters, SPACE_FIRST},
                                            {rule_punctuation, SPACE_FIRST},
                                            {rule_ideographs, 0},
                                            {rule_numbers, 1}}};
static const style style_deepseek3 = {
    {{rule_numbers, 3}, {rule_ideographs_kana, 0}, {rule_deepseek3, 0}}};

typedef struct pre_row {
    const char *name;
    const style *style;
    uint32_t flags;
} pre_row;

/* The first row also serves files that do not say; the best known families come first, for messages
 * list as many as fit. */
static const pre_row pres[] = {
    {"default", &style_default, 0},
    {"gpt-2", &style_gpt2, 0},
    {"smollm", &style_digits, 0},
    {"llama-bpe", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"llama3", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"llama-v3", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"qwen2", &style_qwen2, 0},
    {"qwen35", &style_qwen35, 0},
    {"falcon", &style_falcon, 0},
    {"mpt", &style_gpt2, 0},
    {"olmo", &style_gpt2, 0},
    {"starcoder", &style_digits, 0},
    {"refact", &style_digits, 0},
    {"command-r", &style_digits, 0},
    {"deepseek-llm", &style_deepseek_llm, 0},
    {"deepseek-coder", &style_deepseek_coder, 0},
    {"deepseek-v3", &style_deepseek3, 0},
    {"gpt-4o", &style_gpt4o, 0},
    {"llama4", &style_gpt4o, 0},
    {"tekken", &style_tekken, WHOLE_WORDS | ADDS_BOS},
    {"falcon3", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"falcon-h1", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"pixtral", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"midm-2.0", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"lfm2", &style_llama3, WHOLE_WORDS | ADDS_BOS},
    {"dbrx", &style_llama3, 0},
    {"smaug-bpe", &style_llama3, 0},
    {"chatglm-bpe", &style_llama3, 0},
    {"glm4", &style_llama3, WHOLE_WORDS},
    {"glm5", &style_llama3, WHOLE_WORDS},
    {"phi-2", &style_gpt2, 0},
    {"jais", &style_gpt2, 0},
    {"gigachat", &style_gpt2, 0},
    {"a.x-4.0", &style_gpt2, 0},
    {"mellum", &style_gpt2, 0},
    {"exaone4", &style_gpt2, 0},
    {"trillion", &style_gpt2, 0},
    {"granite-docling", &style_gpt2, 0},
    {"codeshell", &style_digits, 0},
    {"exaone", &style_digits, 0},
    {"minerva-7b", &style_digits, 0},
    {"mellum2", &style_digits, 0},
    {"stablelm2", &style_qwen2, 0},
    {"deepseek-r1-qwen", &style_qwen2, 0},
    {"megrez", &style_qwen2, 0},
    {"kormo", &style_qwen2, 0},
    {"hunyuan", &style_qwen2, 0},
    {"grok-2", &style_qwen2, 0},
    {"solar-open", &style_qwen2, 0},
    {"hunyuan-dense", &style_deepseek3, 0},
    {"joyai-llm", &style_deepseek3, 0},
    {"kanana2", &style_gpt4o, 0},
    {"minimax-m2", &style_gpt4o, 0},
};

bool rf_split_find(rf_text name, uint32_t *pre)
{
    for (uint32_t i = 0; i < RF_ARRAY_COUNT(pres); i++) {
        if (rf_text_is(name, pres[i].name)) {
            *pre = i;
            return true;
        }
    }
    return false;
}

void rf_split_names(rf_writer *writer)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(pres); i++) {
        if (writer->length + strlen(pres[i].name) + sizeof "  ..." > writer->capacity) {
            rf_write(writer, " ...");
            return;
        }
        rf_write(writer, i ? " %s" : "%s", pres[i].name);
    }
}

bool rf_split_takes_whole_words(uint32_t pre)
{
    return pres[pre].flags & WHOLE_WORDS;
}

bool rf_split_adds_bos(uint32_t pre)
{
    return pres[pre].flags & ADDS_BOS;
}

rf_splitter rf_splitter_make(uint32_t pre, const uint8_t *text, uint64_t bytes)
{
    rf_splitter splitter = {.text = text, .pre = pre};
    while (splitter.levels < RF_SPLIT_LEVELS && pres[pre].style->steps[splitter.levels].rule)
        splitter.levels++;
    splitter.end[0] = bytes;
    return splitter;
}

bool rf_splitter_next(rf_splitter *splitter, uint64_t *first, uint64_t *last)
{
    const step *steps = pres[splitter->pre].style->steps;
    uint32_t level = splitter->levels - 1;
    while (splitter->at[level] == splitter->end[level]) {
        if (level == 0)
            return false;
        level--;
    }
    for (;; level++) {
        uint64_t from = splitter->at[level];
        uint64_t to =
            steps[level].rule(splitter->text, from, splitter->end[level], steps[level].flags);
        splitter->at[level] = to;
        if (level + 1 == splitter->levels) {
            *first = from;
            *last = to;
            return true;
        }
        splitter->at[level + 1] = from;
        splitter->end[level + 1] = to;
    }
}
