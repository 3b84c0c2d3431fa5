"""A clean install: whatever is imported is declared, and what is optional is guarded."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import glocal

ROOT = Path(__file__).parents[1]
SOURCE = Path(glocal.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# distributions that are imported under another name
IMPORTED_AS = {"scikit-learn": "sklearn", "pillow": "PIL", "dp-accounting": "dp_accounting"}
# files that need an extra, or Triton, to be imported; what leads to them is guarded
OPTIONAL = (
    "backends/flower/",
    "deploy/",
    "cli/deploys.py",
    "fused/kernels.py",
    "fused/conv_kernels.py",
    "fused/launches.py",
)


def libraries(requirements):
    """The names that a list of requirements makes importable."""
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {IMPORTED_AS.get(name, name) for name in names}


CORE = libraries(PROJECT["dependencies"])


def third_party(node):
    """The libraries that a node imports; none for Python's own and for glocal."""
    if isinstance(node, ast.Import):
        names = {alias.name.split(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
        names = {node.module.split(".")[0]}
    else:
        names = set()
    return names - sys.stdlib_module_names - {"glocal"}


def run_on_import(node):
    """What runs when a file is imported: all that is in no function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_on_import(child)


def imported(nodes):
    return set().union(*map(third_party, nodes))


def is_optional(path):
    return path.relative_to(SOURCE).as_posix().startswith(OPTIONAL)


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not is_optional(path)],
    ids=lambda path: path.relative_to(SOURCE).as_posix(),
)
def test_a_file_imports_core_dependencies_only(path):
    assert imported(run_on_import(ast.parse(path.read_text()))) <= CORE
