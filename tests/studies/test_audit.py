"""The audit of a saved run: hand-computed metrics, every algorithm, and one-line refusals."""

import hashlib
import json
import shutil
import sys
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from glocal.core.errors import InputError
from glocal.evaluate.fairness import GroupPredictions, fairness_metrics
from glocal.evaluate.leakage import (
    AttackData,
    AttackResult,
    auc,
    average_leakage,
    beyond_chance,
    estimate_leakage,
    run_attacks,
    train_attackers,
)
from glocal.studies import run_study
from glocal.studies.representation_layer import default_representation, outer_modules
from glocal.studies.saved_audit import AuditQuery, SavedAudit
from glocal.studies.saved_experiment import open_experiment
from glocal.studies.settings import SplitSettings, from_dict
from tests.support import world
from tests.support.command_line import complaint, run
from tests.support.real_data import needs_data

# groups


def predictions(y, guess, group):
    return GroupPredictions(*(np.array(column, dtype=np.int64) for column in (y, guess, group)))


def test_group_metrics_are_those_computed_by_hand():
    """Group 0: one of two positives and one of two negatives selected.

    Group 1: both positives and no negative selected.
    """
    report = fairness_metrics(
        predictions([1, 1, 0, 0, 1, 1, 0], [1, 0, 1, 0, 1, 1, 0], [0, 0, 0, 0, 1, 1, 1])
    )
    one, other = report.groups
    assert one == (0, 4, 0.5, 0.5, 0.5, 0.5)
    assert other == (1, 3, 1.0, pytest.approx(2 / 3), 1.0, 0.0)
    assert report.demographic_parity_difference == pytest.approx(2 / 3 - 1 / 2)
    assert report.equalized_odds_difference == 0.5


@given(st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=1, max_size=30))
@settings(max_examples=15)
def test_every_rate_is_a_fraction_of_counted_people(people):
    y, guess, group = (np.array(column) for column in zip(*people, strict=True))
    report = fairness_metrics(GroupPredictions(y, guess, group))

    def share(rows):
        return pytest.approx(guess[rows].mean()) if rows.any() else None

    for rates in report.groups:
        own = group == rates.group
        assert rates.people == own.sum()
        assert rates.accuracy == pytest.approx((y == guess)[own].mean())
        assert rates[3:] == (share(own), share(own & (y == 1)), share(own & (y == 0)))
    assert [rates.group for rates in report.groups] == sorted({*group.tolist()})
    rates = [rate for of in report.groups for rate in of]
    assert (report.equalized_odds_difference is None) == (len(report.groups) < 2 or None in rates)
    assert (report.demographic_parity_difference is None) == (len(report.groups) < 2)


@pytest.mark.parametrize("always", [0, 1])
def test_predictions_that_ignore_everything_treat_groups_alike(always):
    y, group = np.random.default_rng(0).integers(2, size=(2, 60))
    report = fairness_metrics(GroupPredictions(y, np.full(60, always), group))
    assert (report.demographic_parity_difference, report.equalized_odds_difference) == (0, 0)


def test_what_is_not_defined_is_left_open():
    alone = fairness_metrics(predictions([0, 1], [0, 1], [1, 1]))
    assert [rates.group for rates in alone.groups] == [1]
    assert (alone.demographic_parity_difference, alone.equalized_odds_difference) == (None, None)
    one_class = fairness_metrics(predictions([0, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]))
    assert one_class.groups[1].false_positive_rate is None, (
        "nobody there is of class 0, which is not a rate of 0"
    )
    assert one_class.demographic_parity_difference == 0
    assert one_class.equalized_odds_difference is None
    three = fairness_metrics(predictions([0, 1, 2, 2], [0, 1, 2, 0], [0, 0, 1, 1]), classes=3)
    assert [rates.accuracy for rates in three.groups] == [1.0, 0.5]
    assert (three.groups[0].selection_rate, three.demographic_parity_difference) == (None, None)
    assert fairness_metrics(predictions([], [], [])).groups == []


# attackers


