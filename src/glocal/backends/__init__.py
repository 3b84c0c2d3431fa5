"""Ways to run one-device functions over many devices."""

from glocal.backends.over_devices import ENGINES, OverDevices, Task, check_engine, looped
from glocal.backends.simulate import Report, Seat, begin, simulate, simulate_seeds

__all__ = ["ENGINES", "OverDevices", "Report", "Seat", "Task", "begin", "check_engine", "looped", "simulate", "simulate_seeds"]
