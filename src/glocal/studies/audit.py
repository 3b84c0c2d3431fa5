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
from glocal.core.bounds import CLIENTS, count, require_counts
from glocal.core.data import Examples
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.modules import predictor, representing
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.datasets.federated import Federation
from glocal.evaluate.leakage import Floats, Guess, Labels, Seen, auc, best_auc, fresh
from glocal.federate.fitting import Case
from glocal.federate.result import Result
from glocal.personalize.representations.auxiliary import own


@dataclass(frozen=True)
class AuditSettings:
    """Where the representation is, and through how many devices' encoders everybody is run."""

    at: str
    encoders: int = count(3, most=CLIENTS)

    def __post_init__(self) -> None:
        require_counts("audit: ", self)


class Device(NamedTuple):
    """One device's part in an audit: all that it holds, and its people by what they are used for."""

    params: Params
    train: Examples
    validation: Examples
    test: Examples


def require_audit(settings: AuditSettings, case: Case, federation: Federation) -> None:
    """Refuse an audit of data without attributes, and of a module that is not there."""
    group = federation.train.examples.group
    if group is None or not bool(((group == 0) | (group == 1)).all()):
        raise InputError("audit: it needs protected attributes of 0 or 1 as the group of every example, and these data have none")
    representing(case.model, settings.at)


def audited(case: Case, results: Sequence[Result], settings: AuditSettings, critic: nn.Module | None = None) -> list[Json]:
    """For each seed: income and the like as AUC, and for each attribute what the joint adversary and fresh attackers read.

    "validation" tells the same of validation data, of which nobody has learnt; a study may choose by it.
    """
    return [_audited(case, result, fed, settings, critic) for result, fed in zip(results, case.federations, strict=True)]


def _audited(case: Case, result: Result, fed: Federation, settings: AuditSettings, critic: nn.Module | None) -> Json:
    devices = devices_of(case.algorithm, result.state, fed)
    encode = Encoder(case.model, settings.at)
    attributes = range(groups(devices[0].train).shape[1])
    found = [_attacked(encode, devices, attribute, settings, result.plan.seed) for attribute in attributes]
    joint = [_joint(encode, devices, attribute, critic) for attribute in attributes]
    return {
        "accuracy": float(np.concatenate([_right(case.model, device.params, device.test) for device in devices]).mean()),
        "auc": _mean([_score(case.model, device.params, device.test) for device in devices]),
        "attributes": [{**fresh, "joint": along} for fresh, along in zip(found, joint, strict=True)],
        "validation": {
            "auc": _mean([_score(case.model, device.params, device.validation) for device in devices]),
            # one device's people there are too few to judge the best of three attackers by
            "leak": max(filter(None, (each["validation"]["pooled"] for each in found)), default=None),
        },
    }


def devices_of(algorithm: Algorithm, state: State, fed: Federation) -> list[Device]:
    """Every device, in the host's memory, where the attackers are."""
    cpu = torch.device("cpu")
    parts = (fed.train, fed.val, fed.test)
    return [
        Device(trees.to(_params(algorithm, state, number), cpu), *(part.of(number).to(cpu) for part in parts))
        for number in range(fed.devices)
    ]


def _params(algorithm: Algorithm, state: State, number: int) -> Params:
    """What a device holds: its personal model, and its auxiliary one."""
    private = state.private.of(number)
    return {**private, **state.shared, **algorithm.personal(state.shared, private)}


class Encoder:
    """A model's representation of examples, flat (rows, width)."""

    def __init__(self, model: nn.Module, at: str) -> None:
        self.represent = representing(model, at)

    def __call__(self, params: Params, examples: Examples) -> Floats:
        """In double precision, as attackers want it."""
        with torch.no_grad():
            h = self.represent(params, examples.x, torch.ones(len(examples.y), dtype=torch.bool))
        return np.asarray(h.flatten(1).double().numpy())

    def seen(self, params: Params, examples: Examples, attribute: int) -> Seen:
        """These people as an attacker sees them through this model."""
        return Seen(self(params, examples), column(examples, attribute))


