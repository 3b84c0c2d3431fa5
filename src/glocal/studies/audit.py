"""Leakage of protected attributes from an experiment's representations, and its predictions.

Everything is measured after training, on frozen representations without noise. Attackers know the
attributes of a client's own people, or of everybody, or have one client's encoder and everybody
else's data.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from glocal.algorithms.contract import Algorithm
from glocal.core import trees
from glocal.core.bounds import MAX_CLIENTS, count_field, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.metric_library import auc
from glocal.core.modules import predictor
from glocal.core.store import GroupState
from glocal.core.task import Task
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.evaluate.leakage import (
    AttackData,
    Floats,
    Labels,
    Scorer,
    best_auc,
    train_attackers,
)
from glocal.federate.group_result import GroupResult
from glocal.federate.result import Result
from glocal.federate.run import Run
from glocal.personalize.class_targets import are_whole_numbers
from glocal.wire import split_private

_ADVERSARY = "adversary/"  # how the names of the joint adversary's tensors begin


@dataclass(frozen=True)
class AuditSettings:
    """The layer of the representation, and how many clients' encoders strong attackers use."""

    layer: str
    encoders: int = count_field(3, maximum=MAX_CLIENTS)

    def __post_init__(self) -> None:
        require_counts("audit: ", self)


class AuditedClient(NamedTuple):
    """One client's parameters, and its examples for training, validation and test."""

    params: Params
    train: Examples
    validation: Examples
    test: Examples


def require_audit(settings: AuditSettings, task: Task, federation: FederatedData) -> None:
    """Refuse data without protected attributes, and a module that the model does not have."""
    group = federation.train.examples.group
    if group is None or not bool(((group == 0) | (group == 1)).all()):
        raise InputError(
            "audit: these data have no protected attributes; "
            "give every example a group of 0 or 1 per attribute"
        )
    task.feature_extractor(settings.layer)


@dataclass(frozen=True)
class Audit:
    """A callback that adds an "audit" to each seed's result, from its frozen representations.

    It has the task's metric over all clients' test data together, the AUC of the predictions where
    there are two classes, and per attribute the AUC of the joint adversary and of attackers.
    "validation" has the same for validation data, which nothing was trained on; it may select.
    """

    settings: AuditSettings
    adversary: nn.Module | None = None

    def on_end(self, run: Run, result: Result) -> None:
        """Audit every seed."""
        group = run.experiment.groups[0]
        for place, own in enumerate(result.groups):
            data = group.data_of(place)
            own.extras["audit"] = _audit(own, data, self.settings, self.adversary)


def _audit(
    result: GroupResult,
    fed: FederatedData,
    settings: AuditSettings,
    adversary: nn.Module | None,
) -> Json:
    task = result.task
    clients = audited_clients(result.algorithm, result.state, fed)
    encode = Encoder(task, settings.layer)
    attributes: list[Json] = []
    for index in range(protected_attributes(clients[0].train).shape[1]):
        aucs = _attack(encode, clients, index, settings, result.seed)
        joint = _joint_adversary_auc(encode, clients, index, adversary)
        attributes.append({**aucs, "joint": joint})
    test = [_task_auc(task, client.params, client.test) for client in clients]
    validation = [_task_auc(task, client.params, client.validation) for client in clients]
    # one client's own people there are too few to select the best of three attackers
    leaks = [each["validation"]["pooled"] for each in attributes]
    pooled = result.test[task.metric.name].summary().pooled
    return {
        "metric": task.metric.name,
        "figure": pooled,
        "auc": _mean(test),
        "attributes": attributes,
        "validation": {"auc": _mean(validation), "leak": max(filter(None, leaks), default=None)},
    }


def audited_clients(
    algorithm: Algorithm, state: GroupState, fed: FederatedData
) -> list[AuditedClient]:
    """Every client, in the memory of the CPU, where the attackers run."""
    cpu = torch.device("cpu")
    clients = []
    for number in range(fed.num_clients):
        params = trees.to(_params(algorithm, state, number), cpu)
        parts = [part.of(number).to(cpu) for part in (fed.train, fed.val, fed.test)]
        clients.append(AuditedClient(params, *parts))
    return clients


def _params(algorithm: Algorithm, state: GroupState, number: int) -> Params:
    """A client's parameters: its personal model, and its auxiliary one."""
    private, _ = split_private(state.private.of(number))
    return {**private, **state.shared, **algorithm.personal(state.shared, private)}


