"""FedPer: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers"."""

from functools import cached_property

from glocal.algorithms.fedavg import FedAvg
from glocal.core.split import Split


class FedPer(FedAvg):
    """Arivazhagan et al. 2019: the head stays on the client, the body is averaged.

    The head is `Task.head`, by default the last layer; `local` names other layers.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> sorted(FedPer(classification(model), optimizer=SGD(lr=0.1)).split.local)
    ['2.bias', '2.weight']
    """

    @cached_property
    def split(self) -> Split:
        """The head is local."""
        local = self.task.head_name if self.local is None else self.local
        return Split.of(self.task.model, local=local)
