"""Studies of several parts: how they run, what they find, and what follows from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from glocal.cli import main
from glocal.core.errors import InputError
from glocal.federate import run as driver
from glocal.studies.findings import Findings, part_folder, read_findings
from glocal.studies.merge_findings import merge_findings
from glocal.studies.settings import (
    DataSettings,
    ExperimentSettings,
    ModelSettings,
    PlanSettings,
    RunSettings,
    Settings,
    SplitSettings,
)
from glocal.studies.study import Claim, Measurement, PublishedRow, Score, Study, StudyPart
from glocal.studies.study_parts import read_parts, run_parts, write_study
from tests.support.offered import offer_studies

FINE_TUNED = "FedAvg + fine-tuning"
PARTITIONED = Settings(
    data=DataSettings(source="digits", clients=6, validation=0.2),
    model=ModelSettings(hidden=(16,)),
    split=SplitSettings(local=("layer1",)),
    plan=PlanSettings(clients_per_round=3, seeds=2),
    run=RunSettings(select="best", validate_every=1, save="metrics"),
    experiments={
        "FedAvg": ExperimentSettings("fedavg", rounds=4),
        "Local only": ExperimentSettings("local_only", rounds=2, clients_per_round=6),
        "LG 2+2": ExperimentSettings("lg_fedavg", rounds=2, start_from="FedAvg", start_round=2),
        "LG 4+2": ExperimentSettings("lg_fedavg", rounds=2, start_from="FedAvg", start_round=4),
        FINE_TUNED: ExperimentSettings("local_only", rounds=2, start_from="FedAvg", start_round=4),
    },
)
ROW = PublishedRow((Score(60.0, 1.0), Score(50.0, 1.0)), 1.0e5, exponent=5)
LEARNING_RATES = {
    f"FedAvg, lr {lr}": ExperimentSettings("fedavg", rounds=2, lr=lr) for lr in (0.01, 0.1)
}
SMALL = Study(
    name="small",
    title="digits, small",
    source="nobody 2026, table 0",
    statement="LG is above FedAvg.",
    parts={
        "paper-2": StudyPart(
            "2 classes per client",
            "paper",
            PARTITIONED,
            {"FedAvg": ROW, "LG 2+2": ROW, "LG 4+2": ROW},
        ),
        "tuned-2": StudyPart(
            "2 classes per client",
            "tuned",
            replace(PARTITIONED, experiments=LEARNING_RATES),
            {"FedAvg": ROW},
            candidates={"FedAvg": tuple(LEARNING_RATES)},
        ),
    },
    claims=(
        Claim(
            "LG is above FedAvg",
            (Measurement("paper-2", "LG 2+2", "local"),),
            (Measurement("paper-2", "FedAvg", "local"),),
        ),
    ),
)


@pytest.fixture(autouse=True)
def small_study(monkeypatch, tmp_path):
    offer_studies(monkeypatch, SMALL)
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    """Exit code of a command in this process."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return stopped.value.code


def found_in(folder):
    """What a study found, but for how long it took."""
    parts = read_findings(Path(folder)).parts
    return {
        name: {key: value for key, value in part.items() if key != "seconds"}
        for name, part in parts.items()
    }


def test_studies_are_listed_and_shown(capsys):
    assert run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("digits", "mnist", "small"))
    assert run("show", "small") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "60.00 ± 1.00 50.00 ± 1.00 1.0e5" in shown
    assert "LG is above FedAvg" in shown
    assert run("show", "digits") == 0
    assert json.loads(capsys.readouterr().out)["data"]["source"] == "digits"


def test_a_study_runs_resumes_and_reports_and_keeps_figures_only(capsys):
    assert run("run", "small", "--seeds", 2, "--device", "cpu", "--out", "kept") == 0
    printed = capsys.readouterr().out
    assert "60.00 ± 1.00" in printed
    assert "LG is above FedAvg: " in printed
    findings = found_in("kept")
    assert {
        len(experiment["local"])
        for part in findings.values()
        for experiment in part["experiments"].values()
    } == {2}
    assert "LG 2+2" in Path("kept/tables.md").read_text()
    assert "LG 2+2" in Path("kept/report.html").read_text()
    experiments = part_folder(Path("kept"), "paper-2") / "experiments"
    assert not list(experiments.glob("*/models"))
    assert (
        max(path.stat().st_size for path in experiments.glob("*/checkpoint.safetensors")) < 10_000
    )
    seconds = len(Path("kept/timing.jsonl").read_text().splitlines())
    assert run("resume", "kept") == 0
    assert found_in("kept") == findings
    assert len(Path("kept/timing.jsonl").read_text().splitlines()) == seconds + 2


