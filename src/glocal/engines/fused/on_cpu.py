"""Gradient descent on one device in one call of compiled code, for chains of plain layers on a CPU."""

import ctypes
from collections.abc import Callable, Iterable
from threading import Lock

import torch
from torch import Tensor

from glocal.core.optimizers import Optimiser, Sgd
from glocal.core.training import AugmentedLoss, ModelLoss, Objective, Pull, Work, cross_entropy_of_each, made_beforehand
from glocal.core.trees import Params
from glocal.engines.fused.build import load_step
from glocal.engines.fused.chain import Chain, Conv, Linear, NotAChainError, Shape, chain_of

_FLOATS, _WHOLE = ctypes.c_void_p, ctypes.c_int64


class _LayerSpec(ctypes.Structure):
    """Mirrors LayerSpec of step.cpp."""

    _fields_ = (
        *((name, _WHOLE) for name in ("is_conv", "channels", "height", "width", "outputs")),
        *((name, _WHOLE) for name in ("kernel_height", "kernel_width", "stride_height", "stride_width", "pad_height", "pad_width")),
        *((name, _WHOLE) for name in ("relu", "pool")),
        *((name, _FLOATS) for name in ("weight", "bias", "weight_anchor", "bias_anchor")),
        *((name, ctypes.c_double) for name in ("weight_pull", "bias_pull")),
    )


class _Job(ctypes.Structure):
    """Mirrors Job of step.cpp."""

    _fields_ = (
        ("layers", ctypes.POINTER(_LayerSpec)),
        ("layer_count", _WHOLE),
        ("x", _FLOATS),
        ("y", ctypes.c_void_p),
        ("rows", _WHOLE),
        ("order", ctypes.c_void_p),
        ("steps", _WHOLE),
        ("batch", _WHOLE),
        *((name, ctypes.c_double) for name in ("rate", "momentum", "weight_decay", "pull_floor", "loss")),
    )


class _DeclinedError(Exception):
    """Why this work is for the general path, in one line."""


class FusedOnCpu:
    """A `Descent` in compiled code; `reason` says why it last declined. Several threads may call it at once."""

    def __init__(self) -> None:
        self.reason = ""
        self._compiled: Callable[..., int] | None = None
        self._chains: dict[tuple[ModelLoss, Shape], Chain | str] = {}
        self._alone = Lock()  # tracing a model patches torch for its duration

    def __call__(self, objective: Objective, params: Params, work: Work, optimiser: Optimiser) -> tuple[Params, Tensor] | None:
        """Trained params and the mean loss over examples (); None if it declines."""
        try:
            rule = _rule(optimiser)
            one, shown = _plain(objective, work._replace(order=work.order[:1, :1]))
            chain = self._chain(_model_loss(one), _shape(shown))
            objective, work = _plain(objective, work)
            _require_plain(objective, params, work, chain)
            return self._train(chain, objective, params, work, rule)
        except _DeclinedError as declined:
            self.reason = str(declined)
            return None

    def _chain(self, loss: ModelLoss, shape: Shape) -> Chain:
        """The model as a chain, found once."""
        with self._alone:
            if (loss, shape) not in self._chains:
                self._chains[loss, shape] = _chain_or_reason(loss, shape)
            found = self._chains[loss, shape]
        if isinstance(found, str):
            raise _DeclinedError(found)
        return found

    def _step(self) -> Callable[..., int]:
        """The compiled step, loaded or compiled when it is first needed: a model that is declined needs none."""
        with self._alone:
            if self._compiled is None:
                step = load_step().glocal_train
                step.argtypes, step.restype = [ctypes.POINTER(_Job)], ctypes.c_int
                self._compiled = step
        return self._compiled

    def _train(self, chain: Chain, objective: Objective, params: Params, work: Work, rule: Sgd) -> tuple[Params, Tensor]:
        trained = {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in params.items()}
        strengths, anchors, floor = merged_pulls(objective.pulls)
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
            rate=rule.pace(int(work.round_index)),
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            pull_floor=floor,
        )
        _require_trained(self._step()(ctypes.byref(job)))
        return trained, torch.tensor(job.loss, dtype=torch.float32)


def merged_pulls(pulls: Iterable[Pull]) -> tuple[dict[str, float], Params, float]:
    """Many pulls as one: by name its strength S and anchor m, and a floor c: sum of s/2 |w - a|^2 = S/2 |w - m|^2 + c."""
    by_name: dict[str, list[tuple[float, Tensor]]] = {}
    for towards, strength in pulls:
        for name, anchor in towards.items() if strength else ():
            by_name.setdefault(name, []).append((strength, anchor.detach()))
    strengths = {name: sum(strength for strength, _ in parts) for name, parts in by_name.items()}
    middles = {name: _middle(parts) for name, parts in by_name.items()}
    floor = sum(strength / 2 * _squared(anchor - middles[name]) for name, parts in by_name.items() for strength, anchor in parts)
    return strengths, middles, floor


