"""The majority class as a baseline of a study: a model that ignores its inputs.

Clients count their labels. In a model of zeros, the counts are the bias of the last layer.
"""

from collections.abc import Callable

import torch

from glocal.algorithms.contract import Algorithm, Update
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import Optimizer
from glocal.core.split import last_layers
from glocal.core.training import ModelLoss, Objective, Work
from glocal.core.trees import Params


def majority(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """The most frequent label over all clients; one round with all of them."""
    init, count, predict = _counting(objective)

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        counts = count(work)
        return Update(counts, {}, torch.zeros((), device=work.order.device))

    def aggregate(shared: Params, uploads: Params, weights: torch.Tensor) -> Params:
        return {name: tensor.sum(0) for name, tensor in uploads.items()}

    return Algorithm(
        "majority",
        lambda params: (init(params), {}),
        client_update,
        aggregate,
        lambda shared, _: predict(shared),
    )


def own_majority(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """Each client's own most frequent label; nothing is sent."""
    init, count, predict = _counting(objective)

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        return Update({}, count(work), torch.zeros((), device=work.order.device))

    return Algorithm(
        "own_majority",
        lambda params: ({}, init(params)),
        client_update,
        lambda shared, *_: shared,
        lambda _, own: predict(own),
    )


def _counting(
    objective: Objective,
) -> tuple[Callable[[Params], Params], Callable[[Work], Params], Callable[[Params], Params]]:
    """The initial counts, the counts of a client's work, and the model that predicts by them."""
    if not isinstance(objective.loss, ModelLoss):
        raise InputError(
            "majority: it counts labels and is not trained; leave data.augment and pretext out"
        )
    model = objective.loss.model
    params = params_of(model)
    bias = f"{last_layers(model, 1)[0]}.bias"

    def count(work: Work) -> Params:
        labels = torch.where(work.order >= 0, work.examples.y[work.order.clamp(min=0)], -1)
        classes = torch.arange(len(params[bias]), device=labels.device)
        return {bias: (labels.flatten()[:, None] == classes).sum(0).float()}

    def predict(counts: Params) -> Params:
        device = counts[bias].device  # a CUDA graph cannot copy from the host
        zeros = {name: torch.zeros_like(tensor, device=device) for name, tensor in params.items()}
        return {**zeros, bias: counts[bias]}

    return lambda params: {bias: torch.zeros_like(params[bias])}, count, predict
