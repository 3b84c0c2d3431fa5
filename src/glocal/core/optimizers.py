"""Optimisers as pure functions: a memory in, a memory out; the same rules as `torch.optim`."""

import math
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from glocal.core.errors import InputError
from glocal.core.trees import Params

Number = TypeVar("Number", float, Tensor)


class Optimizer(Protocol):
    """How slopes move params: a rule with a memory. `SGD` and `Adam` are two; a rule of your own needs these three."""

    @property
    def description(self) -> str:
        """Its settings in words."""

    def init(self, params: Params) -> Params:
        """The memory before the first step."""

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Params and memory after a step."""


@dataclass(frozen=True, kw_only=True)
class StepLR:
    """The rate is multiplied by `by` after every `every` rounds; deterministic, so that every device knows it by the round."""

    gamma: float = 0.5
    step_size: int = 1

    def __post_init__(self) -> None:
        _require("lr_schedule", self.gamma, 0 < self.gamma <= 1, "above 0 and at most 1")
        _require("lr_step_size", self.step_size, self.step_size >= 1, "at least 1")

    def factor(self, round_index: Number) -> Number:
        """What is left of the rate in a round.

        >>> [StepLR(gamma=0.5, step_size=10).factor(t) for t in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]
        """
        left: Number = self.gamma ** (round_index // self.step_size)
        return left


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as in `torch.optim.SGD`; the rate in round t is rate / (1 + decay * t), less what shrinks."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_schedule: StepLR | None = None

    def __post_init__(self) -> None:
        _require("lr", self.lr, self.lr > 0, "above 0")
        _require("momentum", self.momentum, 0 <= self.momentum < 1, "at least 0 and below 1")
        _require_nonnegative_decays(self.weight_decay, self.lr_decay)

    @property
    def has_lr_schedule(self) -> bool:
        """Whether the rate is another from round to round."""
        return bool(self.lr_decay) or self.lr_schedule is not None

    def lr_at(self, round_index: Number) -> Number:
        """The rate in a round."""
        return _lr_at(self, round_index)

    @property
    def description(self) -> str:
        """Its settings in words."""
        told = f"rate={self.lr}, momentum={self.momentum}, weight_decay={self.weight_decay}, decay={self.lr_decay}"
        return f"sgd({told}{_describe_schedule(self.lr_schedule)})"

    def init(self, params: Params) -> Params:
        """A velocity for every tensor, if there is momentum."""
        return (
            {name: torch.zeros_like(tensor) for name, tensor in params.items()}
            if self.momentum
            else {}
        )

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """One fused pass over each tensor where torch has one: the passes are the cost."""
        velocity = grads
        if self.weight_decay:
            velocity = {
                n: torch.add(grad, params[n], alpha=self.weight_decay) for n, grad in grads.items()
            }
        if self.momentum:
            velocity = {
                name: torch.add(grad, opt_state[name], alpha=self.momentum)
                for name, grad in velocity.items()
            }
        if self.has_lr_schedule:
            lr_at = self.lr_at(round_index)
            moved = {name: tensor - lr_at * velocity[name] for name, tensor in params.items()}
        else:
            moved = {
                name: torch.sub(tensor, velocity[name], alpha=self.lr)
                for name, tensor in params.items()
            }
        return moved, velocity if self.momentum else {}


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) as in `torch.optim.Adam`; the rate in round t is rate / (1 + decay * t), less what shrinks."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_schedule: StepLR | None = None

    def __post_init__(self) -> None:
        _require("lr", self.lr, self.lr > 0, "above 0")
        _require(
            "betas",
            self.betas,
            all(0 <= beta < 1 for beta in self.betas),
            "each at least 0 and below 1",
        )
        _require_nonnegative_decays(self.weight_decay, self.lr_decay)

    @property
    def description(self) -> str:
        """Its settings in words."""
        settings = f"betas={self.betas}, eps={self.eps}, weight_decay={self.weight_decay}, decay={self.lr_decay}"
        return f"adam(rate={self.lr}, {settings}{_describe_schedule(self.lr_schedule)})"

    def init(self, params: Params) -> Params:
        """Two moments for every tensor, and how many steps there were."""
        zeros = {
            f"{moment}/{name}": torch.zeros_like(tensor)
            for moment in ("first", "second")
            for name, tensor in params.items()
        }
        return {**zeros, "steps": torch.zeros((), device=next(iter(params.values())).device)}

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Both moments, freed of their bias, and the step they give."""
        grads = {name: grad + self.weight_decay * params[name] for name, grad in grads.items()}
        (fade, spread), steps = self.betas, opt_state["steps"] + 1
        first = {n: fade * opt_state[f"first/{n}"] + (1 - fade) * grad for n, grad in grads.items()}
        second = {
            n: spread * opt_state[f"second/{n}"] + (1 - spread) * grad.square()
            for n, grad in grads.items()
        }
        pace = _lr_at(self, round_index) / _one_minus_power(fade, steps)
        scale = _one_minus_power(spread, steps).sqrt()
        moved = {
            n: tensor - pace * first[n] / (second[n].sqrt() / scale + self.eps)
            for n, tensor in params.items()
        }
        return moved, {**_prefixed("first", first), **_prefixed("second", second), "steps": steps}


