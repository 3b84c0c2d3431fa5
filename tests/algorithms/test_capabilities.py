"""Capabilities of an algorithm are data on it: its name decides nothing."""

import pytest
import torch

import glocal
from glocal import algorithms
from glocal.algorithms.contract import freeze_shared, unweighted
from glocal.algorithms.privacy import DifferentialPrivacy, with_differential_privacy
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.deploy.project import Project
from glocal.report import write_report
from glocal.studies import run_study
from glocal.studies.saved_experiment import open_experiment
from glocal.studies.settings import from_dict
from tests.support import deployed, world

PRIVACY = "\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n"
OWN = """
from glocal import algorithms

def median(shared, uploads, weights):
    return {{name: tensor.median(0).values for name, tensor in uploads.items()}}

def own(objective, optimizer):
    fedavg = algorithms.fedavg(objective, optimizer)
    return fedavg._replace({changes})
"""


def median(shared, uploads, weights):
    return {name: tensor.median(0).values for name, tensor in uploads.items()}


def example(name):
    return world.algorithm(name, world.seeded(world.plain))


def averages(algorithm, weights):
    """Whether the server computes the weighted mean of random uploads."""
    shared = algorithm.init(params_of(world.seeded(world.plain)))[0]
    uploads = {name: torch.randn(len(weights), *tensor.shape) for name, tensor in shared.items()}
    aggregated = algorithm.aggregate(shared, uploads, weights)
    return world.distance(aggregated, trees.mean(uploads, weights)) < 1e-6


@pytest.mark.parametrize("name", algorithms.__all__)
def test_is_mean_is_true_exactly_where_the_server_averages(name):
    assert example(name).is_mean == averages(example(name), torch.tensor([3, 1, 8]))


def test_the_library_has_algorithms_of_both_kinds():
    assert {example(name).is_mean for name in algorithms.__all__} == {True, False}


def test_an_algorithm_of_ones_own_has_is_mean_false_by_default():
    own = example("fedavg")
    assert not glocal.Algorithm(*own[:5]).is_mean


def test_wrappers_set_is_mean_correctly():
    fedavg, mtl, lg = example("fedavg"), example("mtl"), example("lg_fedavg")
    assert with_differential_privacy(fedavg, DifferentialPrivacy(1.0, 1.0)).is_mean
    assert unweighted(fedavg).is_mean
    assert averages(unweighted(fedavg), torch.ones(3, dtype=torch.int64))
    assert not unweighted(mtl).is_mean
    assert not freeze_shared(lg).is_mean


def test_noise_is_refused_where_the_server_does_not_average():
    """There an upload is no new value of the shared part, so its distance has no meaning."""
    with pytest.raises(InputError, match=r"^privacy: .*'mtl'.*is_mean"):
        with_differential_privacy(example("mtl"), DifferentialPrivacy(1.0, 1.0))


def setup(folder, changes, *, settings):
    """The setup of server and clients, with an algorithm of one's own."""
    deployed.project(folder, algorithm="own:own", weights='weighting = "equal"')
    (folder / "own.py").write_text(OWN.format(changes=changes))
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
    changes = "aggregate=median, is_mean=False"
    with pytest.raises(InputError, match=f"^deploy: {guard} .*mean"):
        setup(tmp_path / "here", changes, settings=GUARDS[guard])


@pytest.mark.parametrize("guard", GUARDS)
def test_a_mean_under_a_name_of_its_own_is_deployed(guard, tmp_path):
    assert setup(tmp_path / "here", "name='mine'", settings=GUARDS[guard]).algorithm.is_mean


@pytest.mark.parametrize("guard", GUARDS)
def test_what_sends_nothing_has_nothing_to_guard(guard, tmp_path):
    changes = "init=lambda params: ({}, params)"
    with pytest.raises(InputError, match=f"^deploy: {guard} .*sends nothing"):
        setup(tmp_path / "here", changes, settings=GUARDS[guard])


RENAMED = """
from glocal import fedavg, lg_fedavg

def everything(objective, optimizer):
    return fedavg(objective, optimizer)

def parts(objective, optimizer, *, split):
    return lg_fedavg(objective, optimizer, split=split)
"""


@pytest.fixture
def run_of_ones_own(tmp_path, monkeypatch):
    """A run whose two algorithms are the library's under names of one's own."""
    (tmp_path / "renamed.py").write_text(RENAMED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiments = {
        "Mine": {"algorithm": "renamed:parts"},
        "Yours": {"algorithm": "renamed:everything"},
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
