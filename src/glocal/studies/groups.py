"""Groups of devices that come, go and drift, as settings name them, made into the chapters of a scenario."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from glocal.core.data import Examples, Holdings, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import Attendance
from glocal.datasets.federated import Federation
from glocal.datasets.rotate import Album, album
from glocal.federate.scenario import Chapter, Scenario
from glocal.studies.settings import GroupSettings

DRIFT_EVERY = 10  # rounds from one turn to the next
Groups = Mapping[str, GroupSettings]
Albums = Mapping[int, Album]


def build_scenario(groups: Groups, federations: Sequence[Federation], rounds: int) -> Scenario:
    """The scenario of so many rounds, with a federation per seed; groups take the devices in turn."""
    require_groups(groups, federations[0].devices, rounds)
    starts = sorted({0, *(start for group in groups.values() for start in _changes(group, rounds))})
    angles = [_angles(groups, start) for start in starts]
    albums = _albums(federations, angles)
    turned: dict[tuple[float, ...], tuple[Federation, ...]] = {}
    for degrees in angles:
        if degrees not in turned:  # where nobody turns, a chapter has the very federations of the one before
            turned[degrees] = tuple(_turned(federation, degrees, albums) for federation in federations)
    chapters = [Chapter(start, _attendance(groups, start), turned[each]) for start, each in zip(starts, angles, strict=True)]
    return Scenario(tuple(chapters), members_of(groups))


def members_of(groups: Groups) -> dict[str, tuple[int, ...]]:
    """The devices of each group, numbered one group after the other."""
    ends = np.cumsum([group.devices for group in groups.values()]).tolist()
    return {name: tuple(range(end - group.devices, end)) for end, (name, group) in zip(ends, groups.items(), strict=True)}


def require_groups(groups: Groups, devices: int, rounds: int) -> None:
    """Refuse groups that cannot be: of no or too many devices, gone before they came, or never there."""
    for name, group in groups.items():
        _require_group(f"groups.{name}", group, rounds)
    total = sum(group.devices for group in groups.values())
    if total != devices:
        raise InputError(f"settings: the groups have {total} devices together, the data {devices}; let both be the same")


def _require_group(where: str, group: GroupSettings, rounds: int) -> None:
    if group.devices < 1:
        raise InputError(f"settings: {where}.devices is {group.devices}; it must be at least 1")
    if not 0 <= group.arrives < rounds:
        raise InputError(f"settings: {where}.arrives is {group.arrives}, but rounds go from 0 to {rounds - 1}; choose one of those")
    if group.leaves is not None and group.leaves <= group.arrives:
        told = f"arrives in round {group.arrives} and leaves in round {group.leaves}"
        raise InputError(f"settings: {where} {told}; let it leave later than it arrives")
    for name in ("rotate", "drift"):
        if not isfinite(getattr(group, name)):
            raise InputError(f"settings: {where}.{name} is {getattr(group, name)}; a number of degrees was expected")
    if group.drifts_from is not None and group.drifts_from < 0:
        raise InputError(f"settings: {where}.drifts_from is {group.drifts_from}; it must be at least 0")
    if not group.drift and (group.drifts_from is not None or group.drifts_until is not None):
        raise InputError(f"settings: {where} says when it drifts, and not how far; add drift = 15, or another number of degrees")
    if group.drift and _drifts_until(group, rounds) <= drifts_from(group):
        told = f"drifts from round {drifts_from(group)} until {_drifts_until(group, rounds)}"
        raise InputError(f"settings: {where} {told}; let its drift end later than it begins, and before the group leaves")
    if group.drift and drifts_from(group) + DRIFT_EVERY >= min(rounds, _drifts_until(group, rounds) + 1):
        told = f"would turn in round {drifts_from(group) + DRIFT_EVERY} for the first time"
        raise InputError(f"settings: {where} {told}, and drifts until {_drifts_until(group, rounds)}; let it drift for longer")


def drifts_from(group: GroupSettings) -> int:
    """When its images begin to turn: the first turn comes ten rounds later."""
    return group.arrives if group.drifts_from is None else max(group.drifts_from, group.arrives)


def _drifts_until(group: GroupSettings, rounds: int) -> int:
    """When its images stop turning; what has left turns no further."""
    return min(end for end in (group.drifts_until, group.leaves, rounds) if end is not None)


def _changes(group: GroupSettings, rounds: int) -> Iterable[int]:
    """Every round in which something changes with a group."""
    leaves = () if group.leaves is None else (group.leaves, group.leaves + 1)
    turns = range(drifts_from(group) + DRIFT_EVERY, _drifts_until(group, rounds) + 1, DRIFT_EVERY) if group.drift else ()
    return (start for start in (group.arrives, *leaves, *turns) if start < rounds)


def angle(group: GroupSettings, round_index: int) -> float:
    """By how many degrees a group's images are turned in a round.

    >>> [angle(GroupSettings(1, rotate=90, drift=15, drifts_from=20, drifts_until=45), done) for done in (0, 29, 30, 40, 90)]
    [90.0, 90.0, 105.0, 120.0, 120.0]
    """
    drifted = min(round_index, _drifts_until(group, round_index)) - drifts_from(group)
    return float((group.rotate + group.drift * max(0, drifted // DRIFT_EVERY)) % 360)


def _angles(groups: Groups, round_index: int) -> tuple[float, ...]:
    """The angle of each device's images in a round."""
    return tuple(angle(group, round_index) for group in groups.values() for _ in range(group.devices))


def _attendance(groups: Groups, round_index: int) -> Attendance:
    """Who is there in a round, and who leaves in it."""
    present: list[int] = []
    leaving: list[int] = []
    for name, devices in members_of(groups).items():
        arrives, leaves = groups[name].arrives, groups[name].leaves
        present += devices if arrives <= round_index and (leaves is None or round_index <= leaves) else ()
        leaving += devices if leaves == round_index else ()
    return Attendance.of(present, leaving=leaving)


def _albums(federations: Sequence[Federation], angles: Sequence[tuple[float, ...]]) -> dict[int, Album]:
    """Every store with the turned copies that any device of any seed will need, by the identity of the store."""
    stores: dict[int, Examples] = {}
    wanted: dict[int, dict[float, list[Rows]]] = {}
    for part in (part for fed in federations for part in (fed.train, fed.val, fed.test)):
        stores[id(part.examples)] = part.examples
        needed = wanted.setdefault(id(part.examples), {})
        for device, degrees in {(device, each[device]) for each in angles for device in range(part.devices)}:
            needed.setdefault(degrees, []).append(part.rows[device])
    return {store: album(stores[store], _copies(needed)) for store, needed in wanted.items()}


def _copies(needed: Mapping[float, Sequence[Rows]]) -> dict[float, Rows]:
    """Which rows are to be turned by which angle, in an order that does not depend on who asked first."""
    return {degrees: np.unique(np.concatenate(needed[degrees])) for degrees in sorted(needed) if degrees}


def _turned(federation: Federation, degrees: Sequence[float], albums: Albums) -> Federation:
    """What devices hold when their images are turned: the rows of the copies."""
    parts = (federation.train, federation.val, federation.test)
    return Federation(*(_holdings(part, degrees, albums[id(part.examples)]) for part in parts))


def _holdings(part: Holdings, degrees: Sequence[float], turned: Album) -> Holdings:
    rows = tuple(turned.places[each][own] for each, own in zip(degrees, part.rows, strict=True))
    return replace(part, examples=turned.examples, rows=rows)
