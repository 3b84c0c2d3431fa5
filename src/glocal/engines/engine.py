"""Which engine runs, and what was settled about it."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from glocal.core.bounds import CLIENTS, WORKERS, count, require_counts
from glocal.core.errors import InputError, nearest
from glocal.core.paths import cache_folder

ENGINES = ("auto", "looped", "vmapped", "graphed", "workers")
PRECISIONS = ("fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Engine:
    """How to run a function over devices; nothing here but the precision changes the numbers beyond rounding.

    `chunk` is how many devices go into one batched step, `workers` how many compute at once on a CPU (by default one per core), and
    `fused` allows steps of our own for chains of plain layers.
    """

    name: str = "auto"
    chunk: int | None = count(None, most=CLIENTS)
    workers: int | None = count(None, most=WORKERS)
    fused: bool = True
    precision: str = "fp32"

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise InputError(f"engine: '{self.name}' is unknown; {nearest(self.name, ENGINES)}")
        if self.precision not in PRECISIONS:
            raise InputError(f"engine: precision '{self.precision}' is unknown; {nearest(self.precision, PRECISIONS)}")
        require_counts("engine: ", self)

    @property
    def crew(self) -> int:
        """How many workers there are."""
        return self.workers or cores()


@dataclass(frozen=True)
class Choice:
    """What was settled: the form, and whether its steps are fused, compiled, or have convolutions as products; and why."""

    form: str
    fused: bool = False
    compiled: bool = False
    products: bool = False
    why: str = ""

    def as_dict(self) -> dict[str, str | bool]:
        """For JSON."""
        return asdict(self)

    def asked_for(self, engine: Engine) -> bool:
        """Whether a run that began like this goes on so: nobody has asked for another engine."""
        return engine.name in ("auto", self.form) and (engine.fused or not self.fused)

    @classmethod
    def from_dict(cls, data: object) -> "Choice | None":
        """Back from JSON; None if it is something else."""
        known = {part.name for part in fields(cls)}
        if not isinstance(data, dict) or not {"form"} <= {*data} <= known or data["form"] not in ENGINES:
            return None
        return cls(**data)


class Settled(NamedTuple):
    """What was settled when a run began, if it did before, and who is told what is settled now."""

    choice: Choice | None = None
    note: Callable[[Choice], None] | None = None


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def precision(name: str, device: torch.device) -> Iterator[None]:
    """Full single precision, the same bits every time, unless asked for less; the caller's settings come back afterwards."""
    if device.type != "cuda":
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "bf16", cache_enabled=False):
            yield
        return
    matmul, before = torch.backends.cuda.matmul, torch.backends.cuda.matmul.allow_tf32
    convolutions = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=name == "tf32")
    matmul.allow_tf32 = name == "tf32"
    try:
        with convolutions, torch.autocast("cuda", dtype=torch.bfloat16, enabled=name == "bf16", cache_enabled=False):
            yield
    finally:
        matmul.allow_tf32 = before


def remembered(key: str) -> Choice | None:
    """What was settled for such work on this machine before."""
    try:
        return Choice.from_dict(json.loads(_book().read_text()).get(key))
    except (OSError, ValueError, AttributeError):
        return None


def remember(key: str, choice: Choice) -> None:
    """Keep what was settled; a cache that cannot be written is no reason to stop."""
    book = _book()
    try:
        book.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(book.read_text()) if book.exists() else {}
        draft = book.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps({**kept, key: choice.as_dict()}, indent=1))
        draft.replace(book)
    except (OSError, ValueError):
        return


def _book() -> Path:
    return cache_folder() / "engines.json"
