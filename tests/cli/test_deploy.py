"""Deploying on the command line: what is written, and one clear line with exit code 2 for what a user can put right."""

import importlib
import json
import re
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from flwr.common.serde import user_config_to_proto
from flwr.proto.run_pb2 import Run, RunStatus
from safetensors.torch import save

from glocal.cli import deploy_processes
from glocal.core.errors import InputError
from glocal.core.files import append_rows, lock_folder, read_json, read_rows
from glocal.deploy import certificates, preflight, supervision
from glocal.deploy.certificates import days_left, make_authority, make_server_certificate
from glocal.deploy.client import RunClient
from glocal.deploy.flower.server_internals import ControlConnection, RunState
from glocal.deploy.formatting import format_round
from glocal.deploy.project import Project
from glocal.deploy.registry import read_registry, write_registry
from glocal.deploy.runtime import follow
from glocal.deploy.scaffold import add_client
from glocal.deploy.server import RunServer
from glocal.deploy.supervision import ChildProcess, Program, child_environment, supervise
from tests.cli.test_cli import complaint, run
from tests.deploy.test_flower import run_here
from tests.support import deployed


def foreign(about):
    """A safetensors file that is none of ours."""
    return save({"a": torch.zeros(2)}, metadata={"metadata": json.dumps(about)})


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def in_this_process(program, stop, notify, **_):
    """What a supervised program refuses, without the seconds that a process of its own takes to start."""
    for folder in program.folders:
        supervision.require_project(folder)
    stop.set()  # one that is not refused ends at once
    importlib.import_module(program.module).main(program.folders, notify, stop)


@pytest.fixture(autouse=True)
def no_process_of_its_own(monkeypatch):
    monkeypatch.setattr(deploy_processes, "supervise", in_this_process)


def test_init_writes_a_project_that_trains_and_keeps_secrets_secret(capsys):
    assert run("deploy", "init", "clinics", "--devices", 3, "--host", "fed.example.org") == 0
    printed = capsys.readouterr().out
    assert "glocal deploy server clinics" in printed
    assert "on all of this machine's addresses, port 9443; only registered devices pass" in printed
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in [Path("clinics"), *Path("clinics/devices").iterdir()]
    )
    secrets = [*Path("clinics").rglob("*.key")]
    assert len(secrets) == 5
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
    assert not [*Path("clinics/devices").rglob("ca.key")]
    project = Project.from_folder(Path("clinics"))
    assert project.deployment.server.bind == "0.0.0.0"
    assert RunClient.from_folder(Path("clinics/devices/device-2")).data().train.sizes[0] > 50
    assert days_left(Path("clinics/certificates/server.crt")) > 390
    assert not RunClient.from_folder(Path("clinics/devices/device-2")).settings.share_metrics


def test_a_device_is_added_and_a_certificate_renewed(capsys):
    run("deploy", "init", "clinics", "--devices", 1)
    before = Path("clinics/certificates/server.crt").read_bytes()
    assert run("deploy", "add-device", "clinics", "--name", "ward-7") == 0
    assert RunClient.from_folder(Path("clinics/devices/ward-7")).settings.number == 1
    assert run("deploy", "renew", "clinics") == 0
    assert "renewed until" in capsys.readouterr().out
    assert Path("clinics/certificates/server.crt").read_bytes() != before


def test_a_device_is_revoked_once_and_its_name_and_key_are_not_used_again(capsys):
    folder = deployed.project(Path("here"), clients=2)
    assert run("deploy", "revoke", "here", "device-1") == 0
    assert "device-1 is refused from its next request on" in capsys.readouterr().out
    assert [entry.revoked for entry in read_registry(folder).values()] == [False, True]
    for name, words in (
        ("device-1", "was revoked before"),
        ("device-7", "'device-7' is no device of here; did you mean"),
    ):
        assert run("deploy", "revoke", "here", name) == 2
        assert words in complaint(capsys)
    assert run("deploy", "add-device", "here", "--name", "device-1") == 2
    assert "'device-1' is taken" in complaint(capsys)


