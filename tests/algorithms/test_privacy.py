"""Clipping and noise, as the server sees them: changes are bounded, each with its own noise."""

import os
import random
import time

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms.contract import Update
from glocal.algorithms.privacy import DifferentialPrivacy, with_differential_privacy
from glocal.core.modules import params_of
from glocal.core.training import Work
from glocal.deploy.project import Project
from tests.support import deployed, world

NO_NOISE = 0.0
PLAN = glocal.Plan(rounds=2, clients_per_round=3, batch_size=5)
LR = 1.0  # changes are then longer than the clip norm below


def square():
    """Two layers of one shape."""
    wide = world.FEATURES * 8
    first = [nn.Linear(world.FEATURES, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, world.CLASSES))


def changes(privacy, *, make=world.plain, still=False):
    """The uploaded change of each client: one tree (clients, ...) per round."""
    model, sent = world.seeded(make), []
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.SGD(LR))
    if still:
        algorithm = algorithm._replace(client_update=unchanged)
    algorithm = with_differential_privacy(algorithm, privacy) if privacy else algorithm

    def spy(shared, uploads, weights):
        sent.append({name: uploads[name] - tensor for name, tensor in shared.items()})
        return shared  # every round starts from the same model

    spied = algorithm._replace(aggregate=spy)
    list(glocal.simulate(spied, params_of(model), world.federation().train, PLAN))
    return sent


def unchanged(shared, private, work):
    return Update(shared, {}, torch.zeros(()) * work.key)


def norms(tree):
    """The L2 norm of each client's change (clients,)."""
    squares = [tensor.flatten(1).square().sum(1) for tensor in tree.values()]
    return torch.stack(squares).sum(0).sqrt()


def test_no_change_is_longer_than_the_clip_norm_and_its_direction_stays():
    clip_norm = 0.01
    for plain, clipped in zip(
        changes(None), changes(DifferentialPrivacy(clip_norm, NO_NOISE)), strict=True
    ):
        assert bool((norms(plain) > 5 * clip_norm).all()), (
            "the test needs changes that are too long"
        )
        assert torch.allclose(
            norms(clipped), torch.full((PLAN.clients_per_round,), clip_norm), rtol=1e-3
        )
        for name, tensor in plain.items():
            scale = (clip_norm / norms(plain)).reshape(-1, *[1] * (tensor.dim() - 1))
            assert torch.allclose(clipped[name], tensor * scale, atol=1e-6)


def test_a_change_shorter_than_the_clip_norm_is_sent_as_it_is():
    for plain, bounded in zip(
        changes(None), changes(DifferentialPrivacy(1e6, NO_NOISE)), strict=True
    ):
        assert world.distance(plain, bounded) < 1e-6


def test_a_client_without_a_change_uploads_what_it_downloaded():
    for still in changes(DifferentialPrivacy(1.0, NO_NOISE), still=True):
        assert float(norms(still).max()) == 0


def correlation(left, right):
    """The correlation of two tensors of one shape, from -1 to 1."""
    return float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])


def test_every_tensor_client_and_round_has_its_own_noise():
    first, second = changes(DifferentialPrivacy(1.0, 1.0), make=square, still=True)
    assert first["2.weight"].shape == first["4.weight"].shape
    drawn = first["2.weight"][0]
    for other in (first["4.weight"][0], first["2.weight"][1], second["2.weight"][0]):
        assert abs(correlation(drawn, other)) < 0.1  # of 2304 numbers: five standard errors


def test_the_noise_std_is_the_multiplier_times_the_clip_norm():
    noises = changes(DifferentialPrivacy(0.5, 3.0), make=square, still=True)
    drawn = torch.cat([tensor.flatten() for tensor in noises[0].values()])
    assert float(drawn.std()) == pytest.approx(1.5, rel=0.05)


@pytest.fixture
def deployment(tmp_path):
    folder = deployed.project(tmp_path / "here", weights='weighting = "equal"')
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    return folder


def test_the_noise_of_a_deployed_client_cannot_be_drawn_again(deployment, monkeypatch):
    """Not from the seeds, rounds and client numbers that the server knows, nor from the clock."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    monkeypatch.setattr(time, "time_ns", lambda: 17 * 10**17)
    setup = Project.from_folder(deployment).setup
    shared, private = setup.algorithm.init(setup.params)
    examples = glocal.FederatedData.from_tensors(world.clients((9,)), validation=0.0).train.examples
    order, key = torch.arange(5)[None], torch.tensor(7)

    def upload():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        work = Work(examples, order, key, torch.tensor(0))
        return setup.algorithm.client_update(shared, private, work).upload

    with torch.random.fork_rng():
        one, again = upload(), upload()
        # with the system's entropy fixed, nothing else is left that the noise depends on
        monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
        fixed, repeated = upload(), upload()
    for name, tensor in one.items():
        assert not torch.equal(tensor, again[name])
        assert torch.equal(fixed[name], repeated[name])
