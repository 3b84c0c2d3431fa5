"""Classes in an order, such as moods: how often a guess is right, and how far off it is; with and without one-class devices."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from glocal.core.data import Holdings
from glocal.core.sampling import Integers
from glocal.datasets.federated import Federation


class Ordinal(NamedTuple):
    """Accuracy and mean absolute error in classes, over all examples together; `_rest` without devices that have one class."""

    accuracy: float | None
    error: float | None
    accuracy_rest: float | None
    error_rest: float | None


def one_class_devices(federation: Federation, share: float) -> frozenset[int]:
    """Devices of whose examples at least such a share is of one class: whoever always says that is nearly always right."""
    parts = [federation.train, federation.val, federation.test]
    labels = [part.examples.y.cpu().numpy() for part in parts]
    found = []
    for device in range(federation.devices):
        own = np.concatenate([y[part.rows[device]] for y, part in zip(labels, parts, strict=True)])
        if np.bincount(own).max() >= share * len(own):
            found.append(device)
    return frozenset(found)


def judged(guesses: Sequence[Integers], holdings: Holdings, left_out: Collection[int] = ()) -> Ordinal:
    """How good guesses are, which come device by device; None where nobody is left."""
    labels = holdings.examples.y.cpu().numpy()
    off = [np.abs(guess - labels[rows]) for guess, rows in zip(guesses, holdings.rows, strict=True)]
    rest = [distances for device, distances in enumerate(off) if device not in left_out]
    return Ordinal(*_means(off), *_means(rest))


def _means(off: Sequence[Integers]) -> tuple[float | None, float | None]:
    distances = np.concatenate([*off, np.zeros(0, dtype=np.int64)])
    return (float((distances == 0).mean()), float(distances.mean())) if len(distances) else (None, None)
