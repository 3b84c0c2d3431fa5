"""Imports go one way, heavy libraries stay where they belong, exports are what they say."""

import ast
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import iter_modules

import pytest

import glocal
from tests.support.readability import lines_without_docstrings

ROOT = Path(__file__).parents[1]
SOURCE = Path(glocal.__file__).parent
# each may import only from those before it
ORDER = (
    "core",
    "wire",
    "algorithms",
    "datasets",
    "engines",
    "evaluate",
    "federate",
    "personalize",
    "studies",
    "report",
    "deploy",
    "cli",
    "__main__",
)
FILES = sorted(SOURCE.rglob("*.py"))


def part(path):
    """Which part of the house a file belongs to."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


# "glocal.deploy.apps:server", which is imported when it is needed
ADDRESS = re.compile(r"glocal(?:\.\w+)+(?=:\w)|(?<=-m )glocal(?:\.\w+)+")


def imports(path):
    """The absolute names that a file imports, wherever in it, or names as "module:function"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by full name"
            yield node.module
            if node.module == "glocal":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ADDRESS.findall(node.value)
            if re.fullmatch(r"glocal(?:\.\w+)+", node.value):  # a module to be run
                yield node.value


def test_an_address_in_a_string_is_an_import(tmp_path):
    file = tmp_path / "file.py"
    file.write_text('"""See glocal.cli."""\nAPP = "glocal.deploy.apps:server"\n')
    assert [*imports(file)] == ["glocal.deploy.apps"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_only_go_down_the_list(path):
    own = part(path)
    if own == "__init__":
        return
    used = {name.split(".")[1] for name in imports(path) if name.startswith("glocal.")} - {
        "__version__"
    }
    upward = {name for name in used if name != own and ORDER.index(name) >= ORDER.index(own)}
    assert not upward, f"{own} may not import {upward}"


def test_every_part_has_its_place():
    assert {part(path) for path in FILES} - {"__init__"} == set(ORDER)


HOMES = {
    "matplotlib": "report",
    "typer": "cli",
    "rich": "cli, federate",  # the progress bar of `fit`
    "sklearn": "datasets, evaluate",
    "fairlearn": "evaluate",
    "triton": "engines",
    "PIL": "datasets",
    "pyarrow": "datasets",
    "flwr": "deploy",
    "cryptography": "deploy",
    "h11": "deploy",
    "uvicorn": "deploy",
    "dp_accounting": "evaluate",
}


@pytest.mark.parametrize(("library", "home"), HOMES.items())
def test_heavy_libraries_stay_where_they_belong(library, home):
    users = {
        part(path) for path in FILES if any(name.split(".")[0] == library for name in imports(path))
    }
    assert users <= {*(home or "").split(", ")}


def test_only_its_own_folder_imports_flower():
    users = {
        path
        for path in FILES
        if any(name.split(".")[0] in ("flwr", "httpx") for name in imports(path))
    }
    assert {path.relative_to(SOURCE).parts[:2] for path in users} == {("deploy", "flower")}


def test_importing_glocal_has_no_cost_and_no_side_effect():
    code = "import sys; before = {*sys.modules}; import glocal; print(*{*sys.modules} - before)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    assert not {"torch", "numpy", "matplotlib", "sklearn", "rich", "typer"} & {
        name.split(".")[0] for name in loaded
    }


