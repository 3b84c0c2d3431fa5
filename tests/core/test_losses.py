"""A loss gives one value per example: a loss that reduces includes padded rows, and is refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.training import supervised
from glocal.federate.kinds import Kind, fit_kinds
from glocal.personalize.mixing import TrainedAPFL, losses_by_alpha
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import world

pytestmark = pytest.mark.quick

REFUSED = r"loss: .*one value per example"
PLAN = glocal.Plan(rounds=1, clients_per_round=2, batch_size=4)


def reduced(output, y):
    return functional.cross_entropy(output, y)


def by_class(output, y):
    """One value per class: by chance the number of rows in a batch of three."""
    return output.square().mean(0)


def with_axis(output, y):
    return functional.cross_entropy(output, y).reshape(1)


def by_row_and_class(output, y):
    return output.square()


def column(output, y):
    return functional.cross_entropy(output, y, reduction="none")[:, None]


def a_number(output, y):
    return float(output.detach().sum())


REDUCING = {
    "torch's own, as it is by default": (nn.CrossEntropyLoss(), r"shape \(\)"),
    "a mean": (reduced, r"shape \(\)"),
    "a mean that keeps its axis": (with_axis, r"shape \(1,\)"),
    "one value per class": (by_class, r"shape \(3,\)"),
    "one value per row and class": (by_row_and_class, r"shape \(2, 3\)"),
    "a column": (column, r"shape \(2, 1\)"),
    "no tensor": (a_number, "a float"),
}


OWN = """
from torch import nn
from glocal import fedavg
from glocal.core.training import supervised

def own(objective, optimizer):
    return fedavg(supervised(objective.loss.model, nn.CrossEntropyLoss()), optimizer)
"""


def algorithm(loss):
    model = world.seeded(world.plain)
    return glocal.fedavg(supervised(model, loss), glocal.SGD(0.1)), model


@pytest.mark.parametrize("loss", REDUCING)
@pytest.mark.parametrize("batch", [1, 3, 10])
def test_a_loss_that_reduces_is_refused_before_anything_is_written(loss, batch, tmp_path):
    function, returned = REDUCING[loss]
    own, model = algorithm(function)
    plan = glocal.Plan(rounds=1, clients_per_round=2, batch_size=batch)
    message = rf"^loss: it returned {returned} for 2 .*one value per example.*use reduction='none'"
    with pytest.raises(InputError, match=message) as refused:
        glocal.fit(own, model, world.federation(), plan, folder=tmp_path / "run")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("loss", [reduced, with_axis, by_class])
def test_it_is_refused_where_every_client_holds_one_example(loss):
    own, model = algorithm(loss)
    test = world.clients((5, 5, 5), seed=1)
    federation = glocal.FederatedData.from_tensors(
        world.clients((1, 1, 1)), test=test, validation=0.0
    )
    with pytest.raises(InputError, match=REFUSED):
        glocal.fit(own, model, federation, PLAN)


@pytest.mark.parametrize("classes", [2, 3, 4])
def test_as_many_classes_as_rows_do_not_hide_it(classes):
    """One value per class has the shape of one per row where a batch has as many rows."""
    model = world.seeded(lambda: nn.Linear(world.FEATURES, classes))
    labels = [(x, y % 2) for x, y in world.clients((12, 12, 12))]
    own = glocal.fedavg(supervised(model, by_class), glocal.SGD(0.1))
    plan = glocal.Plan(rounds=1, clients_per_round=2, batch_size=classes)
    with pytest.raises(InputError, match=REFUSED):
        glocal.fit(own, model, glocal.FederatedData.from_tensors(labels), plan)


@pytest.mark.parametrize("engine", ["auto", "looped", "vmapped", "workers", "graphed"])
def test_no_engine_accepts_it_round_by_round(engine):
    own, model = algorithm(nn.CrossEntropyLoss())
    train, plan = world.federation().train, glocal.Plan(200, 3, batch_size=5)
    rounds = glocal.simulate(own, params_of(model), train, plan, engine=engine)
    with pytest.raises(InputError, match=REFUSED):
        next(rounds)


def test_it_is_refused_for_each_kind_of_client():
    own, model = algorithm(nn.CrossEntropyLoss())
    with pytest.raises(InputError, match=f"kind 'only': {REFUSED}"):
        fit_kinds([Kind("only", own, model, world.federation())], PLAN)


def test_it_is_refused_where_alphas_are_tuned():
    model = world.seeded(world.plain)
    result = glocal.fit(world.algorithm("apfl", model), model, world.federation(), PLAN)
    with pytest.raises(InputError, match=REFUSED):
        losses_by_alpha(
            TrainedAPFL.from_result(result), world.federation().val, per_example=reduced
        )


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


def test_torchs_loss_without_reduction_trains_as_our_own():
    torchs, model = algorithm(nn.CrossEntropyLoss(reduction="none"))
    ours = glocal.fedavg(glocal.cross_entropy(model), glocal.SGD(0.1))
    plan = glocal.Plan(3, 4, batch_size=5)
    results = [glocal.fit(each, model, world.federation(), plan) for each in (torchs, ours)]
    assert world.distance(*(result.state.shared for result in results)) < 1e-6


def test_a_loss_may_weigh_classes_and_leave_labels_out():
    weights = torch.tensor([1.0, 2.0, 0.5])
    own, model = algorithm(nn.CrossEntropyLoss(weight=weights, ignore_index=1, reduction="none"))
    assert glocal.fit(own, model, world.federation(), PLAN).local_test is not None
