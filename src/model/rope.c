/* model/rope.c: the frequencies of rotary position embedding, once, when a model is opened.
 *
 * theta_i = base^(-2i / dims), then scaled: linear divides all by the factor; llama3 divides the
 * long waves, keeps the short ones and blends between (Llama 3.1 model card: wave length against
 * original context / high and low factor); a rope_freqs tensor divides each by its own number.
 * Source: Su et al., RoFormer, 2021.
 */
#include "model/model.h"

#include <string.h>

static const double two_pi = 6.283185307179586;

static double llama3_scaled(const rf_rope_config *rope, double frequency)
{
    double wave = two_pi / frequency;
    if (wave < rope->original_ctx / rope->high_freq_factor)
        return frequency;
    if (wave > rope->original_ctx / rope->low_freq_factor)
        return frequency / rope->factor;
    double blend = (rope->original_ctx / wave - rope->low_freq_factor) /
                   (rope->high_freq_factor - rope->low_freq_factor);
    return (1.0 - blend) * frequency / rope->factor + blend * frequency;
}

void rf_rope_frequencies(const rf_rope_config *rope, const rf_gguf *gguf, double *frequencies)
{
    double log_base = rf_log_f64(rope->base);
    for (uint32_t i = 0; i < rope->dims / 2; i++) {
        double frequency = rf_exp_f64(-2.0 * i / rope->dims * log_base);
        if (rope->scaling == RF_ROPE_LINEAR)
            frequency /= rope->factor;
        if (rope->scaling == RF_ROPE_LLAMA3)
            frequency = llama3_scaled(rope, frequency);
        if (rope->freqs) {
            float divisor;
            memcpy(&divisor, gguf->data + rope->freqs->offset + i * sizeof divisor, sizeof divisor);
            frequency /= (double)divisor;
        }
        frequencies[i] = frequency;
    }
}
