"""Which form to take: what was asked for, or what a few measured steps show to be fastest here."""

import hashlib
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from glocal.core.data import Examples
from glocal.core.errors import describe_error
from glocal.engines.config import (
    EngineConfig,
    ExecutionPlan,
    available_cores,
    cache_plan,
    load_cached_plan,
)
from glocal.engines.conv_matmul import ConvAsMatmul
from glocal.engines.factory import build_engine
from glocal.engines.fused.compiler import NoFusedStepError
from glocal.engines.protocol import ClientFunction, ClientTask

_MIN_STEPS_TO_MEASURE = 300  # steps, one after the other, in the whole run
_MIN_STEPS_TO_COMPILE = 20_000
_MIN_EXAMPLES_TO_MEASURE = 5_000  # examples
_PROBE_STEPS = 2  # steps
_PROBE_CLIENTS = 16  # devices, on a CPU
_LONG_SECONDS = 10  # seconds
_LOG = logging.getLogger("glocal")


class ProbeSetup(NamedTuple):
    """What is tried out: a function, on the first steps of the tasks at hand."""

    function: ClientFunction[Any]
    config: EngineConfig
    tasks: Sequence[ClientTask]
    examples: Examples
    round_index: int

    def probe_tasks(self) -> list[ClientTask]:
        """First steps of the tasks that go into one batched step; on a CPU of some tasks, for there each costs the same."""
        most = len(self.tasks) if self.examples.y.is_cuda else _PROBE_CLIENTS
        tasks = self.tasks[: min(most, self.config.chunk_size or most)]
        return [task._replace(order=task.order[:_PROBE_STEPS]) for task in tasks]

    def max_steps(self) -> int:
        """How many steps the longest task has."""
        return max(len(task.order) for task in self.tasks)

    def cache_key(self) -> str:
        """What the answer depends on, as one word."""
        first = self.tasks[0]
        shapes = [
            (name, tuple(tensor.shape)) for tree in first[:2] for name, tensor in tree.items()
        ]
        device = self.examples.y.device
        where = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"{available_cores()} cores, {self.config.num_workers} workers"
        )
        here = (
            torch.__version__,
            where,
            getattr(self.function, "__qualname__", type(self.function).__name__),
            self.config.precision,
        )
        at_once = len(self.tasks), self.config.chunk_size
        told = repr(
            (
                shapes,
                at_once,
                first.order.shape[1],
                self.max_steps(),
                tuple(self.examples.x.shape[1:]),
                here,
            )
        )
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def plan_execution(bench: ProbeSetup, *, num_calls: int, trains: bool) -> list[ExecutionPlan]:
    """The form to take, then those to fall back to."""
    name, on_gpu = bench.config.name, bench.examples.y.is_cuda
    fused = bench.config.fused and trains and bench.config.precision != "bf16"
    if name == "looped":
        return [ExecutionPlan("looped")]
    if name == "vmapped":
        return [ExecutionPlan("vmapped"), ExecutionPlan("looped")]
    if name == "graphed" or (name in ("auto", "workers") and on_gpu):
        worth = name == "graphed" or num_calls * bench.max_steps() >= _MIN_STEPS_TO_COMPILE
        return (
            _plan_gpu(bench, fused=fused, worth=worth)
            if trains
            else [ExecutionPlan("graphed"), ExecutionPlan("vmapped"), ExecutionPlan("looped")]
        )
    if name == "workers":
        return [*_plans_with_fused("workers", bench, fused=fused), ExecutionPlan("looped")]
    examples = sum(task.order.size for task in bench.tasks)
    return _plan_cpu(
        bench,
        fused=fused,
        worth=num_calls * bench.max_steps() >= _MIN_STEPS_TO_MEASURE
        if trains
        else examples >= _MIN_EXAMPLES_TO_MEASURE,
    )


def fallbacks_for(execution_plan: ExecutionPlan) -> list[ExecutionPlan]:
    """What to fall back to from a choice that was made before."""
    if execution_plan.engine == "workers":
        return [
            *([ExecutionPlan("workers")] if execution_plan.fused else []),
            ExecutionPlan("looped"),
        ]
    if execution_plan.engine == "graphed":
        plainer = (
            [replace(execution_plan, fused=False, compiled=False)]
            if execution_plan.fused or execution_plan.compiled
            else []
        )
        return [*plainer, ExecutionPlan("vmapped"), ExecutionPlan("looped")]
    return [ExecutionPlan("looped")] if execution_plan.engine == "vmapped" else []


