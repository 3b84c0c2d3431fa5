"""Download one file: resumed where it broke off, checked by its sha256, put in place in one step."""

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from glocal.core.errors import InputError

ProgressCallback = Callable[[str, int, int], None]

_CHUNK = 1 << 16
_BACKOFF = 1.0  # seconds before the second turn, twice that before the third: a busy server gets time to recover


@dataclass(frozen=True)
class RemoteFile:
    """A published file: where it can be had, and how to know that it is the right one; size in bytes."""

    name: str
    urls: tuple[str, ...]
    sha256: str
    size: int


class _AttemptError(Exception):
    """One attempt failed; the next one may not."""


def no_progress(name: str, done: int, total: int) -> None:
    """A report that nobody reads."""


def digest(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def has_checksum(path: Path, sha256: str) -> bool:
    """Whether the file is there, can be read, and has this checksum."""
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
    """The file in the folder, downloaded if it is missing or wrong; every URL gets `attempts` turns, timeout in seconds."""
    target = folder / remote.name
    if has_checksum(target, remote.sha256):
        return target
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not has_checksum(
            target, remote.sha256
        ):  # else another process fetched it while this one waited
            _download(
                remote,
                target,
                lambda url, part: _append(remote, url, part, timeout=timeout, report=report),
                attempts,
            )
    return target


def _download(
    remote: RemoteFile, target: Path, append: Callable[[str, Path], None], attempts: int
) -> None:
    if not remote.urls:
        raise InputError(
            f"data: {remote.name} is not to be downloaded; put the file into {target.parent}, "
            "or set GLOCAL_DATA to a folder that has it"
        )
    part = target.with_name(f"{remote.name}.part")
    failures: dict[str, str] = {}
    for turn in range(attempts):
        time.sleep(_BACKOFF * turn)
        for url in remote.urls:
            try:
                append(url, part)
                _move_into_place(remote, part, target)
                return
            except _AttemptError as error:
                failures[url] = " ".join(str(error).split())
    tried = "; ".join(f"{url} {why}" for url, why in failures.items())
    raise InputError(
        f"data: could not download {remote.name} (tried {tried}); "
        f"check the network, or put the file into {target.parent}, or set GLOCAL_DATA to a folder that has it"
    )


def _append(
    remote: RemoteFile, url: str, part: Path, *, timeout: float, report: ProgressCallback
) -> None:
    """Bring the part up to the full size, from where it broke off if the server can."""
    held = part.stat().st_size if part.exists() else 0
    if held == remote.size:
        return
    start = held if held < remote.size else 0
    with _open_url(url, start, timeout) as response:
        done = start if response.status == 206 else 0
        _check_response(response, done, remote)
        with _disk_errors(part), open(part, "ab" if done else "wb") as file:
            for chunk in _read_chunks(response):
                done += len(chunk)
                if done > remote.size:
                    break
                file.write(chunk)
                report(remote.name, done, remote.size)
    if done > remote.size:
        with _disk_errors(part):
            part.unlink()
        raise _AttemptError(f"sent more than the {remote.size} bytes expected")
    if done < remote.size:
        raise _AttemptError(f"broke off after {done} of {remote.size} bytes")


def _move_into_place(remote: RemoteFile, part: Path, target: Path) -> None:
    """Put a complete part in its place if its checksum is right, else delete it."""
    with _disk_errors(target):
        with open(part, "rb+") as file:
            os.fsync(file.fileno())
        found = digest(part)
        if found == remote.sha256:
            os.replace(part, target)
            return
        part.unlink()
    raise _AttemptError(f"got checksum {found[:12]}.., expected {remote.sha256[:12]}..")


def _open_url(url: str, start: int, timeout: float) -> HTTPResponse:
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response: HTTPResponse = urlopen(request, timeout=timeout)
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


def _check_response(response: HTTPResponse, start: int, remote: RemoteFile) -> None:
    """Refuse, before a byte is written, an answer that cannot be the rest of this file: a log-in page, another release."""
    if start and not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
        raise _AttemptError(
            f"answered with {response.headers.get('Content-Range')}, asked from byte {start}"
        )
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and start + int(length) != remote.size:
        raise _AttemptError(f"offers {start + int(length)} bytes, expected {remote.size}")


def _read_chunks(response: HTTPResponse) -> Iterator[bytes]:
    """What arrives, as it arrives; a network error becomes _AttemptError, so that every OSError left is the disk's."""
    try:
        while chunk := response.read1(_CHUNK):
            yield chunk
    except (OSError, HTTPException) as error:
        raise _AttemptError(f"failed: {error}") from error


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"data: could not write {path} ({error.strerror or error}); make room or give write permission there, "
            "or set GLOCAL_CACHE to another folder"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time downloads into a folder, where the system can lock it: two would write into the same part."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with _disk_errors(folder):
        handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems cannot lock; the checksum still guards
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
