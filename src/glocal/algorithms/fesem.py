"""FeSEM: Xie et al. 2021, "Multi-Center Federated Learning", Algorithm 1.

The server keeps several centres. It assigns every client to the centre that is nearest to the
client's model, and moves each centre to the mean of its members. A client without a centre yet
starts from the mean of all of them.
"""

from glocal.algorithms.contract import Algorithm

_CLUSTER = "cluster"


class FeSEM(Algorithm):
    """Xie et al. 2021: a client is sent the centre that is nearest to its last model.

    What a client is sent differs from client to client. The `clusters` start from the task's model,
    the first one as it is, the others with noise of `spread` times each tensor's deviation.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FeSEM(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).clusters
    2
    """

    clusters: int = 2
    spread: float = 0.1
