"""The numbers of small runs of every algorithm, as they were before the house was rebuilt."""

import json

import pytest

from glocal import algorithms
from tests.golden.runs import ALGORITHMS, FILE, MODELS, SEEDS, run

NUMBERS = json.loads(FILE.read_text())


def same(found, expected, where=""):
    """Where two of these differ: tables, lists and numbers, by more than 1e-9."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        return [
            gap for key in expected for gap in same(found[key], expected[key], f"{where}/{key}")
        ]
    if isinstance(expected, list):
        assert len(found) == len(expected), where
        pairs = enumerate(zip(found, expected, strict=True))
        return [gap for place, pair in pairs for gap in same(*pair, f"{where}[{place}]")]
    close = found == expected or abs(found - expected) <= 1e-9
    return [] if close else [f"{where}: {found} instead of {expected}"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_comes_to_the_numbers_it_always_came_to(algorithm, model, seed):
    assert not same(run(algorithm, model, seed), NUMBERS[algorithm][model][str(seed)])


def test_no_algorithm_is_without_numbers_and_the_file_stays_small():
    assert {*algorithms.__all__} == {*NUMBERS}
    assert FILE.stat().st_size <= 300_000


def test_a_difference_in_the_ninth_digit_is_seen():
    expected = NUMBERS["lg_fedavg"]["cnn"]["0"]
    changed = json.loads(json.dumps(expected))
    changed["tensors"]["shared/6.weight"][3] += 2e-9
    assert len(same(changed, expected)) == 1
