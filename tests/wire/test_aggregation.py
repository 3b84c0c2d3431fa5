"""How the server makes one message of many, against NumPy."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from glocal.algorithms.contract import Uploads, add_change, change
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
    parse_aggregation,
)

pytestmark = pytest.mark.quick

SIZES = torch.tensor([3, 1, 0, 8])
ROBUST = [
    Median(),
    TrimmedMean(0),
    TrimmedMean(0.25),
    Krum(0),
    MultiKrum(0),
    GeometricMedian(),
    CentredClipping(100.0, 3),
]
ALL = [Mean(), Mean(by="clients"), Mean(max_weight=5), *ROBUST]
EVERY = pytest.mark.parametrize("aggregation", ALL, ids=repr)


def messages(seed=0, clients=4):
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(clients, 3, 2, generator=generator, dtype=torch.float64),
        "b": torch.randn(clients, generator=generator),
        "steps": torch.randint(-9, 9, (clients, 2), generator=generator),
        "empty": torch.zeros(clients, 0),
    }


def reduced(aggregation, tree, sizes=SIZES):
    return aggregation.reduce(tree, aggregation.weights(sizes))


@given(st.integers(0, 1000))
def test_a_mean_by_examples_is_numpys_weighted_average(seed):
    tree = messages(seed)
    for name, tensor in reduced(Mean(), tree).items():
        expected = np.average(tree[name].numpy(), axis=0, weights=SIZES.numpy())
        np.testing.assert_allclose(tensor.numpy(), expected, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 1000))
def test_a_mean_by_clients_is_numpys_mean(seed):
    tree = messages(seed)
    for name, tensor in reduced(Mean(by="clients"), tree).items():
        np.testing.assert_allclose(tensor, tree[name].double().mean(0), rtol=1e-5, atol=1e-6)


@given(st.integers(0, 1000), st.integers(1, 7))
def test_a_median_is_numpys(seed, clients):
    """Of an even number of clients it is the mean of the two in the middle."""
    tree = messages(seed, clients)
    for name, tensor in reduced(Median(), tree, torch.ones(clients)).items():
        np.testing.assert_allclose(tensor, np.median(tree[name].numpy(), axis=0), rtol=1e-6)


@EVERY
def test_floats_keep_their_type_and_whole_numbers_become_float64(aggregation):
    dtypes = {name: tensor.dtype for name, tensor in reduced(aggregation, messages()).items()}
    assert dtypes["w"] == dtypes["steps"] == torch.float64
    assert dtypes["b"] == torch.float32


@EVERY
def test_one_client_alone_is_its_own_aggregate(aggregation):
    tree = messages(clients=1)
    alone = reduced(aggregation, tree, torch.tensor([5]))
    assert gap(alone, trees.row(tree, 0)) == 0


def gap(left, right):
    return max(float((left[name] - right[name]).abs().sum()) for name in left)


@EVERY
def test_the_order_of_clients_does_not_count(aggregation):
    tree, turned = messages(), [2, 0, 3, 1]
    other = {name: tensor[turned] for name, tensor in tree.items()}
    ours = reduced(aggregation, tree), reduced(aggregation, other, SIZES[turned])
    assert gap(*ours) < 1e-6


@pytest.mark.parametrize("by", ["examples", "clients"])
def test_where_nobody_counts_nothing_changes(by):
    aggregation = Mean(by)
    nothing = aggregation.reduce(messages(), torch.zeros(4, dtype=torch.float64))
    assert all(bool((tensor == 0).all()) for tensor in nothing.values())


def test_a_sum_that_is_too_large_for_float32_weights_is_still_a_mean():
    """A client of a billion examples beside one of a single example."""
    tree = {"w": torch.tensor([[1.0], [0.0]], dtype=torch.float64)}
    mean = reduced(Mean(), tree, torch.tensor([1, 10**9]))
    assert mean["w"].item() == pytest.approx(1 / (10**9 + 1), rel=1e-12)


# ---- what is aggregated is a change


def model():
    return {
        "w": torch.tensor([1.0, 2.0]),
        "half": torch.tensor([0.5]).bfloat16(),
        "steps": torch.tensor(10),
        "bytes": torch.tensor([3], dtype=torch.uint8),
        "switch": torch.tensor([True, False, True]),
    }


def test_a_change_added_to_what_was_changed_is_what_came_after():
    after = {
        "w": torch.tensor([1.5, 1.0]),
        "half": torch.tensor([0.75]).bfloat16(),
        "steps": torch.tensor(14),
        "bytes": torch.tensor([1], dtype=torch.uint8),
        "switch": torch.tensor([False, False, True]),
    }
    moved = change(after, model())
    assert moved["switch"].tolist() == [True, False, False]
    assert {name: tensor.dtype for name, tensor in moved.items()} == {
        name: tensor.dtype for name, tensor in model().items()
    }
    assert trees.same_bits(add_change(model(), moved), after)


def aggregated(afters, aggregation):
    """The shared tree after clients with these trees, which have one example each."""
    rows = trees.stack([change(after, model()) for after in afters])
    return add_change(model(), reduced(aggregation, rows, torch.ones(len(afters))))


@EVERY
def test_clients_that_agree_are_followed_in_every_type(aggregation):
    after = {**model(), "steps": torch.tensor(14), "switch": torch.tensor([False, True, True])}
    after["w"] = torch.tensor([1.25, 2.5])
    after["bytes"] = torch.tensor([7], dtype=torch.uint8)
    assert trees.same_bits(aggregated([after] * 3, aggregation), after)


@EVERY
def test_a_switch_is_flipped_where_more_than_half_of_the_clients_flipped_it(aggregation):
    flips = [[True, True, True], [True, False, True], [False, True, True]]
    flips += [[False, False, True]]
    afters = [{**model(), "switch": torch.tensor(flip)} for flip in flips]
    # the first was on and two turned it off, the second was off and two turned it on: a tie stays
    assert aggregated(afters, aggregation)["switch"].tolist() == [True, False, True]
    afters.append({**model(), "switch": torch.tensor([False, True, False])})
    assert aggregated(afters, aggregation)["switch"].tolist() == [False, True, True]


def test_a_counter_is_the_rounded_mean():
    afters = [{**model(), "steps": torch.tensor(10 + steps)} for steps in (3, 4, 4)]
    after = aggregated(afters, Mean(by="clients"))
    assert after["steps"].dtype == torch.int64
    assert after["steps"] == 14  # the mean is 13.67


def test_what_did_not_move_stays_the_very_tensor():
    shared = model()
    after = add_change(shared, {"w": torch.ones(2)})
    assert after["w"].tolist() == [2, 3]
    assert all(after[name] is shared[name] for name in shared if name != "w")


# ---- the uploads of a round


def uploads(aggregation=None, **changes):
    tree = messages()
    settings = {
        "messages": tree,
        "sent": trees.zeros_like(tree),
        "profiles": {"seen": torch.arange(4.0)},
        "num_examples": SIZES,
        "num_clients": 8,
        "round_index": torch.tensor(0),
        "aggregation": aggregation or Mean(),
    }
    return Uploads(**{**settings, **changes})


def test_uploads_know_how_many_clients_took_part():
    assert uploads().num_sampled == 4
    assert uploads().participation == 0.5
    assert uploads().weights.tolist() == [3, 1, 0, 8]
    assert uploads(Mean(by="clients")).weights.tolist() == [1, 1, 1, 1]


def test_the_aggregate_is_that_of_messages_or_of_what_a_function_makes_of_each():
    plain, tree = uploads(), messages()
    assert gap(plain.aggregate(), reduced(Mean(), tree)) == 0

    def weighed(upload, sent, profile):
        return {"w": profile["seen"] * (upload["w"] - sent["w"])}

    expected = reduced(Mean(), {"w": torch.arange(4.0).reshape(4, 1, 1) * tree["w"]})
    assert gap(plain.aggregate(weighed), expected) < 1e-12


def test_where_the_mean_is_all_that_is_known_single_uploads_cannot_be_looked_at():
    mean = reduced(Mean(), messages())
    blind = uploads(messages={}, sent={}, profiles={}, mean=mean)
    assert blind.aggregate() is mean
    with pytest.raises(InputError, match=r"needs single uploads .* has their mean"):
        blind.aggregate(lambda upload, sent, profile: upload)


def test_a_median_of_what_a_function_makes_of_uploads_is_refused():
    with pytest.raises(InputError, match=r"needs single uploads .* has Median\(\)"):
        uploads(Median()).aggregate(lambda upload, sent, profile: upload)


@pytest.mark.parametrize("by", ["examples", "clients"])
def test_a_mask_gives_the_numbers_of_leaving_out(by):
    """On a GPU clients are masked, so that no shape depends on who counts."""
    broken = messages()
    broken["w"][1, 0, 0], broken["b"][3] = torch.nan, torch.inf
    counted = torch.tensor([True, False, True, False])
    whole = uploads(Mean(by), messages=broken)
    left, masked = whole.only(counted), whole.masked(counted)
    assert gap(left.aggregate(), masked.aggregate()) < 1e-12
    assert masked.num_sampled == left.num_sampled == 2
    assert masked.participation == left.participation == 0.25
    assert masked.weights[counted].tolist() == left.weights.tolist()

    def doubled(upload, sent, profile):
        return {name: tensor * profile["seen"] for name, tensor in upload.items()}

    assert gap(left.aggregate(doubled), masked.aggregate(doubled)) < 1e-12


def test_leaving_out_takes_every_part_of_an_upload():
    left = uploads().only(torch.tensor([False, True, False, True]))
    assert left.num_examples.tolist() == [1, 8]
    assert left.profiles["seen"].tolist() == [1, 3]
    assert {len(tensor) for tree in (left.messages, left.sent) for tensor in tree.values()} == {2}


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("mean", Mean()),
        ("mean(clients)", Mean(by="clients")),
        ("mean(examples, 100)", Mean(max_weight=100)),
        ("median", Median()),
        ("trimmed_mean(0.1)", TrimmedMean(0.1)),
        ("trimmed_mean(2)", TrimmedMean(2)),
        ("krum(1)", Krum(1)),
        ("multi_krum(2)", MultiKrum(2)),
        ("geometric_median", GeometricMedian()),
        ("geometric_median(5, 0.1)", GeometricMedian(5, 0.1)),
        ("centred_clipping(10)", CentredClipping(10)),
        ("centred_clipping(0.5, 3)", CentredClipping(0.5, 3)),
    ],
)
def test_aggregations_have_words(word, expected):
    assert parse_aggregation(word, "plan.aggregation") == expected


WRONG_WORDS = ["mode", "mean(examples, clients)", "mean(people)", "median(3)", "krum", "krum(0.1)"]
WRONG_WORDS += ["trimmed_mean(0.5)", "mean(clients, 100)", "multi_krum(1, 2)"]


@pytest.mark.parametrize("word", WRONG_WORDS)
def test_a_word_that_names_no_aggregation_is_refused(word):
    with pytest.raises(InputError, match=r"^settings: plan\.aggregation is '"):
        parse_aggregation(word, "plan.aggregation")


def test_a_weighting_that_is_not_known_is_refused():
    with pytest.raises(InputError, match=r"^aggregation: by is 'size'; .*clients, examples"):
        Mean(by="size")


def test_no_client_weighs_more_than_the_largest_weight():
    assert Mean(max_weight=3).weights(SIZES).tolist() == [3, 1, 0, 3]
    boasting = torch.tensor([3, 1, 0, 10**12])
    tree = messages()
    assert gap(reduced(Mean(max_weight=8), tree, boasting), reduced(Mean(), tree)) == 0


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_weight": 0}, "max_weight is 0; a whole number from 1 to 1,000,000 was expected"),
        ({"max_weight": 2.5}, "max_weight is 2.5; a whole number from 1"),
        ({"by": "clients", "max_weight": 9}, "max_weight is 9, and a mean by clients weighs all"),
    ],
)
def test_a_largest_weight_that_cannot_be_is_refused(settings, expected):
    with pytest.raises(InputError, match=f"^aggregation: {expected}"):
        Mean(**settings)
