"""From data to each client's own model: warm starts, selection on validation data, resuming."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import glocal
from glocal import algorithms
from glocal.core import files, trees
from glocal.core.errors import InputError
from glocal.core.files import read_rows
from glocal.core.modules import params_of
from glocal.federate.checkpoint import _require_same_fingerprint
from glocal.federate.fitting import (
    Case,
    Options,
    fit_case,
    move_to_device,
    start_or_resume,
    train,
    warm_start_params,
)
from glocal.studies import run_study, with_overrides
from glocal.studies.run import read_settings
from glocal.studies.settings import from_dict
from glocal.wire import Ledger
from tests.support import world

PLAN = glocal.Plan(rounds=7, clients_per_round=3, batch_size=5)
OFTEN = Options(validate_every=2, checkpoint_every=3)


def fitted(
    name, *, folder=None, plan=PLAN, options=OFTEN, make=world.with_batch_norm, start_from=None
):
    model = world.seeded(make)
    algorithm = world.algorithm(name, model)
    return glocal.fit(
        algorithm,
        model,
        world.federation(),
        plan,
        options=options,
        folder=folder,
        start_from=start_from,
    )


def experiment(name, seeds=(0,)):
    models = [world.seeded(world.with_batch_norm, seed) for seed in seeds]
    federation = world.federation()
    params, ledgers = tuple(params_of(model) for model in models), tuple(Ledger() for _ in seeds)
    return Case(
        world.algorithm(name, models[0]),
        models[0],
        PLAN,
        seeds,
        params,
        tuple(federation for _ in seeds),
        ledgers,
    )


@pytest.mark.parametrize("name", algorithms.__all__)
@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(name, stop_after, tmp_path):
    whole = fit_case(experiment(name), OFTEN, tmp_path / "whole")[0]
    broken = move_to_device(experiment(name), OFTEN)
    progress = start_or_resume(broken, OFTEN, tmp_path / "broken")
    rounds = train(broken, OFTEN, progress, tmp_path / "broken")
    for _ in range(stop_after):
        next(rounds)
    rounds.close()
    resumed = fit_case(experiment(name), OFTEN, tmp_path / "broken")[0]
    assert world.same_bits(whole.state, resumed.state)
    assert whole.as_dict() == resumed.as_dict()
    for file in ("rows.jsonl", "checkpoint.safetensors"):
        saved = (tmp_path / "broken" / file).read_bytes()
        assert saved == (tmp_path / "whole" / file).read_bytes()


@pytest.mark.parametrize("name", algorithms.__all__)
def test_a_crash_without_warning_goes_on_from_the_last_checkpoint(name, tmp_path):
    """A kill leaves rows after the checkpoint, and half a row."""
    whole = fit_case(experiment(name, (0, 1)), OFTEN, tmp_path / "whole")
    broken = move_to_device(experiment(name, (0, 1)), OFTEN)
    progress = start_or_resume(broken, OFTEN, tmp_path / "broken")
    rounds = train(broken, OFTEN, progress, tmp_path / "broken")
    for _ in range(5):
        next(rounds)
    # the disk after five rounds; the checkpoint is of round three
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for file in ("rows.jsonl", "checkpoint.safetensors"):
        (crashed / file).write_bytes((tmp_path / "broken" / file).read_bytes())
    with (crashed / "rows.jsonl").open("a") as rows:
        rows.write('{"seed": 0, "rou')
    resumed = fit_case(experiment(name, (0, 1)), OFTEN, crashed)
    assert all(world.same_bits(a.state, b.state) for a, b in zip(whole, resumed, strict=True))
    assert (tmp_path / "whole/rows.jsonl").read_bytes() == (crashed / "rows.jsonl").read_bytes()


STUDY = """
[data]
clients = 6
[plan]
rounds = 12
clients_per_round = 3
seeds = 2
[split]
local = ["layer1"]
[run]
checkpoint_every = 2
validate_every = 4
[experiments.first]
algorithm = "fedavg"
[experiments.second]
algorithm = "lg_fedavg"
start_from = "first"
start_round = 8
[experiments.third]
algorithm = "mtl"
"""


def command(*arguments):
    return [
        sys.executable,
        "-c",
        "import sys; from glocal.cli import main; main(sys.argv[1:])",
        *map(str, arguments),
    ]


def saved_files(folder: Path):
    """Everything that a run saves, except for its seconds."""
    files = [
        file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "timing.jsonl"
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


# its engine is measured, as its steps are not fused
ADAM = '[optimizer]\nname = "adam"\nlr = 0.003\n[plan]'


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["[plan]", ADAM], ids=["sgd", "adam"])
def test_kill_minus_nine_at_a_random_moment_then_resume_gives_the_same_bits(plan, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY.replace("[plan]", plan))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = {
        "cwd": tmp_path,
        "env": environment,
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    started = time.monotonic()
    subprocess.run(command("run", "study.toml", "--out", "whole"), check=True, timeout=120, **run)
    seconds = time.monotonic() - started
    for attempt in range(2):
        broken = tmp_path / f"broken{attempt}"
        process = subprocess.Popen(command("run", "study.toml", "--out", broken), **run)
        try:
            process.wait(timeout=random.uniform(0.3, 0.95) * seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        verb = (
            ["resume", broken]
            if (broken / "settings.json").exists()
            else ["run", "study.toml", "--out", broken]
        )
        subprocess.run(command(*verb), check=True, timeout=120, **run)
        assert saved_files(broken) == saved_files(tmp_path / "whole")


@pytest.mark.parametrize("request_to_stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_what_is_done_and_prints_how_to_resume(request_to_stop, tmp_path):
    longer = STUDY.replace("rounds = 12", "rounds = 5000")
    without_checkpoints = longer.replace("checkpoint_every = 2", "checkpoint_every = 5000")
    (tmp_path / "study.toml").write_text(without_checkpoints)
    process = subprocess.Popen(
        command("run", "study.toml", "--out", "stopped"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # a process that runs in the background ignores the signal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    rows = tmp_path / "stopped/experiments/first/rows.jsonl"
    deadline = time.monotonic() + 60
    while len(read_rows(rows)) < 10 and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(request_to_stop)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "continue with: glocal resume stopped" in errors
    assert "Traceback" not in errors
    assert (tmp_path / "stopped/experiments/first/checkpoint.safetensors").exists()


def test_a_longer_plan_continues_a_finished_run(tmp_path):
    every = Options(validate_every=1)
    plan = glocal.Plan(4, 3, batch_size=5)
    fitted("lg_fedavg", folder=tmp_path / "short", plan=plan, options=every)
    longer = fitted("lg_fedavg", folder=tmp_path / "short", options=every)
    whole = fitted("lg_fedavg", folder=tmp_path / "whole", options=every)
    assert world.same_bits(longer.state, whole.state)
    rows = (tmp_path / "short/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "whole/rows.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"make": world.plain}, r"another algorithm"),
        ({"name": "fedavg"}, r"another algorithm \(lg_fedavg: .* than the one given \(fedavg: "),
        ({"plan": glocal.Plan(7, 2, batch_size=5)}, "another plan"),
        ({"plan": glocal.Plan(7, 3, batch_size=5, seed=4)}, "another seeds"),
    ],
)
def test_a_run_is_not_resumed_with_something_else(other, message, tmp_path):
    fitted("lg_fedavg", folder=tmp_path)
    before = saved_files(tmp_path)
    with pytest.raises(InputError, match=message):
        fitted(**{"name": "lg_fedavg", "folder": tmp_path, **other})
    assert saved_files(tmp_path) == before


def test_a_damaged_checkpoint_is_refused_and_not_changed(tmp_path):
    fitted("lg_fedavg", folder=tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="is damaged"):
        fitted("lg_fedavg", folder=tmp_path)
    assert path.stat().st_size == 1000


@pytest.mark.parametrize("name", algorithms.__all__)
def test_personal_models_are_saved_and_load_back_as_plain_state_dicts(name, tmp_path):
    result = fitted(name, folder=tmp_path)
    test = world.federation().test
    files = sorted((tmp_path / "models/seed-0").glob("*.safetensors"))
    assert len(files) == (world.NUM_CLIENTS if result.state.private.initial else 1)
    for client in range(world.NUM_CLIENTS):
        model = world.with_batch_norm()
        model.load_state_dict(load_file(files[client if len(files) > 1 else 0]))
        x, y, _ = test.of(client)
        if len(y):
            accuracy = (model.eval()(x).argmax(1) == y).double().mean().item()
            assert result.accuracies[client] == pytest.approx(accuracy)
            assert torch.equal(result.model(client)(x), model(x))


def test_a_warm_start_continues_from_the_averaged_model_and_counts_its_traffic():
    first = fitted("fedavg")
    second = fitted("lg_fedavg", start_from=first)
    assert second.plan.first_round == 7
    assert second.ledger.paper.parameters > first.ledger.paper.parameters
    fresh = experiment("lg_fedavg")
    warm = replace(
        fresh,
        plan=glocal.Plan(7, 3, batch_size=5, first_round=7),
        params=(warm_start_params(first.algorithm, first.state),),
        spent=(first.ledger,),
    )
    again = fit_case(warm, OFTEN)[0]
    assert world.same_bits(second.state, again.state)


def test_the_best_round_is_chosen_on_validation_data_alone(tmp_path):
    """With other labels of the test data, the same round is selected."""
    model = world.seeded(world.plain)
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.SGD(0.5, momentum=0.9))
    results, options = [], Options(validate_every=1, select="best")
    for shift in (0, 1):
        test = world.clients((30, 30, 30), seed=shift + 5)
        federation = world.federation(sizes=(60, 60, 60), test=test, validation=0.3)
        labels = federation.test.examples.y
        labels.copy_((labels + shift) % world.CLASSES)
        plan, folder = glocal.Plan(12, 2), tmp_path / str(shift)
        result = glocal.fit(algorithm, model, federation, plan, options=options, folder=folder)
        results.append(result)
    scores = [row["validation"] for row in read_rows(tmp_path / "0/rows.jsonl")]
    assert results[0].selected_round == results[1].selected_round == scores.index(max(scores)) + 1
    assert results[0].validation.mean == pytest.approx(max(scores))
    assert trees.same_bits(results[0].state.shared, results[1].state.shared)


def test_selection_without_validation_data_is_refused():
    model = world.seeded(world.plain)
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.SGD(0.1))
    data, options = world.federation(validation=0.0), Options(select="best")
    with pytest.raises(InputError, match="needs validation data, and no client has any"):
        glocal.fit(algorithm, model, data, PLAN, options=options)


def test_clients_never_sampled_are_reported():
    result = fitted("lg_fedavg", plan=glocal.Plan(1, 2))
    assert result.as_dict()["never_sampled"] == 4
    assert sum(result.times_sampled) == 2


def test_evaluation_and_the_ensemble_are_in_the_ledger():
    result = fitted("lg_fedavg")
    shared, local = trees.numel(result.state.shared), trees.numel(result.state.private.initial)
    with_val, with_test = (
        len(result.sizes[part]) - result.sizes[part].count(0) for part in ("val", "test")
    )
    validations = 3  # after rounds 2, 4 and 6
    assert result.ledger.evaluation.parameters == shared * (validations * with_val + with_test)
    assert result.ledger.ensemble.parameters == local * len(result.state.private.trained)


def test_rows_are_json_with_the_traffic_so_far(tmp_path):
    fitted("lg_fedavg", folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(7))
    validated = [row["round"] for row in rows if row["validation"] is not None]
    assert validated == [1, 3, 5]
    assert all(before["bytes"] < after["bytes"] for before, after in pairwise(rows))


def test_an_unknown_client_number_is_refused():
    with pytest.raises(InputError, match=r"there is no client 6; clients are 0\.\.5"):
        fitted("fedavg").model(6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "test"}, "'last' or 'best'"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0; a whole number from 1"),
        ({"validate_every": -1}, "validate_every is -1; a whole number from 1"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    "options", [{"engine": "vmaped"}, {"chunk_size": 0}, {"device": "quantum"}]
)
def test_engines_that_do_not_exist_are_refused(options):
    with pytest.raises(InputError):
        fitted("fedavg", options=Options(**options))


@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_the_best_round_survives_a_stop(name, tmp_path):
    best = Options(validate_every=1, checkpoint_every=1, select="best")
    whole = fitted(name, folder=tmp_path / "whole", options=best)
    fitted(name, folder=tmp_path / "parts", plan=glocal.Plan(3, 3, batch_size=5), options=best)
    resumed = fitted(name, folder=tmp_path / "parts", options=best)
    assert resumed.selected_round == whole.selected_round
    assert world.same_bits(resumed.state, whole.state)
    assert resumed.as_dict() == whole.as_dict()


def test_a_stop_while_a_row_is_written_loses_no_row(tmp_path, monkeypatch):
    whole = fitted("lg_fedavg", folder=tmp_path / "whole")
    calls = []

    def interrupted(path, rows):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        files.append_rows(path, rows)

    monkeypatch.setattr("glocal.federate.checkpoint.append_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fitted("lg_fedavg", folder=tmp_path / "stopped")
    monkeypatch.undo()
    resumed = fitted("lg_fedavg", folder=tmp_path / "stopped")
    assert world.same_bits(whole.state, resumed.state)
    rows = (tmp_path / "stopped/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "whole/rows.jsonl").read_bytes()


def test_clients_of_different_sizes_are_tested_the_same_on_every_engine():
    model = world.seeded(world.plain)
    federation = world.federation(sizes=(2000, 50, 700, 3), test=0.4)
    algorithm = world.algorithm("lg_fedavg", model, num_clients=4)
    plan, results = glocal.Plan(1, 4, batch_size=50), []
    for changes in ({}, {"engine": "looped"}, {"chunk_size": 1}, {"chunk_size": 3}):
        options = Options(validate_every=1, **changes)
        result = glocal.fit(algorithm, model, federation, plan, options=options)
        results.append((result.accuracies.tolist()[:3], result.new_spread))
    assert results.count(results[0]) == 4


def other_data():
    federation = world.federation()
    labels = federation.train.examples.y
    labels.copy_((labels + 1) % world.CLASSES)
    return federation


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optimizer": glocal.Adam(0.01)}, "another algorithm"),
        ({"optimizer": glocal.SGD(0.2, momentum=0.5)}, "another algorithm"),
        ({"federation": other_data}, "another data"),
        ({"options": Options(select="best")}, "another choice"),
    ],
)
def test_a_run_is_not_resumed_with_another_optimizer_data_or_selection(other, message, tmp_path):
    model = world.seeded(world.plain)

    def again(optimizer=None, federation=world.federation, options=None):
        algorithm = world.algorithm("lg_fedavg", model, optimizer=optimizer)
        return glocal.fit(algorithm, model, federation(), PLAN, options=options, folder=tmp_path)

    again()
    with pytest.raises(InputError, match=message):
        again(**other)


def test_a_warm_start_from_mtl_is_its_mean_and_from_local_only_is_refused():
    mtl = fitted("mtl")
    start = trees.pick(warm_start_params(mtl.algorithm, mtl.state), mtl.state.shared)
    assert trees.same_bits(start, mtl.state.shared)
    with pytest.raises(InputError, match="local_only shares nothing"):
        fitted("lg_fedavg", start_from=fitted("local_only"))


def test_a_warm_start_from_another_model_is_refused():
    with pytest.raises(InputError, match="start_from is of another model"):
        fitted("lg_fedavg", start_from=fitted("fedavg", make=world.plain))


def test_mtl_made_for_another_number_of_clients_is_refused():
    model = world.seeded(world.plain)
    with pytest.raises(InputError, match="mtl: made for 5 clients, but the data have 6"):
        glocal.fit(world.algorithm("mtl", model, num_clients=5), model, world.federation(), PLAN)


def test_a_split_of_another_model_is_refused():
    split = world.first_half(world.with_batch_norm())
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, split=split)
    with pytest.raises(InputError, match="the split is of another model"):
        glocal.fit(algorithm, model, world.federation(), PLAN)


def test_a_run_in_two_parts_has_the_traffic_of_one(tmp_path):
    fitted("lg_fedavg", folder=tmp_path, plan=glocal.Plan(5, 3, batch_size=5))
    assert fitted("lg_fedavg", folder=tmp_path).ledger == fitted("lg_fedavg").ledger


def test_a_study_that_is_refused_leaves_its_folder_as_it_was(tmp_path):
    short = STUDY.replace("rounds = 12", "rounds = 4").replace("start_round = 8", "start_round = 2")
    study = from_dict(tomllib.loads(short))
    list(run_study(study, tmp_path))
    before = saved_files(tmp_path)
    changes = [
        "model.hidden=[9]",
        "optimizer.lr=0.5",
        "plan.rounds=2",
        "plan.batch_size=3",
        "experiments.second.start_round=3",
        "run.select=best",
    ]
    for change in changes:
        with pytest.raises(InputError):
            list(run_study(with_overrides(study, [change]), tmp_path))
        assert saved_files(tmp_path) == before, change
    list(run_study(study, tmp_path))
    assert saved_files(tmp_path) == before


def test_a_longer_study_does_not_move_the_start_of_its_warm_started_experiments(tmp_path):
    plain = STUDY.replace("rounds = 12", "rounds = 4").replace("start_round = 8\n", "rounds = 4\n")
    list(run_study(from_dict(tomllib.loads(plain)), tmp_path))
    second = (tmp_path / "experiments/second/rows.jsonl").read_bytes()
    list(run_study(with_overrides(read_settings(tmp_path), ["plan.rounds=6"]), tmp_path))
    assert len(read_rows(tmp_path / "experiments/first/rows.jsonl")) == 2 * 6
    assert (tmp_path / "experiments/second/rows.jsonl").read_bytes() == second


def test_a_run_that_saves_metrics_only_has_no_models_and_cannot_be_resumed(tmp_path):
    metrics = Options(validate_every=2, checkpoint_every=3, save="metrics")
    whole, light = (
        fitted("lg_fedavg", folder=tmp_path / each.save, options=each) for each in (OFTEN, metrics)
    )
    assert light.as_dict() == whole.as_dict()
    results = [tmp_path / name / "result.json" for name in ("metrics", "everything")]
    assert results[0].read_bytes() == results[1].read_bytes()
    assert not (tmp_path / "metrics/models").exists()
    files = [tmp_path / name / "checkpoint.safetensors" for name in ("metrics", "everything")]
    assert files[0].stat().st_size < files[1].stat().st_size / 2
    longer = glocal.Plan(9, 3, batch_size=5)
    with pytest.raises(InputError, match="has only the metrics of its run, so it cannot go on"):
        fitted("lg_fedavg", folder=tmp_path / "metrics", options=metrics, plan=longer)


def test_a_run_that_saves_metrics_only_is_resumed_after_a_stop(tmp_path):
    metrics = Options(validate_every=2, checkpoint_every=3, save="metrics")
    begun = move_to_device(experiment("lg_fedavg"), metrics)
    for moment in train(begun, metrics, start_or_resume(begun, metrics, tmp_path), tmp_path):
        if moment.progress.done == 4:
            break
    resumed = fitted("lg_fedavg", folder=tmp_path, options=metrics)
    assert resumed.as_dict() == fitted("lg_fedavg", options=metrics).as_dict()


@pytest.mark.parametrize(
    "data",
    [{2: [2], True: [3], None: []}, {'a "quoted" name': {"é": [1, [2]]}}, [[], [{}]], {}, "text"],
)
def test_formatted_json_has_the_same_content(data):
    assert json.loads(files.format_json(data)) == json.loads(json.dumps(data))


def test_formatted_json_refuses_the_keys_that_json_refuses():
    with pytest.raises(TypeError):
        files.format_json({(1, 2): [3]})


WARM = """
[data]
source = "digits"
clients = 6
validation = 0.3
[model]
hidden = [8]
[split]
local = ["layer1"]
[plan]
rounds = 6
clients_per_round = 3
[run]
validate_every = 1
select = "best"
[experiments.first]
algorithm = "fedavg"
[experiments.early]
algorithm = "lg_fedavg"
start_from = "first"
start_round = 3
rounds = 1
[experiments.late]
algorithm = "lg_fedavg"
start_from = "first"
rounds = 1
"""


def run_warm(folder, *changes):
    """Run the study above; the steps."""
    return list(run_study(from_dict(tomllib.loads(WARM), changes), folder))


def shared_by_round(steps):
    """The first experiment's shared tree after each round."""
    progress = [
        step.moment.progress for step in steps if step.experiment == "first" and step.moment
    ]
    return {each.done: each.states[0].shared for each in progress}


