"""glocal on one engine through its public functions; several seeds at once, and Local Test."""

from collections.abc import Iterator

import numpy as np
import torch

import glocal
from benchmarks import network
from benchmarks.job import Job, Measurement, job_from_command_line, print_measurement, time_rounds
from benchmarks.plain import TESTED
from benchmarks.simulation import Simulation
from glocal.algorithms import FedAvg, LGFedAvg
from glocal.algorithms.contract import Algorithm
from glocal.core import trees
from glocal.core.data import ClientData, Examples
from glocal.core.sampling import Plan
from glocal.core.store import GroupState
from glocal.engines import EngineConfig
from glocal.evaluate import Evaluator, local_test


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
    algorithm = build_algorithm(job)
    simulation = simulated(job, algorithm, seeds=1)
    states: list[GroupState] = []

    def rounds() -> Iterator[None]:
        for [(state, _)] in simulation.rounds():
            states[:] = [state.group()]
            yield

    result = time_rounds(rounds(), job, network.synchronizer(job.device))
    loss = None
    if not states[0].private.initial:  # everybody has the same model
        model = algorithm.task.model
        model.load_state_dict(states[0].shared)
        loss = network.probe(model, job.arrays())
    return {**result, "loss": loss, "engine": simulation.executor.describe()}


def side_by_side(job: Job) -> Measurement:
    """Seconds per round of several seeds trained together, divided by their number."""
    seeds = int(job.options["seeds"])
    simulation = simulated(job, build_algorithm(job), seeds=seeds)
    result = time_rounds(simulation.rounds(), job, network.synchronizer(job.device))
    in_a_row = result["in_a_row"] / seeds if result["in_a_row"] else None
    each = [seconds / seeds for seconds in result["seconds_per_round"]]
    return {
        **result,
        "seconds_per_round": each,
        "in_a_row": in_a_row,
        "engine": simulation.executor.describe(),
    }


def testing(job: Job) -> Measurement:
    """Seconds of a Local Test: every client's own model on its first hundred examples."""
    algorithm = build_algorithm(job)
    simulation = simulated(job, algorithm, seeds=1)
    train = simulation.replicas[0].groups[0].train
    state = simulation.states[0].group()
    clients = range(train.num_clients)
    own = [{name: t.clone() for name, t in state.private.initial.items()} for _ in clients]
    state = state._replace(private=state.private.put(clients, own))
    tested = ClientData(train.examples, tuple(rows[:TESTED] for rows in train.rows))
    evaluator = Evaluator(algorithm, engine=engine(job))
    tests = (local_test(evaluator, state, tested) for _ in range(job.all_rounds))
    return time_rounds(tests, job, network.synchronizer(job.device))


MEASURES = {"training": training, "seeds": side_by_side, "local test": testing}


def build_algorithm(job: Job) -> Algorithm:
    """The job's algorithm on the workload's network."""
    work = job.workload
    task = glocal.classification(network.build(work))
    optimizer = glocal.SGD(work.lr, momentum=work.momentum)
    if job.options["algorithm"] == "fedavg":
        return FedAvg(task, optimizer=optimizer)
    return LGFedAvg(task, shared=work.shared, optimizer=optimizer)


def simulated(job: Job, algorithm: Algorithm, *, seeds: int) -> Simulation:
    """The clients of a job with this number of seeds, on the device."""
    x, y = network.as_tensors(job.arrays(), job.device)
    rows = np.arange(y.numel()).reshape(y.shape)
    train = ClientData(Examples(x.flatten(0, 1), y.flatten()), tuple(rows))
    params = trees.to(algorithm.task.initial_params(), torch.device(job.device))
    plans = [plan(job, seed) for seed in range(seeds)]
    return Simulation.of(algorithm, params, train=train, plans=plans, engine=engine(job))


def engine(job: Job) -> EngineConfig:
    """The engine of the job."""
    return EngineConfig(str(job.options["engine"]), fused=bool(job.options.get("fused", 1)))


def plan(job: Job, seed: int) -> Plan:
    """As many rounds as the job may ask for."""
    work = job.workload
    return Plan(
        rounds=job.all_rounds,
        clients_per_round=work.clients_per_round,
        local_epochs=work.local_epochs,
        batch_size=work.batch_size,
        seed=seed,
    )


if __name__ == "__main__":
    main()
