"""Kinds of client, with their own networks and inputs and one shared part, keep every promise."""

import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.algorithms.contract import unweighted
from glocal.core import files, trees
from glocal.core.errors import DivergedError, InputError
from glocal.core.files import read_metadata, read_rows
from glocal.core.sampling import sample_clients
from glocal.federate import kinds
from glocal.federate.fitting import Options
from glocal.federate.kinds import (
    Kind,
    begin_kinds,
    company,
    fit_kinds,
    simulate_kinds,
    train_kinds,
    warm_kinds,
)
from tests.support import world

EXAMPLES = Path(__file__).parents[2] / "examples"
PLAN = glocal.Plan(rounds=5, clients_per_round=4, batch_size=5)
OFTEN = Options(device="cpu", engine="vmapped", validate_every=2, checkpoint_every=3)
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


def kind(name, *, width=8, **changes):
    """One of three kinds: other encoders, other inputs, the same head."""
    encoder, shape = ENCODERS[name]
    model = world.seeded(
        lambda: nn.Sequential(encoder(width), nn.Linear(width, world.CLASSES)), seed=len(name)
    )
    generator = torch.Generator().manual_seed(len(name))
    clients = [
        (
            torch.randn(size, *shape, generator=generator),
            torch.randint(world.CLASSES, (size,), generator=generator),
        )
        for size in SIZES[name]
    ]
    split = glocal.Split.of(model, local="0")
    algorithm = glocal.lg_fedavg(
        glocal.cross_entropy(model), glocal.SGD(0.1, momentum=0.5), split=split
    )
    return replace(
        Kind(name, algorithm, model, glocal.FederatedData.from_tensors(clients)), **changes
    )


def three():
    return [kind(name) for name in ENCODERS]


def last(*, plan=PLAN, engine="vmapped", of=three):
    moment = deque(simulate_kinds(of(), plan, engine=engine), maxlen=1).pop()
    return {name: state for name, (state, _) in moment.items()}


def same(left, right):
    return left.keys() == right.keys() and all(
        world.same_bits(left[name], right[name], len(SIZES[name])) for name in left
    )


def test_uploads_of_all_kinds_have_the_same_names_and_shapes(monkeypatch):
    """Spied on at the gate: the shared tensors and nothing else, from every kind."""
    crossed = []

    def gate(uploads, shared):
        crossed.append({name: (tensor.shape[1:], tensor.dtype) for name, tensor in uploads.items()})
        return admit(uploads, shared)

    admit = kinds.admit
    monkeypatch.setattr("glocal.federate.kinds.admit", gate)
    last()
    assert len(crossed) > PLAN.rounds, "several kinds in a round"
    expected = {
        "1.weight": (torch.Size([3, 8]), torch.float32),
        "1.bias": (torch.Size([3]), torch.float32),
    }
    assert all(upload == expected for upload in crossed)


def test_an_upload_with_a_local_tensor_is_refused():
    leaky = kind("image")

    def leak(shared, private, work):
        update = leaky.algorithm.client_update(shared, private, work)
        return update._replace(upload={**update.upload, **update.private})

    leaks = replace(leaky, algorithm=leaky.algorithm._replace(client_update=leak))
    with pytest.raises(ValueError, match="an upload may hold the shared tensors and nothing else"):
        list(simulate_kinds([kind("vector"), leaks], glocal.Plan(1, 5), engine="vmapped"))


def test_one_kind_alone_is_fit_to_the_bit(tmp_path):
    own, plan = kind("image"), glocal.Plan(5, 2, batch_size=5)
    together = fit_kinds([own], plan, options=OFTEN, folder=tmp_path / "kinds")["image"]
    alone = glocal.fit(
        own.algorithm, own.model, own.federation, plan, options=OFTEN, folder=tmp_path / "fit"
    )
    assert world.same_bits(together.state, alone.state, 2)
    assert together.as_dict() == alone.as_dict()
    rows = [read_rows(tmp_path / folder / "rows.jsonl") for folder in ("kinds", "fit")]
    assert rows[0] == [{"kind": "image", **row} for row in rows[1]]


def test_batched_over_clients_equals_one_by_one():
    batched, looped = last(), last(engine="looped")
    assert all(world.gap(batched[name], looped[name], len(SIZES[name])) < 1e-5 for name in SIZES)


