"""What the commands of a deployment do, and what they print."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from shlex import quote

import numpy as np
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
from glocal.cli.tables import format_bytes
from glocal.core.data import Examples
from glocal.core.errors import InputError, describe_error
from glocal.core.files import atomic_write, read_json, read_rows
from glocal.deploy.certificates import make_server_certificate
from glocal.deploy.client import JOURNAL, STATE, RunClient
from glocal.deploy.flower.server_internals import RunState
from glocal.deploy.formatting import format_live, format_round
from glocal.deploy.preflight import free_port
from glocal.deploy.project import Project
from glocal.deploy.registry import REGISTRY, RegistryEntry, read_registry, revoke
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
from glocal.deploy.server_files import LIVE, RESULT, ROWS, RUNS, rounds_done
from glocal.deploy.supervision import Program, supervise
from glocal.report import write_deploy_report
from glocal.studies.metric_format import MetricFormat
from glocal.studies.new_client import read_inputs

_STARTUP_TIMEOUT = 60.0  # seconds that the demo's server may take to start


def init(folder: Path, spec: DeploymentSpec) -> None:
    """Write a new deployment's folder."""
    project = create_deployment(folder, spec)
    print(f"written: {folder}")
    print("  federation.py, study.toml   your model, your data and the study: edit them;")
    print("                              `glocal run study.toml` simulates it")
    print("  deploy.toml                 the server's address, time limits, privacy")
    print(f"  {CERTIFICATES}/               keep ca.key safe: it signs server certificates")
    print(f"  {CLIENTS_FOLDER}/NAME/               a folder for each client, with its secret key")
    own, server = quote(str(folder)), project.deployment.server
    if server.bind == "0.0.0.0":
        print(
            f"the server will listen on all of this machine's addresses, port {server.port}; "
            "only registered clients may connect"
        )
    print(f"next: glocal deploy server {own}")
    print("then on each client: glocal deploy client FOLDER")
    print(f"then: glocal deploy run {own}")
    project.setup  # noqa: B018 (refuses an unusable model or study)


def add(folder: Path, name: str | None, *, share_metrics: bool) -> None:
    """Add a client."""
    project = Project.from_folder(folder)
    algorithm = project.setup.algorithm
    if not algorithm.takes_new_clients:
        raise InputError(
            f"deploy: {algorithm.name} is made for a fixed number of clients, "
            "and cannot take one more"
        )
    own = add_client(folder, name, share_metrics=share_metrics)
    print(f"written: {own}; copy it to the client's machine, and start the client there with")
    print(
        "`glocal deploy client FOLDER`. A running server accepts it within seconds. It takes part"
    )
    print(f"in the next round, or adapts now with: glocal deploy join {quote(str(folder))}")


def renew_certificate(folder: Path) -> None:
    """Make a new certificate for the server."""
    host = Project.from_folder(folder).deployment.server.host
    until = make_server_certificate(folder / CERTIFICATES, [host])
    print(f"renewed until {until:%Y-%m-%d}; restart `glocal deploy server {quote(str(folder))}`")


def revoke_client(folder: Path, name: str) -> None:
    """Revoke a client."""
    entry = revoke(folder, name)
    print(f"{entry.name} is refused from its next request on; it stays in {folder / REGISTRY}")


def run(folder: Path, name: str) -> None:
    """Start a run and follow it."""
    project = Project.from_folder(folder)
    require_new_run(project, name)
    _follow_and_show(project, name)


def resume(folder: Path, name: str) -> None:
    """Continue a run from its last round."""
    project = Project.from_folder(folder)
    require_unfinished(project, name)
    _follow_and_show(project, name)


def join(folder: Path, name: str) -> None:
    """Let new clients adapt their private part to a trained run, and all clients evaluate."""
    project = Project.from_folder(folder)
    if not rounds_done(project.folder, name):
        start = f"glocal deploy run {quote(str(folder))}"
        raise InputError(
            f"join: there is no run '{name}' in {folder} with a completed round; "
            f"train one with `{start}`"
        )
    _follow_and_show(project, name, skip_training=True)


