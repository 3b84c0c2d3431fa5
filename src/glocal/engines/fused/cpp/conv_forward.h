// The forward pass of a convolution.
//
// The conv output is computed in vectors of channels, or in vectors of pixels where that leaves
// fewer lanes idle. The pool also records where each maximum is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "conv_layer.h"

namespace {

// Vectors of pixels that the kernel along pixels holds.
constexpr int PIXEL_VECTORS = MANY_REGISTERS ? 4 : 2;

// Conv output of P pixels and V vectors of channels, beginning at output `o`.
template <int P, int V>
void convolve_pixels(const ConvLayer &conv, const float *padded, long pixel, long o) {
    vec sums[P * V];
    const float *patch[P];
    unrolled<P>([&](auto p) { patch[p] = padded + conv.starts[pixel + p]; });
    unrolled<P * V>([&](auto i) { sums[i] = load(conv.bias.weight + o + i % V * LANES); });
    const long block = conv.kernel_height * conv.run * LANES;
    const float *w = conv.forward_weight + o / LANES * block;
    for (long y = 0; y < conv.kernel_height; ++y) {
        for (long k = 0; k < conv.run; ++k, w += LANES) {
            vec weights[V];
            unrolled<V>([&](auto v) { weights[v] = load(w + v * block); });
            unrolled<P>([&](auto p) {
                const vec value = broadcast(patch[p][k]);
                unrolled<V>([&](auto v) { sums[p * V + v] += value * weights[v]; });
            });
        }
        unrolled<P>([&](auto p) { patch[p] += conv.row; });
    }
    float *to = conv.conv_output + pixel * round_up(conv.outputs) + o;
    unrolled<P>([&](auto p) {
        unrolled<V>([&](auto v) {
            store(to + p * round_up(conv.outputs) + v * LANES, sums[p * V + v]);
        });
    });
}

// Conv output of M channels and S vectors of pixels. A row of pixels is as wide as the padded
// image; its end is not used.
template <int M, int S>
void convolve_channels(const ConvLayer &conv, const float *planes, long pixel, long o) {
    vec sums[M * S];
    unrolled<M * S>([&](auto i) { sums[i] = broadcast(conv.bias.weight[o + i / S]); });
    const float *w = conv.forward_weight + o;
    for (const std::int32_t tap : conv.taps) {
        vec values[S];
        unrolled<S>([&](auto s) { values[s] = load(planes + tap + pixel + s * LANES); });
        unrolled<M>([&](auto m) {
            const vec weight = broadcast(w[m]);
            unrolled<S>([&](auto s) { sums[m * S + s] += weight * values[s]; });
        });
        w += conv.outputs;
    }
    unrolled<M * S>([&](auto i) {
        store(conv.conv_output + (o + i / S) * conv.plane + pixel + i % S * LANES, sums[i]);
    });
}

void convolve_in_channel_vectors(const ConvLayer &conv, const float *padded) {
    for_each_group(Sizes<2, 1>{}, round_up(conv.outputs) / LANES, [&](long vector, auto v) {
        for_each_group(GroupSizes{}, long(conv.starts.size()), [&](long pixel, auto p) {
            convolve_pixels<p, decltype(v)::value>(conv, padded, pixel, vector * LANES);
        });
    });
}

void convolve_in_pixel_vectors(const ConvLayer &conv, const float *planes) {
    for_each_group(Sizes<PIXEL_VECTORS, 1>{}, conv.plane / LANES, [&](long vector, auto s) {
        for_each_group(Sizes<6, 4, 2, 1>{}, conv.outputs, [&](long o, auto m) {
            convolve_channels<m, decltype(s)::value>(conv, planes, vector * LANES, o);
        });
    });
}

// Keeps the greater of two values and its place: the first of equal values, and a NaN above all,
// as torch does.
template <class Value, class Place>
inline void update_max(Value &best, Place &at, Value value, Place place) {
    const auto greater = (value > best) | (value != value);
    best = greater ? value : best;
    at = greater ? place : at;
}

// The maximum of each pool window and its patch start, in vectors of channels.
void pool_channel_vectors(const ConvLayer &conv, float *output, std::int32_t *argmax) {
    const long stride = round_up(conv.outputs);
    for (long place = 0; place < conv.pooled_pixels; ++place) {
        const long corner_y = place / conv.pooled_width * conv.pool;
        const long corner_x = place % conv.pooled_width * conv.pool;
        const long corner = corner_y * conv.conv_width + corner_x;
        for (long o = 0; o < conv.outputs; o += LANES) {
            vec best = load(conv.conv_output + corner * stride + o);
            int_vec at = conv.starts[corner] - int_vec{};
            for (long i = 1; i < conv.pool * conv.pool; ++i) {
                const long pixel = corner + i / conv.pool * conv.conv_width + i % conv.pool;
                const vec value = load(conv.conv_output + pixel * stride + o);
                update_max(best, at, value, conv.starts[pixel] - int_vec{});
            }
            best = apply_relu(best, conv.relu);
            const long count = std::min<long>(LANES, conv.outputs - o);
            std::memcpy(output + place * conv.outputs + o, &best, count * sizeof(float));
            std::memcpy(argmax + place * stride + o, &at, sizeof(at));
        }
    }
}

// A row of windows of side 2 in one plane: the maximum of each and its patch start. May write one
// vector beyond the end.
void pool_row_by_two(const ConvLayer &conv, const float *plane, std::int32_t start, float *best,
                     std::int32_t *argmax) {
    constexpr auto lanes = std::make_integer_sequence<int, LANES>{};
    const std::int32_t right = std::int32_t(conv.channels), down = std::int32_t(conv.row);
    int_vec corner = start + 2 * right * lane_indices(lanes);
    for (long i = 0; i < conv.pooled_width; i += LANES, corner += 2 * right * LANES) {
        const float *above = plane + 2 * i, *below = above + conv.padded_width;
        const vec a = load(above), b = load(above + LANES);
        const vec c = load(below), d = load(below + LANES);
        vec greatest = every_second<0>(a, b, lanes);
        int_vec at = corner;
        update_max(greatest, at, every_second<1>(a, b, lanes), corner + right);
        update_max(greatest, at, every_second<0>(c, d, lanes), corner + down);
        update_max(greatest, at, every_second<1>(c, d, lanes), corner + down + right);
        store(best + i, apply_relu(greatest, conv.relu));
        std::memcpy(argmax + i, &at, sizeof(at));
    }
}

// The same for windows of any side.
void pool_row(const ConvLayer &conv, const float *plane, std::int32_t start, float *best,
              std::int32_t *argmax) {
    const std::int32_t right = std::int32_t(conv.channels), down = std::int32_t(conv.row);
    for (long i = 0; i < conv.pooled_width; ++i) {
        const float *values = plane + i * conv.pool;
        const std::int32_t corner = start + std::int32_t(i * conv.pool) * right;
        float greatest = *values;
        std::int32_t at = corner;
        for (int y = 0; y < conv.pool; ++y) {
            for (int x = 0; x < conv.pool; ++x) {
                const float value = values[y * conv.padded_width + x];
                update_max(greatest, at, value, corner + y * down + x * right);
            }
        }
        best[i] = conv.relu && greatest < 0 ? 0 : greatest;
        argmax[i] = at;
    }
}

void pool_pixel_vectors(const ConvLayer &conv, float *output, std::int32_t *argmax) {
    const auto pool_one_row = conv.pool == 2 ? pool_row_by_two : pool_row;
    float *best = conv.pooled_row;
    for (long o = 0; o < conv.outputs; ++o) {
        for (long place = 0; place < conv.pooled_pixels; place += conv.pooled_width) {
            const long y = place / conv.pooled_width * conv.pool;
            const float *plane = conv.conv_output + o * conv.plane + y * conv.padded_width;
            std::int32_t *to = argmax + o * conv.pooled_pixels + place;
            pool_one_row(conv, plane, std::int32_t(y * conv.row), best, to);
            for (long i = 0; i < conv.pooled_width; ++i) {
                output[(place + i) * conv.outputs + o] = best[i];
            }
        }
    }
}

void forward(const ConvLayer &conv, const Image &image, long example) {
    float *output = conv.output + example * conv.output_size();
    std::int32_t *argmax = conv.argmax + example * conv.pooled_pixels * round_up(conv.outputs);
    if (conv.along_pixels) {
        convolve_in_pixel_vectors(conv, pad_planes(conv, image));
        pool_pixel_vectors(conv, output, argmax);
    } else {
        convolve_in_channel_vectors(conv, pad_pixels(conv, image));
        pool_channel_vectors(conv, output, argmax);
    }
}

}  // namespace
