"""Whatever is given by mistake works, or is refused in one clear line."""

import inspect

import pytest

import glocal
from tests.support.misuse import (
    callables,
    called,
    fault_of,
    parameters,
    rows,
    wrong_values,
)

CLASSES = [name for name, made in callables() if isinstance(made, type)]


def test_every_exported_callable_and_its_valid_arguments_are_in_the_table():
    assert rows().keys() == {name for name, _ in callables()}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """A folder may be named by mistake, and is not made here; no step is compiled for one round."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.parametrize(("name", "parameter"), [*parameters()])
def test_a_wrong_value_works_or_is_refused_in_one_line(name, parameter):
    row = rows()[name]
    faults = {}
    for words, value in wrong_values(row.arguments.get(parameter)).items():
        fault = fault_of(lambda value=value: called(row, parameter, value))
        if fault:
            faults[words] = fault
    assert not faults, "\n".join([name, *(f"{words}: {fault}" for words, fault in faults.items())])


@pytest.mark.parametrize("name", glocal.__all__)
def test_every_exported_name_has_an_example(name):
    assert ">>>" in (inspect.getdoc(getattr(glocal, name)) or "")


@pytest.mark.parametrize("name", CLASSES)
def test_the_repr_of_what_a_class_makes_is_one_line(name):
    row = rows()[name]
    shown = repr(row.call(**row.arguments))
    assert len(shown) < 500
    assert "\n" not in shown
    assert " object at 0x" not in shown
