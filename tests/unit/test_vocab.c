/* tests/unit/test_vocab.c: what a vocabulary says about its tokens, the stream of text that comes
 * out, the files that are refused, and the chat format.
 */
#include "tiny_vocab.h"

/* ---- pieces and the stream ---------------------------------------------------------------- */

static void assert_piece(const rf_vocab *vocab, uint32_t id, bool special, const char *expected)
{
    char out[64];
    uint64_t length = rf_vocab_piece(vocab, id, special, out, sizeof out);
    assert_int_equal(length, strlen(expected));
    assert_memory_equal(out, expected, length);
    if (length > 0) {
        memset(out, 7, sizeof out);
        assert_int_equal(rf_vocab_piece(vocab, id, special, out, length - 1), length);
        assert_int_equal(out[0], 7); /* nothing is written when it does not fit */
    }
}

static void test_a_piece_is_what_its_token_stands_for(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t word = add(w, BLANK "a" BLANK, 1, 0), user = add(w, BLANK "u", RF_TOKEN_USER, 0);
    uint32_t unused = add(w, "q", RF_TOKEN_UNUSED, 0), wrong = add(w, "<0xZZ>", RF_TOKEN_BYTE, 0);
    uint32_t empty = add(w, "", 1, 0);
    open_vocab *o = open_words(w);
    assert_piece(&o->vocab, word, false, " a ");
    assert_piece(&o->vocab, user, false, BLANK "u");
    assert_piece(&o->vocab, unused, true, "");
    assert_piece(&o->vocab, wrong, false, "<0xZZ>");
    assert_piece(&o->vocab, empty, true, "");
    assert_piece(&o->vocab, 3 + 0xe9, false, "\xe9");
    assert_piece(&o->vocab, 1, false, "");
    assert_piece(&o->vocab, 1, true, "<s>");
    assert_piece(&o->vocab, o->vocab.token_count, true, "");
    assert_int_equal(rf_vocab_text(&o->vocab, NONE).length, 0);
    close_words(o);

    w = bpe_words("gpt-2");
    word = add(w, "\xc4\xa0\xc3\xa9\xc4\x8a", 1, 0);
    o = open_words(w);
    assert_piece(&o->vocab, word, false, " \xe9\n");
    for (uint32_t byte = 0; byte < 256; byte++) {
        char out[4];
        assert_int_equal(rf_vocab_piece(&o->vocab, byte, false, out, 4), 1);
        assert_int_equal((uint8_t)out[0], byte);
    }
    close_words(o);
}

/* Decodes strictly, one U+FFFD for each longest part that can become no character. */
static size_t decode_plainly(const uint8_t *bytes, size_t count, char *out)
{
    size_t length = 0;
    for (size_t i = 0; i < count;) {
        uint8_t first = bytes[i];
        size_t need = first < 0x80                    ? 1
                      : first >= 0xc2 && first < 0xe0 ? 2
                      : first >= 0xe0 && first < 0xf0 ? 3
                      : first >= 0xf0 && first < 0xf5 ? 4
                                                      : 0;
        size_t have = 1;
        while (have < need && i + have < count) {
            uint8_t low = 0x80, high = 0xbf, byte = bytes[i + have];
            if (have == 1) {
                low = first == 0xe0 ? 0xa0 : first == 0xf0 ? 0x90 : 0x80;
                high = first == 0xed ? 0x9f : first == 0xf4 ? 0x8f : 0xbf;
            }
            if (byte < low || byte > high)
                break;
            have++;
        }
        if (have == need) {
            memcpy(out + length, bytes + i, need);
            length += need;
        } else {
            memcpy(out + length, LOST, 3);
            length += 3;
        }
        i += have;
    }
    return length;
}

