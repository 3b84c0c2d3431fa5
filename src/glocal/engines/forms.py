"""From a choice to the form that it names."""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from glocal.engines.batched import FusedJourneys, Steps, Together
from glocal.engines.engine import Choice, Engine
from glocal.engines.fused.on_cpu import FusedOnCpu
from glocal.engines.graphed import Graphed
from glocal.engines.looped import Looped
from glocal.engines.tasks import Form, OneDevice, Result
from glocal.engines.threads import Threaded
from glocal.engines.traced import FlatStep, TracedDescent
from glocal.engines.vmapped import Vmapped
from glocal.engines.workers import Crew


def build(function: OneDevice[Result], choice: Choice, engine: Engine) -> Form[Result]:
    """The form of a choice, around a one-device function."""
    if choice.form == "workers" and choice.fused:
        return Threaded(function, workers=engine.crew, fused=FusedOnCpu())
    if choice.form == "workers":
        return Crew(function, workers=engine.crew, descent=TracedDescent())
    if choice.form == "graphed":
        return Graphed(function, descent=_together(choice, engine), told=_told(choice))
    return Vmapped(function) if choice.form == "vmapped" else Looped(function)


def _together(choice: Choice, engine: Engine) -> Together:
    if choice.fused:
        return Together(FusedJourneys(engine.precision), refuses=True)
    return Together(Steps(compiled=compiled if choice.compiled else None, products=choice.products))


def _told(choice: Choice) -> str:
    if choice.fused:
        return ", with fused steps"
    parts = [", with compiled steps"] * choice.compiled + [", convolutions as matrix products"] * choice.products
    return "".join(parts)


def compiled(traced: FlatStep) -> FlatStep:
    """A traced step, compiled: its kernels fused as far as torch's compiler knows how."""
    assert isinstance(traced, fx.GraphModule)
    made = torch.compile(traced, dynamic=False, fullgraph=True, options={"combo_kernels": True})

    def step(*tensors: Tensor) -> Sequence[Tensor]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler's advice is for its developers
            result: Sequence[Tensor] = made(*tensors)
        return result

    return step
