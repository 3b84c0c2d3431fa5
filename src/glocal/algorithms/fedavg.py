"""FedAvg: McMahan et al. 2017, Algorithm 1.

"Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from dataclasses import dataclass

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.algorithms.task_algorithm import TaskAlgorithm
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


@dataclass(frozen=True, repr=False)
class FedAvg(TaskAlgorithm):
    """McMahan et al. 2017: everything is shared, the clients' copies are averaged.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAvg(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).weighting
    'examples'
    """

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        return fedavg(objective, optimizer)


def fedavg(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """Everything is shared: each client trains a copy of the model, the copies are averaged."""

    def init(params: Params) -> tuple[Params, Params]:
        return params, {}

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(objective, shared, work, optimizer)
        return Update(trained, {}, loss)

    def personal(shared: Params, private: Params) -> Params:
        return shared

    return Algorithm(
        "fedavg", init, client_update, average, personal, optimizer.description, is_mean=True
    )
