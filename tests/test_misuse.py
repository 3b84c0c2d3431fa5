"""Whatever is given by mistake works, or is refused in one clear line."""

import pytest

from tests.support.misuse import (
    callables,
    called,
    fault_of,
    parameters,
    rows,
    wrong_values,
)


def test_every_exported_callable_and_its_valid_arguments_are_in_the_table():
    assert rows().keys() == {name for name, _ in callables()}


@pytest.mark.parametrize(("name", "parameter"), parameters())
def test_a_wrong_value_works_or_is_refused_in_one_line(name, parameter):
    row = rows()[name]
    faults = {}
    for words, value in wrong_values(row.arguments.get(parameter)).items():
        fault = fault_of(lambda value=value: called(row, parameter, value))
        if fault:
            faults[words] = fault
    assert not faults, "\n".join([name, *(f"{words}: {fault}" for words, fault in faults.items())])
