"""Mixtures of a client's own model and the shared one: training, privacy, and the best alpha."""

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms import apfl
from glocal.algorithms.apfl import ALPHA
from glocal.algorithms.contract import freeze_shared
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.training import cross_entropy, supervised
from glocal.federate.rounds import initial_state, simulate
from glocal.personalize.mixing import (
    TrainedAPFL,
    alphas_of,
    losses_by_alpha,
    tune_alphas,
    with_alphas,
)
from tests.support import world

PLAN = Plan(rounds=6, clients_per_round=4, local_epochs=2, batch_size=5)


def trained(fed=None, *, plan=PLAN, **hyperparameters):
    model = world.seeded(world.plain)
    fed = fed or world.federation(sizes=(40,) * world.NUM_CLIENTS, validation=0.3)
    algorithm = apfl(cross_entropy(model), SGD(0.1), **hyperparameters)
    return glocal.fit(algorithm, model, fed, plan), fed


def half_square(output, target):
    return 0.5 * (output.squeeze(1) - target).square()


def test_one_step_is_algorithm_1_by_hand():
    """Two steps of f(w) = (w - 3)^2 / 2 from w = v = 1; the gradient of v has the factor alpha."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    train = glocal.FederatedData.from_tensors(
        [(torch.ones(1, 1), torch.tensor([3.0]))], test=0.0, validation=0.0
    ).train
    algorithm = apfl(supervised(model, half_square), SGD(0.1), alpha=0.25)
    state, _ = world.last(simulate(algorithm, params_of(model), train, Plan(2, 1)))
    w, v = 1.0, 1.0
    for _ in range(2):
        mixture = 0.25 * v + 0.75 * w
        w, v = w - 0.1 * (w - 3), v - 0.1 * 0.25 * (mixture - 3)
    assert state.shared["weight"].item() == pytest.approx(w)
    assert state.private.of(0)["weight"].item() == pytest.approx(v)
    assert algorithm.personal(state.shared, state.private.of(0))["weight"].item() == pytest.approx(
        0.25 * v + 0.75 * w
    )


def test_alpha_takes_one_gradient_step_a_round():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    train = glocal.FederatedData.from_tensors(
        [(torch.ones(1, 1), torch.tensor([3.0]))], test=0.0, validation=0.0
    ).train
    algorithm = apfl(supervised(model, half_square), SGD(0.1), alpha=0.5, alpha_lr=2.0)
    states = [state for state, _ in simulate(algorithm, params_of(model), train, Plan(2, 1))]
    first, second = (state.private.of(0)[ALPHA].item() for state in states)
    assert first == 0.5  # both models start with the same weights
    w, v = states[0].shared["weight"].item(), states[0].private.of(0)["weight"].item()
    assert second == pytest.approx(0.5 - 2.0 * (v - w) * (0.5 * v + 0.5 * w - 3), abs=1e-5)


def test_alpha_stays_between_0_and_1_and_differs_between_clients():
    result, _ = trained(alpha_lr=2.0)
    alphas = alphas_of(result)
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert len({*alphas}) > 2


def test_with_an_alpha_lr_of_0_alpha_is_constant():
    result, _ = trained(alpha=0.3)
    assert alphas_of(result) == pytest.approx([0.3] * world.NUM_CLIENTS)


def test_neither_alpha_nor_the_own_model_is_uploaded():
    model, received = world.seeded(world.plain), []
    algorithm = apfl(cross_entropy(model), SGD(0.1), alpha_lr=1.0)

    def spy(shared, uploads, weights):
        received.append(uploads)
        return algorithm.aggregate(shared, uploads, weights)

    spied = algorithm._replace(aggregate=spy)
    rounds = simulate(spied, params_of(model), world.federation().train, PLAN)
    for (state, report), uploads in zip(rounds, received, strict=False):
        assert uploads.keys() == params_of(model).keys()
        for row, client in enumerate(report.sampled.tolist()):
            own = state.private.of(client)
            assert not any(torch.equal(uploads[name][row], own[name]) for name in uploads)
    assert len(received) == PLAN.rounds


def test_a_warm_start_gives_the_shared_model_to_both_sides():
    model, fed = world.seeded(world.plain), world.federation(sizes=(40,) * world.NUM_CLIENTS)
    first = glocal.fit(glocal.fedavg(cross_entropy(model), SGD(0.1)), model, fed, PLAN)
    algorithm = apfl(cross_entropy(model), SGD(0.1))
    state = initial_state(algorithm, first.state.shared)
    personal = algorithm.personal(state.shared, state.private.initial)
    assert world.distance(personal, first.state.shared) < 1e-6
    assert glocal.fit(algorithm, model, fed, PLAN, start_from=first).plan.first_round == PLAN.rounds


def test_adaptation_trains_the_own_model_only():
    model, fed = world.seeded(world.plain), world.federation()
    adapting = freeze_shared(apfl(cross_entropy(model), SGD(0.1)))
    state, _ = world.last(simulate(adapting, params_of(model), fed.train, PLAN))
    assert world.distance(state.shared, params_of(model)) == 0
    own = {name: tensor for name, tensor in state.private.of(0).items() if name != ALPHA}
    assert world.distance(own, params_of(model)) > 0


@pytest.mark.parametrize(
    "hyperparameters",
    [{"alpha": -0.1}, {"alpha": 1.5}, {"alpha_lr": -1.0}, {"alpha_lr": float("nan")}],
)
def test_a_hyperparameter_out_of_its_range_is_refused(hyperparameters):
    with pytest.raises(InputError, match="alpha must be from 0 to 1, alpha_lr at least 0"):
        apfl(cross_entropy(world.plain()), SGD(0.1), **hyperparameters)


def test_every_client_takes_the_alpha_that_is_best_on_its_own_validation_data():
    result, fed = trained(alpha=0.5)
    grid = (0.0, 0.25, 0.5, 0.75, 1.0)
    tuned = tune_alphas(result, fed, grid=grid)
    losses = losses_by_alpha(TrainedAPFL.from_result(result), fed.val, grid=grid)
    assert alphas_of(tuned) == [grid[place] for place in losses.argmin(0)]
    assert np.nanmean(losses.min(0)) <= np.nanmean(losses[2])
    sent = tuned.ledger.evaluation.bytes - result.ledger.evaluation.bytes
    assert sent == 2 * world.NUM_CLIENTS * sum(
        4 * tensor.numel() for tensor in result.state.shared.values()
    )  # to choose, and to test
    assert all(
        torch.equal(tuned.state.private.of(0)[name], tensor)
        for name, tensor in result.state.private.of(0).items()
        if name != ALPHA
    )


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
    with pytest.raises(InputError, match="it cannot take inputs of shape"):
        tune_alphas(result, others)


def test_alphas_can_be_set_per_client():
    result, _ = trained()
    changed = with_alphas(result.state, {1: 0.25, 2: 1.0})
    alphas = [changed.private.of(client)[ALPHA].item() for client in range(4)]
    assert alphas == [0.5, 0.25, 1.0, 0.5]
    with pytest.raises(InputError, match="from 0 to 1"):
        with_alphas(result.state, {0: 2.0})


def test_a_federation_without_alphas_is_refused():
    model, fed = world.seeded(world.plain), world.federation()
    result = glocal.fit(glocal.fedavg(cross_entropy(model), SGD(0.1)), model, fed, PLAN)
    with pytest.raises(InputError, match="train it with apfl"):
        tune_alphas(result, fed)
