/* tests/unit/test_text.c: texts into ids, on vocabularies small enough to check by hand.
 *
 * What the encoders give is compared with figures worked out on paper and, for random words, with a
 * merging loop of ten lines that knows no heap.
 */
#include "tiny_vocab.h"

static void test_spm_merges_the_highest_score_first_and_the_left_one_of_equals(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t blank = add(w, BLANK, 1, -10), a = add(w, "a", 1, -11), b = add(w, "b", 1, -12);
    uint32_t ab = add(w, "ab", 1, -2), ba = add(w, "ba", 1, -2), blank_a = add(w, BLANK "a", 1, -1);
    uint32_t aba = add(w, "aba", 1, -5);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "bab", false, true, IDS(blank, ba, b));
    assert_ids(&o->vocab, "ab", false, true, IDS(blank_a, b));
    assert_ids(&o->vocab, "b aba", false, true, IDS(blank, b, blank_a, ba));
    assert_ids(&o->vocab, "baba", false, true, IDS(blank, ba, ba));
    assert_ids(&o->vocab, "babab", false, true, IDS(blank, ba, ba, b));
    assert_ids(&o->vocab, "bbaba", true, true, IDS(1, blank, b, ba, ba));
    (void)a, (void)ab, (void)aba;
    close_words(o);
}

static void test_spm_falls_back_to_the_bytes_of_what_is_no_token(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t blank = add(w, BLANK, 1, -1);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "\xc3\xa9", false, true, IDS(blank, 3 + 0xc3, 3 + 0xa9));
    assert_ids(&o->vocab, "\xff\n", false, true, IDS(blank, 3 + 0xff, 3 + '\n'));
    assert_ids(&o->vocab, "\xe4", false, true, IDS(blank, 3 + 0xe4));
    assert_ids(&o->vocab, "", false, true, NOTHING);
    assert_ids(&o->vocab, "", true, true, IDS(1));
    close_words(o);
}

static void test_spm_puts_a_blank_first_and_behind_special_tokens(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t blank = add(w, BLANK, 1, -1), x = add(w, "x", 1, -2);
    uint32_t user = add(w, "<user>", RF_TOKEN_USER, 0), short_one = add(w, "~", RF_TOKEN_USER, 0);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "x x", false, true, IDS(blank, x, blank, x));
    assert_ids(&o->vocab, "<s>x</s> x", false, true, IDS(1, blank, x, 2, blank, blank, x));
    assert_ids(&o->vocab, "x<user>x", false, false, IDS(blank, x, user, blank, x));
    assert_ids(&o->vocab, "x~x", false, false, IDS(blank, x, short_one, blank, x));
    close_words(o);

    w = spm_words();
    x = add(w, "x", 1, -2);
    tiny_gguf file = file_of(w);
    tiny_key_bool(&file, "tokenizer.ggml.add_space_prefix", false);
    tiny_key_bool(&file, "tokenizer.ggml.add_bos_token", false);
    tiny_key_bool(&file, "tokenizer.ggml.add_eos_token", true);
    o = open_file(w, file);
    assert_ids(&o->vocab, "x<s>x", true, true, IDS(x, 1, x, 2));
    close_words(o);
}

static void assert_space_parts(const char *token, bool parts)
{
    word_list *w = spm_words();
    add(w, token, 1, -1);
    open_vocab *o = open_words(w);
    assert_int_equal(rf_vocab_head(&o->vocab)->space_parts, parts);
    close_words(o);
}

static void test_spm_merges_across_a_blank_where_a_token_does(void **state)
{
    (void)state;
    assert_space_parts(BLANK BLANK "a", true);
    assert_space_parts("abc" BLANK, false);
    assert_space_parts("c" BLANK, false);
    word_list *w = spm_words();
    uint32_t blank = add(w, BLANK, 1, -9), x = add(w, "x", 1, -9);
    uint32_t across = add(w, "x" BLANK "x", 1, -1), half = add(w, "x" BLANK, 1, -2);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "x x", false, true, IDS(blank, across));
    assert_ids(&o->vocab, "x x x", false, true, IDS(blank, across, blank, x));
    assert_ids(&o->vocab, "x ", false, true, IDS(blank, half));
    close_words(o);
}

