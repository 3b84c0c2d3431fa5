"""The training, validation and test data of every client."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from glocal.core.data import Arrays, ClientData, Examples, Rows, concatenate, hold_out
from glocal.core.errors import InputError
from glocal.core.sampling import make_rng


@dataclass(frozen=True)
class FederatedData:
    """The training, validation and test data of all clients, and their unlabelled inputs."""

    train: ClientData
    val: ClientData
    test: ClientData
    unlabeled: ClientData | None = None

    @property
    def num_clients(self) -> int:
        """M, the number of clients."""
        return self.train.num_clients

    def subsets(self) -> tuple[ClientData, ...]:
        """Train, validation, test, and the unlabelled data if there are any."""
        subsets = (self.train, self.val, self.test)
        return subsets if self.unlabeled is None else (*subsets, self.unlabeled)

    def map_subsets(self, change: Callable[[ClientData], ClientData]) -> "FederatedData":
        """The same with every subset changed."""
        return FederatedData(*map(change, self.subsets()))

    def subsample_labels(self, share: float, *, seed: int) -> "FederatedData":
        """Keep the labels of a share of every client's training examples, at least one.

        All training inputs stay, without labels, in `unlabeled`.
        """
        _require_share(share)
        labelled: list[Rows] = []
        for client, rows in enumerate(self.train.rows):
            labelled.append(_subsample(rows, share, seed, client))
        train = replace(self.train, rows=tuple(labelled))
        return replace(self, train=train, unlabeled=self.train)


def from_tensors(
    clients: Sequence[Arrays],
    *,
    test: float | Sequence[Arrays] = 0.2,
    validation: float = 0.1,
    seed: int = 0,
) -> FederatedData:
    """Federated data from your own arrays: one (x, y) or (x, y, group) per client.

    `test` is a share of each client's examples, or one (x, y) or (x, y, group) per client.

    >>> federated = from_tensors([(np.zeros((10, 3)), np.arange(10) % 2)] * 4)
    >>> federated.num_clients, federated.train.sizes.tolist()
    (4, [7, 7, 7, 7])
    """
    return train_val_test_split(concatenate(clients), test=test, validation=validation, seed=seed)


def train_val_test_split(
    data: ClientData, *, test: float | Sequence[Arrays], validation: float, seed: int
) -> FederatedData:
    """Hold out a validation share, and a test share unless there are test sets, of every client."""
    if not isinstance(test, Sequence):
        train, held_out = _hold_out_share(data, float(test), seed, "test")
        return hold_out_validation(train, held_out, validation=validation, seed=seed)
    _require_test_sets(len(test), data.num_clients)
    return hold_out_validation(data, concatenate(test), validation=validation, seed=seed)


def hold_out_validation(
    train: ClientData, test: ClientData, *, validation: float, seed: int
) -> FederatedData:
    """Hold out a share of every client's training examples for validation."""
    train, val = _hold_out_share(train, validation, seed, "validation")
    return FederatedData(train, val, test)


def validate_data(federated: FederatedData, classes: int) -> None:
    """Refuse data that cannot be trained on.

    Such are empty clients, labels outside 0..classes-1, NaN, and rows in two subsets.
    """
    parts = {"train": federated.train, "validation": federated.val, "test": federated.test}
    for part, data in parts.items():
        _require_clients(data, part, federated.num_clients)
    _validate_stores(parts)
    for part, data in parts.items():
        _require_class_numbers(data.examples.y, part, classes)
        _require_known_classes(data, part, classes)
    _require_training_examples(federated.train)


def _require_share(share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(f"data: labelled is {share}; a share above 0 and up to 1 was expected")


def _subsample(rows: Rows, share: float, seed: int, client: int) -> Rows:
    """A share of a client's rows, at least one, in ascending order."""
    order = make_rng(seed, "labels", client).permutation(rows)
    return np.sort(order[: max(1, round(share * len(rows)))])


def _require_test_sets(count: int, clients: int) -> None:
    if count != clients:
        raise InputError(
            f"data: {clients} clients but {count} test sets; give one per client, or a share"
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


def _validate_stores(parts: dict[str, ClientData]) -> None:
    """Check each store of examples once, by the first part that uses it."""
    users: dict[int, list[str]] = {}
    for part, data in parts.items():
        users.setdefault(id(data.examples), []).append(part)
    for names in users.values():
        examples = parts[names[0]].examples
        _validate_examples(examples, names[0], parts["train"].examples)
        rows = np.concatenate([parts[name].all_rows() for name in names])
        _require_rows_inside(rows, len(examples.y), names[0])
        _require_distinct_rows(rows)


def _validate_examples(examples: Examples, part: str, train: Examples) -> None:
    _require_one_label_per_input(examples, part)
    _require_same_inputs(examples.x, part, train.x)
    _require_finite(examples.x, part)


def _require_clients(data: ClientData, part: str, clients: int) -> None:
    if data.num_clients != clients:
        raise InputError(
            f"data: {clients} clients train, but {data.num_clients} have a {part} part; "
            "give one per client"
        )


def _require_training_examples(train: ClientData) -> None:
    empty = np.flatnonzero(train.sizes == 0)
    if len(empty):
        raise InputError(
            f"data: client {empty[0]} has no training examples ({len(empty)} such clients); "
            "drop it or use fewer clients"
        )


def _require_one_label_per_input(examples: Examples, part: str) -> None:
    inputs, labels = tuple(examples.x.shape), tuple(examples.y.shape)
    if labels != inputs[:1]:
        raise InputError(
            f"data: {part} inputs are {inputs} and labels {labels}; "
            "one label per input was expected"
        )


def _require_same_inputs(x: Tensor, part: str, train: Tensor) -> None:
    if _describe_input(x) != _describe_input(train):
        raise InputError(
            f"data: {part} inputs are {_describe_input(x)}, "
            f"training inputs {_describe_input(train)}; prepare both alike"
        )


def _describe_input(x: Tensor) -> str:
    """Shape and type of one input."""
    return f"{tuple(x.shape[1:])} {x.dtype}"


def _require_finite(x: Tensor, part: str) -> None:
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        bad = torch.isfinite(x).flatten(1).all(1).logical_not().nonzero()
        raise InputError(
            f"data: {part} example {int(bad[0])} holds NaN or infinity "
            f"({len(bad)} such examples); clean or drop them"
        )


def _require_rows_inside(rows: Rows, size: int, part: str) -> None:
    outside = rows[(rows < 0) | (rows >= size)]
    if len(outside):
        raise InputError(
            f"data: row {outside[0]} is outside the {size} {part} examples; partition them anew"
        )


def _require_distinct_rows(rows: Rows) -> None:
    repeated = np.flatnonzero(np.bincount(rows, minlength=1) > 1)
    if len(repeated):
        raise InputError(
            f"data: example {repeated[0]} is on two clients, or in two of train, validation and "
            "test; it may be in one"
        )


def _require_class_numbers(labels: Tensor, part: str, classes: int) -> None:
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"data: {part} labels are {labels.dtype}; "
            f"class numbers 0..{classes - 1} were expected, use y.long()"
        )


def _require_known_classes(data: ClientData, part: str, classes: int) -> None:
    labels = data.examples.y
    wrong = ((labels < 0) | (labels >= classes)).cpu().numpy()
    for client, rows in enumerate(data.rows):
        wrong_rows = rows[wrong[rows]]
        if len(wrong_rows):
            raise InputError(
                f"data: client {client} has the {part} label {int(labels[wrong_rows[0]])}, "
                f"but the model has {classes} outputs (0..{classes - 1}); "
                "fix the label or widen the model"
            )