def snapshot(folder, name):
    """A snapshot of the first experiment, by the model's own names."""
    tensors = load_file(folder / f"experiments/first/snapshots/{name}.safetensors")
    return {key.removeprefix("0/"): tensor for key, tensor in tensors.items()}


def result_text(folder, name):
    return (folder / f"experiments/{name}/result.json").read_text()


def without_late(settings):
    experiments = {key: each for key, each in settings.experiments.items() if key != "late"}
    return replace(settings, experiments=experiments)


def test_with_selection_an_experiment_starts_from_the_best_model_so_far(tmp_path):
    models = shared_by_round(run_warm(tmp_path))
    scores = [row["validation"] for row in read_rows(tmp_path / "experiments/first/rows.jsonl")]
    for start in (3, 6):
        best = 1 + scores.index(max(scores[:start]))
        assert trees.same_bits(snapshot(tmp_path, f"round-{start:05d}"), models[best])
    assert scores.index(max(scores)) not in (2, 5), "else it could be the last round"


def test_one_experiment_may_start_from_the_last_model_and_another_from_the_best(tmp_path):
    models = shared_by_round(run_warm(tmp_path, "experiments.early.start_model=last"))
    names = sorted(path.name for path in (tmp_path / "experiments/first/snapshots").iterdir())
    assert names == ["round-00003-last.safetensors", "round-00006.safetensors"]
    assert trees.same_bits(snapshot(tmp_path, "round-00003-last"), models[3])
    with pytest.raises(InputError, match=r"past round 3 and did not save .*best"):
        run_warm(tmp_path)


