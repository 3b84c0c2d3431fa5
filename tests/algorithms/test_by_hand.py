"""Each algorithm against numbers computed by hand, on models of one weight, in float64."""

from functools import partial

import pytest
import torch
from torch import nn

from glocal.algorithms import APFL, MTL, FedAvg, FedProx
from glocal.core.errors import InputError
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.task import Task
from glocal.datasets.federated import FederatedData
from glocal.wire import Mean, Median
from tests.support import world

pytestmark = pytest.mark.quick

LR = 0.1


def half_square(outputs, y):
    return 0.5 * (outputs.squeeze(1) - y).square()


def task(start):
    """One weight w: the output is w * x."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, start)
    return Task(model, half_square)


def targets(*clients):
    """Clients with x = 1 in all examples: a client's loss is the mean of (w - y)^2 / 2."""
    pairs = []
    for ys in clients:
        y = torch.tensor(ys, dtype=torch.float64)
        pairs.append((torch.ones(len(ys), 1, dtype=torch.float64), y))
    return FederatedData.from_tensors(pairs, test=0.0, validation=0.0).train


def rounds_of(make, train, plan, *, start):
    algorithm = make(task(start), optimizer=SGD(lr=LR))
    return list(world.simulate(algorithm, train, plan))


def run(make, train, rounds, clients_per_round, *, start):
    plan = Plan(rounds, clients_per_round, batch_size=10)
    return rounds_of(make, train, plan, start=start)[-1][0]


def own(state, client):
    return state.private[0].of(client)["own/weight"].item()


def test_fedavg_weighs_clients_by_their_examples():
    """w = 1; client 0 (three targets 4) steps to 1.3, client 1 (one target 0) to 0.9.

    The mean by examples is (3 * 1.3 + 0.9) / 4 = 1.2.
    """
    state = run(FedAvg, targets([4, 4, 4], [0]), 1, 2, start=1.0)
    assert state.shared["weight"].item() == pytest.approx(1.2)


@pytest.mark.parametrize(("aggregation", "after"), [(Mean(by="clients"), 0.2), (Median(), 0.1)])
def test_fedavg_may_weigh_clients_alike_or_take_their_median(aggregation, after):
    """w = 0; the clients step to 0, 0.1 and 0.5, whatever number of examples they have."""
    train = targets([0, 0, 0], [1], [5, 5])
    state = run(partial(FedAvg, aggregation=aggregation), train, 1, 3, start=0.0)
    assert state.shared["weight"].item() == pytest.approx(after)


def test_fedprox_pulls_towards_the_model_of_the_rounds_start():
    """Two epochs from w = 1 towards 3, mu = 0.5: 1.2, then 1.2 + 0.1 * (1.8 - 0.5 * 0.2) = 1.37."""
    plan = Plan(1, 1, local_epochs=2, batch_size=10)
    [(state, _)] = rounds_of(partial(FedProx, mu=0.5), targets([3.0]), plan, start=1.0)
    assert state.shared["weight"].item() == pytest.approx(1.37)


@pytest.mark.parametrize(("lam", "ridge"), [(0.0, 0.0), (0.7, 0.0), (0.3, 0.2), (2.0, 0.05)])
def test_mtl_minimises_the_papers_regularised_objective(lam, ridge):
    """All clients, one step per round, against gradient descent with Omega written out.

    The objective is sum_m L_m + lam tr(W Omega W') + ridge ||W||^2.
    """
    targets_of_all, start, clients = [4.0, -1.0, 2.5, 0.0], 0.5, 4
    goals = torch.tensor(targets_of_all, dtype=torch.float64)
    projection = torch.eye(clients).double() - torch.full((clients, clients), 1 / clients).double()
    omega = projection @ projection
    weights = torch.full((1, clients), start, dtype=torch.float64, requires_grad=True)
    for _ in range(6):
        losses = 0.5 * (weights[0] - goals).square()
        regulariser = lam * torch.trace(weights @ omega @ weights.T)
        objective = losses.sum() + regulariser + ridge * weights.square().sum()
        (gradient,) = torch.autograd.grad(objective, weights)
        weights = (weights - LR * gradient).detach().requires_grad_()
    train = targets(*([target] for target in targets_of_all))
    state = run(partial(MTL, lam=lam, ridge=ridge), train, 6, 4, start=start)
    ours = torch.tensor([own(state, client) for client in range(clients)])
    assert torch.allclose(ours, weights[0].detach().float(), atol=1e-7)
    assert state.shared["weight"].item() == pytest.approx(weights.mean().item(), abs=1e-12)


