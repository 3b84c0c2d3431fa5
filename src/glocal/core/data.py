"""Every client's examples: stored once, each client's share a list of row numbers."""

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

    `group` is what else is known of each, and no input: a person's attributes, or what other people answered.
    """

    x: Tensor
    y: Tensor
    group: Tensor | None = None

    def to(self, device: torch.device) -> "Examples":
        """The same examples on a computing device."""
        return Examples(
            self.x.to(device),
            self.y.to(device),
            None if self.group is None else self.group.to(device),
        )

    def take(self, rows: Rows) -> "Examples":
        """A copy of some rows."""
        index = torch.from_numpy(rows).to(self.y.device)
        return Examples(
            self.x[index], self.y[index], None if self.group is None else self.group[index]
        )


@dataclass(frozen=True)
class ClientData:
    """Who holds which examples: one store, and for each device the rows that are its own."""

    examples: Examples
    rows: tuple[Rows, ...]

    @property
    def num_clients(self) -> int:
        """How many devices there are."""
        return len(self.rows)

    @cached_property
    def sizes(self) -> Rows:
        """N_m, how many examples each device holds (devices,)."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    @cached_property
    def text_lengths(self) -> Rows:
        """How many words every row of the store has (rows,), if it holds texts: whole numbers, of which 0 is no word."""
        x = self.examples.x
        if x.is_floating_point() or x.dim() != 2:
            raise InputError(
                f"plan: tokens counts words, and the inputs are {tuple(x.shape[1:])} {x.dtype}; "
                "whole numbers (rows, words) were expected, or leave plan.max_tokens out"
            )
        return np.asarray((x > 0).sum(1).cpu().numpy())

    def of(self, client: int) -> Examples:
        """One device's own examples."""
        return self.examples.take(self.rows[client])

    def all_rows(self) -> Rows:
        """The rows of all devices together."""
        return np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.int64)


def concatenate(clients: Sequence[Arrays]) -> ClientData:
    """All devices' arrays in one store, and each device's rows in it."""
    if not clients:
        raise InputError("data: no devices given; give one (x, y) pair per device")
    tensors = [_as_tensors(arrays, client) for client, arrays in enumerate(clients)]
    for client, each in enumerate(tensors):
        if each[0].shape[1:] != tensors[0][0].shape[1:] or len(each) != len(tensors[0]):
            given, first = (
                f"{len(arrays)} arrays, inputs {tuple(arrays[0].shape[1:])}"
                for arrays in (each, tensors[0])
            )
            raise InputError(
                f"data: device {client} has {given}, but device 0 {first}; all devices need the same"
            )
    ends = np.cumsum([len(arrays[0]) for arrays in tensors])
    rows = [
        np.arange(end - len(arrays[0]), end, dtype=np.int64)
        for end, arrays in zip(ends, tensors, strict=True)
    ]
    return ClientData(
        Examples(*(torch.cat(column) for column in zip(*tensors, strict=True))), tuple(rows)
    )


def _as_tensors(arrays: Arrays, client: int) -> list[Tensor]:
    """A device's x, y and group as tensors: float64 inputs become float32, whole-number labels int64."""
    try:
        x, y, *group = (torch.as_tensor(array) for array in arrays)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: device {client} cannot be read as (x, y) or (x, y, group) ({describe_error(error)})"
        ) from error
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in (x, y, *group)]
    if len(group) > 1 or len(set(lengths)) != 1:
        told = ", ".join(map(str, lengths))
        raise InputError(
            f"data: device {client} gave arrays of lengths {told}; (x, y) or (x, y, group) of one length was expected"
        )
    whole = y if y.is_floating_point() else y.long()
    return [
        x.float() if x.dtype == torch.float64 else x,
        whole,
        *(column.long() for column in group),
    ]


def hold_out(rows: Rows, share: float, seed: int, purpose: str, client: int) -> tuple[Rows, Rows]:
    """Rows kept and rows taken out at random; at least one is kept."""
    if not 0 <= share < 1:
        raise InputError(
            f"data: the share for {purpose} is {share}; it must be at least 0 and below 1"
        )
    taken = min(round(share * len(rows)), max(len(rows) - 1, 0))
    order = make_rng(seed, purpose, client).permutation(len(rows))
    return np.sort(rows[order[taken:]]), np.sort(rows[order[:taken]])
