"""Which engine to use, and the execution plan that was chosen for a run."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from glocal.core.bounds import MAX_CLIENTS, MAX_WORKERS, count_field, require_counts
from glocal.core.checks import require_choice, require_flag
from glocal.core.paths import cache_folder

ENGINES = ("auto", "looped", "vmapped", "graphed", "workers")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class EngineConfig:
    """How to run a function over clients; only `precision` changes the numbers beyond rounding.

    `chunk_size` is the number of clients in one batched step. `workers` is the number of clients
    that are computed at once on a CPU, by default one per core. `fused` allows the library's own
    compiled steps, which exist for chains of plain layers.

    >>> EngineConfig("workers", workers=4).num_workers
    4
    """

    name: str = "auto"
    chunk_size: int | None = count_field(None, maximum=MAX_CLIENTS)
    workers: int | None = count_field(None, maximum=MAX_WORKERS)
    fused: bool = True
    precision: str = "fp32"

    def __post_init__(self) -> None:
        require_choice("engine: name", self.name, ENGINES)
        require_choice("engine: precision", self.precision, PRECISIONS)
        require_flag("engine: fused", self.fused)
        require_counts("engine: ", self)

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.workers or available_cores()


@dataclass(frozen=True)
class ExecutionPlan:
    """The engine that runs, the kind of its steps, and the reason for the choice.

    Steps may be fused, or compiled by torch; convolutions may run as matrix products.
    """

    engine: str
    fused: bool = False
    compiled: bool = False
    conv_as_matmul: bool = False
    reason: str = ""

    def as_dict(self) -> dict[str, str | bool]:
        """The plan as JSON."""
        return asdict(self)

    def allowed_by(self, config: EngineConfig) -> bool:
        """Whether a run that began with this plan may go on with it under `config`."""
        return config.name in ("auto", self.engine) and (config.fused or not self.fused)

    @classmethod
    def from_dict(cls, data: object) -> "ExecutionPlan | None":
        """A plan from JSON; None if `data` is no plan."""
        if not isinstance(data, dict) or data.get("engine") not in ENGINES:
            return None
        known = {each.name for each in fields(cls)}
        return cls(**data) if data.keys() <= known else None


class ResolvedEngine(NamedTuple):
    """The plan with which a run began, if it began before, and a callback for a new plan."""

    execution_plan: ExecutionPlan | None = None
    on_plan: Callable[[ExecutionPlan], None] | None = None


def available_cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Compute in this precision, deterministically; the caller's settings are restored."""
    backend = "cuda" if device.type == "cuda" else "cpu"
    autocast = torch.autocast(
        backend, dtype=torch.bfloat16, enabled=name == "bf16", cache_enabled=False
    )
    if backend == "cpu":
        with autocast:
            yield
        return
    with _cuda_matmul(allow_tf32=name == "tf32"), autocast:
        yield


@contextmanager
def _cuda_matmul(*, allow_tf32: bool) -> Iterator[None]:
    """Deterministic convolutions and matrix products, in full single precision or in TF32."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    convolutions = torch.backends.cudnn.flags(
        enabled=True, benchmark=False, deterministic=True, allow_tf32=allow_tf32
    )
    matmul.allow_tf32 = allow_tf32
    try:
        with convolutions:
            yield
    finally:
        matmul.allow_tf32 = before


def load_cached_plan(key: str) -> ExecutionPlan | None:
    """The plan that was measured on this machine before, for work with this key."""
    try:
        return ExecutionPlan.from_dict(json.loads(_cache_file().read_text()).get(key))
    except (OSError, ValueError, AttributeError):
        return None


def cache_plan(key: str, execution_plan: ExecutionPlan) -> None:
    """Store a measured plan; a cache that cannot be written does not stop the run."""
    file = _cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        plans = json.loads(file.read_text()) if file.exists() else {}
        text = json.dumps({**plans, key: execution_plan.as_dict()}, indent=1)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(text)
        draft.replace(file)
    except (OSError, ValueError):
        return


def _cache_file() -> Path:
    return cache_folder() / "engines.json"
