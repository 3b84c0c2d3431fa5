"""Who gets which examples: equal shares, a few classes each, Dirichlet proportions, or as the data came.

A partition maps training labels and test labels to each device's rows of either. Every row goes to exactly one device.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from glocal.core.data import Holdings, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import Integers, stream
from glocal.datasets.federated import Federation, with_validation
from glocal.datasets.sources import Dataset

Shares = tuple[list[Rows], list[Rows]]
Partition = Callable[[Integers, Integers, np.random.Generator], Shares]

_LARGEST_ALPHA = 1e6  # beyond, shares are equal to within a row; far beyond, numpy's gamma numbers overflow


def deal(dataset: Dataset, partition: Partition, *, validation: float = 0.1, seed: int = 0) -> Federation:
    """Give every device its examples; the stores are used as they are, not copied."""
    for part, (_, y, _) in (("train", dataset.train), ("test", dataset.test)):
        if y.dim() != 1 or y.dtype != torch.int64:
            raise InputError(f"data: {part} labels are {tuple(y.shape)} {y.dtype}; whole numbers (rows,) were expected: y.long()")
    labels = [part.y.cpu().numpy() for part in (dataset.train, dataset.test)]
    train, test = partition(labels[0], labels[1], stream(seed, "partition"))
    return with_validation(
        Holdings(dataset.train, tuple(train)), Holdings(dataset.test, tuple(test)), validation=validation, seed=seed
    )


def class_counts(holdings: Holdings, classes: int) -> Integers:
    """How many examples of each class every device holds (devices, classes)."""
    labels = holdings.examples.y.cpu().numpy()
    counts = np.zeros((holdings.devices, classes), dtype=np.int64)
    for device, rows in enumerate(holdings.rows):
        np.add.at(counts[device], labels[rows], 1)
    return counts


def iid(devices: int) -> Partition:
    """Shares of equal size, at random."""
    _at_least_one("devices", devices)

    def partition(train: Integers, test: Integers, generator: np.random.Generator) -> Shares:
        _enough(devices, train)
        owners = [generator.permutation(np.arange(len(labels)) % devices) for labels in (train, test)]
        return _shares(devices, *owners)

    return partition


def shards(devices: int, classes_per_device: int) -> Partition:
    """So many classes on each device, no fewer where that can be, the same in training and test."""
    return _in_shards(devices, classes_per_device, _distinct)


def random_shards(devices: int, classes_per_device: int) -> Partition:
    """So many shards of one class each, at random (McMahan et al. 2017, section 3): two of one class stay with their device.

    So a device has at most so many classes, and some have fewer: of 100 devices with two of ten classes 9.5 have one, on average.
    """
    return _in_shards(devices, classes_per_device, lambda held, generator: held)


def _in_shards(devices: int, classes_per_device: int, sort: Callable[[Integers, np.random.Generator], Integers]) -> Partition:
    _at_least_one("devices", devices)
    _at_least_one("classes_per_device", classes_per_device)

    def partition(train: Integers, test: Integers, generator: np.random.Generator) -> Shares:
        _enough(devices, train)
        classes = np.union1d(train, test)
        held = sort(_hands(_slots(devices, classes_per_device, classes, train), devices, generator), generator)
        train_owners, test_owners = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)
        for label, slots in zip(classes, held.T, strict=True):
            holders = generator.permutation(np.repeat(np.arange(devices), slots))
            for owners, labels in ((train_owners, train), (test_owners, test)):
                rows = generator.permutation(np.flatnonzero(labels == label))
                owners[rows] = holders[np.arange(len(rows)) % len(holders)]
        _none_empty(train_owners, devices)
        return _shares(devices, train_owners, test_owners)

    return partition


def dirichlet(devices: int, alpha: float) -> Partition:
    """Each class in proportions drawn from Dir(alpha), the same in training and test (Hsu, Qi and Brown 2019)."""
    _at_least_one("devices", devices)
    if not 0 < alpha <= _LARGEST_ALPHA:
        raise InputError(f"partition: alpha is {alpha}; it must be above 0 and at most {_LARGEST_ALPHA:g} (iid gives equal shares)")

    def partition(train: Integers, test: Integers, generator: np.random.Generator) -> Shares:
        _enough(devices, train)
        train_owners, test_owners = np.zeros(len(train), np.int64), np.zeros(len(test), np.int64)
        for label in np.union1d(train, test):
            proportions = generator.dirichlet(np.full(devices, alpha))
            for owners, labels in ((train_owners, train), (test_owners, test)):
                rows = generator.permutation(np.flatnonzero(labels == label))
                owners[rows] = np.repeat(np.arange(devices), apportion(proportions, len(rows)))
        _feed_the_empty(train_owners, devices, generator)
        return _shares(devices, train_owners, test_owners)

    return partition


def natural(train_ids: npt.ArrayLike, test_ids: npt.ArrayLike) -> Partition:
    """One device for each distinct id among the training examples, in sorted order; ids are numbers or names, one per row."""
    people, train_owners = np.unique(np.asarray(train_ids), return_inverse=True)
    tested = np.asarray(test_ids)
    strangers = np.setdiff1d(tested, people)
    if len(strangers):
        raise InputError(
            f"partition: test id {strangers[0]} has no training example ({len(strangers)} such ids); drop those test rows"
        )
    test_owners = np.searchsorted(people, tested)

    def partition(train: Integers, test: Integers, generator: np.random.Generator) -> Shares:
        for part, labels, owners in (("training", train, train_owners), ("test", test, test_owners)):
            if len(labels) != len(owners):
                raise InputError(f"partition: {len(owners)} {part} ids but {len(labels)} {part} examples; give one id per example")
        return _shares(len(people), train_owners, test_owners)

    return partition


def kind_shards(devices: int, train_kinds: Integers, test_kinds: Integers) -> Partition:
    """One shard for each device of examples sorted by their kind, whatever their labels; kinds come in a random order.

    Shards are of equal size, so that a common kind is on several devices and rare ones share one. Tests follow: those of a kind go
    to devices as its training examples do, those of a kind that nobody trains on anywhere.
    """
    _at_least_one("devices", devices)

    def partition(train: Integers, test: Integers, generator: np.random.Generator) -> Shares:
        for part, labels, kinds in (("training", train, train_kinds), ("test", test, test_kinds)):
            if len(labels) != len(kinds):
                raise InputError(f"partition: {len(kinds)} {part} kinds but {len(labels)} {part} examples; give one per example")
        _enough(devices, train)
        train_owners, test_owners = np.zeros(len(train), np.int64), generator.integers(devices, size=len(test))
        turn = generator.permutation(int(max(train_kinds.max(), test_kinds.max(initial=0))) + 1)
        row_order = np.lexsort((generator.random(len(train)), turn[train_kinds]))
        train_owners[row_order] = np.arange(len(train)) * devices // len(train)
        for kind in np.intersect1d(train_kinds, test_kinds):
            held = np.bincount(train_owners[train_kinds == kind], minlength=devices)
            rows = generator.permutation(np.flatnonzero(test_kinds == kind))
            test_owners[rows] = np.repeat(np.arange(devices), apportion(held / held.sum(), len(rows)))
        return _shares(devices, train_owners, test_owners)

    return partition


def apportion(proportions: npt.NDArray[np.float64], total: int) -> Integers:
    """Whole numbers that add up to the total, by largest remainder.

    >>> apportion(np.array([0.5, 0.3, 0.2]), 9).tolist()
    [4, 3, 2]
    """
    quotas = proportions * total
    counts = np.floor(quotas).astype(np.int64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - quotas, kind="stable")[:missing]] += 1
    return counts


def _slots(devices: int, classes_per_device: int, classes: Integers, train: Integers) -> Integers:
    """How many devices each class goes to (classes,): equally many, what is left over to the largest classes."""
    total = devices * min(classes_per_device, len(classes))
    if total < len(classes):
        raise InputError(
            f"partition: {devices} devices with {classes_per_device} classes each cannot hold {len(classes)} classes; "
            f"use at least {-(-len(classes) // classes_per_device)} devices or more classes per device"
        )
    sizes = np.array([np.count_nonzero(train == label) for label in classes])
    slots = np.full(len(classes), total // len(classes))
    slots[np.argsort(-sizes, kind="stable")[: total % len(classes)]] += 1
    return slots


def _hands(slots: Integers, devices: int, generator: np.random.Generator) -> Integers:
    """Deal the slots at random, equally many to each device: how many of which class it holds (devices, classes)."""
    deck = generator.permutation(np.repeat(np.arange(len(slots)), slots)).reshape(devices, -1)
    held = np.zeros((devices, len(slots)), dtype=np.int64)
    np.add.at(held, (np.arange(devices)[:, None], deck), 1)
    return held


def _distinct(held: Integers, generator: np.random.Generator) -> Integers:
    """The same hands after trades that leave no device two slots of one class: 0 or 1 (devices, classes)."""
    while len(doubles := np.argwhere(held > 1)):
        for device, label in doubles:
            if held[device, label] > 1:
                _swap(held, device, label, generator)
    return held


def _swap(held: Integers, device: int, label: int, generator: np.random.Generator) -> None:
    """Trade a doubled class with a device that lacks it; each trade leaves fewer doubles, so that the trading ends.

    No class has more slots than there are devices, so some device lacks it. Either that device has a class that is new here, or all
    that it has is here already: fewer kinds than slots, so it has a double itself and gives that.
    """
    other = generator.choice(np.flatnonzero(held[:, label] == 0))
    new_here = (held[other] > 0) & (held[device] == 0)
    offer = generator.choice(np.flatnonzero(new_here if new_here.any() else held[other] > 1))
    held[device, [label, offer]] += (-1, 1)
    held[other, [label, offer]] += (1, -1)


def _feed_the_empty(owners: Integers, devices: int, generator: np.random.Generator) -> None:
    """Give every device without an example one of the largest device's, in place."""
    sizes = np.bincount(owners, minlength=devices)
    for device in np.flatnonzero(sizes == 0):
        largest = int(np.argmax(sizes))
        owners[generator.choice(np.flatnonzero(owners == largest))] = device
        sizes[largest] -= 1
        sizes[device] += 1


def _shares(devices: int, train_owners: Integers, test_owners: Integers) -> Shares:
    return _rows(train_owners, devices), _rows(test_owners, devices)


def _rows(owners: Integers, devices: int) -> list[Rows]:
    """Each device's rows, ascending, from each row's owner (rows,)."""
    ends = np.cumsum(np.bincount(owners, minlength=devices))
    return np.split(np.argsort(owners, kind="stable"), ends[:-1])


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise InputError(f"partition: {name} is {value}; it must be at least 1")


def _enough(devices: int, train: Integers) -> None:
    if devices > len(train):
        raise InputError(f"partition: {devices} devices but {len(train)} training examples; use at most {len(train)} devices")


def _none_empty(owners: Integers, devices: int) -> None:
    empty = np.flatnonzero(np.bincount(owners, minlength=devices) == 0)
    if len(empty):
        raise InputError(
            f"partition: its classes leave device {empty[0]} no training example ({len(empty)} such devices); "
            "use fewer devices or more classes per device"
        )