static void test_control_tokens_in_a_text_are_text_unless_asked_for(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    uint32_t end = add(w, "<|im_end|>", RF_TOKEN_CONTROL, 0);
    uint32_t user = add(w, "<u>", RF_TOKEN_USER, 0), longer = add(w, "<u>!", RF_TOKEN_USER, 0);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "a<|im_end|>", false, true, IDS('a', end));
    assert_ids(&o->vocab, "<|im_end|>", false, false,
               IDS('<', '|', 'i', 'm', '_', 'e', 'n', 'd', '|', '>'));
    assert_ids(&o->vocab, "<u><u>!", false, false, IDS(user, longer));
    assert_ids(&o->vocab, "<<u>", false, true, IDS('<', user));
    close_words(o);
}

static void test_the_longest_special_token_is_cut_out_everywhere_first(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    uint32_t ab = add(w, "ab", RF_TOKEN_USER, 0), bcd = add(w, "bcd", RF_TOKEN_USER, 0);
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "abcd", false, true, IDS('a', bcd));
    assert_ids(&o->vocab, "ababcdab", false, true, IDS(ab, 'a', bcd, ab));
    close_words(o);
}

static void test_phi3_special_tokens_swallow_the_space_behind_them(void **state)
{
    (void)state;
    word_list *w = spm_words();
    uint32_t blank = add(w, BLANK, 1, -1), x = add(w, "x", 1, -2);
    uint32_t end = add(w, "<|end|>", RF_TOKEN_CONTROL, 0);
    tiny_gguf file = file_of(w);
    tiny_key_text(&file, "general.name", "My-Phi3-mini");
    open_vocab *o = open_file(w, file);
    assert_ids(&o->vocab, "<|end|> \n x<s> x", false, true, IDS(end, blank, x, 1, blank, blank, x));
    assert_ids(&o->vocab, "<|end|>  ", false, true, IDS(end));
    close_words(o);
}

static void test_bpe_merges_the_lowest_rank_first(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    uint32_t he = add(w, "he", 1, 0), el = add(w, "el", 1, 0), ll = add(w, "ll", 1, 0);
    uint32_t hell = add(w, "hell", 1, 0), gh = add(w, "\xc4\xa0h", 1, 0);
    merge(w, "l l");
    merge(w, "h e");
    merge(w, "e l");
    merge(w, "he ll");
    merge(w, "\xc4\xa0 h");
    merge(w, "n o"); /* gives no token: never done */
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "hello", false, true, IDS(hell, 'o'));
    assert_ids(&o->vocab, "hel", false, true, IDS(he, 'l'));
    assert_ids(&o->vocab, "elll", false, true, IDS('e', ll, 'l'));
    assert_ids(&o->vocab, "eel hno", false, true, IDS('e', el, gh, 'n', 'o'));
    close_words(o);
}

static void test_bpe_takes_a_word_that_is_a_token_whole_where_the_family_does(void **state)
{
    (void)state;
    for (int whole = 0; whole < 2; whole++) {
        word_list *w = bpe_words(whole ? "llama-bpe" : "qwen2");
        uint32_t word = add(w, "\xc4\xa0xyz", 1, 0);
        uint32_t xy = add(w, "xy", 1, 0);
        merge(w, "x y");
        open_vocab *o = open_words(w);
        if (whole)
            assert_ids(&o->vocab, " xyz", false, true, IDS(word));
        else
            assert_ids(&o->vocab, " xyz", false, true, IDS(' ', xy, 'z'));
        assert_ids(&o->vocab, "xyz", false, true, IDS(xy, 'z'));
        close_words(o);
    }
}

static void test_bytes_that_are_not_utf8_become_replacement_characters_in_bpe(void **state)
{
    (void)state;
    open_vocab *o = open_words(bpe_words("gpt-2"));
    assert_ids(&o->vocab, "a\xff", false, true, IDS('a', 0xef, 0xbf, 0xbd));
    assert_ids(&o->vocab, "\xe4\xb8z", false, true, IDS(0xef, 0xbf, 0xbd, 0xef, 0xbf, 0xbd, 'z'));
    assert_ids(&o->vocab, "\xc1\x81", false, true, IDS('A')); /* overlong */
    assert_ids(&o->vocab, "\xf4\x90\x80\x80", false, true,
               IDS(0xef, 0xbf, 0xbd, 0xef, 0xbf, 0xbd, 0xef, 0xbf, 0xbd, 0xef, 0xbf, 0xbd));
    close_words(o);
}