static void test_the_stream_gives_whole_characters_and_loses_nothing(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    add(w, "\xc3\xa2\xc4\xb8", 1, 0); /* begins a character of three bytes */
    add(w, "abc", 1, 0);
    open_vocab *o = open_words(w);
    uint64_t bound = rf_detokenizer_bound(&o->vocab);
    static const uint8_t likely[] = {0xe4, 0xb8, 0xad, 0xf0, 0x9f, 0x98, 0x80, 0xc3,
                                     0xa9, 0xed, 0xa0, 0xc0, 0xff, 0xf4, 0x90, 'a'};
    for (int round = 0; round < 2000; round++) {
        uint8_t bytes[200];
        char got[1000], expected[1000];
        size_t count = 0, length = 0;
        rf_detokenizer stream;
        rf_detokenizer_init(&stream, &o->vocab, false);
        for (uint32_t i = random_below(40); i-- > 0;) {
            uint32_t id = random_below(4) ? likely[random_below(sizeof likely)]
                                          : random_below(o->vocab.token_count);
            count += rf_vocab_piece(&o->vocab, id, false, (char *)bytes + count, 8);
            char *out = malloc(bound);
            uint64_t pushed = rf_detokenizer_push(&stream, id, out, bound);
            assert_true(pushed <= bound);
            memcpy(got + length, out, pushed);
            length += pushed;
            free(out);
            /* So far it is whole characters: decoding changes nothing. */
            assert_int_equal(decode_plainly((uint8_t *)got, length, expected), length);
            assert_memory_equal(got, expected, length);
        }
        length += rf_detokenizer_flush(&stream, got + length, bound);
        assert_int_equal(rf_detokenizer_flush(&stream, got + length, bound), 0);
        assert_int_equal(decode_plainly(bytes, count, expected), length);
        assert_memory_equal(got, expected, length);
    }
    close_words(o);
}

static void test_the_stream_drops_the_blank_before_the_first_word_only(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t word = add(w, BLANK "a", 1, 0);
    open_vocab *o = open_words(w);
    char out[64];
    rf_detokenizer stream;
    rf_detokenizer_init(&stream, &o->vocab, false);
    assert_int_equal(rf_detokenizer_push(&stream, 1, out, sizeof out), 0);
    assert_int_equal(rf_detokenizer_push(&stream, word, out, sizeof out), 1);
    assert_int_equal(rf_detokenizer_push(&stream, word, out, sizeof out), 2);
    close_words(o);
}

/* ---- ids and ends ------------------------------------------------------------------------- */

static void test_ends_come_from_the_keys_and_from_known_texts(void **state)
{
    (void)state;
    word_list *w = bpe_words("qwen2");
    uint32_t text = add(w, "</s>", 1, 0), turn = add(w, "<|im_end|>", RF_TOKEN_CONTROL, 0);
    uint32_t eot = add(w, "<|eot_id|>", 1, 0), eos = add(w, "!end!", RF_TOKEN_CONTROL, 0);
    uint32_t eom = add(w, "!eom!", RF_TOKEN_CONTROL, 0);
    tiny_gguf file = file_of(w);
    tiny_key_u32(&file, "tokenizer.ggml.eos_token_id", eos);
    tiny_key_u32(&file, "tokenizer.ggml.eom_token_id", eom);
    tiny_key_u32(&file, "tokenizer.ggml.bos_token_id", UINT32_MAX);
    tiny_key_bool(&file, "tokenizer.ggml.add_bos_token", true);
    open_vocab *o = open_file(w, file);
    assert_int_equal(o->vocab.eos, eos);
    assert_int_equal(o->vocab.bos, NONE);
    assert_int_equal(o->vocab.eot, eot); /* the preferred one, whatever its type says */
    assert_true(rf_vocab_is_end(&o->vocab, turn) && rf_vocab_is_end(&o->vocab, eot));
    assert_true(rf_vocab_is_end(&o->vocab, eos) && rf_vocab_is_end(&o->vocab, eom));
    assert_false(rf_vocab_is_end(&o->vocab, text)); /* "</s>" of type normal is honest text */
    assert_true(rf_vocab_is_control(&o->vocab, eot));
    assert_false(rf_vocab_is_control(&o->vocab, text) || rf_vocab_is_control(&o->vocab, NONE));
    assert_piece(&o->vocab, text, false, "</s>");
    assert_ids(&o->vocab, "x</s>", true, true, IDS('x', text));
    assert_ids(&o->vocab, "x</s>", true, false, IDS('x', '<', '/', 's', '>'));
    close_words(o);
}

/* ---- malformed vocabularies --------------------------------------------------------------- */

enum fault {
    NO_MODEL,
    MODEL_NUMBER,
    MODEL_UNKNOWN,
    PRE_UNKNOWN,
    NO_TOKENS,
    TOKENS_NUMBERS,
    TOKENS_EMPTY,
    TYPES_I8,
    TYPES_SHORT,
    SCORES_I8,
    SCORES_SHORT,
    NO_SCORES,
    NO_MERGES,
    MERGES_NUMBERS,
    MERGE_WITHOUT_BLANK,
    MERGE_WITHOUT_RIGHT,
    MERGE_WITHOUT_LEFT,
    BOS_BEYOND,
    EOT_BEYOND,
    BOS_TEXT,
    BOS_ARRAY,
    ADD_BOS_TEXT
};

