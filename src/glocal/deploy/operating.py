"""The long commands: a server and a device that are kept running, and a run that is followed to its end."""

import shlex
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from glocal.backends.flower.control import Link, key_bytes, linked
from glocal.deploy.certificates import CA, SERVER, days_left, require_device_key, require_server_certificate
from glocal.deploy.conductor import CHECKPOINT, ELSEWHERE, LIVE, ROWS, RUNS, read_standing, rounds_done
from glocal.deploy.device import JOURNAL, Member
from glocal.deploy.layout import CERTIFICATES, KEY
from glocal.deploy.processes import Child, alone, answers, end_all, require_free, superlink, supernode
from glocal.deploy.project import Project
from glocal.deploy.roster import changing, read_roster, write_roster
from glocal.deploy.supervision import Care, supervise
from glocal.errors import InputError
from glocal.keep import Json, read_json, read_rows
from glocal.measure.privacy import epsilon
from glocal.studies.run import slug

Say = Callable[[str], None]
HOME, LOGS, DATABASE = ".flower", "logs", "server.db"
_RENEW = 30  # days before its end at which a certificate is worth a word
_SILENT = 30.0  # seconds that a server may be silent before a run that is followed is given up
_CONNECTED = ("online", "idle")
# after a broken handshake a SuperNode gives up for good, and does not end
_LOST = ("Connection attempt failed", "handshake error detected", "Giving up reconnection")
_BACK = ("Connection successful", "SuperNode ID:")


def address_of(project: Project) -> str:
    """Where devices find the server."""
    return f"{project.deployment.server.host}:{project.deployment.server.port}"


def _operators_host(project: Project) -> str:
    """Where its operator finds it, on the same machine."""
    bound = project.deployment.server.bind
    return "127.0.0.1" if bound == "0.0.0.0" else bound


def control_of(project: Project) -> tuple[str, Path]:
    """The address at which its operator finds it, and what it is trusted by."""
    return f"{_operators_host(project)}:{project.deployment.server.port}", project.folder / CERTIFICATES / CA


def unanswered(project: Project) -> str:
    """Why the server does not answer its operator, or nothing."""
    return answers(_operators_host(project), project.deployment.server.port, project.folder / CERTIFICATES / CA)


def hosts_of(project: Project) -> list[str]:
    """What the server's certificate must be good for: where devices find it, and where its operator does."""
    return [project.deployment.server.host, _operators_host(project)]


def _require_accountant(project: Project) -> None:
    """Say now, and not after the last round, that the accountant is not installed."""
    if project.deployment.privacy is not None:
        epsilon(project.deployment.privacy.noise, 1, project.deployment.privacy.delta)


def serve(project: Project, stop: threading.Event, say: Say) -> None:
    """Keep the SuperLink running, let the roster's devices in, and say who comes and goes and how runs get on."""
    for entry in read_roster(project.folder).values():  # refuses what is no server's folder
        key_bytes(entry.key)  # refuses what is no key
    if "?" in str(project.folder):  # a name ends there for Flower's database, which would lie beside the folder
        raise InputError(f"deploy: {project.folder} has a question mark in it, which Flower does not bear; rename it")
    require_server_certificate(project.folder / CERTIFICATES, hosts_of(project))
    left = days_left(project.folder / CERTIFICATES / SERVER)
    if left < _RENEW:
        renew = f"glocal deploy renew {shlex.quote(str(project.folder))}"
        say(f"the server's certificate ends in {left} days; make a new one with `{renew}`")
    project.kit  # noqa: B018 (what is wrong with the model or the study is said now)
    _require_accountant(project)
    server, folder, watch = project.deployment.server, project.folder, _Watch(project, say)

    def start() -> Child:
        command = superlink(bind=server.bind, port=server.port, certificates=folder / CERTIFICATES, database=folder / DATABASE)
        say(f"the server starts on {server.bind}:{server.port}, for devices at {address_of(project)}")
        return Child.start(command, home=folder / HOME, log=folder / LOGS / "superlink.log")

    with alone(folder):
        end_all(folder / HOME)  # what a killed one left behind would hold the port
        require_free(server.bind, server.port)
        supervise(Care(start, lambda: unanswered(project), say, watch.look, every=2.0), stop)


@dataclass
class _Watch:
    """What an operator is told: keys let in, devices that come and go, rounds."""

    project: Project
    say: Say
    here: set[str] = field(default_factory=set)
    rows: dict[str, int] = field(default_factory=dict)
    ready: bool = False

    def look(self) -> None:
        """Look once; a server that does not answer yet is no news."""
        try:
            with linked(*control_of(self.project)) as link:
                here = connected(self.project, link)
                if not self.ready:
                    self.ready = True
                    self.say("the server is up")
                register(self.project, link, self.say)
                self._say_who(here)
        except InputError:
            self.ready = False
        self._say_rounds()

    def _say_who(self, here: set[str]) -> None:
        total = len(read_roster(self.project.folder))
        for name in sorted(here ^ self.here):
            self.say(f"{name} {'has connected' if name in here else 'is gone'} ({len(here)} of {total} devices are there)")
        self.here = here

    def _say_rounds(self) -> None:
        for path in sorted((self.project.folder / RUNS).glob(f"*/{ROWS}")):
            rows = read_rows(path)
            for row in rows[self.rows.get(path.parent.name, 0) if path.parent.name in self.rows else len(rows) :]:
                self.say(f"{path.parent.name}: {told_row(row)}")
            self.rows[path.parent.name] = len(rows)


