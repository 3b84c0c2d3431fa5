"""The same promises on a GPU; skipped where there is none."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import glocal
from glocal.core.data import Examples
from glocal.core.modules import params_of, training_forward
from glocal.core.random import fold_in, uniform
from glocal.core.sampling import Availability
from glocal.datasets import crop_and_flip
from glocal.engines import ExecutionPlan, Executor
from glocal.federate.fitting import Options
from glocal.federate.rounds import Seat, initial_state, simulate, simulate_seeds
from glocal.federate.scenario import Chapter, Scenario, fit_scenario
from tests.support import world
from tests.support.engine_runs import KINDS, every_algorithm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

GPU = torch.device("cuda")
PLAN = glocal.Plan(rounds=3, clients_per_round=4, local_epochs=2, batch_size=5)
every_model = pytest.mark.parametrize("kind", KINDS)
every_engine = pytest.mark.parametrize("engine", ["auto", "vmapped", "graphed"])


@pytest.fixture(autouse=True)
def full_precision():
    """Tests compare to 1e-5: no TF32."""
    torch.backends.cudnn.allow_tf32 = False


def images():
    """A network with a convolution and a pool."""
    body = [
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*body, nn.Linear(4 * 1 * 2, world.CLASSES))


def to_gpu(tree):
    return {name: tensor.to(GPU) for name, tensor in tree.items()}


def to_cpu(tree):
    return {name: tensor.cpu() for name, tensor in tree.items()}


def data_on_gpu(data):
    return replace(data, examples=data.examples.to(GPU))


def inputs_on_gpu(model):
    """Training data and initial weights on the GPU."""
    return data_on_gpu(world.federation().train), to_gpu(params_of(model))


def fit(name, kind, device, *, folder=None, plan=PLAN, **settings):
    model = world.seeded(world.MODELS[kind])
    algorithm = world.algorithm(name, model)
    options = Options(device=device, checkpoint_every=2, validate_every=2, **settings)
    return glocal.fit(algorithm, model, world.federation(), plan, options=options, folder=folder)


def state_on_cpu(result):
    private = result.state.private
    rows = {client: to_cpu(private.of(client)) for client in range(world.NUM_CLIENTS)}
    return result.state._replace(
        shared=to_cpu(result.state.shared), private=type(private)(rows[0], rows)
    )


def last_state(algorithm, data, start, executor, *, plan=PLAN):
    """The state after the last round of one simulation."""
    rounds = simulate_seeds(algorithm, [Seat(plan, data, start)], executor)
    return world.last(rounds)[0][0]


@every_algorithm
@every_model
def test_gpu_and_cpu_train_the_same(name, kind):
    on_gpu = fit(name, kind, "cuda")
    assert all(tensor.is_cuda for tensor in on_gpu.state.shared.values())
    assert world.gap(state_on_cpu(on_gpu), state_on_cpu(fit(name, kind, "cpu"))) < 1e-4


@every_algorithm
@every_model
def test_every_engine_gives_the_numbers_of_the_loop(name, kind):
    """All settings in one test: the loop takes most of the time."""
    looped = state_on_cpu(fit(name, kind, "cuda", engine="looped"))
    for settings in ({}, {"engine": "vmapped"}, {"chunk_size": 2}, {"fused": False}):
        state = state_on_cpu(fit(name, kind, "cuda", **settings))
        assert world.gap(state, looped) < 1e-5, settings


def graphed_plans(kind):
    """The plans with CUDA graphs that `auto` may choose for a model."""
    yield ExecutionPlan("graphed")
    yield ExecutionPlan("graphed", compiled=True)
    if kind == "images":
        yield ExecutionPlan("graphed", conv_as_matmul=True)
        yield ExecutionPlan("graphed", compiled=True, conv_as_matmul=True)
    if kind == "plain":
        yield ExecutionPlan("graphed", fused=True)


@pytest.mark.parametrize("kind", ["plain", "images", "batch norm", "dropout"])
def test_every_kind_of_graph_gives_the_numbers_of_the_loop(kind):
    model = world.seeded({**world.MODELS, "images": images}[kind])
    algorithm = world.algorithm("lg_fedavg", model)
    data, params = inputs_on_gpu(model)
    looped = world.last(simulate(algorithm, params, data, PLAN, engine="looped"))[0]
    for plan in graphed_plans(kind):
        executor = Executor(algorithm.client_update, execution_plan=plan)
        state = last_state(algorithm, data, initial_state(algorithm, params), executor)
        assert executor.execution_plan == plan, executor.describe()
        assert world.gap(looped, state) < 1e-5, plan
        executor.close()


def colour_images():
    """Four clients with images of two channels."""
    torch.manual_seed(0)
    clients = []
    for rows in (12, 7, 12, 9):
        clients.append((torch.randn(rows, 2, 6, 6), torch.randint(0, 3, (rows,))))
    return glocal.FederatedData.from_tensors(clients, test=0.2, validation=0.0)


def test_augmented_images_train_by_fused_steps():
    data = data_on_gpu(colour_images().train)
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    model = nn.Sequential(*layers)
    objective = glocal.with_augmentation(glocal.cross_entropy(model), crop_and_flip(2))
    algorithm = glocal.fedavg(objective, glocal.SGD(0.1, momentum=0.5))
    params = to_gpu(params_of(model))
    looped = world.last(simulate(algorithm, params, data, PLAN, engine="looped"))[0]
    executor = Executor(algorithm.client_update)
    state = last_state(algorithm, data, initial_state(algorithm, params), executor)
    assert executor.execution_plan.fused, executor.describe()
    assert world.gap(looped, state) < 1e-5


def test_a_shape_that_repeats_is_captured():
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    data, params = inputs_on_gpu(model)
    executor = Executor(algorithm.client_update)
    plan = glocal.Plan(8, 6, batch_size=5)
    last_state(algorithm, data, initial_state(algorithm, params), executor, plan=plan)
    rounds = list(executor.engine.graphs.values())
    assert any(each is not None and each.graph is not None for each in rounds)
    assert len(rounds) <= 4


def test_a_model_that_cannot_be_captured_falls_back_with_a_warning():
    model = world.seeded(world.Branching)
    algorithm = world.algorithm("fedavg", model)
    plan = glocal.Plan(2, 3, batch_size=5)
    states, messages = {}, {}
    for engine in ("auto", "looped"):
        options = Options(device="cuda", engine=engine)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            result = glocal.fit(algorithm, model, world.federation(), plan, options=options)
        states[engine] = state_on_cpu(result)
        messages[engine] = [
            str(record.message)
            for record in records
            if issubclass(record.category, glocal.GlocalWarning)
        ]
    assert any("now looped" in message for message in messages["auto"])
    assert world.gap(states["auto"], states["looped"]) < 1e-5


def test_private_rows_without_room_on_the_gpu_wait_on_the_host():
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    data, params = inputs_on_gpu(model)
    plan = glocal.Plan(6, 2, batch_size=5)
    states = []
    for max_gpu_rows in (None, 2):
        start = initial_state(algorithm, params)
        start = start._replace(private=replace(start.private, max_gpu_rows=max_gpu_rows))
        executor = Executor(algorithm.client_update)
        states.append(last_state(algorithm, data, start, executor, plan=plan))
    rows = list(states[1].private.trained.values())
    on_gpu = [all(tensor.is_cuda for tensor in row.values()) for row in rows]
    assert on_gpu == [False] * (len(rows) - 2) + [True] * 2
    assert world.same_bits(*states)


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_lower_precision_is_near_and_not_the_same(precision):
    full = state_on_cpu(fit("fedavg", "plain", "cuda"))
    lower = state_on_cpu(fit("fedavg", "plain", "cuda", precision=precision))
    assert 0 < world.gap(lower, full) < 0.1
    assert not torch.backends.cuda.matmul.allow_tf32


@every_algorithm
def test_the_same_seed_gives_the_same_bits_also_after_a_stop(name, tmp_path):
    short = replace(PLAN, rounds=2)
    whole = fit(name, "batch norm", "cuda", folder=tmp_path / "whole")
    fit(name, "batch norm", "cuda", folder=tmp_path / "parts", plan=short)
    resumed = fit(name, "batch norm", "cuda", folder=tmp_path / "parts")
    assert world.same_bits(whole.state, resumed.state)
    assert world.same_bits(whole.state, fit(name, "batch norm", "cuda").state)


def test_addressed_random_numbers_are_the_same_everywhere():
    on_cpu, on_gpu = (fold_in(torch.tensor(5, device=device), 9) for device in ("cpu", "cuda"))
    assert torch.equal(uniform(on_cpu, (1000,)), uniform(on_gpu, (1000,)).cpu())
    x = torch.randn(8, 3, 9, 9)
    augment = crop_and_flip(2, (1.0, 2.0, 3.0))
    assert torch.equal(augment(x, on_cpu), augment(x.cuda(), on_gpu).cpu())


def test_dropout_drops_the_same_units_everywhere():
    model = world.seeded(world.with_dropout)
    x, mask = torch.randn(4, world.FEATURES), torch.ones(4, dtype=torch.bool)
    params, forward, key = params_of(model), training_forward(model), torch.tensor(3)
    on_cpu, _ = forward(params, x, mask, key)
    on_gpu, _ = forward(to_gpu(params), x.cuda(), mask.cuda(), key.cuda())
    assert torch.allclose(on_cpu, on_gpu.cpu(), atol=1e-5)


def test_the_callers_random_state_is_left_alone():
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    fit("lg_fedavg", "dropout", "cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@every_engine
def test_clients_that_come_and_go_train_the_same(engine):
    """The number of sampled clients changes, and in one round nobody finishes."""
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    clients = tuple(range(world.NUM_CLIENTS))
    availability = [
        Availability.of(range(3)),
        Availability.of([], always=[5]),
        Availability.of([1, 2], dropouts=[1, 2]),
        Availability.of(clients),
    ]
    federation, chapters = world.federation(), []
    for place, available in enumerate(availability):
        chapters.append(Chapter(2 * place, available, (federation,)))
    scenario = Scenario(tuple(chapters), {"all": clients})
    plan = replace(PLAN, rounds=8)

    def run(device, engine):
        options = Options(device=device, engine=engine)
        return fit_scenario(algorithm, model, scenario, plan, options=options).result

    on_cpu, on_gpu = run("cpu", "looped"), run("cuda", engine)
    assert world.gap(state_on_cpu(on_gpu), on_cpu.state) < 1e-4
    assert on_gpu.ledger == on_cpu.ledger


def new_client():
    """The examples of a new client."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(20, world.FEATURES, generator=generator)
    return Examples(x, torch.arange(20) % world.CLASSES)


@every_engine
@pytest.mark.parametrize("name", ["lg_fedavg", "local_only", "fedavg"])
def test_a_new_client_learns_the_same(name, engine):
    join_plan = glocal.JoinPlan(epochs=3, rounds=2, existing_clients=2)
    result = fit(name, "plain", "cpu", engine="looped")
    federation, data = glocal.TrainedFederation.from_result(result), world.federation().train
    on_cpu = glocal.join(
        federation, new_client(), existing_data=data, join_plan=join_plan, engine="looped"
    )
    on_gpu = glocal.join(
        federation._replace(state=federation.state.to(GPU, None)),
        new_client().to(GPU),
        existing_data=data_on_gpu(data),
        join_plan=join_plan,
        engine=engine,
    )
    params = to_cpu(on_gpu.params(federation.algorithm))
    assert world.distance(on_cpu.params(federation.algorithm), params) < 1e-4
    assert on_cpu.ledger == on_gpu.ledger
