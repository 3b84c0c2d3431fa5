"""The training, validation and test data of every client."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.core.bounds import MAX_SEED, require_count
from glocal.core.checks import require_instance, require_number, require_path
from glocal.core.data import Arrays, ClientData, Examples, Rows, concatenate, hold_out
from glocal.core.errors import InputError, describe_error, describe_value
from glocal.core.hold_out import hold_out_share
from glocal.core.one_line import one_line
from glocal.core.sampling import IntArray, make_rng
from glocal.datasets.dataset import Dataset
from glocal.datasets.partitions import ClientRows, Partitioner, class_labels
from glocal.datasets.readers import (
    Collate,
    ReadOptions,
    TorchDataset,
    read_dataframe,
    read_datasets,
    read_folder,
)

ClientArrays = Sequence[Arrays] | Mapping[str, Arrays]
_MEMORY = 4 * 10**9  # bytes of one data set


@dataclass(frozen=True)
class FederatedData:
    """The training, validation and test data of all clients, and their unlabelled inputs.

    >>> arrays = np.zeros((20, 3)), np.arange(20) % 2
    >>> FederatedData.from_tensors({"ulm": arrays, "bonn": arrays}).num_clients
    2
    """

    train: ClientData
    val: ClientData
    test: ClientData
    unlabeled: ClientData | None = None

    def __repr__(self) -> str:
        return one_line(self)

    def __post_init__(self) -> None:
        for part in ("train", "val", "test"):
            require_instance(
                f"data: {part}", getattr(self, part), ClientData, "a glocal.ClientData"
            )
        unlabeled = self.unlabeled
        require_instance("data: unlabeled", unlabeled, ClientData | None, "a glocal.ClientData")

    @classmethod
    def from_tensors(
        cls,
        clients: ClientArrays,
        *,
        test: float | ClientArrays = 0.2,
        validation: float | ClientArrays = 0.1,
        seed: int = 0,
    ) -> "FederatedData":
        """From your own arrays: one (x, y) or (x, y, group) per client, in a list or by name.

        `test` and `validation` are a share of each client's examples, or data like `clients`.

        >>> data = FederatedData.from_tensors({"ulm": (np.zeros((10, 3)), np.arange(10) % 2)})
        >>> data.names, data.train.sizes.tolist()
        (('ulm',), [7])
        """
        return train_val_test_split(
            concatenate(clients), test=test, validation=validation, seed=seed
        )

    @classmethod
    def from_datasets(
        cls,
        datasets: Sequence[TorchDataset] | Mapping[str, TorchDataset] | TorchDataset,
        *,
        clients: npt.ArrayLike | None = None,
        collate: Collate | None = None,
        memory: int = _MEMORY,
        test: float | ClientArrays = 0.2,
        validation: float | ClientArrays = 0.1,
        seed: int = 0,
    ) -> "FederatedData":
        """From torch's data sets: one per client, or a single one and the client of each example.

        Every item is read once into tensors. Data sets that take more than `memory` bytes are read
        into a file in the cache instead. `collate` makes (x, y) of a list of items, where they do
        not stack by themselves.
        """
        require_count("data: memory", memory, 0, 2**62)
        require_instance("data: collate", collate, Callable | None, "a function of a list of items")
        data = read_datasets(datasets, clients, ReadOptions(collate, memory))
        return train_val_test_split(data, test=test, validation=validation, seed=seed)

    @classmethod
    def from_dataframe(
        cls,
        frame: Any,
        *,
        client: str,
        target: str,
        test: float | ClientArrays = 0.2,
        validation: float | ClientArrays = 0.1,
        seed: int = 0,
    ) -> "FederatedData":
        """From a pandas table: `client` and `target` name its columns, all others are inputs."""
        require_instance("data: client", client, str, "the name of a column")
        require_instance("data: target", target, str, "the name of a column")
        data = read_dataframe(frame, client, target)
        return train_val_test_split(data, test=test, validation=validation, seed=seed)

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        *,
        target: str = "y",
        test: float | ClientArrays = 0.2,
        validation: float | ClientArrays = 0.1,
        seed: int = 0,
    ) -> "FederatedData":
        """From one file per client, which gives the client its name: CSV, Parquet or .npz.

        In a table all columns but `target` are inputs; a .npz file has the arrays x and y.
        """
        require_instance("data: target", target, str, "the name of a column")
        data = concatenate(read_folder(require_path("data: folder", folder), target))
        return train_val_test_split(data, test=test, validation=validation, seed=seed)

    @classmethod
    def partition(
        cls, dataset: Dataset, scheme: Partitioner, *, validation: float = 0.1, seed: int = 0
    ) -> "FederatedData":
        """A whole data set over clients, as `shards(10, 2)` or another scheme says.

        The stores are used as they are, not copied.
        """
        require_instance("data: dataset", dataset, Dataset, "a data set of load_dataset")
        require_instance("data: scheme", scheme, Callable, "a partition such as glocal.iid(10)")
        _require_held_out("validation", validation, seed)
        train_labels = class_labels(dataset.train.y, "train")
        test_labels = class_labels(dataset.test.y, "test")
        train, test = _partitioned(scheme, train_labels, test_labels, make_rng(seed, "partition"))
        names = tuple(getattr(scheme, "names", ()))
        return hold_out_validation(
            ClientData(dataset.train, tuple(train), names),
            ClientData(dataset.test, tuple(test), names),
            validation=validation,
            seed=seed,
        )

    @property
    def num_clients(self) -> int:
        """M, the number of clients."""
        return self.train.num_clients

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names; empty where they have none."""
        return self.train.names

    def subsets(self) -> tuple[ClientData, ...]:
        """Train, validation, test, and the unlabelled data if there are any."""
        subsets = (self.train, self.val, self.test)
        return subsets if self.unlabeled is None else (*subsets, self.unlabeled)

    def to(self, device: torch.device) -> "FederatedData":
        """The same on a device; subsets with one store have one again."""
        require_instance("data: device", device, torch.device, "a torch.device")
        return move_together([self], device)[0]

    def map_subsets(self, change: Callable[[ClientData], ClientData]) -> "FederatedData":
        """The same with every subset changed."""
        return FederatedData(*map(change, self.subsets()))

    def subsample_labels(self, share: float, *, seed: int) -> "FederatedData":
        """Keep the labels of a share of every client's training examples, at least one.

        All training inputs stay, without labels, in `unlabeled`.
        """
        _require_share(share)
        require_count("data: seed", seed, 0, MAX_SEED)
        labelled: list[Rows] = []
        for client, rows in enumerate(self.train.rows):
            labelled.append(_subsample(rows, share, seed, client))
        train = replace(self.train, rows=tuple(labelled))
        return replace(self, train=train, unlabeled=self.train)