@pytest.mark.parametrize(("first", "then"), [("best", "last"), ("last", "best")])
def test_an_experiment_that_has_begun_does_not_change_its_start_model(first, then, tmp_path):
    # with these, both models are saved
    both = ["experiments.late.start_round=3", f"experiments.late.start_model={then}"]
    run_warm(tmp_path, *both, f"experiments.early.start_model={first}")
    with pytest.raises(InputError, match="early was made with another start_model"):
        run_warm(tmp_path, *both, f"experiments.early.start_model={then}")


def test_an_experiment_that_has_begun_does_not_change_its_start(tmp_path):
    warm = from_dict(tomllib.loads(WARM))
    first, late = warm.experiments["first"], warm.experiments["late"]
    other = replace(first, algorithm="fedprox", hyperparameters={"mu": 1.0})
    experiments = {"first": first, "other": other, "late": late}
    list(run_study(replace(warm, experiments=experiments), tmp_path))
    experiments["late"] = replace(late, start_from="other", rounds=2)
    message = r"late was made with another start_from \(first\) than the one given \(other\)"
    with pytest.raises(InputError, match=message):
        list(run_study(replace(warm, experiments=experiments), tmp_path))


def test_a_finished_run_is_not_used_for_one_with_other_tests(tmp_path):
    run_warm(tmp_path, "run.tests=local")
    with pytest.raises(InputError, match=r"first was made with another choice .*'tests': 'local'"):
        run_warm(tmp_path)


