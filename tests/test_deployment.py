"""For real, on loopback: a SuperLink with TLS and keys, SuperNodes, kills, and what crosses the wire. Every process is ended."""

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from glocal.backends import simulate
from glocal.backends.flower import records
from glocal.backends.flower.control import linked
from glocal.data.fetch import unreported
from glocal.deploy.certificates import make_device_key
from glocal.deploy.conductor import RunConductor
from glocal.deploy.layout import add_device
from glocal.deploy.operating import attend, connected, control_of, follow, ready, serve
from glocal.deploy.processes import Child, free_port, supernode
from glocal.deploy.project import Project
from glocal.deploy.roster import read_roster
from glocal.errors import InputError
from glocal.keep import read_json, read_rows
from glocal.studies.build import build_algorithm, build_parts
from glocal.trees import same_bits
from glocal.wire import pack
from tests import deployed
from tests.test_flower import private_of, with_attendance
from tests.wiretap import Wiretap
from tests.world import distance

pytestmark = pytest.mark.slow


class Running:
    """A server and devices, supervised as `glocal deploy server` and `device` do, in threads that are ended in any case."""

    def __init__(self, folder):
        self.folder, self.said, self.stops, self.threads = folder, [], {}, []

    def begin(self, who, work, *rest):
        self.stops[who] = threading.Event()
        say = lambda words: self.said.append(f"{time.strftime('%H:%M:%S')} {who}: {words}")  # noqa: E731
        thread = threading.Thread(target=work, args=(*rest, self.stops[who], say), daemon=True)
        self.threads.append(thread)
        thread.start()

    def server(self):
        self.begin("server", serve, Project.at(self.folder))
        self.until(lambda: all(entry.node for entry in read_roster(self.folder).values()), 60)

    def device(self, name):
        self.begin(name, attend, ready(self.folder / "devices" / name))

    def until(self, holds, seconds):
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "\n".join(self.said)
            time.sleep(0.2)

    def follow(self, run, **more):
        say = lambda words: self.said.append(f"{time.strftime('%H:%M:%S')} run: {words}")  # noqa: E731
        return follow(Project.at(self.folder), run, say, **more)

    def rows(self, run):
        return read_rows(self.folder / "runs" / run / "rows.jsonl")

    def live(self, run):
        path = self.folder / "runs" / run / "live.json"
        return read_json(path, dict) if path.exists() else {}

    def kill(self, log):
        """kill -9 of a Flower program, and of nothing else."""
        os.kill(int((self.folder / log).with_suffix(".pid").read_text()), signal.SIGKILL)

    def connected_or_none(self):
        try:
            return self.connected()
        except InputError:
            return None

    def connected(self):
        with linked(*control_of(Project.at(self.folder))) as link:
            return connected(Project.at(self.folder), link)


def processes_of(folder):
    """Every process that was started with a home under this folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"FLWR_HOME={folder.resolve()}".encode() in (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


@contextmanager
def running(folder):
    these = Running(folder)
    try:
        yield these
    finally:
        for stop in these.stops.values():
            stop.set()
        for thread in these.threads:
            thread.join(40)
        left = processes_of(folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        print("\n".join(these.said))
        assert not left, "a process outlived what started it"


def rounds_of(folder):
    """Every round's state in the simulator."""
    project = Project.at(folder)
    project.make_importable()
    parts = build_parts(project.study, unreported)
    algorithm = build_algorithm(project.study, next(iter(project.study.cases.values())), parts)
    return [state for state, _ in simulate(algorithm, parts.params[0], parts.federations[0].train, project.plan, engine="looped")]


def windows(tree, width=32):
    """Every run of 32 bytes of every tensor, but for those that say nothing (zeros, ones)."""
    for tensor in tree.values():
        data = pack({"": tensor})
        for start in range(len(data) - width + 1):
            window = data[start : start + width]
            if len({*window}) > 8:
                yield window


def test_three_devices_over_tls_give_the_simulators_numbers_and_nothing_local_crosses_the_wire(tmp_path):
    port = free_port()
    folder = deployed.project(tmp_path / "link", devices=3, rounds=3, port=port, width=8, out=12000)
    tap = Wiretap(port, folder / "certificates")
    for own in (folder / "devices").iterdir():
        deployed.change(own / "deploy.toml", f"port = {port}", f"port = {tap.port}")
    states = rounds_of(folder)
    with running(folder) as these:
        these.server()
        for name in ("device-0", "device-1", "device-2"):
            these.device(name)
        stranger = folder / "stranger"
        make_device_key(stranger / "device.key")
        command = supernode(
            server=f"127.0.0.1:{port}", authority=folder / "certificates/ca.crt", key=stranger / "device.key", folder=stranger
        )
        refused = Child.start(command, home=stranger / ".flower", log=stranger / "logs/supernode.log")
        try:
            live = these.follow("first")
            assert these.connected() == {"device-0", "device-1", "device-2"}
            assert not refused.running(), "an unregistered key was let in"
            assert "Failed to activate SuperNode" in refused.last_words(), "it ended, but for another reason"
        finally:
            refused.stop()
    tap.close()
    assert live["state"] == "done"
    conductor = RunConductor(Project.at(folder), "first")
    assert distance(conductor.shared, states[-1].shared) <= 1e-6
    for device in range(3):
        kept = private_of(folder, device)
        assert distance(kept.after, states[-1].private.of(device)) <= 1e-6
        assert same_bits(kept.after, states[-1].private.of(device)), "the search below is for the simulator's bits"
    wire = bytes(tap.up) + bytes(tap.down)
    assert pack({"": states[0].shared["4.weight"]})[:32] in wire, "the tap hears nothing"
    for state in states:
        for device in range(3):
            assert not any(window in wire for window in windows(state.private.of(device)))
    ledger = conductor.standing.ledger.total.bytes
    print(f"wire {len(wire):,} ledger {ledger:,} ratio {len(wire) / ledger:.3f}")
    assert ledger <= len(wire) <= 1.2 * ledger


