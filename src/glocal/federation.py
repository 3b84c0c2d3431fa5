"""Every device's examples: stored once, each device's share a list of row numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.errors import InputError
from glocal.sampling import stream

Rows = npt.NDArray[np.int64]
Arrays = tuple[Tensor | npt.NDArray[np.generic], ...]


class Examples(NamedTuple):
    """A store of examples: x (rows, ...), y (rows,), group (rows,) or None."""

    x: Tensor
    y: Tensor
    group: Tensor | None = None

    def to(self, device: torch.device) -> "Examples":
        """The same examples on a computing device."""
        return Examples(self.x.to(device), self.y.to(device), None if self.group is None else self.group.to(device))

    def take(self, rows: Rows) -> "Examples":
        """A copy of some rows."""
        index = torch.from_numpy(rows).to(self.y.device)
        return Examples(self.x[index], self.y[index], None if self.group is None else self.group[index])


@dataclass(frozen=True)
class Holdings:
    """Who holds which examples: one store, and for each device the rows that are its own."""

    examples: Examples
    rows: tuple[Rows, ...]

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return len(self.rows)

    @property
    def sizes(self) -> Rows:
        """N_m, how many examples each device holds (devices,)."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    def of(self, device: int) -> Examples:
        """One device's own examples."""
        return self.examples.take(self.rows[device])

    def pooled(self) -> Rows:
        """The rows of all devices together."""
        return np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.int64)

    def to(self, device: torch.device) -> "Holdings":
        """The same holdings on a computing device."""
        return Holdings(self.examples.to(device), self.rows)


@dataclass(frozen=True)
class Federation:
    """What every device trains on, is chosen on, and is tested on."""

    train: Holdings
    val: Holdings
    test: Holdings

    @property
    def devices(self) -> int:
        """M, how many devices there are."""
        return self.train.devices

    def to(self, device: torch.device) -> "Federation":
        """The same federation on a computing device; a store that several parts have in common is moved once."""
        moved: dict[int, Examples] = {}
        for part in (self.train, self.val, self.test):
            moved.setdefault(id(part.examples), part.examples.to(device))
        train, val, test = (Holdings(moved[id(part.examples)], part.rows) for part in (self.train, self.val, self.test))
        return Federation(train, val, test)


def from_tensors(
    devices: Sequence[Arrays], *, test: float | Sequence[Arrays] = 0.2, validation: float = 0.1, seed: int = 0
) -> Federation:
    """A federation of your own arrays: one (x, y) or (x, y, group) per device; `test` is a share or one pair per device.

    >>> federation = from_tensors([(np.zeros((10, 3)), np.arange(10) % 2)] * 4)
    >>> federation.devices, federation.train.sizes.tolist()
    (4, [7, 7, 7, 7])
    """
    store, rows = _gathered(devices)
    if isinstance(test, float | int):
        held_out = [carve(own, test, seed, "test", device) for device, own in enumerate(rows)]
        rest, tests = [kept for kept, _ in held_out], Holdings(store, tuple(taken for _, taken in held_out))
    else:
        if len(test) != len(devices):
            raise InputError(f"data: {len(devices)} devices but {len(test)} test sets; give one per device, or a share")
        test_store, test_rows = _gathered(test)
        rest, tests = rows, Holdings(test_store, tuple(test_rows))
    return with_validation(Holdings(store, tuple(rest)), tests, validation=validation, seed=seed)


def with_validation(train: Holdings, test: Holdings, *, validation: float, seed: int) -> Federation:
    """Set a share of every device's training examples aside for validation."""
    parts = [carve(rows, validation, seed, "validation", device) for device, rows in enumerate(train.rows)]
    kept, taken = tuple(kept for kept, _ in parts), tuple(taken for _, taken in parts)
    return Federation(Holdings(train.examples, kept), Holdings(train.examples, taken), test)


