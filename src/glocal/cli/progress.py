"""Progress bars: one per experiment that trains, one per file that is downloaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from glocal.cli.tables import format_bytes
from glocal.studies import StudyEvent
from glocal.studies.metric_format import MetricFormat, new_test_of
from glocal.studies.study_parts import PartEvent


def experiment_bars() -> Progress:
    """A progress display with a bar per experiment."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def step_callback(bars: Progress, prefix: str = "") -> Callable[[StudyEvent], None]:
    """A bar per experiment, with its latest metrics."""
    tasks: dict[str, TaskID] = {}
    latest: dict[str, str] = {}

    def show(step: StudyEvent) -> None:
        task = tasks.setdefault(step.experiment, TaskID(-1))
        if task == -1:
            task = tasks[step.experiment] = bars.add_task(
                escape(prefix + step.experiment), total=step.rounds, now=""
            )
        if not step.records:
            bars.update(task, completed=step.rounds, now=_final_metrics(step))
            return
        record = step.records[0]
        if record.score is not None and record.criterion is not None:
            metric = MetricFormat.of(record.criterion)
            score = f"validation {metric.name} {metric.text(record.score, 2)}"
            latest[step.experiment] = f"{score}  "
        loss = "no clients" if record.loss is None else f"loss {record.loss:.3f}"
        sent = format_bytes(record.ledger.total.bytes)
        now = f"{loss}  {latest.get(step.experiment, '')}{sent}"
        bars.update(task, completed=record.done, now=now)

    return show


def part_step_callback(bars: Progress) -> Callable[[PartEvent], None]:
    """One bar for the experiment that runs, of any part; a finished experiment becomes a line."""
    shown: dict[str, Callable[[StudyEvent], None]] = {}

    def show(step: PartEvent) -> None:
        words = f"{step.part} ({step.position} of {step.of})  "
        shown.setdefault(step.part, step_callback(bars, words))(step.step)
        if not step.step.records:
            shown.clear()
            for task in bars.task_ids:
                bars.remove_task(task)
            bars.console.print(
                f"{words}{step.step.experiment}: {_final_metrics(step.step)}",
                highlight=False,
                markup=False,
            )

    return show


def _final_metrics(step: StudyEvent) -> str:
    first = step.results[0]
    metric = MetricFormat.of_result(first)
    local, new = first["local_test"]["mean"], new_test_of(first)
    tests = f"Local Test {metric.text(local, 2)}  New Test {metric.text(new, 2)}"
    return f"{metric.name}: {tests}"


@contextmanager
def download_bars() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for every file that is being downloaded; nothing is shown without one."""
    tasks: dict[str, TaskID] = {}
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        console=Console(stderr=True),
        transient=True,
    )

    def report(name: str, done: int, total: int) -> None:
        if done < total and not bars.live.is_started:
            bars.start()
        if name not in tasks:
            tasks[name] = bars.add_task(escape(name), total=total)
        bars.update(tasks[name], completed=done)
        if done >= total and all(task.finished for task in bars.tasks):
            stop()

    def stop() -> None:
        if bars.live.is_started:  # else it would leave an empty line where there is no terminal
            bars.stop()

    try:
        yield report
    finally:
        stop()
