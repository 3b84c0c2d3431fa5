"""A new device as a user sees it: what each way brings, as it is measured, then a page."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.progress import download_bars
from glocal.cli.tables import format_bytes, format_percent
from glocal.core.errors import InputError
from glocal.core.files import Json, lock_folder
from glocal.federate.fitting import num_classes
from glocal.personalize.onboarding import JoinPlan, require_joinable
from glocal.report import write_join_report
from glocal.report.join_page import read_join
from glocal.studies.join_trial import JoinTrial, JoinTrialSettings
from glocal.studies.new_client import read_new_client
from glocal.studies.run import slug
from glocal.studies.saved_experiment import open_experiment


@dataclass(frozen=True)
class JoinTarget:
    """Which federation of a run is met, what the newcomer is called, and where it is kept."""

    folder: Path
    experiment: str | None
    seed: int | None
    name: str
    out: Path | None

    def output_folder(self) -> Path:
        """The folder that is written into; a name joins a run once."""
        place = self.out or self.folder / "joined" / slug(self.name)
        if (place / "join.json").exists():
            raise InputError(
                f"join: {place} holds a device that has joined already; give another --name or --out"
            )
        return place


def join_client(
    target: JoinTarget,
    source: str,
    *,
    labels: str,
    join_plan: JoinPlan,
    existing_clients: int | None,
) -> None:
    """Try every way, print a table, keep it in a folder of its own."""
    output_folder, numbers = target.output_folder(), parse_label_counts(labels)
    with download_bars() as report:
        saved = open_experiment(target.folder, target.experiment, seed=target.seed, report=report)
    plan, trained_federation, store = (
        saved.trained_federation.plan,
        saved.trained_federation,
        saved.federation.train.examples,
    )
    how = replace(
        join_plan,
        existing_clients=min(plan.clients_per_round, trained_federation.clients)
        if existing_clients is None
        else existing_clients,
    )
    if join_plan.rounds:
        require_joinable(
            trained_federation.algorithm,
            [trained_federation.state],
            how,
            trained_federation.clients,
        )
    classes = num_classes(trained_federation.model, saved.federation)
    new_client = read_new_client(source, like=store.x[:1].cpu(), classes=classes, seed=plan.seed)
    trial = JoinTrial(saved, new_client, JoinTrialSettings(numbers, join_plan=how))
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


def show_join(place: Path) -> None:
    """Print what became of a newcomer, and write its page."""
    _print(read_join(place / "join.json")["rows"])
    print(f"report: {write_join_report(place)}")


@contextmanager
def reserve_folder(place: Path, command: str) -> Iterator[None]:
    """A folder that can be written to, before anything is computed; it goes again if nothing comes of it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{command}: {place} cannot be written to ({error.strerror}); choose another place with --out"
        ) from error
    try:
        with lock_folder(place):
            yield
    finally:
        with suppress(OSError):  # not empty: it came to something
            place.rmdir()


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
    """All rows; the latest is shown while the next is measured."""
    rows: list[Json] = []
    console = Console(stderr=True)
    for labels in trial.missing_label_counts():
        console.print(
            f"left out: {labels} labelled examples, for the device has {len(trial.train.y)} to learn from",
            highlight=False,
        )
    with console.status("the ensemble") as status:
        for row in trial.rows():
            rows.append(row)
            status.update(
                f"{row['method']} with {row['labels']} labels: {format_percent(row['accuracy'])}"
            )
    return rows


def _print(rows: list[Json]) -> None:
    table = Table("method", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("labels", "accuracy", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            escape(row["method"]),
            str(row["labels"]),
            format_percent(row["accuracy"]),
            format_bytes(row["bytes"]),
        )
    Console().print(table)
