"""Local training of one client: the only training loop."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from glocal.core import random, trees
from glocal.core.checks import require_instance
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.losses import PerExampleLoss
from glocal.core.masked_mean import masked_mean
from glocal.core.modules import Adapt, Forward, trainable_names
from glocal.core.one_line import one_line
from glocal.core.optimizers import Optimizer
from glocal.core.torch_optimizers import as_optimizer
from glocal.core.trees import Params
from glocal.core.values import Values, require_tensor, take_rows


class Batch(NamedTuple):
    """The examples of one step; rows with mask False are padding; key () seeds its randomness.

    Inputs x and targets y are as in the store of examples, with the rows of this step.
    """

    x: Values
    y: Values
    group: Tensor | None
    mask: Tensor
    key: Tensor


class WeightedSum(NamedTuple):
    """A mean that merges over steps, clients and processes: total / weight, each ().

    >>> WeightedSum(torch.tensor(3.0), torch.tensor(2.0)).mean
    tensor(1.5000)
    """

    total: Tensor
    weight: Tensor

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def mean(self) -> Tensor:
        """The mean; 0 where nothing was counted."""
        return torch.where(self.weight > 0, self.total / self.weight.clamp(min=1e-12), 0.0)


class Work(NamedTuple):
    """The work of one client in one round, or of many with one more axis in front.

    order (epochs, steps, batch) holds row numbers of the examples; -1 is padding. Every epoch is
    padded at its own end, so that a round can be cut at its epochs. key () is that of the client's
    round; keys (epochs, steps) seed each step, and do not depend on the padding. `pad_row` () is a
    row of the client's own, which stands where padding would be read. The first `full_steps` steps
    of every epoch are known to have real rows, so they need no guard. `trainer`, if an engine sets
    one, is a faster way to take the same steps.

    >>> examples = Examples(torch.zeros(5, 3), torch.arange(5))
    >>> order = torch.tensor([[[0, 2], [4, -1]]])  # one epoch of two steps; the last is padded
    >>> int(Work.of(examples, order, torch.tensor(7), torch.tensor(0)).num_steps)
    2
    """

    examples: Examples
    order: Tensor
    key: Tensor
    keys: Tensor
    pad_row: Tensor
    round_index: Tensor
    full_steps: int = 0
    trainer: "LocalTrainer | None" = None

    def __repr__(self) -> str:
        return one_line(self)

    @classmethod
    def of(
        cls,
        examples: Examples,
        order: Tensor,
        key: Tensor,
        round_index: Tensor,
        *,
        full_steps: int = 0,
        trainer: "LocalTrainer | None" = None,
    ) -> "Work":
        """From the key () of the client's round."""
        pad_row = order[..., 0, 0, 0].clamp(min=0)
        keys = _step_keys(key, order)
        return cls(examples, order, key, keys, pad_row, round_index, full_steps, trainer)

    @property
    def flat_order(self) -> Tensor:
        """The order without epochs (..., steps, batch)."""
        return self.order.flatten(-3, -2)

    @property
    def flat_keys(self) -> Tensor:
        """The keys without epochs (..., steps)."""
        return self.keys.flatten(-2)

    @property
    def num_steps(self) -> Tensor:
        """The number of steps that are not padding ()."""
        return (self.order >= 0).any(-1).sum((-2, -1))

    def epochs(self, start: int, stop: int | None = None) -> "Work":
        """Some of the epochs."""
        cut = slice(start, stop)
        return self._replace(order=self.order[cut], keys=self.keys[cut])

    def steps(self) -> "Iterator[Work]":
        """The work of each step alone."""
        for epoch in range(self.order.shape[0]):
            for step in range(self.order.shape[1]):
                yield self._replace(
                    order=self.order[epoch : epoch + 1, step : step + 1],
                    keys=self.keys[epoch : epoch + 1, step : step + 1],
                    full_steps=int(step < self.full_steps),
                )

    def needs_guard(self, step: int) -> bool:
        """Whether a step, counted over all epochs, may be padding."""
        return step % self.order.shape[-2] >= self.full_steps


def _step_keys(key: Tensor, order: Tensor) -> Tensor:
    """The key of every step (..., epochs, steps) from a client's key (...).

    A step is addressed by its number among the client's own: padding does not count, or the numbers
    would depend on who else is in the batch.
    """
    epochs, steps = order.shape[-3:-1]
    own_steps = (order[..., 0, :, :] >= 0).any(-1).sum(-1)[..., None, None]
    epoch = torch.arange(epochs, device=order.device)[:, None]
    step = torch.arange(steps, device=order.device)
    return random.fold_in(key[..., None, None], epoch * own_steps + step)


LossFn = Callable[[Params, Batch], tuple[Tensor, Params]]
Augment = Callable[[Tensor, Tensor], Tensor]
_AUGMENTATION = -1  # the address of augmentation within the key of a step


