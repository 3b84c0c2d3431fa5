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
from glocal.core.modules import Forward, trainable_names, training_forward
from glocal.core.optimizers import Optimizer
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

    Of the first `full_steps` steps it is known that they are not wholly padding, so that they need no guarding. `trainer`, if an
    engine gives one, is a faster way to take the same steps.
    """

    examples: Examples
    order: Tensor
    key: Tensor
    round_index: Tensor
    full_steps: int = 0
    trainer: "LocalTrainer | None" = None


LossFn = Callable[[Params, Batch], tuple[Tensor, Params]]
PerExampleLoss = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Tensor, Tensor], Tensor]
_AUGMENTATION = -1  # its address among what a step draws


class Proximal(NamedTuple):
    """strength/2 * ||params - towards||^2 over the names in `anchor`."""

    anchor: Params
    strength: float


class Objective(NamedTuple):
    """What a device minimises: loss(params, batch) -> (value, buffers after the step) plus pulls; and the names that may move.

    Tensors that differ from device to device belong into `proximal`: a loss is the same function for all of them.
    """

    loss: LossFn
    trainable: frozenset[str]
    proximal: tuple[Proximal, ...] = ()

    def value(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The whole of what is minimised (), and the buffers after the step."""
        total, buffers = self.loss(params, batch)
        for anchor, strength in self.proximal:
            total = total + strength / 2 * trees.squared_distance(
                trees.pick(params, anchor), anchor
            )
        return total, buffers


class LocalTrainer(Protocol):
    """Another way to do what `local_train` does; None where it does not know how."""

    def __call__(
        self, objective: Objective, params: Params, work: Work, optimizer: Optimizer
    ) -> tuple[Params, Tensor] | None:
        """Trained params and the mean loss over examples ()."""


@dataclass(frozen=True)
class ModelLoss:
    """The mean over the real rows of per_example(model(x), y) (rows,)."""

    model: nn.Module
    forward: Forward
    per_example: PerExampleLoss

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
        return self.inner(
            params,
            batch._replace(x=self.augment(batch.x, random.fold_in(batch.key, _AUGMENTATION))),
        )


def supervised(model: nn.Module, loss: PerExampleLoss) -> Objective:
    """Mean over the real rows of loss(output, y) (rows,); torch's have to have reduction="none"."""
    trainable = trainable_names(model)
    if not trainable:
        raise InputError("model: every parameter is frozen; there is nothing to train")
    return Objective(ModelLoss(model, training_forward(model), loss), trainable)


def cross_entropy(model: nn.Module) -> Objective:
    """Classification: L_m of the paper's equation 1, from logits."""
    return supervised(model, per_example_cross_entropy)


def per_example_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The cross entropy of every example (rows,)."""
    return functional.cross_entropy(logits, labels, reduction="none")


def with_proximal(objective: Objective, anchor: Params, strength: float) -> Objective:
    """Add strength/2 * ||params - towards||^2 over the weights that move."""
    pull = Proximal(trees.pick(anchor, objective.trainable), strength)
    return objective._replace(proximal=(*objective.proximal, pull))


def with_augmentation(objective: Objective, augment: Augment) -> Objective:
    """Train on augment(x, key) instead of x; evaluation never sees it."""
    return objective._replace(loss=AugmentedLoss(objective.loss, augment))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of the values (rows,) whose mask is True; 0 when there are none."""
    _require_per_example(values, mask)
    kept = torch.where(mask, values, torch.zeros_like(values))
    return kept.sum() / mask.sum().clamp(min=1)


def _require_per_example(values: object, mask: Tensor) -> None:
    """Refuse a loss that reduces: padded rows have entered its mean, and no mask takes them out."""
    if isinstance(values, Tensor) and values.shape == mask.shape:
        return
    rows, shape = len(mask), getattr(values, "shape", None)
    gave = f"a {type(values).__name__}" if shape is None else f"shape {tuple(shape)}"
    raise InputError(
        f"loss: it gave {gave} for {rows} examples; one value per example, shape ({rows},), "
        "was expected: use reduction='none', and a mean or sum over every other axis"
    )


