"""Any module as a pure function: masked, keyed, and without state of its own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import glocal
from glocal.core import trees
from glocal.core.errors import GlocalWarning, InputError
from glocal.core.modules import params_of, predictor, state_dict, trainable_names, training_forward
from glocal.core.optimizers import SGD
from glocal.core.random import fold_in, uniform
from glocal.core.sampling import Plan
from glocal.datasets.federated import FederatedData
from glocal.engines import EngineConfig
from tests.support import world

KEY = torch.tensor(7)
NORMS = [
    (nn.BatchNorm1d(5), (6, 5)),
    (nn.BatchNorm1d(5), (6, 5, 3)),
    (nn.BatchNorm2d(5, momentum=None), (6, 5, 4, 3)),
    (nn.BatchNorm2d(5, affine=False), (6, 5, 4, 3)),
    (nn.BatchNorm1d(5, track_running_stats=False), (6, 5)),
]


def train(algorithm, plan, data=None, *, engine="auto"):
    """The state after the last round."""
    own = data or world.federation().train
    return world.last(world.simulate(algorithm, own, plan, engine=engine))[0]


def fedavg(model, **settings):
    return glocal.FedAvg(glocal.classification(model), optimizer=SGD(lr=0.1, **settings))


@pytest.mark.parametrize(("norm", "shape"), NORMS)
def test_batch_norm_is_torchs_own_when_nothing_is_padding(norm, shape):
    model = nn.Sequential(nn.Identity(), norm)
    x, mask = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0)),
        torch.ones(shape[0], dtype=torch.bool),
    )
    params = params_of(model)
    output, buffers = training_forward(model)(params, x, mask, KEY)
    evaluated = predictor(model)({**params, **buffers}, x, mask)
    expected = model.train()(x)
    assert torch.allclose(output, expected, atol=1e-5)
    assert world.distance(buffers, dict(model.named_buffers())) < 1e-6
    assert torch.allclose(evaluated, model.eval()(x), atol=1e-5)


@pytest.mark.parametrize(("norm", "shape"), NORMS)
def test_batch_norm_sees_only_real_rows(norm, shape):
    model = nn.Sequential(nn.Identity(), norm)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    junk = torch.full((3, *shape[1:]), 1e3)
    forward, params = training_forward(model), params_of(model)
    mask = torch.cat([torch.ones(shape[0], dtype=torch.bool), torch.zeros(3, dtype=torch.bool)])
    alone = forward(params, x, mask[: shape[0]], KEY)
    padded = forward(params, torch.cat([x, junk]), mask, KEY)
    assert torch.allclose(alone[0], padded[0][: shape[0]], atol=1e-5)
    assert world.distance(alone[1], padded[1]) < 1e-5


def test_a_step_leaves_the_module_and_the_given_buffers_alone():
    model = world.seeded(world.with_batch_norm)
    before, params = params_of(model), params_of(model)
    training_forward(model)(
        params, torch.randn(4, world.FEATURES), torch.ones(4, dtype=torch.bool), KEY
    )
    assert trees.same_bits(params, before)
    assert trees.same_bits(params_of(model), before)


def shifted(*shifts):
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(40, world.FEATURES, generator=generator) for _ in shifts]
    return [
        (x + shift, torch.zeros(40, dtype=torch.long))
        for x, shift in zip(noise, shifts, strict=True)
    ]


def test_running_statistics_never_leak_from_one_client_to_the_next():
    """Clients with very different data: each private mean follows its own data only."""
    clients = shifted(0, 100, -100)
    model = nn.Sequential(nn.BatchNorm1d(world.FEATURES), nn.Linear(world.FEATURES, world.CLASSES))
    task = glocal.classification(model)
    algorithm = glocal.LGFedAvg(task, optimizer=SGD(lr=1e-3), local="0")
    data = FederatedData.from_tensors(clients, test=0.0, validation=0.0).train
    state = train(algorithm, Plan(rounds=20, clients_per_round=3), data)
    means = [state.private[0].of(client)["0.running_mean"].mean().item() for client in range(3)]
    assert means == pytest.approx([0, 100, -100], abs=3)
    assert not any("running" in name for name in state.shared)


def test_shared_batch_norm_statistics_are_averaged():
    clients = shifted(0, 100)
    model = nn.Sequential(nn.BatchNorm1d(world.FEATURES), nn.Linear(world.FEATURES, world.CLASSES))
    data = FederatedData.from_tensors(clients, test=0.0, validation=0.0).train
    algorithm = glocal.FedAvg(glocal.classification(model), optimizer=SGD(lr=1e-3))
    state = train(algorithm, Plan(rounds=20, clients_per_round=2), data)
    assert state.shared["0.running_mean"].mean().item() == pytest.approx(50, abs=3)
    assert state.shared["0.num_batches_tracked"].item() == 80


def test_dropout_drops_at_its_rate_and_preserves_the_mean():
    model = nn.Dropout(0.25)
    x = torch.ones(200, 100)
    output, _ = training_forward(model)({}, x, torch.ones(200, dtype=torch.bool), KEY)
    assert (output == 0).double().mean().item() == pytest.approx(0.25, abs=0.01)
    assert output.mean().item() == pytest.approx(1, abs=0.02)
    assert torch.equal(predictor(model)({}, x, torch.ones(200, dtype=torch.bool)), x)


def test_dropout_of_channels_drops_whole_channels():
    output, _ = training_forward(nn.Dropout2d(0.5))(
        {}, torch.ones(20, 10, 3, 3), torch.ones(20, dtype=torch.bool), KEY
    )
    per_channel = output.flatten(2)
    assert bool(((per_channel == 0).all(-1) | (per_channel == 2).all(-1)).all())
    assert 0 < (per_channel == 0).double().mean().item() < 1


def test_two_dropout_layers_and_two_steps_differ():
    model = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))
    mask, x = torch.ones(50, dtype=torch.bool), torch.ones(50, 50)
    both, _ = training_forward(model)({}, x, mask, KEY)
    other, _ = training_forward(model)({}, x, mask, fold_in(KEY, 1))
    assert (both != 0).double().mean().item() == pytest.approx(
        0.25, abs=0.05
    )  # one pattern twice would leave half
    assert not torch.equal(both, other)


def test_keyed_numbers_are_uniform_and_uncorrelated():
    draws = torch.stack([uniform(fold_in(torch.tensor(seed), 3), (1000,)) for seed in range(50)])
    assert draws.mean().item() == pytest.approx(0.5, abs=0.01)
    assert draws.var().item() == pytest.approx(1 / 12, abs=0.005)
    assert torch.corrcoef(draws).fill_diagonal_(0).abs().max().item() < 0.2
    assert draws.min() >= 0
    assert draws.max() < 1


def test_frozen_parameters_stay_as_they_are():
    model = world.seeded(world.plain)
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in trainable_names(model)
    before = model[0].weight.clone()
    state = train(fedavg(model, weight_decay=0.1), Plan(2, 3))
    assert "0.weight" not in state.shared
    assert torch.equal(before, model[0].weight)
    assert not torch.allclose(state.shared["2.weight"], model[2].weight, atol=1e-3)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (
            nn.Linear(world.FEATURES, world.FEATURES),
            nn.Linear(world.FEATURES, world.FEATURES),
        )
        self.second.weight = self.first.weight
        self.head = nn.Linear(world.FEATURES, world.CLASSES)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x):
        return self.head(self.second(torch.relu(self.first(x))) / self.scale)


def test_tied_weights_train_as_one_and_load_back_under_both_names():
    model = world.seeded(Tied)
    state = train(fedavg(model), Plan(2, 3))
    loaded = state_dict(model, state.shared)
    assert torch.equal(loaded["first.weight"], loaded["second.weight"])
    assert not torch.equal(loaded["first.weight"], model.first.weight)
    assert "scale" not in loaded
    world.seeded(Tied, 1).load_state_dict(loaded)


class DataDependent(nn.Module):
    """Branches on a value: it cannot be batched over clients."""

    def __init__(self):
        super().__init__()
        self.body = world.plain()

    def forward(self, x):
        return self.body(x) if float(x.sum()) > -1e9 else self.body(-x)


def test_a_module_that_cannot_be_batched_runs_one_by_one_with_one_visible_line():
    model = world.seeded(DataDependent).double()
    plain = world.seeded(world.plain).double()
    data = world.federation().train
    data = replace(data, examples=data.examples.with_dtype(torch.float64))
    with pytest.warns(GlocalWarning, match="data-dependent control flow.*now looped") as seen:
        state = train(fedavg(model, momentum=0.5), Plan(3, 4), data)
    assert len(seen) == 1
    same = train(fedavg(plain, momentum=0.5), Plan(3, 4), data)
    assert world.distance(trees.with_prefix("body.", same.shared), state.shared) < 1e-12


def test_a_mistake_in_the_model_is_not_hidden_by_the_fall_back():
    model = nn.Linear(world.FEATURES + 1, world.CLASSES)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train(fedavg(model), Plan(1, 2))


class Doubled(torch.autograd.Function):
    """A function of a user's with gradients, and without a rule for `vmap`."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class Unbatchable(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(world.FEATURES, world.CLASSES)

    def forward(self, x):
        return Doubled.apply(self.head(x))


