"""Every engine gives the numbers of the plain loop, and falls back in sight where it cannot run."""

import logging
import os
import shutil
import signal
import time
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal import algorithms
from glocal.algorithms import fedavg
from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.errors import GlocalWarning, InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, PartitionedOptimizer, adam, sgd
from glocal.core.sampling import Plan, pad_and_stack
from glocal.core.training import Work, cross_entropy
from glocal.datasets.federated import from_tensors
from glocal.engines import EngineConfig, ExecutionPlan, Executor, planning
from glocal.engines.batched import (
    BatchedTraining,
    FusedGpuTraining,
    TracedBatchedTraining,
    TrainingRequest,
)
from glocal.engines.config import cache_plan, load_cached_plan
from glocal.engines.conv_matmul import ConvAsMatmul
from glocal.engines.graphed import _pad_tasks, _round_up
from glocal.engines.looped import LoopedEngine
from glocal.engines.planning import ProbeSetup, plan_execution
from glocal.engines.protocol import ClientTask, unbind_rows
from glocal.engines.traced import TracedTraining
from glocal.engines.vmapped import stack_rows, vmap_clients
from glocal.engines.workers import ProcessPool
from glocal.federate.fitting import Options
from glocal.federate.rounds import Seat, initial_state, simulate, simulate_seeds
from tests.support import world

PLAN = Plan(rounds=2, clients_per_round=4, local_epochs=2, batch_size=5)
every_algorithm = pytest.mark.parametrize("name", algorithms.__all__)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="there is no compiler here"
)


def images():
    """A network with a convolution on images, for all that is special about them."""
    body = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(4 * 3 * 4, world.CLASSES))


MODELS = {**world.MODELS, "images": images}
every_model = pytest.mark.parametrize("kind", MODELS)


def run(name, kind, engine, *, plan=PLAN, optimizer=None):
    model = world.seeded(MODELS[kind])
    algorithm = world.algorithm(name, model, optimizer=optimizer)
    return world.last(
        simulate(algorithm, params_of(model), world.federation().train, plan, engine=engine)
    )[0]


@every_algorithm
@every_model
@pytest.mark.parametrize("fused", [True, False])
def test_workers_give_what_the_loop_gives(name, kind, fused):
    looped = run(name, kind, "looped")
    assert (
        world.gap(run(name, kind, EngineConfig("workers", workers=2, fused=fused)), looped) < 1e-5
    )


@pytest.mark.parametrize("name", ["lg_fedavg", "mtl"])
@every_model
@pytest.mark.parametrize("conv_as_matmul", [True, False])
def test_traced_steps_of_many_devices_give_what_the_loop_gives(name, kind, conv_as_matmul):
    """What a GPU captures and compiles, on a CPU: the same steps beneath vmap."""
    model = world.seeded(MODELS[kind])
    algorithm = world.algorithm(name, model)
    state, train = initial_state(algorithm, params_of(model)), world.federation().train
    tasks = [
        ClientTask(
            state.shared, state.private.initial, rows.reshape(1, -1)[:, :5].repeat(3, 0), key
        )
        for key, rows in enumerate(train.rows)
    ]
    tasks[1] = tasks[1]._replace(order=np.full_like(tasks[1].order, -1))
    tasks[1].order[:2, :2] = train.rows[1][:2]
    orders = pad_and_stack([task.order for task in tasks])
    trainer = BatchedTraining(TracedBatchedTraining(conv_as_matmul=conv_as_matmul))
    work = Work(
        train.examples,
        torch.from_numpy(orders),
        torch.tensor([task.key for task in tasks]),
        torch.tensor(3),
        2,
        trainer,
    )
    rows = stack_rows([task.shared for task in tasks]), stack_rows([task.private for task in tasks])
    together = vmap_clients(algorithm.client_update, *rows, work)
    alone = LoopedEngine(algorithm.client_update)(tasks, train.examples, 3).stacked()
    for part in ("upload", "private"):
        assert world.distance(getattr(together, part), getattr(alone, part)) < 1e-5
    assert torch.allclose(together.loss, alone.loss, atol=1e-5)


