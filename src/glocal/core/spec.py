"""The spec of a value: plain data that differ wherever something that changes numbers differs.

It is the fingerprint of an algorithm: for resuming, for the check between server and clients, and
for the report. It is derived by walking dataclass fields, so nobody lists settings by hand. What
cannot be distinguished from another value is refused and never skipped.

A function of the user's counts with its bytecode, its defaults, and all that it closes over, so
that a run is not resumed after the function was edited. Bytecode differs between versions of
Python, which a server and its clients may have: `with_code=False` leaves it out.
"""

import hashlib
import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cached_property, partial
from textwrap import shorten
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.model_tensors import frozen_tensors, unique_tensors

Spec = Any  # what JSON can hold
_PLAIN = (bool, int, float, str, type(None))
_LIBRARIES = ("glocal", "torch")


def spec_of(value: Any, *, with_code: bool = True) -> Spec:
    """The value as plain data.

    >>> spec_of({"lr": 1.0, "betas": (0.5, 2)})
    {'lr': 1, 'betas': [{'float': '0x1.0000000000000p-1'}, 2]}
    """
    return _Walk(with_code).visit(value, "")


def fingerprint(spec: Spec) -> str:
    """A short hash of plain data.

    >>> fingerprint({"a": 1})
    'f9d86028c6e0d64e'
    """
    return hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:16]


def first_difference(before: Spec, after: Spec, path: str = "") -> tuple[str, Spec, Spec] | None:
    """Where two specs differ first, and both values there; None where they are equal.

    >>> first_difference({"a": {"lr": 1}}, {"a": {"lr": 2}})
    ('a.lr', 1, 2)
    """
    if before == after:
        return None
    if _is_table(before) and _is_table(after):
        for key in dict.fromkeys([*after, *before]):
            inner = f"{path}.{key}" if path else str(key)
            difference = first_difference(before.get(key), after.get(key), inner)
            if difference:
                return difference
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for place, (old, new) in enumerate(zip(before, after, strict=True)):
            difference = first_difference(old, new, f"{path}[{place}]")
            if difference:
                return difference
    return path, before, after


def _is_table(spec: Spec) -> bool:
    """Whether it has settings of its own: a number does not, however it is written."""
    return isinstance(spec, dict) and spec.keys() != {"float"}


def describe_spec(spec: Spec) -> str:
    """A part of a spec in a few words, for messages.

    >>> describe_spec({"float": (0.25).hex()})
    '0.25'
    >>> describe_spec({"type": "glocal.core.optimizers.SGD"})
    'SGD'
    """
    if isinstance(spec, dict):
        if spec.keys() == {"float"}:
            return str(float.fromhex(spec["float"]))
        named = next((spec[key] for key in ("type", "function", "module") if key in spec), None)
        if isinstance(named, str):
            return named.rpartition(".")[2]
    if spec is None:
        return "none"
    if isinstance(spec, str):
        return shorten(spec.rpartition(".")[2] if "glocal." in spec else spec, 60)
    return json.dumps(spec) if len(json.dumps(spec)) <= 60 else fingerprint(spec)


