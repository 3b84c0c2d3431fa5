"""For real, on loopback: a server and clients in processes of their own, TLS and keys, kills, and what crosses the wire."""

import json
import os
import re
import socket
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from glocal.cli.deploy_processes import client_program
from glocal.core.errors import InputError
from glocal.core.files import read_json
from glocal.core.trees import same_bits
from glocal.datasets.fetch import no_progress
from glocal.deploy.preflight import free_port
from glocal.deploy.project import Project
from glocal.deploy.scaffold import DeploymentSpec, add_client, create_deployment
from glocal.deploy.server import RunServer
from glocal.federate.rounds import simulate
from glocal.studies.build import build_algorithm, build_components
from glocal.wire import pack
from tests.deploy.test_flower import private_of, secured, with_attendance
from tests.support import deployed
from tests.support.running import kill, pids, running
from tests.support.stock import start_request, stock
from tests.support.wiretap import Wiretap
from tests.support.world import distance

pytestmark = pytest.mark.slow


def rounds_of(folder):
    """Every round's state in the simulator."""
    project = Project.from_folder(folder)
    project.make_importable()
    parts = build_components(project.study, no_progress)
    algorithm = build_algorithm(
        project.study, next(iter(project.study.experiments.values())), parts
    )
    train = parts.federations[0].train
    rounds = simulate(algorithm, parts.params[0], train, project.plan, engine="looped")
    return [state for state, _ in rounds]


def windows(tree, width=32):
    """Every run of 32 bytes of every tensor, but for those that say nothing (zeros, ones)."""
    for tensor in tree.values():
        data = pack({"": tensor})
        for start in range(len(data) - width + 1):
            window = data[start : start + width]
            if len({*window}) > 8:
                yield window


def test_three_devices_over_tls_give_the_simulators_bits_and_nothing_local_crosses_the_wire(
    tmp_path,
):
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=3, rounds=3, port=port, out=12000)
    tap = Wiretap(port, folder / "certificates")
    for own in (folder / "clients").iterdir():
        deployed.change(own / "deploy.toml", f"port = {port}", f"port = {tap.port}")
    states = rounds_of(folder)
    with running(folder) as these:
        these.server()
        for name in ("device-0", "device-1", "device-2"):
            these.device(name)
        live = these.follow("first")
    tap.close()
    assert live["state"] == "done"
    conductor = RunServer(Project.from_folder(folder), "first")
    assert same_bits(conductor.shared, states[-1].shared)
    for device in range(3):
        assert same_bits(private_of(folder, device).after, states[-1].private.of(device))
    wire = bytes(tap.up) + bytes(tap.down)
    assert pack({"": states[0].shared["4.weight"]})[:32] in wire, "the tap hears nothing"
    for state in states:
        for device in range(3):
            assert not any(window in wire for window in windows(state.private.of(device)))
    ledger = conductor.state.ledger.total.bytes
    print(f"wire {len(wire):,} ledger {ledger:,} ratio {len(wire) / ledger:.3f}")
    assert ledger <= len(wire) <= 1.2 * ledger


# what a device's own module does to what is sent, so that its process behaves badly
SPOILING = """
import glocal.deploy.flower.records as records
import time
from pathlib import Path
from glocal.core.files import read_rows

to_record = records.to_record

def spoilt(tree):
    number = read_rows(Path(__file__).parent / "journal.jsonl")[-1]["round"]
    {what}
    return to_record(tree)

records.to_record = spoilt
"""
NAN_THEN_WRONG_SHAPE = """
    if number == 1:
        tree = {**tree, "6.bias": tree["6.bias"] * float("nan")}
    if number == 2:
        time.sleep(10)  # others have answered by then, and the server can be killed in between
        tree = {**tree, "6.bias": tree["6.bias"][:1]}
"""
SLOW_IN_THE_SECOND_ROUND = """
    if number == 1 and not Path(__file__).with_name("was-slow").exists():
        Path(__file__).with_name("was-slow").touch()
        time.sleep(120)
"""


def spoil(folder, device, what):
    with (folder / f"devices/{device}/federation.py").open("a") as module:
        module.write(SPOILING.replace("    {what}\n", what))


