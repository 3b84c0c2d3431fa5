"""From data to each device's own model: warm starts, selection on validation, and going on after a stop."""

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
    rounds = train(
        broken, OFTEN, start_or_resume(broken, OFTEN, tmp_path / "broken"), tmp_path / "broken"
    )
    for _ in range(stop_after):
        next(rounds)
    rounds.close()
    resumed = fit_case(experiment(name), OFTEN, tmp_path / "broken")[0]
    assert world.same_bits(whole.state, resumed.state)
    assert whole.as_dict() == resumed.as_dict()
    assert (tmp_path / "whole/rows.jsonl").read_bytes() == (
        tmp_path / "broken/rows.jsonl"
    ).read_bytes()
    assert (tmp_path / "whole/checkpoint.safetensors").read_bytes() == (
        tmp_path / "broken/checkpoint.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("name", algorithms.__all__)
def test_a_crash_without_warning_goes_on_from_the_last_checkpoint(name, tmp_path):
    """Rows after the checkpoint, and half a row, are what a kill leaves behind."""
    whole = fit_case(experiment(name, (0, 1)), OFTEN, tmp_path / "whole")
    broken = move_to_device(experiment(name, (0, 1)), OFTEN)
    rounds = train(
        broken, OFTEN, start_or_resume(broken, OFTEN, tmp_path / "broken"), tmp_path / "broken"
    )
    for _ in range(5):
        next(rounds)
    crashed = (
        tmp_path / "crashed"
    )  # as the disk was after five rounds: the checkpoint is of round three
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


def kept(folder: Path):
    """Everything a run keeps, but for the seconds it took."""
    files = [
        file for file in sorted(folder.rglob("*")) if file.is_file() and file.name != "timing.jsonl"
    ]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


ADAM = '[optimizer]\nname = "adam"\nlr = 0.003\n[plan]'  # measured, for its steps are not fused


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
    usual = time.monotonic() - started
    for attempt in range(2):
        broken = tmp_path / f"broken{attempt}"
        process = subprocess.Popen(command("run", "study.toml", "--out", broken), **run)
        try:
            process.wait(timeout=random.uniform(0.3, 0.95) * usual)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        verb = (
            ["resume", broken]
            if (broken / "settings.json").exists()
            else ["run", "study.toml", "--out", broken]
        )
        subprocess.run(command(*verb), check=True, timeout=120, **run)
        assert kept(broken) == kept(tmp_path / "whole")


@pytest.mark.parametrize("request_to_stop", [signal.SIGINT, signal.SIGTERM])
def test_control_c_saves_what_is_done_and_says_how_to_go_on(request_to_stop, tmp_path):
    (tmp_path / "study.toml").write_text(
        STUDY.replace("rounds = 12", "rounds = 5000").replace("checkpoint_every = 2", "checkpoint_every = 5000")
    )
    process = subprocess.Popen(
        command("run", "study.toml", "--out", "stopped"),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # which it ignores if the tests are run in the background
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
    fitted(
        "lg_fedavg",
        folder=tmp_path / "short",
        plan=glocal.Plan(4, 3, batch_size=5),
        options=Options(validate_every=1),
    )
    longer = fitted("lg_fedavg", folder=tmp_path / "short", options=Options(validate_every=1))
    whole = fitted("lg_fedavg", folder=tmp_path / "whole", options=Options(validate_every=1))
    assert world.same_bits(longer.state, whole.state)
    assert (tmp_path / "short/rows.jsonl").read_bytes() == (
        tmp_path / "whole/rows.jsonl"
    ).read_bytes()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"make": world.plain}, r"another algorithm"),
        ({"name": "fedavg"}, r"another algorithm \(lg_fedavg: .* than the one given \(fedavg: "),
        ({"plan": glocal.Plan(7, 2, batch_size=5)}, "another plan"),
        ({"plan": glocal.Plan(7, 3, batch_size=5, seed=4)}, "another seeds"),
    ],
)
def test_a_run_is_not_continued_with_something_else(other, message, tmp_path):
    fitted("lg_fedavg", folder=tmp_path)
    before = kept(tmp_path)
    with pytest.raises(InputError, match=message):
        fitted(**{"name": "lg_fedavg", "folder": tmp_path, **other})
    assert kept(tmp_path) == before


