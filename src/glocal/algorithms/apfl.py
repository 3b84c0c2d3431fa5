"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", Algorithm 1 and the step on alpha below it."""

from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from glocal.algorithms.contract import Algorithm, Update, average
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.optimizers import Optimizer
from glocal.core.training import Batch, Objective, Work, batches, local_train
from glocal.core.trees import Params

ALPHA, _OWN = "mixing/alpha", "own/"


def apfl(
    objective: Objective, optimizer: Optimizer, *, alpha: float = 0.5, alpha_lr: float = 0.0
) -> Algorithm:
    """A device predicts with alpha * v + (1 - alpha) * w, its own model and FedAvg's; with a pace, alpha descends once a round."""
    if not 0 <= alpha <= 1 or not 0 <= alpha_lr < float("inf"):
        raise InputError(
            f"apfl: alpha is {alpha} and pace {alpha_lr}; alpha must be from 0 to 1, pace at least 0 and finite"
        )
    owned = frozenset(_OWN + name for name in objective.trainable)

    def init(params: Params) -> tuple[Params, Params]:
        return params, {
            **params,
            ALPHA: torch.full_like(
                next(iter(params.values())).flatten()[0], alpha, dtype=torch.float32
            ),
        }

    def update(trainable: frozenset[str], shared: Params, private: Params, work: Work) -> Update:
        share = (
            _step_alpha(objective, shared, private, work, alpha_lr=alpha_lr)
            if alpha_lr
            else private[ALPHA]
        )
        both = Objective(partial(_joint_loss, objective), trainable)
        own = {_OWN + name: private[name] for name in shared}
        trained, loss = local_train(both, {**shared, **own, ALPHA: share}, work, optimizer)
        return Update(
            trees.pick(trained, shared),
            {**{name: trained[_OWN + name] for name in shared}, ALPHA: share},
            loss,
        )

    description = f"{optimizer.description}, alpha={alpha}, pace={alpha_lr}"
    train, adapt = partial(update, objective.trainable | owned), partial(update, owned)
    return Algorithm(
        "apfl", init, train, average, interpolate, description, adapt=adapt, is_mean=True
    )


def interpolate(shared: Params, private: Params) -> Params:
    """Alpha * v + (1 - alpha) * w, name by name; counters are rounded."""
    blends = {
        name: private[ALPHA] * private[name] + (1 - private[ALPHA]) * tensor
        for name, tensor in shared.items()
    }
    return {
        name: blend if shared[name].is_floating_point() else blend.round().to(shared[name])
        for name, blend in blends.items()
    }


def _joint_loss(objective: Objective, params: Params, batch: Batch) -> tuple[Tensor, Params]:
    """The loss of the mixture, with the slopes of w by its own loss and of v by that of the mixture."""
    own = {
        name.removeprefix(_OWN): tensor for name, tensor in params.items() if name.startswith(_OWN)
    }
    shared = trees.pick(params, own)
    blend = interpolate(
        {name: tensor.detach() for name, tensor in shared.items()}, {**own, ALPHA: params[ALPHA]}
    )
    alone, buffers = objective.value(shared, batch)
    together, moved = objective.value({**own, **trees.pick(blend, objective.trainable)}, batch)
    return together + alone - alone.detach(), {
        **buffers,
        **{_OWN + name: tensor for name, tensor in moved.items()},
    }


def _step_alpha(
    objective: Objective, shared: Params, private: Params, work: Work, *, alpha_lr: float
) -> Tensor:
    """Alpha after a step down its slope, <v - w, slope of the mixture's loss>, on the round's first batch; from 0 to 1."""
    batch = next(batches(work))
    slope: Tensor = grad(
        lambda alpha: objective.value(interpolate(shared, {**private, ALPHA: alpha}), batch)[0]
    )(private[ALPHA])
    return (private[ALPHA] - alpha_lr * slope).clamp(0, 1)
