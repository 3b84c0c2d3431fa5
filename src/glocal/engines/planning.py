"""Choose the execution plan: as configured, or the fastest one in a few measured steps."""

import hashlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from glocal.core.data import Examples
from glocal.core.errors import describe_error
from glocal.core.trees import Params
from glocal.core.values import describe_form
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
from glocal.engines.protocol import ClientFunction, ClientTask, first_steps

_MIN_STEPS_TO_MEASURE = 300  # steps, one after the other, in the whole run
_MIN_STEPS_TO_COMPILE = 20_000
_MIN_EXAMPLES_TO_MEASURE = 5_000
_PROBE_STEPS = 2
_PROBE_CLIENTS = 16  # on a CPU
_LONG_SECONDS = 10
_LOOPED = ExecutionPlan("looped")
_VMAPPED = ExecutionPlan("vmapped")
_LOG = logging.getLogger("glocal")


class ProbeSetup(NamedTuple):
    """What engines are compared on: a function, and the first steps of the tasks at hand."""

    function: ClientFunction[Any]
    config: EngineConfig
    tasks: Sequence[ClientTask]
    examples: Examples
    round_index: int

    def probe_tasks(self) -> list[ClientTask]:
        """The first steps of the tasks that share one batched step.

        On a CPU a few tasks are enough: there each of them costs about the same.
        """
        limit = len(self.tasks) if self.examples.device.type == "cuda" else _PROBE_CLIENTS
        tasks = self.tasks[: min(limit, self.config.chunk_size or limit)]
        return [first_steps(task, _PROBE_STEPS) for task in tasks]

    @property
    def probe_steps(self) -> int:
        """The number of steps that are timed."""
        return max(task.num_steps for task in self.probe_tasks())

    def max_steps(self) -> int:
        """The number of steps of the longest task."""
        return max(task.num_steps for task in self.tasks)

    def cache_key(self) -> str:
        """A hash of everything that the fastest plan depends on."""
        first = self.tasks[0]
        parts = (
            _named_shapes(first.shared) + _named_shapes(first.private),
            (len(self.tasks), self.config.chunk_size),
            first.order.shape[2],
            self.max_steps(),
            describe_form(self.examples.x),
            self._environment(),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]

    def _environment(self) -> tuple[str, str, str, str]:
        """What runs the function, and where."""
        function_name = getattr(self.function, "__qualname__", type(self.function).__name__)
        return torch.__version__, self._hardware(), function_name, self.config.precision

    def _hardware(self) -> str:
        device = self.examples.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"{available_cores()} cores, {self.config.num_workers} workers"


def plan_execution(setup: ProbeSetup, *, num_calls: int, trains: bool) -> list[ExecutionPlan]:
    """The plan to execute, then its fallbacks."""
    name, on_gpu = setup.config.name, setup.examples.device.type == "cuda"
    fused = setup.config.fused and trains and setup.config.precision != "bf16"
    num_steps = num_calls * setup.max_steps()
    if name == "looped":
        return [_LOOPED]
    if name == "vmapped":
        return [_VMAPPED, _LOOPED]
    if name == "graphed" or (name in ("auto", "workers") and on_gpu):
        if not trains:
            return [ExecutionPlan("graphed"), _VMAPPED, _LOOPED]
        compiles = name == "graphed" or num_steps >= _MIN_STEPS_TO_COMPILE
        return _plan_gpu(setup, fused=fused, compiles=compiles)
    if name == "workers":
        return [*_plans_with_fused("workers", setup, fused=fused), _LOOPED]
    measures = num_steps >= _MIN_STEPS_TO_MEASURE if trains else _is_long_evaluation(setup)
    return _plan_cpu(setup, fused=fused, measures=measures)


def fallbacks_for(execution_plan: ExecutionPlan) -> list[ExecutionPlan]:
    """The fallbacks of a plan from an earlier run."""
    if execution_plan.engine == "workers":
        return [ExecutionPlan("workers"), _LOOPED] if execution_plan.fused else [_LOOPED]
    if execution_plan.engine == "graphed":
        if execution_plan.fused or execution_plan.compiled:
            return [replace(execution_plan, fused=False, compiled=False), _VMAPPED, _LOOPED]
        return [_VMAPPED, _LOOPED]
    return [_LOOPED] if execution_plan.engine == "vmapped" else []


def _named_shapes(tree: Params) -> list[tuple[str, tuple[int, ...]]]:
    return [(name, tuple(tensor.shape)) for name, tensor in tree.items()]


def _is_long_evaluation(setup: ProbeSetup) -> bool:
    """Whether a call without training has enough examples to be worth a measurement."""
    return sum(task.order.size for task in setup.tasks) >= _MIN_EXAMPLES_TO_MEASURE


def _plan_cpu(setup: ProbeSetup, *, fused: bool, measures: bool) -> list[ExecutionPlan]:
    """Fused steps where they support the model, else what a measurement shows to be fastest."""
    workers = _plans_with_fused("workers", setup, fused=fused)
    if workers[0].fused:
        return [*workers, _LOOPED]
    if not measures:
        return [replace(_VMAPPED, reason="auto: the run is too short to measure"), _LOOPED]
    fastest = _measured_plan(setup, [workers[0], _VMAPPED, _LOOPED])
    return [fastest] if fastest.engine == "looped" else [fastest, _LOOPED]


