"""What a frozen encoder sees in pictures: worked out once, kept in the cache, and looked up from then on."""

import hashlib

import numpy as np
import torch
from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.paths import cache_folder
from glocal.datasets.fetch import Report, unreported
from glocal.datasets.kept import Numbers, keep, places_all_over, recalled
from glocal.datasets.pictures import Pictures
from glocal.wire.schema import pack

_AT_ONCE = {"cpu": 16}  # more at once leave a processor's cache, and take longer
_MANY = 256


def described(pictures: Pictures, network: nn.Module, device: torch.device, *, report: Report = unreported) -> Pictures:
    """What a network sees in each picture (pictures, width), of mean 0 and deviation 1 over all of them.

    It runs as in evaluation. Pictures, weights and device tell kept features apart; that the network does with its weights what it
    did then is seen by a few pictures from all over the table.
    """
    network.to(device)
    network.eval()
    probes = places_all_over(len(pictures))
    seen = _seen(pictures, network, device, probes)
    made_of = _made_of(pictures, network)
    path = cache_folder() / "features" / f"{device.type}-{made_of}.npy"
    found = recalled(path, np.float32, (len(pictures), seen.shape[1]))
    if found is None or not _agree(found[probes], seen):
        found = _worked_out(pictures, network, device, report)
        keep(path, found)
    return standardised(found, made_of)


def standardised(features: Numbers, made_of: str = "") -> Pictures:
    """Features of mean 0 and deviation 1 each; 0 where all are alike, as with a single picture."""
    centred = features - features.mean(0, dtype=np.float64).astype(np.float32)
    deviation = np.sqrt(np.square(centred).sum(0, dtype=np.float64) / max(1, len(features) - 1))
    varies = deviation > 1e-6 * np.abs(features).max(0)  # else it is rounding that varies
    scale = np.divide(1, deviation, out=np.zeros_like(deviation), where=varies)
    return Pictures(centred * scale.astype(np.float32), made_of)


def _worked_out(pictures: Pictures, network: nn.Module, device: torch.device, report: Report) -> Numbers:
    """All of them, some at a time; progress is told in bytes of pictures, as downloads are."""
    step, size = _AT_ONCE.get(device.type, _MANY), pictures.table[0].nbytes
    parts: list[Numbers] = []
    for start in range(0, len(pictures), step):
        numbers = np.arange(start, min(start + step, len(pictures)))
        parts.append(_seen(pictures, network, device, numbers))
        if parts[-1].shape[1] != parts[0].shape[1]:
            raise InputError(
                f"encoder: it made {parts[0].shape[1]} numbers of the first pictures and {parts[-1].shape[1]} of picture {start}; "
                "as many of each were expected"
            )
        report("pictures seen", size * (start + len(numbers)), size * len(pictures))
    return np.concatenate(parts)


@torch.no_grad()
def _seen(pictures: Pictures, network: nn.Module, device: torch.device, numbers: Numbers) -> Numbers:
    """Features (numbers, width) of these pictures, copied out of whatever the network holds them in."""
    seen = network(pictures(torch.from_numpy(numbers)).to(device))  # the table itself may be more than a GPU has room for
    if not isinstance(seen, Tensor) or seen.dim() != 2 or len(seen) != len(numbers) or not seen.shape[1] or seen.is_complex():
        made = f"{tuple(seen.shape)} of {seen.dtype}" if isinstance(seen, Tensor) else type(seen).__name__
        raise InputError(f"encoder: it made {made} of {len(numbers)} pictures; real numbers (pictures, width) were expected")
    told = np.array(seen.float().cpu().numpy(), order="C")
    if bad := numbers[~np.isfinite(told).all(1)].tolist():
        raise InputError(f"encoder: what it made of picture {bad[0]} is not finite; check its weights")
    return told


def _made_of(pictures: Pictures, network: nn.Module) -> str:
    """Pictures and weights, as one short word."""
    state = network.state_dict()
    tensors = {name: tensor.cpu() for name, tensor in state.items() if isinstance(tensor, Tensor)}
    others = {name: value for name, value in state.items() if name not in tensors}
    told = hashlib.sha256(f"{pictures.mark} {network} {others}".encode())
    told.update(pack(tensors))
    return told.hexdigest()[:16]


def _agree(kept: Numbers, seen: Numbers) -> bool:
    return np.allclose(kept, seen, rtol=1e-3, atol=1e-4 * float(np.abs(seen).max()))
