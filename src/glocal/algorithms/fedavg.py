"""FedAvg: McMahan et al. 2017, Algorithm 1.

"Communication-Efficient Learning of Deep Networks from Decentralized Data".
"""

from functools import cached_property

from glocal.algorithms.contract import Algorithm, Message, State, Update, change
from glocal.core import trees
from glocal.core.split import Selector, Split
from glocal.core.training import Objective, Trained, Work, local_train
from glocal.core.trees import Params


class FedAvg(Algorithm):
    """McMahan et al. 2017: clients train the shared model, and their changes are averaged.

    Most algorithms derive from it. What `local` selects stays on the client: with a private part,
    FedAvg is LG-FedAvg.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> FedAvg(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).aggregation
    Mean(by='examples', max_weight=None)
    """

    local: Selector | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.split is not None  # a selector that matches nothing is refused here

    @cached_property
    def split(self) -> Split:
        """Which tensors are local, and which shared."""
        return Split.of(self.task.model, local=() if self.local is None else self.local)

    def init(self, params: Params) -> State:
        """The network of a pretext is local where anything is."""
        shared = self.split.shared if self.split.local else params.keys()
        return State(trees.pick(params, shared), trees.drop(params, shared))

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Both parts train together."""
        return self.train(self.objective, message, private, work)

    def train(self, objective: Objective, message: Message, private: Params, work: Work) -> Update:
        """A client's round with one objective."""
        params = trees.merge(private, message)
        return self.update(local_train(objective, params, work, self.optimizer), message, private)

    def update(self, trained: Trained, message: Message, private: Params) -> Update:
        """The change of the shared part, and the private part."""
        local = trees.pick(trained.params, private)
        return Update(change(trained.params, message), local, {"loss": trained.loss})

    def personal(self, shared: Params, private: Params) -> Params:
        """Both parts together."""
        return {**private, **shared}

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """The private part trains alone."""
        return self.train(self.objective.only(private), message, private, work)
