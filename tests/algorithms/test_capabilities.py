"""Capabilities of an algorithm are data on it, or found by trial: its name decides nothing."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from glocal.algorithms import FedAvg
from glocal.algorithms.adapt_only import AdaptOnly
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import SGD, Adam
from glocal.core.sampling import Plan
from glocal.core.task import classification
from glocal.deploy.project import Project
from glocal.federate.fit import warm_start_params
from glocal.federate.rounds import needs_single_uploads
from glocal.report import write_report
from glocal.studies import run_study
from glocal.studies.saved_experiment import open_experiment
from glocal.studies.settings import from_dict
from glocal.wire import Aggregation, Mean, Median
from tests.support import deployed, world

PRIVACY = "\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n"
OWN = """
from glocal import FedAvg, State

class Own(FedAvg):
    pass

class Silent(FedAvg):
    def init(self, params):
        return State(shared={}, private=params)
"""


@dataclass(frozen=True)
class Largest:
    """An aggregation of the user's own: the largest value of every coordinate."""

    is_mean: ClassVar[bool] = False

    def weights(self, num_examples):
        return torch.ones_like(num_examples, dtype=torch.float64)

    def reduce(self, messages, weights):
        return {name: tensor.amax(0) for name, tensor in messages.items()}


class Curious(FedAvg):
    """Looks at single uploads."""

    def server_update(self, shared, server, uploads):
        doubled = uploads.aggregate(lambda upload, sent, profile: trees.scale(2.0, upload))
        return trees.add(shared, doubled), server


def example(name, **settings):
    return world.algorithm(name, world.seeded(world.plain), **settings)


@pytest.mark.quick
@pytest.mark.parametrize("aggregation", [Mean(), Mean(by="clients"), Median(), Largest()])
def test_is_mean_is_true_exactly_where_the_result_is_the_weighted_mean(aggregation):
    messages = {"w": torch.randn(3, 5, dtype=torch.float64)}
    weights = aggregation.weights(torch.tensor([3, 1, 8]))
    gap = world.distance(aggregation.reduce(messages, weights), trees.mean(messages, weights))
    assert isinstance(aggregation, Aggregation)
    assert aggregation.is_mean == (gap < 1e-12)


def needs_each(algorithm):
    return needs_single_uploads(algorithm, algorithm.task.initial_params())


@pytest.mark.quick
@pytest.mark.parametrize("name", world.NAMES)
def test_only_algorithms_that_look_at_single_uploads_need_them(name):
    """IFCA and FeSEM move each cluster by its own members."""
    assert needs_each(example(name)) == (name in ("ifca", "fesem"))


@pytest.mark.quick
@pytest.mark.parametrize("aggregation", [Median(), Largest()])
def test_an_aggregation_that_is_no_mean_needs_each_upload(aggregation):
    assert needs_each(example("fedavg", aggregation=aggregation))


@pytest.mark.quick
def test_a_server_that_looks_at_single_uploads_is_found_by_trial():
    task = classification(world.seeded(world.plain))
    curious = Curious(task, optimizer=SGD(lr=0.1))
    assert needs_each(curious)
    assert not needs_each(FedAvg(task, optimizer=SGD(lr=0.1)))


@pytest.mark.quick
def test_adaptation_alone_sends_nothing():
    adapting = AdaptOnly.to(example("lg_fedavg"))
    shared = adapting.init(adapting.task.initial_params()).shared
    assert shared
    assert adapting.upload_like(shared) == {}


@pytest.mark.quick
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.5), Adam(lr=0.1)])
def test_a_client_without_a_private_part_adapts_nothing(optimizer):
    algorithm = example("fedavg", optimizer=optimizer)
    params, work = algorithm.task.initial_params(), world.work_of(world.federation().train, 0)
    upload = algorithm.adapt(params, {}, work).upload
    assert upload.keys() == params.keys()
    assert not any(tensor.any() for tensor in upload.values())


@pytest.mark.quick
@pytest.mark.parametrize("name", [name for name in world.NAMES if name != "local_only"])
def test_a_model_to_start_from_has_the_shapes_of_the_tasks(name):
    """Of all that an algorithm shares: models of several clusters, control variates."""
    algorithm = example(name)
    state = world.last(world.simulate(algorithm, world.federation().train, Plan(2, 4)))[0]
    start, initial = warm_start_params(algorithm, state.group()), algorithm.task.initial_params()
    assert start.keys() == initial.keys()
    assert all(tensor.shape == initial[key].shape for key, tensor in start.items())
    assert (world.distance(start, initial) > 0) == (name != "fedproto"), "its models are private"


