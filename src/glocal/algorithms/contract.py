"""The contract: what every federated algorithm is made of, written for ONE device."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from glocal.core import trees
from glocal.core.training import Work
from glocal.core.trees import Params


class Update(NamedTuple):
    """What a device has after a round; only upload and loss () leave it."""

    upload: Params
    private: Params
    loss: Tensor


class Algorithm(NamedTuple):
    """Four pure functions. `aggregate` never sees private state; an upload has exactly the names of the shared tree.

    `adapt` is how a newcomer learns its private part while the shared one stays as it is: a `client_update` whose upload is not
    sent; None where nothing is private. `about` tells two runs of one algorithm apart, and `devices` is set where an algorithm is
    made for that many. `is_mean` says that `aggregate` is the mean of the uploads, by the weights
    it is given or by equal ones, so that a server which sees their sum only will do. Whoever
    replaces `aggregate` sets it anew.
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
    """Sum over the cohort of N_m / N * upload_m (Algorithm 1, line 6): uploads (devices, ...), weights N_m (devices,)."""
    trees.require_same_names(uploads, shared, "aggregate")
    return trees.mean(uploads, weights)


def freeze_shared(algorithm: Algorithm) -> Algorithm:
    """The algorithm while the shared part stays as it is, and nothing is sent."""
    assert algorithm.adapt is not None
    return algorithm._replace(
        client_update=algorithm.adapt,
        aggregate=lambda shared, uploads, weights: shared,
        is_mean=False,
    )


def unweighted(algorithm: Algorithm) -> Algorithm:
    """The same algorithm with every device of a cohort counting the same, however many examples it has."""

    def aggregate(shared: Params, uploads: Params, weights: Tensor) -> Params:
        return algorithm.aggregate(shared, uploads, torch.ones_like(weights))

    return algorithm._replace(
        aggregate=aggregate, description=f"{algorithm.description}, unweighted".removeprefix(", ")
    )