def test_a_damaged_checkpoint_is_refused_and_kept(tmp_path):
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
    for device in range(world.NUM_CLIENTS):
        model = world.with_batch_norm()
        model.load_state_dict(load_file(files[device if len(files) > 1 else 0]))
        x, y, _ = test.of(device)
        if len(y):
            accuracy = (model.eval()(x).argmax(1) == y).double().mean().item()
            assert result.accuracies[device] == pytest.approx(accuracy)
            assert torch.equal(result.model(device)(x), model(x))


def test_a_warm_start_continues_from_the_averaged_model_and_counts_its_traffic():
    first = fitted("fedavg")
    second = fitted("lg_fedavg", start_from=first)
    assert second.plan.first_round == 7
    assert second.ledger.paper.parameters > first.ledger.paper.parameters
    model = world.seeded(world.with_batch_norm)
    fresh = experiment("lg_fedavg")
    again = fit_case(
        Case(
            fresh.algorithm,
            model,
            glocal.Plan(7, 3, batch_size=5, first_round=7),
            (0,),
            (warm_start_params(first.algorithm, first.state),),
            fresh.federations,
            (first.ledger,),
        ),
        OFTEN,
    )[0]
    assert world.same_bits(second.state, again.state)


def test_the_best_round_is_chosen_on_validation_data_alone(tmp_path):
    """With the labels of the test data turned round, selection must not change."""
    model = world.seeded(world.plain)
    algorithm = glocal.fedavg(glocal.cross_entropy(model), glocal.sgd(0.5, momentum=0.9))
    results = []
    for turned in (0, 1):
        federation = world.federation(
            sizes=(60, 60, 60), test=world.clients((30, 30, 30), seed=turned + 5), validation=0.3
        )
        federation.test.examples.y.copy_((federation.test.examples.y + turned) % world.CLASSES)
        options = Options(validate_every=1, select="best")
        results.append(
            glocal.fit(
                algorithm,
                model,
                federation,
                glocal.Plan(12, 2),
                options=options,
                folder=tmp_path / str(turned),
            )
        )
    scores = [row["validation"] for row in read_rows(tmp_path / "0/rows.jsonl")]
    assert results[0].selected_round == results[1].selected_round == scores.index(max(scores)) + 1
    assert results[0].validation.mean == pytest.approx(max(scores))
    assert trees.same_bits(results[0].state.shared, results[1].state.shared)


def test_choosing_without_validation_data_is_refused():
    model = world.seeded(world.plain)
    with pytest.raises(
        InputError, match="select = 'best' needs validation data, and nobody has any"
    ):
        glocal.fit(
            glocal.fedavg(glocal.cross_entropy(model), glocal.sgd(0.1)),
            model,
            world.federation(validation=0.0),
            PLAN,
            options=Options(select="best"),
        )


def test_devices_never_sampled_are_reported():
    result = fitted("lg_fedavg", plan=glocal.Plan(1, 2))
    assert result.as_dict()["never_sampled"] == 4
    assert sum(result.times_sampled) == 2


def test_evaluation_and_the_ensemble_are_in_the_ledger():
    result = fitted("lg_fedavg")
    shared, local = trees.numel(result.state.shared), trees.numel(result.state.private.initial)
    tested = [sum(size > 0 for size in result.sizes[part]) for part in ("val", "test")]
    validations = 3  # after rounds 2, 4 and 6
    assert result.ledger.evaluation.parameters == shared * (validations * tested[0] + tested[1])
    assert result.ledger.ensemble.parameters == local * len(result.state.private.trained)


def test_rows_are_json_with_what_was_sent_so_far(tmp_path):
    fitted("lg_fedavg", folder=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(7))
    assert [row["validation"] is not None for row in rows] == [
        False,
        True,
        False,
        True,
        False,
        True,
        False,
    ]
    assert all(before["bytes"] < after["bytes"] for before, after in pairwise(rows))