BROKEN = """
import time
from pathlib import Path

import glocal.backends.flower.records as records
from glocal.keep import read_rows

to_record = records.to_record

def broken(tree):
    number = read_rows(Path(__file__).parent / "journal.jsonl")[-1]["round"]
    spoilt = {1: tree["6.bias"] * float("nan"), 2: tree["6.bias"][:1]}
    if number == 2:
        time.sleep(10)  # others have answered by then, and the server can be killed in between
    return to_record({**tree, "6.bias": spoilt.get(number, tree["6.bias"])})

records.to_record = broken
"""


def test_kills_bad_devices_and_a_late_joiner_lose_nothing(tmp_path, monkeypatch):
    """Round 1: a device is killed, another sends NaN. Round 2: a wrong shape, and the server is killed. Afterwards one joins."""
    monkeypatch.setattr(records, "to_record", records.to_record)  # what is broken is imported here too, and must end with the test
    folder = deployed.project(tmp_path / "link", devices=4, rounds=4, port=free_port())
    deployed.change(folder / "deploy.toml", "round = 600.0", "round = 180.0")
    deployed.copy_to_devices(folder)
    with (folder / "devices/device-3/federation.py").open("a") as module:
        module.write(BROKEN)
    with running(folder) as these:
        these.server()
        for number in range(4):
            these.device(f"device-{number}")
        outcome = []
        run = threading.Thread(target=lambda: outcome.append(_ended(these, "first")), daemon=True)
        run.start()
        these.until(lambda: these.live("first").get("asked") and these.live("first").get("round") == 1, 150)
        these.kill("devices/device-1/logs/supernode.log")
        these.until(lambda: len(these.rows("first")) == 2, 200)
        these.until(lambda: these.live("first").get("round") == 2 and these.live("first").get("answered"), 100)
        these.kill("logs/superlink.log")
        run.join(90)
        assert outcome, these.said
        assert "glocal deploy resume" in str(outcome[0])
        these.until(lambda: len(these.connected_or_none() or ()) == 4, 200)
        these.follow("first")
        rows = these.rows("first")
        kept = [private_of(folder, device).after for device in range(4)]
        add_device(folder, "late", metrics=True)
        these.device("late")
        these.until(lambda: "late" in (these.connected_or_none() or ()), 60)
        these.follow("first", visit=True)
    absent = {row["round"]: [number for number in range(4) if f"device-{number}" not in row["devices"]] for row in rows}
    assert absent == {0: [], 1: [1, 3], 2: [3], 3: []}
    assert "Node Unavailable" in rows[1]["dropped"]["device-1"]
    assert "'6.bias' holds NaN" in rows[1]["dropped"]["device-3"]
    assert "'6.bias' is (1,)" in rows[2]["dropped"]["device-3"]
    state = with_attendance(folder, absent)
    assert distance(RunConductor(Project.at(folder), "first").shared, state.shared) <= 1e-6
    assert max(distance(kept[device], state.private.of(device)) for device in range(4)) <= 1e-6
    late = [row for row in read_json(folder / "runs/first/result.json", dict)["devices"] if row["newcomer"]]
    assert [row["name"] for row in late] == ["late"]
    assert late[0]["test"] is not None


def _ended(these, run):
    try:
        return these.follow(run)
    except InputError as error:
        return error


def test_a_device_comes_back_when_a_line_that_was_cut_is_mended(tmp_path):
    """A proxy that accepts and closes leaves a SuperNode off line for good; its supervisor notices."""
    port = free_port()
    folder = deployed.project(tmp_path / "link", devices=1, port=port)
    tap = Wiretap(port, folder / "certificates")
    deployed.change(folder / "devices/device-0/deploy.toml", f"port = {port}", f"port = {tap.port}")
    with running(folder) as these:
        these.server()
        these.device("device-0")
        these.until(lambda: these.connected_or_none() == {"device-0"}, 60)
        tap.cut_off()
        these.until(lambda: these.connected_or_none() == set(), 120)
        tap.cut = False
        these.until(lambda: these.connected_or_none() == {"device-0"}, 180)
    tap.close()
