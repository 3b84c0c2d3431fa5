"""What the Triton kernels share: reading rows and tiles, and the update rule of SGD.

Functions here are inlined into the kernels that call them. An argument that is None compiles away.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, assignment"

import triton
import triton.language as tl

# integers whose divisibility says nothing: a kernel is not compiled again for their values
UNSPECIALIZED = ["step", "steps", "batch", "span", "images", "bias_stride", "bias_anchor_stride"]


@triton.jit
def rows_at(x, rows, client, step, steps, batch, b, inputs):
    """Pointers to the rows b: in the store x by `rows` (clients, steps, batch), or in activations.

    Without `rows`, x is (clients, batch, inputs).
    """
    return x + _row(rows, client, step, steps, batch, b).to(tl.int64) * inputs


@triton.jit
def _row(rows, client, step, steps, batch, b):
    """The rows of the examples b, in the store or in activations."""
    if rows is not None:  # noqa: SIM108 (Triton compiles away only a statement)
        row = _load_row(rows, client, step, steps, batch, b)
    else:
        row = client * batch + b
    return row


@triton.jit
def _load_row(rows, client, step, steps, batch, b):
    """The rows of the examples b in the store."""
    return tl.load(rows + (client * steps + step) * batch + b, mask=b < batch, other=0)


@triton.jit
def if_real(counts, client, step, steps, amount):
    """The amount of work, or 0 in a step that is all padding; counts (clients, steps)."""
    return tl.where(tl.load(counts + client * steps + step) > 0, amount, 0)


@triton.jit
def outer_mask(rows_ok, columns_ok):
    """Which numbers of a tile exist (rows, columns)."""
    return rows_ok[:, None] & columns_ok[None, :]


@triton.jit
def update(w, grad, at, ok, client, w_out, velocity, anchor, anchor_stride, size, step, hyper):
    """Update one tile of weights, old values w; returns squared distances to `anchor`.

    velocity = momentum velocity + gradient + weight_decay w + strength (w - anchor), and then
    w -= lr velocity. A padded step changes nothing. `at` are places inside a client's tensor of
    `size` numbers; hyper is (lr, momentum, weight_decay, strength, active).
    """
    lr, momentum, weight_decay, strength, active = hyper
    start = client.to(tl.int64) * size
    direction = grad + weight_decay * w
    distance = tl.zeros_like(w)
    if anchor is not None:
        difference = w - _load_anchor(anchor, client, anchor_stride, at, ok)
        direction += strength * difference
        distance = tl.where(ok, difference * difference, 0.0)
    if velocity is not None:
        direction = _add_momentum(direction, velocity + start + at, momentum, step, ok, active)
    tl.store(w_out + start + at, tl.where(active, w - lr * direction, w), mask=ok)
    return distance


@triton.jit
def _load_anchor(anchor, client, anchor_stride, at, ok):
    return tl.load(anchor + client.to(tl.int64) * anchor_stride + at, mask=ok, other=0.0)


@triton.jit
def _add_momentum(direction, velocity, momentum, step, ok, active):
    """The new velocity, which is stored unless the step is padding."""
    v = tl.load(velocity, mask=ok & (step > 0), other=0.0)  # uninitialised in the first step
    direction += momentum * v
    tl.store(velocity, tl.where(active, direction, v), mask=ok)
    return direction


@triton.jit
def load_bias(bias, bias_stride, client, n, ok):
    """The biases n of a client."""
    return tl.load(bias + client * bias_stride + n, mask=ok, other=0.0)


@triton.jit
def update_bias(
    bias, grad, n, ok, client, bias_out, bias_velocity, bias_anchor,
    bias_stride, bias_anchor_stride, size, step, hyper,
):  # fmt: skip
    """Update the biases n; returns squared distances to their anchor."""
    w = load_bias(bias, bias_stride, client, n, ok)
    return update(
        w, grad, n, ok, client, bias_out, bias_velocity, bias_anchor, bias_anchor_stride,
        size, step, hyper,
    )  # fmt: skip


@triton.jit
def store_proximal(proximal, step, value):
    """Store a program's part of strength ||w - anchor||^2 in (steps, clients, programs).

    Clients are on axis 1 of the grid.
    """
    place = client_place(step, tl.program_id(1), tl.program_id(2))
    tl.store(proximal + place.to(tl.int64) * tl.num_programs(0) + tl.program_id(0), value)


@triton.jit
def client_place(step, client, program):
    """The index (step, client, program of axis 2) in a contiguous array."""
    return (step * tl.num_programs(1) + client) * tl.num_programs(2) + program
