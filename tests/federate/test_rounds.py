"""One round by itself: what a client is given, and what the server makes of the replies."""

from dataclasses import replace

import pytest
import torch

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.sampling import Plan, client_key
from glocal.core.training import WeightedSum
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    assign,
    build_executors,
    client_step,
    collect_mean,
    run_round,
    simulate,
    start_state,
    start_wires,
)
from glocal.wire import WireError
from tests.support import world

pytestmark = pytest.mark.quick

PLAN = Plan(2, 5, local_epochs=3, batch_size=5)
SGD = glocal.SGD(lr=0.1)


def two_groups(kind):
    """A replica whose clients are in two groups with one algorithm, and its state."""
    task = glocal.classification(world.seeded(world.plain))
    algorithm = kind(task, optimizer=SGD)
    setups = [GroupSetup(algorithm, task.initial_params())] * 2
    wires = start_wires(setups)
    data = [world.federation(sizes, seed) for seed, sizes in enumerate([(9, 7, 8), (6, 12)])]
    groups = [
        GroupClients(algorithm, each.train, wire, first)
        for each, wire, first in zip(data, wires, (0, 3), strict=True)
    ]
    return Replica(tuple(groups), PLAN), start_state(setups, wires)


def test_a_client_is_sent_a_key_of_its_number_among_all_clients_and_of_the_round():
    replica, state = two_groups(glocal.FedAvg)
    keys = set()
    for round_index in range(2):
        for place, count in enumerate((3, 2)):
            for client, task in enumerate(assign(replica, state, place, range(count), round_index)):
                number = replica.groups[place].first + client
                assert int(task.key) == int(client_key(PLAN, round_index, number))
                keys.add(int(task.key))
    assert len(keys) == 2 * 5


class Longer(glocal.FedAvg):
    """Goes through the data twice as often."""

    def num_epochs(self, local_epochs):
        return 2 * local_epochs


@pytest.mark.parametrize(("kind", "epochs"), [(glocal.FedAvg, 3), (Longer, 6)])
def test_a_client_goes_through_its_data_as_often_as_the_algorithm_says(kind, epochs):
    replica, state = two_groups(kind)
    [task] = assign(replica, state, 0, [1], 0)
    assert len(task.order) == epochs


class Remembering(glocal.FedAvg):
    """Keeps the number of its rounds; client 4 of all breaks in the first round."""

    def init(self, params):
        return super().init(params)._replace(private={"rounds": torch.zeros(())})

    def client_update(self, message, private, work):
        update = super().client_update(message, {}, work)
        is_broken = work.key == int(client_key(PLAN, 0, 4))
        loss = update.metrics["loss"]
        total = torch.where(is_broken, torch.nan, loss.total)
        after = {"rounds": private["rounds"] + 1}
        return update._replace(private=after, metrics={"loss": WeightedSum(total, loss.weight)})


def run(replica, state, rounds=range(1)):
    executors = build_executors(replica.groups, "looped", num_calls=1)
    return list(simulate([replica], [state], executors, rounds))


def test_of_several_groups_the_client_that_was_dropped_keeps_its_private_tree():
    [[(state, report)]] = run(*two_groups(Remembering))
    assert report.dropped == [4]
    after = [
        state.private[place].of(client)["rounds"].item()
        for place, count in enumerate((3, 2))
        for client in range(count)
    ]
    assert after == [1, 1, 1, 1, 0]


class FirstOnly(glocal.FedAvg):
    """The server takes the first client's upload as it is, and keeps it."""

    def server_update(self, shared, server, uploads):
        first = {name: tensor[0] for name, tensor in uploads.messages.items()}
        self.received.append(uploads.messages)
        return first, {"kept": first["0.weight"]}


def test_what_the_server_keeps_shares_no_memory_with_an_upload(monkeypatch):
    """The next round may overwrite it."""
    received = []
    monkeypatch.setattr(FirstOnly, "received", received, raising=False)
    [[(state, _)]] = run(*two_groups(FirstOnly))
    uploaded = {tensor.untyped_storage().data_ptr() for tensor in received[-1].values()}
    for tensor in (*state.shared.values(), *state.server.values()):
        assert tensor.untyped_storage().data_ptr() not in uploaded
    assert torch.equal(state.server["kept"], received[-1]["0.weight"][0])


def test_a_mean_that_was_not_declared_is_refused():
    replica, state = world.set_up(
        world.algorithm("fedavg", world.seeded(world.plain)), world.federation().train, PLAN
    )
    mean = trees.zeros_like(state.shared)
    examples = torch.tensor([3, 4])
    assert trees.same_bits(collect_mean(replica, state, mean, examples, 0).shared, state.shared)
    with pytest.raises(WireError, match=r"unexpected \['more'\]"):
        collect_mean(replica, state, {**mean, "more": torch.zeros(1)}, examples, 0)


def test_a_client_does_not_train_on_a_message_that_was_not_declared(monkeypatch):
    algorithm = world.algorithm("fedavg", world.seeded(world.plain))
    train = world.federation().train
    replica, state = world.set_up(algorithm, train, PLAN)
    step = client_step(algorithm, replica.groups[0].wire)
    trained = []
    monkeypatch.setattr(type(algorithm), "client_update", lambda *given: trained.append(given))
    with pytest.raises(WireError, match=r"unexpected \['more'\]"):
        step({**state.shared, "more": torch.zeros(1)}, {}, world.work_of(train, 0))
    assert not trained


def test_a_client_sees_no_memory_of_its_codec():
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    train, uplink = world.federation().train, glocal.TopK(0.5)
    replica, state = world.set_up(algorithm, train, PLAN, uplink=uplink)
    seen, [group] = [], replica.groups

    class Watching(type(algorithm)):
        def client_update(self, message, private, work):
            seen.extend(private)
            return super().client_update(message, private, work)

    watching = Watching(algorithm.task, local=algorithm.local, optimizer=SGD)
    step = client_step(watching, group.wire)
    reply = step(state.shared, state.private[0].initial, world.work_of(train, 0))
    assert seen
    assert not [name for name in seen if name.startswith("codec/")]
    assert [name for name in reply.private if name.startswith("codec/")]


def federations(**changes):
    """Two replicas of one federation, the second one with another plan or with other data."""
    replica, state = two_groups(glocal.FedAvg)
    other = replace(replica, plan=replace(PLAN, seed=1))
    return [replica, replace(other, **changes)], [state, state]


def test_federations_side_by_side_need_one_plan_and_one_store_of_examples():
    executors = build_executors(two_groups(glocal.FedAvg)[0].groups, "looped", num_calls=1)
    [finished] = simulate(*federations(), executors, range(1))
    assert len(finished) == 2
    longer = replace(PLAN, seed=1, local_epochs=2)
    with pytest.raises(InputError, match="need the same plan, except for the seed"):
        next(simulate(*federations(plan=longer), executors, range(1)))
    apart, _ = two_groups(glocal.FedAvg)
    with pytest.raises(InputError, match="must share one data set"):
        next(simulate(*federations(groups=apart.groups), executors, range(1)))


def test_replicas_side_by_side_get_their_own_replies():
    replicas, states = federations()
    executors = build_executors(replicas[0].groups, "looped", num_calls=1)
    together = run_round(replicas, states, executors, 0)
    for replica, state, (after, _) in zip(replicas, states, together, strict=True):
        [(alone, _)] = run_round([replica], [state], executors, 0)
        assert trees.same_bits(after.shared, alone.shared)
    assert not trees.same_bits(together[0][0].shared, together[1][0].shared)
