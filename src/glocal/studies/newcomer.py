"""A new device's own examples, from a file or a function of the user's, held against what the federation expects."""

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from glocal.errors import InputError, brief
from glocal.federation import Examples, Federation, Holdings, carve, check, gathered
from glocal.studies.build import called, named_function

TEST_SHARE = 0.3  # of data that come without a test part


class Newcomer(NamedTuple):
    """What a new device has: labelled examples to learn from and to be tested on, and inputs without a label."""

    train: Examples
    test: Examples
    unlabelled: Tensor


def read_newcomer(address: str, *, like: Tensor, classes: int, seed: int) -> Newcomer:
    """From FILE.npz with x and y (and x_test, y_test), or from "module:function" that returns the same; y may be missing."""
    arrays = _from_file(Path(address)) if address.endswith(".npz") else _from_function(address)
    _require_shapes(arrays, like)
    if not len(arrays["x"]):
        raise InputError(f"join: {address} holds no examples; a new device needs some, labelled or not")
    empty = Examples(like.new_zeros((0, *like.shape[1:])), torch.zeros(0, dtype=torch.int64))
    if "y" not in arrays:
        return Newcomer(empty, empty, torch.as_tensor(arrays["x"]).to(like.dtype))
    newcomer = _parted(arrays, seed)
    rest = Holdings(newcomer.train, (np.zeros(0, dtype=np.int64),))
    holdings = [Holdings(part, (np.arange(len(part.y), dtype=np.int64),)) for part in newcomer[:2]]
    check(Federation(holdings[0], rest, holdings[1]), classes)
    return newcomer


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except FileNotFoundError as error:
        raise InputError(f"join: there is no file {path}; give an .npz file with x and y, or module:function") from error
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"join: {path} cannot be read ({brief(error)}); write it with numpy.savez(path, x=..., y=...)") from error
    return _named(arrays, str(path))


def _from_function(address: str) -> dict[str, Any]:
    if ":" not in address:
        raise InputError(f"join: the data are '{address}'; give an .npz file with x and y, or module:function")
    made = called(named_function(address, "data"), address)
    if isinstance(made, dict):
        return _named(made, address)
    if isinstance(made, tuple | list) and len(made) in (2, 4):
        return dict(zip(("x", "y", "x_test", "y_test"), made, strict=False))
    raise InputError(f"join: {address} returned {type(made).__name__}; (x, y), (x, y, x_test, y_test) or a dict was expected")


def _named(arrays: dict[str, Any], where: str) -> dict[str, Any]:
    known = {"x", "y", "x_test", "y_test"}
    if "x" not in arrays or not known >= arrays.keys() or ("x_test" in arrays) != ("y_test" in arrays):
        raise InputError(
            f"join: {where} holds {sorted(arrays)}; x and y were expected, and x_test with y_test if there is a test part"
        )
    return arrays


def _require_shapes(arrays: dict[str, Any], like: Tensor) -> None:
    """Refuse inputs that the federation's network was not made for."""
    for name in ("x", "x_test"):
        if name not in arrays:
            continue
        given = torch.as_tensor(arrays[name])
        kind = torch.float32 if given.dtype == torch.float64 else given.dtype
        if given.shape[1:] != like.shape[1:] or kind != like.dtype:
            raise InputError(
                f"join: {name} is {tuple(given.shape)} {given.dtype}, but this federation takes (rows, {_spoken(like.shape[1:])}) "
                f"{like.dtype}, prepared as its own data were; bring it into that form"
            )


def _spoken(shape: Sequence[int]) -> str:
    return ", ".join(map(str, shape))


def _parted(arrays: dict[str, Any], seed: int) -> Newcomer:
    """Train and test as given, or a part of the examples set aside for the test."""
    whole = gathered([(arrays["x"], arrays["y"])]).examples
    if "x_test" in arrays:
        test = gathered([(arrays["x_test"], arrays["y_test"])]).examples
        return Newcomer(whole, test, whole.x)
    kept, taken = carve(np.arange(len(whole.y), dtype=np.int64), TEST_SHARE, seed, "test", 0)
    train, test = whole.take(kept), whole.take(taken)
    return Newcomer(train, test, train.x)
