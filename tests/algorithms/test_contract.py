"""The contract: every exported algorithm passes every check on every kind of model.

The default suite has a model with batch norm and dropout, and for the first laws a recurrent one;
`make slow` has the full product, with other models, workers, fused steps and clients of one
example. Engines compute the same, so they are compared in float64 to 1e-10.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from glocal.core import trees
from glocal.core.sampling import Plan, batch_order
from glocal.core.task import classification
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.federate import rounds
from glocal.federate.rounds import Replica, build_executors, client_step, run_round
from glocal.wire import Ledger, WireError, pack, unpack
from tests.support import world

PLAN = Plan(rounds=4, clients_per_round=4, local_epochs=2, batch_size=5)
EXACT = 1e-10

SMALL, *OTHERS = world.MODELS
small = pytest.param(SMALL, marks=pytest.mark.quick)
others = [pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS]
recurrent = pytest.param(world.RECURRENT, marks=pytest.mark.slow)

every_algorithm = pytest.mark.parametrize("name", world.NAMES)
every_model = pytest.mark.parametrize("kind", [small, recurrent, *others])
recurrent_by_default = pytest.mark.parametrize("kind", [small, world.RECURRENT, *others])


def model_of(kind, seed=0, dtype=torch.float64):
    return world.seeded(world.ALL_MODELS[kind], seed).to(dtype)


def data(dtype=torch.float64, federation=None):
    """The training data of a small federation."""
    train = (federation or world.federation()).train
    return replace(train, examples=train.examples.with_dtype(dtype))


@cache
def baseline(name, kind):
    """Some rounds by the vmapped engine, run once for all tests that compare with it."""
    return run(name, kind)


def run(name, kind, *, plan=PLAN, engine="vmapped", chunk_size=None, federation=None, **dtype):
    algorithm = world.algorithm(name, model_of(kind, **dtype))
    config = EngineConfig(engine, chunk_size=chunk_size, workers=2)
    train = data(federation=federation, **dtype)
    return world.last(world.simulate(algorithm, train, plan, engine=config))[0]


def start(name, kind, plan=PLAN):
    """A replica and its state before the first round."""
    return world.set_up(world.algorithm(name, model_of(kind)), data(), plan)


def states_of(replica, state, engine="vmapped"):
    """The state and the report of every round."""
    executors = build_executors(replica.groups, engine, num_calls=1)
    for index in world.plan_rounds(replica.plan):
        [(state, report)] = run_round([replica], [state], executors, index)
        yield state, report


@every_algorithm
@recurrent_by_default
def test_batched_over_clients_equals_one_by_one(name, kind):
    assert world.gap(baseline(name, kind), run(name, kind, engine="looped")) < EXACT


@every_algorithm
@recurrent_by_default
def test_the_vmapped_engine_is_really_batched(name, kind):
    replica, state = start(name, kind, Plan(1, 4, batch_size=5))
    executors = build_executors(replica.groups, "vmapped", num_calls=1)
    run_round([replica], [state], executors, 0)
    assert executors[0].execution_plan.engine == "vmapped"


@every_algorithm
@every_model
@pytest.mark.parametrize("chunk", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_the_size_of_a_chunk_changes_nothing(name, kind, chunk):
    assert world.gap(run(name, kind, chunk_size=chunk), baseline(name, kind)) < EXACT


def padded_orders(order):
    """The same examples with more padding: at the end of epochs, in every batch."""
    epochs, steps, batch = order.shape
    longer = np.full((epochs, steps + 2, batch), -1)
    longer[:, :steps] = order
    wide = np.full((epochs, steps, batch + 3), -1)
    wide[..., :batch] = order
    return longer, wide


@every_algorithm
@recurrent_by_default
def test_padding_changes_nothing(name, kind):
    replica, state = start(name, kind)
    group = replica.groups[0]
    step = client_step(group.algorithm, group.wire)
    rows = group.train.rows[0]
    plan = replace(PLAN, local_epochs=group.algorithm.num_epochs(2))
    order = batch_order(plan, len(rows), 0, 0)
    order = np.where(order < 0, -1, rows[order.clip(min=0)])
    message = group.algorithm.download(state.shared, state.profiles[0].initial)
    alone = ClientTask(message, state.private[0].initial, order, 7)
    plain = Executor(step, engine="looped")([alone], group.train.examples).stacked()
    longer, wide = padded_orders(order)
    for padded in (longer, wide):
        if padded is wide and "dropout" in kind:
            continue  # dropout is addressed by place in the batch
        tasks = [alone._replace(order=padded), alone._replace(order=padded[:, :1])]
        together = Executor(step, engine="vmapped")(tasks, group.train.examples).stacked()
        for padded_trees, plain_trees in (
            (together.payload, plain.payload),
            (together.private, plain.private),
        ):
            gap = world.distance(trees.row(padded_trees, 0), trees.row(plain_trees, 0))
            assert gap < EXACT


@every_algorithm
@every_model
def test_seeds_side_by_side_equal_seeds_alone(name, kind):
    algorithm, train = world.algorithm(name, model_of(kind)), data()
    plans = [Plan(3, 4, batch_size=5, seed=seed) for seed in (0, 1, 2)]
    params = [
        replace(algorithm.task, model=model_of(kind, plan.seed)).initial_params() for plan in plans
    ]
    pairs = [
        world.set_up(algorithm, train, plan, params=tree)
        for plan, tree in zip(plans, params, strict=True)
    ]
    replicas, states = zip(*pairs, strict=True)
    executors = build_executors(replicas[0].groups, "vmapped", num_calls=1)
    together = world.last(rounds.simulate(replicas, states, executors, range(3)))
    for plan, tree, (state, _) in zip(plans, params, together, strict=True):
        alone = world.simulate(algorithm, train, plan, params=tree, engine="vmapped")
        assert world.gap(state, world.last(alone)[0]) < EXACT


@every_algorithm
@every_model
def test_clients_that_were_not_sampled_keep_their_bits(name, kind):
    replica, before = start(name, kind)
    for after, report in states_of(replica, before):
        outside = set(range(len(world.SIZES))) - set(report.clients.tolist())
        assert outside
        assert all(
            trees.same_bits(before.private[0].of(client), after.private[0].of(client))
            for client in outside
        )
        if any(tensor.is_floating_point() for tensor in before.private[0].initial.values()):
            assert not all(
                trees.same_bits(before.private[0].of(client), after.private[0].of(client))
                for client in report.clients.tolist()
            )
        before = after


@every_algorithm
@every_model
def test_the_same_seed_gives_the_same_bits(name, kind):
    assert world.same_bits(run(name, kind), baseline(name, kind))


@every_algorithm
def test_another_seed_gives_other_bits(name):
    other = replace(PLAN, seed=1)
    assert not world.same_bits(baseline(name, SMALL), run(name, SMALL, plan=other))


class Spy:
    """An algorithm's server, with a look at what arrives."""

    def __init__(self, monkeypatch, algorithm):
        self.arrived = []
        original = type(algorithm).server_update

        def server_update(own, shared, server, uploads):
            self.arrived.append(uploads)
            return original(own, shared, server, uploads)

        monkeypatch.setattr(type(algorithm), "server_update", server_update)


