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
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error
from glocal.core.paths import cache_folder
from glocal.datasets.cache import Array, Shape, atomic_path, mmap_array, probe_rows

if TYPE_CHECKING:
    from PIL.Image import Image as PillowImage

# of ImageNet, which pretrained networks expect
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_MAX_ID_DIGITS = 18
_LOG_EVERY = 10_000  # pictures, about a minute
_LOG = logging.getLogger("glocal")
_SUFFIXES = ("", ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
ReadFile = Callable[[str], bytes]


class ImageTable:
    """Pictures (pictures, 3, height, width) as bytes, or features (pictures, width) as float32.

    An example holds the number of its picture, by which a model reads the table. So nothing is
    copied per example. The table is neither parameter nor buffer, so it is never uploaded, stored
    or averaged. Copies of a model share it. In a deployment each client has a table of its own.

    The table lies in the host's memory, mapped from disk if it was decoded before; a GPU gets one
    copy. Features name their origin as `source_hash`, because their last bits differ from
    processor to processor.
    """

    def __init__(self, table: Array, source_hash: str = "") -> None:
        _require_table(table)
        self.table = torch.from_numpy(np.ascontiguousarray(table))
        self.copies: dict[torch.device, Tensor] = {}
        self.source_hash = source_hash

    def __len__(self) -> int:
        return len(self.table)

    def __deepcopy__(self, memo: object) -> "ImageTable":
        return self

    @cached_property
    def content_hash(self) -> str:
        """A hash of the content, or of its source."""
        content = hashlib.sha256(f"{tuple(self.table.shape)}".encode())
        content.update(self.source_hash.encode() or self.table.numpy().data)
        return content.hexdigest()[:16]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one picture."""
        return tuple(self.table.shape[1:])

    def __call__(self, numbers: Tensor) -> Tensor:
        """The pictures of these numbers (rows,), normalised float32; zeros for a number below 0."""
        pictures = self._on(numbers.device)[numbers.clamp(min=0)]
        if pictures.dtype == torch.uint8:
            pictures = _normalize(pictures)
        is_picture = (numbers >= 0).reshape(-1, *(1,) * (pictures.dim() - 1))
        return torch.where(is_picture, pictures, torch.zeros_like(pictures))

    def _on(self, device: torch.device) -> Tensor:
        if device.type in ("cpu", "meta"):
            return self.table
        if device not in self.copies:
            self.copies[device] = self.table.to(device)
        return self.copies[device]


def find_images(source: Path) -> dict[int, str]:
    """The pictures of a folder or a zip by id: COCO_train2014_000000000009.jpg has the id 9."""
    names: dict[int, str] = {}
    for name in _file_names(source):
        image_id = _image_id(name)
        if image_id is None:
            continue
        if image_id in names:
            raise InputError(
                f"data: {source} has two pictures of id {image_id}, {names[image_id]} and {name}; "
                "take one of them away"
            )
        names[image_id] = name
    return names


def decode_images(source: Path, names: Sequence[str], *, size: int) -> ImageTable:
    """These pictures of a folder or a zip, resized to size x size; the cache keeps a copy."""
    path = _cache_path(source, names, size)
    table = mmap_array(path, np.uint8, (len(names), 3, size, size))
    if table is None or not _matches_source(table, _reader(source), names):
        table = _decode(source, names, size, path)
    return ImageTable(table)


def row_by_id(ids: Mapping[int, str]) -> dict[int, int]:
    """The row of each id in a table in ascending order of ids."""
    return {image_id: row for row, image_id in enumerate(sorted(ids))}


def _require_table(table: Array) -> None:
    """Refuse a table of neither pixels nor features."""
    is_features = table.dtype == np.float32 and table.ndim == 2
    if not (_is_pixels(table) or is_features) or not table.size:
        raise InputError(
            f"pictures: the table is {table.dtype} {table.shape}; bytes (pictures, 3, height, "
            "width) or float32 features (pictures, width) were expected, of one picture or more"
        )
    if is_features and not np.isfinite(table).all():
        raise InputError("pictures: a feature is not finite; check the encoder that made it")


def _is_pixels(table: Array) -> bool:
    return table.dtype == np.uint8 and table.ndim == 4 and table.shape[1] == 3


def _normalize(pixels: Tensor) -> Tensor:
    """Pixels as float32 with ImageNet's mean and standard deviation removed."""
    mean = _per_channel(IMAGENET_MEAN, pixels.device)
    std = _per_channel(IMAGENET_STD, pixels.device)
    return (pixels.float() / 255 - mean) / std


def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """One value per channel (channels, 1, 1).

    torch.full fills in place. torch.tensor would copy from the host, and make a GPU wait at every
    step.
    """
    return torch.stack([torch.full((1, 1), value, device=device) for value in values])


def _cache_path(source: Path, names: Sequence[str], size: int) -> Path:
    """The place of the decoded pictures in the cache, by all that they depend on."""
    key = repr((str(source.resolve()), _file_stamps(source, names), list(names), size))
    name = hashlib.sha256(key.encode()).hexdigest()[:16]
    return cache_folder() / "pictures" / f"{name}.npy"


def _file_names(source: Path) -> list[str]:
    """The names of all files in a folder and its folders, or in a zip."""
    try:
        if not source.is_dir():
            with zipfile.ZipFile(source) as archive:
                return archive.namelist()
        paths = [path for path in sorted(source.rglob("*")) if path.is_file()]
        return [path.relative_to(source).as_posix() for path in paths]
    except Exception as error:  # a damaged zip may raise anything
        raise InputError(
            f"data: {source} is no folder or zip of pictures ({describe_error(error)}); "
            "give one of the two"
        ) from error


def _image_id(name: str) -> int | None:
    """The id at the end of a picture's name; None for any other file, such as those of macOS."""
    path = Path(name)
    is_hidden = path.name.startswith(".")
    if name.endswith("/") or is_hidden or path.suffix.lower() not in _SUFFIXES:
        return None
    digits = path.stem.rpartition("_")[2]
    return int(digits) if digits.isdecimal() and len(digits) <= _MAX_ID_DIGITS else None


def _matches_source(table: Array, read: ReadFile, names: Sequence[str]) -> bool:
    """Whether a few pictures of a cached table equal freshly decoded ones: a disk may damage it."""
    for row in probe_rows(len(names)).tolist():
        if not np.array_equal(table[row], _decode_image(read, names[row], table.shape[-1])):
            return False
    return True


def _file_stamps(source: Path, names: Sequence[str]) -> list[tuple[int, int]]:
    """Size and time of every file read; a folder's own do not change with its pictures."""
    paths = [source / name for name in names] if source.is_dir() else [source]
    return list(map(_stamp, paths))


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _decode(source: Path, names: Sequence[str], size: int, path: Path) -> Array:
    """Decode into a mapped file; into memory if the cache cannot be written."""
    read, shape = _reader(source), (len(names), 3, size, size)
    with suppress(OSError):
        _decode_into_file(path, shape, read, names)
        table = mmap_array(path, np.uint8, shape)
        if table is not None:
            return table
    array = np.empty(shape, dtype=np.uint8)
    _decode_into(array, read, names)
    return array


def _decode_into_file(path: Path, shape: Shape, read: ReadFile, names: Sequence[str]) -> None:
    with atomic_path(path) as draft_path:
        draft = np.lib.format.open_memmap(draft_path, mode="w+", dtype=np.uint8, shape=shape)
        _preallocate(draft_path)
        _decode_into(draft, read, names)
        draft.flush()


def _preallocate(path: Path) -> None:
    """Reserve disk space for a mapped file: to run out of it later would kill the process."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _decode_into(array: Array, read: ReadFile, names: Sequence[str]) -> None:
    """Decode every picture into its row, one after the other."""
    for row, name in enumerate(names):
        if row % _LOG_EVERY == 0 and len(names) > _LOG_EVERY:
            _LOG.info("decoding %s pictures, once: %s are done", f"{len(names):,}", f"{row:,}")
        array[row] = _decode_image(read, name, array.shape[-1])


def _reader(source: Path) -> ReadFile:
    """A function from the name of a file in a folder or a zip to its content."""
    if source.is_dir():
        return lambda name: (source / name).read_bytes()
    return zipfile.ZipFile(source).read


def _decode_image(read: ReadFile, name: str, size: int) -> Array:
    """One picture (3, size, size)."""
    _require_pillow()
    try:
        image = _read_rgb(read(name))
    except Exception as error:  # a decoder or a zip may raise anything
        raise InputError(
            f"data: the picture {name} cannot be decoded ({_describe_failure(error)}); "
            "fetch it again, or take it away"
        ) from error
    return np.asarray(_resize(image, size)).transpose(2, 0, 1)


def _require_pillow() -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise InputError(
            "data: pictures need Pillow; install it with: pip install 'glocal[vqa]'"
        ) from error


def _describe_failure(error: Exception) -> str:
    """The reason in a few words; Pillow's own for an unknown format names only an object."""
    from PIL import UnidentifiedImageError

    is_unknown = isinstance(error, UnidentifiedImageError)
    return "of no known kind" if is_unknown else describe_error(error)


def _read_rgb(raw: bytes) -> "PillowImage":
    from PIL import Image

    with Image.open(io.BytesIO(raw)) as image:
        return _as_rgb(image)


def _resize(image: "PillowImage", size: int) -> "PillowImage":
    from PIL import Image

    if image.size == (size, size):
        return image
    return image.resize((size, size), Image.Resampling.LANCZOS)


def _as_rgb(image: "PillowImage") -> "PillowImage":
    """A Pillow image of any mode in RGB."""
    if image.mode == "F":
        raise ValueError("its pixels are fractions of an unknown range")
    if image.mode.startswith("I"):
        from PIL import Image

        return Image.fromarray(_to_uint8(np.asarray(image))).convert("RGB")
    # A palette with transparency loses it only by way of RGBA.
    mode = "RGBA" if "transparency" in image.info else "RGB"
    return image.convert(mode).convert("RGB")


def _to_uint8(pixels: Array) -> Array:
    """Grey pixels of 16 bits, or of 32 bits that hold 8 or 16; Pillow would clip them at 255."""
    if pixels.dtype.itemsize == 2 or pixels.max() > 255:
        pixels = pixels // 256
    return pixels.clip(0, 255).astype(np.uint8)
