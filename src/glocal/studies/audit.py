"""What the representations of a finished case give away about protected attributes, and what its predictions are worth.

Everything is measured after training, on frozen, noise-free representations: by attackers who know a device's own people, who know
everybody's, or who have one device's encoder and run everybody through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.core import trees
from glocal.core.bounds import MAX_CLIENTS, count_field, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import feature_extractor, predictor
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.evaluate.leakage import (
    AttackData,
    Floats,
    Labels,
    Scorer,
    auc,
    best_auc,
    train_attackers,
)
from glocal.federate.fitting import Case
from glocal.federate.result import Result
from glocal.personalize.representations.auxiliary import without_prefix


@dataclass(frozen=True)
class AuditSettings:
    """Where the representation is, and through how many devices' encoders everybody is run."""

    layer: str
    encoders: int = count_field(3, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        require_counts("audit: ", self)


class AuditedClient(NamedTuple):
    """One device's part in an audit: all that it holds, and its people by what they are used for."""

    params: Params
    train: Examples
    validation: Examples
    test: Examples


def require_audit(settings: AuditSettings, experiment: Case, federation: FederatedData) -> None:
    """Refuse an audit of data without attributes, and of a module that is not there."""
    group = federation.train.examples.group
    if group is None or not bool(((group == 0) | (group == 1)).all()):
        raise InputError(
            "audit: it needs protected attributes of 0 or 1 as the group of every example, and these data have none"
        )
    feature_extractor(experiment.model, settings.layer)


def audit_experiment(
    experiment: Case,
    results: Sequence[Result],
    settings: AuditSettings,
    critic: nn.Module | None = None,
) -> list[Json]:
    """For each seed: income and the like as AUC, and for each attribute what the joint adversary and fresh attackers read.

    "validation" tells the same of validation data, of which nobody has learnt; a study may choose by it.
    """
    return [
        _audit(experiment, result, fed, settings, critic)
        for result, fed in zip(results, experiment.federations, strict=True)
    ]


def _audit(
    experiment: Case,
    result: Result,
    fed: FederatedData,
    settings: AuditSettings,
    critic: nn.Module | None,
) -> Json:
    clients = audited_clients(experiment.algorithm, result.state, fed)
    encode = Encoder(experiment.model, settings.layer)
    attributes = range(protected_attributes(clients[0].train).shape[1])
    found = [
        _attack(encode, clients, attribute, settings, result.plan.seed) for attribute in attributes
    ]
    joint = [_joint_adversary_auc(encode, clients, attribute, critic) for attribute in attributes]
    return {
        "accuracy": float(
            np.concatenate(
                [_correct(experiment.model, device.params, device.test) for device in clients]
            ).mean()
        ),
        "auc": _mean(
            [_task_auc(experiment.model, device.params, device.test) for device in clients]
        ),
        "attributes": [
            {**fresh, "joint": along} for fresh, along in zip(found, joint, strict=True)
        ],
        "validation": {
            "auc": _mean(
                [
                    _task_auc(experiment.model, device.params, device.validation)
                    for device in clients
                ]
            ),
            # one device's people there are too few to judge the best of three attackers by
            "leak": max(
                filter(None, (each["validation"]["pooled"] for each in found)), default=None
            ),
        },
    }


def audited_clients(algorithm: Algorithm, state: State, fed: FederatedData) -> list[AuditedClient]:
    """Every device, in the host's memory, where the attackers are."""
    cpu = torch.device("cpu")
    parts = (fed.train, fed.val, fed.test)
    return [
        AuditedClient(
            trees.to(_params(algorithm, state, number), cpu),
            *(part.of(number).to(cpu) for part in parts),
        )
        for number in range(fed.num_clients)
    ]


def _params(algorithm: Algorithm, state: State, number: int) -> Params:
    """What a device holds: its personal model, and its auxiliary one."""
    private = state.private.of(number)
    return {**private, **state.shared, **algorithm.personal(state.shared, private)}


class Encoder:
    """A model's representation of examples, flat (rows, width)."""

    def __init__(self, model: nn.Module, layer: str) -> None:
        self.represent = feature_extractor(model, layer)

    def __call__(self, params: Params, examples: Examples) -> Floats:
        """In double precision, as attackers want it."""
        with torch.no_grad():
            h = self.represent(params, examples.x, torch.ones(len(examples.y), dtype=torch.bool))
        return np.asarray(h.flatten(1).double().numpy())

    def observe(self, params: Params, examples: Examples, attribute: int) -> AttackData:
        """These people as an attacker sees them through this model."""
        return AttackData(self(params, examples), protected_attribute(examples, attribute))


class TrainedAttackers(NamedTuple):
    """Fresh ones, by what they know: each device's own people, everybody, or everybody else through one device's encoder."""

    own: list[dict[str, Scorer]]
    pooled: dict[str, Scorer]
    strong: list[dict[str, Scorer]]


def train_all_attackers(
    encode: Encoder, clients: Sequence[AuditedClient], attribute: int, *, encoders: int, seed: int
) -> TrainedAttackers:
    """Attackers that have learnt from training data, frozen and without noise."""
    trainable = [encode.observe(device.params, device.train, attribute) for device in clients]
    return TrainedAttackers(
        [train_attackers(train, seed=seed) for train in trainable],
        train_attackers(pool(trainable), seed=seed),
        [
            _transfer_attackers(encode, clients, number, attribute, seed)
            for number in range(min(encoders, len(clients)))
        ],
    )


def _attack(
    encode: Encoder,
    clients: Sequence[AuditedClient],
    attribute: int,
    settings: AuditSettings,
    seed: int,
) -> Json:
    """The AUC of the best fresh attacker, by what it knows."""
    own_rows, pooled, strong = train_all_attackers(
        encode, clients, attribute, encoders=settings.encoders, seed=seed
    )
    validations, tests = (
        [encode.observe(d.params, getattr(d, of), attribute) for d in clients]
        for of in ("validation", "test")
    )

    def read(tested: Sequence[AttackData]) -> Json:
        return {
            "own": _mean(
                [best_auc(guesses, seen) for guesses, seen in zip(own_rows, tested, strict=True)]
            ),
            "pooled": best_auc(pooled, pool(tested)),
            "strong": _mean(
                [
                    best_auc(guesses, seen)
                    for guesses, seen in zip(strong, tested[: len(strong)], strict=True)
                ]
            ),
        }

    return {**read(tests), "validation": read(validations)}


def _transfer_attackers(
    encode: Encoder, clients: Sequence[AuditedClient], number: int, attribute: int, seed: int
) -> dict[str, Scorer]:
    """Attackers who have one device's encoder, and have learnt from everybody else's people."""
    one = clients[number]
    others = [
        encode.observe(one.params, each.train, attribute) for each in clients if each is not one
    ]
    return train_attackers(pool(others), seed=seed) if others else {}


def _joint_adversary_auc(
    encode: Encoder, clients: Sequence[AuditedClient], attribute: int, critic: nn.Module | None
) -> float | None:
    """The AUC of the adversary that was trained along, if there was one; the mean over devices."""
    if critic is None or not without_prefix("adversary", clients[0].params):
        return None
    attack, found = predictor(critic), []
    for device in clients:
        h = torch.from_numpy(encode(device.params, device.test)).float()
        with torch.no_grad():
            guess = attack(
                without_prefix("adversary", device.params), h, torch.ones(len(h), dtype=torch.bool)
            )[:, attribute]
        found.append(
            _auc_or_none(guess.double().numpy(), protected_attribute(device.test, attribute))
        )
    return _mean(found)


def _correct(model: nn.Module, params: Params, people: Examples) -> npt.NDArray[np.bool_]:
    """Of whom a device's model tells the class (people,)."""
    return np.asarray((predict(model, params, people).argmax(1) == people.y).numpy())


def _task_auc(model: nn.Module, params: Params, people: Examples) -> float | None:
    """How well a device tells class 1 from class 0 of its own people."""
    output = predict(model, params, people)
    if output.shape[1] != 2:
        return None
    return _auc_or_none((output[:, 1] - output[:, 0]).double().numpy(), people.y.numpy())


def predict(model: nn.Module, params: Params, people: Examples) -> torch.Tensor:
    """What a device's model says of some people (rows, classes)."""
    with torch.no_grad():
        return predictor(model)(params, people.x, torch.ones(len(people.y), dtype=torch.bool))


def _auc_or_none(scores: Floats, labels: Labels) -> float | None:
    return auc(scores, labels) if 0 < labels.sum() < len(labels) else None


def protected_attributes(examples: Examples) -> torch.Tensor:
    """Protected attributes (rows, attributes)."""
    assert examples.group is not None
    return examples.group if examples.group.dim() == 2 else examples.group[:, None]


def protected_attribute(examples: Examples, attribute: int) -> Labels:
    """One protected attribute (rows,)."""
    return np.asarray(protected_attributes(examples)[:, attribute].long().numpy())


def pool(seen: Sequence[AttackData]) -> AttackData:
    """Everybody in one."""
    return AttackData(
        np.concatenate([each.h for each in seen]), np.concatenate([each.attribute for each in seen])
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
