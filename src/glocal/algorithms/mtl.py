"""Mean-regularised multi-task learning: Evgeniou and Pontil 2004.

It is a baseline of Liang et al. 2020, appendix C.2, with the regulariser
R(W) = lam * tr(W Omega W') + ridge * ||W||^2 and Omega = (I - 11'/M)^2. As I - 11'/M is a
projection, the trace is the sum over clients of ||w_m - mean||^2. Its gradient with respect to w_m
is 2 * lam * (w_m - mean), so a client needs only the mean.
"""

from typing import ClassVar

from glocal.algorithms.contract import (
    Algorithm,
    Message,
    State,
    Update,
    Uploads,
    add_change,
    change,
    require_numbers,
)
from glocal.core import trees
from glocal.core.training import Work, local_train
from glocal.core.trees import Params
from glocal.wire.aggregation import Aggregation, Mean

_OWN = "own/"


class MTL(Algorithm):
    """Evgeniou and Pontil 2004: own models, each drawn towards the mean of all by `lam`.

    `ridge` draws them towards 0. The shared tree is the mean over all clients.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> MTL(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1), lam=0.01).ridge
    0.0
    """

    aggregation: Aggregation = Mean(by="clients")
    lam: float = 0.1
    ridge: float = 0.0

    takes_new_clients: ClassVar[bool] = False  # the mean is over a fixed number

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "lam", "ridge")

    def init(self, params: Params) -> State:
        """The mean of equal models is any of them."""
        return State(trees.pick(params, self.task.trainable), trees.with_prefix(_OWN, params))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The client's own model trains near the mean; its change is sent."""
        origin = trees.zeros_like(message)
        objective = self.objective.near(message, 2 * self.lam).near(origin, 2 * self.ridge)
        own = trees.under_prefix(_OWN, private)
        trained = local_train(objective, own, work, self.optimizer)
        moved = change(trained.params, trees.pick(own, message))
        return Update(moved, trees.with_prefix(_OWN, trained.params), {"loss": trained.loss})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """All other clients did not change: the mean moves by the sum of changes over M."""
        moved = trees.scale(uploads.participation, uploads.aggregate())
        return add_change(shared, moved), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The client's own model."""
        return trees.under_prefix(_OWN, private)
