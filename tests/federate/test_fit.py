"""From data to each client's own model: warm starts, selection on validation data, resuming."""

import json
import os
import random
import re
import shutil
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
from torch import nn

import glocal
from glocal.algorithms.contract import Algorithm
from glocal.core import files, trees
from glocal.core.errors import InputError
from glocal.core.files import read_rows
from glocal.federate.checkpoint import _require_same_spec
from glocal.federate.fit import build_experiment, warm_start_params
from glocal.federate.options import Evaluation, Options
from glocal.federate.run import Run
from glocal.studies import run_study, with_overrides
from glocal.studies.run import StudyRun, read_settings
from glocal.studies.settings import from_dict
from tests.support import world

PLAN = glocal.Plan(rounds=7, clients_per_round=3, batch_size=5)
EVERY_SECOND = Evaluation(every=2)
OFTEN = Options(checkpoint_every=3)


def experiment(
    name, *, plan=PLAN, seeds=(0,), make=world.with_batch_norm, evaluation=EVERY_SECOND, **more
):
    """An experiment on the small federation."""
    data = more.pop("data", None) or world.federation()
    start_from = more.pop("start_from", None)
    algorithm = world.algorithm(name, world.seeded(make), **more)
    return build_experiment(
        algorithm, data, plan=plan, seeds=seeds, evaluation=evaluation, start_from=start_from
    )


def fitted(name, *, folder=None, options=OFTEN, **settings):
    return Run(experiment(name, **settings), folder=folder, options=options).to_end()


def some_rounds(run, count):
    """Carry out some rounds of a run, then stop it as Ctrl-C does."""
    remaining = iter(run)
    for _ in range(count):
        next(remaining)
    remaining.close()


@pytest.mark.parametrize("name", world.NAMES)
@pytest.mark.parametrize(
    "stop_after",
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)],
)
def test_a_run_that_is_stopped_goes_on_to_the_same_bits(name, stop_after, tmp_path):
    whole = fitted(name, folder=tmp_path / "whole")
    some_rounds(Run(experiment(name), folder=tmp_path / "broken", options=OFTEN), stop_after)
    resumed = fitted(name, folder=tmp_path / "broken")
    assert world.same_bits(whole.group().state.alone(), resumed.group().state.alone())
    assert whole.group().as_dict() == resumed.group().as_dict()
    assert saved_files(tmp_path / "broken") == saved_files(tmp_path / "whole")


@pytest.mark.parametrize("name", world.NAMES)
def test_a_crash_without_warning_goes_on_from_the_last_checkpoint(name, tmp_path):
    """A kill leaves rows after the checkpoint, and half a row."""
    seeds = (0, 1)
    whole = fitted(name, folder=tmp_path / "whole", seeds=seeds)
    rounds = iter(Run(experiment(name, seeds=seeds), folder=tmp_path / "broken", options=OFTEN))
    for _ in range(5):
        next(rounds)
    # the disk after five rounds; the checkpoint is of round three
    shutil.copytree(tmp_path / "broken", tmp_path / "crashed")
    with (tmp_path / "crashed/rows.jsonl").open("a") as rows:
        rows.write('{"seed": 0, "rou')
    resumed = fitted(name, folder=tmp_path / "crashed", seeds=seeds)
    for one, other in zip(whole.groups, resumed.groups, strict=True):
        assert world.same_bits(one.state.alone(), other.state.alone())
    assert saved_files(tmp_path / "whole") == saved_files(tmp_path / "crashed")


def test_a_checkpoint_writes_only_the_rows_that_changed(tmp_path):
    one_round = Options(checkpoint_every=1)
    run = Run(experiment("lg_fedavg"), folder=tmp_path, options=one_round)
    sizes = []
    for _ in run:
        newest = max((tmp_path / "checkpoint").glob("*.safetensors"))
        sizes.append(len(load_file(newest)["private 0:0.weight"]))
    assert sizes[:-1] == [PLAN.clients_per_round] * 6
    trained = {client for client, times in enumerate(run.finish().group().times_sampled) if times}
    assert sizes[-1] == len(trained)  # the last one is written anew


