"""LG-FedAvg: Liang et al. 2020, Algorithm 1.

"Think Locally, Act Globally: Federated Learning with Local and Global Representations".
"""

from dataclasses import dataclass
from functools import partial

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.algorithms.task_algorithm import TaskAlgorithm
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.split import Selector, Split
from glocal.core.training import Objective, Work, local_train
from glocal.core.trees import Params


@dataclass(frozen=True, repr=False)
class LGFedAvg(TaskAlgorithm):
    """Liang et al. 2020: a local part stays on the client, the shared part is averaged.

    `local` or `shared` names the parts, as in `Split.of`; the other side is the rest.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> algorithm = LGFedAvg(classification(model), local="0", optimizer=SGD(lr=0.1))
    >>> sorted(algorithm.split.shared)
    ['2.bias', '2.weight']
    """

    local: Selector | None = None
    shared: Selector | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.split is not None  # a selector that matches nothing is refused here

    @property
    def split(self) -> Split:
        """Which tensors are local, and which shared."""
        return Split.of(self.task.model, local=self.local, shared=self.shared)

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        return lg_fedavg(objective, optimizer, split=self.split)


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
