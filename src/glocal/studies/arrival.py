"""A newcomer at the end of a case: images that no device has seen like that, taken in as the case says (Liang et al. 2020, 5.4)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import torch

from glocal.core.bounds import EXAMPLES, count
from glocal.core.data import Examples, Holdings, Rows
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.core.sampling import stream
from glocal.core.store import State
from glocal.datasets.federated import Federation
from glocal.datasets.rotate import black, require_images, rotated
from glocal.evaluate import Evaluation, ensemble_accuracy, local_test, new_test, spread
from glocal.federate.fitting import Case, Options, evaluation_of
from glocal.federate.result import Result
from glocal.federate.rounds import Seat
from glocal.personalize.onboarding import Joined, Welcome, take_in


@dataclass(frozen=True)
class NewcomerSettings:
    """A new device: so many examples drawn from the training and the test data, turned by `rotate` degrees."""

    rotate: float = 90.0
    train: int = count(3000, most=EXAMPLES)
    test: int = count(500, most=EXAMPLES)


def arrive(case: Case, results: Sequence[Result], options: Options, *, newcomer: NewcomerSettings, welcome: Welcome) -> list[Json]:
    """Take a newcomer into each seed's federation as it was tested; what the old devices and the new one can do then."""
    trains, store = _dealt(case, newcomer, "train")
    tests, test_store = _dealt(case, newcomer, "test")
    seats = [
        Seat(result.plan, Holdings(store, (*fed.train.rows, rows)), result.state)
        for result, fed, rows in zip(results, case.federations, trains, strict=True)
    ]
    joined = take_in(case.algorithm, seats, welcome, engine=options.how())
    evaluation = evaluation_of(case, options)
    new = [Holdings(test_store, (rows,)) for rows in tests]
    rows = [
        _measured(evaluation, each, fed, own) | {"rotated_before": _before(evaluation, result, own)}
        for each, fed, own, result in zip(joined, case.federations, new, results, strict=True)
    ]
    evaluation.close()
    return rows


def require_newcomer(newcomer: NewcomerSettings | None, federation: Federation, case: str) -> None:
    """Refuse a welcome without a newcomer, and a newcomer that the data are too few for."""
    if newcomer is None:
        raise InputError(f"settings: cases.{case} has a welcome, but there is no [newcomer]; add one, or leave the welcome out")
    for part in ("train", "test"):
        size = len(_drawn_from(federation, part))
        if not 1 <= getattr(newcomer, part) <= size:
            raise InputError(f"settings: newcomer.{part} is {getattr(newcomer, part)}; it must be from 1 to {size}")
    if not isfinite(newcomer.rotate):
        raise InputError(f"settings: newcomer.rotate is {newcomer.rotate}; a number of degrees was expected")
    require_images(federation.train.examples.x)


def _dealt(case: Case, newcomer: NewcomerSettings, part: str) -> tuple[list[Rows], Examples]:
    """Each seed's newcomer's rows, and the store that holds them behind the old ones."""
    old, count = getattr(case.federations[0], part).examples, getattr(newcomer, part)
    fill, stores, rows = black(old.x), [old], []
    for seed, federation in zip(case.seeds, case.federations, strict=True):
        known = _drawn_from(federation, part)
        drawn = old.take(np.sort(stream(seed, f"newcomer, {part}").choice(known, count, replace=False)))
        start = sum(len(store.y) for store in stores)
        rows.append(np.arange(start, start + count, dtype=np.int64))
        stores.append(drawn._replace(x=rotated(drawn.x, newcomer.rotate, fill)))
    return rows, Examples(torch.cat([store.x for store in stores]), torch.cat([store.y for store in stores]))


def _drawn_from(federation: Federation, part: str) -> Rows:
    """What a newcomer's examples are drawn from: everyone's for training and validation, or everyone's for the test."""
    if part == "test":
        return np.sort(federation.test.pooled())
    return np.sort(np.concatenate([federation.train.pooled(), federation.val.pooled()]))


def _measured(evaluation: Evaluation, joined: Joined, fed: Federation, own: Holdings) -> Json:
    """Normal: the ensemble of the old devices on their test data, and each on its own; rotated: the newcomer on its own."""
    old = _without(joined.state, joined.device)
    normal = new_test(evaluation, old, fed.test)
    local = spread(local_test(evaluation, old, fed.test), fed.test.sizes)
    new = ensemble_accuracy(evaluation, [(joined.state.shared, joined.state.private.of(joined.device))], own)
    return {
        "normal": normal.logits if normal else None,
        "normal_local": local.mean,
        "rotated": new,
        "ledger": joined.ledger.as_dict(),
    }


def _before(evaluation: Evaluation, result: Result, own: Holdings) -> float:
    """How the newcomer does with the ensemble of the old devices, before it has learnt anything."""
    state = result.state
    members = [state.private.of(device) for device in sorted(state.private.trained)] or [state.private.initial]
    return ensemble_accuracy(evaluation, [(state.shared, member) for member in members[: None if members[0] else 1]], own)


def _without(state: State, device: int) -> State:
    """The federation without one device."""
    kept = {number: row for number, row in state.private.trained.items() if number != device}
    return State(state.shared, replace(state.private, trained=kept))
