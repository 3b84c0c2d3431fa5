"""The fused kernels train as `local_train` does in float64.

On a GPU, else in Triton's interpreter, else skipped.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from glocal.core import optimizers, training, trees
from glocal.core.data import Examples
from glocal.core.modules import params_of
from glocal.core.task import classification
from glocal.engines.fused.gpu import local_train_batched, unsupported_reason
from glocal.engines.fused.layer_chain import parse_chain
from glocal.engines.fused.tiles import Tile, default_tile

WHERE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, CLASSES = 40, 4
if WHERE == "cpu" and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # it is read when the kernels are imported


# Triton 3.6's interpreter makes an int of a one-number array, which NumPy 2.4 no longer allows
INTERPRETER_RUNS = np.lib.NumpyVersion(np.__version__) < "2.4.0"
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
)


@pytest.fixture(scope="module")
def kernels():
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if WHERE == "cpu" and not INTERPRETER_RUNS:
        pytest.skip("triton's interpreter does not run on this NumPy")
    from glocal.engines.fused import linear_kernels

    if WHERE == "cpu" and type(linear_kernels.linear_forward).__name__ != "InterpretedFunction":
        pytest.skip("triton was imported without its interpreter before")
    return kernels


needs_kernels = pytest.mark.usefixtures("kernels")


def mlp(*widths, bias=True):
    hidden = [
        layer
        for pair in pairwise(widths[:-1])
        for layer in (nn.Linear(*pair, bias=bias), nn.ReLU())
    ]
    return nn.Sequential(*hidden, nn.Linear(widths[-2], widths[-1], bias=bias))


def small_lenet():
    first = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(3, 5, 2), nn.MaxPool2d(2), nn.ReLU()]
    return nn.Sequential(
        *first, *second, nn.Flatten(), nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, CLASSES)
    )


def strided():
    convs = [
        nn.Conv2d(1, 3, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Conv2d(3, 9, (3, 2), stride=(2, 1), padding=(2, 1)),
    ]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(9 * 4 * 6, CLASSES))


def odd_pool():
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3),
        nn.Flatten(),
        nn.Linear(8, CLASSES, bias=False),
    )


IMAGES = {
    "lenet": (small_lenet, (2, 12, 12)),
    "strided": (strided, (1, 9, 9)),
    "odd pool": (odd_pool, (1, 7, 7)),
}


class Trial:
    """A model, clients that start apart, examples, and an order with partly padded steps."""

    def __init__(self, model, inputs, *, clients=3, steps=3, batch=5, ragged=True):
        torch.manual_seed(0)
        self.model, self.inputs, self.chain = model, inputs, parse_chain(model, inputs)
        self.x = torch.randn(ROWS, *inputs, device=WHERE)
        self.y = torch.randint(0, CLASSES, (ROWS,), device=WHERE)
        self.order = torch.randint(0, ROWS, (clients, steps, batch), device=WHERE)
        if ragged:
            self.order[0, 1, batch // 2 + 1 :] = -1
            self.order[-1, -1] = -1
        self.params = self.near(params_of(model), 0.05)

    def near(self, params, distance):
        """One tree for each client (clients, ...)."""
        clients = range(self.order.shape[0])
        return {
            n: torch.stack(
                [t.to(WHERE) + distance * torch.randn(t.shape, device=WHERE) for _ in clients]
            )
            for n, t in params.items()
        }

    def fused(self, *, lr=0.1, **settings):
        return local_train_batched(
            self.chain, self.params, self.x, self.y, self.order, lr=lr, **settings
        )

    def truth(self, *, lr=0.1, momentum=0.0, weight_decay=0.0, proximal=()):
        """`local_train` in float64: params (clients, ...) and losses (clients,)."""
        model = self.model.to(WHERE).double()
        sgd = optimizers.SGD(lr=lr, momentum=momentum, weight_decay=weight_decay)
        clients = range(self.order.shape[0])
        results = [self.truth_of(client, model, sgd, proximal) for client in clients]
        model.float()
        params = trees.stack([trained.params for trained in results])
        return params, torch.stack([trained.loss.mean for trained in results])

    def truth_of(self, client, model, sgd, proximal):
        ends = tuple(
            training.Proximal({name: end[client].double() for name, end in ends.items()}, strength)
            for ends, strength in proximal
        )
        zero = torch.tensor(0, device=WHERE)
        examples, order = Examples(self.x.double(), self.y), self.order[client][None]
        work = training.Work.of(examples, order, zero, zero)
        params = {name: tensor[client].double() for name, tensor in self.params.items()}
        objective = classification(model).objective._replace(proximal=ends)
        return training.local_train(objective, params, work, sgd)


def assert_same(one, other, tolerance=1e-5):
    for name, tensor in other[0].items():
        assert (one[0][name] - tensor).abs().max() < tolerance, name
    assert (one[1] - other[1]).abs().max() < tolerance


def assert_same_bits(one, other):
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert torch.equal(one[1], other[1])


@needs_kernels
@pytest.mark.parametrize(("clients", "batch"), [(3, 1), (2, 10), (1, 16), (3, 17), (1, 70)])
def test_an_mlp_of_odd_widths_takes_the_same_steps(clients, batch):
    trial = Trial(mlp(67, 35, CLASSES), (67,), batch=batch, clients=clients, steps=2)
    assert_same(trial.fused(momentum=0.5), trial.truth(momentum=0.5))


@needs_kernels
@pytest.mark.parametrize("batch", [3, 20])
def test_a_softmax_before_the_cross_entropy_takes_the_same_steps(batch):
    trial = Trial(nn.Sequential(*mlp(9, 7, CLASSES), nn.Softmax(dim=1)), (9,), batch=batch)
    assert trial.chain.softmax
    assert_same(trial.fused(momentum=0.5), trial.truth(momentum=0.5))


@needs_kernels
@pytest.mark.parametrize("batch", [3, 20])
@pytest.mark.parametrize(
    "settings",
    [{}, {"momentum": 0.5}, {"weight_decay": 0.1}, {"momentum": 0.9, "weight_decay": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("bias", [True, False])
def test_every_setting_of_sgd_is_respected(batch, settings, bias):
    trial = Trial(mlp(9, 5, CLASSES, bias=bias), (9,), batch=batch, clients=10)
    assert_same(trial.fused(**settings), trial.truth(**settings))


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "batch"), [("lenet", 3), ("strided", 3), ("odd pool", 3), ("odd pool", 18)]
)
def test_convolutions_take_the_same_steps(kind, batch):
    make, inputs = IMAGES[kind]
    trial = Trial(make(), inputs, batch=batch, clients=2, steps=2)
    assert_same(trial.fused(momentum=0.5), trial.truth(momentum=0.5))


@needs_kernels
@pytest.mark.parametrize("strengths", [(0.3,), (0.3, 0.7), (0.0,), (0.0, 0.7)], ids=str)
@pytest.mark.parametrize(("kind", "batch"), [("mlp", 3), ("mlp", 18), ("odd pool", 3)])
def test_proximal_terms_act_on_weights_and_count_in_the_loss(kind, batch, strengths):
    make, inputs = IMAGES.get(kind, (lambda: mlp(9, 5, CLASSES), (9,)))
    trial = Trial(make(), inputs, batch=batch, clients=2, steps=2)
    proximal = [(trial.near(params_of(trial.model), 0.2), strength) for strength in strengths]
    assert_same(
        trial.fused(momentum=0.5, proximal=proximal), trial.truth(momentum=0.5, proximal=proximal)
    )


@needs_kernels
@pytest.mark.parametrize("batch", [3, 18])
def test_an_anchor_may_have_some_of_the_names(batch):
    trial = Trial(mlp(9, 5, CLASSES), (9,), batch=batch, clients=2)
    ends = trial.near(params_of(trial.model), 0.2)
    proximal = [({name: ends[name] for name in ("0.weight", "2.bias")}, 0.5), (ends, 0.25)]
    assert_same(trial.fused(proximal=proximal), trial.truth(proximal=proximal))


@needs_kernels
@pytest.mark.parametrize("batch", [3, 18])
def test_a_client_without_examples_does_not_change(batch):
    trial = Trial(odd_pool(), (1, 7, 7), batch=batch, clients=2)
    trial.order[1] = -1
    trained, loss = trial.fused(momentum=0.5, weight_decay=0.1)
    assert all(torch.equal(trained[name][1], trial.params[name][1]) for name in trained)
    assert loss[1] == 0


@needs_kernels
@pytest.mark.parametrize("batch", [3, 18])
def test_a_padded_step_keeps_weights_and_momentum(batch):
    trial = Trial(mlp(9, 5, CLASSES), (9,), batch=batch, clients=2, steps=4, ragged=False)
    unpadded = trial.fused(momentum=0.9)
    padding = torch.full_like(trial.order[:, :1], -1)
    trial.order = torch.cat([trial.order[:, :2], padding, trial.order[:, 2:], padding], dim=1)
    padded = trial.fused(momentum=0.9)
    assert all(torch.equal(padded[0][name], tensor) for name, tensor in unpadded[0].items())
    assert_same(
        padded, unpadded, 1e-6
    )  # the mean loss is summed over more numbers, in another order


@needs_kernels
def test_clients_may_share_weights_and_anchors():
    trial = Trial(odd_pool(), (1, 7, 7), clients=2)
    shared = {
        name: tensor[:1].expand(2, *tensor.shape[1:]) for name, tensor in trial.params.items()
    }
    copies = {name: tensor.contiguous() for name, tensor in shared.items()}
    trial.params = shared
    one = trial.fused(momentum=0.5, proximal=[(shared, 0.5)])
    trial.params = copies
    assert_same_bits(one, trial.fused(momentum=0.5, proximal=[(copies, 0.5)]))


@needs_kernels
def test_the_callers_tensors_do_not_change_and_bits_repeat():
    trial = Trial(odd_pool(), (1, 7, 7), clients=2)
    before = {name: tensor.clone() for name, tensor in trial.params.items()}
    assert_same_bits(trial.fused(momentum=0.5), trial.fused(momentum=0.5))
    assert all(torch.equal(before[name], tensor) for name, tensor in trial.params.items())


@needs_kernels
def test_a_client_trains_the_same_next_to_any_other_clients():
    trial = Trial(odd_pool(), (1, 7, 7), clients=3)
    together = trial.fused(momentum=0.5)
    trial.params, trial.order = (
        {name: tensor[1:2] for name, tensor in trial.params.items()},
        trial.order[1:2],
    )
    alone = trial.fused(momentum=0.5)
    assert_same(
        alone, ({name: tensor[1:2] for name, tensor in together[0].items()}, together[1][1:2]), 1e-6
    )


@needs_kernels
def test_every_client_may_have_its_own_learning_rate():
    trial = Trial(mlp(9, 5, CLASSES), (9,), clients=2)
    trained, _ = trial.fused(lr=torch.tensor([0.1, 0.3], device=WHERE))
    for client, lr in enumerate((0.1, 0.3)):
        expected = trial.truth(lr=lr)[0]["0.weight"][client]
        assert (trained["0.weight"][client] - expected).abs().max() < 1e-5


@needs_kernels
@pytest.mark.parametrize("batch", [3, 18])
def test_tiles_change_only_the_speed(batch):
    def choose_tile(job):
        return Tile(16, 32, 16) if job.kind != "loss" else default_tile(job)

    trial = Trial(odd_pool(), (1, 7, 7), batch=batch, clients=2, steps=2)
    assert_same(trial.fused(momentum=0.5, choose_tile=choose_tile), trial.fused(momentum=0.5), 1e-6)


@needs_kernels
@pytest.mark.skipif(WHERE == "cpu", reason="there is no GPU here")
def test_a_graph_can_hold_a_round():
    trial = Trial(small_lenet(), (2, 12, 12))
    plain = trial.fused(momentum=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = trial.fused(momentum=0.5)
    graph.replay()
    assert_same_bits(held, plain)


@pytest.fixture
def with_triton(monkeypatch):
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: name)


def reason(model, inputs=(9,), *, optimizer=None, dtype=torch.float32, **changes):
    objective = classification(model).objective._replace(**changes)
    return unsupported_reason(objective, optimizer or optimizers.SGD(lr=0.1), inputs, dtype)


@pytest.mark.usefixtures("with_triton")
def test_unsupported_training_is_declined_with_a_reason():
    model = mlp(9, 5, CLASSES)
    assert reason(model) is None
    assert reason(small_lenet(), (2, 12, 12)) is None
    assert reason(model, optimizer=optimizers.Adam(lr=0.1)) == "the optimiser is Adam, not SGD"
    assert reason(model, dtype=torch.float64) == "the weights are torch.float64, not torch.float32"
    assert "layer '1' is Tanh" in reason(nn.Sequential(nn.Linear(9, 5), nn.Tanh(), nn.Linear(5, 2)))
    assert (
        reason(model, trainable=frozenset({"0.weight"}))
        == "some of the model's weights are not trained"
    )
    assert (
        reason(model, proximal=(training.Proximal({}, -1.0),))
        == "a proximal term has a negative strength"
    )
    linear = {"0.weight": torch.ones(5, 9)}
    assert reason(model, linear=linear) == "the objective has a linear term"


def test_without_triton_it_is_declined(monkeypatch):
    monkeypatch.setattr("glocal.engines.fused.gpu.find_spec", lambda name: None)
    assert reason(mlp(9, 5, CLASSES)) == "triton is not installed"


def test_importing_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import glocal.engines.fused.gpu"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
