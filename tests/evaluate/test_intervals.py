"""Confidence intervals against a table of Student's t."""

import numpy as np
import pytest

from glocal.evaluate.intervals import confidence_interval


def test_the_interval_is_students():
    """t(0.975, 4) = 2.776; a sample with mean 3 and variance 2.5."""
    mean, low, high = confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, low, high) == pytest.approx(
        (3.0, 3 - 2.776 * 0.5**0.5, 3 + 2.776 * 0.5**0.5), abs=1e-3
    )


def test_an_array_and_one_value_have_intervals_too():
    array = np.array([1.0, 2.0, 3.0])
    assert confidence_interval(array) == confidence_interval([1.0, 2.0, 3.0])
    assert confidence_interval([2.0]) == (2.0, float("-inf"), float("inf"))
    assert confidence_interval(array, confidence=0.5).high == pytest.approx(2.471, abs=1e-3)
