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

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
_TEMPORARY_PREFIX, _STALE_AFTER = "half-", 86_400  # seconds
_PROBES = 16


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A place to write that becomes `path` in one step at the end; what a killed process left half done a day ago is cleared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for old in path.parent.glob(f"{_TEMPORARY_PREFIX}*"):
        if old.stat().st_mtime < time.time() - _STALE_AFTER:
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY_PREFIX) as scratch:
        yield Path(scratch) / path.name
        os.replace(Path(scratch) / path.name, path)


def save_array(path: Path, array: Array) -> None:
    """Write an array in one step; a cache that cannot be written costs time, not the run."""
    with suppress(OSError), atomic_path(path) as draft, open(draft, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def load_array(path: Path, dtype: type[np.generic], shape: Shape) -> Array | None:
    """The array kept under this path, in memory; None if there is none of this type and shape."""

    def read() -> Array:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return _read_checked(read, dtype, shape)


def mmap_array(path: Path, dtype: type[np.generic], shape: Shape) -> Array | None:
    """The same, mapped from disk; what is written into it is seen by this process alone."""
    return _read_checked(lambda: np.lib.format.open_memmap(path, mode="c"), dtype, shape)


def probe_rows(rows: int) -> npt.NDArray[np.int64]:
    """A few rows of a kept table, the first and the last among them, by which it is known to be what it should be."""
    return np.unique(np.linspace(0, rows - 1, _PROBES).round().astype(np.int64))


def _read_checked(read: Callable[[], Array], dtype: type[np.generic], shape: Shape) -> Array | None:
    try:
        array = read()
    except (
        Exception
    ):  # whatever a file that is damaged, or something else, may raise: it is made again
        return None
    return array if array.dtype == dtype and array.shape == shape else None
