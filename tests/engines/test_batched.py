"""Batched local training: shapes, convolutions as products, and what fused steps decline."""

import numpy as np
import pytest
import torch

import glocal
from glocal.core.data import Examples
from glocal.core.optimizers import SGD, PartitionedOptimizer
from glocal.core.training import Objective, Work
from glocal.engines.batched import (
    BatchedTraining,
    FusedGpuTraining,
    TracedBatchedTraining,
    TrainingRequest,
)
from glocal.engines.conv_matmul import ConvAsMatmul
from glocal.engines.graphed import _pad_tasks, _round_up
from glocal.engines.protocol import ClientTask, unbind_rows
from glocal.engines.vmapped import stack_rows, vmap_clients
from tests.support import world
from tests.support.engine_runs import model_of


@pytest.mark.parametrize("stride", [1, 2, (2, 1)])
@pytest.mark.parametrize("padding", [0, 1, (1, 0)])
@pytest.mark.parametrize("dilation", [1, 2])
def test_a_convolution_as_a_product_is_the_convolution(stride, padding, dilation):
    x, weight, bias = torch.randn(3, 2, 9, 8), torch.randn(4, 2, 3, 2), torch.randn(4)
    expected = torch.conv2d(x, weight, bias, stride, padding, dilation)
    with ConvAsMatmul():
        product = torch.conv2d(x, weight, bias, stride, padding, dilation)
        grouped = torch.conv2d(x, torch.ones(2, 1, 3, 3), groups=2, padding="same")
    assert torch.allclose(product, expected, atol=1e-5)
    assert grouped.shape == x.shape


def of_steps(steps, *, epochs=1, batch=5):
    return ClientTask({}, {}, np.zeros((epochs, steps, batch), dtype=np.int64))


def test_unequal_clients_are_padded_to_few_shapes():
    """Then the graph of a round can be replayed in a later one."""
    tasks = [of_steps(steps, epochs=2) for steps in (9, 12, 11)]
    _, orders = _pad_tasks(tasks)
    assert orders.shape == (3, 2, 12, 5)
    assert (orders[0, :, 9:] == -1).all(), "every epoch is padded at its own end"
    assert (orders[0, :, :9] == 0).all()
    padded, orders = _pad_tasks(tasks * 3)
    assert len(padded) == 10
    assert len(orders) == 10
    numbers = range(1, 2000)
    assert all(number <= _round_up(number) <= 1.25 * number for number in numbers)
    assert len(set(map(_round_up, numbers))) < 45


def test_equal_clients_are_not_padded():
    tasks = [of_steps(60, batch=10)] * 9
    same, orders = _pad_tasks(tasks)
    assert same is tasks
    assert orders.shape == (9, 1, 60, 10)


@pytest.fixture
def with_triton(monkeypatch):
    """Let the fused steps for a GPU believe that Triton is installed."""
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: name)


def work_of_one_step(trainer=None, *, clients=()):
    """The first row of the examples, five times."""
    order = torch.zeros(*clients, 1, 1, 5, dtype=torch.int64)
    key, examples = torch.zeros(clients, dtype=torch.int64), Examples(*world.clients()[0])
    return Work.of(examples, order, key, torch.tensor(0), full_steps=1, trainer=trainer)


def test_fused_steps_check_every_request(with_triton, monkeypatch):
    """A second training, of the head alone, is declined although the first one was supported."""
    task = glocal.classification(model_of("plain"))
    params = {name: tensor[None] for name, tensor in task.initial_params().items()}
    monkeypatch.setattr(
        "glocal.engines.batched.local_train_batched",
        lambda *args, **settings: (params, torch.ones(1)),
    )
    work = work_of_one_step(clients=(1,))
    request = TrainingRequest(task.objective, params, work, SGD(lr=0.1))
    fused = FusedGpuTraining("fp32")
    trained = fused(request)
    assert trained.loss.total.tolist() == trained.loss.weight.tolist() == [5]
    head = task.objective.only({"2.weight"})
    with pytest.raises(NotImplementedError, match="some of the model's weights are not trained"):
        fused(request._replace(objective=head))
    drifting = task.objective.plus_linear(params)
    with pytest.raises(NotImplementedError, match="the objective has a linear term"):
        fused(request._replace(objective=drifting))

    class Clipped(SGD):
        pass

    with pytest.raises(NotImplementedError, match="Clipped"):
        fused(request._replace(optimizer=Clipped(lr=0.1)))


class OwnObjective(glocal.FedAvg):
    """The same loss in a function of the user's own."""

    @property
    def objective(self):
        model_loss, trainable = super().objective.loss, super().objective.trainable

        def own_loss(params, batch):
            return model_loss(params, batch)

        return Objective(own_loss, trainable)


def of_partitioned_optimizer(model):
    optimizer = PartitionedOptimizer(SGD(lr=0.1), SGD(lr=0.01), "2.")
    return glocal.FedAvg(glocal.classification(model), optimizer=optimizer)


def of_own_objective(model):
    return OwnObjective(glocal.classification(model), optimizer=SGD(lr=0.1))


def of_squares(model):
    task = glocal.Task(model, lambda outputs, y: outputs.square().sum(1))
    return glocal.FedAvg(task, optimizer=SGD(lr=0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of_partitioned_optimizer, "the optimiser is PartitionedOptimizer"),
        (of_own_objective, "the loss is own_loss, not a ModelLoss"),
        (of_squares, "the loss is not the cross entropy"),
    ],
)
def test_fused_steps_raise_the_reason_where_they_decline(with_triton, make, message):
    """The engine reports it and takes traced steps, which support all of it."""
    algorithm = make(model_of("plain"))
    params = stack_rows([algorithm.task.initial_params()])

    def train(trainer):
        work = work_of_one_step(trainer, clients=(1,))
        return vmap_clients(algorithm.client_update, params, {}, work)

    traced = train(BatchedTraining(TracedBatchedTraining()))
    assert traced.metrics["loss"].mean.isfinite().all()
    with pytest.raises(NotImplementedError, match=message):
        train(BatchedTraining(FusedGpuTraining("fp32"), skip_check=True))


@pytest.mark.parametrize(("width", "are_views"), [(8, True), (2**18, False)])
def test_only_small_rows_of_a_stack_are_views_of_it(width, are_views):
    stack = torch.rand(3, width)
    rows = unbind_rows(stack)
    assert torch.equal(torch.stack(list(rows)), stack)
    memory = stack.untyped_storage().data_ptr()
    for row in rows:
        assert (row.untyped_storage().data_ptr() == memory) == are_views


def test_a_stack_without_rows_has_none():
    assert list(unbind_rows(torch.zeros(0, 2**18))) == []
