"""The package stands on glocal's public names, and glocal knows nothing of it."""

import ast
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import glocal
import liang2020
from glocal.studies.registry import GROUP, installed_studies, missing_packages
from liang2020.studies import STUDIES

OURS = sorted(Path(liang2020.__file__).parent.rglob("*.py"))
GLOCAL = sorted(Path(glocal.__file__).parent.rglob("*.py"))


def imported(path):
    """Every name that a file imports, in full, and every attribute of glocal that it uses."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_only_public_names_of_glocal_are_imported(path):
    names = [name for name in imported(path) if name.split(".")[0] == "glocal"]
    private = [name for name in names if any(part.startswith("_") for part in name.split("."))]
    assert not private


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_private_attribute_of_another_module_is_used(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private <= {"_fields", "_replace"}  # of a NamedTuple, public in spite of their names


def test_nothing_in_glocal_imports_it():
    for path in GLOCAL:
        assert not [name for name in imported(path) if name.split(".")[0] == "liang2020"], path
        texts = [
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
        assert not [text for text in texts if text.startswith("liang2020.")], path


def test_its_studies_are_offered_to_glocal():
    assert [point.value for point in entry_points(group=GROUP, name="liang2020")] == [
        "liang2020.studies:STUDIES"
    ]
    assert STUDIES.keys() <= installed_studies().keys()
    assert not missing_packages()
