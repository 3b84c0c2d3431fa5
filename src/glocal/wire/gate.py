"""The gate: a tree crosses only if it has exactly the names and shapes of the shared tree; and its form as bytes.

Both ends know the model, so nothing but the numbers is sent: the bytes of all tensors, in the order of their names.
"""

import torch

from glocal.core import trees
from glocal.core.trees import Params


def admit(uploads: Params, shared: Params) -> Params:
    """Uploads (devices, ...) that may leave their devices; anything that is not a shared tensor is refused."""
    trees.require_same_names(
        uploads, shared, "an upload may hold the shared tensors and nothing else"
    )
    for name, tensor in uploads.items():
        if tensor.shape[1:] != shared[name].shape or tensor.dtype != shared[name].dtype:
            given, expected = (
                f"{tuple(tensor.shape[1:])} {tensor.dtype}",
                f"{tuple(shared[name].shape)} {shared[name].dtype}",
            )
            raise ValueError(f"upload: '{name}' is {given}, the shared tensor is {expected}")
    return uploads


def pack(tree: Params) -> bytes:
    """A tree as the bytes that cross the wire.

    >>> len(pack({"w": torch.zeros(3), "steps": torch.tensor(1)}))
    20
    """
    return b"".join(_raw(tree[name]).numpy().tobytes() for name in sorted(tree))


def unpack(data: bytes, like: Params) -> Params:
    """The tree that was packed, given one with the same names, shapes and types."""
    if len(data) != trees.nbytes(like):
        raise ValueError(
            f"unpack: {len(data)} bytes arrived, {trees.nbytes(like)} were expected; is it the same model and split?"
        )
    tree, start = {}, 0
    for name in sorted(like):
        size = trees.nbytes({name: like[name]})
        raw = (
            torch.frombuffer(bytearray(data[start : start + size]), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        tree[name], start = raw.view(like[name].dtype).reshape(like[name].shape), start + size
    return {name: tree[name] for name in like}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
