"""Groups of devices that come, go and drift, as settings name them, made into the chapters of a scenario."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import Availability
from glocal.datasets.federated import FederatedData
from glocal.datasets.rotation import RotatedExamples, add_rotated_copies
from glocal.federate.scenario import Chapter, Scenario
from glocal.studies.settings import GroupSettings

DRIFT_EVERY = 10  # rounds from one turn to the next
Groups = Mapping[str, GroupSettings]
Albums = Mapping[int, RotatedExamples]


def build_scenario(groups: Groups, federations: Sequence[FederatedData], rounds: int) -> Scenario:
    """The scenario of so many rounds, with a federation per seed; groups take the devices in turn."""
    require_groups(groups, federations[0].num_clients, rounds)
    starts = sorted(
        {0, *(start for group in groups.values() for start in _change_rounds(group, rounds))}
    )
    angles = [_angles(groups, start) for start in starts]
    albums = _albums(federations, angles)
    turned: dict[tuple[float, ...], tuple[FederatedData, ...]] = {}
    for degrees in angles:
        if (
            degrees not in turned
        ):  # where nobody turns, a chapter has the very federations of the one before
            turned[degrees] = tuple(
                _rotate(federation, degrees, albums) for federation in federations
            )
    chapters = [
        Chapter(start, _attendance(groups, start), turned[each])
        for start, each in zip(starts, angles, strict=True)
    ]
    return Scenario(tuple(chapters), clients_by_group(groups))


def clients_by_group(groups: Groups) -> dict[str, tuple[int, ...]]:
    """The devices of each group, numbered one group after the other."""
    ends = np.cumsum([group.clients for group in groups.values()]).tolist()
    return {
        name: tuple(range(end - group.clients, end))
        for end, (name, group) in zip(ends, groups.items(), strict=True)
    }


def require_groups(groups: Groups, clients: int, rounds: int) -> None:
    """Refuse groups that cannot be: of no or too many devices, gone before they came, or never there."""
    for name, group in groups.items():
        _require_group(f"groups.{name}", group, rounds)
    total = sum(group.clients for group in groups.values())
    if total != clients:
        raise InputError(
            f"settings: the groups have {total} devices together, the data {clients}; let both be the same"
        )


def _require_group(where: str, group: GroupSettings, rounds: int) -> None:
    if group.clients < 1:
        raise InputError(f"settings: {where}.devices is {group.clients}; it must be at least 1")
    if not 0 <= group.join_round < rounds:
        raise InputError(
            f"settings: {where}.arrives is {group.join_round}, but rounds go from 0 to {rounds - 1}; choose one of those"
        )
    if group.leave_round is not None and group.leave_round <= group.join_round:
        told = f"arrives in round {group.join_round} and leaves in round {group.leave_round}"
        raise InputError(f"settings: {where} {told}; let it leave later than it arrives")
    for name in ("rotate", "drift"):
        if not isfinite(getattr(group, name)):
            raise InputError(
                f"settings: {where}.{name} is {getattr(group, name)}; a number of degrees was expected"
            )
    if group.drift_start is not None and group.drift_start < 0:
        raise InputError(
            f"settings: {where}.drifts_from is {group.drift_start}; it must be at least 0"
        )
    if not group.drift and (group.drift_start is not None or group.drift_end is not None):
        raise InputError(
            f"settings: {where} says when it drifts, and not how far; add drift = 15, or another number of degrees"
        )
    if group.drift and _drift_end(group, rounds) <= drift_start(group):
        told = f"drifts from round {drift_start(group)} until {_drift_end(group, rounds)}"
        raise InputError(
            f"settings: {where} {told}; let its drift end later than it begins, and before the group leaves"
        )
    if group.drift and drift_start(group) + DRIFT_EVERY >= min(
        rounds, _drift_end(group, rounds) + 1
    ):
        told = f"would turn in round {drift_start(group) + DRIFT_EVERY} for the first time"
        raise InputError(
            f"settings: {where} {told}, and drifts until {_drift_end(group, rounds)}; let it drift for longer"
        )


def drift_start(group: GroupSettings) -> int:
    """When its images begin to turn: the first turn comes ten rounds later."""
    return (
        group.join_round if group.drift_start is None else max(group.drift_start, group.join_round)
    )


def _drift_end(group: GroupSettings, rounds: int) -> int:
    """When its images stop turning; what has left turns no further."""
    return min(end for end in (group.drift_end, group.leave_round, rounds) if end is not None)


def _change_rounds(group: GroupSettings, rounds: int) -> Iterable[int]:
    """Every round in which something changes with a group."""
    leave_round = () if group.leave_round is None else (group.leave_round, group.leave_round + 1)
    turns = (
        range(drift_start(group) + DRIFT_EVERY, _drift_end(group, rounds) + 1, DRIFT_EVERY)
        if group.drift
        else ()
    )
    return (start for start in (group.join_round, *leave_round, *turns) if start < rounds)


def rotation_angle(group: GroupSettings, round_index: int) -> float:
    """By how many degrees a group's images are turned in a round.

    >>> [rotation_angle(GroupSettings(1, rotate=90, drift=15, drift_start=20, drift_end=45), done) for done in (0, 29, 30, 40, 90)]
    [90.0, 90.0, 105.0, 120.0, 120.0]
    """
    drifted = min(round_index, _drift_end(group, round_index)) - drift_start(group)
    return float((group.rotate + group.drift * max(0, drifted // DRIFT_EVERY)) % 360)


def _angles(groups: Groups, round_index: int) -> tuple[float, ...]:
    """The angle of each device's images in a round."""
    return tuple(
        rotation_angle(group, round_index)
        for group in groups.values()
        for _ in range(group.clients)
    )


