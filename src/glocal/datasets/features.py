"""Features of pictures from a frozen encoder: computed once, then read from the cache."""

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.paths import cache_folder
from glocal.datasets.cache import Array, load_array, probe_rows, save_array
from glocal.datasets.fetch import ProgressCallback, no_progress
from glocal.datasets.image_table import ImageTable
from glocal.wire import pack

_BATCH_SIZES = {"cpu": 16}  # larger batches leave a processor's cache, and take longer
_DEFAULT_BATCH_SIZE = 256


def extract_features(
    pictures: ImageTable,
    network: nn.Module,
    device: torch.device,
    *,
    report: ProgressCallback = no_progress,
) -> ImageTable:
    """A network's output for each picture (pictures, width), with mean 0 and std 1 per feature.

    The network runs in evaluation mode. The key in the cache is a hash of pictures and weights,
    and the type of device. A hash cannot tell whether the network's code has changed, so a few
    pictures from all over the table are encoded again and compared.
    """
    network.to(device)
    network.eval()
    probes = probe_rows(len(pictures))
    expected = _extract(pictures, network, device, probes)
    source_hash = _cache_key(pictures, network)
    path = cache_folder() / "features" / f"{device.type}-{source_hash}.npy"
    features = _load_features(path, len(pictures), probes, expected)
    if features is None:
        features = _extract_all(pictures, network, device, report)
        save_array(path, features)
    return standardize(features, source_hash)


def standardize(features: Array, source_hash: str = "") -> ImageTable:
    """Features with mean 0 and standard deviation 1 each; 0 for a feature that does not vary."""
    centred = features - features.mean(0, dtype=np.float64).astype(np.float32)
    deviation = _deviation(centred)
    varies = deviation > 1e-6 * np.abs(features).max(0)  # anything less is rounding error
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=varies)
    return ImageTable(centred * scale.astype(np.float32), source_hash)


def _load_features(path: Path, rows: int, probes: Array, expected: Array) -> Array | None:
    """The cached features of all pictures, if those of a few are what the network returns now."""
    features = load_array(path, np.float32, (rows, expected.shape[1]))
    if features is None or not _close(features[probes], expected):
        return None
    return features


def _deviation(centred: Array) -> Array:
    """The standard deviation of each feature, in float64."""
    squares = np.square(centred).sum(0, dtype=np.float64)
    return np.asarray(np.sqrt(squares / max(1, len(centred) - 1)))


def _extract_all(
    pictures: ImageTable, network: nn.Module, device: torch.device, report: ProgressCallback
) -> Array:
    """The features of all pictures, batch by batch; progress counts the bytes of the pictures."""
    step = _BATCH_SIZES.get(device.type, _DEFAULT_BATCH_SIZE)
    picture_bytes = pictures.table[0].nbytes
    parts: list[Array] = []
    for start in range(0, len(pictures), step):
        end = min(start + step, len(pictures))
        parts.append(_extract(pictures, network, device, np.arange(start, end)))
        _require_width(parts[-1], parts[0].shape[1], start)
        report("pictures encoded", picture_bytes * end, picture_bytes * len(pictures))
    return np.concatenate(parts)


def _require_width(features: Array, width: int, start: int) -> None:
    if features.shape[1] != width:
        raise InputError(
            f"encoder: it returned {width} numbers for each of the first pictures and "
            f"{features.shape[1]} for picture {start}; the same width was expected"
        )


@torch.no_grad()
def _extract(
    pictures: ImageTable, network: nn.Module, device: torch.device, numbers: Array
) -> Array:
    """The features of these pictures (numbers, width), copied out of the network's own memory."""
    # Only this batch goes to the device: the whole table may be larger than a GPU's memory.
    output = network(pictures(torch.from_numpy(numbers)).to(device))
    _require_feature_matrix(output, len(numbers))
    features = np.array(output.float().cpu().numpy(), order="C")
    _require_finite(features, numbers)
    return features


def _require_feature_matrix(output: object, pictures: int) -> None:
    if not _is_feature_matrix(output, pictures):
        raise InputError(
            f"encoder: it returned {_describe_output(output)} for {pictures} pictures; "
            "real numbers (pictures, width) were expected"
        )


def _require_finite(features: Array, numbers: Array) -> None:
    bad = numbers[~np.isfinite(features).all(1)]
    if len(bad):
        raise InputError(
            f"encoder: its output for picture {bad[0]} is not finite; check its weights"
        )


def _is_feature_matrix(output: object, rows: int) -> bool:
    if not isinstance(output, Tensor) or output.dim() != 2 or output.is_complex():
        return False
    return len(output) == rows and output.numel() > 0


def _describe_output(output: object) -> str:
    if isinstance(output, Tensor):
        return f"{tuple(output.shape)} of {output.dtype}"
    return type(output).__name__


def _cache_key(pictures: ImageTable, network: nn.Module) -> str:
    """A hash of the pictures and of the network's state."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, object] = {}
    for name, value in network.state_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value.cpu()
        else:
            others[name] = value
    key = hashlib.sha256(f"{pictures.content_hash} {network} {others}".encode())
    key.update(pack(tensors))
    return key.hexdigest()[:16]


def _close(cached: Array, expected: Array) -> bool:
    return np.allclose(cached, expected, rtol=1e-3, atol=1e-4 * float(np.abs(expected).max()))
