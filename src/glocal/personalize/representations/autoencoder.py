"""Figure 1(b): the representation has to hold enough to draw the input from it again."""

from dataclasses import dataclass

from torch import Tensor, nn

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
class ReconstructionLoss:
    """The mean over the real rows of the squared error between x and what the decoder makes of h."""

    name: str
    encode: ForwardWithFeatures
    decode: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (); no buffers move."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        drawn, _ = self.decode(without_prefix(self.name, params), h, batch.mask, batch.key)
        error = (drawn.flatten(1) - batch.x.flatten(1)).square().mean(1)
        return masked_mean(error, batch.mask), {}


def autoencoder(
    model: nn.Module, decoder: nn.Module, *, layer: str, name: str = "decoder"
) -> Auxiliary:
    """`decoder` draws the input from what the module `layer` of the model puts out."""
    params, trainable = with_prefix(name, decoder)
    return Auxiliary(
        name,
        params,
        trainable,
        ReconstructionLoss(name, forward_with_features(model, layer), training_forward(decoder)),
    )
