"""The majority class as a baseline of a study: a model that ignores its inputs.

Clients count their labels. In a model of zeros, the counts are the bias of the last layer.
"""

from functools import cached_property

import torch

from glocal.algorithms.contract import (
    Algorithm,
    Message,
    State,
    Update,
    Uploads,
    add_change,
)
from glocal.core.errors import InputError
from glocal.core.split import last_layers
from glocal.core.training import ModelLoss, WeightedSum, Work
from glocal.core.trees import Params, pick, scale, zeros_like
from glocal.wire import Aggregation, Mean


class Majority(Algorithm):
    """The most frequent label over all clients; one round with all of them."""

    aggregation: Aggregation = Mean(by="clients")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.objective.loss, ModelLoss):
            raise InputError(
                "majority: it counts labels and is not trained; leave data.augment and pretext out"
            )

    @cached_property
    def bias(self) -> str:
        """The tensor that holds the counts."""
        return f"{last_layers(self.task.model, 1)[0]}.bias"

    def init(self, params: Params) -> State:
        """No counts yet."""
        return State(shared=zeros_like(pick(params, [self.bias])))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The counts of the client's labels."""
        return Update(self.count(message[self.bias], work), {}, {"loss": _no_loss(work)})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """All counts together."""
        total = scale(uploads.num_sampled, uploads.aggregate())
        return add_change(shared, total), server

    def count(self, like: torch.Tensor, work: Work) -> Params:
        """How often each class occurs among a client's labels."""
        labels = torch.where(work.order >= 0, work.examples.y[work.order.clamp(min=0)], -1)
        classes = torch.arange(len(like), device=labels.device)
        return {self.bias: (labels.flatten()[:, None] == classes).sum(0).to(like)}

    def personal(self, shared: Params, private: Params) -> Params:
        """A model of zeros with the counts as the bias of the last layer."""
        counts = {**shared, **private}[self.bias]
        zeros = {}
        for name, tensor in self.task.initial_params().items():
            zeros[name] = torch.zeros_like(tensor, device=counts.device)
        return {**zeros, self.bias: counts}


class OwnMajority(Majority):
    """Each client's own most frequent label; nothing is sent."""

    def init(self, params: Params) -> State:
        """No counts yet."""
        return State(shared={}, private=zeros_like(pick(params, [self.bias])))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The counts of the client's labels stay with it."""
        return Update({}, self.count(private[self.bias], work), {"loss": _no_loss(work)})


def _no_loss(work: Work) -> WeightedSum:
    zero = torch.zeros((), device=work.order.device)
    return WeightedSum(zero, zero + 1)
