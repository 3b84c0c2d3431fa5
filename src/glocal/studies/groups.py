"""From groups of clients that join, leave and drift to the phases of an experiment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from glocal.core.data import ClientData, Examples, Rows
from glocal.core.errors import InputError
from glocal.core.sampling import Availability
from glocal.datasets.federated import FederatedData
from glocal.datasets.rotation import RotatedExamples, add_rotated_copies
from glocal.federate.experiment import Phase
from glocal.studies.settings import GroupSettings

DRIFT_EVERY = 10  # rounds between two steps of a drift
Groups = Mapping[str, GroupSettings]
RotatedStores = Mapping[int, RotatedExamples]


def build_phases(
    groups: Groups, federations: Sequence[FederatedData], rounds: int
) -> tuple[Phase, ...]:
    """The phases of these groups, with a partition per seed; groups take the clients in order."""
    require_groups(groups, federations[0].num_clients, rounds)
    changes = {0}
    for group in groups.values():
        changes.update(_change_rounds(group, rounds))
    starts = sorted(changes)
    angles = [_angles(groups, start) for start in starts]
    rotated_stores = _rotated_stores(federations, angles)
    rotated: dict[tuple[float, ...], tuple[FederatedData, ...]] = {}
    phases: list[Phase] = []
    for start, degrees in zip(starts, angles, strict=True):
        if degrees not in rotated:  # phases with the same angles have the same objects
            rotated[degrees] = tuple(
                _rotate(federation, degrees, rotated_stores) for federation in federations
            )
        phases.append(Phase(start, _availability(groups, start), (rotated[degrees],)))
    return tuple(phases)


def clients_by_group(groups: Groups) -> dict[str, tuple[int, ...]]:
    """The clients of each group, numbered group by group."""
    ends = np.cumsum([group.clients for group in groups.values()]).tolist()
    return {
        name: tuple(range(end - group.clients, end))
        for end, (name, group) in zip(ends, groups.items(), strict=True)
    }


def require_groups(groups: Groups, clients: int, rounds: int) -> None:
    """Refuse groups without clients or with too many, and rounds that make no sense."""
    for name, group in groups.items():
        _require_group(f"groups.{name}", group, rounds)
    total = sum(group.clients for group in groups.values())
    if total != clients:
        raise InputError(
            f"settings: the groups have {total} clients together, the data {clients}; "
            "make both the same"
        )


def _require_group(where: str, group: GroupSettings, rounds: int) -> None:
    if group.clients < 1:
        raise InputError(f"settings: {where}.clients is {group.clients}; it must be at least 1")
    if not 0 <= group.join_round < rounds:
        raise InputError(
            f"settings: {where}.join_round is {group.join_round}, "
            f"but rounds go from 0 to {rounds - 1}; choose one of those"
        )
    if group.leave_round is not None and group.leave_round <= group.join_round:
        rounds_text = f"joins in round {group.join_round} and leaves in round {group.leave_round}"
        raise InputError(f"settings: {where} {rounds_text}; make it leave later than it joins")
    for name in ("rotate", "drift"):
        if not isfinite(getattr(group, name)):
            raise InputError(
                f"settings: {where}.{name} is {getattr(group, name)}; "
                "a number of degrees was expected"
            )
    if group.drift_start is not None and group.drift_start < 0:
        raise InputError(
            f"settings: {where}.drift_start is {group.drift_start}; it must be at least 0"
        )
    if not group.drift and (group.drift_start is not None or group.drift_end is not None):
        raise InputError(
            f"settings: {where} has a drift_start or drift_end, but no drift; "
            "add drift = 15, or another number of degrees"
        )
    if group.drift and _drift_end(group, rounds) <= drift_start(group):
        raise InputError(
            f"settings: {where} drifts from round {drift_start(group)} "
            f"until {_drift_end(group, rounds)}; "
            "make its drift end later than it starts, and start before the group leaves"
        )
    first_step = drift_start(group) + DRIFT_EVERY
    if group.drift and first_step >= min(rounds, _drift_end(group, rounds) + 1):
        raise InputError(
            f"settings: {where} would rotate in round {first_step} for the first time, "
            f"but drifts only until {_drift_end(group, rounds)}; make it drift for longer"
        )


def drift_start(group: GroupSettings) -> int:
    """The round in which its images start to rotate; the first step comes ten rounds later."""
    return (
        group.join_round if group.drift_start is None else max(group.drift_start, group.join_round)
    )


def _drift_end(group: GroupSettings, rounds: int) -> int:
    """The round in which its images stop rotating, at the latest when the group leaves."""
    return min(end for end in (group.drift_end, group.leave_round, rounds) if end is not None)


def _change_rounds(group: GroupSettings, rounds: int) -> Iterable[int]:
    """Every round in which something changes for a group."""
    leave_round = () if group.leave_round is None else (group.leave_round, group.leave_round + 1)
    steps = (
        range(drift_start(group) + DRIFT_EVERY, _drift_end(group, rounds) + 1, DRIFT_EVERY)
        if group.drift
        else ()
    )
    return (start for start in (group.join_round, *leave_round, *steps) if start < rounds)


def rotation_angle(group: GroupSettings, round_index: int) -> float:
    """The angle of a group's images in a round, in degrees.

    >>> group = GroupSettings(1, rotate=90, drift=15, drift_start=20, drift_end=45)
    >>> [rotation_angle(group, done) for done in (0, 29, 30, 40, 90)]
    [90.0, 90.0, 105.0, 120.0, 120.0]
    """
    drifted = min(round_index, _drift_end(group, round_index)) - drift_start(group)
    return float((group.rotate + group.drift * max(0, drifted // DRIFT_EVERY)) % 360)


def _angles(groups: Groups, round_index: int) -> tuple[float, ...]:
    """The angle of each client's images in a round."""
    return tuple(
        rotation_angle(group, round_index)
        for group in groups.values()
        for _ in range(group.clients)
    )