def _plan_gpu(setup: ProbeSetup, *, fused: bool, compiles: bool) -> list[ExecutionPlan]:
    """Fused steps where they support the model, else compiled ones if the run is long enough."""
    on_gpu = setup.examples.device.type == "cuda"
    graphed = _plans_with_fused("graphed", setup, fused=fused and on_gpu)
    if graphed[0].fused:
        return [*graphed, _VMAPPED, _LOOPED]
    plain = graphed[0]
    if on_gpu and _has_convolutions(setup):
        plain = _measured_plan(setup, [plain, replace(plain, conv_as_matmul=True)])
    compiled = [replace(plain, compiled=True)] if compiles else []
    return [*compiled, plain, _VMAPPED, _LOOPED]


def _plans_with_fused(engine: str, setup: ProbeSetup, *, fused: bool) -> list[ExecutionPlan]:
    """The engine with fused steps if these support the model, then without."""
    plain = ExecutionPlan(engine)
    if not fused:
        return [plain]
    obstacle = _failure_reason(replace(plain, fused=True), setup)
    if obstacle:
        return [replace(plain, reason=f"no fused steps: {obstacle}")]
    reason = "auto" if setup.config.name == "auto" else ""
    return [replace(plain, fused=True, reason=reason), plain]


def _failure_reason(execution_plan: ExecutionPlan, setup: ProbeSetup) -> str:
    """Why a plan does not run here; empty if it does."""
    engine = build_engine(setup.function, execution_plan, setup.config)
    one_step = [first_steps(task, 1) for task in setup.tasks[:1]]
    try:
        engine(one_step, setup.examples, setup.round_index)
    except (NotImplementedError, NoFusedStepError) as error:
        return str(error)
    except (RuntimeError, ValueError, ImportError) as error:
        return describe_error(error)
    finally:
        engine.close()
    return ""


def _has_convolutions(setup: ProbeSetup) -> bool:
    watcher = ConvAsMatmul(enabled=False)
    with watcher:
        _failure_reason(_VMAPPED, setup)
    return watcher.saw_conv2d


def _measured_plan(setup: ProbeSetup, choices: Sequence[ExecutionPlan]) -> ExecutionPlan:
    """The fastest of several plans, from the cache if it was measured here before."""
    key = setup.cache_key()
    fastest = load_cached_plan(key) or _fastest(setup, choices)
    cache_plan(key, fastest)
    return fastest


def _fastest(setup: ProbeSetup, choices: Sequence[ExecutionPlan]) -> ExecutionPlan:
    """The fastest of several plans on a few steps; the times become part of its reason."""
    seconds: dict[ExecutionPlan, float] = {}
    for choice in choices:
        seconds[choice] = _time_plan(setup, choice)
        if len(seconds) == 1 and _LONG_SECONDS < seconds[choice] < math.inf:
            _LOG.info(
                "engine: measuring which is fastest, which takes a while: %d steps took %.0f s",
                setup.probe_steps,
                seconds[choice],
            )
    fastest = min(seconds, key=lambda choice: seconds[choice])
    reason = f"{fastest.reason}; " if fastest.reason else ""
    times = _describe_times(seconds, setup.probe_steps)
    return replace(fastest, reason=f"{reason}measured, ms a step: {times}")


def _describe_times(seconds: dict[ExecutionPlan, float], steps: int) -> str:
    """Milliseconds per step of every plan."""
    parts = []
    for execution_plan, duration in seconds.items():
        milliseconds = 1000 * duration / steps
        parts.append(f"{_label(execution_plan)} {milliseconds:.2g}")
    return ", ".join(parts)


def _label(execution_plan: ExecutionPlan) -> str:
    if execution_plan.engine != "graphed":
        return execution_plan.engine
    return "products" if execution_plan.conv_as_matmul else "grouped"


def _time_plan(setup: ProbeSetup, execution_plan: ExecutionPlan) -> float:
    """Seconds for a few steps; infinite for a plan that fails.

    The first two runs warm up, and the best of the others counts. A plan that takes long gets two
    runs only, and the second counts: the first one also starts processes or compiles, and beside
    so long a run the rest of the warm-up is small.
    """
    engine = build_engine(setup.function, execution_plan, setup.config)
    tasks = setup.probe_tasks()
    durations: list[float] = []
    try:
        for _ in range(5 if setup.examples.device.type == "cuda" else 4):
            _synchronize(setup)
            start = time.perf_counter()
            engine(tasks, setup.examples, setup.round_index)
            _synchronize(setup)
            durations.append(time.perf_counter() - start)
            if len(durations) > 1 and durations[-1] > _LONG_SECONDS:
                break
    except (RuntimeError, ValueError, UserWarning, NotImplementedError):
        return math.inf
    finally:
        engine.close()
    return min(durations[2:] or durations[-1:])


def _synchronize(setup: ProbeSetup) -> None:
    """Wait for the GPU, whose kernels run on after the call that launched them."""
    if setup.examples.device.type == "cuda":
        torch.cuda.synchronize()
