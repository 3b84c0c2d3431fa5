"""A resumed run goes on with the engine it began with, even if another is faster by now."""

import json
from importlib import import_module

import pytest
from glocal.federate.fitting import Options, Pretraining
from glocal.federate.kinds import Kind, fit_kinds
from glocal.federate.scenario import Chapter, Scenario, fit_scenario
from torch import nn

import glocal
from glocal.core.sampling import Availability
from tests.support import world

# so many rounds that engines are measured, and no checkpoint before the end
LONG_PLAN = glocal.Plan(rounds=200, clients_per_round=3, batch_size=5)
OPTIONS = Options(validate_every=1000, checkpoint_every=1000)
DESCRIPTIONS = {
    "looped, one client at a time": "looped",
    "vmapped, all clients in one batch": "vmapped",
}


class StopError(Exception):
    """A kill: nothing is saved on its way out."""


def lg_fedavg(*, stop=None):
    """LG-FedAvg with Adam, which has no fused steps; it stops at the aggregation number `stop`."""
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, optimizer=glocal.Adam(0.01))
    calls = []

    def aggregate(shared, uploads, weights):
        calls.append(1)
        if len(calls) == stop:
            raise StopError
        return algorithm.aggregate(shared, uploads, weights)

    return algorithm._replace(aggregate=aggregate), model


def fit_plain(folder, stop=None):
    algorithm, model = lg_fedavg(stop=stop)
    federation = world.federation()
    return glocal.fit(algorithm, model, federation, LONG_PLAN, options=OPTIONS, folder=folder)


def fit_two_kinds(folder, stop=None):
    algorithm, model = lg_fedavg(stop=stop)
    kinds = [
        Kind("short", algorithm, model, world.federation()),
        Kind("long", algorithm, model, world.federation(seed=1)),
    ]
    return fit_kinds(kinds, LONG_PLAN, options=OPTIONS, folder=folder)


def fit_one_chapter(folder, stop=None):
    algorithm, model = lg_fedavg(stop=stop)
    clients = tuple(range(world.NUM_CLIENTS))
    chapter = Chapter(0, Availability.of(clients), (world.federation(),))
    scenario = Scenario((chapter,), {"all": clients})
    return fit_scenario(algorithm, model, scenario, LONG_PLAN, options=OPTIONS, folder=folder)


def fit_pretrained(folder, stop=None):
    """Clients with so many examples that one epoch of pre-training is worth a measurement."""
    algorithm, model = lg_fedavg(stop=stop)
    return glocal.fit(
        algorithm,
        model,
        world.federation((450,) * 4),
        glocal.Plan(rounds=5, clients_per_round=2, batch_size=1),
        options=OPTIONS,
        folder=folder,
        pretraining=Pretraining(lg_fedavg()[0], epochs=1),
    )


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


@pytest.mark.parametrize("fit", [fit_plain, fit_two_kinds, fit_one_chapter, fit_pretrained])
@pytest.mark.parametrize("stop", [1, 4])
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
    (algorithm, model), federation = lg_fedavg(), world.federation()

    def fit(rounds, engine):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=5)
        options = Options(engine=engine, checkpoint_every=1)
        glocal.fit(algorithm, model, federation, plan, options=options, folder=tmp_path)

    fit(3, engine)
    caplog.clear()
    fit(4, "looped")
    assert logged_engines(caplog) == ["looped"]


def test_the_engine_of_another_algorithm_is_not_reused(tmp_path, caplog):
    """Without a checkpoint, another algorithm may begin anew in the same folder."""
    caplog.set_level("INFO", "glocal")
    with pytest.raises(StopError):
        fit_plain(tmp_path, stop=2)
    file = tmp_path / "engine.json"
    stored = json.loads(file.read_text())
    (key,) = stored.keys() - {"fingerprint"}
    assert "rounds" in stored[key]
    file.write_text(json.dumps({**stored, key: {"rounds": {"engine": "graphed"}}}))
    model = world.seeded(world.plain)
    other = world.algorithm("fedavg", model, optimizer=glocal.Adam(0.02))
    glocal.fit(other, model, world.federation(), LONG_PLAN, options=OPTIONS, folder=tmp_path)
    assert "graphed" not in file.read_text()


def test_evaluation_goes_on_with_the_engine_that_it_began_with(tmp_path, monkeypatch):
    # by its path: glocal.evaluate.local_test is the function of that name
    module = import_module("glocal.evaluate.local_test")
    executor, engines = module.Executor, []
    (algorithm, model), federation = lg_fedavg(), world.federation()

    def spy(*args, engine, execution_plan=None, **options):
        if engine != "looped":  # the averaged model is evaluated on that one
            engines.append(execution_plan and execution_plan.engine)
        return executor(*args, engine=engine, execution_plan=execution_plan, **options)

    monkeypatch.setattr(module, "Executor", spy)
    for rounds in (1, 2):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=5)
        glocal.fit(algorithm, model, federation, plan, folder=tmp_path)
    # one executor for outputs and one for correct answers, first of all during training
    assert engines[:2] == [None, None]
    assert engines[4:] == ["vmapped"] * 4


def half_frozen():
    first, last = nn.Linear(world.FEATURES, 32), nn.Linear(16, world.CLASSES)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), last)
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("engine", ["looped", "vmapped", "workers"])
@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_frozen_layers_and_batches_of_one_give_the_same_bits_after_a_stop(name, engine, tmp_path):
    """Products of one row round differently where a weight does not begin at a cache line."""
    model = world.seeded(half_frozen)
    split = glocal.Split.of(model, local="2")
    algorithm = world.algorithm(name, model, optimizer=glocal.Adam(0.01), split=split)
    options = Options(engine=engine, checkpoint_every=1, validate_every=1000)

    def fit(rounds, folder):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=1)
        return glocal.fit(
            algorithm, model, world.federation(), plan, options=options, folder=folder
        )

    whole = fit(5, tmp_path / "whole")
    for stop in (1, 2, 3, 4):
        folder = tmp_path / str(stop)
        fit(stop, folder)
        assert world.same_bits(fit(5, folder).state, whole.state)


def test_the_measured_times_are_no_part_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "measured"))
    fit_plain(tmp_path / "first")
    runs = []
    for reason in ("measured, ms a step: 1", "measured, ms a step: 2"):
        cache_other_plan(tmp_path, monkeypatch, {"engine": "looped", "reason": reason})
        folder = tmp_path / reason
        fit_plain(folder)
        runs.append({file.name: file.read_bytes() for file in sorted(folder.glob("*.*"))})
    assert "checkpoint.safetensors" in runs[0]
    assert runs[0] == runs[1]
