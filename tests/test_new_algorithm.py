"""The page on a new algorithm, done literally: its two files, and the exercise at its end."""

import json
import re
from pathlib import Path

import pytest
import torch

import glocal
from glocal.algorithms.fedavgm import FedAvgM
from glocal.algorithms.fedrep import FedRep
from glocal.cli import main
from glocal.federate.fit import build_experiment
from tests.support import world

PAGE = (Path(__file__).parents[1] / "docs/new-algorithm.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SETTINGS = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
FILES = "\n\n".join(BLOCKS[:2])  # the second one has what the first imports
# what the exercise asks for: one field and one factor
EXERCISE = {
    "    momentum: float = 0.9\n": "    momentum: float = 0.9\n    server_lr: float = 1.0\n",
    "return add_change(shared, {**moved, **momentum}), momentum": (
        "steps = {name: self.server_lr * m for name, m in momentum.items()}\n"
        "        return add_change(shared, {**moved, **steps}), momentum"
    ),
}
every_model = pytest.mark.parametrize("kind", world.MODELS)


def solved():
    text = FILES
    for before, after in EXERCISE.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def defined_in(text):
    """The classes of a file, by name."""
    names = {"__name__": "the_page"}
    exec(text, names)
    return names


PAGES = defined_in(FILES)


def trained(make, kind, *, engine="looped", local_epochs=2, **settings):
    """The result of five rounds in float64."""
    model = world.seeded(world.MODELS[kind]).double()
    optimizer = glocal.SGD(lr=0.1, momentum=0.5)
    algorithm = make(glocal.classification(model), optimizer=optimizer, **settings)
    plan = glocal.Plan(rounds=5, clients_per_round=4, local_epochs=local_epochs, batch_size=5)
    experiment = build_experiment(algorithm, world.federation(), plan=plan)
    return glocal.Run(experiment, options=glocal.Options(engine=engine)).to_end().group()


def same_models(one, other):
    """Whether the models of all clients have the same bits."""
    pairs = [(one.params(client), other.params(client)) for client in range(world.NUM_CLIENTS)]
    return all(own.keys() == others.keys() for own, others in pairs) and all(
        torch.equal(own[name], others[name]) for own, others in pairs for name in own
    )


@every_model
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_pages_fedavgm_is_glocals_own(kind, momentum):
    one, own = (trained(make, kind, momentum=momentum) for make in (PAGES["FedAvgM"], FedAvgM))
    assert same_models(one, own)
    assert not same_models(one, trained(glocal.FedAvg, kind)) or not momentum


@every_model
def test_without_momentum_the_pages_fedavgm_is_fedavg(kind):
    alike = trained(PAGES["FedAvgM"], kind, momentum=0.0)
    assert same_models(alike, trained(glocal.FedAvg, kind))


@every_model
def test_momentum_leaves_a_model_that_works(kind):
    result = trained(PAGES["FedAvgM"], kind)
    x, _, _ = world.federation().test.of(0)
    assert bool(torch.isfinite(result.model(0)(x.double())).all())


def test_the_pages_momentum_is_never_sent():
    with_momentum, without = trained(PAGES["FedAvgM"], "plain"), trained(glocal.FedAvg, "plain")
    assert with_momentum.ledger == without.ledger
    assert with_momentum.state.server.keys() == with_momentum.state.shared.keys()


HEADS = {
    "plain": "2",
    "batch norm": "3",
    "dropout": "3",
    "convolution": "5",
    "batch norm and dropout": "4",
}


@every_model
def test_the_pages_fedrep_is_glocals_own(kind):
    settings = {"local": HEADS[kind], "head_epochs": 3}
    one, own = (trained(make, kind, **settings) for make in (PAGES["FedRep"], FedRep))
    assert same_models(one, own)
    assert one.ledger == own.ledger
    assert not same_models(one, trained(glocal.LGFedAvg, kind, local=HEADS[kind], local_epochs=5))


@pytest.mark.parametrize("engine", ["vmapped", "workers"])
def test_the_pages_fedrep_runs_on_other_engines(engine):
    """Its second phase begins in a later epoch, and engines try out a few steps first."""
    settings = {"local": HEADS["plain"], "head_epochs": 3}
    looped = trained(PAGES["FedRep"], "plain", **settings)
    other = trained(PAGES["FedRep"], "plain", engine=engine, **settings)
    for client in range(world.NUM_CLIENTS):
        assert world.distance(looped.params(client), other.params(client)) < 1e-10


def test_the_exercise_of_the_page_can_be_done():
    make = defined_in(solved())["FedAvgM"]
    whole = trained(make, "plain", momentum=0.0, server_lr=1.0)
    half = trained(make, "plain", momentum=0.5, server_lr=0.5)
    assert same_models(whole, trained(glocal.FedAvg, "plain"))
    assert same_models(half, trained(FedAvgM, "plain", momentum=0.5, server_lr=0.5))
    assert not same_models(half, trained(make, "plain", momentum=0.5))


OWN = """
[experiments.own]
algorithm = "glocal.algorithms.fedavgm:FedAvgM"
momentum = 0.5
server_lr = 0.5
[experiments.faster]
algorithm = "glocal.algorithms.fedavgm:FedAvgM"
momentum = 0.5
"""


def test_the_pages_study_and_its_exercise_run_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("solved_algorithms.py").write_text(solved())
    settings = SETTINGS.replace("my_algorithms:", "solved_algorithms:")
    settings = settings.replace("momentum = 0.5\n", "momentum = 0.5\nserver_lr = 0.5\n")
    Path("study.toml").write_text(settings + OWN)
    with pytest.raises(SystemExit) as ended:
        main(["run", "study.toml", "--out", "run"])
    assert ended.value.code == 0
    results = json.loads(Path("run/results.json").read_text())
    assert results["FedAvgM"] == results["own"]
    assert results["FedAvgM"] != results["faster"]
    assert results["FedRep"][0]["algorithm"] == "fedrep"
