"""Clipping and noise, as the server sees them: changes are bounded, each with its own noise."""

import os
import random
import time
from itertools import combinations

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms.contract import Update
from glocal.core import trees
from glocal.core.training import WeightedSum, Work
from glocal.deploy.project import Project
from glocal.federate.rounds import client_step
from tests.support import deployed, world

PLAN = glocal.Plan(rounds=2, clients_per_round=3, batch_size=5)
LR = 1.0  # changes are then longer than the clip norm below


def square():
    """Two layers of one shape."""
    wide = world.FEATURES * 8
    first = [nn.Linear(world.FEATURES, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU()]
    return nn.Sequential(*first, nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, world.CLASSES))


class Still(glocal.FedAvg):
    """Clients change nothing."""

    def client_update(self, message, private, work):
        nothing = torch.zeros(()) * work.key
        loss = WeightedSum(nothing, nothing + 1)
        return Update(trees.zeros_like(message), private, {"loss": loss})


def changes(uplink=None, *, kind=glocal.FedAvg, make=world.plain):
    """The uploaded change of each client: one tree (clients, ...) per round."""
    sent = []

    class Spied(kind):
        def server_update(self, shared, server, uploads):
            sent.append(uploads.messages)
            return shared, server  # every round starts from the same model

    algorithm = Spied(glocal.classification(world.seeded(make)), optimizer=glocal.SGD(lr=LR))
    list(world.simulate(algorithm, world.federation().train, PLAN, uplink=uplink))
    return sent


def norms(tree):
    """The L2 norm of each client's change (clients,)."""
    squares = [tensor.flatten(1).square().sum(1) for tensor in tree.values()]
    return torch.stack(squares).sum(0).sqrt()


def test_no_change_is_longer_than_the_clip_norm_and_its_direction_stays():
    norm = 0.01
    for plain, clipped in zip(changes(), changes(glocal.Clip(norm)), strict=True):
        assert bool((norms(plain) > 5 * norm).all()), "the test needs changes that are too long"
        expected = torch.full((PLAN.clients_per_round,), norm)
        assert torch.allclose(norms(clipped), expected, rtol=1e-5)
        for name, tensor in plain.items():
            scale = (norm / norms(plain)).reshape(-1, *[1] * (tensor.dim() - 1))
            assert torch.allclose(clipped[name], tensor * scale, atol=1e-7)


def test_a_change_shorter_than_the_clip_norm_is_sent_as_it_is():
    for plain, bounded in zip(changes(), changes(glocal.Clip(1e6)), strict=True):
        assert trees.same_bits(plain, bounded)


def test_a_client_without_a_change_uploads_none():
    for still in changes(glocal.Clip(1.0), kind=Still):
        assert float(norms(still).max()) == 0


def correlation(left, right):
    """The correlation of two tensors of one shape, from -1 to 1."""
    return float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1])


@pytest.mark.parametrize("entropy", [False, True])
def test_every_tensor_client_and_round_has_its_own_noise(entropy):
    uplink = glocal.chain(glocal.Clip(1.0), glocal.Noise(1.0, entropy=entropy))
    first, second = changes(uplink, kind=Still, make=square)
    assert first["2.weight"].shape == first["4.weight"].shape
    drawn = [first[name][client] for name in ("2.weight", "4.weight") for client in range(3)]
    drawn += second["2.weight"].unbind()
    for one, other in combinations(drawn, 2):
        assert abs(correlation(one, other)) < 0.1  # of 2304 numbers: five standard errors


def test_the_noise_has_the_standard_deviation_that_was_asked_for():
    drawn = []
    for std in (0.5, 3.0):
        noises = changes(glocal.Noise(std), kind=Still, make=square)
        drawn.append(torch.cat([tensor.flatten() for tensor in noises[0].values()]))
        assert float(drawn[-1].std()) == pytest.approx(std, rel=0.02)
        assert abs(float(drawn[-1].mean())) < 0.02 * std
    assert torch.allclose(drawn[1], 6 * drawn[0], rtol=1e-5)


def test_noise_by_address_is_the_same_when_a_run_repeats():
    uplink = glocal.chain(glocal.Clip(1.0), glocal.Noise(1.0))
    for one, again in zip(changes(uplink), changes(uplink), strict=True):
        assert trees.same_bits(one, again)


def test_every_algorithm_can_be_clipped_and_noised():
    for name in world.NAMES:
        algorithm = world.algorithm(name, world.seeded(world.plain))
        uplink = glocal.chain(glocal.Clip(0.1), glocal.Noise(1e-3))
        rounds = world.simulate(algorithm, world.federation().train, PLAN, uplink=uplink)
        plain = world.simulate(algorithm, world.federation().train, PLAN)
        states = [world.last(each)[0] for each in (rounds, plain)]
        sends_something = bool(algorithm.upload_like(states[0].shared))
        assert (world.distance(states[0].shared, states[1].shared) > 0) == sends_something


@pytest.fixture
def deployment(tmp_path):
    folder = deployed.project(tmp_path / "here", plan='aggregation = "mean(clients)"')
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    return folder


def test_the_noise_of_a_deployed_client_cannot_be_drawn_again(deployment, monkeypatch):
    """Not from the seeds, rounds and client numbers that the server knows, nor from the clock."""
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    monkeypatch.setattr(time, "time_ns", lambda: 17 * 10**17)
    setup = Project.from_folder(deployment).setup
    message, private = setup.start.shared, setup.private
    step = client_step(setup.algorithm, setup.wire)
    examples = glocal.FederatedData.from_tensors(world.clients((9,)), validation=0.0).train.examples
    order, key = torch.arange(5)[None, None], torch.tensor(7)

    def upload():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        work = Work.of(examples, order, key, torch.tensor(0))
        return step(message, private, work).payload

    with torch.random.fork_rng():
        one, again = upload(), upload()
        # with the system's entropy fixed, nothing else is left that the noise depends on
        monkeypatch.setattr(os, "urandom", lambda size: bytes(size))
        fixed, repeated = upload(), upload()
    assert one
    for name, tensor in one.items():
        assert not torch.equal(tensor, again[name])
        assert torch.equal(fixed[name], repeated[name])