def test_each_kind_is_really_batched(monkeypatch):
    """One call per kind and round, with all of its sampled clients."""
    calls = []

    class Spied(kinds.Executor):
        def __call__(self, tasks, examples, round_index=0):
            calls.append((tuple(examples.x.shape[1:]), len(tasks), round_index))
            return super().__call__(tasks, examples, round_index)

    monkeypatch.setattr("glocal.federate.kinds.Executor", Spied)
    expected = []
    for moment in simulate_kinds(three(), PLAN, engine="vmapped"):
        for name, (_, report) in moment.items():
            count = len(report.sampled)
            if count:
                expected.append((ENCODERS[name][1], count, report.round_index))
    assert calls == expected


def test_the_average_is_over_all_kinds_weighted_by_examples(monkeypatch):
    """The uploads of one round of all clients, averaged by hand."""
    crossed, admit = [], kinds.admit
    monkeypatch.setattr(
        "glocal.federate.kinds.admit",
        lambda uploads, shared: crossed.append(uploads) or admit(uploads, shared),
    )
    states = last(plan=glocal.Plan(1, 8, batch_size=5))
    sizes = np.concatenate([own.federation.train.sizes for own in three()])
    for name in ("1.weight", "1.bias"):
        uploads = torch.cat([upload[name] for upload in crossed]).double()
        weighted = [size * upload for size, upload in zip(sizes, uploads, strict=True)]
        mean = sum(weighted) / sizes.sum()
        for state in states.values():
            assert torch.allclose(state.shared[name].double(), mean, atol=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_seed_others():
    assert same(last(), last())
    assert not same(last(), last(plan=replace(PLAN, seed=1)))


def test_a_kind_added_at_the_end_does_not_change_the_orders_of_the_others():
    """In a first round of all clients, private parts are the same with and without it."""
    few = last(plan=glocal.Plan(1, 5, batch_size=5), of=lambda: three()[:2], engine="looped")
    more = last(plan=glocal.Plan(1, 8, batch_size=5), engine="looped")
    for name in few:
        for client in range(len(SIZES[name])):
            assert trees.same_bits(few[name].private.of(client), more[name].private.of(client))


def test_clients_that_are_not_sampled_keep_their_bits():
    before = {own.name: own.algorithm.init(own.start())[1] for own in three()}
    rows = {name: [tree] * len(SIZES[name]) for name, tree in before.items()}
    for moment in simulate_kinds(three(), PLAN, engine="vmapped"):
        for name, (state, report) in moment.items():
            now = [state.private.of(client) for client in range(len(SIZES[name]))]
            changed = []
            for client, tree in enumerate(now):
                if not trees.same_bits(tree, rows[name][client]):
                    changed.append(client)
            assert changed == report.sampled.tolist()
            rows[name] = now


def test_clients_are_sampled_over_all_kinds():
    firsts = dict(zip(SIZES, (0, 3, 5), strict=True))
    for moment in simulate_kinds(three(), PLAN, engine="vmapped"):
        numbers = []
        for name, (_, report) in moment.items():
            numbers += (firsts[name] + report.sampled).tolist()
        (round_index,) = {report.round_index for _, report in moment.values()}
        assert numbers == sample_clients(PLAN, 8, round_index).tolist()
        shared = [state.shared for state, _ in moment.values()]
        assert all(trees.same_bits(tree, shared[0]) for tree in shared)


def test_the_ledgers_have_the_shared_tree_for_each_sampled_client():
    results = fit_kinds(three(), PLAN, options=OFTEN)
    shared = trees.nbytes(results["image"].state.shared)
    sampled = {name: sum(result.times_sampled) for name, result in results.items()}
    assert sum(sampled.values()) == PLAN.rounds * PLAN.clients_per_round
    for direction in ("upload", "download"):
        traffic = [getattr(result.ledger, direction).bytes for result in results.values()]
        assert sum(traffic) == PLAN.rounds * PLAN.clients_per_round * shared
    for name, result in results.items():
        assert result.ledger.upload.bytes == sampled[name] * shared


def test_a_round_without_clients_of_a_kind_has_no_loss_for_it(tmp_path):
    fit_kinds(three(), replace(PLAN, clients_per_round=1), options=OFTEN, folder=tmp_path)
    rows = read_rows(tmp_path / "rows.jsonl")
    assert len(rows) == 3 * PLAN.rounds
    assert sum(row["loss"] is not None for row in rows) == PLAN.rounds


def test_the_models_of_each_kind_have_the_accuracies_that_were_measured():
    for own, result in zip(three(), fit_kinds(three(), PLAN, options=OFTEN).values(), strict=True):
        for client in range(own.federation.num_clients):
            x, y, _ = own.federation.test.of(client)
            if len(y):
                accuracy = (result.model(client)(x).argmax(1) == y).double().mean().item()
                assert result.accuracies[client] == pytest.approx(accuracy)


@pytest.mark.parametrize(
    "options", [OFTEN, replace(OFTEN, select="best"), replace(OFTEN, save="metrics")]
)
@pytest.mark.parametrize("stop_after", [1, 4])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(stop_after, options, tmp_path):
    whole = fit_kinds(three(), PLAN, options=options, folder=tmp_path / "whole")
    experiments = company(three(), PLAN)
    progress = begin_kinds(experiments, options, tmp_path / "broken")
    rounds = train_kinds(experiments, options, progress, tmp_path / "broken")
    for _ in range(stop_after):
        next(rounds)
    rounds.close()
    resumed = fit_kinds(three(), PLAN, options=options, folder=tmp_path / "broken")
    assert same({n: r.state for n, r in whole.items()}, {n: r.state for n, r in resumed.items()})
    assert [result.as_dict() for result in whole.values()] == [
        result.as_dict() for result in resumed.values()
    ]
    paths = [path for path in (tmp_path / "whole").rglob("*") if path.is_file()]
    assert len(paths) == 4 + (8 if options.save == "everything" else 0)
    for path in paths:
        other = tmp_path / "broken" / path.relative_to(tmp_path / "whole")
        assert path.read_bytes() == other.read_bytes()


def test_a_crash_without_warning_goes_on_from_the_last_checkpoint(tmp_path):
    """A kill leaves rows after the checkpoint, and half a row."""
    whole = fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path / "whole")
    experiments, crashed = company(three(), PLAN), tmp_path / "crashed"
    progress = begin_kinds(experiments, OFTEN, tmp_path / "broken")
    rounds = train_kinds(experiments, OFTEN, progress, tmp_path / "broken")
    for _ in range(4):
        next(rounds)
    crashed.mkdir()  # the disk after four rounds; the checkpoint is of round three
    for file in ("rows.jsonl", "checkpoint.safetensors"):
        (crashed / file).write_bytes((tmp_path / "broken" / file).read_bytes())
    with (crashed / "rows.jsonl").open("a") as rows:
        rows.write('{"kind": "ve')
    resumed = fit_kinds(three(), PLAN, options=OFTEN, folder=crashed)
    assert same({n: r.state for n, r in whole.items()}, {n: r.state for n, r in resumed.items()})
    assert (tmp_path / "whole/rows.jsonl").read_bytes() == (crashed / "rows.jsonl").read_bytes()