def test_an_algorithm_that_is_made_for_so_many_devices_has_no_place_for_one_more(capsys):
    deployed.project(Path("here"), clients=2, algorithm="mtl")
    assert run("deploy", "add-device", "here") == 2
    assert "mtl is made for 2 devices, and has no place for one more" in complaint(capsys)


def test_a_device_shuts_what_others_could_read_before_it_connects(capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    own = folder / "devices/device-0"
    (own / "device.key").chmod(0o644)
    own.chmod(0o755)
    assert run("deploy", "client", own) == 0
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE((own / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "device.key").stat().st_mode) == 0o600
    assert "device.key could be read by others; now it cannot" in capsys.readouterr().out


def test_a_device_predicts_on_the_command_line(capsys):
    folder = deployed.project(Path("here"), rounds=1)
    run_here(folder)
    own = RunClient.from_folder(folder / "devices/device-0").data().test.of(0)
    np.savez("new.npz", x=own.x.numpy(), y=own.y.numpy())
    capsys.readouterr()
    assert run("deploy", "predict", "here/devices/device-0", "--data", "new.npz") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed[-2].split()) == len(own.y)
    assert printed[-1].startswith("right: ")
    assert (
        run(
            "deploy",
            "predict",
            "here/devices/device-0",
            "--data",
            "new.npz",
            "--out",
            "made/classes",
        )
        == 0
    )
    assert "written: made/classes" in capsys.readouterr().out
    assert np.load("made/classes").tolist() == [int(word) for word in printed[-2].split()]
    np.savez("none.npz", x=own.x.numpy()[:0])
    assert run("deploy", "predict", "here/devices/device-0", "--data", "none.npz") == 2
    assert "none.npz holds no inputs" in complaint(capsys)


