"""Local training of one client in one call of compiled code: chains of plain layers on a CPU."""

import ctypes
from collections.abc import Callable, Iterable
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.core.optimizers import SGD, Optimizer
from glocal.core.training import (
    AugmentedLoss,
    ModelLoss,
    Objective,
    Proximal,
    Trained,
    WeightedSum,
    Work,
    precompute_augmented,
)
from glocal.core.trees import Params
from glocal.engines.fused.compiler import load_step
from glocal.engines.fused.layer_chain import (
    ConvSpec,
    LayerChain,
    LinearSpec,
    Shape,
    UnsupportedModelError,
    parse_chain,
    unsupported_data,
)

_POINTER, _INT64, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
# messages for Status in step.cpp; the general path then raises its own error
_FAILURES = {
    1: "a row of the order is outside the examples",
    2: "a label is no class of the model",
    3: "there is no memory left",
}


class _LayerSpec(ctypes.Structure):
    """Mirrors LayerSpec of job.h."""

    _fields_ = (
        ("is_conv", _INT64),
        ("channels", _INT64),
        ("height", _INT64),
        ("width", _INT64),
        ("outputs", _INT64),
        ("kernel_height", _INT64),
        ("kernel_width", _INT64),
        ("stride_height", _INT64),
        ("stride_width", _INT64),
        ("pad_height", _INT64),
        ("pad_width", _INT64),
        ("relu", _INT64),
        ("pool", _INT64),
        ("weight", _POINTER),
        ("bias", _POINTER),
        ("weight_anchor", _POINTER),
        ("bias_anchor", _POINTER),
        ("weight_strength", _DOUBLE),
        ("bias_strength", _DOUBLE),
    )


class _Job(ctypes.Structure):
    """Mirrors Job of job.h."""

    _fields_ = (
        ("layers", ctypes.POINTER(_LayerSpec)),
        ("layer_count", _INT64),
        ("x", _POINTER),
        ("y", _POINTER),
        ("rows", _INT64),
        ("order", _POINTER),
        ("steps", _INT64),
        ("batch_size", _INT64),
        ("lr", _DOUBLE),
        ("momentum", _DOUBLE),
        ("weight_decay", _DOUBLE),
        ("proximal_floor", _DOUBLE),
        ("loss", _DOUBLE),
    )


class _DeclinedError(Exception):
    """Why this work is for the general path, in one line."""


class MergedProximal(NamedTuple):
    """Several proximal terms as one: strengths and anchors by name, and a constant `floor`."""

    strengths: dict[str, float]
    anchors: Params
    floor: float


_Step = Callable[..., int]
_Chains = dict[tuple[ModelLoss, Shape], LayerChain | str]


