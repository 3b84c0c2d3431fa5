"""Traced steps: what they compute, and what may be overwritten in them."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import glocal
from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.optimizers import SGD
from glocal.core.sampling import pad_and_stack
from glocal.core.training import Work
from glocal.engines import EngineConfig
from glocal.engines.batched import BatchedTraining, TracedBatchedTraining
from glocal.engines.looped import LoopedEngine
from glocal.engines.protocol import ClientTask
from glocal.engines.traced import TracedTraining
from glocal.engines.vmapped import stack_rows, vmap_clients
from tests.support import world
from tests.support.engine_runs import EXACT, data_for, every_model, model_of, train


@pytest.mark.parametrize("name", ["lg_fedavg", "mtl", "apfl"])
@every_model
@pytest.mark.parametrize("conv_as_matmul", [True, False])
def test_traced_steps_of_many_clients_give_the_numbers_of_the_loop(name, kind, conv_as_matmul):
    """A GPU captures and compiles these steps; here they run on a CPU."""
    algorithm = world.algorithm(name, model_of(kind, torch.float64))
    assert_batched_is_looped(algorithm, conv_as_matmul=conv_as_matmul)


class Attending(nn.Module):
    """A stock encoder layer over the features, two by two."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)
        self.head = nn.Linear(world.FEATURES, world.CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x.unflatten(1, (-1, 2))).flatten(1))


@pytest.mark.parametrize("engine", ["vmapped", "traced"])
def test_stock_attention_is_batched_over_clients_and_settings_of_torch_are_restored(engine):
    """Torch's kernels have no batching rule, of which it warns; here a warning is an error."""
    task = glocal.classification(world.seeded(Attending).double())
    algorithm = glocal.FedAvg(task, optimizer=SGD(lr=0.1, momentum=0.5))
    if engine == "traced":
        assert_batched_is_looped(algorithm)
    else:
        assert world.gap(train(algorithm, engine), train(algorithm, "looped")) < EXACT
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


class Drifting(glocal.FedAvg):
    """A constant in every gradient, another one for every client."""

    def client_update(self, message, private, work):
        direction = trees.scale(0.1 * (work.key % 7 + 1), message)
        return self.train(self.objective.plus_linear(direction), message, private, work)


@every_model
def test_traced_steps_with_a_constant_in_the_gradient_give_the_numbers_of_the_loop(kind):
    task = glocal.classification(model_of(kind, torch.float64))
    drifting = Drifting(task, optimizer=SGD(lr=0.1, momentum=0.5))
    assert_batched_is_looped(drifting)
    looped = train(drifting, "looped")
    for engine in ("vmapped", EngineConfig("workers", fused=False)):
        assert world.gap(train(drifting, engine), looped) < EXACT
    still = glocal.FedAvg(task, optimizer=SGD(lr=0.1, momentum=0.5))
    assert world.gap(train(still, "looped"), looped) > 1e-3


def test_fused_steps_decline_a_constant_in_the_gradient_and_say_why(caplog):
    drifting = Drifting(glocal.classification(model_of("plain")), optimizer=SGD(lr=0.1))
    with caplog.at_level(logging.INFO, "glocal"):
        train(drifting, "workers")
    assert "no fused steps: the objective has a linear term" in caplog.text


def assert_batched_is_looped(algorithm, *, conv_as_matmul=True):
    data = data_for(algorithm)
    tasks = unequal_tasks(algorithm.init(algorithm.task.initial_params()), data)
    trainer = BatchedTraining(TracedBatchedTraining(conv_as_matmul=conv_as_matmul))
    together = vmap_clients(
        algorithm.client_update,
        stack_rows([task.shared for task in tasks]),
        stack_rows([task.private for task in tasks]),
        stacked_work(tasks, data.examples, trainer),
    )
    alone = LoopedEngine(algorithm.client_update)(tasks, data.examples, 3).stacked()
    assert world.distance(together.upload, alone.upload) < EXACT
    assert world.distance(together.private, alone.private) < EXACT
    for part in ("total", "weight"):
        ours, loops = (getattr(each.metrics["loss"], part) for each in (together, alone))
        assert torch.allclose(ours, loops, rtol=0, atol=EXACT)


def unequal_tasks(state, data):
    """Three steps for each client; the second one has examples in two of them only."""
    tasks = []
    for key, rows in enumerate(data.rows):
        order = rows.reshape(1, 1, -1)[..., :5].repeat(3, 1)
        tasks.append(ClientTask(state.shared, state.private, order, key))
    padded = np.full_like(tasks[1].order, -1)
    padded[:, :2, :2] = data.rows[1][:2]
    tasks[1] = tasks[1]._replace(order=padded)
    return tasks


def stacked_work(tasks, examples, trainer):
    orders = torch.from_numpy(pad_and_stack([task.order for task in tasks]))
    keys = torch.tensor([task.key for task in tasks])
    return Work.of(examples, orders, keys, torch.tensor(3), full_steps=2, trainer=trainer)


def test_a_step_is_traced_once_and_grads_are_added_straight_to_velocities():
    task = glocal.classification(model_of("plain"))
    trainer = TracedTraining()
    order, zero = torch.arange(20).reshape(1, 4, 5), torch.tensor(0)
    work = Work.of(Examples(*world.clients()[0]), order, zero, zero, full_steps=4)
    optimizer = SGD(lr=0.1, momentum=0.5)
    assert trainer(task.objective, task.initial_params(), work, optimizer) is not None
    (step,) = trainer.steps.values()
    assert step.__self__.code.count("Tensor_addmm_(") == 2
    assert "torch.sub(" not in step.__self__.code


def test_a_model_that_cannot_be_traced_runs_untraced():
    algorithm = world.algorithm("fedavg", world.seeded(world.Branching).double())
    workers = train(algorithm, EngineConfig("workers", fused=False))
    assert world.gap(workers, train(algorithm, "looped")) < EXACT


class LowRank(nn.Module):
    """A weight that is the sum of a full one and a product: its grads read views of weights."""

    def __init__(self):
        super().__init__()
        self.full = nn.Parameter(torch.randn(world.CLASSES, world.FEATURES) / 3)
        self.left = nn.Parameter(torch.randn(world.CLASSES, 2))
        self.right = nn.Parameter(torch.randn(2, world.FEATURES))

    def forward(self, x):
        return nn.functional.linear(x, self.full + self.left @ self.right)


@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), SGD(lr=0.1, momentum=0.9)])
def test_a_weight_is_not_overwritten_before_the_last_read_of_its_views(optimizer):
    task = glocal.classification(world.seeded(LowRank).double())
    algorithm = glocal.FedAvg(task, optimizer=optimizer)
    traced = train(algorithm, EngineConfig("workers", workers=1))
    assert world.gap(traced, train(algorithm, "looped")) < EXACT
