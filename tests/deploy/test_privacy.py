"""The noise of deployed clients: each number has its own, and nobody can draw it again."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from glocal.core import random
from glocal.core.sampling import client_key
from glocal.deploy.client import RunClient
from glocal.deploy.flower.records import from_record
from glocal.deploy.project import Project
from glocal.wire import Clip, Noise, chain, unpack
from tests.support import deployed
from tests.support.deployed_runs import run_here, with_privacy

WIDTH = 400  # numbers in each of several tensors: their correlations have an error of 0.05
CLIP, MULTIPLIER = 0.5, 2.0
EQUAL = 'aggregation = "mean(clients)"'


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def folder_with_noise(folder):
    """FedAvg on a model with several tensors of one shape."""
    made = deployed.project(
        folder, algorithm="fedavg", clients=3, rounds=2, width=WIDTH, out=WIDTH, plan=EQUAL
    )
    return with_privacy(made, CLIP, MULTIPLIER)


def payloads(folder):
    """What each client sent in each round, by client and round."""
    wire, sent = Project.from_folder(folder).setup.wire, {}

    def tamper(client, message, reply):
        if message.metadata.message_type == "train":
            blob = from_record(reply.content.config_records["tree"])
            sent[client, int(message.metadata.group_id)] = unpack(blob, wire.payload)
        return reply

    run_here(folder, deployed.InProcessGrid(folder, tamper))
    return sent


def correlation(left, right):
    """The correlation of two tensors of one shape, from -1 to 1."""
    return abs(float(torch.corrcoef(torch.stack([left.flatten(), right.flatten()]))[0, 1]))


def test_every_client_round_and_tensor_has_noise_of_its_own(tmp_path):
    sent = payloads(folder_with_noise(tmp_path / "here"))
    own = sent[0, 0]
    floats = {name: tensor for name, tensor in own.items() if tensor.is_floating_point()}
    drawn = torch.cat([tensor.flatten() for tensor in floats.values()])
    assert float(drawn.std()) == pytest.approx(CLIP * MULTIPLIER, rel=0.02)
    for name, tensor in floats.items():
        if tensor.numel() >= WIDTH:
            assert correlation(tensor, sent[1, 0][name]) < 0.25, "two clients"
            assert correlation(tensor, sent[0, 1][name]) < 0.25, "two rounds"
    alike = ["0.bias", "1.weight", "1.bias", "1.running_mean", "4.bias"]
    assert {own[name].shape for name in alike} == {(WIDTH,)}
    for place, name in enumerate(alike):
        for other in alike[place + 1 :]:
            assert correlation(own[name], own[other]) < 0.25, "two tensors of one shape"
    assert not own["1.num_batches_tracked"].any(), "what cannot be noised is not sent"


def test_the_same_deployment_has_other_noise_in_another_run(tmp_path):
    """Although seeds, data, clients and rounds are the same."""
    here, there = (payloads(folder_with_noise(tmp_path / name)) for name in ("here", "there"))
    for key, tree in here.items():
        assert correlation(tree["4.weight"], there[key]["4.weight"]) < 0.02
        assert not torch.equal(tree["6.bias"], there[key]["6.bias"])


def test_the_server_cannot_draw_the_noise_of_a_client_from_what_it_knows(tmp_path):
    """It knows the seed, the client's number and the round: the address of simulated noise."""
    folder = folder_with_noise(tmp_path / "here")
    sent, plan = payloads(folder), Project.from_folder(folder).plan
    client = RunClient.from_folder(folder / "clients/client-1")
    setup, predictable = client.setup, chain(Clip(CLIP), Noise(CLIP * MULTIPLIER))
    assert setup.codec == chain(Clip(CLIP), Noise(CLIP * MULTIPLIER, entropy=True))
    wire, key = replace(setup.wire, codec=predictable), torch.tensor(client_key(plan, 0, 1))
    nothing = {name: torch.zeros_like(tensor) for name, tensor in sent[1, 0].items()}
    guess, _ = wire.encode(nothing, {}, key)
    moved = dict(nothing)
    moved["4.weight"] = nothing["4.weight"] + 1e-3
    simulated, _ = wire.encode(moved, {}, key)
    assert correlation(guess["4.weight"], simulated["4.weight"]) > 0.9, "the guess is not one"
    assert correlation(guess["4.weight"], sent[1, 0]["4.weight"]) < 0.02
    other = random.fold_in(key, 1)
    again = [setup.wire.encode(nothing, {}, each)[0]["4.weight"] for each in (key, key, other)]
    assert not torch.equal(again[0], again[1])
    assert np.isclose(float(again[0].std()), CLIP * MULTIPLIER, rtol=0.02)
