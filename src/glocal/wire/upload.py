"""What leaves a deployed client: a type for the shared tensors alone, checked at both ends."""

from dataclasses import dataclass

import torch

from glocal.core import trees
from glocal.core.trees import Params
from glocal.wire.gate import admit


class UploadError(ValueError):
    """An upload is refused; the message names the tensor and what is wrong with it."""


@dataclass(frozen=True)
class Upload:
    """A tree with exactly the names, shapes and types of the shared one (`like`), and finite.

    >>> shared = {"head": torch.zeros(2)}
    >>> Upload({"head": torch.ones(2), "encoder": torch.ones(3)}, shared)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    glocal.wire.upload.UploadError: an upload may hold ... nothing else: ... unexpected [...]
    """

    tensors: Params
    like: Params

    def __post_init__(self) -> None:
        try:
            admit({name: tensor[None] for name, tensor in self.tensors.items()}, self.like)
        except ValueError as error:
            raise UploadError(str(error)) from error
        for name, tensor in self.tensors.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise UploadError(f"upload: '{name}' holds NaN or infinity")

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return trees.nbytes(self.tensors)
