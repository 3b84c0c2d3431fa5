"""The same promises on a GPU; skipped where there is none."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import glocal
from glocal import algorithms
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

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

PLAN = glocal.Plan(rounds=3, clients_per_round=4, local_epochs=2, batch_size=5)
every_algorithm = pytest.mark.parametrize("name", algorithms.__all__)
every_model = pytest.mark.parametrize("kind", world.MODELS)


@pytest.fixture(autouse=True)
def full_precision():
    """Tests compare to 1e-5: no TF32."""
    torch.backends.cudnn.allow_tf32 = False


def images():
    """A network with a convolution, a pool and what belongs to them."""
    body = [
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    return nn.Sequential(*body, nn.Linear(4 * 1 * 2, world.CLASSES))


def there(model):
    """Training data and first weights on the GPU."""
    train = world.federation().train
    return replace(train, examples=train.examples.to(torch.device("cuda"))), {
        n: t.cuda() for n, t in params_of(model).items()
    }


def fitted(name, kind, device, *, folder=None, plan=PLAN, **options):
    model = world.seeded(world.MODELS[kind])
    chosen = Options(device=device, checkpoint_every=2, validate_every=2, **options)
    return glocal.fit(
        world.algorithm(name, model), model, world.federation(), plan, options=chosen, folder=folder
    )


def on_cpu(result):
    shared = {name: tensor.cpu() for name, tensor in result.state.shared.items()}
    rows = {
        d: {n: t.cpu() for n, t in result.state.private.of(d).items()} for d in range(world.DEVICES)
    }
    return result.state._replace(shared=shared, private=type(result.state.private)(rows[0], rows))


@every_algorithm
@every_model
def test_gpu_and_cpu_train_the_same(name, kind):
    on_gpu = fitted(name, kind, "cuda")
    assert all(tensor.is_cuda for tensor in on_gpu.state.shared.values())
    assert world.gap(on_cpu(on_gpu), on_cpu(fitted(name, kind, "cpu"))) < 1e-4


@every_algorithm
@every_model
def test_every_engine_equals_one_by_one(name, kind):
    """All of one case together: the loop is what takes time here."""
    one_by_one = on_cpu(fitted(name, kind, "cuda", engine="looped"))
    for options in ({}, {"engine": "vmapped"}, {"chunk": 2}, {"fused": False}):
        assert world.gap(on_cpu(fitted(name, kind, "cuda", **options)), one_by_one) < 1e-5, options


def choices(kind):
    """Forms of a graph that `auto` may settle on: as traced, compiled, with convolutions as products, fused."""
    yield ExecutionPlan("graphed")
    yield ExecutionPlan("graphed", compiled=True)
    if kind == "images":
        yield ExecutionPlan("graphed", conv_as_matmul=True)
        yield ExecutionPlan("graphed", compiled=True, conv_as_matmul=True)
    if kind == "plain":
        yield ExecutionPlan("graphed", fused=True)


@pytest.mark.parametrize("kind", ["plain", "images", "batch norm", "dropout"])
def test_every_form_of_a_graph_equals_one_by_one(kind):
    model = world.seeded({**world.MODELS, "images": images}[kind])
    algorithm = world.algorithm("lg_fedavg", model)
    train, params = there(model)
    one_by_one = world.last(simulate(algorithm, params, train, PLAN, engine="looped"))[0]
    for choice in choices(kind):
        executor = Executor(algorithm.client_update, execution_plan=choice)
        moments = simulate_seeds(
            algorithm, [Seat(PLAN, train, initial_state(algorithm, params))], executor
        )
        state = world.last(moments)[0][0]
        assert executor.execution_plan == choice, executor.describe()
        assert world.gap(one_by_one, state) < 1e-5, choice
        executor.close()


def test_augmented_images_take_the_same_fused_steps():
    torch.manual_seed(0)
    clients = [
        (torch.randn(rows, 2, 6, 6), torch.randint(0, 3, (rows,))) for rows in (12, 7, 12, 9)
    ]
    federation = glocal.from_tensors(clients, test=0.2, validation=0.0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)
    )
    algorithm = glocal.fedavg(
        glocal.with_augmentation(glocal.cross_entropy(model), crop_and_flip(2)),
        glocal.sgd(0.1, momentum=0.5),
    )
    train = replace(federation.train, examples=federation.train.examples.to(torch.device("cuda")))
    params = {name: tensor.cuda() for name, tensor in params_of(model).items()}
    one_by_one = world.last(simulate(algorithm, params, train, PLAN, engine="looped"))[0]
    executor = Executor(algorithm.client_update)
    state = world.last(
        simulate_seeds(algorithm, [Seat(PLAN, train, initial_state(algorithm, params))], executor)
    )[0][0]
    assert executor.execution_plan.fused, executor.describe()
    assert world.gap(one_by_one, state) < 1e-5


def test_a_shape_that_comes_back_is_captured():
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    train, params = there(model)
    executor = Executor(algorithm.client_update)
    list(
        simulate_seeds(
            algorithm,
            [Seat(glocal.Plan(8, 6, batch_size=5), train, initial_state(algorithm, params))],
            executor,
        )
    )
    captured = [
        graph
        for graph in executor.engine.graphs.values()
        if graph is not None and graph.graph is not None
    ]
    assert captured
    assert len(executor.engine.graphs) <= 4


def test_a_model_that_cannot_be_captured_falls_back_in_sight():
    model = world.seeded(world.Branching)
    federation, plan = world.federation(), glocal.Plan(2, 3, batch_size=5)
    results = []
    for engine in ("auto", "looped"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            algorithm = world.algorithm("fedavg", model)
            results.append(
                on_cpu(
                    glocal.fit(
                        algorithm,
                        model,
                        federation,
                        plan,
                        options=Options(device="cuda", engine=engine),
                    )
                )
            )
        lines = [
            str(warning.message)
            for warning in seen
            if issubclass(warning.category, glocal.GlocalWarning)
        ]
        assert (engine == "looped") or any(
            "now one client after the other" in line for line in lines
        )
    assert world.gap(*results) < 1e-5


def test_rows_without_room_wait_on_the_host():
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model)
    train, params = there(model)
    states = []
    for max_gpu_rows in (None, 2):
        start = initial_state(algorithm, params)
        start = start._replace(private=replace(start.private, max_gpu_rows=max_gpu_rows))
        executor = Executor(algorithm.client_update)
        states.append(
            world.last(
                simulate_seeds(
                    algorithm, [Seat(glocal.Plan(6, 2, batch_size=5), train, start)], executor
                )
            )[0][0]
        )
    rows = list(states[1].private.trained.values())
    assert [all(tensor.is_cuda for tensor in row.values()) for row in rows] == [False] * (
        len(rows) - 2
    ) + [True] * 2
    assert world.same_bits(*states)


def test_less_precision_is_near_and_not_the_same():
    full = on_cpu(fitted("fedavg", "plain", "cuda"))
    for precision in ("tf32", "bf16"):
        assert (
            0
            < world.gap(on_cpu(fitted("fedavg", "plain", "cuda", precision=precision)), full)
            < 0.1
        )
    assert not torch.backends.cuda.matmul.allow_tf32


@every_algorithm
def test_the_same_seed_gives_the_same_bits_also_after_a_stop(name, tmp_path):
    whole = fitted(name, "batch norm", "cuda", folder=tmp_path / "whole")
    fitted(
        name,
        "batch norm",
        "cuda",
        folder=tmp_path / "parts",
        plan=glocal.Plan(2, 4, local_epochs=2, batch_size=5),
    )
    resumed = fitted(name, "batch norm", "cuda", folder=tmp_path / "parts")
    assert world.same_bits(whole.state, resumed.state)
    assert world.same_bits(whole.state, fitted(name, "batch norm", "cuda").state)


def test_addressed_numbers_are_the_same_everywhere():
    keys = [fold_in(torch.tensor(5, device=device), 9) for device in ("cpu", "cuda")]
    assert torch.equal(uniform(keys[0], (1000,)), uniform(keys[1], (1000,)).cpu())
    x = torch.randn(8, 3, 9, 9)
    augment = crop_and_flip(2, (1.0, 2.0, 3.0))
    assert torch.equal(augment(x, keys[0]), augment(x.cuda(), keys[1]).cpu())


def test_dropout_drops_the_same_units_everywhere():
    model = world.seeded(world.with_dropout)
    x, mask = torch.randn(4, world.FEATURES), torch.ones(4, dtype=torch.bool)
    params, forward = params_of(model), training_forward(model)
    here, _ = forward(params, x, mask, torch.tensor(3))
    there, _ = forward(
        {n: t.cuda() for n, t in params.items()}, x.cuda(), mask.cuda(), torch.tensor(3).cuda()
    )
    assert torch.allclose(here, there.cpu(), atol=1e-5)


def test_the_callers_random_state_is_left_alone():
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    fitted("lg_fedavg", "dropout", "cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@pytest.mark.parametrize("engine", ["auto", "vmapped", "graphed"])
def test_devices_that_come_and_go_train_the_same(engine):
    """Cohorts of changing size, and a round that nobody finishes."""
    model, attend, fed = world.seeded(world.plain), Availability.of, world.federation()
    attendances = [
        attend(range(3)),
        attend([], always=[5]),
        attend([1, 2], dropouts=[1, 2]),
        attend(range(world.DEVICES)),
    ]
    chapters = tuple(Chapter(2 * place, each, (fed,)) for place, each in enumerate(attendances))
    scenario, plan = (
        Scenario(chapters, {"all": tuple(range(world.DEVICES))}),
        replace(PLAN, rounds=8),
    )
    here, gpu = (
        fit_scenario(
            world.algorithm("lg_fedavg", model),
            model,
            scenario,
            plan,
            options=Options(device=device, engine=how),
        )
        for device, how in (("cpu", "looped"), ("cuda", engine))
    )
    assert world.gap(on_cpu(gpu.result), here.result.state) < 1e-4
    assert gpu.result.ledger == here.result.ledger


@pytest.mark.parametrize("engine", ["auto", "vmapped", "graphed"])
@pytest.mark.parametrize("name", ["lg_fedavg", "local_only", "fedavg"])
def test_a_newcomer_learns_the_same(name, engine):
    gpu, join_plan = torch.device("cuda"), glocal.JoinPlan(epochs=3, rounds=2, existing_clients=2)
    generator = torch.Generator().manual_seed(1)
    train = Examples(
        torch.randn(20, world.FEATURES, generator=generator), torch.arange(20) % world.CLASSES
    )
    trained_federation, existing_data = (
        glocal.TrainedFederation.from_result(fitted(name, "plain", "cpu", engine="looped")),
        world.federation().train,
    )
    there = replace(existing_data, examples=existing_data.examples.to(gpu))
    one = glocal.join(
        trained_federation, train, existing_data=existing_data, join_plan=join_plan, engine="looped"
    )
    other = glocal.join(
        trained_federation._replace(state=trained_federation.state.to(gpu, None)),
        train.to(gpu),
        existing_data=there,
        join_plan=join_plan,
        engine=engine,
    )
    params = {
        name: tensor.cpu() for name, tensor in other.params(trained_federation.algorithm).items()
    }
    assert world.distance(one.params(trained_federation.algorithm), params) < 1e-4
    assert one.ledger == other.ledger
