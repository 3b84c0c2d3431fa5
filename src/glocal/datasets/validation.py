"""Checks of data before anybody trains on them: one line for each thing that is wrong."""

import numpy as np
import torch
from torch import Tensor

from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.values import Values, describe_form, tensors_of
from glocal.datasets.federated import FederatedData


def validate_data(
    federated: FederatedData, classes: int | None = None, ignored: int | None = None
) -> None:
    """Refuse data that cannot be trained on.

    Such are empty clients, NaN, and rows in two subsets; and with `classes`, labels outside
    0..classes-1 that are not `ignored` either.
    """
    parts = {"train": federated.train, "validation": federated.val, "test": federated.test}
    for part, data in parts.items():
        _require_clients(data, part, federated.num_clients)
    _validate_stores(parts)
    for part, data in parts.items():
        if classes is not None:
            _require_class_numbers(data.examples, part, classes)
            _require_known_classes(data, part, classes, ignored)
    _require_training_examples(federated.train)


def _validate_stores(parts: dict[str, ClientData]) -> None:
    """Check each store of examples once, by the first part that uses it."""
    users: dict[int, list[str]] = {}
    for part, data in parts.items():
        users.setdefault(id(data.examples), []).append(part)
    for names in users.values():
        examples = parts[names[0]].examples
        _validate_examples(examples, names[0], parts["train"].examples)
        rows = np.concatenate([parts[name].all_rows() for name in names])
        _require_rows_inside(rows, examples.num_rows, names[0])
        _require_distinct_rows(rows)


def _validate_examples(examples: Examples, part: str, train: Examples) -> None:
    _require_equal_rows(examples, part)
    for name, values, own in (("inputs", examples.x, train.x), ("targets", examples.y, train.y)):
        _require_same_form(values, f"{part} {name}", own)
        for tensor in tensors_of(values):
            _require_finite(tensor, f"{part} {name}")


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
            f"data: {train.label(empty[0])} has no training examples ({len(empty)} such clients); "
            "drop it or use fewer clients"
        )


def _require_equal_rows(examples: Examples, part: str) -> None:
    tensors = [*tensors_of(examples.x), *tensors_of(examples.y)]
    rows = {len(tensor) for tensor in tensors}
    if len(rows) > 1:
        raise InputError(
            f"data: {part} has {' and '.join(map(str, sorted(rows)))} rows of inputs and targets; "
            "one target per input was expected"
        )


def _require_same_form(values: Values, part: str, train: Values) -> None:
    if describe_form(values) != describe_form(train):
        raise InputError(
            f"data: {part} are {describe_form(values)}, those for training "
            f"{describe_form(train)}; prepare both alike"
        )


def _require_finite(x: Tensor, part: str) -> None:
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        bad = torch.isfinite(x).reshape(len(x), -1).all(1).logical_not().nonzero()
        raise InputError(
            f"data: {part}: example {int(bad[0])} holds NaN or infinity "
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


def _require_class_numbers(examples: Examples, part: str, classes: int) -> None:
    if not _are_whole_numbers(examples.y):
        raise InputError(
            f"data: {part} targets are {describe_form(examples.y)}; class numbers 0..{classes - 1} "
            "were expected, use y.long(), or another task than classification"
        )


def _are_whole_numbers(labels: Values) -> bool:
    if not isinstance(labels, Tensor) or labels.dtype == torch.bool:
        return False
    return not labels.is_floating_point()


def _require_known_classes(data: ClientData, part: str, classes: int, ignored: int | None) -> None:
    labels = data.examples.y
    is_wrong = (labels < 0) | (labels >= classes)
    if ignored is not None:
        is_wrong &= labels != ignored
    wrong = is_wrong.reshape(len(labels), -1).any(1).cpu().numpy()
    for client, rows in enumerate(data.rows):
        wrong_rows = rows[wrong[rows]]
        if len(wrong_rows):
            value = labels[wrong_rows[0]][is_wrong[wrong_rows[0]]].flatten()[0]
            raise InputError(
                f"data: {data.label(client)} has the {part} label {int(value)}, "
                f"but the model has {classes} outputs (0..{classes - 1}); "
                "fix the label or widen the model"
            )