@pytest.mark.parametrize("rare", [1, 2])
@pytest.mark.parametrize("rows", [3, 10, 11, 40])
def test_attackers_train_on_a_few_rows_too(rows, rare):
    attribute = (np.arange(rows) < rare).astype(np.int64)
    assert (
        len(train_attackers(AttackData(np.random.default_rng(0).normal(size=(rows, 2)), attribute)))
        == 3
    )


def test_the_interval_of_a_mean_is_narrower_than_those_of_its_parts():
    generator = np.random.default_rng(0)
    parts = [AttackResult(0.7, generator.normal(0.7, 0.05, size=200), 0.1) for _ in range(9)]
    one, all_ = average_leakage("it", parts[:1]), average_leakage("it", parts)
    assert all_.auc == pytest.approx(0.7)
    assert 2 < (one.high - one.low) / (all_.high - all_.low) < 4.5, "a third, for nine clients"
    people = AttackData(generator.normal(size=(60, 2)), generator.integers(2, size=60))
    [alone] = [each for each in estimate_leakage(people, people) if each.attacker == "MLP"]
    assert average_leakage("MLP", [run_attacks(train_attackers(people), people)["MLP"]]) == alone


def test_random_attackers_are_beyond_chance_in_one_of_twenty_audits_and_good_ones_always():
    """Nine attackers in an audit, each tested on three clients of forty people."""
    generator, labels = np.random.default_rng(0), np.arange(40) % 2
    [even] = run_attacks(
        {"it": lambda h: h[:, 0]}, AttackData(generator.normal(size=(40, 1)), labels)
    ).values()

    def report(strength=0.0):
        scores = generator.normal(size=(3, 40)) + strength * labels
        return [even._replace(auc=auc(score, labels)) for score in scores]

    alarms = sum(any(beyond_chance(report(), comparisons=9) for _ in range(9)) for _ in range(200))
    assert 2 <= alarms <= 18
    assert beyond_chance(report(strength=1.5), comparisons=9)


# runs


def people(classes=2, clients=3):
    """The label depends on the first input, attribute 0 on the second, attribute 1 on none."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(clients):
        x, group = (
            torch.randn(120, 5, generator=generator),
            torch.randint(2, (120, 2), generator=generator),
        )
        x[:, 1] += 3 * group[:, 0]
        data.append(
            (
                x,
                torch.bucketize(x[:, 0].contiguous(), torch.linspace(-0.5, 0.5, classes + 1)[1:-1]),
                group,
            )
        )
    return data


def of_three_classes():
    return people(classes=3)


def with_twos():
    return [(x, y, 2 * group) for x, y, group in people()]


def all_alike():
    return [(x, y, torch.ones_like(group)) for x, y, group in people()]


def uneven():
    """Clients without one group, without one class, without either, and without test data.

    There is one attribute.
    """
    (x, y, group), (x1, y1, group1), third = ((x, y, group[:, 0]) for x, y, group in people())
    return [
        (x, y, torch.ones_like(group)),
        (x1, torch.ones_like(y1), group1),
        third,
        tuple(part[:2] for part in third),
    ]


class Constant(nn.Module):
    def forward(self, x):
        return 0 * x[:, :3]


def encoded_by(encoder, width):
    model = nn.Sequential()
    model.add_module("encoder", encoder)
    model.add_module("head", nn.Linear(width, 2))
    return model


def open_model():
    return encoded_by(nn.Identity(), 5)


def closed_model():
    return encoded_by(Constant(), 3)


STUDY = """
name = "small"
[data]
source = "tests.studies.test_audit:people"
[model]
name = "bottleneck_mlp"
hidden = [8]
bottleneck = 3
noise_std = 0.05
[split]
local = ["encoder"]
[plan]
rounds = 2
clients_per_round = 3
batch_size = 25
[run]
engine = "looped"
"""
EXPERIMENTS = {
    "FedAvg": {"algorithm": "fedavg"},
    "Local": {"algorithm": "local_only"},
    "MTL": {"algorithm": "mtl"},
    "LG": {"algorithm": "lg_fedavg"},
    "LG + Adv": {
        "algorithm": "lg_fedavg",
        "pretext": {"kind": "adversary", "layer": "encoder", "weight": 2, "hidden": [8]},
    },
}


def run_small(folder, *changes, experiments=("LG",), **more):
    table = {
        **tomllib.loads(STUDY),
        "experiments": {name: EXPERIMENTS[name] for name in experiments},
        **more,
    }
    for _ in run_study(from_dict(table, changes), folder):
        pass
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of every algorithm."""
    return run_small(tmp_path_factory.mktemp("run_folder") / "run", experiments=EXPERIMENTS)


