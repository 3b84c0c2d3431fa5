"""A clean install: whatever is imported is declared, and what is optional is guarded."""

import ast
import re
import subprocess
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
    "deploy/flower/",
    "deploy/",
    "cli/deploy_actions.py",
    "engines/fused/linear_kernels.py",
    "engines/fused/conv_kernels.py",
    "engines/fused/update_kernels.py",
    "engines/fused/conv_layers.py",
    "engines/fused/linear_layers.py",
)


def libraries(requirements):
    """The names that a list of requirements makes importable."""
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in requirements]
    return {IMPORTED_AS.get(name, name) for name in names}


CORE = libraries(PROJECT["dependencies"])
EXTRAS = {name: libraries(listed) for name, listed in PROJECT["optional-dependencies"].items()}
del EXTRAS["dev"]


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
        for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
        if not for_types and not isinstance(child, functions):
            yield child
            yield from run_on_import(child)


def imported(nodes):
    return set().union(*map(third_party, nodes))


IMPORTED = set().union(*(imported(ast.walk(ast.parse(path.read_text()))) for path in FILES))


def is_optional(path):
    return path.relative_to(SOURCE).as_posix().startswith(OPTIONAL)


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if not is_optional(path)],
    ids=lambda path: path.relative_to(SOURCE).as_posix(),
)
def test_a_file_imports_core_dependencies_only(path):
    assert imported(run_on_import(ast.parse(path.read_text()))) <= CORE


def test_every_library_that_is_imported_is_a_dependency_or_in_an_extra():
    # Triton comes with PyTorch where there is a GPU
    assert IMPORTED - CORE.union(*EXTRAS.values()) == {"triton"}


@pytest.mark.parametrize("name", ["core", *EXTRAS])
def test_every_dependency_is_imported_by_something(name):
    assert {"core": CORE, **EXTRAS}[name] <= IMPORTED


MISSING = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {missing}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
"""


def without_extras(code):
    """Run code in a process of its own, without what the extras bring; matplotlib needs Pillow."""
    missing = sorted(set().union(*EXTRAS.values(), {"triton"}) - {"PIL"})
    command = [sys.executable, "-c", MISSING.format(missing=missing) + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_all_but_the_optional_files_are_imported_without_any_extra():
    paths = [path.relative_to(SOURCE) for path in FILES if not is_optional(path)]
    modules = [".".join(("glocal", *path.with_suffix("").parts)) for path in paths]
    modules = [name.removesuffix(".__init__") for name in modules if "__main__" not in name]
    ended = without_extras("\n".join(f"import {name}" for name in modules))
    assert ended.returncode == 0, ended.stderr


def test_the_report_of_a_deployment_says_how_to_install_flower(tmp_path):
    (tmp_path / "live.json").write_text("{}")
    command = f"from glocal.cli import main\nmain(['report', {str(tmp_path)!r}])"
    ended = without_extras(command)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line == "glocal: deploy: Flower is not installed; run: pip install 'glocal[flower]'"
