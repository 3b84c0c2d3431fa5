"""An auxiliary model a_m: private like everything local, fed with the representation h, with a loss of its own."""

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
    """Its tensors, named NAME/... beside the model's own, those of them that may move, and what it minimises."""

    name: str
    params: Params
    trainable: frozenset[str]
    loss: LossFn

    def local(self, split: Split) -> Split:
        """The split with this model on the side that stays on the device."""
        return split.with_local(self.params)


@dataclass(frozen=True)
class WeightedSumLoss:
    """One loss, and another with a weight; buffers are those of the first."""

    main: LossFn
    other: LossFn
    weight: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        value, buffers = self.main(params, batch)
        return value + self.weight * self.other(params, batch)[0], buffers


def add_auxiliary(objective: Objective, auxiliary: Auxiliary, *, weight: float) -> Objective:
    """Minimise the main loss plus weight times the auxiliary's, all together."""
    if weight < 0:
        raise InputError(f"{auxiliary.name}: the weight is {weight}; it must be at least 0")
    loss = WeightedSumLoss(objective.loss, auxiliary.loss, weight)
    return objective._replace(loss=loss, trainable=objective.trainable | auxiliary.trainable)


def auxiliary_only(
    objective: Objective, auxiliary: Auxiliary, *, local: Iterable[str]
) -> Objective:
    """Minimise the auxiliary's loss only: what pre-trains the local part of a network on data that have no labels."""
    return objective._replace(
        loss=auxiliary.loss,
        trainable=(objective.trainable & frozenset(local)) | auxiliary.trainable,
    )


def with_prefix(name: str, model: nn.Module) -> tuple[Params, frozenset[str]]:
    """A model's tensors under an auxiliary's name, and those that may move."""
    params = params_of(model)
    return {f"{name}/{own}": tensor for own, tensor in params.items()}, frozenset(
        f"{name}/{own}" for own in trainable_names(model)
    )


def without_prefix(name: str, params: Params) -> Params:
    """The auxiliary's tensors under the names that its model knows."""
    return {
        full.removeprefix(f"{name}/"): tensor
        for full, tensor in params.items()
        if full.startswith(f"{name}/")
    }
