"""The same algorithms under Flower, in this process: the simulator's numbers, private state on disk, faults that lose nothing."""

import io
import os
import pickle
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message
from flwr.common import Parameters
from flwr.common.serde import message_to_proto

from glocal import algorithms
from glocal.core.errors import InputError
from glocal.core.files import read_json, read_rows, read_tensors, write_tensors
from glocal.core.modules import predictor
from glocal.core.sampling import Availability
from glocal.core.store import PrivateStates, State
from glocal.core.trees import same_bits
from glocal.datasets.fetch import no_progress
from glocal.deploy.apps import client
from glocal.deploy.client import RunClient, predict_classes
from glocal.deploy.flower import client_internals
from glocal.deploy.flower.protocol import Instructions
from glocal.deploy.flower.records import from_record, read_reply, to_record
from glocal.deploy.flower.server_app import RunLoop, messages, run_to_end
from glocal.deploy.formatting import format_journal_entry
from glocal.deploy.project import Project
from glocal.deploy.registry import read_registry
from glocal.deploy.scaffold import add_client
from glocal.deploy.server import RunServer
from glocal.engines import Executor
from glocal.evaluate.privacy import epsilon
from glocal.federate.rounds import Seat, initial_state, simulate, simulate_seeds
from glocal.personalize.onboarding import JoinPlan, TrainedFederation, join
from glocal.studies.build import build_algorithm, build_components
from glocal.wire import pack
from tests.support import deployed
from tests.support.world import distance


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def simulated(folder):
    """The last state of the same study in the simulator, and what was sent."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    algorithm = build_algorithm(
        project.study, next(iter(project.study.experiments.values())), parts
    )
    rounds = list(
        simulate(
            algorithm, parts.params[0], parts.federations[0].train, project.plan, engine="looped"
        )
    )
    return rounds[-1][0], sum(report.traffic.total.bytes for _, report in rounds)


def run_here(folder, grid=None, run="first", **more):
    grid = grid or deployed.HereGrid(folder, client)
    conductor = RunServer(Project.from_folder(folder), run, **more)
    run_to_end(grid, conductor)
    return conductor


def private_of(folder, number, run="first"):
    member = RunClient.from_folder(folder / "clients" / read_registry(folder)[number].name)
    return member.private(run).load()


@pytest.mark.parametrize("name", algorithms.__all__)
def test_flower_gives_the_simulators_numbers(name, tmp_path):
    folder = deployed.project(tmp_path / "here", algorithm=name, clients_per_round=3)
    state, sent = simulated(folder)
    conductor = run_here(folder)
    assert distance(conductor.shared, state.shared) <= 1e-6
    for device in range(4):
        kept = private_of(folder, device)
        assert distance(kept.after, state.private.of(device)) <= 1e-6
    assert conductor.state.ledger.download.bytes + conductor.state.ledger.upload.bytes == sent


def with_attendance(folder, absent):
    """The simulator's state where, by round, some devices were not there or gone before they answered."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    algorithm = build_algorithm(
        project.study, next(iter(project.study.experiments.values())), parts
    )
    train, state = parts.federations[0].train, initial_state(algorithm, parts.params[0])
    for round_index in range(project.plan.rounds):
        everyone = range(train.num_clients)
        attendance = Availability.of(everyone, dropouts=absent.get(round_index, []))
        plan = replace(project.plan, rounds=1, first_round=round_index)
        seat = Seat(plan, train, state, attendance)
        state, _ = next(
            simulate_seeds(algorithm, [seat], Executor(algorithm.client_update, engine="looped"))
        )[0]
    return state


def same_as(folder, state, clients=range(4), run="first"):
    return max(
        distance(private_of(folder, device, run).after, state.private.of(device))
        for device in clients
    )


def during(round_index, device):
    """Whether a message trains that device in that round."""
    return lambda number, message: (
        number == device
        and message.metadata.message_type == "train"
        and message.metadata.group_id == str(round_index)
    )


def poisoned(reply, change):
    """A reply whose upload a broken device has changed."""
    tree = from_record(reply.content.config_records["shared"])
    reply.content.config_records["shared"] = to_record(change(tree))
    return reply


