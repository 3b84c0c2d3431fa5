"""A model as a chain of plain layers: the form that the fused steps can train."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from glocal.core.data import Examples
from glocal.core.losses import per_example_cross_entropy
from glocal.core.model_tensors import canonical_names
from glocal.core.modules import trainable_names
from glocal.core.training import LossFn, ModelLoss
from glocal.core.values import describe_form

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
    """A convolution (channels, height, width) -> (channels, height, width).

    A ReLU and a max-pool after it belong to it; they commute, so their order is free. `pool` is the
    side of a square window whose stride is its side; 1 means no pool.
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
        """The shape of the layer's output."""
        channels, height, width = self.outputs
        return (channels, height // self.pool, width // self.pool)

    @property
    def sizes(self) -> Shape:
        """All sizes in one tuple, as kernels take them: inputs, kernel, stride, padding."""
        return (*self.inputs, *self.kernel, *self.stride, *self.padding)


LayerSpec = LinearSpec | ConvSpec


def unsupported_data(loss: LossFn, examples: Examples) -> str | None:
    """Why the fused steps cannot train this loss on such examples; None if they can.

    They know one tensor of inputs, one class per example, and the plain cross entropy.
    """
    x, y = examples.x, examples.y
    if type(loss) is not ModelLoss:
        return f"the loss is {getattr(loss, '__name__', type(loss).__name__)}, not a ModelLoss"
    if loss.per_example is not per_example_cross_entropy:
        return "the loss is not the cross entropy"
    if loss.adapt is not None:
        return "the model is called by a function of its own"
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return "the inputs or targets are not one tensor"
    if y.dim() != 1 or y.dtype != torch.int64:
        return f"the targets are {describe_form(y)}, not one class per example"
    return None


@dataclass(frozen=True)
class LayerChain:
    """Layers in order; the last one is linear and without a ReLU.

    Its outputs are the logits. With `softmax` the model's output is a softmax of them.
    """

    layers: tuple[LayerSpec, ...]
    inputs: Shape
    softmax: bool = False

    @property
    def names(self) -> list[str]:
        """The names of all weights and biases, in order."""
        return _names(self.layers)


class UnsupportedModelError(Exception):
    """The model is not a chain of layers that the fused steps support; the message says why."""


def parse_chain(model: nn.Module, inputs: Shape) -> LayerChain:
    """The model as a chain for examples of this shape.

    UnsupportedModelError names the first layer that does not fit.
    """
    modules = _modules_in_order(model)
    softmax = _ends_in_softmax(modules)
    layers: list[LayerSpec] = []
    shape = inputs
    for name, module in modules[:-1] if softmax else modules:
        shape = _append_module(layers, shape, name, module)
    if not layers or not isinstance(layers[-1], LinearSpec) or layers[-1].relu:
        raise UnsupportedModelError("it does not end in a linear layer")
    if len(set(_names(layers))) != len(_names(layers)):
        raise UnsupportedModelError("a layer is used twice")
    _require_all_tensors(model, {*_names(layers)})
    return LayerChain(tuple(layers), inputs, softmax)


def _names(layers: Iterable[LayerSpec]) -> list[str]:
    names = []
    for layer in layers:
        names.append(layer.weight)
        if layer.bias:
            names.append(layer.bias)
    return names


def _ends_in_softmax(modules: list[tuple[str, nn.Module]]) -> bool:
    if not modules:
        return False
    last = modules[-1][1]
    return type(last) is nn.Softmax and last.dim in (1, -1)


def _require_all_tensors(model: nn.Module, names: set[str]) -> None:
    """Refuse a chain that does not train every tensor of the model."""
    if names != {*canonical_names(model).values()}:
        raise UnsupportedModelError("it has tensors beside its layers")
    if names != trainable_names(model):
        raise UnsupportedModelError("some of its weights are frozen")


def _append_module(layers: list[LayerSpec], shape: Shape, name: str, module: nn.Module) -> Shape:
    """Append a module to the layers, or merge it into the last one; returns the shape after it."""
    if isinstance(module, nn.Identity):
        return shape
    if type(module) is nn.Flatten and _flattens_all(module, shape):
        return (math.prod(shape),)
    if type(module) is nn.ReLU and layers:
        layers[-1] = replace(layers[-1], relu=True)
        return shape
    layer = _new_layer(layers, shape, name, module)
    layers.append(layer)
    return _output_shape(layer)


def _new_layer(layers: list[LayerSpec], shape: Shape, name: str, module: nn.Module) -> LayerSpec:
    """The layer to append; with a pool it replaces the last one, which is removed."""
    if type(module) is nn.Linear and shape == (module.in_features,):
        return _linear(name, module)
    if type(module) is nn.Conv2d and len(shape) == 3:
        return _conv(name, module, shape)
    before = layers[-1] if layers else None
    if type(module) is nn.MaxPool2d and isinstance(before, ConvSpec) and before.pool == 1:
        layers.pop()
        return replace(before, pool=_pool_side(module))
    raise UnsupportedModelError(f"layer '{name}' is {type(module).__name__} on {shape}")


def _output_shape(layer: LayerSpec) -> Shape:
    return layer.pooled if isinstance(layer, ConvSpec) else (layer.outputs,)


def _flattens_all(module: nn.Flatten, shape: Shape) -> bool:
    """Whether it makes one axis of all but the batch axis."""
    if len(shape) == 1:
        return True
    return module.start_dim == 1 and module.end_dim in (-1, len(shape))


def _linear(name: str, module: nn.Linear) -> LinearSpec:
    bias = _bias_name(name, module)
    return LinearSpec(f"{name}.weight", bias, module.in_features, module.out_features)


def _conv(name: str, module: nn.Conv2d, shape: Shape) -> ConvSpec:
    if not _is_plain_conv(module) or shape[0] != module.in_channels:
        raise UnsupportedModelError(
            f"layer '{name}' is a convolution with groups, dilation or named padding"
        )
    kernel = _pair(module.kernel_size)
    stride = _pair(module.stride)
    padding = _pair(module.padding)
    height = _output_side(shape[1], kernel[0], stride[0], padding[0])
    width = _output_side(shape[2], kernel[1], stride[1], padding[1])
    outputs = (module.out_channels, height, width)
    bias = _bias_name(name, module)
    return ConvSpec(f"{name}.weight", bias, shape, outputs, kernel, stride, padding)


def _is_plain_conv(module: nn.Conv2d) -> bool:
    if module.groups != 1 or module.dilation != (1, 1):
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _output_side(side: int, kernel: int, stride: int, padding: int) -> int:
    return (side + 2 * padding - kernel) // stride + 1


def _pool_side(module: nn.MaxPool2d) -> int:
    """The side of a pool's window.

    Windows must be square and not padded, and must not overlap or leave gaps.
    """
    side, *others = {*_pair(module.kernel_size), *_pair(module.stride)}
    if others or not _is_plain_pool(module):
        raise UnsupportedModelError("a max-pool has windows that overlap, are padded or not square")
    return side


def _is_plain_pool(module: nn.MaxPool2d) -> bool:
    if module.ceil_mode:
        return False
    return _pair(module.padding) == (0, 0) and _pair(module.dilation) == (1, 1)


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return (value, value)
    first, second = value
    return int(first), int(second)


def _bias_name(name: str, module: nn.Linear | nn.Conv2d) -> str | None:
    return None if module.bias is None else f"{name}.bias"


def _modules_in_order(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that the model calls, each on the output of the one before.

    A functional call counts as the module that does the same.
    """
    modules: list[tuple[str, nn.Module]] = []
    before: fx.Node | None = None
    for node in _trace(model).nodes:
        if node.op not in ("placeholder", "output"):
            modules.append(_module_of(model, node))
        others = [argument for argument in node.all_input_nodes if argument is not before]
        is_second_input = node.op == "placeholder" and before is not None
        if others or is_second_input:
            raise UnsupportedModelError(f"'{node.name}' uses more than the output before it")
        before = node
    return modules


def _trace(model: nn.Module) -> fx.Graph:
    try:
        return fx.symbolic_trace(copy.deepcopy(model).to("meta")).graph
    except Exception as error:  # a user's forward may raise anything when it is traced
        name = type(error).__name__
        raise UnsupportedModelError(f"its forward cannot be traced ({name})") from error


_RELU_FUNCTIONS: tuple[Callable[..., Any] | str, ...] = (functional.relu, torch.relu, "relu")
_FLATTEN_FUNCTIONS: tuple[Callable[..., Any] | str, ...] = (torch.flatten, "flatten")
_POOL_FUNCTIONS: tuple[Callable[..., Any] | str, ...] = (functional.max_pool2d, torch.max_pool2d)
_POOL_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
}


def _module_of(model: nn.Module, node: fx.Node) -> tuple[str, nn.Module]:
    """The module that a node calls, or the module that does the same as its function."""
    if node.op == "call_module":
        name = str(node.target)
        return name, model.get_submodule(name)
    settings: tuple[Any, ...] = node.args[1:]  # without the input
    keywords = _changed_keywords(node)
    if node.target in _RELU_FUNCTIONS and not settings and not keywords:
        return node.name, nn.ReLU()
    if node.target in _FLATTEN_FUNCTIONS and _flattens_from_one(settings, keywords):
        return node.name, nn.Flatten()
    if node.target in _POOL_FUNCTIONS and _sets_window_only(settings, keywords):
        return node.name, nn.MaxPool2d(*settings, **keywords)
    raise UnsupportedModelError(f"'{node.name}' calls {node.target}")


def _changed_keywords(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments that change what the function computes."""
    return {key: value for key, value in node.kwargs.items() if not _has_no_effect(key, value)}


def _has_no_effect(key: str, value: Any) -> bool:
    if key in _POOL_DEFAULTS:
        return bool(value == _POOL_DEFAULTS[key])
    return key == "inplace"


def _flattens_from_one(settings: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether `start_dim` is 1 and nothing else is set."""
    if settings == (1,):
        return not keywords
    return not settings and keywords == {"start_dim": 1}


def _sets_window_only(settings: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    """Whether the window and its stride are all that is set."""
    return len(settings) <= 2 and keywords.keys() <= {"kernel_size", "stride"}
