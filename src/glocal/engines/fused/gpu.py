"""Local training of many clients at once on a GPU.

The launches are a fixed sequence: nothing depends on values, so a CUDA graph can hold all of them.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from glocal.core.optimizers import SGD, Optimizer
from glocal.core.training import ModelLoss, Objective
from glocal.core.trees import Params
from glocal.engines.fused.launch_context import LaunchContext, TrainedTensor
from glocal.engines.fused.layer import Layer
from glocal.engines.fused.layer_chain import (
    LayerChain,
    LinearSpec,
    Shape,
    UnsupportedModelError,
    parse_chain,
)
from glocal.engines.fused.tiles import TileChooser, default_tile

if TYPE_CHECKING:  # at run time only where Triton is installed
    from glocal.engines.fused.linear_layers import LastLayer

Precision = Literal["fp32", "ieee", "tf32"]
# tf32x3 splits each number into parts for tensor cores: as near to float64 as fp32 (measured), and
# far faster
_TRITON_PRECISION = {"fp32": "tf32x3", "ieee": "ieee", "tf32": "tf32"}


def unsupported_reason(
    objective: Objective, optimizer: Optimizer, inputs: Shape, dtype: torch.dtype
) -> str | None:
    """Why the kernels cannot train this on examples of shape `inputs`; None if they can."""
    loss = objective.loss
    if find_spec("triton") is None:
        return "triton is not installed"
    assert isinstance(loss, ModelLoss)
    if type(optimizer) is not SGD:
        return f"the optimiser is {type(optimizer).__name__}, not SGD"
    if dtype != torch.float32:
        return f"the weights are {dtype}, not torch.float32"
    for _, strength in objective.proximal:
        if strength < 0:
            return "a proximal term has a negative strength"
    if objective.linear:
        return "the objective has a linear term"
    try:
        chain = parse_chain(loss.model, inputs)
    except UnsupportedModelError as error:
        return f"the model is no chain of plain layers: {error}"
    if objective.trainable != {*chain.names}:
        return "some of the model's weights are not trained"
    return None


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
    """`local_train` for many clients: params (clients, ...) and mean losses (clients,).

    x_store (rows, ...) and y_store (rows,) hold the examples of all clients; order (clients, steps,
    batch) holds rows of them, -1 = padding. lr is () or (clients,). A tensor that all clients share
    may be expanded. Nothing waits for the GPU and no shape depends on values.
    """
    with torch.cuda.device_of(x_store):  # type: ignore[no-untyped-call]
        context = LaunchContext(
            *_batches(y_store, order),
            _lrs(lr, order),
            momentum,
            weight_decay,
            _TRITON_PRECISION[precision],
            choose_tile,
        )
        trained = {}
        for name in chain.names:
            trained[name] = _trained_tensor(params[name], name, proximal, momentum)
        layers = _layers(chain, trained, context, x_store)
        for step in range(order.shape[1]):
            for layer in layers:
                layer.forward(step)
            for layer in reversed(layers):
                layer.backward(step)
        losses = _mean_losses(layers, context, _proximal_floor(proximal, trained))
    return {name: trained[name].current for name in params}, losses


def _lrs(lr: Tensor | float, order: Tensor) -> Tensor:
    """Learning rates (clients,), made on the GPU: a graph cannot hold a copy from the host."""
    if isinstance(lr, Tensor):
        return lr.to(order.device, torch.float32).expand(order.shape[0]).contiguous()
    return torch.full((order.shape[0],), lr, device=order.device, dtype=torch.float32)


def _batches(y_store: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and labels (clients, steps, batch), and the number of real rows (clients, steps).

    In padding the row is the client's own first one, and the label is -1.
    """
    real = order >= 0
    rows = torch.where(real, order, order[:, :1, :1]).clamp(min=0)
    return rows, y_store[rows].masked_fill(~real, -1), real.sum(dim=2, dtype=torch.int32)


def _trained_tensor(
    start: Tensor, name: str, proximal: Sequence[tuple[Params, float]], momentum: float
) -> TrainedTensor:
    """A tensor (clients, ...) with its proximal terms merged into one.

    Their strengths add up, and the anchor is the weighted mean of theirs.
    """
    anchors = [(anchor[name], strength) for anchor, strength in proximal if name in anchor]
    anchors = [(anchor, strength) for anchor, strength in anchors if strength]
    total_strength = sum(strength for _, strength in anchors)
    current = torch.empty(start.shape, device=start.device)
    velocity = torch.empty_like(current) if momentum else None
    anchor = _weighted_anchor(anchors, total_strength)
    return TrainedTensor(_rowwise(start), current, velocity, anchor, total_strength)


def _weighted_anchor(anchors: list[tuple[Tensor, float]], total_strength: float) -> Tensor | None:
    """The mean of anchors (clients, ...), weighted by their strengths; None without anchors."""
    if not anchors:
        return None
    (first, first_strength), *others = anchors
    if not others:
        return _rowwise(first)
    mean = first * (first_strength / total_strength)
    for anchor, strength in others:
        mean = mean + anchor * (strength / total_strength)
    return _rowwise(mean)


def _rowwise(tensor: Tensor) -> Tensor:
    """The tensor (clients, ...), each client's values contiguous; clients may share theirs."""
    return tensor if tensor[0].is_contiguous() else tensor.contiguous()


def _layers(
    chain: LayerChain, trained: dict[str, TrainedTensor], context: LaunchContext, x_store: Tensor
) -> list[Layer]:
    """The chain's layers; each reads the output of the one before."""
    from glocal.engines.fused.conv_layers import ConvLayer
    from glocal.engines.fused.linear_layers import LastLayer, LinearLayer

    layers: list[Layer] = []
    x, dx, rectified = x_store.contiguous(), None, False
    for spec in chain.layers:
        bias = trained[spec.bias] if spec.bias else None
        inputs = (context, trained[spec.weight], bias, x, not layers, dx, rectified)
        if not isinstance(spec, LinearSpec):
            layers.append(ConvLayer(*inputs, spec))
        elif spec is chain.layers[-1]:
            layers.append(LastLayer(*inputs, spec, chain.softmax))
            break  # it has no output for another layer
        else:
            layers.append(LinearLayer(*inputs, spec))
        x, dx, rectified = layers[-1].out, layers[-1].dy, spec.relu
    return layers


def _mean_losses(
    layers: list[Layer], context: LaunchContext, proximal_floor: Tensor | float
) -> Tensor:
    """The mean (clients,) over the real rows of cross entropy and proximal terms."""
    last = layers[-1]
    if TYPE_CHECKING:
        assert isinstance(last, LastLayer)
    total = last.losses.sum(dim=(0, 2))
    proximal = proximal_floor
    for layer in layers:
        if layer.proximal is not None:
            proximal = proximal + layer.proximal.sum(dim=2)  # (steps, clients)
    if isinstance(proximal, Tensor):
        total = total + (context.counts.T * proximal / 2).sum(dim=0)
    return total / context.counts.sum(dim=1).clamp(min=1)


def _proximal_floor(
    proximal: Sequence[tuple[Params, float]], trained: dict[str, TrainedTensor]
) -> Tensor | float:
    """The part of the proximal terms (clients,) that the weights cannot change.

    It is the sum of strength ||anchor - mean||^2, where mean is the merged anchor.
    """
    total: Tensor | float = 0.0
    for anchors, strength in proximal:
        for name, anchor in anchors.items():
            mean = trained[name].anchor
            if strength and mean is not None and mean is not anchor:
                total = total + strength * (anchor - mean).flatten(1).square().sum(dim=1)
    return total
