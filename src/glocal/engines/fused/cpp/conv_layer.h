// A convolution with its ReLU and max-pool: sizes, memory, and images with padding.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "arena.h"
#include "job.h"
#include "sgd.h"
#include "vectors.h"

namespace {

// Images are (height, width, channels): a row of a filter is then contiguous in the image. A patch
// is the part of the padded image under a filter; its start is the offset of its first value.
// "Conv output" is the output before the pool, without the rows and columns that no window covers.
struct ConvLayer {
    long channels, height, width, outputs;
    long kernel_height, kernel_width, stride_height, pad_height, pad_width, pool;
    bool relu, is_first_layer, has_bias;
    long padded_height, padded_width;
    long row;                              // values in a row of the padded image
    long run, run_padded;                  // values in a row of a filter, and in whole vectors
    long filter;                           // values in a filter of padded rows
    long conv_height, conv_width;          // of the conv output
    long pooled_width, pooled_pixels;      // after the pool
    bool along_pixels;                     // forward in vectors of pixels instead of channels
    long plane;                            // values in a plane of the conv output, if along pixels
    std::vector<std::int32_t> starts;      // patch start of each pixel of the conv output
    std::vector<std::int32_t> pixel_of;    // the inverse: pixel of the conv output by patch start
    std::vector<std::int32_t> taps;        // offsets of a filter's values in padded planes
    TrainedTensor weight, bias;            // weight: (outputs, filter)
    float *grad, *bias_grad;               // summed over the batch
    float *forward_weight;                 // the filters in the layout of the forward kernel
    float *output, *grad_out;              // (batch, pooled_pixels, outputs)
    std::int32_t *argmax;                  // patch start of the pool's maximum, for all of `output`
    long argmax_pixel_stride, argmax_output_stride;
    float *padded_input, *padded_planes;   // one image, as pixels and as planes
    float *conv_output;                    // one image
    float *pooled_row;
    float *padded_grad_in;                 // one image
    float *nonzero_grads;                  // one image: (conv pixel, list of nonzero gradients)
    std::int32_t *nonzero_filters;         // (like nonzero_grads) offset of each gradient's filter
    std::int32_t *nonzero_counts;          // length of each pixel's list

    ConvLayer(Arena &arena, const LayerSpec &spec, const Sgd &sgd, long batch_size,
              bool is_first_layer);