@pytest.mark.parametrize(
    "optimizer", [adam(0.01), sgd(0.1), sgd(0.1, momentum=0.9, weight_decay=0.1, lr_decay=0.5)]
)
@pytest.mark.parametrize("fused", [True, False])
def test_workers_know_every_optimiser(optimizer, fused):
    looped = run("lg_fedavg", "plain", "looped", optimizer=optimizer)
    assert (
        world.gap(
            run("lg_fedavg", "plain", EngineConfig("workers", fused=fused), optimizer=optimizer),
            looped,
        )
        < 1e-5
    )


@pytest.mark.parametrize("kind", ["plain", "dropout"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_number_of_workers_changes_no_bit(kind, fused):
    states = [
        run("lg_fedavg", kind, EngineConfig("workers", workers=number, fused=fused))
        for number in (1, 2, 3)
    ]
    assert world.same_bits(states[0], states[1])
    assert world.same_bits(states[0], states[2])


def test_workers_run_seeds_side_by_side():
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    train = world.federation().train
    for engine in (EngineConfig("workers", fused=False), EngineConfig("workers")):
        executor = Executor(algorithm.client_update, engine=engine)
        seats = [
            Seat(
                Plan(2, 3, batch_size=5, seed=seed),
                train,
                initial_state(algorithm, params_of(model)),
            )
            for seed in (0, 1)
        ]
        together = [state for state, _ in world.last(simulate_seeds(algorithm, seats, executor))]
        executor.close()
        for seat, state in zip(seats, together, strict=True):
            alone = world.last(
                simulate(algorithm, params_of(model), train, seat.plan, engine=engine)
            )[0]
            assert world.same_bits(state, alone)


def test_an_algorithm_that_draws_numbers_of_torchs_own_gets_the_same_ones_everywhere():
    model = world.seeded(world.plain)
    plain = world.algorithm("fedavg", model)

    def noisy(shared, private, work):
        update = plain.client_update(shared, private, work)
        return update._replace(
            upload={
                name: tensor + torch.randn_like(tensor) for name, tensor in update.upload.items()
            }
        )

    algorithm, train = plain._replace(client_update=noisy), world.federation().train
    engines = (
        "looped",
        EngineConfig("workers", workers=1),
        EngineConfig("workers", workers=2),
        EngineConfig("workers", fused=False),
    )
    states = [
        world.last(simulate(algorithm, params_of(model), train, PLAN, engine=engine))[0]
        for engine in engines
    ]
    assert all(world.gap(states[0], state) < 1e-5 for state in states)


def crew(function, tasks_of=4, **options):
    """A crew at work, its tasks and their examples."""
    train = world.federation().train
    model = world.seeded(world.plain)
    shared = params_of(model)
    tasks = [
        ClientTask(shared, {}, train.rows[device].reshape(1, -1)) for device in range(tasks_of)
    ]
    return ProcessPool(function, workers=2, trainer=None, **options), tasks, train.examples


def test_a_mistake_in_a_worker_is_raised_by_the_parent():
    def failing(shared, private, work):
        if work.order.numel() > 20:
            raise ValueError("too many rows for me")
        return shared

    workers, tasks, examples = crew(failing)
    tasks.sort(key=lambda task: task.order.size)
    with pytest.raises(ValueError, match="too many rows for me"):
        workers(tasks, examples, 0)
    assert workers.processes is None


def test_a_killed_worker_is_one_line():
    def dying(shared, private, work):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return shared

    parent = os.getpid()
    workers, tasks, examples = crew(dying)
    with pytest.raises(
        InputError, match=r"a worker was killed \(is the memory full\?\); use fewer"
    ):
        workers(tasks, examples, 0)


def test_workers_are_gone_when_they_are_dismissed():
    workers, tasks, examples = crew(lambda shared, private, work: shared)
    workers(tasks, examples, 0)
    pids = list(workers.processes.pids)
    assert len(pids) == 2
    workers.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_do_not_outlive_their_parent(tmp_path):
    """Also if it had no time for a last word."""
    pid = os.fork()
    if pid == 0:
        workers, tasks, examples = crew(lambda shared, private, work: shared)
        workers(tasks, examples, 0)
        (tmp_path / "pids").write_text(" ".join(map(str, workers.processes.pids)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    waited = time.monotonic() + 10
    for worker in map(int, (tmp_path / "pids").read_text().split()):
        while running(worker) and time.monotonic() < waited:
            time.sleep(0.05)
        assert not running(worker)


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_result_that_does_not_fit_comes_another_way():
    def large(shared, private, work):
        return torch.arange(3_000_000) + work.key

    workers, tasks, examples = crew(large)
    found = workers(
        [task._replace(key=key) for key, task in enumerate(tasks)], examples, 0
    ).stacked()
    workers.close()
    assert torch.equal(found, torch.arange(3_000_000) + torch.arange(4)[:, None])


def test_a_step_is_traced_once_and_slopes_go_straight_into_velocities():
    model = world.seeded(world.plain)
    trainer = TracedTraining()
    x, y = world.clients()[0]
    order = torch.arange(20).reshape(4, 5)
    work = Work(
        glocal.datasets.federated.Examples(x, y), order, torch.tensor(0), torch.tensor(0), 4
    )
    assert trainer(cross_entropy(model), params_of(model), work, sgd(0.1, momentum=0.5)) is not None
    (step,) = trainer.steps.values()
    assert step.__self__.code.count("Tensor_addmm_(") == 2
    assert "torch.sub(" not in step.__self__.code


def test_what_cannot_be_traced_is_run_as_it_is():
    model = world.seeded(world.Branching)
    algorithm = world.algorithm("fedavg", model)
    train = world.federation().train
    states = [
        world.last(simulate(algorithm, params_of(model), train, PLAN, engine=engine))[0]
        for engine in ("looped", EngineConfig("workers", fused=False))
    ]
    assert world.gap(*states) < 1e-6


def test_graphs_without_a_gpu_fall_back_in_sight():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.warns(
        GlocalWarning, match="graphs need an NVIDIA GPU.*now all clients in one batched step"
    ):
        state = run("lg_fedavg", "plain", "graphed")
    assert world.gap(state, run("lg_fedavg", "plain", "looped")) < 1e-5


def test_without_a_compiler_general_steps_run_in_sight(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    with caplog.at_level(logging.INFO, "glocal"):
        state = run("lg_fedavg", "plain", EngineConfig("workers"))
    assert "no fused steps" in caplog.text
    assert "compiler" in caplog.text
    assert world.gap(state, run("lg_fedavg", "plain", "looped")) < 1e-5


def test_the_line_says_which_layer_the_fused_steps_do_not_know(caplog):
    with caplog.at_level(logging.INFO, "glocal"):
        run("lg_fedavg", "batch norm", EngineConfig("workers"))
    (line,) = [record.message for record in caplog.records]
    assert (
        line
        == "engine: 2 processes, one client at a time each (no fused steps: layer '1' is BatchNorm1d on (8,))".replace(
            "2", str(EngineConfig().num_workers), 1
        )
    )


def bench(kind="batch norm", engine="auto", steps=4):
    model = world.seeded(MODELS[kind])
    algorithm = world.algorithm("fedavg", model)
    train = world.federation().train
    state = initial_state(algorithm, params_of(model))
    tasks = [
        ClientTask(state.shared, {}, np.resize(train.rows[device], (steps, 5))) for device in (0, 2)
    ]
    return ProbeSetup(algorithm.client_update, EngineConfig(engine), tasks, train.examples, 0)


@needs_compiler
def test_auto_takes_fused_steps_where_it_can():
    assert plan_execution(bench("plain"), num_calls=1, trains=True)[0] == ExecutionPlan(
        "workers", fused=True, reason="they know all its layers"
    )


@every_algorithm
def test_chunks_of_one_give_what_the_loop_gives(name):
    assert (
        world.gap(
            run(name, "plain", EngineConfig("vmapped", chunk_size=1)), run(name, "plain", "looped")
        )
        < 1e-5
    )


def test_no_more_is_tried_out_than_a_chunk():
    alone = bench()._replace(config=EngineConfig(chunk_size=1))
    assert (len(alone.probe_tasks()), len(bench().probe_tasks())) == (1, 2)
    assert alone.cache_key() != bench().cache_key()


def test_auto_does_not_measure_for_a_short_run():
    assert plan_execution(bench(), num_calls=2, trains=True)[0] == ExecutionPlan(
        "vmapped", reason="too short a run to measure"
    )


def test_auto_measures_for_a_long_run_says_so_and_remembers(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    first = plan_execution(bench(), num_calls=1000, trains=True)[0]
    assert "measured, ms a step: workers" in first.reason
    assert load_cached_plan(bench().cache_key()) == first
    cache_plan(bench().cache_key(), ExecutionPlan("looped", reason="because"))
    assert plan_execution(bench(), num_calls=1000, trains=True)[0] == ExecutionPlan(
        "looped", reason="because"
    )


@pytest.mark.parametrize(("long", "calls", "lines"), [(-1, 4, 1), (1000, 8, 0)])
def test_what_takes_long_is_tried_no_more_than_twice_and_told(
    monkeypatch, caplog, long, calls, lines
):
    caplog.set_level("INFO", "glocal")
    form = Mock()
    monkeypatch.setattr(planning, "build_engine", lambda *_: form)
    monkeypatch.setattr(planning, "_LONG_SECONDS", long)
    assert (
        "measured, ms a step: vmapped"
        in planning._fastest(bench(), [ExecutionPlan("vmapped"), ExecutionPlan("looped")]).reason
    )
    assert form.call_count == calls
    told = [
        line
        for line in caplog.messages
        if "trying out what is fastest, which takes a while: 2 steps took 0 s" in line
    ]
    assert len(told) == lines


def test_a_damaged_book_of_choices_is_no_reason_to_stop(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    (tmp_path / "engines.json").write_text("[1, 2")
    assert load_cached_plan("key") is None
    cache_plan("key", ExecutionPlan("looped"))
    for text in ('{"key": {"form": "warp"}}', '{"key": [1]}', "[]", '{"key": {"fused": true}}'):
        (tmp_path / "engines.json").write_text(text)
        assert load_cached_plan("key") is None


@needs_compiler
def test_a_run_goes_on_with_the_engine_it_began_with(tmp_path, monkeypatch):
    """Else a stop and a change of mind between would change the rounding."""
    model, federation = world.seeded(world.plain), world.federation()
    algorithm = world.algorithm("lg_fedavg", model)
    glocal.fit(
        algorithm,
        model,
        federation,
        Plan(2, 4, batch_size=5),
        options=Options(checkpoint_every=1),
        folder=tmp_path,
    )
    began = []
    monkeypatch.setattr(
        "glocal.federate.fitting.Executor",
        lambda *a, execution_plan=None, **k: (
            began.append(execution_plan) or Executor(*a, execution_plan=execution_plan, **k)
        ),
    )
    glocal.fit(
        algorithm,
        model,
        federation,
        Plan(4, 4, batch_size=5),
        options=Options(checkpoint_every=1),
        folder=tmp_path,
    )
    assert [(choice.engine, choice.fused) for choice in began] == [("workers", True)]


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, (1, 0)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_convolution_as_a_product_is_the_convolution(stride, padding, dilation):
    x, weight, bias = torch.randn(3, 2, 9, 8), torch.randn(4, 2, 3, 2), torch.randn(4)
    expected = torch.conv2d(x, weight, bias, stride, padding, dilation)
    with ConvAsMatmul():
        assert torch.allclose(
            torch.conv2d(x, weight, bias, stride, padding, dilation), expected, atol=1e-5
        )
        grouped = torch.conv2d(x, torch.ones(2, 1, 3, 3), groups=2, padding="same")
    assert grouped.shape == x.shape


def test_unequal_devices_come_in_few_shapes():
    """So that a graph of a round can be used again."""
    orders = [np.zeros((steps, 5), dtype=np.int64) for steps in (9, 12, 11)]
    _, regular = _pad_tasks([ClientTask({}, {}, order) for order in orders])
    assert regular.shape == (3, 12, 5)
    assert (regular[0, 9:] == -1).all()
    many, regular = _pad_tasks([ClientTask({}, {}, order) for order in orders * 3])
    assert (len(many), len(regular)) == (10, 10)
    assert all(number <= _round_up(number) <= 1.25 * number for number in range(1, 2000))
    assert len({_round_up(number) for number in range(1, 2000)}) < 45


def test_equal_devices_are_not_padded():
    tasks = [ClientTask({}, {}, np.zeros((60, 10), dtype=np.int64))] * 9
    same, orders = _pad_tasks(tasks)
    assert same is tasks
    assert orders.shape == (9, 60, 10)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "warp"}, "engine: 'warp' is unknown"),
        ({"precision": "fp16"}, "engine: precision 'fp16' is unknown"),
        ({"workers": 0}, "engine: workers is 0; a whole number from 1 to 1,024"),
        ({"chunk_size": 0}, "engine: chunk_size is 0; a whole number from 1 to"),
    ],
)
def test_a_wrong_engine_is_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**settings)


def test_halves_are_near_and_not_the_same():
    half, full = (
        run("fedavg", "plain", EngineConfig("vmapped", precision=name)) for name in ("bf16", "fp32")
    )
    assert 1e-5 < world.gap(half, full) < 0.1
    assert all(tensor.dtype == torch.float32 for tensor in half.shared.values())


def test_very_unequal_devices_do_not_wait_for_each_other():
    federation = from_tensors(world.clients((400, 3, 4, 5)), test=0.0, validation=0.0)
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, total=4)
    states = [
        world.last(
            simulate(
                algorithm,
                params_of(model),
                federation.train,
                Plan(1, 4, batch_size=5),
                engine=engine,
            )
        )[0]
        for engine in (
            "looped",
            "vmapped",
            EngineConfig("workers"),
            EngineConfig("workers", fused=False),
        )
    ]
    assert all(world.gap(states[0], state, 4) < 1e-4 for state in states)


def test_only_devices_that_took_part_take_memory():
    sizes = [6] * 300
    federation = from_tensors(world.clients(sizes), test=0.0, validation=0.0)
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, total=300)
    state = world.last(
        simulate(algorithm, params_of(model), federation.train, Plan(3, 2, batch_size=5))
    )[0]
    stored = list(state.private.trained.values())
    assert len(stored) <= 6
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tree in stored
        for tensor in tree.values()
    }
    assert sum(storages.values()) <= 6 * trees.nbytes(state.private.initial)


