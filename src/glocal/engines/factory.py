"""From a choice to the form that it names."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from glocal.engines.batched import BatchedTraining, FusedGpuTraining, TracedBatchedTraining
from glocal.engines.config import EngineConfig, ExecutionPlan
from glocal.engines.fused.cpu import FusedCpuTraining
from glocal.engines.graphed import GraphedEngine
from glocal.engines.looped import LoopedEngine
from glocal.engines.protocol import ClientFunction, Engine, ResultT
from glocal.engines.threads import ThreadPool
from glocal.engines.traced import FlatStep, TracedTraining
from glocal.engines.vmapped import VmappedEngine
from glocal.engines.workers import ProcessPool


def build_engine(
    function: ClientFunction[ResultT], execution_plan: ExecutionPlan, config: EngineConfig
) -> Engine[ResultT]:
    """The form of a choice, around a one-device function."""
    if execution_plan.engine == "workers" and execution_plan.fused:
        return ThreadPool(function, workers=config.num_workers, fused=FusedCpuTraining())
    if execution_plan.engine == "workers":
        return ProcessPool(function, workers=config.num_workers, trainer=TracedTraining())
    if execution_plan.engine == "graphed":
        return GraphedEngine(
            function,
            trainer=_batched_training(execution_plan, config),
            description=_description(execution_plan),
        )
    return VmappedEngine(function) if execution_plan.engine == "vmapped" else LoopedEngine(function)


def _batched_training(execution_plan: ExecutionPlan, config: EngineConfig) -> BatchedTraining:
    if execution_plan.fused:
        return BatchedTraining(FusedGpuTraining(config.precision), skip_check=True)
    return BatchedTraining(
        TracedBatchedTraining(
            compiler=compile_step if execution_plan.compiled else None,
            conv_as_matmul=execution_plan.conv_as_matmul,
        )
    )


def _description(execution_plan: ExecutionPlan) -> str:
    if execution_plan.fused:
        return ", with fused steps"
    parts = [", with compiled steps"] * execution_plan.compiled + [
        ", convolutions as matrix products"
    ] * execution_plan.conv_as_matmul
    return "".join(parts)


def compile_step(traced: FlatStep) -> FlatStep:
    """A traced step, compiled: its kernels fused as far as torch's compiler knows how."""
    assert isinstance(traced, fx.GraphModule)
    made = torch.compile(traced, dynamic=False, fullgraph=True, options={"combo_kernels": True})

    def step(*tensors: Tensor) -> Sequence[Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is for its developers
            result: Sequence[Tensor] = made(*tensors)
        return result

    return step
