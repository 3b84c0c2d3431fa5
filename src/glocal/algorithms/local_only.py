"""Local only: clients train alone and send nothing. A baseline of Liang et al. 2020, 5.2."""

from dataclasses import dataclass

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.algorithms.task_algorithm import TaskAlgorithm
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


@dataclass(frozen=True, repr=False)
class LocalOnly(TaskAlgorithm):
    """Clients train alone: everything is local, nothing is sent.

    >>> from torch import nn
    >>> from glocal import Adam, classification
    >>> LocalOnly(classification(nn.Linear(4, 2)), optimizer=Adam(lr=0.01)).name
    'LocalOnly'
    """

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        return local_only(objective, optimizer)


def local_only(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """Everything is local: the shared tree is empty."""

    def init(params: Params) -> tuple[Params, Params]:
        return {}, params

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(objective, private, work, optimizer)
        return Update({}, trained, loss)

    def personal(shared: Params, private: Params) -> Params:
        return private

    return Algorithm(
        name="local_only",
        init=init,
        client_update=client_update,
        aggregate=average,  # of empty trees
        personal=personal,
        description=optimizer.description,
        adapt=client_update,
        is_mean=True,
    )
