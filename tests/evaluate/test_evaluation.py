"""Local Test and New Test, compared with numbers worked out by hand."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core.data import ClientData, Examples
from glocal.core.store import GroupState, PerClient
from glocal.engines import EngineConfig
from glocal.evaluate import Evaluator, Summary, local_figures, local_test, new_test, summarize
from glocal.federate.group_result import save_models
from tests.support import world

MODEL = nn.Linear(1, 3)
LABELS = torch.tensor([0, 0, 1, 2, 2, 2])
NONE = np.array([], dtype=np.int64)
TEST = ClientData(
    Examples(torch.zeros(6, 1), LABELS), (np.array([0, 1, 2]), np.array([3, 4, 5]), NONE)
)


def constant(logits):
    """A model with the same output for every input."""
    return {"weight": torch.zeros(3, 1), "bias": torch.tensor(logits)}


def evaluator_of(kind, **task):
    own = glocal.classification(MODEL, **task)
    return Evaluator(kind(own, optimizer=glocal.SGD(lr=0.1)))


def private(*rows):
    return GroupState({}, PerClient(rows[0], dict(enumerate(rows))))


def test_local_test_uses_each_clients_own_model():
    state = private(constant([1.0, 0, 0]), constant([0, 0, 1.0]), constant([0, 1.0, 0]))
    accuracies = local_test(evaluator_of(glocal.LocalOnly), state, TEST)
    assert accuracies[:2].tolist() == [pytest.approx(2 / 3), 1.0]
    assert np.isnan(accuracies[2])
    assert summarize(accuracies, TEST.sizes) == pytest.approx((5 / 6, 2 / 3, 5 / 6, 0))


def test_a_shared_model_is_tested_on_each_clients_data():
    state = GroupState(constant([0, 0, 1.0]), PerClient({}, {}))
    assert local_test(evaluator_of(glocal.FedAvg), state, TEST)[:2].tolist() == [0.0, 1.0]


def test_new_test_averages_logits_counts_votes_and_averages_weights():
    """Two weak votes for class 0 against one strong logit for class 2: the three ways differ."""
    state = private(constant([1.0, 0, 0]), constant([1.0, 0, 0]), constant([0, 0, 9.0]))
    result = new_test(evaluator_of(glocal.LocalOnly), state, TEST)
    assert result.logits == pytest.approx(3 / 6)  # class 2
    assert result.votes == pytest.approx(2 / 6)  # class 0
    assert result.weights == pytest.approx(3 / 6)  # a linear model: the same as averaged logits


def test_only_clients_that_have_trained_are_in_the_ensemble():
    state = GroupState({}, PerClient(constant([9.0, 0, 0]), {1: constant([0, 0, 1.0])}))
    assert new_test(evaluator_of(glocal.LocalOnly), state, TEST).logits == pytest.approx(3 / 6)


def test_the_ensemble_may_vote_or_average_probabilities():
    weak = constant([0.2, 0.1, 0])
    state = private(weak, weak, constant([0, 5.0, 0]), constant([0, 20.0, 30.0]))
    figures = {}
    for ensemble in ("mean", "probabilities", "votes"):
        evaluator = evaluator_of(glocal.LocalOnly, ensemble=ensemble)
        figures[ensemble] = new_test(evaluator, state, TEST).figures["accuracy"]
    # class 2 has the highest outputs, class 1 the highest probabilities, class 0 two votes
    assert figures == pytest.approx({"mean": 3 / 6, "probabilities": 1 / 6, "votes": 2 / 6})


def test_the_members_of_a_large_ensemble_are_drawn_from_the_seed():
    rows = [constant([float(client == 0), 0.5, float(client > 3)]) for client in range(6)]
    evaluator, state = evaluator_of(glocal.LocalOnly), private(*rows)
    whole = new_test(evaluator, state, TEST)
    drawn = [new_test(evaluator, state, TEST, max_members=2, seed=seed) for seed in (0, 0, 1, 2)]
    assert (whole.members, whole.of) == (6, 6)
    assert [(each.members, each.of) for each in drawn] == [(2, 6)] * 4
    assert drawn[0] == drawn[1]
    assert len({each.logits for each in drawn}) > 1


def test_what_a_codec_remembers_does_not_make_one_model_an_ensemble(tmp_path):
    """All clients of FedAvg have the same model, whatever errors top-k remembers for each."""
    algorithm = world.algorithm("fedavg", world.seeded(world.plain))
    plan = {"rounds": 3, "clients_per_round": 3, "progress": False}
    result = glocal.fit(algorithm, world.federation(), **plan, uplink=glocal.TopK(0.2)).group()
    assert {*result.state.private.initial} == {
        f"codec/{name}" for name in algorithm.task.initial_params()
    }
    assert (result.new.members, result.new.of) == (1, 1)
    save_models(result, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["every-client.safetensors"]


def test_before_any_training_the_initial_model_predicts():
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.with_batch_norm))
    _, state = world.set_up(algorithm, world.federation().train, glocal.Plan(1, 1))
    evaluator, test = Evaluator(algorithm), world.federation().test
    assert new_test(evaluator, state.group(), test).votes == pytest.approx(
        summarize(local_test(evaluator, state.group(), test), test.sizes).pooled
    )


def test_evaluation_agrees_across_engines_and_chunks():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("lg_fedavg", model)
    rows = [
        algorithm.init(glocal.params_of(world.seeded(world.with_batch_norm, seed)))
        for seed in range(6)
    ]
    private_rows = {client: row.private for client, row in enumerate(rows)}
    state = GroupState(rows[0].shared, PerClient(private_rows[0], private_rows))
    test = world.federation(sizes=(300, 20, 7, 60, 5, 11)).test
    results = []
    for engine in ("auto", "looped", EngineConfig("vmapped", chunk_size=2), "workers"):
        evaluator = Evaluator(algorithm, engine=engine)
        results.append(
            (local_test(evaluator, state, test).tolist(), new_test(evaluator, state, test))
        )
        evaluator.close()
    assert results.count(results[0]) == 4


def test_evaluation_agrees_with_the_plain_module():
    model = world.seeded(world.with_batch_norm)
    algorithm = world.algorithm("fedavg", model)
    test = world.federation().test
    _, state = world.set_up(algorithm, world.federation().train, glocal.Plan(1, 1))
    ours = local_test(Evaluator(algorithm), state.group(), test)
    model.eval()
    for client in np.flatnonzero(test.sizes):
        x, y, _ = test.of(client)
        assert ours[client] == pytest.approx((model(x).argmax(1) == y).double().mean().item())


def test_a_metric_of_whole_clients_is_worked_out_on_all_rows_of_each():
    """Class 2 is right for one client: recall 1; the other one has classes 0 and 1."""
    evaluator = evaluator_of(glocal.FedAvg, metrics=["balanced_accuracy", "accuracy"])
    state = GroupState(constant([0.0, 1.0, 0.5]), PerClient({}, {}))
    [figures] = local_figures(evaluator, [state], [TEST])
    assert figures["balanced_accuracy"].by_client[:2].tolist() == [0.5, 0.0]
    assert figures["balanced_accuracy"].pooled == pytest.approx(1 / 3)
    assert figures["accuracy"].by_client[:2].tolist() == pytest.approx([1 / 3, 0.0])
    assert figures["accuracy"].pooled == pytest.approx(1 / 6)


def test_a_client_whose_metric_is_undefined_is_counted_and_left_out_of_the_mean():
    """The AUROC of a client with one class is undefined."""
    evaluator = evaluator_of(glocal.FedAvg, metrics="auroc")
    state = GroupState(constant([0.0, 0.0, 0.0]), PerClient({}, {}))
    [figures] = local_figures(evaluator, [state], [TEST])
    auroc = figures["auroc"]
    assert auroc.by_client[0] == 0.5
    assert np.isnan(auroc.by_client[1:]).all()
    assert auroc.summary() == Summary(0.5, 0.5, 0.5, undefined=1)


def test_the_worst_tenth_is_at_least_one_client():
    assert summarize(np.linspace(0, 1, 31), np.full(31, 5)).worst_tenth == pytest.approx(
        (0 + 1 / 30 + 2 / 30) / 3
    )
    assert summarize(np.array([0.5]), np.array([2])).worst_tenth == 0.5
    assert summarize(np.array([np.nan]), np.array([0])) == (None, None, None, 0)


def test_where_lower_is_better_the_worst_tenth_is_the_highest():
    errors = np.linspace(0, 1, 31)
    summary = summarize(errors, np.full(31, 5), higher_is_better=False)
    assert summary.worst_tenth == pytest.approx((1 + 29 / 30 + 28 / 30) / 3)
