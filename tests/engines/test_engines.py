"""What every engine promises to algorithms and models."""

import pytest
import torch

import glocal
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.sampling import Plan
from glocal.datasets.federated import FederatedData
from glocal.engines import EngineConfig
from glocal.federate.fit import build_experiment
from glocal.federate.options import Options
from tests.support import world
from tests.support.engine_runs import (
    EXACT,
    NEAR,
    data_for,
    every_algorithm,
    model_of,
    run,
    train,
)

PROCESSES = EngineConfig("workers", workers=2, fused=False)
SHORT = Plan(4, 3, batch_size=5)


class Drawing(glocal.FedAvg):
    """Adds numbers of torch's own generator to uploads."""

    def client_update(self, message, private, work):
        update = super().client_update(message, private, work)
        noisy = {name: tensor + torch.randn_like(tensor) for name, tensor in update.upload.items()}
        return update._replace(upload=noisy)


def test_an_algorithm_that_draws_from_torchs_own_generator_draws_the_same_on_every_engine():
    task = glocal.classification(model_of("plain"))
    algorithm = Drawing(task, optimizer=glocal.SGD(lr=0.1))
    looped = train(algorithm, "looped")
    for engine in (
        EngineConfig("workers", workers=1),
        EngineConfig("workers", workers=2),
        EngineConfig("workers", fused=False),
    ):
        assert world.gap(looped, train(algorithm, engine)) < NEAR


@every_algorithm
def test_chunks_of_one_give_the_numbers_of_the_loop(name):
    chunks = run(name, "plain", EngineConfig("vmapped", chunk_size=1), dtype=torch.float64)
    assert world.gap(chunks, run(name, "plain", "looped", dtype=torch.float64)) < EXACT


def test_very_unequal_clients_do_not_wait_for_each_other():
    federation = FederatedData.from_tensors(world.clients((400, 3, 4, 5)), test=0.0, validation=0.0)
    plan = Plan(1, 4, batch_size=5)
    double, single = (
        world.algorithm("lg_fedavg", model_of("plain", dtype))
        for dtype in (torch.float64, torch.float32)
    )

    def state(algorithm, engine):
        return train(algorithm, engine, federation=federation, plan=plan)

    for engine in ("vmapped", EngineConfig("workers", fused=False)):
        assert world.gap(state(double, "looped"), state(double, engine), 4) < EXACT
    assert world.gap(state(single, "looped"), state(single, EngineConfig("workers")), 4) < 1e-4


def test_only_clients_that_took_part_take_memory():
    federation = FederatedData.from_tensors(world.clients([6] * 300), test=0.0, validation=0.0)
    algorithm = world.algorithm("lg_fedavg", model_of("plain"))
    plan = Plan(3, 2, batch_size=5)
    [private] = train(algorithm, "auto", federation=federation, plan=plan).private
    stored = list(private.stored.values())
    assert len(stored) <= 6
    storages = {}
    for tree in stored:
        for tensor in tree.values():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) <= 6 * trees.nbytes(private.initial)


def test_bf16_is_near_fp32_and_not_the_same():
    half = run("fedavg", "plain", EngineConfig("vmapped", precision="bf16"))
    full = run("fedavg", "plain", EngineConfig("vmapped", precision="fp32"))
    assert 1e-5 < world.gap(half, full) < 0.1
    assert all(tensor.dtype == torch.float32 for tensor in half.shared.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "warp"}, "engine: name is 'warp'; known: auto"),
        ({"precision": "fp16"}, "engine: precision is 'fp16'; did you mean 'bf16'"),
        ({"workers": 0}, "engine: workers is 0; a whole number from 1 to 1,024"),
        ({"chunk_size": 0}, "engine: chunk_size is 0; a whole number from 1 to"),
    ],
)
def test_a_wrong_engine_is_refused_in_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**settings)


class LastUpload(glocal.FedAvg):
    """The shared tree becomes the last client's upload as it is."""

    def server_update(self, shared, server, uploads):
        return {name: tensor[-1] for name, tensor in uploads.messages.items()}, server


def test_an_upload_may_become_the_shared_tree_as_it_is():
    """Workers overwrite their memory in the next round: the shared tree must not lie there."""
    task = glocal.classification(model_of("plain", torch.float64))
    algorithm = LastUpload(task, optimizer=glocal.SGD(lr=0.1))
    workers = train(algorithm, PROCESSES, plan=SHORT)
    assert world.gap(workers, train(algorithm, "looped", plan=SHORT)) < EXACT


def test_losses_are_valid_after_the_round():
    algorithm, losses = world.algorithm("fedavg", model_of("plain", torch.float64)), []
    for engine in (PROCESSES, "looped"):
        rounds = world.simulate(algorithm, data_for(algorithm), SHORT, engine=engine)
        losses.append(torch.stack([report.losses for _, report in list(rounds)]))
    torch.testing.assert_close(*losses, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("engine", ["looped", "workers"])
def test_a_layer_with_a_frozen_bias_can_be_saved(engine, tmp_path):
    model = model_of("plain")
    model[0].bias.requires_grad_(False)
    algorithm = world.algorithm("lg_fedavg", model)
    experiment = build_experiment(algorithm, world.federation(), plan=Plan(2, 4, batch_size=5))
    options = Options(engine=engine, checkpoint_every=1)
    saved = glocal.Run(experiment, folder=tmp_path, options=options).to_end()
    again = glocal.Run(experiment, folder=tmp_path, options=options).to_end()
    assert world.same_bits(saved.group().state.alone(), again.group().state.alone())


def test_the_client_that_a_step_is_traced_with_draws_the_same_numbers_as_on_its_own():
    federation = FederatedData.from_tensors(
        world.clients((20, 20, 7, 7, 7, 7)), test=0.0, validation=0.0
    )
    task = glocal.classification(world.seeded(world.Noisy).double())
    algorithm = glocal.FedAvg(task, optimizer=glocal.SGD(lr=0.1))
    plan = Plan(2, 6, batch_size=10)

    def state(engine):
        return train(algorithm, engine, federation=federation, plan=plan)

    one, two, three = (state(EngineConfig("workers", workers=number)) for number in (1, 2, 3))
    assert world.same_bits(one, two)
    assert world.same_bits(one, three)
    assert world.gap(state("looped"), one) < EXACT
