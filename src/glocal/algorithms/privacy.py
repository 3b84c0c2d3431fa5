"""Clip and noise on the device, before anything is sent: Abadi et al. 2016 and McMahan et al. 2018, each device adding its own.

The server sees noisy uploads only, so that the bound holds against it too; it has to be paid for by more noise than where a trusted
server adds it once.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import random
from glocal.core.errors import InputError
from glocal.core.training import Work
from glocal.core.trees import Params

NoiseFn = Callable[[Tensor, Sequence[int]], Tensor]
_PRIVACY = -2  # its address among what a device draws in a round


@dataclass(frozen=True)
class DifferentialPrivacy:
    """A device's move is at most `clip` long; `noise` times that is the deviation of what is added to each of its numbers."""

    clipping_norm: float
    noise_multiplier: float


def clip_and_noise(
    upload: Params,
    shared: Params,
    privacy: DifferentialPrivacy,
    draw: Callable[[int, Sequence[int]], Tensor],
) -> Params:
    """The upload with its move from the shared tree clipped and noised; counters stay as the server knows them."""
    moved = {
        name: tensor - shared[name] for name, tensor in upload.items() if tensor.is_floating_point()
    }
    length = (
        torch.stack([move.double().square().sum() for move in moved.values()]).sum().sqrt()
        if moved
        else torch.zeros(())
    )
    scale = (privacy.clipping_norm / length.clamp(min=1e-12)).clamp(max=1.0)
    deviation = privacy.noise_multiplier * privacy.clipping_norm
    hidden = {
        name: shared[name]
        + move * scale.to(move.dtype)
        + deviation * draw(place, move.shape).to(move)
        for place, (name, move) in enumerate(sorted(moved.items()))
    }
    return {name: hidden.get(name, shared[name]) for name in upload}


def with_differential_privacy(
    algorithm: Algorithm, privacy: DifferentialPrivacy, *, draw: NoiseFn = random.normal
) -> Algorithm:
    """The same algorithm whose devices clip and noise what they send.

    The simulator draws from addressed randomness, so that runs repeat; a real device must draw what nobody can (`secure_noise`).
    """
    if not algorithm.is_mean:
        raise InputError(
            f"privacy: '{algorithm.name}' does not say that its server takes a mean (is_mean); "
            "clip and noise are made for that: choose another algorithm, or set it if it does"
        )

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        update = algorithm.client_update(shared, private, work)
        key = random.fold_in(work.key, _PRIVACY)
        return update._replace(
            upload=clip_and_noise(
                update.upload,
                shared,
                privacy,
                lambda place, shape: draw(random.fold_in(key, place), shape),
            )
        )

    description = (
        f"{algorithm.description}, clip={privacy.clipping_norm}, noise={privacy.noise_multiplier}"
    )
    return algorithm._replace(client_update=client_update, description=description)


def secure_noise(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal numbers from the machine's own entropy; the key, which the server could guess, is not used."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    return torch.randn(tuple(shape), generator=generator).to(key.device)
