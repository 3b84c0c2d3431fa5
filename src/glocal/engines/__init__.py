"""Ways to run a function of one client over many clients."""

from glocal.engines.config import ENGINES, PRECISIONS, EngineConfig, ExecutionPlan, ResolvedEngine
from glocal.engines.executor import Executor
from glocal.engines.protocol import ClientResults, ClientTask

__all__ = [
    "ENGINES",
    "PRECISIONS",
    "ClientResults",
    "ClientTask",
    "EngineConfig",
    "ExecutionPlan",
    "Executor",
    "ResolvedEngine",
]
