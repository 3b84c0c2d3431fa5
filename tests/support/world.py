"""A small federation, a few models, and every algorithm: what the contract is checked on."""

from collections import deque

import torch
from torch import nn

from glocal import algorithms
from glocal.algorithms.registry import find_algorithm
from glocal.core import trees
from glocal.core.optimizers import SGD
from glocal.core.split import Split
from glocal.core.task import classification
from glocal.core.training import Work
from glocal.datasets.federated import FederatedData
from glocal.federate import rounds
from glocal.federate.rounds import (
    GroupClients,
    GroupSetup,
    Replica,
    build_executors,
    start_state,
    start_wires,
)

FEATURES, CLASSES = 6, 3
SIZES = (23, 4, 31, 1, 12, 17)
NUM_CLIENTS = len(SIZES)


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


def with_batch_norm_and_dropout():
    return nn.Sequential(
        nn.Linear(FEATURES, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(8, CLASSES),
    )


class Recurrent(nn.Module):
    """A stock LSTM that reads the features one after the other."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(1, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.head(self.lstm(x[:, :, None])[0][:, -1])


MODELS = {
    "batch norm and dropout": with_batch_norm_and_dropout,
    "plain": plain,
    "batch norm": with_batch_norm,
    "dropout": with_dropout,
    "convolution": convolutional,
}
RECURRENT = "lstm"  # cannot be batched over clients
ALL_MODELS = {**MODELS, RECURRENT: Recurrent}


class Branching(nn.Module):
    """Branches on its input: neither vmap nor a trace can follow."""

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
    """A model with reproducible initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def clients(sizes=SIZES, seed=0):
    """A pair (x, y) for each client."""
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(size, FEATURES, generator=generator) for size in sizes]
    y = [torch.randint(CLASSES, (size,), generator=generator) for size in sizes]
    return list(zip(x, y, strict=True))


def federation(sizes=SIZES, seed=0, **fractions):
    return FederatedData.from_tensors(
        clients(sizes, seed), **{"test": 0.2, "validation": 0.1, **fractions}
    )


def first_half(model):
    """A split that leaves weights and, if there are any, buffers on both sides."""
    names = [name for name, _ in model.named_children()]
    with_tensors = [name for name in names if list(model.get_submodule(name).parameters())]
    half = len(with_tensors) // 2 + len(with_tensors) % 2
    return Split.of(model, local=with_tensors[:half])


NAMES = [kind.word for kind in algorithms.ALGORITHMS]


def algorithm(name, model, *, optimizer=None, local=None, task=None, **hyperparameters):
    """An algorithm by its word, on a task; LG-FedAvg has a split."""
    kind = find_algorithm(name)
    if kind is algorithms.LGFedAvg:
        hyperparameters["local"] = sorted(first_half(model).local if local is None else local)
    elif local is not None:
        hyperparameters["local"] = sorted(local)
    optimizer = optimizer or default_optimizer(kind)
    return kind(task or classification(model), optimizer=optimizer, **hyperparameters)


def default_optimizer(kind):
    """SGD with momentum; SCAFFOLD takes none."""
    return SGD(lr=0.1, momentum=0.0 if kind is algorithms.Scaffold else 0.5)


def set_up(algorithm, train, plan, *, params=None, uplink=None, availability=None):
    """A replica of one group, and its state before the first round."""
    setups = [GroupSetup(algorithm, algorithm.task.initial_params() if params is None else params)]
    wires = start_wires(setups, uplink)
    replica = Replica((GroupClients(algorithm, train, wires[0]),), plan, availability)
    return replica, start_state(setups, wires)


def simulate(algorithm, train, plan, *, engine="auto", **setting):
    """The state and the report of every round of one federation."""
    replica, state = set_up(algorithm, train, plan, **setting)
    executors = build_executors(replica.groups, engine, num_calls=plan.rounds)
    try:
        for [finished] in rounds.simulate([replica], [state], executors, plan_rounds(plan)):
            yield finished
    finally:
        for executor in executors:
            executor.close()


def plan_rounds(plan):
    return range(plan.first_round, plan.total_rounds)


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


def gap(left, right, num_clients=NUM_CLIENTS):
    """The largest difference between two states, all clients' private trees included."""
    private = [
        distance(left.private[0].of(client), right.private[0].of(client))
        for client in range(num_clients)
    ]
    return max(distance(left.shared, right.shared), distance(left.server, right.server), *private)


def same_bits(left, right, num_clients=NUM_CLIENTS):
    """True when two states are equal bit for bit, all clients' private trees included."""
    pairs = [(left.shared, right.shared), (left.server, right.server)]
    for client in range(num_clients):
        pairs.append((left.private[0].of(client), right.private[0].of(client)))
        pairs.append((left.profiles[0].of(client), right.profiles[0].of(client)))
    return all(trees.same_bits(*pair) for pair in pairs)


def work_of(train, client, *, batch=5, epochs=1, key=7, round_index=0):
    """The work of one client of some training data, its rows in their order."""
    rows = torch.from_numpy(train.rows[client])
    missing = -len(rows) % batch
    order = torch.cat([rows, rows.new_full((missing,), -1)]).reshape(1, -1, batch)
    address = torch.tensor(key), torch.tensor(round_index)
    return Work.of(train.examples, order.expand(epochs, -1, -1), *address)
