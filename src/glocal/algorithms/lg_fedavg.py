"""LG-FedAvg: Liang et al. 2020, "Think Locally, Act Globally: Federated Learning with Local and Global Representations"."""

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.split import Split
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


def lg_fedavg(objective: Objective, optimizer: Optimizer, *, split: Split) -> Algorithm:
    """Algorithm 1: both parts descend together on the device; theta^l stays there, theta^g is sent and averaged."""

    def init(params: Params) -> tuple[Params, Params]:
        if params.keys() != split.local | split.shared:
            differ = sorted(params.keys() ^ (split.local | split.shared))
            raise InputError(
                f"lg_fedavg: the split is of another model; only one of the two has {differ}; make it with Split.of(model)"
            )
        return split.take_shared(params), split.take_local(params)

    def client_update(shared: Params, private: Params, work: Work) -> Update:
        return update(objective, shared, private, work)

    def adapt(shared: Params, private: Params, work: Work) -> Update:
        return update(
            objective._replace(trainable=objective.trainable & split.local), shared, private, work
        )

    def update(goal: Objective, shared: Params, private: Params, work: Work) -> Update:
        trained, loss = local_train(goal, personal(shared, private), work, optimizer)
        return Update(split.take_shared(trained), split.take_local(trained), loss)

    def personal(shared: Params, private: Params) -> Params:
        return trees.merge(private, shared)

    description = f"{optimizer.description}, local={sorted(split.local)}"
    return Algorithm(
        "lg_fedavg",
        init,
        client_update,
        average,
        personal,
        description,
        adapt=adapt if split.local else None,
        is_mean=True,
    )
