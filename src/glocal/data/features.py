"""What a frozen encoder sees in pictures: worked out once, kept in the cache, and looked up from then on."""

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from glocal.data.fetch import Report, unreported
from glocal.data.pictures import Numbers, Pictures
from glocal.errors import InputError
from glocal.places import cache_folder
from glocal.wire.crossing import pack

_AT_ONCE = {"cpu": 16}  # more at once leave a processor's cache: EfficientNet-Lite0 takes 2.6 times as long with 256
_MANY = 256
_PROBE = 16  # pictures by which kept features are known to be this encoder's


def described(pictures: Pictures, network: nn.Module, device: torch.device, *, report: Report = unreported) -> Pictures:
    """What a network sees in each picture (pictures, width), of mean 0 and deviation 1 over all of them.

    It runs as in evaluation. Pictures, weights and device tell kept features apart; that the network does with its weights what it
    did then is seen by its first few pictures.
    """
    network = network.to(device).eval()
    kept = cache_folder() / "features" / f"{_mark(pictures, network, device)}.npy"
    found = _read(kept, len(pictures))
    if found is None or not _agree(found[:_PROBE], _seen(pictures, network, device, range(min(_PROBE, len(pictures))))):
        found = _worked_out(pictures, network, device, report)
        _keep(kept, found)
    return standardised(found)


def standardised(features: Numbers) -> Pictures:
    """Features of mean 0 and deviation 1 each; 0 where all are alike, as with a single picture."""
    table = torch.from_numpy(features)
    deviation = table.std(0, correction=min(1, len(table) - 1)).clamp(min=1e-6)
    return Pictures(((table - table.mean(0)) / deviation).numpy())


def _worked_out(pictures: Pictures, network: nn.Module, device: torch.device, report: Report) -> Numbers:
    """All of them, some at a time; progress is told in bytes of pictures, as downloads are."""
    step, size = _AT_ONCE.get(device.type, _MANY), pictures.table[0].nbytes
    parts = []
    for start in range(0, len(pictures), step):
        numbers = range(start, min(start + step, len(pictures)))
        parts.append(_seen(pictures, network, device, numbers))
        report("pictures seen", size * numbers.stop, size * len(pictures))
    return np.concatenate(parts)


@torch.no_grad()
def _seen(pictures: Pictures, network: nn.Module, device: torch.device, numbers: range) -> Numbers:
    """Features (numbers, width) of these pictures."""
    seen = network(pictures(torch.tensor(numbers, device=device)))
    if not isinstance(seen, Tensor) or seen.dim() != 2 or len(seen) != len(numbers):
        made = tuple(seen.shape) if isinstance(seen, Tensor) else type(seen).__name__
        raise InputError(f"encoder: it made {made} of {len(numbers)} pictures; (pictures, width) was expected")
    told: Numbers = seen.float().cpu().numpy()
    return told


def _mark(pictures: Pictures, network: nn.Module, device: torch.device) -> str:
    told = hashlib.sha256(f"{device.type} {tuple(pictures.table.shape)} {network}".encode())
    told.update(pictures.table.numpy().data)
    told.update(pack({name: tensor.cpu() for name, tensor in network.state_dict().items()}))
    return told.hexdigest()[:16]


def _agree(kept: Numbers, seen: Numbers) -> bool:
    return kept.shape == seen.shape and np.allclose(kept, seen, rtol=1e-3, atol=1e-4 * float(np.abs(seen).max(initial=0)))


def _read(path: Path, rows: int) -> Numbers | None:
    """The features kept under this path; None if there are none of so many pictures."""
    try:
        array: Numbers = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return array if array.ndim == 2 and len(array) == rows and array.dtype == np.float32 else None


def _keep(path: Path, features: Numbers) -> None:
    """In one step; a cache that cannot be written costs the next run its time, not this one."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
            np.save(Path(scratch) / path.name, features)
            os.replace(Path(scratch) / path.name, path)
