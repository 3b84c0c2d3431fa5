"""A server and devices as real processes, kept running as `glocal deploy server` and `device` do; all are ended in any case."""

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
    def __init__(self, folder):
        self.folder, self.said, self.stops, self.threads = Path(folder), [], {}, {}

    def begin(self, who, program):
        self.stops[who] = threading.Event()
        arguments = (program, self.stops[who], self.sayer(who))
        self.threads[who] = threading.Thread(target=supervise, args=arguments, daemon=True)
        self.threads[who].start()

    def sayer(self, who):
        return lambda words: self.said.append(f"{time.strftime('%H:%M:%S')} {who}: {words}")

    def server(self):
        self.begin("server", server_program(self.folder))
        self.until(lambda: self.connected_or_none() is not None)

    def device(self, *names, who=None):
        folders = [self.folder / "devices" / name for name in names]
        self.begin(who or names[0], client_program(folders))

    def end(self, who):
        self.stops[who].set()
        self.threads[who].join(40)

    def until(self, holds, seconds=60):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "\n".join(self.said)
            time.sleep(0.05)

    def until_connected(self, *names, seconds=60):
        self.until(lambda: self.connected_or_none() == {*names}, seconds)

    def follow(self, run, **more):
        return follow(Project.at(self.folder), run, self.sayer("run"), **more)

    def rows(self, run):
        return read_rows(self.folder / "runs" / run / "rows.jsonl")

    def live(self, run):
        path = self.folder / "runs" / run / "live.json"
        with suppress(InputError):
            return read_json(path, dict) if path.exists() else {}
        return {}

    def connected_or_none(self):
        try:
            with connect_server(self.folder) as link:
                return connected_clients(self.folder, link)
        except InputError:
            return None


def pids(folder, module=""):
    """The processes of ours that work on a folder, or on one below it."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes().decode().split("\0")
            ours = [word for word in words if word.startswith("glocal.deploy.") and module in word]
            if ours and any(Path(word).is_relative_to(folder) for word in words if "/" in word):
                found.append(int(place.name))
    return sorted(found)


def kill(folder, module):
    """kill -9 of the process that works on a folder."""
    [pid] = [pid for pid in pids(folder, module) if str(folder) in _words(pid)]
    os.kill(pid, signal.SIGKILL)
    return pid


def _words(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


@contextmanager
def running(folder):
    these = Running(folder)
    try:
        yield these
    finally:
        for stop in these.stops.values():
            stop.set()
        for thread in these.threads.values():
            thread.join(40)
        left = pids(folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        print("\n".join(these.said))
        assert not left, "a process outlived what started it"
