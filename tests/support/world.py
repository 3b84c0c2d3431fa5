"""A small federation, a few models, and every algorithm: what the contract is checked on."""

import inspect
from collections import deque

import torch
from torch import nn

from glocal import algorithms
from glocal.core import trees
from glocal.core.optimizers import sgd
from glocal.core.split import Split
from glocal.core.training import cross_entropy
from glocal.datasets.federated import from_tensors

FEATURES, CLASSES = 6, 3
SIZES = (23, 4, 31, 1, 12, 17)
DEVICES = len(SIZES)


def plain():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, CLASSES))


def with_batch_norm():
    return nn.Sequential(
        nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)
    )


def with_dropout():
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))


def convolutional():
    filters = [
        nn.Unflatten(1, (1, FEATURES)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Flatten(),
    ]
    return nn.Sequential(*filters, nn.Linear(4 * FEATURES, CLASSES))


MODELS = {
    "plain": plain,
    "batch norm": with_batch_norm,
    "dropout": with_dropout,
    "convolution": convolutional,
}


class Branching(nn.Module):
    """Goes one way or the other by what it sees: neither vmap nor a trace can follow."""

    def __init__(self):
        super().__init__()
        self.body = plain()

    def forward(self, x):
        return self.body(x) if bool(x.sum() > 0) else self.body(-x)


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def __init__(self):
        super().__init__()
        self.body = plain()

    def forward(self, x):
        return self.body(nn.functional.dropout(x, 0.3, self.training))


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def clients(sizes=SIZES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(size, FEATURES, generator=generator) for size in sizes]
    y = [torch.randint(CLASSES, (size,), generator=generator) for size in sizes]
    return list(zip(x, y, strict=True))


def federation(sizes=SIZES, seed=0, **shares):
    return from_tensors(clients(sizes, seed), **{"test": 0.2, "validation": 0.1, **shares})


def first_half(model):
    """A split that leaves weights and, if there are any, buffers on both sides."""
    names = [name for name, _ in model.named_children()]
    with_tensors = [name for name in names if list(model.get_submodule(name).parameters())]
    return Split.of(model, local=with_tensors[: len(with_tensors) // 2 + len(with_tensors) % 2])


def algorithm(name, model, *, optimizer=None, total=DEVICES, **hyperparameters):
    """An exported algorithm, given what its signature asks for."""
    make = getattr(algorithms, name)
    offered = {"split": lambda: first_half(model), "num_clients": lambda: total}
    wanted = inspect.signature(make).parameters
    given = {key: offer() for key, offer in offered.items() if key in wanted}
    return make(
        cross_entropy(model), optimizer or sgd(0.1, momentum=0.5), **{**given, **hyperparameters}
    )


def last(rounds):
    """The last state and report of a simulation."""
    return deque(rounds, maxlen=1).pop()


def distance(left, right):
    """The largest difference between two trees, counters included."""
    trees.require_same_names(left, right, "distance")
    gaps = [
        (tensor.double() - right[name].double()).abs().max().item()
        for name, tensor in left.items()
        if tensor.numel()
    ]
    assert all(gap == gap for gap in gaps), "NaN in a tree"
    return max(gaps, default=0.0)


def gap(left, right, total=DEVICES):
    """The largest difference between two states, all devices' private trees included."""
    private = [
        distance(left.private.of(device), right.private.of(device)) for device in range(total)
    ]
    return max(distance(left.shared, right.shared), *private)


def same_bits(left, right, total=DEVICES):
    return trees.same_bits(left.shared, right.shared) and all(
        trees.same_bits(left.private.of(device), right.private.of(device))
        for device in range(total)
    )
