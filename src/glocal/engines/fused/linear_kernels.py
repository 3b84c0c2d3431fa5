"""Triton kernels that train linear layers of many clients, each with its own weights.

One launch serves one layer and one direction. Each number is written once and sums have a fixed
order (no atomics): the same call gives the same bits. Activations and their gradients are
(clients, batch, features), weights (clients, outputs, inputs).
"""

# ruff: noqa: N803, N806, SIM102 (constants of the compiler are in capitals, as usual with Triton)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, assignment"

import triton
import triton.language as tl

from glocal.engines.fused.update_kernels import (
    UNSPECIALIZED,
    client_place,
    if_real,
    load_bias,
    outer_mask,
    rows_at,
    store_proximal,
    update,
    update_bias,
)


@triton.jit
def _product(
    row, columns, b_ok, n_ok, inputs, w_in_stride, amount,
    PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """x w' (BB, BN) over the first `amount` inputs, from pointers to rows of x and of w."""
    total = tl.zeros([BB, BN], tl.float32)
    for first in tl.range(0, amount, BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        xs = tl.load(row[:, None] + k[None, :], mask=outer_mask(b_ok, k < inputs), other=0.0)
        places = columns[None, :] + k[:, None] * w_in_stride
        ws = tl.load(places, mask=outer_mask(k < inputs, n_ok), other=0.0)
        total = tl.dot(xs, ws, total, input_precision=PRECISION)
    return total


@triton.jit
def _add_bias(total, bias, bias_stride, client, n, n_ok):
    if bias is not None:
        total += load_bias(bias, bias_stride, client, n, n_ok)[None, :]
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_forward(
    x, rows, w, bias, relu_output, out, counts, inputs, outputs, batch,
    w_stride, w_out_stride, w_in_stride, bias_stride, step, steps,
    RELU: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out (clients, batch, outputs) = x w' + bias, then a ReLU.

    With the strides of w exchanged it computes the gradient dy w of the input; `relu_output` is
    then the ReLU's output whose zeros block the gradient.
    """
    client = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(2) * BB + tl.arange(0, BB)
    b_ok, n_ok = b < batch, n < outputs
    row = rows_at(x, rows, client, step, steps, batch, b, inputs)
    columns = w + client.to(tl.int64) * w_stride + n * w_out_stride
    amount = if_real(counts, client, step, steps, inputs)
    total = _product(
        row, columns, b_ok, n_ok, inputs, w_in_stride, amount, PRECISION, BB, BN, BK, STAGES
    )
    total = _add_bias(total, bias, bias_stride, client, n, n_ok)
    if RELU:
        total = tl.maximum(total, 0.0)
    _store_rectified(out, total, relu_output, client, batch, b, n, outputs)


@triton.jit
def _activation_places(client, batch, b, n, outputs):
    """The places (rows, columns) of activations (clients, batch, outputs)."""
    return (client * batch + b).to(tl.int64)[:, None] * outputs + n[None, :]


@triton.jit
def _store_rectified(out, values, relu_output, client, batch, b, n, outputs):
    """Store values; with `relu_output` they are gradients, which its zeros block."""
    at = _activation_places(client, batch, b, n, outputs)
    ok = outer_mask(b < batch, n < outputs)
    if relu_output is not None:
        values = tl.where(tl.load(relu_output + at, mask=ok, other=0.0) > 0, values, 0.0)
    tl.store(out + at, values, mask=ok)


@triton.jit
def _stable_exp(logits, n_ok):
    """The logits minus their maximum, their exponentials, and the sums of these."""
    logits = tl.where(n_ok[None, :], logits, float("-inf"))
    logits -= tl.max(logits, axis=1)[:, None]
    powers = tl.exp(logits)
    return logits, powers, tl.sum(powers, axis=1)


@triton.jit
def _softmax_backward(grad, output):
    return output * (grad - tl.sum(grad * output, axis=1)[:, None])


@triton.jit
def _cross_entropy(logits, hit, real, count, n_ok, SOFTMAX: tl.constexpr):
    """Cross entropies (rows,) and the gradient of their mean by the logits (rows, outputs).

    `hit` marks each row's label; `count` is the number of real rows. With SOFTMAX the logits pass
    two softmaxes: the model's own, and that of the cross entropy.
    """
    logits, powers, norm = _stable_exp(logits, n_ok)
    if SOFTMAX:
        logits = powers / norm[:, None]
        powers = tl.where(n_ok[None, :], tl.exp(logits), 0.0)
        norm = tl.sum(powers, axis=1)
    loss = tl.log(norm) - tl.sum(tl.where(hit, logits, 0.0), axis=1)
    grad = (powers / norm[:, None] - tl.where(hit, 1.0, 0.0)) / tl.maximum(count, 1).to(tl.float32)
    if SOFTMAX:
        grad = _softmax_backward(grad, logits)
    return tl.where(real, loss, 0.0), tl.where(real[:, None], grad, 0.0)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_loss(
    x, rows, w, bias, labels, counts, grads, losses, inputs, outputs, batch,
    w_stride, bias_stride, step, steps,
    SOFTMAX: tl.constexpr, PRECISION: tl.constexpr,
    BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The last layer with its cross entropy.

    Losses (steps, clients, tiles) are sums over a tile's rows; grads (clients, batch, outputs) are
    those of the mean by the logits. labels (clients, steps, batch) are -1 in padding; counts
    (clients, steps) are the real rows. A tile holds all logits of its rows.
    """
    client, tile = tl.program_id(1), tl.program_id(2)
    n = tl.arange(0, BN)
    b = tile * BB + tl.arange(0, BB)
    b_ok, n_ok = b < batch, n < outputs
    row = rows_at(x, rows, client, step, steps, batch, b, inputs)
    columns = w + client.to(tl.int64) * w_stride + n * inputs
    label = tl.load(labels + (client * steps + step) * batch + b, mask=b_ok, other=-1)
    count = tl.load(counts + client * steps + step)
    amount = if_real(counts, client, step, steps, inputs)
    logits = _product(row, columns, b_ok, n_ok, inputs, 1, amount, PRECISION, BB, BN, BK, STAGES)
    logits = _add_bias(logits, bias, bias_stride, client, n, n_ok)
    hit = n[None, :] == label[:, None]
    loss, grad = _cross_entropy(logits, hit, label >= 0, count, n_ok, SOFTMAX)
    tl.store(losses + client_place(step, client, tile), tl.sum(loss, axis=0))
    at = _activation_places(client, batch, b, n, outputs)
    tl.store(grads + at, grad, mask=outer_mask(b_ok, n_ok))


@triton.jit
def _output_grads(dy, client, b, n, ok, outputs, BATCH: tl.constexpr):
    """The gradients (outputs,) of the outputs n of example b."""
    return tl.load(dy + (client * BATCH + b).to(tl.int64) * outputs + n, mask=ok, other=0.0)


@triton.jit
def _update_bias_from(
    dy, bias, bias_out, bias_velocity, bias_anchor, bias_stride, bias_anchor_stride, begin, end,
    outputs, client, step, hyper, BATCH: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Update the biases begin .. end, LANES at a time; returns squared distances (LANES,)."""
    distance = tl.zeros([LANES], tl.float32)
    for first in tl.range(begin, end, LANES):
        n = first + tl.arange(0, LANES)
        ok = n < end
        grad = tl.zeros([LANES], tl.float32)
        for b in tl.static_range(BATCH):
            grad += _output_grads(dy, client, b, n, ok, outputs, BATCH)
        distance += update_bias(
            bias, grad, n, ok, client, bias_out, bias_velocity, bias_anchor,
            bias_stride, bias_anchor_stride, outputs, step, hyper,
        )  # fmt: skip
    return distance


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_backward(
    x, rows, dy, dx, w, w_out, velocity, anchor, bias, bias_out, bias_velocity, bias_anchor,
    counts, lrs, proximal, inputs, outputs,
    w_stride, anchor_stride, bias_stride, bias_anchor_stride,
    momentum, weight_decay, strength, bias_strength, step, steps, span,
    RELU: tl.constexpr, BATCH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The whole backward pass of a layer in one pass over w, for small batches.

    It computes the gradient of the inputs and updates velocity and weights; every sum is in
    registers. A program owns BK inputs and `span` outputs (all of them if there is a dx), BN at a
    time. With RELU, x is the output of a ReLU.
    """
    LANES: tl.constexpr = 128  # biases at a time
    client = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    k_ok = k < inputs
    count = tl.load(counts + client * steps + step)
    lr = tl.load(lrs + client)
    xs, sums = (), ()
    for b in tl.static_range(BATCH):
        row = rows_at(x, rows, client, step, steps, BATCH, b, inputs)
        xs = xs + (tl.load(row + k, mask=k_ok, other=0.0),)  # noqa: RUF005 (no unpacking in Triton)
        sums = sums + (tl.zeros([BN, BK], tl.float32),)  # noqa: RUF005
    distance = tl.zeros([BN, BK], tl.float32)
    bias_distance = tl.zeros([LANES], tl.float32)
    begin = tl.program_id(2) * span
    # the first step also copies the weights to w_out, where later steps read them
    end = tl.where((count > 0) | (step == 0), tl.minimum(begin + span, outputs), begin)
    hyper = (lr, momentum, weight_decay, strength, count > 0)
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        n = first + tl.arange(0, BN)
        at = n[:, None] * inputs + k[None, :]
        ok = outer_mask(n < outputs, k_ok)
        ws = tl.load(w + client.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
        grad = tl.zeros([BN, BK], tl.float32)
        new_sums = ()
        for b in tl.static_range(BATCH):
            g = _output_grads(dy, client, b, n, n < outputs, outputs, BATCH)
            grad += g[:, None] * xs[b][None, :]
            new_sums = new_sums + (sums[b] + g[:, None] * ws,)  # noqa: RUF005
        sums = new_sums
        distance += update(
            ws, grad, at, ok, client, w_out, velocity, anchor, anchor_stride,
            inputs * outputs, step, hyper,
        )  # fmt: skip
    if bias is not None:
        if tl.program_id(0) == 0:
            bias_hyper = (lr, momentum, weight_decay, bias_strength, count > 0)
            bias_distance = _update_bias_from(
                dy, bias, bias_out, bias_velocity, bias_anchor, bias_stride, bias_anchor_stride,
                begin, end, outputs, client, step, bias_hyper, BATCH, LANES,
            )  # fmt: skip
    if dx is not None:
        for b in tl.static_range(BATCH):
            total = tl.sum(sums[b], axis=0)
            if RELU:
                total = tl.where(xs[b] > 0, total, 0.0)
            tl.store(dx + (client * BATCH + b).to(tl.int64) * inputs + k, total, mask=k_ok)
    if proximal is not None:
        value = strength * tl.sum(distance) + bias_strength * tl.sum(bias_distance)
        store_proximal(proximal, step, value)


@triton.jit
def _transposed_grads(dy, client, batch, b, n, outputs):
    """The gradients dy' (outputs, rows) of the outputs n and rows b."""
    places = (client * batch + b).to(tl.int64)[None, :] * outputs + n[:, None]
    return tl.load(dy + places, mask=outer_mask(n < outputs, b < batch), other=0.0)


@triton.jit
def _grads_of_tile(
    x, rows, dy, client, step, steps, batch, k, n, inputs, outputs, amount,
    PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients dy' x (BN, BK) of a tile of weights, and those of its biases (BN,)."""
    grad = tl.zeros([BN, BK], tl.float32)
    bias_grad = tl.zeros([BN], tl.float32)
    for first in tl.range(0, amount, BB, num_stages=STAGES):
        b = first + tl.arange(0, BB)
        row = rows_at(x, rows, client, step, steps, batch, b, inputs)
        x_ok = outer_mask(b < batch, k < inputs)
        xs = tl.load(row[:, None] + k[None, :], mask=x_ok, other=0.0)
        g = _transposed_grads(dy, client, batch, b, n, outputs)
        grad = tl.dot(g, xs, grad, input_precision=PRECISION)
        bias_grad += tl.sum(g, axis=1)
    return grad, bias_grad


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_update(
    x, rows, dy, w, w_out, velocity, anchor, bias, bias_out, bias_velocity, bias_anchor,
    counts, lrs, proximal, inputs, outputs, batch,
    w_stride, anchor_stride, bias_stride, bias_anchor_stride,
    momentum, weight_decay, strength, bias_strength, step, steps,
    PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Velocity and weights from the gradients dy' x, for batches of any size.

    A program owns a tile of the weights.
    """
    client = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    active = tl.load(counts + client * steps + step) > 0
    grad, bias_grad = _grads_of_tile(
        x, rows, dy, client, step, steps, batch, k, n, inputs, outputs,
        tl.where(active, batch, 0), PRECISION, BB, BN, BK, STAGES,
    )  # fmt: skip
    lr = tl.load(lrs + client)
    at = n[:, None] * inputs + k[None, :]
    # the first step also copies the weights to w_out, where later steps read them
    writes = active | (step == 0)
    ok = outer_mask(n < outputs, k < inputs) & writes
    ws = tl.load(w + client.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
    hyper = (lr, momentum, weight_decay, strength, active)
    distance = update(
        ws, grad, at, ok, client, w_out, velocity, anchor, anchor_stride,
        inputs * outputs, step, hyper,
    )  # fmt: skip
    bias_distance = tl.zeros([BN], tl.float32)
    if bias is not None:
        bias_ok = (n < outputs) & (tl.program_id(0) == 0) & writes
        bias_hyper = (lr, momentum, weight_decay, bias_strength, active)
        bias_distance = update_bias(
            bias, bias_grad, n, bias_ok, client, bias_out, bias_velocity, bias_anchor,
            bias_stride, bias_anchor_stride, outputs, step, bias_hyper,
        )  # fmt: skip
    if proximal is not None:
        value = strength * tl.sum(distance) + bias_strength * tl.sum(bias_distance)
        store_proximal(proximal, step, value)
