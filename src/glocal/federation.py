"""Every device's examples: stored once, each device's share a list of row numbers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.errors import InputError, brief
from glocal.sampling import stream

Rows = npt.NDArray[np.int64]
Arrays = tuple[Tensor | npt.NDArray[np.generic], ...]


class Examples(NamedTuple):
    """A store of examples: x (rows, ...), y (rows,), group (rows,) or (rows, attributes) or None.

    `group` is what else is known of each, and no input: a person's attributes, or what other people answered.
    """

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

    @cached_property
    def sizes(self) -> Rows:
        """N_m, how many examples each device holds (devices,)."""
        return np.array([len(rows) for rows in self.rows], dtype=np.int64)

    @cached_property
    def words(self) -> Rows:
        """How many words every row of the store has (rows,), if it holds texts: whole numbers, of which 0 is no word."""
        x = self.examples.x
        if x.is_floating_point() or x.dim() != 2:
            raise InputError(
                f"plan: tokens counts words, and the inputs are {tuple(x.shape[1:])} {x.dtype}; "
                "whole numbers (rows, words) were expected, or leave plan.tokens out"
            )
        return np.asarray((x > 0).sum(1).cpu().numpy())

    def of(self, device: int) -> Examples:
        """One device's own examples."""
        return self.examples.take(self.rows[device])

    def pooled(self) -> Rows:
        """The rows of all devices together."""
        return np.concatenate(self.rows) if self.rows else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Federation:
    """What every device trains on, is chosen on, and is tested on; and inputs whose labels nobody knows, if it has such."""

    train: Holdings
    val: Holdings
    test: Holdings
    unlabelled: Holdings | None = None

    @property
    def devices(self) -> int:
        """M, how many devices there are."""
        return self.train.devices

    def parts(self) -> tuple[Holdings, ...]:
        """All that there is."""
        return (self.train, self.val, self.test, *([self.unlabelled] if self.unlabelled else []))

    def each(self, change: Callable[[Holdings], Holdings]) -> "Federation":
        """The same with every part changed."""
        return Federation(*map(change, self.parts()))

    def labelled(self, share: float, *, seed: int) -> "Federation":
        """Labels for a share of every device's training examples only, at least one; all its inputs are there without."""
        if not 0 < share <= 1:
            raise InputError(f"data: labelled is {share}; a share above 0 and up to 1 was expected")
        rows = [stream(seed, "labels", device).permutation(own) for device, own in enumerate(self.train.rows)]
        few = tuple(np.sort(own[: max(1, round(share * len(own)))]) for own in rows)
        return replace(self, train=replace(self.train, rows=few), unlabelled=self.train)


def from_tensors(
    devices: Sequence[Arrays], *, test: float | Sequence[Arrays] = 0.2, validation: float = 0.1, seed: int = 0
) -> Federation:
    """A federation of your own arrays: one (x, y) or (x, y, group) per device; `test` is a share or one pair per device.

    >>> federation = from_tensors([(np.zeros((10, 3)), np.arange(10) % 2)] * 4)
    >>> federation.devices, federation.train.sizes.tolist()
    (4, [7, 7, 7, 7])
    """
    return held_out(gathered(devices), test=test, validation=validation, seed=seed)


def held_out(everything: Holdings, *, test: float | Sequence[Arrays], validation: float, seed: int) -> Federation:
    """Set a part of every device's examples aside for the test, or take the tests as given, then a part for validation."""
    if not isinstance(test, Sequence):
        parts = [carve(rows, float(test), seed, "test", device) for device, rows in enumerate(everything.rows)]
        tests = replace(everything, rows=tuple(taken for _, taken in parts))
        rest = replace(everything, rows=tuple(kept for kept, _ in parts))
        return with_validation(rest, tests, validation=validation, seed=seed)
    if len(test) != everything.devices:
        raise InputError(f"data: {everything.devices} devices but {len(test)} test sets; give one per device, or a share")
    return with_validation(everything, gathered(test), validation=validation, seed=seed)


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
    """Refuse data that would train on nonsense: empty devices, labels outside 0..classes-1, NaN, rows in two places."""
    parts = {"train": federation.train, "validation": federation.val, "test": federation.test}
    for part, holdings in parts.items():
        if holdings.devices != federation.devices:
            raise InputError(
                f"data: {federation.devices} devices train, {holdings.devices} have a {part} part; give one per device"
            )
    stores = {id(holdings.examples): (part, holdings.examples) for part, holdings in reversed(parts.items())}
    for part, examples in stores.values():
        _check_store(examples, part, federation.train.examples)
        used = np.concatenate([holdings.pooled() for holdings in parts.values() if holdings.examples is examples])
        _check_rows(used, examples, part)
    for part, holdings in parts.items():
        _check_labels(holdings, part, classes)
    empty = np.flatnonzero(federation.train.sizes == 0)
    if len(empty):
        raise InputError(f"data: device {empty[0]} has no training examples ({len(empty)} such); drop it or use fewer devices")


