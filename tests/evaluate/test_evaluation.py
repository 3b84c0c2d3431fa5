"""Local Test and New Test, compared with numbers worked out by hand."""

import numpy as np
import pytest
import torch
from torch import nn

from glocal.algorithms import fedavg, local_only
from glocal.core.data import ClientData, Examples
from glocal.core.modules import params_of, predictor
from glocal.core.optimizers import SGD
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


def constant(logits):
    """A model with the same output for every input."""
    return {"weight": torch.zeros(3, 1), "bias": torch.tensor(logits)}


def make_evaluator(make):
    return Evaluator(make(cross_entropy(MODEL), SGD(0.1)), predictor(MODEL))


def private(*rows):
    return State({}, PrivateStates(rows[0], dict(enumerate(rows))))


def test_local_test_uses_each_clients_own_model():
    state = private(constant([1.0, 0, 0]), constant([0, 0, 1.0]), constant([0, 1.0, 0]))
    accuracies = local_test(make_evaluator(local_only), state, TEST)
    assert accuracies[:2].tolist() == [pytest.approx(2 / 3), 1.0]
    assert np.isnan(accuracies[2])
    assert summarize(accuracies, TEST.sizes) == (
        pytest.approx(5 / 6),
        pytest.approx(2 / 3),
        pytest.approx(5 / 6),
    )


def test_a_shared_model_is_tested_on_each_clients_data():
    state = State(constant([0, 0, 1.0]), PrivateStates({}, {}))
    assert local_test(make_evaluator(fedavg), state, TEST)[:2].tolist() == [0.0, 1.0]


def test_new_test_averages_logits_counts_votes_and_averages_weights():
    """Two weak votes for class 0 against one strong logit for class 2: the three ways differ."""
    state = private(constant([1.0, 0, 0]), constant([1.0, 0, 0]), constant([0, 0, 9.0]))
    result = new_test(make_evaluator(local_only), state, TEST)
    assert result.logits == pytest.approx(3 / 6)  # class 2
    assert result.votes == pytest.approx(2 / 6)  # class 0
    assert result.weights == pytest.approx(3 / 6)  # a linear model: the same as averaged logits


def test_only_clients_that_have_trained_are_in_the_ensemble():
    state = State({}, PrivateStates(constant([9.0, 0, 0]), {1: constant([0, 0, 1.0])}))
    assert new_test(make_evaluator(local_only), state, TEST).logits == pytest.approx(3 / 6)


def test_before_any_training_the_initial_model_predicts():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("lg_fedavg", model)
    evaluator = Evaluator(algorithm, predictor(model))
    state, test = initial_state(algorithm, params_of(model)), world.federation().test
    assert new_test(evaluator, state, test).votes == pytest.approx(
        summarize(local_test(evaluator, state, test), test.sizes).pooled
    )


def test_evaluation_agrees_across_engines_and_chunks():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("lg_fedavg", model)
    rows = [params_of(world.seeded(world.with_batch_norm, seed)) for seed in range(6)]
    split = world.first_half(model)
    private_rows = {client: split.take_local(row) for client, row in enumerate(rows)}
    state = State(split.take_shared(rows[0]), PrivateStates(private_rows[0], private_rows))
    test = world.federation(sizes=(300, 20, 7, 60, 5, 11)).test
    results = []
    for engine in ("auto", "looped", EngineConfig("vmapped", chunk_size=2), "workers"):
        evaluator = Evaluator(algorithm, predictor(model), engine=engine)
        results.append(
            (local_test(evaluator, state, test).tolist(), new_test(evaluator, state, test))
        )
        evaluator.close()
    assert results.count(results[0]) == 4


def test_evaluation_agrees_with_the_plain_module():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("fedavg", model)
    test = world.federation().test
    ours = local_test(
        Evaluator(algorithm, predictor(model)), initial_state(algorithm, params_of(model)), test
    )
    model.eval()
    for client in np.flatnonzero(test.sizes):
        x, y, _ = test.of(client)
        assert ours[client] == pytest.approx((model(x).argmax(1) == y).double().mean().item())


def test_the_worst_tenth_is_at_least_one_client():
    assert summarize(np.linspace(0, 1, 31), np.full(31, 5)).worst_tenth == pytest.approx(
        (0 + 1 / 30 + 2 / 30) / 3
    )
    assert summarize(np.array([0.5]), np.array([2])).worst_tenth == 0.5
    assert summarize(np.array([np.nan]), np.array([0])) == (None, None, None)
