"""A new device as a user sees it: what each way brings, as it is measured, then a page."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.progress import downloads
from glocal.cli.tables import percent, readable
from glocal.core.errors import InputError
from glocal.core.files import Json, alone, read_json
from glocal.federate.fitting import classes_of
from glocal.personalize.onboarding import Welcome, require_room
from glocal.report import write_join_report
from glocal.studies.joins import Joining, Trial
from glocal.studies.newcomer import read_newcomer
from glocal.studies.run import slug
from glocal.studies.saved import open_case


@dataclass(frozen=True)
class Whom:
    """Which federation of a run is met, what the newcomer is called, and where it is kept."""

    folder: Path
    case: str | None
    seed: int | None
    name: str
    out: Path | None

    def place(self) -> Path:
        """The folder that is written into; a name joins a run once."""
        place = self.out or self.folder / "joined" / slug(self.name)
        if (place / "join.json").exists():
            raise InputError(f"join: {place} holds a device that has joined already; give another --name or --out")
        return place


def join_device(whom: Whom, source: str, *, labels: str, welcome: Welcome, guests: int | None) -> None:
    """Try every way, print a table, keep it in a folder of its own."""
    place, numbers = whom.place(), read_labels(labels)
    with downloads() as report:
        saved = open_case(whom.folder, whom.case, seed=whom.seed, report=report)
    plan, host, store = saved.host.plan, saved.host, saved.federation.train.examples
    how = replace(welcome, guests=min(plan.cohort, host.devices) if guests is None else guests)
    if welcome.rounds:
        require_room(host.algorithm, [host.state], how, host.devices)
    classes = classes_of(host.model, saved.federation)
    newcomer = read_newcomer(source, like=store.x[:1].cpu(), classes=classes, seed=plan.seed)
    trial = Trial(saved, newcomer, Joining(numbers, welcome=how))
    with reserved(place, "join"):
        rows = _watched(trial)
        about = {"name": whom.name, "run": whom.folder.name, "case": saved.case, "seed": plan.seed, "data": source}
        trial.keep(place, rows, about)
    show_join(place)


def show_join(place: Path) -> None:
    """Print what became of a newcomer, and write its page."""
    _print(read_json(place / "join.json", dict)["rows"])
    print(f"report: {write_join_report(place)}")


@contextmanager
def reserved(place: Path, command: str) -> Iterator[None]:
    """A folder that can be written to, before anything is computed; it goes again if nothing comes of it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{command}: {place} cannot be written to ({error.strerror}); choose another place with --out") from error
    try:
        with alone(place):
            yield
    finally:
        with suppress(OSError):  # not empty: it came to something
            place.rmdir()


def read_labels(text: str) -> tuple[int | None, ...]:
    """Numbers of labels; None is all.

    >>> read_labels("0, 5, all")
    (0, 5, None)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word == "all" or (word.isascii() and word.isdecimal()) for word in words):
        raise InputError(f"join: labels is '{text}'; numbers and 'all' were expected, such as 0,1,5,10,50,all")
    return tuple(None if word == "all" else int(word) for word in words)


def _watched(trial: Trial) -> list[Json]:
    """All rows; the latest is shown while the next is measured."""
    rows: list[Json] = []
    console = Console(stderr=True)
    for labels in trial.left_out():
        console.print(
            f"left out: {labels} labelled examples, for the device has {len(trial.train.y)} to learn from", highlight=False
        )
    with console.status("the ensemble") as status:
        for row in trial.rows():
            rows.append(row)
            status.update(f"{row['way']} with {row['labels']} labels: {percent(row['accuracy'])}")
    return rows


def _print(rows: list[Json]) -> None:
    table = Table("way", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("labels", "accuracy", "sent"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(escape(row["way"]), str(row["labels"]), percent(row["accuracy"]), readable(row["bytes"]))
    Console().print(table)
