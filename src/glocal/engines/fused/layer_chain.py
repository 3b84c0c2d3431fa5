"""A network as a chain of plain layers, if it is one: what the fused steps are made for."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from glocal.core.modules import trainable_names
from glocal.core.split import canonical_names

Shape = tuple[int, ...]


@dataclass(frozen=True)
class LinearSpec:
    """y = x W' + b: weight (out, in), bias (out,) or None; both by name."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    relu: bool = False


@dataclass(frozen=True)
class ConvSpec:
    """A convolution (channels, height, width) -> (channels, height, width), with a ReLU and a max-pool after it if they follow.

    `pool` is the side of a square window that moves by its own side; 1 is no pool. A ReLU commutes with it, so their order is free.
    """

    weight: str
    bias: str | None
    inputs: Shape
    outputs: Shape
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    relu: bool = False
    pool: int = 1

    @property
    def pooled(self) -> Shape:
        """What leaves the layer."""
        channels, height, width = self.outputs
        return (channels, height // self.pool, width // self.pool)


@dataclass(frozen=True)
class LayerChain:
    """Layers in order, the last one linear and without a ReLU: its outputs are logits, or a softmax of them is what is put out."""

    layers: tuple[LinearSpec | ConvSpec, ...]
    inputs: Shape
    softmax: bool = False


class UnsupportedModelError(Exception):
    """Why a network is no chain of layers that the fused steps know."""


def parse_chain(model: nn.Module, inputs: Shape) -> LayerChain:
    """The model as a chain for examples of this shape; NotAChainError says which layer is in the way."""
    layers: list[LinearSpec | ConvSpec] = []
    shape, modules = inputs, _modules_in_order(model)
    softmax = bool(modules) and type(modules[-1][1]) is nn.Softmax and modules[-1][1].dim in (1, -1)
    for name, module in modules[:-1] if softmax else modules:
        layers, shape = _append_module(layers, shape, name, module)
    if not layers or not isinstance(layers[-1], LinearSpec) or layers[-1].relu:
        raise UnsupportedModelError("it does not end in a linear layer")
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    if len(set(names)) != len(names):
        raise UnsupportedModelError("a layer is used twice")
    if set(names) != {*canonical_names(model).values()}:
        raise UnsupportedModelError("it has tensors beside its layers")
    if set(names) != trainable_names(model):
        raise UnsupportedModelError("some of its weights are frozen")
    return LayerChain(tuple(layers), inputs, softmax)


def _append_module(
    layers: list[LinearSpec | ConvSpec], shape: Shape, name: str, module: nn.Module
) -> tuple[list[LinearSpec | ConvSpec], Shape]:
    """The chain with one more module, and the shape that leaves it."""
    if isinstance(module, nn.Identity) or (type(module) is nn.Flatten and len(shape) == 1):
        return layers, shape
    if type(module) is nn.Flatten and module.start_dim == 1 and module.end_dim in (-1, len(shape)):
        return layers, (math.prod(shape),)
    if type(module) is nn.ReLU and layers:
        return [*layers[:-1], _replace_fields(layers[-1], relu=True)], shape
    if type(module) is nn.Linear and shape == (module.in_features,):
        layer = LinearSpec(
            f"{name}.weight", _bias(name, module), module.in_features, module.out_features
        )
        return [*layers, layer], (module.out_features,)
    if type(module) is nn.Conv2d and len(shape) == 3:
        conv = _conv(name, module, shape)
        return [*layers, conv], conv.outputs
    if (
        type(module) is nn.MaxPool2d
        and layers
        and isinstance(layers[-1], ConvSpec)
        and layers[-1].pool == 1
    ):
        pooled = _replace_fields(layers[-1], pool=_pool_side(module))
        assert isinstance(pooled, ConvSpec)
        return [*layers[:-1], pooled], pooled.pooled
    raise UnsupportedModelError(f"layer '{name}' is {type(module).__name__} on {shape}")


def _conv(name: str, module: nn.Conv2d, shape: Shape) -> ConvSpec:
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    if not plain or isinstance(module.padding, str) or shape[0] != module.in_channels:
        raise UnsupportedModelError(
            f"layer '{name}' is a convolution with groups, dilation or named padding"
        )
    kernel, stride, padding = (
        _pair(value) for value in (module.kernel_size, module.stride, module.padding)
    )
    height, width = ((shape[1 + i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    outputs = (module.out_channels, height, width)
    return ConvSpec(f"{name}.weight", _bias(name, module), shape, outputs, kernel, stride, padding)


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def _pool_side(module: nn.MaxPool2d) -> int:
    """The side of a pool's window; refused unless windows are square, lie side by side and are not padded."""
    sizes = {*(_as_pair(module.kernel_size)), *(_as_pair(module.stride))}
    if (
        len(sizes) != 1
        or _as_pair(module.padding) != (0, 0)
        or _as_pair(module.dilation) != (1, 1)
        or module.ceil_mode
    ):
        raise UnsupportedModelError("a max-pool has windows that overlap, are padded or not square")
    return int(sizes.pop())


def _as_pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else _pair(value)


def _bias(name: str, module: nn.Linear | nn.Conv2d) -> str | None:
    return None if module.bias is None else f"{name}.bias"


def _replace_fields(
    layer: LinearSpec | ConvSpec, *, relu: bool | None = None, pool: int | None = None
) -> LinearSpec | ConvSpec:
    values = {**vars(layer), **({"relu": relu} if relu else {}), **({"pool": pool} if pool else {})}
    return type(layer)(**values)


def _modules_in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What the model calls, in order, each once on what the one before gave; functional calls as the modules they stand for."""
    try:
        graph = fx.symbolic_trace(copy.deepcopy(model).to("meta")).graph
    except Exception as error:  # whatever a user's own forward may raise when it is traced
        raise UnsupportedModelError(
            f"its forward cannot be traced ({type(error).__name__})"
        ) from error
    found: list[tuple[str, nn.Module]] = []
    before: fx.Node | None = None
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            found.append(_module_called_by(model, node))
        given = [argument for argument in node.all_input_nodes if argument is not before]
        if given or (node.op == "placeholder" and before is not None):
            raise UnsupportedModelError(f"'{node.name}' does more than pass on what came before")
        before = node
    return found


_MODULE_FOR_FUNCTION: dict[Callable[..., Any] | str, Callable[[], nn.Module]] = {
    functional.relu: nn.ReLU,
    torch.relu: nn.ReLU,
    "relu": nn.ReLU,
}


_POOL_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


def _module_called_by(model: nn.Module, node: fx.Node) -> tuple[str, nn.Module]:
    """The module that a node calls, or the module that its function stands for."""
    if node.op == "call_module":
        return str(node.target), model.get_submodule(str(node.target))
    rest, named = (
        node.args[1:],
        {key: value for key, value in node.kwargs.items() if key != "inplace"},
    )
    named = {
        key: value
        for key, value in named.items()
        if key not in _POOL_DEFAULTS or value != _POOL_DEFAULTS[key]
    }
    make = _MODULE_FOR_FUNCTION.get(node.target)
    if make is not None and not rest and not named:
        return node.name, make()
    if node.target in (torch.flatten, "flatten") and (rest, named) in (
        ((1,), {}),
        ((), {"start_dim": 1}),
    ):
        return node.name, nn.Flatten()
    if (
        node.target in (functional.max_pool2d, torch.max_pool2d)
        and len(rest) <= 2
        and {*named} <= {"kernel_size", "stride"}
    ):
        return node.name, nn.MaxPool2d(*rest, **named)  # type: ignore[arg-type]
    raise UnsupportedModelError(f"'{node.name}' calls {node.target}")
