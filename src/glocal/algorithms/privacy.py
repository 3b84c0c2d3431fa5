"""Differential privacy on the client: uploads are clipped and get noise before they are sent.

Abadi et al. 2016 and McMahan et al. 2018, with noise from each client. The server sees only noisy
uploads, so the bound holds against the server too. The price is more noise than with a trusted
server that adds it once.
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
_PRIVACY = -2  # the address of this noise within the key of a client's round


@dataclass(frozen=True)
class DifferentialPrivacy:
    """A client's change is clipped to the L2 norm `clip_norm`.

    The noise in each element has the std `noise_multiplier` * `clip_norm`.
    """

    clip_norm: float
    noise_multiplier: float


def clip_and_noise(
    upload: Params,
    shared: Params,
    privacy: DifferentialPrivacy,
    draw: Callable[[int, Sequence[int]], Tensor],
) -> Params:
    """The upload, with its update of the shared tree clipped and with noise added.

    Counters stay as the server knows them. `draw(index, shape)` gives the noise of one tensor.
    """
    changes = {}
    for name, tensor in upload.items():
        if tensor.is_floating_point():
            changes[name] = tensor - shared[name]
    scale = (privacy.clip_norm / _norm(changes).clamp(min=1e-12)).clamp(max=1.0)
    std = privacy.noise_multiplier * privacy.clip_norm
    noisy = dict(shared)
    for index, name in enumerate(sorted(changes)):
        change = changes[name]
        noise = std * draw(index, change.shape).to(change)
        noisy[name] = shared[name] + change * scale.to(change.dtype) + noise
    return {name: noisy[name] for name in upload}


def _norm(tree: Params) -> Tensor:
    """The L2 norm of a whole tree ()."""
    if not tree:
        return torch.zeros(())
    squares = [tensor.double().square().sum() for tensor in tree.values()]
    return torch.stack(squares).sum().sqrt()


def with_differential_privacy(
    algorithm: Algorithm, privacy: DifferentialPrivacy, *, draw: NoiseFn = random.normal
) -> Algorithm:
    """The same algorithm with clients that clip their uploads and add noise.

    The simulator draws by address, so that runs repeat. A deployed client must draw numbers that
    nobody can predict (`secure_noise`).
    """
    if not algorithm.is_mean:
        raise InputError(
            f"privacy: the server of '{algorithm.name}' takes no mean (is_mean is False), and "
            "clipping and noise need one: choose another algorithm, or set is_mean if it does"
        )

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        update = algorithm.client_update(shared, private, work)
        key = random.fold_in(work.key, _PRIVACY)

        def draw_for(index: int, shape: Sequence[int]) -> Tensor:
            return draw(random.fold_in(key, index), shape)

        return update._replace(upload=clip_and_noise(update.upload, shared, privacy, draw_for))

    settings = f"clip_norm={privacy.clip_norm}, noise_multiplier={privacy.noise_multiplier}"
    description = f"{algorithm.description}, {settings}"
    return algorithm._replace(client_update=client_update, description=description)


def secure_noise(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Normal numbers seeded by the machine's entropy, not by the key, which the server knows."""
    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(8), "little", signed=True))
    return torch.randn(tuple(shape), generator=generator).to(key.device)
