"""The package stands on glocal's public names, and glocal knows nothing of it."""

import ast
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import glocal
import liang2020
from glocal.studies.registry import GROUP, installed_studies, missing_packages
from liang2020.studies import STUDIES
from tests.support.public_api import MODULES, is_public

PACKAGE = Path(__file__).parents[1]
OURS = sorted([*Path(liang2020.__file__).parent.rglob("*.py"), *PACKAGE.glob("*.py")])
GLOCAL = sorted(Path(glocal.__file__).parent.rglob("*.py"))
# "glocal.engines.looped:LoopedEngine", which is imported when it is needed
ADDRESS = re.compile(r"\b(glocal(?:\.\w+)+):(\w+)")


def imports(tree, path="<source>"):
    """Every import of a file as a pair of module and name; the name is empty for a whole module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ADDRESS.findall(node.value)


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def not_public(tree, path="<source>"):
    """What a file imports of glocal and should not."""
    ours = [pair for pair in imports(tree, path) if pair[0].partition(".")[0] == "glocal"]
    return [f"{module} {name}".strip() for module, name in ours if not is_public(module, name)]


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_only_public_names_of_glocal_are_imported(path):
    assert not_public(parsed(path), path) == []


@pytest.mark.parametrize(
    "source",
    [
        "import glocal.engines.fused",
        "import glocal",  # its attributes would go unchecked
        "from glocal.studies.findings import _leak",
        "from glocal.algorithms._nothing import anything",
        "from glocal.engines.looped import anything",
        "from glocal.studies.findings import fmean",  # which only imports it
        "from glocal.core import trees",
        "from glocal.studies.build import build_algorithm",
        "ENGINE = 'glocal.engines.looped:LoopedEngine'",
        "def late():\n    from glocal.core.store import State",
    ],
)
def test_a_private_import_would_be_noticed(source):
    assert not_public(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "from glocal import Plan",
        "from glocal.studies import mlp",
        "from glocal.core.errors import InputError",
        "from glocal.studies.study import MEASURES",
        "MODEL = 'glocal.studies.settings:Settings'",
        "import torch",
    ],
)
def test_a_public_import_is_fine(source):
    assert not not_public(ast.parse(source))


def test_every_module_that_is_public_for_packages_is_used():
    used = {module for path in OURS for module, _ in imports(parsed(path), path)}
    assert used >= MODULES


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_no_private_attribute_of_another_module_is_used(path):
    nodes = [*ast.walk(parsed(path))]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own |= {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    used = {node.attr for node in attributes} - own
    private = {name for name in used if name.startswith("_") and not name.startswith("__")}
    assert private <= {"_fields", "_replace"}  # of a NamedTuple, public in spite of their names


def test_nothing_in_glocal_imports_it():
    for path in GLOCAL:
        tree = parsed(path)
        modules = [module for module, _ in imports(tree, path)]
        assert not [name for name in modules if name.partition(".")[0] == "liang2020"], path
        constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        texts = [value for value in constants if isinstance(value, str)]
        assert not [text for text in texts if text.startswith("liang2020.")], path


def test_its_studies_are_offered_to_glocal():
    assert [point.value for point in entry_points(group=GROUP, name="liang2020")] == [
        "liang2020.studies:STUDIES"
    ]
    assert STUDIES.keys() <= installed_studies().keys()
    assert not missing_packages()
