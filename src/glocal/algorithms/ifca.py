"""IFCA: Ghosh et al. 2020, "An Efficient Framework for Clustered Federated Learning", Algorithm 1.

This is model averaging. The server sends the models of all clusters; a client takes the one with
the lowest loss on its own data, trains it, and sends its change and its choice.
"""

import torch
from torch import Tensor

from glocal.algorithms.clusters import (
    MEMBERSHIP,
    Clustered,
    add_mean_of_members,
    of_cluster,
    one_hot,
)
from glocal.algorithms.contract import Message, State, Update, Uploads, change
from glocal.core import trees
from glocal.core.losses import masked_mean
from glocal.core.training import Batch, WeightedSum, Work, batches, local_train
from glocal.core.trees import Params

_CHOICE = "choice"


class IFCA(Clustered):
    """Ghosh et al. 2020: every client belongs to the cluster whose model fits it best.

    The models of all `clusters` start from the task's, the first one as it is, the others with
    noise of `spread` times the standard deviation of each tensor.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> IFCA(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).clusters
    2
    """

    def init(self, params: Params) -> State:
        """A model per cluster; a client has chosen none yet, which is -1."""
        models = self.start_models(params)
        none = torch.tensor(-1, device=next(iter(models.values())).device)
        return State(models, {_CHOICE: none})

    def upload_like(self, shared: Params) -> Message:
        """One model, and which it is."""
        first = {name: tensor[0] for name, tensor in shared.items()}
        return {**first, MEMBERSHIP: one_hot(torch.tensor(0), shared)}

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The best model is trained."""
        choice = self._losses(message, work).argmin()
        membership = one_hot(choice, message)
        model = trees.mean(message, membership)
        trained = local_train(self.objective, model, work, self.optimizer)
        upload = {**change(trained.params, model), MEMBERSHIP: membership}
        return Update(upload, {_CHOICE: choice}, {"loss": trained.loss})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Each cluster's model moves by the mean of its members' changes."""

        def of_own_cluster(upload: Message, sent: Message, profile: Params) -> Message:
            return of_cluster(trees.drop(upload, [MEMBERSHIP]), upload[MEMBERSHIP])

        return add_mean_of_members(shared, uploads.aggregate(of_own_cluster)), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The model of the client's cluster; of the first one before it has chosen."""
        return trees.mean(shared, one_hot(private[_CHOICE].clamp(min=0), shared))

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """A new client chooses a cluster, and trains nothing."""
        losses = self._losses(message, work)
        nothing = trees.zeros_like(self.upload_like(message))
        loss = WeightedSum(losses.min(), torch.ones_like(losses[0]))
        return Update(nothing, {_CHOICE: losses.argmin()}, {"loss": loss})

    def _losses(self, models: Params, work: Work) -> Tensor:
        """The mean loss of every model on the client's own rows (clusters,)."""
        total: Tensor | int = 0
        for batch in batches(work.epochs(0, 1)):
            losses = [self._loss(models, cluster, batch) for cluster in range(self.clusters)]
            total = total + batch.mask.sum() * torch.stack(losses)
        return total / (work.order[0] >= 0).sum()

    def _loss(self, models: Params, cluster: int, batch: Batch) -> Tensor:
        model = {name: tensor[cluster] for name, tensor in models.items()}
        output = self.task.predict(model, batch.x, batch.mask)
        return masked_mean(self.task.per_example(output, batch.y), batch.mask)
