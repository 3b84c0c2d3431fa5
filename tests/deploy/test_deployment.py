"""Real processes on loopback: a server, clients, TLS and keys, kills, the bytes on the wire."""

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
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.files import read_json
from glocal.core.trees import same_bits
from glocal.deploy.preflight import free_port
from glocal.deploy.project import Project
from glocal.deploy.scaffold import DeploymentSpec, add_client, create_deployment
from glocal.deploy.server import RunServer
from glocal.wire import pack
from tests.support import deployed
from tests.support.deployed_runs import (
    private_of,
    secured,
    simulated_rounds,
    simulated_run,
    with_availability,
)
from tests.support.running import kill, pids, running
from tests.support.stock import start_request, stock
from tests.support.wiretap import Wiretap
from tests.support.world import distance

pytestmark = pytest.mark.slow


def rounds_of(folder):
    """Every round's state in the simulator."""
    return [state for state, _ in simulated_rounds(folder)]


def windows(tree, width=32):
    """Every window of 32 bytes of every tensor, without those of few values (zeros, ones)."""
    for tensor in tree.values():
        data = pack({"": tensor})
        for start in range(len(data) - width + 1):
            window = data[start : start + width]
            if len({*window}) > 8:
                yield window


def test_three_clients_over_tls_give_the_simulators_bits_and_nothing_local_crosses_the_wire(
    tmp_path,
):
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=3, rounds=3, port=port, out=12000)
    tap = Wiretap(port, folder / "certificates")
    for own in (folder / "clients").iterdir():
        deployed.change(own / "deploy.toml", f"port = {port}", f"port = {tap.port}")
    states = rounds_of(folder)
    with running(folder) as deployment:
        deployment.server()
        for name in ("client-0", "client-1", "client-2"):
            deployment.client(name)
        live = deployment.follow("first")
    tap.close()
    assert live["state"] == "done"
    server = RunServer(Project.from_folder(folder), "first")
    assert same_bits(server.shared, states[-1].shared)
    for client in range(3):
        assert same_bits(private_of(folder, client).after, states[-1].private.of(client))
    wire = bytes(tap.up) + bytes(tap.down)
    assert pack({"": states[0].shared["4.weight"]})[:32] in wire, "the tap records nothing"
    for state in states:
        for client in range(3):
            assert not any(window in wire for window in windows(state.private.of(client)))
    ledger = server.state.ledger.total.bytes
    print(f"wire {len(wire):,} ledger {ledger:,} ratio {len(wire) / ledger:.3f}")
    assert ledger <= len(wire) <= 1.2 * ledger


def test_encoded_uploads_over_tls_give_the_simulators_bits_in_fewer_bytes(tmp_path):
    """LG-FedAvg with int8: a byte for each number on the wire, and the state of `Run`."""
    port = free_port()
    plan = 'uplink = ["int8"]'
    folder = deployed.project(
        tmp_path / "link", clients=3, rounds=3, port=port, out=4000, plan=plan
    )
    tap = Wiretap(port, folder / "certificates")
    for own in (folder / "clients").iterdir():
        deployed.change(own / "deploy.toml", f"port = {port}", f"port = {tap.port}")
    progress = simulated_run(folder)
    state = progress.states[0].group()
    with running(folder) as deployment:
        deployment.server()
        for name in ("client-0", "client-1", "client-2"):
            deployment.client(name)
        assert deployment.follow("first")["state"] == "done"
    tap.close()
    server = RunServer(Project.from_folder(folder), "first")
    assert same_bits(server.shared, state.shared)
    for client in range(3):
        assert same_bits(private_of(folder, client).after, state.private.of(client))
    ledger, numbers = server.state.ledger, trees.numel(server.shared)
    assert ledger.upload == progress.ledgers[0][0].upload
    assert ledger.upload.bytes == 9 * (numbers + 4 * len(server.shared))  # a scale per tensor too
    print(f"up {len(tap.up):,} down {len(tap.down):,} ledger {ledger.as_dict()}")
    assert ledger.upload.bytes <= len(tap.up) <= 1.5 * ledger.upload.bytes


# what a client's own module does to the upload, so that the client behaves badly
BAD_MODULE = """
import glocal.deploy.flower.records as records
import time
from pathlib import Path
from glocal.core.files import read_rows

to_record = records.to_record

def changed(tree):
    number = read_rows(Path(__file__).parent / "journal.jsonl")[-1]["round"]
    {what}
    return to_record(tree)

records.to_record = changed
"""
NAN_THEN_WRONG_SHAPE = """
    if number == 1:
        tree = {**tree, "6.bias": tree["6.bias"] * float("nan")}
    if number == 2:
        time.sleep(10)  # the others have replied by then, and the server can be killed
        tree = {**tree, "6.bias": tree["6.bias"][:1]}
"""
SLOW_IN_THE_SECOND_ROUND = """
    if number == 1 and not Path(__file__).with_name("was-slow").exists():
        Path(__file__).with_name("was-slow").touch()
        time.sleep(120)
"""


