"""Seven tasks from fit to report: numbers, labels, characters, dicts, objects, words, no targets.

Each is fitted once, with a round selected by its own metric; the tests share that result.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional

import glocal
from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.files import read_json, read_rows
from glocal.core.values import map_tensors, tensors_of
from glocal.federate.preparation import prepare_data
from glocal.personalize import onboarding
from glocal.report import write_report
from glocal.studies import run_study
from glocal.studies.settings import from_dict
from tests.support import tasks, world
from tests.support.command_line import complaint, run
from tests.support.tasks import TASKS

ROUNDS = 6
PLAN = {"clients_per_round": 3, "local_epochs": 2, "batch_size": 4, "progress": False}
EVALUATION = glocal.Evaluation(every=1)
FEW = glocal.JoinPlan(epochs=2)


def fit(case, *, dtype=torch.float32, data=None, rounds=ROUNDS, engine="vmapped", **more):
    return glocal.fit(
        case.algorithm(dtype),
        data or case.data(),
        rounds=rounds,
        select=case.select,
        evaluation=EVALUATION,
        engine=engine,
        **PLAN,
        **more,
    )


@pytest.fixture(scope="module", params=TASKS)
def fitted(request, tmp_path_factory):
    """A task's case, its data, its result and the folder of its run."""
    case, folder = TASKS[request.param], tmp_path_factory.mktemp("run")
    data = case.data()
    result = fit(case, data=data, folder=folder)
    return SimpleNamespace(case=case, data=data, result=result, folder=folder)


# ---- fits, selects, tests


def test_it_learns_and_the_round_with_the_best_score_is_tested(fitted):
    rows = read_rows(fitted.folder / "rows.jsonl")
    losses = [row["loss"] for row in rows]
    assert losses[-1] < losses[0]
    direction, name = fitted.case.select.split()
    scores = [row["metrics"][name] for row in rows]
    best = min(scores) if direction == "min" else max(scores)
    assert fitted.result.group().selected_round == 1 + scores.index(best)


def outputs_and_targets(fitted, client):
    """What a client's plain model gives for its own test data, and the targets."""
    task = fitted.result.algorithm.task
    test = prepare_data(fitted.data, task).test
    number = list(test.names).index(client)
    x, y, _ = test.of(number)
    model = fitted.result.model(client)
    with torch.no_grad():
        outputs = task.forward(model, x) if task.forward else model(x)
    return outputs, y


def expected_figure(name, outputs, targets):
    """A metric by its formula."""
    if name == "rmse":
        error = outputs.reshape(targets.shape) - targets
        return error.square().mean().sqrt()
    if name == "mae":
        return (outputs.reshape(targets.shape) - targets).abs().mean()
    if name == "label_accuracy":
        return ((outputs > 0) == (targets > 0.5)).double().mean()
    if name == "perplexity":
        return functional.cross_entropy(outputs, targets).exp()
    if name == "loss":
        return functional.cross_entropy(outputs, targets)
    known = targets != tasks.PAD
    return (outputs.argmax(1) == targets)[known].double().mean()


def test_figures_are_those_of_the_plain_models(fitted):
    names = {"rmse", "mae", "label_accuracy", "perplexity", "accuracy", "loss"}
    compared = 0
    for row in fitted.result.metrics.where(split="test"):
        if row.metric in names:
            expected = expected_figure(row.metric, *outputs_and_targets(fitted, row.client))
            assert row.value == pytest.approx(float(expected), rel=1e-5, abs=1e-6)
            compared += 1
    assert compared >= len(tasks.SIZES)


def test_every_metric_is_tested_on_new_data_too(fitted):
    names = [metric.name for metric in fitted.result.algorithm.task.all_metrics]
    new = {row.metric: row.value for row in fitted.result.metrics.where(split="new")}
    assert [*new] == names
    assert all(value is not None for value in new.values())
    assert {row.split for row in fitted.result.metrics} == {"validation", "test", "new"}


