"""Many pictures by number: decoded once, mapped from disk, and never part of a model."""

import hashlib
import io
import logging
import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error
from glocal.core.paths import cache_folder
from glocal.datasets.cache import Array, atomic_path, mmap_array, probe_rows

IMAGENET_MEAN, IMAGENET_STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet, which pretrained networks expect
_MAX_ID_DIGITS = 18  # figures
_LOG_EVERY = 10_000  # pictures: a minute or so
_LOG = logging.getLogger("glocal")
_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class ImageTable:
    """A table of pictures (pictures, 3, height, width) of bytes, or of features (pictures, width) of float32.

    An example then holds the number of its picture beside its words, and a model looks the picture up: nothing is copied per
    example, and as the table is neither parameter nor buffer it is never sent, stored or averaged. On a device of its own the table
    holds that device's pictures. It lies on the host, mapped from disk where it was decoded before; a GPU that asks gets a copy,
    once. Copies of a model share it. Features say what they were `source_hash`, for they are not the same to the last bit everywhere.
    """

    def __init__(self, table: Array, source_hash: str = "") -> None:
        pixels = table.dtype == np.uint8 and table.ndim == 4 and table.shape[1] == 3
        if not (pixels or (table.dtype == np.float32 and table.ndim == 2)) or not table.size:
            raise InputError(
                f"pictures: the table is {table.dtype} {table.shape}; bytes (pictures, 3, height, width) or float32 features "
                "(pictures, width) were expected, of one picture or more"
            )
        if not pixels and not np.isfinite(table).all():
            raise InputError("pictures: a feature is not finite; check what made them")
        self.table = torch.from_numpy(np.ascontiguousarray(table))
        self.copies: dict[torch.device, Tensor] = {}
        self.source_hash = source_hash

    def __len__(self) -> int:
        return len(self.table)

    def __deepcopy__(self, memo: object) -> "ImageTable":
        return self

    @cached_property
    def content_hash(self) -> str:
        """What tells this table from others, as one short word."""
        told = hashlib.sha256(f"{tuple(self.table.shape)}".encode())
        told.update(self.source_hash.encode() or self.table.numpy().data)
        return told.hexdigest()[:16]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one of them."""
        return tuple(self.table.shape[1:])

    def __call__(self, numbers: Tensor) -> Tensor:
        """Those of these numbers (rows,), as float32, pictures of mean 0 and deviation 1; a number below 0 is no picture: zeros."""
        found = self._on(numbers.device)[numbers.clamp(min=0)]
        if found.dtype == torch.uint8:
            found = _normalize(found)
        there = (numbers >= 0).reshape(-1, *(1,) * (found.dim() - 1))
        return torch.where(there, found, torch.zeros_like(found))

    def _on(self, device: torch.device) -> Tensor:
        if device.type in ("cpu", "meta"):
            return self.table
        if device not in self.copies:
            self.copies[device] = self.table.to(device)
        return self.copies[device]


def _normalize(pixels: Tensor) -> Tensor:
    # filled in place: torch.tensor would copy from the host, and make a GPU wait, at every step
    mean, deviation = (
        torch.stack([torch.full((1, 1), value, device=pixels.device) for value in values])
        for values in (IMAGENET_MEAN, IMAGENET_STD)
    )
    return (pixels.float() / 255 - mean) / deviation


def find_images(source: Path) -> dict[int, str]:
    """The pictures of a folder or a zip by their id, which ends their names: COCO_train2014_000000000009.jpg is 9."""
    try:
        if source.is_dir():
            names = [
                path.relative_to(source).as_posix()
                for path in sorted(source.rglob("*"))
                if path.is_file()
            ]
        else:
            with zipfile.ZipFile(source) as archive:
                names = archive.namelist()
    except Exception as error:  # whatever a zip whose directory is damaged may raise
        raise InputError(
            f"data: {source} is no folder or zip of pictures ({describe_error(error)}); give one of the two"
        ) from error
    found: dict[int, str] = {}
    for name in names:
        figures = Path(name).stem.rpartition("_")[2]
        if (
            name.endswith("/")
            or Path(name).name.startswith(".")
            or Path(name).suffix.lower() not in _SUFFIXES
        ):
            continue  # a folder, what macOS packs beside every file, or notes on a picture
        if not figures.isdecimal() or len(figures) > _MAX_ID_DIGITS:
            continue
        if int(figures) in found:
            raise InputError(
                f"data: {source} has two pictures of id {int(figures)}, {found[int(figures)]} and {name}; take one of them away"
            )
        found[int(figures)] = name
    return found


def decode_images(source: Path, names: Sequence[str], *, size: int) -> ImageTable:
    """These pictures of a folder or a zip, each brought to size x size; a decoded copy is kept in the cache, and mapped."""
    told = repr((str(source.resolve()), _file_stamps(source, names), list(names), size))
    kept = cache_folder() / "pictures" / f"{hashlib.sha256(told.encode()).hexdigest()[:16]}.npy"
    found = mmap_array(kept, np.uint8, (len(names), 3, size, size))
    if found is None or not _matches_source(found, _reader(source), names):
        found = _decode(source, names, size, kept)
    return ImageTable(found)


def _matches_source(table: Array, read: Callable[[str], bytes], names: Sequence[str]) -> bool:
    """Whether a few pictures from all over a kept table are what is decoded now: a disk may have damaged it."""
    places = probe_rows(len(names)).tolist()
    return all(
        np.array_equal(table[place], _decode_image(read, names[place], table.shape[-1]))
        for place in places
    )


def _file_stamps(source: Path, names: Sequence[str]) -> list[tuple[int, int]]:
    """Size and time of what is read: a folder's own do not change when a picture in it does."""
    read = [source / name for name in names] if source.is_dir() else [source]
    return [(stamp.st_size, stamp.st_mtime_ns) for stamp in map(Path.stat, read)]


