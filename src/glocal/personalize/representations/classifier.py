"""A private branch that classifies the representation (Liang et al. 2020, Figure 1(a))."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from glocal.core import trees
from glocal.core.losses import per_example_cross_entropy
from glocal.core.masked_mean import masked_mean
from glocal.core.modules import Forward, ForwardWithFeatures
from glocal.core.training import Batch
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary


@dataclass(frozen=True)
class ClassificationLoss:
    """Mean cross entropy of the private branch, over the real rows."""

    prefix: str
    encode: ForwardWithFeatures
    classify: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        output, _ = self.classify(trees.under_prefix(self.prefix, params), h, batch.mask, batch.key)
        return masked_mean(per_example_cross_entropy(output, batch.y), batch.mask), {}


@dataclass(frozen=True, eq=False)
class Classifier(Auxiliary):
    """Predicts the label from the output of the model's module `layer`."""

    name: ClassVar[str] = "classifier"

    def loss(self, model: nn.Module) -> ClassificationLoss:
        """The cross entropy of the branch."""
        return ClassificationLoss(self.prefix, self.encoder(model), self.forward)