def require_data(name: str, data: object) -> None:
    """Refuse what is not the data of many clients."""
    expected = "a FederatedData, such as glocal.FederatedData.from_tensors(...),"
    require_instance(name, data, FederatedData, expected)


def move_together(data: Sequence[FederatedData], device: torch.device) -> list[FederatedData]:
    """Data on a device; those with one store of examples have one again."""
    stores: dict[int, Examples] = {}

    def moved(subset: ClientData) -> ClientData:
        key = id(subset.examples)
        if key not in stores:
            stores[key] = subset.examples.to(device)
        return replace(subset, examples=stores[key])

    return [each.map_subsets(moved) for each in data]


def train_val_test_split(
    data: ClientData,
    *,
    test: float | ClientArrays,
    validation: float | ClientArrays,
    seed: int,
    first_client: int = 0,
) -> FederatedData:
    """The data with a test and a validation part of every client: given, or held out.

    What is held out has the same share of every class, where targets are classes. The clients are
    numbered from `first_client`: a real client's own data give the same parts.
    """
    require_count("data: seed", seed, 0, MAX_SEED)
    rest, test_data = _take_part(data, test, seed, "test", first_client)
    train, val = _take_part(rest, validation, seed, "validation", first_client)
    return FederatedData(train, val, test_data)


