"""Flower's simulator (Ray), FedAvg: ClientApp and ServerApp as in its guide, no evaluation."""

import os
import sys
from functools import cache
from itertools import pairwise
from time import perf_counter

import flwr
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks import network
from benchmarks.job import Job, Measurement, load, print_measurement
from benchmarks.plain import local_train


@cache
def load_once(path: str) -> tuple[Job, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Job, model and mapped data, loaded once in every worker process."""
    job = load(path)
    torch.set_num_threads(int(job.options["threads"]))
    return job, network.build(job.workload), *network.as_tensors(job.arrays(), "cpu")


def client_app(path: str) -> ClientApp:
    """A client: receives the shared weights, trains on its own rows, returns them."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, model, x, y = load_once(path)
        client = int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        local_train(model, job.workload, x[client], y[client])
        counted = MetricRecord({"num-examples": len(y[client])})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counted})
        return Message(content=content, reply_to=message)

    return app


def server_app(job: Job, result: Measurement) -> ServerApp:
    """The server: all rounds, and the time at the end of each."""
    app, times = ServerApp(), []

    def note_time(server_round: int, arrays: ArrayRecord) -> None:
        times.append(perf_counter())

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        model, work = network.build(job.workload), job.workload
        share = work.clients_per_round / work.clients
        strategy = FedAvg(
            fraction_train=share, fraction_evaluate=0.0, min_available_nodes=work.clients
        )
        first = ArrayRecord(model.state_dict())
        final = strategy.start(
            grid=grid, initial_arrays=first, num_rounds=job.all_rounds, evaluate_fn=note_time
        )
        model.load_state_dict(final.arrays.to_torch_state_dict())
        durations = [after - before for before, after in pairwise(times)]
        result["seconds_per_round"], result["rounds"] = durations[job.warm_up :], len(durations)
        result["loss"] = network.probe(model, job.arrays())

    return app


def main() -> None:
    """Run the job named on the command line."""
    job, result = load(sys.argv[1]), {"version": f"flwr {flwr.__version__}"}
    cpus = int(job.options["cpus"])
    resources = {
        "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count()},
    }
    run_simulation(
        server_app(job, result),
        client_app(sys.argv[1]),
        job.workload.clients,
        backend_config=resources,
    )
    print_measurement(result)


if __name__ == "__main__":
    # imported under its real name, so that workers can unpickle its functions
    from benchmarks.peers import flower

    flower.main()
