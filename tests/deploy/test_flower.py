"""The algorithms under Flower, in this process: the simulator's numbers, private state, faults."""

import io
import json
import os
import pickle
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message
from flwr.common.serde import message_to_proto
from safetensors.torch import save, save_file

from glocal.algorithms import ALGORITHMS
from glocal.core.errors import InputError
from glocal.core.files import read_json, read_rows, read_tensors, write_tensors
from glocal.core.modules import predictor
from glocal.core.store import GroupState, PerClient
from glocal.core.trees import same_bits
from glocal.deploy import apps
from glocal.deploy.client import RunClient
from glocal.deploy.flower import server_internals
from glocal.deploy.flower.protocol import Instructions, Request
from glocal.deploy.flower.records import from_record, read_reply
from glocal.deploy.flower.server_app import RunLoop, messages, run_to_end
from glocal.deploy.formatting import format_journal_entry
from glocal.deploy.project import Project
from glocal.deploy.scaffold import add_client
from glocal.deploy.server import RunServer
from glocal.evaluate.privacy import epsilon
from glocal.personalize.onboarding import JoinPlan, TrainedFederation, join
from glocal.wire import pack
from tests.support import deployed
from tests.support.deployed_runs import (
    private_of,
    run_here,
    secured,
    simulated,
    with_availability,
    with_privacy,
)
from tests.support.world import distance


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


@pytest.mark.parametrize("kind", ALGORITHMS, ids=lambda kind: kind.word)
def test_flower_gives_the_simulators_bits(kind, tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm=kind.word, clients_per_round=3)
    state, sent = simulated(folder)
    server = run_here(folder)
    assert same_bits(server.shared, state.shared)
    for client in range(4):
        assert same_bits(private_of(folder, client).after, state.private.of(client))
    assert server.state.ledger.download.bytes + server.state.ledger.upload.bytes == sent


def same_as(folder, state, clients=range(4), run="first"):
    return max(
        distance(private_of(folder, client, run).after, state.private.of(client))
        for client in clients
    )


def during(round_index, client):
    """Whether a message asks that client to train in that round."""
    return lambda number, message: (
        number == client
        and message.metadata.message_type == "train"
        and message.metadata.group_id == str(round_index)
    )


def poisoned(reply, change):
    """A reply with the payload of a broken client."""
    record = reply.content.config_records["tree"]
    record["blob"] = change(record["blob"])
    return reply


SIZE = 4 * (7 * 8 + 7 + 3 * 7 + 3)  # bytes of the shared part; 6.bias is before 6.weight, the last
NAN = np.full(1, np.nan, dtype=np.float32).tobytes()
INFINITY = np.full(1, np.inf, dtype=np.float32).tobytes()
BAD = {
    "NaN": (lambda blob: NAN + blob[4:], "'4.bias' holds NaN or infinity"),
    "infinity": (lambda blob: blob[:-4] + INFINITY, "'6.weight' holds NaN or infinity"),
    "short": (lambda blob: blob[:-1], f"{SIZE - 1} bytes arrived, {SIZE} were expected"),
    "long": (lambda blob: blob + bytes(8 * 6 * 4), f"{SIZE + 192} bytes arrived, {SIZE} were"),
    "empty": (lambda blob: b"", f"0 bytes arrived, {SIZE} were expected"),
    "no bytes": (lambda blob: "text", "its tensors are str"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_reply_is_dropped_and_named_and_the_round_goes_on_without_it(kind, tmp_path):
    change, reason = BAD[kind]
    folder, is_bad = deployed.project(tmp_path / "here"), during(1, 2)

    def tamper(client, message, reply):
        return poisoned(reply, change) if is_bad(client, message) else reply

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    rows = read_rows(server.folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], ["client-2"], []]
    assert reason in rows[1]["dropped"]["client-2"]
    state = with_availability(folder, {1: [2]})
    assert distance(server.shared, state.shared) <= 1e-6
    assert same_as(folder, state) <= 1e-6


def with_config(reply, **config):
    """A reply with the metrics of a broken client."""
    reply.content.config_records["config"].update(config)
    return reply


BAD_CONFIGS = {
    "a metric that is no number": (
        {"metrics": '{"loss": "low"}'},
        "metric 'loss' is 'low'; a finite number was expected",
    ),
    "a metric that is NaN": (
        {"metrics": '{"loss": NaN}'},
        "metric 'loss' is 'nan'; a finite number was expected",
    ),
    "metrics that are no table": ({"metrics": "[]"}, "its metrics are not a table"),
    "too many examples": ({"num_examples": str(10**30)}, f"it reports {10**30} examples"),
    "a negative number of examples": ({"num_examples": -5}, "it reports -5 examples"),
}


@pytest.mark.parametrize("kind", BAD_CONFIGS)
def test_invalid_metrics_are_dropped_and_named_too(kind, tmp_path):
    config, reason = BAD_CONFIGS[kind]
    folder, is_bad = deployed.project(tmp_path / "here", rounds=2), during(1, 2)

    def tamper(client, message, reply):
        return with_config(reply, **config) if is_bad(client, message) else reply

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    rows = read_rows(server.folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], ["client-2"]]
    assert reason in rows[1]["dropped"]["client-2"]