class LowRank(nn.Module):
    """A weight that is the sum of a full one and a product: its slopes read weights by views of them."""

    def __init__(self):
        super().__init__()
        self.full = nn.Parameter(torch.randn(world.CLASSES, world.FEATURES) / 3)
        self.left = nn.Parameter(torch.randn(world.CLASSES, 2))
        self.right = nn.Parameter(torch.randn(2, world.FEATURES))

    def forward(self, x):
        return nn.functional.linear(x, self.full + self.left @ self.right)


@pytest.mark.parametrize("optimizer", [sgd(0.1), sgd(0.1, momentum=0.9)])
def test_a_weight_is_not_changed_while_a_view_of_it_is_still_to_be_read(optimizer):
    model = world.seeded(LowRank)
    algorithm = fedavg(cross_entropy(model), optimizer)
    train = world.federation().train
    engines = ("looped", EngineConfig("workers", workers=1))
    states = [
        world.last(simulate(algorithm, params_of(model), train, PLAN, engine=engine))[0]
        for engine in engines
    ]
    assert world.gap(*states) < 1e-5


def test_who_traces_a_step_draws_no_numbers_for_it():
    federation = from_tensors(world.clients((20, 20, 7, 7, 7, 7)), test=0.0, validation=0.0)
    model = world.seeded(world.Noisy)
    algorithm = fedavg(cross_entropy(model), sgd(0.1))
    states = [
        world.last(
            simulate(
                algorithm,
                params_of(model),
                federation.train,
                Plan(2, 6, batch_size=10),
                engine=engine,
            )
        )[0]
        for engine in ("looped", *(EngineConfig("workers", workers=number) for number in (1, 2, 3)))
    ]
    assert world.same_bits(states[1], states[2])
    assert world.same_bits(states[1], states[3])
    assert world.gap(states[0], states[1]) < 1e-5


