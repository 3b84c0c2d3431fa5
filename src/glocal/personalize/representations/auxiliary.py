"""An auxiliary model a_m: private, with the representation h as its input and its own loss."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from glocal.core.errors import InputError
from glocal.core.modules import params_of, trainable_names
from glocal.core.split import Split
from glocal.core.training import Batch, LossFn, Objective
from glocal.core.trees import Params


class Auxiliary(NamedTuple):
    """The auxiliary model's tensors, the names of the trainable ones, and its loss.

    The tensors are named NAME/..., beside those of the model itself.
    """

    name: str
    params: Params
    trainable: frozenset[str]
    loss: LossFn

    def local(self, split: Split) -> Split:
        """The split with this model on the local side."""
        return split.with_local(self.params)


@dataclass(frozen=True)
class WeightedSumLoss:
    """A main loss plus a weighted other one; buffers are those of the main loss."""

    main: LossFn
    other: LossFn
    weight: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (), and the buffers after the step."""
        value, buffers = self.main(params, batch)
        return value + self.weight * self.other(params, batch)[0], buffers


def add_auxiliary(objective: Objective, auxiliary: Auxiliary, *, weight: float) -> Objective:
    """The objective plus the auxiliary's loss times `weight`; both models are trained."""
    if weight < 0:
        raise InputError(f"{auxiliary.name}: the weight is {weight}; it must be at least 0")
    loss = WeightedSumLoss(objective.loss, auxiliary.loss, weight)
    return objective._replace(loss=loss, trainable=objective.trainable | auxiliary.trainable)


def auxiliary_only(
    objective: Objective, auxiliary: Auxiliary, *, local: Iterable[str]
) -> Objective:
    """The auxiliary's loss alone: it pre-trains the local part of a network without labels."""
    local_trainable = objective.trainable & frozenset(local)
    return objective._replace(loss=auxiliary.loss, trainable=local_trainable | auxiliary.trainable)


def with_prefix(name: str, model: nn.Module) -> tuple[Params, frozenset[str]]:
    """A model's tensors, named NAME/..., and the names of the trainable ones."""
    params = {f"{name}/{own}": tensor for own, tensor in params_of(model).items()}
    trainable = frozenset(f"{name}/{own}" for own in trainable_names(model))
    return params, trainable


def without_prefix(name: str, params: Params) -> Params:
    """The auxiliary's tensors, by the names in its own model."""
    return {
        full.removeprefix(f"{name}/"): tensor
        for full, tensor in params.items()
        if full.startswith(f"{name}/")
    }
