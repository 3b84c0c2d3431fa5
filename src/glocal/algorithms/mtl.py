"""Mean-regularised multi-task learning: Evgeniou and Pontil 2004.

It is a baseline of Liang et al. 2020, appendix C.2, with the regulariser
R(W) = lam * tr(W Omega W') + ridge * ||W||^2 and Omega = (I - 11'/M)^2. As I - 11'/M is a
projection, the trace is the sum over clients of ||w_m - mean||^2. Its gradient with respect to w_m
is 2 * lam * (w_m - mean), so a client needs only the mean.
"""

from dataclasses import dataclass

from torch import Tensor

from glocal.algorithms.contract import Algorithm, Update
from glocal.algorithms.task_algorithm import TaskAlgorithm, require_numbers
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train, with_proximal
from glocal.core.trees import Params


@dataclass(frozen=True, repr=False)
class MTL(TaskAlgorithm):
    """Evgeniou and Pontil 2004: own models, each drawn towards the mean of all by `lam`.

    `ridge` draws them towards 0.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> MTL(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1), lam=0.01).ridge
    0.0
    """

    lam: float = 0.1
    ridge: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "lam", "ridge")

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        settings = {"lam": self.lam, "ridge": self.ridge}
        return mtl(objective, optimizer, num_clients=num_clients, **settings)


def mtl(
    objective: Objective,
    optimizer: Optimizer,
    *,
    num_clients: int,
    lam: float = 0.1,
    ridge: float = 0.0,
) -> Algorithm:
    """Every client has its own model w_m, regularised towards the mean over all M clients.

    The shared tree is that mean; an upload is the change of w_m in a round.
    """
    if lam < 0 or ridge < 0:
        raise InputError(f"mtl: lam is {lam} and ridge {ridge}; neither may be negative")

    def init(params: Params) -> tuple[Params, Params]:
        return trees.pick(params, objective.trainable), params

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        regularised = _regularise(objective, shared, lam=lam, ridge=ridge)
        trained, loss = local_train(regularised, private, work, optimizer)
        change = trees.subtract(trees.pick(trained, shared), trees.pick(private, shared))
        return Update(change, trained, loss)

    def aggregate(shared: Params, uploads: Params, weights: Tensor) -> Params:
        # All other clients did not change: the mean over all M changes by this sum over M.
        change = {name: changes.sum(0) / num_clients for name, changes in uploads.items()}
        return trees.add(shared, change)

    description = f"{optimizer.description}, lam={lam}, ridge={ridge}"
    return Algorithm("mtl", init, client_update, aggregate, _own_model, description, num_clients)


def _regularise(objective: Objective, mean: Params, *, lam: float, ridge: float) -> Objective:
    """Add lam * ||w - mean||^2 + ridge * ||w||^2."""
    origin = {name: 0 * tensor for name, tensor in mean.items()}
    near_mean = with_proximal(objective, mean, 2 * lam)
    return with_proximal(near_mean, origin, 2 * ridge)


def _own_model(shared: Params, private: Params) -> Params:
    return private
