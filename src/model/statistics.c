/* model/statistics.c: sums over keys and queries before RoPE, while a model reads a text.
 *
 * One head's sums are one unit of work, so their order, and with it every bit, does not depend on
 * the workers. Called by the step, only while a calibration is being made.
 */
#include "model/model.h"

static uint64_t head_bytes(const rf_layer_config *layer)
{
    uint64_t width = layer->k_width;
    return sizeof(rf_head_sums) + (width + width * width) * sizeof(double);
}

uint64_t rf_sums_bytes(const rf_config *config)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < config->layer_count; i++)
        bytes += config->layers[i].kv_heads * head_bytes(&config->layers[i]);
    return bytes;
}

rf_head_sums *rf_sums_of(const rf_config *config, void *sums, uint32_t layer, uint32_t head)
{
    uint8_t *at = sums;
    for (uint32_t i = 0; i < layer; i++)
        at += config->layers[i].kv_heads * head_bytes(&config->layers[i]);
    return (rf_head_sums *)(void *)(at + head * head_bytes(&config->layers[layer]));
}

static float square_sum(const float *row, uint32_t width)
{
    float sum = 0.0f;
    for (uint32_t i = 0; i < width; i++)
        sum += row[i] * row[i];
    return sum;
}

void rf_sums_add(const rf_network *network, uint32_t layer_index, uint32_t tokens, uint32_t head)
{
    const rf_layer_config *layer = &network->config->layers[layer_index];
    rf_head_sums *sums = rf_sums_of(network->config, network->sums, layer_index, head);
    uint32_t width = layer->k_width, group = layer->heads / layer->kv_heads;
    const float *k = network->buffers[RF_B_K], *v = network->buffers[RF_B_V];
    const float *q = network->buffers[RF_B_Q];
    double *moment = sums->values + width;
    for (uint32_t t = 0; t < tokens; t++) {
        const float *key = k + ((uint64_t)t * layer->kv_heads + head) * width;
        const float *value = v + ((uint64_t)t * layer->kv_heads + head) * layer->v_width;
        float k_norm = __builtin_sqrtf(square_sum(key, width));
        float v_norm = __builtin_sqrtf(square_sum(value, layer->v_width));
        sums->k_norm = RF_MAX(sums->k_norm, k_norm);
        sums->v_norm = RF_MAX(sums->v_norm, v_norm);
        sums->keys++;
        for (uint32_t i = 0; i < width; i++)
            sums->values[i] += (double)key[i];
        for (uint32_t g = 0; g < group; g++) {
            const float *query = q + ((uint64_t)t * layer->heads + head * group + g) * width;
            sums->queries++;
            for (uint32_t i = 0; i < width; i++) {
                double x = (double)query[i];
                double *row = moment + (uint64_t)i * width;
                for (uint32_t j = 0; j < width; j++)
                    row[j] += x * (double)query[j];
            }
        }
    }
}
