"""Losses per example: torch's own, and functions of the user.

Clients train on batches that are padded to one size, so a loss must not reduce over the rows: each
row has a sum and a weight, and the loss of a batch is the ratio of their totals. With that, class
weights and ignored targets give the value that torch's mean has.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from glocal.core.errors import InputError, describe_value

PerExampleValues = Tensor | tuple[Tensor, Tensor]
PerExampleLoss = Callable[[Any, Any], PerExampleValues]
Loss = Callable[..., Any]
IGNORED = -100  # torch's default: a target with this value does not count
_REDUCTIONS = ("mean", "none")


def per_example_loss(loss: Loss, *, has_ignored: bool = False) -> PerExampleLoss:
    """The same loss, with one value (rows,) or (rows, ...) per example, or sums and weights.

    `has_ignored` says that some targets are `IGNORED`: then even the plain cross entropy needs
    weights.
    """
    if isinstance(loss, nn.Module):
        return _of_module(loss, has_ignored)
    if callable(loss) and not isinstance(loss, type):
        return _of_function(loss, has_ignored)
    raise InputError(
        f"loss: {describe_value(loss)} was given; a loss of torch.nn or torch.nn.functional, "
        "or a function (outputs, targets) with one value per example, was expected"
    )


def ignored_index(loss: Loss) -> int | None:
    """The class number that a loss does not count; None for a loss without class numbers."""
    ignored: int | None
    if isinstance(loss, nn.Module):
        ignored = getattr(loss, "ignore_index", None)
        return ignored
    function, settings = _function_and_settings(loss)
    ignored = settings.get("ignore_index", IGNORED)
    return ignored if function in (functional.cross_entropy, functional.nll_loss) else None


def per_example_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of every example (rows,)."""
    return functional.cross_entropy(logits, labels, reduction="none")


@dataclass(frozen=True, eq=False)
class WeightedCrossEntropy:
    """Torch's cross entropy of logits, or of log-probabilities, as sums and weights (rows,)."""

    weight: Tensor | None = None
    ignore_index: int = IGNORED
    label_smoothing: float = 0.0
    from_logits: bool = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The sums and the weights of all positions of every row."""
        class_weights = None if self.weight is None else self.weight.to(outputs)
        losses = self._losses(outputs, targets, class_weights)
        weights = self._weights(targets, class_weights, losses)
        return _sum_over_positions(losses), _sum_over_positions(weights)

    def _losses(self, outputs: Tensor, targets: Tensor, class_weights: Tensor | None) -> Tensor:
        settings: dict[str, Any] = {"weight": class_weights, "reduction": "none"}
        if not self.from_logits:
            return functional.nll_loss(outputs, targets, ignore_index=self.ignore_index, **settings)
        if not targets.is_floating_point():
            settings["ignore_index"] = self.ignore_index
        smoothing = self.label_smoothing
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing, **settings)

    def _weights(self, targets: Tensor, class_weights: Tensor | None, losses: Tensor) -> Tensor:
        """The weight of every position: that of its class, 0 where the target is ignored."""
        if targets.is_floating_point():  # probabilities of classes: torch divides by the rows
            return torch.ones_like(losses)
        counts = targets != self.ignore_index
        if class_weights is None:
            return counts.to(losses)
        return class_weights[torch.where(counts, targets, 0)] * counts


@dataclass(frozen=True, eq=False)
class UnreducedModule:
    """A loss module without reduction; its buffers follow the outputs."""

    module: nn.Module

    def __call__(self, outputs: Any, targets: Any) -> PerExampleValues:
        """One value or more per row."""
        buffers = {name: buffer.to(outputs) for name, buffer in self.module.named_buffers()}
        values: PerExampleValues = functional_call(self.module, buffers, (outputs, targets))
        return values


def _of_module(loss: nn.Module, has_ignored: bool) -> PerExampleLoss:
    if any(True for _ in loss.parameters()):
        raise InputError(
            f"loss: {type(loss).__name__} has parameters of its own, which nobody would train; "
            "make them part of the model"
        )
    _require_reduction(getattr(loss, "reduction", "mean"))
    if type(loss) in (nn.CrossEntropyLoss, nn.NLLLoss):
        return _cross_entropy(
            has_ignored,
            weight=loss.weight,
            ignore_index=loss.ignore_index,
            label_smoothing=getattr(loss, "label_smoothing", 0.0),
            from_logits=type(loss) is nn.CrossEntropyLoss,
        )
    unreduced = copy.deepcopy(loss)
    if hasattr(unreduced, "reduction"):
        unreduced.__dict__["reduction"] = "none"
    return UnreducedModule(unreduced)


def _of_function(loss: Loss, has_ignored: bool) -> PerExampleLoss:
    function, settings = _function_and_settings(loss)
    if not _takes_reduction(function):
        return loss
    _require_reduction(settings.pop("reduction", "mean"))
    if function in (functional.cross_entropy, functional.nll_loss):
        _refuse_legacy_settings(settings)
        from_logits = function is functional.cross_entropy
        return _cross_entropy(has_ignored, **settings, from_logits=from_logits)
    return partial(function, **settings, reduction="none")


def _function_and_settings(loss: Loss) -> tuple[Loss, dict[str, Any]]:
    """The function of a partial and its keywords; any other function as it is."""
    if isinstance(loss, partial) and not loss.args:
        return loss.func, dict(loss.keywords)
    return loss, {}


def _cross_entropy(has_ignored: bool, **settings: Any) -> PerExampleLoss:
    """The plain cross entropy where it will do: the engines' fused steps know it."""
    loss = WeightedCrossEntropy(**settings)
    _require_class_weights(loss.weight)
    is_plain = loss.weight is None and not loss.label_smoothing and loss.from_logits
    if is_plain and loss.ignore_index == IGNORED and not has_ignored:
        return per_example_cross_entropy
    return loss