def _plans_with_fused(engine: str, bench: ProbeSetup, *, fused: bool) -> list[ExecutionPlan]:
    """A form with fused steps if they know the model, then without."""
    if not fused:
        return [ExecutionPlan(engine)]
    reason = _failure_reason(ExecutionPlan(engine, fused=True), bench)
    if reason:
        return [ExecutionPlan(engine, reason=f"no fused steps: {reason}")]
    return [
        ExecutionPlan(engine, fused=True, reason="they know all its layers"),
        ExecutionPlan(engine),
    ]


def _failure_reason(execution_plan: ExecutionPlan, bench: ProbeSetup) -> str:
    """Why a form does not run here; nothing if it does."""
    engine = build_engine(bench.function, execution_plan, bench.config)
    try:
        engine(
            [task._replace(order=task.order[:1]) for task in bench.tasks[:1]],
            bench.examples,
            bench.round_index,
        )
    except (NotImplementedError, NoFusedStepError) as error:
        return str(error)
    except (RuntimeError, ValueError, ImportError) as error:
        return describe_error(error)
    finally:
        engine.close()
    return ""


def _plan_cpu(bench: ProbeSetup, *, fused: bool, worth: bool) -> list[ExecutionPlan]:
    known = _plans_with_fused("workers", bench, fused=fused)
    if known[0].fused:
        return [*known, ExecutionPlan("looped")]
    if not worth:
        return [
            ExecutionPlan("vmapped", reason="too short a run to measure"),
            ExecutionPlan("looped"),
        ]
    best = load_cached_plan(bench.cache_key()) or _fastest(
        bench, [known[0], ExecutionPlan("vmapped"), ExecutionPlan("looped")]
    )
    cache_plan(bench.cache_key(), best)
    return [best, *([] if best.engine == "looped" else [ExecutionPlan("looped")])]


def _plan_gpu(bench: ProbeSetup, *, fused: bool, worth: bool) -> list[ExecutionPlan]:
    rest = [ExecutionPlan("vmapped"), ExecutionPlan("looped")]
    known = _plans_with_fused("graphed", bench, fused=fused and bench.examples.y.is_cuda)
    if known[0].fused:
        return [*known, *rest]
    plain = known[0]
    if bench.examples.y.is_cuda and _has_convolutions(bench):
        cache_key = bench.cache_key()
        plain = load_cached_plan(cache_key) or _fastest(
            bench, [plain, replace(plain, conv_as_matmul=True)]
        )
        cache_plan(cache_key, plain)
    return [*([replace(plain, compiled=True)] if worth else []), plain, *rest]


def _has_convolutions(bench: ProbeSetup) -> bool:
    met = ConvAsMatmul(enabled=False)
    with met:
        _failure_reason(ExecutionPlan("vmapped"), bench)
    return met.saw_conv2d


def _fastest(bench: ProbeSetup, choices: Sequence[ExecutionPlan]) -> ExecutionPlan:
    """The fastest of several forms on a few steps; what each took is told."""
    seconds: dict[ExecutionPlan, float] = {}
    for execution_plan in choices:
        seconds[execution_plan] = _time_plan(bench, execution_plan)
        if len(seconds) == 1 and _LONG_SECONDS < seconds[execution_plan] < math.inf:
            _LOG.info(
                "engine: trying out what is fastest, which takes a while: %d steps took %.0f s",
                _PROBE_STEPS,
                seconds[execution_plan],
            )
    best = min(seconds, key=lambda execution_plan: seconds[execution_plan])
    told = ", ".join(
        f"{_label(execution_plan)} {1000 * taken / _PROBE_STEPS:.2g}"
        for execution_plan, taken in seconds.items()
    )
    reason = f"{best.reason}; " if best.reason else ""
    return replace(best, reason=f"{reason}measured, ms a step: {told}")


def _time_plan(bench: ProbeSetup, execution_plan: ExecutionPlan) -> float:
    """Seconds for a few steps, the best of those after two that warm up, or one that is long; endless for a form that fails."""
    engine = build_engine(bench.function, execution_plan, bench.config)
    wait: Callable[[], None] = torch.cuda.synchronize if bench.examples.y.is_cuda else lambda: None
    taken = []
    try:
        for _ in range(5 if bench.examples.y.is_cuda else 4):
            wait()
            started = time.perf_counter()
            engine(bench.probe_tasks(), bench.examples, bench.round_index)
            wait()
            taken.append(time.perf_counter() - started)
            if (
                len(taken) > 1 and taken[-1] > _LONG_SECONDS
            ):  # the first also starts up what it needs; beside so much the rest is little
                break
    except (RuntimeError, ValueError, UserWarning, NotImplementedError):
        return math.inf
    finally:
        engine.close()
    return min(taken[2:] or taken[-1:])


def _label(execution_plan: ExecutionPlan) -> str:
    return (
        {True: "products", False: "grouped"}[execution_plan.conv_as_matmul]
        if execution_plan.engine == "graphed"
        else execution_plan.engine
    )
