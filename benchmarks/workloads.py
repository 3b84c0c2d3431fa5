"""The workloads as plain values that every tool can read: layers, data and local training.

This file needs only numpy: peers import it in environments without glocal, one of them without
torch.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np

Layer = tuple[str, *tuple[int, ...]]
Shape = tuple[int, ...]

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A network and its data.

    Layers are ("linear", in, out), ("conv", in, out, kernel), ("pool", size), "relu" or "flatten".
    """

    name: str
    summary: str
    source: str
    shape: Shape
    layers: tuple[Layer, ...]
    shared: tuple[str, ...]
    clients: int
    examples: int
    clients_per_round: int
    batch_size: int
    lr: float
    momentum: float
    local_epochs: int = 1

    @property
    def steps(self) -> int:
        """Steps of one client in one round."""
        return self.local_epochs * -(-self.examples // self.batch_size)


def dense(*widths: int) -> tuple[Layer, ...]:
    """Linear layers with ReLU between."""
    layers: list[Layer] = []
    for before, after in pairwise(widths):
        layers += [("linear", before, after), ("relu",)]
    return tuple(layers[:-1])


_RELU_POOL: tuple[Layer, ...] = (("relu",), ("pool", 2))

MLP = Workload(
    name="A",
    summary="MNIST, MLP 784-512-256-256-128-10, 100 clients x 600, 10 per round, batch size 10",
    source="mnist",
    shape=(1, 28, 28),
    layers=(("flatten",), *dense(784, 512, 256, 256, 128, CLASSES)),
    shared=("layer3", "layer4", "layer5"),
    clients=100,
    examples=600,
    clients_per_round=10,
    batch_size=10,
    lr=0.05,
    momentum=0.5,
)
LENET = Workload(
    name="B",
    summary="CIFAR-10, LeNet-5, 100 clients x 500, 10 per round, batch size 50",
    source="cifar10",
    shape=(3, 32, 32),
    layers=(
        ("conv", 3, 6, 5),
        *_RELU_POOL,
        ("conv", 6, 16, 5),
        *_RELU_POOL,
        ("flatten",),
        *dense(400, 120, 100, CLASSES),
    ),
    shared=("layer1", "layer2"),
    clients=100,
    examples=500,
    clients_per_round=10,
    batch_size=50,
    lr=0.05,
    momentum=0.5,
)
# pfl-research's benchmark on CIFAR-10 without dropout, so that every tool does the same work
WIDE_CNN = Workload(
    name="C",
    summary="CIFAR-10, conv 32 - conv 64 - dense 128 (1.6 M), 1,000 clients x 50, 50 per round, "
    "batch size 10",
    source="cifar10",
    shape=(3, 32, 32),
    layers=(
        ("conv", 3, 32, 3),
        ("relu",),
        ("conv", 32, 64, 3),
        *_RELU_POOL,
        ("flatten",),
        *dense(12544, 128, CLASSES),
    ),
    shared=("layer1", "layer2"),
    clients=1000,
    examples=50,
    clients_per_round=50,
    batch_size=10,
    lr=0.1,
    momentum=0.0,
)
WORKLOADS = {workload.name: workload for workload in (MLP, LENET, WIDE_CNN)}


def widened(workload: Workload, factor: float) -> Workload:
    """The MLP with the width of every hidden layer times a factor."""
    hidden = [round(factor * width) for width in (512, 256, 256, 128)]
    return replace(workload, layers=(("flatten",), *dense(784, *hidden, CLASSES)))


def parameters(workload: Workload) -> int:
    """The number of parameters."""
    return sum(_size(layer) for layer in workload.layers)


def _size(layer: Layer) -> int:
    kind, *numbers = layer
    if kind == "linear":
        return (numbers[0] + 1) * numbers[1]
    return (numbers[0] * numbers[2] ** 2 + 1) * numbers[1] if kind == "conv" else 0


def write_arrays(workload: Workload, folder: Path) -> str:
    """Write x.npy (clients, examples, ...) and y.npy (clients, examples); returns their source."""
    shape = (workload.clients, workload.examples)
    x, y, source = _real(workload) or _random(workload)
    rows = np.random.default_rng(0).permutation(len(y))[: prod(shape)]
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "x.npy", x[rows].reshape(*shape, *workload.shape))
    np.save(folder / "y.npy", y[rows].reshape(shape))
    return source


Data = tuple[np.ndarray, np.ndarray, str]


def _real(workload: Workload) -> Data | None:
    """The training set, where GLOCAL_DATA or the cache has it and it is large enough."""
    from glocal import datasets

    if (
        workload.source not in datasets.SOURCES
        or datasets.source_status(workload.source) == "not downloaded"
    ):
        return None
    examples = datasets.load_dataset(workload.source).train
    enough = examples.num_rows >= workload.clients * workload.examples
    return (examples.x.numpy(), examples.y.numpy(), f"{workload.source}, real") if enough else None


def _random(workload: Workload) -> Data:
    """Random numbers of the same shape: the time is the same, the loss is meaningless."""
    generator, count = np.random.default_rng(0), workload.clients * workload.examples
    x = generator.standard_normal((count, *workload.shape), dtype=np.float32)
    return (
        x,
        generator.integers(CLASSES, size=count),
        f"random numbers in the shape of {workload.source}",
    )
