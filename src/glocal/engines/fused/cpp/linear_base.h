// What all linear layers share: panels of activations, and tiles of weights for the backward pass.
#pragma once

#include <algorithm>
#include <cstring>

#include "arena.h"
#include "job.h"
#include "sgd.h"
#include "vectors.h"

namespace {

// Vectors of weights whose partial gradients wait in the nearest cache while several groups of
// examples pass.
constexpr long CHUNK = 128;

// The activations of a batch in panels of neighbouring columns, (panels, examples, width): what a
// kernel reads at once is contiguous.
struct Panels {
    float *data = nullptr;
    long width = 1, examples = 0;

    float *at(long column, long example) const {
        return data + (column / width * examples + example) * width + column % width;
    }
};

// Copies the activations of one example to their panels.
void copy_example(const float *values, long count, const Panels &to, long example) {
    for (long column = 0; column < count; column += to.width) {
        const long length = std::min(to.width, count - column);
        std::memcpy(to.at(column, example), values + column, length * sizeof(float));
    }
}

// A linear layer. Its weights are in panels of LANES neighbouring inputs (LinearLayer) or of LANES
// neighbouring outputs (InputLayer).
struct LinearBase {
    long inputs, outputs, batch_size;
    bool relu, has_bias;
    TrainedTensor weight, bias;
    float *partial_grads;  // of a chunk of weights, summed over the groups of examples so far
    Panels grad_out;       // gradient of the layer's output

    LinearBase(Arena &arena, const LayerSpec &spec, const Sgd &sgd, long batch_size, long weights)
        : inputs(spec.channels * spec.height * spec.width),
          outputs(spec.outputs),
          batch_size(batch_size),
          relu(spec.relu),
          has_bias(spec.bias),
          weight(arena, weights, sgd, spec.weight_anchor, spec.weight_strength),
          bias(arena, outputs, sgd, spec.bias_anchor, spec.bias_strength),
          partial_grads(arena.floats(CHUNK * LANES)) {}
};

// The weights [begin, end) of a panel, together with a group of examples. The weights are updated
// with the batch's last group, when their gradient is complete.
struct Tile {
    long panel, begin, end, example;
    bool is_first_group, is_last_group;
};

// Calls visit(group size, tile) for all tiles of a layer. If there are several groups, all of them
// visit a chunk of weights while it is in the nearest cache.
template <class Visit>
void for_each_tile(long panels, long count, long examples, Visit visit) {
    const long chunk = is_one_group(GroupSizes{}, examples) ? count : CHUNK;
    for (long panel = 0; panel < panels; ++panel) {
        for (long begin = 0; begin < count; begin += chunk) {
            for_each_group(GroupSizes{}, examples, [&](long example, auto n) {
                const long end = std::min(begin + chunk, count);
                const bool is_last_group = example + n == examples;
                visit(n, Tile{panel, begin, end, example, example == 0, is_last_group});
            });
        }
    }
}

}  // namespace
