"""APFL after training: each client chooses its alpha, the weight of its own model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from glocal.algorithms.apfl import ALPHA
from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.sampling import to_batches
from glocal.core.store import State
from glocal.core.task import Task
from glocal.core.training import (
    Work,
    batches,
    masked_mean,
    mean_example_loss,
)
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask, EngineConfig, Executor
from glocal.federate.checkpoint import Progress
from glocal.federate.fitting import Case, Options, finish, move_to_device
from glocal.federate.outputs import example_output
from glocal.federate.result import SeedResult

Floats = npt.NDArray[np.float64]
GRID = tuple(tenths / 10 for tenths in range(11))
_BATCH_SIZE = 256


class TrainedAPFL(NamedTuple):
    """A federation trained by APFL."""

    algorithm: Algorithm
    task: Task
    state: State

    @classmethod
    def from_result(cls, result: SeedResult) -> "TrainedAPFL":
        """The federation behind a result."""
        return cls(result.algorithm, result.task, result.state)


def alphas_of(result: SeedResult) -> list[float]:
    """Each client's alpha: the weight of its own model in its predictions."""
    _require_alpha(result.state)
    clients = range(len(result.times_sampled))
    return [float(result.state.private.of(client)[ALPHA]) for client in clients]


def with_alphas(state: State, alphas: Mapping[int, float]) -> State:
    """The same state with other alphas for some clients; nothing else changes."""
    _require_alpha(state)
    for client, alpha in alphas.items():
        if not 0 <= alpha <= 1:
            raise InputError(f"mixing: alpha of client {client} is {alpha}; it must be from 0 to 1")
    rows = []
    for client, alpha in alphas.items():
        row = state.private.of(client)
        rows.append({**row, ALPHA: torch.full_like(row[ALPHA], alpha)})
    return state._replace(private=state.private.put(list(alphas), rows))


def tune_alphas(
    result: SeedResult,
    data: FederatedData,
    *,
    grid: Sequence[float] = GRID,
    options: Options | None = None,
) -> SeedResult:
    """Choose for each client the alpha from a grid that is best on its validation data.

    The criterion is the loss, which is more precise than accuracy where examples are few. A
    client without validation data keeps its alpha. The shared model is sent to the clients for it,
    and counted; alphas never leave a client.
    """
    options = options or Options()
    _require_tunable(result, data, grid)
    params = result.algorithm.personal(result.state.shared, result.state.private.initial)
    clients = np.flatnonzero(data.val.sizes).tolist()
    ledger = result.ledger.add_evaluation(result.state.shared, len(clients))
    plan = result.plan
    experiment = Case(
        result.algorithm,
        result.task,
        plan,
        (plan.seed,),
        (params,),
        (data,),
        (ledger,),
    )
    experiment = move_to_device(experiment, options)
    losses = losses_by_alpha(
        TrainedAPFL.from_result(result),
        experiment.federations[0].val,
        grid=grid,
        engine=options.engine_config(),
    )
    alphas = {client: grid[int(losses[:, client].argmin())] for client in clients}
    progress = Progress(plan.rounds, [with_alphas(result.state, alphas)], [ledger], [None])
    return finish(experiment, replace(options, select="last"), progress)[0]


def losses_by_alpha(
    mixture: TrainedAPFL,
    client_data: ClientData,
    *,
    grid: Sequence[float] = GRID,
    engine: EngineConfig | str = "auto",
) -> Floats:
    """Each client's mean loss on its own rows for each alpha of a grid (grid, clients).

    It is NaN for a client without rows.
    """
    algorithm, task, state = mixture
    predict = task.predictor()

    def loss(shared: Params, private: Params, work: Work) -> Tensor:
        params = algorithm.personal(shared, private)
        losses = []
        for batch in batches(work):
            output = predict(params, batch.x, batch.mask)
            losses.append(masked_mean(task.per_example(output, batch.y), batch.mask))
        return mean_example_loss(losses, work.order)

    clients = np.flatnonzero(client_data.sizes).tolist()
    losses = np.full((len(grid), client_data.num_clients), np.nan)
    executor = Executor(loss, engine=engine, trains=False)
    for place, alpha in enumerate(grid):
        private = with_alphas(state, dict.fromkeys(clients, alpha)).private
        tasks = []
        for client in clients:
            order = to_batches(client_data.rows[client], _BATCH_SIZE)
            tasks.append(ClientTask(state.shared, private.of(client), order))
        if tasks:
            with torch.no_grad():
                result = executor(tasks, client_data.examples).stacked()
            losses[place, clients] = result.double().cpu().numpy()
    executor.close()
    return losses


def _require_tunable(result: SeedResult, data: FederatedData, grid: Sequence[float]) -> None:
    """Refuse a result without alphas, data of other clients or inputs, and an empty grid."""
    _require_alpha(result.state)
    if len(result.times_sampled) != data.num_clients:
        raise InputError(
            f"mixing: {len(result.times_sampled)} clients were trained, but the data have "
            f"{data.num_clients}; give the data they were trained with"
        )
    if not grid:
        raise InputError("mixing: the grid is empty; give at least one alpha from 0 to 1")
    example_output(result.task, data.train.examples.x)


def _require_alpha(state: State) -> None:
    if ALPHA not in state.private.initial:
        raise InputError("mixing: the federation has no alphas; train it with apfl")
