"""An auxiliary model a_m: private, with the representation h as its input and its own loss.

It is the `pretext` of a task: `dataclasses.replace(task, pretext=Decoder(network, layer="0"))`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor, nn

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    params_of,
    trainable_names,
    training_forward,
)
from glocal.core.training import Batch, LossFn, Objective
from glocal.core.trees import Params


@dataclass(frozen=True, eq=False)
class Auxiliary:
    """A network beside the model, which reads the output of the model's module `layer`.

    Its tensors are named NAME/..., beside those of the model itself. Its loss is added to that of
    the targets, times `weight`.
    """

    network: nn.Module
    layer: str
    weight: float = 1.0

    name: ClassVar[str] = "auxiliary"

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise InputError(f"{self.name}: the weight is {self.weight}; it must be at least 0")

    def params(self) -> Params:
        """The network's tensors."""
        return trees.with_prefix(self.prefix, params_of(self.network))

    def extend(self, objective: Objective, model: nn.Module) -> Objective:
        """The objective plus this loss times the weight; both models are trained."""
        if not self.weight:
            return objective
        loss = WeightedSumLoss(objective.loss, self.loss(model), self.weight)
        return objective._replace(loss=loss, trainable=objective.trainable | self.trainable)

    def loss(self, model: nn.Module) -> LossFn:
        """The auxiliary's loss alone; no buffers of the model change."""
        raise NotImplementedError(f"{type(self).__name__} has no loss")

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with."""
        return f"{self.name}/"

    @property
    def trainable(self) -> frozenset[str]:
        """The names of the tensors that are trained."""
        return frozenset(self.prefix + name for name in trainable_names(self.network))

    @cached_property
    def forward(self) -> Forward:
        """The network as a function of its params."""
        return training_forward(self.network)

    def encoder(self, model: nn.Module) -> ForwardWithFeatures:
        """The model, with the output of the layer."""
        return forward_with_features(model, self.layer)


@dataclass(frozen=True, eq=False)
class AuxiliaryOnly:
    """The auxiliary's loss alone: it pre-trains the local part of a network without labels."""

    of: Auxiliary

    def params(self) -> Params:
        """The network's tensors."""
        return self.of.params()

    def extend(self, objective: Objective, model: nn.Module) -> Objective:
        """Its loss in the place of that of the targets."""
        trainable = objective.trainable | self.of.trainable
        return objective._replace(loss=self.of.loss(model), trainable=trainable)


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
