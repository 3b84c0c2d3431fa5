"""A warm start for groups of clients with a model each: FedAvg within every group."""

from collections.abc import Sequence
from dataclasses import replace

from glocal.algorithms.contract import Message, Update
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.checks import require_instance, require_items
from glocal.core.optimizers import Optimizer
from glocal.core.sampling import Plan
from glocal.core.training import Work
from glocal.core.trees import Params
from glocal.federate.experiment import Experiment, Group
from glocal.federate.options import Evaluation, Options
from glocal.federate.run import Run


class FedAvgWithout(FedAvg):
    """FedAvg in which some tensors stay as they are."""

    fixed: tuple[str, ...] = ()

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """All other tensors train."""
        names = self.task.trainable - frozenset(self.fixed)
        return self.train(self.objective.only(names), message, private, work)


def warm_start_groups(
    groups: Sequence[Group], optimizer: Optimizer, plan: Plan, *, options: Options | None = None
) -> list[Group]:
    """FedAvg within each group, as a warm start for LG-FedAvg as in the paper.

    It trains whole models. The first group trains the shared part. The others train their local
    parts under it, so that one shared part fits all groups.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> group, plan = glocal.Group(algorithm, (data,)), glocal.Plan(1, clients_per_round=2)
    >>> [warm] = glocal.warm_start_groups([group], glocal.SGD(lr=0.1), plan)
    >>> sorted(warm.params[0])
    ['1.bias', '1.weight']
    """
    require_items("warm start: groups", groups, Group, "a list of glocal.Group")
    require_instance("warm start: plan", plan, Plan, "a glocal.Plan")
    Experiment(tuple(groups), plan, seeds=(plan.seed,))  # refuses what cannot train together
    warm: list[Group] = []
    for group in groups:
        params, agreed = group.initial_params(0), Params()
        if warm:
            agreed = trees.pick(warm[0].params[0], group.algorithm.init(params).shared)
        algorithm = FedAvgWithout(group.algorithm.task, optimizer=optimizer, fixed=tuple(agreed))
        alone = replace(group, algorithm=algorithm, params=({**params, **agreed},))
        experiment = Experiment(
            (alone,), plan, seeds=(plan.seed,), evaluation=Evaluation(new_test=False)
        )
        result = Run(experiment, options=options).to_end().groups[0]
        # shared tensors are equal on all clients, and their average is only up to rounding
        trained = {**result.state.shared, **agreed}
        warm.append(replace(group, params=(trained,), spent=(result.ledger,)))
    return warm
