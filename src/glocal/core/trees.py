"""Trees: the tensors of a model by name, and the arithmetic of federated learning on them."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]


def require_same_names(actual: Params, expected: Params, what: str) -> None:
    """Refuse trees with different names: trees are matched by name, never by position."""
    missing = sorted(expected.keys() - actual.keys())
    extra = sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise ValueError(f"{what}: names do not match; missing {missing}, unexpected {extra}")


def pick(tree: Params, names: Iterable[str]) -> Params:
    """The part of a tree with these names, in the tree's own order.

    >>> pick({"a": torch.zeros(1), "b": torch.ones(1)}, {"b"})
    {'b': tensor([1.])}
    """
    chosen = frozenset(names)
    return {name: tensor for name, tensor in tree.items() if name in chosen}


def drop(tree: Params, names: Iterable[str]) -> Params:
    """The part of a tree without these names, in the tree's own order."""
    dropped = frozenset(names)
    return {name: tensor for name, tensor in tree.items() if name not in dropped}


def with_prefix(prefix: str, tree: Params) -> Params:
    """The same tensors, with a prefix to their names."""
    return {prefix + name: tensor for name, tensor in tree.items()}


def under_prefix(prefix: str, tree: Params) -> Params:
    """The tensors under a prefix, without it.

    >>> under_prefix("own/", {"own/w": torch.zeros(1), "w": torch.ones(1)})
    {'w': tensor([0.])}
    """
    part = {}
    for name, tensor in tree.items():
        if name.startswith(prefix):
            part[name.removeprefix(prefix)] = tensor
    return part


def without_prefix(prefix: str, tree: Params) -> Params:
    """The tensors that are not under a prefix."""
    return {name: tensor for name, tensor in tree.items() if not name.startswith(prefix)}


def zeros_like(tree: Params) -> Params:
    """Zeros of the same shapes and types."""
    return {name: torch.zeros_like(tensor) for name, tensor in tree.items()}


def scale(factor: float | Tensor, tree: Params) -> Params:
    """Every tensor times a factor."""
    return {name: factor * tensor for name, tensor in tree.items()}


def merge(*trees: Params) -> Params:
    """One tree from several that have no name in common."""
    merged: Params = {}
    for tree in trees:
        common = merged.keys() & tree.keys()
        if common:
            raise ValueError(f"cannot merge trees that share the names {sorted(common)}")
        merged.update(tree)
    return merged


def stack(trees: Sequence[Params]) -> Params:
    """Many trees as one, each tensor with a new first axis (rows, ...)."""
    for tree in trees[1:]:
        require_same_names(tree, trees[0], "stack")
    stacked = {}
    for name in trees[0]:
        stacked[name] = torch.stack(column(trees, name))
    return stacked


def column(trees: Sequence[Params], name: str) -> list[Tensor]:
    """The tensor of one name from many trees."""
    return [tree[name] for tree in trees]


def row(stacked: Params, index: int) -> Params:
    """One tree of a stack, copied: it does not keep the whole stack in memory."""
    return {name: tensor[index].clone() for name, tensor in stacked.items()}


def unstack(stacked: Params, rows: int) -> list[Params]:
    """All trees of a stack; `rows` is given, as a stack of empty trees has no tensor to measure."""
    return [row(stacked, index) for index in range(rows)]


def mean(stacked: Params, weights: Tensor) -> Params:
    """Weighted mean over the first axis; whole-number tensors (counters) are rounded.

    >>> mean({"w": torch.tensor([[0.0], [3.0]])}, torch.tensor([2.0, 1.0]))
    {'w': tensor([1.])}
    """
    shares = weights.double() / weights.double().sum()
    return {name: _weighted(tensor, shares) for name, tensor in stacked.items()}


def _weighted(tensor: Tensor, shares: Tensor) -> Tensor:
    is_counter = not (tensor.is_floating_point() or tensor.is_complex())
    values = tensor.double() if is_counter else tensor
    total: Tensor = torch.tensordot(shares.to(values.dtype), values, dims=1)
    return total.round().to(tensor.dtype) if is_counter else total


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
    squares = [(tensor - right[name]).square().sum() for name, tensor in left.items()]
    return torch.stack(squares).sum()


def where(condition: Tensor, chosen: Params, otherwise: Params) -> Params:
    """`chosen` where the scalar condition () holds, else `otherwise`, bit for bit."""
    return {
        name: torch.where(condition, tensor, otherwise[name]) for name, tensor in chosen.items()
    }


def numel(tree: Params) -> int:
    """The number of elements of a tree."""
    return sum(tensor.numel() for tensor in tree.values())


def nbytes(tree: Params) -> int:
    """The bytes of a tree's elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tree.values())


def to(tree: Params, device: torch.device) -> Params:
    """The same tree on another device; the very same one if it is there already."""
    if all(tensor.device == device for tensor in tree.values()):
        return tree
    return {name: tensor.to(device) for name, tensor in tree.items()}


def same_bits(left: Params, right: Params) -> bool:
    """True when both trees hold the same names, types and bits."""
    if left.keys() != right.keys():
        return False
    for name, tensor in left.items():
        other = right[name]
        if tensor.dtype != other.dtype or not torch.equal(tensor, other):
            return False
    return True