def carve(rows: Rows, share: float, seed: int, purpose: str, device: int) -> tuple[Rows, Rows]:
    """Rows kept and rows taken out at random; at least one is kept."""
    if not 0 <= share < 1:
        raise InputError(f"data: the share for {purpose} is {share}; it must be at least 0 and below 1")
    taken = min(round(share * len(rows)), max(len(rows) - 1, 0))
    order = stream(seed, purpose, device).permutation(len(rows))
    return np.sort(rows[order[taken:]]), np.sort(rows[order[:taken]])


def check(federation: Federation, classes: int) -> None:
    """Refuse data that would train on nonsense: empty devices, labels outside 0..classes-1, NaN, unequal lengths."""
    seen: set[int] = set()
    for part, holdings in (("train", federation.train), ("validation", federation.val), ("test", federation.test)):
        if holdings.devices != federation.devices:
            raise InputError(
                f"data: {federation.devices} devices train but {holdings.devices} have a {part} part; give one per device"
            )
        if id(holdings.examples) not in seen:
            _check_store(holdings.examples, part)
            seen.add(id(holdings.examples))
        _check_labels(holdings, part, classes)
    empty = np.flatnonzero(federation.train.sizes == 0)
    if len(empty):
        raise InputError(
            f"data: device {empty[0]} has no training examples ({len(empty)} such devices); drop it or use fewer devices"
        )


def _check_store(examples: Examples, part: str) -> None:
    if len(examples.x) != len(examples.y):
        raise InputError(
            f"data: {len(examples.x)} {part} inputs but {len(examples.y)} labels; partition both with the same indices"
        )
    if examples.x.is_floating_point() and not bool(torch.isfinite(examples.x).all()):
        bad = torch.isfinite(examples.x).flatten(1).all(1).logical_not().nonzero()
        raise InputError(f"data: {part} example {int(bad[0])} holds NaN or infinity ({len(bad)} such examples); clean or drop them")


def _check_labels(holdings: Holdings, part: str, classes: int) -> None:
    labels = holdings.examples.y
    if labels.is_floating_point():
        raise InputError(f"data: {part} labels are {labels.dtype}; class numbers 0..{classes - 1} were expected, use y.long()")
    wrong = ((labels < 0) | (labels >= classes)).cpu().numpy()
    for device, rows in enumerate(holdings.rows):
        if wrong[rows].any():
            label = int(labels[int(rows[wrong[rows]][0])])
            raise InputError(
                f"data: device {device} has the {part} label {label}, but the model has {classes} outputs (0..{classes - 1}); "
                "fix the label or widen the model"
            )


def _gathered(devices: Sequence[Arrays]) -> tuple[Examples, list[Rows]]:
    """All devices' arrays in one store, and each device's rows in it."""
    if not devices:
        raise InputError("data: no devices given; give one (x, y) pair per device")
    for device, arrays in enumerate(devices):
        if len(arrays) not in (2, 3) or len({len(array) for array in arrays}) != 1:
            lengths = ", ".join(str(len(array)) for array in arrays)
            raise InputError(
                f"data: device {device} gave arrays of lengths {lengths}; (x, y) or (x, y, group) of one length was expected"
            )
        if arrays[0].shape[1:] != devices[0][0].shape[1:]:
            raise InputError(
                f"data: device {device} has inputs {tuple(arrays[0].shape[1:])}, device 0 {tuple(devices[0][0].shape[1:])}"
            )
    ends = np.cumsum([len(arrays[0]) for arrays in devices])
    rows = [np.arange(end - len(arrays[0]), end, dtype=np.int64) for end, arrays in zip(ends, devices, strict=True)]
    columns = [torch.cat([torch.as_tensor(array) for array in column]) for column in zip(*devices, strict=True)]
    x = columns[0].float() if columns[0].dtype == torch.float64 else columns[0]
    group = columns[2].long() if len(columns) == 3 else None
    return Examples(x, columns[1].long() if not columns[1].is_floating_point() else columns[1], group), rows
