// The backward pass of a convolution: it visits only the pixels that the max-pool selected.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "conv_layer.h"
#include "linear_layer.h"

namespace {

// Calls body(R, V, y, k) for the pieces of a filter that fit into registers: R rows from y on, V
// vectors from value k on.
template <class Body>
void for_each_filter_piece(const ConvLayer &conv, Body body) {
    for_each_group(Sizes<3, 2, 1>{}, conv.run_padded / LANES, [&](long vector, auto v) {
        constexpr bool few_rows = v == 3 || !MANY_REGISTERS;
        using Heights = std::conditional_t<few_rows, Sizes<3, 1>, Sizes<5, 3, 1>>;
        for_each_group(Heights{}, conv.kernel_height,
                       [&](long y, auto r) { body(r, v, y, vector * LANES); });
    });
}

// Adds one image's gradient of a piece of one filter; returns the gradient of its bias.
template <int R, int V>
float filter_grad(const ConvLayer &conv, const float *padded, const float *grad_out,
                  const std::int32_t *argmax, float *grad) {
    vec sums[R * V];
    float total = 0;
    unrolled<R * V>([&](auto i) {
        sums[i] = load(grad + i / V * conv.run_padded + i % V * LANES);
    });
    for (long place = 0; place < conv.pooled_pixels; ++place) {
        const float g = grad_out[place * conv.outputs];
        const float *patch = padded + argmax[place * conv.argmax_pixel_stride];
        total += g;
        unrolled<R>([&](auto r) {
            unrolled<V>([&](auto v) {
                sums[r * V + v] += broadcast(g) * load(patch + v * LANES);
            });
            patch += conv.row;
        });
    }
    unrolled<R * V>([&](auto i) {
        store(grad + i / V * conv.run_padded + i % V * LANES, sums[i]);
    });
    return total;
}

void add_filter_grads(const ConvLayer &conv, const float *padded, const float *grad_out,
                      const std::int32_t *argmax) {
    for_each_filter_piece(conv, [&](auto r, auto v, long y, long k) {
        const float *shifted = padded + y * conv.row + k;
        for (long o = 0; o < conv.outputs; ++o) {
            float *grad = conv.grad + o * conv.filter + y * conv.run_padded + k;
            const std::int32_t *starts = argmax + o * conv.argmax_output_stride;
            const float total = filter_grad<r, v>(conv, shifted, grad_out + o, starts, grad);
            if (y == 0 && k == 0) conv.bias_grad[o] += total;
        }
    });
}

// Sorts an image's nonzero gradients by the pixel of the conv output that the pool selected.
void sort_by_pixel(const ConvLayer &conv, const float *grad_out, const std::int32_t *argmax) {
    std::fill_n(conv.nonzero_counts, conv.starts.size(), 0);
    for (long place = 0; place < conv.pooled_pixels; ++place) {
        for (long o = 0; o < conv.outputs; ++o) {
            const float grad = grad_out[place * conv.outputs + o];
            const long at = place * conv.argmax_pixel_stride + o * conv.argmax_output_stride;
            const long pixel = conv.pixel_of[argmax[at]];
            const long entry = pixel * conv.outputs + conv.nonzero_counts[pixel];
            conv.nonzero_grads[entry] = grad;
            conv.nonzero_filters[entry] = std::int32_t(o * conv.filter);
            conv.nonzero_counts[pixel] += grad != 0;
        }
    }
}

// Adds what a piece of all filters contributes to the padded image's gradient at column x of the
// conv output. Patches overlap from one pixel to the next: rows that they share stay in registers.
template <int R, int V>
void add_column_grads(const ConvLayer &conv, long x, long piece, float *patch) {
    vec sums[R * V] = {};
    const auto finish_row = [&] {
        unrolled<V>([&](auto v) { store(patch + v * LANES, load(patch + v * LANES) + sums[v]); });
        unrolled<R * V>([&](auto i) {
            sums[i] = i + V < R * V ? sums[(i + V) % (R * V)] : vec{};
        });
        patch += conv.row;
    };
    for (long y = 0; y < conv.conv_height; ++y) {
        const long pixel = y * conv.conv_width + x;
        const long begin = pixel * conv.outputs, end = begin + conv.nonzero_counts[pixel];
        for (long entry = begin; entry < end; ++entry) {
            const float *weight = conv.weight.weight + conv.nonzero_filters[entry] + piece;
            const vec grad = broadcast(conv.nonzero_grads[entry]);
            unrolled<R * V>([&](auto i) {
                sums[i] += grad * load(weight + i / V * conv.run_padded + i % V * LANES);
            });
        }
        const long rows = y + 1 < conv.conv_height ? conv.stride_height : R;
        for (long done = 0; done < rows; ++done) finish_row();
    }
}

void compute_padded_grad_in(const ConvLayer &conv, const float *grad_out,
                            const std::int32_t *argmax) {
    sort_by_pixel(conv, grad_out, argmax);
    std::fill_n(conv.padded_grad_in, conv.padded_height * conv.row + LANES, 0.0f);
    for_each_filter_piece(conv, [&](auto r, auto v, long y, long k) {
        for (long x = 0; x < conv.conv_width; ++x) {
            float *patch = conv.padded_grad_in + conv.starts[x] + y * conv.row + k;
            add_column_grads<r, v>(conv, x, y * conv.run_padded + k, patch);
        }
    });
}

// Adds one image's gradients of the filters. Fills padded_grad_in, unless the layer is the first.
void backward(const ConvLayer &conv, const Image &image, long example) {
    const float *grad_out = conv.grad_out + example * conv.output_size();
    const std::int32_t *argmax =
        conv.argmax + example * conv.pooled_pixels * round_up(conv.outputs);
    add_filter_grads(conv, pad_pixels(conv, image), grad_out, argmax);
    if (!conv.is_first_layer) compute_padded_grad_in(conv, grad_out, argmax);
}

// Writes the gradient of one image, without its padding, to grad_out of the layer before.
void propagate_grad(const ConvLayer &conv, const ConvLayer &before, long example) {
    const long count = conv.width * conv.channels;
    for (long y = 0; y < conv.height; ++y) {
        const long padded_y = y + conv.pad_height;
        const float *grad =
            conv.padded_grad_in + padded_y * conv.row + conv.pad_width * conv.channels;
        const long at = example * before.output_size() + y * count;
        relu_grads(grad, before.output + at, before.relu, count, before.grad_out + at);
    }
}

void propagate_grad(const LinearLayer &layer, const ConvLayer &before, long examples) {
    for (long n = 0; n < examples; ++n) {
        for (long column = 0; column < layer.inputs; column += LANES) {
            const long at = n * before.output_size() + column;
            const long count = std::min<long>(LANES, layer.inputs - column);
            relu_grads(layer.grad_in.at(column, n), before.output + at, before.relu, count,
                       before.grad_out + at);
        }
    }
}

// Copies the filters to the layout of the forward kernel: (vector of outputs, value, output), or
// (value, output) along pixels.
void set_forward_weight(const ConvLayer &conv) {
    const long outputs = conv.along_pixels ? conv.outputs : LANES;
    const long block = conv.kernel_height * conv.run * LANES;
    for (long o = 0; o < conv.outputs; ++o) {
        const long first = conv.along_pixels ? o : o / LANES * block + o % LANES;
        float *to = conv.forward_weight + first;
        for (long y = 0; y < conv.kernel_height; ++y) {
            const float *from = conv.weight.weight + o * conv.filter + y * conv.run_padded;
            for (long k = 0; k < conv.run; ++k, to += outputs) *to = from[k];
        }
    }
}

// Updates the filters with the gradient of the whole batch; returns the value of their proximal
// terms.
double update_filters(const ConvLayer &conv, const Sgd &sgd) {
    for (long at = 0; at < conv.outputs * conv.filter; at += conv.run_padded) {
        // kernels read beyond the patch: the padding of a row has a gradient that means nothing
        std::fill(conv.grad + at + conv.run, conv.grad + at + conv.run_padded, 0.0f);
    }
    double proximal = update_tensor(conv.weight, conv.grad, conv.outputs * conv.filter, sgd);
    if (conv.has_bias) proximal += update_tensor(conv.bias, conv.bias_grad, conv.outputs, sgd);
    std::fill_n(conv.grad, conv.outputs * conv.filter, 0.0f);
    std::fill_n(conv.bias_grad, conv.outputs, 0.0f);
    set_forward_weight(conv);
    return proximal;
}

}  // namespace
