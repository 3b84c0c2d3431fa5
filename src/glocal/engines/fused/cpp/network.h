// The layers as a network, and one step of SGD with it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "arena.h"
#include "conv_backward.h"
#include "conv_forward.h"
#include "input_layer.h"
#include "job.h"
#include "layouts.h"
#include "linear_layer.h"
#include "sgd.h"

namespace {

using Rows = std::vector<std::int64_t>;

// Either convolutions or one input layer, then linear layers.
struct Network {
    const Job &job;
    Sgd sgd;
    Arena arena;
    std::vector<ConvLayer> convs;
    std::vector<InputLayer> input_layers;  // none or one
    std::vector<LinearLayer> linear_layers;
    Panels logits;
    bool has_input_layer_output = false;  // for this step, computed in the step before

    explicit Network(const Job &job);
    double step(const Rows &rows, const Rows &next);
    void write_weights() const;

private:
    template <class Visit>
    void for_each_tensor(Visit visit) const;
    const LinearBase &last() const {
        if (linear_layers.empty()) return input_layers[0];
        return linear_layers.back();
    }
    const Panels &first_linear_input() const {
        return linear_layers.empty() ? logits : linear_layers[0].input;
    }
    Image input_of(const ConvLayer &conv, long row, long example) const;
    void forward_first_layers(const Rows &rows);
    void forward_all(const Rows &rows);
    double loss_and_grads(const Rows &rows);
    double backward_all(const Rows &rows, const Rows &next);
    void backward_convs(const Rows &rows);
    double backward_input_layer(long examples, const Rows &next);
};

Network::Network(const Job &job)
    : job(job), sgd{float(job.lr), float(job.momentum), float(job.weight_decay)} {
    for (long i = 0; i < job.layer_count; ++i) {
        const LayerSpec &spec = job.layers[i];
        if (spec.is_conv) {
            convs.emplace_back(arena, spec, sgd, job.batch_size, i == 0);
        } else if (i == 0) {
            input_layers.emplace_back(arena, spec, sgd, job.batch_size);
        } else {
            linear_layers.emplace_back(arena, spec, sgd, job.batch_size);
        }
    }
    for_each_tensor([](const LayerSpec &spec, const TrainedTensor &weight,
                       const TrainedTensor &bias, auto runs) {
        read_weight(weight, spec.weight, spec.weight_anchor, runs);
        read_bias(bias, spec);
    });
    for (const ConvLayer &conv : convs) set_forward_weight(conv);
    const long classes = round_up(last().outputs);
    logits = {arena.floats(classes * job.batch_size), classes, job.batch_size};
}

// Calls visit(spec, weight, bias, runs) layer by layer; `runs` calls its argument as for_each_run
// does.
template <class Visit>
void Network::for_each_tensor(Visit visit) const {
    const LayerSpec *spec = job.layers;
    for (const ConvLayer &conv : convs) {
        visit(*spec++, conv.weight, conv.bias, [&](auto each) { for_each_run(conv, each); });
    }
    for (const InputLayer &layer : input_layers) {
        visit(*spec++, layer.weight, layer.bias, [&](auto each) { for_each_run(layer, each); });
    }
    for (const LinearLayer &layer : linear_layers) {
        const bool follows_conv = &layer == &linear_layers[0] && !convs.empty();
        const long channels = follows_conv ? convs.back().outputs : 1;
        visit(*spec++, layer.weight, layer.bias,
              [&](auto each) { for_each_run(layer, channels, each); });
    }
}

// Overwrites the caller's weights with the trained ones.
void Network::write_weights() const {
    for_each_tensor([](const LayerSpec &spec, const TrainedTensor &weight,
                       const TrainedTensor &bias, auto runs) {
        write_weight(weight, spec.weight, runs);
        if (spec.bias) std::copy_n(bias.weight, spec.outputs, spec.bias);
    });
}

Image Network::input_of(const ConvLayer &conv, long row, long example) const {
    if (conv.is_first_layer) {
        return {job.x + row * conv.input_size(), conv.height * conv.width, conv.width, 1};
    }
    const ConvLayer &before = (&conv)[-1];
    const float *output = before.output + example * before.output_size();
    return {output, 1, conv.width * conv.channels, conv.channels};
}

// Copies examples to the layout of the input layer.
void read_examples(float *input, const InputLayer &layer, const float *x, const Rows &rows) {
    for (std::size_t n = 0; n < rows.size(); ++n) {
        const float *row = x + rows[n] * layer.inputs;
        for (long i = 0; i < layer.inputs; ++i) input[i * layer.batch_size + long(n)] = row[i];
    }
}

// Forward through the layers before the first LinearLayer.
void Network::forward_first_layers(const Rows &rows) {
    const Panels &to = first_linear_input();
    if (!input_layers.empty() && !has_input_layer_output) {
        read_examples(input_layers[0].input, input_layers[0], job.x, rows);
        forward(input_layers[0], long(rows.size()), to);
    }
    for (long n = 0; !convs.empty() && n < long(rows.size()); ++n) {
        for (const ConvLayer &conv : convs) forward(conv, input_of(conv, rows[n], n), n);
        const ConvLayer &conv = convs.back();
        copy_example(conv.output + n * conv.output_size(), conv.output_size(), to, n);
    }
}

void Network::forward_all(const Rows &rows) {
    forward_first_layers(rows);
    for (const LinearLayer &layer : linear_layers) {
        const bool is_last = &layer == &linear_layers.back();
        forward(layer, long(rows.size()), is_last ? logits : (&layer)[1].input);
    }
}

// The mean cross entropy and its gradient by the logits.
double Network::loss_and_grads(const Rows &rows) {
    const long examples = long(rows.size()), classes = last().outputs;
    double loss = 0;
    for (long n = 0; n < examples; ++n) {
        float *row = logits.at(0, n), sum = 0;
        const long label = job.y[rows[n]];
        const float greatest = *std::max_element(row, row + classes);
        const float label_logit = row[label] - greatest;
        for (long o = 0; o < classes; ++o) sum += row[o] = std::exp(row[o] - greatest);
        loss += std::log(sum) - label_logit;
        for (long o = 0; o < classes; ++o) {
            const float target = float(o == label);
            *last().grad_out.at(o, n) = (row[o] / sum - target) / float(examples);
        }
    }
    return loss / double(examples);
}

// Updates the input layer. If one group holds all examples, the same pass computes the layer's
// output for the next step.
double Network::backward_input_layer(long examples, const Rows &next) {
    InputLayer &layer = input_layers[0];
    has_input_layer_output =
        long(next.size()) == examples && is_one_group(GroupSizes{}, examples);
    if (!has_input_layer_output) return backward(layer, examples, sgd, {});
    read_examples(layer.next_input, layer, job.x, next);
    const double proximal = backward(layer, examples, sgd, first_linear_input());
    std::swap(layer.input, layer.next_input);
    return proximal;
}

// Adds up the gradients of all filters.
void Network::backward_convs(const Rows &rows) {
    for (long n = 0; n < long(rows.size()); ++n) {
        for (long i = long(convs.size()) - 1; i >= 0; --i) {
            backward(convs[i], input_of(convs[i], rows[n], n), n);
            if (i > 0) propagate_grad(convs[i], convs[i - 1], n);
        }
    }
}

// Updates all weights; returns the value of the proximal terms before the update.
double Network::backward_all(const Rows &rows, const Rows &next) {
    const long examples = long(rows.size());
    double proximal = 0;
    for (long i = long(linear_layers.size()) - 1; i >= 0; --i) {
        proximal += backward(linear_layers[i], examples, sgd);
        if (i > 0) propagate_grad(linear_layers[i], linear_layers[i - 1], examples);
    }
    if (!input_layers.empty()) {
        if (!linear_layers.empty()) propagate_grad(linear_layers[0], input_layers[0]);
        return proximal + backward_input_layer(examples, next);
    }
    propagate_grad(linear_layers[0], convs.back(), examples);
    backward_convs(rows);
    for (const ConvLayer &conv : convs) proximal += update_filters(conv, sgd);
    return proximal;
}

// One step; `next` are the rows of the next step. Returns the loss.
double Network::step(const Rows &rows, const Rows &next) {
    forward_all(rows);
    const double loss = loss_and_grads(rows);
    return loss + backward_all(rows, next) + job.proximal_floor;
}

}  // namespace
