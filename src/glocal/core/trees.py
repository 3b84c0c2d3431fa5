"""Params: a model's tensors by name, and the little arithmetic that federated learning does on them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]


def require_same_names(given: Params, expected: Params, what: str) -> None:
    """Refuse trees that do not hold the same names: trees are matched by name, never by position."""
    missing, extra = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"{what}: names do not match; missing {missing}, unexpected {extra}")


def pick(tree: Params, names: Iterable[str]) -> Params:
    """The part of a tree with these names, in the tree's own order.

    >>> pick({"a": torch.zeros(1), "b": torch.ones(1)}, {"b"})
    {'b': tensor([1.])}
    """
    wanted = frozenset(names)
    return {name: tensor for name, tensor in tree.items() if name in wanted}


def merge(*trees: Params) -> Params:
    """One tree out of several that have no name in common."""
    merged: Params = {}
    for tree in trees:
        twice = merged.keys() & tree.keys()
        if twice:
            raise ValueError(f"cannot merge trees that share the names {sorted(twice)}")
        merged.update(tree)
    return merged


def stack(trees: Sequence[Params]) -> Params:
    """Many trees as one, each tensor with a new first axis (rows, ...)."""
    for tree in trees[1:]:
        require_same_names(tree, trees[0], "stack")
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


def row(stacked: Params, index: int) -> Params:
    """One tree out of a stack, as tensors of its own: the stack is not kept alive by it."""
    return {name: tensor[index].clone() for name, tensor in stacked.items()}


def unstack(stacked: Params, rows: int) -> list[Params]:
    """The trees of a stack of known height; a stack of empty trees has no tensor to ask."""
    return [row(stacked, index) for index in range(rows)]


def mean(stacked: Params, weights: Tensor) -> Params:
    """Weighted mean over the first axis; whole-number tensors (counters) are rounded.

    >>> mean({"w": torch.tensor([[0.0], [3.0]])}, torch.tensor([2.0, 1.0]))
    {'w': tensor([1.])}
    """
    shares = weights.double() / weights.double().sum()
    return {name: _weighted(tensor, shares) for name, tensor in stacked.items()}


def _weighted(tensor: Tensor, shares: Tensor) -> Tensor:
    counts = not (tensor.is_floating_point() or tensor.is_complex())
    values = tensor.double() if counts else tensor
    summed: Tensor = torch.tensordot(shares.to(values.dtype), values, dims=1)
    return summed.round().to(tensor.dtype) if counts else summed


def add(left: Params, right: Params) -> Params:
    """Left + right, name by name."""
    require_same_names(right, left, "add")
    return {name: tensor + right[name] for name, tensor in left.items()}


def subtract(left: Params, right: Params) -> Params:
    """Left - right, name by name."""
    require_same_names(right, left, "subtract")
    return {name: tensor - right[name] for name, tensor in left.items()}


def squared_distance(left: Params, right: Params) -> Tensor:
    """Sum over all names of ||left - right||^2, a scalar ()."""
    require_same_names(right, left, "squared_distance")
    return torch.stack(
        [(tensor - right[name]).square().sum() for name, tensor in left.items()]
    ).sum()


def where(condition: Tensor, chosen: Params, otherwise: Params) -> Params:
    """Chosen where the scalar condition () holds, otherwise the other tree, bit for bit."""
    return {
        name: torch.where(condition, tensor, otherwise[name]) for name, tensor in chosen.items()
    }


def numel(tree: Params) -> int:
    """How many numbers a tree holds."""
    return sum(tensor.numel() for tensor in tree.values())


def nbytes(tree: Params) -> int:
    """How many bytes those numbers take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())


def to(tree: Params, device: torch.device) -> Params:
    """The tree on a computing device."""
    return {name: tensor.to(device) for name, tensor in tree.items()}


def same_bits(left: Params, right: Params) -> bool:
    """True when both trees hold the same names, types and bits."""
    return left.keys() == right.keys() and all(
        tensor.dtype == right[name].dtype and torch.equal(tensor, right[name])
        for name, tensor in left.items()
    )
