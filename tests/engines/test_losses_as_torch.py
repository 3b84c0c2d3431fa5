"""Every way to give a loss trains as a plain PyTorch loop does, on every engine.

The reference is `torch.optim.SGD` with torch's own loss on the same batches. Clients are unequal
and last batches are partial, so that every engine pads: a padded row that counts shows here.
"""

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import glocal
from glocal import FederatedData
from glocal.core.sampling import Plan, client_batches
from glocal.engines import EngineConfig, vmapped
from glocal.engines.batched import BatchedTraining, TracedBatchedTraining
from glocal.engines.fused.cpu import FusedCpuTraining
from glocal.federate.fit import build_experiment
from tests.support import world
from tests.support.engine_runs import needs_compiler

PLAN = Plan(rounds=2, clients_per_round=world.NUM_CLIENTS, local_epochs=2, batch_size=5)
LR, MOMENTUM = 0.1, 0.5
CLOSE = 1e-6
WEIGHTS = torch.tensor([1.0, 3.0, 0.5])
POSITIONS = 4
SIZES = (23, 4, 31, 1, 12)


def by_hand(outputs, targets):
    """The cross entropy of every example, written out."""
    chosen = outputs.gather(1, targets[:, None]).squeeze(1)
    return outputs.logsumexp(1) - chosen


def of_two_columns(outputs, targets):
    """Several values per example, of which the mean counts."""
    values = by_hand(outputs, targets)
    return torch.stack([values.square(), values], 1)


def as_pair(outputs, targets):
    """Sums and weights: the second class counts twice."""
    weights = 1.0 + (targets == 1)
    return weights * by_hand(outputs, targets), weights


def mean_of_pair(outputs, targets):
    sums, weights = as_pair(outputs, targets)
    return sums.sum() / weights.sum()


def mean_of(function):
    """What a plain loop does with one value per example."""
    return lambda outputs, targets: function(outputs, targets).mean()


# ---- targets of several kinds, from a client's inputs and class numbers


def classes(x, y):
    return y


def some_ignored(x, y, ignored=-100):
    left_out = (torch.arange(len(y)) % 4 == 1) & (torch.arange(len(y)) != 0)
    return torch.where(left_out, ignored, y)


def probabilities(x, y):
    return x[:, : world.CLASSES].softmax(1)


def numbers(x, y):
    return x[:, : world.CLASSES] ** 2


def labels(x, y):
    return (x[:, : world.CLASSES] > 0).float()


def positions(x, y):
    """A class for each position (rows, positions); some do not count."""
    own = (y[:, None] + torch.arange(POSITIONS)) % world.CLASSES
    own[::3, 2:] = -100
    return own


# ---- models


def log_probabilities():
    return nn.Sequential(world.plain(), nn.LogSoftmax(1))


def sequences():
    shape = (world.CLASSES, POSITIONS)
    return nn.Sequential(nn.Linear(world.FEATURES, 12), nn.Unflatten(1, shape))


class KnownLoss(NamedTuple):
    """A loss, the one of a plain loop where that is another, what it is about, and the model."""

    loss: Any
    in_torch: Any = None
    targets: Any = classes
    make: Any = world.plain
    is_fused: bool = False

    @property
    def expected(self):
        return self.in_torch or self.loss


cross_entropy = functional.cross_entropy
LOSSES = {
    "module": KnownLoss(nn.CrossEntropyLoss(), is_fused=True),
    "functional": KnownLoss(cross_entropy, is_fused=True),
    "module without reduction": KnownLoss(
        nn.CrossEntropyLoss(reduction="none"), cross_entropy, is_fused=True
    ),
    "functional without reduction": KnownLoss(
        partial(cross_entropy, reduction="none"), cross_entropy, is_fused=True
    ),
    "label smoothing": KnownLoss(nn.CrossEntropyLoss(label_smoothing=0.2)),
    "functional with label smoothing": KnownLoss(partial(cross_entropy, label_smoothing=0.2)),
    "class weights": KnownLoss(nn.CrossEntropyLoss(weight=WEIGHTS)),
    "functional with class weights": KnownLoss(partial(cross_entropy, weight=WEIGHTS)),
    "smoothing and class weights": KnownLoss(
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2)
    ),
    "ignored": KnownLoss(nn.CrossEntropyLoss(), targets=some_ignored),
    "functional with ignored": KnownLoss(cross_entropy, targets=some_ignored),
    "ignored class": KnownLoss(
        nn.CrossEntropyLoss(ignore_index=7), targets=partial(some_ignored, ignored=7)
    ),
    "functional with an ignored class": KnownLoss(
        partial(cross_entropy, ignore_index=7), targets=partial(some_ignored, ignored=7)
    ),
    "ignored, smoothing and weights": KnownLoss(
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), targets=some_ignored
    ),
    "ignored positions": KnownLoss(nn.CrossEntropyLoss(), targets=positions, make=sequences),
    "positions with weights": KnownLoss(
        nn.CrossEntropyLoss(weight=WEIGHTS), targets=positions, make=sequences
    ),
    "log-probabilities": KnownLoss(nn.NLLLoss(weight=WEIGHTS), make=log_probabilities),
    "probabilities as targets": KnownLoss(
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), targets=probabilities
    ),
    "labels": KnownLoss(nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), targets=labels),
    "squared error": KnownLoss(nn.MSELoss(), targets=numbers),
    "functional absolute error": KnownLoss(functional.l1_loss, targets=numbers),
    "own": KnownLoss(by_hand, mean_of(by_hand)),
    "own with columns": KnownLoss(of_two_columns, mean_of(of_two_columns)),
    "own as pair": KnownLoss(as_pair, mean_of_pair),
}
every_loss = pytest.mark.parametrize("name", LOSSES)
_QUICK = (
    "module",
    "functional with ignored",
    "ignored, smoothing and weights",
    "ignored positions",
    "own with columns",
    "own as pair",
)
_OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in LOSSES if name not in _QUICK]
some_losses = pytest.mark.parametrize("name", [*_QUICK, *_OTHERS])


