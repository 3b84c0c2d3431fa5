"""The report of a study: its text, its page and its figures, from findings that are made up."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from glocal.cli.tables import print_findings, show_study
from glocal.core.errors import InputError
from glocal.report import draw_study, study_markdown, write_study_report
from glocal.report.comparison import (
    ComparisonTable,
    all_tables,
    changes_of,
    row_names,
    rows_of,
    side_by_side,
)
from glocal.report.drawing import Drawing, new_axes
from glocal.report.study_figures import study_drawings
from glocal.studies.findings import Findings
from glocal.studies.settings import ExperimentSettings, Settings
from glocal.studies.study import StudyPart
from tests.support.study_findings import ABOUT, FAIR, fair_part, lines_of, with_figures


@pytest.fixture
def fair() -> Findings:
    return Findings(FAIR, ABOUT, {name: fair_part() for name in FAIR.parts})


def test_a_table_has_any_number_of_measures_and_a_published_column_only_where_something_was(
    fair: Findings,
) -> None:
    table = lines_of(study_markdown(fair), "iid data")
    assert table["Method"] == [
        *(
            f"{words}, {head}"
            for words in ("Accuracy", "Income AUC", "Adversary AUC")
            for head in ("published", "`paper`")
        ),
        "Fresh AUC, `paper`",
        "Sent",
    ]
    scores = [
        "83.70 ± 3.10",
        "84.00 ± 1.41 (+0.30)",
        "89.40 ± 1.90",
        "88.00 ± 1.41 (−1.40)",
        "65.50 ± 1.60",
        "–",
        "80.00 ± 1.41",
    ]
    assert table["FedAvg"] == [*scores, "400.0 MB"]


def test_above_is_worse_where_less_is_better(fair: Findings, tmp_path: Path) -> None:
    text = study_markdown(fair)
    row = lines_of(text, "iid data")["LG + Adv"]  # published: 50.1 ± 1.3
    assert row[1].endswith("(width 4, strength 10)"), (
        "what was chosen stands beside the first figure only"
    )
    assert row[5] == "52.00 ± 1.41 (+1.90) ↑"
    assert (
        "↑ marks what is above the published mean plus its standard deviation, where less is better"
        in text
    )
    row = "LG + Adv on Adversary AUC by 0.60 (52.00 ± 1.41, published 50.10 ± 1.30)"
    assert f"- ↑ `paper`, above the published mean plus its standard deviation: {row}.\n" in text
    nothing = (
        "- Nothing measured in `paper` is below the published mean less its standard deviation"
    )
    assert f"{nothing} on Accuracy, Income AUC.\n" in text.partition("### non-iid data")[0]
    assert "52.00 ± 1.41 ↑</span>" in write_study_report(fair, tmp_path).read_text(encoding="utf-8")


def test_far_below_is_no_shortfall_where_less_is_better(fair: Findings) -> None:
    hidden = with_figures(fair, "iid", "LG + Adv, bottleneck 4, strength 10", adversary=[0.3, 0.3])
    table = study_markdown(hidden).partition("### non-iid data")[0]
    assert lines_of(table, "iid data")["LG + Adv"][5] == "30.00 ± 0.00 (−20.10)"
    nothing = "Nothing measured in `paper` is above the published mean plus its standard deviation"
    assert f"{nothing} on Adversary AUC." in table


def test_another_audit_than_the_studys_is_reported(fair: Findings) -> None:
    fair.parts["iid"]["settings"]["audit"] = {"layer": "layer1", "encoders": 1}
    assert changes_of(fair, "iid") == ["audit.layer = layer1", "audit.encoders = 1"]
    assert changes_of(fair, "non-iid") == []


def test_the_row_is_the_best_within_the_limit(fair: Findings) -> None:
    """Within 60 % only the strongest; without a limit the weakest are best on validation data."""
    assert [row.choice for row in rows_of(fair, "iid")] == ["", "width 4, strength 10"]
    free = {name: replace(part, leak_limits={}) for name, part in FAIR.parts.items()}
    findings = replace(fair, study=replace(FAIR, parts=free))
    assert [row.choice for row in rows_of(findings, "iid")] == ["", "width 4, strength 0.1"]


def test_a_candidate_that_no_words_describe_is_named(fair: Findings) -> None:
    plain = {name: replace(part, choices={}) for name, part in FAIR.parts.items()}
    findings = replace(fair, study=replace(FAIR, parts=plain))
    names = [row.choice for row in rows_of(findings, "iid")]
    assert names == ["", "LG + Adv, bottleneck 4, strength 10"]


def test_what_a_new_client_cost_is_what_was_sent(fair: Findings) -> None:
    findings = with_figures(fair, "iid", "FedAvg", join_bytes=5 * 10**6)
    table = lines_of(study_markdown(findings), "iid data")
    assert (table["Method"][-1], table["FedAvg"][-1]) == ("Sent for joining", "5.0 MB")


def test_the_terminal_has_the_same_columns(
    fair: Findings, capsys: pytest.CaptureFixture[str]
) -> None:
    print_findings(fair)
    heads, first, *_ = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", heads.strip()) == [
        *(
            "part",
            "experiment",
            "Accuracy %",
            "paper",
            "difference",
            "Income AUC %",
            "paper",
            "difference",
        ),
        *("Adversary AUC %", "paper", "difference", "Fresh AUC %"),
    ]
    assert re.split(r"\s{2,}", first.strip())[2:] == [
        *(
            "84.00 ± 1.41",
            "83.70 ± 3.10",
            "+0.30",
            "88.00 ± 1.41",
            "89.40 ± 1.90",
            "-1.40",
            "-",
            "65.50 ± 1.60",
            "80.00 ± 1.41",
        )
    ]
    show_study(FAIR)
    shown = capsys.readouterr().out
    assert re.search(r"rounds +paper: Accuracy +Income AUC +Adversary AUC\s*\n", shown)
    assert re.search(r"strength 0.1 +2 +82.10 ± 1.00 +85.70 ± 1.70 +50.10 ± 1.30\s*\n", shown)


def test_a_study_of_which_the_paper_prints_nothing_has_our_columns_only(
    fair: Findings, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = replace(
        FAIR, parts={name: replace(part, published={}) for name, part in FAIR.parts.items()}
    )
    findings = replace(fair, study=bare)
    text = study_markdown(findings)
    assert lines_of(text, "iid data")["FedAvg"] == [
        "84.00 ± 1.41",
        "88.00 ± 1.41",
        "–",
        "80.00 ± 1.41",
        "400.0 MB",
    ]
    assert "Nothing measured" not in text
    assert '<th scope="col">published</th>' not in write_study_report(findings, tmp_path).read_text(
        encoding="utf-8"
    )
    print_findings(findings)
    show_study(bare)
    assert "paper" not in capsys.readouterr().out.replace("paper-", "")


def line_figure(findings: Findings) -> Drawing | None:
    """A figure of a study's own; none where nothing was measured."""
    if not findings.parts:
        return None
    figure, axes = new_axes()
    axes.plot([0, 1], [0, 1])
    return Drawing(figure, "A line", "It rises.", "")