def test_a_stop_while_rows_are_written_loses_none(tmp_path, monkeypatch):
    calls = []

    def interrupted(path, rows):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        files.append_rows(path, rows)

    whole = fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path / "whole")
    monkeypatch.setattr("glocal.federate.checkpoint.append_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path / "stopped")
    monkeypatch.undo()
    assert read_metadata(tmp_path / "stopped/checkpoint.safetensors")["done"] == 2
    resumed = fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path / "stopped")
    assert same({n: r.state for n, r in whole.items()}, {n: r.state for n, r in resumed.items()})
    assert (tmp_path / "whole/rows.jsonl").read_bytes() == (
        tmp_path / "stopped/rows.jsonl"
    ).read_bytes()


def test_a_longer_plan_continues_a_finished_run_on_the_engines_it_began_with(tmp_path):
    plain = Options(fused=False)
    fit_kinds(three(), replace(PLAN, rounds=2), options=plain, folder=tmp_path)
    longer, whole = (
        fit_kinds(three(), PLAN, options=plain, folder=tmp_path),
        fit_kinds(three(), PLAN, options=plain),
    )
    assert same({n: r.state for n, r in longer.items()}, {n: r.state for n, r in whole.items()})
    assert [result.ledger for result in longer.values()] == [
        result.ledger for result in whole.values()
    ]
    assert len(read_metadata(tmp_path / "checkpoint.safetensors")["engine"]) == 3


def three_with_other_data():
    clients = [(torch.randn(9, 3), torch.arange(9) % 3)] * 3
    return [*three()[:2], kind("short", federation=glocal.FederatedData.from_tensors(clients))]


