"""FedProx: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2."""

from dataclasses import dataclass

from glocal.algorithms.contract import Algorithm, Update
from glocal.algorithms.fedavg import fedavg
from glocal.algorithms.task_algorithm import TaskAlgorithm, require_numbers
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train, with_proximal
from glocal.core.trees import Params


@dataclass(frozen=True, repr=False)
class FedProx(TaskAlgorithm):
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

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        return fedprox(objective, optimizer, mu=self.mu)


def fedprox(objective: Objective, optimizer: Optimizer, *, mu: float = 0.1) -> Algorithm:
    """FedAvg with a term mu/2 * ||w - w_t||^2 that keeps clients near the shared model."""
    if mu < 0:
        raise InputError(f"fedprox: mu is {mu}; it must be at least 0")

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(with_proximal(objective, shared, mu), shared, work, optimizer)
        return Update(trained, {}, loss)

    description = f"{optimizer.description}, mu={mu}"
    return fedavg(objective, optimizer)._replace(
        name="fedprox", client_update=client_update, description=description
    )
