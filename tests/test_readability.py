"""Code that can be read: short functions, one idea a line, 100 columns."""

import pytest

import glocal
from tests.support.readability import Path, files, measure

SOURCE = Path(glocal.__file__).parent
HELD = ("core", "wire", "algorithms", "datasets", "engines", "evaluate")


@pytest.fixture(params=HELD)
def measured(request):
    return measure(files(SOURCE / request.param))


def test_the_body_of_a_function_is_small(measured):
    assert measured.median_nodes <= 48
    assert measured.p95_nodes <= 200


def test_a_line_holds_one_idea(measured):
    assert measured.nodes_per_line <= 9
    assert measured.comprehensions_per_function <= 0.4


def test_no_line_and_no_file_is_long(measured):
    assert not measured.long_lines
    assert not measured.long_files


def test_no_comprehension_is_within_another():
    """All but the reports, which are rebuilt on their own."""
    folders = [folder for folder in SOURCE.iterdir() if folder.name != "report"]
    assert not measure([path for folder in folders for path in files(folder)]).nested
