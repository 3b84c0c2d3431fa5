"""The same promises on a GPU; skipped where there is none."""

import pytest
import torch

import glocal
import world
from glocal import algorithms
from glocal.data import crop_and_flip
from glocal.fitting import Options
from glocal.modules import params_of, training_forward
from glocal.noise import fold, uniform

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

PLAN = glocal.Plan(rounds=5, cohort=4, epochs=2, batch=5)
every_algorithm = pytest.mark.parametrize("name", algorithms.__all__)
every_model = pytest.mark.parametrize("kind", world.MODELS)


@pytest.fixture(autouse=True)
def full_precision():
    """Tests compare to 1e-5: no TF32."""
    torch.backends.cudnn.allow_tf32 = False


def fitted(name, kind, device, *, folder=None, plan=PLAN, **options):
    model = world.seeded(world.MODELS[kind])
    chosen = Options(device=device, keep_every=2, validate_every=2, **options)
    return glocal.fit(world.algorithm(name, model), model, world.federation(), plan, options=chosen, folder=folder)


def on_cpu(result):
    shared = {name: tensor.cpu() for name, tensor in result.state.shared.items()}
    rows = {d: {n: t.cpu() for n, t in result.state.private.of(d).items()} for d in range(world.DEVICES)}
    return result.state._replace(shared=shared, private=type(result.state.private)(rows[0], rows))


@every_algorithm
@every_model
def test_gpu_and_cpu_train_the_same(name, kind):
    on_gpu = fitted(name, kind, "cuda")
    assert all(tensor.is_cuda for tensor in on_gpu.state.shared.values())
    assert world.gap(on_cpu(on_gpu), on_cpu(fitted(name, kind, "cpu"))) < 1e-4


@every_algorithm
@every_model
def test_batched_equals_one_by_one(name, kind):
    batched = fitted(name, kind, "cuda", engine="vmapped")
    assert world.gap(on_cpu(batched), on_cpu(fitted(name, kind, "cuda", engine="looped"))) < 1e-5
    assert world.gap(on_cpu(batched), on_cpu(fitted(name, kind, "cuda", chunk=2))) < 1e-5


@every_algorithm
def test_the_same_seed_gives_the_same_bits_also_after_a_stop(name, tmp_path):
    whole = fitted(name, "batch norm", "cuda", folder=tmp_path / "whole")
    fitted(name, "batch norm", "cuda", folder=tmp_path / "parts", plan=glocal.Plan(2, 4, epochs=2, batch=5))
    resumed = fitted(name, "batch norm", "cuda", folder=tmp_path / "parts")
    assert world.same_bits(whole.state, resumed.state)
    assert world.same_bits(whole.state, fitted(name, "batch norm", "cuda").state)


def test_addressed_numbers_are_the_same_everywhere():
    keys = [fold(torch.tensor(5, device=device), 9) for device in ("cpu", "cuda")]
    assert torch.equal(uniform(keys[0], (1000,)), uniform(keys[1], (1000,)).cpu())
    x = torch.randn(8, 3, 9, 9)
    augment = crop_and_flip(2, (1.0, 2.0, 3.0))
    assert torch.equal(augment(x, keys[0]), augment(x.cuda(), keys[1]).cpu())


def test_dropout_drops_the_same_units_everywhere():
    model = world.seeded(world.with_dropout)
    x, mask = torch.randn(4, world.FEATURES), torch.ones(4, dtype=torch.bool)
    params, forward = params_of(model), training_forward(model)
    here, _ = forward(params, x, mask, torch.tensor(3))
    there, _ = forward({n: t.cuda() for n, t in params.items()}, x.cuda(), mask.cuda(), torch.tensor(3).cuda())
    assert torch.allclose(here, there.cpu(), atol=1e-5)


def test_the_callers_random_state_is_left_alone():
    torch.cuda.manual_seed(1)
    before = torch.cuda.get_rng_state()
    fitted("lg_fedavg", "dropout", "cuda")
    assert torch.equal(before, torch.cuda.get_rng_state())
