"""`glocal deploy` on the command line: what it writes, and one line with exit code 2 for errors."""

import importlib
import json
import re
import socket
import stat
import subprocess
import sys
import threading
import time
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
from glocal.core.files import FORMAT, append_rows, lock_folder, read_json, read_rows
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
from glocal.deploy.server_process import prepare_server
from glocal.deploy.supervision import ChildProcess, Program, child_environment, supervise
from tests.support import deployed
from tests.support.command_line import complaint, run
from tests.support.deployed_runs import run_here, with_privacy


def foreign(header, *, key="metadata"):
    """A safetensors file with any header."""
    return save({"a": torch.zeros(2)}, metadata={key: json.dumps(header)})


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("glocal.deploy.flower.server_app._POLL", 0.01)


def in_this_process(program, stop, notify, **_):
    """Run a supervised program in this process, without the seconds that a new one takes."""
    for folder in program.folders:
        supervision.require_project(folder)
    stop.set()  # a program that is not refused ends at once
    importlib.import_module(program.module).main(program.folders, notify, stop)


@pytest.fixture(autouse=True)
def no_process_of_its_own(monkeypatch):
    monkeypatch.setattr(deploy_processes, "supervise", in_this_process)


def test_init_writes_a_project_that_trains_and_keeps_secrets_secret(capsys):
    assert run("deploy", "init", "clinics", "--clients", 3, "--host", "fed.example.org") == 0
    printed = capsys.readouterr().out
    assert "glocal deploy server clinics" in printed
    assert (
        "on all of this machine's addresses, port 9443; only registered clients may connect"
        in printed
    )
    assert all(
        stat.S_IMODE(path.stat().st_mode) == 0o700
        for path in [Path("clinics"), *Path("clinics/clients").iterdir()]
    )
    secrets = [*Path("clinics").rglob("*.key")]
    assert len(secrets) == 5
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in secrets)
    assert not [*Path("clinics/clients").rglob("ca.key")]
    project = Project.from_folder(Path("clinics"))
    assert project.deployment.server.bind == "0.0.0.0"
    assert RunClient.from_folder(Path("clinics/clients/client-2")).data().train.sizes[0] > 50
    assert days_left(Path("clinics/certificates/server.crt")) > 390
    assert not RunClient.from_folder(Path("clinics/clients/client-2")).settings.share_metrics


def test_a_client_is_added_and_a_certificate_renewed(capsys):
    run("deploy", "init", "clinics", "--clients", 1)
    before = Path("clinics/certificates/server.crt").read_bytes()
    assert run("deploy", "add-client", "clinics", "--name", "ward-7") == 0
    assert RunClient.from_folder(Path("clinics/clients/ward-7")).settings.number == 1
    assert run("deploy", "renew", "clinics") == 0
    assert "renewed until" in capsys.readouterr().out
    assert Path("clinics/certificates/server.crt").read_bytes() != before


def test_a_client_is_revoked_once_and_its_name_and_key_are_not_used_again(capsys):
    folder = deployed.project(Path("here"), clients=2)
    assert run("deploy", "revoke", "here", "client-1") == 0
    assert "client-1 is refused from its next request on" in capsys.readouterr().out
    assert [entry.revoked for entry in read_registry(folder).values()] == [False, True]
    for name, message in (
        ("client-1", "has been revoked already"),
        ("client-7", "'client-7' is not a client of here; did you mean"),
    ):
        assert run("deploy", "revoke", "here", name) == 2
        assert message in complaint(capsys)
    assert run("deploy", "add-client", "here", "--name", "client-1") == 2
    assert "'client-1' is taken" in complaint(capsys)


def test_an_algorithm_for_a_fixed_number_of_clients_takes_no_more(capsys):
    deployed.project(Path("here"), clients=2, algorithm="mtl")
    assert run("deploy", "add-client", "here") == 2
    assert "MTL is made for a fixed number of clients, and cannot take one more" in complaint(
        capsys
    )


