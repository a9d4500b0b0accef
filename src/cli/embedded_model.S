/* cli/embedded_model.S: the story model that the command carries in itself.
 *
 * Owns the bytes of models/stories260k.gguf between two symbols, in read-only data and on a page
 * boundary, so that they can be used where they are, like a mapped file. RF_EMBEDDED_FILE is the
 * model's path and comes from the build. Only cli/ may name the symbols.
 */
    .section .rodata.rf_embedded_model, "a"
    .global rf_embedded_model
    .global rf_embedded_model_end
    .type rf_embedded_model, %object
    .type rf_embedded_model_end, %object
    .balign 4096
rf_embedded_model:
    .incbin RF_EMBEDDED_FILE
rf_embedded_model_end:
    .byte 0
    .size rf_embedded_model, rf_embedded_model_end - rf_embedded_model
    .size rf_embedded_model_end, 1

    .section .note.GNU-stack, "", %progbits
