"""What an operator does beside a running server: start a run and follow it, and what is said of both."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glocal.core.errors import InputError
from glocal.core.files import Json, read_json, read_rows
from glocal.deploy.conductor import CHECKPOINT, ELSEWHERE, LIVE, ROWS, RUNS, read_standing, rounds_done
from glocal.deploy.flower import inner_server
from glocal.deploy.flower.inner_server import Link, key_bytes
from glocal.deploy.layout import SECRET, SOCKET
from glocal.deploy.project import Project
from glocal.deploy.roster import active, read_roster
from glocal.deploy.words import told_live, told_row
from glocal.evaluate.privacy import epsilon
from glocal.studies.run import slug

Say = Callable[[str], None]
_SILENT = 30.0  # seconds that a server may be silent before a run that is followed is given up
_LOOK = 0.2  # seconds between looks at a run
_CONNECTED = ("online", "idle")


def address_of(project: Project) -> str:
    """Where devices find the server."""
    return f"{project.deployment.server.host}:{project.deployment.server.port}"


@contextmanager
def linked(folder: Path) -> Iterator[Link]:
    """An operator's connection to the server of this folder, by its socket and its secret."""
    try:
        secret = (folder / SECRET).read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise InputError(
            f"deploy: the server of {folder} does not answer (it has no {SECRET} yet); start it with `glocal deploy server`"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(f"deploy: {folder / SECRET} cannot be read ({error}); run this as the user who runs the server") from error
    with inner_server.linked(folder / SOCKET, secret) as link:
        yield link


def require_accountant(project: Project) -> None:
    """Say now, and not after the last round, that the accountant is not installed."""
    if project.deployment.privacy is not None:
        epsilon(project.deployment.privacy.noise, 1, project.deployment.privacy.delta)


def connected(folder: Path, link: Link) -> set[str]:
    """The names of the devices that are there."""
    here = {key for status, key in link.nodes().values() if status in _CONNECTED}
    return {entry.name for entry in active(read_roster(folder)).values() if key_bytes(entry.key) in here}


def follow(project: Project, run: str, say: Say, *, visit: bool = False) -> Json:
    """Start a run, or go on with one, and say how it gets on until it ends; its last live figures."""
    folder = project.folder / RUNS / run
    before = _live(folder)  # what an earlier start of this run wrote
    read_roster(project.folder)  # refuses what is no server's folder
    with linked(project.folder) as link:
        number = link.start({"run": run, "visit": visit})
    heard, done, state, told = time.monotonic(), rounds_done(project.folder, run) or 0, "", ""
    while True:
        time.sleep(_LOOK)
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
            heard = _require_alive(project, run, number, live, heard)
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


def _require_alive(project: Project, run: str, number: int, live: Json, heard: float) -> float:
    """Give a run up that has failed, or whose server is gone; when the server was heard last."""
    if live.get("state") == "failed":
        raise InputError(f"run: {live['why'].removeprefix('run: ')}")
    try:
        with linked(project.folder) as link:
            state = link.run(number)
    except InputError:
        if time.monotonic() - heard > _SILENT:
            raise InputError(f"run: the server has been gone for {_SILENT:.0f} s; start it again") from None
        return heard
    if state is None:
        raise InputError("run: the server was started anew, and the run ended with the old one")
    if state.finished and _live(project.folder / RUNS / run).get("state") != "done":
        raise InputError(f"run: it ended ({state.details or 'no reason given'}); put it right")
    return time.monotonic()


def require_new_run(project: Project, run: str) -> None:
    """Refuse a name that a run has already, or that is no plain name."""
    if slug(run) != run:
        raise InputError(f"run: '{run}' is no plain name; choose one of small letters, figures and '-', such as {slug(run)}")
    project.kit  # noqa: B018 (what is wrong with the model is said now)
    require_accountant(project)
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
