"""What the representations of a finished case give away about protected attributes, and what its predictions are worth.

Everything is measured after training, on frozen, noise-free representations: by attackers who know a device's own people, who know
everybody's, or who have one device's encoder and run everybody through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from glocal import trees
from glocal.errors import InputError
from glocal.federation import Examples, Federation
from glocal.fitting import Case
from glocal.keep import Json
from glocal.measure.leakage import Floats, Labels, Seen, auc, leaks, worst
from glocal.modules import predictor, representing
from glocal.representations.auxiliary import own
from glocal.result import Result
from glocal.trees import Params


@dataclass(frozen=True)
class AuditSettings:
    """Where the representation is, and through how many devices' encoders everybody is run."""

    at: str
    encoders: int = 3

    def __post_init__(self) -> None:
        if self.encoders < 1:
            raise InputError(f"audit: encoders is {self.encoders}; it must be at least 1")


class Device(NamedTuple):
    """One device's part in an audit: what its people look like to training and to test, and how they are scored."""

    params: Params
    train: Examples
    test: Examples


def require_audit(settings: AuditSettings, case: Case, federation: Federation) -> None:
    """Refuse an audit of data without attributes, and of a module that is not there."""
    group = federation.train.examples.group
    if group is None or not bool(((group == 0) | (group == 1)).all()):
        raise InputError("audit: it needs protected attributes of 0 or 1 as the group of every example, and these data have none")
    representing(case.model, settings.at)


def audited(case: Case, results: Sequence[Result], settings: AuditSettings, critic: nn.Module | None = None) -> list[Json]:
    """For each seed: income and the like as AUC, and for each attribute what the joint adversary and fresh attackers read."""
    return [_audited(case, result, fed, settings, critic) for result, fed in zip(results, case.federations, strict=True)]


def _audited(case: Case, result: Result, fed: Federation, settings: AuditSettings, critic: nn.Module | None) -> Json:
    devices = [_device(_params(case, result, number), fed, number) for number in range(fed.devices)]
    encode = Encoder(case.model, settings.at)
    attributes = _groups(devices[0].train).shape[1]
    scores = [_score(case.model, device) for device in devices]
    found = [_attacked(encode, devices, attribute, settings, result.plan.seed) for attribute in range(attributes)]
    joint = [_joint(encode, devices, attribute, critic) for attribute in range(attributes)]
    return {"auc": _mean(scores), "attributes": [{**fresh, "joint": along} for fresh, along in zip(found, joint, strict=True)]}


def _device(params: Params, fed: Federation, number: int) -> Device:
    """In the host's memory, where the attackers are."""
    cpu = torch.device("cpu")
    return Device(trees.to(params, cpu), fed.train.of(number).to(cpu), fed.test.of(number).to(cpu))


def _params(case: Case, result: Result, number: int) -> Params:
    """What a device holds: its personal model, and its auxiliary one."""
    private = result.state.private.of(number)
    return {**private, **result.state.shared, **case.algorithm.personal(result.state.shared, private)}


class Encoder:
    """A model's representation of examples, flat (rows, width)."""

    def __init__(self, model: nn.Module, at: str) -> None:
        self.represent = representing(model, at)

    def __call__(self, params: Params, examples: Examples) -> Floats:
        """In double precision, as attackers want it."""
        with torch.no_grad():
            h = self.represent(params, examples.x, torch.ones(len(examples.y), dtype=torch.bool))
        return np.asarray(h.flatten(1).double().numpy())


def _attacked(encode: Encoder, devices: Sequence[Device], attribute: int, settings: AuditSettings, seed: int) -> Json:
    """The AUC of the best fresh attacker, by what it knows."""
    trains, tests = ([Seen(encode(d.params, e), _column(e, attribute)) for d, e in pairs] for pairs in _both(devices))
    own_rows = [worst(leaks(train, test, seed=seed)) for train, test in zip(trains, tests, strict=True)]
    pooled = worst(leaks(_together(trains), _together(tests), seed=seed))
    strong = [_through_one(encode, devices, number, attribute, seed) for number in range(min(settings.encoders, len(devices)))]
    return {
        "own": _mean([leak and leak.auc for leak in own_rows]),
        "pooled": pooled and pooled._asdict(),
        "strong": _mean(strong),
    }


def _both(devices: Sequence[Device]) -> tuple[list[tuple[Device, Examples]], list[tuple[Device, Examples]]]:
    return [(device, device.train) for device in devices], [(device, device.test) for device in devices]


def _through_one(encode: Encoder, devices: Sequence[Device], number: int, attribute: int, seed: int) -> float | None:
    """An attacker who has one device's encoder learns from everybody else's people, and reads that device's own."""
    one = devices[number]
    others = [Seen(encode(one.params, each.train), _column(each.train, attribute)) for each in devices if each is not one]
    its_own = Seen(encode(one.params, one.test), _column(one.test, attribute))
    found = worst(leaks(_together(others), its_own, seed=seed)) if others else None
    return found and found.auc


def _joint(encode: Encoder, devices: Sequence[Device], attribute: int, critic: nn.Module | None) -> float | None:
    """The AUC of the adversary that was trained along, if there was one; the mean over devices."""
    if critic is None or not own("adversary", devices[0].params):
        return None
    attack, found = predictor(critic), []
    for device in devices:
        h = torch.from_numpy(encode(device.params, device.test)).float()
        with torch.no_grad():
            guess = attack(own("adversary", device.params), h, torch.ones(len(h), dtype=torch.bool))[:, attribute]
        found.append(_auc(guess.double().numpy(), _column(device.test, attribute)))
    return _mean(found)


def _score(model: nn.Module, device: Device) -> float | None:
    """How well a device tells class 1 from class 0 on its own test data."""
    with torch.no_grad():
        output = predictor(model)(device.params, device.test.x, torch.ones(len(device.test.y), dtype=torch.bool))
    if output.shape[1] != 2:
        return None
    return _auc((output[:, 1] - output[:, 0]).double().numpy(), device.test.y.numpy())


def _auc(scores: Floats, labels: Labels) -> float | None:
    return auc(scores, labels) if 0 < labels.sum() < len(labels) else None


def _groups(examples: Examples) -> torch.Tensor:
    assert examples.group is not None
    return examples.group if examples.group.dim() == 2 else examples.group[:, None]


def _column(examples: Examples, attribute: int) -> Labels:
    return np.asarray(_groups(examples)[:, attribute].numpy())


def _together(seen: Sequence[Seen]) -> Seen:
    return Seen(np.concatenate([each.h for each in seen]), np.concatenate([each.attribute for each in seen]))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