def test_the_report_of_a_run_has_its_devices_and_what_happened(capsys):
    folder = deployed.project(Path("here"), rounds=2)
    run_here(folder)
    assert run("report", folder / "runs/first") == 0
    page = (folder / "runs/first/report.html").read_text()
    assert "device-3" in page
    assert "Private parts never left the devices." in page
    assert "<svg" in page
    assert "device-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deploy", "init", "here"], "here is not empty; choose another folder"),
        (
            ["deploy", "init", "new", "--devices", "0"],
            "deploy: devices is 0; a whole number from 1 to 1,000 was expected",
        ),
        (
            ["deploy", "init", "new", "--devices", "1000000000000000000"],
            "devices is 1000000000000000000; a whole number from 1 to 1,000",
        ),
        (
            ["deploy", "init", "new", "--rounds", "1000000000000000000"],
            "rounds is 1000000000000000000; a whole number from 1 to 1,000,000",
        ),
        (["deploy", "init", "new", "--port", "99999"], "the port is 99999"),
        (["deploy", "init", "new", "--host", "a b"], "the host is 'a b'"),
        (["deploy", "init", "new", "--host", "münchen.de"], "the host is 'münchen.de'"),
        (["deploy", "init", "new", "--host", 'a"b'], "the host is 'a\"b'"),
        (["deploy", "server", "nowhere"], "cannot read nowhere/study.toml"),
        (["deploy", "client", "nowhere"], "cannot read nowhere/study.toml"),
        (["deploy", "client", "here"], "cannot read here/device.toml"),
        (["deploy", "run", "here"], "does not answer"),
        (["deploy", "run", "here", "--run", "../Up"], "'../Up' is no plain name"),
        (
            ["deploy", "resume", "here"],
            "'first' has not begun; start it with `glocal deploy run here",
        ),
        (["deploy", "join", "here"], "there is no run 'first' in here"),
        (
            ["deploy", "predict", "here/devices/device-0", "--data", "x.npz"],
            "has taken part in no run yet",
        ),
        (["deploy", "add-device", "here", "--name", "device-0"], "'device-0' is taken"),
        (["deploy", "add-device", "nowhere"], "cannot read nowhere/study.toml"),
        (
            ["deploy", "server", "here/devices/device-0"],
            "here/devices/device-0 is no server's folder",
        ),
        (["deploy", "run", "here/devices/device-0"], "here/devices/device-0 is no server's folder"),
        (
            ["deploy", "status", "here/devices/device-0"],
            "here/devices/device-0 is no server's folder",
        ),
        (
            ["deploy", "add-device", "here/devices/device-0"],
            "here/devices/device-0 is no server's folder",
        ),
        (["deploy", "rum"], "No such command 'rum'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message, capsys):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    capsys.readouterr()
    assert run(*arguments) == 2
    assert message.removesuffix("here") in complaint(capsys).replace(str(Path.cwd()) + "/", "")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("devices = 1", "devicez = 1", "unknown option 'devicez'"),
        ("devices = 1", "devices = 'two'", "devices is 'two'; a whole number was expected"),
        (
            "round = 600.0",
            "round = 0.0",
            "limits.round_timeout is 0.0; seconds above 0 and at most 100,000,000 were expected",
        ),
        ("round = 600.0", "round = 1e18", "limits.round_timeout is 1e+18; seconds above 0"),
        (
            "devices = 1",
            "devices = 1000000000000000000",
            "devices is 1000000000000000000; a whole number from 1 to 1,000,000",
        ),
        (
            "settle = 20",
            "settle = 1000000000",
            "settle is 1000000000; a whole number from 0 to 1,000",
        ),
        ("enough = 1", "enough = 0", "limits.min_clients is 0; a whole number from 1"),
        ("round = 600.0", "round = nan", "limits.round_timeout is nan; seconds above 0"),
        ("port = 9443", "port = 99999", "the port is 99999; a number from 1 to 65535 was expected"),
        ('host = "127.0.0.1"', 'host = "münchen"', "the host is 'münchen'"),
        ('bind = "127.0.0.1"', 'bind = ""', "server.bind is ''"),
        (
            'bind = "127.0.0.1"',
            'bind = "::1"',
            "server.bind is '::1'; an IPv4 address or a name was expected",
        ),
        (
            "enough = 1",
            "enough = 1\n[privacy]\nclip_norm = nan\nnoise_multiplier = 1.0",
            "privacy has clip nan",
        ),
        (
            'data = "federation:data"',
            'data = "federation:nothing"',
            "'federation:nothing' cannot be found",
        ),
    ],
)
def test_a_mistake_in_deploy_toml_is_named(old, new, message, capsys):
    deployed.project(Path("here"), clients=1)
    deployed.change("here/devices/device-0/deploy.toml", old, new)
    capsys.readouterr()
    assert run("deploy", "client", "here/devices/device-0") == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "federation:model"', 'name = "mlp"', "a function of yours was expected"),
        ("seed = 3", "seed = 3\nseeds = 2", "plan.seeds, which only the simulator knows"),
        ("seed = 3", "seed = 3\ntries = 2", "plan.restarts, which only the simulator knows"),
        ("rounds = 3", "rounds = 0", "rounds is 0"),
        (
            "[experiments.Case]",
            '[experiments.Other]\nalgorithm = "fedavg"\n[experiments.Case]',
            "has 2 cases; a deployment trains one",
        ),
    ],
)
def test_a_study_that_only_the_simulator_can_run_is_refused(old, new, message, capsys):
    deployed.project(Path("here"), clients=1)
    deployed.change("here/study.toml", old, new)
    capsys.readouterr()
    assert run("deploy", "server", "here") == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize(
    ("command", "lost", "message"),
    [
        (
            ["server", "here"],
            "here/certificates/server.key",
            "server.crt and server.key in here/certificates are of no use",
        ),
        (
            ["server", "here"],
            "here/certificates/ca.crt",
            "the authority here/certificates/ca.crt cannot be read",
        ),
        (
            ["client", "here/devices/device-0"],
            "here/devices/device-0/ca.crt",
            "the authority here/devices/device-0/ca.crt cannot",
        ),
        (
            ["client", "here/devices/device-0"],
            "here/devices/device-0/device.key",
            "the key here/devices/device-0/device.key cannot",
        ),
    ],
)
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_key_or_a_certificate_that_is_of_no_use_is_named_before_anything_starts(
    how, command, lost, message, capsys
):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    if how == "missing":
        Path(lost).unlink()
    else:
        Path(lost).write_text("nothing of the kind")
    capsys.readouterr()
    assert run("deploy", *command) == 2
    assert message in complaint(capsys).replace(str(Path.cwd()) + "/", "")


