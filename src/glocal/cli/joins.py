"""A new device as a user sees it: what each way brings, as it is measured, then a page."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from glocal.cli.progress import downloads
from glocal.cli.tables import percent, readable
from glocal.errors import InputError
from glocal.fitting import classes_of
from glocal.joining import Welcome
from glocal.keep import Json
from glocal.report import write_join_report
from glocal.studies.joins import Joining, Trial
from glocal.studies.newcomer import read_newcomer
from glocal.studies.run import slug
from glocal.studies.saved import open_case

Wanted = tuple[str | None, int | None, str]


def join_device(folder: Path, source: str, wanted: Wanted, *, labels: str, welcome: Welcome, as_many_guests: bool) -> None:
    """Try every way, print a table, keep it in the run's folder under joined/NAME."""
    case, seed, name = wanted
    out = folder / "joined" / slug(name)
    if (out / "join.json").exists():
        raise InputError(f"join: '{name}' has joined this run already, see {out}; give another --name")
    numbers = read_labels(labels)
    with downloads() as report:
        saved = open_case(folder, case, seed=seed, report=report)
    plan, example = saved.host.plan, saved.federation.train.examples.x[:1].cpu()
    guests = min(plan.cohort, saved.host.devices) if as_many_guests else welcome.guests
    if guests > saved.host.devices:
        raise InputError(f"join: {guests} guests were asked for, but there are {saved.host.devices} devices; ask for fewer")
    newcomer = read_newcomer(source, like=example, classes=classes_of(saved.host.model, saved.federation), seed=plan.seed)
    trial = Trial(saved, newcomer, Joining(numbers, welcome=replace(welcome, guests=guests)))
    rows = _watched(trial)
    trial.keep(out, rows, {"name": name, "run": folder.name, "case": saved.case, "seed": plan.seed, "data": source})
    _print(rows)
    print(f"report: {write_join_report(out)}")


def read_labels(text: str) -> tuple[int | None, ...]:
    """Numbers of labels; None is all.

    >>> read_labels("0, 5, all")
    (0, 5, None)
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word == "all" or word.isdecimal() for word in words):
        raise InputError(f"join: labels is '{text}'; numbers and 'all' were expected, such as 0,1,5,10,50,all")
    return tuple(None if word == "all" else int(word) for word in words)


def _watched(trial: Trial) -> list[Json]:
    """All rows; the latest is shown while the next is measured."""
    rows: list[Json] = []
    console = Console(stderr=True)
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