def test_kills_bad_devices_and_a_late_joiner_lose_nothing(tmp_path):
    """Round 2: a device is killed at work, another sends NaN. Round 3: a wrong shape, and the server is killed. Then one joins."""
    folder = deployed.project(tmp_path / "link", clients=4, rounds=4, port=free_port())
    spoil(folder, "device-1", SLOW_IN_THE_SECOND_ROUND)
    spoil(folder, "device-3", NAN_THEN_WRONG_SHAPE)
    with running(folder) as these:
        these.server()
        for number in range(4):
            these.device(f"device-{number}")
        outcome = []
        run = threading.Thread(target=lambda: outcome.append(_ended(these, "first")), daemon=True)
        run.start()
        these.until((folder / "devices/device-1/was-slow").exists)
        kill(folder / "devices/device-1", "client_process")
        these.until(lambda: len(these.rows("first")) == 2)
        these.until(
            lambda: these.live("first").get("round") == 2 and these.live("first").get("answered")
        )
        kill(folder, "server_process")
        run.join(60)
        assert outcome, these.said
        assert "glocal deploy resume" in str(outcome[0])
        these.until_connected(*(f"device-{number}" for number in range(4)))
        these.follow("first")
        rows = these.rows("first")
        kept = [private_of(folder, device).after for device in range(4)]
        add_client(folder, "late", share_metrics=True)
        these.device("late")
        these.until(lambda: "late" in (these.connected_or_none() or ()))
        these.follow("first", adapt=True)
    absent = {
        row["round"]: [number for number in range(4) if f"device-{number}" not in row["clients"]]
        for row in rows
    }
    assert absent == {0: [], 1: [1, 3], 2: [3], 3: []}
    assert "it was started anew" in rows[1]["dropped"]["device-1"]
    assert "'6.bias' holds NaN" in rows[1]["dropped"]["device-3"]
    assert "'6.bias' is (1,)" in rows[2]["dropped"]["device-3"]
    state = with_attendance(folder, absent)
    assert distance(RunServer(Project.from_folder(folder), "first").shared, state.shared) <= 1e-6
    assert max(distance(kept[device], state.private.of(device)) for device in range(4)) <= 1e-6
    result = read_json(folder / "runs/first/result.json", dict)["clients"]
    late = [row for row in result if row["new_client"]]
    assert [row["name"] for row in late] == ["late"]
    assert late[0]["test"] is not None


def _ended(these, run):
    try:
        return these.follow(run)
    except InputError as error:
        return error


def test_secure_aggregation_works_on_real_devices(tmp_path):
    folder = secured(deployed.project(tmp_path / "link", clients=3, rounds=2, port=free_port()))
    states = rounds_of(folder)
    names = [f"device-{number}" for number in range(3)]
    with running(folder) as these:
        these.server()
        these.device(*names, who="gateway")
        these.follow("first")
    assert (
        distance(RunServer(Project.from_folder(folder), "first").shared, states[-1].shared) <= 1e-3
    )
    assert [row["clients"] for row in these.rows("first")] == [names, names]


def test_a_device_comes_back_by_itself_when_a_line_that_was_cut_is_mended(tmp_path):
    """A proxy that accepts and closes every connection."""
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=1, port=port)
    tap = Wiretap(port, folder / "certificates")
    own = folder / "devices/device-0/deploy.toml"
    deployed.change(own, f"port = {port}", f"port = {tap.port}")
    with running(folder) as these:
        these.server()
        these.device("device-0")
        these.until_connected("device-0")
        tap.cut_off()
        these.until_connected()
        tap.cut = False
        these.until_connected("device-0")
    tap.close()


def test_a_device_and_a_server_that_are_killed_come_back_and_whoever_is_left_goes_on(tmp_path):
    folder = deployed.project(tmp_path / "link", clients=2, rounds=2, port=free_port())
    with running(folder) as these:
        these.server()
        these.device("device-0")
        these.device("device-1")
        these.until_connected("device-0", "device-1")
        began = time.monotonic()
        killed = kill(folder / "devices/device-0", "client_process")
        back = lambda: sum("device-0: connected" in words for words in these.said) == 2  # noqa: E731
        these.until(back)
        assert pids(folder / "devices/device-0") != [killed]
        these.until_connected("device-0", "device-1")
        print(f"a killed device is back after {time.monotonic() - began:.1f} s")
        before = pids(folder / "clients")
        kill(folder, "server_process")
        these.until_connected("device-0", "device-1")
        assert pids(folder / "clients") == before, "the devices were not started anew"
        assert these.follow("first")["state"] == "done"


def listening(pid):
    """The ports that a process listens on."""
    inodes = {
        match[1]
        for place in Path(f"/proc/{pid}/fd").iterdir()
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(place)))
    }
    rows = [
        line.split()
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        int(row[1].rpartition(":")[2], 16)
        for row in rows
        if row[9] in inodes and row[3] in ("0A", "07")
    ]


