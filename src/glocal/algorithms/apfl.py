"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning".

Algorithm 1, and the step on alpha below it.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.algorithms.task_algorithm import TaskAlgorithm, require_numbers
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.training import Batch, Objective, Work, batches, local_train
from glocal.core.trees import Params

ALPHA, _OWN = "mixing/alpha", "own/"


@dataclass(frozen=True, repr=False)
class APFL(TaskAlgorithm):
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
        require_numbers(self, "alpha", "alpha_lr")
        _require_alpha(self.alpha, self.alpha_lr)

    def make(self, objective: Objective, optimizer: Optimizer, num_clients: int) -> Algorithm:
        """Its functions."""
        return apfl(objective, optimizer, alpha=self.alpha, alpha_lr=self.alpha_lr)


def apfl(
    objective: Objective, optimizer: Optimizer, *, alpha: float = 0.5, alpha_lr: float = 0.0
) -> Algorithm:
    """A client predicts with alpha * v + (1 - alpha) * w, its own model and FedAvg's.

    With `alpha_lr`, alpha takes one gradient step per round.
    """
    _require_alpha(alpha, alpha_lr)
    client = _Client(objective, optimizer, alpha, alpha_lr)
    own_names = frozenset(_OWN + name for name in objective.trainable)
    return Algorithm(
        name="apfl",
        init=client.init,
        client_update=partial(client.update, objective.trainable | own_names),
        aggregate=average,
        personal=interpolate,
        description=f"{optimizer.description}, alpha={alpha}, alpha_lr={alpha_lr}",
        adapt=partial(client.update, own_names),
        is_mean=True,
    )


@dataclass(frozen=True)
class _Client:
    """The functions of a client: w is the shared tree, v and alpha are private."""

    objective: Objective
    optimizer: Optimizer
    alpha: float
    alpha_lr: float

    def init(self, params: Params) -> tuple[Params, Params]:
        """Both models start equal."""
        device = next(iter(params.values())).device
        alpha = torch.full((), self.alpha, dtype=torch.float32, device=device)
        return params, {**params, ALPHA: alpha}

    def update(
        self, trainable: frozenset[str], shared: Params, private: Params, work: Work
    ) -> Update:
        """Train w and v together, those of them that are trainable."""
        alpha = private[ALPHA]
        if self.alpha_lr:
            gradient = _alpha_gradient(self.objective, shared, private, work)
            alpha = (alpha - self.alpha_lr * gradient).clamp(0, 1)
        joint = Objective(partial(_joint_loss, self.objective), trainable)
        both = {**shared, **_prefixed(trees.pick(private, shared)), ALPHA: alpha}
        trained, loss = local_train(joint, both, work, self.optimizer)
        own = _without_prefix(trained)
        return Update(trees.pick(trained, shared), {**own, ALPHA: alpha}, loss)


def _require_alpha(alpha: float, alpha_lr: float) -> None:
    if not 0 <= alpha <= 1 or not 0 <= alpha_lr < float("inf"):
        raise InputError(
            f"apfl: alpha is {alpha} and alpha_lr {alpha_lr}; "
            "alpha must be from 0 to 1, alpha_lr at least 0 and finite"
        )


def interpolate(shared: Params, private: Params) -> Params:
    """Alpha * v + (1 - alpha) * w, name by name; counters are rounded."""
    alpha = private[ALPHA]
    mixture = {}
    for name, tensor in shared.items():
        mixed = alpha * private[name] + (1 - alpha) * tensor
        mixture[name] = mixed if tensor.is_floating_point() else mixed.round().to(tensor)
    return mixture


def _joint_loss(objective: Objective, params: Params, batch: Batch) -> tuple[Tensor, Params]:
    """One value whose gradients are those of two losses: of w its own, of v the mixture's.

    The mixture holds a detached copy of w, so its loss has no gradient with respect to w. The
    difference `alone - alone.detach()` is 0, and has the gradient of w's own loss.
    """
    own = _without_prefix(params)
    shared = trees.pick(params, own)
    detached = {name: tensor.detach() for name, tensor in shared.items()}
    mixture = interpolate(detached, {**own, ALPHA: params[ALPHA]})
    alone, buffers = objective.value(shared, batch)
    mixed_params = {**own, **trees.pick(mixture, objective.trainable)}
    mixed, own_buffers = objective.value(mixed_params, batch)
    return mixed + alone - alone.detach(), {**buffers, **_prefixed(own_buffers)}


def _alpha_gradient(objective: Objective, shared: Params, private: Params, work: Work) -> Tensor:
    """<v - w, gradient of the mixture's loss> on the first batch of the round ()."""
    batch = next(batches(work))

    def mixture_loss(alpha: Tensor) -> Tensor:
        mixture = interpolate(shared, {**private, ALPHA: alpha})
        return objective.value(mixture, batch)[0]

    gradient: Tensor = grad(mixture_loss)(private[ALPHA])
    return gradient


def _prefixed(tree: Params) -> Params:
    return {_OWN + name: tensor for name, tensor in tree.items()}


def _without_prefix(params: Params) -> Params:
    """The tensors of the client's own model, by the names of the shared one."""
    own = {}
    for name, tensor in params.items():
        if name.startswith(_OWN):
            own[name.removeprefix(_OWN)] = tensor
    return own
