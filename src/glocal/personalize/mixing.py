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
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.modules import predictor
from glocal.core.sampling import to_batches
from glocal.core.store import State
from glocal.core.training import (
    PerExampleLoss,
    Work,
    batches,
    masked_mean,
    mean_example_loss,
    per_example_cross_entropy,
)
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.federate.checkpoint import Progress
from glocal.federate.fitting import Case, Options, finish, move_to_device, num_classes
from glocal.federate.result import Result

Floats = npt.NDArray[np.float64]
GRID = tuple(tenths / 10 for tenths in range(11))
_BATCH_SIZE = 256


class TrainedAPFL(NamedTuple):
    """A federation that was trained by APFL."""

    algorithm: Algorithm
    model: nn.Module
    state: State

    @classmethod
    def from_result(cls, result: Result) -> "TrainedAPFL":
        """The one behind a result."""
        return cls(result.algorithm, result.architecture, result.state)


def alphas_of(result: Result) -> list[float]:
    """The share of its own model in what each device predicts with."""
    _require_alpha(result.state)
    return [
        float(result.state.private.of(client)[ALPHA]) for client in range(len(result.times_sampled))
    ]


def with_alphas(state: State, alphas: Mapping[int, float]) -> State:
    """The same federation with some devices' alphas as given; nothing else of theirs changes."""
    _require_alpha(state)
    for client, alpha in alphas.items():
        if not 0 <= alpha <= 1:
            raise InputError(f"mixing: alpha of device {client} is {alpha}; it must be from 0 to 1")
    rows = [state.private.of(client) for client in alphas]
    changed = [
        {**row, ALPHA: torch.full_like(row[ALPHA], alpha)}
        for row, alpha in zip(rows, alphas.values(), strict=True)
    ]
    return state._replace(private=state.private.put(list(alphas), changed))


def tune_alphas(
    result: Result,
    data: FederatedData,
    *,
    grid: Sequence[float] = GRID,
    options: Options | None = None,
) -> Result:
    """A trained APFL federation in which every device takes the alpha of a grid that is best on its own validation data.

    A device chooses by cross entropy, which tells more than accuracy where examples are few. One without such data keeps its alpha.
    For it the shared model has to reach the devices, and that is counted; alphas themselves never leave.
    """
    options = options or Options()
    _require_tunable(result, data, grid)
    params = result.algorithm.personal(result.state.shared, result.state.private.initial)
    tested = int(np.count_nonzero(data.val.sizes))
    ledger = result.ledger.add_evaluation(result.state.shared, tested)
    plan = result.plan
    experiment = move_to_device(
        Case(
            result.algorithm,
            result.architecture,
            plan,
            (plan.seed,),
            (params,),
            (data,),
            (ledger,),
            metric=result.metric,
        ),
        options,
    )
    losses = losses_by_alpha(
        TrainedAPFL.from_result(result),
        experiment.federations[0].val,
        grid=grid,
        engine=options.engine_config(),
    )
    clients = np.flatnonzero(data.val.sizes).tolist()
    chosen = {client: grid[int(losses[:, client].argmin())] for client in clients}
    progress = Progress(plan.rounds, [with_alphas(result.state, chosen)], [ledger], [None])
    return finish(experiment, replace(options, select="last"), progress)[0]


def losses_by_alpha(
    mixture: TrainedAPFL,
    client_data: ClientData,
    *,
    grid: Sequence[float] = GRID,
    per_example: PerExampleLoss = per_example_cross_entropy,
    engine: EngineConfig | str = "auto",
) -> Floats:
    """Each device's mean loss on its own rows for every alpha of a grid (grid, devices); NaN for a device without any."""
    algorithm, model, state = mixture
    predict = predictor(model)

    def loss(shared: Params, private: Params, work: Work) -> Tensor:
        params = algorithm.personal(shared, private)
        found = [
            masked_mean(per_example(predict(params, b.x, b.mask), b.y), b.mask)
            for b in batches(work)
        ]
        return mean_example_loss(found, work.order)

    executor, tested = (
        Executor(loss, engine=engine, trains=False),
        np.flatnonzero(client_data.sizes).tolist(),
    )
    losses = np.full((len(grid), client_data.num_clients), np.nan)
    for place, alpha in enumerate(grid):
        interpolate = with_alphas(state, dict.fromkeys(tested, alpha)).private
        tasks = [
            ClientTask(
                state.shared,
                interpolate.of(client),
                to_batches(client_data.rows[client], _BATCH_SIZE),
            )
            for client in tested
        ]
        with torch.no_grad():
            losses[place, tested] = (
                executor(tasks, client_data.examples).stacked().double().cpu().numpy()
                if tasks
                else []
            )
    executor.close()
    return losses


def _require_tunable(result: Result, data: FederatedData, grid: Sequence[float]) -> None:
    """Refuse a federation without alphas, one of other devices or inputs than were trained, and a grid without a place."""
    _require_alpha(result.state)
    if len(result.times_sampled) != data.num_clients:
        trained = f"{len(result.times_sampled)} devices were trained"
        raise InputError(
            f"mixing: {trained}, but the data have {data.num_clients}; give the federation they were trained with"
        )
    if not grid:
        raise InputError("mixing: the grid is empty; give at least one alpha from 0 to 1")
    num_classes(result.architecture, data)


def _require_alpha(state: State) -> None:
    if ALPHA not in state.private.initial:
        raise InputError("mixing: the federation has no alphas; train it with apfl")
