"""The contract: the functions of a federated algorithm, written for ONE client."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.training import Work
from glocal.core.trees import Params


class Update(NamedTuple):
    """The result of a client's round; only `upload` and `loss` () leave the client."""

    upload: Params
    private: Params
    loss: Tensor


class Algorithm(NamedTuple):
    """Pure functions for one client and for the server.

    - `init(params)` gives the shared and the private tree.
    - `client_update(shared, private, work)` is a client's round. An upload has exactly the names
      of the shared tree.
    - `aggregate(shared, uploads, weights)` is the server's step. It never sees private state.
    - `personal(shared, private)` gives the model of a client.
    - `description` distinguishes two runs of one algorithm with other settings.
    - `num_clients` is set where an algorithm is made for a fixed number of clients.
    - `adapt` trains the private part of a new client while the shared part stays fixed: a
      `client_update` whose upload is not sent. It is None where nothing is private.
    - `is_mean` is True where `aggregate` is the mean of the uploads, by the given weights or by
      equal ones: then a server that sees only their sum is enough. Code that replaces `aggregate`
      must set it again.
    """

    name: str
    init: Callable[[Params], tuple[Params, Params]]
    client_update: Callable[[Params, Params, Work], Update]
    aggregate: Callable[[Params, Params, Tensor], Params]
    personal: Callable[[Params, Params], Params]
    description: str = ""
    num_clients: int | None = None
    adapt: Callable[[Params, Params, Work], Update] | None = None
    is_mean: bool = False


def average(shared: Params, uploads: Params, weights: Tensor) -> Params:
    """Sum over the sampled clients of N_m / N * upload_m (Algorithm 1, line 6).

    uploads (clients, ...), weights N_m (clients,).
    """
    trees.require_same_names(uploads, shared, "aggregate")
    return trees.mean(uploads, weights)


def freeze_shared(algorithm: Algorithm) -> Algorithm:
    """The algorithm with a fixed shared part: clients adapt, and nothing is sent."""
    assert algorithm.adapt is not None
    return algorithm._replace(
        client_update=algorithm.adapt,
        aggregate=lambda shared, uploads, weights: shared,
        is_mean=False,
    )


def unweighted(algorithm: Algorithm) -> Algorithm:
    """The same algorithm with equal weights for all sampled clients, whatever data they have."""

    def aggregate(shared: Params, uploads: Params, weights: Tensor) -> Params:
        return algorithm.aggregate(shared, uploads, torch.ones_like(weights))

    description = f"{algorithm.description}, unweighted".removeprefix(", ")
    return algorithm._replace(aggregate=aggregate, description=description)