def hold_out_validation(
    train: ClientData, test: ClientData, *, validation: float, seed: int
) -> FederatedData:
    """Hold out a share of every client's training examples for validation."""
    train, val = _hold_out_share(train, validation, seed, "validation")
    return FederatedData(train, val, test)


def _partitioned(
    scheme: Partitioner, train: IntArray, test: IntArray, generator: np.random.Generator
) -> ClientRows:
    """Each client's rows; a user's own scheme may fail."""
    try:
        train_rows, test_rows = scheme(train, test, generator)
        return [np.asarray(rows) for rows in train_rows], [np.asarray(rows) for rows in test_rows]
    except InputError:
        raise
    except Exception as error:  # a user's own scheme may raise anything
        raise InputError(
            f"data: the scheme fails ({describe_error(error)}); a partition such as "
            "glocal.iid(10) was expected"
        ) from error


def _require_share(share: float) -> None:
    require_number("data: labelled", share, lambda value: 0 < value <= 1, "above 0 and up to 1")


def _require_held_out(purpose: str, share: object, seed: object) -> None:
    """Refuse a share that leaves nothing, and what is no seed."""
    require_number(
        f"data: the fraction for {purpose}",
        share,
        lambda value: 0 <= value < 1,
        "of at least 0 and below 1",
    )
    require_count("data: seed", seed, 0, MAX_SEED)


def _subsample(rows: Rows, share: float, seed: int, client: int) -> Rows:
    """A share of a client's rows, at least one, in ascending order."""
    order = make_rng(seed, "labels", client).permutation(rows)
    return np.sort(order[: max(1, round(share * len(rows)))])


def _take_part(
    data: ClientData, part: float | ClientArrays, seed: int, purpose: str, first_client: int
) -> tuple[ClientData, ClientData]:
    """What remains of every client's examples, and its part for a purpose."""
    if isinstance(part, Sequence | Mapping):
        given = concatenate(part)
        _require_same_clients(given, data, purpose)
        return data, given
    if isinstance(part, bool) or not isinstance(part, int | float):
        raise InputError(
            f"data: {purpose} is {describe_value(part)}; "
            "a share from 0 to below 1, or data for every client, was expected"
        )
    _require_held_out(purpose, part, seed)
    return held_out(data, float(part), seed=seed, purpose=purpose, first_client=first_client)


def held_out(
    data: ClientData, share: float, *, seed: int, purpose: str, first_client: int = 0
) -> tuple[ClientData, ClientData]:
    """The rest of every client's examples, and what is held out, by class where there are any."""
    y = data.examples.y
    has_classes = isinstance(y, Tensor) and y.dim() == 1 and not y.is_floating_point()
    classes = y.cpu().numpy() if has_classes and data.examples.has_targets else None
    rest, held = hold_out_share(
        data.rows,
        share,
        seed=seed,
        purpose=purpose,
        classes=classes,
        first_client=first_client,
    )
    return replace(data, rows=rest), replace(data, rows=held)


def _require_same_clients(given: ClientData, data: ClientData, purpose: str) -> None:
    if given.num_clients != data.num_clients:
        raise InputError(
            f"data: {data.num_clients} clients but {given.num_clients} {purpose} sets; "
            "give one per client, or a share"
        )
    if given.names != data.names:
        raise InputError(
            f"data: the {purpose} sets are of {', '.join(given.names) or 'clients without names'}, "
            f"the training sets of {', '.join(data.names) or 'clients without names'}; "
            "give both the same names in the same order"
        )


def _hold_out_share(
    data: ClientData, share: float, seed: int, purpose: str
) -> tuple[ClientData, ClientData]:
    """The rest of every client's examples, and what is held out."""
    remaining: list[Rows] = []
    held_out: list[Rows] = []
    for client, rows in enumerate(data.rows):
        rest, part = hold_out(rows, share, seed, purpose, client)
        remaining.append(rest)
        held_out.append(part)
    return replace(data, rows=tuple(remaining)), replace(data, rows=tuple(held_out))
