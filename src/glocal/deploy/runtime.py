"""The operator's actions on a running server: start a run, follow it, query both."""

import shlex
import time
from collections.abc import Iterator
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
from glocal.deploy.server_files import (
    CHECKPOINT,
    LIVE,
    RESUMED_ELSEWHERE,
    ROWS,
    RUNS,
    read_server_state,
    rounds_done,
)
from glocal.deploy.supervision import Notify
from glocal.evaluate.privacy import epsilon
from glocal.studies.run import slug

_MAX_SILENCE = 30.0  # seconds without an answer from the server after which `follow` gives up
_POLL_INTERVAL = 0.2  # seconds
_CONNECTED = ("online", "idle")  # Flower's states of a node


def server_address(project: Project) -> str:
    """The address that clients connect to."""
    return f"{project.deployment.server.host}:{project.deployment.server.port}"


@contextmanager
def connect_server(folder: Path) -> Iterator[ControlConnection]:
    """An operator's connection to the server of this folder, by its socket and its secret."""
    try:
        secret = (folder / SECRET).read_text(encoding="ascii")
    except FileNotFoundError as error:
        raise InputError(
            f"deploy: the server of {folder} does not answer (it has no {SECRET} yet); "
            "start it with `glocal deploy server`"
        ) from error
    except (OSError, ValueError) as error:
        raise InputError(
            f"deploy: cannot read {folder / SECRET} ({error}); "
            "run this as the user that runs the server"
        ) from error
    with server_internals.connect_control(folder / SOCKET, secret) as control:
        yield control


def require_accountant(project: Project) -> None:
    """Refuse a missing accountant now, not after the last round."""
    if project.deployment.privacy is not None:
        epsilon(project.deployment.privacy.noise_multiplier, 1, project.deployment.privacy.delta)


def connected_clients(folder: Path, control: ControlConnection) -> set[str]:
    """The names of the connected clients."""
    keys = {key for status, key in control.nodes().values() if status in _CONNECTED}
    names = set()
    for entry in active_entries(read_registry(folder)).values():
        if public_key_bytes(entry.key) in keys:
            names.add(entry.name)
    return names


def follow(project: Project, run: str, notify: Notify, *, skip_training: bool = False) -> Json:
    """Start or continue a run and report its progress until it ends; its last live state."""
    folder = project.folder / RUNS / run
    before = _read_live(folder)  # from an earlier start of this run
    read_registry(project.folder)  # refuses a folder that is not a server's
    with connect_server(project.folder) as control:
        number = control.start({"run": run, "skip_training": skip_training})
    last_heard, last_line = time.monotonic(), ""
    num_shown = rounds_done(project.folder, run) or 0
    while True:
        time.sleep(_POLL_INTERVAL)
        current = _read_live(folder)
        live = current if current != before else {}
        if live:
            rows = read_rows(folder / ROWS)
            for row in rows[num_shown:]:
                notify(format_round(row))
            num_shown = len(rows)
        line = format_live(live)
        if line != last_line:
            notify(line)
            last_line = line
        if live.get("state") == "done":
            return live
        try:
            last_heard = _require_alive(project, run, number, live, last_heard)
        except InputError as error:
            if RESUMED_ELSEWHERE in str(error):
                raise InputError(
                    f"run: {RESUMED_ELSEWHERE}; watch it there, or with `glocal deploy status`"
                ) from error
            command = resume_command(project, run, skip_training=skip_training)
            raise InputError(f"{error}; then continue with `{command}`") from error


def _read_live(folder: Path) -> Json:
    """The live state that a run wrote last."""
    if not (folder / LIVE).exists():
        return {}
    try:
        live: Json = read_json(folder / LIVE, dict)
    except InputError:
        return {}  # the run writes it again
    return live


def resume_command(project: Project, run: str, *, skip_training: bool = False) -> str:
    """The command that continues an ended run."""
    if skip_training:
        command = "join"
    else:
        command = "run" if rounds_done(project.folder, run) is None else "resume"
    return f"glocal deploy {command} {shlex.quote(str(project.folder))} --run {run}"


def _require_alive(project: Project, run: str, number: int, live: Json, last_heard: float) -> float:
    """Refuse a failed run and a lost server; the time of the server's last answer."""
    if live.get("state") == "failed":
        raise InputError(f"run: {live['reason'].removeprefix('run: ')}")
    try:
        with connect_server(project.folder) as control:
            state = control.run(number)
    except InputError:
        if time.monotonic() - last_heard > _MAX_SILENCE:
            raise InputError(
                f"run: the server has not answered for {_MAX_SILENCE:.0f} s; start it again"
            ) from None
        return last_heard
    if state is None:
        raise InputError("run: the server was restarted, which ended the run")
    if state.finished and _read_live(project.folder / RUNS / run).get("state") != "done":
        raise InputError(f"run: it ended ({state.details or 'no reason given'}); correct this")
    return time.monotonic()


def require_new_run(project: Project, run: str) -> None:
    """Refuse a run name that is invalid or taken."""
    if slug(run) != run:
        raise InputError(
            f"run: '{run}' is not a valid name; use small letters, digits and '-', "
            f"such as {slug(run)}"
        )
    project.setup  # noqa: B018 (refuses an unusable model)
    require_accountant(project)
    if (project.folder / RUNS / run / CHECKPOINT).exists():
        resume = f"glocal deploy resume {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(
            f"run: '{run}' exists already; continue it with `{resume}`, or give another --run"
        )


def require_unfinished(project: Project, run: str) -> None:
    """Refuse to resume a run that does not exist, or that is complete with its last evaluation."""
    num_done, folder = rounds_done(project.folder, run), project.folder / RUNS / run
    if num_done is None:
        start = f"glocal deploy run {shlex.quote(str(project.folder))} --run {run}"
        raise InputError(f"resume: '{run}' does not exist yet; start it with `{start}`")
    if num_done >= project.plan.rounds and _read_live(folder).get("state") == "done":
        raise InputError(
            f"resume: '{run}' has done all of its {num_done} rounds; "
            "raise plan.rounds in study.toml on the server to continue"
        )
    read_server_state(folder / CHECKPOINT, project.setup)  # refuses one of other settings