def test_evaluated_on_the_same_data_the_figures_are_the_same(fitted):
    again = fitted.result.evaluate(fitted.data)
    for split in ("validation", "test", "new"):
        before = [row.value for row in fitted.result.metrics.where(split=split)]
        assert [row.value for row in again.where(split=split)] == pytest.approx(before, nan_ok=True)


# ---- saves, loads, resumes


def test_a_saved_result_loads_with_the_same_models_and_figures(fitted, tmp_path):
    home = fitted.result.save(tmp_path / "saved")
    loaded = glocal.load(home, fitted.case.algorithm())
    assert loaded.metrics.rows == fitted.result.metrics.rows
    assert repr(loaded) == repr(fitted.result)
    for client in fitted.data.names:
        assert trees.same_bits(loaded.state_dict(client), fitted.result.state_dict(client))


def test_a_run_of_a_folder_goes_on_to_the_same_bits(fitted, tmp_path):
    fit(fitted.case, rounds=3, folder=tmp_path)
    resumed = fit(fitted.case, folder=tmp_path)
    states = [each.group().state.alone() for each in (resumed, fitted.result)]
    assert world.same_bits(*states, len(tasks.SIZES))
    assert resumed.metrics.rows == fitted.result.metrics.rows
    rows = [folder / "rows.jsonl" for folder in (tmp_path, fitted.folder)]
    assert rows[0].read_bytes() == rows[1].read_bytes()


def test_a_client_s_saved_model_loads_as_a_plain_module(fitted):
    client = fitted.data.names[0]
    group = fitted.result.group()
    name = "untrained" if not group.times_sampled[0] else f"client-{client}"
    [path] = fitted.folder.glob(f"models/seed-0/{name}.safetensors")
    loaded = glocal.load_model(path, fitted.case.model())
    assert trees.same_bits(loaded.state_dict(), fitted.result.state_dict(client))


# ---- adapts a new client


def new_client(fitted, rows=5):
    """A few examples of the last client, as the user has them."""
    train = fitted.data.train
    examples = train.examples.take(train.rows[-1][:rows])
    return Examples(examples.x, examples.y if train.examples.has_targets else examples.x)


def loss_of(federation, params, examples):
    task = federation.task
    metric = task.find_metric("loss")
    outputs = task.predict(params, examples.x, torch.ones(examples.num_rows, dtype=torch.bool))
    sums, weights = metric.per_example(outputs, examples.y)
    return float(sums.sum() / weights.sum())


def test_a_new_client_adapts_on_a_few_targets(fitted):
    federation = glocal.TrainedFederation.from_result(fitted.result)
    some = new_client(fitted)
    before = {name: tensor.clone() for name, tensor in federation.state.shared.items()}
    joined = glocal.join(federation, some, join_plan=FEW, engine="looped")
    assert trees.same_bits(joined.state.shared, before)
    untrained = federation.algorithm.personal(before, federation.state.private.initial)
    adapted = joined.params(federation.algorithm)
    assert loss_of(federation, adapted, some) < loss_of(federation, untrained, some)
    assert onboarding.new_client_figure(federation, joined, some) is not None


def test_a_new_client_joins_rounds_with_others(fitted):
    federation = glocal.TrainedFederation.from_result(fitted.result)
    plan = glocal.JoinPlan(epochs=0, rounds=1, existing_clients=2)
    joined = glocal.join(
        federation, new_client(fitted), existing_data=fitted.data.train, join_plan=plan
    )
    assert world.distance(joined.state.shared, federation.state.shared) > 0
    assert joined.client == len(tasks.SIZES)


def test_without_targets_a_new_client_trains_only_where_the_task_has_none(fitted):
    federation = glocal.TrainedFederation.from_result(fitted.result)
    x = new_client(fitted).x
    alone = Examples(x, x)
    task = federation.task
    if task.make_targets is not None or not fitted.data.train.examples.has_targets:
        assert glocal.join(federation, alone, join_plan=FEW, engine="looped").client == 4
        return
    with pytest.raises(InputError, match=r"have no targets, and Task\(.*cannot train") as refused:
        glocal.join(federation, alone, join_plan=FEW)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("by", ["confident", "nearest"])
