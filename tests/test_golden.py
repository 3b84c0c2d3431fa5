"""Small runs of every algorithm give the numbers that version 0.1 gave."""

import json

import pytest

from glocal import algorithms
from tests.golden.runs import ALGORITHMS, FILE, MODELS, SEEDS, run

NUMBERS = json.loads(FILE.read_text())


def differences(actual, expected, where=""):
    """The places where two tables, lists or numbers differ by more than 1e-9."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        return [
            gap
            for key in expected
            for gap in differences(actual[key], expected[key], f"{where}/{key}")
        ]
    if isinstance(expected, list):
        assert len(actual) == len(expected), where
        pairs = enumerate(zip(actual, expected, strict=True))
        return [gap for place, pair in pairs for gap in differences(*pair, f"{where}[{place}]")]
    close = actual == expected or abs(actual - expected) <= 1e-9
    return [] if close else [f"{where}: {actual} instead of {expected}"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_algorithm_gives_the_numbers_of_version_0_1(algorithm, model, seed):
    assert not differences(run(algorithm, model, seed), NUMBERS[algorithm][model][str(seed)])


def test_the_file_has_the_algorithms_of_version_0_1_and_stays_small():
    assert {*ALGORITHMS} == {*NUMBERS} <= {kind.word for kind in algorithms.ALGORITHMS}
    assert FILE.stat().st_size <= 300_000


def test_a_difference_in_the_ninth_digit_is_detected():
    expected = NUMBERS["lg_fedavg"]["cnn"]["0"]
    changed = json.loads(json.dumps(expected))
    changed["tensors"]["shared/6.weight"][3] += 2e-9
    assert len(differences(changed, expected)) == 1