def from_other_values(state):
    """The same state with noise in every tensor, so that equal values are no coincidence.

    Where a shared and a private model start equal, or from 0, they may stay equal for a while.
    """
    generator = torch.Generator().manual_seed(0)

    def noisy(tree):
        moved = {}
        for name, tensor in tree.items():
            noise = torch.rand(tensor.shape, generator=generator)
            moved[name] = tensor + noise.to(tensor) if tensor.is_floating_point() else tensor
        return moved

    private = replace(state.private[0], initial=noisy(state.private[0].initial))
    return state._replace(shared=noisy(state.shared), private=(private,))


def leaks(messages, private):
    """Private tensors among messages, by name, by alias and by value; counters may be equal."""
    trees_of_clients = (private.initial, *private.stored.values())
    own = [tensor for tree in trees_of_clients for tensor in tree.values()]
    own = [tensor for tensor in own if tensor.is_floating_point()]
    places = {tensor.untyped_storage().data_ptr() for tensor in own}
    found = sorted(messages.keys() & private.initial.keys())
    for name, stacked in messages.items():
        same = [
            torch.equal(message, tensor)
            for message in stacked
            for tensor in own
            if message.shape == tensor.shape
        ]
        if any(same) or stacked.untyped_storage().data_ptr() in places:
            found.append(name)
    return found


@every_algorithm
@every_model
def test_nothing_private_is_uploaded(name, kind, monkeypatch):
    """Where uploads arrive."""
    replica, state = start(name, kind)
    algorithm = replica.groups[0].algorithm
    spy = Spy(monkeypatch, algorithm)
    for after, _ in states_of(replica, from_other_values(state)):
        messages = spy.arrived[-1].messages
        assert messages.keys() == algorithm.upload_like(state.shared).keys()
        assert not leaks(messages, after.private[0])


def test_a_private_tensor_under_the_name_of_a_shared_one_is_found(monkeypatch):
    replica, state = start("apfl", SMALL)
    kind_of = type(replica.groups[0].algorithm)
    original = kind_of.client_update

    def leaky(own, message, private, work):
        update = original(own, message, private, work)
        upload = {**update.upload, "0.weight": update.private["own/0.weight"]}
        return update._replace(upload=upload)

    monkeypatch.setattr(kind_of, "client_update", leaky)
    spy = Spy(monkeypatch, replica.groups[0].algorithm)
    after, _ = next(states_of(replica, from_other_values(state)))
    assert leaks(spy.arrived[-1].messages, after.private[0]) == ["0.weight"]


@every_model
def test_an_upload_with_a_local_tensor_is_refused(kind, monkeypatch):
    replica, state = start("lg_fedavg", kind)
    kind_of = type(replica.groups[0].algorithm)
    original = kind_of.client_update

    def leaky(own, message, private, work):
        update = original(own, message, private, work)
        return update._replace(upload={**update.upload, **update.private})

    monkeypatch.setattr(kind_of, "client_update", leaky)
    with pytest.raises(WireError, match="may hold the declared tensors and nothing else"):
        next(states_of(replica, state))


