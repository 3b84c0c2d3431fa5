"""Arrays in the cache, written in one step and read only with the expected type and shape."""

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
_TEMPORARY_PREFIX = "half-"
_STALE_AFTER = 86_400  # seconds
_PROBES = 16


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` in one step at the end.

    What a killed process left behind more than a day ago is deleted.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete_stale(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=_TEMPORARY_PREFIX) as folder:
        draft = Path(folder) / path.name
        yield draft
        os.replace(draft, path)


def save_array(path: Path, array: Array) -> None:
    """Write an array in one step; without write permission the next run computes it again."""
    with suppress(OSError), atomic_path(path) as draft, open(draft, "wb") as file:
        np.save(file, array)
        file.flush()
        os.fsync(file.fileno())


def load_array(path: Path, dtype: type[np.generic], shape: Shape) -> Array | None:
    """The array under this path, in memory; None without one of this type and shape."""

    def read() -> Array:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)

    return _read_checked(read, dtype, shape)


def mmap_array(path: Path, dtype: type[np.generic], shape: Shape) -> Array | None:
    """The same, mapped from disk; only this process sees what it writes into the array."""
    return _read_checked(lambda: np.lib.format.open_memmap(path, mode="c"), dtype, shape)


def probe_rows(rows: int) -> npt.NDArray[np.int64]:
    """A few rows of a table, to compare a cached copy by; the first and the last are included."""
    return np.unique(np.linspace(0, rows - 1, _PROBES).round().astype(np.int64))


def _delete_stale(folder: Path) -> None:
    oldest = time.time() - _STALE_AFTER
    for draft in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        if draft.stat().st_mtime < oldest:
            shutil.rmtree(draft, ignore_errors=True)


def _read_checked(read: Callable[[], Array], dtype: type[np.generic], shape: Shape) -> Array | None:
    try:
        array = read()
    except Exception:  # a damaged file may raise anything; its array is computed again
        return None
    return array if array.dtype == dtype and array.shape == shape else None