def test_without_targets_an_ensemble_is_chosen_for_classes_alone(fitted, by):
    federation = glocal.TrainedFederation.from_result(fitted.result)
    x = new_client(fitted).x
    everyone = onboarding.select_ensemble(federation, x)
    outputs = onboarding.new_client_ensemble_outputs(federation, everyone, x)
    assert len(outputs) == len(tensors_of(x)[0])
    if fitted.case.has_classes:
        [chosen] = onboarding.select_ensemble(federation, x, by=by, count=1)
        assert chosen in everyone
        classes = onboarding.new_client_ensemble_classes(federation, [chosen], x)
        assert len(classes) == len(outputs)
        return
    for refuse in (
        lambda: onboarding.select_ensemble(federation, x, by=by, count=1),
        lambda: onboarding.new_client_ensemble_classes(federation, everyone, x),
    ):
        with pytest.raises(InputError, match="needs probabilities of classes") as refused:
            refuse()
        assert "\n" not in str(refused.value)


def test_targets_that_do_not_count_are_left_out_where_only_the_new_client_has_some():
    """The task of the federation has not seen any."""
    case = TASKS["object output"]
    federation = glocal.TrainedFederation.from_result(fit(case, rounds=1))
    x, y = torch.randn(6, 4), torch.tensor([0, 1, tasks.PAD, 2, tasks.PAD, 0])
    known = Examples(x[y != tasks.PAD], y[y != tasks.PAD])
    states = []
    for examples in (Examples(x, y), known):
        plan = replace(federation.plan, batch_size=6)
        whole = federation._replace(plan=plan)
        joined = glocal.join(whole, examples, join_plan=FEW, engine="looped")
        states.append(joined.state.private.of(joined.client))
    assert world.distance(*states) < 1e-5


def test_numbers_of_a_new_client_are_cast_as_in_fit():
    case = TASKS["regression"]
    federation = glocal.TrainedFederation.from_result(fit(case, rounds=1, dtype=torch.float64))
    some = Examples(torch.randn(5, 10), torch.randn(5))
    joined = glocal.join(federation, some, join_plan=FEW, engine="looped")
    assert {tensor.dtype for tensor in joined.params(federation.algorithm).values()} == {
        torch.float64
    }


# ---- engines


