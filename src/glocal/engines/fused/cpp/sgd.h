// The update rule of SGD: momentum, weight decay and proximal terms.
#pragma once

#include "arena.h"
#include "vectors.h"

namespace {

constexpr long PREFETCH_DISTANCE = 32;  // in vectors of weights

struct Sgd {
    float lr, momentum, weight_decay;
};

// A trained tensor in a kernel's own layout. `velocity` is null without momentum, `anchor` is null
// without a proximal term.
struct TrainedTensor {
    float *weight = nullptr, *velocity = nullptr, *anchor = nullptr;
    float strength = 0;

    TrainedTensor() = default;
    TrainedTensor(Arena &arena, long count, const Sgd &sgd, bool has_anchor, double strength)
        : strength(float(strength)) {
        weight = arena.floats(count);
        if (sgd.momentum != 0) velocity = arena.floats(count);
        if (has_anchor) anchor = arena.floats(count);
    }
};

// The part of one vector's update that does not depend on its gradient: weight decay, proximal
// term and momentum. Adds the squared distance from the anchor to `distance`.
inline __attribute__((always_inline)) vec update_without_grad(
    const TrainedTensor &tensor, long at, vec weight, const Sgd &sgd, vec &distance) {
    vec update = sgd.weight_decay * weight;
    if (tensor.anchor) {
        const vec difference = weight - load(tensor.anchor + at);
        update += tensor.strength * difference;
        distance += difference * difference;
    }
    if (tensor.velocity) update += sgd.momentum * load(tensor.velocity + at);
    return update;
}

// Applies a whole update, which is also the new velocity, to one vector of weights.
inline __attribute__((always_inline)) vec apply_update(
    const TrainedTensor &tensor, long at, vec weight, vec update, const Sgd &sgd) {
    if (tensor.velocity) store(tensor.velocity + at, update);
    const vec updated = weight - sgd.lr * update;
    store(tensor.weight + at, updated);
    return updated;
}

// Loads weights ahead of their update: a core waits longer for its outer cache than it computes.
inline __attribute__((always_inline)) void prefetch(const TrainedTensor &tensor, long at) {
    __builtin_prefetch(tensor.weight + at + PREFETCH_DISTANCE * LANES, 1);
    if (tensor.velocity) __builtin_prefetch(tensor.velocity + at + PREFETCH_DISTANCE * LANES, 1);
}

// Updates a whole tensor; returns the value of its proximal term before the update.
double update_tensor(const TrainedTensor &tensor, const float *grad, long count, const Sgd &sgd) {
    vec distance{};
    for (long at = 0; at < count; at += LANES) {
        const vec weight = load(tensor.weight + at);
        const vec rest = update_without_grad(tensor, at, weight, sgd, distance);
        apply_update(tensor, at, weight, load(grad + at) + rest, sgd);
    }
    return tensor.strength / 2 * sum_lanes(distance);
}

}  // namespace
