"""Which engine is chosen, which falls back to which, and with which a stopped run goes on."""

import logging
import warnings
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import glocal
from glocal.core.errors import GlocalWarning
from glocal.core.sampling import Plan
from glocal.engines import EngineConfig, ExecutionPlan, Executor, planning
from glocal.engines.config import cache_plan, load_cached_plan
from glocal.engines.planning import ProbeSetup, plan_execution
from glocal.engines.protocol import ClientTask
from glocal.federate.fit import build_experiment
from glocal.federate.options import Options
from tests.support import world
from tests.support.engine_runs import EXACT, NEAR, model_of, needs_compiler, run


@pytest.fixture
def without_compiler(monkeypatch, tmp_path):
    """No C++ compiler, and no step that was compiled before."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "cache"))


def test_graphs_without_a_gpu_fall_back_with_a_warning():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    message = "graphs need an NVIDIA GPU.*now vmapped"
    with pytest.warns(GlocalWarning, match=message):
        state = run("lg_fedavg", "plain", "graphed", dtype=torch.float64)
    assert world.gap(state, run("lg_fedavg", "plain", "looped", dtype=torch.float64)) < EXACT


def test_without_a_compiler_general_steps_run_and_the_log_says_so(without_compiler, caplog):
    with caplog.at_level(logging.INFO, "glocal"):
        state = run("lg_fedavg", "plain", EngineConfig("workers"))
    assert "no fused steps" in caplog.text
    assert "compiler" in caplog.text
    assert world.gap(state, run("lg_fedavg", "plain", "looped")) < NEAR


def test_the_log_names_the_layer_that_fused_steps_do_not_support(caplog):
    with caplog.at_level(logging.INFO, "glocal"):
        run("lg_fedavg", "batch norm", EngineConfig("workers"))
    (line,) = [record.message for record in caplog.records]
    workers = EngineConfig().num_workers
    reason = "no fused steps: layer '1' is BatchNorm1d on (8,)"
    assert line == f"engine: traced steps in {workers} processes ({reason})"


def probe_setup(kind="batch norm", engine="auto", steps=4):
    """Two tasks of FedAvg on a model."""
    algorithm, data = world.algorithm("fedavg", model_of(kind)), world.federation().train
    shared = algorithm.init(algorithm.task.initial_params()).shared
    tasks = []
    for client in (0, 2):
        tasks.append(ClientTask(shared, {}, np.resize(data.rows[client], (1, steps, 5))))
    return ProbeSetup(algorithm.client_update, EngineConfig(engine), tasks, data.examples, 0)


@needs_compiler
def test_auto_takes_fused_steps_where_it_can():
    plan = plan_execution(probe_setup("plain"), num_calls=1, trains=True)[0]
    assert plan == ExecutionPlan("workers", fused=True, reason="auto")


def test_no_more_tasks_are_measured_than_one_chunk_holds():
    both = probe_setup()
    one = both._replace(config=EngineConfig(chunk_size=1))
    assert len(one.probe_tasks()) == 1
    assert len(both.probe_tasks()) == 2
    assert one.cache_key() != both.cache_key()


def test_auto_does_not_measure_for_a_short_run():
    plan = plan_execution(probe_setup(), num_calls=2, trains=True)[0]
    assert plan == ExecutionPlan("vmapped", reason="auto: the run is too short to measure")


def test_auto_measures_for_a_long_run_reports_it_and_caches_the_plan(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    setup = probe_setup()
    measured = plan_execution(setup, num_calls=1000, trains=True)[0]
    assert "measured, ms a step: workers" in measured.reason
    assert load_cached_plan(setup.cache_key()) == measured
    other = ExecutionPlan("looped", reason="because")
    cache_plan(setup.cache_key(), other)
    assert plan_execution(setup, num_calls=1000, trains=True)[0] == other


@pytest.mark.parametrize(("long_seconds", "calls", "lines"), [(-1, 4, 1), (1000, 8, 0)])
def test_a_plan_that_takes_long_is_tried_twice_only_and_reported(
    monkeypatch, caplog, long_seconds, calls, lines
):
    caplog.set_level("INFO", "glocal")
    engine = Mock()
    monkeypatch.setattr(planning, "build_engine", lambda *_: engine)
    monkeypatch.setattr(planning, "_LONG_SECONDS", long_seconds)
    choices = [ExecutionPlan("vmapped"), ExecutionPlan("looped")]
    fastest = planning._fastest(probe_setup(), choices)
    assert "measured, ms a step: vmapped" in fastest.reason
    assert engine.call_count == calls
    notice = "measuring which is fastest, which takes a while: 2 steps took 0 s"
    assert sum(notice in line for line in caplog.messages) == lines


def test_a_damaged_cache_of_plans_does_not_stop_a_run(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    file = tmp_path / "engines.json"
    file.write_text("[1, 2")
    assert load_cached_plan("key") is None
    cache_plan("key", ExecutionPlan("looped"))
    texts = (
        '{"key": {"engine": "warp"}}',
        '{"key": {"engine": "looped", "form": 1}}',
        '{"key": [1]}',
        "[]",
        '{"key": {"fused": true}}',
    )
    for text in texts:
        file.write_text(text)
        assert load_cached_plan("key") is None


def test_an_epoch_is_counted_with_all_others():
    one, three = probe_setup(steps=4), probe_setup(steps=4)
    tasks = [task._replace(order=np.repeat(task.order, 3, 0)) for task in three.tasks]
    three = three._replace(tasks=tasks)
    assert (one.max_steps(), three.max_steps()) == (4, 12)
    assert one.cache_key() != three.cache_key()
    assert [task.order.shape for task in one.probe_tasks()] == [(1, 2, 5)] * 2
    assert (one.probe_steps, three.probe_steps) == (2, 3)


def test_a_probe_has_a_step_of_every_epoch():
    """An algorithm may train one part in the first epochs and another in the last, as FedRep."""
    setup = probe_setup(steps=4)
    tasks = [task._replace(order=np.repeat(task.order, 3, 0)) for task in setup.tasks]
    probed = setup._replace(tasks=tasks).probe_tasks()
    assert [task.order.shape for task in probed] == [(3, 1, 5)] * 2


def test_a_partial_function_may_be_a_client_update(monkeypatch, tmp_path):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path))
    setup = probe_setup()
    setup = setup._replace(function=partial(setup.function))
    assert plan_execution(setup, num_calls=1000, trains=True)


def fit(rounds, folder=None):
    """A run of LG-FedAvg with a checkpoint after each round."""
    algorithm = world.algorithm("lg_fedavg", model_of("plain"))
    plan = Plan(rounds, 4, batch_size=5)
    experiment = build_experiment(algorithm, world.federation(), plan=plan)
    run = glocal.Run(experiment, folder=folder, options=Options(checkpoint_every=1))
    return run.to_end().group().state.alone()


@needs_compiler
def test_a_run_goes_on_with_the_engine_that_it_began_with(tmp_path, monkeypatch):
    """Otherwise a stop between two rounds would change the rounding."""
    fit(2, tmp_path)
    plans = []

    original = Executor.__init__

    def spy(self, *args, execution_plan=None, trains=True, **options):
        if trains:
            plans.append(execution_plan)
        original(self, *args, execution_plan=execution_plan, trains=trains, **options)

    monkeypatch.setattr(Executor, "__init__", spy)
    fit(4, tmp_path)
    assert [(plan.engine, plan.fused) for plan in plans] == [("workers", True)]


def test_a_run_goes_on_where_there_is_no_compiler(tmp_path, request):
    whole = fit(4)
    fit(2, tmp_path / "run")
    request.getfixturevalue("without_compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", GlocalWarning)
        resumed = fit(4, tmp_path / "run")
    assert world.gap(whole, resumed) < NEAR
