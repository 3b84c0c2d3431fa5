// A linear layer after another layer; its weights are in panels of inputs (panels, outputs, LANES).
#pragma once

#include <algorithm>
#include <numeric>

#include "input_layer.h"
#include "linear_base.h"

namespace {

struct LinearLayer : LinearBase {
    long panels;
    Panels input, grad_in;
    float *bias_grad;

    LinearLayer(Arena &arena, const LayerSpec &spec, const Sgd &sgd, long batch_size)
        : LinearBase(arena, spec, sgd, batch_size,
                     round_up(spec.channels * spec.height * spec.width) * spec.outputs),
          panels(round_up(inputs) / LANES),
          input{arena.floats(round_up(inputs) * batch_size), LANES, batch_size},
          grad_in{arena.floats(round_up(inputs) * batch_size), LANES, batch_size},
          bias_grad(arena.floats(outputs)) {
        grad_out = {arena.floats(outputs * batch_size), 1, batch_size};
    }
};

// Dot products of M outputs' weights with N examples, without the bias: to[m * N + n].
template <int N, int M>
inline void dot_products(const LinearLayer &layer, long example, long output, float *to) {
    vec sums[M * N] = {};
    const float *x = layer.input.data + example * LANES;
    const float *w = layer.weight.weight + output * LANES;
    for (long panel = 0; panel < layer.panels; ++panel) {
        vec weights[M];
        unrolled<M>([&](auto m) { weights[m] = load(w + m * LANES); });
        unrolled<N>([&](auto n) {
            const vec value = load(x + n * LANES);
            unrolled<M>([&](auto m) { sums[m * N + n] += weights[m] * value; });
        });
        x += layer.batch_size * LANES, w += layer.outputs * LANES;
    }
    unrolled<M>([&](auto m) { write_lane_sums<N>(sums + m * N, to + m * N); });
}

// Adds the bias, applies the ReLU, and writes one output of N examples.
template <int N>
inline void write_output(const LinearLayer &layer, const float *sums, const Panels &to,
                         long example, long output) {
    float *place = to.at(output, example);
    const float bias = layer.bias.weight[output];
    for (long n = 0; n < N; ++n) {
        const float value = sums[n] + bias;
        place[n * to.width] = layer.relu && value < 0 ? 0 : value;
    }
}

template <int N>
void forward_group(const LinearLayer &layer, long example, const Panels &to) {
    float sums[2 * N];
    long output = 0;
    for (; output + 2 <= layer.outputs; output += 2) {
        dot_products<N, 2>(layer, example, output, sums);
        write_output<N>(layer, sums, to, example, output);
        write_output<N>(layer, sums + N, to, example, output + 1);
    }
    if (output < layer.outputs) {
        dot_products<N, 1>(layer, example, output, sums);
        write_output<N>(layer, sums, to, example, output);
    }
}

void forward(const LinearLayer &layer, long examples, const Panels &to) {
    for_each_group(GroupSizes{}, examples,
                   [&](long example, auto n) { forward_group<n>(layer, example, to); });
}

// Gradients of a tile's weights and of the input; updates the weights with the last group.
template <int N>
vec backward_tile(const LinearLayer &layer, const Tile &tile, const Sgd &settings) {
    const Sgd sgd = settings;  // copies, as in update_tile
    const TrainedTensor tensor = layer.weight;
    const long batch_size = layer.batch_size;
    const long entry = (tile.panel * batch_size + tile.example) * LANES;
    const long from = (tile.panel * layer.outputs + tile.begin) * LANES;
    const long count = (tile.end - tile.begin) * LANES;
    const float *grad_out = layer.grad_out.at(tile.begin, tile.example);
    float *partial = layer.partial_grads;
    const bool is_first_group = tile.is_first_group, is_last_group = tile.is_last_group;
    vec x[N], grad_in[N], distance{};
    unrolled<N>([&](auto n) { x[n] = load(layer.input.data + entry + n * LANES); });
    unrolled<N>([&](auto n) { grad_in[n] = load(layer.grad_in.data + entry + n * LANES); });
    for (long at = from; at < from + count; at += LANES) {
        prefetch(tensor, at);
        const vec weight = load(tensor.weight + at);
        vec grad[2] = {
            is_first_group ? vec{} : load(partial),
            is_last_group ? update_without_grad(tensor, at, weight, sgd, distance) : vec{}};
        unrolled<N>([&](auto n) {
            const vec g = broadcast(grad_out[n]);
            grad[n % 2] += g * x[n];
            grad_in[n] += g * weight;
        });
        if (is_last_group) {
            apply_update(tensor, at, weight, grad[0] + grad[1], sgd);
        } else {
            store(partial, grad[0] + grad[1]);
        }
        grad_out += batch_size, partial += LANES;
    }
    unrolled<N>([&](auto n) { store(layer.grad_in.data + entry + n * LANES, grad_in[n]); });
    return distance;
}

double update_bias(const LinearLayer &layer, long examples, const Sgd &sgd) {
    if (!layer.has_bias) return 0;
    for (long output = 0; output < layer.outputs; ++output) {
        const float *grad = layer.grad_out.at(output, 0);
        layer.bias_grad[output] = std::accumulate(grad, grad + examples, 0.0f);
    }
    return update_tensor(layer.bias, layer.bias_grad, layer.outputs, sgd);
}

// Updates the layer, given grad_out, and fills grad_in; returns the value of its proximal terms.
double backward(const LinearLayer &layer, long examples, const Sgd &sgd) {
    std::fill_n(layer.grad_in.data, layer.panels * LANES * layer.batch_size, 0.0f);
    double distance = 0;
    for_each_tile(layer.panels, layer.outputs, examples, [&](auto n, const Tile &tile) {
        distance += sum_lanes(backward_tile<n>(layer, tile, sgd));
    });
    return layer.weight.strength / 2 * distance + update_bias(layer, examples, sgd);
}

// The gradient before a ReLU, from the gradient and the value after it.
inline float relu_grad(float grad, float value, bool relu) {
    return relu && !(value > 0) ? 0 : grad;
}

void relu_grads(const float *grad, const float *value, bool relu, long count, float *to) {
    for (long i = 0; i < count; ++i) to[i] = relu_grad(grad[i], value[i], relu);
}

// Writes a layer's grad_in to grad_out of the layer before, through that layer's ReLU.
void propagate_grad(const LinearLayer &layer, const InputLayer &before) {
    relu_grads(layer.grad_in.data, layer.input.data, before.relu,
               layer.panels * LANES * layer.batch_size, before.grad_out.data);
}

void propagate_grad(const LinearLayer &layer, const LinearLayer &before, long examples) {
    for (long column = 0; column < before.outputs; ++column) {
        const float *grad = layer.grad_in.at(column, 0), *value = layer.input.at(column, 0);
        float *to = before.grad_out.at(column, 0);
        for (long n = 0; n < examples; ++n) {
            to[n] = relu_grad(grad[n * LANES], value[n * LANES], before.relu);
        }
    }
}

}  // namespace
