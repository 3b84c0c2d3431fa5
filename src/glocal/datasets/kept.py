"""Arrays that can be made again, kept in the cache: written in one step, and read back only if they are what is expected."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
Shape = tuple[int, ...]
_HALF, _A_DAY = "half-", 86_400  # seconds
_PROBES = 16


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """A place to write that becomes `path` in one step at the end; what a killed process left half done a day ago is cleared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f"{_HALF}*"):
        if old.stat().st_mtime < time.time() - _A_DAY:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_HALF) as scratch:
        yield Path(scratch) / path.name
        os.replace(Path(scratch) / path.name, path)


def keep(path: Path, array: Numbers) -> None:
    """Write an array in one step; a cache that cannot be written costs time, not the run."""
    with suppress(OSError), drafted(path) as draft, open(draft, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def recalled(path: Path, dtype: type[np.generic], shape: Shape) -> Numbers | None:
    """The array kept under this path, in memory; None if there is none of this type and shape."""

    def read() -> Numbers:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return _expected(read, dtype, shape)


def mapped(path: Path, dtype: type[np.generic], shape: Shape) -> Numbers | None:
    """The same, mapped from disk; what is written into it is seen by this process alone."""
    return _expected(lambda: np.lib.format.open_memmap(path, mode="c"), dtype, shape)


def places_all_over(rows: int) -> npt.NDArray[np.int64]:
    """A few rows of a kept table, the first and the last among them, by which it is known to be what it should be."""
    return np.unique(np.linspace(0, rows - 1, _PROBES).round().astype(np.int64))


def _expected(read: Callable[[], Numbers], dtype: type[np.generic], shape: Shape) -> Numbers | None:
    try:
        array = read()
    except Exception:  # whatever a file that is damaged, or something else, may raise: it is made again
        return None
    return array if array.dtype == dtype and array.shape == shape else None