@pytest.mark.parametrize(
    ("others", "plan", "message"),
    [
        (
            lambda: three()[:2],
            PLAN,
            r"another kinds \(\['vector', 'image', 'short'\]\) than the one given",
        ),
        (three, replace(PLAN, clients_per_round=3), "another plan"),
        (three, replace(PLAN, seed=3), "another seeds"),
        (three_with_other_data, PLAN, "another data"),
    ],
)
def test_a_run_is_not_resumed_with_something_else(others, plan, message, tmp_path):
    fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path)
    with pytest.raises(InputError, match=message):
        fit_kinds(others(), plan, options=OFTEN, folder=tmp_path)


def test_a_run_is_not_resumed_with_another_network_of_one_kind(tmp_path, monkeypatch):
    fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path)
    other = (lambda width: nn.Sequential(nn.Linear(4, width), nn.ReLU()), (4,))
    monkeypatch.setitem(ENCODERS, "short", other)
    before, after = r"private '0\.0\.weight' \(8, 3\)", r".* \(8, 4\)"
    message = rf"another model \({before}\) than the one given \({after}\)"
    with pytest.raises(InputError, match=message):
        fit_kinds(three(), PLAN, options=OFTEN, folder=tmp_path)


def test_shared_parts_that_differ_are_refused_with_both_shapes():
    with pytest.raises(InputError) as refused:
        fit_kinds([kind("vector"), kind("image", width=7)], PLAN)
    assert "'vector' and 'image' do not share the same tensors" in str(refused.value)
    assert "'1.weight' is (3, 8) torch.float32 and (3, 7) torch.float32" in str(refused.value)
    assert "1.bias" not in str(refused.value)


def test_a_tensor_that_only_one_kind_shares_is_refused_by_name():
    own = kind("image")
    split = glocal.Split.of(own.model, shared="*")
    objective = glocal.cross_entropy(own.model)
    everything = glocal.lg_fedavg(objective, glocal.SGD(0.1), split=split)
    message = r"'0\.0\.weight' is absent and \(3, 1, 3, 3\) torch\.float32"
    with pytest.raises(InputError, match=message):
        fit_kinds([kind("vector"), replace(own, algorithm=everything)], PLAN)


def other_algorithm():
    own = kind("short")
    algorithm = glocal.local_only(glocal.cross_entropy(own.model), glocal.SGD(0.1))
    return [kind("image"), replace(own, algorithm=algorithm)]


def too_many_classes():
    clients = [(torch.zeros(9, 3), torch.arange(9))] * 4
    return [kind("image"), kind("short", federation=glocal.FederatedData.from_tensors(clients))]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (list, "kinds: none given; give at least one Kind"),
        (lambda: [kind("image"), kind("image")], "2 are called 'image'"),
        (lambda: [replace(kind("image"), name="a/b")], "'a/b' was given as a name"),
        (
            other_algorithm,
            r"'short' runs local_only \(by average\), but 'image' runs lg_fedavg \(by average\); "
            "run one algorithm on all kinds",
        ),
        (
            lambda: [kind("image"), kind("short", algorithm=unweighted(kind("short").algorithm))],
            "'short' runs lg_fedavg .by un",
        ),
        (
            lambda: [kind("image"), kind("short", federation=kind("vector").federation)],
            r"kind 'short': model: it cannot take inputs of shape \(6,\)",
        ),
        (
            too_many_classes,
            r"kind 'short': data: client 0 has the .* label \d, but the model has 3 outputs",
        ),
        (
            lambda: [kind("image"), kind("short", params={"other": torch.zeros(1)})],
            "kind 'short': its params are of another model",
        ),
        (lambda: [kind("image")], "clients_per_round is 4, but there are 2 clients"),
    ],
)
def test_kinds_that_cannot_train_together_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        fit_kinds(make(), PLAN)


def test_selection_without_validation_data_is_refused_and_the_kind_named():
    bare = glocal.FederatedData.from_tensors(
        [(torch.randn(9, 3), torch.arange(9) % 3)] * 2, validation=0.0
    )
    together = [kind("image"), kind("short", federation=bare)]
    message = "kind 'short': options: select = 'best' needs validation data"
    with pytest.raises(InputError, match=message):
        fit_kinds(together, PLAN, options=Options(select="best"))


def test_the_kind_whose_training_diverges_is_named():
    own = kind("short")
    split, objective = glocal.Split.of(own.model, local="0"), glocal.cross_entropy(own.model)
    wild = glocal.lg_fedavg(objective, glocal.SGD(1e30), split=split)
    together = [kind("image"), replace(own, algorithm=wild)]
    with pytest.raises(DivergedError, match="kind 'short': training diverged in round"):
        fit_kinds(together, glocal.Plan(9, 5, batch_size=2), options=OFTEN)


