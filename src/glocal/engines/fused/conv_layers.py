"""Launches of convolutions for many clients; none waits for the GPU."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glocal.engines.fused import conv_kernels
from glocal.engines.fused.layer import Layer
from glocal.engines.fused.layer_chain import ConvSpec
from glocal.engines.fused.tiles import ceil_div, power_of_two

_BLOCK = 1024  # pixels of one program
_UPDATE_BLOCK = 256  # weights of one program


@dataclass
class ConvLayer(Layer):
    """A convolution as one matrix product per image, with the ReLU and max-pool of its spec.

    columns (clients, batch, taps + 1, pixels) are the inputs under the kernel at every place; their
    last row is ones. full (clients, batch, channels, H, W) is the output before the pool, argmax
    (like out) the place of each maximum. image_weights (clients, batch, channels, taps + 1) are
    weight and bias for every image, image_grads (like it) their gradients.
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
            dtype = torch.uint8 if self.spec.pool < 16 else torch.int32
            self.argmax = torch.empty_like(self.out, dtype=dtype)

    @property
    def _taps(self) -> int:
        """Weights of one output channel."""
        return self.spec.inputs[0] * math.prod(self.spec.kernel)

    @property
    def _conv_sizes(self) -> dict[str, Any]:
        """The sizes of the convolution, for a kernel."""
        _, height, width = self.spec.outputs
        return {"SHAPE": self.spec.sizes, "OH": height, "OW": width}

    @property
    def _pool_sizes(self) -> dict[str, Any]:
        """The sizes of the pool, for a kernel."""
        _, height, width = self.spec.outputs
        _, pooled_height, pooled_width = self.spec.pooled
        return {
            "H": height,
            "W": width,
            "OH": pooled_height,
            "OW": pooled_width,
            "POOL": self.spec.pool,
            "BLOCK": _BLOCK,
        }

    def forward(self, step: int) -> None:
        """Fill `columns`, `full`, `out` and `argmax`."""
        self._unfold(step)
        self._multiply(step)
        size = self.out.numel()
        conv_kernels.pool[(ceil_div(size, _BLOCK),)](
            full=self.full,
            out=self.out,
            argmax=self.argmax,
            size=size,
            RELU=self.spec.relu,
            **self._pool_sizes,
        )

    def _unfold(self, step: int) -> None:
        pixels = math.prod(self.spec.outputs[1:])
        conv_kernels.unfold[self.context.images, self.spec.inputs[0] + 1](
            x=self.x,
            rows=self._rows,
            columns=self.columns,
            batch=self.context.batch,
            step=step,
            steps=self.context.steps,
            **self._conv_sizes,
            BLOCK=min(power_of_two(pixels), _BLOCK),
        )

    def _multiply(self, step: int) -> None:
        """Fill `full` from `columns`."""
        self.image_weights[..., :-1] = self.weight.source(step).flatten(2)[:, None]
        self.image_weights[..., -1] = 0.0 if self.bias is None else self.bias.source(step)[:, None]
        torch.bmm(
            self.image_weights.flatten(0, 1),
            self.columns.flatten(0, 1),
            out=self.full.view(self.context.images, self.spec.outputs[0], -1),
        )

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and update the weights.

        The gradients of `full` and `columns` overwrite them.
        """
        grads = self._unpool().view(self.context.images, self.spec.outputs[0], -1)
        columns = self.columns.flatten(0, 1)
        torch.bmm(grads, columns.transpose(1, 2), out=self.image_grads.flatten(0, 1))
        if self.dx is not None:
            self._propagate(grads, self.dx)
        self._update(step)

    def _unpool(self) -> Tensor:
        """The gradient (clients, batch, channels, H, W) before the pool."""
        if self.argmax is None:
            return self.dy
        size = self.full.numel()
        conv_kernels.unpool[(ceil_div(size, _BLOCK),)](
            dy=self.dy, argmax=self.argmax, dfull=self.full, size=size, **self._pool_sizes
        )
        return self.full

    def _propagate(self, grads: Tensor, dx: Tensor) -> None:
        """Fill `dx`."""
        weights = self.image_weights.flatten(0, 1)
        torch.bmm(weights.transpose(1, 2), grads, out=self.columns.flatten(0, 1))
        size = dx.numel()
        conv_kernels.fold[(ceil_div(size, _BLOCK),)](
            columns=self.columns,
            x=self.x,
            dx=dx,
            size=size,
            RELU=self.x_is_rectified,
            **self._conv_sizes,
            BLOCK=_BLOCK,
        )

    def _update(self, step: int) -> None:
        channels = self.spec.outputs[0]
        programs = ceil_div(channels * self._taps, _UPDATE_BLOCK)
        conv_kernels.conv_update[programs, self.context.clients](
            image_grads=self.image_grads,
            images=self.context.batch,
            proximal=self._proximal(programs),
            TAPS=self._taps,
            OC=channels,
            BLOCK=_UPDATE_BLOCK,
            BIAS_BLOCK=power_of_two(channels),
            **self._update_args(step),
        )
