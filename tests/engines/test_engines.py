"""What every engine promises to algorithms and models."""

import pytest
import torch

import glocal
from glocal.algorithms import fedavg
from glocal.core import trees
from glocal.core.errors import InputError
from glocal.core.modules import params_of
from glocal.core.optimizers import SGD
from glocal.core.sampling import Plan
from glocal.core.training import cross_entropy
from glocal.datasets.federated import FederatedData
from glocal.engines import EngineConfig
from glocal.federate.fitting import Options
from glocal.federate.rounds import simulate
from tests.support import world
from tests.support.engine_runs import every_algorithm, run, train

PROCESSES = EngineConfig("workers", workers=2, fused=False)
SHORT = Plan(4, 3, batch_size=5)


def test_an_algorithm_that_draws_from_torchs_own_generator_draws_the_same_on_every_engine():
    model = world.seeded(world.plain)
    plain = world.algorithm("fedavg", model)

    def noisy_update(shared, private, work):
        update = plain.client_update(shared, private, work)
        noisy = {name: tensor + torch.randn_like(tensor) for name, tensor in update.upload.items()}
        return update._replace(upload=noisy)

    algorithm = plain._replace(client_update=noisy_update)
    looped = train(algorithm, model, "looped")
    for engine in (
        EngineConfig("workers", workers=1),
        EngineConfig("workers", workers=2),
        EngineConfig("workers", fused=False),
    ):
        assert world.gap(looped, train(algorithm, model, engine)) < 1e-5


@every_algorithm
def test_chunks_of_one_give_the_numbers_of_the_loop(name):
    chunks = run(name, "plain", EngineConfig("vmapped", chunk_size=1))
    assert world.gap(chunks, run(name, "plain", "looped")) < 1e-5


def test_very_unequal_clients_do_not_wait_for_each_other():
    federation = FederatedData.from_tensors(world.clients((400, 3, 4, 5)), test=0.0, validation=0.0)
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, num_clients=4)
    plan = Plan(1, 4, batch_size=5)
    looped = train(algorithm, model, "looped", federation=federation, plan=plan)
    for engine in ("vmapped", EngineConfig("workers"), EngineConfig("workers", fused=False)):
        state = train(algorithm, model, engine, federation=federation, plan=plan)
        assert world.gap(looped, state, 4) < 1e-4


def test_only_clients_that_took_part_take_memory():
    federation = FederatedData.from_tensors(world.clients([6] * 300), test=0.0, validation=0.0)
    model = world.seeded(world.plain)
    algorithm = world.algorithm("lg_fedavg", model, num_clients=300)
    plan = Plan(3, 2, batch_size=5)
    state = train(algorithm, model, "auto", federation=federation, plan=plan)
    stored = list(state.private.trained.values())
    assert len(stored) <= 6
    storages = {}
    for tree in stored:
        for tensor in tree.values():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    assert sum(storages.values()) <= 6 * trees.nbytes(state.private.initial)


def test_bf16_is_near_fp32_and_not_the_same():
    half = run("fedavg", "plain", EngineConfig("vmapped", precision="bf16"))
    full = run("fedavg", "plain", EngineConfig("vmapped", precision="fp32"))
    assert 1e-5 < world.gap(half, full) < 0.1
    assert all(tensor.dtype == torch.float32 for tensor in half.shared.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "warp"}, "engine: 'warp' is unknown"),
        ({"precision": "fp16"}, "engine: precision 'fp16' is unknown"),
        ({"workers": 0}, "engine: workers is 0; a whole number from 1 to 1,024"),
        ({"chunk_size": 0}, "engine: chunk_size is 0; a whole number from 1 to"),
    ],
)
def test_a_wrong_engine_is_refused_in_one_line(settings, message):
    with pytest.raises(InputError, match=message):
        EngineConfig(**settings)


def test_an_upload_may_become_the_shared_tree_as_it_is():
    """Workers overwrite their memory in the next round: the shared tree must not lie there."""
    model = world.seeded(world.plain)

    def last_upload(shared, uploads, weights):
        return {name: tensor[-1] for name, tensor in uploads.items()}

    algorithm = world.algorithm("fedavg", model)._replace(aggregate=last_upload)
    workers = train(algorithm, model, PROCESSES, plan=SHORT)
    assert world.gap(workers, train(algorithm, model, "looped", plan=SHORT)) < 1e-5


def test_losses_are_valid_after_the_round():
    model = world.seeded(world.plain)
    losses = []
    for engine in (PROCESSES, "looped"):
        algorithm, data = world.algorithm("fedavg", model), world.federation().train
        rounds = simulate(algorithm, params_of(model), data, SHORT, engine=engine)
        losses.append(torch.stack([report.losses for _, report in rounds]))
    torch.testing.assert_close(*losses)


@pytest.mark.parametrize("engine", ["looped", "workers"])
def test_a_layer_with_a_frozen_bias_can_be_saved(engine, tmp_path):
    model = world.seeded(world.plain)
    model[0].bias.requires_grad_(False)
    algorithm = world.algorithm("lg_fedavg", model)
    options = Options(engine=engine, checkpoint_every=1)
    plan = Plan(2, 4, batch_size=5)
    glocal.fit(algorithm, model, world.federation(), plan, options=options, folder=tmp_path)


def test_the_client_that_a_step_is_traced_with_draws_the_same_numbers_as_on_its_own():
    federation = FederatedData.from_tensors(
        world.clients((20, 20, 7, 7, 7, 7)), test=0.0, validation=0.0
    )
    model = world.seeded(world.Noisy)
    algorithm = fedavg(cross_entropy(model), SGD(0.1))
    plan = Plan(2, 6, batch_size=10)

    def state(engine):
        return train(algorithm, model, engine, federation=federation, plan=plan)

    one, two, three = (state(EngineConfig("workers", workers=number)) for number in (1, 2, 3))
    assert world.same_bits(one, two)
    assert world.same_bits(one, three)
    assert world.gap(state("looped"), one) < 1e-5
