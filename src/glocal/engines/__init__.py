"""Ways to run a function of one client over many clients."""

from glocal.engines.engine import ENGINES, PRECISIONS, Choice, Engine, Settled
from glocal.engines.executor import OverDevices
from glocal.engines.tasks import Outcome, Task

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "Choice",
    "Engine",
    "Outcome",
    "OverDevices",
    "Settled",
    "Task",
]