BAD = {
    "NaN": (lambda tree: {**tree, "6.bias": tree["6.bias"] * float("nan")}, "'6.bias' holds NaN"),
    "shape": (
        lambda tree: {**tree, "6.bias": tree["6.bias"][:1]},
        "'6.bias' is (1,) torch.float32",
    ),
    "type": (lambda tree: {**tree, "6.bias": tree["6.bias"].double()}, "torch.float64"),
    "missing": (
        lambda tree: {name: tensor for name, tensor in tree.items() if name != "6.bias"},
        "missing ['6.bias']",
    ),
    "extra": (lambda tree: {**tree, "0.weight": torch.zeros(8, 6)}, "unexpected ['0.weight']"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_answer_is_dropped_and_named_and_the_round_goes_on_without_it(kind, tmp_path):
    change, message = BAD[kind]
    folder, bad = deployed.project(tmp_path / "here"), during(1, 2)
    grid = deployed.HereGrid(
        folder,
        client,
        lambda device, asked, reply: poisoned(reply, change) if bad(device, asked) else reply,
    )
    conductor = run_here(folder, grid)
    rows = read_rows(conductor.folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], ["device-2"], []]
    assert message in rows[1]["dropped"]["device-2"]
    state = with_attendance(folder, {1: [2]})
    assert distance(conductor.shared, state.shared) <= 1e-6
    assert same_as(folder, state) <= 1e-6


def worded(reply, **words):
    """A reply whose words a broken device has changed."""
    reply.content.config_records["config"].update(words)
    return reply


WORDS = {
    "a figure that is no number": (
        {"metrics": '{"loss": "low"}'},
        "figure 'loss' is 'low'; a finite number was expected",
    ),
    "a figure that is NaN": (
        {"metrics": '{"loss": NaN}'},
        "figure 'loss' is 'nan'; a finite number was expected",
    ),
    "figures that are no table": ({"metrics": "[]"}, "its figures are no table"),
    "examples beyond counting": ({"num_examples": str(10**30)}, f"it counts {10**30} examples"),
    "fewer examples than none": ({"num_examples": -5}, "it counts -5 examples"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_words_that_make_no_sense_are_dropped_and_named_too(kind, tmp_path):
    words, message = WORDS[kind]
    folder, bad = deployed.project(tmp_path / "here", rounds=2), during(1, 2)
    grid = deployed.HereGrid(
        folder,
        client,
        lambda device, asked, reply: worded(reply, **words) if bad(device, asked) else reply,
    )
    rows = read_rows(run_here(folder, grid).folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], ["device-2"]]
    assert message in rows[1]["dropped"]["device-2"]


def test_a_device_that_is_lost_while_it_is_greeted_is_greeted_again(tmp_path):
    folder, lost = deployed.project(tmp_path / "here", rounds=2), []

    def tamper(device, asked, reply):
        if device != 2 or asked.metadata.message_type != "query" or lost:
            return reply
        lost.append(device)
        return Message(Error(5, "node unavailable"), reply_to=asked)

    conductor = run_here(folder, deployed.HereGrid(folder, client, tamper))
    assert lost
    assert not conductor.refused
    assert [len(row["clients"]) for row in read_rows(conductor.folder / "rows.jsonl")] == [4, 4]


def test_a_greeting_that_makes_no_sense_is_refused_and_named(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)

    def tamper(device, asked, reply):
        return (
            worded(reply, metrics='{"weight": "heavy"}')
            if device == 1 and asked.metadata.message_type == "query"
            else reply
        )

    conductor = run_here(folder, deployed.HereGrid(folder, client, tamper))
    assert (
        "'weight' is 'heavy'"
        in read_json(conductor.folder / "live.json", dict)["refused"]["device-1"]
    )


def test_an_answer_that_is_lost_on_its_way_leaves_no_trace_on_the_device(tmp_path):
    """Its private state goes back to where it was: the server never counted that round."""
    folder, lost = deployed.project(tmp_path / "here"), during(1, 0)
    failed = Error(0, "lost on its way")
    grid = deployed.HereGrid(
        folder,
        client,
        lambda device, asked, reply: (
            Message(failed, reply_to=asked) if lost(device, asked) else reply
        ),
    )
    conductor = run_here(folder, grid)
    assert "lost on its way" in read_rows(conductor.folder / "rows.jsonl")[1]["dropped"]["device-0"]
    state = with_attendance(folder, {1: [0]})
    assert distance(conductor.shared, state.shared) <= 1e-6
    assert same_as(folder, state) <= 1e-6


class Killed(BaseException):
    """As kill -9 would end the server."""


@pytest.mark.parametrize("moment", ["before the answers", "after the answers"])
def test_a_server_that_is_killed_goes_on_to_the_same_bits(moment, tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here")
    whole = deployed.project(tmp_path / "whole")
    grid, crash = deployed.HereGrid(folder, client), during(1, 3)

    def tamper(device, message, reply):
        if crash(device, message) and moment == "before the answers":
            raise Killed
        return reply

    grid.tamper = tamper
    conductor = RunServer(Project.from_folder(folder), "first")
    if moment == "after the answers":
        aggregate_train, calls = conductor.aggregate_train, []
        monkeypatch.setattr(
            conductor,
            "aggregate_train",
            lambda replies: (
                aggregate_train(replies) if not calls.append(0) and len(calls) < 2 else 1 / 0
            ),
        )
    with pytest.raises((Killed, ZeroDivisionError)):
        run_to_end(grid, conductor)
    assert RunServer(Project.from_folder(folder), "first").state.rounds_done == 1
    grid.tamper = lambda device, message, reply: reply
    resumed, uninterrupted = run_here(folder, grid), run_here(whole)
    assert same_bits(resumed.shared, uninterrupted.shared)
    assert all(same_bits(private_of(folder, d).after, private_of(whole, d).after) for d in range(4))
    assert [row["round"] for row in read_rows(resumed.folder / "rows.jsonl")] == [0, 1, 2]


def test_a_round_without_a_valid_answer_fails_the_run(tmp_path):
    folder = deployed.project(tmp_path / "here")
    grid = deployed.HereGrid(
        folder,
        client,
        lambda device, asked, reply: (
            poisoned(reply, BAD["NaN"][0]) if during(1, device)(device, asked) else reply
        ),
    )
    with pytest.raises(
        InputError, match=r"round 2 has no valid answer \(device-0: upload: '6.bias' holds NaN"
    ):
        run_here(folder, grid)
    live = read_json(folder / "runs/first/live.json", dict)
    assert live["state"] == "failed"
    assert "no valid answer" in live["reason"]


def test_a_device_that_was_away_is_told_what_it_missed(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=5)
    grid = deployed.HereGrid(folder, client)
    configure_train = RunServer.configure_train

    def leaving(self):
        grid.online = [0, 1, 2] if self.round_index in (1, 2) else None
        return configure_train(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunServer, "configure_train", leaving)
        conductor = run_here(folder, grid)
    rows = read_rows(conductor.folder / "rows.jsonl")
    assert [row["offline"] for row in rows] == [[], [], ["device-3"], ["device-3"], []]
    journal = read_rows(folder / "devices/device-3/journal.jsonl")
    told = [row["missed_rounds"] for row in journal if "missed_rounds" in row]
    assert told[0].startswith("2 rounds, 3 to 4; the mean loss went from")
    state = with_attendance(folder, {2: [3], 3: [3]})
    assert same_as(folder, state) <= 1e-6


def test_too_few_devices_are_waited_for_and_then_named(tmp_path):
    folder = deployed.project(tmp_path / "here")
    deployed.change(folder / "deploy.toml", "gather = 300.0", "gather = 0.05")
    grid = deployed.HereGrid(folder, client)
    grid.online = [1]
    with pytest.raises(InputError, match=r"1 devices are there after .* and 2 are needed"):
        run_here(folder, grid)


def test_a_run_does_not_go_on_with_fewer_than_enough_because_the_others_are_refused(tmp_path):
    folder = deployed.project(tmp_path / "here")
    for number in (1, 2, 3):
        deployed.change(folder / f"devices/device-{number}/study.toml", "batch = 5", "batch = 6")
    with pytest.raises(
        InputError,
        match=r"1 devices are there .* 2 are needed \(refused: device-1: .*; device-3: its study.toml",
    ):
        run_here(folder)
    assert not read_rows(folder / "runs/first/rows.jsonl")


def test_a_long_round_leaves_the_whole_wait_for_devices(tmp_path, monkeypatch):
    folder = deployed.project(tmp_path / "here")
    conductor, grid = (
        RunServer(Project.from_folder(folder), "first"),
        deployed.HereGrid(folder, client),
    )
    RunLoop(conductor, grid)._wait_for_clients()
    now = time.monotonic() + 10 * conductor.project.deployment.limits.connect_timeout
    monkeypatch.setattr("time.monotonic", lambda: now)
    conductor.configure_handshake({})
    assert conductor.needs_more_clients()


def test_private_state_of_another_model_is_refused_by_name(tmp_path):
    folder = deployed.project(tmp_path / "here")
    other = deployed.project(tmp_path / "other", width=9)
    run_here(other)
    state = folder / "devices/device-1/state/first.safetensors"
    state.parent.mkdir()
    state.write_bytes((other / "devices/device-1/state/first.safetensors").read_bytes())
    conductor = run_here(folder)
    told = conductor.live["refused"]["device-1"]
    assert "private state: state/first.safetensors" in told
    assert (
        "belongs to another model (shared '4.weight' [7, 9, 'torch.float32']) than this one (shared '4.weight' [7, 8, "
        in told
    )
    assert conductor.state.rounds_included == {0: 3, 2: 3, 3: 3}


def test_private_state_whose_tensors_are_not_what_it_says_is_refused(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)
    run_here(folder)
    file = RunClient.from_folder(folder / "devices/device-1").private("first")
    tensors, about = read_tensors(file.path)
    write_tensors(
        file.path,
        {name: tensor for name, tensor in tensors.items() if name != "after/0.weight"},
        about,
    )
    with pytest.raises(InputError, match=r"is damaged \('after/0.weight' is missing\)"):
        file.load()
    write_tensors(file.path, {**tensors, "before/0.bias": torch.zeros(3)}, about)
    with pytest.raises(InputError, match=r"is damaged \('before/0.bias' is \[3\] torch.float32\)"):
        file.load()
    write_tensors(
        file.path, tensors, {key: value for key, value in about.items() if key != "start_round"}
    )
    with pytest.raises(InputError, match="was not written by glocal"):
        file.load()


def test_private_state_is_for_its_owner_alone_to_read(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1, rounds=1)
    run_here(folder)
    assert (folder / "devices/device-0/state").stat().st_mode & 0o077 == 0


def test_a_run_whose_name_leads_out_of_the_folder_is_refused_by_the_device(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=1)
    with pytest.raises(InputError, match="no plain name of a run"):
        RunClient.from_folder(folder / "devices/device-0").private("../../elsewhere")


def test_private_state_that_was_lost_is_said(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.HereGrid(folder, client)
    run_here(folder, grid)
    (folder / "devices/device-1/state/first.safetensors").unlink()
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
    deployed.copy_to_devices(folder)
    conductor = run_here(folder, grid)
    assert (
        "its private state is gone"
        in read_rows(conductor.folder / "rows.jsonl")[2]["notes"]["device-1"]
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [('local = ["0", "1"]', 'local = ["0"]'), ("batch = 5", "batch = 5\ntokens = 40")],
)
def test_a_device_with_other_settings_is_refused(old, new, tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1)
    deployed.change(folder / "devices/device-2/study.toml", old, new)
    conductor = run_here(folder)
    assert "is not the server's" in conductor.live["refused"]["device-2"]


def test_a_late_joiner_learns_its_private_part_as_join_does_and_takes_part(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.HereGrid(folder, client)
    first = run_here(folder, grid)
    shared = first.shared
    add_client(folder, "late", share_metrics=True)
    grid = deployed.HereGrid(folder, client)
    client_batches = run_here(folder, grid, skip_training=True)
    assert same_bits(client_batches.shared, shared)
    member = RunClient.from_folder(folder / "devices/late")
    trained_federation = TrainedFederation(
        member.setup.algorithm,
        member.setup.model,
        member.project.plan,
        State(shared, PrivateStates(member.setup.algorithm.init(member.setup.params)[1], {})),
        4,
    )
    joined = join(
        trained_federation,
        member.data().train.of(0),
        join_plan=JoinPlan(epochs=20),
        engine="looped",
    )
    assert distance(private_of(folder, 4).after, joined.state.private.of(4)) <= 1e-6
    table = read_json(client_batches.folder / "result.json", dict)["clients"]
    assert [row["name"] for row in table if row["new_client"]] == ["late"]
    assert all(0 <= row["test"] <= 1 for row in table)
    deployed.change(folder / "study.toml", "rounds = 2", "rounds = 3")
    deployed.copy_to_devices(folder)
    assert run_here(folder, grid).state.last_included[4] == 2


def test_a_device_that_is_added_before_the_first_round_keeps_what_it_has_learnt_in_it(tmp_path):
    """While the first devices are waited for: it is no founder, and does not settle in once it has trained."""
    folder = deployed.project(tmp_path / "here", clients=3, rounds=2, clients_per_round=4)
    conductor = RunServer(Project.from_folder(folder), "first")
    add_client(folder, "early")
    run_to_end(deployed.HereGrid(folder, client), conductor)
    assert [[*row["notes"]] for row in read_rows(conductor.folder / "rows.jsonl")] == [[], []]
    deployed.change(folder / "federation.py", "range(3)", "range(4)")
    state, _ = simulated(folder)
    assert same_as(folder, state) <= 1e-6


def test_figures_leave_a_device_only_with_its_owners_consent(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=1, share_metrics=False)
    conductor = run_here(folder)
    assert read_rows(conductor.folder / "rows.jsonl")[0]["losses"] == {}
    result = read_json(conductor.folder / "result.json", dict)
    assert result["local_test"] is None
    assert all(row["test"] is None for row in result["clients"])


def test_an_accuracy_that_is_none_does_not_enter_the_mean(tmp_path):
    def boast(device, message, reply):
        if message.metadata.message_type == "evaluate" and device == 1:
            reply.content.config_records["config"]["metrics"] = '{"test": 5, "test_size": 3}'
        return reply

    folder = deployed.project(tmp_path / "here", clients=2, rounds=1)
    result = read_json(
        run_here(folder, deployed.HereGrid(folder, client, boast)).folder / "result.json", dict
    )
    assert result["clients"][1]["test"] is None
    assert result["local_test"]["mean"] == pytest.approx(result["clients"][0]["test"])


def test_a_device_predicts_with_its_own_model(tmp_path):
    folder = deployed.project(tmp_path / "here")
    conductor = run_here(folder)
    member = RunClient.from_folder(folder / "devices/device-1")
    x = member.data().test.of(0).x
    params = member.setup.algorithm.personal(conductor.shared, private_of(folder, 1).after)
    expected = predictor(member.setup.model)(
        params, x, torch.ones(len(x), dtype=torch.bool)
    ).argmax(-1)
    assert predict_classes(member, "first", x) == expected.tolist()
    with pytest.raises(InputError, match="has taken part in no round of 'second' yet"):
        predict_classes(member, "second", x)


def test_a_device_finds_its_files_in_its_own_folder_wherever_it_is_started(tmp_path, monkeypatch):
    own = deployed.project(tmp_path / "here", clients=1) / "devices/device-0"
    with (own / "federation.py").open("a") as module:
        module.write(
            "\nimport numpy as np\n\ndef data(device):\n    mine = np.load('mine.npz')\n    return mine['x'], mine['y']\n"
        )
    np.savez(own / "mine.npz", x=np.ones((20, 6), dtype=np.float32), y=np.arange(20) % 3)
    monkeypatch.chdir(tmp_path)
    assert len(RunClient.from_folder(Path("here/devices/device-0")).data().train.examples.y) == 20
    assert Path.cwd() == tmp_path


def test_what_leaves_a_device_is_its_upload_and_figures_and_the_journal_says_so(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2)
    grid = deployed.HereGrid(folder, client)
    left = []
    grid.tamper = lambda device, message, reply: left.append((device, reply)) or reply
    run_here(folder, grid)
    local = RunClient.from_folder(folder / "devices/device-0").setup.algorithm.init(
        RunClient.from_folder(folder / "devices/device-0").setup.params
    )[1]
    for _, reply in left:
        assert not reply.content.array_records
        records = reply.content.config_records.values()
        names = {name for record in records if "blob" in record for name in from_record(record)}
        assert not names & local.keys()
        assert not any(grid.contexts[device].state for device in range(4))
    sent = [row for row in read_rows(folder / "devices/device-0/journal.jsonl") if "bytes" in row]
    assert [row["tensors"] for row in sent] == [["4.weight", "4.bias", "6.weight", "6.bias"]] * 2
    assert [row["num_examples"] for row in sent] == [16, 16]


def test_the_journal_says_why_a_device_could_not_take_part_and_what_is_odd_about_its_state(
    tmp_path,
):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=2)
    deployed.change(
        folder / "devices/device-1/federation.py",
        "def data(device):",
        "def data(device):\n    {}['Jane Doe, 41']",
    )
    grid = deployed.HereGrid(folder, client)

    def lose(device, message, reply):
        if during(1, 2)(device, message):
            (folder / "devices/device-2/state/first.safetensors").unlink()
        return reply

    grid.tamper = lose
    run_here(folder, grid)
    refused, odd = (
        read_rows(folder / f"devices/device-{number}/journal.jsonl")[-1] for number in (1, 2)
    )
    assert format_journal_entry(refused).startswith(
        "first, after 0 rounds: could not do what it was asked: federation:data: the function fail"
    )
    assert "Jane Doe, 41" in format_journal_entry(refused)
    assert (
        "; the server is told: its private state is gone, it begins anew (round 2 had counted)"
        in format_journal_entry(odd)
    )


@pytest.mark.parametrize(
    ("fails", "words"),
    [
        ("raise ValueError(row)", "Jane Doe, 41"),
        ("raise SystemExit(row)", "Jane Doe, 41"),
        ("return [row], [0]", "cannot be read as (x, y)"),
        ("x[0, 0] = float('nan')", "holds NaN or infinity"),
    ],
    ids=["raised", "left", "unreadable", "not finite"],
)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_no_example_leaves_a_device_in_the_words_of_an_error(
    fails, words, masked, tmp_path, caplog
):
    """Data that fail in the second round, with a row of them in what is raised; the owner reads it, the server does not."""
    folder = deployed.project(tmp_path / "here", rounds=2)
    if masked:
        secured(folder)
    broken = f"\n    row = 'Jane Doe, 41'\n    if __import__('os').path.exists('broken'):\n        {fails}\n    return x, (x[:, 0]"
    deployed.change(folder / "devices/device-1/federation.py", "\n    return x, (x[:, 0]", broken)
    seen, grid = [], deployed.HereGrid(folder, client)

    def tamper(device, message, reply):
        seen.append(reply)
        if message.metadata.message_type == "train" and device == 1:
            (folder / "devices/device-1/broken").touch()
        return reply

    grid.tamper = tamper
    run_here(folder, grid)
    sent = [message_to_proto(reply).SerializeToString() for reply in seen]
    told = [*sent, *(path.read_bytes() for path in (folder / "runs").rglob("*.json*"))]
    assert any(b"the device's own log says why" in part for part in told)
    assert not any(b"Jane Doe" in part or words.encode() in part for part in told)
    assert "what the server is not told" in caplog.text
    assert words in caplog.text


@pytest.mark.parametrize(
    "fails",
    ["raise ValueError('Jane Doe, 41')", "raise SystemExit('Jane Doe, 41')"],
    ids=["raised", "left"],
)
def test_no_example_leaves_a_device_whose_module_reads_them_while_it_is_imported(
    fails, tmp_path, caplog
):
    folder = deployed.project(tmp_path / "here", clients=3, rounds=1)
    with (folder / "devices/device-1/federation.py").open("a") as module:
        module.write(f"\n{fails}\n")
    conductor = run_here(folder)
    assert conductor.live["refused"] == {
        "device-1": "its model or data cannot be used; the device's own log says why"
    }
    assert "Jane Doe, 41" in caplog.text


def test_where_a_device_keeps_its_files_does_not_leave_it(tmp_path):
    folder = deployed.project(tmp_path / "here", clients=4, rounds=1)
    state = folder / "devices/device-1/state/first.safetensors"
    state.parent.mkdir()
    state.write_bytes(b"damaged")
    (folder / "devices/device-2/device.toml").unlink()
    refused = run_here(folder).live["refused"]
    assert "run: state/first.safetensors is damaged" in refused["device-1"]
    assert "cannot read device.toml" in refused["device-2"]
    assert str(tmp_path) not in str(refused)


def test_of_an_error_that_nobody_foresaw_the_server_learns_the_kind(tmp_path, monkeypatch, caplog):
    folder = deployed.project(tmp_path / "here", rounds=1)
    monkeypatch.setattr(RunClient, "handshake", lambda self, order: {}["Jane Doe, 41"])
    asked = messages({1000: Instructions("first", 0)}, "query", None)[0]
    with pytest.raises(
        RuntimeError, match=r"^it failed \(KeyError\); the device's own log says why$"
    ):
        client(asked, deployed.HereGrid(folder, client).context(0))
    assert "Jane Doe, 41" in caplog.text


def secured(folder):
    deployed.change(folder / "deploy.toml", "settle = 20", "settle = 20\nsecure = true")
    deployed.copy_to_devices(folder)
    return folder


@pytest.mark.parametrize(
    "lost",
    [
        {},
        {2: "setup"},
        {2: "share_keys"},
        {2: "collect_masked_vectors"},
        {0: "share_keys", 2: "collect_masked_vectors"},
    ],
    ids=["nobody", "at once", "before it trains", "before it sends", "two"],
)
def test_secure_aggregation_is_plain_averaging_also_when_a_device_drops_out(lost, tmp_path):
    """SecAgg+ with four devices, or five; one or two are gone in round 1, before they have sent their masked uploads."""
    folder = secured(
        deployed.project(tmp_path / "here", rounds=2, clients=4 if len(lost) < 2 else 5)
    )

    def tamper(device, message, reply):
        stage = message.content.config_records.get("secaggplus_configs", {}).get("stage")
        gone = message.metadata.group_id == "1" and stage is not None and lost.get(device) == stage
        return Message(Error(5, "node unavailable"), reply_to=message) if gone else reply

    grid = deployed.HereGrid(folder, client, tamper)
    conductor = run_here(folder, grid)
    state = with_attendance(folder, {1: [*lost]})
    assert distance(conductor.shared, state.shared) <= 1e-3
    assert same_as(folder, state) <= 1e-3
    rows = read_rows(conductor.folder / "rows.jsonl")
    assert [[*row["dropped"]] for row in rows] == [[], [f"device-{device}" for device in lost]]


def test_a_device_is_not_hidden_among_itself_alone(tmp_path):
    folder = secured(deployed.project(tmp_path / "here", clients=1))
    with pytest.raises(
        InputError, match="secure hides a device among others, but a cohort is of 1"
    ):
        Project.from_folder(folder).setup  # noqa: B018


def test_no_upload_is_seen_in_secure_aggregation(tmp_path, monkeypatch):
    folder, seen, uploads, train = (
        secured(deployed.project(tmp_path / "here", rounds=1)),
        [],
        [],
        RunClient.train,
    )

    def training(self, shared, order):
        uploads.append(train(self, shared, order))
        return uploads[-1]

    def tamper(device, message, reply):
        seen.append(message_to_proto(reply).SerializeToString())
        return reply

    monkeypatch.setattr(RunClient, "train", training)
    run_here(folder, deployed.HereGrid(folder, client, tamper))
    assert len(uploads) == 4
    assert max(map(len, seen)) > 300, "a masked upload is among them"
    for answer in uploads:
        for tensor in answer.upload.tensors.values():
            assert not any(pack({"": tensor})[:8] in reply for reply in seen)


def test_a_device_that_masks_refuses_to_send_in_the_clear(tmp_path):
    """Whatever the server asks for: a server that does not mask is refused by all that do, and the other way round."""
    folder = deployed.project(tmp_path / "here", rounds=1)
    deployed.change(
        folder / "devices/device-0/deploy.toml", "settle = 20", "settle = 20\nsecure = true"
    )
    grid = deployed.HereGrid(folder, client)
    conductor = run_here(folder, grid)
    assert "is not the server's" in conductor.live["refused"]["device-0"]
    asked = messages({1000: Instructions("first", 0)}, "train", to_record(conductor.shared))[0]
    assert "sends its uploads masked only" in read_reply(client(asked, grid.context(0))).fault


def test_clipping_and_noise_on_devices_come_with_an_epsilon(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2, weights='weights = "equal"')
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    deployed.copy_to_devices(folder)
    left = []
    grid = deployed.HereGrid(folder, client)
    grid.tamper = lambda device, message, reply: left.append(reply) or reply
    conductor = run_here(folder, grid)
    kept = read_json(conductor.folder / "result.json", dict)["privacy"]
    assert kept["rounds"] == 2
    assert kept["epsilon"] == pytest.approx(epsilon(2.0, 2, 1e-5))
    records = [reply.content.config_records for reply in left]
    uploads = [from_record(found["shared"]) for found in records if "shared" in found]
    setup = Project.from_folder(folder).setup
    began = setup.algorithm.init(setup.params)[0]
    moved = torch.cat(
        [
            (upload[name] - tensor).flatten()
            for upload in uploads[:4]
            for name, tensor in began.items()
        ]
    )
    # 348 numbers of nobody's choosing: their deviation is itself known to 0.04
    assert moved.std() == pytest.approx(1.0, rel=0.2)


def test_the_accountant_counts_what_was_sent_and_did_not_count(tmp_path):
    folder = deployed.project(tmp_path / "here", rounds=2, weights='weights = "equal"')
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    deployed.copy_to_devices(folder)
    grid = deployed.HereGrid(
        folder,
        client,
        lambda device, asked, reply: None if during(1, device)(device, asked) else reply,
    )
    deployed.change(folder / "deploy.toml", "round = 600.0", "round = 0.1")
    with pytest.raises(InputError, match="round 2 has no valid answer"):
        run_here(folder, grid)
    grid.tamper = lambda device, asked, reply: reply
    kept = read_json(run_here(folder, grid).folder / "result.json", dict)["privacy"]
    assert kept["rounds"] == 3, "round 2 was sent twice"
    assert kept["epsilon"] == pytest.approx(epsilon(2.0, 3, 1e-5))


def test_privacy_needs_equal_weights(tmp_path):
    folder = deployed.project(tmp_path / "here")
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    with pytest.raises(InputError, match=r"set plan\.weights = 'equal'"):
        Project.from_folder(folder).setup  # noqa: B018


class Touches:
    """What would leave a trace if it were unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def planted(trace, shared):
    """A round's message that brings code along, where tensors are expected and beside them."""
    message = messages({1000: Instructions("first", 0)}, "train", to_record(shared))[0]
    source = f"__import__('os').mkdir({str(trace)!r})"
    message.content["glocal.deploy.apps"] = ConfigRecord({"source": source})
    message.content["federation"] = ConfigRecord({"data": source.encode()})
    return message


@pytest.mark.parametrize("where", ["beside", "in the blob", "in the order"])
def test_nothing_that_a_message_brings_along_is_run(where, tmp_path):
    folder, trace = deployed.project(tmp_path / "here", clients=1, rounds=1), tmp_path / "trace"
    grid = deployed.HereGrid(folder, client)
    message = planted(trace, RunServer(Project.from_folder(folder), "first").shared)
    records = message.content.config_records
    if where == "in the blob":
        records["shared"]["blob"] = pickle.dumps(Touches(trace))
    if where == "in the order":
        records["config"]["instructions"] = f"__import__('os').mkdir({str(trace)!r})"
    expected = (
        nullcontext() if where == "beside" else pytest.raises(RuntimeError, match="it failed")
    )
    with expected:
        reply = read_reply(client(message, grid.context(0)))
        assert not reply.fault
    assert not trace.exists()


def test_nothing_that_a_masked_message_brings_along_is_run(tmp_path):
    """Its arrays are numpy's files, which may hold objects to be unpickled."""
    trace, buffer = tmp_path / "trace", io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": (1,)}
    np.lib.format.write_array_header_1_0(buffer, header)
    held = buffer.getvalue() + pickle.dumps(Touches(trace))
    with pytest.raises(ValueError, match="Object arrays cannot be loaded"):
        client_internals.parameters_to_ndarrays(Parameters([held], "numpy.ndarray"))
    assert not trace.exists()
    np.load(io.BytesIO(held), allow_pickle=True)
    assert trace.exists(), "the test would not see it"