def _signed_by_another(folder):
    make_authority(folder / "elsewhere", "elsewhere")
    (folder / "ca.crt").write_bytes((folder / "elsewhere/ca.crt").read_bytes())


def _long_ago(folder, monkeypatch):
    monkeypatch.setattr(certificates, "SERVER_DAYS", -1 / 48)  # half an hour ago
    make_server_certificate(folder, ["127.0.0.1"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder, monkeypatch: _signed_by_another(folder),
            "server.crt is not signed by the authority in ca.crt",
        ),
        (_long_ago, "server.crt ended on 20"),
        (
            lambda folder, monkeypatch: make_server_certificate(folder, ["b.org"]),
            "server.crt is not for a.org; make a",
        ),
    ],
    ids=["of another authority", "expired", "for another host"],
)
def test_a_server_does_not_start_with_a_certificate_that_no_device_would_trust(
    spoil, message, capsys, monkeypatch
):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    if "a.org" in message:
        deployed.change("here/deploy.toml", 'host = "127.0.0.1"', 'host = "a.org"')
    spoil(Path("here/certificates"), monkeypatch)
    assert run("deploy", "server", "here") == 2
    assert message in complaint(capsys)


def test_a_renewed_certificate_is_for_where_devices_find_the_server():
    deployed.project(Path("here"), clients=1)
    deployed.change("here/deploy.toml", 'host = "127.0.0.1"', 'host = "a.org"')
    assert run("deploy", "renew", "here") == 0
    certificates.require_server_certificate(Path("here/certificates"), ["a.org"])


def test_a_certificate_is_not_replaced_by_one_of_another_authoritys_key(capsys):
    deployed.project(Path("here"), clients=1)
    before = Path("here/certificates/server.crt").read_bytes()
    make_authority(Path("elsewhere"), "elsewhere")
    Path("here/certificates/ca.key").write_bytes(Path("elsewhere/ca.key").read_bytes())
    assert run("deploy", "renew", "here") == 2
    assert "ca.key in here/certificates is not the key of its ca.crt" in complaint(capsys)
    assert Path("here/certificates/server.crt").read_bytes() == before


