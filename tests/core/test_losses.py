"""A loss that reduces over the rows would count padded ones: it is translated, or refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal.core.errors import InputError
from glocal.engines import EngineConfig
from glocal.personalize.mixing import losses_by_alpha
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import world

REFUSED = r"loss: .*one value per example"
PLAN = {"rounds": 1, "clients_per_round": 2, "batch_size": 4}


def reduced(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def by_class(outputs, targets):
    """One value per class: by chance the number of rows in a batch of three."""
    return outputs.square().mean(0)


def with_axis(outputs, targets):
    return functional.cross_entropy(outputs, targets).reshape(1)


def a_number(outputs, targets):
    return float(outputs.detach().sum())


def pair_of_totals(outputs, targets):
    return functional.cross_entropy(outputs, targets), torch.ones(())


class MeanError(nn.Module):
    """A module of the user's own, without torch's `reduction`."""

    def forward(self, outputs, targets):
        return functional.cross_entropy(outputs, targets)


REDUCING = {
    "a module": (MeanError(), r"shape \(\)"),
    "a mean": (reduced, r"shape \(\)"),
    "a mean that keeps its axis": (with_axis, r"shape \(1,\)"),
    "one value per class": (by_class, r"shape \(3,\)"),
    "no tensor": (a_number, "a float"),
}
OWN = """
from torch.nn import functional
import glocal

def reduced(outputs, targets):
    return functional.cross_entropy(outputs, targets)

def own(task, *, optimizer):
    return glocal.FedAvg(glocal.Task(task.model, reduced), optimizer=optimizer)