def register(project: Project, link: Link, say: Say) -> None:
    """Let in the keys of the roster that the server does not know, or no longer: its database may have been lost."""
    nodes = link.nodes()
    waiting = [entry for entry in read_roster(project.folder).values() if entry.node not in nodes]
    known = {key: node for node, (_, key) in nodes.items()}
    for entry in waiting:
        node = known.get(key_bytes(entry.key)) or link.register(entry.key, entry.name)
        with changing(project.folder):
            write_roster(project.folder, {**read_roster(project.folder), entry.number: entry._replace(node=node)})
        say(f"{entry.name} may connect")


def connected(project: Project, link: Link) -> set[str]:
    """The names of the devices that are there."""
    status = {node: state for node, (state, _) in link.nodes().items()}
    return {entry.name for entry in read_roster(project.folder).values() if status.get(entry.node) in _CONNECTED}


def ready(folder: Path) -> Member:
    """A device whose model, data and keys are as they should be; what is wrong with them is said before it connects."""
    member = Member.at(folder)
    if any(character in str(member.project.folder) for character in '"\\'):
        raise InputError(f"deploy: {member.project.folder} has a quote or a backslash in it, which Flower does not bear; rename it")
    require_device_key(member.project.folder / CA, member.project.folder / KEY)
    member.data()
    return member


def attend(member: Member, stop: threading.Event, say: Say) -> None:
    """Keep a device connected, and tell its owner what it does and what leaves it."""
    own = member.project.folder
    told = len(read_rows(own / JOURNAL))
    host, port = member.project.deployment.server.host, member.project.deployment.server.port
    line = _Line(own / LOGS / "supernode.log", say, lambda: answers(host, port, own / CA))
    weight = "" if member.equal else ", and on how many examples it trained"
    consent = "losses and accuracies leave it too" if member.settings.metrics else "no losses or accuracies leave it"
    federation = member.project.deployment.name
    say(f"{member.settings.name} of '{federation}': only the shared part of its model leaves it{weight}; {consent}")

    def start() -> Child:
        say(f"connecting to {host}:{port}")
        command = supernode(server=f"{host}:{port}", authority=own / CA, key=own / KEY, folder=own)
        return Child.start(command, home=own / HOME, log=line.log)

    def watch() -> None:
        nonlocal told
        rows = read_rows(own / JOURNAL)
        for row in rows[told:]:
            say(told_entry(row))
        told = len(rows)

    with alone(own):
        supervise(Care(start, line.cut_off, say, watch, every=1.0), stop)


@dataclass
class _Line:
    """A device's connection: what its SuperNode's log says of it, and whether the server answers when we ask ourselves."""

    log: Path
    say: Say
    unanswered: Callable[[], str]
    place: int = 0
    lost: bool = False
    back: bool = False
    mended: bool = False
    silent: bool = False

    def __post_init__(self) -> None:
        self.place = self.log.stat().st_size if self.log.exists() else 0  # what was said before is no news

    def cut_off(self) -> str:
        """Why the device should connect anew: it is lost, though the server is there."""
        self._listen()
        why = self.unanswered() if self.lost and not self.mended else ""
        # once the server has answered, one answer that is lost does not make it gone
        self.mended = self.lost and not why
        if why and not self.silent:
            self.say(f"the server does not answer ({why}); trying again")
        elif self.silent and self.back:
            self.say("connected again")
        self.silent = not self.back and (self.silent or bool(why))
        return "the server is there, and it does not get through" if self.mended else ""

    def _listen(self) -> None:
        """Read the whole lines that are new in the log."""
        if not self.log.exists():
            return
        with self.log.open("rb") as words:
            words.seek(self.place)
            new = words.read()
        new = new[: new.rfind(b"\n") + 1]
        self.place += len(new)
        for line in new.decode(errors="replace").splitlines():
            if any(sign in line for sign in _LOST):
                self.lost, self.back = True, False
            elif any(sign in line for sign in _BACK):
                self.lost, self.back = False, True
            elif "Starting Flower SuperNode" in line:
                self.lost = False


