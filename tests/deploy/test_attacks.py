"""A real deployment under attack: strangers, hostile clients, forged servers, malicious apps."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
import threading
import time
from base64 import b64encode
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest

from glocal.deploy import certificates
from glocal.deploy.certificates import make_authority, make_server_certificate, read_client_key
from glocal.deploy.flower import server_internals
from glocal.deploy.preflight import free_port
from glocal.deploy.runtime import connect_server
from tests.support import deployed
from tests.support.running import pids, running
from tests.support.stock import start_request, stock
from tests.support.stranger import flood, post
from tests.support.wiretap import Wiretap

pytestmark = pytest.mark.slow

LARGE = 300 * 2**20
# an app that copies every secret that it can read, wherever it runs
EVIL = {
    "pyproject.toml": """[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "evil"
version = "1.0.0"
description = "evil"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "evil"
[tool.flwr.app.components]
serverapp = "evil.server:app"
clientapp = "evil.client:app"
[tool.flwr.app.config]
folder = ""
run = ""
skip_training = false
loot = ""
""",
    "evil/__init__.py": "",
    "evil/server.py": """
import pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    loot, folder = (pathlib.Path(str(context.run_config[name])) for name in ("loot", "folder"))
    (loot / "server").write_bytes((folder / "certificates/ca.key").read_bytes())
    content = RecordDict({"loot": ConfigRecord({"loot": str(loot)})})
    nodes = list(grid.get_node_ids())
    grid.send_and_receive([Message(content, node, "train") for node in nodes], timeout=60)
""",
    "evil/client.py": """
import pathlib
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
app = ClientApp()
@app.train()
def train(message, context):
    own = pathlib.Path(str(context.node_config["folder"]))
    loot = pathlib.Path(str(message.content.config_records["loot"]["loot"]))
    (loot / own.name).write_bytes((own / "client.key").read_bytes())
    return Message(RecordDict(), reply_to=message)
""",
    # what an import of the installed library would load if the bundle were on the import path
    "glocal/__init__.py": "import pathlib; pathlib.Path('LOOT/module').touch()",
    "glocal/deploy/apps.py": "import pathlib; pathlib.Path('LOOT/apps').touch()",
    "federation.py": "import pathlib; pathlib.Path('LOOT/federation').touch()",
}


def evil(loot, folder, **settings):
    """A request that starts the evil app."""
    files = {name: text.replace("LOOT", str(loot)) for name, text in EVIL.items()}
    config = {"folder": str(folder), "run": "first", "skip_training": False, "loot": str(loot)}
    return start_request(files, {**config, **settings})


@pytest.fixture
def loot(tmp_path):
    """A folder to which every user can write secrets."""
    for above in (tmp_path, *tmp_path.parents[:3]):
        above.chmod(above.stat().st_mode | 0o011)
    folder = tmp_path / "loot"
    folder.mkdir()
    folder.chmod(0o777)
    return folder


def as_a_stranger(**attempts):
    """The results of attempts by another user of this machine."""
    if os.getuid() != 0:
        pytest.fail("this test becomes another user (uid 65534), for which it must be run as root")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.stranger"],
        input=json.dumps(attempts),
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert not ended.returncode, ended.stderr
    results = json.loads(ended.stdout)
    assert results["uid"] == 65534
    return results


def secrets_of(folder):
    """The secret files of a deployment."""
    names = ("**/*.key", "**/*.secret", "**/*.sock", "**/state/*", "**/*.jsonl", "**/*.safetensors")
    return sorted({str(path) for name in names for path in folder.glob(name) if not path.is_dir()})


def memory(pid):
    """The most bytes that a process has held so far."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[1]) * 1000


def server_of(folder):
    [pid] = [pid for pid in pids(folder) if pid not in pids(folder / "clients")]
    return pid


@pytest.fixture
def attacked(tmp_path, loot):
    """A deployment of two clients that has done a round."""
    folder = deployed.project(tmp_path / "link", clients=2, rounds=1, port=free_port())
    with running(folder) as deployment:
        deployment.server()
        deployment.client("client-0")
        deployment.client("client-1")
        deployment.follow("first")
        deployment.port = int(re.search(r"port = (\d+)", (folder / "deploy.toml").read_text())[1])
        yield deployment


def all_routes():
    """Every route of Flower's server, with its method."""
    routes = server_internals.SuperLink("x").app.openapi()["paths"]
    paths = [[next(iter(methods)).upper(), path] for path, methods in routes.items()]
    return [*paths, ["GET", "/docs"], ["GET", "/openapi.json"], ["GET", "/"]]


def test_a_stranger_gets_nothing_from_the_port_nor_from_the_disk(attacked, loot):
    folder, files = attacked.folder, secrets_of(attacked.folder)
    assert {Path(path).name for path in files} >= {
        "ca.key", "server.key", "client.key", "operator.sock", "operator.secret",
        "journal.jsonl", "first.safetensors", "checkpoint.safetensors",
    }  # fmt: skip
    results = as_a_stranger(
        port=attacked.port,
        paths=all_routes(),
        start=evil(loot, folder).SerializeToString().hex(),
        files=[*files, *(f"/proc/{pid}/environ" for pid in pids(folder))],
    )
    assert {*results["statuses"].values()} == {200, 401, 404}
    assert [path for path, status in results["statuses"].items() if status == 200] == ["/health"]
    refused = {path for path, status in results["statuses"].items() if status == 401}
    assert refused == {*server_internals.FLEET_ROUTES}, "other routes are open"
    assert results["started"] == 404
    assert results["readable"] == []
    time.sleep(3)
    assert [*loot.iterdir()] == []


def test_nothing_secret_is_on_a_command_line(attacked):
    lines = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids(attacked.folder))
    assert lines.count(b"glocal.deploy.") == 3
    assert (attacked.folder / "operator.secret").read_bytes() not in lines
    assert not re.search(rb"[A-Za-z0-9_-]{30,}", re.sub(rb"[^\0]*/[^\0]*", b"", lines))


