"""Run a function of one client over many, on the chosen engine or on the fastest one here."""

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
_COPIES_WHILE_TRAINING = 6  # weights, grads, momentum, and the new values of each in a step
_FAILURES = (RuntimeError, ValueError, UserWarning, NotImplementedError)
_LOG = logging.getLogger("glocal")


class Executor(Generic[ResultT]):
    """A function of one client, ready to run over many.

    `num_calls` is about how often it is called. With `trains`, the executor may use faster steps
    of local training. An `execution_plan` from an earlier run is reused; a new plan is handed to
    `on_plan` before the function runs for the first time.
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
        self.function = function
        self.num_calls = num_calls
        self.trains = trains
        self.execution_plan = execution_plan
        self.on_plan = on_plan
        self.config = EngineConfig(engine) if isinstance(engine, str) else engine
        self.engine: Engine[ResultT] | None = None
        self.fallbacks: list[ExecutionPlan] = []

    def __call__(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int = 0
    ) -> ClientResults[ResultT]:
        """One result per task; where clients are batched, those of similar length share a batch."""
        with precision(self.config.precision, examples.device):
            if self.engine is None:
                self._plan(tasks, examples, round_index)
            try:
                return self._run(tasks, examples, round_index)
            except InputError:
                raise
            except _FAILURES as error:
                return self._run_fallback(error, tasks, examples, round_index)

    def describe(self) -> str:
        """The engine that runs and the reason for it, in one line."""
        assert self.engine is not None
        assert self.execution_plan is not None
        description, reason = self.engine.describe(), self.execution_plan.reason
        return f"{description} ({reason})" if reason else description

    def close(self) -> None:
        """Release workers and graphs."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _plan(self, tasks: Sequence[ClientTask], examples: Examples, round_index: int) -> None:
        """Choose a plan, or reuse the one from before; log it and its reason."""
        if self.execution_plan is None:
            setup = ProbeSetup(self.function, self.config, tasks, examples, round_index)
            plans = plan_execution(setup, num_calls=self.num_calls, trains=self.trains)
            if self.on_plan is not None:
                self.on_plan(plans[0])
        else:
            plans = [self.execution_plan, *fallbacks_for(self.execution_plan)]
        self._switch_to(plans[0], fallbacks=plans[1:])
        if self.trains:
            _LOG.info("engine: %s", self.describe())

    def _switch_to(self, execution_plan: ExecutionPlan, *, fallbacks: list[ExecutionPlan]) -> None:
        self.close()
        self.execution_plan = execution_plan
        self.fallbacks = fallbacks
        self.engine = build_engine(self.function, execution_plan, self.config)

    def _run_fallback(
        self, error: Exception, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        """The result of the first fallback that runs, with one visible warning.

        The numbers are the same on every engine. A model that is wrong runs on none of them: the
        last error is then raised.
        """
        if isinstance(error, torch.OutOfMemoryError):
            raise InputError(
                f"engine: {len(tasks)} clients at once do not fit into memory; "
                "use a smaller chunk_size"
            ) from error
        failed, last_error = self.describe(), error
        while self.fallbacks:
            self._switch_to(self.fallbacks[0], fallbacks=self.fallbacks[1:])
            try:
                results = self._run(tasks, examples, round_index)
            except _FAILURES as next_error:
                last_error = next_error
                continue
            message = f"engine: {failed} failed ({describe_error(error)}); now {self.describe()}"
            warnings.warn(message, GlocalWarning, stacklevel=3)
            return results
        raise last_error

    def _run(
        self, tasks: Sequence[ClientTask], examples: Examples, round_index: int
    ) -> ClientResults[ResultT]:
        assert self.engine is not None
        assert self.execution_plan is not None
        if self.execution_plan.engine in ("vmapped", "graphed"):
            size = self.config.chunk_size or _max_chunk(tasks[0], examples.device)
            chunks = _chunks([task.num_steps for task in tasks], size)
            if len(chunks) > 1:
                return _run_chunks(self.engine, chunks, tasks, examples, round_index)
        return self.engine(tasks, examples, round_index)


def _run_chunks(
    engine: Engine[ResultT],
    chunks: Sequence[Sequence[int]],
    tasks: Sequence[ClientTask],
    examples: Examples,
    round_index: int,
) -> ClientResults[ResultT]:
    """The results of all chunks as one stack, in the order of the tasks.

    Each chunk is written to its rows before the next one runs, so that the results of at most one
    chunk are in memory twice.
    """
    whole: ResultT | None = None
    for chunk in chunks:
        part = engine([tasks[index] for index in chunk], examples, round_index).stacked()
        if whole is None:
            whole = _empty_like_rows(part, len(tasks))
        _write_rows(part, whole, to_device(np.array(chunk), examples.device))
    return ClientResults(stack=whole)


def _empty_like_rows(part: ResultT, clients: int) -> ResultT:
    """Uninitialised results of this many clients, like the results of some of them."""

    def empty(tensor: Tensor) -> Tensor:
        return tensor.new_empty(clients, *tensor.shape[1:])

    return cast(ResultT, tree_map(empty, part))


def _write_rows(part: ResultT, whole: ResultT, rows: Tensor) -> None:
    tree_map(lambda target, source: target.index_copy_(0, rows, source), whole, part)


def _chunks(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Indices of clients in ascending length, at most `size` in one chunk.

    No client shares a chunk with one more than twice as long: it would wait for it.

    >>> _chunks([4, 9, 3, 5], 2)
    [[2, 0], [3, 1]]
    >>> _chunks([4, 9, 3, 5], 4)
    [[2, 0, 3], [1]]
    """
    chunks: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        is_full = not chunks or len(chunks[-1]) == size
        if is_full or lengths[index] > 2 * lengths[chunks[-1][0]]:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


def _max_chunk(task: ClientTask, device: torch.device) -> int:
    """How many clients fit into the memory that a chunk may take."""
    memory = _CHUNK_BYTES
    if device.type == "cuda":
        memory = int(_CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory)
    return max(1, memory // max(_COPIES_WHILE_TRAINING * tree_bytes(task), 1))
