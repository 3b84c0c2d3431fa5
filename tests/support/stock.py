"""A plain Flower installation: its own SuperLink and SuperNodes, over TLS with registered keys."""

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from glocal.deploy.flower.server_internals import public_key_bytes
from glocal.deploy.preflight import free_port
from glocal.deploy.registry import read_registry
from glocal.deploy.supervision import child_environment


def start_request(files, settings):
    """The request that starts an app with these files."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from a dependency of Flower
        content, _ = build_fab_from_files({name: text.encode() for name, text in files.items()})
    fab = fab_to_proto(Fab("", content, {}))
    return StartRunRequest(fab=fab, override_config=user_config_to_proto(settings))


class Stock:
    """Flower's own programs over the certificates and keys of a project folder."""

    def __init__(self, folder):
        self.folder, self.port, self.processes = Path(folder), free_port(), []
        certificates = self.folder / "certificates"
        self.authority = certificates / "ca.crt"
        paths = ("--ssl-ca-certfile", self.authority, "--ssl-certfile", certificates / "server.crt")
        self.start(
            *("flower-superlink", "--host", "127.0.0.1", "--port", self.port, *paths),
            *("--ssl-keyfile", certificates / "server.key", "--enable-supernode-auth"),
            "--disable-runtime-dependency-installation",
        )
        address = f"127.0.0.1:{self.port}"
        self.control = ControlHttpClient.from_server_address(
            address, False, self.authority.read_bytes(), []
        )
        self.until(self.is_up)
        for entry in read_registry(self.folder).values():
            key = public_key_bytes(entry.key)
            self.control.RegisterNode(RegisterNodeRequest(public_key=key, name=entry.name))

    def start(self, name, *options):
        home = self.folder / f".stock-{len(self.processes)}"
        home.mkdir()
        log = (home / "log").open("wb")
        program = Path(sys.executable).parent / name
        path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(
            [str(program), *map(str, options)],
            env={**child_environment(home), "PATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd=home,
        )
        log.close()
        self.processes.append((process, home))

    def is_up(self):
        with suppress(httpx.HTTPError):
            self.control.ListNodes(ListNodesRequest())
            return True
        return False

    def node(self, name):
        own = self.folder / "clients" / name
        self.start(
            *("flower-supernode", "--root-certificates", self.authority),
            *("--superlink", f"127.0.0.1:{self.port}"),
            *("--auth-supernode-private-key", own / "client.key"),
            *("--host", "127.0.0.1", "--port", free_port()),
            *("--node-config", f'folder="{own}"'),
        )

    def until(self, condition, seconds=120):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.2)

    def until_online(self, number):
        self.until(lambda: self._num_online() == number)

    def _num_online(self):
        nodes = self.control.ListNodes(ListNodesRequest()).nodes_info
        return sum(node.status == "online" for node in nodes)

    def run(self, request):
        """Start an app, wait for its end, and return Flower's status of it."""
        number = self.control.StartRun(request).run_id
        self.until(lambda: self._status(number).status == "finished", 240)
        return self._status(number)

    def _status(self, number):
        return self.control.ListRuns(ListRunsRequest(run_id=number)).run_dict[number].status

    def logs(self):
        texts = [(home / "log").read_text(errors="replace") for _, home in self.processes]
        return "\n".join(text[-3000:] for text in texts)

    def close(self):
        self.control.close()
        for process, home in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_all(home)


def _end_all(home):
    """Some of Flower's programs leave the group that they were started in."""
    mark = f"FLWR_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


@contextmanager
def stock(folder):
    installation = Stock(folder)
    try:
        yield installation
    finally:
        installation.close()