typedef struct malformed_case {
    enum fault fault;
    rf_status status;
    const char *where;
} malformed_case;

#define K "tokenizer.ggml."

static const malformed_case malformed_cases[] = {
    {NO_MODEL, RF_ERR_BAD_MODEL, K "model"},
    {MODEL_NUMBER, RF_ERR_BAD_MODEL, K "model"},
    {MODEL_UNKNOWN, RF_ERR_UNSUPPORTED, K "model"},
    {PRE_UNKNOWN, RF_ERR_UNSUPPORTED, K "pre"},
    {NO_TOKENS, RF_ERR_BAD_MODEL, K "tokens"},
    {TOKENS_NUMBERS, RF_ERR_BAD_MODEL, K "tokens"},
    {TOKENS_EMPTY, RF_ERR_BAD_MODEL, K "tokens"},
    {TYPES_I8, RF_ERR_BAD_MODEL, K "token_type"},
    {TYPES_SHORT, RF_ERR_BAD_MODEL, K "token_type"},
    {SCORES_I8, RF_ERR_BAD_MODEL, K "scores"},
    {SCORES_SHORT, RF_ERR_BAD_MODEL, K "scores"},
    {NO_SCORES, RF_ERR_BAD_MODEL, K "scores"},
    {NO_MERGES, RF_ERR_BAD_MODEL, K "merges"},
    {MERGES_NUMBERS, RF_ERR_BAD_MODEL, K "merges"},
    {MERGE_WITHOUT_BLANK, RF_ERR_BAD_MODEL, K "merges[1]"},
    {MERGE_WITHOUT_RIGHT, RF_ERR_BAD_MODEL, K "merges[1]"},
    {MERGE_WITHOUT_LEFT, RF_ERR_BAD_MODEL, K "merges[1]"},
    {BOS_BEYOND, RF_ERR_BAD_MODEL, K "bos_token_id"},
    {EOT_BEYOND, RF_ERR_BAD_MODEL, K "eot_token_id"},
    {BOS_TEXT, RF_ERR_BAD_MODEL, K "bos_token_id"},
    {BOS_ARRAY, RF_ERR_BAD_MODEL, K "bos_token_id"},
    {ADD_BOS_TEXT, RF_ERR_BAD_MODEL, K "add_bos_token"},
};

static tiny_gguf malformed_file(enum fault fault)
{
    static const char *const tokens[] = {"a", "b", "ab"};
    static const int32_t types[] = {1, 1, 1};
    static const float scores[] = {0, -1, -2};
    static const int8_t small[] = {1, 1, 1};
    bool bpe = fault >= NO_MERGES && fault <= MERGE_WITHOUT_LEFT;
    tiny_gguf file = tiny_begin(3);
    if (fault == MODEL_NUMBER)
        tiny_key_u32(&file, K "model", 1);
    else if (fault != NO_MODEL)
        tiny_key_text(&file, K "model",
                      fault == MODEL_UNKNOWN        ? "bert"
                      : bpe || fault == PRE_UNKNOWN ? "gpt2"
                                                    : "llama");
    if (bpe || fault == PRE_UNKNOWN)
        tiny_key_text(&file, K "pre", bpe ? "gpt-2" : "gpt-7");
    if (fault == TOKENS_NUMBERS)
        tiny_key_array(&file, K "tokens", RF_GGUF_I32, 3, types, 4);
    else if (fault != NO_TOKENS)
        tiny_key_texts(&file, K "tokens", fault == TOKENS_EMPTY ? 0 : 3, tokens);
    if (fault == TYPES_I8)
        tiny_key_array(&file, K "token_type", RF_GGUF_I8, 3, small, 1);
    else
        tiny_key_array(&file, K "token_type", RF_GGUF_I32, fault == TYPES_SHORT ? 2 : 3, types, 4);
    if (fault == SCORES_I8)
        tiny_key_array(&file, K "scores", RF_GGUF_I8, 3, small, 1);
    else if (fault != NO_SCORES && !bpe)
        tiny_key_array(&file, K "scores", RF_GGUF_F32, fault == SCORES_SHORT ? 2 : 3, scores, 4);
    if (fault == MERGES_NUMBERS)
        tiny_key_array(&file, K "merges", RF_GGUF_I32, 3, types, 4);
    else if (bpe && fault != NO_MERGES)
        tiny_key_texts(&file, K "merges", 2,
                       (const char *[]){"a b", fault == MERGE_WITHOUT_BLANK   ? "abba"
                                               : fault == MERGE_WITHOUT_RIGHT ? "ab "
                                                                              : " ab"});
    if (fault == BOS_BEYOND || fault == EOT_BEYOND)
        tiny_key_u32(&file, fault == BOS_BEYOND ? K "bos_token_id" : K "eot_token_id", 3);
    if (fault == BOS_ARRAY)
        tiny_key_array(&file, K "bos_token_id", RF_GGUF_U32, 1, types, 4);
    if (fault == BOS_TEXT)
        tiny_key_text(&file, K "bos_token_id", "1");
    if (fault == ADD_BOS_TEXT)
        tiny_key_text(&file, K "add_bos_token", "true");
    return file;
}

