"""Download one file: resume it, check its sha256, and put it in place in one step."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from glocal.core.errors import InputError

ProgressCallback = Callable[[str, int, int], None]

_CHUNK = 1 << 16
_BACKOFF = 1.0  # seconds before the second attempt, and twice that before the third


@dataclass(frozen=True)
class RemoteFile:
    """A published file: its URLs, its checksum, and its size in bytes."""

    name: str
    urls: tuple[str, ...]
    sha256: str
    size: int


class _AttemptError(Exception):
    """One attempt failed; another may succeed."""


def no_progress(name: str, done: int, total: int) -> None:
    """A progress callback that does nothing."""


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether the file exists, can be read, and has this checksum."""
    try:
        return digest(path) == sha256
    except OSError:
        return False


def fetch(
    remote: RemoteFile,
    folder: Path,
    *,
    report: ProgressCallback = no_progress,
    timeout: float = 30.0,
    attempts: int = 3,
) -> Path:
    """The path of the file in the folder; a missing or damaged file is downloaded.

    Every URL gets `attempts` attempts; the timeout is in seconds.
    """
    target = folder / remote.name
    if has_checksum(target, remote.sha256):
        return target
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        # Another process may have fetched it while this one waited for the lock.
        if not has_checksum(target, remote.sha256):
            append = partial(_append, remote, timeout=timeout, report=report)
            _download(remote, target, append, attempts)
    return target


def _download(
    remote: RemoteFile, target: Path, append: Callable[[str, Path], None], attempts: int
) -> None:
    """Try every URL in turn until a complete file with the right checksum is in place."""
    _require_urls(remote, target.parent)
    failures: dict[str, str] = {}
    for attempt in range(attempts):
        time.sleep(_BACKOFF * attempt)
        for url in remote.urls:
            failure = _attempt(remote, url, target, append)
            if failure is None:
                return
            failures[url] = failure
    reasons = "; ".join(f"{url} {reason}" for url, reason in failures.items())
    raise InputError(
        f"data: could not download {remote.name} (tried {reasons}); check the network, "
        f"or put the file into {target.parent}, or set GLOCAL_DATA to a folder that has it"
    )


def _require_urls(remote: RemoteFile, folder: Path) -> None:
    if not remote.urls:
        raise InputError(
            f"data: {remote.name} is not to be downloaded; put the file into {folder}, "
            "or set GLOCAL_DATA to a folder that has it"
        )


def _attempt(
    remote: RemoteFile, url: str, target: Path, append: Callable[[str, Path], None]
) -> str | None:
    """Download from one URL; returns the reason if it fails."""
    part = target.with_name(f"{remote.name}.part")
    try:
        append(url, part)
        _move_into_place(remote, part, target)
    except _AttemptError as error:
        return " ".join(str(error).split())
    return None


def _append(
    remote: RemoteFile, url: str, part: Path, *, timeout: float, report: ProgressCallback
) -> None:
    """Download the missing end of a partial file, or all of it if the server cannot resume."""
    present = part.stat().st_size if part.exists() else 0
    if present == remote.size:
        return
    start = present if present < remote.size else 0
    with _open_url(url, start, timeout) as response:
        if response.status != 206:
            start = 0
        _check_response(response, start, remote)
        size = _write(response, remote, part, start=start, report=report)
    _check_size(size, remote, part)


def _check_size(size: int, remote: RemoteFile, part: Path) -> None:
    """Refuse a partial file that is too long or too short; one that is too long is deleted."""
    if size > remote.size:
        with _disk_errors(part):
            part.unlink()
        raise _AttemptError(f"sent more than the {remote.size} bytes expected")
    if size < remote.size:
        raise _AttemptError(f"broke off after {size} of {remote.size} bytes")


def _write(
    response: HTTPResponse, remote: RemoteFile, part: Path, *, start: int, report: ProgressCallback
) -> int:
    """Write a response into the partial file; returns its size, or one above what is expected."""
    size = start
    with _disk_errors(part), open(part, "ab" if start else "wb") as file:
        for chunk in _read_chunks(response):
            size += len(chunk)
            if size > remote.size:
                break
            file.write(chunk)
            report(remote.name, size, remote.size)
    return size


def _move_into_place(remote: RemoteFile, part: Path, target: Path) -> None:
    """Move a complete partial file to its place if its checksum is right, else delete it."""
    with _disk_errors(target):
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        checksum = digest(part)
        if checksum == remote.sha256:
            os.replace(part, target)
            return
        part.unlink()
    raise _AttemptError(f"got checksum {checksum[:12]}.., expected {remote.sha256[:12]}..")


def _open_url(url: str, start: int, timeout: float) -> HTTPResponse:
    try:
        response: HTTPResponse = urlopen(_request(url, start), timeout=timeout)
        return response
    except HTTPError as error:
        error.close()
        if error.code == 416 and start:
            return _open_url(url, 0, timeout)
        raise _AttemptError(f"answered {error.code} {error.reason}") from error
    except URLError as error:
        raise _AttemptError(f"failed: {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _AttemptError(f"failed: {error}") from error


def _request(url: str, start: int) -> Request:
    """A request for the bytes from `start` on."""
    return Request(url, headers={"Range": f"bytes={start}-"} if start else {})


def _check_response(response: HTTPResponse, start: int, remote: RemoteFile) -> None:
    """Refuse a response that cannot be the rest of this file, before a byte is written.

    It may be a log-in page or another release.
    """
    if start:
        _check_range(response, start)
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and start + int(length) != remote.size:
        raise _AttemptError(f"offers {start + int(length)} bytes, expected {remote.size}")


def _check_range(response: HTTPResponse, start: int) -> None:
    content_range = response.headers.get("Content-Range")
    if content_range is None or not content_range.startswith(f"bytes {start}-"):
        raise _AttemptError(f"answered with {content_range}, expected bytes from {start} on")


def _read_chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The response in pieces; network errors become _AttemptError, so any OSError is the disk's."""
    try:
        while chunk := response.read1(_CHUNK):
            yield chunk
    except (OSError, HTTPException) as error:
        raise _AttemptError(f"failed: {error}") from error


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turns a failed write into one line."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data: could not write {path} ({error.strerror or error}); "
            "make room or give write permission there, or set GLOCAL_CACHE to another folder"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time downloads into a folder: two would write into the same file."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with _disk_errors(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems cannot lock; the checksum still guards the file.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
