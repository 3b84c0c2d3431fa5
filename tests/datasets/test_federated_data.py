"""Checks of data at the entry: what is accepted, and what is refused in one clear line."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import glocal
from glocal.core.errors import InputError
from glocal.datasets.federated import FederatedData
from glocal.datasets.validation import validate_data
from glocal.federate.preparation import prepare_data
from tests.support import world


def fedavg(model=None, lr=0.1):
    model = model or world.seeded(world.plain)
    return glocal.FedAvg(glocal.classification(model), optimizer=glocal.SGD(lr))


def fit(data, model=None, *, lr=0.1, rounds=2, clients_per_round=2, **options):
    return glocal.fit(
        fedavg(model, lr),
        data,
        rounds=rounds,
        clients_per_round=clients_per_round,
        progress=False,
        **options,
    ).group()


def fitted(clients, model=None):
    data = FederatedData.from_tensors(clients)
    return fit(data, model, clients_per_round=min(2, len(clients)))


def clients(*sizes):
    return world.clients(sizes)


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.floats(0, 0.9),
    st.floats(0, 0.9),
    st.integers(0, 5),
)
def test_every_example_is_on_one_client_and_in_one_part(sizes, test, validation, seed):
    federation = FederatedData.from_tensors(
        world.clients(sizes), test=test, validation=validation, seed=seed
    )
    ends = np.cumsum(sizes)
    for client, size in enumerate(sizes):
        parts = [part.rows[client] for part in (federation.train, federation.val, federation.test)]
        assert sorted(np.concatenate(parts).tolist()) == list(
            range(ends[client] - size, ends[client])
        )
        assert len(parts[0]) >= 1


def test_examples_are_stored_once():
    federation = world.federation()
    assert federation.train.examples is federation.val.examples
    assert federation.train.examples is federation.test.examples


def test_numpy_arrays_lists_of_tests_and_groups_are_accepted_and_trained_in_the_models_type():
    x, y, group = np.random.default_rng(0).normal(size=(8, 3)), np.arange(8) % 2, np.arange(8) % 3
    federation = FederatedData.from_tensors([(x, y, group)] * 2, test=[(x, y, group)] * 2)
    assert federation.test.sizes.tolist() == [8, 8]
    task = glocal.classification(nn.Linear(3, 2))
    assert prepare_data(federation, task).train.examples.x.dtype == torch.float32
    assert federation.train.of(1).group.tolist() == (federation.train.rows[1] % 8 % 3).tolist()


def test_a_client_with_one_example_works():
    result = fitted(clients(1, 20, 20))
    assert result.sizes["train"][0] == 1
    assert result.as_dict()["clients"][0]["local_test"] is None


def test_clients_of_very_different_sizes_work():
    assert fitted(clients(1, 2, 500)).new_test is not None


def spoilt(change):
    data = clients(20, 20)
    change(data)
    return data


def with_nan(data):
    data[1][0][3, 2] = float("nan")


def with_label(label):
    def change(data):
        data[1][1][:] = label

    return change


def with_float_labels(data):
    data[0] = (data[0][0], data[0][1].float())
    data[1] = (data[1][0], data[1][1].float())


def with_other_lengths(data):
    data[1] = (data[1][0], data[1][1][:-1])


def with_other_inputs(data):
    data[1] = (data[1][0][:, :-1], data[1][1])


def with_nothing(data):
    data[1] = (data[1][0][:0], data[1][1][:0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_nan, r"example 23 holds NaN or infinity \(1 such examples\); clean or drop them"),
        (with_label(3), r"client 1 has the train label 3, but the model has 3 outputs \(0..2\)"),
        (with_label(-1), "client 1 has the train label -1"),
        (with_float_labels, "targets are \\(\\) float32; class numbers 0..2 were expected"),
        (with_other_lengths, "client 1 has arrays of lengths 20, 19"),
        (
            with_other_inputs,
            r"client 1 has inputs \(5,\) float32, .*, but client 0 has inputs \(6,\) float32",
        ),
        (with_nothing, "client 1 has no training examples"),
        (list.clear, "no clients given"),
    ],
)
def test_data_that_cannot_be_trained_on_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        fitted(spoilt(change))


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_a_share_outside_zero_to_one_is_refused(share):
    with pytest.raises(InputError, match="a number of at least 0 and below 1 was expected"):
        FederatedData.from_tensors(clients(5, 5), validation=share)


def test_one_test_set_per_client_is_expected():
    with pytest.raises(InputError, match="2 clients but 1 test sets"):
        FederatedData.from_tensors(clients(5, 5), test=clients(5))


def test_a_model_that_does_not_fit_the_data_is_refused():
    with pytest.raises(InputError, match=r"it cannot take inputs \(6,\) float32"):
        fitted(clients(20, 20), nn.Linear(7, 3))
    with pytest.raises(InputError, match=r"outputs are \(3, 6, 3\), targets \(3,\)"):
        fitted(clients(20, 20), nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 3)))


def test_more_clients_per_round_than_clients_are_refused():
    with pytest.raises(
        InputError, match="clients_per_round is 9, but there are 6 clients; choose at most 6"
    ):
        fit(world.federation(), rounds=1, clients_per_round=9)


def test_training_that_diverges_says_so():
    message = (
        r"training diverged in round \d+: the loss or the upload of client \d+ and of 2 more "
        "is not finite, and nobody else took part; lower"
    )
    with pytest.raises(InputError, match=message):
        fit(world.federation(), lr=1e9, rounds=5, clients_per_round=3)


def test_checking_names_the_part_that_is_wrong():
    federation = world.federation()
    federation.test.examples.y[federation.test.rows[0][0]] = 7
    with pytest.raises(InputError, match="client 0 has the test label 7"):
        validate_data(federation, world.CLASSES)


def test_text_models_with_whole_number_inputs_train():
    generator = torch.Generator().manual_seed(0)
    texts = [
        (
            torch.randint(50, (30, 7), generator=generator),
            torch.randint(3, (30,), generator=generator),
        )
        for _ in range(4)
    ]
    model = nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(28, 3))
    assert fitted(texts, model).local_test is not None


@pytest.mark.parametrize("kind", [torch.uint8, torch.int32, torch.int64])
def test_labels_of_any_whole_number_type_are_accepted(kind):
    assert fitted([(x, y.to(kind)) for x, y in clients(20, 20)]).local_test is not None


def test_lists_are_accepted():
    assert fitted([([[0.0] * 6] * 8, [0, 1] * 4)] * 3).local_test is not None


def test_a_batch_larger_than_the_data_costs_nothing():
    data = world.federation()
    results = [fit(data, clients_per_round=3, batch_size=size) for size in (31, 10**6)]
    assert torch.equal(results[0].state.shared["0.weight"], results[1].state.shared["0.weight"])


def wrong_shapes(data):
    data[:] = [(x, y.reshape(-1, 1)) for x, y in data]


def words(data):
    data[:] = [(np.array([["a"] * 6] * 20), y) for x, y in data]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_shapes, r"targets \(3, 1\) .*whole class numbers \(rows, ...\) were expected"),
        (words, "client 0's inputs cannot be read"),
    ],
)
def test_arrays_of_the_wrong_form_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        fitted(spoilt(change))


def test_tests_unlike_the_training_data_are_refused():
    federation = FederatedData.from_tensors(
        clients(20, 20), test=[(x[:, :5], y) for x, y in clients(5, 5)]
    )
    with pytest.raises(
        InputError, match=r"test inputs are \(5,\) float32, those for training \(6,\)"
    ):
        validate_data(federation, 3)


def test_rows_in_two_places_or_outside_are_refused():
    federation = world.federation()
    twice = replace(federation, test=federation.train)
    with pytest.raises(
        InputError, match="is on two clients, or in two of train, validation and test"
    ):
        validate_data(twice, 3)
    outside = replace(
        federation,
        test=replace(federation.test, rows=(np.array([10**6]), *federation.test.rows[1:])),
    )
    with pytest.raises(InputError, match="row 1000000 is outside"):
        validate_data(outside, 3)


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if self.training:
            raise ZeroDivisionError
        return self.layer(x)


def test_a_model_that_fails_only_in_training_is_refused_before_it_starts():
    with pytest.raises(InputError, match=r"it cannot be trained \(ZeroDivisionError"):
        fitted(clients(20, 20), Broken())


def test_a_frozen_model_is_refused():
    model = world.plain()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(InputError, match="every parameter is frozen"):
        fitted(clients(20, 20), model)


def test_a_module_given_as_a_selector_is_refused_by_name():
    model = world.plain()
    with pytest.raises(InputError, match="give its name"):
        glocal.Split.of(model, local=model[0])
