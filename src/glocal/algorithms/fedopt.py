"""Server optimizers: Reddi et al. 2021, "Adaptive Federated Optimization", Algorithm 2.

The mean change of the clients is a gradient for the server's own rule. FedAvgM is that of Hsu et
al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification". With the change d, the momentum m and the second moment v, the server moves by
server_lr * m (FedAvgM), or by server_lr * m / (sqrt(v) + tau) for the others:

    FedAvgM     m <- momentum * m + d
    the others  m <- beta1 * m + (1 - beta1) * d
    FedAdagrad  v <- v + d^2
    FedAdam     v <- beta2 * v + (1 - beta2) * d^2
    FedYogi     v <- v - (1 - beta2) * d^2 * sign(v - d^2)

Only trained tensors take the rule. Statistics of batch norm are averaged: a rule with momentum
would push a variance below 0.
"""

import torch
from torch import Tensor

from glocal.algorithms.contract import State, Uploads, add_change, require_numbers
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.trees import Params

_MOMENTUM, _SECOND = "momentum/", "second/"


class FedAvgM(FedAvg):
    """Hsu et al. 2019: momentum on the server.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAvgM(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).momentum
    0.9
    """

    server_lr: float = 1.0
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "server_lr")
        require_numbers(self, "momentum", maximum=1)

    def init(self, params: Params) -> State:
        """No momentum yet."""
        state = super().init(params)
        zeros = trees.zeros_like(trees.pick(state.shared, self.task.trainable))
        return state._replace(server=trees.with_prefix(_MOMENTUM, zeros))

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """One step of the server's rule."""
        moved, momentum = uploads.aggregate(), trees.under_prefix(_MOMENTUM, server)
        after = {name: self.add_momentum(tensor, moved[name]) for name, tensor in momentum.items()}
        second = self.second_moments(trees.under_prefix(_SECOND, server), moved)
        steps = {
            name: self.server_lr * self.scaled(m, second.get(name)) for name, m in after.items()
        }
        state = trees.with_prefix(_MOMENTUM, after) | trees.with_prefix(_SECOND, second)
        return add_change(shared, {**moved, **steps}), state

    def add_momentum(self, momentum: Tensor, moved: Tensor) -> Tensor:
        """The momentum with this change."""
        return self.momentum * momentum + moved

    def second_moments(self, second: Params, moved: Params) -> Params:
        """None are kept."""
        return second

    def scaled(self, momentum: Tensor, second: Tensor | None) -> Tensor:
        """The step for a learning rate of 1."""
        return momentum


class FedAdagrad(FedAvgM):
    """Reddi et al. 2021: Adagrad on the server.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAdagrad(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).tau
    0.001
    """

    server_lr: float = 0.1
    momentum: float = 0.0
    beta1: float = 0.0
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "beta1", maximum=1)
        require_numbers(self, "tau")

    def init(self, params: Params) -> State:
        """Second moments start at tau^2."""
        state = super().init(params)
        first = trees.under_prefix(_MOMENTUM, state.server)
        second = {name: torch.full_like(tensor, self.tau**2) for name, tensor in first.items()}
        return state._replace(server={**state.server, **trees.with_prefix(_SECOND, second)})

    def add_momentum(self, momentum: Tensor, moved: Tensor) -> Tensor:
        """A running mean."""
        return self.beta1 * momentum + (1 - self.beta1) * moved

    def second_moments(self, second: Params, moved: Params) -> Params:
        """By the rule, name by name."""
        return {name: self.add_square(v, moved[name].square()) for name, v in second.items()}

    def add_square(self, second: Tensor, square: Tensor) -> Tensor:
        """The sum of squares."""
        return second + square

    def scaled(self, momentum: Tensor, second: Tensor | None) -> Tensor:
        """The momentum in units of the typical change."""
        assert second is not None
        return momentum / (second.sqrt() + self.tau)


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
