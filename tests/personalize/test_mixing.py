"""Mixtures of a client's own model and the shared one: training, privacy, and the best alpha."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import APFL, FedAvg
from glocal.algorithms.adapt_only import AdaptOnly
from glocal.algorithms.apfl import ALPHA
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.task import Task, classification
from glocal.personalize.mixing import alphas_of, losses_by_alpha, tune_alphas, with_alphas
from tests.support import world

PLAN = Plan(rounds=6, clients_per_round=4, local_epochs=2, batch_size=5)


def fit(kind, fed, **settings):
    """The result of some rounds on the same model."""
    hyperparameters = {
        name: settings.pop(name) for name in ("alpha", "alpha_lr") if name in settings
    }
    task = classification(world.seeded(world.plain))
    algorithm = kind(task, optimizer=SGD(0.1), **hyperparameters)
    size = {"clients_per_round": 4, "local_epochs": 2, "batch_size": 5}
    return glocal.fit(algorithm, fed, rounds=PLAN.rounds, **size, progress=False, **settings)


def trained(fed=None, **hyperparameters):
    fed = fed or world.federation(sizes=(40,) * world.NUM_CLIENTS, validation=0.3)
    return fit(APFL, fed, **hyperparameters), fed


def half_square(output, target):
    return 0.5 * (output.squeeze(1) - target).square()


def of_one_number(**hyperparameters):
    """APFL on a model of one number, 1, and a client with one example."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    train = glocal.FederatedData.from_tensors(
        [(torch.ones(1, 1), torch.tensor([3.0]))], test=0.0, validation=0.0
    ).train
    return APFL(Task(model, half_square), optimizer=SGD(0.1), **hyperparameters), train


def test_one_step_is_algorithm_1_by_hand():
    """Two steps of f(w) = (w - 3)^2 / 2 from w = v = 1; the gradient of v has the factor alpha."""
    algorithm, train = of_one_number(alpha=0.25)
    state, _ = world.last(world.simulate(algorithm, train, Plan(2, 1)))
    private = state.private[0].of(0)
    w, v = 1.0, 1.0
    for _ in range(2):
        mixture = 0.25 * v + 0.75 * w
        w, v = w - 0.1 * (w - 3), v - 0.1 * 0.25 * (mixture - 3)
    assert state.shared["weight"].item() == pytest.approx(w)
    assert private["own/weight"].item() == pytest.approx(v)
    personal = algorithm.personal(state.shared, private)
    assert personal["weight"].item() == pytest.approx(0.25 * v + 0.75 * w)


def test_alpha_takes_one_gradient_step_a_round():
    algorithm, train = of_one_number(alpha=0.5, alpha_lr=2.0)
    states = [state for state, _ in world.simulate(algorithm, train, Plan(2, 1))]
    private = [state.private[0].of(0) for state in states]
    first, second = (row[ALPHA].item() for row in private)
    assert first == 0.5  # both models start with the same weights
    w, v = states[0].shared["weight"].item(), private[0]["own/weight"].item()
    assert second == pytest.approx(0.5 - 2.0 * (v - w) * (0.5 * v + 0.5 * w - 3), abs=1e-5)


def test_alpha_stays_between_0_and_1_and_differs_between_clients():
    result, _ = trained(alpha_lr=2.0)
    alphas = alphas_of(result)
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert len({*alphas}) > 2


def test_with_an_alpha_lr_of_0_alpha_is_constant():
    result, _ = trained(alpha=0.3)
    assert alphas_of(result) == pytest.approx([0.3] * world.NUM_CLIENTS)


def test_neither_alpha_nor_the_own_model_is_uploaded(monkeypatch):
    algorithm = APFL(classification(world.seeded(world.plain)), optimizer=SGD(0.1), alpha_lr=1.0)
    names, received, server_update = algorithm.task.trainable, [], APFL.server_update

    def spy(own, shared, server, uploads):
        received.append(uploads.messages)
        return server_update(own, shared, server, uploads)

    monkeypatch.setattr(APFL, "server_update", spy)
    for state, report in world.simulate(algorithm, world.federation().train, PLAN):
        uploads, private = received[-1], state.private[0]
        assert uploads.keys() == names
        for place, client in enumerate(report.clients.tolist()):
            own = trees.under_prefix("own/", private.of(client))
            assert not any(torch.equal(uploads[name][place], own[name]) for name in uploads)
    assert len(received) == PLAN.rounds


