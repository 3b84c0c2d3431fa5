"""A new client's examples, from a file or a user's function, checked against the federation's."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from glocal.core.data import Examples, Rows, hold_out
from glocal.core.errors import InputError, describe_error
from glocal.core.task import Task
from glocal.core.values import describe_form, require_tensor
from glocal.personalize.class_targets import count_classes
from glocal.studies.user_functions import call_user_function, import_function

TEST_FRACTION = 0.3  # of data without a test part
_NAMES = ("x", "y", "x_test", "y_test")
_UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    AttributeError,
    EOFError,
    KeyError,
    zipfile.BadZipFile,
)


class NewClient(NamedTuple):
    """A new client's labelled examples for training and test, and its inputs without labels."""

    train: Examples
    test: Examples
    unlabeled: Tensor


def read_new_client(address: str, *, task: Task, like: Examples, seed: int) -> NewClient:
    """The new client's data, from FILE.npz or "module:function".

    They hold x and y, and maybe x_test and y_test; y may be missing. Their form is that of the
    examples `like`; where these have no targets, the new client needs none either.
    """
    inputs = require_tensor(like.x, "join")
    arrays = _from_file(Path(address)) if address.endswith(".npz") else _from_function(address)
    tensors = {name: _as_tensor(name, array) for name, array in arrays.items() if array is not None}
    for name in ("x", "x_test"):
        if name in tensors:
            tensors[name] = _as_inputs(name, tensors[name], inputs)
    if task.make_targets is not None and "y" not in tensors:
        tensors["y"] = require_tensor(task.make_targets(tensors["x"]), "join: targets")
    classes = count_classes(task, like)
    for name, target_name in (("x", "y"), ("x_test", "y_test")):
        if target_name in tensors:
            targets, own_inputs = tensors[target_name], tensors[name]
            tensors[target_name] = _checked(target_name, targets, own_inputs, like, classes)
    if not len(tensors["x"]):
        raise InputError(
            f"data: {address} holds no examples; a new client needs some, labelled or not"
        )
    return _with_test_split(tensors, like, seed)


