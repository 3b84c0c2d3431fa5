"""Several restarts per partition, of which the best on validation data counts.

Liang et al. 2020, appendix C.3.
"""

from collections.abc import Sequence
from typing import NamedTuple

from glocal.core.bounds import MAX_SEEDS, require_count, require_counts
from glocal.core.errors import InputError
from glocal.core.files import Json
from glocal.studies.metric_format import selection_metric
from glocal.studies.settings import PlanSettings, Settings

_SEED_STRIDE = 1_000_000  # between the seeds of one partition's restarts


class Restart(NamedTuple):
    """A run: the seed of its partition, and the seed of its weights and batches.

    In the first restart they are the same.
    """

    data_seed: int
    seed: int


def restarts_of(plan: PlanSettings) -> list[Restart]:
    """Every run of a plan, all first restarts first.

    >>> [run.seed for run in restarts_of(PlanSettings(seeds=2, restarts=2))]
    [0, 1, 1000000, 1000001]
    """
    require_counts("settings: plan.", plan)
    require_count("settings: plan.seeds x plan.restarts", plan.seeds * plan.restarts, 1, MAX_SEEDS)
    data_seeds = range(plan.seed, plan.seed + plan.seeds)
    if plan.restarts > 1 and data_seeds[-1] >= _SEED_STRIDE:
        raise InputError(
            f"settings: with plan.restarts, seeds must be below {_SEED_STRIDE}, "
            f"not {data_seeds[-1]}; choose a lower plan.seed"
        )
    return [
        Restart(data_seed, data_seed + number * _SEED_STRIDE)
        for number in range(plan.restarts)
        for data_seed in data_seeds
    ]


def best_restarts(results: Sequence[Json], settings: Settings) -> list[Json]:
    """For every partition, the result of its best restart, under the partition's seed.

    The best one has the best figure on all validation examples together, of the metric that rounds
    are selected by. "restart" is its number, "index" its position among all runs.
    """
    if settings.plan.restarts == 1:
        return list(results)
    by_partition: dict[int, list[Json]] = {}
    for index, result in enumerate(results):
        number, data_seed = divmod(result["seed"], _SEED_STRIDE)
        row = {**result, "seed": data_seed, "restart": number, "index": index}
        by_partition.setdefault(data_seed, []).append(row)
    return [_best(runs, settings) for runs in by_partition.values()]


def _best(runs: Sequence[Json], settings: Settings) -> Json:
    """The first of the best runs; one without validation data is the worst."""
    metric = selection_metric(runs[0], settings.run.evaluation())
    best: Json = runs[0]
    for run in runs[1:]:
        figure, other = (_validation(each, metric.name) for each in (run, best))
        if figure is not None and (other is None or metric.is_better(figure, other)):
            best = run
    return best


def _validation(result: Json, metric: str) -> float | None:
    figure: float | None = result["metrics"][metric]["validation"]["pooled"]
    return figure