def test_two_runs_of_a_study_find_the_same():
    for folder in ("one", "other"):
        assert (
            run("run", "small", "--part", "paper-2", "--set", "run.device=cpu", "--out", folder)
            == 0
        )
    assert found_in("one") == found_in("other")
    assert [*found_in("one")] == ["paper-2"]


def test_a_study_that_is_stopped_goes_on_to_the_same_figures():
    changes = ["run.device=cpu", "plan.seeds=1"]
    for folder in ("straight", "stopped"):
        write_study(SMALL, Path(folder), changes=changes)
    list(run_parts(read_parts(Path("straight")), Path("straight")))
    running = run_parts(read_parts(Path("stopped")), Path("stopped"))
    for _ in range(8):
        next(running)
    running.close()
    assert [*found_in("stopped")["paper-2"]["experiments"]] == ["FedAvg", "Local only"]
    list(run_parts(read_parts(Path("stopped")), Path("stopped")))
    assert found_in("stopped") == found_in("straight")


def test_runs_of_parts_are_reported_as_one(capsys):
    for part in ("paper-2", "tuned-2"):
        assert (
            run("run", "small", "--part", part, "--seeds", 1, "--device", "cpu", "--out", part) == 0
        )
    assert run("report", "paper-2", "tuned-2/findings.json", "--out", "all") == 0
    assert [*found_in("all/findings.json")] == ["paper-2", "tuned-2"]
    assert len(json.loads(Path("all/findings.json").read_text())["command"]) == 2
    capsys.readouterr()
    assert run("report", "paper-2", "paper-2/findings.json", "--out", "twice") == 2
    assert "part 'paper-2' was given twice" in capsys.readouterr().err


def test_seeds_that_ran_apart_are_reported_as_if_they_had_run_side_by_side():
    plain = ("--part", "paper-2", "--device", "cpu", "--set", "run.engine=looped")
    assert run("run", "small", *plain, "--seeds", 2, "--out", "whole") == 0
    for seed in (1, 0):
        assert (
            run(
                "run",
                "small",
                *plain,
                "--seeds",
                1,
                "--set",
                f"plan.seed={seed}",
                "--out",
                f"seed-{seed}",
            )
            == 0
        )
    assert run("report", "seed-1", "seed-0", "--out", "joined") == 0
    assert found_in("joined/findings.json") == found_in("whole")


def findings_with(experiment="FedAvg", seeds=(0,), local=0.5, settings=None, **about):
    """Findings of one part, with a course, as a run of these seeds of one case would have them."""
    course = [{"seed": seed, "round": 1, "validation": local} for seed in seeds]
    figures = {
        "seeds": [*seeds],
        "local": [local for _ in seeds],
        "validation": [0.5 for _ in seeds],
        "bytes": 8,
        "course": course,
    }
    made = settings or {
        "plan": {"seed": seeds[0], "seeds": len(seeds), "rounds": 4},
        "experiments": {experiment: {"algorithm": "fedavg", **about}},
    }
    return Findings(
        SMALL,
        {},
        {"paper-2": {"seconds": 1.0, "settings": made, "experiments": {experiment: figures}}},
    )


def test_experiments_that_ran_apart_and_seeds_that_ran_twice_alike_are_reported_once():
    part = merge_findings(
        [
            findings_with(seeds=(0, 1)),
            findings_with("LG 2+2", seeds=(0,)),
            findings_with(seeds=(1, 2)),
        ]
    ).parts["paper-2"]
    assert [*part["experiments"]] == ["FedAvg", "LG 2+2"]
    assert part["experiments"]["FedAvg"]["seeds"] == [0, 1, 2]
    assert [row["seed"] for row in part["experiments"]["FedAvg"]["course"]] == [0, 1, 2]
    assert part["settings"]["plan"] == {"seed": 0, "seeds": 3, "rounds": 4}
    assert part["seconds"] == 3.0


