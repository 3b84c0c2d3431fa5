"""Each algorithm against numbers computed by hand, on models of one weight."""

import pytest
import torch
from torch import nn

from glocal.algorithms import fedavg, fedprox, mtl
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.training import supervised
from glocal.datasets.federated import FederatedData
from glocal.federate.rounds import simulate
from tests.support import world

LR = 0.1


def line():
    """One weight w: the output is w * x."""
    return nn.Linear(1, 1, bias=False)


def half_square(output, target):
    return 0.5 * (output.squeeze(1) - target).square()


def targets(*clients):
    """Clients with x = 1 in all examples: a client's loss is the mean of (w - y)^2 / 2."""
    pairs = [(torch.ones(len(ys), 1), torch.tensor(ys, dtype=torch.float32)) for ys in clients]
    return FederatedData.from_tensors(pairs, test=0.0, validation=0.0).train


def run(make, train, rounds, clients_per_round, start):
    model = line()
    nn.init.constant_(model.weight, start)
    return world.last(
        simulate(
            make(supervised(model, half_square), SGD(LR)),
            params_of(model),
            train,
            Plan(rounds, clients_per_round, batch_size=10),
        )
    )[0]


def test_fedavg_weighs_clients_by_their_examples():
    """w = 1; client 0 (three targets 4) steps to 1.3, client 1 (one target 0) to 0.9.

    The mean by examples is (3 * 1.3 + 0.9) / 4 = 1.2.
    """
    state = run(fedavg, targets([4, 4, 4], [0]), 1, 2, start=1.0)
    assert state.shared["weight"].item() == pytest.approx(1.2)


def test_fedprox_pulls_towards_the_model_of_the_rounds_start():
    """Two epochs from w = 1 towards 3, mu = 0.5: 1.2, then 1.2 + 0.1 * (1.8 - 0.5 * 0.2) = 1.37."""
    model = line()
    nn.init.constant_(model.weight, 1.0)
    algorithm = fedprox(supervised(model, half_square), SGD(LR), mu=0.5)
    state, _ = world.last(
        simulate(
            algorithm, params_of(model), targets([3.0]), Plan(1, 1, local_epochs=2, batch_size=10)
        )
    )
    assert state.shared["weight"].item() == pytest.approx(1.37)


@pytest.mark.parametrize(("lam", "ridge"), [(0.0, 0.0), (0.7, 0.0), (0.3, 0.2), (2.0, 0.05)])
def test_mtl_minimises_the_papers_regularised_objective(lam, ridge):
    """All clients, one step per round, against gradient descent with Omega written out.

    The objective is sum_m L_m + lam tr(W Omega W') + ridge ||W||^2.
    """
    targets_of_all, start, clients = [4.0, -1.0, 2.5, 0.0], 0.5, 4
    identity, ones = torch.eye(clients), torch.ones(clients, clients)
    omega = (identity - ones / clients) @ (identity - ones / clients)
    weights = torch.full((1, clients), start, requires_grad=True)
    for _ in range(6):
        losses = 0.5 * (weights[0] - torch.tensor(targets_of_all)).square()
        objective = (
            losses.sum()
            + lam * torch.trace(weights @ omega @ weights.T)
            + ridge * weights.square().sum()
        )
        (gradient,) = torch.autograd.grad(objective, weights)
        weights = (weights - LR * gradient).detach().requires_grad_()
    state = run(
        lambda o, s: mtl(o, s, num_clients=clients, lam=lam, ridge=ridge),
        targets(*([target] for target in targets_of_all)),
        6,
        4,
        start,
    )
    ours = torch.tensor([state.private.of(client)["weight"].item() for client in range(clients)])
    assert torch.allclose(ours, weights[0].detach(), atol=1e-6)
    assert state.shared["weight"].item() == pytest.approx(weights.mean().item(), abs=1e-6)


def test_mtl_by_hand_with_one_client_at_a_time():
    """M = 2, lam = 1, w = 0: the first client (target 10) steps to 1, the mean to 0.5.

    The second sampled client is pulled by 2 * (w - 0.5).
    """
    train, make = targets([10.0], [10.0]), lambda o, s: mtl(o, s, num_clients=2, lam=1.0)
    model = line()
    nn.init.constant_(model.weight, 0.0)
    rounds = list(
        simulate(
            make(supervised(model, half_square), SGD(LR)),
            params_of(model),
            train,
            Plan(2, 1, batch_size=10),
        )
    )
    first, second = int(rounds[0][1].sampled[0]), int(rounds[1][1].sampled[0])
    assert rounds[0][0].private.of(first)["weight"].item() == pytest.approx(1.0)
    assert rounds[0][0].shared["weight"].item() == pytest.approx(0.5)
    before = 1.0 if second == first else 0.0
    expected = before + LR * ((10 - before) - 2 * (before - 0.5))
    assert rounds[1][0].private.of(second)["weight"].item() == pytest.approx(expected)


def test_mtls_shared_tree_is_the_mean_of_all_clients_models():
    state = run(
        lambda o, s: mtl(o, s, num_clients=5, lam=0.4),
        targets([1.0], [2.0], [3.0, 3.5], [-4.0], [9.0]),
        9,
        2,
        start=0.3,
    )
    models = [state.private.of(client)["weight"].item() for client in range(5)]
    assert state.shared["weight"].item() == pytest.approx(sum(models) / 5, abs=1e-6)


@pytest.mark.parametrize(
    "make", [lambda o, s: fedprox(o, s, mu=-1), lambda o, s: mtl(o, s, num_clients=2, lam=-1)]
)
def test_a_negative_strength_is_refused(make):
    with pytest.raises(InputError, match=r"-1"):
        make(supervised(line(), half_square), SGD(LR))
