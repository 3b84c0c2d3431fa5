"""The reference: FedAvg as anyone would write it first, an eager PyTorch loop over devices and batches."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import network
from benchmarks.job import Answer, Job, answer, given, timed
from benchmarks.workloads import Workload

TESTED = 100


def main() -> None:
    """Run the job named on the command line."""
    job = given()
    torch.set_num_threads(int(job.options.get("threads", 1)))
    answer(
        {
            "version": f"torch {torch.__version__}",
            **MEASURES[str(job.options.get("measure", "training"))](job),
            **network.device_peak(job.device),
        }
    )


def training(job: Job) -> Answer:
    """Seconds of every round, and the loss at the end."""
    model = network.build(job.workload).to(job.device)
    x, y = network.as_tensors(job.arrays(), job.device)
    told = timed(train(model, job.workload, x, y), job, network.settle_on(job.device))
    return {**told, "loss": network.probe(model, job.arrays())}


def testing(job: Job) -> Answer:
    """Seconds of a Local Test: every device's own model on its first hundred examples, one after the other."""
    model = network.build(job.workload).to(job.device)
    x, y = network.as_tensors(job.arrays(), job.device)
    own = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for _ in range(job.workload.clients)
    ]

    @torch.no_grad()
    def score(device: int) -> float:
        model.load_state_dict(own[device])
        return float((model(x[device, :TESTED]).argmax(1) == y[device, :TESTED]).float().mean())

    tests = ([score(device) for device in range(len(own))] for _ in range(job.all_rounds))
    return timed(tests, job, network.settle_on(job.device))


MEASURES = {"training": training, "local test": testing}


def train(model: nn.Module, workload: Workload, x: Tensor, y: Tensor) -> Iterator[None]:
    """Rounds of FedAvg, for ever; x (devices, examples, ...), y (devices, examples)."""
    generator = torch.Generator().manual_seed(0)
    shared = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    while True:
        clients_per_round = torch.randperm(workload.clients, generator=generator)[
            : workload.clients_per_round
        ].tolist()
        total = {name: torch.zeros_like(tensor) for name, tensor in shared.items()}
        for device in clients_per_round:
            model.load_state_dict(shared)
            descend(model, workload, x[device], y[device])
            for name, tensor in model.state_dict().items():
                total[name].add_(tensor, alpha=len(y[device]))
        examples = sum(len(y[device]) for device in clients_per_round)
        shared = {name: tensor / examples for name, tensor in total.items()}
        model.load_state_dict(shared)
        yield


def descend(model: nn.Module, workload: Workload, x: Tensor, y: Tensor) -> None:
    """One device's epochs of stochastic gradient descent, in place."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr, momentum=workload.momentum)
    for _ in range(workload.local_epochs):
        for rows in torch.randperm(len(y)).to(y.device).split(workload.batch_size):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
