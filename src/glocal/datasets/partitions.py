"""Who gets which examples: equal shares, a few classes each, Dirichlet proportions, or as the data came.

A partition maps training labels and test labels to each device's rows of either. Every row goes to exactly one device.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.data import ClientData, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import IntArray, make_rng
from glocal.datasets.federated import FederatedData, hold_out_validation
from glocal.datasets.sources import Dataset

ClientRows = tuple[list[Rows], list[Rows]]
Partitioner = Callable[[IntArray, IntArray, np.random.Generator], ClientRows]

_LARGEST_ALPHA = (
    1e6  # beyond, shares are equal to within a row; far beyond, numpy's gamma numbers overflow
)


def partition(
    dataset: Dataset, partitioner: Partitioner, *, validation: float = 0.1, seed: int = 0
) -> FederatedData:
    """Give every device its examples; the stores are used as they are, not copied."""
    for part, (_, y, _) in (("train", dataset.train), ("test", dataset.test)):
        if y.dim() != 1 or y.dtype != torch.int64:
            raise InputError(
                f"data: {part} labels are {tuple(y.shape)} {y.dtype}; whole numbers (rows,) were expected: y.long()"
            )
    labels = [part.y.cpu().numpy() for part in (dataset.train, dataset.test)]
    train, test = partitioner(labels[0], labels[1], make_rng(seed, "partition"))
    return hold_out_validation(
        ClientData(dataset.train, tuple(train)),
        ClientData(dataset.test, tuple(test)),
        validation=validation,
        seed=seed,
    )


def class_counts(data: ClientData, classes: int) -> IntArray:
    """How many examples of each class every device holds (devices, classes)."""
    labels = data.examples.y.cpu().numpy()
    counts = np.zeros((data.num_clients, classes), dtype=np.int64)
    for client, rows in enumerate(data.rows):
        np.add.at(counts[client], labels[rows], 1)
    return counts


def iid(clients: int) -> Partitioner:
    """Shares of equal size, at random."""
    _require_positive("devices", clients)

    def partition(train: IntArray, test: IntArray, generator: np.random.Generator) -> ClientRows:
        _require_enough_examples(clients, train)
        owners = [
            generator.permutation(np.arange(len(labels)) % clients) for labels in (train, test)
        ]
        return _client_rows(clients, *owners)

    return partition


def shards(clients: int, classes_per_client: int) -> Partitioner:
    """So many classes on each device, no fewer where that can be, the same in training and test."""
    return _shard_partitioner(clients, classes_per_client, _remove_duplicates)


def random_shards(clients: int, classes_per_client: int) -> Partitioner:
    """So many shards of one class each, at random (McMahan et al. 2017, section 3): two of one class stay with their device.

    So a device has at most so many classes, and some have fewer: of 100 devices with two of ten classes 9.5 have one, on average.
    """
    return _shard_partitioner(clients, classes_per_client, lambda held, generator: held)


def _shard_partitioner(
    clients: int, classes_per_client: int, sort: Callable[[IntArray, np.random.Generator], IntArray]
) -> Partitioner:
    _require_positive("devices", clients)
    _require_positive("classes_per_client", classes_per_client)

    def partition(train: IntArray, test: IntArray, generator: np.random.Generator) -> ClientRows:
        _require_enough_examples(clients, train)
        classes = np.union1d(train, test)
        held = sort(
            _assign_slots(_slots(clients, classes_per_client, classes, train), clients, generator),
            generator,
        )
        train_owners, test_owners = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)
        for label, slots in zip(classes, held.T, strict=True):
            holders = generator.permutation(np.repeat(np.arange(clients), slots))
            for owners, labels in ((train_owners, train), (test_owners, test)):
                rows = generator.permutation(np.flatnonzero(labels == label))
                owners[rows] = holders[np.arange(len(rows)) % len(holders)]
        _require_no_empty_clients(train_owners, clients)
        return _client_rows(clients, train_owners, test_owners)

    return partition


def dirichlet(clients: int, alpha: float) -> Partitioner:
    """Each class in proportions drawn from Dir(alpha), the same in training and test (Hsu, Qi and Brown 2019)."""
    _require_positive("devices", clients)
    if not 0 < alpha <= _LARGEST_ALPHA:
        raise InputError(
            f"partition: alpha is {alpha}; it must be above 0 and at most {_LARGEST_ALPHA:g} (iid gives equal shares)"
        )

    def partition(train: IntArray, test: IntArray, generator: np.random.Generator) -> ClientRows:
        _require_enough_examples(clients, train)
        train_owners, test_owners = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)
        for label in np.union1d(train, test):
            proportions = generator.dirichlet(np.full(clients, alpha))
            for owners, labels in ((train_owners, train), (test_owners, test)):
                rows = generator.permutation(np.flatnonzero(labels == label))
                owners[rows] = np.repeat(np.arange(clients), apportion(proportions, len(rows)))
        _fill_empty_clients(train_owners, clients, generator)
        return _client_rows(clients, train_owners, test_owners)

    return partition


def natural(train_ids: npt.ArrayLike, test_ids: npt.ArrayLike) -> Partitioner:
    """One device for each distinct id among the training examples, in sorted order; ids are numbers or names, one per row."""
    people, train_owners = np.unique(np.asarray(train_ids), return_inverse=True)
    tested = np.asarray(test_ids)
    strangers = np.setdiff1d(tested, people)
    if len(strangers):
        raise InputError(
            f"partition: test id {strangers[0]} has no training example ({len(strangers)} such ids); drop those test rows"
        )
    test_owners = np.searchsorted(people, tested)

    def partition(train: IntArray, test: IntArray, generator: np.random.Generator) -> ClientRows:
        for part, labels, owners in (
            ("training", train, train_owners),
            ("test", test, test_owners),
        ):
            if len(labels) != len(owners):
                raise InputError(
                    f"partition: {len(owners)} {part} ids but {len(labels)} {part} examples; give one id per example"
                )
        return _client_rows(len(people), train_owners, test_owners)

    return partition


def question_type_shards(clients: int, train_types: IntArray, test_types: IntArray) -> Partitioner:
    """One shard for each device of examples sorted by their kind, whatever their labels; kinds come in a random order.

    Shards are of equal size, so that a common kind is on several devices and rare ones share one. Tests follow: those of a kind go
    to devices as its training examples do, those of a kind that nobody trains on anywhere.
    """
    _require_positive("devices", clients)

    def partition(train: IntArray, test: IntArray, generator: np.random.Generator) -> ClientRows:
        for part, labels, types in (("training", train, train_types), ("test", test, test_types)):
            if len(labels) != len(types):
                raise InputError(
                    f"partition: {len(types)} {part} kinds but {len(labels)} {part} examples; give one per example"
                )
        _require_enough_examples(clients, train)
        train_owners, test_owners = (
            np.zeros(len(train), np.int64),
            generator.integers(clients, size=len(test)),
        )
        turn = generator.permutation(int(max(train_types.max(), test_types.max(initial=0))) + 1)
        row_order = np.lexsort((generator.random(len(train)), turn[train_types]))
        train_owners[row_order] = np.arange(len(train)) * clients // len(train)
        for kind in np.intersect1d(train_types, test_types):
            held = np.bincount(train_owners[train_types == kind], minlength=clients)
            rows = generator.permutation(np.flatnonzero(test_types == kind))
            test_owners[rows] = np.repeat(
                np.arange(clients), apportion(held / held.sum(), len(rows))
            )
        return _client_rows(clients, train_owners, test_owners)

    return partition


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


def _slots(clients: int, classes_per_client: int, classes: IntArray, train: IntArray) -> IntArray:
    """How many devices each class goes to (classes,): equally many, what is left over to the largest classes."""
    total = clients * min(classes_per_client, len(classes))
    if total < len(classes):
        raise InputError(
            f"partition: {clients} devices with {classes_per_client} classes each cannot hold {len(classes)} classes; "
            f"use at least {-(-len(classes) // classes_per_client)} devices or more classes per device"
        )
    sizes = np.array([np.count_nonzero(train == label) for label in classes])
    slots = np.full(len(classes), total // len(classes))
    slots[np.argsort(-sizes, kind="stable")[: total % len(classes)]] += 1
    return slots


def _assign_slots(slots: IntArray, clients: int, generator: np.random.Generator) -> IntArray:
    """Deal the slots at random, equally many to each device: how many of which class it holds (devices, classes)."""
    deck = generator.permutation(np.repeat(np.arange(len(slots)), slots)).reshape(clients, -1)
    held = np.zeros((clients, len(slots)), dtype=np.int64)
    np.add.at(held, (np.arange(clients)[:, None], deck), 1)
    return held


def _remove_duplicates(held: IntArray, generator: np.random.Generator) -> IntArray:
    """The same hands after trades that leave no device two slots of one class: 0 or 1 (devices, classes)."""
    while len(doubles := np.argwhere(held > 1)):
        for client, label in doubles:
            if held[client, label] > 1:
                _swap(held, client, label, generator)
    return held


def _swap(held: IntArray, client: int, label: int, generator: np.random.Generator) -> None:
    """Trade a doubled class with a device that lacks it; each trade leaves fewer doubles, so that the trading ends.

    No class has more slots than there are devices, so some device lacks it. Either that device has a class that is new here, or all
    that it has is here already: fewer kinds than slots, so it has a double itself and gives that.
    """
    other = generator.choice(np.flatnonzero(held[:, label] == 0))
    new_here = (held[other] > 0) & (held[client] == 0)
    offer = generator.choice(np.flatnonzero(new_here if new_here.any() else held[other] > 1))
    held[client, [label, offer]] += (-1, 1)
    held[other, [label, offer]] += (1, -1)


def _fill_empty_clients(owners: IntArray, clients: int, generator: np.random.Generator) -> None:
    """Give every device without an example one of the largest device's, in place."""
    sizes = np.bincount(owners, minlength=clients)
    for client in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        owners[generator.choice(np.flatnonzero(owners == largest))] = client
        sizes[largest] -= 1
        sizes[client] += 1


def _client_rows(clients: int, train_owners: IntArray, test_owners: IntArray) -> ClientRows:
    return _rows_by_client(train_owners, clients), _rows_by_client(test_owners, clients)


def _rows_by_client(owners: IntArray, clients: int) -> list[Rows]:
    """Each device's rows, ascending, from each row's owner (rows,)."""
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(np.argsort(owners, kind="stable"), ends[:-1])


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"partition: {name} is {value}; it must be at least 1")


def _require_enough_examples(clients: int, train: IntArray) -> None:
    if clients > len(train):
        raise InputError(
            f"partition: {clients} devices but {len(train)} training examples; use at most {len(train)} devices"
        )


def _require_no_empty_clients(owners: IntArray, clients: int) -> None:
    empty = np.flatnonzero(np.bincount(owners, minlength=clients) == 0)
    if len(empty):
        raise InputError(
            f"partition: its classes leave device {empty[0]} no training example ({len(empty)} such devices); "
            "use fewer devices or more classes per device"
        )
