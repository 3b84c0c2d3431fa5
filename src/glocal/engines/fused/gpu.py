"""Steps of gradient descent for many devices at once on a GPU: a fixed sequence of launches, so that a graph can hold them all."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from glocal.core.optimizers import SGD, Optimizer
from glocal.core.training import ModelLoss, Objective, per_example_cross_entropy
from glocal.core.trees import Params
from glocal.engines.fused.layer_chain import (
    LayerChain,
    LinearSpec,
    Shape,
    UnsupportedModelError,
    parse_chain,
)
from glocal.engines.fused.tiles import TileChooser, default_tile

if TYPE_CHECKING:  # at run time only where Triton is installed
    from glocal.engines.fused.layers import LastLayer, LaunchContext, Layer, TrainedTensor

Precision = Literal["fp32", "ieee", "tf32"]
# Three products of halves of the numbers, on tensor cores, are as near to float64 as one in fp32 (measured), and far faster
_TRITON_PRECISION = {"fp32": "tf32x3", "ieee": "ieee", "tf32": "tf32"}


def unsupported_reason(
    objective: Objective, optimizer: Optimizer, inputs: Shape, dtype: torch.dtype
) -> str | None:
    """One line that says why these kernels cannot train this on examples of shape `inputs`; None if they can."""
    loss = objective.loss
    if find_spec("triton") is None:
        return "triton is not installed"
    if type(loss) is not ModelLoss or loss.per_example is not per_example_cross_entropy:
        return "the loss is not the cross entropy of a model"
    if type(optimizer) is not SGD:
        return f"the optimiser is {type(optimizer).__name__}, not Sgd"
    if dtype != torch.float32:
        return f"the weights are {dtype}, not torch.float32"
    if any(strength < 0 for _, strength in objective.proximal):
        return "a pull has a negative strength"
    try:
        chain = parse_chain(loss.model, inputs)
    except UnsupportedModelError as error:
        return f"the model is no chain of plain layers: {error}"
    return (
        None
        if objective.trainable == {*_names(chain)}
        else "some of the model's weights stay as they are"
    )


def local_train_batched(
    chain: LayerChain,
    params: Params,
    x_store: Tensor,
    y_store: Tensor,
    order: Tensor,
    *,
    lr: Tensor | float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    proximal: Sequence[tuple[Params, float]] = (),
    precision: Precision = "fp32",
    choose_tile: TileChooser = default_tile,
) -> tuple[Params, Tensor]:
    """What `training.descend` does, for D devices at once: params (D, ...) after all steps and the mean loss (D,).

    x_store (rows, ...) and y_store (rows,) hold every device's examples; order (D, steps, B) holds rows of them, -1 = padding;
    rate is () or (D,); a tensor that all devices share may be expanded. Nothing waits for the GPU and no shape depends on values,
    so that a CUDA graph can hold the call.
    """
    from glocal.engines.fused.layers import LaunchContext

    with torch.cuda.device_of(x_store):  # type: ignore[no-untyped-call]
        context = LaunchContext(
            *_batches(y_store, order),
            _lrs(lr, order),
            momentum,
            weight_decay,
            _TRITON_PRECISION[precision],
            choose_tile,
        )
        trained = {
            name: _trained_tensor(params[name], name, proximal, momentum) for name in _names(chain)
        }
        layers = _layers(chain, trained, context, x_store)
        for step in range(order.shape[1]):
            for layer in layers:
                layer.forward(step)
            for layer in reversed(layers):
                layer.backward(step)
        value = _mean_loss(layers, context, _proximal_floor(proximal, trained))
    return {name: trained[name].current for name in params}, value


def _lrs(lr: Tensor | float, order: Tensor) -> Tensor:
    """A rate for every device (D,), made on the GPU: a graph cannot hold a copy from the host's memory."""
    if isinstance(lr, Tensor):
        return lr.to(order.device, torch.float32).expand(order.shape[0]).contiguous()
    return torch.full((order.shape[0],), lr, device=order.device, dtype=torch.float32)


