"""Arrays that can be made again, kept in the cache: written in one step, and read back only if they are what is expected."""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
Shape = tuple[int, ...]


def keep(path: Path, array: Numbers) -> None:
    """Write an array in one step; a cache that cannot be written costs time, not the run."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            with open(Path(scratch) / path.name, "wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
            os.replace(file.name, path)


def recalled(path: Path, dtype: type[np.generic], shape: Shape) -> Numbers | None:
    """The array kept under this path, in memory; None if there is none of this type and shape."""

    def read() -> Numbers:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return _expected(read, dtype, shape)


def mapped(path: Path, dtype: type[np.generic], shape: Shape) -> Numbers | None:
    """The same, mapped from disk; what is written into it is seen by this process alone."""
    return _expected(lambda: np.lib.format.open_memmap(path, mode="c"), dtype, shape)


def _expected(read: Callable[[], Numbers], dtype: type[np.generic], shape: Shape) -> Numbers | None:
    try:
        array = read()
    except Exception:  # whatever a file that is damaged, or something else, may raise: it is made again
        return None
    return array if array.dtype == dtype and array.shape == shape else None
