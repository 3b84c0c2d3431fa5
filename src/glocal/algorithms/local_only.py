"""Local only: every device trains its own model and sends nothing; one end of the scale in Liang et al. 2020, section 5.2."""

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core.optimizers import Optimizer
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


def local_only(objective: Objective, optimizer: Optimizer) -> Algorithm:
    """Everything is local."""

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(objective, private, work, optimizer)
        return Update({}, trained, loss)

    def init(params: Params) -> tuple[Params, Params]:
        return {}, params

    return Algorithm(
        "local_only",
        init,
        client_update,
        average,  # of nothing
        lambda shared, private: private,
        optimizer.description,
        adapt=client_update,
        is_mean=True,
    )
