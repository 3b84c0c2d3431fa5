"""LG-FedAvg: Liang et al. 2020, Algorithm 1.

"Think Locally, Act Globally: Federated Learning with Local and Global Representations".
"""

from functools import cached_property
from typing import ClassVar

from glocal.algorithms.fedavg import FedAvg
from glocal.core.split import Selector, Split


class LGFedAvg(FedAvg):
    """Liang et al. 2020: both parts train on the client, and only the shared one is averaged.

    `local` or `shared` selects one part, as in `Split.of`; the other one is the rest.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> algorithm = LGFedAvg(classification(model), local="0", optimizer=SGD(lr=0.1))
    >>> sorted(algorithm.split.shared)
    ['2.bias', '2.weight']
    """

    shared: Selector | None = None

    word: ClassVar[str] = "lg_fedavg"

    @cached_property
    def split(self) -> Split:
        """Which tensors are local, and which shared."""
        return Split.of(self.task.model, local=self.local, shared=self.shared)
