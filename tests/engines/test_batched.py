"""Batched local training: shapes, convolutions as products, and what fused steps decline."""

import numpy as np
import pytest
import torch

from glocal.algorithms import fedavg
from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD, PartitionedOptimizer
from glocal.core.training import Work, cross_entropy
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
from glocal.federate.rounds import initial_state
from tests.support import world


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


def test_unequal_clients_are_padded_to_few_shapes():
    """Then the graph of a round can be replayed in a later one."""
    tasks = [ClientTask({}, {}, np.zeros((steps, 5), dtype=np.int64)) for steps in (9, 12, 11)]
    _, orders = _pad_tasks(tasks)
    assert orders.shape == (3, 12, 5)
    assert (orders[0, 9:] == -1).all()
    padded, orders = _pad_tasks(tasks * 3)
    assert len(padded) == 10
    assert len(orders) == 10
    numbers = range(1, 2000)
    assert all(number <= _round_up(number) <= 1.25 * number for number in numbers)
    assert len(set(map(_round_up, numbers))) < 45


def test_equal_clients_are_not_padded():
    tasks = [ClientTask({}, {}, np.zeros((60, 10), dtype=np.int64))] * 9
    same, orders = _pad_tasks(tasks)
    assert same is tasks
    assert orders.shape == (9, 60, 10)


@pytest.fixture
def with_triton(monkeypatch):
    """Let the fused steps for a GPU believe that Triton is installed."""
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: name)


def test_fused_steps_check_every_request(with_triton, monkeypatch):
    """A second training, of the head alone, is declined although the first one was supported."""
    model = world.seeded(world.plain)
    objective = cross_entropy(model)
    params = {name: tensor[None] for name, tensor in params_of(model).items()}
    monkeypatch.setattr(
        "glocal.engines.batched.local_train_batched",
        lambda *args, **settings: (params, torch.zeros(1)),
    )
    request = TrainingRequest(
        objective,
        SGD(0.1),
        params,
        Examples(*world.clients()[0]),
        order=torch.zeros(1, 1, 5, dtype=torch.int64),
        key=torch.zeros(1),
        round_index=torch.tensor(0),
        full_steps=1,
    )
    fused = FusedGpuTraining("fp32")
    fused(request)
    head = objective._replace(trainable=frozenset({"2.weight"}))
    with pytest.raises(NotImplementedError, match="some of the model's weights are not trained"):
        fused(request._replace(objective=head))

    class Clipped(SGD):
        pass

    with pytest.raises(NotImplementedError, match="Clipped"):
        fused(request._replace(optimizer=Clipped(0.1)))


def own_loss(objective):
    """The same loss as a function of the user's own."""
    model_loss = objective.loss
    return objective._replace(loss=lambda params, batch: model_loss(params, batch))


@pytest.mark.parametrize(
    "message", ["the optimiser is PartitionedOptimizer", "the loss is not the cross entropy"]
)
def test_fused_steps_raise_the_reason_where_they_decline(with_triton, message):
    """The engine reports it and takes traced steps, which support both."""
    model = world.seeded(world.plain)
    objective, optimizer = cross_entropy(model), SGD(0.1)
    if "optimiser" in message:
        optimizer = PartitionedOptimizer(SGD(0.1), SGD(0.01), "2.")
    else:
        objective = own_loss(objective)
    algorithm = fedavg(objective, optimizer)
    state = initial_state(algorithm, params_of(model))
    examples = Examples(*world.clients()[0])
    order = torch.zeros(1, 1, 5, dtype=torch.int64)

    def train(trainer):
        work = Work(examples, order, torch.tensor([0]), torch.tensor(0), 1, trainer)
        shared, private = stack_rows([state.shared]), stack_rows([state.private.initial])
        return vmap_clients(algorithm.client_update, shared, private, work)

    assert train(BatchedTraining(TracedBatchedTraining())).loss.isfinite().all()
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
