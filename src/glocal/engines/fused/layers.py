"""The launches of one layer for many devices: forward, backward and update; none waits for the GPU."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.engines.fused import conv_kernels, linear_kernels
from glocal.engines.fused.layer_chain import ConvSpec, LinearSpec
from glocal.engines.fused.tiles import (
    SMALL_BATCH,
    KernelKind,
    KernelLaunch,
    Tile,
    TileChooser,
    power_of_two,
)

_BLOCK = 1024  # pixels that a program takes at a time


class LaunchContext(NamedTuple):
    """What all launches share.

    rows and labels (D, steps, B) of every step (label -1 = padding), how many are real (D, steps), rates (D,), the optimiser's
    numbers, how dots round (Triton's word), and how jobs are cut.
    """

    rows: Tensor
    labels: Tensor
    counts: Tensor
    lrs: Tensor
    momentum: float
    weight_decay: float
    precision: str
    choose_tile: TileChooser

    @property
    def clients(self) -> int:
        """How many devices train."""
        return self.rows.shape[0]

    @property
    def batch(self) -> int:
        """Rows in a step, padding included."""
        return self.rows.shape[2]

    def tile(self, kind: KernelKind, rows: int, outputs: int, inputs: int) -> Tile:
        """How to cut this job."""
        return self.choose_tile(KernelLaunch(kind, self.clients, rows, outputs, inputs))

    def step_args(self, step: int) -> dict[str, Any]:
        """The arguments of a kernel that moves weights."""
        numbers = {"momentum": self.momentum, "weight_decay": self.weight_decay}
        return {
            "counts": self.counts,
            "lrs": self.lrs,
            "step": step,
            "steps": self.rows.shape[1],
            **numbers,
        }

    def empty(self, *shape: int) -> Tensor:
        """A tensor (D, B, shape) where the rates are."""
        return torch.empty(self.clients, self.batch, *shape, device=self.lrs.device)


@dataclass
class TrainedTensor:
    """One trained tensor of all devices (D, ...): where it starts, where it is, its velocity, and what pulls it how strongly."""

    start: Tensor
    current: Tensor
    velocity: Tensor | None
    anchor: Tensor | None
    strength: float

    def source(self, step: int) -> Tensor:
        """Where a step reads it: the first one from the caller's tensor, so that none is copied."""
        return self.start if step == 0 else self.current

    def at(self, step: int, name: str, prefix: str = "") -> dict[str, Any]:
        """A kernel's arguments for it; the kernel calls it by this name."""
        source = self.source(step)
        reads = {
            name: source,
            f"{name}_stride": source.stride(0),
            f"{name}_out": self.current,
            f"{prefix}v": self.velocity,
        }
        pull = {
            f"{prefix}t": self.anchor,
            f"{prefix}t_stride": 0 if self.anchor is None else self.anchor.stride(0),
        }
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

    context: LaunchContext
    weight: TrainedTensor
    bias: TrainedTensor | None
    x: Tensor
    gathers: bool
    dx: Tensor | None
    x_is_rectified: bool
    out: Tensor = field(init=False)
    dy: Tensor = field(init=False)
    proximal: Tensor | None = field(init=False, default=None)

    @abstractmethod
    def forward(self, step: int) -> None:
        """Fill `out`."""

    @abstractmethod
    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights."""

    @property
    def _rows(self) -> Tensor | None:
        return self.context.rows if self.gathers else None

    def _update_args(self, step: int) -> dict[str, Any]:
        """What a kernel that moves weight and bias takes."""
        bias = _NO_BIAS if self.bias is None else self.bias.at(step, "bias", "bias_")
        return {**self.weight.at(step, "w"), **bias, **self.context.step_args(step)}

    def _bias(self, step: int) -> dict[str, Any]:
        """What a kernel that only reads the bias takes."""
        source = None if self.bias is None else self.bias.source(step)
        return {"bias": source, "bias_stride": 0 if source is None else source.stride(0)}

    def _proximal(self, programs: int) -> Tensor | None:
        """Room for the shares of so many programs, made before the first step."""
        pulled = any(
            moving is not None and moving.anchor is not None for moving in (self.weight, self.bias)
        )
        if pulled and self.proximal is None:
            clients, steps, _ = self.context.rows.shape
            self.proximal = torch.empty(steps, clients, programs, device=self.x.device)
        return self.proximal


@dataclass
class LinearLayer(Layer):
    """A linear layer, with a ReLU after it if the plan says so."""

    spec: LinearSpec

    def __post_init__(self) -> None:
        self.out = self.context.empty(self.spec.outputs)
        self.dy = self.context.empty(self.spec.outputs)

    def forward(self, step: int) -> None:
        """Fill `out`."""
        weight, inputs = self.weight.source(step), self.spec.inputs
        strides = {"w_stride": weight.stride(0), "w_out_stride": inputs, "w_in_stride": 1}
        reads = {
            "x": self.x,
            "rows": self._rows,
            "w": weight,
            "keep": None,
            "out": self.out,
            **strides,
            **self._bias(step),
        }
        self._multiply(step, inputs, self.spec.outputs, **reads, RELU=self.spec.relu)

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights: in one pass over them where the batch is small."""
        if self.context.batch <= SMALL_BATCH:
            self._back_in_one(step)
            return
        if self.dx is not None:
            self._back(step, self.dx)
        self._update(step)

    def _back(self, step: int, dx: Tensor) -> None:
        """Dx = dy w where x was positive: forward with the weight's strides exchanged."""
        weight, inputs = self.weight.source(step), self.spec.inputs
        strides = {
            "w_stride": weight.stride(0),
            "w_out_stride": 1,
            "w_in_stride": inputs,
            "bias_stride": 0,
        }
        keep = self.x if self.x_is_rectified else None
        reads = {
            "x": self.dy,
            "rows": None,
            "w": weight,
            "bias": None,
            "keep": keep,
            "out": dx,
            **strides,
        }
        self._multiply(step, self.spec.outputs, inputs, **reads, RELU=False)

    def _multiply(self, step: int, inputs: int, outputs: int, **args: Any) -> None:
        tile = self.context.tile("forward", self.context.batch, outputs, inputs)
        grid = (
            _ceil(outputs, tile.outputs),
            self.context.clients,
            _ceil(self.context.batch, tile.rows),
        )
        sizes = {
            "inputs": inputs,
            "outputs": outputs,
            "batch": self.context.batch,
            "step": step,
            "steps": self.context.rows.shape[1],
        }
        args |= {"counts": self.context.counts, "PRECISION": self.context.precision}
        linear_kernels.linear_forward[grid](**args, **sizes, BB=tile.rows, **_blocks(tile))

    def _back_in_one(self, step: int) -> None:
        spec, batch = self.spec, self.context.batch
        tile = self.context.tile("backward", batch, spec.outputs, spec.inputs)
        # without a sum over all outputs to make, more programs may share them
        span = (
            spec.outputs
            if self.dx is not None
            else _ceil(spec.outputs, 8 * tile.outputs) * tile.outputs
        )
        grid = (_ceil(spec.inputs, tile.inputs), self.context.clients, _ceil(spec.outputs, span))
        reads = {
            "x": self.x,
            "rows": self._rows,
            "dy": self.dy,
            "dx": self.dx,
            "proximal": self._proximal(grid[0] * grid[2]),
        }
        sizes = {
            "inputs": spec.inputs,
            "outputs": spec.outputs,
            "span": span,
            "BATCH": batch,
            "RELU": self.x_is_rectified,
        }
        linear_kernels.linear_backward[grid](
            **reads, **self._update_args(step), **sizes, **_blocks(tile)
        )

    def _update(self, step: int) -> None:
        spec, batch = self.spec, self.context.batch
        tile = self.context.tile("update", batch, spec.outputs, spec.inputs)
        grid = (
            _ceil(spec.inputs, tile.inputs),
            self.context.clients,
            _ceil(spec.outputs, tile.outputs),
        )
        reads = {
            "x": self.x,
            "rows": self._rows,
            "dy": self.dy,
            "proximal": self._proximal(grid[0] * grid[2]),
        }
        sizes = {
            "inputs": spec.inputs,
            "outputs": spec.outputs,
            "batch": batch,
            "PRECISION": self.context.precision,
        }
        linear_kernels.linear_update[grid](
            **reads, **self._update_args(step), **sizes, BB=tile.rows, **_blocks(tile)
        )


@dataclass
class LastLayer(LinearLayer):
    """The layer that gives the logits: forward leaves their slopes in dy and summed cross entropies in losses (steps, D, tiles)."""

    softmax: bool = False
    losses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.dy = self.context.empty(self.spec.outputs)
        clients, steps, _ = self.context.rows.shape
        self.losses = torch.empty(
            steps, clients, _ceil(self.context.batch, self._tile.rows), device=self.x.device
        )

    @property
    def _tile(self) -> Tile:
        return self.context.tile("loss", self.context.batch, self.spec.outputs, self.spec.inputs)

    def forward(self, step: int) -> None:
        """Fill `dy` and `losses`."""
        spec, (rows, labels, counts, *_) = self.spec, self.context
        weight, tile = self.weight.source(step), self._tile
        reads = {
            "x": self.x,
            "rows": self._rows,
            "w": weight,
            "w_stride": weight.stride(0),
            "labels": labels,
            "counts": counts,
        }
        sizes = {
            "inputs": spec.inputs,
            "outputs": spec.outputs,
            "batch": self.context.batch,
            "step": step,
            "steps": rows.shape[1],
        }
        writes = {"grads": self.dy, "losses": self.losses, "SOFTMAX": self.softmax}
        grid = (1, self.context.clients, self.losses.shape[2])
        linear_kernels.linear_loss[grid](
            **reads,
            **self._bias(step),
            **writes,
            **sizes,
            PRECISION=self.context.precision,
            BB=tile.rows,
            **_blocks(tile),
        )


@dataclass
class ConvLayer(Layer):
    """A convolution, with a ReLU and a max-pool if the plan says so, as one matrix product per image.

    columns (D, B, taps + 1, pixels) are what the kernel covers at every place, the last row ones; full (D, B, OC, H, W) is what
    comes before the pool; picked (like out) is where each maximum was; wide (D, B, OC, taps + 1) are weights and bias for every
    image, parts (like it) their slopes.
    """

    spec: ConvSpec
    argmax: Tensor | None = field(init=False, default=None)
    columns: Tensor = field(init=False)
    full: Tensor = field(init=False)
    image_weights: Tensor = field(init=False)
    image_grads: Tensor = field(init=False)

    def __post_init__(self) -> None:
        channels, height, width = self.spec.outputs
        self.out = self.context.empty(*self.spec.pooled)
        self.dy = torch.empty_like(self.out)
        self.columns = self.context.empty(self._taps + 1, height * width)
        self.full = self.context.empty(channels, height, width)
        self.image_weights = self.context.empty(channels, self._taps + 1)
        self.image_grads = torch.empty_like(self.image_weights)
        if self.spec.pool > 1:
            self.argmax = torch.empty_like(
                self.out, dtype=torch.uint8 if self.spec.pool < 16 else torch.int32
            )

    @property
    def _taps(self) -> int:
        """Weights of one output channel."""
        return self.spec.inputs[0] * math.prod(self.spec.kernel)

    @property
    def _shape(self) -> dict[str, Any]:
        """The sizes of the convolution, for a kernel."""
        spec = self.spec
        return {
            "SHAPE": (*spec.inputs, *spec.kernel, *spec.stride, *spec.padding),
            "OH": spec.outputs[1],
            "OW": spec.outputs[2],
        }

    @property
    def _pool(self) -> dict[str, Any]:
        """The sizes of the pool, for a kernel."""
        (_, height, width), (_, down, across) = self.spec.outputs, self.spec.pooled
        return {
            "H": height,
            "W": width,
            "OH": down,
            "OW": across,
            "POOL": self.spec.pool,
            "BLOCK": _BLOCK,
        }

    def forward(self, step: int) -> None:
        """Fill `columns`, `full`, `out` and `argmax`."""
        images, block = (
            self.context.clients * self.context.batch,
            min(power_of_two(math.prod(self.spec.outputs[1:])), _BLOCK),
        )
        where = {
            "rows": self._rows,
            "batch": self.context.batch,
            "step": step,
            "steps": self.context.rows.shape[1],
        }
        conv_kernels.unfold[images, self.spec.inputs[0] + 1](
            x=self.x, columns=self.columns, **where, **self._shape, BLOCK=block
        )
        self.image_weights[..., :-1] = self.weight.source(step).flatten(2)[:, None]
        self.image_weights[..., -1] = 0.0 if self.bias is None else self.bias.source(step)[:, None]
        torch.bmm(
            self.image_weights.flatten(0, 1),
            self.columns.flatten(0, 1),
            out=self.full.view(images, self.spec.outputs[0], -1),
        )
        size = self.out.numel()
        conv_kernels.pool[(_ceil(size, _BLOCK),)](
            full=self.full,
            out=self.out,
            argmax=self.argmax,
            size=size,
            RELU=self.spec.relu,
            **self._pool,
        )

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and move the weights; `full` and `columns` are written over by their slopes."""
        grads = self._before_pool().view(
            self.context.clients * self.context.batch, self.spec.outputs[0], -1
        )
        torch.bmm(
            grads, self.columns.flatten(0, 1).transpose(1, 2), out=self.image_grads.flatten(0, 1)
        )
        if self.dx is not None:
            self._back(grads, self.dx)
        self._update(step)

    def _before_pool(self) -> Tensor:
        """The slopes (D, B, OC, H, W) of what comes before the pool."""
        if self.argmax is None:
            return self.dy
        size = self.full.numel()
        conv_kernels.unpool[(_ceil(size, _BLOCK),)](
            dy=self.dy, argmax=self.argmax, dfull=self.full, size=size, **self._pool
        )
        return self.full

    def _back(self, grads: Tensor, dx: Tensor) -> None:
        torch.bmm(
            self.image_weights.flatten(0, 1).transpose(1, 2), grads, out=self.columns.flatten(0, 1)
        )
        size, rectified = dx.numel(), self.x_is_rectified
        conv_kernels.fold[(_ceil(size, _BLOCK),)](
            columns=self.columns,
            x=self.x,
            dx=dx,
            size=size,
            RELU=rectified,
            **self._shape,
            BLOCK=_BLOCK,
        )

    def _update(self, step: int) -> None:
        channels, block = self.spec.outputs[0], 256
        grid = (_ceil(channels * self._taps, block), self.context.clients)
        sizes = {
            "TAPS": self._taps,
            "OC": channels,
            "BLOCK": block,
            "BIAS_BLOCK": power_of_two(channels),
        }
        reads = {
            "parts": self.image_grads,
            "splits": self.context.batch,
            "proximal": self._proximal(grid[0]),
        }
        conv_kernels.conv_update[grid](**reads, **self._update_args(step), **sizes)


def _blocks(tile: Tile) -> dict[str, int]:
    return {"BN": tile.outputs, "BK": tile.inputs, "STAGES": tile.stages, "num_warps": tile.warps}


def _ceil(number: int, by: int) -> int:
    return -(-number // by)
