"""Write `src/glocal/__init__.pyi`, which tells editors where each public name is defined.

python -m tests.support.stub
"""

import inspect
from importlib import import_module
from pathlib import Path

import glocal

FILE = Path(glocal.__file__).with_suffix(".pyi")


def stub():
    """One import per submodule and public name, and the two module variables."""
    lines = [f"from glocal import {name} as {name}" for name in glocal._submodules()]
    lines += sorted(f"from {home} import {name} as {name}" for name, home in homes().items())
    return "\n".join([*lines, "", "__version__: str", "__all__: list[str]", ""])


def homes():
    """The module in which each public name is defined."""
    names = {}
    for part, names in glocal._HOMES.items():
        module = import_module(f"glocal.{part}")
        for name in names:
            thing = getattr(module, name)
            is_defined = inspect.isclass(thing) or inspect.isfunction(thing)
            names[name] = thing.__module__ if is_defined else module.__name__
    return names


if __name__ == "__main__":
    FILE.write_text(stub())
