"""A new client in the terminal: the figure of every method as it is measured, then a page."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.progress import download_bars
from glocal.cli.tables import format_bytes
from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder
from glocal.personalize.onboarding import JoinPlan, require_joinable
from glocal.report import write_join_report
from glocal.report.join_page import metric_of, read_join
from glocal.studies.join_trial import JoinTrial, JoinTrialSettings
from glocal.studies.metric_format import MetricFormat
from glocal.studies.new_client import read_new_client
from glocal.studies.run import slug
from glocal.studies.saved_experiment import open_experiment


@dataclass(frozen=True)
class JoinTarget:
    """The federation of a run to join, the new client's name, and the output folder."""

    folder: Path
    experiment: str | None
    seed: int | None
    name: str
    out: Path | None

    def output_folder(self) -> Path:
        """The folder to write; a name joins a run once."""
        folder = self.out or self.folder / "joined" / slug(self.name)
        if (folder / "join.json").exists():
            raise InputError(
                f"join: {folder} holds a client that has joined already; "
                "give another --name or --out"
            )
        return folder


def join_client(
    target: JoinTarget,
    source: str,
    *,
    labels: str,
    join_plan: JoinPlan,
    existing_clients: int | None,
) -> None:
    """Try every method, print a table, and save the results in a folder of their own."""
    output_folder, label_counts = target.output_folder(), parse_label_counts(labels)
    with download_bars() as report:
        saved = open_experiment(target.folder, target.experiment, seed=target.seed, report=report)
    federation, plan = saved.trained_federation, saved.trained_federation.plan
    if existing_clients is None:
        existing_clients = min(plan.clients_per_round, federation.clients)
    join_plan = replace(join_plan, existing_clients=existing_clients)
    if join_plan.rounds:
        require_joinable(federation.algorithm, [federation.state], join_plan, federation.clients)
    like = saved.federation.train.examples.take(np.zeros(1, dtype=np.int64))
    new_client = read_new_client(source, task=federation.task, like=like, seed=plan.seed)
    trial = JoinTrial(saved, new_client, JoinTrialSettings(label_counts, join_plan=join_plan))
    with reserve_folder(output_folder, "join"):
        rows = _measure(trial)
        about = {
            "name": target.name,
            "run": target.folder.name,
            "experiment": saved.experiment,
            "seed": plan.seed,
            "data": source,
        }
        trial.save(output_folder, rows, about)
    show_join(output_folder)


def show_join(folder: Path) -> None:
    """Print the results of a new client, and write its page."""
    trial = read_join(folder / "join.json")
    _print(trial["rows"], metric_of(trial))
    print(f"report: {write_join_report(folder)}")


@contextmanager
def reserve_folder(folder: Path, command: str) -> Iterator[None]:
    """Create a writable folder before anything is computed; it is removed if it stays empty."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{command}: {folder} cannot be written ({error.strerror}); choose another --out"
        ) from error
    try:
        with lock_folder(folder):
            yield
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


def parse_label_counts(text: str) -> tuple[int | None, ...]:
    """Numbers of labels; None is all.

    >>> parse_label_counts("0, 5, all")
    (0, 5, None)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word == "all" or (word.isascii() and word.isdecimal()) for word in words):
        raise InputError(
            f"join: labels is '{text}'; numbers and 'all' were expected, such as 0,1,5,10,50,all"
        )
    return tuple(None if word == "all" else int(word) for word in words)


def _measure(trial: JoinTrial) -> list[Json]:
    """All rows; the status line shows the latest while the next is measured."""
    rows: list[Json] = []
    metric = MetricFormat.of(trial.trained_federation.task.metric)
    console = Console(stderr=True)
    for labels in trial.missing_label_counts():
        console.print(
            f"skipped: {labels} labelled examples; "
            f"the client has {trial.train.num_rows} for training",
            highlight=False,
        )
    with console.status("the ensemble") as status:
        for row in trial.rows():
            rows.append(row)
            figure = f"{metric.name} {metric.text(row['figure'], 2)}"
            status.update(f"{row['method']} with {row['labels']} labels: {figure}")
    return rows


def _print(rows: list[Json], metric: MetricFormat) -> None:
    table = Table("method", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("labels", metric.name, "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["method"]),
            str(row["labels"]),
            metric.text(row["figure"], 2),
            format_bytes(row["bytes"]),
        )
    Console().print(table)
