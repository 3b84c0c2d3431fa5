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
from glocal.core.errors import brief
from glocal.engines.conv_matmul import Products
from glocal.engines.engine import Choice, Engine, cores, remember, remembered
from glocal.engines.forms import build
from glocal.engines.fused.build import NoFusedStepError
from glocal.engines.tasks import OneDevice, Task

_WORTH_MEASURING = 300  # steps, one after the other, in the whole run
_WORTH_COMPILING = 20_000
_LARGE_TEST = 5_000  # examples
_PROBE = 2  # steps
_PROBED = 16  # devices, on a CPU
_LONG = 10  # seconds
_LOG = logging.getLogger("glocal")


class Bench(NamedTuple):
    """What is tried out: a function, on the first steps of the tasks at hand."""

    function: OneDevice[Any]
    engine: Engine
    tasks: Sequence[Task]
    examples: Examples
    round_index: int

    def short(self) -> list[Task]:
        """First steps of the tasks that go into one batched step; on a CPU of some tasks, for there each costs the same."""
        most = len(self.tasks) if self.examples.y.is_cuda else _PROBED
        tasks = self.tasks[: min(most, self.engine.chunk or most)]
        return [task._replace(order=task.order[:_PROBE]) for task in tasks]

    def steps(self) -> int:
        """How many steps the longest task has."""
        return max(len(task.order) for task in self.tasks)

    def key(self) -> str:
        """What the answer depends on, as one word."""
        first = self.tasks[0]
        shapes = [(name, tuple(tensor.shape)) for tree in first[:2] for name, tensor in tree.items()]
        device = self.examples.y.device
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{cores()} cores, {self.engine.crew} workers"
        here = (
            torch.__version__,
            where,
            getattr(self.function, "__qualname__", type(self.function).__name__),
            self.engine.precision,
        )
        at_once = len(self.tasks), self.engine.chunk
        told = repr((shapes, at_once, first.order.shape[1], self.steps(), tuple(self.examples.x.shape[1:]), here))
        return hashlib.sha256(told.encode()).hexdigest()[:16]


def chosen(bench: Bench, *, calls: int, descends: bool) -> list[Choice]:
    """The form to take, then those to fall back to."""
    name, on_gpu = bench.engine.name, bench.examples.y.is_cuda
    fused = bench.engine.fused and descends and bench.engine.precision != "bf16"
    if name == "looped":
        return [Choice("looped")]
    if name == "vmapped":
        return [Choice("vmapped"), Choice("looped")]
    if name == "graphed" or (name in ("auto", "workers") and on_gpu):
        worth = name == "graphed" or calls * bench.steps() >= _WORTH_COMPILING
        return _on_gpu(bench, fused=fused, worth=worth) if descends else [Choice("graphed"), Choice("vmapped"), Choice("looped")]
    if name == "workers":
        return [*_with_fused("workers", bench, fused=fused), Choice("looped")]
    examples = sum(task.order.size for task in bench.tasks)
    return _on_cpu(bench, fused=fused, worth=calls * bench.steps() >= _WORTH_MEASURING if descends else examples >= _LARGE_TEST)


def below(choice: Choice) -> list[Choice]:
    """What to fall back to from a choice that was made before."""
    if choice.form == "workers":
        return [*([Choice("workers")] if choice.fused else []), Choice("looped")]
    if choice.form == "graphed":
        plainer = [replace(choice, fused=False, compiled=False)] if choice.fused or choice.compiled else []
        return [*plainer, Choice("vmapped"), Choice("looped")]
    return [Choice("looped")] if choice.form == "vmapped" else []


def _with_fused(form: str, bench: Bench, *, fused: bool) -> list[Choice]:
    """A form with fused steps if they know the model, then without."""
    if not fused:
        return [Choice(form)]
    reason = _why_not(Choice(form, fused=True), bench)
    if reason:
        return [Choice(form, why=f"no fused steps: {reason}")]
    return [Choice(form, fused=True, why="they know all its layers"), Choice(form)]


def _why_not(choice: Choice, bench: Bench) -> str:
    """Why a form does not run here; nothing if it does."""
    form = build(bench.function, choice, bench.engine)
    try:
        form([task._replace(order=task.order[:1]) for task in bench.tasks[:1]], bench.examples, bench.round_index)
    except (NotImplementedError, NoFusedStepError) as error:
        return str(error)
    except (RuntimeError, ValueError, ImportError) as error:
        return brief(error)
    finally:
        form.close()
    return ""


def _on_cpu(bench: Bench, *, fused: bool, worth: bool) -> list[Choice]:
    known = _with_fused("workers", bench, fused=fused)
    if known[0].fused:
        return [*known, Choice("looped")]
    if not worth:
        return [Choice("vmapped", why="too short a run to measure"), Choice("looped")]
    best = remembered(bench.key()) or _fastest(bench, [known[0], Choice("vmapped"), Choice("looped")])
    remember(bench.key(), best)
    return [best, *([] if best.form == "looped" else [Choice("looped")])]


def _on_gpu(bench: Bench, *, fused: bool, worth: bool) -> list[Choice]:
    rest = [Choice("vmapped"), Choice("looped")]
    known = _with_fused("graphed", bench, fused=fused and bench.examples.y.is_cuda)
    if known[0].fused:
        return [*known, *rest]
    plain = known[0]
    if bench.examples.y.is_cuda and _has_convolutions(bench):
        key = bench.key()
        plain = remembered(key) or _fastest(bench, [plain, replace(plain, products=True)])
        remember(key, plain)
    return [*([replace(plain, compiled=True)] if worth else []), plain, *rest]


def _has_convolutions(bench: Bench) -> bool:
    met = Products(on=False)
    with met:
        _why_not(Choice("vmapped"), bench)
    return met.met


def _fastest(bench: Bench, choices: Sequence[Choice]) -> Choice:
    """The fastest of several forms on a few steps; what each took is told."""
    seconds: dict[Choice, float] = {}
    for choice in choices:
        seconds[choice] = _timed(bench, choice)
        if len(seconds) == 1 and _LONG < seconds[choice] < math.inf:
            _LOG.info("engine: trying out what is fastest, which takes a while: %d steps took %.0f s", _PROBE, seconds[choice])
    best = min(seconds, key=lambda choice: seconds[choice])
    told = ", ".join(f"{_name(choice)} {1000 * taken / _PROBE:.2g}" for choice, taken in seconds.items())
    reason = f"{best.why}; " if best.why else ""
    return replace(best, why=f"{reason}measured, ms a step: {told}")


def _timed(bench: Bench, choice: Choice) -> float:
    """Seconds for a few steps, the best of those after two that warm up, or one that is long; endless for a form that fails."""
    form = build(bench.function, choice, bench.engine)
    wait: Callable[[], None] = torch.cuda.synchronize if bench.examples.y.is_cuda else lambda: None
    taken = []
    try:
        for _ in range(5 if bench.examples.y.is_cuda else 4):
            wait()
            started = time.perf_counter()
            form(bench.short(), bench.examples, bench.round_index)
            wait()
            taken.append(time.perf_counter() - started)
            if len(taken) > 1 and taken[-1] > _LONG:  # the first also starts up what it needs; beside so much the rest is little
                break
    except (RuntimeError, ValueError, UserWarning, NotImplementedError):
        return math.inf
    finally:
        form.close()
    return min(taken[2:] or taken[-1:])


def _name(choice: Choice) -> str:
    return {True: "products", False: "grouped"}[choice.products] if choice.form == "graphed" else choice.form
