"""Run a function written for one device over many, on the engine that was asked for or the one that is fastest here."""

import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Generic, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from glocal.core.data import Examples
from glocal.core.errors import GlocalWarning, InputError, brief
from glocal.engines.engine import Choice, Engine, precision
from glocal.engines.forms import build
from glocal.engines.planning import Bench, below, chosen
from glocal.engines.tasks import Form, OneDevice, Outcome, Result, Task, nbytes, sent

_CHUNK_BYTES = 2**30
_CHUNK_SHARE = 0.25  # of a GPU's memory
_COPIES_WHILE_TRAINING = 6  # weights, slopes, momentum, and what a step makes new of each
_FAILURES = (RuntimeError, ValueError, UserWarning, NotImplementedError)
_LOG = logging.getLogger("glocal")


class OverDevices(Generic[Result]):
    """A one-device function, ready to run over many.

    `calls` is about how often; one that `descends` may be given faster steps. A `choice` that was
    made before is kept to; a new one is noted before the function runs for the first time.
    """

    def __init__(
        self,
        function: OneDevice[Result],
        *,
        engine: Engine | str = "auto",
        calls: int = 1,
        descends: bool = True,
        choice: Choice | None = None,
        note: Callable[[Choice], None] | None = None,
    ) -> None:
        self.function, self.calls, self.descends, self.choice = function, calls, descends, choice
        self.note = note
        self.engine = Engine(engine) if isinstance(engine, str) else engine
        self.form: Form[Result] | None = None
        self.ladder: list[Choice] = []

    def __call__(self, tasks: Sequence[Task], examples: Examples, round_index: int = 0) -> Outcome[Result]:
        """One result per task; where devices are batched, those of like length share a batch."""
        with precision(self.engine.precision, examples.y.device):
            if self.form is None:
                self._settle(tasks, examples, round_index)
            try:
                return self._run(tasks, examples, round_index)
            except InputError:
                raise
            except _FAILURES as error:
                return self._without(error, tasks, examples, round_index)

    def _without(self, error: Exception, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        """The first form further down that runs, with the same numbers and one visible line; a wrong model runs in none."""
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(f"engine: {len(tasks)} devices at once do not fit into memory; give a smaller chunk") from error
        failed, latest = self.told(), error
        while self.ladder:
            self._take(self.ladder[0], self.ladder[1:])
            try:
                outcome = self._run(tasks, examples, round_index)
            except _FAILURES as again:
                latest = again
                continue
            warnings.warn(f"engine: {failed} failed ({brief(error)}); now {self.told()}", GlocalWarning, stacklevel=3)
            return outcome
        raise latest

    def _settle(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> None:
        """Choose a form, or take the one that was chosen before; say which and why."""
        if self.choice is None:
            bench = Bench(self.function, self.engine, tasks, examples, round_index)
            ladder = chosen(bench, calls=self.calls, descends=self.descends)
            if self.note is not None:
                self.note(ladder[0])
        else:
            ladder = [self.choice, *below(self.choice)]
        self._take(ladder[0], ladder[1:])
        if self.descends:
            _LOG.info("engine: %s", self.told())

    def _take(self, choice: Choice, ladder: Sequence[Choice]) -> None:
        self.close()
        self.choice, self.ladder = choice, list(ladder)
        self.form = build(self.function, choice, self.engine)

    def told(self) -> str:
        """What runs, in one line."""
        assert self.form is not None
        assert self.choice is not None
        return f"{self.form.about()}{f' ({self.choice.why})' if self.choice.why else ''}"

    def _run(self, tasks: Sequence[Task], examples: Examples, round_index: int) -> Outcome[Result]:
        assert self.form is not None
        assert self.choice is not None
        if self.choice.form not in ("vmapped", "graphed"):
            return self.form(tasks, examples, round_index)
        by_length = sorted(range(len(tasks)), key=lambda index: len(tasks[index].order))
        size = self.engine.chunk or _affordable(tasks[0], examples.y.device)
        chunks = _chunks(by_length, [len(task.order) for task in tasks], size)
        if len(chunks) == 1:
            return self.form(tasks, examples, round_index)
        whole: Result | None = None
        for chunk in chunks:  # one after the other to its place, so that no more than one chunk's results are there twice
            part = self.form([tasks[index] for index in chunk], examples, round_index).stacked()
            whole = _rows_for(len(tasks), part) if whole is None else whole
            _put(part, whole, sent(np.array(chunk), examples.y.device))
        return Outcome(stack=whole)

    def close(self) -> None:
        """Let go of workers and graphs."""
        if self.form is not None:
            self.form.close()
            self.form = None


def _rows_for(devices: int, part: Result) -> Result:
    """Where the results of so many devices go, to be filled, like those of some of them."""
    return cast(Result, tree_map(lambda tensor: tensor.new_empty(devices, *tensor.shape[1:]), part))


def _put(part: Result, whole: Result, places: Tensor) -> None:
    tree_map(lambda all_rows, rows: all_rows.index_copy_(0, places, rows), whole, part)


def _chunks(order: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """Devices in ascending length, at most `size` together, and none beside one more than twice as long: it would wait for it."""
    chunks: list[list[int]] = []
    for index in order:
        if not chunks or len(chunks[-1]) == size or lengths[index] > 2 * lengths[chunks[-1][0]]:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _affordable(task: Task, device: torch.device) -> int:
    """How many devices fit into the memory that a chunk may take."""
    memory = _CHUNK_BYTES
    if device.type == "cuda":
        memory = int(_CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, memory // max(_COPIES_WHILE_TRAINING * nbytes(task), 1))
