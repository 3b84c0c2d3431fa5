"""Gradient descent on one device: the only training loop."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn import functional

from glocal import noise, trees
from glocal.errors import InputError
from glocal.federation import Examples
from glocal.modules import trainable, training_forward
from glocal.optimisers import Optimiser
from glocal.trees import Params


class Batch(NamedTuple):
    """One step's examples; rows with mask False are padding; key () seeds whatever is random in the step."""

    x: Tensor
    y: Tensor
    group: Tensor | None
    mask: Tensor
    key: Tensor


class Work(NamedTuple):
    """What one device does in one round: order (steps, batch) holds rows of examples, -1 = padding; key and round_index ().

    Of the first `full_steps` steps it is known that they are not wholly padding, so that they need no guarding.
    """

    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int = 0


Loss = Callable[[Params, Batch], tuple[Tensor, Params]]
Augment = Callable[[Tensor, Tensor], Tensor]


class Objective(NamedTuple):
    """What a device minimises: loss(params, batch) -> (value, buffers after the step), and the names that may move."""

    loss: Loss
    trains: frozenset[str]


def supervised(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> Objective:
    """Mean over the real rows of loss(output, y) (rows,)."""
    forward, trains = training_forward(model), trainable(model)
    if not trains:
        raise InputError("model: every parameter is frozen; there is nothing to train")

    def mean_loss(params: Params, batch: Batch) -> tuple[Tensor, Params]:
        output, buffers = forward(params, batch.x, batch.mask, batch.key)
        return masked_mean(loss(output, batch.y), batch.mask), buffers

    return Objective(mean_loss, trains)


def cross_entropy(model: nn.Module) -> Objective:
    """Classification: L_m of the paper's equation 1, from logits."""
    return supervised(model, lambda logits, labels: functional.cross_entropy(logits, labels, reduction="none"))


def pulled(objective: Objective, towards: Params, strength: float) -> Objective:
    """Add strength/2 * ||params - towards||^2 over the weights that move."""
    anchor = trees.pick(towards, objective.trains)

    def loss(params: Params, batch: Batch) -> tuple[Tensor, Params]:
        value, buffers = objective.loss(params, batch)
        return value + strength / 2 * trees.squared_distance(trees.pick(params, anchor), anchor), buffers

    return objective._replace(loss=loss)


def augmented(objective: Objective, augment: Augment) -> Objective:
    """Train on augment(x, key) instead of x; evaluation never sees it."""

    def loss(params: Params, batch: Batch) -> tuple[Tensor, Params]:
        return objective.loss(params, batch._replace(x=augment(batch.x, noise.fold(batch.key, -1))))

    return objective._replace(loss=loss)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values (rows,) whose mask is True; 0 when there are none."""
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp(min=1)


def descend(objective: Objective, params: Params, work: Work, optimiser: Optimiser) -> tuple[Params, Tensor]:
    """Train params through the work's steps; returns them and the mean loss over examples (). A padded step is the identity."""
    moving = {
        name: tensor.clone() for name, tensor in trees.pick(params, objective.trains).items()
    }  # the caller's stay as they are
    carried = trees.pick(params, params.keys() - objective.trains)
    memory = optimiser.init(moving)
    total, seen = params_zero(params), params_zero(params)
    for step in range(work.order.shape[0]):
        batch = batch_at(work, step)
        slopes, loss, buffers = _slopes(objective, moving, carried, batch)
        before = (moving, memory, carried)
        moving, memory = optimiser.step(moving, slopes, memory, work.round_index)
        carried = {**carried, **buffers}
        if step >= work.full_steps:  # else a device out of data coasts on its momentum
            active = batch.mask.any()
            moving, memory, carried = map(partial(trees.where, active), (moving, memory, carried), before)
        total, seen = total + loss * batch.mask.sum(), seen + batch.mask.sum()
    trained = {**moving, **carried}
    return {name: trained[name] for name in params}, total / seen.clamp(min=1)


def batch_at(work: Work, step: int) -> Batch:
    """Gather one step's examples; padding shows the device's own first row, masked."""
    mask = work.order[step] >= 0
    rows = torch.where(mask, work.order[step], work.order[0, 0])
    x, y, group = work.examples
    return Batch(x[rows], y[rows], None if group is None else group[rows], mask, noise.fold(work.key, step))


def _slopes(objective: Objective, moving: Params, carried: Params, batch: Batch) -> tuple[Params, Tensor, Params]:
    def loss(weights: Params) -> tuple[Tensor, Params]:
        return objective.loss({**weights, **carried}, batch)

    slopes, (value, buffers) = grad_and_value(loss, has_aux=True)(moving)
    return slopes, value, buffers


def params_zero(params: Params) -> Tensor:
    """A zero () on the device that the params are on."""
    return torch.zeros((), device=next(iter(params.values())).device)