def test_a_body_of_300_mb_from_strangers_and_clients_is_not_read(attacked):
    server = server_of(attacked.folder)
    idle = memory(server)
    paths = ["/v1/fleet/push-object", "/v1/fleet/push-messages", "/v1/control/start-run", "/docs"]
    results = as_a_stranger(port=attacked.port, floods=paths, size=LARGE)
    assert {*results["floods"]} <= {0, 401, 404}
    for path in paths:
        assert flood(attacked.port, path, LARGE, signed(attacked.folder)) in (0, 404, 413)
        chunked = {**signed(attacked.folder), "transfer-encoding": "chunked"}
        assert post(attacked.port, path, b"5\r\nhello\r\n0\r\n\r\n", chunked) in (0, 400, 404, 411)
    grown = memory(server) - idle
    print(f"the server grew by {grown / 1e6:.1f} MB")
    assert grown < 100e6
    assert attacked.connected_or_none() == {"client-0", "client-1"}


def signed(folder, name="client-0", stamp=None):
    """The headers with which a registered client signs a request."""
    key = read_client_key(folder / f"clients/{name}/client.key")
    stamp = stamp or datetime.now(UTC).isoformat().encode()
    public = server_internals.public_key_to_bytes(key.public_key())
    signature = key.sign(stamp, ec.ECDSA(hashes.SHA256()))
    return {
        server_internals.KEY_HEADER.decode(): b64encode(public).decode(),
        server_internals.TIME_HEADER.decode(): stamp.decode(),
        server_internals.SIGNATURE_HEADER.decode(): b64encode(signature).decode(),
    }


def test_a_registered_but_hostile_client_reaches_the_fleet_alone(attacked, loot):
    folder, port = attacked.folder, attacked.port
    statuses = {
        path: post(port, path, b"", signed(folder), method) for method, path in all_routes()
    }
    assert {path for path, status in statuses.items() if status not in (401, 404)} <= {
        "/health", *server_internals.FLEET_ROUTES,
    }  # fmt: skip
    start = evil(loot, folder).SerializeToString()
    assert post(port, "/v1/control/start-run", start, signed(folder)) == 404
    assert [*loot.iterdir()] == []


def test_a_recorded_request_is_of_no_use(tmp_path):
    """An attacker with the server's own certificate records requests and sends them again."""
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=1, rounds=1, port=port)
    tap = Wiretap(port, folder / "certificates")
    own = folder / "clients/client-0/deploy.toml"
    deployed.change(own, f"port = {port}", f"port = {tap.port}")
    with running(folder) as deployment:
        deployment.server()
        deployment.client("client-0")
        deployment.until_connected("client-0")
        deployment.until(lambda: bytes(tap.up).count(b"pull-messages") > 3)
        recorded = [b"POST " + part for part in bytes(tap.up).split(b"POST ")[1:4]]
        responses = [replayed(port, request) for request in recorded]
    tap.close()
    assert [response.split(b" ")[1] for response in responses] == [b"401"] * 3
    assert all(b"has come before" in response for response in responses)


def replayed(port, request):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", port), 10) as plain,
        context.wrap_socket(plain) as line,
    ):
        line.sendall(request)
        answer = b""
        while part := line.recv(65536):
            answer += part
    return answer


