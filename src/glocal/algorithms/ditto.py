"""Ditto: Li, Hu, Beirami and Smith 2021, Algorithm 1.

"Ditto: Fair and Robust Federated Learning Through Personalization".
"""

from glocal.algorithms.contract import Algorithm, Message, State, Update, change, require_numbers
from glocal.core import trees
from glocal.core.training import Work, local_train
from glocal.core.trees import Params

_OWN = "personal/"


class Ditto(Algorithm):
    """Li et al. 2021: FedAvg, and beside it an own model that is drawn to the shared one by `lam`.

    A client trains twice: what it sends, and its own model.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> Ditto(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).lam
    0.1
    """

    lam: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "lam")

    def init(self, params: Params) -> State:
        """Own models start as the shared one."""
        return State(shared=params, private=trees.with_prefix(_OWN, params))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """The shared model trains as in FedAvg, the own one near what was received."""
        shared = local_train(self.objective, message, work, self.optimizer)
        after = self.adapt(message, private, work).private
        return Update(change(shared.params, message), after, {"loss": shared.loss})

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """The own model trains alone."""
        own = trees.under_prefix(_OWN, private)
        objective = self.objective.near(message, self.lam)
        trained = local_train(objective, own, work, self.optimizer)
        after = trees.with_prefix(_OWN, trained.params)
        return Update(change(message, message), after, {"loss": trained.loss})

    def personal(self, shared: Params, private: Params) -> Params:
        """The client's own model."""
        return trees.under_prefix(_OWN, private)
