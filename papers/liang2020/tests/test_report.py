"""The reports of the paper's studies, from findings made up around the published numbers."""

import json
import re
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from glocal.report import draw_study, study_markdown, write_study_report
from glocal.report.comparison import (
    changes_of,
    row_names,
    rows_of,
    sweep_points,
    tables_of,
)
from glocal.report.study_figures import study_drawings
from glocal.studies.findings import Findings
from glocal.studies.study import PublishedRow, Score
from liang2020.fair import Bottleneck
from liang2020.images import FINE_TUNED
from liang2020.studies import STUDIES
from liang2020.table_1 import table_1
from liang2020.tradeoff import draw_tradeoff
from tests.support.outline import Outline
from tests.support.study_findings import ABOUT, FAIR, fair_part, lines_of, with_figures

MODELS = {"paper-mnist": 633_226, "paper-cifar10": 64_102}
SHARED = {"paper-mnist": 99_978, "paper-cifar10": 2_872}
EXTRA = PublishedRow((Score(90.0, 0.5), Score(50.0, 0.5)), 0.0)


def counted(study: str, experiment: str) -> int:
    """As the paper counts: in a round 100 clients receive and 10 send.

    For the ensemble each of the 100 sends its model.
    """
    whole, last = MODELS[study], 800 if study == "paper-mnist" else 1800
    if experiment.startswith("LG"):
        start = int(experiment.removeprefix("LG ").partition("+")[0])
        return whole * (start * 110 + 100) + SHARED[study] * 100 * 110
    return 0 if experiment.startswith("Local only") else whole * 110 * last


