"""What an operator does beside a running server: start a run and follow it, and what is said of both."""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from glocal.core.errors import InputError
from glocal.core.files import Json, read_json, read_rows
from glocal.deploy.flower import server_internals
from glocal.deploy.flower.server_internals import ControlConnection, public_key_bytes
from glocal.deploy.formatting import format_live, format_round
from glocal.deploy.project import Project
from glocal.deploy.registry import active_entries, read_registry
from glocal.deploy.scaffold import SECRET, SOCKET
from glocal.deploy.server import (
    CHECKPOINT,
    LIVE,
    RESUMED_ELSEWHERE,
    ROWS,
    RUNS,
    read_server_state,
    rounds_done,
)
from glocal.evaluate.privacy import epsilon
from glocal.studies.run import slug

Notify = Callable[[str], None]
_MAX_SILENCE = 30.0  # seconds that a server may be silent before a run that is followed is given up
_POLL_INTERVAL = 0.2  # seconds between looks at a run
_CONNECTED = ("online", "idle")


def server_address(project: Project) -> str:
    """Where devices find the server."""
    return f"{project.deployment.server.host}:{project.deployment.server.port}"


@contextmanager
def connect_server(folder: Path) -> Iterator[ControlConnection]:
    """An operator's connection to the server of this folder, by its socket and its secret."""
    try:
        secret = (folder / SECRET).read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise InputError(
            f"deploy: the server of {folder} does not answer (it has no {SECRET} yet); start it with `glocal deploy server`"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"deploy: {folder / SECRET} cannot be read ({error}); run this as the user who runs the server"
        ) from error
    with server_internals.connect_control(folder / SOCKET, secret) as link:
        yield link


def require_accountant(project: Project) -> None:
    """Say now, and not after the last round, that the accountant is not installed."""
    if project.deployment.privacy is not None:
        epsilon(project.deployment.privacy.noise_multiplier, 1, project.deployment.privacy.delta)


def connected_clients(folder: Path, link: ControlConnection) -> set[str]:
    """The names of the devices that are there."""
    here = {key for status, key in link.nodes().values() if status in _CONNECTED}
    return {
        entry.name
        for entry in active_entries(read_registry(folder)).values()
        if public_key_bytes(entry.key) in here
    }


def follow(project: Project, run: str, notify: Notify, *, adapt: bool = False) -> Json:
    """Start a run, or go on with one, and say how it gets on until it ends; its last live figures."""
    folder = project.folder / RUNS / run
    before = _read_live(folder)  # what an earlier start of this run wrote
    read_registry(project.folder)  # refuses what is no server's folder
    with connect_server(project.folder) as link:
        number = link.start({"run": run, "adapt": adapt})
    heard, done, state, told = time.monotonic(), rounds_done(project.folder, run) or 0, "", ""
    while True:
        time.sleep(_POLL_INTERVAL)
        live = now if (now := _read_live(folder)) != before else {}
        rows = read_rows(folder / ROWS)
        for row in rows[done:] if live else ():
            notify(format_round(row))
        done = len(rows) if live else done
        told = format_live(live)
        if told != state:
            notify(told)
            state = told
        if live.get("state") == "done":
            return live
        try:
            heard = _require_alive(project, run, number, live, heard)
        except InputError as error:
            if RESUMED_ELSEWHERE in str(error):
                raise InputError(
                    f"run: {RESUMED_ELSEWHERE}; watch it there, or with `glocal deploy status`"
                ) from error
            raise InputError(
                f"{error}; then go on with `{resume_command(project, run, adapt=adapt)}`"
            ) from error


def _read_live(folder: Path) -> Json:
    """What a run last wrote about itself."""
    try:
        read: Json = read_json(folder / LIVE, dict) if (folder / LIVE).exists() else {}
    except InputError:
        return {}  # the run writes it anew
    return read


def resume_command(project: Project, run: str, *, adapt: bool = False) -> str:
    """The command that goes on where a run ended."""
    command = "join" if adapt else "run" if rounds_done(project.folder, run) is None else "resume"
    return f"glocal deploy {command} {shlex.quote(str(project.folder))} --run {run}"


def _require_alive(project: Project, run: str, number: int, live: Json, heard: float) -> float:
    """Give a run up that has failed, or whose server is gone; when the server was heard last."""
    if live.get("state") == "failed":
        raise InputError(f"run: {live['reason'].removeprefix('run: ')}")
    try:
        with connect_server(project.folder) as link:
            state = link.run(number)
    except InputError:
        if time.monotonic() - heard > _MAX_SILENCE:
            raise InputError(
                f"run: the server has been gone for {_MAX_SILENCE:.0f} s; start it again"
            ) from None
        return heard
    if state is None:
        raise InputError("run: the server was started anew, and the run ended with the old one")
    if state.finished and _read_live(project.folder / RUNS / run).get("state") != "done":
        raise InputError(f"run: it ended ({state.details or 'no reason given'}); put it right")
    return time.monotonic()


def require_new_run(project: Project, run: str) -> None:
    """Refuse a name that a run has already, or that is no plain name."""
    if slug(run) != run:
        raise InputError(
            f"run: '{run}' is no plain name; choose one of small letters, figures and '-', such as {slug(run)}"
        )
    project.setup  # noqa: B018 (what is wrong with the model is said now)
    require_accountant(project)
    if (project.folder / RUNS / run / CHECKPOINT).exists():
        resume = f"glocal deploy resume {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(
            f"run: '{run}' has begun already; go on with `{resume}`, or give another --run"
        )


def require_unfinished(project: Project, run: str) -> None:
    """Refuse to go on with what never began, or is done; one that ended before its last test is not."""
    done, folder = rounds_done(project.folder, run), project.folder / RUNS / run
    if done is None:
        start = f"glocal deploy run {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(f"resume: '{run}' has not begun; start it with `{start}`")
    if done >= project.plan.rounds and _read_live(folder).get("state") == "done":
        raise InputError(
            f"resume: '{run}' has done all its {done} rounds; raise plan.rounds in study.toml on the server to go on"
        )
    read_server_state(
        folder / CHECKPOINT, project.setup
    )  # refuses what was made with other settings