def test_trees_go_to_workers_by_name():
    def swapped(shared, private, work):
        return {"b": private["b"] + 10, "a": private["a"]}

    workers, tasks, examples = crew(swapped)
    ones = {"a": torch.full((3,), 2.0), "b": torch.full((3,), 2.0)}
    tasks = [task._replace(private=ones) for task in tasks]
    once = trees.unstack(workers(tasks, examples, 0).stacked(), len(tasks))
    again = workers(
        [task._replace(private=row) for task, row in zip(tasks, once, strict=True)], examples, 0
    ).stacked()
    assert (again["a"] == 2.0).all()
    assert (again["b"] == 22.0).all()
    workers.close()


def test_a_shared_tree_may_be_an_upload_as_it_came():
    """What workers leave in their memory is written over in the next round, and must not be what was averaged."""
    model = world.seeded(world.plain)
    algorithm = world.algorithm("fedavg", model)
    last = algorithm._replace(
        aggregate=lambda shared, uploads, weights: {
            name: tensor[-1] for name, tensor in uploads.items()
        }
    )
    train, params = world.federation().train, params_of(model)
    found = [
        world.last(simulate(last, params, train, glocal.Plan(4, 3, batch_size=5), engine=engine))[0]
        for engine in (EngineConfig("workers", workers=2, fused=False), "looped")
    ]
    assert world.gap(*found) < 1e-5


