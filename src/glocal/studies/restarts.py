"""Several tries for every deal of the data, of which the one that is best on validation data counts (Liang et al. 2020, C.3)."""

from collections.abc import Sequence
from typing import NamedTuple

from glocal.core.bounds import MAX_SEEDS, require_count, require_counts
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.settings import PlanSettings

_SEED_STRIDE = 1_000_000  # between the seeds of one deal's tries


class Restart(NamedTuple):
    """A run: the seed that deals out the data, and the one that draws weights and orders; of a first try they are the same."""

    data_seed: int
    seed: int


def restarts_of(plan: PlanSettings) -> list[Restart]:
    """Every run of a plan, all first tries first.

    >>> [run.seed for run in restarts_of(PlanSettings(seeds=2, restarts=2))]
    [0, 1, 1000000, 1000001]
    """
    require_counts("settings: plan.", plan)
    require_count("settings: plan.seeds x plan.restarts", plan.seeds * plan.restarts, 1, MAX_SEEDS)
    deals = range(plan.seed, plan.seed + plan.seeds)
    if plan.restarts > 1 and deals[-1] >= _SEED_STRIDE:
        raise InputError(
            f"settings: with plan.restarts, seeds must be below {_SEED_STRIDE}, not {deals[-1]}; choose a lower plan.seed"
        )
    return [
        Restart(data_seed, data_seed + number * _SEED_STRIDE)
        for number in range(plan.restarts)
        for data_seed in deals
    ]


def best_restarts(results: Sequence[Json], plan: PlanSettings) -> list[Json]:
    """For every deal the result of its best try on all validation examples together, under the deal's seed.

    "try" says which it was, "place" where among all runs.
    """
    if plan.restarts == 1:
        return list(results)
    deals: dict[int, list[Json]] = {}
    for place, result in enumerate(results):
        number, data_seed = divmod(result["seed"], _SEED_STRIDE)
        deals.setdefault(data_seed, []).append(
            {**result, "seed": data_seed, "restart": number, "index": place}
        )
    return [max(runs, key=_validation) for runs in deals.values()]


def _validation(result: Json) -> float:
    return -1.0 if result["validation"]["pooled"] is None else float(result["validation"]["pooled"])