static void test_of_tokens_with_one_text_the_last_is_found(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    add(w, "ab", 1, 0);
    uint32_t second = add(w, "ab", 1, 0);
    merge(w, "a b");
    open_vocab *o = open_words(w);
    assert_ids(&o->vocab, "ab", false, true, IDS(second));
    close_words(o);
}

static void test_buffers_that_are_too_small_are_a_usage_error(void **state)
{
    (void)state;
    open_vocab *o = open_words(spm_words());
    uint64_t count, bytes = rf_tokenize_scratch_bytes(&o->vocab, 3);
    uint32_t few[2];
    void *scratch = malloc((size_t)bytes);
    rf_error err;
    rf_tokenize_options options = {true, true};
    assert_int_equal(
        rf_tokenize(&o->vocab, "abc", 3, options, scratch, bytes - 1, few, 2, &count, &err),
        RF_ERR_USAGE);
    assert_string_equal(err.where, "scratch");
    assert_int_equal(
        rf_tokenize(&o->vocab, "abc", 3, options, scratch, bytes, few, 2, &count, &err),
        RF_ERR_USAGE);
    assert_string_equal(err.where, "ids");
    assert_int_equal(rf_tokenize_scratch_bytes(&o->vocab, UINT64_MAX / 2), UINT64_MAX);
    free(scratch);
    close_words(o);
}

/* ---- merging against a plain loop --------------------------------------------------------- */

/* Letters a..d; tokens of two and three letters. cost(text): the score negated, or the rank of the
 * pair; the lowest merges first, the left one of equals. */
static uint64_t merge_plainly(const rf_vocab *vocab, const char *word, uint32_t *out)
{
    char parts[512][16];
    uint64_t count = strlen(word);
    for (uint64_t i = 0; i < count; i++) {
        parts[i][0] = word[i];
        parts[i][1] = 0;
    }
    for (;;) {
        uint64_t best = UINT64_MAX;
        double best_cost = 0;
        for (uint64_t i = 0; i + 1 < count; i++) {
            char pair[32];
            snprintf(pair, sizeof pair, "%s%s", parts[i], parts[i + 1]);
            uint32_t id = rf_vocab_find(vocab, (rf_text){pair, strlen(pair)});
            if (id == NONE)
                continue;
            double cost = -(double)rf_vocab_tokens(vocab)[id].score;
            if (vocab->kind == RF_VOCAB_BPE) {
                uint32_t left = rf_vocab_find(vocab, (rf_text){parts[i], strlen(parts[i])});
                uint32_t right =
                    rf_vocab_find(vocab, (rf_text){parts[i + 1], strlen(parts[i + 1])});
                const rf_merge *found = rf_merge_find(vocab, left, right);
                if (!found)
                    continue;
                cost = found->rank;
            }
            if (best == UINT64_MAX || cost < best_cost) {
                best = i;
                best_cost = cost;
            }
        }
        if (best == UINT64_MAX)
            break;
        memcpy(parts[best] + strlen(parts[best]), parts[best + 1], strlen(parts[best + 1]) + 1);
        count--;
        for (uint64_t i = best + 1; i < count; i++)
            memcpy(parts[i], parts[i + 1], sizeof parts[i]);
    }
    for (uint64_t i = 0; i < count; i++)
        out[i] = rf_vocab_find(vocab, (rf_text){parts[i], strlen(parts[i])});
    return count;
}

static void check_random_words(const rf_vocab *vocab)
{
    for (int round = 0; round < 400; round++) {
        char word[301];
        uint32_t length = 1 + random_below(round % 2 ? 300 : 40), letters = 1 + random_below(4);
        for (uint32_t i = 0; i < length; i++)
            word[i] = (char)('a' + random_below(letters));
        word[length] = 0;
        uint32_t expected[512];
        uint64_t count = merge_plainly(vocab, word, expected);
        ids got = encode(vocab, word, length, false, true);
        assert_int_equal(got.count, count);
        assert_memory_equal(got.at, expected, (size_t)count * sizeof(uint32_t));
        free(got.at);
    }
}

