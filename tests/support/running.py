"""A server and clients as supervised processes, as `glocal deploy` runs them; all are ended."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

from glocal.cli.deploy_processes import client_program, server_program
from glocal.core.errors import InputError
from glocal.core.files import read_json, read_rows
from glocal.deploy.project import Project
from glocal.deploy.runtime import connect_server, connected_clients, follow
from glocal.deploy.supervision import supervise


class Running:
    """A deployment whose programs run in processes of their own."""

    def __init__(self, folder):
        self.folder, self.notices, self.stops, self.threads = Path(folder), [], {}, {}

    def begin(self, name, program):
        self.stops[name] = threading.Event()
        arguments = (program, self.stops[name], self.notify_as(name))
        self.threads[name] = threading.Thread(target=supervise, args=arguments, daemon=True)
        self.threads[name].start()

    def notify_as(self, name):
        return lambda text: self.notices.append(f"{time.strftime('%H:%M:%S')} {name}: {text}")

    def server(self):
        self.begin("server", server_program(self.folder))
        self.until(lambda: self.connected_or_none() is not None)

    def client(self, *names):
        """Start a client, or several in one process."""
        folders = [self.folder / "clients" / name for name in names]
        self.begin(names[0] if len(names) == 1 else "gateway", client_program(folders))

    def until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(self.notices)
            time.sleep(0.05)

    def until_connected(self, *names, seconds=60):
        self.until(lambda: self.connected_or_none() == {*names}, seconds)

    def follow(self, run, **more):
        return follow(Project.from_folder(self.folder), run, self.notify_as("run"), **more)

    def rows(self, run):
        return read_rows(self.folder / "runs" / run / "rows.jsonl")

    def live(self, run):
        path = self.folder / "runs" / run / "live.json"
        with suppress(InputError):
            return read_json(path, dict) if path.exists() else {}
        return {}

    def connected_or_none(self):
        try:
            with connect_server(self.folder) as control:
                return connected_clients(self.folder, control)
        except InputError:
            return None


def pids(folder, module=""):
    """The processes of ours that work on a folder, or on one below it."""
    numbers = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = _arguments(process.name)
            modules = [name for name in arguments if name.startswith("glocal.deploy.")]
            is_ours = any(module in name for name in modules)
            paths = [Path(argument) for argument in arguments if "/" in argument]
            if is_ours and any(path.is_relative_to(folder) for path in paths):
                numbers.append(int(process.name))
    return sorted(numbers)


def kill(folder, module):
    """kill -9 of the process that works on a folder."""
    [pid] = [pid for pid in pids(folder, module) if str(folder) in _arguments(pid)]
    os.kill(pid, signal.SIGKILL)
    return pid


def _arguments(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


@contextmanager
def running(folder):
    deployment = Running(folder)
    try:
        yield deployment
    finally:
        for stop in deployment.stops.values():
            stop.set()
        for thread in deployment.threads.values():
            thread.join(40)
        remaining = pids(folder)
        for pid in remaining:
            os.kill(pid, signal.SIGKILL)
        print("\n".join(deployment.notices))
        assert not remaining, "a process outlived its supervisor"