def _check_store(examples: Examples, part: str, like: Examples) -> None:
    x, y, _ = examples
    if len(x) != len(y) or y.dim() != 1:
        raise InputError(f"data: {part} inputs are {tuple(x.shape)} and labels {tuple(y.shape)}; one label per input was expected")
    if x.shape[1:] != like.x.shape[1:] or x.dtype != like.x.dtype:
        given, expected = (f"{tuple(each.shape[1:])} {each.dtype}" for each in (x, like.x))
        raise InputError(f"data: {part} inputs are {given}, training inputs {expected}; prepare both alike")
    if x.is_floating_point() and not bool(torch.isfinite(x).all()):
        bad = torch.isfinite(x).flatten(1).all(1).logical_not().nonzero()
        raise InputError(f"data: {part} example {int(bad[0])} holds NaN or infinity ({len(bad)} such examples); clean or drop them")


def _check_rows(used: Rows, examples: Examples, part: str) -> None:
    outside = used[(used < 0) | (used >= len(examples.y))]
    if len(outside):
        raise InputError(f"data: row {outside[0]} is outside the {len(examples.y)} {part} examples; partition them anew")
    twice = np.flatnonzero(np.bincount(used, minlength=1) > 1)
    if len(twice):
        raise InputError(f"data: example {twice[0]} is on two devices, or in two of train, validation and test; it may be in one")


def _check_labels(holdings: Holdings, part: str, classes: int) -> None:
    labels = holdings.examples.y
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"data: {part} labels are {labels.dtype}; class numbers 0..{classes - 1} were expected, use y.long()")
    wrong = ((labels < 0) | (labels >= classes)).cpu().numpy()
    for device, rows in enumerate(holdings.rows):
        if wrong[rows].any():
            label = int(labels[int(rows[wrong[rows]][0])])
            raise InputError(
                f"data: device {device} has the {part} label {label}, but the model has {classes} outputs (0..{classes - 1}); "
                "fix the label or widen the model"
            )


def gathered(devices: Sequence[Arrays]) -> Holdings:
    """All devices' arrays in one store, and each device's rows in it."""
    if not devices:
        raise InputError("data: no devices given; give one (x, y) pair per device")
    tensors = [_as_tensors(arrays, device) for device, arrays in enumerate(devices)]
    for device, each in enumerate(tensors):
        if each[0].shape[1:] != tensors[0][0].shape[1:] or len(each) != len(tensors[0]):
            given, first = (f"{len(arrays)} arrays, inputs {tuple(arrays[0].shape[1:])}" for arrays in (each, tensors[0]))
            raise InputError(f"data: device {device} has {given}, but device 0 {first}; all devices need the same")
    ends = np.cumsum([len(arrays[0]) for arrays in tensors])
    rows = [np.arange(end - len(arrays[0]), end, dtype=np.int64) for end, arrays in zip(ends, tensors, strict=True)]
    return Holdings(Examples(*(torch.cat(column) for column in zip(*tensors, strict=True))), tuple(rows))


def _as_tensors(arrays: Arrays, device: int) -> list[Tensor]:
    """A device's x, y and group as tensors: float64 inputs become float32, whole-number labels int64."""
    try:
        x, y, *group = (torch.as_tensor(array) for array in arrays)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"data: device {device} cannot be read as (x, y) or (x, y, group) ({brief(error)})") from error
    lengths = [len(tensor) if tensor.dim() else 0 for tensor in (x, y, *group)]
    if len(group) > 1 or len(set(lengths)) != 1:
        told = ", ".join(map(str, lengths))
        raise InputError(f"data: device {device} gave arrays of lengths {told}; (x, y) or (x, y, group) of one length was expected")
    whole = y if y.is_floating_point() else y.long()
    return [x.float() if x.dtype == torch.float64 else x, whole, *(column.long() for column in group)]
