"""Different things that are treated as the same: mistakes that a later version must refuse."""

import pytest
from torch import nn

import glocal
from glocal.core.errors import InputError
from tests.support import world

ACCEPTED = pytest.fail.Exception  # `pytest.raises` raises it where nothing was raised
PLAN = glocal.Plan(rounds=2, clients_per_round=4, batch_size=5)


def median(shared, uploads, weights):
    return {name: tensor.median(0).values for name, tensor in uploads.items()}


@pytest.mark.xfail(strict=True, raises=ACCEPTED, reason="no fingerprint holds the aggregation")
def test_a_run_with_the_mean_is_not_continued_with_the_median(tmp_path):
    model, federation = world.seeded(world.plain), world.federation()
    mean = glocal.fedavg(glocal.cross_entropy(model), glocal.SGD(0.1))
    of_medians = mean._replace(aggregate=median, is_mean=False)
    glocal.fit(mean, model, federation, PLAN, folder=tmp_path)
    longer = glocal.Plan(rounds=4, clients_per_round=4, batch_size=5)
    with pytest.raises(InputError, match="another"):
        glocal.fit(of_medians, model, federation, longer, folder=tmp_path)


def with_tanh():
    """The names and shapes of `world.plain`, and another network."""
    return nn.Sequential(nn.Linear(world.FEATURES, 8), nn.Tanh(), nn.Linear(8, world.CLASSES))


@pytest.mark.xfail(strict=True, raises=ACCEPTED, reason="the objective and `fit` both have a model")
def test_training_one_model_and_testing_another_is_refused():
    trained, tested = world.seeded(world.plain), world.seeded(with_tanh)
    algorithm = glocal.fedavg(glocal.cross_entropy(trained), glocal.SGD(0.1))
    with pytest.raises(InputError, match="model"):
        glocal.fit(algorithm, tested, world.federation(), PLAN)