def test_losses_last_longer_than_a_round():
    model = world.seeded(world.plain)
    train, params, plan = (
        world.federation().train,
        params_of(model),
        glocal.Plan(4, 3, batch_size=5),
    )
    told = [
        torch.stack(
            [
                report.losses
                for _, report in simulate(
                    world.algorithm("fedavg", model), params, train, plan, engine=engine
                )
            ]
        )
        for engine in (EngineConfig("workers", workers=2, fused=False), "looped")
    ]
    torch.testing.assert_close(*told)


def test_a_run_goes_on_where_there_is_no_compiler(tmp_path, monkeypatch):
    model, federation = world.seeded(world.plain), world.federation()
    algorithm, options = world.algorithm("lg_fedavg", model), Options(checkpoint_every=1)
    whole = glocal.fit(algorithm, model, federation, Plan(4, 4, batch_size=5), options=options)
    glocal.fit(
        algorithm,
        model,
        federation,
        Plan(2, 4, batch_size=5),
        options=options,
        folder=tmp_path / "run",
    )
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GlocalWarning)
        resumed = glocal.fit(
            algorithm,
            model,
            federation,
            Plan(4, 4, batch_size=5),
            options=options,
            folder=tmp_path / "run",
        )
    assert world.gap(whole.state, resumed.state) < 1e-5