def _availability(groups: Groups, round_index: int) -> Availability:
    """Which clients are there in a round, and which drop out in it."""
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


def _rotated_stores(
    federations: Sequence[FederatedData], angles: Sequence[tuple[float, ...]]
) -> dict[int, RotatedExamples]:
    """Every store with the rotated copies that any client of any seed needs.

    The keys are the identities of the stores.
    """
    stores: dict[int, Examples] = {}
    rows: dict[int, dict[float, list[Rows]]] = {}
    for fed in federations:
        for part in (fed.train, fed.val, fed.test):
            stores[id(part.examples)] = part.examples
            needed = rows.setdefault(id(part.examples), {})
            for client, own_rows in enumerate(part.rows):
                for degrees in {each[client] for each in angles}:
                    needed.setdefault(degrees, []).append(own_rows)
    return {
        store: add_rotated_copies(stores[store], _rotated_rows(needed))
        for store, needed in rows.items()
    }


def _rotated_rows(needed: Mapping[float, Sequence[Rows]]) -> dict[float, Rows]:
    """The rows to rotate by each angle, in an order that does not depend on the clients."""
    return {
        degrees: np.unique(np.concatenate(needed[degrees])) for degrees in sorted(needed) if degrees
    }


def _rotate(
    federation: FederatedData, degrees: Sequence[float], rotated_stores: RotatedStores
) -> FederatedData:
    """The clients' data with rotated images: the rows of the copies."""
    parts = (federation.train, federation.val, federation.test)
    return FederatedData(
        *(_client_data(part, degrees, rotated_stores[id(part.examples)]) for part in parts)
    )


def _client_data(
    part: ClientData, degrees: Sequence[float], rotated: RotatedExamples
) -> ClientData:
    rows = tuple(rotated.copy_rows[each][own] for each, own in zip(degrees, part.rows, strict=True))
    return replace(part, examples=rotated.examples, rows=rows)