def _attendance(groups: Groups, round_index: int) -> Availability:
    """Who is there in a round, and who leaves in it."""
    present: list[int] = []
    dropouts: list[int] = []
    for name, clients in clients_by_group(groups).items():
        join_round, leave_round = groups[name].join_round, groups[name].leave_round
        present += (
            clients
            if join_round <= round_index and (leave_round is None or round_index <= leave_round)
            else ()
        )
        dropouts += clients if leave_round == round_index else ()
    return Availability.of(present, dropouts=dropouts)


def _albums(
    federations: Sequence[FederatedData], angles: Sequence[tuple[float, ...]]
) -> dict[int, RotatedExamples]:
    """Every store with the turned copies that any device of any seed will need, by the identity of the store."""
    stores: dict[int, Examples] = {}
    wanted: dict[int, dict[float, list[Rows]]] = {}
    for part in (part for fed in federations for part in (fed.train, fed.val, fed.test)):
        stores[id(part.examples)] = part.examples
        needed = wanted.setdefault(id(part.examples), {})
        for device, degrees in {
            (device, each[device]) for each in angles for device in range(part.num_clients)
        }:
            needed.setdefault(degrees, []).append(part.rows[device])
    return {
        store: add_rotated_copies(stores[store], _rotated_rows(needed))
        for store, needed in wanted.items()
    }


def _rotated_rows(needed: Mapping[float, Sequence[Rows]]) -> dict[float, Rows]:
    """Which rows are to be turned by which angle, in an order that does not depend on who asked first."""
    return {
        degrees: np.unique(np.concatenate(needed[degrees])) for degrees in sorted(needed) if degrees
    }


def _rotate(federation: FederatedData, degrees: Sequence[float], albums: Albums) -> FederatedData:
    """What devices hold when their images are turned: the rows of the copies."""
    parts = (federation.train, federation.val, federation.test)
    return FederatedData(
        *(_client_data(part, degrees, albums[id(part.examples)]) for part in parts)
    )


def _client_data(part: ClientData, degrees: Sequence[float], turned: RotatedExamples) -> ClientData:
    rows = tuple(turned.copy_rows[each][own] for each, own in zip(degrees, part.rows, strict=True))
    return replace(part, examples=turned.examples, rows=rows)