class Attackers(NamedTuple):
    """Fresh ones, by what they know: each device's own people, everybody, or everybody else through one device's encoder."""

    own: list[dict[str, Guess]]
    pooled: dict[str, Guess]
    strong: list[dict[str, Guess]]


def trained_attackers(encode: Encoder, devices: Sequence[Device], attribute: int, *, encoders: int, seed: int) -> Attackers:
    """Attackers that have learnt from training data, frozen and without noise."""
    trains = [encode.seen(device.params, device.train, attribute) for device in devices]
    return Attackers(
        [fresh(train, seed=seed) for train in trains],
        fresh(together(trains), seed=seed),
        [_through_one(encode, devices, number, attribute, seed) for number in range(min(encoders, len(devices)))],
    )


def _attacked(encode: Encoder, devices: Sequence[Device], attribute: int, settings: AuditSettings, seed: int) -> Json:
    """The AUC of the best fresh attacker, by what it knows."""
    own_rows, pooled, strong = trained_attackers(encode, devices, attribute, encoders=settings.encoders, seed=seed)
    validations, tests = ([encode.seen(d.params, getattr(d, of), attribute) for d in devices] for of in ("validation", "test"))

    def read(tested: Sequence[Seen]) -> Json:
        return {
            "own": _mean([best_auc(guesses, seen) for guesses, seen in zip(own_rows, tested, strict=True)]),
            "pooled": best_auc(pooled, together(tested)),
            "strong": _mean([best_auc(guesses, seen) for guesses, seen in zip(strong, tested[: len(strong)], strict=True)]),
        }

    return {**read(tests), "validation": read(validations)}


def _through_one(encode: Encoder, devices: Sequence[Device], number: int, attribute: int, seed: int) -> dict[str, Guess]:
    """Attackers who have one device's encoder, and have learnt from everybody else's people."""
    one = devices[number]
    others = [encode.seen(one.params, each.train, attribute) for each in devices if each is not one]
    return fresh(together(others), seed=seed) if others else {}


def _joint(encode: Encoder, devices: Sequence[Device], attribute: int, critic: nn.Module | None) -> float | None:
    """The AUC of the adversary that was trained along, if there was one; the mean over devices."""
    if critic is None or not own("adversary", devices[0].params):
        return None
    attack, found = predictor(critic), []
    for device in devices:
        h = torch.from_numpy(encode(device.params, device.test)).float()
        with torch.no_grad():
            guess = attack(own("adversary", device.params), h, torch.ones(len(h), dtype=torch.bool))[:, attribute]
        found.append(_auc(guess.double().numpy(), column(device.test, attribute)))
    return _mean(found)


def _right(model: nn.Module, params: Params, people: Examples) -> npt.NDArray[np.bool_]:
    """Of whom a device's model tells the class (people,)."""
    return np.asarray((outputs(model, params, people).argmax(1) == people.y).numpy())


def _score(model: nn.Module, params: Params, people: Examples) -> float | None:
    """How well a device tells class 1 from class 0 of its own people."""
    output = outputs(model, params, people)
    if output.shape[1] != 2:
        return None
    return _auc((output[:, 1] - output[:, 0]).double().numpy(), people.y.numpy())


def outputs(model: nn.Module, params: Params, people: Examples) -> torch.Tensor:
    """What a device's model says of some people (rows, classes)."""
    with torch.no_grad():
        return predictor(model)(params, people.x, torch.ones(len(people.y), dtype=torch.bool))


def _auc(scores: Floats, labels: Labels) -> float | None:
    return auc(scores, labels) if 0 < labels.sum() < len(labels) else None


def groups(examples: Examples) -> torch.Tensor:
    """Protected attributes (rows, attributes)."""
    assert examples.group is not None
    return examples.group if examples.group.dim() == 2 else examples.group[:, None]


def column(examples: Examples, attribute: int) -> Labels:
    """One protected attribute (rows,)."""
    return np.asarray(groups(examples)[:, attribute].long().numpy())


def together(seen: Sequence[Seen]) -> Seen:
    """Everybody in one."""
    return Seen(np.concatenate([each.h for each in seen]), np.concatenate([each.attribute for each in seen]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
