"""Optimizers as pure functions, with the update rules of `torch.optim`: state in, state out."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.checks import require_instance, require_number
from glocal.core.errors import InputError, describe_value
from glocal.core.trees import Params

Number = TypeVar("Number", float, Tensor)


class Optimizer(Protocol):
    """A rule that updates params by their gradients; `SGD` and `Adam` are two.

    A rule of your own needs these three members.
    """

    @property
    def description(self) -> str:
        """The settings in words."""

    def init(self, params: Params) -> Params:
        """The optimizer state before the first step."""

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Params and optimizer state after a step."""


@dataclass(frozen=True, kw_only=True)
class StepLR:
    """The learning rate is multiplied by `gamma` after every `step_size` rounds.

    It depends on the round alone, so that every client knows it.

    >>> SGD(lr=0.1, lr_schedule=StepLR(gamma=0.5, step_size=10)).lr_at(10)
    0.05
    """

    gamma: float = 0.5
    step_size: int = 1

    def __post_init__(self) -> None:
        _require(
            "lr_schedule",
            self.gamma,
            lambda gamma: 0 < gamma <= 1,
            "above 0 and at most 1",
        )
        _require("lr_step_size", self.step_size, lambda size: size >= 1, "of at least 1")

    def factor(self, round_index: Number) -> Number:
        """The factor of the learning rate in a round.

        >>> [StepLR(gamma=0.5, step_size=10).factor(t) for t in (0, 9, 10, 25)]
        [1.0, 1.0, 0.5, 0.25]
        """
        factor: Number = self.gamma ** (round_index // self.step_size)
        return factor


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent as in `torch.optim.SGD`.

    The learning rate in round t is lr / (1 + lr_decay * t), times the factor of `lr_schedule`.

    >>> SGD(lr=0.1, lr_decay=1.0).lr_at(3)
    0.025
    """

    lr: float
    _: KW_ONLY
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_schedule: StepLR | None = None

    def __post_init__(self) -> None:
        _require(
            "momentum",
            self.momentum,
            lambda value: 0 <= value < 1,
            "of at least 0 and below 1",
        )
        _require_rates(self)

    @property
    def has_lr_schedule(self) -> bool:
        """True when the learning rate changes from round to round."""
        return bool(self.lr_decay) or self.lr_schedule is not None

    def lr_at(self, round_index: Number) -> Number:
        """The learning rate in a round."""
        return _lr_at(self, round_index)

    @property
    def description(self) -> str:
        """The settings in words."""
        settings = (
            f"lr={self.lr}, momentum={self.momentum}, "
            f"weight_decay={self.weight_decay}, lr_decay={self.lr_decay}"
        )
        return f"sgd({settings}{_describe_schedule(self.lr_schedule)})"

    def init(self, params: Params) -> Params:
        """A velocity for every tensor, if there is momentum."""
        if not self.momentum:
            return {}
        return {name: torch.zeros_like(tensor) for name, tensor in params.items()}

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """One fused pass over each tensor where torch has one: the passes are the cost."""
        velocity = grads
        if self.weight_decay:
            velocity = _add_scaled(velocity, params, self.weight_decay)
        if self.momentum:
            velocity = _add_scaled(velocity, opt_state, self.momentum)
        updated = {}
        if self.has_lr_schedule:
            lr = self.lr_at(round_index)
            for name, tensor in params.items():
                updated[name] = tensor - lr * velocity[name]
        else:
            for name, tensor in params.items():
                updated[name] = torch.sub(tensor, velocity[name], alpha=self.lr)
        return updated, velocity if self.momentum else {}


class _Moments(NamedTuple):
    """Adam's running means of the gradients and of their squares."""

    first: Params
    second: Params


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) as in `torch.optim.Adam`.

    The learning rate in round t is lr / (1 + lr_decay * t), times the factor of `lr_schedule`.

    >>> Adam(lr=0.001, lr_schedule=StepLR(gamma=0.5, step_size=10)).betas
    (0.9, 0.999)
    """

    lr: float
    _: KW_ONLY
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lr_decay: float = 0.0
    lr_schedule: StepLR | None = None

    decays_gradient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InputError(
                f"optimizer: betas is {describe_value(self.betas)}; two numbers were expected"
            )
        for beta in self.betas:
            _require(
                "betas",
                beta,
                lambda value: 0 <= value < 1,
                "of at least 0 and below 1",
            )
        _require("eps", self.eps, lambda value: value >= 0, "of at least 0")
        _require_rates(self)

    @property
    def description(self) -> str:
        """The settings in words."""
        settings = (
            f"lr={self.lr}, betas={self.betas}, eps={self.eps}, "
            f"weight_decay={self.weight_decay}, lr_decay={self.lr_decay}"
        )
        return f"adam({settings}{_describe_schedule(self.lr_schedule)})"

    def init(self, params: Params) -> Params:
        """Two moments for every tensor, and the number of steps."""
        opt_state = {}
        for moment in ("first", "second"):
            for name, tensor in params.items():
                opt_state[f"{moment}/{name}"] = torch.zeros_like(tensor)
        opt_state["steps"] = _zero_like(params)
        return opt_state

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Update both moments, and move params by their bias-corrected ratio."""
        steps = opt_state["steps"] + 1
        moments = self._update_moments(params, grads, opt_state)
        beta1, beta2 = self.betas
        lr = _lr_at(self, round_index) / _one_minus_power(beta1, steps)
        scale = _one_minus_power(beta2, steps).sqrt()
        updated = {}
        for name, tensor in params.items():
            denominator = moments.second[name].sqrt() / scale + self.eps
            start = self._decayed(tensor, round_index)
            updated[name] = start - lr * moments.first[name] / denominator
        state = {**_prefixed("first", moments.first), **_prefixed("second", moments.second)}
        return updated, {**state, "steps": steps}

    def _decayed(self, tensor: Tensor, round_index: Tensor) -> Tensor:
        """The tensor before its step; Adam's decay is a part of the gradient."""
        return tensor

    def _update_moments(self, params: Params, grads: Params, opt_state: Params) -> _Moments:
        beta1, beta2 = self.betas
        first, second = {}, {}
        for name, plain in grads.items():
            grad = plain + self.weight_decay * params[name] if self.decays_gradient else plain
            first[name] = beta1 * opt_state[f"first/{name}"] + (1 - beta1) * grad
            second[name] = beta2 * opt_state[f"second/{name}"] + (1 - beta2) * grad.square()
        return _Moments(first, second)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019) as in `torch.optim.AdamW`.

    >>> AdamW(lr=0.001).weight_decay
    0.01
    """

    weight_decay: float = 0.01

    decays_gradient: ClassVar[bool] = False

    @property
    def description(self) -> str:
        """The settings in words."""
        return super().description.replace("adam(", "adamw(", 1)

    def _decayed(self, tensor: Tensor, round_index: Tensor) -> Tensor:
        return tensor * (1 - _lr_at(self, round_index) * self.weight_decay)


@dataclass(frozen=True)
class PartitionedOptimizer:
    """Two optimizers, each for its own tensors.

    `other` updates the tensors in `other_names` (or with that prefix, if it is a string), `main`
    all the rest. `other` takes `other_steps` steps for each step of `main`; with 0, both step
    together.
    """

    main: SGD | Adam
    other: SGD | Adam
    other_names: str | frozenset[str]
    other_steps: int = 0

    def __post_init__(self) -> None:
        _require("other_steps", self.other_steps, lambda steps: steps >= 0, "of at least 0")

    @property
    def description(self) -> str:
        """The settings in words."""
        names = self.other_names
        if not isinstance(names, str):
            names = f"[{', '.join(sorted(names))}]"
        other = f"{names} by {self.other.description}"
        return f"{self.main.description}, {other}, {self.other_steps} other steps"

    def init(self, params: Params) -> Params:
        """Both optimizer states, and the step in the cycle of both."""
        parts = self._partition(params)
        opt_state: Params = {}
        for side, rule in self._rules().items():
            if parts[side]:
                opt_state |= _prefixed(side, rule.init(parts[side]))
        return {**opt_state, "turn": _zero_like(params)}

    def step(
        self, params: Params, grads: Params, opt_state: Params, round_index: Tensor
    ) -> tuple[Params, Params]:
        """Both rules step; the result of the rule whose turn it is not is discarded."""
        own, own_grads = self._partition(params), self._partition(grads)
        updated: Params = {}
        state: Params = {}
        for side, rule in self._rules().items():
            if not own[side]:
                continue
            before = _without_prefix(side, opt_state)
            after, rule_state = rule.step(own[side], own_grads[side], before, round_index)
            if self.other_steps:
                is_turn = (opt_state["turn"] >= self.other_steps) == (side == "main")
                after = trees.where(is_turn, after, own[side])
                rule_state = trees.where(is_turn, rule_state, before)
            updated |= after
            state |= _prefixed(side, rule_state)
        state["turn"] = (opt_state["turn"] + 1) % (self.other_steps + 1)
        return {name: updated[name] for name in params}, state

    def _rules(self) -> dict[str, SGD | Adam]:
        return {"main": self.main, "other": self.other}

    def _partition(self, tree: Params) -> dict[str, Params]:
        """The tensors of each rule."""
        parts: dict[str, Params] = {"main": {}, "other": {}}
        for name, tensor in tree.items():
            parts["other" if self._is_other(name) else "main"][name] = tensor
        return parts

    def _is_other(self, name: str) -> bool:
        if isinstance(self.other_names, str):
            return name.startswith(self.other_names)
        return name in self.other_names


def _lr_at(rule: SGD | Adam, round_index: Number) -> Number:
    lr = rule.lr / (1 + rule.lr_decay * round_index)
    return lr if rule.lr_schedule is None else lr * rule.lr_schedule.factor(round_index)


def _describe_schedule(lr_schedule: StepLR | None) -> str:
    if lr_schedule is None:
        return ""
    return f", times {lr_schedule.gamma} every {lr_schedule.step_size} rounds"


def _add_scaled(tree: Params, other: Params, scale: float) -> Params:
    """tree + scale * other, name by name, in one pass over each tensor."""
    return {name: torch.add(tensor, other[name], alpha=scale) for name, tensor in tree.items()}


def _zero_like(params: Params) -> Tensor:
    """A counter () on the device of the params, of which there may be none."""
    device = next((tensor.device for tensor in params.values()), None)
    return torch.zeros((), device=device)


def _one_minus_power(beta: float, steps: Tensor) -> Tensor:
    """1 - beta ** steps, exact also where the power is near 1."""
    return -torch.expm1(steps * math.log(beta)) if beta else torch.ones_like(steps)


def _prefixed(prefix: str, tree: Params) -> Params:
    return {f"{prefix}/{name}": tensor for name, tensor in tree.items()}


def _without_prefix(prefix: str, tree: Params) -> Params:
    """The tensors under a prefix, without it."""
    start = f"{prefix}/"
    part = {}
    for name, tensor in tree.items():
        if name.startswith(start):
            part[name.removeprefix(start)] = tensor
    return part


def _require_rates(rule: "SGD | Adam") -> None:
    _require("lr", rule.lr, lambda value: value > 0, "above 0")
    _require("weight_decay", rule.weight_decay, lambda value: value >= 0, "of at least 0")
    _require("lr_decay", rule.lr_decay, lambda value: value >= 0, "of at least 0")
    require_instance("optimizer: lr_schedule", rule.lr_schedule, StepLR | None, "a StepLR or None")


def _require(name: str, value: object, holds: Callable[[float], bool], expected: str) -> None:
    """Refuse what is not a finite number for which something holds."""
    require_number(f"optimizer: {name}", value, holds, expected)
