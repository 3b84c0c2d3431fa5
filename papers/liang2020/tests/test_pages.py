"""The pages say what the committed results say, to the digit."""

import re
import tomllib

import pytest

from glocal.studies.registry import find_study
from liang2020.studies import STUDIES
from liang2020.theory import LinearProblem, finite_sample_closed_form, uniform_inputs
from papers.liang2020 import refresh

CLAIMS = tomllib.loads((refresh.DOCS / "claims.toml").read_text(encoding="utf-8"))["claims"]


@pytest.mark.parametrize(
    "page", [*refresh.study_pages(), refresh.SUMMARY], ids=lambda page: page.stem
)
def test_a_page_is_rebuilt_from_its_results_to_the_same_digits(page):
    text = page.read_text(encoding="utf-8")
    written = refresh.refreshed(text)
    assert written.splitlines() == text.splitlines(), "run papers/liang2020/refresh.py"
    assert written == text


def test_a_page_with_another_digit_would_be_seen():
    page = refresh.DOCS / "paper-rotated.md"
    text = page.read_text(encoding="utf-8")
    changed = text.replace("98.42 ± 0.09", "98.43 ± 0.09")
    assert changed != text
    assert refresh.refreshed(changed) == text


def test_every_study_has_one_page_with_its_name():
    reported = refresh.reported_results()
    names = [refresh.findings_of(name).study.name for name in reported]
    assert sorted(names) == sorted(STUDIES)
    assert {page.stem for page in refresh.study_pages()} == {*STUDIES}
    assert all(find_study(name) for name in names)


def test_every_figure_that_a_page_shows_is_drawn_by_a_study_and_none_is_left_over():
    shown = set()
    for page in refresh.DOCS.glob("*.md"):
        shown |= {*re.findall(r"images/([\w.-]+)\)", page.read_text(encoding="utf-8"))}
    drawn = {f"{name}-{figure}.png" for name, study in STUDIES.items() for figure in study.figures}
    committed = {path.name for path in refresh.IMAGES.iterdir()}
    assert committed == shown
    assert drawn <= committed
    assert committed - drawn == {"paper-vqa-goal.png", "theory.png"}


@pytest.mark.parametrize(
    "row",
    [row for row in CLAIMS if "verdict" in row and row.get("statements")],
    ids=lambda row: row["claim"],
)
def test_a_verdict_in_words_names_what_was_computed(row):
    computed = {status.split(" (")[0] for status in refresh.verdict(row).split(", ")}
    assert all(status in row["verdict"] for status in computed)


def test_figure_2b_needs_the_noise_of_the_released_code():
    (row,) = (row for row in CLAIMS if row["where"] == "Figure 2(b)")
    for sigma in (1.5, 1.5**2):
        problem = LinearProblem(uniform_inputs(20), clients=100, n=2000, rho=0.06, sigma=sigma)
        closed_form = finite_sample_closed_form(problem)
        assert f"{closed_form.local_error():.4f}" in row["ours"]
        assert f"{closed_form.global_error():.4f}" in row["ours"]
        assert (closed_form.global_error() < closed_form.local_error()) == (sigma > 2)


def test_a_claim_without_a_match_is_named():
    row = {"results": "mood.json", "statements": ["nothing like it"]}
    with pytest.raises(ValueError, match="no claim of paper-mood matches 'nothing like it'"):
        refresh.verdict(row)


def test_a_number_that_is_not_there_is_named():
    row = {"results": "mood.json"}
    with pytest.raises(ValueError, match="no number is named"):
        refresh.fill("{14-people}", row, refresh.our_value)
    with pytest.raises(ValueError, match="the paper prints no number"):
        refresh.fill("{goal | longest | LG}", row, refresh.published_value)
