"""Callbacks: they see a run's rounds, evaluations and end, and may stop it.

A callback is any object with some of four methods. An error in one ends the run after its
checkpoint, with a message that names the callback.
"""

import sys
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from glocal.core.bounds import MAX_ROUNDS, count_field, require_counts
from glocal.core.checks import require_instance, require_number
from glocal.core.errors import InputError, describe_error, describe_value
from glocal.federate.records import RoundRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from glocal.federate.result import Result
    from glocal.federate.run import Run

METHODS = ("on_start", "on_round", "on_evaluation", "on_end")


class Callback(Protocol):
    """All methods; a callback needs at least one of them.

    One that changes numbers, by stopping the run, is a dataclass with `changes_numbers` = True: its
    settings are then part of what a resumed run must have.

    >>> class PrintLoss:
    ...     def on_round(self, run, records):
    ...         print(records[0].done, "of", records[0].rounds)
    >>> require_callbacks([PrintLoss()])  # `fit` takes it: callbacks=[PrintLoss()]
    """

    def on_start(self, run: "Run") -> None:
        """Before the first round, or the first after a resume."""

    def on_round(self, run: "Run", records: Sequence[RoundRecord]) -> None:
        """After every round, with a record for each seed and group; `run.stop(reason)` stops."""

    def on_evaluation(self, run: "Run", records: Sequence[RoundRecord]) -> None:
        """After a round in which clients were evaluated."""

    def on_end(self, run: "Run", result: "Result") -> None:
        """After the final tests."""


def require_callbacks(callbacks: Sequence[object]) -> None:
    """Refuse an object without any of the methods."""
    require_instance("callbacks: the argument", callbacks, list | tuple, "a list of callbacks")
    for callback in callbacks:
        has_method = any(callable(getattr(callback, name, None)) for name in METHODS)
        if not has_method or isinstance(callback, type):
            raise InputError(
                f"callbacks: {describe_value(callback)} was given; an object with one of "
                f"{', '.join(METHODS)} was expected"
            )


def notify(callbacks: Sequence[Any], method: str, *arguments: object) -> None:
    """Call a method of all callbacks that have it."""
    for callback in callbacks:
        function = getattr(callback, method, None)
        if function is None:
            continue
        with _named(callback, method):
            function(*arguments)


@contextmanager
def _named(callback: object, method: str) -> "Iterator[None]":
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        name = type(callback).__name__
        raise InputError(
            f"callbacks: {name}.{method} failed ({describe_error(error)}); "
            "the run is saved up to this round"
        ) from error


@dataclass(frozen=True)
class EarlyStopping:
    """Stop a run whose score on validation data has not improved for `patience` evaluations.

    The score is the metric that rounds are selected by, as the mean over seeds and groups.

    >>> EarlyStopping(patience=3)  # for fit(..., callbacks=[...])
    EarlyStopping(patience=3, min_improvement=0.0)
    """

    patience: int = count_field(5, maximum=MAX_ROUNDS)
    min_improvement: float = 0.0

    changes_numbers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_counts("early stopping: ", self)
        require_number(
            "early stopping: min_improvement",
            self.min_improvement,
            lambda least: least >= 0,
            "of at least 0",
        )

    def on_evaluation(self, run: "Run", records: Sequence[RoundRecord]) -> None:
        """Compare the last scores with the best one before them."""
        scores = run.scores
        if len(scores) <= self.patience:
            return
        sign = 1 if run.criterion.higher_is_better else -1
        signed = [sign * score for score in scores]
        before, recent = max(signed[: -self.patience]), max(signed[-self.patience :])
        if recent <= before + self.min_improvement:
            run.stop(f"no improvement in {self.patience} evaluations")


class ProgressBar:
    """A progress bar on a terminal; a plain line every half minute elsewhere."""

    def __init__(self) -> None:
        self.bar: Any = None
        self.task: Any = None
        self.last_line = 0.0

    def on_start(self, run: "Run") -> None:
        """Show the bar."""
        self.last_line = time.monotonic()
        if not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True)
        total = run.experiment.plan.rounds
        self.task = self.bar.add_task(run.experiment.algorithm.name, total=total)
        self.bar.update(self.task, completed=run.progress.done)
        self.bar.start()

    def on_round(self, run: "Run", records: Sequence[RoundRecord]) -> None:
        """Advance."""
        if self.bar is not None:
            self.bar.update(self.task, completed=records[0].done)
        elif time.monotonic() - self.last_line > 30:
            self.last_line = time.monotonic()
            last = records[0]
            loss = "" if last.loss is None else f", loss {last.loss:.4g}"
            print(f"round {last.done} of {last.rounds}{loss}", file=sys.stderr, flush=True)

    def on_end(self, run: "Run", result: "Result") -> None:
        """Remove the bar."""
        self.close()

    def close(self) -> None:
        """Remove the bar, also where the run was interrupted."""
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
