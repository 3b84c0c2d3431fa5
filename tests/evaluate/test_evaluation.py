"""Local Test and New Test, held against numbers worked out by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from glocal.algorithms import fedavg, local_only
from glocal.core.data import ClientData, Examples
from glocal.core.modules import params_of, predictor
from glocal.core.optimizers import sgd
from glocal.core.store import PrivateStates, State
from glocal.core.training import cross_entropy
from glocal.engines import EngineConfig
from glocal.evaluate import Evaluator, local_test, new_test, summarize
from glocal.federate.rounds import initial_state
from tests.support import world

MODEL = nn.Linear(1, 3)
LABELS = torch.tensor([0, 0, 1, 2, 2, 2])
TEST = ClientData(
    Examples(torch.zeros(6, 1), LABELS),
    (np.array([0, 1, 2]), np.array([3, 4, 5]), np.array([], dtype=np.int64)),
)


def says(logits):
    """A model that answers the same whatever it is asked."""
    return {"weight": torch.zeros(3, 1), "bias": torch.tensor(logits)}


def evaluation(make):
    return Evaluator(make(cross_entropy(MODEL), sgd(0.1)), predictor(MODEL))


def private(*rows):
    return State({}, PrivateStates(rows[0], dict(enumerate(rows))))


def test_local_test_asks_each_device_its_own_model():
    state = private(says([1.0, 0, 0]), says([0, 0, 1.0]), says([0, 1.0, 0]))
    accuracies = local_test(evaluation(local_only), state, TEST)
    assert accuracies[:2].tolist() == [pytest.approx(2 / 3), 1.0]
    assert np.isnan(accuracies[2])
    assert summarize(accuracies, TEST.sizes) == (
        pytest.approx(5 / 6),
        pytest.approx(2 / 3),
        pytest.approx(5 / 6),
    )


def test_a_shared_model_is_tested_on_each_devices_data():
    state = State(says([0, 0, 1.0]), PrivateStates({}, {}))
    assert local_test(evaluation(fedavg), state, TEST)[:2].tolist() == [0.0, 1.0]


def test_new_test_averages_logits_counts_votes_and_averages_weights():
    """Two weak votes for class 0 against one strong logit for class 2: the three ways of New Test tell apart."""
    state = private(says([1.0, 0, 0]), says([1.0, 0, 0]), says([0, 0, 9.0]))
    result = new_test(evaluation(local_only), state, TEST)
    assert result.logits == pytest.approx(3 / 6)  # class 2
    assert result.votes == pytest.approx(2 / 6)  # class 0
    assert result.weights == pytest.approx(3 / 6)  # a linear model: the same as averaged logits


def test_only_devices_that_have_trained_are_in_the_ensemble():
    state = State({}, PrivateStates(says([9.0, 0, 0]), {1: says([0, 0, 1.0])}))
    assert new_test(evaluation(local_only), state, TEST).logits == pytest.approx(3 / 6)


def test_before_any_training_the_initial_model_answers():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("lg_fedavg", model)
    asked = Evaluator(algorithm, predictor(model))
    state, test = initial_state(algorithm, params_of(model)), world.federation().test
    assert new_test(asked, state, test).votes == pytest.approx(
        summarize(local_test(asked, state, test), test.sizes).pooled
    )


def test_evaluation_agrees_over_engines_and_chunks():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("lg_fedavg", model)
    rows = [params_of(world.seeded(world.with_batch_norm, seed)) for seed in range(6)]
    split = world.first_half(model)
    private_rows = {device: split.take_local(row) for device, row in enumerate(rows)}
    state = State(split.take_shared(rows[0]), PrivateStates(private_rows[0], private_rows))
    test = world.federation(sizes=(300, 20, 7, 60, 5, 11)).test
    answers = []
    for engine in ("auto", "looped", EngineConfig("vmapped", chunk_size=2), "workers"):
        asked = Evaluator(algorithm, predictor(model), engine=engine)
        answers.append((local_test(asked, state, test).tolist(), new_test(asked, state, test)))
        asked.close()
    assert answers.count(answers[0]) == 4


def test_evaluation_is_what_the_plain_module_says():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("fedavg", model)
    test = world.federation().test
    ours = local_test(
        Evaluator(algorithm, predictor(model)), initial_state(algorithm, params_of(model)), test
    )
    model.eval()
    for device in np.flatnonzero(test.sizes):
        x, y, _ = test.of(device)
        assert ours[device] == pytest.approx((model(x).argmax(1) == y).double().mean().item())


def test_the_worst_tenth_is_at_least_one_device():
    assert summarize(np.linspace(0, 1, 31), np.full(31, 5)).worst_tenth == pytest.approx(
        (0 + 1 / 30 + 2 / 30) / 3
    )
    assert summarize(np.array([0.5]), np.array([2])).worst_tenth == 0.5
    assert summarize(np.array([np.nan]), np.array([0])) == (None, None, None)
