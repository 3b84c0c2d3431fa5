"""Optimisers as pure functions: a memory in, a memory out; the same rules as `torch.optim`."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.errors import InputError
from glocal.trees import Params

Step = Callable[[Params, Params, Params, Tensor], tuple[Params, Params]]


class Optimiser(NamedTuple):
    """init(params) -> memory; step(params, slopes, memory, round_index) -> (params, memory); about: its settings in words."""

    init: Callable[[Params], Params]
    step: Step
    about: str = ""


def sgd(rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0, decay: float = 0.0) -> Optimiser:
    """Stochastic gradient descent as in `torch.optim.SGD`; the rate in round t is rate / (1 + decay * t)."""
    _require("rate", rate, rate > 0, "above 0")
    _require("momentum", momentum, 0 <= momentum < 1, "at least 0 and below 1")
    _require_decays(weight_decay, decay)

    def init(params: Params) -> Params:
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()} if momentum else {}

    def step(params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        # one fused pass over each tensor where torch has one: on a CPU the passes are the cost
        velocity = {n: torch.add(slope, params[n], alpha=weight_decay) for n, slope in slopes.items()} if weight_decay else slopes
        if momentum:
            velocity = {name: torch.add(slope, memory[name], alpha=momentum) for name, slope in velocity.items()}
        if decay:
            pace = rate / (1 + decay * round_index)
            moved = {name: tensor - pace * velocity[name] for name, tensor in params.items()}
        else:
            moved = {name: torch.sub(tensor, velocity[name], alpha=rate) for name, tensor in params.items()}
        return moved, velocity if momentum else {}

    return Optimiser(init, step, f"sgd(rate={rate}, momentum={momentum}, weight_decay={weight_decay}, decay={decay})")


def adam(
    rate: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, decay: float = 0.0
) -> Optimiser:
    """Adam (Kingma and Ba 2015) as in `torch.optim.Adam`; the rate in round t is rate / (1 + decay * t)."""
    _require("rate", rate, rate > 0, "above 0")
    _require("betas", betas, all(0 <= beta < 1 for beta in betas), "each at least 0 and below 1")
    _require_decays(weight_decay, decay)

    def init(params: Params) -> Params:
        zeros = {f"{moment}/{name}": torch.zeros_like(tensor) for moment in ("first", "second") for name, tensor in params.items()}
        return {**zeros, "steps": torch.zeros((), device=next(iter(params.values())).device)}

    def step(params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        slopes = {name: slope + weight_decay * params[name] for name, slope in slopes.items()}
        steps = memory["steps"] + 1
        first = {n: betas[0] * memory[f"first/{n}"] + (1 - betas[0]) * slope for n, slope in slopes.items()}
        second = {n: betas[1] * memory[f"second/{n}"] + (1 - betas[1]) * slope.square() for n, slope in slopes.items()}
        pace = rate / (1 + decay * round_index) / _one_minus_power(betas[0], steps)
        scale = _one_minus_power(betas[1], steps).sqrt()
        moved = {n: tensor - pace * first[n] / (second[n].sqrt() / scale + eps) for n, tensor in params.items()}
        return moved, {**_prefixed("first", first), **_prefixed("second", second), "steps": steps}

    return Optimiser(init, step, f"adam(rate={rate}, betas={betas}, eps={eps}, weight_decay={weight_decay}, decay={decay})")


def _one_minus_power(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, exact also where the power is near 1."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)


def _prefixed(moment: str, tree: Params) -> Params:
    return {f"{moment}/{name}": tensor for name, tensor in tree.items()}


def _require_decays(weight_decay: float, decay: float) -> None:
    _require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
    _require("decay", decay, decay >= 0, "at least 0")


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"optimiser: {name} is {value}; it must be {expected}")
