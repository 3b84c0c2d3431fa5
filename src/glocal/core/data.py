"""The examples of all clients: stored once, with a list of row numbers for each client."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error
from glocal.core.sampling import make_rng

Rows = npt.NDArray[np.int64]
Arrays = tuple[Tensor | npt.NDArray[np.generic], ...]


class Examples(NamedTuple):
    """A store of examples: x (rows, ...), y (rows,), group (rows,) or (rows, attributes) or None.

    `group` holds facts about each example that are no input of the model, such as a person's
    protected attributes or the answers of other people.
    """

    x: Tensor
    y: Tensor
    group: Tensor | None = None

    def to(self, device: torch.device) -> "Examples":
        """The same examples on another device."""
        group = None if self.group is None else self.group.to(device)
        return Examples(self.x.to(device), self.y.to(device), group)

    def take(self, rows: Rows) -> "Examples":
        """A copy of some rows."""
        index = torch.from_numpy(rows).to(self.y.device)
        group = None if self.group is None else self.group[index]
        return Examples(self.x[index], self.y[index], group)


@dataclass(frozen=True)
class ClientData:
    """The data of all clients: one store of examples, and the row numbers of each client."""

    examples: Examples
    rows: tuple[Rows, ...]

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.rows)

    @cached_property
    def sizes(self) -> Rows:
        """N_m, the number of examples of each client (clients,)."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    @cached_property
    def text_lengths(self) -> Rows:
        """The number of words in every row of a store of texts (rows,); token 0 is padding."""
        x = self.examples.x
        if x.is_floating_point() or x.dim() != 2:
            raise InputError(
                "plan: max_tokens counts words, and the inputs are "
                f"{tuple(x.shape[1:])} {x.dtype}; "
                "whole numbers (rows, words) were expected, or leave plan.max_tokens out"
            )
        return np.asarray((x > 0).sum(1).cpu().numpy())

    def of(self, client: int) -> Examples:
        """The examples of one client."""
        return self.examples.take(self.rows[client])

    def all_rows(self) -> Rows:
        """The rows of all clients together."""
        return np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.int64)


def concatenate(clients: Sequence[Arrays]) -> ClientData:
    """The arrays of all clients in one store, with the rows of each client."""
    if not clients:
        raise InputError("data: no clients given; give one (x, y) pair per client")
    tensors = [_as_tensors(arrays, client) for client, arrays in enumerate(clients)]
    for client, columns in enumerate(tensors):
        _require_same_columns(columns, tensors[0], client)
    rows = []
    start = 0
    for columns in tensors:
        end = start + len(columns[0])
        rows.append(np.arange(start, end, dtype=np.int64))
        start = end
    store = [torch.cat(column) for column in zip(*tensors, strict=True)]
    return ClientData(Examples(*store), tuple(rows))


def _as_tensors(arrays: Arrays, client: int) -> list[Tensor]:
    """x, y and group as tensors: float64 inputs become float32, whole-number labels int64."""
    try:
        x, y, *group = [torch.as_tensor(array) for array in arrays]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: client {client} cannot be read as (x, y) or (x, y, group) "
            f"({describe_error(error)})"
        ) from error
    _require_equal_lengths([x, y, *group], client)
    inputs = x.float() if x.dtype == torch.float64 else x
    targets = y if y.is_floating_point() else y.long()
    return [inputs, targets, *(column.long() for column in group)]


def _require_equal_lengths(columns: list[Tensor], client: int) -> None:
    """Refuse more than x, y and group, or arrays of different lengths."""
    lengths = [len(column) if column.dim() else 0 for column in columns]
    if len(columns) > 3 or len(set(lengths)) != 1:
        raise InputError(
            f"data: client {client} has arrays of lengths {', '.join(map(str, lengths))}; "
            "(x, y) or (x, y, group) of one length was expected"
        )


def _require_same_columns(columns: list[Tensor], first: list[Tensor], client: int) -> None:
    """Refuse a client whose arrays do not fit those of client 0."""
    if columns[0].shape[1:] == first[0].shape[1:] and len(columns) == len(first):
        return
    raise InputError(
        f"data: client {client} has {_describe(columns)}, but client 0 has {_describe(first)}; "
        "all clients need the same"
    )


def _describe(columns: list[Tensor]) -> str:
    return f"{len(columns)} arrays, inputs {tuple(columns[0].shape[1:])}"


def hold_out(
    rows: Rows, fraction: float, seed: int, purpose: str, client: int
) -> tuple[Rows, Rows]:
    """Split rows at random into the remaining and the held-out ones; at least one remains."""
    if not 0 <= fraction < 1:
        raise InputError(
            f"data: the fraction for {purpose} is {fraction}; it must be at least 0 and below 1"
        )
    count = min(round(fraction * len(rows)), max(len(rows) - 1, 0))
    order = make_rng(seed, purpose, client).permutation(len(rows))
    return np.sort(rows[order[count:]]), np.sort(rows[order[:count]])
