"""Partitions of a data set over clients: IID, by classes, Dirichlet, natural, or by question type.

A partitioner maps training labels and test labels to each client's rows of both. Every row goes to
exactly one client.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.bounds import MAX_CLIENTS, require_count
from glocal.core.checks import require_number
from glocal.core.data import ClientData, Rows
from glocal.core.errors import InputError, describe_value
from glocal.core.sampling import IntArray

ClientRows = tuple[list[Rows], list[Rows]]
Partitioner = Callable[[IntArray, IntArray, np.random.Generator], ClientRows]

# Above it shares are equal to within a row; far above it numpy's gamma variates overflow.
_LARGEST_ALPHA = 1e6


def class_counts(data: ClientData, classes: int) -> IntArray:
    """The number of examples per client and class (clients, classes)."""
    labels = data.examples.y.cpu().numpy()
    counts = np.zeros((data.num_clients, classes), dtype=np.int64)
    for client, rows in enumerate(data.rows):
        np.add.at(counts[client], labels[rows], 1)
    return counts


def iid(clients: int) -> Partitioner:
    """IID: a random share of equal size for every client.

    >>> import glocal
    >>> scheme = glocal.iid(10)
    >>> data = glocal.FederatedData.partition(glocal.load_dataset("digits"), scheme)
    >>> data.num_clients
    10
    """
    _require_positive("clients", clients)
    return partial(_partition_iid, clients)


def shards(clients: int, classes_per_client: int) -> Partitioner:
    """A fixed number of classes per client, the same classes in training and test.

    A client has fewer only where the data set has fewer.

    >>> import glocal
    >>> scheme = glocal.shards(10, 2)
    >>> data = glocal.FederatedData.partition(glocal.load_dataset("digits"), scheme)
    >>> data.train.of(0).y.unique().numel()
    2
    """
    _require_positive("clients", clients)
    _require_positive("classes_per_client", classes_per_client)
    return partial(_partition_shards, clients, classes_per_client, _remove_duplicates)


def random_shards(clients: int, classes_per_client: int) -> Partitioner:
    """Random shards of one class each, a fixed number per client (McMahan et al. 2017, section 3).

    Two shards of one class may go to one client, so some clients have fewer classes. With 100
    clients and two of ten classes each, 9.5 clients have one class, on average.

    >>> import glocal
    >>> scheme = glocal.random_shards(10, 2)
    >>> data = glocal.FederatedData.partition(glocal.load_dataset("digits"), scheme)
    >>> data.train.of(0).y.unique().numel() <= 2
    True
    """
    _require_positive("clients", clients)
    _require_positive("classes_per_client", classes_per_client)
    return partial(_partition_shards, clients, classes_per_client, _keep_duplicates)


def dirichlet(clients: int, alpha: float) -> Partitioner:
    """Each class in proportions from Dir(alpha), equal in training and test (Hsu et al. 2019).

    >>> import glocal
    >>> scheme = glocal.dirichlet(10, alpha=0.5)
    >>> data = glocal.FederatedData.partition(glocal.load_dataset("digits"), scheme)
    >>> data.num_clients
    10
    """
    _require_positive("clients", clients)
    require_number(
        "partition: alpha",
        alpha,
        lambda value: 0 < value <= _LARGEST_ALPHA,
        f"above 0 and at most {_LARGEST_ALPHA:g} (iid gives equal shares)",
    )
    return partial(_partition_dirichlet, clients, alpha)


def natural(train_ids: npt.ArrayLike, test_ids: npt.ArrayLike) -> Partitioner:
    """One client per distinct id of the training examples, in sorted order of ids.

    Ids are numbers or names, one per row.

    >>> scheme = natural(["ulm", "bonn", "ulm"], ["bonn"])
    >>> scheme.names
    ('bonn', 'ulm')
    """
    names, train_owners = np.unique(np.asarray(train_ids), return_inverse=True)
    test_names = np.asarray(test_ids)
    _require_trained(np.setdiff1d(test_names, names))
    test_owners = np.searchsorted(names, test_names)
    return NaturalPartitioner(tuple(map(str, names)), train_owners, test_owners)


@dataclass(frozen=True)
class NaturalPartitioner:
    """Every row to its owner, by the owners' numbers; nothing is random."""

    names: tuple[str, ...]
    train_owners: IntArray
    test_owners: IntArray

    def __call__(
        self, train: IntArray, test: IntArray, generator: np.random.Generator
    ) -> ClientRows:
        """Each client's training and test rows."""
        _require_one_per_example("ids", "training", self.train_owners, train)
        _require_one_per_example("ids", "test", self.test_owners, test)
        return _client_rows(len(self.names), self.train_owners, self.test_owners)


def question_type_shards(clients: int, train_types: IntArray, test_types: IntArray) -> Partitioner:
    """One shard per client of the examples in order of their type; types come in a random order.

    Shards have equal size. A frequent type is on several clients, and rare types share one. Test
    examples of a type go to clients in proportion to its training examples; those of a type
    without training examples go to random clients. Labels play no role.
    """
    _require_positive("clients", clients)
    return partial(_partition_question_types, clients, train_types, test_types)