def _decode(source: Path, names: Sequence[str], size: int, kept: Path) -> Array:
    """Picture by picture into a file that takes its place in one step; a cache that cannot be written costs memory, not the run."""
    read, shape = _reader(source), (len(names), 3, size, size)
    with suppress(OSError):
        with atomic_path(kept) as path:
            draft = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
            _preallocate(path)
            _decode_into(draft, read, names)
            draft.flush()
        found = mmap_array(kept, np.uint8, shape)
        if found is not None:
            return found
    array = np.empty(shape, dtype=np.uint8)
    _decode_into(array, read, names)
    return array


def _preallocate(path: Path) -> None:
    """Room on disk for all of a file: one that is mapped and runs out of it ends the process, not the call."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _decode_into(array: Array, read: Callable[[str], bytes], names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if place % _LOG_EVERY == 0 and len(names) > _LOG_EVERY:
            _LOG.info("decoding %s pictures, once: %s are done", f"{len(names):,}", f"{place:,}")
        array[place] = _decode_image(read, name, array.shape[-1])


def _reader(source: Path) -> Callable[[str], bytes]:
    return (
        (lambda name: (source / name).read_bytes())
        if source.is_dir()
        else zipfile.ZipFile(source).read
    )


def _decode_image(read: Callable[[str], bytes], name: str, size: int) -> Array:
    """One picture (3, size, size)."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError(
            "data: pictures need Pillow; install it with: pip install 'glocal[vqa]'"
        ) from error
    try:
        with Image.open(io.BytesIO(read(name))) as opened:
            if opened.mode.startswith("I"):
                picture = Image.fromarray(_to_uint8(np.asarray(opened))).convert("RGB")
            elif opened.mode == "F":
                raise ValueError("its pixels are fractions, and nobody says of what")
            else:
                picture = opened.convert(
                    "RGBA" if "transparency" in opened.info else "RGB"
                ).convert("RGB")
    except UnidentifiedImageError as error:
        raise InputError(
            f"data: the picture {name} cannot be decoded (of no known kind); fetch it again, or take it away"
        ) from error
    except (
        Exception
    ) as error:  # whatever a decoder or a zip (locked, of a method unknown here) may raise
        raise InputError(
            f"data: the picture {name} cannot be decoded ({describe_error(error)}); fetch it again, or take it away"
        ) from error
    if picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.LANCZOS)
    return np.asarray(picture).transpose(2, 0, 1)


def _to_uint8(pixels: Array) -> Array:
    """Grey of 16 bits, of which `convert` would make white of all above 255; also where 32 bits hold no more than 8."""
    return (
        (pixels // (256 if pixels.dtype.itemsize == 2 or pixels.max() > 255 else 1))
        .clip(0, 255)
        .astype(np.uint8)
    )


def row_by_id(ids: Mapping[int, str]) -> dict[int, int]:
    """The place of each id in the table: ascending."""
    return {image: place for place, image in enumerate(sorted(ids))}