def test_a_client_that_is_lost_during_its_handshake_gets_another(tmp_path):
    folder, lost = deployed.project(tmp_path / "here", rounds=2), []

    def tamper(client, message, reply):
        if client != 2 or message.metadata.message_type != "query" or lost:
            return reply
        lost.append(client)
        return Message(Error(5, "node unavailable"), reply_to=message)

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    assert lost
    assert not server.clients.refused
    assert [len(row["clients"]) for row in read_rows(server.folder / "rows.jsonl")] == [4, 4]


def test_an_invalid_handshake_is_refused_and_named(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)

    def tamper(client, message, reply):
        if client == 1 and message.metadata.message_type == "query":
            return with_config(reply, metrics='{"weight": "heavy"}')
        return reply

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    refused = read_json(server.folder / "live.json", dict)["refused"]
    assert "'weight' is 'heavy'" in refused["client-1"]


def test_a_client_with_another_number_than_that_of_its_key_is_refused(tmp_path):
    """Otherwise it could take the place of another client, with its data's weight and state."""
    folder = deployed.project(tmp_path / "here", rounds=1)

    def tamper(client, message, reply):
        if client != 1 or message.metadata.message_type != "query":
            return reply
        own = json.loads(str(reply.content.config_records["config"]["metrics"]))
        return with_config(reply, metrics=json.dumps({**own, "client": 2}))

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    assert server.live["refused"] == {
        "client-1": "it says that it is client 2, but its key is that of client 1"
    }
    [row] = read_rows(server.folder / "rows.jsonl")
    assert row["clients"] == ["client-0", "client-2", "client-3"]


def test_a_reply_that_is_lost_on_its_way_leaves_no_trace_on_the_client(tmp_path):
    """Its private state is that of the round before, as the average lacks its upload."""
    folder, is_lost = deployed.project(tmp_path / "here"), during(1, 0)
    failed = Error(0, "lost on its way")

    def tamper(client, message, reply):
        return Message(failed, reply_to=message) if is_lost(client, message) else reply

    server = run_here(folder, deployed.InProcessGrid(folder, tamper))
    assert "lost on its way" in read_rows(server.folder / "rows.jsonl")[1]["dropped"]["client-0"]
    state = with_availability(folder, {1: [0]})
    assert distance(server.shared, state.shared) <= 1e-6
    assert same_as(folder, state) <= 1e-6


class Killed(BaseException):
    """Ends the server as kill -9 would."""


