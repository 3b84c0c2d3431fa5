"""Figure 1(d) and appendix B: nobody shall read protected attributes from the representation.

min over local and shared, max over the adversary, of L_classifier - strength * L_adversary. Both sides descend on one loss whose
gradient is turned round between the adversary and the encoder (Ganin and Lempitsky 2015), so that neither waits for the other.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from glocal.core.errors import InputError
from glocal.core.modules import Forward, TappedForward, tapped_forward, training_forward
from glocal.core.training import Batch, Objective, PerExample, cross_entropy_of_each, masked_mean
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, named, own


@dataclass(frozen=True)
class Minimax:
    """The classifier's loss plus the adversary's; towards the encoder the latter counts -strength times.

    The encoder's whole gradient is divided by 1 + strength, so that a strong adversary does not speed it up; the classifier's
    is not.
    """

    name: str
    classify: TappedForward
    attack: Forward
    per_example: PerExample
    strength: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        output, h, buffers = self.classify(params, batch.x, batch.mask, batch.key)
        turned = with_slope(h, -self.strength / (1 + self.strength))
        guess, _ = self.attack(own(self.name, params), turned, batch.mask, batch.key)
        attack = balanced(guess, _attributes(batch), batch.mask)
        return masked_mean(self.per_example(output, batch.y), batch.mask) + attack, buffers


def adversarial(
    model: nn.Module, adversary: nn.Module, *, at: str, strength: float, name: str = "adversary"
) -> tuple[Objective, Auxiliary]:
    """Classification, and an adversary that reads one logit per protected attribute (0 or 1) from what the module `at` puts out.

    The objective is the whole of the minimax; the auxiliary holds the adversary's tensors, and alone is the adversary's own loss.
    """
    if strength < 0:
        raise InputError(f"adversary: the strength is {strength}; it must be at least 0")
    params, trains = named(name, adversary)
    slope, attack = 1 / (1 + strength), training_forward(adversary)
    tapped = tapped_forward(model, at, lambda h: with_slope(h, slope))
    loss = Minimax(name, tapped, attack, cross_entropy_of_each, strength)
    moving = frozenset(own_name for own_name, tensor in model.named_parameters() if tensor.requires_grad)
    auxiliary = Auxiliary(name, params, trains, Attack(name, tapped_forward(model, at), attack))
    return Objective(loss, moving | trains), auxiliary


@dataclass(frozen=True)
class Attack:
    """The adversary's loss on a representation that it cannot move."""

    name: str
    encode: TappedForward
    attack: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        guess, _ = self.attack(own(self.name, params), h.detach(), batch.mask, batch.key)
        return balanced(guess, _attributes(batch), batch.mask), {}


def with_slope(tensor: Tensor, slope: float) -> Tensor:
    """The same numbers, whose gradient comes back multiplied by `slope`."""
    return slope * tensor + (1 - slope) * tensor.detach()


def balanced(logits: Tensor, attributes: Tensor, mask: Tensor) -> Tensor:
    """Cross entropy of binary attributes (rows, attributes), either value counting for half however rare; the mean over them."""
    wanted = attributes.to(logits.dtype)
    losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    real = mask[:, None].to(logits.dtype)
    halves = [(losses * side * real).sum(0) / (side * real).sum(0).clamp(min=1) for side in (wanted, 1 - wanted)]
    return torch.stack(halves).mean()


def _attributes(batch: Batch) -> Tensor:
    """Protected attributes (rows, attributes)."""
    if batch.group is None:
        raise InputError("adversary: the data have no protected attributes; give them as the group of every example")
    return batch.group if batch.group.dim() == 2 else batch.group[:, None]