@pytest.fixture
def saved(run_folder, tmp_path):
    """A copy of it."""
    return shutil.copytree(run_folder, tmp_path / "run")


def found_in(folder):
    return json.loads((folder / "audit.json").read_text())


def checksums(folder):
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "audits" not in path.relative_to(folder).parts
    ]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def aucs(report, knowledge):
    return {row["attacker"]: row["auc"] for row in report["leaks"] if row["knowledge"] == knowledge}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_algorithm_can_be_audited(run_folder, experiment):
    audit = SavedAudit(open_experiment(run_folder, experiment), AuditQuery("0", encoders=1))
    report = audit.figures()
    assert (audit.name, audit.settings.layer, audit.layer_reason) == (
        "attribute 0",
        "encoder",
        "the last module of the local part",
    )
    assert [(row["knowledge"], row["averaged_over"]) for row in report["leaks"][::3]] == [
        ("own", 3),
        ("pooled", 1),
        ("strong", 1),
    ]
    assert len(report["leaks"]) == 9
    assert all(0 <= row["low"] <= row["auc"] <= row["high"] <= 1 for row in report["leaks"])
    [result] = json.loads(
        (
            run_folder
            / "experiments"
            / audit.saved.experiment.lower().replace(" + ", "-")
            / "result.json"
        ).read_text()
    )
    assert [row["figure"] for row in report["clients"]] == [
        pytest.approx(of["local_test"]) for of in result["clients"]
    ]
    assert (
        sum(row["people"] for row in report["groups"])
        == sum(sum(row["people"]) for row in report["clients"])
        == 72
    )
    assert 0 <= report["demographic_parity_difference"] <= 1
    if experiment != "LG + Adv":
        assert max(aucs(report, "pooled").values()) > 0.7, (
            "a few steps do not hide what stands in the input"
        )


@pytest.mark.parametrize(("model", "reads"), [("open_model", True), ("closed_model", False)])
def test_an_identity_representation_leaks_and_a_constant_one_does_not(tmp_path, model, reads):
    run_small(
        tmp_path, "plan.rounds=1", f"model.name=tests.studies.test_audit:{model}", "split.local=[]"
    )
    report = SavedAudit(open_experiment(tmp_path), AuditQuery("attribute 0", encoders=1)).figures()
    if reads:
        assert all(
            row["beyond_chance"]
            for row in report["leaks"]
            if row["attacker"] == "logistic regression"
        )
        assert max(aucs(report, "pooled").values()) > 0.95
    else:
        assert {(row["auc"], row["beyond_chance"]) for row in report["leaks"]} == {(0.5, False)}
        assert (report["demographic_parity_difference"], report["equalized_odds_difference"]) == (
            0,
            0,
        )
        assert {row["leak"] for row in report["clients"]} == {0.5}


def test_the_audit_of_a_saved_run_is_that_of_its_study(tmp_path):
    run_small(tmp_path, audit={"layer": "encoder", "encoders": 2})
    [result] = json.loads((tmp_path / "experiments" / "lg" / "result.json").read_text())
    audit = SavedAudit(open_experiment(tmp_path), AuditQuery("1", encoders=2))
    report, study = audit.figures(), result["audit"]["attributes"][1]
    assert audit.layer_reason == "from the study's [audit]"
    assert max(aucs(report, "pooled").values()) == study["pooled"]
    assert np.mean([row["leak"] for row in report["clients"]]) == pytest.approx(study["own"])