class Proximal(NamedTuple):
    """strength/2 * ||params - anchor||^2 over the names in `anchor`."""

    anchor: Params
    strength: float


class Objective(NamedTuple):
    """What a client minimises: a loss plus proximal terms, and a constant in its gradient.

    The loss is a function loss(params, batch) -> (value, buffers after the step). `trainable` names
    the tensors that training may change. `linear` is added to the gradient, as by a term
    <linear, params>; it is no part of the value.

    Engines read an objective as data. Tensors that differ between clients belong in `proximal` and
    `linear`, because all clients have the same loss function.

    >>> def square(params, batch):
    ...     return params["w"].square().sum(), {}
    >>> objective = Objective(square, frozenset(["w"])).near({"w": torch.ones(2)}, strength=0.1)
    >>> len(objective.proximal), sorted(objective.trainable)
    (1, ['w'])
    """

    loss: LossFn
    trainable: frozenset[str]
    proximal: tuple[Proximal, ...] = ()
    linear: Params = {}  # noqa: RUF012  (never changed)

    def __repr__(self) -> str:
        return one_line(self)

    def value(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss plus all proximal terms (), and the buffers after the step."""
        total, buffers = self.loss(params, batch)
        for anchor, strength in self.proximal:
            distance = trees.squared_distance(trees.pick(params, anchor), anchor)
            total = total + strength / 2 * distance
        return total, buffers

    def only(self, names: Iterable[str]) -> "Objective":
        """Train these tensors alone."""
        return self._replace(trainable=self.trainable & frozenset(names))

    def near(self, anchor: Params, strength: float) -> "Objective":
        """Add strength/2 * ||params - anchor||^2 over the trainable tensors, if there are any."""
        chosen = trees.pick(anchor, self.trainable)
        if not chosen:
            return self
        return self._replace(proximal=(*self.proximal, Proximal(chosen, strength)))

    def plus_linear(self, direction: Params) -> "Objective":
        """Add <direction, params> over the trainable tensors."""
        summed = dict(self.linear)
        for name, tensor in trees.pick(direction, self.trainable).items():
            summed[name] = summed[name] + tensor if name in summed else tensor
        return self._replace(linear=summed)


class Trained(NamedTuple):
    """The result of local training: all params, and the loss over the examples of all steps."""

    params: Params
    loss: WeightedSum


class LocalTrainer(Protocol):
    """Another implementation of `local_train`; it returns None for a request beyond it."""

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> Trained | None:
        """Trained params and the loss."""


@dataclass(frozen=True)
class ModelLoss:
    """The mean of per_example(outputs, y) over all rows that are not padding."""

    model: nn.Module
    forward: Forward
    per_example: PerExampleLoss
    adapt: Adapt | None = None  # where the model is not called as model(x)

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        output, buffers = self.forward(params, batch.x, batch.mask, batch.key)
        return masked_mean(self.per_example(output, batch.y), batch.mask), buffers


@dataclass(frozen=True)
class AugmentedLoss:
    """Another loss, on augment(x, key) instead of x."""

    inner: LossFn
    augment: Augment

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        images = require_tensor(batch.x, "augment")
        x = self.augment(images, random.fold_in(batch.key, _AUGMENTATION))
        return self.inner(params, batch._replace(x=x))


def require_trainable_names(model: nn.Module) -> frozenset[str]:
    """The names of the model's trainable parameters; a model without any is refused."""
    trainable = trainable_names(model)
    if not trainable:
        raise InputError("model: every parameter is frozen; there is nothing to train")
    return trainable


def with_augmentation(objective: Objective, augment: Augment) -> Objective:
    """Train on augment(x, key) instead of x; evaluation does not augment."""
    return objective._replace(loss=AugmentedLoss(objective.loss, augment))


class _TrainState(NamedTuple):
    """What one step passes to the next; `fixed` holds buffers and frozen parameters."""

    trainable: Params
    opt_state: Params
    fixed: Params


def local_train(objective: Objective, params: Params, work: Work, optimizer: Optimizer) -> Trained:
    """Train params by all steps of the work: the only place with gradient steps.

    The optimizer starts anew. A padded step is the identity: without the guard, momentum would go
    on moving the params of a client that has no more data, while clients with more data train in
    the same batch.

    >>> from glocal import SGD
    >>> def square(params, batch):
    ...     return params["w"].square().sum() / 2, {}
    >>> examples = Examples(torch.zeros(4, 1), torch.zeros(4))
    >>> order = torch.tensor([[[0, 1], [2, 3]]])
    >>> work = Work.of(examples, order, torch.tensor(0), torch.tensor(0))
    >>> objective = Objective(square, frozenset(["w"]))
    >>> local_train(objective, {"w": torch.tensor([1.0])}, work, SGD(lr=0.5)).params
    {'w': tensor([0.2500])}
    """
    require_instance("local_train: the objective", objective, Objective, "a glocal.Objective")
    require_instance("local_train: the params", params, dict, "a dict of tensors")
    if not objective.trainable <= params.keys():
        missing = sorted(objective.trainable - params.keys())[0]
        raise InputError(f"local_train: the params lack '{missing}'; the objective trains it")
    require_instance("local_train: the work", work, Work, "a glocal.Work")
    optimizer = as_optimizer(optimizer)
    if work.trainer:
        trained = work.trainer(objective, params, work, optimizer)
        if trained is not None:
            return trained
    state = _initial_state(objective, params, optimizer)
    losses: list[Tensor] = []
    for step, batch in enumerate(batches(work)):
        before = state
        grads, loss, buffers = compute_grads(objective, state.trainable, state.fixed, batch)
        trainable, opt_state = optimizer.step(
            state.trainable, grads, state.opt_state, work.round_index
        )
        state = _TrainState(trainable, opt_state, {**state.fixed, **buffers})
        if work.needs_guard(step):
            state = _where_state(batch.mask.any(), state, before)
        losses.append(loss)
    after = {**state.trainable, **state.fixed}
    return Trained({name: after[name] for name in params}, sum_losses(losses, work.flat_order))


def _initial_state(objective: Objective, params: Params, optimizer: Optimizer) -> _TrainState:
    """Trainable tensors are copied: the caller's stay as they are."""
    chosen = trees.pick(params, objective.trainable)
    trainable = {name: tensor.clone() for name, tensor in chosen.items()}
    fixed = trees.pick(params, params.keys() - objective.trainable)
    return _TrainState(trainable, optimizer.init(trainable), fixed)


def _where_state(condition: Tensor, after: _TrainState, before: _TrainState) -> _TrainState:
    return _TrainState(
        trees.where(condition, after.trainable, before.trainable),
        trees.where(condition, after.opt_state, before.opt_state),
        trees.where(condition, after.fixed, before.fixed),
    )


def batches(work: Work) -> Iterator[Batch]:
    """The batch of each step; a padded row is a masked copy of a row of the client's own."""
    rows, mask = row_indices(work.flat_order, work.pad_row)
    keys = work.flat_keys
    for step in range(len(rows)):
        yield take_batch(work.examples, rows[step], mask[step], keys[step])


def row_indices(order: Tensor, pad_row: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and mask (..., steps, batch) of all steps, of one client or of many (...)."""
    mask = order >= 0
    return torch.where(mask, order, pad_row[..., None, None]), mask


def take_batch(examples: Examples, rows: Tensor, mask: Tensor, key: Tensor) -> Batch:
    """The examples of one step, of one client or of many: x (..., batch, ...)."""
    x = take_rows(examples.x, rows)
    y = take_rows(examples.y, rows) if examples.has_targets else x
    return Batch(x, y, None if examples.group is None else examples.group[rows], mask, key)


def precompute_augmented(augment: Augment, work: Work) -> Work:
    """The same work on examples that are augmented in advance, all of a round in a row.

    For one client or for many. Training on them without augmentation takes the same steps as
    training with augmentation.
    """
    order = work.flat_order
    rows, mask = row_indices(order, work.pad_row)
    for _ in range(work.flat_keys.dim()):
        augment = torch.vmap(augment)
    x, y, _ = take_batch(work.examples, rows, mask, work.flat_keys)[:3]
    augmented = augment(x, random.fold_in(work.flat_keys, _AUGMENTATION))
    places = torch.arange(order.numel(), device=order.device).reshape(order.shape)
    return work._replace(
        examples=Examples(augmented.flatten(0, order.dim() - 1), y.flatten(), None),
        order=torch.where(mask, places, -1).reshape(work.order.shape),
        pad_row=places[..., 0, 0],
    )


def sum_losses(losses: Sequence[Tensor], order: Tensor) -> WeightedSum:
    """The losses (...) of all steps, each counted by its real rows in order (..., steps, batch)."""
    counts = (order >= 0).sum(-1)
    values = torch.stack(list(losses), -1)
    real = torch.where(counts > 0, values, torch.zeros_like(values))  # a padded step has no loss
    return WeightedSum((real * counts).sum(-1), counts.sum(-1).to(values.dtype))


def compute_grads(
    objective: Objective, trainable: Params, fixed: Params, batch: Batch
) -> tuple[Params, Tensor, Params]:
    """The gradients of one step, its loss, and the buffers after it."""

    def loss(weights: Params) -> tuple[Tensor, Params]:
        return objective.value({**weights, **fixed}, batch)

    grads, (value, buffers) = grad_and_value(loss, has_aux=True)(trainable)
    for name, direction in objective.linear.items():
        grads[name] = grads[name] + direction
    return grads, value, buffers
