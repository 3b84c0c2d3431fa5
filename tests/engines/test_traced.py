"""Traced steps: what they compute, and what may be overwritten in them."""

import numpy as np
import pytest
import torch
from torch import nn

from glocal.algorithms import fedavg
from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import pad_and_stack
from glocal.core.training import Work, cross_entropy
from glocal.engines import EngineConfig
from glocal.engines.batched import BatchedTraining, TracedBatchedTraining
from glocal.engines.looped import LoopedEngine
from glocal.engines.protocol import ClientTask
from glocal.engines.traced import TracedTraining
from glocal.engines.vmapped import stack_rows, vmap_clients
from glocal.federate.rounds import initial_state
from tests.support import world
from tests.support.engine_runs import MODELS, every_model, train


@pytest.mark.parametrize("name", ["lg_fedavg", "mtl"])
@every_model
@pytest.mark.parametrize("conv_as_matmul", [True, False])
def test_traced_steps_of_many_clients_give_the_numbers_of_the_loop(name, kind, conv_as_matmul):
    """A GPU captures and compiles these steps; here they run on a CPU."""
    model = world.seeded(MODELS[kind])
    algorithm, data = world.algorithm(name, model), world.federation().train
    tasks = unequal_tasks(initial_state(algorithm, params_of(model)), data)
    trainer = BatchedTraining(TracedBatchedTraining(conv_as_matmul=conv_as_matmul))
    together = vmap_clients(
        algorithm.client_update,
        stack_rows([task.shared for task in tasks]),
        stack_rows([task.private for task in tasks]),
        stacked_work(tasks, data.examples, trainer),
    )
    alone = LoopedEngine(algorithm.client_update)(tasks, data.examples, 3).stacked()
    assert world.distance(together.upload, alone.upload) < 1e-5
    assert world.distance(together.private, alone.private) < 1e-5
    assert torch.allclose(together.loss, alone.loss, atol=1e-5)


def unequal_tasks(state, data):
    """Three steps for each client; the second one has examples in two of them only."""
    tasks = []
    for key, rows in enumerate(data.rows):
        order = rows.reshape(1, -1)[:, :5].repeat(3, 0)
        tasks.append(ClientTask(state.shared, state.private.initial, order, key))
    padded = np.full_like(tasks[1].order, -1)
    padded[:2, :2] = data.rows[1][:2]
    tasks[1] = tasks[1]._replace(order=padded)
    return tasks


def stacked_work(tasks, examples, trainer):
    orders = torch.from_numpy(pad_and_stack([task.order for task in tasks]))
    keys = torch.tensor([task.key for task in tasks])
    return Work(examples, orders, keys, torch.tensor(3), 2, trainer)


def test_a_step_is_traced_once_and_grads_are_added_straight_to_velocities():
    model = world.seeded(world.plain)
    trainer = TracedTraining()
    order = torch.arange(20).reshape(4, 5)
    work = Work(Examples(*world.clients()[0]), order, torch.tensor(0), torch.tensor(0), 4)
    optimizer = SGD(0.1, momentum=0.5)
    assert trainer(cross_entropy(model), params_of(model), work, optimizer) is not None
    (step,) = trainer.steps.values()
    assert step.__self__.code.count("Tensor_addmm_(") == 2
    assert "torch.sub(" not in step.__self__.code


def test_a_model_that_cannot_be_traced_runs_untraced():
    model = world.seeded(world.Branching)
    algorithm = world.algorithm("fedavg", model)
    workers = train(algorithm, model, EngineConfig("workers", fused=False))
    assert world.gap(workers, train(algorithm, model, "looped")) < 1e-6


class LowRank(nn.Module):
    """A weight that is the sum of a full one and a product: its grads read views of weights."""

    def __init__(self):
        super().__init__()
        self.full = nn.Parameter(torch.randn(world.CLASSES, world.FEATURES) / 3)
        self.left = nn.Parameter(torch.randn(world.CLASSES, 2))
        self.right = nn.Parameter(torch.randn(2, world.FEATURES))

    def forward(self, x):
        return nn.functional.linear(x, self.full + self.left @ self.right)


@pytest.mark.parametrize("optimizer", [SGD(0.1), SGD(0.1, momentum=0.9)])
def test_a_weight_is_not_overwritten_before_the_last_read_of_its_views(optimizer):
    model = world.seeded(LowRank)
    algorithm = fedavg(cross_entropy(model), optimizer)
    traced = train(algorithm, model, EngineConfig("workers", workers=1))
    assert world.gap(traced, train(algorithm, model, "looped")) < 1e-5
