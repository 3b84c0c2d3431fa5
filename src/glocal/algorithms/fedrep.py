"""FedRep: Collins et al. 2021, Algorithm 1.

"Exploiting Shared Representations for Personalized Federated Learning".
"""

from glocal.algorithms.contract import Message, Update
from glocal.algorithms.fedper import FedPer
from glocal.core.bounds import MAX_EPOCHS, require_count
from glocal.core.training import Work, local_train
from glocal.core.trees import Params


class FedRep(FedPer):
    """Collins et al. 2021: the head trains for `head_epochs`, then the body for `local_epochs`.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> FedRep(classification(model), optimizer=SGD(lr=0.1)).num_epochs(1)
    6
    """

    head_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(f"{self.name}: head_epochs", self.head_epochs, 1, MAX_EPOCHS)

    def num_epochs(self, local_epochs: int) -> int:
        """The head's epochs come first."""
        return self.head_epochs + local_epochs

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """First the head, then the body."""
        head, body = self.objective.only(private), self.objective.only(message)
        params, first = {**private, **message}, work.epochs(0, self.head_epochs)
        with_head = local_train(head, params, first, self.optimizer).params
        rest = work.epochs(self.head_epochs)
        return self.update(local_train(body, with_head, rest, self.optimizer), message, private)
