"""Local training of one client: the only training loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value

from glocal.core import random, trees
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.losses import PerExampleLoss, PerExampleValues
from glocal.core.modules import Adapt, Forward, trainable_names
from glocal.core.optimizers import Optimizer
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


class Work(NamedTuple):
    """The work of one client in one round, with key () and round_index ().

    order (steps, batch) holds row numbers of the examples; -1 is padding. The first `full_steps`
    steps are known to have real rows, so they need no guard. `trainer`, if an engine sets one, is a
    faster way to take the same steps.
    """

    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int = 0
    trainer: "LocalTrainer | None" = None


LossFn = Callable[[Params, Batch], tuple[Tensor, Params]]
Augment = Callable[[Tensor, Tensor], Tensor]
_AUGMENTATION = -1  # the address of augmentation within the key of a step


class Proximal(NamedTuple):
    """strength/2 * ||params - anchor||^2 over the names in `anchor`."""

    anchor: Params
    strength: float


class Objective(NamedTuple):
    """What a client minimises: a loss plus proximal terms.

    The loss is a function loss(params, batch) -> (value, buffers after the step).

    `trainable` names the tensors that training may change. Tensors that differ between clients
    belong in `proximal`, because all clients have the same loss function.
    """

    loss: LossFn
    trainable: frozenset[str]
    proximal: tuple[Proximal, ...] = ()

    def value(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss plus all proximal terms (), and the buffers after the step."""
        total, buffers = self.loss(params, batch)
        for anchor, strength in self.proximal:
            distance = trees.squared_distance(trees.pick(params, anchor), anchor)
            total = total + strength / 2 * distance
        return total, buffers


class LocalTrainer(Protocol):
    """Another implementation of `local_train`; it returns None for an objective beyond it."""

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        """Trained params and the mean loss over examples ()."""


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


def with_proximal(objective: Objective, anchor: Params, strength: float) -> Objective:
    """Add strength/2 * ||params - anchor||^2 over the trainable tensors."""
    term = Proximal(trees.pick(anchor, objective.trainable), strength)
    return objective._replace(proximal=(*objective.proximal, term))


def with_augmentation(objective: Objective, augment: Augment) -> Objective:
    """Train on augment(x, key) instead of x; evaluation does not augment."""
    return objective._replace(loss=AugmentedLoss(objective.loss, augment))


def masked_mean(values: PerExampleValues, mask: Tensor) -> Tensor:
    """The mean of a loss over the rows with mask True; 0 when there are none.

    `values` are (rows,), or (rows, ...) whose mean counts, or a pair of sums and weights (rows,).
    """
    if isinstance(values, tuple):
        return _ratio(*values, mask)
    _require_per_example(values, mask)
    by_row = values if values.dim() == 1 else values.flatten(1).mean(1)
    real = torch.where(mask, by_row, torch.zeros_like(by_row))
    return real.sum() / mask.sum().clamp(min=1)


def _ratio(sums: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """The total of the real rows' sums by that of their weights; 0 where nothing has a weight."""
    for values in (sums, weights):
        _require_one_value(values, mask)
    total = torch.where(mask, sums, torch.zeros_like(sums)).sum()
    weight = torch.where(mask, weights, torch.zeros_like(weights)).sum()
    return torch.where(weight > 0, total / torch.where(weight > 0, weight, 1), 0 * total)


def _require_per_example(values: object, mask: Tensor) -> None:
    """Refuse a loss that reduces: padded rows are in its mean, and no mask can remove them."""
    if isinstance(values, Tensor) and values.shape[:1] == mask.shape:
        return
    _refuse_shape(values, mask, "one value per example")


def _require_one_value(values: object, mask: Tensor) -> None:
    if not isinstance(values, Tensor) or values.shape != mask.shape:
        _refuse_shape(values, mask, "a pair of sums and weights, one of each per example")


def _refuse_shape(values: object, mask: Tensor, expected: str) -> None:
    rows, shape = len(mask), getattr(values, "shape", None)
    returned = f"a {type(values).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise InputError(
        f"loss: it returned {returned} for {rows} examples; {expected}, shape ({rows},), was "
        "expected: use reduction='none' in it, or give torch's loss itself"
    )


