"""FedProx: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", equation 2."""

from glocal.algorithms.contract import Algorithm, Update
from glocal.algorithms.fedavg import fedavg
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimiser
from glocal.core.training import Objective, Work, descend, pulled
from glocal.core.trees import Params


def fedprox(objective: Objective, optimiser: Optimiser, *, mu: float = 0.1) -> Algorithm:
    """FedAvg whose devices are held near the shared model by mu/2 * ||w - w_t||^2."""
    if mu < 0:
        raise InputError(f"fedprox: mu is {mu}; it must be at least 0")

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = descend(pulled(objective, shared, mu), shared, work, optimiser)
        return Update(trained, {}, loss)

    about = f"{optimiser.about}, mu={mu}"
    return fedavg(objective, optimiser)._replace(name="fedprox", client_update=client_update, about=about)
