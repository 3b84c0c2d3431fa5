"""How much of its own model each device mixes in, chosen on its validation data after training; for APFL."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from glocal.algorithms.apfl import ALPHA
from glocal.algorithms.contract import Algorithm
from glocal.core.data import Holdings
from glocal.core.errors import InputError
from glocal.core.modules import predictor
from glocal.core.sampling import in_batches
from glocal.core.store import State
from glocal.core.training import PerExample, Work, batches, cross_entropy_of_each, masked_mean, mean_over_examples
from glocal.core.trees import Params
from glocal.datasets.federated import Federation
from glocal.engines import Engine, OverDevices, Task
from glocal.federate.checkpoint import Progress
from glocal.federate.fitting import Case, Options, classes_of, finish, placed
from glocal.federate.result import Result

Floats = npt.NDArray[np.float64]
GRID = tuple(tenths / 10 for tenths in range(11))
_BATCH = 256


class Mixture(NamedTuple):
    """A federation that was trained by APFL."""

    algorithm: Algorithm
    model: nn.Module
    state: State

    @classmethod
    def of(cls, result: Result) -> "Mixture":
        """The one behind a result."""
        return cls(result.algorithm, result.structure, result.state)


def alphas_of(result: Result) -> list[float]:
    """The share of its own model in what each device predicts with."""
    _require_alpha(result.state)
    return [float(result.state.private.of(device)[ALPHA]) for device in range(len(result.sampled))]


def with_alphas(state: State, alphas: Mapping[int, float]) -> State:
    """The same federation with some devices' alphas as given; nothing else of theirs changes."""
    _require_alpha(state)
    for device, alpha in alphas.items():
        if not 0 <= alpha <= 1:
            raise InputError(f"mixing: alpha of device {device} is {alpha}; it must be from 0 to 1")
    rows = [state.private.of(device) for device in alphas]
    changed = [{**row, ALPHA: torch.full_like(row[ALPHA], alpha)} for row, alpha in zip(rows, alphas.values(), strict=True)]
    return state._replace(private=state.private.put(list(alphas), changed))


def tune_alphas(result: Result, federation: Federation, *, grid: Sequence[float] = GRID, options: Options | None = None) -> Result:
    """A trained APFL federation in which every device takes the alpha of a grid that is best on its own validation data.

    A device chooses by cross entropy, which tells more than accuracy where examples are few. One without such data keeps its alpha.
    For it the shared model has to reach the devices, and that is counted; alphas themselves never leave.
    """
    options = options or Options()
    _require_tunable(result, federation, grid)
    params = result.algorithm.personal(result.state.shared, result.state.private.initial)
    tested = int(np.count_nonzero(federation.val.sizes))
    ledger = result.ledger.after_evaluation(result.state.shared, tested)
    plan = result.plan
    case = placed(
        Case(result.algorithm, result.structure, plan, (plan.seed,), (params,), (federation,), (ledger,), credit=result.credit),
        options,
    )
    losses = losses_by_alpha(Mixture.of(result), case.federations[0].val, grid=grid, engine=options.how())
    devices = np.flatnonzero(federation.val.sizes).tolist()
    chosen = {device: grid[int(losses[:, device].argmin())] for device in devices}
    progress = Progress(plan.rounds, [with_alphas(result.state, chosen)], [ledger], [None])
    return finish(case, replace(options, select="last"), progress)[0]


def losses_by_alpha(
    mixture: Mixture,
    holdings: Holdings,
    *,
    grid: Sequence[float] = GRID,
    per_example: PerExample = cross_entropy_of_each,
    engine: Engine | str = "auto",
) -> Floats:
    """Each device's mean loss on its own rows for every alpha of a grid (grid, devices); NaN for a device without any."""
    algorithm, model, state = mixture
    predict = predictor(model)

    def loss(shared: Params, private: Params, work: Work) -> Tensor:
        params = algorithm.personal(shared, private)
        found = [masked_mean(per_example(predict(params, b.x, b.mask), b.y), b.mask) for b in batches(work)]
        return mean_over_examples(found, work.order)

    over, tested = OverDevices(loss, engine=engine, descends=False), np.flatnonzero(holdings.sizes).tolist()
    losses = np.full((len(grid), holdings.devices), np.nan)
    for place, alpha in enumerate(grid):
        mixed = with_alphas(state, dict.fromkeys(tested, alpha)).private
        tasks = [Task(state.shared, mixed.of(device), in_batches(holdings.rows[device], _BATCH)) for device in tested]
        with torch.no_grad():
            losses[place, tested] = over(tasks, holdings.examples).stacked().double().cpu().numpy() if tasks else []
    over.close()
    return losses


def _require_tunable(result: Result, federation: Federation, grid: Sequence[float]) -> None:
    """Refuse a federation without alphas, one of other devices or inputs than were trained, and a grid without a place."""
    _require_alpha(result.state)
    if len(result.sampled) != federation.devices:
        trained = f"{len(result.sampled)} devices were trained"
        raise InputError(f"mixing: {trained}, but the data have {federation.devices}; give the federation they were trained with")
    if not grid:
        raise InputError("mixing: the grid is empty; give at least one alpha from 0 to 1")
    classes_of(result.structure, federation)


def _require_alpha(state: State) -> None:
    if ALPHA not in state.private.initial:
        raise InputError("mixing: the federation has no alphas; train it with apfl")
