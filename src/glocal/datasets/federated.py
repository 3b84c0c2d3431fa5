"""What every client trains on, is selected on and is tested on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from glocal.core.data import Arrays, Examples, Holdings, Rows, carve, gathered
from glocal.core.errors import InputError
from glocal.core.sampling import stream


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