def test_an_unknown_device_number_is_refused():
    with pytest.raises(InputError, match=r"there is no device 6; devices are 0\.\.5"):
        fitted("fedavg").model(6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"select": "test"}, "'last' or 'best'"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0; a whole number from 1"),
        ({"validate_every": -1}, "validate_every is -1; a whole number from 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        Options(**options)


@pytest.mark.parametrize("options", [{"engine": "vmaped"}, {"chunk_size": 0}, {"device": "quantum"}])
def test_engines_that_do_not_exist_are_refused(options):
    with pytest.raises(InputError):
        fitted("fedavg", options=Options(**options))


@pytest.mark.parametrize("name", ["fedavg", "lg_fedavg"])
def test_the_best_round_survives_a_stop(name, tmp_path):
    chosen = Options(validate_every=1, checkpoint_every=1, select="best")
    whole = fitted(name, folder=tmp_path / "whole", options=chosen)
    fitted(name, folder=tmp_path / "parts", plan=glocal.Plan(3, 3, batch_size=5), options=chosen)
    resumed = fitted(name, folder=tmp_path / "parts", options=chosen)
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
    assert (tmp_path / "whole/rows.jsonl").read_bytes() == (
        tmp_path / "stopped/rows.jsonl"
    ).read_bytes()


def test_uneven_parts_are_tested_the_same_on_every_engine():
    model = world.seeded(world.plain)
    federation = world.federation(sizes=(2000, 50, 700, 3), test=0.4)
    algorithm = world.algorithm("lg_fedavg", model, num_clients=4)
    figures = []
    for options in ({}, {"engine": "looped"}, {"chunk_size": 1}, {"chunk_size": 3}):
        result = glocal.fit(
            algorithm,
            model,
            federation,
            glocal.Plan(1, 4, batch_size=50),
            options=Options(validate_every=1, **options),
        )
        figures.append((result.accuracies.tolist()[:3], result.new_spread))
    assert figures.count(figures[0]) == 4


def other_data():
    federation = world.federation()
    federation.train.examples.y.copy_((federation.train.examples.y + 1) % world.CLASSES)
    return federation


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"optimizer": glocal.adam(0.01)}, "another algorithm"),
        ({"optimizer": glocal.sgd(0.2, momentum=0.5)}, "another algorithm"),
        ({"federation": other_data}, "another data"),
        ({"options": Options(select="best")}, "another choice"),
    ],
)
def test_a_folder_is_not_continued_with_another_optimiser_data_or_choice(other, message, tmp_path):
    model = world.seeded(world.plain)

    def again(optimizer=None, federation=world.federation, options=None):
        algorithm = world.algorithm("lg_fedavg", model, optimizer=optimizer)
        return glocal.fit(algorithm, model, federation(), PLAN, options=options, folder=tmp_path)

    again()
    with pytest.raises(InputError, match=message):
        again(**other)


def test_a_warm_start_from_mtl_is_its_mean_and_from_local_only_is_refused():
    mtl = fitted("mtl")
    assert trees.same_bits(
        trees.pick(warm_start_params(mtl.algorithm, mtl.state), mtl.state.shared), mtl.state.shared
    )
    with pytest.raises(InputError, match="local_only shares nothing"):
        fitted("lg_fedavg", start_from=fitted("local_only"))


def test_a_warm_start_from_another_model_is_refused():
    with pytest.raises(InputError, match="start_from is of another model"):
        fitted("lg_fedavg", start_from=fitted("fedavg", make=world.plain))


def test_mtl_made_for_another_number_of_devices_is_refused():
    model = world.seeded(world.plain)
    with pytest.raises(InputError, match="mtl: made for 5 devices, but the data have 6"):
        glocal.fit(world.algorithm("mtl", model, num_clients=5), model, world.federation(), PLAN)


def test_a_split_of_another_model_is_refused():
    split = world.first_half(world.with_batch_norm())
    model = world.seeded(world.plain)
    with pytest.raises(InputError, match="the split is of another model"):
        glocal.fit(
            world.algorithm("lg_fedavg", model, split=split), model, world.federation(), PLAN
        )


def test_a_longer_run_costs_what_a_straight_one_does(tmp_path):
    fitted("lg_fedavg", folder=tmp_path, plan=glocal.Plan(5, 3, batch_size=5))
    assert fitted("lg_fedavg", folder=tmp_path).ledger == fitted("lg_fedavg").ledger


def test_a_study_that_is_refused_leaves_its_folder_as_it_was(tmp_path):
    study = from_dict(
        tomllib.loads(
            STUDY.replace("rounds = 12", "rounds = 4").replace("start_round = 8", "start_round = 2")
        )
    )
    list(run_study(study, tmp_path))
    before = kept(tmp_path)
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
        assert kept(tmp_path) == before, change
    list(run_study(study, tmp_path))
    assert kept(tmp_path) == before


