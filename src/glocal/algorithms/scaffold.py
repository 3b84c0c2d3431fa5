"""SCAFFOLD: Karimireddy et al. 2020, Algorithm 1 with option II.

"SCAFFOLD: Stochastic Controlled Averaging for Federated Learning". A client corrects every
gradient by c - c_i, and after K steps sets c_i <- c_i - c + (x - y_i) / (K * lr).
"""

from glocal.algorithms.contract import (
    Message,
    State,
    Update,
    Uploads,
    add_change,
    require_numbers,
)
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import SGD
from glocal.core.training import Work
from glocal.core.trees import Params
from glocal.wire.aggregation import Aggregation, Mean

_CONTROL, _OWN = "control/", "own_control/"


class Scaffold(FedAvg):
    """Karimireddy et al. 2020: control variates correct the drift of clients with unlike data.

    A message has twice the parameters: the model's, and the control variate's.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> Scaffold(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).server_lr
    1.0
    """

    aggregation: Aggregation = Mean(by="clients")
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "server_lr")
        if type(self.optimizer) is not SGD or self.optimizer.momentum:
            raise InputError(
                f"{self.name}: its optimizer is {self.optimizer!r}; option II takes the mean "
                "gradient from the change of the weights: use glocal.SGD(lr=...) without momentum"
            )

    def init(self, params: Params) -> State:
        """All control variates are 0."""
        state = super().init(params)
        zeros = trees.zeros_like(trees.pick(state.shared, self.task.trainable))
        shared = {**state.shared, **trees.with_prefix(_CONTROL, zeros)}
        return State(shared, {**state.private, **trees.with_prefix(_OWN, zeros)})

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Corrected training; the changes of weights and of the control variate are sent."""
        model, control = _split(_CONTROL, message)
        local, own = _split(_OWN, private)
        objective = self.objective.plus_linear(trees.subtract(control, own))
        update = self.train(objective, model, local, work)
        way = work.num_steps * self.optimizer.lr_at(work.round_index.double())
        delta = {name: -control[name] - update.upload[name] / way for name in own}
        return update._replace(
            upload={**update.upload, **trees.with_prefix(_CONTROL, delta)},
            private={**update.private, **trees.with_prefix(_OWN, trees.add(own, delta))},
        )

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Weights move by the mean change, the control variate by that of all clients."""
        moved, control = _split(_CONTROL, uploads.aggregate())
        weights = trees.scale(self.server_lr, trees.pick(moved, self.task.trainable))
        control = trees.with_prefix(_CONTROL, trees.scale(uploads.participation, control))
        return add_change(shared, {**moved, **weights, **control}), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The model without control variates."""
        return {**trees.without_prefix(_OWN, private), **trees.without_prefix(_CONTROL, shared)}

    def local_part(self, private: Params) -> Params:
        """All but the control variate."""
        return trees.without_prefix(_OWN, private)

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """The private part trains alone, uncorrected."""
        model = trees.without_prefix(_CONTROL, message)
        update = super().adapt(model, self.local_part(private), work)
        return update._replace(private={**private, **update.private})


def _split(prefix: str, tree: Params) -> tuple[Params, Params]:
    return trees.without_prefix(prefix, tree), trees.under_prefix(prefix, tree)
