"""FedAvg: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Algorithm 1."""

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core.optimizers import Optimiser
from glocal.core.training import Objective, Work, descend
from glocal.core.trees import Params


def fedavg(objective: Objective, optimiser: Optimiser) -> Algorithm:
    """Everything is shared: each device trains a copy of the model, the copies are averaged."""

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = descend(objective, shared, work, optimiser)
        return Update(trained, {}, loss)

    return Algorithm(
        "fedavg",
        lambda params: (params, {}),
        client_update,
        average,
        lambda shared, private: shared,
        optimiser.about,
        is_mean=True,
    )