def test_a_client_without_a_group_or_a_class_has_a_dash(tmp_path, capsys):
    run_small(tmp_path, "data.source=tests.studies.test_audit:uneven")
    assert run("audit", tmp_path, "--attribute", "0", "--encoders", "1") == 0
    report = found_in(tmp_path / "audits" / "attribute-0-lg")
    alone, one_class, plain, tiny = report["clients"]
    assert alone["people"][0] == 0
    assert (
        alone["demographic_parity_difference"],
        alone["equalized_odds_difference"],
        alone["leak"],
    ) == (None, None, None)
    assert one_class["demographic_parity_difference"] is not None
    assert one_class["equalized_odds_difference"] is None
    assert None not in plain.values()
    assert (tiny["people"], tiny["figure"], tiny["leak"]) == ([0, 0], None, None)
    assert report["leaks"][0]["averaged_over"] == 2, "the mean is over those that can be asked"
    page = (tmp_path / "audits" / "attribute-0-lg" / "report.html").read_text()
    assert "<td>–</td>" in page
    assert "The mean over 2 clients" in page


def test_with_more_classes_there_is_accuracy_by_group_only(tmp_path, capsys):
    run_small(tmp_path, "data.source=tests.studies.test_audit:of_three_classes")
    assert run("audit", tmp_path, "--attribute", "0", "--encoders", "1") == 0
    printed = capsys.readouterr().out
    report = found_in(tmp_path / "audits" / "attribute-0-lg")
    assert (report["classes"], report["demographic_parity_difference"]) == (3, None)
    assert all(0 <= row["figure"] <= 1 for row in report["groups"])
    page = (tmp_path / "audits" / "attribute-0-lg" / "report.html").read_text()
    assert "The data have 3 classes" in page
    assert "selected" not in printed
    assert "odds difference" not in page


# the command


def test_the_command_prints_and_saves_and_does_not_change_the_run(saved, capsys):
    before = checksums(saved)
    assert (
        run("audit", saved, "--attribute", "attribute 0", "--experiment", "LG", "--encoders", "2")
        == 0
    )
    place, printed = saved / "audits" / "attribute-0-lg", capsys.readouterr().out
    assert checksums(saved) == before
    assert sorted(path.name for path in place.iterdir()) == ["audit.json", "report.html"]
    for words in (
        "the output of 'encoder'",
        "50 is guessing",
        "logistic regression",
        "own rows",
        "Equalised odds",
        "report: ",
    ):
        assert words in printed
    report, first, page = (
        found_in(place),
        (place / "audit.json").read_bytes(),
        (place / "report.html").read_text(),
    )
    assert (
        report["command"]
        == f"glocal audit {saved} --attribute 'attribute 0' --experiment LG --encoders 2"
    )
    assert (report["run"], report["experiment"], report["algorithm"], report["seed"]) == (
        "run",
        "LG",
        "lg_fedavg",
        0,
    )
    best = max(report["leaks"], key=lambda row: row["auc"])
    parity = 100 * report["demographic_parity_difference"]
    for words in (
        f"AUC of {100 * best['auc']:.1f} [{100 * best['low']:.1f}, {100 * best['high']:.1f}]",
        "can be predicted better than by guessing",
        f"Demographic parity difference: {parity:.1f} points.",
        f"Equalised odds difference: {100 * report['equalized_odds_difference']:.1f} points.",
        "with attribute 0 = 1",
        "The mean over 2 encoders",
        "prefers-color-scheme: dark",
        "3 clients",
    ):
        assert words in page, words
    assert page.count('<svg class="plot"') == 1
    assert "http" not in page.replace("http://www.w3.org", ""), "it opens offline"
    (place / "report.html").unlink()
    assert run("report", place) == 0
    assert (place / "report.html").read_text() == page
    assert run("audit", saved, "--attribute", "0", "--experiment", "LG", "--encoders", "2") == 0, (
        "anew, over the old one"
    )
    assert json.loads((place / "audit.json").read_text()) == {
        **json.loads(first),
        "command": found_in(place)["command"],
    }
    assert checksums(saved) == before


def test_an_attribute_that_is_not_in_the_data_does_not_leak(tmp_path):
    """With this seed the best of nine attackers is above chance, if one does not correct for it."""
    run_small(tmp_path / "run", "plan.seed=1", experiments=("FedAvg",))
    options = ["--attribute", "1", "--encoders", "1", "--out", tmp_path / "audit"]
    assert run("audit", tmp_path / "run", *options) == 0
    assert max(row["low"] for row in found_in(tmp_path / "audit")["leaks"]) > 0.5
    page = (tmp_path / "audit" / "report.html").read_text()
    assert "attribute 1 cannot be predicted better than by guessing" in page


