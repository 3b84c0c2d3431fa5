"""What is refused before an experiment starts, because it would fail later."""

from dataclasses import replace

import numpy as np
import torch

from glocal.core import trees
from glocal.core.data import ClientData
from glocal.core.errors import InputError, describe_error
from glocal.core.sampling import sample_available, sample_clients
from glocal.datasets.federated import FederatedData
from glocal.engines import ClientTask
from glocal.engines.looped import LoopedEngine
from glocal.federate.experiment import Experiment, Group, Phase
from glocal.federate.outputs import validate_task_data
from glocal.federate.rounds import GroupSetup, client_step, start_state, start_wires
from glocal.wire import require_enough_clients


def require_trainable(experiment: Experiment) -> None:
    """Refuse what would fail later.

    These are data that do not fit the model, too few clients, no validation data to select a round
    on, pre-training of nothing, a client that is available and has no data, and a model that cannot
    be trained. An aggregation that bears so many wrong uploads must get more than those.
    """
    if not experiment.phases:
        sample_clients(experiment.plan, experiment.num_clients, experiment.plan.first_round)
    aggregation = experiment.groups[0].algorithm.aggregation
    require_enough_clients(aggregation, _fewest_sampled(experiment))
    for place, group in enumerate(experiment.groups):
        try:
            _require_group(experiment, place)
        except InputError as error:
            if not group.name:
                raise
            raise type(error)(f"group '{group.name}': {error}") from error


def _fewest_sampled(experiment: Experiment) -> int:
    """The number of clients that are sampled in a round; of several phases, the smallest."""
    counts = []
    for phase in experiment.phases:
        sampled = sample_available(experiment.plan, phase.availability, phase.first_round)
        counts.append(len(sampled))
    return min(counts, default=experiment.plan.clients_per_round)


def _require_group(experiment: Experiment, place: int) -> None:
    group, seen = experiment.groups[place], set[int]()
    for phase_place, phase in enumerate(experiment.all_phases):
        for seed_place in range(len(experiment.seeds)):
            data = experiment.data_at(phase_place, place, seed_place)
            if phase is not None:
                _require_present(phase, data, experiment.first_clients[place])
                data = _without_empty(data)
            if id(data) not in seen:
                seen.add(id(data))
                validate_task_data(group.algorithm.task, data)
                _require_selection(experiment, group, data)
    before = experiment.pretraining
    if before is not None:
        algorithm = before.algorithm or group.algorithm
        if not algorithm.init(group.initial_params(0)).private:
            raise InputError(
                f"{algorithm.name}: it has no private part to pre-train; do without pre-training"
            )
    _try_one_step(experiment, group)


def _require_selection(experiment: Experiment, group: Group, data: FederatedData) -> None:
    evaluation = experiment.evaluation
    evaluation.criterion(group.algorithm.task)
    if evaluation.selects and not data.val.sizes.any():
        raise InputError(
            f"evaluation: select = '{evaluation.select}' needs validation data, and no client has "
            "any; hold some out, or use 'last'"
        )


def _require_present(phase: Phase, data: FederatedData, first: int) -> None:
    """Refuse available clients that have no training examples."""
    for client in sorted(phase.available()):
        own = client - first
        if 0 <= own < data.num_clients and not len(data.train.rows[own]):
            raise InputError(
                f"availability: {data.train.label(own)} is available from round "
                f"{phase.first_round} on and has no training examples; let it be absent, or give "
                "it some"
            )


def _without_empty(data: FederatedData) -> FederatedData:
    """The data of the clients that have training examples; others are absent in this phase."""
    if data.train.sizes.all():
        return data
    some = np.flatnonzero(data.train.sizes).tolist()

    def only(subset: ClientData) -> ClientData:
        names = tuple(subset.names[client] for client in some) if subset.names else ()
        return replace(subset, rows=tuple(subset.rows[client] for client in some), names=names)

    return data.map_subsets(only)


def _try_one_step(experiment: Experiment, group: Group) -> None:
    """Train on two rows and then on three, and discard the result.

    What fails here would fail in the first round. A loss that wrongly gives one value per class
    may by chance give as many values as there are rows, but not for two and three rows.
    """
    cpu, data = torch.device("cpu"), group.data[0]
    largest = int(data.train.sizes.argmax())
    examples = data.train.examples.take(data.train.rows[largest][:3]).to(cpu)
    own = np.arange(examples.num_rows)
    algorithm = group.algorithm
    setup = GroupSetup(algorithm, trees.to(group.initial_params(0), cpu))
    wires = start_wires([setup], experiment.uplink)
    state = start_state([setup], wires)
    message = algorithm.download(state.shared, state.profiles[0].initial)
    epochs = algorithm.num_epochs(1)
    try:
        for rows in (2, 3):  # a client with fewer examples repeats some
            order = np.tile(np.resize(own, (1, 1, rows)), (epochs, 1, 1))
            task = ClientTask(message, state.private[0].initial, order)
            engine = LoopedEngine(client_step(algorithm, wires[0]))
            engine([task], examples, experiment.plan.first_round)
    except InputError:
        raise
    except Exception as error:  # a user's own module may raise anything
        raise InputError(f"model: it cannot be trained ({describe_error(error)})") from error