def test_a_study_goes_on_for_longer_and_its_later_cases_stay_where_they_started(tmp_path):
    plain = STUDY.replace("rounds = 12", "rounds = 4").replace("start_round = 8\n", "rounds = 4\n")
    list(run_study(from_dict(tomllib.loads(plain)), tmp_path))
    second = (tmp_path / "experiments/second/rows.jsonl").read_bytes()
    list(run_study(with_overrides(read_settings(tmp_path), ["plan.rounds=6"]), tmp_path))
    assert len(read_rows(tmp_path / "experiments/first/rows.jsonl")) == 2 * 6
    assert (tmp_path / "experiments/second/rows.jsonl").read_bytes() == second


def test_a_run_that_keeps_figures_only_keeps_no_models_and_cannot_go_on(tmp_path):
    figures = Options(validate_every=2, checkpoint_every=3, save="metrics")
    whole, light = (
        fitted("lg_fedavg", folder=tmp_path / each.save, options=each) for each in (OFTEN, figures)
    )
    assert light.as_dict() == whole.as_dict()
    assert (tmp_path / "figures/result.json").read_bytes() == (
        tmp_path / "everything/result.json"
    ).read_bytes()
    assert not (tmp_path / "figures/models").exists()
    sizes = [
        (tmp_path / name / "checkpoint.safetensors").stat().st_size
        for name in ("metrics", "everything")
    ]
    assert sizes[0] < sizes[1] / 2
    with pytest.raises(InputError, match="kept its figures only, so it cannot go on"):
        fitted(
            "lg_fedavg",
            folder=tmp_path / "figures",
            options=figures,
            plan=glocal.Plan(9, 3, batch_size=5),
        )


def test_a_run_that_keeps_figures_only_goes_on_after_a_stop(tmp_path):
    figures = Options(validate_every=2, checkpoint_every=3, save="metrics")
    now = move_to_device(experiment("lg_fedavg"), figures)
    for moment in train(now, figures, start_or_resume(now, figures, tmp_path), tmp_path):
        if moment.progress.done == 4:
            break
    assert (
        fitted("lg_fedavg", folder=tmp_path, options=figures).as_dict()
        == fitted("lg_fedavg", options=figures).as_dict()
    )


@pytest.mark.parametrize(
    "data",
    [{2: [2], True: [3], None: []}, {'a "quoted" name': {"é": [1, [2]]}}, [[], [{}]], {}, "text"],
)
def test_json_of_a_line_an_entry_says_what_json_says(data):
    assert json.loads(files.format_json(data)) == json.loads(json.dumps(data))


def test_json_of_a_line_an_entry_refuses_names_that_json_refuses():
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


def test_a_case_starts_from_the_best_so_far_where_rounds_are_chosen(tmp_path):
    settings = from_dict(tomllib.loads(WARM))
    models: dict[int, trees.Params] = {}
    for step in run_study(settings, tmp_path):
        if step.experiment == "first" and step.moment is not None:
            models[step.moment.progress.done] = step.moment.progress.states[0].shared
    scores = [row["validation"] for row in read_rows(tmp_path / "experiments/first/rows.jsonl")]
    for start in (3, 6):
        kept_model = load_file(tmp_path / f"experiments/first/snapshots/round-{start:05d}.safetensors")
        best = 1 + scores.index(max(scores[:start]))
        assert trees.same_bits(
            {name.removeprefix("0/"): tensor for name, tensor in kept_model.items()}, models[best]
        )
    assert scores.index(max(scores)) not in (2, 5), "else the last round would do"


def test_a_case_may_start_from_the_round_itself_beside_one_that_starts_from_the_best_so_far(
    tmp_path,
):
    last = from_dict(tomllib.loads(WARM), ["experiments.early.start_model=last"])
    models = {}
    for step in run_study(last, tmp_path):
        if step.experiment == "first" and step.moment is not None:
            models[step.moment.progress.done] = step.moment.progress.states[0].shared
    snapshots = sorted(path.name for path in (tmp_path / "experiments/first/snapshots").iterdir())
    assert snapshots == ["round-00003-last.safetensors", "round-00006.safetensors"]
    kept_model = load_file(tmp_path / "experiments/first/snapshots/round-00003-last.safetensors")
    assert trees.same_bits(
        {name.removeprefix("0/"): tensor for name, tensor in kept_model.items()}, models[3]
    )
    with pytest.raises(InputError, match="past round 3 and has not kept the best model of it"):
        list(run_study(from_dict(tomllib.loads(WARM)), tmp_path))


