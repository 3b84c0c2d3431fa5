"""The examples of all clients: stored once, with a list of row numbers for each client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.errors import InputError, describe_error, describe_value, suggest_name
from glocal.core.one_line import one_line
from glocal.core.sampling import make_rng
from glocal.core.values import (
    Values,
    concatenate_rows,
    describe_form,
    map_tensors,
    num_rows,
    require_tensor,
    take_rows,
    tensors_of,
)

Rows = npt.NDArray[np.int64]
_MANY_CLIENTS = 1_000
Arrays = Any  # x alone, or a tuple (x, y) or (x, y, group) of arrays, or of dicts or tuples of them


class Examples(NamedTuple):
    """A store of examples: inputs x, targets y, group (rows,) or (rows, attributes) or None.

    Inputs and targets are a tensor, or a dict or tuple of tensors, with one row per example. Where
    examples have no targets, the inputs stand for them: y is x.

    `group` holds facts about each example that are no input of the model, such as a person's
    protected attributes or the answers of other people.

    >>> examples = Examples(torch.zeros(5, 3), torch.tensor([0, 1, 0, 1, 1]))
    >>> examples.num_rows, examples.has_targets
    (5, True)
    """

    x: Values
    y: Values
    group: Tensor | None = None

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def num_rows(self) -> int:
        """The number of examples."""
        return num_rows(self.y)

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return tensors_of(self.y)[0].device

    @property
    def has_targets(self) -> bool:
        """False where the inputs stand for the targets."""
        return self.y is not self.x

    def to(self, device: torch.device) -> "Examples":
        """The same examples on another device."""
        moved = self._map(lambda tensor: tensor.to(device))
        return moved._replace(group=None if self.group is None else self.group.to(device))

    def with_dtype(self, dtype: torch.dtype) -> "Examples":
        """The same examples with every floating tensor in that type; these stay where it is so."""
        floating = [t for t in (*tensors_of(self.x), *tensors_of(self.y)) if t.is_floating_point()]
        if all(tensor.dtype == dtype for tensor in floating):
            return self
        return self._map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Examples":
        """Inputs and targets changed; inputs that stand for the targets are changed once."""
        x = map_tensors(function, self.x)
        return self._replace(x=x, y=map_tensors(function, self.y) if self.has_targets else x)

    def take(self, rows: Rows) -> "Examples":
        """A copy of some rows."""
        index = torch.from_numpy(rows).to(self.device)
        x = take_rows(self.x, index)
        y = take_rows(self.y, index) if self.has_targets else x
        return Examples(x, y, None if self.group is None else self.group[index])


@dataclass(frozen=True)
class ClientData:
    """The data of all clients: one store of examples, and the row numbers of each client.

    Clients are numbered; `names` has a name for each of them, or nothing.

    >>> examples = Examples(torch.zeros(5, 3), torch.arange(5))
    >>> clients = ClientData(examples, (np.array([0, 1]), np.array([2, 3, 4])), ("ulm", "bonn"))
    >>> clients.sizes.tolist(), clients.of("bonn").y.tolist()
    ([2, 3], [2, 3, 4])
    """

    examples: Examples
    rows: tuple[Rows, ...]
    names: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return one_line(self)

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
        x = require_tensor(self.examples.x, "plan: max_tokens")
        if x.is_floating_point() or x.dim() != 2:
            raise InputError(
                "plan: max_tokens counts words, and the inputs are "
                f"{tuple(x.shape[1:])} {x.dtype}; "
                "whole numbers (rows, words) were expected, or leave plan.max_tokens out"
            )
        return np.asarray((x > 0).sum(1).cpu().numpy())

    def of(self, client: int | str) -> Examples:
        """The examples of one client, by its number or name."""
        number = find_client(client, self.names, self.num_clients)
        return self.examples.take(self.rows[number])

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
            f"client: {describe_value(client)} was given; a client's number or name was expected"
        )
    if not 0 <= client < num_clients:
        raise InputError(f"client: there is no client {client}; clients are 0..{num_clients - 1}")
    return int(client)


def concatenate(clients: Sequence[Arrays] | Mapping[str, Arrays]) -> ClientData:
    """The arrays of all clients in one store, with the rows of each client."""
    if not isinstance(clients, Sequence | Mapping) or isinstance(clients, str):
        raise InputError(
            f"data: clients is {describe_value(clients)}; "
            "a list of (x, y) pairs, or a dict of them by name, was expected"
        )
    if not clients:
        raise InputError("data: no clients given; give one (x, y) pair per client")
    names = _client_names(clients)
    arrays_of_clients = list(clients.values()) if isinstance(clients, Mapping) else clients
    joined = _join_plain_arrays(arrays_of_clients)
    if joined is not None:
        return ClientData(*joined, names)
    examples: list[Examples] = []
    for client, arrays in enumerate(arrays_of_clients):
        own = read_examples(arrays, client_label(client, names))
        if examples:
            _require_same_form(own, examples[0], client, names)
        examples.append(own)
    ends = np.cumsum([own.num_rows for own in examples])
    rows = np.split(np.arange(ends[-1], dtype=np.int64), ends[:-1])
    return ClientData(_concatenate_examples(examples), tuple(rows), names)


def _join_plain_arrays(
    clients: Sequence[Arrays],
) -> tuple[Examples, tuple[Rows, ...]] | None:
    """The store and rows of many clients with NumPy arrays (x, y) of one form; None for others.

    It checks forms only, as it is there for 100,000 clients: one by one they take seconds.
    """
    columns: list[list[npt.NDArray[np.generic]]] = [[], []]
    forms: list[set[tuple[object, ...]]] = [set(), set()]
    for arrays in clients:
        if type(arrays) is not tuple or len(arrays) != 2:
            return None
        for place, array in enumerate(arrays):
            if type(array) is not np.ndarray or not array.ndim:
                return None
            forms[place].add((array.dtype, array.shape[1:]))
            columns[place].append(array)
    if any(len(each) != 1 for each in forms) or len(clients) < _MANY_CLIENTS:
        return None
    sizes, others = (np.array(list(map(len, column))) for column in columns)
    if not np.array_equal(sizes, others):
        return None
    x, y = np.concatenate(columns[0]), np.concatenate(columns[1])
    rows = np.split(np.arange(len(y), dtype=np.int64), np.cumsum(sizes)[:-1])
    return read_examples((x, y), "the clients"), tuple(rows)


def _concatenate_examples(parts: Sequence[Examples]) -> Examples:
    x = concatenate_rows([part.x for part in parts])
    y = concatenate_rows([part.y for part in parts]) if parts[0].has_targets else x
    groups = [part.group for part in parts if part.group is not None]
    return Examples(x, y, torch.cat(groups) if groups else None)


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


def read_examples(arrays: Arrays, label: str) -> Examples:
    """One client's examples from its arrays; whole numbers as targets become int64.

    Inputs alone have no targets. A tuple is (x, y) or (x, y, group): inputs that are a tuple, and
    have no targets, are given as (x, None).
    """
    x, y, group = arrays, None, None
    if isinstance(arrays, tuple | list):
        if len(arrays) not in (2, 3):
            raise InputError(
                f"data: {label} has {len(arrays)} arrays; (x, y) or (x, y, group) was expected"
            )
        x, y, group = (*arrays, None)[:3]
    inputs = _read_values(x, f"{label}'s inputs")
    targets = inputs if y is None else map_tensors(_as_int64, _read_values(y, f"{label}'s targets"))
    groups = None if group is None else _read_values(group, f"{label}'s group").long()
    columns = [*tensors_of(inputs), *tensors_of(targets), *([] if groups is None else [groups])]
    _require_equal_lengths(columns, label)
    return Examples(inputs, targets, groups)


def _read_values(given: Any, label: str) -> Values:
    """Arrays as tensors; a dict or tuple of them keeps its form."""
    if isinstance(given, Mapping):
        if not given or not all(isinstance(name, str) for name in given):
            raise InputError(f"data: {label} are a dict with keys {[*given]}; texts were expected")
        return {name: _read_tensor(array, f"{label}['{name}']") for name, array in given.items()}
    if isinstance(given, tuple):
        if not given:
            raise InputError(f"data: {label} are an empty tuple; arrays were expected")
        return tuple(_read_tensor(array, f"{label}[{i}]") for i, array in enumerate(given))
    return _read_tensor(given, label)


def _read_tensor(given: Any, label: str) -> Tensor:
    try:
        tensor = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"data: {label} cannot be read as a tensor ({describe_error(error)}); "
            "numbers of one shape were expected"
        ) from error
    if tensor.is_meta:
        raise InputError(
            f"data: {label} are on the device meta, which holds no values; give them on the cpu"
        )
    if tensor.is_complex():
        raise InputError(f"data: {label} are complex numbers; real ones were expected")
    return tensor.detach()


def _as_int64(tensor: Tensor) -> Tensor:
    """Whole numbers as int64, which torch's losses take; others stay."""
    return tensor if tensor.is_floating_point() else tensor.long()


def _require_equal_lengths(columns: list[Tensor], label: str) -> None:
    """Refuse arrays of different lengths, and single numbers."""
    if not all(column.dim() for column in columns):
        raise InputError(
            f"data: {label} has a single number where one row per example was expected; "
            "give arrays (rows, ...)"
        )
    lengths = [len(column) for column in columns]
    if len(set(lengths)) != 1:
        raise InputError(
            f"data: {label} has arrays of lengths {', '.join(map(str, lengths))}; "
            "(x, y) or (x, y, group) of one length was expected"
        )


def _require_same_form(own: Examples, first: Examples, client: int, names: Sequence[str]) -> None:
    """Refuse a client whose arrays do not fit those of the first client."""
    if _describe_examples(own) == _describe_examples(first):
        return
    raise InputError(
        f"data: {client_label(client, names)} has {_describe_examples(own)}, "
        f"but {client_label(0, names)} has {_describe_examples(first)}; all clients need the same"
    )


def _describe_examples(examples: Examples) -> str:
    targets = f"targets {describe_form(examples.y)}" if examples.has_targets else "no targets"
    group = "" if examples.group is None else f", group {describe_form(examples.group)}"
    return f"inputs {describe_form(examples.x)}, {targets}{group}"


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
