"""What is held out of every client: exact shares, by class, and the same for one client alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import glocal
from glocal.core.data import concatenate
from glocal.core.errors import InputError
from glocal.core.hold_out import hold_out_share
from glocal.datasets.federated import held_out

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=8)


def rows_of(sizes):
    ends = np.cumsum(sizes)
    return np.split(np.arange(ends[-1]), ends[:-1])


@settings(max_examples=60)
@given(SIZES, st.floats(0, 0.99), st.integers(0, 2**32 - 1))
def test_every_row_is_on_one_side_and_the_share_is_the_rounded_one(sizes, share, seed):
    rows = rows_of(sizes)
    rest, held = hold_out_share(rows, share, seed=seed, purpose="test")
    for own, remaining, out in zip(rows, rest, held, strict=True):
        assert sorted([*remaining, *out]) == own.tolist()
        assert len(out) == min(round(share * len(own)), max(len(own) - 1, 0))


@settings(max_examples=40)
@given(st.integers(4, 60), st.integers(1, 4), st.floats(0.05, 0.9), st.integers(0, 1000))
def test_the_share_of_each_class_is_held_out_to_within_one_example(size, classes, share, seed):
    labels = np.arange(size) % classes
    _, [held] = hold_out_share([np.arange(size)], share, seed=seed, purpose="test", classes=labels)
    for label in range(classes):
        expected = len(held) * (labels == label).mean()
        assert abs((labels[held] == label).sum() - expected) <= 1


@settings(max_examples=30)
@given(SIZES, st.floats(0, 0.9), st.data())
def test_a_client_alone_holds_out_the_same_examples(sizes, share, data):
    """A real client knows its number, and nobody else's data."""
    rows = rows_of(sizes)
    client = data.draw(st.integers(0, len(sizes) - 1))
    _, together = hold_out_share(rows, share, seed=3, purpose="test")
    alone = [np.arange(sizes[client])]
    _, [own] = hold_out_share(alone, share, seed=3, purpose="test", first_client=client)
    start = rows[client][0] if len(rows[client]) else 0
    assert (together[client] - start).tolist() == own.tolist()


def test_the_seed_the_purpose_and_the_client_change_what_is_held_out():
    rows = [np.arange(100), np.arange(100)]

    def held(**changes):
        return hold_out_share(rows, 0.3, **{"seed": 0, "purpose": "test", **changes})[1]

    one, other = held()
    assert one.tolist() != other.tolist()
    assert one.tolist() != held(seed=1)[0].tolist()
    assert one.tolist() != held(purpose="validation")[0].tolist()
    assert one.tolist() == held()[0].tolist()


def test_every_example_is_held_out_about_as_often():
    counts = np.zeros(20)
    for seed in range(2000):
        _, [held] = hold_out_share([np.arange(20)], 0.25, seed=seed, purpose="test")
        counts[held] += 1
    assert np.allclose(counts / 2000, 0.25, atol=0.04)


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(InputError, match=r"the fraction for test is .* below 1"):
        hold_out_share([np.arange(3)], share, seed=0, purpose="test")


def test_own_data_are_held_out_by_class_where_targets_are_classes():
    """Each client has eight examples of one class and two of another."""
    y = torch.tensor([0] * 8 + [1] * 2)
    clients = {"ulm": (torch.randn(10, 2), y), "bonn": (torch.randn(10, 2), y)}
    for seed in range(20):
        data = glocal.FederatedData.from_tensors(clients, test=0.5, validation=0.0, seed=seed)
        for client in (0, 1):
            assert data.test.of(client).y.tolist().count(1) == 1


def test_numbers_are_held_out_without_classes():
    y = torch.linspace(0, 1, 10)
    data = glocal.FederatedData.from_tensors([(torch.randn(10, 2), y)])
    assert data.test.sizes.tolist() == [2]


def test_a_clients_own_part_is_that_of_the_simulator():
    clients = [
        (np.random.default_rng(n).normal(size=(9 + n, 2)), np.arange(9 + n) % 3) for n in range(3)
    ]
    _, together = held_out(concatenate(clients), 0.4, seed=5, purpose="test")
    for number, own in enumerate(clients):
        _, alone = held_out(concatenate([own]), 0.4, seed=5, purpose="test", first_client=number)
        assert torch.equal(alone.of(0).x, together.of(number).x)


@pytest.mark.parametrize("many", [5, 1_000])
def test_many_plain_arrays_are_joined_as_a_few_are(many):
    x, y = np.random.default_rng(0).normal(size=(many, 3, 2)), np.arange(3 * many).reshape(many, 3)
    data = glocal.FederatedData.from_tensors(list(zip(x, y, strict=True)), test=0, validation=0)
    assert data.train.sizes.tolist() == [3] * many
    assert data.train.of(many - 1).y.tolist() == y[-1].tolist()
    assert torch.equal(data.train.of(2).x, torch.from_numpy(x[2]))


def test_one_client_among_many_with_another_form_is_named():
    clients = [(np.zeros((3, 2)), np.zeros(3))] * 1_000 + [(np.zeros((3, 4)), np.zeros(3))]
    with pytest.raises(InputError, match="client 1000 has inputs"):
        glocal.FederatedData.from_tensors(clients)
