"""What may cross, declared before anything does, and the one gate that checks it.

A schema says which tensors a message has, by name, shape and type, in an order. It is made of what
an algorithm declares, never of an upload: a schema that were derived from a first upload would
allow whatever leaked in it.
"""

from typing import NamedTuple

import torch

from glocal.core.trees import Params


class TensorForm(NamedTuple):
    """Shape and type of a tensor that may cross."""

    shape: tuple[int, ...]
    dtype: torch.dtype


Schema = dict[str, TensorForm]


class WireError(ValueError):
    """Something may not cross; the message names the tensor and what is wrong with it."""


def schema_of(message: Params) -> Schema:
    """The names, shapes and types of a message.

    >>> schema_of({"w": torch.zeros(2)})
    {'w': TensorForm(shape=(2,), dtype=torch.float32)}
    """
    schema = {}
    for name, tensor in message.items():
        schema[name] = TensorForm(tuple(tensor.shape), tensor.dtype)
    return schema


def gate(message: Params, schema: Schema, *, rows: bool = False) -> Params:
    """The message if it is exactly what was declared, in the declared order.

    A file or a socket gives names back in an order of its own, and sums and keys go by order. With
    `rows`, the message has a first axis of clients.
    """
    if message.keys() != schema.keys():
        missing = sorted(schema.keys() - message.keys())
        unexpected = sorted(message.keys() - schema.keys())
        raise WireError(
            "wire: a message may hold the declared tensors and nothing else; "
            f"missing {missing}, unexpected {unexpected}"
        )
    for name, tensor in message.items():
        given = TensorForm(tuple(tensor.shape[1:] if rows else tensor.shape), tensor.dtype)
        if given != schema[name]:
            raise WireError(
                f"wire: '{name}' is {given.shape} {given.dtype}, "
                f"and {schema[name].shape} {schema[name].dtype} was declared"
            )
    return {name: message[name] for name in schema}


def require_finite(message: Params) -> None:
    """Refuse a message with NaN or infinity in it."""
    for name, tensor in message.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise WireError(f"wire: '{name}' holds NaN or infinity")


def empty_message(schema: Schema, device: torch.device | None = None) -> Params:
    """Zeros in the form of a schema."""
    zeros = {}
    for name, (shape, dtype) in schema.items():
        zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
    return zeros
