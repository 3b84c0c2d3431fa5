"""What clients learn and report in a deployment: any task, each of its metrics under its name."""

import json

import numpy as np
import pytest

from glocal.cli import deploy_actions
from glocal.core.files import read_json, read_rows
from glocal.core.trees import same_bits
from glocal.deploy import server_clients
from glocal.deploy.client import RunClient
from glocal.deploy.formatting import format_journal_entry
from tests.support import deployed
from tests.support.deployed_runs import private_of, run_here, simulated_run, simulator
from tests.support.world import distance


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


NUMBERS = """
def model():
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

def data(client):
    generator = torch.Generator().manual_seed(100 + client)
    x = torch.randn(SIZES[client % len(SIZES)], 6, generator=generator)
    return x, x[:, 0] - 2 * x[:, 1] + client
"""
IGNORED = """
labelled = data

def data(client):
    x, y = labelled(client)
    y[::3] = -100
    return x, y
"""


def project(folder, module="", **more):
    made = deployed.project(folder, **more)
    with (made / "federation.py").open("a") as file:
        file.write(module)
    deployed.copy_to_clients(made)
    return made


def regression(folder, **more):
    extra = '[task]\nkind = "regression"\n'
    return project(folder, NUMBERS, algorithm="fedavg", extra=extra, **more)


def simulated_metrics(folder):
    """Every metric's Local Test of the same study in the simulator."""
    table = simulator(folder).to_end().group().as_dict()
    return table["metrics"], table["clients"]


def require_same_metrics(result, folder):
    metrics, clients = simulated_metrics(folder)
    assert result["metrics"].keys() == metrics.keys()
    for name, simulated in metrics.items():
        own = result["metrics"][name]
        for key in ("higher_is_better", "is_fraction"):
            assert own[key] == simulated[key]
        for key in ("mean", "worst_tenth", "undefined"):
            assert own["local_test"][key] == pytest.approx(
                simulated["local_test"][key], rel=1e-6, abs=1e-6
            )
    first = result["metric"]
    for row, simulated in zip(result["clients"], clients, strict=True):
        assert row["test"] == pytest.approx(simulated["local_test"], rel=1e-6, abs=1e-6)
        for name in [*metrics][1:]:
            assert row["metrics"]["test"][name] == pytest.approx(
                simulated[name], rel=1e-6, abs=1e-6
            )
        assert row["test"] == row["metrics"]["test"][first]
        assert row["validation"] == row["metrics"]["validation"].get(first)


def test_numbers_are_learnt_and_reported_by_their_own_metrics(tmp_path, capsys):
    folder = regression(tmp_path / "here")
    server = run_here(folder)
    assert same_bits(server.shared, simulated_run(folder).states[0].shared)
    result = read_json(server.folder / "result.json", dict)
    assert (result["metric"], [*result["metrics"]]) == ("rmse", ["rmse", "mae", "r2"])
    assert result["local_test"] == result["metrics"]["rmse"]["local_test"]
    assert not result["metrics"]["rmse"]["higher_is_better"]
    require_same_metrics(result, folder)
    assert "accuracy" not in json.dumps(result)
    deploy_actions.show_result(server.folder)
    printed = capsys.readouterr().out
    assert "Local Test, rmse" in printed
    assert f"{result['clients'][0]['test']:.4g}" in printed
    assert "%" not in printed


def test_a_client_that_learns_numbers_predicts_numbers_and_measures_them(tmp_path, capsys):
    folder = regression(tmp_path / "here", rounds=1, clients=2)
    run_here(folder)
    own = RunClient.from_folder(folder / "clients/client-0")
    examples = own.data().test.of(0)
    predicted = own.predict("first", examples.x)
    assert predicted.shape == (len(examples.y), 1)
    np.savez(tmp_path / "new.npz", x=examples.x.numpy(), y=examples.y.numpy())
    deploy_actions.predict(folder / "clients/client-0", str(tmp_path / "new.npz"), None, None)
    printed = capsys.readouterr().out.splitlines()
    written = [float(line) for line in printed[: len(examples.y)]]
    assert written == pytest.approx(predicted.flatten().tolist())
    rmse = float((predicted[:, 0] - examples.y).square().mean().sqrt())
    assert printed[len(examples.y)] == f"rmse: {rmse:.4g}"
    assert [line.split(":")[0] for line in printed[-3:]] == ["rmse", "mae", "r2"]