@dataclass(frozen=True)
class PartitionedOptimizer:
    """Some tensors by a rule of their own: `other_steps` steps of that rule to each step of the main one.

    They are those `other_names` so many names, or whose names begin with it. With 0 turns both step together, every time.
    """

    main: SGD | Adam
    other: SGD | Adam
    other_names: str | frozenset[str]
    other_steps: int = 0

    def __post_init__(self) -> None:
        _require("other_steps", self.other_steps, self.other_steps >= 0, "at least 0")

    @property
    def description(self) -> str:
        """Its settings in words."""
        other_names = (
            self.other_names
            if isinstance(self.other_names, str)
            else f"[{', '.join(sorted(self.other_names))}]"
        )
        return f"{self.main.description}, {other_names} by {self.other.description}, {self.other_steps} turns"

    def init(self, params: Params) -> Params:
        """Both memories, and whose turn it is."""
        opt_states = zip(
            ("main", "other"), (self.main, self.other), self._parts(params), strict=True
        )
        kept = {
            f"{side}/{name}": t
            for side, rule, part in opt_states
            if part
            for name, t in rule.init(part).items()
        }
        return {**kept, "turn": torch.zeros((), device=next(iter(params.values())).device)}

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Both rules step; what it is not the turn of stays as it was."""
        moved: Params = {}
        kept: Params = {}
        sides = zip(
            ("main", "other"),
            (self.main, self.other),
            self._parts(params),
            self._parts(grads),
            strict=True,
        )
        for side, rule, own, down in sides:
            if not own:
                continue
            before = {
                name.removeprefix(f"{side}/"): t
                for name, t in opt_state.items()
                if name.startswith(f"{side}/")
            }
            after, opt_states = rule.step(own, down, before, round_index)
            if self.other_steps:
                now = (opt_state["turn"] >= self.other_steps) == (side == "main")
                after = {
                    name: torch.where(now, tensor, own[name]) for name, tensor in after.items()
                }
                opt_states = {
                    name: torch.where(now, tensor, before[name])
                    for name, tensor in opt_states.items()
                }
            moved |= after
            kept |= {f"{side}/{name}": tensor for name, tensor in opt_states.items()}
        return {name: moved[name] for name in params}, {
            **kept,
            "turn": (opt_state["turn"] + 1) % (self.other_steps + 1),
        }

    def _parts(self, tree: Params) -> tuple[Params, Params]:
        """What the main rule moves, and what the other does."""
        other_names = self.other_names
        other = {
            name: t
            for name, t in tree.items()
            if (
                name.startswith(other_names)
                if isinstance(other_names, str)
                else name in other_names
            )
        }
        return {name: tensor for name, tensor in tree.items() if name not in other}, other


def sgd(
    lr: float,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    lr_schedule: StepLR | None = None,
) -> SGD:
    """Stochastic gradient descent, with settings by name."""
    return SGD(lr, momentum, weight_decay, lr_decay, lr_schedule)


def adam(
    lr: float,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    lr_decay: float = 0.0,
    lr_schedule: StepLR | None = None,
) -> Adam:
    """Adam, with settings by name."""
    return Adam(lr, betas, eps, weight_decay, lr_decay, lr_schedule)


def _lr_at(rule: SGD | Adam, round_index: Number) -> Number:
    pace = rule.lr / (1 + rule.lr_decay * round_index)
    return pace if rule.lr_schedule is None else pace * rule.lr_schedule.factor(round_index)


def _describe_schedule(lr_schedule: StepLR | None) -> str:
    return (
        ""
        if lr_schedule is None
        else f", times {lr_schedule.gamma} every {lr_schedule.step_size} rounds"
    )


def _one_minus_power(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, exact also where the power is near 1."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)


def _prefixed(moment: str, tree: Params) -> Params:
    return {f"{moment}/{name}": tensor for name, tensor in tree.items()}


def _require_nonnegative_decays(weight_decay: float, lr_decay: float) -> None:
    _require("weight_decay", weight_decay, weight_decay >= 0, "at least 0")
    _require("lr_decay", lr_decay, lr_decay >= 0, "at least 0")


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise InputError(f"optimiser: {name} is {value}; it must be {expected}")
