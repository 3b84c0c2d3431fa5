"""Bars: one for every case that trains, one for every file that is downloaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from glocal.cli.tables import percent, readable
from glocal.studies import Step
from glocal.studies.parts import PartStep


def case_bars() -> Progress:
    """Room for a bar per case."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def shown_on(bars: Progress, prefix: str = "") -> Callable[[Step], None]:
    """A bar per case, with the newest figures in it."""
    tasks: dict[str, TaskID] = {}
    latest: dict[str, float] = {}

    def show(step: Step) -> None:
        task = tasks.setdefault(step.case, TaskID(-1))
        if task == -1:
            task = tasks[step.case] = bars.add_task(escape(prefix + step.case), total=step.rounds, now="")
        if step.moment is None:
            bars.update(task, completed=step.rounds, now=_final(step))
            return
        row = step.moment.rows[0]
        if row["validation"] is not None:
            latest[step.case] = row["validation"]
        seen = f"validation {latest[step.case]:.1%}  " if step.case in latest else ""
        loss = "nobody there" if row["loss"] is None else f"loss {row['loss']:.3f}"
        bars.update(task, completed=step.moment.progress.done, now=f"{loss}  {seen}{readable(row['bytes'])}")

    return show


def parts_shown_on(bars: Progress) -> Callable[[PartStep], None]:
    """One bar for the case that runs, whatever part it is of; a finished case becomes a line."""
    shown: dict[str, Callable[[Step], None]] = {}

    def show(step: PartStep) -> None:
        words = f"{step.part} ({step.place} of {step.of})  "
        shown.setdefault(step.part, shown_on(bars, words))(step.step)
        if step.step.moment is None:
            shown.clear()
            for task in bars.task_ids:
                bars.remove_task(task)
            bars.console.print(f"{words}{step.step.case}: {_final(step.step)}", highlight=False, markup=False)

    return show


def _final(step: Step) -> str:
    first = step.results[0]
    new = first["new_test"]["logits"] if first["new_test"] else None
    return f"Local Test {percent(first['local_test']['mean'])}  New Test {percent(new)}"


@contextmanager
def downloads() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for every file that is being downloaded, shown only if there is one."""
    tasks: dict[str, TaskID] = {}
    bars = Progress(TextColumn("{task.description}"), BarColumn(), DownloadColumn(), console=Console(stderr=True), transient=True)

    def report(name: str, done: int, total: int) -> None:
        if done < total and not bars.live.is_started:
            bars.start()
        if name not in tasks:
            tasks[name] = bars.add_task(escape(name), total=total)
        bars.update(tasks[name], completed=done)
        if done >= total and all(task.finished for task in bars.tasks):
            stop()

    def stop() -> None:
        if bars.live.is_started:  # else it would leave an empty line where nobody watches
            bars.stop()

    try:
        yield report
    finally:
        stop()
