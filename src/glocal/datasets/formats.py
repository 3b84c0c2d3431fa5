"""Decoding of published files: MNIST, CIFAR-10's binary version, and CIFAR-10 repacked as .xz."""

import gzip
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from glocal.core.errors import InputError

Bytes = npt.NDArray[np.uint8]

CIFAR_BATCHES = (
    "data_batch_1",
    "data_batch_2",
    "data_batch_3",
    "data_batch_4",
    "data_batch_5",
    "test_batch",
)
CIFAR_IMAGES = 10_000  # per batch
_DECODING_ERRORS = (
    OSError,
    EOFError,
    LookupError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
    tarfile.TarError,
)


def read_idx(path: Path) -> Bytes:
    """An array in MNIST's gzipped format.

    It begins with two zeros, the type, and the number of dimensions; sizes and values follow.
    """
    with _decoding(path):
        raw = gzip.decompress(path.read_bytes())
        shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def read_cifar_binary(path: Path) -> tuple[Bytes, Bytes]:
    """Images (60000, 3, 32, 32) and labels (60000,) from the official tar.gz, the test batch last.

    Nothing is extracted to disk.
    """
    batches: dict[str, Bytes] = {}
    with _decoding(path), tarfile.open(path, "r|gz") as archive:
        for entry in archive:
            name = entry.name.removeprefix("cifar-10-batches-bin/").removesuffix(".bin")
            file = archive.extractfile(entry) if name in CIFAR_BATCHES else None
            if file is not None:
                batches[name] = _read_binary_batch(file.read())
        records = np.concatenate([batches[name] for name in CIFAR_BATCHES])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def _read_binary_batch(raw: bytes) -> Bytes:
    """Records of one byte for the label and the pixels of one image (images, 3073)."""
    return np.frombuffer(raw, np.uint8).reshape(CIFAR_IMAGES, 1 + 3 * 32 * 32)


def read_cifar_repacked(files: Mapping[str, Path]) -> tuple[Bytes, Bytes]:
    """The same arrays from six .xz files.

    A file holds the labels, then the planes G, R-G and B-G. The planes are differenced along
    columns and rows (mod 256).
    """
    images: list[Bytes] = []
    labels: list[Bytes] = []
    for name in CIFAR_BATCHES:
        x, y = _read_repacked_batch(files[f"{name}.xz"])
        images.append(x)
        labels.append(y)
    return np.concatenate(images), np.concatenate(labels)


def _read_repacked_batch(path: Path) -> tuple[Bytes, Bytes]:
    with _decoding(path):
        raw = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
        labels, differences = raw[:CIFAR_IMAGES], raw[CIFAR_IMAGES:]
        images = _undo_differences(differences.reshape(3, CIFAR_IMAGES, 32, 32))
    return images, labels


def _undo_differences(planes: Bytes) -> Bytes:
    """RGB images (images, 3, 32, 32) from differenced planes G, R-G and B-G."""
    planes = planes.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    green, red_less_green, blue_less_green = planes
    return np.stack([red_less_green + green, green, blue_less_green + green], axis=1)


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    """Turns the errors of a damaged file into one line."""
    try:
        yield
    except _DECODING_ERRORS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"data: {path} could not be decoded ({reason}); delete it and fetch it again"
        ) from error
