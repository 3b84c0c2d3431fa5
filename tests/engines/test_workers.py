"""Worker processes and threads give the numbers of the loop, and end when they should."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, Adam, AdamW, StepLR
from glocal.core.sampling import Plan
from glocal.engines import EngineConfig
from glocal.engines.fused import cpu
from glocal.engines.protocol import ClientTask
from glocal.engines.workers import ProcessPool
from glocal.federate import rounds
from glocal.federate.rounds import build_executors
from tests.support import world
from tests.support.engine_runs import (
    EXACT,
    NEAR,
    data_for,
    every_algorithm,
    every_model,
    model_of,
    needs_compiler,
    run,
    train,
)

fused_or_not = pytest.mark.parametrize("fused", [True, False])


def assert_workers_are_the_loop(name, kind, *, fused, optimizer=None):
    """In float32 where steps may be fused, else in float64."""
    dtype, tolerance = (torch.float32, NEAR) if fused else (torch.float64, EXACT)
    engine = EngineConfig("workers", workers=2, fused=fused)
    settings = {"optimizer": optimizer, "dtype": dtype}
    workers = run(name, kind, engine, **settings)
    assert world.gap(workers, run(name, kind, "looped", **settings)) < tolerance


@every_algorithm
@every_model
@fused_or_not
def test_workers_give_the_numbers_of_the_loop(name, kind, fused):
    assert_workers_are_the_loop(name, kind, fused=fused)


OPTIMIZERS = [
    Adam(lr=0.01),
    AdamW(lr=0.01),
    SGD(lr=0.1),
    SGD(lr=0.1, momentum=0.9, weight_decay=0.1, lr_decay=0.5),
    SGD(lr=0.1, lr_schedule=StepLR(gamma=0.5, step_size=1)),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@fused_or_not
def test_workers_support_every_optimizer(optimizer, fused):
    assert_workers_are_the_loop("lg_fedavg", "plain", fused=fused, optimizer=optimizer)


@pytest.mark.parametrize("kind", ["plain", "dropout"])
@fused_or_not
def test_the_number_of_workers_changes_no_bit(kind, fused):
    one, two, three = (
        run("lg_fedavg", kind, EngineConfig("workers", workers=number, fused=fused))
        for number in (1, 2, 3)
    )
    assert world.same_bits(one, two)
    assert world.same_bits(one, three)


@fused_or_not
def test_workers_run_seeds_side_by_side(fused):
    engine = EngineConfig("workers", fused=fused)
    algorithm = world.algorithm("lg_fedavg", model_of("plain"))
    plans = [Plan(2, 3, batch_size=5, seed=seed) for seed in (0, 1)]
    data = data_for(algorithm)
    pairs = [world.set_up(algorithm, data, plan) for plan in plans]
    replicas, states = zip(*pairs, strict=True)
    executors = build_executors(replicas[0].groups, engine, num_calls=2)
    together = world.last(rounds.simulate(replicas, states, executors, range(2)))
    executors[0].close()
    for plan, (state, _) in zip(plans, together, strict=True):
        assert world.same_bits(state, train(algorithm, engine, plan=plan))


def process_pool(function):
    """A pool of two workers, four tasks, and their examples."""
    data = world.federation().train
    shared = params_of(world.seeded(world.plain))
    tasks = [ClientTask(shared, {}, rows.reshape(1, 1, -1)) for rows in data.rows[:4]]
    return ProcessPool(function, workers=2, trainer=None), tasks, data.examples


def return_shared(shared, private, work):
    return shared


def test_an_error_in_a_worker_is_raised_by_the_parent():
    def failing(shared, private, work):
        if work.order.numel() > 20:
            raise ValueError("too many rows for me")
        return shared

    pool, tasks, examples = process_pool(failing)
    tasks.sort(key=lambda task: task.order.size)
    with pytest.raises(ValueError, match="too many rows for me"):
        pool(tasks, examples, 0)
    assert pool.processes is None


def test_a_killed_worker_is_reported_in_one_line():
    def dying(shared, private, work):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return shared

    parent = os.getpid()
    pool, tasks, examples = process_pool(dying)
    message = r"a worker was killed \(is the memory full\?\); use fewer"
    with pytest.raises(InputError, match=message):
        pool(tasks, examples, 0)


def test_workers_end_when_the_pool_is_closed():
    pool, tasks, examples = process_pool(return_shared)
    pool(tasks, examples, 0)
    pids = list(pool.processes.pids)
    assert len(pids) == 2
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_end_when_the_pool_is_dropped():
    pool, tasks, examples = process_pool(return_shared)
    pool(tasks, examples, 0)
    pids = list(pool.processes.pids)
    del pool
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path):
    pid = os.fork()
    if pid == 0:
        pool, tasks, examples = process_pool(return_shared)
        pool(tasks, examples, 0)
        (tmp_path / "pids").write_text(" ".join(map(str, pool.processes.pids)))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + 10
    for worker in map(int, (tmp_path / "pids").read_text().split()):
        while is_running(worker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not is_running(worker)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_a_result_that_is_too_large_for_the_shared_memory_is_sent():
    def large(shared, private, work):
        return torch.arange(3_000_000) + work.key

    pool, tasks, examples = process_pool(large)
    tasks = [task._replace(key=key) for key, task in enumerate(tasks)]
    results = pool(tasks, examples, 0).stacked()
    pool.close()
    assert torch.equal(results, torch.arange(3_000_000) + torch.arange(4)[:, None])


def test_trees_are_passed_to_workers_by_name():
    def swapped(shared, private, work):
        return {"b": private["b"] + 10, "a": private["a"]}

    pool, tasks, examples = process_pool(swapped)
    twos = {"a": torch.full((3,), 2.0), "b": torch.full((3,), 2.0)}
    tasks = [task._replace(private=twos) for task in tasks]
    first = trees.unstack(pool(tasks, examples, 0).stacked(), len(tasks))
    # these trees have their names in the other order
    tasks = [task._replace(private=row) for task, row in zip(tasks, first, strict=True)]
    second = pool(tasks, examples, 0).stacked()
    pool.close()
    assert (second["a"] == 2.0).all()
    assert (second["b"] == 22.0).all()


@needs_compiler
def test_no_other_client_runs_while_the_model_is_traced(monkeypatch):
    """Tracing patches the calls of all modules, and an algorithm such as IFCA calls some."""
    tracing, seen, parse = threading.Event(), [], cpu._parse

    def slow_parse(loss, shape):
        tracing.set()
        time.sleep(0.2)
        chain = parse(loss, shape)
        tracing.clear()
        return chain

    class Watching(glocal.FedAvg):
        def client_update(self, message, private, work):
            seen.append(tracing.is_set())
            return super().client_update(message, private, work)

    monkeypatch.setattr(cpu, "_parse", slow_parse)
    algorithm = Watching(glocal.classification(model_of("plain")), optimizer=SGD(lr=0.1))
    train(algorithm, EngineConfig("workers", workers=2))
    assert len(seen) > 4
    assert not any(seen)