def make_bad(folder, client, what):
    with (folder / f"clients/{client}/federation.py").open("a") as module:
        module.write(BAD_MODULE.replace("    {what}\n", what))


def test_kills_bad_clients_and_a_new_client_lose_nothing(tmp_path):
    """A client is killed and another sends NaN, then a wrong shape; the server is killed.

    Then a new client joins.
    """
    folder = deployed.project(tmp_path / "link", clients=4, rounds=4, port=free_port())
    make_bad(folder, "client-1", SLOW_IN_THE_SECOND_ROUND)
    make_bad(folder, "client-3", NAN_THEN_WRONG_SHAPE)
    with running(folder) as deployment:
        deployment.server()
        for number in range(4):
            deployment.client(f"client-{number}")
        outcome = []
        run = threading.Thread(
            target=lambda: outcome.append(_follow_to_end(deployment, "first")), daemon=True
        )
        run.start()
        deployment.until((folder / "clients/client-1/was-slow").exists)
        kill(folder / "clients/client-1", "client_process")
        deployment.until(lambda: len(deployment.rows("first")) == 2)
        deployment.until(
            lambda: (
                deployment.live("first").get("round") == 2
                and deployment.live("first").get("answered")
            )
        )
        kill(folder, "server_process")
        run.join(60)
        assert outcome, deployment.notices
        assert "glocal deploy resume" in str(outcome[0])
        deployment.until_connected(*(f"client-{number}" for number in range(4)))
        deployment.follow("first")
        rows = deployment.rows("first")
        private = [private_of(folder, client).after for client in range(4)]
        add_client(folder, "late", share_metrics=True)
        deployment.client("late")
        deployment.until(lambda: "late" in (deployment.connected_or_none() or ()))
        deployment.follow("first", skip_training=True)
    absent = {
        row["round"]: [number for number in range(4) if f"client-{number}" not in row["clients"]]
        for row in rows
    }
    assert absent == {0: [], 1: [1, 3], 2: [3], 3: []}
    assert "it was restarted" in rows[1]["dropped"]["client-1"]
    assert "'6.bias' holds NaN" in rows[1]["dropped"]["client-3"]
    assert "340 bytes arrived, 348 were expected" in rows[2]["dropped"]["client-3"]
    state = with_availability(folder, absent)
    assert distance(RunServer(Project.from_folder(folder), "first").shared, state.shared) <= 1e-6
    assert max(distance(private[client], state.private.of(client)) for client in range(4)) <= 1e-6
    result = read_json(folder / "runs/first/result.json", dict)["clients"]
    late = [row for row in result if row["new_client"]]
    assert [row["name"] for row in late] == ["late"]
    assert late[0]["test"] is not None


def _follow_to_end(deployment, run):
    try:
        return deployment.follow(run)
    except InputError as error:
        return error


def test_secure_aggregation_works_with_real_processes(tmp_path):
    folder = secured(deployed.project(tmp_path / "link", clients=3, rounds=2, port=free_port()))
    states = rounds_of(folder)
    names = [f"client-{number}" for number in range(3)]
    with running(folder) as deployment:
        deployment.server()
        deployment.client(*names)
        deployment.follow("first")
    assert (
        distance(RunServer(Project.from_folder(folder), "first").shared, states[-1].shared) <= 1e-4
    )
    assert [row["clients"] for row in deployment.rows("first")] == [names, names]


def test_a_client_reconnects_by_itself_after_its_connection_was_cut(tmp_path):
    """A proxy that accepts and closes every connection."""
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=1, port=port)
    tap = Wiretap(port, folder / "certificates")
    own = folder / "clients/client-0/deploy.toml"
    deployed.change(own, f"port = {port}", f"port = {tap.port}")
    with running(folder) as deployment:
        deployment.server()
        deployment.client("client-0")
        deployment.until_connected("client-0")
        tap.cut_off()
        deployment.until_connected()
        tap.cut = False
        deployment.until_connected("client-0")
    tap.close()


def test_a_killed_client_and_a_killed_server_come_back_and_the_run_goes_on(tmp_path):
    folder = deployed.project(tmp_path / "link", clients=2, rounds=2, port=free_port())
    with running(folder) as deployment:
        deployment.server()
        deployment.client("client-0")
        deployment.client("client-1")
        deployment.until_connected("client-0", "client-1")
        connected = "client-0: connected"
        deployment.until(lambda: any(connected in line for line in deployment.notices))
        began = time.monotonic()
        killed = kill(folder / "clients/client-0", "client_process")
        deployment.until(lambda: sum(connected in line for line in deployment.notices) == 2)
        assert pids(folder / "clients/client-0") != [killed]
        deployment.until_connected("client-0", "client-1")
        print(f"a killed client is back after {time.monotonic() - began:.1f} s")
        before = pids(folder / "clients")
        kill(folder, "server_process")
        deployment.until_connected("client-0", "client-1")
        assert pids(folder / "clients") == before, "the clients were restarted"
        assert deployment.follow("first")["state"] == "done"


