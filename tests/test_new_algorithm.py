"""The page on a new algorithm, done literally: its file, and the exercise at its end."""

import re
from pathlib import Path

import pytest
import torch

from glocal.algorithms import fedavg
from glocal.cli import main
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.training import cross_entropy
from glocal.federate.rounds import simulate
from tests.support import world

PAGE = (Path(__file__).parents[1] / "docs/new-algorithm.md").read_text()
FILE = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
# what the exercise asks for: one argument, one factor and one more word in `description`
EXERCISE = {
    "momentum: float = 0.9": "momentum: float = 0.9, server_lr: float = 1.0",
    "shared[name] - velocity, velocity": "shared[name] - server_lr * velocity, velocity",
    "momentum={momentum}": "momentum={momentum}, server_lr={server_lr}",
}
STUDY = """
[plan]
rounds = 2
[experiments.FedAvgM]
algorithm = "solved:fedavgm"
momentum = 0.5
server_lr = 0.5
"""


def solved():
    text = FILE
    for before, after in EXERCISE.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    return text


def defined_in(text):
    names = {}
    exec(text, names)
    return names["fedavgm"]


def trained(make, kind, **settings):
    """The model that is shared after five rounds, without what else the server remembers."""
    model = world.seeded(world.MODELS[kind])
    algorithm = make(cross_entropy(model), SGD(0.1, momentum=0.5), **settings)
    plan = Plan(rounds=5, clients_per_round=4, local_epochs=2, batch_size=5)
    rounds = simulate(algorithm, params_of(model), world.federation().train, plan)
    shared = world.last(rounds)[0].shared
    return {name: shared[name] for name in params_of(model)}


@pytest.mark.parametrize("kind", world.MODELS)
def test_without_momentum_the_pages_algorithm_is_fedavg(kind):
    alike = trained(defined_in(FILE), kind, momentum=0.0)
    assert world.distance(alike, trained(fedavg, kind)) < 1e-5


@pytest.mark.parametrize("kind", world.MODELS)
def test_momentum_leaves_a_model_that_works(kind):
    after = trained(defined_in(FILE), kind)
    assert world.distance(after, trained(fedavg, kind)) > 1e-3
    model = world.seeded(world.MODELS[kind])
    model.load_state_dict(after)
    x, _, _ = world.federation().test.of(0)
    assert bool(torch.isfinite(model.eval()(x)).all())


def test_the_exercise_of_the_page_can_be_done():
    make = defined_in(solved())
    whole = trained(make, "plain", momentum=0.0, server_lr=1.0)
    half = trained(make, "plain", momentum=0.0, server_lr=0.5)
    assert world.distance(whole, trained(fedavg, "plain")) < 1e-5
    assert world.distance(half, whole) > 1e-3


def test_the_settings_of_the_exercise_work_in_a_study(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("solved.py").write_text(solved())
    Path("study.toml").write_text(STUDY)
    with pytest.raises(SystemExit) as ended:
        main(["run", "study.toml", "--out", "run"])
    assert ended.value.code == 0
