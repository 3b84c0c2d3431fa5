"""What every client trains on, is selected on and is tested on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from glocal.core.data import Arrays, ClientData, Examples, Rows, concatenate, hold_out
from glocal.core.errors import InputError
from glocal.core.sampling import make_rng


@dataclass(frozen=True)
class FederatedData:
    """What every device trains on, is chosen on, and is tested on; and inputs whose labels nobody knows, if it has such."""

    train: ClientData
    val: ClientData
    test: ClientData
    unlabeled: ClientData | None = None

    @property
    def num_clients(self) -> int:
        """M, how many devices there are."""
        return self.train.num_clients

    def subsets(self) -> tuple[ClientData, ...]:
        """All that there is."""
        return (self.train, self.val, self.test, *([self.unlabeled] if self.unlabeled else []))

    def map_subsets(self, change: Callable[[ClientData], ClientData]) -> "FederatedData":
        """The same with every part changed."""
        return FederatedData(*map(change, self.subsets()))

    def subsample_labels(self, share: float, *, seed: int) -> "FederatedData":
        """Labels for a share of every device's training examples only, at least one; all its inputs are there without."""
        if not 0 < share <= 1:
            raise InputError(f"data: labelled is {share}; a share above 0 and up to 1 was expected")
        rows = [
            make_rng(seed, "labels", client).permutation(own)
            for client, own in enumerate(self.train.rows)
        ]
        few = tuple(np.sort(own[: max(1, round(share * len(own)))]) for own in rows)
        return replace(self, train=replace(self.train, rows=few), unlabeled=self.train)


def from_tensors(
    clients: Sequence[Arrays],
    *,
    test: float | Sequence[Arrays] = 0.2,
    validation: float = 0.1,
    seed: int = 0,
) -> FederatedData:
    """A federation of your own arrays: one (x, y) or (x, y, group) per device; `test` is a share or one pair per device.

    >>> federation = from_tensors([(np.zeros((10, 3)), np.arange(10) % 2)] * 4)
    >>> federation.num_clients, federation.train.sizes.tolist()
    (4, [7, 7, 7, 7])
    """
    return train_val_test_split(concatenate(clients), test=test, validation=validation, seed=seed)


def train_val_test_split(
    everything: ClientData, *, test: float | Sequence[Arrays], validation: float, seed: int
) -> FederatedData:
    """Set a part of every device's examples aside for the test, or take the tests as given, then a part for validation."""
    if not isinstance(test, Sequence):
        parts = [
            hold_out(rows, float(test), seed, "test", client)
            for client, rows in enumerate(everything.rows)
        ]
        tests = replace(everything, rows=tuple(taken for _, taken in parts))
        rest = replace(everything, rows=tuple(kept for kept, _ in parts))
        return hold_out_validation(rest, tests, validation=validation, seed=seed)
    if len(test) != everything.num_clients:
        raise InputError(
            f"data: {everything.num_clients} devices but {len(test)} test sets; give one per device, or a share"
        )
    return hold_out_validation(everything, concatenate(test), validation=validation, seed=seed)


def hold_out_validation(
    train: ClientData, test: ClientData, *, validation: float, seed: int
) -> FederatedData:
    """Set a share of every device's training examples aside for validation."""
    parts = [
        hold_out(rows, validation, seed, "validation", client)
        for client, rows in enumerate(train.rows)
    ]
    kept, taken = tuple(kept for kept, _ in parts), tuple(taken for _, taken in parts)
    return FederatedData(ClientData(train.examples, kept), ClientData(train.examples, taken), test)


def validate_data(federation: FederatedData, classes: int) -> None:
    """Refuse data that would train on nonsense: empty devices, labels outside 0..classes-1, NaN, rows in two places."""
    parts = {"train": federation.train, "validation": federation.val, "test": federation.test}
    for part, holdings in parts.items():
        if holdings.num_clients != federation.num_clients:
            raise InputError(
                f"data: {federation.num_clients} devices train, {holdings.num_clients} have a {part} part; give one per device"
            )
    stores = {
        id(holdings.examples): (part, holdings.examples)
        for part, holdings in reversed(parts.items())
    }
    for part, examples in stores.values():
        _validate_store(examples, part, federation.train.examples)
        used = np.concatenate(
            [holdings.all_rows() for holdings in parts.values() if holdings.examples is examples]
        )
        _validate_rows(used, examples, part)
    for part, holdings in parts.items():
        _validate_labels(holdings, part, classes)
    empty = np.flatnonzero(federation.train.sizes == 0)
    if len(empty):
        raise InputError(
            f"data: device {empty[0]} has no training examples ({len(empty)} such); drop it or use fewer devices"
        )


def _validate_store(examples: Examples, part: str, like: Examples) -> None:
    x, y, _ = examples
    if len(x) != len(y) or y.dim() != 1:
        raise InputError(
            f"data: {part} inputs are {tuple(x.shape)} and labels {tuple(y.shape)}; one label per input was expected"
        )
    if x.shape[1:] != like.x.shape[1:] or x.dtype != like.x.dtype:
        given, expected = (f"{tuple(each.shape[1:])} {each.dtype}" for each in (x, like.x))
        raise InputError(
            f"data: {part} inputs are {given}, training inputs {expected}; prepare both alike"
        )
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        bad = torch.isfinite(x).flatten(1).all(1).logical_not().nonzero()
        raise InputError(
            f"data: {part} example {int(bad[0])} holds NaN or infinity ({len(bad)} such examples); clean or drop them"
        )


def _validate_rows(used: Rows, examples: Examples, part: str) -> None:
    outside = used[(used < 0) | (used >= len(examples.y))]
    if len(outside):
        raise InputError(
            f"data: row {outside[0]} is outside the {len(examples.y)} {part} examples; partition them anew"
        )
    twice = np.flatnonzero(np.bincount(used, minlength=1) > 1)
    if len(twice):
        raise InputError(
            f"data: example {twice[0]} is on two devices, or in two of train, validation and test; it may be in one"
        )


def _validate_labels(holdings: ClientData, part: str, classes: int) -> None:
    labels = holdings.examples.y
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(
            f"data: {part} labels are {labels.dtype}; class numbers 0..{classes - 1} were expected, use y.long()"
        )
    wrong = ((labels < 0) | (labels >= classes)).cpu().numpy()
    for client, rows in enumerate(holdings.rows):
        if wrong[rows].any():
            label = int(labels[int(rows[wrong[rows]][0])])
            raise InputError(
                f"data: device {client} has the {part} label {label}, but the model has {classes} outputs (0..{classes - 1}); "
                "fix the label or widen the model"
            )