def test_rows_that_nobody_needs_any_more_are_written_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("glocal.federate.row_files._FEW", 4)
    run = Run(experiment("lg_fedavg"), folder=tmp_path, options=Options(checkpoint_every=1))
    for _ in run:
        rows = sum(
            len(load_file(path)["private 0:0.weight"])
            for path in (tmp_path / "checkpoint").glob("*.safetensors")
        )
        assert rows <= 2 * world.NUM_CLIENTS + PLAN.clients_per_round


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
    every = Evaluation(every=1)
    plan = glocal.Plan(4, 3, batch_size=5)
    fitted("lg_fedavg", folder=tmp_path / "short", plan=plan, evaluation=every)
    longer = fitted("lg_fedavg", folder=tmp_path / "short", evaluation=every)
    whole = fitted("lg_fedavg", folder=tmp_path / "whole", evaluation=every)
    assert world.same_bits(longer.group().state.alone(), whole.group().state.alone())
    rows = (tmp_path / "short/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "whole/rows.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"make": world.plain}, r"another algorithm.task.model"),
        ({"name": "fedavg"}, r"another algorithm.type .*LGFedAvg.* than the one given .*FedAvg"),
        ({"plan": glocal.Plan(7, 2, batch_size=5)}, "another plan.clients_per_round"),
        ({"seeds": (4,)}, "another seeds"),
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


@pytest.mark.parametrize("rounds", [1, 7])
@pytest.mark.parametrize("name", world.NAMES)
def test_personal_models_are_saved_and_load_back_as_plain_state_dicts(name, rounds, tmp_path):
    """Clients that never trained share a file; so do all where nothing is private."""
    plan = glocal.Plan(rounds, 3, batch_size=5)
    result = fitted(name, folder=tmp_path, plan=plan).group()
    test, models = world.federation().test, tmp_path / "models/seed-0"
    for client in range(world.NUM_CLIENTS):
        own, untrained = (
            models / f"client-{client:04d}.safetensors",
            models / "untrained.safetensors",
        )
        everybody = models / "every-client.safetensors"
        path = next(path for path in (everybody, own, untrained) if path.exists())
        assert path is not own or result.times_sampled[client]
        model = world.with_batch_norm()
        model.load_state_dict(load_file(path))
        x, y, _ = test.of(client)
        if len(y):
            outputs, every_row = model.eval()(x), torch.ones(len(y), dtype=torch.bool)
            assert torch.equal(result.model(client)(x), outputs)
            if type(result.algorithm).predict is not Algorithm.predict:  # FedProto's prototypes
                outputs = result.algorithm.predict(result.params(client), x, every_row)
            accuracy = (outputs.argmax(1) == y).double().mean().item()
            assert result.by_client[client] == pytest.approx(accuracy)


def test_a_warm_start_continues_from_the_averaged_model_and_counts_its_traffic():
    first = fitted("fedavg")
    second = fitted("lg_fedavg", start_from=first)
    assert second.group().plan.first_round == 7
    assert second.ledger.paper.parameters > first.ledger.paper.parameters
    fresh, earlier = experiment("lg_fedavg"), first.group()
    params = warm_start_params(earlier.algorithm, earlier.state)
    group = replace(fresh.groups[0], params=(params,), spent=(first.ledger,))
    plan = glocal.Plan(7, 3, batch_size=5, first_round=7)
    again = Run(replace(fresh, groups=(group,), plan=plan), options=OFTEN).to_end()
    assert world.same_bits(second.group().state.alone(), again.group().state.alone())


def test_the_best_round_is_chosen_on_validation_data_alone(tmp_path):
    """With other labels of the test data, the same round is selected."""
    task = glocal.classification(world.seeded(world.plain))
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.5, momentum=0.9))
    results, evaluation = [], Evaluation(every=1, select="best")
    for shift in (0, 1):
        test = world.clients((30, 30, 30), seed=shift + 5)
        federation = world.federation(sizes=(60, 60, 60), test=test, validation=0.3)
        labels = federation.test.examples.y
        labels.copy_((labels + shift) % world.CLASSES)
        result = glocal.fit(
            algorithm,
            federation,
            rounds=12,
            clients_per_round=2,
            evaluation=evaluation,
            folder=tmp_path / str(shift),
            progress=False,
        )
        results.append(result.group())
    scores = [row["validation"] for row in read_rows(tmp_path / "0/rows.jsonl")]
    assert results[0].selected_round == results[1].selected_round == scores.index(max(scores)) + 1
    validation = results[0].validation["accuracy"].summary()
    assert validation.mean == pytest.approx(max(scores))
    assert trees.same_bits(results[0].state.shared, results[1].state.shared)


def test_selection_without_validation_data_is_refused():
    data, best = world.federation(validation=0.0), Evaluation(select="best")
    with pytest.raises(InputError, match="needs validation data, and no client has any"):
        fitted("fedavg", data=data, evaluation=best)


