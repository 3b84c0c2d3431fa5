"""Inputs and targets of examples: a tensor, or a dict or tuple of tensors.

The first axis of every tensor is the example.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from glocal.core.errors import InputError
from glocal.core.trees import column

Values = Any  # Tensor | dict[str, Tensor] | tuple[Tensor, ...]


def map_tensors(function: Callable[[Tensor], Tensor], values: Values) -> Values:
    """The same structure with every tensor changed."""
    return function(values) if isinstance(values, Tensor) else tree_map(function, values)


def tensors_of(values: Values) -> list[Tensor]:
    """The tensors of inputs or targets, in their order.

    >>> [len(tensor) for tensor in tensors_of({"a": torch.zeros(2), "b": torch.ones(2, 3)})]
    [2, 2]
    """
    return [values] if isinstance(values, Tensor) else tree_leaves(values)


def num_rows(values: Values) -> int:
    """The number of examples."""
    return len(tensors_of(values)[0])


def take_rows(values: Values, rows: Any) -> Values:
    """Some examples: `rows` is an index, a slice or a tensor of row numbers."""
    return map_tensors(lambda tensor: tensor[rows], values)


def concatenate_rows(parts: Sequence[Values]) -> Values:
    """The examples of all parts, which have one structure; a single part is not copied."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, dict):
        return {name: torch.cat(column(parts, name)) for name in first}
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def describe_form(values: Values) -> str:
    """Shape and type of one example.

    >>> describe_form({"age": torch.zeros(5), "image": torch.zeros(5, 3, 8, 8)})
    '{age: () float32, image: (3, 8, 8) float32}'
    """
    if isinstance(values, Tensor):
        return f"{tuple(values.shape[1:])} {str(values.dtype).removeprefix('torch.')}"
    if isinstance(values, dict):
        named = [f"{name}: {describe_form(value)}" for name, value in values.items()]
        return f"{{{', '.join(named)}}}"
    return f"({', '.join(map(describe_form, values))})"


def require_tensor(values: Values, purpose: str) -> Tensor:
    """The values as one tensor, where nothing else will do."""
    if isinstance(values, Tensor):
        return values
    raise InputError(
        f"{purpose}: the inputs are {describe_form(values)}; one tensor of inputs was expected"
    )
