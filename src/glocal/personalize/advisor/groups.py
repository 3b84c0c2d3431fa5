"""Groups of clients that do better with another split.

A group is found on one half of the clients' validation data and confirmed on the other half.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from glocal.core.sampling import IntArray
from glocal.evaluate.intervals import ConfidenceInterval, confidence_interval
from glocal.personalize.advisor.halving import Stage

_MIN_GROUP_SIZE = 4  # clients
_MIN_GAIN = 0.01  # one point of a fraction; less does not justify a second federation
_CONFIDENCE = 0.95


class ClientGroup(NamedTuple):
    """Clients that do better with another split, and how much better."""

    candidate: str
    clients: tuple[int, ...]
    gain: ConfidenceInterval


def find_lead(stages: Sequence[Stage], name: str, other: str) -> ConfidenceInterval:
    """How much better one candidate is than another, paired over clients, with a 95 % interval.

    Both are compared at the last stage that has both of them, on clients for which the metric is
    defined.
    """
    stage = last_common_stage(stages, name, other)
    leads = stage.scores_of(name) - stage.scores_of(other)
    return confidence_interval(leads[~np.isnan(leads)])


def last_common_stage(stages: Sequence[Stage], name: str, other: str) -> Stage:
    """The last stage that has both candidates."""
    return [stage for stage in stages if {name, other} <= {*stage.names}][-1]


def find_groups(stages: Sequence[Stage], choice: str, participants: IntArray) -> list[ClientGroup]:
    """Groups that clearly do better with another split than the choice, largest gain first.

    A client is in at most one group.
    """
    groups, free = list[ClientGroup](), np.ones(len(participants), dtype=np.bool_)
    others = [name for name in stages[0].names if name != choice]
    while others:
        possible = []
        for name in others:
            group = _find_group(stages, choice, (name, participants, free), len(others))
            if group is not None:
                possible.append(group)
        if not possible:
            break
        best = max(possible, key=lambda group: group.gain.mean * len(group.clients))
        groups.append(best)
        free &= ~np.isin(participants, best.clients)
        others.remove(best.candidate)
    return groups


def _find_group(
    stages: Sequence[Stage],
    choice: str,
    among: tuple[str, IntArray, npt.NDArray[np.bool_]],
    trials: int,
) -> ClientGroup | None:
    """The clients that do better with a candidate, if the second half of their data confirms it.

    The members are chosen on the first half. The interval is corrected for the number of trials.
    """
    name, participants, free = among
    stage = last_common_stage(stages, choice, name)
    place, choice_place = stage.names.index(name), stage.names.index(choice)
    ahead = stage.halves[:, place] - stage.halves[:, choice_place]
    members = free & (ahead[0] > 0) & ~np.isnan(ahead[1])
    if members.sum() < _MIN_GROUP_SIZE:
        return None
    gain = confidence_interval(ahead[1][members], confidence=1 - (1 - _CONFIDENCE) / trials)
    if gain.low <= _MIN_GAIN * stage.unit:
        return None
    return ClientGroup(name, tuple(participants[members].tolist()), gain)