def test_clients_never_sampled_are_reported():
    result = fitted("lg_fedavg", plan=glocal.Plan(1, 2)).group()
    assert result.as_dict()["never_sampled"] == 4
    assert sum(result.times_sampled) == 2


def test_evaluation_and_the_ensemble_are_in_the_ledger():
    result = fitted("lg_fedavg").group()
    shared, local = trees.numel(result.state.shared), trees.numel(result.state.private.initial)
    with_val, with_test = (
        len(result.sizes[part]) - result.sizes[part].count(0) for part in ("val", "test")
    )
    validations = 3  # after rounds 2, 4 and 6
    assert result.ledger.evaluation.parameters == shared * (validations * with_val + with_test)
    assert result.ledger.ensemble.parameters == local * len(result.state.private.stored)


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
        ({"checkpoint_every": 0}, "checkpoint_every is 0; a whole number from 1"),
        ({"save": "all"}, "save is 'all'; known: everything, metrics"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "test"}, "'last', 'best' or a metric with its direction"),
        ({"select": 3}, "select is 3; 'last', 'best' or a metric"),
        ({"every": -1}, "every is -1; a whole number from 1"),
        ({"new_test": "no"}, "new_test is 'no'; True or False was expected"),
    ],
)
def test_an_invalid_evaluation_is_refused(settings, message):
    with pytest.raises(InputError, match=message):
        Evaluation(**settings)


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ("max loss", "loss is better when lower; use 'min loss'"),
        ("min accuracy", "accuracy is better when higher; use 'max accuracy'"),
        ("max acuracy", "there is no metric 'acuracy'; did you mean 'accuracy'?"),
    ],
)
def test_a_metric_is_selected_by_its_own_direction(select, message):
    with pytest.raises(InputError, match=re.escape(message)):
        fitted("fedavg", evaluation=Evaluation(select=select))


def test_rounds_are_selected_by_the_metric_that_is_named(tmp_path):
    lowest = Evaluation(every=1, select="min loss")
    result = fitted("fedavg", folder=tmp_path, evaluation=lowest)
    losses = [row["metrics"]["loss"] for row in read_rows(tmp_path / "rows.jsonl")]
    assert result.group().selected_round == losses.index(min(losses)) + 1
    assert {metric.name for metric in result.metrics.metrics} == {"accuracy", "loss"}


@pytest.mark.parametrize(
    "options", [{"engine": "vmaped"}, {"chunk_size": 0}, {"device": "quantum"}]
)
def test_engines_that_do_not_exist_are_refused(options):
    with pytest.raises(InputError):
        fitted("fedavg", options=Options(**options))


@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_the_best_round_survives_a_stop(name, tmp_path):
    how = {"evaluation": Evaluation(every=1, select="best"), "options": Options(checkpoint_every=1)}
    whole = fitted(name, folder=tmp_path / "whole", **how).group()
    fitted(name, folder=tmp_path / "parts", plan=glocal.Plan(3, 3, batch_size=5), **how)
    resumed = fitted(name, folder=tmp_path / "parts", **how).group()
    assert resumed.selected_round == whole.selected_round
    assert world.same_bits(resumed.state.alone(), whole.state.alone())
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
    assert world.same_bits(whole.group().state.alone(), resumed.group().state.alone())
    rows = (tmp_path / "stopped/rows.jsonl").read_bytes()
    assert rows == (tmp_path / "whole/rows.jsonl").read_bytes()


def test_clients_of_different_sizes_are_tested_the_same_on_every_engine():
    data = world.federation(sizes=(2000, 50, 700, 3), test=0.4)
    plan, results = glocal.Plan(1, 4, batch_size=50), []
    for changes in ({}, {"engine": "looped"}, {"chunk_size": 1}, {"chunk_size": 3}):
        result = fitted("lg_fedavg", data=data, plan=plan, options=Options(**changes)).group()
        results.append((result.by_client.tolist()[:3], result.new))
    assert results.count(results[0]) == 4


