"""Gradient descent on one device in one call of compiled code, for chains of plain layers on a CPU."""

import ctypes
from collections.abc import Callable, Iterable
from threading import Lock

import torch
from torch import Tensor

from glocal.core.optimizers import SGD, Optimizer
from glocal.core.training import (
    AugmentedLoss,
    ModelLoss,
    Objective,
    Proximal,
    Work,
    per_example_cross_entropy,
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
)

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class _LayerSpec(ctypes.Structure):
    """Mirrors LayerSpec of step.cpp."""

    _fields_ = (
        *((name, _INT64) for name in ("is_conv", "channels", "height", "width", "outputs")),
        *(
            (name, _INT64)
            for name in (
                "kernel_height",
                "kernel_width",
                "stride_height",
                "stride_width",
                "pad_height",
                "pad_width",
            )
        ),
        *((name, _INT64) for name in ("relu", "pool")),
        *((name, _POINTER) for name in ("weight", "bias", "weight_anchor", "bias_anchor")),
        *((name, ctypes.c_double) for name in ("weight_pull", "bias_pull")),
    )


class _Job(ctypes.Structure):
    """Mirrors Job of step.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(_LayerSpec)),
        ("layer_count", _INT64),
        ("x", _POINTER),
        ("y", ctypes.c_void_p),
        ("rows", _INT64),
        ("order", ctypes.c_void_p),
        ("steps", _INT64),
        ("batch", _INT64),
        *(
            (name, ctypes.c_double)
            for name in ("lr", "momentum", "weight_decay", "pull_floor", "loss")
        ),
    )


class _DeclinedError(Exception):
    """Why this work is for the general path, in one line."""


class FusedCpuTraining:
    """A `LocalTrainer` in compiled code; `reason` says why it last declined. Several threads may call it at once."""

    def __init__(self) -> None:
        self.reason = ""
        self._compiled: Callable[..., int] | None = None
        self._chains: dict[tuple[ModelLoss, Shape], LayerChain | str] = {}
        self._lock = Lock()  # tracing a model patches torch for its duration

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        """Trained params and the mean loss over examples (); None if it declines."""
        try:
            rule = _require_sgd(optimizer)
            one, shown = _augmented_beforehand(objective, work._replace(order=work.order[:1, :1]))
            chain = self._chain(_model_loss(one), _shape(shown))
            objective, work = _augmented_beforehand(objective, work)
            _require_supported(objective, params, work, chain)
            return self._train(chain, objective, params, work, rule)
        except _DeclinedError as declined:
            self.reason = str(declined)
            return None

    def _chain(self, loss: ModelLoss, shape: Shape) -> LayerChain:
        """The model as a chain, found once."""
        with self._lock:
            if (loss, shape) not in self._chains:
                self._chains[loss, shape] = _chain_or_reason(loss, shape)
            found = self._chains[loss, shape]
        if isinstance(found, str):
            raise _DeclinedError(found)
        return found

    def _step(self) -> Callable[..., int]:
        """The compiled step, loaded or compiled when it is first needed: a model that is declined needs none."""
        with self._lock:
            if self._compiled is None:
                step = load_step().glocal_train
                step.argtypes, step.restype = [ctypes.POINTER(_Job)], ctypes.c_int
                self._compiled = step
        return self._compiled

    def _train(
        self, chain: LayerChain, objective: Objective, params: Params, work: Work, rule: SGD
    ) -> tuple[Params, Tensor]:
        trained = {
            name: tensor.detach().clone(memory_format=torch.contiguous_format)
            for name, tensor in params.items()
        }
        strengths, anchors, floor = merge_pulls(objective.proximal)
        specs = [_layer_spec(layer, trained, strengths, anchors) for layer in chain.layers]
        order = work.order.contiguous()
        job = _Job(
            layers=(_LayerSpec * len(specs))(*specs),
            layer_count=len(specs),
            x=work.examples.x.data_ptr(),
            y=work.examples.y.data_ptr(),
            rows=len(work.examples.y),
            order=order.data_ptr(),
            steps=order.shape[0],
            batch=order.shape[1],
            lr=rule.lr_at(int(work.round_index)),
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            pull_floor=floor,
        )
        _require_success(self._step()(ctypes.byref(job)))
        return trained, torch.tensor(job.loss, dtype=torch.float32)


def merge_pulls(proximal: Iterable[Proximal]) -> tuple[dict[str, float], Params, float]:
    """Many pulls as one: by name its strength S and anchor m, and a floor c: sum of s/2 |w - a|^2 = S/2 |w - m|^2 + c."""
    by_name: dict[str, list[tuple[float, Tensor]]] = {}
    for anchors, strength in proximal:
        for name, anchor in anchors.items() if strength else ():
            by_name.setdefault(name, []).append((strength, anchor.detach()))
    strengths = {name: sum(strength for strength, _ in parts) for name, parts in by_name.items()}
    middles = {name: _weighted_anchor(parts) for name, parts in by_name.items()}
    floor = sum(
        strength / 2 * _squared_norm(anchor - middles[name])
        for name, parts in by_name.items()
        for strength, anchor in parts
    )
    return strengths, middles, floor


def _weighted_anchor(parts: list[tuple[float, Tensor]]) -> Tensor:
    """The mean of anchors, weighted by their strengths."""
    if len(parts) == 1:
        return parts[0][1].contiguous()
    weighted = torch.stack([strength * anchor.double() for strength, anchor in parts]).sum(0)
    return (weighted / sum(strength for strength, _ in parts)).to(parts[0][1].dtype)


def _squared_norm(difference: Tensor) -> float:
    return float(difference.double().square().sum())


def _layer_spec(
    layer: LinearSpec | ConvSpec, weights: Params, strengths: dict[str, float], anchors: Params
) -> _LayerSpec:
    spec = _LayerSpec(
        relu=layer.relu,
        weight=weights[layer.weight].data_ptr(),
        weight_anchor=_address(anchors, layer.weight),
        weight_pull=strengths.get(layer.weight, 0.0),
        bias=_address(weights, layer.bias),
        bias_anchor=_address(anchors, layer.bias),
        bias_pull=strengths.get(layer.bias or "", 0.0),
    )
    if isinstance(layer, LinearSpec):
        spec.channels, spec.height, spec.width, spec.outputs = layer.inputs, 1, 1, layer.outputs
        return spec
    spec.is_conv, spec.outputs, spec.pool = 1, layer.outputs[0], layer.pool
    spec.channels, spec.height, spec.width = layer.inputs
    spec.kernel_height, spec.kernel_width = layer.kernel
    spec.stride_height, spec.stride_width = layer.stride
    spec.pad_height, spec.pad_width = layer.padding
    return spec


def _address(tree: Params, name: str | None) -> int | None:
    return tree[name].data_ptr() if name in tree else None


def _require_success(outcome: int) -> None:
    """What step.cpp's Outcome says; the general path then raises what it always raised."""
    said = {
        1: "a row of the order is outside the examples",
        2: "a label is no class of the model",
        3: "there is no memory left",
    }
    if outcome:
        raise _DeclinedError(said.get(outcome, f"the compiled step returned {outcome}"))