def test_figures_without_their_seeds_are_those_from_0_on():
    old = findings_with(seeds=(0, 1))
    del old.parts["paper-2"]["experiments"]["FedAvg"]["seeds"]
    assert merge_findings([old, findings_with(seeds=(2,))]).parts["paper-2"]["experiments"][
        "FedAvg"
    ]["seeds"] == [
        0,
        1,
        2,
    ]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            findings_with(seeds=(0, 1), local=0.6),
            "part 'paper-2', FedAvg: two runs of seed 0 have different values; "
            "leave one of the two out",
        ),
        (
            findings_with(seeds=(1,), start_round=7),
            "part 'paper-2' was run with two settings of experiments.FedAvg; "
            "report them one by one",
        ),
        (
            findings_with(seeds=(1,), settings={"plan": {"rounds": 5}, "experiments": {}}),
            "part 'paper-2' was run with two settings of plan.rounds",
        ),
        (findings_with(), "part 'paper-2' was given twice; leave one of the two out"),
    ],
)
def test_runs_that_contradict_each_other_are_not_mixed(other, message):
    with pytest.raises(InputError, match=message):
        merge_findings([findings_with(), other])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["run", "small", "--part", "paper-3"],
            "small has no part 'paper-3'; did you mean 'paper-2'",
        ),
        (["run", "digits", "--part", "paper-2"], "'digits' is none"),
        (["run", "small", "--set", "plan.roundz=3"], "did you mean 'rounds'"),
        (["show", "smal"], "there is no study 'smal'; did you mean 'small'"),
        (["run", "small", "--seeds", "0"], "plan.seeds is 0"),
        (["run", "small", "--set", "run.save=nothing"], "save is 'nothing'"),
        (["run", "small", "--set", "plan.aggregation=none"], "plan.aggregation is 'none'"),
        (
            ["run", "small", "--set", "data.keep_clients=7"],
            "data.keep_clients is 7; it must be from 1 to 6",
        ),
        (
            ["run", "small", "--part", "paper-2", "--set", 'experiments.FedAvg.shared=["layer1"]'],
            "fedavg has no split",
        ),
    ],
)
def test_what_a_user_can_put_right_is_one_line_and_code_two(arguments, message, capsys):
    assert run(*arguments) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("glocal: ")]
    assert message in lines[-1]


