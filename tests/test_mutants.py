"""Every mutant of tests/mutants.toml can be made and has a test; `make mutants` runs them."""

import ast
from collections import Counter
from functools import cache

import pytest

from tests.mutants import PACKAGE, ROOT, read_mutants

pytestmark = pytest.mark.quick

MUTANTS = read_mutants()
MUTATED = ["federate/rounds.py", *(f"wire/{path.name}" for path in (PACKAGE / "wire").glob("*.py"))]


@cache
def functions_in(path):
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.file}: {mutant.new}")
def test_a_mutant_changes_one_place_and_has_a_test(mutant):
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1
    changed = text.replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text))
    path, _, name = mutant.test.partition("::")
    assert name.partition("[")[0] in functions_in(path)


def test_there_are_mutants_of_every_file_and_no_two_are_the_same():
    files = Counter(mutant.file for mutant in MUTANTS)
    assert files.total() >= 60
    assert {*files} == {*MUTATED} - {"wire/__init__.py"}
    changes = [(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS]
    assert len({*changes}) == len(changes)