def apportion(proportions: npt.NDArray[np.float64], total: int) -> IntArray:
    """Whole numbers that add up to the total, by largest remainder.

    >>> apportion(np.array([0.5, 0.3, 0.2]), 9).tolist()
    [4, 3, 2]
    """
    quotas = proportions * total
    counts = np.floor(quotas).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:missing]] += 1
    return counts


def _partition_iid(
    clients: int, train: IntArray, test: IntArray, generator: np.random.Generator
) -> ClientRows:
    _require_enough_examples(clients, train)
    train_owners = generator.permutation(np.arange(len(train)) % clients)
    test_owners = generator.permutation(np.arange(len(test)) % clients)
    return _client_rows(clients, train_owners, test_owners)


def _partition_shards(
    clients: int,
    classes_per_client: int,
    rearrange: Callable[[IntArray, np.random.Generator], IntArray],
    train: IntArray,
    test: IntArray,
    generator: np.random.Generator,
) -> ClientRows:
    """Shards of one class each; `rearrange` may exchange them between clients."""
    _require_enough_examples(clients, train)
    classes = np.union1d(train, test)
    slots_per_class = _slots(clients, classes_per_client, classes, train)
    slots = rearrange(_assign_slots(slots_per_class, clients, generator), generator)
    train_owners, test_owners = _no_owners(train), _no_owners(test)
    for label, class_slots in zip(classes, slots.T, strict=True):
        owners = generator.permutation(np.repeat(np.arange(clients), class_slots))
        _assign_in_turn(train_owners, train == label, owners, generator)
        _assign_in_turn(test_owners, test == label, owners, generator)
    _require_no_empty_clients(train_owners, clients)
    return _client_rows(clients, train_owners, test_owners)


def _partition_dirichlet(
    clients: int, alpha: float, train: IntArray, test: IntArray, generator: np.random.Generator
) -> ClientRows:
    _require_enough_examples(clients, train)
    train_owners, test_owners = _no_owners(train), _no_owners(test)
    for label in np.union1d(train, test):
        proportions = generator.dirichlet(np.full(clients, alpha))
        _assign_in_proportion(train_owners, train == label, proportions, generator)
        _assign_in_proportion(test_owners, test == label, proportions, generator)
    _fill_empty_clients(train_owners, clients, generator)
    return _client_rows(clients, train_owners, test_owners)


def _partition_question_types(
    clients: int,
    train_types: IntArray,
    test_types: IntArray,
    train: IntArray,
    test: IntArray,
    generator: np.random.Generator,
) -> ClientRows:
    _require_one_per_example("types", "training", train_types, train)
    _require_one_per_example("types", "test", test_types, test)
    _require_enough_examples(clients, train)
    test_owners = generator.integers(clients, size=len(test))
    types = int(max(train_types.max(), test_types.max(initial=0))) + 1
    position = generator.permutation(types)
    train_owners = _equal_shards(clients, position[train_types], generator)
    for question_type in np.intersect1d(train_types, test_types):
        counts = np.bincount(train_owners[train_types == question_type], minlength=clients)
        rows_of_type = test_types == question_type
        _assign_in_proportion(test_owners, rows_of_type, counts / counts.sum(), generator)
    return _client_rows(clients, train_owners, test_owners)


def _equal_shards(clients: int, keys: IntArray, generator: np.random.Generator) -> IntArray:
    """Owners of rows in shards of equal size, in order of the keys; ties in random order."""
    row_order = np.lexsort((generator.random(len(keys)), keys))
    owners = _no_owners(keys)
    owners[row_order] = np.arange(len(keys)) * clients // len(keys)
    return owners


def _no_owners(labels: IntArray) -> IntArray:
    """Room for the owner of every row."""
    return np.zeros(len(labels), np.int64)


def _assign_in_turn(
    owners: IntArray,
    selected: npt.NDArray[np.bool_],
    clients: IntArray,
    generator: np.random.Generator,
) -> None:
    """Give the selected rows to these clients in turn, in random order of rows, in place."""
    rows = generator.permutation(np.flatnonzero(selected))
    owners[rows] = clients[np.arange(len(rows)) % len(clients)]


def _assign_in_proportion(
    owners: IntArray,
    selected: npt.NDArray[np.bool_],
    proportions: npt.NDArray[np.float64],
    generator: np.random.Generator,
) -> None:
    """Give the selected rows to all clients in these proportions, at random, in place."""
    rows = generator.permutation(np.flatnonzero(selected))
    owners[rows] = np.repeat(np.arange(len(proportions)), apportion(proportions, len(rows)))


def class_labels(labels: torch.Tensor, part: str) -> IntArray:
    """Labels as numpy has them; anything but class numbers is refused."""
    _require_class_numbers(labels, part)
    return np.asarray(labels.cpu().numpy())


