"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning".

Algorithm 1, and the step on alpha below it.
"""

import torch
from torch import Tensor
from torch.func import grad

from glocal.algorithms.contract import Algorithm, Message, State, Update, change, require_numbers
from glocal.core import trees
from glocal.core.training import Batch, Objective, Work, batches, local_train
from glocal.core.trees import Params

ALPHA, _OWN = "mixing/alpha", "own/"


class APFL(Algorithm):
    """Deng et al. 2020: a client predicts with alpha * its own model + (1 - alpha) * FedAvg's.

    With `alpha_lr`, alpha takes one gradient step per round.

    >>> from torch import nn
    >>> from glocal import SGD, classification
    >>> APFL(classification(nn.Linear(4, 2)), optimizer=SGD(lr=0.1)).alpha
    0.5
    """

    alpha: float = 0.5
    alpha_lr: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(self, "alpha", maximum=1)
        require_numbers(self, "alpha_lr")

    def init(self, params: Params) -> State:
        """Both models start equal."""
        like = next(tensor for tensor in params.values() if tensor.is_floating_point())
        alpha = torch.full((), self.alpha, dtype=torch.float32, device=like.device)
        return State(shared=params, private={**trees.with_prefix(_OWN, params), ALPHA: alpha})

    def client_update(self, message: Message, private: Params, work: Work) -> Update:
        """Both models train."""
        return self._train(self.task.trainable, message, private, work)

    def adapt(self, message: Message, private: Params, work: Work) -> Update:
        """The client's own model trains alone."""
        return self._train(frozenset(), message, private, work)

    def personal(self, shared: Params, private: Params) -> Params:
        """The mixture."""
        return mix(shared, private)

    def mixture_loss(self, params: Params, batch: Batch) -> tuple[Tensor, Params]:
        """One value whose gradients are those of two losses: of w its own, of v the mixture's.

        The mixture holds a detached copy of w, so its loss has no gradient with respect to w. The
        difference `alone - alone.detach()` is 0, and has the gradient of w's own loss.
        """
        own = trees.under_prefix(_OWN, params)
        shared = trees.pick(params, own)
        detached = {name: tensor.detach() for name, tensor in shared.items()}
        mixture = mix(detached, params)
        alone, buffers = self.objective.value(shared, batch)
        mixed_params = {**own, **trees.pick(mixture, self.objective.trainable)}
        mixed, own_buffers = self.objective.value(mixed_params, batch)
        both_buffers = {**buffers, **trees.with_prefix(_OWN, own_buffers)}
        return mixed + alone - alone.detach(), both_buffers

    def _train(
        self, shared: frozenset[str], message: Message, private: Params, work: Work
    ) -> Update:
        """The client's own model trains, and these tensors of the shared one."""
        alpha = private[ALPHA]
        if self.alpha_lr:
            gradient = _alpha_gradient(self.objective, message, private, work)
            alpha = (alpha - self.alpha_lr * gradient).clamp(0, 1)
        own = frozenset(_OWN + name for name in self.task.trainable)
        joint = Objective(self.mixture_loss, shared | own)
        trained = local_train(joint, {**message, **private, ALPHA: alpha}, work, self.optimizer)
        kept = {**trees.pick(trained.params, private), ALPHA: alpha}
        return Update(change(trained.params, message), kept, {"loss": trained.loss})


def mix(shared: Params, private: Params) -> Params:
    """Alpha * v + (1 - alpha) * w, name by name; counters are rounded."""
    alpha, mixture = private[ALPHA], {}
    for name, tensor in shared.items():
        mixed = alpha * private[_OWN + name] + (1 - alpha) * tensor
        mixture[name] = mixed if tensor.is_floating_point() else mixed.round().to(tensor)
    return mixture


def _alpha_gradient(objective: Objective, shared: Params, private: Params, work: Work) -> Tensor:
    """<v - w, gradient of the mixture's loss> on the first batch of the round ()."""
    batch = next(batches(work))

    def loss(alpha: Tensor) -> Tensor:
        mixture = mix(shared, {**private, ALPHA: alpha})
        return objective.value(mixture, batch)[0]

    gradient: Tensor = grad(loss)(private[ALPHA])
    return gradient
