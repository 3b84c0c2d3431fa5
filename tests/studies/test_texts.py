"""Texts, person by person: reading, partitions, batches, and what a run keeps of them."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from glocal.algorithms import FedAvg
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import SGD, Adam, StepLR
from glocal.core.sampling import Plan, batch_order, make_rng, to_token_batches
from glocal.core.task import classification
from glocal.datasets import Texts, load_dataset, load_texts, partition_texts
from glocal.datasets.federated import FederatedData
from glocal.datasets.texts import (
    MAX_WORDS,
    UNKNOWN_WORD,
    VOCABULARY_SIZE,
    build_vocabulary,
    read_texts,
    tokenize,
)
from glocal.evaluate.ordinal import one_class_clients, ordinal_metrics
from glocal.evaluate.text_baselines import baselines
from glocal.studies.build import build_components
from glocal.studies.restarts import best_restarts, restarts_of
from glocal.studies.run import read_results, run_study
from glocal.studies.settings import (
    OptimizerSettings,
    PlanSettings,
    RunSettings,
    Settings,
    from_dict,
)
from tests.support import world
from tests.support.diaries import SECRET, diary, maps
from tests.support.real_data import needs_data


def test_a_csv_in_the_form_of_maps_is_read_into_five_equal_bins(tmp_path):
    moods = ["1", "20", "20.5", "21", "40", "60", "61", "80", "81", "100"]
    texts = read_texts(
        [maps(tmp_path / "maps.csv", [f'ann,"Well, well",{mood}' for mood in moods])]
    )
    assert texts.y.tolist() == [0, 0, 1, 1, 1, 2, 3, 3, 4, 4]
    assert texts.words[0] == ("well", ",", "well")
    assert texts.person[0] == "ann"


def test_valence_is_read_as_the_essays_have_it(tmp_path):
    rows = [
        f"7,{place},so so,{valence}" for place, valence in enumerate(("-2", "-1.0", "0", "1", "2"))
    ]
    texts = read_texts([maps(tmp_path / "essays.csv", rows, "user_id,text_id,text,valence")])
    assert texts.y.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"ann,{SECRET},0", "row 3: mood is 0; a number from 1 to 100 was expected"),
        (f"ann,{SECRET},101", "row 3: mood is 101; a number from 1 to 100"),
        (f"ann,{SECRET},nan", "row 3: mood is nan; a number from 1 to 100"),
        (f"ann,50,{SECRET}", "row 3: mood is no number; a number from 1 to 100"),
        (f" ,{SECRET},50", "row 3: person is empty; every text needs a person"),
        (f"ann,{SECRET}", "row 3: it has another number of columns"),
        (f"ann,{SECRET},so,50", "row 3: it has another number of columns"),
    ],
)
def test_a_bad_row_is_named_and_its_text_is_not(tmp_path, row, message):
    path = maps(tmp_path / "maps.csv", ["ann,fine,50", row])
    with pytest.raises(InputError, match=message) as error:
        read_texts([path])
    assert str(path) in str(error.value)
    assert SECRET not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("valence", ["-3", "3", "0.5"])
def test_a_valence_out_of_range_is_named(tmp_path, valence):
    path = maps(tmp_path / "essays.csv", [f"7,fine,{valence}"], "user_id,text,valence")
    with pytest.raises(
        InputError, match=f"row 2: valence is {valence}; a whole number from -2 to 2 was expected"
    ):
        read_texts([path])


def test_other_columns_another_encoding_and_no_file_are_refused(tmp_path):
    with pytest.raises(
        InputError,
        match="row 1: columns person, text, mood or user_id, text, valence were expected",
    ):
        read_texts([maps(tmp_path / "a.csv", [], "who,what")])
    (tmp_path / "b.csv").write_bytes(
        f"person,text,mood\nann,{SECRET} \xe9t\xe9,50\n".encode("latin-1")
    )
    with pytest.raises(
        InputError, match=r"b.csv, row 2: it is not UTF-8; save the file with that encoding"
    ) as error:
        read_texts([tmp_path / "b.csv"])
    assert SECRET not in str(error.value)
    with pytest.raises(InputError, match="could not be read"):
        load_texts(str(tmp_path / "none.csv"))


@pytest.mark.parametrize("rows", [[], ["", ""]])
def test_a_file_without_a_text_is_refused(tmp_path, rows):
    with pytest.raises(InputError, match=r"maps.csv: there is no text below the columns"):
        read_texts([maps(tmp_path / "maps.csv", rows)])


@pytest.mark.parametrize(
    ("columns", "row"),
    [(",person,text,mood", "0,ann,fine,50"), ("person,text,mood,", "ann,fine,50,")],
)
def test_a_column_without_a_name_is_passed_over_as_any_other(tmp_path, columns, row):
    texts = read_texts([maps(tmp_path / "maps.csv", [row], columns)])
    assert (texts.words, texts.person, texts.y.tolist()) == ((("fine",),), ("ann",), [2])


def test_a_column_that_is_there_twice_is_refused(tmp_path):
    with pytest.raises(
        InputError, match=r"row 1: a column of person, text, mood is there twice; keep one of each"
    ):
        read_texts([maps(tmp_path / "maps.csv", ["ann,fine,bad,50"], "person,text,text,mood")])


def test_a_text_that_is_too_long_to_read_is_named_and_not_printed(tmp_path):
    with pytest.raises(
        InputError, match=r"from row 2 on: it cannot be read .*; close its quotes, .* shorten texts"
    ) as error:
        read_texts([maps(tmp_path / "maps.csv", [f"ann,{SECRET * 20_000},50"])])
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("damaged", [f'ann,50,"{SECRET}', f'ann,50,"{SECRET}" and more'])
def test_a_quote_that_is_not_closed_does_not_swallow_the_rows_below_it(tmp_path, damaged):
    path = maps(
        tmp_path / "maps.csv",
        ["ann,50,fine", damaged, "bob,50,fine", "bob,50,fine"],
        "person,mood,text",
    )
    with pytest.raises(
        InputError,
        match=r"from row 3 on: it cannot be read .*; close its quotes, double those within",
    ) as error:
        read_texts([path])
    assert SECRET not in str(error.value)


def test_columns_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"from row 1 on: it cannot be read"):
        read_texts(
            [maps(tmp_path / "maps.csv", ["ann,fine,50"], "person,text,mood," + "x" * 200_000)]
        )


def test_an_empty_text_is_one_unknown_word_and_so_is_a_word_never_trained_on(tmp_path):
    texts = read_texts([diary(tmp_path / "maps.csv")])
    emptied = texts._replace(words=((), *texts.words[1:]))
    store = partition_texts(emptied, seeds=[0])[0].train.examples.x
    assert store[0].tolist() == [UNKNOWN_WORD] + [0] * (MAX_WORDS - 1)
    unseen = texts._replace(words=(("zebra", "day"), *texts.words[1:]))
    known = build_vocabulary(unseen, np.arange(1, len(unseen.words)))
    assert "zebra" not in known
    assert min(known.values()) == UNKNOWN_WORD + 1


def test_the_vocabulary_has_a_fixed_size_and_comes_from_training_texts_only():
    words = tuple((f"w{place}", "common") for place in range(3000))
    texts = Texts(words, tuple("ab"[place % 2] for place in range(3000)), np.arange(3000) % 5)
    (federation,) = partition_texts(texts, seeds=[0])
    x = federation.train.examples.x.numpy()
    assert x.max() == VOCABULARY_SIZE - 1
    known = build_vocabulary(texts, federation.train.all_rows())
    assert len(known) == VOCABULARY_SIZE - 2
    assert {f"w{row}" for row in federation.test.all_rows()}.isdisjoint(known)
    assert (x[federation.test.all_rows(), 0] == UNKNOWN_WORD).all()


def test_people_come_by_number_of_texts_and_one_with_three_still_trains(tmp_path):
    texts = read_texts([diary(tmp_path / "maps.csv", (3, 30, 12))])
    (federation,) = partition_texts(texts, seeds=[4])
    assert [
        part.sizes.tolist() for part in (federation.train, federation.val, federation.test)
    ] == [
        [24, 10, 3],
        [3, 1, 0],
        [3, 1, 0],
    ]
    assert partition_texts(texts, seeds=[4], people=1)[0].num_clients == 1
    with pytest.raises(InputError, match=r"data.keep_clients is 4; it must be from 1 to 3"):
        partition_texts(texts, seeds=[4], people=4)


def test_seeds_share_a_store_and_have_splits_of_their_own(tmp_path):
    texts = read_texts([diary(tmp_path / "maps.csv")])
    first, second = partition_texts(texts, seeds=[0, 1])
    assert first.train.examples.x is second.test.examples.x
    assert not {*first.train.all_rows().tolist()} & {*second.train.all_rows().tolist()}
    assert (first.test.all_rows() % len(texts.y)).tolist() != (
        second.test.all_rows() % len(texts.y)
    ).tolist()
    (alone,) = partition_texts(texts, seeds=[1])
    assert torch.equal(alone.test.of(0).x, second.test.of(0).x)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.integers(1, 9),
    st.integers(1, 120),
    st.integers(0, 99),
)
def test_token_batches_hold_every_example_once_and_keep_to_the_limit(
    lengths, batch, max_tokens, seed
):
    lengths = np.array(lengths)
    order = to_token_batches(
        lengths, make_rng(seed, "order"), batch_size=batch, max_tokens=max_tokens
    )
    assert sorted(order[order >= 0].tolist()) == list(range(len(lengths)))
    for rows in (row[row >= 0] for row in order):
        assert 1 <= len(rows) <= batch
        assert len(rows) == 1 or len(rows) * lengths[rows].max() <= max_tokens
    assert (
        order.shape
        == to_token_batches(
            lengths, make_rng(seed + 1, "order"), batch_size=batch, max_tokens=max_tokens
        ).shape
    )


def test_without_tokens_the_order_is_what_it_was():
    plan = Plan(1, 1, local_epochs=2, batch_size=4)
    plain = batch_order(plan, 11, 3, 5)
    assert np.array_equal(batch_order(plan, 11, 3, 5, lengths=np.ones(11, dtype=np.int64)), plain)
    generator = make_rng(0, "order", 3, 5)
    assert plain[plain >= 0].tolist() == [*generator.permutation(11), *generator.permutation(11)]


def test_tokens_need_texts():
    train = FederatedData.from_tensors([(np.ones((4, 3)), np.arange(4) % 2)]).train
    algorithm = FedAvg(classification(nn.Linear(3, 2)), optimizer=SGD(0.1))
    with pytest.raises(InputError, match="tokens counts words, and the inputs are"):
        next(world.simulate(algorithm, train, Plan(1, 1, max_tokens=20)))
    with pytest.raises(InputError, match="tokens is 0; a whole number from 1 to"):
        Plan(1, 1, max_tokens=0)


@pytest.mark.parametrize(
    "rule",
    [
        SGD(0.1, momentum=0.5, lr_schedule=StepLR(gamma=0.5, step_size=3)),
        Adam(0.1, lr_schedule=StepLR(gamma=0.5, step_size=3)),
    ],
)
def test_a_rate_that_shrinks_is_a_lower_rate(rule):
    params, grads = {"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([0.3, 0.7])}
    lower = replace(rule, lr=0.025, lr_schedule=None)
    for t, other in (
        (0, replace(rule, lr_schedule=None)),
        (2, replace(rule, lr_schedule=None)),
        (7, lower),
    ):
        expected, _ = other.step(params, grads, other.init(params), torch.tensor(t))
        after, _ = rule.step(params, grads, rule.init(params), torch.tensor(t))
        assert torch.allclose(after["w"], expected["w"], atol=1e-7)
    assert "times 0.5 every 3 rounds" in rule.description


def test_a_shrink_needs_both_of_its_numbers():
    from glocal.studies.build import build_optimizer

    with pytest.raises(InputError, match=r"lr_gamma and optimizer\.lr_step_size belong together"):
        build_optimizer(OptimizerSettings(lr_gamma=0.5))


def test_one_class_people_are_found_by_their_texts():
    federation = FederatedData.from_tensors(
        [(np.zeros((40, 2)), np.repeat([0, 1], [38, 2])), (np.zeros((40, 2)), np.arange(40) % 2)]
    )
    assert one_class_clients(federation, 0.95) == {0}
    assert one_class_clients(federation, 0.96) == frozenset()


def test_error_counts_how_many_classes_a_guess_is_off():
    federation = FederatedData.from_tensors(
        [(np.zeros((2, 1)), np.array([0, 4])), (np.zeros((1, 1)), np.array([2]))],
        test=0.0,
        validation=0.0,
    )
    guesses = [np.array([0, 1]), np.array([2])]
    assert ordinal_metrics(guesses, federation.train) == (2 / 3, 1.0, 2 / 3, 1.0)
    assert ordinal_metrics(guesses, federation.train, {0}) == (2 / 3, 1.0, 1.0, 0.0)
    assert ordinal_metrics(guesses, federation.train, {0, 1})[2:] == (None, None)


def test_bags_of_words_tell_what_the_words_say_and_cope_with_one_class_people(tmp_path):
    texts = read_texts([diary(tmp_path / "maps.csv", (60, 40, 3))])
    y = np.where(np.array(texts.person) == "p1", 4, texts.y)  # always the best mood
    (federation,) = partition_texts(texts._replace(y=y), seeds=[0])
    after = {
        name: ordinal_metrics(guess.test, federation.test)
        for name, guess in baselines(federation).items()
    }
    assert after["Bag of words, per person"].accuracy == 1.0
    assert after["Bag of words, pooled, knows the person"].accuracy > after["Majority"].accuracy
    assert after["Majority per person"].accuracy < 1.0


def validated(seed, pooled):
    """A result whose accuracy and loss on validation data are the same number."""
    metrics = {
        name: {
            "higher_is_better": name == "accuracy",
            "is_fraction": name == "accuracy",
            "validation": {"pooled": pooled},
        }
        for name in ("accuracy", "loss")
    }
    return {"seed": seed, "metric": "accuracy", "metrics": metrics}


def chosen(results, settings):
    best = best_restarts(results, settings)
    return [(result["seed"], result["restart"], result["index"]) for result in best]


def test_tries_differ_in_weights_not_in_data_and_the_best_on_validation_counts():
    runs = restarts_of(PlanSettings(seed=3, seeds=2, restarts=3))
    assert [run.data_seed for run in runs] == [3, 4, 3, 4, 3, 4]
    assert len({run.seed for run in runs}) == 6
    results = [
        validated(run.seed, pooled)
        for run, pooled in zip(runs, (0.1, None, 0.3, 0.2, 0.3, 0.1), strict=True)
    ]
    several = Settings(plan=PlanSettings(seed=3, seeds=2, restarts=3))
    assert chosen(results, several) == [(3, 1, 2), (4, 1, 3)]
    by_loss = replace(several, run=RunSettings(select="min loss"))
    assert chosen(results, by_loss) == [(3, 0, 0), (4, 2, 5)]
    assert best_restarts(results, Settings()) == results
    with pytest.raises(InputError, match=r"plan.restarts is 0; a whole number from 1 to"):
        restarts_of(PlanSettings(restarts=0))


def quick(path, **plan):
    table = {
        "data": {"source": str(path), "partition": "natural"},
        "model": {"name": "tests.studies.test_texts:Tiny"},
        "optimizer": {"name": "adam", "lr": 0.01, "lr_gamma": 0.5, "lr_step_size": 1},
        "plan": {
            "rounds": 2,
            "clients_per_round": 4,
            "batch_size": 8,
            "max_tokens": 60,
            "seeds": 2,
            **plan,
        },
        "run": {"select": "best", "validate_every": 1, "engine": "vmapped"},
        "ordinal": {"bag_of_words": True},
        "experiments": {
            "FedAvg": {"algorithm": "fedavg"},
            "LG": {"algorithm": "lg_fedavg", "local": ["head"]},
        },
    }
    return from_dict(table)


class Tiny(nn.Module):
    """The mean of word vectors, and one layer."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY_SIZE, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(self.words(x).mean(1))


