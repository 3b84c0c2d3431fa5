"""Classes in an order, such as moods: how often a guess is right, and how far off it is; with and without one-class devices."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from glocal.core.data import ClientData
from glocal.core.sampling import IntArray
from glocal.datasets.federated import FederatedData


class OrdinalMetrics(NamedTuple):
    """Accuracy and mean absolute error in classes, over all examples together; `_rest` without devices that have one class."""

    accuracy: float | None
    error: float | None
    accuracy_rest: float | None
    error_rest: float | None


def one_class_clients(federated: FederatedData, share: float) -> frozenset[int]:
    """Devices of whose examples at least such a share is of one class: whoever always says that is nearly always right."""
    parts = [federated.train, federated.val, federated.test]
    labels = [part.examples.y.cpu().numpy() for part in parts]
    found = []
    for client in range(federated.num_clients):
        own = np.concatenate([y[part.rows[client]] for y, part in zip(labels, parts, strict=True)])
        if np.bincount(own).max() >= share * len(own):
            found.append(client)
    return frozenset(found)


def ordinal_metrics(
    predictions: Sequence[IntArray], data: ClientData, excluded: Collection[int] = ()
) -> OrdinalMetrics:
    """How good guesses are, which come device by device; None where nobody is left."""
    labels = data.examples.y.cpu().numpy()
    off = [np.abs(guess - labels[rows]) for guess, rows in zip(predictions, data.rows, strict=True)]
    rest = [distances for client, distances in enumerate(off) if client not in excluded]
    return OrdinalMetrics(*_means(off), *_means(rest))


def _means(off: Sequence[IntArray]) -> tuple[float | None, float | None]:
    distances = np.concatenate([*off, np.zeros(0, dtype=np.int64)])
    return (
        (float((distances == 0).mean()), float(distances.mean()))
        if len(distances)
        else (None, None)
    )
