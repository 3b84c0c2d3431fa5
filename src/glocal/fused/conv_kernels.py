"""Triton kernels for the convolutions of many devices at once, each with its own weights: matrix products over gathered pixels.

Images are (D, B, channels, height, width). What leaves a layer is pooled; `picked` (like it) says which place of each window won.
A tap is one (channel, row, column) of a kernel. Nothing is added by atomics, so that the same call gives the same bits.
"""

# ruff: noqa: N803, N806 (a constant of the compiler is written in capitals, as Triton's users expect)
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator"

import triton
import triton.language as tl

from glocal.fused.kernels import VARIES, _store_drift, _update


@triton.jit
def _pixels(x, rows, device, step, steps, batch, b, y, xx, ok, taps, SHAPE: tl.constexpr):
    """The inputs under the kernel at output (y, xx) of image b, one per tap (taps, pixels); 1 for the tap after the last: the bias.

    SHAPE is (C, H, W, KH, KW, SH, SW, PH, PW): inputs, kernel, stride, padding. Pixels are along the last axis, as in memory.
    """
    C: tl.constexpr = SHAPE[0]
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    if rows is not None:
        image = tl.load(rows + (device * steps + step) * batch + b, mask=ok, other=0)
    else:
        image = (device * batch + b).to(tl.int64)
    top = y * SHAPE[5] - SHAPE[7]
    left = xx * SHAPE[6] - SHAPE[8]
    i = taps % AREA // SHAPE[4]
    j = taps % SHAPE[4]
    start = x + image * (C * H * W) + top * W + left
    inside = ok[None, :] & (taps < C * AREA)[:, None]
    if SHAPE[7] + SHAPE[8] > 0:
        row, column = top[None, :] + i[:, None], left[None, :] + j[:, None]
        inside = inside & (row >= 0) & (row < H) & (column >= 0) & (column < W)
    found = tl.load(start[None, :] + (taps // AREA * (H * W) + i * W + j)[:, None], mask=inside, other=0.0)
    return tl.where((taps == C * AREA)[:, None], 1.0, found)


@triton.jit(do_not_specialize=VARIES)
def conv_forward(
    x, rows, w, bias, out, picked, batch, w_stride, bias_stride, step, steps,
    SHAPE: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Out and picked (D, B, OC, OH, OW): convolve, add the bias, keep each window's first maximum, rectify. OH and OW are pooled.

    A program owns BB pooled pixels of a device's batch and BN channels; BK taps at a time.
    """
    TAPS: tl.constexpr = SHAPE[0] * SHAPE[3] * SHAPE[4]
    device = tl.program_id(1)
    m = tl.program_id(0) * BB + tl.arange(0, BB)
    n = tl.program_id(2) * BN + tl.arange(0, BN)
    ok = m < batch * (OH * OW)
    b, pixel = m // (OH * OW), m % (OH * OW)
    best = tl.full([BN, BB], float("-inf"), tl.float32)
    winner = tl.zeros([BN, BB], tl.int32)
    for place in tl.range(0, POOL * POOL):
        y, xx = pixel // OW * POOL + place // POOL, pixel % OW * POOL + place % POOL
        total = tl.zeros([BN, BB], tl.float32)
        for first in tl.range(0, TAPS, BK, num_stages=STAGES):
            taps = first + tl.arange(0, BK)
            xs = _pixels(x, rows, device, step, steps, batch, b, y, xx, ok, taps, SHAPE)
            at = device.to(tl.int64) * w_stride + n[:, None] * TAPS + taps[None, :]
            # the weight of the tap after the last is 0, so that no bias comes in by it
            ws = tl.load(w + at, mask=(taps < TAPS)[None, :] & (n < OC)[:, None], other=0.0)
            total = tl.dot(ws, xs, total, input_precision=PRECISION)
        better = total > best
        best = tl.where(better, total, best)
        winner = tl.where(better, place, winner)
    if bias is not None:
        best += tl.load(bias + device * bias_stride + n, mask=n < OC, other=0.0)[:, None]
    if RELU:
        best = tl.maximum(best, 0.0)
    at = ((device * batch + b).to(tl.int64) * (OC * OH * OW) + pixel)[None, :] + n[:, None] * (OH * OW)
    inside = ok[None, :] & (n < OC)[:, None]
    tl.store(out + at, best, mask=inside)
    if picked is not None:
        tl.store(picked + at, winner.to(picked.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARIES)
def conv_slopes(
    x, rows, dy, picked, parts, batch, span, step, steps,
    SHAPE: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Parts (D, splits, OC, taps + 1) of the slopes by the weights and, last, the bias: each of `span` pooled pixels of the batch.

    A program owns BN channels and BK taps of one part; BB pooled pixels at a time.
    """
    TAPS: tl.constexpr = SHAPE[0] * SHAPE[3] * SHAPE[4]
    device, split = tl.program_id(1), tl.program_id(2)
    blocks = tl.cdiv(TAPS + 1, BK)
    taps = tl.program_id(0) % blocks * BK + tl.arange(0, BK)
    n = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    slope = tl.zeros([BN, BK], tl.float32)
    for first in tl.range(split * span, tl.minimum((split + 1) * span, batch * (OH * OW)), BB):
        m = first + tl.arange(0, BB)
        ok = m < batch * (OH * OW)
        b, pixel = m // (OH * OW), m % (OH * OW)
        at = ((device * batch + b).to(tl.int64) * (OC * OH * OW) + pixel)[None, :] + n[:, None] * (OH * OW)
        inside = (n < OC)[:, None] & ok[None, :]
        g = tl.load(dy + at, mask=inside, other=0.0)
        if POOL == 1:
            xs = _pixels(x, rows, device, step, steps, batch, b, pixel // OW, pixel % OW, ok, taps, SHAPE)
            slope = tl.dot(g, tl.trans(xs), slope, input_precision=PRECISION)
        else:
            winner = tl.load(picked + at, mask=inside, other=0)
            for place in tl.range(0, POOL * POOL, num_stages=STAGES):
                y, xx = pixel // OW * POOL + place // POOL, pixel % OW * POOL + place % POOL
                xs = _pixels(x, rows, device, step, steps, batch, b, y, xx, ok, taps, SHAPE)
                slope = tl.dot(tl.where(winner == place, g, 0.0), tl.trans(xs), slope, input_precision=PRECISION)
    at = (device * tl.num_programs(2) + split).to(tl.int64) * (OC * (TAPS + 1)) + n[:, None] * (TAPS + 1) + taps[None, :]
    tl.store(parts + at, slope, mask=(n < OC)[:, None] & (taps <= TAPS)[None, :])


@triton.jit(do_not_specialize=VARIES)
def conv_update(
    parts, w, w_out, v, t, bias, bias_out, bias_v, bias_t, counts, rates, drift,
    w_stride, t_stride, bias_stride, bias_t_stride, momentum, weight_decay, strength, bias_strength, step, steps, splits,
    TAPS: tl.constexpr, OC: tl.constexpr, BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts (D, splits, OC, taps + 1) in order and move the weights by their sum; the first program moves the biases."""
    device = tl.program_id(1)
    active = tl.load(counts + device * steps + step) > 0
    rate = tl.load(rates + device)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = at < OC * TAPS
    n = tl.arange(0, BIAS_BLOCK)
    mine = (n < OC) & (tl.program_id(0) == 0)
    slope = tl.zeros([BLOCK], tl.float32)
    bias_slope = tl.zeros([BIAS_BLOCK], tl.float32)
    for split in tl.range(0, splits):
        part = parts + (device * splits + split).to(tl.int64) * (OC * (TAPS + 1))
        slope += tl.load(part + at // TAPS * (TAPS + 1) + at % TAPS, mask=ok, other=0.0)
        bias_slope += tl.load(part + n * (TAPS + 1) + TAPS, mask=mine, other=0.0)
    ws = tl.load(w + device.to(tl.int64) * w_stride + at, mask=ok, other=0.0)
    hyper = (rate, momentum, weight_decay, strength, active)
    away = _update(ws, slope, at, ok, device, w_out, v, t, t_stride, OC * TAPS, step, hyper)
    bias_away = tl.zeros([BIAS_BLOCK], tl.float32)
    if bias is not None:
        old = tl.load(bias + device * bias_stride + n, mask=mine, other=0.0)
        pace = (rate, momentum, weight_decay, bias_strength, active)
        bias_away = _update(old, bias_slope, n, mine, device, bias_out, bias_v, bias_t, bias_t_stride, OC, step, pace)
    if drift is not None:
        _store_drift(drift, step, strength * tl.sum(away) + bias_strength * tl.sum(bias_away))


@triton.jit(do_not_specialize=VARIES)
def conv_back(
    x, dy, picked, w, dx, batch, w_stride,
    SHAPE: tl.constexpr, OC: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, POOL: tl.constexpr,
    RELU: tl.constexpr, PRECISION: tl.constexpr, BB: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Dx (D, B, C, H, W), where x was positive if RELU.

    A program owns BB input pixels and BN input channels; BK output channels at a time.
    Taps are walked one by one, so that where a slope comes from is found once for all channels.
    """
    C: tl.constexpr = SHAPE[0]
    H: tl.constexpr = SHAPE[1]
    W: tl.constexpr = SHAPE[2]
    AREA: tl.constexpr = SHAPE[3] * SHAPE[4]
    device = tl.program_id(1)
    m = tl.program_id(0) * BB + tl.arange(0, BB)
    c = tl.program_id(2) * BN + tl.arange(0, BN)
    b, pixel = m // (H * W), m % (H * W)
    image = (device * batch + b).to(tl.int64)
    total = tl.zeros([BN, BB], tl.float32)
    for tap in tl.range(0, AREA):
        down, right = pixel // W + SHAPE[7] - tap // SHAPE[4], pixel % W + SHAPE[8] - tap % SHAPE[4]
        y, xx = down // SHAPE[5], right // SHAPE[6]
        ok = (m < batch * (H * W)) & (down >= 0) & (right >= 0) & (y < OH * POOL) & (xx < OW * POOL)
        ok = ok & (down % SHAPE[5] == 0) & (right % SHAPE[6] == 0)
        start = image * (OC * OH * OW) + y // POOL * OW + xx // POOL
        place = y % POOL * POOL + xx % POOL
        for first in tl.range(0, OC, BK, num_stages=STAGES):
            n = first + tl.arange(0, BK)
            inside = ok[None, :] & (n < OC)[:, None]
            at = start[None, :] + n[:, None] * (OH * OW)
            g = tl.load(dy + at, mask=inside, other=0.0)
            if POOL > 1:
                g = tl.where(tl.load(picked + at, mask=inside, other=0) == place[None, :], g, 0.0)
            where = device.to(tl.int64) * w_stride + n[None, :] * (C * AREA) + c[:, None] * AREA + tap
            ws = tl.load(w + where, mask=(n < OC)[None, :] & (c < C)[:, None], other=0.0)
            total = tl.dot(ws, g, total, input_precision=PRECISION)
    at = (image * (C * H * W) + pixel)[None, :] + c[:, None] * (H * W)
    inside = (m < batch * (H * W))[None, :] & (c < C)[:, None]
    if RELU:
        total = tl.where(tl.load(x + at, mask=inside, other=0.0) > 0, total, 0.0)
    tl.store(dx + at, total, mask=inside)