def _follow_and_show(project: Project, name: str, *, skip_training: bool = False) -> None:
    try:
        follow(project, name, log_line, skip_training=skip_training)
    except KeyboardInterrupt:
        log_line("no longer following; the run continues. See `glocal deploy status`")
        raise
    show_result(project.folder / RUNS / name)


def show_result(folder: Path) -> None:
    """Print the table of clients and write the report of a run's folder."""
    result = read_json(folder / RESULT, dict)
    table = Table("client", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    metric = MetricFormat.of_result(result)
    for heading in ("rounds", "last round", f"Local Test, {metric.name}", "test examples"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["clients"]:
        last = "-" if row["last_round"] is None else str(row["last_round"] + 1)
        late = " (joined later)" if row["new_client"] else ""
        table.add_row(
            escape(row["name"] + late),
            str(row["rounds"]),
            last,
            metric.text(row["test"], 2),
            str(row["test_size"] or "-"),
        )
    Console().print(table)
    if result["privacy"]:
        privacy = result["privacy"]
        print(
            f"privacy: epsilon {privacy['epsilon']:.2f} at delta {privacy['delta']:g} "
            f"after {privacy['rounds']} rounds (clip norm {privacy['clip_norm']:g}, "
            f"noise multiplier {privacy['noise_multiplier']:g})"
        )
    print(f"sent: {format_bytes(result['ledger']['total']['bytes'])}, the shared part only")
    print(f"report: {write_deploy_report(folder)}")


def status(folder: Path) -> None:
    """Print the connected clients and the state of every run."""
    project, registry = Project.from_folder(folder), read_registry(folder)
    connected, run_states = None, dict[str, RunState]()
    with suppress(InputError), connect_server(folder) as control:
        connected, run_states = connected_clients(folder, control), control.latest_run_states()
    state = "does not answer" if connected is None else "up"
    print(f"server: {state}; clients connect to {server_address(project)}")
    lines, losses = list[str](), dict[str, float]()
    for path in sorted((folder / RUNS).glob(f"*/{LIVE}"), key=_modified):
        run = path.parent.name
        hint = None if connected is None else _recovery_hint(project, run, run_states.get(run))
        run_lines, losses = _describe_run(path, hint)
        lines += run_lines
    table = Table("client", "connected", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("last loss", justify="right")
    for entry in registry.values():
        loss = f"{losses[entry.name]:.4f}" if entry.name in losses else "-"
        table.add_row(escape(entry.name), _connection_state(entry, connected), loss)
    Console().print(table)
    for line in lines:
        print(line)


def _modified(path: Path) -> float:
    return path.stat().st_mtime


def _connection_state(entry: RegistryEntry, connected: set[str] | None) -> str:
    if entry.revoked:
        return "revoked"
    if connected is None:
        return "?"
    return "yes" if entry.name in connected else "no"


def _recovery_hint(project: Project, run: str, state: RunState | None) -> str | None:
    """What to do about a run that ended before it could record it, as with a killed server."""
    if state is not None and not state.finished:
        return None
    reason = state.details if state is not None else "the server was restarted"
    return f"it has ended ({reason}); continue with `{resume_command(project, run)}`"


def _describe_run(path: Path, hint: str | None) -> tuple[list[str], dict[str, float]]:
    """Lines about a run, and the last loss of every client that shares it.

    `hint` is for a run that ended before it could record it. A damaged file is refused by name.
    """
    live, rows = read_json(path, dict), read_rows(path.parent / ROWS)
    try:
        losses = dict[str, float]()
        for row in rows:
            for name, loss in row["losses"].items():
                losses[name] = float(loss)
        age = f"{time.time() - live['updated']:.0f} s ago"
        sent = format_bytes(live.get("bytes", 0))
        lines = [f"run {path.parent.name}: {format_live(live)}, {age}; {sent} sent"]
        lines.append(f"  {format_round(rows[-1])}" if rows else "  no round yet")
        reason = {"done": None, "failed": live.get("reason")}.get(live["state"], hint)
        if reason:
            lines.append(f"  {reason}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"status: {path} or {ROWS} beside it is not as glocal writes it "
            f"({describe_error(error)}); restore them"
        ) from error
    return lines, losses


def predict(folder: Path, source: str, name: str | None, out: Path | None) -> None:
    """Predict with the client's own model; with labels, its metrics are printed too."""
    client = RunClient.from_folder(folder)
    files = sorted((folder / STATE).glob("*.safetensors"), key=_modified)
    if not files:
        raise InputError(f"predict: {folder} has taken part in no run yet; wait for a round")
    inputs, labels = read_inputs(source, like=client.data().train.examples.x[:1])
    run_name = name or files[-1].stem
    predicted = client.predict(run_name, inputs).numpy()
    if out is None:
        for line in predicted.reshape(1, -1) if predicted.ndim == 1 else predicted:
            print(" ".join(map(str, line.tolist())))
    else:
        # an open file, as numpy adds an ending to a name
        with atomic_write(out) as half, half.open("wb") as file:
            np.save(file, predicted)
        print(f"written: {out}")
    if labels is not None:
        figures = client.measure(run_name, Examples(inputs, labels))
        for metric in map(MetricFormat.of, client.setup.task.all_metrics):
            print(f"{metric.name}: {metric.text(figures[metric.name], 2)}")


def demo(folder: Path, *, rounds: int) -> None:
    """Run a server and four clients on this machine: TLS, keys, digits, a report."""
    start = time.monotonic()
    spec = DeploymentSpec(clients=4, port=free_port(), rounds=rounds, share_metrics=True)
    project = create_deployment(folder, spec)
    log_line(f"certificates, keys, model and data of four clients: {folder}")
    stop = threading.Event()
    with _stop_all_on_exit(stop) as ending:
        _run_in_background(ending, server_program(folder), "server", stop)
        while not _server_is_up(folder):
            if stop.wait(0.2) or time.monotonic() - start > _STARTUP_TIMEOUT:
                raise InputError(
                    f"demo: the server did not start within {_STARTUP_TIMEOUT:.0f} s; "
                    f"see {folder}/logs/server.log"
                )
        for entry in read_registry(folder).values():
            program = client_program([folder / CLIENTS_FOLDER / entry.name])
            _run_in_background(ending, program, entry.name, stop)
        follow(project, "demo", notify_as("run"))
    show_result(folder / RUNS / "demo")
    seconds = time.monotonic() - start
    journal = folder / CLIENTS_FOLDER / "client-0" / JOURNAL
    print(f"{seconds:.0f} s in all; {journal} is what the owner of client-0 sees")


def _server_is_up(folder: Path) -> bool:
    with suppress(InputError), connect_server(folder) as control:
        control.nodes()
        return True
    return False


@contextmanager
def _stop_all_on_exit(stop: threading.Event) -> Iterator[ExitStack]:
    """Background programs: all are asked to stop first, then each is waited for."""
    ending = ExitStack()
    try:
        yield ending
    finally:
        with until_stopped(), ending:  # a second Ctrl-C must not leave programs behind
            stop.set()


def _run_in_background(
    ending: ExitStack, program: Program, name: str, stop: threading.Event
) -> None:
    """Keep a program running in a thread; all programs stop if it refuses its input."""

    def run_program() -> None:
        try:
            supervise(program, stop, notify_as(name))
        except InputError as error:
            notify_as(name)(str(error))
            stop.set()

    thread = threading.Thread(target=run_program, daemon=True)
    thread.start()
    ending.callback(thread.join, 30.0)
