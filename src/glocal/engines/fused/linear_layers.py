"""Launches of linear layers for many clients; none waits for the GPU."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glocal.engines.fused import linear_kernels
from glocal.engines.fused.layer import Layer
from glocal.engines.fused.layer_chain import LinearSpec
from glocal.engines.fused.tiles import SMALL_BATCH, KernelKind, Tile, ceil_div


@dataclass
class LinearLayer(Layer):
    """A linear layer, with a ReLU after it if its spec has one."""

    spec: LinearSpec

    def __post_init__(self) -> None:
        self.out = self.context.empty(self.spec.outputs)
        self.dy = self.context.empty(self.spec.outputs)

    def forward(self, step: int) -> None:
        """Fill `out`."""
        weight = self.weight.source(step)
        args = {
            "x": self.x,
            "rows": self._rows,
            "w": weight,
            "w_stride": weight.stride(0),
            "w_out_stride": self.spec.inputs,
            "w_in_stride": 1,
            "relu_output": None,
            "out": self.out,
            "RELU": self.spec.relu,
            **self._bias_args(step),
        }
        self._launch_forward(step, self.spec.inputs, self.spec.outputs, args)

    def backward(self, step: int) -> None:
        """Fill `dx` from `dy`, and update the weights."""
        if self.context.batch <= SMALL_BATCH:
            self._launch_backward(step)
            return
        if self.dx is not None:
            self._propagate(step, self.dx)
        self._launch_update(step)

    def _propagate(self, step: int, dx: Tensor) -> None:
        """Dx = dy w where x was positive: a forward launch with the weight's strides exchanged."""
        weight = self.weight.source(step)
        args = {
            "x": self.dy,
            "rows": None,
            "w": weight,
            "w_stride": weight.stride(0),
            "w_out_stride": 1,
            "w_in_stride": self.spec.inputs,
            "bias": None,
            "bias_stride": 0,
            "relu_output": self.x if self.x_is_rectified else None,
            "out": dx,
            "RELU": False,
        }
        self._launch_forward(step, self.spec.outputs, self.spec.inputs, args)

    def _launch_forward(self, step: int, inputs: int, outputs: int, args: dict[str, Any]) -> None:
        context = self.context
        tile = context.tile("forward", context.batch, outputs, inputs)
        column_tiles = ceil_div(outputs, tile.outputs)
        row_tiles = ceil_div(context.batch, tile.rows)
        linear_kernels.linear_forward[column_tiles, context.clients, row_tiles](
            **args,
            counts=context.counts,
            inputs=inputs,
            outputs=outputs,
            batch=context.batch,
            step=step,
            steps=context.steps,
            PRECISION=context.precision,
            BB=tile.rows,
            **tile.kernel_args,
        )

    def _launch_backward(self, step: int) -> None:
        spec, tile = self.spec, self._tile("backward")
        span = self._outputs_per_program(tile)
        input_tiles, output_spans = ceil_div(spec.inputs, tile.inputs), ceil_div(spec.outputs, span)
        linear_kernels.linear_backward[input_tiles, self.context.clients, output_spans](
            x=self.x,
            rows=self._rows,
            dy=self.dy,
            dx=self.dx,
            proximal=self._proximal(input_tiles * output_spans),
            inputs=spec.inputs,
            outputs=spec.outputs,
            span=span,
            BATCH=self.context.batch,
            RELU=self.x_is_rectified,
            **self._update_args(step),
            **tile.kernel_args,
        )

    def _outputs_per_program(self, tile: Tile) -> int:
        """All outputs if there is a dx, which sums over them; else several programs share them."""
        if self.dx is not None:
            return self.spec.outputs
        return ceil_div(self.spec.outputs, 8 * tile.outputs) * tile.outputs

    def _launch_update(self, step: int) -> None:
        spec, tile = self.spec, self._tile("update")
        input_tiles = ceil_div(spec.inputs, tile.inputs)
        output_tiles = ceil_div(spec.outputs, tile.outputs)
        linear_kernels.linear_update[input_tiles, self.context.clients, output_tiles](
            x=self.x,
            rows=self._rows,
            dy=self.dy,
            proximal=self._proximal(input_tiles * output_tiles),
            inputs=spec.inputs,
            outputs=spec.outputs,
            batch=self.context.batch,
            PRECISION=self.context.precision,
            BB=tile.rows,
            **self._update_args(step),
            **tile.kernel_args,
        )

    def _tile(self, kind: KernelKind) -> Tile:
        return self.context.tile(kind, self.context.batch, self.spec.outputs, self.spec.inputs)


@dataclass
class LastLayer(LinearLayer):
    """The layer whose outputs are the logits; it has no `out`.

    forward leaves the gradient of the logits in dy, and summed cross entropies in losses
    (steps, clients, tiles).
    """

    softmax: bool = False
    losses: Tensor = field(init=False)

    def __post_init__(self) -> None:
        context = self.context
        self.dy = context.empty(self.spec.outputs)
        tiles = ceil_div(context.batch, self._tile("loss").rows)
        self.losses = torch.empty(context.steps, context.clients, tiles, device=self.x.device)

    def forward(self, step: int) -> None:
        """Fill `dy` and `losses`."""
        context, tile = self.context, self._tile("loss")
        weight = self.weight.source(step)
        linear_kernels.linear_loss[1, context.clients, self.losses.shape[2]](
            x=self.x,
            rows=self._rows,
            w=weight,
            w_stride=weight.stride(0),
            labels=context.labels,
            counts=context.counts,
            grads=self.dy,
            losses=self.losses,
            inputs=self.spec.inputs,
            outputs=self.spec.outputs,
            batch=context.batch,
            step=step,
            steps=context.steps,
            SOFTMAX=self.softmax,
            PRECISION=context.precision,
            BB=tile.rows,
            **self._bias_args(step),
            **tile.kernel_args,
        )