def made_up_experiment(
    study: str, experiment: str, row: PublishedRow, seeds: int
) -> dict[str, Any]:
    """Values of seeds whose means are the published ones."""
    noise = np.random.default_rng(crc32(experiment.encode())).normal(size=seeds)
    noise -= noise.mean()
    local, new = ((mean + 0.1 * noise) / 100 for mean, _ in row.scores)
    figures = {
        "local": local.round(6).tolist(),
        "new": new.round(6).tolist(),
        "validation": local.round(6).tolist(),
    }
    sent = counted(study, experiment)
    return {**figures, "paper_parameters": sent, "parameters": sent // 5, "bytes": 4 * sent // 5}


def fake_part(study: str, name: str, seeds: int) -> dict[str, Any]:
    part = STUDIES[study].parts[name]
    rows = {
        experiment: part.published_for(experiment) or EXTRA
        for experiment in part.settings.experiments
    }
    experiments = {name: made_up_experiment(study, name, row, seeds) for name, row in rows.items()}
    return {"seconds": 61.5, "settings": part.settings.as_dict(), "experiments": experiments}


def fake(study: str = "paper-mnist", *, parts: tuple[str, ...] = (), seeds: int = 10) -> Findings:
    names = parts or tuple(STUDIES[study].parts)
    return Findings(STUDIES[study], ABOUT, {name: fake_part(study, name, seeds) for name in names})


def shifted(findings: Findings, part: str, experiment: str, **points: float) -> Findings:
    """The same with some values of an experiment moved by so many points."""
    experiments = findings.parts[part]["experiments"]
    moved = {
        measure: [value + by / 100 for value in experiments[experiment][measure]]
        for measure, by in points.items()
    }
    return with_figures(findings, part, experiment, **moved)


@pytest.mark.parametrize("study", MODELS)
def test_every_published_number_is_in_its_row_of_the_text(study: str) -> None:
    text = study_markdown(fake(study))
    for part in STUDIES[study].parts.values():
        table = lines_of(
            text, part.title if "FedAvg" in part.published else "Table 1 of the main text"
        )
        for name, row in part.published.items():
            cells = table[name if name in table else f"{name}, M = 10"]
            (first, first_std), (second, second_std) = row.scores
            assert f"{first:.2f} ± {first_std:.2f}" == cells[0]
            assert f"{second:.2f} ± {second_std:.2f}" in cells[1:]
            assert row.parameters_text in cells


@pytest.mark.parametrize("study", MODELS)
def test_counted_the_papers_way_every_row_of_its_tables_agrees(study: str) -> None:
    rows = [
        row
        for part in STUDIES[study].parts
        if not part.startswith("mtl")
        for row in rows_of(fake(study), part)
    ]
    assert all(row.measured and row.sent.agrees for row in rows)
    assert {row.sent.ours for row in rows if row.name == FINE_TUNED} <= {"5.6e10", "12.7e9"}


def test_another_count_is_marked_and_reported() -> None:
    findings = with_figures(
        fake(parts=("paper-2",)), "paper-2", "LG 400+100", paper_parameters=31 * 10**9
    )
    text = study_markdown(findings)
    assert "3.1e10 ≠" in lines_of(text, "2 classes per client")["LG 400+100"]
    assert "than it prints: LG 400+100 (3.1e10, published 2.9e10)." in text


def test_a_row_has_mean_deviation_difference_and_the_honest_count() -> None:
    findings = with_figures(
        fake(parts=("paper-2",), seeds=2),
        "paper-2",
        "FedAvg",
        local=[0.98, 0.99],
        parameters=10**10,
        bytes=4 * 10**10,
    )
    row = rows_of(findings, "paper-2")[0]
    assert (row.name, str(row.scores["local"].ours), row.scores["local"].difference) == (
        "FedAvg",
        "98.50 ± 0.71",
        0.3,
    )
    cells = lines_of(study_markdown(findings), "2 classes per client")["FedAvg"]
    assert cells[:2] == ["98.20 ± 0.05", "98.50 ± 0.71 (+0.30)"]
    assert cells[-1] == "1.00e10 (40.0 GB)"


@pytest.mark.parametrize(("below", "marked"), [(0.09, False), (0.10, True), (0.31, True)])
def test_what_is_below_the_papers_mean_less_its_deviation_is_marked(
    below: float, marked: bool
) -> None:
    findings = shifted(
        fake(parts=("paper-2",)), "paper-2", "LG 400+100", local=-below
    )  # 98.77 ± 0.09
    text = study_markdown(findings)
    assert ("↓" in lines_of(text, "2 classes per client")["LG 400+100"][1]) == marked
    assert (
        f"LG 400+100 on Local Test by {below - 0.09:.2f} ({98.77 - below:.2f}" in text
    ) == marked
    assert ("Nothing measured in `paper` is below" in text) != marked


def test_experiments_of_the_sweep_only_are_no_rows_and_fine_tuning_comes_last() -> None:
    parts = STUDIES["paper-cifar10"].parts
    assert row_names(parts["paper-2"]) == [*parts["paper-2"].published, FINE_TUNED]
    assert row_names(parts["tuned-2"]) == ["FedAvg", "Local only", "LG 1800+100", FINE_TUNED]
    assert row_names(parts["mtl-10"]) == ["MTL"]


def test_the_learning_rate_that_is_best_on_validation_data_stands_for_a_tuned_row() -> None:
    findings = fake(parts=("tuned-3",))
    best = with_figures(
        findings, "tuned-3", "FedAvg, lr 0.1", validation=[1.0] * 10, local=[0.5] * 10
    )
    row = rows_of(best, "tuned-3")[0]
    assert (row.choice, str(row.scores["local"].ours)) == ("lr 0.1", "50.00 ± 0.00")
    assert "50.00 ± 0.00 (lr 0.1) ↓" in study_markdown(best)


def test_table_1_is_that_of_the_main_text() -> None:
    table = table_1(fake("paper-cifar10"))
    assert table is not None
    assert list(table.rows) == [
        "FedAvg",
        "Local only",
        "MTL, M = 10",
        "MTL, M = 100",
        "LG 1200+100",
        "LG 1800+100",
    ]
    assert str(table.rows["LG 1200+100"]["paper"].scores["local"].paper) == "91.07 ± 0.50"
    assert str(rows_of(fake("paper-cifar10"), "paper-2")[3].scores["local"].paper) == "90.77 ± 0.50"
    assert "Table 1" not in study_markdown(fake("paper-mnist"))
    assert table_1(fake("paper-cifar10", parts=("paper-3",))) is None


def test_table_1_with_only_one_mtl_has_dashes_for_the_rest() -> None:
    cells = lines_of(
        study_markdown(fake("paper-cifar10", parts=("mtl-10",))), "Table 1 of the main text"
    )
    assert cells["MTL, M = 10"][1].startswith("89.68 ± ")
    assert cells["LG 1800+100"] == ["91.77 ± 0.56", "–", "60.79 ± 1.45", "–", "12.7e9", "–", "–"]


def test_one_part_and_one_seed_can_be_reported(tmp_path: Path) -> None:
    findings = fake("paper-cifar10", parts=("released-4",), seeds=1)
    text = study_markdown(findings)
    assert [table.title for table in tables_of(findings)] == ["4 classes per client"]
    assert "1 of 17 parts, with one seed each" in text
    assert f"waiting for parts that have not been run: {len(findings.study.claims)}" in text
    assert "`tuned-10`, `mtl-10`" in text
    assert lines_of(text, "4 classes per client")["FedAvg"][1] == "65.54"
    assert write_study_report(findings, tmp_path).exists()
    assert [path.name for path in draw_study(findings, tmp_path)] == [
        "paper-cifar10-classes.png",
        "paper-cifar10-traffic.png",
    ]
    assert "One seed was run." in study_drawings(findings)["classes"].caption


def test_a_study_of_which_nothing_was_run_can_be_reported(tmp_path: Path) -> None:
    findings = Findings(STUDIES["paper-cifar10"], {}, {})
    assert "Nothing has been run yet." in study_markdown(findings)
    assert "Nothing has been run yet." in write_study_report(findings, tmp_path).read_text(
        encoding="utf-8"
    )
    assert draw_study(findings, tmp_path) == []


def test_claims_of_one_seed_are_open_and_have_no_interval() -> None:
    rows = lines_of(study_markdown(fake(parts=("paper-2",), seeds=1)), "What the paper claims")
    assert rows["2 classes per client: LG 400+100 is above FedAvg on Local Test"] == [
        "open",
        "+0.57",
        "+0.57",
        "–",
    ]


def test_claims_have_verdict_lead_and_interval() -> None:
    findings = fake(parts=("paper-2",), seeds=2)
    findings = with_figures(findings, "paper-2", "FedAvg", local=[0.98, 0.98])
    findings = with_figures(findings, "paper-2", "LG 400+100", local=[0.99, 0.991])
    rows = lines_of(study_markdown(findings), "What the paper claims")
    # t(0.975, 1) = 12.706; 1.05 ± 12.706 * 0.05
    wanted = ["holds", "+0.57", "+1.05", "+0.41 to +1.69"]
    assert rows["2 classes per client: LG 400+100 is above FedAvg on Local Test"] == wanted


def test_a_part_that_is_not_finished_has_dashes_and_is_named(tmp_path: Path) -> None:
    findings = fake(parts=("paper-2",))
    del findings.parts["paper-2"]["experiments"]["LG 800+100"]
    text = study_markdown(findings)
    assert "Not run yet: `paper-2` (without LG 800+100), `paper-3`" in text
    cells = ["98.54 ± 0.05", "–", "98.17 ± 0.05", "–", "5.7e10", "–", "–"]
    assert lines_of(text, "2 classes per client")["LG 800+100"] == cells
    assert "last 3 shared" not in lines_of(text, "How much to share, 2 classes per client, `paper`")
    assert write_study_report(findings, tmp_path).exists()
    assert len(draw_study(findings, tmp_path)) == 3


def test_other_settings_than_the_studys_are_reported() -> None:
    findings = fake(parts=("paper-2", "paper-3"))
    findings = replace(
        findings, parts=json.loads(json.dumps(findings.parts))
    )  # as it is written to disk
    assert changes_of(findings, "paper-2") == []
    assert len(sweep_points(findings, "paper-2")) == 10
    findings.parts["paper-3"]["settings"]["plan"]["clients_per_round"] = 5
    assert (
        "Run with other settings than the study’s: `paper-3` with plan.clients_per_round = 5."
        in study_markdown(findings)
    )
    del findings.parts["paper-2"]["settings"]["experiments"]["LG 800+100"]["start_from"]
    assert changes_of(findings, "paper-2") == ["experiments.LG 800+100 without start_from = FedAvg"]


def test_the_sweep_goes_from_nothing_to_everything_and_counts_the_models_parameters() -> None:
    for study, own in (("paper-mnist", "last 3 shared"), ("paper-cifar10", "first 2 shared")):
        splits = {split.shares: split for split in sweep_points(fake(study), "paper-2")}
        assert len(splits) == 10
        assert splits["none"].parameters == 0
        assert splits["all"].parameters == splits[own].whole == MODELS[study]
        assert splits[own].parameters == SHARED[study]
        assert (
            splits["first 1 shared"].parameters + splits["last 4 shared"].parameters
            == MODELS[study]
        )


def test_the_sweep_of_another_model_is_left_out() -> None:
    findings = fake(parts=("paper-2",))
    findings.parts["paper-2"]["settings"]["model"]["hidden"] = [8, 8, 8, 8]
    assert sweep_points(findings, "paper-2") == []
    assert "splits" not in study_drawings(findings)


def test_figures_show_our_means_and_the_papers_numbers_as_hollow_markers() -> None:
    findings = shifted(
        fake("paper-cifar10", parts=("paper-2", "paper-10")), "paper-2", "FedAvg", local=1.0
    )
    lines = study_drawings(findings)["classes"].figure.axes[0].lines
    ours = {
        line.get_label(): line.get_xydata()
        for line in lines
        if not str(line.get_label()).startswith("_")
    }
    assert np.allclose(ours["FedAvg"], [[0, 59.99], [4, 67.74]], atol=1e-3)
    hollow = [
        line.get_xydata().tolist()[0] for line in lines if line.get_markerfacecolor() == "none"
    ]
    assert len(hollow) == 15
    assert [0, 58.99] in hollow
    assert [4, 69.89] in hollow


def test_figures_of_nothing_are_none_and_png_files_are_the_same_each_time(tmp_path: Path) -> None:
    assert study_drawings(fake(parts=("tuned-2",))) == {}
    findings = fake(parts=("paper-2",))
    paths = draw_study(findings, tmp_path / "new")
    assert [path.name for path in paths] == [
        f"paper-mnist-{name}.png" for name in ("classes", "traffic", "splits")
    ]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    before = paths[0].read_bytes()
    assert draw_study(findings, tmp_path / "new")[0].read_bytes() == before


def test_a_study_without_starts_has_neither_their_figures_nor_a_paper_to_stand_beside(
    tmp_path: Path,
) -> None:
    study = STUDIES["few-labels"]
    experiment = {
        "local": [0.6, 0.61],
        "new": [0.7, 0.7],
        "validation": [0.6, 0.6],
        "paper_parameters": 0,
        "parameters": 1,
        "bytes": 4,
    }
    part = {
        "seconds": 1.0,
        "settings": study.parts["mnist"].settings.as_dict(),
        "experiments": dict.fromkeys(("LG", "LG + decoder"), experiment),
    }
    findings = Findings(study, ABOUT, {"mnist": part})
    page = write_study_report(findings, tmp_path).read_text(encoding="utf-8")
    assert "LG + decoder" in page
    assert study_drawings(findings) == {}


BOTTLENECKS = {
    f"LG + Adv, bottleneck {width}, strength {strength:g}": Bottleneck(width, strength)
    for width in (4, 16)
    for strength in (0.1, 1.0, 10.0)
}


@pytest.fixture
def fair() -> Findings:
    study = replace(FAIR, figures={"tradeoff": partial(draw_tradeoff, bottlenecks=BOTTLENECKS)})
    return Findings(study, ABOUT, {name: fair_part() for name in FAIR.parts})


def test_the_trade_off_has_a_panel_for_each_part_and_a_line_for_each_width(fair: Findings) -> None:
    fair.parts["non-iid"]["experiments"].pop("LG + Adv, bottleneck 16, strength 1")
    drawing = study_drawings(fair)["tradeoff"]
    upper, lower = drawing.figure.axes
    assert [axes.get_title("left") for axes in (upper, lower)] == ["iid data", "non-iid data"]
    lines = {line.get_label(): line.get_xydata() for line in upper.lines}
    assert np.allclose(lines["width 4"], [[75.4, 84], [65.4, 83], [55.4, 82]])
    assert np.allclose(lines["width 16"], [[76.6, 84], [66.6, 83], [56.6, 82]])
    assert len({line.get_label(): line.get_xydata() for line in lower.lines}["width 16"]) == 2
    assert [text.get_text() for text in upper.texts] == ["0.1", "1", "10"] * 2 + ["guessing"]
    assert [50, 50] in [list(line.get_xdata()) for line in upper.lines]
    assert "width 16" in drawing.legend


def test_the_trade_off_is_in_the_page_and_among_the_files(fair: Findings, tmp_path: Path) -> None:
    page = write_study_report(fair, tmp_path).read_text(encoding="utf-8")
    assert page.count("<figure") == 1
    assert "Accuracy by what attackers read" in page
    assert [path.name for path in draw_study(fair, tmp_path)] == ["fair-tradeoff.png"]


def test_no_trade_off_is_drawn_of_what_was_not_audited(fair: Findings) -> None:
    for part in fair.parts.values():
        for experiment in part["experiments"].values():
            experiment["fresh"] = [None, None]
    assert study_drawings(fair) == {}
    only = {
        name: {**part, "experiments": {"FedAvg": part["experiments"]["FedAvg"]}}
        for name, part in fair.parts.items()
    }
    assert study_drawings(replace(fair, parts=only)) == {}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    findings = shifted(fake("paper-cifar10"), "released-5", "FedAvg", new=-2.0)
    return write_study_report(findings, tmp_path_factory.mktemp("study")).read_text(
        encoding="utf-8"
    )


def test_the_page_is_whole_and_refers_to_nothing_outside_itself(page: str) -> None:
    outline = Outline(page.replace("<br>", ""))
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert not re.findall(
        r"\$\w|\{\w+\}|None|nan\b|`", re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    )
    assert not re.findall(r"https?://", re.sub(r'xmlns(:\w+)?="[^"]*"', "", page))
    assert not {"script", "link", "iframe", "img"} & set(outline.tags)
    assert page.count("<figure") == 3


def test_the_pages_numbers_are_those_of_the_comparison(page: str) -> None:
    findings = shifted(fake("paper-cifar10"), "released-5", "FedAvg", new=-2.0)
    for table in tables_of(findings):
        box = page.partition(f"<h3>{table.title}</h3>")[2].partition("</table>")[0]
        for name, of in table.rows.items():
            cells = box.partition(f">{escape(name)}</th>")[2].partition("</tr>")[0]
            for row in of.values():
                numbers = [
                    score
                    for pair in row.scores.values()
                    for score in (pair.paper, pair.ours)
                    if score
                ]
                assert all(f">{number}" in cells for number in [*numbers, row.sent.ours])
    assert '<span class="below">65.21 ± ' in page


def test_the_page_has_source_claim_machine_and_time(page: str) -> None:
    study = STUDIES["paper-cifar10"]
    for words in (
        study.title,
        study.source,
        study.statement,
        "on a GPU (PyTorch 2.11",
        "add up to 17 min 26 s",
        "glocal run paper",
    ):
        assert escape(words) in page
