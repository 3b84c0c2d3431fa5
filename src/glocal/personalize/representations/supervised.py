"""Figure 1(a): a branch of the device's own tells the label from the representation, beside the shared model."""

from dataclasses import dataclass

from torch import Tensor, nn

from glocal.core.modules import Forward, TappedForward, tapped_forward, training_forward
from glocal.core.training import Batch, cross_entropy_of_each, masked_mean
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary, named, own


@dataclass(frozen=True)
class Classification:
    """The mean over the real rows of the cross entropy of the label by the private branch."""

    name: str
    encode: TappedForward
    classify: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        output, _ = self.classify(own(self.name, params), h, batch.mask, batch.key)
        return masked_mean(cross_entropy_of_each(output, batch.y), batch.mask), {}


def supervised(model: nn.Module, branch: nn.Module, *, at: str, name: str = "classifier") -> Auxiliary:
    """`branch` tells the label from what the module `at` of the model puts out."""
    params, trains = named(name, branch)
    return Auxiliary(name, params, trains, Classification(name, tapped_forward(model, at), training_forward(branch)))
