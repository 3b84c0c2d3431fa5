"""Objects of torchmetrics as metrics; torchmetrics itself is never imported here."""

import math
import re
import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error, describe_value
from glocal.core.metric import Metric, describe_shapes

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def is_of_torchmetrics(metric: object) -> bool:
    """Whether its class or one that it derives from is defined there."""
    modules = [base.__module__ for base in type(metric).__mro__]
    return any(module.split(".")[0] == "torchmetrics" for module in modules)


def from_torchmetrics(metric: Any) -> Metric:
    """An object of torchmetrics under its class's name in snake case; its state is reset."""
    kind = type(metric).__name__
    higher_is_better = getattr(metric, "higher_is_better", None)
    methods = [getattr(metric, name, None) for name in ("update", "compute", "reset")]
    if higher_is_better is None or not all(callable(method) for method in methods):
        raise InputError(
            f"metric: {kind} of torchmetrics has no direction; one metric with higher_is_better "
            "was expected; give glocal.Metric(name, of_client=..., higher_is_better=...)"
        )
    name = _with_underscores(kind)
    of_client = partial(_of_torchmetrics, metric, name)
    return Metric(name, of_client=of_client, higher_is_better=bool(higher_is_better))


def _with_underscores(name: str) -> str:
    return _WORD_STARTS.sub("_", name).lower()


def _of_torchmetrics(metric: Any, name: str, outputs: Tensor, targets: Tensor) -> float | None:
    """The figure of one client; None for NaN, without examples, and where one class is no basis."""
    if not len(targets):
        return None
    try:
        value = _computed(metric, outputs, targets)
    except UserWarning:
        return None
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        if (targets == targets[0]).all():
            return None
        raise InputError(
            f"{name}: {describe_shapes(outputs, targets)}; {describe_error(error)}; "
            "choose the metric's arguments for these shapes"
        ) from error
    return _as_figure(name, value)


def _computed(metric: Any, outputs: Tensor, targets: Tensor) -> Any:
    """What it computes of these examples alone.

    Without examples of a class, torchmetrics warns and sets that class's area under the curve to 0,
    which would be averaged like any other. The warning becomes an error here.
    """
    metric.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "No (positive|negative) samples", UserWarning)
        try:
            metric.update(outputs, targets)
            return metric.compute()
        finally:
            metric.reset()


def _as_figure(name: str, value: Any) -> float | None:
    is_number = isinstance(value, Tensor | int | float)
    if not is_number or torch.as_tensor(value).numel() != 1:
        raise InputError(
            f"metric: {name} computed {describe_value(value)}; one number was expected; "
            "set its argument average, for example to 'macro'"
        )
    return None if math.isnan(value) else float(value)
