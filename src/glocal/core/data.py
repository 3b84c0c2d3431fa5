"""The examples of all clients: stored once, with a list of row numbers for each client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error, suggest_name
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
    """The data of all clients: one store of examples, and the row numbers of each client.

    Clients are numbered; `names` has a name for each of them, or nothing.
    """

    examples: Examples
    rows: tuple[Rows, ...]
    names: tuple[str, ...] = ()

    @property
    def num_clients(self) -> int:
        """The number of clients."""
        return len(self.rows)

    def label(self, client: int) -> str:
        """How a message names a client: by its name if it has one, else by its number."""
        return client_label(client, self.names)

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


def client_label(client: int, names: Sequence[str]) -> str:
    """How a message names a client.

    >>> client_label(1, ["ulm", "bonn"]), client_label(1, [])
    ("client 'bonn'", 'client 1')
    """
    return f"client '{names[client]}'" if names else f"client {client}"


def find_client(client: int | str, names: Sequence[str], num_clients: int) -> int:
    """The number of a client that is given by number or by name."""
    if isinstance(client, str):
        if client not in names:
            hint = suggest_name(client, names) if names else f"numbers are 0..{num_clients - 1}"
            raise InputError(f"client: there is no client '{client}'; {hint}")
        return names.index(client)
    if isinstance(client, bool) or not isinstance(client, int | np.integer):
        raise InputError(
            f"client: {client!r} is a {type(client).__name__}; give a client's number or name"
        )
    if not 0 <= client < num_clients:
        raise InputError(f"client: there is no client {client}; clients are 0..{num_clients - 1}")
    return int(client)


def concatenate(clients: Sequence[Arrays] | Mapping[str, Arrays]) -> ClientData:
    """The arrays of all clients in one store, with the rows of each client."""
    if not isinstance(clients, Sequence | Mapping) or isinstance(clients, str):
        raise InputError(
            f"data: clients is a {type(clients).__name__}; "
            "a list of (x, y) pairs, or a dict of them by name, was expected"
        )
    if not clients:
        raise InputError("data: no clients given; give one (x, y) pair per client")
    names = _client_names(clients)
    arrays_of_clients = list(clients.values()) if isinstance(clients, Mapping) else clients
    tensors: list[list[Tensor]] = []
    for client, arrays in enumerate(arrays_of_clients):
        columns = _as_tensors(arrays, client_label(client, names))
        if tensors:
            _require_same_columns(columns, tensors[0], client, names)
        tensors.append(columns)
    rows = []
    start = 0
    for columns in tensors:
        end = start + len(columns[0])
        rows.append(np.arange(start, end, dtype=np.int64))
        start = end
    store = [torch.cat(column) for column in zip(*tensors, strict=True)]
    return ClientData(Examples(*store), tuple(rows), names)


def _client_names(clients: Sequence[Arrays] | Mapping[str, Arrays]) -> tuple[str, ...]:
    """The keys of a dict; a list has no names."""
    if not isinstance(clients, Mapping):
        return ()
    for name in clients:
        if not isinstance(name, str) or not name:
            raise InputError(
                f"data: {name!r} is a client's name; a text that is not empty was expected"
            )
    return tuple(clients)


def _as_tensors(arrays: Arrays, label: str) -> list[Tensor]:
    """x, y and group as tensors: float64 inputs become float32, whole-number labels int64."""
    try:
        x, y, *group = [torch.as_tensor(array) for array in arrays]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: {label} cannot be read as (x, y) or (x, y, group) ({describe_error(error)})"
        ) from error
    _require_equal_lengths([x, y, *group], label)
    inputs = x.float() if x.dtype == torch.float64 else x
    targets = y if y.is_floating_point() else y.long()
    return [inputs, targets, *(column.long() for column in group)]


def _require_equal_lengths(columns: list[Tensor], label: str) -> None:
    """Refuse more than x, y and group, or arrays of different lengths."""
    lengths = [len(column) if column.dim() else 0 for column in columns]
    if len(columns) > 3 or len(set(lengths)) != 1:
        raise InputError(
            f"data: {label} has arrays of lengths {', '.join(map(str, lengths))}; "
            "(x, y) or (x, y, group) of one length was expected"
        )


def _require_same_columns(
    columns: list[Tensor], first: list[Tensor], client: int, names: Sequence[str]
) -> None:
    """Refuse a client whose arrays do not fit those of the first client."""
    if columns[0].shape[1:] == first[0].shape[1:] and len(columns) == len(first):
        return
    raise InputError(
        f"data: {client_label(client, names)} has {_describe(columns)}, "
        f"but {client_label(0, names)} has {_describe(first)}; all clients need the same"
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