def _takes_reduction(function: Loss) -> bool:
    try:
        return "reduction" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin
        return False


def _require_reduction(reduction: object) -> None:
    if reduction not in _REDUCTIONS:
        raise InputError(
            f"loss: its reduction is {reduction!r}; 'mean' or 'none' was expected, as the examples "
            "of a batch are weighted alike whatever its size"
        )


def _require_class_weights(weight: Tensor | None) -> None:
    if weight is None:
        return
    if not isinstance(weight, Tensor) or not bool((weight >= 0).all()) or not bool(weight.any()):
        raise InputError(
            f"loss: the class weights are {describe_value(weight)}; "
            "a tensor with one weight of at least 0 per class, not all 0, was expected"
        )


def _refuse_legacy_settings(settings: Mapping[str, Any]) -> None:
    legacy = sorted(settings.keys() & {"size_average", "reduce"})
    if legacy:
        raise InputError(f"loss: {legacy[0]} is out of date in torch; use reduction='mean'")


def _sum_over_positions(values: Tensor) -> Tensor:
    """The sum (rows,) of values (rows, ...)."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def masked_mean(values: PerExampleValues, mask: Tensor) -> Tensor:
    """The mean of a loss over the rows with mask True; 0 when there are none.

    `values` are (rows,), or (rows, ...) whose mean counts, or a pair of sums and weights (rows,).
    """
    require_by_row(values, len(mask))
    if isinstance(values, tuple):
        return _ratio(*values, mask)
    by_row = values if values.dim() == 1 else values.flatten(1).mean(1)
    real = torch.where(mask, by_row, torch.zeros_like(by_row))
    return real.sum() / mask.sum().clamp(min=1)


def _ratio(sums: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """The total of the real rows' sums by that of their weights; 0 where nothing has a weight."""
    total = torch.where(mask, sums, torch.zeros_like(sums)).sum()
    weight = torch.where(mask, weights, torch.zeros_like(weights)).sum()
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1), 0 * total)


def require_by_row(values: object, rows: int) -> None:
    """Refuse a loss that reduces: padded rows are in its mean, and no mask can remove them."""
    if not isinstance(values, tuple):
        if not isinstance(values, Tensor) or values.shape[:1] != (rows,):
            _refuse_shape(values, rows, "one value per example")
        return
    for part in values:
        if not isinstance(part, Tensor) or part.shape != (rows,):
            _refuse_shape(part, rows, "a pair of sums and weights, one of each per example")


def _refuse_shape(values: object, rows: int, expected: str) -> None:
    shape = getattr(values, "shape", None)
    returned = f"a {type(values).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise InputError(
        f"loss: it returned {returned} for {rows} examples; {expected}, shape ({rows},), was "
        "expected: use reduction='none' in it, or give torch's loss itself"
    )