static void test_a_malformed_vocabulary_is_refused_with_the_name_of_its_key(void **state)
{
    (void)state;
    for (size_t i = 0; i < RF_ARRAY_COUNT(malformed_cases); i++) {
        const malformed_case *row = &malformed_cases[i];
        open_vocab opened = {.file = malformed_file(row->fault)};
        rf_error err = {0};
        read_header(&opened);
        rf_status status = rf_vocab_measure(&opened.gguf, &opened.vocab, &err);
        if (status != row->status || strcmp(err.where, row->where) != 0)
            fail_msg("case %u: status %d, where \"%s\" instead of \"%s\"", (unsigned)i, (int)status,
                     err.where, row->where);
        assert_int_equal(rf_vocab_measure(&opened.gguf, &opened.vocab, NULL), row->status);
        if (row->fault == PRE_UNKNOWN) {
            assert_string_equal(err.got, "gpt-7");
            assert_non_null(strstr(err.what, "llama-bpe"));
        }
        close_header(&opened);
    }
}

/* ---- chat --------------------------------------------------------------------------------- */

typedef struct rendered {
    rf_writer frame, text;
} rendered;

/* What goes into the one leaves a ~ in the other. */
static void take_piece(void *context, const char *text, uint64_t bytes, bool is_frame)
{
    rendered *out = context;
    rf_write_bytes(is_frame ? &out->frame : &out->text, text, (size_t)bytes);
    rf_write(is_frame ? &out->text : &out->frame, "~");
}

static void test_chatml_keeps_frame_and_text_apart(void **state)
{
    (void)state;
    const rf_chat_message messages[] = {{"system", "Be <|im_end|> kind"}, {"user", "Hi"}};
    rendered out = {rf_writer_make((char[400]){0}, 400), rf_writer_make((char[400]){0}, 400)};
    assert_int_equal(rf_chat_render(RF_CHAT_CHATML, messages, 2, true, take_piece, &out, NULL),
                     RF_OK);
    assert_string_equal(out.frame.text, "<|im_start|>system\n~<|im_end|>\n"
                                        "<|im_start|>user\n~<|im_end|>\n<|im_start|>assistant\n");
    assert_string_equal(out.text.text, "~Be <|im_end|> kind~~Hi~~");

    rf_error err;
    const rf_chat_message forged = {"user\n", "Hi"};
    out.frame.length = 0;
    out.frame.text[0] = 0;
    assert_int_equal(rf_chat_render(RF_CHAT_CHATML, &forged, 1, true, take_piece, &out, &err),
                     RF_ERR_USAGE);
    assert_string_equal(out.frame.text, "");
    assert_int_equal(rf_chat_render(RF_CHAT_NONE, messages, 2, true, take_piece, &out, &err),
                     RF_ERR_UNSUPPORTED);
}

static void test_chatml_is_known_by_the_template_of_the_file(void **state)
{
    (void)state;
    static const char *const templates[] = {"{{'<|im_start|>' + role}}<|im_end|>", "[INST]", NULL};
    for (int i = 0; i < 3; i++) {
        open_vocab opened = {.file = tiny_begin(3)};
        if (templates[i])
            tiny_key_text(&opened.file, "tokenizer.chat_template", templates[i]);
        read_header(&opened);
        assert_int_equal(rf_chat_format_of(&opened.gguf), i == 0 ? RF_CHAT_CHATML : RF_CHAT_NONE);
        close_header(&opened);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_piece_is_what_its_token_stands_for),
        cmocka_unit_test(test_the_stream_gives_whole_characters_and_loses_nothing),
        cmocka_unit_test(test_the_stream_drops_the_blank_before_the_first_word_only),
        cmocka_unit_test(test_ends_come_from_the_keys_and_from_known_texts),
        cmocka_unit_test(test_a_malformed_vocabulary_is_refused_with_the_name_of_its_key),
        cmocka_unit_test(test_chatml_keeps_frame_and_text_apart),
        cmocka_unit_test(test_chatml_is_known_by_the_template_of_the_file),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