def test_a_network_without_a_batched_rule_runs_one_by_one_with_one_visible_line():
    algorithm = fedavg(world.seeded(Unbatchable))
    with pytest.warns(GlocalWarning, match="now looped") as seen:
        batched = train(algorithm, Plan(2, 3))
    assert len(seen) == 1
    assert world.same_bits(batched, train(algorithm, Plan(2, 3), engine="looped"))


def test_a_module_without_shapes_is_refused_by_name():
    with pytest.raises(
        InputError, match=r"'0.weight' has no shape yet \(a lazy layer\); run one batch"
    ):
        params_of(nn.Sequential(nn.LazyLinear(3)))


def test_statistics_over_padding_are_refused_by_name():
    with pytest.raises(InputError, match="'1' tracks running statistics over padded rows"):
        predictor(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True)))


def test_one_dropout_used_twice_drops_other_units_the_second_time():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            return self.drop(self.drop(x))

    output, _ = training_forward(Twice())(
        {}, torch.ones(100, 100), torch.ones(100, dtype=torch.bool), KEY
    )
    assert (output != 0).double().mean().item() == pytest.approx(0.25, abs=0.02)


def test_a_layer_in_two_places_gets_its_mask_and_key_in_both():
    norm, drop = nn.BatchNorm1d(4), nn.Dropout(0.3)
    model = nn.Sequential(nn.Linear(4, 4), norm, drop, nn.Linear(4, 4), norm, drop)
    forward, params = training_forward(model), params_of(model)
    x, junk = torch.randn(5, 4), torch.full((2, 4), 1e3)
    mask = torch.tensor([True] * 5 + [False] * 2)
    alone, padded = (
        forward(params, x, mask[:5], KEY),
        forward(params, torch.cat([x, junk]), mask, KEY),
    )
    assert torch.allclose(alone[0], padded[0][:5], atol=1e-4)
    assert world.distance(alone[1], padded[1]) < 1e-4