STUB = (SOURCE / "__init__.pyi").read_text()
# what can be imported from glocal, but for what begins with an underscore
SUBMODULES = sorted(name for _, name, _ in iter_modules(glocal.__path__) if name[0] != "_")
DOCS = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
# a name that is used, neither imported nor an address such as glocal.deploy.apps:server
DOTTED = re.compile(r"(?<!from )\bglocal(?:\.[A-Za-z_]\w*)+(?![\w:]|\.\w)")
NAMED = {name for page in DOCS for name in DOTTED.findall(page.read_text())}
EACH_BY_ITSELF = """
import os, sys
import matplotlib.figure, scipy.optimize, sklearn.datasets, torch  # once for all that follow

for name in sys.argv[1:]:
    if not os.fork():
        import glocal
        eval(name)
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


def test_every_submodule_and_what_the_docs_name_in_them_is_found_on_first_use():
    """Each in a process of its own, in which nothing else has imported a part of glocal."""
    submodules = {f"glocal.{name}" for name in SUBMODULES}
    inside = {name for name in NAMED if ".".join(name.split(".")[:2]) in submodules}
    names = sorted(inside | submodules)
    command = [sys.executable, "-c", EACH_BY_ITSELF, *names]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert not ended.stdout.split(), ended.stderr


def test_the_stub_names_every_submodule():
    assert re.findall(r"^from glocal import (\w+) as \1$", STUB, re.MULTILINE) == SUBMODULES
    assert not set(SUBMODULES) & set(glocal.__all__)
    assert set(SUBMODULES) <= set(dir(glocal))


def test_what_is_exported_is_there_and_the_stub_agrees():
    stub = re.findall(r"^from glocal\.\S+ import (\w+) as \1$", STUB, re.MULTILINE)
    assert sorted(stub) == sorted(glocal.__all__)
    for name in glocal.__all__:
        assert getattr(glocal, name).__name__ == name
    with pytest.raises(AttributeError, match="glocal has no 'nothing'"):
        glocal.nothing  # noqa: B018


@pytest.mark.parametrize(
    "package", ["algorithms", "datasets", "engines", "evaluate", "studies", "wire", "report"]
)
def test_every_package_exports_what_it_says(package):
    module = __import__(f"glocal.{package}", fromlist=["__all__"])
    assert module.__all__ == sorted(
        module.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
    )
    assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("kind", glocal.algorithms.ALGORITHMS, ids=lambda kind: kind.word)
def test_an_algorithm_is_a_small_file(kind):
    text = Path(inspect.getfile(kind)).read_text()
    assert lines_without_docstrings(text) <= 60


def test_fedrep_is_thirty_lines():
    assert lines_without_docstrings((SOURCE / "algorithms/fedrep.py").read_text()) <= 30


HALF_STEP = '''"""FedAvg whose server goes half of the way."""

from glocal.algorithms.contract import Uploads, add_change
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.trees import Params


class HalfStep(FedAvg):
    """The shared part moves by half of the mean change."""

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Half of the mean change."""
        return add_change(shared, trees.scale(0.5, uploads.aggregate())), server
'''
PAGE = (ROOT / "docs/new-algorithm.md").read_text()
FEDAVGM = re.search(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[1]
MOMENTUM = FEDAVGM.replace("class FedAvgM", "class ServerMomentum")  # a name that is not taken


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [("HalfStep", HALF_STEP), ("ServerMomentum", MOMENTUM)])
def test_a_new_algorithm_is_one_small_file_and_its_export(kind, file, tmp_path):
    """In a copy of the project with one more file and its export, it runs everywhere."""
    assert len(file.splitlines()) <= 40
    assert f"class {kind}" in file
    name, copy, tests = kind.lower(), tmp_path / "glocal", ROOT / "tests"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / f"algorithms/{name}.py").write_text(file)
    exports = copy / "algorithms/__init__.py"
    exports.write_text(with_algorithm(exports.read_text(), name, kind))
    (tmp_path / "study.toml").write_text(
        f'[split]\nlocal = ["layer5"]\n[plan]\nrounds = 2\n[experiments.P]\nalgorithm = "{name}"\n'
    )
    here = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        "capture_output": True,
        "text": True,
    }
    ran = subprocess.run(
        [sys.executable, "-m", "glocal", "run", "study.toml", "--out", "run"], timeout=120, **here
    )
    assert ran.returncode == 0, ran.stderr
    files = [str(tests / "algorithms/test_contract.py"), str(tests / "federate/test_fit.py")]
    chosen = [*files, "-k", f"{name} and (plain or batch)"]
    checked = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *chosen], timeout=300, **here
    )
    assert checked.returncode == 0, checked.stdout
    assert "passed" in checked.stdout


def with_algorithm(exports, name, kind):
    """The exports with one algorithm more."""
    table = "\nALGORITHMS: tuple[type[Algorithm], ...] = ("
    assert exports.count(table) == 1
    own = f"from glocal.algorithms.{name} import {kind}\n"
    return exports.replace(table, f"{own}{table}{kind}, ")
