"""Build the engine that an execution plan names."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from glocal.engines.batched import BatchedTraining, FusedGpuTraining, TracedBatchedTraining
from glocal.engines.config import EngineConfig, ExecutionPlan
from glocal.engines.flat_step import FlatStep
from glocal.engines.fused.cpu import FusedCpuTraining
from glocal.engines.graphed import GraphedEngine
from glocal.engines.looped import LoopedEngine
from glocal.engines.protocol import ClientFunction, Engine, ResultT
from glocal.engines.threads import ThreadPool
from glocal.engines.traced import TracedTraining
from glocal.engines.vmapped import VmappedEngine
from glocal.engines.workers import ProcessPool


def build_engine(
    function: ClientFunction[ResultT], execution_plan: ExecutionPlan, config: EngineConfig
) -> Engine[ResultT]:
    """The plan's engine, around a function of one client."""
    if execution_plan.engine == "workers":
        return _build_workers(function, config, fused=execution_plan.fused)
    if execution_plan.engine == "graphed":
        trainer = _batched_training(execution_plan, config)
        return GraphedEngine(function, trainer=trainer, description=_description(execution_plan))
    if execution_plan.engine == "vmapped":
        return VmappedEngine(function)
    return LoopedEngine(function)


def _build_workers(
    function: ClientFunction[ResultT], config: EngineConfig, *, fused: bool
) -> Engine[ResultT]:
    """Threads for fused steps, which hold no Python lock; processes for all others."""
    if fused:
        return ThreadPool(function, workers=config.num_workers, fused=FusedCpuTraining())
    return ProcessPool(function, workers=config.num_workers, trainer=TracedTraining())


def _batched_training(execution_plan: ExecutionPlan, config: EngineConfig) -> BatchedTraining:
    if execution_plan.fused:
        return BatchedTraining(FusedGpuTraining(config.precision), skip_check=True)
    compiler = compile_step if execution_plan.compiled else None
    return BatchedTraining(
        TracedBatchedTraining(compiler=compiler, conv_as_matmul=execution_plan.conv_as_matmul)
    )


def _description(execution_plan: ExecutionPlan) -> str:
    """What the description of the graphed engine ends in."""
    if execution_plan.fused:
        return ", fused Triton kernels"
    compiled = ", compiled steps" if execution_plan.compiled else ""
    matmul = ", convolutions as matrix products" if execution_plan.conv_as_matmul else ""
    return compiled + matmul


def compile_step(traced: FlatStep) -> FlatStep:
    """A traced step, compiled by `torch.compile`."""
    assert isinstance(traced, fx.GraphModule)
    compiled = torch.compile(traced, dynamic=False, fullgraph=True, options={"combo_kernels": True})

    def step(*tensors: Tensor) -> Sequence[Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is for its own developers
            result: Sequence[Tensor] = compiled(*tensors)
        return result

    return step