class Encoder:
    """A model's representation of examples, flat (rows, width)."""

    def __init__(self, task: Task, layer: str) -> None:
        self.represent = task.feature_extractor(layer)

    def __call__(self, params: Params, examples: Examples) -> Floats:
        """In double precision, as attackers need it."""
        with torch.no_grad():
            h = self.represent(params, examples.x, torch.ones(examples.num_rows, dtype=torch.bool))
        return np.asarray(h.flatten(1).double().numpy())

    def observe(self, params: Params, examples: Examples, attribute: int) -> AttackData:
        """The examples as an attacker sees them through this encoder."""
        return AttackData(self(params, examples), protected_attribute(examples, attribute))


class TrainedAttackers(NamedTuple):
    """Attackers by what they know: own rows of each client, all rows, or one client's encoder."""

    own: list[dict[str, Scorer]]
    pooled: dict[str, Scorer]
    strong: list[dict[str, Scorer]]


def train_all_attackers(
    encode: Encoder, clients: Sequence[AuditedClient], attribute: int, *, encoders: int, seed: int
) -> TrainedAttackers:
    """Attackers trained on representations of training data, frozen and without noise."""
    data = [encode.observe(client.params, client.train, attribute) for client in clients]
    return TrainedAttackers(
        [train_attackers(train, seed=seed) for train in data],
        train_attackers(pool(data), seed=seed),
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
    """The AUC of the best attacker, by what it knows."""
    attackers = train_all_attackers(
        encode, clients, attribute, encoders=settings.encoders, seed=seed
    )
    validation = [encode.observe(each.params, each.validation, attribute) for each in clients]
    test = [encode.observe(each.params, each.test, attribute) for each in clients]
    return {**_aucs(attackers, test), "validation": _aucs(attackers, validation)}


def _aucs(attackers: TrainedAttackers, data: Sequence[AttackData]) -> Json:
    """The AUC of the best attacker on every client's data, by what it knows."""
    own = [best_auc(scorers, each) for scorers, each in zip(attackers.own, data, strict=True)]
    audited = data[: len(attackers.strong)]
    strong = [
        best_auc(scorers, each) for scorers, each in zip(attackers.strong, audited, strict=True)
    ]
    return {
        "own": _mean(own),
        "pooled": best_auc(attackers.pooled, pool(data)),
        "strong": _mean(strong),
    }


def _transfer_attackers(
    encode: Encoder, clients: Sequence[AuditedClient], number: int, attribute: int, seed: int
) -> dict[str, Scorer]:
    """Attackers with one client's encoder, trained on everybody else's examples."""
    one = clients[number]
    others = [
        encode.observe(one.params, each.train, attribute) for each in clients if each is not one
    ]
    return train_attackers(pool(others), seed=seed) if others else {}


def _joint_adversary_auc(
    encode: Encoder, clients: Sequence[AuditedClient], attribute: int, adversary: nn.Module | None
) -> float | None:
    """The AUC of the adversary of the training, if there was one; the mean over clients."""
    if adversary is None or not trees.under_prefix(_ADVERSARY, clients[0].params):
        return None
    attack, aucs = predictor(adversary), []
    for client in clients:
        h = torch.from_numpy(encode(client.params, client.test)).float()
        own = trees.under_prefix(_ADVERSARY, client.params)
        with torch.no_grad():
            scores = attack(own, h, torch.ones(len(h), dtype=torch.bool))[:, attribute]
        labels = protected_attribute(client.test, attribute)
        aucs.append(_auc_or_none(scores.double().numpy(), labels))
    return _mean(aucs)


def _task_auc(task: Task, params: Params, people: Examples) -> float | None:
    """The AUC of a client's model on its own examples; None if there are not two classes."""
    output = predict(task, params, people)
    if not are_whole_numbers(people) or output.dim() != 2 or output.shape[1] != 2:
        return None
    return _auc_or_none((output[:, 1] - output[:, 0]).double().numpy(), people.y.numpy())


def predict(task: Task, params: Params, people: Examples) -> torch.Tensor:
    """The outputs of a client's model (rows, classes)."""
    with torch.no_grad():
        mask = torch.ones(people.num_rows, dtype=torch.bool)
        return task.predict(params, people.x, mask)


def _auc_or_none(scores: Floats, labels: Labels) -> float | None:
    return auc(scores, labels) if 0 < labels.sum() < len(labels) else None


def protected_attributes(examples: Examples) -> torch.Tensor:
    """Protected attributes (rows, attributes)."""
    assert examples.group is not None
    return examples.group if examples.group.dim() == 2 else examples.group[:, None]


def protected_attribute(examples: Examples, attribute: int) -> Labels:
    """One protected attribute (rows,)."""
    return np.asarray(protected_attributes(examples)[:, attribute].long().numpy())


def pool(data: Sequence[AttackData]) -> AttackData:
    """The data of all clients as one."""
    return AttackData(
        np.concatenate([each.h for each in data]), np.concatenate([each.attribute for each in data])
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
