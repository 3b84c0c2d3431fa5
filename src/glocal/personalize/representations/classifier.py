"""A private branch that classifies the representation (Liang et al. 2020, Figure 1(a))."""

from dataclasses import dataclass

from torch import Tensor, nn

from glocal.core.losses import per_example_cross_entropy
from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    training_forward,
)
from glocal.core.training import Batch, masked_mean
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, with_prefix, without_prefix


@dataclass(frozen=True)
class ClassificationLoss:
    """Mean cross entropy of the private branch, over the real rows."""

    name: str
    encode: ForwardWithFeatures
    classify: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        output, _ = self.classify(without_prefix(self.name, params), h, batch.mask, batch.key)
        return masked_mean(per_example_cross_entropy(output, batch.y), batch.mask), {}


def auxiliary_classifier(
    model: nn.Module, branch: nn.Module, *, layer: str, name: str = "classifier"
) -> Auxiliary:
    """`branch` predicts the label from the output of the model's module `layer`."""
    params, trainable = with_prefix(name, branch)
    encode, classify = forward_with_features(model, layer), training_forward(branch)
    return Auxiliary(name, params, trainable, ClassificationLoss(name, encode, classify))
