"""Clip and noise, as the server sees them: moves are bounded, and each has noise of its own."""

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
RATE = 1.0  # a move that is longer than what it is clipped to below


def square():
    """Two layers of one shape."""
    wide = world.FEATURES * 8
    first = [nn.Linear(world.FEATURES, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, world.CLASSES))


def moves(privacy, *, make=world.plain, still=False):
    """What each device of each round moved by, as it was sent: one tree (devices, ...) a round."""
    model, sent = world.seeded(make), []
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.sgd(RATE))
    if still:
        algorithm = algorithm._replace(client_update=stays)
    algorithm = with_differential_privacy(algorithm, privacy) if privacy else algorithm

    def spy(shared, uploads, weights):
        sent.append({name: uploads[name] - tensor for name, tensor in shared.items()})
        return shared  # every round begins where the first did

    spied = algorithm._replace(aggregate=spy)
    list(glocal.simulate(spied, params_of(model), world.federation().train, PLAN))
    return sent


def stays(shared, private, work):
    return Update(shared, {}, torch.zeros(()) * work.key)


def lengths(tree):
    """How long each device's move is (devices,)."""
    squares = [tensor.flatten(1).square().sum(1) for tensor in tree.values()]
    return torch.stack(squares).sum(0).sqrt()


def test_no_move_is_longer_than_the_clip_and_its_direction_stays():
    clip_norm = 0.01
    for plain, clipped in zip(
        moves(None), moves(DifferentialPrivacy(clip_norm, NO_NOISE)), strict=True
    ):
        assert bool((lengths(plain) > 5 * clip_norm).all()), (
            "the test needs moves that are too long"
        )
        assert torch.allclose(
            lengths(clipped), torch.full((PLAN.clients_per_round,), clip_norm), rtol=1e-3
        )
        for name, tensor in plain.items():
            scale = (clip_norm / lengths(plain)).reshape(-1, *[1] * (tensor.dim() - 1))
            assert torch.allclose(clipped[name], tensor * scale, atol=1e-6)


def test_a_move_that_is_shorter_than_the_clip_is_sent_as_it_is():
    for plain, bounded in zip(moves(None), moves(DifferentialPrivacy(1e6, NO_NOISE)), strict=True):
        assert world.distance(plain, bounded) < 1e-6


def test_a_device_that_does_not_move_sends_what_it_was_sent():
    for still in moves(DifferentialPrivacy(1.0, NO_NOISE), still=True):
        assert float(lengths(still).max()) == 0


def alike(left, right):
    """How much two tensors of one shape vary together, from -1 to 1."""
    return float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])


def test_every_tensor_device_and_round_has_noise_of_its_own():
    first, second = moves(DifferentialPrivacy(1.0, 1.0), make=square, still=True)
    assert first["2.weight"].shape == first["4.weight"].shape
    drawn = first["2.weight"][0]
    for other in (first["4.weight"][0], first["2.weight"][1], second["2.weight"][0]):
        assert abs(alike(drawn, other)) < 0.1  # of 2304 numbers: five deviations


def test_the_noise_is_as_strong_as_it_is_said_to_be():
    noises = moves(DifferentialPrivacy(0.5, 3.0), make=square, still=True)
    drawn = torch.cat([tensor.flatten() for tensor in noises[0].values()])
    assert float(drawn.std()) == pytest.approx(1.5, rel=0.05)


@pytest.fixture
def deployment(tmp_path):
    folder = deployed.project(tmp_path / "here", weights='weighting = "equal"')
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    return folder


def test_nobody_can_draw_a_deployed_devices_noise_again(deployment, monkeypatch):
    """Neither by the seeds, rounds and numbers that the server knows, nor by the clock."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    monkeypatch.setattr(time, "time_ns", lambda: 17 * 10**17)
    setup = Project.from_folder(deployment).setup
    shared, private = setup.algorithm.init(setup.params)
    examples = glocal.from_tensors(world.clients((9,)), validation=0.0).train.examples
    order, key = torch.arange(5)[None], torch.tensor(7)

    def upload():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        work = Work(examples, order, key, torch.tensor(0))
        return setup.algorithm.client_update(shared, private, work).upload

    with torch.random.fork_rng():
        one, again = upload(), upload()
    for name, tensor in one.items():
        assert not torch.equal(tensor, again[name])
