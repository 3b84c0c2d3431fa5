"""Metrics by name: undefined for some clients, lower is better, in float64."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import glocal
from glocal import FederatedData
from glocal.cli.tables import print_table
from glocal.core.files import read_json, read_rows
from glocal.report import write_report
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import world

CLIENTS, ONE_CLASS = 10, (2, 5, 7)
UNDEFINED = "3 of 10 clients undefined"
PLAN = {"rounds": 2, "clients_per_round": 3, "batch_size": 5, "progress": False}
MODEL = nn.Sequential(nn.Linear(world.FEATURES, 4), nn.Tanh(), nn.Linear(4, 2))


def two_classes():
    """Clients with both classes in their test data, and some with one class only."""
    clients = []
    for number, (x, _) in enumerate(world.clients([12] * CLIENTS)):
        y = torch.arange(12) % 2
        clients.append((x, torch.zeros_like(y) if number in ONE_CLASS else y))
    return FederatedData.from_tensors(clients, test=0.4, validation=0.2)


def binary(metrics=("auroc", "accuracy")):
    return glocal.FedAvg(
        glocal.classification(MODEL, metrics=metrics), optimizer=glocal.SGD(lr=0.1)
    )


# ---- undefined for some clients


def test_clients_for_which_a_metric_is_undefined_are_left_out_and_counted():
    result = glocal.fit(binary(), two_classes(), **PLAN)
    rows = result.metrics.where(split="test", metric="auroc")
    undefined = [row.client for row in rows if row.value is None]
    assert undefined == list(ONE_CLASS)
    defined = [row.value for row in rows if row.value is not None]
    assert result.local_test == pytest.approx(sum(defined) / len(defined))
    local = result.group().as_dict()["metrics"]["auroc"]["local_test"]
    assert (local["mean"], local["undefined"]) == (result.local_test, 3)
    assert result.metrics.undefined("accuracy") == 0


def test_the_result_shows_how_many_clients_are_undefined():
    one = glocal.fit(binary(), two_classes(), **PLAN)
    assert f"New Test {100 * one.new_test:.1f} % ({UNDEFINED})" in repr(one)
    assert repr(one).count("undefined") == 1, "the accuracy is defined for everybody"
    assert UNDEFINED in one._repr_html_()
    assert "undefined" in one.metrics.where(metric="auroc", split="test")._repr_html_()
    two = glocal.fit(binary(), two_classes(), seeds=2, **PLAN)
    assert "6 of 20 clients over 2 seeds undefined" in repr(two)


def test_a_metric_that_nobody_has_is_undefined_and_never_0(tmp_path):
    clients = [(x, torch.zeros(len(x), dtype=torch.int64)) for x, _ in world.clients([12] * 4)]
    data = FederatedData.from_tensors(clients)
    result = glocal.fit(binary("auroc"), data, select="max auroc", **PLAN)
    assert result.local_test is None
    assert result.new_test is None
    assert "auroc undefined, New Test undefined (4 of 4 clients undefined)" in repr(result)
    loaded = glocal.load(result.save(tmp_path), binary("auroc"))
    assert repr(loaded) == repr(result)


def test_terminal_and_report_show_it_too(tmp_path, capsys):
    own = "tests.federate.test_metrics"
    settings = {
        "data": {"source": f"{own}:two_classes"},
        "model": {"hidden": [4]},
        "task": {"metrics": ["auroc", "accuracy"]},
        "plan": {"rounds": 1, "clients_per_round": 2},
        "experiments": {"first": {"algorithm": "fedavg"}},
    }
    list(run_study(from_dict(settings), tmp_path))
    results = read_json(tmp_path / "experiments/first/result.json", list)
    print_table({"first": results})
    shown = capsys.readouterr().out
    assert f"first: auroc: {UNDEFINED}, left out of the mean" in shown
    assert shown.count("undefined") == 1
    page = write_report(tmp_path).read_text()
    assert f"Left out of the mean: first: auroc: {UNDEFINED}." in page
    assert page.count("clients undefined") == 1


def test_no_figure_is_cut_off_in_a_narrow_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    settings = {
        "data": {"source": "tests.federate.test_metrics:two_classes"},
        "model": {"hidden": [4]},
        "task": {"metrics": ["loss"]},
        "plan": {"rounds": 1, "clients_per_round": 2, "seeds": 3},
        "experiments": {"an experiment with a long name": {"algorithm": "fedavg"}},
    }
    list(run_study(from_dict(settings), tmp_path))
    folder = next((tmp_path / "experiments").iterdir())
    print_table({"an experiment with a long name": read_json(folder / "result.json", list)})
    shown = capsys.readouterr().out
    assert "an experiment with a long name" in shown
    assert "…" not in shown


# ---- lower is better


def numbers(offset=0.0):
    clients = [(x, x[:, 0] + offset) for x, _ in world.clients([12] * 4)]
    return FederatedData.from_tensors(clients, validation=0.2)


def regression(lr=0.05, metrics=("rmse", "mae"), dtype=torch.float32):
    model = world.seeded(lambda: nn.Linear(world.FEATURES, 1)).to(dtype)
    return glocal.FedAvg(glocal.regression(model, metrics=metrics), optimizer=glocal.SGD(lr=lr))


EVERY = glocal.Evaluation(every=1)
LONG = {**PLAN, "rounds": 8, "evaluation": EVERY}


@pytest.mark.parametrize("select", ["best", "min mae", "min loss"])
def test_the_round_with_the_lowest_error_is_selected(select, tmp_path):
    """The step is so large that the error goes up and down."""
    result = glocal.fit(regression(lr=0.4), numbers(), select=select, folder=tmp_path, **LONG)
    name = {"best": "rmse"}.get(select, select.removeprefix("min "))
    scores = [row["metrics"][name] for row in read_rows(tmp_path / "rows.jsonl")]
    assert scores.index(min(scores)) not in (0, len(scores) - 1)
    assert result.group().selected_round == 1 + scores.index(min(scores))
    figure = result.group().validation[name].summary().mean
    assert figure == pytest.approx(min(scores), rel=1e-6)


def test_the_worst_tenth_of_an_error_is_the_highest():
    result = glocal.fit(regression(), numbers(), **PLAN).group()
    local = result.as_dict()["metrics"]["rmse"]["local_test"]
    assert local["worst_tenth"] == pytest.approx(max(result.by_client))


def of_small_outputs(outputs, targets):
    """A metric that is undefined once outputs are large."""
    mean = float(outputs.mean())
    return mean if mean < 30 else None


def test_a_last_round_without_a_score_is_not_selected(tmp_path):
    growing = glocal.Metric("growing", of_client=of_small_outputs)
    algorithm = regression(lr=0.02, metrics=[growing])
    result = glocal.fit(algorithm, numbers(100.0), select="max growing", folder=tmp_path, **LONG)
    scores = [row["validation"] for row in read_rows(tmp_path / "rows.jsonl")]
    assert scores[0] is not None
    assert scores[-1] is None
    known = [score for score in scores if score is not None]
    assert result.group().selected_round == 1 + scores.index(max(known))


def test_an_error_that_falls_does_not_stop_a_run_and_one_that_rests_does():
    going = glocal.fit(regression(), numbers(), callbacks=[glocal.EarlyStopping(2)], **LONG)
    assert going.group().rounds == 8
    demanding = glocal.EarlyStopping(patience=2, min_improvement=10.0)
    stopped = glocal.fit(regression(), numbers(), callbacks=[demanding], **LONG)
    assert stopped.group().rounds == 3
    assert stopped.group().stopped == "no improvement in 2 evaluations"


@pytest.mark.parametrize(
    ("higher_is_better", "scores", "stops"),
    [
        (False, [3.0, 2.0, 1.0], False),
        (False, [1.0, 2.0, 3.0], True),
        (True, [1.0, 2.0, 3.0], False),
        (True, [3.0, 2.0, 1.0], True),
        (True, [3.0, 2.0], False),
        (False, [1.0, 2.0, 0.5], False),
    ],
)
def test_early_stopping_goes_by_the_direction_of_the_criterion(higher_is_better, scores, stops):
    criterion = SimpleNamespace(higher_is_better=higher_is_better)
    reasons = []
    run = SimpleNamespace(scores=scores, criterion=criterion, stop=reasons.append)
    glocal.EarlyStopping(patience=2).on_evaluation(run, [])
    assert bool(reasons) == stops


def test_a_run_that_was_stopped_early_and_resumed_stops_in_the_same_round(tmp_path):
    data, stopping = numbers(), glocal.EarlyStopping(patience=4, min_improvement=10.0)
    whole = glocal.fit(regression(), data, callbacks=[stopping], folder=tmp_path / "a", **LONG)
    short = {**LONG, "rounds": 2}
    glocal.fit(regression(), data, callbacks=[stopping], folder=tmp_path / "b", **short)
    again = glocal.fit(regression(), data, callbacks=[stopping], folder=tmp_path / "b", **LONG)
    assert whole.group().rounds == again.group().rounds == 5
    assert whole.metrics.rows == again.metrics.rows


# ---- float64


@pytest.mark.parametrize(
    "engine",
    ["looped", "vmapped", glocal.EngineConfig("workers", workers=2), "auto"],
    ids=["looped", "vmapped", "workers", "auto"],
)
def test_a_float64_model_trains_in_float64_on_numbers_of_any_type(engine):
    """Numbers of single precision would differ by 1e-8 and more."""
    expected = glocal.fit(regression(dtype=torch.float64), numbers(), engine="looped", **PLAN)
    for dtype in (torch.float32, torch.float64):
        clients = [(x.to(dtype), x[:, 0]) for x, _ in world.clients([12] * 4)]
        data = FederatedData.from_tensors(clients, validation=0.2)
        result = glocal.fit(regression(dtype=torch.float64), data, engine=engine, **PLAN)
        state = result.group().state.alone()
        assert {tensor.dtype for tensor in state.shared.values()} == {torch.float64}
        assert world.gap(state, expected.group().state.alone(), 4) < 1e-12
        assert result.local_test == pytest.approx(expected.local_test, abs=1e-12)


def test_without_any_test_data_a_figure_is_undefined():
    clients = [(torch.randn(1, 4), torch.tensor([number % 2])) for number in range(5)]
    algorithm = glocal.FedAvg(glocal.classification(nn.Linear(4, 2)), optimizer=glocal.SGD(lr=0.1))
    result = glocal.fit(algorithm, glocal.FederatedData.from_tensors(clients), **PLAN)
    assert result.local_test is None
    assert repr(result) == "Result(FedAvg: 5 clients, 1 seed; accuracy undefined)"


def test_names_of_metrics_are_those_that_a_table_is_asked_for():
    result = glocal.fit(regression(), numbers(), **PLAN)
    assert result.metrics.mean("mae") != result.metrics.mean("rmse")
    with pytest.raises(glocal.InputError, match="metric is 'maee'; did you mean 'mae'"):
        result.metrics.mean("maee")
