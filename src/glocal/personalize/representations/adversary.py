"""Adversarial training against protected attributes (Liang et al. 2020, Figure 1(d), appendix B).

The objective is the minimum over the local and shared parts, and the maximum over the adversary, of
L_classifier - strength * L_adversary. One loss trains both sides: the gradient is reversed between
the adversary and the encoder (Ganin and Lempitsky 2015), so neither side waits for the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core.errors import InputError
from glocal.core.losses import PerExampleLoss, per_example_cross_entropy
from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    training_forward,
)
from glocal.core.training import (
    Batch,
    Objective,
    masked_mean,
)
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, with_prefix, without_prefix


@dataclass(frozen=True)
class GradientReversalLoss:
    """The classifier's loss plus the adversary's; the latter is weighted -strength for the encoder.

    The encoder's gradient is divided by 1 + strength, so that a strong adversary does not increase
    its step. The classifier's gradient is not divided.
    """

    name: str
    classify: ForwardWithFeatures
    attack: Forward
    per_example: PerExampleLoss
    strength: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (), and the buffers after the step."""
        output, h, buffers = self.classify(params, batch.x, batch.mask, batch.key)
        reversed_h = scale_grad(h, -self.strength / (1 + self.strength))
        own = without_prefix(self.name, params)
        logits, _ = self.attack(own, reversed_h, batch.mask, batch.key)
        attack = balanced_cross_entropy(logits, _attributes(batch), batch.mask)
        return masked_mean(self.per_example(output, batch.y), batch.mask) + attack, buffers


def adversarial(
    model: nn.Module, adversary: nn.Module, *, layer: str, strength: float, name: str = "adversary"
) -> tuple[Objective, Auxiliary]:
    """Classification with an adversary that predicts protected attributes from a representation.

    The representation is the output of the module `layer`. The adversary has one logit for each
    attribute (0 or 1). The objective trains both sides. The auxiliary holds the adversary's
    tensors, and its loss is the adversary's alone.
    """
    if strength < 0:
        raise InputError(f"adversary: the strength is {strength}; it must be at least 0")
    params, trainable = with_prefix(name, adversary)
    scale, attack = 1 / (1 + strength), training_forward(adversary)
    classify = forward_with_features(model, layer, lambda h: scale_grad(h, scale))
    loss = GradientReversalLoss(name, classify, attack, per_example_cross_entropy, strength)
    of_model = frozenset(
        model_name for model_name, tensor in model.named_parameters() if tensor.requires_grad
    )
    adversary_loss = AdversaryLoss(name, forward_with_features(model, layer), attack)
    auxiliary = Auxiliary(name, params, trainable, adversary_loss)
    return Objective(loss, of_model | trainable), auxiliary


@dataclass(frozen=True)
class AdversaryLoss:
    """The adversary's loss on a representation that it does not change."""

    name: str
    encode: ForwardWithFeatures
    attack: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        own = without_prefix(self.name, params)
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
