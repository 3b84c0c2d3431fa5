"""Aggregations that a few clients cannot move far, against ByzFL and against their definitions."""

import importlib
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import trim_mean

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.wire import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MultiKrum,
    TrimmedMean,
    require_enough_clients,
)

RULES = [
    Median(),
    TrimmedMean(2),
    TrimmedMean(0.25),
    Krum(2),
    MultiKrum(2),
    GeometricMedian(),
    GeometricMedian(3, 0.1),
    CentredClipping(1.5),
    CentredClipping(1.5, 4),
]
every_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


@pytest.fixture(scope="module")
def byzfl():
    """ByzFL without its benchmark, which needs libraries that are not installed."""
    stub = ModuleType("byzfl.benchmark")
    sys.modules["byzfl.benchmark"] = stub
    yield importlib.import_module("byzfl")
    del sys.modules["byzfl.benchmark"]


def stacks(seed, clients):
    """Messages of several tensors, two of whose clients are far from the others."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(clients, 11)) * rng.uniform(0.1, 3) + rng.normal(size=11)
    rows[rng.choice(clients, 2, replace=False)] += rng.normal(size=11) * 20
    return rows


def as_message(rows):
    """The same numbers (clients, 11) as a matrix, a scalar, an empty tensor and a vector."""
    numbers = torch.from_numpy(rows)
    count = len(rows)
    return {
        "matrix": numbers[:, :6].reshape(count, 2, 3),
        "scalar": numbers[:, 6],
        "empty": numbers[:, :0],
        "vector": numbers[:, 7:],
    }


def as_row(message):
    return torch.cat([tensor.flatten() for tensor in message.values()]).numpy()


def reduced(rule, messages):
    count = len(next(iter(messages.values())))
    return rule.reduce(messages, rule.weights(torch.ones(count, dtype=torch.int64)))


def row_of(rule, rows):
    return as_row(reduced(rule, as_message(rows)))


# ---- against ByzFL

THEIRS = {
    "Median": (lambda f: Median(), lambda byzfl, f: byzfl.Median()),
    "TrMean": (lambda f: TrimmedMean(f), lambda byzfl, f: byzfl.TrMean(f)),
    "Krum": (lambda f: Krum(f), lambda byzfl, f: byzfl.Krum(f)),
    "MultiKrum": (lambda f: MultiKrum(f), lambda byzfl, f: byzfl.MultiKrum(f)),
    "GeometricMedian": (
        lambda f: GeometricMedian(f + 1, 0.1),
        lambda byzfl, f: byzfl.GeometricMedian(nu=0.1, T=f + 1),
    ),
    "GeometricMedian, smooth": (
        lambda f: GeometricMedian(3, 5.0),
        lambda byzfl, f: byzfl.GeometricMedian(nu=5.0, T=3),
    ),
    "CenteredClipping": (
        lambda f: CentredClipping(2.0, f + 1),
        lambda byzfl, f: byzfl.CenteredClipping(L=f + 1, tau=2.0),
    ),
}


@pytest.mark.parametrize("name", THEIRS)
@given(seed=st.integers(0, 10_000), clients=st.integers(3, 15), byzantine=st.integers(0, 7))
def test_every_rule_gives_the_numbers_of_byzfl(byzfl, name, seed, clients, byzantine):
    byzantine = min(byzantine, (clients - 1) // 2)
    make_ours, make_theirs = THEIRS[name]
    rows = stacks(seed, clients)
    expected = make_theirs(byzfl, byzantine)(rows)
    np.testing.assert_allclose(row_of(make_ours(byzantine), rows), expected, rtol=0, atol=1e-5)


# ---- against their definitions


@given(st.integers(0, 1000), st.integers(1, 12), st.floats(0, 0.49))
def test_a_trimmed_mean_by_share_is_scipys(seed, clients, share):
    rows = np.random.default_rng(seed).normal(size=(clients, 11))
    expected = trim_mean(rows, share, axis=0)
    np.testing.assert_allclose(row_of(TrimmedMean(share), rows), expected, atol=1e-12)


def test_nothing_trimmed_is_the_mean_and_all_but_the_middle_the_median():
    rows = stacks(0, 9)
    assert np.allclose(row_of(TrimmedMean(0), rows), row_of(Mean(by="clients"), rows))
    assert np.allclose(row_of(TrimmedMean(4), rows), row_of(Median(), rows))


@pytest.mark.parametrize(
    ("trim", "clients", "count"), [(0.29, 100, 29), (0.1, 19, 1), (0.1, 9, 0), (2, 100, 2)]
)
def test_a_share_is_rounded_down_and_not_by_an_error_of_the_product(trim, clients, count):
    assert TrimmedMean(trim).count(clients) == count


def krum_by_hand(rows, byzantine):
    """The scores of Krum: squared distances to the nearest clients - byzantine - 1 others."""
    scores = []
    for own, row in enumerate(rows):
        others = np.delete(rows, own, axis=0)
        squares = np.sort(((others - row) ** 2).sum(1))
        scores.append(squares[: len(rows) - byzantine - 1].sum())
    return np.argsort(scores, kind="stable")


@given(st.integers(0, 1000), st.integers(3, 9))
def test_krum_takes_the_message_nearest_to_most_others(seed, clients):
    rows = stacks(seed, clients)
    best = krum_by_hand(rows, 1)
    assert np.array_equal(row_of(Krum(1), rows), rows[best[0]])
    np.testing.assert_allclose(row_of(MultiKrum(1), rows), rows[best[: clients - 1]].mean(0))


def test_no_digits_are_lost_where_all_messages_are_far_from_zero():
    rows = np.random.default_rng(0).normal(size=(9, 11)) + 1e9
    [best, *_] = krum_by_hand(rows, 1)
    assert np.array_equal(row_of(Krum(1), rows), rows[best])


def test_of_clients_with_the_same_score_the_first_is_taken():
    rows = np.repeat([[1.0], [0.0], [5.0]], 11, axis=1)
    assert (row_of(Krum(1), rows) == 1).all(), "the first two are as far from each other"
    turned = rows[[1, 0, 2]]
    assert (row_of(Krum(1), turned) == 0).all()


@given(st.integers(0, 100))
def test_no_point_has_a_smaller_sum_of_distances_than_the_geometric_median(seed):
    rows = np.random.default_rng(seed).normal(size=(7, 11))

    def total(point):
        return np.linalg.norm(rows - point, axis=1).sum()

    best = minimize(total, rows.mean(0), tol=1e-10).fun
    assert total(row_of(GeometricMedian(200), rows)) == pytest.approx(best, rel=1e-4)
    assert total(row_of(GeometricMedian(), rows)) <= best * 1.01


def test_a_geometric_median_is_finite_where_it_is_one_of_the_messages():
    rows = np.zeros((5, 11))
    rows[4] = 3.0
    assert np.allclose(row_of(GeometricMedian(), rows), 0, atol=1e-4)


def test_changes_within_the_radius_are_averaged_and_longer_ones_are_cut_to_it():
    rows = np.zeros((4, 11))
    rows[0, 3], rows[1, 3], rows[2, 9] = 1.0, 3.0, 50.0
    expected = np.zeros(11)
    expected[3], expected[9] = (1 + 2) / 4, 2 / 4
    assert np.allclose(row_of(CentredClipping(2.0), rows), expected)
    assert np.allclose(row_of(CentredClipping(100.0), rows), rows.mean(0))


def test_no_client_moves_centred_clipping_by_more_than_its_share_of_the_radius():
    rows = stacks(3, 8)
    for iterations in (1, 3):
        rule = CentredClipping(2.0, iterations)
        other = rows.copy()
        other[5] = 1e9
        moved = np.linalg.norm(row_of(rule, other) - row_of(rule, rows))
        assert 0 < moved <= iterations * 2 * 2.0 / 8


# ---- what all have in common


@every_rule
@pytest.mark.parametrize("value", [1e3, 1e30, -1e30, 1e300])
def test_two_of_nine_clients_cannot_move_it_far(rule, value):
    """Where the others are within 1 of each other, it stays among them."""
    rows = np.random.default_rng(0).normal(size=(9, 11)) * 0.1 + 0.3
    attacked = rows.copy()
    attacked[[2, 7]] = value
    assert np.abs(row_of(rule, attacked) - rows.mean(0)).max() < 1
    assert not np.abs(row_of(Mean(), attacked) - rows.mean(0)).max() < 100


@every_rule
def test_it_is_no_mean_and_examples_do_not_count(rule):
    assert not rule.is_mean
    assert rule.weights(torch.tensor([1, 10**6])).tolist() == [1, 1]


@every_rule
def test_batched_over_seeds_it_gives_the_numbers_of_each_alone(rule):
    alone = [as_message(stacks(seed, 7)) for seed in range(4)]
    counters = torch.arange(4 * 7).reshape(4, 7, 1) ** 2
    alone = [{**tree, "steps": counters[seed]} for seed, tree in enumerate(alone)]
    together = torch.vmap(rule.reduce, in_dims=(0, None))(
        trees.stack(alone), torch.ones(7, dtype=torch.float64)
    )
    for seed, messages in enumerate(alone):
        own = reduced(rule, messages)
        for name, tensor in own.items():
            torch.testing.assert_close(together[name][seed], tensor, rtol=0, atol=1e-12)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tensors_keep_their_names_their_order_and_their_types(rule, dtype):
    tree = {"steps": torch.arange(6).reshape(6, 1), **as_message(stacks(0, 6))}
    tree = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tree.items()}
    after = reduced(rule, tree)
    assert list(after) == list(tree)
    assert {t.dtype for name, t in after.items() if name != "steps"} == {dtype}
    assert after["steps"].dtype == torch.float64


@every_rule
def test_a_wrong_counter_of_two_clients_does_not_count_much(rule):
    """It is no part of a distance, so that it must not come with the message that is chosen."""
    rows = np.random.default_rng(0).normal(size=(9, 11)) * 0.1
    best = krum_by_hand(rows, 2)[:2]
    steps = torch.full((9, 1), 20)
    steps[best] = 10**12
    after = reduced(rule, {**as_message(rows), "steps": steps})
    assert after["steps"].item() == 20


@every_rule
def test_messages_without_floating_numbers_and_without_anything_are_reduced(rule):
    assert reduced(rule, {"steps": torch.full((7, 2), 5)})["steps"].tolist() == [5, 5]
    assert rule.reduce({}, torch.ones(7)) == {}


@pytest.mark.parametrize("rule", [TrimmedMean(2), Krum(2), MultiKrum(2)], ids=repr)
def test_it_needs_more_clients_than_may_be_wrong_on_each_side(rule):
    require_enough_clients(rule, 5)
    reduced(rule, as_message(stacks(0, 5)))
    for refused in (
        lambda: require_enough_clients(rule, 4),
        lambda: reduced(rule, as_message(stacks(0, 4))),
    ):
        with pytest.raises(InputError) as error:
            refused()
        assert str(error.value).endswith(
            "(2) needs the uploads of at least 5 clients in every round, and there are 4; "
            "sample more clients, or choose a smaller number"
        )


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.49), GeometricMedian(), Mean()], ids=repr)
def test_others_take_one_client_alone(rule):
    require_enough_clients(rule, 1)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: TrimmedMean(0.5), "trimmed_mean has trim = 0.5; a whole number of clients, or a"),
        (lambda: TrimmedMean(-1), "trimmed_mean has trim = -1"),
        (lambda: TrimmedMean(-0.1), "trimmed_mean has trim = -0.1"),
        (lambda: TrimmedMean(True), "trimmed_mean has trim = True"),
        (lambda: TrimmedMean("1"), "trimmed_mean has trim = '1'"),
        (lambda: TrimmedMean(float("nan")), "trimmed_mean has trim = nan"),
        (lambda: Krum(-1), "byzantine is -1; a whole number from 0 to"),
        (lambda: Krum(0.1), "byzantine is 0.1"),
        (lambda: MultiKrum(True), "byzantine is True"),
        (lambda: MultiKrum(-1), "byzantine is -1"),
        (lambda: GeometricMedian(0), "iterations is 0"),
        (lambda: GeometricMedian(3, 0), "smoothing is 0; a number above 0"),
        (lambda: GeometricMedian(3, float("nan")), "smoothing is nan"),
        (lambda: CentredClipping(0), "radius is 0"),
        (lambda: CentredClipping(float("inf")), "radius is inf"),
        (lambda: CentredClipping("1"), "radius is '1'"),
        (lambda: CentredClipping(True), "radius is True"),
        (lambda: CentredClipping(1.0, 1.5), "iterations is 1.5"),
        (lambda: CentredClipping(1.0, 0), "iterations is 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_in_one_line(make, expected):
    with pytest.raises(InputError, match=f"^aggregation: {expected}") as refused:
        make()
    assert str(refused.value).endswith("was expected")
    assert "\n" not in str(refused.value)
