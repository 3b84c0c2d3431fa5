"""Different things must not be treated as the same: a run goes on only with what it began with."""

from functools import partial

import pytest
from torch import nn
from torch.nn import functional

import glocal
from glocal.core.errors import InputError
from tests.support import world

ALGORITHM = ("task", "aggregation")


def with_tanh():
    """The names and shapes of `world.plain`, and another network."""
    return nn.Sequential(nn.Linear(world.FEATURES, 8), nn.Tanh(), nn.Linear(8, world.CLASSES))


def task(make=world.plain, loss=functional.cross_entropy):
    return glocal.Task(world.seeded(make), loss, metrics=["accuracy", "loss"])


def run(folder, *, rounds, **changes):
    """FedAvg for some rounds, apart from these changes."""
    own = {name: changes.pop(name) for name in ALGORITHM if name in changes}
    algorithm = glocal.FedAvg(**{"task": task(), "optimizer": glocal.SGD(lr=0.1), **own})
    settings = {"clients_per_round": 4, "batch_size": 5, "progress": False, **changes}
    return glocal.fit(algorithm, world.federation(), rounds=rounds, folder=folder, **settings)


OTHERS = {
    "aggregation": ({"aggregation": glocal.Median()}, "aggregation.*Mean.*Median"),
    "weights of the mean": ({"aggregation": glocal.Mean("clients")}, "aggregation.by.*examples"),
    "codec": ({"uplink": glocal.Int8()}, "uplink.*Identity.*Int8"),
    "loss": ({"task": task(loss=functional.multi_margin_loss)}, "task.loss.*multi_margin_loss"),
    "setting of the loss": (
        {"task": task(loss=partial(functional.cross_entropy, label_smoothing=0.1))},
        "task.loss",
    ),
    "metric of selection": ({"select": "max accuracy"}, "evaluation.select.*last.*max accuracy"),
    "model of the same names": ({"task": task(with_tanh)}, "task.model.*ReLU.*Tanh"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_run_is_not_continued_with_another(name, tmp_path):
    changes, message = OTHERS[name]
    run(tmp_path, rounds=2)
    with pytest.raises(InputError, match=f"^resume: .* was made with another .*{message}") as given:
        run(tmp_path, rounds=4, **changes)
    assert "\n" not in str(given.value)


def test_a_run_is_continued_with_the_same(tmp_path):
    """For more rounds: the numbers are those of a run that was never stopped."""
    run(tmp_path / "stopped", rounds=2)
    longer = run(tmp_path / "stopped", rounds=4)
    at_once = run(tmp_path / "at once", rounds=4)
    assert world.same_bits(longer.group().state.alone(), at_once.group().state.alone())


def losses(result, make):
    """Of each client's tensors in a network of ours, on the client's own test data."""
    test, figures = world.federation().test, []
    for client in range(world.NUM_CLIENTS):
        model, own = make(), test.of(client)
        model.load_state_dict(result.group().state_dict(client))
        figures.append(functional.cross_entropy(model(own.x), own.y).item())
    return figures


def test_the_model_that_is_tested_is_the_one_that_was_trained(tmp_path):
    """It is given once, with the task: a network of the same names would give other figures."""
    result = run(tmp_path, rounds=4, task=task(with_tanh))
    tested = result.group().test["loss"].by_client
    assert losses(result, with_tanh) == pytest.approx(tested, nan_ok=True)
    assert losses(result, world.plain) != pytest.approx(tested, nan_ok=True)


def test_a_second_model_is_refused():
    algorithm = glocal.FedAvg(task(), optimizer=glocal.SGD(lr=0.1))
    with pytest.raises(InputError, match=r"^fit: data is a Sequential .*a FederatedData, such as"):
        glocal.fit(algorithm, world.seeded(with_tanh), rounds=2, clients_per_round=2)
