"""Adversarial training against protected attributes (Liang et al. 2020, Figure 1(d), appendix B).

The objective is the minimum over the local and shared parts, and the maximum over the adversary, of
L_classifier - strength * L_adversary. One loss trains both sides: the gradient is reversed between
the adversary and the encoder (Ganin and Lempitsky 2015), so neither side waits for the other.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.losses import PerExampleLoss
from glocal.core.masked_mean import masked_mean
from glocal.core.modules import Forward, ForwardWithFeatures, forward_with_features
from glocal.core.training import Batch, LossFn, ModelLoss, Objective
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary


@dataclass(frozen=True)
class GradientReversalLoss:
    """The classifier's loss plus the adversary's; the latter is weighted -strength for the encoder.

    The encoder's gradient is divided by 1 + strength, so that a strong adversary does not increase
    its step. The classifier's gradient is not divided.
    """

    prefix: str
    classify: ForwardWithFeatures
    attack: Forward
    per_example: PerExampleLoss
    strength: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (), and the buffers after the step."""
        output, h, buffers = self.classify(params, batch.x, batch.mask, batch.key)
        reversed_h = scale_grad(h, -self.strength / (1 + self.strength))
        own = trees.under_prefix(self.prefix, params)
        logits, _ = self.attack(own, reversed_h, batch.mask, batch.key)
        attack = balanced_cross_entropy(logits, _attributes(batch), batch.mask)
        return masked_mean(self.per_example(output, batch.y), batch.mask) + attack, buffers


@dataclass(frozen=True, eq=False)
class Adversary(Auxiliary):
    """Predicts protected attributes from a representation, which is trained to hide them.

    The network has one logit for each attribute (0 or 1). `weight` is how strongly the encoder
    works against it.
    """

    name: ClassVar[str] = "adversary"

    def extend(self, objective: Objective, model: nn.Module) -> Objective:
        """The classifier's loss and the adversary's, with the gradient reversed between them."""
        if not isinstance(objective.loss, ModelLoss):
            raise InputError(
                "adversary: it is trained on data without augmentation; leave the augmentation out"
            )
        scale = 1 / (1 + self.weight)
        classify = forward_with_features(model, self.layer, lambda h: scale_grad(h, scale))
        per_example = objective.loss.per_example
        loss = GradientReversalLoss(self.prefix, classify, self.forward, per_example, self.weight)
        return objective._replace(loss=loss, trainable=objective.trainable | self.trainable)

    def loss(self, model: nn.Module) -> LossFn:
        """The adversary's loss on a representation that it does not change."""
        return AdversaryLoss(self.prefix, self.encoder(model), self.forward)


@dataclass(frozen=True)
class AdversaryLoss:
    """The adversary's loss on a representation that it does not change."""

    prefix: str
    encode: ForwardWithFeatures
    attack: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        own = trees.under_prefix(self.prefix, params)
        logits, _ = self.attack(own, h.detach(), batch.mask, batch.key)
        return balanced_cross_entropy(logits, _attributes(batch), batch.mask), {}


def scale_grad(tensor: Tensor, scale: float) -> Tensor:
    """The same values; their gradient is multiplied by `scale`."""
    return scale * tensor + (1 - scale) * tensor.detach()


def balanced_cross_entropy(logits: Tensor, attributes: Tensor, mask: Tensor) -> Tensor:
    """Mean cross entropy of binary attributes (rows, attributes).

    The rows of either value have half of the weight, however rare they are.
    """
    targets = attributes.to(logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    real = mask[:, None].to(logits.dtype)
    halves = [
        (losses * side * real).sum(0) / (side * real).sum(0).clamp(min=1)
        for side in (targets, 1 - targets)
    ]
    return torch.stack(halves).mean()


def _attributes(batch: Batch) -> Tensor:
    """Protected attributes (rows, attributes)."""
    if batch.group is None:
        raise InputError(
            "adversary: the data have no protected attributes; "
            "give them as the group of each example"
        )
    return batch.group if batch.group.dim() == 2 else batch.group[:, None]
