"""Checks of arguments where they enter: what is wrong is refused in one line."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from glocal.core.errors import InputError, describe_value, suggest_name

_LARGEST = 2**63  # torch takes no larger whole number


def require_instance(name: str, value: object, kind: Any, expected: str) -> None:
    """Refuse what is no instance of a type, or of none of several; also the type itself.

    >>> require_instance("options: save", 3, str | None, "a text")
    Traceback (most recent call last):
    ...
    glocal.core.errors.InputError: options: save is 3; a text was expected
    """
    if isinstance(value, type) or not isinstance(value, kind):
        raise InputError(f"{name} is {describe_value(value)}; {expected} was expected")


def require_items(name: str, values: object, kind: Any, expected: str) -> None:
    """Refuse what is no list or tuple of instances of a type."""
    require_instance(name, values, list | tuple, expected)
    assert isinstance(values, list | tuple)
    for place, value in enumerate(values):
        require_instance(f"{name}[{place}]", value, kind, f"{expected} with no other item")


def require_flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False."""
    require_instance(name, value, bool, "True or False")


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuse what is none of some words.

    >>> require_choice("codec: Half", "fp61", ["fp16", "bf16"])
    Traceback (most recent call last):
    ...
    glocal.core.errors.InputError: codec: Half is 'fp61'; did you mean 'fp16'? known: bf16, fp16
    """
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        hint = suggest_name(value if isinstance(value, str) else "", known)
        raise InputError(f"{name} is {describe_value(value)}; {hint}")


def require_number(name: str, value: object, holds: Callable[[float], bool], expected: str) -> None:
    """Refuse what is not a finite number for which something holds.

    >>> require_number("codec: the norm of Clip", -1.0, lambda norm: norm > 0, "above 0")
    Traceback (most recent call last):
    ...
    glocal.core.errors.InputError: codec: the norm of Clip is -1.0; a number above 0 was expected
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not _is_usable(value) or not holds(value):  # type: ignore[arg-type]
        raise InputError(f"{name} is {describe_value(value)}; a number {expected} was expected")


def require_path(name: str, value: object) -> Path:
    """A text that is not empty, or a path, as a path; anything else is refused."""
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        raise InputError(f"{name} is {describe_value(value)}; a path was expected")
    return Path(value)


def _is_usable(number: Any) -> bool:
    if isinstance(number, int):
        return -_LARGEST <= number < _LARGEST
    return math.isfinite(number)