static void test_words_of_any_length_merge_as_a_plain_loop_does(void **state)
{
    (void)state;
    word_list *w = bpe_words("gpt-2");
    static const char *const pairs[] = {"a b",   "b b", "ab c",  "a a", "aa a",  "c d",
                                        "ab ab", "d d", "bb bb", "b a", "dd cd", "aa aa"};
    static char texts[RF_ARRAY_COUNT(pairs)][8];
    for (size_t i = 0; i < RF_ARRAY_COUNT(pairs); i++) {
        size_t at = strcspn(pairs[i], " ");
        snprintf(texts[i], sizeof texts[i], "%.*s%s", (int)at, pairs[i], pairs[i] + at + 1);
        add(w, texts[i], 1, 0);
        merge(w, pairs[i]);
    }
    open_vocab *o = open_words(w);
    check_random_words(&o->vocab);
    close_words(o);

    for (int inner = 0; inner < 2; inner++) { /* the second is merged in one piece */
        w = spm_words();
        for (char c = 'a'; c <= 'd'; c++)
            add(w, &"a\0b\0c\0d"[2 * (c - 'a')], 1, -20);
        for (size_t i = 0; i < RF_ARRAY_COUNT(pairs); i++)
            add(w, texts[i], 1, -(float)(i / 3));
        if (inner)
            add(w, "x" BLANK, 1, -1);
        tiny_gguf file = file_of(w);
        tiny_key_bool(&file, "tokenizer.ggml.add_space_prefix", false);
        o = open_file(w, file);
        assert_int_equal(rf_vocab_head(&o->vocab)->space_parts, !inner);
        check_random_words(&o->vocab);
        close_words(o);
    }
}

static void test_random_bytes_stay_inside_the_announced_sizes(void **state)
{
    (void)state;
    for (int kind = 0; kind < 2; kind++) {
        word_list *w = kind ? spm_words() : bpe_words("llama-bpe");
        add(w, "a", RF_TOKEN_USER, 0); /* matches as short as they can be */
        add(w, "  ", RF_TOKEN_USER, 0);
        open_vocab *o = open_words(w);
        for (int round = 0; round < 300; round++) {
            uint8_t bytes[400];
            uint32_t length = random_below(sizeof bytes), limit = 1 + random_below(256);
            for (uint32_t i = 0; i < length; i++)
                bytes[i] = (uint8_t)(random_below(3) ? random_below(limit)
                                                     : (uint8_t) " a\xff\xe2"[round & 3]);
            ids got = encode(&o->vocab, bytes, length, true, true);
            assert_true(got.count <= rf_tokenize_bound(&o->vocab, length));
            free(got.at);
        }
        close_words(o);
    }
}

/* ---- pre-tokenizers ----------------------------------------------------------------------- */

typedef struct split_case {
    const char *pre, *text, *words; /* the words parted by '|' */
} split_case;

static const split_case split_cases[] = {
    {"gpt-2", "Hello world's  end\n\nx", "Hello| world|'s| | end|\n|\n|x"},
    {"gpt-2", "I'LL 'll 12345 \xc2\xbd!?", "I|'|LL| '|ll| 12345| \xc2\xbd|!?"},
    {"gpt-2", "a  ", "a|  "},
    {"gpt-2", "e\xcc\x81t\xc3\xa9", "e|\xcc\x81|t\xc3\xa9"},
    {"smollm", "ab 123", "ab| |1|2|3"},
    {"starcoder", "x12 y", "x|1|2| y"},
    {"llama-bpe", "I'LL go12345 \t\n\n  x=(y)\n", "I|'LL| go|123|45| \t\n\n| | x|=(|y|)\n"},
    {"llama-bpe", "\tx a.b", "\tx| a|.b"},
    {"qwen2", "go123!\r\n\nz", "go|1|2|3|!\r\n\n|z"},
    {"qwen35", "e\xcc\x81t 1", "e\xcc\x81t| |1"},
    {"falcon", "x==`y` 12345", "x|==`|y|`| |123|45"},
    {"default", "x==`y` 12345", "x|==|`|y|`| |123|45"},
    {"gpt-4o", "HelloWorld'sABC def 1234/\n", "Hello|World's|ABC| def| |123|4|/\n"},
    {"tekken", "HelloWORLDly 12", "Hello|WORLDly| |1|2"},
    {"deepseek-llm", "Hi  there\n12 \xe4\xb8\xad!!  ", "Hi| | there|\n|12| |\xe4\xb8\xad|!!|  "},
    {"deepseek-coder", "x12 .y", "x|1|2| .|y"},
    {"deepseek-coder", "1\xe2\x80\x82\xe2\x80\x82\xcc\x81", "1|\xe2\x80\x82\xe2\x80\x82\xcc\x81"},
    {"gpt-4o",
     "\xce\xa9"
     "AB x",
     "\xce\xa9|AB| x"},
    {"deepseek-v3", "x.y 12345!\n \xe4\xb8\xad", "x|.y| |123|45|!\n| |\xe4\xb8\xad"},
};

