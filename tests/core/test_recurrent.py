"""torch's LSTM and GRU run batched over clients, to torch's own numbers."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from glocal.core.errors import GlocalWarning
from glocal.core.modules import params_of, predictor, training_forward
from glocal.core.sampling import Plan
from tests.support import world

ROWS, WORDS, WIDTH, UNITS, CLIENTS = 4, 6, 5, 3, 3
SETTINGS = {
    "plain": {},
    "words first": {"batch_first": False},
    "two layers": {"num_layers": 2},
    "both directions": {"bidirectional": True},
    "two layers, both directions": {"num_layers": 2, "bidirectional": True},
    "no bias": {"bias": False},
}


class Reader(nn.Module):
    """A recurrent module whose outputs and last states all count."""

    def __init__(self, module, start=False):
        super().__init__()
        self.module, self.start = module, start

    def forward(self, x):
        x = x if self.module.batch_first else x.transpose(0, 1)
        hx = None
        if self.start:
            count = self.module.num_layers * (1 + self.module.bidirectional)
            hidden = torch.full((count, ROWS, UNITS), 0.3, dtype=x.dtype)
            hx = (hidden, -hidden) if isinstance(self.module, nn.LSTM) else hidden
        output, states = self.module(x, hx)
        output = output if self.module.batch_first else output.transpose(0, 1)
        states = states if isinstance(states, tuple) else (states,)
        parts = [output.flatten(1), *(state.transpose(0, 1).flatten(1) for state in states)]
        return torch.cat(parts, 1)


def reader(kind, settings, start=False):
    torch.manual_seed(0)
    settings = {"batch_first": True, **settings}
    return Reader(kind(WIDTH, UNITS, **settings), start).double()


def by_client(model):
    """A different model for every client, and its examples."""
    torch.manual_seed(1)
    params = {
        name: torch.stack([tensor + 0.2 * k for k in range(CLIENTS)])
        for name, tensor in params_of(model).items()
    }
    return params, torch.randn(CLIENTS, ROWS, WORDS, WIDTH, dtype=torch.float64)


def loss_of(model):
    forward = training_forward(model)
    mask, key = torch.ones(ROWS, dtype=torch.bool), torch.tensor(0)

    def loss(params, x):
        return forward(params, x, mask, key)[0].sin().sum()

    return loss


@pytest.mark.parametrize("start", [False, True], ids=["from zero", "from a state"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_batched_over_clients_they_are_torchs_own(kind, settings, start):
    """Outputs, states and gradients, in float64."""
    model = reader(kind, settings, start)
    params, x = by_client(model)
    mask = torch.ones(ROWS, dtype=torch.bool)
    predict, gradient = predictor(model), grad(loss_of(model))
    together = vmap(predict, in_dims=(0, 0, None))(params, x, mask)
    gradients = vmap(gradient)(params, x)
    for client in range(CLIENTS):
        own = {name: tensor[client] for name, tensor in params.items()}
        plain = reader(kind, settings, start)
        plain.load_state_dict(own)
        output = plain(x[client])
        torch.testing.assert_close(together[client], output, rtol=0, atol=1e-12)
        plain.zero_grad()
        output.sin().sum().backward()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[name][client], parameter.grad, rtol=0, atol=1e-10)


def test_an_lstm_with_a_projection_is_batched_too():
    model = reader(nn.LSTM, {"proj_size": 2})
    params, x = by_client(model)
    gradients = vmap(grad(loss_of(model)))(params, x)
    own = {name: tensor[1] for name, tensor in params.items()}
    alone = grad(loss_of(model))(own, x[1])
    for name, tensor in alone.items():
        torch.testing.assert_close(gradients[name][1], tensor, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_one_client_at_a_time_runs_torchs_own(kind, monkeypatch):
    def refuse(*arguments, **more):
        raise AssertionError("written out")

    monkeypatch.setattr("glocal.core.recurrent._run", refuse)
    model = reader(kind, {})
    params, x = by_client(model)
    own = {name: tensor[0] for name, tensor in params.items()}
    grad(loss_of(model))(own, x[0])
    with pytest.raises(AssertionError, match="written out"):
        vmap(grad(loss_of(model)))(params, x)


class Text(nn.Module):
    """Classifies a sequence by its last output."""

    def __init__(self, kind, **settings):
        super().__init__()
        self.read = kind(world.FEATURES, 8, batch_first=True, **settings)
        self.head = nn.Linear(8 * (2 if settings.get("bidirectional") else 1), world.CLASSES)

    def forward(self, x):
        words = torch.stack([x, x.flip(1), x.square()], 1)
        return self.head(self.read(words)[0][:, -1])


def train(model, engine):
    """LG-FedAvg in float64."""
    data = world.federation().train
    data = replace(data, examples=data.examples.with_dtype(torch.float64))
    plan = Plan(3, clients_per_round=3, local_epochs=2, batch_size=5)
    algorithm = world.algorithm("lg_fedavg", model.double())
    return world.last(world.simulate(algorithm, data, plan, engine=engine))[0]


@pytest.mark.parametrize("settings", [{}, {"num_layers": 2, "bidirectional": True}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("engine", ["vmapped", pytest.param("workers", marks=pytest.mark.slow)])
def test_a_federation_trains_them_batched_as_one_by_one(kind, settings, engine):
    model = world.seeded(lambda: Text(kind, **settings))
    with warnings.catch_warnings():
        warnings.simplefilter("error", GlocalWarning)  # no fallback
        batched = train(model, engine)
    assert world.gap(batched, train(model, "looped")) < 1e-10


def test_dropout_between_layers_runs_one_client_at_a_time_and_says_why():
    model = world.seeded(lambda: Text(nn.LSTM, num_layers=2, dropout=0.3))
    with pytest.warns(GlocalWarning, match=r"dropout between the layers.*now looped"):
        state = train(model, "vmapped")
    assert world.gap(state, train(model, "looped")) == 0
