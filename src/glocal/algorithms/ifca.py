"""IFCA: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", Algorithm 1.

This is model averaging. The server sends the models of all clusters; a client takes the one with
the lowest loss on its own data, trains it, and sends its change and its choice.
"""

import torch
from torch import Tensor

from glocal.algorithms.clusters import mean_of_members, number_of_clusters, perturbed_copies, select
from glocal.algorithms.contract import (
    Algorithm,
    Message,
    State,
    Update,
    Uploads,
    add_change,
    change,
)
from glocal.core import trees
from glocal.core.training import Work, local_train, masked_mean, own_rows
from glocal.core.trees import Params
from glocal.core.values import take_rows

_CHOICE = "cluster"


class IFCA(Algorithm):
    """Ghosh et al. 2020: every client belongs to the cluster whose model fits it best.

    The models of all `clusters` start from the task's, the first one as it is, the others with
    noise of `spread` times the standard deviation of each tensor.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> IFCA(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).clusters
    2
    """

    clusters: int = 2
    spread: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        number_of_clusters(self, self.clusters, self.spread)

    def init(self, params: Params) -> State:
        """A model per cluster; a client belongs to none yet."""
        models = perturbed_copies(params, self.clusters, self.spread)
        like = next(tensor for tensor in params.values() if tensor.is_floating_point())
        return State(models, {_CHOICE: like.new_zeros(self.clusters)})

    def upload_like(self, shared: Params) -> Message:
        """One model, and which it is."""
        choice = torch.zeros(self.clusters, device=next(iter(shared.values())).device)
        return {**{name: tensor[0] for name, tensor in shared.items()}, _CHOICE: choice}

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The best model is trained."""
        choice = self._choose(message, work)
        model = select(message, choice)
        trained = local_train(self.objective, model, work, self.optimizer)
        upload = {**change(trained.params, model), _CHOICE: choice.float()}
        return Update(upload, {_CHOICE: choice.to(private[_CHOICE])}, {"loss": trained.loss})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Each cluster's model moves by the mean of its members' changes."""
        return add_change(shared, mean_of_members(uploads, _CHOICE)), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The model of the client's cluster; of the first one before it has chosen."""
        first = torch.eye(self.clusters, device=private[_CHOICE].device)[0].to(private[_CHOICE])
        return select(shared, torch.where(private[_CHOICE].any(), private[_CHOICE], first))

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """A new client chooses a cluster, and trains nothing."""
        update = self.client_update(message, private, work.epochs(0, 1))
        return update._replace(upload=trees.zeros_like(update.upload))

    def _choose(self, models: Params, work: Work) -> Tensor:
        """Which model has the lowest loss on the client's own rows: a one among zeros."""
        rows, mask = own_rows(work)
        x, y = take_rows(work.examples.x, rows), take_rows(work.examples.y, rows)
        losses = []
        for cluster in range(self.clusters):
            own = {name: tensor[cluster] for name, tensor in models.items()}
            output = self.task.predict(own, x, mask)
            losses.append(masked_mean(self.task.per_example(output, y), mask))
        best = torch.stack(losses).argmin()
        return (torch.arange(self.clusters, device=best.device) == best).to(losses[0])
