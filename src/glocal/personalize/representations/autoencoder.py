"""Reconstruction of the input from the representation (Liang et al. 2020, Figure 1(b))."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from glocal.core import trees
from glocal.core.masked_mean import masked_mean
from glocal.core.modules import Forward, ForwardWithFeatures
from glocal.core.training import Batch
from glocal.core.trees import Params
from glocal.personalize.representations.auxiliary import Auxiliary


@dataclass(frozen=True)
class ReconstructionLoss:
    """Mean squared error between x and the decoder's output for h, over the real rows."""

    prefix: str
    encode: ForwardWithFeatures
    decode: Forward

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (); no buffers change."""
        _, h, _ = self.encode(params, batch.x, batch.mask, batch.key)
        own = trees.under_prefix(self.prefix, params)
        reconstruction, _ = self.decode(own, h, batch.mask, batch.key)
        error = (reconstruction.flatten(1) - batch.x.flatten(1)).square().mean(1)
        return masked_mean(error, batch.mask), {}


@dataclass(frozen=True, eq=False)
class Decoder(Auxiliary):
    """Reconstructs the input from the output of the model's module `layer`."""

    name: ClassVar[str] = "decoder"

    def loss(self, model: nn.Module) -> ReconstructionLoss:
        """The error of the reconstruction."""
        return ReconstructionLoss(self.prefix, self.encoder(model), self.forward)
