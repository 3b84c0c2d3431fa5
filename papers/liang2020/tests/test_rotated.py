"""Table 3: a new client with rotated digits, from the published numbers to the report."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from glocal.report import study_markdown, write_study_report
from glocal.studies.findings import Findings, part_folder, read_findings
from glocal.studies.new_client_trial import NewClientSettings
from glocal.studies.study_parts import run_parts, write_study
from liang2020.rotated import ROTATED
from liang2020.studies import STUDIES
from tests.support.command_line import run


def test_table_3_is_published_whole():
    parts = ROTATED.parts
    rows = {
        "FedAvg, C = 0.0",
        "FedAvg, C = 0.1",
        "FedProx, C = 0.1",
        "LG-FedAvg, C = 0.0",
        "LG-FedAvg, C = 0.1",
    }
    assert [{*part.published} for part in parts.values()] == [rows, rows]
    assert parts["iid"].published["FedAvg, C = 0.0"].scores == ((32.0, 6.2), (91.8, 3.0))
    assert parts["2-classes"].published["LG-FedAvg, C = 0.1"].scores == ((98.2, 0.7), (93.9, 1.4))
    for part in parts.values():
        assert rows <= {*part.settings.experiments}
        assert part.settings.new_client == NewClientSettings(90, 3000, 500)
        existing_clients = {
            name: experiment.join_plan.existing_clients
            for name, experiment in part.settings.experiments.items()
            if experiment.join_plan
        }
        assert all(
            count == (10 if name.endswith("0.1") else 0) for name, count in existing_clients.items()
        )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory) -> tuple[Findings, Path]:
    """The study in small, run as it would be."""
    study = ROTATED
    folder = tmp_path_factory.mktemp("rotated")
    changes = [
        "data.source=digits",
        "data.clients=12",
        "model.hidden=[16,16,16,16]",
        "new_client.train=60",
        "new_client.test=40",
    ]
    parts = write_study(
        study, folder, changes=[*changes, "plan.clients_per_round=3", "plan.seeds=2"]
    )
    small = {
        name: replace(settings, experiments=_short(settings.experiments))
        for name, settings in parts.items()
    }
    for _ in run_parts(small, folder):
        pass
    return read_findings(folder), folder


def _short(experiments):
    short = {}
    for name, experiment in experiments.items():
        join_plan = experiment.join_plan and replace(
            experiment.join_plan,
            rounds=1,
            epochs=min(experiment.join_plan.epochs, 1),
            existing_clients=min(experiment.join_plan.existing_clients, 2),
        )
        short[name] = replace(
            experiment,
            rounds=2,
            start_round=2 if experiment.start_from else None,
            join_plan=join_plan,
        )
    return short


def test_the_report_has_normal_and_rotated_beside_the_papers_own(small_run):
    findings, folder = small_run
    text = study_markdown(findings)
    row = next(line for line in text.splitlines() if line.startswith("| LG-FedAvg, C = 0.1"))
    assert "97.70 ± 0.80" in row
    assert "93.20 ± 1.30" in row
    assert "Sent for joining" in text
    assert (
        "Local Test" not in text.partition("### What the paper claims")[2].partition("Normal:")[0]
    )
    page = write_study_report(findings, folder).read_text()
    assert "Rotated, %" in page
    assert "FedProx, C = 0.0" in page


def test_every_claim_of_table_3_gets_a_verdict(small_run):
    findings, _ = small_run
    assert len(findings.verdicts()) == len(findings.study.claims) == 12


def test_the_figures_are_the_runs_own(small_run):
    findings, folder = small_run
    experiment = findings.parts["iid"]["experiments"]["FedAvg, C = 0.0"]
    results = json.loads(
        (part_folder(folder, "iid") / "experiments" / "fedavg-c-0-0" / "result.json").read_text()
    )
    assert experiment["rotated"] == pytest.approx(
        [result["new_client"]["rotated"] for result in results], abs=1e-6
    )
    assert experiment["join_bytes"] == results[0]["new_client"]["ledger"]["total"]["bytes"]
    assert np.isfinite(experiment["normal"]).all()


def test_show_has_the_numbers_of_table_3(capsys):
    assert run("show", "paper-rotated") == 0
    shown = capsys.readouterr().out
    assert "paper: Normal" in shown
    assert "32.00 ± 6.20" in shown


def test_a_study_has_its_measures():
    assert [*ROTATED.measures] == ["normal", "rotated"]
    assert [*STUDIES["paper-mnist"].measures] == ["local", "new"]
