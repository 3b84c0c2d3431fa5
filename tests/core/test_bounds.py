"""Counts and rates have bounds: the refusal names the value and the bounds in one line."""

import math
from dataclasses import fields, is_dataclass
from typing import get_args, get_type_hints

import numpy as np
import pytest
from torch import nn

import glocal
from glocal.core.errors import InputError
from glocal.core.modules import GaussianNoise
from glocal.personalize.onboarding import JoinPlan
from glocal.studies.models import bottleneck_mlp
from glocal.studies.restarts import restarts_of
from glocal.studies.settings import Settings, from_dict
from tests.support import world
from tests.support.command_line import complaint, run

NO_RATES = [3.0, -0.5, 1.0, math.nan, math.inf]
NO_STDS = [-0.1, 1e30, math.nan, math.inf]
MODELS = ["mlp", "softmax_mlp", "bottleneck_mlp", "lenet5", "bottleneck_cnn"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rate", [3.0, -0.5, "nan", 1])
def test_a_dropout_rate_outside_0_to_1_is_refused_for_every_model(rate, model, capsys, tmp_path):
    out = tmp_path / "run"
    changes = ("--set", f'model.name="{model}"', "--set", f"model.dropout={rate}")
    assert run("run", "digits", *changes, "--out", out) == 2
    message = complaint(capsys)
    assert "model.dropout is " in message
    assert "from 0 to below 1" in message
    assert not out.exists()


@pytest.mark.parametrize("std", [-0.1, "1e30", "inf", "nan"])
def test_noise_outside_its_bounds_is_refused_for_every_model(std, capsys, tmp_path):
    for model in MODELS:
        changes = ("--set", f'model.name="{model}"', "--set", f"model.noise_std={std}")
        assert run("run", "digits", *changes, "--out", tmp_path / "run") == 2
        message = complaint(capsys)
        assert "model.noise_std is " in message
        assert "from 0 to 1000" in message


def test_a_file_of_settings_has_the_same_bounds(capsys, tmp_path):
    for line in ("dropout = 3.0", "dropout = -0.5", "noise_std = -1.0"):
        text = f'[model]\nname = "bottleneck_mlp"\n{line}\n[experiments.A]\nalgorithm = "fedavg"\n'
        (tmp_path / "study.toml").write_text(text)
        assert run("run", tmp_path / "study.toml", "--out", tmp_path / "run") == 2
        assert f"model.{line.split()[0]} is {line.split()[2]}" in complaint(capsys)


MAKES = {
    "bottleneck_mlp": lambda rate: bottleneck_mlp(dropout=rate),
    "bottleneck_mlp without hidden layers": lambda rate: bottleneck_mlp(hidden=(), dropout=rate),
}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("rate", NO_RATES)
def test_every_network_refuses_it_in_python_too(make, rate):
    with pytest.raises(InputError, match=r"^model: dropout is .*from 0 to below 1"):
        MAKES[make](rate)


@pytest.mark.parametrize("rate", [3.0, -0.5, math.nan])
def test_a_layer_with_such_a_dropout_rate_is_refused_by_name(rate):
    model = world.seeded(world.with_dropout)
    model[2].p = rate  # torch's constructor accepts NaN, and checks nothing afterwards
    algorithm = glocal.FedAvg(glocal.classification(model), optimizer=glocal.SGD(lr=0.1))
    with pytest.raises(
        InputError, match=r"^model: '2' has the dropout rate .*give one from 0 to 1"
    ):
        glocal.fit(algorithm, world.federation(), rounds=1, clients_per_round=2, progress=False)


@pytest.mark.parametrize("std", NO_STDS)
def test_noise_is_refused_in_python_too(std):
    with pytest.raises(InputError, match=r"^model: the noise std is .*from 0 to 1000"):
        GaussianNoise(std)
    with pytest.raises(InputError, match=r"^model: the noise std is "):
        bottleneck_mlp(noise_std=std)


def test_values_within_bounds_are_accepted():
    assert nn.Dropout in {type(layer) for layer in bottleneck_mlp(dropout=0.99).head}
    assert GaussianNoise(0).std == 0
    assert GaussianNoise(1000).std == 1000


def tables(kind=Settings, where=""):
    """Every table of settings, with the prefix of its options in a file."""
    yield kind, where
    hints = get_type_hints(kind)
    for part in fields(kind):
        for inner in get_args(hints[part.name]) or (hints[part.name],):
            if is_dataclass(inner):
                named = f"{part.name}.only" if part.name in ("experiments", "groups") else part.name
                yield from tables(inner, f"{where}{named}.")


def counts():
    """The name of every whole number in the settings, and whether it is a list of them."""
    for kind, where in tables():
        hints = get_type_hints(kind)
        for part in fields(kind):
            kinds = {hints[part.name], *get_args(hints[part.name])}
            lists = {tuple[int, ...]} & kinds
            if int in kinds or lists:
                yield f"{where}{part.name}", bool(lists)


COUNTS = dict(counts())
REQUIRED = {
    "new_client": {"train": 10},
    "audit": {"layer": "layer1"},
    "groups": {"only": {"clients": 5}},
    "experiments": {"only": {"algorithm": "lg_fedavg"}},
}
PRETEXT = {"kind": "decoder", "layer": "layer1"}


def test_the_counts_of_every_table_are_tested_here():
    assert {
        "plan.local_epochs",
        "experiments.only.rounds",
        "groups.only.leave_round",
        "run.workers",
    } <= {*COUNTS}
    assert {
        "experiments.only.pretext.hidden",
        "experiments.only.join_plan.existing_clients",
        "audit.encoders",
    } <= {*COUNTS}
    assert len(COUNTS) > 35


@pytest.mark.parametrize("value", [10**18, -(10**18), 10**30])
@pytest.mark.parametrize("name", COUNTS)
def test_every_count_in_the_settings_has_bounds(name, value):
    """Without bounds it hangs, or fills the memory."""
    pretext = {"pretext": PRETEXT} if ".pretext." in name else {}
    experiment = {"algorithm": "lg_fedavg", **pretext}
    written = f"[{value}]" if COUNTS[name] else f"{value}"
    with pytest.raises(InputError) as refused:
        from_dict({**REQUIRED, "experiments": {"only": experiment}}, [f"{name}={written}"])
    message = str(refused.value)
    assert name.split(".")[-1] in message
    assert "from " in message
    assert " to " in message
    assert "\n" not in message
    assert (str(value) in message) == (abs(value) < 10**20)


PLAN = {"rounds": 2, "clients_per_round": 2}
PLAN_COUNTS = [
    "rounds",
    "clients_per_round",
    "local_epochs",
    "batch_size",
    "seed",
    "first_round",
    "max_tokens",
]


NO_COUNTS = [10**18, -1, 1.5, math.nan, pytest.param(10**5000, id="long")]


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize("name", ["rounds", "clients_per_round", "local_epochs", "batch_size"])
def test_fit_has_the_same_bounds(name, value):
    algorithm = world.algorithm("fedavg", world.seeded(world.plain))
    with pytest.raises(InputError, match=rf"^plan: {name} is .* from \d.* to \d"):
        glocal.fit(algorithm, world.federation(), progress=False, **{**PLAN, name: value})


@pytest.mark.parametrize("value", NO_COUNTS)
@pytest.mark.parametrize("name", PLAN_COUNTS)
def test_a_plan_in_python_has_the_same_bounds(name, value):
    with pytest.raises(InputError, match=rf"^plan: {name} is .* from \d.* to \d"):
        glocal.Plan(**{**PLAN, name: value})


def test_a_plan_takes_whole_numbers_of_other_libraries():
    assert glocal.Plan(np.int64(2), np.int32(1), local_epochs=1000).total_rounds == 2


@pytest.mark.parametrize("make", [
    lambda: glocal.Evaluation(every=10**18),
    lambda: glocal.Evaluation(new_test_members=10**18),
    lambda: glocal.Pretraining(epochs=10**18),
    lambda: glocal.Options(checkpoint_every=10**18),
    lambda: glocal.Options(workers=10**18),
    lambda: glocal.EngineConfig(chunk_size=10**18),
    lambda: JoinPlan(epochs=10**18),
    lambda: JoinPlan(rounds=1, existing_clients=10**18),
])  # fmt: skip
def test_other_counts_in_python_have_the_same_bounds(make):
    with pytest.raises(InputError, match=r" is 1000000000000000000; .* from \d to \d"):
        make()


def test_seeds_times_restarts_are_bounded_too():
    with pytest.raises(
        InputError, match=r"plan.seeds x plan.restarts is 90000; .* from 1 to 1,000"
    ):
        restarts_of(from_dict({"plan": {"seeds": 900, "restarts": 100}}).plan)


@pytest.mark.parametrize("change", [
    "plan.local_epochs=1000000000000000000",
    "plan.seeds=1000000000000000000",
    "plan.rounds=-1",
    "model.hidden=[1000000000000000000]",
    "data.clients=1000000000000000000",
    "experiments.FedAvg.rounds=1000000000000000000",
    pytest.param(f"plan.batch_size={'9' * 5000}", id="long"),
])  # fmt: skip
def test_the_command_line_refuses_them_in_one_line(change, capsys, tmp_path):
    assert run("run", "digits", "--set", change, "--out", tmp_path / "run") == 2
    name, _, _ = change.partition("=")
    assert f"{name} is " in complaint(capsys)
    assert not (tmp_path / "run").exists()


def test_a_file_with_a_number_of_thousands_of_digits_is_refused_in_one_line(capsys, tmp_path):
    (tmp_path / "study.toml").write_text(f"[plan]\nlocal_epochs = {'9' * 5000}\n")
    assert run("run", tmp_path / "study.toml", "--out", tmp_path / "run") == 2
    assert "is not TOML" in complaint(capsys)
