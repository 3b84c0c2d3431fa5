"""Optimisers as pure functions: a memory in, a memory out; the same rules as `torch.optim`."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glocal.errors import InputError
from glocal.trees import Params


class Optimiser(Protocol):
    """How slopes move params: a rule with a memory. `Sgd` and `Adam` are two; a rule of your own needs these three."""

    @property
    def about(self) -> str:
        """Its settings in words."""

    def init(self, params: Params) -> Params:
        """The memory before the first step."""

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Params and memory after a step."""


@dataclass(frozen=True)
class Sgd:
    """Stochastic gradient descent as in `torch.optim.SGD`; the rate in round t is rate / (1 + decay * t)."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        _require("rate", self.rate, self.rate > 0, "above 0")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _require_decays(self.weight_decay, self.decay)

    @property
    def about(self) -> str:
        """Its settings in words."""
        return f"sgd(rate={self.rate}, momentum={self.momentum}, weight_decay={self.weight_decay}, decay={self.decay})"

    def init(self, params: Params) -> Params:
        """A velocity for every tensor, if there is momentum."""
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()} if self.momentum else {}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """One fused pass over each tensor where torch has one: the passes are the cost."""
        velocity = slopes
        if self.weight_decay:
            velocity = {n: torch.add(slope, params[n], alpha=self.weight_decay) for n, slope in slopes.items()}
        if self.momentum:
            velocity = {name: torch.add(slope, memory[name], alpha=self.momentum) for name, slope in velocity.items()}
        if self.decay:
            pace = self.rate / (1 + self.decay * round_index)
            moved = {name: tensor - pace * velocity[name] for name, tensor in params.items()}
        else:
            moved = {name: torch.sub(tensor, velocity[name], alpha=self.rate) for name, tensor in params.items()}
        return moved, velocity if self.momentum else {}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) as in `torch.optim.Adam`; the rate in round t is rate / (1 + decay * t)."""

    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        _require("rate", self.rate, self.rate > 0, "above 0")
        _require("betas", self.betas, all(0 <= beta < 1 for beta in self.betas), "each at least 0 and below 1")
        _require_decays(self.weight_decay, self.decay)

    @property
    def about(self) -> str:
        """Its settings in words."""
        settings = f"betas={self.betas}, eps={self.eps}, weight_decay={self.weight_decay}, decay={self.decay}"
        return f"adam(rate={self.rate}, {settings})"

    def init(self, params: Params) -> Params:
        """Two moments for every tensor, and how many steps there were."""
        zeros = {f"{moment}/{name}": torch.zeros_like(tensor) for moment in ("first", "second") for name, tensor in params.items()}
        return {**zeros, "steps": torch.zeros((), device=next(iter(params.values())).device)}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Both moments, freed of their bias, and the step they give."""
        slopes = {name: slope + self.weight_decay * params[name] for name, slope in slopes.items()}
        (fade, spread), steps = self.betas, memory["steps"] + 1
        first = {n: fade * memory[f"first/{n}"] + (1 - fade) * slope for n, slope in slopes.items()}
        second = {n: spread * memory[f"second/{n}"] + (1 - spread) * slope.square() for n, slope in slopes.items()}
        pace = self.rate / (1 + self.decay * round_index) / _one_minus_power(fade, steps)
        scale = _one_minus_power(spread, steps).sqrt()
        moved = {n: tensor - pace * first[n] / (second[n].sqrt() / scale + self.eps) for n, tensor in params.items()}
        return moved, {**_prefixed("first", first), **_prefixed("second", second), "steps": steps}


@dataclass(frozen=True)
class Apart:
    """Tensors whose names begin with `prefix` by a rule of their own: `turns` steps of that rule to each step of the main one.

    With 0 turns both step together, every time.
    """

    main: Sgd | Adam
    other: Sgd | Adam
    prefix: str
    turns: int = 0

    def __post_init__(self) -> None:
        _require("turns", self.turns, self.turns >= 0, "at least 0")

    @property
    def about(self) -> str:
        """Its settings in words."""
        return f"{self.main.about}, {self.prefix} by {self.other.about}, {self.turns} turns"

    def init(self, params: Params) -> Params:
        """Both memories, and whose turn it is."""
        memories = zip(("main", "other"), (self.main, self.other), self._parts(params), strict=True)
        kept = {f"{side}/{name}": t for side, rule, part in memories if part for name, t in rule.init(part).items()}
        return {**kept, "turn": torch.zeros((), device=next(iter(params.values())).device)}

    def step(self, params: Params, slopes: Params, memory: Params, round_index: Tensor) -> tuple[Params, Params]:
        """Both rules step; what it is not the turn of stays as it was."""
        moved: Params = {}
        kept: Params = {}
        sides = zip(("main", "other"), (self.main, self.other), self._parts(params), self._parts(slopes), strict=True)
        for side, rule, own, down in sides:
            if not own:
                continue
            before = {name.removeprefix(f"{side}/"): t for name, t in memory.items() if name.startswith(f"{side}/")}
            after = rule.step(own, down, before, round_index)
            now = (memory["turn"] >= self.turns) == (side == "main") if self.turns else memory["turn"] >= 0
            moved |= {name: torch.where(now, tensor, own[name]) for name, tensor in after[0].items()}
            kept |= {f"{side}/{name}": torch.where(now, tensor, before[name]) for name, tensor in after[1].items()}
        return {name: moved[name] for name in params}, {**kept, "turn": (memory["turn"] + 1) % (self.turns + 1)}

    def _parts(self, tree: Params) -> tuple[Params, Params]:
        """What the main rule moves, and what the other does."""
        other = {name: tensor for name, tensor in tree.items() if name.startswith(self.prefix)}
        return {name: tensor for name, tensor in tree.items() if name not in other}, other


def sgd(rate: float, *, momentum: float = 0.0, weight_decay: float = 0.0, decay: float = 0.0) -> Sgd:
    """Stochastic gradient descent, with settings by name."""
    return Sgd(rate, momentum, weight_decay, decay)


def adam(
    rate: float, *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, decay: float = 0.0
) -> Adam:
    """Adam, with settings by name."""
    return Adam(rate, betas, eps, weight_decay, decay)


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