class FusedCpuTraining:
    """A `LocalTrainer` in compiled code; `reason` says why it last declined.

    Several threads may call it at once.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._compiled: _Step | None = None
        self._chains: _Chains = {}
        self._lock = Lock()  # tracing a model patches torch while it lasts

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained | None:
        """Trained params and the loss; None if it declines."""
        try:
            sgd = _require_sgd(optimizer)
            one_example = work._replace(order=work.order[:1, :1, :1], keys=work.keys[:1, :1])
            plain, sample = _augment_first(objective, one_example)
            chain = self._chain(_model_loss(plain, sample), _input_shape(sample))
            objective, work = _augment_first(objective, work)
            _require_supported(objective, params, work, chain)
            return self._train(chain, objective, params, work, sgd)
        except _DeclinedError as declined:
            self.reason = str(declined)
            return None

    def _chain(self, loss: ModelLoss, shape: Shape) -> LayerChain:
        chain = self._chain_or_reason(loss, shape)
        if isinstance(chain, str):
            raise _DeclinedError(chain)
        return chain

    def _chain_or_reason(self, loss: ModelLoss, shape: Shape) -> LayerChain | str:
        """The model as a chain, or why it is none; each model is parsed once."""
        with self._lock:
            if (loss, shape) not in self._chains:
                self._chains[loss, shape] = _parse(loss, shape)
            return self._chains[loss, shape]

    def _step(self) -> _Step:
        """The compiled step, loaded when it is first needed: a declined model needs none."""
        with self._lock:
            if self._compiled is None:
                self._compiled = _load()
        return self._compiled

    def _train(
        self, chain: LayerChain, objective: Objective, params: Params, work: Work, sgd: SGD
    ) -> Trained:
        trained = _copy(params)
        proximal = merge_proximal(objective.proximal)
        order = work.flat_order.contiguous()
        job = _job(work, order, sgd, int(work.round_index))
        # the structure holds addresses only: trained, proximal and order must outlive the call
        layers = [_layer_spec(layer, trained, proximal) for layer in chain.layers]
        job.layers = (_LayerSpec * len(layers))(*layers)
        job.layer_count = len(layers)
        job.proximal_floor = proximal.floor
        status = self._step()(ctypes.byref(job))
        if status:
            raise _DeclinedError(_FAILURES.get(status, f"the compiled step returned {status}"))
        count = (order >= 0).sum().to(torch.float32)
        return Trained(
            trained, WeightedSum(torch.tensor(job.loss, dtype=torch.float32) * count, count)
        )


def _load() -> _Step:
    step = load_step().glocal_train
    step.argtypes = [ctypes.POINTER(_Job)]
    step.restype = ctypes.c_int
    return step


def merge_proximal(proximal: Iterable[Proximal]) -> MergedProximal:
    """Several proximal terms as one term and a constant.

    By name: sum of s/2 ||w - a||^2 = S/2 ||w - m||^2 + c, where S is the sum of the strengths s, m
    the mean of the anchors a weighted by s, and c the floor.
    """
    by_name: dict[str, list[tuple[float, Tensor]]] = {}
    for anchors, strength in proximal:
        if strength:
            for name, anchor in anchors.items():
                by_name.setdefault(name, []).append((strength, anchor.detach()))
    strengths, means, floor = {}, {}, 0.0
    for name, terms in by_name.items():
        strengths[name] = sum(strength for strength, _ in terms)
        means[name] = _weighted_anchor(terms)
        for strength, anchor in terms:
            floor += strength / 2 * _squared_norm(anchor - means[name])
    return MergedProximal(strengths, means, floor)


def _weighted_anchor(terms: list[tuple[float, Tensor]]) -> Tensor:
    """The mean of anchors, weighted by their strengths."""
    if len(terms) == 1:
        return terms[0][1].contiguous()
    weighted = [strength * anchor.double() for strength, anchor in terms]
    total = sum(strength for strength, _ in terms)
    return (torch.stack(weighted).sum(0) / total).to(terms[0][1].dtype)


def _squared_norm(difference: Tensor) -> float:
    return float(difference.double().square().sum())


def _copy(params: Params) -> Params:
    """Contiguous copies that compiled code may overwrite."""
    copies = {}
    for name, tensor in params.items():
        copies[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copies


def _job(work: Work, order: Tensor, sgd: SGD, round_index: int) -> _Job:
    """The job without its layers."""
    return _Job(
        x=work.examples.x.data_ptr(),
        y=work.examples.y.data_ptr(),
        rows=work.examples.num_rows,
        order=order.data_ptr(),
        steps=order.shape[0],
        batch_size=order.shape[1],
        lr=sgd.lr_at(round_index),
        momentum=sgd.momentum,
        weight_decay=sgd.weight_decay,
    )


def _layer_spec(
    layer: LinearSpec | ConvSpec, weights: Params, proximal: MergedProximal
) -> _LayerSpec:
    spec = _LayerSpec(
        relu=layer.relu,
        weight=weights[layer.weight].data_ptr(),
        weight_anchor=_address(proximal.anchors, layer.weight),
        weight_strength=proximal.strengths.get(layer.weight, 0.0),
        bias=_address(weights, layer.bias),
        bias_anchor=_address(proximal.anchors, layer.bias),
        bias_strength=proximal.strengths.get(layer.bias or "", 0.0),
    )
    if isinstance(layer, LinearSpec):
        spec.channels, spec.height, spec.width = layer.inputs, 1, 1
        spec.outputs = layer.outputs
    else:
        _set_conv_sizes(spec, layer)
    return spec


def _set_conv_sizes(spec: _LayerSpec, layer: ConvSpec) -> None:
    spec.is_conv = 1
    spec.outputs = layer.outputs[0]
    spec.pool = layer.pool
    spec.channels, spec.height, spec.width = layer.inputs
    spec.kernel_height, spec.kernel_width = layer.kernel
    spec.stride_height, spec.stride_width = layer.stride
    spec.pad_height, spec.pad_width = layer.padding


def _address(tree: Params, name: str | None) -> int | None:
    return tree[name].data_ptr() if name in tree else None


def _require_sgd(optimizer: Optimizer) -> SGD:
    if type(optimizer) is not SGD:
        raise _DeclinedError(f"the optimiser is {type(optimizer).__name__}, not SGD")
    return optimizer


def _augment_first(objective: Objective, work: Work) -> tuple[Objective, Work]:
    """The same training on examples that are augmented beforehand, if the loss augments them."""
    loss = objective.loss
    if type(loss) is not AugmentedLoss or type(loss.inner) is not ModelLoss:
        return objective, work
    return objective._replace(loss=loss.inner), precompute_augmented(loss.augment, work)


def _model_loss(objective: Objective, work: Work) -> ModelLoss:
    loss = objective.loss
    if reason := unsupported_data(loss, work.examples):
        raise _DeclinedError(reason)
    assert isinstance(loss, ModelLoss)
    return loss


def _input_shape(work: Work) -> Shape:
    return tuple(work.examples.x.shape[1:])


def _parse(loss: ModelLoss, shape: Shape) -> LayerChain | str:
    """The model as a chain, or why it is none that compiled code can train."""
    try:
        chain = parse_chain(loss.model, shape)
    except UnsupportedModelError as error:
        return str(error)
    return _obstacle(chain) or chain


def _obstacle(chain: LayerChain) -> str:
    if chain.softmax:
        return "it ends in a softmax"
    for layer in chain.layers:
        if isinstance(layer, ConvSpec) and min(layer.pooled) < 1:
            return f"the output of the layer of '{layer.weight}' is empty"
    return ""


def _require_supported(objective: Objective, params: Params, work: Work, chain: LayerChain) -> None:
    """Decline everything that compiled code cannot read in place."""
    _require_readable_tensors(objective, params, work)
    _require_whole_model(params, chain, objective)
    _require_proximal(objective, params)
    if objective.linear:
        raise _DeclinedError("the objective has a linear term")
    x, y, _ = work.examples
    if not (x.is_contiguous() and y.is_contiguous()):
        raise _DeclinedError("the examples are not contiguous")
    if work.order.dim() != 3 or work.order.numel() == 0 or y.shape != x.shape[:1]:
        raise _DeclinedError("there is no batch")


def _require_readable_tensors(objective: Objective, params: Params, work: Work) -> None:
    x, y, _ = work.examples
    for name, tensor in params.items():
        _require_readable(name, tensor, torch.float32)
    for anchor, _ in objective.proximal:
        for name, tensor in anchor.items():
            _require_readable(name, tensor, torch.float32)
    _require_readable("x", x, torch.float32)
    _require_readable("y", y, torch.int64)
    _require_readable("order", work.order, torch.int64)
    _require_readable("round_index", work.round_index, torch.int64)


def _require_readable(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _DeclinedError("clients are batched")
    device = tensor.device.type
    if device != "cpu" or tensor.dtype != dtype or tensor.layout != torch.strided:
        raise _DeclinedError(f"'{name}' is {tensor.dtype} on {device}, not {dtype} on cpu")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _DeclinedError(f"'{name}' requires a gradient")


def _require_whole_model(params: Params, chain: LayerChain, objective: Objective) -> None:
    shapes: dict[str, Shape] = {}
    for layer in chain.layers:
        shapes |= _shapes(layer)
    if params.keys() != shapes.keys() or objective.trainable != shapes.keys():
        raise _DeclinedError("not every weight of the model is trained")
    for name, shape in shapes.items():
        if params[name].shape != shape:
            raise _DeclinedError(f"'{name}' is {tuple(params[name].shape)}, not {shape}")


def _require_proximal(objective: Objective, params: Params) -> None:
    for anchor, strength in objective.proximal:
        for name, tensor in anchor.items():
            if name not in params:
                raise _DeclinedError(f"the anchor '{name}' is no parameter of the model")
            if tensor.shape != params[name].shape:
                raise _DeclinedError(f"the anchor of '{name}' has another shape")
        if strength < 0:
            raise _DeclinedError("a proximal term has a negative strength")


def _shapes(layer: LinearSpec | ConvSpec) -> dict[str, Shape]:
    """The shapes of weight and bias, by name."""
    shape = _weight_shape(layer)
    shapes = {layer.weight: shape}
    if layer.bias:
        shapes[layer.bias] = shape[:1]
    return shapes


def _weight_shape(layer: LinearSpec | ConvSpec) -> Shape:
    if isinstance(layer, ConvSpec):
        return (layer.outputs[0], layer.inputs[0], *layer.kernel)
    return (layer.outputs, layer.inputs)
