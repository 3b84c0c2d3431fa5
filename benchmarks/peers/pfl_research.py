"""pfl (apple/pfl-research), FederatedAveraging on a PyTorch model, in one process or in several."""

import os
import socket
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from time import perf_counter

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import network
from benchmarks.job import Job, job_from_command_line, print_measurement


class Classifier(nn.Module):
    """The network with the two methods that pfl requires."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        self.eval() if eval else self.train()
        return functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback):
    """Records when each round ends."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.times.append(perf_counter())
        return False, Metrics()


def simulate(job: Job) -> None:
    """This process's share of the job; the first process prints the result."""
    torch.set_num_threads(int(job.options.get("threads", 1)))
    work, (x, y) = job.workload, network.as_tensors(job.arrays(), "cpu")
    network_of_pfl = Classifier(network.build(work))
    central = torch.optim.SGD(network_of_pfl.parameters(), lr=1.0)
    model = PyTorchModel(network_of_pfl, partial(torch.optim.SGD, momentum=work.momentum), central)
    sampler = get_user_sampler("random", list(range(work.clients)))
    users = FederatedDataset(lambda user: Dataset((x[user], y[user])), sampler)
    backend = SimulatedBackend(
        training_data=users, val_data=users, postprocessors=[WeightByDatapoints()]
    )
    clock = Clock()
    FederatedAveraging().run(
        # only the first round, which is not timed, has an evaluation
        NNAlgorithmParams(
            job.all_rounds,
            evaluation_frequency=10**9,
            train_cohort_size=work.clients_per_round,
            val_cohort_size=None,
        ),
        backend,
        model,
        NNTrainHyperParams(
            local_batch_size=work.batch_size,
            local_num_epochs=work.local_epochs,
            local_learning_rate=work.lr,
        ),
        NNEvalHyperParams(local_batch_size=None),
        [clock],
    )
    if os.environ.get("PFL_WORKER_RANK", "0") == "0":
        durations = [after - before for before, after in pairwise(clock.times)]
        result = {"seconds_per_round": durations[job.warm_up - 1 :], "rounds": len(clock.times)}
        print_measurement(
            {
                **result,
                "version": f"pfl {version('pfl')}",
                "loss": network.probe(network_of_pfl, job.arrays()),
            }
        )
    if torch.distributed.is_initialized():
        # the first process holds the store of the process group: it must not exit before the others
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def launch(processes: int) -> int:
    """Start this script once for every process, as in pfl's guide to distributed simulation.

    Returns the largest exit status.
    """
    addresses = ",".join(f"localhost:{port}" for port in _free_ports(processes))
    settings = [
        {**os.environ, "PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)}
        for rank in range(processes)
    ]
    workers = [subprocess.Popen([sys.executable, *sys.argv], env=each) for each in settings]
    return max(abs(worker.wait()) for worker in workers)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("localhost", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def main() -> None:
    """Run the job named on the command line."""
    job = job_from_command_line()
    processes = int(job.options.get("processes", 1))
    if processes > 1 and "PFL_WORKER_RANK" not in os.environ:
        sys.exit(launch(processes))
    simulate(job)


if __name__ == "__main__":
    main()