def test_one_row_has_no_variance_to_track():
    model = nn.BatchNorm1d(3)
    _, buffers = training_forward(model)(
        params_of(model), torch.randn(1, 3), torch.ones(1, dtype=torch.bool), KEY
    )
    assert buffers["running_var"].tolist() == [1, 1, 1]


class Counting(nn.Module):
    """Writes into a buffer at every call, also in evaluation."""

    def __init__(self):
        super().__init__()
        self.body = world.plain()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.body(x)


def test_evaluation_never_writes_into_the_federations_state():
    algorithm = fedavg(world.seeded(Counting))
    seen = []
    for every in (1, 4):
        result = glocal.fit(
            algorithm,
            world.federation(),
            rounds=4,
            clients_per_round=3,
            evaluation=glocal.Evaluation(every=every),
            progress=False,
        )
        seen.append(result.group().state.shared["seen"])
    assert torch.equal(*seen)
    assert seen[0] > 0


def test_torchs_own_randomness_does_not_depend_on_other_clients_in_the_batch():
    algorithm = fedavg(world.seeded(world.Noisy))
    engines = [EngineConfig("vmapped", chunk_size=size) for size in (None, 1, 3)]
    with pytest.warns(GlocalWarning, match="random operation"):
        states = [train(algorithm, Plan(3, 4), engine=engine) for engine in engines]
    assert world.same_bits(states[0], states[1])
    assert world.same_bits(states[0], states[2])


class Doubling(nn.BatchNorm1d):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(Doubling(3)), "'0' is a batch norm of your own"),
        (
            nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)),
            "'0' rewrites its weights whenever it is used",
        ),
        (nn.ReLU(), "it has no parameters"),
    ],
)
def test_a_model_that_cannot_be_federated_correctly_is_refused(model, message):
    with pytest.raises(InputError, match=message):
        params_of(model)


def test_half_precision_statistics_do_not_overflow():
    model = nn.BatchNorm2d(2).half()
    x = torch.full((64, 2, 40, 40), 3.0, dtype=torch.float16)
    output, buffers = training_forward(model)(
        params_of(model), x, torch.ones(64, dtype=torch.bool), KEY
    )
    assert output.dtype == torch.float16
    assert bool(torch.isfinite(output).all())
    assert buffers["running_mean"][0].item() == pytest.approx(0.3, abs=1e-3)
