"""The contract: every exported algorithm passes every check on every kind of model.

The default suite has a model with batch norm and dropout, and a recurrent one; `make slow` has the
full product, with other models, workers, fused steps and clients of one example.
"""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glocal import algorithms
from glocal.core import trees
from glocal.core.modules import params_of
from glocal.core.sampling import Plan, batch_order
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.federate.rounds import Seat, initial_state, simulate, simulate_seeds
from glocal.wire import Ledger, pack, unpack
from tests.support import world

PLAN = Plan(rounds=5, clients_per_round=4, local_epochs=2, batch_size=5)

SMALL, *OTHERS = world.MODELS
# it cannot be batched, and runs one client after the other with a warning
unbatched = pytest.mark.filterwarnings("ignore:engine:glocal.core.errors.GlocalWarning")
small = pytest.param(SMALL, marks=pytest.mark.quick)
others = [pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS]

every_algorithm = pytest.mark.parametrize("name", algorithms.__all__)
every_model = pytest.mark.parametrize(
    "kind", [small, pytest.param(world.RECURRENT, marks=unbatched), *others]
)
batchable_models = pytest.mark.parametrize("kind", [small, *others])


@cache
def baseline(name, kind):
    """Five rounds by the default engine, run once for all tests that compare with it."""
    return run(name, kind)


def run(name, kind, *, plan=PLAN, engine="vmapped", chunk_size=None, federation=None):
    model = world.seeded(world.ALL_MODELS[kind])
    rounds = simulate(
        world.algorithm(name, model),
        params_of(model),
        (federation or world.federation()).train,
        plan,
        engine=EngineConfig(engine, chunk_size=chunk_size),
    )
    return world.last(rounds)[0]


def start(name, kind):
    model = world.seeded(world.ALL_MODELS[kind])
    algorithm = world.algorithm(name, model)
    return algorithm, initial_state(algorithm, params_of(model))


@every_algorithm
@every_model
def test_batched_over_clients_equals_one_by_one(name, kind):
    assert world.gap(baseline(name, kind), run(name, kind, engine="looped")) < 1e-5


@every_algorithm
@batchable_models
def test_the_vmapped_engine_is_really_batched(name, kind):
    algorithm, state = start(name, kind)
    executor = Executor(algorithm.client_update, engine="vmapped")
    list(
        simulate_seeds(
            algorithm, [Seat(Plan(1, 4, batch_size=5), world.federation().train, state)], executor
        )
    )
    assert executor.execution_plan.engine == "vmapped"


@every_algorithm
@every_model
@pytest.mark.parametrize("chunk", [1, 3])
def test_the_size_of_a_chunk_changes_nothing(name, kind, chunk):
    assert world.gap(run(name, kind, chunk_size=chunk), baseline(name, kind)) < 1e-6


@every_algorithm
@every_model
def test_padding_changes_nothing(name, kind):
    algorithm, state = start(name, kind)
    train = world.federation().train
    order = train.rows[0][batch_order(PLAN, len(train.rows[0]), 0, 0).clip(min=0)]
    order = np.where(batch_order(PLAN, len(train.rows[0]), 0, 0) < 0, -1, order)
    nothing = np.full((2, PLAN.batch_size), -1)
    wide = np.concatenate([order, np.full((len(order), 3), -1)], axis=1)
    alone = ClientTask(state.shared, state.private.initial, order)
    plain = Executor(algorithm.client_update, engine="looped")([alone], train.examples).stacked()
    longer = np.concatenate([order, nothing])
    holed = np.concatenate([order[:2], nothing, order[2:], nothing])
    for padded in (longer, holed, wide):
        task = ClientTask(state.shared, state.private.initial, padded)
        companion = ClientTask(state.shared, state.private.initial, padded[:1])
        executor = Executor(algorithm.client_update, engine="vmapped")
        together = executor([task, companion], train.examples).stacked()
        if padded is not longer and "dropout" in kind:
            continue  # dropout is addressed by step and by place in the batch
        for padded_trees, plain_trees in (
            (together.upload, plain.upload),
            (together.private, plain.private),
        ):
            distance = world.distance(trees.row(padded_trees, 0), trees.row(plain_trees, 0))
            assert distance < 1e-5


