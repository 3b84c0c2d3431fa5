"""The launches of one layer for many devices: forward, backward and update; none waits for the GPU."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.engines.fused import conv_kernels, kernels
from glocal.engines.fused.chain import Conv, Linear
from glocal.engines.fused.tiles import SMALL_BATCH, Choose, Job, Kind, Tile, power_of_two

_BLOCK = 1024  # pixels that a program takes at a time


class Round(NamedTuple):
    """What all launches share.

    rows and labels (D, steps, B) of every step (label -1 = padding), how many are real (D, steps), rates (D,), the optimiser's
    numbers, how dots round (Triton's word), and how jobs are cut.
    """

    rows: Tensor
    labels: Tensor
    counts: Tensor
    rates: Tensor
    momentum: float
    weight_decay: float
    precision: str
    choose: Choose

    @property
    def devices(self) -> int:
        """How many devices train."""
        return self.rows.shape[0]

    @property
    def batch(self) -> int:
        """Rows in a step, padding included."""
        return self.rows.shape[2]

    def tile(self, kind: Kind, rows: int, outputs: int, inputs: int) -> Tile:
        """How to cut this job."""
        return self.choose(Job(kind, self.devices, rows, outputs, inputs))

    def at(self, step: int) -> dict[str, Any]:
        """The arguments of a kernel that moves weights."""
        numbers = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        return {"counts": self.counts, "rates": self.rates, "step": step, "steps": self.rows.shape[1], **numbers}

    def empty(self, *shape: int) -> Tensor:
        """A tensor (D, B, shape) where the rates are."""
        return torch.empty(self.devices, self.batch, *shape, device=self.rates.device)


@dataclass
class Moving:
    """One trained tensor of all devices (D, ...): where it starts, where it is, its velocity, and what pulls it how strongly."""

    start: Tensor
    now: Tensor
    velocity: Tensor | None
    towards: Tensor | None
    strength: float

    def source(self, step: int) -> Tensor:
        """Where a step reads it: the first one from the caller's tensor, so that none is copied."""
        return self.start if step == 0 else self.now

    def at(self, step: int, name: str, prefix: str = "") -> dict[str, Any]:
        """A kernel's arguments for it; the kernel calls it by this name."""
        source = self.source(step)
        reads = {name: source, f"{name}_stride": source.stride(0), f"{name}_out": self.now, f"{prefix}v": self.velocity}
        pull = {f"{prefix}t": self.towards, f"{prefix}t_stride": 0 if self.towards is None else self.towards.stride(0)}
        return {**reads, **pull, f"{prefix}strength": self.strength}


_NO_BIAS = {
    **dict.fromkeys(("bias", "bias_out", "bias_v", "bias_t")),
    **dict.fromkeys(("bias_stride", "bias_t_stride"), 0),
    "bias_strength": 0.0,
}


@dataclass
class Layer(ABC):
    """One layer: from x (D, B, in), or from rows of the store x if `gathers`, to out (D, B, out); their slopes are dx and dy.

    dx is None where nothing before learns; x_is_rectified where x came out of a ReLU. drift (steps, D, programs) are shares of
    strength * ||w - t||^2, if something pulls.
    """

    round: Round
    weight: Moving
    bias: Moving | None
    x: Tensor
    gathers: bool
    dx: Tensor | None
    x_is_rectified: bool
    out: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    drift: Tensor | None = field(init=False, default=None)

    @abstractmethod
    def forward(self, step: int) -> None:
        """Fill `out`."""

    @abstractmethod
    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights."""

    @property
    def _rows(self) -> Tensor | None:
        return self.round.rows if self.gathers else None

    def _moving(self, step: int) -> dict[str, Any]:
        """What a kernel that moves weight and bias takes."""
        bias = _NO_BIAS if self.bias is None else self.bias.at(step, "bias", "bias_")
        return {**self.weight.at(step, "w"), **bias, **self.round.at(step)}

    def _bias(self, step: int) -> dict[str, Any]:
        """What a kernel that only reads the bias takes."""
        source = None if self.bias is None else self.bias.source(step)
        return {"bias": source, "bias_stride": 0 if source is None else source.stride(0)}

    def _drift(self, programs: int) -> Tensor | None:
        """Room for the shares of so many programs, made before the first step."""
        pulled = any(moving is not None and moving.towards is not None for moving in (self.weight, self.bias))
        if pulled and self.drift is None:
            devices, steps, _ = self.round.rows.shape
            self.drift = torch.empty(steps, devices, programs, device=self.x.device)
        return self.drift


@dataclass
class LinearLayer(Layer):
    """A linear layer, with a ReLU after it if the plan says so."""

    plan: Linear

    def __post_init__(self) -> None:
        self.out = self.round.empty(self.plan.outputs)
        self.dy = self.round.empty(self.plan.outputs)

    def forward(self, step: int) -> None:
        """Fill `out`."""
        weight, inputs = self.weight.source(step), self.plan.inputs
        strides = {"w_stride": weight.stride(0), "w_out_stride": inputs, "w_in_stride": 1}
        reads = {"x": self.x, "rows": self._rows, "w": weight, "keep": None, "out": self.out, **strides, **self._bias(step)}
        self._multiply(step, inputs, self.plan.outputs, **reads, RELU=self.plan.relu)

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights: in one pass over them where the batch is small."""
        if self.round.batch <= SMALL_BATCH:
            self._back_in_one(step)
            return
        if self.dx is not None:
            self._back(step, self.dx)
        self._update(step)

    def _back(self, step: int, dx: Tensor) -> None:
        """Dx = dy w where x was positive: forward with the weight's strides exchanged."""
        weight, inputs = self.weight.source(step), self.plan.inputs
        strides = {"w_stride": weight.stride(0), "w_out_stride": 1, "w_in_stride": inputs, "bias_stride": 0}
        keep = self.x if self.x_is_rectified else None
        reads = {"x": self.dy, "rows": None, "w": weight, "bias": None, "keep": keep, "out": dx, **strides}
        self._multiply(step, self.plan.outputs, inputs, **reads, RELU=False)

    def _multiply(self, step: int, inputs: int, outputs: int, **args: Any) -> None:
        tile = self.round.tile("forward", self.round.batch, outputs, inputs)
        grid = (_ceil(outputs, tile.outputs), self.round.devices, _ceil(self.round.batch, tile.rows))
        sizes = {"inputs": inputs, "outputs": outputs, "batch": self.round.batch, "step": step, "steps": self.round.rows.shape[1]}
        args |= {"counts": self.round.counts, "PRECISION": self.round.precision}
        kernels.linear_forward[grid](**args, **sizes, BB=tile.rows, **_blocks(tile))

    def _back_in_one(self, step: int) -> None:
        plan, batch = self.plan, self.round.batch
        tile = self.round.tile("backward", batch, plan.outputs, plan.inputs)
        # without a sum over all outputs to make, more programs may share them
        span = plan.outputs if self.dx is not None else _ceil(plan.outputs, 8 * tile.outputs) * tile.outputs
        grid = (_ceil(plan.inputs, tile.inputs), self.round.devices, _ceil(plan.outputs, span))
        reads = {"x": self.x, "rows": self._rows, "dy": self.dy, "dx": self.dx, "drift": self._drift(grid[0] * grid[2])}
        sizes = {"inputs": plan.inputs, "outputs": plan.outputs, "span": span, "BATCH": batch, "RELU": self.x_is_rectified}
        kernels.linear_backward[grid](**reads, **self._moving(step), **sizes, **_blocks(tile))

    def _update(self, step: int) -> None:
        plan, batch = self.plan, self.round.batch
        tile = self.round.tile("update", batch, plan.outputs, plan.inputs)
        grid = (_ceil(plan.inputs, tile.inputs), self.round.devices, _ceil(plan.outputs, tile.outputs))
        reads = {"x": self.x, "rows": self._rows, "dy": self.dy, "drift": self._drift(grid[0] * grid[2])}
        sizes = {"inputs": plan.inputs, "outputs": plan.outputs, "batch": batch, "PRECISION": self.round.precision}
        kernels.linear_update[grid](**reads, **self._moving(step), **sizes, BB=tile.rows, **_blocks(tile))


@dataclass
class LastLayer(LinearLayer):
    """The layer that gives the logits: forward leaves their slopes in dy and summed cross entropies in losses (steps, D, tiles)."""

    softmax: bool = False
    losses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dy = self.round.empty(self.plan.outputs)
        devices, steps, _ = self.round.rows.shape
        self.losses = torch.empty(steps, devices, _ceil(self.round.batch, self._tile.rows), device=self.x.device)

    @property
    def _tile(self) -> Tile:
        return self.round.tile("loss", self.round.batch, self.plan.outputs, self.plan.inputs)

    def forward(self, step: int) -> None:
        """Fill `dy` and `losses`."""
        plan, (rows, labels, counts, *_) = self.plan, self.round
        weight, tile = self.weight.source(step), self._tile
        reads = {"x": self.x, "rows": self._rows, "w": weight, "w_stride": weight.stride(0), "labels": labels, "counts": counts}
        sizes = {"inputs": plan.inputs, "outputs": plan.outputs, "batch": self.round.batch, "step": step, "steps": rows.shape[1]}
        writes = {"slopes": self.dy, "losses": self.losses, "SOFTMAX": self.softmax}
        grid = (1, self.round.devices, self.losses.shape[2])
        kernels.linear_loss[grid](
            **reads, **self._bias(step), **writes, **sizes, PRECISION=self.round.precision, BB=tile.rows, **_blocks(tile)
        )


@dataclass
class ConvLayer(Layer):
    """A convolution, with a ReLU and a max-pool if the plan says so, as one matrix product per image.

    columns (D, B, taps + 1, pixels) are what the kernel covers at every place, the last row ones; full (D, B, OC, H, W) is what
    comes before the pool; picked (like out) is where each maximum was; wide (D, B, OC, taps + 1) are weights and bias for every
    image, parts (like it) their slopes.
    """

    plan: Conv
    picked: Tensor | None = field(init=False, default=None)
    columns: Tensor = field(init=False)
    full: Tensor = field(init=False)
    wide: Tensor = field(init=False)
    parts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        channels, height, width = self.plan.outputs
        self.out = self.round.empty(*self.plan.pooled)
        self.dy = torch.empty_like(self.out)
        self.columns = self.round.empty(self._taps + 1, height * width)
        self.full = self.round.empty(channels, height, width)
        self.wide = self.round.empty(channels, self._taps + 1)
        self.parts = torch.empty_like(self.wide)
        if self.plan.pool > 1:
            self.picked = torch.empty_like(self.out, dtype=torch.uint8 if self.plan.pool < 16 else torch.int32)

    @property
    def _taps(self) -> int:
        """Weights of one output channel."""
        return self.plan.inputs[0] * math.prod(self.plan.kernel)

    @property
    def _shape(self) -> dict[str, Any]:
        """The sizes of the convolution, for a kernel."""
        plan = self.plan
        return {"SHAPE": (*plan.inputs, *plan.kernel, *plan.stride, *plan.padding), "OH": plan.outputs[1], "OW": plan.outputs[2]}

    @property
    def _pool(self) -> dict[str, Any]:
        """The sizes of the pool, for a kernel."""
        (_, height, width), (_, down, across) = self.plan.outputs, self.plan.pooled
        return {"H": height, "W": width, "OH": down, "OW": across, "POOL": self.plan.pool, "BLOCK": _BLOCK}

    def forward(self, step: int) -> None:
        """Fill `columns`, `full`, `out` and `picked`."""
        images, block = self.round.devices * self.round.batch, min(power_of_two(math.prod(self.plan.outputs[1:])), _BLOCK)
        where = {"rows": self._rows, "batch": self.round.batch, "step": step, "steps": self.round.rows.shape[1]}
        conv_kernels.unfold[images, self.plan.inputs[0] + 1](x=self.x, columns=self.columns, **where, **self._shape, BLOCK=block)
        self.wide[..., :-1] = self.weight.source(step).flatten(2)[:, None]
        self.wide[..., -1] = 0.0 if self.bias is None else self.bias.source(step)[:, None]
        torch.bmm(self.wide.flatten(0, 1), self.columns.flatten(0, 1), out=self.full.view(images, self.plan.outputs[0], -1))
        size = self.out.numel()
        conv_kernels.pool[(_ceil(size, _BLOCK),)](
            full=self.full, out=self.out, picked=self.picked, size=size, RELU=self.plan.relu, **self._pool
        )

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights; `full` and `columns` are written over by their slopes."""
        slopes = self._before_pool().view(self.round.devices * self.round.batch, self.plan.outputs[0], -1)
        torch.bmm(slopes, self.columns.flatten(0, 1).transpose(1, 2), out=self.parts.flatten(0, 1))
        if self.dx is not None:
            self._back(slopes, self.dx)
        self._update(step)

    def _before_pool(self) -> Tensor:
        """The slopes (D, B, OC, H, W) of what comes before the pool."""
        if self.picked is None:
            return self.dy
        size = self.full.numel()
        conv_kernels.unpool[(_ceil(size, _BLOCK),)](dy=self.dy, picked=self.picked, dfull=self.full, size=size, **self._pool)
        return self.full

    def _back(self, slopes: Tensor, dx: Tensor) -> None:
        torch.bmm(self.wide.flatten(0, 1).transpose(1, 2), slopes, out=self.columns.flatten(0, 1))
        size, rectified = dx.numel(), self.x_is_rectified
        conv_kernels.fold[(_ceil(size, _BLOCK),)](
            columns=self.columns, x=self.x, dx=dx, size=size, RELU=rectified, **self._shape, BLOCK=_BLOCK
        )

    def _update(self, step: int) -> None:
        channels, block = self.plan.outputs[0], 256
        grid = (_ceil(channels * self._taps, block), self.round.devices)
        sizes = {"TAPS": self._taps, "OC": channels, "BLOCK": block, "BIAS_BLOCK": power_of_two(channels)}
        reads = {"parts": self.parts, "splits": self.round.batch, "drift": self._drift(grid[0])}
        conv_kernels.conv_update[grid](**reads, **self._moving(step), **sizes)


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BN": tile.outputs, "BK": tile.inputs, "STAGES": tile.stages, "num_warps": tile.warps}


def _ceil(number: int, by: int) -> int:
    return -(-number // by)