def _require_sgd(optimizer: Optimizer) -> SGD:
    if type(optimizer) is not SGD:
        raise _DeclinedError(f"the optimiser is {type(optimizer).__name__}, not Sgd")
    return optimizer


def _augmented_beforehand(objective: Objective, work: Work) -> tuple[Objective, Work]:
    """The same on examples that are augmented beforehand, if they are to be."""
    loss = objective.loss
    if type(loss) is not AugmentedLoss or type(loss.inner) is not ModelLoss:
        return objective, work
    examples, order = precompute_augmented(loss.augment, work.examples, work.order, work.key)
    return objective._replace(loss=loss.inner), work._replace(examples=examples, order=order)


def _model_loss(objective: Objective) -> ModelLoss:
    loss = objective.loss
    if type(loss) is not ModelLoss:
        raise _DeclinedError(
            f"the loss is {getattr(loss, '__name__', type(loss).__name__)}, not a model's own"
        )
    if loss.per_example is not per_example_cross_entropy:
        raise _DeclinedError("the loss is not the cross entropy")
    return loss


def _shape(work: Work) -> Shape:
    return tuple(work.examples.x.shape[1:])


def _chain_or_reason(loss: ModelLoss, shape: Shape) -> LayerChain | str:
    try:
        chain = parse_chain(loss.model, shape)
    except UnsupportedModelError as error:
        return str(error)
    if chain.softmax:
        return "it ends in a softmax"
    convs = [layer for layer in chain.layers if isinstance(layer, ConvSpec)]
    empty = next((conv.weight for conv in convs if min(conv.pooled) < 1), None)
    return f"nothing leaves the layer of '{empty}'" if empty else chain


def _require_supported(objective: Objective, params: Params, work: Work, chain: LayerChain) -> None:
    """Decline whatever compiled code cannot read where it lies."""
    x, y, _ = work.examples
    pulled = [(name, tensor) for anchor, _ in objective.proximal for name, tensor in anchor.items()]
    named = [
        *params.items(),
        *pulled,
        ("x", x),
        ("y", y),
        ("order", work.order),
        ("round_index", work.round_index),
    ]
    for name, tensor in named:
        _require_readable(
            name, tensor, torch.float32 if name in params or name == "x" else torch.int64
        )
    _require_shapes(params, chain, objective)
    for name, tensor in pulled:
        if tensor.shape != params[name].shape:
            raise _DeclinedError(f"a pull on '{name}' has another shape")
    if any(strength < 0 for _, strength in objective.proximal):
        raise _DeclinedError("a pull pushes")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise _DeclinedError("the examples are not contiguous")
    if work.order.dim() != 2 or work.order.numel() == 0 or y.shape != x.shape[:1]:
        raise _DeclinedError("there is no batch")


def _require_readable(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _DeclinedError("devices are batched")
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.layout != torch.strided:
        raise _DeclinedError(
            f"'{name}' is {tensor.dtype} on {tensor.device.type}, not {dtype} on cpu"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _DeclinedError(f"'{name}' asks for a gradient")


def _require_shapes(params: Params, chain: LayerChain, objective: Objective) -> None:
    expected = {name: shape for layer in chain.layers for name, shape in _shapes(layer).items()}
    if params.keys() != expected.keys() or objective.trainable != expected.keys():
        raise _DeclinedError("not every weight of the model is trained")
    for name, shape in expected.items():
        if params[name].shape != shape:
            raise _DeclinedError(f"'{name}' is {tuple(params[name].shape)}, not {shape}")


def _shapes(layer: LinearSpec | ConvSpec) -> dict[str, Shape]:
    weight: Shape = (
        (layer.outputs[0], layer.inputs[0], *layer.kernel)
        if isinstance(layer, ConvSpec)
        else (layer.outputs, layer.inputs)
    )
    return {layer.weight: weight} | ({layer.bias: weight[:1]} if layer.bias else {})