def test_a_frozen_private_tensor_can_be_kept(tmp_path):
    model = world.seeded(world.plain)
    model[0].bias.requires_grad_(False)
    algorithm = world.algorithm("lg_fedavg", model)
    for engine in ("looped", "workers"):
        options = Options(engine=engine, checkpoint_every=1)
        glocal.fit(
            algorithm,
            model,
            world.federation(),
            Plan(2, 4, batch_size=5),
            options=options,
            folder=tmp_path / engine,
        )


def test_a_partial_function_may_be_an_update(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    plain = bench()
    assert plan_execution(
        plain._replace(function=partial(plain.function)), num_calls=1000, trains=True
    )


def test_fused_steps_look_at_every_journey(monkeypatch):
    """A second descent on the head alone is not the first one's business."""
    model = world.seeded(world.plain)
    objective, params = (
        cross_entropy(model),
        {name: tensor[None] for name, tensor in params_of(model).items()},
    )
    x, y = world.clients()[0]
    rest = (
        Examples(x, y),
        torch.zeros(1, 1, 5, dtype=torch.int64),
        torch.zeros(1),
        torch.tensor(0),
        1,
    )
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: name)
    monkeypatch.setattr(
        "glocal.engines.batched.local_train_batched",
        lambda chain, *a, **k: (params, torch.zeros(1)),
    )
    fused = FusedGpuTraining("fp32")
    fused(TrainingRequest(objective, sgd(0.1), params, *rest))
    with pytest.raises(NotImplementedError, match="some of the model's weights stay as they are"):
        fused(
            TrainingRequest(
                objective._replace(trainable=frozenset({"2.weight"})), sgd(0.1), params, *rest
            )
        )

    class Clipped(SGD):
        pass

    with pytest.raises(NotImplementedError, match="Clipped"):
        fused(TrainingRequest(objective, Clipped(0.1), params, *rest))