static void test_each_family_cuts_words_by_its_own_expression(void **state)
{
    (void)state;
    for (size_t i = 0; i < RF_ARRAY_COUNT(split_cases); i++) {
        const split_case *row = &split_cases[i];
        uint32_t pre;
        assert_true(rf_split_find((rf_text){row->pre, strlen(row->pre)}, &pre));
        rf_splitter splitter = rf_splitter_make(pre, (const uint8_t *)row->text, strlen(row->text));
        rf_writer got = rf_writer_make((char[200]){0}, 200);
        uint64_t first, last, end = 0;
        while (rf_splitter_next(&splitter, &first, &last)) {
            assert_true(first == end && last > first);
            rf_write(&got, first > 0 ? "|%.*s" : "%.*s", (int)(last - first), row->text + first);
            end = last;
        }
        assert_int_equal(end, strlen(row->text));
        if (strcmp(got.text, row->words) != 0)
            fail_msg("%s: \"%s\" instead of \"%s\"", row->pre, got.text, row->words);
    }
}

static void test_words_cover_any_bytes_without_gaps(void **state)
{
    (void)state;
    static const char *const signs[] = {" ",
                                        "\n",
                                        "\r\n",
                                        "a",
                                        "B",
                                        "'",
                                        "'s",
                                        "1",
                                        ".",
                                        "\xff",
                                        "\xc3\xa9",
                                        "\xe4\xb8\xad",
                                        "\xe3\x80\x80",
                                        "\xcc\x81",
                                        "`",
                                        "\xe2\x80\x98",
                                        "\xf0\x9f\x98\x80",
                                        "\xed\xa0\x80",
                                        "\t"};
    rf_writer names = rf_writer_make((char[2000]){0}, 2000);
    rf_split_names(&names);
    assert_false(names.overflow);
    for (uint32_t pre = 0; rf_split_find((rf_text){names.text, strcspn(names.text, " ")}, &pre);) {
        for (int round = 0; round < 200; round++) {
            rf_writer text = rf_writer_make((char[256]){0}, 256);
            for (uint32_t count = random_below(30); count > 0; count--)
                rf_write(&text, "%s", signs[random_below(RF_ARRAY_COUNT(signs))]);
            char *exact = malloc(text.length + 1); /* the sanitizer sees one byte too many */
            memcpy(exact, text.text, text.length);
            exact = realloc(exact, text.length ? text.length : 1);
            rf_splitter splitter = rf_splitter_make(pre, (uint8_t *)exact, text.length);
            uint64_t first, last, end = 0;
            while (rf_splitter_next(&splitter, &first, &last)) {
                assert_true(first == end && last > first);
                end = last;
            }
            assert_int_equal(end, text.length);
            free(exact);
        }
        names.text += strcspn(names.text, " ");
        names.text += *names.text == ' ';
    }
    assert_int_equal(*names.text, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spm_merges_the_highest_score_first_and_the_left_one_of_equals),
        cmocka_unit_test(test_spm_falls_back_to_the_bytes_of_what_is_no_token),
        cmocka_unit_test(test_spm_puts_a_blank_first_and_behind_special_tokens),
        cmocka_unit_test(test_spm_merges_across_a_blank_where_a_token_does),
        cmocka_unit_test(test_control_tokens_in_a_text_are_text_unless_asked_for),
        cmocka_unit_test(test_the_longest_special_token_is_cut_out_everywhere_first),
        cmocka_unit_test(test_phi3_special_tokens_swallow_the_space_behind_them),
        cmocka_unit_test(test_bpe_merges_the_lowest_rank_first),
        cmocka_unit_test(test_bpe_takes_a_word_that_is_a_token_whole_where_the_family_does),
        cmocka_unit_test(test_bytes_that_are_not_utf8_become_replacement_characters_in_bpe),
        cmocka_unit_test(test_of_tokens_with_one_text_the_last_is_found),
        cmocka_unit_test(test_buffers_that_are_too_small_are_a_usage_error),
        cmocka_unit_test(test_words_of_any_length_merge_as_a_plain_loop_does),
        cmocka_unit_test(test_random_bytes_stay_inside_the_announced_sizes),
        cmocka_unit_test(test_each_family_cuts_words_by_its_own_expression),
        cmocka_unit_test(test_words_cover_any_bytes_without_gaps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
