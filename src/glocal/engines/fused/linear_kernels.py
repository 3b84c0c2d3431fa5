"""Triton kernels that train many devices at once, each with its own weights: one launch per layer and direction.

Every kernel writes each number once and adds in a fixed order (no atomics), so the same call gives the same bits. An argument that
is None compiles away. Shapes: D devices, B rows in a batch; activations and slopes are (D, B, features), weights (D, out, in).
"""

# ruff: noqa: N803, N806, SIM102 (a constant of the compiler is written in capitals, as Triton's users expect)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, assignment"

import triton
import triton.language as tl

# integers that say nothing about alignment: a kernel is not compiled anew for their values
UNSPECIALIZED = ["step", "steps", "batch", "span", "splits", "bias_stride", "bias_t_stride"]


@triton.jit
def _rows_at(x, rows, device, step, steps, batch, b, inputs):
    """Where each of the rows b starts: gathered from the store by `rows` (D, steps, B), or of an activation (D, B, inputs)."""
    if rows is not None:
        row = tl.load(rows + (device * steps + step) * batch + b, mask=b < batch, other=0)
    else:
        row = device * batch + b
    return x + row.to(tl.int64) * inputs


@triton.jit
def _if_real(counts, device, step, steps, amount):
    """The amount of work where a step has real rows, counts (D, steps); none in padding, which then costs next to nothing."""
    return tl.where(tl.load(counts + device * steps + step) > 0, amount, 0)


@triton.jit
def _update(w, grad, at, ok, device, w_out, velocity, anchor, t_stride, size, step, hyper):
    """Move one tile whose old weights are w; returns its squared distance to `anchor`, elementwise.

    pace = momentum * velocity + slope + weight decay * w + strength * (w - towards); w -= rate * pace. A padded step moves none.
    `at` is the place inside a device's tensor of `size` numbers; hyper is (rate, momentum, weight decay, strength, active).
    """
    lr, momentum, weight_decay, strength, active = hyper
    here = device.to(tl.int64) * size
    direction = grad + weight_decay * w
    away = tl.zeros_like(w)
    if anchor is not None:
        apart = w - tl.load(anchor + device.to(tl.int64) * t_stride + at, mask=ok, other=0.0)
        direction += strength * apart
        away = tl.where(ok, apart * apart, 0.0)
    if velocity is not None:
        v = tl.load(
            velocity + here + at, mask=ok & (step > 0), other=0.0
        )  # before the first step it holds nothing yet
        direction += momentum * v
        tl.store(velocity + here + at, tl.where(active, direction, v), mask=ok)
    tl.store(w_out + here + at, tl.where(active, w - lr * direction, w), mask=ok)
    return away


