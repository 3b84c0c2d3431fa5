"""A deployment as a user sees it: lines with the time while something runs, tables when asked."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.deploy_processes import (
    client_program,
    log_line,
    notify_as,
    server_program,
    until_stopped,
)
from glocal.cli.tables import format_bytes, format_percent
from glocal.core.errors import InputError, describe_error
from glocal.core.files import atomic_write, read_json, read_rows
from glocal.deploy.certificates import make_server_certificate
from glocal.deploy.client import STATE, RunClient, predict_classes
from glocal.deploy.flower.server_internals import RunState
from glocal.deploy.formatting import format_live, format_round
from glocal.deploy.preflight import free_port
from glocal.deploy.project import Project
from glocal.deploy.registry import REGISTRY, read_registry, revoke
from glocal.deploy.runtime import (
    connect_server,
    connected_clients,
    follow,
    require_new_run,
    require_unfinished,
    resume_command,
    server_address,
)
from glocal.deploy.scaffold import (
    CERTIFICATES,
    CLIENTS_FOLDER,
    DeploymentSpec,
    add_client,
    create_deployment,
)
from glocal.deploy.server import LIVE, RESULT, ROWS, RUNS, rounds_done
from glocal.deploy.supervision import Program, supervise
from glocal.report import write_deploy_report
from glocal.studies.new_client import read_inputs

_STARTUP_TIMEOUT = 60.0  # seconds that the demo's server may take to start


def init(folder: Path, wanted: DeploymentSpec) -> None:
    """Write a new deployment's folder."""
    project = create_deployment(folder, wanted)
    print(f"written: {folder}")
    print(
        "  federation.py, study.toml   your model, your data, what is trained: edit them; `glocal run study.toml` simulates it"
    )
    print("  deploy.toml                 where the server is, how long things may take, privacy")
    print(
        f"  {CERTIFICATES}/               the server's; ca.key signs new ones and belongs in a safe place"
    )
    print(
        f"  {CLIENTS_FOLDER}/NAME/               one folder to hand to each device, with its secret key"
    )
    own, server = quote(str(folder)), project.deployment.server
    if server.bind == "0.0.0.0":
        print(
            f"the server will listen on all of this machine's addresses, port {server.port}; only registered devices pass its gate"
        )
    print(
        f"next: glocal deploy server {own}; on each device: glocal deploy device FOLDER; then: glocal deploy run {own}"
    )
    project.setup  # noqa: B018 (refuses what cannot be built)


def add(folder: Path, name: str | None, *, share_metrics: bool) -> None:
    """One more device."""
    project = Project.from_folder(folder)
    algorithm = project.setup.algorithm
    if algorithm.num_clients is not None:
        raise InputError(
            f"deploy: {algorithm.name} is made for {algorithm.num_clients} devices, and has no place for one more"
        )
    own = add_client(folder, name, share_metrics=share_metrics)
    print(
        f"written: {own}; hand it to the device, and start it there with `glocal deploy device FOLDER`"
    )
    now = f"glocal deploy join {quote(str(folder))}"
    print(
        f"a running server lets it in within seconds; it takes part in the next round, or now: {now}"
    )


def renew_certificate(folder: Path) -> None:
    """A new certificate for the server."""
    until = make_server_certificate(
        folder / CERTIFICATES, [Project.from_folder(folder).deployment.server.host]
    )
    print(f"renewed until {until:%Y-%m-%d}; restart `glocal deploy server {quote(str(folder))}`")


def revoke_client(folder: Path, name: str) -> None:
    """Let a device in no longer."""
    entry = revoke(folder, name)
    print(
        f"{entry.name} is refused from its next request on; it stays in {folder / REGISTRY}, revoked"
    )


def run(folder: Path, name: str) -> None:
    """Start a run and follow it."""
    project = Project.from_folder(folder)
    require_new_run(project, name)
    _follow_and_show(project, name)


def resume(folder: Path, name: str) -> None:
    """Go on with a run from its last round."""
    project = Project.from_folder(folder)
    require_unfinished(project, name)
    _follow_and_show(project, name)


def join(folder: Path, name: str) -> None:
    """Newcomers learn their private part from a finished run, and everybody tests."""
    project = Project.from_folder(folder)
    if not rounds_done(project.folder, name):
        start = f"glocal deploy run {quote(str(folder))}"
        raise InputError(
            f"join: there is no run '{name}' in {folder} that has done a round; do one with `{start}`"
        )
    _follow_and_show(project, name, adapt=True)


def _follow_and_show(project: Project, name: str, *, adapt: bool = False) -> None:
    try:
        follow(project, name, log_line, adapt=adapt)
    except KeyboardInterrupt:
        log_line("no longer watching; the run goes on. See `glocal deploy status`")
        raise
    show_result(project.folder / RUNS / name)


