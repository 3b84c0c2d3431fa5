"""Pre-training: each client trains its private part alone before the first round."""

from collections.abc import Callable
from dataclasses import replace

from glocal.algorithms.adapt_only import AdaptOnly
from glocal.core.store import TrainingState
from glocal.engines import Executor, ResolvedEngine
from glocal.federate.experiment import Experiment, Group
from glocal.federate.options import Options
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    Reply,
    client_step,
    require_counted,
    simulate,
    start_wires,
)

_FIRST_ROUND = 10**6  # its address of randomness: no run has so many rounds
Resolve = Callable[[str], ResolvedEngine]


def pretrain(
    experiment: Experiment,
    states: tuple[TrainingState, ...],
    options: Options,
    resolve: Resolve,
) -> tuple[TrainingState, ...]:
    """The states after each client trained its private part alone; nothing is sent for it."""
    after = list(states)
    for place, group in enumerate(experiment.groups):
        own = [_only_group(state, place) for state in after]
        part = f"pretraining {group.name}".strip()
        trained = _pretrain_group(experiment, group, own, options, resolve(part))
        for seed_place, state in enumerate(trained):
            private = list(after[seed_place].private)
            private[place] = state.private[0]
            after[seed_place] = after[seed_place]._replace(private=tuple(private))
    return tuple(after)


def _pretrain_group(
    experiment: Experiment,
    group: Group,
    states: list[TrainingState],
    options: Options,
    resolved: ResolvedEngine,
) -> list[TrainingState]:
    before = experiment.pretraining
    assert before is not None
    algorithm = AdaptOnly.to(before.algorithm or group.algorithm)
    [wire] = start_wires([GroupSetup(algorithm, group.initial_params(0))])
    replicas: list[Replica] = []
    for seed_place, plan in enumerate(experiment.plans()):
        alone = replace(
            plan,
            rounds=before.epochs,
            clients_per_round=group.num_clients,
            local_epochs=1,
            first_round=_FIRST_ROUND,
        )
        data = group.data_of(seed_place)
        train = data.train if before.labels else data.unlabeled or data.train
        replicas.append(Replica((GroupClients(algorithm, train, wire),), alone))
    executor: Executor[Reply] = Executor(
        client_step(algorithm, wire),
        engine=options.engine_config(),
        num_calls=before.epochs,
        **resolved._asdict(),
    )
    rounds = range(_FIRST_ROUND, _FIRST_ROUND + before.epochs)
    try:
        for finished in simulate(replicas, states, [executor], rounds):
            require_counted(finished, experiment.seeds, group.data[0].train.label)
            states = [state for state, _ in finished]
    finally:
        executor.close()
    return states


def _only_group(state: TrainingState, place: int) -> TrainingState:
    private, profiles = (state.private[place],), (state.profiles[place],)
    return TrainingState(state.shared, {}, private, profiles)
