"""What is kept on disk: every file is written whole or not at all, tensors as safetensors, the rest as JSON."""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from glocal.core.errors import GlocalWarning, InputError
from glocal.core.trees import Params

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None  # type: ignore[assignment]

Json = dict[str, Any]
FORMAT = "0.2"  # the first version of glocal that wrote files as this one does
_LOCK = ".running"


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Hold a folder while it is written, and refuse whoever comes second; None is no folder.

    The kernel drops the lock when its process ends, also by kill -9: a lock file that was left
    behind locks nothing. Folders that were made for this, and in which nothing came to be, go.
    """
    if folder is None:
        yield
        return
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(folder / _LOCK)
    except BlockingIOError as error:
        raise InputError(f"run: {folder} is being run already; stop that one first") from error
    except OSError as error:
        told = f"disk: cannot write {folder} ({_reason(error)})"
        raise InputError(f"{told}; free some space or choose another folder") from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / _LOCK).unlink()  # while it is held: see `_acquire_lock`
        lock.close()
        for each in new:
            with suppress(OSError):  # not empty
                each.rmdir()


def _acquire_lock(path: Path) -> BinaryIO:
    """The lock file, open and held.

    It is deleted by whoever holds it. One that was deleted after it was opened here, and before it
    was locked, keeps nobody else out, so that another is made.
    """
    while True:
        file = path.open("ab")
        try:
            if fcntl is None:
                return file
            # a forked worker may outlive us, and must not hold the folder
            os.register_at_fork(after_in_child=file.close)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
            file.close()
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            told = f"disk: {path.parent} cannot be locked ({_reason(error)})"
            warnings.warn(f"{told}; run nothing else in it", GlocalWarning, stacklevel=4)
            return file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A place to write that becomes `path` in one step at the end; on any failure `path` stays as it was."""
    half = path.with_name(path.name + ".half")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield half
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            half.unlink()
        raise InputError(
            f"disk: cannot write {path} ({_reason(error)}); free some space or choose another folder"
        ) from error


def _reason(error: Exception) -> str:
    return (
        (error.strerror or str(error)) if isinstance(error, OSError) else str(error).splitlines()[0]
    )


def require_writable(path: Path) -> None:
    """Refuse, before the work, a file that could not be written after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("its folder is read-only")
    except OSError as error:
        raise InputError(
            f"disk: {path} cannot be written ({_reason(error)}); give a file in a folder of yours"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    with atomic_write(path) as half:
        half.write_text(text, encoding="utf-8")


def write_secret(path: Path, data: bytes) -> None:
    """Replace a file that nobody but its owner may read."""

    def opened(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    with atomic_write(path) as half, open(half, "wb", opener=opened) as file:
        file.write(data)
        file.flush()


def restrict_permissions(folders: Iterable[Path], files: Iterable[Path]) -> list[Path]:
    """Take the rights of others to these away; those that had any. What cannot be had is refused."""
    open_to_others = []
    for path, mode in [*((path, 0o700) for path in folders), *((path, 0o600) for path in files)]:
        if not path.exists() or not path.stat().st_mode & 0o077:
            continue
        with suppress(OSError):
            path.chmod(mode)
        if path.stat().st_mode & 0o077:
            raise InputError(
                f"disk: {path} can be read by others, and its rights cannot be changed; "
                "let it belong to the user who runs this, on a disk that keeps rights"
            )
        open_to_others.append(path)
    return open_to_others


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file."""
    write_text(path, format_json(data) + "\n")


def format_json(data: object, depth: int = 0) -> str:
    """JSON with a line for every table or list of plain values, and an entry a line in the others.

    >>> print(format_json({"seeds": [0, 1], "course": [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]}))
    {
     "seeds": [0, 1],
     "course": [
      {"round": 1, "loss": 0.5},
      {"round": 2, "loss": 0.25}
     ]
    }
    """
    entries = (
        data.values() if isinstance(data, dict) else data if isinstance(data, list | tuple) else ()
    )
    if not any(isinstance(entry, dict | list | tuple) for entry in entries):
        return json.dumps(data)
    inner = [format_json(entry, depth + 1) for entry in entries]
    if isinstance(data, dict):
        names = (json.dumps({key: 0})[1:-4] for key in data)  # as json spells keys, or refuses them
        inner = [f"{name}: {entry}" for name, entry in zip(names, inner, strict=True)]
    opened, closed = "{}" if isinstance(data, dict) else "[]"
    line = f"\n{' ' * depth}"
    return f"{opened}{line} " + f",{line} ".join(inner) + f"{line}{closed}"


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file that must be there and hold a dict or a list, not an empty one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"run: {path} does not exist; give the folder of a run, as `glocal run` printed it"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"run: {path} cannot be read ({error}); restore it or start the run anew"
        ) from error
    if not isinstance(data, kind) or not data:
        raise InputError(
            f"run: {path} does not hold what glocal writes there; restore it or start the run anew"
        )
    return data


def require_format(data: Json, path: Path) -> Json:
    """The same data without their format; a file of another version of glocal is refused."""
    found = data.get("format", "0.1")  # version 0.1 wrote none
    if found != FORMAT:
        raise InputError(
            f"run: {path} was written by glocal {found}, and {FORMAT} was expected; "
            f"run it again, or use glocal {found}"
        )
    return {key: value for key, value in data.items() if key != "format"}


def write_tensors(path: Path, tensors: Params, metadata: Mapping[str, object]) -> None:
    """Replace a safetensors file; `metadata` and the format go into its header as JSON."""
    with atomic_write(path) as half:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = json.dumps({"format": FORMAT, **metadata})
        save_file(contiguous, half, metadata={"metadata": header})


def read_metadata(path: Path) -> Json:
    """What the header of a safetensors file says about it; the tensors are not read."""
    with _open_tensors(path, "cpu") as file:
        header = file.metadata() or {}
        if "metadata" not in header and "about" not in header:
            return {}  # not a file of glocal
        metadata = json.loads(header.get("metadata", "{}"))  # "about" was version 0.1's name
        if not isinstance(metadata, dict):
            raise ValueError("its header holds no table")
        return require_format(metadata, path)


def read_tensors(path: Path, device: str | torch.device = "cpu") -> tuple[Params, Json]:
    """Read a safetensors file and what its header says about it.

    Each tensor is copied: in the file it may begin anywhere, and products of a single row round
    otherwise where a tensor does not begin at a cache line, as torch's own do.
    """
    with _open_tensors(path, device) as file:
        names = file.keys()
        return {name: file.get_tensor(name).clone() for name in names}, read_metadata(path)


@contextmanager
def _open_tensors(path: Path, device: str | torch.device) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            yield file
    except FileNotFoundError as error:
        raise InputError(
            f"run: {path} does not exist; give the folder of a run, as `glocal run` printed it"
        ) from error
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(
            f"run: {path} is damaged ({_reason(error)}); restore it from a copy or start the run anew"
        ) from error


def append_rows(path: Path, rows: Iterable[Json]) -> None:
    """Append to a JSON-lines file; a last line that was cut off is dropped, for it would spoil the next."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _drop_partial_line(file)
            file.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
    except OSError as error:
        raise InputError(
            f"disk: cannot write {path} ({_reason(error)}); free some space or choose another folder"
        ) from error


def _drop_partial_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_rows(path: Path) -> list[Json]:
    """Read a JSON-lines file; a last line that was cut off by a crash is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return [row for row in rows if isinstance(row, dict)]
