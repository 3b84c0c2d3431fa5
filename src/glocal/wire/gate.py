"""The gate: a tree crosses only with exactly the names and shapes of the shared tree, as bytes.

Both ends know the model, so only the numbers are sent: the bytes of all tensors, sorted by name.
"""

import torch

from glocal.core import trees
from glocal.core.trees import Params


def admit(uploads: Params, shared: Params) -> Params:
    """Uploads (clients, ...) that may leave their clients; any other tensor is refused."""
    trees.require_same_names(
        uploads, shared, "an upload may hold the shared tensors and nothing else"
    )
    for name, tensor in uploads.items():
        expected = shared[name]
        if tensor.shape[1:] != expected.shape or tensor.dtype != expected.dtype:
            raise ValueError(
                f"upload: '{name}' is {tuple(tensor.shape[1:])} {tensor.dtype}, "
                f"the shared tensor is {tuple(expected.shape)} {expected.dtype}"
            )
    return uploads


def pack(tree: Params) -> bytes:
    """A tree as the bytes that cross the wire.

    >>> len(pack({"w": torch.zeros(3), "steps": torch.tensor(1)}))
    20
    """
    return b"".join(_raw(tree[name]).numpy().tobytes() for name in sorted(tree))


def unpack(data: bytes, like: Params) -> Params:
    """The packed tree, given one with the same names, shapes and types."""
    expected = trees.nbytes(like)
    if len(data) != expected:
        raise ValueError(
            f"unpack: {len(data)} bytes arrived, {expected} were expected; "
            "is it the same model and split?"
        )
    tree = {}
    start = 0
    for name in sorted(like):
        end = start + trees.nbytes({name: like[name]})
        tree[name] = _from_raw(data[start:end], like[name])
        start = end
    return {name: tree[name] for name in like}


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _from_raw(data: bytes, like: torch.Tensor) -> torch.Tensor:
    if not data:
        return torch.empty(like.shape, dtype=like.dtype)  # `frombuffer` refuses an empty buffer
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return raw.view(like.dtype).reshape(like.shape)