def _middle(parts: list[tuple[float, Tensor]]) -> Tensor:
    """The mean of anchors, weighted by their strengths."""
    if len(parts) == 1:
        return parts[0][1].contiguous()
    weighted = torch.stack([strength * anchor.double() for strength, anchor in parts]).sum(0)
    return (weighted / sum(strength for strength, _ in parts)).to(parts[0][1].dtype)


def _squared(difference: Tensor) -> float:
    return float(difference.double().square().sum())


def _layer_spec(layer: Linear | Conv, weights: Params, strengths: dict[str, float], anchors: Params) -> _LayerSpec:
    spec = _LayerSpec(
        relu=layer.relu,
        weight=weights[layer.weight].data_ptr(),
        weight_anchor=_address(anchors, layer.weight),
        weight_pull=strengths.get(layer.weight, 0.0),
        bias=_address(weights, layer.bias),
        bias_anchor=_address(anchors, layer.bias),
        bias_pull=strengths.get(layer.bias or "", 0.0),
    )
    if isinstance(layer, Linear):
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


def _require_trained(outcome: int) -> None:
    """What step.cpp's Outcome says; the general path then raises what it always raised."""
    said = {1: "a row of the order is outside the examples", 2: "a label is no class of the model", 3: "there is no memory left"}
    if outcome:
        raise _DeclinedError(said.get(outcome, f"the compiled step returned {outcome}"))


def _rule(optimiser: Optimiser) -> Sgd:
    if type(optimiser) is not Sgd:
        raise _DeclinedError(f"the optimiser is {type(optimiser).__name__}, not Sgd")
    return optimiser


def _plain(objective: Objective, work: Work) -> tuple[Objective, Work]:
    """The same on examples that are augmented beforehand, if they are to be."""
    loss = objective.loss
    if type(loss) is not AugmentedLoss or type(loss.inner) is not ModelLoss:
        return objective, work
    examples, order = made_beforehand(loss.augment, work.examples, work.order, work.key)
    return objective._replace(loss=loss.inner), work._replace(examples=examples, order=order)


def _model_loss(objective: Objective) -> ModelLoss:
    loss = objective.loss
    if type(loss) is not ModelLoss:
        raise _DeclinedError(f"the loss is {getattr(loss, '__name__', type(loss).__name__)}, not a model's own")
    if loss.per_example is not cross_entropy_of_each:
        raise _DeclinedError("the loss is not the cross entropy")
    return loss


def _shape(work: Work) -> Shape:
    return tuple(work.examples.x.shape[1:])


def _chain_or_reason(loss: ModelLoss, shape: Shape) -> Chain | str:
    try:
        chain = chain_of(loss.model, shape)
    except NotAChainError as error:
        return str(error)
    if chain.softmax:
        return "it ends in a softmax"
    convs = [layer for layer in chain.layers if isinstance(layer, Conv)]
    empty = next((conv.weight for conv in convs if min(conv.pooled) < 1), None)
    return f"nothing leaves the layer of '{empty}'" if empty else chain


def _require_plain(objective: Objective, params: Params, work: Work, chain: Chain) -> None:
    """Decline whatever compiled code cannot read where it lies."""
    x, y, _ = work.examples
    pulled = [(name, tensor) for towards, _ in objective.pulls for name, tensor in towards.items()]
    named = [*params.items(), *pulled, ("x", x), ("y", y), ("order", work.order), ("round_index", work.round_index)]
    for name, tensor in named:
        _require_readable(name, tensor, torch.float32 if name in params or name == "x" else torch.int64)
    _require_shapes(params, chain, objective)
    for name, tensor in pulled:
        if tensor.shape != params[name].shape:
            raise _DeclinedError(f"a pull on '{name}' has another shape")
    if any(strength < 0 for _, strength in objective.pulls):
        raise _DeclinedError("a pull pushes")
    if not (x.is_contiguous() and y.is_contiguous()):
        raise _DeclinedError("the examples are not contiguous")
    if work.order.dim() != 2 or work.order.numel() == 0 or y.shape != x.shape[:1]:
        raise _DeclinedError("there is no batch")


def _require_readable(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise _DeclinedError("devices are batched")
    if tensor.device.type != "cpu" or tensor.dtype != dtype or tensor.layout != torch.strided:
        raise _DeclinedError(f"'{name}' is {tensor.dtype} on {tensor.device.type}, not {dtype} on cpu")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise _DeclinedError(f"'{name}' asks for a gradient")


def _require_shapes(params: Params, chain: Chain, objective: Objective) -> None:
    expected = {name: shape for layer in chain.layers for name, shape in _shapes(layer).items()}
    if params.keys() != expected.keys() or objective.trains != expected.keys():
        raise _DeclinedError("not every weight of the model is trained")
    for name, shape in expected.items():
        if params[name].shape != shape:
            raise _DeclinedError(f"'{name}' is {tuple(params[name].shape)}, not {shape}")


def _shapes(layer: Linear | Conv) -> dict[str, Shape]:
    weight: Shape = (layer.outputs[0], layer.inputs[0], *layer.kernel) if isinstance(layer, Conv) else (layer.outputs, layer.inputs)
    return {layer.weight: weight} | ({layer.bias: weight[:1]} if layer.bias else {})
