"""`fit`: train and test an algorithm on the data of many clients."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from glocal.algorithms.contract import Algorithm, require_algorithm
from glocal.core.bounds import MAX_SEED, MAX_SEEDS, require_count
from glocal.core.checks import require_flag, require_instance
from glocal.core.errors import InputError, describe_value
from glocal.core.sampling import Plan
from glocal.core.store import GroupState
from glocal.core.trees import Params
from glocal.datasets.federated import FederatedData, require_data
from glocal.engines import EngineConfig
from glocal.federate.callbacks import ProgressBar, require_callbacks
from glocal.federate.experiment import Experiment, Group
from glocal.federate.options import Evaluation, Options
from glocal.federate.preparation import prepare_experiment
from glocal.federate.result import Result
from glocal.federate.run import Run
from glocal.wire import Codec, Identity, Ledger


def fit(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    rounds: int,
    clients_per_round: int,
    local_epochs: int = 1,
    batch_size: int = 10,
    seeds: int | Sequence[int] = 1,
    select: str | None = None,
    start_from: Result | None = None,
    uplink: Codec | None = None,
    evaluation: Evaluation | None = None,
    folder: str | Path | None = None,
    device: str | torch.device | None = None,
    engine: str | EngineConfig = "auto",
    callbacks: Sequence[Any] = (),
    progress: bool = True,
) -> Result:
    """Train and test a federation.

    - In each of `rounds`, `clients_per_round` clients are sampled; each goes through its training
      examples `local_epochs` times, in batches of `batch_size`.
    - `seeds` is how many seeds are run side by side, or which: one result with all of them.
    - `select` decides which round is tested: the last one (None), the best on validation data by a
      metric, such as "max auroc", or "best" by the task's first metric. `evaluation` says more.
    - `start_from`, the result of another fit, is a warm start: its model becomes the initial one,
      its traffic is counted, and its numbering of rounds continues.
    - `uplink` encodes uploads, such as `glocal.Int8()`.
    - With a `folder`, everything is saved there; the same call goes on with a run that was stopped.
    - `device` is torch's; None takes a GPU if there is one. `engine` runs the clients.

    Ctrl-C stops a run; with a folder, nothing that was done is lost.

    >>> import torch, glocal
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> clients = {"ulm": (x[:20], y[:20]), "bonn": (x[20:], y[20:])}
    >>> data = glocal.FederatedData.from_tensors(clients)
    >>> task = glocal.classification(torch.nn.Linear(3, 2))
    >>> algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    >>> result = glocal.fit(algorithm, data, rounds=2, clients_per_round=2, progress=False)
    >>> [row.client for row in result.metrics.where(split="test")]
    ['ulm', 'bonn']
    """
    require_callbacks(callbacks)
    require_flag("fit: progress", progress)
    experiment = build_experiment(
        algorithm,
        data,
        plan=Plan(rounds, clients_per_round, local_epochs, batch_size),
        seeds=as_seeds(seeds),
        evaluation=_evaluation(evaluation, select),
        start_from=start_from,
        uplink=uplink,
    )
    run = Run(
        experiment,
        folder=folder,
        options=_options(device, engine),
        callbacks=[*callbacks, *([ProgressBar()] if progress else [])],
    )
    return run.to_end()


def build_experiment(
    algorithm: Algorithm,
    data: FederatedData,
    *,
    plan: Plan,
    seeds: tuple[int, ...] = (0,),
    evaluation: Evaluation | None = None,
    start_from: Result | None = None,
    uplink: Codec | None = None,
) -> Experiment:
    """The experiment of a `fit`: data as the task takes them, and the warm start."""
    require_algorithm("fit: algorithm", algorithm)
    require_data("fit: data", data)
    group = Group(algorithm, (data,))
    if start_from is not None:
        group, first_round = _warm_started(group, start_from, seeds)
        plan = replace(plan, first_round=first_round)
    experiment = Experiment(
        (group,),
        plan,
        seeds=seeds,
        evaluation=Evaluation() if evaluation is None else evaluation,
        uplink=Identity() if uplink is None else uplink,
    )
    return prepare_experiment(experiment)


def warm_start_params(algorithm: Algorithm, state: GroupState) -> Params:
    """The model that others start from: that of a client which has not trained.

    What it would be sent is as it is now.
    """
    if not state.shared:
        raise InputError(
            f"warm start: {algorithm.name} shares nothing, so there is no one model to start from; "
            "use another experiment"
        )
    sent = algorithm.download(state.shared, state.profiles.initial)
    initial = algorithm.personal(state.shared, state.private.initial)
    params = {}
    for name, tensor in algorithm.task.initial_params().items():
        is_sent = name in sent and sent[name].shape == tensor.shape  # not models of clusters
        params[name] = sent[name] if is_sent else initial.get(name, tensor)
    return params


def as_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """A number of seeds, from 0 on, or the seeds themselves.

    >>> as_seeds(3), as_seeds([7, 11])
    ((0, 1, 2), (7, 11))
    """
    if isinstance(seeds, Sequence) and not isinstance(seeds, str):
        for seed in seeds:
            require_count("fit: a seed", seed, 0, MAX_SEED)
        return tuple(map(int, seeds))
    require_count("fit: seeds", seeds, 1, MAX_SEEDS)
    return tuple(range(seeds))


def _warm_started(group: Group, start_from: Result, seeds: tuple[int, ...]) -> tuple[Group, int]:
    """The group with params and traffic of a result, and the round to go on from."""
    if not isinstance(start_from, Result):
        raise InputError(
            f"fit: start_from is {describe_value(start_from)}; "
            "the result of another fit was expected"
        )
    earlier = start_from.by_seed
    missing = [seed for seed in seeds if seed not in earlier]
    if missing and len(earlier) > 1:
        raise InputError(
            f"fit: start_from has no seed {missing[0]}; it has {', '.join(map(str, earlier))}"
        )
    first = next(iter(earlier.values()))
    own = [earlier.get(seed, first) for seed in seeds]
    expected = group.algorithm.task.initial_params().keys()
    given = first.algorithm.task.initial_params().keys()
    if given != expected:
        raise InputError(
            f"fit: start_from is of another model; only one of the two has "
            f"{sorted(given ^ expected)}"
        )
    params = tuple(warm_start_params(each.algorithm, each.state) for each in own)
    spent: tuple[Ledger, ...] = tuple(each.ledger for each in own)
    return replace(group, params=params, spent=spent), first.plan.total_rounds


def _evaluation(evaluation: Evaluation | None, select: str | None) -> Evaluation:
    own = Evaluation() if evaluation is None else evaluation
    require_instance("fit: evaluation", own, Evaluation, "a glocal.Evaluation")
    return own if select is None else replace(own, select=select)


def _options(device: str | torch.device | None, engine: str | EngineConfig) -> Options:
    require_instance("fit: device", device, str | torch.device | None, "a device of torch's")
    name = "auto" if device is None else str(device)
    if isinstance(engine, EngineConfig):
        return Options(
            name, engine.name, engine.chunk_size, engine.workers, engine.fused, engine.precision
        )
    if not isinstance(engine, str):
        raise InputError(
            f"fit: engine is {describe_value(engine)}; a name or a glocal.EngineConfig was expected"
        )
    return Options(name, engine)