    long input_size() const { return channels * height * width; }
    long output_size() const { return pooled_pixels * outputs; }

private:
    void set_sizes(const LayerSpec &spec);
    void set_offsets(const LayerSpec &spec);
};

void ConvLayer::set_sizes(const LayerSpec &spec) {
    padded_height = height + 2 * pad_height, padded_width = width + 2 * pad_width;
    row = padded_width * channels;
    run = kernel_width * channels, run_padded = round_up(run);
    filter = kernel_height * run_padded;
    const long full_height = (padded_height - kernel_height) / spec.stride_height + 1;
    const long full_width = (padded_width - kernel_width) / spec.stride_width + 1;
    const long pooled_height = full_height / pool;
    pooled_width = full_width / pool;
    pooled_pixels = pooled_height * pooled_width;
    conv_height = pooled_height * pool, conv_width = pooled_width * pool;
    plane = round_up((conv_height - 1) * padded_width + conv_width);
    // compares idle lanes: channels beyond the last one, or pixels beyond the end of a row
    const bool is_dense = spec.stride_height == 1 && spec.stride_width == 1;
    along_pixels = is_dense && outputs * plane < round_up(outputs) * conv_height * conv_width;
}

void ConvLayer::set_offsets(const LayerSpec &spec) {
    pixel_of.resize(padded_height * row);
    for (long y = 0; y < conv_height; ++y) {
        for (long x = 0; x < conv_width; ++x) {
            const long start = y * spec.stride_height * row + x * spec.stride_width * channels;
            pixel_of[start] = std::int32_t(starts.size());
            starts.push_back(std::int32_t(start));
        }
    }
    for (long y = 0; y < kernel_height; ++y) {
        for (long x = 0; x < kernel_width; ++x) {
            for (long c = 0; c < channels; ++c) {
                taps.push_back(std::int32_t((c * padded_height + y) * padded_width + x));
            }
        }
    }
}

ConvLayer::ConvLayer(Arena &arena, const LayerSpec &spec, const Sgd &sgd, long batch_size,
                     bool is_first_layer)
    : channels(spec.channels),
      height(spec.height),
      width(spec.width),
      outputs(spec.outputs),
      kernel_height(spec.kernel_height),
      kernel_width(spec.kernel_width),
      stride_height(spec.stride_height),
      pad_height(spec.pad_height),
      pad_width(spec.pad_width),
      pool(spec.pool),
      relu(spec.relu),
      is_first_layer(is_first_layer),
      has_bias(spec.bias) {
    set_sizes(spec);
    set_offsets(spec);
    const long conv_pixels = conv_height * conv_width, padded_size = padded_height * row;
    weight = TrainedTensor(arena, outputs * filter, sgd, spec.weight_anchor, spec.weight_strength);
    bias = TrainedTensor(arena, outputs, sgd, spec.bias_anchor, spec.bias_strength);
    grad = arena.floats(outputs * filter), bias_grad = arena.floats(outputs);
    forward_weight = arena.floats(round_up(outputs) * kernel_height * run);
    output = arena.floats(batch_size * output_size());
    grad_out = arena.floats(batch_size * output_size());
    argmax_pixel_stride = along_pixels ? 1 : round_up(outputs);
    argmax_output_stride = along_pixels ? pooled_pixels : 1;
    argmax = arena.allocate<std::int32_t>(batch_size * pooled_pixels * round_up(outputs));
    padded_input = arena.floats(padded_size), padded_planes = arena.floats(padded_size);
    const long conv_size = along_pixels ? outputs * plane : round_up(outputs) * conv_pixels;
    conv_output = arena.floats(conv_size + LANES);
    pooled_row = arena.floats(pooled_width);
    padded_grad_in = arena.floats(padded_size);
    nonzero_grads = arena.floats(conv_pixels * outputs);
    nonzero_filters = arena.allocate<std::int32_t>(conv_pixels * outputs);
    nonzero_counts = arena.allocate<std::int32_t>(conv_pixels);
}

// An image in any layout: value (c, y, x) is at c * channel_stride + y * row_stride +
// x * column_stride.
struct Image {
    const float *data;
    long channel_stride, row_stride, column_stride;
};

// Copies one row of an image from planes to pixels.
void interleave(const ConvLayer &conv, const float *from, long channel_stride, float *to) {
    if (conv.channels == 3) {  // colour images: a loop that compilers vectorise
        const float *red = from, *green = from + channel_stride, *blue = green + channel_stride;
        for (long x = 0; x < conv.width; ++x) {
            to[3 * x] = red[x], to[3 * x + 1] = green[x], to[3 * x + 2] = blue[x];
        }
        return;
    }
    for (long c = 0; c < conv.channels; ++c) {
        for (long x = 0; x < conv.width; ++x) {
            to[x * conv.channels + c] = from[c * channel_stride + x];
        }
    }
}

// The padded image as pixels; the image itself if it needs no change.
const float *pad_pixels(const ConvLayer &conv, const Image &image) {
    const bool in_order = image.channel_stride == 1 || conv.channels == 1;
    const bool is_padded = conv.pad_height != 0 || conv.pad_width != 0;
    if (in_order && !is_padded && !conv.is_first_layer) return image.data;
    for (long y = 0; y < conv.height; ++y) {
        const long padded_y = y + conv.pad_height;
        float *to = conv.padded_input + padded_y * conv.row + conv.pad_width * conv.channels;
        const float *from = image.data + y * image.row_stride;
        if (in_order) {
            std::memcpy(to, from, conv.width * conv.channels * sizeof(float));
        } else {
            interleave(conv, from, image.channel_stride, to);
        }
    }
    return conv.padded_input;
}

// The padded image as planes.
const float *pad_planes(const ConvLayer &conv, const Image &image) {
    for (long c = 0; c < conv.channels; ++c) {
        for (long y = 0; y < conv.height; ++y) {
            const long padded_y = c * conv.padded_height + y + conv.pad_height;
            float *to = conv.padded_planes + padded_y * conv.padded_width + conv.pad_width;
            const float *from = image.data + c * image.channel_stride + y * image.row_stride;
            if (image.column_stride == 1) {
                std::memcpy(to, from, conv.width * sizeof(float));
            } else {
                for (long x = 0; x < conv.width; ++x) to[x] = from[x * image.column_stride];
            }
        }
    }
    return conv.padded_planes;
}

}  // namespace