@triton.jit
def _store_proximal(proximal, step, value):
    """Keep a program's share of strength * ||w - t||^2 in drift (steps, D, programs of a device); its devices are on axis 1."""
    place = (step * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
    tl.store(proximal + place.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), value)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_forward(
    x, rows, w, bias, keep, out, counts, inputs, outputs, batch, w_stride, w_out_stride, w_in_stride, bias_stride, step, steps,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out (D, B, outputs) = x w' + bias, then a ReLU; or, with the strides of w exchanged, slopes dY W where `keep` is positive."""
    device = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    b = tl.program_id(2) * BB + tl.arange(0, BB)
    row = _rows_at(x, rows, device, step, steps, batch, b, inputs)
    columns = w + device.to(tl.int64) * w_stride + n * w_out_stride
    total = tl.zeros([BB, BN], tl.float32)
    for first in tl.range(0, _if_real(counts, device, step, steps, inputs), BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        xs = tl.load(
            row[:, None] + k[None, :], mask=(b < batch)[:, None] & (k < inputs)[None, :], other=0.0
        )
        ok = (k < inputs)[:, None] & (n < outputs)[None, :]
        ws = tl.load(columns[None, :] + k[:, None] * w_in_stride, mask=ok, other=0.0)
        total = tl.dot(xs, ws, total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + device * bias_stride + n, mask=n < outputs, other=0.0)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    at = (device * batch + b).to(tl.int64)[:, None] * outputs + n[None, :]
    ok = (b < batch)[:, None] & (n < outputs)[None, :]
    if keep is not None:
        total = tl.where(tl.load(keep + at, mask=ok, other=0.0) > 0, total, 0.0)
    tl.store(out + at, total, mask=ok)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_loss(
    x, rows, w, bias, labels, counts, grads, losses, inputs, outputs, batch, w_stride, bias_stride, step, steps,
    SOFTMAX: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The last layer, its cross entropy summed into losses (steps, D, tiles), and the mean's slopes by the logits (D, B, outputs).

    labels (D, steps, B) are -1 in padding; counts (D, steps) are the real rows; all logits of a row are in one tile. SOFTMAX: the
    cross entropy is given a softmax of the logits, and makes another of it.
    """
    device, tile = tl.program_id(1), tl.program_id(2)
    n = tl.arange(0, BN)
    b = tile * BB + tl.arange(0, BB)
    row = _rows_at(x, rows, device, step, steps, batch, b, inputs)
    columns = w + device.to(tl.int64) * w_stride + n * inputs
    label = tl.load(labels + (device * steps + step) * batch + b, mask=b < batch, other=-1)
    count = tl.load(counts + device * steps + step)
    logits = tl.zeros([BB, BN], tl.float32)
    for first in tl.range(0, _if_real(counts, device, step, steps, inputs), BK, num_stages=STAGES):
        k = first + tl.arange(0, BK)
        xs = tl.load(
            row[:, None] + k[None, :], mask=(b < batch)[:, None] & (k < inputs)[None, :], other=0.0
        )
        ws = tl.load(
            columns[None, :] + k[:, None],
            mask=(k < inputs)[:, None] & (n < outputs)[None, :],
            other=0.0,
        )
        logits = tl.dot(xs, ws, logits, input_precision=PRECISION)
    if bias is not None:
        logits += tl.load(bias + device * bias_stride + n, mask=n < outputs, other=0.0)[None, :]
    logits = tl.where((n < outputs)[None, :], logits, float("-inf"))
    logits -= tl.max(logits, axis=1)[:, None]
    powers = tl.exp(logits)
    norm = tl.sum(powers, axis=1)
    hit = n[None, :] == label[:, None]
    real = label >= 0
    if SOFTMAX:
        logits = powers / norm[:, None]
        powers = tl.where((n < outputs)[None, :], tl.exp(logits), 0.0)
        norm = tl.sum(powers, axis=1)
    loss = tl.log(norm) - tl.sum(tl.where(hit, logits, 0.0), axis=1)
    tl.store(
        losses + (step * tl.num_programs(1) + device) * tl.num_programs(2) + tile,
        tl.sum(tl.where(real, loss, 0.0), axis=0),
    )
    grad = (powers / norm[:, None] - tl.where(hit, 1.0, 0.0)) / tl.maximum(count, 1).to(tl.float32)
    if SOFTMAX:
        grad = logits * (grad - tl.sum(grad * logits, axis=1)[:, None])
    at = (device * batch + b).to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(
        grads + at,
        tl.where(real[:, None], grad, 0.0),
        mask=(b < batch)[:, None] & (n < outputs)[None, :],
    )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_backward(
    x, rows, dy, dx, w, w_out, v, t, bias, bias_out, bias_v, bias_t, counts, lrs, proximal, inputs, outputs,
    w_stride, t_stride, bias_stride, bias_t_stride, momentum, weight_decay, strength, bias_strength, step, steps, span,
    RELU: tl.constexpr, BATCH: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Slopes by the inputs, velocity and weights of a layer in one pass over w and v, for small batches: every sum is in registers.

    A program owns BK inputs and `span` outputs (all of them if there is a dx), BN at a time; RELU: x came out of one.
    """
    LANES: tl.constexpr = 128  # biases at a time
    device = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    count = tl.load(counts + device * steps + step)
    lr = tl.load(lrs + device)
    xs, sums = (), ()
    for b in tl.static_range(BATCH):
        row = _rows_at(x, rows, device, step, steps, BATCH, b, inputs)
        xs = xs + (tl.load(row + k, mask=k < inputs, other=0.0),)  # noqa: RUF005 (the compiler does not unpack)
        sums = sums + (tl.zeros([BN, BK], tl.float32),)  # noqa: RUF005
    away = tl.zeros([BN, BK], tl.float32)
    bias_away = tl.zeros([LANES], tl.float32)
    begin = tl.program_id(2) * span
    # the first step also brings the weights to where the others look for them
    end = tl.where((count > 0) | (step == 0), tl.minimum(begin + span, outputs), begin)
    for first in tl.range(begin, end, BN, num_stages=STAGES):
        n = first + tl.arange(0, BN)
        at = n[:, None] * inputs + k[None, :]
        ok = (n < outputs)[:, None] & (k < inputs)[None, :]
        ws = tl.load(w + device.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
        grad = tl.zeros([BN, BK], tl.float32)
        more = ()
        for b in tl.static_range(BATCH):
            g = tl.load(
                dy + (device * BATCH + b).to(tl.int64) * outputs + n, mask=n < outputs, other=0.0
            )
            grad += g[:, None] * xs[b][None, :]
            more = more + (sums[b] + g[:, None] * ws,)  # noqa: RUF005
        sums = more
        hyper = (lr, momentum, weight_decay, strength, count > 0)
        away += _update(
            ws, grad, at, ok, device, w_out, v, t, t_stride, inputs * outputs, step, hyper
        )
    if bias is not None:
        if tl.program_id(0) == 0:
            hyper = (lr, momentum, weight_decay, bias_strength, count > 0)
            for first in tl.range(begin, end, LANES):
                n = first + tl.arange(0, LANES)
                ok = n < end
                grad = tl.zeros([LANES], tl.float32)
                for b in tl.static_range(BATCH):
                    grad += tl.load(
                        dy + (device * BATCH + b).to(tl.int64) * outputs + n, mask=ok, other=0.0
                    )
                old = tl.load(bias + device * bias_stride + n, mask=ok, other=0.0)
                bias_away += _update(
                    old,
                    grad,
                    n,
                    ok,
                    device,
                    bias_out,
                    bias_v,
                    bias_t,
                    bias_t_stride,
                    outputs,
                    step,
                    hyper,
                )
    if dx is not None:
        for b in tl.static_range(BATCH):
            total = tl.sum(sums[b], axis=0)
            if RELU:
                total = tl.where(xs[b] > 0, total, 0.0)
            tl.store(dx + (device * BATCH + b).to(tl.int64) * inputs + k, total, mask=k < inputs)
    if proximal is not None:
        _store_proximal(proximal, step, strength * tl.sum(away) + bias_strength * tl.sum(bias_away))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def linear_update(
    x, rows, dy, w, w_out, v, t, bias, bias_out, bias_v, bias_t, counts, lrs, proximal, inputs, outputs, batch,
    w_stride, t_stride, bias_stride, bias_t_stride, momentum, weight_decay, strength, bias_strength, step, steps,
    PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Velocity and weights of a layer from its slopes dy' x, for batches of any size; a program owns a tile of the weights."""
    device = tl.program_id(1)
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    grad = tl.zeros([BN, BK], tl.float32)
    bias_slope = tl.zeros([BN], tl.float32)
    active = tl.load(counts + device * steps + step) > 0
    for first in tl.range(0, tl.where(active, batch, 0), BB, num_stages=STAGES):
        b = first + tl.arange(0, BB)
        row = _rows_at(x, rows, device, step, steps, batch, b, inputs)
        xs = tl.load(
            row[:, None] + k[None, :], mask=(b < batch)[:, None] & (k < inputs)[None, :], other=0.0
        )
        where = (device * batch + b).to(tl.int64)[None, :] * outputs + n[:, None]
        g = tl.load(dy + where, mask=(n < outputs)[:, None] & (b < batch)[None, :], other=0.0)
        grad = tl.dot(g, xs, grad, input_precision=PRECISION)
        bias_slope += tl.sum(g, axis=1)
    lr = tl.load(lrs + device)
    at = n[:, None] * inputs + k[None, :]
    moves = active | (
        step == 0
    )  # the first step also brings the weights to where the others look for them
    ok = (n < outputs)[:, None] & (k < inputs)[None, :] & moves
    ws = tl.load(w + device.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
    hyper = (lr, momentum, weight_decay, strength, active)
    away = _update(ws, grad, at, ok, device, w_out, v, t, t_stride, inputs * outputs, step, hyper)
    bias_away = tl.zeros([BN], tl.float32)
    if bias is not None:
        mine = (n < outputs) & (tl.program_id(0) == 0) & moves
        old = tl.load(bias + device * bias_stride + n, mask=mine, other=0.0)
        pace = (lr, momentum, weight_decay, bias_strength, active)
        bias_away = _update(
            old,
            bias_slope,
            n,
            mine,
            device,
            bias_out,
            bias_v,
            bias_t,
            bias_t_stride,
            outputs,
            step,
            pace,
        )
    if proximal is not None:
        _store_proximal(proximal, step, strength * tl.sum(away) + bias_strength * tl.sum(bias_away))
