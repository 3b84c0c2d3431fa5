"""Triton kernels that turn convolutions of many clients into matrix products, and back.

A tap is one (channel, row, column) of a convolution's kernel. After the last tap is one more that
is always 1: its weight is the bias. Images are (clients, batch, channels, height, width). There are
no atomics: the same call gives the same bits.
"""

# ruff: noqa: N803, N806 (constants of the compiler are in capitals, as usual with Triton)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

import triton
import triton.language as tl

from glocal.engines.fused.update_kernels import UNSPECIALIZED, store_proximal, update, update_bias


@triton.jit
def _unfold_channel(
    image, columns, place, top, left, ok, SHAPE: tl.constexpr, PIXELS: tl.constexpr
):  # fmt: skip
    """All taps of one channel at some places."""
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    for tap in tl.static_range(0, AREA):
        row, column = top + tap // SHAPE[4], left + tap % SHAPE[4]
        inside = ok & (row >= 0) & (row < H) & (column >= 0) & (column < W)
        values = tl.load(image + row * W + column, mask=inside, other=0.0)
        tl.store(columns + tap * PIXELS + place, values, mask=ok)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def unfold(
    x, rows, columns, batch, step, steps,
    SHAPE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns (clients, batch, taps + 1, OH * OW): the inputs under the kernel at every place.

    A program writes one channel, or the last row, which is ones. SHAPE is (C, H, W, KH, KW, SH, SW,
    PH, PW): inputs, kernel, stride, padding.
    """
    C: tl.constexpr = SHAPE[0]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    PIXELS: tl.constexpr = OH * OW
    image, channel = tl.program_id(0), tl.program_id(1)
    source = image.to(tl.int64)
    if rows is not None:
        source = tl.load(rows + (image // batch * steps + step) * batch + image % batch)
    start = x + (source * C + channel) * (SHAPE[1] * SHAPE[2])
    to = columns + (image.to(tl.int64) * (C * AREA + 1) + channel * AREA) * PIXELS
    for first in tl.range(0, PIXELS, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < PIXELS
        if channel == C:
            tl.store(to + place, tl.full([BLOCK], 1.0, tl.float32), mask=ok)
        else:
            top, left = place // OW * SHAPE[5] - SHAPE[7], place % OW * SHAPE[6] - SHAPE[8]
            _unfold_channel(start, to, place, top, left, ok, SHAPE, PIXELS)


@triton.jit
def _block(BLOCK: tl.constexpr):
    """The indices of this program's block."""
    return tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _window_maximum(start, ok, W: tl.constexpr, POOL: tl.constexpr, BLOCK: tl.constexpr):
    """The first maximum of each window (BLOCK,), and its place."""
    best = tl.load(start, mask=ok, other=0.0)
    best_place = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(1, POOL * POOL):
        value = tl.load(start + place // POOL * W + place % POOL, mask=ok, other=0.0)
        better = (value > best) | (value != value)  # a NaN stays a NaN
        best = tl.where(better, value, best)
        best_place = tl.where(better, place, best_place)
    return best, best_place


@triton.jit
def pool(
    full, out, argmax, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Out (..., OH, OW): the first maximum of each window of full (..., H, W), through a ReLU.

    argmax (like out) is its place in the window.
    """
    at = _block(BLOCK)
    ok = at < size
    pixel = at % (OH * OW)
    start = full + at // (OH * OW) * (H * W) + pixel // OW * (POOL * W) + pixel % OW * POOL
    best, best_place = _window_maximum(start, ok, W, POOL, BLOCK)
    if RELU:
        best = tl.where(best < 0, 0.0, best)
    tl.store(out + at, best, mask=ok)
    if argmax is not None:
        tl.store(argmax + at, best_place.to(argmax.dtype.element_ty), mask=ok)


@triton.jit
def unpool(
    dy, argmax, dfull, size,
    H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Dfull (..., H, W): each window's gradient at its maximum, 0 elsewhere."""
    at = _block(BLOCK)
    row, column = at % (H * W) // W, at % W
    ok = (at < size) & (row // POOL < OH) & (column // POOL < OW)
    window = at // (H * W) * (OH * OW) + row // POOL * OW + column // POOL
    place = row % POOL * POOL + column % POOL
    tl.store(dfull + at, _grad_at_maximum(dy, argmax, window, place, ok), mask=at < size)


@triton.jit
def _grad_at_maximum(dy, argmax, window, place, ok):
    """The window's gradient where `place` is its maximum, else 0."""
    is_maximum = tl.load(argmax + window, mask=ok, other=-1) == place
    return tl.load(dy + window, mask=ok & is_maximum, other=0.0)


@triton.jit
def _covers(ok, down, right, y, x, SHAPE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr):
    """Whether place (y, x) exists and its kernel begins at (down, right)."""
    exists = ok & (down >= 0) & (right >= 0) & (y < OH) & (x < OW)
    return exists & (down % SHAPE[5] == 0) & (right % SHAPE[6] == 0)


@triton.jit
def fold(
    columns, x, dx, size,
    SHAPE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Dx (clients, batch, C, H, W): a pixel's gradients, summed over all places that cover it.

    With RELU, x is the output of a ReLU, and its zeros block the gradient.
    """
    C: tl.constexpr = SHAPE[0]
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    at = _block(BLOCK)
    ok = at < size
    row, column, channel = at % (H * W) // W, at % W, at // (H * W) % C
    start = columns + (at // (C * H * W) * (C * AREA + 1) + channel * AREA) * (OH * OW)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(0, AREA):
        down, right = row + SHAPE[7] - tap // SHAPE[4], column + SHAPE[8] - tap % SHAPE[4]
        y, xx = down // SHAPE[5], right // SHAPE[6]
        inside = _covers(ok, down, right, y, xx, SHAPE, OH, OW)
        total += tl.load(start + tap * (OH * OW) + y * OW + xx, mask=inside, other=0.0)
    if RELU:
        total = tl.where(tl.load(x + at, mask=ok, other=0.0) > 0, total, 0.0)
    tl.store(dx + at, total, mask=ok)


@triton.jit
def _sum_image_grads(
    image_grads, client, images, at, ok, n, bias_ok,
    TAPS: tl.constexpr, OC: tl.constexpr, BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of the weights `at` (BLOCK,) and the biases n (BIAS_BLOCK,), image by image."""
    grad = tl.zeros([BLOCK], tl.float32)
    bias_grad = tl.zeros([BIAS_BLOCK], tl.float32)
    for image in tl.range(0, images):
        start = image_grads + (client * images + image).to(tl.int64) * (OC * (TAPS + 1))
        grad += tl.load(start + at // TAPS * (TAPS + 1) + at % TAPS, mask=ok, other=0.0)
        bias_grad += tl.load(start + n * (TAPS + 1) + TAPS, mask=bias_ok, other=0.0)
    return grad, bias_grad


@triton.jit(do_not_specialize=UNSPECIALIZED)
def conv_update(
    image_grads, w, w_out, velocity, anchor, bias, bias_out, bias_velocity, bias_anchor,
    counts, lrs, proximal, w_stride, anchor_stride, bias_stride, bias_anchor_stride,
    momentum, weight_decay, strength, bias_strength, step, steps, images,
    TAPS: tl.constexpr, OC: tl.constexpr, BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum image_grads (clients, images, OC, taps + 1) in order, and update the weights.

    The first program updates the biases.
    """
    client = tl.program_id(1)
    active = tl.load(counts + client * steps + step) > 0
    lr = tl.load(lrs + client)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < OC * TAPS
    n = tl.arange(0, BIAS_BLOCK)
    bias_ok = (n < OC) & (tl.program_id(0) == 0)
    grad, bias_grad = _sum_image_grads(
        image_grads, client, images, at, ok, n, bias_ok, TAPS, OC, BLOCK, BIAS_BLOCK
    )
    ws = tl.load(w + client.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
    hyper = (lr, momentum, weight_decay, strength, active)
    distance = update(
        ws, grad, at, ok, client, w_out, velocity, anchor, anchor_stride, OC * TAPS, step, hyper
    )
    bias_distance = tl.zeros([BIAS_BLOCK], tl.float32)
    if bias is not None:
        bias_hyper = (lr, momentum, weight_decay, bias_strength, active)
        bias_distance = update_bias(
            bias, bias_grad, n, bias_ok, client, bias_out, bias_velocity, bias_anchor,
            bias_stride, bias_anchor_stride, OC, step, bias_hyper,
        )  # fmt: skip
    if proximal is not None:
        value = strength * tl.sum(distance) + bias_strength * tl.sum(bias_distance)
        store_proximal(proximal, step, value)