def follow(project: Project, run: str, say: Say, *, visit: bool = False) -> Json:
    """Start a run, or go on with one, and say how it gets on until it ends; its last live figures."""
    folder = project.folder / RUNS / run
    before = _live(folder)  # what an earlier start of this run wrote
    read_roster(project.folder)  # refuses what is no server's folder
    with linked(*control_of(project)) as link:
        register(project, link, say)
        number = link.start({"folder": str(project.folder), "run": run, "visit": visit})
    heard, done, state, told = time.monotonic(), rounds_done(project.folder, run) or 0, "", ""
    while True:
        time.sleep(0.5)
        live = now if (now := _live(folder)) != before else {}
        rows = read_rows(folder / ROWS)
        for row in rows[done:] if live else ():
            say(told_row(row))
        done = len(rows) if live else done
        told = told_live(live)
        if told != state:
            say(told)
            state = told
        if live.get("state") == "done":
            return live
        try:
            heard = _require_alive(project, number, live, heard)
        except InputError as error:
            if ELSEWHERE in str(error):
                raise InputError(f"run: {ELSEWHERE}; watch it there, or with `glocal deploy status`") from error
            raise InputError(f"{error}; then go on with `{again(project, run, visit=visit)}`") from error


def _live(folder: Path) -> Json:
    """What a run last wrote about itself."""
    try:
        read: Json = read_json(folder / LIVE, dict) if (folder / LIVE).exists() else {}
    except InputError:
        return {}  # the run writes it anew
    return read


def again(project: Project, run: str, *, visit: bool = False) -> str:
    """The command that goes on where a run ended."""
    command = "join" if visit else "run" if rounds_done(project.folder, run) is None else "resume"
    return f"glocal deploy {command} {shlex.quote(str(project.folder))} --run {run}"


def _require_alive(project: Project, number: int, live: Json, heard: float) -> float:
    """Give a run up that has failed, or whose server is gone; when the server was heard last."""
    if live.get("state") == "failed":
        raise InputError(f"run: {live['why'].removeprefix('run: ')}")
    try:
        with linked(*control_of(project)) as link:
            state = link.run(number)
    except InputError:
        if time.monotonic() - heard > _SILENT:
            raise InputError(f"run: the server has been gone for {_SILENT:.0f} s; start it again") from None
        return heard
    if state.status.startswith("finished") and live.get("state") != "done":
        raise InputError(f"run: Flower ended it ({state.status}, {state.details or 'no reason given'}); put it right")
    return time.monotonic()


def told_row(row: Json) -> str:
    """A round in a line."""
    loss = "" if row["loss"] is None else f"loss {row['loss']:.4f}, "
    lost = "".join(f"; dropped {name}: {why}" for name, why in row["dropped"].items())
    notes = "".join(f"; {name}: {note}" for name, note in row["notes"].items())
    away = f"; away: {', '.join(row['away'])}" if row["away"] else ""
    took = f"{row['seconds']:.0f} s, {row['bytes']:,} bytes so far"
    return f"round {row['round'] + 1}: {loss}{len(row['devices'])} devices, {took}{lost}{notes}{away}"


def told_live(live: Json) -> str:
    """What goes on now, in a line."""
    if not live:
        return "the run is being started"
    here = f" ({', '.join(live['connected'])} are there)" if live.get("connected") else ""
    refused = "".join(f"; refused {name}: {why}" for name, why in live.get("refused", {}).items())
    if live["state"] == "waiting for devices":
        return f"waiting for devices{here}{refused}"
    if live["state"] == "training":
        return f"round {live['round'] + 1} of {live['rounds']} is under way{here}{refused}"
    return "devices test their own models" if live["state"] == "testing" else str(live["state"])


def told_entry(row: Json) -> str:
    """A line of a device's journal as its owner reads it."""
    trained = "bytes" in row
    sent = f": {row['bytes']:,} bytes, tensors {', '.join(row['tensors'])}; it counts as {row['examples']}" if trained else ""
    told = ", ".join(f"{name} {value:.4g}" for name, value in (row.get("figures") or {}).items())
    figures = f"; figures sent: {told}" if told else ""
    missed = f"; it was away for {row['missed']}" if "missed" in row else ""
    note = f"; the server is told: {row['note']}" if "note" in row else ""
    why = f": {row['why']}" if "why" in row else ""
    when = f"round {row['round'] + 1}" if trained else f"after {row['round']} rounds"
    return f"{row['run']}, {when}: {row['what']}{sent}{why}{figures}{note}{missed}"


def require_new_run(project: Project, run: str) -> None:
    """Refuse a name that a run has already, or that is no plain name."""
    if slug(run) != run:
        raise InputError(f"run: '{run}' is no plain name; choose one of small letters, figures and '-', such as {slug(run)}")
    project.kit  # noqa: B018 (what is wrong with the model is said now)
    _require_accountant(project)
    if (project.folder / RUNS / run / CHECKPOINT).exists():
        resume = f"glocal deploy resume {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(f"run: '{run}' has begun already; go on with `{resume}`, or give another --run")


def require_unfinished(project: Project, run: str) -> None:
    """Refuse to go on with what never began, or is done; one that ended before its last test is not."""
    done, folder = rounds_done(project.folder, run), project.folder / RUNS / run
    if done is None:
        start = f"glocal deploy run {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(f"resume: '{run}' has not begun; start it with `{start}`")
    if done >= project.plan.rounds and _live(folder).get("state") == "done":
        raise InputError(f"resume: '{run}' has done all its {done} rounds; raise plan.rounds in study.toml on the server to go on")
    read_standing(folder / CHECKPOINT, project.kit)  # refuses what was made with other settings
