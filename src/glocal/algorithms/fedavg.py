"""FedAvg: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1."""

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


def fedavg(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """Everything is shared: each device trains a copy of the model, the copies are averaged."""

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(objective, shared, work, optimizer)
        return Update(trained, {}, loss)

    return Algorithm(
        "fedavg",
        lambda params: (params, {}),
        client_update,
        average,
        lambda shared, private: shared,
        optimizer.description,
        is_mean=True,
    )
