"""Studies are found through entry points, whoever's package it is."""

import subprocess
import sys

import pytest

from glocal.core.errors import InputError
from glocal.studies import registry
from glocal.studies.registry import find_study, installed_studies, unknown_study
from glocal.studies.settings import ExperimentSettings, Settings
from glocal.studies.study import Study, StudyPart
from tests.support.command_line import complaint, run
from tests.support.offered import entry_point, offer_studies

SETTINGS = Settings(experiments={"FedAvg": ExperimentSettings("fedavg")})
MINE = Study(
    "mine", "A study of mine", "nobody 2026", "It runs.", {"a": StudyPart("a", "", SETTINGS)}
)


def offer(monkeypatch, *points):
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_anybodys_study_is_listed_and_shown(monkeypatch, capsys):
    offer_studies(monkeypatch, MINE)
    assert run("list") == 0
    assert "A study of mine" in capsys.readouterr().out
    assert run("show", "mine") == 0
    assert "It runs." in capsys.readouterr().out


def test_an_entry_point_may_be_one_study(monkeypatch):
    offer(monkeypatch, entry_point(MINE, "one"))
    assert find_study("mine") is MINE


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (
            [entry_point(MINE, "one"), entry_point({"mine": MINE}, "two")],
            "'mine' is in two packages, one and two; uninstall one of them",
        ),
        (
            [entry_point({"digits": MINE}, "one")],
            "'digits' is in two packages, glocal and one; uninstall one of them",
        ),
        ([entry_point(ImportError("no such module"), "one")], "studies of one cannot be loaded"),
        ([entry_point([MINE], "one")], "one offers one:STUDIES, which is neither a Study nor"),
        ([entry_point({"mine": 3}, "one")], "one offers one:STUDIES, which is neither a Study nor"),
    ],
)
def test_what_cannot_be_offered_is_refused_in_one_line(monkeypatch, capsys, points, message):
    offer(monkeypatch, *points)
    with pytest.raises(InputError, match=message):
        installed_studies()
    assert run("list") == 2
    assert message in complaint(capsys)


def test_without_the_papers_package_one_line_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    offer(monkeypatch)
    for command in ("run", "show"):
        assert run(command, "paper-mnist") == 2
        line = complaint(capsys)
        assert "there is no study 'paper-mnist'" in line
        assert "pip install glocal-liang2020" in line
        assert "pip install ./papers/liang2020" in line
    assert run("list") == 0
    assert "pip install glocal-liang2020" in capsys.readouterr().out


def test_with_it_nothing_is_said_of_it(monkeypatch):
    offer(monkeypatch, entry_point(MINE, "glocal-liang2020"))
    assert "pip install" not in unknown_study("mino", {"mine": MINE})


def test_a_study_of_glocals_own_needs_no_other_package():
    """What comes with glocal runs, whatever other packages are like."""
    code = "import sys; from glocal.cli import main; main(['show', 'digits'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
