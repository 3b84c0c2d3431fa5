"""From published files to arrays of bytes: MNIST's own format, CIFAR-10's binary version, CIFAR-10 repacked as .xz."""

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
CIFAR_IMAGES = 10_000  # in each batch
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
    """An array in MNIST's format, gzipped: two zeros, type, number of dimensions, the dimensions, the values."""
    with _decoding(path):
        raw = gzip.decompress(path.read_bytes())
        shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
        return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def read_cifar_binary(path: Path) -> tuple[Bytes, Bytes]:
    """Images (60000, 3, 32, 32) and labels (60000,) from the official tar.gz, the test batch last; nothing is extracted."""
    batches: dict[str, Bytes] = {}
    with _decoding(path), tarfile.open(path, "r|gz") as archive:
        for member in archive:
            name = member.name.removeprefix("cifar-10-batches-bin/").removesuffix(".bin")
            if name in CIFAR_BATCHES and (file := archive.extractfile(member)):
                batches[name] = np.frombuffer(file.read(), np.uint8).reshape(
                    CIFAR_IMAGES, 1 + 3 * 32 * 32
                )
        records = np.concatenate([batches[name] for name in CIFAR_BATCHES])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_cifar_repacked(files: Mapping[str, Path]) -> tuple[Bytes, Bytes]:
    """The same arrays from six .xz files: labels, then the planes G, R-G, B-G, differenced along columns and rows (mod 256)."""
    batches = [_read_repacked_batch(files[f"{name}.xz"]) for name in CIFAR_BATCHES]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def _read_repacked_batch(path: Path) -> tuple[Bytes, Bytes]:
    with _decoding(path):
        raw = np.frombuffer(lzma.decompress(path.read_bytes()), np.uint8)
        planes = (
            raw[CIFAR_IMAGES:]
            .reshape(3, CIFAR_IMAGES, 32, 32)
            .cumsum(2, dtype=np.uint8)
            .cumsum(3, dtype=np.uint8)
        )
    green, red_less_green, blue_less_green = planes
    return np.stack([red_less_green + green, green, blue_less_green + green], axis=1), raw[
        :CIFAR_IMAGES
    ]


@contextmanager
def _decoding(path: Path) -> Iterator[None]:
    try:
        yield
    except _DECODING_ERRORS as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise InputError(
            f"data: {path} could not be decoded ({why}); delete it and fetch it again"
        ) from error