@pytest.mark.parametrize("name", ["the optimiser is PartitionedOptimizer", "the loss is not the cross entropy"])
def test_fused_steps_do_not_claim_what_they_leave_to_others(monkeypatch, name):
    """A rule of two rates or a loss of one's own is none of theirs: the engine says so, and takes other steps."""
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: name)
    model, rule = world.seeded(world.plain), SGD(0.1)
    objective = cross_entropy(model)
    if "optimiser" in name:
        rule = PartitionedOptimizer(SGD(0.1), SGD(0.01), "2.")
    else:
        inner = objective.loss
        objective = objective._replace(loss=lambda params, batch: inner(params, batch))
    algorithm, (x, y) = fedavg(objective, rule), world.clients()[0]
    state = initial_state(algorithm, params_of(model))

    def trained(trainer):
        work = Work(
            Examples(x, y),
            torch.zeros(1, 1, 5, dtype=torch.int64),
            torch.tensor([0]),
            torch.tensor(0),
            1,
            trainer,
        )
        return vmap_clients(
            algorithm.client_update,
            stack_rows([state.shared]),
            stack_rows([state.private.initial]),
            work,
        )

    assert trained(BatchedTraining(TracedBatchedTraining())).loss.isfinite().all()
    with pytest.raises(NotImplementedError, match=name):
        trained(BatchedTraining(FusedGpuTraining("fp32"), skip_check=True))


def test_large_rows_of_a_stack_have_memory_of_their_own_and_small_ones_are_views():
    small, large = torch.rand(3, 8), torch.rand(3, 2**18)
    for stack, views in ((small, True), (large, False)):
        rows = unbind_rows(stack)
        assert torch.equal(torch.stack(list(rows)), stack)
        assert all(
            (row.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()) == views
            for row in rows
        )
    assert list(unbind_rows(torch.zeros(0, 2**18))) == []