@pytest.mark.quick
@pytest.mark.parametrize("wrong", ["mean", Median, None])
def test_what_is_no_aggregation_is_refused(wrong):
    with pytest.raises(InputError, match=r"^FedAvg: aggregation is .*; one of glocal's was"):
        example("fedavg", aggregation=wrong)


def setup(folder, algorithm, *, settings="", aggregation="mean(clients)"):
    """The setup of server and clients, with an algorithm of one's own."""
    plan = f'aggregation = "{aggregation}"'
    deployed.project(folder, algorithm=f"own:{algorithm}", plan=plan)
    (folder / "own.py").write_text(OWN)
    deployed.change(folder / "federation.py", "nn.BatchNorm1d(8)", "nn.Identity()")
    with (folder / "deploy.toml").open("a") as file:
        file.write(settings)
    if "privacy" not in settings:
        deployed.change(
            folder / "deploy.toml",
            "adapt_epochs = 20",
            "adapt_epochs = 20\nsecure_aggregation = true",
        )
    return Project.from_folder(folder).setup


GUARDS = {"secure_aggregation": "", "privacy": PRIVACY}


@pytest.mark.parametrize("guard", GUARDS)
def test_a_median_under_the_name_of_a_mean_is_not_deployed_as_one(guard, tmp_path):
    with pytest.raises(InputError, match=f"^deploy: {guard} .*mean"):
        setup(tmp_path / "here", "Own", settings=GUARDS[guard], aggregation="median")


@pytest.mark.parametrize("guard", GUARDS)
def test_a_mean_under_a_name_of_its_own_is_deployed(guard, tmp_path):
    own = setup(tmp_path / "here", "Own", settings=GUARDS[guard])
    assert own.algorithm.name == "Own"
    assert own.algorithm.aggregation.is_mean


@pytest.mark.parametrize("guard", GUARDS)
def test_what_sends_nothing_has_nothing_to_guard(guard, tmp_path):
    with pytest.raises(InputError, match=f"^deploy: {guard} .*sends nothing"):
        setup(tmp_path / "here", "Silent", settings=GUARDS[guard])


def test_every_algorithm_is_a_word_of_a_study(tmp_path):
    """Each trains, is tested, saved, and reported."""
    table = {
        "data": {"clients": 5},
        "plan": {"rounds": 1, "clients_per_round": 2},
        "model": {"hidden": [8]},
        "optimizer": {"momentum": 0.0},
        "split": {"local": ["layer1"]},
        "experiments": {name: {"algorithm": name} for name in world.NAMES},
    }
    finished = {each.experiment for each in run_study(from_dict(table), tmp_path / "run")}
    assert finished == {*world.NAMES}
    page = write_report(tmp_path / "run").read_text()
    assert all(f">{name}<" in page for name in world.NAMES)


RENAMED = """
from glocal import FedAvg, LGFedAvg

class Everything(FedAvg):
    pass

class Parts(LGFedAvg):
    pass
"""


@pytest.fixture
def run_of_ones_own(tmp_path, monkeypatch):
    """A run whose two algorithms are the library's under names of one's own."""
    (tmp_path / "renamed.py").write_text(RENAMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiments = {
        "Mine": {"algorithm": "renamed:Parts"},
        "Yours": {"algorithm": "renamed:Everything"},
    }
    table = {
        "data": {"clients": 6},
        "plan": {"rounds": 3, "clients_per_round": 3},
        "split": {"local": ["layer1"]},
        "experiments": experiments,
    }
    list(run_study(from_dict(table), tmp_path / "run"))
    return tmp_path / "run"


def test_a_new_client_joins_the_last_experiment_with_local_and_shared_parts(run_of_ones_own):
    assert open_experiment(run_of_ones_own).experiment == "Mine"
    assert open_experiment(run_of_ones_own, "Yours").experiment == "Yours"


def test_the_report_says_what_is_shared_in_an_experiment_that_shares_a_part(run_of_ones_own):
    page = write_report(run_of_ones_own).read_text()
    assert "Shared in Mine: " in page
    assert "Yours: " not in page
