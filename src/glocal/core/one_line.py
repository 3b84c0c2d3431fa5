"""The `repr` of records that hold tensors or data: one line, whatever they hold."""

from dataclasses import fields
from typing import Any

import numpy as np
from torch import Tensor

from glocal.core.errors import describe_value

_CONTAINERS = (tuple, list, dict, set, frozenset)
_FEW, _SHORT = 6, 80  # items of a container, and characters, that are shown as they are


def one_line(record: Any) -> str:
    """A dataclass or a named tuple by its fields: short ones as they are, others in a few words."""
    if isinstance(record, tuple):
        names = list(record._fields)  # type: ignore[attr-defined]
    else:
        names = [each.name for each in fields(record)]
    shown = [f"{name}={_short(getattr(record, name))}" for name in names]
    return f"{type(record).__name__}({', '.join(shown)})"


def _short(value: object) -> str:
    """The value's own `repr` where it is short; tensors, and many values, are described.

    >>> _short((1, 2)), _short(range), _short([0] * 100_000)
    ('(1, 2)', 'the class range', 'a list of length 100000')
    """
    is_long = isinstance(value, _CONTAINERS) and len(value) > _FEW
    if is_long or _holds_arrays(value) or callable(value):
        return describe_value(value)
    text = repr(value)
    return text if len(text) <= _SHORT and "\n" not in text else describe_value(value)


def _holds_arrays(value: object) -> bool:
    """Whether it is an array, or a container with one: their own `repr` has many lines."""
    items = value.values() if isinstance(value, dict) else value
    if type(value) in _CONTAINERS:
        return any(map(_holds_arrays, items))  # type: ignore[call-overload]
    return isinstance(value, Tensor | np.ndarray)
