"""FedDyn: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Algorithm 1.

A client minimises L_k(w) - <g_k, w> + alpha/2 ||w - w_t||^2 and sets
g_k <- g_k - alpha * (w_k - w_t). The server has h <- h - alpha/m * sum over the sampled clients of
(w_k - w_t), where m counts all clients, and w_{t+1} = mean of w_k - h / alpha.
"""

from glocal.algorithms.contract import Message, State, Update, Uploads, add_change, require_numbers
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.training import Work
from glocal.core.trees import Params
from glocal.wire.aggregation import Aggregation, Mean

_GRADIENT = "gradient/"


class FedDyn(FedAvg):
    """Acar et al. 2021: clients regularise their loss so that all optima agree.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedDyn(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).alpha
    0.01
    """

    aggregation: Aggregation = Mean(by="clients")
    alpha: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "alpha")
        if not self.alpha:
            raise InputError(f"{self.name}: alpha is 0, and h / alpha has no value; use FedAvg")

    def init(self, params: Params) -> State:
        """Gradients and h are 0."""
        state = super().init(params)
        zeros = trees.zeros_like(trees.pick(state.shared, self.task.trainable))
        private = {**state.private, **trees.with_prefix(_GRADIENT, zeros)}
        return State(state.shared, private, server=zeros)

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Training with the client's own linear term, near what was received."""
        local = trees.without_prefix(_GRADIENT, private)
        gradient = trees.under_prefix(_GRADIENT, private)
        objective = self.objective.near(trees.pick(message, gradient), self.alpha)
        objective = objective.plus_linear(trees.scale(-1.0, gradient))
        update = self.train(objective, message, local, work)
        after = {name: g - self.alpha * update.upload[name] for name, g in gradient.items()}
        return update._replace(private={**update.private, **trees.with_prefix(_GRADIENT, after)})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """The mean of the clients' models, corrected by h, which never leaves the server."""
        moved = uploads.aggregate()
        share = self.alpha * uploads.participation
        h = {name: tensor - share * moved[name] for name, tensor in server.items()}
        corrected = {name: moved[name] - tensor / self.alpha for name, tensor in h.items()}
        return add_change(shared, {**moved, **corrected}), h

    def personal(self, shared: Params, private: Params) -> Params:
        """The model without gradients."""
        return {**trees.without_prefix(_GRADIENT, private), **shared}

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """The private part trains alone."""
        update = super().adapt(message, trees.without_prefix(_GRADIENT, private), work)
        return update._replace(private={**private, **update.private})
