"""glocal on one engine through its public functions; several seeds at once, and Local Test."""

from collections.abc import Iterator

import numpy as np
from torch import nn

import glocal
from benchmarks import network
from benchmarks.job import Job, Measurement, job_from_command_line, print_measurement, time_rounds
from benchmarks.plain import TESTED
from glocal.algorithms.contract import Algorithm
from glocal.core.data import ClientData, Examples
from glocal.core.modules import predictor
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.engines import EngineConfig, Executor
from glocal.evaluate import Evaluator, local_test
from glocal.federate.rounds import Seat, initial_state, simulate_seeds

NUM_CALLS = 1000  # rounds of a usual study: `auto` chooses its engine for them
Loaded = tuple[Algorithm, nn.Module, Params, ClientData]


def main() -> None:
    """Run the job named on the command line."""
    job = job_from_command_line()
    print_measurement(
        {
            "version": glocal.__version__,
            **MEASURES[str(job.options["measure"])](job),
            **network.device_peak(job.device),
        }
    )


def training(job: Job) -> Measurement:
    """Seconds per round of one federation."""
    algorithm, model, params, train = loaded(job)
    executor = Executor(algorithm.client_update, engine=engine(job), num_calls=NUM_CALLS)
    states: list[State] = []

    def rounds() -> Iterator[None]:
        for moment in simulate_seeds(
            algorithm, [Seat(plan(job), train, initial_state(algorithm, params))], executor
        ):
            states[:] = [moment[0][0]]
            yield

    result = time_rounds(rounds(), job, network.synchronizer(job.device))
    model.load_state_dict(algorithm.personal(states[0].shared, states[0].private.initial))
    loss = network.probe(model, job.arrays()) if algorithm.name == "fedavg" else None
    return {**result, "loss": loss, "engine": executor.describe()}


def side_by_side(job: Job) -> Measurement:
    """Seconds per round of several seeds trained together, divided by their number."""
    algorithm, _, params, train = loaded(job)
    seeds = int(job.options["seeds"])
    executor = Executor(algorithm.client_update, engine=engine(job), num_calls=NUM_CALLS)
    seats = [
        Seat(plan(job, seed), train, initial_state(algorithm, params)) for seed in range(seeds)
    ]
    result = time_rounds(
        simulate_seeds(algorithm, seats, executor), job, network.synchronizer(job.device)
    )
    in_a_row = result["in_a_row"] / seeds if result["in_a_row"] else None
    each = [seconds / seeds for seconds in result["seconds_per_round"]]
    return {
        **result,
        "seconds_per_round": each,
        "in_a_row": in_a_row,
        "engine": executor.describe(),
    }


def testing(job: Job) -> Measurement:
    """Seconds of a Local Test: every client's own model on its first hundred examples."""
    algorithm, model, params, train = loaded(job)
    state = initial_state(algorithm, params)
    own = [
        {name: tensor.clone() for name, tensor in state.private.initial.items()}
        for _ in range(train.num_clients)
    ]
    state = state._replace(private=state.private.put(range(train.num_clients), own))
    train = ClientData(train.examples, tuple(rows[:TESTED] for rows in train.rows))
    evaluation = Evaluator(algorithm, predictor(model), engine=engine(job))
    tests = (local_test(evaluation, state, train) for _ in range(job.all_rounds))
    return time_rounds(tests, job, network.synchronizer(job.device))


MEASURES = {"training": training, "seeds": side_by_side, "local test": testing}


def loaded(job: Job) -> Loaded:
    """Algorithm, model, initial weights and clients' data, on the device."""
    model = network.build(job.workload)
    objective, optimizer = (
        glocal.cross_entropy(model),
        glocal.SGD(job.workload.lr, momentum=job.workload.momentum),
    )
    split = glocal.Split.of(model, shared=job.workload.shared)
    makers = {
        "fedavg": lambda: glocal.fedavg(objective, optimizer),
        "lg_fedavg": lambda: glocal.lg_fedavg(objective, optimizer, split=split),
    }
    x, y = network.as_tensors(job.arrays(), job.device)
    rows = np.arange(y.numel()).reshape(y.shape)
    params = {name: tensor.to(job.device) for name, tensor in glocal.params_of(model).items()}
    return (
        makers[str(job.options["algorithm"])](),
        model,
        params,
        ClientData(Examples(x.flatten(0, 1), y.flatten()), tuple(rows)),
    )


def engine(job: Job) -> EngineConfig:
    """The engine of the job."""
    return EngineConfig(str(job.options["engine"]), fused=bool(job.options.get("fused", 1)))


def plan(job: Job, seed: int = 0) -> glocal.Plan:
    """As many rounds as the job may ask for."""
    work = job.workload
    return glocal.Plan(
        rounds=job.all_rounds,
        clients_per_round=work.clients_per_round,
        local_epochs=work.local_epochs,
        batch_size=work.batch_size,
        seed=seed,
    )


if __name__ == "__main__":
    main()
