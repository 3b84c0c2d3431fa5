"""The reference: FedAvg as an eager PyTorch loop over clients and batches."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import network
from benchmarks.job import Job, Measurement, job_from_command_line, print_measurement, time_rounds
from benchmarks.workloads import Workload

TESTED = 100


def main() -> None:
    """Run the job named on the command line."""
    job = job_from_command_line()
    torch.set_num_threads(int(job.options.get("threads", 1)))
    print_measurement(
        {
            "version": f"torch {torch.__version__}",
            **MEASURES[str(job.options.get("measure", "training"))](job),
            **network.device_peak(job.device),
        }
    )


def training(job: Job) -> Measurement:
    """Seconds of every round, and the loss at the end."""
    model = network.build(job.workload).to(job.device)
    x, y = network.as_tensors(job.arrays(), job.device)
    result = time_rounds(train(model, job.workload, x, y), job, network.synchronizer(job.device))
    return {**result, "loss": network.probe(model, job.arrays())}


def testing(job: Job) -> Measurement:
    """Seconds of a Local Test: each client's own model on its first hundred examples, in turn."""
    model = network.build(job.workload).to(job.device)
    x, y = network.as_tensors(job.arrays(), job.device)
    own = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(job.workload.clients)
    ]

    @torch.no_grad()
    def accuracy(client: int) -> float:
        model.load_state_dict(own[client])
        predicted = model(x[client, :TESTED]).argmax(1)
        return float((predicted == y[client, :TESTED]).float().mean())

    def rounds() -> Iterator[list[float]]:
        for _ in range(job.all_rounds):
            yield [accuracy(client) for client in range(len(own))]

    return time_rounds(rounds(), job, network.synchronizer(job.device))


MEASURES = {"training": training, "local test": testing}


def train(model: nn.Module, workload: Workload, x: Tensor, y: Tensor) -> Iterator[None]:
    """Rounds of FedAvg without end; x (clients, examples, ...), y (clients, examples)."""
    generator = torch.Generator().manual_seed(0)
    shared = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    while True:
        order = torch.randperm(workload.clients, generator=generator)
        sampled = order[: workload.clients_per_round].tolist()
        total = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        for client in sampled:
            model.load_state_dict(shared)
            local_train(model, workload, x[client], y[client])
            for name, tensor in model.state_dict().items():
                total[name].add_(tensor, alpha=len(y[client]))
        examples = sum(len(y[client]) for client in sampled)
        shared = {name: tensor / examples for name, tensor in total.items()}
        model.load_state_dict(shared)
        yield


def local_train(model: nn.Module, workload: Workload, x: Tensor, y: Tensor) -> None:
    """One client's local epochs of SGD, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, momentum=workload.momentum)
    for _ in range(workload.local_epochs):
        for rows in torch.randperm(len(y)).to(y.device).split(workload.batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
