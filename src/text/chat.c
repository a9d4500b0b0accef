/* text/chat.c: ChatML, the chat format that we render ourselves.
 *
 *     <|im_start|>user\n        frame: may be parsed for special tokens
 *     Hello                     text: may not
 *     <|im_end|>\n              frame
 *
 * Frame and text are handed on apart, so that a message cannot forge a turn. A file's template is a
 * program in Jinja, which nothing here runs: it is only asked which format it stands for.
 */
#include "text/text.h"

#include <string.h>

typedef struct role_row {
    const char *role;
    const char *opening;
} role_row;

static const role_row roles[] = {
    {"system", "<|im_start|>system\n"},
    {"user", "<|im_start|>user\n"},
    {"assistant", "<|im_start|>assistant\n"},
    {"tool", "<|im_start|>tool\n"},
};

#define CLOSING   "<|im_end|>\n"
#define ASSISTANT 2

rf_chat_format rf_chat_format_of(const rf_gguf *gguf)
{
    rf_text text;
    const rf_gguf_key *key = rf_gguf_find(gguf, "tokenizer.chat_template");
    if (key && rf_gguf_text(key, &text) &&
        memmem(text.bytes, (size_t)text.length, "<|im_start|>", 12) &&
        memmem(text.bytes, (size_t)text.length, "<|im_end|>", 10))
        return RF_CHAT_CHATML;
    return RF_CHAT_NONE;
}

static const char *opening_of(const char *role)
{
    for (size_t i = 0; i < RF_ARRAY_COUNT(roles); i++) {
        if (strcmp(role, roles[i].role) == 0)
            return roles[i].opening;
    }
    return NULL;
}

rf_status rf_chat_render(rf_chat_format format, const rf_chat_message *messages,
                         uint32_t message_count, bool generate, rf_chat_piece_fn piece,
                         void *context, rf_error *err)
{
    rf_error own;
    if (!err)
        err = &own;
    if (format != RF_CHAT_CHATML)
        return rf_fail(err, RF_ERR_UNSUPPORTED, "tokenizer.chat_template",
                       "no chat format that is built in (only ChatML is)");
    for (uint32_t i = 0; i < message_count; i++) { /* refused before anything is handed on */
        if (!opening_of(messages[i].role)) {
            rf_fail(err, RF_ERR_USAGE, "role", "this role is not known");
            rf_fail_expected(err, "system, user, assistant or tool");
            return rf_fail_got(err, "%.100s", messages[i].role);
        }
    }
    for (uint32_t i = 0; i < message_count; i++) {
        const char *opening = opening_of(messages[i].role);
        piece(context, opening, strlen(opening), true);
        if (messages[i].text[0])
            piece(context, messages[i].text, strlen(messages[i].text), false);
        piece(context, CLOSING, strlen(CLOSING), true);
    }
    if (generate)
        piece(context, roles[ASSISTANT].opening, strlen(roles[ASSISTANT].opening), true);
    return RF_OK;
}
