"""FedProx: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2."""

from glocal.algorithms.contract import Message, Update, require_numbers
from glocal.algorithms.fedavg import FedAvg
from glocal.core.training import Work
from glocal.core.trees import Params


class FedProx(FedAvg):
    """Li et al. 2020: FedAvg with a term mu/2 * ||w - w_t||^2 in each client's objective.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedProx(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1), mu=0.01).mu
    0.01
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "mu")

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Training near what was received."""
        return self.train(self.objective.near(message, self.mu), message, private, work)