@pytest.mark.parametrize("name", TASKS)
def test_batched_over_clients_the_numbers_are_those_of_the_loop(name):
    """Without a warning that clients cannot be batched, which would be an error here."""
    case = TASKS[name]
    results = [fit(case, dtype=torch.float64, engine=each) for each in ("looped", "vmapped")]
    states = [each.group().state.alone() for each in results]
    assert {tensor.dtype for tensor in states[0].shared.values()} == {torch.float64}
    assert world.gap(*states, len(tasks.SIZES)) < 1e-10
    for looped, vmapped in zip(*(each.metrics for each in results), strict=True):
        assert looped.value == pytest.approx(vmapped.value, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_processes_give_the_numbers_of_the_loop(name):
    case = TASKS[name]
    engine = glocal.EngineConfig("workers", workers=2, fused=False)
    states = [fit(case, dtype=torch.float64, engine=each) for each in ("looped", engine)]
    assert world.gap(*(each.group().state.alone() for each in states), len(tasks.SIZES)) < 1e-10


# ---- reports


def study(case):
    """The same task as a study, of functions of the user's."""
    where = "tests.support.tasks"
    kinds = {glocal.regression: "regression", glocal.tokens: "tokens"}
    return from_dict(
        {
            "name": "a task",
            "data": {"source": f"{where}:{case.data.__name__}"},
            "model": {"name": f"{where}:{case.model.__name__}"},
            "task": {"kind": kinds.get(case.task, f"{where}:{case.task.__name__}")},
            "plan": {"rounds": 2, "clients_per_round": 2, "batch_size": 4},
            "split": {"local": [case.local]},
            "run": {"select": case.select, "validate_every": 1, "engine": "looped"},
            "experiments": {"both": {"algorithm": "lg_fedavg"}},
        }
    )


@pytest.fixture(scope="module")
def studied(fitted, tmp_path_factory):
    """The folder of a study of the task."""
    folder = tmp_path_factory.mktemp("study")
    list(run_study(study(fitted.case), folder))
    return folder


def test_its_report_is_written_with_its_own_metric(fitted, studied):
    page = write_report(studied).read_text()
    [result] = read_json(studied / "experiments/both/result.json", list)
    first = fitted.result.algorithm.task.metric
    assert result["metric"] == first.name
    assert f"Local Test: {first.name}" in page
    if first.name != "accuracy":
        assert not re.search(r"\baccuracy\b", page.split("<h2>Settings</h2>")[0])


@pytest.mark.slow
def test_a_new_client_joins_the_study_and_its_page_is_written(fitted, studied, tmp_path, capsys):
    some = new_client(fitted, rows=8)
    arrays = {"x": some.x} if some.y is some.x else {"x": some.x, "y": some.y}
    capsys.readouterr()
    command = ["join", studied, "--data", tmp_path / "new.npz", "--epochs", "1", "--labels", "0,4"]
    if isinstance(some.x, dict):
        np.savez(tmp_path / "new.npz", **some.x)
        assert run(*command, "--name", "ward") == 2
        assert "one tensor of inputs was expected" in complaint(capsys)
        return
    np.savez(tmp_path / "new.npz", **arrays)
    assert run(*command, "--name", "ward") == 0, capsys.readouterr().err
    page = (studied / "joined/ward/report.html").read_text()
    methods = {row["method"] for row in read_json(studied / "joined/ward/join.json", dict)["rows"]}
    assert ("confident" in methods) == fitted.case.has_classes
    assert "local part" in methods, "it trains, without targets where the task has none"
    assert fitted.result.algorithm.task.metric.name in page


# ---- data


def test_a_dict_of_inputs_keeps_its_names():
    data = TASKS["dict inputs"].data()
    x, _, _ = data.train.of(0)
    assert [*x] == ["left", "right"]
    assert map_tensors(len, x) == {"left": len(x["left"]), "right": len(x["left"])}


def two_targets(outputs, targets):
    """A value per example, of targets by name."""
    error = (outputs[:, 0] - targets["sum"]).square()
    return error + functional.cross_entropy(outputs[:, 1:], targets["sign"], reduction="none")


class TwoOutputs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.left = torch.nn.Linear(2, 4)
        self.right = torch.nn.Linear(2, 3)
        self.head = torch.nn.Linear(7, 3)

    def forward(self, x):
        first, second = x
        return self.head(torch.tanh(torch.cat([self.left(first), self.right(second)], 1)))


def test_inputs_in_a_tuple_and_targets_by_name_fit_and_join():
    clients = []
    for x in tasks.inputs((4,)):
        targets = {"sum": x.sum(1), "sign": (x[:, 0] > 0).long()}
        clients.append(((x[:, :2], x[:, 2:]), targets))
    data, results = tasks.named(clients), []
    for engine in ("looped", "vmapped"):
        task = glocal.Task(world.seeded(TwoOutputs).double(), two_targets)
        algorithm = glocal.LGFedAvg(task, local="left", optimizer=glocal.SGD(lr=0.1))
        results.append(glocal.fit(algorithm, data, rounds=3, engine=engine, **PLAN))
    states = [each.group().state.alone() for each in results]
    assert world.gap(*states, len(tasks.SIZES)) < 1e-10
    assert results[0].local_test == pytest.approx(results[1].local_test)
    federation = glocal.TrainedFederation.from_result(results[0])
    some = data.train.examples.take(data.train.rows[0][:3])
    joined = glocal.join(federation, some, join_plan=FEW, engine="looped")
    assert onboarding.new_client_figure(federation, joined, some) is not None
