"""A resumed run goes on with the engine it began with, even if another is faster by now."""

import json
from dataclasses import replace
from importlib import import_module

import pytest
from torch import nn

import glocal
from glocal.core.sampling import Availability
from glocal.federate.fit import build_experiment
from tests.support import world

# so many rounds that engines are measured, and no checkpoint before the end
LONG_PLAN = glocal.Plan(rounds=200, clients_per_round=3, batch_size=5)
SELDOM = glocal.Evaluation(every=1000)
OPTIONS = glocal.Options(checkpoint_every=1000)
DESCRIPTIONS = {
    "looped, one client at a time": "looped",
    "vmapped, all clients in one batch": "vmapped",
}


class StopError(Exception):
    """A kill: nothing is saved on its way out."""


class Stopping(glocal.LGFedAvg):
    """LG-FedAvg whose server is killed in a round."""

    stop: int = 0

    def server_update(self, shared, server, uploads):
        if self.stop and int(uploads.round_index) == self.stop - 1:
            raise StopError
        return super().server_update(shared, server, uploads)


def lg_fedavg(**settings):
    """LG-FedAvg with Adam, which has no fused steps."""
    model = world.seeded(world.plain)
    local = sorted(world.first_half(model).local)
    task, adam = glocal.classification(model), glocal.Adam(lr=0.01)
    return Stopping(task, optimizer=adam, local=local, **settings)


def run(experiment, folder, stop, options=OPTIONS):
    """Carry an experiment out; with `stop`, its server is killed in that round."""
    made = glocal.Run(experiment, folder=folder, options=options)
    if stop:
        groups = made.experiment.groups
        killed = [replace(each, algorithm=replace(each.algorithm, stop=stop)) for each in groups]
        spec = made.spec
        made.experiment = replace(made.experiment, groups=tuple(killed))
        made.__dict__["spec"] = spec  # a kill is no setting
    return made.to_end()


def plain_run(folder, stop=None):
    experiment = build_experiment(
        lg_fedavg(), world.federation(), plan=LONG_PLAN, evaluation=SELDOM
    )
    return run(experiment, folder, stop)


def run_with_groups(folder, stop=None):
    groups = [
        glocal.Group(lg_fedavg(), (world.federation(seed=seed),), name)
        for seed, name in enumerate(("short", "long"))
    ]
    return run(glocal.Experiment(tuple(groups), LONG_PLAN, evaluation=SELDOM), folder, stop)


def run_with_a_phase(folder, stop=None):
    clients = tuple(range(world.NUM_CLIENTS))
    phase = glocal.Phase(0, Availability.of(clients))
    experiment = glocal.Experiment.of(
        lg_fedavg(),
        world.federation(),
        LONG_PLAN,
        evaluation=SELDOM,
        phases=(phase,),
        subgroups={"all": clients},
    )
    return run(experiment, folder, stop)


def pretrained_run(folder, stop=None):
    """Clients with so many examples that one epoch of pre-training is worth a measurement."""
    experiment = build_experiment(
        lg_fedavg(),
        world.federation((450,) * 4),
        plan=glocal.Plan(rounds=5, clients_per_round=2, batch_size=1),
        evaluation=SELDOM,
    )
    pretraining = glocal.Pretraining(epochs=1)
    return run(replace(experiment, pretraining=pretraining), folder, stop)


def logged_engines(caplog):
    """The engines of local training in the order in which the log names them."""
    engines = []
    for line in caplog.messages:
        if line.startswith("engine: "):
            engines.append(engine_of(line.removeprefix("engine: ")))
    caplog.clear()
    return engines


def engine_of(description):
    for start, engine in DESCRIPTIONS.items():
        if description.startswith(start):
            return engine
    return "workers"


def cache_other_plan(folder, monkeypatch, plan):
    """Let the cache hold another plan for everything that was measured before."""
    measured = json.loads((folder / "measured/engines.json").read_text())
    cache = folder / f"cache {len(list(folder.iterdir()))}"
    cache.mkdir()
    (cache / "engines.json").write_text(json.dumps(dict.fromkeys(measured, plan)))
    monkeypatch.setenv("GLOCAL_CACHE", str(cache))


