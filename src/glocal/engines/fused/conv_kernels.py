"""Triton kernels around the convolutions of many devices at once: what turns them into matrix products, and back.

A tap is one (channel, row, column) of a convolution's kernel; after the last there is one more that is always 1: its weight is the
bias. Images are (D, B, channels, height, width). Nothing is added by atomics, so that the same call gives the same bits.
"""

# ruff: noqa: N803, N806 (a constant of the compiler is written in capitals, as Triton's users expect)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

import triton
import triton.language as tl

from glocal.engines.fused.linear_kernels import UNSPECIALIZED, _store_proximal, _update


@triton.jit(do_not_specialize=UNSPECIALIZED)
def unfold(
    x, rows, columns, batch, step, steps, SHAPE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Columns (D, B, taps + 1, OH * OW): what the kernel covers at every place, a channel in each program; then a row of ones.

    SHAPE is (C, H, W, KH, KW, SH, SW, PH, PW): inputs, kernel, stride, padding.
    """
    C: tl.constexpr = SHAPE[0]
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    image, channel = tl.program_id(0), tl.program_id(1)
    source = image.to(tl.int64)
    if rows is not None:
        source = tl.load(rows + (image // batch * steps + step) * batch + image % batch)
    here = x + (source * C + channel) * (H * W)
    there = columns + (image.to(tl.int64) * (C * AREA + 1) + channel * AREA) * (OH * OW)
    for first in tl.range(0, OH * OW, BLOCK):
        place = first + tl.arange(0, BLOCK)
        ok = place < OH * OW
        top, left = place // OW * SHAPE[5] - SHAPE[7], place % OW * SHAPE[6] - SHAPE[8]
        if channel == C:
            tl.store(there + place, tl.full([BLOCK], 1.0, tl.float32), mask=ok)
        else:
            for tap in tl.static_range(0, AREA):
                row, column = top + tap // SHAPE[4], left + tap % SHAPE[4]
                inside = ok & (row >= 0) & (row < H) & (column >= 0) & (column < W)
                found = tl.load(here + row * W + column, mask=inside, other=0.0)
                tl.store(there + tap * (OH * OW) + place, found, mask=ok)


@triton.jit
def pool(
    full, out, argmax, size, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    RELU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Out (..., OH, OW): the first maximum of each window of full (..., H, W), rectified; picked (like it) is its place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    pixel = at % (OH * OW)
    start = full + at // (OH * OW) * (H * W) + pixel // OW * (POOL * W) + pixel % OW * POOL
    best = tl.load(start, mask=ok, other=0.0)
    winner = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(1, POOL * POOL):
        value = tl.load(start + place // POOL * W + place % POOL, mask=ok, other=0.0)
        better = (value > best) | (value != value)  # what is not a number stays one
        best = tl.where(better, value, best)
        winner = tl.where(better, place, winner)
    if RELU:
        best = tl.where(best < 0, 0.0, best)
    tl.store(out + at, best, mask=ok)
    if argmax is not None:
        tl.store(argmax + at, winner.to(argmax.dtype.element_ty), mask=ok)


@triton.jit
def unpool(
    dy, argmax, dfull, size, H: tl.constexpr, W: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Dfull (..., H, W): each window's slope where its maximum was, 0 elsewhere."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at % (H * W) // W, at % W
    ok = (at < size) & (row // POOL < OH) & (column // POOL < OW)
    window = at // (H * W) * (OH * OW) + row // POOL * OW + column // POOL
    mine = tl.load(argmax + window, mask=ok, other=-1) == row % POOL * POOL + column % POOL
    tl.store(dfull + at, tl.load(dy + window, mask=ok & mine, other=0.0), mask=at < size)


@triton.jit
def fold(
    columns, x, dx, size, SHAPE: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, RELU: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Dx (D, B, C, H, W): the sum of a pixel's slopes over all places that covered it; 0 where x was not positive, if RELU."""
    C: tl.constexpr = SHAPE[0]
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = at < size
    row, column, channel = at % (H * W) // W, at % W, at // (H * W) % C
    start = columns + (at // (C * H * W) * (C * AREA + 1) + channel * AREA) * (OH * OW)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(0, AREA):
        down, right = row + SHAPE[7] - tap // SHAPE[4], column + SHAPE[8] - tap % SHAPE[4]
        y, xx = down // SHAPE[5], right // SHAPE[6]
        inside = (
            ok
            & (down >= 0)
            & (right >= 0)
            & (y < OH)
            & (xx < OW)
            & (down % SHAPE[5] == 0)
            & (right % SHAPE[6] == 0)
        )
        total += tl.load(start + tap * (OH * OW) + y * OW + xx, mask=inside, other=0.0)
    if RELU:
        total = tl.where(tl.load(x + at, mask=ok, other=0.0) > 0, total, 0.0)
    tl.store(dx + at, total, mask=ok)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def conv_update(
    parts, w, w_out, v, t, bias, bias_out, bias_v, bias_t, counts, lrs, proximal,
    w_stride, t_stride, bias_stride, bias_t_stride, momentum, weight_decay, strength, bias_strength, step, steps, splits,
    TAPS: tl.constexpr, OC: tl.constexpr, BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts (D, splits, OC, taps + 1) in order and move the weights by their sum; the first program moves the biases."""
    device = tl.program_id(1)
    active = tl.load(counts + device * steps + step) > 0
    lr = tl.load(lrs + device)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < OC * TAPS
    n = tl.arange(0, BIAS_BLOCK)
    mine = (n < OC) & (tl.program_id(0) == 0)
    grad = tl.zeros([BLOCK], tl.float32)
    bias_slope = tl.zeros([BIAS_BLOCK], tl.float32)
    for split in tl.range(0, splits):
        part = parts + (device * splits + split).to(tl.int64) * (OC * (TAPS + 1))
        grad += tl.load(part + at // TAPS * (TAPS + 1) + at % TAPS, mask=ok, other=0.0)
        bias_slope += tl.load(part + n * (TAPS + 1) + TAPS, mask=mine, other=0.0)
    ws = tl.load(w + device.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
    hyper = (lr, momentum, weight_decay, strength, active)
    away = _update(ws, grad, at, ok, device, w_out, v, t, t_stride, OC * TAPS, step, hyper)
    bias_away = tl.zeros([BIAS_BLOCK], tl.float32)
    if bias is not None:
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
            OC,
            step,
            pace,
        )
    if proximal is not None:
        _store_proximal(proximal, step, strength * tl.sum(away) + bias_strength * tl.sum(bias_away))