@every_algorithm
@every_model
def test_seeds_side_by_side_equal_seeds_alone(name, kind):
    model = world.seeded(world.ALL_MODELS[kind])
    algorithm = world.algorithm(name, model)
    train, plans = (
        world.federation().train,
        [Plan(3, 4, batch_size=5, seed=seed) for seed in (0, 1, 2)],
    )
    params = [params_of(world.seeded(world.ALL_MODELS[kind], plan.seed)) for plan in plans]
    seats = [
        Seat(plan, train, initial_state(algorithm, tree))
        for plan, tree in zip(plans, params, strict=True)
    ]
    together = world.last(simulate_seeds(algorithm, seats, Executor(algorithm.client_update)))
    for plan, tree, (state, _) in zip(plans, params, together, strict=True):
        assert world.gap(state, world.last(simulate(algorithm, tree, train, plan))[0]) < 1e-6


@every_algorithm
@every_model
def test_clients_that_were_not_sampled_keep_their_bits(name, kind):
    algorithm, before = start(name, kind)
    executor = Executor(algorithm.client_update)
    for moment in simulate_seeds(
        algorithm, [Seat(PLAN, world.federation().train, before)], executor
    ):
        after, report = moment[0]
        outside = set(range(len(world.SIZES))) - set(report.sampled.tolist())
        assert outside
        assert all(
            trees.same_bits(before.private.of(client), after.private.of(client))
            for client in outside
        )
        if before.private.initial:
            sampled = report.sampled.tolist()
            assert not all(
                trees.same_bits(before.private.of(client), after.private.of(client))
                for client in sampled
            )
        before = after


@every_algorithm
@every_model
def test_the_same_seed_gives_the_same_bits(name, kind):
    assert world.same_bits(run(name, kind), baseline(name, kind))


@every_algorithm
def test_another_seed_gives_other_bits(name):
    other = Plan(5, 4, local_epochs=2, batch_size=5, seed=1)
    assert not world.same_bits(baseline(name, SMALL), run(name, SMALL, plan=other))


@every_algorithm
@every_model
def test_nothing_but_the_shared_tree_is_uploaded(name, kind):
    """By name, by value and by alias, where uploads arrive."""
    algorithm, state = start(name, kind)
    arrived = []

    def spy(shared, uploads, weights):
        arrived.append(uploads)
        return algorithm.aggregate(shared, uploads, weights)

    spied = algorithm._replace(aggregate=spy)
    executor = Executor(spied.client_update)
    local = state.private.initial.keys() - state.shared.keys()
    for moment in simulate_seeds(spied, [Seat(PLAN, world.federation().train, state)], executor):
        private = moment[0][0].private
        private_tensors = [
            tree[key]
            for tree in (private.initial, *private.trained.values())
            for key in tree
            if key in local
        ]
        places = {tensor.untyped_storage().data_ptr() for tensor in private_tensors}
        for key, uploads in arrived[-1].items():
            assert key in state.shared
            assert uploads.untyped_storage().data_ptr() not in places
            for upload in uploads:
                assert not any(
                    upload.shape == own.shape and torch.equal(upload, own) and bool(own.any())
                    for own in private_tensors
                )


@every_model
def test_an_upload_with_a_local_tensor_is_refused(kind):
    algorithm, state = start("lg_fedavg", kind)

    def leaky(shared, private, work):
        update = algorithm.client_update(shared, private, work)
        return update._replace(upload={**update.upload, **update.private})

    with pytest.raises(ValueError, match="an upload may hold the shared tensors and nothing else"):
        list(
            simulate_seeds(
                algorithm, [Seat(PLAN, world.federation().train, state)], Executor(leaky)
            )
        )


