"""FedProto: Tan et al. 2022, Algorithm 1.

"FedProto: Federated Prototype Learning across Heterogeneous Clients". Nothing of the model is
sent: a client sends the sum of its representations of every class, and how many there are, which
is a histogram of its labels. The server's prototype of a class is the mean over all examples of the
sampled clients. As in the authors' code, the regulariser is the mean square between each example's
representation and the prototype of its class.
"""

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Message, State, Update, Uploads, require_numbers
from glocal.core import trees
from glocal.core.masked_mean import masked_mean
from glocal.core.training import Batch, Objective, Work, batches, local_train
from glocal.core.trees import Params
from glocal.core.values import Values
from glocal.wire.aggregation import Aggregation, Mean

_PROTOTYPES, _SEEN = "prototypes", "seen"


class FedProto(Algorithm):
    """Tan et al. 2022: clients share what classes look like, and keep all of their models.

    The classes are those of the head's outputs. A client predicts the class of the nearest
    prototype; before there are any, by its head.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> algorithm = FedProto(classification(model), optimizer=SGD(lr=0.1))
    >>> algorithm.init(algorithm.task.initial_params()).shared["prototypes"].shape
    torch.Size([2, 8])
    """

    aggregation: Aggregation = Mean(by="clients")
    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "lam")
        assert self.task.head_shape  # any head but a linear layer is refused here

    def init(self, params: Params) -> State:
        """No class has been seen."""
        like = next(tensor for tensor in params.values() if tensor.is_floating_point())
        prototypes = like.new_zeros(self.task.head_shape)
        return State({_PROTOTYPES: prototypes, _SEEN: like.new_zeros(len(prototypes))}, params)

    @property
    def objective(self) -> Objective:
        """The task's loss plus lam times the distance of representations to their prototypes."""
        return Objective(self.prototype_loss, self.task.trainable)

    def prototype_loss(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """Its value (), and the buffers after the step."""
        y, mask = batch.y, batch.mask
        output, features, buffers = self.task.with_features(params, batch.x, mask, batch.key)
        gaps = (features.flatten(1) - params[_PROTOTYPES][y]).square().mean(1) * params[_SEEN][y]
        loss = masked_mean(self.task.per_example(output, y), mask)
        return loss + self.lam * masked_mean(gaps, mask), buffers

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Training towards the prototypes; then the client's own sums are taken."""
        trained = local_train(self.objective, {**private, **message}, work, self.optimizer)
        kept = trees.pick(trained.params, private)
        return Update(self._sums(kept, message, work), kept, {"loss": trained.loss})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """The mean representation of every class that was among the sampled clients' labels."""
        total = uploads.aggregate()
        counts = total[_SEEN][:, None]
        means = total[_PROTOTYPES] / torch.where(counts > 0, counts, 1)
        prototypes = torch.where(counts > 0, means, shared[_PROTOTYPES])
        seen = torch.maximum(shared[_SEEN], (total[_SEEN] > 0).to(shared[_SEEN]))
        return {_PROTOTYPES: prototypes, _SEEN: seen}, server

    def personal(self, shared: Params, private: Params) -> Params:
        """The client's own model, and the prototypes."""
        return {**private, **shared}

    def predict(self, params: Params, x: Values, mask: Tensor) -> Tensor:
        """Minus the distance to every prototype; classes without one are the farthest."""
        features = self.task.represent(params, x, mask).flatten(1)
        gaps = (features[:, None] - params[_PROTOTYPES]).square().mean(2)
        nearest = torch.where(params[_SEEN] > 0, -gaps, -gaps.amax(1, keepdim=True) - 1)
        return torch.where(params[_SEEN].any(), nearest, self.task.predict(params, x, mask))

    def _sums(self, params: Params, message: Message, work: Work) -> Message:
        """The sum of the client's representations by class, and their number."""
        sums, seen = trees.zeros_like(message), message[_SEEN]
        classes = torch.arange(len(seen), device=seen.device)
        for batch in batches(work.epochs(0, 1)):
            features = self.task.represent(params, batch.x, batch.mask).flatten(1)
            is_class = (batch.y[:, None] == classes) & batch.mask[:, None]
            counts = is_class.to(features)
            sums = trees.add(sums, {_PROTOTYPES: counts.T @ features, _SEEN: counts.sum(0)})
        return sums