"""


def algorithm(loss, model=None):
    task = glocal.Task(model or world.seeded(world.plain), loss)
    return glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))


def fit(algorithm, data=None, **settings):
    return glocal.fit(algorithm, data or world.federation(), progress=False, **settings)


@pytest.mark.parametrize("loss", REDUCING)
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_a_loss_that_reduces_is_refused_before_anything_is_written(loss, batch, tmp_path):
    function, returned = REDUCING[loss]
    message = rf"^loss: it returned {returned} for \d .*one value per example.*use reduction='none'"
    with pytest.raises(InputError, match=message) as refused:
        fit(algorithm(function), **{**PLAN, "batch_size": batch}, folder=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_pair_of_totals_is_refused():
    with pytest.raises(InputError, match=r"a pair of sums and weights, one of each per example"):
        fit(algorithm(pair_of_totals), **PLAN)


@pytest.mark.parametrize("loss", [reduced, with_axis, by_class])
def test_it_is_refused_where_every_client_holds_one_example(loss):
    test = world.clients((5, 5, 5), seed=1)
    federation = glocal.FederatedData.from_tensors(
        world.clients((1, 1, 1)), test=test, validation=0.0
    )
    with pytest.raises(InputError, match=REFUSED):
        fit(algorithm(loss), federation, **PLAN)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_as_many_classes_as_rows_do_not_hide_it(classes):
    """One value per class has the shape of one per row where a batch has as many rows."""
    model = world.seeded(lambda: nn.Linear(world.FEATURES, classes))
    data = glocal.FederatedData.from_tensors([(x, y % 2) for x, y in world.clients((12, 12, 12))])
    with pytest.raises(InputError, match=REFUSED):
        fit(algorithm(by_class, model), data, **{**PLAN, "batch_size": classes})


@pytest.mark.parametrize("engine", ["auto", "looped", "vmapped", "workers", "graphed"])
def test_no_engine_accepts_it_round_by_round(engine):
    train, plan = world.federation().train, glocal.Plan(200, 3, batch_size=5)
    rounds = world.simulate(algorithm(reduced), train, plan, engine=engine)
    with pytest.raises(InputError, match=REFUSED):
        next(rounds)


def test_it_is_refused_for_each_group_of_clients():
    groups = (
        glocal.Group(algorithm(nn.CrossEntropyLoss()), (world.federation(),), name="first"),
        glocal.Group(algorithm(reduced), (world.federation(),), name="second"),
    )
    experiment = glocal.Experiment(groups, glocal.Plan(1, 2, batch_size=4))
    with pytest.raises(InputError, match=f"group 'second': {REFUSED}"):
        glocal.Run(experiment).to_end()


def test_it_is_refused_where_alphas_are_tuned():
    model = world.seeded(world.plain)
    apfl = world.algorithm("apfl", model)
    state = fit(apfl, **PLAN).group().state
    reducing = replace(apfl, task=glocal.Task(model, reduced))
    with pytest.raises(InputError, match=REFUSED):
        losses_by_alpha(reducing, state, world.federation().val)


def test_an_experiment_of_ones_own_is_refused_before_the_first_experiment_starts(
    tmp_path, monkeypatch
):
    (tmp_path / "reducing.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiments = {"first": {"algorithm": "fedavg"}, "own": {"algorithm": "reducing:own"}}
    plan = {"rounds": 1, "clients_per_round": 2}
    settings = from_dict({"data": {"clients": 6}, "plan": plan, "experiments": experiments})
    with pytest.raises(InputError, match=REFUSED):
        next(run_study(settings, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def own_cross_entropy(outputs, targets):
    return functional.cross_entropy(outputs, targets, reduction="none")


def as_columns(outputs, targets):
    """Two values per example, of which the mean counts."""
    values = own_cross_entropy(outputs, targets)
    return torch.stack([values - 1, values + 1], 1)


def as_pair(outputs, targets):
    values = own_cross_entropy(outputs, targets)
    return 2 * values, torch.full_like(values, 2)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="none"),
        functional.cross_entropy,
        own_cross_entropy,
        as_columns,
        as_pair,
    ],
)
def test_every_way_to_write_the_cross_entropy_trains_the_same(loss):
    model = world.seeded(world.plain).double()
    engine = EngineConfig("workers", workers=1, fused=False)
    settings = {"rounds": 3, "clients_per_round": 4, "batch_size": 5, "engine": engine}
    results = [fit(algorithm(each, model), **settings) for each in (loss, nn.CrossEntropyLoss())]
    shared = [result.group().state.shared for result in results]
    assert world.distance(*shared) < 1e-12


def test_a_loss_may_weigh_classes_and_leave_labels_out():
    weights = torch.tensor([1.0, 2.0, 0.5])
    loss = nn.CrossEntropyLoss(weight=weights, ignore_index=1, reduction="none")
    assert fit(algorithm(loss), **PLAN).local_test is not None


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.MSELoss(reduction="sum"),
        partial(functional.cross_entropy, reduction="sum"),
        partial(functional.mse_loss, reduction="sum"),
        nn.KLDivLoss(reduction="batchmean"),
    ],
    ids=["module", "squared error", "functional", "functional squared error", "batchmean"],
)
def test_a_loss_that_sums_is_refused_when_the_task_is_made(loss):
    message = r"loss: its reduction is '(sum|batchmean)'; 'mean' or 'none' was expected"
    with pytest.raises(InputError, match=message) as refused:
        algorithm(loss)
    assert "\n" not in str(refused.value)


def test_a_loss_with_weights_of_its_own_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return self.scale * own_cross_entropy(outputs, targets)

    with pytest.raises(InputError, match="Scaled has parameters of its own"):
        algorithm(Scaled())


@pytest.mark.parametrize(
    "loss", [nn.MSELoss(), functional.l1_loss, nn.HuberLoss()], ids=["mse", "l1", "huber"]
)
def test_shapes_that_torch_would_broadcast_are_refused(loss):
    """Outputs (rows, 1) and targets (rows,): torch warns, and compares each row with all others."""
    clients = [(torch.randn(9, 4), torch.randn(9)) for _ in range(3)]
    task = glocal.Task(nn.Linear(4, 1), loss)
    with pytest.raises(InputError, match=r"^loss: an example has outputs \(1,\) .* equal shapes"):
        trained(task, clients)
    trained(glocal.regression(nn.Linear(4, 1)), clients)  # which squeezes


def test_a_loss_that_takes_something_else_is_refused_with_what_it_was_given():
    clients = [(torch.randn(9, 4), torch.randn(9, 2)) for _ in range(3)]
    with pytest.raises(
        InputError, match=r"^loss: GaussianNLLLoss.* fails on outputs \(2,\) float32"
    ):
        trained(glocal.Task(nn.Linear(4, 2), nn.GaussianNLLLoss()), clients)


def trained(task, clients):
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    data = glocal.FederatedData.from_tensors(clients)
    return glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