def listening(pid):
    """The ports that a process listens on."""
    inodes = {
        match[1]
        for descriptor in Path(f"/proc/{pid}/fd").iterdir()
        if (match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor)))
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


def test_a_client_is_one_process_without_ports_and_with_private_files(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the owner's")
    folder = deployed.project(tmp_path / "link", clients=2, rounds=1, port=(port := free_port()))
    own = folder / "clients/client-0"
    (own / "state").mkdir(mode=0o755)
    (own / "client.key").chmod(0o644)
    with running(folder) as deployment:
        deployment.server()
        deployment.client("client-0")
        deployment.client("client-1")
        deployment.follow("first")
        [pid] = pids(own)
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert not children
        assert not listening(pid)
        [server] = [number for number in pids(folder) if number not in pids(folder / "clients")]
        assert listening(server) == [port]
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"AWS_SECRET" not in environment
        assert b"FLWR_TELEMETRY_ENABLED=0" in environment
        operator_socket = folder / "operator.sock"
        assert stat.S_ISSOCK(operator_socket.stat().st_mode)
        assert stat.S_IMODE(operator_socket.stat().st_mode) == 0o600
        assert stat.S_IMODE((folder / "operator.secret").stat().st_mode) == 0o600
        with socket.create_connection(("127.0.0.1", port), 5):
            pass
    corrected = re.compile("other users could read .*client.key; this is corrected")
    assert any(corrected.search(line) for line in deployment.notices)
    private = [own, own / "state", own / "logs", own / "client.key", own / "journal.jsonl"]
    for path in [folder, *private, *(own / "state").iterdir(), *(own / "logs").iterdir()]:
        assert not path.stat().st_mode & 0o077, path
    assert not operator_socket.exists(), "a server that ended left its socket"


def test_twenty_clients_of_a_gateway_share_one_process_and_nothing_else(tmp_path):
    folder = create_deployment(
        tmp_path / "link", DeploymentSpec(clients=20, port=free_port(), rounds=3)
    ).folder
    names = [f"client-{number}" for number in range(20)]
    with running(folder) as deployment:
        deployment.server()
        deployment.client(*names)
        deployment.until_connected(*names)
        assert deployment.follow("first")["state"] == "done"
        [pid] = pids(folder / "clients")
        memory = int(re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1])
        seconds = [row["seconds"] for row in deployment.rows("first")]
        print(f"memory {memory / 1000:.0f} MB, rounds {seconds}")
        assert memory < 400_000
    states = {
        (folder / "clients" / name / "state/first.safetensors").read_bytes() for name in names
    }
    assert len(states) == 20
    assert [len(row["clients"]) for row in deployment.rows("first")] == [20, 20, 20]


def test_a_client_opens_only_its_own_folder_and_runs_no_code_from_messages(tmp_path, monkeypatch):
    """In a gateway. Each client has its own module of the same name, which imports another late."""
    audit = tmp_path / "audit"
    monkeypatch.setenv("GLOCAL_AUDIT", str(audit))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    folder = deployed.project(tmp_path / "link", clients=3, rounds=2, port=free_port())
    names = [f"client-{number}" for number in range(3)]
    for name in names:
        own = folder / "clients" / name
        (own / "helper.py").write_text(f"OWNER = {name!r}\n")
        with (own / "federation.py").open("a") as module:
            module.write(LATE_IMPORT)
    with running(folder) as deployment:
        deployment.server()
        program = client_program([folder / "clients" / name for name in names])
        deployment.begin("gateway", replace(program, module="tests.support.audited_client"))
        deployment.follow("first")
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
        assert {"client.key", "federation.py", "helper.py", "journal.jsonl"} <= opened[name]
        assert (folder / "clients" / name / "owner").read_text() == name, (
            "it imported another client's module"
        )
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

original = data

def data(client):
    import helper
    Path("owner").write_text(helper.OWNER)
    return original(client)
"""

BUNDLE = re.compile(r"```toml\n(# pyproject.toml.*?)```", re.DOTALL)


def test_glocals_apps_on_a_plain_flower_installation_give_the_same_bits(tmp_path):
    """Flower's own SuperLink and SuperNodes, and the app as the guide has it."""
    folder = deployed.project(tmp_path / "link", clients=2, rounds=2)
    states = rounds_of(folder)
    guide = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    app = {"pyproject.toml": BUNDLE.search(guide)[1]}
    with stock(folder) as deployment:
        deployment.node("client-0")
        deployment.node("client-1")
        deployment.until_online(2)
        settings = {"folder": str(folder), "run": "first", "skip_training": False}
        status = deployment.run(start_request(app, settings))
        assert status.sub_status == "completed", (status, deployment.logs())
    assert same_bits(RunServer(Project.from_folder(folder), "first").shared, states[-1].shared)
    for client in range(2):
        assert same_bits(private_of(folder, client).after, states[-1].private.of(client))
