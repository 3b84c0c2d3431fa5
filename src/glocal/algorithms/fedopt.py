"""Server optimizers: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

The mean change d of the clients takes the place of a gradient. The first moment is
m <- beta1 * m + (1 - beta1) * d, and the server moves by server_lr * m / (sqrt(v) + tau), where

    FedAdagrad  v <- v + d^2
    FedAdam     v <- beta2 * v + (1 - beta2) * d^2
    FedYogi     v <- v - (1 - beta2) * d^2 * sign(v - d^2)

Only trained tensors take the rule; statistics of batch norm are averaged.
"""

import torch
from torch import Tensor

from glocal.algorithms.contract import State, Uploads, add_change, require_numbers
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.trees import Params

_FIRST, _SECOND = "first/", "second/"


class FedAdagrad(FedAvg):
    """Reddi et al. 2021: Adagrad on the server.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAdagrad(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).beta1
    0.0
    """

    server_lr: float = 0.1
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "server_lr", "tau")
        require_numbers(self, "beta1", maximum=1)

    def init(self, params: Params) -> State:
        """First moments start at 0, second ones at tau^2."""
        state = super().init(params)
        first = trees.zeros_like(trees.pick(state.shared, self.task.trainable))
        second = {name: torch.full_like(tensor, self.tau**2) for name, tensor in first.items()}
        server = {**trees.with_prefix(_FIRST, first), **trees.with_prefix(_SECOND, second)}
        return state._replace(server=server)

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """One step of the server's rule."""
        moved, steps = uploads.aggregate(), {}
        moments: Params = {}
        for name in trees.under_prefix(_FIRST, server):
            first = self.beta1 * server[_FIRST + name] + (1 - self.beta1) * moved[name]
            second = self.add_square(server[_SECOND + name], moved[name].square())
            steps[name] = self.server_lr * first / (second.sqrt() + self.tau)
            moments |= {_FIRST + name: first, _SECOND + name: second}
        return add_change(shared, {**moved, **steps}), moments

    def add_square(self, second: Tensor, square: Tensor) -> Tensor:
        """The sum of squares."""
        return second + square


class FedAdam(FedAdagrad):
    """Reddi et al. 2021: Adam on the server.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAdam(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).beta2
    0.99
    """

    beta1: float = 0.9
    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "beta2", maximum=1)

    def add_square(self, second: Tensor, square: Tensor) -> Tensor:
        """A running mean of squares."""
        return self.beta2 * second + (1 - self.beta2) * square


class FedYogi(FedAdam):
    """Reddi et al. 2021: Yogi on the server, whose second moment changes slowly.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedYogi(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).name
    'FedYogi'
    """

    def add_square(self, second: Tensor, square: Tensor) -> Tensor:
        """Towards the square, by a share of the square itself."""
        return second - (1 - self.beta2) * square * torch.sign(second - square)