def test_a_key_of_a_fingerprint_may_not_be_left_out(tmp_path):
    message = r"was made with another audit \(all\) than the one given \(None\)"
    with pytest.raises(InputError, match=message):
        _require_same_fingerprint({"plan": 1, "audit": "all"}, {"plan": 1}, tmp_path)


def test_without_selection_start_model_last_is_the_default(tmp_path):
    for folder, changes in (("default", []), ("last", ["experiments.early.start_model=last"])):
        run_warm(tmp_path / folder, "run.select=last", *changes)
        run_warm(tmp_path / folder, "run.select=last")  # the same settings
    results = [result_text(tmp_path / folder, "early") for folder in ("default", "last")]
    assert results[0] == results[1]


def test_an_experiment_can_be_added_after_a_finished_one(tmp_path):
    whole = from_dict(tomllib.loads(WARM))
    list(run_study(whole, tmp_path / "whole"))
    list(run_study(without_late(whole), tmp_path / "added"))
    list(run_study(whole, tmp_path / "added"))
    assert result_text(tmp_path / "added", "late") == result_text(tmp_path / "whole", "late")


def test_an_experiment_cannot_be_added_where_only_metrics_were_saved(tmp_path):
    whole = from_dict(tomllib.loads(WARM), ["run.save=metrics"])
    list(run_study(without_late(whole), tmp_path))
    before = (tmp_path / "settings.json").read_text()
    with pytest.raises(InputError, match="has only the metrics of its run"):
        list(run_study(whole, tmp_path))
    assert (tmp_path / "settings.json").read_text() == before
