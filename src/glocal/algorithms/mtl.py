"""Mean-regularised multi-task learning: Evgeniou and Pontil 2004, as the baseline of Liang et al. 2020, appendix C.2.

R(W) = tie * tr(W Omega W') + ridge * ||W||^2 with Omega = (I - 11'/M)^2. As I - 11'/M is a projection, the trace is the sum over
devices of ||w_m - mean||^2, and its gradient with respect to w_m is 2 * tie * (w_m - mean): a device needs only the mean.
"""

from torch import Tensor

from glocal.algorithms.contract import Algorithm, Update
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train, with_proximal
from glocal.core.trees import Params


def mtl(
    objective: Objective,
    optimizer: Optimizer,
    *,
    num_clients: int,
    lam: float = 0.1,
    ridge: float = 0.0,
) -> Algorithm:
    """Every device has its own w_m, pulled to the mean of all M; shared is that mean, an upload is how w_m moved."""
    if lam < 0 or ridge < 0:
        raise InputError(f"mtl: tie is {lam} and ridge {ridge}; neither may be negative")

    def init(params: Params) -> tuple[Params, Params]:
        return trees.pick(params, objective.trainable), params

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        origin = {name: 0 * tensor for name, tensor in shared.items()}
        regularised = with_proximal(with_proximal(objective, shared, 2 * lam), origin, 2 * ridge)
        trained, loss = local_train(regularised, private, work, optimizer)
        moved = trees.subtract(trees.pick(trained, shared), trees.pick(private, shared))
        return Update(moved, trained, loss)

    def aggregate(shared: Params, uploads: Params, weights: Tensor) -> Params:
        # devices outside the cohort did not move, so the mean over all M moves by the cohort's sum over M
        return trees.add(
            shared, {name: moved.sum(0) / num_clients for name, moved in uploads.items()}
        )

    description = f"{optimizer.description}, tie={lam}, ridge={ridge}"
    return Algorithm(
        "mtl",
        init,
        client_update,
        aggregate,
        lambda shared, private: private,
        description,
        num_clients,
    )