@pytest.mark.parametrize("moment", ["before the replies", "after the replies"])
def test_a_server_that_is_killed_goes_on_to_the_same_bits(moment, tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here")
    whole = deployed.project(tmp_path / "whole")
    grid, crash = deployed.InProcessGrid(folder), during(1, 3)

    def tamper(client, message, reply):
        if crash(client, message) and moment == "before the replies":
            raise Killed
        return reply

    grid.tamper = tamper
    server = RunServer(Project.from_folder(folder), "first")
    if moment == "after the replies":
        aggregate_train = server.aggregate_train

        def crash_in_round_2(replies):
            if server.round_index == 1:
                raise Killed
            return aggregate_train(replies)

        monkeypatch.setattr(server, "aggregate_train", crash_in_round_2)
    with pytest.raises(Killed):
        run_to_end(grid, server)
    assert RunServer(Project.from_folder(folder), "first").state.rounds_done == 1
    grid.tamper = deployed.unchanged
    resumed, uninterrupted = run_here(folder, grid), run_here(whole)
    assert same_bits(resumed.shared, uninterrupted.shared)
    assert all(same_bits(private_of(folder, d).after, private_of(whole, d).after) for d in range(4))
    assert [row["round"] for row in read_rows(resumed.folder / "rows.jsonl")] == [0, 1, 2]


def test_a_round_without_a_valid_reply_fails_the_run(tmp_path):
    folder = deployed.project(tmp_path / "here")
    to_nan = BAD["NaN"][0]

    def tamper(client, message, reply):
        return poisoned(reply, to_nan) if during(1, client)(client, message) else reply

    message = r"round 2 has no valid reply \(client-0: wire: '4.bias' holds NaN"
    with pytest.raises(InputError, match=message):
        run_here(folder, deployed.InProcessGrid(folder, tamper))
    live = read_json(folder / "runs/first/live.json", dict)
    assert live["state"] == "failed"
    assert "no valid reply" in live["reason"]


def test_a_client_that_was_offline_learns_which_rounds_it_missed(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=5)
    grid = deployed.InProcessGrid(folder)
    configure_train = RunServer.configure_train

    def leaving(self):
        grid.online = [0, 1, 2] if self.round_index in (1, 2) else None
        return configure_train(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunServer, "configure_train", leaving)
        server = run_here(folder, grid)
    rows = read_rows(server.folder / "rows.jsonl")
    assert [row["offline"] for row in rows] == [[], [], ["client-3"], ["client-3"], []]
    journal = read_rows(folder / "clients/client-3/journal.jsonl")
    missed = [row["missed_rounds"] for row in journal if "missed_rounds" in row]
    assert missed[0].startswith("2 rounds, 3 to 4; the mean loss went from")
    state = with_availability(folder, {2: [3], 3: [3]})
    assert same_as(folder, state) <= 1e-6


def test_too_few_clients_are_waited_for_and_then_named(tmp_path):
    folder = deployed.project(tmp_path / "here")
    deployed.change(folder / "deploy.toml", "connect_timeout = 300.0", "connect_timeout = 0.05")
    grid = deployed.InProcessGrid(folder)
    grid.online = [1]
    with pytest.raises(InputError, match=r"1 clients are connected after .* and 2 are needed"):
        run_here(folder, grid)


def test_a_run_does_not_go_on_with_too_few_clients_because_the_others_are_refused(tmp_path):
    folder = deployed.project(tmp_path / "here")
    for number in (1, 2, 3):
        deployed.change(
            folder / f"clients/client-{number}/study.toml", "batch_size = 5", "batch_size = 6"
        )
    refused = r"\(refused: client-1: .*; client-3: its study.toml"
    with pytest.raises(InputError, match=f"1 clients are connected .* 2 are needed {refused}"):
        run_here(folder)
    assert not read_rows(folder / "runs/first/rows.jsonl")


def test_a_long_round_leaves_the_whole_wait_for_clients(tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here")
    server, grid = (
        RunServer(Project.from_folder(folder), "first"),
        deployed.InProcessGrid(folder),
    )
    RunLoop(server, grid)._wait_for_clients()
    now = time.monotonic() + 10 * server.project.deployment.limits.connect_timeout
    monkeypatch.setattr("time.monotonic", lambda: now)
    server.configure_handshake({})
    assert server.needs_more_clients()


def test_private_state_of_another_model_is_refused_by_name(tmp_path):
    folder = deployed.project(tmp_path / "here")
    other = deployed.project(tmp_path / "other", width=9)
    run_here(other)
    state = folder / "clients/client-1/state/first.safetensors"
    state.parent.mkdir()
    state.write_bytes((other / "clients/client-1/state/first.safetensors").read_bytes())
    server = run_here(folder)
    reason = server.live["refused"]["client-1"]
    assert "private state: state/first.safetensors" in reason
    assert "belongs to another model (shared '4.weight' [7, 9, 'torch.float32']) than" in reason
    assert "than this one (shared '4.weight' [7, 8, " in reason
    assert server.state.rounds_included == {0: 3, 2: 3, 3: 3}


def test_private_state_whose_tensors_are_not_what_it_says_is_refused(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)
    run_here(folder)
    file = RunClient.from_folder(folder / "clients/client-1").private("first")
    tensors, header = read_tensors(file.path)
    write_tensors(
        file.path,
        {name: tensor for name, tensor in tensors.items() if name != "after/0.weight"},
        header,
    )
    with pytest.raises(InputError, match=r"is damaged \('after/0.weight' is missing\)"):
        file.load()
    write_tensors(file.path, {**tensors, "before/0.bias": torch.zeros(3)}, header)
    with pytest.raises(InputError, match=r"is damaged \('before/0.bias' is \[3\] torch.float32\)"):
        file.load()
    write_tensors(
        file.path, tensors, {key: value for key, value in header.items() if key != "after_round"}
    )
    with pytest.raises(InputError, match="was not written by glocal"):
        file.load()


def test_private_state_of_version_0_1_is_refused_in_one_line(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=2, rounds=1)
    run_here(folder)
    file = RunClient.from_folder(folder / "clients/client-1").private("first")
    tensors, header = read_tensors(file.path)
    save_file(tensors, file.path, metadata={"about": json.dumps({**header, "device": 1})})
    message = "state/first.safetensors was written by glocal 0.1, and 0.2 was expected; run it"
    with pytest.raises(InputError, match=message):
        file.load()
    with pytest.raises(InputError, match=rf"refused: client-1: run: {message}"):
        run_here(folder)  # the server names the client


def write_in_place(tensors, path, metadata):
    """As safetensors 0.4 does; later versions make a new file, which only its owner can read."""
    Path(path).write_bytes(save(tensors, metadata))


@pytest.mark.parametrize("write", [save_file, write_in_place])
def test_only_its_owner_can_read_private_state(write, tmp_path, monkeypatch):
    """Also where the owner's other files are for all to read."""
    monkeypatch.setattr("glocal.core.files.save_file", write)
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    before = os.umask(0o022)
    try:
        run_here(folder)
    finally:
        os.umask(before)
    state = folder / "clients/client-0/state"
    assert state.stat().st_mode & 0o077 == 0
    assert (state / "first.safetensors").stat().st_mode & 0o077 == 0


def test_a_run_whose_name_leads_out_of_the_folder_is_refused_by_the_client(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with pytest.raises(InputError, match="not a valid run name"):
        RunClient.from_folder(folder / "clients/client-0").private("../../elsewhere")


def test_lost_private_state_is_reported(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.InProcessGrid(folder)
    run_here(folder, grid)
    (folder / "clients/client-1/state/first.safetensors").unlink()
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
    deployed.copy_to_clients(folder)
    server = run_here(folder, grid)
    assert (
        "its private state is gone"
        in read_rows(server.folder / "rows.jsonl")[2]["notes"]["client-1"]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('local = ["0", "1"]', 'local = ["0"]'),
        ("batch_size = 5", "batch_size = 5\nmax_tokens = 40"),
    ],
)
def test_a_client_with_other_settings_is_refused(old, new, tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)
    deployed.change(folder / "clients/client-2/study.toml", old, new)
    server = run_here(folder)
    assert "is not the server's" in server.live["refused"]["client-2"]


def test_a_new_client_adapts_its_private_part_as_join_does_and_takes_part(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.InProcessGrid(folder)
    first = run_here(folder, grid)
    shared = first.shared
    add_client(folder, "late", share_metrics=True)
    grid = deployed.InProcessGrid(folder)
    adapted = run_here(folder, grid, skip_training=True)
    assert same_bits(adapted.shared, shared)
    client = RunClient.from_folder(folder / "clients/late")
    state = GroupState(shared, PerClient(client.setup.private))
    trained_federation = TrainedFederation(client.setup.algorithm, client.project.plan, state, 4)
    joined = join(
        trained_federation,
        client.data().train.of(0),
        join_plan=JoinPlan(epochs=20),
        engine="looped",
    )
    assert distance(private_of(folder, 4).after, joined.state.private.of(4)) <= 1e-6
    table = read_json(adapted.folder / "result.json", dict)["clients"]
    assert [row["name"] for row in table if row["new_client"]] == ["late"]
    assert all(0 <= row["test"] <= 1 for row in table)
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
    deployed.copy_to_clients(folder)
    assert run_here(folder, grid).state.last_included[4] == 2


def test_a_new_client_adapts_what_it_was_sent_where_that_is_not_the_shared_tree(tmp_path):
    """FeSEM's server has all centres, and sends one: a stranger gets the mean of them."""
    folder = deployed.project(tmp_path / "here", algorithm="fesem", rounds=2)
    run_here(folder)
    add_client(folder, "late")
    adapted = run_here(folder, deployed.InProcessGrid(folder), skip_training=True)
    assert adapted.state.adapted == (4,)
    late, setup = private_of(folder, 4), adapted.setup
    profile = setup.start.profiles[0].initial
    sent = setup.algorithm.download(adapted.shared, profile)
    assert same_bits(late.message, sent)
    own = setup.algorithm.personal({}, late.after)
    assert own.keys() == sent.keys()
    assert not torch.equal(own["0.weight"], sent["0.weight"])


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "feddyn"])
def test_a_new_client_without_a_part_of_the_model_of_its_own_adapts_nothing(algorithm, tmp_path):
    """What SCAFFOLD and FedDyn remember is none."""
    folder = deployed.project(tmp_path / "here", algorithm=algorithm, rounds=1)
    run_here(folder)
    add_client(folder, "late")
    grid = deployed.InProcessGrid(folder)
    assert run_here(folder, grid, skip_training=True).state.adapted == ()


def test_a_client_that_is_added_before_the_first_round_keeps_what_it_learns_in_it(tmp_path):
    """It is not one of the initial clients, and does not adapt once it has trained."""
    folder = deployed.project(tmp_path / "here", clients=3, rounds=2, clients_per_round=4)
    server = RunServer(Project.from_folder(folder), "first")
    add_client(folder, "early")
    run_to_end(deployed.InProcessGrid(folder), server)
    assert [[*row["notes"]] for row in read_rows(server.folder / "rows.jsonl")] == [[], []]
    deployed.change(folder / "federation.py", "range(3)", "range(4)")
    state, _ = simulated(folder)
    assert same_as(folder, state) <= 1e-6


def test_metrics_leave_a_client_only_with_its_owners_consent(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1, share_metrics=False)
    server = run_here(folder)
    assert read_rows(server.folder / "rows.jsonl")[0]["losses"] == {}
    result = read_json(server.folder / "result.json", dict)
    assert result["local_test"] is None
    assert all(row["test"] is None for row in result["clients"])


def test_an_impossible_accuracy_does_not_enter_the_mean(tmp_path):
    def exaggerate(client, message, reply):
        if message.metadata.message_type == "evaluate" and client == 1:
            metrics = '{"test": {"accuracy": 5}, "test_size": 3}'
            reply.content.config_records["config"]["metrics"] = metrics
        return reply

    folder = deployed.project(tmp_path / "here", clients=2, rounds=1)
    result = read_json(
        run_here(folder, deployed.InProcessGrid(folder, exaggerate)).folder / "result.json", dict
    )
    assert result["clients"][1]["test"] is None
    assert result["local_test"]["mean"] == pytest.approx(result["clients"][0]["test"])


def test_a_client_predicts_with_its_own_model(tmp_path):
    folder = deployed.project(tmp_path / "here")
    server = run_here(folder)
    client = RunClient.from_folder(folder / "clients/client-1")
    x = client.data().test.of(0).x
    params = client.setup.algorithm.personal(server.shared, private_of(folder, 1).after)
    everything = torch.ones(len(x), dtype=torch.bool)
    expected = predictor(client.setup.task.model)(params, x, everything).argmax(-1)
    assert client.predict("first", x).tolist() == expected.tolist()
    with pytest.raises(InputError, match="has taken part in no round of 'second' yet"):
        client.predict("second", x)


OWN_FILE = """
import numpy as np

def data(client):
    mine = np.load("mine.npz")
    return mine["x"], mine["y"]
"""


def test_a_client_finds_its_files_in_its_own_folder_wherever_it_is_started(tmp_path, monkeypatch):
    own = deployed.project(tmp_path / "here", clients=1) / "clients/client-0"
    with (own / "federation.py").open("a") as module:
        module.write(OWN_FILE)
    np.savez(own / "mine.npz", x=np.ones((20, 6), dtype=np.float32), y=np.arange(20) % 3)
    monkeypatch.chdir(tmp_path)
    assert len(RunClient.from_folder(Path("here/clients/client-0")).data().train.examples.y) == 20
    assert Path.cwd() == tmp_path


def test_only_its_upload_and_metrics_leave_a_client_and_the_journal_says_so(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.InProcessGrid(folder)
    left = []
    grid.tamper = lambda client, message, reply: left.append((client, reply)) or reply
    run_here(folder, grid)
    private = [private_of(folder, client).after for client in range(4)]
    sizes = set()
    for _, reply in left:
        assert not reply.content.array_records
        for record in reply.content.config_records.values():
            blob = from_record(record) if "blob" in record else b""
            sizes.add(len(blob))
            assert not any(pack({"": tensor}) in blob for own in private for tensor in own.values())
        assert not any(grid.contexts[client].state for client in range(4))
    assert sizes == {0, SIZE}
    sent = [row for row in read_rows(folder / "clients/client-0/journal.jsonl") if "bytes" in row]
    assert [row["tensors"] for row in sent] == [["4.weight", "4.bias", "6.weight", "6.bias"]] * 2
    assert [row["num_examples"] for row in sent] == [17, 17]


def test_the_journal_says_why_a_client_could_not_take_part_and_what_is_odd_about_its_state(
    tmp_path,
):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=2)
    deployed.change(
        folder / "clients/client-1/federation.py",
        "def data(client):",
        "def data(client):\n    {}['Jane Doe, 41']",
    )
    grid = deployed.InProcessGrid(folder)

    def lose(client, message, reply):
        if during(1, 2)(client, message):
            (folder / "clients/client-2/state/first.safetensors").unlink()
        return reply

    grid.tamper = lose
    run_here(folder, grid)
    refused, odd = (
        read_rows(folder / f"clients/client-{number}/journal.jsonl")[-1] for number in (1, 2)
    )
    assert format_journal_entry(refused).startswith(
        "first, after 0 rounds: could not do the task: federation:data: the function fail"
    )
    assert "Jane Doe, 41" in format_journal_entry(refused)
    assert (
        "; note to the server: its private state is gone, it starts anew after round 2"
        in format_journal_entry(odd)
    )


@pytest.mark.parametrize(
    ("failure", "quote"),
    [
        ("raise ValueError(row)", "Jane Doe, 41"),
        ("raise SystemExit(row)", "Jane Doe, 41"),
        ("return [row], [0]", "cannot be read as a tensor"),
        ("x[0, 0] = float('nan')", "holds NaN or infinity"),
    ],
    ids=["raised", "left", "unreadable", "not finite"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_no_example_leaves_a_client_in_the_text_of_an_error(
    failure, quote, masked, tmp_path, caplog
):
    """Data that fail in the second round quote a row in the error: only the owner may read it."""
    folder = deployed.project(tmp_path / "here", rounds=2)
    if masked:
        secured(folder)
    broken = (
        "\n    row = 'Jane Doe, 41'\n    if __import__('os').path.exists('broken'):"
        f"\n        {failure}\n    return x, (x[:, 0]"
    )
    deployed.change(folder / "clients/client-1/federation.py", "\n    return x, (x[:, 0]", broken)
    seen, grid = [], deployed.InProcessGrid(folder)

    def tamper(client, message, reply):
        seen.append(reply)
        if message.metadata.message_type == "train" and client == 1:
            (folder / "clients/client-1/broken").touch()
        return reply

    grid.tamper = tamper
    run_here(folder, grid)
    sent = [message_to_proto(reply).SerializeToString() for reply in seen]
    stored = [path.read_bytes() for path in (folder / "runs").rglob("*.json*")]
    public = [*sent, *stored]
    assert any(b"see the client's own log" in part for part in public)
    assert not any(b"Jane Doe" in part or quote.encode() in part for part in public)
    assert "the server gets only its type" in caplog.text
    assert quote in caplog.text


@pytest.mark.parametrize(
    "failure",
    ["raise ValueError('Jane Doe, 41')", "raise SystemExit('Jane Doe, 41')"],
    ids=["raised", "left"],
)
def test_no_example_leaves_a_client_whose_module_reads_them_while_it_is_imported(
    failure, tmp_path, caplog
):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=1)
    with (folder / "clients/client-1/federation.py").open("a") as module:
        module.write(f"\n{failure}\n")
    server = run_here(folder)
    assert server.live["refused"] == {
        "client-1": "its model or data cannot be used; see the client's own log"
    }
    assert "Jane Doe, 41" in caplog.text


def test_the_path_of_its_folder_does_not_leave_a_client(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=4, rounds=1)
    state = folder / "clients/client-1/state/first.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"damaged")
    (folder / "clients/client-2/client.toml").unlink()
    refused = run_here(folder).live["refused"]
    assert "run: state/first.safetensors is damaged" in refused["client-1"]
    assert "cannot read client.toml" in refused["client-2"]
    assert str(tmp_path) not in str(refused)


def test_the_server_learns_only_the_kind_of_an_unforeseen_error(tmp_path, monkeypatch, caplog):
    folder = deployed.project(tmp_path / "here", rounds=1)
    monkeypatch.setattr(RunClient, "handshake", lambda self, instructions: {}["Jane Doe, 41"])
    message = messages({1000: Request(Instructions("first", 0))}, "query")[0]
    with pytest.raises(RuntimeError, match=r"^it failed \(KeyError\); see the client's own log$"):
        apps.client(message, deployed.InProcessGrid(folder).context(0))
    assert "Jane Doe, 41" in caplog.text


@pytest.mark.parametrize(
    "lost",
    [
        {},
        {2: "setup"},
        {2: "share_keys"},
        {2: "collect_masked_vectors"},
        {0: "share_keys", 2: "collect_masked_vectors"},
    ],
    ids=["none", "at once", "before it trains", "before it sends", "two"],
)
def test_secure_aggregation_is_plain_averaging_also_when_a_client_drops_out(lost, tmp_path):
    """SecAgg+ with four or five clients; in round 1, one or two are lost before they upload."""
    folder = secured(
        deployed.project(tmp_path / "here", rounds=2, clients=4 if len(lost) < 2 else 5)
    )

    def tamper(client, message, reply):
        stage = message.content.config_records.get("secaggplus_configs", {}).get("stage")
        in_round_1 = message.metadata.group_id == "1"
        if in_round_1 and stage is not None and lost.get(client) == stage:
            return Message(Error(5, "node unavailable"), reply_to=message)
        return reply

    grid = deployed.InProcessGrid(folder, tamper)
    server = run_here(folder, grid)
    state = with_availability(folder, {1: [*lost]})
    assert distance(server.shared, state.shared) <= 1e-4
    assert same_as(folder, state) <= 1e-4
    rows = read_rows(server.folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], [f"client-{client}" for client in lost]]


def test_a_single_client_cannot_be_hidden_among_others(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", clients=1))
    with pytest.raises(
        InputError, match="hides a client among others, but only 1 is sampled per round"
    ):
        Project.from_folder(folder).setup  # noqa: B018


def test_no_upload_is_seen_in_secure_aggregation(tmp_path, monkeypatch):
    folder, seen, uploads, train = (
        secured(deployed.project(tmp_path / "here", rounds=1)),
        [],
        [],
        RunClient.train,
    )

    def training(self, message, instructions):
        uploads.append(train(self, message, instructions))
        return uploads[-1]

    def tamper(client, message, reply):
        seen.append(message_to_proto(reply).SerializeToString())
        return reply

    monkeypatch.setattr(RunClient, "train", training)
    run_here(folder, deployed.InProcessGrid(folder, tamper))
    assert len(uploads) == 4
    assert max(map(len, seen)) > 300, "no masked upload was seen"
    for result in uploads:
        for tensor in result.payload.values():
            assert not any(pack({"": tensor})[:8] in reply for reply in seen)


def test_a_client_that_masks_refuses_to_send_in_the_clear(tmp_path):
    """A client that masks refuses a server that does not, whatever the server asks for."""
    folder = deployed.project(tmp_path / "here", rounds=1)
    deployed.change(
        folder / "clients/client-0/deploy.toml",
        "adapt_epochs = 20",
        "adapt_epochs = 20\nsecure_aggregation = true",
    )
    grid = deployed.InProcessGrid(folder)
    server = run_here(folder, grid)
    assert "is not the server's" in server.live["refused"]["client-0"]
    request = Request(Instructions("first", 0), server.shared)
    message = messages({1000: request}, "train")[0]
    assert "sends masked uploads only" in read_reply(apps.client(message, grid.context(0))).fault


EQUAL = 'aggregation = "mean(clients)"'


def test_clipping_and_noise_on_clients_come_with_an_epsilon(tmp_path):
    folder = with_privacy(deployed.project(tmp_path / "here", rounds=2, plan=EQUAL))
    left = []
    grid = deployed.InProcessGrid(folder)
    grid.tamper = lambda client, message, reply: left.append(reply) or reply
    server = run_here(folder, grid)
    privacy = read_json(server.folder / "result.json", dict)["privacy"]
    assert privacy["rounds"] == 2
    assert privacy["epsilon"] == pytest.approx(epsilon(2.0, 2, 1e-5))
    records = [reply.content.config_records for reply in left]
    sent = [
        np.frombuffer(from_record(each["tree"]), np.float32) for each in records if "tree" in each
    ]
    assert len(sent) == 8
    # the std of 348 random numbers has an error of 0.04 itself
    assert np.concatenate(sent[:4]).std() == pytest.approx(1.0, rel=0.2)


def test_the_accountant_counts_uploads_that_were_sent_and_dropped(tmp_path):
    folder = with_privacy(deployed.project(tmp_path / "here", rounds=2, plan=EQUAL))
    grid = deployed.InProcessGrid(
        folder,
        lambda client, message, reply: None if during(1, client)(client, message) else reply,
    )
    deployed.change(folder / "deploy.toml", "round_timeout = 600.0", "round_timeout = 0.1")
    with pytest.raises(InputError, match="round 2 has no valid reply"):
        run_here(folder, grid)
    grid.tamper = lambda client, message, reply: reply
    privacy = read_json(run_here(folder, grid).folder / "result.json", dict)["privacy"]
    assert privacy["rounds"] == 3, "round 2 was sent twice"
    assert privacy["epsilon"] == pytest.approx(epsilon(2.0, 3, 1e-5))


def test_privacy_needs_equal_weights(tmp_path):
    folder = with_privacy(deployed.project(tmp_path / "here"))
    with pytest.raises(InputError, match=r"set plan\.aggregation = 'mean\(clients\)'"):
        Project.from_folder(folder).setup  # noqa: B018


class Touches:
    """Leaves a trace if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def planted(trace, shared):
    """A round's message that contains code, in the place of tensors and beside them."""
    message = messages({1000: Request(Instructions("first", 0), shared)}, "train")[0]
    source = f"__import__('os').mkdir({str(trace)!r})"
    message.content["glocal.deploy.apps"] = ConfigRecord({"source": source})
    message.content["federation"] = ConfigRecord({"data": source.encode()})
    return message


@pytest.mark.parametrize(
    "where", ["beside", "in the blob", "in a blob of the right size", "in the instructions"]
)
def test_code_in_a_message_is_never_run(where, tmp_path):
    folder, trace = deployed.project(tmp_path / "here", clients=1, rounds=1), tmp_path / "t"
    grid = deployed.InProcessGrid(folder)
    message = planted(trace, RunServer(Project.from_folder(folder), "first").shared)
    records, code = message.content.config_records, pickle.dumps(Touches(trace))
    if "blob" in where:
        size = SIZE if "size" in where else len(code)
        records["tree"]["blob"] = code.ljust(size, b"\0")
        assert len(records["tree"]["blob"]) == size
    if where == "in the instructions":
        records["config"]["instructions"] = f"__import__('os').mkdir({str(trace)!r})"
    refused = pytest.raises(RuntimeError, match="it failed")
    with refused if where == "in the instructions" else nullcontext():
        reply = read_reply(apps.client(message, grid.context(0)))
        assert bool(reply.fault) == ("blob" in where)
    assert not trace.exists()
    pickle.loads(code)
    assert trace.exists(), "the test could not see a breach"


def test_code_in_a_masked_message_is_never_run(tmp_path):
    """Its arrays are numpy files, which may contain pickled objects."""
    trace, buffer = tmp_path / "trace", io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    content = buffer.getvalue() + pickle.dumps(Touches(trace))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        server_internals.masked_arrays([content])
    assert not trace.exists()
    np.load(io.BytesIO(content), allow_pickle=True)
    assert trace.exists(), "the test could not see a breach"


def freeze_the_second_layer(folder):
    """The layer between the local and the last one is a frozen base, the same for everybody."""
    file, layers = folder / "federation.py", "    return nn.Sequential(*first,"
    deployed.change(file, layers, f"    torch.manual_seed(5)\n{layers}")
    with file.open("a") as module:
        module.write("\nbuild = model\n\ndef model():\n    net = build()\n")
        module.write("    net[4].requires_grad_(False)\n    return net\n")


def test_frozen_tensors_are_in_no_message_and_no_file_of_a_deployment(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    freeze_the_second_layer(folder)
    deployed.copy_to_clients(folder)
    state, sent = simulated(folder)
    server = run_here(folder)
    assert {*server.shared} == {"6.weight", "6.bias"}
    assert distance(server.shared, state.shared) <= 1e-6
    assert server.state.ledger.download.bytes + server.state.ledger.upload.bytes == sent
    tensors, header = read_tensors(folder / "clients/client-0/state/first.safetensors")
    assert not [name for name in tensors if "/4." in name]
    assert len(header["base of frozen tensors"]) == 16


def test_a_client_with_another_base_is_refused(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1, clients=2)
    freeze_the_second_layer(folder)
    deployed.copy_to_clients(folder)
    own = folder / "clients/client-1/federation.py"
    deployed.change(own, "torch.manual_seed(5)", "torch.manual_seed(6)")
    with pytest.raises(InputError, match="is not the server's"):
        run_here(folder)