def local_train(
    objective: Objective, params: Params, work: Work, optimizer: Optimizer
) -> tuple[Params, Tensor]:
    """Train params through the work's steps; returns them and the mean loss over examples (). A padded step is the identity."""
    taken = work.trainer(objective, params, work, optimizer) if work.trainer else None
    if taken is not None:
        return taken
    # the caller's tensors stay as they are
    trainable = {
        name: tensor.clone() for name, tensor in trees.pick(params, objective.trainable).items()
    }
    fixed = trees.pick(params, params.keys() - objective.trainable)
    opt_state, losses = optimizer.init(trainable), []
    for step, batch in enumerate(batches(work)):
        grads, loss, buffers = compute_grads(objective, trainable, fixed, batch)
        before = (trainable, opt_state, fixed)
        trainable, opt_state = optimizer.step(trainable, grads, opt_state, work.round_index)
        fixed = {**fixed, **buffers}
        if step >= work.full_steps:  # else a device out of data coasts on its momentum
            trainable, opt_state, fixed = map(
                partial(trees.where, batch.mask.any()), (trainable, opt_state, fixed), before
            )
        losses.append(loss)
    trained = {**trainable, **fixed}
    return {name: trained[name] for name in params}, mean_example_loss(losses, work.order)


def batches(work: Work) -> Iterator[Batch]:
    """Each step's examples; padding shows the device's own first row, masked."""
    rows, mask, keys = step_indices(work.order, work.key)
    for step in range(len(rows)):
        yield take_batch(work.examples, rows[step], mask[step], keys[step])


def step_indices(order: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and mask (..., steps, batch) and keys (..., steps) of all steps, of one device or of many."""
    mask = order >= 0
    steps = torch.arange(order.shape[-2], device=order.device)
    return torch.where(mask, order, order[..., :1, :1]), mask, random.fold_in(key[..., None], steps)


def take_batch(examples: Examples, rows: Tensor, mask: Tensor, key: Tensor) -> Batch:
    """One step's examples, of one device or of many: x (..., batch, ...)."""
    x, y, group = examples
    return Batch(x[rows], y[rows], None if group is None else group[rows], mask, key)


def precompute_augmented(
    augment: Augment, examples: Examples, order: Tensor, key: Tensor
) -> tuple[Examples, Tensor]:
    """Every visit's augmented example, one after the other, and the order (..., steps, batch) that visits them in turn.

    For one device or for many; a loss without the augmentation then takes the steps that the augmented one would have taken.
    """
    rows, mask, keys = step_indices(order, key)
    for _ in range(keys.dim()):
        augment = torch.vmap(augment)
    x, y, _ = take_batch(examples, rows, mask, keys)[:3]
    made = augment(x, random.fold_in(keys, _AUGMENTATION)).flatten(0, order.dim() - 1)
    in_turn = torch.arange(order.numel(), device=order.device).reshape(order.shape)
    return Examples(made, y.flatten(), None), torch.where(mask, in_turn, -1)


def mean_example_loss(losses: Sequence[Tensor], order: Tensor) -> Tensor:
    """The mean (...) of the steps' losses, each (...) counting as often as it has real rows in order (..., steps, batch)."""
    counts = (order >= 0).sum(-1)
    values = torch.stack(list(losses), -1)
    kept = torch.where(
        counts > 0, values, torch.zeros_like(values)
    )  # a padded step's loss is not one
    return (kept * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def compute_grads(
    objective: Objective, trainable: Params, fixed: Params, batch: Batch
) -> tuple[Params, Tensor, Params]:
    """Slopes of one step, its loss, and the buffers after it."""

    def loss(weights: Params) -> tuple[Tensor, Params]:
        return objective.value({**weights, **fixed}, batch)

    grads, (value, buffers) = grad_and_value(loss, has_aux=True)(trainable)
    return grads, value, buffers
