"""`descend` for all devices of a batch at once: called from within `vmap`, it works on the tensors beneath it (devices, ...).

There a step can be traced, compiled or replaced by a fused one, which `vmap` itself knows nothing of.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.errors import brief
from glocal.core.optimizers import Adam, Optimiser, Sgd
from glocal.core.training import (
    AugmentedLoss,
    Batch,
    ModelLoss,
    Objective,
    Pull,
    Work,
    gathered_batch,
    made_beforehand,
    mean_over_examples,
    visits,
)
from glocal.core.trees import Params
from glocal.engines.conv_matmul import Products
from glocal.engines.fused.chain import Chain, chain_of
from glocal.engines.fused.on_gpu import descend_together, why_not
from glocal.engines.traced import FlatStep, Place, Signature, flat_step, trace, traceable

Compile = Callable[[FlatStep], FlatStep]


class Journey(NamedTuple):
    """A descent of many devices: trees (devices, ...), orders (devices, steps, batch), keys (devices,), round_index ()."""

    objective: Objective
    optimiser: Optimiser
    params: Params
    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int


class Together:
    """A `Descent` for use under `vmap`: `take` is how a journey is made once its tensors are bare.

    Where the loss or the optimiser may hold tensors of the call that made them it passes, unless `take` itself `refuses` those.
    """

    def __init__(self, take: Callable[[Journey], tuple[Params, Tensor]], *, refuses: bool = False) -> None:
        self.take, self.refuses = take, refuses

    def __call__(self, objective: Objective, params: Params, work: Work, optimiser: Optimiser) -> tuple[Params, Tensor] | None:
        """Trained params and the loss (); None where it passes."""
        if not self.refuses and not (traceable(objective.loss) and isinstance(optimiser, Sgd | Adam)):
            return None
        sizes = [len(params), *(len(pull.towards) for pull in objective.pulls)]
        towards = [tensor for pull in objective.pulls for tensor in pull.towards.values()]
        ticket = _Ticket(self, objective, optimiser, work, [*params], sizes)
        *trained, loss = _Beneath.apply(  # type: ignore[no-untyped-call]
            ticket, *params.values(), *towards, work.order, work.key, work.round_index
        )
        return dict(zip(params, trained, strict=True)), loss


class _Ticket:
    """What goes beneath `vmap` beside tensors."""

    def __init__(
        self, together: Together, objective: Objective, optimiser: Optimiser, work: Work, names: list[str], sizes: list[int]
    ) -> None:
        self.together, self.objective, self.optimiser = together, objective, optimiser
        self.examples, self.full_steps, self.names, self.sizes = work.examples, work.full_steps, names, sizes

    def journey(self, tensors: Sequence[Tensor]) -> Journey:
        """The journey whose tensors, now bare, are these."""
        *rest, order, key, round_index = tensors
        params, rest = dict(zip(self.names, rest[: self.sizes[0]], strict=True)), rest[self.sizes[0] :]
        pulls = []
        for pull in self.objective.pulls:
            pulls.append(Pull(dict(zip(pull.towards, rest, strict=False)), pull.strength))
            rest = rest[len(pull.towards) :]
        objective = self.objective._replace(pulls=tuple(pulls))
        return Journey(objective, self.optimiser, params, self.examples, order, key, round_index, self.full_steps)


class _Beneath(torch.autograd.Function):
    """The door: torch calls `vmap` below with bare tensors and tells which of their axes are devices."""

    @staticmethod
    def forward(ticket: _Ticket, *tensors: Tensor) -> tuple[Tensor, ...]:
        raise RuntimeError("a descent of many devices was asked for one")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], ticket: _Ticket, *tensors: Tensor) -> Any:
        *many, _ = [_first(tensor, axis, info.batch_size) for tensor, axis in zip(tensors, in_dims[1:], strict=True)]
        params, loss = ticket.together.take(ticket.journey([*many, tensors[-1]]))
        return (*params.values(), loss), (0,) * (len(params) + 1)


def _first(tensor: Tensor, axis: int | None, size: int) -> Tensor:
    """The tensor with devices along its first axis."""
    return tensor.expand(size, *tensor.shape) if axis is None else tensor.movedim(axis, 0)


class Steps:
    """Journeys step by step, each step traced once per shape, then compiled if `compiled` says how."""

    def __init__(self, *, compiled: Compile | None = None, products: bool = False) -> None:
        self.compiled, self.products = compiled, products
        self.steps: dict[Hashable, FlatStep] = {}

    def __call__(self, journey: Journey) -> tuple[Params, Tensor]:
        """Trained params (devices, ...) and losses (devices,)."""
        objective, params, order = journey.objective, journey.params, journey.order
        moving = {name: tensor.clone() for name, tensor in trees.pick(params, objective.trains).items()}
        carried = {name: tensor.clone() for name, tensor in params.items() if name not in objective.trains}
        place = Place(moving, torch.vmap(journey.optimiser.init)(moving), carried)
        (rows, mask, keys), losses = visits(order, journey.key), []
        for step in range(order.shape[1]):
            batch = gathered_batch(journey.examples, rows[:, step], mask[:, step], keys[:, step])
            place, loss = self._taken(journey, place, batch, guard=step >= journey.full_steps)
            losses.append(loss)
        trained = {**place.moving, **place.carried}
        return {name: trained[name] for name in params}, mean_over_examples(losses, order)

    def _taken(self, journey: Journey, place: Place, batch: Batch, *, guard: bool) -> tuple[Place, Tensor]:
        signature = Signature.of(place, journey.objective.pulls, batch)
        tensors = signature.flat(place, journey.objective.pulls, batch, journey.round_index)
        key = (journey.objective.loss, journey.optimiser, signature, guard, tuple((t.shape, t.dtype) for t in tensors))
        if key not in self.steps:
            self.steps[key] = self._made(journey, signature, tensors, guard=guard)
        after = self.steps[key](*tensors)
        return signature.place(after), after[-1]

    def _made(self, journey: Journey, signature: Signature, tensors: Sequence[Tensor], *, guard: bool) -> FlatStep:
        one = flat_step(journey.objective, journey.optimiser, signature, guard=guard)
        many = torch.vmap(one, in_dims=(*(0 for _ in tensors[:-1]), None), randomness="error")
        with Products(on=self.products):
            traced = trace(many, [tensor.clone() for tensor in tensors])
        return self.compiled(traced) if self.compiled else traced


class FusedJourneys:
    """Journeys by the fused steps for a GPU; a model that they do not know is refused with the reason."""

    def __init__(self, precision: str) -> None:
        self.precision = precision

    def __call__(self, journey: Journey) -> tuple[Params, Tensor]:
        """Trained params (devices, ...) and losses (devices,)."""
        try:
            return self._taken(self._chain(journey), _plain(journey))
        except (RuntimeError, ValueError):
            raise
        except Exception as error:  # whatever Triton raises where it cannot compile
            raise RuntimeError(f"the fused steps cannot be compiled here ({brief(error)})") from error

    def _taken(self, chain: Chain, journey: Journey) -> tuple[Params, Tensor]:
        rule = journey.optimiser
        assert isinstance(rule, Sgd)
        return descend_together(
            chain,
            journey.params,
            journey.examples.x,
            journey.examples.y,
            journey.order,
            rate=rule.pace(journey.round_index) if rule.varies else rule.rate,
            momentum=rule.momentum,
            weight_decay=rule.weight_decay,
            pulls=journey.objective.pulls,
            precision="tf32" if self.precision == "tf32" else "fp32",
        )

    def _chain(self, journey: Journey) -> Chain:
        """The model as a chain; looked at every time, for what may be done with it depends on the whole journey."""
        one = _plain(journey._replace(order=journey.order[:1, :1, :1], key=journey.key[:1]))
        loss, inputs = one.objective.loss, tuple(one.examples.x.shape[1:])
        dtypes = {tensor.dtype for tensor in (*journey.params.values(), one.examples.x)}
        reason = why_not(one.objective, journey.optimiser, inputs, dtypes.pop() if len(dtypes) == 1 else torch.float64)
        if reason:
            raise NotImplementedError(reason)
        assert isinstance(loss, ModelLoss)
        return chain_of(loss.model, inputs)


def _plain(journey: Journey) -> Journey:
    """The same journey on examples that are augmented beforehand, if they are to be."""
    loss = journey.objective.loss
    if type(loss) is not AugmentedLoss:
        return journey
    examples, order = made_beforehand(loss.augment, journey.examples, journey.order, journey.key)
    return journey._replace(objective=journey.objective._replace(loss=loss.inner), examples=examples, order=order)