class Impostor:
    """A server at the right address with a certificate of its own; it records what it receives."""

    def __init__(self, port, folder):
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.socket, self.received, self.attempts = (
            socket.create_server(("127.0.0.1", port)),
            b"",
            0,
        )
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                plain, _ = self.socket.accept()
            except OSError:
                return
            self.attempts += 1
            with plain:
                plain.settimeout(5)
                try:
                    with self.context.wrap_socket(plain, server_side=True) as line:
                        self.received += line.recv(65536)
                except OSError:
                    continue


def foreign(folder, monkeypatch):
    make_authority(folder, "another")


def expired(folder, monkeypatch):
    monkeypatch.setattr(certificates, "SERVER_DAYS", -1 / 48)


def for_another_host(folder, monkeypatch):
    pass


@pytest.mark.parametrize("kind", [foreign, expired, for_another_host])
def test_a_client_sends_nothing_to_a_server_with_a_wrong_certificate(kind, tmp_path, monkeypatch):
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=1, rounds=1, port=port)
    if kind is for_another_host:
        monkeypatch.setattr(certificates, "LOCAL_HOSTS", ())
    kind(folder / "certificates", monkeypatch)
    make_server_certificate(
        folder / "certificates", ["elsewhere.org" if kind is for_another_host else "127.0.0.1"]
    )
    impostor = Impostor(port, folder / "certificates")
    with running(folder) as deployment:
        deployment.client("client-0")
        deployment.until(lambda: impostor.attempts >= 2)
    impostor.socket.close()
    assert impostor.received == b""
    reported = re.compile("does not answer .*certificate")
    assert any(reported.search(line) for line in deployment.notices), deployment.notices


def test_a_positive_control_a_client_sends_requests_to_an_impostor_with_the_right_certificate(
    tmp_path,
):
    port = free_port()
    folder = deployed.project(tmp_path / "link", clients=1, rounds=1, port=port)
    impostor = Impostor(port, folder / "certificates")
    with running(folder) as deployment:
        deployment.client("client-0")
        deployment.until(lambda: impostor.received)
    impostor.socket.close()
    assert b"POST /v1/fleet/activate-node" in impostor.received


@pytest.mark.parametrize("run", ["second", "first", "../../loot"])
def test_a_malicious_app_that_is_started_with_the_operators_secret_runs_nowhere(
    run, attacked, loot
):
    """A new run name trains with our code, an old one continues, an invalid one is refused."""
    with connect_server(attacked.folder) as control:
        number = control.client.StartRun(evil(loot, attacked.folder, run=run)).run_id
        attacked.until(lambda: control.run(number).finished)
    assert [*loot.iterdir()] == []
    trained = attacked.rows("second")
    assert [row["clients"] for row in trained] == [["client-0", "client-1"]] * (run == "second")


def test_a_positive_control_the_same_attacks_succeed_on_a_plain_flower_installation(tmp_path, loot):
    """The tests above can see a breach: a stranger's app runs on this server and client."""
    folder = deployed.project(tmp_path / "link", clients=1, rounds=1)
    with stock(folder) as deployment:
        deployment.node("client-0")
        deployment.until_online(1)
        superlink = deployment.processes[0][0].pid
        idle = memory(superlink)
        results = as_a_stranger(
            port=deployment.port,
            paths=all_routes(),
            start=evil(loot, folder).SerializeToString().hex(),
            floods=["/v1/fleet/push-object"],
            size=LARGE,
        )
        assert results["started"] == 200
        assert results["statuses"]["/docs"] == 200
        assert results["statuses"]["/v1/runtime/acquire-task"] == 200
        assert memory(superlink) - idle > 100e6, "the test cannot see how much is read into memory"
        deployment.until((loot / "client-0").exists)
    assert (loot / "server").read_bytes() == (folder / "certificates/ca.key").read_bytes()
    own = folder / "clients/client-0/client.key"
    assert (loot / "client-0").read_bytes() == own.read_bytes()


def connect_as(deployment, name, signer):
    """The status of a request to connect as `name`, signed with the key of `signer`."""
    key = read_client_key(deployment.folder / f"clients/{name}/client.key").public_key()
    public = server_internals.public_key_to_bytes(key)
    request = ActivateNodeRequest(public_key=public, heartbeat_interval=10).SerializeToString()
    signature = signed(deployment.folder, signer)
    return post(deployment.port, "/v1/fleet/activate-node", request, signature)


def test_a_revoked_client_stays_out_and_status_says_so(attacked, capsys):
    from tests.support.command_line import run

    assert run("deploy", "revoke", attacked.folder, "client-1") == 0
    assert connect_as(attacked, "client-1", "client-1") == 401
    assert connect_as(attacked, "client-1", "client-0") == 401
    assert connect_as(attacked, "client-0", "client-0") == 200
    attacked.until_connected("client-0")
    capsys.readouterr()
    assert run("deploy", "status", attacked.folder) == 0
    assert re.search(r"client-1 +revoked", capsys.readouterr().out)