def test_a_port_that_is_taken_is_named(capsys, monkeypatch):
    monkeypatch.setattr(preflight, "_RELEASE_TIMEOUT", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        deployed.project(Path("here"), clients=1, port=port)
        assert run("deploy", "server", "here") == 2
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use" in complaint(capsys)


@pytest.mark.parametrize("command", [["server", "here"], ["client", "here/devices/device-0"]])
def test_what_is_run_already_is_not_run_a_second_time(command, capsys):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    with lock_folder(Path(command[-1]).resolve()):
        assert run("deploy", *command) == 2
    assert "is being run already; stop that one first" in capsys.readouterr().err


def test_a_folder_may_have_any_name_but_not_too_long_a_one(capsys):
    """A name with marks that a shell or a database would read otherwise; a socket's path is short."""
    for name in ('q"uote', "why? not"):
        deployed.project(Path(name), clients=1, port=preflight.free_port())
        assert run("deploy", "server", name) == 0
        assert run("deploy", "client", f"{name}/devices/device-0") == 0
    deployed.project(Path("x" * 120), clients=1)
    capsys.readouterr()
    assert run("deploy", "server", "x" * 120) == 2
    assert "move the folder to a shorter one" in complaint(capsys)


@pytest.mark.parametrize("command", ["server", "run"])
def test_a_missing_accountant_is_said_before_anything_is_trained(command, capsys, monkeypatch):
    folder = deployed.project(
        Path("here"), clients=1, port=preflight.free_port(), weights='weights = "equal"'
    )
    with (folder / "deploy.toml").open("a") as file:
        file.write("\n[privacy]\nclip_norm = 0.5\nnoise_multiplier = 2.0\n")
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert run("deploy", command, "here") == 2
    assert "pip install 'glocal[privacy]'" in complaint(capsys)


def test_a_model_with_a_mistake_is_named_before_a_run_is_started(capsys):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    deployed.change("here/federation.py", "def model():", "def model():\n    1 / 0")
    assert run("deploy", "run", "here") == 2
    assert "ZeroDivisionError" in complaint(capsys)


def test_a_run_is_not_resumed_with_other_settings(capsys):
    folder = deployed.project(Path("here"), rounds=1, port=preflight.free_port())
    run_here(folder)
    deployed.change("here/study.toml", "rounds = 1", "rounds = 2")
    deployed.change("here/study.toml", "rate = 0.1", "rate = 0.2")
    capsys.readouterr()
    assert run("deploy", "resume", "here") == 2
    assert "was made with other settings or another model" in complaint(capsys)


def test_a_run_that_cannot_be_started_loses_nothing_of_what_is_known_of_it(capsys):
    folder = deployed.project(Path("here"), rounds=1, port=preflight.free_port())
    run_here(folder)
    for _ in range(2):
        assert run("deploy", "join", "here") == 2
        assert "does not answer" in complaint(capsys)
    assert read_json(folder / "runs/first/live.json", dict)["state"] == "done"


WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("flwr", "cryptography", "httpx"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from glocal.cli import main

for command in ("init", "server", "device", "run", "resume", "status", "add-device", "join", "predict --data x", "renew", "demo"):
    name, *rest = command.split()
    try:
        main(["deploy", name, *([] if name == "demo" else ["here"]), *rest])
    except SystemExit as end:
        print(end.code)
"""


def test_without_flower_every_command_says_how_to_install_it():
    """In a process of its own, in which Flower and what comes with it cannot be imported."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2"] * 11
    assert {*ended.stderr.splitlines()} == {
        "glocal: deploy: Flower is not installed; run: pip install 'glocal[flower]'"
    }


def test_a_finished_run_is_not_begun_again_nor_resumed(capsys):
    folder = deployed.project(Path("here"), rounds=1)
    run_here(folder)
    capsys.readouterr()
    assert run("deploy", "run", "here") == 2
    assert "'first' has begun already; go on with" in complaint(capsys)
    assert run("deploy", "resume", "here") == 2
    assert "has done all its 1 rounds" in complaint(capsys)


def test_status_is_shown_without_a_server_too(capsys):
    folder = deployed.project(Path("here"), rounds=1, port=preflight.free_port())
    run_here(folder)
    capsys.readouterr()
    assert run("deploy", "status", "here") == 0
    printed = capsys.readouterr().out
    assert "server: does not answer" in printed
    assert "run first: done" in printed


def test_status_says_that_a_run_has_ended_whose_server_was_killed(capsys, monkeypatch):
    folder = deployed.project(Path("here"), rounds=1, clients=1)
    for name, state in (
        ("first", "training"),
        ("second", "done"),
        ("third", "training"),
        ("lost", "training"),
    ):
        run_here(folder, run=name)._write_live(state)
    starts = [
        ("first", 1, "finished"),
        ("second", 2, "finished"),
        ("third", 3, "finished"),
        ("third", 4, "running"),
    ]
    told = {
        number: Run(
            pending_at=f"2026-01-0{number}",
            status=RunStatus(status=status, sub_status="failed", details="No heartbeat"),
            override_config=user_config_to_proto({"run": name}),
        )
        for name, number, status in starts
    }
    client = SimpleNamespace(
        ListRuns=lambda _: SimpleNamespace(run_dict=told),
        ListNodes=lambda _: SimpleNamespace(nodes_info=[]),
    )
    monkeypatch.setattr(
        "glocal.cli.deploy_actions.connect_server", lambda _: nullcontext(ControlConnection(client))
    )
    capsys.readouterr()
    assert run("deploy", "status", "here") == 0
    printed = capsys.readouterr().out
    assert printed.count("it has ended (No heartbeat); go on with") == 1
    assert "`glocal deploy resume here --run first`" in printed.replace(f"{Path.cwd()}/", "")
    assert printed.count("it has ended (the server was started anew)") == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b'[{"number": "a", "name": "a", "key": "k"}]',
        b'[{"number": 0, "name": "a", "key": "k"}, {"number": 0, "name": "b", "key": "l"}]',
    ],
    ids=["bytes", "table", "number", "words", "twice"],
)
@pytest.mark.parametrize("command", ["server", "status", "add-device"])
def test_a_damaged_roster_is_named_and_left_as_it_is(command, damage, capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    (folder / "roster.json").write_bytes(damage)
    assert run("deploy", command, "here") == 2
    assert "roster.json does not hold what glocal writes there" in complaint(capsys)
    assert (folder / "roster.json").read_bytes() == damage


def test_a_key_in_the_roster_that_is_none_is_named(capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    write_registry(folder, {0: read_registry(folder)[0]._replace(key="ssh-rsa nonsense")})
    assert run("deploy", "server", "here") == 2
    assert "'ssh-rsa nonsense' in the roster is no device's key" in complaint(capsys)


def test_devices_that_are_added_at_the_same_time_get_a_number_each():
    folder = deployed.project(Path("here"), clients=1)
    with ThreadPoolExecutor(8) as at_once:
        added = [*at_once.map(lambda _: add_client(folder), range(8))]
    roster = read_registry(folder)
    assert {own.name for own in added} == {f"device-{number}" for number in range(1, 9)}
    assert all(
        RunClient.from_folder(folder / "clients" / entry.name).settings.number == number
        for number, entry in roster.items()
    )
    assert len(roster) == 9


@pytest.mark.parametrize(
    ("damaged", "damage", "command", "message"),
    [
        (
            "live.json",
            b'{"state": "training", "updated": 1.0}',
            "status",
            "does not hold what glocal writes there",
        ),
        (
            "live.json",
            b'{"state": "done", "updated": "now"}',
            "status",
            "does not hold what glocal writes there",
        ),
        ("rows.jsonl", b'{"round": 0}\n', "status", "does not hold what glocal writes there"),
        ("checkpoint.safetensors", foreign({}), "resume", "was not written by glocal"),
        ("checkpoint.safetensors", foreign([1]), "join", "is damaged (its header holds no table)"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(damaged, damage, command, message, capsys):
    folder = deployed.project(Path("here"), rounds=1, clients=2, port=preflight.free_port())
    run_here(folder)
    (folder / "runs/first" / damaged).write_bytes(damage)
    capsys.readouterr()
    assert run("deploy", command, "here") == 2
    told = capsys.readouterr().err
    assert message in told
    assert damaged in told


def test_status_tells_the_last_loss_of_a_device_that_was_away_and_bears_a_last_row_that_is_no_text(
    capsys,
):
    folder = deployed.project(Path("here"), rounds=2, clients=2, port=preflight.free_port())
    run_here(folder)
    rows = read_rows(folder / "runs/first/rows.jsonl")
    del rows[1]["losses"]["device-1"]
    (folder / "runs/first/rows.jsonl").write_bytes(
        "".join(json.dumps(row) + "\n" for row in rows).encode() + b"\xff"
    )
    capsys.readouterr()
    assert run("deploy", "status", "here") == 0
    assert re.search(rf"device-1 +\? +{rows[0]['losses']['device-1']:.4f}", capsys.readouterr().out)


def test_a_run_that_was_killed_while_devices_tested_is_resumed_to_its_result(capsys):
    folder = deployed.project(Path("here"), rounds=1, clients=2, port=preflight.free_port())
    conductor = run_here(folder)
    conductor._write_live("testing")
    capsys.readouterr()
    assert run("deploy", "resume", "here") == 2
    assert "does not answer" in complaint(capsys), "it is the server that is missing"
    assert run_here(folder).live["state"] == "done"


def test_a_device_whose_number_is_none_is_refused(capsys):
    deployed.project(Path("here"), clients=1)
    deployed.change("here/devices/device-0/device.toml", "number = 0", "number = -1")
    assert run("deploy", "client", "here/devices/device-0") == 2
    assert "settings: number is -1; a whole number from 0" in complaint(capsys)


def test_a_run_that_was_taken_over_stops_by_itself():
    folder = deployed.project(Path("here"), rounds=1)
    first = RunServer(Project.from_folder(folder), "first")
    RunServer(Project.from_folder(folder), "first")
    with pytest.raises(ValueError, match="resumed elsewhere") as taken:
        first._save()
    first.on_failure(taken.value)
    assert read_json(first.folder / "live.json", dict)["state"] == "waiting for devices", (
        "it speaks for the new one"
    )


def test_a_run_that_was_taken_over_is_not_said_to_be_resumed_again(monkeypatch):
    folder = deployed.project(Path("here"), rounds=1, clients=1)
    told = RunState(True, "run: it has been resumed elsewhere; this server has no part in it")
    link = SimpleNamespace(start=lambda _: 1, run=lambda _: told)
    monkeypatch.setattr("glocal.deploy.runtime.connect_server", lambda _: nullcontext(link))
    with pytest.raises(InputError) as ended:
        follow(Project.from_folder(folder), "first", print)
    assert (
        str(ended.value)
        == "run: it has been resumed elsewhere; watch it there, or with `glocal deploy status`"
    )


def test_a_full_disk_leaves_no_half_a_device(monkeypatch, capsys):
    folder = deployed.project(Path("here"), clients=1)

    def full(path, *_):
        raise InputError(
            f"disk: cannot write {path} (No space left on device); free some space or choose another folder"
        )

    with monkeypatch.context() as patched:
        patched.setattr("glocal.deploy.scaffold.write_text", full)
        assert run("deploy", "add-device", "here") == 2
    assert "No space left" in complaint(capsys)
    assert run("deploy", "add-device", "here") == 0
    assert [entry.name for entry in read_registry(folder).values()] == ["device-0", "device-1"]


def test_a_journal_whose_last_line_was_cut_off_goes_on(tmp_path):
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b'{"round": 1}\n{"rou')
    append_rows(journal, [{"round_timeout": 2}])
    append_rows(journal, [{"round_timeout": 3}])
    assert [row["round_timeout"] for row in read_rows(journal)] == [1, 2, 3]


def program(text, *, name="mine"):
    """A small program to be kept running, in a module of its own."""
    Path(f"{name}.py").write_text(text)
    Path("study.toml").touch()
    return Program(name, (Path.cwd(),), Path("logs/it.log"))


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=":")


def test_a_program_that_ends_is_started_again_ever_more_patiently(importable, monkeypatch):
    waits, said, stop = [], [], threading.Event()
    monkeypatch.setattr(
        supervision, "restart_delay", lambda failures: waits.append(failures) or 0.01
    )

    def notify(words):
        said.append(words)
        if len(said) == 4:
            stop.set()

    supervise(program("raise SystemExit(3)"), stop, notify)
    assert {*waits} == {1, 2, 3, 4}
    assert said[0].startswith(
        "it ended (exit code 3); starting again in 0.01 s; logs/it.log has more"
    )


def test_a_program_that_refuses_its_input_is_not_started_again(importable):
    refusing = program(
        """print('{"refused": "that will not do"}', flush=True); raise SystemExit(2)"""
    )
    with pytest.raises(InputError, match="that will not do"):
        supervise(refusing, threading.Event(), print)
    assert not Path("logs").exists(), "nothing is left of it"


def test_a_program_that_refuses_leaves_the_log_of_one_that_runs(importable):
    Path("logs").mkdir()
    Path("logs/it.log").touch()
    refusing = program(
        """print('{"refused": "it runs already"}', flush=True); raise SystemExit(2)"""
    )
    with pytest.raises(InputError, match="it runs already"):
        supervise(refusing, threading.Event(), print)
    assert Path("logs/it.log").exists()


def test_a_program_that_falls_silent_is_started_again_and_what_it_said_is_passed_on(
    importable, monkeypatch
):
    monkeypatch.setattr(supervision, "_MAX_SILENCE", 0.3)
    monkeypatch.setattr(supervision, "restart_delay", lambda failures: 0.01)
    said, stop = [], threading.Event()

    def notify(words):
        said.append(words)
        if len(said) == 4:
            stop.set()

    text = """import time; print('{"say": "here"}\\nno json\\n[1]', flush=True); time.sleep(60)"""
    supervise(program(text), stop, notify)
    assert said[0] == said[2] == "here"
    assert "it has been silent for 0 s; starting again" in said[1]


def test_what_an_owners_functions_print_goes_to_the_log_and_cannot_pose_as_the_program(importable):
    text = """
from glocal.deploy import child

def main(folders, say, stop):
    print('{"refused": "posed"}')
    print("no end of line", end="")
    try:
        input()
    except EOFError:
        say("its own words")

child.run(main)
"""
    said = []
    running = ChildProcess.start(program(text), said.append)
    assert running.process.wait(30) == 0
    running.listener.join(30)
    assert said == ["its own words"]
    assert not running.refusal
    assert "posed" in Path("logs/it.log").read_text()
    running.stop()


def test_a_program_ends_with_its_supervisor(importable):
    """Whose other end of its input is closed when it is killed."""
    running = ChildProcess.start(
        program(
            "from glocal.deploy import child; child.run(lambda *_: __import__('time').sleep(60))"
        ),
        print,
    )
    running.process.stdin.close()
    assert running.process.wait(30) == 1
    running.stop()


def test_a_program_is_given_no_more_of_the_environment_than_it_needs(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("SSH_AUTH_SOCK", "x")
    monkeypatch.setenv("PGPASSWORD", "mine")
    monkeypatch.setenv("LANG", "C.UTF-8")
    given = child_environment(Path("home"), ["PGPASSWORD"])
    assert given["PGPASSWORD"] == "mine"
    assert given["LANG"] == "C.UTF-8"
    assert given["FLWR_TELEMETRY_ENABLED"] == "0"
    assert not {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"} & given.keys()


def test_a_round_is_told_with_who_was_dropped_and_why():
    row = {
        "round_timeout": 4,
        "loss": None,
        "clients": ["a"],
        "seconds": 3.2,
        "bytes": 12000,
        "dropped": {"b": "NaN"},
        "notes": {},
        "away": ["c"],
    }
    assert (
        format_round(row)
        == "round 5: 1 devices, 3.2 s, 12,000 bytes so far; dropped b: NaN; away: c"
    )