def test_a_client_closes_its_files_to_other_users_before_it_connects(capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    own = folder / "clients/client-0"
    (own / "client.key").chmod(0o644)
    own.chmod(0o755)
    assert run("deploy", "client", own) == 0
    assert stat.S_IMODE(own.stat().st_mode) == stat.S_IMODE((own / "state").stat().st_mode) == 0o700
    assert stat.S_IMODE((own / "client.key").stat().st_mode) == 0o600
    assert "other users could read" in capsys.readouterr().out


def test_a_server_closes_its_keys_to_other_users_before_it_listens(capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    folder.chmod(0o755)
    for name in ("ca.key", "server.key"):
        (folder / "certificates" / name).chmod(0o644)
    prepare_server(folder, print)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    keys = [folder / "certificates" / name for name in ("ca.key", "server.key")]
    assert [stat.S_IMODE(key.stat().st_mode) for key in keys] == [0o600, 0o600]
    assert capsys.readouterr().out.count("other users could read") == 3
    (folder / "certificates/ca.key").unlink()  # kept elsewhere
    prepare_server(folder, print)


@pytest.mark.parametrize(
    ("module", "folders"),
    [("server_process", ["here"]), ("client_process", ["here/clients/client-0"])],
)
def test_a_program_imports_nothing_from_the_current_folder(module, folders):
    """It may be anybody's, such as /tmp."""
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    for name in ("safetensors", "torch", "glocal", "numpy", "flwr"):
        Path(f"{name}.py").write_text("open('imported', 'w').close()\nraise SystemExit(3)\n")
    notices = []
    program = Program(f"glocal.deploy.{module}", tuple(map(Path, folders)), Path("it.log"))
    started = ChildProcess.start(program, notices.append)
    waited = time.monotonic() + 60
    while started.process.poll() is None and not notices and time.monotonic() < waited:
        time.sleep(0.05)
    started.stop()
    assert notices, Path("it.log").read_text()
    assert not Path("imported").exists()


def test_a_client_predicts_on_the_command_line(capsys):
    folder = deployed.project(Path("here"), rounds=1)
    run_here(folder)
    own = RunClient.from_folder(folder / "clients/client-0").data().test.of(0)
    np.savez("new.npz", x=own.x.numpy(), y=own.y.numpy())
    capsys.readouterr()
    assert run("deploy", "predict", "here/clients/client-0", "--data", "new.npz") == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed[-2].split()) == len(own.y)
    assert printed[-1].startswith("accuracy: ")
    assert (
        run(
            "deploy",
            "predict",
            "here/clients/client-0",
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
    assert run("deploy", "predict", "here/clients/client-0", "--data", "none.npz") == 2
    assert "none.npz holds no inputs" in complaint(capsys)


def test_the_report_of_a_run_has_its_clients_and_what_happened(capsys):
    folder = deployed.project(Path("here"), rounds=2)
    run_here(folder)
    assert run("report", folder / "runs/first") == 0
    page = (folder / "runs/first/report.html").read_text()
    assert "client-3" in page
    assert "Private parts never left the clients." in page
    assert "<svg" in page
    assert "client-3" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["deploy", "init", "here"], "here is not empty; choose another folder"),
        (
            ["deploy", "init", "new", "--clients", "0"],
            "deploy: clients is 0; a whole number from 1 to 1,000 was expected",
        ),
        (
            ["deploy", "init", "new", "--clients", "1000000000000000000"],
            "clients is 1000000000000000000; a whole number from 1 to 1,000",
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
        (["deploy", "client", "here"], "cannot read here/client.toml"),
        (["deploy", "run", "here"], "does not answer"),
        (["deploy", "run", "here", "--run", "../Up"], "'../Up' is not a valid name"),
        (
            ["deploy", "resume", "here"],
            "'first' does not exist yet; start it with `glocal deploy run here",
        ),
        (["deploy", "join", "here"], "there is no run 'first' in here"),
        (
            ["deploy", "predict", "here/clients/client-0", "--data", "x.npz"],
            "has taken part in no run yet",
        ),
        (["deploy", "add-client", "here", "--name", "client-0"], "'client-0' is taken"),
        (["deploy", "add-client", "nowhere"], "cannot read nowhere/study.toml"),
        (
            ["deploy", "server", "here/clients/client-0"],
            "here/clients/client-0 is not a server's folder",
        ),
        (
            ["deploy", "run", "here/clients/client-0"],
            "here/clients/client-0 is not a server's folder",
        ),
        (
            ["deploy", "status", "here/clients/client-0"],
            "here/clients/client-0 is not a server's folder",
        ),
        (
            ["deploy", "add-client", "here/clients/client-0"],
            "here/clients/client-0 is not a server's folder",
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
        ("clients = 1", "devicez = 1", "unknown option 'devicez'"),
        ("clients = 1", "clients = 'two'", "clients is 'two'; a whole number was expected"),
        (
            "round_timeout = 600.0",
            "round_timeout = 0.0",
            "limits.round_timeout is 0.0; seconds above 0 and at most 100,000,000 were expected",
        ),
        (
            "round_timeout = 600.0",
            "round_timeout = 1e18",
            "limits.round_timeout is 1e+18; seconds above 0",
        ),
        (
            "clients = 1",
            "clients = 1000000000000000000",
            "clients is 1000000000000000000; a whole number from 1 to 1,000,000",
        ),
        (
            "adapt_epochs = 20",
            "adapt_epochs = 1000000000",
            "adapt_epochs is 1000000000; a whole number from 0 to 1,000",
        ),
        ("min_clients = 1", "min_clients = 0", "limits.min_clients is 0; a whole number from 1"),
        (
            "round_timeout = 600.0",
            "round_timeout = nan",
            "limits.round_timeout is nan; seconds above 0",
        ),
        ("port = 9443", "port = 99999", "the port is 99999; a number from 1 to 65535 was expected"),
        ('host = "127.0.0.1"', 'host = "münchen"', "the host is 'münchen'"),
        ('bind = "127.0.0.1"', 'bind = ""', "server.bind is ''"),
        (
            'bind = "127.0.0.1"',
            'bind = "::1"',
            "server.bind is '::1'; an IPv4 address or a name was expected",
        ),
        (
            "min_clients = 1",
            "min_clients = 1\n[privacy]\nclip_norm = nan\nnoise_multiplier = 1.0",
            "privacy has clip_norm nan",
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
    deployed.change("here/clients/client-0/deploy.toml", old, new)
    capsys.readouterr()
    assert run("deploy", "client", "here/clients/client-0") == 2
    assert message in complaint(capsys)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "federation:model"', 'name = "mlp"', "your own function was expected"),
        ("seed = 3", "seed = 3\nseeds = 2", "plan.seeds, which only the simulator supports"),
        ("seed = 3", "seed = 3\nrestarts = 2", "plan.restarts, which only the simulator supports"),
        ("rounds = 3", "rounds = 0", "rounds is 0"),
        (
            "[experiments.Experiment]",
            '[experiments.Other]\nalgorithm = "fedavg"\n[experiments.Experiment]',
            "has 2 experiments; a deployment trains one",
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
            "cannot use server.crt and server.key in here/certificates",
        ),
        (
            ["server", "here"],
            "here/certificates/ca.crt",
            "cannot read the authority here/certificates/ca.crt",
        ),
        (
            ["client", "here/clients/client-0"],
            "here/clients/client-0/ca.crt",
            "cannot read the authority here/clients/client-0/ca.crt",
        ),
        (
            ["client", "here/clients/client-0"],
            "here/clients/client-0/client.key",
            "cannot read the key here/clients/client-0/client.key",
        ),
    ],
)
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_an_unusable_key_or_certificate_is_named_before_anything_starts(
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
    ("break_certificate", "message"),
    [
        (
            lambda folder, monkeypatch: _signed_by_another(folder),
            "server.crt is not signed by the authority in ca.crt",
        ),
        (_long_ago, "server.crt expired on 20"),
        (
            lambda folder, monkeypatch: make_server_certificate(folder, ["b.org"]),
            "server.crt is not for a.org; make a",
        ),
    ],
    ids=["of another authority", "expired", "for another host"],
)
def test_a_server_does_not_start_with_a_certificate_that_no_client_would_trust(
    break_certificate, message, capsys, monkeypatch
):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    if "a.org" in message:
        deployed.change("here/deploy.toml", 'host = "127.0.0.1"', 'host = "a.org"')
    break_certificate(Path("here/certificates"), monkeypatch)
    assert run("deploy", "server", "here") == 2
    assert message in complaint(capsys)


def test_a_renewed_certificate_is_for_where_clients_find_the_server():
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


@pytest.mark.parametrize("command", [["server", "here"], ["client", "here/clients/client-0"]])
def test_a_folder_that_is_in_use_is_not_run_a_second_time(command, capsys):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    with lock_folder(Path(command[-1]).resolve()):
        assert run("deploy", *command) == 2
    assert "is being run already; stop that one first" in capsys.readouterr().err


def test_a_folder_may_have_any_name_but_not_too_long_a_one(capsys):
    """Also a name that a shell or a database would misread; the path of a socket must be short."""
    for name in ('q"uote', "why? not"):
        deployed.project(Path(name), clients=1, port=preflight.free_port())
        assert run("deploy", "server", name) == 0
        assert run("deploy", "client", f"{name}/clients/client-0") == 0
    deployed.project(Path("x" * 120), clients=1)
    capsys.readouterr()
    assert run("deploy", "server", "x" * 120) == 2
    assert "move the folder to a shorter path" in complaint(capsys)


@pytest.mark.parametrize("command", ["server", "run"])
def test_a_missing_accountant_is_reported_before_anything_is_trained(command, capsys, monkeypatch):
    plan = 'aggregation = "mean(clients)"'
    with_privacy(deployed.project(Path("here"), clients=1, port=preflight.free_port(), plan=plan))
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
    deployed.change("here/study.toml", "lr = 0.1", "lr = 0.2")
    capsys.readouterr()
    assert run("deploy", "resume", "here") == 2
    assert "was made with other settings or another model" in complaint(capsys)


def test_a_run_that_cannot_be_started_keeps_its_files(capsys):
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

commands = []
for name in ("init", "server", "client", "run", "resume", "status"):
    commands.append([name, "here"])
for name in ("add-client", "join", "renew"):
    commands.append([name, "here"])
for command in [*commands, ["predict", "here", "--data", "x"], ["demo"]]:
    try:
        main(["deploy", *command])
    except SystemExit as end:
        print(end.code)
"""


def test_without_flower_every_command_says_how_to_install_it():
    """In a new process, in which Flower and its dependencies cannot be imported."""
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["2"] * 11
    assert {*ended.stderr.splitlines()} == {
        "glocal: deploy: Flower is not installed; run: pip install 'glocal[flower]'"
    }


def test_a_finished_run_is_not_started_again_nor_resumed(capsys):
    folder = deployed.project(Path("here"), rounds=1)
    run_here(folder)
    capsys.readouterr()
    assert run("deploy", "run", "here") == 2
    assert "'first' exists already; continue it with" in complaint(capsys)
    assert run("deploy", "resume", "here") == 2
    assert "has done all of its 1 rounds" in complaint(capsys)


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
        run_here(folder, run=name).files.write_live(state)
    starts = [
        ("first", 1, "finished"),
        ("second", 2, "finished"),
        ("third", 3, "finished"),
        ("third", 4, "running"),
    ]
    runs = {}
    for name, number, status in starts:
        runs[number] = Run(
            pending_at=f"2026-01-0{number}",
            status=RunStatus(status=status, sub_status="failed", details="No heartbeat"),
            override_config=user_config_to_proto({"run": name}),
        )
    client = SimpleNamespace(
        ListRuns=lambda _: SimpleNamespace(run_dict=runs),
        ListNodes=lambda _: SimpleNamespace(nodes_info=[]),
    )
    monkeypatch.setattr(
        "glocal.cli.deploy_actions.connect_server", lambda _: nullcontext(ControlConnection(client))
    )
    capsys.readouterr()
    assert run("deploy", "status", "here") == 0
    printed = capsys.readouterr().out
    assert printed.count("it has ended (No heartbeat); continue with") == 1
    assert "`glocal deploy resume here --run first`" in printed.replace(f"{Path.cwd()}/", "")
    assert printed.count("it has ended (the server was restarted)") == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b'[{"number": "a", "name": "a", "key": "k"}]',
        b'[{"number": 0, "name": "a", "key": "k"}, {"number": 0, "name": "b", "key": "l"}]',
    ],
    ids=["bytes", "table", "number", "text", "twice"],
)
@pytest.mark.parametrize("command", ["server", "status", "add-client"])
def test_a_damaged_registry_is_named_and_left_as_it_is(command, damage, capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    (folder / "registry.json").write_bytes(damage)
    assert run("deploy", command, "here") == 2
    assert "registry.json is not as glocal writes it" in complaint(capsys)
    assert (folder / "registry.json").read_bytes() == damage


def test_an_invalid_key_in_the_registry_is_named(capsys):
    folder = deployed.project(Path("here"), clients=1, port=preflight.free_port())
    write_registry(folder, {0: read_registry(folder)[0]._replace(key="ssh-rsa nonsense")})
    assert run("deploy", "server", "here") == 2
    assert "'ssh-rsa nonsense' in the registry is not a client key" in complaint(capsys)


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        (["server", "here"], "here/registry.json", "roster.json"),
        (["status", "here"], "here/registry.json", "roster.json"),
        (["revoke", "here", "client-0"], "here/registry.json", "roster.json"),
        (["client", "here/clients/client-0"], "here/clients/client-0/client.toml", "device.toml"),
        (
            ["predict", "here/clients/client-0", "--data", "x.npz"],
            "here/clients/client-0/client.toml",
            "device.toml",
        ),
    ],
)
def test_a_folder_of_version_0_1_is_refused_in_one_line(command, old, new, capsys):
    deployed.project(Path("here"), clients=1, port=preflight.free_port())
    Path(old).rename(Path(old).with_name(new))
    assert run("deploy", *command) == 2
    message = complaint(capsys)
    assert f"was made by glocal 0.1 (it has {new}), and 0.2 was expected; make" in message


@pytest.mark.parametrize("command", ["resume", "join"])
def test_a_checkpoint_of_version_0_1_is_refused_in_one_line(command, capsys):
    folder = deployed.project(Path("here"), rounds=1, clients=2, port=preflight.free_port())
    run_here(folder)
    (folder / "runs/first/checkpoint.safetensors").write_bytes(foreign({"done": 1}, key="about"))
    capsys.readouterr()
    assert run("deploy", command, "here") == 2
    assert "was written by glocal 0.1, and 0.2 was expected; run it again" in complaint(capsys)


def test_clients_that_are_added_at_the_same_time_get_a_number_each():
    folder = deployed.project(Path("here"), clients=1)
    with ThreadPoolExecutor(8) as at_once:
        added = [*at_once.map(lambda _: add_client(folder), range(8))]
    registry = read_registry(folder)
    assert {own.name for own in added} == {f"client-{number}" for number in range(1, 9)}
    assert all(
        RunClient.from_folder(folder / "clients" / entry.name).settings.number == number
        for number, entry in registry.items()
    )
    assert len(registry) == 9


@pytest.mark.parametrize(
    ("damaged", "damage", "command", "message"),
    [
        (
            "live.json",
            b'{"state": "training", "updated": 1.0}',
            "status",
            "is not as glocal writes it",
        ),
        (
            "live.json",
            b'{"state": "done", "updated": "now"}',
            "status",
            "is not as glocal writes it",
        ),
        ("rows.jsonl", b'{"round": 0}\n', "status", "is not as glocal writes it"),
        (
            "checkpoint.safetensors",
            foreign({"format": FORMAT}),
            "resume",
            "was not written by glocal",
        ),
        ("checkpoint.safetensors", foreign([1]), "join", "is damaged (its header holds no table)"),
    ],
)
def test_a_damaged_file_of_a_run_is_named(damaged, damage, command, message, capsys):
    folder = deployed.project(Path("here"), rounds=1, clients=2, port=preflight.free_port())
    run_here(folder)
    (folder / "runs/first" / damaged).write_bytes(damage)
    capsys.readouterr()
    assert run("deploy", command, "here") == 2
    error = capsys.readouterr().err
    assert message in error
    assert damaged in error


def test_status_shows_the_last_loss_of_an_offline_client_and_ignores_a_torn_last_row(
    capsys,
):
    folder = deployed.project(Path("here"), rounds=2, clients=2, port=preflight.free_port())
    run_here(folder)
    rows = read_rows(folder / "runs/first/rows.jsonl")
    del rows[1]["losses"]["client-1"]
    (folder / "runs/first/rows.jsonl").write_bytes(
        "".join(json.dumps(row) + "\n" for row in rows).encode() + b"\xff"
    )
    capsys.readouterr()
    assert run("deploy", "status", "here") == 0
    assert re.search(rf"client-1 +\? +{rows[0]['losses']['client-1']:.4f}", capsys.readouterr().out)


def test_a_run_that_was_killed_during_evaluation_is_resumed_to_its_result(capsys):
    folder = deployed.project(Path("here"), rounds=1, clients=2, port=preflight.free_port())
    server = run_here(folder)
    server.files.write_live("evaluating")
    capsys.readouterr()
    assert run("deploy", "resume", "here") == 2
    assert "does not answer" in complaint(capsys), "only the server is missing"
    assert run_here(folder).live["state"] == "done"


def test_a_client_with_an_invalid_number_is_refused(capsys):
    deployed.project(Path("here"), clients=1)
    deployed.change("here/clients/client-0/client.toml", "number = 0", "number = -1")
    assert run("deploy", "client", "here/clients/client-0") == 2
    assert "settings: number is -1; a whole number from 0" in complaint(capsys)


def test_a_run_that_was_taken_over_stops_by_itself():
    folder = deployed.project(Path("here"), rounds=1)
    first = RunServer(Project.from_folder(folder), "first")
    RunServer(Project.from_folder(folder), "first")
    with pytest.raises(ValueError, match="resumed elsewhere") as taken:
        first.files.save(first.state, first.setup)
    first.on_failure(taken.value)
    assert read_json(first.folder / "live.json", dict)["state"] == "waiting for clients", (
        "the file belongs to the new server"
    )


def test_a_run_that_was_taken_over_suggests_no_resume(monkeypatch):
    folder = deployed.project(Path("here"), rounds=1, clients=1)
    state = RunState(True, "run: it has been resumed elsewhere; this server has no part in it")
    control = SimpleNamespace(start=lambda _: 1, run=lambda _: state)
    monkeypatch.setattr("glocal.deploy.runtime.connect_server", lambda _: nullcontext(control))
    with pytest.raises(InputError) as ended:
        follow(Project.from_folder(folder), "first", print)
    assert (
        str(ended.value)
        == "run: it has been resumed elsewhere; watch it there, or with `glocal deploy status`"
    )


def test_a_full_disk_leaves_no_incomplete_client(monkeypatch, capsys):
    folder = deployed.project(Path("here"), clients=1)

    def full(path, *_):
        raise InputError(f"disk: cannot write {path} (No space left on device); free some space")

    with monkeypatch.context() as patched:
        patched.setattr("glocal.deploy.scaffold.write_text", full)
        assert run("deploy", "add-client", "here") == 2
    assert "No space left" in complaint(capsys)
    assert run("deploy", "add-client", "here") == 0
    assert [entry.name for entry in read_registry(folder).values()] == ["client-0", "client-1"]


def test_a_journal_whose_last_line_was_cut_off_goes_on(tmp_path):
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b'{"round": 1}\n{"rou')
    append_rows(journal, [{"round": 2}])
    append_rows(journal, [{"round": 3}])
    assert [row["round"] for row in read_rows(journal)] == [1, 2, 3]


def program(text, *, name="mine"):
    """A small supervised program, in a module of its own."""
    Path(f"{name}.py").write_text(text)
    Path("study.toml").touch()
    return Program(name, (Path.cwd(),), Path("logs/it.log"))


@pytest.fixture
def importable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()), prepend=":")


def test_a_program_that_ends_is_restarted_after_growing_waits(importable, monkeypatch):
    waits, notices, stop = [], [], threading.Event()

    def restart_delay(failures):
        waits.append(failures)
        return 0.01

    monkeypatch.setattr(supervision, "restart_delay", restart_delay)

    def notify(text):
        notices.append(text)
        if len(notices) == 4:
            stop.set()

    supervise(program("raise SystemExit(3)"), stop, notify)
    assert {*waits} == {1, 2, 3, 4}
    assert notices[0] == "it ended (exit code 3); restarting in 0.01 s; see logs/it.log"


def test_a_program_that_refuses_its_input_is_not_restarted(importable):
    refusing = program(
        """print('{"refused": "that will not do"}', flush=True); raise SystemExit(2)"""
    )
    with pytest.raises(InputError, match="that will not do"):
        supervise(refusing, threading.Event(), print)
    assert not Path("logs").exists(), "an empty log is left"


def test_a_program_that_refuses_leaves_the_log_of_one_that_runs(importable):
    Path("logs").mkdir()
    Path("logs/it.log").touch()
    refusing = program(
        """print('{"refused": "it runs already"}', flush=True); raise SystemExit(2)"""
    )
    with pytest.raises(InputError, match="it runs already"):
        supervise(refusing, threading.Event(), print)
    assert Path("logs/it.log").exists()


def test_a_program_that_falls_silent_is_restarted_and_its_notices_are_passed_on(
    importable, monkeypatch
):
    monkeypatch.setattr(supervision, "_MAX_SILENCE", 0.3)
    monkeypatch.setattr(supervision, "restart_delay", lambda failures: 0.01)
    notices, stop = [], threading.Event()

    def notify(text):
        notices.append(text)
        if len(notices) == 4:
            stop.set()

    text = (
        """import time; print('{"notify": "here"}\\nno json\\n[1]', flush=True); time.sleep(60)"""
    )
    supervise(program(text), stop, notify)
    assert notices[0] == notices[2] == "here"
    assert "it has been silent for 0 s; restarting" in notices[1]


def test_what_an_owners_functions_print_goes_to_the_log_and_is_no_notice(importable):
    text = """
from glocal.deploy import child_process

def main(folders, notify, stop):
    print('{"refused": "posed"}')
    print("no end of line", end="")
    try:
        input()
    except EOFError:
        notify("a notice")

child_process.run(main)
"""
    notices = []
    running = ChildProcess.start(program(text), notices.append)
    assert running.process.wait(30) == 0
    running.listener.join(30)
    assert notices == ["a notice"]
    assert not running.refusal
    assert "posed" in Path("logs/it.log").read_text()
    running.stop()


def test_a_program_ends_with_its_supervisor(importable):
    """The supervisor holds the other end of its input, which closes when it is killed."""
    text = """
import time
from glocal.deploy import child_process

child_process.run(lambda *_: time.sleep(60))
"""
    running = ChildProcess.start(program(text), print)
    running.process.stdin.close()
    assert running.process.wait(30) == 1
    running.stop()


def test_a_program_gets_no_more_of_the_environment_than_it_needs(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("SSH_AUTH_SOCK", "x")
    monkeypatch.setenv("PGPASSWORD", "mine")
    monkeypatch.setenv("LANG", "C.UTF-8")
    variables = child_environment(Path("home"), ["PGPASSWORD"])
    assert variables["PGPASSWORD"] == "mine"
    assert variables["LANG"] == "C.UTF-8"
    assert variables["FLWR_TELEMETRY_ENABLED"] == "0"
    assert not {"AWS_SECRET_ACCESS_KEY", "SSH_AUTH_SOCK"} & variables.keys()


def test_the_line_of_a_round_names_dropped_clients_and_the_reasons():
    row = {
        "round": 4,
        "loss": None,
        "clients": ["a"],
        "seconds": 3.2,
        "bytes": 12000,
        "dropped": {"b": "NaN"},
        "notes": {},
        "offline": ["c"],
    }
    assert (
        format_round(row)
        == "round 5: 1 clients, 3.2 s, 12,000 bytes so far; dropped b: NaN; offline: c"
    )
