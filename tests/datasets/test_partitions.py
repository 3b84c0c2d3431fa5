"""Partitions: every example goes to one client, and each partition does as its name says."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import IntArray
from glocal.datasets import (
    Dataset,
    Partitioner,
    class_counts,
    dirichlet,
    iid,
    natural,
    random_shards,
    shards,
)
from glocal.datasets.federated import FederatedData
from glocal.datasets.partitions import apportion


def fresh(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def balanced(per_class: int, classes: int = 10) -> IntArray:
    return np.arange(per_class * classes, dtype=np.int64) % classes


def assert_cover(shares: list[Rows], total: int, clients: int) -> None:
    """Every row on exactly one client, every client's rows ascending."""
    assert len(shares) == clients
    assert all(rows.dtype == np.int64 and (np.diff(rows) > 0).all() for rows in shares)
    np.testing.assert_array_equal(np.sort(np.concatenate(shares)), np.arange(total))


def counts_of(labels: IntArray, shares: list[Rows], classes: int = 10) -> IntArray:
    return np.stack([np.bincount(labels[rows], minlength=classes) for rows in shares])


labels_of_any_kind = st.lists(st.integers(0, 6), min_size=12, max_size=80).map(
    lambda values: np.array(values, dtype=np.int64)
)
few_labels = st.lists(st.integers(0, 6), max_size=40).map(
    lambda values: np.array(values, dtype=np.int64)
)


@given(
    train=labels_of_any_kind, test=few_labels, clients=st.integers(1, 12), seed=st.integers(0, 99)
)
def test_equal_shares_lose_nothing_and_differ_by_one_at_most(
    train: IntArray, test: IntArray, clients: int, seed: int
) -> None:
    train_rows, test_rows = iid(clients)(train, test, fresh(seed))
    for rows, labels in ((train_rows, train), (test_rows, test)):
        assert_cover(rows, len(labels), clients)
        sizes = [len(own) for own in rows]
        assert max(sizes) - min(sizes) <= 1


@given(
    train=labels_of_any_kind,
    test=few_labels,
    clients=st.integers(1, 12),
    alpha=st.floats(1e-6, 1e6),
    seed=st.integers(0, 99),
)
def test_dirichlet_shares_lose_nothing_and_leave_no_client_empty(
    train: IntArray, test: IntArray, clients: int, alpha: float, seed: int
) -> None:
    train_rows, test_rows = dirichlet(clients, alpha)(train, test, fresh(seed))
    assert_cover(train_rows, len(train), clients)
    assert_cover(test_rows, len(test), clients)
    assert min(len(rows) for rows in train_rows) >= 1


