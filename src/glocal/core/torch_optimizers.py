"""Torch's optimizers with their settings, as the pure functions that clients train with."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from glocal.core.errors import InputError, describe_value
from glocal.core.optimizers import SGD, Adam, AdamW, Optimizer

_EXPECTED = (
    "glocal.SGD, Adam or AdamW with a learning rate, or functools.partial of torch.optim.SGD, "
    "Adam or AdamW, was expected"
)
_KNOWN: dict[Any, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    torch.optim.SGD: (SGD, ("lr", "momentum", "weight_decay")),
    torch.optim.Adam: (Adam, ("lr", "betas", "eps", "weight_decay")),
    torch.optim.AdamW: (AdamW, ("lr", "betas", "eps", "weight_decay")),
}
# settings of torch that change no numbers, whatever their value
_SPEED = ("foreach", "fused", "capturable", "differentiable")


def as_optimizer(given: object) -> Optimizer:
    """An optimizer of ours, or of one of torch's in a `functools.partial`.

    >>> as_optimizer(partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    SGD(lr=0.1, momentum=0.9, weight_decay=0, lr_decay=0.0, lr_schedule=None)
    """
    if isinstance(given, partial) and given.func in _KNOWN and not given.args:
        return _translated(given.func, given.keywords)
    if isinstance(given, type | torch.optim.Optimizer | partial):
        name = getattr(given, "__name__", describe_value(given))
        raise InputError(f"optimizer: {name} was given; {_EXPECTED}")
    if not all(hasattr(given, name) for name in ("init", "step", "description")):
        raise InputError(f"optimizer: {describe_value(given)} was given; {_EXPECTED}")
    return given  # type: ignore[return-value]


def _translated(kind: Any, settings: Mapping[str, Any]) -> Optimizer:
    make, names = _KNOWN[kind]
    defaults = kind([torch.nn.Parameter(torch.zeros(1))], lr=0.1).defaults
    for name, value in settings.items():
        is_default = name in defaults and value == defaults[name]
        if name not in names and name not in _SPEED and not is_default:
            raise InputError(
                f"optimizer: torch.optim.{kind.__name__} was given {name}={value!r}; "
                f"{', '.join(names)} are supported; leave {name} out"
            )
    chosen = {name: value for name, value in {**defaults, **settings}.items() if name in names}
    return make(**chosen)
