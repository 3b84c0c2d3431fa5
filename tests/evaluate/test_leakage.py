"""Fresh attackers read what is there, nothing where there is nothing, and estimate their error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from glocal.core.errors import InputError
from glocal.core.metric_library import auc
from glocal.evaluate.leakage import AttackData, estimate_leakage, strongest_attack


def people(rows, seed, *, hidden):
    """One column of the representations depends on the attribute: openly, by size, or not."""
    generator = np.random.default_rng(seed)
    attribute = generator.integers(2, size=rows)
    h = generator.normal(size=(rows, 3))
    if hidden == "openly":
        h[:, 0] += 2 * attribute
    if hidden == "by size":
        h[:, 0] *= 1 + 4 * attribute
    return AttackData(h, attribute)


def estimates(hidden):
    return {
        leak.attacker: leak
        for leak in estimate_leakage(people(1500, 0, hidden=hidden), people(1500, 1, hidden=hidden))
    }


def test_what_stands_open_is_read_by_all():
    assert all(leak.auc > 0.85 for leak in estimates("openly").values())


def test_what_no_straight_line_divides_is_read_by_the_others():
    by_name = estimates("by size")
    assert by_name["logistic regression"].auc < 0.6
    assert min(by_name["gradient boosting"].auc, by_name["MLP"].auc) > 0.75
    assert strongest_attack([*by_name.values()]).attacker != "logistic regression"


def test_where_there_is_nothing_the_interval_holds_one_half():
    for leak in estimates("nothing").values():
        assert leak.low < 0.5 < leak.high
        assert leak.low <= leak.auc <= leak.high


def test_the_same_seed_finds_the_same():
    assert estimate_leakage(
        people(300, 0, hidden="openly"), people(300, 1, hidden="openly")
    ) == estimate_leakage(people(300, 0, hidden="openly"), people(300, 1, hidden="openly"))


def test_an_attribute_with_one_value_cannot_be_attacked():
    one = AttackData(np.zeros((5, 2)), np.zeros(5, dtype=np.int64))
    assert estimate_leakage(one, people(20, 0, hidden="openly")._replace(h=np.zeros((20, 2)))) == []
    assert strongest_attack([]) is None


@pytest.mark.parametrize("wrong", [np.array([0, 1, 2, 0, 1]), np.array([0, 1])])
def test_attributes_must_be_zero_or_one_for_everybody(wrong):
    with pytest.raises(InputError, match="0 or 1, for every representation"):
        estimate_leakage(AttackData(np.zeros((5, 2)), wrong), people(20, 0, hidden="openly"))


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=4, max_size=40))
def test_the_area_is_that_of_scikit_learn(pairs):
    scores, labels = (
        np.array([score for score, _ in pairs], dtype=np.float64),
        np.array([int(one) for _, one in pairs]),
    )
    if 0 < labels.sum() < len(labels):
        assert auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores))
