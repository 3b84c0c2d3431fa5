// A linear layer at the start of the network.
//
// Its input needs no gradient and is known before the step begins. So one pass over its weights,
// panel by panel of outputs (panels, inputs, LANES), updates them and computes the output of the
// next step.
#pragma once

#include "linear_base.h"

namespace {

struct InputLayer : LinearBase {
    long panels;
    float *input, *next_input;  // (inputs, batch_size)

    InputLayer(Arena &arena, const LayerSpec &spec, const Sgd &sgd, long batch_size)
        : LinearBase(arena, spec, sgd, batch_size,
                     round_up(spec.outputs) * spec.channels * spec.height * spec.width),
          panels(round_up(outputs) / LANES),
          input(arena.floats(inputs * batch_size)),
          next_input(arena.floats(inputs * batch_size)) {
        grad_out = {arena.floats(round_up(outputs) * batch_size), LANES, batch_size};
    }
};

template <int N>
void forward_group(const InputLayer &layer, long example, const Panels &to) {
    for (long panel = 0; panel < layer.panels; ++panel) {
        const float *w = layer.weight.weight + panel * layer.inputs * LANES;
        const float *x = layer.input + example;
        vec sums[N];
        unrolled<N>([&](auto n) { sums[n] = load(layer.bias.weight + panel * LANES); });
        for (long i = 0; i < layer.inputs; ++i, w += LANES, x += layer.batch_size) {
            const vec weight = load(w);
            unrolled<N>([&](auto n) { sums[n] += x[n] * weight; });
        }
        unrolled<N>([&](auto n) {
            store(to.at(panel * LANES, example + n), apply_relu(sums[n], layer.relu));
        });
    }
}

void forward(const InputLayer &layer, long examples, const Panels &to) {
    for_each_group(GroupSizes{}, examples,
                   [&](long example, auto n) { forward_group<n>(layer, example, to); });
}

// Updates the weights of a tile. With NEXT the tile is a whole panel, and its output in the next
// step is written to `next`.
template <int N, bool NEXT>
vec update_tile(const InputLayer &layer, const Tile &tile, const Sgd &settings,
                const Panels &next) {
    // copies: otherwise every store might change them, and they would be loaded again and again
    const Sgd sgd = settings;
    const TrainedTensor tensor = layer.weight;
    const long batch_size = layer.batch_size;
    const long from = (tile.panel * layer.inputs + tile.begin) * LANES;
    const long count = (tile.end - tile.begin) * LANES;
    const float *x = layer.input + tile.begin * batch_size + tile.example;
    const float *next_x = layer.next_input;
    float *partial = layer.partial_grads;
    const bool is_first_group = tile.is_first_group, is_last_group = tile.is_last_group;
    vec grad_out[N], sums[N], distance{};
    unrolled<N>([&](auto n) {
        grad_out[n] = load(layer.grad_out.at(tile.panel * LANES, tile.example + n));
    });
    unrolled<N>([&](auto n) { sums[n] = load(layer.bias.weight + tile.panel * LANES); });
    for (long at = from; at < from + count; at += LANES) {
        prefetch(tensor, at);
        const vec weight = load(tensor.weight + at);
        // two sums, and the rest of the update first: in one sum, additions wait for each other
        vec grad[2] = {
            is_first_group ? vec{} : load(partial),
            is_last_group ? update_without_grad(tensor, at, weight, sgd, distance) : vec{}};
        unrolled<N>([&](auto n) { grad[n % 2] += x[n] * grad_out[n]; });
        if (is_last_group) {
            const vec updated = apply_update(tensor, at, weight, grad[0] + grad[1], sgd);
            if constexpr (NEXT) unrolled<N>([&](auto n) { sums[n] += next_x[n] * updated; });
        } else {
            store(partial, grad[0] + grad[1]);
        }
        x += batch_size, next_x += batch_size, partial += LANES;
    }
    if constexpr (NEXT) {
        unrolled<N>([&](auto n) {
            store(next.at(tile.panel * LANES, n), apply_relu(sums[n], layer.relu));
        });
    }
    return distance;
}

double update_bias(const InputLayer &layer, long examples, const Sgd &sgd) {
    if (!layer.has_bias) return 0;
    vec distance{};
    for (long panel = 0; panel < layer.panels; ++panel) {
        const long at = panel * LANES;
        vec grad{};
        for (long n = 0; n < examples; ++n) grad += load(layer.grad_out.at(at, n));
        const vec weight = load(layer.bias.weight + at);
        const vec rest = update_without_grad(layer.bias, at, weight, sgd, distance);
        apply_update(layer.bias, at, weight, grad + rest, sgd);
    }
    return layer.bias.strength / 2 * sum_lanes(distance);
}

// Updates the layer; returns the value of its proximal terms. If `next` is not empty, fills it
// with the output of the next step, which must have the same number of examples, all in one group.
double backward(const InputLayer &layer, long examples, const Sgd &sgd, const Panels &next) {
    const double bias_term = update_bias(layer, examples, sgd);
    double distance = 0;
    for_each_tile(layer.panels, layer.inputs, examples, [&](auto n, const Tile &tile) {
        distance += sum_lanes(next.data ? update_tile<n, true>(layer, tile, sgd, next)
                                        : update_tile<n, false>(layer, tile, sgd, next));
    });
    return bias_term + layer.weight.strength / 2 * distance;
}

}  // namespace