def other_figure(findings: Findings) -> Drawing | None:
    figure, _ = new_axes()
    return Drawing(figure, "Another", "It is empty.", "")


def test_a_study_has_figures_of_its_own_and_the_lead_figure_comes_first(
    fair: Findings, tmp_path: Path
) -> None:
    figures = {"other": other_figure, "line": "tests.report.test_study_report:line_figure"}
    own = replace(fair, study=replace(FAIR, figures=figures, lead_figure="line"))
    assert [*study_drawings(own)] == ["other", "line"]
    assert [path.name for path in draw_study(own, tmp_path)] == ["fair-other.png", "fair-line.png"]
    page = write_study_report(own, tmp_path).read_text(encoding="utf-8")
    assert 0 < page.index("A line") < page.index("Another")
    assert study_drawings(replace(own, parts={})).keys() == {"other"}


def test_a_figure_that_cannot_be_found_is_one_line(fair: Findings) -> None:
    lost = replace(fair, study=replace(FAIR, figures={"lost": "nowhere:draw"}))
    with pytest.raises(InputError, match=r"figures\.lost = 'nowhere:draw' cannot be found"):
        study_drawings(lost)


def both_parts(findings: Findings) -> ComparisonTable | None:
    """FedAvg of both parts, under their names."""
    rows = [rows_of(findings, part)[0]._replace(name=f"FedAvg, {part}") for part in findings.parts]
    return side_by_side("Both", findings.study, {"paper": rows}) if rows else None


def test_a_study_has_tables_of_its_own_before_those_of_its_parts(fair: Findings) -> None:
    apart = {**FAIR.parts, "non-iid": replace(FAIR.parts["non-iid"], in_tables=False)}
    own = replace(fair, study=replace(FAIR, parts=apart, tables={"both": both_parts}))
    assert [table.title for table in all_tables(own)] == ["Both", "iid data"]
    assert lines_of(study_markdown(own), "Both").keys() >= {"FedAvg, iid", "FedAvg, non-iid"}
    assert all_tables(replace(own, parts={})) == []


def test_differences_stand_beside_scores_of_the_reference_protocol(fair: Findings) -> None:
    other = replace(fair, study=replace(FAIR, reference_protocol="released"))
    text = study_markdown(other)
    assert "beside `released` are differences" in text
    assert "(+0.30)" not in text
    assert "(+0.30)" in study_markdown(fair)


def test_what_only_the_sweep_has_is_no_row_of_a_table() -> None:
    experiments = {name: ExperimentSettings("fedavg") for name in ("FedAvg", "all shared")}
    part = StudyPart("a part", "paper", Settings(experiments=experiments))
    assert row_names(part) == ["FedAvg", "all shared"]
    assert row_names(replace(part, sweep_only=("all shared",))) == ["FedAvg"]