@pytest.mark.parametrize("fit", [plain_run, run_with_groups, run_with_a_phase, pretrained_run])
@pytest.mark.parametrize("stop", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_stop_before_the_first_checkpoint_changes_no_engine(
    fit, stop, tmp_path, monkeypatch, caplog
):
    """A second measurement may well find another engine the fastest; the cache forces that here."""
    caplog.set_level("INFO", "glocal")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "measured"))
    with pytest.raises(StopError):
        fit(tmp_path / "run", stop=stop)
    first_engines = logged_engines(caplog)
    assert first_engines
    assert not (tmp_path / "run/checkpoint.safetensors").exists()
    for other in ("looped", "vmapped"):
        cache_other_plan(tmp_path, monkeypatch, {"engine": other})
        with pytest.raises(StopError):
            fit(tmp_path / "run", stop=stop)
        assert logged_engines(caplog) == first_engines
    with pytest.raises(StopError):
        fit(tmp_path / "elsewhere", stop=stop)
    assert {*logged_engines(caplog)} == {"vmapped"}, "the cache decides for a new run"


@pytest.mark.parametrize("engine", ["vmapped", "looped", "auto"])
def test_an_engine_that_is_configured_is_used_for_a_resumed_run_too(engine, tmp_path, caplog):
    caplog.set_level("INFO", "glocal")
    algorithm, federation = lg_fedavg(), world.federation()

    def fit(rounds, engine):
        glocal.fit(
            algorithm,
            federation,
            rounds=rounds,
            clients_per_round=3,
            batch_size=5,
            engine=engine,
            folder=tmp_path,
            progress=False,
        )

    fit(3, engine)
    caplog.clear()
    fit(4, "looped")
    assert logged_engines(caplog) == ["looped"]


def test_the_engine_of_another_algorithm_is_not_reused(tmp_path, caplog):
    """Without a checkpoint, another algorithm may begin anew in the same folder."""
    caplog.set_level("INFO", "glocal")
    with pytest.raises(StopError):
        plain_run(tmp_path, stop=2)
    file = tmp_path / "engine.json"
    stored = json.loads(file.read_text())
    (key,) = stored.keys() - {"fingerprint"}
    assert "rounds" in stored[key]
    file.write_text(json.dumps({**stored, key: {"rounds": {"engine": "graphed"}}}))
    task = glocal.classification(world.seeded(world.plain))
    other = glocal.FedAvg(task, optimizer=glocal.Adam(lr=0.02))
    run(build_experiment(other, world.federation(), plan=LONG_PLAN), tmp_path, None)
    assert "graphed" not in file.read_text()


def test_evaluation_goes_on_with_the_engine_that_it_began_with(tmp_path, monkeypatch):
    # by its path: glocal.evaluate.local_test is the function of that name
    module = import_module("glocal.evaluate.local_test")
    executor, engines = module.Executor, []
    algorithm, federation = lg_fedavg(), world.federation()

    def spy(*args, engine, execution_plan=None, **options):
        if engine != "looped":  # the averaged model is evaluated on that one
            engines.append(execution_plan and execution_plan.engine)
        return executor(*args, engine=engine, execution_plan=execution_plan, **options)

    monkeypatch.setattr(module, "Executor", spy)
    for rounds in (1, 2):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=5)
        run(build_experiment(algorithm, federation, plan=plan), tmp_path, None)
    # one executor for outputs and one for scores, in each of the two runs
    assert engines == [None, None, "vmapped", "vmapped"]


def half_frozen():
    first, last = nn.Linear(world.FEATURES, 32), nn.Linear(16, world.CLASSES)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), last)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("engine", ["looped", "vmapped", "workers"])
@pytest.mark.parametrize("name", [pytest.param("fedavg", marks=pytest.mark.slow), "lg_fedavg"])
def test_frozen_layers_and_batches_of_one_give_the_same_bits_after_a_stop(name, engine, tmp_path):
    """Products of one row round differently where a weight does not begin at a cache line."""
    model = world.seeded(half_frozen)
    local = ["2.weight", "2.bias"] if name == "lg_fedavg" else None
    algorithm = world.algorithm(name, model, optimizer=glocal.Adam(lr=0.01), local=local)
    options = glocal.Options(engine=engine, checkpoint_every=1)

    def fit(rounds, folder):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=1)
        experiment = build_experiment(algorithm, world.federation(), plan=plan, evaluation=SELDOM)
        return run(experiment, folder, None, options).group().state.alone()

    whole = fit(5, tmp_path / "whole")
    for stop in (1, 2, 3, 4):
        folder = tmp_path / str(stop)
        fit(stop, folder)
        assert world.same_bits(fit(5, folder), whole)


def test_the_measured_times_are_no_part_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "measured"))
    plain_run(tmp_path / "first")
    runs = []
    for reason in ("measured, ms a step: 1", "measured, ms a step: 2"):
        cache_other_plan(tmp_path, monkeypatch, {"engine": "looped", "reason": reason})
        folder = tmp_path / reason
        plain_run(folder)
        runs.append({file.name: file.read_bytes() for file in sorted(folder.glob("*.*"))})
    assert "checkpoint.safetensors" in runs[0]
    assert runs[0] == runs[1]
