"""Groups of clients, with their own networks and inputs and one shared part, keep every promise."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import glocal
from glocal.core import files, trees
from glocal.core.errors import DivergedError, InputError
from glocal.core.files import read_metadata, read_rows
from glocal.core.sampling import sample_clients
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    build_executors,
    run_round,
    start_state,
    start_wires,
)
from glocal.wire import WireError
from tests.support import world

PLAN = glocal.Plan(rounds=5, clients_per_round=4, batch_size=5)
SGD = glocal.SGD(lr=0.1, momentum=0.5)
OFTEN = glocal.Options(device="cpu", engine="vmapped", checkpoint_every=3)
EVERY_SECOND = glocal.Evaluation(every=2)
SIZES = {"vector": (23, 4, 31), "image": (12, 17), "short": (9, 6, 28)}


def vector(width=8):
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU())


def image(width=8):
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(12, width),
        nn.ReLU(),
    )


def short(width=8):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU())


ENCODERS = {"vector": (vector, (6,)), "image": (image, (1, 4, 4)), "short": (short, (3,))}


def task_of(name, width=8):
    encoder, _ = ENCODERS[name]
    make = lambda: nn.Sequential(encoder(width), nn.Linear(width, world.CLASSES))  # noqa: E731
    return glocal.classification(world.seeded(make, seed=len(name)))


def data_of(name):
    shape = ENCODERS[name][1]
    generator = torch.Generator().manual_seed(len(name))
    clients = [
        (
            torch.randn(size, *shape, generator=generator),
            torch.randint(world.CLASSES, (size,), generator=generator),
        )
        for size in SIZES[name]
    ]
    return glocal.FederatedData.from_tensors(clients)


def group(name, *, width=8, algorithm=None, **changes):
    """One of three groups: other encoders, other inputs, the same head."""
    algorithm = algorithm or glocal.LGFedAvg(task_of(name, width), optimizer=SGD, local="0")
    return replace(glocal.Group(algorithm, (data_of(name),), name), **changes)


def three():
    return [group(name) for name in ENCODERS]


def experiment(groups=None, plan=PLAN, seeds=(0,), evaluation=EVERY_SECOND, **settings):
    own = three() if groups is None else groups
    return glocal.Experiment(tuple(own), plan, seeds=seeds, evaluation=evaluation, **settings)


def fitted(groups=None, *, folder=None, options=OFTEN, callbacks=(), **settings):
    run = glocal.Run(
        experiment(groups, **settings), folder=folder, options=options, callbacks=callbacks
    )
    return run.to_end()


def rounds_of(groups=None, plan=PLAN, engine="vmapped"):
    """The state and the report of every round."""
    own = three() if groups is None else groups
    setups = [GroupSetup(each.algorithm, each.initial_params(0)) for each in own]
    wires, firsts = start_wires(setups), experiment(own, plan).first_clients
    clients = [
        GroupClients(each.algorithm, each.data[0].train, wire, first)
        for each, wire, first in zip(own, wires, firsts, strict=True)
    ]
    replica, state = Replica(tuple(clients), plan), start_state(setups, wires)
    executors = build_executors(replica.groups, engine, num_calls=plan.rounds)
    for index in world.plan_rounds(plan):
        [(state, report)] = run_round([replica], [state], executors, index)
        yield state, report


def gap(left, right):
    """The largest difference between two states of three groups."""
    gaps = [world.distance(left.shared, right.shared)]
    for place, sizes in enumerate(SIZES.values()):
        for client in range(len(sizes)):
            pair = (state.private[place].of(client) for state in (left, right))
            gaps.append(world.distance(*pair))
    return max(gaps)


def same(left, right):
    """Whether two results have the same bits for every group."""
    pairs = zip(left.groups, right.groups, strict=True)
    return all(
        world.same_bits(one.state.alone(), other.state.alone(), one.num_clients)
        for one, other in pairs
    )


def test_an_upload_with_a_local_tensor_is_refused(monkeypatch):
    original = glocal.LGFedAvg.client_update

    def leak(own, message, private, work):
        update = original(own, message, private, work)
        is_image = own.task.model[0][0].__class__ is nn.Conv2d
        return update._replace(upload={**update.upload, **private}) if is_image else update

    monkeypatch.setattr(glocal.LGFedAvg, "client_update", leak)
    with pytest.raises(WireError, match="may hold the declared tensors and nothing else"):
        list(rounds_of([group("vector"), group("image")], glocal.Plan(1, 5)))


def test_one_group_alone_is_a_plain_run_to_the_bit(tmp_path):
    plan = glocal.Plan(5, 2, batch_size=5)
    together = fitted([group("image")], plan=plan, folder=tmp_path / "group")
    alone = fitted([replace(group("image"), name="")], plan=plan, folder=tmp_path / "plain")
    assert same(together, alone)
    expected = {**alone.group().as_dict(), "group": "image"}
    assert together.group().as_dict() == expected
    rows = [read_rows(tmp_path / folder / "rows.jsonl") for folder in ("group", "plain")]
    assert rows[0] == [{**row, "group": "image"} for row in rows[1]]


def test_batched_over_clients_equals_one_by_one():
    (batched, _), (looped, _) = (world.last(rounds_of(engine=e)) for e in ("vmapped", "looped"))
    assert gap(batched, looped) < 1e-5


def test_each_group_is_really_batched(monkeypatch):
    """One call per group and round, with all of its sampled clients."""
    calls, expected = [], []
    original = glocal.federate.rounds.Executor.__call__

    def spied(own, tasks, examples, round_index=0):
        calls.append((tuple(examples.x.shape[1:]), len(tasks), round_index))
        return original(own, tasks, examples, round_index)

    monkeypatch.setattr("glocal.federate.rounds.Executor.__call__", spied)
    firsts = np.cumsum([0, *map(len, SIZES.values())])
    for _, report in rounds_of():
        counts = np.histogram(report.clients, firsts - 0.5)[0]
        for (_, shape), count in zip(ENCODERS.values(), counts.tolist(), strict=True):
            if count:
                expected.append((shape, count, report.round_index))
    assert calls == expected


def test_the_average_is_over_all_groups_weighted_by_examples(monkeypatch):
    """The uploads of one round of all clients, averaged by hand."""
    arrived, original = [], glocal.LGFedAvg.server_update

    def spy(own, shared, server, uploads):
        arrived.append(uploads)
        return original(own, shared, server, uploads)

    monkeypatch.setattr(glocal.LGFedAvg, "server_update", spy)
    start = three()[0].algorithm.init(three()[0].initial_params(0)).shared
    state, _ = world.last(rounds_of(plan=glocal.Plan(1, 8, batch_size=5)))
    sizes = np.concatenate([own.data[0].train.sizes for own in three()])
    [uploads] = arrived
    assert uploads.messages.keys() == {"1.weight", "1.bias"}
    for name, changes in uploads.messages.items():
        weighted = [size * each for size, each in zip(sizes, changes.double(), strict=True)]
        mean = start[name] + sum(weighted) / sizes.sum()
        assert torch.allclose(state.shared[name].double(), mean, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    assert same(fitted(), fitted())
    assert not same(fitted(), fitted(seeds=(1,)))


def test_several_seeds_side_by_side_equal_seeds_alone():
    together = fitted(seeds=(0, 1))
    for seed in (0, 1):
        alone = fitted(seeds=(seed,))
        for name in SIZES:
            one, other = together.group(seed, name), alone.group(seed, name)
            assert world.gap(one.state.alone(), other.state.alone(), one.num_clients) < 1e-6


def test_a_group_added_at_the_end_does_not_change_the_orders_of_the_others():
    """In a first round of all clients, private parts are the same with and without it."""
    few, _ = world.last(rounds_of(three()[:2], glocal.Plan(1, 5, batch_size=5), "looped"))
    more, _ = world.last(rounds_of(plan=glocal.Plan(1, 8, batch_size=5), engine="looped"))
    for place, name in enumerate(("vector", "image")):
        for client in range(len(SIZES[name])):
            pair = (state.private[place].of(client) for state in (few, more))
            assert trees.same_bits(*pair)


def test_only_sampled_clients_change_and_they_are_sampled_over_all_groups():
    rows = [
        [own.algorithm.init(own.initial_params(0)).private] * own.num_clients for own in three()
    ]
    firsts = experiment().first_clients
    for state, report in rounds_of():
        changed = []
        for place, before in enumerate(rows):
            now = [state.private[place].of(client) for client in range(len(before))]
            for client, tree in enumerate(now):
                if not trees.same_bits(tree, before[client]):
                    changed.append(firsts[place] + client)
            rows[place] = now
        assert changed == report.clients.tolist()
        assert changed == sample_clients(PLAN, 8, report.round_index).tolist()


def test_the_ledgers_have_the_shared_tree_for_each_sampled_client():
    results = fitted().by_group
    shared = trees.nbytes(results["image"].state.shared)
    sampled = {name: sum(result.times_sampled) for name, result in results.items()}
    assert sum(sampled.values()) == PLAN.rounds * PLAN.clients_per_round
    for direction in ("upload", "download"):
        traffic = [getattr(result.ledger, direction).bytes for result in results.values()]
        assert sum(traffic) == PLAN.rounds * PLAN.clients_per_round * shared
    for name, result in results.items():
        assert result.ledger.upload.bytes == sampled[name] * shared


def test_a_round_without_clients_of_a_group_has_no_loss_for_it(tmp_path):
    fitted(plan=replace(PLAN, clients_per_round=1), folder=tmp_path)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 3 * PLAN.rounds
    assert sum(row["loss"] is not None for row in rows) == PLAN.rounds


def test_the_models_of_each_group_have_the_accuracies_that_were_measured():
    results = fitted().by_group
    for own in three():
        result = results[own.name]
        for client in range(own.num_clients):
            x, y, _ = own.data[0].test.of(client)
            if len(y):
                accuracy = (result.model(client)(x).argmax(1) == y).double().mean().item()
                assert result.by_client[client] == pytest.approx(accuracy)


def saved(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("options", "evaluation"),
    [
        (OFTEN, EVERY_SECOND),
        (OFTEN, replace(EVERY_SECOND, select="best")),
        (replace(OFTEN, save="metrics"), EVERY_SECOND),
    ],
)
@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(stop_after, options, evaluation, tmp_path):
    how = {"options": options, "evaluation": evaluation}
    whole = fitted(folder=tmp_path / "whole", **how)
    broken = glocal.Run(
        experiment(evaluation=evaluation), folder=tmp_path / "broken", options=options
    )
    rounds = iter(broken)
    for _ in range(stop_after):
        next(rounds)
    rounds.close()
    resumed = fitted(folder=tmp_path / "broken", **how)
    assert same(whole, resumed)
    assert saved(tmp_path / "broken") == saved(tmp_path / "whole")


def test_a_crash_without_warning_goes_on_from_the_last_checkpoint(tmp_path):
    """A kill leaves rows after the checkpoint, and half a row."""
    whole = fitted(folder=tmp_path / "whole")
    rounds = iter(glocal.Run(experiment(), folder=tmp_path / "broken", options=OFTEN))
    for _ in range(4):
        next(rounds)
    # the disk after four rounds; the checkpoint is of round three
    shutil.copytree(tmp_path / "broken", tmp_path / "crashed")
    with (tmp_path / "crashed/rows.jsonl").open("a") as rows:
        rows.write('{"group": "ve')
    resumed = fitted(folder=tmp_path / "crashed")
    assert same(whole, resumed)
    assert saved(tmp_path / "whole") == saved(tmp_path / "crashed")


def test_a_stop_while_rows_are_written_loses_none(tmp_path, monkeypatch):
    calls = []

    def interrupted(path, rows):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        files.append_rows(path, rows)

    whole = fitted(folder=tmp_path / "whole")
    monkeypatch.setattr("glocal.federate.checkpoint.append_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted(folder=tmp_path / "stopped")
    monkeypatch.undo()
    assert read_metadata(tmp_path / "stopped/checkpoint.safetensors")["done"] == 2
    assert same(whole, fitted(folder=tmp_path / "stopped"))
    assert saved(tmp_path / "whole") == saved(tmp_path / "stopped")


def test_a_longer_plan_continues_a_finished_run_on_the_engines_it_began_with(tmp_path):
    plain = {"options": glocal.Options(fused=False)}
    fitted(plan=replace(PLAN, rounds=2), folder=tmp_path, **plain)
    longer, whole = fitted(folder=tmp_path, **plain), fitted(**plain)
    assert same(longer, whole)
    assert [each.ledger for each in longer.groups] == [each.ledger for each in whole.groups]
    assert len(read_metadata(tmp_path / "checkpoint.safetensors")["engines"]) == 3


def three_with_other_data():
    clients = [(torch.randn(9, 3), torch.arange(9) % 3)] * 3
    other = glocal.FederatedData.from_tensors(clients)
    return [*three()[:2], group("short", data=(other,))]


@pytest.mark.parametrize(
    ("others", "settings", "message"),
    [
        (lambda: three()[:2], {}, r"another groups"),
        (three, {"plan": replace(PLAN, clients_per_round=3)}, "another plan.clients_per_round"),
        (three, {"seeds": (3,)}, "another seeds"),
        (three_with_other_data, {}, "another data"),
    ],
)
def test_a_run_is_not_resumed_with_something_else(others, settings, message, tmp_path):
    fitted(folder=tmp_path)
    with pytest.raises(InputError, match=message):
        fitted(others(), folder=tmp_path, **settings)


def test_a_run_is_not_resumed_with_another_network_of_one_group(tmp_path, monkeypatch):
    fitted(folder=tmp_path)
    other = (lambda width: nn.Sequential(nn.Linear(4, width), nn.ReLU()), (4,))
    monkeypatch.setitem(ENCODERS, "short", other)
    with pytest.raises(InputError, match=r"another tasks.short.model.module.* given .*4"):
        fitted(folder=tmp_path)


def test_shared_parts_that_differ_are_refused_with_both_shapes():
    with pytest.raises(InputError) as refused:
        experiment([group("vector"), group("image", width=7)])
    assert "'vector' and 'image' do not share the same tensors" in str(refused.value)
    assert "'1.weight' is (3, 8) torch.float32 and (3, 7) torch.float32" in str(refused.value)
    assert "1.bias" not in str(refused.value)


def test_a_tensor_that_only_one_group_shares_is_refused_by_name():
    everything = glocal.LGFedAvg(task_of("image"), optimizer=SGD, shared="*")
    with pytest.raises(InputError, match=r"'image' runs .* but 'vector' runs"):
        experiment([group("vector"), group("image", algorithm=everything)])
    model = nn.Sequential(nn.Sequential(nn.Linear(3, 8)), nn.Linear(8, 3), nn.Linear(3, 3))
    longer = glocal.LGFedAvg(glocal.classification(model), optimizer=SGD, local="0")
    with pytest.raises(InputError, match=r"'2\.bias' is absent and \(3,\) torch\.float32"):
        experiment([group("vector"), group("short", algorithm=longer)])


def other_algorithm():
    return [
        group("image"),
        group("short", algorithm=glocal.LocalOnly(task_of("short"), optimizer=SGD)),
    ]


def other_aggregation():
    by_clients = glocal.LGFedAvg(
        task_of("short"), optimizer=SGD, local="0", aggregation=glocal.Mean(by="clients")
    )
    return [group("image"), group("short", algorithm=by_clients)]


def too_many_classes():
    clients = [(torch.zeros(9, 3), torch.arange(9))] * 4
    return [group("image"), group("short", data=(glocal.FederatedData.from_tensors(clients),))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "there are no groups; give at least one"),
        (lambda: [group("image"), group("image")], "2 are called 'image'"),
        (lambda: [replace(group("image"), name="a/b")], "'a/b' was given as a name"),
        (other_algorithm, "'short' runs LocalOnly.* but 'image' runs LGFedAvg"),
        (other_aggregation, "'short' runs LGFedAvg.*clients.* but 'image' runs LGFedAvg"),
        (
            lambda: [group("image"), group("short", data=(data_of("vector"),))],
            r"group 'short': model: it cannot take inputs \(6,\)",
        ),
        (
            too_many_classes,
            r"group 'short': data: client 0 has the .* label \d, but the model has 3 outputs",
        ),
        (
            lambda: [group("image"), group("short", params=({"other": torch.zeros(1)},))],
            "group 'short': its params are of another model",
        ),
        (lambda: [group("image")], "clients_per_round is 4, but there are 2 clients"),
        (
            lambda: [group("image", data=(data_of("image"),) * 2)],
            "2 data sets were given for 1 seeds",
        ),
    ],
)
def test_groups_that_cannot_train_together_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        fitted(make())


def test_selection_without_validation_data_is_refused_and_the_group_named():
    bare = glocal.FederatedData.from_tensors(
        [(torch.randn(9, 3), torch.arange(9) % 3)] * 2, validation=0.0
    )
    together = [group("image"), group("short", data=(bare,))]
    message = "group 'short': evaluation: select = 'best' needs validation data"
    with pytest.raises(InputError, match=message):
        fitted(together, evaluation=replace(EVERY_SECOND, select="best"))


def test_training_that_diverges_for_everybody_ends_with_a_clear_line():
    wild = [
        group(
            name, algorithm=glocal.LGFedAvg(task_of(name), optimizer=glocal.SGD(lr=1e30), local="0")
        )
        for name in ("image", "short")
    ]
    with pytest.raises(
        DivergedError, match=r"training diverged in round .* lower the learning rate"
    ):
        fitted(wild, plan=glocal.Plan(9, 5, batch_size=2))


def test_a_group_starts_from_its_params():
    own = group("short")
    start = trees.zeros_like(own.initial_params(0))
    state, _ = next(rounds_of([group("short", params=(start,))], glocal.Plan(1, 1)))
    assert trees.same_bits(state.private[0].initial, own.algorithm.init(start).private)


def test_saved_models_of_each_group_load_into_its_network(tmp_path):
    result = fitted(folder=tmp_path)
    for own in three():
        models = tmp_path / "models" / own.name / "seed-0"
        trained = [
            client for client, times in enumerate(result.by_group[own.name].times_sampled) if times
        ]
        for client in trained:
            tensors = load_file(models / f"client-{client:04d}.safetensors")
            assert trees.same_bits(tensors, result.state_dict(client, group=own.name))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("engine", ["auto", "vmapped"])
def test_groups_on_a_gpu_agree_with_one_client_at_a_time_on_a_cpu(engine, tmp_path):
    how = {"plan": replace(PLAN, clients_per_round=2)}
    on_gpu = replace(OFTEN, device="cuda", engine=engine)
    there = fitted(folder=tmp_path, options=on_gpu, **how)
    assert same(there, fitted(options=on_gpu, **how))
    here = fitted(options=replace(OFTEN, engine="looped"), **how)
    for one, other in zip(there.groups, here.groups, strict=True):
        state = one.state.alone()
        on_cpu = state.to(torch.device("cpu"), state)
        assert world.gap(on_cpu, other.state.alone(), one.num_clients) < 1e-4
        assert one.ledger == other.ledger


def warm(groups, plan):
    options = glocal.Options(device="cpu", engine="looped")
    return glocal.warm_start_groups(groups, glocal.SGD(lr=0.1), plan, options=options)


def test_a_warm_start_gives_all_groups_one_shared_part_and_counts_its_traffic():
    plan = replace(PLAN, clients_per_round=2, rounds=2)
    started = warm(three(), plan)
    states = [own.algorithm.init(own.initial_params(0)) for own in started]
    assert all(trees.same_bits(state.shared, states[0].shared) for state in states)
    for cold, own in zip(three(), started, strict=True):
        private = own.algorithm.init(own.initial_params(0)).private
        assert not trees.same_bits(private, cold.algorithm.init(cold.initial_params(0)).private)
        whole = trees.nbytes(own.initial_params(0))
        assert own.spent[0].upload.bytes == own.spent[0].download.bytes == 2 * 2 * whole
    together = fitted(started, plan=replace(PLAN, first_round=2, rounds=1))
    for own in started:
        assert together.by_group[own.name].ledger.upload.bytes >= own.spent[0].upload.bytes


def test_a_warm_start_refuses_what_training_together_would():
    first, second = group("vector"), group("short", width=5)
    with pytest.raises(InputError, match="there are no groups"):
        warm([], PLAN)
    with pytest.raises(InputError, match="2 are called 'vector'"):
        warm([first, replace(second, name="vector")], PLAN)
    with pytest.raises(InputError, match="do not share the same tensors"):
        warm([first, second], PLAN)


def test_the_first_group_of_a_warm_start_is_plain_fedavg():
    plan, own = replace(PLAN, clients_per_round=2, rounds=2), three()[0]
    algorithm = glocal.FedAvg(own.algorithm.task, optimizer=glocal.SGD(lr=0.1))
    plain = glocal.fit(
        algorithm,
        own.data[0],
        rounds=2,
        clients_per_round=2,
        batch_size=5,
        engine="looped",
        progress=False,
    )
    assert trees.same_bits(warm([own], plan)[0].params[0], plain.group().state.shared)