@given(
    sizes=st.lists(st.tuples(st.integers(14, 40), st.integers(14, 25)), min_size=1, max_size=8),
    clients=st.integers(1, 14),
    each=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_shards_give_every_client_its_number_of_classes_the_same_in_training_and_test(
    sizes: list[tuple[int, int]], clients: int, each: int, seed: int
) -> None:
    classes = len(sizes)
    if clients * min(each, classes) < classes:
        clients = classes
    train, test = (
        fresh(seed).permutation(np.repeat(np.arange(classes), column))
        for column in zip(*sizes, strict=True)
    )
    train_rows, test_rows = shards(clients, each)(train, test, fresh(seed))
    assert_cover(train_rows, len(train), clients)
    assert_cover(test_rows, len(test), clients)
    in_train, in_test = counts_of(train, train_rows, classes), counts_of(test, test_rows, classes)
    np.testing.assert_array_equal(in_train > 0, in_test > 0)
    assert ((in_train > 0).sum(axis=1) == min(each, classes)).all()
    holders = (in_train > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for counts in (in_train, in_test):
        assert all(np.ptp(column[column > 0]) <= 1 for column in counts.T)


@given(clients=st.integers(1, 40), each=st.integers(1, 6), seed=st.integers(0, 2**20))
def test_random_shards_give_every_client_at_most_its_number_of_classes(
    clients: int, each: int, seed: int
) -> None:
    train, test = balanced(240), balanced(240)
    if clients * each < 10:
        return
    train_rows, test_rows = random_shards(clients, each)(train, test, fresh(seed))
    assert_cover(train_rows, len(train), clients)
    assert_cover(test_rows, len(test), clients)
    for own, tested in zip(train_rows, test_rows, strict=True):
        assert 1 <= len(np.unique(train[own])) <= each
        assert {*test[tested]} == {*train[own]}


def test_random_shards_leave_some_clients_with_one_class() -> None:
    """Two of 200 shards, twenty of each class: both of one class with probability 19/199."""
    train = balanced(200)
    partitions = [random_shards(100, 2)(train, train, fresh(seed))[0] for seed in range(20)]
    single = [sum(len(np.unique(train[own])) == 1 for own in rows) for rows in partitions]
    assert np.mean(single) == pytest.approx(100 * 19 / 199, abs=2.5)


@given(
    train=labels_of_any_kind,
    test=few_labels,
    clients=st.integers(1, 12),
    each=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_shards_of_any_labels_lose_nothing_or_say_why(
    train: IntArray, test: IntArray, clients: int, each: int, seed: int
) -> None:
    refusal = ""
    try:
        train_rows, test_rows = shards(clients, each)(train, test, fresh(seed))
    except InputError as error:
        refusal = str(error)
    if refusal:
        assert "cannot hold" in refusal or "no training example" in refusal
        return
    assert_cover(train_rows, len(train), clients)
    assert_cover(test_rows, len(test), clients)
    classes_of_clients = [
        set(train[own]) | set(test[tested])
        for own, tested in zip(train_rows, test_rows, strict=True)
    ]
    assert max(len(classes) for classes in classes_of_clients) <= each
    assert min(len(rows) for rows in train_rows) >= 1


def test_a_hundred_clients_with_two_of_ten_classes_each_hold_an_equal_part_of_both() -> None:
    train, test = balanced(500), balanced(100)
    train_rows, test_rows = shards(100, 2)(train, test, fresh())
    in_train, in_test = counts_of(train, train_rows), counts_of(test, test_rows)
    # 200 slots, 20 per class: 25 training and 5 test examples a slot
    assert (np.sort(in_train, axis=1) == [0] * 8 + [25] * 2).all()
    assert (np.sort(in_test, axis=1) == [0] * 8 + [5] * 2).all()
    assert ((in_train > 0).sum(axis=0) == 20).all()


def test_left_over_slots_go_to_the_largest_classes() -> None:
    train = np.repeat([0, 1, 2], [10, 30, 20])
    rows, _ = shards(2, 2)(train, train, fresh())
    # 4 slots for 3 classes
    assert (counts_of(train, rows, 3) > 0).sum(axis=0).tolist() == [1, 2, 1]


def test_shards_with_every_class_on_every_client_have_one_of_each() -> None:
    train = balanced(40)
    rows, _ = shards(40, 10)(train, train, fresh())
    assert (counts_of(train, rows) == 1).all()
    capped, _ = shards(40, 99)(train, train, fresh())
    assert (counts_of(train, capped) == 1).all()


def test_what_does_not_divide_evenly_goes_to_a_random_client() -> None:
    # 3 examples of each of 100 classes for 2 clients: 150 with standard deviation 5
    train = balanced(3, 100)
    rows, _ = shards(2, 100)(train, train, fresh())
    assert 120 < len(rows[0]) < 180


@pytest.mark.parametrize("partitioner", [iid(2), shards(2, 1), dirichlet(2, 1e6)])
def test_which_examples_of_a_class_a_client_gets_is_random(
    partitioner: Partitioner,
) -> None:
    train = np.zeros(100, dtype=np.int64)
    (once, _), _ = partitioner(train, train, fresh(0))
    (again, _), _ = partitioner(train, train, fresh(1))
    assert 49 <= len(once) <= 51
    # hypergeometric: 25 of 50 in common with standard deviation 2.5
    assert len(np.intersect1d(once, again)) < 40


def test_too_few_slots_for_the_classes_are_refused_with_a_way_out() -> None:
    with pytest.raises(
        InputError,
        match="4 clients with 2 classes each cannot hold 10 classes; use at least 5 clients",
    ):
        shards(4, 2)(balanced(5), balanced(5), fresh())


def test_a_class_too_small_for_its_clients_is_refused() -> None:
    train = np.array([0] * 15 + [1])
    with pytest.raises(
        InputError, match=r"no training example \(4 such clients\); use fewer clients"
    ):
        shards(10, 1)(train, train, fresh())


def test_dirichlet_proportions_are_the_same_in_training_and_test() -> None:
    train, test = balanced(1000), balanced(200)
    train_rows, test_rows = dirichlet(8, 0.5)(train, test, fresh())
    assert (
        np.abs(counts_of(train, train_rows) / 1000 - counts_of(test, test_rows) / 200).max() < 0.01
    )


def test_dirichlet_goes_from_one_owner_per_class_to_equal_shares() -> None:
    train = balanced(300)
    largest_share = [
        counts_of(train, dirichlet(10, alpha)(train, train, fresh())[0]).max(axis=0).mean() / 300
        for alpha in (0.01, 1, 1e5)
    ]
    assert largest_share[0] > 0.9
    assert 0.15 < largest_share[1] < 0.6
    assert largest_share[2] < 0.11


def test_dirichlet_shares_have_the_published_variance() -> None:
    # a share of Dir(alpha) over m clients has mean 1/m and variance (m-1) / (m^2 (m alpha + 1));
    # here 3 / (16 * 5) = 0.0375
    train = np.repeat(np.arange(400), 500)
    rows, _ = dirichlet(4, 1.0)(train, train, fresh())
    assert np.var(counts_of(train, rows, 400) / 500) == pytest.approx(0.0375, rel=0.1)


def test_what_is_left_over_goes_to_the_largest_remainders() -> None:
    # quotas 4.5, 2.7, 1.8
    assert apportion(np.array([0.5, 0.3, 0.2]), 9).tolist() == [4, 3, 2]


@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30).filter(any),
    total=st.integers(0, 500),
)
def test_apportioned_counts_add_up_and_are_within_one_of_their_quotas(
    weights: list[float], total: int
) -> None:
    proportions = np.array(weights) / sum(weights)
    counts = apportion(proportions, total)
    assert counts.sum() == total
    assert np.abs(counts - proportions * total).max() < 1 + 1e-9


@given(train=st.lists(st.sampled_from("ABCDE"), min_size=1, max_size=40), data=st.data())
def test_a_natural_partition_gives_everyone_their_own(
    train: list[str], data: st.DataObject
) -> None:
    test = data.draw(st.lists(st.sampled_from(sorted(set(train))), max_size=20))
    people = sorted(set(train))
    train_rows, test_rows = natural(train, test)(
        np.zeros(len(train), np.int64), np.zeros(len(test), np.int64), fresh()
    )
    for rows, ids in ((train_rows, train), (test_rows, test)):
        assert_cover(rows, len(ids), len(people))
        assert [[ids[row] for row in own] for own in rows] == [
            [person] * ids.count(person) for person in people
        ]


def test_a_person_who_is_only_tested_is_refused() -> None:
    with pytest.raises(InputError, match=r"test id 9 has no training example \(1 such ids\)"):
        natural([3, 1, 3], [1, 9])


def test_ids_that_do_not_match_the_examples_are_refused() -> None:
    with pytest.raises(InputError, match="3 training ids but 2 training examples"):
        natural([3, 1, 3], [1])(np.zeros(2, np.int64), np.zeros(1, np.int64), fresh())


@pytest.mark.parametrize("partitioner", [iid(11), shards(11, 1), dirichlet(11, 1.0)])
def test_more_clients_than_examples_are_refused(partitioner: Partitioner) -> None:
    with pytest.raises(
        InputError, match="11 clients but 10 training examples; use at most 10 clients"
    ):
        partitioner(balanced(1), balanced(1), fresh())


@pytest.mark.parametrize(
    "make",
    [
        lambda: iid(0),
        lambda: shards(0, 1),
        lambda: shards(1, 0),
        lambda: dirichlet(0, 1.0),
        lambda: dirichlet(1, 0.0),
        lambda: dirichlet(1, float("nan")),
        lambda: dirichlet(1, 1e308),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Callable[[], Partitioner]) -> None:
    named = r"^partition: (clients|classes_per_client|alpha) is .*"
    with pytest.raises(InputError, match=named + "; a (whole )?number "):
        make()


def small_dataset() -> Dataset:
    def examples(per_class: int) -> Examples:
        labels = torch.from_numpy(balanced(per_class))
        return Examples(labels[:, None].float(), labels)

    return Dataset(examples(40), examples(8), 10)


@pytest.mark.parametrize(
    "partitioner", [iid(20), shards(20, 2), random_shards(20, 2), dirichlet(20, 0.3)]
)
def test_a_partition_uses_the_stores_as_they_are_and_repeats_with_its_seed(
    partitioner: Partitioner,
) -> None:
    dataset = small_dataset()
    federation, again, other = (
        FederatedData.partition(dataset, partitioner, validation=0.25, seed=seed)
        for seed in (5, 5, 6)
    )
    assert federation.train.examples is federation.val.examples is dataset.train
    assert federation.test.examples is dataset.test
    assert_cover(list(federation.train.rows + federation.val.rows), 400, 40)
    assert_cover(list(federation.test.rows), 80, 20)
    np.testing.assert_array_equal(federation.train.all_rows(), again.train.all_rows())
    assert federation.train.all_rows().tolist() != other.train.all_rows().tolist()


def test_a_quarter_of_every_client_is_held_out_for_validation() -> None:
    federation = FederatedData.partition(small_dataset(), iid(20), validation=0.25)
    assert federation.train.sizes.tolist() == [15] * 20
    assert federation.val.sizes.tolist() == [5] * 20


def test_class_counts_are_counted_per_client() -> None:
    examples = Examples(torch.zeros(5, 1), torch.tensor([0, 2, 2, 1, 0]))
    rows: tuple[npt.NDArray[np.int64], ...] = (
        np.array([0, 1, 2]),
        np.array([], dtype=np.int64),
        np.array([3, 4]),
    )
    assert class_counts(ClientData(examples, rows), 4).tolist() == [
        [1, 0, 2, 0],
        [0, 0, 0, 0],
        [1, 1, 0, 0],
    ]