def test_mtl_by_hand_with_one_client_at_a_time():
    """M = 2, lam = 1, w = 0: the first client (target 10) steps to 1, the mean to 0.5.

    The second sampled client is pulled by 2 * (w - 0.5).
    """
    plan = Plan(2, 1, batch_size=10)
    one, two = rounds_of(partial(MTL, lam=1.0), targets([10.0], [10.0]), plan, start=0.0)
    first, second = int(one[1].clients[0]), int(two[1].clients[0])
    assert own(one[0], first) == pytest.approx(1.0)
    assert one[0].shared["weight"].item() == pytest.approx(0.5)
    before = 1.0 if second == first else 0.0
    expected = before + LR * ((10 - before) - 2 * (before - 0.5))
    assert own(two[0], second) == pytest.approx(expected)


def test_mtls_shared_tree_is_the_mean_of_all_clients_models():
    train = targets([1.0], [2.0], [3.0, 3.5], [-4.0], [9.0])
    state = run(partial(MTL, lam=0.4), train, 9, 2, start=0.3)
    models = [own(state, client) for client in range(5)]
    assert state.shared["weight"].item() == pytest.approx(sum(models) / 5, abs=1e-12)


def test_apfl_trains_the_mixture_by_its_own_part():
    """w = v = 0, target 10, alpha = 0.25: w steps to 1, v to 0.1 * 0.25 * 10 = 0.25.

    In the second epoch the mixture is 0.25 * 0.25 + 0.75 * 1 = 0.8125, so v steps by
    0.1 * 0.25 * (10 - 0.8125), and w by 0.1 * 9.
    """
    plan = Plan(1, 1, local_epochs=2, batch_size=10)
    [(state, _)] = rounds_of(partial(APFL, alpha=0.25), targets([10.0]), plan, start=0.0)
    assert state.shared["weight"].item() == pytest.approx(1.9)
    assert own(state, 0) == pytest.approx(0.25 + 0.1 * 0.25 * (10 - 0.8125))


def test_apfls_alpha_takes_one_gradient_step_per_round():
    """In the first round v = w, so nothing pulls alpha. In the second w = 1 and v = 0.5.

    The gradient of the mixture's loss is 0.75 - 10, and alpha steps by -0.02 * (v - w) * that.
    """
    make = partial(APFL, alpha=0.5, alpha_lr=0.02)
    plan = Plan(2, 1, batch_size=10)
    one, two = rounds_of(make, targets([10.0]), plan, start=0.0)
    alphas = [state.private[0].of(0)["mixing/alpha"].item() for state in (one[0], two[0])]
    assert alphas[0] == 0.5
    assert alphas[1] == pytest.approx(0.5 - 0.02 * (0.5 - 1) * (0.75 - 10), abs=1e-6)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (partial(FedProx, mu=-1), "FedProx: mu"),
        (partial(MTL, lam=-1), "MTL: lam"),
        (partial(MTL, ridge=-1), "MTL: ridge"),
        (partial(APFL, alpha_lr=-1), "APFL: alpha_lr"),
        (partial(APFL, alpha=-1), "APFL: alpha"),
    ],
)
def test_a_negative_strength_is_refused(make, name):
    with pytest.raises(InputError, match=f"^{name} is -1; a number of at least 0"):
        make(task(0.0), optimizer=SGD(lr=LR))


def test_an_alpha_above_one_is_refused():
    with pytest.raises(InputError, match=r"^APFL: alpha is 1\.5; .* at least 0 and at most 1"):
        APFL(task(0.0), optimizer=SGD(lr=LR), alpha=1.5)