def _batches(y_store: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and labels (D, steps, B) and the number of real rows (D, steps); padding shows a device's own first row, labelled -1."""
    real = order >= 0
    rows = torch.where(real, order, order[:, :1, :1]).clamp(min=0)
    return rows, y_store[rows].masked_fill(~real, -1), real.sum(dim=2, dtype=torch.int32)


def _trained_tensor(
    start: Tensor, name: str, proximal: Sequence[tuple[Params, float]], momentum: float
) -> TrainedTensor:
    """A tensor (D, ...) with several pulls as one: strengths add up, and it is towards their weighted mean."""
    from glocal.engines.fused.layers import TrainedTensor

    ends = [
        (anchor[name], strength) for anchor, strength in proximal if strength and name in anchor
    ]
    strength = sum(strength for _, strength in ends)
    current = torch.empty(start.shape, device=start.device)
    velocity = torch.empty_like(current) if momentum else None
    return TrainedTensor(
        _rowwise(start), current, velocity, _weighted_anchor(ends, strength), strength
    )


def _weighted_anchor(ends: list[tuple[Tensor, float]], strength: float) -> Tensor | None:
    """The mean of where pulls go (D, ...), weighted by their strengths; None without pulls."""
    if not ends:
        return None
    first, *others = ends
    if not others:
        return _rowwise(first[0])
    return _rowwise(
        sum((end * (share / strength) for end, share in others), first[0] * (first[1] / strength))
    )


def _rowwise(tensor: Tensor) -> Tensor:
    """The tensor (D, ...) with every device's numbers side by side; devices may share theirs."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def _layers(
    chain: LayerChain, trained: dict[str, TrainedTensor], context: LaunchContext, x_store: Tensor
) -> list[Layer]:
    """The chain's layers, each reading what the one before writes."""
    from glocal.engines.fused.layers import ConvLayer, LastLayer, LinearLayer

    layers: list[Layer] = []
    for spec in chain.layers:
        before = layers[-1] if layers else None
        bias = trained[spec.bias] if spec.bias else None
        x, dx = (before.out, before.dy) if before else (x_store.contiguous(), None)
        rectified = bool(layers) and chain.layers[len(layers) - 1].relu
        shared = (context, trained[spec.weight], bias, x, before is None, dx, rectified)
        if isinstance(spec, LinearSpec):
            layers.append(
                LastLayer(*shared, spec, chain.softmax)
                if spec is chain.layers[-1]
                else LinearLayer(*shared, spec)
            )
        else:
            layers.append(ConvLayer(*shared, spec))
    return layers


def _mean_loss(layers: list[Layer], context: LaunchContext, scatter: Tensor | float) -> Tensor:
    """The mean over a device's real rows (D,) of cross entropy and pulls."""
    last = layers[-1]
    if TYPE_CHECKING:
        assert isinstance(last, LastLayer)
    total = last.losses.sum(dim=(0, 2))
    away = sum(
        (layer.proximal.sum(dim=2) for layer in layers if layer.proximal is not None), scatter
    )  # (steps, D)
    if isinstance(away, Tensor):
        total = total + (context.counts.T * away / 2).sum(dim=0)
    return total / context.counts.sum(dim=1).clamp(min=1)


def _proximal_floor(
    proximal: Sequence[tuple[Params, float]], trained: dict[str, TrainedTensor]
) -> Tensor | float:
    """What several pulls on one tensor cost at their weighted mean (D,): the sum of strength * ||end - mean||^2."""
    total: Tensor | float = 0.0
    for anchor, strength in proximal:
        for name, end in anchor.items():
            mean = trained[name].anchor
            if strength and mean is not None and mean is not end:
                total = total + strength * (end - mean).flatten(1).square().sum(dim=1)
    return total


def _names(chain: LayerChain) -> list[str]:
    """The tensors of a chain."""
    return [name for layer in chain.layers for name in (layer.weight, layer.bias) if name]