def other_data():
    federation = world.federation()
    labels = federation.train.examples.y
    labels.copy_((labels + 1) % world.CLASSES)
    return federation


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optimizer": glocal.Adam(lr=0.01)}, "another algorithm.optimizer.type"),
        (
            {"optimizer": glocal.SGD(lr=0.2, momentum=0.5)},
            r"another algorithm.optimizer.lr \(0.1\) than the one given \(0.2\)",
        ),
        ({"data": other_data()}, "another data"),
        ({"evaluation": Evaluation(every=2, select="best")}, "another evaluation.select"),
        ({"aggregation": glocal.Mean(by="clients")}, "another algorithm.aggregation.by"),
        ({"aggregation": glocal.Median()}, "another algorithm.aggregation.type"),
        ({"aggregation": glocal.Mean(max_weight=9)}, "another algorithm.aggregation.max_weight"),
        ({"task": "another loss"}, "another algorithm.task.loss"),
    ],
)
def test_a_run_is_not_resumed_with_another_setting(other, message, tmp_path):
    if other.get("task"):
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        other = {"task": glocal.Task(world.seeded(world.with_batch_norm), loss, "accuracy")}
    fitted("lg_fedavg", folder=tmp_path)
    with pytest.raises(InputError, match=message):
        fitted("lg_fedavg", folder=tmp_path, **other)


def test_an_aggregation_that_needs_more_clients_is_refused_before_the_first_round(tmp_path):
    with pytest.raises(InputError, match=r"^aggregation: krum\(2\) needs .* at least 5 .* are 4;"):
        fitted("lg_fedavg", aggregation=glocal.Krum(2), folder=tmp_path, plan=glocal.Plan(2, 4))
    assert not list(tmp_path.iterdir())


def test_a_warm_start_from_mtl_is_its_mean_and_from_local_only_is_refused():
    mtl = fitted("mtl").group()
    start = trees.pick(warm_start_params(mtl.algorithm, mtl.state), mtl.state.shared)
    assert trees.same_bits(start, mtl.state.shared)
    with pytest.raises(InputError, match="LocalOnly shares nothing"):
        fitted("lg_fedavg", start_from=fitted("local_only"))


def test_a_warm_start_from_another_model_is_refused():
    with pytest.raises(InputError, match="start_from is of another model"):
        fitted("lg_fedavg", start_from=fitted("fedavg", make=world.plain))


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
    metrics = Options(checkpoint_every=3, save="metrics")
    whole, light = (
        fitted("lg_fedavg", folder=tmp_path / each.save, options=each).group()
        for each in (OFTEN, metrics)
    )
    assert light.as_dict() == whole.as_dict()
    results = [tmp_path / name / "result.json" for name in ("metrics", "everything")]
    assert results[0].read_bytes() == results[1].read_bytes()
    assert not (tmp_path / "metrics/models").exists()
    files = [tmp_path / name / "checkpoint.safetensors" for name in ("metrics", "everything")]
    assert files[0].stat().st_size < files[1].stat().st_size
    assert not (tmp_path / "metrics/checkpoint").exists()
    longer = glocal.Plan(9, 3, batch_size=5)
    with pytest.raises(InputError, match="has only the metrics of its run, so it cannot go on"):
        fitted("lg_fedavg", folder=tmp_path / "metrics", options=metrics, plan=longer)


def test_a_run_that_saves_metrics_only_is_resumed_after_a_stop(tmp_path):
    metrics = Options(checkpoint_every=3, save="metrics")
    some_rounds(Run(experiment("lg_fedavg"), folder=tmp_path, options=metrics), 4)
    resumed = fitted("lg_fedavg", folder=tmp_path, options=metrics).group()
    assert resumed.as_dict() == fitted("lg_fedavg", options=metrics).group().as_dict()


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


class Shared:
    """A callback that collects the shared tree after every round."""

    def __init__(self, name):
        self.name, self.seen = name, []

    def on_round(self, run, records):
        self.seen.append((self.name, records[0].done, run.progress.states[0].shared))


def run_warm(folder, *changes):
    """Run the study above; every experiment's shared tree after each round."""
    study, seen = from_dict(tomllib.loads(WARM), changes), []
    original = StudyRun._callbacks

    def with_spy(self, name):
        spy = Shared(name)
        spy.seen = seen
        return [*original(self, name), spy]

    StudyRun._callbacks = with_spy
    try:
        list(run_study(study, folder))
    finally:
        StudyRun._callbacks = original
    return seen


def shared_by_round(steps):
    """The first experiment's shared tree after each round."""
    return {done: shared for name, done, shared in steps if name == "first"}


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
    with pytest.raises(InputError, match=r"first was made with another evaluation.new_test"):
        run_warm(tmp_path)


def test_a_key_of_a_spec_may_not_be_left_out(tmp_path):
    message = r"was made with another audit \(all\) than the one given \(none\)"
    with pytest.raises(InputError, match=message):
        _require_same_spec({"plan": 1, "audit": "all"}, {"plan": 1}, tmp_path)


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
