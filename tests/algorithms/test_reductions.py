"""A hyper-parameter at its limit reduces one algorithm to another."""

import pytest
import torch
from torch import nn

from glocal.algorithms import apfl, fedavg, fedprox, lg_fedavg, local_only, mtl
from glocal.algorithms.contract import unweighted
from glocal.core import trees
from glocal.core.modules import params_of
from glocal.core.optimizers import Adam, SGD
from glocal.core.sampling import Plan, batch_order
from glocal.core.split import Split
from glocal.core.training import cross_entropy
from glocal.datasets.federated import FederatedData
from glocal.federate.rounds import simulate
from tests.support import world

pytestmark = pytest.mark.quick

PLAN = Plan(rounds=5, clients_per_round=4, local_epochs=2, batch_size=5)
SGD = SGD(0.1, momentum=0.5)


def run(make, model):
    return world.last(
        simulate(make(cross_entropy(model), SGD), params_of(model), world.federation().train, PLAN)
    )[0]


def personal(make, model):
    """Every client's personal model at the end."""
    algorithm, state = make(cross_entropy(model), SGD), run(make, model)
    return [
        algorithm.personal(state.shared, state.private.of(client))
        for client in range(len(world.SIZES))
    ]


def same(left, right):
    return all(
        trees.same_bits({name: tree[name] for name in other}, other)
        for tree, other in zip(left, right, strict=True)
    )


def near(left, right):
    """The same up to rounding: the two may have run on different engines."""
    return all(world.distance(tree, other) < 1e-5 for tree, other in zip(left, right, strict=True))


def test_lg_with_nothing_local_is_fedavg():
    for make in world.MODELS.values():
        model = world.seeded(make)
        split = Split.of(model, local=[])
        assert same(
            personal(lambda o, s, split=split: lg_fedavg(o, s, split=split), model),
            personal(fedavg, model),
        )


def test_lg_with_everything_local_is_local_only():
    for make in world.MODELS.values():
        model = world.seeded(make)
        split = Split.of(model, shared=[])
        assert same(
            personal(lambda o, s, split=split: lg_fedavg(o, s, split=split), model),
            personal(local_only, model),
        )


def test_fedprox_with_mu_0_is_fedavg():
    model = world.seeded(world.with_batch_norm)
    assert same(personal(lambda o, s: fedprox(o, s, mu=0.0), model), personal(fedavg, model))


def test_fedprox_with_mu_1_is_not_fedavg():
    model = world.seeded(world.plain)
    assert not same(personal(lambda o, s: fedprox(o, s, mu=1.0), model), personal(fedavg, model))


def test_mtl_with_lam_0_is_local_only():
    model = world.seeded(world.with_batch_norm)
    assert same(
        personal(lambda o, s: mtl(o, s, num_clients=6, lam=0.0), model), personal(local_only, model)
    )


def test_apfl_with_alpha_0_is_fedavg():
    for make in world.MODELS.values():
        model = world.seeded(make)
        assert near(personal(lambda o, s: apfl(o, s, alpha=0.0), model), personal(fedavg, model))


def test_apfl_with_alpha_1_is_local_only():
    for make in world.MODELS.values():
        model = world.seeded(make)
        assert near(
            personal(lambda o, s: apfl(o, s, alpha=1.0), model), personal(local_only, model)
        )


def test_apfl_shares_what_fedavg_shares_whatever_alpha_is():
    model = world.seeded(world.with_batch_norm)
    for alpha, alpha_lr in ((0.0, 0.0), (0.3, 0.0), (0.5, 1.0)):
        ours = run(
            lambda o, s, alpha=alpha, alpha_lr=alpha_lr: apfl(o, s, alpha=alpha, alpha_lr=alpha_lr),
            model,
        )
        assert world.distance(ours.shared, run(fedavg, model).shared) < 1e-5


def test_fedavg_on_one_client_is_torch_sgd_by_hand():
    for options in ({}, {"momentum": 0.5}, {"momentum": 0.9, "weight_decay": 0.01}):
        by_hand = trained_by_hand(
            world.with_batch_norm, lambda p, options=options: torch.optim.SGD(p, 0.1, **options)
        )
        assert (
            world.distance(trained_by_us(world.with_batch_norm, SGD(0.1, **options)), by_hand)
            < 1e-5
        )


def test_adam_is_torch_adam_by_hand():
    for weight_decay in (0.0, 0.01):
        by_hand = trained_by_hand(
            world.plain, lambda p, wd=weight_decay: torch.optim.Adam(p, 0.01, weight_decay=wd)
        )
        assert (
            world.distance(
                trained_by_us(world.plain, Adam(0.01, weight_decay=weight_decay)), by_hand
            )
            < 1e-5
        )


ALONE = Plan(rounds=1, clients_per_round=1, local_epochs=3, batch_size=4)


def trained_by_us(make, optimizer):
    model = world.seeded(make)
    federation = FederatedData.from_tensors(world.clients((23,)), test=0.0, validation=0.0)
    return world.last(
        simulate(fedavg(cross_entropy(model), optimizer), params_of(model), federation.train, ALONE)
    )[0].shared


def trained_by_hand(make, make_optimizer):
    model = world.seeded(make)
    (x, y), optimizer = world.clients((23,))[0], make_optimizer(model.parameters())
    for rows in batch_order(ALONE, 23, 0, 0):
        rows = torch.from_numpy(rows[rows >= 0])
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return params_of(model)


def test_the_lr_decays_from_round_to_round():
    model = world.seeded(world.plain)
    federation = FederatedData.from_tensors(world.clients((8,)), test=0.0, validation=0.0)
    plan = Plan(rounds=1, clients_per_round=1, batch_size=8, first_round=3)
    start = params_of(model)

    def change(optimizer):
        shared = world.last(
            simulate(fedavg(cross_entropy(model), optimizer), start, federation.train, plan)
        )[0].shared
        return trees.subtract(shared, start)

    whole, decayed = change(SGD(0.1)), change(SGD(0.1, lr_decay=1.0))
    assert (
        world.distance({name: 4 * tensor for name, tensor in decayed.items()}, whole) < 1e-6
    )  # 1 / (1 + 1.0 * 3)


def test_unweighted_is_the_plain_mean_and_changes_nothing_for_equal_clients():
    model = world.seeded(world.plain)
    equal, unequal = (
        FederatedData.from_tensors(world.clients(sizes, 0), validation=0.0).train
        for sizes in ((20,) * 7, world.SIZES)
    )
    weighted = fedavg(cross_entropy(model), SGD)
    for train, differ in ((equal, False), (unequal, True)):
        states = [
            world.last(simulate(make, params_of(model), train, PLAN))[0]
            for make in (weighted, unweighted(weighted))
        ]
        assert (world.gap(*states) > 1e-3) == differ
    uploads = {"w": torch.tensor([[1.0], [2.0], [6.0]])}
    shared, weights = {"w": torch.zeros(1)}, torch.tensor([1, 1, 98])
    assert unweighted(weighted).aggregate(shared, uploads, weights)["w"].item() == 3.0
    assert unweighted(weighted).description != weighted.description