class _Walk:
    """One walk through a value; functions that refer to each other are visited once."""

    def __init__(self, with_code: bool) -> None:
        self.with_code = with_code
        self.visiting: set[int] = set()

    def visit(self, value: Any, path: str) -> Spec:
        """The spec of what lies at a path."""
        if isinstance(value, float):
            return int(value) if value.is_integer() else {"float": value.hex()}
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, list | tuple):
            return [self.visit(each, f"{path}[{place}]") for place, each in enumerate(value)]
        if isinstance(value, set | frozenset):
            return {"set": sorted(json.dumps(self.visit(each, path)) for each in value)}
        if isinstance(value, Mapping):
            return {str(key): self.visit(each, f"{path}.{key}") for key, each in value.items()}
        if isinstance(value, torch.dtype | torch.device):
            return str(value)
        if isinstance(value, Tensor | np.ndarray):
            return _tensor_spec(torch.as_tensor(value))
        if isinstance(value, nn.Module):
            return self._module(value, path)
        return self._object(value, path)

    def _object(self, value: Any, path: str) -> Spec:
        if isinstance(value, partial):
            arguments = [*value.args, value.keywords]
            return {"partial": self.visit(value.func, path), "with": self.visit(arguments, path)}
        if isinstance(value, type) or inspect.isbuiltin(value):
            return _full_name(value)
        if isinstance(value, types.MethodType):
            return {"method": value.__name__, "of": self.visit(value.__self__, path)}
        if inspect.isfunction(value):
            return self._function(value, path)
        if is_dataclass(value):
            return self._dataclass(value, path)
        raise InputError(
            f"spec: {path.lstrip('.') or 'the value'} is a {type(value).__name__}, and two of them "
            "cannot be distinguished; make it a frozen dataclass, so that its settings are known"
        )

    def _dataclass(self, value: Any, path: str) -> Spec:
        settings = {}
        for each in fields(value):
            if each.compare:
                settings[each.name] = self.visit(getattr(value, each.name), f"{path}.{each.name}")
        _refuse_hidden(value, path)
        return {"type": _full_name(type(value)), **self._code_of_class(type(value)), **settings}

    def _module(self, module: nn.Module, path: str) -> Spec:
        """The structure, the frozen tensors' values, and the shapes of all others.

        The tensors of a module without parameters, such as the class weights of a loss, are never
        trained, so their values count.
        """
        is_trained = next(module.parameters(), None) is not None
        frozen = frozen_tensors(module) if is_trained else unique_tensors(module)
        tensors = {}
        for name, tensor in unique_tensors(module).items():
            tensors[name] = _tensor_spec(tensor) if name in frozen else _form(tensor)
        layers = []
        for name, layer in module.named_modules():
            settings = self._plain_attributes(layer, path)
            layers.append([name, _full_name(type(layer)), layer.extra_repr(), settings])
        code: dict[str, Spec] = {}
        for kind in sorted({type(layer) for layer in module.modules()}, key=_full_name):
            code |= self._code_of_class(kind).get("code", {})
        return {"module": layers, "tensors": tensors, **({"code": code} if code else {})}

    def _plain_attributes(self, module: nn.Module, path: str) -> Spec:
        """Settings that a module's own repr may not show, such as a loss's ignore_index."""
        plain = {}
        for name, value in sorted(vars(module).items()):
            if not name.startswith("_") and name != "training" and isinstance(value, _PLAIN):
                plain[name] = self.visit(value, path)
        return plain

    def _function(self, function: Callable[..., Any], path: str) -> Spec:
        """The name, and for a user's function what it computes."""
        name = _full_name(function)
        if _is_library(function) and not function.__closure__:
            return {"function": name}
        if id(function) in self.visiting:
            return {"function": name}
        self.visiting.add(id(function))
        used = inspect.getclosurevars(function)
        held = {**used.globals, **used.nonlocals} if not _is_library(function) else used.nonlocals
        uses = {}
        for key, value in sorted(held.items()):
            uses[key] = value.__name__ if inspect.ismodule(value) else self.visit(value, path)
        defaults = self.visit([function.__defaults__, function.__kwdefaults__], path)
        self.visiting.discard(id(function))
        spec = {"function": name, "uses": uses, "defaults": defaults}
        return {**spec, "code": _digest(function.__code__)} if self.with_code else spec

    def _code_of_class(self, kind: type) -> dict[str, Spec]:
        """A user's own class may be edited between two runs: its methods count too."""
        if not self.with_code:
            return {}
        code = {}
        for base in kind.__mro__:
            if base is object or _is_library(base) or _is_builtin(base):
                continue
            digests = {}
            for name, attribute in vars(base).items():
                function = getattr(attribute, "fget", None) or getattr(attribute, "func", attribute)
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and not _is_generated(name, function):
                    digests[name] = _digest(function.__code__)
            code[_full_name(base)] = digests
        return {"code": code} if code else {}


def _is_generated(name: str, function: Callable[..., Any]) -> bool:
    """Whether `dataclass` wrote a method: its code holds the paths of no file."""
    return name.startswith("__") and function.__code__.co_filename == "<string>"


def _tensor_spec(tensor: Tensor) -> Spec:
    """Shape, type and a hash of the values."""
    if tensor.is_meta:
        return _form(tensor)
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return {**_form(tensor), "values": hashlib.sha256(raw).hexdigest()[:16]}


def _form(tensor: Tensor) -> Spec:
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype)}


def _refuse_hidden(value: Any, path: str) -> None:
    """An attribute that is no field would change numbers and not the spec."""
    if not hasattr(value, "__dict__"):
        return
    derived = set[str]()
    for base in type(value).__mro__:
        derived |= {name for name, each in vars(base).items() if isinstance(each, cached_property)}
    hidden = vars(value).keys() - {each.name for each in fields(value)} - derived
    if hidden:
        raise InputError(
            f"spec: {path.lstrip('.') or _full_name(type(value))} has {sorted(hidden)}, which "
            "are no fields of the dataclass; declare them as fields"
        )


def _digest(code: types.CodeType) -> str:
    """A hash of what a function's bytecode does, without the paths of its file."""
    constants = list(map(_constant, code.co_consts))
    text = repr((code.co_code.hex(), constants, code.co_names, code.co_varnames))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _constant(value: object) -> str:
    if inspect.iscode(value):
        return _digest(value)
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _is_library(thing: Any) -> bool:
    return str(thing.__module__).split(".")[0] in _LIBRARIES


def _is_builtin(kind: type) -> bool:
    return kind.__module__ in ("builtins", "typing", "abc")


def _full_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
