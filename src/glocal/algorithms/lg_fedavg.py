"""LG-FedAvg: Liang et al. 2020, Algorithm 1.

"Think Locally, Act Globally: Federated Learning with Local and Global Representations".
"""

from functools import partial

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.split import Split
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


def lg_fedavg(objective: Objective, optimizer: Optimizer, *, split: Split) -> Algorithm:
    """Both parts train together on the client; theta^l stays there, theta^g is averaged."""

    def init(params: Params) -> tuple[Params, Params]:
        _require_same_model(split, params)
        return split.take_shared(params), split.take_local(params)

    def update(objective: Objective, shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(objective, _merge(shared, private), work, optimizer)
        return Update(split.take_shared(trained), split.take_local(trained), loss)

    local_objective = objective._replace(trainable=objective.trainable & split.local)
    return Algorithm(
        name="lg_fedavg",
        init=init,
        client_update=partial(update, objective),
        aggregate=average,
        personal=_merge,
        description=f"{optimizer.description}, local={sorted(split.local)}",
        adapt=partial(update, local_objective) if split.local else None,
        is_mean=True,
    )


def _merge(shared: Params, private: Params) -> Params:
    return trees.merge(private, shared)


def _require_same_model(split: Split, params: Params) -> None:
    different = sorted(params.keys() ^ (split.local | split.shared))
    if different:
        raise InputError(
            f"lg_fedavg: the split is of another model; only one of the two has {different}; "
            "make it with Split.of(model)"
        )
