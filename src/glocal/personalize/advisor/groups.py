"""Devices that another split suits better: found on one half of their validation data, and held to it by the other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.sampling import Integers
from glocal.evaluate.theory import Estimate, estimate
from glocal.personalize.advisor.halving import Rung

_FEWEST = 4  # devices that make a group
_WORTH = 0.01  # a point of accuracy: less is no reason for a second federation
_CONFIDENCE = 0.95


class Group(NamedTuple):
    """Devices that another split suits better, and by how much, with its interval."""

    candidate: str
    devices: tuple[int, ...]
    gain: Estimate


def difference(rungs: Sequence[Rung], name: str, other: str) -> Estimate:
    """By how much a split is above another: paired over devices, where both raced last, with a 95 % interval."""
    rung = last_together(rungs, name, other)
    return estimate(rung.of(name) - rung.of(other))


def last_together(rungs: Sequence[Rung], name: str, other: str) -> Rung:
    """Where two splits were last in the race together."""
    return [rung for rung in rungs if {name, other} <= {*rung.names}][-1]


def groups(rungs: Sequence[Rung], choice: str, racers: Integers) -> list[Group]:
    """Groups that clearly prefer another split to the choice, the largest gain first; a device is in at most one."""
    found, free = [], np.ones(len(racers), dtype=np.bool_)
    others = [name for name in rungs[0].names if name != choice]
    while others:
        tried = [group for name in others if (group := _group(rungs, choice, (name, racers, free), len(others)))]
        if not tried:
            break
        best = max(tried, key=lambda group: group.gain.mean * len(group.devices))
        found.append(best)
        free &= ~np.isin(racers, best.devices)
        others.remove(best.candidate)
    return found


def _group(rungs: Sequence[Rung], choice: str, among: tuple[str, Integers, npt.NDArray[np.bool_]], trials: int) -> Group | None:
    """Those who prefer a split on the first half, if on the second they do so too, beyond what so many trials bring by chance."""
    name, racers, free = among
    rung = last_together(rungs, choice, name)
    ahead = rung.halves[:, rung.names.index(name)] - rung.halves[:, rung.names.index(choice)]
    members = free & (ahead[0] > 0)
    if members.sum() < _FEWEST:
        return None
    gain = estimate(ahead[1][members], confidence=1 - (1 - _CONFIDENCE) / trials)
    return Group(name, tuple(racers[members].tolist()), gain) if gain.low > _WORTH else None
