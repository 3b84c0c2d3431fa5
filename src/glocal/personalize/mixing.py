"""APFL after training: each client chooses its alpha, the weight of its own model."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from glocal.algorithms.apfl import ALPHA
from glocal.algorithms.contract import Algorithm
from glocal.core.checks import require_instance, require_items, require_number
from glocal.core.data import ClientData
from glocal.core.errors import InputError
from glocal.core.masked_mean import masked_mean
from glocal.core.sampling import to_batches
from glocal.core.store import GroupState
from glocal.core.training import WeightedSum, Work, batches, sum_losses
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData, require_data
from glocal.engines import ClientTask, EngineConfig, Executor, ResolvedEngine
from glocal.federate.checkpoint import RunProgress
from glocal.federate.experiment import Experiment
from glocal.federate.fit import build_experiment
from glocal.federate.group_result import GroupResult
from glocal.federate.options import Evaluation, Options
from glocal.federate.outputs import example_output
from glocal.federate.result import Result
from glocal.federate.scoring import Scoring

Floats = npt.NDArray[np.float64]
GRID = tuple(tenths / 10 for tenths in range(11))
_BATCH_SIZE = 256


def alphas_of(result: Result | GroupResult) -> list[float]:
    """Each client's alpha: the weight of its own model in its predictions.

    Of several seeds, the first one's.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.APFL(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> alphas_of(result)[:2]
    [0.5, 0.5]
    """
    require_instance("mixing: result", result, Result | GroupResult, "the result of a fit")
    one = result.group() if isinstance(result, Result) else result
    _require_alpha(one.state)
    return [float(one.state.private.of(client)[ALPHA]) for client in range(one.num_clients)]


def with_alphas(state: GroupState, alphas: Mapping[int, float]) -> GroupState:
    """The same state with other alphas for some clients; nothing else changes."""
    _require_alpha(state)
    for client, alpha in alphas.items():
        require_number(
            f"mixing: alpha of client {client}", alpha, lambda value: 0 <= value <= 1, "from 0 to 1"
        )
    rows: list[Params] = []
    for client, alpha in alphas.items():
        row = state.private.of(client)
        rows.append({**row, ALPHA: torch.full_like(row[ALPHA], alpha)})
    return state._replace(private=state.private.put(list(alphas), rows))


def tune_alphas(
    result: Result,
    data: FederatedData,
    *,
    grid: Sequence[float] = GRID,
    options: Options | None = None,
) -> Result:
    """Choose for each client the alpha from a grid that is best on its validation data.

    The criterion is the loss, which is more precise than accuracy where examples are few. A
    client without validation data keeps its alpha. The shared model is sent to the clients for it,
    and counted; alphas never leave a client.

    >>> import torch, glocal
    >>> dataset = glocal.load_dataset("digits")
    >>> data = glocal.FederatedData.partition(dataset, glocal.iid(10))
    >>> model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = glocal.classification(model)
    >>> algorithm = glocal.APFL(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=1, clients_per_round=2, progress=False)
    >>> tuned = tune_alphas(result, data, grid=(0.0, 1.0))
    >>> {*alphas_of(tuned)} <= {0.0, 1.0}
    True
    """
    require_instance("mixing: result", result, Result, "the result of a fit")
    require_data("mixing: data", data)
    require_instance("mixing: options", options, Options | None, "a glocal.Options")
    require_items("mixing: grid", grid, float | int, "a list of alphas")
    options, tuned = options or Options(), list[GroupResult]()
    for one in result.by_seed.values():
        _require_tunable(one, data, grid)
        experiment = build_experiment(
            one.algorithm,
            data,
            plan=one.plan,
            seeds=(one.seed,),
            evaluation=Evaluation(new_test=one.new is not None),
            uplink=one.uplink,
        )
        placed = experiment.to(options.torch_device())
        tuned.append(_tuned(one, placed, grid, options))
    return Result.of(tuned)


def _tuned(
    one: GroupResult, placed: Experiment, grid: Sequence[float], options: Options
) -> GroupResult:
    """The result of one seed, tested with the best alphas."""
    val = placed.groups[0].data[0].val
    clients = np.flatnonzero(val.sizes).tolist()
    ledger = one.ledger.add_evaluation(one.state.shared, len(clients))
    engine = options.engine_config()
    losses = losses_by_alpha(one.algorithm, one.state, val, grid=grid, engine=engine)
    alphas = {client: grid[int(losses[:, client].argmin())] for client in clients}
    state = with_alphas(one.state, alphas).alone()
    progress = RunProgress(one.plan.rounds, (state,), ((ledger,),), ((None,),), ({},))
    scoring = Scoring(placed, options, lambda part: ResolvedEngine())
    try:
        [tested] = scoring.test_all(progress)
    finally:
        scoring.close()
    return replace(
        tested,
        selected_round=one.selected_round,
        times_sampled=one.times_sampled,
        times_dropped=one.times_dropped,
        stopped=one.stopped,
    )


def losses_by_alpha(
    algorithm: Algorithm,
    state: GroupState,
    client_data: ClientData,
    *,
    grid: Sequence[float] = GRID,
    engine: EngineConfig | str = "auto",
) -> Floats:
    """Each client's mean loss on its own rows for each alpha of a grid (grid, clients).

    It is NaN for a client without rows.
    """
    task = algorithm.task

    def loss(shared: Params, private: Params, work: Work) -> WeightedSum:
        params, losses = algorithm.personal(shared, private), []
        for batch in batches(work):
            output = algorithm.predict(params, batch.x, batch.mask)
            losses.append(masked_mean(task.per_example(output, batch.y), batch.mask))
        return sum_losses(losses, work.flat_order)

    clients = np.flatnonzero(client_data.sizes).tolist()
    losses = np.full((len(grid), client_data.num_clients), np.nan)
    executor = Executor(loss, engine=engine, trains=False)
    for place, alpha in enumerate(grid):
        private = with_alphas(state, dict.fromkeys(clients, alpha)).private
        tasks: list[ClientTask] = []
        for client in clients:
            order = to_batches(client_data.rows[client], _BATCH_SIZE)[None]
            tasks.append(ClientTask(state.shared, private.of(client), order))
        if tasks:
            with torch.no_grad():
                result = executor(tasks, client_data.examples).stacked()
            losses[place, clients] = result.mean.double().cpu().numpy()
    executor.close()
    return losses


def _require_tunable(one: GroupResult, data: FederatedData, grid: Sequence[float]) -> None:
    """Refuse a result without alphas, data of other clients or inputs, and an empty grid."""
    _require_alpha(one.state)
    if one.num_clients != data.num_clients:
        raise InputError(
            f"mixing: {one.num_clients} clients were trained, but the data have "
            f"{data.num_clients}; give the data they were trained with"
        )
    if not grid:
        raise InputError("mixing: the grid is empty; give at least one alpha from 0 to 1")
    example_output(one.task, data.train.examples.x)


def _require_alpha(state: GroupState) -> None:
    if ALPHA not in state.private.initial:
        raise InputError("mixing: the federation has no alphas; train it with APFL")
