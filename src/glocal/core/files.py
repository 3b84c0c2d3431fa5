"""Files: each is written whole or not at all, tensors as safetensors, everything else as JSON."""

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
FORMAT = "0.2"  # the first version of glocal that wrote files in this format
_LOCK = ".running"


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[None]:
    """Lock a folder while a process writes into it, and refuse a second process; None locks none.

    The kernel releases the lock when its process ends, also after kill -9: a lock file that was
    left behind locks nothing. Folders that were created here and stayed empty are removed.
    """
    if folder is None:
        yield
        return
    created = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquire_lock(folder / _LOCK)
    except BlockingIOError as error:
        raise InputError(f"run: {folder} is being run already; stop that one first") from error
    except OSError as error:
        raise _cannot_write(folder, error) from error
    try:
        yield
    finally:
        with suppress(OSError):
            (folder / _LOCK).unlink()  # before the lock is released: see `_acquire_lock`
        lock.close()
        for each in created:
            with suppress(OSError):  # not empty
                each.rmdir()


def _acquire_lock(path: Path) -> BinaryIO:
    """The lock file, open and locked.

    The process that holds the lock deletes the file. So the file may be deleted between our `open`
    and our `flock`. Then we hold the lock of a file that no other process can open any more, and
    it excludes nobody: we open a new file and try again.
    """
    while True:
        file = path.open("ab")
        try:
            if fcntl is None:
                return file
            # A forked worker may outlive this process, and must not hold the lock.
            os.register_at_fork(after_in_child=file.close)
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
            file.close()
        except BlockingIOError:
            file.close()
            raise
        except OSError as error:
            problem = f"disk: {path.parent} cannot be locked ({_reason(error)})"
            warnings.warn(f"{problem}; run nothing else in it", GlocalWarning, stacklevel=4)
            return file


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` in one step; after a failure `path` is unchanged."""
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
        raise _cannot_write(path, error) from error


def _cannot_write(path: Path, error: Exception) -> InputError:
    problem = f"disk: cannot write {path} ({_reason(error)})"
    return InputError(f"{problem}; free some space or choose another folder")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error).splitlines()[0]


def require_writable(path: Path) -> None:
    """Refuse, before the work starts, a file that could not be written after it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError("it is a folder")
        if not os.access(path.parent, os.W_OK):
            raise PermissionError("its folder is read-only")
    except OSError as error:
        problem = f"disk: {path} cannot be written ({_reason(error)})"
        raise InputError(f"{problem}; give a file in a folder of yours") from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file."""
    with atomic_write(path) as half:
        half.write_text(text, encoding="utf-8")


def write_secret(path: Path, data: bytes) -> None:
    """Replace a file that only its owner may read."""

    def open_private(name: str, flags: int) -> int:
        return os.open(name, flags, 0o600)

    with atomic_write(path) as half, open(half, "wb", opener=open_private) as file:
        file.write(data)
        file.flush()


def restrict_permissions(folders: Iterable[Path], files: Iterable[Path]) -> list[Path]:
    """Let only the owner read these; returns the paths that others could read before."""
    modes = [(path, 0o700) for path in folders]
    modes += [(path, 0o600) for path in files]
    open_to_others = []
    for path, mode in modes:
        if not path.exists() or not _others_may_read(path):
            continue
        with suppress(OSError):
            path.chmod(mode)
        if _others_may_read(path):
            raise InputError(
                f"disk: {path} can be read by others, and its permissions cannot be changed; "
                "give it to the user of this process, on a disk that supports permissions"
            )
        open_to_others.append(path)
    return open_to_others


def _others_may_read(path: Path) -> bool:
    return bool(path.stat().st_mode & 0o077)


def write_json(path: Path, data: object) -> None:
    """Replace a JSON file."""
    write_text(path, format_json(data) + "\n")


def format_json(data: object, depth: int = 0) -> str:
    """JSON with one line for a table or list of plain values, and one line per entry in others.

    >>> rounds = [{"round": 1, "loss": 0.5}, {"round": 2, "loss": 0.25}]
    >>> print(format_json({"seeds": [0, 1], "rounds": rounds}))
    {
     "seeds": [0, 1],
     "rounds": [
      {"round": 1, "loss": 0.5},
      {"round": 2, "loss": 0.25}
     ]
    }
    """
    if isinstance(data, dict) and _holds_tables(data.values()):
        lines = [f"{_json_key(key)}: {format_json(data[key], depth + 1)}" for key in data]
        return _json_block("{", lines, "}", depth)
    if isinstance(data, list | tuple) and _holds_tables(data):
        lines = [format_json(entry, depth + 1) for entry in data]
        return _json_block("[", lines, "]", depth)
    return json.dumps(data)


def _holds_tables(entries: Iterable[object]) -> bool:
    return any(isinstance(entry, dict | list | tuple) for entry in entries)


def _json_block(opening: str, lines: list[str], closing: str, depth: int) -> str:
    """One line per entry, each with one more space than the brackets."""
    newline = "\n" + " " * depth
    body = f",{newline} ".join(lines)
    return f"{opening}{newline} {body}{newline}{closing}"


def _json_key(key: object) -> str:
    """A key as `json` writes it: numbers and None become strings, other types are refused."""
    return json.dumps({key: 0})[1:-4]


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file that must exist and hold a dict or a list that is not empty."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _does_not_exist(path) from error
    except (OSError, ValueError) as error:
        problem = f"run: {path} cannot be read ({error})"
        raise InputError(f"{problem}; restore it or start the run anew") from error
    if not isinstance(data, kind) or not data:
        raise InputError(f"run: {path} is not in glocal's format; restore it or start the run anew")
    return data


def _does_not_exist(path: Path) -> InputError:
    return InputError(
        f"run: {path} does not exist; give the folder of a run, as `glocal run` printed it"
    )


def require_format(data: Json, path: Path) -> Json:
    """The same data without their format; a file of another version of glocal is refused."""
    version = data.get("format", "0.1")  # version 0.1 wrote none
    if version != FORMAT:
        raise InputError(
            f"run: {path} was written by glocal {version}, and {FORMAT} was expected; "
            f"run it again, or use glocal {version}"
        )
    return {key: value for key, value in data.items() if key != "format"}


def write_tensors(path: Path, tensors: Params, metadata: Mapping[str, object]) -> None:
    """Replace a safetensors file; `metadata` and the format go into its header as JSON."""
    with atomic_write(path) as half:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        header = json.dumps({"format": FORMAT, **metadata})
        save_file(contiguous, half, metadata={"metadata": header})


def read_metadata(path: Path) -> Json:
    """The metadata in the header of a safetensors file; the tensors are not read."""
    with _open_tensors(path, "cpu") as file:
        header = file.metadata() or {}
        if "metadata" not in header and "about" not in header:
            return {}  # not a file of glocal
        metadata = json.loads(header.get("metadata", "{}"))  # version 0.1 called it "about"
        if not isinstance(metadata, dict):
            raise ValueError("its header holds no table")
        return require_format(metadata, path)


def read_tensors(path: Path, device: str | torch.device = "cpu") -> tuple[Params, Json]:
    """Read the tensors and the metadata of a safetensors file.

    Each tensor is copied. In the file it may begin at any address, while torch's own tensors begin
    at a cache line, and a product of a single row rounds otherwise where a tensor does not.
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
        raise _does_not_exist(path) from error
    except InputError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        problem = f"run: {path} is damaged ({_reason(error)})"
        raise InputError(f"{problem}; restore it from a copy or start the run anew") from error


def append_rows(path: Path, rows: Iterable[Json]) -> None:
    """Append to a JSON-lines file; a last line that a crash cut off is removed first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            _drop_partial_line(file)
            file.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
    except OSError as error:
        raise _cannot_write(path, error) from error


def _drop_partial_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read(1) not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_rows(path: Path) -> list[Json]:
    """Read a JSON-lines file; a last line that a crash cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return [row for row in rows if isinstance(row, dict)]
