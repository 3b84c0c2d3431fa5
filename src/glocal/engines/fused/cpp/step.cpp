// Trains one client: all steps of SGD on a chain of convolutions and linear layers, in one call and
// one thread.
//
// The client's weights, velocities and batch stay in the caches of one core. Two ideas make it
// fast:
// - a linear layer holds a group of examples in registers and passes over its weights once per
//   direction: a weight's gradient is summed and applied without ever going to memory;
// - a convolution's backward pass visits only the pixels that its max-pool selected.
//
// All headers of this folder are compiled with this file as one translation unit.

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <new>
#include <utility>
#include <vector>

#include "job.h"
#include "network.h"

namespace {

// cpu.py has a message for each.
enum Status { TRAINED = 0, ROW_OUT_OF_RANGE = 1, LABEL_OUT_OF_RANGE = 2, OUT_OF_MEMORY = 3 };

// Whether every row of the order exists and has a label that is a class of the network.
Status check(const Job &job) {
    const std::int64_t classes = job.layers[job.layer_count - 1].outputs;
    for (std::int64_t i = 0; i < job.steps * job.batch_size; ++i) {
        const std::int64_t row = job.order[i];
        if (row >= job.rows) return ROW_OUT_OF_RANGE;
        if (row >= 0 && (job.y[row] < 0 || job.y[row] >= classes)) return LABEL_OUT_OF_RANGE;
    }
    return TRAINED;
}

// The rows of each step without padding. A step that is all padding is the identity and left out.
std::vector<Rows> rows_of_steps(const Job &job) {
    std::vector<Rows> steps;
    for (std::int64_t step = 0; step < job.steps; ++step) {
        const std::int64_t *order = job.order + step * job.batch_size;
        Rows rows;
        std::copy_if(order, order + job.batch_size, std::back_inserter(rows),
                     [](std::int64_t row) { return row >= 0; });
        if (!rows.empty()) steps.push_back(std::move(rows));
    }
    return steps;
}

void train(Job &job) {
    Network network(job);
    const std::vector<Rows> steps = rows_of_steps(job);
    double total = 0, seen = 0;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        const double examples = double(steps[i].size());
        const Rows next = i + 1 < steps.size() ? steps[i + 1] : Rows{};
        total += network.step(steps[i], next) * examples;
        seen += examples;
    }
    network.write_weights();
    job.loss = total / std::max(seen, 1.0);
}

}  // namespace

extern "C" int glocal_train(Job *job) {
    try {
        const Status status = check(*job);
        if (status == TRAINED) train(*job);
        return status;
    } catch (const std::bad_alloc &) {
        return OUT_OF_MEMORY;
    }
}
