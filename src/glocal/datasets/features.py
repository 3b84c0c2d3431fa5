"""What a frozen encoder sees in pictures: worked out once, kept in the cache, and looked up from then on."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.paths import cache_folder
from glocal.datasets.cache import Array, load_array, probe_rows, save_array
from glocal.datasets.fetch import ProgressCallback, no_progress
from glocal.datasets.image_table import ImageTable
from glocal.wire.gate import pack

_BATCH_SIZES = {"cpu": 16}  # more at once leave a processor's cache, and take longer
_DEFAULT_BATCH_SIZE = 256


def extract_features(
    pictures: ImageTable,
    network: nn.Module,
    device: torch.device,
    *,
    report: ProgressCallback = no_progress,
) -> ImageTable:
    """What a network sees in each picture (pictures, width), of mean 0 and deviation 1 over all of them.

    It runs as in evaluation. Pictures, weights and device tell kept features apart; that the network does with its weights what it
    did then is seen by a few pictures from all over the table.
    """
    network.to(device)
    network.eval()
    probes = probe_rows(len(pictures))
    seen = _extract(pictures, network, device, probes)
    source_hash = _cache_key(pictures, network)
    path = cache_folder() / "features" / f"{device.type}-{source_hash}.npy"
    found = load_array(path, np.float32, (len(pictures), seen.shape[1]))
    if found is None or not _close(found[probes], seen):
        found = _extract_all(pictures, network, device, report)
        save_array(path, found)
    return standardize(found, source_hash)


def standardize(features: Array, source_hash: str = "") -> ImageTable:
    """Features of mean 0 and deviation 1 each; 0 where all are alike, as with a single picture."""
    centred = features - features.mean(0, dtype=np.float64).astype(np.float32)
    deviation = np.sqrt(np.square(centred).sum(0, dtype=np.float64) / max(1, len(features) - 1))
    varies = deviation > 1e-6 * np.abs(features).max(0)  # else it is rounding that varies
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=varies)
    return ImageTable(centred * scale.astype(np.float32), source_hash)


def _extract_all(
    pictures: ImageTable, network: nn.Module, device: torch.device, report: ProgressCallback
) -> Array:
    """All of them, some at a time; progress is told in bytes of pictures, as downloads are."""
    step, size = _BATCH_SIZES.get(device.type, _DEFAULT_BATCH_SIZE), pictures.table[0].nbytes
    parts: list[Array] = []
    for start in range(0, len(pictures), step):
        numbers = np.arange(start, min(start + step, len(pictures)))
        parts.append(_extract(pictures, network, device, numbers))
        if parts[-1].shape[1] != parts[0].shape[1]:
            raise InputError(
                f"encoder: it made {parts[0].shape[1]} numbers of the first pictures and {parts[-1].shape[1]} of picture {start}; "
                "as many of each were expected"
            )
        report("pictures seen", size * (start + len(numbers)), size * len(pictures))
    return np.concatenate(parts)


@torch.no_grad()
def _extract(
    pictures: ImageTable, network: nn.Module, device: torch.device, numbers: Array
) -> Array:
    """Features (numbers, width) of these pictures, copied out of whatever the network holds them in."""
    seen = network(
        pictures(torch.from_numpy(numbers)).to(device)
    )  # the table itself may be more than a GPU has room for
    if (
        not isinstance(seen, Tensor)
        or seen.dim() != 2
        or len(seen) != len(numbers)
        or not seen.shape[1]
        or seen.is_complex()
    ):
        made = (
            f"{tuple(seen.shape)} of {seen.dtype}"
            if isinstance(seen, Tensor)
            else type(seen).__name__
        )
        raise InputError(
            f"encoder: it made {made} of {len(numbers)} pictures; real numbers (pictures, width) were expected"
        )
    told = np.array(seen.float().cpu().numpy(), order="C")
    if bad := numbers[~np.isfinite(told).all(1)].tolist():
        raise InputError(
            f"encoder: what it made of picture {bad[0]} is not finite; check its weights"
        )
    return told


def _cache_key(pictures: ImageTable, network: nn.Module) -> str:
    """Pictures and weights, as one short word."""
    state = network.state_dict()
    tensors = {name: tensor.cpu() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    others = {name: value for name, value in state.items() if name not in tensors}
    told = hashlib.sha256(f"{pictures.content_hash} {network} {others}".encode())
    told.update(pack(tensors))
    return told.hexdigest()[:16]


def _close(kept: Array, seen: Array) -> bool:
    return np.allclose(kept, seen, rtol=1e-3, atol=1e-4 * float(np.abs(seen).max()))
