"""What leaves a real device: a type that cannot hold anything but the shared tensors, checked at both ends."""

from dataclasses import dataclass

import torch

from glocal.core import trees
from glocal.core.trees import Params
from glocal.wire.gate import admit


class UploadError(ValueError):
    """An upload that is refused; it says which tensor is wrong, and how."""


@dataclass(frozen=True)
class Upload:
    """A tree with exactly the names, shapes and types of the shared one (`like`), every number finite.

    >>> shared = {"head": torch.zeros(2)}
    >>> Upload({"head": torch.ones(2), "encoder": torch.ones(3)}, shared)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    glocal.wire.upload.UploadError: an upload may hold ... nothing else: names do not match; missing [], unexpected [...]
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
        """How many bytes of numbers it holds."""
        return trees.nbytes(self.tensors)
