"""Reconstruction of the input from the representation (Liang et al. 2020, Figure 1(b))."""

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
    """Mean squared error between x and the decoder's output for h, over the real rows."""

    name: str
    encode: ForwardWithFeatures
    decode: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        own = without_prefix(self.name, params)
        reconstruction, _ = self.decode(own, h, batch.mask, batch.key)
        error = (reconstruction.flatten(1) - batch.x.flatten(1)).square().mean(1)
        return masked_mean(error, batch.mask), {}


def autoencoder(
    model: nn.Module, decoder: nn.Module, *, layer: str, name: str = "decoder"
) -> Auxiliary:
    """`decoder` reconstructs the input from the output of the model's module `layer`."""
    params, trainable = with_prefix(name, decoder)
    encode, decode = forward_with_features(model, layer), training_forward(decoder)
    return Auxiliary(name, params, trainable, ReconstructionLoss(name, encode, decode))
