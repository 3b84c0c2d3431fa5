"""A run goes on to the same bits: on the engine that it began with, whatever is faster by now."""

import json
from importlib import import_module

import pytest
from torch import nn

import glocal
from glocal.core.sampling import Availability
from glocal.federate.fitting import Options, Pretraining
from glocal.federate.kinds import Kind, fit_kinds
from glocal.federate.scenario import Chapter, Scenario, fit_scenario
from tests.support import world

PLAN = glocal.Plan(rounds=200, clients_per_round=3, batch_size=5)  # long enough to be measured for
OFTEN = Options(validate_every=1000, checkpoint_every=1000)
TELLS = {
    "one client after the other": "looped",
    "all clients in one batched step": "vmapped",
}


class StopError(Exception):
    """What a kill is in these tests: nothing is saved on its way out."""


def adam(name="lg_fedavg", *, stop=None):
    """An algorithm with Adam, whose steps are not fused; it stops in that many rounds."""
    model, calls = world.seeded(world.plain), []
    made = world.algorithm(name, model, optimizer=glocal.adam(0.01))

    def aggregate(shared, uploads, weights):
        calls.append(1)
        if len(calls) == stop:
            raise StopError
        return made.aggregate(shared, uploads, weights)

    return made._replace(aggregate=aggregate), model


def plain(folder, stop=None):
    algorithm, model = adam(stop=stop)
    return glocal.fit(algorithm, model, world.federation(), PLAN, options=OFTEN, folder=folder)


def kinds(folder, stop=None):
    algorithm, model = adam(stop=stop)
    parts = {"short": world.federation(), "long": world.federation(seed=1)}
    both = [Kind(name, algorithm, model, part) for name, part in parts.items()]
    return fit_kinds(both, PLAN, options=OFTEN, folder=folder)


def scenario(folder, stop=None):
    algorithm, model = adam(stop=stop)
    everyone = tuple(range(world.NUM_CLIENTS))
    only = Chapter(0, Availability.of(everyone), (world.federation(),))
    story = Scenario((only,), {"all": everyone})
    return fit_scenario(algorithm, model, story, PLAN, options=OFTEN, folder=folder)


def pretrained(folder, stop=None):
    """Devices with so many examples that an epoch is worth a measurement."""
    algorithm, model = adam(stop=stop)
    federation, before = world.federation((450,) * 4), Pretraining(adam()[0], epochs=1)
    how = {"options": OFTEN, "folder": folder, "pretraining": before}
    return glocal.fit(
        algorithm,
        model,
        federation,
        glocal.Plan(rounds=5, clients_per_round=2, batch_size=1),
        **how,
    )


def engines(caplog):
    """The forms that training settled on, as they were told."""
    lines = [line for line in caplog.messages if line.startswith("engine: ")]
    told = [line.removeprefix("engine: ") for line in lines]
    caplog.clear()
    forms = [[form for words, form in TELLS.items() if line.startswith(words)] for line in told]
    return [found[0] if found else "workers" for found in forms]


def remember(folder, monkeypatch, choice):
    """Let this machine remember another form for whatever was measured on it before."""
    measured = json.loads((folder / "measured/engines.json").read_text())
    cache = folder / f"cache {len(list(folder.iterdir()))}"
    cache.mkdir()
    (cache / "engines.json").write_text(json.dumps(dict.fromkeys(measured, choice)))
    monkeypatch.setenv("GLOCAL_CACHE", str(cache))


@pytest.mark.parametrize("train", [plain, kinds, scenario, pretrained])
@pytest.mark.parametrize("stop", [1, 4])
def test_a_stop_before_the_first_checkpoint_changes_no_engine(
    train,
    stop,
    tmp_path,
    monkeypatch,
    caplog,
):
    """Measured anew, another form may well be the fastest: here that is forced."""
    caplog.set_level("INFO", "glocal")
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "measured"))
    with pytest.raises(StopError):
        train(tmp_path / "run", stop=stop)
    began = engines(caplog)
    assert began
    assert not (tmp_path / "run/checkpoint.safetensors").exists()
    for other in ("looped", "vmapped"):
        remember(tmp_path, monkeypatch, {"engine": other})
        with pytest.raises(StopError):
            train(tmp_path / "run", stop=stop)
        assert engines(caplog) == began
    with pytest.raises(StopError):
        train(tmp_path / "elsewhere", stop=stop)
    assert {*engines(caplog)} == {"vmapped"}, "the test forces what a new run takes"