def test_a_device_is_one_process_that_listens_to_nobody_and_keeps_what_it_has_to_itself(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the owner's")
    folder = deployed.project(tmp_path / "link", clients=2, rounds=1, port=(port := free_port()))
    own = folder / "devices/device-0"
    (own / "state").mkdir(mode=0o755)
    (own / "device.key").chmod(0o644)
    with running(folder) as these:
        these.server()
        these.device("device-0")
        these.device("device-1")
        these.follow("first")
        [pid] = pids(own)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert not children
        assert not listening(pid)
        [server] = [number for number in pids(folder) if number not in pids(folder / "clients")]
        assert listening(server) == [port]
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"AWS_SECRET" not in environment
        assert b"FLWR_TELEMETRY_ENABLED=0" in environment
        door = folder / "operator.sock"
        assert stat.S_ISSOCK(door.stat().st_mode)
        assert stat.S_IMODE(door.stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "operator.secret").stat().st_mode) == 0o600
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
    assert any("device.key could be read by others; now it cannot" in words for words in these.said)
    secret = [own, own / "state", own / "logs", own / "device.key", own / "journal.jsonl"]
    for path in [folder, *secret, *(own / "state").iterdir(), *(own / "logs").iterdir()]:
        assert not path.stat().st_mode & 0o077, path
    assert not door.exists(), "a server that ended left its door open"


def test_twenty_devices_of_a_gateway_share_one_process_and_nothing_else(tmp_path):
    folder = create_deployment(
        tmp_path / "link", DeploymentSpec(clients=20, port=free_port(), rounds=3)
    ).folder
    names = [f"device-{number}" for number in range(20)]
    with running(folder) as these:
        these.server()
        these.device(*names, who="gateway")
        these.until_connected(*names)
        assert these.follow("first")["state"] == "done"
        [pid] = pids(folder / "clients")
        memory = int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])
        seconds = [row["seconds"] for row in these.rows("first")]
        print(f"memory {memory / 1000:.0f} MB, rounds {seconds}")
        assert memory < 400_000
    states = {
        (folder / "clients" / name / "state/first.safetensors").read_bytes() for name in names
    }
    assert len(states) == 20
    assert [len(row["clients"]) for row in these.rows("first")] == [20, 20, 20]


def test_a_client_opens_its_own_folder_and_no_other_clients_and_runs_nothing_that_came_to_it(
    tmp_path, monkeypatch
):
    """In a gateway, where it could. Each has a module of its own under one name, which imports another late."""
    audit = tmp_path / "audit"
    monkeypatch.setenv("GLOCAL_AUDIT", str(audit))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    folder = deployed.project(tmp_path / "link", clients=3, rounds=2, port=free_port())
    names = [f"device-{number}" for number in range(3)]
    for name in names:
        own = folder / "clients" / name
        (own / "helper.py").write_text(f"OWNER = {name!r}\n")
        with (own / "federation.py").open("a") as module:
            module.write(LATE_IMPORT)
    with running(folder) as these:
        these.server()
        program = client_program([folder / "clients" / name for name in names])
        these.begin("gateway", replace(program, module="tests.support.audited_client"))
        these.follow("first")
    events = [json.loads(line) for line in audit.read_text().splitlines()]
    clients, opened = str(folder / "clients"), {name: set() for name in names}
    for current, event, what in events:
        if what.startswith(clients):
            assert current, (event, what)
            assert Path(what).is_relative_to(current), (current, event, what)
            opened[Path(current).name].add(Path(what).name)
        assert not what.startswith(str(folder)) or what.startswith(clients), (
            "the server's own folder"
        )
    for name in names:
        assert {"device.key", "federation.py", "helper.py", "journal.jsonl"} <= opened[name]
        assert (folder / "clients" / name / "owner").read_text() == name, "it got another's module"
    started = {event for _, event, _ in events} - {
        "open",
        "import",
        "os.listdir",
        "os.scandir",
        "os.mkdir",
    }
    assert started <= {"os.remove", "os.rename", "os.chmod"}, (
        "no program was started, no port bound"
    )


LATE_IMPORT = """
from pathlib import Path

everything = data

def data(device):
    import helper
    Path("owner").write_text(helper.OWNER)
    return everything(device)
"""

BUNDLE = re.compile(r"```toml\n(# pyproject.toml.*?)```", re.DOTALL)


def test_glocals_apps_run_on_a_plain_flower_installation_too_to_the_same_bits(tmp_path):
    """Flower's own SuperLink and SuperNodes, and the app as the guide has it."""
    folder = deployed.project(tmp_path / "link", clients=2, rounds=2)
    states = rounds_of(folder)
    guide = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    app = {"pyproject.toml": BUNDLE.search(guide)[1]}
    with stock(folder) as these:
        these.node("device-0")
        these.node("device-1")
        these.until_online(2)
        settings = {"folder": str(folder), "run": "first", "adapt": False}
        ended = these.run(start_request(app, settings))
        assert ended.sub_status == "completed", (ended, these.words())
    assert same_bits(RunServer(Project.from_folder(folder), "first").shared, states[-1].shared)
    for device in range(2):
        assert same_bits(private_of(folder, device).after, states[-1].private.of(device))
