"""A hyper-parameter at its limit reduces one algorithm to another."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from glocal.algorithms import (
    APFL,
    IFCA,
    MTL,
    Ditto,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedPer,
    FedProto,
    FedProx,
    FedRep,
    FedYogi,
    FeSEM,
    LGFedAvg,
    LocalOnly,
    Scaffold,
)
from glocal.core import trees
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, Adam, AdamW
from glocal.core.sampling import Plan, batch_order
from glocal.core.task import classification
from glocal.datasets.federated import FederatedData
from glocal.wire import Mean
from tests.support import world

pytestmark = pytest.mark.quick

PLAN = Plan(rounds=5, clients_per_round=4, local_epochs=2, batch_size=5)
RULE = SGD(lr=0.1, momentum=0.5)


def doubles(data):
    return replace(data, examples=data.examples.with_dtype(torch.float64))


def model_of(make):
    return world.seeded(make).double()


def run(algorithm, *, train=None, plan=PLAN):
    data = doubles(train or world.federation().train)
    return world.last(world.simulate(algorithm, data, plan))[0]


def personal(make, model, optimizer=RULE):
    """Every client's personal model at the end."""
    algorithm = make(classification(model), optimizer=optimizer)
    state = run(algorithm)
    return [
        algorithm.personal(state.shared, state.private[0].of(client))
        for client in range(len(world.SIZES))
    ]


def same(left, right):
    return all(
        trees.same_bits({name: tree[name] for name in other}, other)
        for tree, other in zip(left, right, strict=True)
    )