def test_a_warm_start_gives_the_shared_model_to_both_sides():
    fed = world.federation(sizes=(40,) * world.NUM_CLIENTS)
    first = fit(FedAvg, fed)
    shared = first.group().state.shared
    algorithm = APFL(first.algorithm.task, optimizer=SGD(0.1))
    state = algorithm.init(shared)
    assert world.distance(algorithm.personal(state.shared, state.private), shared) < 1e-6
    assert fit(APFL, fed, start_from=first).group().plan.first_round == PLAN.rounds


def test_adaptation_trains_the_own_model_only():
    task = classification(world.seeded(world.plain))
    adapting = AdaptOnly.to(APFL(task, optimizer=SGD(0.1)))
    state, _ = world.last(world.simulate(adapting, world.federation().train, PLAN))
    assert world.distance(state.shared, params_of(task.model)) == 0
    own = trees.under_prefix("own/", state.private[0].of(0))
    assert world.distance(own, params_of(task.model)) > 0


@pytest.mark.parametrize(
    "hyperparameters",
    [{"alpha": -0.1}, {"alpha": 1.5}, {"alpha_lr": -1.0}, {"alpha_lr": float("nan")}],
)
def test_a_hyperparameter_out_of_its_range_is_refused(hyperparameters):
    name, value = next(iter(hyperparameters.items()))
    with pytest.raises(InputError, match=f"{name} is {value}; a number of at least 0"):
        APFL(classification(world.plain()), optimizer=SGD(0.1), **hyperparameters)


def test_every_client_takes_the_alpha_that_is_best_on_its_own_validation_data():
    result, fed = trained(alpha=0.5)
    grid = (0.0, 0.25, 0.5, 0.75, 1.0)
    tuned, before = tune_alphas(result, fed, grid=grid), result.group()
    losses = losses_by_alpha(result.algorithm, before.state, fed.val, grid=grid)
    assert alphas_of(tuned) == [grid[place] for place in losses.argmin(0)]
    assert np.nanmean(losses.min(0)) <= np.nanmean(losses[2])
    sent = tuned.ledger.evaluation.bytes - result.ledger.evaluation.bytes
    # to choose, and to test
    assert sent == 2 * world.NUM_CLIENTS * trees.nbytes(before.state.shared)
    own, after = (each.state.private.of(0) for each in (before, tuned.group()))
    assert all(torch.equal(after[name], own[name]) for name in own if name != ALPHA)


def test_what_else_is_known_of_a_run_stays_as_it_was():
    fed = world.federation(sizes=(40,) * world.NUM_CLIENTS, validation=0.3)
    result = fit(
        APFL,
        fed,
        uplink=glocal.TopK(0.5),
        seeds=[3, 4],
        evaluation=glocal.Evaluation(every=1, select="min loss", new_test=False),
    )
    tuned = tune_alphas(result, fed)
    assert tuned.seeds == (3, 4)
    for before, after in zip(result.groups, tuned.groups, strict=True):
        assert (after.uplink, after.new) == (glocal.TopK(0.5), None)
        assert after.selected_round == before.selected_round
        assert after.times_sampled == before.times_sampled
        assert after.state.private.of(0).keys() == before.state.private.of(0).keys()


def test_a_client_without_validation_data_keeps_its_alpha():
    result, fed = trained(
        world.federation(sizes=(40, 40, 40, 40, 40, 1), validation=0.3), alpha=0.4
    )
    assert alphas_of(tune_alphas(result, fed, grid=(0.0, 1.0)))[-1] == pytest.approx(0.4)


def test_what_cannot_be_tuned_is_refused():
    result, fed = trained()
    with pytest.raises(InputError, match="the grid is empty; give at least one alpha"):
        tune_alphas(result, fed, grid=())
    with pytest.raises(
        InputError, match=f"{world.NUM_CLIENTS} clients were trained, but the data have 7"
    ):
        tune_alphas(result, world.federation(sizes=(20,) * 7, validation=0.3))
    others = glocal.FederatedData.from_tensors(
        [(torch.randn(20, 99), torch.zeros(20, dtype=torch.long))] * world.NUM_CLIENTS
    )
    with pytest.raises(InputError, match="it cannot take inputs"):
        tune_alphas(result, others)


def test_alphas_can_be_set_per_client():
    state = trained()[0].group().state
    changed = with_alphas(state, {1: 0.25, 2: 1.0})
    alphas = [changed.private.of(client)[ALPHA].item() for client in range(4)]
    assert alphas == [0.5, 0.25, 1.0, 0.5]
    with pytest.raises(InputError, match="from 0 to 1"):
        with_alphas(state, {0: 2.0})


def test_a_federation_without_alphas_is_refused():
    fed = world.federation()
    with pytest.raises(InputError, match="train it with APFL"):
        tune_alphas(fit(FedAvg, fed), fed)