@every_algorithm
@every_model
def test_the_ledger_counts_the_serialised_bytes(name, kind, monkeypatch):
    replica, state = start(name, kind)
    spy, wire = Spy(monkeypatch, replica.groups[0].algorithm), replica.groups[0].wire
    crossed, ledger = {"down": 0, "up": 0, "parameters": 0}, Ledger()
    for after, report in states_of(replica, state):
        uploads, sampled = spy.arrived[-1], PLAN.clients_per_round
        sent = [pack(trees.row(uploads.messages, place)) for place in range(sampled)]
        received = [pack(trees.row(uploads.sent, place)) for place in range(sampled)]
        crossed["up"] += sum(map(len, sent))
        crossed["down"] += sum(map(len, received))
        crossed["parameters"] += trees.numel(uploads.messages) + trees.numel(uploads.sent)
        assert trees.same_bits(unpack(sent[0], wire.payload), trees.row(uploads.messages, 0))
        ledger = ledger + report.traffic[0]
        state = after
    assert (ledger.download.bytes, ledger.upload.bytes) == (crossed["down"], crossed["up"])
    assert ledger.total.parameters == crossed["parameters"]


@every_algorithm
@every_model
def test_no_message_is_changed_in_place(name, kind):
    """A message is one object for all clients of a round, and `shared` lives on after it."""
    replica, state = start(name, kind)
    for after, _ in states_of(replica, state, engine="looped"):
        own = [*state.shared.values(), *state.server.values(), *state.private[0].initial.values()]
        assert all(tensor._version == 0 or not tensor.is_leaf for tensor in own)
        state = after


@every_algorithm
def test_the_order_of_clients_changes_nothing(name):
    """The same clients in another order give the same shared and server state."""
    replica, state = start(name, "plain", Plan(1, 6, batch_size=5))
    group = replica.groups[0]
    results = []
    for turn in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 0, 2, 4]):
        tasks = rounds.assign(replica, state, 0, turn, 0)
        executor = Executor(client_step(group.algorithm, group.wire), engine="vmapped")
        batch = executor(tasks, group.train.examples)
        sizes = group.train.sizes[turn]
        replies = rounds.group_replies(batch, range(6), tasks, turn, sizes)
        results.append(rounds.collect(replica, state, [replies], 0)[0])
    assert world.gap(*results) < EXACT


@settings(max_examples=15)
@given(st.lists(st.integers(1, 40), min_size=2, max_size=7), st.integers(1, 9), st.integers(1, 7))
def test_engines_agree_for_clients_of_any_sizes(sizes, batch, chunk):
    plan = Plan(2, len(sizes), batch_size=batch)
    federation = FederatedData.from_tensors(world.clients(sizes), test=0.0, validation=0.0)
    one_by_one = run("lg_fedavg", "plain", plan=plan, engine="looped", federation=federation)
    batched = run(
        "lg_fedavg", "plain", plan=plan, engine="vmapped", chunk_size=chunk, federation=federation
    )
    assert world.gap(one_by_one, batched, len(sizes)) < EXACT


def of_one_example():
    return FederatedData.from_tensors(
        world.clients((1,) * world.NUM_CLIENTS), test=0.0, validation=0.0
    )


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", [SMALL, *OTHERS])
@pytest.mark.parametrize("engine", ["vmapped", "workers"])
def test_engines_agree_for_clients_of_one_example(name, kind, engine):
    """Batch norm takes the statistics of one example then, and its own running ones remain.

    One row amplifies rounding some hundred times.
    """
    looped = run(name, kind, engine="looped", federation=of_one_example())
    other = run(name, kind, engine=engine, federation=of_one_example())
    assert world.gap(looped, other) < 1e-7


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", world.ALL_MODELS)
def test_workers_equal_one_client_after_the_other(name, kind):
    assert world.gap(run(name, kind, engine="looped"), run(name, kind, engine="workers")) < EXACT


def one_step_train():
    """Clients of one batch without a row of its own, so that one epoch is one step."""
    federation = FederatedData.from_tensors(
        world.clients((5,) * world.NUM_CLIENTS), test=0.0, validation=0.0
    )
    return federation.train


@pytest.mark.slow
@every_algorithm
@pytest.mark.parametrize("kind", world.ALL_MODELS)
@pytest.mark.parametrize("fused", [True, False])
def test_fused_and_traced_steps_equal_the_loop_after_one_step(name, kind, fused):
    """In float32; threads with fused steps where these know the model, else processes."""
    plan = Plan(1, 4, batch_size=5)
    algorithm = world.algorithm(name, model_of(kind, dtype=torch.float32))
    config = EngineConfig("workers", workers=2, fused=fused)
    states = [
        world.last(world.simulate(algorithm, one_step_train(), plan, engine=engine))[0]
        for engine in ("looped", config)
    ]
    assert world.gap(*states) < 1e-5


def test_a_replica_is_a_value():
    replica, _ = start("fedavg", SMALL)
    assert isinstance(replica, Replica)
    assert classification(model_of(SMALL)).metric.name == "accuracy"
