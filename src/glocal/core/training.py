"""Gradient descent on one device: the only training loop."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn import functional

from glocal.core import random, trees
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.modules import Forward, trainable, training_forward
from glocal.core.optimizers import Optimiser
from glocal.core.trees import Params


class Batch(NamedTuple):
    """One step's examples; rows with mask False are padding; key () seeds whatever is random in the step."""

    x: Tensor
    y: Tensor
    group: Tensor | None
    mask: Tensor
    key: Tensor


class Work(NamedTuple):
    """What one device does in one round: order (steps, batch) holds rows of examples, -1 = padding; key and round_index ().

    Of the first `full_steps` steps it is known that they are not wholly padding, so that they need no guarding. `descent`, if an
    engine gives one, is a faster way to take the same steps.
    """

    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int = 0
    descent: "Descent | None" = None


Loss = Callable[[Params, Batch], tuple[Tensor, Params]]
PerExample = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Tensor, Tensor], Tensor]
_AUGMENTATION = -1  # its address among what a step draws


class Pull(NamedTuple):
    """strength/2 * ||params - towards||^2 over the names in `towards`."""

    towards: Params
    strength: float


class Objective(NamedTuple):
    """What a device minimises: loss(params, batch) -> (value, buffers after the step) plus pulls; and the names that may move.

    Tensors that differ from device to device belong into `pulls`: a loss is the same function for all of them.
    """

    loss: Loss
    trains: frozenset[str]
    pulls: tuple[Pull, ...] = ()

    def value(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The whole of what is minimised (), and the buffers after the step."""
        total, buffers = self.loss(params, batch)
        for towards, strength in self.pulls:
            total = total + strength / 2 * trees.squared_distance(trees.pick(params, towards), towards)
        return total, buffers


class Descent(Protocol):
    """Another way to do what `descend` does; None where it does not know how."""

    def __call__(self, objective: Objective, params: Params, work: Work, optimiser: Optimiser) -> tuple[Params, Tensor] | None:
        """Trained params and the mean loss over examples ()."""


@dataclass(frozen=True)
class ModelLoss:
    """The mean over the real rows of per_example(model(x), y) (rows,)."""

    model: nn.Module
    forward: Forward
    per_example: PerExample

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        output, buffers = self.forward(params, batch.x, batch.mask, batch.key)
        return masked_mean(self.per_example(output, batch.y), batch.mask), buffers


@dataclass(frozen=True)
class AugmentedLoss:
    """Another loss, on augment(x, key) instead of x."""

    inner: Loss
    augment: Augment

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        return self.inner(params, batch._replace(x=self.augment(batch.x, random.fold(batch.key, _AUGMENTATION))))


def supervised(model: nn.Module, loss: PerExample) -> Objective:
    """Mean over the real rows of loss(output, y) (rows,); torch's have to have reduction="none"."""
    trains = trainable(model)
    if not trains:
        raise InputError("model: every parameter is frozen; there is nothing to train")
    return Objective(ModelLoss(model, training_forward(model), loss), trains)


def cross_entropy(model: nn.Module) -> Objective:
    """Classification: L_m of the paper's equation 1, from logits."""
    return supervised(model, cross_entropy_of_each)


def cross_entropy_of_each(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of every example (rows,)."""
    return functional.cross_entropy(logits, labels, reduction="none")


def pulled(objective: Objective, towards: Params, strength: float) -> Objective:
    """Add strength/2 * ||params - towards||^2 over the weights that move."""
    pull = Pull(trees.pick(towards, objective.trains), strength)
    return objective._replace(pulls=(*objective.pulls, pull))


def augmented(objective: Objective, augment: Augment) -> Objective:
    """Train on augment(x, key) instead of x; evaluation never sees it."""
    return objective._replace(loss=AugmentedLoss(objective.loss, augment))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values (rows,) whose mask is True; 0 when there are none."""
    _require_one_each(values, mask)
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp(min=1)


def _require_one_each(values: object, mask: Tensor) -> None:
    """Refuse a loss that reduces: padded rows have entered its mean, and no mask takes them out."""
    if isinstance(values, Tensor) and values.shape == mask.shape:
        return
    rows, shape = len(mask), getattr(values, "shape", None)
    gave = f"a {type(values).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise InputError(
        f"loss: it gave {gave} for {rows} examples; one value per example, shape ({rows},), "
        "was expected: use reduction='none', and a mean or sum over every other axis"
    )


def descend(objective: Objective, params: Params, work: Work, optimiser: Optimiser) -> tuple[Params, Tensor]:
    """Train params through the work's steps; returns them and the mean loss over examples (). A padded step is the identity."""
    taken = work.descent(objective, params, work, optimiser) if work.descent else None
    if taken is not None:
        return taken
    # the caller's tensors stay as they are
    moving = {name: tensor.clone() for name, tensor in trees.pick(params, objective.trains).items()}
    carried = trees.pick(params, params.keys() - objective.trains)
    memory, losses = optimiser.init(moving), []
    for step, batch in enumerate(batches(work)):
        slopes, loss, buffers = slopes_of(objective, moving, carried, batch)
        before = (moving, memory, carried)
        moving, memory = optimiser.step(moving, slopes, memory, work.round_index)
        carried = {**carried, **buffers}
        if step >= work.full_steps:  # else a device out of data coasts on its momentum
            moving, memory, carried = map(partial(trees.where, batch.mask.any()), (moving, memory, carried), before)
        losses.append(loss)
    trained = {**moving, **carried}
    return {name: trained[name] for name in params}, mean_over_examples(losses, work.order)


def batches(work: Work) -> Iterator[Batch]:
    """Each step's examples; padding shows the device's own first row, masked."""
    rows, mask, keys = visits(work.order, work.key)
    for step in range(len(rows)):
        yield gathered_batch(work.examples, rows[step], mask[step], keys[step])


def visits(order: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and mask (..., steps, batch) and keys (..., steps) of all steps, of one device or of many."""
    mask = order >= 0
    steps = torch.arange(order.shape[-2], device=order.device)
    return torch.where(mask, order, order[..., :1, :1]), mask, random.fold(key[..., None], steps)


def gathered_batch(examples: Examples, rows: Tensor, mask: Tensor, key: Tensor) -> Batch:
    """One step's examples, of one device or of many: x (..., batch, ...)."""
    x, y, group = examples
    return Batch(x[rows], y[rows], None if group is None else group[rows], mask, key)


def made_beforehand(augment: Augment, examples: Examples, order: Tensor, key: Tensor) -> tuple[Examples, Tensor]:
    """Every visit's augmented example, one after the other, and the order (..., steps, batch) that visits them in turn.

    For one device or for many; a loss without the augmentation then takes the steps that the augmented one would have taken.
    """
    rows, mask, keys = visits(order, key)
    for _ in range(keys.dim()):
        augment = torch.vmap(augment)
    x, y, _ = gathered_batch(examples, rows, mask, keys)[:3]
    made = augment(x, random.fold(keys, _AUGMENTATION)).flatten(0, order.dim() - 1)
    in_turn = torch.arange(order.numel(), device=order.device).reshape(order.shape)
    return Examples(made, y.flatten(), None), torch.where(mask, in_turn, -1)


def mean_over_examples(losses: Sequence[Tensor], order: Tensor) -> Tensor:
    """The mean (...) of the steps' losses, each (...) counting as often as it has real rows in order (..., steps, batch)."""
    counts = (order >= 0).sum(-1)
    values = torch.stack(list(losses), -1)
    kept = torch.where(counts > 0, values, torch.zeros_like(values))  # a padded step's loss is not one
    return (kept * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def slopes_of(objective: Objective, moving: Params, carried: Params, batch: Batch) -> tuple[Params, Tensor, Params]:
    """Slopes of one step, its loss, and the buffers after it."""

    def loss(weights: Params) -> tuple[Tensor, Params]:
        return objective.value({**weights, **carried}, batch)

    slopes, (value, buffers) = grad_and_value(loss, has_aux=True)(moving)
    return slopes, value, buffers
