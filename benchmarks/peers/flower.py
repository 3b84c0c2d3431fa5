"""Flower's simulator (Ray), FedAvg: ClientApp and ServerApp as its documentation has them, evaluation left out."""

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
from benchmarks.job import Answer, Job, answer, load
from benchmarks.plain import descend


@cache
def kept(path: str) -> tuple[Job, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Job, model and mapped data: made once in every worker process, which is kinder than what is usual."""
    job = load(path)
    torch.set_num_threads(int(job.options["threads"]))
    return job, network.build(job.workload), *network.as_tensors(job.arrays(), "cpu")


def client_app(path: str) -> ClientApp:
    """A device: takes the shared weights, trains on its own rows, sends them back."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, model, x, y = kept(path)
        device = int(context.node_config["partition-id"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        descend(model, job.workload, x[device], y[device])
        counted = MetricRecord({"num-examples": len(y[device])})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": counted})
        return Message(content=content, reply_to=message)

    return app


def server_app(job: Job, told: Answer) -> ServerApp:
    """The server: all rounds, with the time at the end of each."""
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
        result = strategy.start(
            grid=grid, initial_arrays=first, num_rounds=job.all_rounds, evaluate_fn=note_time
        )
        model.load_state_dict(result.arrays.to_torch_state_dict())
        lasted = [after - before for before, after in pairwise(times)]
        told["seconds_per_round"], told["rounds"] = lasted[job.warm_up :], len(lasted)
        told["loss"] = network.probe(model, job.arrays())

    return app


def main() -> None:
    """Run the job named on the command line."""
    job, told = load(sys.argv[1]), {"version": f"flwr {flwr.__version__}"}
    cpus = int(job.options["cpus"])
    resources = {
        "client_resources": {"num_cpus": cpus, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count()},
    }
    run_simulation(
        server_app(job, told),
        client_app(sys.argv[1]),
        job.workload.clients,
        backend_config=resources,
    )
    answer(told)


if __name__ == "__main__":
    # under its real name, so that workers can find what they are sent
    from benchmarks.peers import flower

    flower.main()
