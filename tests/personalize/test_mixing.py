"""Mixtures of a device's own model and the shared one: what is learnt, what stays on the device, and which alpha is best."""

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
from glocal.core.optimizers import sgd
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
    fed = fed or world.federation(sizes=(40,) * world.DEVICES, validation=0.3)
    return glocal.fit(
        apfl(cross_entropy(model), sgd(0.1), **hyperparameters), model, fed, plan
    ), fed


def half_square(output, target):
    return 0.5 * (output.squeeze(1) - target).square()


def test_one_step_is_algorithm_1_by_hand():
    """f(w) = (w - 3)^2 / 2 at w = 1, v = 1: w moves by rate * 2; v by rate * alpha * 2; then again from there."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    train = glocal.from_tensors(
        [(torch.ones(1, 1), torch.tensor([3.0]))], test=0.0, validation=0.0
    ).train
    algorithm = apfl(supervised(model, half_square), sgd(0.1), alpha=0.25)
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


def test_alpha_steps_down_its_slope_once_a_round():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    train = glocal.from_tensors(
        [(torch.ones(1, 1), torch.tensor([3.0]))], test=0.0, validation=0.0
    ).train
    algorithm = apfl(supervised(model, half_square), sgd(0.1), alpha=0.5, alpha_lr=2.0)
    states = [state for state, _ in simulate(algorithm, params_of(model), train, Plan(2, 1))]
    first, second = (state.private.of(0)[ALPHA].item() for state in states)
    assert first == 0.5  # both models start alike
    w, v = states[0].shared["weight"].item(), states[0].private.of(0)["weight"].item()
    assert second == pytest.approx(0.5 - 2.0 * (v - w) * (0.5 * v + 0.5 * w - 3), abs=1e-5)


def test_alpha_stays_between_0_and_1_and_goes_its_own_way_on_every_device():
    result, _ = trained(alpha_lr=2.0)
    alphas = alphas_of(result)
    assert all(0 <= alpha <= 1 for alpha in alphas)
    assert len({*alphas}) > 2


def test_without_a_pace_alpha_stays():
    result, _ = trained(alpha=0.3)
    assert alphas_of(result) == pytest.approx([0.3] * world.DEVICES)


def test_neither_alpha_nor_the_own_model_is_uploaded():
    model, arrived = world.seeded(world.plain), []
    algorithm = apfl(cross_entropy(model), sgd(0.1), alpha_lr=1.0)

    def spy(shared, uploads, weights):
        arrived.append(uploads)
        return algorithm.aggregate(shared, uploads, weights)

    rounds = simulate(
        algorithm._replace(aggregate=spy), params_of(model), world.federation().train, PLAN
    )
    for (state, report), uploads in zip(rounds, arrived, strict=False):
        assert uploads.keys() == params_of(model).keys()
        for row, device in enumerate(report.clients_per_round.tolist()):
            own = state.private.of(device)
            assert not any(torch.equal(uploads[name][row], own[name]) for name in uploads)
    assert len(arrived) == PLAN.rounds


def test_a_warm_start_gives_the_shared_model_to_both_sides():
    model, fed = world.seeded(world.plain), world.federation(sizes=(40,) * world.DEVICES)
    first = glocal.fit(glocal.fedavg(cross_entropy(model), sgd(0.1)), model, fed, PLAN)
    algorithm = apfl(cross_entropy(model), sgd(0.1))
    state = initial_state(algorithm, first.state.shared)
    assert (
        world.distance(algorithm.personal(state.shared, state.private.initial), first.state.shared)
        < 1e-6
    )
    assert glocal.fit(algorithm, model, fed, PLAN, start_from=first).plan.first_round == PLAN.rounds


def test_settling_moves_the_own_model_only():
    model, fed = world.seeded(world.plain), world.federation()
    algorithm = apfl(cross_entropy(model), sgd(0.1))
    settling = freeze_shared(algorithm)
    state, _ = world.last(simulate(settling, params_of(model), fed.train, PLAN))
    assert world.distance(state.shared, params_of(model)) == 0
    assert (
        world.distance(
            {n: t for n, t in state.private.of(0).items() if n != ALPHA}, params_of(model)
        )
        > 0
    )


@pytest.mark.parametrize(
    "hyperparameters", [{"alpha": -0.1}, {"alpha": 1.5}, {"alpha_lr": -1.0}, {"alpha_lr": float("nan")}]
)
def test_a_knob_out_of_its_range_is_refused(hyperparameters):
    with pytest.raises(InputError, match="alpha must be from 0 to 1, pace at least 0"):
        apfl(cross_entropy(world.plain()), sgd(0.1), **hyperparameters)


def test_every_device_takes_the_alpha_that_is_best_on_its_own_validation_data():
    result, fed = trained(alpha=0.5)
    grid = (0.0, 0.25, 0.5, 0.75, 1.0)
    tuned = tune_alphas(result, fed, grid=grid)
    losses = losses_by_alpha(TrainedAPFL.from_result(result), fed.val, grid=grid)
    assert alphas_of(tuned) == [grid[place] for place in losses.argmin(0)]
    assert np.nanmean(losses.min(0)) <= np.nanmean(losses[2])
    sent = tuned.ledger.evaluation.bytes - result.ledger.evaluation.bytes
    assert sent == 2 * world.DEVICES * sum(
        4 * tensor.numel() for tensor in result.state.shared.values()
    )  # to choose, and to test
    assert all(
        torch.equal(tuned.state.private.of(0)[name], tensor)
        for name, tensor in result.state.private.of(0).items()
        if name != ALPHA
    )


def test_a_device_without_validation_data_keeps_its_alpha():
    result, fed = trained(
        world.federation(sizes=(40, 40, 40, 40, 40, 1), validation=0.3), alpha=0.4
    )
    assert alphas_of(tune_alphas(result, fed, grid=(0.0, 1.0)))[-1] == pytest.approx(0.4)


def test_what_cannot_be_tuned_is_refused():
    result, fed = trained()
    with pytest.raises(InputError, match="the grid is empty; give at least one alpha"):
        tune_alphas(result, fed, grid=())
    with pytest.raises(
        InputError, match=f"{world.DEVICES} clients were trained, but the data have 7"
    ):
        tune_alphas(result, world.federation(sizes=(20,) * 7, validation=0.3))
    others = glocal.from_tensors(
        [(torch.randn(20, 99), torch.zeros(20, dtype=torch.long))] * world.DEVICES
    )
    with pytest.raises(InputError, match="it cannot take inputs of shape"):
        tune_alphas(result, others)


def test_alphas_can_be_given_device_by_device():
    result, _ = trained()
    changed = with_alphas(result.state, {1: 0.25, 2: 1.0})
    assert [changed.private.of(device)[ALPHA].item() for device in range(4)] == [
        0.5,
        0.25,
        1.0,
        0.5,
    ]
    with pytest.raises(InputError, match="from 0 to 1"):
        with_alphas(result.state, {0: 2.0})


def test_a_federation_without_alphas_is_refused():
    model, fed = world.seeded(world.plain), world.federation()
    result = glocal.fit(glocal.fedavg(cross_entropy(model), sgd(0.1)), model, fed, PLAN)
    with pytest.raises(InputError, match="train it with apfl"):
        tune_alphas(result, fed)


@pytest.mark.parametrize(("rho", "sigma"), [(0.3, 1.5), (0.3, 3.0)])
def test_in_the_linear_world_the_fitted_alpha_is_near_the_theorys(rho, sigma):
    """Local models at alpha 1 are least squares on a device's own examples, and one round of averaging is the shared model."""
    d, clients, n, fresh = 5, 60, 40, 400
    generator = torch.Generator().manual_seed(0)
    centre = torch.rand(d, generator=generator)

    def examples(teacher, count, noise):
        x = torch.randn(count, d, generator=generator)
        return x, x @ teacher + noise * torch.randn(count, generator=generator)

    teachers = [centre + rho * torch.randn(d, generator=generator) for _ in range(clients)]
    learn, judge = (
        [examples(t, count, noise) for t in teachers] for count, noise in ((n, sigma), (fresh, 0.0))
    )
    fed = glocal.from_tensors(learn, test=judge, validation=0.0)
    model = nn.Linear(d, 1, bias=False)
    algorithm = apfl(supervised(model, half_square), sgd(0.5), alpha=1.0)
    plan = Plan(1, clients, local_epochs=200, batch_size=n)
    state, _ = world.last(simulate(algorithm, params_of(model), fed.train, plan))
    grid = tuple(np.linspace(0, 1, 41))
    losses = losses_by_alpha(
        TrainedAPFL(algorithm, model, state), fed.test, grid=grid, per_example=half_square
    )
    best = grid[int(losses.mean(1).argmin())]
    between_variance, within_variance = rho**2 * d, d * sigma**2 / (n - d - 1)
    theory = between_variance / (between_variance + within_variance)
    assert best == pytest.approx(theory, abs=0.08)
    assert 0.1 < theory < 0.9