def test_a_run_of_texts_keeps_no_word_of_them(tmp_path, capfd, caplog):
    settings = quick(diary(tmp_path / "maps.csv"), restarts=2)
    list(run_study(settings, tmp_path / "run"))
    results = read_results(tmp_path / "run")
    assert [result["seed"] for result in results["LG"]] == [0, 1]
    assert len(json.loads((tmp_path / "run/experiments/lg/result.json").read_text())) == 4
    assert {*results["LG"][0]["ordinal"]} >= {"accuracy", "error", "accuracy_rest", "error_rest"}
    assert [client["test"] for client in results["LG"][0]["clients"]][-1] == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 8
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    output = capfd.readouterr()
    assert SECRET not in output.out + output.err + caplog.text
    assert SECRET not in repr(read_texts([tmp_path / "maps.csv"]))


def test_a_deal_has_one_federation_for_all_its_tries_and_one_store_for_all_deals(tmp_path):
    parts = build_components(quick(diary(tmp_path / "maps.csv"), restarts=2), lambda *_: None)
    assert len(parts.seeds) == 4
    assert parts.federations[0] is parts.federations[2]
    assert parts.federations[0].train.examples is parts.federations[1].train.examples
    assert not trees.same_bits(parts.params[0], parts.params[2])


def test_texts_are_dealt_person_by_person_only(tmp_path):
    settings = quick(diary(tmp_path / "maps.csv"))
    with pytest.raises(InputError, match=r"set data.partition to 'natural', not 'iid'"):
        build_components(
            replace(settings, data=replace(settings.data, partition="iid")), lambda *_: None
        )
    with pytest.raises(
        InputError, match="holds texts, which become numbers only when they are partitioned"
    ):
        load_dataset(settings.data.source)
    with pytest.raises(InputError, match="digits holds no texts"):
        load_texts("digits")


@pytest.mark.slow
@needs_data("mood_essays")
def test_the_essays_are_what_their_authors_say():
    texts = load_texts("mood_essays")
    assert repr(texts) == "Texts(4501 texts of 182 people)"
    assert np.bincount(texts.y).tolist() == [599, 624, 1483, 896, 899]
    (federation,) = partition_texts(texts, seeds=[0], people=14)
    parts = (federation.train, federation.val, federation.test)
    assert sum(part.sizes for part in parts).tolist() == [
        215,
        210,
        206,
        177,
        97,
        88,
        82,
        77,
        76,
        63,
        47,
        42,
        42,
        41,
    ]
    assert len(one_class_clients(federation, 0.95)) == 2
    read = math.fsum(min(len(words), MAX_WORDS) for words in texts.words) / math.fsum(
        map(len, texts.words)
    )
    assert read == pytest.approx(0.927, abs=2e-3)


def test_words_and_marks_are_kept_apart():
    assert tokenize("Don’t: é2 <PER>") == ("don", "’", "t", ":", "é2", "<", "per", ">")
