"""The interface of a layer whose kernels train many clients at once."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from glocal.engines.fused.launch_context import LaunchContext, TrainedTensor

_NO_BIAS: dict[str, Any] = {
    "bias": None,
    "bias_stride": 0,
    "bias_out": None,
    "bias_velocity": None,
    "bias_anchor": None,
    "bias_anchor_stride": 0,
    "bias_strength": 0.0,
}


@dataclass
class Layer(ABC):
    """One layer: from x (clients, batch, inputs) to out (clients, batch, outputs).

    With `gathers`, x is the store of examples, read by rows. dx and dy are the gradients of x and
    out; dx is None in the first layer. `x_is_rectified` says that x is the output of a ReLU.
    proximal (steps, clients, programs) are parts of strength ||w - anchor||^2, if there is an
    anchor.
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
        """Fill `dx` from `dy`, and update the weights."""

    @property
    def _rows(self) -> Tensor | None:
        return self.context.rows if self.gathers else None

    def _update_args(self, step: int) -> dict[str, Any]:
        """The arguments of a kernel that updates weight and bias."""
        weight = self.weight.update_args(step, "w")
        return {**weight, **self._bias_update_args(step), **self.context.update_args(step)}

    def _bias_update_args(self, step: int) -> dict[str, Any]:
        return _NO_BIAS if self.bias is None else self.bias.update_args(step, "bias", "bias_")

    def _bias_args(self, step: int) -> dict[str, Any]:
        """The arguments of a kernel that only reads the bias."""
        if self.bias is None:
            return {"bias": None, "bias_stride": 0}
        source = self.bias.source(step)
        return {"bias": source, "bias_stride": source.stride(0)}

    def _proximal(self, programs: int) -> Tensor | None:
        """Room for the parts of this number of programs, allocated before the first step."""
        if self.proximal is None and self._has_anchor:
            clients, steps = self.context.clients, self.context.steps
            self.proximal = torch.empty(steps, clients, programs, device=self.x.device)
        return self.proximal

    @property
    def _has_anchor(self) -> bool:
        if self.weight.anchor is not None:
            return True
        return self.bias is not None and self.bias.anchor is not None