def read_inputs(address: str, *, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inputs to predict, and their labels if there are any, from FILE.npz or "module:function"."""
    arrays = _from_file(Path(address)) if address.endswith(".npz") else _from_function(address)
    tensors = {name: _as_tensor(name, array) for name, array in arrays.items() if array is not None}
    tensors["x"] = _as_inputs("x", tensors["x"], like)
    if not len(tensors["x"]):
        raise InputError(f"data: {address} holds no inputs; give at least one")
    if "y" in tensors and tensors["y"].shape != tensors["x"].shape[:1]:
        raise InputError(
            f"data: y is {tuple(tensors['y'].shape)} for {len(tensors['x'])} inputs; "
            "one label per input was expected"
        )
    return tensors["x"], tensors.get("y")


def _from_file(path: Path) -> Mapping[str, Any]:
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, NpzFile):
            raise TypeError("it is one array, not several by name")
        with file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise InputError(
            f"data: there is no file {path}; give an .npz file with x and y, or module:function"
        ) from error
    except _UNREADABLE as error:
        raise InputError(
            f"data: {path} cannot be read ({describe_error(error)}); "
            "write it with numpy.savez(path, x=..., y=...)"
        ) from error
    return _by_name(arrays, str(path))


def _from_function(address: str) -> Mapping[str, Any]:
    if ":" not in address:
        raise InputError(
            f"data: the data are '{address}'; give an .npz file with x and y, or module:function"
        )
    data = call_user_function(import_function(address, "data"), address)
    if isinstance(data, dict):
        return _by_name(data, address)
    if isinstance(data, tuple | list) and len(data) in (2, 4):
        return _by_name(dict(zip(_NAMES[: len(data)], data, strict=True)), address)
    raise InputError(
        f"data: {address} returned {type(data).__name__}; "
        "(x, y), (x, y, x_test, y_test) or a dict was expected"
    )


def _by_name(arrays: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if (
        "x" not in arrays
        or not {*_NAMES} >= arrays.keys()
        or ("x_test" in arrays) != ("y_test" in arrays)
    ):
        names = ", ".join(sorted(map(str, arrays))) or "nothing"
        raise InputError(
            f"data: {where} holds {names}; "
            "x and y were expected, and x_test with y_test if there is a test part"
        )
    return arrays


def _as_tensor(name: str, array: Any) -> Tensor:
    """Numbers of any byte order and layout."""
    try:
        native = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
        return torch.from_numpy(np.ascontiguousarray(native, dtype=native.dtype.newbyteorder("=")))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: {name} cannot be read as numbers ({describe_error(error)}); give one array"
        ) from error


def _as_inputs(name: str, inputs: Tensor, like: Tensor) -> Tensor:
    """Inputs in the precision of the federation's own; others than these are refused."""
    if inputs.is_floating_point() and like.is_floating_point():
        inputs = inputs.to(like.dtype)
    if (
        inputs.dim() != like.dim()
        or inputs.shape[1:] != like.shape[1:]
        or inputs.dtype != like.dtype
    ):
        shape = ", ".join(map(str, like.shape[1:]))
        raise InputError(
            f"data: {name} is {tuple(inputs.shape)} {inputs.dtype}, "
            f"but this federation takes (rows, {shape}) {like.dtype}; "
            "prepare it in the same way as the federation's own data"
        )
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise InputError(f"data: {name} holds NaN or infinity; clean or drop those examples")
    return inputs


def _checked(
    name: str, targets: Tensor, inputs: Tensor, like: Examples, classes: int | None
) -> Tensor:
    """The targets in the type of the federation's own; others than these are refused."""
    own = require_tensor(like.y, "join: targets")
    if classes is not None:
        _require_labels(name, targets, inputs, classes)
        return targets.long()
    is_whole = not targets.is_floating_point() and not targets.is_complex()
    has_type = is_whole or (targets.is_floating_point() and own.is_floating_point())
    if not has_type or targets.shape != (len(inputs), *own.shape[1:]):
        raise InputError(
            f"data: {name} is {tuple(targets.shape)} {targets.dtype} for {len(inputs)} inputs; "
            f"one target {describe_form(own)} per input was expected, as the federation has them"
        )
    if targets.is_floating_point() and not bool(torch.isfinite(targets).all()):
        raise InputError(f"data: {name} holds NaN or infinity; clean or drop those examples")
    return targets.to(own.dtype)


def _require_labels(name: str, labels: Tensor, inputs: Tensor, classes: int) -> None:
    """Refuse labels that are not one class index per input."""
    if labels.shape != inputs.shape[:1]:
        raise InputError(
            f"data: {name} is {tuple(labels.shape)} for {len(inputs)} inputs; "
            "one label per input was expected"
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise InputError(
            f"data: {name} is {labels.dtype}; "
            f"class numbers 0..{classes - 1} as whole numbers were expected"
        )
    wrong = labels[(labels < 0) | (labels >= classes)]
    if len(wrong):
        raise InputError(
            f"data: {name} holds {int(wrong[0])}, "
            f"but this federation knows the classes 0..{classes - 1}; leave it out"
        )


def _with_test_split(tensors: Mapping[str, Tensor], like: Examples, seed: int) -> NewClient:
    """Training and test examples as given, or some labelled ones held out for the test."""
    x = tensors["x"]
    empty = Examples(x[:0], like.y[:0].cpu())
    test = Examples(tensors["x_test"], tensors["y_test"]) if "x_test" in tensors else None
    if "y" not in tensors and like.has_targets:
        return NewClient(empty, test or empty, x)
    labeled = Examples(x, tensors.get("y", x))
    if test is not None:
        return NewClient(labeled, test, x)
    rows: Rows = np.arange(labeled.num_rows, dtype=np.int64)
    train_rows, test_rows = hold_out(rows, TEST_FRACTION, seed, "test", 0)
    unlabeled = x[torch.from_numpy(train_rows)]
    return NewClient(labeled.take(train_rows), labeled.take(test_rows), unlabeled)
