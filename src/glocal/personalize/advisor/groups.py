"""Devices that another split suits better: found on one half of their validation data, and held to it by the other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.sampling import IntArray
from glocal.evaluate.intervals import ConfidenceInterval, confidence_interval
from glocal.personalize.advisor.halving import Stage

_MIN_GROUP_SIZE = 4  # devices that make a group
_MIN_GAIN = 0.01  # a point of accuracy: less is no reason for a second federation
_CONFIDENCE = 0.95


class ClientGroup(NamedTuple):
    """Devices that another split suits better, and by how much, with its interval."""

    candidate: str
    clients: tuple[int, ...]
    gain: ConfidenceInterval


def accuracy_difference(stages: Sequence[Stage], name: str, other: str) -> ConfidenceInterval:
    """By how much a split is above another: paired over devices, where both raced last, with a 95 % interval."""
    stage = last_common_stage(stages, name, other)
    return confidence_interval(stage.accuracies_of(name) - stage.accuracies_of(other))


def last_common_stage(stages: Sequence[Stage], name: str, other: str) -> Stage:
    """Where two splits were last in the race together."""
    return [stage for stage in stages if {name, other} <= {*stage.names}][-1]


def find_groups(stages: Sequence[Stage], choice: str, participants: IntArray) -> list[ClientGroup]:
    """Groups that clearly prefer another split to the choice, the largest gain first; a device is in at most one."""
    found, free = [], np.ones(len(participants), dtype=np.bool_)
    others = [name for name in stages[0].names if name != choice]
    while others:
        tried = [
            group
            for name in others
            if (group := _find_group(stages, choice, (name, participants, free), len(others)))
        ]
        if not tried:
            break
        best = max(tried, key=lambda group: group.gain.mean * len(group.clients))
        found.append(best)
        free &= ~np.isin(participants, best.clients)
        others.remove(best.candidate)
    return found


def _find_group(
    stages: Sequence[Stage],
    choice: str,
    among: tuple[str, IntArray, npt.NDArray[np.bool_]],
    trials: int,
) -> ClientGroup | None:
    """Those who prefer a split on the first half, if on the second they do so too, beyond what so many trials bring by chance."""
    name, participants, free = among
    stage = last_common_stage(stages, choice, name)
    ahead = stage.halves[:, stage.names.index(name)] - stage.halves[:, stage.names.index(choice)]
    members = free & (ahead[0] > 0)
    if members.sum() < _MIN_GROUP_SIZE:
        return None
    gain = confidence_interval(ahead[1][members], confidence=1 - (1 - _CONFIDENCE) / trials)
    return (
        ClientGroup(name, tuple(participants[members].tolist()), gain)
        if gain.low > _MIN_GAIN
        else None
    )
