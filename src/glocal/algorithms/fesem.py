"""FeSEM: Xie et al. 2021, "Multi-Center Federated Learning", Algorithm 1.

The server keeps several centres. It assigns every client to the centre that is nearest to the
client's model, and moves each centre to the mean of its members. What a client is sent differs
from client to client: its own centre, and the mean of all of them before it has one.
"""

import torch
from torch import Tensor

from glocal.algorithms.clusters import (
    Clustered,
    add_mean_of_members,
    of_cluster,
    one_hot,
)
from glocal.algorithms.contract import (
    Message,
    State,
    Update,
    Uploads,
    add_change,
    change,
)
from glocal.core import trees
from glocal.core.training import Work, local_train
from glocal.core.trees import Params

_CLUSTER, _OWN = "cluster", "own/"


class FeSEM(Clustered):
    """Xie et al. 2021: a client is sent the centre that is nearest to its last model.

    A client predicts with its last model. The `clusters` start from the task's model, the first one
    as it is, the others with noise of `spread` times the standard deviation of each tensor.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FeSEM(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).clusters
    2
    """

    def init(self, params: Params) -> State:
        """The server knows no client's cluster yet: a profile of zeros."""
        centres = self.start_models(params)
        nowhere = torch.zeros_like(one_hot(torch.tensor(0), centres))
        return State(centres, trees.with_prefix(_OWN, params), profile={_CLUSTER: nowhere})

    def upload_like(self, shared: Params) -> Message:
        """One model."""
        return {name: tensor[0] for name, tensor in shared.items()}

    def download(self, shared: Params, profile: Params) -> Message:
        """The client's centre, or the mean of all of them."""
        own = profile[_CLUSTER]
        return trees.mean(shared, torch.where(own.any(), own, torch.ones_like(own)))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The centre is trained; the client keeps the result."""
        trained = local_train(self.objective, message, work, self.optimizer)
        after = trees.with_prefix(_OWN, trained.params)
        return Update(change(trained.params, message), after, {"loss": trained.loss})

    def remember(self, shared: Params, profile: Params, sent: Message, upload: Message) -> Params:
        """The centre that was nearest, before it moved."""
        return {_CLUSTER: self._nearest(shared, add_change(sent, upload))}

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """Each centre moves to the mean of its members."""

        def of_own_cluster(upload: Message, sent: Message, profile: Params) -> Message:
            model = add_change(sent, upload)
            nearest = self._nearest(shared, model)
            return of_cluster(change(model, trees.mean(shared, nearest)), nearest)

        return add_mean_of_members(shared, uploads.aggregate(of_own_cluster)), server

    def personal(self, shared: Params, private: Params) -> Params:
        """The client's last model."""
        return trees.under_prefix(_OWN, private)

    def _nearest(self, centres: Params, model: Params) -> Tensor:
        """A one for the centre with the nearest weights among zeros (clusters,)."""
        gaps = []
        for name, tensor in trees.pick(centres, self.task.trainable).items():
            squares = (tensor - model[name]).square()
            gaps.append(squares.reshape(self.clusters, model[name].numel()).sum(1))
        return one_hot(torch.stack(gaps).sum(0).argmin(), centres)
