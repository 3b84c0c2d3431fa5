"""The paper's studies: their published numbers, and what they run."""

import csv
from importlib.resources import files

import pytest

from glocal.core.modules import params_of
from glocal.core.split import Split
from glocal.core.trees import numel
from glocal.studies import lenet5, mlp
from glocal.studies.run import resolve
from liang2020.images import CLASSES, LEARNING_RATES
from liang2020.published import published
from liang2020.studies import STUDIES
from tests.support.command_line import complaint, run

MODELS = {"mnist": (mlp(), ["layer[3-5]"]), "cifar10": (lenet5(), ["conv1", "conv2"])}
FEDAVG_ROUNDS = {"mnist": 800, "cifar10": 1800}


@pytest.mark.parametrize("classes", CLASSES)
@pytest.mark.parametrize("data", MODELS)
def test_the_communication_of_every_row_comes_out_as_it_is_printed(data, classes):
    """(M + m) models a round, M = 100 and m = 10; at its end LG-FedAvg sends all whole models."""
    model, shared = MODELS[data]
    params = params_of(model)
    whole, part = numel(params), numel(Split.of(model, shared=shared).take_shared(params))
    for experiment, row in published(data, classes).items():
        fedavg, _, lg = experiment.removeprefix("LG ").partition("+")
        sent = 110 * whole * FEDAVG_ROUNDS[data] if experiment == "FedAvg" else 0
        if lg:
            sent = 110 * (whole * int(fedavg) + part * int(lg)) + 100 * whole
        assert row.parameters_printed(sent) == row.parameters_text, experiment


def test_a_count_is_printed_with_the_digits_of_the_paper():
    text = files("liang2020").joinpath("published.csv").read_text(encoding="utf-8")
    for line in csv.DictReader(text.splitlines()):
        row = published(line["table"], int(line["classes"]))[line["experiment"]]
        assert row.parameters_text == line["parameters"], line


def test_the_published_tables_are_whole():
    """Spot checks against the paper: appendix C.2 and Table 1."""
    assert [len(published(data, classes)) for data in MODELS for classes in CLASSES] == [7] * 10
    assert published("mnist", 2)["LG 600+100"].scores == ((98.70, 0.01), (98.03, 0.05))
    assert published("mnist", 4)["Local only"].scores == ((96.53, 0.41), (43.15, 16.41))
    assert published("cifar10", 2)["FedAvg"].scores == ((58.99, 1.50), (58.99, 1.50))
    assert published("cifar10", 10)["LG 1800+100"].scores == ((69.89, 0.48), (69.76, 0.49))
    assert published("table1", 2)["MTL"] == (((89.68, 0.75), (10.06, 0.11)), 12.0e9, 9, 1)
    assert [[*published("table4", classes)] for classes in (10, 2)] == [
        ["FedAvg", "LG", "LG + Adv"]
    ] * 2
    assert published("table4", 10)["FedAvg"] == (
        ((83.7, 3.1), (89.4, 1.9), (65.5, 1.6)),
        None,
        0,
        1,
    )
    assert published("table4", 2)["LG + Adv"].scores == ((80.1, 2.0), (84.1, 2.3), (49.8, 2.2))


@pytest.mark.parametrize("name", ["paper-mnist", "paper-cifar10", "paper-rotated"])
def test_a_study_runs_every_row_of_the_paper_from_one_fedavg_per_seed(name):
    study = STUDIES[name]
    for part in study.parts.values():
        experiments = resolve(part.settings).experiments
        rows = {*experiments, *part.candidates}
        assert {*part.published} <= rows or part.protocol == "tuned"
        assert {*part.splits.values()} <= {*experiments}
        assert part.settings.plan.seeds == 10
        starts = {
            experiment.start_from for row, experiment in experiments.items() if row.startswith("LG")
        } - {None}
        assert len(starts) == {"tuned": len(LEARNING_RATES)}.get(
            part.protocol, int("FedAvg" in experiments)
        )


@pytest.mark.parametrize("study", STUDIES.values(), ids=STUDIES)
def test_claims_are_about_what_a_study_measures(study):
    for claim in study.claims:
        for part, experiment, measure in (*claim.more, *claim.less):
            of = study.parts[part]
            assert experiment in {*of.settings.experiments, *of.candidates, *of.baselines}
            assert measure in {*study.measures, "fresh"}


@pytest.mark.parametrize("data", MODELS)
def test_the_protocols_differ_in_what_they_say_and_in_nothing_else(data):
    parts = STUDIES[f"paper-{data}"].parts
    ours, theirs = (parts[f"{protocol}-3"].settings.as_dict() for protocol in ("paper", "released"))
    changed = {
        f"{of}.{key}"
        for of in ours
        if isinstance(ours[of], dict)
        for key in {*ours[of], *theirs[of]}
        if ours[of].get(key) != theirs[of].get(key)
    }
    expected = {"data.validation", "plan.aggregation", "run.select"}
    assert changed - expected == (
        {"model.name", "experiments.FedAvg"} if data == "mnist" else {"optimizer.lr"}
    )
    aggregation, select = theirs["plan"]["aggregation"], theirs["run"]["select"]
    expected = ("mean(clients)", "last", 0.0)
    assert (aggregation, select, theirs["data"]["validation"]) == expected
    assert theirs["experiments"]["FedAvg"].get("lr", theirs["optimizer"]["lr"]) == 0.1


@pytest.mark.parametrize("data", MODELS)
def test_the_splits_are_swept_from_nothing_to_everything_in_both_directions(data):
    part, (model, tables) = STUDIES[f"paper-{data}"].parts["paper-2"], MODELS[data]
    whole, shared = {"local_only": 0, "fedavg": numel(params_of(model))}, {}
    for words, name in part.splits.items():
        experiment = part.settings.experiments[name]
        split = (
            None
            if experiment.algorithm in whole
            else Split.of(model, shared=experiment.shared or tables)
        )
        shared[words] = (
            whole[experiment.algorithm]
            if split is None
            else numel(split.take_shared(params_of(model)))
        )
    ends = [
        [shared["none"], *(shared[f"{end} {n} shared"] for n in range(1, 5)), shared["all"]]
        for end in ("first", "last")
    ]
    assert all(sizes == sorted(set(sizes)) for sizes in ends)
    assert ends[0][1] + ends[1][4] == shared["all"]


def test_the_studies_are_listed_and_shown(capsys):
    assert run("list") == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("digits", *STUDIES))
    assert run("show", "paper-mnist") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "98.54 ± 0.05 98.17 ± 0.05 5.7e10" in shown
    assert "LG-FedAvg outperforms FedAvg under Local Test" in shown


def test_advice_is_not_given_for_a_study_of_several_parts(capsys):
    assert run("advise", "paper-mood") == 2
    assert "'paper-mood' is a study of several parts" in complaint(capsys)