def _require_class_numbers(labels: torch.Tensor, part: str) -> None:
    if labels.dim() != 1 or labels.dtype != torch.int64:
        raise InputError(
            f"data: {part} labels are {tuple(labels.shape)} {labels.dtype}; "
            "whole numbers (rows,) were expected: y.long()"
        )


def _slots(clients: int, classes_per_client: int, classes: IntArray, train: IntArray) -> IntArray:
    """The number of clients per class (classes,); the remainder goes to the largest classes."""
    _require_enough_slots(clients, classes_per_client, len(classes))
    sizes = np.array([np.count_nonzero(train == label) for label in classes])
    total = clients * min(classes_per_client, len(classes))
    slots = np.full(len(classes), total // len(classes))
    slots[np.argsort(-sizes, kind="stable")[: total % len(classes)]] += 1
    return slots


def _assign_slots(
    slots_per_class: IntArray, clients: int, generator: np.random.Generator
) -> IntArray:
    """Give each client equally many random slots; returns slots per class (clients, classes)."""
    classes = np.arange(len(slots_per_class))
    slots = generator.permutation(np.repeat(classes, slots_per_class)).reshape(clients, -1)
    counts = np.zeros((clients, len(classes)), dtype=np.int64)
    np.add.at(counts, (np.arange(clients)[:, None], slots), 1)
    return counts


def _keep_duplicates(slots: IntArray, generator: np.random.Generator) -> IntArray:
    return slots


def _remove_duplicates(slots: IntArray, generator: np.random.Generator) -> IntArray:
    """Exchange slots until no client has two of one class; returns 0 or 1 (clients, classes)."""
    while len(duplicates := np.argwhere(slots > 1)):
        for client, label in duplicates:
            if slots[client, label] > 1:
                _swap(slots, client, label, generator)
    return slots


def _swap(slots: IntArray, client: int, label: int, generator: np.random.Generator) -> None:
    """Exchange a duplicate class with a client that lacks it.

    Each exchange leaves fewer duplicates, so the exchanges end. No class has more slots than there
    are clients, so some other client lacks this class. Either the other client has a class that
    this client lacks, or this client has all classes of the other. In the second case the other
    client has fewer classes than slots, so it has a duplicate itself and gives that.
    """
    other = generator.choice(np.flatnonzero(slots[:, label] == 0))
    lacking = (slots[other] > 0) & (slots[client] == 0)
    offers = lacking if lacking.any() else slots[other] > 1
    offer = generator.choice(np.flatnonzero(offers))
    slots[client, [label, offer]] += (-1, 1)
    slots[other, [label, offer]] += (1, -1)


def _fill_empty_clients(owners: IntArray, clients: int, generator: np.random.Generator) -> None:
    """Give every client without an example one of the largest client's, in place."""
    sizes = np.bincount(owners, minlength=clients)
    for client in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        owners[generator.choice(np.flatnonzero(owners == largest))] = client
        sizes[largest] -= 1
        sizes[client] += 1


def _client_rows(clients: int, train_owners: IntArray, test_owners: IntArray) -> ClientRows:
    return _rows_by_client(train_owners, clients), _rows_by_client(test_owners, clients)


def _rows_by_client(owners: IntArray, clients: int) -> list[Rows]:
    """Each client's rows in ascending order, from each row's owner (rows,)."""
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(np.argsort(owners, kind="stable"), ends[:-1])


def _require_positive(name: str, value: int) -> None:
    require_count(f"partition: {name}", value, 1, MAX_CLIENTS)


def _require_enough_slots(clients: int, classes_per_client: int, classes: int) -> None:
    if clients * min(classes_per_client, classes) < classes:
        needed = -(-classes // classes_per_client)
        raise InputError(
            f"partition: {clients} clients with {classes_per_client} classes each cannot hold "
            f"{classes} classes; use at least {needed} clients or more classes per client"
        )


def _require_one_per_example(
    what: str, part: str, values: npt.NDArray[np.generic], labels: IntArray
) -> None:
    if len(labels) != len(values):
        raise InputError(
            f"partition: {len(values)} {part} {what} but {len(labels)} {part} examples; "
            "give one per example"
        )


def _require_trained(ids: npt.NDArray[np.generic]) -> None:
    """Refuse ids of test examples that no training example has."""
    if len(ids):
        raise InputError(
            f"partition: test id {describe_value(ids.tolist()[0])} has no training example "
            f"({len(ids)} such ids); "
            "drop those test rows"
        )


def _require_enough_examples(clients: int, train: IntArray) -> None:
    if clients > len(train):
        raise InputError(
            f"partition: {clients} clients but {len(train)} training examples; "
            f"use at most {len(train)} clients"
        )


def _require_no_empty_clients(owners: IntArray, clients: int) -> None:
    empty = np.flatnonzero(np.bincount(owners, minlength=clients) == 0)
    if len(empty):
        raise InputError(
            f"partition: its classes leave client {empty[0]} no training example "
            f"({len(empty)} such clients); use fewer clients or more classes per client"
        )
