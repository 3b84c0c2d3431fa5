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
from glocal.core.errors import GlocalWarning, InputError, describe_error
from glocal.engines.config import EngineConfig, ExecutionPlan, precision
from glocal.engines.factory import build_engine
from glocal.engines.planning import ProbeSetup, fallbacks_for, plan_execution
from glocal.engines.protocol import (
    ClientFunction,
    ClientResults,
    ClientTask,
    Engine,
    ResultT,
    to_device,
    tree_bytes,
)

_CHUNK_BYTES = 2**30
_CHUNK_SHARE = 0.25  # of a GPU's memory
_COPIES_WHILE_TRAINING = 6  # weights, slopes, momentum, and what a step makes new of each
_FAILURES = (RuntimeError, ValueError, UserWarning, NotImplementedError)
_LOG = logging.getLogger("glocal")


class Executor(Generic[ResultT]):
    """A one-device function, ready to run over many.

    `num_calls` is about how often; one that `trains` may be given faster steps. A `execution_plan` that was
    made before is kept to; a new one is noted before the function runs for the first time.
    """

    def __init__(
        self,
        function: ClientFunction[ResultT],
        *,
        engine: EngineConfig | str = "auto",
        num_calls: int = 1,
        trains: bool = True,
        execution_plan: ExecutionPlan | None = None,
        on_plan: Callable[[ExecutionPlan], None] | None = None,
    ) -> None:
        self.function, self.num_calls, self.trains, self.execution_plan = (
            function,
            num_calls,
            trains,
            execution_plan,
        )
        self.on_plan = on_plan
        self.config = EngineConfig(engine) if isinstance(engine, str) else engine
        self.engine: Engine[ResultT] | None = None
        self.fallbacks: list[ExecutionPlan] = []

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int = 0
    ) -> ClientResults[ResultT]:
        """One result per task; where devices are batched, those of like length share a batch."""
        with precision(self.config.precision, examples.y.device):
            if self.engine is None:
                self._plan(tasks, examples, round_index)
            try:
                return self._run(tasks, examples, round_index)
            except InputError:
                raise
            except _FAILURES as error:
                return self._run_fallback(error, tasks, examples, round_index)

    def _run_fallback(
        self, error: Exception, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """The first form further down that runs, with the same numbers and one visible line; a wrong model runs in none."""
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(
                f"engine: {len(tasks)} devices at once do not fit into memory; give a smaller chunk"
            ) from error
        failed, latest = self.describe(), error
        while self.fallbacks:
            self._switch_to(self.fallbacks[0], self.fallbacks[1:])
            try:
                outcome = self._run(tasks, examples, round_index)
            except _FAILURES as again:
                latest = again
                continue
            warnings.warn(
                f"engine: {failed} failed ({describe_error(error)}); now {self.describe()}",
                GlocalWarning,
                stacklevel=3,
            )
            return outcome
        raise latest

    def _plan(self, tasks: Sequence[ClientTask], examples: Examples, round_index: int) -> None:
        """Choose a form, or take the one that was chosen before; say which and why."""
        if self.execution_plan is None:
            bench = ProbeSetup(self.function, self.config, tasks, examples, round_index)
            fallbacks = plan_execution(bench, num_calls=self.num_calls, trains=self.trains)
            if self.on_plan is not None:
                self.on_plan(fallbacks[0])
        else:
            fallbacks = [self.execution_plan, *fallbacks_for(self.execution_plan)]
        self._switch_to(fallbacks[0], fallbacks[1:])
        if self.trains:
            _LOG.info("engine: %s", self.describe())

    def _switch_to(self, execution_plan: ExecutionPlan, fallbacks: Sequence[ExecutionPlan]) -> None:
        self.close()
        self.execution_plan, self.fallbacks = execution_plan, list(fallbacks)
        self.engine = build_engine(self.function, execution_plan, self.config)

    def describe(self) -> str:
        """What runs, in one line."""
        assert self.engine is not None
        assert self.execution_plan is not None
        return f"{self.engine.describe()}{f' ({self.execution_plan.reason})' if self.execution_plan.reason else ''}"

    def _run(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        assert self.engine is not None
        assert self.execution_plan is not None
        if self.execution_plan.engine not in ("vmapped", "graphed"):
            return self.engine(tasks, examples, round_index)
        by_length = sorted(range(len(tasks)), key=lambda index: len(tasks[index].order))
        size = self.config.chunk_size or _max_chunk(tasks[0], examples.y.device)
        chunks = _chunks(by_length, [len(task.order) for task in tasks], size)
        if len(chunks) == 1:
            return self.engine(tasks, examples, round_index)
        whole: ResultT | None = None
        for chunk in chunks:  # one after the other to its place, so that no more than one chunk's results are there twice
            part = self.engine([tasks[index] for index in chunk], examples, round_index).stacked()
            whole = _empty_like_rows(len(tasks), part) if whole is None else whole
            _write_rows(part, whole, to_device(np.array(chunk), examples.y.device))
        return ClientResults(stack=whole)

    def close(self) -> None:
        """Let go of workers and graphs."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


def _empty_like_rows(clients: int, part: ResultT) -> ResultT:
    """Where the results of so many devices go, to be filled, like those of some of them."""
    return cast(
        ResultT, tree_map(lambda tensor: tensor.new_empty(clients, *tensor.shape[1:]), part)
    )


def _write_rows(part: ResultT, whole: ResultT, places: Tensor) -> None:
    tree_map(lambda all_rows, rows: all_rows.index_copy_(0, places, rows), whole, part)


def _chunks(order: list[int], lengths: list[int], size: int) -> list[list[int]]:
    """Devices in ascending length, at most `size` together, and none beside one more than twice as long: it would wait for it."""
    chunks: list[list[int]] = []
    for index in order:
        if not chunks or len(chunks[-1]) == size or lengths[index] > 2 * lengths[chunks[-1][0]]:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _max_chunk(task: ClientTask, device: torch.device) -> int:
    """How many devices fit into the memory that a chunk may take."""
    memory = _CHUNK_BYTES
    if device.type == "cuda":
        memory = int(_CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, memory // max(_COPIES_WHILE_TRAINING * tree_bytes(task), 1))
