// What the caller passes in. glocal/engines/fused/cpu.py mirrors both structures field by field.
#pragma once

#include <cstdint>

// One layer; weight and bias are in torch's layout and are trained in place. An anchor is null if
// no proximal term holds the tensor.
struct LayerSpec {
    std::int64_t is_conv, channels, height, width, outputs;
    std::int64_t kernel_height, kernel_width, stride_height, stride_width, pad_height, pad_width;
    std::int64_t relu, pool;
    float *weight, *bias;
    const float *weight_anchor, *bias_anchor;
    double weight_strength, bias_strength;
};

// The local training of one client. `order` (steps, batch_size) holds rows of x and y, -1 is
// padding. `proximal_floor` is the part of the proximal loss that no weight can change. `loss` is
// written by the step.
struct Job {
    const LayerSpec *layers;
    std::int64_t layer_count;
    const float *x;
    const std::int64_t *y;
    std::int64_t rows;
    const std::int64_t *order;
    std::int64_t steps, batch_size;
    double lr, momentum, weight_decay, proximal_floor;
    double loss;
};
