"""glocal on one engine, through its public functions; also several seeds side by side, and the Local Test."""

from collections.abc import Iterator

import numpy as np
from torch import nn

import glocal
from benchmarks import network
from benchmarks.job import Answer, Job, answer, given, timed
from benchmarks.plain import TESTED
from glocal.algorithms.contract import Algorithm
from glocal.core.data import Examples, Holdings
from glocal.core.modules import predictor
from glocal.core.store import State
from glocal.core.trees import Params
from glocal.engines import Engine, OverDevices
from glocal.evaluate import Evaluation, local_test
from glocal.federate.rounds import Seat, begin, simulate_seeds

LONG = 1000  # rounds of a study as people run it: what `auto` does for those is measured
Loaded = tuple[Algorithm, nn.Module, Params, Holdings]


def main() -> None:
    """Run the job named on the command line."""
    job = given()
    answer({"version": glocal.__version__, **MEASURES[str(job.options["measure"])](job), **network.device_peak(job.device)})


def training(job: Job) -> Answer:
    """Seconds per round of one federation."""
    algorithm, model, params, train = loaded(job)
    over = OverDevices(algorithm.client_update, engine=engine(job), calls=LONG)
    states: list[State] = []

    def rounds() -> Iterator[None]:
        for moment in simulate_seeds(algorithm, [Seat(plan(job), train, begin(algorithm, params))], over):
            states[:] = [moment[0][0]]
            yield

    told = timed(rounds(), job, network.settle_on(job.device))
    model.load_state_dict(algorithm.personal(states[0].shared, states[0].private.initial))
    loss = network.probe(model, job.arrays()) if algorithm.name == "fedavg" else None
    return {**told, "loss": loss, "engine": over.told()}


def side_by_side(job: Job) -> Answer:
    """Seconds per round of several seeds trained together, divided by their number."""
    algorithm, _, params, train = loaded(job)
    seeds = int(job.options["seeds"])
    over = OverDevices(algorithm.client_update, engine=engine(job), calls=LONG)
    seats = [Seat(plan(job, seed), train, begin(algorithm, params)) for seed in range(seeds)]
    told = timed(simulate_seeds(algorithm, seats, over), job, network.settle_on(job.device))
    in_a_row = told["in_a_row"] / seeds if told["in_a_row"] else None
    each = [seconds / seeds for seconds in told["seconds_per_round"]]
    return {**told, "seconds_per_round": each, "in_a_row": in_a_row, "engine": over.told()}


def testing(job: Job) -> Answer:
    """Seconds of a Local Test: every device's own model on its first hundred examples."""
    algorithm, model, params, train = loaded(job)
    state = begin(algorithm, params)
    own = [{name: tensor.clone() for name, tensor in state.private.initial.items()} for _ in range(train.devices)]
    state = state._replace(private=state.private.put(range(train.devices), own))
    held = Holdings(train.examples, tuple(rows[:TESTED] for rows in train.rows))
    evaluation = Evaluation(algorithm, predictor(model), engine=engine(job))
    tests = (local_test(evaluation, state, held) for _ in range(job.all_rounds))
    return timed(tests, job, network.settle_on(job.device))


MEASURES = {"training": training, "seeds": side_by_side, "local test": testing}


def loaded(job: Job) -> Loaded:
    """Algorithm, model, first weights and who holds what, on the computing device."""
    model = network.build(job.workload)
    objective, optimiser = glocal.cross_entropy(model), glocal.sgd(job.workload.rate, momentum=job.workload.momentum)
    split = glocal.Split.of(model, shared=job.workload.shared)
    makers = {
        "fedavg": lambda: glocal.fedavg(objective, optimiser),
        "lg_fedavg": lambda: glocal.lg_fedavg(objective, optimiser, split=split),
    }
    x, y = network.as_tensors(job.arrays(), job.device)
    rows = np.arange(y.numel()).reshape(y.shape)
    params = {name: tensor.to(job.device) for name, tensor in glocal.params_of(model).items()}
    return makers[str(job.options["algorithm"])](), model, params, Holdings(Examples(x.flatten(0, 1), y.flatten()), tuple(rows))


def engine(job: Job) -> Engine:
    """The engine that is asked for."""
    return Engine(str(job.options["engine"]), fused=bool(job.options.get("fused", 1)))


def plan(job: Job, seed: int = 0) -> glocal.Plan:
    """As many rounds as the job may ask for."""
    work = job.workload
    return glocal.Plan(rounds=job.all_rounds, cohort=work.cohort, epochs=work.epochs, batch=work.batch, seed=seed)


if __name__ == "__main__":
    main()