def near(left, right):
    """The same up to rounding."""
    return all(world.distance(tree, other) < 1e-12 for tree, other in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", world.MODELS)
def test_lg_with_nothing_local_is_fedavg(kind):
    model = model_of(world.MODELS[kind])
    assert same(personal(partial(LGFedAvg, local=[]), model), personal(FedAvg, model))


@pytest.mark.parametrize("kind", world.MODELS)
def test_lg_with_everything_local_is_local_only(kind):
    model = model_of(world.MODELS[kind])
    assert same(personal(partial(LGFedAvg, shared=[]), model), personal(LocalOnly, model))


@pytest.mark.parametrize("kind", world.MODELS)
def test_fedavg_with_a_local_part_is_lg(kind):
    model = model_of(world.MODELS[kind])
    local = sorted(world.first_half(model).local)
    fedavg, lg = (personal(partial(make, local=local), model) for make in (FedAvg, LGFedAvg))
    assert same(fedavg, lg)


def test_fedprox_with_mu_0_is_fedavg():
    model = model_of(world.with_batch_norm)
    assert same(personal(partial(FedProx, mu=0.0), model), personal(FedAvg, model))


def test_fedprox_with_mu_1_is_not_fedavg():
    model = model_of(world.plain)
    assert not near(personal(partial(FedProx, mu=1.0), model), personal(FedAvg, model))


def test_mtl_with_lam_0_is_local_only():
    model = model_of(world.with_batch_norm)
    assert same(personal(partial(MTL, lam=0.0), model), personal(LocalOnly, model))


@pytest.mark.parametrize("kind", world.MODELS)
def test_apfl_with_alpha_0_is_fedavg(kind):
    model = model_of(world.MODELS[kind])
    assert near(personal(partial(APFL, alpha=0.0), model), personal(FedAvg, model))


@pytest.mark.parametrize("kind", world.MODELS)
def test_apfl_with_alpha_1_is_local_only(kind):
    model = model_of(world.MODELS[kind])
    assert near(personal(partial(APFL, alpha=1.0), model), personal(LocalOnly, model))


@pytest.mark.parametrize(("alpha", "alpha_lr"), [(0.0, 0.0), (0.3, 0.0), (0.5, 1.0)])
def test_apfl_shares_what_fedavg_shares_whatever_alpha_is(alpha, alpha_lr):
    task = classification(model_of(world.with_batch_norm))
    ours = run(APFL(task, optimizer=RULE, alpha=alpha, alpha_lr=alpha_lr))
    assert world.distance(ours.shared, run(FedAvg(task, optimizer=RULE)).shared) < 1e-12


both_means = pytest.mark.parametrize("by", ["examples", "clients"])


@both_means
def test_fedavgm_without_momentum_is_fedavg(by):
    model, mean = model_of(world.with_batch_norm), Mean(by)
    plain = partial(FedAvgM, momentum=0.0, server_lr=1.0, aggregation=mean)
    assert same(personal(plain, model), personal(partial(FedAvg, aggregation=mean), model))


@pytest.mark.parametrize("make", [FedAdam, FedYogi])
def test_a_server_optimizer_without_moments_is_fedavg(make):
    """Second moments that stay tau^2 divide by 2 tau."""
    model = model_of(world.with_batch_norm)
    still = partial(make, beta1=0.0, beta2=1.0, tau=0.25, server_lr=0.5)
    assert near(personal(still, model), personal(FedAvg, model))


def test_scaffold_with_one_client_is_fedavg():
    """Its control variate is then that of all."""
    train = FederatedData.from_tensors(world.clients((23,)), test=0.0, validation=0.0).train
    plan, task = replace(PLAN, clients_per_round=1), classification(model_of(world.with_batch_norm))
    scaffold, fedavg = (
        run(make(task, optimizer=SGD(lr=0.1)), train=train, plan=plan).shared
        for make in (Scaffold, FedAvg)
    )
    assert scaffold["control/0.weight"].any()
    assert same([scaffold], [fedavg])


def test_scaffolds_first_round_is_fedavgs():
    task, plan = classification(model_of(world.with_batch_norm)), replace(PLAN, rounds=1)
    scaffold, fedavg = (
        run(make(task, optimizer=SGD(lr=0.1), aggregation=Mean("clients")), plan=plan).shared
        for make in (Scaffold, FedAvg)
    )
    assert same([scaffold], [fedavg])


def test_feddyns_first_round_is_fedproxs_and_goes_further_by_the_fraction_sampled():
    """The server's h is -alpha * fraction * change, and the model moves by -h / alpha more."""
    task, plan = classification(model_of(world.plain)), replace(PLAN, rounds=1)
    start, moves = task.initial_params(), []
    for kind in (partial(FedDyn, alpha=0.3), partial(FedProx, mu=0.3)):
        algorithm = kind(task, optimizer=RULE, aggregation=Mean("clients"))
        moves.append(trees.subtract(run(algorithm, plan=plan).shared, start))
    fraction = PLAN.clients_per_round / world.NUM_CLIENTS
    assert world.distance(moves[0], trees.scale(1 + fraction, moves[1])) < 1e-12


def test_ditto_with_lam_0_is_local_only_and_shares_what_fedavg_shares():
    model = model_of(world.with_batch_norm)
    assert same(personal(partial(Ditto, lam=0.0), model), personal(LocalOnly, model))
    shared = [
        run(make(classification(model), optimizer=RULE)).shared
        for make in (partial(Ditto, lam=0.7), FedAvg)
    ]
    assert same(*([tree] for tree in shared))


def test_fedproto_with_lam_0_is_local_only():
    model = model_of(world.with_batch_norm)
    assert same(personal(partial(FedProto, lam=0.0), model), personal(LocalOnly, model))


@both_means
@pytest.mark.parametrize("make", [IFCA, FeSEM])
def test_one_cluster_is_fedavg(make, by):
    task = classification(model_of(world.with_batch_norm))
    ours = run(make(task, optimizer=RULE, clusters=1, aggregation=Mean(by))).shared
    alone = {name: tensor[0] for name, tensor in ours.items()}
    fedavg = run(FedAvg(task, optimizer=RULE, aggregation=Mean(by))).shared
    assert world.distance(alone, fedavg) < 1e-12


def test_fedper_is_lg_with_a_local_head():
    model = model_of(world.with_batch_norm)
    assert same(personal(FedPer, model), personal(partial(LGFedAvg, local="3"), model))


def test_fedrep_with_everything_in_the_head_is_local_only():
    """Its head trains for as many epochs as the whole model does there; the body is empty."""
    model = model_of(world.plain)
    alone = partial(FedRep, local=["0", "2"], head_epochs=PLAN.local_epochs)
    assert same(personal(alone, model), personal(LocalOnly, model))


@pytest.mark.parametrize("make", [FedAvgM, FedAdam, FedYogi, FedDyn, FedProx, Scaffold])
def test_with_everything_local_it_is_local_only(make):
    model = model_of(world.with_batch_norm)
    alone = partial(make, local=["0", "1", "3"])
    ours = personal(alone, model, SGD(lr=0.1))
    assert same(ours, personal(LocalOnly, model, SGD(lr=0.1)))


TORCHS = [
    (SGD(lr=0.1), partial(torch.optim.SGD, lr=0.1)),
    (SGD(lr=0.1, momentum=0.5), partial(torch.optim.SGD, lr=0.1, momentum=0.5)),
    (
        SGD(lr=0.1, momentum=0.9, weight_decay=0.01),
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    ),
    (Adam(lr=0.01), partial(torch.optim.Adam, lr=0.01)),
    (
        Adam(lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
        partial(torch.optim.Adam, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
    ),
    (
        AdamW(lr=0.01, weight_decay=0.1),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    ),
]
ALONE = Plan(rounds=1, clients_per_round=1, local_epochs=3, batch_size=4)


@pytest.mark.parametrize("make", [world.plain, world.with_batch_norm])
@pytest.mark.parametrize(("ours", "torchs"), TORCHS)
def test_fedavg_on_one_client_is_torchs_optimizer_by_hand(ours, torchs, make):
    """Adam's bias corrections are computed in float32, whatever the model's type is."""
    by_hand, tolerance = trained_by_hand(make, torchs), 1e-12 if type(ours) is SGD else 1e-6
    for optimizer in (ours, torchs):
        assert world.distance(trained_by_us(make, optimizer), by_hand) < tolerance


def trained_by_us(make, optimizer):
    federation = FederatedData.from_tensors(world.clients((23,)), test=0.0, validation=0.0)
    algorithm = FedAvg(classification(model_of(make)), optimizer=optimizer)
    return run(algorithm, train=federation.train, plan=ALONE).shared


def trained_by_hand(make, make_optimizer):
    model = model_of(make)
    (x, y), optimizer = world.clients((23,))[0], make_optimizer(model.parameters())
    for epoch in batch_order(ALONE, 23, 0, 0):
        for rows in epoch:
            real = torch.from_numpy(rows[rows >= 0])
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[real].double()), y[real]).backward()
            optimizer.step()
    return params_of(model)


def test_the_lr_decays_from_round_to_round():
    task = classification(model_of(world.plain))
    data = FederatedData.from_tensors(world.clients((8,)), test=0.0, validation=0.0).train
    plan = Plan(rounds=1, clients_per_round=1, batch_size=8, first_round=3)

    def moved(optimizer):
        shared = run(FedAvg(task, optimizer=optimizer), train=data, plan=plan).shared
        return trees.subtract(shared, task.initial_params())

    whole, decayed = moved(SGD(lr=0.1)), moved(SGD(lr=0.1, lr_decay=1.0))
    assert world.distance(trees.scale(4, decayed), whole) < 1e-8  # 1 / (1 + 1.0 * 3), in float32


def test_a_mean_by_clients_changes_nothing_for_equal_clients():
    task = classification(model_of(world.plain))
    for sizes, differ in (((20,) * 7, False), (world.SIZES, True)):
        train = FederatedData.from_tensors(world.clients(sizes), validation=0.0).train
        states = [
            run(FedAvg(task, optimizer=RULE, aggregation=Mean(by)), train=train)
            for by in ("examples", "clients")
        ]
        gap = world.gap(*states)
        assert (gap > 1e-3) if differ else (gap < 1e-12)


def test_means_by_examples_and_by_clients_differ_in_their_spec():
    task = classification(model_of(world.plain))
    specs = [
        FedAvg(task, optimizer=RULE, aggregation=Mean(by)).spec for by in ("examples", "clients")
    ]
    assert specs[0] != specs[1]
