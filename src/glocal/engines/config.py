"""Which engine runs, and what was settled about it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from glocal.core.bounds import MAX_CLIENTS, MAX_WORKERS, count_field, require_counts
from glocal.core.errors import InputError, suggest_name
from glocal.core.paths import cache_folder

ENGINES = ("auto", "looped", "vmapped", "graphed", "workers")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class EngineConfig:
    """How to run a function over devices; nothing here but the precision changes the numbers beyond rounding.

    `chunk` is how many devices go into one batched step, `workers` how many compute at once on a CPU (by default one per core), and
    `fused` allows steps of our own for chains of plain layers.
    """

    name: str = "auto"
    chunk_size: int | None = count_field(None, maximum=MAX_CLIENTS)
    workers: int | None = count_field(None, maximum=MAX_WORKERS)
    fused: bool = True
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise InputError(
                f"engine: '{self.name}' is unknown; {suggest_name(self.name, ENGINES)}"
            )
        if self.precision not in PRECISIONS:
            raise InputError(
                f"engine: precision '{self.precision}' is unknown; {suggest_name(self.precision, PRECISIONS)}"
            )
        require_counts("engine: ", self)

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self.workers or available_cores()


@dataclass(frozen=True)
class ExecutionPlan:
    """What was settled: the form, and whether its steps are fused, compiled, or have convolutions as products; and why."""

    engine: str
    fused: bool = False
    compiled: bool = False
    conv_as_matmul: bool = False
    reason: str = ""

    def as_dict(self) -> dict[str, str | bool]:
        """For JSON."""
        return asdict(self)

    def allowed_by(self, config: EngineConfig) -> bool:
        """Whether a run that began like this goes on so: nobody has asked for another engine."""
        return config.name in ("auto", self.engine) and (config.fused or not self.fused)

    @classmethod
    def from_dict(cls, data: object) -> "ExecutionPlan | None":
        """Back from JSON; None if it is something else."""
        known = {part.name for part in fields(cls)}
        if (
            not isinstance(data, dict)
            or not {"engine"} <= {*data} <= known
            or data["engine"] not in ENGINES
        ):
            return None
        return cls(**data)


class ResolvedEngine(NamedTuple):
    """What was settled when a run began, if it did before, and who is told what is settled now."""

    execution_plan: ExecutionPlan | None = None
    on_plan: Callable[[ExecutionPlan], None] | None = None


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Full single precision, the same bits every time, unless asked for less; the caller's settings come back afterwards."""
    if device.type != "cuda":
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=name == "bf16", cache_enabled=False
        ):
            yield
        return
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    convolutions = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=name == "tf32"
    )
    matmul.allow_tf32 = name == "tf32"
    try:
        with (
            convolutions,
            torch.autocast(
                "cuda", dtype=torch.bfloat16, enabled=name == "bf16", cache_enabled=False
            ),
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def load_cached_plan(key: str) -> ExecutionPlan | None:
    """What was settled for such work on this machine before."""
    try:
        return ExecutionPlan.from_dict(json.loads(_cache_file().read_text()).get(key))
    except (OSError, ValueError, AttributeError):
        return None


def cache_plan(key: str, execution_plan: ExecutionPlan) -> None:
    """Keep what was settled; a cache that cannot be written is no reason to stop."""
    book = _cache_file()
    try:
        book.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(book.read_text()) if book.exists() else {}
        draft = book.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**kept, key: execution_plan.as_dict()}, indent=1))
        draft.replace(book)
    except (OSError, ValueError):
        return


def _cache_file() -> Path:
    return cache_folder() / "engines.json"
