"""FedAvgM: Hsu, Qi and Brown 2019, momentum on the server.

"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification".
With the mean change d of the clients, m <- momentum * m + d, and the server moves by
server_lr * m. Statistics of batch norm are averaged, since momentum would push a variance below 0.
"""

from glocal.algorithms.contract import State, Uploads, add_change, require_numbers
from glocal.algorithms.fedavg import FedAvg
from glocal.core import trees
from glocal.core.trees import Params


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
        trained = trees.pick(state.shared, self.task.trainable)
        return state._replace(server=trees.zeros_like(trained))

    def server_update(
        self, shared: Params, server: Params, uploads: Uploads
    ) -> tuple[Params, Params]:
        """One step with momentum."""
        moved = uploads.aggregate()
        after = {name: self.momentum * m + moved[name] for name, m in server.items()}
        steps = trees.scale(self.server_lr, after)
        return add_change(shared, {**moved, **steps}), after