@every_algorithm
@every_model
def test_the_ledger_counts_the_serialised_bytes(name, kind):
    algorithm, state = start(name, kind)
    crossed = {"down": 0, "up": 0, "parameters": 0}

    def spy(shared, uploads, weights):
        sent = [pack(trees.row(uploads, place)) for place in range(PLAN.clients_per_round)]
        crossed["up"] += sum(map(len, sent))
        crossed["down"] += PLAN.clients_per_round * len(pack(shared))
        crossed["parameters"] += trees.numel(uploads) + PLAN.clients_per_round * trees.numel(shared)
        assert trees.same_bits(unpack(sent[0], shared), trees.row(uploads, 0))
        return algorithm.aggregate(shared, uploads, weights)

    spied, ledger = algorithm._replace(aggregate=spy), Ledger()
    for moment in simulate_seeds(
        spied, [Seat(PLAN, world.federation().train, state)], Executor(spied.client_update)
    ):
        ledger = ledger + moment[0][1].traffic
    assert (ledger.download.bytes, ledger.upload.bytes) == (crossed["down"], crossed["up"])
    assert ledger.total.parameters == crossed["parameters"]


@every_algorithm
def test_the_order_of_clients_changes_nothing(name):
    """The same clients in another order give the same average."""
    model = world.seeded(world.plain)
    algorithm = world.algorithm(name, model)
    train = world.federation().train
    state = initial_state(algorithm, params_of(model))
    executor = Executor(algorithm.client_update)
    orders = [
        rows[batch_order(Plan(1, 1, batch_size=40), len(rows), 0, 0)[:, : len(rows)]]
        for rows in train.rows
    ]
    orders = [
        np.pad(order, ((0, 0), (0, 40 - order.shape[1])), constant_values=-1) for order in orders
    ]
    means = []
    for turn in (list(range(6)), [5, 3, 1, 0, 2, 4]):
        update = executor(
            [ClientTask(state.shared, state.private.initial, orders[client]) for client in turn],
            train.examples,
        ).stacked()
        means.append(
            algorithm.aggregate(
                state.shared, update.upload, torch.tensor([train.sizes[client] for client in turn])
            )
        )
    assert world.distance(*means) < 1e-6


@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(1, 9), st.integers(1, 7))
def test_engines_agree_for_clients_of_any_sizes(sizes, batch, chunk):
    plan = Plan(2, len(sizes), batch_size=batch)
    federation = FederatedData.from_tensors(world.clients(sizes), test=0.0, validation=0.0)
    one_by_one = run("lg_fedavg", "plain", plan=plan, engine="looped", federation=federation)
    batched = run(
        "lg_fedavg", "plain", plan=plan, engine="vmapped", chunk_size=chunk, federation=federation
    )
    assert world.gap(one_by_one, batched, len(sizes)) < 1e-5


def of_one_example():
    return FederatedData.from_tensors(
        world.clients((1,) * world.NUM_CLIENTS), test=0.0, validation=0.0
    )


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("engine", ["vmapped", "workers"])
def test_engines_agree_for_clients_of_one_example(name, kind, engine):
    """Batch norm takes the statistics of one example then, and its own running ones remain."""
    looped = run(name, kind, engine="looped", federation=of_one_example())
    assert world.gap(looped, run(name, kind, engine=engine, federation=of_one_example())) < 1e-5


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", world.ALL_MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_workers_equal_one_client_after_the_other(name, kind, fused):
    """Threads with fused steps where these know the model, else processes."""
    model = world.seeded(world.ALL_MODELS[kind])
    config = EngineConfig("workers", workers=2, fused=fused)
    params, train = params_of(model), world.federation().train
    rounds = simulate(world.algorithm(name, model), params, train, PLAN, engine=config)
    assert world.gap(run(name, kind, engine="looped"), world.last(rounds)[0]) < 1e-5