def test_each_seed_has_a_folder(tmp_path):
    run_small(tmp_path, "plan.seeds=2", "plan.rounds=1")
    assert run("audit", tmp_path, "--attribute", "0", "--seed", "1", "--encoders", "1") == 0
    assert [path.name for path in (tmp_path / "audits").iterdir()] == ["attribute-0-lg-seed-1"]
    assert found_in(tmp_path / "audits" / "attribute-0-lg-seed-1")["seed"] == 1


MISTAKES = {
    "attribute": (
        ["--attribute", "age"],
        "audit: there is no attribute 'age'; there are attribute 0, attribute 1",
    ),
    "number": (["--attribute", "2"], "there is no attribute '2'"),
    "module": (
        ["--attribute", "0", "--layer", "encodr"],
        "there is no module 'encodr' to take the representation from; did you mean 'encoder'",
    ),
    "experiment": (["--attribute", "0", "--experiment", "LGG"], "did you mean 'LG'?"),
    "seed": (["--attribute", "0", "--seed", "7"], "there is no seed 7"),
    "encoders": (["--attribute", "0", "--encoders", "0"], "encoders is 0; a whole number from 1"),
    "nothing": ([], "Missing option '--attribute'"),
}


@pytest.mark.parametrize(("options", "words"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_nothing_is_written(run_folder, capsys, options, words):
    assert run("audit", run_folder, *options) == 2
    assert words in complaint(capsys)
    assert not (run_folder / "audits").exists()


WRONG_DATA = {
    "no columns": (
        "digits",
        "these data (digits) have no protected columns; those of adult have race, sex",
    ),
    "values": (
        "tests.studies.test_audit:with_twos",
        "attribute 0 has the value 2; a protected attribute must be 0 or 1",
    ),
    "one group": (
        "tests.studies.test_audit:all_alike",
        "everybody in the training data has the same attribute 0",
    ),
}


@pytest.mark.parametrize(("source", "words"), WRONG_DATA.values(), ids=WRONG_DATA)
def test_data_that_cannot_be_audited_are_refused(tmp_path, capsys, source, words):
    run_small(tmp_path / "run", "plan.rounds=1", f"data.source={source}", "data.clients=5")
    assert run("audit", tmp_path / "run", "--attribute", "0") == 2
    assert words in complaint(capsys)
    assert not (tmp_path / "run" / "audits").exists()


def test_without_fairlearn_one_line_says_how_to_get_it(run_folder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "fairlearn.metrics", None)
    assert run("audit", run_folder, "--attribute", "0") == 2
    assert "install it with pip install 'glocal[fairness]'" in complaint(capsys)
    assert not (run_folder / "audits").exists()


def test_output_folders_with_other_files_are_refused(run_folder, tmp_path, capsys):
    assert run("audit", run_folder, "--attribute", "0", "--out", run_folder) == 2
    assert "holds other files (settings.json); choose another --out" in complaint(capsys)
    (tmp_path / "file").write_text("in the way")
    assert run("audit", run_folder, "--attribute", "0", "--out", tmp_path / "file" / "new") == 2
    assert "audit: " in (line := complaint(capsys))
    assert "choose another --out" in line


def test_runs_that_saved_their_metrics_only_are_refused(tmp_path, capsys):
    run_small(tmp_path, "plan.rounds=1", "run.save=metrics")
    assert run("audit", tmp_path, "--attribute", "0") == 2
    assert "saved its metrics only" in complaint(capsys)
    assert run("audit", tmp_path / "none", "--attribute", "0") == 2
    assert "does not exist" in complaint(capsys)


# where the representation is


def test_the_outermost_modules_are_listed_in_order_of_their_calls():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)
            self.blocks = nn.ModuleList(
                [nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 3)]
            )
            self.never = nn.Linear(9, 9)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    assert outer_modules(Late(), torch.zeros(1, 4)) == ["blocks.0", "blocks.1", "last"]
    assert outer_modules(nn.Sequential(Late()), torch.zeros(1, 4)) == [
        "0.blocks.0",
        "0.blocks.1",
        "0.last",
    ]
    assert outer_modules(nn.Sequential(nn.Linear(4, 2)), torch.zeros(1, 4)) == ["0"]


