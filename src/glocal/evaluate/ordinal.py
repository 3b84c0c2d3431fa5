"""Ordered classes, such as moods: accuracy and distance, with and without one-class clients."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from glocal.core.data import ClientData
from glocal.core.sampling import IntArray
from glocal.datasets.federated import FederatedData


class OrdinalMetrics(NamedTuple):
    """Accuracy and mean absolute error in classes, over all examples together.

    Those in `_rest` exclude some clients, such as clients with one class.
    """

    accuracy: float | None
    error: float | None
    accuracy_rest: float | None
    error_rest: float | None


def one_class_clients(federated: FederatedData, share: float) -> frozenset[int]:
    """Clients with at least this share of their examples in one class.

    A constant prediction is nearly always right for them.
    """
    clients: set[int] = set()
    for client in range(federated.num_clients):
        if _is_one_class(_client_labels(federated, client), share):
            clients.add(client)
    return frozenset(clients)


def ordinal_metrics(
    predictions: Sequence[IntArray], data: ClientData, excluded: Collection[int] = ()
) -> OrdinalMetrics:
    """Metrics of predictions in the order of clients; None where no example is left."""
    labels = data.examples.y.cpu().numpy()
    distances: list[IntArray] = []
    for predicted, rows in zip(predictions, data.rows, strict=True):
        distances.append(np.abs(predicted - labels[rows]))
    rest = [distances[client] for client in range(len(distances)) if client not in excluded]
    return OrdinalMetrics(*_means(distances), *_means(rest))


def _is_one_class(labels: IntArray, share: float) -> bool:
    """Whether at least this share of the labels is one class."""
    return bool(np.bincount(labels).max() >= share * len(labels))


def _client_labels(federated: FederatedData, client: int) -> IntArray:
    """The labels of all of a client's examples."""
    parts = (federated.train, federated.val, federated.test)
    labels = [part.examples.y[part.rows[client]] for part in parts]
    return np.asarray(torch.cat(labels).cpu().numpy())


def _means(by_client: Sequence[IntArray]) -> tuple[float | None, float | None]:
    """Accuracy and mean distance; None for both without an example."""
    distances = np.concatenate([*by_client, np.zeros(0, dtype=np.int64)])
    if not len(distances):
        return None, None
    return float((distances == 0).mean()), float(distances.mean())
