"""Figure 1(a): a branch of the device's own tells the label from the representation, beside the shared model."""

from dataclasses import dataclass

from torch import Tensor, nn

from glocal.core.modules import (
    Forward,
    ForwardWithFeatures,
    forward_with_features,
    training_forward,
)
from glocal.core.training import Batch, masked_mean, per_example_cross_entropy
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, with_prefix, without_prefix


@dataclass(frozen=True)
class ClassificationLoss:
    """The mean over the real rows of the cross entropy of the label by the private branch."""

    name: str
    encode: ForwardWithFeatures
    classify: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        output, _ = self.classify(without_prefix(self.name, params), h, batch.mask, batch.key)
        return masked_mean(per_example_cross_entropy(output, batch.y), batch.mask), {}


def auxiliary_classifier(
    model: nn.Module, branch: nn.Module, *, layer: str, name: str = "classifier"
) -> Auxiliary:
    """`branch` tells the label from what the module `layer` of the model puts out."""
    params, trainable = with_prefix(name, branch)
    return Auxiliary(
        name,
        params,
        trainable,
        ClassificationLoss(name, forward_with_features(model, layer), training_forward(branch)),
    )
