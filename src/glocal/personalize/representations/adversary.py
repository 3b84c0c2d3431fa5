"""Figure 1(d) and appendix B: nobody shall read protected attributes from the representation.

min over local and shared, max over the adversary, of L_classifier - strength * L_adversary. Both sides descend on one loss whose
gradient is turned round between the adversary and the encoder (Ganin and Lempitsky 2015), so that neither waits for the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core.errors import InputError
from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    training_forward,
)
from glocal.core.training import (
    Batch,
    Objective,
    PerExampleLoss,
    masked_mean,
    per_example_cross_entropy,
)
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, with_prefix, without_prefix


@dataclass(frozen=True)
class GradientReversalLoss:
    """The classifier's loss plus the adversary's; towards the encoder the latter counts -strength times.

    The encoder's whole gradient is divided by 1 + strength, so that a strong adversary does not speed it up; the classifier's
    is not.
    """

    name: str
    classify: ForwardWithFeatures
    attack: Forward
    per_example: PerExampleLoss
    strength: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        output, h, buffers = self.classify(params, batch.x, batch.mask, batch.key)
        turned = scale_grad(h, -self.strength / (1 + self.strength))
        guess, _ = self.attack(without_prefix(self.name, params), turned, batch.mask, batch.key)
        attack = balanced_cross_entropy(guess, _attributes(batch), batch.mask)
        return masked_mean(self.per_example(output, batch.y), batch.mask) + attack, buffers


def adversarial(
    model: nn.Module, adversary: nn.Module, *, layer: str, strength: float, name: str = "adversary"
) -> tuple[Objective, Auxiliary]:
    """Classification, and an adversary that reads one logit per protected attribute (0 or 1) from what the module `layer` puts out.

    The objective is the whole of the minimax; the auxiliary holds the adversary's tensors, and alone is the adversary's own loss.
    """
    if strength < 0:
        raise InputError(f"adversary: the strength is {strength}; it must be at least 0")
    params, trainable = with_prefix(name, adversary)
    scale, attack = 1 / (1 + strength), training_forward(adversary)
    tapped = forward_with_features(model, layer, lambda h: scale_grad(h, scale))
    loss = GradientReversalLoss(name, tapped, attack, per_example_cross_entropy, strength)
    own = frozenset(
        own_name for own_name, tensor in model.named_parameters() if tensor.requires_grad
    )
    auxiliary = Auxiliary(
        name, params, trainable, AdversaryLoss(name, forward_with_features(model, layer), attack)
    )
    return Objective(loss, own | trainable), auxiliary


@dataclass(frozen=True)
class AdversaryLoss:
    """The adversary's loss on a representation that it cannot move."""

    name: str
    encode: ForwardWithFeatures
    attack: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        guess, _ = self.attack(without_prefix(self.name, params), h.detach(), batch.mask, batch.key)
        return balanced_cross_entropy(guess, _attributes(batch), batch.mask), {}


def scale_grad(tensor: Tensor, scale: float) -> Tensor:
    """The same numbers, whose gradient comes back multiplied by `scale`."""
    return scale * tensor + (1 - scale) * tensor.detach()


def balanced_cross_entropy(logits: Tensor, attributes: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of binary attributes (rows, attributes), either value counting for half however rare; the mean over them."""
    wanted = attributes.to(logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    real = mask[:, None].to(logits.dtype)
    halves = [
        (losses * side * real).sum(0) / (side * real).sum(0).clamp(min=1)
        for side in (wanted, 1 - wanted)
    ]
    return torch.stack(halves).mean()


def _attributes(batch: Batch) -> Tensor:
    """Protected attributes (rows, attributes)."""
    if batch.group is None:
        raise InputError(
            "adversary: the data have no protected attributes; give them as the group of every example"
        )
    return batch.group if batch.group.dim() == 2 else batch.group[:, None]
