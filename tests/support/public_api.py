"""What other packages may import of glocal: docs/architecture.md lists it."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/architecture.md"
SECTION = "## What other packages may import"
LINES = PAGE.read_text().split(SECTION)[1].split("\n## ")[0].splitlines()
MODULES = {
    f"glocal.{name}"
    for line in LINES
    if line.startswith("- ")
    for name in re.findall(r"`(\w+\.\w+)`", line)
}


@cache
def defined_names(module):
    """The names that a module defines at its top level; names that it only imports are not its."""
    names = set()
    path = Path(importlib.import_module(module).__file__)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            stored = [leaf for target in node.targets for leaf in ast.walk(target)]
            names |= {leaf.id for leaf in stored if isinstance(leaf, ast.Name)}
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    return names


def is_public(module, name):
    """Whether a package may import this: named in an `__all__`, or defined in a public module."""
    if name.startswith("_"):
        return False
    if module in MODULES:
        return name in defined_names(module)
    if module == "glocal" or module.count(".") == 1:
        return name in getattr(importlib.import_module(module), "__all__", ())
    return False