def show_result(place: Path) -> None:
    """The table of devices, and the page."""
    result = read_json(place / RESULT, dict)
    table = Table("device", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("rounds", "last round", "Local Test", "test examples"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["clients"]:
        last = "-" if row["last_round"] is None else str(row["last_round"] + 1)
        late = " (joined later)" if row["new_client"] else ""
        table.add_row(
            escape(row["name"] + late),
            str(row["rounds"]),
            last,
            format_percent(row["test"]),
            str(row["test_size"] or "-"),
        )
    Console().print(table)
    if result["privacy"]:
        kept = result["privacy"]
        print(
            f"privacy: epsilon {kept['epsilon']:.2f} at delta {kept['delta']:g} after {kept['rounds']} rounds "
            f"(clip {kept['clip_norm']:g}, noise {kept['noise_multiplier']:g})"
        )
    print(f"sent: {format_bytes(result['ledger']['total']['bytes'])}, the shared part only")
    print(f"report: {write_deploy_report(place)}")


def status(folder: Path) -> None:
    """Who is connected, and how every run stands."""
    project, registry = Project.from_folder(folder), read_registry(folder)
    here, starts = None, dict[str, RunState]()
    with suppress(InputError), connect_server(folder) as link:
        here, starts = connected_clients(folder, link), link.latest_run_states()
    answer = "does not answer" if here is None else "up"
    print(f"server: {answer}, for devices at {server_address(project)}")
    places = sorted((folder / RUNS).glob(f"*/{LIVE}"), key=lambda path: path.stat().st_mtime)
    told, losses = [], dict[str, float]()
    for path in places:
        lines, losses = _describe_run(path, _recovery_hint(project, path.parent.name, here, starts))
        told += lines
    table = Table("device", "connected", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("last loss", justify="right")
    for entry in registry.values():
        there = "?" if here is None else "yes" if entry.name in here else "no"
        there = "revoked" if entry.revoked else there
        loss = f"{losses[entry.name]:.4f}" if entry.name in losses else "-"
        table.add_row(escape(entry.name), there, loss)
    Console().print(table)
    for line in told:
        print(line)


def _recovery_hint(
    project: Project, run: str, here: set[str] | None, starts: Mapping[str, RunState]
) -> str | None:
    """What to do about a run that ended before it could say so itself, as when its server was killed."""
    state = starts.get(run)
    if here is None or (state is not None and not state.finished):
        return None
    why = state.details if state is not None else "the server was started anew"
    return f"it has ended ({why}); go on with `{resume_command(project, run)}`"


def _describe_run(path: Path, end: str | None) -> tuple[list[str], dict[str, float]]:
    """How a run stands, in lines, and the last loss of every device that told one; a file that others have changed is named.

    `end` is for a run that ended before it could say so itself.
    """
    live, rows = read_json(path, dict), read_rows(path.parent / ROWS)
    try:
        losses = {name: float(loss) for row in rows for name, loss in row["losses"].items()}
        ago = f"{time.time() - live['updated']:.0f} s ago"
        lines = [
            f"run {path.parent.name}: {format_live(live)}, {ago}; {format_bytes(live.get('bytes', 0))} sent"
        ]
        lines += [f"  {format_round(rows[-1])}" if rows else "  no round yet"]
        why = {"done": None, "failed": live.get("reason")}.get(live["state"], end)
        return [*lines, *([f"  {why}"] if why else [])], losses
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"status: {path} or {ROWS} beside it does not hold what glocal writes there ({describe_error(error)}); restore them"
        ) from error


def predict(folder: Path, source: str, name: str | None, out: Path | None) -> None:
    """Classes by the device's own model."""
    member = RunClient.from_folder(folder)
    files = sorted((folder / STATE).glob("*.safetensors"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise InputError(f"predict: {folder} has taken part in no run yet; wait for a round")
    inputs, labels = read_inputs(source, like=member.data().train.examples.x[:1])
    classes = predict_classes(member, name or files[-1].stem, inputs)
    if out is not None:
        with (
            atomic_write(out) as half,
            half.open("wb") as file,
        ):  # a file, for to a name numpy adds an ending
            np.save(file, np.array(classes))
        print(f"written: {out}")
    else:
        print(" ".join(map(str, classes)))
    if labels is not None:
        print(f"right: {format_percent(float((torch.tensor(classes) == labels).double().mean()))}")


def demo(folder: Path, *, rounds: int) -> None:
    """A server and four devices on this machine, for real: TLS, keys, digits, a report."""
    began = time.monotonic()
    create_deployment(
        folder, DeploymentSpec(clients=4, port=free_port(), rounds=rounds, share_metrics=True)
    )
    project = Project.from_folder(folder)
    log_line(f"certificates, keys, model and data of four devices: {folder}")
    stop = threading.Event()
    with _stop_all_on_exit(stop) as ending:
        _run_in_background(ending, server_program(folder), "server", stop)
        while not _server_is_up(folder):
            if stop.wait(0.2) or time.monotonic() - began > _STARTUP_TIMEOUT:
                raise InputError(
                    f"demo: the server did not start within {_STARTUP_TIMEOUT:.0f} s; see {folder}/logs/server.log"
                )
        for entry in read_registry(folder).values():
            _run_in_background(
                ending, client_program([folder / CLIENTS_FOLDER / entry.name]), entry.name, stop
            )
        follow(project, "demo", notify_as("run"))
    show_result(folder / RUNS / "demo")
    print(
        f"{time.monotonic() - began:.0f} s in all; look into {folder}/devices/device-0/journal.jsonl for what its owner sees"
    )


def _server_is_up(folder: Path) -> bool:
    """Whether the server is up."""
    with suppress(InputError), connect_server(folder) as link:
        link.nodes()
        return True
    return False


@contextmanager
def _stop_all_on_exit(stop: threading.Event) -> Iterator[ExitStack]:
    """Programs beside this one, which are told to stop first and waited for then."""
    ending = ExitStack()
    try:
        yield ending
    finally:
        with until_stopped(), ending:  # a second Ctrl-C must not leave programs behind
            stop.set()


def _run_in_background(
    ending: ExitStack, program: Program, who: str, stop: threading.Event
) -> None:
    """Keep a program running in a thread that is waited for at the end; all end if it refuses."""

    def keep() -> None:
        try:
            supervise(program, stop, notify_as(who))
        except InputError as error:
            notify_as(who)(str(error))
            stop.set()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    ending.callback(thread.join, 30.0)