USUAL = {
    "end of the local part": (SplitSettings(local=("encoder",)), "encoder"),
    "the other side named": (SplitSettings(shared=("head",)), "encoder"),
    "local at the other end": (SplitSettings(local=("head",)), "noise"),
    "half a module": (SplitSettings(local=("encoder.layer1",)), "noise"),
    "all local": (SplitSettings(local=("encoder", "head")), "noise"),
    "no split": (SplitSettings(), "noise"),
}


@pytest.mark.parametrize(("split", "layer"), USUAL.values(), ids=USUAL)
def test_the_representation_is_where_the_local_part_ends_or_before_the_output(
    run_folder, split, layer
):
    saved = open_experiment(run_folder, "FedAvg")
    saved = saved._replace(settings=replace(saved.settings, split=split))
    assert default_representation(saved)[0] == layer


def with_model(saved, model):
    """The same experiment, with another network in its task."""
    federation = saved.trained_federation
    task = replace(federation.task, model=model)
    algorithm = replace(federation.algorithm, task=task)
    return saved._replace(trained_federation=federation._replace(algorithm=algorithm))


def test_the_default_layer_of_a_sequential_network_is_before_its_last(run_folder):
    saved = open_experiment(run_folder, "FedAvg")
    names = {None: "relu2", "layer1": "layer1", "layer2": "relu2"}
    model = nn.Sequential()
    for place, width in enumerate((5, 4), start=1):
        model.add_module(f"layer{place}", nn.Linear(width, 4))
        model.add_module(f"relu{place}", nn.ReLU())
    model.add_module("layer3", nn.Linear(4, 2))
    model.add_module("softmax", nn.Softmax(1))
    saved = with_model(saved, model)
    for local, layer in names.items():
        split = SplitSettings(local=None if local is None else (local,))
        assert (
            default_representation(saved._replace(settings=replace(saved.settings, split=split)))[0]
            == layer
        )
    single = with_model(saved, nn.Sequential(nn.Linear(5, 2)))
    with pytest.raises(InputError, match="no module before its output"):
        default_representation(
            single._replace(settings=replace(saved.settings, split=SplitSettings()))
        )


def test_a_module_whose_output_has_no_rows_is_refused(run_folder):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.head, self.idle = nn.GRU(5, 3), nn.Linear(3, 2), nn.Linear(1, 1)

        def forward(self, x):
            return self.head(self.memory(x)[0])

    model = world.seeded(Recurrent)
    saved = with_model(open_experiment(run_folder, "FedAvg"), model)
    federation = saved.trained_federation
    state = federation.state._replace(shared={**model.state_dict()})
    saved = saved._replace(trained_federation=federation._replace(state=state))
    for layer in ("memory", "idle"):
        with pytest.raises(
            InputError, match=f"the output of the module '{layer}' is not one tensor"
        ):
            SavedAudit(saved, AuditQuery("0", layer=layer))


@needs_data("adult")
def test_adult_is_audited_by_the_names_of_its_columns(tmp_path, capsys):
    few = ("data.partition=iid", "data.clients=40", "data.keep_clients=3", "plan.rounds=4")
    run_small(tmp_path, "data.source=adult", *few, experiments=("FedAvg",))
    assert run("audit", tmp_path, "--attribute", "age") == 2
    assert "there is no attribute 'age'; there are race, sex" in complaint(capsys)
    assert run("audit", tmp_path, "--attribute", "sex", "--encoders", "1") == 0
    report = found_in(tmp_path / "audits" / "sex-fedavg")
    assert sum(row["people"] for row in report["groups"]) == pytest.approx(3 * 15_470 / 40, abs=3)
    assert max(aucs(report, "pooled").values()) > 0.6, (
        "what says something of income says something of sex"
    )
    assert (
        "people with sex = Female"
        in (tmp_path / "audits" / "sex-fedavg" / "report.html").read_text()
    )
