"""Ways to run one-device functions over many devices."""

from glocal.backends.engine import ENGINES, PRECISIONS, Choice, Engine, Settled
from glocal.backends.over_devices import OverDevices
from glocal.backends.simulate import Report, Seat, begin, simulate, simulate_seeds
from glocal.backends.tasks import Outcome, Task

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "Choice",
    "Engine",
    "Outcome",
    "OverDevices",
    "Report",
    "Seat",
    "Settled",
    "Task",
    "begin",
    "simulate",
    "simulate_seeds",
]