def test_several_metrics_of_classes_are_those_of_the_simulator(tmp_path):
    extra = '[task]\nmetrics = ["f1", "accuracy", "loss"]\n'
    folder = project(tmp_path / "here", extra=extra)
    server = run_here(folder)
    result = read_json(server.folder / "result.json", dict)
    assert [*result["metrics"]] == ["f1", "accuracy", "loss"]
    require_same_metrics(result, folder)
    line = format_journal_entry(read_rows(folder / "clients/client-0/journal.jsonl")[-1])
    figures = result["clients"][0]["metrics"]["test"]
    assert f"test f1 {figures['f1']:.4g}, test accuracy {figures['accuracy']:.4g}" in line


@pytest.mark.parametrize("algorithm", ["fedavg", "lg_fedavg"])
def test_targets_that_do_not_count_are_left_out_as_in_the_simulator(algorithm, tmp_path):
    """Each client finds out by itself; the fingerprint does not depend on that."""
    folder = project(tmp_path / "here", IGNORED, algorithm=algorithm)
    server, progress = run_here(folder), simulated_run(folder)
    assert same_bits(server.shared, progress.states[0].shared)
    for client in range(4):
        own = private_of(folder, client).after
        assert same_bits(own, progress.states[0].private[0].of(client))


def test_some_clients_alone_may_have_targets_that_do_not_count(tmp_path):
    some = IGNORED.replace("    y[::3] = -100\n", "    y[: client % 2] = -100\n")
    folder = project(tmp_path / "here", some)
    server, progress = run_here(folder), simulated_run(folder)
    assert not server.live.get("refused")
    assert distance(server.shared, progress.states[0].shared) <= 1e-6


def test_a_client_with_another_task_is_refused(tmp_path):
    extra = '[task]\nmetrics = ["accuracy"]\n'
    folder = project(tmp_path / "here", extra=extra, rounds=1)
    deployed.change(folder / "clients/client-1/study.toml", '"accuracy"]', '"f1"]')
    server = run_here(folder)
    assert [*server.live["refused"]] == ["client-1"]


@pytest.mark.parametrize(
    "metrics",
    [
        {"test": {"accuracy": 0.5, "hits": 1.0}, "test_size": 3},
        {"test": {"accuracy": -0.1}, "test_size": 3},
        {"test": 0.5, "test_size": 3},
        {"test": {"accuracy": 0.5}, "test_size": 3.5},
        {"test": {"accuracy": 0.5}, "test_size": -3},
        {"test": {"accuracy": [1, 2]}, "test_size": 3},
        {"test": {"accuracy": "high"}, "test_size": 3},
        {"test": {str(number): 0.5 for number in range(1000)}, "test_size": 3},
    ],
    ids=["unknown", "negative", "no table", "half", "below 0", "a pair", "a text", "too many"],
)
def test_figures_that_cannot_be_enter_no_mean(metrics, tmp_path):
    def invent(client, message, reply):
        if message.metadata.message_type == "evaluate" and client == 1:
            reply.content.config_records["config"]["metrics"] = json.dumps(metrics)
        return reply

    folder = deployed.project(tmp_path / "here", clients=2, rounds=1)
    server = run_here(folder, deployed.InProcessGrid(folder, invent))
    result = read_json(server.folder / "result.json", dict)
    assert result["clients"][1]["test"] is None
    assert result["clients"][1]["test_size"] is None
    assert result["local_test"]["mean"] == pytest.approx(result["clients"][0]["test"])


def test_losses_are_shared_by_those_who_share_them_and_all_count(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    for number in (0, 2):
        own = folder / f"clients/client-{number}/client.toml"
        deployed.change(own, "share_metrics = true", "share_metrics = false")
    server, progress = run_here(folder), simulated_run(folder)
    assert same_bits(server.shared, progress.states[0].shared)
    for row in read_rows(server.folder / "rows.jsonl"):
        assert [*row["losses"]] == ["client-1", "client-3"]
        assert len(row["clients"]) == 4
        assert row["loss"] == pytest.approx(sum(row["losses"].values()) / 2)


def test_the_registry_is_read_once_a_round(tmp_path, monkeypatch):
    folder, times = deployed.project(tmp_path / "here", rounds=5), []
    read_registry = server_clients.read_registry

    def counted(at):
        times.append(at)
        return read_registry(at)

    monkeypatch.setattr(server_clients, "read_registry", counted)
    run_here(folder)
    assert len(times) == 1 + 5, "at the beginning, and in each round"