def test_an_engine_that_is_asked_for_is_taken_all_the_same(tmp_path, caplog):
    caplog.set_level("INFO", "glocal")
    (algorithm, model), federation = adam(), world.federation()
    short, longer = (
        glocal.Plan(rounds=rounds, clients_per_round=3, batch_size=5) for rounds in (3, 4)
    )
    for engine in ("vmapped", "looped", "auto"):
        folder, options = tmp_path / engine, Options(engine=engine, checkpoint_every=1)
        glocal.fit(algorithm, model, federation, short, options=options, folder=folder)
        caplog.clear()
        options = Options(engine="looped", checkpoint_every=1)
        glocal.fit(algorithm, model, federation, longer, options=options, folder=folder)
        assert engines(caplog) == ["looped"]


def test_what_another_algorithm_began_with_is_not_taken(tmp_path, caplog):
    """Nothing was trained to its first checkpoint: the folder may be begun anew."""
    caplog.set_level("INFO", "glocal")
    with pytest.raises(StopError):
        plain(tmp_path, stop=2)
    file = tmp_path / "engine.json"
    kept = json.loads(file.read_text())
    file.write_text(json.dumps({**kept, "engines": {"rounds": {"engine": "graphed"}}}))
    model = world.seeded(world.plain)
    other = world.algorithm("fedavg", model, optimizer=glocal.adam(0.02))
    glocal.fit(other, model, world.federation(), PLAN, options=OFTEN, folder=tmp_path)
    assert "graphed" not in file.read_text()


def test_tests_keep_to_the_engine_that_they_began_with(tmp_path, monkeypatch):
    # by its path: glocal.evaluate.local_test is the function of that name
    module = import_module("glocal.evaluate.local_test")
    began, real = [], module.Executor
    (algorithm, model), federation = adam(), world.federation()

    def spy(*rest, engine, execution_plan=None, **more):
        if engine != "looped":  # which the averaged model is tested on
            began.append(execution_plan and execution_plan.engine)
        return real(*rest, engine=engine, execution_plan=execution_plan, **more)

    monkeypatch.setattr(module, "Executor", spy)
    for rounds in (1, 2):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=5)
        glocal.fit(algorithm, model, federation, plan, folder=tmp_path)
    first, then = began[:2], began[4:]  # outputs, and what is right; those while it trains first
    assert first == [None, None]
    assert then == ["vmapped"] * 4


def half_frozen():
    """What stays as it is, is used where it lies: it comes from a checkpoint after a stop."""
    model = nn.Sequential(nn.Linear(world.FEATURES, 32), nn.ReLU(), nn.Linear(32, world.CLASSES))
    return model.requires_grad_(False), model[2].requires_grad_(True)


@pytest.mark.parametrize("engine", ["looped", "vmapped", "workers"])
@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_frozen_layers_and_batches_of_one_go_on_to_the_same_bits(name, engine, tmp_path):
    """Products of one row round otherwise where a weight does not begin at a cache line."""
    model, _ = world.seeded(half_frozen)
    algorithm = world.algorithm(name, model, optimizer=glocal.adam(0.01))
    options = Options(engine=engine, checkpoint_every=1, validate_every=1000)

    def train(rounds, folder):
        plan = glocal.Plan(rounds, clients_per_round=3, batch_size=1)
        how = {"options": options, "folder": folder}
        return glocal.fit(algorithm, model, world.federation(), plan, **how)

    whole = train(5, tmp_path / "whole")
    for stop in (1, 2, 3, 4):
        train(stop, tmp_path / str(stop))
        assert world.same_bits(train(5, tmp_path / str(stop)).state, whole.state)


def test_how_long_each_form_took_to_try_is_no_part_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOCAL_CACHE", str(tmp_path / "measured"))
    plain(tmp_path / "first")
    kept = []
    for reason in ("measured, ms a step: 1", "measured, ms a step: 2"):
        remember(tmp_path, monkeypatch, {"engine": "looped", "reason": reason})
        plain(tmp_path / reason)
        files = sorted((tmp_path / reason).glob("*.*"))
        kept.append({file.name: file.read_bytes() for file in files})
    assert "checkpoint.safetensors" in kept[0]
    assert kept[0] == kept[1]
