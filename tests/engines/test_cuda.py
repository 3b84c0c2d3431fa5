"""The same promises on a GPU; skipped where there is none."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import glocal
from glocal.core import trees
from glocal.core.data import Examples
from glocal.core.modules import params_of, training_forward
from glocal.core.random import fold_in, uniform
from glocal.core.sampling import Availability
from glocal.core.store import GroupState
from glocal.datasets import crop_and_flip
from glocal.engines import ExecutionPlan, Executor
from glocal.federate import rounds
from glocal.federate.fit import build_experiment
from glocal.federate.options import Options
from glocal.federate.rounds import build_executors, client_step
from tests.support import world
from tests.support.engine_runs import EXACT, KINDS, NEAR, data_for, every_algorithm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

GPU, CPU = torch.device("cuda"), torch.device("cpu")
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


def on_gpu(data):
    return replace(data, examples=data.examples.to(GPU))


def set_up(algorithm, *, data=None, plan=PLAN, uplink=None):
    """A replica on the GPU, and its state before the first round."""
    params = trees.to(algorithm.task.initial_params(), GPU)
    train = on_gpu(data or data_for(algorithm))
    return world.set_up(algorithm, train, plan, params=params, uplink=uplink)


def last_state(replica, state, executor):
    """The state after the last round, by an executor that stays open."""
    indices = world.plan_rounds(replica.plan)
    [(state, _)] = world.last(rounds.simulate([replica], [state], [executor], indices))
    return state


def looped(replica, state):
    [executor] = build_executors(replica.groups, "looped", num_calls=1)
    return last_state(replica, state, executor)


def executor_of(replica, **settings):
    [group] = replica.groups
    return Executor(client_step(group.algorithm, group.wire), **settings)


def fit(name, kind, device, *, folder=None, plan=PLAN, uplink=None, **settings):
    """The result of an algorithm by name on a model by name."""
    algorithm = world.algorithm(name, world.seeded(world.MODELS[kind]))
    evaluation = glocal.Evaluation(every=2)
    experiment = build_experiment(
        algorithm, world.federation(), plan=plan, evaluation=evaluation, uplink=uplink
    )
    options = Options(device=device, checkpoint_every=2, **settings)
    return glocal.Run(experiment, folder=folder, options=options).to_end().group()


def state_on_cpu(result):
    """All clients' trees on the CPU, as a federation's state."""
    return moved(result.state, CPU).alone()


def moved(state, device):
    private, profiles = state.private.to(device, None), state.profiles.to(device, None)
    shared, server = trees.to(state.shared, device), trees.to(state.server, device)
    return GroupState(shared, private, server, profiles)


@every_algorithm
@every_model
def test_gpu_and_cpu_train_the_same(name, kind):
    result = fit(name, kind, "cuda")
    assert all(tensor.is_cuda for tensor in result.state.shared.values())
    assert world.gap(state_on_cpu(result), state_on_cpu(fit(name, kind, "cpu"))) < 1e-4


@every_algorithm
@every_model
def test_every_engine_gives_the_numbers_of_the_loop(name, kind):
    """All settings in one test: the loop takes most of the time."""
    looped = state_on_cpu(fit(name, kind, "cuda", engine="looped"))
    for settings in ({}, {"engine": "vmapped"}, {"chunk_size": 2}, {"fused": False}):
        state = state_on_cpu(fit(name, kind, "cuda", **settings))
        assert world.gap(state, looped) < NEAR, settings


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
    """In float64, which fused steps do not support."""
    for plan in graphed_plans(kind):
        dtype, tolerance = (torch.float32, NEAR) if plan.fused else (torch.float64, EXACT)
        model = world.seeded({**world.MODELS, "images": images}[kind]).to(dtype)
        replica, start = set_up(world.algorithm("lg_fedavg", model))
        executor = executor_of(replica, execution_plan=plan)
        state = last_state(replica, start, executor)
        assert executor.execution_plan == plan, executor.describe()
        assert world.gap(looped(replica, start), state) < tolerance, plan
        executor.close()


def colour_images():
    """Four clients with images of two channels."""
    torch.manual_seed(0)
    clients = []
    for rows in (12, 7, 12, 9):
        clients.append((torch.randn(rows, 2, 6, 6), torch.randint(0, 3, (rows,))))
    return glocal.FederatedData.from_tensors(clients, test=0.2, validation=0.0)


def test_augmented_images_train_by_fused_steps():
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 3)]
    task = glocal.classification(nn.Sequential(*layers), augment=crop_and_flip(2))
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1, momentum=0.5))
    replica, start = set_up(algorithm, data=colour_images().train)
    executor = executor_of(replica)
    state = last_state(replica, start, executor)
    assert executor.execution_plan.fused, executor.describe()
    assert world.gap(looped(replica, start), state, 4) < NEAR


def test_a_shape_that_repeats_is_captured():
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    replica, start = set_up(algorithm, plan=glocal.Plan(8, 6, batch_size=5))
    executor = executor_of(replica)
    last_state(replica, start, executor)
    captured = list(executor.engine.graphs.values())
    assert any(each is not None and each.graph is not None for each in captured)
    assert len(captured) <= 4


def test_a_model_that_cannot_be_captured_falls_back_with_a_warning():
    algorithm = world.algorithm("fedavg", world.seeded(world.Branching))
    plan = {"rounds": 2, "clients_per_round": 3, "batch_size": 5, "progress": False}
    states, messages = {}, {}
    for engine in ("auto", "looped"):
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            result = glocal.fit(algorithm, world.federation(), **plan, device="cuda", engine=engine)
        states[engine] = state_on_cpu(result.group())
        messages[engine] = [
            str(record.message)
            for record in records
            if issubclass(record.category, glocal.GlocalWarning)
        ]
    assert any("now looped" in message for message in messages["auto"])
    assert world.gap(states["auto"], states["looped"]) < NEAR


def test_private_rows_without_room_on_the_gpu_wait_on_the_host():
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    replica, fresh = set_up(algorithm, plan=glocal.Plan(6, 2, batch_size=5))
    states = []
    for max_gpu_rows in (None, 2):
        [private] = fresh.private
        start = fresh._replace(private=(replace(private, max_gpu_rows=max_gpu_rows),))
        states.append(last_state(replica, start, executor_of(replica)))
    rows = list(states[1].private[0].stored.values())
    places = [all(tensor.is_cuda for tensor in row.values()) for row in rows]
    assert places == [False] * (len(rows) - 2) + [True] * 2
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
    again = fit(name, "batch norm", "cuda")
    assert world.same_bits(whole.state.alone(), resumed.state.alone())
    assert world.same_bits(whole.state.alone(), again.state.alone())


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
    there, _ = forward(trees.to(params, GPU), x.cuda(), mask.cuda(), key.cuda())
    assert torch.allclose(on_cpu, there.cpu(), atol=1e-5)


def test_the_callers_random_state_is_left_alone():
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    fit("lg_fedavg", "dropout", "cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())


@every_engine
def test_clients_that_come_and_go_train_the_same(engine):
    """The number of sampled clients changes, and in one round nobody finishes."""
    algorithm = world.algorithm("lg_fedavg", world.seeded(world.plain))
    clients = tuple(range(world.NUM_CLIENTS))
    availability = [
        Availability.of(range(3)),
        Availability.of([], always=[5]),
        Availability.of([1, 2], dropouts=[1, 2]),
        Availability.of(clients),
    ]
    phases = [glocal.Phase(2 * place, each) for place, each in enumerate(availability)]
    experiment = glocal.Experiment.of(
        algorithm,
        world.federation(),
        replace(PLAN, rounds=8),
        phases=tuple(phases),
        subgroups={"all": clients},
    )

    def run(device, engine):
        options = Options(device=device, engine=engine)
        return glocal.Run(experiment, options=options).to_end().group()

    on_cpu, there = run("cpu", "looped"), run("cuda", engine)
    assert world.gap(state_on_cpu(there), on_cpu.state.alone()) < 1e-4
    assert there.ledger == on_cpu.ledger


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
    there = glocal.join(
        federation._replace(state=moved(federation.state, GPU)),
        new_client().to(GPU),
        existing_data=on_gpu(data),
        join_plan=join_plan,
        engine=engine,
    )
    params = trees.to(there.params(federation.algorithm), CPU)
    assert world.distance(on_cpu.params(federation.algorithm), params) < 1e-4
    assert on_cpu.ledger == there.ledger


CODECS = {
    "clip and noise": glocal.chain(glocal.Clip(0.1), glocal.Noise(0.01)),
    "half": glocal.Half(),
    "int8": glocal.Int8(),
    "int4": glocal.Int4(),
    "top-k": glocal.TopK(0.1),
    "all": glocal.chain(glocal.Clip(1.0), glocal.TopK(0.5), glocal.Int8()),
}


@pytest.mark.parametrize("codec", CODECS)
@every_engine
def test_uploads_are_encoded_the_same_on_a_gpu(codec, engine):
    """A codec may round a number that differs in its last bit to another level."""
    on_cpu = fit("lg_fedavg", "plain", "cpu", uplink=CODECS[codec], engine="looped")
    there = fit("lg_fedavg", "plain", "cuda", uplink=CODECS[codec], engine=engine)
    assert there.ledger == on_cpu.ledger
    assert world.distance(trees.to(there.state.shared, CPU), on_cpu.state.shared) < 0.02


class Breaking(glocal.FedAvg):
    """One client's upload is NaN in every round."""

    def client_update(self, message, private, work):
        update = super().client_update(message, private, work)
        is_broken = work.pad_row == BROKEN_ROW
        broken = {
            name: torch.where(is_broken, torch.nan, tensor)
            for name, tensor in update.upload.items()
        }
        return update._replace(upload=broken)


BROKEN_ROW = -1


def test_a_client_with_nan_is_dropped_without_waiting_for_the_gpu(monkeypatch):
    """The result is that of a CPU, where single uploads are searched."""
    plan = glocal.Plan(1, 6, batch_size=40)
    task = glocal.classification(world.seeded(world.plain).double())
    algorithm = Breaking(task, optimizer=glocal.SGD(lr=0.1), local="0")
    data = data_for(algorithm)
    on_cpu, start = world.set_up(algorithm, data, plan)
    first = rounds.assign(on_cpu, start, 0, [2], 0)[0].order[0, 0, 0]
    monkeypatch.setattr(f"{__name__}.BROKEN_ROW", int(first))
    [executor] = build_executors(on_cpu.groups, "looped", num_calls=1)
    [(state, report)] = rounds.run_round([on_cpu], [start], [executor], 0)
    replica, start_there = set_up(algorithm, plan=plan)
    there = last_state(replica, start_there, executor_of(replica, engine="vmapped"))
    assert report.dropped == [2]
    assert world.gap(moved(there.group(), CPU).alone(), state) < EXACT
    own = there.private[0].of(2)
    assert trees.same_bits(own, start_there.private[0].initial)
