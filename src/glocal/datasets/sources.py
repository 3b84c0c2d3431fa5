"""Public data sets by name: find their files, verify them, download them, and load them.

A file is searched for in the folder GLOCAL_DATA, which has one folder per source, then in the
cache. The cache is GLOCAL_CACHE, else XDG_CACHE_HOME/glocal, else ~/.cache/glocal. A file in
neither is downloaded into the cache. No file is read unless its checksum is right.
"""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from glocal.core.checks import require_instance
from glocal.core.errors import InputError, suggest_name
from glocal.core.paths import cache_folder
from glocal.datasets.catalog import SOURCES, Source
from glocal.datasets.dataset import Dataset
from glocal.datasets.fetch import (
    ProgressCallback,
    RemoteFile,
    digest,
    fetch,
    has_checksum,
    no_progress,
)
from glocal.datasets.loaders import LocalFiles
from glocal.datasets.texts import Texts, read_texts


def load_dataset(name: str, *, report: ProgressCallback = no_progress) -> Dataset:
    """Load a data set by name; download it first if necessary.

    >>> load_dataset("digits").train.x.shape
    torch.Size([1347, 1, 8, 8])
    """
    _require_name_and_report(name, report)
    dataset = load_any(name, report=report)
    if isinstance(dataset, Texts):
        raise InputError(
            f"data: {name} holds texts, which become numbers only when they are partitioned; "
            "use load_texts"
        )
    return dataset


def _require_name_and_report(name: object, report: object) -> None:
    require_instance("data: the name of a data set", name, str, "a text")
    require_instance("data: report", report, Callable, "a function (file, bytes, all)")


def load_texts(name: str, *, report: ProgressCallback = no_progress) -> Texts:
    """Texts by name, or from your own .csv file with columns person, text and mood (1 to 100)."""
    texts = load_any(name, report=report)
    if isinstance(texts, Dataset):
        raise InputError(f"data: {name} holds no texts; use load")
    return texts


def load_any(name: str, *, report: ProgressCallback = no_progress) -> Dataset | Texts:
    """The data set or the texts of a source, or the texts of a .csv file."""
    if name.endswith(".csv"):
        return read_texts([Path(name).expanduser()])
    source = find_source(name)
    paths = _locate_files(source, report)
    return source.load(LocalFiles(paths, _version(source, paths)))


def fetch_source(name: str, report: ProgressCallback = no_progress) -> Path:
    """Download what is missing or damaged of a source; returns the folder of its files."""
    source = find_source(name)
    paths = _locate_files(source, report)
    return next(iter(paths.values())).parent if paths else cache_folder() / name


def source_status(name: str) -> str:
    """One of "bundled", "in GLOCAL_DATA", "in the cache" and "not downloaded".

    Checksums are not computed.
    """
    source = find_source(name)
    if not source.files:
        return "bundled"
    if _local_files(source):
        return "in GLOCAL_DATA"
    return "in the cache" if _complete(source.files, cache_folder() / name) else "not downloaded"


def verify_source(name: str) -> list[tuple[str, bool]]:
    """The files of a source on this machine, and whether their checksums are right."""
    source = find_source(name)
    remotes = _files_by_name(source)
    results: list[tuple[str, bool]] = []
    for file, path in (_local_files(source) or _cached_files(source)).items():
        results.append((file, has_checksum(path, remotes[file].sha256)))
    return results


def find_source(name: str) -> Source:
    """The source of this name."""
    if name not in SOURCES:
        raise InputError(f"data: there is no data set '{name}'; {suggest_name(name, SOURCES)}")
    return SOURCES[name]


def _locate_files(source: Source, report: ProgressCallback) -> dict[str, Path]:
    """The verified paths of all files by name, in GLOCAL_DATA or the cache."""
    local, remotes = _local_files(source), _files_by_name(source)
    if local:
        for name, path in local.items():
            _verify(path, remotes[name])
        return local
    folder = cache_folder() / source.name
    return {remote.name: fetch(remote, folder, report=report) for remote in source.files}


def _version(source: Source, paths: dict[str, Path]) -> str:
    """A hash of the checksums of these files."""
    remotes = _files_by_name(source)
    checksums = "".join(remotes[name].sha256 for name in paths)
    return hashlib.sha256(checksums.encode()).hexdigest()[:12]


def _local_files(source: Source) -> dict[str, Path]:
    """The files of a source in the folder GLOCAL_DATA, unverified; empty if one is missing."""
    data_folder = _data_folder()
    if data_folder is None:
        return {}
    folder = data_folder / source.name
    for files in (source.files, source.repacked):
        if files and _complete(files, folder):
            return _paths(files, folder)
    return {}


def _cached_files(source: Source) -> dict[str, Path]:
    """The files of a source that are in the cache, unverified."""
    paths = _paths(source.files, cache_folder() / source.name)
    return {name: path for name, path in paths.items() if path.is_file()}


def _data_folder() -> Path | None:
    """The folder GLOCAL_DATA, if it is set."""
    name = os.environ.get("GLOCAL_DATA")
    if not name:
        return None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"data: GLOCAL_DATA is {folder}, which is not a folder; "
            "set it to one that holds the data, or unset it"
        )
    return folder


def _files_by_name(source: Source) -> dict[str, RemoteFile]:
    return {remote.name: remote for remote in (*source.files, *source.repacked)}


def _paths(files: tuple[RemoteFile, ...], folder: Path) -> dict[str, Path]:
    return {remote.name: folder / remote.name for remote in files}


def _complete(files: tuple[RemoteFile, ...], folder: Path) -> bool:
    return all(path.is_file() for path in _paths(files, folder).values())


def _verify(path: Path, remote: RemoteFile) -> None:
    """Refuse a file of GLOCAL_DATA whose checksum is wrong."""
    size, checksum = _size_and_checksum(path)
    if checksum != remote.sha256:
        alternative = ", or unset GLOCAL_DATA to download it" if remote.urls else ""
        raise InputError(
            f"data: {path} has {size} bytes and checksum {checksum[:12]}.., "
            f"expected {remote.size} bytes and {remote.sha256[:12]}..; "
            f"copy it again from its origin{alternative}"
        )


def _size_and_checksum(path: Path) -> tuple[int, str]:
    try:
        return path.stat().st_size, digest(path)
    except OSError as error:
        raise InputError(
            f"data: {path} could not be read ({error.strerror}); "
            "make it readable, or unset GLOCAL_DATA"
        ) from error