def test_a_study_is_not_started_over_another(capsys):
    assert (
        run("run", "small", "--part", "tuned-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    assert run("run", "small", "--out", "kept") == 2
    assert "continue it with `glocal resume kept`" in capsys.readouterr().err


def small_findings(**figures):
    """Findings of the small study: case = (local seed by seed, validation)."""
    experiments = {
        name: {"local": local, "new": local, "validation": [validation]}
        for name, (local, validation) in figures.items()
    }
    return Findings(SMALL, {}, {"paper-2": {"experiments": experiments}})


def made(fedavg, lg):
    return small_findings(**{"FedAvg": (fedavg, 0.5), "LG 2+2": (lg, 0.5)})


def test_claims_are_tested_seed_by_seed():
    """Seeds differ by far more than the methods do, and always the same way."""
    [verdict] = made([0.50, 0.70, 0.90], [0.52, 0.73, 0.92]).verdicts()
    assert verdict.status == "holds"
    assert verdict.lead.mean == pytest.approx(100 * 0.07 / 3)
    assert made([0.50, 0.70, 0.90], [0.52, 0.68, 0.91]).verdicts()[0].status == "open"
    assert made([0.50, 0.70, 0.90], [0.48, 0.67, 0.88]).verdicts()[0].status == "fails"
    assert made([0.50], [0.60]).verdicts()[0].status == "open"
    assert small_findings(FedAvg=([0.5], 0.5)).verdicts() == []


def test_a_seed_without_a_figure_is_left_out_of_the_pairs():
    [verdict] = made([0.50, None, 0.90], [0.52, 0.10, 0.92]).verdicts()
    assert verdict.lead.mean == pytest.approx(2.0)


def test_like_allows_for_a_margin():
    like = replace(SMALL, claims=(replace(SMALL.claims[0], margin=1.0),))
    findings = replace(made([0.500, 0.700, 0.900], [0.495, 0.694, 0.896]), study=like)
    assert findings.verdicts()[0].status == "holds"


def test_a_learning_rate_is_chosen_on_validation_data_alone():
    by_lr = {"FedAvg, lr 0.01": ([0.9], 0.6), "FedAvg, lr 0.1": ([0.5], 0.7)}
    findings = Findings(SMALL, {}, {"tuned-2": small_findings(**by_lr).parts["paper-2"]})
    assert findings.name_of("tuned-2", "FedAvg") == "FedAvg, lr 0.1"
    assert findings.values(Measurement("tuned-2", "FedAvg", "local")) == [50.0]


# validation, and what attackers read of validation data in two seeds
LEAKS = {"FedAvg, lr 0.01": (0.6, [0.5, 0.625]), "FedAvg, lr 0.1": (0.7, [0.5, 0.75])}


def tuned(leaks, limit):
    """Findings of the tuned part with so many choices, of which some were audited."""
    part = replace(
        SMALL.parts["tuned-2"],
        candidates={"FedAvg": tuple(leaks)},
        leak_limits={} if limit is None else {"FedAvg": limit},
    )
    experiments = {
        name: {"validation": [of], **({"validation_leak": leak} if leak else {})}
        for name, (of, leak) in leaks.items()
    }
    return Findings(
        replace(SMALL, parts={"tuned-2": part}), {}, {"tuned-2": {"experiments": experiments}}
    )


@pytest.mark.parametrize(
    ("limit", "lr"),
    [(None, "0.1"), (0.7, "0.1"), (0.625, "0.1"), (0.62, "0.01"), (0.5625, "0.01"), (0.5, "0.01")],
)
def test_the_best_within_the_limit_stands_for_a_row_or_else_the_one_that_gives_least_away(
    limit, lr
):
    assert tuned(LEAKS, limit).name_of("tuned-2", "FedAvg") == f"FedAvg, lr {lr}"


def test_of_several_within_the_limit_validation_decides():
    more = {**LEAKS, "FedAvg, lr 0.2": (0.5, [0.40, 0.40])}
    assert tuned(more, 0.6).name_of("tuned-2", "FedAvg") == "FedAvg, lr 0.01"
    assert tuned(more, 0.30).name_of("tuned-2", "FedAvg") == "FedAvg, lr 0.2"


@pytest.mark.parametrize("leak", [None, [None, None]])
def test_what_was_not_audited_is_within_every_limit(leak):
    assert (
        tuned({**LEAKS, "FedAvg, lr 0.2": (0.5, leak)}, 0.3).name_of("tuned-2", "FedAvg")
        == "FedAvg, lr 0.2"
    )
    assert tuned({}, 0.3).experiment("tuned-2", "FedAvg") is None


def audit(**changes):
    """What an audit of two attributes found."""
    first = {"joint": 0.52, "own": 0.61, "pooled": 0.62, "strong": 0.63, "validation": {}}
    second = {"joint": 0.54, "own": None, "pooled": 0.7, "strong": 0.6, "validation": {}}
    return {
        "metric": "accuracy",
        "figure": 0.84,
        "auc": 0.88,
        "attributes": [first, {**second, **changes}],
        "validation": {"auc": 0.87, "leak": 0.66},
    }


def test_the_figures_of_an_audit_are_kept_seed_by_seed():
    assert (
        run("run", "small", "--part", "tuned-2", "--seeds", 2, "--device", "cpu", "--out", "kept")
        == 0
    )
    path = part_folder(Path("kept"), "tuned-2") / "experiments/fedavg-lr-0-1/result.json"
    plain = found_in("kept")["tuned-2"]["experiments"]["FedAvg, lr 0.1"]
    audits = [audit(), {**audit(joint=None, strong=0.9), "auc": None}]
    results = [
        {**result, "audit": of}
        for result, of in zip(json.loads(path.read_text()), audits, strict=True)
    ]
    path.write_text(json.dumps(results))
    findings = found_in("kept")["tuned-2"]["experiments"]["FedAvg, lr 0.1"]
    assert {key: value for key, value in findings.items() if key not in plain} == {
        "accuracy": [0.84, 0.84],
        "auc": [0.88, None],
        "adversary": [0.53, 0.52],
        "own_0": [0.61, 0.61],
        "pooled_0": [0.62, 0.62],
        "strong_0": [0.63, 0.63],
        "own_1": [None, None],
        "pooled_1": [0.7, 0.7],
        "strong_1": [0.6, 0.9],
        "fresh": [0.7, 0.9],
        "validation_auc": [0.87, 0.87],
        "validation_leak": [0.66, 0.66],
    }
    assert {key: findings[key] for key in plain} == plain


def test_an_audit_without_an_adversary_has_none():
    assert (
        run("run", "small", "--part", "tuned-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    path = part_folder(Path("kept"), "tuned-2") / "experiments/fedavg-lr-0-1/result.json"
    blind = {
        "metric": "accuracy",
        "figure": 0.84,
        "auc": None,
        "attributes": [dict.fromkeys(("joint", "own", "pooled", "strong"))],
        "validation": dict.fromkeys(("auc", "leak")),
    }
    path.write_text(
        json.dumps([{**result, "audit": blind} for result in json.loads(path.read_text())])
    )
    findings = found_in("kept")["tuned-2"]["experiments"]["FedAvg, lr 0.1"]
    assert [findings[key] for key in ("adversary", "own_0", "fresh", "validation_leak")] == [
        [None]
    ] * 4


def test_runs_on_different_machines_are_not_mixed():
    one, other = (
        Findings(SMALL, {"machine": {"device": name}}, {name: {}})
        for name in ("paper-2", "tuned-2")
    )
    with pytest.raises(InputError, match="different machines"):
        merge_findings([one, other])


def test_an_experiment_that_diverged_in_some_seeds_does_not_stand_for_a_row_where_another_did_not():
    candidates = SMALL.parts["tuned-2"].candidates["FedAvg"]
    experiments = {
        candidates[0]: {"validation": [0.5, 0.5]},
        candidates[1]: {"validation": [0.9], "seeds": [1]},
    }
    assert (
        Findings(SMALL, {}, {"tuned-2": {"experiments": experiments}}).name_of("tuned-2", "FedAvg")
        == candidates[0]
    )


def complaints(capsys):
    return [
        line
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("glocal: ") and "engine:" not in line
    ]


def test_an_experiment_that_diverges_is_left_out_with_what_starts_from_it_and_the_others_run(
    capsys,
):
    wild = ["--set", "experiments.FedAvg.lr=1e30", "--seeds", 1, "--device", "cpu"]
    assert run("run", "small", "--part", "paper-2", *wild, "--out", "kept") == 0
    lines = complaints(capsys)
    assert any("paper-2, FedAvg: training diverged" in line and "skipped" in line for line in lines)
    assert [*found_in("kept")["paper-2"]["experiments"]] == ["Local only"]
    text = Path("kept/tables.md").read_text()
    assert "Left out because training diverged: `paper-2`: FedAvg (all seeds), LG" in text
    assert "Not run yet: `paper-2`" not in text
    assert run("resume", "kept") == 0
    assert complaints(capsys) == []


def test_a_seed_that_diverges_is_left_out_of_its_experiment_only_and_the_others_go_on(
    capsys, monkeypatch
):
    require_counted = driver.require_counted

    def diverging(finished, seeds, label):
        seen = []
        for seed, (state, report) in zip(seeds, finished, strict=True):
            # the last round of those that start after round 4
            if seed == 1 and report.round_index == 5:
                report = report._replace(counted=report.counted & False)
            seen.append((state, report))
        require_counted(seen, seeds, label)

    small = ["--part", "paper-2", "--seeds", 3, "--device", "cpu"]
    assert run("run", "small", *small, "--out", "whole") == 0
    monkeypatch.setattr(driver, "require_counted", diverging)
    assert run("run", "small", *small, "--out", "kept") == 0
    assert [
        line
        for line in complaints(capsys)
        if "LG 4+2: training diverged" in line and "seed 1 is skipped" in line
    ]
    whole, saved = (
        found_in("whole")["paper-2"]["experiments"],
        found_in("kept")["paper-2"]["experiments"],
    )
    late = ("LG 4+2", FINE_TUNED)
    assert {name: experiment["seeds"] for name, experiment in saved.items()} == {
        name: [0, 2] if name in late else [0, 1, 2] for name in whole
    }
    assert all(
        saved[name]["local"] == [whole[name]["local"][place] for place in (0, 2)] for name in late
    )
    text = Path("kept/tables.md").read_text()
    assert (
        f"Left out because training diverged: `paper-2`: LG 4+2 (seed 1), {FINE_TUNED} (seed 1)."
        in text
    )
    assert "Still open: `paper-2`" not in text
    assert ".without" not in text


@pytest.mark.parametrize(
    "change", ["data.keep_clients=7", "split.local=nonsense", "plan.clients_per_round=77"]
)
def test_a_study_that_is_refused_leaves_nothing_behind(change, capsys):
    assert run("run", "small", "--set", change, "--device", "cpu", "--out", "x") == 2
    assert not Path("x").exists()
    assert len(complaints(capsys)) == 1


def test_changes_of_a_resumed_study_are_saved_and_reported(capsys):
    once = [
        "--part",
        "paper-2",
        "--seeds",
        1,
        "--device",
        "cpu",
        "--set",
        "run.save=everything",
        "--out",
        "kept",
    ]
    assert run("run", "small", *once) == 0
    for changes in (["--set", "experiments.LG 4+2.rounds=3"], []):
        assert run("resume", "kept", *changes) == 0
    assert found_in("kept")["paper-2"]["experiments"]["LG 4+2"]["selected_round"][0] >= 5
    assert "experiments.LG 4+2.rounds = 3" in Path("kept/tables.md").read_text()
    commands = json.loads(Path("kept/study.json").read_text())["command"]
    assert commands[0].startswith(
        "glocal run small --part paper-2 --seeds 1 --device cpu --set run.save=everything"
    )
    assert len(commands) == 3


def test_a_study_that_kept_figures_only_refuses_to_be_longer_and_stays_as_it_was(capsys):
    assert (
        run("run", "small", "--part", "paper-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    findings = found_in("kept")
    assert run("resume", "kept", "--set", "experiments.FedAvg.rounds=6") == 2
    assert "has only the metrics of its run" in complaints(capsys)[0]
    assert run("resume", "kept") == 0
    assert found_in("kept") == findings


DAMAGED = {
    "study.json": [
        "{}",
        '{"parts": {}}',
        '{"study": ["small"], "parts": {"paper-2": {}}, "command": []}',
        "nonsense",
    ],
    "findings.json": [
        '{"study": "small", "parts": {"paper-2": "text"}}',
        '{"study": ["small"], "parts": {}}',
        '{"study": "small", "parts": {"paper-2": {"experiments": {"FedAvg": {}}}}}',
    ],
    "parts/paper-2/experiments/fedavg/result.json": ["[{}]"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in DAMAGED.items() for text in texts]
)
def test_a_damaged_file_is_one_line(name, text, capsys):
    assert (
        run("run", "small", "--part", "paper-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    Path("kept", name).write_text(text)
    capsys.readouterr()
    assert run("report", "kept/findings.json" if name == "findings.json" else "kept") == 2
    assert len(complaints(capsys)) == 1


def test_odd_rows_of_the_timing_are_passed_over():
    assert (
        run("run", "small", "--part", "paper-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    with Path("kept/timing.jsonl").open("a") as file:
        file.write('{"seconds": 1}\n{"part": "paper-2"}\n')
    assert run("report", "kept") == 0


def test_reporting_names_the_folder_that_is_none(capsys):
    assert (
        run("run", "small", "--part", "tuned-2", "--seeds", 1, "--device", "cpu", "--out", "kept")
        == 0
    )
    capsys.readouterr()
    assert run("report", "kept", "nowhere") == 2
    assert "nowhere is not a study of a paper" in complaints(capsys)[0]
