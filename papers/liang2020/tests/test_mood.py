"""Mood from texts: the network against torch's own, its splits, the study from run to figure."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from glocal.algorithms import LGFedAvg
from glocal.core import trees
from glocal.core.modules import params_of
from glocal.core.optimizers import Adam, StepLR
from glocal.core.sampling import Plan
from glocal.core.task import classification
from glocal.datasets.federated import FederatedData
from glocal.report import draw_study, study_markdown
from glocal.studies.build import build_split, default_model, named_split
from glocal.studies.findings import read_findings
from glocal.studies.run import plans_of
from glocal.studies.study_parts import run_parts, write_study
from liang2020.mood import MOOD, SHARES
from liang2020.mood_model import last_states, mood_lstm, one_direction
from tests.support import world
from tests.support.diaries import SECRET, diary


def tiny():
    return mood_lstm(5, width=4, units=3)


def small(**changes):
    return mood_lstm(3, vocabulary=11, width=6, units=4, **changes)


def sentences(lengths, length=9, seed=0):
    generator = np.random.default_rng(seed)
    x = np.zeros((len(lengths), length), dtype=np.int64)
    for row, words in zip(x, lengths, strict=True):
        row[:words] = generator.integers(1, 11, words)
    return torch.from_numpy(x)


def test_the_lstm_is_that_of_torch():
    torch.manual_seed(0)
    theirs = nn.LSTM(5, 7, bidirectional=True, batch_first=True).double()
    ours = [one_direction(5, 7).double() for _ in range(2)]
    for side, suffix in zip(ours, ("", "_reverse"), strict=True):
        side.weight_ih_l0.data = getattr(theirs, f"weight_ih_l0{suffix}").data.clone()
        side.weight_hh_l0.data = getattr(theirs, f"weight_hh_l0{suffix}").data.clone()
        side.gate_bias.data = (
            getattr(theirs, f"bias_ih_l0{suffix}") + getattr(theirs, f"bias_hh_l0{suffix}")
        ).data.clone()
    lengths = torch.tensor([6, 1, 4])
    texts = [torch.randn(int(length), 5, dtype=torch.double) for length in lengths]
    _, (last, _) = theirs(nn.utils.rnn.pack_sequence(texts, enforce_sorted=False))
    both = torch.zeros(2, 3, 6, 5, dtype=torch.double)
    real = torch.arange(6) >= 6 - lengths[:, None]
    for row, text in enumerate(texts):
        both[0, row, 6 - len(text) :], both[1, row, 6 - len(text) :] = text, text.flip(0)
    states = last_states(ours, both, real)
    assert torch.allclose(states, torch.cat([last[0], last[1]], -1), atol=1e-9)
    gradient = torch.autograd.grad(states.square().sum(), ours[0].weight_hh_l0)[0]
    expected = torch.autograd.grad(
        torch.cat([last[0], last[1]], -1).square().sum(), theirs.weight_hh_l0
    )[0]
    assert torch.allclose(gradient, expected, atol=1e-9)


def test_padding_changes_nothing():
    model = world.seeded(small).eval()
    x = sentences((9, 1, 4, 7))
    longer = torch.cat([x, torch.zeros(4, 13, dtype=torch.int64)], 1)
    assert torch.allclose(model(x), model(longer), atol=1e-6)
    assert torch.allclose(model(x)[1:2], model(x[1:2, :1]), atol=1e-6)


def test_the_network_takes_its_words_in_order():
    model = world.seeded(small).eval()
    assert not torch.allclose(
        model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[3, 2, 1]])), atol=1e-4
    )


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_clients_batched_train_as_one_by_one(dropout):
    model = world.seeded(lambda: small(dropout=dropout))
    people = [
        (sentences(lengths, seed=place), torch.arange(len(lengths)) % 3)
        for place, lengths in enumerate(((9, 1, 4, 7, 2), (3, 8)))
    ]
    train = FederatedData.from_tensors(people, test=0.0, validation=0.0).train
    adam = Adam(lr=0.01, lr_schedule=StepLR(gamma=0.5, step_size=1))
    algorithm = LGFedAvg(classification(model), optimizer=adam, local="head")
    plan = Plan(3, 2, batch_size=3, max_tokens=16)
    runs = [
        world.last(world.simulate(algorithm, train, plan, engine=engine))[0]
        for engine in ("looped", "vmapped")
    ]
    assert world.gap(*runs, num_clients=2) < 1e-5


def test_the_alpha_splits_have_the_shares_in_their_names():
    settings = MOOD.parts["14-people"].settings
    model = default_model("liang2020.mood_model:mood_lstm")
    params = params_of(model)
    assert trees.numel(params) == 1_436_101
    for name, share in SHARES.items():
        split = build_split(named_split(settings, settings.experiments[name]), model)
        shared = trees.numel(split.take_shared(params))
        assert 1 - shared / trees.numel(params) == pytest.approx(share, abs=5e-4)
        if "α" in name:
            assert share == pytest.approx(float(name.rpartition(" ")[2]), abs=0.035)


def test_every_method_of_the_study_has_the_same_number_of_rounds():
    for part in MOOD.parts.values():
        assert {plan.total_rounds for plan in plans_of(part.settings).values()} == {
            part.settings.plan.rounds
        }


@pytest.mark.slow
def test_the_mood_study_is_run_reported_and_drawn(tmp_path, capfd):
    study, source = MOOD, diary(tmp_path / "maps.csv")
    changes = [
        "plan.seeds=2",
        "plan.restarts=1",
        "plan.rounds=30",
        "plan.clients_per_round=4",
        "data.keep_clients=4",
        'run.engine="vmapped"',
    ]
    changes += [f'data.source="{source}"', 'model.name="test_mood:tiny"', "run.validate_every=10"]
    parts = write_study(study, tmp_path / "run", patterns=["14-people"], changes=changes)
    experiments = {
        name: experiment
        for name, experiment in parts["14-people"].experiments.items()
        if name in ("FedAvg", "Local only", "head local, α = .2")
    }
    for _ in run_parts(
        {"14-people": replace(parts["14-people"], experiments=experiments)}, tmp_path / "run"
    ):
        pass
    findings = read_findings(tmp_path / "run")
    text = study_markdown(findings)
    assert "| Bag of words, pooled, knows the person |" in text
    assert "the best mix is above FedAvg" in text
    (picture,) = draw_study(findings, tmp_path)
    assert picture.name == "paper-mood-14-people.png"
    assert SECRET not in text + capfd.readouterr().out