def test_a_kind_starts_from_its_params():
    start = {name: torch.zeros_like(tensor) for name, tensor in kind("short").start().items()}
    state, _ = next(
        simulate_kinds([kind("short", params=start)], glocal.Plan(1, 1), engine="vmapped")
    )["short"]
    assert trees.same_bits(state.private.initial, kind("short").algorithm.init(start)[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("engine", ["auto", "vmapped"])
def test_kinds_on_a_gpu_agree_with_one_client_at_a_time_on_a_cpu(engine, tmp_path):
    plan, options = (
        replace(PLAN, clients_per_round=2),
        Options(device="cuda", engine=engine, validate_every=2, checkpoint_every=3),
    )
    there = fit_kinds(three(), plan, options=options, folder=tmp_path)
    again = fit_kinds(three(), plan, options=options)
    here = fit_kinds(three(), plan, options=replace(options, device="cpu", engine="looped"))
    assert same({n: r.state for n, r in there.items()}, {n: r.state for n, r in again.items()})
    for name, result in there.items():
        state = result.state.to(torch.device("cpu"), None)
        assert world.gap(state, here[name].state, len(SIZES[name])) < 1e-4
        assert result.ledger == here[name].ledger


def test_a_warm_start_gives_all_kinds_one_shared_part_and_counts_its_traffic():
    plan = replace(PLAN, clients_per_round=2, rounds=2)
    warm = warm_kinds(
        three(), glocal.SGD(0.1), plan, options=Options(device="cpu", engine="looped")
    )
    trees_of = [kind.algorithm.init(kind.start()) for kind in warm]
    assert all(trees.same_bits(shared, trees_of[0][0]) for shared, _ in trees_of)
    for cold, kind in zip(three(), warm, strict=True):
        private = kind.algorithm.init(kind.start())[1]
        assert not trees.same_bits(private, cold.algorithm.init(cold.start())[1])
        whole = trees.nbytes(kind.start())
        assert kind.spent.upload.bytes == kind.spent.download.bytes == 2 * 2 * whole
    together = fit_kinds(
        warm, replace(PLAN, first_round=2, rounds=1), options=Options(device="cpu", engine="looped")
    )
    for kind in warm:
        assert together[kind.name].ledger.upload.bytes >= kind.spent.upload.bytes


def test_a_warm_start_refuses_what_training_together_would():
    first, second = kind("vector"), kind("short", width=5)
    with pytest.raises(InputError, match="none given"):
        warm_kinds([], glocal.SGD(0.1), PLAN)
    with pytest.raises(InputError, match="2 are called 'vector'"):
        warm_kinds([first, replace(second, name="vector")], glocal.SGD(0.1), PLAN)
    with pytest.raises(InputError, match="do not share the same tensors"):
        warm_kinds((each for each in (first, second)), glocal.SGD(0.1), PLAN)


def test_simulate_kinds_checks_the_data_too():
    odd = replace(kind("short"), federation=kind("vector").federation)
    with pytest.raises(InputError, match="kind 'short': model: it cannot take inputs"):
        next(simulate_kinds([kind("vector"), odd], PLAN))


def test_the_first_kind_of_a_warm_start_is_plain_fedavg():
    plan, options = replace(PLAN, clients_per_round=2, rounds=2), Options(engine="looped")
    kind = three()[0]
    plain = glocal.fit(
        glocal.fedavg(glocal.cross_entropy(kind.model), glocal.SGD(0.1)),
        kind.model,
        kind.federation,
        plan,
        options=options,
    )
    assert trees.same_bits(
        warm_kinds([kind], glocal.SGD(0.1), plan, options=options)[0].start(), plain.state.shared
    )


@pytest.mark.parametrize(
    ("example", "settings"),
    [
        ("kinds_mnist.py", ["--source", "digits", "--clients", "2"]),
        ("kinds_tabular.py", ["--partitions", "1"]),
    ],
)
def test_an_example_runs(example, settings, tmp_path):
    rounds = ["--warm", "2", "--rounds", "2", "--engine", "vmapped"]
    command = [sys.executable, str(EXAMPLES / example), *settings, *rounds]
    process = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120
    )
    table = [line.split() for line in process.stdout.splitlines() if "%" in line]
    assert len(table) == 3
    assert all(row[0] and row[-1] == "MB" for row in table)