def data_of(case, dtype):
    clients = [(x.to(dtype), case.targets(x, y)) for x, y in world.clients(SIZES)]
    clients = [(x, y.to(dtype) if y.is_floating_point() else y) for x, y in clients]
    return FederatedData.from_tensors(clients, test=0.0, validation=0.0)


def experiment_of(case, dtype):
    model = world.seeded(case.make).to(dtype)
    task = glocal.Task(model, case.loss, metrics=["loss"])
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=LR, momentum=MOMENTUM))
    plan = Plan(PLAN.rounds, len(SIZES), PLAN.local_epochs, PLAN.batch_size)
    return build_experiment(algorithm, data_of(case, dtype), plan=plan)


def trained(case, engine, dtype=torch.float64):
    """The shared tree after all rounds on an engine."""
    experiment = experiment_of(case, dtype)
    [group] = experiment.groups
    rounds = world.simulate(group.algorithm, group.data_of(0).train, experiment.plan, engine=engine)
    return world.last(rounds)[0].shared


_REFERENCES: dict[str, Any] = {}


def plain_loop(name):
    """The weights after the same rounds of plain PyTorch, in float64."""
    if name not in _REFERENCES:
        _REFERENCES[name] = _plain_loop(LOSSES[name])
    return _REFERENCES[name]


def _plain_loop(case):
    data = data_of(case, torch.float64).train
    plan = experiment_of(case, torch.float64).plan
    model = world.seeded(case.make).double()
    loss = case.expected
    loss = loss.double() if isinstance(loss, nn.Module) else loss
    if isinstance(loss, partial) and "weight" in loss.keywords:
        loss = partial(loss.func, weight=WEIGHTS.double())
    for round_index in range(plan.rounds):
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        mean = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for client, rows in enumerate(data.rows):
            model.load_state_dict(start)
            order = client_batches(plan, rows, round_index, client)
            train_plainly(model, loss, data.examples, order)
            for name, tensor in model.state_dict().items():
                mean[name] += tensor * len(rows) / sum(SIZES)
        model.load_state_dict(mean)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    return model.state_dict()


def train_plainly(model, loss, examples, order):
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for batch in order.reshape(-1, order.shape[-1]):
        rows = torch.from_numpy(batch[batch >= 0])
        optimizer.zero_grad()
        loss(model(examples.x[rows]), examples.y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("engine", ["looped", "vmapped"])
@every_loss
def test_a_loss_trains_as_in_plain_pytorch(name, engine):
    assert world.distance(trained(LOSSES[name], engine), plain_loop(name)) < CLOSE


@some_losses
def test_processes_with_traced_steps_train_as_plain_pytorch(name):
    engine = EngineConfig("workers", workers=2, fused=False)
    assert world.distance(trained(LOSSES[name], engine), plain_loop(name)) < CLOSE


@some_losses
def test_traced_steps_of_many_clients_train_as_plain_pytorch(name, monkeypatch):
    """A GPU captures and compiles these steps; here they run on a CPU."""
    trainer = BatchedTraining(TracedBatchedTraining())
    stacked = vmapped._stacked_work

    def with_trainer(*arguments):
        return stacked(*arguments)._replace(trainer=trainer)

    monkeypatch.setattr(vmapped, "_stacked_work", with_trainer)
    assert world.distance(trained(LOSSES[name], "vmapped"), plain_loop(name)) < CLOSE
    assert trainer.train.steps, "it was not traced"


@needs_compiler
@some_losses
def test_fused_steps_train_as_plain_pytorch_or_decline(name, monkeypatch):
    """They know the plain cross entropy, in float32; for any other loss traced steps run."""
    case, taken = LOSSES[name], []
    call = FusedCpuTraining.__call__

    def spied(self, *request):
        result = call(self, *request)
        taken.append(result is not None)
        return result

    monkeypatch.setattr(FusedCpuTraining, "__call__", spied)
    engine = EngineConfig("workers", workers=1)
    weights = trained(case, engine, dtype=torch.float32)
    assert world.distance(weights, plain_loop(name)) < CLOSE
    assert any(taken) == case.is_fused


@pytest.mark.parametrize("engine", ["looped", "vmapped"])
def test_a_batch_in_which_no_target_counts_changes_nothing(engine):
    """Torch's mean is NaN there, and so would be the weights."""
    model = world.seeded(world.plain).double()
    nothing = KnownLoss(nn.CrossEntropyLoss(), targets=lambda x, y: torch.full_like(y, -100))
    assert world.distance(trained(nothing, engine), model.state_dict()) == 0
