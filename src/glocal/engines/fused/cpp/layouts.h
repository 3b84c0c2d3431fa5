// Copies weights between torch's layout and the layouts of the kernels.
#pragma once

#include <algorithm>

#include "conv_layer.h"
#include "input_layer.h"
#include "linear_layer.h"

namespace {

// Calls visit(in torch, in the kernel, count) for each run of values that are contiguous both in
// torch's layout of a filter, (channels, height, width), and in the kernel's, (height, width,
// channels).
template <class Visit>
void for_each_run(const ConvLayer &conv, Visit visit) {
    long in_torch = 0;
    for (long o = 0; o < conv.outputs; ++o) {
        for (long c = 0; c < conv.channels; ++c) {
            for (long y = 0; y < conv.kernel_height; ++y) {
                const long in_kernel = o * conv.filter + y * conv.run_padded + c;
                for (long x = 0; x < conv.kernel_width; ++x) {
                    visit(in_torch++, in_kernel + x * conv.channels, 1);
                }
            }
        }
    }
}

// The same for a linear layer. Its inputs are `channels` planes in torch, and pixels of `channels`
// values in the kernel.
template <class Visit>
void for_each_run(const LinearLayer &layer, long channels, Visit visit) {
    const long pixels = layer.inputs / channels, panel = layer.outputs * LANES;
    for (long o = 0; o < layer.outputs; ++o) {
        const long in_torch = o * layer.inputs, in_kernel = o * LANES;
        if (channels == 1) {
            for (long i = 0; i < layer.inputs; i += LANES) {
                const long count = std::min<long>(LANES, layer.inputs - i);
                visit(in_torch + i, in_kernel + i / LANES * panel, count);
            }
            continue;
        }
        for (long c = 0; c < channels; ++c) {
            for (long i = 0, column = c; i < pixels; ++i, column += channels) {
                const long offset = column / LANES * panel + column % LANES;
                visit(in_torch + c * pixels + i, in_kernel + offset, 1);
            }
        }
    }
}

// The same for the input layer; in square blocks, so that both sides stay in the cache.
template <class Visit>
void for_each_run(const InputLayer &layer, Visit visit) {
    for (long panel = 0; panel < layer.outputs; panel += LANES) {
        for (long begin = 0; begin < layer.inputs; begin += LANES) {
            const long last = std::min<long>(panel + LANES, layer.outputs);
            const long end = std::min<long>(begin + LANES, layer.inputs);
            for (long o = panel; o < last; ++o) {
                for (long i = begin; i < end; ++i) {
                    const long in_kernel = panel * layer.inputs + i * LANES + o - panel;
                    visit(o * layer.inputs + i, in_kernel, 1);
                }
            }
        }
    }
}

// Reads a weight and its anchor from torch's layout; `runs` calls its argument as for_each_run
// does.
template <class Runs>
void read_weight(const TrainedTensor &tensor, const float *weight, const float *anchor,
                 Runs runs) {
    runs([&](long in_torch, long in_kernel, long count) {
        std::copy_n(weight + in_torch, count, tensor.weight + in_kernel);
    });
    if (!anchor) return;
    runs([&](long in_torch, long in_kernel, long count) {
        std::copy_n(anchor + in_torch, count, tensor.anchor + in_kernel);
    });
}

// A bias has the same layout in torch and in the kernels.
void read_bias(const TrainedTensor &bias, const LayerSpec &spec) {
    if (!spec.bias) return;
    std::copy_n(spec.bias, spec.outputs, bias.weight);
    if (spec.bias_anchor) std::copy_n(spec.bias_anchor, spec.outputs, bias.anchor);
}

template <class Runs>
void write_weight(const TrainedTensor &tensor, float *weight, Runs runs) {
    runs([&](long in_torch, long in_kernel, long count) {
        std::copy_n(tensor.weight + in_kernel, count, weight + in_torch);
    });
}

}  // namespace