class _TrainState(NamedTuple):
    """What one step passes to the next; `fixed` holds buffers and frozen parameters."""

    trainable: Params
    opt_state: Params
    fixed: Params


def local_train(
    objective: Objective, params: Params, work: Work, optimizer: Optimizer
) -> tuple[Params, Tensor]:
    """Train params by all steps of the work; returns them and the mean loss over examples ().

    A padded step is the identity: without the guard, momentum would go on moving the params of a
    client that has no more data, while clients with more data train in the same batch.
    """
    if work.trainer:
        result = work.trainer(objective, params, work, optimizer)
        if result is not None:
            return result
    state = _initial_state(objective, params, optimizer)
    losses = []
    for step, batch in enumerate(batches(work)):
        before = state
        grads, loss, buffers = compute_grads(objective, state.trainable, state.fixed, batch)
        trainable, opt_state = optimizer.step(
            state.trainable, grads, state.opt_state, work.round_index
        )
        state = _TrainState(trainable, opt_state, {**state.fixed, **buffers})
        if step >= work.full_steps:
            state = _where_state(batch.mask.any(), state, before)
        losses.append(loss)
    trained = {**state.trainable, **state.fixed}
    return {name: trained[name] for name in params}, mean_example_loss(losses, work.order)


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
    """The batch of each step; a padded row is a masked copy of the client's first row."""
    rows, mask, keys = step_indices(work.order, work.key)
    for step in range(len(rows)):
        yield take_batch(work.examples, rows[step], mask[step], keys[step])


def step_indices(order: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and mask (..., steps, batch) and keys (..., steps) of all steps.

    For one client, or for many with more axes in front.
    """
    mask = order >= 0
    steps = torch.arange(order.shape[-2], device=order.device)
    rows = torch.where(mask, order, order[..., :1, :1])
    return rows, mask, random.fold_in(key[..., None], steps)


def take_batch(examples: Examples, rows: Tensor, mask: Tensor, key: Tensor) -> Batch:
    """The examples of one step, of one client or of many: x (..., batch, ...)."""
    x = take_rows(examples.x, rows)
    y = take_rows(examples.y, rows) if examples.has_targets else x
    return Batch(x, y, None if examples.group is None else examples.group[rows], mask, key)


def precompute_augmented(
    augment: Augment, examples: Examples, order: Tensor, key: Tensor
) -> tuple[Examples, Tensor]:
    """All augmented examples of a round in a row, and an order (..., steps, batch) of them.

    For one client or for many. Training on them without augmentation takes the same steps as
    training with augmentation.
    """
    rows, mask, keys = step_indices(order, key)
    for _ in range(keys.dim()):
        augment = torch.vmap(augment)
    x, y, _ = take_batch(examples, rows, mask, keys)[:3]
    augmented = augment(x, random.fold_in(keys, _AUGMENTATION)).flatten(0, order.dim() - 1)
    places = torch.arange(order.numel(), device=order.device).reshape(order.shape)
    return Examples(augmented, y.flatten(), None), torch.where(mask, places, -1)


def mean_example_loss(losses: Sequence[Tensor], order: Tensor) -> Tensor:
    """The mean (...) over examples of the losses (...) of all steps.

    Each step is weighted by its number of real rows in order (..., steps, batch).
    """
    counts = (order >= 0).sum(-1)
    values = torch.stack(list(losses), -1)
    real = torch.where(counts > 0, values, torch.zeros_like(values))  # a padded step has no loss
    return (real * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def compute_grads(
    objective: Objective, trainable: Params, fixed: Params, batch: Batch
) -> tuple[Params, Tensor, Params]:
    """The gradients of one step, its loss, and the buffers after it."""

    def loss(weights: Params) -> tuple[Tensor, Params]:
        return objective.value({**weights, **fixed}, batch)

    grads, (value, buffers) = grad_and_value(loss, has_aux=True)(trainable)
    return grads, value, buffers
