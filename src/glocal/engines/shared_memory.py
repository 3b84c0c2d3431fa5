"""Trees and results of clients in a piece of memory that several processes share.

The memory consists of three parts, one after the other:

    shared trees     one for each distinct shared tree of a call (all clients often have the same)
    private trees    one slot for each task that is under way
    results          one place for each task of a call

The parent writes trees, a worker reads them where they lie and writes its result; only short
messages go through pipes.

Invariants:
- No two processes use a place at the same time: a slot is written again only after its task has
  been answered, and a task's result is written by the one worker that runs the task.
- Trees are matched by name. Both sides walk through the layout's tree, whose order decides where a
  tensor lies, whatever the order of the tree that is written.
- Every tensor starts at a cache line. Matrix products of one row round differently where a weight
  does not, so that the bits would depend on the layout.

Trap: tensors that are read are views of the memory. A tree is valid until its place is written
again, and stacked results until the next call.
"""

import math
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from glocal.core.trees import Params

LeafSpec = tuple[torch.dtype, tuple[int, ...]]
_CACHE_LINE = 64  # bytes
_SPARE_BYTES = 2**20


@dataclass(frozen=True)
class MemoryLayout:
    """Where everything lies in the memory; `shared` and `private` are examples of the trees."""

    shared: Params
    private: Params
    num_shared: int
    num_slots: int
    num_results: int

    @cached_property
    def shared_bytes(self) -> int:
        """The space for one shared tree."""
        return _aligned_bytes(self.shared.values())

    @cached_property
    def private_bytes(self) -> int:
        """The space for one private tree."""
        return _aligned_bytes(self.private.values())

    @property
    def result_bytes(self) -> int:
        """The space for one result: an algorithm returns about as much as it is given."""
        return 2 * (self.shared_bytes + self.private_bytes) + _SPARE_BYTES

    @property
    def total_bytes(self) -> int:
        """The size of the memory."""
        return self.result_offset(self.num_results)

    def shared_offset(self, index: int) -> int:
        """Where a shared tree starts."""
        return index * self.shared_bytes

    def private_offset(self, slot: int) -> int:
        """Where the private tree of a slot starts."""
        return self.shared_offset(self.num_shared) + slot * self.private_bytes

    def result_offset(self, index: int) -> int:
        """Where the result of a task starts."""
        return self.private_offset(self.num_slots) + index * self.result_bytes


class TaskMemory:
    """Anonymous memory of a layout; processes that are forked later share it."""

    def __init__(self, layout: MemoryLayout) -> None:
        self.layout = layout
        self._memory = mmap.mmap(-1, max(layout.total_bytes, 1))

    def write_shared(self, index: int, tree: Params) -> None:
        """Copy a shared tree to its place."""
        self._write_tree(self.layout.shared_offset(index), tree, self.layout.shared)

    def write_private(self, slot: int, tree: Params) -> None:
        """Copy a private tree to its slot."""
        self._write_tree(self.layout.private_offset(slot), tree, self.layout.private)

    def read_shared(self, index: int) -> Params:
        """A shared tree, where it lies."""
        return self._read_tree(self.layout.shared_offset(index), self.layout.shared)

    def read_private(self, slot: int) -> Params:
        """A private tree, where it lies."""
        return self._read_tree(self.layout.private_offset(slot), self.layout.private)

    def has_room_for(self, leaves: Sequence[Tensor]) -> bool:
        """Whether a result of these tensors fits into its place."""
        return _aligned_bytes(leaves) <= self.layout.result_bytes

    def write_result(self, index: int, leaves: Sequence[Tensor]) -> list[LeafSpec]:
        """Copy the tensors of a task's result to their place; returns what is needed to read it."""
        start = self.layout.result_offset(index)
        specs: list[LeafSpec] = []
        for leaf in leaves:
            self._tensor(start, leaf.dtype, leaf.shape).copy_(leaf)
            specs.append((leaf.dtype, tuple(leaf.shape)))
            start += _align(leaf.nbytes)
        return specs

    def read_result(self, index: int, specs: Sequence[LeafSpec]) -> list[Tensor]:
        """Copies of the tensors of a task's result."""
        start = self.layout.result_offset(index)
        leaves: list[Tensor] = []
        for dtype, shape in specs:
            leaf = self._tensor(start, dtype, shape).clone()
            leaves.append(leaf)
            start += _align(leaf.nbytes)
        return leaves

    def read_stacked_results(self, number: int, specs: Sequence[LeafSpec]) -> list[Tensor]:
        """The tensors of the first results, each with a first axis (number, ...), without a copy.

        Results with the same specs lie at equal distances, and so do their tensors.
        """
        start = self.layout.result_offset(0)
        stacks: list[Tensor] = []
        for dtype, shape in specs:
            stacks.append(self._strided_stack(start, number, dtype, shape))
            start += _align(math.prod(shape) * dtype.itemsize)
        return stacks

    def _strided_stack(
        self, start: int, number: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        """Tensors at equal distances, one of each result, as one tensor."""
        count = math.prod(shape)
        if not count:
            return torch.empty(number, *shape, dtype=dtype)
        distance = self.layout.result_bytes // dtype.itemsize
        reach = (number - 1) * distance + count
        whole = torch.frombuffer(self._memory, dtype=dtype, count=reach, offset=start)
        return whole.as_strided((number, count), (distance, 1)).reshape(number, *shape)

    def _write_tree(self, start: int, tree: Params, like: Params) -> None:
        if not same_shapes(tree, like):
            raise RuntimeError("clients have trees of different shapes")
        for name, tensor in like.items():
            self._tensor(start, tensor.dtype, tensor.shape).copy_(tree[name])
            start += _align(tensor.nbytes)

    def _read_tree(self, start: int, like: Params) -> Params:
        tree: Params = {}
        for name, tensor in like.items():
            tree[name] = self._tensor(start, tensor.dtype, tensor.shape)
            start += _align(tensor.nbytes)
        return tree

    def _tensor(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The tensor that starts here."""
        count = math.prod(shape)
        if not count:
            return torch.empty(*shape, dtype=dtype)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        return flat.reshape(tuple(shape))


def same_shapes(left: Params, right: Params) -> bool:
    """Whether two trees have the same names, shapes and dtypes."""
    if left.keys() != right.keys():
        return False
    for name, tensor in left.items():
        other = right[name]
        if tensor.shape != other.shape or tensor.dtype != other.dtype:
            return False
    return True


def _aligned_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(_align(tensor.nbytes) for tensor in tensors)


def _align(size: int) -> int:
    """The next multiple of a cache line."""
    return -(-size // _CACHE_LINE) * _CACHE_LINE