@pytest.mark.parametrize(("given", "then"), [("best", "last"), ("last", "best")])
def test_a_case_that_has_begun_keeps_the_model_it_started_from(given, then, tmp_path):
    both = [
        "experiments.late.start_round=3",
        f"experiments.late.start_model={then}",
    ]  # so that either model is at hand
    list(
        run_study(
            from_dict(tomllib.loads(WARM), [*both, f"experiments.early.start_model={given}"]),
            tmp_path,
        )
    )
    with pytest.raises(InputError, match="early was made with another start_model"):
        list(
            run_study(
                from_dict(tomllib.loads(WARM), [*both, f"experiments.early.start_model={then}"]),
                tmp_path,
            )
        )


def test_a_case_that_has_begun_keeps_the_case_it_started_from(tmp_path):
    warm = from_dict(tomllib.loads(WARM))
    first, late = warm.experiments["first"], warm.experiments["late"]
    both = {
        "first": first,
        "other": replace(first, algorithm="fedprox", hyperparameters={"mu": 1.0}),
    }
    settings = replace(warm, experiments={**both, "late": late})
    list(run_study(settings, tmp_path))
    moved = replace(settings, experiments={**both, "late": replace(late, start_from="other", rounds=2)})
    with pytest.raises(
        InputError, match=r"late was made with another start_from \(first\) than the one given \(other\)"
    ):
        list(run_study(moved, tmp_path))


def test_a_run_that_is_done_is_not_taken_for_one_with_other_tests(tmp_path):
    local = from_dict(tomllib.loads(WARM), ["run.tests=local"])
    list(run_study(local, tmp_path))
    with pytest.raises(InputError, match=r"first was made with another choice .*'tests': 'local'"):
        list(run_study(from_dict(tomllib.loads(WARM)), tmp_path))


def test_what_a_run_was_made_with_may_not_be_left_out(tmp_path):
    with pytest.raises(
        InputError, match=r"was made with another audit \(all\) than the one given \(None\)"
    ):
        _require_same_fingerprint({"plan": 1, "audit": "all"}, {"plan": 1}, tmp_path)


def test_where_no_round_is_chosen_a_case_starts_from_the_round_itself_whether_it_says_so_or_not(
    tmp_path,
):
    for folder, said in (("silent", []), ("said", ["experiments.early.start_model=last"])):
        list(
            run_study(from_dict(tomllib.loads(WARM), ["run.select=last", *said]), tmp_path / folder)
        )
        list(
            run_study(from_dict(tomllib.loads(WARM), ["run.select=last"]), tmp_path / folder)
        )  # as good as the same settings
    kept = [
        (tmp_path / folder / "experiments/early/result.json").read_text() for folder in ("silent", "said")
    ]
    assert kept[0] == kept[1]


def test_a_case_can_be_added_after_one_that_is_done(tmp_path):
    whole = from_dict(tomllib.loads(WARM))
    list(run_study(whole, tmp_path / "whole"))
    first = replace(
        whole,
        experiments={
            name: experiment for name, experiment in whole.experiments.items() if name != "late"
        },
    )
    list(run_study(first, tmp_path / "added"))
    list(run_study(whole, tmp_path / "added"))
    kept = [
        (tmp_path / folder / "experiments/late/result.json").read_text() for folder in ("whole", "added")
    ]
    assert kept[0] == kept[1]


def test_a_case_cannot_be_added_where_figures_alone_were_kept(tmp_path):
    whole = from_dict(tomllib.loads(WARM), ["run.save=metrics"])
    first = replace(
        whole,
        experiments={
            name: experiment for name, experiment in whole.experiments.items() if name != "late"
        },
    )
    list(run_study(first, tmp_path))
    before = (tmp_path / "settings.json").read_text()
    with pytest.raises(InputError, match="figures"):
        list(run_study(whole, tmp_path))
    assert (tmp_path / "settings.json").read_text() == before
