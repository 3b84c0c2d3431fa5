"""FedProto: Tan et al. 2022, Algorithm 1.

"FedProto: Federated Prototype Learning across Heterogeneous Clients". Nothing of the model is
sent: a client sends the sum of its representations of every class, and how many there are, which
is a histogram of its labels. The server's prototype of a class is the mean over all examples of the
sampled clients. As in the authors' code, the regulariser is the mean square between each example's
representation and the prototype of its class.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from glocal.algorithms.contract import Algorithm, Message, State, Update, Uploads, require_numbers
from glocal.core.errors import InputError
from glocal.core.task import Task
from glocal.core.training import Batch, Objective, Work, local_train, masked_mean, own_rows
from glocal.core.trees import Params
from glocal.core.values import Values, take_rows
from glocal.wire.aggregation import Aggregation, Mean

_PROTOTYPES, _SEEN = "prototypes", "seen"


class FedProto(Algorithm):
    """Tan et al. 2022: clients share what classes look like, and keep all of their models.

    `classes` is the number of classes, by default that of the head's outputs. A client predicts the
    class of the nearest prototype; before there are any, by its head.

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
        weight = self._head_weight
        if weight is None:
            raise InputError(
                f"{self.name}: the head '{self.task.head_name}' has no weight (classes, features); "
                "name a linear layer with Task(head=...)"
            )

    @property
    def _head_weight(self) -> Tensor | None:
        weight = getattr(self.task.model.get_submodule(self.task.head_name), "weight", None)
        return weight if isinstance(weight, Tensor) and weight.dim() == 2 else None

    def init(self, params: Params) -> State:
        """No class has been seen."""
        like = params[f"{self.task.head_name}.weight"]
        return State(
            {_PROTOTYPES: torch.zeros_like(like), _SEEN: like.new_zeros(len(like))}, params
        )

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Training towards the prototypes; then the client's own sums are taken."""
        loss = PrototypeLoss(self.task, self.lam)
        objective = Objective(loss, self.task.trainable)
        trained = local_train(objective, {**private, **message}, work, self.optimizer)
        kept = {name: trained.params[name] for name in private}
        return Update(self._sums(kept, message, work), kept, {"loss": trained.loss})

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """The mean representation of every class that was among the sampled clients' labels."""
        total = uploads.aggregate()
        counts = total[_SEEN][:, None]
        means = total[_PROTOTYPES] / torch.where(counts > 0, counts, 1)
        prototypes = torch.where(counts > 0, means, shared[_PROTOTYPES])
        seen = torch.maximum(shared[_SEEN], (counts[:, 0] > 0).to(shared[_SEEN]))
        return {_PROTOTYPES: prototypes, _SEEN: seen}, server

    def personal(self, shared: Params, private: Params) -> Params:
        """The client's own model, and the prototypes."""
        return {**private, **shared}

    def predict(self, params: Params, x: Values, mask: Tensor) -> Tensor:
        """Minus the distance to every prototype; classes without one are the farthest."""
        features = self.task.represent(params, x, mask).flatten(1)
        gaps = (features[:, None] - params[_PROTOTYPES]).square().mean(2)
        nearest = torch.where(params[_SEEN] > 0, -gaps, -gaps.amax() - 1)
        return torch.where(params[_SEEN].any(), nearest, self.task.predict(params, x, mask))

    def _sums(self, params: Params, message: Message, work: Work) -> Message:
        """The sum of the client's representations by class, and their number."""
        rows, mask = own_rows(work)
        inputs, labels = take_rows(work.examples.x, rows), work.examples.y[rows]
        features = self.task.represent(params, inputs, mask).flatten(1)
        classes = torch.arange(len(message[_SEEN]), device=labels.device)
        of_class = ((labels[:, None] == classes) & mask[:, None]).to(features)
        return {_PROTOTYPES: of_class.T @ features, _SEEN: of_class.sum(0)}


@dataclass(frozen=True, eq=False)
class PrototypeLoss:
    """The task's loss plus lam times the distance of representations to their prototypes."""

    task: Task
    lam: float

    def __call__(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """The loss (), and the buffers after the step."""
        forward = self.task.with_features
        output, features, buffers = forward(params, batch.x, batch.mask, batch.key)
        loss = masked_mean(self.task.per_example(output, batch.y), batch.mask)
        gaps = (features.flatten(1) - params[_PROTOTYPES][batch.y]).square().mean(1)
        return loss + self.lam * masked_mean(gaps * params[_SEEN][batch.y], batch.mask), buffers
